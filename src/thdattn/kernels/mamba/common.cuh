// What the kernels of the Mamba-2 mixer share (sm_80 and later): sizes, which rows count, and tiles of a chunk of rows.
//
// The rule: row j counts for row i iff first[i] <= j <= i, where first[i] is the beginning of row i's sequence. Padding
// rows have first[i] = i + 1. What does not count is excluded by selection, never by a product with 0.
//
// Chunks are kChunk rows of the buffer. Arrays of dt, and of values derived from it, are (heads, chunks * kChunk)
// float32. Rows behind the last one belong to its sequence, and have dt = x = B = C = 0.

#pragma once

#include "kernels/portable/common.cuh"

[[maybe_unused]] constexpr int kChunk = 64;

// A row of zxbcdt has the columns z, x, B, C, dt. A row of channels has x, B, C.
struct MixerSize {
  int rows;
  int offset;                                         // number of a row in the pack minus that on this rank
  int heads;
  int head_dim;
  int groups;
  int state_dim;
  int segment;                                        // chunks of a segment

  __device__ __forceinline__ int inner() const { return heads * head_dim; }
  __device__ __forceinline__ int channels() const { return inner() + 2 * groups * state_dim; }
  __device__ __forceinline__ int columns() const { return inner() + channels() + heads; }
  __device__ __forceinline__ int chunks() const { return (rows + kChunk - 1) / kChunk; }
  __device__ __forceinline__ int group_of(int head) const { return head / (heads / groups); }
  // Columns of B and C of a group in a row of channels.
  __device__ __forceinline__ int b_column(int group) const { return inner() + group * state_dim; }
  __device__ __forceinline__ int c_column(int group) const { return inner() + (groups + group) * state_dim; }
  // Index of a chunk's first row in an array of dt.
  __device__ __forceinline__ size_t in_heads(int head, int chunk) const {
    return ((size_t)head * chunks() + chunk) * kChunk;
  }
  // Index of a head's state of a segment in an array of states.
  __device__ __forceinline__ size_t state_of(int segment_number, int head) const {
    return ((size_t)segment_number * heads + head) * head_dim * state_dim;
  }
};
CHECK_MixerSize;

// ------------------------------------------------------------------------------------------------ rows that count

// Returns the range of a row. Rows behind the last one have that of the last one.
__device__ __forceinline__ int2 range_at(const int2* ranges, int row, const MixerSize& size) {
  return ranges[min(row, size.rows - 1)];
}
// Returns first[row], which is below 0 if the row's sequence began on another rank.
__device__ __forceinline__ int first_of(int2 range, int row, const MixerSize& size) {
  return is_empty(range) ? row + 1 : range.x - size.offset;
}
// Returns how many of the `reach` rows before its own a row sees, or -1 for padding.
__device__ __forceinline__ int sight_of(int2 range, int row, int reach, const MixerSize& size) {
  return min(row - first_of(range, row, size), reach);
}

// Returns the tile of rows of this thread block. A grid has y tiles in each of its z; some are behind the last one.
__device__ __forceinline__ int tile_of_rows() { return blockIdx.z * gridDim.y + blockIdx.y; }

// ------------------------------------------------------------------------------------------------ numbers

// Returns the decay over a difference of sums of a * log2(e), which only rounding can make positive.
__device__ __forceinline__ float decay_of(float difference) { return exp2_fast(fminf(difference, 0.f)); }

__device__ __forceinline__ float sigmoid(float x) {
  float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + exp2_fast(-kLog2e * x))); return r;
}
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
// Computes log(1 + exp(x)), which is exp(x) far below 0.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

template <typename T> __device__ __forceinline__ float to_float(T x) { return unpack<T>(x.bits).x; }

// A state may exceed the range of float16. If it is an operand, it is therefore scaled to its own size by a power of
// two, so that nothing is rounded more than once.
template <typename T> constexpr bool kScalesStates = sizeof(T) == 0;
template <> constexpr bool kScalesStates<f16> = true;

struct PowerOfTwo { float factor, inverse; };
// Returns the power of two that brings the largest number to at least 2^14 and less than 2^15. bits: those of the
// largest number. A state below 2^-40 gets the scale of 2^-40. Its contribution is below the smallest float16 anyway,
// and whatever shares its scale, or had another before, must stay within float32.
__device__ __forceinline__ PowerOfTwo scale_of(int bits) {
  const int exponent = min(max(bits >> 23, 127 - 40), 254);
  return {__int_as_float((268 - exponent) << 23), __int_as_float((exponent - 14) << 23)};
}
// Returns the bits of the largest number of a warp.
template <int kFragments, int kBlocks>
__device__ __forceinline__ int largest_of_warp(const float (&x)[kFragments][kBlocks][4]) {
  float largest = 0.f;
  #pragma unroll
  for (int f = 0; f < kFragments; ++f)
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(x[f][n][e]));
  return __reduce_max_sync(0xffffffffu, __float_as_int(largest));
}

// ------------------------------------------------------------------------------------------------ segments

// Returns the decay of the state before a chunk until its end. last_sum, last: of the chunk's last row.
__device__ __forceinline__ float through_chunk(float last_sum, int2 last, int chunk, const MixerSize& size) {
  const int end = chunk * kChunk + kChunk - 1;
  return first_of(last, end, size) < chunk * kChunk ? decay_of(last_sum) : 0.f;
}

// The chunks of a segment. Those from `from` on reach its end. If no row behind a segment sees its state, that is left
// at 0. used_behind: whether a row behind the last segment may see its state.
struct Segment {
  int number, begin, end, from;
  bool goes_on;                                       // one sequence, which began before

  __device__ __forceinline__ Segment(int number, const int2* ranges, bool used_behind, const MixerSize& size)
      : number(number), begin(number * size.segment), end(min(begin + size.segment, size.chunks())) {
    const int last = end * kChunk - 1, next = last + 1, first = first_of(range_at(ranges, last, size), last, size);
    const bool used = next < size.rows ? first_of(ranges[next], next, size) < next : used_behind;
    from = used ? min(max(first, begin * kChunk) / kChunk, end) : end;
    goes_on = first < begin * kChunk;
  }
  __device__ __forceinline__ void write_decay(float* decays, const float* sums, int head, const MixerSize& size) const {
    float sum = 0.f;
    for (int chunk = begin; chunk < end; ++chunk) sum += sums[size.in_heads(head, chunk) + kChunk - 1];
    decays[(size_t)number * size.heads + head] = goes_on ? decay_of(sum) : 0.f;
  }
};

// Consecutive segments. This thread block, the y-th of the grid, processes the chunks of `of_block` of them in order.
struct Segments { int first, count, of_block; };
struct Run {
  int segment, begin, end;                            // the first segment, and chunks

  __device__ __forceinline__ Run(const Segments& segments, const MixerSize& size)
      : segment(segments.first + blockIdx.y * segments.of_block), begin(segment * size.segment),
        end(min(min(segment + segments.of_block, segments.first + segments.count) * size.segment, size.chunks())) {}
};
CHECK_Segments;

// ------------------------------------------------------------------------------------------------ barriers

// Some warps wait until others have arrived. threads: of both together. Barrier 0 is that of __syncthreads.
__device__ __forceinline__ void arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------------------------------ tiles

// Starts to copy kCols elements of each row of a chunk to a tile with kCols + kPad elements per row. Rows behind the
// last one become zeros.
template <typename T, int kCols, int kThreads>
__device__ __forceinline__ void load_chunk(T* tile, const T* source, u32 pitch, int chunk, int num_rows,
                                           int thread) {
  constexpr int kVectors = kCols / 8, kRows = kThreads / kVectors;  // of a row, and rows at a time
  static_assert(kThreads % kVectors == 0 && kChunk % kRows == 0, "threads must divide a chunk into whole rows");
  const int first = thread / kVectors, col = thread % kVectors * 8, left = num_rows - chunk * kChunk;
  const T* const from = source + (size_t)chunk * kChunk * pitch + col;
  #pragma unroll
  for (int i = 0; i < kChunk / kRows; ++i) {
    const int row = first + i * kRows;
    copy_async_16(tile + row * (kCols + kPad) + col, from + (u32)min(row, left - 1) * pitch, row < left);
  }
}

// Starts to copy what range_at returns.
__device__ __forceinline__ void load_range(int2* into, const int2* ranges, int row, const MixerSize& size) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"
               :: "r"(shared_address(into)), "l"(ranges + min(row, size.rows - 1)));
}

// Loads 16 rows of a tile of kDim columns as this warp's operand.
template <typename T, int kDim>
__device__ __forceinline__ void load_operand(u32 (&a)[kDim / 16][4], const T* rows) {
  const int lane = threadIdx.x % kWarp;
  const T* const from = rows + lane % 16 * (kDim + kPad) + lane / 16 * 8;
  #pragma unroll
  for (int k = 0; k < kDim / 16; ++k) ldmatrix(a[k], from + k * 16);
}

// sum[i][j] += a[i] . b[j] over kDim columns, for 16 rows of a, and 8 * kBlocks rows of a tile of kDim columns.
template <typename T, int kDim, int kBlocks>
__device__ __forceinline__ void add_products(float (&sum)[kBlocks][4], const u32 (&a)[kDim / 16][4], const T* b) {
  const int lane = threadIdx.x % kWarp;
  const T* const b_lane = b + (lane / 16 * 8 + lane % 8) * (kDim + kPad) + lane / 8 % 2 * 8;
  #pragma unroll
  for (int k = 0; k < kDim / 16; ++k)
    #pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      u32 fb[4];
      ldmatrix(fb, b_lane + n * 8 * (kDim + kPad) + k * 16);
      mma<T>(sum[n], a[k], fb[0], fb[1]);
      mma<T>(sum[n + 1], a[k], fb[2], fb[3]);
    }
}

// Loads columns of a tile as the rows of an operand. Each row of the tile is multiplied by its weight and rounded once.
// It takes 16 columns from `tile` on, with kPitch elements per row, and the 16 rows of `weights`.
template <typename T, int kPitch>
__device__ __forceinline__ void load_weighted_columns(u32 (&a)[4], const T* tile, const float* weights) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix_transposed(a, tile + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8);
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 weight = *(const float2*)(weights + i / 2 * 8 + lane % 4 * 2), x = unpack<T>(a[i]);
    a[i] = pack<T>(x.x * weight.x, x.y * weight.y);
  }
}

template <int kFragments, int kBlocks>
__device__ __forceinline__ void scale(float (&x)[kFragments][kBlocks][4], float factor) {
  #pragma unroll
  for (int f = 0; f < kFragments; ++f)
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) x[f][n][e] = factor == 0.f ? 0.f : x[f][n][e] * factor;
}
