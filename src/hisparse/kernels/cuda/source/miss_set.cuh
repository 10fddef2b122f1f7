// The positions that one request must load, as a bit per logical position. The rank of a position is the number of
// smaller ones in the set: the same number in every block of a team, in whatever order the threads found them.
#pragma once
#include "base.cuh"

constexpr i32 SEGMENT_WORDS = 4;
constexpr i32 SEGMENT_BITS = SEGMENT_WORDS * 32;

struct MissSet {
  u32* bits;
  u16* prefix;
  i32 num_segments;

  // All threads; the caller synchronises before the first insert.
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (i32 segment = threadIdx.x; segment < num_segments; segment += THREADS) {
      reinterpret_cast<uint4*>(bits)[segment] = make_uint4(0u, 0u, 0u, 0u);
    }
  }

  __device__ __forceinline__ void insert(i32 position) const {
    atomicOr(&bits[position / 32], 1u << (position % 32));
  }

  __device__ __forceinline__ bool contains(i32 position) const {
    return (bits[position / 32] >> (position % 32)) & 1u;
  }

  // Prepares rank() and at(); returns the size. All threads call it, after a barrier that follows the last insert.
  __device__ __forceinline__ i32 index() const {
    const i32 share = (num_segments + THREADS - 1) / THREADS;
    const i32 first = threadIdx.x * share;
    const i32 end = min(first + share, num_segments);
    u32 own = 0;
#pragma unroll 1
    for (i32 segment = first; segment < end; ++segment) own += count_segment(segment);
    const ScanResult scan = block_exclusive_sum(own);
    u32 before = scan.before;
#pragma unroll 1
    for (i32 segment = first; segment < end; ++segment) {
      prefix[segment] = static_cast<u16>(before);
      before += count_segment(segment);
    }
    __syncthreads();
    return static_cast<i32>(scan.total);
  }

  __device__ __forceinline__ i32 rank(i32 position) const {
    const i32 segment = position / SEGMENT_BITS;
    const i32 word = position / 32;
    i32 before = prefix[segment];
#pragma unroll 1
    for (i32 other = segment * SEGMENT_WORDS; other < word; ++other) before += __popc(bits[other]);
    return before + __popc(bits[word] & ((1u << (position % 32)) - 1u));
  }

  // The position of a rank below the size.
  __device__ __forceinline__ i32 at(i32 rank) const {
    i32 low = 0;
    i32 high = num_segments;
#pragma unroll 1
    while (high - low > 1) {
      const i32 middle = (low + high) / 2;
      if (prefix[middle] <= rank) low = middle; else high = middle;
    }
    i32 left = rank - prefix[low];
    i32 word = low * SEGMENT_WORDS;
#pragma unroll 1
    for (i32 count; left >= (count = __popc(bits[word])); ++word) left -= count;
    u32 remaining = bits[word];
#pragma unroll 1
    for (; left > 0; --left) remaining &= remaining - 1u;
    return word * 32 + __ffs(remaining) - 1;
  }

 private:
  __device__ __forceinline__ u32 count_segment(i32 segment) const {
    const uint4 words = reinterpret_cast<const uint4*>(bits)[segment];
    return __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
  }
};
