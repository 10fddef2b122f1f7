// Copies pages piece by piece between two places that the device can address, one of them pinned host memory: strided
// runs, the same for every page. A thread owns words, and neighbouring threads own neighbouring words, so that fragments
// of any size are read and written in whole lines and keep all threads busy.
#include "layout.cuh"

namespace {

constexpr i32 AHEAD = 4;  // loads in flight a thread

template <typename Word>
struct Place {
  const Word* source;
  Word* destination;
};

// Where word `index` of all pages is read and written.
template <typename Word>
__device__ __forceinline__ Place<Word> find(const CopyArgs& args, u32 index) {
  const u32 page = index / args.words_per_page;
  u32 word = index - page * args.words_per_page;
  i32 run = 0;
#pragma unroll 1
  while (run + 1 < args.num_runs && word >= args.runs[run + 1].first_word) ++run;
  const CopyRun& found = args.runs[run];
  word -= found.first_word;
  const u32 piece = word / found.words_per_piece;
  const u64 within = static_cast<u64>(word - piece * found.words_per_piece) * sizeof(Word);
  const u64 source = args.source_bases[page] + found.source_offset + piece * found.source_stride + within;
  const u64 destination =
      args.destination_bases[page] + found.destination_offset + piece * found.destination_stride + within;
  return {reinterpret_cast<const Word*>(source), reinterpret_cast<Word*>(destination)};
}

template <typename Word>
__device__ __forceinline__ void copy_all(const CopyArgs& args) {
  const u64 total = static_cast<u64>(args.num_pages) * args.words_per_page;
  const u64 step = static_cast<u64>(gridDim.x) * THREADS;
#pragma unroll 1
  for (u64 first = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x; first < total; first += step * AHEAD) {
    Word words[AHEAD];
    Word* destinations[AHEAD];
#pragma unroll
    for (i32 i = 0; i < AHEAD; ++i) {
      const u64 index = first + i * step;
      destinations[i] = nullptr;
      if (index < total) {
        const Place<Word> place = find<Word>(args, static_cast<u32>(index));
        words[i] = *place.source;
        destinations[i] = place.destination;
      }
    }
#pragma unroll
    for (i32 i = 0; i < AHEAD; ++i) {
      if (destinations[i] != nullptr) *destinations[i] = words[i];
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) copy_pages(const __grid_constant__ CopyArgs args) {
  switch (args.word_bytes) {
    case 16: return copy_all<uint4>(args);
    case 8: return copy_all<u64>(args);
    case 4: return copy_all<u32>(args);
    case 2: return copy_all<u16>(args);
    default: return copy_all<unsigned char>(args);
  }
}
