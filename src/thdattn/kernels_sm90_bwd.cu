// The Hopper backward (sm_90a): the contract of thd_attn_bwd, with TMA, mbarriers and wgmma, for head dims whose sums of dk
// and dv fit the registers of one warpgroup. kernels_sm90.cuh comes first.
//
// One persistent thread block per multiprocessor owns a tile of 128 key rows of one kv head at a time. Of its first
// warpgroup one warp produces: it walks the query tiles in sight; another sends sums of dq away. Two warpgroups, the key
// side, own 64 keys each: they compute scores transposed, so that probabilities and score gradients are the register
// operands of dv and dk. The last, the query side, multiplies the score gradients, which it gets through shared memory,
// with the keys: dq.

constexpr u32 kAdds = 1u << 26;                       // of a step: another tile of keys has already stored its share of dq
// Whether a step has a share of sums of dq.
__device__ __forceinline__ bool has_sums(u32 flags) { return flags & (kSees | kSees << 2) && !(flags & kAlone); }

template <int kHeadDim, int kVHeadDim, int kTileM, int kStages>
struct BackwardShared {
  static constexpr int kTileN = 128;
  static constexpr int kKBytes = kTileBytes<kTileN, kHeadDim>, kVBytes = kTileBytes<kTileN, kVHeadDim>;
  static constexpr int kQBytes = kTileBytes<kTileM, kHeadDim>, kDoutBytes = kTileBytes<kTileM, kVHeadDim>;
  unsigned char k[kKBytes], v[kVBytes];
  unsigned char q[kStages][kQBytes], dout[kStages][kDoutBytes];
  unsigned char ds[kStages][kTileBytes<kTileN, kTileM>];        // keys are the rows
  float dq[2][kPieceFloats<kHeadDim>];                            // pieces on their way to global memory
  float minus_lse[kStages][kTileM], minus_delta[kStages][kTileM];
  u64 kv_full, kv_empty;
  u64 full[kStages], empty[kStages];
  u64 ds_full[kStages], ds_empty[kStages];
  u64 dq_full[2], dq_empty[2];
  Step step[2 * kStages];                                         // the query side reads a step after its tiles are gone
  int2 range[kTileN], item[8];                                    // of the key rows, and of the key side's warps

  __device__ __forceinline__ void init() {
    barrier_init(&kv_full, 1), barrier_init(&kv_empty, 12);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&full[s], 1), barrier_init(&empty[s], 8);
      barrier_init(&ds_full[s], 8), barrier_init(&ds_empty[s], 5);
    }
    for (int s = 0; s < 2; ++s) barrier_init(&dq_full[s], 4), barrier_init(&dq_empty[s], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// turns (num_heads, stats_rows / 64), zero at first, say who may bring a share of dq: kStoring, then kStored; or (kOrdered)
// 1 + the tile of keys whose turn it is.
constexpr int kStoring = 1, kStored = 2;
__device__ __forceinline__ u32 turn_of(int head, int row, BackwardSize size) { return head * (size.stats_rows / 64) + row / 64; }
__device__ __forceinline__ int state_of(const int* turn) {
  int state;
  asm volatile("ld.relaxed.gpu.s32 %0, [%1];" : "=r"(state) : "l"(turn) : "memory");
  return state;
}

// The producer, one warp: for every tile of keys of this block, and every query head of a part, the query tiles in sight.
template <bool kOrdered, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void produce_backward(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, const TensorMap* map_q, const TensorMap* map_k,
    const TensorMap* map_v, const TensorMap* map_dout, const float* stats, const int* turns, const int2* query_ranges,
    const int* alone, const int* tile_order, int* counter, BackwardSize size) {
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>;
  constexpr int kTileN = Shared::kTileN;
  const int lane = threadIdx.x % kWarp, num_work = size.num_tiles * size.parts;
  Ring<kStages> ring = {0, 1};
  u32 kv_parity = 1;

  auto draw = [&] { return lane == 0 ? draw_work(counter, num_work + gridDim.x) : 0; };
  for (int work = __shfl_sync(0xffffffffu, draw(), 0); work < num_work; ) {
    const int next_work = kOrdered ? 0 : draw();       // early, for its latency; but none may wait for work that lies drawn
    const WorkItem item = work_item(work, tile_order, size.num_tiles, size.parts, size.together, size.last_parts);
    const QuerySight<2, kTileM> sight(query_ranges, item.tile * kTileN, size.k_rows);
    const int first = sight.first / kTileM * kTileM;
    const bool nothing = sight.first == kNone;
    int row = first, head = item.head * size.heads;
    for (u32 flags = nothing ? kNothing | kLast : kFirst; ; flags = 0) {
      const bool end_of_head = row + kTileM >= sight.end;
      if (!nothing) {
        flags |= sight.flags(row);
        if (alone[row / kTileM] == 1 + item.tile) flags |= kAlone;
        if (!kOrdered && state_of(turns + turn_of(head, row, size)) == kStored) flags |= kAdds;
        if (end_of_head && head + 1 == (item.head + 1) * size.heads) flags |= kLast;
      }
      u64* const full = &shared.full[ring.stage];
      barrier_wait(&shared.empty[ring.stage], ring.parity);
      if (lane == 0) {
        shared.step[ring.place_to_fill()] = {row, head, item.tile, flags};
        if (nothing) {
          barrier_arrive(full);
        } else {
          const u32 lse = head * size.stats_rows + row;
          const u32 delta = lse + size.parts * size.heads * size.stats_rows;
          barrier_expect(full, Shared::kQBytes + Shared::kDoutBytes + 8 * kTileM);
          copy_tile<kTileM, kHeadDim>(shared.q[ring.stage], map_q, head, row, full);
          copy_bulk(shared.minus_lse[ring.stage], stats + lse, 4 * kTileM, full);
          copy_tile<kTileM, kVHeadDim>(shared.dout[ring.stage], map_dout, head, row, full);
          copy_bulk(shared.minus_delta[ring.stage], stats + delta, 4 * kTileM, full);
        }
      }
      ring.advance();
      if (flags & kFirst) {
        barrier_wait(&shared.kv_empty, kv_parity);
        kv_parity ^= 1;
        if (lane == 0) {
          const int kv_head = head / size.group, key = item.tile * kTileN;
          barrier_expect(&shared.kv_full, Shared::kKBytes + Shared::kVBytes);
          copy_tile<kTileN, kHeadDim>(shared.k, map_k, kv_head, key, &shared.kv_full);
          copy_tile<kTileN, kVHeadDim>(shared.v, map_v, kv_head, key, &shared.kv_full);
        }
      }
      if (flags & kLast) break;
      row = end_of_head ? first : row + kTileM;
      head += end_of_head;
    }
    work = __shfl_sync(0xffffffffu, kOrdered ? draw() : next_work, 0);
  }
  barrier_wait(&shared.empty[ring.stage], ring.parity);
  if (lane == 0) {
    shared.step[ring.place_to_fill()].flags = kEnd;
    barrier_arrive(&shared.full[ring.stage]);
  }
}

// The query side, one warpgroup: dq = dS k, piece by piece.
template <typename T, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void serve_queries(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, T* dq, BackwardSize size, float softmax_scale) {
  constexpr int kTileN = 128, kCols = kPieceCols<kHeadDim>, kAll = kTileM / 64 * kPieces<kHeadDim>;
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  Ring<kStages> ring = {0, 0};
  Ring<2> pieces = {0, 1};

  for (Step step = {}; !(step.flags & kEnd); ring.advance()) {
    barrier_wait(&shared.ds_full[ring.stage], ring.parity);
    step = shared.step[ring.place()];                 // arrives under the first products, which are wasted if there is nothing
    #pragma unroll 1
    for (int piece = 0; piece < kAll; ++piece) {
      const int m = piece / kPieces<kHeadDim>, first_col = piece % kPieces<kHeadDim> * kCols;
      const u64 a = descriptor(shared.ds[ring.stage] + m * kTileN * kRowBytes, 16);
      const u64 b = descriptor(shared.k + first_col / kSlab * kTileN * kRowBytes, kTileN * kRowBytes);
      float sum[kCols / 8][4];
      wgmma_begin();
      #pragma unroll
      for (int n = 0; n < kTileN; n += 16)
        Wgmma<T, kCols>::template shared<1, 1>(sum, a + n * kRowBytes / 16, b + n * kRowBytes / 16, n > 0);
      wgmma_commit();
      barrier_wait(&shared.dq_empty[pieces.stage], pieces.parity);
      wgmma_wait<0>(sum);
      const bool nothing = step.flags & (kNothing | kEnd);
      if (nothing || piece == kAll - 1) arrive(&shared.ds_empty[ring.stage]);
      if (nothing) break;
      if (step.flags & kLast && piece == kAll - 1) arrive(&shared.kv_empty);
      if (step.flags & kAlone) {
        store_dq<kHeadDim>(dq, sum, softmax_scale, step.row + m * 64, step.head, first_col, size);
      }
      if (!has_sums(step.flags)) continue;
      float4* const staging = (float4*)shared.dq[pieces.stage] + threadIdx.x % 128;
      #pragma unroll
      for (int n = 0; n < kCols / 8; ++n) staging[n * 128] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
      publish_to_async();
      __syncwarp();
      arrive(&shared.dq_full[pieces.stage]);
      pieces.advance();
    }
  }
}

// One warp has the copy engine bring the pieces of dq to global memory. Whose sums are the first for a tile of queries, stores
// them, and nothing has to be zero before; the others add. In any order; or (kOrdered) in falling order of the tiles of keys,
// for the same bits on every run: under a causal mask each begins where it is the first, and finds the others ahead.
template <bool kOrdered, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void add_queries(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, float* dq_sum, const int2* key_ranges, int* turns,
    BackwardSize size) {
  constexpr int kTileN = 128, kAll = kTileM / 64 * kPieces<kHeadDim>;
  const int lane = threadIdx.x % kWarp;
  Ring<kStages> ring = {0, 0};
  Ring<2> pieces = {0, 0};
  int* turn = nullptr;                                 // of the step before, if others wait for its sums
  int after;                                           // what it becomes when they have arrived
  while (true) {
    barrier_wait(&shared.ds_full[ring.stage], ring.parity);
    const Step step = shared.step[ring.place()];
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.ds_empty[ring.stage]);
    ring.advance();
    const bool shares = has_sums(step.flags);
    const u32 block = turn_of(step.head, step.row, size);
    bool first = false, sees = true;
    const int wanted = kOrdered ? 1 + step.tile : kStored;
    int state = wanted, next = kStored;
    if (kOrdered && shares) {
      state = state_of(turns + block);                 // early, for its latency
      int first_tile = -1;
      next = -1, sees = false;
      #pragma unroll 1
      for (int i = lane; i < kTileM; i += kWarp) {
        const int2 range = range_of(key_ranges, step.row + i, size.q_rows);
        if (is_empty(range)) continue;
        const int last_tile = (range.y - 1) / kTileN;
        first_tile = max(first_tile, last_tile);
        if (range.x < step.tile * kTileN) next = max(next, min(last_tile, step.tile - 1));
        sees |= touches(range, step.tile * kTileN, kTileN);
      }
      next = 1 + __reduce_max_sync(0xffffffffu, next);
      sees = __any_sync(0xffffffffu, sees);
      first = __reduce_max_sync(0xffffffffu, first_tile) == step.tile;
    }
    if (turn && lane == 0) {
      add_wait();
      asm volatile("st.release.gpu.s32 [%0], %1;" :: "l"(turn), "r"(after) : "memory");
    }
    turn = nullptr;
    if (step.flags & kEnd) return;
    if (!shares) continue;
    if (!kOrdered && !(step.flags & kAdds)) {
      state = __shfl_sync(0xffffffffu, lane == 0 ? atomicCAS(turns + block, 0, kStoring) : 0, 0);
      first = state == 0;
    }
    if (kOrdered ? sees : first) turn = turns + block, after = next;
    while (!first && sees && __shfl_sync(0xffffffffu, state, 0) != wanted) state = state_of(turns + block);
    for (int piece = 0; piece < kAll; ++piece) {
      barrier_wait(&shared.dq_full[pieces.stage], pieces.parity);
      if (lane == 0) {
        float* const target = dq_sum + (size_t)(block * kPieces<kHeadDim> + piece) * kPieceFloats<kHeadDim>;
        if (first) store_bulk(target, shared.dq[pieces.stage], 4 * kPieceFloats<kHeadDim>);
        else if (sees) add_bulk(target, shared.dq[pieces.stage], 4 * kPieceFloats<kHeadDim>);
        add_commit();
        add_wait_read();
        barrier_arrive(&shared.dq_empty[pieces.stage]);
      }
      __syncwarp();
      pieces.advance();
    }
  }
}

// dq (q_rows, num_heads, kHeadDim) = dq_sum * scale, rounded, where it comes from many tiles of keys; 0 where from none.
// alone: of tiles of kTileM query rows. Launch: grid (stats_rows / 64, num_heads), block 128. Bound by memory.
template <typename T, int kHeadDim, int kTileM>
__global__ void __launch_bounds__(128) thd_attn_round_sm90(T* __restrict__ dq, const float4* __restrict__ dq_sum, float scale,
                                                           const int* __restrict__ alone, BackwardSize size) {
  const int row = blockIdx.x * 64, source = alone[row / kTileM];
  if (source > 0) return;
  if (source < 0) scale = 0.f;
  #pragma unroll
  for (int piece = 0; piece < kPieces<kHeadDim>; ++piece) {
    const size_t block = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    const float4* const in = dq_sum + (block * kPieces<kHeadDim> + piece) * (kPieceFloats<kHeadDim> / 4) + threadIdx.x;
    float sum[kPieceCols<kHeadDim> / 8][4];
    #pragma unroll
    for (int n = 0; n < kPieceCols<kHeadDim> / 8; ++n) {
      const float4 x = in[n * 128];
      sum[n][0] = x.x, sum[n][1] = x.y, sum[n][2] = x.z, sum[n][3] = x.w;
    }
    store_dq<kHeadDim>(dq, sum, scale, row, blockIdx.y, piece * kPieceCols<kHeadDim>, size);
  }
}

// The key side, one warpgroup: 64 keys, the first or (side 1) the last of the tile.
template <typename T, typename Grad, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void serve_keys(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, int side, Grad* dk, Grad* dv,
    const int2* query_ranges, BackwardSize size, float softmax_scale) {
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>;
  constexpr int kTileN = Shared::kTileN, kBlocks = kTileM / 8, kSteps = kTileM / 16;
  auto mine = [&](const unsigned char* tile) { return tile + side * 64 * kRowBytes; };
  Ring<kStages> ring = {0, 0};
  u32 kv_parity = 0;
  auto arrive = [&](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  u32 flags;
  auto step = [&]() -> const Step& { return shared.step[ring.place()]; };
  auto look = [&] {
    barrier_wait(&shared.full[ring.stage], ring.parity);
    flags = __shfl_sync(0xffffffffu, step().flags, 0);
  };
  auto sees = [&] { return flags & kSees << 2 * side; };
  // Every step is handed over to the query side; score gradients as they are: keys are the rows.
  auto wait_for_place = [&](Ring<kStages> of) { barrier_wait(&shared.ds_empty[of.stage], of.parity ^ 1); };
  auto hand_over = [&](Ring<kStages> of) {
    publish_to_async();
    __syncwarp();
    arrive(&shared.ds_full[of.stage]);
  };
  auto store_ds = [&](Ring<kStages> of, const u32 (&ds)[1][kSteps][4]) {
    const auto [warp, lane] = me();
    unsigned char* const row = shared.ds[of.stage] + (side * 64 + warp * 16 + lane % 16) * kRowBytes;
    #pragma unroll
    for (int i = 0; i < kSteps; ++i)
      store_matrices(row + i / 4 * kTileN * kRowBytes + ((i % 4 * 2 + lane / 16) ^ lane % 8) * 16, ds[0][i]);
  };
  auto pass = [&] {                                   // out of sight of these 64 keys
    if (flags & kLast) arrive(&shared.kv_empty);
    u32 zeros[1][kSteps][4];
    #pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) zeros[0][i / 4][i % 4] = 0;
    wait_for_place(ring);
    store_ds(ring, zeros);
    hand_over(ring);
    arrive(&shared.empty[ring.stage]);
    ring.advance();
  };
  const float scale_log2 = softmax_scale * kLog2e;

  while (true) {
    look();
    if (flags & (kNothing | kEnd)) {
      wait_for_place(ring);
      hand_over(ring);
    }
    if (flags & kEnd) break;
    const auto [warp, lane] = me();
    int2* const range = shared.range + side * 64 + warp * 16;
    int2& item = shared.item[side * 4 + warp];          // first key of the warp, kv head
    if (lane == 0) item = {step().tile * kTileN + side * 64 + warp * 16, step().head / size.group};
    __syncwarp();
    if (lane < 16) range[lane] = range_of(query_ranges, item.x + lane, size.k_rows);
    __syncwarp();
    float sum_dk[kHeadDim / 8][4] = {}, sum_dv[kVHeadDim / 8][4] = {};
    if (flags & kNothing) {
      arrive(&shared.empty[ring.stage]);
      ring.advance();
    } else {
      barrier_wait(&shared.kv_full, kv_parity);
      kv_parity ^= 1;
    }
    bool last = flags & kNothing;
    while (!last) {
      look();
      last = flags & kLast;
      if (!sees()) {
        pass();
        continue;
      }
      // Scores and dP begin at -lse and -delta, so that arithmetic does not wait for loads.
      float p[kBlocks][4];
      auto start_p = [&] {
        begin_columns(p, shared.minus_lse[ring.stage]);
        wgmma_begin();
        add_scores<T, kHeadDim, kTileN, kTileM>(p, mine(shared.k), shared.q[ring.stage]);
        wgmma_commit();
      };
      start_p();
      wgmma_wait<0>(p);
      while (true) {
        ring.stage = uniform(ring.stage);
        const Ring<kStages> now = ring;
        ring.advance();
        // Probabilities, transposed.
        #pragma unroll
        for (int i = 0; i < 4 * kBlocks; ++i) p[i / 4][i % 4] = exp2_fast(p[i / 4][i % 4] * scale_log2);
        if (flags & kMasked << 2 * side) {
          const auto [warp, lane] = me();
          const int2* const range = shared.range + side * 64 + warp * 16 + lane / 4;
          const int2 r[2] = {range[0], range[8]};
          const int first_query = shared.step[now.place()].row;
          #pragma unroll
          for (int i = 0; i < 4 * kBlocks; ++i)
            if (!contains(r[i % 4 / 2], first_query + i / 4 * 8 + lane % 4 * 2 + i % 2)) p[i / 4][i % 4] = 0.f;
        }
        u32 probability[1][kSteps][4];
        round_to_operand<T>(probability, *(float(*)[1][kBlocks][4])&p);

        // dv += P^T dout, and behind it dP, which becomes dS.
        float dp[kBlocks][4];
        wgmma_begin();
        start_weighted_sum<T, kVHeadDim, kTileM>(sum_dv, probability, shared.dout[now.stage]);
        wgmma_commit();
        begin_columns(dp, shared.minus_delta[now.stage]);
        wgmma_begin();
        add_scores<T, kVHeadDim, kTileN, kTileM>(dp, mine(shared.v), shared.dout[now.stage]);
        wgmma_commit();
        wgmma_wait<0>(dp);
        pin(sum_dv);
        if (last) arrive(&shared.kv_empty);
        weigh<T>(dp, probability);
        u32 dscore[1][kSteps][4];
        round_to_operand<T>(dscore, *(float(*)[1][kBlocks][4])&dp);

        // dk += dS^T q, under which dS is handed over; behind it the scores of the next step.
        wgmma_begin();
        start_weighted_sum<T, kHeadDim, kTileM>(sum_dk, dscore, shared.q[now.stage]);
        wgmma_commit();
        wait_for_place(now);
        store_ds(now, dscore);
        hand_over(now);
        barrier_wait(&shared.full[ring.stage], ring.parity);    // behind the last step comes one of other keys, or the end
        flags = step().flags;
        if (last || !sees()) {
          wgmma_wait<0>(sum_dk);
          arrive(&shared.empty[now.stage]);
          break;
        }
        last = flags & kLast;
        start_p();
        wgmma_wait<1>(sum_dk);
        arrive(&shared.empty[now.stage]);
        wgmma_wait<0>(p);
      }
      if (!last) {
        last = flags & kLast;
        pass();
      }
    }
    const auto [last_warp, last_lane] = me();
    const int2 mine_done = shared.item[side * 4 + last_warp];
    const int row = mine_done.x + last_lane / 4;
    const int num_kv_heads = size.parts * size.heads / size.group;
    const size_t at = (size_t)row * num_kv_heads + mine_done.y, below = at + 8 * num_kv_heads;
    store_row<0>(dk + at * kHeadDim, sum_dk, softmax_scale, row < size.k_rows);
    store_row<1>(dk + below * kHeadDim, sum_dk, softmax_scale, row + 8 < size.k_rows);
    store_row<0>(dv + at * kVHeadDim, sum_dv, 1.f, row < size.k_rows);
    store_row<1>(dv + below * kVHeadDim, sum_dv, 1.f, row + 8 < size.k_rows);
  }
}

// The contract of thd_attn_bwd, except that padding rows of q, k, v, dout must hold finite numbers, that stats_rows is a
// multiple of kTileM, that fp32 dk and dv are added to what is there, and that thd_attn_round_sm90 finishes dq:
// dq_sum (num_heads, stats_rows / 64, pieces) is for its tiles of kTileM rows that are not alone.
// kOrdered: the same bits on every run; then parts are whole groups, tile_order is falling, and no block waits for one with
// later work. turns (num_heads, stats_rows / 64): zero. Maps of boxes of kTileM rows of q, dout and 128 rows of k, v; counter:
// one int, zero, and zero again afterwards.
// Launch: grid at most num_tiles * parts and one block per multiprocessor, block 512.
template <typename T, typename Grad, int kHeadDim, int kVHeadDim, int kTileM, int kStages, bool kOrdered>
__global__ void __launch_bounds__(512, 1) thd_attn_bwd_sm90(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout, T* __restrict__ dq,
    Grad* __restrict__ dk, Grad* __restrict__ dv, float softmax_scale, float* __restrict__ dq_sum, int* __restrict__ turns,
    const float* __restrict__ stats, const int2* __restrict__ key_ranges, const int2* __restrict__ query_ranges,
    const int* __restrict__ alone, const int* __restrict__ tile_order, int* __restrict__ counter, BackwardSize size) {
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  constexpr int kQueryRegisters = kHeadDim == 96 ? 80 : 64, kKeyRegisters = kHeadDim == 96 ? 200 : 208;
  if (warpgroup == 0) {
    registers_give<32>();
    if (threadIdx.x < kWarp)
      produce_backward<kOrdered>(shared, &map_q, &map_k, &map_v, &map_dout, stats, turns, query_ranges, alone, tile_order, counter,
                                 size);
    else if (threadIdx.x < 2 * kWarp)
      add_queries<kOrdered>(shared, dq_sum, key_ranges, turns, size);
  } else if (warpgroup == 3) {
    registers_give<kQueryRegisters>();
    serve_queries<T>(shared, dq, size, softmax_scale);
  } else {
    registers_take<kKeyRegisters>();
    serve_keys<T>(shared, warpgroup - 1, dk, dv, query_ranges, size, softmax_scale);
  }
}
