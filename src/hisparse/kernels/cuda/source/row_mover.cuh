// Moves rows of ROW_BYTES, up to ROWS_PER_WARP per warp at a time, in two halves: begin() may run before the
// destination is known. The first ROWS_PER_WARP lanes each own one row; all lanes of a warp call both halves. In the
// first round, any thread may start() the read of a row instead, whose owner then calls adopt() in place of begin().
//
// USE_BULK: the bulk copy engine (9.0 and later) brings a row to shared memory in the background, so that the time a
// read from host memory takes passes while the block plans. Otherwise a warp copies with 16-byte loads in finish().
#pragma once
#include "base.cuh"

constexpr i32 ROWS_PER_ROUND = ROWS_PER_WARP * WARPS;
static_assert(ROW_BYTES % 16 == 0 && ROWS_PER_WARP >= 1 && ROWS_PER_WARP <= WARP, "rows are 16-byte words");

// The row that this lane owns in a round; rounds visit 0, 1, 2, … and few rows spread over all warps. -1 in lanes
// that own none.
__device__ __forceinline__ i64 owned_row(i64 round) {
  if (lane_id() >= ROWS_PER_WARP) return -1;
  return (round * ROWS_PER_WARP + lane_id()) * WARPS + warp_id();
}

// Where the row of index `index` of the first round is under way.
__device__ __forceinline__ i32 place_of(i32 index) { return index % WARPS * ROWS_PER_WARP + index / WARPS; }

#if USE_BULK

// A stage starts on a line, like a row in host memory: packed stages moved 656-byte rows at 30 instead of 48 GB/s.
constexpr i32 STAGE_BYTES = (ROW_BYTES + 127) / 128 * 128;
constexpr i32 ALL_STAGES_BYTES = ROWS_PER_ROUND * STAGE_BYTES;

class RowMover {
 public:
  // All threads; a barrier of the block must follow before the first begin().
  __device__ __forceinline__ explicit RowMover(char* stages) : phase_(0), in_flight_(false) {
    __shared__ u64 barriers[ROWS_PER_ROUND];
    const i32 own = warp_id() * ROWS_PER_WARP + min(lane_id(), ROWS_PER_WARP - 1);
    barriers_ = static_cast<u32>(__cvta_generic_to_shared(barriers));
    stages_ = static_cast<u32>(__cvta_generic_to_shared(stages));
    barrier_ = barriers_ + own * 8;
    stage_ = stages_ + own * STAGE_BYTES;
    if (lane_id() < ROWS_PER_WARP) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
  }

  __device__ __forceinline__ void begin(const char* source) {
    in_flight_ = source != nullptr;
    if (in_flight_) read(barrier_, stage_, source);
  }

  __device__ __forceinline__ void start(i32 index, const char* source) const {
    if (index >= ROWS_PER_ROUND) return;
    read(barriers_ + place_of(index) * 8, stages_ + place_of(index) * STAGE_BYTES, source);
  }

  __device__ __forceinline__ void adopt(const char* source) { in_flight_ = source != nullptr; }

  // A null destination drops the row.
  __device__ __forceinline__ void finish(char* destination) {
    if (in_flight_) {
      wait();
      if (destination != nullptr) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                         __cvta_generic_to_global(destination)),
                     "r"(stage_), "r"(ROW_BYTES)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the stage may be filled again
      }
      in_flight_ = false;
    }
    __syncwarp();
  }

  // Waits until all rows of this thread are written.
  __device__ __forceinline__ void drain() const { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

 private:
  static __device__ __forceinline__ void read(u32 barrier, u32 stage, const char* source) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(ROW_BYTES) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage),
        "l"(__cvta_generic_to_global(source)), "r"(ROW_BYTES), "r"(barrier)
        : "memory");
  }

  __device__ __forceinline__ void wait() {
    u32 done = 0;
    while (!done) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(barrier_), "r"(phase_)
          : "memory");
    }
    phase_ ^= 1u;
  }

  u32 barriers_;  // of the block
  u32 stages_;
  u32 barrier_;  // of this lane's row
  u32 stage_;
  u32 phase_;
  bool in_flight_;
};

#else

constexpr i32 ALL_STAGES_BYTES = 0;

class RowMover {
 public:
  __device__ __forceinline__ explicit RowMover(char*) : source_(nullptr) {}

  __device__ __forceinline__ void begin(const char* source) { source_ = source; }

  __device__ __forceinline__ void start(i32, const char*) const {}

  __device__ __forceinline__ void adopt(const char* source) { source_ = source; }

  __device__ __forceinline__ void finish(char* destination) {
    constexpr i32 ROW_WORDS = ROW_BYTES / 16;
    constexpr i32 ROUND_WORDS = ROW_WORDS * ROWS_PER_WARP;
    constexpr i32 AHEAD = 4;  // loads in flight a lane
#pragma unroll 1
    for (i32 base = 0; base < ROUND_WORDS; base += WARP * AHEAD) {
      uint4 words[AHEAD];
      char* targets[AHEAD];
#pragma unroll
      for (i32 i = 0; i < AHEAD; ++i) {
        const i32 word = base + i * WARP + lane_id();
        const i32 owner = min(word / ROW_WORDS, ROWS_PER_WARP - 1);
        const u64 from = __shfl_sync(ALL_LANES, reinterpret_cast<u64>(source_), owner);
        const u64 to = __shfl_sync(ALL_LANES, reinterpret_cast<u64>(destination), owner);
        const i32 offset = (word - owner * ROW_WORDS) * 16;
        const bool moves = word < ROUND_WORDS && from != 0 && to != 0;
        targets[i] = moves ? reinterpret_cast<char*>(to) + offset : nullptr;
        if (moves) words[i] = load(reinterpret_cast<const char*>(from) + offset);
      }
#pragma unroll
      for (i32 i = 0; i < AHEAD; ++i) {
        if (targets[i] != nullptr) *reinterpret_cast<uint4*>(targets[i]) = words[i];
      }
    }
    source_ = nullptr;
  }

  __device__ __forceinline__ void drain() const {}

 private:
  // Read once: no line of the first-level cache is spent on it.
  static __device__ __forceinline__ uint4 load(const char* address) {
    uint4 word;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(__cvta_generic_to_global(address)));
    return word;
  }

  const char* source_;
};

#endif
