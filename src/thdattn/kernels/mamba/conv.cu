// In front of the recurrence of the Mamba-2 mixer: the causal convolution and silu of x, B and C, and dt with its sums.

[[maybe_unused]] constexpr int kConvThreads = 256, kConvColumns = 128, kConvRows = 16;  // rows of a thread
[[maybe_unused]] constexpr int kConvTile = kConvThreads / (kConvColumns / 8) * kConvRows;  // rows of a thread block
[[maybe_unused]] constexpr int kHeadsOfWarp = 8;

template <typename T> __device__ __forceinline__ void unpack8(float (&to)[8], uint4 from) {
  const u32 pairs[4] = {from.x, from.y, from.z, from.w};
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<T>(pairs[i]);
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}

template <int kCount> __device__ __forceinline__ void load_floats(float (&to)[kCount], const float* from) {
  #pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = *(const float4*)(from + i);
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
}

// Eight columns of x, B and C as the convolution walks down the rows.
template <typename T, int kWidth>
struct Convolution {
  static constexpr int kReach = kWidth - 1;
  float weights[kWidth][8], bias[8];
  float seen[kWidth][8];                              // rows before this one, and, last, this one

  __device__ __forceinline__ void load_weights(const float* conv_weight, const float* conv_bias, int column) {
    float flat[8 * kWidth];
    load_floats(flat, conv_weight + (size_t)column * kWidth);
    load_floats(bias, conv_bias + column);
    #pragma unroll
    for (int i = 0; i < 8; ++i)
      #pragma unroll
      for (int tap = 0; tap < kWidth; ++tap) weights[tap][i] = flat[i * kWidth + tap];
  }

  __device__ __forceinline__ void next(uint4 row) {
    #pragma unroll
    for (int tap = 0; tap < kReach; ++tap)
      #pragma unroll
      for (int i = 0; i < 8; ++i) seen[tap][i] = seen[tap + 1][i];
    unpack8<T>(seen[kReach], row);
  }
  // Rows that the last one does not see, no later one sees either.
  __device__ __forceinline__ void forget_all_but(int in_sight) {
    if (in_sight >= kReach) return;
    #pragma unroll
    for (int tap = 0; tap < kReach; ++tap)
      #pragma unroll
      for (int i = 0; i < 8; ++i) seen[tap][i] = kReach - tap <= in_sight ? seen[tap][i] : 0.f;
  }
  // Before silu, of the row that was passed last.
  __device__ __forceinline__ void convolve(float (&sum)[8]) const {
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[i] = bias[i];
      #pragma unroll
      for (int tap = 0; tap < kWidth; ++tap) sum[i] = fmaf(weights[tap][i], seen[tap][i], sum[i]);
    }
  }
};

// Eight columns of rows of x, B and C, 16 rows of each thread of 16 that share the rows.
template <typename T, int kWidth>
__device__ __forceinline__ void convolve_rows(T* channels, const T* zxbcdt, const T* halo, const float* conv_weight,
                                              const float* conv_bias, const int2* ranges, int tile, int column_tile,
                                              const MixerSize& size) {
  constexpr int kReach = kWidth - 1, kThreadsOfRow = kConvColumns / 8, kAhead = 8;
  __shared__ int sights[kConvTile];                   // of how many rows before its own a row knows; -1: padding
  static_assert(kConvTile == kConvThreads);
  if (const int row = tile * kConvTile + threadIdx.x; row < size.rows)
    sights[threadIdx.x] = min(row - first_of(ranges[row], row, size), kReach);
  __syncthreads();

  const int column = column_tile * kConvColumns + threadIdx.x % kThreadsOfRow * 8;
  const int in_tile = threadIdx.x / kThreadsOfRow * kConvRows, begin = tile * kConvTile + in_tile;
  const int end = min(begin + kConvRows, size.rows);
  if (column >= size.channels() || begin >= end) return;
  const size_t pitch = size.columns();
  const T* const from = zxbcdt + size.inner() + column;
  T* const into = channels + column;
  Convolution<T, kWidth> convolution;
  convolution.load_weights(conv_weight, conv_bias, column);
  #pragma unroll
  for (int tap = 0; tap < kReach; ++tap) {            // what was on another rank is in the halo
    const int row = begin - kReach + tap;
    const T* const there = row < 0 ? halo + (size_t)(kReach + row) * size.channels() + column : from + row * pitch;
    convolution.next(*(const uint4*)there);
  }
  for (int done = 0; begin + done < end; done += kAhead) {
    uint4 ahead[kAhead];
    #pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = *(const uint4*)(from + min(begin + done + i, end - 1) * pitch);
    #pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int in_sight = sights[in_tile + done + i];
      convolution.next(ahead[i]);
      convolution.forget_all_but(in_sight);
      float sum[8];
      convolution.convolve(sum);
      u32 made[4];
      const u32 valid = in_sight < 0 ? 0 : ~0u;       // a mask, as compilers branch around what a choice leaves out
      #pragma unroll
      for (int p = 0; p < 4; ++p) made[p] = valid & pack<T>(silu(sum[2 * p]), silu(sum[2 * p + 1]));
      if (begin + done + i < end)
        *(uint4*)(into + (size_t)(begin + done + i) * size.channels()) =
            make_uint4(made[0], made[1], made[2], made[3]);
    }
  }
}

// ------------------------------------------------------------------------------------------------ dt

struct Rates {
  float* dt;
  float* sums;                                        // of dt * A * log2(e), up to each row
  float* leave;                                       // dt times what lasts until the end of the chunk
};

// One chunk and head, by a warp: sums over rows of the same sequence, each lane of two rows that follow each other.
template <typename T>
__device__ __forceinline__ void make_rates(const Rates& rates, const T* raw, float dt_bias, float rate, int chunk,
                                           int head, const int (&first)[2], int last_first, const MixerSize& size) {
  const int lane = threadIdx.x % kWarp, row = chunk * kChunk + 2 * lane;
  float dt[2], sum[2];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool counts = row + i < size.rows && first[i] <= row + i;
    dt[i] = counts ? softplus(to_float(raw[(size_t)(row + i) * size.columns() + head]) + dt_bias) : 0.f;
    sum[i] = dt[i] * rate;
  }
  if (first[1] <= row) sum[1] += sum[0];
  #pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, sum[1], lanes);
    // Its row is 2 * lanes before this lane's second one.
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

// A chunk per warp, some heads.
template <typename T>
__device__ __forceinline__ void rates_of_heads(const Rates& rates, const T* zxbcdt, const float* A_log,
                                               const float* dt_bias, const int2* ranges, int chunk, int head_tile,
                                               const MixerSize& size) {
  if (chunk >= size.chunks()) return;
  const int row = chunk * kChunk + 2 * (threadIdx.x % kWarp), last = chunk * kChunk + kChunk - 1;
  const int first[2] = {first_of(range_at(ranges, row, size), row, size),
                        first_of(range_at(ranges, row + 1, size), row + 1, size)};
  const int last_first = first_of(range_at(ranges, last, size), last, size);
  const T* const raw = zxbcdt + size.columns() - size.heads;
  const int begin = head_tile * kHeadsOfWarp, end = min(begin + kHeadsOfWarp, size.heads);
  #pragma unroll
  for (int head = begin; head < end; ++head)
    make_rates<T>(rates, raw, dt_bias[head], -expf(A_log[head]) * kLog2e, chunk, head, first, last_first, size);
}

// The last thread blocks of a row of the grid make dt, the others x, B and C. Bound by memory.
// halo (kWidth - 1, channels): rows of x, B and C in front; read where a sequence began on another rank
// channels (rows, channels): x, B and C behind silu; dt, sums, leave: see Rates; all 0 on padding
// Launch: grid (column_tiles + tiles of 16 heads, tiles of 256 rows), block 256.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kConvThreads) thd_mixer_conv(
    const T* zxbcdt, const T* halo, const float* conv_weight, const float* conv_bias, const float* A_log,
    const float* dt_bias, const int2* ranges, T* channels, float* dt, float* sums, float* leave, int column_tiles,
    MixerSize size) {
  constexpr int kWarps = kConvThreads / kWarp, kChunks = kConvTile / kChunk, kHeadTiles = kWarps / kChunks;
  const int tile = blockIdx.y, warp = threadIdx.x / kWarp;
  if ((int)blockIdx.x < column_tiles) {
    convolve_rows<T, kWidth>(channels, zxbcdt, halo, conv_weight, conv_bias, ranges, tile, blockIdx.x, size);
  } else {
    const int heads = ((int)blockIdx.x - column_tiles) * kHeadTiles + warp / kChunks;
    rates_of_heads<T>({dt, sums, leave}, zxbcdt, A_log, dt_bias, ranges, tile * kChunks + warp % kChunks, heads, size);
  }
}
