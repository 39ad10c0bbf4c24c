// The portable attention forward (sm_80 and later). kernels.cu explains ranges and tiles.

#pragma once

#include "kernels/portable/common.cuh"
#include "kernels/split_kv.cuh"
#include "kernels/trees.cuh"

template <typename T, int kHeadDim, int kVHeadDim, int kTileM, int kTileN, int kStages>
struct PortableForwardShared {
  T q[kTileM * (kHeadDim + kPad)];
  T k[kStages][kTileN * (kHeadDim + kPad)], v[kStages][kTileN * (kVHeadDim + kPad)];
};

// The online softmax of a warp's rows, of which each thread has a part. It works on unscaled scores. The maximum of a
// row that has seen no key yet is -inf, and its base is 0.
template <bool kCaps, int kFragments>
struct OnlineSoftmax {
  static constexpr int kRows = 2 * kFragments;
  static constexpr float kNothingYet = -1e30f;        // base of a row that sees no key of a KV split
  Logits<kCaps> logits;
  float row_max[kRows], row_sum[kRows];
  float base[kRows];                                  // for merge_splits, set by set_bases

  __device__ __forceinline__ void begin() {
    #pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = -kInfinity, row_sum[r] = 0.f;
  }
  __device__ __forceinline__ float base_of(float largest) const {
    return largest == -kInfinity ? 0.f : logits.exact(largest);
  }
  __device__ __forceinline__ void set_bases() {
    #pragma unroll
    for (int r = 0; r < kRows; ++r) base[r] = base_of(row_max[r]);
  }

  // Returns the largest score of a row, of all so far.
  template <int kBlocks>
  __device__ __forceinline__ float largest_of(int r, const float (&score)[kFragments][kBlocks][4]) const {
    float largest = row_max[r];
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      largest = fmaxf(largest, fmaxf(score[r / 2][n][r % 2 * 2], score[r / 2][n][r % 2 * 2 + 1]));
    return quad_max(largest);
  }
  template <int kOutBlocks>
  __device__ __forceinline__ void rescale(int r, float largest, float (&acc)[kFragments][kOutBlocks][4]) {
    const float shrink = largest == -kInfinity ? 1.f : exp2_fast(logits.exact(row_max[r]) - logits.exact(largest));
    row_max[r] = largest;
    row_sum[r] *= shrink;
    #pragma unroll
    for (int n = 0; n < kOutBlocks; ++n)
      acc[r / 2][n][r % 2 * 2] *= shrink, acc[r / 2][n][r % 2 * 2 + 1] *= shrink;
  }
  template <int kBlocks>
  __device__ __forceinline__ void weigh(int r, float largest, float (&score)[kFragments][kBlocks][4]) {
    const float of_row = base_of(largest);
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = score[r / 2][n][r % 2 * 2 + e];
        s = exp2_fast(logits.exact(s) - of_row);
        row_sum[r] += s;
      }
  }

  // Turns new scores into probabilities, and rescales what has been accumulated. kAsks: only if a maximum has grown.
  template <bool kAsks, int kBlocks, int kOutBlocks>
  __device__ __forceinline__ void add(float (&score)[kFragments][kBlocks][4],
                                      float (&acc)[kFragments][kOutBlocks][4]) {
    float largest[kRows];
    bool grows = false;
    #pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = largest_of(r, score);
      grows |= largest[r] != row_max[r];
      if (!kAsks) rescale(r, largest[r], acc), weigh(r, largest[r], score);
    }
    if (!kAsks) return;
    if (__any_sync(0xffffffffu, grows))
      #pragma unroll
      for (int r = 0; r < kRows; ++r) rescale(r, largest[r], acc);
    #pragma unroll
    for (int r = 0; r < kRows; ++r) weigh(r, largest[r], score);
  }
};

// Where a warp stores the results of its rows: out and lse of its head, and its largest logit. sink: of its head
template <typename Out>
struct WarpResults {
  Out* out;
  float* lse;
  const float* sink;
  float* max_logit;
  int first_row, q_rows;
  u32 out_stride;
};

// Normalises the output of a warp's rows, and stores it, or merges it with that over other keys. padding: of the
// thread's rows; range: from its first row on; staging: shared memory for the output, rows kPitch elements apart, from
// which 16 bytes are stored at a time
template <bool kSinks, int kPitch, typename T, typename Out, typename Softmax, int kFragments, int kBlocks>
__device__ __forceinline__ void store_rows(WarpResults<Out> to, const float (&acc)[kFragments][kBlocks][4],
                                           const Softmax& softmax, const bool (&padding)[2 * kFragments],
                                           const int2* range, T* staging) {
  constexpr bool kMerges = sizeof(Out) == sizeof(float);
  const int lane = me().lane;
  float largest = -kInfinity;
  #pragma unroll
  for (int r = 0; r < 2 * kFragments; ++r) {
    const int row = to.first_row + lane / 4 + 8 * r;
    const float blank = blank_of(range[8 * r]), total = quad_sum(softmax.row_sum[r]);
    const float logit = softmax.logits.natural(softmax.row_max[r]);
    auto lse_of_keys = [&] { return logit + __log2f(total) * kLn2; };
    const JoinedSink joined = kSinks ? join_sink(lse_of_keys(), *to.sink) : JoinedSink{0.f, 1.f};
    if (!padding[r]) largest = fmaxf(largest, logit);
    if constexpr (kMerges) {
      const Merge weights = merge_lse(to.lse + row, lse_of_keys(), !padding[r]);
      float2* const sums = (float2*)(to.out + (size_t)row * to.out_stride) + lane % 4;
      #pragma unroll
      for (int n = 0; n < kBlocks && !padding[r]; ++n) {
        const float x = acc[r / 2][n][r % 2 * 2], y = acc[r / 2][n][r % 2 * 2 + 1], scale = weights.these / total;
        const float2 others = sums[n * 4];
        sums[n * 4] = make_float2(x * scale + others.x * weights.others, y * scale + others.y * weights.others);
      }
      continue;
    }
    if (lane % 4 == 0 && row < to.q_rows)
      to.lse[row] = padding[r] ? blank - kInfinity : kSinks ? joined.lse : lse_of_keys();
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float x = acc[r / 2][n][r % 2 * 2], y = acc[r / 2][n][r % 2 * 2 + 1], scale = joined.keys_weight / total;
      store_pair(staging + (lane / 4 + 8 * r) * kPitch + n * 8 + lane % 4 * 2,
                 padding[r] ? blank : x * scale, padding[r] ? blank : y * scale);
    }
  }
  for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
  if (lane == 0) *to.max_logit = largest;
  if (kMerges) return;
  __syncwarp();
  for (int c = lane; c < 16 * kFragments * kBlocks; c += kWarp) {
    const int row = c / kBlocks, col = c % kBlocks * 8;
    if (to.first_row + row < to.q_rows)
      *(uint4*)(to.out + (size_t)(to.first_row + row) * to.out_stride + col) =
          *(const uint4*)(staging + row * kPitch + col);
  }
}

// Attention of one tile of query rows of one head over all keys in their ranges, with an online softmax
// (FlashAttention-2).
//
// Each warp owns 16 * kFragments query rows, and keeps their scores and their output in registers. Two fragments use
// every key read from shared memory twice. The thread block visits only key tiles that one of its rows sees: after each
// it looks for the next visible row. Values are copied while scores are computed, and the next keys are copied during
// the softmax. With two stages of shared memory, keys and values are copied one tile ahead. A thread block has few
// warps, so that two share a multiprocessor, and one computes while the other waits. Bound by mma.sync.
//
// q (q_rows, num_heads, kHeadDim), k (k_rows, num_heads / group, kHeadDim), v (k_rows, num_heads / group, kVHeadDim)
// out (q_rows, num_heads, kVHeadDim); lse (num_heads, q_rows): natural log of the softmax sum, -inf on padding rows
// Out: float means that out and lse hold the attention over other keys (0 and -inf if there were none), and become that
// over all keys; rows that see no key here stay.
// max_logits (all tiles, num_heads, kWarps): the largest logit of each warp's rows, -inf if all are padding
// kCaps: logits are soft-capped. kSinks: out and lse include sinks (num_heads,); not with a float Out.
// key_ranges (q_rows); query_ranges (k_rows), null if all rows of v are finite
// tile_order: some query tiles or all, the longest first
// kSplitKv: tile_order comes from thd_attn_split_kv; the grid may have more tiles than it has splits
// partials: for kSplitKv
// trees_or_none: for a pack with prefix trees; not with kSplitKv
// Launch: grid (tiles, num_heads), block 32 * kWarps, shared memory kSharedBytes.
template <typename T, typename Out, bool kCaps, bool kSinks, int kHeadDim, int kVHeadDim, int kTileN, int kWarps,
          int kFragments, int kStages, bool kSplitKv, int kSharedBytes, typename... Tree>
__global__ void __launch_bounds__(kWarps * kWarp, 8 / kWarps) thd_attn_fwd(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, Out* __restrict__ out,
    float* __restrict__ lse, Logits<kCaps> logits, const float* __restrict__ sinks, float* __restrict__ max_logits,
    const int2* __restrict__ key_ranges, const int2* __restrict__ query_ranges, const int* __restrict__ tile_order,
    int q_rows, int k_rows, int group, KvPartials partials, Tree... trees_or_none) {
  constexpr bool kTrees = sizeof...(Tree) > 0;
  const Trees trees = {trees_or_none...};
  constexpr int kThreads = kWarps * kWarp, kWarpRows = 16 * kFragments, kTileM = kWarpRows * kWarps;
  constexpr int kBlocks = kTileN / 8, kOutBlocks = kVHeadDim / 8, kRows = 2 * kFragments;
  // Where it pays to ask whether maxima have grown: not with one fragment, nor where registers are short.
  constexpr bool kShort = kTrees || (kVHeadDim > 96 && (kSplitKv || __CUDA_ARCH__ >= 1200));
  constexpr bool kAsks = kFragments == 2 && !kShort;
  static_assert(kStages == 1 || kStages == 2, "a tile is computed while at most one other is copied");
  static_assert(kFragments <= 2, "each thread provides the range of one row, so a tile has at most one row per thread");
  static_assert(kVHeadDim <= kHeadDim, "a warp's rows of the output must fit in place of its queries");
  using Shared = PortableForwardShared<T, kHeadDim, kVHeadDim, kTileM, kTileN, kStages>;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ Sight<kWarps> sights[kStages];
  __shared__ int2 range[kThreads];    // of the tile's rows; empty for threads beyond the tile
  Shared& shared = *(Shared*)shared_bytes;
  T* const tile_q = shared.q;
  Sight<kWarps>& sight = sights[0];

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_heads = gridDim.y, head = blockIdx.y, num_kv_heads = num_heads / group, kv_head = head / group;
  if (kSplitKv && blockIdx.x >= tile_order[0]) return;
  const KvSplit split = kSplitKv ? unpacked(tile_order[1 + blockIdx.x]) : KvSplit{tile_order[blockIdx.x], 0, 1};
  int tile = split.tile, m0 = tile * kTileM;
  const u32 q_stride = num_heads * kHeadDim, out_stride = num_heads * kVHeadDim;
  const u32 k_stride = num_kv_heads * kHeadDim, v_stride = num_kv_heads * kVHeadDim;
  k += kv_head * kHeadDim;
  v += kv_head * kVHeadDim;

  // Ranges stay in shared memory: only tiles with comparisons read them, and the kernel is short of registers.
  int2 mine[1] = {threadIdx.x < kTileM ? range_of(key_ranges, m0 + threadIdx.x, q_rows) : make_int2(0, 0)};
  if (kSplitKv && split.count > 1) {
    sight.publish_span(mine[0]);
    __syncthreads();
    cut<kTileN>(mine, split, sight.span());
    __syncthreads();
  }
  range[threadIdx.x] = mine[0];
  sight.publish_first(mine[0], 0);
  sight.publish_all(!is_empty(mine[0]), mine[0]);
  const int2* const my_range = range + warp * kWarpRows + lane / 4;
  __syncthreads();
  const int2 all = sight.all();
  auto tile_in_trees = [&](int from) { return trees.template first_tile<kTileN>(from, range, kTileM, m0); };
  int n0 = kTrees ? tile_in_trees(0) : sight.first_tile(kTileN);
  auto is_interior = [&](int n) { return all.x <= n && n + kTileN <= all.y; };

  auto load_keys = [&](int n, int stage) {
    load_tile<T, kTileN, kHeadDim, kThreads>(shared.k[stage], k, k_stride, n, k_rows, nullptr, is_interior(n));
  };
  auto load_values = [&](int n, int stage) {          // trees may hide keys of any tile
    load_tile<T, kTileN, kVHeadDim, kThreads>(shared.v[stage], v, v_stride, n, k_rows, query_ranges,
                                              kTrees ? false : is_interior(n));
  };
  // Looks for the next visible row from n on: all threads publish, synchronise, and read.
  auto publish_from = [&](int n, int stage) {
    if (!kTrees && !is_interior(n)) sights[stage].publish_first(range[threadIdx.x], n);
  };
  auto tile_from = [&](int n, int stage) { return is_interior(n) ? n : sights[stage].first_tile(kTileN); };

  float acc_out[kFragments][kOutBlocks][4] = {};
  OnlineSoftmax<kCaps, kFragments> softmax = {logits};
  softmax.begin();

  load_tile<T, kTileM, kHeadDim, kThreads>(tile_q, q + head * kHeadDim, q_stride, m0, q_rows, key_ranges, false);
  if (n0 != kNone) {
    load_keys(n0, 0);
    if (kStages == 2) {
      load_values(n0, 0);
      __syncthreads();                                // every thread has read n0
      publish_from(n0 + kTileN, 0);
    }
  }
  copies_commit();

  for (int stage = 0; n0 != kNone; stage = kStages - 1 - stage) {
    T *const tile_k = shared.k[stage], *const tile_v = shared.v[stage];
    WarpSight rows = warp_sight<kWarpRows>(range + warp * kWarpRows, n0, kTileN);
    if (kTrees) rows.any &= trees.template ends_of<kTileN>(n0).y > m0 + warp * kWarpRows;

    // Keys (with two stages, and values) have arrived, and every warp is done with the tile before.
    copies_wait();
    __syncthreads();
    int next = kTrees ? tile_in_trees(n0 + kTileN) : kNone;  // early, while registers are free
    if constexpr (kStages == 2) {
      if (!kTrees) next = tile_from(n0 + kTileN, stage);
      if (next != kNone) {
        load_keys(next, 1 - stage), load_values(next, 1 - stage);
        publish_from(next + kTileN, 1 - stage);
      }
    } else {
      load_values(n0, 0);
      publish_from(n0 + kTileN, 0);
    }
    copies_commit();
    float score[kFragments][kBlocks][4];
    if (rows.any) dot_rows<T, kHeadDim>(score, tile_q + warp * kWarpRows * (kHeadDim + kPad), tile_k);

    if constexpr (kStages == 1) {                     // values have arrived, and every warp is done with the keys
      copies_wait();
      __syncthreads();
      if (!kTrees) next = tile_from(n0 + kTileN, 0);
      if (next != kNone) load_keys(next, 0);
      copies_commit();
    }

    if (rows.any) {
      if (kTrees || !rows.all) hide(score, my_range, n0);  // in trees always, as registers are short
      if (kTrees) hide_ended(score, m0 + warp * kWarpRows + lane / 4, trees.query_ends + n0);
      softmax.template add<kAsks>(score, acc_out);
      u32 probability[kFragments][kBlocks / 2][4];
      round_to_operand<T>(probability, score);
      add_weighted_rows<T, kVHeadDim + kPad>(acc_out, probability, tile_v);
    }
    n0 = next;
  }
  copies_wait();
  __syncthreads();                                    // the warp's rows of tile_q may now hold its output
  bool padding[kRows];
  #pragma unroll
  for (int r = 0; r < kRows; ++r) padding[r] = is_empty(my_range[8 * r]);
  if constexpr (kSplitKv) {
    constexpr int kQuads = kPartialQuads<kFragments, kOutBlocks>;
    const KvSplit split = unpacked(__ldcg(tile_order + 1 + blockIdx.x));  // again, as the loop is short of registers
    tile = split.tile, m0 = tile * kTileM;
    const size_t place = ((size_t)(blockIdx.x - split.index) * num_heads + head) * kWarps + warp;
    softmax.set_bases();
    if (split.count > 1 && !merge_splits(partials.partials + place * kQuads, (size_t)num_heads * kWarps * kQuads,
                                         partials.arrived + place, split, acc_out, softmax, padding))
      return;
  }

  store_rows<kSinks, kHeadDim + kPad, T, Out>(
      {out + head * kVHeadDim, lse + (size_t)head * q_rows, sinks + head,
       max_logits + ((size_t)tile * num_heads + head) * kWarps + warp, m0 + warp * kWarpRows, q_rows, out_stride},
      acc_out, softmax, padding, my_range, tile_q + warp * kWarpRows * (kHeadDim + kPad));
}
