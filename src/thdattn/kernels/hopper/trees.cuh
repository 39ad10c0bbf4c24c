// Prefix trees in the Hopper kernels (sm_90a): what query tiles see of key tiles.

#pragma once

#include "kernels/hopper/common.cuh"
#include "kernels/trees.cuh"

// The key tiles that a query tile sees, found by one warp. It takes as few instructions as possible for tiles that are
// in the key ranges of all rows, as most are.
//
// kLoads: as for Trees::first_open
// inside: the keys that are in all these ranges
// least, most: of the ends of the last found tile's keys, of which each lane reads four
template <int kKeys, int kLoads, bool kTrees> struct KeyTiles {
  static_assert(kKeys % 4 == 0 && kKeys <= 4 * kWarp && kKeys <= Trees::kBehindKeys, "each lane reads four ends");
  Trees trees;
  int first_query;
  int2 inside;
  int least, most;

  template <int kRows>
  __device__ __forceinline__ KeyTiles(Trees trees, int first_query, const int2 (&range)[kRows])
      : trees(trees), first_query(first_query), inside(range[0]) {
    if (!kTrees) return;
    #pragma unroll
    for (int i = 1; i < kRows; ++i) inside = make_int2(max(inside.x, range[i].x), min(inside.y, range[i].y));
    inside = make_int2(__reduce_max_sync(0xffffffffu, inside.x), __reduce_min_sync(0xffffffffu, inside.y));
  }
  __device__ __forceinline__ bool is_inside(int row) const { return inside.x <= row && row + kKeys <= inside.y; }

  // Returns the first key of the next tile from `from` on, a multiple of 4, or kNone if there is none. in_ranges(key):
  // as for Trees::first_in_sight.
  template <typename InRanges>
  __device__ __forceinline__ int find(int from, InRanges in_ranges) {
    int key = is_inside(from) ? from : in_ranges(from);
    while (key != kNone) {
      const int row = key & ~3, first = me().lane * 4;
      least = kNone, most = 0;
      if (first < kKeys) {
        const int4 ends = *(const int4*)(trees.query_ends + row + first);
        least = min(min(ends.x, ends.y), min(ends.z, ends.w)), most = max(max(ends.x, ends.y), max(ends.z, ends.w));
      }
      const u32 open = __ballot_sync(0xffffffffu, most > first_query);
      if (open & 1) return row;
      key = in_ranges(open ? row + (__ffs(open) - 1) * 4 : trees.template first_open<kLoads>(row + kKeys, first_query));
    }
    return kNone;
  }
  // Returns the flags of the last found tile. of_ranges(): those that key ranges give.
  template <int kGroups, typename OfRanges>
  __device__ __forceinline__ u32 flags(int row, OfRanges of_ranges) const {
    constexpr u32 kAllSee = kSees * 0x55 & ((1 << 2 * kGroups) - 1);
    u32 flags = is_inside(row) ? kAllSee : of_ranges();
    #pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (!__any_sync(0xffffffffu, most > first_query + group * 64)) flags &= ~(kSees << 2 * group);
      if (__any_sync(0xffffffffu, least < first_query + (group + 1) * 64)) flags |= kEnded << 2 * group;
    }
    return flags;
  }
};

// Corrects the flags that key ranges give kGroups groups of 64 query rows from first_query on, for a tile of keys.
template <int kGroups, int kKeys>
__device__ __forceinline__ u32 flags_in_trees(Trees trees, u32 flags, int first_query, int first_key) {
  const int2 ends = trees.template ends_of<kKeys>(first_key);
  #pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (ends.y <= first_query + group * 64) flags &= ~(kSees << 2 * group);
    if (ends.x < first_query + (group + 1) * 64) flags |= kEnded << 2 * group;
  }
  return flags;
}

// Returns the last key tile from `tile` down to `least` that has a group whose keys are seen by query rows among kRows
// from `row` on, -1 if there is none; one warp. It decides as the scheduler of the backward does: see QuerySight.
template <int kRows, int kKeys>
__device__ __forceinline__ int last_tile_in_sight(Trees trees, int tile, int least, int row) {
  constexpr int kGroups = kKeys / Trees::kTreeGroup;
  static_assert(Trees::kTreeGroup == 64 && kKeys % 64 == 0, "QuerySight has groups of 64 keys");
  #pragma unroll 1
  for (; tile >= least; tile -= kWarp) {
    const int mine = max(tile - me().lane, least);
    bool sees = false;
    #pragma unroll 1
    for (int group = mine * kGroups; group < (mine + 1) * kGroups; ++group)
      sees |= trees.group_begins[group] < row + kRows && trees.group_ends[group].y > row;
    const u32 votes = __ballot_sync(0xffffffffu, sees);
    if (votes) return max(tile - (__ffs(votes) - 1), least);
  }
  return -1;
}
