// Selected positions to physical rows of the slab, and the copies of what was missing, in one launch: the kernel for
// devices with clusters. One cluster serves one request; its blocks share out the selections and the hot rows.
//
// The steps of a block: answer its selections, listing those that must be loaded; start the first host reads; while
// those are under way, agree with the other blocks on the victims; write answers and state; finish the copies.
#include "batch_rows.cuh"
#include "cluster.cuh"
#include "cluster_victims.cuh"
#include "layout.cuh"
#include "row_mover.cuh"
#include "selections.cuh"

// What other blocks of the cluster tell this one.
struct Inbox {
  i32 misses[CLUSTER];   // of each block
  i32 repeats[CLUSTER];  // whether a selection of the block repeats a miss
  i32 now;
};

// Which batch rows a cluster serves.
struct Batch {
  u16* rows;
  i32 num_rows;  // 0 if a cluster of another row serves the request
};

// The request's first batch row serves all of them. All threads call it; it has one barrier, or two if there are
// several rows. `other` is the slot of batch row `threadIdx.x`.
__device__ __forceinline__ Batch find_rows(const ResolveArgs& args, i32 row, i32 slot, i32 other, u16* rows) {
  __shared__ u32 seen[WARPS];
  __shared__ i32 counts[2];
  bool earlier = false;
  bool later = false;
#pragma unroll 1
  for (i32 i = threadIdx.x; i < args.num_rows; i += THREADS) {
    earlier |= other == slot && i < row;
    later |= other == slot && i > row;
    other = slot_of(args, i + THREADS);
  }
  const u32 any = (__any_sync(ALL_LANES, earlier) ? 1u : 0u) | (__any_sync(ALL_LANES, later) ? 2u : 0u);
  if (lane_id() == 0) seen[warp_id()] = any;
  if (threadIdx.x == 0) rows[0] = static_cast<u16>(row);
  __syncthreads();
  u32 all = 0;
#pragma unroll
  for (i32 warp = 0; warp < WARPS; ++warp) all |= seen[warp];
  if (all & 1u) return {rows, 0};
  if (all == 0u) return {rows, 1};
  if (warp_id() == 0) list_team_rows(args, row, slot, slot_of(args, lane_id()), rows, counts);
  __syncthreads();
  return {rows, counts[0]};
}

// Answers all selections of this block, from those of the first row on, which were looked up before.
__device__ __forceinline__ bool answer_all(const ResolveArgs& args, const Batch& batch, const Request& request,
                                           const LocalRows& hot, const Misses& misses, Selections& selections,
                                           bool has_lease, Tally& tally) {
  bool repeats = false;
#pragma unroll 1
  for (i32 i = 0; i < batch.num_rows; ++i) {
#pragma unroll 1
    for (i32 first = 0; first < args.topk; first += Selections::SPAN) {
      if (i + first > 0) {
        selections.load(args, batch.rows[i], first);
        selections.look_up(request, hot);
      }
      repeats |= answer(args, request, hot, misses, selections, has_lease, batch.rows[i], first, tally);
    }
  }
  return repeats;
}

// Reserves a part of the plan and returns its start, for `num_blocks` blocks of a cluster at once. The last of all
// blocks publishes the plan's size, advances the step and clears the scratch. The step was read before.
__device__ __forceinline__ i32 finish_blocks(const ResolveArgs& args, i32 now, i32 num_blocks, i32 num_loaded) {
  u64* const word = reinterpret_cast<u64*>(args.scratch);  // `planned` below, `finished` above
  const u64 added = (static_cast<u64>(num_blocks) << 32) | static_cast<u32>(num_loaded);
  const u64 after = atomic_add_acq_rel(word, added) + added;
  const i32 end = static_cast<i32>(after & 0xffffffffu);
  if (static_cast<u32>(after >> 32) == gridDim.y * CLUSTER) {
    *args.plan_count = end;
    *args.step = now;
    *word = 0;
  }
  return end - num_loaded;
}

__device__ __forceinline__ void count_request(const ResolveArgs& args, i32 num_misses, i32 num_loaded) {
  if (num_misses > num_loaded) atomicOr(args.status, STATUS_UNION_OVERFLOW);
  atomicAdd(&args.totals[MISS], static_cast<u64>(num_loaded));
  atomicAdd(&args.totals[BYTES], static_cast<u64>(num_loaded) * ROW_BYTES);
}

// Gives one victim to its new position.
__device__ __forceinline__ void commit(const ResolveArgs& args, i32 slot, i32 hot_row, i32 position, i32 now) {
  const i64 hot_index = static_cast<i64>(slot) * args.hot_rows + hot_row;
  args.position_of[hot_index] = position;
  args.stamp[hot_index] = now;
  args.hot_row_of[static_cast<i64>(slot) * args.max_tokens + position] = static_cast<i16>(hot_row);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    resolve_cluster(const __grid_constant__ ResolveArgs args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(16) u32 histogram[BINS];
  __shared__ Inbox inbox;
  __shared__ Lease lease;
  __shared__ u32 sums[3];
  __shared__ u32 num_listed;
  __shared__ u32 num_handed_out;
  __shared__ i32 plan_start;
  const i32 rank = cluster_rank();
  const i32 row = blockIdx.y;
  // The last warp has the fewest selections, so it does what is done once.
  const bool is_single = threadIdx.x == THREADS - WARP;  // of the block
  const bool leads = rank == 0 && is_single;             // of the cluster
  // Everything that needs no other load is asked for at once.
  const i32 slot = args.row_slot[row];
  const i32 other = slot_of(args, threadIdx.x);
  const i32 step = leads ? *args.step + 1 : 0;
  Selections selections;
  selections.load(args, row, 0);
  if (slot < 0 || slot >= args.num_slots) {
#pragma unroll 1
    for (i32 column = Selections::column(0, 0); column < args.topk; column += CLUSTER * THREADS) {
      args.out[static_cast<i64>(row) * args.topk + column] = EMPTY;
    }
    if (leads) finish_blocks(args, step, CLUSTER, 0);
    return;
  }

  const i64 hot_start = static_cast<i64>(slot) * args.hot_rows;
  const i64 page_start = static_cast<i64>(slot) * args.max_pages;
  const i32* const hot_blocks = args.hot + static_cast<i64>(slot) * args.hot_blocks;
  const SharedBits missed{reinterpret_cast<u32*>(shared + args.cluster.missed), args.cluster.missed_words};
  const SharedBits touched{reinterpret_cast<u32*>(shared + args.cluster.touched), args.cluster.touched_words};
  const Misses misses{missed, reinterpret_cast<i32*>(shared + args.cluster.misses), &num_listed,
                      args.cluster.capacity};
  const Request request{args.resident + page_start, args.host + page_start,
                        args.hot_row_of + static_cast<i64>(slot) * args.max_tokens, args.num_positions,
                        args.destination.block_shift};
  LocalRows hot{args.position_of + hot_start,
                args.stamp + hot_start,
                hot_blocks,
                touched,
                reinterpret_cast<u16*>(shared + args.cluster.bins),
                args.hot_rows,
                args.destination.block_shift,
                rank,
                false};
  u16* const victims = reinterpret_cast<u16*>(shared + args.cluster.victims);
  if (warp_id() == WARPS - 1) {
    const Lease read = read_lease(hot_blocks, args.hot_blocks);
    if (is_single) lease = read;
    if (leads && !read.any) finish_blocks(args, step, CLUSTER, 0);  // such a request loads nothing
  }
  selections.look_up(request, hot);
  missed.clear();
  touched.clear();
#pragma unroll
  for (i32 i = 0; i < 4; ++i) histogram[threadIdx.x * 4 + i] = 0u;
  if (threadIdx.x < 3) sums[threadIdx.x] = 0u;
  if (threadIdx.x == 0) num_listed = num_handed_out = 0u;
  RowMover mover(shared + args.cluster.stages);
  cluster_arrive();
  const Batch batch = find_rows(args, row, slot, other, reinterpret_cast<u16*>(shared + args.cluster.rows));
  cluster_wait();  // all blocks run, and their shared memory is clear
  hot.fully_leased = lease.all != 0;
  const bool has_lease = lease.any != 0;
  if (batch.num_rows == 0) {
    if (leads && has_lease) finish_blocks(args, step, CLUSTER, 0);
    return;
  }

  Tally tally;
  const bool repeats = answer_all(args, batch, request, hot, misses, selections, has_lease, tally);
  const bool block_repeats = __syncthreads_or(repeats);  // the block's misses are listed
  if (!has_lease) {  // nothing was touched or listed: no block waits for another
    tally.collect(sums);
    __syncthreads();
    Tally::publish(sums, args.totals);
    return;
  }
  const i32 num_own = min(static_cast<i32>(num_listed), args.cluster.capacity);
  if (threadIdx.x < CLUSTER) {
    remote_store(&inbox.misses[rank], threadIdx.x, num_own);
    remote_store(&inbox.repeats[rank], threadIdx.x, block_repeats);
  }
  if (leads) {
#pragma unroll
    for (i32 block = 0; block < CLUSTER; ++block) remote_store(&inbox.now, block, step);
  }
  cluster_arrive();
  KeptState kept;
  kept.load(hot);
  i32 index = static_cast<i32>(owned_row(0));
  bool active = index >= 0 && index < num_own;
  i64 host_row = active ? request.host_row(misses.listed[index]) : EMPTY;
  mover.begin(active ? args.source.row(host_row) : nullptr);
  tally.collect(sums);
  cluster_wait();  // all counts are known, and nothing more will be touched

  const i32 now = inbox.now;
  i32 num_misses = 0;
  i32 first_own = 0;
  i32 any_repeats = 0;
#pragma unroll
  for (i32 block = 0; block < CLUSTER; ++block) {
    if (block < rank) first_own += inbox.misses[block];
    num_misses += inbox.misses[block];
    any_repeats |= inbox.repeats[block];
  }
  if (num_misses == 0) {
    if (leads) finish_blocks(args, now, CLUSTER, 0);
    hot.stamp_touched(now);
    __syncthreads();
    Tally::publish(sums, args.totals);
    return;
  }

  count_rows(hot, kept, now, histogram);
  cluster_sync();  // all rows are counted
  Threshold threshold{find_crossing(histogram, rank, num_misses), 0u};
  if (threshold.crossing.bin == OLD_BIN) threshold = refine_old(hot, histogram, threshold.crossing, now);
  const i32 num_loaded = threshold.crossing.wanted;
  const i32 own_loaded = max(0, min(num_own, num_loaded - first_own));
  const i32 reserved = is_single ? finish_blocks(args, now, 1, own_loaded) : 0;  // not waited for before it is used
  if (num_loaded > 0) hand_out_victims(hot, threshold, now, inbox.misses, victims, &num_handed_out);
  cluster_sync();  // all victims are known, and no block reaches into another one from here on
  if (is_single) plan_start = reserved;
  __syncthreads();
#pragma unroll 1
  for (i64 round = 1; __any_sync(ALL_LANES, active); ++round) {
    const bool loads = active && index < own_loaded;
    const i64 slab_row = loads ? hot.physical_row(victims[index]) : EMPTY;
    mover.finish(loads ? args.destination.row(slab_row) : nullptr);
    if (loads) {
      args.plan_host_row[plan_start + index] = host_row;
      args.plan_slab_row[plan_start + index] = slab_row;
      commit(args, slot, victims[index], misses.listed[index], now);
    }
    index = static_cast<i32>(owned_row(round));
    active = index >= 0 && index < own_loaded;
    host_row = active ? request.host_row(misses.listed[index]) : EMPTY;
    mover.begin(active ? args.source.row(host_row) : nullptr);
  }
  // While the last rows are on their way to the slab.
  if (leads) count_request(args, num_misses, num_loaded);
  if (num_own > 0) answer_misses(args, batch.rows, batch.num_rows, hot, victims, own_loaded, tally);
  if (any_repeats) {
    cluster_sync();  // the state is written
    answer_repeats(args, batch.rows, batch.num_rows, request, hot, tally);
  }
  tally.collect(sums);
  mover.drain();
  __syncthreads();
  Tally::publish(sums, args.totals);
}
