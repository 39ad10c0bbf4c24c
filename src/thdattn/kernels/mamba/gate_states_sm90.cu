// The backward of the gate fused with the gradients of states, on Hopper. It computes thd_mixer_gate_bwd, and
// thd_ssd_dstates of the result, and reads rows once.
//
// A warpgroup has a head, as in WalkSm90, and one more warp loads. dy and dz replace dout and y in shared memory, each
// number by the thread that read it.

#pragma once

#include "kernels/mamba/hopper.cuh"
#include "kernels/mamba/backward_common.cuh"
#include "kernels/mamba/fragments_sm90.cuh"

template <int kSubs, int kState>
struct GateStatesShared {
  static constexpr int kStages = 2;
  unsigned char dout[kStages][kSubs][kBox], y[kStages][kSubs][kBox], z[kStages][kSubs][kBox], x[kStages][kSubs][kBox];
  unsigned char c[kStages][kState / kSlab][kBox];
  float weights[2][kSubs][kChunk + 2];                // and, behind those of rows, the decay of the state
  u32 counts[2][kSubs][kChunk / kWarp];               // a bit for each row
  float of_d[2][kSubs][4];                            // of each warp
  Stages<kStages, 1, 4 * kSubs> stages;
};

// The tensors of a row, by boxes of 64 columns.
struct GateMaps { const TensorMap *dout, *y, *z, *channels, *dy, *dz; };

template <typename T, int kSubs, int kState>
struct GateStates {
  using Shared = GateStatesShared<kSubs, kState>;
  using Turns = Ring<Shared::kStages>;
  Shared& shared;
  const GateMaps& maps;
  const float* sums;
  const int2* ranges;
  int first_head, sub;

  // What this thread publishes to its warpgroup about a chunk: the decay of the state before until a row, or until its
  // end.
  struct Told {
    float number;
    int2 range;
  };
  static __device__ __forceinline__ int row() { return min((int)threadIdx.x % 128, kChunk - 1); }
  __device__ __forceinline__ Told ask(int chunk, const MixerSize& size) const {
    return {sums[size.in_heads(first_head + sub, chunk) + row()], range_at(ranges, chunk * kChunk + row(), size)};
  }
  __device__ __forceinline__ void tell(int parity, Told told, int chunk, const MixerSize& size) const {
    const int thread = threadIdx.x % 128, begin = chunk * kChunk;
    const bool enters = first_of(told.range, begin + row(), size) < begin;
    if (thread <= kChunk) shared.weights[parity][sub][thread] = enters ? decay_of(told.number) : 0.f;
    const u32 counts = __ballot_sync(0xffffffffu, begin + row() < size.rows && !is_empty(told.range));
    if (thread < kChunk && thread % kWarp == 0) shared.counts[parity][sub][thread / kWarp] = counts;
  }

  // Loads a chunk with one thread.
  __device__ __forceinline__ void load(const Turns& turn, int chunk, const MixerSize& size) const {
    const u32 at = turn.stage;
    u64* const full = &shared.stages.full[at];
    shared.stages.fill(turn, (4 * kSubs + kState / kSlab) * kBox);
    for (int i = 0; i < kSubs; ++i) {
      copy_box_once(shared.dout[at][i], maps.dout, 0, first_head + i, chunk * kChunk, full);
      copy_box_once(shared.z[at][i], maps.z, 0, first_head + i, chunk * kChunk, full);
      copy_box_once(shared.y[at][i], maps.y, 0, first_head + i, chunk * kChunk, full);
      copy_box(shared.x[at][i], maps.channels, 0, first_head + i, chunk * kChunk, full);
    }
    copy_columns<kState>(shared.c[at][0], maps.channels, size.c_column(size.group_of(first_head)), chunk, full);
  }

  // Computes dy and dz of a chunk. Each thread has 8 columns of 4 rows.
  __device__ __forceinline__ void gate(u32 stage, int parity) const {
    const int thread = threadIdx.x % 128, vector = thread % 8;
    float of_d = 0.f;
    #pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const int r = thread / 8 + i * 16, at = r * kRowBytes + (vector ^ r % 8) * 16;
      const bool counts = shared.counts[parity][sub][r / kWarp] >> r % kWarp & 1;
      uint4& dout = *(uint4*)(shared.dout[stage][sub] + at);
      uint4& y = *(uint4*)(shared.y[stage][sub] + at);
      of_d += gate_back<T>(dout, y, *(const uint4*)(shared.z[stage][sub] + at),
                           *(const uint4*)(shared.x[stage][sub] + at), counts);
    }
    publish_to_async();
    of_d = warp_sum(of_d);
    if (me().lane == 0) shared.of_d[parity][sub][me().warp] = of_d;
  }

  // Stores what all threads of a warpgroup have computed, with one of them.
  __device__ __forceinline__ void store(u32 stage, int parity, int chunk, float* partial_d) const {
    store_box(maps.dy, shared.dout[stage][sub], 0, first_head + sub, chunk * kChunk);
    store_box(maps.dz, shared.y[stage][sub], 0, first_head + sub, chunk * kChunk);
    add_commit();
    const float* const of_d = shared.of_d[parity][sub];
    *partial_d = (of_d[0] + of_d[1]) + (of_d[2] + of_d[3]);
  }
};

// dy, dz and the chunks' partials of the gradient of D, as thd_mixer_gate_bwd computes them, and dstates and decays, as
// thd_ssd_dstates does. Boxes: of dout, y and dy (rows, inner); of z and dz, which are columns of rows; of channels.
// Launch: grid (inner / (64 * kSubs), segments), block 128 * kSubs + 32, shared memory kSharedBytes.
template <typename T, int kSubs, int kState, int kSharedBytes>
__global__ void __launch_bounds__(128 * kSubs + kWarp, 1) thd_ssd_gate_states_sm90(
    const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap z, const __grid_constant__ TensorMap y,
    const __grid_constant__ TensorMap channels, const __grid_constant__ TensorMap dy,
    const __grid_constant__ TensorMap dz, float* partials, size_t partials_pitch, const float* sums, const int2* ranges,
    float* dstates, float* decays, MixerSize size) {
  using Work = GateStates<T, kSubs, kState>;
  static_assert(same_bytes<(int)sizeof(typename Work::Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *(typename Work::Shared*)memory;
  const int segment = blockIdx.y, first_head = blockIdx.x * kSubs;
  const int sub = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), head = first_head + sub;
  const int begin = segment * size.segment, count = min(size.segment, size.chunks() - begin);
  if (threadIdx.x == 0) shared.stages.init();
  __syncthreads();
  const GateMaps maps{&dout, &y, &z, &channels, &dy, &dz};
  const Work work{shared, maps, sums, ranges, first_head, sub};
  typename Work::Turns ring{};
  if (sub == kSubs) {
    if (threadIdx.x % kWarp == 0)
      for (int chunk = begin + count - 1; chunk >= begin; --chunk, ring.advance()) work.load(ring, chunk, size);
    return;
  }
  const bool leads = threadIdx.x % 128 == 0;
  StateOfHead<T, kState> state;
  state.clear();
  float through = 1.f;
  int parity = 0;
  work.tell(0, work.ask(begin + count - 1, size), begin + count - 1, size);
  for (int chunk = begin + count - 1; chunk >= begin; --chunk, parity ^= 1, ring.advance()) {
    const int next = max(chunk - 1, begin);
    const auto told = work.ask(next, size);
    wait(1 + sub, 128);                               // all is published of this chunk
    shared.stages.wait(ring);
    work.gate(ring.stage, parity);
    wait(1 + sub, 128);
    if (leads) work.store(ring.stage, parity, chunk, partials + chunk * partials_pitch + head);
    __syncwarp();
    const float* const weights = shared.weights[parity][sub];
    through *= weights[kChunk];
    state.advance(shared.dout[ring.stage][sub], shared.c[ring.stage][0], weights, weights[kChunk]);
    if (leads) add_wait_read();
    shared.stages.release(ring);
    work.tell(1 - parity, told, next, size);
  }
  state.store(dstates + size.state_of(segment, head));
  if (leads) decays[(size_t)segment * size.heads + head] = through;
}
