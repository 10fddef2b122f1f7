// Exact LRU over hot rows that the blocks of a cluster share out: 32 rows in turn. Every block counts the ages of its
// own rows; all read all counts, and so agree on the age of the last row that goes; each hands its victims to the
// blocks whose misses they are for. No order of rows is ever made.
#pragma once
#include "ages.cuh"
#include "cluster.cuh"

constexpr i32 KEPT = 2;                 // rows whose state a thread asks for before it knows that it needs it
static_assert(THREADS * 4 == BINS, "a thread scans four bins");

// The hot rows of one request, as one block sees them.
struct LocalRows {
  i32* position_of;
  i32* stamp;
  const i32* blocks;   // by hot block, 0 where there is none
  SharedBits touched;  // read by this step
  u16* bins;           // of this block's rows
  i32 num_rows;
  i32 block_shift;
  i32 rank;            // of this block
  bool fully_leased;   // no entry of `blocks` is 0

  // The row behind bit `lane` of this block's word `word`.
  __device__ __forceinline__ i32 row_at(i32 word) const { return ((word << CLUSTER_SHIFT) + rank) * 32 + lane_id(); }

  __device__ __forceinline__ i32 physical_row(i32 row) const {
    return (blocks[row >> block_shift] << block_shift) + (row & ((1 << block_shift) - 1));
  }

  __device__ __forceinline__ u32 age(i32 row, i32 now) const {
    return static_cast<u32>(now) - static_cast<u32>(stamp[row]);
  }

  __device__ __forceinline__ bool is_touched(i32 word) const { return (touched.words[word] >> lane_id()) & 1u; }

  // Stamps the rows that this step read. After the cluster barrier that follows the last touch; all threads.
  __device__ __forceinline__ void stamp_touched(i32 now) const {
#pragma unroll 1
    for (i32 word = warp_id(); word < touched.num_words; word += WARPS) {
      if (is_touched(word)) stamp[row_at(word)] = now;
    }
  }
};

// The state of a thread's first rows, asked for early so that nothing waits for it later.
struct KeptState {
  i32 position[KEPT];
  i32 stamp[KEPT];

  __device__ __forceinline__ void load(const LocalRows& hot) {
#pragma unroll
    for (i32 i = 0; i < KEPT; ++i) {
      const i32 word = warp_id() + i * WARPS;
      const i32 row = hot.row_at(word);
      const bool exists = word < hot.touched.num_words && row < hot.num_rows;
      position[i] = exists ? hot.position_of[row] : 0;
      stamp[i] = exists ? hot.stamp[row] : 0;
    }
  }
};

// Settles the bin of one row and counts it; stamps the row if this step read it.
__device__ __forceinline__ void count_row(const LocalRows& hot, i32 word, i32 position, i32 stamp, i32 now,
                                          u32* histogram) {
  const i32 row = hot.row_at(word);
  const bool exists = row < hot.num_rows;
  const bool touched = hot.is_touched(word);
  if (exists && touched) hot.stamp[row] = now;
  const bool leased = exists && (hot.fully_leased || hot.blocks[row >> hot.block_shift] != 0);
  const u32 bin = bin_of(!leased || touched, position, stamp, now);
  hot.bins[word * 32 + lane_id()] = static_cast<u16>(bin);
  if (bin != NO_BIN) atomicAdd(&histogram[bin], 1u);
}

// All rows of this block. The histogram was 0.
__device__ __forceinline__ void count_rows(const LocalRows& hot, const KeptState& kept, i32 now, u32* histogram) {
#pragma unroll
  for (i32 i = 0; i < KEPT; ++i) {
    const i32 word = warp_id() + i * WARPS;
    if (word < hot.touched.num_words) count_row(hot, word, kept.position[i], kept.stamp[i], now, histogram);
  }
#pragma unroll 1
  for (i32 word = warp_id() + KEPT * WARPS; word < hot.touched.num_words; word += WARPS) {
    const i32 row = hot.row_at(word);
    const bool exists = row < hot.num_rows;
    const i32 position = exists ? hot.position_of[row] : 0;
    count_row(hot, word, position, exists ? hot.stamp[row] : 0, now, histogram);
  }
}

// The bin of the last row that goes.
struct Crossing {
  u32 bin;
  i32 wanted;        // rows that go: never more than there are candidates
  i32 above;         // rows in larger bins
  i32 above_before;  // of those, in blocks of lower rank
  i32 equal_before;  // rows of the bin in blocks of lower rank
};

// From the histograms of all blocks, a cluster barrier after they were counted. All threads of all blocks call it.
__device__ __noinline__ Crossing find_crossing(const u32* histogram, i32 rank, i32 wanted) {
  __shared__ Crossing found;
  const i32 lowest = BINS - 4 - static_cast<i32>(threadIdx.x) * 4;  // threads take bins from the top down
  u32 all[4] = {0u, 0u, 0u, 0u};
  u32 before[4] = {0u, 0u, 0u, 0u};
#pragma unroll
  for (i32 other = 0; other < CLUSTER; ++other) {
    const uint4 words = remote_load4(histogram + lowest, other);
    const u32 counts[4] = {words.w, words.z, words.y, words.x};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      all[i] += counts[i];
      if (other < rank) before[i] += counts[i];
    }
  }
  // There are at most 32768 rows, so both sums share a word.
  const u32 own = ((all[0] + all[1] + all[2] + all[3]) << 16) | (before[0] + before[1] + before[2] + before[3]);
  const ScanResult scan = block_exclusive_sum(own);
  wanted = min(wanted, static_cast<i32>(scan.total >> 16));
  if (wanted == 0) return {NO_BIN, 0, 0, 0, 0};
  i32 above = static_cast<i32>(scan.before >> 16);
  i32 above_before = static_cast<i32>(scan.before & 0xffffu);
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    if (above < wanted && wanted <= above + static_cast<i32>(all[i])) {
      found = {static_cast<u32>(lowest + 3 - i), wanted, above, above_before, static_cast<i32>(before[i])};
    }
    above += static_cast<i32>(all[i]);
    above_before += static_cast<i32>(before[i]);
  }
  __syncthreads();
  return found;
}

struct Threshold {
  Crossing crossing;
  u32 age;  // if the bin is the old one: rows of larger ages go before
};

// Splits the rows of the old bin further, ten bits of the age at a time, until one age is left.
__device__ __noinline__ Threshold refine_old(const LocalRows hot, u32* histogram, Crossing crossing, i32 now) {
  const i32 age_bits = 32 - __clz(now | (BINS - 1));
  i32 shift = ((age_bits + DIGIT_BITS - 1) / DIGIT_BITS) * DIGIT_BITS;
  u32 digits = 0;  // of the wanted age, above `shift`
#pragma unroll 1
  while (shift > 0) {
    shift -= DIGIT_BITS;
    cluster_sync();  // all have read the counts
#pragma unroll
    for (i32 i = 0; i < 4; ++i) histogram[threadIdx.x * 4 + i] = 0u;
    __syncthreads();
#pragma unroll 1
    for (i32 word = warp_id(); word < hot.touched.num_words; word += WARPS) {
      if (hot.bins[word * 32 + lane_id()] != OLD_BIN) continue;
      const u32 age = hot.age(hot.row_at(word), now);
      const bool same = (static_cast<u64>(age) >> (shift + DIGIT_BITS)) == digits;
      if (same) atomicAdd(&histogram[(age >> shift) & (BINS - 1)], 1u);
    }
    cluster_sync();
    const Crossing part = find_crossing(histogram, hot.rank, crossing.wanted - crossing.above);
    digits = (digits << DIGIT_BITS) | part.bin;
    crossing.above += part.above;
    crossing.above_before += part.above_before;
    crossing.equal_before = part.equal_before;
  }
  return {crossing, digits};
}

// Hands each victim of this block to the block whose miss it is for. The `misses` of the blocks, by rank, say which:
// victim k serves miss k of the request. A cluster barrier must follow. `next` was 0.
__device__ __forceinline__ void hand_out_victims(const LocalRows& hot, const Threshold& threshold, i32 now,
                                                 const i32* misses, u16* victims, u32* next) {
  const Crossing& crossing = threshold.crossing;
#pragma unroll 1
  for (i32 word = warp_id(); word < hot.touched.num_words; word += WARPS) {
    const u32 bin = hot.bins[word * 32 + lane_id()];
    const i32 row = hot.row_at(word);
    bool above = bin > crossing.bin;
    bool equal = bin == crossing.bin;
    if (equal && bin == OLD_BIN) {
      const u32 age = hot.age(row, now);
      above = age > threshold.age;
      equal = age == threshold.age;
    }
    const u32 all_above = __ballot_sync(ALL_LANES, above);
    const u32 all_equal = __ballot_sync(ALL_LANES, equal);
    if ((all_above | all_equal) == 0u) continue;
    u32 prior = 0;
    if (lane_id() == 0) prior = atomicAdd(next, (__popc(all_above) << 16) | __popc(all_equal));
    prior = __shfl_sync(ALL_LANES, prior, 0);
    if (!above && !equal) continue;
    i32 index = above ? crossing.above_before + static_cast<i32>(prior >> 16) + __popc(all_above & lanes_below())
                      : crossing.above + crossing.equal_before + static_cast<i32>(prior & 0xffffu) +
                            __popc(all_equal & lanes_below());
    if (index >= crossing.wanted) continue;
    i32 owner = 0;
#pragma unroll 1
    for (; owner < CLUSTER - 1 && index >= misses[owner]; ++owner) index -= misses[owner];
    remote_store(victims + index, owner, static_cast<u16>(row));
  }
}
