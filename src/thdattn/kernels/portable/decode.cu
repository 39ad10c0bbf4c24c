// Attention of few queries over long KV caches (sm_80 and later), with split-KV, so that one sequence fills the GPU.

#pragma once

#include "kernels/portable/common.cuh"

[[maybe_unused]] constexpr int kHeads = 16;      // query heads of a thread block, of one kv head: the rows of an mma
[[maybe_unused]] constexpr int kKeys = 16;       // keys of a warp at a time: the columns of a probability operand
[[maybe_unused]] constexpr int kMaxSplits = 128;  // KV splits of a range of keys
CHECK_kMaxSplits;

template <typename T, int kHeadDim, int kVHeadDim, int kWarps, int kStages>
struct DecodeTiles {
  static_assert(kHeadDim % 16 == 0 && kVHeadDim % 16 == 0, "fragments have 16 columns");
  struct Stage { T k[kKeys * (kHeadDim + kPad)], v[kKeys * (kVHeadDim + kPad)]; };
  T q[kHeads * (kHeadDim + kPad)];
  Stage stages[kWarps][kStages];
};

// Reuses the memory of the tiles: partial results of warps, which are summed, and (largest, total) of the KV splits.
template <int kVHeadDim, int kWarps>
struct DecodePartials {
  float sums[kWarps][kHeads][kVHeadDim + kPad];
  float2 splits[kMaxSplits * kHeads];
};

// A partial softmax of 4 columns of one head: weighted values relative to 2^largest, and the sum of their weights.
struct SoftmaxPartial { float4 sum; float largest, total; };

// Merges `count` partials in their order. stats(i) = (largest, total) of partial i, sums(i) = its 4 columns. A partial
// without a key has (-inf, 0) and zeros.
template <typename Stats, typename Sums>
__device__ __forceinline__ SoftmaxPartial merge_partials(int count, Stats stats, Sums sums) {
  SoftmaxPartial all = {make_float4(0.f, 0.f, 0.f, 0.f), -kInfinity, 0.f};
  for (int i = 0; i < count; ++i) all.largest = fmaxf(all.largest, stats(i).x);
  const float base = all.largest == -kInfinity ? 0.f : all.largest;
  #pragma unroll 8
  for (int i = 0; i < count; ++i) {
    const float weight = exp2_fast(stats(i).x - base);
    const float4 x = sums(i);
    all.sum.x += weight * x.x, all.sum.y += weight * x.y, all.sum.z += weight * x.z, all.sum.w += weight * x.w;
    all.total += weight * stats(i).y;
  }
  return all;
}

// Tests whether this thread block is the last of `count` to come here. It then sees what the others wrote. *arrived is
// 0 again afterwards.
__device__ __forceinline__ bool is_last(u32* arrived, int count) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(arrived, count - 1) == count - 1;
  __syncthreads();
  __threadfence();
  return last;
}

// Computes out and lse of every query row over its range of keys.
//
// A thread block has up to 16 query heads of one kv head, so that a key is read once for all of them, and one KV split
// of the range. Splits are equal multiples of kKeys * kWarps keys, at most gridDim.z. Each warp processes every
// kWarps-th 16 keys of the split, with kStages copies in flight, without waiting for the others. Then the partials of
// the warps are merged. The thread block that finishes last merges those of the splits. Both happen in a fixed order,
// so the same inputs and grid give the same bits. Bound by memory bandwidth.
//
// kCaps, kSinks: as in thd_attn_fwd
// q (rows, num_heads, kHeadDim); k (keys, num_heads / group, kHeadDim), v (.., kVHeadDim)
// out (rows, num_heads, kVHeadDim); lse (num_heads, rows); key_ranges (rows), none of which leaves the buffer
// partial, partial_stats: kVHeadDim floats and one pair per row, blockIdx.y, split and head of the thread block
// arrived (rows * gridDim.y): 0
// Launch: early, grid (rows, num_kv_heads * ceil(group / 16), splits <= kMaxSplits), block 32 * kWarps, shared memory
// kSharedBytes.
template <typename T, bool kCaps, bool kSinks, int kHeadDim, int kVHeadDim, int kWarps, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(kWarps * kWarp) thd_attn_decode(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ out,
    float* __restrict__ lse, const int2* key_ranges, Logits<kCaps> logits, const float* sinks,
    float* partial, float2* partial_stats, u32* arrived, int group) {
  constexpr int kThreads = kWarps * kWarp, kStep = kKeys * kWarps, kPitch = kVHeadDim + kPad, kVecs = kVHeadDim / 4;
  using Tiles = DecodeTiles<T, kHeadDim, kVHeadDim, kWarps, kStages>;
  using Partials = DecodePartials<kVHeadDim, kWarps>;
  static_assert(same_bytes<(sizeof(Tiles) > sizeof(Partials) ? sizeof(Tiles) : sizeof(Partials)), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ float2 warp_stats[kWarps][kHeads];  // as DecodePartials::splits
  Tiles& tiles = *(Tiles*)shared_bytes;
  Partials& partials = *(Partials*)shared_bytes;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = blockIdx.x;
  const int slices = (group + kHeads - 1) / kHeads, num_kv_heads = gridDim.y / slices, kv_head = blockIdx.y / slices;
  const int num_heads = num_kv_heads * group, slice = blockIdx.y % slices * kHeads, head0 = kv_head * group + slice;
  wait_for_kernel_before();
  const int2 range = key_ranges[row];
  const int heads = min(kHeads, group - slice), length = max(0, range.y - range.x), split = blockIdx.z;
  const int split_size = (length + gridDim.z * kStep - 1) / (gridDim.z * kStep) * kStep;
  const int splits = length ? (length + split_size - 1) / split_size : 1;
  if (split >= splits) return;
  const int begin = range.x + split * split_size, end = min(range.y, begin + split_size);

  const size_t k_stride = (size_t)num_kv_heads * kHeadDim, v_stride = (size_t)num_kv_heads * kVHeadDim;
  k += kv_head * kHeadDim, v += kv_head * kVHeadDim;
  auto load = [&](int stage, int key) {  // rows after the end become zeros: 0 * NaN would spread
    typename Tiles::Stage& to = tiles.stages[warp][stage];
    #pragma unroll
    for (int c = lane; c < kKeys * kHeadDim / 8; c += kWarp) {
      const int r = c / (kHeadDim / 8), col = c % (kHeadDim / 8) * 8;
      copy_async_16(to.k + r * (kHeadDim + kPad) + col, k + (key + r) * k_stride + col, key + r < end);
    }
    #pragma unroll
    for (int c = lane; c < kKeys * kVHeadDim / 8; c += kWarp) {
      const int r = c / (kVHeadDim / 8), col = c % (kVHeadDim / 8) * 8;
      copy_async_16(to.v + r * kPitch + col, v + (key + r) * v_stride + col, key + r < end);
    }
  };

  const T* const q_heads = q + ((size_t)row * num_heads + head0) * kHeadDim;
  for (int c = threadIdx.x; c < kHeads * kHeadDim / 8; c += kThreads) {
    const int r = c / (kHeadDim / 8), col = c % (kHeadDim / 8) * 8;
    copy_async_16(tiles.q + r * (kHeadDim + kPad) + col, q_heads + (r < heads ? r : 0) * kHeadDim + col, r < heads);
  }
  int key = begin + warp * kKeys;
  #pragma unroll
  for (int s = 0; s < kStages; ++s) {
    if (key + s * kStep < end) load(s, key + s * kStep);
    copies_commit();
  }
  copies_wait_but<kStages - 1>();
  __syncthreads();  // queries have arrived

  float sum_out[1][kVHeadDim / 8][4] = {};
  float row_max[2] = {-kInfinity, -kInfinity}, row_sum[2] = {};
  for (int stage = 0; key < end; key += kStep, stage = (stage + 1) % kStages) {
    copies_wait_but<kStages - 1>();
    __syncwarp();
    const typename Tiles::Stage& tile = tiles.stages[warp][stage];
    float score[1][2][4];
    dot_rows<T, kHeadDim>(score, tiles.q, tile.k);
    #pragma unroll
    for (int i = 0; i < 8; ++i)
      if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= end) score[0][i / 4][i % 4] = -kInfinity;
    #pragma unroll
    for (int r = 0; r < 2; ++r) {  // online softmax
      float largest = row_max[r];
      #pragma unroll
      for (int n = 0; n < 2; ++n)
        #pragma unroll
        for (int e = 0; e < 2; ++e) largest = fmaxf(largest, score[0][n][r * 2 + e]);
      largest = quad_max(largest);
      const float base = largest == -kInfinity ? 0.f : logits.exact(largest);
      const float shrink = exp2_fast(logits.exact(row_max[r]) - base);
      row_max[r] = largest;
      row_sum[r] *= shrink;
      #pragma unroll
      for (int n = 0; n < 2; ++n)
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = score[0][n][r * 2 + e];
          s = exp2_fast(logits.exact(s) - base);
          row_sum[r] += s;
        }
      #pragma unroll
      for (int n = 0; n < kVHeadDim / 8; ++n) sum_out[0][n][r * 2] *= shrink, sum_out[0][n][r * 2 + 1] *= shrink;
    }
    u32 probability[1][1][4];
    round_to_operand<T>(probability, score);
    add_weighted_rows<T, kPitch>(sum_out, probability, tile.v);
    __syncwarp();  // the stage is free
    if (key + kStages * kStep < end) load(stage, key + kStages * kStep);
    copies_commit();
  }
  copies_wait();
  __syncthreads();

  auto of_warps = [&](int head, int col) {
    return merge_partials(kWarps, [&](int w) { return warp_stats[w][head]; },
                      [&](int w) { return *(const float4*)(partials.sums[w][head] + col); });
  };
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + 8 * r;
    const float total = quad_sum(row_sum[r]);
    if (lane % 4 == 0) warp_stats[warp][head] = make_float2(logits.exact(row_max[r]), total);
    #pragma unroll
    for (int n = 0; n < kVHeadDim / 8; ++n)
      store_pair(partials.sums[warp][head] + n * 8 + lane % 4 * 2, sum_out[0][n][r * 2], sum_out[0][n][r * 2 + 1]);
  }
  __syncthreads();

  if (splits > 1) {
    const int item = row * gridDim.y + blockIdx.y, pitch = min(group, kHeads);
    auto at = [&](int p, int head) { return ((size_t)item * gridDim.z + p) * pitch + head; };
    for (int i = threadIdx.x; i < heads * kVecs; i += kThreads) {
      const int head = i / kVecs, col = i % kVecs * 4;
      const SoftmaxPartial mine = of_warps(head, col);
      *(float4*)(partial + at(split, head) * kVHeadDim + col) = mine.sum;
      if (col == 0) partial_stats[at(split, head)] = make_float2(mine.largest, mine.total);
    }
    if (!is_last(arrived + item, splits)) return;
    for (int i = threadIdx.x; i < splits * heads; i += kThreads)
      partials.splits[i] = __ldcg(partial_stats + at(i / heads, i % heads));
    __syncthreads();
    // A warp merges every kWarps-th split.
    const int count = (splits - warp + kWarps - 1) / kWarps;
    for (int i = lane; i < heads * kVecs; i += kWarp) {
      const int head = i / kVecs, col = i % kVecs * 4;
      const SoftmaxPartial mine = merge_partials(
          count, [&](int p) { return partials.splits[(warp + p * kWarps) * heads + head]; },
          [&](int p) { return __ldcg((const float4*)(partial + at(warp + p * kWarps, head) * kVHeadDim + col)); });
      *(float4*)(partials.sums[warp][head] + col) = mine.sum;
      if (col == 0) warp_stats[warp][head] = make_float2(mine.largest, mine.total);
    }
    __syncthreads();
  }

  for (int i = threadIdx.x; i < heads * kVecs; i += kThreads) {
    const int head = i / kVecs, col = i % kVecs * 4;
    const SoftmaxPartial all = of_warps(head, col);
    const float lse_of_keys = (all.largest + __log2f(all.total)) * kLn2;
    const JoinedSink joined = kSinks ? join_sink(lse_of_keys, sinks[head0 + head]) : JoinedSink{lse_of_keys, 1.f};
    const float scale = length ? joined.keys_weight / all.total : 0.f;
    T* const to = out + ((size_t)row * num_heads + head0 + head) * kVHeadDim + col;
    store_pair(to, all.sum.x * scale, all.sum.y * scale);
    store_pair(to + 2, all.sum.z * scale, all.sum.w * scale);
    if (col == 0) lse[(size_t)(head0 + head) * gridDim.x + row] = length ? joined.lse : -kInfinity;
  }
}
