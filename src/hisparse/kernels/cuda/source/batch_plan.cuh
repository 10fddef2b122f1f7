// What a launch leaves for those who replay its copies: the plan's rows, and the clock of each request.
#pragma once
#include "layout.cuh"

// The entry of a request's copy `index` in the plan. `row` is the request's first batch row.
__device__ __forceinline__ i64 plan_entry(const ResolveArgs& args, i32 row, i32 index) {
  return static_cast<i64>(row) * args.plan_capacity + index;
}

// Says that batch row `row` has `num_copies` in the plan. Row 0 also empties what lies past the batch. All threads of
// one block call it.
__device__ __forceinline__ void close_plan_row(const ResolveArgs& args, i32 row, i32 num_copies) {
  if (threadIdx.x == 0) args.plan_count[row] = num_copies;
  if (row != 0) return;
#pragma unroll 1
  for (i32 past = args.num_rows + static_cast<i32>(threadIdx.x); past < args.plan_rows; past += THREADS) {
    args.plan_count[past] = 0;
  }
}
