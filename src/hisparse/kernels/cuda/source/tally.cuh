// The counters of a launch, summed up block by block.
#pragma once
#include "layout.cuh"

// Selections by how they were served.
struct Tally {
  u32 resident = 0;
  u32 hot = 0;
  u32 unreachable = 0;

  // Adds to the block's sums in shared memory and starts anew. All threads call it.
  __device__ __forceinline__ void collect(u32* sums) {
    add(&sums[0], resident);
    add(&sums[1], hot);
    add(&sums[2], unreachable);
    resident = hot = unreachable = 0;
  }

  // Adds the block's sums to the totals, a barrier after the last collect().
  static __device__ __forceinline__ void publish(const u32* sums, u64* totals) {
    if (threadIdx.x >= 3 || sums[threadIdx.x] == 0) return;
    const i32 counter = threadIdx.x == 0 ? RESIDENT : threadIdx.x == 1 ? HOT : UNREACHABLE;
    atomicAdd(&totals[counter], static_cast<u64>(sums[threadIdx.x]));
  }

 private:
  static __device__ __forceinline__ void add(u32* total, u32 value) {
    if (!__any_sync(ALL_LANES, value != 0u)) return;
    const u32 sum = __reduce_add_sync(ALL_LANES, value);
    if (lane_id() == 0) atomicAdd(total, sum);
  }
};
