// The Hopper attention backward for head dims up to 128 (sm_90a). Begin to read at the end, with the kernel
// thd_attn_bwd_sm90. This file has the key side, backward_tiles.cuh the producer, and dq_panels.cuh the query side.

#pragma once

#include "kernels/hopper/backward_tiles.cuh"

// Turns dP into dS = P slope dP. p holds probabilities or, with capped logits, scores, which become probabilities.
template <int kBlocks>
__device__ __forceinline__ void take_gradients(float (&p)[kBlocks][4], float (&dp)[kBlocks][4], Logits<false>, int,
                                               const float*) {
  #pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) dp[i / 4][i % 4] *= p[i / 4][i % 4];
}
template <int kBlocks>
__device__ __forceinline__ void take_gradients(float (&p)[kBlocks][4], float (&dp)[kBlocks][4], Logits<true> logits,
                                               int way, const float* minus_lse) {
  logits.go(way, [&](auto logit, auto slope) {
    pin(p);                                           // keeps the compiler from hoisting code out of the branches
    pin(dp);
    const float2* const mine = (const float2*)minus_lse + threadIdx.x % 4;
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float2 x = mine[n * 4];
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float a = logit(p[n][e]);
        dp[n][e] *= slope(p[n][e], a);
        p[n][e] = exp2_fast(a + (e % 2 ? x.y : x.x));
        dp[n][e] *= p[n][e];
      }
    }
  });
}

// The key side, one warpgroup: the first 64 keys of the tile (side 0), or the last. kInRegisters: it reads them and
// their values from registers, as shared memory is busy.
template <typename T, bool kInRegisters, typename Grad, typename Shared, bool kCaps>
__device__ __forceinline__ void run_dkdv_warpgroup(Shared& shared, int side, Gradients<Grad> grads, BackwardSize size,
                                           Logits<kCaps> logits) {
  constexpr int kHeadDim = Shared::kHeadDim, kVHeadDim = Shared::kVHeadDim;
  constexpr int kTileM = Shared::kTileM, kTileN = Shared::kTileN, kScoreQueries = Shared::kScoreQueries;
  constexpr int kDpQueries = Shared::kDpQueries, kBlocks = kDpQueries / 8, kSteps = kDpQueries / 16;
  // dP starts before dv and dk; with float32 gradients there are no registers for it.
  constexpr bool kAhead = kCaps && sizeof(Grad) == 2;
  Ring<Shared::kStages> ring = {0, 0};
  u32 kv_parity = 0;
  auto arrive = [&](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  u32 flags;
  auto step = [&]() -> const Step& { return shared.step[ring.double_stage()]; };
  auto look = [&] {
    barrier_wait(&shared.full[ring.stage], ring.parity);
    flags = __shfl_sync(0xffffffffu, step().flags, 0);
  };
  auto sees = [&] { return flags & kSees << 2 * side; };
  // Every step is handed over to the query side.
  auto wait_for_stage = [&] { barrier_wait(&shared.ds_empty[ring.stage], ring.parity ^ 1); };
  auto hand_over = [&] {
    publish_to_async();
    __syncwarp();
    arrive(&shared.ds_full[ring.stage]);
  };
  auto pass = [&] {                                   // no query sees one of these 64 keys
    if (flags & kLast) arrive(&shared.kv_empty);
    wait_for_stage();
    store_no_dscore(shared, ring.stage, side);
    hand_over();
    arrive(&shared.empty[ring.stage]);
    ring.advance();
  };

  while (true) {
    look();
    if (flags & (kNothing | kEnd)) { wait_for_stage(); hand_over(); }
    if (flags & kEnd) break;
    const auto [warp, lane] = me();
    int2& warp_tile = shared.warp_tile[side * 4 + warp];
    if (lane == 0) warp_tile = {step().tile * kTileN + side * 64 + warp * 16, step().head / size.group};
    __syncwarp();
    float acc_dk[kHeadDim / 8][4] = {}, acc_dv[kVHeadDim / 8][4] = {};
    if (flags & kNothing) {
      arrive(&shared.empty[ring.stage]);
      ring.advance();
    } else {
      barrier_wait(&shared.kv_full, kv_parity);
      kv_parity ^= 1;
    }
    ScoreRows<T, kHeadDim, kTileN, kInRegisters> keys;
    ScoreRows<T, kVHeadDim, kTileN, kInRegisters> values;
    if (kInRegisters) keys.load(shared.keys_of(side)), values.load(shared.values_of(side));
    bool last = flags & kNothing;
    while (!last) {
      look();
      last = flags & kLast;
      if (!sees()) { pass(); continue; }
      // dP begins at -delta, as scores begin at -lse.
      float p[kScoreQueries / 8][4];
      auto start_p = [&](int first) {
        if (!kCaps) begin_columns(p, shared.minus_lse[ring.stage] + first);
        wgmma_begin();
        if (!kInRegisters) keys.load(shared.keys_of(side));     // not kept, as registers are short
        keys.template start<!kCaps, kTileM>(p, shared.q_from(ring.stage, first));
        wgmma_commit();
      };
      // Adds the queries from `first` on to dv and dk, without waiting for these products. Their scores are being
      // computed.
      auto add_queries = [&](int first) {
        // dP becomes dS. P stays float32 until then: if it were rounded first, dS would be rounded twice.
        float dp[kBlocks][4];
        auto start_dp = [&](int row) {
          begin_columns(dp, shared.minus_delta[ring.stage] + row);
          wgmma_begin();
          if (!kInRegisters) values.load(shared.values_of(side));
          values.template start<true, kTileM>(dp, shared.dout_from(ring.stage, row));
          wgmma_commit();
        };
        u32 rounded[kScoreQueries / 16][4];                // P
        if (kCaps) start_dp(first);
        wgmma_wait<kCaps>(p);
        const float farthest = kCaps ? distance(p) : 0.f;
        if constexpr (!kCaps) take_exponentials(p, logits, nullptr);
        const bool masked = flags & kMasked << 2 * side;
        if (masked)
          hide_keys(p, shared.range + side * 64 + me().warp * 16, step().row + first, kCaps ? -kInfinity : 0.f);
        pin(p);
        const int way = logits.way_for(farthest, masked);
        #pragma unroll
        for (int row = first; row < first + kScoreQueries; row += kDpQueries) {
          const bool ends = row + kDpQueries == first + kScoreQueries;
          u32 (&probability)[1][kSteps][4] = *(u32(*)[1][kSteps][4])&rounded[(row - first) / 16], dscore[1][kSteps][4];
          if (!kAhead && (!kCaps || row > first)) start_dp(row);
          if (!kAhead || row == first) wgmma_wait<0>(dp);
          else wgmma_wait<2>(dp);
          if (flags & kLast && row + kDpQueries == kTileM) arrive(&shared.kv_empty);
          float (&mine)[1][kBlocks][4] = *(float(*)[1][kBlocks][4])&p[(row - first) / 8];
          take_gradients(mine[0], dp, logits, way, shared.minus_lse[ring.stage] + row);
          round_to_operand<T>(probability, mine);
          round_to_operand<T>(dscore, *(float(*)[1][kBlocks][4])&dp);

          // dv += P^T dout and dk += dS^T q start after the next dP. Meanwhile, dS is handed over.
          if (kAhead && !ends) start_dp(row + kDpQueries);
          wgmma_begin();
          start_weighted_rows<T, kVHeadDim, kTileM>(acc_dv, probability, shared.dout_from(ring.stage, row));
          wgmma_commit();
          start_weighted_rows<T, kHeadDim, kTileM>(acc_dk, dscore, shared.q_from(ring.stage, row));
          wgmma_commit();
          if (row == 0) wait_for_stage();
          store_dscore(shared, ring.stage, side, row, dscore);
        }
      };
      start_p(0);
      while (true) {
        ring.stage = uniform(ring.stage);
        #pragma unroll
        for (int next = kScoreQueries; next < kTileM; next += kScoreQueries) {
          add_queries(next - kScoreQueries);
          wgmma_wait<1>(acc_dv);
          start_p(next);
          wgmma_wait<1>(acc_dk);
        }
        add_queries(kTileM - kScoreQueries);
        hand_over();
        // The scores of the next step start when dv is done, while dk is computed. After the last step comes one of
        // other keys, or the end.
        const bool was_last = flags & kLast;
        const u32 stage = ring.stage;
        ring.advance();
        barrier_wait(&shared.full[ring.stage], ring.parity);
        flags = step().flags;
        if (was_last || !sees()) {
          wgmma_wait<0>(acc_dk);
          pin(acc_dv);
          arrive(&shared.empty[stage]);
          last = was_last || flags & kLast;
          if (!was_last) pass();
          break;
        }
        wgmma_wait<1>(acc_dv);
        start_p(0);
        wgmma_wait<1>(acc_dk);
        arrive(&shared.empty[stage]);
      }
    }
    grads.template finish<T>(shared.warp_tile[side * 4 + me().warp], acc_dk, logits.scale, acc_dv, size);
  }
}

// Gradients of query and key tiles with wgmma and TMA. It computes what thd_attn_bwd does, for head dims whose
// accumulators of dk and dv fit the registers of one warpgroup.
//
// One persistent thread block per multiprocessor owns a tile of 128 key rows of one kv head at a time. Two warpgroups,
// the key side, own 64 keys each. They compute scores transposed, so that probabilities and score gradients are already
// in registers as operands of dv and dk. A third warpgroup, the query side, gets the score gradients through shared
// memory and multiplies them with the keys: dq. It works on a step while the key side works on the next one. Each warp
// of the first warpgroup has one duty: to produce, to claim partials of dq, to send them, or to signal their arrival.
// So none of these waits delays a product.
//
// dq of a query tile is the sum of the partials of all key tiles that see it. The first partial is stored, and others
// are added in the L2 cache. The thread block with the last one reads the sum, adds its own partial, and stores dq,
// rounded. So nothing is cleared before, and no rounding kernel follows. If Dq is float, the result is added to dq.
// Bound by the bandwidth of shared memory and by the tensor cores: 5 matrix products per step.
//
// The contract is that of thd_attn_bwd, except that padding rows of q, k, v and dout must hold finite numbers.
// stats from thd_attn_delta, with stats_rows a multiple of kTileM
// num_partials (stats_rows / kTileM) from thd_attn_count_partials_sm90
// dq_accum (num_heads, stats_rows / 64, panels): workspace
// semaphores (num_heads, stats_rows / 64), and those of grads: zero
// maps: boxes of kTileM rows of q and dout, and of 128 rows of k and v
// tile_order: see scheduled_tile; counter: one int, zero, and zero again after the kernel
// kDeterministic: every run gives the same bits. A head split is a whole group, tiles come in decreasing order, and no
// thread block waits for one with later work.
// trees_or_none: for a pack with prefix trees, if kDeterministic
// Launch: grid at most num_tiles * splits and one thread block per multiprocessor, block 512, shared memory
// kSharedBytes.
template <typename T, typename Dq, typename Grad, bool kCaps, int kHeadDim, int kVHeadDim, int kTileM, int kStages,
          int kScoreQueries, int kDpQueries, bool kInRegisters, int kPanelCols, int kDqStages, int kQueryRegisters,
          bool kDeterministic, int kSharedBytes, typename... Tree>
__global__ void __launch_bounds__(512, 1) thd_attn_bwd_sm90(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout, Dq* __restrict__ dq,
    const Gradients<Grad> grads, Logits<kCaps> logits, float* __restrict__ dq_accum,
    int* __restrict__ semaphores,
    const float* __restrict__ stats, const int2* __restrict__ key_ranges, const int2* __restrict__ query_ranges,
    const int* __restrict__ num_partials, const int* __restrict__ tile_order, int* __restrict__ counter,
    PackFilter filter, BackwardSize size, Tree... trees_or_none) {
  if (!filter.accepts()) return;
  constexpr bool kTrees = sizeof...(Tree) > 0;
  const Trees trees = {trees_or_none...};
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages, kScoreQueries, kDpQueries, kPanelCols, kDqStages>;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  static_assert(kQueryRegisters % 16 == 0, "setmaxnreg takes multiples of 8, also of what is left to two warpgroups");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (warpgroup == 0) {
    registers_give<32>();
    if (threadIdx.x < kWarp)
      produce_backward<!kDeterministic>(
          shared, &map_q, &map_k, &map_v, &map_dout, stats, query_ranges, num_partials, tile_order, counter, size);
    else if (threadIdx.x < 2 * kWarp)
      claim_partials<kDeterministic, kTrees>(
          shared, dq_accum, key_ranges, semaphores, num_partials, size, trees);
    else if (threadIdx.x == 2 * kWarp)
      send_partials(shared, dq_accum, semaphores);
    else if (threadIdx.x >= 3 * kWarp)
      release_partials<kDeterministic>(shared, dq_accum, semaphores),
          clear_queries<kHeadDim, kTileM>(dq, num_partials, size);
  } else if (warpgroup == 3) {
    registers_give<kQueryRegisters>();
    run_dq_warpgroup<T>(shared, dq, size, logits.scale);
  } else {
    registers_take<240 - kQueryRegisters / 2>();
    run_dkdv_warpgroup<T, kInRegisters>(shared, warpgroup - 1, grads, size, logits);
  }
}
