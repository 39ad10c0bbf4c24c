// The Hopper attention backward of head dims beyond 192/128 (sm_90a): the producer, the three roles, and at the end the
// kernels, thd_attn_bwd_wide_sm90, where to begin to read, and thd_attn_round_wide_sm90.
constexpr int kWideTile = 64;                         // keys of a block, query rows of a step
constexpr int kDsStages = 2;                          // of probabilities, and of score gradients in the same memory

// Float4 n of every lane of a warp's probabilities, 16 keys by 64 queries, in a stage: half of them where the warp's
// own score gradients will be, so that no warp waits for another.
__device__ __forceinline__ float4* probabilities(unsigned char* stage, int warp, int n) {
  constexpr int kHalf = kTileBytes<kWideTile, kWideTile>, kNumbers = kWideTile / 16;
  return (float4*)(stage + n / kNumbers * kHalf + warp * 16 * kRowBytes) + n % kNumbers * kWarp;
}

template <int kHeadDim> constexpr int kPieces = kHeadDim / kSlab;   // of 64 rows of dq
constexpr int kPieceFloats = kWideTile * kSlab;

template <int kHeadDim, int kVHeadDim, int kQStages, int kDoutStages, bool kWithDq>
struct WideShared {
  static constexpr int kQBytes = kTileBytes<kWideTile, kHeadDim>, kDoutBytes = kTileBytes<kWideTile, kVHeadDim>;
  unsigned char k[kQBytes], v[kDoutBytes];
  unsigned char q[kQStages][kQBytes], dout[kDoutStages][kDoutBytes];
  // Probabilities, float32, then in the first half of their place dS, 16-bit, whose rows are the keys.
  unsigned char ds[kDsStages][2 * kTileBytes<kWideTile, kWideTile>];
  float minus_lse[kQStages][kWideTile], minus_delta[kDoutStages][kWideTile];
  u64 kv_full, kv_empty;
  u64 q_full[kQStages], q_empty[kQStages];
  u64 dout_full[kDoutStages], dout_empty[kDoutStages];
  u64 p_full[kDsStages], ds_full[kDsStages], ds_empty[kDsStages];
  Step q_step[kQStages], dout_step[kDoutStages], ds_step[kDsStages];
  int2 range[kWideTile];                                          // of the key rows
  int2 warp_tile[8];                                              // of the key role's warps, then the value role's

  __device__ __forceinline__ void init() {
    barrier_init(&kv_full, 2), barrier_init(&kv_empty, kWithDq ? 12 : 8);
    for (int s = 0; s < kQStages; ++s) barrier_init(&q_full[s], 1), barrier_init(&q_empty[s], 4);
    for (int s = 0; s < kDoutStages; ++s) barrier_init(&dout_full[s], 1), barrier_init(&dout_empty[s], 4);
    for (int s = 0; s < kDsStages; ++s) {
      barrier_init(&p_full[s], 4), barrier_init(&ds_full[s], 4), barrier_init(&ds_empty[s], kWithDq ? 8 : 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// The producer, one warp: loads the tensors of every step.
template <int kHeadDim, int kVHeadDim, int kQStages, int kDoutStages, bool kWithDq>
__device__ __forceinline__ void produce_wide(
    WideShared<kHeadDim, kVHeadDim, kQStages, kDoutStages, kWithDq>& shared, const TensorMap* map_q,
    const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_dout, const float* stats,
    const int2* query_ranges, const int* shares, const int* tile_order, int* counter, BackwardSize size) {
  using Shared = WideShared<kHeadDim, kVHeadDim, kQStages, kDoutStages, kWithDq>;
  const int lane = threadIdx.x % kWarp;
  Ring<kQStages> q_ring = {0, 1};
  Ring<kDoutStages> dout_ring = {0, 1};
  u32 kv_parity = 1;
  auto fill = [&](auto& ring, u64* full, u64* empty, Step* steps, const Step& step, auto load) {
    barrier_wait(&empty[ring.stage], ring.parity);
    if (lane == 0) {
      steps[ring.stage] = step;
      if (step.flags & (kNothing | kEnd)) barrier_arrive(&full[ring.stage]);
      else load(ring.stage, &full[ring.stage]);
    }
    ring.advance();
  };

  schedule_steps<1, kWideTile>(query_ranges, shares, tile_order, counter, size, [&](const Step& step) {
    const u32 lse = step.head * size.stats_rows + step.row;
    const u32 delta = lse + size.splits * size.split_heads * size.stats_rows;
    fill(q_ring, shared.q_full, shared.q_empty, shared.q_step, step, [&](u32 stage, u64* full) {
      barrier_expect(full, Shared::kQBytes + 4 * kWideTile);
      copy_tile<kWideTile, kHeadDim>(shared.q[stage], map_q, step.head, step.row, full);
      copy_bulk(shared.minus_lse[stage], stats + lse, 4 * kWideTile, full);
    });
    fill(dout_ring, shared.dout_full, shared.dout_empty, shared.dout_step, step, [&](u32 stage, u64* full) {
      barrier_expect(full, Shared::kDoutBytes + 4 * kWideTile);
      copy_tile<kWideTile, kVHeadDim>(shared.dout[stage], map_dout, step.head, step.row, full);
      copy_bulk(shared.minus_delta[stage], stats + delta, 4 * kWideTile, full);
    });
    if (!(step.flags & kFirst)) return;
    barrier_wait(&shared.kv_empty, kv_parity);
    kv_parity ^= 1;
    load_keys<kWideTile, kHeadDim, kVHeadDim>(shared, map_k, map_v, query_ranges, step, size);
  });
}

// The query role, one warpgroup: dq = dS k, a piece at a time.
template <typename T, typename Dq, int kHeadDim, int kVHeadDim, int kQStages, int kDoutStages, bool kWithDq>
__device__ __forceinline__ void serve_wide_queries(
    WideShared<kHeadDim, kVHeadDim, kQStages, kDoutStages, kWithDq>& shared, Dq* dq, float* dq_accum, BackwardSize size,
    float softmax_scale) {
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  Ring<kDsStages> ring = {0, 0};

  while (true) {
    barrier_wait(&shared.ds_full[ring.stage], ring.parity);
    const Step step = shared.ds_step[ring.stage];
    __syncwarp();
    if (step.flags & kEnd) break;
    const size_t block = (size_t)step.head * (size.stats_rows / 64) + step.row / 64;
    #pragma unroll 1
    for (int piece = 0; piece < kPieces<kHeadDim>; ++piece) {
      float acc[kSlab / 8][4];
      multiply_keys<T, kWideTile>(acc, shared.ds[ring.stage], shared.k, piece * kSlab);
      if (step.flags & kAlone) {
        bring_dq<kHeadDim>(dq, acc, softmax_scale, step.row, step.head, piece * kSlab, size);
        continue;
      }
      float* const dst = dq_accum + (block * kPieces<kHeadDim> + piece) * kPieceFloats + threadIdx.x % 128 * 4;
      #pragma unroll
      for (int n = 0; n < kSlab / 8; ++n)
        add_quad(dst + n * 512, make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]));
    }
    if (step.flags & kLast) arrive(&shared.kv_empty);
    arrive(&shared.ds_empty[ring.stage]);
    ring.advance();
  }
}

// The key role, one warpgroup: probabilities, and dk = dS^T q.
template <bool kKeysInRegisters, typename T, typename Grad, bool kCaps, int kHeadDim, int kVHeadDim, int kQStages,
          int kDoutStages, bool kWithDq>
__device__ __forceinline__ void serve_wide_keys(
    WideShared<kHeadDim, kVHeadDim, kQStages, kDoutStages, kWithDq>& shared, Gradients<Grad> grads, BackwardSize size,
    Logits<kCaps> logits) {
  constexpr int kBlocks = kWideTile / 8;
  Ring<kQStages> ring = {0, 0};                       // of query tiles
  Ring<kDsStages> ds_ring = {0, 0};
  u32 kv_parity = 0, flags;
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  auto look = [&] {
    barrier_wait(&shared.q_full[ring.stage], ring.parity);
    flags = __shfl_sync(0xffffffffu, shared.q_step[ring.stage].flags, 0);
  };
  auto start_dk = [&](float (&acc)[kHeadDim / 8][4]) {
    const u64 a = descriptor(shared.ds[ds_ring.stage], 16);
    const u64 b = descriptor(shared.q[ring.back(1).stage], kWideTile * kRowBytes);
    #pragma unroll
    for (int c = 0; c < kHeadDim; c += kMostCols<kHeadDim>)
      #pragma unroll
      for (int i = 0; i < kWideTile / 16; ++i)
        Wgmma<T, kMostCols<kHeadDim>>::template shared<0, 1>(columns<kMostCols<kHeadDim>>(acc, c), a + i * 32 / 16,
                                                             b + (c * kWideTile * 2 + i * 16 * kRowBytes) / 16, 1);
    wgmma_commit();
  };
  auto release = [&](u32 stage) {
    arrive(&shared.q_empty[stage]);
    arrive(&shared.ds_empty[ds_ring.stage]);
    ds_ring.advance();
  };

  while (true) {
    look();
    if (flags & kEnd) break;
    const auto [warp, lane] = me();
    int2& warp_tile = shared.warp_tile[warp];
    if (lane == 0) {
      const Step& step = shared.q_step[ring.stage];
      warp_tile = {step.tile * kWideTile + warp * 16, step.head / size.group};
    }
    __syncwarp();
    float acc_dk[kHeadDim / 8][4] = {};
    if (flags & kNothing) {
      arrive(&shared.q_empty[ring.stage]);
      ring.advance();
    } else {
      barrier_wait(&shared.kv_full, kv_parity);
      kv_parity ^= 1;
      ScoreRows<T, kHeadDim, kWideTile, kKeysInRegisters> keys;
      keys.load(shared.k);
      float p[kBlocks][4];
      // Probabilities from the saved lse, transposed; every thread leaves them for its counterpart in the value role.
      auto hand_over = [&](Ring<kDsStages> to) {
        const auto [warp, lane] = me();
        take_exponentials(p, logits, shared.minus_lse[ring.stage]);
        if (flags & kMasked) hide_keys(p, shared.range + warp * 16, shared.q_step[ring.stage].row);
        barrier_wait(&shared.ds_empty[to.stage], to.parity ^ 1);
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          probabilities(shared.ds[to.stage], warp, n)[lane] = make_float4(p[n][0], p[n][1], p[n][2], p[n][3]);
        __syncwarp();
        arrive(&shared.p_full[to.stage]);
        ring.advance();
      };
      begin_scores<kCaps>(p, shared.minus_lse[ring.stage]);
      wgmma_begin();
      keys.template start<true, kWideTile>(p, shared.q[ring.stage]);
      wgmma_commit();
      wgmma_wait<0>(p);
      hand_over(ds_ring);
      while (!(flags & kLast)) {
        // The scores of the next step, and after them dk += dS^T q.
        look();
        begin_scores<kCaps>(p, shared.minus_lse[ring.stage]);
        wgmma_begin();
        keys.template start<true, kWideTile>(p, shared.q[ring.stage]);
        wgmma_commit();
        barrier_wait(&shared.ds_full[ds_ring.stage], ds_ring.parity);
        wgmma_begin();
        start_dk(acc_dk);
        wgmma_wait<1>(p);
        Ring<kDsStages> next = ds_ring;
        next.advance();
        hand_over(next);
        wgmma_wait<0>(acc_dk);
        release(ring.back(2).stage);
      }
      arrive(&shared.kv_empty);
      barrier_wait(&shared.ds_full[ds_ring.stage], ds_ring.parity);
      wgmma_begin();
      start_dk(acc_dk);
      wgmma_wait<0>(acc_dk);
      release(ring.back(1).stage);
    }
    const int2 mine_done = shared.warp_tile[me().warp];
    const Share share = grads.claim(mine_done.x, mine_done.y, 0, size);
    grads.template bring<T, 0>(acc_dk, logits.scale, share, mine_done.x, mine_done.y, size);
    grads.release(mine_done.x, mine_done.y, 0, share, size);
  }
}

// The value role, one warpgroup: score gradients, and dv = P^T dout.
template <typename T, typename Grad, bool kCaps, int kHeadDim, int kVHeadDim, int kQStages, int kDoutStages,
          bool kWithDq>
__device__ __forceinline__ void serve_wide_values(
    WideShared<kHeadDim, kVHeadDim, kQStages, kDoutStages, kWithDq>& shared, Gradients<Grad> grads, BackwardSize size,
    Logits<kCaps> logits) {
  constexpr int kBlocks = kWideTile / 8;
  Ring<kDoutStages> ring = {0, 0};
  Ring<kQStages> q_ring = {0, 0};                     // of query tiles, which stay until dk has their score gradients
  Ring<kDsStages> ds_ring = {0, 0};
  u32 kv_parity = 0, flags;
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  auto look = [&] {
    barrier_wait(&shared.dout_full[ring.stage], ring.parity);
    flags = __shfl_sync(0xffffffffu, shared.dout_step[ring.stage].flags, 0);
  };
  auto tell_queries = [&] {
    const auto [warp, lane] = me();
    if (warp == 0 && lane == 0) shared.ds_step[ds_ring.stage] = shared.dout_step[ring.stage];
    publish_to_async();
    __syncwarp();
    arrive(&shared.ds_full[ds_ring.stage]);
  };

  while (true) {
    look();
    if (flags & kEnd) break;
    const auto [warp, lane] = me();
    if (lane == 0) {
      const Step& step = shared.dout_step[ring.stage];
      shared.warp_tile[4 + warp] = {step.tile * kWideTile + warp * 16, step.head / size.group};
    }
    __syncwarp();
    float acc_dv[kVHeadDim / 8][4] = {};
    if (flags & kNothing) {
      arrive(&shared.dout_empty[ring.stage]);
      ring.advance(), q_ring.advance();
    } else {
      barrier_wait(&shared.kv_full, kv_parity);
      kv_parity ^= 1;
      float dp[kBlocks][4];
      begin_columns(dp, shared.minus_delta[ring.stage]);
      wgmma_begin();
      add_scores<T, kVHeadDim, kWideTile, kWideTile>(dp, shared.v, shared.dout[ring.stage]);
      wgmma_commit();
      wgmma_wait<0>(dp);
      u32 probability[1][kBlocks / 2][4];
      auto start_dv = [&] {
        const unsigned char* const dout = shared.dout[ring.stage];
        #pragma unroll
        for (int c = 0; c < kVHeadDim; c += kMostCols<kVHeadDim>)
          start_weighted_rows<T, kMostCols<kVHeadDim>, kWideTile>(columns<kMostCols<kVHeadDim>>(acc_dv, c), probability,
                                                                 dout + c * kWideTile * 2);
        wgmma_commit();
      };
      while (true) {
        // dS, then dv += P^T dout; while it runs, dS is stored where P was.
        const auto [warp, lane] = me();
        barrier_wait(&shared.p_full[ds_ring.stage], ds_ring.parity);
        if constexpr (kCaps) barrier_wait(&shared.q_full[q_ring.stage], q_ring.parity);
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const float4 p = probabilities(shared.ds[ds_ring.stage], warp, n)[lane];
          float2 minus_lse = {};
          if constexpr (kCaps) minus_lse = ((const float2*)shared.minus_lse[q_ring.stage])[n * 4 + lane % 4];
          dp[n][0] *= p.x * logits.slope(p.x, minus_lse.x), dp[n][1] *= p.y * logits.slope(p.y, minus_lse.y);
          dp[n][2] *= p.z * logits.slope(p.z, minus_lse.x), dp[n][3] *= p.w * logits.slope(p.w, minus_lse.y);
          probability[0][n / 2][n % 2 * 2] = pack<T>(p.x, p.y);
          probability[0][n / 2][n % 2 * 2 + 1] = pack<T>(p.z, p.w);
        }
        wgmma_begin();
        start_dv();
        u32 dscore[1][kBlocks / 2][4];
        round_to_operand<T>(dscore, *(float(*)[1][kBlocks][4])&dp);
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < kBlocks / 2; ++i)
          store_matrices(shared.ds[ds_ring.stage] + (warp * 16 + lane % 16) * kRowBytes +
                             ((i * 2 + lane / 16) ^ lane % 8) * 16, dscore[0][i]);
        tell_queries();
        ds_ring.advance();

        wgmma_wait<0>(acc_dv);
        arrive(&shared.dout_empty[ring.stage]);
        ring.advance(), q_ring.advance();
        if (flags & kLast) break;
        look();
        begin_columns(dp, shared.minus_delta[ring.stage]);
        wgmma_begin();
        add_scores<T, kVHeadDim, kWideTile, kWideTile>(dp, shared.v, shared.dout[ring.stage]);
        wgmma_commit();
        wgmma_wait<0>(dp);
      }
      arrive(&shared.kv_empty);
    }
    const int2 mine_done = shared.warp_tile[4 + me().warp];
    const Share share = grads.claim(mine_done.x, mine_done.y, 1, size);
    grads.template bring<T, 1>(acc_dv, 1.f, share, mine_done.x, mine_done.y, size);
    grads.release(mine_done.x, mine_done.y, 1, share, size);
  }
  barrier_wait(&shared.ds_empty[ds_ring.stage], ds_ring.parity ^ 1);
  tell_queries();
}

// dq (q_rows, num_heads, kHeadDim) = dq_accum * scale, rounded, of query tiles that several tiles of keys have in
// sight; 0 of those that none has. Where Dq is float, dq is added to what is there. A block of the size of a warpgroup
// reads the accumulators as one left them. Bound by memory.
// Launch: grid (stats_rows / 64, num_heads), block 128.
template <typename Dq, int kHeadDim>
__global__ void __launch_bounds__(128) thd_attn_round_wide_sm90(
    Dq* __restrict__ dq, const float4* __restrict__ dq_accum, float scale, const int* __restrict__ shares,
    BackwardSize size) {
  const int count = shares[blockIdx.x];
  if (count == 1 || (sizeof(Dq) == sizeof(float) && count == 0)) return;
  if (count == 0) scale = 0.f;
  #pragma unroll
  for (int piece = 0; piece < kPieces<kHeadDim>; ++piece) {
    const size_t block = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    const float4* const in = dq_accum + (block * kPieces<kHeadDim> + piece) * (kPieceFloats / 4) + threadIdx.x;
    float acc[kSlab / 8][4];
    #pragma unroll
    for (int n = 0; n < kSlab / 8; ++n) {
      const float4 x = in[n * 128];
      acc[n][0] = x.x, acc[n][1] = x.y, acc[n][2] = x.z, acc[n][3] = x.w;
    }
    bring_dq<kHeadDim>(dq, acc, scale, blockIdx.x * 64, blockIdx.y, piece * kSlab, size);
  }
}

// Gradients of query and key tiles of wide heads.
//
// Accumulators of dk and of dv for 64 keys do not both fit the registers of one warpgroup. So a persistent thread block
// owns only 64 key rows of one kv head at a time, and its warpgroups divide the work by what they accumulate: the key
// role computes probabilities and dk, the value role score gradients and dv, the query role dq. Probabilities, and then
// score gradients in the same memory, pass from one to the other through shared memory. With 64 keys a block, dq has
// twice as many shares as in thd_attn_bwd_sm90; they are added in any order, without claims, to accumulators that are
// zero at first. Bound by the bandwidth of shared memory, and by the additions to dq in the L2 cache.
//
// The contract is that of thd_attn_bwd_sm90 without kDeterministic, for head dims that are multiples of 64, except that
// dq_accum is zero and that thd_attn_round_wide_sm90 makes dq of it; maps of boxes of 64 rows.
// kWithDq: without it, for the same bits on every run, thd_attn_bwd_dq_sm90 computes dq.
// Launch: grid at most num_tiles * splits and one block per multiprocessor, block 512, shared memory kSharedBytes.
template <typename T, typename Dq, typename Grad, bool kCaps, int kHeadDim, int kVHeadDim, int kQStages,
          int kDoutStages, bool kWithDq, bool kKeysInRegisters, int kKeyRegisters, int kValueRegisters,
          int kSharedBytes>
__global__ void __launch_bounds__(512, 1) thd_attn_bwd_wide_sm90(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout, Dq* __restrict__ dq,
    const Gradients<Grad> grads, Logits<kCaps> logits, float* __restrict__ dq_accum,
    const float* __restrict__ stats, const int2* __restrict__ query_ranges, const int* __restrict__ shares,
    const int* __restrict__ tile_order, int* __restrict__ counter, Pairs packs, BackwardSize size) {
  if (!packs.has_this()) return;
  using Shared = WideShared<kHeadDim, kVHeadDim, kQStages, kDoutStages, kWithDq>;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (warpgroup == 0) {
    registers_give<24>();
    if (threadIdx.x < kWarp)
      produce_wide(shared, &map_q, &map_k, &map_v, &map_dout, stats, query_ranges, shares, tile_order, counter, size);
  } else if (warpgroup == 1) {
    registers_take<kKeyRegisters>();
    serve_wide_keys<kKeysInRegisters, T>(shared, grads, size, logits);
  } else if (warpgroup == 2) {
    registers_take<kValueRegisters>();
    serve_wide_values<T>(shared, grads, size, logits);
  } else {
    registers_give<64>();
    if constexpr (kWithDq) serve_wide_queries<T>(shared, dq, dq_accum, size, logits.scale);
  }
}
