// The Hopper attention backward for head dims beyond 192/128 (sm_90a): one warpgroup each for dk, dv and dq. Begin to
// read at the end, with the kernel thd_attn_bwd_by_gradient_sm90. thd_attn_round_dq_sm90 rounds its dq.
// by_gradient_tiles.cuh has the producer, and cluster.cuh what two thread blocks exchange.

#pragma once

#include "kernels/hopper/by_gradient_tiles.cuh"

// Cycles between two additions of a thread in a cluster. Additions leave a multiprocessor slower than four warps issue
// them, and would delay the other roles' accesses to shared memory.
constexpr u32 kCyclesPerAdd = 48;

// The query role, one warpgroup: dq = dS k, one panel at a time; in a cluster one panel, from the keys of both blocks.
template <typename T, typename Shared, typename Dq>
__device__ __forceinline__ void run_dq_warpgroup(Shared& shared, Dq* dq, float* dq_accum, BackwardSize size,
                                                   float softmax_scale) {
  constexpr bool kCluster = Shared::kCluster;
  constexpr int kHeadDim = Shared::kHeadDim, kCols = Shared::kPanelCols, kPanels = kHeadDim / kCols;
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  Ring<Shared::kDsStages> ring = {0, 0};

  while (true) {
    if constexpr (kCluster) barrier_wait(&shared.all_ds_full[ring.stage], ring.parity);
    else barrier_wait(&shared.ds_full[ring.stage], ring.parity);
    const Step step = shared.ds_step[ring.stage];
    __syncwarp();
    if (step.flags & kEnd) break;
    const size_t block = (size_t)step.head * (size.stats_rows / 64) + step.row / 64;
    #pragma unroll 1
    for (int n = 0; n < kPanels / Shared::kClusterBlocks; ++n) {
      float acc[kCols / 8][4];
      multiply_keys<T, kTile * Shared::kClusterBlocks, kHeadDim>(acc, shared.ds[ring.stage], shared.k, n * kCols);
      if (n == kPanels / Shared::kClusterBlocks - 1) {
        if (step.flags & kLast) arrive(&shared.kv_empty);
        arrive(&shared.ds_empty[ring.stage]);
        if (kCluster && me().lane == 0) arrive_in_other(&shared.ds_empty[ring.stage]);
      }
      const int first_col = (kCluster ? rank_in_cluster() : n) * kCols;
      if (step.flags & kAlone) {
        write_dq<kHeadDim>(dq, acc, softmax_scale, step.row, step.head, first_col, size);
        continue;
      }
      float* const dst = dq_accum + (block * kHeadDim + first_col) * 64 + threadIdx.x % 128 * 4;
      const u32 begin = clock();
      #pragma unroll
      for (int i = 0; i < kCols / 8; ++i) {
        while (kCluster && (u32)clock() - begin < i * kCyclesPerAdd);
        add_quad(dst + i * 512, make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
      }
    }
    ring.advance();
  }
}

// The key role, one warpgroup: probabilities, and dk = dS^T q.
template <typename T, typename Shared, typename Grad, bool kCaps>
__device__ __forceinline__ void run_dk_warpgroup(Shared& shared, Gradients<Grad> grads, BackwardSize size,
                                                Logits<kCaps> logits) {
  constexpr int kHeadDim = Shared::kHeadDim, kBlocks = kTile / 8;
  using DsRing = Ring<Shared::kDsStages>;
  Ring<Shared::kQStages> ring = {0, 0};               // of query tiles
  DsRing ds_ring = {0, 0};
  u32 kv_parity = 0, flags;
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  auto look = [&] {
    barrier_wait(&shared.q_full[ring.stage], ring.parity);
    flags = __shfl_sync(0xffffffffu, shared.q_step[ring.stage].flags, 0);
  };
  auto start_dk = [&](float (&acc)[kHeadDim / 8][4]) {
    const u64 a = descriptor(shared.ds[ds_ring.stage], 16);
    const u64 b = descriptor(shared.q[ring.back(1).stage], kTile * kRowBytes);
    #pragma unroll
    for (int c = 0; c < kHeadDim; c += kMostCols<kHeadDim>)
      #pragma unroll
      for (int i = 0; i < kTile / 16; ++i)
        Wgmma<T, kMostCols<kHeadDim>>::template shared<0, 1>(columns<kMostCols<kHeadDim>>(acc, c), a + i * 32 / 16,
                                                             b + (c * kTile * 2 + i * 16 * kRowBytes) / 16, 1);
    wgmma_commit();
  };
  auto release = [&](u32 stage) {
    shared.give_back_q(stage);
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
      warp_tile = {step.tile * kTile + warp * 16, step.head / size.group};
    }
    __syncwarp();
    float acc_dk[kHeadDim / 8][4] = {};
    if (flags & kNothing) {
      shared.give_back_q(ring.stage);
      ring.advance();
    } else {
      ScoreRows<T, kHeadDim, kTile, Shared::kTwoBlocks> keys;
      if constexpr (Shared::kCluster) {
        keys.load(shared.q[ring.stage]);
        ring.advance();
        look();
      } else {
        barrier_wait(&shared.kv_full, kv_parity);
        keys.load(shared.k);
      }
      float p[kBlocks][4];
      auto start_p = [&] {
        begin_scores<kCaps>(p, shared.minus_lse[ring.stage]);
        wgmma_begin();
        keys.template start<true, kTile>(p, shared.q[ring.stage]);
        wgmma_commit();
      };
      // Computes probabilities from the saved lse, transposed. Every thread writes them for its counterpart in the
      // value role.
      auto hand_over = [&](DsRing to) {
        const auto [warp, lane] = me();
        take_exponentials(p, logits, shared.minus_lse[ring.stage]);
        if (flags & kMasked) hide_keys(p, shared.range[kv_parity] + warp * 16, shared.q_step[ring.stage].row);
        shared.wait_for_stage(to);
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          shared.probabilities(to.stage, warp, n)[lane] = make_float4(p[n][0], p[n][1], p[n][2], p[n][3]);
        if (kCaps && warp == 0 && lane == 0) shared.p_q_stage[to.stage] = ring.stage;
        __syncwarp();
        arrive(&shared.p_full[to.stage]);
        ring.advance();
      };
      start_p();
      wgmma_wait<0>(p);
      // A product has used the keys, so they are in registers now.
      if constexpr (Shared::kCluster) shared.give_back_q(ring.back(1).stage);
      hand_over(ds_ring);
      while (!(flags & kLast)) {
        // Start the scores of the next step, and after them dk += dS^T q.
        look();
        start_p();
        barrier_wait(&shared.ds_full[ds_ring.stage], ds_ring.parity);
        wgmma_begin();
        start_dk(acc_dk);
        wgmma_wait<1>(p);
        DsRing next = ds_ring;
        next.advance();
        hand_over(next);
        wgmma_wait<0>(acc_dk);
        release(ring.back(2).stage);
      }
      if constexpr (!Shared::kCluster) arrive(&shared.kv_empty);
      barrier_wait(&shared.ds_full[ds_ring.stage], ds_ring.parity);
      wgmma_begin();
      start_dk(acc_dk);
      wgmma_wait<0>(acc_dk);
      release(ring.back(1).stage);
      kv_parity ^= 1;
    }
    grads.template finish_one<T, 0>(shared.warp_tile[me().warp], acc_dk, logits.scale, size);
  }
}

// Hands over the score gradients of a step, whose number is that in dout's ring. Each warp stores its own 16 rows, and
// also sends them to the other thread block.
template <typename Shared>
__device__ __forceinline__ void hand_over_dscore(Shared& shared, u32 stage, const Step& step) {
  const auto [warp, lane] = me();
  if (warp == 0 && lane == 0) shared.ds_step[stage] = step;
  publish_to_async();
  __syncwarp();
  if (lane > 0) return;
  barrier_arrive(&shared.ds_full[stage]);
  if constexpr (Shared::kCluster && Shared::kWithDq) {
    u64* const all = &shared.all_ds_full[stage];
    if (step.flags & kEnd) {
      barrier_arrive(all);
    } else {
      constexpr int kBytes = kDsBytes / 4;            // of a warp's rows
      unsigned char* const rows = shared.ds[stage] + warp * kBytes;
      barrier_expect(all, kBytes);
      copy_to_other(rows + kDsBytes, rows, kBytes, all);
    }
  }
}

// The value role, one warpgroup: score gradients, and dv = P^T dout.
template <typename T, typename Shared, typename Grad, bool kCaps>
__device__ __forceinline__ void run_dv_warpgroup(Shared& shared, Gradients<Grad> grads, BackwardSize size,
                                                  Logits<kCaps> logits) {
  constexpr int kVHeadDim = Shared::kVHeadDim, kBlocks = kTile / 8;
  constexpr bool kOverlaps = kVHeadDim < 256, kAhead = kOverlaps && !kCaps;  // as registers allow
  Ring<Shared::kDoutStages> ring = {0, 0};
  Ring<Shared::kDsStages> ds_ring = {0, 0};
  u32 kv_parity = 0, flags;
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  auto look = [&] {
    barrier_wait(&shared.dout_full[ring.stage], ring.parity);
    flags = __shfl_sync(0xffffffffu, shared.dout_step[ring.stage].flags, 0);
  };

  while (true) {
    look();
    if (flags & kEnd) break;
    const auto [warp, lane] = me();
    if (lane == 0) {
      const Step& step = shared.dout_step[ring.stage];
      shared.warp_tile[4 + warp] = {step.tile * kTile + warp * 16, step.head / size.group};
    }
    __syncwarp();
    float acc_dv[kVHeadDim / 8][4] = {};
    if (flags & kNothing) {
      shared.give_back_dout(ring.stage);
      ring.advance();
    } else {
      barrier_wait(&shared.kv_full, kv_parity);
      kv_parity ^= 1;
      float dp[kBlocks][4];
      auto start_dp = [&] {
        begin_columns(dp, shared.minus_delta[ring.stage]);
        wgmma_begin();
        add_scores<T, kVHeadDim, kTile, kTile>(dp, shared.v, shared.dout[ring.stage]);
        wgmma_commit();
      };
      u32 probability[1][kBlocks / 2][4];
      auto start_dv = [&] {
        const unsigned char* const dout = shared.dout[ring.stage];
        wgmma_begin();
        #pragma unroll
        for (int c = 0; c < kVHeadDim; c += kMostCols<kVHeadDim>)
          start_weighted_rows<T, kMostCols<kVHeadDim>, kTile>(columns<kMostCols<kVHeadDim>>(acc_dv, c), probability,
                                                                 dout + c * kTile * 2);
        wgmma_commit();
      };
      auto finish_dv = [&] {
        wgmma_wait<0>(acc_dv);
        shared.give_back_dout(ring.back(1).stage);
      };
      start_dp();
      while (true) {
        // dv += P^T dout starts as soon as P has arrived. Meanwhile, dS is stored where P was, and the next dP begins.
        if constexpr (!kAhead) wgmma_wait<0>(dp);
        const auto [warp, lane] = me();
        barrier_wait(&shared.p_full[ds_ring.stage], ds_ring.parity);
        const float* const lse = shared.minus_lse[kCaps ? shared.p_q_stage[ds_ring.stage] : 0];
        const int quad_lane = lane % 4;
        auto make_dscore = [&](int n, float4 p) {
          float2 minus_lse = {};
          if constexpr (kCaps) minus_lse = ((const float2*)lse)[n * 4 + quad_lane];
          dp[n][0] *= p.x * logits.slope(p.x, minus_lse.x), dp[n][1] *= p.y * logits.slope(p.y, minus_lse.y);
          dp[n][2] *= p.z * logits.slope(p.z, minus_lse.x), dp[n][3] *= p.w * logits.slope(p.w, minus_lse.y);
        };
        float4 p[kBlocks];
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          p[n] = shared.probabilities(ds_ring.stage, warp, n)[lane];
          if constexpr (!kAhead) make_dscore(n, p[n]);
          probability[0][n / 2][n % 2 * 2] = pack<T>(p[n].x, p[n].y);
          probability[0][n / 2][n % 2 * 2 + 1] = pack<T>(p[n].z, p[n].w);
        }
        start_dv();
        if constexpr (kAhead) {
          wgmma_wait<1>(dp);
          #pragma unroll
          for (int n = 0; n < kBlocks; ++n) make_dscore(n, p[n]);
        }
        u32 dscore[1][kBlocks / 2][4];
        round_to_operand<T>(dscore, *(float(*)[1][kBlocks][4])&dp);
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < kBlocks / 2; ++i)
          store_matrices(shared.ds[ds_ring.stage] + (warp * 16 + lane % 16) * kRowBytes +
                             ((i * 2 + lane / 16) ^ lane % 8) * 16, dscore[0][i]);
        hand_over_dscore(shared, ds_ring.stage, shared.dout_step[ring.stage]);
        ds_ring.advance();
        ring.advance();
        if constexpr (!kOverlaps) finish_dv();
        if (flags & kLast) break;
        look();
        start_dp();
        if constexpr (kOverlaps) {
          wgmma_wait<1>(acc_dv);
          shared.give_back_dout(ring.back(1).stage);
        }
      }
      if constexpr (kOverlaps) finish_dv();
      arrive(&shared.kv_empty);
    }
    grads.template finish_one<T, 1>(shared.warp_tile[4 + me().warp], acc_dv, 1.f, size);
  }
  shared.wait_for_stage(ds_ring);
  hand_over_dscore(shared, ds_ring.stage, shared.dout_step[ring.stage]);
}

// dq (q_rows, num_heads, kHeadDim) = dq_accum * scale, rounded, for query tiles that several key tiles see. Tiles that
// none sees become 0. If Dq is float, the result is added to dq. A thread block of one warpgroup's size reads the
// accumulators as a warpgroup left them, whatever the columns of its panels. Bound by memory bandwidth.
// Launch: grid (stats_rows / 64, num_heads), block 128.
template <typename Dq, int kHeadDim>
__global__ void __launch_bounds__(128) thd_attn_round_dq_sm90(
    Dq* __restrict__ dq, const float4* __restrict__ dq_accum, float scale, const int* __restrict__ num_partials,
    BackwardSize size) {
  static_assert(kHeadDim % kSlab == 0, "panels of 64 columns must divide dq");
  const int count = num_partials[blockIdx.x];
  if (count == 1 || (sizeof(Dq) == sizeof(float) && count == 0)) return;
  if (count == 0) scale = 0.f;
  #pragma unroll
  for (int first_col = 0; first_col < kHeadDim; first_col += kSlab) {
    const size_t block = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    const float4* const in = dq_accum + (block * kHeadDim + first_col) * (64 / 4) + threadIdx.x;
    float acc[kSlab / 8][4];
    #pragma unroll
    for (int n = 0; n < kSlab / 8; ++n) {
      const float4 x = in[n * 128];
      acc[n][0] = x.x, acc[n][1] = x.y, acc[n][2] = x.z, acc[n][3] = x.w;
    }
    write_dq<kHeadDim>(dq, acc, scale, blockIdx.x * 64, blockIdx.y, first_col, size);
  }
}

// Gradients of query and key tiles of wide heads.
//
// Accumulators of dk and dv for 64 keys do not both fit the registers of one warpgroup. So a persistent thread block
// owns only 64 key rows of one kv head at a time, and its warpgroups divide the work by what they accumulate. The key
// role computes probabilities and dk, the value role score gradients and dv, and the query role dq. Probabilities, and
// then score gradients in the same memory, pass between roles through shared memory.
//
// With 64 keys per thread block, dq has twice as many partials as in thd_attn_bwd_sm90. Their additions in the L2 cache
// would bound the kernel. So if shared memory has room, two thread blocks form a cluster (kCluster) and perform the
// same steps with neighbouring key tiles. One loads the queries for both, and the other loads their gradients. They
// send each other score gradients, and each adds half of the columns of their common partial. Partials are added in any
// order, without claims, to accumulators that are zero at first. Bound by the bandwidth of shared memory, and then by
// the tensor cores.
//
// The contract is that of thd_attn_bwd_sm90 without kDeterministic, for head dims that are multiples of 64. But
// dq_accum must be zero, thd_attn_round_dq_sm90 computes dq from it, and maps have boxes of 64 rows.
// kWithDq: false for the same bits on every run; thd_attn_bwd_dq_sm90 then computes dq
// tile_order: of tiles of 64 * kBlocks keys; num_tiles: of 64 keys or, in clusters, of 128
// Launch: grid at most num_tiles * splits thread blocks or clusters, and one thread block per multiprocessor, block
// 512, shared memory kSharedBytes.
template <typename T, typename Dq, typename Grad, bool kCaps, int kHeadDim, int kVHeadDim, int kQStages,
          int kDoutStages, int kDsStages, bool kWithDq, int kBlocks, int kKeyRegisters, int kValueRegisters,
          int kQueryRegisters, int kSharedBytes>
__global__ void __launch_bounds__(512, 1) __cluster_dims__(kWithDq ? kBlocks : 1, 1, 1) thd_attn_bwd_by_gradient_sm90(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout, Dq* __restrict__ dq,
    const Gradients<Grad> grads, Logits<kCaps> logits, float* __restrict__ dq_accum,
    const float* __restrict__ stats, const int2* __restrict__ query_ranges, const int* __restrict__ num_partials,
    const int* __restrict__ tile_order, int* __restrict__ counter, PackFilter filter, BackwardSize size) {
  if (!filter.accepts()) return;
  using Shared =
      ByGradientShared<ByGradientTiles<kHeadDim, kVHeadDim, kQStages, kDoutStages, kDsStages, kWithDq, kBlocks>>;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  static_assert(kKeyRegisters % 8 == 0 && kValueRegisters % 8 == 0 && kQueryRegisters % 8 == 0 &&
                    kKeyRegisters + kValueRegisters + kQueryRegisters <= 512 - 24,
                "setmaxnreg takes multiples of 8, and the producer keeps at least 24");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if constexpr (Shared::kCluster) cluster_sync();
  if (warpgroup == 0) {
    registers_give<512 - kKeyRegisters - kValueRegisters - kQueryRegisters>();
    if (threadIdx.x < kWarp)
      produce_by_gradient(shared, &map_q, &map_k, &map_v, &map_dout, stats, query_ranges, num_partials, tile_order,
                          counter, size);
  } else if (warpgroup == 1) {
    registers_take<kKeyRegisters>();
    run_dk_warpgroup<T>(shared, grads, size, logits);
  } else if (warpgroup == 2) {
    registers_take<kValueRegisters>();
    run_dv_warpgroup<T>(shared, grads, size, logits);
  } else {
    registers_give<kQueryRegisters>();
    if constexpr (kWithDq) run_dq_warpgroup<T>(shared, dq, dq_accum, size, logits.scale);
  }
  if constexpr (Shared::kCluster) { __syncwarp(); cluster_sync(); }
}
