// The Hopper attention forward (sm_90a): a producer and its consumers. Begin to read at the end, with the kernel
// thd_attn_fwd_sm90. softmax.cuh has the softmax of the consumers.

#pragma once

#include "kernels/hopper/softmax.cuh"
#include "kernels/hopper/trees.cuh"
#include "kernels/split_kv.cuh"

// What the producer tells the consumers of a query tile, and of each key tile. first, next: the flags of the key tile
// that comes next, so that consumers need not wait for its arrival between products; kLast if there is none. word: the
// tile or, with kSplitKv, a packed KvSplit. work: the number of the tile's first split.
struct QueryTile { int word, head; u32 first; int work; };
struct KeyTile { int row; u32 next; };

template <int kHeadDim, int kVHeadDim, int kTileN, int kConsumers, int kQStages, int kStages>
struct ForwardShared {
  static constexpr int kTileM = 64 * kConsumers;
  static_assert(kStages >= 2, "values of two tiles back are still read while the next scores are computed");
  static_assert(kTileN % 16 == 0, "probabilities are an operand of whole fragments of 16 keys");
  static_assert(kConsumers <= 3, "the registers are enough for three consumers at most");
  static constexpr int kQBytes = kTileBytes<kTileM, kHeadDim>;
  static constexpr int kKBytes = kTileBytes<kTileN, kHeadDim>, kVBytes = kTileBytes<kTileN, kVHeadDim>;
  unsigned char q[kQStages][kQBytes];
  unsigned char k[kStages][kKBytes];
  unsigned char v[kStages][kVBytes];
  u64 q_full[kQStages], q_empty[kQStages];
  u64 k_full[kStages], k_empty[kStages];
  u64 v_full[kStages], v_empty[kStages];
  QueryTile query_tile[2 * kQStages];                 // read after the queries are released, as `range` is
  KeyTile key_tile[kStages];
  int2 range[2 * kQStages][kTileM];                   // of the query rows; consumers are short of registers

  __device__ __forceinline__ void init() {
    for (int s = 0; s < kQStages; ++s) barrier_init(&q_full[s], 1), barrier_init(&q_empty[s], 4 * kConsumers);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&k_full[s], 1), barrier_init(&k_empty[s], 4 * kConsumers);
      barrier_init(&v_full[s], 1), barrier_init(&v_empty[s], 4 * kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// The same with query_ends of the keys of every stage, for packs with prefix trees.
template <typename Shared, int kTileN, int kStages, bool kTrees> struct ForwardSharedWithEnds : Shared {
  alignas(16) int ends[kStages][kTileN];              // bulk copies write them
  __device__ __forceinline__ auto all_ends() { return ends; }
};
template <typename Shared, int kTileN, int kStages>
struct ForwardSharedWithEnds<Shared, kTileN, kStages, false> : Shared {
  __device__ __forceinline__ int (*all_ends())[kTileN] { return nullptr; }
};

// row_heads: heads in a row of q and out, of which num_heads are computed here.
struct ForwardSize { int q_rows, num_tiles, num_heads, group, together, last_heads, row_heads; };
CHECK_ForwardSize;

// The producer, one warp. It loads every query tile of this thread block and the key tiles that it sees, with keys one
// tile ahead of values.
template <bool kSplitKv, bool kTrees, int kHeadDim, int kVHeadDim, int kTileN, int kConsumers, int kQStages,
          int kStages>
__device__ __forceinline__ void produce_forward(
    ForwardShared<kHeadDim, kVHeadDim, kTileN, kConsumers, kQStages, kStages>& shared, const TensorMap* map_q,
    const TensorMap* map_k, const TensorMap* map_v, const int2* key_ranges, const int* tile_order, int* counter,
    ForwardSize size, Trees trees, int (*ends)[kTileN]) {
  using Shared = ForwardShared<kHeadDim, kVHeadDim, kTileN, kConsumers, kQStages, kStages>;
  constexpr int kTileM = Shared::kTileM, kRows = kTileM / kWarp, kEndBytes = 4 * kTileN;
  const int lane = threadIdx.x % kWarp, num_work = (kSplitKv ? tile_order[0] : size.num_tiles) * size.num_heads;
  Ring<kQStages> q_ring = {0, 1};
  Ring<kStages> k_ring = {0, 1}, v_ring = {0, 1};
  // Behind the last split the order is not set, which initcheck reports. The loop below ends before it uses the value.
  auto work_tile_of = [&](int work) {                 // with kSplitKv, read before the number of splits is known
    if (kSplitKv) return WorkTile{tile_order[1 + work / size.num_heads], work % size.num_heads};
    if (work >= num_work) return WorkTile{};
    return scheduled_tile(work, tile_order, size.num_tiles, size.num_heads, size.together, size.last_heads);
  };
  auto load_values = [&](int kv_head, int row) {
    barrier_wait(&shared.v_empty[v_ring.stage], v_ring.parity);
    if (lane == 0) {
      barrier_expect(&shared.v_full[v_ring.stage], Shared::kVBytes);
      copy_tile<kTileN, kVHeadDim>(shared.v[v_ring.stage], map_v, kv_head, row, &shared.v_full[v_ring.stage]);
    }
    v_ring.advance();
  };

  // Draws the next number of work with the last key tile. That is early enough for its latency, and so late that the
  // thread block that finishes first gets it. The thread block that draws the last number resets the counter to zero.
  int next_work = 0;
  auto draw_after = [&](int next_row) {
    if (next_row != kNone || lane > 0) return;
    next_work = atomicAdd(counter, 1);
    if (next_work == num_work - 1) *counter = 0;
    next_work += gridDim.x;
  };

  WorkTile work_tile = work_tile_of(blockIdx.x);
  for (int work = blockIdx.x; work < num_work; ) {
    const auto [word, head] = work_tile;
    const KvSplit split = kSplitKv ? unpacked(word) : KvSplit{word, 0, 1};
    const int tile = split.tile;
    const int kv_head = head / size.group;
    int2 range[kRows];
    #pragma unroll
    for (int i = 0; i < kRows; ++i) range[i] = range_of(key_ranges, tile * kTileM + i * kWarp + lane, size.q_rows);
    if (kSplitKv && split.count != 1) cut<kTileN>(range, split, span_of(range));
    if constexpr (kTrees) {                           // keys take longer to find, while copies are on their way
      barrier_wait(&shared.q_empty[q_ring.stage], q_ring.parity);
      if (lane == 0) {
        barrier_expect_only(&shared.q_full[q_ring.stage], Shared::kQBytes);
        copy_tile<kTileM, kHeadDim>(shared.q[q_ring.stage], map_q, head, tile * kTileM, &shared.q_full[q_ring.stage]);
      }
    }
    auto first_in_ranges = [&](int from) {
      int first = kNone;
      #pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = max(range[i].x, from);
        first = min(first, row < range[i].y ? row : kNone);
      }
      return __reduce_min_sync(0xffffffffu, first);
    };
    auto flags_in_ranges = [&](int row) {
      u32 flags = row == kNone ? kLast : 0;
      if (flags) return flags;
      #pragma unroll
      for (int c = 0; c < kConsumers; ++c) {
        const int2 a = range[2 * c], b = range[2 * c + 1];
        auto hides = [&](int2 r) { return !is_empty(r) && (r.x > row || r.y < row + kTileN); };
        if (__any_sync(0xffffffffu, touches(a, row, kTileN) || touches(b, row, kTileN))) flags |= kSees << 2 * c;
        if (__any_sync(0xffffffffu, hides(a) || hides(b))) flags |= kMasked << 2 * c;
      }
      return flags;
    };
    KeyTiles<kTileN, kConsumers == 3 ? 1 : 4, kTrees> key_tiles(trees, tile * kTileM, range);
    auto first_in_sight = [&](int from) {
      if constexpr (kTrees) return key_tiles.find(from, first_in_ranges);
      else return first_in_ranges(from);
    };
    auto flags_of = [&](int row) {
      if constexpr (kTrees)
        return row == kNone ? kLast : key_tiles.template flags<kConsumers>(row, [&] { return flags_in_ranges(row); });
      else return flags_in_ranges(row);
    };
    int row = first_in_sight(0), row_before = kNone;
    const u32 first = flags_of(row);
    draw_after(row);

    if constexpr (!kTrees) barrier_wait(&shared.q_empty[q_ring.stage], q_ring.parity);
    #pragma unroll
    for (int i = 0; i < kRows; ++i) shared.range[q_ring.double_stage_to_fill()][i * kWarp + lane] = range[i];
    __syncwarp();
    if (lane == 0) {
      shared.query_tile[q_ring.double_stage_to_fill()] = {word, head, first, work - split.index * size.num_heads};
      if constexpr (kTrees) {
        barrier_arrive(&shared.q_full[q_ring.stage]);
      } else {
        barrier_expect(&shared.q_full[q_ring.stage], Shared::kQBytes);
        copy_tile<kTileM, kHeadDim>(shared.q[q_ring.stage], map_q, head, tile * kTileM, &shared.q_full[q_ring.stage]);
      }
    }
    q_ring.advance();
    while (row != kNone) {
      if constexpr (kTrees) {
        barrier_wait(&shared.k_empty[k_ring.stage], k_ring.parity);
        if (lane == 0) {
          barrier_expect_only(&shared.k_full[k_ring.stage], Shared::kKBytes + kEndBytes);
          copy_tile<kTileN, kHeadDim>(shared.k[k_ring.stage], map_k, kv_head, row, &shared.k_full[k_ring.stage]);
          copy_bulk(ends[k_ring.stage], trees.query_ends + row, kEndBytes, &shared.k_full[k_ring.stage]);
        }
      }
      const int next = first_in_sight(row + kTileN);
      const u32 flags = flags_of(next);
      draw_after(next);
      if constexpr (!kTrees) barrier_wait(&shared.k_empty[k_ring.stage], k_ring.parity);
      if (lane == 0) {
        shared.key_tile[k_ring.stage] = {row, flags};
        if constexpr (kTrees) {
          barrier_arrive(&shared.k_full[k_ring.stage]);
        } else {
          barrier_expect(&shared.k_full[k_ring.stage], Shared::kKBytes);
          copy_tile<kTileN, kHeadDim>(shared.k[k_ring.stage], map_k, kv_head, row, &shared.k_full[k_ring.stage]);
        }
      }
      k_ring.advance();
      if (row_before != kNone) load_values(kv_head, row_before);
      row_before = row;
      row = next;
    }
    work = __shfl_sync(0xffffffffu, next_work, 0);
    work_tile = work_tile_of(work);
    if (row_before != kNone) load_values(kv_head, row_before);
  }
  barrier_wait(&shared.q_empty[q_ring.stage], q_ring.parity);
  if (lane == 0) {
    shared.query_tile[q_ring.double_stage_to_fill()].word = -1;
    barrier_arrive(&shared.q_full[q_ring.stage]);
  }
}

// Sets the scores of keys that are not in the range of a row to -inf.
template <int kBlocks>
__device__ __forceinline__ void hide(float (&score)[kBlocks][4], const int2* warp_range, int first_key) {
  const int lane = threadIdx.x % kWarp;
  const int2 range[2] = {warp_range[lane / 4], warp_range[lane / 4 + 8]};
  #pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i)
    if (!contains(range[i % 4 / 2], first_key + i / 4 * 8 + lane % 4 * 2 + i % 2)) score[i / 4][i % 4] = -kInfinity;
}

// The same in prefix trees, also for keys whose subtrees end before a row. first_row: the warp's first row. Afterwards
// the keys' ends, in shared memory, have been read. With caps, registers are too short for two branches, and with wide
// heads for both at once.
template <bool kCaps, int kHeadDim, int kBlocks>
__device__ __forceinline__ void hide_in_trees(float (&score)[kBlocks][4], u32 flags, const int2* warp_range,
                                              int first_key, int first_row, const int* ends) {
  if (flags & (kCaps ? kMasked | kEnded : kMasked)) hide(score, warp_range, first_key);
  if (!(flags & (kCaps ? kMasked | kEnded : kEnded))) return;
  if (kCaps && kHeadDim > 128) pin(score);
  hide_ended(score, first_row + threadIdx.x % kWarp / 4, ends);
  publish_to_async(), __syncwarp();                   // an arrival does not wait for loads
}

template <int kBlocks>
__device__ __forceinline__ void scale_rows(float (&acc)[kBlocks][4], float2 factor) {
  #pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) acc[i / 4][i % 4] *= i % 4 < 2 ? factor.x : factor.y;
}

// Merges one (kHalf) of the two rows that this thread shares with its quad: row = row * others_scale + acc * scale.
// With a scale of 0 the row stays as it is.
template <int kHalf, int kBlocks>
__device__ __forceinline__ void merge_row(float* row, float others_scale, const float (&acc)[kBlocks][4], float scale) {
  #pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    const float4 x = four_columns<kHalf>(acc, n, scale);
    float4* const sum = (float4*)(row + first_of_four(n));
    if (scale == 0.f) continue;
    const float4 y = *sum;
    *sum = make_float4(x.x + y.x * others_scale, x.y + y.y * others_scale, x.z + y.z * others_scale,
                       x.w + y.w * others_scale);
  }
}

// Waits for so many cycles, until the consumer before has its first scores. Consumers in step would stay so: all would
// take exponentials at the same time, while the tensor cores wait.
__device__ __forceinline__ void begin_in_turn(u32 cycles) {
  const u32 begin = clock();
  while ((u32)clock() - begin < cycles);
}

// A consumer, one warpgroup: 64 query rows. While it takes its exponentials, the tensor cores multiply the previous
// probabilities with their values. kQInRegisters: queries are read from registers, as shared memory is busy with keys
// and values.
template <bool kQInRegisters, bool kLazyRowMax, bool kSinks, bool kSplitKv, bool kTrees, typename T, typename Out,
          bool kCaps, int kHeadDim, int kVHeadDim, int kTileN, int kConsumers, int kQStages, int kStages>
__device__ __forceinline__ void consume_forward(
    ForwardShared<kHeadDim, kVHeadDim, kTileN, kConsumers, kQStages, kStages>& shared, int consumer, Out* out,
    float* lse, float* max_logits, KvPartials splits, ForwardSize size, Logits<kCaps> logits, const float* sinks,
    const int (*ends)[kTileN]) {
  constexpr int kTileM = 64 * kConsumers, kBlocks = kTileN / 8, kOutBlocks = kVHeadDim / 8;
  const int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp;
  Ring<kQStages> q_ring = {0, 0};
  Ring<kStages> ring = {0, 0};
  auto arrive = [&](u64* barrier) { if (lane == 0) barrier_arrive(barrier); };

  for (bool begins = true; ; begins = false) {
    barrier_wait(&shared.q_full[q_ring.stage], q_ring.parity);
    const QueryTile& query_tile = shared.query_tile[q_ring.double_stage()];
    const int word = __shfl_sync(0xffffffffu, query_tile.word, 0);
    if (word < 0) break;
    const int tile = kSplitKv ? unpacked(word).tile : word;
    const unsigned char* const my_q = shared.q[q_ring.stage] + consumer * 64 * kRowBytesOf<kHeadDim>;
    const int first_row = tile * kTileM + consumer * 64 + warp * 16;
    const int2* const range = shared.range[q_ring.double_stage()] + consumer * 64 + warp * 16;
    ScoreRows<T, kHeadDim, kTileM, kQInRegisters> queries;
    queries.load(my_q);
    float acc_out[kOutBlocks][4] = {};
    Softmax<kCaps, kLazyRowMax> softmax = {logits};

    u32 mine = 0, next = uniform(query_tile.first);
    bool last = next & kLast;
    int first_key = 0;
    auto next_key_tile = [&] {
      mine = next >> 2 * consumer;
      barrier_wait(&shared.k_full[ring.stage], ring.parity);
    };
    auto look_ahead = [&] {                           // while scores are computed
      first_key = shared.key_tile[ring.stage].row;
      next = uniform(shared.key_tile[ring.stage].next);
      last = next & kLast;
    };
    auto release_keys = [&] {
      arrive(&shared.k_empty[ring.stage]);
      if (last && !kQInRegisters) arrive(&shared.q_empty[q_ring.stage]);
    };
    auto pass = [&] {                                 // these 64 rows do not see the tile
      look_ahead(), release_keys();
      barrier_wait(&shared.v_full[ring.stage], ring.parity);
      arrive(&shared.v_empty[ring.stage]);
      ring.advance();
    };
    if constexpr (kQInRegisters) publish_to_async(), __syncwarp();  // an arrival does not wait for loads
    if (last || kQInRegisters) arrive(&shared.q_empty[q_ring.stage]);
    while (!last) {
      next_key_tile();
      if (!(mine & kSees)) {
        pass();
        continue;
      }
      float score[kBlocks][4];
      auto add_scores = [&] {
        const bool late = kTrees && (kCaps || mine & kEnded);  // ends are read
        if (!late) release_keys();
        const float below = kCaps ? depth(score) : 0.f;
        if (!kTrees && mine & kMasked) hide(score, range, first_key);
        if (kTrees) hide_in_trees<kCaps, kHeadDim>(score, mine, range, first_key, first_row, ends[ring.stage]);
        if (late) release_keys();
        softmax.add(score, below, mine & (kTrees ? kMasked | kEnded : kMasked));
      };
      begin_in_turn(begins ? consumer * kTileN * kHeadDim / 32 : 0), begins = false;
      wgmma_begin();
      queries.template start<false, kTileN>(score, shared.k[ring.stage]);
      wgmma_commit();
      look_ahead();
      wgmma_wait<0>(score);
      add_scores();
      bool pv_running = false;                        // the values of two tiles back are being read
      ring.advance();

      u32 probability[1][kTileN / 16][4];
      auto finish_pv = [&] {
        wgmma_wait<0>(acc_out);
        if (pv_running) arrive(&shared.v_empty[ring.back(2).stage]);
        if (softmax.rescale) scale_rows(acc_out, softmax.shrink);
        round_to_operand<T>(probability, *(float(*)[1][kBlocks][4])&score);
      };
      auto start_pv = [&] {
        const Ring<kStages> values = ring.back(1);
        barrier_wait(&shared.v_full[values.stage], values.parity);
        start_weighted_rows<T, kVHeadDim, kTileN>(acc_out, probability, shared.v[values.stage]);
        wgmma_commit();
      };
      while (!last) {
        next_key_tile();
        if (!(mine & kSees)) break;
        finish_pv();
        wgmma_begin();
        queries.template start<false, kTileN>(score, shared.k[ring.stage]);
        wgmma_commit();
        look_ahead();
        start_pv();
        wgmma_wait<1>(score);
        add_scores();
        pv_running = true;
        ring.advance();
      }
      finish_pv();
      wgmma_begin();
      start_pv();
      wgmma_wait<0>(acc_out);
      arrive(&shared.v_empty[ring.back(1).stage]);
      if (!(mine & kSees)) pass();
    }
    q_ring.advance();
    bool padding[2] = {is_empty(range[lane / 4]), is_empty(range[lane / 4 + 8])};
    if constexpr (kSplitKv) {
      constexpr int kWarps = 4 * kConsumers, kQuads = kPartialQuads<1, kOutBlocks>;
      const size_t mine = (size_t)query_tile.work * kWarps + consumer * 4 + warp;
      const size_t pitch = (size_t)size.num_heads * kWarps * kQuads;
      if (unpacked(word).count > 1 && !merge_splits(splits.partials + mine * kQuads, pitch, splits.arrived + mine,
                                                    unpacked(word), *(float(*)[1][kOutBlocks][4])&acc_out, softmax,
                                                    padding))
        continue;
    }

    // Normalise and store, or merge.
    const int head = query_tile.head;
    constexpr bool kMerges = sizeof(Out) == sizeof(float);
    float largest = -kInfinity, scale[2], others_scale[2];
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      const float total = quad_sum(softmax.row_sum[r]), blank = blank_of(range[lane / 4 + 8 * r]);
      auto lse_of_keys = [&] { return (softmax.base[r] + __log2f(total)) * kLn2; };
      const JoinedSink joined = kSinks ? join_sink(lse_of_keys(), sinks[head]) : JoinedSink{0.f, 1.f};
      scale[r] = padding[r] ? blank : joined.keys_weight / total;
      if (!padding[r]) largest = fmaxf(largest, logits.natural(softmax.row_max[r]));
      if constexpr (kMerges) {
        float* const row_lse = lse + (size_t)head * size.q_rows + row;
        const Merge weights = merge_lse(row_lse, lse_of_keys(), !padding[r]);
        scale[r] = padding[r] ? 0.f : weights.these / total, others_scale[r] = weights.others;
      } else if (lane % 4 == 0 && row < size.q_rows)
        lse[(size_t)head * size.q_rows + row] =
            padding[r] ? blank - kInfinity : kSinks ? joined.lse : lse_of_keys();
    }
    const int row = first_row + lane / 4, pitch = size.row_heads * kVHeadDim;
    Out* const out_row = out + (size_t)row * pitch + head * kVHeadDim;
    if constexpr (kMerges) {
      merge_row<0>(out_row, others_scale[0], acc_out, scale[0]);
      merge_row<1>(out_row + 8 * pitch, others_scale[1], acc_out, scale[1]);
    } else {
      store_row<0>(out_row, acc_out, scale[0], row < size.q_rows);
      store_row<1>(out_row + 8 * pitch, acc_out, scale[1], row + 8 < size.q_rows);
    }
    for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
    const size_t index = ((size_t)tile * size.num_heads + head) * kConsumers + consumer;
    if (lane == 0) max_logits[index * 4 + warp] = largest;
  }
}

// Attention of query tiles over all keys in their ranges, with wgmma and TMA. It computes what thd_attn_fwd does.
//
// One persistent thread block runs per multiprocessor. One warp of its first warpgroup is the producer. It finds the
// key tiles that the current query tile sees, and starts the bulk copies some tiles ahead, also across query tiles, so
// that consumers wait little between tiles. The other warpgroups are consumers. Each owns 64 query rows, and keeps
// their scores, probabilities and output in registers, many of which the producer gives up. Exponentials take half as
// long as the matrix products at head dim 128, and as long at 64. So they overlap the consumer's own product with
// values and the products of the other consumers. Bound by the tensor cores and by exponentials.
//
// The contract is that of thd_attn_fwd, except that padding rows of k and v must hold finite numbers: a TMA copy cannot
// skip rows. The pipeline sets them to zero.
//
// racecheck does not follow mbarriers. A full barrier orders the producer's writes before reads. An empty barrier
// orders reads before the next fill, as a warp arrives there once all its lanes have read. Ranges have a second stage
// for late reads.
//
// max_logits (all query tiles, num_heads, 4 * kConsumers)
// maps: boxes of 64 * kConsumers rows of q, and of kTileN rows of k and v
// tile_order: some tiles or all, see scheduled_tile; counter: one int, zero, and zero again after the kernel
// kSplitKv: tile_order comes from thd_attn_split_kv, and all heads of a split come one after another
// trees_or_none: for a pack with prefix trees; not with kSplitKv
// Launch: grid at most tiles * num_heads and one thread block per multiprocessor, block 128 * (1 + kConsumers), shared
// memory kSharedBytes.
template <typename T, typename Out, bool kCaps, bool kSinks, int kHeadDim, int kVHeadDim, int kTileN, int kConsumers,
          int kQStages, int kStages, bool kQInRegisters, bool kLazyRowMax, bool kSplitKv, int kSharedBytes,
          typename... Tree>
__global__ void __launch_bounds__(128 * (1 + kConsumers), 1) thd_attn_fwd_sm90(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, Out* __restrict__ out, float* __restrict__ lse,
    Logits<kCaps> logits, const float* __restrict__ sinks, float* __restrict__ max_logits,
    const int2* __restrict__ key_ranges, const int* __restrict__ tile_order, int* __restrict__ counter,
    KvPartials partials, ForwardSize size, Tree... trees_or_none) {
  constexpr bool kTrees = sizeof...(Tree) > 0;
  const Trees trees = {trees_or_none...};
  using Shared = ForwardShared<kHeadDim, kVHeadDim, kTileN, kConsumers, kQStages, kStages>;
  using WithEnds = ForwardSharedWithEnds<Shared, kTileN, kStages, kTrees>;
  static_assert(same_bytes<sizeof(WithEnds), kSharedBytes>());
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  WithEnds& shared = *(WithEnds*)shared_bytes;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  constexpr bool kMost = kQInRegisters && kHeadDim > 128;  // consumers take the most registers
  if (warpgroup == 0) {
    registers_give<kConsumers == 3 ? 32 : kMost ? 24 : 40>();
    if (threadIdx.x < kWarp)
      produce_forward<kSplitKv, kTrees>(shared, &map_q, &map_k, &map_v, key_ranges, tile_order, counter, size, trees,
                                        shared.all_ends());
  } else {
    registers_take<kConsumers == 3 ? 160 : kMost ? 240 : 232>();
    consume_forward<kQInRegisters, kLazyRowMax, kSinks, kSplitKv, kTrees, T>(
        shared, warpgroup - 1, out, lse, max_logits, partials, size, logits, sinks, shared.all_ends());
  }
}
