// Selected positions to physical rows of the slab, and the copies of what was missing, in one launch.
//
// The steps of a block: list the request's batch rows; classify their selections; number the missing positions;
// start the first host reads of this block's share; choose the victims while those are under way; answer the missed
// selections; finish the copies. The last block of a team to have read the replacement state updates it.
#include "batch_plan.cuh"
#include "classify.cuh"
#include "layout.cuh"
#include "miss_set.cuh"
#include "row_mover.cuh"
#include "team.cuh"
#include "victims.cuh"

// Answers -1 in this block's part of a padding row.
__device__ __forceinline__ void answer_padding(const ResolveArgs& args, i32 row, i32 part) {
#pragma unroll 1
  for (i32 column = part * THREADS + threadIdx.x; column < args.topk; column += gridDim.y * THREADS) {
    args.out[static_cast<i64>(row) * args.topk + column] = EMPTY;
  }
}

// Answers the missed selections of this block's share: ranks below `num_loaded` have a victim.
__device__ __forceinline__ void answer_misses(const ResolveArgs& args, const Team& team, const HotRows& hot,
                                              const MissSet& misses, i32 num_positions, const u16* victims,
                                              i32 num_loaded, Tally& tally) {
  const i32 num_chunks = chunks_per_row(args);
#pragma unroll 1
  for (i32 chunk = team.rank + warp_id() * team.size; chunk < team.num_rows * num_chunks; chunk += WARPS * team.size) {
    const i32 batch_row = team.rows[chunk / num_chunks];
    const i32 first = chunk % num_chunks * CHUNK + lane_id() * AT_ONCE;
    const Positions positions = load_positions(args, batch_row, first);
    i32* const out = args.out + static_cast<i64>(batch_row) * args.topk + first;
#pragma unroll
    for (i32 i = 0; i < AT_ONCE; ++i) {
      const i32 position = positions.of[i];
      if (static_cast<u32>(position) >= static_cast<u32>(num_positions) || !misses.contains(position)) continue;
      const i32 rank = misses.rank(position);
      const bool loaded = rank < num_loaded;
      if (loaded) out[i] = static_cast<i32>(hot.physical_row(victims[rank]));
      tally.hot += loaded;
      tally.unreachable += !loaded;
    }
  }
}

// Gives the victims to their new positions.
__device__ __forceinline__ void commit(const ResolveArgs& args, const Team& team, const MissSet& misses,
                                       const u16* victims, i32 num_loaded, i32 now) {
  const i64 hot_start = static_cast<i64>(team.slot) * args.hot_rows;
  const i64 token_start = static_cast<i64>(team.slot) * args.max_tokens;
#pragma unroll 1
  for (i32 rank = threadIdx.x; rank < num_loaded; rank += THREADS) {
    const i32 position = misses.at(rank);
    const i32 hot_row = victims[rank];
    args.position_of[hot_start + hot_row] = position;
    args.stamp[hot_start + hot_row] = now;
    args.hot_row_of[token_start + position] = static_cast<i16>(hot_row);
  }
}

// The first block of a team counts for the request. Every missed selection was counted as hot: the one that caused
// the load is none.
__device__ __forceinline__ void count_request(const ResolveArgs& args, i32 num_misses, i32 num_loaded) {
  if (num_misses > num_loaded) atomicOr(args.status, STATUS_UNION_OVERFLOW);
  atomicAdd(&args.totals[MISS], static_cast<u64>(num_loaded));
  atomicAdd(&args.totals[HOT], static_cast<u64>(-static_cast<i64>(num_loaded)));
  atomicAdd(&args.totals[BYTES], static_cast<u64>(num_loaded) * ROW_BYTES);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) resolve(const __grid_constant__ ResolveArgs args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ i32 team_counts[2];
  __shared__ u32 sums[3];
  __shared__ i32 num_leased;
  __shared__ u32 histogram[BINS];
  const i32 row = blockIdx.x;
  const i32 part = blockIdx.y;
  // Everything that needs no other load is asked for at once.
  const i32 slot = args.row_slot[row];
  const i32 lane_slot = warp_id() == 0 ? slot_of(args, lane_id()) : EMPTY;
  const Positions prefetched = load_positions(args, row, threadIdx.x * AT_ONCE);
  if (slot < 0 || slot >= args.num_slots) {
    answer_padding(args, row, part);
    if (part == 0) close_plan_row(args, row, 0);
    return;
  }

  const i32 now = args.step[slot] + 1;
  u16* const rows = reinterpret_cast<u16*>(shared + args.shared.rows);
  u16* const victims = reinterpret_cast<u16*>(shared + args.shared.victims);
  const MissSet misses{reinterpret_cast<u32*>(shared + args.shared.miss_bits),
                       reinterpret_cast<u16*>(shared + args.shared.miss_prefix), args.shared.miss_segments};
  const i64 hot_start = static_cast<i64>(slot) * args.hot_rows;
  const i64 page_start = static_cast<i64>(slot) * args.max_pages;
  const i32* const hot_blocks = args.hot + static_cast<i64>(slot) * args.hot_blocks;
  HotRows hot{args.position_of + hot_start,
                    args.stamp + hot_start,
                    hot_blocks,
                    reinterpret_cast<u32*>(shared + args.shared.touched),
                    reinterpret_cast<i32*>(shared + args.shared.positions),
                    reinterpret_cast<i32*>(shared + args.shared.stamps),
                    args.hot_rows,
                    args.destination.block_shift,
                    now,
                    false};
  RowMover mover(shared + args.shared.stages);
  if (warp_id() == 0) list_team_rows(args, row, slot, lane_slot, rows, team_counts);
  if (warp_id() == 1) {
    const i32 counted = count_leased(hot_blocks, args.hot_blocks);
    if (lane_id() == 0) num_leased = counted;
  }
  if (threadIdx.x < 3) sums[threadIdx.x] = 0u;
#pragma unroll 1
  for (i32 bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0u;
  hot.clear_touched();
  misses.clear();
  __syncthreads();
  const i32 parts = gridDim.y;
  const Team team{slot, team_counts[1] * parts + part, team_counts[0] * parts, team_counts[0], rows};
  const Request request{args.resident + page_start,
                        args.host + page_start,
                        args.hot_row_of + static_cast<i64>(slot) * args.max_tokens,
                        args.stamp + hot_start,
                        args.num_positions,
                        args.destination.block_shift,
                        num_leased != 0};
  hot.fully_leased = num_leased == args.hot_blocks;
  if (request.has_lease) hot.fetch();

  Tally tally;
  const Positions first = rows[0] == row ? prefetched : load_positions(args, rows[0], threadIdx.x * AT_ONCE);
  const bool missed = classify(args, team, request, hot, misses, tally, first);
  tally.collect(sums);
  const bool loads = __syncthreads_or(missed);  // the same in all blocks of the team
  if (part == 0 && row != rows[0]) close_plan_row(args, row, 0);
  if (!loads) {
    if (team.rank == 0) close_plan_row(args, row, 0);
    if (request.has_lease && is_last_reader(args, team) && threadIdx.x == 0) args.step[slot] = now;
    Tally::publish(sums, args.totals);
    return;
  }

  const i32 num_misses = misses.index();
  i32 num_loaded = 0;
#pragma unroll 1
  for (i64 round = 0;; ++round) {
    // The misses of this block's share, one a lane and round. All blocks of the team know all ranks.
    const i32 index = static_cast<i32>(owned_row(round));
    const i32 rank = index < 0 ? num_misses : team.rank + index * team.size;
    const bool active = rank < num_misses;
    const i64 host_row = active ? request.host_row(misses.at(rank)) : EMPTY;
    mover.begin(active ? args.source.row(host_row) : nullptr);

    if (round == 0) {  // the first reads from host memory are under way
      num_loaded = choose_victims(hot, num_misses, histogram, victims);
      if (team.rank == 0) {
        close_plan_row(args, row, num_loaded);
        if (threadIdx.x == 0) count_request(args, num_misses, num_loaded);
      }
      if (is_last_reader(args, team)) {
        commit(args, team, misses, victims, num_loaded, now);
        if (threadIdx.x == 0) args.step[slot] = now;
      }
      answer_misses(args, team, hot, misses, request.num_positions, victims, num_loaded, tally);
      tally.collect(sums);
    }
    if (!__any_sync(ALL_LANES, active)) break;

    char* target = nullptr;
    if (rank < num_loaded) {
      const i64 slab_row = hot.physical_row(victims[rank]);
      const i64 entry = plan_entry(args, rows[0], rank);
      args.plan_host_row[entry] = host_row;
      args.plan_slab_row[entry] = slab_row;
      target = args.destination.row(slab_row);
    }
    mover.finish(target);
  }
  mover.drain();
  __syncthreads();
  Tally::publish(sums, args.totals);
}
