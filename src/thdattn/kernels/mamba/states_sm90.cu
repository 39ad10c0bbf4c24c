// The terms that segments of rows add to the state, on Hopper (sm_90a) with wgmma and TMA. It computes what
// thd_ssd_states does.

#pragma once

#include "kernels/mamba/hopper.cuh"

template <int kSubs, int kState, int kStages>
struct StatesShared {
  unsigned char x[kStages][kSubs][kBox], b[kStages][kState / kSlab][kBox];
  float leave[kStages][kSubs][kChunk], sums[kStages][kSubs][kChunk];
  Stages<kStages, 1, 4 * kSubs> stages;
};

// Computes what thd_ssd_states does, from the same arguments. One of the threads loads: a warp of its own would leave
// registers for only one thread block at a time.
// Launch: grid (inner / (64 * kSubs), segments), block 128 * kSubs, shared memory kSharedBytes.
template <typename T, int kSubs, int kState, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(128 * kSubs, 2) thd_ssd_states_sm90(
    const __grid_constant__ TensorMap channels, const float* sums, const float* leave, float* states,
    const int2* ranges, float* decays, int used_behind, MixerSize size) {
  using Shared = StatesShared<kSubs, kState, kStages>;
  static_assert(same_bytes<(int)sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int slab = blockIdx.x * kSubs, sub = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int group = size.group_of(slab * kSlab / size.head_dim);
  const Segment segment(blockIdx.y, ranges, used_behind, size);
  Ring<kStages> ring{}, to_fill{};
  auto load = [&](int chunk) {
    if (threadIdx.x || chunk >= segment.end) return;
    const u32 at = to_fill.stage;
    u64* const full = &shared.stages.full[at];
    shared.stages.fill(to_fill, (kSubs + kState / kSlab) * kBox + kSubs * 2 * 4 * kChunk);
    copy_columns<kSlab * kSubs>(shared.x[at][0], &channels, slab * kSlab, chunk, full);
    copy_columns<kState>(shared.b[at][0], &channels, size.b_column(group), chunk, full);
    for (int i = 0; i < kSubs; ++i) {
      const size_t from = size.in_heads((slab + i) * kSlab / size.head_dim, chunk);
      copy_bulk(shared.leave[at][i], leave + from, 4 * kChunk, full);
      copy_bulk(shared.sums[at][i], sums + from, 4 * kChunk, full);
    }
    to_fill.advance();
  };

  if (threadIdx.x == 0) shared.stages.init();
  for (int i = 0; i + 1 < kStages; ++i) load(segment.from + i);
  const int column = (slab + sub) * kSlab;
  if (threadIdx.x % 128 == kWarp && column % size.head_dim == 0)
    segment.write_decay(decays, sums, column / size.head_dim, size);
  __syncthreads();

  StateOfHead<T, kState> state;
  state.clear();
  for (int chunk = segment.from; chunk < segment.end; ++chunk, ring.advance()) {
    load(chunk + kStages - 1);
    __syncwarp();
    shared.stages.wait(ring);
    // Behind the first of these chunks all rows are of one sequence.
    const float through = chunk > segment.from ? decay_of(shared.sums[ring.stage][sub][kChunk - 1]) : 0.f;
    state.advance(shared.x[ring.stage][sub], shared.b[ring.stage][0], shared.leave[ring.stage][sub], through);
    shared.stages.release(ring);
  }
  state.store(states + size.state_of(segment.number, 0) + (size_t)column * kState);
}
