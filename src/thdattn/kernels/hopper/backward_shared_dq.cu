// The Hopper attention backward for head dims 192/128 (sm_90a): two warpgroups compute all products. Begin to read at
// the end, with the kernel thd_attn_bwd_shared_dq_sm90. backward_tiles.cuh has the producer, and dq_panels.cuh adds
// partials of dq.

#pragma once

#include "kernels/hopper/backward_tiles.cuh"

// Progress of a warpgroup, in one register: steps, exchanges of score gradients, key tiles and claims of dq so far, and
// whether a step is the last.
struct Progress {
  u32 steps : 2, exchanges : 1, tiles : 1, claims : 1, last : 1;
};

// One of the two warpgroups: the first 64 keys of the tile (side 0), or the last, and every second panel of dq.
template <typename T, typename Dq, typename Grad, typename Shared, bool kCaps>
__device__ __forceinline__ void run_warpgroup(Shared& shared, int side, Dq* dq, Gradients<Grad> grads,
                                              BackwardSize size, Logits<kCaps> logits) {
  constexpr int kHeadDim = Shared::kHeadDim, kVHeadDim = Shared::kVHeadDim;
  constexpr int kTileM = Shared::kTileM, kTileN = Shared::kTileN, kCols = Shared::kPanelCols;
  constexpr int kScoreQueries = Shared::kScoreQueries, kBlocks = kScoreQueries / 8;
  static_assert(kHeadDim % kSlab == 0 && kVHeadDim % kSlab == 0, "tiles must have slabs of 64 columns");
  static_assert(kTileM == 64 && Shared::kStages == 2 && Shared::kDsStages == 1, "Progress counts these stages");
  static_assert(Shared::kDqStages == Shared::kPanels && Shared::kPanels % 2,
                "each panel has a buffer, and the warpgroups take turns at an odd number of panels");
  auto mine = [&](const unsigned char* tile) { return tile + opaque(side) * 64 * kRowBytes; };
  Progress done = {};
  u32 stage = 0, flags;                               // of a step
  auto arrive = [&](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  auto step = [&]() -> const Step& { return shared.step[done.steps]; };
  auto look = [&] {
    barrier_wait(&shared.full[stage], done.steps / 2);
    flags = __shfl_sync(0xffffffffu, step().flags, 0);
  };
  auto advance = [&] { ++done.steps; stage = uniform(done.steps % 2); };
  auto sees = [&] { return flags & kSees << 2 * side; };
  auto wait_for_dscore = [&] { barrier_wait(&shared.ds_empty[0], done.exchanges ^ 1); };
  auto hand_over = [&] { publish_to_async(); __syncwarp(); arrive(&shared.ds_full[0]); };
  // dq = dS k of a step. Both warpgroups hand over their score gradients, and take turns at two of the three panels, or
  // one. Each product waits for all before it, as there are no registers for the operands of those.
  auto write_panels = [&] {
    const Step& of = step();
    barrier_wait(&shared.ds_full[0], done.exchanges);
    #pragma unroll 1
    for (int panel = done.claims ^ side; panel < Shared::kPanels; panel += 2) {
      float acc[kCols / 8][4];
      multiply_keys<T, kTileN, kHeadDim>(acc, shared.ds[0], shared.k, panel * kCols);
      if (panel + 2 >= Shared::kPanels) {
        if (of.flags & kLast) arrive(&shared.kv_empty);
        arrive(&shared.ds_empty[0]);
      }
      Ring<Shared::kPanels> buffer = {(u32)panel, done.claims};
      write_panel(shared, dq, acc, of, buffer, of.row, panel * kCols, size, logits.scale);
    }
    if (has_partial(of.flags)) ++done.claims;
    ++done.exchanges;
  };
  auto pass = [&] {                                   // no query sees one of these 64 keys
    arrive(&shared.empty[stage]);
    if (flags & (kSees | kSees << 2)) {
      wait_for_dscore();
      store_no_dscore(shared, 0, side);
      hand_over();
      write_panels();
    } else if (flags & kLast) {
      arrive(&shared.kv_empty);
    }
    advance();
  };

  while (true) {
    look();
    if (flags & kEnd) break;
    const auto [warp, lane] = me();
    int2& warp_tile = shared.warp_tile[side * 4 + warp];
    if (lane == 0) warp_tile = {step().tile * kTileN + side * 64 + warp * 16, step().head / size.group};
    __syncwarp();
    float acc_dk[kHeadDim / 8][4] = {}, acc_dv[kVHeadDim / 8][4] = {};
    if (flags & kNothing) {
      arrive(&shared.empty[stage]);
      advance();
    } else {
      barrier_wait(&shared.kv_full, done.tiles);
      ++done.tiles;
    }
    done.last = (flags & kNothing) != 0;
    while (!done.last) {
      look();
      done.last = (flags & kLast) != 0;
      if (!sees()) { pass(); continue; }
      // dP begins at -delta, as scores begin at -lse.
      float p[kBlocks][4];
      auto start_p = [&](int first) {
        begin_scores<kCaps>(p, shared.minus_lse[stage] + first);
        wgmma_begin();
        add_scores<T, kHeadDim, kTileN, kTileM>(p, mine(shared.k), shared.q[stage] + first * kRowBytes);
        wgmma_commit();
      };
      // Adds the queries from `first` on to dv and dk, without waiting for these products. Their scores are being
      // computed.
      auto add_queries = [&](int first) {
        // Probabilities are transposed. With capped logits they are rounded here, and p becomes their product with
        // slopes.
        u32 probability[1][kScoreQueries / 16][4], dscore[1][kScoreQueries / 16][4];
        const float* const minus_lse = shared.minus_lse[stage] + first;
        const bool masked = flags & kMasked << 2 * side;
        auto hide = [&](float hidden) {
          if (masked) hide_keys(p, shared.range + side * 64 + me().warp * 16, step().row + first, hidden);
        };
        wgmma_wait<0>(p);
        if constexpr (kCaps) {
          const float farthest = distance(p);
          hide(-kInfinity);
          take_weights<T>(p, probability[0], logits, logits.way_for(farthest, masked), minus_lse);
        } else {
          take_exponentials(p, logits, minus_lse);
          hide(0.f);
        }
        pin(p);
        // dP becomes dS. P stays float32 until then: if it were rounded first, dS would be rounded twice.
        const unsigned char* const dout = shared.dout[stage] + first * kRowBytes;
        float dp[kBlocks][4];
        begin_columns(dp, shared.minus_delta[stage] + first);
        wgmma_begin();
        add_scores<T, kVHeadDim, kTileN, kTileM>(dp, mine(shared.v), dout);
        wgmma_commit();
        wgmma_wait<0>(dp);
        #pragma unroll
        for (int i = 0; i < 4 * kBlocks; ++i) dp[i / 4][i % 4] *= p[i / 4][i % 4];
        if constexpr (!kCaps) round_to_operand<T>(probability, *(float(*)[1][kBlocks][4])&p);
        round_to_operand<T>(dscore, *(float(*)[1][kBlocks][4])&dp);

        // dv += P^T dout and dk += dS^T q start. Meanwhile, dS is handed over.
        wgmma_begin();
        start_weighted_rows<T, kVHeadDim, kTileM>(acc_dv, probability, dout);
        start_weighted_rows<T, kHeadDim, kTileM>(acc_dk, dscore, shared.q[stage] + first * kRowBytes);
        wgmma_commit();
        if (first == 0) wait_for_dscore();
        store_dscore(shared, 0, side, first, dscore);
      };
      auto finish = [&] { wgmma_wait<0>(acc_dv); pin(acc_dk); };
      start_p(0);
      while (true) {
        #pragma unroll
        for (int next = kScoreQueries; next < kTileM; next += kScoreQueries) {
          add_queries(next - kScoreQueries);
          finish();
          start_p(next);
        }
        add_queries(kTileM - kScoreQueries);
        hand_over();
        finish();
        arrive(&shared.empty[stage]);
        write_panels();
        advance();
        if (done.last) break;
        barrier_wait(&shared.full[stage], done.steps / 2);
        flags = step().flags;
        if (!sees()) break;
        done.last = (flags & kLast) != 0;
        start_p(0);
      }
    }
    grads.template finish<T>(shared.warp_tile[side * 4 + me().warp], acc_dk, logits.scale, acc_dv, size);
  }
}

// Gradients of query and key tiles. It computes what thd_attn_bwd_sm90 does, for head dims whose accumulators of dk and
// dv leave no registers to a query side.
//
// Two warpgroups own 64 of the 128 keys each, and also multiply score gradients with keys. Each finds the score
// gradients of both in shared memory, and computes every second panel of dq. Each panel has a buffer, so that none
// waits until another has been sent. Bound by sending the panels, by the bandwidth of shared memory, and by the tensor
// cores.
//
// The contract is that of thd_attn_bwd_sm90.
// Launch: grid at most num_tiles * splits and one thread block per multiprocessor, block 384, shared memory
// kSharedBytes.
template <typename T, typename Dq, typename Grad, bool kCaps, int kHeadDim, int kVHeadDim, int kStages,
          int kScoreQueries, int kPanelCols, bool kDeterministic, int kSharedBytes, typename... Tree>
__global__ void __launch_bounds__(384, 1) thd_attn_bwd_shared_dq_sm90(
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
  using Shared = BackwardShared<kHeadDim, kVHeadDim, 64, kStages, kScoreQueries, kScoreQueries, kPanelCols,
                                kHeadDim / kPanelCols, 1, 8>;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (warpgroup == 0) {
    registers_give<24>();
    if (threadIdx.x < kWarp)
      produce_backward<false>(
          shared, &map_q, &map_k, &map_v, &map_dout, stats, query_ranges, num_partials, tile_order, counter, size);
    else if (threadIdx.x < 2 * kWarp)
      claim_partials<kDeterministic, kTrees>(
          shared, dq_accum, key_ranges, semaphores, num_partials, size, trees);
    else if (threadIdx.x == 2 * kWarp)
      send_partials(shared, dq_accum, semaphores);
    else if (threadIdx.x >= 3 * kWarp)
      release_partials<kDeterministic>(shared, dq_accum, semaphores),
          clear_queries<kHeadDim, 64>(dq, num_partials, size);
  } else {
    registers_take<240>();
    run_warpgroup<T>(shared, warpgroup - 1, dq, grads, size, logits);
  }
}
