// What the backward kernels of the Mamba-2 mixer share beside common.cuh.

#pragma once

#include "kernels/mamba/common.cuh"

template <typename T> __device__ __forceinline__ void unpack8(float (&to)[8], uint4 from) {
  const u32 pairs[4] = {from.x, from.y, from.z, from.w};
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<T>(pairs[i]);
    to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
  }
}
template <typename T> __device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
}

// Computes dy and dz of 8 neighbouring numbers in place of dout and y; both are 0 if the row does not count. Returns
// their term of the gradient of D, which needs dy before it is rounded.
template <typename T>
__device__ __forceinline__ float gate_back(uint4& dout, uint4& y, uint4 z_words, uint4 x_words, bool counts) {
  float g[8], z[8], of_gate[8], x[8], of_d = 0.f;
  unpack8<T>(g, dout);
  unpack8<T>(z, z_words);
  unpack8<T>(of_gate, y);
  unpack8<T>(x, x_words);
  #pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float sig = sigmoid(z[e]), gate = z[e] * sig, slope = fmaf(gate, 1.f - sig, sig);
    of_gate[e] = counts ? of_gate[e] * g[e] * slope : 0.f;
    g[e] = counts ? g[e] * gate : 0.f;
    of_d = fmaf(g[e], x[e], of_d);
  }
  dout = pack8<T>(g), y = pack8<T>(of_gate);
  return of_d;
}

// Scales per sequence (float16). If the gradient of B C^T is an operand, each sequence of a chunk is scaled to its own
// size, together with the rows of dB and dC to which it is added. So no sequence changes a bit of another's result.
//
// A thread has two rows as accumulators, `row` of the chunk and row + 8.
template <typename T>
struct ScaledSequences {
  int* largest;                                       // bits; a sequence's are at its first row of the chunk
  const int* first;                                   // of each row of the chunk

  __device__ __forceinline__ int& of(int row) const { return largest[min(max(first[row], 0), kChunk - 1)]; }
  __device__ __forceinline__ PowerOfTwo scale(int row) const {
    if constexpr (kScalesStates<T>) return scale_of(of(row));
    return {1.f, 1.f};
  }
  template <int kFragments, int kBlocks>
  __device__ __forceinline__ void tell(const float (&x)[kFragments][kBlocks][4], int row) const {
    if constexpr (!kScalesStates<T>) return;
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = 0.f;
      #pragma unroll
      for (int i = 0; i < kFragments * kBlocks * 2; ++i)
        most = fmaxf(most, fabsf(x[i / 2 / kBlocks][i / 2 % kBlocks][2 * h + i % 2]));
      atomicMax(&of(row + 8 * h), __float_as_int(most));
    }
  }
  template <int kFragments, int kBlocks>
  __device__ __forceinline__ void scale(float (&x)[kFragments][kBlocks][4], int row) const {
    if constexpr (!kScalesStates<T>) return;
    const float factor[2] = {scale(row).factor, scale(row + 8).factor};
    #pragma unroll
    for (int i = 0; i < kFragments * kBlocks * 4; ++i)
      x[i / 4 / kBlocks][i / 4 % kBlocks][i % 4] *= factor[i / 2 % 2];
  }
};

__device__ __forceinline__ float warp_sum(float x) {
  #pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// Returns where column `column` of a chunk's state is stored. In each 32 columns, the 8 that a lane has of accumulators
// are stored together, so that it stores and loads 16 bytes.
__device__ __forceinline__ int place_of(int column) {
  return column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2;
}

// Operands from a tile with kPitch elements per row: 16 rows (or columns) by 16. For the other side they load 16 rows
// (or columns); each pair of words holds 8.
template <int kPitch, typename T>
__device__ __forceinline__ void operand_of_rows(u32 (&a)[4], const T* tile) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix(a, tile + lane % 16 * kPitch + lane / 16 * 8);
}
template <int kPitch, typename T>
__device__ __forceinline__ void operand_of_columns(u32 (&a)[4], const T* tile) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix_transposed(a, tile + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8);
}
template <int kPitch, typename T>
__device__ __forceinline__ void other_rows(u32 (&b)[4], const T* tile) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix(b, tile + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8);
}
template <int kPitch, typename T>
__device__ __forceinline__ void other_columns(u32 (&b)[4], const T* tile) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix_transposed(b, tile + lane % 16 * kPitch + lane / 16 * 8);
}

// What a lane knows of its two rows of a chunk, 2 * lane and the next. A pair of rows, or a row and a state,
// contributes to the gradient of the decay at every row between them. ends: contributions that end with a row. begins:
// those that begin behind it. alone: the gradient that dt gets from u.
struct TwoRows {
  float ends[2], begins[2], alone[2];

  // Computes, with one warp, the contributions at each row, and from them ddt and the chunk's partial of the gradient
  // of A. across: contributions at all rows.
  __device__ __forceinline__ void finish(const int* first_rows, const float* dt, float across, float rate, float* ddt,
                                         float* partial_rate) const {
    const int lane = threadIdx.x % kWarp, one = 2 * lane, other = one + 1;
    const int first[2] = {first_rows[one], first_rows[other]}, next = __shfl_down_sync(0xffffffffu, first[0], 1);
    const bool together = first[1] <= one;
    // Sum what ends at a row or later, and what begins at a row or earlier, within a sequence.
    float later = ends[0] + (together ? ends[1] : 0.f), earlier = begins[1] + (together ? begins[0] : 0.f);
    #pragma unroll
    for (int lanes = 1; lanes < kWarp; lanes *= 2) {
      const float behind = __shfl_down_sync(0xffffffffu, later, lanes);
      const float front = __shfl_up_sync(0xffffffffu, earlier, lanes);
      const int start = __shfl_down_sync(0xffffffffu, first[0], lanes);
      if (lane + lanes < kWarp && start <= one) later += behind;
      if (lane >= lanes && first[1] <= other - 2 * lanes) earlier += front;
    }
    const float behind = __shfl_down_sync(0xffffffffu, later, 1), front = __shfl_up_sync(0xffffffffu, earlier, 1);
    const float before = lane > 0 && first[0] < one ? front : 0.f;
    const float da[2] = {later + before + across,
                         ends[1] + (lane + 1 < kWarp && next <= other ? behind : 0.f)
                         + (together ? begins[0] + before : 0.f) + across};
    store_pair(ddt + one, alone[0] + rate * da[0], alone[1] + rate * da[1]);
    const float of_rate = warp_sum(dt[one] * da[0] + dt[other] * da[1]);
    if (lane == 0) *partial_rate = of_rate;
  }
};
