// dq alone on Hopper (sm_90a): a producer and two consumers. Begin to read at the end, with the kernel
// thd_attn_bwd_dq_sm90.
//
// It has the structure of the forward, so it uses the scheduler of backward_common.cuh with the sides exchanged: query
// tiles are its work, and the rows of a step are keys.

#pragma once

#include "kernels/hopper/backward_common.cuh"
#include "kernels/hopper/trees.cuh"

template <int kDim, int kVDim, int kN, int kAhead>
struct DqShared {
  static constexpr int kHeadDim = kDim, kVHeadDim = kVDim, kTileM = 128, kTileN = kN, kStages = kAhead;
  static constexpr int kQBytes = kTileBytes<kTileM, kHeadDim>, kDoutBytes = kTileBytes<kTileM, kVHeadDim>;
  static constexpr int kKBytes = kTileBytes<kTileN, kHeadDim>, kVBytes = kTileBytes<kTileN, kVHeadDim>;
  static_assert(kHeadDim % kSlab == 0 && kVHeadDim % kSlab == 0, "tiles must have slabs of 64 columns");
  static_assert(kTileN % 16 == 0, "score gradients are an operand of whole fragments of 16 keys");
  unsigned char q[kQBytes], dout[kDoutBytes];
  unsigned char k[kStages][kKBytes], v[kStages][kVBytes];
  u64 q_full, q_empty;
  u64 full[kStages], empty[kStages];
  Step step[kStages];

  __device__ __forceinline__ void init() {
    barrier_init(&q_full, 1), barrier_init(&q_empty, 8);
    for (int s = 0; s < kStages; ++s) barrier_init(&full[s], 1), barrier_init(&empty[s], 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// The producer, one warp. It loads every query tile of this thread block, and the key tiles between the first and the
// last that it sees. Of key tiles that trees hide it passes on the steps alone.
template <bool kTrees, typename Shared>
__device__ __forceinline__ void produce_dq(
    Shared& shared, const TensorMap* map_q, const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_dout,
    const int2* key_ranges, const int* tile_order, int* counter, int group, BackwardSize size, Trees trees) {
  constexpr int kHeadDim = Shared::kHeadDim, kVHeadDim = Shared::kVHeadDim;
  constexpr int kTileM = Shared::kTileM, kTileN = Shared::kTileN;
  Ring<Shared::kStages> ring = {0, 1};
  u32 q_parity = 1;
  schedule_steps<kTileM / 64, kTileN>(key_ranges, nullptr, tile_order, counter, size, [&](Step step) {
    const int lane = me().lane, kv_head = step.head / group;
    if (kTrees && !(step.flags & (kNothing | kEnd)))
      step.flags = flags_in_trees<kTileM / 64, kTileN>(trees, step.flags, step.tile * kTileM, step.row);
    if (step.flags & kFirst) {
      barrier_wait(&shared.q_empty, q_parity);
      q_parity ^= 1;
      if (lane == 0) {
        barrier_expect(&shared.q_full, Shared::kQBytes + Shared::kDoutBytes);
        copy_tile<kTileM, kHeadDim>(shared.q, map_q, step.head, step.tile * kTileM, &shared.q_full);
        copy_tile<kTileM, kVHeadDim>(shared.dout, map_dout, step.head, step.tile * kTileM, &shared.q_full);
      }
    }
    u64* const full = &shared.full[ring.stage];
    barrier_wait(&shared.empty[ring.stage], ring.parity);
    if (lane == 0) {
      shared.step[ring.stage] = step;
      if (step.flags & (kNothing | kEnd) || (kTrees && !(step.flags & (kSees | kSees << 2)))) {
        barrier_arrive(full);
      } else {
        barrier_expect(full, Shared::kKBytes + Shared::kVBytes);
        copy_tile<kTileN, kHeadDim>(shared.k[ring.stage], map_k, kv_head, step.row, full);
        copy_tile<kTileN, kVHeadDim>(shared.v[ring.stage], map_v, kv_head, step.row, full);
      }
    }
    ring.advance();
  });
}

// Turns scores and dP of a thread's two rows into dS, rounded.
template <typename T, int kBlocks, bool kCaps>
__device__ __forceinline__ void weigh(u32 (&dscore)[1][kBlocks / 2][4], const float (&score)[kBlocks][4],
                                      float (&dp)[kBlocks][4], Logits<kCaps> logits, const float (&minus_lse)[2],
                                      const float (&minus_delta)[2]) {
  #pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) {
    const float less = minus_lse[i % 4 / 2], p = logits.probability(score[i / 4][i % 4], less);
    dp[i / 4][i % 4] = p * logits.slope(p, less) * (dp[i / 4][i % 4] + minus_delta[i % 4 / 2]);
  }
  round_to_operand<T>(dscore, *(float(*)[1][kBlocks][4])&dp);
}

// A consumer, one warpgroup: 64 query rows. While it computes score gradients, the products of the other one run.
//
// racecheck does not follow mbarriers. `full` orders a step before its reads, and `empty` orders reads before the next
// step, as matrix products or __syncwarp bring all lanes together before one arrives.
template <bool kTrees, typename T, typename Dq, typename Shared, bool kCaps>
__device__ __forceinline__ void consume_dq(Shared& shared, int consumer, Dq* dq, const float* stats,
                                           const int2* key_ranges, Logits<kCaps> logits, BackwardSize size,
                                           Trees trees) {
  constexpr int kHeadDim = Shared::kHeadDim, kVHeadDim = Shared::kVHeadDim;
  constexpr int kTileM = Shared::kTileM, kTileN = Shared::kTileN, kBlocks = kTileN / 8, kCols = kMostCols<kHeadDim>;
  Ring<Shared::kStages> ring = {0, 0};
  u32 q_parity = 0, flags;
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  auto look = [&] {
    barrier_wait(&shared.full[ring.stage], ring.parity);
    flags = __shfl_sync(0xffffffffu, shared.step[ring.stage].flags, 0);
  };

  while (true) {
    look();
    if (flags & kEnd) break;
    const Step first = shared.step[ring.stage];
    const int row = first.tile * kTileM + consumer * 64, my_row = row + me().warp * 16 + me().lane / 4;
    int2 range[2];
    float minus_lse[2], minus_delta[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      range[r] = range_of(key_ranges, my_row + 8 * r, size.k_rows);
      const size_t at = (size_t)first.head * size.stats_rows + my_row + 8 * r;
      const size_t all = (size_t)size.splits * size.stats_rows;
      minus_lse[r] = is_empty(range[r]) ? -kInfinity : stats[at];
      minus_delta[r] = is_empty(range[r]) ? 0.f : stats[all + at];
    }
    float acc[kHeadDim / 8][4] = {};
    if (flags & kNothing) {
      __syncwarp();                                                    // all lanes have read the step
      arrive(&shared.empty[ring.stage]);
      ring.advance();
    } else {
      barrier_wait(&shared.q_full, q_parity);
      q_parity ^= 1;
      bool last = false;
      while (!last) {
        look();
        last = flags & kLast;
        const u32 mine = flags >> 2 * consumer;
        if (mine & kSees) {
          ScoreRows<T, kHeadDim, kTileM, false> queries;
          ScoreRows<T, kVHeadDim, kTileM, false> douts;
          queries.load(shared.q + consumer * 64 * kRowBytes), douts.load(shared.dout + consumer * 64 * kRowBytes);
          float score[kBlocks][4], dp[kBlocks][4];
          wgmma_begin();
          queries.template start<false, kTileN>(score, shared.k[ring.stage]);
          wgmma_commit();
          douts.template start<false, kTileN>(dp, shared.v[ring.stage]);
          wgmma_commit();
          wgmma_wait<1>(score);
          if (mine & kMasked) {
            const int key = shared.step[ring.stage].row + me().lane % 4 * 2;
            #pragma unroll
            for (int i = 0; i < 4 * kBlocks; ++i)
              if (!contains(range[i % 4 / 2], key + i / 4 * 8 + i % 2)) score[i / 4][i % 4] = -kInfinity;
          }
          if (kTrees && mine & kEnded) hide_ended(score, my_row, trees.query_ends + shared.step[ring.stage].row);
          wgmma_wait<0>(dp);
          u32 dscore[1][kBlocks / 2][4];
          weigh<T>(dscore, score, dp, logits, minus_lse, minus_delta);
          wgmma_begin();
          #pragma unroll
          for (int c = 0; c < kHeadDim; c += kCols)
            start_weighted_rows<T, kCols, kTileN>(columns<kCols>(acc, c), dscore,
                                                  shared.k[ring.stage] + c * kTileN * 2);
          wgmma_commit();
          wgmma_wait<0>(acc);
        }
        arrive(&shared.empty[ring.stage]);
        ring.advance();
      }
      arrive(&shared.q_empty);
    }
    write_dq<kHeadDim>(dq, acc, logits.scale, row, first.head, 0, size);
  }
}

// dq of every query tile, alone. Accumulators stay in registers and keys come in their order, so that every run gives
// the same bits. The price is that scores and dP are computed a second time: 7 matrix products instead of 5 in the
// whole backward. It saves the partials of dq and their additions in thd_attn_bwd_by_gradient_sm90. One persistent
// thread block per multiprocessor has 128 query rows of one head at a time. Bound by the tensor cores.
//
// The contract is that of thd_attn_bwd_sm90. dq (q_rows, num_heads, kHeadDim). If Dq is float, the result is added to
// dq.
// maps: boxes of 128 rows of q and dout, and of kTileN rows of k and v
// tile_order: of tiles of 128 queries, see scheduled_tile; counter: one int, zero, and zero again after the kernel
// size: rows of queries also in the place of keys, and each head a split by itself; group: query heads of a kv head
// trees_or_none: for a pack with prefix trees
// Launch: grid at most num_tiles * splits and one thread block per multiprocessor, block 384, shared memory
// kSharedBytes.
template <typename T, typename Dq, bool kCaps, int kHeadDim, int kVHeadDim, int kTileN, int kStages, int kSharedBytes,
          typename... Tree>
__global__ void __launch_bounds__(384, 1) thd_attn_bwd_dq_sm90(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout, Dq* __restrict__ dq,
    Logits<kCaps> logits, const float* __restrict__ stats, const int2* __restrict__ key_ranges,
    const int* __restrict__ tile_order, int* __restrict__ counter, int group, BackwardSize size,
    Tree... trees_or_none) {
  constexpr bool kTrees = sizeof...(Tree) > 0;
  const Trees trees = {trees_or_none...};
  using Shared = DqShared<kHeadDim, kVHeadDim, kTileN, kStages>;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (warpgroup == 0) {
    registers_give<40>();
    if (threadIdx.x < kWarp)
      produce_dq<kTrees>(
          shared, &map_q, &map_k, &map_v, &map_dout, key_ranges, tile_order, counter, group, size, trees);
  } else {
    registers_take<232>();
    consume_dq<kTrees, T>(shared, warpgroup - 1, dq, stats, key_ranges, logits, size, trees);
  }
}
