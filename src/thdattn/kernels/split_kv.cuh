// Split-KV of the forwards: they divide the keys of query tiles among thread blocks if too few tiles would leave
// multiprocessors idle. This file chooses the splits, and merges their partial results.

#pragma once

#include "kernels/common.cuh"

// Split number `index` of `count` equal parts of the keys of a query tile.
struct KvSplit { int tile, index, count; };
constexpr int kMaxKvSplits = kWarp;
CHECK_kMaxKvSplits;
__device__ __forceinline__ int packed(KvSplit split) { return split.tile | split.index << 16 | split.count << 24; }
__device__ __forceinline__ KvSplit unpacked(int word) { return {word & 0xffff, word >> 16 & 0xff, word >> 24 & 0xff}; }

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Returns the keys from the first visible one to the last, over ranges that a warp holds.
template <int kRows>
__device__ __forceinline__ int2 span_of(const int2 (&range)[kRows]) {
  int first = kNone, end = 0;
  #pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (!is_empty(range[i])) first = min(first, range[i].x), end = max(end, range[i].y);
  return {__reduce_min_sync(0xffffffffu, first), __reduce_max_sync(0xffffffffu, end)};
}

// Restricts ranges of a tile's rows to one split. Splits are multiples of kTileN keys. span: of all rows of the tile
template <int kTileN, int kRows>
__device__ __forceinline__ void cut(int2 (&range)[kRows], KvSplit split, int2 span) {
  const int keys = ceil_div(ceil_div(span.y - span.x, kTileN), split.count) * kTileN;
  const int first = span.x + split.index * keys;
  #pragma unroll
  for (int i = 0; i < kRows; ++i) {
    range[i] = make_int2(max(range[i].x, first), min(range[i].y, first + keys));
    if (is_empty(range[i])) range[i] = make_int2(0, 0);
  }
}

// ------------------------------------------------------------------------------------------------ partials

// Memory of merge_splits, with a place for every warp of every split and head.
struct KvPartials { float4* partials; u32* arrived; };
CHECK_KvPartials;

// Size of a warp's partial result of 16 * kFragments rows, in float4: float4 n of every lane after float4 n - 1 of all
// lanes, which are not written if no row sees a key; then (base, sum, maximum) of every row.
template <int kFragments, int kBlocks> constexpr int kPartialQuads = kFragments * (kBlocks * kWarp + 16);

// Returns how many splits have arrived. All their partials can then be read.
__device__ __forceinline__ u32 arrived_so_far(const u32* arrived) {
  u32 count; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(arrived) : "memory");
  return count;
}

// Writes this warp's partial of a split. The warp that comes last merges all splits, in their order, so that every run
// gives the same bits. It skips splits in which none of its rows sees a key.
//
// partials: of this warp's rows, `pitch` float4s from split to split; arrived: zero, and zero again after the last
// split
// hidden: whether each of this thread's rows sees no key of the split, and then of all splits
// Returns whether this warp has the merged result.
template <typename Softmax, int kFragments, int kBlocks>
__device__ __forceinline__ bool merge_splits(float4* partials, size_t pitch, u32* arrived, KvSplit split,
                                             float (&acc)[kFragments][kBlocks][4], Softmax& softmax,
                                             bool (&hidden)[2 * kFragments]) {
  constexpr int kRows = 2 * kFragments, kQuads = kFragments * kBlocks;
  // The least base of a row that sees a key. Scores that are all NaN leave no base.
  constexpr float kNotHidden = Softmax::kNothingYet / 2;
  const int lane = me().lane;
  const u32 others = split.count - 1, before = uniform(lane == 0 ? arrived_so_far(arrived) : 0);
  float4* const rows = partials + kQuads * kWarp + lane / 4;
  partials += lane;
  float4* const mine = partials + split.index * pitch;
  bool sees_any = false;
  #pragma unroll
  for (int r = 0; r < kRows; ++r) sees_any |= !hidden[r];
  if (__any_sync(0xffffffffu, sees_any))
    #pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float (&x)[4] = acc[i / kBlocks][i % kBlocks];
      mine[i * kWarp] = make_float4(x[0], x[1], x[2], x[3]);
    }
  #pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = quad_sum(softmax.row_sum[r]), top = quad_max(softmax.row_max[r]);
    if (lane % 4 == 0)
      rows[split.index * pitch + 8 * r] = hidden[r] ? make_float4(Softmax::kNothingYet, 0.f, -kInfinity, 0.f)
                                                   : make_float4(fmaxf(softmax.base[r], kNotHidden), sum, top, 0.f);
  }
  if (before < others) {                              // the last warp waits for nobody, and nobody for its partial
    __threadfence();
    __syncwarp();
    if (uniform(lane == 0 ? atomicAdd(arrived, 1) : 0) < others) return false;
    __threadfence();
  }
  if (lane == 0) *arrived = 0;
  __syncwarp();

  // Find the base of the merged rows, and the splits that count. Several splits are read at a time, as each read takes
  // a trip to memory.
  constexpr int kAtOnce = 16 / kRows;
  u32 seen = 0;
  #pragma unroll
  for (int r = 0; r < kRows; ++r) softmax.base[r] = Softmax::kNothingYet;
  for (int first = 0; first < split.count; first += kAtOnce) {
    float base[kAtOnce][kRows];
    #pragma unroll
    for (int i = 0; i < kRows * kAtOnce; ++i)
      base[i / kRows][i % kRows] = __ldcg(&rows[min(first + i / kRows, split.count - 1) * pitch + i % kRows * 8].x);
    #pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float top = base[i][0];
      #pragma unroll
      for (int r = 0; r < kRows; ++r)
        softmax.base[r] = fmaxf(softmax.base[r], base[i][r]), top = r == 0 ? top : fmaxf(top, base[i][r]);
      const bool sees = __any_sync(0xffffffffu, top != Softmax::kNothingYet);
      seen |= (u32)sees << min(first + i, split.count - 1);
    }
  }

  float row_sum[kRows] = {};
  #pragma unroll
  for (int r = 0; r < kRows; ++r) softmax.row_max[r] = -kInfinity;
  #pragma unroll
  for (int i = 0; i < 4 * kQuads; ++i) acc[i / 4 / kBlocks][i / 4 % kBlocks][i % 4] = 0.f;
  #pragma unroll
  for (int f = 0; f < kFragments; ++f)                // one after another, as registers are short
    #pragma unroll 1
    for (u32 left = seen; left; left &= left - 1) {
      const int index = __ffs(left) - 1;
      float weight[2];
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = 2 * f + i;
        const float4 row = __ldcg(rows + index * pitch + 8 * r);
        weight[i] = exp2_fast(row.x - softmax.base[r]);
        row_sum[r] += weight[i] * row.y;
        softmax.row_max[r] = fmaxf(softmax.row_max[r], row.z);
      }
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float4 x = __ldcg(partials + index * pitch + (f * kBlocks + n) * kWarp);
        acc[f][n][0] += weight[0] * x.x, acc[f][n][1] += weight[0] * x.y;
        acc[f][n][2] += weight[1] * x.z, acc[f][n][3] += weight[1] * x.w;
      }
    }
  #pragma unroll
  for (int r = 0; r < kRows; ++r) {
    softmax.row_sum[r] = lane % 4 == 0 ? row_sum[r] : 0.f;  // of the four threads of a row
    hidden[r] = softmax.base[r] == Softmax::kNothingYet;
  }
  return true;
}

// ------------------------------------------------------------------------------------------------ splits

constexpr int kMaxTiles = 512;  // query tiles that are split
static_assert(kMaxTiles <= 1 << 16 && kMaxKvSplits < 1 << 7, "a split is packed into a word that is not negative");

// Estimates the time of a split in quarters of a key tile: to begin and store it, and to merge it with the others.
__device__ __forceinline__ int time_of(int key_tiles, int count) {
  return 4 * ceil_div(key_tiles, count) + (count == 1 ? 4 : 12 + 2 * count);
}
// Returns how many splits a tile with so many key tiles gets if a split has at most `longest`. None is empty.
__device__ __forceinline__ int splits_of(int key_tiles, int longest) {
  return key_tiles <= longest ? 1 : ceil_div(key_tiles, ceil_div(key_tiles, ceil_div(key_tiles, longest)));
}

// Estimates when all splits are done, if so many run `at_once` and each begins when another ends; one warp.
__device__ __forceinline__ int time_of_all(const int* key_tiles, int num_tiles, int num_heads, int at_once,
                                           int max_splits, int longest) {
  constexpr int kEach = 8, kNever = 1 << 30;
  const int lane = threadIdx.x % kWarp;
  int free[kEach], num_splits = 0;                       // when those of this lane end
  #pragma unroll
  for (int i = 0; i < kEach; ++i) free[i] = i * kWarp + lane < at_once ? 0 : kNever;
  for (int t = 0; t < num_tiles; ++t) {
    const int count = splits_of(key_tiles[t], longest), time = time_of(key_tiles[t], count);
    if (count > 1) num_splits += count;
    for (int rest = count * num_heads; rest > 0; ) {
      int soonest = free[0];
      #pragma unroll
      for (int i = 1; i < kEach; ++i) soonest = min(soonest, free[i]);
      const int soonest_of_all = __reduce_min_sync(0xffffffffu, soonest);
      const u32 lanes = __ballot_sync(0xffffffffu, soonest == soonest_of_all);
      bool takes = soonest == soonest_of_all && __popc(lanes & (1u << lane) - 1) < rest;
      #pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (takes && free[i] == soonest) free[i] += time, takes = false;
      rest -= __popc(lanes);
    }
  }
  int last = 0;
  #pragma unroll
  for (int i = 0; i < kEach; ++i) last = max(last, free[i] < kNever ? free[i] : 0);
  return num_splits > max_splits ? kNever : __reduce_max_sync(0xffffffffu, last);
}

// Chooses the KV splits of query tiles so that all are done soonest. It tries every number of splits for the longest
// tile, and gives the other tiles splits of that length. It considers all tiles and heads of a layer, so that the
// choice is the same in however many launches they are computed.
//
// splits: their number, and then the packed splits of the launch's tiles in order. They stay right if ranges change
// before they are used, because each tile has all its splits, and these are equal parts.
// tile_order (num_tiles): the tiles of a launch, the longest first; all_tiles (num_all <= kMaxTiles): those of the
// layer
// num_heads: of the layer; at_once: thread blocks that the GPU runs at the same time, of which 256 count
// max_splits: at most so many splits of the layer's tiles that have several
// Launch: a block of 1024.
template <int kTileM, int kTileN>
__global__ void __launch_bounds__(1024) thd_attn_split_kv(
    int* __restrict__ splits, const int2* __restrict__ key_ranges, const int* __restrict__ tile_order,
    const int* __restrict__ all_tiles, int q_rows, int num_tiles, int num_all, int num_heads, int at_once,
    int max_splits) {
  __shared__ int key_tiles[kMaxTiles], time[kMaxKvSplits];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  auto count_key_tiles = [&](const int* tiles, int count) {
    for (int t = warp; t < count; t += kMaxKvSplits) {
      int2 range[kTileM / kWarp];
      #pragma unroll
      for (int i = 0; i < kTileM / kWarp; ++i)
        range[i] = range_of(key_ranges, tiles[t] * kTileM + i * kWarp + lane, q_rows);
      const int2 span = span_of(range);
      if (lane == 0) key_tiles[t] = is_empty(span) ? 0 : ceil_div(span.y - span.x, kTileN);
    }
    __syncthreads();
  };

  count_key_tiles(all_tiles, num_all);
  const int longest = max(1, key_tiles[0]);
  const int mine = time_of_all(key_tiles, num_all, num_heads, at_once, max_splits,
                               ceil_div(longest, warp + 1));
  if (lane == 0) time[warp] = mine;
  __syncthreads();
  const int best = __reduce_min_sync(0xffffffffu, time[lane]);
  const int longest_split = ceil_div(longest, __ffs(__ballot_sync(0xffffffffu, time[lane] == best)));

  count_key_tiles(tile_order, num_tiles);
  const int t = threadIdx.x;
  if (t >= num_tiles) return;
  int before = 0;
  for (int i = 0; i < t; ++i) before += splits_of(key_tiles[i], longest_split);
  const int my_splits = splits_of(key_tiles[t], longest_split);
  for (int s = 0; s < my_splits; ++s) splits[1 + before + s] = packed({tile_order[t], s, my_splits});
  if (t == num_tiles - 1) splits[0] = before + my_splits;
}
