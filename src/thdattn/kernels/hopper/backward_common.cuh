// What the Hopper backwards share: steps of the scheduler and what they see, and sums of several thread blocks.

#pragma once

#include "kernels/peer/owners.cuh"
#include "kernels/hopper/common.cuh"

// ------------------------------------------------------------------------------------------------ scheduler
// What the producer tells the others of a step: first query row, query head, key tile, and flags. The flags are kLast,
// kSees and kMasked, and those below.
struct Step { int row, head, tile; u32 flags; };
constexpr u32 kFirst = 1u << 30;                      // the first step of a key tile
constexpr u32 kNothing = 1u << 29;                    // no query sees the key tile
constexpr u32 kEnd = 1u << 28;                        // there is no more work
constexpr u32 kAlone = 1u << 27;                      // no other key tile sees the query tile

// The query heads of each kv head, `group` of them, are divided into splits of `split_heads`, which different thread
// blocks compute. `splits` counts those of all kv heads. A row of q and dq has `row_heads` heads, of which these are
// computed here.
struct BackwardSize {
  int q_rows, k_rows, stats_rows, num_tiles, splits, together, last_splits, split_heads, group, num_kv_heads;
  int semaphore_rows, row_heads;
};
CHECK_BackwardSize;

// Selects the packs for which a launch runs: those with [from, to) pairs of a query and a key that see each other.
// pairs: the number, if only the GPU knows it; null: the launch runs for every pack.
struct PackFilter {
  const u64* pairs;
  u64 from, to;
  __device__ __forceinline__ bool accepts() const { return !pairs || (*pairs >= from && *pairs < to); }
};
CHECK_PackFilter;

// Draws a number of work. The first number of a thread block is drawn too, so that only running blocks hold work for
// which others may wait. The last of all draws, one beyond all work for every thread block, resets the counter to zero.
__device__ __forceinline__ int draw_work(int* counter, int num_work) {
  const int work = atomicAdd(counter, 1);
  if (work == num_work + opaque(gridDim.x) - 1) *counter = 0;
  return work;
}

// What one warp knows of the queries that see a key tile: they are among the rows [first, end), or first is kNone and
// there are none. Each lane keeps one bound of one group of 64 keys, so that a single vote compares a query tile with
// all of them.
template <int kGroups, int kTileM>
struct QuerySight {
  int first, end, bound;

  __device__ __forceinline__ QuerySight(const int2* query_ranges, int first_key, int k_rows)
      : first(kNone), end(0), bound(0) {
    const int lane = threadIdx.x % kWarp;
    #pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      int bounds[4] = {0, kNone, 0, kNone};           // end, begin of what any key sees; begin, end of what all see
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int2 r = range_of(query_ranges, first_key + group * 64 + i * kWarp + lane, k_rows);
        if (!is_empty(r)) bounds[0] = max(bounds[0], r.y), bounds[1] = min(bounds[1], r.x);
        bounds[2] = max(bounds[2], r.x), bounds[3] = min(bounds[3], r.y);  // padding counts: no lse bounds its scores
      }
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int all = i % 2 ? __reduce_min_sync(0xffffffffu, bounds[i]) : __reduce_max_sync(0xffffffffu, bounds[i]);
        if (lane == group * 4 + i) bound = all;
        if (i == 0) end = max(end, all);
        if (i == 1) first = min(first, all);
      }
    }
  }
  // Returns kSees and kMasked of every group, for the query tile from `row` on.
  __device__ __forceinline__ u32 flags(int row) const {
    const bool odd = me().lane % 2;
    const u32 votes = __ballot_sync(0xffffffffu, odd ? row + kTileM > bound : row < bound);
    u32 flags = 0;
    #pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if ((votes >> group * 4 & 3) == 3) flags |= kSees << 2 * group;
      if (votes >> group * 4 & 12) flags |= kMasked << 2 * group;
    }
    return flags;
  }
};

// The producer's scheduler, one warp. It calls take(step) for every key tile of this thread block, for every query head
// of its split, and for every query tile between the first visible one and the last. A key tile that no query sees is
// one step with kNothing. The last step of all has kEnd. One lane draws work with the last step of a tile, by
// draw_work(counter, how much there is). That is early enough for its latency, and so late that the block that finishes
// first gets it.
//
// kStaggered: with at most kFewRows query rows, key tiles begin at different query tiles, if they see at least
// kManySteps of them. Most thread blocks then work on the same few rows. In step, they would add to the same dq at the
// same time, and all wait for its first partial sum. With more rows, staggered blocks would share fewer rows in the L2
// cache.
constexpr int kFewRows = 2048, kManySteps = 8;
template <int kGroups, int kTileM, bool kStaggered = false, typename Order, typename Counter, typename Take>
__device__ __forceinline__ void schedule_steps(const int2* query_ranges, const int* num_partials, Order tile_order,
                                               Counter counter, BackwardSize size, Take take) {
  // Values that are the same for all work are not kept, as there are few registers.
  auto num_work = [&] { return opaque(size.num_tiles) * size.splits; };
  auto draw = [&] { return me().lane == 0 ? draw_work(counter, num_work()) : 0; };
  for (int work = __shfl_sync(0xffffffffu, draw(), 0); work < num_work(); ) {
    const WorkTile work_tile =
        scheduled_tile(work, tile_order, opaque(size.num_tiles), opaque(size.splits), size.together, size.last_splits);
    const QuerySight<kGroups, kTileM> sight(query_ranges, work_tile.tile * kGroups * 64, size.k_rows);
    auto first = [&] { return sight.first / kTileM * kTileM; };
    const bool nothing = sight.first == kNone;
    int begin = first(), head = work_tile.head * size.split_heads;
    if (kStaggered && !nothing && size.stats_rows <= kFewRows) {
      const int steps = (sight.end - 1) / kTileM + 1 - begin / kTileM;
      if (steps >= kManySteps) begin += work_tile.tile % steps * kTileM;
    }
    int row = begin;
    for (u32 flags = nothing ? kNothing | kLast : kFirst; ; flags = 0) {
      const bool end_of_rows = row + kTileM >= sight.end;
      const bool end_of_head = kStaggered ? (end_of_rows ? first() : row + kTileM) == begin : end_of_rows;
      if (!nothing) {
        flags |= sight.flags(row);
        if (num_partials && flags & (kSees | kSees << 2) && num_partials[row / kTileM] == 1) flags |= kAlone;
        if (end_of_head && head + 1 == (work_tile.head + 1) * size.split_heads) flags |= kLast;
      }
      if (flags & kLast) work = draw();
      take(Step{row, head, work_tile.tile, flags});
      if (flags & kLast) break;
      row = end_of_rows ? first() : row + kTileM;
      head += end_of_head;
    }
    work = __shfl_sync(0xffffffffu, work, 0);
  }
  take(Step{0, 0, 0, kEnd});
}

// Counts for each tile of query rows how many tiles of 64 * kGroups keys see it, and so how many partial sums its dq
// has. The backward needs this to know the last partial sum, and the only one. It depends on the plan alone and is
// computed once per plan. It uses the code of the backward, so that both find the same visible tiles. Bound by latency.
//
// num_partials (stats_rows / kTileM), zero at first
// Launch: a block of one warp for each key tile.
template <int kGroups, int kTileM>
__global__ void thd_attn_count_partials_sm90(int* __restrict__ num_partials, const int2* __restrict__ query_ranges,
                                             int k_rows) {
  const QuerySight<kGroups, kTileM> sight(query_ranges, blockIdx.x * kGroups * 64, k_rows);
  for (int row = sight.first / kTileM * kTileM; row < sight.end; row += kTileM)
    if (sight.flags(row) & (kSees | kSees << 2) && threadIdx.x == 0) atomicAdd(num_partials + row / kTileM, 1);
}

// ------------------------------------------------------------------------------------------------ num_partials
// Add to global memory, 16 or 8 bytes at a time.
__device__ __forceinline__ void add_quad(float* dst, float4 x) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(dst), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ __forceinline__ void add_pair(float* dst, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" :: "l"(dst), "f"(x), "f"(y) : "memory");
}
// Drops kFloats floats from the L2 cache without writing them back: a multiple of 32, aligned to 128 bytes; one warp.
template <int kFloats>
__device__ __forceinline__ void discard(float* accum) {
  #pragma unroll 1
  for (int i = threadIdx.x % kWarp * 32; i < kFloats; i += kWarp * 32)
    asm volatile("discard.global.L2 [%0], 128;" :: "l"(accum + i) : "memory");
}

// Which partial of a sum over several thread blocks this is. Each block claims the next one. The first is stored in the
// accumulator, which therefore need not be zero before. Later ones are added. The last block reads the accumulator,
// adds its own partial, and stores the result. kOnly: there is no other partial. kNone: there is nothing to write.
enum class Partial { kFirst, kMiddle, kLast, kOnly, kNone };
__device__ __forceinline__ bool is_awaited(Partial partial) {
  return partial == Partial::kFirst || partial == Partial::kMiddle;
}

// A semaphore is zero at first. It counts partials, at most 32,767: those that have arrived, and kClaimed times those
// that are claimed.
constexpr int kClaimed = 1 << 16;
__device__ __forceinline__ int state_of(const int* semaphore) {
  int state;
  asm volatile("ld.relaxed.gpu.s32 %0, [%1];" : "=r"(state) : "l"(semaphore) : "memory");
  return state;
}

// Claims one of num_partials partials with one warp, and waits until it may be written: until the first has arrived or,
// if it is the last, until all others have.
__device__ __forceinline__ Partial claim_partial(int* semaphore, int num_partials) {
  int state = __shfl_sync(0xffffffffu, threadIdx.x % kWarp == 0 ? atomicAdd(semaphore, kClaimed) : 0, 0);
  const int before = state / kClaimed;
  const bool last = before == num_partials - 1;
  while (state % kClaimed < (last ? before : before > 0)) state = __shfl_sync(0xffffffffu, state_of(semaphore), 0);
  return before == 0 ? Partial::kFirst : last ? Partial::kLast : Partial::kMiddle;
}
__device__ __forceinline__ void release_partial(int* semaphore) {
  asm volatile("red.release.gpu.add.s32 [%0], 1;" :: "l"(semaphore) : "memory");
}

// Columns of accumulators per matrix instruction. An instruction of 256 columns would take more registers than a thread
// has at launch.
template <int kDim> constexpr int kMostCols = kDim == 256 ? 128 : kDim;
template <int kCols, int kBlocks>
__device__ __forceinline__ float (&columns(float (&acc)[kBlocks][4], int first))[kCols / 8][4] {
  return *(float(*)[kCols / 8][4])&acc[first / 8];
}

// ------------------------------------------------------------------------------------------------ dk and dv
template <int kHalf, int kBlocks>
__device__ __forceinline__ void store_row(float* row, const float (&acc)[kBlocks][4], float scale, bool exists) {
  #pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    const float4 x = four_columns<kHalf>(acc, n, scale);
    if (exists) *(float4*)(row + first_of_four(n)) = x;
  }
}
template <int kHalf, int kBlocks>
__device__ __forceinline__ void add_row(float* row, const float (&acc)[kBlocks][4], float scale, bool exists) {
  #pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    const float4 x = four_columns<kHalf>(acc, n, scale);
    if (exists) add_quad(row + first_of_four(n), x);
  }
}
// Destination of a complete row: in T if it is `rounded`, else in fp32.
struct RowTarget { void* row; bool rounded; };

// Stores the sum of this row and of `others`, which other thread blocks wrote. If the destination is `others` itself,
// in fp32, it adds this row there. kMayBeWhole: the destination may be in fp32.
template <int kHalf, bool kMayBeWhole, typename T, int kBlocks>
__device__ __forceinline__ void complete_row(RowTarget target, float* others, const float (&acc)[kBlocks][4],
                                             float scale, bool exists) {
  constexpr int kLoads = kBlocks % 16 == 0 ? 8 : kBlocks % 12 == 0 ? 6 : 4;  // before the first is used
  constexpr int kAhead = kMayBeWhole && kBlocks > 16 ? 1 : kLoads;  // as registers allow
  static_assert(kBlocks % (2 * kAhead) == 0, "a row is loaded kAhead pairs of blocks at a time");
  const bool adds = kMayBeWhole && target.row == others;
  #pragma unroll
  for (int n = 0; n < kBlocks; n += 2 * kAhead) {
    float4 y[kAhead];
    #pragma unroll
    for (int i = 0; i < kAhead; ++i)
      y[i] = exists && !adds ? __ldcg((const float4*)(others + first_of_four(n + 2 * i)))
                             : make_float4(0.f, 0.f, 0.f, 0.f);
    #pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = first_of_four(n + 2 * i);
      const float4 x = four_columns<kHalf>(acc, n + 2 * i, scale);
      const float4 sum = make_float4(x.x + y[i].x, x.y + y[i].y, x.z + y[i].z, x.w + y[i].w);
      if (exists && adds) add_quad(others + at, x);
      else if (exists && kMayBeWhole && !target.rounded) *(float4*)((float*)target.row + at) = sum;
      else if (exists) *(uint2*)((T*)target.row + at) = make_uint2(pack<T>(sum.x, sum.y), pack<T>(sum.z, sum.w));
    }
  }
}

// Stores a row that has no other partial.
template <int kHalf, typename T, int kBlocks>
__device__ __forceinline__ void store_only_row(RowTarget target, const float (&acc)[kBlocks][4], float scale,
                                                bool exists) {
  const int first = first_of_four(0);
  void* const begin = target.rounded ? (void*)((T*)target.row + first) : (float*)target.row + first;
  #pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    const float4 x = four_columns<kHalf>(acc, n, scale);
    if (exists && target.rounded)
      *(uint2*)((T*)begin + 8 * n) = make_uint2(pack<T>(x.x, x.y), pack<T>(x.z, x.w));
    else if (exists)
      *(float4*)((float*)begin + 8 * n) = x;
  }
}

// Gradients of keys and values: dk (k_rows, num_kv_heads, head dim) and dv. Each head split of a kv head has a partial.
//
// dk_accum, dv_accum: fp32 accumulators, which are dk and dv themselves if those are fp32
// semaphores (2, semaphore_rows, num_kv_heads): one for every 16 rows
// places (k_rows), or null: if Grad is fp32, a row with a place other than -1 goes there in dk_rounded and dv_rounded
// instead, in 16 bits
// owners: if Grad is fp32, complete rows may go to other ranks instead, and the accumulators are separate
template <typename Grad>
struct Gradients {
  Grad *dk, *dv;
  float *dk_accum, *dv_accum;
  int* semaphores;
  void *dk_rounded, *dv_rounded;
  const int* places;
  Owners owners;

  // Claims this warp's partial of the 16 rows from `row` on. `second` is 1 for dv alone, if other warps write dk. A
  // warp with a claim waits for nothing else, so no cycle of waits can form.
  __device__ __forceinline__ Partial claim(int row, int kv_head, int second, BackwardSize size) const {
    if (size.split_heads == size.group) return Partial::kOnly;
    const Partial partial = claim_partial(semaphore(row, kv_head, second, size), size.group / size.split_heads);
    if (partial != Partial::kFirst) __threadfence();
    return partial;
  }
  __device__ __forceinline__ void release(int row, int kv_head, int second, Partial partial, BackwardSize size) const {
    __syncwarp();
    if (is_awaited(partial) && threadIdx.x % kWarp == 0) release_partial(semaphore(row, kv_head, second, size));
  }
  // Writes a partial of dk, or (kWhich = 1) of dv.
  template <typename T, int kWhich, int kBlocks>
  __device__ __forceinline__ void write_partial(const float (&acc)[kBlocks][4], float scale, Partial partial, int row,
                                                int kv_head, BackwardSize size) const {
    write_row<T, kWhich, 0>(acc, scale, partial, row + me().lane / 4, kv_head, size);
    write_row<T, kWhich, 1>(acc, scale, partial, row + me().lane / 4 + 8, kv_head, size);
  }

  // The epilogue of a warp for 16 rows of one kv head, `at` = (first row, kv head): dk and dv, or one of them.
  template <typename T, int kKBlocks, int kVBlocks>
  __device__ __forceinline__ void finish(int2 at, const float (&acc_dk)[kKBlocks][4], float scale,
                                         const float (&acc_dv)[kVBlocks][4], BackwardSize size) const {
    const Partial partial = claim(at.x, at.y, 0, size);
    write_partial<T, 0>(acc_dk, scale, partial, at.x, at.y, size);
    write_partial<T, 1>(acc_dv, 1.f, partial, at.x, at.y, size);
    release(at.x, at.y, 0, partial, size);
  }
  template <typename T, int kWhich, int kBlocks>
  __device__ __forceinline__ void finish_one(int2 at, const float (&acc)[kBlocks][4], float scale,
                                             BackwardSize size) const {
    const Partial partial = claim(at.x, at.y, kWhich, size);
    write_partial<T, kWhich>(acc, scale, partial, at.x, at.y, size);
    release(at.x, at.y, kWhich, partial, size);
  }

 private:
  // Writes one (kHalf) of the two rows that this thread shares with its quad.
  template <typename T, int kWhich, int kHalf, int kBlocks>
  __device__ __forceinline__ void write_row(const float (&acc)[kBlocks][4], float scale, Partial partial, int row,
                                            int kv_head, BackwardSize size) const {
    const u32 pitch = opaque(size.num_kv_heads) * 8 * kBlocks, head = kv_head * 8 * kBlocks;
    const size_t at = (size_t)row * pitch + head;
    Grad* const grad = (kWhich ? dv : dk) + at;
    float* const accum = (kWhich ? dv_accum : dk_accum) + at;
    const bool exists = row < size.k_rows;
    if (partial == Partial::kFirst) {
      store_row<kHalf>(accum, acc, scale, exists);
    } else if (partial == Partial::kMiddle) {
      add_row<kHalf>(accum, acc, scale, exists);
    } else if constexpr (sizeof(Grad) == 2) {
      if (partial == Partial::kOnly) store_row<kHalf>(grad, acc, scale, exists);
      else complete_row<kHalf, false, T>(RowTarget{grad, true}, accum, acc, scale, exists);
    } else {
      const RowTarget target = exists ? target_of<T>(kWhich, row, grad, pitch, head) : RowTarget{};
      if (partial == Partial::kOnly) store_only_row<kHalf, T>(target, acc, scale, target.row);
      else complete_row<kHalf, true, T>(target, accum, acc, scale, target.row);
    }
  }
  // Returns the destination of a row that is at `grad` by default; null: nowhere.
  template <typename T>
  __device__ __forceinline__ RowTarget target_of(int which, int row, Grad* grad, u32 pitch, u32 head) const {
    if (owners.places) {
      float* const owned = owners.row_of(which, row, pitch);
      return {owned ? owned + head : nullptr, false};
    }
    const int place = places ? places[row] : -1;
    if (place < 0) return {grad, false};
    return {(T*)(which ? dv_rounded : dk_rounded) + (size_t)place * pitch + head, true};
  }
  __device__ __forceinline__ int* semaphore(int row, int kv_head, int second, BackwardSize size) const {
    return semaphores + (row / 16 + second * size.semaphore_rows) * size.num_kv_heads + kv_head;
  }
};
CHECK_Gradients;

// ------------------------------------------------------------------------------------------------ dq
// dq has one partial for every key tile that sees the query tile. A single one is stored; several add up in dq_accum.
// dq_accum, fp32, is a sequence of panels of 64 query rows by some columns. A panel is stored as a warpgroup holds it
// in registers, float4 n of every thread after float4 n - 1 of all threads, so that one bulk copy moves it.

// acc = dS k with one warpgroup: 64 queries, which are columns of ds, by the columns from first_col on of kKeys keys.
template <typename T, int kKeys, int kHeadDim, int kBlocks>
__device__ __forceinline__ void multiply_keys(float (&acc)[kBlocks][4], const unsigned char* ds, const unsigned char* k,
                                              int first_col) {
  constexpr int kCols = kSlabOf<kHeadDim>, kKeyBytes = kRowBytesOf<kHeadDim>;
  const unsigned char* const columns = k + first_col / kCols * kKeys * kKeyBytes + first_col % kCols * 2;
  const u64 a = descriptor(ds, 16), b = descriptor<kHeadDim>(columns, kKeys * kKeyBytes);
  wgmma_begin();
  #pragma unroll
  for (int n = 0; n < kKeys; n += 16)
    Wgmma<T, 8 * kBlocks>::template shared<1, 1>(acc, a + n * kRowBytes / 16, b + n * kKeyBytes / 16, n > 0);
  wgmma_commit();
  wgmma_wait<0>(acc);
}

// Stores a panel of dq (q_rows, num_heads, kHeadDim), or adds it if dq is fp32, with one warpgroup: 64 rows from `row`
// on, columns from first_col on.
template <int kHeadDim, typename Dq, int kBlocks>
__device__ __forceinline__ void write_dq(Dq* dq, const float (&acc)[kBlocks][4], float scale, int row, int head,
                                         int first_col, BackwardSize size) {
  row += me().warp * 16 + me().lane / 4;
  const int pitch = size.row_heads * kHeadDim;
  Dq* const out = dq + (size_t)row * pitch + head * kHeadDim + first_col;
  if constexpr (sizeof(Dq) == sizeof(float)) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {            // in pairs, as the query side has few registers
      if (row + 8 * half >= size.q_rows) continue;
      float* const pair = out + half * 8 * pitch + me().lane % 4 * 2;
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n) add_pair(pair + n * 8, acc[n][2 * half] * scale, acc[n][2 * half + 1] * scale);
    }
  } else {
    store_row<0>(out, acc, scale, row < size.q_rows);
    store_row<1>(out + 8 * pitch, acc, scale, row + 8 < size.q_rows);
  }
}

// Initialises a warp's accumulators of scores, keys by queries, with -lse of the queries, so that no arithmetic after
// the products waits for loads. If logits are no multiples of scores, they begin at 0.
template <bool kCaps, int kBlocks>
__device__ __forceinline__ void begin_scores(float (&p)[kBlocks][4], const float* minus_lse) {
  if constexpr (!kCaps) {
    begin_columns(p, minus_lse);
  } else {
    #pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) p[i / 4][i % 4] = 0.f;
    pin(p);
  }
}

// Turns scores that began so into probabilities.
template <int kBlocks>
__device__ __forceinline__ void take_exponentials(float (&p)[kBlocks][4], Logits<false> logits, const float*) {
  #pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) p[i / 4][i % 4] = exp2_fast(logits.exact(p[i / 4][i % 4]));
}
template <int kBlocks>
__device__ __forceinline__ void take_exponentials(float (&p)[kBlocks][4], Logits<true> logits,
                                                  const float* minus_lse) {
  logits.go(logits.way_for(distance(p), false), [&](auto logit, auto) {
    pin(p);                                           // keeps the compiler from hoisting code out of the branches
    const float2* const mine = (const float2*)minus_lse + threadIdx.x % 4;
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float2 x = mine[n * 4];
      #pragma unroll
      for (int e = 0; e < 4; ++e) p[n][e] = exp2_fast(logit(p[n][e]) + (e % 2 ? x.y : x.x));
    }
  });
}

// Turns scores, -inf for hidden keys, into the operand of probabilities (`rounded`). p becomes the probabilities times
// the slopes of their logits.
template <typename T, int kBlocks>
__device__ __forceinline__ void take_weights(float (&p)[kBlocks][4], u32 (&rounded)[kBlocks / 2][4],
                                             Logits<true> logits, int way, const float* minus_lse) {
  logits.go(way, [&](auto logit, auto slope) {
    pin(p);                                           // keeps the compiler from hoisting code out of the branches
    const float2* const mine = (const float2*)minus_lse + threadIdx.x % 4;
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float2 x = mine[n * 4];
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const pair = p[n] + 2 * half;
        const float a = logit(pair[0]), b = logit(pair[1]), p_a = exp2_fast(a + x.x), p_b = exp2_fast(b + x.y);
        rounded[n / 2][n % 2 * 2 + half] = pack<T>(p_a, p_b);
        pair[0] = p_a * slope(pair[0], a), pair[1] = p_b * slope(pair[1], b);
      }
    }
  });
}

// Sets the probabilities, or scores, of keys that a query does not see to `hidden`. ranges: those of the warp's keys.
template <int kBlocks>
__device__ __forceinline__ void hide_keys(float (&p)[kBlocks][4], const int2* ranges, int first_query,
                                          float hidden = 0.f) {
  const int lane = me().lane;
  const int2 range[2] = {ranges[lane / 4], ranges[lane / 4 + 8]};
  #pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i)
    if (!contains(range[i % 4 / 2], first_query + i / 4 * 8 + lane % 4 * 2 + i % 2)) p[i / 4][i % 4] = hidden;
}
