// Gradients of the Mamba-2 recurrence, one chunk of rows at a time.

#pragma once

#include "kernels/mamba/chunk_backward.cuh"

// Gradients of x, B, C and dt of each chunk, and its partial of the gradient of A. A thread block processes some heads
// of a group, one after another. Bound by memory bandwidth.
//
// channels (rows, channels), dy (rows, inner); chunk_states and scales of num_chunks chunks from thd_ssd_chunk_states
// dx (rows, inner); ddt (heads, chunks * kChunk)
// dbc (splits, rows, 2 * groups * state_dim): partials of dB and dC of each of the gridDim.y / groups parts of a
// group's heads
// partials: (chunks, heads), with partials_pitch numbers from one chunk to the next
// Launch: grid (num_chunks, groups * splits), block 256, shared memory kSharedBytes.
template <typename T, int kHeadDim, int kStateDim, int kSlice, int kBlocks, int kSharedBytes>
__global__ void __launch_bounds__(256, kBlocks) thd_ssd_bwd(
    const T* __restrict__ channels, const T* __restrict__ dy, const T* __restrict__ chunk_states,
    const float* __restrict__ scales,
    const float* __restrict__ dt, const float* __restrict__ sums, const int2* __restrict__ ranges,
    const float* __restrict__ A_log, const float* __restrict__ D, T* __restrict__ dx, float* __restrict__ dbc,
    float* __restrict__ ddt, float* __restrict__ partials, size_t partials_pitch, int first_chunk, int num_chunks,
    MixerSize size) {
  using Work = ChunkBackward<T, kHeadDim, kStateDim, kSlice>;
  using Shared = typename Work::Shared;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;

  const int chunk = first_chunk + blockIdx.x, splits = gridDim.y / size.groups, group = blockIdx.y / splits;
  const int heads = size.heads / gridDim.y, first_head = blockIdx.y * heads;
  const size_t first_row = (size_t)chunk * kChunk;
  const size_t state_size = (size_t)kHeadDim * kStateDim;
  const T* const states = chunk_states + (size_t)blockIdx.x * size.heads * state_size;
  const T* const dstates = states + (size_t)num_chunks * size.heads * state_size;

  auto load_rows = [&](int head) {
    load_chunk<T, kHeadDim, 256>(shared.x, channels + head * kHeadDim, size.channels(), chunk, size.rows, threadIdx.x);
    load_chunk<T, kHeadDim, 256>(shared.dy, dy + head * kHeadDim, size.inner(), chunk, size.rows, threadIdx.x);
    if (threadIdx.x < kChunk / 4) {
      const size_t from = size.in_heads(head, chunk) + 4 * threadIdx.x;
      copy_async_16(shared.sums[head % 2] + 4 * threadIdx.x, sums + from, true);
      copy_async_16(shared.dt[head % 2] + 4 * threadIdx.x, dt + from, true);
    }
    copies_commit();
  };
  // Offsets of this thread's 16-byte vector in the first row that it loads, and of those in the rows after it.
  constexpr int kVectors = kSlice / 8, kRows = 256 / kVectors;
  const u32 vector = threadIdx.x / kVectors * kStateDim + threadIdx.x % kVectors * 8;
  const int place = threadIdx.x / kVectors * Work::kSPitch + threadIdx.x % kVectors * 8;
  auto load_states = [&](int head, int slice) {
    const T *const s = states + head * state_size + slice * kSlice + vector;
    const T *const r = dstates + head * state_size + slice * kSlice + vector;
    #pragma unroll
    for (int i = 0; i < kHeadDim / kRows; ++i) {
      copy_async_16(shared.r + place + i * kRows * Work::kSPitch, r + i * kRows * kStateDim, true);
      copy_async_16(shared.s + place + i * kRows * Work::kSPitch, s + i * kRows * kStateDim, true);
    }
    copies_commit();
  };

  load_states(first_head, 0);
  load_rows(first_head);
  Work work(shared, chunk, size);
  work.state_scales = num_chunks * size.heads * (kStateDim / Work::kWalkSlice);
  work.begin(channels + size.b_column(group), channels + size.c_column(group), ranges);
  for (int head = first_head; head < first_head + heads; ++head) {
    copies_wait();
    __syncthreads();
    work.sums = shared.sums[head % 2], work.dt = shared.dt[head % 2];
    work.scales = scales + ((size_t)blockIdx.x * size.heads + head) * (kStateDim / Work::kWalkSlice);
    work.pairs();
    float of_front[2] = {0.f, 0.f}, across = 0.f;
    #pragma unroll
    for (int slice = 0; slice < Work::kSlices; ++slice) {
      if (slice) {
        copies_wait();
        __syncthreads();
      }
      across += work.states(slice, of_front);
      __syncthreads();
      if (slice + 1 < Work::kSlices) load_states(head, slice + 1);
      else if (head + 1 < first_head + heads) load_states(head + 1, 0);
    }
    work.tell(shared.of_front[work.half], of_front[0], of_front[1]);
    across = warp_sum(across);
    if (work.lane == 0) shared.across[work.warp] = across;
    work.finish(dx + first_row * size.inner() + head * kHeadDim, D[head]);
    __syncthreads();
    if (head + 1 < first_head + heads) load_rows(head + 1);
    if (work.warp == head % 8)
      work.rows(ddt + size.in_heads(head, chunk), -expf(A_log[head]), partials + chunk * partials_pitch + head);
  }
  work.add_products();
  const size_t width = size.groups * kStateDim;
  float* const to = dbc + ((size_t)(blockIdx.y % splits) * size.rows + first_row) * 2 * width + group * kStateDim;
  work.store(to, 2 * width, work.db);
  work.store(to + width, 2 * width, work.dc);
}
