// Decode of a Mamba-2 mixer: the next row of each sequence, and what a forward leaves of the sequences of a pack. A
// cached sequence is the state behind its last row, and the last rows of x, B and C that the next convolution sees,
// with zeros before its first row. Rows of a MixerSize are sequences, or rows of a pack.

#pragma once

#include "kernels/mamba/common.cuh"

template <typename T> __device__ __forceinline__ T rounded(float x) { return T{(unsigned short)pack<T>(x, 0.f)}; }

__device__ __forceinline__ u32 pair_of(unsigned short low, unsigned short high) { return low | (u32)high << 16; }

// Convolves the next row of every active sequence and applies silu; the row becomes the last of its sequence. Rows of
// zxbcdt may begin anywhere, cached rows begin at pairs.
//
// zxbcdt (sequences, columns); rows (sequences, kWidth - 1, channels); conv_weight (channels, kWidth), conv_bias
// (channels)
// active (sequences); convolved (sequences, channels); channels must be even
// Launch: grid (ceil(channels / 512), sequences), block 256: one pair of channels per thread.
template <typename T, int kWidth>
__global__ void __launch_bounds__(256) thd_mixer_decode_conv(
    const T* __restrict__ zxbcdt, u32* __restrict__ rows, const float* __restrict__ conv_weight,
    const float* __restrict__ conv_bias, const bool* __restrict__ active, float2* __restrict__ convolved,
    MixerSize size) {
  constexpr int kReach = kWidth - 1;
  const int seq = blockIdx.y, pairs = size.channels() / 2, pair = blockIdx.x * 256 + threadIdx.x;
  if (pair >= pairs || !active[seq]) return;
  const T* const next = zxbcdt + (size_t)seq * size.columns() + size.inner() + 2 * pair;
  u32* const mine = rows + (size_t)seq * kReach * pairs + pair;
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
  convolved[(size_t)seq * pairs + pair] = make_float2(silu(sum.x), silu(sum.y));
}

[[maybe_unused]] constexpr int kStateLanes = 16;      // that have one row of a state
[[maybe_unused]] constexpr int kDecodeThreads = 128;

// Computes the next state of a sequence and its y: s = exp(dt A) s + dt x B^T and y = s C + D x per head. If it gates,
// the result is y * silu(z). A thread block has kRows rows of a head's state of head_dim rows; each is read and written
// once.
//
// Out: T for results (sequences, inner), 0 for inactive sequences. float for y, which replaces x in `convolved`: only
// the threads of its row read x, and have done so.
template <typename T, int kStateDim, int kRows, typename Out>
__device__ __forceinline__ void next_state(const T* zxbcdt, const float* convolved, float4* states, const float* A_log,
                                           const float* D, const float* dt_bias, const bool* active, Out* out,
                                           const MixerSize& size) {
  constexpr bool kGates = sizeof(Out) == sizeof(T);
  constexpr int kVecs = kStateDim / 4 / kStateLanes, kStep = kDecodeThreads / kStateLanes, kSteps = kRows / kStep;
  const int seq = blockIdx.y, lane = threadIdx.x % kStateLanes;
  const int row = blockIdx.x * kRows + threadIdx.x / kStateLanes, head = blockIdx.x * kRows / size.head_dim;
  Out* const to = out + (size_t)seq * (kGates ? size.inner() : size.channels()) + row;
  if (!active[seq]) {
    #pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (kGates && lane == 0) to[i * kStep] = Out{0};
    return;
  }
  float4* const mine = states + ((size_t)seq * size.inner() + row) * (kStateDim / 4) + lane;
  float4 state[kSteps][kVecs];
  #pragma unroll
  for (int i = 0; i < kSteps; ++i)
    #pragma unroll
    for (int v = 0; v < kVecs; ++v) state[i][v] = mine[i * kStep * (kStateDim / 4) + v * kStateLanes];

  const T* const mixed = zxbcdt + (size_t)seq * size.columns();
  const float dt = softplus(to_float(mixed[size.inner() + size.channels() + head]) + dt_bias[head]);
  const float decay = expf(-expf(A_log[head]) * dt), d = D[head];
  const float* const x = convolved + (size_t)seq * size.channels();
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
    if constexpr (kGates) {
      if (lane == 0) to[i * kStep] = rounded<T>((y + d * x_of) * silu(to_float(mixed[row + i * kStep])));
    } else {
      if (lane == 0) to[i * kStep] = y + d * x_of;
    }
  }
}

// The next state of every active sequence and its result. Bound by memory bandwidth.
//
// zxbcdt (sequences, columns); convolved (sequences, channels): x, B, C; states (sequences, heads, head_dim, kStateDim)
// A_log, D, dt_bias (heads); active (sequences); out (sequences, inner), 0 for inactive sequences
// head_dim: a multiple of kRows
// Launch: grid (inner / kRows, sequences), which proceeds through memory, block 128.
template <typename T, int kStateDim, int kRows>
__global__ void __launch_bounds__(kDecodeThreads, 5) thd_mixer_decode(
    const T* __restrict__ zxbcdt, const float* __restrict__ convolved, float4* __restrict__ states,
    const float* __restrict__ A_log, const float* __restrict__ D, const float* __restrict__ dt_bias,
    const bool* __restrict__ active, T* __restrict__ out, MixerSize size) {
  next_state<T, kStateDim, kRows>(zxbcdt, convolved, states, A_log, D, dt_bias, active, out, size);
}

// The next state without the gate, for thd_mixer_decode_norm: y replaces x. Launch: as thd_mixer_decode.
template <typename T, int kStateDim, int kRows>
__global__ void __launch_bounds__(kDecodeThreads, 5) thd_mixer_decode_ungated(
    const T* __restrict__ zxbcdt, float* convolved, float4* __restrict__ states, const float* __restrict__ A_log,
    const float* __restrict__ D, const float* __restrict__ dt_bias, const bool* __restrict__ active, MixerSize size) {
  next_state<T, kStateDim, kRows>(zxbcdt, convolved, states, A_log, D, dt_bias, active, convolved, size);
}

// Returns the rows of a sequence of a pack, or none if the offsets are invalid.
__device__ __forceinline__ int2 sequence(const int* cu_seqlens, const int* cu_seqlens_padded, int seq, int num_rows) {
  const int begin = cu_seqlens_padded[seq], length = cu_seqlens[seq + 1] - cu_seqlens[seq];
  const bool good = begin >= 0 && length >= 0 && begin <= num_rows && length <= num_rows - begin;
  return good ? make_int2(begin, begin + length) : make_int2(0, 0);
}

// Copies the last `reach` rows of x, B and C of every sequence, (sequences, reach, channels); 0 before its first row.
// Launch: grid (ceil(reach * channels / 512), sequences), block 256: one pair of channels per thread.
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

[[maybe_unused]] constexpr int kFillColumns = 64;     // of x, in a thread block
[[maybe_unused]] constexpr int kFillThreads = 128;

// A chunk of rows. Rows of other sequences are 0 and have weight 0.
template <typename T, int kStateDim>
struct FillStage {
  T x[kChunk * (kFillColumns + kPad)], b[kChunk * (kStateDim + kPad)];
  float weight[kChunk];                               // of x B^T in the state behind the sequence
};

// Starts to copy columns of the rows of a sequence in a chunk.
template <typename T, int kCols>
__device__ __forceinline__ void load_rows(T* tile, const T* columns, u32 pitch, int chunk, int2 range) {
  constexpr int kVectors = kCols / 8;
  #pragma unroll
  for (int i = threadIdx.x; i < kChunk * kVectors; i += kFillThreads) {
    const int row = chunk * kChunk + i / kVectors, col = i % kVectors * 8;
    const bool own = row >= range.x && row < range.y;
    const T* const from = columns + (size_t)(own ? row : range.x) * pitch + col;
    copy_async_16(tile + i / kVectors * (kCols + kPad) + col, from, own);
  }
}

// Computes the state behind every sequence of a pack: from the state before the segment of its last row, and from its
// rows in this segment. The last rows come first, as every weight is then a product of known decays.
//
// channels (rows, channels): convolved x, B, C; dt, sums: see Rates of conv.cu
// segment_states (segments, heads, head_dim, kStateDim)
// states (sequences, heads, head_dim, kStateDim), 0 for sequences without a row; head_dim: a multiple of kFillColumns
// Launch: grid (inner / kFillColumns, sequences), block 128, shared memory kSharedBytes.
template <typename T, int kStateDim, int kSharedBytes>
__global__ void __launch_bounds__(kFillThreads) thd_mixer_fill(
    const T* __restrict__ channels, const float* __restrict__ dt, const float* __restrict__ sums,
    const float* __restrict__ segment_states, float* __restrict__ states, const int* __restrict__ cu_seqlens,
    const int* __restrict__ cu_seqlens_padded, MixerSize size) {
  using Stage = FillStage<T, kStateDim>;
  constexpr int kPitch = kFillColumns + kPad, kStatePitch = kStateDim + kPad, kBlocks = kStateDim / 16;
  static_assert(same_bytes<2 * (int)sizeof(Stage), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Stage* const stages = (Stage*)shared_bytes;
  const int seq = blockIdx.y, first = blockIdx.x * kFillColumns, head = first / size.head_dim;
  const int2 range = sequence(cu_seqlens, cu_seqlens_padded, seq, size.rows);
  const int segment = max(0, range.y - 1) / (kChunk * size.segment);
  const int begin = max(range.x / kChunk, segment * size.segment);
  const int end = range.x < range.y ? (range.y + kChunk - 1) / kChunk : begin;

  const u32 pitch = size.channels();
  const T *const x = channels + first, *const b = channels + size.b_column(size.group_of(head));
  auto load = [&](int chunk) {
    if (chunk >= begin) {
      load_rows<T, kFillColumns>(stages[chunk % 2].x, x, pitch, chunk, range);
      load_rows<T, kStateDim>(stages[chunk % 2].b, b, pitch, chunk, range);
    }
    copies_commit();
  };

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int row = warp % 2 * 32, column = warp / 2 * (kStateDim / 2);  // of the state, where this warp's part begins
  float state[2][kBlocks][4] = {}, behind = 0.f;      // behind: the sum of a * log2(e) over the chunks done
  load(end - 1);
  for (int chunk = end - 1; chunk >= begin; --chunk) {
    load(chunk - 1);
    Stage& stage = stages[chunk % 2];
    const size_t at = size.in_heads(head, chunk);
    const float all = sums[at + min(range.y - chunk * kChunk, kChunk) - 1];
    if (threadIdx.x < kChunk) {
      const int here = chunk * kChunk + threadIdx.x;
      const bool own = here >= range.x && here < range.y;
      stage.weight[threadIdx.x] = own ? dt[at + threadIdx.x] * decay_of(all - sums[at + threadIdx.x] + behind) : 0.f;
    }
    behind += all;
    copies_wait_but<1>();
    __syncthreads();
    #pragma unroll 1
    for (int k = 0; k < kChunk; k += 16) {
      u32 rows[2][1][4];
      #pragma unroll
      for (int i = 0; i < 2; ++i)
        load_weighted_columns<T, kPitch>(rows[i][0], stage.x + k * kPitch + row + i * 16, stage.weight + k);
      add_weighted_rows<T, kStatePitch>(state, rows, stage.b + k * kStatePitch + column);
    }
    __syncthreads();                                  // the stage has been read
  }

  const bool goes_on = range.x < begin * kChunk && range.x < range.y;
  const float last = goes_on ? decay_of(behind) : 0.f;
  const size_t own = ((size_t)first + row) * kStateDim + column, numbers = (size_t)size.inner() * kStateDim;
  #pragma unroll
  for (int i = 0; i < 2; ++i)
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const size_t at = own + (size_t)(i * 16 + half * 8 + lane / 4) * kStateDim + n * 8 + lane % 4 * 2;
        float2 made = make_float2(state[i][n][2 * half], state[i][n][2 * half + 1]);
        if (goes_on) {
          const float2 before = *(const float2*)(segment_states + segment * numbers + at);
          made.x = fmaf(last, before.x, made.x), made.y = fmaf(last, before.y, made.y);
        }
        store_pair(states + seq * numbers + at, made.x, made.y);
      }
}
