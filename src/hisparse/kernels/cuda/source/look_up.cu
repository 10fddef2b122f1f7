// Selected positions to resident rows, where no request of the step has a hot lease: nothing can be loaded, so a table
// look-up is all there is. Blocks share out the columns of a batch row.
#include "batch_plan.cuh"
#include "layout.cuh"
#include "tally.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) look_up(const __grid_constant__ ResolveArgs args) {
  __shared__ u32 sums[3];
  const i32 row = blockIdx.y;
  const i32 first = static_cast<i32>(blockIdx.x * THREADS + threadIdx.x);
  const i32 slot = args.row_slot[row];
  const i32* const positions = args.positions + static_cast<i64>(row) * args.topk;
  i32* const out = args.out + static_cast<i64>(row) * args.topk;
  i32 position = first < args.topk ? positions[first] : EMPTY;
  if (threadIdx.x < 3) sums[threadIdx.x] = 0u;
  __syncthreads();
  const bool is_padding = slot < 0 || slot >= args.num_slots;
  const i32* const resident = args.resident + static_cast<i64>(is_padding ? 0 : slot) * args.max_pages;
  const i32 shift = args.destination.block_shift;
  Tally tally;
#pragma unroll 1
  for (i32 column = first; column < args.topk;) {
    const bool tracked = !is_padding && static_cast<u32>(position) < static_cast<u32>(args.num_positions);
    const i32 block = tracked ? resident[position >> shift] : 0;
    const bool found = block != 0;
    out[column] = found ? (block << shift) + (position & ((1 << shift) - 1)) : EMPTY;
    tally.resident += found;
    tally.unreachable += !found && !is_padding && position >= 0;
    column += static_cast<i32>(gridDim.x) * THREADS;
    position = column < args.topk ? positions[column] : EMPTY;
  }
  if (blockIdx.x == 0) close_plan_row(args, row, 0);
  tally.collect(sums);
  __syncthreads();
  Tally::publish(sums, args.totals);
}
