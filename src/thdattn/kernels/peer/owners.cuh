// Where a backward stores partial sums of dk and dv: in the memory of the rank that owns the keys, which adds them.

#pragma once

#include "kernels/common.cuh"

// of: for dk and dv, where this rank's partial sums begin in the memory of every rank, fp32
// places (k_rows): the owner of every row (-1: none) and its row there; null: all rows stay on this rank
struct Owners {
  float* of[2][kMaxRanks];
  const int2* places;

  // Returns where row `row` of `pitch` floats goes, of dk or (which = 1) of dv; null: nowhere.
  __device__ __forceinline__ float* row_of(int which, int row, u32 pitch) const {
    const int2 place = places[row];
    float* owned = nullptr;
    #pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank)      // arguments are indexed by constants
      if (rank == place.x) owned = of[which][rank];
    return owned ? owned + (size_t)place.y * pitch : nullptr;
  }
};
CHECK_Owners;
