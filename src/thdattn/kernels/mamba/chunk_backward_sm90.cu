// Gradients of the Mamba-2 recurrence on Hopper (sm_90a), one chunk of rows at a time, for heads of 64.

#pragma once

#include "kernels/mamba/chunk_backward_sm90.cuh"

// Computes what thd_ssd_bwd does, from the same arguments. But rows come as boxes of all columns of channels and of dy,
// and states are stored as thd_ssd_chunk_states_sm90 leaves them.
// Launch: grid (num_chunks, groups * splits), block 512, shared memory kSharedBytes.
template <typename T, int kState, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(512, 1) thd_ssd_bwd_sm90(
    const __grid_constant__ TensorMap channels, const __grid_constant__ TensorMap dy, const T* chunk_states,
    const float* scales, const float* dt, const float* sums, const int2* ranges, const float* A_log, const float* D,
    T* dx, float* dbc, float* ddt, float* partials, size_t partials_pitch, int first_chunk, int num_chunks,
    MixerSize size) {
  using Work = ChunkBackwardSm90<T, kState, kStages>;
  using Shared = typename Work::Shared;
  static_assert(same_bytes<(int)sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;

  const int chunk = first_chunk + blockIdx.x, splits = gridDim.y / size.groups, group = blockIdx.y / splits;
  const int heads = size.heads / gridDim.y, first_head = blockIdx.y * heads, end = first_head + heads;
  const int first_row = chunk * kChunk, left = size.rows - first_row;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), first_state = blockIdx.x * size.heads;
  const int of_r = num_chunks * size.heads;           // states further on
  constexpr int kNumbers = kSlab * kState;            // of a state
  if (threadIdx.x == 0) shared.init();
  if (threadIdx.x < kChunk) {
    const int at = first_row + threadIdx.x;
    shared.first[threadIdx.x] = first_of(range_at(ranges, at, size), at, size) - first_row;
    shared.largest[threadIdx.x] = 0;
  }
  __syncthreads();
  Work work(shared, scales + first_state, of_r);
  if (threadIdx.x == 0) work.load_once(&channels, group, chunk, size);
  __syncwarp();
  barrier_wait(&shared.arrived, 0);
  const size_t width = size.groups * kState;
  float* const to = dbc + ((size_t)(blockIdx.y % splits) * size.rows + first_row) * 2 * width + group * kState;

  if (role == kOnPairs) {
    registers_take<136>();
    float dproducts[1][8][4] = {};
    work.make_products();
    const u32 counted = work.counted_pairs();
    for (int head = first_head; head < end; ++head) work.on_pairs(dproducts, counted);
    work.publish_products(dproducts);
  } else if (role == kOnBehind) {
    registers_take<176>();
    float db[Work::kParts][8][4] = {};
    for (int head = first_head; head < end; ++head)
      work.on_behind(head, dx + (size_t)first_row * size.inner() + head * kSlab, D[head], left, db, size);
    work.template add_products<0>(db, shared.c);
    work.store(to, 2 * width, db, left);
  } else if (role == kOnFront) {
    registers_take<144>();
    float dc[Work::kParts][8][4] = {};
    for (int head = first_head; head < end; ++head) work.on_front(head, dc);
    work.template add_products<1>(dc, shared.b);
    work.store(to + width, 2 * width, dc, left);
  } else {
    registers_give<56>();
    // These warps are the last ones, because the first warps of the other warpgroups have the most pairs, and warps of
    // equal number modulo 4 share a scheduler.
    if (threadIdx.x == 512 - kWarp) {
      #pragma unroll 1
      for (int head = first_head; head < end; ++head) {
        const size_t numbers = size.in_heads(head, chunk);
        const T* const s = chunk_states + (size_t)(first_state + head) * kNumbers;
        work.load(&channels, &dy, s, s + (size_t)of_r * kNumbers, head, first_row, sums + numbers, dt + numbers);
      }
    } else if (threadIdx.x / kWarp == 3 * 4 + 2) {
      for (int head = first_head; head < end; ++head)
        work.rows(ddt + size.in_heads(head, chunk), -expf(A_log[head]), partials + chunk * partials_pitch + head);
    }
  }
}
