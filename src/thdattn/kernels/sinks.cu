// The gradient of attention sinks.

#pragma once

#include "kernels/common.cuh"

// Adds the terms of query rows to the gradient of their head's sink: -exp(sink - lse) * rowsum(dout * out). A thread
// block adds every gridDim.y-th group of rows of one head, with kLanes lanes per row, always in the same order. Bound
// by memory bandwidth.
//
// out, dout (q_rows, num_heads, kVHeadDim); lse (num_heads, q_rows), sinks included; rows with lse = -inf are not read
// sinks (num_heads,); partials (gridDim.y, num_heads), which sum to the gradient
// Launch: grid (num_heads, parts), block 256.
template <typename T, int kVHeadDim>
__global__ void __launch_bounds__(256) thd_attn_sinks_grad(
    const uint4* __restrict__ out, const uint4* __restrict__ dout, const float* __restrict__ lse,
    const float* __restrict__ sinks, float* __restrict__ partials, int q_rows) {
  constexpr int kChunks = kVHeadDim / 8, kLanes = lanes_of(kVHeadDim), kRows = 256 / kLanes;
  static_assert(kVHeadDim % 8 == 0 && kChunks <= kLanes, "each lane has one word of a row");
  __shared__ float of_warps[256 / kWarp];
  const int head = blockIdx.x, num_heads = gridDim.x, chunk = threadIdx.x % kLanes;
  const float sink = sinks[head];
  float sum = 0.f;
  for (int row = blockIdx.y * kRows + threadIdx.x / kLanes; row < q_rows; row += gridDim.y * kRows) {
    const float row_lse = lse[(size_t)head * q_rows + row];
    if (row_lse == -kInfinity || chunk >= kChunks) continue;
    const size_t word = ((size_t)row * num_heads + head) * kChunks + chunk;
    const uint4 o = out[word], d = dout[word];
    const u32 o_pairs[4] = {o.x, o.y, o.z, o.w}, d_pairs[4] = {d.x, d.y, d.z, d.w};
    float delta = 0.f;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack<T>(o_pairs[i]), b = unpack<T>(d_pairs[i]);
      delta += a.x * b.x + a.y * b.y;
    }
    sum -= exp2_fast((sink - row_lse) * kLog2e) * delta;
  }
  #pragma unroll
  for (int i = kWarp / 2; i; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  #pragma unroll
  for (int i = 1; i < 256 / kWarp; ++i) sum += of_warps[i];
  partials[blockIdx.y * num_heads + head] = sum;
}
