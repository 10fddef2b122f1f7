// Exact LRU without an order to maintain: the rows with the largest keys go, and a key is how long ago the row was
// read. A histogram over coarse keys finds the bin of the last row that must go; one scan gives every victim its rank.
#pragma once
#include "ages.cuh"
#include "base.cuh"

// The hot rows of one request.
//
// KEEP_POSITIONS, KEEP_STAMPS: shared memory has room for a copy of the state, which fetch() brings in the background,
// so that the passes over all rows read global memory once.
struct HotRows {
  const i32* position_of;
  const i32* stamp;
  const i32* blocks;     // by hot block, 0 where there is none
  u32* touched;          // shared memory, a bit a row; bits past the last row are set
  i32* kept_positions;   // shared memory; choose_victims() puts the rows' bins in their place
  i32* kept_stamps;      // shared memory
  i32 num_rows;
  i32 block_shift;
  i32 now;
  bool fully_leased;     // no entry of `blocks` is 0

  // Before anything is touched. All threads call it.
  __device__ __forceinline__ void clear_touched() const {
#pragma unroll 1
    for (i32 word = threadIdx.x; word < num_words(num_rows); word += THREADS) {
      const i32 rows = num_rows - word * 32;
      touched[word] = rows >= 32 ? 0u : ~0u << rows;
    }
  }

  // Starts the copies. All threads call it.
  __device__ __forceinline__ void fetch() const {
    const bool by_four = num_rows % 4 == 0;  // then every request's rows start on 16 bytes
    const i32 words = by_four ? 4 : 1;
#pragma unroll 1
    for (i32 row = threadIdx.x * words; row < num_rows; row += THREADS * words) {
      if (KEEP_POSITIONS) copy(kept_positions + row, position_of + row, by_four);
      if (KEEP_STAMPS) copy(kept_stamps + row, stamp + row, by_four);
    }
  }

  // Waits for the copies of all threads.
  static __device__ __forceinline__ void wait_fetched() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
  }

  __device__ __forceinline__ bool is_leased(i32 row) const { return fully_leased || blocks[row >> block_shift] != 0; }

  // Whether the row holds the position. Only before choose_victims().
  __device__ __forceinline__ bool holds(i32 row, i32 position) const { return position_in(row) == position; }

  __device__ __forceinline__ void touch(i32 row) const { atomicOr(&touched[row / 32], 1u << (row % 32)); }

  __device__ __forceinline__ i64 physical_row(i32 row) const {
    const i64 block = blocks[row >> block_shift];
    return (block << block_shift) + (row & ((1 << block_shift) - 1));
  }

  __device__ __forceinline__ u32 age(i32 row) const {
    return static_cast<u32>(now) - static_cast<u32>(KEEP_STAMPS ? kept_stamps[row] : stamp[row]);
  }

  // Bins of the rows 4*quad to 4*quad+3, in time for all of them at once.
  __device__ __forceinline__ int4 compute_bins(i32 quad) const {
    u32 excluded = touched[quad / 8] >> (quad % 8 * 4);
    if (!fully_leased) {
#pragma unroll 1
      for (i32 i = 0; i < 4 && quad * 4 + i < num_rows; ++i) excluded |= is_leased(quad * 4 + i) ? 0u : 1u << i;
    }
    const int4 positions = load(KEEP_POSITIONS, kept_positions, position_of, quad, excluded);
    const int4 stamps = load(KEEP_STAMPS, kept_stamps, stamp, quad, excluded);
    return make_int4(bin(excluded & 1u, positions.x, stamps.x), bin(excluded & 2u, positions.y, stamps.y),
                     bin(excluded & 4u, positions.z, stamps.z), bin(excluded & 8u, positions.w, stamps.w));
  }

  // Computes the bins once and for all. Each quad by one thread.
  __device__ __forceinline__ int4 settle_bins(i32 quad) const {
    const int4 bins = compute_bins(quad);
    if (KEEP_POSITIONS) reinterpret_cast<int4*>(kept_positions)[quad] = bins;
    return bins;
  }

  // After settle_bins().
  __device__ __forceinline__ int4 bins(i32 quad) const {
    return KEEP_POSITIONS ? reinterpret_cast<const int4*>(kept_positions)[quad] : compute_bins(quad);
  }

 private:
  static __device__ __forceinline__ i32 num_words(i32 rows) { return (rows + 31) / 32; }

  __device__ __forceinline__ i32 position_in(i32 row) const {
    return KEEP_POSITIONS ? kept_positions[row] : position_of[row];
  }

  __device__ __forceinline__ i32 bin(u32 is_excluded, i32 position, i32 row_stamp) const {
    return static_cast<i32>(bin_of(is_excluded != 0u, position, row_stamp, now));
  }

  // Four words of the state. Words of excluded rows may be anything.
  static __device__ __forceinline__ int4 load(bool is_kept, const i32* kept, const i32* words, i32 quad, u32 excluded) {
    if (is_kept) return reinterpret_cast<const int4*>(kept)[quad];
    const i32* const first = words + quad * 4;
    return make_int4(excluded & 1u ? 0 : first[0], excluded & 2u ? 0 : first[1], excluded & 4u ? 0 : first[2],
                     excluded & 8u ? 0 : first[3]);
  }

  static __device__ __forceinline__ void copy(i32* shared_word, const i32* word, bool by_four) {
    const u32 target = static_cast<u32>(__cvta_generic_to_shared(shared_word));
    const u64 source = __cvta_generic_to_global(word);
    if (by_four) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
    }
  }
};

__device__ __forceinline__ u32 word_of(const int4& words, i32 index) {
  return static_cast<u32>(index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w);
}

struct Threshold {
  u32 bin;     // rows of larger bins all go
  u32 age;     // within the old bin, so do rows of larger ages
  i32 above;   // how many those are together
  i32 wanted;  // how many go in total, never more than there are candidates
};

struct Crossing {
  u32 bin;
  i32 above;   // rows in larger bins
  i32 wanted;  // not more than the histogram's sum
};

// The bin that holds the `wanted`-th largest row, or NO_BIN if there is none. All threads call it; it synchronises
// first, so the histogram may have been written just before.
__device__ __noinline__ Crossing find_crossing(const u32* histogram, i32 wanted) {
  __shared__ Crossing found;
  constexpr i32 SHARE = (BINS + THREADS - 1) / THREADS;
  const i32 top = BINS - 1 - static_cast<i32>(threadIdx.x) * SHARE;  // threads take bins from the top down
  __syncthreads();
  u32 own = 0;
#pragma unroll
  for (i32 i = 0; i < SHARE; ++i) own += top - i >= 0 ? histogram[top - i] : 0u;
  const ScanResult scan = block_exclusive_sum(own);
  wanted = min(wanted, static_cast<i32>(scan.total));
  i32 above = static_cast<i32>(scan.before);
  if (wanted == 0) return {NO_BIN, 0, 0};
  if (above < wanted && wanted <= above + static_cast<i32>(own)) {
    i32 bin = top;
#pragma unroll 1
    while (above + static_cast<i32>(histogram[bin]) < wanted) above += static_cast<i32>(histogram[bin--]);
    found = {static_cast<u32>(bin), above, wanted};
  }
  __syncthreads();
  return found;
}

__device__ __forceinline__ void clear_histogram(u32* histogram) {
  __syncthreads();
#pragma unroll 1
  for (i32 bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0u;
  __syncthreads();
}

// Splits the rows of the old bin further, ten bits of the age at a time, until one age is left.
__device__ __noinline__ Threshold refine_old(const HotRows hot, u32* histogram, Crossing crossing) {
  const i32 wanted = crossing.wanted;
  i32 above = crossing.above;
  const i32 age_bits = 32 - __clz(hot.now | (BINS - 1));
  i32 shift = ((age_bits + DIGIT_BITS - 1) / DIGIT_BITS) * DIGIT_BITS;
  u32 digits = 0;  // of the wanted age, above `shift`
#pragma unroll 1
  while (shift > 0) {
    shift -= DIGIT_BITS;
    clear_histogram(histogram);
#pragma unroll 1
    for (i32 quad = threadIdx.x; quad * 4 < hot.num_rows; quad += THREADS) {
      const int4 bins = hot.bins(quad);
#pragma unroll 1
      for (i32 i = 0; i < 4; ++i) {
        if (word_of(bins, i) != OLD_BIN) continue;
        const u32 age = hot.age(quad * 4 + i);
        const bool same = (static_cast<u64>(age) >> (shift + DIGIT_BITS)) == digits;
        if (same) atomicAdd(&histogram[(age >> shift) & (BINS - 1)], 1u);
      }
    }
    crossing = find_crossing(histogram, wanted - above);
    digits = (digits << DIGIT_BITS) | crossing.bin;
    above += crossing.above;
  }
  return {OLD_BIN, digits, above, wanted};
}

// Adds all candidates to the histogram. Empty rows may be most of them, so they are counted apart first.
__device__ __forceinline__ void count_bins(const HotRows& hot, u32* histogram) {
  u32 num_empty = 0;
#pragma unroll 1
  for (i32 quad = threadIdx.x; quad * 4 < hot.num_rows; quad += THREADS) {
    const int4 bins = hot.settle_bins(quad);
#pragma unroll 1
    for (i32 i = 0; i < 4; ++i) {
      const u32 bin = word_of(bins, i);
      num_empty += bin == EMPTY_BIN;
      if (bin - 1u < EMPTY_BIN - 1u) atomicAdd(&histogram[bin], 1u);
    }
  }
  num_empty = __reduce_add_sync(ALL_LANES, num_empty);
  if (lane_id() == 0 && num_empty != 0) atomicAdd(&histogram[EMPTY_BIN], num_empty);
}

// Writes the victims' hot rows to `victims` by rank and returns how many there are: `wanted`, or as many as can go.
// Every block of a team writes the same list. `histogram`, in shared memory, is all 0. All threads call it, a barrier
// after the last touch(); it ends with a barrier.
__device__ __forceinline__ i32 choose_victims(const HotRows& hot, i32 wanted, u32* histogram, u16* victims) {
  count_bins(hot, histogram);
  const Crossing crossing = find_crossing(histogram, wanted);
  if (crossing.wanted == 0) return 0;
  Threshold threshold{crossing.bin, 0u, crossing.above, crossing.wanted};
  if (crossing.bin == OLD_BIN) threshold = refine_old(hot, histogram, crossing);

  // Twice over the rows: first to count, then, knowing how many other threads found, to write.
  i32 next_above = 0;
  i32 next_equal = 0;
#pragma unroll 1
  for (i32 pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (i32 quad = threadIdx.x; quad * 4 < hot.num_rows; quad += THREADS) {
      const int4 bins = hot.bins(quad);
#pragma unroll 1
      for (i32 i = 0; i < 4; ++i) {
        const u32 bin = word_of(bins, i);
        if (bin < threshold.bin) continue;
        const i32 row = quad * 4 + i;
        bool is_above = bin > threshold.bin;
        if (bin == OLD_BIN && threshold.bin == OLD_BIN) {
          if (hot.age(row) < threshold.age) continue;
          is_above = hot.age(row) > threshold.age;
        }
        i32& next = is_above ? next_above : next_equal;
        if (pass == 1 && next < threshold.wanted) victims[next] = static_cast<u16>(row);
        ++next;
      }
    }
    if (pass == 1) break;
    // Both sums are at most 32768, so they share a word.
    const u32 before = block_exclusive_sum((static_cast<u32>(next_above) << 16) | static_cast<u32>(next_equal)).before;
    next_above = static_cast<i32>(before >> 16);
    next_equal = threshold.above + static_cast<i32>(before & 0xffffu);
  }
  __syncthreads();
  return threshold.wanted;
}
