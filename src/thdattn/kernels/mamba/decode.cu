// Texts that grow, of a Mamba-2 mixer: the next row of each, and what a forward left of the sequences of a pack. A text
// is the state behind its last row, and as many last rows of x, B and C as the convolution of the next one sees, with
// zeros in front of its first. kernels/mamba/common.cuh comes first; rows of a MixerSize are texts, or those of a pack.

template <typename T> __device__ __forceinline__ T rounded(float x) { return T{(unsigned short)pack<T>(x, 0.f)}; }

__device__ __forceinline__ u32 pair_of(unsigned short low, unsigned short high) { return low | (u32)high << 16; }

// x, B and C of the next row of every active text behind the convolution and silu; the row takes its place as the last.
// Rows of zxbcdt may begin anywhere, those of a text begin at pairs.
//
// zxbcdt (texts, columns); rows (texts, kWidth - 1, channels); conv_weight (channels, kWidth), conv_bias (channels);
// active (texts); convolved (texts, channels). channels: even.
// Launch: grid (ceil(channels / 512), texts), block 256: a pair of channels a thread.
template <typename T, int kWidth>
__global__ void __launch_bounds__(256) thd_mixer_decode_conv(
    const T* __restrict__ zxbcdt, u32* __restrict__ rows, const float* __restrict__ conv_weight,
    const float* __restrict__ conv_bias, const bool* __restrict__ active, float2* __restrict__ convolved,
    MixerSize size) {
  constexpr int kReach = kWidth - 1;
  const int text = blockIdx.y, pairs = size.channels() / 2, pair = blockIdx.x * 256 + threadIdx.x;
  if (pair >= pairs || !active[text]) return;
  const T* const next = zxbcdt + (size_t)text * size.columns() + size.inner() + 2 * pair;
  u32* const mine = rows + (size_t)text * kReach * pairs + pair;
  u32 seen[kWidth];
  #pragma unroll
  for (int i = 0; i < kReach; ++i) seen[i] = mine[i * pairs];
  seen[kReach] = pair_of(next[0].bits, next[1].bits);
  float2 sum = ((const float2*)conv_bias)[pair];
  #pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float2 x = unpack<T>(seen[i]);
    sum.x += conv_weight[2 * pair * kWidth + i] * x.x;
    sum.y += conv_weight[(2 * pair + 1) * kWidth + i] * x.y;
  }
  #pragma unroll
  for (int i = 0; i < kReach; ++i) mine[i * pairs] = seen[i + 1];
  convolved[(size_t)text * pairs + pair] = make_float2(silu(sum.x), silu(sum.y));
}

[[maybe_unused]] constexpr int kStateLanes = 16;      // that have one row of a state
[[maybe_unused]] constexpr int kDecodeThreads = 128;

// The next state of every active text and its result: s = exp(dt A) s + dt x B^T, out = (s C + D x) silu(z) per head.
// A thread block has kRows rows of a head's state, of head_dim; each is read once and written once.
//
// zxbcdt (texts, columns); convolved (texts, channels): x, B, C; states (texts, heads, head_dim, kStateDim); A_log, D,
// dt_bias (heads); active (texts); out (texts, inner), 0 for texts that are not active. head_dim: a multiple of kRows.
// Launch: grid (inner / kRows, texts), which walks through memory, block 128. Bound by memory.
template <typename T, int kStateDim, int kRows>
__global__ void __launch_bounds__(kDecodeThreads, 5) thd_mixer_decode(
    const T* __restrict__ zxbcdt, const float* __restrict__ convolved, float4* __restrict__ states,
    const float* __restrict__ A_log, const float* __restrict__ D, const float* __restrict__ dt_bias,
    const bool* __restrict__ active, T* __restrict__ out, MixerSize size) {
  constexpr int kVecs = kStateDim / 4 / kStateLanes, kStep = kDecodeThreads / kStateLanes, kSteps = kRows / kStep;
  const int text = blockIdx.y, lane = threadIdx.x % kStateLanes;
  const int row = blockIdx.x * kRows + threadIdx.x / kStateLanes, head = blockIdx.x * kRows / size.head_dim;
  T* const to = out + (size_t)text * size.inner() + row;
  if (!active[text]) {
    #pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (lane == 0) to[i * kStep] = T{0};
    return;
  }
  float4* const mine = states + ((size_t)text * size.inner() + row) * (kStateDim / 4) + lane;
  float4 state[kSteps][kVecs];
  #pragma unroll
  for (int i = 0; i < kSteps; ++i)
    #pragma unroll
    for (int v = 0; v < kVecs; ++v) state[i][v] = mine[i * kStep * (kStateDim / 4) + v * kStateLanes];

  const T* const mixed = zxbcdt + (size_t)text * size.columns();
  const float dt = softplus(to_float(mixed[size.inner() + size.channels() + head]) + dt_bias[head]);
  const float decay = expf(-expf(A_log[head]) * dt), d = D[head];
  const float* const x = convolved + (size_t)text * size.channels();
  const float4* const b = (const float4*)(x + size.b_column(size.group_of(head))) + lane;
  const float4* const c = (const float4*)(x + size.c_column(size.group_of(head))) + lane;
  float4 b_of[kVecs], c_of[kVecs];
  #pragma unroll
  for (int v = 0; v < kVecs; ++v) b_of[v] = b[v * kStateLanes], c_of[v] = c[v * kStateLanes];

  #pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const float x_of = x[row + i * kStep], u = dt * x_of;
    float y = 0.f;
    #pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      float4& s = state[i][v];
      s.x = fmaf(decay, s.x, u * b_of[v].x), s.y = fmaf(decay, s.y, u * b_of[v].y);
      s.z = fmaf(decay, s.z, u * b_of[v].z), s.w = fmaf(decay, s.w, u * b_of[v].w);
      mine[i * kStep * (kStateDim / 4) + v * kStateLanes] = s;
      y += s.x * c_of[v].x + s.y * c_of[v].y + s.z * c_of[v].z + s.w * c_of[v].w;
    }
    #pragma unroll
    for (int other = kStateLanes / 2; other; other /= 2) y += __shfl_xor_sync(0xffffffffu, y, other);
    if (lane == 0) to[i * kStep] = rounded<T>((y + d * x_of) * silu(to_float(mixed[row + i * kStep])));
  }
}

// Rows of a sequence of a pack; none if the offsets are none.
__device__ __forceinline__ int2 sequence(const int* cu_seqlens, const int* cu_seqlens_padded, int seq, int num_rows) {
  const int begin = cu_seqlens_padded[seq], length = cu_seqlens[seq + 1] - cu_seqlens[seq];
  const bool good = begin >= 0 && length >= 0 && begin <= num_rows && length <= num_rows - begin;
  return good ? make_int2(begin, begin + length) : make_int2(0, 0);
}

// The last `reach` rows of x, B and C of every sequence, (sequences, reach, channels); 0 in front of its first.
// Launch: grid (ceil(reach * channels / 512), sequences), block 256: a pair of channels a thread.
template <typename T>
__global__ void __launch_bounds__(256) thd_mixer_fill_rows(
    const T* __restrict__ zxbcdt, u32* __restrict__ rows, const int* __restrict__ cu_seqlens,
    const int* __restrict__ cu_seqlens_padded, int reach, MixerSize size) {
  const int pairs = size.channels() / 2, seq = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  if (i >= reach * pairs) return;
  const int2 range = sequence(cu_seqlens, cu_seqlens_padded, seq, size.rows);
  const int row = range.y - reach + i / pairs;
  const T* const from = zxbcdt + (size_t)max(row, 0) * size.columns() + size.inner() + i % pairs * 2;
  rows[(size_t)seq * reach * pairs + i] = row < range.x ? 0u : pair_of(from[0].bits, from[1].bits);
}

[[maybe_unused]] constexpr int kFillRows = kWarp;    // of a pack at a time
[[maybe_unused]] constexpr int kFillStateRows = 32;  // of a head's state in a thread block
[[maybe_unused]] constexpr int kFillThreads = 128;

// Rows of a sequence in the order from the last one on; 0 for rows in front of those that take part.
template <int kStateDim>
struct FillTiles {
  float4 b[kFillRows][kStateDim / 4];
  float x[kFillRows][kFillStateRows];
  float weight[kFillRows];                            // of x B^T in the state behind the sequence
};

// By one warp: the weights of the rows begin, .., last, of which the last kFillRows. behind: the sum of a over the rows
// behind them; returns it with theirs. dt: of this head, pitch elements from row to row.
template <typename T>
__device__ __forceinline__ float fill_weights(float* weight, const T* dt, size_t pitch, float dt_bias, float rate,
                                              int begin, int last, float behind) {
  const int lane = threadIdx.x, row = last - lane;
  const float step = row < begin ? 0.f : softplus(to_float(dt[row * pitch]) + dt_bias);
  float sum = step * rate;
  #pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, sum, lanes);
    if (lane >= lanes) sum += before;
  }
  const float before = __shfl_up_sync(0xffffffffu, sum, 1);
  weight[lane] = step * expf(behind + (lane ? before : 0.f));
  return behind + __shfl_sync(0xffffffffu, sum, kWarp - 1);
}

// x, of the columns from x_column on, times its weights, and B of the same rows. The weights are there.
template <typename T, int kStateDim>
__device__ __forceinline__ void fill_tiles(FillTiles<kStateDim>& tiles, const T* act, size_t pitch, int x_column,
                                           int b_column, int begin, int last) {
  constexpr int kVecs = kStateDim / 4;
  for (int i = threadIdx.x; i < kFillRows * kVecs; i += kFillThreads) {
    const int r = i / kVecs, row = last - r;
    const uint2 b = row < begin ? make_uint2(0, 0) : *(const uint2*)(act + row * pitch + b_column + i % kVecs * 4);
    const float2 low = unpack<T>(b.x), high = unpack<T>(b.y);
    tiles.b[r][i % kVecs] = make_float4(low.x, low.y, high.x, high.y);
  }
  for (int i = threadIdx.x; i < kFillRows * kFillStateRows; i += kFillThreads) {
    const int r = i / kFillStateRows, row = last - r, column = i % kFillStateRows;
    tiles.x[r][column] = row < begin ? 0.f : tiles.weight[r] * to_float(act[row * pitch + x_column + column]);
  }
}

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& x) {
  sum.x = fmaf(factor, x.x, sum.x), sum.y = fmaf(factor, x.y, sum.y);
  sum.z = fmaf(factor, x.z, sum.z), sum.w = fmaf(factor, x.w, sum.w);
}

// The state behind every sequence of a pack: from that in front of the segment of its last row, and from its rows in
// this segment, the last ones first, as then every weight is a product of decays that are known.
//
// zxbcdt (rows, columns); act (rows, channels): x, B, C behind the convolution; segment_states (segments, heads,
// head_dim, kStateDim); A_log, dt_bias (heads); states (sequences, heads, head_dim, kStateDim), 0 for sequences without
// a row.
// Launch: grid (inner / 32, sequences), block 128, shared memory kSharedBytes.
template <typename T, int kStateDim, int kSharedBytes>
__global__ void __launch_bounds__(kFillThreads, 3) thd_mixer_fill(
    const T* __restrict__ zxbcdt, const T* __restrict__ act, const float4* __restrict__ segment_states,
    const float* __restrict__ A_log, const float* __restrict__ dt_bias, float4* __restrict__ states,
    const int* __restrict__ cu_seqlens, const int* __restrict__ cu_seqlens_padded, MixerSize size) {
  constexpr int kVecs = kStateDim / 4, kLanes = kVecs < kWarp ? kVecs : kWarp, kOwnVecs = kVecs / kLanes;
  constexpr int kOwnRows = kFillStateRows * kLanes / kFillThreads;
  static_assert(same_bytes<sizeof(FillTiles<kStateDim>), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  FillTiles<kStateDim>& tiles = *(FillTiles<kStateDim>*)shared_bytes;
  const int seq = blockIdx.y, first = blockIdx.x * kFillStateRows, head = first / size.head_dim;
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes * kOwnRows;

  const int2 range = sequence(cu_seqlens, cu_seqlens_padded, seq, size.rows);
  const int segment = max(0, range.y - 1) / (kChunk * size.segment);
  const int begin = max(range.x, segment * kChunk * size.segment);
  const T* const dt = zxbcdt + size.inner() + size.channels() + head;
  const float rate = -expf(A_log[head]);
  float behind = 0.f;                                 // known to the first warp
  float4 state[kOwnRows][kOwnVecs] = {};
  for (int last = range.y - 1; last >= begin; last -= kFillRows) {
    __syncthreads();                                  // the tiles before have been read
    if (threadIdx.x < kWarp)
      behind = fill_weights(tiles.weight, dt, size.columns(), dt_bias[head], rate, begin, last, behind);
    __syncthreads();
    fill_tiles(tiles, act, size.channels(), first, size.b_column(size.group_of(head)), begin, last);
    __syncthreads();
    #pragma unroll 4
    for (int r = 0; r < kFillRows; ++r)
      #pragma unroll
      for (int v = 0; v < kOwnVecs; ++v) {
        const float4 b = tiles.b[r][lane + v * kLanes];
        #pragma unroll
        for (int i = 0; i < kOwnRows; ++i) add_scaled(state[i][v], tiles.x[r][row + i], b);
      }
  }

  __syncthreads();
  if (threadIdx.x == 0) tiles.weight[0] = expf(behind);
  __syncthreads();
  const size_t own = (size_t)(first + row) * kVecs + lane, pitch = (size_t)size.inner() * kVecs;
  #pragma unroll
  for (int i = 0; i < kOwnRows; ++i)
    #pragma unroll
    for (int v = 0; v < kOwnVecs; ++v) {
      const size_t at = own + i * kVecs + v * kLanes;
      if (range.x < begin) add_scaled(state[i][v], tiles.weight[0], segment_states[segment * pitch + at]);
      states[seq * pitch + at] = state[i][v];
    }
}
