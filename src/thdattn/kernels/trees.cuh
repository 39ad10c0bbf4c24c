// Prefix trees: the second half of the mask rule, for kernels that find the keys of queries.
//
// A tree is a sequence of the pack, with its nodes depth first. The key range of a row is causal over the whole tree.
// So it also has nodes that are no ancestors of the row's node, whose subtrees end before the row:
//
//   score(i, j) counts iff key_ranges[i].x <= j < key_ranges[i].y and i < query_ranges[j].y.
//
// The rows of a subtree are consecutive, so query_ranges alone say the same. Kernels that find the queries of keys need
// nothing from here.

#pragma once

#include "kernels/common.cuh"

// The last argument of kernel instances for packs with prefix trees; others have none.
//
// query_ends (num_groups * kTreeGroup): query_ranges[j].y of every key, kNone if no row of the tree is behind that, and
// 0 if no query sees the key; then at least kBehindKeys zeros, as tiles may end behind the last key
// group_ends (num_groups): of every kTreeGroup keys, the smallest query_ends and the largest query_ranges[j].y
// group_begins (num_groups): the smallest query_ranges[j].x of those keys that a query sees, kNone if there are none
struct Trees {
  enum { kTreeGroup = 64, kBehindKeys = 256 };        // no variables: instances without trees stay as they are
  CHECK_kTreeGroup;
  CHECK_kBehindKeys;
  const int* query_ends;
  const int2* group_ends;
  const int* group_begins;
  int num_groups;

  // Returns the least and the largest group_ends of kKeys keys from first_key on, or of a few more.
  template <int kKeys>
  __device__ __forceinline__ int2 ends_of(int first_key) const {
    static_assert(kKeys <= kBehindKeys, "a tile must not end behind the zeros");
    const int last = (first_key + kKeys - 1) / kTreeGroup;
    int2 ends = make_int2(kNone, 0);
    #pragma unroll
    for (int i = 0; i <= (kKeys + kTreeGroup - 2) / kTreeGroup; ++i) {
      const int2 group = group_ends[min(first_key / kTreeGroup + i, last)];
      ends = make_int2(min(ends.x, group.x), max(ends.y, group.y));
    }
    return ends;
  }

  // Returns the first key from `key` on whose group has not ended at query row first_query; one warp. As gaps are long,
  // kLoads loads are on their way at a time, if registers allow.
  template <int kLoads = 1>
  __device__ __forceinline__ int first_open(int key, int first_query) const {
    const int lane = threadIdx.x % kWarp;
    #pragma unroll 1
    for (int group = key / kTreeGroup; group < num_groups; group += kLoads * kWarp) {
      int ends[kLoads];
      #pragma unroll
      for (int i = 0; i < kLoads; ++i) ends[i] = group_ends[min(group + i * kWarp + lane, num_groups - 1)].y;
      #pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const u32 votes = __ballot_sync(0xffffffffu, ends[i] > first_query);
        if (votes) return max(key, (group + i * kWarp + __ffs(votes) - 1) * kTreeGroup);
      }
    }
    return kNone;
  }

  // Returns the first key from `from` on that query rows from first_query on may see; one warp. in_ranges(key): the
  // first key from `key` on in their key ranges, kNone if there is none.
  template <typename InRanges>
  __device__ __forceinline__ int first_in_sight(int from, int first_query, InRanges in_ranges) const {
    int key = in_ranges(from);
    while (key != kNone) {
      const int open = first_open(key, first_query);
      if (open == key) break;
      key = in_ranges(open);
    }
    return key;
  }

  // Returns the first tile of kTileN keys from `from` on that a tile of query rows may see, kNone if there is none; one
  // warp. ranges (num_rows): the key ranges of these rows, which begin with first_query.
  template <int kTileN>
  __device__ __forceinline__ int first_tile(int from, const int2* ranges, int num_rows, int first_query) const {
    const int key = first_in_sight(from, first_query, [&](int key) {
      int first = kNone;
      #pragma unroll 1
      for (int i = threadIdx.x % kWarp; i < num_rows; i += kWarp)
        if (max(ranges[i].x, key) < ranges[i].y) first = min(first, max(ranges[i].x, key));
      return __reduce_min_sync(0xffffffffu, first);
    });
    return key == kNone ? kNone : key / kTileN * kTileN;
  }
};
CHECK_Trees;

// Sets the scores of keys whose subtrees end before a query row to -inf. ends: query_ends of these keys, aligned to 8
// bytes. A thread has two rows of every fragment: the first are `row` and row + 8.
template <int kFragments, int kBlocks>
__device__ __forceinline__ void hide_ended(float (&score)[kFragments][kBlocks][4], int row, const int* ends) {
  const int2* const mine = (const int2*)ends + threadIdx.x % 4;
  #pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const int2 end = mine[n * 4];
    #pragma unroll
    for (int f = 0; f < kFragments; ++f)
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        if (row + 16 * f + e / 2 * 8 >= (e % 2 ? end.y : end.x)) score[f][n][e] = -kInfinity;
  }
}
template <int kBlocks>
__device__ __forceinline__ void hide_ended(float (&score)[kBlocks][4], int row, const int* ends) {
  hide_ended(*(float(*)[1][kBlocks][4])&score, row, ends);
}
