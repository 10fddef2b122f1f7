// Who works on what. `blocks_per_row` thread blocks start for every batch row; those of all rows of one request form
// a team. Every block of a team finds the same plan by itself, from the same state, and carries out a share of it:
// so a team needs no barrier, only a count of who has read the state (see `is_last_reader`).
#pragma once
#include "layout.cuh"

struct Team {
  i32 slot;
  i32 rank;      // of this block
  i32 size;      // in blocks
  i32 num_rows;  // batch rows of the request
  const u16* rows;
};

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

struct Lease {
  i32 any;
  i32 all;
};

// Whether the request has any and all of its hot blocks. One warp calls it.
__device__ __forceinline__ void read_lease(const i32* blocks, i32 num_blocks, Lease* lease) {
  bool any = false;
  bool all = true;
#pragma unroll 4
  for (i32 block = lane_id(); block < num_blocks; block += WARP) {
    const bool leased = blocks[block] != 0;
    any |= leased;
    all &= leased;
  }
  any = __any_sync(ALL_LANES, any);
  all = __all_sync(ALL_LANES, all);
  if (lane_id() == 0) *lease = {any, all};
}

// True in exactly one block of the team: the one that arrives after all others have read the request's state. All
// threads of a block call it, after their last read of state that the plan changes. What was read decided the victims,
// so every such load has returned before the barrier, and no fence has to order it.
__device__ __forceinline__ bool is_last_reader(const ResolveArgs& args, const Team& team) {
  if (team.size == 1) {
    __syncthreads();
    return true;
  }
  __shared__ i32 last;
  __syncthreads();
  if (threadIdx.x == 0) {
    i32* arrivals = &args.scratch->arrivals[team.rows[0]];
    last = atomicAdd(arrivals, 1) == team.size - 1;
    if (last) *arrivals = 0;
  }
  __syncthreads();
  return last;
}

// 0, but only once `value` has arrived: keeps the memory system from running ahead of a load or an atomic.
__device__ __forceinline__ i32 zero_after(i32 value) {
  i32 zero;
  asm volatile("and.b32 %0, %1, 0;" : "=r"(zero) : "r"(value));
  return zero;
}

// The last block of the launch publishes the plan's size, advances the step and clears the scratch. One thread of
// every block calls it, with the step and the place in the plan that it read: all blocks have then read both.
__device__ __forceinline__ void finish_block(const ResolveArgs& args, i32 step, i32 plan_start) {
  const i32 one = 1 + zero_after(step) + zero_after(plan_start);
  const i32 num_blocks = static_cast<i32>(gridDim.x * gridDim.y);
  if (atomicAdd(&args.scratch->finished_blocks, one) != num_blocks - 1) return;
  *args.plan_count = atomicExch(&args.scratch->planned, 0);
  *args.step = step;
  args.scratch->finished_blocks = 0;
}
