// The portable attention forward (sm_80 and later). kernels.cu explains ranges and tiles.

#pragma once

#include "kernels/portable/common.cuh"
#include "kernels/trees.cuh"

template <typename T, int kHeadDim, int kVHeadDim, int kTileM, int kTileN>
struct PortableForwardShared {
  T q[kTileM * (kHeadDim + kPad)], k[kTileN * (kHeadDim + kPad)], v[kTileN * (kVHeadDim + kPad)];
};

// Attention of one tile of query rows of one head over all keys in their ranges, with an online softmax
// (FlashAttention-2).
//
// Each warp owns 16 * kFragments query rows, and keeps their scores and their output in registers. Two fragments use
// every key read from shared memory twice. The thread block visits only key tiles that one of its rows sees: after each
// it looks for the next visible row. Values are copied while scores are computed, and the next keys are copied during
// the softmax. A thread block has few warps, so that two share a multiprocessor, and one computes while the other
// waits. Bound by mma.sync.
//
// q (q_rows, num_heads, kHeadDim), k (k_rows, num_heads / group, kHeadDim), v (k_rows, num_heads / group, kVHeadDim)
// out (q_rows, num_heads, kVHeadDim); lse (num_heads, q_rows): natural log of the softmax sum, -inf on padding rows
// Out: float means that out and lse hold the attention over other keys (0 and -inf if there were none), and become that
// over all keys; rows that see no key here stay.
// max_logits (all tiles, num_heads, kWarps): the largest logit of each warp's rows, -inf if all are padding
// kCaps: logits are soft-capped. kSinks: out and lse include sinks (num_heads,); not with a float Out.
// key_ranges (q_rows); query_ranges (k_rows), null if all rows of v are finite
// tile_order: some query tiles or all, the longest first
// trees_or_none: for a pack with prefix trees
// Launch: grid (tiles, num_heads), block 32 * kWarps, shared memory kSharedBytes.
template <typename T, typename Out, bool kCaps, bool kSinks, int kHeadDim, int kVHeadDim, int kTileN, int kWarps,
          int kFragments, int kSharedBytes, typename... Tree>
__global__ void __launch_bounds__(kWarps * kWarp, 8 / kWarps) thd_attn_fwd(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, Out* __restrict__ out,
    float* __restrict__ lse, Logits<kCaps> logits, const float* __restrict__ sinks, float* __restrict__ max_logits,
    const int2* __restrict__ key_ranges, const int2* __restrict__ query_ranges, const int* __restrict__ tile_order,
    int q_rows, int k_rows, int group, Tree... trees_or_none) {
  constexpr bool kTrees = sizeof...(Tree) > 0;
  const Trees trees = {trees_or_none...};
  constexpr int kThreads = kWarps * kWarp, kWarpRows = 16 * kFragments, kTileM = kWarpRows * kWarps;
  constexpr int kBlocks = kTileN / 8, kOutBlocks = kVHeadDim / 8, kRows = 2 * kFragments;
  static_assert(kFragments <= 2, "each thread provides the range of one row, so a tile has at most one row per thread");
  static_assert(kVHeadDim <= kHeadDim, "a warp's rows of the output must fit in place of its queries");
  using Shared = PortableForwardShared<T, kHeadDim, kVHeadDim, kTileM, kTileN>;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ Sight<kWarps> sight;
  __shared__ int2 range[kThreads];    // of the tile's rows; empty for threads beyond the tile
  Shared& shared = *(Shared*)shared_bytes;
  T *const tile_q = shared.q, *const tile_k = shared.k, *const tile_v = shared.v;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_heads = gridDim.y, head = blockIdx.y, num_kv_heads = num_heads / group, kv_head = head / group;
  const int tile = tile_order[blockIdx.x], m0 = tile * kTileM;
  const u32 q_stride = num_heads * kHeadDim, out_stride = num_heads * kVHeadDim;
  const u32 k_stride = num_kv_heads * kHeadDim, v_stride = num_kv_heads * kVHeadDim;
  k += kv_head * kHeadDim;
  v += kv_head * kVHeadDim;

  // Ranges stay in shared memory: only tiles with comparisons read them, and the kernel is short of registers.
  const int2 mine = threadIdx.x < kTileM ? range_of(key_ranges, m0 + threadIdx.x, q_rows) : make_int2(0, 0);
  range[threadIdx.x] = mine;
  sight.publish_first(mine, 0);
  sight.publish_all(!is_empty(mine), mine);
  const int2* const my_range = range + warp * kWarpRows + lane / 4;
  __syncthreads();
  const int2 all = sight.all();
  auto tile_in_trees = [&](int from) { return trees.template first_tile<kTileN>(from, range, kTileM, m0); };
  int n0 = kTrees ? tile_in_trees(0) : sight.first_tile(kTileN);
  auto is_interior = [&](int n) { return all.x <= n && n + kTileN <= all.y; };

  float acc_out[kFragments][kOutBlocks][4] = {};
  float row_max[kRows], row_sum[kRows];
  #pragma unroll
  for (int r = 0; r < kRows; ++r) row_max[r] = -kInfinity, row_sum[r] = 0.f;

  load_tile<T, kTileM, kHeadDim, kThreads>(tile_q, q + head * kHeadDim, q_stride, m0, q_rows, key_ranges, false);
  if (n0 != kNone)
    load_tile<T, kTileN, kHeadDim, kThreads>(tile_k, k, k_stride, n0, k_rows, nullptr, is_interior(n0));
  copies_commit();

  while (n0 != kNone) {
    const bool interior = is_interior(n0);
    WarpSight rows = warp_sight<kWarpRows>(range + warp * kWarpRows, n0, kTileN);
    if (kTrees) rows.any &= trees.template ends_of<kTileN>(n0).y > m0 + warp * kWarpRows;

    // Keys have arrived, and every warp is done with the previous values.
    copies_wait();
    __syncthreads();
    load_tile<T, kTileN, kVHeadDim, kThreads>(tile_v, v, v_stride, n0, k_rows, query_ranges,
                                              kTrees ? false : interior);  // trees may hide keys of any tile
    copies_commit();
    const int next_in_trees = kTrees ? tile_in_trees(n0 + kTileN) : kNone;  // early, while registers are free
    if (!kTrees && !is_interior(n0 + kTileN)) sight.publish_first(range[threadIdx.x], n0 + kTileN);
    float score[kFragments][kBlocks][4];
    if (rows.any) dot_rows<T, kHeadDim>(score, tile_q + warp * kWarpRows * (kHeadDim + kPad), tile_k);

    // Values have arrived, and every warp is done with the keys.
    copies_wait();
    __syncthreads();
    const int next = kTrees ? next_in_trees : is_interior(n0 + kTileN) ? n0 + kTileN : sight.first_tile(kTileN);
    if (next != kNone)
      load_tile<T, kTileN, kHeadDim, kThreads>(tile_k, k, k_stride, next, k_rows, nullptr, is_interior(next));
    copies_commit();

    if (rows.any) {
      if (kTrees || !rows.all) hide(score, my_range, n0);  // in trees always, as registers are short
      if (kTrees) hide_ended(score, m0 + warp * kWarpRows + lane / 4, trees.query_ends + n0);
      // The online softmax works on unscaled scores. The maximum of a row that has seen no key yet is -inf, and its
      // base is 0.
      #pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float largest = row_max[r];
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          largest = fmaxf(largest, fmaxf(score[r / 2][n][r % 2 * 2], score[r / 2][n][r % 2 * 2 + 1]));
        largest = quad_max(largest);
        const float shrink =
            largest == -kInfinity ? 1.f : exp2_fast(logits.exact(row_max[r]) - logits.exact(largest));
        row_max[r] = largest;
        row_sum[r] *= shrink;
        #pragma unroll
        for (int n = 0; n < kOutBlocks; ++n)
          acc_out[r / 2][n][r % 2 * 2] *= shrink, acc_out[r / 2][n][r % 2 * 2 + 1] *= shrink;
        const float base = largest == -kInfinity ? 0.f : logits.exact(largest);
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = score[r / 2][n][r % 2 * 2 + e];
            s = exp2_fast(logits.exact(s) - base);
            row_sum[r] += s;
          }
      }
      u32 probability[kFragments][kBlocks / 2][4];
      round_to_operand<T>(probability, score);
      add_weighted_rows<T, kVHeadDim + kPad>(acc_out, probability, tile_v);
    }
    n0 = next;
  }
  copies_wait();
  __syncthreads();

  // Normalise the output. The warp's rows of tile_q hold it for stores of 16 bytes.
  constexpr bool kMerges = sizeof(Out) == sizeof(float);
  T* const staging = tile_q + warp * kWarpRows * (kHeadDim + kPad);
  const int row0 = m0 + warp * kWarpRows + lane / 4;
  float largest = -kInfinity;
  #pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool padding = is_empty(my_range[8 * r]);
    const float blank = blank_of(my_range[8 * r]), total = quad_sum(row_sum[r]), logit = logits.natural(row_max[r]);
    auto lse_of_keys = [&] { return logit + __log2f(total) * kLn2; };
    const JoinedSink joined = kSinks ? join_sink(lse_of_keys(), sinks[head]) : JoinedSink{0.f, 1.f};
    if (!padding) largest = fmaxf(largest, logit);
    if constexpr (kMerges) {
      float* const row_lse = lse + (size_t)head * q_rows + row0 + 8 * r;
      const Merge weights = merge_lse(row_lse, lse_of_keys(), !padding);
      float2* const row = (float2*)(out + (size_t)(row0 + 8 * r) * out_stride + head * kVHeadDim) + lane % 4;
      #pragma unroll
      for (int n = 0; n < kOutBlocks && !padding; ++n) {
        const float x = acc_out[r / 2][n][r % 2 * 2], y = acc_out[r / 2][n][r % 2 * 2 + 1],
                    scale = weights.these / total;
        const float2 others = row[n * 4];
        row[n * 4] = make_float2(x * scale + others.x * weights.others, y * scale + others.y * weights.others);
      }
      continue;
    }
    if (lane % 4 == 0 && row0 + 8 * r < q_rows)
      lse[(size_t)head * q_rows + row0 + 8 * r] =
          padding ? blank - kInfinity : kSinks ? joined.lse : lse_of_keys();
    #pragma unroll
    for (int n = 0; n < kOutBlocks; ++n) {
      const float x = acc_out[r / 2][n][r % 2 * 2], y = acc_out[r / 2][n][r % 2 * 2 + 1],
                  scale = joined.keys_weight / total;
      store_pair(staging + (lane / 4 + 8 * r) * (kHeadDim + kPad) + n * 8 + lane % 4 * 2,
                 padding ? blank : x * scale, padding ? blank : y * scale);
    }
  }
  for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
  if (lane == 0) max_logits[((size_t)tile * gridDim.y + head) * kWarps + warp] = largest;
  if (kMerges) return;
  __syncwarp();
  for (int c = lane; c < kWarpRows * kOutBlocks; c += kWarp) {
    const int row = c / kOutBlocks, col = c % kOutBlocks * 8, global_row = m0 + warp * kWarpRows + row;
    if (global_row < q_rows)
      *(uint4*)(out + (size_t)global_row * out_stride + head * kVHeadDim + col) =
          *(const uint4*)(staging + row * (kHeadDim + kPad) + col);
  }
}
