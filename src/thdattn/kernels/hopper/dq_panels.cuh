// dq of the two Hopper backwards with 128 keys per thread block (sm_90a): its panels, and the warps that add its
// partials.

#pragma once

#include "kernels/hopper/backward_common.cuh"
#include "kernels/hopper/trees.cuh"

// Tests whether a step has a partial of a dq that has others too.
__device__ __forceinline__ bool has_partial(u32 flags) { return flags & (kSees | kSees << 2) && !(flags & kAlone); }

// A claim of a partial of the dq of a query tile.
//
// semaphore: the index of one of (num_heads, stats_rows / 64) semaphores, zero at first, or kNoMore for the end. A
// semaphore counts as in claim_partial. With kDeterministic it is 1 + the key tile that may write its partial now, and
// `after` is its next value.
struct Claim { int semaphore, after; Partial partial; };
constexpr int kNoMore = -1;

__device__ __forceinline__ u32 semaphore_of(int head, int row, BackwardSize size) {
  return head * (size.stats_rows / 64) + row / 64;
}

// Number of panels of a query tile, and where a panel begins in dq_accum.
template <typename Shared> constexpr int kAllPanels = Shared::kTileM / 64 * Shared::kPanels;
template <typename Shared> __device__ __forceinline__ size_t accum_at(Claim claim, int panel) {
  return (size_t)claim.semaphore * 64 * Shared::kHeadDim + panel * Shared::kPanelFloats;
}

// Writes a panel of dq with one warpgroup: to the buffer that a warp sends or, if nothing more is to be added, to dq.
//
// racecheck does not see that dq_open orders the copy of the others' sum and the claim before this, and that dq_full
// and then dq_empty order this before the next use. claim_full and claim_empty do so for claims.
template <typename Shared, typename Dq, int kBlocks>
__device__ __forceinline__ void write_panel(Shared& shared, Dq* dq, float (&acc)[kBlocks][4], const Step& step,
                                            Ring<Shared::kDqStages>& panels, int row, int first_col,
                                            BackwardSize size, float softmax_scale) {
  bool complete = step.flags & kAlone;
  if (has_partial(step.flags)) {
    float4* const staging = (float4*)shared.dq[panels.stage] + threadIdx.x % 128;
    barrier_wait(&shared.dq_open[panels.stage], panels.parity);
    const Partial partial = shared.partial[panels.stage];
    complete = partial == Partial::kLast || partial == Partial::kOnly;
    #pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      if (!complete) staging[n * 128] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
      if (partial != Partial::kLast) continue;
      const float4 others = staging[n * 128];
      acc[n][0] += others.x, acc[n][1] += others.y, acc[n][2] += others.z, acc[n][3] += others.w;
    }
    publish_to_async();
    __syncwarp();
    if (me().lane == 0) barrier_arrive(&shared.dq_full[panels.stage]);
    panels.advance();
  }
  if (complete) write_dq<Shared::kHeadDim>(dq, acc, softmax_scale, row, step.head, first_col, size);
}

// The query side, one warpgroup: dq = dS k, panel by panel.
template <typename T, typename Shared, typename Dq>
__device__ __forceinline__ void run_dq_warpgroup(Shared& shared, Dq* dq, BackwardSize size, float softmax_scale) {
  constexpr int kTileN = Shared::kTileN, kCols = Shared::kPanelCols;
  constexpr int kPanels = Shared::kPanels, kAll = kAllPanels<Shared>;
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  Ring<Shared::kStages> ring = {0, 0};
  Ring<Shared::kDqStages> panels = {0, 0};

  for (Step step = {}; !(step.flags & kEnd); ring.advance()) {
    barrier_wait(&shared.ds_full[ring.stage], ring.parity);
    step = shared.step[ring.double_stage()];          // read during the first products; kNothing wastes them
    #pragma unroll 1
    for (int panel = 0; panel < kAll; ++panel) {
      const int m = panel / kPanels, first_col = panel % kPanels * kCols;
      float acc[kCols / 8][4];
      const unsigned char* const ds = shared.ds[ring.stage] + m * kTileN * kRowBytes;
      multiply_keys<T, kTileN, Shared::kHeadDim>(acc, ds, shared.k, first_col);
      const bool nothing = step.flags & (kNothing | kEnd);
      if (nothing || panel == kAll - 1) arrive(&shared.ds_empty[ring.stage]);
      if (nothing) break;
      if (step.flags & kLast && panel == kAll - 1) arrive(&shared.kv_empty);
      write_panel(shared, dq, acc, step, panels, step.row + m * 64, first_col, size, softmax_scale);
    }
  }
}

// Orders this thread's asynchronous copies after the partials that a claim found at its semaphore. Other thread blocks
// wrote them by asynchronous copies, and signalled by a release.
__device__ __forceinline__ void acquire_partials(const int* semaphore) {
  asm volatile("{ .reg .s32 state;\n"
               "ld.acquire.gpu.s32 state, [%0];\n"
               "fence.proxy.async.global; }" :: "l"(semaphore) : "memory");
}

// Announces claim number `claims` to the warps that send and release, and opens its panels. A single thread does this:
// it lets barriers proceed to their next phases, and a lane that came later would wait forever.
template <typename Shared>
__device__ __forceinline__ void open_claim(Shared& shared, const float* dq_accum, const int* semaphores, Claim claim,
                                           u32 claims) {
  constexpr int kFloats = Shared::kPanelFloats, kDqStages = Shared::kDqStages;
  barrier_wait(&shared.claim_empty[claims % 2], claims / 2 % 2 ^ 1);
  shared.claim[claims % 2] = claim;
  barrier_arrive(&shared.claim_full[claims % 2]);
  if (claim.semaphore == kNoMore) return;
  if (claim.partial == Partial::kLast) acquire_partials(semaphores + claim.semaphore);
  #pragma unroll 1
  for (int panel = 0; panel < kAllPanels<Shared>; ++panel) {
    const u32 before = claims * kAllPanels<Shared> + panel, stage = before % kDqStages;
    u64* const open = &shared.dq_open[stage];
    barrier_wait(&shared.dq_empty[stage], before / kDqStages % 2 ^ 1);
    shared.partial[stage] = claim.partial;
    if (claim.partial == Partial::kLast) {
      barrier_expect(open, 4 * kFloats);
      copy_bulk(shared.dq[stage], dq_accum + accum_at<Shared>(claim, panel), 4 * kFloats, open);
    } else {
      barrier_arrive(open);
    }
  }
}

// The key tiles that add to a dq deterministically, in decreasing order: the first, the next one after that of a step
// (-1: there is none), and whether the step's own is among them.
struct TileOrder { int first, next; bool sees; };

// Finds them from the key ranges of the step's queries, with one warp. Each key tile between the ends of a range adds.
template <int kTileM, int kTileN>
__device__ __forceinline__ TileOrder order_of(const Step& step, const int2* key_ranges, BackwardSize size) {
  TileOrder order = {-1, -1, false};
  #pragma unroll 1
  for (int i = me().lane; i < kTileM; i += kWarp) {
    const int2 range = range_of(key_ranges, step.row + i, size.q_rows);
    if (is_empty(range)) continue;
    const int last_tile = (range.y - 1) / kTileN;
    order.first = max(order.first, last_tile);
    if (range.x < step.tile * kTileN) order.next = max(order.next, min(last_tile, step.tile - 1));
    order.sees |= touches(range, step.tile * kTileN, kTileN);
  }
  order.first = __reduce_max_sync(0xffffffffu, order.first);
  order.next = __reduce_max_sync(0xffffffffu, order.next);
  order.sees = __any_sync(0xffffffffu, order.sees);
  return order;
}

// Finds them for a pack with prefix trees, which hide key tiles between the ends of a range. All thread blocks must
// find the same tiles, and only tiles for which the scheduler makes a step with these queries, or some would wait
// forever. So its condition counts, for tiles between the first and the last of all ranges. A tile may add zeros alone.
template <int kTileM, int kTileN>
__device__ __forceinline__ TileOrder order_in_trees(const Step& step, const int2* key_ranges, BackwardSize size,
                                                    Trees trees) {
  int begin = kNone, end = 0;
  #pragma unroll 1
  for (int i = me().lane; i < kTileM; i += kWarp) {
    const int2 range = range_of(key_ranges, step.row + i, size.q_rows);
    if (!is_empty(range)) begin = min(begin, range.x), end = max(end, range.y);
  }
  const int least = __reduce_min_sync(0xffffffffu, begin) / kTileN;
  const int last = __reduce_max_sync(0xffffffffu, end - 1) / kTileN;
  auto down_from = [&](int tile) { return last_tile_in_sight<kTileM, kTileN>(trees, tile, least, step.row); };
  return {down_from(last), down_from(min(last, step.tile - 1)), least <= step.tile && step.tile <= last};
}

// Claims partials of dq ahead of the products with one warp, waits until they may be written, and opens panels for the
// query side. The panels of a last partial are filled with the sum of the others.
//
// Partials come in any order. With kDeterministic they come in decreasing order of the key tiles, so that every run
// gives the same bits. Under a causal mask, each key tile begins with queries for which it is the first, and finds the
// tiles before it already ahead. A thread block waits for its latest claim only, and writes earlier ones without
// waiting, so no cycle of waits can form.
template <bool kDeterministic, bool kTrees, typename Shared>
__device__ __forceinline__ void claim_partials(
    Shared& shared, const float* dq_accum, const int2* key_ranges, int* semaphores, const int* num_partials,
    BackwardSize size, Trees trees) {
  constexpr int kTileM = Shared::kTileM, kTileN = Shared::kTileN;
  static_assert(Shared::kStages == 2, "claims count two stages");
  u32 steps = 0, claims = 0;                          // so far
  while (true) {
    barrier_wait(&shared.full[steps % 2], steps / 2 % 2);
    const Step& step = shared.step[steps % 4];        // stays valid until two more have passed
    const u32 flags = step.flags;
    __syncwarp();
    if (me().lane == 0) barrier_arrive(&shared.empty[steps % 2]);
    ++steps;
    Claim claim = {kNoMore, 0, Partial::kNone};
    if (has_partial(flags)) {
      claim.semaphore = semaphore_of(step.head, step.row, size);
      int* const semaphore = semaphores + claim.semaphore;
      if (!kDeterministic) {
        claim.partial = claim_partial(semaphore, num_partials[step.row / kTileM]);
      } else {
        int state = state_of(semaphore);                    // early, for its latency
        const TileOrder order = kTrees ? order_in_trees<kTileM, kTileN>(step, key_ranges, size, trees)
                                       : order_of<kTileM, kTileN>(step, key_ranges, size);
        claim.after = 1 + order.next;
        if (order.sees)
          claim.partial = claim.after ? order.first == step.tile ? Partial::kFirst : Partial::kMiddle
                                    : order.first == step.tile ? Partial::kOnly : Partial::kLast;
        else if (order.first < 0)
          claim.partial = Partial::kOnly;                  // padding: every block stores its zeros
        const bool waits = claim.partial == Partial::kMiddle || claim.partial == Partial::kLast;
        while (waits && __shfl_sync(0xffffffffu, state, 0) != 1 + step.tile) state = state_of(semaphore);
      }
    } else if (!(flags & kEnd)) {
      continue;
    }
    if (me().lane == 0) open_claim(shared, dq_accum, semaphores, claim, claims);
    __syncwarp();
    if (flags & kEnd) break;
    ++claims;
  }
}

// Sends panels of dq to global memory with one thread, through the copy engine.
template <typename Shared>
__device__ __forceinline__ void send_partials(Shared& shared, float* dq_accum, const int* semaphores) {
  constexpr int kFloats = Shared::kPanelFloats;
  Ring<Shared::kDqStages> panels = {0, 0};
  for (Ring<2> claims = {0, 0}; ; claims.advance()) {
    barrier_wait(&shared.claim_full[claims.stage], claims.parity);
    const Claim claim = shared.claim[claims.stage];
    if (claim.semaphore == kNoMore) return;
    if (claim.partial == Partial::kMiddle) acquire_partials(semaphores + claim.semaphore);
    for (int panel = 0; panel < kAllPanels<Shared>; ++panel) {
      barrier_wait(&shared.dq_full[panels.stage], panels.parity);
      float* const target = dq_accum + accum_at<Shared>(claim, panel);
      if (claim.partial == Partial::kFirst) store_bulk(target, shared.dq[panels.stage], 4 * kFloats);
      if (claim.partial == Partial::kMiddle) add_bulk(target, shared.dq[panels.stage], 4 * kFloats);
      add_commit();
      add_wait_read();
      barrier_arrive(&shared.dq_empty[panels.stage]);
      panels.advance();
    }
    add_wait();
    barrier_arrive(&shared.claim_sent[claims.stage]);
  }
}

// Tells other thread blocks which partials have arrived, with one warp. It has no other duty, because a release takes a
// good part of a step. Accumulators that the last partial has read need not reach memory.
template <bool kDeterministic, typename Shared>
__device__ __forceinline__ void release_partials(Shared& shared, float* dq_accum, int* semaphores) {
  const int lane = threadIdx.x % kWarp;
  for (Ring<2> claims = {0, 0}; ; claims.advance()) {
    barrier_wait(&shared.claim_full[claims.stage], claims.parity);
    const Claim claim = shared.claim[claims.stage];
    if (claim.semaphore == kNoMore) return;
    barrier_wait(&shared.claim_sent[claims.stage], claims.parity);
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.claim_empty[claims.stage]);
    if (claim.partial == Partial::kLast)
      discard<Shared::kTileM * Shared::kHeadDim>(dq_accum + accum_at<Shared>(claim, 0));
    if (lane > 0 || !is_awaited(claim.partial)) continue;
    int* const semaphore = semaphores + claim.semaphore;
    if (kDeterministic) asm volatile("st.release.gpu.s32 [%0], %1;" :: "l"(semaphore), "r"(claim.after) : "memory");
    else release_partial(semaphore);
  }
}

// Clears the rows of dq (q_rows, num_heads, kHeadDim) that no key tile sees, with one warp. If dq is added to, they
// stay.
template <int kHeadDim, int kTileM, typename Dq>
__device__ __forceinline__ void clear_queries(Dq* dq, const int* num_partials, BackwardSize size) {
  if (sizeof(Dq) == sizeof(float)) return;
  const u32 words = size.splits * size.split_heads * kHeadDim / 8, pitch = size.row_heads * kHeadDim / 8;
  for (int row = blockIdx.x * kTileM; row < size.q_rows; row += gridDim.x * kTileM) {
    if (num_partials[row / kTileM] > 0) continue;
    const u32 end = min(kTileM, size.q_rows - row) * words;
    for (u32 i = threadIdx.x % kWarp; i < end; i += kWarp)
      ((uint4*)dq)[(size_t)(row + i / words) * pitch + i % words] = make_uint4(0, 0, 0, 0);
  }
}
