// Writes keys and values into a KV cache. Sequence s has lengths[s] rows from row s * capacity on. A sequence that does
// not fit is never truncated: its length becomes capacity + 1 and stays so.

#pragma once

#include "kernels.cu"

// Appends new rows (num_seqs * new_rows, ..) to their sequences, and counts them. It also writes which keys the new
// rows see as queries, by the mask's rule on positions. They see none in a sequence that does not fit.
//
// key_ranges (num_seqs * new_rows); left, right: window, -1 = unlimited; pitch: 16-byte words per row
// Launch: early, grid num_seqs, block 256.
__global__ void __launch_bounds__(256) thd_cache_append(
    uint4* __restrict__ k_cache, const uint4* k, int k_pitch, uint4* __restrict__ v_cache,
    const uint4* v, int v_pitch, int* __restrict__ lengths, int2* __restrict__ key_ranges, int new_rows,
    int capacity, int left, int right) {
  wait_for_kernel_before();
  const int seq = blockIdx.x, before = lengths[seq];
  const bool fits = before <= capacity - new_rows;
  const int length = fits ? before + new_rows : capacity + 1, first = seq * capacity;
  if (fits) {
    const size_t to = (size_t)first + before, from = (size_t)seq * new_rows;
    for (int i = threadIdx.x; i < new_rows * k_pitch; i += blockDim.x)
      k_cache[to * k_pitch + i] = k[from * k_pitch + i];
    for (int i = threadIdx.x; i < new_rows * v_pitch; i += blockDim.x)
      v_cache[to * v_pitch + i] = v[from * v_pitch + i];
  }
  for (int i = threadIdx.x; i < new_rows; i += blockDim.x) {
    const int2 seen = in_sight(before + i, length, left, right);
    key_ranges[(size_t)seq * new_rows + i] = fits ? make_int2(first + seen.x, first + seen.y) : make_int2(0, 0);
  }
  __syncthreads();  // everyone has read the length
  if (threadIdx.x == 0) lengths[seq] = length;
}

// Copies the sequences of a pack, in sequence order, to the cached sequences of the same numbers, and replaces those.
// wrong: 1 if the lengths of the pack were invalid, so that no sequence fits; null if they are valid.
// Launch: grid ceil(max(num_rows, num_seqs) / 8), block 256, one warp per row. Bound by memory bandwidth.
__global__ void __launch_bounds__(256) thd_cache_fill(
    uint4* __restrict__ k_cache, const uint4* __restrict__ k, int k_pitch, uint4* __restrict__ v_cache,
    const uint4* __restrict__ v, int v_pitch, int* __restrict__ lengths, const int* __restrict__ cu_seqlens,
    const int* __restrict__ cu_seqlens_padded, const int* wrong, int num_seqs, int num_rows, int capacity) {
  const int row = blockIdx.x * 8 + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (row < num_seqs && lane == 0)
    lengths[row] = wrong && *wrong ? capacity + 1 : min(cu_seqlens[row + 1] - cu_seqlens[row], capacity + 1);
  if (row >= num_rows || row >= cu_seqlens_padded[num_seqs]) return;
  const int seq = sequence_of(cu_seqlens_padded, num_seqs, row), position = row - cu_seqlens_padded[seq];
  const int length = cu_seqlens[seq + 1] - cu_seqlens[seq];
  if (length > capacity || position >= length) return;
  const size_t to = (size_t)seq * capacity + position;
  for (int i = lane; i < k_pitch; i += kWarp) k_cache[to * k_pitch + i] = k[(size_t)row * k_pitch + i];
  for (int i = lane; i < v_pitch; i += kWarp) v_cache[to * v_pitch + i] = v[(size_t)row * v_pitch + i];
}
