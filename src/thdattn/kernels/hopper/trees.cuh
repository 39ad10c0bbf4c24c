// Prefix trees in the Hopper kernels (sm_90a): what query tiles see of key tiles.

#pragma once

#include "kernels/hopper/common.cuh"
#include "kernels/trees.cuh"

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
