// The Hopper backward (sm_90a): the contract of thd_attn_bwd, with TMA, mbarriers and wgmma, for head dims whose sums of dk
// and dv fit the registers of one warpgroup. kernels_sm90_bwd.cuh comes first.
//
// One persistent thread block per multiprocessor owns a tile of 128 key rows of one kv head at a time. Two warpgroups, the key
// side, own 64 keys each: they compute scores transposed, so that probabilities and score gradients are the register operands
// of dv and dk. The query side, one warpgroup, multiplies the score gradients, which it gets through shared memory, with the
// keys: dq. The warps of the first warpgroup: one produces, walking the query tiles in sight; one claims shares of dq, one sends
// them, one tells other blocks. Whose share is the last gets the sum of the others, adds its own, and stores dq, rounded.

// Columns of a piece of dq: as many as divide the head dim and leave the key side its registers.
template <int kHeadDim> constexpr int kPieceCols = kHeadDim % 64 ? kHeadDim : kHeadDim > 128 ? 32 : 64;
template <int kHeadDim> constexpr int kPieces = kHeadDim / kPieceCols<kHeadDim>;    // of 64 rows
template <int kHeadDim> constexpr int kPieceFloats = 64 * kPieceCols<kHeadDim>;

// Whether a step has a share of sums of dq.
__device__ __forceinline__ bool has_sums(u32 flags) { return flags & (kSees | kSees << 2) && !(flags & kAlone); }

// A share of the dq of a tile of queries. turns (num_heads, stats_rows / 64), zero at first: those of claim_share; or (kOrdered)
// 1 + the tile of keys whose turn it is. turn: which one, kNoMore for the end; after: what it becomes (kOrdered).
struct Claim { int turn, after; Share share; };
constexpr int kNoMore = -1;

template <int kHeadDim, int kVHeadDim, int kTileM, int kStages>
struct BackwardShared {
  static constexpr int kTileN = 128;
  static constexpr int kQueries = kHeadDim > 128 ? 32 : kTileM;   // of a tile, that the key side takes at once
  static constexpr int kKBytes = kTileBytes<kTileN, kHeadDim>, kVBytes = kTileBytes<kTileN, kVHeadDim>;
  static constexpr int kQBytes = kTileBytes<kTileM, kHeadDim>, kDoutBytes = kTileBytes<kTileM, kVHeadDim>;
  unsigned char k[kKBytes], v[kVBytes];
  unsigned char q[kStages][kQBytes], dout[kStages][kDoutBytes];
  unsigned char ds[kStages][kTileBytes<kTileN, kTileM>];        // keys are the rows
  float dq[2][kPieceFloats<kHeadDim>];                            // pieces on their way to global memory, or from there
  float minus_lse[kStages][kTileM], minus_delta[kStages][kTileM];
  u64 kv_full, kv_empty;
  u64 full[kStages], empty[kStages];
  u64 ds_full[kStages], ds_empty[kStages];
  u64 dq_empty[2], dq_open[2], dq_full[2];
  u64 claim_full[2], claim_sent[2], claim_empty[2];
  Claim claim[2];
  Share share[2];                                                 // that a piece is of
  Step step[2 * kStages];                                         // the query side reads a step after its tiles are gone
  int2 range[kTileN], item[8];                                    // of the key rows, and of the key side's warps

  __device__ __forceinline__ void init() {
    barrier_init(&kv_full, 1), barrier_init(&kv_empty, 12);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&full[s], 1), barrier_init(&empty[s], 9);
      barrier_init(&ds_full[s], 8), barrier_init(&ds_empty[s], 4);
    }
    for (int s = 0; s < 2; ++s) {
      barrier_init(&dq_empty[s], 1), barrier_init(&dq_open[s], 1), barrier_init(&dq_full[s], 4);
      barrier_init(&claim_full[s], 1), barrier_init(&claim_sent[s], 1), barrier_init(&claim_empty[s], 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

__device__ __forceinline__ u32 turn_of(int head, int row, BackwardSize size) {
  return head * (size.stats_rows / 64) + row / 64;
}

// The producer, one warp: for every tile of keys of this block, and every query head of a part, the query tiles in sight.
template <bool kOrdered, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void produce_backward(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, const TensorMap* map_q, const TensorMap* map_k,
    const TensorMap* map_v, const TensorMap* map_dout, const float* stats, const int2* query_ranges,
    const int* shares, const int* tile_order, int* counter, BackwardSize size) {
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>;
  constexpr int kTileN = Shared::kTileN;
  const int lane = threadIdx.x % kWarp, num_work = size.num_tiles * size.parts;
  Ring<kStages> ring = {0, 1};
  u32 kv_parity = 1;

  auto draw = [&] { return lane == 0 ? draw_work(counter, num_work + gridDim.x) : 0; };
  for (int work = __shfl_sync(0xffffffffu, draw(), 0); work < num_work; ) {
    const int next_work = kOrdered ? 0 : draw();       // early, for its latency; but none may wait for work that lies drawn
    WorkItem item = work_item(work, size.num_tiles, size.parts, size.together, size.last_parts);
    item.tile = tile_order[item.tile];
    const QuerySight<2, kTileM> sight(query_ranges, item.tile * kTileN, size.k_rows);
    const int first = sight.first / kTileM * kTileM;
    const bool nothing = sight.first == kNone;
    int row = first, head = item.head * size.heads;
    for (u32 flags = nothing ? kNothing | kLast : kFirst; ; flags = 0) {
      const bool end_of_head = row + kTileM >= sight.end;
      if (!nothing) {
        flags |= sight.flags(row);
        if (flags & (kSees | kSees << 2) && shares[row / kTileM] == 1) flags |= kAlone;
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
  Ring<2> pieces = {0, 0};

  for (Step step = {}; !(step.flags & kEnd); ring.advance()) {
    barrier_wait(&shared.ds_full[ring.stage], ring.parity);
    step = shared.step[ring.place()];                 // arrives under the first products, which are wasted if there is nothing
    #pragma unroll 1
    for (int piece = 0; piece < kAll; ++piece) {
      const int m = piece / kPieces<kHeadDim>, first_col = piece % kPieces<kHeadDim> * kCols;
      const u64 a = descriptor(shared.ds[ring.stage] + m * kTileN * kRowBytes, 16);
      const u64 b = descriptor(shared.k + first_col / kSlab * kTileN * kRowBytes + first_col % kSlab * 2, kTileN * kRowBytes);
      float sum[kCols / 8][4];
      wgmma_begin();
      #pragma unroll
      for (int n = 0; n < kTileN; n += 16)
        Wgmma<T, kCols>::template shared<1, 1>(sum, a + n * kRowBytes / 16, b + n * kRowBytes / 16, n > 0);
      wgmma_commit();
      wgmma_wait<0>(sum);
      const bool nothing = step.flags & (kNothing | kEnd);
      if (nothing || piece == kAll - 1) arrive(&shared.ds_empty[ring.stage]);
      if (nothing) break;
      if (step.flags & kLast && piece == kAll - 1) arrive(&shared.kv_empty);
      bool complete = step.flags & kAlone;
      if (has_sums(step.flags)) {
        float4* const staging = (float4*)shared.dq[pieces.stage] + threadIdx.x % 128;
        barrier_wait(&shared.dq_open[pieces.stage], pieces.parity);
        const Share share = shared.share[pieces.stage];
        complete = share == Share::kLast || share == Share::kOnly;
        #pragma unroll
        for (int n = 0; n < kCols / 8; ++n) {
          if (!complete) staging[n * 128] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
          if (share != Share::kLast) continue;
          const float4 others = staging[n * 128];
          sum[n][0] += others.x, sum[n][1] += others.y, sum[n][2] += others.z, sum[n][3] += others.w;
        }
        publish_to_async();
        __syncwarp();
        arrive(&shared.dq_full[pieces.stage]);
        pieces.advance();
      }
      if (complete) store_dq<kHeadDim>(dq, sum, softmax_scale, step.row + m * 64, step.head, first_col, size);
    }
  }
}

// One warp claims shares of dq, ahead of the products, waits until they may be brought, and opens pieces for the query side, with
// the sum of the others in them for the last. In any order; or (kOrdered) in falling order of the tiles of keys, for the same
// bits on every run: under a causal mask each tile begins where it is the first, and finds the others ahead.
// A block waits with its latest claim only, and brings what it claimed before without waiting: so nobody waits in a circle.
template <bool kOrdered, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void claim_shares(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, const float* dq_sum, const int2* key_ranges,
    int* turns, const int* shares, BackwardSize size) {
  constexpr int kTileN = 128, kAll = kTileM / 64 * kPieces<kHeadDim>, kFloats = kPieceFloats<kHeadDim>;
  const int lane = threadIdx.x % kWarp;
  Ring<kStages> ring = {0, 0};
  Ring<2> claims = {0, 1}, pieces = {0, 1};
  for (Step step = {}; !(step.flags & kEnd); ) {
    barrier_wait(&shared.full[ring.stage], ring.parity);
    step = shared.step[ring.place()];
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
    ring.advance();
    Claim claim = {kNoMore, 0, Share::kNone};
    if (has_sums(step.flags)) {
      claim.turn = turn_of(step.head, step.row, size);
      int* const turn = turns + claim.turn;
      if (!kOrdered) {
        claim.share = claim_share(turn, shares[step.row / kTileM]);
      } else {
        int state = state_of(turn), first_tile = -1, next_tile = -1;      // early, for its latency
        bool sees = false;
        #pragma unroll 1
        for (int i = lane; i < kTileM; i += kWarp) {
          const int2 range = range_of(key_ranges, step.row + i, size.q_rows);
          if (is_empty(range)) continue;
          const int last_tile = (range.y - 1) / kTileN;
          first_tile = max(first_tile, last_tile);
          if (range.x < step.tile * kTileN) next_tile = max(next_tile, min(last_tile, step.tile - 1));
          sees |= touches(range, step.tile * kTileN, kTileN);
        }
        first_tile = __reduce_max_sync(0xffffffffu, first_tile);
        claim.after = 1 + __reduce_max_sync(0xffffffffu, next_tile);
        if (__any_sync(0xffffffffu, sees))
          claim.share = claim.after ? first_tile == step.tile ? Share::kFirst : Share::kMiddle
                                    : first_tile == step.tile ? Share::kOnly : Share::kLast;
        else if (first_tile < 0)
          claim.share = Share::kOnly;                  // padding: zeros, by everyone
        const bool waits = claim.share == Share::kMiddle || claim.share == Share::kLast;
        while (waits && __shfl_sync(0xffffffffu, state, 0) != 1 + step.tile) state = state_of(turn);
      }
    } else if (!(step.flags & kEnd)) {
      continue;
    }
    barrier_wait(&shared.claim_empty[claims.stage], claims.parity);
    if (lane == 0) {
      shared.claim[claims.stage] = claim;
      barrier_arrive(&shared.claim_full[claims.stage]);
    }
    claims.advance();
    for (int piece = 0; piece < (claim.turn == kNoMore ? 0 : kAll); ++piece) {
      barrier_wait(&shared.dq_empty[pieces.stage], pieces.parity);
      if (lane == 0) {
        u64* const open = &shared.dq_open[pieces.stage];
        shared.share[pieces.stage] = claim.share;
        if (claim.share == Share::kLast) {
          const float* const others = dq_sum + ((size_t)claim.turn * 64 * kHeadDim + piece * kFloats);
          barrier_expect(open, 4 * kFloats);
          copy_bulk(shared.dq[pieces.stage], others, 4 * kFloats, open);
        } else {
          barrier_arrive(open);
        }
      }
      pieces.advance();
    }
  }
}

// One warp has the copy engine bring pieces of dq to global memory.
template <int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void send_shares(BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, float* dq_sum) {
  constexpr int kAll = kTileM / 64 * kPieces<kHeadDim>, kFloats = kPieceFloats<kHeadDim>;
  const int lane = threadIdx.x % kWarp;
  Ring<2> pieces = {0, 0};
  for (Ring<2> claims = {0, 0}; ; claims.advance()) {
    barrier_wait(&shared.claim_full[claims.stage], claims.parity);
    const Claim claim = shared.claim[claims.stage];
    if (claim.turn == kNoMore) return;
    for (int piece = 0; piece < kAll; ++piece) {
      barrier_wait(&shared.dq_full[pieces.stage], pieces.parity);
      if (lane == 0) {
        float* const target = dq_sum + ((size_t)claim.turn * 64 * kHeadDim + piece * kFloats);
        if (claim.share == Share::kFirst) store_bulk(target, shared.dq[pieces.stage], 4 * kFloats);
        if (claim.share == Share::kMiddle) add_bulk(target, shared.dq[pieces.stage], 4 * kFloats);
        add_commit();
        add_wait_read();
        barrier_arrive(&shared.dq_empty[pieces.stage]);
      }
      pieces.advance();
    }
    __syncwarp();
    if (lane == 0) {
      add_wait();
      barrier_arrive(&shared.claim_sent[claims.stage]);
    }
  }
}

// One warp tells other blocks of shares that have arrived: a release takes as long as a part of a step. Sums that the last has
// read need not reach memory.
template <bool kOrdered, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void release_shares(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, float* dq_sum, int* turns) {
  const int lane = threadIdx.x % kWarp;
  for (Ring<2> claims = {0, 0}; ; claims.advance()) {
    barrier_wait(&shared.claim_full[claims.stage], claims.parity);
    const Claim claim = shared.claim[claims.stage];
    if (claim.turn == kNoMore) return;
    barrier_wait(&shared.claim_sent[claims.stage], claims.parity);
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.claim_empty[claims.stage]);
    if (claim.share == Share::kLast) discard<kTileM * kHeadDim>(dq_sum + (size_t)claim.turn * 64 * kHeadDim);
    if (lane > 0 || !is_awaited(claim.share)) continue;
    if (kOrdered) asm volatile("st.release.gpu.s32 [%0], %1;" :: "l"(turns + claim.turn), "r"(claim.after) : "memory");
    else release_share(turns + claim.turn);
  }
}

// One warp sets the rows of dq (q_rows, num_heads, kHeadDim) to zero that no tile of keys has in sight.
template <int kHeadDim, int kTileM, typename T>
__device__ __forceinline__ void clear_queries(T* dq, const int* shares, BackwardSize size) {
  const u32 words = size.parts * size.heads * kHeadDim / 8;
  for (int row = blockIdx.x * kTileM; row < size.q_rows; row += gridDim.x * kTileM) {
    if (shares[row / kTileM] > 0) continue;
    const u32 end = min(kTileM, size.q_rows - row) * words;
    for (u32 i = threadIdx.x % kWarp; i < end; i += kWarp) ((uint4*)dq)[(size_t)row * words + i] = make_uint4(0, 0, 0, 0);
  }
}

// The key side, one warpgroup: 64 keys, the first or (side 1) the last of the tile.
template <typename T, typename Grad, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void serve_keys(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, int side, Gradients<Grad> grads,
    const int2* query_ranges, BackwardSize size, float softmax_scale) {
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>;
  constexpr int kTileN = Shared::kTileN, kQueries = Shared::kQueries, kBlocks = kQueries / 8, kSteps = kQueries / 16;
  auto mine = [&](const unsigned char* tile) { return tile + opaque(side) * 64 * kRowBytes; };
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
  auto store_ds = [&](Ring<kStages> of, int first, const u32 (&ds)[1][kSteps][4]) {
    const auto [warp, lane] = me();
    unsigned char* const row = shared.ds[of.stage] + (side * 64 + warp * 16 + lane % 16) * kRowBytes;
    #pragma unroll
    for (int i = first / 16; i < first / 16 + kSteps; ++i)
      store_matrices(row + i / 4 * kTileN * kRowBytes + ((i % 4 * 2 + lane / 16) ^ lane % 8) * 16, ds[0][i - first / 16]);
  };
  auto pass = [&] {                                   // out of sight of these 64 keys
    if (flags & kLast) arrive(&shared.kv_empty);
    u32 zeros[1][kSteps][4];
    #pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) zeros[0][i / 4][i % 4] = 0;
    wait_for_place(ring);
    #pragma unroll
    for (int first = 0; first < kTileM; first += kQueries) store_ds(ring, first, zeros);
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
      auto start_p = [&](Ring<kStages> of, int first) {
        begin_columns(p, shared.minus_lse[of.stage] + first);
        wgmma_begin();
        add_scores<T, kHeadDim, kTileN, kTileM>(p, mine(shared.k), shared.q[of.stage] + first * kRowBytes);
        wgmma_commit();
      };
      // The queries from `first` on; dk is not waited for.
      auto take = [&](Ring<kStages> now, int first) {
        // Probabilities, transposed.
        #pragma unroll
        for (int i = 0; i < 4 * kBlocks; ++i) p[i / 4][i % 4] = exp2_fast(p[i / 4][i % 4] * scale_log2);
        if (flags & kMasked << 2 * side) {
          const auto [warp, lane] = me();
          const int2* const range = shared.range + side * 64 + warp * 16 + lane / 4;
          const int2 r[2] = {range[0], range[8]};
          const int first_query = shared.step[now.place()].row + first;
          #pragma unroll
          for (int i = 0; i < 4 * kBlocks; ++i)
            if (!contains(r[i % 4 / 2], first_query + i / 4 * 8 + lane % 4 * 2 + i % 2)) p[i / 4][i % 4] = 0.f;
        }
        u32 probability[1][kSteps][4];
        round_to_operand<T>(probability, *(float(*)[1][kBlocks][4])&p);

        // dv += P^T dout, and behind it dP, which becomes dS.
        const unsigned char* const dout = shared.dout[now.stage] + first * kRowBytes;
        float dp[kBlocks][4];
        wgmma_begin();
        start_weighted_sum<T, kVHeadDim, kTileM>(sum_dv, probability, dout);
        wgmma_commit();
        begin_columns(dp, shared.minus_delta[now.stage] + first);
        wgmma_begin();
        add_scores<T, kVHeadDim, kTileN, kTileM>(dp, mine(shared.v), dout);
        wgmma_commit();
        wgmma_wait<0>(dp);
        pin(sum_dv);
        if (last && first + kQueries == kTileM) arrive(&shared.kv_empty);
        weigh<T>(dp, probability);
        u32 dscore[1][kSteps][4];
        round_to_operand<T>(dscore, *(float(*)[1][kBlocks][4])&dp);

        // dk += dS^T q, under which dS is handed over.
        wgmma_begin();
        start_weighted_sum<T, kHeadDim, kTileM>(sum_dk, dscore, shared.q[now.stage] + first * kRowBytes);
        wgmma_commit();
        if (first == 0) wait_for_place(now);
        store_ds(now, first, dscore);
      };
      start_p(ring, 0);
      wgmma_wait<0>(p);
      while (true) {
        ring.stage = uniform(ring.stage);
        const Ring<kStages> now = ring;
        ring.advance();
        #pragma unroll
        for (int next = kQueries; next < kTileM; next += kQueries) {
          take(now, next - kQueries);
          start_p(now, next);
          wgmma_wait<1>(sum_dk);
          wgmma_wait<0>(p);
        }
        take(now, kTileM - kQueries);
        hand_over(now);
        // Behind dk the scores of the next step; behind the last comes one of other keys, or the end.
        barrier_wait(&shared.full[ring.stage], ring.parity);
        flags = step().flags;
        if (last || !sees()) {
          wgmma_wait<0>(sum_dk);
          arrive(&shared.empty[now.stage]);
          break;
        }
        last = flags & kLast;
        start_p(ring, 0);
        wgmma_wait<1>(sum_dk);
        arrive(&shared.empty[now.stage]);
        wgmma_wait<0>(p);
      }
      if (!last) {
        last = flags & kLast;
        pass();
      }
    }
    const int2 mine_done = shared.item[side * 4 + me().warp];
    const Share share = grads.claim(mine_done.x, mine_done.y, 0, size);
    grads.bring(grads.dk, grads.dk_sum, sum_dk, softmax_scale, share, mine_done.x, mine_done.y, size);
    grads.bring(grads.dv, grads.dv_sum, sum_dv, 1.f, share, mine_done.x, mine_done.y, size);
    grads.release(mine_done.x, mine_done.y, 0, share, size);
  }
}

// The contract of thd_attn_bwd, except that padding rows of q, k, v, dout must hold finite numbers, that stats_rows is a
// multiple of kTileM, and that `turns` of grads are zero. dq_sum (num_heads, stats_rows / 64, pieces) is work space; shares
// (stats_rows / kTileM) are from thd_attn_shares_sm90.
// kOrdered: the same bits on every run; then parts are whole groups, tile_order is falling, and no block waits for one with
// later work. turns (num_heads, stats_rows / 64): zero. Maps of boxes of kTileM rows of q, dout and 128 rows of k, v; counter:
// one int, zero, and zero again afterwards.
// Launch: grid at most num_tiles * parts and one block per multiprocessor, block 512.
template <typename T, typename Grad, int kHeadDim, int kVHeadDim, int kTileM, int kStages, bool kOrdered>
__global__ void __launch_bounds__(512, 1) thd_attn_bwd_sm90(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout, T* __restrict__ dq,
    const Gradients<Grad> grads, float softmax_scale, float* __restrict__ dq_sum, int* __restrict__ turns,
    const float* __restrict__ stats, const int2* __restrict__ key_ranges, const int2* __restrict__ query_ranges,
    const int* __restrict__ shares, const int* __restrict__ tile_order, int* __restrict__ counter, BackwardSize size) {
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  constexpr int kQueryRegisters = kHeadDim == 96 ? 80 : kHeadDim > 128 ? 48 : 64, kKeyRegisters = 240 - kQueryRegisters / 2;
  if (warpgroup == 0) {
    registers_give<32>();
    if (threadIdx.x < kWarp)
      produce_backward<kOrdered>(shared, &map_q, &map_k, &map_v, &map_dout, stats, query_ranges, shares, tile_order, counter,
                                 size);
    else if (threadIdx.x < 2 * kWarp)
      claim_shares<kOrdered>(shared, dq_sum, key_ranges, turns, shares, size);
    else if (threadIdx.x < 3 * kWarp)
      send_shares(shared, dq_sum);
    else
      release_shares<kOrdered>(shared, dq_sum, turns), clear_queries<kHeadDim, kTileM>(dq, shares, size);
  } else if (warpgroup == 3) {
    registers_give<kQueryRegisters>();
    serve_queries<T>(shared, dq, size, softmax_scale);
  } else {
    registers_take<kKeyRegisters>();
    serve_keys<T>(shared, warpgroup - 1, grads, query_ranges, size, softmax_scale);
  }
}
