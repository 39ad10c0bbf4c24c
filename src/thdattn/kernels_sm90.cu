// Hopper kernels (sm_90a): the same contracts as kernels.cu, with TMA, mbarriers and wgmma.
//
// One persistent thread block per multiprocessor. Its first warpgroup produces: one warp walks the key tiles in sight
// of the current query tile and starts the bulk copies. The others consume: each owns 64 query rows, keeps scores,
// probabilities and output in registers, and leaves its exponentials to run under the other's matrix products.
// kernels.cuh and the wrappers of wgmma.py come first.

// ------------------------------------------------------------------------------------------------ instructions

struct alignas(64) TensorMap { char opaque[128]; };

__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals));
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  asm volatile("{ .reg .pred done;\n"
               "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra wait; }" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
// Copies a box (64 columns, 1 head, the map's rows) to shared memory; what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void copy_box(void* dst, const TensorMap* map, int column, int head, int row, u64* barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
               :: "r"(shared_address(dst)), "l"(map), "r"(column), "r"(head), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// Copies 16-byte aligned bytes, a multiple of 16.
__device__ __forceinline__ void copy_bulk(void* dst, const void* src, int bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(dst)), "l"(src), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// Adds fp32 from shared to global memory; 16-byte aligned bytes, a multiple of 16.
__device__ __forceinline__ void add_bulk(float* dst, const void* src, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(dst), "r"(shared_address(src)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void add_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the sums so far have been read from shared memory; until they have arrived.
__device__ __forceinline__ void add_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void add_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What this thread wrote to shared memory becomes visible to wgmma and to bulk copies.
__device__ __forceinline__ void publish_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Stores four 8x8 blocks of an operand's fragments; lane l gives the address of row l % 8 of block l / 8.
__device__ __forceinline__ void store_matrices(void* row, const u32 (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(row)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Fixes where in the program the values are ready: the compiler orders volatile asm, not the arithmetic around it.
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

template <int kRegisters> __device__ __forceinline__ void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
template <int kRegisters> __device__ __forceinline__ void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters)); }

// ------------------------------------------------------------------------------------------------ tiles

// A tile is stored as slabs of 64 columns, rows 128 bytes apart, in the 128-byte swizzle that TMA writes and wgmma
// reads; head dim 96 takes two slabs, the second half filled with zeros by TMA.
constexpr int kSlab = 64;
constexpr int kRowBytes = 128;
template <int kCols> constexpr int kSlabs = (kCols + kSlab - 1) / kSlab;
template <int kRows, int kCols> constexpr int kTileBytes = kSlabs<kCols> * kRows * kRowBytes;

__device__ __forceinline__ u64 descriptor(const void* tile, int slab_bytes) {
  const u64 address = shared_address(tile);
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(slab_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

template <int kRows, int kCols>
__device__ __forceinline__ void copy_tile(unsigned char* tile, const TensorMap* map, int head, int row, u64* barrier) {
  #pragma unroll
  for (int s = 0; s < kSlabs<kCols>; ++s) copy_box(tile + s * kRows * kRowBytes, map, s * kSlab, head, row, barrier);
}

// scores = q . k^T: 64 rows of q (in a tile of kRowsQ) with the kRowsK rows of k.
template <typename T, int kDim, int kRowsQ, int kRowsK>
__device__ __forceinline__ void start_scores(float (&scores)[kRowsK / 8][4], const unsigned char* q, const unsigned char* k) {
  const u64 a = descriptor(q, 16), b = descriptor(k, 16);
  #pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    const int slab = d / kSlab, offset = d % kSlab * 2;
    Wgmma<T, kRowsK>::template shared<0, 0>(scores, a + (slab * kRowsQ * kRowBytes + offset) / 16,
                                            b + (slab * kRowsK * kRowBytes + offset) / 16, d > 0);
  }
}

// sum (+)= weights . v: weights in registers (64 x kRowsV), v of kRowsV rows.
template <typename T, int kCols, int kRowsV>
__device__ __forceinline__ void start_weighted_sum(float (&sum)[kCols / 8][4], const u32 (&weights)[1][kRowsV / 16][4],
                                                   const unsigned char* v) {
  const u64 b = descriptor(v, kRowsV * kRowBytes);
  #pragma unroll
  for (int i = 0; i < kRowsV / 16; ++i)
    Wgmma<T, kCols>::template registers<1>(sum, weights[0][i], b + i * 16 * kRowBytes / 16, 1);
}

// Four lanes hold a 4x4 block of words, a row per lane; afterwards lane i holds column i.
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

// Stores one (kHalf) of the two rows that this thread shares with its quad. 16-bit: quads trade words so that every lane
// stores 16 bytes; a scale of 0 stores zeros. fp32: is added, for several thread blocks may have a share.
template <int kHalf, typename T, int kBlocks>
__device__ __forceinline__ void store_row(T* row, const float (&sum)[kBlocks][4], float scale, bool exists) {
  #pragma unroll
  for (int n = 0; n < kBlocks; n += 4) {
    u32 words[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = scale == 0.f ? 0 : pack<T>(sum[n + i][2 * kHalf] * scale, sum[n + i][2 * kHalf + 1] * scale);
    transpose_in_quad(words);
    if (exists) *(uint4*)(row + (n + threadIdx.x % 4) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
template <int kHalf, int kBlocks>
__device__ __forceinline__ void store_row(float* row, const float (&sum)[kBlocks][4], float scale, bool exists) {
  #pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    if (exists)
      asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" :: "l"(row + n * 8 + threadIdx.x % 4 * 2),
                   "f"(sum[n][2 * kHalf] * scale), "f"(sum[n][2 * kHalf + 1] * scale) : "memory");
}

// ------------------------------------------------------------------------------------------------ forward

// What the producer tells the consumers of a query tile, and of each key tile.
struct QueryTile { int tile, head; bool has_keys; };
struct KeyTile { int row; u32 flags; };               // kLast, and per consumer c: kSees << 2c, kMasked << 2c
constexpr u32 kLast = 1u << 31, kSees = 1, kMasked = 2;

// Work is done head by head, for the L2 cache, the longest tiles of a head first. The last few heads take turns, so that
// what is left at the end are short tiles, which fill the multiprocessors evenly.
struct WorkItem { int tile, head; };
__device__ __forceinline__ WorkItem work_item(int work, const int* tile_order, int num_tiles, int num_heads, int last_heads) {
  const int rest = work - (num_heads - last_heads) * num_tiles;
  if (rest < 0) return {tile_order[work % num_tiles], work / num_tiles};
  return {tile_order[rest / last_heads], num_heads - last_heads + rest % last_heads};
}

// Position in a ring of buffers; the parity is the one that its barriers are waited on with.
template <int kStages>
struct Ring {
  u32 stage, parity;
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
  __device__ __forceinline__ Ring back(u32 steps) const {
    return stage < steps ? Ring{stage + kStages - steps, parity ^ 1} : Ring{stage - steps, parity};
  }
};

template <int kHeadDim, int kVHeadDim, int kTileN, int kConsumers, int kQStages, int kStages>
struct ForwardShared {
  static constexpr int kTileM = 64 * kConsumers;
  static constexpr int kQBytes = kTileBytes<kTileM, kHeadDim>;
  static constexpr int kKBytes = kTileBytes<kTileN, kHeadDim>, kVBytes = kTileBytes<kTileN, kVHeadDim>;
  unsigned char q[kQStages][kQBytes];
  unsigned char k[kStages][kKBytes];
  unsigned char v[kStages][kVBytes];
  u64 q_full[kQStages], q_empty[kQStages];
  u64 k_full[kStages], k_empty[kStages];
  u64 v_full[kStages], v_empty[kStages];
  QueryTile query_tile[kQStages];
  KeyTile key_tile[kStages];
  int2 range[kTileM];                                 // of the query rows; registers are what consumers are short of

  __device__ __forceinline__ void init() {
    for (int s = 0; s < kQStages; ++s) barrier_init(&q_full[s], 1), barrier_init(&q_empty[s], 4 * kConsumers);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&k_full[s], 1), barrier_init(&k_empty[s], 4 * kConsumers);
      barrier_init(&v_full[s], 1), barrier_init(&v_empty[s], 4 * kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

struct ForwardSize { int q_rows, num_tiles, num_heads, last_heads, group; };

// The producer, one warp: for every query tile of this block the key tiles in sight. Keys run one tile ahead of values.
template <int kHeadDim, int kVHeadDim, int kTileN, int kConsumers, int kQStages, int kStages>
__device__ __forceinline__ void produce_forward(
    ForwardShared<kHeadDim, kVHeadDim, kTileN, kConsumers, kQStages, kStages>& shared, const TensorMap* map_q,
    const TensorMap* map_k, const TensorMap* map_v, const int2* key_ranges, const int* tile_order, int* counter,
    ForwardSize size) {
  using Shared = ForwardShared<kHeadDim, kVHeadDim, kTileN, kConsumers, kQStages, kStages>;
  constexpr int kTileM = Shared::kTileM, kRows = kTileM / kWarp;
  const int lane = threadIdx.x % kWarp, num_work = size.num_tiles * size.num_heads;
  Ring<kQStages> q_ring = {0, 1};
  Ring<kStages> k_ring = {0, 1}, v_ring = {0, 1};
  auto item_of = [&](int work) {
    return work < num_work ? work_item(work, tile_order, size.num_tiles, size.num_heads, size.last_heads) : WorkItem{};
  };
  auto load_values = [&](int kv_head, int row) {
    barrier_wait(&shared.v_empty[v_ring.stage], v_ring.parity);
    if (lane == 0) {
      barrier_expect(&shared.v_full[v_ring.stage], Shared::kVBytes);
      copy_tile<kTileN, kVHeadDim>(shared.v[v_ring.stage], map_v, kv_head, row, &shared.v_full[v_ring.stage]);
    }
    v_ring.advance();
  };

  WorkItem item = item_of(blockIdx.x);
  for (int work = blockIdx.x; work < num_work; ) {
    const auto [tile, head] = item;
    // The next tile of work is asked for early; whoever gets the last number leaves the counter as it was.
    int next_work = 0;
    if (lane == 0) {
      next_work = atomicAdd(counter, 1);
      if (next_work == num_work - 1) *counter = 0;
      next_work += gridDim.x;
    }
    const int kv_head = head / size.group;
    int2 range[kRows];
    #pragma unroll
    for (int i = 0; i < kRows; ++i) range[i] = range_of(key_ranges, tile * kTileM + i * kWarp + lane, size.q_rows);
    auto first_in_sight = [&](int from) {
      int first = kNone;
      #pragma unroll
      for (int i = 0; i < kRows; ++i) first = min(first, max(range[i].x, from) < range[i].y ? max(range[i].x, from) : kNone);
      return __reduce_min_sync(0xffffffffu, first);
    };
    int row = first_in_sight(0), row_before = kNone;

    barrier_wait(&shared.q_empty[q_ring.stage], q_ring.parity);
    if (lane == 0) {
      shared.query_tile[q_ring.stage] = {tile, head, row != kNone};
      barrier_expect(&shared.q_full[q_ring.stage], Shared::kQBytes);
      copy_tile<kTileM, kHeadDim>(shared.q[q_ring.stage], map_q, head, tile * kTileM, &shared.q_full[q_ring.stage]);
    }
    q_ring.advance();
    while (row != kNone) {
      const int next = first_in_sight(row + kTileN);
      u32 flags = next == kNone ? kLast : 0;
      #pragma unroll
      for (int c = 0; c < kConsumers; ++c) {
        const int2 a = range[2 * c], b = range[2 * c + 1];
        auto hides = [&](int2 r) { return !is_empty(r) && (r.x > row || r.y < row + kTileN); };
        if (__any_sync(0xffffffffu, touches(a, row, kTileN) || touches(b, row, kTileN))) flags |= kSees << 2 * c;
        if (__any_sync(0xffffffffu, hides(a) || hides(b))) flags |= kMasked << 2 * c;
      }
      barrier_wait(&shared.k_empty[k_ring.stage], k_ring.parity);
      if (lane == 0) {
        shared.key_tile[k_ring.stage] = {row, flags};
        barrier_expect(&shared.k_full[k_ring.stage], Shared::kKBytes);
        copy_tile<kTileN, kHeadDim>(shared.k[k_ring.stage], map_k, kv_head, row, &shared.k_full[k_ring.stage]);
      }
      k_ring.advance();
      if (row_before != kNone) load_values(kv_head, row_before);
      row_before = row;
      row = next;
    }
    work = __shfl_sync(0xffffffffu, next_work, 0);
    item = item_of(work);
    if (row_before != kNone) load_values(kv_head, row_before);
  }
  barrier_wait(&shared.q_empty[q_ring.stage], q_ring.parity);
  if (lane == 0) {
    shared.query_tile[q_ring.stage].tile = -1;
    barrier_arrive(&shared.q_full[q_ring.stage]);
  }
}

// Online softmax of a thread's two rows, in powers of two. Probabilities are relative to a base that follows the row
// maximum only when that has grown by more than kSlack: the sums stay far from overflow, any base gives the same
// quotient, and sums rarely have to be rescaled.
struct Softmax {
  static constexpr float kSlack = 8.f, kNothingYet = -1e30f;
  float scale_log2, row_max[2] = {-kInfinity, -kInfinity}, base[2] = {kNothingYet, kNothingYet}, row_sum[2] = {};
  float2 shrink;                                      // what sums so far are to be multiplied with, if `rescale`
  bool rescale;

  // Turns new scores into probabilities.
  template <int kBlocks>
  __device__ __forceinline__ void add(float (&score)[kBlocks][4]) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      #pragma unroll
      for (int n = 0; n < kBlocks; ++n) row_max[r] = fmaxf(row_max[r], fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      row_max[r] = quad_max(row_max[r]);
    }
    const float top[2] = {row_max[0] * scale_log2, row_max[1] * scale_log2};
    rescale = __any_sync(0xffffffffu, top[0] > base[0] + kSlack || top[1] > base[1] + kSlack);
    if (rescale) {
      const float next[2] = {fmaxf(base[0], top[0]), fmaxf(base[1], top[1])};
      shrink = make_float2(exp2_fast(base[0] - next[0]), exp2_fast(base[1] - next[1]));
      row_sum[0] *= shrink.x, row_sum[1] *= shrink.y;
      base[0] = next[0], base[1] = next[1];
    }
    #pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      float& s = score[i / 4][i % 4];
      s = exp2_fast(fmaf(s, scale_log2, -base[i % 4 / 2]));
      row_sum[i % 4 / 2] += s;
    }
  }
};

template <int kBlocks>
__device__ __forceinline__ void hide(float (&score)[kBlocks][4], const int2* warp_range, int first_key) {
  const int lane = threadIdx.x % kWarp;
  const int2 range[2] = {warp_range[lane / 4], warp_range[lane / 4 + 8]};
  #pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i)
    if (!contains(range[i % 4 / 2], first_key + i / 4 * 8 + lane % 4 * 2 + i % 2)) score[i / 4][i % 4] = -kInfinity;
}

template <int kBlocks>
__device__ __forceinline__ void scale_rows(float (&sum)[kBlocks][4], float2 factor) {
  #pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) sum[i / 4][i % 4] *= i % 4 < 2 ? factor.x : factor.y;
}

// A consumer, one warpgroup: 64 query rows. The sum over the previous values runs on the tensor cores while this one
// takes its exponentials, and the consumers take turns in starting matrix products.
template <typename T, int kHeadDim, int kVHeadDim, int kTileN, int kConsumers, int kQStages, int kStages>
__device__ __forceinline__ void consume_forward(
    ForwardShared<kHeadDim, kVHeadDim, kTileN, kConsumers, kQStages, kStages>& shared, int consumer, T* out, float* lse,
    float* max_logits, const int2* key_ranges, ForwardSize size, float softmax_scale) {
  constexpr int kTileM = 64 * kConsumers, kBlocks = kTileN / 8, kOutBlocks = kVHeadDim / 8;
  const int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp;
  Ring<kQStages> q_ring = {0, 0};
  Ring<kStages> ring = {0, 0};
  auto arrive = [&](u64* barrier) { if (lane == 0) barrier_arrive(barrier); };
  auto my_turn = [&] { asm volatile("bar.sync %0, 256;" :: "r"(1 + consumer) : "memory"); };
  auto next_turn = [&] { asm volatile("bar.arrive %0, 256;" :: "r"(1 + (consumer + 1) % kConsumers) : "memory"); };
  if (consumer == kConsumers - 1) next_turn();

  while (true) {
    barrier_wait(&shared.q_full[q_ring.stage], q_ring.parity);
    QueryTile query_tile = shared.query_tile[q_ring.stage];
    query_tile.tile = __shfl_sync(0xffffffffu, query_tile.tile, 0);
    if (query_tile.tile < 0) break;
    const unsigned char* const my_q = shared.q[q_ring.stage] + consumer * 64 * kRowBytes;
    const int first_row = query_tile.tile * kTileM + consumer * 64 + warp * 16;
    int2* const range = shared.range + consumer * 64 + warp * 16;
    if (lane < 16) range[lane] = range_of(key_ranges, first_row + lane, size.q_rows);
    __syncwarp();
    float sum_out[kOutBlocks][4] = {};
    Softmax softmax = {softmax_scale * kLog2e};

    bool last = !__shfl_sync(0xffffffffu, query_tile.has_keys, 0);
    u32 mine = 0;
    int first_key = 0;
    auto next_key_tile = [&] {
      barrier_wait(&shared.k_full[ring.stage], ring.parity);
      first_key = shared.key_tile[ring.stage].row;
      const u32 flags = __shfl_sync(0xffffffffu, shared.key_tile[ring.stage].flags, 0);
      last = flags & kLast;
      mine = flags >> 2 * consumer;
    };
    auto release_keys = [&] {
      arrive(&shared.k_empty[ring.stage]);
      if (last) arrive(&shared.q_empty[q_ring.stage]);
    };
    auto pass = [&] {                                 // out of sight of these 64 rows: hand turn and buffers on
      my_turn();
      next_turn();
      release_keys();
      barrier_wait(&shared.v_full[ring.stage], ring.parity);
      arrive(&shared.v_empty[ring.stage]);
      ring.advance();
    };
    if (last) arrive(&shared.q_empty[q_ring.stage]);
    while (!last) {
      next_key_tile();
      if (!(mine & kSees)) {
        pass();
        continue;
      }
      float score[kBlocks][4];
      my_turn();
      wgmma_begin();
      start_scores<T, kHeadDim, kTileM, kTileN>(score, my_q, shared.k[ring.stage]);
      wgmma_commit();
      next_turn();
      wgmma_wait<0>(score);
      release_keys();
      if (mine & kMasked) hide(score, range, first_key);
      softmax.add(score);
      bool summing = false;                           // values two tiles back are being read
      ring.advance();

      u32 probability[1][kTileN / 16][4];
      auto finish_sum = [&] {
        wgmma_wait<0>(sum_out);
        if (summing) arrive(&shared.v_empty[ring.back(2).stage]);
        if (softmax.rescale) scale_rows(sum_out, softmax.shrink);
        round_to_operand<T>(probability, *(float(*)[1][kBlocks][4])&score);
      };
      auto start_sum = [&] {
        const Ring<kStages> values = ring.back(1);
        barrier_wait(&shared.v_full[values.stage], values.parity);
        start_weighted_sum<T, kVHeadDim, kTileN>(sum_out, probability, shared.v[values.stage]);
        wgmma_commit();
      };
      while (!last) {
        next_key_tile();
        if (!(mine & kSees)) break;
        finish_sum();
        my_turn();
        wgmma_begin();
        start_scores<T, kHeadDim, kTileM, kTileN>(score, my_q, shared.k[ring.stage]);
        wgmma_commit();
        start_sum();
        next_turn();
        wgmma_wait<1>(score);
        release_keys();
        if (mine & kMasked) hide(score, range, first_key);
        softmax.add(score);
        summing = true;
        ring.advance();
      }
      finish_sum();
      wgmma_begin();
      start_sum();
      wgmma_wait<0>(sum_out);
      arrive(&shared.v_empty[ring.back(1).stage]);
      if (!(mine & kSees)) pass();
    }
    q_ring.advance();

    // Normalise and store: quads trade words so that every lane stores 16 bytes.
    float largest = -kInfinity;
    float scale[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      const bool padding = is_empty(range[lane / 4 + 8 * r]);
      const float total = quad_sum(softmax.row_sum[r]);
      scale[r] = padding ? 0.f : 1.f / total;
      if (!padding) largest = fmaxf(largest, softmax.row_max[r] * softmax_scale);
      if (lane % 4 == 0 && row < size.q_rows)
        lse[(size_t)query_tile.head * size.q_rows + row] = padding ? -kInfinity : (softmax.base[r] + __log2f(total)) * kLn2;
    }
    const int row = first_row + lane / 4, pitch = size.num_heads * kVHeadDim;
    T* const out_row = out + (size_t)row * pitch + query_tile.head * kVHeadDim;
    store_row<0>(out_row, sum_out, scale[0], row < size.q_rows);
    store_row<1>(out_row + 8 * pitch, sum_out, scale[1], row + 8 < size.q_rows);
    for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
    const size_t slot = ((size_t)query_tile.head * size.num_tiles + query_tile.tile) * kConsumers + consumer;
    if (lane == 0) max_logits[slot * 4 + warp] = largest;
  }
}

// The contract of thd_attn_fwd, except that padding rows of k and v must hold finite numbers: a copy by tensor map cannot
// leave rows out (the pipeline zeros them). max_logits (num_heads, tiles, 4 * kConsumers); maps of boxes of 64 * kConsumers rows of
// q and kTileN rows of k, v; counter: one int, zero, and zero again afterwards.
// Launch: grid at most tiles * num_heads and one block per multiprocessor, block 128 * (1 + kConsumers).
template <typename T, int kHeadDim, int kVHeadDim, int kTileN, int kConsumers, int kQStages, int kStages>
__global__ void __launch_bounds__(128 * (1 + kConsumers), 1) thd_attn_fwd_sm90(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, T* __restrict__ out, float* __restrict__ lse, float softmax_scale,
    float* __restrict__ max_logits, const int2* __restrict__ key_ranges, const int* __restrict__ tile_order,
    int* __restrict__ counter, int q_rows, int num_tiles, int num_heads, int last_heads, int group) {
  using Shared = ForwardShared<kHeadDim, kVHeadDim, kTileN, kConsumers, kQStages, kStages>;
  extern __shared__ unsigned char shared_bytes[];
  Shared& shared = *(Shared*)(shared_bytes + (-shared_address(shared_bytes) & 1023));  // keeps loads from shared memory known as such
  const ForwardSize size = {q_rows, num_tiles, num_heads, last_heads, group};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (warpgroup == 0) {
    registers_give<kConsumers == 2 ? 40 : 32>();
    if (threadIdx.x < kWarp)
      produce_forward(shared, &map_q, &map_k, &map_v, key_ranges, tile_order, counter, size);
  } else {
    registers_take<kConsumers == 2 ? 232 : 160>();
    consume_forward(shared, warpgroup - 1, out, lse, max_logits, key_ranges, size, softmax_scale);
  }
}

// ------------------------------------------------------------------------------------------------ backward

// One thread block owns a tile of 128 key rows of one kv head at a time. The first warpgroup produces: it walks the query
// tiles in sight; another warp of it sends sums of dq away. Two warpgroups, the key side, own 64 keys each: they compute scores transposed, so that probabilities and
// score gradients are the register operands of dv and dk. The last, the query side, multiplies the score gradients, which
// it gets through shared memory, with the keys.

// What the producer tells of a query tile.
struct Step { int row, head, tile; u32 flags; };      // flags: kLast, and those of a KeyTile, and:
constexpr u32 kFirst = 1u << 30;                      // first of a tile of keys
constexpr u32 kNothing = 1u << 29;                    // no query sees the tile of keys
constexpr u32 kEnd = 1u << 28;                        // no more work

// dq_sum, fp32, is a sequence of pieces, 64 query rows by as many columns as divide the head dim and leave the key side its
// registers; a piece is stored as the accumulators of a warpgroup: float4 n of every thread after float4 n - 1 of all.
template <int kHeadDim> constexpr int kPieceCols = kHeadDim % 64 ? kHeadDim : 64;
template <int kHeadDim> constexpr int kPieces = kHeadDim / kPieceCols<kHeadDim>;    // of 64 rows
template <int kHeadDim> constexpr int kPieceFloats = 64 * kPieceCols<kHeadDim>;

template <int kHeadDim, int kVHeadDim, int kTileM, int kStages>
struct BackwardShared {
  static constexpr int kTileN = 128;
  static constexpr int kKBytes = kTileBytes<kTileN, kHeadDim>, kVBytes = kTileBytes<kTileN, kVHeadDim>;
  static constexpr int kQBytes = kTileBytes<kTileM, kHeadDim>, kDoutBytes = kTileBytes<kTileM, kVHeadDim>;
  unsigned char k[kKBytes], v[kVBytes];
  unsigned char q[kStages][kQBytes], dout[kStages][kDoutBytes];
  unsigned char ds[kStages][kTileBytes<kTileN, kTileM>];        // keys are the rows
  float dq[2][kPieceFloats<kHeadDim>];                            // pieces on their way to global memory
  float lse_log2[kStages][kTileM], delta[kStages][kTileM];
  u64 kv_full, kv_empty;
  u64 full[kStages], empty[kStages];
  u64 ds_full[kStages], ds_empty[kStages];
  u64 dq_full[2], dq_empty[2];
  Step step[kStages], ds_step[kStages], dq_step[2];
  int2 range[kTileN], item[8];                                    // of the key rows, and of the key side's warps

  __device__ __forceinline__ void init() {
    barrier_init(&kv_full, 1), barrier_init(&kv_empty, 12);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&full[s], 1), barrier_init(&empty[s], 8);
      barrier_init(&ds_full[s], 8), barrier_init(&ds_empty[s], 4);
    }
    for (int s = 0; s < 2; ++s) barrier_init(&dq_full[s], 4), barrier_init(&dq_empty[s], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// The query heads of a kv head are done in parts: `parts` are there of all kv heads together, of `heads` query heads each.
struct BackwardSize { int q_rows, k_rows, stats_rows, num_tiles, parts, last_parts, heads, group; };

// The producer, one warp: for every tile of keys of this block, and every query head of a part, the query tiles in sight.
// Rising; or kFalling, so that under a causal mask all tiles of keys begin together and need not wait for each other's turn.
template <bool kFalling, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void produce_backward(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, const TensorMap* map_q, const TensorMap* map_k,
    const TensorMap* map_v, const TensorMap* map_dout, const float* stats, const int2* query_ranges,
    const int* tile_order, int* counter, BackwardSize size) {
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>;
  constexpr int kTileN = Shared::kTileN;
  const int lane = threadIdx.x % kWarp, num_work = size.num_tiles * size.parts;
  Ring<kStages> ring = {0, 1};
  u32 kv_parity = 1;

  for (int work = blockIdx.x; work < num_work; ) {
    int next_work = 0;
    if (lane == 0) {                                   // whoever gets the last number leaves the counter as it was
      next_work = atomicAdd(counter, 1);
      if (next_work == num_work - 1) *counter = 0;
      next_work += gridDim.x;
    }
    const WorkItem item = work_item(work, tile_order, size.num_tiles, size.parts, size.last_parts);
    // Ranges are read again and again from the cache: there are no registers to keep them.
    auto range = [&](int i) { return range_of(query_ranges, item.tile * kTileN + i * kWarp + lane, size.k_rows); };
    auto next_in_sight = [&](int row) {
      int nearest = kNone;
      #pragma unroll 1
      for (int i = 0; i < kTileN / kWarp; ++i) {
        const int2 r = range(i);
        const int begin = kFalling ? r.x : max(r.x, row + kTileM), end = kFalling ? min(r.y, row) : r.y;
        if (begin < end) nearest = min(nearest, kFalling ? -end : begin);
      }
      nearest = __reduce_min_sync(0xffffffffu, nearest);
      return nearest == kNone ? kNone : (kFalling ? -nearest - 1 : nearest) / kTileM * kTileM;
    };
    constexpr int kBefore = kFalling ? kNone : -kTileM;
    int row = next_in_sight(kBefore), head = item.head * size.heads;
    u32 flags = row == kNone ? kNothing | kLast : kFirst;
    do {
      const int this_head = head;
      int next = kNone;
      if (row != kNone) {
        #pragma unroll 1
        for (int i = 0; i < kTileN / kWarp; ++i) {
          const int2 r = range(i);
          const bool hides = r.x > row || r.y < row + kTileM;      // padding too: no lse bounds its scores
          if (__any_sync(0xffffffffu, touches(r, row, kTileM))) flags |= kSees << i / 2 * 2;
          if (__any_sync(0xffffffffu, hides)) flags |= kMasked << i / 2 * 2;
        }
        next = next_in_sight(row);
        if (next == kNone && ++head < (item.head + 1) * size.heads) next = next_in_sight(kBefore);
        if (next == kNone) flags |= kLast;
      }
      u64* const full = &shared.full[ring.stage];
      barrier_wait(&shared.empty[ring.stage], ring.parity);
      if (lane == 0) {
        shared.step[ring.stage] = {row, this_head, item.tile, flags};
        if (row == kNone) {
          barrier_arrive(full);
        } else {
          const u32 lse_log2 = this_head * size.stats_rows + row;
          const u32 delta = lse_log2 + size.parts * size.heads * size.stats_rows;
          barrier_expect(full, Shared::kQBytes + Shared::kDoutBytes + 8 * kTileM);
          copy_tile<kTileM, kHeadDim>(shared.q[ring.stage], map_q, this_head, row, full);
          copy_bulk(shared.lse_log2[ring.stage], stats + lse_log2, 4 * kTileM, full);
          copy_tile<kTileM, kVHeadDim>(shared.dout[ring.stage], map_dout, this_head, row, full);
          copy_bulk(shared.delta[ring.stage], stats + delta, 4 * kTileM, full);
        }
      }
      ring.advance();
      if (flags & kFirst) {
        barrier_wait(&shared.kv_empty, kv_parity);
        kv_parity ^= 1;
        if (lane == 0) {
          barrier_expect(&shared.kv_full, Shared::kKBytes + Shared::kVBytes);
          copy_tile<kTileN, kHeadDim>(shared.k, map_k, item.head * size.heads / size.group, item.tile * kTileN, &shared.kv_full);
          copy_tile<kTileN, kVHeadDim>(shared.v, map_v, item.head * size.heads / size.group, item.tile * kTileN, &shared.kv_full);
        }
      }
      row = next;
      flags = 0;
    } while (row != kNone);
    work = __shfl_sync(0xffffffffu, next_work, 0);
  }
  barrier_wait(&shared.empty[ring.stage], ring.parity);
  if (lane == 0) {
    shared.step[ring.stage].flags = kEnd;
    barrier_arrive(&shared.full[ring.stage]);
  }
}

// What follows from the number of the thread, computed where it is needed: there are no registers to keep it.
struct Me { int group, warp, lane; };
__device__ __forceinline__ Me me() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return {thread / 128, thread / kWarp % 4, thread % kWarp};
}

// The query side, one warpgroup: dq = dS k, piece by piece.
template <typename T, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void serve_queries(BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared) {
  constexpr int kTileN = 128, kCols = kPieceCols<kHeadDim>, kAll = kTileM / 64 * kPieces<kHeadDim>;
  auto arrive = [](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  Ring<kStages> ring = {0, 0};
  Ring<2> pieces = {0, 1};

  while (true) {
    barrier_wait(&shared.ds_full[ring.stage], ring.parity);
    const u32 flags = __shfl_sync(0xffffffffu, shared.ds_step[ring.stage].flags, 0);
    if (flags & kNothing) {
      arrive(&shared.ds_empty[ring.stage]);
      ring.advance();
      continue;
    }
    #pragma unroll 1
    for (int piece = 0; piece < (flags & kEnd ? 1 : kAll); ++piece) {
      const int m = piece / kPieces<kHeadDim>, first_col = piece % kPieces<kHeadDim> * kCols;
      const u64 a = descriptor(shared.ds[ring.stage] + m * kTileN * kRowBytes, 16);
      const u64 b = descriptor(shared.k + first_col / kSlab * kTileN * kRowBytes, kTileN * kRowBytes);
      float sum[kCols / 8][4];
      wgmma_begin();
      #pragma unroll
      for (int n = 0; n < kTileN; n += 16)
        Wgmma<T, kCols>::template shared<1, 1>(sum, a + n * kRowBytes / 16, b + n * kRowBytes / 16, n > 0);
      wgmma_commit();
      wgmma_wait<0>(sum);
      if (piece == kAll - 1 && flags & kLast) arrive(&shared.kv_empty);

      barrier_wait(&shared.dq_empty[pieces.stage], pieces.parity);
      float4* const staging = (float4*)shared.dq[pieces.stage] + threadIdx.x % 128;
      #pragma unroll
      for (int n = 0; n < kCols / 8; ++n) staging[n * 128] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
      if (threadIdx.x % 128 == 0) shared.dq_step[pieces.stage] = shared.ds_step[ring.stage];
      publish_to_async();
      __syncwarp();
      arrive(&shared.dq_full[pieces.stage]);
      pieces.advance();
    }
    if (flags & kEnd) break;
    arrive(&shared.ds_empty[ring.stage]);
    ring.advance();
  }
}

// One warp has the copy engine add the pieces of dq to global memory: in any order, or (kOrdered) every tile of queries gets
// its sums from tiles of keys in rising order, for the same bits on every run.
// turns (num_heads, stats_rows / 64): the tile of keys whose turn it is; zero at first, which is no news for anyone.
template <bool kOrdered, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void add_queries(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, float* dq_sum, const int2* key_ranges, int* turns,
    BackwardSize size) {
  constexpr int kTileN = 128, kAll = kTileM / 64 * kPieces<kHeadDim>;
  const int lane = threadIdx.x % kWarp;
  Ring<2> pieces = {0, 0};
  while (true) {
    Step step;
    int* turn;
    for (int piece = 0; piece < kAll; ++piece) {
      barrier_wait(&shared.dq_full[pieces.stage], pieces.parity);
      step = shared.dq_step[pieces.stage];
      if (step.flags & kEnd) return;
      const size_t block = (size_t)step.head * (size.stats_rows / 64) + step.row / 64;
      turn = turns + block;
      auto is_my_turn = [&] {
        int now;
        asm volatile("ld.relaxed.gpu.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
        return __shfl_sync(0xffffffffu, now, 0) == step.tile;
      };
      if (kOrdered && piece == 0 && !is_my_turn()) {
        int first = kNone;
        for (int i = lane; i < kTileM; i += kWarp) {
          const int2 range = range_of(key_ranges, step.row + i, size.q_rows);
          if (!is_empty(range)) first = min(first, range.x / kTileN);
        }
        if (__reduce_min_sync(0xffffffffu, first) < step.tile) while (!is_my_turn());
      }
      if (lane == 0) {
        float* const target = dq_sum + (block * kPieces<kHeadDim> + piece) * kPieceFloats<kHeadDim>;
        add_bulk(target, shared.dq[pieces.stage], 4 * kPieceFloats<kHeadDim>);
        add_commit();
        add_wait_read();
        barrier_arrive(&shared.dq_empty[pieces.stage]);
      }
      __syncwarp();
      pieces.advance();
    }
    if (kOrdered) {
      int next = kNone;
      for (int i = lane; i < kTileM; i += kWarp) {
        const int2 range = range_of(key_ranges, step.row + i, size.q_rows);
        if (range.y > (step.tile + 1) * kTileN) next = min(next, max(range.x / kTileN, step.tile + 1));
      }
      next = __reduce_min_sync(0xffffffffu, next);
      if (lane == 0) {
        add_wait();
        asm volatile("st.relaxed.gpu.s32 [%0], %1;" :: "l"(turn), "r"(next) : "memory");
      }
    }
  }
}

// dq (q_rows, num_heads, kHeadDim) = dq_sum * scale, rounded. Launch: grid (stats_rows / 64, num_heads), block 128.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(128) thd_attn_round_sm90(T* __restrict__ dq, const float4* __restrict__ dq_sum, float scale,
                                                           int q_rows) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int row = blockIdx.x * 64 + warp * 16 + lane / 4, pitch = gridDim.y * kHeadDim;
  T* const out = dq + (size_t)row * pitch + blockIdx.y * kHeadDim;
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
    store_row<0>(out + piece * kPieceCols<kHeadDim>, sum, scale, row < q_rows);
    store_row<1>(out + piece * kPieceCols<kHeadDim> + 8 * pitch, sum, scale, row + 8 < q_rows);
  }
}

// The key side, one warpgroup: 64 keys.
template <typename T, typename Grad, int kHeadDim, int kVHeadDim, int kTileM, int kStages>
__device__ __forceinline__ void serve_keys(
    BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>& shared, Grad* dk, Grad* dv,
    const int2* query_ranges, BackwardSize size, float softmax_scale) {
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>;
  constexpr int kTileN = Shared::kTileN, kBlocks = kTileM / 8;
  auto mine = [&](const unsigned char* tile) { return tile + (me().group - 1) * 64 * kRowBytes; };
  Ring<kStages> ring = {0, 0};
  u32 kv_parity = 0;
  auto arrive = [&](u64* barrier) { if (me().lane == 0) barrier_arrive(barrier); };
  u32 flags;
  auto look = [&] {
    barrier_wait(&shared.full[ring.stage], ring.parity);
    flags = __shfl_sync(0xffffffffu, shared.step[ring.stage].flags, 0);
  };
  auto sees = [&] { return flags & kSees << 2 * (me().group - 1); };
  // Every step is handed over to the query side; score gradients as they are: keys are the rows.
  auto hand_over = [&](auto store) {
    barrier_wait(&shared.ds_empty[ring.stage], ring.parity ^ 1);
    const auto [group, warp, lane] = me();
    const int side = group - 1;
    if (side == 0 && warp == 0 && lane == 0) shared.ds_step[ring.stage] = shared.step[ring.stage];
    store(shared.ds[ring.stage] + (side * 64 + warp * 16 + lane % 16) * kRowBytes);
    publish_to_async();
    __syncwarp();
    arrive(&shared.ds_full[ring.stage]);
  };
  auto hand_over_ds = [&](const u32 (&ds)[1][kTileM / 16][4]) {
    hand_over([&](unsigned char* row) {
      const int lane = me().lane;
      #pragma unroll
      for (int i = 0; i < kTileM / 16; ++i)
        store_matrices(row + i / 4 * kTileN * kRowBytes + ((i % 4 * 2 + lane / 16) ^ lane % 8) * 16, ds[0][i]);
    });
  };
  // The two warpgroups take turns in starting matrix products, twice a step, so that one's run under the other's arithmetic.
  auto my_turn = [] { asm volatile("bar.sync %0, 256;" :: "r"(1 + me().group) : "memory"); };
  auto next_turn = [] { asm volatile("bar.arrive %0, 256;" :: "r"(4 - me().group) : "memory"); };
  if (me().group == 2) next_turn();
  auto pass = [&] {                                   // out of sight of these 64 keys
    if (flags & kLast) arrive(&shared.kv_empty);
    u32 zeros[1][kTileM / 16][4];
    #pragma unroll
    for (int i = 0; i < kTileM / 4; ++i) zeros[0][i / 4][i % 4] = 0;
    for (int i = 0; i < 2; ++i) my_turn(), next_turn();
    hand_over_ds(zeros);
    arrive(&shared.empty[ring.stage]);
    ring.advance();
  };
  const float scale_log2 = softmax_scale * kLog2e;

  while (true) {
    look();
    if (flags & (kNothing | kEnd)) hand_over([](unsigned char*) {});
    if (flags & kEnd) break;
    const auto [group, warp, lane] = me();
    const int side = group - 1;
    int2* const range = shared.range + side * 64 + warp * 16;
    int2& item = shared.item[side * 4 + warp];          // first key of the warp, kv head
    if (lane == 0) item = {shared.step[ring.stage].tile * kTileN + side * 64 + warp * 16, shared.step[ring.stage].head / size.group};
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
      flags = 0;
    }
    while (!(flags & kLast)) {
      look();
      if (!sees()) {
        pass();
        continue;
      }
      float p[kBlocks][4];
      wgmma_begin();
      start_scores<T, kHeadDim, kTileN, kTileM>(p, mine(shared.k), shared.q[ring.stage]);
      wgmma_commit();
      wgmma_wait<0>(p);
      u32 dscore[1][kTileM / 16][4];
      while (true) {
        // Probabilities from the saved lse, transposed, and dv += P^T dout.
        const auto [group, warp, lane] = me();
    const int side = group - 1;
        const float* const lse_log2 = shared.lse_log2[ring.stage] + lane % 4 * 2;
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const float2 lse = *(const float2*)(lse_log2 + n * 8);
          #pragma unroll
          for (int e = 0; e < 4; ++e) p[n][e] = exp2_fast(fmaf(p[n][e], scale_log2, -(e % 2 ? lse.y : lse.x)));
        }
        if (flags & kMasked << 2 * side) {
          const int2* const range = shared.range + side * 64 + warp * 16 + lane / 4;
          const int2 r[2] = {range[0], range[8]};
          const int first_query = shared.step[ring.stage].row;
          #pragma unroll
          for (int i = 0; i < 4 * kBlocks; ++i)
            if (!contains(r[i % 4 / 2], first_query + i / 4 * 8 + lane % 4 * 2 + i % 2)) p[i / 4][i % 4] = 0.f;
        }
        u32 probability[1][kTileM / 16][4];
        round_to_operand<T>(probability, *(float(*)[1][kBlocks][4])&p);
        float dp[kBlocks][4];
        my_turn();
        wgmma_begin();
        start_weighted_sum<T, kVHeadDim, kTileM>(sum_dv, probability, shared.dout[ring.stage]);
        start_scores<T, kVHeadDim, kTileN, kTileM>(dp, mine(shared.v), shared.dout[ring.stage]);
        wgmma_commit();
        next_turn();
        wgmma_wait<0>(dp);
        pin(sum_dv);
        if (flags & kLast) arrive(&shared.kv_empty);

        // dS = P (dP - delta).
        const float* const deltas = shared.delta[ring.stage] + me().lane % 4 * 2;
        #pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const float2 delta = *(const float2*)(deltas + n * 8);
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 weight = unpack_probabilities<T>(probability[0][n / 2][n % 2 * 2 + r]);
            dp[n][2 * r] = weight.x * (dp[n][2 * r] - delta.x);
            dp[n][2 * r + 1] = weight.y * (dp[n][2 * r + 1] - delta.y);
          }
        }
        round_to_operand<T>(dscore, *(float(*)[1][kBlocks][4])&dp);
        hand_over_ds(dscore);

        // dk += dS^T q, with the scores of the next step behind it.
        ring.advance();
        if (flags & kLast) break;
        look();
        if (!sees()) break;
        my_turn();
        wgmma_begin();
        start_weighted_sum<T, kHeadDim, kTileM>(sum_dk, dscore, shared.q[ring.back(1).stage]);
        wgmma_commit();
        start_scores<T, kHeadDim, kTileN, kTileM>(p, mine(shared.k), shared.q[ring.stage]);
        wgmma_commit();
        next_turn();
        wgmma_wait<1>(sum_dk);
        arrive(&shared.empty[ring.back(1).stage]);
        wgmma_wait<0>(p);
      }
      my_turn();
      wgmma_begin();
      start_weighted_sum<T, kHeadDim, kTileM>(sum_dk, dscore, shared.q[ring.back(1).stage]);
      wgmma_commit();
      next_turn();
      wgmma_wait<0>(sum_dk);
      arrive(&shared.empty[ring.back(1).stage]);
      if (!sees()) pass();
    }
    const auto [last_group, last_warp, last_lane] = me();
    const int2 mine_done = shared.item[(last_group - 1) * 4 + last_warp];
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
// multiple of kTileM, that dq_sum (num_heads, stats_rows / 64, pieces) is in the order of thd_attn_round_sm90, and that fp32 dk
// and dv are added to what is there.
// kOrdered: the same bits on every run; then parts are whole groups, tile_order is rising, and no block waits for a later one.
// turns (num_heads, stats_rows / 64): zero. Maps of boxes of kTileM rows of q, dout and 128 rows of k, v; counter: one int, zero, and zero again afterwards.
// Launch: grid at most num_tiles * parts and one block per multiprocessor, block 512.
template <typename T, typename Grad, int kHeadDim, int kVHeadDim, int kTileM, int kStages, bool kOrdered>
__global__ void __launch_bounds__(512, 1) thd_attn_bwd_sm90(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout, Grad* __restrict__ dk,
    Grad* __restrict__ dv, float softmax_scale, float* __restrict__ dq_sum,
    int* __restrict__ turns, const float* __restrict__ stats, const int2* __restrict__ key_ranges,
    const int2* __restrict__ query_ranges, const int* __restrict__ tile_order, int* __restrict__ counter, int q_rows,
    int k_rows, int stats_rows, int num_tiles, int parts, int last_parts, int heads, int group) {
  using Shared = BackwardShared<kHeadDim, kVHeadDim, kTileM, kStages>;
  extern __shared__ unsigned char shared_bytes[];
  Shared& shared = *(Shared*)(shared_bytes + (-shared_address(shared_bytes) & 1023));  // keeps loads from shared memory known as such
  const BackwardSize size = {q_rows, k_rows, stats_rows, num_tiles, parts, last_parts, heads, group};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  constexpr int kQueryRegisters = kHeadDim % 64 ? 80 : 64, kKeyRegisters = kHeadDim % 64 ? 200 : 208;
  if (warpgroup == 0) {
    registers_give<32>();
    if (threadIdx.x < kWarp)
      produce_backward<kOrdered>(shared, &map_q, &map_k, &map_v, &map_dout, stats, query_ranges, tile_order, counter, size);
    else if (threadIdx.x < 2 * kWarp)
      add_queries<kOrdered>(shared, dq_sum, key_ranges, turns, size);
  } else if (warpgroup == 3) {
    registers_give<kQueryRegisters>();
    serve_queries<T>(shared);
  } else {
    registers_take<kKeyRegisters>();
    serve_keys<T>(shared, dk, dv, query_ranges, size, softmax_scale);
  }
}
