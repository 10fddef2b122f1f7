// Exact LRU without an order that every step rewrites. A queue holds hot rows, the oldest first, as they stood when it
// was made. A row that was read since has a newer stamp than the queue and is passed over; all others still stand in
// their order. So a step takes its victims from the head, and a new queue is made only when the old one runs out:
// mostly while host rows are on their way, by a counting sort over stamps that the blocks of a cluster share out.
#pragma once
#include "base.cuh"
#include "cluster.cuh"

constexpr i32 BINS = 1024;    // stamps told apart by one queue, from the oldest on
constexpr i32 AT_ONCE = 4;    // neighbouring entries of one thread
constexpr i32 WINDOW = AT_ONCE * THREADS;
constexpr i32 SPARSE = 256;   // entries passed over in one step, beyond as many as are taken, that call for a new queue
static_assert(THREADS * 4 == BINS, "a thread scans four bins");

// The hot rows of one request, as one block sees them.
struct HotRows {
  const i32* position_of;
  i32* stamp;
  const i32* blocks;  // by hot block, 0 where there is none
  i16* queue;
  u32* touched;       // shared memory, a bit a row: read by this block's selections
  u32* excluded;      // shared memory, a bit a row: read by this step, or a victim of it
  i32 num_rows;
  i32 num_words;      // of both bit sets, a multiple of 4
  i32 block_shift;
  i32 now;
  bool fully_leased;  // no entry of `blocks` is 0

  __device__ __forceinline__ bool is_leased(i32 row) const { return fully_leased || blocks[row >> block_shift] != 0; }

  // For a selection that the row serves.
  __device__ __forceinline__ void touch(i32 row) const {
    atomicOr(&touched[row / 32], 1u << (row % 32));
    stamp[row] = now;
  }

  __device__ __forceinline__ void exclude(i32 row) const { atomicOr(&excluded[row / 32], 1u << (row % 32)); }

  __device__ __forceinline__ bool is_excluded(i32 row) const { return (excluded[row / 32] >> (row % 32)) & 1u; }

  // Excludes what the selections of any block read, a cluster barrier after the last of them. Ends with a barrier.
  __device__ __forceinline__ void exclude_touched() const {
    const i32 quads = num_words / 4;
#pragma unroll 1
    for (i32 item = threadIdx.x; item < quads * CLUSTER; item += THREADS) {
      const i32 first = item % quads * 4;
      const uint4 words = remote_load4(touched + first, item / quads);
      if (words.x != 0u) atomicOr(&excluded[first], words.x);
      if (words.y != 0u) atomicOr(&excluded[first + 1], words.y);
      if (words.z != 0u) atomicOr(&excluded[first + 2], words.z);
      if (words.w != 0u) atomicOr(&excluded[first + 3], words.w);
    }
    __syncthreads();
  }

  __device__ __forceinline__ i64 physical_row(i32 row) const {
    const i64 block = blocks[row >> block_shift];
    return (block << block_shift) + (row & ((1 << block_shift) - 1));
  }
};

// What `queue_state` holds of a request. All zeros: there is no queue.
struct QueueState {
  i32 head;    // entries before it are spent; a multiple of 4
  i32 size;
  i32 made;    // rows with a newer stamp are not where they stand
  i32 leased;  // hot blocks at that time: with others, the queue is void

  static __device__ __forceinline__ QueueState load(const int4* state) {
    const int4 words = *state;
    return {words.x, words.y, words.z, words.w};
  }

  __device__ __forceinline__ void store(int4* state) const { *state = make_int4(head, size, made, leased); }
};

// A thread's entries in the window that starts at the head.
struct Window {
  i32 row[AT_ONCE];
  i32 stamp[AT_ONCE];
  i32 count;

  // Past the first-level cache: another block may have made the queue in this launch.
  __device__ __forceinline__ void load_rows(const HotRows& hot, const QueueState& queue) {
    const i32 first = queue.head + static_cast<i32>(threadIdx.x) * AT_ONCE;
    count = max(0, min(AT_ONCE, queue.size - first));
    u32 low = 0;
    u32 high = 0;
    if (count > 0) {
      asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                   : "=r"(low), "=r"(high)
                   : "l"(__cvta_generic_to_global(hot.queue + first))
                   : "memory");
    }
    row[0] = static_cast<i32>(low & 0xffffu);
    row[1] = static_cast<i32>(low >> 16);
    row[2] = static_cast<i32>(high & 0xffffu);
    row[3] = static_cast<i32>(high >> 16);
  }

  __device__ __forceinline__ void load_stamps(const HotRows& hot) {
#pragma unroll
    for (i32 i = 0; i < AT_ONCE; ++i) stamp[i] = i < count ? hot.stamp[row[i]] : 0;
  }

  // A bit for each entry that may be a victim.
  __device__ __forceinline__ u32 usable(const HotRows& hot, const QueueState& queue) const {
    u32 bits = 0;
#pragma unroll
    for (i32 i = 0; i < AT_ONCE; ++i) {
      if (i < count && stamp[i] - queue.made <= 0 && !hot.is_excluded(row[i]) && hot.is_leased(row[i])) bits |= 1u << i;
    }
    return bits;
  }
};

// The victims of a request: number k serves the request's miss k. A block keeps those that serve its own.
struct Victims {
  u16* rows;  // shared memory
  i32 first;  // the block's first miss, of the request's
  i32 num_own;
  i32 wanted;
  i32 taken;  // so far
};

// Takes victims from the queue until there are enough or it ends. `is_loaded`: the window at the head is. All threads
// of all blocks call it and find the same, as long as none changes a stamp before all are done. Ends with a barrier.
__device__ __forceinline__ void take_victims(const HotRows& hot, QueueState& queue, Window& window, bool is_loaded,
                                             Victims& victims) {
  __shared__ i32 next_head;
#pragma unroll 1
  while (victims.taken < victims.wanted && queue.head < queue.size) {
    if (!is_loaded) {
      window.load_rows(hot, queue);
      window.load_stamps(hot);
    }
    is_loaded = false;
    const u32 usable = window.usable(hot, queue);
    const ScanResult scan = block_exclusive_sum(static_cast<u32>(__popc(usable)));
    i32 number = victims.taken + static_cast<i32>(scan.before);
#pragma unroll
    for (i32 i = 0; i < AT_ONCE; ++i) {
      if (((usable >> i) & 1u) == 0u || number >= victims.wanted) continue;
      const i32 own = number - victims.first;
      if (own >= 0 && own < victims.num_own) victims.rows[own] = static_cast<u16>(window.row[i]);
      hot.exclude(window.row[i]);
      if (++number == victims.wanted) next_head = queue.head + static_cast<i32>(threadIdx.x) * AT_ONCE + (i + 1) / 4 * 4;
    }
    __syncthreads();
    const bool enough = victims.taken + static_cast<i32>(scan.total) >= victims.wanted;
    victims.taken = enough ? victims.wanted : victims.taken + static_cast<i32>(scan.total);
    queue.head = enough ? next_head : queue.head + WINDOW;
  }
}

// What a block sorts into a queue that is being made: its words of 32 rows in turn.
struct Sorting {
  i32 rank;        // of this block
  bool for_later;  // the rows of this step are in it too, as the newest

  static constexpr i32 OUT = -1;        // not in the queue
  static constexpr i32 FOREMOST = -2;   // empty: before any that holds something

  // Calls `visit(row, stamp)`, where the stamp may be one of the above, all lanes of a warp together.
  template <typename Visit>
  __device__ __forceinline__ void each(const HotRows& hot, Visit visit) const {
#pragma unroll 1
    for (i32 word = warp_id() * CLUSTER + rank; word * 32 < hot.num_rows; word += WARPS * CLUSTER) {
      const i32 row = word * 32 + lane_id();
      visit(row, row < hot.num_rows ? stamp_of(hot, row) : OUT);
    }
  }

 private:
  __device__ __forceinline__ i32 stamp_of(const HotRows& hot, i32 row) const {
    if (!hot.is_leased(row)) return OUT;
    if (hot.is_excluded(row)) return for_later ? hot.now : OUT;
    return hot.position_of[row] < 0 ? FOREMOST : hot.stamp[row];
  }
};

// The oldest stamp, or the largest number if no row has one. A barrier of the cluster.
__device__ __forceinline__ i32 find_oldest(const HotRows& hot, const Sorting& sorting) {
  __shared__ u32 oldest;
  constexpr u32 NONE = 0x7fffffffu;
  if (threadIdx.x == 0) oldest = NONE;
  __syncthreads();
  u32 own = NONE;
  sorting.each(hot, [&](i32, i32 stamp) {
    if (stamp >= 0) own = min(own, static_cast<u32>(stamp));
  });
  own = __reduce_min_sync(ALL_LANES, own);
  if (lane_id() == 0) atomicMin(&oldest, own);
  cluster_sync();
  const u32 theirs = lane_id() < CLUSTER ? remote_load(&oldest, lane_id()) : NONE;
  return static_cast<i32>(__reduce_min_sync(ALL_LANES, theirs));
}

// Bin 0 is for empty rows, the next for the oldest stamp; BINS for what stays out, which is also what is much newer.
__device__ __forceinline__ u32 bin_of(i32 stamp, i32 oldest) {
  if (stamp < 0) return stamp == Sorting::FOREMOST ? 0u : BINS;
  return min(static_cast<u32>(stamp - oldest) + 1u, static_cast<u32>(BINS));
}

// Makes a queue, in global memory, of all hot rows of a request; if not `for_later`, without the excluded ones. All
// threads of all blocks call it. Before the queue is read or anything else is made, a cluster barrier must follow.
__device__ __noinline__ QueueState make_queue(const HotRows hot, i32 rank, i32 leased, bool for_later) {
  __shared__ __align__(16) u32 counts[BINS];
  __shared__ u32 next[BINS];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) counts[threadIdx.x * 4 + i] = 0u;
  const Sorting sorting{rank, for_later};
  const i32 oldest = find_oldest(hot, sorting);
  sorting.each(hot, [&](i32, i32 stamp) {
    const u32 bin = bin_of(stamp, oldest);
    const u32 empty = __ballot_sync(ALL_LANES, bin == 0u);  // they may be most
    if (lane_id() == 0 && empty != 0u) atomicAdd(&counts[0], __popc(empty));
    if (bin - 1u < BINS - 1u) atomicAdd(&counts[bin], 1u);
  });
  cluster_sync();  // all rows are counted
  u32 all[4] = {0u, 0u, 0u, 0u};
  u32 before[4] = {0u, 0u, 0u, 0u};
#pragma unroll
  for (i32 other = 0; other < CLUSTER; ++other) {
    const uint4 words = remote_load4(counts + threadIdx.x * 4, other);
    const u32 theirs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      all[i] += theirs[i];
      if (other < rank) before[i] += theirs[i];
    }
  }
  const ScanResult scan = block_exclusive_sum(all[0] + all[1] + all[2] + all[3]);
  u32 start = scan.before;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    next[threadIdx.x * 4 + i] = start + before[i];
    start += all[i];
  }
  __syncthreads();
  sorting.each(hot, [&](i32 row, i32 stamp) {
    const u32 bin = bin_of(stamp, oldest);
    if (bin < BINS) hot.queue[atomicAdd(&next[bin], 1u)] = static_cast<i16>(row);
  });
  return {0, static_cast<i32>(scan.total), for_later ? hot.now : hot.now - 1, leased};
}
