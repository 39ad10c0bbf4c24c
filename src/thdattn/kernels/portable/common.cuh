// What the portable attention kernels share (sm_80 and later): mma.sync m16n8k16, ldmatrix and cp.async (PTX ISA 9.7),
// what a tile of rows sees, and tiles in shared memory.

#pragma once

#include "kernels/common.cuh"
#include "kernels/logits.cuh"

// ------------------------------------------------------------------------------------------------ instructions

template <typename T> __device__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
#define THD_MMA(TYPE, NAME)                                                                                         \
  template <> __device__ __forceinline__ void mma<TYPE>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {         \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                             \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                       \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                   \
  }
THD_MMA(bf16, "bf16")
THD_MMA(f16, "f16")
#undef THD_MMA

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// Asynchronous copies to shared memory. They write zeros if `valid` is false.
__device__ __forceinline__ void copy_async_16(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(dst)), "l"(src), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void copy_async_4(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :: "r"(shared_address(dst)), "l"(src), "r"(valid ? 4 : 0));
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group 0;"); }
// Waits until all but the kPending groups of copies that were committed last have arrived.
template <int kPending>
__device__ __forceinline__ void copies_wait_but() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending)); }

// Sums of 16 rows by 8 columns in global memory, in the order in which a warp's accumulators are added fastest: without
// gaps between the lanes, and where vectors can be added, all four numbers of a lane together.
struct SumBlock {
  enum { kFloats = 16 * 8 };
  static __device__ __forceinline__ void add(float* block, const float (&acc)[4]) {
    const int lane = threadIdx.x % kWarp;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(block + 4 * lane), "f"(acc[0]), "f"(acc[1]), "f"(acc[2]), "f"(acc[3]) : "memory");
#else
    #pragma unroll
    for (int e = 0; e < 4; ++e) atomicAdd(block + 32 * e + lane, acc[e]);
#endif
  }
  // Reads the rows `row` and row + 8, for a row below 8.
  static __device__ __forceinline__ void read(float (&sums)[2][8], const float* block, int row) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
#if __CUDA_ARCH__ >= 900
      const float4 x = ((const float4*)block)[4 * row + i];
      sums[0][2 * i] = x.x, sums[0][2 * i + 1] = x.y, sums[1][2 * i] = x.z, sums[1][2 * i + 1] = x.w;
#else
      const float4 x = ((const float4*)block)[8 * i + row];
      float* const every_other = &sums[i / 2][i % 2];
      every_other[0] = x.x, every_other[2] = x.y, every_other[4] = x.z, every_other[6] = x.w;
#endif
    }
  }
};

// ------------------------------------------------------------------------------------------------ ranges

// Whether some of this warp's kRows rows see one of the rows [begin, begin + size), and whether all of them see all.
struct WarpSight { bool any, all; };
template <int kRows>
__device__ __forceinline__ WarpSight warp_sight(const int2* ranges, int begin, int size) {
  const int2 range = ranges[threadIdx.x % kRows];
  return {(bool)__any_sync(0xffffffffu, touches(range, begin, size)),
          (bool)__all_sync(0xffffffffu, range.x <= begin && begin + size <= range.y)};
}

// Sets the scores of columns that a row does not see to -inf. range: from the thread's first row on.
template <int kFragments, int kBlocks>
__device__ __forceinline__ void hide(float (&score)[kFragments][kBlocks][4], const int2* range, int first_column) {
  const int column = first_column + threadIdx.x % 4 * 2;
  #pragma unroll
  for (int f = 0; f < kFragments; ++f)
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!contains(range[16 * f + e / 2 * 8], column + n * 8 + e % 2)) score[f][n][e] = -kInfinity;
}

// What the rows of a tile see of the other side: the first visible row, and the range [all.x, all.y) that every row
// sees that counts. Each thread contributes the range of one row; threads beyond the tile contribute an empty one.
//
// All threads publish, synchronise, and then read. They synchronise again before they publish again.
template <int kWarps>
struct Sight {
  int minima[3][kWarps];

  __device__ __forceinline__ void publish(int which, int value) {
    value = __reduce_min_sync(0xffffffffu, value);
    if (threadIdx.x % kWarp == 0) minima[which][threadIdx.x / kWarp] = value;
  }
  __device__ __forceinline__ int collect(int which) const {
    int value = minima[which][0];
    for (int w = 1; w < kWarps; ++w) value = min(value, minima[which][w]);
    return value;
  }
  __device__ __forceinline__ void publish_first(int2 range, int from) {
    const int row = max(range.x, from);
    publish(0, row < range.y ? row : kNone);
  }
  __device__ __forceinline__ void publish_all(bool counts, int2 range) {
    publish(1, counts ? -range.x : kNone);
    publish(2, counts ? range.y : kNone);
  }
  __device__ __forceinline__ void publish_span(int2 range) {
    publish(1, is_empty(range) ? kNone : range.x);
    publish(2, is_empty(range) ? 0 : -range.y);
  }
  __device__ __forceinline__ int2 span() const { return make_int2(collect(1), -collect(2)); }
  __device__ __forceinline__ int first_tile(int tile) const {
    const int row = collect(0);
    return row == kNone ? kNone : row / tile * tile;
  }
  __device__ __forceinline__ int2 all() const { return make_int2(-collect(1), collect(2)); }
};

// ------------------------------------------------------------------------------------------------ tiles

// A row of a tile in shared memory has kCols + 8 elements. The 16 bytes of padding put the 8 rows of an ldmatrix into
// different banks for every head dim, without a swizzle.
[[maybe_unused]] constexpr int kPad = 8;
CHECK_kPad;

// Starts to copy kRows rows of one head. Rows outside the buffer become zeros, and unless `ranges` is null, rows with
// an empty range. all_valid: the caller knows that there are none, so the ranges are not read.
template <typename T, int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_tile(T* tile, const T* head, u32 row_stride, int first, int num_rows,
                                          const int2* ranges, bool all_valid) {
  static_assert(kCols % 8 == 0, "a row is copied 16 bytes at a time");
  constexpr int kLanes = lanes_of(kCols), kStep = kThreads / kLanes;
  const int row = threadIdx.x / kLanes, col = threadIdx.x % kLanes * 8;
  if (kCols < kLanes * 8 && col >= kCols) return;
  T* const target = tile + row * (kCols + kPad) + col;
  auto copy = [&](auto valid) {
    const T* source = head + (size_t)(first + row) * row_stride + col;
    #pragma unroll
    for (int i = 0; i < kRows; i += kStep, source += kStep * row_stride) {
      asm volatile("" : "+l"(source));  // multiples of the stride would take registers all the time
      if (kRows % kStep == 0 || row + i < kRows)
        copy_async_16(target + i * (kCols + kPad), source, valid(first + row + i));
    }
  };
  if (all_valid)
    copy([](int) { return true; });
  else if (!ranges)
    copy([&](int i) { return i < num_rows; });
  else
    copy([&](int i) { return !is_empty(range_of(ranges, i, num_rows)); });
}

// product[i][j] = a[i] . b[j] over kDim columns, for 16 * kFragments rows of a, which belong to this warp, and 8 *
// kBlocks rows of b.
template <typename T, int kDim, int kFragments, int kBlocks>
__device__ __forceinline__ void dot_rows(float (&product)[kFragments][kBlocks][4], const T* a, const T* b) {
  static_assert(kDim % 16 == 0, "a matrix instruction takes 16 columns");
  static_assert(kBlocks % 2 == 0, "rows of b are loaded 16 at a time");
  const int lane = threadIdx.x % kWarp;
  const T* a_lane = a + lane % 16 * (kDim + kPad) + lane / 16 * 8;
  const T* b_lane = b + (lane / 16 * 8 + lane % 8) * (kDim + kPad) + lane / 8 % 2 * 8;
  #pragma unroll
  for (int f = 0; f < kFragments; ++f)
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) product[f][n][e] = 0.f;
  #pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    u32 fa[kFragments][4];
    #pragma unroll
    for (int f = 0; f < kFragments; ++f) ldmatrix(fa[f], a_lane + f * 16 * (kDim + kPad) + d);
    #pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      u32 fb[4];
      ldmatrix(fb, b_lane + n * 8 * (kDim + kPad) + d);
      #pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        mma<T>(product[f][n], fa[f], fb[0], fb[1]);
        mma<T>(product[f][n + 1], fa[f], fb[2], fb[3]);
      }
    }
  }
}

// acc += weights . b. The weights (16 * kFragments rows by 16 * kDepth columns) are in registers. b is in shared
// memory: 16 * kDepth rows that are kPitch elements apart, of which 8 * kBlocks columns are used.
template <typename T, int kPitch, int kFragments, int kDepth, int kBlocks>
__device__ __forceinline__ void add_weighted_rows(float (&acc)[kFragments][kBlocks][4],
                                                  const u32 (&weights)[kFragments][kDepth][4], const T* b) {
  static_assert(kBlocks % 2 == 0, "columns of b are loaded 16 at a time");
  const int lane = threadIdx.x % kWarp;
  const T* b_lane = b + lane % 16 * kPitch + lane / 16 * 8;
  #pragma unroll
  for (int k = 0; k < kDepth; ++k)
    #pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      u32 fb[4];
      ldmatrix_transposed(fb, b_lane + k * 16 * kPitch + n * 8);
      #pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        mma<T>(acc[f][n], weights[f][k], fb[0], fb[1]);
        mma<T>(acc[f][n + 1], weights[f][k], fb[2], fb[3]);
      }
    }
}
