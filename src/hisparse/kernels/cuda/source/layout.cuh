// What the host passes to a kernel: one struct by value. `arguments.py` builds the same structs; the host compiles
// with the sizes that it believes in, and the asserts below compare.
#pragma once
#include "base.cuh"

// Rows of one layer in a paged allocation. The block size is a power of two.
struct PagedRows {
  char* base;  // the layer's first byte in block 0
  i64 block_stride;
  i32 row_stride;
  i32 block_shift;

  __device__ __forceinline__ char* row(i64 physical_row) const {
    const i64 block = physical_row >> block_shift;
    const i64 row_in_block = physical_row & ((1 << block_shift) - 1);
    return base + block * block_stride + row_in_block * row_stride;
  }
};
static_assert(sizeof(PagedRows) == 24, "PagedRows is packed");

// Offsets in bytes into a block's dynamic shared memory; the host lays it out.
struct SharedOffsets {
  i32 miss_bits;      // u32[4 * segments], one bit a logical position
  i32 miss_prefix;    // u16[segments], misses before each segment of 128 positions
  i32 touched;        // u32[ceil(hot_rows / 32)], hot rows that this step reads
  i32 positions;      // i32[hot_rows] if KEEP_POSITIONS
  i32 stamps;         // i32[hot_rows] if KEEP_STAMPS
  i32 victims;        // u16[hot_rows], hot row by rank
  i32 rows;           // u16[num_rows], the batch rows of this request
  i32 stages;         // the row movers' buffers
  i32 miss_segments;  // number of segments (a size, not an offset)
};
static_assert(sizeof(SharedOffsets) == 36, "SharedOffsets is packed");

// The same for a kernel of clusters: each block holds a share of what its request needs.
struct ClusterOffsets {
  i32 missed;        // u32[missed_words], one bit a logical position, dealt out to the blocks
  i32 touched;       // u32[touched_words], one bit a hot row: those that this block's selections read
  i32 excluded;      // u32[touched_words]: those that no victim may be
  i32 misses;        // i32[capacity], logical positions
  i32 victims;       // u16[capacity], hot row by miss
  i32 rows;          // u16[num_rows], the batch rows of this request
  i32 stages;        // the row movers' buffers
  i32 missed_words;  // a size, not an offset, as are the next two
  i32 touched_words;
  i32 capacity;
};
static_assert(sizeof(ClusterOffsets) == 40, "ClusterOffsets is packed");

enum Counter { RESIDENT, HOT, MISS, BYTES, UNREACHABLE };
constexpr i32 STATUS_UNION_OVERFLOW = 1;
constexpr i32 EMPTY = -1;

// What every launch reads comes first: arguments are fetched in lines, and the first fetch is waited for.
struct ResolveArgs {
  i32 num_rows;
  i32 topk;
  i32 num_slots;
  i32 max_pages;
  i32 hot_blocks;
  i32 hot_rows;
  i32 max_tokens;
  i32 num_positions;  // what both the tables and the inverse map cover
  i32 plan_rows;
  i32 plan_capacity;
  ClusterOffsets cluster;
  i32 reserved[2];
  const i32* positions;  // [num_rows, topk]
  const i32* row_slot;   // [num_rows]
  i32* out;              // [num_rows, topk]
  const i32* resident;   // [num_slots, max_pages]
  const i32* host;       // [num_slots, max_pages]
  const i32* hot;        // [num_slots, hot_blocks]
  i32* position_of;      // [num_slots, hot_rows]
  i16* hot_row_of;       // [num_slots, max_tokens]
  i32* stamp;            // [num_slots, hot_rows]
  i32* step;             // [num_slots]
  i16* queue;            // [num_slots, hot_rows up to a multiple of 4]
  int4* queue_state;     // [num_slots], see victim_queue.cuh
  PagedRows source;
  PagedRows destination;
  i32* plan_count;     // [plan_rows]
  i64* plan_host_row;  // [plan_rows, plan_capacity]
  i64* plan_slab_row;  // [plan_rows, plan_capacity]
  u64* totals;         // by Counter
  i32* status;
  i32* arrivals;       // [num_rows or more], by the first batch row of a request; 0 between launches
  SharedOffsets shared;
};

constexpr i32 MAX_LAYERS = 16;

// Copies of the rows `source_row[r][i]` to `destination_row[r][i]`, for every layer.
struct MoveArgs {
  const i64* source_row;       // [num_rows, row_length]
  const i64* destination_row;  // [num_rows, row_length]
  const i32* count;            // [num_rows], how many of each row count; if null, all
  u64* totals;                 // if not null, totals[BYTES] grows by what was copied
  i64 row_length;
  i32 num_rows;
  i32 num_layers;
  PagedRows source[MAX_LAYERS];
  PagedRows destination[MAX_LAYERS];
};

struct ResetArgs {
  const i64* slots;
  i32* position_of;   // [num_slots, hot_rows]
  int4* queue_state;  // [num_slots]
  i32 num_resets;
  i32 num_slots;
  i32 hot_rows;
  i32 reserved;
};

constexpr i32 MAX_RUNS = 32;

// Equal pieces of a page, at a stride at both ends. All numbers in bytes but for the last two, which are words.
struct CopyRun {
  u64 source_offset;
  u64 destination_offset;
  u64 source_stride;
  u64 destination_stride;
  u32 first_word;  // words of the page's runs before this one
  u32 words_per_piece;
};

// Copies `num_runs` runs of every page. num_pages * words_per_page is less than 2^32.
struct CopyArgs {
  const u64* source_bases;       // [num_pages], addresses
  const u64* destination_bases;  // [num_pages], addresses
  u32 num_pages;
  u32 words_per_page;
  i32 num_runs;
  i32 word_bytes;
  CopyRun runs[MAX_RUNS];
};

static_assert(sizeof(ResolveArgs) == RESOLVE_ARGS_BYTES, "ResolveArgs differs from arguments.py");
static_assert(sizeof(MoveArgs) == MOVE_ARGS_BYTES, "MoveArgs differs from arguments.py");
static_assert(sizeof(ResetArgs) == RESET_ARGS_BYTES, "ResetArgs differs from arguments.py");
static_assert(sizeof(CopyArgs) == COPY_ARGS_BYTES, "CopyArgs differs from arguments.py");
