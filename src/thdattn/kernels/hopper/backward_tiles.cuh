// What the two Hopper backwards with 128 keys per thread block share (sm_90a): shared memory, the producer, and score
// gradients on their way to dq.

#pragma once

#include "kernels/hopper/dq_panels.cuh"

// Shared memory. The key side computes the scores of kAtOnce queries of a step at once, and dP of kDpAtOnce. Beside
// float32 probabilities, registers have no room for more. dq has panels of kCols columns, and kDqDepth buffers for
// them. kDsDepth buffers hold score gradients, which kDqWarps warps multiply with keys: the four of the query side or,
// without one, the eight of the key side.
template <int kDim, int kVDim, int kM, int kAhead, int kAtOnce, int kDpAtOnce, int kCols, int kDqDepth,
          int kDsDepth = kAhead, int kDqWarps = 4>
struct BackwardShared {
  static constexpr int kHeadDim = kDim, kVHeadDim = kVDim, kTileM = kM, kTileN = 128;
  static constexpr int kStages = kAhead, kDsStages = kDsDepth;
  static constexpr int kScoreQueries = kAtOnce, kDpQueries = kDpAtOnce, kDqStages = kDqDepth;
  static constexpr int kPanelCols = kCols, kPanelFloats = 64 * kCols, kPanels = kDim / kCols;
  static_assert(kStages == 2, "claims of dq and the parities of steps count two stages");
  static_assert(kHeadDim % kPanelCols == 0, "panels must divide the columns of dq");
  static_assert(kPanels == 1 || kPanelCols % (kHeadDim % kSlab ? kSlab / 2 : kSlab) == 0,
                "a panel of dq must begin at a slab of keys");
  static_assert(kTileM % 64 == 0, "a panel of dq has 64 rows, and each 64 rows have a semaphore");
  static_assert(kTileM % kScoreQueries == 0 && kTileM % kDpQueries == 0 && kScoreQueries % kDpQueries == 0 &&
                    kDpQueries % 16 == 0,
                "the key side takes all queries of a step, in equal parts of whole fragments");
  static constexpr int kKBytes = kTileBytes<kTileN, kHeadDim>, kVBytes = kTileBytes<kTileN, kVHeadDim>;
  static constexpr int kQBytes = kTileBytes<kTileM, kHeadDim>, kDoutBytes = kTileBytes<kTileM, kVHeadDim>;
  unsigned char k[kKBytes], v[kVBytes];
  unsigned char q[kStages][kQBytes], dout[kStages][kDoutBytes];
  unsigned char ds[kDsStages][kTileBytes<kTileN, kTileM>];         // keys are the rows
  float dq[kDqStages][kPanelFloats];                              // panels on their way to global memory, or from there
  float minus_lse[kStages][kTileM], minus_delta[kStages][kTileM];
  u64 kv_full, kv_empty;
  u64 full[kStages], empty[kStages];
  u64 ds_full[kDsStages], ds_empty[kDsStages];
  u64 dq_empty[kDqStages], dq_open[kDqStages], dq_full[kDqStages];
  u64 claim_full[2], claim_sent[2], claim_empty[2];
  Claim claim[2];
  Partial partial[kDqStages];                                         // of each panel
  Step step[2 * kStages];                                         // read by the query side after its tiles are released
  int2 range[kTileN];                                             // of the key rows
  int2 warp_tile[8];                                              // of the key side's warps: first key, kv head

  __device__ __forceinline__ void init() {
    barrier_init(&kv_full, 2), barrier_init(&kv_empty, 8 + kDqWarps % 8);
    for (int s = 0; s < kStages; ++s) barrier_init(&full[s], 1), barrier_init(&empty[s], 9);
    for (int s = 0; s < kDsStages; ++s) barrier_init(&ds_full[s], 8), barrier_init(&ds_empty[s], kDqWarps);
    for (int s = 0; s < kDqStages; ++s)
      barrier_init(&dq_empty[s], 1), barrier_init(&dq_open[s], 1), barrier_init(&dq_full[s], 4);
    for (int s = 0; s < 2; ++s)
      barrier_init(&claim_full[s], 1), barrier_init(&claim_sent[s], 1), barrier_init(&claim_empty[s], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Return the keys of a warpgroup, their values, and the queries of a stage from `row` on with their gradients.
  __device__ __forceinline__ const unsigned char* keys_of(int side) const {
    return k + opaque(side) * 64 * kRowBytesOf<kHeadDim>;
  }
  __device__ __forceinline__ const unsigned char* values_of(int side) const {
    return v + opaque(side) * 64 * kRowBytesOf<kVHeadDim>;
  }
  __device__ __forceinline__ const unsigned char* q_from(u32 stage, int row) const {
    return q[stage] + row * kRowBytesOf<kHeadDim>;
  }
  __device__ __forceinline__ const unsigned char* dout_from(u32 stage, int row) const {
    return dout[stage] + row * kRowBytesOf<kVHeadDim>;
  }
};

// Loads keys, values and ranges of a key tile, one warp. kv_full counts two arrivals.
template <typename Shared>
__device__ __forceinline__ void load_keys(Shared& shared, const TensorMap* map_k, const TensorMap* map_v,
                                          const int2* query_ranges, const Step& step, BackwardSize size) {
  constexpr int kTileN = Shared::kTileN;
  const int lane = me().lane, kv_head = step.head / size.group, key = step.tile * kTileN;
  if (lane == 0) {
    barrier_expect(&shared.kv_full, Shared::kKBytes + Shared::kVBytes);
    copy_tile<kTileN, Shared::kHeadDim, true>(shared.k, map_k, kv_head, key, &shared.kv_full);
    copy_tile<kTileN, Shared::kVHeadDim, true>(shared.v, map_v, kv_head, key, &shared.kv_full);
  }
  #pragma unroll
  for (int i = 0; i < kTileN; i += kWarp) shared.range[i + lane] = range_of(query_ranges, key + i + lane, size.k_rows);
  __syncwarp();
  if (lane == 0) barrier_arrive(&shared.kv_full);
}

// The producer, one warp. It loads the tensors of every step.
//
// racecheck does not follow mbarriers. Full barriers order steps, ranges and copies before reads. Empty barriers order
// reads before the next fill, as a warp arrives once all its lanes have read. Steps have a second stage: a warp that
// reads a step after its `empty` finishes before the second arrival from there on.
template <bool kStaggered, typename Shared>
__device__ __forceinline__ void produce_backward(
    Shared& shared, const TensorMap* map_q, const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_dout,
    const float* stats, const int2* query_ranges, const int* num_partials, const int* tile_order, int* counter,
    BackwardSize size) {
  constexpr int kHeadDim = Shared::kHeadDim, kVHeadDim = Shared::kVHeadDim;
  constexpr int kTileM = Shared::kTileM;
  Ring<Shared::kStages> ring = {0, 1};
  u32 kv_parity = 1;

  schedule_steps<2, kTileM, kStaggered>(query_ranges, num_partials, tile_order, counter, size, [&](const Step& step) {
    u64* const full = &shared.full[ring.stage];
    barrier_wait(&shared.empty[ring.stage], ring.parity);
    if (me().lane == 0) {
      shared.step[ring.double_stage_to_fill()] = step;
      if (step.flags & (kNothing | kEnd)) {
        barrier_arrive(full);
      } else {
        const u32 lse = step.head * size.stats_rows + step.row;
        const u32 delta = lse + size.splits * size.split_heads * size.stats_rows;
        barrier_expect(full, Shared::kQBytes + Shared::kDoutBytes + 8 * kTileM);
        copy_tile<kTileM, kHeadDim>(shared.q[ring.stage], map_q, step.head, step.row, full);
        copy_bulk(shared.minus_lse[ring.stage], stats + lse, 4 * kTileM, full);
        copy_tile<kTileM, kVHeadDim>(shared.dout[ring.stage], map_dout, step.head, step.row, full);
        copy_bulk(shared.minus_delta[ring.stage], stats + delta, 4 * kTileM, full);
      }
    }
    ring.advance();
    if (!(step.flags & kFirst)) return;
    barrier_wait(&shared.kv_empty, kv_parity);
    kv_parity ^= 1;
    load_keys(shared, map_k, map_v, query_ranges, step, size);
  });
}

// Stores score gradients of 64 keys, which are the rows, and of the queries from `first` on.
template <typename Shared, int kSteps>
__device__ __forceinline__ void store_dscore(Shared& shared, u32 stage, int side, int first,
                                             const u32 (&dscore)[1][kSteps][4]) {
  const auto [warp, lane] = me();
  unsigned char* const row = shared.ds[stage] + (side * 64 + warp * 16 + lane % 16) * kRowBytes;
  #pragma unroll
  for (int i = first / 16; i < first / 16 + kSteps; ++i)
    store_matrices(row + i / 4 * Shared::kTileN * kRowBytes + ((i % 4 * 2 + lane / 16) ^ lane % 8) * 16,
                   dscore[0][i - first / 16]);
}

// Stores zeros, if no query of the step sees one of these 64 keys.
template <typename Shared>
__device__ __forceinline__ void store_no_dscore(Shared& shared, u32 stage, int side) {
  u32 zeros[1][Shared::kDpQueries / 16][4];
  #pragma unroll
  for (int i = 0; i < Shared::kDpQueries / 4; ++i) zeros[0][i / 4][i % 4] = 0;
  #pragma unroll
  for (int row = 0; row < Shared::kTileM; row += Shared::kDpQueries) store_dscore(shared, stage, side, row, zeros);
}
