// The backward of what precedes the recurrence of the Mamba-2 mixer: convolution, silu and dt. Also sums of the rows'
// partials of the gradients of weights, and contributions of other ranks' rows to the last rows of this one.

#pragma once

#include "kernels/mamba/common.cuh"

[[maybe_unused]] constexpr int kConvBackThreads = 128, kConvBackColumns = 2 * kConvBackThreads, kConvBackAhead = 8;

// Thread blocks of the usual width that share a multiprocessor. Compiled for other GPUs than Hopper, five spill.
#if __CUDA_ARCH__ == 900
[[maybe_unused]] constexpr int kConvBackBlocks = 5;
#else
[[maybe_unused]] constexpr int kConvBackBlocks = 2;
#endif

// Two columns in their type in memory. They are unpacked where they are needed, so that their load may be in flight
// until then.
template <typename T> struct Pair {
  u32 words;
  __device__ __forceinline__ float2 numbers() const { return unpack<T>(words); }
};
template <> struct Pair<float> {
  float2 words;
  __device__ __forceinline__ float2 numbers() const { return words; }
};
template <typename T> __device__ __forceinline__ Pair<T> load_pair(const T* from) {
  return {*(const decltype(Pair<T>::words)*)from};
}

// What thd_mixer_conv_bwd writes beside dzxbcdt. A chunk's partials of gradients are in the order of the weights.
struct ConvGradients {
  float* partials;                                      // (chunks, pitch)
  float* ends;                                        // (2, reach, channels), see mixer_conv_bwd of mamba/reference
  size_t pitch;
};

// The rows of a chunk and of the next one; a thread has two columns. Rows behind the last one read the last one, and
// their values are not used.
template <typename In>
struct RowsOfChunk {
  const In* first;                                    // row of the chunk, the same for all threads
  u32 pitch, column;
  int last;                                           // last row that exists

  __device__ __forceinline__ RowsOfChunk(const In* rows, u32 pitch, int column, int chunk, const MixerSize& size)
      : first(rows + (size_t)chunk * kChunk * pitch), pitch(pitch), column(column),
        last(size.rows - 1 - chunk * kChunk) {}
  __device__ __forceinline__ Pair<In> operator[](int row) const {
    return load_pair(first + ((u32)min(row, last) * pitch + column));
  }
  // Loads an existing row, `further` rows behind another.
  __device__ __forceinline__ Pair<In> behind(int row, int further) const {
    return load_pair(first + ((u32)row * pitch + column) + (size_t)further * pitch);
  }
};

// Gradients that are stored as several terms.
struct PartsOfChunk {
  RowsOfChunk<float> parts;
  size_t step;                                        // from one term to the next
  int splits;

  __device__ __forceinline__ Pair<float> operator[](int row) const {
    RowsOfChunk<float> part = parts;
    float2 sum = part[row].words;
    #pragma unroll 1
    for (int split = 1; split < splits; ++split) {
      part.first += step;
      const float2 more = part[row].words;
      sum.x += more.x, sum.y += more.y;
    }
    return {sum};
  }
  __device__ __forceinline__ Pair<float> behind(int row, int further) const { return (*this)[row + further]; }
};

// Two columns while the backward proceeds down the rows of a chunk, and some more rows that saw its last ones. The last
// of `seen` and `made` belong to the row that is passed, the others to those before it.
template <int kWidth>
struct ConvBackward {
  static constexpr int kReach = kWidth - 1;
  float weights[kWidth][2], bias[2], seen[kWidth][2], made[kWidth][2] = {}, of_weights[2][kWidth] = {}, of_bias[2] = {};

  __device__ __forceinline__ ConvBackward(const float* conv_weight, const float* conv_bias, int column) {
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      bias[i] = conv_bias[column + i];
      #pragma unroll
      for (int tap = 0; tap < kWidth; ++tap) weights[tap][i] = conv_weight[(size_t)(column + i) * kWidth + tap];
    }
  }
  // Passes a row, and the gradient of its convolved value after silu. in_sight: rows before it that it sees, -1 for
  // padding. kWhole: it sees all. kOwn: it belongs to this chunk.
  template <bool kWhole, bool kOwn>
  __device__ __forceinline__ void pass(float2 row, float2 gradient, int in_sight) {
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      #pragma unroll
      for (int tap = 0; tap < kReach; ++tap) seen[tap][i] = seen[tap + 1][i], made[tap][i] = made[tap + 1][i];
      seen[kReach][i] = i ? row.y : row.x;
      float before = bias[i];
      #pragma unroll
      for (int tap = 0; tap < kWidth; ++tap)
        before = kWhole || kReach - tap <= in_sight ? fmaf(weights[tap][i], seen[tap][i], before) : before;
      const float sig = sigmoid(before), slope = fmaf(before, sig - sig * sig, sig);
      const float dbefore = kWhole || in_sight >= 0 ? (i ? gradient.y : gradient.x) * slope : 0.f;
      made[kReach][i] = kWhole || in_sight >= 0 ? weights[kReach][i] * dbefore : 0.f;  // not -0
      #pragma unroll
      for (int tap = 0; tap < kReach; ++tap)
        if (kWhole || kReach - tap <= in_sight) made[tap][i] = fmaf(weights[tap][i], dbefore, made[tap][i]);
      if constexpr (kOwn) {
        #pragma unroll
        for (int tap = 0; tap < kWidth; ++tap)
          if (kWhole || kReach - tap <= in_sight) of_weights[i][tap] = fmaf(dbefore, seen[tap][i], of_weights[i][tap]);
        of_bias[i] += dbefore;
      }
    }
  }
};

// Stores the gradient of a row that all rows that see it have passed, for other ranks: of a row of this rank, or of the
// halo (below 0).
template <int kReach>
__device__ __forceinline__ void store_end(const float (&made)[2], int row, float* ends, const MixerSize& size) {
  const int end = row < 0 ? kReach + row : row - size.rows + 2 * kReach;
  if (row < 0 || (row < size.rows && end >= kReach))
    store_pair(ends + (size_t)end * size.channels(), made[0], made[1]);
}

// Computes the backward of convolution and silu. from: the columns of zxbcdt; gradients: of the convolved values after
// silu; made: like `from`.
template <typename T, int kWidth, typename Gradients>
__device__ __forceinline__ void convolve_back(const RowsOfChunk<T>& from, const Gradients& gradients, const T* halo,
                                              const float* conv_weight, const float* conv_bias, const int* in_sight,
                                              T* made, const ConvGradients& sums, int chunk, const MixerSize& size) {
  constexpr int kReach = kWidth - 1, kAhead = kConvBackAhead;
  static_assert(kReach <= kAhead && kChunk % kAhead == 0, "rows are loaded kAhead at a time");
  const int column = from.column, begin = chunk * kChunk;
  const bool at_an_end = chunk == 0 || begin + kChunk + kReach > size.rows;
  float* const ends = sums.ends + column;
  ConvBackward<kWidth> work(conv_weight, conv_bias, column);
  // The halo is not set if no sequence began on another rank, which initcheck reports; in_sight excludes it.
  #pragma unroll
  for (int tap = 0; tap < kReach; ++tap) {
    const T* const before = chunk ? from.first - (size_t)(kReach - tap) * from.pitch
                                  : halo + (size_t)tap * size.channels();
    const float2 row = load_pair(before + column).numbers();
    work.seen[tap + 1][0] = row.x, work.seen[tap + 1][1] = row.y;
  }
  auto store = [&](int row) {                         // of the chunk
    if (row >= 0 && row <= from.last)
      store_pair(made + ((u32)row * from.pitch + column), work.made[0][0], work.made[0][1]);
    if (at_an_end && (row >= 0 || chunk == 0)) store_end<kReach>(work.made[0], begin + row, ends, size);
  };
  Pair<T> rows[kAhead];
  decltype(gradients[0]) passed[kAhead];
  #pragma unroll
  for (int a = 0; a < kAhead; ++a) rows[a] = from[a], passed[a] = gradients[a];
  __syncthreads();                                    // in_sight is ready
  for (int i = 0; i < kChunk; i += kAhead) {
    bool whole = !at_an_end;
    #pragma unroll
    for (int a = 0; a < kAhead; ++a) whole = whole && in_sight[i + a] == kReach;
    if (whole) {                                      // all rows see all others
      T* const to = made + ((u32)i * from.pitch + column);
      #pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const float2 row = rows[a].numbers(), gradient = passed[a].numbers();
        if (a < kReach || i + kAhead < kChunk)
          rows[a] = from.behind(i + kAhead, a), passed[a] = gradients.behind(i + kAhead, a);
        work.template pass<true, true>(row, gradient, kReach);
        if (a >= kReach || i > 0)
          store_pair(to + (a - kReach) * (long long)from.pitch, work.made[0][0], work.made[0][1]);
      }
      continue;
    }
    #pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const float2 row = rows[a].numbers(), gradient = passed[a].numbers();
      if (a < kReach || i + kAhead < kChunk) rows[a] = from[i + kAhead + a], passed[a] = gradients[i + kAhead + a];
      work.template pass<false, true>(row, gradient, in_sight[i + a]);
      store(i + a - kReach);
    }
  }
  float* const partials = sums.partials + chunk * sums.pitch;
  #pragma unroll
  for (int i = 0; i < kWidth; ++i)
    store_pair(partials + (size_t)column * kWidth + 2 * i, work.of_weights[2 * i / kWidth][2 * i % kWidth],
               work.of_weights[(2 * i + 1) / kWidth][(2 * i + 1) % kWidth]);
  store_pair(partials + (size_t)size.channels() * kWidth + column, work.of_bias[0], work.of_bias[1]);
  #pragma unroll
  for (int i = 0; i < kReach; ++i) {                  // rows of the next chunk
    work.template pass<false, false>(rows[i].numbers(), passed[i].numbers(), in_sight[kChunk + i]);
    store(kChunk + i - kReach);
  }
}

// Computes the gradient of dt before softplus, for one head.
template <typename T>
__device__ __forceinline__ void softplus_back(const T* zxbcdt, const float* of_steps, float dt_bias,
                                              const int* in_sight, T* dzxbcdt, float* partial, int chunk, int head,
                                              const MixerSize& size) {
  const float4* const ddt = (const float4*)(of_steps + size.in_heads(head, chunk));
  const size_t column = size.inner() + size.channels() + head;
  float sum = 0.f;
  for (int i = 0; i < kChunk; i += 8) {
    T raw[8];
    float4 four[2] = {ddt[i / 4], ddt[i / 4 + 1]};
    #pragma unroll
    for (int e = 0; e < 8; ++e)
      raw[e] = zxbcdt[(size_t)min(chunk * kChunk + i + e, size.rows - 1) * size.columns() + column];
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int row = chunk * kChunk + i + e;
      const float made = e % 4 == 0 ? four[e / 4].x : e % 4 == 1 ? four[e / 4].y : e % 4 == 2 ? four[e / 4].z
                                                                                             : four[e / 4].w;
      const float gradient = in_sight[i + e] < 0 ? 0.f : made * sigmoid(to_float(raw[e]) + dt_bias);
      sum += gradient;
      if (row < size.rows) dzxbcdt[(size_t)row * size.columns() + column].bits = (unsigned short)pack<T>(gradient, 0.f);
    }
  }
  *partial = sum;
}

// Gradients of the columns of zxbcdt behind z, and each chunk's partials of the gradients of weights. The last thread
// blocks of a row of the grid compute dt, the others x, B and C. Bound by memory bandwidth.
//
// Launch: grid (column_tiles + ceil(heads / 128), chunks, see tile_of_rows), block 128.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kConvBackThreads, kWidth == 4 ? kConvBackBlocks : 2) thd_mixer_conv_bwd(
    const T* zxbcdt, const T* halo, const float* conv_weight, const float* conv_bias, const float* dt_bias,
    T* dzxbcdt, const int2* ranges, const T* dx, const float* dbc, const float* ddt, int splits, float* partials,
    float* ends, int column_tiles, MixerSize size) {
  constexpr int kReach = kWidth - 1;
  const int chunk = size.chunks() - 1 - tile_of_rows();  // the last rows of dx are still in L2
  if (chunk < 0) return;
  const int begin = chunk * kChunk, channels = size.channels();
  const size_t of_heads = (size_t)channels * (kWidth + 1), pitch = of_heads + 3 * size.heads;
  __shared__ int in_sight[kChunk + 16];
  if (threadIdx.x < kChunk + kReach) {
    const int row = begin + threadIdx.x;
    in_sight[threadIdx.x] = row < size.rows ? sight_of(ranges[row], row, kReach, size) : -1;
  }
  if ((int)blockIdx.x < column_tiles) {
    const int column = blockIdx.x * kConvBackColumns + threadIdx.x * 2;
    if (column >= channels) return;
    const ConvGradients sums{partials, ends, pitch};
    const u32 inner = size.inner(), width = channels - inner;
    const RowsOfChunk<T> from(zxbcdt + inner, size.columns(), column, chunk, size);
    T* const made = dzxbcdt + inner + (size_t)begin * size.columns();
    if (blockIdx.x * kConvBackColumns < inner) {
      const RowsOfChunk<T> gradients(dx, inner, column, chunk, size);
      convolve_back<T, kWidth>(from, gradients, halo, conv_weight, conv_bias, in_sight, made, sums, chunk, size);
    } else {
      const RowsOfChunk<float> parts(dbc, width, column - inner, chunk, size);
      const PartsOfChunk gradients{parts, (size_t)size.rows * width, splits};
      convolve_back<T, kWidth>(from, gradients, halo, conv_weight, conv_bias, in_sight, made, sums, chunk, size);
    }
    if (begin == 0)                                   // ranks with fewer rows than others see
      for (int i = 0; i < kReach - size.rows; ++i)
        store_pair(ends + (size_t)(kReach + i) * channels + column, 0.f, 0.f);
  } else {
    __syncthreads();
    const int head = ((int)blockIdx.x - column_tiles) * kConvBackThreads + threadIdx.x;
    if (head < size.heads)
      softplus_back(zxbcdt, ddt, dt_bias[head], in_sight, dzxbcdt,
                    partials + chunk * pitch + of_heads + 2 * size.heads + head, chunk, head, size);
  }
}

// ------------------------------------------------------------------------------------------------ sums

[[maybe_unused]] constexpr int kSumBlock = 16;        // partials that are added one after another

// Sums the chunks' partials in the same order on every run. 8 threads per column add some chunks at a time, as rounding
// errors grow with the numbers added in sequence. The gradient of A becomes that of A_log.
//
// partials (chunks, columns), sums (columns); a_log: the column where A begins
// Launch: grid ceil(columns / 32), block 256.
__global__ void __launch_bounds__(256) thd_mixer_sum(
    const float* __restrict__ partials, const float* __restrict__ A_log, float* __restrict__ sums, int chunks,
    int columns, int a_log, int heads) {
  __shared__ float parts[8][32];
  const int column = blockIdx.x * 32 + threadIdx.x % 32, part = threadIdx.x / 32;
  float total = 0.f;
  if (column < columns) {
    for (int first = part; first < chunks; first += 8 * kSumBlock) {
      float sum = 0.f;
      #pragma unroll
      for (int i = 0; i < kSumBlock; ++i) {
        const int chunk = first + 8 * i;
        sum += chunk < chunks ? partials[(size_t)chunk * columns + column] : 0.f;
      }
      total += sum;
    }
  }
  parts[part][threadIdx.x % 32] = total;
  __syncthreads();
  if (part || column >= columns) return;
  #pragma unroll
  for (int i = 1; i < 8; ++i) total += parts[i][threadIdx.x];
  const int head = column - a_log;
  sums[column] = head >= 0 && head < heads ? -expf(A_log[head]) * total : total;
}

// Sums the gradients of the last rows of x, B and C, rounded once: the term of this rank's rows, and then those of the
// ranks behind it, in their order.
//
// halos (ranks, reach, channels), tail (reach, channels): see mixer_add_halos of mamba/reference
// Launch: grid (ceil(channels / 256), min(reach, rows)), block 128.
template <typename T>
__global__ void __launch_bounds__(kConvBackThreads) thd_mixer_add_halos(
    const float* __restrict__ halos, const float* __restrict__ tail, T* __restrict__ dzxbcdt, int reach, int rank,
    int ranks, MixerSize size) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 2, channels = size.channels();
  if (column >= channels) return;
  const int at = reach - 1 - blockIdx.y;              // of the tail
  float2 total = load_pair(tail + (size_t)at * channels + column).words;
  for (int other = rank + 1; other < ranks; ++other) {
    const long long from = at - (long long)(other - rank - 1) * size.rows;  // fewer, by the rows between
    if (from < 0) break;
    const float2 part = load_pair(halos + ((size_t)other * reach + from) * channels + column).words;
    total.x += part.x, total.y += part.y;
  }
  store_pair(dzxbcdt + (size_t)(size.rows - 1 - blockIdx.y) * size.columns() + size.inner() + column, total.x, total.y);
}
