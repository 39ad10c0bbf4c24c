// Where shares of dk and dv go that several ranks have of the same keys: to the memory of the rank that owns the keys.

#pragma once

#include "kernels/common.cuh"

// of: of dk and of dv, where this rank's shares begin in the memory of every rank, fp32
// places (k_rows): of every row its owner, -1: nobody, and its row there; null: all stay on this rank
struct Owners {
  float* of[2][kMaxRanks];
  const int2* places;

  // Where row `row`, of `pitch` floats, of dk or (which 1) dv goes; null: nowhere.
  __device__ __forceinline__ float* row_of(int which, int row, u32 pitch) const {
    const int2 place = places[row];
    float* owned = nullptr;
    #pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank)      // arguments are read by numbers that the compiler knows
      if (rank == place.x) owned = of[which][rank];
    return owned ? owned + (size_t)place.y * pitch : nullptr;
  }
};
CHECK_Owners;
