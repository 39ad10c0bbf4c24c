// What the mixer's Hopper kernels (sm_90a) share: the state of a head in registers, and stages of shared memory.
//
// Each warpgroup has 64 columns of x, of one head, and their states, 64 x kState in registers. All heads of a thread
// block read B and C of one group. Rows are loaded ahead as boxes of 64 columns, by maps of `channels` and of columns
// of zxbcdt.

#pragma once

#include "kernels/hopper/common.cuh"
#include "kernels/mamba/common.cuh"

[[maybe_unused]] constexpr int kBox = kSlab * kChunk * 2;  // bytes

// The state of a head: each warp has 16 rows of its 64 x kState numbers, as accumulators.
template <typename T, int kState>
struct StateOfHead {
  static constexpr int kBlocks = kState / 8;
  float s[1][kBlocks][4];

  // Loads columns 16 * warp and the next of x as rows of an operand. leave: dt times the decay until the end of the
  // chunk.
  static __device__ __forceinline__ void prepare(u32 (&weights)[1][4][4], const unsigned char* x, const float* leave) {
    const auto [warp, lane] = me();
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = k * 16 + lane / 16 * 8 + lane % 8, vector = warp * 2 + lane / 8 % 2;
      ldmatrix_transposed(weights[0][k], x + row * kRowBytes + (vector ^ lane % 8) * 16);
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 weight = *(const float2*)(leave + k * 16 + i / 2 * 8 + lane % 4 * 2);
        const float2 value = unpack<T>(weights[0][k][i]);
        weights[0][k][i] = pack<T>(value.x * weight.x, value.y * weight.y);
      }
    }
  }
  // Advances the state by a chunk. through: its decay until the end of the chunk. If that is 0, the product replaces
  // the state, whatever it was.
  __device__ __forceinline__ void advance(const unsigned char* x, const unsigned char* b, const float* leave,
                                          float through) {
    u32 weights[1][4][4];
    prepare(weights, x, leave);
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] *= through;
    pin(s[0]);
    wgmma_begin();
    start_weighted_rows<T, kState, kChunk>(s[0], weights, b, through != 0.f);
    wgmma_commit();
    wgmma_wait<0>(s[0]);
  }
  // Returns the index of the two numbers of block n and of row 16 * warp + lane / 4 + 8 * half in an array of states of
  // these 64 columns.
  static __device__ __forceinline__ int place(int n, int half) {
    const auto [warp, lane] = me();
    return (warp * 16 + half * 8 + lane / 4) * kState + n * 8 + lane % 4 * 2;
  }
  __device__ __forceinline__ void load(const float* state) {
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = *(const float2*)(state + place(n, half));
        s[0][n][2 * half] = pair.x, s[0][n][2 * half + 1] = pair.y;
      }
  }
  __device__ __forceinline__ void clear() {
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] = 0.f;
  }
  __device__ __forceinline__ void store(float* state) const {
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half)
        store_pair(state + place(n, half), s[0][n][2 * half], s[0][n][2 * half + 1]);
  }
  // Stores the state as a tile of 64 rows, rounded. inverse: factors for each 16 rows of it.
  __device__ __forceinline__ void publish(unsigned char* tile, float* inverse) const {
    const auto [warp, lane] = me();
    unsigned char* const row = tile + (warp * 16 + lane % 16) * kRowBytes;
    PowerOfTwo scale = {1.f, 1.f};
    if constexpr (kScalesStates<T>) {
      scale = scale_of(largest_of_warp(s));
      inverse[warp] = scale.inverse;
    }
    #pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      u32 a[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &s[0][n + i / 2][i % 2 * 2];
        a[i] = pack<T>(pair[0] * scale.factor, pair[1] * scale.factor);
      }
      store_matrices(row + n / 8 * kBox + ((n % 8 + lane / 16) ^ lane % 8) * 16, a);
    }
    publish_to_async();
  }
};

// Copies boxes of B or C of a group, or of x. All are columns of `channels`.
template <int kCols>
__device__ __forceinline__ void copy_columns(unsigned char* tile, const TensorMap* channels, int column, int chunk,
                                             u64* barrier) {
  #pragma unroll
  for (int i = 0; i < kCols / kSlab; ++i)
    copy_box(tile + i * kBox, channels, 0, column / kSlab + i, chunk * kChunk, barrier);
}

// Copies a box from shared memory, except for elements outside the tensor.
__device__ __forceinline__ void store_box(const TensorMap* map, const void* src, int column, int head, int row) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               :: "l"(map), "r"(shared_address(src)), "r"(column), "r"(head), "r"(row) : "memory");
}

// Stages that one thread's bulk copies, or kWriters warps, fill, and that kReaders warps empty.
template <int kStages, int kWriters, int kReaders>
struct Stages {
  u64 full[kStages], empty[kStages];

  __device__ __forceinline__ void init() {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&full[stage], kWriters);
      barrier_init(&empty[stage], kReaders);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void wait_empty(const Ring<kStages>& ring) {
    barrier_wait(&empty[ring.stage], ring.parity ^ 1);
  }
  __device__ __forceinline__ void fill(const Ring<kStages>& ring, int bytes) {
    wait_empty(ring);
    barrier_expect(&full[ring.stage], bytes);
  }
  __device__ __forceinline__ void filled(const Ring<kStages>& ring) { arrive_warp(&full[ring.stage]); }
  __device__ __forceinline__ void wait(const Ring<kStages>& ring) { barrier_wait(&full[ring.stage], ring.parity); }
  __device__ __forceinline__ void release(const Ring<kStages>& ring) { arrive_warp(&empty[ring.stage]); }

  static __device__ __forceinline__ void arrive_warp(u64* barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
  }
};
