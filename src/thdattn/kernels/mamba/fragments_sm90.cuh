// Tiles of 64 rows in boxes of 64 columns. Each warp has 16 rows, and each thread those of its accumulators.

#pragma once

#include "kernels/mamba/hopper.cuh"

// This thread's elements of a box, in the layout of accumulators.
template <typename T>
struct RowsOfBox {
  u32 words[8][2];

  __device__ __forceinline__ explicit RowsOfBox(const unsigned char* box) {
    const auto [warp, lane] = me();
    #pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 a[4];
      ldmatrix(a, box + (warp * 16 + lane % 16) * kRowBytes + ((n + lane / 16) ^ lane % 8) * 16);
      words[n][0] = a[0], words[n][1] = a[1], words[n + 1][0] = a[2], words[n + 1][1] = a[3];
    }
  }
  // Returns the two numbers of block n in the thread's first row or in its second one.
  __device__ __forceinline__ float2 pair(int n, int half) const { return unpack<T>(words[n][half]); }
};

// Stores 64 rows of 8 * kBlocks numbers times a factor, rounded.
template <typename T, int kBlocks>
__device__ __forceinline__ void round_to(unsigned char* tile, const float (&x)[kBlocks][4], float factor = 1.f) {
  const auto [warp, lane] = me();
  unsigned char* const at = tile + (warp * 16 + lane % 16) * kRowBytes;
  #pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    u32 a[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = &x[n + i / 2][i % 2 * 2];
      a[i] = pack<T>(factor * pair[0], factor * pair[1]);
    }
    store_matrices(at + n / 8 * kBox + ((n % 8 + lane / 16) ^ lane % 8) * 16, a);
  }
}
