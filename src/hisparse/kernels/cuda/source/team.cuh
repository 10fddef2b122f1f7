// Who works on what. `blocks_per_row` thread blocks start for every batch row; those of all rows of one request form
// a team. Every block of a team finds the same plan by itself, from the same state, and carries out a share of it:
// so a team needs no barrier, only a count of who has read the state (see `is_last_reader`).
#pragma once
#include "batch_rows.cuh"
#include "layout.cuh"

struct Team {
  i32 slot;
  i32 rank;      // of this block
  i32 size;      // in blocks
  i32 num_rows;  // batch rows of the request
  const u16* rows;
};

// True in exactly one block of the team: the one that arrives after all others have read the request's state. All
// threads of a block call it, after their last read of state that the plan changes.
__device__ __forceinline__ bool is_last_reader(const ResolveArgs& args, const Team& team) {
  __shared__ i32 last;
  __syncthreads();
  if (team.size == 1) return true;
  if (threadIdx.x == 0) {
    i32* arrivals = &args.arrivals[team.rows[0]];
    last = atomic_add_acq_rel(arrivals, 1) == team.size - 1;
    if (last) *arrivals = 0;
  }
  __syncthreads();
  return last;
}
