// What precedes the recurrence of the Mamba-2 mixer: the causal convolution and silu of x, B and C, and dt with its
// sums.

#pragma once

#include "kernels/mamba/common.cuh"

[[maybe_unused]] constexpr int kConvThreads = 256, kConvColumns = 128;
[[maybe_unused]] constexpr int kColumns = 4, kConvRows = 32;  // of a thread
[[maybe_unused]] constexpr int kConvTile = kConvThreads / (kConvColumns / kColumns) * kConvRows;  // of a thread block
[[maybe_unused]] constexpr int kHeadsOfWarp = 8;

// A thread's columns of a row.
struct alignas(2 * kColumns) Columns { u32 pairs[kColumns / 2]; };

template <int kCount> __device__ __forceinline__ void load_floats(float (&to)[kCount], const float* from) {
  #pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = *(const float4*)(from + i);
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
}

// Some columns of x, B and C while the convolution proceeds down the rows.
template <typename T, int kWidth>
struct Convolution {
  static constexpr int kReach = kWidth - 1;
  float weights[kWidth][kColumns], bias[kColumns];
  float seen[kWidth][kColumns];                       // rows before this one, and, last, this one

  __device__ __forceinline__ void load_weights(const float* conv_weight, const float* conv_bias, int column) {
    float flat[kColumns * kWidth];
    load_floats(flat, conv_weight + (size_t)column * kWidth);
    load_floats(bias, conv_bias + column);
    #pragma unroll
    for (int i = 0; i < kColumns; ++i)
      #pragma unroll
      for (int tap = 0; tap < kWidth; ++tap) weights[tap][i] = flat[i * kWidth + tap];
  }

  __device__ __forceinline__ void next(Columns row) {
    #pragma unroll
    for (int tap = 0; tap < kReach; ++tap)
      #pragma unroll
      for (int i = 0; i < kColumns; ++i) seen[tap][i] = seen[tap + 1][i];
    #pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      const float2 pair = unpack<T>(row.pairs[i / 2]);
      seen[kReach][i] = pair.x, seen[kReach][i + 1] = pair.y;
    }
  }
  // Clears the rows that the last one does not see. No later row sees them either.
  __device__ __forceinline__ void forget_all_but(int in_sight) {
    if (in_sight >= kReach) return;
    #pragma unroll
    for (int tap = 0; tap < kReach; ++tap)
      #pragma unroll
      for (int i = 0; i < kColumns; ++i) seen[tap][i] = kReach - tap <= in_sight ? seen[tap][i] : 0.f;
  }
  // Convolves the row that was passed last, before silu.
  __device__ __forceinline__ void convolve(float (&sum)[kColumns]) const {
    #pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      sum[i] = bias[i];
      #pragma unroll
      for (int tap = 0; tap < kWidth; ++tap) sum[i] = fmaf(weights[tap][i], seen[tap][i], sum[i]);
    }
  }
};

// Convolves some columns of rows of x, B and C. Neighbouring threads share the rows.
template <typename T, int kWidth>
__device__ __forceinline__ void convolve_rows(T* channels, const T* zxbcdt, const T* halo, const float* conv_weight,
                                              const float* conv_bias, const int2* ranges, int tile, int column_tile,
                                              const MixerSize& size) {
  constexpr int kReach = kWidth - 1, kThreadsOfRow = kConvColumns / kColumns, kAhead = 8;
  __shared__ int sights[kConvTile];
  static_assert(kConvTile == kConvThreads, "each thread finds what one row sees");
  if (const int row = tile * kConvTile + threadIdx.x; row < size.rows)
    sights[threadIdx.x] = sight_of(ranges[row], row, kReach, size);
  __syncthreads();

  const int column = column_tile * kConvColumns + threadIdx.x % kThreadsOfRow * kColumns;
  const int in_tile = threadIdx.x / kThreadsOfRow * kConvRows, begin = tile * kConvTile + in_tile;
  const int end = min(begin + kConvRows, size.rows);
  if (column >= size.channels() || begin >= end) return;
  const size_t pitch = size.columns();
  const T* const from = zxbcdt + size.inner() + column;
  Convolution<T, kWidth> convolution;
  convolution.load_weights(conv_weight, conv_bias, column);
  // The halo is not set if no sequence began on another rank, which initcheck reports; forget_all_but discards it.
  #pragma unroll
  for (int tap = 0; tap < kReach; ++tap) {            // rows of another rank are in the halo
    const int row = begin - kReach + tap;
    const T* const there = row < 0 ? halo + (size_t)(kReach + row) * size.channels() + column : from + row * pitch;
    convolution.next(*(const Columns*)there);
  }
  Columns ahead[kAhead];                                // of the rows to come
  #pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i] = *(const Columns*)(from + min(begin + i, end - 1) * pitch);
  const T* next = from + (begin + kAhead) * pitch;
  T* to = channels + (size_t)begin * size.channels() + column;
  for (int done = 0; begin + done < end; done += kAhead) {
    #pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int row = begin + done + i, in_sight = sights[in_tile + done + i];
      convolution.next(ahead[i]);
      if (row + kAhead < end) ahead[i] = *(const Columns*)next;
      next += pitch;
      convolution.forget_all_but(in_sight);
      float sum[kColumns];
      convolution.convolve(sum);
      Columns made;
      const u32 valid = in_sight < 0 ? 0 : ~0u;       // a mask, as compilers branch around a selection
      #pragma unroll
      for (int p = 0; p < kColumns / 2; ++p) made.pairs[p] = valid & pack<T>(silu(sum[2 * p]), silu(sum[2 * p + 1]));
      if (row < end) *(Columns*)to = made;
      to += size.channels();
    }
  }
}

// ------------------------------------------------------------------------------------------------ dt

struct Rates {
  float* dt;
  float* sums;                                        // of dt * A * log2(e), up to each row
  float* leave;                                       // dt times the decay until the end of the chunk
};

// Sums over rows of the same sequence, for one chunk and head, with one warp. Each lane has two consecutive rows. dt:
// before softplus.
__device__ __forceinline__ void make_rates(const Rates& rates, float (&dt)[2], float rate, int chunk, int head,
                                           const int (&first)[2], int last_first, const MixerSize& size) {
  const int lane = threadIdx.x % kWarp, row = chunk * kChunk + 2 * lane;
  float sum[2];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool counts = row + i < size.rows && first[i] <= row + i;
    dt[i] = counts ? softplus(dt[i]) : 0.f;
    sum[i] = dt[i] * rate;
  }
  if (first[1] <= row) sum[1] += sum[0];
  #pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, sum[1], lanes);
    // The other lane's row is 2 * lanes before this lane's second one.
    if (lane >= lanes && first[1] <= row + 1 - 2 * lanes) sum[1] += before;
  }
  const float before = __shfl_up_sync(0xffffffffu, sum[1], 1);
  if (lane >= 1 && first[0] < row) sum[0] += before;
  const float last = __shfl_sync(0xffffffffu, sum[1], kWarp - 1);
  const size_t at = size.in_heads(head, chunk) + 2 * lane;
  store_pair(rates.dt + at, dt[0], dt[1]);
  store_pair(rates.sums + at, sum[0], sum[1]);
  store_pair(rates.leave + at, row >= last_first ? dt[0] * decay_of(last - sum[0]) : 0.f,
             row + 1 >= last_first ? dt[1] * decay_of(last - sum[1]) : 0.f);
}

// Computes the rates of some heads of a chunk with one warp. The number of heads is a multiple. All heads are read
// first.
template <typename T>
__device__ __forceinline__ void rates_of_heads(const Rates& rates, const T* zxbcdt, const float* A_log,
                                               const float* dt_bias, const int2* ranges, int chunk, int head_tile,
                                               const MixerSize& size) {
  const int begin = head_tile * kHeadsOfWarp;
  if (chunk >= size.chunks() || begin >= size.heads) return;
  const int row = chunk * kChunk + 2 * (threadIdx.x % kWarp), last = chunk * kChunk + kChunk - 1;
  const int first[2] = {first_of(range_at(ranges, row, size), row, size),
                        first_of(range_at(ranges, row + 1, size), row + 1, size)};
  const int last_first = first_of(range_at(ranges, last, size), last, size);
  const T* const raw = zxbcdt + size.columns() - size.heads + begin;
  uint4 rows[2];
  #pragma unroll
  for (int i = 0; i < 2; ++i) rows[i] = *(const uint4*)(raw + (size_t)min(row + i, size.rows - 1) * size.columns());
  float bias[kHeadsOfWarp], log_rate[kHeadsOfWarp];
  load_floats(bias, dt_bias + begin);
  load_floats(log_rate, A_log + begin);
  #pragma unroll
  for (int i = 0; i < kHeadsOfWarp; ++i) {
    float dt[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 pair = unpack<T>((&rows[r].x)[i / 2]);
      dt[r] = (i % 2 ? pair.y : pair.x) + bias[i];
    }
    make_rates(rates, dt, -expf(log_rate[i]) * kLog2e, chunk, begin + i, first, last_first, size);
  }
}

// Computes dt in the last thread blocks of a row of the grid, and x, B and C from a tile of columns on in the others.
// Bound by memory bandwidth.
//
// halo (kWidth - 1, channels): rows of x, B and C before this rank's; read if a sequence began on another rank
// channels (rows, channels): x, B and C after silu; dt, sums, leave: see Rates; all are 0 on padding
// Launch: grid (column_tiles + tiles of 16 heads, tiles of 256 rows, see tile_of_rows), block 256.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kConvThreads) thd_mixer_conv(
    const T* zxbcdt, const T* halo, const float* conv_weight, const float* conv_bias, const float* A_log,
    const float* dt_bias, const int2* ranges, T* channels, float* dt, float* sums, float* leave, int first_tile,
    int column_tiles, MixerSize size) {
  constexpr int kWarps = kConvThreads / kWarp, kChunks = kConvTile / kChunk, kHeadTiles = kWarps / kChunks;
  const int tile = tile_of_rows(), warp = threadIdx.x / kWarp;
  if ((int)blockIdx.x < column_tiles) {
    const int column_tile = first_tile + (int)blockIdx.x;
    convolve_rows<T, kWidth>(channels, zxbcdt, halo, conv_weight, conv_bias, ranges, tile, column_tile, size);
  } else {
    const int heads = ((int)blockIdx.x - column_tiles) * kHeadTiles + warp / kChunks;
    rates_of_heads<T>({dt, sums, leave}, zxbcdt, A_log, dt_bias, ranges, tile * kChunks + warp % kChunks, heads, size);
  }
}
