// Copies rows between two paged allocations, for up to MAX_LAYERS layers: a leader's plan for its followers, staged
// host rows of a prefill, new rows on their way to the host.
#include "layout.cuh"
#include "row_mover.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) move_rows(const __grid_constant__ MoveArgs args) {
  extern __shared__ __align__(128) char shared[];
  const i64 num_rows = args.count != nullptr ? *args.count : args.num_rows;
  if (args.totals != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&args.totals[BYTES], static_cast<u64>(num_rows) * args.num_layers * ROW_BYTES);
  }
  RowMover mover(shared);
  __syncthreads();
  const i64 num_copies = num_rows * args.num_layers;
#pragma unroll 1
  for (i64 round = 0;; ++round) {
    const i64 owned = owned_row(round);
    const i64 copy = owned < 0 ? num_copies : owned * gridDim.x + blockIdx.x;
    if (!__any_sync(ALL_LANES, copy < num_copies)) break;
    const char* source = nullptr;
    char* destination = nullptr;
    if (copy < num_copies) {
      const i32 layer = static_cast<i32>(copy % args.num_layers);
      const i64 source_row = args.source_row[copy / args.num_layers];
      const i64 destination_row = args.destination_row[copy / args.num_layers];
      if (source_row >= 0 && destination_row >= 0) {
        source = args.source[layer].row(source_row);
        destination = args.destination[layer].row(destination_row);
      }
    }
    mover.begin(source);
    mover.finish(destination);
  }
  mover.drain();
}
