// A cluster: CLUSTER thread blocks that run at once and reach each other's shared memory. With CLUSTER == 1 everything
// here is about the block itself.
#pragma once
#include "base.cuh"

static_assert(CLUSTER >= 1 && CLUSTER <= 8 && (CLUSTER & (CLUSTER - 1)) == 0, "a portable power of two");
constexpr i32 CLUSTER_SHIFT = CLUSTER == 8 ? 3 : CLUSTER == 4 ? 2 : CLUSTER == 2 ? 1 : 0;

// Of this block in its cluster.
__device__ __forceinline__ i32 cluster_rank() { return CLUSTER == 1 ? 0 : static_cast<i32>(blockIdx.x); }

// The barrier in two halves: what a thread wrote to its own block's shared memory before it arrived is visible to every
// thread that has waited. Global memory is not covered: a release of that waits for all that the thread has under way.
__device__ __forceinline__ void cluster_arrive() {
  if (CLUSTER == 1) return;
  __syncwarp();
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  if (CLUSTER == 1) {
    __syncthreads();
    return;
  }
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The barrier for global memory too.
__device__ __forceinline__ void cluster_sync_global() {
  if (CLUSTER > 1) {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  cluster_wait();
}

// The address, in another block of the cluster, of the shared variable that `own` points to in this one.
__device__ __forceinline__ u32 remote_address(const void* own, i32 rank) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(own));
  if (CLUSTER == 1) return address;
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ u32 remote_load(const u32* own, i32 rank) {
  u32 word;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(remote_address(own, rank)) : "memory");
  return word;
}

__device__ __forceinline__ uint4 remote_load4(const u32* own, i32 rank) {
  uint4 words;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(remote_address(own, rank))
               : "memory");
  return words;
}

// A set of bits that is dealt out to the blocks of a cluster, a word of 32 at a time.
struct DealtBits {
  u32* words;     // this block's
  i32 num_words;  // of them

  // All threads; a cluster barrier must follow before the first insert().
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (i32 word = threadIdx.x; word < num_words; word += THREADS) words[word] = 0u;
  }

  // Whether this call was the one that set it.
  __device__ __forceinline__ bool insert(i32 bit) const {
    u32 before;
    asm volatile("atom.relaxed.cluster.shared::cluster.or.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(address(bit)), "r"(1u << (bit % 32))
                 : "memory");
    return ((before >> (bit % 32)) & 1u) == 0u;
  }

 private:
  __device__ __forceinline__ u32 address(i32 bit) const {
    const i32 word = bit / 32;
    return remote_address(words + (word >> CLUSTER_SHIFT), word & (CLUSTER - 1));
  }
};
