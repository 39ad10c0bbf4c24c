// Shared memory of thd_attn_bwd_by_gradient_sm90 (sm_90a), and its producer.

#pragma once

#include "kernels/hopper/cluster.cuh"

constexpr int kTile = 64;                         // keys of a thread block, query rows of a step
constexpr int kDsBytes = kTileBytes<kTile, kTile>;  // of score gradients, 16-bit, whose rows are the keys

// Shared memory: kQAhead query tiles, kDoutAhead tiles of their gradients, and kDsDepth stages of probabilities and, in
// the same memory, score gradients. kBlocks: 2 if a tile of tile_order is for two thread blocks, which form a cluster
// if they compute dq; keys are then read from registers. dq has panels of 64 rows by kPanelCols columns.
//
// k: the keys. In a cluster these come through the ring of queries, and k holds the columns for which this block
// computes dq: of its own keys, and then of the other block's.
//
// Barriers: who arrives -> who waits. Phases of full and empty alternate, so that nobody gets two ahead of a waiter.
// kv           copies -> value role, before the query role has any work; value and query role, and without a cluster
//              also the key role -> producer
// q, dout      copies -> key role, value role; these -> producer
// p_full       key role -> value role
// ds_full      value role -> key role, and without a cluster also the query role
// all_ds_full  value role, copies of the other block -> query role
// ds_empty     key and query role, also of the other block -> key role: both blocks' copies have been read
//
// In a cluster, one block's producer copies q (or dout) to both blocks and waits for the roles of both. The other
// producer tells its own barrier how many bytes come. Every use of a stage but the last (kEnd) has a copy, so no role
// gets a use ahead of that producer, which would count it for the use before.
//
// An arrival does not wait for loads of registers before it. So a role uses loaded values before it releases their
// memory.
template <int kDim, int kVDim, int kQAhead, int kDoutAhead, int kDsDepth, bool kBringsDq, int kBlocks>
struct ByGradientTiles {
  static constexpr int kHeadDim = kDim, kVHeadDim = kVDim;
  static constexpr int kQStages = kQAhead, kDoutStages = kDoutAhead, kDsStages = kDsDepth;
  static constexpr bool kWithDq = kBringsDq, kTwoBlocks = kBlocks == 2, kCluster = kTwoBlocks && kWithDq;
  static constexpr int kClusterBlocks = 1 + kCluster, kPanelCols = kCluster ? kHeadDim / 2 : kSlab;
  static constexpr int kQBytes = kTileBytes<kTile, kHeadDim>, kDoutBytes = kTileBytes<kTile, kVHeadDim>;
  static constexpr int kKBoxes = 2 * 2;                // of 64 columns: two hold a panel's, of each block's keys
  static_assert(kHeadDim % kSlab == 0 && kVHeadDim % kSlab == 0, "tiles must have slabs of 64 columns");
  static_assert(kBlocks == 1 || kBlocks == 2, "a cluster has two thread blocks");
  static_assert(kPanelCols <= 2 * kSlab, "a block of a cluster loads two boxes of keys for its half of dq");
  static_assert(kQStages >= 2 && kDoutStages >= 2 && kDsStages >= 2, "each role loads or hands over one step ahead");
  static constexpr u32 kQLoader = 0, kDoutLoader = 1;  // ranks of the blocks that copy to both
  static constexpr int kKBytes = kCluster ? kKBoxes * kDsBytes : kQBytes, kVBytes = kDoutBytes;
  unsigned char k[kKBytes], v[kVBytes];
  unsigned char q[kQStages][kQBytes], dout[kDoutStages][kDoutBytes];
  // Score gradients of this block, and then of the other one. Before them, probabilities in float32 use this block's
  // part and the memory behind all.
  unsigned char ds[kDsStages][(kClusterBlocks + 1) * kDsBytes];
  float minus_lse[kQStages][kTile], minus_delta[kDoutStages][kTile];
  u64 kv_full, kv_empty;
  u64 q_full[kQStages], q_empty[kQStages];
  u64 dout_full[kDoutStages], dout_empty[kDoutStages];
  u64 p_full[kDsStages], ds_full[kDsStages], ds_empty[kDsStages];
  Step q_step[kQStages], dout_step[kDoutStages], ds_step[kDsStages];
  u32 p_q_stage[kDsStages];                                       // where the queries of probabilities are
  int2 range[2][kTile];                                       // of the key rows, for alternate key tiles
  int2 warp_tile[8];                                              // of the key role's warps, then the value role's

  __device__ __forceinline__ void init() {
    barrier_init(&kv_full, 1), barrier_init(&kv_empty, (kCluster ? 0 : 4) + (kWithDq ? 8 : 4));
    auto warps = [](u32 loader) { return kCluster && rank_in_cluster() == loader ? 8 : 4; };
    for (int s = 0; s < kQStages; ++s) barrier_init(&q_full[s], 1), barrier_init(&q_empty[s], warps(kQLoader));
    for (int s = 0; s < kDoutStages; ++s)
      barrier_init(&dout_full[s], 1), barrier_init(&dout_empty[s], warps(kDoutLoader));
    for (int s = 0; s < kDsStages; ++s) {
      barrier_init(&p_full[s], 4), barrier_init(&ds_full[s], 4);
      barrier_init(&ds_empty[s], kWithDq ? 4 + 4 * kClusterBlocks : 4);
    }
  }
  // Releases, with one warp, what block `loader` copies to both of a cluster.
  __device__ __forceinline__ void give_back(u64* empty, u32 loader) {
    if (me().lane > 0) return;
    barrier_arrive(empty);
    if (kCluster && rank_in_cluster() != loader) arrive_in_other(empty);
  }
  __device__ __forceinline__ void give_back_q(u32 stage) { give_back(&q_empty[stage], kQLoader); }
  __device__ __forceinline__ void give_back_dout(u32 stage) { give_back(&dout_empty[stage], kDoutLoader); }
  // Waits until nobody needs the score gradients of a stage any more.
  __device__ __forceinline__ void wait_for_stage(Ring<kDsStages> to) {
    barrier_wait(&ds_empty[to.stage], to.parity ^ 1);
  }
  // Returns float4 n of every lane of a warp's probabilities, 16 keys by 64 queries. Half of them are where the warp's
  // own score gradients will be, so that no warp waits for another.
  __device__ __forceinline__ float4* probabilities(u32 stage, int warp, int n) {
    constexpr int kNumbers = kTile / 16;
    unsigned char* const half = ds[stage] + n / kNumbers * kClusterBlocks * kDsBytes;
    return (float4*)(half + warp * 16 * kRowBytes) + n % kNumbers * kWarp;
  }
};

// Barriers of a cluster. all_ds_full: score gradients of both blocks have arrived.
template <bool kCluster, int kDsStages> struct ByGradientBarriers {
  __device__ __forceinline__ void init() {}
};
template <int kDsStages> struct ByGradientBarriers<true, kDsStages> {
  u64 all_ds_full[kDsStages];
  DrawnWork drawn;

  __device__ __forceinline__ void init() {
    for (int s = 0; s < kDsStages; ++s) barrier_init(&all_ds_full[s], 4);
    drawn.init();
  }
};

template <typename Tiles> struct ByGradientShared : Tiles, ByGradientBarriers<Tiles::kCluster, Tiles::kDsStages> {
  __device__ __forceinline__ void init() {
    Tiles::init(), ByGradientBarriers<Tiles::kCluster, Tiles::kDsStages>::init();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// Loads the keys and values of a key tile, with one lane.
template <typename Shared>
__device__ __forceinline__ void load_key_tile(Shared& shared, const TensorMap* map_k, const TensorMap* map_v,
                                               int kv_head, int key) {
  constexpr bool kWithKeys = Shared::kWithDq || !Shared::kCluster;
  barrier_expect(&shared.kv_full, kWithKeys * Shared::kKBytes + Shared::kVBytes);
  if constexpr (!Shared::kCluster) {
    copy_tile<kTile, Shared::kHeadDim, true>(shared.k, map_k, kv_head, key, &shared.kv_full);
  } else if constexpr (kWithKeys) {
    #pragma unroll
    for (int i = 0; i < Shared::kKBoxes; ++i)         // boxes of this block's keys, then of the other one's
      copy_box_once(shared.k + (i % 2 * 2 + i / 2) * kDsBytes, map_k, rank_in_cluster() * Shared::kPanelCols +
                    i % 2 * kSlab, kv_head, i < 2 ? key : key ^ kTile, &shared.kv_full);
  }
  copy_tile<kTile, Shared::kVHeadDim, true>(shared.v, map_v, kv_head, key, &shared.kv_full);
}

// Reads an order of pairs of tiles as an order of tiles.
struct TileOrder {
  const int* pairs;
  __device__ __forceinline__ int operator[](int i) const { return pairs[i / 2] * 2 + i % 2; }
};

// Loads a step's rows. In a cluster both blocks read the same rows, and `loader` loads them for both.
template <typename Shared, int kCols>
__device__ __forceinline__ void load_for_both(u32 loader, unsigned char* tile, const TensorMap* map, const Step& step,
                                              u64* full) {
  if constexpr (!Shared::kCluster) copy_tile<kTile, kCols>(tile, map, step.head, step.row, full);
  else if (rank_in_cluster() == loader) copy_tile_to<kTile, kCols>(3, tile, map, step.head, step.row, full);
}

// The producer, one warp. It loads the tensors of every step.
//
// racecheck does not follow mbarriers. Full barriers order steps, ranges and copies before reads. Empty barriers order
// reads before the next fill, as a warp arrives once all its lanes have read. Probabilities and ds_step pass from
// p_full by ds_full to ds_empty, so their stage is written again only when all have read it. Ranges have two stages,
// see below.
template <typename Shared>
__device__ __forceinline__ void produce_by_gradient(
    Shared& shared, const TensorMap* map_q, const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_dout,
    const float* stats, const int2* query_ranges, const int* num_partials, const int* tile_order, int* counter,
    BackwardSize size) {
  constexpr int kHeadDim = Shared::kHeadDim, kVHeadDim = Shared::kVHeadDim;
  constexpr u32 kNoLoads = Shared::kCluster ? kEnd : kNothing | kEnd;
  const int lane = threadIdx.x % kWarp;
  Ring<Shared::kQStages> q_ring = {0, 1};
  Ring<Shared::kDoutStages> dout_ring = {0, 1};
  u32 kv_parity = 1;
  auto fill = [&](auto& ring, u64* full, u64* empty, Step* steps, const Step& step, auto load) {
    barrier_wait(&empty[ring.stage], ring.parity);
    __syncwarp();                                     // one lane moves on what all wait for
    if (lane == 0) {
      steps[ring.stage] = step;
      if (step.flags & kNoLoads) barrier_arrive(&full[ring.stage]);
      else load(ring.stage, &full[ring.stage]);
    }
    ring.advance();
  };
  auto fill_q = [&](const Step& step, auto load) {
    fill(q_ring, shared.q_full, shared.q_empty, shared.q_step, step, load);
  };
  auto fill_dout = [&](const Step& step, auto load) {
    fill(dout_ring, shared.dout_full, shared.dout_empty, shared.dout_step, step, load);
  };

  auto take = [&](const Step& step) {
    const int kv_head = step.head / size.group, key = step.tile * kTile;
    if (step.flags & kFirst) {
      // Nobody needs these ranges any more: when the last keys were loaded, all roles were done with the tile before
      // those.
      #pragma unroll
      for (int i = lane; i < kTile; i += kWarp)
        shared.range[kv_parity ^ 1][i] = range_of(query_ranges, key + i, size.k_rows);
      __syncwarp();
      if constexpr (Shared::kCluster) {
        fill_q(step, [&](u32 stage, u64* full) {
          barrier_expect(full, Shared::kQBytes);
          if (rank_in_cluster() != Shared::kQLoader) return;
          #pragma unroll
          for (int block = 0; block < 2; ++block)  // keys come from there too, so that each use of a stage has a copy
            copy_tile_to<kTile, kHeadDim>(1 << block, shared.q[stage], map_k, kv_head,
                                              (step.tile / 2 * 2 + block) * kTile, full);
        });
      }
    }
    auto lse = [&] { return step.head * size.stats_rows + step.row; };
    fill_q(step, [&](u32 stage, u64* full) {
      barrier_expect(full, Shared::kQBytes + 4 * kTile);
      load_for_both<Shared, kHeadDim>(Shared::kQLoader, shared.q[stage], map_q, step, full);
      copy_bulk(shared.minus_lse[stage], stats + lse(), 4 * kTile, full);
    });
    fill_dout(step, [&](u32 stage, u64* full) {
      barrier_expect(full, Shared::kDoutBytes + 4 * kTile);
      load_for_both<Shared, kVHeadDim>(Shared::kDoutLoader, shared.dout[stage], map_dout, step, full);
      const u32 delta = lse() + size.splits * size.split_heads * size.stats_rows;
      copy_bulk(shared.minus_delta[stage], stats + delta, 4 * kTile, full);
    });
    if (!(step.flags & kFirst)) return;
    barrier_wait(&shared.kv_empty, kv_parity);
    __syncwarp();
    if (lane == 0) load_key_tile(shared, map_k, map_v, kv_head, key);
    kv_parity ^= 1;
  };
  if constexpr (Shared::kCluster) {
    schedule_steps<2, kTile>(query_ranges, num_partials, tile_order, ClusterCounter{counter, shared.drawn}, size,
                                 [&](Step step) {
      step.tile = step.tile * 2 + rank_in_cluster();  // as if there were tiles of 64 keys alone
      if (step.flags & kNothing) step.row = 0;        // of rows that nobody reads
      step.flags = step.flags & ~15u | step.flags >> 2 * rank_in_cluster() & 3;
      take(step);
    });
  } else if constexpr (Shared::kTwoBlocks) {
    schedule_steps<1, kTile>(query_ranges, num_partials, TileOrder{tile_order}, counter, size, take);
  } else {
    schedule_steps<1, kTile>(query_ranges, num_partials, tile_order, counter, size, take);
  }
}
