// Selected positions to physical rows of the slab, and the copies of what was missing, in one launch: the kernel for
// devices with clusters. One cluster serves one request; its blocks share out the selections and the hot rows.
//
// The steps of a block: answer its selections, which starts the host reads of those that must be loaded; while they are
// under way, learn how many the other blocks have and find the victims; write answers, state and plan; finish the copies.
#include "batch_plan.cuh"
#include "batch_rows.cuh"
#include "cluster.cuh"
#include "layout.cuh"
#include "row_mover.cuh"
#include "selections.cuh"
#include "victim_queue.cuh"

// Which batch rows a cluster serves.
struct Batch {
  u16* rows;
  i32 num_rows;  // 0 if a cluster of another row serves the request
};

// How other batch rows of the request stand to this one.
struct OtherRows {
  u32* seen;  // shared memory, a word a warp
  static constexpr u32 EARLIER = 1;
  static constexpr u32 LATER = 2;

  // All threads call it, with the slot of batch row `threadIdx.x`.
  __device__ __forceinline__ void look_for(const ResolveArgs& args, i32 row, i32 slot, i32 other) const {
    bool earlier = false;
    bool later = false;
#pragma unroll 1
    for (i32 i = threadIdx.x; i < args.num_rows; i += THREADS) {
      earlier |= other == slot && i < row;
      later |= other == slot && i > row;
      other = slot_of(args, i + THREADS);
    }
    const u32 any = (__any_sync(ALL_LANES, earlier) ? EARLIER : 0u) | (__any_sync(ALL_LANES, later) ? LATER : 0u);
    if (lane_id() == 0) seen[warp_id()] = any;
  }

  // A barrier after look_for().
  __device__ __forceinline__ u32 found() const {
    u32 all = 0;
#pragma unroll
    for (i32 warp = 0; warp < WARPS; ++warp) all |= seen[warp];
    return all;
  }
};

// The rows that this cluster serves: all of its request, if its row is the request's first. All threads call it, with
// `row` in `rows[0]`.
__device__ __forceinline__ Batch list_rows(const ResolveArgs& args, i32 row, i32 slot, u32 others, u16* rows) {
  __shared__ i32 counts[2];
  if (others & OtherRows::EARLIER) return {rows, 0};
  if (others == 0u) return {rows, 1};
  if (warp_id() == 0) list_team_rows(args, row, slot, slot_of(args, lane_id()), rows, counts);
  __syncthreads();
  return {rows, counts[0]};
}

// How many of the request's hot blocks are leased. All threads call it, with the word of block `threadIdx.x` in hand; it
// has a barrier for every THREADS blocks.
__device__ __forceinline__ i32 count_all_leased(const i32* blocks, i32 num_blocks, i32 block) {
  i32 leased = __syncthreads_count(block != 0);
#pragma unroll 1
  for (i32 first = THREADS; first < num_blocks; first += THREADS) {
    const i32 index = first + static_cast<i32>(threadIdx.x);
    leased += __syncthreads_count(index < num_blocks && blocks[index] != 0);
  }
  return leased;
}

// Answers all selections of this block, from those of the first row on, which were looked up before.
__device__ __forceinline__ void answer_all(const ResolveArgs& args, const Batch& batch, const Request& request,
                                           const HotRows& hot, const Misses& misses, const RowMover& mover,
                                           Selections& selections, bool has_lease, Tally& tally) {
#pragma unroll 1
  for (i32 i = 0; i < batch.num_rows; ++i) {
#pragma unroll 1
    for (i32 first = 0; first < args.topk; first += Selections::SPAN) {
      if (i + first > 0) {
        selections.load(args, batch.rows[i], first);
        selections.look_up(request, hot);
      }
      answer(args, request, hot, misses, mover, selections, has_lease, batch.rows[i], first, tally);
    }
  }
}

// The misses of a request, counted.
struct MissCounts {
  i32 all;
  i32 own;    // of this block
  i32 first;  // before them come those of the blocks of lower rank
  bool any_repeats;
};

// A cluster barrier after the last miss was listed. `listed` is the block's own word.
__device__ __forceinline__ MissCounts count_misses(const u32* listed, i32 rank, i32 capacity) {
  const u32 word = lane_id() < CLUSTER ? remote_load(listed, lane_id()) : 0u;
  const u32 count = min(word & ~HAS_REPEATS, static_cast<u32>(capacity));
  MissCounts counts;
  counts.any_repeats = __any_sync(ALL_LANES, (word & HAS_REPEATS) != 0u);
  counts.all = static_cast<i32>(__reduce_add_sync(ALL_LANES, count));
  counts.first = static_cast<i32>(__reduce_add_sync(ALL_LANES, lane_id() < rank ? count : 0u));
  counts.own = static_cast<i32>(__shfl_sync(ALL_LANES, count, rank));
  return counts;
}

// Finds victims for the request's misses, in a new queue if the old one runs out. It leaves a queue for later steps.
__device__ __forceinline__ void find_victims(const HotRows& hot, QueueState& queue, Window& window, i32 rank,
                                             i32 num_leased, Victims& victims) {
  const i32 head = queue.head;
  bool is_new = false;
#pragma unroll 1
  for (;;) {
    take_victims(hot, queue, window, !is_new, victims);
    if (victims.taken == victims.wanted) break;
    queue = make_queue(hot, rank, num_leased, false);
    is_new = true;
    if (queue.size == 0) return;  // this step reads all the others
    cluster_sync_global();
  }
  const i32 passed_over = queue.head - head - victims.wanted;
  const bool runs_low = queue.size - queue.head < 2 * victims.wanted || passed_over > victims.wanted + SPARSE;
  if (!is_new && runs_low) queue = make_queue(hot, rank, num_leased, true);  // while host rows are under way
}

// Gives the block's victims to their new positions, and puts the copies into the plan.
__device__ __forceinline__ void commit(const ResolveArgs& args, const Request& request, const HotRows& hot, i32 slot,
                                       i32 row, const i32* missed, const Victims& victims, i32 num_loaded) {
#pragma unroll 1
  for (i32 index = threadIdx.x; index < num_loaded; index += THREADS) {
    const i32 position = missed[index];
    const i32 hot_row = victims.rows[index];
    const i64 hot_index = static_cast<i64>(slot) * args.hot_rows + hot_row;
    const i64 entry = plan_entry(args, row, victims.first + index);
    args.plan_host_row[entry] = request.host_row(position);
    args.plan_slab_row[entry] = hot.physical_row(hot_row);
    args.position_of[hot_index] = position;
    args.stamp[hot_index] = hot.now;
    args.hot_row_of[static_cast<i64>(slot) * args.max_tokens + position] = static_cast<i16>(hot_row);
  }
}

// Moves the block's misses. Reads of the first round were started when the misses were listed.
__device__ __forceinline__ void move_rows(const ResolveArgs& args, const Request& request, const HotRows& hot,
                                          const Misses& misses, const Victims& victims, i32 num_loaded,
                                          RowMover& mover) {
#pragma unroll 1
  for (i64 round = 0;; ++round) {
    const i32 index = static_cast<i32>(owned_row(round));
    const bool active = index >= 0 && index < (round == 0 ? victims.num_own : num_loaded);
    if (!__any_sync(ALL_LANES, active)) return;
    const char* const source = active ? args.source.row(request.host_row(misses.listed[index])) : nullptr;
    if (round == 0) mover.adopt(source); else mover.begin(source);
    mover.finish(active && index < num_loaded ? args.destination.row(hot.physical_row(victims.rows[index])) : nullptr);
  }
}

__device__ __forceinline__ void count_request(const ResolveArgs& args, i32 num_misses, i32 num_loaded) {
  if (num_misses > num_loaded) atomicOr(args.status, STATUS_UNION_OVERFLOW);
  atomicAdd(&args.totals[MISS], static_cast<u64>(num_loaded));
  atomicAdd(&args.totals[BYTES], static_cast<u64>(num_loaded) * ROW_BYTES);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    resolve_cluster(const __grid_constant__ ResolveArgs args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ u32 listed;
  __shared__ u32 seen[WARPS];
  __shared__ u32 sums[3];
  const i32 rank = cluster_rank();
  const i32 row = blockIdx.y;
  const bool leads = rank == 0 && threadIdx.x == 0;  // of the cluster
  // Everything that needs no other load is asked for at once, and waited for only when all is prepared.
  const i32 slot = args.row_slot[row];
  const i32 other = slot_of(args, threadIdx.x);
  Selections selections;
  selections.load(args, row, 0);
  const Misses misses{{reinterpret_cast<u32*>(shared + args.cluster.missed), args.cluster.missed_words},
                      reinterpret_cast<i32*>(shared + args.cluster.misses), &listed, args.cluster.capacity};
  u32* const touched = reinterpret_cast<u32*>(shared + args.cluster.touched);
  u32* const excluded = reinterpret_cast<u32*>(shared + args.cluster.excluded);
  misses.positions.clear();
#pragma unroll 1
  for (i32 word = threadIdx.x; word < args.cluster.touched_words; word += THREADS) touched[word] = excluded[word] = 0u;
  if (threadIdx.x < 3) sums[threadIdx.x] = 0u;
  u16* const rows = reinterpret_cast<u16*>(shared + args.cluster.rows);
  if (threadIdx.x == 0) {
    listed = 0u;
    rows[0] = static_cast<u16>(row);
  }
  RowMover mover(shared + args.cluster.stages);
  cluster_arrive();
  if (slot < 0 || slot >= args.num_slots) {
#pragma unroll 1
    for (i32 column = Selections::column(0, 0); column < args.topk; column += CLUSTER * THREADS) {
      args.out[static_cast<i64>(row) * args.topk + column] = EMPTY;
    }
    if (rank == 0) close_plan_row(args, row, 0);
    return;
  }

  const i64 hot_start = static_cast<i64>(slot) * args.hot_rows;
  const i64 page_start = static_cast<i64>(slot) * args.max_pages;
  const i32* const hot_blocks = args.hot + static_cast<i64>(slot) * args.hot_blocks;
  const Request request{args.resident + page_start, args.host + page_start,
                        args.hot_row_of + static_cast<i64>(slot) * args.max_tokens, args.num_positions,
                        args.destination.block_shift};
  HotRows hot{args.position_of + hot_start,
              args.stamp + hot_start,
              hot_blocks,
              args.queue + static_cast<i64>(slot) * ((args.hot_rows + 3) / 4 * 4),
              touched,
              excluded,
              args.hot_rows,
              args.cluster.touched_words,
              args.destination.block_shift,
              args.step[slot] + 1,
              false};
  const i32 hot_block = threadIdx.x < args.hot_blocks ? hot_blocks[threadIdx.x] : 0;
  QueueState queue = QueueState::load(args.queue_state + slot);
  selections.look_up(request, hot);
  const OtherRows others{seen};
  others.look_for(args, row, slot, other);
  Window window;
  window.load_rows(hot, queue);
  const i32 num_leased = count_all_leased(hot_blocks, args.hot_blocks, hot_block);
  const Batch batch = list_rows(args, row, slot, others.found(), rows);
  if (batch.num_rows == 0) {
    if (rank == 0) close_plan_row(args, row, 0);
    return;
  }
  const bool has_lease = num_leased != 0;
  hot.fully_leased = num_leased == args.hot_blocks;
  if (has_lease) cluster_wait();  // all blocks run, and their shared memory is clear

  Tally tally;
  answer_all(args, batch, request, hot, misses, mover, selections, has_lease, tally);
  if (has_lease) cluster_arrive();
  window.load_stamps(hot);  // an arrival waits for loads that are under way
  tally.collect(sums);
  MissCounts counts{0, 0, 0, false};
  if (has_lease) {
    cluster_wait();  // all misses are listed, and nothing more will be touched
    counts = count_misses(&listed, rank, args.cluster.capacity);
  } else {
    __syncthreads();
  }
  if (counts.all == 0) {
    if (has_lease) cluster_arrive();
    if (rank == 0) close_plan_row(args, row, 0);
    if (leads && has_lease) args.step[slot] = hot.now;
    Tally::publish(sums, args.totals);
    if (has_lease) cluster_wait();  // no block reaches into another one any more
    return;
  }

  hot.exclude_touched();
  Victims victims{reinterpret_cast<u16*>(shared + args.cluster.victims), counts.first, counts.own, counts.all, 0};
  if (queue.leased != num_leased) queue = {0, 0, 0, num_leased};
  find_victims(hot, queue, window, rank, num_leased, victims);
  cluster_sync();  // all blocks have read the state, and none reaches into another one from here on
  const i32 num_loaded = victims.taken;
  const i32 own_loaded = max(0, min(counts.own, num_loaded - counts.first));
  commit(args, request, hot, slot, row, misses.listed, victims, own_loaded);
  if (rank == 0) close_plan_row(args, row, num_loaded);
  if (leads) {
    args.step[slot] = hot.now;
    queue.store(args.queue_state + slot);
    count_request(args, counts.all, num_loaded);
  }
  if (counts.own > 0) answer_misses(args, batch.rows, batch.num_rows, hot, victims.rows, own_loaded, tally);
  move_rows(args, request, hot, misses, victims, own_loaded, mover);
  if (counts.any_repeats) {
    cluster_sync_global();  // the state is written
    answer_repeats(args, batch.rows, batch.num_rows, request, hot, tally);
  }
  tally.collect(sums);
  mover.drain();
  __syncthreads();
  Tally::publish(sums, args.totals);
}
