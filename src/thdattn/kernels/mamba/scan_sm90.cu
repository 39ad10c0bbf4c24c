// The recurrence of the Mamba-2 mixer on Hopper (sm_90a), by wgmma and TMA: what thd_ssd_states and thd_ssd_scan
// compute, see there.
//
// Each warpgroup has 64 columns of x, of one head, with their states, 64 x kState in registers; those of a thread block
// read B and C of one group. One more warp loads chunks ahead, all rows as boxes of 64 columns, by maps of `channels`
// and of the columns z of zxbcdt.

[[maybe_unused]] constexpr int kBox = kSlab * kChunk * 2;  // bytes

// What a warpgroup's state becomes by a chunk: `weights`, prepared, are columns of x times what lasts of each row.
template <typename T, int kState>
struct StateOfHead {
  static constexpr int kBlocks = kState / 8;
  float s[1][kBlocks][4];

  // Columns 16 * warp and the next of x as rows of an operand; leave: dt times what lasts until the end of the chunk.
  static __device__ __forceinline__ void prepare(u32 (&weights)[1][4][4], const unsigned char* x, const float* leave) {
    const auto [warp, lane] = me();
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = k * 16 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
      ldmatrix_transposed(weights[0][k], x + row * kRowBytes + (piece ^ lane % 8) * 16);
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 weight = *(const float2*)(leave + k * 16 + i / 2 * 8 + lane % 4 * 2);
        const float2 value = unpack<T>(weights[0][k][i]);
        weights[0][k][i] = pack<T>(value.x * weight.x, value.y * weight.y);
      }
    }
  }
  __device__ __forceinline__ void start(const u32 (&weights)[1][4][4], const unsigned char* b) {
    start_weighted_rows<T, kState, kChunk>(s[0], weights, b);
  }
  // The two numbers of block n and of row 16 * warp + lane / 4 + 8 * half, in an array of states of these 64 columns.
  static __device__ __forceinline__ int place(int n, int half) {
    const auto [warp, lane] = me();
    return (warp * 16 + half * 8 + lane / 4) * kState + n * 8 + lane % 4 * 2;
  }
  __device__ __forceinline__ void load(const float* state) {
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = *(const float2*)(state + place(n, half));
        s[0][n][2 * half] = pair.x, s[0][n][2 * half + 1] = pair.y;
      }
  }
  __device__ __forceinline__ void clear() {
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] = 0.f;
  }
  __device__ __forceinline__ void store(float* state) const {
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half)
        store_pair(state + place(n, half), s[0][n][2 * half], s[0][n][2 * half + 1]);
  }
  // Rounded, as a tile of 64 rows; inverse: what each 16 rows of it are to be multiplied with.
  __device__ __forceinline__ void publish(unsigned char* tile, float* inverse) const {
    const auto [warp, lane] = me();
    unsigned char* const row = tile + (warp * 16 + lane % 16) * kRowBytes;
    PowerOfTwo scale = {1.f, 1.f};
    if constexpr (kScalesStates<T>) {
      scale = scale_of(largest_of_warp(s));
      inverse[warp] = scale.inverse;
    }
    #pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      u32 a[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &s[0][n + i / 2][i % 2 * 2];
        a[i] = pack<T>(pair[0] * scale.factor, pair[1] * scale.factor);
      }
      store_matrices(row + n / 8 * kBox + ((n % 8 + lane / 16) ^ lane % 8) * 16, a);
    }
    publish_to_async();
  }
};

// Boxes of B or of C of a group, or of x: all are columns of `channels`.
template <int kCols>
__device__ __forceinline__ void copy_columns(unsigned char* tile, const TensorMap* channels, int column, int chunk,
                                             u64* barrier) {
  #pragma unroll
  for (int i = 0; i < kCols / kSlab; ++i)
    copy_box(tile + i * kBox, channels, 0, column / kSlab + i, chunk * kChunk, barrier);
}

// The same barrier of another thread block of the cluster.
__device__ __forceinline__ void arrive_in_cluster(u64* barrier, int block) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
               :: "r"(shared_address(barrier)), "r"(block) : "memory");
}
__device__ __forceinline__ int block_in_cluster() {
  u32 block;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
  return block;
}
// All threads of the cluster wait for each other.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Copies a box to the same place of every thread block of a cluster, whose barriers all count it.
template <int kCluster>
__device__ __forceinline__ void copy_box_to_all(void* dst, const TensorMap* map, int column, int head, int row,
                                                u64* barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4}], [%5], %6;"
               :: "r"(shared_address(dst)), "l"(map), "r"(column), "r"(head), "r"(row), "r"(shared_address(barrier)),
                  "h"((unsigned short)((1 << kCluster) - 1)) : "memory");
}

// Stages that are filled by one thread's bulk copies or by kWriters warps, and emptied by kReaders warps of each thread
// block of a cluster.
template <int kStages, int kWriters, int kReaders, int kCluster = 1>
struct Stages {
  u64 full[kStages], empty[kStages];

  __device__ __forceinline__ void init() {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&full[stage], kWriters);
      barrier_init(&empty[stage], kReaders * kCluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void wait_empty(const Ring<kStages>& ring) {
    barrier_wait(&empty[ring.stage], ring.parity ^ 1);
  }
  __device__ __forceinline__ void fill(const Ring<kStages>& ring, int bytes) {
    wait_empty(ring);
    barrier_expect(&full[ring.stage], bytes);
  }
  __device__ __forceinline__ void filled(const Ring<kStages>& ring) { arrive_warp(&full[ring.stage]); }
  __device__ __forceinline__ void wait(const Ring<kStages>& ring) { barrier_wait(&full[ring.stage], ring.parity); }
  __device__ __forceinline__ void release(const Ring<kStages>& ring) {
    if constexpr (kCluster == 1) arrive_warp(&empty[ring.stage]);
    else {
      __syncwarp();
      if (const int block = threadIdx.x % kWarp; block < kCluster) arrive_in_cluster(&empty[ring.stage], block);
    }
  }

  static __device__ __forceinline__ void arrive_warp(u64* barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
  }
};

// ------------------------------------------------------------------------------------------------ what segments add

template <int kSubs, int kState, int kStages>
struct StatesShared {
  unsigned char x[kStages][kSubs][kBox], b[kStages][kState / kSlab][kBox];
  float leave[kStages][kSubs][kChunk], sums[kStages][kSubs][kChunk];
  Stages<kStages, 1, 4 * kSubs> stages;
};

// What thd_ssd_states makes, of the same arguments. One of the threads loads, as a warp of its own would leave room for
// one thread block at a time.
// Launch: grid (inner / (64 * kSubs), segments), block 128 * kSubs, shared memory kSharedBytes.
template <typename T, int kSubs, int kState, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(128 * kSubs, 2) thd_ssd_states_sm90(
    const __grid_constant__ TensorMap channels, const float* sums, const float* leave, float* states,
    const int2* ranges, float* decays, int used_behind, MixerSize size) {
  using Shared = StatesShared<kSubs, kState, kStages>;
  static_assert(same_bytes<(int)sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int slab = blockIdx.x * kSubs, sub = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int group = size.group_of(slab * kSlab / size.head_dim);
  const Segment segment(blockIdx.y, ranges, used_behind, size);
  Ring<kStages> ring{}, to_fill{};
  auto load = [&](int chunk) {
    if (threadIdx.x || chunk >= segment.end) return;
    const u32 at = to_fill.stage;
    u64* const full = &shared.stages.full[at];
    shared.stages.fill(to_fill, (kSubs + kState / kSlab) * kBox + kSubs * 2 * 4 * kChunk);
    copy_columns<kSlab * kSubs>(shared.x[at][0], &channels, slab * kSlab, chunk, full);
    copy_columns<kState>(shared.b[at][0], &channels, size.b_column(group), chunk, full);
    for (int i = 0; i < kSubs; ++i) {
      const size_t from = size.in_heads((slab + i) * kSlab / size.head_dim, chunk);
      copy_bulk(shared.leave[at][i], leave + from, 4 * kChunk, full);
      copy_bulk(shared.sums[at][i], sums + from, 4 * kChunk, full);
    }
    to_fill.advance();
  };

  if (threadIdx.x == 0) shared.stages.init();
  for (int i = 0; i + 1 < kStages; ++i) load(segment.from + i);
  const int column = (slab + sub) * kSlab;
  if (threadIdx.x % 128 == kWarp && column % size.head_dim == 0)
    segment.write_decay(decays, sums, column / size.head_dim, size);
  __syncthreads();

  StateOfHead<T, kState> state;
  state.clear();
  for (int chunk = segment.from; chunk < segment.end; ++chunk, ring.advance()) {
    load(chunk + kStages - 1);
    __syncwarp();
    shared.stages.wait(ring);
    u32 weights[1][4][4];
    state.prepare(weights, shared.x[ring.stage][sub], shared.leave[ring.stage][sub]);
    // Behind the first of these chunks all rows are of one sequence.
    scale(state.s, chunk > segment.from ? decay_of(shared.sums[ring.stage][sub][kChunk - 1]) : 0.f);
    pin(state.s[0]);
    wgmma_begin();
    state.start(weights, shared.b[ring.stage][0]);
    wgmma_commit();
    wgmma_wait<0>(state.s[0]);
    shared.stages.release(ring);
  }
  state.store(states + size.state_of(segment.number, 0) + (size_t)column * kState);
}

// ------------------------------------------------------------------------------------------------ y and the gate

template <int kSubs>
struct NumbersOfRows { float sums[kSubs][kChunk], dt[kSubs][kChunk], leave[kSubs][kChunk]; };

template <int kBlocks, int kNumSubs, int kStateDim, int kNumStages>
struct ScanShared {
  static constexpr int kCluster = kBlocks, kSubs = kNumSubs, kState = kStateDim, kStages = kNumStages;
  unsigned char x[kStages][kSubs][kBox], z[kStages][kSubs][kBox];
  unsigned char bc[kStages][2][kState / kSlab][kBox]; // B and C
  unsigned char fronts[kSubs][2][kState / kSlab][kBox];  // the state in front of a chunk and of the next one, rounded
  unsigned char made[kSubs][kBox];                    // rows of y, and of out, on their way to memory
  float inverse[kSubs][2][4];                         // of fronts
  NumbersOfRows<kSubs> numbers[kStages];
  Stages<kStages, 1, 8 * kSubs, kCluster> stages;
  Stages<2, 4, 4> published[kSubs];
};

// One thread loads rows, which are boxes, and numbers of every row.
struct ScanInputs { const float *dt, *sums, *leave; };
template <typename Shared>
__device__ __forceinline__ void load_rows(Shared& shared, const TensorMap* channels, const TensorMap* gates,
                                          const ScanInputs& inputs, int slab, const Run& run, const MixerSize& size) {
  constexpr int kSubs = Shared::kSubs, kState = Shared::kState;
  const int group = size.group_of(slab * kSlab / size.head_dim);
  Ring<Shared::kStages> ring{};
  for (int chunk = run.begin; chunk < run.end; ++chunk, ring.advance()) {
    const u32 at = ring.stage;
    u64* const full = &shared.stages.full[at];
    NumbersOfRows<kSubs>& numbers = shared.numbers[at];
    shared.stages.fill(ring, 2 * (kSubs + kState / kSlab) * kBox + (int)sizeof(numbers));
    for (int i = block_in_cluster(); i < 2 * kState / kSlab; i += Shared::kCluster) {  // each loads a part for all
      const int column = i < kState / kSlab ? size.b_column(group) : size.c_column(group) - kState;
      copy_box_to_all<Shared::kCluster>(shared.bc[at][0][i], channels, 0, column / kSlab + i, chunk * kChunk, full);
    }
    for (int i = 0; i < kSubs; ++i) {
      const size_t from = size.in_heads((slab + i) * kSlab / size.head_dim, chunk);
      copy_box_once(shared.x[at][i], channels, 0, slab + i, chunk * kChunk, full);
      copy_box_once(shared.z[at][i], gates, 0, slab + i, chunk * kChunk, full);
      copy_bulk(numbers.sums[i], inputs.sums + from, 4 * kChunk, full);
      copy_bulk(numbers.dt[i], inputs.dt + from, 4 * kChunk, full);
      copy_bulk(numbers.leave[i], inputs.leave + from, 4 * kChunk, full);
    }
  }
}

// A warpgroup keeps the state of a head, and publishes what is in front of every chunk.
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
  Ring<Shared::kStages> ring{};
  Ring<2> front{};
  for (int chunk = run.begin;; ++chunk, ring.advance(), front.advance()) {
    const int2 last = range_at(ranges, chunk * kChunk + kChunk - 1, size);
    shared.published[sub].wait_empty(front);
    state.publish(shared.fronts[sub][front.stage][0], shared.inverse[sub][front.stage]);
    shared.published[sub].filled(front);
    if (chunk + 1 == run.end) break;
    shared.stages.wait(ring);
    const NumbersOfRows<Shared::kSubs>& numbers = shared.numbers[ring.stage];
    u32 leaving[1][4][4];
    state.prepare(leaving, shared.x[ring.stage][sub], numbers.leave[sub]);
    scale(state.s, through_chunk(numbers.sums[sub][kChunk - 1], last, chunk, size));
    pin(state.s[0]);
    wgmma_begin();
    state.start(leaving, shared.bc[ring.stage][0][0]);
    wgmma_commit();
    wgmma_wait<0>(state.s[0]);
    shared.stages.release(ring);
  }
}

// 16 rows of a chunk, of the columns of one head: what a warp makes y of, as accumulators. `band` says which.
struct Band {
  int number, lane;
  int row[2], first[2];                               // of this thread, as rows of the chunk, and first of each as such
  int2 next[2];                                       // ranges of the rows of the chunk to come

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

// C_i . B_j, of rows i of a band and all rows j of the chunk, becomes the weight of x_j in y_i: times what lasts of j
// until i, and dt_j.
template <typename T>
__device__ __forceinline__ void weigh(u32 (&weights)[1][4][4], float (&products)[1][8][4], const Band& band,
                                      const float* sums, const float* dt) {
  const float of_row[2] = {sums[band.row[0]], sums[band.row[1]]};
  const bool from_start = __all_sync(0xffffffffu, band.first[0] <= 0 && band.first[1] <= 0);
  #pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int col = n * 8 + band.lane % 4 * 2;
    float (&of)[4] = products[0][n];
    if (n / 2 > band.number) {                        // behind all rows of this band
      of[0] = of[1] = of[2] = of[3] = 0.f;
      continue;
    }
    const float2 to = *(const float2*)(sums + col), step = *(const float2*)(dt + col);
    #pragma unroll
    for (int e = 0; e < 4; ++e) of[e] *= decay_of(of_row[e / 2] - (e % 2 ? to.y : to.x)) * (e % 2 ? step.y : step.x);
    if (from_start && n / 2 < band.number) continue;
    #pragma unroll
    for (int e = 0; e < 4; ++e)
      of[e] = band.first[e / 2] <= col + e % 2 && col + e % 2 <= band.row[e / 2] ? of[e] : 0.f;
  }
  round_to_operand<T>(weights, products);
}

// What comes of the state in front, of C times it.
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

// This thread's numbers of a band of a box.
__device__ __forceinline__ void load_pairs(u32 (&pairs)[8][2], const unsigned char* box, const Band& band) {
  #pragma unroll
  for (int n = 0; n < 8; ++n)
    #pragma unroll
    for (int half = 0; half < 2; ++half)
      pairs[n][half] = *(const u32*)(box + band.row[half] * kRowBytes + (n ^ band.lane / 4) * 16 + band.lane % 4 * 4);
}

// Writes a band to the rows that are at `into`, of which `left` exist, through 16 rows of shared memory, so that whole
// rows of 128 bytes are written at a time. The L2 cache need not keep them.
template <typename T>
__device__ __forceinline__ void write_band(T* into, const float (&acc)[8][4], unsigned char* tile, int left, int pitch) {
  const int lane = threadIdx.x % kWarp;
  u32 rounded[1][4][4];
  round_to_operand<T>(rounded, (const float(&)[1][8][4])acc);
  #pragma unroll
  for (int i = 0; i < 4; ++i)
    store_matrices(tile + lane % 16 * kRowBytes + ((2 * i + lane / 16) ^ lane % 8) * 16, rounded[0][i]);
  __syncwarp();
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8;
    const uint4 piece = *(const uint4*)(tile + row * kRowBytes + (lane ^ row) % 8 * 16);
    if (row < left) __stcs((uint4*)(into + (size_t)row * pitch + lane % 8 * 8), piece);
  }
  __syncwarp();
}

// Where y and out are.
template <typename T> struct ScanResults { T *y, *out; };

// A warpgroup makes y and out of the columns of one head; both are 0 on padding, where x and what stands for z are.
template <typename T, typename Shared>
__device__ __forceinline__ void make_rows(Shared& shared, int sub, int column, float d, const int2* ranges,
                                          const ScanResults<T>& results, const Run& run, const MixerSize& size) {
  constexpr int kState = Shared::kState;
  Band band(me().warp);
  unsigned char* const made = shared.made[sub] + band.number * 16 * kRowBytes;
  band.load(run.begin, ranges, size);
  Ring<Shared::kStages> ring{};
  Ring<2> front{};
  for (int chunk = run.begin; chunk < run.end; ++chunk, ring.advance(), front.advance()) {
    band.take(chunk, size);
    if (chunk + 1 < run.end) band.load(chunk + 1, ranges, size);
    shared.stages.wait(ring);
    const unsigned char *const x = shared.x[ring.stage][sub], *const z = shared.z[ring.stage][sub];
    const float *const sums = shared.numbers[ring.stage].sums[sub], *const dt = shared.numbers[ring.stage].dt[sub];

    ScoreRows<T, kState, kChunk, false> c;
    float products[1][8][4], acc[8][4];
    u32 weights[1][4][4], of_x[8][2], of_z[8][2];
    c.load(shared.bc[ring.stage][1][0]);
    wgmma_begin();
    c.template start<false, kChunk>(products[0], shared.bc[ring.stage][0][0]);
    wgmma_commit();
    shared.published[sub].wait(front);
    c.template start<false, kChunk>(acc, shared.fronts[sub][front.stage][0]);
    wgmma_commit();
    wgmma_wait<1>(products[0]);
    weigh<T>(weights, products, band, sums, dt);
    wgmma_wait<0>(acc);
    let_enter<T>(acc, band, sums, shared.inverse[sub][front.stage]);
    shared.published[sub].release(front);
    pin(acc);
    wgmma_begin();
    start_weighted_rows<T, kSlab, kChunk>(acc, weights, x);
    wgmma_commit();
    load_pairs(of_x, x, band);
    load_pairs(of_z, z, band);
    wgmma_wait<0>(acc);
    shared.stages.release(ring);

    const int row = chunk * kChunk + band.number * 16;
    const size_t at = (size_t)row * size.inner() + column;
    #pragma unroll
    for (int n = 0; n < 8; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 value = unpack<T>(of_x[n][half]);
        acc[n][2 * half] = fmaf(d, value.x, acc[n][2 * half]);
        acc[n][2 * half + 1] = fmaf(d, value.y, acc[n][2 * half + 1]);
      }
    write_band<T>(results.y + at, acc, made, size.rows - row, size.inner());
    #pragma unroll
    for (int n = 0; n < 8; ++n)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 gate = unpack<T>(band.first[half] <= band.row[half] ? of_z[n][half] : 0);
        acc[n][2 * half] *= silu(gate.x);
        acc[n][2 * half + 1] *= silu(gate.y);
      }
    write_band<T>(results.out + at, acc, made, size.rows - row, size.inner());
  }
}

// What thd_ssd_scan makes, of the same arguments but for rows, which come as boxes: warpgroups that make rows, as many
// that keep states, and one that loads.
// Launch: grid as thd_ssd_scan's with 64 * kSubs columns, block 256 * kSubs + 128, shared memory kSharedBytes.
template <typename T, int kCluster, int kSubs, int kState, int kStages, int kSharedBytes>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(256 * kSubs + 128, 1) thd_ssd_scan_sm90(
    const __grid_constant__ TensorMap channels, const __grid_constant__ TensorMap gates, const float* dt,
    const float* sums, const float* leave, const float* states, const float* d, T* y, T* out, Segments segments,
    const int2* ranges, MixerSize size) {
  using Shared = ScanShared<kCluster, kSubs, kState, kStages>;
  static_assert(same_bytes<(int)sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), slab = blockIdx.x * kSubs;
  const int column = (slab + role % kSubs) * kSlab;   // of this warpgroup
  const Run run(segments, size);
  if (threadIdx.x == 0) {
    shared.stages.init();
    for (int sub = 0; sub < kSubs; ++sub) shared.published[sub].init();
  }
  sync_cluster();
  if (role == 2 * kSubs) {
    if constexpr (kSubs > 1) registers_give<24>();
    if (threadIdx.x % 128 == 0) load_rows(shared, &channels, &gates, {dt, sums, leave}, slab, run, size);
  } else if (role >= kSubs) {
    if constexpr (kSubs > 1) registers_take<112>();
    keep_state<T>(shared, role - kSubs, column, states, ranges, run, size);
  } else {
    if constexpr (kSubs > 1) registers_take<112>();
    make_rows<T>(shared, role, column, d[column / size.head_dim], ranges, ScanResults<T>{y, out}, run, size);
  }
  __syncwarp();
  sync_cluster();                                     // nobody leaves whom others still write to
}
