// What precedes the gradients of the Mamba-2 recurrence, which chunk_backward.cu computes for each chunk: the backward
// of the gate; gradients of states at the borders of segments; and from those, states and their gradients at every
// chunk.
//
// R below is the gradient of the state behind a chunk, S the state before it, both (head_dim, state_dim).

#pragma once

#include "kernels/mamba/backward_common.cuh"

// ------------------------------------------------------------------------------------------------ the gate

// dy = dout * silu(z), and dz (the first columns of dzxbcdt), 0 on padding, and each chunk's partial of the gradient of
// D, which needs dy before it is rounded. A thread has 8 columns of a chunk's rows. Bound by memory bandwidth.
//
// dout, y, dy (rows, inner); zxbcdt, dzxbcdt (rows, columns); channels (rows, channels)
// partials: (chunks, heads), with partials_pitch numbers from one chunk to the next
// Launch: grid (ceil(inner / 8 / 128), chunks, see tile_of_rows), block 128.
template <typename T>
__global__ void __launch_bounds__(128) thd_mixer_gate_bwd(const T* __restrict__ dout, const T* __restrict__ zxbcdt,
                                                          const T* __restrict__ y, const T* __restrict__ channels,
                                                          T* __restrict__ dy, T* __restrict__ dzxbcdt,
                                                          float* __restrict__ partials, size_t partials_pitch,
                                                          const int2* __restrict__ ranges, MixerSize size) {
  constexpr int kAtOnce = 2;                          // rows that are loaded
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8, chunk = tile_of_rows(), begin = chunk * kChunk;
  if (column >= size.inner() || chunk >= size.chunks()) return;
  float of_d = 0.f;
  for (int i = begin; i < min(begin + kChunk, size.rows); i += kAtOnce) {
    uint4 packed[kAtOnce][4];
    bool counts[kAtOnce];
    #pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const size_t row = min(i + a, size.rows - 1), at = row * size.inner() + column;
      packed[a][0] = *(const uint4*)(dout + at), packed[a][1] = *(const uint4*)(y + at);
      // initcheck does not see the bulk copies by which thd_ssd_conv_states_sm90 writes x of `channels`.
      packed[a][2] = *(const uint4*)(zxbcdt + row * size.columns() + column);
      packed[a][3] = *(const uint4*)(channels + row * size.channels() + column);
      counts[a] = i + a < size.rows && !is_empty(ranges[row]);
    }
    #pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      of_d += gate_back<T>(packed[a][0], packed[a][1], packed[a][2], packed[a][3], counts[a]);
      const size_t row = i + a;
      if (row >= size.rows) break;
      *(uint4*)(dy + row * size.inner() + column) = packed[a][0];
      *(uint4*)(dzxbcdt + row * size.columns() + column) = packed[a][1];
    }
  }
  for (int lanes = 1; lanes < size.head_dim / 8; lanes *= 2) of_d += __shfl_xor_sync(0xffffffffu, of_d, lanes);
  if (column % size.head_dim == 0) partials[chunk * partials_pitch + column / size.head_dim] = of_d;
}

// ------------------------------------------------------------------------------------------------ states

// The walk of a state over chunks: state = through * state + (weight * rows)^T columns. Forward, rows are x, columns
// are B, and weights are dt times the decay until the end of the chunk. Backward, it is the gradient of a state, rows
// are dy, columns are C, and weights are the decays of the state before.
//
// A thread block has kCols columns of the rows, which belong to one head or to some, and kSlice columns of the state.
// Two warps have 16 rows of the state, and each half of its columns. Tiles of kStages - 1 chunks are loaded ahead.
template <typename T, bool kBack, int kHeadDim, int kSlice, int kCols, int kStages>
struct Walk {
  static constexpr int kThreads = 4 * kCols, kBlocks = kSlice / 16, kHeads = kCols / kHeadDim, kNumbers = kChunk + 4;
  struct Shared {
    T rows[kStages][kChunk * (kCols + kPad)], columns[kStages][kChunk * (kSlice + kPad)];
    float weights[2][kHeads * kNumbers];              // and, behind those of each head, the decay of its state
    int largest[2][kThreads / kWarp];                 // bits of the largest number of each warp's state
  };
  const T *rows, *columns;
  const float *sums, *leave;                          // leave: if forward
  const int2* ranges;
  int head;                                           // the first

  // What this thread publishes about a chunk: the weight of a row, or the decay of a state.
  struct Told {
    float number;
    int2 range;
  };
  __device__ __forceinline__ Told ask(int chunk, const MixerSize& size) const {
    const int number = threadIdx.x - kHeads * kChunk, row = number < 0 ? threadIdx.x % kChunk : kChunk - 1;
    const int own = number < 0 ? threadIdx.x / kChunk : min(number, kHeads - 1);
    const float* const numbers = number < 0 && !kBack ? leave : sums;
    return {numbers[size.in_heads(head + own, chunk) + row], range_at(ranges, chunk * kChunk + row, size)};
  }
  __device__ __forceinline__ void tell(Shared& shared, int stage, Told told, int chunk, const MixerSize& size) const {
    const int number = threadIdx.x - kHeads * kChunk, row = number < 0 ? threadIdx.x % kChunk : kChunk - 1;
    const int begin = chunk * kChunk;
    const bool enters = first_of(told.range, begin + row, size) < begin;
    const float left = enters ? decay_of(told.number) : 0.f;
    if (number < 0)
      shared.weights[stage][threadIdx.x / kChunk * kNumbers + row] = kBack ? left : told.number;
    else if (number < kHeads)
      shared.weights[stage][number * kNumbers + kChunk] = left;
  }
  __device__ __forceinline__ void load(Shared& shared, int stage, int chunk, const MixerSize& size) const {
    const int pitch = kBack ? size.inner() : size.channels();
    // initcheck reports x here too, if thd_ssd_conv_states_sm90 wrote it by bulk copies.
    load_chunk<T, kCols, kThreads>(shared.rows[stage], rows, pitch, chunk, size.rows, threadIdx.x);
    load_chunk<T, kSlice, kThreads>(shared.columns[stage], columns, size.channels(), chunk, size.rows, threadIdx.x);
  }

  // Scale of an operand made from the state of this warp's head, which could exceed the range of T.
  static __device__ __forceinline__ void tell_largest(Shared& shared, int stage, const float (&state)[1][kBlocks][4]) {
    const int bits = largest_of_warp(state);
    if (threadIdx.x % kWarp == 0) shared.largest[stage][threadIdx.x / kWarp] = bits;
  }
  static __device__ __forceinline__ PowerOfTwo scale_for(const Shared& shared, int stage) {
    constexpr int kWarps = kHeadDim / 8;              // of a head
    const int first = threadIdx.x / kWarp / kWarps * kWarps;
    int bits = 0;
    #pragma unroll
    for (int i = 0; i < kWarps; ++i) bits = max(bits, shared.largest[stage][first + i]);
    return scale_of(bits);
  }

  // Processes the chunks from `begin` to `end`, and calls before(chunk, stage) before each.
  template <typename Before>
  __device__ __forceinline__ float operator()(float (&state)[1][kBlocks][4], Shared& shared, int begin, int end,
                                              const MixerSize& size, Before before) const {
    constexpr int step = kBack ? -1 : 1;
    const int count = end - begin;
    int chunk = kBack ? end - 1 : begin;
    const int warp = threadIdx.x / kWarp, rows_begin = warp / 2 * 16, own = rows_begin / kHeadDim;
    float through = 1.f;
    #pragma unroll
    for (int ahead = 0; ahead < kStages - 1; ++ahead) {
      if (ahead < count) load(shared, ahead, chunk + ahead * step, size);
      copies_commit();
    }
    tell(shared, 0, ask(chunk, size), chunk, size);
    if (kScalesStates<T>) tell_largest(shared, 0, state);
    int stage = 0, parity = 0;
    for (int left = count; left > 0; --left, chunk += step, parity = 1 - parity) {
      copies_wait_but<kStages - 2>();
      __syncthreads();
      const int next = left > 1 ? chunk + step : chunk;
      const Told told = ask(next, size);
      if (left >= kStages) load(shared, stage ? stage - 1 : kStages - 1, chunk + (kStages - 1) * step, size);
      copies_commit();
      before(chunk, parity);
      const float* const weights = shared.weights[parity] + own * kNumbers;
      scale(state, weights[kChunk]);
      through *= weights[kChunk];
      #pragma unroll 2
      for (int k = 0; k < kChunk; k += 16) {
        u32 operand[1][1][4];
        load_weighted_columns<T, kCols + kPad>(operand[0][0], shared.rows[stage] + k * (kCols + kPad) + rows_begin,
                                               weights + k);
        add_weighted_rows<T, kSlice + kPad>(
            state, operand, shared.columns[stage] + k * (kSlice + kPad) + warp % 2 * kSlice / 2);
      }
      tell(shared, 1 - parity, told, next, size);
      if (kScalesStates<T>) tell_largest(shared, 1 - parity, state);
      stage = stage + 1 < kStages ? stage + 1 : 0;
    }
    return through;
  }
};

// The term that every segment adds to the gradient of the state before it, and the decay of the one behind.
//
// dstates (segments, heads, head_dim, state_dim); decays (segments, heads)
// Launch: grid (segments, inner / kCols, kStateDim / kSlice), block 4 * kCols, shared memory kSharedBytes.
template <typename T, int kHeadDim, int kStateDim, int kSlice, int kCols, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(4 * kCols, kCols == 64 ? 3 : 2) thd_ssd_dstates(
    const T* __restrict__ channels, const T* __restrict__ dy, const float* __restrict__ sums,
    const int2* __restrict__ ranges, float* __restrict__ dstates, float* __restrict__ decays, MixerSize size) {
  using Step = Walk<T, true, kHeadDim, kSlice, kCols, kStages>;
  static_assert(same_bytes<sizeof(typename Step::Shared), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int segment = blockIdx.x, column = blockIdx.y * kCols, slice = blockIdx.z * kSlice, head = column / kHeadDim;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int begin = segment * size.segment, end = min(begin + size.segment, size.chunks());
  const Step walk{dy + column, channels + size.c_column(size.group_of(head)) + slice, sums, nullptr, ranges, head};
  float state[1][Step::kBlocks][4] = {};
  const float through = walk(state, *(typename Step::Shared*)shared_bytes, begin, end, size, [](int, int) {});

  const int own = head + warp / 2 * 16 / kHeadDim, row = warp / 2 * 16 % kHeadDim + lane / 4;
  const int first_column = slice + warp % 2 * kSlice / 2;
  float* const to = dstates + size.state_of(segment, own) + (size_t)row * kStateDim + first_column + lane % 4 * 2;
  #pragma unroll
  for (int n = 0; n < Step::kBlocks; ++n) {
    store_pair(to + n * 8, state[0][n][0], state[0][n][1]);
    store_pair(to + n * 8 + 8 * kStateDim, state[0][n][2], state[0][n][3]);
  }
  if (lane == 0 && first_column == 0 && warp / 2 * 16 % kHeadDim == 0)
    decays[(size_t)segment * size.heads + own] = through;
}

// S, or with kBack R, of the chunks of some segments, rounded as operands, from the states before (or behind) the
// segments.
//
// states (segments, heads, head_dim, state_dim): of all segments
// made (chunks of these, heads, head_dim, state_dim), with columns as place_of says
// scales (chunks of these, heads, kStateDim / kSlice): their divisors, for float16 alone
// Launch: grid (segments of these, inner / kCols, kStateDim / kSlice), block 4 * kCols, shared memory kSharedBytes.
template <typename T, bool kBack, int kHeadDim, int kStateDim, int kSlice, int kCols, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(4 * kCols, kCols == 64 ? 3 : 2) thd_ssd_chunk_states(
    const T* __restrict__ channels, const T* __restrict__ dy, const float* __restrict__ sums,
    const float* __restrict__ leave, const int2* __restrict__ ranges, const float* __restrict__ states,
    int first_segment, T* __restrict__ made, float* __restrict__ scales, MixerSize size) {
  using Step = Walk<T, kBack, kHeadDim, kSlice, kCols, kStages>;
  static_assert(same_bytes<sizeof(typename Step::Shared), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  constexpr int kSlices = kStateDim / kSlice;
  auto& shared = *(typename Step::Shared*)shared_bytes;
  const int segment = first_segment + blockIdx.x, column = blockIdx.y * kCols, slice = blockIdx.z * kSlice;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, head = column / kHeadDim;
  const int begin = segment * size.segment, end = min(begin + size.segment, size.chunks());
  const int own = head + warp / 2 * 16 / kHeadDim, row = warp / 2 * 16 % kHeadDim + lane / 4;
  const int group = size.group_of(head);
  const int first_column = slice + warp % 2 * kSlice / 2;

  float state[1][Step::kBlocks][4];
  const float* const from = states + size.state_of(segment, own) + (size_t)row * kStateDim
                            + first_column + lane % 4 * 2;
  #pragma unroll
  for (int n = 0; n < Step::kBlocks; ++n) {
    const float2 low = *(const float2*)(from + n * 8), high = *(const float2*)(from + n * 8 + 8 * kStateDim);
    state[0][n][0] = low.x, state[0][n][1] = low.y, state[0][n][2] = high.x, state[0][n][3] = high.y;
  }
  auto keep = [&](int chunk, int stage) {
    const size_t number = (size_t)(chunk - first_segment * size.segment) * size.heads + own;
    T* const to = made + (number * kHeadDim + row) * kStateDim + first_column + lane % 4 * 8;
    PowerOfTwo scale{1.f, 1.f};
    if constexpr (kScalesStates<T>) {
      scale = Step::scale_for(shared, stage);
      if (lane == 0 && warp % 2 == 0 && warp / 2 * 16 % kHeadDim == 0)
        scales[(number) * kSlices + slice / kSlice] = scale.inverse;
    }
    #pragma unroll
    for (int n = 0; n < Step::kBlocks; n += 4)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 word[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i)
          word[i] = pack<T>(scale.factor * state[0][n + i][2 * half], scale.factor * state[0][n + i][2 * half + 1]);
        *(uint4*)(to + n * 8 + half * 8 * kStateDim) = make_uint4(word[0], word[1], word[2], word[3]);
      }
  };
  const Step walk{kBack ? dy + column : channels + column,
                  channels + (kBack ? size.c_column(group) : size.b_column(group)) + slice, sums, leave, ranges, head};
  walk(state, shared, begin, end, size, keep);
}
