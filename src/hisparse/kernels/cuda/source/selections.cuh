// Where each selected position of a request is, for a cluster: its blocks share out the columns of every batch row,
// and each answers its own at once, except for what must be loaded.
#pragma once
#include "cluster.cuh"
#include "layout.cuh"
#include "row_mover.cuh"
#include "tally.cuh"
#include "victim_queue.cuh"

constexpr u32 HAS_REPEATS = 1u << 31;
constexpr i32 REPEATED = -0x7fffffff - 1;  // answer for now: another selection loads this position

// Answer for now: the block's miss `index`; and back.
__device__ __forceinline__ i32 answer_of_miss(i32 index) { return -2 - index; }
__device__ __forceinline__ bool is_miss(i32 answer) { return answer <= -2 && answer != REPEATED; }
__device__ __forceinline__ i32 miss_of_answer(i32 answer) { return -2 - answer; }

// One request's rows of the tables.
struct Request {
  const i32* resident;
  const i32* host;
  const i16* hot_row_of;
  i32 num_positions;  // from here on, nothing can be served
  i32 block_shift;

  __device__ __forceinline__ i64 row_in(i64 block, i32 position) const {
    return (block << block_shift) + (position & ((1 << block_shift) - 1));
  }

  __device__ __forceinline__ i64 host_row(i32 position) const { return row_in(host[position >> block_shift], position); }
};

// The positions that a request must load: the set of all blocks, and this block's list of those that it loads itself.
struct Misses {
  DealtBits positions;
  i32* listed;
  u32* count;  // may pass the capacity: what is past it is not listed. Its top bit: a selection repeats a miss
  i32 capacity;

  // Lists a position, unless another selection has; returns its index or, if it has none, the answer for now.
  __device__ __forceinline__ i32 add(i32 position) const {
    if (!positions.insert(position)) {
      atomicOr(count, HAS_REPEATS);
      return REPEATED;
    }
    const i32 index = static_cast<i32>(atomicAdd(count, 1u) & ~HAS_REPEATS);
    if (index >= capacity) return EMPTY;
    listed[index] = position;
    return index;
  }
};

// A thread's selections of a batch row, and what the tables say about them.
struct Selections {
  i32 position[SELECTIONS];
  i32 resident[SELECTIONS];
  i32 host[SELECTIONS];
  i32 hot_row[SELECTIONS];   // that may hold the position
  i32 held[SELECTIONS];      // what it holds
  i32 hot_block[SELECTIONS];  // where it is

  static constexpr i32 SPAN = SELECTIONS * CLUSTER * THREADS;  // columns of all threads of a cluster

  static __device__ __forceinline__ i32 column(i32 first, i32 i) {
    return first + (i * CLUSTER + cluster_rank()) * THREADS + static_cast<i32>(threadIdx.x);
  }

  // Columns from `first` on; -1 past the row's end.
  __device__ __forceinline__ void load(const ResolveArgs& args, i32 batch_row, i32 first) {
    const i32* const row = args.positions + static_cast<i64>(batch_row) * args.topk;
#pragma unroll
    for (i32 i = 0; i < SELECTIONS; ++i) position[i] = column(first, i) < args.topk ? row[column(first, i)] : EMPTY;
  }

  // All loads that need no other come first, so that they wait together.
  __device__ __forceinline__ void look_up(const Request& request, const HotRows& hot) {
#pragma unroll
    for (i32 i = 0; i < SELECTIONS; ++i) {
      const bool tracked = static_cast<u32>(position[i]) < static_cast<u32>(request.num_positions);
      resident[i] = tracked ? request.resident[position[i] >> request.block_shift] : 0;
      host[i] = tracked ? request.host[position[i] >> request.block_shift] : 0;
      hot_row[i] = tracked ? request.hot_row_of[position[i]] : EMPTY;
    }
#pragma unroll
    for (i32 i = 0; i < SELECTIONS; ++i) {
      const bool asked = static_cast<u32>(hot_row[i]) < static_cast<u32>(hot.num_rows) && resident[i] == 0;
      held[i] = asked ? hot.position_of[hot_row[i]] : EMPTY;
      hot_block[i] = asked ? hot.blocks[hot_row[i] >> hot.block_shift] : 0;
    }
  }
};

// Answers a thread's selections in the columns from `first` on. The read of a listed miss starts at once, if it has a
// place among the rows under way.
__device__ __forceinline__ void answer(const ResolveArgs& args, const Request& request, const HotRows& hot,
                                       const Misses& misses, const RowMover& mover, const Selections& found,
                                       bool has_lease, i32 batch_row, i32 first, Tally& tally) {
  i32* const out = args.out + static_cast<i64>(batch_row) * args.topk;
#pragma unroll
  for (i32 i = 0; i < SELECTIONS; ++i) {
    if (Selections::column(first, i) >= args.topk) continue;
    const i32 position = found.position[i];
    i32 row = EMPTY;
    if (found.resident[i] != 0) {
      row = static_cast<i32>(request.row_in(found.resident[i], position));
      ++tally.resident;
    } else if (position >= 0 && found.held[i] == position && found.hot_block[i] != 0) {
      row = static_cast<i32>(request.row_in(found.hot_block[i], found.hot_row[i]));
      hot.touch(found.hot_row[i]);
      ++tally.hot;
    } else if (has_lease && found.host[i] != 0) {
      row = misses.add(position);
      if (row >= 0) {
        mover.start(row, args.source.row(request.row_in(found.host[i], position)));
        row = answer_of_miss(row);
      }
      if (row == EMPTY) atomicOr(args.status, STATUS_UNION_OVERFLOW);
      tally.unreachable += row == EMPTY;
    } else {
      tally.unreachable += position >= 0;
    }
    out[Selections::column(first, i)] = row;
  }
}

// Replaces the answers for now of this thread's misses: the first `num_loaded` of the block have a victim.
__device__ __forceinline__ void answer_misses(const ResolveArgs& args, const u16* rows, i32 num_rows,
                                              const HotRows& hot, const u16* victims, i32 num_loaded, Tally& tally) {
#pragma unroll 1
  for (i32 i = 0; i < num_rows; ++i) {
    i32* const out = args.out + static_cast<i64>(rows[i]) * args.topk;
#pragma unroll 1
    for (i32 column = Selections::column(0, 0); column < args.topk; column += CLUSTER * THREADS) {
      const i32 index = miss_of_answer(out[column]);
      if (!is_miss(out[column])) continue;
      out[column] = index < num_loaded ? static_cast<i32>(hot.physical_row(victims[index])) : EMPTY;
      tally.unreachable += index >= num_loaded;
    }
  }
}

// Read past the first-level cache, which does not see what other multiprocessors wrote.
__device__ __forceinline__ i32 load_shared_state(const i32* address) {
  i32 value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}

__device__ __forceinline__ i32 load_shared_state(const i16* address) {
  i16 value;
  asm volatile("ld.relaxed.gpu.global.s16 %0, [%1];" : "=h"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}

// Replaces the answers for now of this thread's repeated misses, a cluster barrier after the state was written.
__device__ __forceinline__ void answer_repeats(const ResolveArgs& args, const u16* rows, i32 num_rows,
                                               const Request& request, const HotRows& hot, Tally& tally) {
#pragma unroll 1
  for (i32 i = 0; i < num_rows; ++i) {
    const i64 start = static_cast<i64>(rows[i]) * args.topk;
#pragma unroll 1
    for (i32 column = Selections::column(0, 0); column < args.topk; column += CLUSTER * THREADS) {
      if (args.out[start + column] != REPEATED) continue;
      const i32 position = args.positions[start + column];
      const i32 hot_row = load_shared_state(request.hot_row_of + position);
      const bool asked = static_cast<u32>(hot_row) < static_cast<u32>(hot.num_rows);
      const bool loaded = asked && load_shared_state(hot.position_of + hot_row) == position;
      args.out[start + column] = loaded ? static_cast<i32>(hot.physical_row(hot_row)) : EMPTY;
      tally.hot += loaded;
      tally.unreachable += !loaded;
    }
  }
}
