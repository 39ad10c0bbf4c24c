// Texts that grow, of a Mamba-2 mixer (sm_80 and later): the next row of each, and what a forward left of its sequences.
// A text is the state behind its last row, and as many last rows of x, B and C as the convolution of the next one sees,
// with zeros in front of its first. kernels/common.cuh comes first.

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

// log(1 + exp(x)), which is exp(x) far below 0.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

template <typename T> __device__ __forceinline__ float as_float(T x) { return unpack<T>(x.bits).x; }
template <typename T> __device__ __forceinline__ T rounded(float x) { return T{(unsigned short)pack<T>(x, 0.f)}; }

__device__ __forceinline__ u32 pair_of(unsigned short low, unsigned short high) { return low | (u32)high << 16; }

// x, B and C of the next row of every active text behind the convolution and silu; the row takes its place as the last.
// Rows of zxbcdt may begin anywhere, those of a text begin at pairs.
//
// zxbcdt (texts, columns); rows (texts, kWidth - 1, channels); conv_weight (channels, kWidth), conv_bias (channels);
// active (texts); convolved (texts, channels). channels: even.
// Launch: grid (texts, ceil(channels / 512)), block 256: a pair of channels a thread.
template <typename T, int kWidth>
__global__ void __launch_bounds__(256) thd_mixer_decode_conv(
    const T* __restrict__ zxbcdt, u32* __restrict__ rows, const float* __restrict__ conv_weight,
    const float* __restrict__ conv_bias, const bool* __restrict__ active, float2* __restrict__ convolved, int columns,
    int d_inner, int channels) {
  constexpr int kReach = kWidth - 1;
  const int text = blockIdx.x, pairs = channels / 2, pair = blockIdx.y * 256 + threadIdx.x;
  if (pair >= pairs || !active[text]) return;
  const T* const next = zxbcdt + (size_t)text * columns + d_inner + 2 * pair;
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
// zxbcdt (texts, num_heads * head_dim + channels + num_heads): z, .., dt; convolved (texts, channels): x, B, C; states
// (texts, num_heads, head_dim, kStateDim); A_log, D, dt_bias (num_heads); active (texts); out (texts, num_heads *
// head_dim), 0 for texts that are not active. head_dim: a multiple of kRows.
// Launch: grid (texts, num_heads * head_dim / kRows), block 128. Bound by memory.
template <typename T, int kStateDim, int kRows>
__global__ void __launch_bounds__(kDecodeThreads, 5) thd_mixer_decode(
    const T* __restrict__ zxbcdt, const float* __restrict__ convolved, float4* __restrict__ states,
    const float* __restrict__ A_log, const float* __restrict__ D, const float* __restrict__ dt_bias,
    const bool* __restrict__ active, T* __restrict__ out, int num_heads, int head_dim, int num_groups) {
  constexpr int kVecs = kStateDim / 4 / kStateLanes, kStep = kDecodeThreads / kStateLanes, kSteps = kRows / kStep;
  const int text = blockIdx.x, lane = threadIdx.x % kStateLanes, head = blockIdx.y * kRows / head_dim;
  const int row = blockIdx.y * kRows + threadIdx.x / kStateLanes, d_inner = num_heads * head_dim;
  const int group = head / (num_heads / num_groups), channels = d_inner + 2 * num_groups * kStateDim;
  T* const to = out + (size_t)text * d_inner + row;
  if (!active[text]) {
    #pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (lane == 0) to[i * kStep] = T{0};
    return;
  }
  float4* const mine = states + ((size_t)text * d_inner + row) * (kStateDim / 4) + lane;
  float4 state[kSteps][kVecs];
  #pragma unroll
  for (int i = 0; i < kSteps; ++i)
    #pragma unroll
    for (int v = 0; v < kVecs; ++v) state[i][v] = mine[i * kStep * (kStateDim / 4) + v * kStateLanes];

  const T* const mixed = zxbcdt + (size_t)text * (d_inner + channels + num_heads);
  const float dt = softplus(as_float(mixed[d_inner + channels + head]) + dt_bias[head]);
  const float decay = expf(-expf(A_log[head]) * dt), d = D[head];
  const float* const x = convolved + (size_t)text * channels;
  const float4* const b = (const float4*)(x + d_inner) + group * (kStateDim / 4) + lane;
  const float4* const c = b + num_groups * (kStateDim / 4);
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
    if (lane == 0) to[i * kStep] = rounded<T>((y + d * x_of) * silu(as_float(mixed[row + i * kStep])));
  }
}

// Rows of a sequence of a pack; none if the offsets are none.
__device__ __forceinline__ int2 sequence(const int* cu_seqlens, const int* cu_seqlens_padded, int seq, int num_rows) {
  const int begin = cu_seqlens_padded[seq], length = cu_seqlens[seq + 1] - cu_seqlens[seq];
  const bool good = begin >= 0 && length >= 0 && begin <= num_rows && length <= num_rows - begin;
  return good ? make_int2(begin, begin + length) : make_int2(0, 0);
}

// The last `reach` rows of x, B and C of every sequence, (sequences, reach, channels); 0 in front of its first.
// Launch: grid (sequences, ceil(reach * channels / 512)), block 256: a pair of channels a thread.
template <typename T>
__global__ void __launch_bounds__(256) thd_mixer_fill_rows(
    const T* __restrict__ zxbcdt, u32* __restrict__ rows, const int* __restrict__ cu_seqlens,
    const int* __restrict__ cu_seqlens_padded, int num_rows, int columns, int d_inner, int channels, int reach) {
  const int pairs = channels / 2, i = blockIdx.y * 256 + threadIdx.x;
  if (i >= reach * pairs) return;
  const int2 range = sequence(cu_seqlens, cu_seqlens_padded, blockIdx.x, num_rows);
  const int row = range.y - reach + i / pairs;
  const T* const from = zxbcdt + (size_t)max(row, 0) * columns + d_inner + i % pairs * 2;
  rows[(size_t)blockIdx.x * reach * pairs + i] = row < range.x ? 0u : pair_of(from[0].bits, from[1].bits);
}

[[maybe_unused]] constexpr int kFillRows = 32;      // of a pack at a time
[[maybe_unused]] constexpr int kFillStateRows = 32;  // of a head's state in a thread block
[[maybe_unused]] constexpr int kFillThreads = 128;

template <int kStateDim>
struct FillTiles {
  float4 b[kFillRows][kStateDim / 4];
  float x[kFillRows][kFillStateRows];
  float weight[kFillRows];  // what a row's x B^T counts for in the state behind the sequence
};

// The state behind every sequence of a pack, from that in front of the segment of its last row, and its rows in this
// segment, from the last one on.
//
// zxbcdt (num_rows, num_heads * head_dim + channels + num_heads): .., dt; act (num_rows, channels): x, B, C behind the
// convolution; segment_states (segments, num_heads, head_dim, kStateDim), of segment_rows rows each; A_log, dt_bias
// (num_heads); states (sequences, num_heads, head_dim, kStateDim), 0 for sequences without a row.
// Launch: grid (sequences, num_heads * head_dim / 32), block 128, shared memory kSharedBytes.
template <typename T, int kStateDim, int kSharedBytes>
__global__ void __launch_bounds__(kFillThreads, 3) thd_mixer_fill(
    const T* __restrict__ zxbcdt, const T* __restrict__ act, const float4* __restrict__ segment_states,
    const float* __restrict__ A_log, const float* __restrict__ dt_bias, float4* __restrict__ states,
    const int* __restrict__ cu_seqlens, const int* __restrict__ cu_seqlens_padded, int num_rows, int segment_rows,
    int num_heads, int head_dim, int num_groups) {
  constexpr int kVecs = kStateDim / 4, kLanes = kVecs < kWarp ? kVecs : kWarp, kOwnVecs = kVecs / kLanes;
  constexpr int kOwnRows = kFillStateRows * kLanes / kFillThreads;
  using Tiles = FillTiles<kStateDim>;
  static_assert(same_bytes<sizeof(Tiles), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Tiles& tiles = *(Tiles*)shared_bytes;
  const int d_inner = num_heads * head_dim, channels = d_inner + 2 * num_groups * kStateDim;
  const int first = blockIdx.y * kFillStateRows, head = first / head_dim, group = head / (num_heads / num_groups);
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes * kOwnRows;

  const int2 range = sequence(cu_seqlens, cu_seqlens_padded, blockIdx.x, num_rows);
  const int segment = max(0, range.y - 1) / segment_rows, begin = max(range.x, segment * segment_rows);
  const float rate = -expf(A_log[head]);
  float behind = 0.f;  // in the first warp, the sum of a over the rows behind the tile
  float4 state[kOwnRows][kOwnVecs] = {};

  for (int end = range.y; end > begin; end -= kFillRows) {
    __syncthreads();  // the tile before has been read
    if (threadIdx.x < kWarp) {
      const int at = end - 1 - threadIdx.x;  // of which lane 0 has the last
      const T* const raw = zxbcdt + (size_t)max(at, 0) * (d_inner + channels + num_heads) + d_inner + channels + head;
      const float dt = at < begin ? 0.f : softplus(as_float(*raw) + dt_bias[head]), a = dt * rate;
      float sum = a;
      #pragma unroll
      for (int back = 1; back < kWarp; back *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, back);
        if (threadIdx.x >= back) sum += other;
      }
      const float before = __shfl_up_sync(0xffffffffu, sum, 1);
      tiles.weight[threadIdx.x] = at < begin ? 0.f : dt * expf(behind + (threadIdx.x ? before : 0.f));
      behind += __shfl_sync(0xffffffffu, sum, kWarp - 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kFillRows * kVecs; i += kFillThreads) {
      const int r = i / kVecs, at = end - 1 - r;
      const uint2 b = at < begin ? make_uint2(0u, 0u) : *(const uint2*)(
          act + (size_t)at * channels + d_inner + group * kStateDim + i % kVecs * 4);
      const float2 low = unpack<T>(b.x), high = unpack<T>(b.y);
      tiles.b[r][i % kVecs] = make_float4(low.x, low.y, high.x, high.y);
    }
    for (int i = threadIdx.x; i < kFillRows * kFillStateRows; i += kFillThreads) {
      const int r = i / kFillStateRows, at = end - 1 - r;
      const float x = at < begin ? 0.f : as_float(act[(size_t)at * channels + first + i % kFillStateRows]);
      tiles.x[r][i % kFillStateRows] = tiles.weight[r] * x;
    }
    __syncthreads();
    #pragma unroll 4
    for (int r = 0; r < kFillRows; ++r) {
      float x[kOwnRows];
      #pragma unroll
      for (int i = 0; i < kOwnRows; ++i) x[i] = tiles.x[r][row + i];
      #pragma unroll
      for (int v = 0; v < kOwnVecs; ++v) {
        const float4 b = tiles.b[r][lane + v * kLanes];
        #pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          float4& s = state[i][v];
          s.x = fmaf(x[i], b.x, s.x), s.y = fmaf(x[i], b.y, s.y), s.z = fmaf(x[i], b.z, s.z), s.w = fmaf(x[i], b.w, s.w);
        }
      }
    }
  }

  __syncthreads();
  if (threadIdx.x == 0) tiles.weight[0] = expf(behind);
  __syncthreads();
  const float left = tiles.weight[0];
  const size_t own = (size_t)(first + row) * kVecs + lane, pitch = (size_t)d_inner * kVecs;
  #pragma unroll
  for (int i = 0; i < kOwnRows; ++i)
    #pragma unroll
    for (int v = 0; v < kOwnVecs; ++v) {
      float4 s = state[i][v];
      const size_t at = own + i * kVecs + v * kLanes;
      if (range.x < begin) {  // the sequence came with a state into the segment
        const float4 f = segment_states[segment * pitch + at];
        s.x = fmaf(left, f.x, s.x), s.y = fmaf(left, f.y, s.y), s.z = fmaf(left, f.z, s.z), s.w = fmaf(left, f.w, s.w);
      }
      states[blockIdx.x * pitch + at] = s;
    }
}
