// The recurrence of the Mamba-2 mixer, forward: what segments of rows add to the state, the states in front of them,
// and y with the gate.
//
// A thread block walks down the chunks of a segment with kCols columns of x: one or two heads, or a part of one, which
// read B and C of one group. They are kSubs times kWidth columns, each of one head. Half of the warps of a scan load
// and keep the state in registers, which they pass on from chunk to chunk; the other half makes y, 16 rows of kWidth
// columns a warp.

// ------------------------------------------------------------------------------------------------ the state

template <int kWidthOfSub, int kNumSubs, int kStateDim>
struct Slab {
  static constexpr int kWidth = kWidthOfSub, kSubs = kNumSubs, kState = kStateDim;
  static constexpr int kCols = kWidth * kSubs, kWarps = 4 * kSubs, kThreads = kWarp * kWarps;
  // Warps that keep a state have 32 of its kCols rows each, and kStateCols of its columns.
  static constexpr int kRowTiles = kCols / 32, kStateCols = kState * kRowTiles / kWarps, kBlocks = kStateCols / 8;
  static constexpr int kPitch = kCols + kPad, kStatePitch = kState + kPad;

  // The head of the columns of x of a slab from kWidth * sub on, and where in it they begin.
  static __device__ __forceinline__ int head_of(int slab, int sub, const MixerSize& size) {
    return (slab * kCols + sub * kWidth) / size.head_dim;
  }
};

// The state of a slab in registers, as accumulators: [2][kBlocks][4] of 32 rows and kStateCols columns a warp.
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
          f(row + i * 16 + half * 8 + lane / 4, column + n * 8 + lane % 4 * 2, s[i][n][2 * half], s[i][n][2 * half + 1]);
  }
  __device__ __forceinline__ void clear() {
    each_pair([](int, int, float& x, float& y) { x = y = 0.f; });
  }
  // state: the slab's rows of an array of states, or of one whose rows are kPitch numbers apart.
  __device__ __forceinline__ void load(const float* state) {
    each_pair([&](int p, int n, float& x, float& y) {
      const float2 pair = *(const float2*)(state + p * Slab::kState + n);
      x = pair.x, y = pair.y;
    });
  }
  template <int kPitch, typename Out> __device__ __forceinline__ void store(Out* state) {
    each_pair([&](int p, int n, float& x, float& y) { store_pair(state + p * kPitch + n, x, y); });
  }
  // What a chunk makes of it. leave: dt times what lasts until the end of the chunk, of the rows of this warp's head.
  __device__ __forceinline__ void advance(const T* x, const T* b, const float* leave, float through) {
    scale(s, through);
    #pragma unroll 2
    for (int k = 0; k < kChunk; k += 16) {
      u32 rows[2][1][4];
      #pragma unroll
      for (int i = 0; i < 2; ++i)
        load_weighted_columns<T, Slab::kPitch>(rows[i][0], x + k * Slab::kPitch + row + i * 16, leave + k);
      add_weighted_rows<T, Slab::kStatePitch>(s, rows, b + k * Slab::kStatePitch + column);
    }
  }
};

// What of the state in front of a chunk lasts until its end. last_sum, last: of its last row.
__device__ __forceinline__ float through_chunk(float last_sum, int2 last, int chunk, const MixerSize& size) {
  const int end = chunk * kChunk + kChunk - 1;
  return first_of(last, end, size) < chunk * kChunk ? decay_of(last_sum) : 0.f;
}

// ------------------------------------------------------------------------------------------------ what segments add

template <typename T, typename Slab>
struct StatesStage {
  T x[kChunk * Slab::kPitch], b[kChunk * Slab::kStatePitch];
  float leave[Slab::kSubs][kChunk];
};

// states and decays of every segment, from 0 in front of it. Of a state that no row behind the segment sees, 0 is as
// good; used_behind: whether one behind the last segment may.
template <typename T, int kWidth, int kSubs, int kState, int kStages, int kBytes>
__global__ void __launch_bounds__(Slab<kWidth, kSubs, kState>::kThreads) thd_ssd_states(
    const T* channels, const float* sums, const float* leave, float* states, const int2* ranges, float* decays,
    int used_behind, MixerSize size) {
  using S = Slab<kWidth, kSubs, kState>;
  using Stage = StatesStage<T, S>;
  static_assert(same_bytes<(int)sizeof(Stage) * kStages, kBytes>());
  extern __shared__ __align__(16) unsigned char memory[];
  Stage* const stages = (Stage*)memory;
  const int slab = blockIdx.x, segment = blockIdx.y, head = S::head_of(slab, 0, size), group = size.group_of(head);
  const int begin = segment * size.segment, end = min(begin + size.segment, size.chunks());

  // Rows before `first` do not reach the end of the segment.
  const int last = end * kChunk - 1, next = last + 1;
  const int first = first_of(range_at(ranges, last, size), last, size);
  const bool used = next < size.rows ? first_of(ranges[next], next, size) < next : used_behind;
  const int from = used ? min(max(first, begin * kChunk) / kChunk, end) : end;

  const size_t pitch = size.channels();
  const T *const x = channels + slab * S::kCols, *const b = channels + size.b_column(group);
  auto load = [&](int chunk) {
    if (chunk < end) {
      Stage& stage = stages[(chunk - from) % kStages];
      load_chunk<T, S::kCols, S::kThreads>(stage.x, x, pitch, chunk, size.rows, threadIdx.x);
      load_chunk<T, kState, S::kThreads>(stage.b, b, pitch, chunk, size.rows, threadIdx.x);
      const int sub = threadIdx.x / (kChunk / 4), piece = threadIdx.x % (kChunk / 4) * 4;
      if (sub < kSubs)
        copy_async_16(&stage.leave[sub][piece], leave + size.in_heads(S::head_of(slab, sub, size), chunk) + piece, true);
    }
    copies_commit();
  };

  StateOfSlab<T, S> state(threadIdx.x / kWarp);
  const int own_head = S::head_of(slab, state.sub, size);
  state.clear();
  for (int ahead = 0; ahead < kStages - 1; ++ahead) load(from + ahead);
  for (int chunk = from; chunk < end; ++chunk) {
    copies_wait_but<kStages - 2>();
    __syncthreads();
    load(chunk + kStages - 1);
    const int row = chunk * kChunk + kChunk - 1;
    const float through = through_chunk(sums[size.in_heads(own_head, chunk) + kChunk - 1], range_at(ranges, row, size),
                                        chunk, size);
    const Stage& stage = stages[(chunk - from) % kStages];
    state.advance(stage.x, stage.b, stage.leave[state.sub], through);
  }
  state.template store<kState>(states + size.state_of(segment, 0) + (size_t)slab * S::kCols * kState);

  if (threadIdx.x < kSubs && (slab * S::kCols + (int)threadIdx.x * kWidth) % size.head_dim == 0) {
    const int of = S::head_of(slab, threadIdx.x, size);
    float sum = 0.f;
    for (int chunk = begin; chunk < end; ++chunk) sum += sums[size.in_heads(of, chunk) + kChunk - 1];
    decays[(size_t)segment * size.heads + of] = first < begin * kChunk ? decay_of(sum) : 0.f;
  }
}

// ------------------------------------------------------------------------------------------------ states in front

[[maybe_unused]] constexpr int kFoldThreads = 256, kFoldAhead = 8;

__device__ __forceinline__ float lasting(float decay, float state) { return decay == 0.f ? 0.f : decay * state; }

// Walks over `count` things from `begin` on, `step` apart, with one number of the state: visit(which, its number, its
// decay), loaded some ahead.
template <typename F>
__device__ __forceinline__ void walk(const float* numbers, size_t pitch, const float* decays, size_t decay_pitch,
                                     int begin, int step, int count, F&& visit) {
  for (int done = 0; done < count; done += kFoldAhead) {
    float number[kFoldAhead], decay[kFoldAhead];
    #pragma unroll
    for (int i = 0; i < kFoldAhead; ++i) {
      const int which = begin + step * min(done + i, count - 1);
      number[i] = numbers[which * pitch];
      decay[i] = decays[which * decay_pitch];
    }
    #pragma unroll
    for (int i = 0; i < kFoldAhead; ++i)
      if (done + i < count) visit(begin + step * (done + i), number[i], decay[i]);
  }
}

// What segments add becomes the states in front of them (step -1: behind them), from 0; summary: all segments as one.
// In these kernels a head has `numbers` numbers.
__global__ void __launch_bounds__(kFoldThreads) thd_ssd_fold(
    float* states, const float* decays, float* summary, int begin, int step, int segments, int heads, int numbers) {
  const size_t all = (size_t)heads * numbers, at = (size_t)blockIdx.x * kFoldThreads + threadIdx.x;
  if (at >= all) return;
  const int head = at / numbers;
  float state = 0.f, through = 1.f;
  walk(states + at, all, decays + head, heads, begin, step, segments, [&](int segment, float own, float decay) {
    states[segment * all + at] = state;
    state = lasting(decay, state) + own;
    through *= decay;
  });
  summary[at] = state;
  if (at % numbers == 0) summary[all + head] = through;
}

// The state that ranks leave to this one: theirs, one after another, as far as they last.
__global__ void __launch_bounds__(kFoldThreads) thd_ssd_start(
    const float* summaries, float* start, int begin, int step, int ranks, int heads, int numbers) {
  const size_t all = (size_t)heads * numbers, at = (size_t)blockIdx.x * kFoldThreads + threadIdx.x;
  if (at >= all) return;
  float state = 0.f;
  walk(summaries + at, all + heads, summaries + all + at / numbers, all + heads, begin, step, ranks,
       [&](int, float own, float decay) { state = lasting(decay, state) + own; });
  start[at] = state;
}

// Adds it to the states in front of segments.
__global__ void __launch_bounds__(kFoldThreads) thd_ssd_enter(
    float* states, const float* decays, const float* start, int begin, int step, int segments, int heads, int numbers) {
  const size_t all = (size_t)heads * numbers, at = (size_t)blockIdx.x * kFoldThreads + threadIdx.x;
  if (at >= all) return;
  float state = start[at];
  walk(states + at, all, decays + at / numbers, heads, begin, step, segments,
       [&](int segment, float own, float decay) {
         states[segment * all + at] = own + state;
         state = lasting(decay, state);
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
  T state[Slab::kCols * Slab::kStatePitch];           // in front of the chunk
};

// 16 rows of a chunk, of the columns of one head: what one warp makes y of.
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

  // What comes of the state in front of the chunk.
  __device__ __forceinline__ void start_from(const T* state) {
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) y[0][n][e] = 0.f;
    if (!__any_sync(0xffffffffu, first[0] < 0 || first[1] < 0)) return;
    add_products<T, kState, kBlocks>(y[0], c, state + sub * kWidth * Slab::kStatePitch);
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool enters = first[e / 2] < 0;
      const float decay = decay_of(stage.sums[sub][row[e / 2]]);
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n) y[0][n][e] = enters ? decay * y[0][n][e] : 0.f;
    }
  }

  // What comes of rows j of the chunk, 16 at a time: C_i . B_j times how much of j lasts until i, times dt_j x_j.
  __device__ __forceinline__ void add_rows() {
    const float sums[2] = {stage.sums[sub][row[0]], stage.sums[sub][row[1]]};
    const int from = max(first_in_chunk(band * 16), 0) / 16;
    for (int j = from; j <= band; ++j) {
      float products[2][4] = {};
      add_products<T, kState, 2>(products, c, stage.b + j * 16 * Slab::kStatePitch);
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int col = j * 16 + n * 8 + lane % 4 * 2;
        const float2 to = *(const float2*)&stage.sums[sub][col], dt = *(const float2*)&stage.dt[sub][col];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool counts = first[e / 2] <= col + e % 2 && col + e % 2 <= row[e / 2];
          const float decay = decay_of(sums[e / 2] - (e % 2 ? to.y : to.x));
          products[n][e] = counts ? products[n][e] * decay * (e % 2 ? dt.y : dt.x) : 0.f;
        }
      }
      u32 weights[1][1][4] = {{{pack<T>(products[0][0], products[0][1]), pack<T>(products[0][2], products[0][3]),
                                pack<T>(products[1][0], products[1][1]), pack<T>(products[1][2], products[1][3])}}};
      add_weighted_rows<T, Slab::kPitch>(y, weights, stage.x + j * 16 * Slab::kPitch + sub * kWidth);
    }
  }

  // Adds D x, and writes y and out; z makes room for them, as 16 bytes at a time are written.
  __device__ __forceinline__ void finish(float d, T* z, T* y_out, T* out) {
    u32 gate[kBlocks][2];
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row[half] * Slab::kPitch + sub * kWidth + n * 8 + lane % 4 * 2;
        const float2 x = unpack<T>(*(const u32*)(stage.x + at));
        y[0][n][2 * half] = fmaf(d, x.x, y[0][n][2 * half]);
        y[0][n][2 * half + 1] = fmaf(d, x.y, y[0][n][2 * half + 1]);
        gate[n][half] = *(const u32*)(z + at);
        store_pair(z + at, y[0][n][2 * half], y[0][n][2 * half + 1]);
      }
    write(y_out, z);
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 of = unpack<T>(gate[n][half]);
        const bool valid = first[half] <= row[half];
        store_pair(z + row[half] * Slab::kPitch + sub * kWidth + n * 8 + lane % 4 * 2,
                   valid ? y[0][n][2 * half] * silu(of.x) : 0.f, valid ? y[0][n][2 * half + 1] * silu(of.y) : 0.f);
      }
    write(out, z);
  }
  __device__ __forceinline__ void write(T* into, const T* tile) const {
    constexpr int kPieces = kWidth / 8;
    __syncwarp();
    #pragma unroll
    for (int i = lane; i < 16 * kPieces; i += kWarp) {
      const int at = band * 16 + i / kPieces, col = sub * kWidth + i % kPieces * 8;
      if (chunk * kChunk + at < size.rows)
        *(uint4*)(into + (size_t)at * size.inner() + col) = *(const uint4*)(tile + at * Slab::kPitch + col);
    }
    __syncwarp();
  }
};

// y and out of a segment; states: in front of each.
template <typename T, int kWidth, int kSubs, int kState, int kStages, int kBytes>
__global__ void __launch_bounds__(2 * Slab<kWidth, kSubs, kState>::kThreads, 1) thd_ssd_scan(
    const T* channels, const T* zxbcdt, const float* dt, const float* sums, const float* leave, const float* states,
    const float* d, T* y, T* out, int first_segment, const int2* ranges, MixerSize size) {
  using S = Slab<kWidth, kSubs, kState>;
  using Stage = ScanStage<T, S>;
  using Shared = ScanShared<T, S, kStages>;
  static_assert(same_bytes<(int)sizeof(Shared), kBytes>());
  constexpr int kThreads = 2 * S::kThreads, kLoaded = 1, kStateRead = 2, kRowsMade = 3;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int slab = blockIdx.x, segment = first_segment + blockIdx.y, head = S::head_of(slab, 0, size);
  const int group = size.group_of(head), begin = segment * size.segment;
  const int end = min(begin + size.segment, size.chunks()), warp = threadIdx.x / kWarp % S::kWarps;

  if (threadIdx.x < S::kThreads) {
    const int sub = warp / 4, band = sub % 2 ? 3 - warp % 4 : warp % 4;  // every scheduler has long and short rows
    const float d_of_head = d[S::head_of(slab, sub, size)];
    for (int chunk = begin; chunk < end; ++chunk) {
      wait(kLoaded, kThreads);
      Stage& stage = shared.stages[(chunk - begin) % kStages];
      RowsOfWarp<T, S> rows(stage, band, sub, chunk, size);
      rows.start_from(shared.state);
      if (chunk + 1 < end) arrive(kStateRead, kThreads);
      rows.add_rows();
      const size_t at = (size_t)chunk * kChunk * size.inner() + slab * S::kCols;
      rows.finish(d_of_head, stage.z, y + at, out + at);
      if (kStages == 1 && chunk + 1 < end) arrive(kRowsMade, kThreads);
    }
    return;
  }

  const size_t pitch = size.channels();
  const int thread = threadIdx.x - S::kThreads;
  auto load = [&](int chunk) {
    Stage& stage = shared.stages[(chunk - begin) % kStages];
    load_chunk<T, kState, S::kThreads>(stage.c, channels + size.c_column(group), pitch, chunk, size.rows, thread);
    load_chunk<T, kState, S::kThreads>(stage.b, channels + size.b_column(group), pitch, chunk, size.rows, thread);
    load_chunk<T, S::kCols, S::kThreads>(stage.x, channels + slab * S::kCols, pitch, chunk, size.rows, thread);
    load_chunk<T, S::kCols, S::kThreads>(stage.z, zxbcdt + slab * S::kCols, size.columns(), chunk, size.rows, thread);
    if (thread < kChunk) load_range(&stage.ranges[thread], ranges, chunk * kChunk + thread, size);
    const int of = thread / (kChunk / 4), piece = thread % (kChunk / 4) * 4;
    if (of < kSubs) {
      const size_t at = size.in_heads(S::head_of(slab, of, size), chunk) + piece;
      copy_async_16(&stage.sums[of][piece], sums + at, true);
      copy_async_16(&stage.dt[of][piece], dt + at, true);
      copy_async_16(&stage.leave[of][piece], leave + at, true);
    }
    copies_commit();
  };

  load(begin);
  StateOfSlab<T, S> state(warp);
  const int row = begin * kChunk;
  const bool goes_on = first_of(range_at(ranges, row, size), row, size) < row;  // from the segment before
  if (goes_on) state.load(states + size.state_of(segment, 0) + (size_t)slab * S::kCols * kState);
  if (!goes_on) state.clear();
  state.template store<S::kStatePitch>(shared.state);
  for (int chunk = begin; chunk < end; ++chunk) {
    copies_wait();
    wait(kLoaded, kThreads);
    if (chunk + 1 == end) break;
    if (kStages > 1) load(chunk + 1);
    const Stage& stage = shared.stages[(chunk - begin) % kStages];
    const float through = through_chunk(stage.sums[state.sub][kChunk - 1], stage.ranges[kChunk - 1], chunk, size);
    state.advance(stage.x, stage.b, stage.leave[state.sub], through);
    wait(kStateRead, kThreads);
    state.template store<S::kStatePitch>(shared.state);
    if (kStages == 1) {
      wait(kRowsMade, kThreads);
      load(chunk + 1);
    }
  }
}
