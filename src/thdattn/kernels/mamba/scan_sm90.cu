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

// Stages that are filled by bulk copies and emptied by kReaders warps.
template <int kStages, int kReaders>
struct Stages {
  u64 full[kStages], empty[kStages];

  __device__ __forceinline__ void init() {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&full[stage], 1);
      barrier_init(&empty[stage], kReaders);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void fill(const Ring<kStages>& ring, int bytes) {
    barrier_wait(&empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&full[ring.stage], bytes);
  }
  __device__ __forceinline__ void wait(const Ring<kStages>& ring) { barrier_wait(&full[ring.stage], ring.parity); }
  __device__ __forceinline__ void release(const Ring<kStages>& ring) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(&empty[ring.stage]);
  }
};

// ------------------------------------------------------------------------------------------------ what segments add

template <int kSubs, int kState, int kStages>
struct StatesShared {
  unsigned char x[kStages][kSubs][kBox], b[kStages][kState / kSlab][kBox];
  float leave[kStages][kSubs][kChunk], sums[kStages][kSubs][kChunk];
  Stages<kStages, 4 * kSubs> stages;
};

// What thd_ssd_states makes, of the same arguments.
// Launch: grid (inner / (64 * kSubs), segments), block 128 * kSubs + 32, shared memory kSharedBytes.
template <typename T, int kSubs, int kState, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(128 * kSubs + kWarp) thd_ssd_states_sm90(
    const __grid_constant__ TensorMap channels, const float* sums, const float* leave, float* states,
    const int2* ranges, float* decays, int used_behind, MixerSize size) {
  using Shared = StatesShared<kSubs, kState, kStages>;
  static_assert(same_bytes<(int)sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int slab = blockIdx.x * kSubs, sub = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const Segment segment(blockIdx.y, ranges, used_behind, size);
  if (threadIdx.x == 0) shared.stages.init();
  __syncthreads();
  Ring<kStages> ring{};

  if (sub == kSubs) {                                 // loads
    if (threadIdx.x % kWarp) return;
    const int group = size.group_of(slab * kSlab / size.head_dim);
    for (int chunk = segment.from; chunk < segment.end; ++chunk, ring.advance()) {
      const u32 at = ring.stage;
      u64* const full = &shared.stages.full[at];
      shared.stages.fill(ring, (kSubs + kState / kSlab) * kBox + kSubs * 2 * 4 * kChunk);
      copy_columns<kSlab * kSubs>(shared.x[at][0], &channels, slab * kSlab, chunk, full);
      copy_columns<kState>(shared.b[at][0], &channels, size.b_column(group), chunk, full);
      for (int i = 0; i < kSubs; ++i) {
        const size_t from = size.in_heads((slab + i) * kSlab / size.head_dim, chunk);
        copy_bulk(shared.leave[at][i], leave + from, 4 * kChunk, full);
        copy_bulk(shared.sums[at][i], sums + from, 4 * kChunk, full);
      }
    }
    return;
  }

  StateOfHead<T, kState> state;
  state.clear();
  for (int chunk = segment.from; chunk < segment.end; ++chunk, ring.advance()) {
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
  const int column = (slab + sub) * kSlab;
  state.store(states + size.state_of(segment.number, 0) + (size_t)column * kState);
  if (threadIdx.x % 128 == 0 && column % size.head_dim == 0)
    segment.write_decay(decays, sums, column / size.head_dim, size);
}

// ------------------------------------------------------------------------------------------------ y and the gate

template <int kSubs>
struct NumbersOfRows { float sums[kSubs][kChunk], dt[kSubs][kChunk], leave[kSubs][kChunk]; };

template <int kSubs, int kState, int kStages>
struct ScanShared {
  unsigned char x[kStages][kSubs][kBox], z[kStages][kSubs][kBox];
  unsigned char b[kStages][kState / kSlab][kBox], c[kStages][kState / kSlab][kBox];
  unsigned char state[kSubs][kState / kSlab][kBox];   // in front of the chunk, rounded
  float inverse[kSubs][4];
  NumbersOfRows<kSubs> numbers[kStages];
  Stages<kStages, 4 * kSubs> stages;
};

// Two rows of a chunk, which this thread shares with its quad: first of each, of the first row of the chunk and of the
// last one, as rows of the chunk.
struct RowsInChunk { int row[2], first[2], first_of_all, first_of_last; };

// The ranges of these rows, loaded a chunk ahead.
struct RangesAhead {
  int2 range[4];

  static __device__ __forceinline__ int row(int i) {
    const auto [warp, lane] = me();
    return i < 2 ? warp * 16 + i * 8 + lane / 4 : i == 2 ? 0 : kChunk - 1;
  }
  __device__ __forceinline__ void load(int chunk, const int2* ranges, const MixerSize& size) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) range[i] = range_at(ranges, chunk * kChunk + row(i), size);
  }
  __device__ __forceinline__ RowsInChunk rows(int chunk, const MixerSize& size) const {
    int first[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) first[i] = first_of(range[i], chunk * kChunk + row(i), size) - chunk * kChunk;
    return {{row(0), row(1)}, {first[0], first[1]}, first[2], first[3]};
  }
};

// C_i . B_j, of all rows i and j of a chunk, becomes the weight of x_j in y_i: times what lasts of j until i, and dt_j.
template <typename T>
__device__ __forceinline__ void weigh(u32 (&weights)[1][4][4], float (&products)[1][8][4], const RowsInChunk& rows,
                                      const float* sums, const float* dt) {
  const auto [warp, lane] = me();
  const float of_row[2] = {sums[rows.row[0]], sums[rows.row[1]]};
  #pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int col = n * 8 + lane % 4 * 2;
    if (n / 2 > warp) {                               // behind all rows of this warp
      products[0][n][0] = products[0][n][1] = products[0][n][2] = products[0][n][3] = 0.f;
      continue;
    }
    const float2 to = *(const float2*)(sums + col), step = *(const float2*)(dt + col);
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool counts = rows.first[e / 2] <= col + e % 2 && col + e % 2 <= rows.row[e / 2];
      const float factor = decay_of(of_row[e / 2] - (e % 2 ? to.y : to.x)) * (e % 2 ? step.y : step.x);
      products[0][n][e] = counts ? products[0][n][e] * factor : 0.f;
    }
  }
  round_to_operand<T>(weights, products);
}

// Starts acc = weights . x, of all rows of x.
template <typename T>
__device__ __forceinline__ void start_products(float (&acc)[8][4], const u32 (&weights)[1][4][4],
                                               const unsigned char* x) {
  const u64 b = descriptor(x, kBox);
  #pragma unroll
  for (int i = 0; i < 4; ++i)
    Wgmma<T, kSlab>::template registers<1>(acc, weights[0][i], b + i * 16 * kRowBytes / 16, i > 0);
}

// The two numbers of block n of a row of a box.
__device__ __forceinline__ u32 pair_of_box(const unsigned char* box, int row, int n) {
  return *(const u32*)(box + row * kRowBytes + (n ^ row % 8) * 16 + threadIdx.x % 4 * 4);
}

// Adds D x, and writes y and out, which are 0 on padding, where x and what stands for z are.
template <typename T>
__device__ __forceinline__ void finish(float (&acc)[8][4], float d, const unsigned char* x, const unsigned char* z,
                                       const RowsInChunk& rows, int chunk, int column, T* y, T* out,
                                       const MixerSize& size) {
  #pragma unroll
  for (int n = 0; n < 8; ++n)
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 value = unpack<T>(pair_of_box(x, rows.row[half], n));
      acc[n][2 * half] = fmaf(d, value.x, acc[n][2 * half]);
      acc[n][2 * half + 1] = fmaf(d, value.y, acc[n][2 * half + 1]);
    }
  const int row = chunk * kChunk + rows.row[0];
  const size_t at = (size_t)row * size.inner() + column, behind = (size_t)8 * size.inner();
  store_row<0>(y + at, acc, 1.f, row < size.rows);
  store_row<1>(y + at + behind, acc, 1.f, row + 8 < size.rows);
  #pragma unroll
  for (int n = 0; n < 8; ++n)
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 gate = pair_of_box(z, rows.row[half], n);
      const float2 value = unpack<T>(rows.first[half] <= rows.row[half] ? gate : 0);
      acc[n][2 * half] *= silu(value.x);
      acc[n][2 * half + 1] *= silu(value.y);
    }
  store_row<0>(out + at, acc, 1.f, row < size.rows);
  store_row<1>(out + at + behind, acc, 1.f, row + 8 < size.rows);
}

// What thd_ssd_scan makes, of the same arguments but for rows, which come as boxes.
// Launch: grid (inner / (64 * kSubs), segments), block 128 * (1 + kSubs), shared memory kSharedBytes.
template <typename T, int kSubs, int kState, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(128 * (1 + kSubs), 1) thd_ssd_scan_sm90(
    const __grid_constant__ TensorMap channels, const __grid_constant__ TensorMap gates, const float* dt,
    const float* sums, const float* leave, const float* states, const float* d, T* y, T* out, int first_segment,
    const int2* ranges, MixerSize size) {
  using Shared = ScanShared<kSubs, kState, kStages>;
  static_assert(same_bytes<(int)sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int slab = blockIdx.x * kSubs, sub = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int segment = first_segment + blockIdx.y, begin = segment * size.segment;
  const int end = min(begin + size.segment, size.chunks());
  if (threadIdx.x == 0) shared.stages.init();
  __syncthreads();
  Ring<kStages> ring{};

  if (sub == kSubs) {                                 // loads
    registers_give<40>();
    if (threadIdx.x % 128) return;
    const int group = size.group_of(slab * kSlab / size.head_dim);
    for (int chunk = begin; chunk < end; ++chunk, ring.advance()) {
      const u32 at = ring.stage;
      u64* const full = &shared.stages.full[at];
      shared.stages.fill(ring, 2 * (kSubs + kState / kSlab) * kBox + (int)sizeof(NumbersOfRows<kSubs>));
      copy_columns<kState>(shared.c[at][0], &channels, size.c_column(group), chunk, full);
      copy_columns<kState>(shared.b[at][0], &channels, size.b_column(group), chunk, full);
      copy_columns<kSlab * kSubs>(shared.x[at][0], &channels, slab * kSlab, chunk, full);
      copy_columns<kSlab * kSubs>(shared.z[at][0], &gates, slab * kSlab, chunk, full);
      for (int i = 0; i < kSubs; ++i) {
        const size_t from = size.in_heads((slab + i) * kSlab / size.head_dim, chunk);
        copy_bulk(shared.numbers[at].sums[i], sums + from, 4 * kChunk, full);
        copy_bulk(shared.numbers[at].dt[i], dt + from, 4 * kChunk, full);
        copy_bulk(shared.numbers[at].leave[i], leave + from, 4 * kChunk, full);
      }
    }
    return;
  }

  registers_take<kSubs == 2 ? 232 : 240>();
  const int column = (slab + sub) * kSlab, turn = 1 + sub;
  const float d_of_head = d[column / size.head_dim];
  unsigned char* const state_tile = shared.state[sub][0];
  float* const inverse = shared.inverse[sub];
  RangesAhead next;
  next.load(begin, ranges, size);
  StateOfHead<T, kState> state;
  if (next.rows(begin, size).first_of_all < 0)        // the sequence goes on from the segment before
    state.load(states + size.state_of(segment, 0) + (size_t)column * kState);
  else
    state.clear();
  state.publish(state_tile, inverse);

  for (int chunk = begin; chunk < end; ++chunk, ring.advance()) {
    const bool more = chunk + 1 < end;
    const RowsInChunk rows = next.rows(chunk, size);
    if (more) next.load(chunk + 1, ranges, size);
    shared.stages.wait(ring);
    const NumbersOfRows<kSubs>& numbers = shared.numbers[ring.stage];
    const unsigned char *const x = shared.x[ring.stage][sub], *const b = shared.b[ring.stage][0];
    const float *const my_sums = numbers.sums[sub], *const my_dt = numbers.dt[sub];

    // What the chunk adds to the state, and products of C with the state in front and with all rows of B.
    u32 leaving[1][4][4], weights[1][4][4];
    float from_state[8][4], products[1][8][4], acc[8][4];
    ScoreRows<T, kState, kChunk, true> c;
    c.load(shared.c[ring.stage][0]);
    state.prepare(leaving, x, numbers.leave[sub]);
    scale(state.s, rows.first_of_last < 0 ? decay_of(my_sums[kChunk - 1]) : 0.f);
    pin(state.s[0]);
    wait(turn, 128);                                  // the state in front is there
    wgmma_begin();
    c.template start<false, kChunk>(products[0], b);
    wgmma_commit();
    c.template start<false, kChunk>(from_state, state_tile);
    wgmma_commit();
    state.start(leaving, b);
    wgmma_commit();

    wgmma_wait<2>(products[0]);
    weigh<T>(weights, products, rows, my_sums, my_dt);
    wgmma_begin();
    start_products<T>(acc, weights, x);
    wgmma_commit();
    wgmma_wait<1>(state.s[0]);
    pin(from_state);
    if constexpr (kScalesStates<T>) {
      #pragma unroll
      for (int n = 0; n < 8; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) from_state[n][e] *= inverse[n / 2];
    }
    wait(turn, 128);                                  // nobody reads the state in front any more
    if (more) state.publish(state_tile, inverse);
    wgmma_wait<0>(acc);
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float decay = decay_of(my_sums[rows.row[e / 2]]);
      #pragma unroll
      for (int n = 0; n < 8; ++n) acc[n][e] += rows.first[e / 2] < 0 ? decay * from_state[n][e] : 0.f;
    }
    finish<T>(acc, d_of_head, x, shared.z[ring.stage][sub], rows, chunk, column, y, out, size);
    shared.stages.release(ring);
  }
}
