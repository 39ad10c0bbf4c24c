// y and the gate of the Mamba-2 mixer on Hopper (sm_90a) with wgmma and TMA. It computes what thd_ssd_scan does.
//
// States go ahead of the rows. Some warpgroups keep states, and publish the state before each chunk, and the weights of
// its rows for each other. As many others compute y and out from these. One more thread loads chunks ahead. racecheck
// does not follow the mbarriers of Stages, which order every copy and publish before reads, and reads before the next
// one.

#pragma once

#include "kernels/mamba/hopper.cuh"

template <int kSubs>
struct NumbersOfRows { float sums[kSubs][kChunk], dt[kSubs][kChunk], leave[kSubs][kChunk]; };

template <int kNumSubs, int kStateDim, int kNumStages>
struct ScanShared {
  static constexpr int kSubs = kNumSubs, kState = kStateDim, kStages = kNumStages;
  unsigned char x[kStages][kSubs][kBox], z[kStages][kSubs][kBox];
  unsigned char b[kStages][kState / kSlab][kBox], c[kStages][kState / kSlab][kBox];
  unsigned char fronts[kSubs][2][kState / kSlab][kBox];  // the state before a chunk and the next one, rounded
  unsigned char weights[kSubs][kBox];                 // of rows of x in rows of y
  unsigned char made[kSubs][4][8 * kRowBytes];        // rows of y and out on their way to memory
  float inverse[kSubs][2][4];                         // of fronts
  NumbersOfRows<kSubs> numbers[kStages];
  Stages<kStages, 1, 8 * kSubs> stages;
  Stages<2, 4, 4> published[kSubs];
  Stages<1, 4, 4> weighed[kSubs];
};

// Loads rows, as boxes, and the numbers of every row, with one thread.
struct ScanInputs { const float *dt, *sums, *leave; };
template <bool kGates, typename Shared>
__device__ __forceinline__ void load_rows(Shared& shared, const TensorMap* channels, const TensorMap* gates,
                                          const ScanInputs& inputs, int slab, const Run& run, const MixerSize& size) {
  constexpr int kSubs = Shared::kSubs, kState = Shared::kState;
  const int group = size.group_of(slab * kSlab / size.head_dim);
  Ring<Shared::kStages> ring{};
  for (int chunk = run.begin; chunk < run.end; ++chunk, ring.advance()) {
    const u32 at = ring.stage;
    u64* const full = &shared.stages.full[at];
    NumbersOfRows<kSubs>& numbers = shared.numbers[at];
    shared.stages.fill(ring, ((1 + kGates) * kSubs + 2 * (kState / kSlab)) * kBox + (int)sizeof(numbers));
    copy_columns<kState>(shared.c[at][0], channels, size.c_column(group), chunk, full);
    copy_columns<kState>(shared.b[at][0], channels, size.b_column(group), chunk, full);
    for (int i = 0; i < kSubs; ++i) {
      const size_t from = size.in_heads((slab + i) * kSlab / size.head_dim, chunk);
      copy_box_once(shared.x[at][i], channels, 0, slab + i, chunk * kChunk, full);
      if constexpr (kGates) copy_box_once(shared.z[at][i], gates, 0, slab + i, chunk * kChunk, full);
      copy_bulk(numbers.sums[i], inputs.sums + from, 4 * kChunk, full);
      copy_bulk(numbers.dt[i], inputs.dt + from, 4 * kChunk, full);
      copy_bulk(numbers.leave[i], inputs.leave + from, 4 * kChunk, full);
    }
  }
}

// 16 rows of a chunk, of the columns of one head: a warp computes their y, as accumulators. number: which of the
// chunk's bands.
struct Band {
  int number, lane;
  int row[2], first[2];                               // of this thread, as rows of the chunk, and first of each as such
  int2 next[2];                                       // ranges of the rows of the next chunk

  __device__ __forceinline__ explicit Band(int number) : number(number), lane(threadIdx.x % kWarp) {
    row[0] = number * 16 + lane / 4, row[1] = row[0] + 8;
  }
  __device__ __forceinline__ void load(int chunk, const int2* ranges, const MixerSize& size) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) next[half] = range_at(ranges, chunk * kChunk + row[half], size);
  }
  __device__ __forceinline__ void take(int chunk, const MixerSize& size) {
    #pragma unroll
    for (int half = 0; half < 2; ++half)
      first[half] = first_of(next[half], chunk * kChunk + row[half], size) - chunk * kChunk;
  }
};

// Turns C_i . B_j, for rows i of a band and all rows j of the chunk, into the weight of x_j in y_i: times the decay
// from j to i, and dt_j. It stores them in a tile, as an operand.
template <typename T>
__device__ __forceinline__ void weigh(unsigned char* tile, float (&products)[8][4], const Band& band,
                                      const float* sums, const float* dt) {
  const float of_row[2] = {sums[band.row[0]], sums[band.row[1]]};
  const bool from_start = __all_sync(0xffffffffu, band.first[0] <= 0 && band.first[1] <= 0);
  #pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 made[4] = {};
    #pragma unroll
    for (int n = 2 * k; n < 2 * k + 2; ++n) {
      if (k > band.number) break;                     // behind all rows of this band
      const int col = n * 8 + band.lane % 4 * 2;
      float (&of)[4] = products[n];
      const float2 to = *(const float2*)(sums + col), step = *(const float2*)(dt + col);
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        of[e] *= decay_of(of_row[e / 2] - (e % 2 ? to.y : to.x)) * (e % 2 ? step.y : step.x);
        if (k == band.number) of[e] = col + e % 2 <= band.row[e / 2] ? of[e] : 0.f;
        if (!from_start) of[e] = band.first[e / 2] <= col + e % 2 ? of[e] : 0.f;
      }
      made[n % 2 * 2] = pack<T>(of[0], of[1]);
      made[n % 2 * 2 + 1] = pack<T>(of[2], of[3]);
    }
    const auto [warp, lane] = me();
    store_matrices(tile + (warp * 16 + lane % 16) * kRowBytes + ((2 * k + lane / 16) ^ lane % 8) * 16, made);
  }
}

// Computes the weights of the rows of a chunk for each other, with one warpgroup.
template <typename T, typename Shared>
__device__ __forceinline__ void publish_weights(Shared& shared, int sub, int stage, const Ring<1>& ring,
                                                const Band& band) {
  const NumbersOfRows<Shared::kSubs>& numbers = shared.numbers[stage];
  ScoreRows<T, Shared::kState, kChunk, false> c;
  float products[8][4];
  c.load(shared.c[stage][0]);
  wgmma_begin();
  c.template start<false, kChunk>(products, shared.b[stage][0]);
  wgmma_commit();
  wgmma_wait<0>(products);
  shared.weighed[sub].wait_empty(ring);
  weigh<T>(shared.weights[sub], products, band, numbers.sums[sub], numbers.dt[sub]);
  publish_to_async();
  shared.weighed[sub].filled(ring);
}

// Keeps the state of a head with one warpgroup: it publishes the state before every chunk, and the weights of its rows.
template <typename T, typename Shared>
__device__ __forceinline__ void keep_state(Shared& shared, int sub, int column, const float* states, const int2* ranges,
                                           const Run& run, const MixerSize& size) {
  constexpr int kState = Shared::kState;
  const int row = run.begin * kChunk;
  StateOfHead<T, kState> state;
  if (first_of(range_at(ranges, row, size), row, size) < row)  // the sequence goes on from the segment before
    state.load(states + size.state_of(run.segment, 0) + (size_t)column * kState);
  else
    state.clear();
  Band band(me().warp);
  band.load(run.begin, ranges, size);
  Ring<Shared::kStages> ring{};
  Ring<2> front{};
  Ring<1> weights{};
  for (int chunk = run.begin; chunk < run.end; ++chunk, ring.advance(), front.advance(), weights.advance()) {
    const int2 last = range_at(ranges, chunk * kChunk + kChunk - 1, size);
    band.take(chunk, size);
    shared.published[sub].wait_empty(front);
    state.publish(shared.fronts[sub][front.stage][0], shared.inverse[sub][front.stage]);
    shared.published[sub].filled(front);
    shared.stages.wait(ring);
    publish_weights<T>(shared, sub, ring.stage, weights, band);
    if (chunk + 1 < run.end) band.load(chunk + 1, ranges, size);
    const NumbersOfRows<Shared::kSubs>& numbers = shared.numbers[ring.stage];
    state.advance(shared.x[ring.stage][sub], shared.b[ring.stage][0], numbers.leave[sub],
                  through_chunk(numbers.sums[sub][kChunk - 1], last, chunk, size));
    shared.stages.release(ring);
  }
}

// Scales the term of the state before the chunk, C times the state.
template <typename T>
__device__ __forceinline__ void let_enter(float (&acc)[8][4], const Band& band, const float* sums,
                                          const float* inverse) {
  if constexpr (kScalesStates<T>) {
    #pragma unroll
    for (int n = 0; n < 8; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) acc[n][e] *= inverse[n / 2];
  }
  const float decay[2] = {decay_of(sums[band.row[0]]), decay_of(sums[band.row[1]])};
  #pragma unroll
  for (int n = 0; n < 8; ++n)
    #pragma unroll
    for (int e = 0; e < 4; ++e) acc[n][e] *= decay[e / 2];
  if (__all_sync(0xffffffffu, band.first[0] < 0 && band.first[1] < 0)) return;
  #pragma unroll
  for (int n = 0; n < 8; ++n)
    #pragma unroll
    for (int e = 0; e < 4; ++e) acc[n][e] = band.first[e / 2] < 0 ? acc[n][e] : 0.f;
}

// Loads this thread's numbers of a band of a box, in the layout of accumulators.
__device__ __forceinline__ void load_pairs(u32 (&pairs)[4][4], const unsigned char* box, const Band& band) {
  const unsigned char* const row = box + (band.number * 16 + band.lane % 16) * kRowBytes;
  #pragma unroll
  for (int i = 0; i < 4; ++i) load_matrices(pairs[i], row + ((2 * i + band.lane / 16) ^ band.lane % 8) * 16);
}

template <typename T>
__device__ __forceinline__ void add_times(float (&acc)[8][4], const u32 (&of_x)[4][4], float d) {
  #pragma unroll
  for (int n = 0; n < 8; ++n)
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 x = unpack<T>(of_x[n / 2][n % 2 * 2 + half]);
      acc[n][2 * half] = fmaf(d, x.x, acc[n][2 * half]);
      acc[n][2 * half + 1] = fmaf(d, x.y, acc[n][2 * half + 1]);
    }
}

// Multiplies by silu(z), which is 0 on padding.
template <typename T>
__device__ __forceinline__ void pass_gate(float (&acc)[8][4], const u32 (&of_z)[4][4], const Band& band) {
  #pragma unroll
  for (int n = 0; n < 8; ++n)
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 z = unpack<T>(band.first[half] <= band.row[half] ? of_z[n / 2][n % 2 * 2 + half] : 0);
      acc[n][2 * half] *= silu(z.x);
      acc[n][2 * half + 1] *= silu(z.y);
    }
}

// Stores without the branch that compilers would make.
__device__ __forceinline__ void store_if(bool exists, void* to, uint4 vector) {
  asm volatile("{ .reg .pred exists; setp.ne.s32 exists, %5, 0;\n"
               "@exists st.global.cs.v4.b32 [%0], {%1, %2, %3, %4}; }"
               :: "l"(to), "r"(vector.x), "r"(vector.y), "r"(vector.z), "r"(vector.w), "r"((int)exists) : "memory");
}

// Writes a band to the rows from `into` on, of which `left` exist, through 8 rows of shared memory, so that whole rows
// of 128 bytes are written. The L2 cache need not keep them.
template <typename T>
__device__ __forceinline__ void write_band(T* into, const float (&acc)[8][4], unsigned char* tile, int left,
                                           int pitch) {
  const int lane = me().lane;
  into += (size_t)(lane / 8) * pitch + lane % 8 * 8;
  left -= lane / 8;
  #pragma unroll
  for (int half = 0; half < 2; ++half) {
    #pragma unroll
    for (int n = 0; n < 8; n += 4) {
      u32 a[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = pack<T>(acc[n + i][2 * half], acc[n + i][2 * half + 1]);
      store_matrices(tile + lane % 8 * kRowBytes + ((n + lane / 8) ^ lane % 8) * 16, a);
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < 2; ++i, into += 4 * pitch) {
      const int in_tile = i * 4 + lane / 8;
      const uint4 vector = *(const uint4*)(tile + in_tile * kRowBytes + (lane ^ in_tile) % 8 * 16);
      store_if(half * 8 + i * 4 < left, into, vector);
    }
    __syncwarp();
  }
}

// Addresses of y and out.
template <typename T> struct ScanResults { T *y, *out; };

// Starts acc += weights . x, both in shared memory.
template <typename T>
__device__ __forceinline__ void add_weighed_rows(float (&acc)[8][4], const unsigned char* weights,
                                                 const unsigned char* x) {
  const u64 a = descriptor(weights, 16), b = descriptor(x, kBox);
  #pragma unroll
  for (int k = 0; k < 4; ++k)
    Wgmma<T, kSlab>::template shared<0, 1>(acc, a + k * 32 / 16, b + k * 16 * kRowBytes / 16, 1);
}

// Computes y and, if it gates, out of the columns of one head with one warpgroup. Both are 0 on padding, where x and
// the value used for z are.
template <typename T, bool kGates, typename Shared>
__device__ __forceinline__ void make_rows(Shared& shared, int sub, int column, float d, const int2* ranges,
                                          const ScanResults<T>& results, const Run& run, const MixerSize& size) {
  constexpr int kState = Shared::kState;
  Band band(me().warp);
  unsigned char* const made = shared.made[sub][band.number];
  band.load(run.begin, ranges, size);
  Ring<Shared::kStages> ring{};
  Ring<2> front{};
  Ring<1> weights{};
  for (int chunk = run.begin; chunk < run.end; ++chunk, ring.advance(), front.advance(), weights.advance()) {
    band.take(chunk, size);
    if (chunk + 1 < run.end) band.load(chunk + 1, ranges, size);
    shared.stages.wait(ring);
    const unsigned char *const x = shared.x[ring.stage][sub], *const z = shared.z[ring.stage][sub];
    ScoreRows<T, kState, kChunk, false> c;
    float acc[8][4];
    u32 of_x[4][4], of_z[4][4];
    c.load(shared.c[ring.stage][0]);
    shared.published[sub].wait(front);
    wgmma_begin();
    c.template start<false, kChunk>(acc, shared.fronts[sub][front.stage][0]);
    wgmma_commit();
    wgmma_wait<0>(acc);
    let_enter<T>(acc, band, shared.numbers[ring.stage].sums[sub], shared.inverse[sub][front.stage]);
    shared.published[sub].release(front);
    shared.weighed[sub].wait(weights);
    pin(acc);
    wgmma_begin();
    add_weighed_rows<T>(acc, shared.weights[sub], x);
    wgmma_commit();
    load_pairs(of_x, x, band);
    if constexpr (kGates) load_pairs(of_z, z, band);
    wgmma_wait<0>(acc);
    shared.weighed[sub].release(weights);
    shared.stages.release(ring);

    const int row = chunk * kChunk + band.number * 16;
    const size_t at = (size_t)row * size.inner() + column;
    add_times<T>(acc, of_x, d);
    write_band<T>(results.y + at, acc, made, size.rows - row, size.inner());
    if constexpr (!kGates) continue;
    pass_gate<T>(acc, of_z, band);
    write_band<T>(results.out + at, acc, made, size.rows - row, size.inner());
  }
}

// The work of a thread block: warpgroups that compute rows, as many that keep states, and one that loads.
template <typename T, bool kGates, int kSubs, int kState, int kStages, int kSharedBytes>
__device__ __forceinline__ void scan_rows(const TensorMap* channels, const TensorMap* gates, const ScanInputs& inputs,
                                          const float* states, const float* d, const ScanResults<T>& results,
                                          const Segments& segments, const int2* ranges, const MixerSize& size) {
  using Shared = ScanShared<kSubs, kState, kStages>;
  static_assert(same_bytes<(int)sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), slab = blockIdx.x * kSubs;
  const int column = (slab + role % kSubs) * kSlab;   // of this warpgroup
  const Run run(segments, size);
  if (threadIdx.x == 0) {
    shared.stages.init();
    for (int sub = 0; sub < kSubs; ++sub) shared.published[sub].init(), shared.weighed[sub].init();
  }
  __syncthreads();
  if (role == 2 * kSubs) {
    if constexpr (kSubs > 1) registers_give<24>();
    if (threadIdx.x % 128 == 0) load_rows<kGates>(shared, channels, gates, inputs, slab, run, size);
  } else if (role >= kSubs) {
    if constexpr (kSubs > 1) registers_take<128>();
    keep_state<T>(shared, role - kSubs, column, states, ranges, run, size);
  } else {
    if constexpr (kSubs > 1) registers_take<96>();
    make_rows<T, kGates>(shared, role, column, d[column / size.head_dim], ranges, results, run, size);
  }
}

// Computes what thd_ssd_scan does, from the same arguments, but rows come as boxes.
// Launch: grid as thd_ssd_scan's with 64 * kSubs columns, block 256 * kSubs + 128, shared memory kSharedBytes.
template <typename T, int kSubs, int kState, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(256 * kSubs + 128, 1) thd_ssd_scan_sm90(
    const __grid_constant__ TensorMap channels, const __grid_constant__ TensorMap gates, const float* dt,
    const float* sums, const float* leave, const float* states, const float* d, T* y, T* out, Segments segments,
    const int2* ranges, MixerSize size) {
  scan_rows<T, true, kSubs, kState, kStages, kSharedBytes>(&channels, &gates, {dt, sums, leave}, states, d, {y, out},
                                                           segments, ranges, size);
}

// The scan without the gate: y alone, for a norm. Launch: as thd_ssd_scan_sm90.
template <typename T, int kSubs, int kState, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(256 * kSubs + 128, 1) thd_ssd_scan_ungated_sm90(
    const __grid_constant__ TensorMap channels, const float* dt, const float* sums, const float* leave,
    const float* states, const float* d, T* y, Segments segments, const int2* ranges, MixerSize size) {
  scan_rows<T, false, kSubs, kState, kStages, kSharedBytes>(&channels, nullptr, {dt, sums, leave}, states, d,
                                                            {y, nullptr}, segments, ranges, size);
}
