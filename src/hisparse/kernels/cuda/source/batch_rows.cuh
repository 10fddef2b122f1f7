// Which rows of the batch a request has, and whether it has hot blocks.
#pragma once
#include "layout.cuh"

// The slot of batch row `row`, or -1 past the last.
__device__ __forceinline__ i32 slot_of(const ResolveArgs& args, i32 row) {
  return row < args.num_rows ? args.row_slot[row] : EMPTY;
}

// Lists the batch rows of the request that row `own_row` belongs to. One warp calls it; `rows` is shared memory.
// `lane_slot` is `slot_of(args, lane_id())`, which the caller read together with `slot`.
__device__ __forceinline__ void list_team_rows(const ResolveArgs& args, i32 own_row, i32 slot, i32 lane_slot,
                                               u16* rows, i32* counts) {
  i32 listed = 0;
  i32 before = 0;
#pragma unroll 1
  for (i32 base = 0; base < args.num_rows; base += WARP) {
    const i32 row = base + lane_id();
    const bool mine = lane_slot == slot;
    lane_slot = slot_of(args, row + WARP);
    const u32 members = __ballot_sync(ALL_LANES, mine);
    if (mine) rows[listed + __popc(members & lanes_below())] = static_cast<u16>(row);
    before += __popc(__ballot_sync(ALL_LANES, mine && row < own_row));
    listed += __popc(members);
  }
  if (lane_id() == 0) {
    counts[0] = listed;
    counts[1] = before;
  }
}

// How many hot blocks the request has leased. One warp calls it.
__device__ __forceinline__ i32 count_leased(const i32* blocks, i32 num_blocks) {
  i32 leased = 0;
#pragma unroll 4
  for (i32 block = lane_id(); block < num_blocks; block += WARP) leased += blocks[block] != 0;
  return __reduce_add_sync(ALL_LANES, leased);
}
