// The work of a thread block on the gradients of the Mamba-2 recurrence of one chunk of rows, on Hopper (sm_90a) with
// wgmma and TMA, for heads of 64. ChunkBackward has the formulas.
//
// Three warpgroups work on a head: one on pairs of rows, one on dx and the state behind's contribution to dB, and one
// on the contribution of the state before to dC. Of the fourth warpgroup, one warp loads heads ahead, and another adds
// the contributions to the decays.

#pragma once

#include "kernels/mamba/hopper.cuh"
#include "kernels/mamba/backward_common.cuh"
#include "kernels/mamba/fragments_sm90.cuh"

[[maybe_unused]] constexpr int kOnPairs = 0, kOnBehind = 1, kOnFront = 2;
[[maybe_unused]] constexpr int kTellers = 12;         // warps of these

// Contributions to the decays at the rows of the chunk, see ChunkShared. Of pairs, each warp has sums over its rows of
// u.
struct ToldOfRows {
  float over_pairs[4][kChunk], later[kChunk], alone[kChunk], of_front[kChunk], of_behind[kChunk], across[4];
};

template <int kState, int kStages>
struct ChunkSharedSm90 {
  static constexpr int kParts = kState / kSlab;
  unsigned char b[kParts][kBox], c[kParts][kBox];
  unsigned char x[kStages][kBox], dy[kStages][kBox], s[kStages][kParts][kBox], r[kStages][kParts][kBox];
  unsigned char weights[2][kBox];                     // of dy in dx, rows of x by rows of dy
  unsigned char products[2 * kBox];                   // B C^T as each thread has it; later its gradient, rounded
  unsigned char dx[kBox];                             // 16 rows of each warp on their way out
  float sums[kStages][kChunk], dt[kStages][kChunk];
  ToldOfRows told[kStages];
  int first[kChunk];
  int largest[kChunk];                                // see ScaledSequences
  Stages<kStages, 1, 1> stages;
  u64 all_told[kStages], weighed[2], taken[2], arrived;  // arrived: B and C have

  __device__ __forceinline__ void init() {
    for (u64& barrier : all_told) barrier_init(&barrier, kTellers);
    for (u64& barrier : weighed) barrier_init(&barrier, 4);
    for (u64& barrier : taken) barrier_init(&barrier, 4);
    barrier_init(&arrived, 1);
    stages.init();                                    // and publishes the initialisation of all barriers
  }
};

// The work of one thread. row: the first of its two rows, the second is 8 further on. ring, weights: where the data of
// a head are.
template <typename T, int kState, int kStages>
struct ChunkBackwardSm90 {
  using Shared = ChunkSharedSm90<kState, kStages>;
  static constexpr int kParts = kState / kSlab;
  Shared& shared;
  Ring<kStages> ring{};
  Ring<2> weights{};
  const float* scales;                                // of S and, r_scales further on, R, by head
  int r_scales, row;
  bool enters[2], leaves[2];  // whether the state before reaches a row, and a row the state behind
  bool passes;                                        // whether the state before reaches the state behind

  __device__ __forceinline__ ChunkBackwardSm90(Shared& shared, const float* scales, int r_scales)
      : shared(shared), scales(scales), r_scales(r_scales), row(threadIdx.x % 128 / kWarp * 16 + me().lane / 4),
        enters{shared.first[row] < 0, shared.first[row + 8] < 0},
        leaves{row >= shared.first[kChunk - 1], row + 8 >= shared.first[kChunk - 1]},
        passes(shared.first[kChunk - 1] < 0) {}

  __device__ __forceinline__ const float* sums() const { return shared.sums[ring.stage]; }
  __device__ __forceinline__ const float* dt() const { return shared.dt[ring.stage]; }
  __device__ __forceinline__ ToldOfRows& told() const { return shared.told[ring.stage]; }

  // As in ChunkBackward, for this thread's rows.
  __device__ __forceinline__ float enter(int h) const { return enters[h] ? decay_of(sums()[row + 8 * h]) : 0.f; }
  __device__ __forceinline__ float leave(int h) const {
    return leaves[h] ? decay_of(sums()[kChunk - 1] - sums()[row + 8 * h]) : 0.f;
  }
  __device__ __forceinline__ float through() const { return passes ? decay_of(sums()[kChunk - 1]) : 0.f; }
  __device__ __forceinline__ float scale_of_state(int head, bool behind) const {
    return kScalesStates<T> ? scales[head + (behind ? r_scales : 0)] : 1.f;
  }

  static __device__ __forceinline__ void arrive(u64* barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
  }
  // Signals that this warp has written all contributions of a head and no longer needs its data.
  __device__ __forceinline__ void next_head() {
    arrive(&shared.all_told[ring.stage]);
    ring.advance();
    weights.advance();
  }

  using Rows = RowsOfBox<T>;
  // Sums a number of each of the thread's rows over the four lanes that share them.
  __device__ __forceinline__ void tell(float* to, float one, float other) const {
    one = quad_sum(one);
    other = quad_sum(other);
    if (threadIdx.x % 4 == 0) to[row] = one, to[row + 8] = other;
  }

  // ---------------------------------------------------------------------------------------------- once

  // Loads B and C of the chunk, with one thread.
  __device__ __forceinline__ void load_once(const TensorMap* channels, int group, int chunk,
                                            const MixerSize& size) const {
    barrier_expect(&shared.arrived, 2 * kParts * kBox);
    copy_columns<kState>(shared.b[0], channels, size.b_column(group), chunk, &shared.arrived);
    copy_columns<kState>(shared.c[0], channels, size.c_column(group), chunk, &shared.arrived);
  }

  // Loads a head with one thread. s is the state before the chunk. L2 sectors of x and dy that are fetched also belong
  // to the next head.
  __device__ __forceinline__ void load(const TensorMap* x, const TensorMap* dy, const T* s, const T* r, int head,
                                       int first_row, const float* sums, const float* dt) {
    const u32 at = ring.stage;
    u64* const full = &shared.stages.full[at];
    shared.stages.fill(ring, (2 + 2 * kParts) * kBox + 2 * 4 * kChunk);
    copy_box(shared.x[at], x, 0, head, first_row, full);
    copy_box(shared.dy[at], dy, 0, head, first_row, full);
    copy_bulk(shared.r[at], r, kParts * kBox, full);
    copy_bulk(shared.s[at], s, kParts * kBox, full);
    copy_bulk(shared.sums[at], sums, 4 * kChunk, full);
    copy_bulk(shared.dt[at], dt, 4 * kChunk, full);
    ring.advance();
  }

  // ---------------------------------------------------------------------------------------------- pairs

  // Returns where this thread keeps its numbers of B C^T in shared memory.
  __device__ __forceinline__ float4* my_products() const { return (float4*)shared.products + threadIdx.x % 128; }

  __device__ __forceinline__ void make_products() const {
    float made[8][4];
    ScoreRows<T, kState, kChunk, false> b;
    b.load(shared.b[0]);
    wgmma_begin();
    b.template start<false, kChunk>(made, shared.c[0]);
    wgmma_commit();
    wgmma_wait<0>(made);
    #pragma unroll
    for (int n = 0; n < 8; ++n) my_products()[n * 128] = *(const float4*)made[n];
  }

  // Turns k = x dy^T (rows j by columns i >= j) into the weights of dy in dx, and writes the contributions to the
  // decays. The same code serves pairs that may count and pairs that do, because the rate of instructions bounds this
  // part.
  __device__ __forceinline__ void weigh(float (&k)[8][4], float (&dproducts)[1][8][4], u32 counted) {
    float later[2] = {0.f, 0.f}, alone[2] = {0.f, 0.f}, columns[8][2];
    const float from[2] = {sums()[row], sums()[row + 8]}, steps[2] = {dt()[row], dt()[row + 8]};
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      columns[n][0] = columns[n][1] = 0.f;
      if (n / 2 < row / 16) k[n][0] = k[n][1] = k[n][2] = k[n][3] = 0.f;
      else weigh(n, k[n], dproducts[0][n], columns[n], later, alone, from, steps, counted >> 4 * n);
    }
    barrier_wait(&shared.taken[weights.stage], weights.parity ^ 1);
    publish(shared.weights[weights.stage], k);
    arrive(&shared.weighed[weights.stage]);
    tell(told().later, later[0], later[1]);
    if (row % 8 / 2 == threadIdx.x % 4) told().alone[row] = alone[0], told().alone[row + 8] = alone[1];
    tell_columns(columns);
  }
  // Returns a bit for each pair of this thread: whether it counts.
  __device__ __forceinline__ u32 counted_pairs() const {
    u32 counted = 0;
    #pragma unroll
    for (int n = 0; n < 8; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = n * 8 + threadIdx.x % 4 * 2 + e % 2, j = row + e / 2 * 8;
        counted |= (u32)(shared.first[i] <= j && j <= i) << (4 * n + e);
      }
    return counted;
  }
  // Weighs a block of pairs. counted: its bits in the lowest places.
  __device__ __forceinline__ void weigh(int n, float (&k)[4], float (&dproducts)[4], float (&columns)[2],
                                        float (&later)[2], float (&alone)[2], const float (&from)[2],
                                        const float (&steps)[2], u32 counted) {
    const int column = n * 8 + threadIdx.x % 4 * 2;
    const float2 to = *(const float2*)(sums() + column);
    const float4 four = my_products()[n * 128];
    const float gamma[4] = {four.x, four.y, four.z, four.w};
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool counts = counted >> e & 1;
      const float decay = decay_of((e % 2 ? to.y : to.x) - from[e / 2]), step = steps[e / 2];
      const float product = counts ? k[e] : 0.f, weight = counts ? decay * gamma[e] : 0.f;
      k[e] = step * weight;
      dproducts[e] = fmaf(decay * step, product, dproducts[e]);
      if (column + e % 2 == row + e / 2 * 8) {
        alone[e / 2] = weight * product;
      } else {
        later[e / 2] = fmaf(weight, product, later[e / 2]);
        columns[e % 2] = fmaf(k[e], product, columns[e % 2]);
      }
    }
  }

  // Sums columns over the rows of the warp. A lane has its rows' partial of 16 columns.
  __device__ __forceinline__ void tell_columns(const float (&partial)[8][2]) const {
    const int lane = me().lane;
    float half[4][2], quarter[2][2], sum[2];
    #pragma unroll
    for (int e = 0; e < 2; ++e) {
      #pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float mine = lane & 16 ? partial[n + 4][e] : partial[n][e],
                    other = lane & 16 ? partial[n][e] : partial[n + 4][e];
        half[n][e] = mine + __shfl_xor_sync(0xffffffffu, other, 16);
      }
      #pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float mine = lane & 8 ? half[n + 2][e] : half[n][e], other = lane & 8 ? half[n][e] : half[n + 2][e];
        quarter[n][e] = mine + __shfl_xor_sync(0xffffffffu, other, 8);
      }
      const float mine = lane & 4 ? quarter[1][e] : quarter[0][e], other = lane & 4 ? quarter[0][e] : quarter[1][e];
      sum[e] = mine + __shfl_xor_sync(0xffffffffu, other, 4);
    }
    const int n = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
    store_pair(told().over_pairs[me().warp] + n * 8 + lane % 4 * 2, sum[0], sum[1]);
  }

  // Computes the state behind's term of dx from B R^T, and its contribution to dt.
  __device__ __forceinline__ void leave_from(float (&made)[8][4], const Rows& rows_of_x, float of_r) const {
    const float last[2] = {of_r * leave(0), of_r * leave(1)};
    const float factor[2] = {last[0] * dt()[row], last[1] * dt()[row + 8]};
    float behind[2] = {0.f, 0.f};
    #pragma unroll
    for (int n = 0; n < 8; ++n)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 of_x = rows_of_x.pair(n, h);
        float &one = made[n][2 * h], &other = made[n][2 * h + 1];
        behind[h] += one * of_x.x + other * of_x.y;
        one *= factor[h], other *= factor[h];
      }
    if (last[0] == 0.f || last[1] == 0.f) {           // whatever the state is
      #pragma unroll
      for (int n = 0; n < 8; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) made[n][e] = last[e / 2] == 0.f ? 0.f : made[n][e];
    }
    tell(told().of_behind, last[0] == 0.f ? 0.f : last[0] * behind[0], last[1] == 0.f ? 0.f : last[1] * behind[1]);
  }

  // Stores dx of `left` rows, and adds the term through D.
  __device__ __forceinline__ void store_dx(T* dx, float (&made)[8][4], const Rows& rows_of_dy, float d, int left,
                                           const MixerSize& size) const {
    #pragma unroll
    for (int n = 0; n < 8; ++n)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 of_dy = rows_of_dy.pair(n, h);
        made[n][2 * h] = fmaf(d, of_dy.x, made[n][2 * h]);
        made[n][2 * h + 1] = fmaf(d, of_dy.y, made[n][2 * h + 1]);
      }
    const auto [warp, lane] = me();
    round_to<T>(shared.dx, made);
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < 4; ++i) {                     // whole rows of 128 bytes
      const int r = warp * 16 + i * 4 + lane / 8;
      const uint4 vector = *(const uint4*)(shared.dx + r * kRowBytes + (lane % 8 ^ r % 8) * 16);
      if (r < left) __stcs((uint4*)(dx + (size_t)r * size.inner() + lane % 8 * 8), vector);
    }
  }

  static __device__ __forceinline__ void publish(unsigned char* tile, const float (&x)[8][4]) {
    round_to<T>(tile, x);
    publish_to_async();
  }

  __device__ __forceinline__ void on_pairs(float (&dproducts)[1][8][4], u32 counted) {
    shared.stages.wait(ring);
    float k[8][4];
    ScoreRows<T, kSlab, kChunk, false> x;
    x.load(shared.x[ring.stage]);
    wgmma_begin();
    x.template start<false, kChunk>(k, shared.dy[ring.stage]);
    wgmma_commit();
    wgmma_wait<0>(k);
    weigh(k, dproducts, counted);
    next_head();
  }

  // Rounds the gradient of B C^T for the other warpgroups. synccheck calls barrier 1 divergent, as two warpgroups wait
  // there at different places in the code; each comes there once.
  __device__ __forceinline__ void publish_products(float (&dproducts)[1][8][4]) const {
    sequences().tell(dproducts, row);
    ::wait(2, 128);                                   // nobody reads B C^T any more
    sequences().scale(dproducts, row);
    publish(shared.products, dproducts[0]);
    ::arrive(1, 384);
  }
  __device__ __forceinline__ ScaledSequences<T> sequences() const { return {shared.largest, shared.first}; }

  // ---------------------------------------------------------------------------------------------- states

  // Starts made = or += a b for 64 columns, where the rows of b are summed. kTransposed: those of a too.
  template <bool kAdd, int kTransposed = 0>
  static __device__ __forceinline__ void start(float (&made)[8][4], const unsigned char* a, const unsigned char* b) {
    const u64 rows = descriptor(a, 16), columns = descriptor(b, kBox);
    wgmma_begin();
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      Wgmma<T, kSlab>::template shared<kTransposed, 1>(made, rows + (kTransposed ? i * 16 * kRowBytes : i * 32) / 16,
                                                       columns + i * 16 * kRowBytes / 16, kAdd || i > 0);
    wgmma_commit();
  }
  // sum += factor made. A factor of 0 excludes the state, whatever it is.
  static __device__ __forceinline__ void add(float (&sum)[8][4], const float (&made)[8][4], const float (&factor)[2]) {
    #pragma unroll
    for (int n = 0; n < 8; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        if (factor[e / 2] != 0.f) sum[n][e] = fmaf(factor[e / 2], made[n][e], sum[n][e]);
  }

  // Computes <R, S>, this thread's partial: the diagonal of S R^T.
  __device__ __forceinline__ float dot() const {
    float made[8][4], sum = 0.f;
    ScoreRows<T, kState, kChunk, false> s;
    s.load(shared.s[ring.stage][0]);
    wgmma_begin();
    s.template start<false, kChunk>(made, shared.r[ring.stage][0]);
    wgmma_commit();
    wgmma_wait<0>(made);
    const auto [warp, lane] = me();
    #pragma unroll
    for (int w = 0; w < 4; ++w)
      if (w == warp) sum = lane / 4 % 2 ? made[2 * w][1] + made[2 * w + 1][3] : made[2 * w][0] + made[2 * w + 1][2];
    return lane / 8 == lane % 4 ? sum : 0.f;
  }

  __device__ __forceinline__ void on_behind(int head, T* dx, float d, int left, float (&db)[kParts][8][4],
                                            const MixerSize& size) {
    shared.stages.wait(ring);
    const unsigned char *const x = shared.x[ring.stage], *const dy = shared.dy[ring.stage];
    const float of_r = scale_of_state(head, true);
    const float factor[2] = {of_r * leave(0) * dt()[row], of_r * leave(1) * dt()[row + 8]};
    float made[8][4], of_x[8][4];
    ScoreRows<T, kState, kChunk, false> b;
    b.load(shared.b[0]);
    start<false>(made, x, shared.r[ring.stage][0]);
    b.template start<false, kChunk>(of_x, shared.r[ring.stage][0]);
    wgmma_commit();
    const Rows rows_of_x(x);
    wgmma_wait<1>(made);
    add(db[0], made, factor);
    if constexpr (kParts == 2) {
      pin(made);
      start<false>(made, x, shared.r[ring.stage][1]);
      wgmma_wait<1>(of_x);
    } else {
      wgmma_wait<0>(of_x);
    }
    leave_from(of_x, rows_of_x, of_r);
    pin(of_x);
    if constexpr (kParts == 2) {
      wgmma_wait<0>(made);
      add(db[1], made, factor);
    }
    barrier_wait(&shared.weighed[weights.stage], weights.parity);
    start<true>(of_x, shared.weights[weights.stage], dy);
    const Rows rows_of_dy(dy);
    wgmma_wait<0>(of_x);
    arrive(&shared.taken[weights.stage]);
    store_dx(dx, of_x, rows_of_dy, d, left, size);
    next_head();
  }

  // Computes the contribution of the state before to each row of y, C S^T, and from it and dy that to the decays.
  __device__ __forceinline__ void tell_front(const unsigned char* dy, const float (&factor)[2]) const {
    float made[8][4], seen[2] = {0.f, 0.f};
    ScoreRows<T, kState, kChunk, false> c;
    c.load(shared.c[0]);
    wgmma_begin();
    c.template start<false, kChunk>(made, shared.s[ring.stage][0]);
    wgmma_commit();
    const Rows rows_of_dy(dy);
    wgmma_wait<0>(made);
    #pragma unroll
    for (int n = 0; n < 8; ++n)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 of_dy = rows_of_dy.pair(n, h);
        seen[h] += made[n][2 * h] * of_dy.x + made[n][2 * h + 1] * of_dy.y;
      }
    tell(told().of_front, factor[0] == 0.f ? 0.f : factor[0] * seen[0], factor[1] == 0.f ? 0.f : factor[1] * seen[1]);
  }

  __device__ __forceinline__ void on_front(int head, float (&dc)[kParts][8][4]) {
    shared.stages.wait(ring);
    const unsigned char* const dy = shared.dy[ring.stage];
    const float of_s = scale_of_state(head, false), factor[2] = {of_s * enter(0), of_s * enter(1)};
    const float across = through() == 0.f ? 0.f : warp_sum(dot());
    if (me().lane == 0) told().across[me().warp] = of_s * scale_of_state(head, true) * across;
    tell_front(dy, factor);
    #pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float made[8][4];
      start<false>(made, dy, shared.s[ring.stage][part]);
      wgmma_wait<0>(made);
      add(dc[part], made, factor);
    }
    next_head();
  }

  // ---------------------------------------------------------------------------------------------- rows

  // Computes, with one warp, ddt and the chunk's partial of the gradient of A, once all contributions are written.
  // racecheck does not follow mbarriers: all_told orders writes before reads, and `stages`, released here, orders reads
  // before the writes of a later head.
  __device__ __forceinline__ void rows(float* ddt, float rate, float* partial_rate) {
    shared.stages.wait(ring);
    barrier_wait(&shared.all_told[ring.stage], ring.parity);
    const ToldOfRows& all = told();
    TwoRows two;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 2 * me().lane + i;
      float of_pairs = all.over_pairs[0][r];
      #pragma unroll
      for (int w = 1; w < 4; ++w) of_pairs += all.over_pairs[w][r];
      two.ends[i] = of_pairs - dt()[r] * all.later[r] + all.of_front[r];
      two.begins[i] = dt()[r] * all.of_behind[r];
      two.alone[i] = all.later[r] + all.alone[r] + all.of_behind[r];
    }
    const float left = through(), across = (all.across[0] + all.across[1]) + (all.across[2] + all.across[3]);
    two.finish(shared.first, dt(), left == 0.f ? 0.f : left * across, rate, ddt, partial_rate);
    shared.stages.release(ring);
    ring.advance();
  }

  // ---------------------------------------------------------------------------------------------- the end

  // dB += dGamma^T C (kTransposed = 0) or dC += dGamma B (1). The gradient of B C^T is stored transposed.
  template <int kTransposed>
  __device__ __forceinline__ void add_products(float (&sum)[kParts][8][4], const unsigned char (&other)[kParts][kBox]) {
    ::wait(1, 384);
    sequences().scale(sum, row);
    #pragma unroll
    for (int part = 0; part < kParts; ++part) {
      pin(sum[part]);
      start<true, kTransposed>(sum[part], shared.products, other[part]);
      wgmma_wait<0>(sum[part]);
    }
  }
  // Stores dB or dC of `left` rows.
  __device__ __forceinline__ void store(float* to, size_t pitch, const float (&sum)[kParts][8][4], int left) const {
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h >= left) continue;
      const float inverse = sequences().scale(row + 8 * h).inverse;
      float* const at = to + (row + 8 * h) * pitch + threadIdx.x % 4 * 2;
      #pragma unroll
      for (int n = 0; n < 8 * kParts; ++n)
        store_pair(at + n * 8, inverse * sum[n / 8][n % 8][2 * h], inverse * sum[n / 8][n % 8][2 * h + 1]);
    }
  }
};
