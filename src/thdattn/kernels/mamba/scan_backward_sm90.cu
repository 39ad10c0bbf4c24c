// States of the Mamba-2 recurrence and their gradients at every chunk, on Hopper (sm_90a) with wgmma and TMA, for heads
// of 64. It computes what thd_ssd_dstates and thd_ssd_chunk_states do.
//
// Each warpgroup has the state of a head, 64 x kState in registers. All heads of a thread block read B or C of one
// group. One of the threads loads chunks ahead: a warp of its own would leave registers for only one thread block at a
// time.

#pragma once

#include "kernels/mamba/hopper.cuh"
#include "kernels/mamba/backward_common.cuh"
#include "kernels/mamba/fragments_sm90.cuh"

template <int kSubs, int kState, int kStages>
struct WalkSharedSm90 {
  unsigned char rows[kStages][kSubs][kBox], columns[kStages][kState / kSlab][kBox];
  unsigned char made[kSubs][kState / kSlab][kBox];    // states on their way out
  float weights[2][kSubs][kChunk + 2];                // and, behind those of rows, the decay of the state
  int largest[2][kSubs][4];                           // bits of the largest number of each warp's state
  Stages<kStages, 1, 4 * kSubs> stages;
};

// The walk over chunks, see Walk. rows: maps of x or dy; columns: of channels, from `column` on those of B or C.
template <typename T, bool kBack, int kSubs, int kState, int kStages>
struct WalkSm90 {
  using Shared = WalkSharedSm90<kSubs, kState, kStages>;
  static constexpr int kStep = kBack ? -1 : 1;
  Shared& shared;
  const TensorMap *rows, *columns;
  const float *sums, *leave;                          // leave: if forward
  const int2* ranges;
  int first_head, sub, column;
  StateOfHead<T, kState> state;

  __device__ __forceinline__ int head() const { return first_head + sub; }

  // What this thread publishes to its warpgroup about a chunk: the weight of a row, or the decay of the state.
  struct Told {
    float number;
    int2 range;
  };
  static __device__ __forceinline__ int row() { return min((int)threadIdx.x % 128, kChunk - 1); }
  __device__ __forceinline__ Told ask(int chunk, const MixerSize& size) const {
    const float* const numbers = !kBack && threadIdx.x % 128 < kChunk ? leave : sums;
    return {numbers[size.in_heads(head(), chunk) + row()], range_at(ranges, chunk * kChunk + row(), size)};
  }
  __device__ __forceinline__ void tell(int parity, Told told, int chunk, const MixerSize& size) const {
    const int thread = threadIdx.x % 128, begin = chunk * kChunk;
    const bool enters = first_of(told.range, begin + row(), size) < begin;
    const bool is_weight = !kBack && thread < kChunk;
    if (thread <= kChunk)
      shared.weights[parity][sub][thread] = is_weight ? told.number : enters ? decay_of(told.number) : 0.f;
    if constexpr (kScalesStates<T>) {
      const int bits = largest_of_warp(state.s);
      if (threadIdx.x % kWarp == 0) shared.largest[parity][sub][threadIdx.x / kWarp % 4] = bits;
    }
  }
  // Returns the scale of an operand made from the state, which could exceed the range of T.
  __device__ __forceinline__ PowerOfTwo scale_for(int parity) const {
    if constexpr (!kScalesStates<T>) return {1.f, 1.f};
    const int* const largest = shared.largest[parity][sub];
    return scale_of(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
  }

  __device__ __forceinline__ void load(Ring<kStages>& ring, int chunk) const {
    if (threadIdx.x == 0) {
      u64* const full = &shared.stages.full[ring.stage];
      shared.stages.fill(ring, (kSubs + kState / kSlab) * kBox);
      copy_columns<kSlab * kSubs>(shared.rows[ring.stage][0], rows, first_head * kSlab, chunk, full);
      copy_columns<kState>(shared.columns[ring.stage][0], columns, column, chunk, full);
    }
    __syncwarp();
    ring.advance();
  }

  // Processes the chunks from `begin` to `end`, and calls before(chunk, parity) before each. Returns the decay of the
  // state before them.
  template <typename Before>
  __device__ __forceinline__ float operator()(int begin, int end, const MixerSize& size, Before before) {
    const int count = end - begin;
    int chunk = kBack ? end - 1 : begin, parity = 0;
    Ring<kStages> ring{}, to_fill{};
    auto after = [&](int left, int steps) { return chunk + (left > steps ? steps : left - 1) * kStep; };
    for (int ahead = 0; ahead < min(kStages - 1, count); ++ahead) load(to_fill, chunk + ahead * kStep);
    tell(0, ask(chunk, size), chunk, size);
    Told told = ask(after(count, 1), size);           // of the next chunk, a step before it is published
    float through = 1.f;
    for (int left = count; left > 0; --left, chunk += kStep, parity ^= 1, ring.advance()) {
      if (left >= kStages) load(to_fill, chunk + (kStages - 1) * kStep);
      wait(1 + sub, 128);                             // this chunk is published, and the one before has been read
      before(chunk, parity);
      const Told later = ask(after(left, 2), size);   // not before: reads of the state would wait for it
      const float* const weights = shared.weights[parity][sub];
      through *= weights[kChunk];
      shared.stages.wait(ring);
      state.advance(shared.rows[ring.stage][sub], shared.columns[ring.stage][0], weights, weights[kChunk]);
      shared.stages.release(ring);
      tell(1 - parity, told, after(left, 1), size);
      told = later;
    }
    return through;
  }
};

// Computes what thd_ssd_chunk_states does, from the same arguments. But rows come as boxes of all columns of channels
// and of dy. States are stored as in shared memory: boxes of 64 columns one after another, with swizzled vectors.
// Launch: grid (segments of these, inner / (64 * kSubs)), block 128 * kSubs, shared memory kSharedBytes.
template <typename T, bool kBack, int kSubs, int kState, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(128 * kSubs, 2) thd_ssd_chunk_states_sm90(
    const __grid_constant__ TensorMap channels, const __grid_constant__ TensorMap dy, const float* sums,
    const float* leave, const int2* ranges, const float* states, int first_segment, T* made, float* scales,
    MixerSize size) {
  using Step = WalkSm90<T, kBack, kSubs, kState, kStages>;
  static_assert(same_bytes<(int)sizeof(typename Step::Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *(typename Step::Shared*)memory;
  const int segment = first_segment + blockIdx.x, first_head = blockIdx.y * kSubs;
  const int sub = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), group = size.group_of(first_head);
  const int begin = segment * size.segment, end = min(begin + size.segment, size.chunks());
  if (threadIdx.x == 0) shared.stages.init();
  __syncthreads();
  Step walk{shared, kBack ? &dy : &channels, &channels, sums, leave, ranges, first_head, sub,
            kBack ? size.c_column(group) : size.b_column(group)};
  walk.state.load(states + size.state_of(segment, walk.head()));
  walk(begin, end, size, [&](int chunk, int parity) {
    const auto [warp, lane] = me();
    const size_t number = (size_t)(chunk - first_segment * size.segment) * size.heads + walk.head();
    constexpr int kParts = kState / kSlab, kBytes = 16 * kRowBytes;  // of a warp's rows of a box
    const unsigned char* const tile = shared.made[sub][0] + warp * kBytes;
    const PowerOfTwo scale = walk.scale_for(parity);
    if (kScalesStates<T> && threadIdx.x % 128 == 0) scales[number] = scale.inverse;
    if (lane == 0) add_wait_read();                   // this warp's chunk before has been read
    __syncwarp();
    round_to<T>(shared.made[sub][0], walk.state.s[0], scale.factor);
    publish_to_async();
    __syncwarp();
    if (lane == 0) {
      unsigned char* const to = (unsigned char*)(made + number * kSlab * kState) + warp * kBytes;
      #pragma unroll
      for (int part = 0; part < kParts; ++part) store_bulk((float*)(to + part * kBox), tile + part * kBox, kBytes);
      add_commit();
    }
    __syncwarp();
  });
  if (me().lane == 0) add_wait_read();
}
