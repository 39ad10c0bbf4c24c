// The portable attention backward (sm_80 and later): delta (also for Hopper), dk and dv with or without dq, dq alone,
// and rounding. kernels.cu explains ranges and tiles.

#pragma once

#include "kernels/peer/owners.cuh"
#include "kernels/portable/common.cuh"
#include "kernels/trees.cuh"

// Computes what the backward needs per query row besides the tensors. The main kernels add these numbers to scores and
// to dP, or start their accumulators with them. So they never test whether a query row is padding.
//
//   stats[0][head][row] = -lse / unit                    -inf on padding rows: every probability there is exactly 0
//   stats[1][head][row] = -delta = -rowsum(dout * out)   0 on padding rows
//
// The unit is softmax_scale, or ln 2 if logits are soft-capped; see Logits.
//
// The kernel also clears `words` 16-byte words of `cleared`: semaphores, and accumulators to which the main kernel
// adds. kLanes lanes divide a row of a head, 16 bytes each. Bound by memory bandwidth.
//
// out, dout (q_rows, num_heads of row_heads, kVHeadDim); lse (num_heads, q_rows)
// stats (2, num_heads, stats_rows), where rows from q_rows on are padding
// Launch: grid ceil(stats_rows * num_heads / (256 / kLanes)), block 256.
template <typename T, int kVHeadDim>
__global__ void thd_attn_delta(const T* __restrict__ out, const T* __restrict__ dout, const float* __restrict__ lse,
                               float unit, const int2* __restrict__ key_ranges, float* __restrict__ stats,
                               uint4* __restrict__ cleared, size_t words, int q_rows, int stats_rows, int num_heads,
                               int row_heads) {
  constexpr int kChunks = kVHeadDim / 8, kLanes = lanes_of(kVHeadDim);
  static_assert(kVHeadDim % 8 == 0 && kChunks <= kLanes, "each lane has one word of a row");
  const size_t item = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  const int chunk = threadIdx.x % kLanes, row = item / num_heads, head = item % num_heads;
  const bool padding = is_empty(range_of(key_ranges, row, q_rows));
  float delta = 0.f;
  if (!padding && chunk < kChunks) {
    const size_t word = ((size_t)row * row_heads + head) * kChunks + chunk;
    const uint4 o = ((const uint4*)out)[word], d = ((const uint4*)dout)[word];
    const u32 o_pairs[4] = {o.x, o.y, o.z, o.w}, d_pairs[4] = {d.x, d.y, d.z, d.w};
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack<T>(o_pairs[i]), b = unpack<T>(d_pairs[i]);
      delta += a.x * b.x + a.y * b.y;
    }
  }
  #pragma unroll
  for (int i = kLanes / 2; i; i /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, i);
  if (row < stats_rows && chunk == 0) {
    const size_t i = (size_t)head * stats_rows + row;
    stats[i] = padding ? -kInfinity : -lse[(size_t)head * q_rows + row] / unit;
    stats[(size_t)num_heads * stats_rows + i] = -delta;
  }
  const size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (size_t)gridDim.x * blockDim.x;
  for (size_t i = thread; i < words; i += threads) cleared[i] = make_uint4(0, 0, 0, 0);
}

// Stores a pair, or adds it to fp32.
template <typename Out> __device__ __forceinline__ void store_or_add_pair(Out* p, float x, float y) {
  store_pair(p, x, y);
}
template <> __device__ __forceinline__ void store_or_add_pair(float* p, float x, float y) {
  float2& sum = *(float2*)p;
  sum.x += x, sum.y += y;
}

// Stores 8 elements times `scale`, or adds them to fp32.
template <typename Out> __device__ __forceinline__ void store_or_add_eight(Out* p, const float (&x)[8], float scale) {
  u32 pairs[4];
  #pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = pack<Out>(x[2 * i] * scale, x[2 * i + 1] * scale);
  *(uint4*)p = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
template <> __device__ __forceinline__ void store_or_add_eight(float* p, const float (&x)[8], float scale) {
  #pragma unroll
  for (int i = 0; i < 8; i += 4) {
    float4& sum = *(float4*)(p + i);
    sum.x += x[i] * scale, sum.y += x[i + 1] * scale, sum.z += x[i + 2] * scale, sum.w += x[i + 3] * scale;
  }
}

// out = x, rounded. One thread rounds 8 elements. Bound by memory bandwidth.
// Launch: grid ceil(elements / 2048), block 256.
template <typename Out>
__global__ void thd_attn_round(Out* __restrict__ out, const float* __restrict__ x, size_t elements) {
  const size_t i = 8 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
  if (i < elements) store_or_add_eight(out + i, *(const float(*)[8])(x + i), 1.f);
}

// dq = dq_accum * scale, rounded. If Dq is float, the result is added to dq. The main kernel cannot do this, because
// none of its thread blocks knows when the last partial sum of a row has been added. One thread rounds 8 columns of two
// rows. Bound by memory bandwidth.
//
// dq (q_rows, columns), with the columns of all heads; dq_accum (ceil(q_rows / 16), columns / 8) of SumBlock
// Launch: grid ceil(ceil(q_rows / 16) * columns / 256), block 256.
template <typename Dq>
__global__ void thd_attn_round_dq(Dq* __restrict__ dq, const float* __restrict__ dq_accum, float scale, int q_rows,
                                  int columns) {
  const size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x, block = thread / 8;
  const int row = block / (columns / 8) * 16 + thread % 8, column = block % (columns / 8) * 8;
  if (row >= q_rows) return;
  float sums[2][8];
  SumBlock::read(sums, dq_accum + block * SumBlock::kFloats, thread % 8);
  #pragma unroll
  for (int half = 0; half < 2; ++half)
    if (row + 8 * half < q_rows)
      store_or_add_eight(dq + (size_t)(row + 8 * half) * columns + column, sums[half], scale);
}

template <typename T, int kHeadDim, int kVHeadDim, int kTileM, int kTileN, int kStages>
struct PortableBackwardShared {
  T k[kTileN * (kHeadDim + kPad)], v[kTileN * (kVHeadDim + kPad)];
  T q[kStages * kTileM * (kHeadDim + kPad)], dout[kStages * kTileM * (kVHeadDim + kPad)];
  static_assert(kStages <= 2, "query tiles are loaded one step ahead, and dq is added one step later");
  static_assert(kTileM % 16 == 0 && kTileN % 16 == 0, "fragments have 16 rows");
  static_assert(kHeadDim % 16 == 0 && kVHeadDim % 16 == 0, "fragments have 16 columns");
  T p[kTileN * kTileM], ds[kStages * kTileN * kTileM];  // Blocks
  float stats[kStages * 2 * kTileM];                    // -lse and -delta
};

// A matrix of keys by queries in shared memory, in blocks of 8x8 that follow each other. A block has 128 bytes, so
// neither stores of accumulators nor ldmatrix have bank conflicts.
template <typename T, int kTileM>
struct Blocks {
  T* blocks;
  __device__ __forceinline__ T* block(int key, int query) const {
    return blocks + (key / 8 * (kTileM / 8) + query / 8) * 64;
  }
  // Stores a warp's fragments, from a key and a query on.
  template <int kFragments, int kDepth>
  __device__ __forceinline__ void store(int key, int query, const u32 (&a)[kFragments][kDepth][4]) const {
    T* const mine = block(key, query) + threadIdx.x % kWarp * 2;
    #pragma unroll
    for (int f = 0; f < kFragments; ++f)
      #pragma unroll
      for (int d = 0; d < kDepth; ++d)
        #pragma unroll
        for (int i = 0; i < 4; ++i) *(u32*)(mine + ((2 * f + i % 2) * (kTileM / 8) + 2 * d + i / 2) * 64) = a[f][d][i];
  }
  // Loads fragments whose rows are keys.
  template <int kFragments, int kDepth>
  __device__ __forceinline__ void load(u32 (&a)[kFragments][kDepth][4], int key, int query) const {
    const int lane = threadIdx.x % kWarp;
    const T* const row = block(key, query) + (lane / 8 % 2 * (kTileM / 8) + lane / 16) * 64 + lane % 8 * 8;
    #pragma unroll
    for (int f = 0; f < kFragments; ++f)
      #pragma unroll
      for (int d = 0; d < kDepth; ++d) ldmatrix(a[f][d], row + (2 * f * (kTileM / 8) + 2 * d) * 64);
  }
  // Loads fragments of 16 keys whose rows are queries.
  template <int kFragments>
  __device__ __forceinline__ void load_transposed(u32 (&a)[kFragments][1][4], int key, int query) const {
    const int lane = threadIdx.x % kWarp;
    const T* const row = block(key, query) + (lane / 16 * (kTileM / 8) + lane / 8 % 2) * 64 + lane % 8 * 8;
    #pragma unroll
    for (int f = 0; f < kFragments; ++f) ldmatrix_transposed(a[f][0], row + 2 * f * 64);
  }
};

// How the warps of a thread block divide the columns of dk, dv and dq: into whole fragments of 16 columns.
template <int kHeadDim, int kVHeadDim, int kTileM, int kTileN, int kColumnWarps, int kKeyFragments>
struct PortableBackwardColumns {
  static constexpr int kOfDk = kHeadDim / kColumnWarps, kOfDv = kVHeadDim / kColumnWarps;
  static_assert(kHeadDim % (16 * kColumnWarps) == 0 && kVHeadDim % (16 * kColumnWarps) == 0,
                "column warps divide dk and dv into whole fragments of 16 columns");

  // A warp has kOfDq columns of dq, of one fragment of 16 rows or, if that leaves whole fragments of columns, of two.
  static constexpr int kWarps = kTileN / (16 * kKeyFragments) * kColumnWarps;
  static constexpr bool kTwo = kTileM >= 32 && kWarps * 32 >= kTileM && kHeadDim / (kWarps * 32 / kTileM) % 16 == 0;
  static constexpr int kFragments = kTwo ? 2 : 1, kWarpsM = kTileM / (16 * kFragments);
  static constexpr int kOfDq = kHeadDim / (kWarps / kWarpsM);
  static_assert(kWarps % kWarpsM == 0 && kOfDq % 16 == 0 && kOfDq * (kWarps / kWarpsM) == kHeadDim,
                "warps divide dq into whole fragments of 16 columns");
};

// Turns a warp's scores, 16 keys by 8 * kBlocks queries, into probabilities.
template <bool kCaps, int kBlocks>
__device__ __forceinline__ void take_exponentials(float (&score)[kBlocks][4], const float* minus_lse,
                                                  const Logits<kCaps>& logits, int lane) {
  #pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const float2 x = *(const float2*)(minus_lse + n * 8 + lane % 4 * 2);
    #pragma unroll
    for (int e = 0; e < 4; ++e) score[n][e] = logits.probability(score[n][e], e % 2 ? x.y : x.x);
  }
}

// Turns probabilities into dS = P (dP - delta) * slope.
template <bool kCaps, int kBlocks>
__device__ __forceinline__ void weigh(float (&p)[kBlocks][4], const float (&dp)[kBlocks][4], const float* minus_delta,
                                      const float* minus_lse, const Logits<kCaps>& logits, int lane) {
  #pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const float2 x = *(const float2*)(minus_delta + n * 8 + lane % 4 * 2);
    const float2 y = kCaps ? *(const float2*)(minus_lse + n * 8 + lane % 4 * 2) : x;
    #pragma unroll
    for (int e = 0; e < 4; ++e)
      p[n][e] *= (dp[n][e] + (e % 2 ? x.y : x.x)) * logits.slope(p[n][e], e % 2 ? y.y : y.x);
  }
}

// Waits for the kColumnWarps warps that share keys with this one. Warps without visible keys do not come. racecheck of
// compute-sanitizer then reports races between a step and the next, although all warps meet at a barrier between them.
template <int kColumnWarps> __device__ __forceinline__ void warps_meet() {
  const int group = threadIdx.x / (kColumnWarps * kWarp);
  asm volatile("bar.sync %0, %1;" :: "r"(1 + group), "n"(kColumnWarps * kWarp) : "memory");
}

// Adds dS k of the tile of queries from m0 on to its sums of dq in global memory. The warps divide the tile.
template <typename Columns, typename T, int kHeadDim, int kTileM, int kTileN>
__device__ __forceinline__ void add_dq(float* dq_accum, int head, int m0, u32 stride, const Blocks<T, kTileM>& ds,
                                       const T* tile_k) {
  constexpr int kFragments = Columns::kFragments, kWarpsM = Columns::kWarpsM, kCols = Columns::kOfDq;
  const int warp = threadIdx.x / kWarp, query = warp % kWarpsM * 16 * kFragments, col = warp / kWarpsM * kCols;
  float acc_dq[kFragments][kCols / 8][4] = {};
  #pragma unroll
  for (int n = 0; n < kTileN; n += 16) {
    u32 a[kFragments][1][4];
    ds.load_transposed(a, n, query);
    add_weighted_rows<T, kHeadDim + kPad>(acc_dq, a, tile_k + n * (kHeadDim + kPad) + col);
  }
  float* const target = dq_accum + (size_t)(m0 + query) * stride + (head * kHeadDim + col) * (SumBlock::kFloats / 8);
  #pragma unroll
  for (int f = 0; f < kFragments; ++f)
    #pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
      SumBlock::add(target + (size_t)f * 16 * stride + n * SumBlock::kFloats, acc_dq[f][n]);
}

__device__ __forceinline__ void store_four(float* p, const float (&x)[4]) {
  *(float4*)p = make_float4(x[0], x[1], x[2], x[3]);
}
template <typename Out> __device__ __forceinline__ void store_four(Out* p, const float (&x)[4]) {
  *(uint2*)p = make_uint2(pack<Out>(x[0], x[1]), pack<Out>(x[2], x[3]));
}

// Stores one of the two key rows that this thread shares with its quad; row: from the warp's first column on, or null.
// Lanes in pairs exchange columns, so that each stores four of them together, and a quad whole sectors of 32 bytes.
template <typename Out, int kBlocks>
__device__ __forceinline__ void store_half(Out* row, const float (&acc)[kBlocks][4], int half, float scale,
                                           bool padding) {
  const int lane = threadIdx.x % 4, odd = lane % 2;
  #pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    float x[4];
    #pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float blocks[2] = {acc[n][2 * half + e] * scale, acc[n + 1][2 * half + e] * scale};
      const float given = __shfl_xor_sync(0xffffffffu, odd ? blocks[0] : blocks[1], 1);
      x[e] = odd ? given : blocks[0], x[2 + e] = odd ? blocks[1] : given;
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = padding ? 0.f : x[i];
    if (row) store_four(row + (n + odd) * 8 + lane / 2 * 4, x);
  }
}

// Gradients of one tile of key rows of one kv head. dk and dv stay in registers over all query heads of the group and
// all visible query tiles, so that each is written once. With kAddDq, the tile's partial dq is added to accumulators in
// global memory, in no fixed order.
//
// Scores are computed transposed, with keys as the rows. So the tensor cores return probabilities and score gradients
// in the layout of the operands of dv and dk. kColumnWarps warps share 16 * kKeyFragments keys. They divide the queries
// for the scores, and the columns of dk and dv; there each takes the weights of the others from shared memory, as dq
// takes them all. So few operands are read from shared memory for each matrix instruction. With two stages, query tiles
// are loaded one step ahead, and dq is added one step later: by four warps as that step ends, by others before. So
// some warps compute matrix products while others compute exponentials, and a step has one barrier of all warps. Bound
// by mma.sync and by reads of shared memory: 5 matrix products per step, 4 without dq.
//
// q (q_rows, num_heads, kHeadDim), dout (q_rows, num_heads, kVHeadDim)
// k, dk (k_rows, num_heads / group, kHeadDim), v, dv (k_rows, num_heads / group, kVHeadDim)
// places (k_rows), or null: a row with a place other than -1 goes there in dk_rounded and dv_rounded instead
// owners: if Grad is fp32, rows may go to other ranks instead
// dq_accum (stats_rows / 16, num_heads, kHeadDim / 8) of SumBlock: zero at first, not yet multiplied by softmax_scale
// stats from thd_attn_delta; key_ranges (q_rows), null if all rows of q and dout are finite; query_ranges (k_rows)
// tile_order: key tiles, the longest first
// Launch: grid (tiles, num_kv_heads), block 2 * kTileN * kColumnWarps / kKeyFragments, shared memory kSharedBytes.
template <typename T, typename Grad, bool kCaps, int kHeadDim, int kVHeadDim, int kTileM, int kTileN, int kColumnWarps,
          int kKeyFragments, int kStages, bool kAddDq, int kSharedBytes>
__global__ void __launch_bounds__(kTileN * 2 * kColumnWarps / kKeyFragments, 1) thd_attn_bwd(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ dout,
    Grad* __restrict__ dk, Grad* __restrict__ dv, T* __restrict__ dk_rounded, T* __restrict__ dv_rounded,
    const int* __restrict__ places, const Owners owners, Logits<kCaps> logits, const float* __restrict__ stats,
    float* __restrict__ dq_accum, const int2* __restrict__ key_ranges, const int2* __restrict__ query_ranges,
    const int* __restrict__ tile_order, int q_rows, int k_rows, int stats_rows, int group) {
  constexpr int kThreads = kTileN * 2 * kColumnWarps / kKeyFragments, kWarps = kThreads / kWarp;
  constexpr int kWarpKeys = 16 * kKeyFragments, kQueries = kTileM / kColumnWarps, kBlocks = kQueries / 8;
  using Columns = PortableBackwardColumns<kHeadDim, kVHeadDim, kTileM, kTileN, kColumnWarps, kKeyFragments>;
  constexpr int kKCols = Columns::kOfDk, kVCols = Columns::kOfDv;
  using Weights = u32[kKeyFragments][kBlocks / 2][4];
  constexpr int kQSize = kTileM * (kHeadDim + kPad), kDoutSize = kTileM * (kVHeadDim + kPad);
  using Shared = PortableBackwardShared<T, kHeadDim, kVHeadDim, kTileM, kTileN, kStages>;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  static_assert(kWarps / kColumnWarps < 16, "hardware barriers of warps that share keys, beside that of all warps");
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ Sight<kWarps> sights[2];  // of steps with even numbers, and of others
  __shared__ int2 range[kThreads];     // of the tile's rows; empty for threads beyond the tile
  Shared& shared = *(Shared*)shared_bytes;
  T *const tile_k = shared.k, *const tile_v = shared.v, *const tile_q = shared.q, *const tile_dout = shared.dout;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_kv_heads = gridDim.y, kv_head = blockIdx.y, num_heads = num_kv_heads * group;
  const int n0 = tile_order[blockIdx.x] * kTileN;
  const int warp_key = warp / kColumnWarps * kWarpKeys, column_warp = warp % kColumnWarps;
  const int warp_query = column_warp * kQueries;
  const u32 q_stride = num_heads * kHeadDim, dout_stride = num_heads * kVHeadDim;
  const u32 k_stride = num_kv_heads * kHeadDim, v_stride = num_kv_heads * kVHeadDim;
  const int2 mine = threadIdx.x < kTileN ? range_of(query_ranges, n0 + threadIdx.x, k_rows) : make_int2(0, 0);
  range[threadIdx.x] = mine;
  sights[0].publish_first(mine, 0);
  sights[0].publish_all(threadIdx.x < kTileN, mine);  // padding keys count: no lse bounds their scores
  const int2* const my_range = range + warp_key + lane / 4;
  __syncthreads();
  const int2 all = sights[0].all();
  const int first = sights[0].first_tile(kTileM);
  auto is_interior = [&](int m) { return all.x <= m && m + kTileM <= all.y; };
  auto load_step = [&](int stage, int head, int m0) {
    const bool interior = is_interior(m0);
    load_tile<T, kTileM, kHeadDim, kThreads>(tile_q + stage * kQSize, q + head * kHeadDim, q_stride, m0, q_rows,
                                             key_ranges, interior);
    load_tile<T, kTileM, kVHeadDim, kThreads>(tile_dout + stage * kDoutSize, dout + head * kVHeadDim, dout_stride, m0,
                                              q_rows, key_ranges, interior);
    // There are whole tiles of stats.
    static_assert(kTileM / 2 <= kThreads && kTileM % 4 == 0, "a thread copies four numbers");
    if (const int i = threadIdx.x % (kTileM / 4) * 4, which = threadIdx.x / (kTileM / 4); which < 2)
      copy_async_16(shared.stats + (2 * stage + which) * kTileM + i,
                    stats + ((size_t)which * num_heads + head) * stats_rows + m0 + i, true);
    copies_commit();
  };
  float acc_dk[kKeyFragments][kKCols / 8][4] = {}, acc_dv[kKeyFragments][kVCols / 8][4] = {};
  load_tile<T, kTileN, kHeadDim, kThreads>(tile_k, k + kv_head * kHeadDim, k_stride, n0, k_rows, query_ranges, false);
  load_tile<T, kTileN, kVHeadDim, kThreads>(tile_v, v + kv_head * kVHeadDim, v_stride, n0, k_rows, query_ranges, false);
  copies_commit();

  // A step is found while the one before is computed. Visible tiles rise within a head, so the next head begins where
  // they do not.
  auto publish_after = [&](int m, int number) {
    if (m != kNone && !is_interior(m + kTileM)) sights[number % 2].publish_first(range[threadIdx.x], m + kTileM);
  };
  auto step_after = [&](int h, int m, int number) {
    if (m == kNone) return kNone;
    const int found = is_interior(m + kTileM) ? m + kTileM : sights[number % 2].first_tile(kTileM);
    return found == kNone && h + 1 < (kv_head + 1) * group ? first : found;
  };
  const Blocks<T, kTileM> shared_p{shared.p};
  auto ds_of = [&](int stage) { return Blocks<T, kTileM>{shared.ds + stage * kTileN * kTileM}; };
  auto add_dq_of = [&](int h, int m, int stage) {
    add_dq<Columns, T, kHeadDim, kTileM, kTileN>(dq_accum, h, m, q_stride, ds_of(stage), tile_k);
  };
  int head = kv_head * group, m0 = first;
  int before_head = 0, before_m0 = kNone;  // the step before, if its dq is not yet added
  if (m0 != kNone) load_step(0, head, m0);
  __syncthreads();
  publish_after(m0, 0);

  // Of the warps that share a scheduler, the last one adds dq as a step ends.
  constexpr bool kLater = kAddDq && kStages > 1;
  const bool adds_first = warp < kWarps - 4;
  for (int number = 0; m0 != kNone || before_m0 != kNone; ++number) {
    const int stage = number % kStages;
    copies_wait(); __syncthreads();
    const int next_m0 = step_after(head, m0, number);
    if (kStages > 1 && next_m0 != kNone) load_step(1 - stage, head + (next_m0 <= m0), next_m0);
    publish_after(next_m0, number + 1);
    if (kLater && adds_first && before_m0 != kNone) add_dq_of(before_head, before_m0, 1 - stage);
    const WarpSight keys = m0 == kNone ? WarpSight{} : warp_sight<kWarpKeys>(range + warp_key, m0, kTileM);
    if (keys.any) {
      const T *const stage_q = tile_q + stage * kQSize, *const stage_dout = tile_dout + stage * kDoutSize;
      const float* const minus_lse = shared.stats + stage * 2 * kTileM + warp_query;
      const float* const minus_delta = minus_lse + kTileM;
      // Adds the products of this warp's keys with some queries to its columns of dv or dk.
      auto add_dv = [&](const Weights& p, int query) {
        add_weighted_rows<T, kVHeadDim + kPad>(acc_dv, p,
                                               stage_dout + query * (kVHeadDim + kPad) + column_warp * kVCols);
      };
      auto add_dk = [&](const Weights& ds, int query) {
        add_weighted_rows<T, kHeadDim + kPad>(acc_dk, ds, stage_q + query * (kHeadDim + kPad) + column_warp * kKCols);
      };
      auto add_others = [&](const Blocks<T, kTileM>& from, auto add) {
        #pragma unroll
        for (int w = 1; w < kColumnWarps; ++w) {
          const int query = (column_warp + w) % kColumnWarps * kQueries;
          Weights a;
          from.load(a, warp_key, query);
          add(a, query);
        }
      };
      // Probabilities from the saved lse, then dv += P^T dout.
      float score[kKeyFragments][kBlocks][4], dprobability[kKeyFragments][kBlocks][4];
      dot_rows<T, kHeadDim>(score, tile_k + warp_key * (kHeadDim + kPad), stage_q + warp_query * (kHeadDim + kPad));
      if (!keys.all) hide(score, my_range, m0 + warp_query);
      #pragma unroll
      for (int f = 0; f < kKeyFragments; ++f) take_exponentials(score[f], minus_lse, logits, lane);
      Weights probability, dscore;
      round_to_operand<T>(probability, score);
      add_dv(probability, warp_query);
      dot_rows<T, kVHeadDim>(dprobability, tile_v + warp_key * (kVHeadDim + kPad),
                             stage_dout + warp_query * (kVHeadDim + kPad));
      if (kColumnWarps > 1) shared_p.store(warp_key, warp_query, probability);

      // dS, then dk += dS^T q.
      #pragma unroll
      for (int f = 0; f < kKeyFragments; ++f)
        weigh(score[f], dprobability[f], minus_delta, minus_lse, logits, lane);
      round_to_operand<T>(dscore, score);
      if (kAddDq || kColumnWarps > 1) ds_of(stage).store(warp_key, warp_query, dscore);
      add_dk(dscore, warp_query);
      if (kColumnWarps > 1) {
        warps_meet<kColumnWarps>();
        add_others(shared_p, add_dv);
        add_others(ds_of(stage), add_dk);
      }
    } else if (kAddDq && m0 != kNone) {
      const Weights zeros = {};
      ds_of(stage).store(warp_key, warp_query, zeros);
    }
    if (kLater && !adds_first && before_m0 != kNone) add_dq_of(before_head, before_m0, 1 - stage);
    if (kStages == 1) {
      __syncthreads();
      if (next_m0 != kNone) load_step(0, head + (next_m0 <= m0), next_m0);
      if (kAddDq) add_dq_of(head, m0, 0);
    }
    if (kLater) before_head = head, before_m0 = m0;
    head += next_m0 <= m0, m0 = next_m0;
  }
  copies_wait();
  #pragma unroll
  for (int half = 0; half < 2 * kKeyFragments; ++half) {
    const int row = n0 + warp_key + lane / 4 + 8 * half;
    const bool padding = is_empty(my_range[8 * half]);
    auto store_dk = [&](auto* dk_row) {
      store_half(dk_row ? dk_row + kv_head * kHeadDim + column_warp * kKCols : nullptr, acc_dk[half / 2], half % 2,
                 logits.scale, padding);
    };
    auto store_dv = [&](auto* dv_row) {
      store_half(dv_row ? dv_row + kv_head * kVHeadDim + column_warp * kVCols : nullptr, acc_dv[half / 2], half % 2,
                 1.f, padding);
    };
    const int place = places && row < k_rows ? places[row] : -1;
    if (places) {
      store_dk(place < 0 ? nullptr : dk_rounded + (size_t)place * k_stride);
      store_dv(place < 0 ? nullptr : dv_rounded + (size_t)place * v_stride);
    }
    const bool elsewhere = row >= k_rows || place >= 0;
    auto row_of = [&](int which, Grad* grad, u32 stride) -> Grad* {
      if (elsewhere) return nullptr;
      return owners.places ? (Grad*)owners.row_of(which, row, stride) : grad + (size_t)row * stride;
    };
    store_dk(row_of(0, dk, k_stride));
    store_dv(row_of(1, dv, v_stride));
  }
}

template <typename T, int kHeadDim, int kVHeadDim, int kTileM, int kTileN>
struct PortableDqShared {
  T q[kTileM * (kHeadDim + kPad)], dout[kTileM * (kVHeadDim + kPad)];
  T k[kTileN * (kHeadDim + kPad)], v[kTileN * (kVHeadDim + kPad)];
};

// dq alone, for one tile of query rows of one head. It has the structure of the forward: the accumulators of dq stay in
// registers, and keys come in their order, so that every run gives the same bits. The price is that scores and dP are
// computed a second time: 7 matrix products instead of 5 in the whole backward. Bound by mma.sync, and by waiting for
// keys and values, which are not loaded ahead.
//
// Shapes as in thd_attn_bwd; dq (q_rows, num_heads, kHeadDim). If Dq is float, the result is added to dq.
// trees_or_none: for a pack with prefix trees
// Launch: grid (ceil(q_rows / (16 * kWarps)), num_heads), block 32 * kWarps, shared memory kSharedBytes.
template <typename T, typename Dq, bool kCaps, int kHeadDim, int kVHeadDim, int kTileN, int kWarps, int kSharedBytes,
          typename... Tree>
__global__ void __launch_bounds__(kWarps * kWarp, 1) thd_attn_bwd_dq(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ dout,
    Dq* __restrict__ dq, Logits<kCaps> logits, const float* __restrict__ stats, const int2* __restrict__ key_ranges,
    const int2* __restrict__ query_ranges, int q_rows, int k_rows, int stats_rows, int group, Tree... trees_or_none) {
  constexpr bool kTrees = sizeof...(Tree) > 0;
  const Trees trees = {trees_or_none...};
  constexpr int kThreads = kWarps * kWarp, kTileM = 16 * kWarps, kBlocks = kTileN / 8;
  using Shared = PortableDqShared<T, kHeadDim, kVHeadDim, kTileM, kTileN>;
  static_assert(same_bytes<sizeof(Shared), kSharedBytes>());
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ Sight<kWarps> sight;
  Shared& shared = *(Shared*)shared_bytes;
  T *const tile_q = shared.q, *const tile_dout = shared.dout, *const tile_k = shared.k, *const tile_v = shared.v;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_heads = gridDim.y, head = blockIdx.y, num_kv_heads = num_heads / group, kv_head = head / group;
  const int m0 = (gridDim.x - 1 - blockIdx.x) * kTileM;    // under a causal mask the last rows see the most
  const u32 q_stride = num_heads * kHeadDim, dout_stride = num_heads * kVHeadDim;
  const u32 k_stride = num_kv_heads * kHeadDim, v_stride = num_kv_heads * kVHeadDim;

  const int2 mine = threadIdx.x < kTileM ? range_of(key_ranges, m0 + threadIdx.x, q_rows) : make_int2(0, 0);
  sight.publish_first(mine, 0);
  sight.publish_all(!is_empty(mine), mine);
  const int row0 = m0 + warp * 16 + lane / 4;
  const int2 range[2] = {range_of(key_ranges, row0, q_rows), range_of(key_ranges, row0 + 8, q_rows)};
  float minus_lse[2], minus_delta[2];
  #pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool padding = is_empty(range[r]);
    minus_lse[r] = padding ? -kInfinity : stats[(size_t)head * stats_rows + row0 + 8 * r];
    minus_delta[r] = padding ? 0.f : stats[((size_t)num_heads + head) * stats_rows + row0 + 8 * r];
  }
  __syncthreads();
  const int2 all = sight.all();
  auto tile_in_trees = [&](int from) {
    return trees.template first_tile<kTileN>(from, key_ranges + m0, min(kTileM, q_rows - m0), m0);
  };
  int n0 = kTrees ? tile_in_trees(0) : sight.first_tile(kTileN);

  float acc_dq[1][kHeadDim / 8][4] = {};
  load_tile<T, kTileM, kHeadDim, kThreads>(tile_q, q + head * kHeadDim, q_stride, m0, q_rows, key_ranges, false);
  load_tile<T, kTileM, kVHeadDim, kThreads>(tile_dout, dout + head * kVHeadDim, dout_stride, m0, q_rows, key_ranges,
                                            false);
  while (n0 != kNone) {
    const bool interior = !kTrees && all.x <= n0 && n0 + kTileN <= all.y;
    const bool in_sight = __any_sync(0xffffffffu, touches(range[0], n0, kTileN) || touches(range[1], n0, kTileN));
    __syncthreads();
    load_tile<T, kTileN, kHeadDim, kThreads>(tile_k, k + kv_head * kHeadDim, k_stride, n0, k_rows, query_ranges,
                                             interior);
    load_tile<T, kTileN, kVHeadDim, kThreads>(tile_v, v + kv_head * kVHeadDim, v_stride, n0, k_rows, query_ranges,
                                              interior);
    copies_commit();
    if (!kTrees) sight.publish_first(mine, n0 + kTileN);
    copies_wait();
    __syncthreads();
    if (in_sight) {
      float score[1][kBlocks][4], dprobability[1][kBlocks][4];
      dot_rows<T, kHeadDim>(score, tile_q + warp * 16 * (kHeadDim + kPad), tile_k);
      dot_rows<T, kVHeadDim>(dprobability, tile_dout + warp * 16 * (kVHeadDim + kPad), tile_v);
      if (kTrees) hide_ended(score, row0, trees.query_ends + n0);
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float p = logits.probability(score[0][n][e], minus_lse[e / 2]);
          const bool visible = interior || contains(range[e / 2], n0 + n * 8 + lane % 4 * 2 + e % 2);
          const float dscore = p * ((dprobability[0][n][e] + minus_delta[e / 2]) * logits.slope(p, minus_lse[e / 2]));
          score[0][n][e] = visible ? dscore : 0.f;
        }
      u32 dscore[1][kBlocks / 2][4];
      round_to_operand<T>(dscore, score);
      add_weighted_rows<T, kHeadDim + kPad>(acc_dq, dscore, tile_k);
    }
    n0 = kTrees ? tile_in_trees(n0 + kTileN) : sight.first_tile(kTileN);
  }
  copies_wait();

  #pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + 8 * half;
    if (row >= q_rows) continue;
    #pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
      store_or_add_pair(dq + (size_t)row * q_stride + head * kHeadDim + n * 8 + lane % 4 * 2,
                 acc_dq[0][n][2 * half] * logits.scale, acc_dq[0][n][2 * half + 1] * logits.scale);
  }
}
