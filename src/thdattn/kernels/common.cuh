// What all device code uses: element types, ranges of rows, small reductions.

#pragma once

#include "generated/struct_checks.cuh"

using u32 = unsigned int;
using u64 = unsigned long long;

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

[[maybe_unused]] constexpr int kWarp = 32;
[[maybe_unused]] constexpr int kNone = 0x7fffffff;                    // no further visible row
[[maybe_unused]] constexpr int kMaxRanks = 16;                        // ranks whose memory a kernel can read
[[maybe_unused]] constexpr int kChunks = 4096;                        // chunks of a rank's rows, see peer/exchange.cu
CHECK_kMaxRanks;
CHECK_kChunks;
[[maybe_unused]] constexpr float kLog2e = 1.4426950408889634f;
[[maybe_unused]] constexpr float kLn2 = 0.6931471805599453f;
#define kInfinity __int_as_float(0x7f800000)

// Compares the bytes of shared memory that kernels/configs.py computes with those of the kernel. A wrong number does
// not compile, and the error shows both.
template <int kFound, int kFromPython> constexpr bool same_bytes() {
  static_assert(kFound == kFromPython, "Python computes other bytes of shared memory than the kernel has");
  return true;
}

template <typename T> __device__ u32 pack(float low, float high);
template <> __device__ __forceinline__ u32 pack<bf16>(float low, float high) {
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
template <> __device__ __forceinline__ u32 pack<f16>(float low, float high) {
  u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}

template <typename T> __device__ float2 unpack(u32 pair);
template <> __device__ __forceinline__ float2 unpack<bf16>(u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack<f16>(u32 pair) {
  float2 r;
  asm("{ .reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(r.x), "=f"(r.y) : "r"(pair));
  return r;
}

// Waits, in a kernel that is launched early (launch_early of jit/compiler.py), for everything that was written before,
// and lets the next kernel start. The next kernel then sees all but what this one writes. Memory that the kernel before
// may write must be read after this call and must not be `const T* __restrict__`, whose reads may be moved ahead.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float exp2_fast(float x) {
  float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r;
}
__device__ __forceinline__ float log2_fast(float x) {
  float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r;
}

__device__ __forceinline__ void store_pair(float* p, float x, float y) { *(float2*)p = make_float2(x, y); }
__device__ __forceinline__ void store_pair(bf16* p, float x, float y) { *(u32*)p = pack<bf16>(x, y); }
__device__ __forceinline__ void store_pair(f16* p, float x, float y) { *(u32*)p = pack<f16>(x, y); }

// A range [x, y) of rows of the other side that a row sees. (0, 0) marks padding. (-1, -1) marks every query row of a
// plan whose lengths were invalid.
__device__ __forceinline__ bool is_empty(int2 range) { return range.x >= range.y; }
// Returns what a row with an empty range writes to out, and adds to its lse of -inf: 0, or NaN if the lengths were
// invalid. The result has the bits of the range.
__device__ __forceinline__ float blank_of(int2 empty) { return __int_as_float(empty.x); }
__device__ __forceinline__ bool contains(int2 range, int i) { return (u32)(i - range.x) < (u32)(range.y - range.x); }
__device__ __forceinline__ bool touches(int2 range, int begin, int size) {
  return range.x < begin + size && range.y > begin;
}

__device__ __forceinline__ int2 range_of(const int2* ranges, int row, int num_rows) {
  return row < num_rows ? ranges[row] : make_int2(0, 0);
}

// Returns how many lanes divide a row of so many elements, 16 bytes each.
constexpr int lanes_of(int columns) { return columns <= 64 ? 8 : columns <= 128 ? 16 : 32; }
CHECK_lanes_of;

// Reductions over the four lanes that hold one row of an accumulator.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Returns warp (of the warpgroup) and lane of this thread. They are computed where they are needed, as there are no
// registers to keep them.
struct Me { int warp, lane; };
__device__ __forceinline__ Me me() {
  u32 thread;                                         // unsigned, as signed divisions take more than a shift
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return {(int)(thread / kWarp % 4), (int)(thread % kWarp)};
}

// Tells the compiler that all lanes have the same value. Results then stay in uniform registers, where matrix products
// need their descriptors, and are not moved there each time.
__device__ __forceinline__ u32 uniform(u32 value) { return __reduce_max_sync(0xffffffffu, value); }

// Merges a row's attention over some keys (`these`) with its attention over others. *lse is the log-sum-exp over the
// others, -inf if there were none, and becomes that over all keys. The attention over all keys is the sum of both, each
// times its weight. A whole warp calls it, with four lanes per row. Rows that do not count get arbitrary weights.
struct Merge { float others, these; };
__device__ __forceinline__ Merge merge_lse(float* lse, float mine, bool counts) {
  const float others = counts ? *lse : mine, top = fmaxf(others, mine);
  const float less = exp2_fast((fminf(others, mine) - top) * kLog2e), weight = 1.f / (1.f + less);
  __syncwarp();                                       // all four lanes have read it
  if (counts && threadIdx.x % 4 == 0) *lse = top + __log2f(1.f + less) * kLn2;
  return others < mine ? Merge{less * weight, weight} : Merge{weight, less * weight};
}

// Rounds accumulators to an operand. Two neighbouring 16x8 blocks of accumulators are laid out as the A operand of one
// 16x16 block, so no data moves between lanes.
template <typename T, int kFragments, int kBlocks>
__device__ __forceinline__ void round_to_operand(u32 (&a)[kFragments][kBlocks / 2][4],
                                                 const float (&c)[kFragments][kBlocks][4]) {
  #pragma unroll
  for (int f = 0; f < kFragments; ++f)
    #pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      a[f][n / 2][0] = pack<T>(c[f][n][0], c[f][n][1]);
      a[f][n / 2][1] = pack<T>(c[f][n][2], c[f][n][3]);
      a[f][n / 2][2] = pack<T>(c[f][n + 1][0], c[f][n + 1][1]);
      a[f][n / 2][3] = pack<T>(c[f][n + 1][2], c[f][n + 1][3]);
    }
}
