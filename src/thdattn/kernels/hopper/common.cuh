// What the Hopper kernels (sm_90a) share: TMA, mbarriers, wgmma, tiles in shared memory, and the scheduler.
// kernels/generated.py writes the wrappers of wgmma.

#pragma once

#include "generated/wgmma.cuh"
#include "kernels/common.cuh"
#include "kernels/logits.cuh"

// ------------------------------------------------------------------------------------------------ instructions

struct alignas(64) TensorMap { char opaque[128]; };
CHECK_TensorMap;

__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals));
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Announces bytes without an arrival.
__device__ __forceinline__ void barrier_expect_only(u64* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  asm volatile("{ .reg .pred done;\n"
               "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra wait; }" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
// Copies a box to shared memory: one slab of columns of one head, with as many rows as the map says. Elements outside
// the tensor arrive as zeros.
__device__ __forceinline__ void copy_box(void* dst, const TensorMap* map, int column, int head, int row, u64* barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];"
               :: "r"(shared_address(dst)), "l"(map), "r"(column), "r"(head), "r"(row), "r"(shared_address(barrier))
               : "memory");
}
// Copies a box that is not read again: it is the first to leave the L2 cache.
__device__ __forceinline__ void copy_box_once(void* dst, const TensorMap* map, int column, int head, int row,
                                              u64* barrier) {
  asm volatile("{ .reg .b64 policy;\n"
               "createpolicy.fractional.L2::evict_first.b64 policy;\n"
               "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2, %3, %4}], [%5], policy; }"
               :: "r"(shared_address(dst)), "l"(map), "r"(column), "r"(head), "r"(row), "r"(shared_address(barrier))
               : "memory");
}

// Copies a multiple of 16 bytes, aligned to 16.
__device__ __forceinline__ void copy_bulk(void* dst, const void* src, int bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(dst)), "l"(src), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// Stores fp32 from shared to global memory, or adds it there: a multiple of 16 bytes, aligned to 16.
__device__ __forceinline__ void store_bulk(float* dst, const void* src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(dst), "r"(shared_address(src)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void add_bulk(float* dst, const void* src, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(dst), "r"(shared_address(src)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void add_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the stores and additions so far have read shared memory, or (add_wait) have arrived in global memory.
__device__ __forceinline__ void add_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void add_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Makes this thread's writes to shared memory visible to wgmma and to bulk copies.
__device__ __forceinline__ void publish_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Stores the fragments of an operand as four 8x8 blocks. Lane l gives the address of row l % 8 of block l / 8.
__device__ __forceinline__ void store_matrices(void* row, const u32 (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(row)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
// Loads four 8x8 blocks as the fragments of an operand. Addresses are as for store_matrices.
__device__ __forceinline__ void load_matrices(u32 (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(row)) : "memory");
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Fixes the point in the program where the values are ready. The compiler keeps volatile asm in order, but not the
// arithmetic around it.
template <int kBlocks>
__device__ __forceinline__ void pin(float (&values)[kBlocks][4]) {
  #pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) asm volatile("" : "+f"(values[i / 4][i % 4]) :: "memory");
}
template <int kPending, int kBlocks>
__device__ __forceinline__ void wgmma_wait(float (&accumulator)[kBlocks][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory");
  pin(accumulator);
}

template <int kRegisters> __device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters));
}

// Returns the same value, but hides it from the compiler, which then recomputes what follows from it instead of keeping
// it in registers.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// ------------------------------------------------------------------------------------------------ tiles

// A tile is stored in slabs of 64 columns, with rows 128 bytes apart, in the 128-byte swizzle that TMA writes and wgmma
// reads. If 64 does not divide the columns, slabs have 32 columns, and rows and swizzle have 64 bytes. tensor_map of
// jit/tensor_map.py makes boxes of the same columns and swizzle.
constexpr int kSlab = 64;
constexpr int kRowBytes = 128;
CHECK_kSlab;
constexpr int slab_of(int columns) { return columns % kSlab ? kSlab / 2 : kSlab; }
CHECK_slab_of;
template <int kCols> constexpr int kSlabOf = slab_of(kCols);
template <int kCols> constexpr int kRowBytesOf = 2 * kSlabOf<kCols>;
template <int kRows, int kCols> constexpr int kTileBytes = 2 * kRows * kCols;
template <int kRows, int kCols> constexpr int kSlabBytes = kRows * kRowBytesOf<kCols>;

template <int kCols = kSlab>
__device__ __forceinline__ u64 descriptor(const void* tile, int slab_bytes) {
  const u64 address = shared_address(tile), swizzle = kSlabOf<kCols> == kSlab ? 1 : 2;
  return swizzle << 62 | (u64)(8 * kRowBytesOf<kCols> >> 4) << 32 | (u64)(slab_bytes >> 4) << 16 |
         (address & 0x3ffff) >> 4;
}
// Returns where the 16-byte vector number `vector` of a slab's row is stored, in bytes from the beginning of the row.
template <int kCols> __device__ __forceinline__ int swizzled(int row, int vector) {
  return (vector ^ (kSlabOf<kCols> == kSlab ? row % 8 : row / 2 % 4)) * 16;
}

template <int kRows, int kCols, bool kOnce = false>
__device__ __forceinline__ void copy_tile(unsigned char* tile, const TensorMap* map, int head, int row, u64* barrier) {
  static_assert(kCols % kSlabOf<kCols> == 0, "a tile must have whole slabs, whose bytes barriers expect");
  static_assert(kRows % 8 == 0 && kRows <= 256, "the swizzle repeats every 8 rows, and a box has at most 256");
  #pragma unroll
  for (int s = 0; s < kCols / kSlabOf<kCols>; ++s)
    (kOnce ? copy_box_once : copy_box)(tile + s * kSlabBytes<kRows, kCols>, map, s * kSlabOf<kCols>, head, row,
                                       barrier);
}

// The first operand of scores: 64 rows of a tile of kRows, in shared memory or, if registers are left, as fragments.
//
// start: scores = or += these rows . k^T, with 8 * kBlocks rows of k from a tile of kRowsK rows.
template <typename T, int kDim, int kRows, bool kInRegisters> struct ScoreRows {
  static_assert(kDim % 16 == 0, "a matrix instruction takes 16 columns");
  u64 rows;
  __device__ __forceinline__ void load(const unsigned char* tile) { rows = descriptor<kDim>(tile, 16); }
  template <bool kAdd, int kRowsK, int kBlocks>
  __device__ __forceinline__ void start(float (&scores)[kBlocks][4], const unsigned char* k) const {
    const u64 b = descriptor<kDim>(k, 16);
    #pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      const int slab = d / kSlabOf<kDim>, offset = d % kSlabOf<kDim> * 2;
      Wgmma<T, 8 * kBlocks>::template shared<0, 0>(scores, rows + (slab * kSlabBytes<kRows, kDim> + offset) / 16,
                                                   b + (slab * kSlabBytes<kRowsK, kDim> + offset) / 16, kAdd || d > 0);
    }
  }
};
template <typename T, int kDim, int kRows> struct ScoreRows<T, kDim, kRows, true> {
  static_assert(kDim % 16 == 0, "a matrix instruction takes 16 columns");
  u32 a[kDim / 16][4];
  __device__ __forceinline__ void load(const unsigned char* tile) {
    const auto [warp, lane] = me();
    const unsigned char* const row = tile + (warp * 16 + lane % 16) * kRowBytesOf<kDim>;
    constexpr int kSteps = kSlabOf<kDim> / 16;         // of a slab
    #pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      load_matrices(a[i], row + i / kSteps * kSlabBytes<kRows, kDim> +
                              swizzled<kDim>(lane % 16, i % kSteps * 2 + lane / 16));
  }
  template <bool kAdd, int kRowsK, int kBlocks>
  __device__ __forceinline__ void start(float (&scores)[kBlocks][4], const unsigned char* k) const {
    const u64 b = descriptor<kDim>(k, 16);
    constexpr int kSteps = kSlabOf<kDim> / 16;         // of a slab
    #pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      Wgmma<T, 8 * kBlocks>::template registers<0>(
          scores, a[i], b + (i / kSteps * kSlabBytes<kRowsK, kDim> + i % kSteps * 32) / 16, kAdd || i > 0);
  }
};
template <typename T, int kDim, int kRows, int kRowsK, int kBlocks>
__device__ __forceinline__ void add_scores(float (&scores)[kBlocks][4], const unsigned char* rows,
                                           const unsigned char* k) {
  ScoreRows<T, kDim, kRows, false> operand;
  operand.load(rows);
  operand.template start<true, kRowsK>(scores, k);
}
// Sets every column of the accumulators to its number.
template <int kBlocks>
__device__ __forceinline__ void begin_columns(float (&scores)[kBlocks][4], const float* numbers) {
  const float2* const mine = (const float2*)numbers + threadIdx.x % 4;
  #pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const float2 x = mine[n * 4];
    scores[n][0] = scores[n][2] = x.x, scores[n][1] = scores[n][3] = x.y;
  }
  pin(scores);
}

// Starts acc += weights . v. The weights (64 x 16 * kSteps) are in registers. v has as many rows, from a tile of kRowsV
// rows. Without `add`, the product replaces acc, whatever acc was.
template <typename T, int kCols, int kRowsV, int kSteps>
__device__ __forceinline__ void start_weighted_rows(float (&acc)[kCols / 8][4], const u32 (&weights)[1][kSteps][4],
                                                   const unsigned char* v, bool add = true) {
  const u64 b = descriptor<kCols>(v, kSlabBytes<kRowsV, kCols>);
  #pragma unroll
  for (int i = 0; i < kSteps; ++i)
    Wgmma<T, kCols>::template registers<1>(acc, weights[0][i], b + i * kRowBytesOf<kCols>, i > 0 || add);
}

// Transposes a 4x4 block of words within a quad. Each lane holds a row before, and a column after.
__device__ __forceinline__ void transpose_in_quad(u32 (&x)[4]) {
  const int lane = threadIdx.x % 4;
  #pragma unroll
  for (int step = 1; step <= 2; step *= 2)
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & step)) {
        const u32 mine = lane & step ? x[i] : x[i + step];
        const u32 theirs = __shfl_xor_sync(0xffffffffu, mine, step);
        if (lane & step) x[i] = theirs; else x[i + step] = theirs;
      }
}

// Stores one (kHalf) of the two rows that this thread shares with its quad. The quad exchanges words, so that every
// lane stores 16 bytes. The store is asm, because a compiler that is short of registers splits it into four. The L2
// cache need not keep the row. A scale of 0 stores zeros, whatever the accumulators hold.
template <int kHalf, typename T, int kBlocks>
__device__ __forceinline__ void store_row(T* row, const float (&acc)[kBlocks][4], float scale, bool exists) {
  static_assert(kBlocks % 4 == 0, "four blocks are stored at a time: the columns of a row must be a multiple of 32");
  #pragma unroll
  for (int n = 0; n < kBlocks; n += 4) {
    u32 words[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = scale == 0.f ? 0 : pack<T>(acc[n + i][2 * kHalf] * scale, acc[n + i][2 * kHalf + 1] * scale);
    transpose_in_quad(words);
    if (exists)
      asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(row + (n + threadIdx.x % 4) * 8),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
  }
}

// Four neighbouring columns per lane. A lane holds two columns of every eight. Neighbouring lanes exchange those of
// blocks n and n + 1, so that each holds four columns side by side.
__device__ __forceinline__ int first_of_four(int n) { return (n + me().lane % 2) * 8 + me().lane % 4 / 2 * 4; }
template <int kHalf, int kBlocks>
__device__ __forceinline__ float4 four_columns(const float (&acc)[kBlocks][4], int n, float scale) {
  static_assert(kBlocks % 2 == 0, "two blocks are traded at a time: the columns of a row must be a multiple of 16");
  const bool odd = me().lane % 2;
  const float even_x = acc[n][2 * kHalf], even_y = acc[n][2 * kHalf + 1];
  const float odd_x = acc[n + 1][2 * kHalf], odd_y = acc[n + 1][2 * kHalf + 1];
  const float x = (odd ? odd_x : even_x) * scale, y = (odd ? odd_y : even_y) * scale;
  const float other_x = __shfl_xor_sync(0xffffffffu, odd ? even_x : odd_x, 1) * scale;
  const float other_y = __shfl_xor_sync(0xffffffffu, odd ? even_y : odd_y, 1) * scale;
  return odd ? make_float4(other_x, other_y, x, y) : make_float4(x, y, other_x, other_y);
}

// ------------------------------------------------------------------------------------------------ scheduler

// Flags of a tile of the other side. kLast: it is the last visible one. For group c of 64 own rows: kSees << 2c, a row
// of the group sees the tile; kMasked << 2c, a row of the group does not see all of it. In prefix trees, kMasked is
// about key ranges alone, and kEnded << 2c about subtrees that may end before a row of the group.
constexpr u32 kLast = 1u << 31, kSees = 1, kMasked = 2, kEnded = 1u << 8;

// The scheduler. Thread blocks are persistent and draw numbers of work from a counter. This function maps a number to a
// tile and a head. Heads are computed in groups of `together`, whose tensors share the L2 cache. Within a group, all
// heads of a tile come one after another. The last group has `last_heads` heads and may be larger. It should last so
// long that its longest tiles, which come first, end before the others do.
struct WorkTile { int tile, head; };
template <typename Order>
__device__ __forceinline__ WorkTile scheduled_tile(int work, Order tile_order, int num_tiles, int num_heads,
                                                   int together, int last_heads) {
  const int num_first = num_heads - last_heads, rest = work - num_first * num_tiles;
  if (rest >= 0) return {tile_order[rest / last_heads], num_first + rest % last_heads};
  const int first = work / (together * num_tiles) * together, heads = min(together, num_first - first);
  const int in_group = work - first * num_tiles;
  return {tile_order[in_group / heads], first + in_group % heads};
}

// A stage of a ring of buffers, and the parity to wait for on its barriers.
template <int kStages>
struct Ring {
  u32 stage, parity;
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
  // Returns the stage of some steps ago, at most as many as there are stages.
  __device__ __forceinline__ Ring back(u32 steps) const {
    return stage < steps ? Ring{stage + kStages - steps, parity ^ 1} : Ring{stage - steps, parity};
  }
  // Stages in an array of twice as many, for data that is still read while its buffer is filled again.
  __device__ __forceinline__ u32 double_stage() const { return stage + parity * kStages; }
  __device__ __forceinline__ u32 double_stage_to_fill() const { return stage + (parity ^ 1) * kStages; }
};
