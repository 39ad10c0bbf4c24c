// What the two thread blocks of a cluster exchange (sm_90a).

#pragma once

#include "kernels/hopper/backward_common.cuh"

__device__ __forceinline__ u32 rank_in_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Returns the address in the other block of what is `here` in this one.
__device__ __forceinline__ u32 in_other(const void* here) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there) : "r"(shared_address(here)), "r"(rank_in_cluster() ^ 1));
  return there;
}
// Arrives at a barrier of the other block after matrix products of this warp have read. It orders nothing else: a
// release in the cluster would wait until all additions of this thread to global memory have arrived there.
__device__ __forceinline__ void arrive_in_other(const u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(in_other(barrier)) : "memory");
}
// Arrives at a barrier of the other block, after the thread's own reads and writes.
__device__ __forceinline__ void release_in_other(const u64* barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(in_other(barrier)) : "memory");
}
// Waits at a barrier for what a thread of the other block has stored or read.
__device__ __forceinline__ void wait_for_other(const u64* barrier, u32 parity) {
  asm volatile("{ .reg .pred done;\n"
               "wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra wait; }" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
// Stores a word in the other block, whose barrier counts its 4 bytes.
__device__ __forceinline__ void store_in_other(const int* there, int word, const u64* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];"
               :: "r"(in_other(there)), "r"(word), "r"(in_other(barrier)) : "memory");
}
// Copies a multiple of 16 bytes to the other block, whose barrier counts the bytes.
__device__ __forceinline__ void copy_to_other(const void* there, const void* from, int bytes, const u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(in_other(there)), "r"(shared_address(from)), "r"(bytes), "r"(in_other(barrier)) : "memory");
}
// Copies a tile to the same place in every block whose bit is set. The barrier there counts the bytes.
template <int kRows, int kCols>
__device__ __forceinline__ void copy_tile_to(unsigned short blocks, unsigned char* tile, const TensorMap* map, int head,
                                             int row, u64* barrier) {
  static_assert(kCols % kSlab == 0, "boxes of a cluster have 64 columns");
  #pragma unroll
  for (int s = 0; s < kCols / kSlab; ++s)
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;"
                 :: "r"(shared_address(tile + s * kSlabBytes<kRows, kCols>)), "l"(map), "r"(s * kSlab), "r"(head),
                    "r"(row), "r"(shared_address(barrier)), "h"(blocks) : "memory");
}
// Synchronises all threads of both blocks. It publishes what each has written, and neither block exits before it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A number of work on its way from the first block, which draws it, to the second. draws: those of this block so far.
struct DrawnWork {
  u64 full, empty;
  int work;
  u32 draws;

  __device__ __forceinline__ void init() { barrier_init(&full, 1), barrier_init(&empty, 1), draws = 0; }
};
struct ClusterCounter {
  int* counter;
  DrawnWork& drawn;
};

// Draws a number of work for both blocks, with one lane of each. Their last number is one beyond all work for every
// block.
__device__ __forceinline__ int draw_work(const ClusterCounter& cluster, int num_work) {
  DrawnWork& drawn = cluster.drawn;
  const u32 parity = drawn.draws++ % 2;
  int work;
  if (rank_in_cluster() == 0) {
    work = atomicAdd(cluster.counter, 1);
    if (work == num_work + opaque(gridDim.x) / 2 - 1) *cluster.counter = 0;
    wait_for_other(&drawn.empty, parity ^ 1);
    store_in_other(&drawn.work, work, &drawn.full);
  } else {
    barrier_expect(&drawn.full, 4);
    wait_for_other(&drawn.full, parity);
    work = *(volatile int*)&drawn.work;
    if (work >= 0) release_in_other(&drawn.empty);    // always true, but only once it has arrived
  }
  return work;
}
