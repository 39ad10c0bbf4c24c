// The work of a thread block on the gradients of the Mamba-2 recurrence of one chunk of rows.

#pragma once

#include "kernels/mamba/backward_common.cuh"

template <typename T, int kHeadDim, int kStateDim, int kSlice>
struct ChunkShared {
  T b[kChunk * (kStateDim + kPad)], c[kChunk * (kStateDim + kPad)];  // columns as place_of says
  T x[kChunk * (kHeadDim + kPad)], dy[kChunk * (kHeadDim + kPad)];
  T s[kHeadDim * (kSlice + kPad)], r[kHeadDim * (kSlice + kPad)];
  T weights[kChunk * (kChunk + kPad)];                // decays and dt times C B^T, or the gradient of C B^T
  float4 products[20][kWarp];                         // C B^T: each lane's numbers of the 16x8 blocks with pairs
  float sums[2][kChunk], dt[2][kChunk];               // of this head and of the one before, or next
  int first[kChunk];
  // Contributions to the decays, from some warps each. Pairs: sums over columns, over rows, and the diagonal. States:
  // the one before and the one behind.
  float over_columns[2][kChunk], over_rows[4][kChunk], alone[kChunk], of_front[2][kChunk], of_behind[2][kChunk];
  float across[8];
  int largest[kChunk];                                // see ScaledSequences
};

// The work of a thread block of 8 warps. Warp w has the rows 16 * (w % 4) and later of the chunk, and half w / 4 of the
// result's columns: of the state's for dB and dC, of the head's for dx, and every second 16 of those of the pairs.
//
// K = dy x^T, M = decays of pairs (0 where a pair does not count), Gamma = C B^T. All are per head but Gamma.
//   dGamma = M K dt                     of all heads, summed before the products with B and C
//   du = (Gamma M)^T dy + leave (B R^T)
//   dB = dGamma^T C + leave dt (x R)    dC = dGamma B + enter (dy S)
template <typename T, int kHeadDim, int kStateDim, int kSlice>
struct ChunkBackward {
  static constexpr int kXPitch = kHeadDim + kPad, kBPitch = kStateDim + kPad, kSPitch = kSlice + kPad;
  static constexpr int kPairPitch = kChunk + kPad, kSlices = kStateDim / kSlice;
  static constexpr int kWalkSlice = kStateDim < 128 ? kStateDim : 128;  // columns of a state with one scale
  static constexpr int kUBlocks = kHeadDim / 16, kSBlocks = kSlice / 16;  // blocks of a warp
  using Shared = ChunkShared<T, kHeadDim, kStateDim, kSlice>;

  Shared& shared;
  const MixerSize& size;
  const int chunk, warp, lane, tile, half, row;       // row: the lane's first, the second is 8 further on
  const float *sums, *dt;
  const ScaledSequences<T> sequences;
  const float* scales;                                // of S and, state_scales further on, R of this head, by slice
  int state_scales;
  float db[kSlices][kSBlocks][4] = {}, dc[kSlices][kSBlocks][4] = {}, dproducts[2][2][4] = {};
  float du[kUBlocks][4];

  __device__ __forceinline__ ChunkBackward(Shared& shared, int chunk, const MixerSize& size)
      : shared(shared), size(size), chunk(chunk), warp(threadIdx.x / kWarp), lane(threadIdx.x % kWarp),
        tile(warp % 4), half(warp / 4), row(tile * 16 + lane / 4), sums(nullptr), dt(nullptr),
        sequences{shared.largest, shared.first}, scales(nullptr), state_scales(0) {}

  // ---------------------------------------------------------------------------------------------- once

  // Stores B or C of the chunk, with permuted columns.
  __device__ __forceinline__ void place(T* to, const T* from) {
    for (int i = threadIdx.x; i < kChunk * kStateDim / 8; i += 256) {
      const int r = i / (kStateDim / 8), column = i % (kStateDim / 8) * 8, source = chunk * kChunk + r;
      uint4 words = make_uint4(0, 0, 0, 0);
      if (source < size.rows) words = *(const uint4*)(from + (size_t)source * size.channels() + column);
      T* const at = to + r * kBPitch + place_of(column);
      *(u32*)at = words.x, *(u32*)(at + 8) = words.y, *(u32*)(at + 16) = words.z, *(u32*)(at + 24) = words.w;
    }
  }

  __device__ __forceinline__ void begin(const T* b, const T* c, const int2* ranges) {
    place(shared.b, b);
    place(shared.c, c);
    if (threadIdx.x < kChunk) {
      const int at = chunk * kChunk + threadIdx.x;
      shared.first[threadIdx.x] = first_of(range_at(ranges, at, size), at, size) - chunk * kChunk;
      shared.largest[threadIdx.x] = 0;
      #pragma unroll
      for (int i = 0; i < 4; ++i) shared.over_rows[i][threadIdx.x] = 0.f;
    }
    __syncthreads();
    #pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (columns_of(t) > tile * 16) continue;
      float gamma[2][4] = {};
      #pragma unroll
      for (int k = 0; k < kStateDim; k += 16) add_rows<kBPitch, kBPitch>(gamma, shared.c + tile * 16 * kBPitch + k,
                                                                        shared.b + columns_of(t) * kBPitch + k);
      #pragma unroll
      for (int n = 0; n < 2; ++n) *product_of(t, n) = *(const float4*)gamma[n];
    }
  }

  // ---------------------------------------------------------------------------------------------- pairs

  __device__ __forceinline__ int columns_of(int t) const { return (2 * t + half) * 16; }
  __device__ __forceinline__ float4* product_of(int t, int n) const {
    return &shared.products[tile * (tile + 1) + columns_of(t) / 8 + n][lane];
  }

  template <int kPitchA, int kPitchB>
  __device__ __forceinline__ void add_rows(float (&sum)[2][4], const T* a, const T* b) const {
    u32 fa[4], fb[4];
    operand_of_rows<kPitchA>(fa, a);
    other_rows<kPitchB>(fb, b);
    mma<T>(sum[0], fa, fb[0], fb[1]);
    mma<T>(sum[1], fa, fb[2], fb[3]);
  }

  // Computes the decays of pairs: dGamma, Gamma M for du, and their contributions to the decays inside the chunk.
  __device__ __forceinline__ void pairs() {
    float of_row[2] = {0.f, 0.f};
    #pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (columns_of(t) > tile * 16) continue;
      float k[2][4] = {};
      #pragma unroll
      for (int p = 0; p < kHeadDim; p += 16)
        add_rows<kXPitch, kXPitch>(k, shared.dy + tile * 16 * kXPitch + p, shared.x + columns_of(t) * kXPitch + p);
      if (shared.first[kChunk - 1] <= 0 && columns_of(t) < tile * 16) weigh<false>(k, t, of_row);
      else weigh<true>(k, t, of_row);
    }
    tell(shared.over_columns[half], of_row[0], of_row[1]);
  }

  // Weighs K of 16 by 16 pairs. kMasked: some of them may not count.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(const float (&k)[2][4], int t, float (&of_row)[2]) {
    float of_column[2][2] = {};
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = columns_of(t) + n * 8 + lane % 4 * 2;
      const float2 to = *(const float2*)(sums + column), dts = *(const float2*)(dt + column);
      const float4 products = *product_of(t, n);
      const float gamma[4] = {products.x, products.y, products.z, products.w};
      float weight[4];
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = row + e / 2 * 8, j = column + e % 2;
        const bool counts = !kMasked || (shared.first[i] <= j && j <= i);
        const float decay = decay_of(sums[i] - (e % 2 ? to.y : to.x)), made = decay * k[n][e];
        const float step = e % 2 ? dts.y : dts.x;
        weight[e] = counts ? step * decay * gamma[e] : 0.f;
        dproducts[t][n][e] += counts ? step * made : 0.f;
        const float passes = counts ? made * gamma[e] : 0.f;
        if (kMasked && i == j) shared.alone[i] = passes;
        if (!kMasked || i != j) {
          of_row[e / 2] = fmaf(step, passes, of_row[e / 2]);
          of_column[n][e % 2] += passes;
        }
      }
      T* const at = shared.weights + row * kPairPitch + column;
      store_pair(at, weight[0], weight[1]);
      store_pair(at + 8 * kPairPitch, weight[2], weight[3]);
    }
    tell_columns(of_column, columns_of(t));
  }

  // Sums 16 columns over the rows of the warp. A lane has its rows' partial of four columns.
  __device__ __forceinline__ void tell_columns(const float (&partial)[2][2], int begin) {
    const int n = lane / 16, e = lane / 8 % 2;
    float kept[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      kept[i] = (n ? partial[1][i] : partial[0][i]) +
                __shfl_xor_sync(0xffffffffu, n ? partial[0][i] : partial[1][i], 16);
    float sum = (e ? kept[1] : kept[0]) + __shfl_xor_sync(0xffffffffu, e ? kept[0] : kept[1], 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 4);
    if (lane / 4 % 2 == 0) shared.over_rows[tile][begin + n * 8 + lane % 4 * 2 + e] = sum;
  }

  // Sums a number of each of the lane's rows over the four lanes that share them.
  __device__ __forceinline__ void tell(float* to, float one, float other) {
    one = quad_sum(one);
    other = quad_sum(other);
    if (lane % 4 == 0) to[row] = one, to[row + 8] = other;
  }

  // ---------------------------------------------------------------------------------------------- states

  // enter: the decay of the state before the chunk until a row. leave: the decay from a row until the end of the chunk.
  __device__ __forceinline__ float enter(int r) const { return shared.first[r] < 0 ? decay_of(sums[r]) : 0.f; }
  __device__ __forceinline__ float leave(int r) const {
    return r >= shared.first[kChunk - 1] ? decay_of(sums[kChunk - 1] - sums[r]) : 0.f;
  }
  __device__ __forceinline__ float through() const {
    return shared.first[kChunk - 1] < 0 ? decay_of(sums[kChunk - 1]) : 0.f;
  }

  __device__ __forceinline__ void scale_du(float factor) {
    #pragma unroll
    for (int n = 0; n < kUBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) du[n][e] *= factor;
  }
  __device__ __forceinline__ void clear_du() {
    #pragma unroll
    for (int n = 0; n < kUBlocks; ++n)
      #pragma unroll
      for (int e = 0; e < 4; ++e) du[n][e] = 0.f;
  }

  // Returns what S (R if `behind`) of a slice was divided by.
  __device__ __forceinline__ float scale_of_state(int slice, bool behind) const {
    return kScalesStates<T> ? scales[slice * kSlice / kWalkSlice + (behind ? state_scales : 0)] : 1.f;
  }

  // du += B R^T over the columns of a slice, in units of its scale.
  __device__ __forceinline__ void add_behind(int slice) {
    if (slice == 0) clear_du();
    else if (kScalesStates<T>) scale_du(scale_of_state(slice - 1, true) / scale_of_state(slice, true));
    #pragma unroll
    for (int k = 0; k < kSlice; k += 16) {
      u32 a[4];
      operand_of_rows<kBPitch>(a, shared.b + tile * 16 * kBPitch + slice * kSlice + k);
      #pragma unroll
      for (int n = 0; n < kUBlocks; n += 2) {
        u32 b[4];
        other_rows<kSPitch>(b, shared.r + (half * kHeadDim / 2 + n * 8) * kSPitch + k);
        mma<T>(du[n], a, b[0], b[1]);
        mma<T>(du[n + 1], a, b[2], b[3]);
      }
    }
  }

  // sum += factor (rows state) for rows x or dy, two blocks of columns at a time. seen(n, made) gets the product
  // without the factor.
  template <typename Seen>
  __device__ __forceinline__ void add_state(float (&sum)[kSBlocks][4], const T* rows, const T* state,
                                            const float (&factor)[2], Seen seen) {
    u32 a[kHeadDim / 16][4];
    #pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) operand_of_rows<kXPitch>(a[k], rows + tile * 16 * kXPitch + k * 16);
    #pragma unroll
    for (int n = 0; n < kSBlocks; n += 2) {
      float made[2][4] = {};
      #pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        u32 b[4];
        other_columns<kSPitch>(b, state + k * 16 * kSPitch + half * kSlice / 2 + n * 8);
        mma<T>(made[0], a[k], b[0], b[1]);
        mma<T>(made[1], a[k], b[2], b[3]);
      }
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int e = 0; e < 4; ++e)                   // a factor of 0 excludes the state, whatever it is
          if (factor[e / 2] != 0.f) sum[n + m][e] = fmaf(factor[e / 2], made[m][e], sum[n + m][e]);
        seen(n + m, made[m]);
      }
    }
  }

  // Computes <R, S> over the columns of a slice, this lane's partial: the diagonal of S R^T.
  __device__ __forceinline__ float dot() const {
    float sum = 0.f;
    #pragma unroll
    for (int rows = 0; rows < kHeadDim; rows += 64) {
      const int from = (rows + tile * 16) * kSPitch + half * kSlice / 2;
      float product[2][4] = {};
      #pragma unroll
      for (int k = 0; k < kSlice / 2; k += 16)
        add_rows<kSPitch, kSPitch>(product, shared.s + from + k, shared.r + from + k);
      if (lane / 8 == lane % 4)
        sum += lane / 4 % 2 ? product[0][1] + product[1][3] : product[0][0] + product[1][2];
    }
    return sum;
  }

  // Adds the contributions of the states before and behind, for one slice of their columns. Returns the slice's partial
  // of <R, S>, and adds what the state before contributes to the decays at each of the lane's rows.
  __device__ __forceinline__ float states(int slice, float (&of_front)[2]) {
    const float of_s = scale_of_state(slice, false), of_r = scale_of_state(slice, true);
    const float behind[2] = {of_r * leave(row) * dt[row], of_r * leave(row + 8) * dt[row + 8]};
    add_state(db[slice], shared.x, shared.r, behind, [](int, const float (&)[4]) {});
    const float front[2] = {of_s * enter(row), of_s * enter(row + 8)};
    const T* const c = shared.c + row * kBPitch + slice * kSlice + half * kSlice / 2 + lane % 4 * 2;
    float seen[2] = {0.f, 0.f};
    add_state(dc[slice], shared.dy, shared.s, front, [&](int n, const float (&made)[4]) {
      const float2 one = unpack<T>(*(const u32*)(c + n * 8)), other = unpack<T>(*(const u32*)(c + n * 8 + 8 * kBPitch));
      seen[0] += made[0] * one.x + made[1] * one.y;
      seen[1] += made[2] * other.x + made[3] * other.y;
    });
    #pragma unroll
    for (int h = 0; h < 2; ++h)
      if (front[h] != 0.f) of_front[h] += front[h] * seen[h];
    add_behind(slice);
    return through() == 0.f ? 0.f : of_s * of_r * dot();
  }

  // ---------------------------------------------------------------------------------------------- rows

  // Computes dx = dt du and the term through D, to which the pairs are still added. It also computes the state behind's
  // contribution to du of each row.
  __device__ __forceinline__ void finish(T* dx, float d) {
    const int columns = half * kHeadDim / 2 + lane % 4 * 2;
    const float of_r = scale_of_state(kSlices - 1, true), last[2] = {of_r * leave(row), of_r * leave(row + 8)};
    float behind[2] = {0.f, 0.f};
    #pragma unroll
    for (int n = 0; n < kUBlocks; ++n)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 x = unpack<T>(*(const u32*)(shared.x + (row + 8 * h) * kXPitch + columns + n * 8));
        float &one = du[n][2 * h], &other = du[n][2 * h + 1];
        one = last[h] == 0.f ? 0.f : last[h] * one;
        other = last[h] == 0.f ? 0.f : last[h] * other;
        behind[h] += one * x.x + other * x.y;
        one *= dt[row + 8 * h], other *= dt[row + 8 * h];
      }
    tell(shared.of_behind[half], behind[0], behind[1]);
    add_pairs();
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (chunk * kChunk + row + 8 * h >= size.rows) continue;
      T* const to = dx + (size_t)(row + 8 * h) * size.inner() + columns;
      #pragma unroll
      for (int n = 0; n < kUBlocks; ++n) {
        const float2 dy = unpack<T>(*(const u32*)(shared.dy + (row + 8 * h) * kXPitch + columns + n * 8));
        store_pair(to + n * 8, fmaf(d, dy.x, du[n][2 * h]), fmaf(d, dy.y, du[n][2 * h + 1]));
      }
    }
  }

  // dt du += (Gamma M dt)^T dy, over the rows from the warp's on.
  __device__ __forceinline__ void add_pairs() {
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k < tile) continue;
      u32 a[4];
      operand_of_columns<kPairPitch>(a, shared.weights + k * 16 * kPairPitch + tile * 16);
      #pragma unroll
      for (int n = 0; n < kUBlocks; n += 2) {
        u32 b[4];
        other_columns<kXPitch>(b, shared.dy + k * 16 * kXPitch + half * kHeadDim / 2 + n * 8);
        mma<T>(du[n], a, b[0], b[1]);
        mma<T>(du[n + 1], a, b[2], b[3]);
      }
    }
  }

  // Computes, with one warp, ddt and the chunk's partial of the gradient of A.
  __device__ __forceinline__ void rows(float* ddt, float rate, float* partial_rate) const {
    TwoRows two;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 2 * lane + i;
      const float behind = shared.of_behind[0][r] + shared.of_behind[1][r];
      float later = shared.over_rows[0][r];
      #pragma unroll
      for (int w = 1; w < 4; ++w) later += shared.over_rows[w][r];
      two.ends[i] = (shared.over_columns[0][r] + shared.over_columns[1][r]) - dt[r] * later
                    + (shared.of_front[0][r] + shared.of_front[1][r]);
      two.begins[i] = dt[r] * behind;
      two.alone[i] = later + shared.alone[r] + behind;
    }
    float across = 0.f;
    #pragma unroll
    for (int w = 0; w < 8; ++w) across += shared.across[w];
    const float left = through();
    two.finish(shared.first, dt, left == 0.f ? 0.f : left * across, rate, ddt, partial_rate);
  }

  // ---------------------------------------------------------------------------------------------- the end

  // dB += dGamma^T C and dC += dGamma B, once no warp reads shared data any more.
  __device__ __forceinline__ void add_products() {
    sequences.tell(dproducts, row);
    if constexpr (kScalesStates<T>) __syncthreads();
    sequences.scale(dproducts, row);
    sequences.scale(db, row);
    sequences.scale(dc, row);
    #pragma unroll
    for (int t = 0; t < 2; ++t)
      if (columns_of(t) <= tile * 16)
        #pragma unroll
        for (int n = 0; n < 2; ++n) {
          T* const to = shared.weights + row * kPairPitch + columns_of(t) + n * 8 + lane % 4 * 2;
          const float (&made)[4] = dproducts[t][n];
          store_pair(to, made[0], made[1]);
          store_pair(to + 8 * kPairPitch, made[2], made[3]);
        }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      u32 a[4];
      if (k >= tile) {
        operand_of_columns<kPairPitch>(a, shared.weights + k * 16 * kPairPitch + tile * 16);
        add_products_of(db, a, shared.c + k * 16 * kBPitch);
      }
      if (k <= tile) {
        operand_of_rows<kPairPitch>(a, shared.weights + tile * 16 * kPairPitch + k * 16);
        add_products_of(dc, a, shared.b + k * 16 * kBPitch);
      }
    }
  }
  __device__ __forceinline__ void add_products_of(float (&sum)[kSlices][kSBlocks][4], const u32 (&a)[4],
                                                  const T* other) {
    #pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
      #pragma unroll
      for (int n = 0; n < kSBlocks; n += 2) {
        u32 b[4];
        other_columns<kBPitch>(b, other + slice * kSlice + half * kSlice / 2 + n * 8);
        mma<T>(sum[slice][n], a, b[0], b[1]);
        mma<T>(sum[slice][n + 1], a, b[2], b[3]);
      }
  }

  // Stores dB or dC. Each lane has 8 neighbouring columns in its accumulators.
  __device__ __forceinline__ void store(float* to, size_t pitch, const float (&sum)[kSlices][kSBlocks][4]) const {
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (chunk * kChunk + row + 8 * h >= size.rows) continue;
      const float scale = sequences.scale(row + 8 * h).inverse;
      #pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
        #pragma unroll
        for (int n = 0; n < kSBlocks; n += 2) {
          const int place = slice * kSlice + half * kSlice / 2 + n * 8;  // of 16; half of a lane's 8 columns
          float* const at = to + (row + 8 * h) * pitch + place / 32 * 32 + lane % 4 * 8 + place % 32 / 4;
          *(float4*)at = make_float4(scale * sum[slice][n][2 * h], scale * sum[slice][n][2 * h + 1],
                                     scale * sum[slice][n + 1][2 * h], scale * sum[slice][n + 1][2 * h + 1]);
        }
    }
  }
};
