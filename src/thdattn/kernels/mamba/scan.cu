// The recurrence of the Mamba-2 mixer, forward: the terms that segments of rows add to the state, the states before
// them, and y with the gate.
//
// A thread block processes the chunks of a segment in order, for kCols columns of x: one or two heads, or a part of
// one, which read B and C of one group. These are kSubs times kWidth columns, each of one head. Half of the warps of a
// scan load, and keep the state in registers from chunk to chunk. The other half computes y, 16 rows of kWidth columns
// per warp.

#pragma once

#include "kernels/mamba/common.cuh"

// ------------------------------------------------------------------------------------------------ the state

template <int kWidthOfSub, int kNumSubs, int kStateDim>
struct Slab {
  static constexpr int kWidth = kWidthOfSub, kSubs = kNumSubs, kState = kStateDim;
  static constexpr int kCols = kWidth * kSubs, kWarps = 4 * kSubs, kThreads = kWarp * kWarps;
  // Warps that keep a state have 32 of its kCols rows each, and kStateCols of its columns.
  static constexpr int kRowTiles = kCols / 32, kStateCols = kState * kRowTiles / kWarps, kBlocks = kStateCols / 8;
  static constexpr int kPitch = kCols + kPad, kStatePitch = kState + kPad;

  // Returns the head of a slab's columns of x from kWidth * sub on.
  static __device__ __forceinline__ int head_of(int slab, int sub, const MixerSize& size) {
    return (slab * kCols + sub * kWidth) / size.head_dim;
  }
};

// The state of a slab in registers, as accumulators: [2][kBlocks][4] of 32 rows and kStateCols columns per warp.
template <typename T, typename Slab>
struct StateOfSlab {
  float s[2][Slab::kBlocks][4];
  int row, column, sub, lane;                         // where in the slab this warp's part begins, and its head

  __device__ __forceinline__ explicit StateOfSlab(int warp)
      : row(warp % Slab::kRowTiles * 32), column(warp / Slab::kRowTiles * Slab::kStateCols),
        sub(row / Slab::kWidth), lane(threadIdx.x % kWarp) {}

  template <typename F> __device__ __forceinline__ void each_pair(F&& f) {
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      #pragma unroll
      for (int n = 0; n < Slab::kBlocks; ++n)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
          f(row + i * 16 + half * 8 + lane / 4, column + n * 8 + lane % 4 * 2, s[i][n][2 * half],
            s[i][n][2 * half + 1]);
  }
  __device__ __forceinline__ void clear() {
    each_pair([](int, int, float& x, float& y) { x = y = 0.f; });
  }
  // Load from, or store to, the slab's rows of an array of states, or of one with kPitch numbers per row.
  __device__ __forceinline__ void load(const float* state) {
    each_pair([&](int p, int n, float& x, float& y) {
      const float2 pair = *(const float2*)(state + p * Slab::kState + n);
      x = pair.x, y = pair.y;
    });
  }
  template <int kPitch, typename Out> __device__ __forceinline__ void store(Out* state, float factor = 1.f) {
    each_pair([&](int p, int n, float& x, float& y) { store_pair(state + p * kPitch + n, x * factor, y * factor); });
  }
  // Advances the state by a chunk. leave: dt times the decay until the end of the chunk, for the rows of this warp's
  // head.
  __device__ __forceinline__ void advance(const T* x, const T* b, const float* leave, float through) {
    scale(s, through);
    #pragma unroll 1
    for (int k = 0; k < kChunk; k += 16) {
      u32 rows[2][1][4];
      #pragma unroll
      for (int i = 0; i < 2; ++i)
        load_weighted_columns<T, Slab::kPitch>(rows[i][0], x + k * Slab::kPitch + row + i * 16, leave + k);
      add_weighted_rows<T, Slab::kStatePitch>(s, rows, b + k * Slab::kStatePitch + column);
    }
  }
};

// ------------------------------------------------------------------------------------------------ what segments add

template <typename T, typename Slab>
struct StatesStage {
  T x[kChunk * Slab::kPitch], b[kChunk * Slab::kStatePitch];
  float leave[Slab::kSubs][kChunk], last_sum[Slab::kSubs][4];
};

// Computes states (segments, heads, head_dim, kState) and decays (segments, heads) of every segment, from 0 before it.
// A state that no row behind the segment sees is left at 0. used_behind: whether a row behind the last segment may see
// its state.
// Launch: grid (inner / kCols, segments), block kThreads of Slab, shared memory kBytes.
template <typename T, int kWidth, int kSubs, int kState, int kStages, int kBytes>
__global__ void __launch_bounds__(Slab<kWidth, kSubs, kState>::kThreads) thd_ssd_states(
    const T* channels, const float* sums, const float* leave, float* states, const int2* ranges, float* decays,
    int used_behind, MixerSize size) {
  using S = Slab<kWidth, kSubs, kState>;
  using Stage = StatesStage<T, S>;
  static_assert(same_bytes<(int)sizeof(Stage) * kStages, kBytes>());
  extern __shared__ __align__(16) unsigned char memory[];
  Stage* const stages = (Stage*)memory;
  const int slab = blockIdx.x, group = size.group_of(S::head_of(slab, 0, size));
  const Segment segment(blockIdx.y, ranges, used_behind, size);
  const int from = segment.from, end = segment.end;

  const u32 pitch = size.channels();
  const T *const x = channels + slab * S::kCols, *const b = channels + size.b_column(group);
  auto load = [&](int chunk) {
    if (chunk < end) {
      Stage& stage = stages[(chunk - from) % kStages];
      load_chunk<T, S::kCols, S::kThreads>(stage.x, x, pitch, chunk, size.rows, threadIdx.x);
      load_chunk<T, kState, S::kThreads>(stage.b, b, pitch, chunk, size.rows, threadIdx.x);
      const int sub = threadIdx.x / (kChunk / 4), vector = threadIdx.x % (kChunk / 4) * 4;
      if (sub < kSubs) {
        const size_t at = size.in_heads(S::head_of(slab, sub, size), chunk);
        copy_async_16(&stage.leave[sub][vector], leave + at + vector, true);
        if (vector == 0) copy_async_4(stage.last_sum[sub], sums + at + kChunk - 1, true);
      }
    }
    copies_commit();
  };

  StateOfSlab<T, S> state(threadIdx.x / kWarp);
  state.clear();
  for (int chunk = from - kStages + 1; chunk < end; ++chunk) {  // the first iterations only load
    if (chunk >= from) {
      copies_wait_but<kStages - 2>();
      __syncthreads();
    }
    load(chunk + kStages - 1);
    if (chunk < from) continue;
    const Stage& stage = stages[(chunk - from) % kStages];
    // Behind the first of these chunks all rows are of one sequence.
    state.advance(stage.x, stage.b, stage.leave[state.sub], chunk > from ? decay_of(*stage.last_sum[state.sub]) : 0.f);
  }
  state.template store<kState>(states + size.state_of(segment.number, 0) + (size_t)slab * S::kCols * kState);

  const int column = slab * S::kCols + threadIdx.x * kWidth;
  if (threadIdx.x < kSubs && column % size.head_dim == 0)
    segment.write_decay(decays, sums, column / size.head_dim, size);
}

// ------------------------------------------------------------------------------------------------ states in front

// A head has `numbers` numbers, a multiple of 4. Each thread has four.
[[maybe_unused]] constexpr int kFoldThreads = 256, kFoldAhead = 8;

// Returns the state behind a segment: its decayed state before, and the segment's own term.
__device__ __forceinline__ float4 passed_on(float4 state, float decay, float4 own) {
  if (decay == 0.f) return own;
  return make_float4(fmaf(decay, state.x, own.x), fmaf(decay, state.y, own.y), fmaf(decay, state.z, own.z),
                     fmaf(decay, state.w, own.w));
}

// Visits `count` items from `begin` on, `step` apart, which are loaded some ahead. visit(index, numbers, decay) returns
// whether to go on.
template <typename Load, typename F>
__device__ __forceinline__ void walk(Load&& load, const float* decays, size_t decay_pitch, int begin, int step,
                                     int count, F&& visit) {
  float4 number[kFoldAhead];
  float decay[kFoldAhead];
  auto load_into = [&](int i, int nth) {
    if (nth >= count) return;
    const int which = begin + step * nth;
    number[i] = load(which);
    decay[i] = decays[which * decay_pitch];
  };
  #pragma unroll
  for (int i = 0; i < kFoldAhead; ++i) load_into(i, i);
  for (int done = 0; done < count; done += kFoldAhead)
    #pragma unroll
    for (int i = 0; i < kFoldAhead; ++i) {
      const int nth = done + i;
      if (nth >= count) return;
      const float4 numbers = number[i];
      const float lasts = decay[i];
      load_into(i, nth + kFoldAhead);
      if (!visit(begin + step * nth, numbers, lasts)) return;
    }
}

// Replaces the terms of segments by the states before them (step -1: behind them), from 0. summary: all segments as
// one.
// Launch: grid ceil(heads * numbers / (4 * kFoldThreads)), block kFoldThreads, as the two below.
__global__ void __launch_bounds__(kFoldThreads) thd_ssd_fold(
    float4* states, const float* decays, float* summary, int begin, int step, int segments, int heads, int numbers) {
  const size_t fours = (size_t)heads * numbers / 4, at = (size_t)blockIdx.x * kFoldThreads + threadIdx.x;
  if (at >= fours) return;
  const int head = 4 * at / numbers;
  float4 state = make_float4(0.f, 0.f, 0.f, 0.f);
  float through = 1.f;
  walk([&](int segment) { return states[segment * fours + at]; }, decays + head, heads, begin, step, segments,
       [&](int segment, float4 own, float decay) {
         states[segment * fours + at] = state;
         state = passed_on(state, decay, own);
         through *= decay;
         return true;
       });
  ((float4*)summary)[at] = state;
  if (4 * at % numbers == 0) summary[4 * fours + head] = through;
}

// Computes the state that other ranks leave to this one, by folding theirs in order. Launch: as thd_ssd_fold.
__global__ void __launch_bounds__(kFoldThreads) thd_ssd_start(
    const float* summaries, float4* start, int begin, int step, int ranks, int heads, int numbers) {
  const size_t fours = (size_t)heads * numbers / 4, at = (size_t)blockIdx.x * kFoldThreads + threadIdx.x;
  if (at >= fours) return;
  const size_t pitch = 4 * fours + heads;             // not always a multiple of 16 bytes
  float4 state = make_float4(0.f, 0.f, 0.f, 0.f);
  walk([&](int rank) {
         const float* const from = summaries + rank * pitch + 4 * at;
         return make_float4(from[0], from[1], from[2], from[3]);
       }, summaries + 4 * fours + 4 * at / numbers, pitch, begin, step, ranks,
       [&](int, float4 own, float decay) {
         state = passed_on(state, decay, own);
         return true;
       });
  start[at] = state;
}

// Adds that state, decayed, to the states before segments. Launch: as thd_ssd_fold.
__global__ void __launch_bounds__(kFoldThreads) thd_ssd_enter(
    float4* states, const float* decays, const float4* start, int begin, int step, int segments, int heads,
    int numbers) {
  const size_t fours = (size_t)heads * numbers / 4, at = (size_t)blockIdx.x * kFoldThreads + threadIdx.x;
  if (at >= fours) return;
  float4 state = start[at];
  walk([&](int segment) { return states[segment * fours + at]; }, decays + 4 * at / numbers, heads, begin, step,
       segments, [&](int segment, float4 own, float decay) {
         states[segment * fours + at] = passed_on(state, 1.f, own);
         state = passed_on(state, decay, make_float4(0.f, 0.f, 0.f, 0.f));
         return state.x != 0.f || state.y != 0.f || state.z != 0.f || state.w != 0.f;
       });
}

// ------------------------------------------------------------------------------------------------ y and the gate

template <typename T, typename Slab>
struct ScanStage {
  T x[kChunk * Slab::kPitch], z[kChunk * Slab::kPitch], b[kChunk * Slab::kStatePitch], c[kChunk * Slab::kStatePitch];
  float sums[Slab::kSubs][kChunk], dt[Slab::kSubs][kChunk], leave[Slab::kSubs][kChunk];
  int2 ranges[kChunk];
};

template <typename T, typename Slab, int kStages>
struct ScanShared {
  ScanStage<T, Slab> stages[kStages];
  T state[Slab::kCols * Slab::kStatePitch];           // before the chunk
  float inverse[4];                                   // factors for each 32 rows of it
  int largest[2][4];                                  // of 32 rows, of this chunk and of the next one

  // Publishes the state. `together` waits for all warps that keep it, and for those that read the one before.
  template <typename F>
  __device__ __forceinline__ void publish(StateOfSlab<T, Slab>& mine, int chunk, F&& together) {
    PowerOfTwo scale = {1.f, 1.f};
    const int tile = mine.row / 32;
    if constexpr (kScalesStates<T>) {
      const int bits = largest_of_warp(mine.s);
      if (mine.lane == 0) atomicMax(&largest[chunk % 2][tile], bits);
    }
    together();
    if constexpr (kScalesStates<T>) {
      scale = scale_of(largest[chunk % 2][tile]);
      inverse[tile] = scale.inverse;
      largest[(chunk + 1) % 2][tile] = 0;
    }
    mine.template store<Slab::kStatePitch>(state, scale.factor);
  }
};

// 16 rows of a chunk, of the columns of one head: one warp computes their y.
template <typename T, typename Slab>
struct RowsOfWarp {
  static constexpr int kWidth = Slab::kWidth, kState = Slab::kState, kBlocks = kWidth / 8;
  const ScanStage<T, Slab>& stage;
  const MixerSize& size;
  int band, sub, chunk, lane, row[2], first[2];       // rows of the chunk, and first of each as such
  u32 c[kState / 16][4];
  float y[1][kBlocks][4];

  __device__ __forceinline__ RowsOfWarp(const ScanStage<T, Slab>& stage, int band, int sub, int chunk,
                                        const MixerSize& size)
      : stage(stage), size(size), band(band), sub(sub), chunk(chunk), lane(threadIdx.x % kWarp) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = band * 16 + half * 8 + lane / 4;
      first[half] = first_in_chunk(row[half]);
    }
    load_operand<T, kState>(c, stage.c + band * 16 * Slab::kStatePitch);
  }
  __device__ __forceinline__ int first_in_chunk(int i) const {
    return first_of(stage.ranges[i], chunk * kChunk + i, size) - chunk * kChunk;
  }

  // Initialises y with the term of the state before the chunk.
  __device__ __forceinline__ void start_from(const T* state, const float* inverse) {
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) y[0][n][e] = 0.f;
    if (!__any_sync(0xffffffffu, first[0] < 0 || first[1] < 0)) return;
    add_products<T, kState, kBlocks>(y[0], c, state + sub * kWidth * Slab::kStatePitch);
    if constexpr (kScalesStates<T>) {
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) y[0][n][e] *= inverse[(sub * kWidth + n * 8) / 32];
    }
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool enters = first[e / 2] < 0;
      const float decay = decay_of(stage.sums[sub][row[e / 2]]);
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n) y[0][n][e] = enters ? decay * y[0][n][e] : 0.f;
    }
  }

  // Adds the terms of rows j of the chunk, 32 at a time: C_i . B_j times the decay from j to i, times dt_j x_j.
  __device__ __forceinline__ void add_rows() {
    const float sums[2] = {stage.sums[sub][row[0]], stage.sums[sub][row[1]]};
    for (int j = max(first_in_chunk(band * 16), 0) / 32 * 32; j <= band * 16; j += 32) {
      float products[1][4][4] = {};
      add_products<T, kState, 4>(products[0], c, stage.b + j * Slab::kStatePitch);
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int col = j + n * 8 + lane % 4 * 2;
        const float2 to = *(const float2*)&stage.sums[sub][col], dt = *(const float2*)&stage.dt[sub][col];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool counts = first[e / 2] <= col + e % 2 && col + e % 2 <= row[e / 2];
          const float decay = decay_of(sums[e / 2] - (e % 2 ? to.y : to.x));
          products[0][n][e] = counts ? products[0][n][e] * decay * (e % 2 ? dt.y : dt.x) : 0.f;
        }
      }
      u32 weights[1][2][4];
      round_to_operand<T>(weights, products);
      add_weighted_rows<T, Slab::kPitch>(y, weights, stage.x + j * Slab::kPitch + sub * kWidth);
    }
  }

  // Adds D x, and writes y and, if it gates, out. Both are 0 on padding, where x and the value used for z are. The tile
  // of z is reused for them, so that 16 bytes are written at a time.
  template <bool kGates> __device__ __forceinline__ void finish(float d, T* z, T* y_out, T* out) {
    u32 gate[kBlocks][2];
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row[half] * Slab::kPitch + sub * kWidth + n * 8 + lane % 4 * 2;
        const float2 x = unpack<T>(*(const u32*)(stage.x + at));
        y[0][n][2 * half] = fmaf(d, x.x, y[0][n][2 * half]);
        y[0][n][2 * half + 1] = fmaf(d, x.y, y[0][n][2 * half + 1]);
        if constexpr (kGates) gate[n][half] = first[half] <= row[half] ? *(const u32*)(z + at) : 0;
        store_pair(z + at, y[0][n][2 * half], y[0][n][2 * half + 1]);
      }
    write(y_out, z);
    if constexpr (!kGates) return;
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 of = unpack<T>(gate[n][half]);
        store_pair(z + row[half] * Slab::kPitch + sub * kWidth + n * 8 + lane % 4 * 2,
                   y[0][n][2 * half] * silu(of.x), y[0][n][2 * half + 1] * silu(of.y));
      }
    write(out, z);
  }
  __device__ __forceinline__ void write(T* into, const T* tile) const {
    constexpr int kVectors = kWidth / 8;
    __syncwarp();
    #pragma unroll
    for (int i = lane; i < 16 * kVectors; i += kWarp) {
      const int at = band * 16 + i / kVectors, col = sub * kWidth + i % kVectors * 8;
      if (chunk * kChunk + at < size.rows)
        *(uint4*)(into + (size_t)at * size.inner() + col) = *(const uint4*)(tile + at * Slab::kPitch + col);
    }
    __syncwarp();
  }
};

// Computes y and, with kGates, out (rows, inner) of some segments. states: before each of all segments.
template <typename T, bool kGates, int kWidth, int kSubs, int kState, int kStages, int kBytes>
__device__ __forceinline__ void scan_rows(const T* channels, const T* zxbcdt, const float* dt, const float* sums,
                                          const float* leave, const float* states, const float* d, T* y, T* out,
                                          const Segments& segments, const int2* ranges, const MixerSize& size) {
  using S = Slab<kWidth, kSubs, kState>;
  using Stage = ScanStage<T, S>;
  using Shared = ScanShared<T, S, kStages>;
  static_assert(same_bytes<(int)sizeof(Shared), kBytes>());
  constexpr int kThreads = 2 * S::kThreads, kLoaded = 1, kStateRead = 2, kRowsMade = 3, kStateKept = 4;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int slab = blockIdx.x, group = size.group_of(S::head_of(slab, 0, size));
  const int warp = threadIdx.x / kWarp % S::kWarps;
  const Run run(segments, size);
  const int begin = run.begin, end = run.end;

  // compute-sanitizer reports hazards that are none. synccheck calls kLoaded divergent, as each half of the warps waits
  // for all of them at a place of its own; both come there once per chunk. racecheck does not follow bar.arrive, by
  // which kStateRead orders reads of the state and its factors before the next publish.
  if (threadIdx.x < S::kThreads) {
    const int sub = warp / 4, band = sub % 2 ? 3 - warp % 4 : warp % 4;  // every scheduler has long and short rows
    const float d_of_head = d[S::head_of(slab, sub, size)];
    for (int chunk = begin; chunk < end; ++chunk) {
      wait(kLoaded, kThreads);
      Stage& stage = shared.stages[(chunk - begin) % kStages];
      RowsOfWarp<T, S> rows(stage, band, sub, chunk, size);
      rows.start_from(shared.state, shared.inverse);
      if (chunk + 1 < end) arrive(kStateRead, kThreads);
      rows.add_rows();
      const size_t at = (size_t)chunk * kChunk * size.inner() + slab * S::kCols;
      rows.template finish<kGates>(d_of_head, stage.z, y + at, out + at);
      if (kStages == 1 && chunk + 1 < end) arrive(kRowsMade, kThreads);
    }
    return;
  }

  const u32 pitch = size.channels();
  const int thread = threadIdx.x - S::kThreads;
  auto load = [&](int chunk) {
    Stage& stage = shared.stages[(chunk - begin) % kStages];
    load_chunk<T, kState, S::kThreads>(stage.c, channels + size.c_column(group), pitch, chunk, size.rows, thread);
    load_chunk<T, kState, S::kThreads>(stage.b, channels + size.b_column(group), pitch, chunk, size.rows, thread);
    load_chunk<T, S::kCols, S::kThreads>(stage.x, channels + slab * S::kCols, pitch, chunk, size.rows, thread);
    if constexpr (kGates)
      load_chunk<T, S::kCols, S::kThreads>(stage.z, zxbcdt + slab * S::kCols, size.columns(), chunk, size.rows, thread);
    if (thread < kChunk) load_range(&stage.ranges[thread], ranges, chunk * kChunk + thread, size);
    const int of = thread / (kChunk / 4), vector = thread % (kChunk / 4) * 4;
    if (of < kSubs) {
      const size_t at = size.in_heads(S::head_of(slab, of, size), chunk) + vector;
      copy_async_16(&stage.sums[of][vector], sums + at, true);
      copy_async_16(&stage.dt[of][vector], dt + at, true);
      copy_async_16(&stage.leave[of][vector], leave + at, true);
    }
    copies_commit();
  };

  load(begin);
  StateOfSlab<T, S> state(warp);
  const int row = begin * kChunk;
  const bool goes_on = first_of(range_at(ranges, row, size), row, size) < row;  // from the segment before
  if (goes_on) state.load(states + size.state_of(run.segment, 0) + (size_t)slab * S::kCols * kState);
  if (!goes_on) state.clear();
  if constexpr (kScalesStates<T>) {
    if (thread < 4) shared.largest[begin % 2][thread] = 0;
    wait(kStateKept, S::kThreads);
  }
  shared.publish(state, begin, [] { if constexpr (kScalesStates<T>) wait(kStateKept, S::kThreads); });
  for (int chunk = begin; chunk < end; ++chunk) {
    copies_wait();
    wait(kLoaded, kThreads);
    if (chunk + 1 == end) break;
    if (kStages > 1) load(chunk + 1);
    const Stage& stage = shared.stages[(chunk - begin) % kStages];
    const float through = through_chunk(stage.sums[state.sub][kChunk - 1], stage.ranges[kChunk - 1], chunk, size);
    state.advance(stage.x, stage.b, stage.leave[state.sub], through);
    shared.publish(state, chunk + 1, [] { wait(kStateRead, kThreads); });
    if (kStages == 1) {
      wait(kRowsMade, kThreads);
      load(chunk + 1);
    }
  }
}

// y and out (rows, inner) of some segments; out is 0 on padding. states: before each of all segments.
// Launch: grid (inner / kCols, ceil(segments.count / segments.of_block)), block twice kThreads of Slab, shared memory
// kBytes.
template <typename T, int kWidth, int kSubs, int kState, int kStages, int kBytes>
__global__ void __launch_bounds__(2 * Slab<kWidth, kSubs, kState>::kThreads, 1) thd_ssd_scan(
    const T* channels, const T* zxbcdt, const float* dt, const float* sums, const float* leave, const float* states,
    const float* d, T* y, T* out, Segments segments, const int2* ranges, MixerSize size) {
  scan_rows<T, true, kWidth, kSubs, kState, kStages, kBytes>(channels, zxbcdt, dt, sums, leave, states, d, y, out,
                                                             segments, ranges, size);
}

// The scan without the gate: y alone, for a norm. Launch: as thd_ssd_scan.
template <typename T, int kWidth, int kSubs, int kState, int kStages, int kBytes>
__global__ void __launch_bounds__(2 * Slab<kWidth, kSubs, kState>::kThreads, 1) thd_ssd_scan_ungated(
    const T* channels, const float* dt, const float* sums, const float* leave, const float* states, const float* d,
    T* y, Segments segments, const int2* ranges, MixerSize size) {
  scan_rows<T, false, kWidth, kSubs, kState, kStages, kBytes>(channels, nullptr, dt, sums, leave, states, d, y, nullptr,
                                                              segments, ranges, size);
}
