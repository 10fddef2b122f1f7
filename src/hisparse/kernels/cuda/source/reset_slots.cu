// Forgets the hot rows of some requests: without their positions, neither stamps nor inverse entries count. What was
// noted about their order goes too.
#include "layout.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) reset_slots(const __grid_constant__ ResetArgs args) {
  for (i32 i = blockIdx.y; i < args.num_resets; i += gridDim.y) {
    const i64 slot = args.slots[i];
    if (slot < 0 || slot >= args.num_slots) continue;
    i32* const position_of = args.position_of + slot * args.hot_rows;
    for (i32 row = blockIdx.x * THREADS + threadIdx.x; row < args.hot_rows; row += gridDim.x * THREADS) {
      position_of[row] = EMPTY;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) args.queue_state[slot] = make_int4(0, 0, 0, 0);
  }
}
