// Words that every kernel uses: fixed-width types, warp facts, block-wide scans. No header of the toolkit is needed.
//
// A kernel is compiled for one block size: THREADS is a macro of the compilation.
#pragma once

using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8, "fixed widths");

constexpr i32 WARP = 32;
constexpr i32 WARPS = THREADS / WARP;
constexpr u32 ALL_LANES = 0xffffffffu;
static_assert(THREADS % WARP == 0 && WARPS <= WARP, "one warp scans the sums of all warps");

__device__ __forceinline__ i32 lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ i32 warp_id() { return threadIdx.x / WARP; }

// Bits of the lanes below this one.
__device__ __forceinline__ u32 lanes_below() { return (1u << lane_id()) - 1u; }

__device__ __forceinline__ u32 warp_inclusive_sum(u32 value) {
#pragma unroll
  for (i32 distance = 1; distance < WARP; distance *= 2) {
    const u32 below = __shfl_up_sync(ALL_LANES, value, distance);
    if (lane_id() >= distance) value += below;
  }
  return value;
}

struct ScanResult {
  u32 before;  // sum over the threads below this one
  u32 total;   // sum over the block
};

// Exclusive sum over the block in thread order. All threads call it; it synchronises the block at its start and end,
// so what was written to shared memory before it is visible after it.
__device__ __noinline__ ScanResult block_exclusive_sum(u32 value) {
  __shared__ u32 sums[WARP];
  const u32 inclusive = warp_inclusive_sum(value);
  __syncthreads();  // a previous scan's sums have been read
  if (lane_id() == WARP - 1) sums[warp_id()] = inclusive;
  __syncthreads();
  const u32 of_warps = warp_inclusive_sum(lane_id() < WARPS ? sums[lane_id()] : 0u);
  const u32 total = __shfl_sync(ALL_LANES, of_warps, WARP - 1);
  const u32 before_warp = __shfl_sync(ALL_LANES, of_warps, (warp_id() + WARP - 1) % WARP);
  return {inclusive - value + (warp_id() == 0 ? 0u : before_warp), total};
}

// Adds to a word that blocks of the device share: what this thread knows to have happened before happens before what
// any thread does that finds the sum. A barrier passes that on to and from the rest of its block.
__device__ __forceinline__ i32 atomic_add_acq_rel(i32* address, i32 value) {
  i32 before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(address)), "r"(value)
               : "memory");
  return before;
}
