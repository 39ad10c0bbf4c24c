// Portable CUDA kernels (sm_80 and later): reorder, plan, attention forward, delta, backward.
//
// The attention kernels know nothing of sequences, ranks, causality, windows or padding. They get one range of keys
// per query row and its transpose, and obey one rule: score(i, j) counts iff key_ranges[i].x <= j < key_ranges[i].y.
// A row whose range is empty is padding: it is read as zero, so NaN there cannot spread, and written as zero.
//
// A thread block owns one tile of rows and walks the tiles of the other side that any of its rows sees, asking after
// each tile for the next row in sight; gaps between documents, chunks or windows cost nothing. A tile that every
// row sees whole is computed without comparisons.
//
// Built with mma.sync m16n8k16, ldmatrix and cp.async (PTX ISA 9.7). kernels.cuh comes first.

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

// Copies that fill with zeros instead of reading when `valid` is false.
__device__ __forceinline__ void copy_async_16(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(dst)), "l"(src), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void copy_async_4(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(shared_address(dst)), "l"(src), "r"(valid ? 4 : 0));
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group 0;"); }

__device__ __forceinline__ void add_to_global(float* p, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" :: "l"(p), "f"(x), "f"(y) : "memory");
#else
  atomicAdd(p, x);
  atomicAdd(p + 1, y);
#endif
}

// ------------------------------------------------------------------------------------------------ ranges

// Whether any of this warp's kRows rows sees a row of [begin, begin + size).
template <int kRows>
__device__ __forceinline__ bool any_touches(const int2* ranges, int begin, int size) {
  return __any_sync(0xffffffffu, touches(ranges[threadIdx.x % kRows], begin, size));
}

// What the rows of one tile see of the other side: the first row in sight, and the rows [all.x, all.y) that every
// row that counts sees. Each thread brings the range of one row (threads beyond the tile an empty one).
template <int kWarps>
struct Sight {
  int slots[3][kWarps];

  __device__ __forceinline__ void publish(int slot, int value) {
    value = __reduce_min_sync(0xffffffffu, value);
    if (threadIdx.x % kWarp == 0) slots[slot][threadIdx.x / kWarp] = value;
  }
  __device__ __forceinline__ int collect(int slot) const {
    int value = slots[slot][0];
    for (int w = 1; w < kWarps; ++w) value = min(value, slots[slot][w]);
    return value;
  }
  // publish_* by all threads, a barrier, then collect by all threads; a further barrier before the next publish.
  __device__ __forceinline__ void publish_first(int2 range, int from) {
    const int row = max(range.x, from);
    publish(0, row < range.y ? row : kNone);
  }
  __device__ __forceinline__ void publish_all(bool counts, int2 range) {
    publish(1, counts ? -range.x : kNone);
    publish(2, counts ? range.y : kNone);
  }
  __device__ __forceinline__ int first_tile(int tile) const {
    const int row = collect(0);
    return row == kNone ? kNone : row / tile * tile;
  }
  __device__ __forceinline__ int2 all() const { return make_int2(-collect(1), collect(2)); }
};

// ------------------------------------------------------------------------------------------------ tiles

// A tile in shared memory has kCols + 8 elements a row: 16 bytes of padding put the 8 rows of an ldmatrix into
// different banks for every head_dim, without address arithmetic.
[[maybe_unused]] constexpr int kPad = 8;

// Starts to copy kRows rows of one head; rows outside the buffer or with an empty range become zeros. `all_valid`
// saves the look at the ranges where the caller knows better.
template <typename T, int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_tile(T* tile, const T* head, u32 row_stride, int first, int num_rows,
                                          const int2* ranges, bool all_valid) {
  constexpr int kChunks = kCols / 8;
  const T* const source = head + (size_t)first * row_stride;
  #pragma unroll
  for (u32 c = threadIdx.x; c < kRows * kChunks; c += kThreads) {
    const u32 row = c / kChunks, col = c % kChunks * 8;
    const bool valid = all_valid || !is_empty(range_of(ranges, first + row, num_rows));
    copy_async_16(tile + row * (kCols + kPad) + col, source + (row * row_stride + col), valid);
  }
}

// product[i][j] = a[i] . b[j]: rows of a (16 * kFragments of this warp) with rows of b (8 * kBlocks), over kDim.
template <typename T, int kDim, int kFragments, int kBlocks>
__device__ __forceinline__ void dot_rows(float (&product)[kFragments][kBlocks][4], const T* a, const T* b) {
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

// sum[i] += weights[i] . b: weights in registers (16 * kFragments rows, 16 * kDepth columns), b rows of shared memory
// (16 * kDepth rows, kPitch elements apart), of which 8 * kBlocks columns.
template <typename T, int kPitch, int kFragments, int kDepth, int kBlocks>
__device__ __forceinline__ void add_weighted_rows(float (&sum)[kFragments][kBlocks][4],
                                                  const u32 (&weights)[kFragments][kDepth][4], const T* b) {
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
        mma<T>(sum[f][n], weights[f][k], fb[0], fb[1]);
        mma<T>(sum[f][n + 1], weights[f][k], fb[2], fb[3]);
      }
    }
}

// ------------------------------------------------------------------------------------------------ forward

// Attention of one tile of query rows of one head over every key in their ranges, with an online softmax.
//
// q (q_rows, num_heads, kHeadDim), k (k_rows, num_heads / group, kHeadDim), v (k_rows, num_heads / group, kVHeadDim)
// out (q_rows, num_heads, kVHeadDim); lse (num_heads, q_rows): natural log of the softmax sum, -inf on padding rows
// max_logits (num_heads, tiles * kWarps): largest scaled score of each warp's rows, -inf if they are all padding
// key_ranges (q_rows), query_ranges (k_rows); tile_order: query tiles, the longest first
// Launch: grid (tiles, num_heads), block 32 * kWarps, shared memory (16 * kFragments * kWarps) * (kHeadDim + 8)
// + kTileN * (kHeadDim + kVHeadDim + 16) elements. Bound by mma.sync.
template <typename T, int kHeadDim, int kVHeadDim, int kTileN, int kWarps, int kFragments>
__global__ void __launch_bounds__(kWarps * kWarp, 8 / kWarps) thd_attn_fwd(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ out,
    float* __restrict__ lse, float softmax_scale, float* __restrict__ max_logits,
    const int2* __restrict__ key_ranges, const int2* __restrict__ query_ranges, const int* __restrict__ tile_order,
    int q_rows, int k_rows, int group) {
  constexpr int kThreads = kWarps * kWarp, kWarpRows = 16 * kFragments, kTileM = kWarpRows * kWarps;
  constexpr int kBlocks = kTileN / 8, kOutBlocks = kVHeadDim / 8, kRows = 2 * kFragments;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Sight<kWarps> sight;
  __shared__ int2 range[kThreads];    // of the tile's rows, then empty
  T* const tile_q = (T*)shared;
  T* const tile_k = tile_q + kTileM * (kHeadDim + kPad);
  T* const tile_v = tile_k + kTileN * (kHeadDim + kPad);

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_heads = gridDim.y, head = blockIdx.y, num_kv_heads = num_heads / group, kv_head = head / group;
  const int tile = tile_order[blockIdx.x], m0 = tile * kTileM;
  const u32 q_stride = num_heads * kHeadDim, out_stride = num_heads * kVHeadDim;
  const u32 k_stride = num_kv_heads * kHeadDim, v_stride = num_kv_heads * kVHeadDim;
  k += kv_head * kHeadDim;
  v += kv_head * kVHeadDim;

  // Ranges live in shared memory: only tiles that compare read them, and registers are what the kernel is short of.
  const int2 mine = threadIdx.x < kTileM ? range_of(key_ranges, m0 + threadIdx.x, q_rows) : make_int2(0, 0);
  range[threadIdx.x] = mine;
  sight.publish_first(mine, 0);
  sight.publish_all(!is_empty(mine), mine);
  const int2* const my_range = range + warp * kWarpRows + lane / 4;
  const int row0 = m0 + warp * kWarpRows + lane / 4;
  __syncthreads();
  const int2 all = sight.all();
  int n0 = sight.first_tile(kTileN);
  auto is_interior = [&](int n) { return all.x <= n && n + kTileN <= all.y; };

  float sum_out[kFragments][kOutBlocks][4] = {};
  float row_max[kRows], row_sum[kRows];
  #pragma unroll
  for (int r = 0; r < kRows; ++r) row_max[r] = -kInfinity, row_sum[r] = 0.f;

  load_tile<T, kTileM, kHeadDim, kThreads>(tile_q, q + head * kHeadDim, q_stride, m0, q_rows, key_ranges, false);
  if (n0 != kNone)
    load_tile<T, kTileN, kHeadDim, kThreads>(tile_k, k, k_stride, n0, k_rows, query_ranges, is_interior(n0));
  copies_commit();

  while (n0 != kNone) {
    const bool interior = is_interior(n0);
    const bool in_sight = interior || any_touches<kWarpRows>(range + warp * kWarpRows, n0, kTileN);

    // Keys have arrived; everybody is done with the previous values.
    copies_wait();
    __syncthreads();
    load_tile<T, kTileN, kVHeadDim, kThreads>(tile_v, v, v_stride, n0, k_rows, query_ranges, interior);
    copies_commit();
    sight.publish_first(range[threadIdx.x], n0 + kTileN);
    float score[kFragments][kBlocks][4];
    if (in_sight) dot_rows<T, kHeadDim>(score, tile_q + warp * kWarpRows * (kHeadDim + kPad), tile_k);

    // Values have arrived; everybody is done with the keys.
    copies_wait();
    __syncthreads();
    const int next = sight.first_tile(kTileN);
    if (next != kNone)
      load_tile<T, kTileN, kHeadDim, kThreads>(tile_k, k, k_stride, next, k_rows, query_ranges, is_interior(next));
    copies_commit();

    if (in_sight) {
      if (!interior) {
        #pragma unroll
        for (int f = 0; f < kFragments; ++f)
          #pragma unroll
          for (int n = 0; n < kBlocks; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e)
              if (!contains(my_range[16 * f + e / 2 * 8], n0 + n * 8 + lane % 4 * 2 + e % 2)) score[f][n][e] = -kInfinity;
      }
      // Online softmax on unscaled scores; a row that has seen nothing yet keeps -inf and uses 0.
      const float scale_log2 = softmax_scale * kLog2e;
      #pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float largest = row_max[r];
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          largest = fmaxf(largest, fmaxf(score[r / 2][n][r % 2 * 2], score[r / 2][n][r % 2 * 2 + 1]));
        largest = quad_max(largest);
        const float base = largest == -kInfinity ? 0.f : largest * scale_log2;
        const float shrink = exp2_fast(row_max[r] * scale_log2 - base);
        row_max[r] = largest;
        row_sum[r] *= shrink;
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = score[r / 2][n][r % 2 * 2 + e];
            s = exp2_fast(fmaf(s, scale_log2, -base));
            row_sum[r] += s;
          }
        #pragma unroll
        for (int n = 0; n < kOutBlocks; ++n)
          sum_out[r / 2][n][r % 2 * 2] *= shrink, sum_out[r / 2][n][r % 2 * 2 + 1] *= shrink;
      }
      u32 probability[kFragments][kBlocks / 2][4];
      round_to_operand<T>(probability, score);
      add_weighted_rows<T, kVHeadDim + kPad>(sum_out, probability, tile_v);
    }
    n0 = next;
  }
  copies_wait();
  __syncthreads();

  // Normalise; the warp's own rows of tile_q stage the output for 16-byte stores.
  T* const staging = tile_q + warp * kWarpRows * (kHeadDim + kPad);
  float largest = -kInfinity;
  #pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool padding = is_empty(my_range[8 * r]);
    const float total = quad_sum(row_sum[r]), logit = row_max[r] * softmax_scale;
    if (!padding) largest = fmaxf(largest, logit);
    if (lane % 4 == 0 && row0 + 8 * r < q_rows)
      lse[(size_t)head * q_rows + row0 + 8 * r] = padding ? -kInfinity : logit + __log2f(total) * kLn2;
    #pragma unroll
    for (int n = 0; n < kOutBlocks; ++n) {
      const float x = sum_out[r / 2][n][r % 2 * 2], y = sum_out[r / 2][n][r % 2 * 2 + 1], scale = 1.f / total;
      store_pair(staging + (lane / 4 + 8 * r) * (kHeadDim + kPad) + n * 8 + lane % 4 * 2,
                 padding ? 0.f : x * scale, padding ? 0.f : y * scale);
    }
  }
  for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
  if (lane == 0) max_logits[((size_t)head * gridDim.x + tile) * kWarps + warp] = largest;
  __syncwarp();
  for (int c = lane; c < kWarpRows * kOutBlocks; c += kWarp) {
    const int row = c / kOutBlocks, col = c % kOutBlocks * 8, global_row = m0 + warp * kWarpRows + row;
    if (global_row < q_rows)
      *(uint4*)(out + (size_t)global_row * out_stride + head * kVHeadDim + col) =
          *(const uint4*)(staging + row * (kHeadDim + kPad) + col);
  }
}

// ------------------------------------------------------------------------------------------------ backward

// Per query row what the backward needs besides the tensors, ready for use:
// stats[0][head][row] = -lse / softmax_scale, -inf on padding rows, which makes every probability there exactly 0;
// stats[1][head][row] = -delta = -rowsum(dout * out), 0 on padding rows.
// Also sets `words` words of `sums` to zero, for what the main kernel adds up.
//
// out, dout (q_rows, num_heads, kVHeadDim); lse (num_heads, q_rows); stats (2, num_heads, stats_rows), rows from q_rows on are
// padding.
// Launch: grid ceil(stats_rows * num_heads / (256 / kLanes)), block 256. Bound by memory.
template <typename T, int kVHeadDim>
__global__ void thd_attn_delta(const T* __restrict__ out, const T* __restrict__ dout, const float* __restrict__ lse,
                               float softmax_scale, const int2* __restrict__ key_ranges, float* __restrict__ stats,
                               uint4* __restrict__ sums, size_t words, int q_rows, int stats_rows, int num_heads) {
  constexpr int kChunks = kVHeadDim / 8, kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  const size_t item = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  const int chunk = threadIdx.x % kLanes, row = item / num_heads, head = item % num_heads;
  const bool padding = is_empty(range_of(key_ranges, row, q_rows));
  float delta = 0.f;
  if (!padding && chunk < kChunks) {
    const uint4 o = ((const uint4*)out)[item * kChunks + chunk], d = ((const uint4*)dout)[item * kChunks + chunk];
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
    stats[i] = padding ? -kInfinity : -lse[(size_t)head * q_rows + row] / softmax_scale;
    stats[(size_t)num_heads * stats_rows + i] = -delta;
  }
  const size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (size_t)gridDim.x * blockDim.x;
  for (size_t i = thread; i < words; i += threads) sums[i] = make_uint4(0, 0, 0, 0);
}

// out = sums * scale, rounded; words of 8 elements. Launch: grid ceil(words / 256), block 256. Bound by memory.
template <typename T>
__global__ void thd_attn_round(uint4* __restrict__ out, const float4* __restrict__ sums, float scale, size_t words) {
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= words) return;
  const float4 a = sums[2 * i], b = sums[2 * i + 1];
  out[i] = make_uint4(pack<T>(a.x * scale, a.y * scale), pack<T>(a.z * scale, a.w * scale),
                     pack<T>(b.x * scale, b.y * scale), pack<T>(b.z * scale, b.w * scale));
}

// Gradients of one tile of key rows of one kv head: dk and dv stay in registers over all query heads of the group and
// all query tiles in sight; with kAddDq the tile's share of dq is added to global memory (in no fixed order).
//
// Scores are computed transposed (keys are the rows), so that probabilities and score gradients leave the tensor
// cores as the operand that dv and dk need; only dq takes its score gradients through shared memory.
// kSplit warps share 16 keys and divide the columns of dk and dv where these would not fit the registers.
//
// q, dq_sum (q_rows, num_heads, kHeadDim), dq_sum fp32, zeroed, and still to be multiplied with softmax_scale; dout (q_rows, num_heads, kVHeadDim);
// k, dk (k_rows, num_heads / group, kHeadDim); v, dv (.., kVHeadDim); stats from thd_attn_delta
// key_ranges (q_rows), query_ranges (k_rows); tile_order: key tiles, the longest first
// Launch: grid (tiles, num_kv_heads), block 2 * kTileN * kSplit, shared memory kTileN * (kHeadDim + kVHeadDim + 16)
// + kStages * kTileM * (kHeadDim + kVHeadDim + 16 + 4) + kTileN * (kTileM + 8) elements.
template <typename T, typename Grad, int kHeadDim, int kVHeadDim, int kTileM, int kTileN, int kSplit, int kStages,
          bool kAddDq>
__global__ void __launch_bounds__(kTileN * 2 * kSplit, 1) thd_attn_bwd(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ dout,
    Grad* __restrict__ dk, Grad* __restrict__ dv, float softmax_scale, const float* __restrict__ stats,
    float* __restrict__ dq_sum, const int2* __restrict__ key_ranges, const int2* __restrict__ query_ranges,
    const int* __restrict__ tile_order, int q_rows, int k_rows, int stats_rows, int group) {
  constexpr int kThreads = kTileN * 2 * kSplit, kWarps = kThreads / kWarp;
  constexpr int kBlocks = kTileM / 8, kKCols = kHeadDim / kSplit, kVCols = kVHeadDim / kSplit;
  constexpr int kQSize = kTileM * (kHeadDim + kPad), kDoutSize = kTileM * (kVHeadDim + kPad);
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Sight<kWarps> sight;
  __shared__ int2 range[kThreads];    // of the tile's rows, then empty
  T* const tile_k = (T*)shared;
  T* const tile_v = tile_k + kTileN * (kHeadDim + kPad);
  T* const tile_q = tile_v + kTileN * (kVHeadDim + kPad);
  T* const tile_dout = tile_q + kStages * kQSize;
  T* const tile_ds = tile_dout + kStages * kDoutSize;                            // (keys, queries)
  float* const tile_stats = (float*)(tile_ds + kTileN * (kTileM + kPad));        // per stage: -lse, -delta

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_kv_heads = gridDim.y, kv_head = blockIdx.y, num_heads = num_kv_heads * group;
  const int n0 = tile_order[blockIdx.x] * kTileN, warp_key = warp / kSplit * 16, part = warp % kSplit;
  const u32 q_stride = num_heads * kHeadDim, dout_stride = num_heads * kVHeadDim;
  const u32 k_stride = num_kv_heads * kHeadDim, v_stride = num_kv_heads * kVHeadDim;

  const int2 mine = threadIdx.x < kTileN ? range_of(query_ranges, n0 + threadIdx.x, k_rows) : make_int2(0, 0);
  range[threadIdx.x] = mine;
  sight.publish_first(mine, 0);
  sight.publish_all(threadIdx.x < kTileN, mine);  // padding counts: its scores are not bounded by any lse
  const int key0 = n0 + warp_key + lane / 4;
  const int2* const my_range = range + warp_key + lane / 4;
  __syncthreads();
  const int2 all = sight.all();
  const int first = sight.first_tile(kTileM);
  auto is_interior = [&](int m) { return all.x <= m && m + kTileM <= all.y; };
  auto load_step = [&](int stage, int head, int m0) {
    const bool interior = is_interior(m0);
    load_tile<T, kTileM, kHeadDim, kThreads>(tile_q + stage * kQSize, q + head * kHeadDim, q_stride, m0, q_rows,
                                             key_ranges, interior);
    load_tile<T, kTileM, kVHeadDim, kThreads>(tile_dout + stage * kDoutSize, dout + head * kVHeadDim, dout_stride, m0,
                                              q_rows, key_ranges, interior);
    for (int i = threadIdx.x; i < 2 * kTileM; i += kThreads) {
      const int row = m0 + i % kTileM;
      const size_t source = ((size_t)(i / kTileM) * num_heads + head) * stats_rows + row;
      copy_async_4(tile_stats + stage * 2 * kTileM + i, stats + (row < q_rows ? source : 0), row < q_rows);
    }
  };

  float sum_dk[1][kKCols / 8][4] = {}, sum_dv[1][kVCols / 8][4] = {};
  load_tile<T, kTileN, kHeadDim, kThreads>(tile_k, k + kv_head * kHeadDim, k_stride, n0, k_rows, query_ranges, false);
  load_tile<T, kTileN, kVHeadDim, kThreads>(tile_v, v + kv_head * kVHeadDim, v_stride, n0, k_rows, query_ranges, false);
  int head = kv_head * group, m0 = first;
  if (m0 != kNone) load_step(0, head, m0);
  copies_commit();

  // The walk runs one step ahead of the work: all query tiles in sight for the first head, then for the next head,
  // which begins where the tiles stop rising.
  auto step_after = [&](int h, int m) {
    const int found = m == kNone ? kNone : sight.first_tile(kTileM);
    return m != kNone && found == kNone && h + 1 < (kv_head + 1) * group ? first : found;
  };
  __syncthreads();
  sight.publish_first(mine, m0 == kNone ? kNone : m0 + kTileM);
  __syncthreads();
  int next_m0 = step_after(head, m0);

  for (int stage = 0; m0 != kNone; stage = (stage + 1) % kStages) {
    copies_wait();
    __syncthreads();
    if (kStages > 1 && next_m0 != kNone) load_step((stage + 1) % kStages, head + (next_m0 <= m0), next_m0);
    copies_commit();
    sight.publish_first(range[threadIdx.x], next_m0 == kNone ? kNone : next_m0 + kTileM);

    const bool interior = is_interior(m0);
    const bool in_sight = any_touches<16>(range + warp_key, m0, kTileM);
    const T* const stage_q = tile_q + stage * kQSize;
    const T* const stage_dout = tile_dout + stage * kDoutSize;
    const float* const minus_lse = tile_stats + stage * 2 * kTileM;
    const float* const minus_delta = minus_lse + kTileM;
    T* const my_ds = tile_ds + (warp_key + lane / 4) * (kTileM + kPad) + lane % 4 * 2;
    if (in_sight) {
      // Probabilities from the saved lse, then dv += P^T dout.
      float score[1][kBlocks][4];
      dot_rows<T, kHeadDim>(score, tile_k + warp_key * (kHeadDim + kPad), stage_q);
      const float scale_log2 = softmax_scale * kLog2e;
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float2 x = *(const float2*)(minus_lse + n * 8 + lane % 4 * 2);
        #pragma unroll
        for (int e = 0; e < 4; ++e) score[0][n][e] = exp2_fast((score[0][n][e] + (e % 2 ? x.y : x.x)) * scale_log2);
      }
      if (!interior) {
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          #pragma unroll
          for (int e = 0; e < 4; ++e)
            if (!contains(my_range[e / 2 * 8], m0 + n * 8 + lane % 4 * 2 + e % 2)) score[0][n][e] = 0.f;
      }
      u32 probability[1][kBlocks / 2][4];
      round_to_operand<T>(probability, score);
      add_weighted_rows<T, kVHeadDim + kPad>(sum_dv, probability, stage_dout + part * kVCols);

      // dS = P * (dP - delta), then dk += dS^T q.
      float dprobability[1][kBlocks][4];
      dot_rows<T, kVHeadDim>(dprobability, tile_v + warp_key * (kVHeadDim + kPad), stage_dout);
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float2 x = *(const float2*)(minus_delta + n * 8 + lane % 4 * 2);
        #pragma unroll
        for (int e = 0; e < 4; ++e) score[0][n][e] *= dprobability[0][n][e] + (e % 2 ? x.y : x.x);
      }
      u32 dscore[1][kBlocks / 2][4];
      round_to_operand<T>(dscore, score);
      if (kAddDq && part == 0) {
        #pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i)
          *(u32*)(my_ds + i % 2 * 8 * (kTileM + kPad) + i / 2 * 8) = dscore[0][i / 4][i % 4];
      }
      add_weighted_rows<T, kHeadDim + kPad>(sum_dk, dscore, stage_q + part * kKCols);
    } else if (kAddDq && part == 0) {
      #pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) *(u32*)(my_ds + i % 2 * 8 * (kTileM + kPad) + i / 2 * 8) = 0;
    }
    __syncthreads();
    const int done_head = head, done_m0 = m0;
    head += next_m0 <= m0;
    m0 = next_m0;
    next_m0 = step_after(head, m0);
    if (kStages == 1 && m0 != kNone) load_step(0, head, m0);
    copies_commit();

    if (kAddDq) {
      // dq += dS k: the warps divide the tile of dq.
      constexpr int kFragments = kHeadDim / (kWarps * 32 / kTileM) % 16 == 0 && kTileM >= 32 && kWarps * 32 >= kTileM ? 2 : 1;
      constexpr int kWarpsM = kTileM / (16 * kFragments), kCols = kHeadDim / (kWarps / kWarpsM);
      const int query = warp % kWarpsM * 16 * kFragments, col = warp / kWarpsM * kCols;
      float sum_dq[kFragments][kCols / 8][4] = {};
      const T* const a_lane = tile_ds + (lane / 16 * 8 + lane % 8) * (kTileM + kPad) + query + lane / 8 % 2 * 8;
      #pragma unroll
      for (int n = 0; n < kTileN; n += 16) {
        u32 a[kFragments][1][4];
        #pragma unroll
        for (int f = 0; f < kFragments; ++f) ldmatrix_transposed(a[f][0], a_lane + n * (kTileM + kPad) + f * 16);
        add_weighted_rows<T, kHeadDim + kPad>(sum_dq, a, tile_k + n * (kHeadDim + kPad) + col);
      }
      #pragma unroll
      for (int f = 0; f < kFragments; ++f)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = done_m0 + query + f * 16 + half * 8 + lane / 4;
          float* const target = dq_sum + (size_t)row * q_stride + done_head * kHeadDim + col + lane % 4 * 2;
          #pragma unroll
          for (int n = 0; n < kCols / 8; ++n)
            if (row < q_rows) add_to_global(target + n * 8, sum_dq[f][n][2 * half], sum_dq[f][n][2 * half + 1]);
        }
    }
  }
  copies_wait();

  #pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = key0 + 8 * half;
    const bool padding = is_empty(my_range[8 * half]);
    if (row >= k_rows) continue;
    Grad* const dk_row = dk + (size_t)row * k_stride + kv_head * kHeadDim + part * kKCols + lane % 4 * 2;
    Grad* const dv_row = dv + (size_t)row * v_stride + kv_head * kVHeadDim + part * kVCols + lane % 4 * 2;
    #pragma unroll
    for (int n = 0; n < kKCols / 8; ++n)
      store_pair(dk_row + n * 8, padding ? 0.f : sum_dk[0][n][2 * half] * softmax_scale,
                 padding ? 0.f : sum_dk[0][n][2 * half + 1] * softmax_scale);
    #pragma unroll
    for (int n = 0; n < kVCols / 8; ++n)
      store_pair(dv_row + n * 8, padding ? 0.f : sum_dv[0][n][2 * half],
                 padding ? 0.f : sum_dv[0][n][2 * half + 1]);
  }
}

// dq of one tile of query rows of one head, summed in registers in key order: bitwise repeatable, at the price of
// computing scores and dP a second time (7 matrix products instead of 5).
//
// Shapes as in thd_attn_bwd; dq (q_rows, num_heads, kHeadDim).
// Launch: grid (ceil(q_rows / (16 * kWarps)), num_heads), block 32 * kWarps, shared memory (16 * kWarps + kTileN) * (kHeadDim + kVHeadDim + 16)
// elements.
template <typename T, int kHeadDim, int kVHeadDim, int kTileN, int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp, 1) thd_attn_bwd_dq(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ dout,
    T* __restrict__ dq, float softmax_scale, const float* __restrict__ stats, const int2* __restrict__ key_ranges,
    const int2* __restrict__ query_ranges, int q_rows, int k_rows, int stats_rows, int group) {
  constexpr int kThreads = kWarps * kWarp, kTileM = 16 * kWarps, kBlocks = kTileN / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Sight<kWarps> sight;
  T* const tile_q = (T*)shared;
  T* const tile_dout = tile_q + kTileM * (kHeadDim + kPad);
  T* const tile_k = tile_dout + kTileM * (kVHeadDim + kPad);
  T* const tile_v = tile_k + kTileN * (kHeadDim + kPad);

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
  int n0 = sight.first_tile(kTileN);

  float sum_dq[1][kHeadDim / 8][4] = {};
  load_tile<T, kTileM, kHeadDim, kThreads>(tile_q, q + head * kHeadDim, q_stride, m0, q_rows, key_ranges, false);
  load_tile<T, kTileM, kVHeadDim, kThreads>(tile_dout, dout + head * kVHeadDim, dout_stride, m0, q_rows, key_ranges, false);
  while (n0 != kNone) {
    const bool interior = all.x <= n0 && n0 + kTileN <= all.y;
    const bool in_sight = __any_sync(0xffffffffu, touches(range[0], n0, kTileN) || touches(range[1], n0, kTileN));
    __syncthreads();
    load_tile<T, kTileN, kHeadDim, kThreads>(tile_k, k + kv_head * kHeadDim, k_stride, n0, k_rows, query_ranges, interior);
    load_tile<T, kTileN, kVHeadDim, kThreads>(tile_v, v + kv_head * kVHeadDim, v_stride, n0, k_rows, query_ranges, interior);
    copies_commit();
    sight.publish_first(mine, n0 + kTileN);
    copies_wait();
    __syncthreads();
    if (in_sight) {
      float score[1][kBlocks][4], dprobability[1][kBlocks][4];
      dot_rows<T, kHeadDim>(score, tile_q + warp * 16 * (kHeadDim + kPad), tile_k);
      dot_rows<T, kVHeadDim>(dprobability, tile_dout + warp * 16 * (kVHeadDim + kPad), tile_v);
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float p = exp2_fast((score[0][n][e] + minus_lse[e / 2]) * (softmax_scale * kLog2e));
          const bool visible = interior || contains(range[e / 2], n0 + n * 8 + lane % 4 * 2 + e % 2);
          score[0][n][e] = visible ? p * (dprobability[0][n][e] + minus_delta[e / 2]) : 0.f;
        }
      u32 dscore[1][kBlocks / 2][4];
      round_to_operand<T>(dscore, score);
      add_weighted_rows<T, kHeadDim + kPad>(sum_dq, dscore, tile_k);
    }
    n0 = sight.first_tile(kTileN);
  }
  copies_wait();

  #pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + 8 * half;
    if (row >= q_rows) continue;
    #pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
      store_pair(dq + (size_t)row * q_stride + head * kHeadDim + n * 8 + lane % 4 * 2,
                 sum_dq[0][n][2 * half] * softmax_scale, sum_dq[0][n][2 * half + 1] * softmax_scale);
  }
}

// ------------------------------------------------------------------------------------------------ reorder

// Moves whole rows of two buffers (k and v, or dk and dv) between rank order and sequence order in one launch: one
// warp a row, 16 bytes a lane.
//
//   kToRankOrder = false   out[rank_order[t]] = in[t]   after all-gather of k, v; rows that no local query sees, padding
//                                                       among them, become 0, as 0 * NaN would spread through a product
//   kToRankOrder = true    out[t] = in[rank_order[t]]   before reduce-scatter of dk, dv; fillers become 0
//
// rank_order (num_rows): sequence-order row of row t in rank order, -1 for fillers; pitch: 16-byte words per row.
// Launch: grid (ceil(num_rows / 8), 2), block 256. Bound by memory.
template <bool kToRankOrder>
__global__ void __launch_bounds__(256) thd_reorder(
    uint4* __restrict__ out0, const uint4* __restrict__ in0, int pitch0, uint4* __restrict__ out1,
    const uint4* __restrict__ in1, int pitch1, const int* __restrict__ rank_order,
    const int2* __restrict__ query_ranges, int num_rows) {
  const int row = blockIdx.x * 8 + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (row >= num_rows) return;
  const int other = rank_order[row], pitch = blockIdx.y ? pitch1 : pitch0;
  if (!kToRankOrder && other < 0) return;
  const bool zero = kToRankOrder ? other < 0 : is_empty(query_ranges[other]);
  const uint4* const in = (blockIdx.y ? in1 : in0) + (size_t)(kToRankOrder ? max(other, 0) : row) * pitch;
  uint4* const out = (blockIdx.y ? out1 : out0) + (size_t)(kToRankOrder ? row : other) * pitch;
  #pragma unroll 4
  for (int i = lane; i < pitch; i += kWarp) out[i] = zero ? make_uint4(0, 0, 0, 0) : in[i];
}

// ------------------------------------------------------------------------------------------------ plan

// The arrays of a plan from lengths that are already on the GPU, without a copy to the host. Each kernel computes
// what plan.py computes with NumPy; the tests compare them element by element.

// The last index i with offsets[i] <= x: the sequence that holds row x (empty sequences hold none).
__device__ __forceinline__ int sequence_of(const int* offsets, int num_seqs, int x) {
  int low = 0, high = num_seqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= x) low = middle; else high = middle;
  }
  return low;
}

// First index in ascending rows[0, n) whose value is at least x; fillers (-1) come last and count as infinite.
__device__ __forceinline__ int lower_bound(const int* rows, int n, int x) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    if ((u32)rows[middle] < (u32)x) low = middle + 1; else high = middle;
  }
  return low;
}

// rank_order (cp_size * local_rows) of the dual_chunk sharding; the rows behind the last sequence are shared out in equal
// slices. Launch: one thread an element.
__global__ void thd_plan_dual_chunk(int* __restrict__ rank_order, const int* __restrict__ cu_seqlens_padded,
                                    int num_seqs, int cp_size, int local_rows, int total_rows) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= cp_size * local_rows) return;
  const int rank = t / local_rows, i = t % local_rows, end = cu_seqlens_padded[num_seqs], owned = end / cp_size;
  int row = end + rank * (local_rows - owned) + i - owned;
  if (row >= total_rows) row = -1;
  if (i < owned) {
    const int seq = sequence_of(cu_seqlens_padded, num_seqs, i * cp_size), begin = cu_seqlens_padded[seq];
    const int chunk = (cu_seqlens_padded[seq + 1] - begin) / (2 * cp_size), p = i - begin / cp_size;
    row = begin + (p < chunk ? rank * chunk + p : (2 * cp_size - 1 - rank) * chunk + p - chunk);
  }
  rank_order[t] = row;
}

// positions, key_ranges (local_rows) of the query rows `rows`. left, right: window, -1 = unlimited; causal is right = 0.
__global__ void thd_plan_queries(int* __restrict__ positions, int2* __restrict__ key_ranges, const int* __restrict__ rows,
                                 const int* __restrict__ cu_seqlens, const int* __restrict__ cu_seqlens_padded,
                                 int num_seqs, int local_rows, int left, int right) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= local_rows) return;
  const int row = rows[t];
  int position = 0;
  int2 range = make_int2(0, 0);
  if (row >= 0 && num_seqs > 0 && row < cu_seqlens_padded[num_seqs]) {
    const int seq = sequence_of(cu_seqlens_padded, num_seqs, row), begin = cu_seqlens_padded[seq];
    const int length = cu_seqlens[seq + 1] - cu_seqlens[seq];
    position = row - begin;
    if (position < length)
      range = make_int2(begin + (left < 0 ? 0 : max(0, position - left)),
                        begin + (right < 0 ? length : min(length, position + right + 1)));
  }
  positions[t] = position;
  key_ranges[t] = range;
}

// query_ranges (key_rows): the rows of `rows` that see each key row.
__global__ void thd_plan_keys(int2* __restrict__ query_ranges, const int* __restrict__ rows,
                              const int* __restrict__ cu_seqlens, const int* __restrict__ cu_seqlens_padded,
                              int num_seqs, int local_rows, int key_rows, int left, int right) {
  const int key = blockIdx.x * blockDim.x + threadIdx.x;
  if (key >= key_rows) return;
  int2 range = make_int2(0, 0);
  if (num_seqs > 0 && key < cu_seqlens_padded[num_seqs]) {
    const int seq = sequence_of(cu_seqlens_padded, num_seqs, key), begin = cu_seqlens_padded[seq];
    const int length = cu_seqlens[seq + 1] - cu_seqlens[seq], position = key - begin;
    if (position < length) {
      range.x = lower_bound(rows, local_rows, begin + (right < 0 ? 0 : max(0, position - right)));
      range.y = lower_bound(rows, local_rows, begin + (left < 0 ? length : min(length, position + left + 1)));
      if (is_empty(range)) range = make_int2(0, 0);
    }
  }
  query_ranges[key] = range;
}

// cost (tiles): rows of the other side between the first and the last that a tile of rows sees. One warp a tile.
__global__ void thd_plan_tile_cost(int* __restrict__ cost, const int2* __restrict__ ranges, int num_rows, int tile,
                                   int num_tiles) {
  const int t = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  if (t >= num_tiles) return;
  int begin = kNone, end = 0;
  for (int i = threadIdx.x % kWarp; i < tile; i += kWarp) {
    const int2 range = range_of(ranges, t * tile + i, num_rows);
    if (!is_empty(range)) begin = min(begin, range.x), end = max(end, range.y);
  }
  begin = __reduce_min_sync(0xffffffffu, begin), end = __reduce_max_sync(0xffffffffu, end);
  if (threadIdx.x % kWarp == 0) cost[t] = max(0, end - begin);
}

// order (tiles): tiles by falling cost, equal ones in their own order. One warp a tile counts who comes first.
__global__ void thd_plan_tile_order(int* __restrict__ order, const int* __restrict__ cost, int num_tiles) {
  const int t = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  if (t >= num_tiles) return;
  const int mine = cost[t];
  int before = 0;
  for (int i = threadIdx.x % kWarp; i < num_tiles; i += kWarp) before += cost[i] > mine || (cost[i] == mine && i < t);
  before = __reduce_add_sync(0xffffffffu, before);
  if (threadIdx.x % kWarp == 0) order[before] = t;
}
