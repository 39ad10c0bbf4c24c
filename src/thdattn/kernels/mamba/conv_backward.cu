// What is in front of the recurrence of the Mamba-2 mixer, backward: convolution, silu and dt; sums of what rows give
// to the gradients of weights; and what rows of other ranks give to the last rows of this one.

[[maybe_unused]] constexpr int kConvBackThreads = 128, kConvBackColumns = 4 * kConvBackThreads, kConvBackAhead = 4;

template <typename T> __device__ __forceinline__ void load4(float (&to)[4], const T* from) {
  const uint2 words = *(const uint2*)from;
  const float2 low = unpack<T>(words.x), high = unpack<T>(words.y);
  to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
}
template <> __device__ __forceinline__ void load4(float (&to)[4], const float* from) {
  const float4 words = *(const float4*)from;
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}
__device__ __forceinline__ void store4(float* to, const float (&x)[4]) {
  *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
}
template <typename T> __device__ __forceinline__ void store4(T* to, const float (&x)[4]) {
  *(uint2*)to = make_uint2(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]));
}

// What thd_mixer_conv_bwd makes, beside dzxbcdt. A chunk's shares of gradients lie in the order of the weights.
struct ConvGradients {
  float* shares;                                      // (chunks, pitch)
  float* ends;                                        // (2, reach, channels), see host_conv.mixer_conv_bwd
  size_t pitch;
};

// What comes into it: the gradients of x behind the convolution, those of B and C in parts that add up, and of dt.
template <typename T>
struct ConvSource {
  const T *zxbcdt, *halo, *dx;
  const float *dbc, *ddt;
  int splits;

  __device__ __forceinline__ void load_input(float (&to)[4], int row, int column, int reach,
                                             const MixerSize& size) const {
    const T* const from = row < 0 ? halo + (size_t)(reach + row) * size.channels()
                                  : zxbcdt + (size_t)row * size.columns() + size.inner();
    if (row < size.rows && row >= -reach) load4(to, from + column);
    else to[0] = to[1] = to[2] = to[3] = 0.f;
  }
  __device__ __forceinline__ void load_gradient(float (&to)[4], int row, int column, const MixerSize& size) const {
    to[0] = to[1] = to[2] = to[3] = 0.f;
    if (row >= size.rows) return;
    if (column < size.inner()) return load4(to, dx + (size_t)row * size.inner() + column);
    const size_t width = size.channels() - size.inner();
    for (int split = 0; split < splits; ++split) {
      float part[4];
      load4(part, dbc + ((size_t)split * size.rows + row) * width + column - size.inner());
      #pragma unroll
      for (int i = 0; i < 4; ++i) to[i] += part[i];
    }
  }
};

// Four columns, as they walk down the rows of a chunk, and some more that saw its last ones. The last of `seen` and
// `made` are of the row that is passed, the others of those before it.
template <typename T, int kWidth>
struct ConvBackward {
  static constexpr int kReach = kWidth - 1;
  float weights[kWidth][4], bias[4], seen[kWidth][4], made[kWidth][4] = {}, of_weights[4][kWidth] = {}, of_bias[4] = {};

  __device__ __forceinline__ ConvBackward(const float* conv_weight, const float* conv_bias, int column) {
    load4(bias, conv_bias + column);
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      #pragma unroll
      for (int tap = 0; tap < kWidth; ++tap) weights[tap][i] = conv_weight[(size_t)(column + i) * kWidth + tap];
  }
  // A row, and the gradient of what is behind it. in_sight: rows before it that it sees, -1 for padding.
  __device__ __forceinline__ void pass(const float (&row)[4], const float (&gradient)[4], int in_sight, bool own) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      #pragma unroll
      for (int tap = 0; tap < kReach; ++tap) seen[tap][i] = seen[tap + 1][i], made[tap][i] = made[tap + 1][i];
      seen[kReach][i] = row[i], made[kReach][i] = 0.f;
      float before = bias[i];
      #pragma unroll
      for (int tap = 0; tap < kWidth; ++tap)
        before = kReach - tap <= in_sight ? fmaf(weights[tap][i], seen[tap][i], before) : before;
      const float share = sigmoid(before), slope = share * (1.f + before * (1.f - share));
      const float dbefore = in_sight < 0 ? 0.f : gradient[i] * slope;
      #pragma unroll
      for (int tap = 0; tap < kWidth; ++tap)
        if (kReach - tap <= in_sight) {
          made[tap][i] = fmaf(weights[tap][i], dbefore, made[tap][i]);
          if (own) of_weights[i][tap] = fmaf(dbefore, seen[tap][i], of_weights[i][tap]);
        }
      if (own) of_bias[i] += dbefore;
    }
  }
};

template <typename T, int kWidth>
__device__ __forceinline__ void convolve_back(const ConvSource<T>& from, const float* conv_weight,
                                              const float* conv_bias, const int* in_sight, T* dzxbcdt,
                                              const ConvGradients& gradients, int chunk, int column,
                                              const MixerSize& size) {
  constexpr int kReach = kWidth - 1, kAhead = kConvBackAhead;
  const int begin = chunk * kChunk;
  ConvBackward<T, kWidth> work(conv_weight, conv_bias, column);
  #pragma unroll
  for (int tap = 0; tap < kReach; ++tap)
    from.load_input(work.seen[tap + 1], begin - kReach + tap, column, kReach, size);
  for (int i = 0; i < kChunk + kReach; i += kAhead) {
    float rows[kAhead][4], dchannels[kAhead][4];
    #pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      from.load_input(rows[a], begin + i + a, column, kReach, size);
      from.load_gradient(dchannels[a], begin + i + a, column, size);
    }
    #pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (i + a >= kChunk + kReach) break;
      work.pass(rows[a], dchannels[a], in_sight[i + a], i + a < kChunk);
      const int row = begin + i + a - kReach, from_end = row - (size.rows - kReach);
      float* const ends = gradients.ends + column;
      if (i + a < kReach && begin == 0) store4(ends + (size_t)(i + a) * size.channels(), work.made[0]);
      if (i + a < kReach || row >= size.rows) continue;
      store4(dzxbcdt + (size_t)row * size.columns() + size.inner() + column, work.made[0]);
      if (from_end >= 0) store4(ends + (size_t)(kReach + from_end) * size.channels(), work.made[0]);
    }
  }
  float* const shares = gradients.shares + chunk * gradients.pitch;
  #pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float part[4];
    #pragma unroll
    for (int e = 0; e < 4; ++e) part[e] = work.of_weights[(4 * i + e) / kWidth][(4 * i + e) % kWidth];
    store4(shares + (size_t)column * kWidth + 4 * i, part);
  }
  store4(shares + (size_t)size.channels() * kWidth + column, work.of_bias);
}

template <typename T> __device__ __forceinline__ float to_float(T x) { return unpack<T>(x.bits).x; }

// The gradient of dt before softplus, of one head.
template <typename T>
__device__ __forceinline__ void softplus_back(const ConvSource<T>& from, float dt_bias, const int* in_sight, T* dzxbcdt,
                                              float* share, int chunk, int head, const MixerSize& size) {
  const float4* const ddt = (const float4*)(from.ddt + size.in_heads(head, chunk));
  float sum = 0.f;
  #pragma unroll 2
  for (int i = 0; i < kChunk; i += 4) {
    const float4 four = ddt[i / 4];
    const float made[4] = {four.x, four.y, four.z, four.w};
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = chunk * kChunk + i + e;
      if (row >= size.rows) break;
      const size_t at = (size_t)row * size.columns() + size.inner() + size.channels() + head;
      const float gradient = in_sight[i + e] < 0 ? 0.f : made[e] * sigmoid(to_float(from.zxbcdt[at]) + dt_bias);
      sum += gradient;
      dzxbcdt[at].bits = (unsigned short)pack<T>(gradient, 0.f);
    }
  }
  *share = sum;
}

// Gradients of the columns of zxbcdt behind z, and each chunk's shares of those of weights. The last thread blocks of a
// row of the grid take dt, the others x, B and C. Bound by memory.
//
// Launch: grid (column_tiles + ceil(heads / 128), chunks), block 128.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kConvBackThreads) thd_mixer_conv_bwd(
    const T* zxbcdt, const T* halo, const float* conv_weight, const float* conv_bias, const float* dt_bias,
    T* dzxbcdt, const int2* ranges, const T* dx, const float* dbc, const float* ddt, int splits, float* shares,
    float* ends, int column_tiles, MixerSize size) {
  constexpr int kReach = kWidth - 1;
  const int chunk = blockIdx.y, begin = chunk * kChunk, channels = size.channels();
  const size_t of_heads = (size_t)channels * (kWidth + 1), pitch = of_heads + 3 * size.heads;
  const ConvSource<T> from{zxbcdt, halo, dx, dbc, ddt, splits};
  __shared__ int in_sight[kChunk + 16];
  if (threadIdx.x < kChunk + kReach) {
    const int row = begin + threadIdx.x;
    in_sight[threadIdx.x] = row < size.rows ? min(row - first_of(ranges[row], row, size), kReach) : -1;
  }
  __syncthreads();
  if ((int)blockIdx.x < column_tiles) {
    const int column = blockIdx.x * kConvBackColumns + threadIdx.x * 4;
    if (column >= channels) return;
    convolve_back<T, kWidth>(from, conv_weight, conv_bias, in_sight, dzxbcdt, {shares, ends, pitch}, chunk, column,
                             size);
    if (begin == 0)                                   // ranks with fewer rows than others see
      for (int i = 0; i < kReach - size.rows; ++i)
        store4(ends + (size_t)(kReach + i) * channels + column, {0.f, 0.f, 0.f, 0.f});
  } else {
    const int head = ((int)blockIdx.x - column_tiles) * kConvBackThreads + threadIdx.x;
    if (head < size.heads)
      softplus_back(from, dt_bias[head], in_sight, dzxbcdt, shares + chunk * pitch + of_heads + 2 * size.heads + head,
                    chunk, head, size);
  }
}

// ------------------------------------------------------------------------------------------------ sums

[[maybe_unused]] constexpr int kSumBlock = 16;        // shares that are added one after another

// The chunks' shares added up, in the same order on every run: by 8 threads a column, some chunks at a time, as rounding
// grows with the numbers added in a row. Those of A become the gradient of A_log.
//
// shares (chunks, columns), sums (columns); a_log: the column where A begins
// Launch: grid ceil(columns / 32), block 256.
__global__ void __launch_bounds__(256) thd_mixer_sum(const float* __restrict__ shares, const float* __restrict__ A_log,
                                                     float* __restrict__ sums, int chunks, int columns, int a_log,
                                                     int heads) {
  __shared__ float parts[8][32];
  const int column = blockIdx.x * 32 + threadIdx.x % 32, part = threadIdx.x / 32;
  float total = 0.f;
  if (column < columns) {
    for (int first = part; first < chunks; first += 8 * kSumBlock) {
      float sum = 0.f;
      #pragma unroll
      for (int i = 0; i < kSumBlock; ++i) {
        const int chunk = first + 8 * i;
        sum += chunk < chunks ? shares[(size_t)chunk * columns + column] : 0.f;
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

// The gradients of the last rows of x, B and C, rounded once: what this rank's rows give, and then those of the ranks
// behind it, in their order.
//
// halos (ranks, reach, channels), tail (reach, channels): see host_conv.mixer_add_halos
// Launch: grid (ceil(channels / 4 / 128), min(reach, rows)), block 128.
template <typename T>
__global__ void __launch_bounds__(kConvBackThreads) thd_mixer_add_halos(
    const float* __restrict__ halos, const float* __restrict__ tail, T* __restrict__ dzxbcdt, int reach, int rank,
    int ranks, MixerSize size) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 4, channels = size.channels();
  if (column >= channels) return;
  const int at = reach - 1 - blockIdx.y;              // of the tail
  float total[4];
  load4(total, tail + (size_t)at * channels + column);
  for (int other = rank + 1; other < ranks; ++other) {
    const long long from = at - (long long)(other - rank - 1) * size.rows;  // fewer, as many rows lie between
    if (from < 0) break;
    float part[4];
    load4(part, halos + ((size_t)other * reach + from) * channels + column);
    #pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += part[i];
  }
  store4(dzxbcdt + (size_t)(size.rows - 1 - blockIdx.y) * size.columns() + size.inner() + column, total);
}
