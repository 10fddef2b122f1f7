// Copies rows between two paged allocations, for up to MAX_LAYERS layers: a leader's plan for its followers, staged
// host rows of a prefill, new rows on their way to the host.
#include "layout.cuh"
#include "row_mover.cuh"

// Pairs of source and destination, of several rows of them: row r has its first `count[r]`.
class Pairs {
 public:
  // `starts`: shared memory, a word a row. All threads call it; it ends with a barrier.
  __device__ __forceinline__ Pairs(const MoveArgs& args, u32* starts) : starts_(starts), num_rows_(args.num_rows) {
    u32 total = 0;
#pragma unroll 1
    for (i32 first = 0; first < num_rows_; first += THREADS) {
      const i32 row = first + static_cast<i32>(threadIdx.x);
      const i64 all = args.count != nullptr && row < num_rows_ ? args.count[row] : args.row_length;
      const ScanResult scan = block_exclusive_sum(row < num_rows_ ? static_cast<u32>(all) : 0u);
      if (row < num_rows_) starts[row] = total + scan.before;
      total += scan.total;
    }
    total_ = total;
    __syncthreads();
  }

  __device__ __forceinline__ i64 total() const { return total_; }

  // Where pair `index` stands, in rows of `row_length`.
  __device__ __forceinline__ i64 find(u32 index, i64 row_length) const {
    i32 low = 0;
    i32 high = num_rows_;
#pragma unroll 1
    while (high - low > 1) {
      const i32 middle = (low + high) / 2;
      if (starts_[middle] <= index) low = middle; else high = middle;
    }
    return low * row_length + (index - starts_[low]);
  }

 private:
  const u32* starts_;
  i32 num_rows_;
  u32 total_;
};

extern "C" __global__ void __launch_bounds__(THREADS) move_rows(const __grid_constant__ MoveArgs args) {
  extern __shared__ __align__(128) char shared[];
  RowMover mover(shared);
  const Pairs pairs(args, reinterpret_cast<u32*>(shared + ALL_STAGES_BYTES));
  const i64 num_copies = pairs.total() * args.num_layers;
  if (args.totals != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&args.totals[BYTES], static_cast<u64>(num_copies) * ROW_BYTES);
  }
#pragma unroll 1
  for (i64 round = 0;; ++round) {
    const i64 owned = owned_row(round);
    const i64 copy = owned < 0 ? num_copies : owned * gridDim.x + blockIdx.x;
    if (!__any_sync(ALL_LANES, copy < num_copies)) break;
    const char* source = nullptr;
    char* destination = nullptr;
    if (copy < num_copies) {
      const i32 layer = static_cast<i32>(copy % args.num_layers);
      const i64 pair = pairs.find(static_cast<u32>(copy / args.num_layers), args.row_length);
      const i64 source_row = args.source_row[pair];
      const i64 destination_row = args.destination_row[pair];
      if (source_row >= 0 && destination_row >= 0) {
        source = args.source[layer].row(source_row);
        destination = args.destination[layer].row(destination_row);
      }
    }
    mover.begin(source);
    mover.finish(destination);
  }
  mover.drain();
}
