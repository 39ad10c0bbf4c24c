// Open this file first. It explains what all kernels share and holds those that work row by row, for every GPU: rows
// moved between rank order and sequence order, and the arrays of a plan.
//
// One rule. The attention kernels know nothing of sequences, ranks, causality, windows or padding. They get one range
// of keys per query row (key_ranges) and its transpose (query_ranges), and
//
//   score(i, j) counts iff key_ranges[i].x <= j < key_ranges[i].y.
//
// A row whose range is empty, as that of padding, is read as zero, so that NaN there cannot spread, and written as
// zero. The plan kernels below turn lengths and masks into ranges.
//
// Tiles. A thread block owns a tile of rows at a time and visits the tiles of the other side (keys for queries, queries
// for keys) that one of its rows sees. Gaps between documents, chunks or windows cost nothing, and a tile that every
// row sees whole is computed without comparisons. Tiles are aligned to the buffers, not to sequences. The plan says in
// which order they are done.
//
// Files include each other by their paths below src/thdattn; Python writes those of generated/ (jit/compiler.py).
// kernels/configs.py has the constants of a kernel's template, and engines/cuda launches the kernels.
//
//   kernels/common.cuh                    element types, ranges of rows, reductions
//   kernels/peer/reduce.cu                shares of the same rows, of several ranks, added up
//   kernels/peer/exchange.cu              what ranks have for each other, put to its places
//   kernels/peer/owners.cuh               where a backward stores shares that other ranks add up
//   kernels/logits.cuh, sinks.cu          caps of logits and sinks, of both engines' tiles; the gradient of sinks
//   kernels/cache.cu                      rows of keys and values into a cache
//   kernels/portable/common.cuh           mma.sync, ldmatrix, cp.async, tiles in shared memory (sm_80 and later)
//   kernels/portable/forward.cu           the attention forward
//   kernels/portable/backward.cu          delta, which Hopper needs too; dk and dv with dq or without; dq; rounding
//   kernels/portable/decode.cu            attention of few queries over long caches
//   kernels/hopper/common.cuh             wgmma, TMA, mbarriers, tiles in shared memory, the scheduler (sm_90a)
//   kernels/hopper/forward.cu             the attention forward
//   kernels/hopper/softmax.cuh            what it makes of scores
//   kernels/hopper/split_kv.cuh             how it divides keys among thread blocks, where tiles of queries are few
//   kernels/hopper/backward_common.cuh    what all backwards share: the scheduler's steps, shares of accumulators
//   kernels/hopper/backward_tiles.cuh     what those up to head dims 192/128 share: shared memory, the producer
//   kernels/hopper/dq_panels.cuh         dq in the backward up to head dims 192/128
//   kernels/hopper/backward.cu            the backward up to head dims 128
//   kernels/hopper/backward_shared_dq.cu                the backward of head dims 192/128
//   kernels/hopper/backward_by_gradient.cu                the backward of wider heads
//   kernels/hopper/by_gradient_tiles.cuh         its shared memory and producer; cluster.cuh: what its two blocks exchange
//   kernels/hopper/backward_dq.cu                  dq by itself for those, for the same bits on every run
//   kernels/mamba/                        the Mamba-2 mixer, which has a rule and a common.cuh of its own
//
// Words, beside those of the field. One meaning each, here and in Python:
//
//   in sight       rows of the other side that a row of the tile sees
//   step           of a backward: one tile of keys meets one tile of queries of one head
//   work           numbers that thread blocks draw; the scheduler says which tile of which head a number is
//   together       how many heads are done one after another at each tile, so that their tensors share the L2 cache
//   split          some of the query heads of a kv head, done by one thread block; others do the other splits
//   acc, accum     accumulators in registers; fp32 accumulators in global memory, to which several blocks may add
//   share          what one thread block brings to such an accumulator; it claims, brings and releases it
//   semaphore      the int by which these thread blocks know whose share has arrived
//   run          64 query rows by some columns of a share of dq: what is sent at once
//   stats          -lse / softmax_scale and -delta of every query row
//   stage, ring    one of several equal buffers that are filled ahead; all of them
//   fragment       the part of a matrix operand that a warp holds: 16 rows by 16 columns
//   block          8 columns of accumulators (thread blocks are called so)

#pragma once

#include "kernels/common.cuh"

// ------------------------------------------------------------------------------------------------ reorder

// Rows of one of the arrays that are moved: where its parts and a rank's own rows lie, where the rows go, the words of
// 16 bytes in a row, and those between the beginnings of two rows.
struct Rows { const uint4 *from[kMaxRanks], *own; uint4* out; int words, pitch, own_pitch; };
CHECK_Rows;

// Moves a row of so many words, 16 bytes a lane, four of them at a time; or puts zeros there.
__device__ __forceinline__ void move_row(uint4* out, const uint4* in, int words, bool zero) {
  for (int i = threadIdx.x % kWarp; i < words; i += 4 * kWarp) {
    uint4 x[4];
    #pragma unroll
    for (int n = 0; n < 4; ++n)
      x[n] = zero || i + n * kWarp >= words ? make_uint4(0, 0, 0, 0) : in[i + n * kWarp];
    #pragma unroll
    for (int n = 0; n < 4; ++n)
      if (i + n * kWarp < words) out[i + n * kWarp] = x[n];
  }
}

// Moves whole rows of two buffers (k and v, or dk and dv) between rank order and sequence order in one launch. One warp
// moves a row, 16 bytes a lane, so that reads and writes are contiguous in either direction; the index is read once a
// row, not once an element. Bound by memory, or by the links.
//
//   kToRankOrder = false   out[rank_order[t]] = in[t]   gathered k, v; rows that no local query sees, padding among
//                                                       them, become 0, as 0 * NaN would spread through a product
//   kToRankOrder = true    out[t] = in[rank_order[t]]   before dk, dv are summed; fillers become 0
//
// `in` comes in parts of rows_each rows, which may lie in the memory of other GPUs; the num_own rows from first_own on
// are read from `own` instead, where a rank has them already. rank_order (num_rows): sequence-order row of row t in
// rank order, -1 for fillers. Launch: grid (ceil(num_rows / 8), 2), block 256.
template <bool kToRankOrder>
__global__ void __launch_bounds__(256) thd_reorder(
    const __grid_constant__ Rows first, const __grid_constant__ Rows second, const int* __restrict__ rank_order,
    const int2* __restrict__ query_ranges, int num_rows, int rows_each, int first_own, int num_own) {
  const int row = blockIdx.x * 8 + threadIdx.x / kWarp;
  if (row >= num_rows) return;
  const int other = rank_order[row];
  if (!kToRankOrder && other < 0) return;
  const bool zero = kToRankOrder ? other < 0 : is_empty(query_ranges[other]);
  const Rows& rows = blockIdx.y ? second : first;
  const int source = kToRankOrder ? max(other, 0) : row, part = source / rows_each;
  const bool owned = (u32)(row - first_own) < (u32)num_own;
  const uint4* const in = owned ? rows.own + (size_t)(row - first_own) * rows.own_pitch
                                : rows.from[part] + (size_t)(source - part * rows_each) * rows.pitch;
  uint4* const out = rows.out + (size_t)(kToRankOrder ? row : other) * rows.words;
  move_row(out, in, rows.words, zero);
}

// ------------------------------------------------------------------------------------------------ plan

// The arrays of a plan from lengths on the GPU, without a copy to the host, so that a captured graph can plan anew:
// lengths from elsewhere are checked, rows are found, then what they see, then the order of tiles. The kernels compute
// what plan.py computes with NumPy; the tests compare them element by element. A thread computes one element from the
// lengths, by binary search. They run once per plan, and are bound by the latency of their loads.

// Whether offsets start elsewhere than at 0, decrease, leave a sequence fewer rows than tokens or rows that are no
// multiple, or end beyond the buffer. Asked by all threads of a block.
__device__ __forceinline__ bool are_wrong(const int* cu_seqlens, const int* cu_seqlens_padded, int num_seqs,
                                          int total_rows, int multiple) {
  bool wrong = cu_seqlens[0] != 0 || cu_seqlens_padded[0] != 0 || cu_seqlens_padded[num_seqs] > total_rows;
  for (int i = threadIdx.x; i < num_seqs; i += blockDim.x) {
    const u32 length = (u32)cu_seqlens[i + 1] - cu_seqlens[i];
    const u32 padded = (u32)cu_seqlens_padded[i + 1] - cu_seqlens_padded[i];
    wrong |= cu_seqlens[i + 1] < cu_seqlens[i] || cu_seqlens_padded[i + 1] < cu_seqlens_padded[i];
    wrong |= length > padded || padded % multiple != 0;
  }
  return __syncthreads_or(wrong);
}

// checked (2, 2, num_seqs + 1): cu_seqlens and cu_seqlens_padded of the queries and of the keys, for the kernels below.
// If some are wrong it is all 0, as sequences without rows send no kernel out of bounds, and *wrong is 1. *notice lies
// in memory of the host, which so learns of it without a wait: it becomes `serial` if some are wrong, and else its
// complement. Launch: one block.
__global__ void __launch_bounds__(1024) thd_plan_check(
    int* __restrict__ checked, int* __restrict__ wrong, volatile u64* notice, const int* __restrict__ cu_seqlens,
    const int* __restrict__ cu_seqlens_padded, const int* __restrict__ key_cu_seqlens,
    const int* __restrict__ key_cu_seqlens_padded, int num_seqs, int total_rows, int key_rows, int multiple,
    u64 serial) {
  const bool queries_are_wrong = are_wrong(cu_seqlens, cu_seqlens_padded, num_seqs, total_rows, multiple);
  const bool keys_are_wrong = are_wrong(key_cu_seqlens, key_cu_seqlens_padded, num_seqs, key_rows, 1);
  const bool some_are_wrong = queries_are_wrong || keys_are_wrong;
  const int* const offsets[] = {cu_seqlens, cu_seqlens_padded, key_cu_seqlens, key_cu_seqlens_padded};
  #pragma unroll
  for (int k = 0; k < 4; ++k)
    for (int i = threadIdx.x; i <= num_seqs; i += blockDim.x)
      checked[k * (num_seqs + 1) + i] = some_are_wrong ? 0 : offsets[k][i];
  if (threadIdx.x == 0) *wrong = some_are_wrong;
  if (threadIdx.x == 0) *notice = some_are_wrong ? serial : ~serial;
}

// Results become NaN where the lengths were wrong, as zeros would pass for an answer: three arrays of 32-bit words, all
// of whose bits are set, which is NaN in every type. Launch: any grid, early; it returns at once where all is well.
__global__ void __launch_bounds__(256) thd_plan_nan_if_invalid(
    u32* __restrict__ a, u64 a_words, u32* __restrict__ b, u64 b_words, u32* __restrict__ c, u64 c_words,
    const int* wrong) {
  wait_for_kernel_before();
  if (!*wrong) return;
  const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
  for (u64 i = first; i < a_words; i += step) a[i] = ~0u;
  for (u64 i = first; i < b_words; i += step) b[i] = ~0u;
  for (u64 i = first; i < c_words; i += step) c[i] = ~0u;
}

// The last index i < count with offsets[i] <= x: the sequence that holds row x (empty ones hold none), or the run.
__device__ __forceinline__ int sequence_of(const int* offsets, int count, int x) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= x) low = middle; else high = middle;
  }
  return low;
}

// Where a row of one side, queries or keys, stands: its sequence, its position there, and the tokens of that. A
// position beyond them is padding; all are 0 outside all sequences.
struct Place { int seq, position, length; };

// lengths (2, num_seqs + 1): cu_seqlens and cu_seqlens_padded of the row's side.
__device__ __forceinline__ Place place_of(int row, const int* lengths, int num_seqs) {
  const int* const starts = lengths + num_seqs + 1;
  if (row < 0 || row >= starts[num_seqs]) return {0, 0, 0};
  const int seq = sequence_of(starts, num_seqs, row);
  return {seq, row - starts[seq], lengths[seq + 1] - lengths[seq]};
}

// An array that is made of runs, numbers that follow one another, from a table (2, count): where each begins, the
// first one at 0, and its first number; -1 is that of a run of -1.
struct Runs {
  const int* table;
  int count;

  __device__ __forceinline__ int operator[](int t) const {
    const int run = sequence_of(table, count, t), value = table[count + run];
    return value < 0 ? -1 : value + t - table[run];
  }
};

// How the rows of a pack are spread over ranks. One rank has them in their own order, as if they were contiguous.
struct Sharded {
  int cp_size, local_rows;
  bool dual_chunk;
  Runs by_runs;  // the rows in rank order, where the host has found them; without a table, they are computed

  // The row of the pack that row t in rank order is, of a pack of num_rows rows whose sequences end at row `end`; -1
  // for fillers. dual_chunk shares out what lies behind the last sequence in equal slices.
  __device__ __forceinline__ int row_of(int t, const int* starts, int num_seqs, int num_rows) const {
    if (by_runs.table) return by_runs[t];
    int row = t;
    if (dual_chunk) {
      const int rank = t / local_rows, i = t % local_rows, end = starts[num_seqs], owned = end / cp_size;
      if (i < owned) {
        const int seq = sequence_of(starts, num_seqs, i * cp_size), begin = starts[seq];
        const int chunk = (starts[seq + 1] - begin) / (2 * cp_size), p = i - begin / cp_size;
        return begin + (p < chunk ? rank * chunk + p : (2 * cp_size - 1 - rank) * chunk + p - chunk);
      }
      row = end + rank * (local_rows - owned) + i - owned;
    }
    return row < num_rows ? row : -1;
  }
};

// Which rows of the pack one side, queries or keys, has: ascending, then -1 for fillers. Without `rows`, all of them.
struct Side {
  const int* rows;
  int num_rows;

  __device__ __forceinline__ int operator[](int i) const { return rows ? rows[i] : i; }

  // How many it has before row x of the pack.
  __device__ __forceinline__ int rows_before(int x) const {
    if (!rows) return x;
    int low = 0, high = num_rows;
    while (low < high) {
      const int middle = (low + high) / 2;
      if ((u32)rows[middle] < (u32)x) low = middle + 1; else high = middle;
    }
    return low;
  }

  // A range of rows of the pack, as far as this side has them: neighbours here too.
  __device__ __forceinline__ int2 range_of(int2 range) const {
    if (!is_empty(range)) range = make_int2(rows_before(range.x), rows_before(range.y));
    return is_empty(range) ? make_int2(0, 0) : range;
  }
};

// What plans of a rank have in common, whatever their masks. order (num_order): which of the num_rows rows of the pack
// each row in rank order is; from Runs of it where the host has spread rows by runs (null: it has not). positions,
// valid (local_rows) of this rank's rows. Where the lengths are wrong (null: they are right) every row is valid, so
// that a loss over valid rows sees the NaN. Launch: one thread an element of order.
__global__ void thd_plan_rows(int* __restrict__ order, int* __restrict__ positions, bool* __restrict__ valid,
                              const int* __restrict__ lengths, const int* __restrict__ wrong,
                              const int* __restrict__ runs, int num_runs, int num_seqs, int cp_size, int cp_rank,
                              int local_rows, int dual_chunk, int num_rows, int num_order) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= num_order) return;
  const Sharded sharded = {cp_size, local_rows, dual_chunk != 0, {runs, num_runs}};
  const int row = sharded.row_of(t, lengths + num_seqs + 1, num_seqs, num_rows), i = t - cp_rank * local_rows;
  order[t] = row;
  if (i < 0 || i >= local_rows) return;
  const Place place = place_of(row, lengths, num_seqs);
  positions[i] = place.position;
  valid[i] = place.position < place.length || (wrong && *wrong);
}

// An array (size) of Runs. Launch: one thread an element.
__global__ void thd_plan_runs(int* __restrict__ array, const int* __restrict__ runs, int num_runs, int size) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t < size) array[t] = Runs{runs, num_runs}[t];
}

// The rule of the mask: of `length` positions of the other side, those that the token at place `at` among them sees.
// left, right: window; -1 = unlimited. Its twin on the host is in_sight of mask.py, which says what masks must satisfy.
__device__ __forceinline__ int2 in_sight(int at, int length, int left, int right) {
  return make_int2(left < 0 ? 0 : max(0, at - left), right < 0 ? length : min(length, at + right + 1));
}

// The rows of the other side, whose lengths are `there`, that a row sees. The last positions of both sides are the same
// place.
__device__ __forceinline__ int2 sight_of(Place place, const int* there, int num_seqs, int left, int right) {
  if (place.position >= place.length) return make_int2(0, 0);
  const int begin = there[num_seqs + 1 + place.seq], length = there[place.seq + 1] - there[place.seq];
  const int2 seen = in_sight(place.position + length - place.length, length, left, right);
  return seen.x < seen.y ? make_int2(begin + seen.x, begin + seen.y) : make_int2(0, 0);
}

// key_ranges (local_rows) of this rank's rows of queries; causal is right = 0. query_ranges (key_rows): its rows that
// see each key row. For keys, the sides of the window swap. rows, rows_of_keys: see Side. Where the lengths are wrong
// (null: they are right), key_ranges say so. Launch: grid (blocks, 2), one thread a query row and one a key row.
__global__ void thd_plan_ranges(int2* __restrict__ key_ranges, int2* __restrict__ query_ranges,
                                const int* __restrict__ rows, const int* __restrict__ rows_of_keys,
                                const int* __restrict__ queries, const int* __restrict__ keys,
                                const int* __restrict__ wrong, int num_seqs, int local_rows, int key_rows, int left,
                                int right) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const Side query_side = {rows, local_rows}, key_side = {rows_of_keys, key_rows};
  if (blockIdx.y == 0) {
    if (i < local_rows)
      key_ranges[i] = wrong && *wrong ? make_int2(-1, -1) : key_side.range_of(
          sight_of(place_of(query_side[i], queries, num_seqs), keys, num_seqs, left, right));
  } else if (i < key_rows) {
    query_ranges[i] = query_side.range_of(
        sight_of(place_of(key_side[i], keys, num_seqs), queries, num_seqs, right, left));
  }
}

// What a tile of rows is ordered by: length and first row of its longest sequence (of equal ones, the first), and its
// span: how many rows of the other side lie between the first and the last in sight.
struct TileCost { int length, begin, span; };

// Tiles of one side. made: their two orders, one after the other, and room for their costs behind them.
struct Tiles {
  int* made;
  int count;

  __device__ __forceinline__ TileCost* cost() const { return (TileCost*)(made + 2 * count); }
};
static_assert(sizeof(TileCost) == 12, "engines/cuda/plan.py allocates two orders and three ints of each tile");

__device__ __forceinline__ int tiles_of(int num_rows, int tile) { return (num_rows + tile - 1) / tile; }

// Costs of the tiles of queries and of keys, whose ranges are given: see Tiles. Launch: grid (blocks, 2), one warp a
// tile of queries and one a tile of keys.
__global__ void thd_plan_tile_cost(int* __restrict__ query_tiles, int* __restrict__ key_tiles,
                                   const int2* __restrict__ key_ranges, const int2* __restrict__ query_ranges,
                                   const int* __restrict__ rows, const int* __restrict__ rows_of_keys,
                                   const int* __restrict__ queries, const int* __restrict__ keys, int num_seqs,
                                   int local_rows, int key_rows, int query_tile, int key_tile) {
  const bool of_keys = blockIdx.y;
  const int2* const ranges = of_keys ? query_ranges : key_ranges;
  const int* const lengths = of_keys ? keys : queries;
  const int num_rows = of_keys ? key_rows : local_rows, tile = of_keys ? key_tile : query_tile;
  const Side side = {of_keys ? rows_of_keys : rows, num_rows};
  const Tiles tiles = {of_keys ? key_tiles : query_tiles, tiles_of(num_rows, tile)};
  const int t = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  if (t >= tiles.count) return;
  TileCost mine = {0, 0, 0};
  int first = kNone, last = 0;
  for (int i = t * tile + threadIdx.x % kWarp; i < min((t + 1) * tile, num_rows); i += kWarp) {
    const int2 range = ranges[i];
    if (!is_empty(range)) first = min(first, range.x), last = max(last, range.y);
    const int row = side[i];
    const Place place = place_of(row, lengths, num_seqs);
    if (place.length > mine.length) mine.length = place.length, mine.begin = row - place.position;
  }
  const int longest = __reduce_max_sync(0xffffffffu, mine.length);
  mine.begin = __reduce_min_sync(0xffffffffu, mine.length == longest ? mine.begin : kNone);
  mine.span = max(0, __reduce_max_sync(0xffffffffu, last) - __reduce_min_sync(0xffffffffu, first));
  if (threadIdx.x % kWarp == 0) tiles.cost()[t] = {longest, mine.begin, mine.span};
}

constexpr int kFewSequences = 4;                      // FEW_SEQUENCES of plan/ranges.py

// The sum of a number of every lane.
__device__ __forceinline__ u64 warp_sum(u64 x) {
  for (int i = kWarp / 2; i; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// Both orders of the tiles of queries and of keys: first by falling length of the sequence and, in a sequence, by
// falling span; then by falling span alone. The first is the second where sequences are few: where the average span is
// an eighth of the other side, as of four causal sequences. A tile's place is the number of tiles that come before it,
// which one warp counts, in one launch: a pack has a few thousand tiles at most. Launch: as thd_plan_tile_cost.
__global__ void thd_plan_tile_order(int* __restrict__ query_tiles, int* __restrict__ key_tiles, int num_query_tiles,
                                    int num_key_tiles, int local_rows, int key_rows) {
  const bool of_keys = blockIdx.y;
  const Tiles tiles = {of_keys ? key_tiles : query_tiles, of_keys ? num_key_tiles : num_query_tiles};
  const u64 in_sight_of_all = (u64)tiles.count * (of_keys ? local_rows : key_rows);
  const TileCost* const cost = tiles.cost();
  const int t = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  if (t >= tiles.count) return;
  const TileCost mine = cost[t];
  int before[2] = {0, 0};
  u64 in_sight = 0;
  for (int i = threadIdx.x % kWarp; i < tiles.count; i += kWarp) {
    const TileCost other = cost[i];
    in_sight += other.span;
    const bool longer = other.span > mine.span || (other.span == mine.span && i < t);
    const bool same = other.length == mine.length && other.begin == mine.begin;
    before[0] += same ? longer
                      : other.length > mine.length || (other.length == mine.length && other.begin < mine.begin);
    before[1] += longer;
  }
  if (in_sight_of_all <= 2 * kFewSequences * warp_sum(in_sight)) before[0] = before[1];
  #pragma unroll
  for (int k = 0; k < 2; ++k) {
    before[k] = __reduce_add_sync(0xffffffffu, before[k]);
    if (threadIdx.x % kWarp == 0) tiles.made[k * tiles.count + before[k]] = t;
  }
}

// How many pairs of a query and a key see each other. Launch: one block of 1024.
__global__ void __launch_bounds__(1024) thd_plan_pairs(u64* __restrict__ pairs, const int2* __restrict__ key_ranges,
                                                       int num_rows) {
  __shared__ u64 of_warp[kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  u64 mine = 0;
  #pragma unroll 8
  for (int i = threadIdx.x; i < num_rows; i += 1024) mine += key_ranges[i].y - key_ranges[i].x;
  mine = warp_sum(mine);
  if (lane == 0) of_warp[warp] = mine;
  __syncthreads();
  mine = warp_sum(of_warp[lane]);
  if (threadIdx.x == 0) *pairs = mine;
}

// Tiles of one side in two parts, which are done one after the other. tiles (2, count): their two orders; second
// (count): whether a tile is of the second part. parts: both orders of the num_first tiles of the first part, then both
// of the others; in a part, tiles follow each other as they did. One warp counts those before a tile. Launch: grid
// (blocks, 2), one warp a tile of an order.
__global__ void thd_plan_parts(int* __restrict__ parts, const int* __restrict__ tiles, const int* __restrict__ second,
                               int count, int num_first) {
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp, k = blockIdx.y;
  if (i >= count) return;
  const int* const order = tiles + k * count;
  const int tile = order[i], is_second = second[tile];
  int before = 0;
  for (int j = threadIdx.x % kWarp; j < i; j += kWarp) before += second[order[j]] == is_second;
  before = __reduce_add_sync(0xffffffffu, before);
  int* const part = is_second ? parts + 2 * num_first + k * (count - num_first) : parts + k * num_first;
  if (threadIdx.x % kWarp == 0) part[before] = tile;
}
