// The convolution of x fused with the states of segments, on Hopper. It computes thd_mixer_conv for x, and
// thd_ssd_states of the result, and reads x once.
//
// Roles are those of thd_ssd_states_sm90. Chunks of x are loaded with the rows before them that the convolution sees.

#pragma once

#include "kernels/mamba/hopper.cuh"
#include "kernels/mamba/conv.cu"

[[maybe_unused]] constexpr int kBefore = 8;           // rows before a chunk: the swizzle repeats after as many
[[maybe_unused]] constexpr int kRawBox = (kChunk + kBefore) * kRowBytes;

template <int kSubs, int kState, int kStages>
struct ConvStatesShared {
  unsigned char raw[kStages][kSubs][kRawBox], b[kStages][kState / kSlab][kBox];
  float leave[kStages][kSubs][kChunk], sums[kStages][kSubs][kChunk];
  Stages<kStages, 1, 4 * kSubs> stages;

  struct Heads { int group, of[kSubs]; };             // group and heads of these slabs

  // Loads a chunk: 64-column slabs of x from `slab` on, B, and the numbers of every row.
  __device__ __forceinline__ void load(const Ring<kStages>& ring, const TensorMap* x, const TensorMap* channels,
                                       const float* sums_of_rows, const float* leave_of_rows, int slab,
                                       const Heads& heads, int chunk, const MixerSize& size) {
    const u32 at = ring.stage;
    u64* const full = &stages.full[at];
    stages.fill(ring, kSubs * kRawBox + kState / kSlab * kBox + kSubs * 2 * 4 * kChunk);
    #pragma unroll
    for (int i = 0; i < kSubs; ++i) {
      const size_t from = size.in_heads(heads.of[i], chunk);
      copy_box(raw[at][i], x, 0, slab + i, chunk * kChunk - kBefore, full);
      copy_bulk(leave[at][i], leave_of_rows + from, 4 * kChunk, full);
      copy_bulk(sums[at][i], sums_of_rows + from, 4 * kChunk, full);
    }
    copy_columns<kState>(b[at][0], channels, size.b_column(heads.group), chunk, full);
  }
};

// Convolves a chunk of 64 columns of x in place, with one warpgroup. Each thread has kColumns columns and 8 consecutive
// rows.
//
// column: the first of this thread, in a row of x; barrier: of the warpgroup
// all_in_sight: every row of the chunk sees all rows that the convolution reaches
template <typename T, int kWidth>
__device__ __forceinline__ void convolve_chunk(unsigned char* x, Convolution<T, kWidth>& convolution, const T* halo,
                                               int column, int chunk, bool all_in_sight, const int2* ranges,
                                               int barrier, const MixerSize& size) {
  constexpr int kReach = kWidth - 1, kRows = 8;
  static_assert(kReach <= kBefore, "a chunk is loaded with kBefore rows before it");
  static_assert(128 / (kSlab / kColumns) * kRows == kChunk, "a warpgroup convolves all rows of a chunk");
  const int thread = threadIdx.x % 128, first = thread / (kSlab / kColumns) * kRows, begin = chunk * kChunk + first;
  const int vector = thread % (kSlab / kColumns) * kColumns / 8, in_vector = thread % (kSlab / kColumns) * kColumns % 8;
  auto place = [&](int row) { return row * kRowBytes + ((vector ^ row % 8) * 8 + in_vector) * 2; };
  x += first * kRowBytes;
  // initcheck reports reads of a halo that was not set, as in convolve_rows; forget_all_but discards them.
  #pragma unroll
  for (int tap = 0; tap < kReach; ++tap) {
    const int row = tap - kReach;
    const unsigned char* const there = x + row * kRowBytes + ((vector ^ (row + 8) % 8) * 8 + in_vector) * 2;
    convolution.next(begin + row < 0 ? *(const Columns*)(halo + (size_t)(kReach + row) * size.channels() + column)
                                     : *(const Columns*)there);
  }
  wait(barrier, 128);                                 // all have read the rows that others overwrite
  #pragma unroll 4
  for (int i = 0; i < kRows; ++i) {
    convolution.next(*(const Columns*)(x + place(i)));
    u32 valid = ~0u;
    if (!all_in_sight) {
      const int in_sight = sight_of(range_at(ranges, begin + i, size), begin + i, kReach, size);
      convolution.forget_all_but(in_sight);
      valid = in_sight < 0 ? 0 : ~0u;
    }
    float sum[kColumns];
    convolution.convolve(sum);
    Columns made;
    #pragma unroll
    for (int p = 0; p < kColumns / 2; ++p) made.pairs[p] = valid & pack<T>(silu(sum[2 * p]), silu(sum[2 * p + 1]));
    *(Columns*)(x + place(i)) = made;
  }
}

// Columns of x of `channels`, and states and decays as thd_ssd_states computes them. B has been computed before.
//
// channels: rows of x, B and C; x: the columns of x in zxbcdt, by boxes of kChunk + kBefore rows
// Launch: grid (inner / (64 * kSubs), segments), block 128 * kSubs, shared memory kSharedBytes.
template <typename T, int kWidth, int kSubs, int kState, int kStages, int kSharedBytes>
__global__ void __launch_bounds__(128 * kSubs, 2) thd_ssd_conv_states_sm90(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap channels, const T* halo,
    const float* conv_weight, const float* conv_bias, const float* sums, const float* leave, float* states,
    const int2* ranges, float* decays, int used_behind, MixerSize size) {
  using Shared = ConvStatesShared<kSubs, kState, kStages>;
  static_assert(same_bytes<(int)sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int slab = blockIdx.x * kSubs, sub = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  typename Shared::Heads heads;                       // once, as divisions take long
  #pragma unroll
  for (int i = 0; i < kSubs; ++i) heads.of[i] = uniform((slab + i) * kSlab / size.head_dim);
  heads.group = uniform(size.group_of(heads.of[0]));
  const Segment segment(blockIdx.y, ranges, used_behind, size);
  Ring<kStages> ring{}, to_fill{};
  auto load = [&](int chunk) {
    if (threadIdx.x || chunk >= segment.end) return;
    shared.load(to_fill, &x, &channels, sums, leave, slab, heads, chunk, size);
    to_fill.advance();
  };

  if (threadIdx.x == 0) shared.stages.init();
  for (int i = 0; i + 1 < kStages; ++i) load(segment.begin + i);
  const int column = (slab + sub) * kSlab;
  if (threadIdx.x % 128 == kWarp && column % size.head_dim == 0)
    segment.write_decay(decays, sums, column / size.head_dim, size);
  __syncthreads();

  const bool leads = threadIdx.x % 128 == 0;
  StateOfHead<T, kState> state;
  state.clear();
  const int first_column = column + threadIdx.x % (kSlab / kColumns) * kColumns;
  int2 last = range_at(ranges, segment.begin * kChunk + kChunk - 1, size);  // loaded a chunk ahead
  for (int chunk = segment.begin; chunk < segment.end; ++chunk, ring.advance()) {
    load(chunk + kStages - 1);
    __syncwarp();
    const int row = chunk * kChunk + kChunk - 1, sight = row - first_of(last, row, size);
    last = range_at(ranges, row + kChunk, size);
    unsigned char* const made = shared.raw[ring.stage][sub] + kBefore * kRowBytes;
    Convolution<T, kWidth> convolution;               // loaded again, as the state takes the registers
    convolution.load_weights(conv_weight, conv_bias, opaque(first_column));
    shared.stages.wait(ring);
    convolve_chunk(made, convolution, halo, first_column, chunk, sight >= kChunk + kWidth - 2, ranges, 1 + sub, size);
    publish_to_async();
    wait(1 + sub, 128);
    if (leads) {
      store_box(&channels, made, 0, slab + sub, chunk * kChunk);
      add_commit();
    }
    __syncwarp();
    if (chunk >= segment.from) {                      // behind the first of these all rows are of one sequence
      const float through = chunk > segment.from ? decay_of(shared.sums[ring.stage][sub][kChunk - 1]) : 0.f;
      state.advance(made, shared.b[ring.stage][0], shared.leave[ring.stage][sub], through);
    }
    if (leads) add_wait_read();                       // shared memory has been read
    shared.stages.release(ring);
  }
  state.store(states + size.state_of(segment.number, 0) + (size_t)column * kState);
}
