// Adds the partial sums that several ranks have of the same rows, from this GPU's memory or from that of others.

#pragma once

#include "kernels/common.cuh"

// Where each rank's partial sums of two arrays begin: in this GPU's memory, or in that of another one, mapped here.
struct Partials { const float4* of[2][kMaxRanks]; };
CHECK_Partials;

// Sums the ranks' partial sums of two arrays (dk and dv) in one launch: in the order of ranks, so that every run gives
// the same bits, and rounded once. One thread computes 8 elements. Bound by memory bandwidth, or by the links.
//
// partials (any, 8 * words): fp32, where row rows[t] belongs to row t of out (-1: the rank has none); without `rows`,
// row t
// rows: (num_rows,) for all ranks with rows_pitch = 0, or (num_ranks, num_rows) with rows_pitch = num_rows
// own: -1 if `partials` has a place for every rank; or this rank, whose rows are at the second place, and all others'
// at the first
// out (num_rows, 8 * words), with `pitch` words from row to row: 0 where no rank has a row; with `own`, rows that only
// this rank has are not written
// Launch: grid (any, 2), block 256.
template <typename T>
__global__ void __launch_bounds__(256) thd_peer_reduce(
    uint4* __restrict__ out0, int words0, int pitch0, uint4* __restrict__ out1, int words1, int pitch1,
    const Partials partials, const int* __restrict__ rows, int rows_pitch, int own, int num_ranks, int num_rows) {
  uint4* const out = blockIdx.y ? out1 : out0;
  const int words = blockIdx.y ? words1 : words0, pitch = blockIdx.y ? pitch1 : pitch0;
  const size_t step = (size_t)gridDim.x * blockDim.x, end = (size_t)num_rows * words;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += step) {
    const int t = i / words, word = i % words;
    bool is_done = own >= 0 && rows[(size_t)own * rows_pitch + t] >= 0;
    for (int rank = 0; is_done && rank < num_ranks; ++rank)
      is_done = rank == own || rows[(size_t)rank * rows_pitch + t] < 0;
    if (is_done) continue;
    float4 a = make_float4(-0.f, -0.f, -0.f, -0.f), b = a;  // -0, as -0 + x is x bit by bit
    bool found = false;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int row = rows ? rows[(size_t)rank * rows_pitch + t] : t;
      if (row < 0) continue;
      const float4* const of = partials.of[blockIdx.y][own < 0 ? rank : rank == own];
      const float4* const partial = of + 2 * ((size_t)row * words + word);
      const float4 c = partial[0], d = partial[1];
      a.x += c.x, a.y += c.y, a.z += c.z, a.w += c.w;
      b.x += d.x, b.y += d.y, b.z += d.z, b.w += d.w;
      found = true;
    }
    uint4 sum = make_uint4(pack<T>(a.x, a.y), pack<T>(a.z, a.w), pack<T>(b.x, b.y), pack<T>(b.z, b.w));
    if (!found) sum = make_uint4(0, 0, 0, 0);
    out[(size_t)t * pitch + word] = sum;
  }
}
