// Step one of resolve: where each selected position is. Selections that need no load are answered at once.
#pragma once
#include "layout.cuh"
#include "miss_set.cuh"
#include "tally.cuh"
#include "team.cuh"
#include "victims.cuh"

// One request's rows of the tables.
struct Request {
  const i32* resident;
  const i32* host;
  const i16* hot_row_of;
  i32* stamp;
  i32 num_positions;  // from here on, nothing can be served
  i32 block_shift;
  bool has_lease;     // of any hot block

  __device__ __forceinline__ i64 host_row(i32 position) const {
    const i64 block = host[position >> block_shift];
    return (block << block_shift) + (position & ((1 << block_shift) - 1));
  }
};

constexpr i32 AT_ONCE = THREADS >= 1024 ? 2 : 4;  // neighbouring selections of one thread
constexpr i32 CHUNK = AT_ONCE * WARP;   // selections of one warp, answered by one block of the team

__device__ __forceinline__ i32 chunks_per_row(const ResolveArgs& args) { return (args.topk + CHUNK - 1) / CHUNK; }

// The chunks of a team's rows in turn belong to its blocks in turn.
__device__ __forceinline__ bool is_own_chunk(const Team& team, i32 chunk) {
  return static_cast<u32>(chunk) % static_cast<u32>(team.size) == static_cast<u32>(team.rank);
}

struct Positions {
  i32 of[AT_ONCE];
};

// This lane's selections of a batch row, from column `first` on; -1 past the row's end.
__device__ __forceinline__ Positions load_positions(const ResolveArgs& args, i32 batch_row, i32 first) {
  const i32* const row = args.positions + static_cast<i64>(batch_row) * args.topk;
  Positions positions;
#pragma unroll
  for (i32 i = 0; i < AT_ONCE; ++i) positions.of[i] = first + i < args.topk ? row[first + i] : EMPTY;
  return positions;
}

// What the tables say about some selections.
struct Found {
  i32 resident[AT_ONCE];
  i32 host[AT_ONCE];
  i32 hot_row[AT_ONCE];
};

__device__ __forceinline__ Found look_up(const Request& request, const Positions& positions) {
  Found found;
#pragma unroll
  for (i32 i = 0; i < AT_ONCE; ++i) {
    const u32 position = static_cast<u32>(positions.of[i]);
    const bool tracked = position < static_cast<u32>(request.num_positions);
    found.resident[i] = tracked ? request.resident[position >> request.block_shift] : 0;
    // Without a lease, what only the host has cannot be served.
    found.host[i] = tracked && request.has_lease ? request.host[position >> request.block_shift] : 0;
    found.hot_row[i] = tracked && request.has_lease ? request.hot_row_of[position] : EMPTY;
  }
  return found;
}

// Which of some selections are served by hot rows and which must be loaded, a bit each.
struct Served {
  u32 hot;
  u32 missed;
};

__device__ __forceinline__ Served mark(const HotRows& hot, const MissSet& misses, const Positions& positions,
                                       const Found& found) {
  Served served{0u, 0u};
#pragma unroll
  for (i32 i = 0; i < AT_ONCE; ++i) {
    if (found.resident[i] != 0) continue;
    const i32 hot_row = found.hot_row[i];
    const bool asked = static_cast<u32>(hot_row) < static_cast<u32>(hot.num_rows);
    if (asked && hot.holds(hot_row, positions.of[i]) && hot.is_leased(hot_row)) {
      hot.touch(hot_row);
      served.hot |= 1u << i;
    } else if (found.host[i] != 0) {
      misses.insert(positions.of[i]);
      served.missed |= 1u << i;
    }
  }
  return served;
}

// Writes the answers of this lane's selections, in a batch row from column `first` on. Those of misses come later.
__device__ __forceinline__ void answer(const ResolveArgs& args, const Request& request, const HotRows& hot,
                                       const Positions& positions, const Found& found, Served served, i32 batch_row,
                                       i32 first, Tally& tally) {
  i32* const out = args.out + static_cast<i64>(batch_row) * args.topk;
#pragma unroll
  for (i32 i = 0; i < AT_ONCE; ++i) {
    if (first + i >= args.topk) break;
    i32 row = EMPTY;
    if (found.resident[i] != 0) {
      row = (found.resident[i] << request.block_shift) + (positions.of[i] & ((1 << request.block_shift) - 1));
      ++tally.resident;
    } else if ((served.hot >> i) & 1u) {
      row = static_cast<i32>(hot.physical_row(found.hot_row[i]));
      request.stamp[found.hot_row[i]] = hot.now;
      ++tally.hot;
    } else {
      tally.unreachable += positions.of[i] >= 0 && !((served.missed >> i) & 1u);
    }
    out[first + i] = row;
  }
}

// Classifies all selections of the request, having fetched its hot rows; returns whether one of this thread's must be
// loaded. `positions` are this lane's of its warp's first chunk, if that lies in the request's first row.
__device__ __forceinline__ bool classify(const ResolveArgs& args, const Team& team, const Request& request,
                                         const HotRows& hot, const MissSet& misses, Tally& tally,
                                         Positions positions) {
  const i32 num_chunks = chunks_per_row(args);
  const i32 total = team.num_rows * num_chunks;
  i32 row = 0;                 // of the request, and the warp's chunk in it
  i32 chunk_in_row = warp_id();
  bool is_loaded = chunk_in_row < num_chunks;
  bool is_fetched = !request.has_lease;
  bool missed = false;
#pragma unroll 1
  for (i32 chunk = warp_id(); chunk - warp_id() < total; chunk += WARPS) {
    for (; chunk_in_row >= num_chunks; chunk_in_row -= num_chunks) ++row;
    const bool exists = chunk < total;
    const i32 batch_row = exists ? team.rows[row] : 0;
    const i32 first = exists ? chunk_in_row * CHUNK + lane_id() * AT_ONCE : args.topk;
    if (!is_loaded) positions = load_positions(args, batch_row, first);
    is_loaded = false;
    const Found found = look_up(request, positions);
    if (!is_fetched) HotRows::wait_fetched();
    is_fetched = true;
    const Served served = mark(hot, misses, positions, found);
    missed |= served.missed != 0;
    if (exists && is_own_chunk(team, chunk)) {
      answer(args, request, hot, positions, found, served, batch_row, first, tally);
    }
    chunk_in_row += WARPS;
  }
  return missed;
}
