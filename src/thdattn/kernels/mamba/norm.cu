// RMSNorm of the Mamba-2 mixer, forward and backward: after its gate, rmsnorm(y * silu(z)) * weight, or before it,
// rmsnorm(y) * weight * silu(z). rmsnorm divides each group of columns by the root of its mean square plus eps.
//
// A thread block has some rows of one group, and a thread 8 columns of each. Threads behind the last column have none.
// Sums are float32, in the same order on every run.

#pragma once

#include "kernels/mamba/backward_common.cuh"

// Columns of this thread.
struct ColumnsOfThread {
  int in_group;                                       // columns of the group
  bool exist;
  int first;                                          // of the last thread with columns, if this has none

  __device__ __forceinline__ ColumnsOfThread(int groups, const MixerSize& size)
      : in_group(size.inner() / groups), exist((int)threadIdx.x * 8 < in_group),
        first(blockIdx.y * in_group + min((int)threadIdx.x * 8, in_group - 8)) {}
};

__device__ __forceinline__ void load8(float (&to)[8], const float* from) {
  const float4 low = *(const float4*)from, high = *(const float4*)(from + 4);
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}
__device__ __forceinline__ void store8(float* to, const float (&x)[8]) {
  *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
  *(float4*)(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

// Sums over all threads of the block. `shared` may be reused after the next call has returned.
template <int kThreads, int kNumbers>
__device__ __forceinline__ void sum_over_block(float (&x)[kNumbers], float (&shared)[kThreads / kWarp][kNumbers]) {
  #pragma unroll
  for (int i = 0; i < kNumbers; ++i) x[i] = warp_sum(x[i]);
  if constexpr (kThreads > kWarp) {
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) {
      #pragma unroll
      for (int i = 0; i < kNumbers; ++i) shared[threadIdx.x / kWarp][i] = x[i];
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < kNumbers; ++i) x[i] = warp_sum(lane < kThreads / kWarp ? shared[lane][i] : 0.f);
  }
}

// ------------------------------------------------------------------------------------------------ forward

// Rows of a pack, where those with an empty range are padding, and next rows of decoded sequences, some of which are
// active.
template <typename T>
struct RowsOfPack {
  const T* y;
  const int2* ranges;

  __device__ __forceinline__ bool counts(int row) const { return !is_empty(ranges[row]); }
  __device__ __forceinline__ void load(float (&to)[8], int row, int column, const MixerSize& size) const {
    unpack8<T>(to, *(const uint4*)(y + (size_t)row * size.inner() + column));
  }
};
struct RowsOfDecode {
  const float* y;
  const bool* active;

  __device__ __forceinline__ bool counts(int row) const { return active[row]; }
  __device__ __forceinline__ void load(float (&to)[8], int row, int column, const MixerSize& size) const {
    load8(to, y + (size_t)row * size.channels() + column);
  }
};

// Normalises and gates kRows rows. Rows that do not count become 0.
template <typename T, bool kAfterGate, int kThreads, int kRows, typename Rows>
__device__ __forceinline__ void norm_rows(const Rows& rows, const T* zxbcdt, const float* weight, T* out, int groups,
                                          float eps, const MixerSize& size) {
  __shared__ float shared[kThreads / kWarp][kRows];
  const ColumnsOfThread columns(groups, size);
  const int first = blockIdx.x * kRows;
  float x[kRows][8], sums[kRows] = {};
  uint4 gates[kRows];
  bool counts[kRows];
  #pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = min(first + r, size.rows - 1);
    counts[r] = rows.counts(row);
    rows.load(x[r], row, columns.first, size);
    gates[r] = *(const uint4*)(zxbcdt + (size_t)row * size.columns() + columns.first);
  }
  #pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float z[8];
    if constexpr (kAfterGate) unpack8<T>(z, gates[r]);
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
      if constexpr (kAfterGate) x[r][e] *= silu(z[e]);
      if (counts[r] && columns.exist) sums[r] = fmaf(x[r][e], x[r][e], sums[r]);
    }
  }
  sum_over_block<kThreads>(sums, shared);
  if (!columns.exist) return;
  float factor[8];
  load8(factor, weight + columns.first);
  #pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= size.rows) break;
    const float root = rsqrtf(sums[r] / columns.in_group + eps);
    float z[8], made[8];
    if constexpr (!kAfterGate) unpack8<T>(z, gates[r]);
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
      made[e] = x[r][e] * root * factor[e];
      if constexpr (!kAfterGate) made[e] *= silu(z[e]);
      made[e] = counts[r] ? made[e] : 0.f;
    }
    *(uint4*)(out + (size_t)(first + r) * size.inner() + columns.first) = pack8<T>(made);
  }
}

// out from y, which the scan wrote, and z; 0 on padding. Bound by memory bandwidth.
//
// y, out (rows, inner); zxbcdt (rows, columns); weight (inner)
// Launch: grid (ceil(rows / kRows), groups), block kThreads.
template <typename T, bool kAfterGate, int kThreads, int kRows>
__global__ void __launch_bounds__(kThreads) thd_mixer_norm(
    const T* __restrict__ y, const T* __restrict__ zxbcdt, const float* __restrict__ weight, T* __restrict__ out,
    const int2* __restrict__ ranges, int groups, float eps, MixerSize size) {
  norm_rows<T, kAfterGate, kThreads, kRows>(RowsOfPack<T>{y, ranges}, zxbcdt, weight, out, groups, eps, size);
}

// The norm of the next row of every sequence, whose y is the first columns of `convolved`; 0 for inactive sequences.
//
// convolved (sequences, channels); zxbcdt (sequences, columns); active (sequences); out (sequences, inner); weight
// (inner)
// Launch: grid (ceil(sequences / kRows), groups), block kThreads.
template <typename T, bool kAfterGate, int kThreads, int kRows>
__global__ void __launch_bounds__(kThreads) thd_mixer_decode_norm(
    const float* __restrict__ convolved, const T* __restrict__ zxbcdt, const float* __restrict__ weight,
    T* __restrict__ out, const bool* __restrict__ active, int groups, float eps, MixerSize size) {
  norm_rows<T, kAfterGate, kThreads, kRows>(RowsOfDecode{convolved, active}, zxbcdt, weight, out, groups, eps,
                                                     size);
}

// ------------------------------------------------------------------------------------------------ backward

// A thread's part of a row: 8 columns of dout, y, z and x. dout and y become dy and dz.
struct VectorOfRow { uint4 dout, y, z, x; };

// The backward of such a vector. x: the norm's input; given: the gradient of the norm's result times the weight.
template <typename T, bool kAfterGate>
struct NormBack {
  float dout[8], y[8], gate[8], slope[8];

  __device__ __forceinline__ explicit NormBack(const VectorOfRow& vector) {
    float z[8];
    unpack8<T>(dout, vector.dout);
    unpack8<T>(y, vector.y);
    unpack8<T>(z, vector.z);
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float sig = sigmoid(z[e]);
      gate[e] = z[e] * sig, slope[e] = fmaf(gate[e], 1.f - sig, sig);
    }
  }
  __device__ __forceinline__ float x(int e) const { return kAfterGate ? y[e] * gate[e] : y[e]; }
  __device__ __forceinline__ float given(int e) const { return kAfterGate ? dout[e] : dout[e] * gate[e]; }

  // Adds to the sums of x^2, and of x times its gradient through the product alone.
  __device__ __forceinline__ void add_to(float (&sums)[2], const float (&weight)[8]) const {
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
      sums[0] = fmaf(x(e), x(e), sums[0]);
      sums[1] = fmaf(given(e) * weight[e], x(e), sums[1]);
    }
  }
  // Writes dy and dz to `vector`, and adds to the gradients of the weight and of D. root: 1 / root of the mean square;
  // mean: that of the second sum times root.
  __device__ __forceinline__ void pass(VectorOfRow& vector, float (&of_weight)[8], float& of_d,
                                       const float (&weight)[8], float root, float mean) const {
    float dy[8], dz[8], channel[8];
    unpack8<T>(channel, vector.x);
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float normal = x(e) * root, dx = root * (given(e) * weight[e] - normal * mean);
      dy[e] = kAfterGate ? dx * gate[e] : dx;
      dz[e] = (kAfterGate ? dx * y[e] : dout[e] * normal * weight[e]) * slope[e];
      of_weight[e] = fmaf(given(e), normal, of_weight[e]);
      of_d = fmaf(dy[e], channel[e], of_d);
    }
    vector.dout = pack8<T>(dy), vector.y = pack8<T>(dz);
  }
};

// dy, and dz (the first columns of dzxbcdt), 0 on padding, and each chunk's partials of the gradients of the weight and
// of D, which needs dy before it is rounded. Bound by memory bandwidth.
//
// dout, y, dy (rows, inner); zxbcdt, dzxbcdt (rows, columns); channels (rows, channels); weight (inner)
// weight_partials (chunks, inner); partials (chunks, heads), with partials_pitch numbers from one chunk to the next
// Launch: grid (chunks, groups), block kThreads.
template <typename T, bool kAfterGate, int kThreads>
__global__ void __launch_bounds__(kThreads) thd_mixer_norm_bwd(
    const T* __restrict__ dout, const T* __restrict__ zxbcdt, const T* __restrict__ y, const T* __restrict__ channels,
    const float* __restrict__ weight, T* __restrict__ dy, T* __restrict__ dzxbcdt, float* __restrict__ weight_partials,
    float* __restrict__ partials, size_t partials_pitch, const int2* __restrict__ ranges, int groups, float eps,
    MixerSize size) {
  __shared__ float shared[2][kThreads / kWarp][2];
  const ColumnsOfThread columns(groups, size);
  const int chunk = blockIdx.x, begin = chunk * kChunk, end = min(begin + kChunk, size.rows);
  float factor[8], of_weight[8] = {}, of_d = 0.f;
  load8(factor, weight + columns.first);
  int turn = 0;
  for (int row = begin; row < end; ++row) {
    const size_t at = (size_t)row * size.inner() + columns.first, in_row = (size_t)row * size.columns() + columns.first;
    VectorOfRow vector = {};
    if (!is_empty(ranges[row])) {                     // the same for all threads
      vector.dout = *(const uint4*)(dout + at), vector.y = *(const uint4*)(y + at);
      vector.z = *(const uint4*)(zxbcdt + in_row);
      vector.x = *(const uint4*)(channels + (size_t)row * size.channels() + columns.first);
      float sums[2] = {};
      if (columns.exist) NormBack<T, kAfterGate>(vector).add_to(sums, factor);
      sum_over_block<kThreads>(sums, shared[turn]);
      turn ^= 1;
      const float root = rsqrtf(sums[0] / columns.in_group + eps);
      NormBack<T, kAfterGate>(vector).pass(vector, of_weight, of_d, factor, root, sums[1] * root / columns.in_group);
    }
    if (!columns.exist) continue;
    *(uint4*)(dy + at) = vector.dout;
    *(uint4*)(dzxbcdt + in_row) = vector.y;
  }
  for (int lanes = 1; lanes < size.head_dim / 8; lanes *= 2) of_d += __shfl_xor_sync(0xffffffffu, of_d, lanes);
  if (!columns.exist) return;
  if (columns.first % size.head_dim == 0) partials[chunk * partials_pitch + columns.first / size.head_dim] = of_d;
  store8(weight_partials + (size_t)chunk * size.inner() + columns.first, of_weight);
}
