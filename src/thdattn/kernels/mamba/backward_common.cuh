// What the backward kernels of the Mamba-2 mixer share beside common.cuh.

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

__device__ __forceinline__ float warp_sum(float x) {
  #pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// In each 32 columns of a chunk's state lie those together that a lane has of accumulators, 8 of them, so that it
// stores and loads 16 bytes: where column `column` is.
__device__ __forceinline__ int place_of(int column) {
  return column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2;
}

// Operands in a tile whose rows are kPitch elements apart: 16 rows, or columns, by 16; and for the other side 16 rows,
// or columns, of which each pair of words is 8.
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
