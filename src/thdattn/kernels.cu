// Open this file first. It states the rule and the vocabulary of all kernels. It also holds the kernels that work row
// by row on every GPU: they reorder rows between rank order and sequence order, and make the arrays of a plan.
//
// The rule. The attention kernels know nothing of sequences, ranks, causality, windows or padding. They get one range
// of keys per query row (key_ranges) and its transpose (query_ranges), and
//
//   score(i, j) counts iff key_ranges[i].x <= j < key_ranges[i].y.
//
// In prefix trees alone it counts iff both ranges have the pair; see kernels/trees.cuh.
// A row with an empty range is padding. Kernels read it as zero, so that NaN there cannot spread, and write zero to it.
// The plan kernels below turn lengths and masks into ranges.
//
// Tiles. A thread block owns one tile of rows at a time. It visits only the tiles of the other side (keys for queries,
// queries for keys) that one of its rows sees. Gaps between documents, chunks or windows therefore cost nothing. A tile
// that every row sees completely is computed without comparisons. Tiles are aligned to the buffers, not to sequences.
// The plan says in which order they are computed.
//
// Files include each other by their paths below src/thdattn. Python writes the files of generated/ (jit/compiler.py).
// kernels/configs.py holds the template constants of every kernel, and engines/cuda launches the kernels.
//
//   kernels/common.cuh                        element types, ranges of rows, small reductions
//   kernels/logits.cuh                        logits from scores: scaling, soft-capping, sinks
//   kernels/split_kv.cuh                      split-KV: divides keys among thread blocks when query tiles are few
//   kernels/trees.cuh                         prefix trees: keys that key ranges have and query ranges hide
//   kernels/plan_trees.cu                     plans of prefix trees, from those of sequences
//   kernels/sinks.cu                          the gradient of attention sinks
//   kernels/cache.cu                          writes keys and values into a KV cache
//   kernels/peer/exchange.cu                  all-gather and all-to-all over peer memory
//   kernels/peer/reduce.cu                    adds the partial sums of several ranks
//   kernels/peer/owners.cuh                   where a backward stores partial sums that owner ranks add
//   kernels/portable/common.cuh               mma.sync, ldmatrix, cp.async, tiles in shared memory (sm_80 and later)
//   kernels/portable/forward.cu               the attention forward
//   kernels/portable/backward.cu              delta (also for Hopper); dk and dv with or without dq; dq alone; rounding
//   kernels/portable/decode.cu                attention of few queries over long KV caches
//   kernels/hopper/common.cuh                 wgmma, TMA, mbarriers, tiles in shared memory, the scheduler (sm_90a)
//   kernels/hopper/forward.cu                 the attention forward
//   kernels/hopper/trees.cuh                  key tiles that prefix trees hide
//   kernels/hopper/softmax.cuh                its online softmax
//   kernels/hopper/backward_common.cuh        what all backwards share: steps of the scheduler, partial sums
//   kernels/hopper/backward_tiles.cuh         shared memory and producer of the two backwards with 128 keys per block
//   kernels/hopper/dq_panels.cuh              how these two compute dq and add its partial sums
//   kernels/hopper/backward.cu                head dims up to 128: two warpgroups for dk and dv, one for dq
//   kernels/hopper/backward_shared_dq.cu      head dims 192/128: two warpgroups compute dk and dv, and share dq
//   kernels/hopper/backward_by_gradient.cu    wider heads: one warpgroup each for dk, dv and dq
//   kernels/hopper/by_gradient_tiles.cuh      its shared memory and producer
//   kernels/hopper/cluster.cuh                what the two thread blocks of its cluster exchange
//   kernels/hopper/backward_dq.cu             dq alone, for the same bits on every run with wider heads
//   kernels/mamba/                            the Mamba-2 mixer, which has a rule and a common.cuh of its own
//
// Vocabulary, beside that of the field. Each word has one meaning, here and in the Python that launches the kernels:
//
//   visible        of a row of the other side: one of the tile's rows sees it
//   step           of a backward: one tile of keys meets one tile of queries of one head
//   work           numbers that thread blocks draw; the scheduler maps a number to a tile and a head
//   together       how many heads are computed one after another at each tile, so that their tensors share the L2 cache
//   head split     a part of the query heads of a kv head, computed by one thread block (`splits` in BackwardSize)
//   KV split       a part of the keys of a query tile or of a cached sequence, computed by one thread block
//   acc            accumulators in registers
//   accum          fp32 accumulators in global memory, to which several thread blocks may add
//   partial        one thread block's (or rank's) term of a sum; a thread block claims, writes and releases it
//   semaphore      the int that tells these thread blocks whose partial sum has arrived
//   panel          64 query rows by some columns of a partial dq: the unit of one bulk copy
//   stats          -lse / softmax_scale and -delta of every query row
//   stage, ring    one of several equal buffers that are filled ahead; all of them
//   slab           64 (or 32) columns of a tile in shared memory: the width of the swizzle and of a TMA box
//   fragment       the part of a matrix operand that a warp holds: 16 rows by 16 columns
//   block          8 columns of accumulators; only with clusters, one of their two thread blocks
//   run            consecutive row numbers of a plan's array

#pragma once

#include "kernels/common.cuh"

// ------------------------------------------------------------------------------------------------ reorder

// One of the arrays that are reordered. from: the rows, in parts that may be the memory of several ranks. own: this
// rank's own rows. out: the destination. words: 16-byte words in a row. pitch, own_pitch: words from one row to the
// next.
struct Rows { const uint4 *from[kMaxRanks], *own; uint4* out; int words, pitch, own_pitch; };
CHECK_Rows;

// Copies a row of `words` 16-byte words with one warp, four words per lane at a time, or writes zeros.
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

// Reorders whole rows of two buffers (k and v, or dk and dv) between rank order and sequence order in one launch. One
// warp copies a row, 16 bytes per lane: reads and writes are contiguous in both directions, and the index is read once
// per row. Bound by memory bandwidth or by the links.
//
//   kToRankOrder = false   out[rank_order[t]] = in[t]   gathered k, v; rows that no local query sees (also padding)
//                                                       become 0, as 0 * NaN would spread through a product
//   kToRankOrder = true    out[t] = in[rank_order[t]]   before dk, dv are summed; fillers become 0
//
// `in` consists of parts of rows_each rows, which may be memory of other GPUs. The num_own rows from first_own on are
// read from `own` instead, where the rank already has them.
// rank_order (num_rows): the row in sequence order of row t in rank order, -1 for fillers.
// Launch: grid (ceil(num_rows / 8), 2), block 256.
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

// These kernels make the arrays of a plan from lengths on the GPU, without a copy to the host, so that a captured graph
// can plan anew. They check the lengths, find the rows, what each row sees, and the order of tiles. They compute what
// plan.py computes with NumPy, and the tests compare both element by element. One thread computes one element from the
// lengths by binary search. The kernels run once per plan, and the latency of their loads bounds them.

// Tests whether offsets are invalid. They are if they do not start at 0, if they decrease, or if they end beyond the
// buffer. They also are if a sequence has fewer rows than tokens, or rows that are no multiple of `multiple`. All
// threads of a block call it.
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

// Checks the lengths of queries and keys, and copies them for the kernels below.
//
// checked (2, 2, num_seqs + 1): cu_seqlens and cu_seqlens_padded of the queries and of the keys. If some are invalid,
// all of it is 0, as sequences without rows send no kernel out of bounds, and *wrong is 1.
// notice: in host memory, which tells the host without a wait. It becomes `serial` if some are invalid, else ~serial.
// Launch: one block.
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

// Sets results to NaN if the lengths were invalid, because zeros would pass for an answer. It fills three arrays of
// 32-bit words with ones, which is NaN in every type. It returns at once if the lengths were valid.
// Launch: any grid, early.
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

// Returns the last index i < count with offsets[i] <= x: the sequence of row x (an empty one has no row), or its run.
__device__ __forceinline__ int sequence_of(const int* offsets, int count, int x) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= x) low = middle; else high = middle;
  }
  return low;
}

// Position of a row of one side (queries or keys): its sequence, its position there, and the tokens of that sequence. A
// position beyond the tokens is padding. All are 0 outside all sequences.
struct Place { int seq, position, length; };

// lengths (2, num_seqs + 1): cu_seqlens and cu_seqlens_padded of the row's side.
__device__ __forceinline__ Place place_of(int row, const int* lengths, int num_seqs) {
  const int* const starts = lengths + num_seqs + 1;
  if (row < 0 || row >= starts[num_seqs]) return {0, 0, 0};
  const int seq = sequence_of(starts, num_seqs, row);
  return {seq, row - starts[seq], lengths[seq + 1] - lengths[seq]};
}

// An array that consists of runs of consecutive numbers. table (2, count): the first index of each run, beginning with
// 0, and its first number. A run whose first number is -1 repeats it.
struct Runs {
  const int* table;
  int count;

  __device__ __forceinline__ int operator[](int t) const {
    const int run = sequence_of(table, count, t), value = table[count + run];
    return value < 0 ? -1 : value + t - table[run];
  }
};

// How the rows of a pack are distributed over ranks. A single rank has them in their own order, as if contiguous.
struct Sharded {
  int cp_size, local_rows;
  bool dual_chunk;
  Runs by_runs;  // rows in rank order, if the host made a table; else they are computed

  // Returns the row of the pack that is row t in rank order, -1 for fillers. The pack has num_rows rows, and its
  // sequences end at row `end`. dual_chunk divides the rows behind the last sequence into equal slices.
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

// The rows of the pack that one side (queries or keys) has, in ascending order, then -1 for fillers. Without `rows` it
// has all of them.
struct Side {
  const int* rows;
  int num_rows;

  __device__ __forceinline__ int operator[](int i) const { return rows ? rows[i] : i; }

  // Counts the rows of this side before row x of the pack.
  __device__ __forceinline__ int rows_before(int x) const {
    if (!rows) return x;
    int low = 0, high = num_rows;
    while (low < high) {
      const int middle = (low + high) / 2;
      if ((u32)rows[middle] < (u32)x) low = middle + 1; else high = middle;
    }
    return low;
  }

  // Maps a range of rows of the pack to rows of this side, where they are neighbours too.
  __device__ __forceinline__ int2 range_of(int2 range) const {
    if (!is_empty(range)) range = make_int2(rows_before(range.x), rows_before(range.y));
    return is_empty(range) ? make_int2(0, 0) : range;
  }
};

// Fills what all plans of a rank share, whatever their masks.
//
// order (num_order): the row of the pack of each row in rank order. It comes from Runs, if the host distributed rows by
// runs (null: it did not).
// positions, valid (local_rows): of this rank's rows. If the lengths were invalid, every row is valid, so that a loss
// over valid rows sees the NaN.
// wrong: null if the lengths are known to be valid.
// Launch: one thread per element of order.
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

// Expands Runs to an array of `size` numbers. Launch: one thread per element.
__global__ void thd_plan_runs(int* __restrict__ array, const int* __restrict__ runs, int num_runs, int size) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t < size) array[t] = Runs{runs, num_runs}[t];
}

// The rule of the mask. Returns the range of positions of the other side, of `length` positions, that the token at
// position `at` sees. left, right: the window, -1 = unlimited. Its twin on the host is in_sight of plan/mask.py, which
// also says what a mask must satisfy.
__device__ __forceinline__ int2 in_sight(int at, int length, int left, int right) {
  return make_int2(left < 0 ? 0 : max(0, at - left), right < 0 ? length : min(length, at + right + 1));
}

// Returns the rows of the other side that a row sees. there: the lengths of that side. The last positions of both sides
// are aligned.
__device__ __forceinline__ int2 sight_of(Place place, const int* there, int num_seqs, int left, int right) {
  if (place.position >= place.length) return make_int2(0, 0);
  const int begin = there[num_seqs + 1 + place.seq], length = there[place.seq + 1] - there[place.seq];
  const int2 seen = in_sight(place.position + length - place.length, length, left, right);
  return seen.x < seen.y ? make_int2(begin + seen.x, begin + seen.y) : make_int2(0, 0);
}

// Computes the ranges of both sides. For keys, the two sides of the window swap.
//
// key_ranges (local_rows): of this rank's query rows; (-1, -1) if the lengths were invalid. A causal mask is right = 0.
// query_ranges (key_rows): this rank's query rows that see each key row.
// rows, rows_of_keys: see Side. wrong: null if the lengths are known to be valid.
// Launch: grid (blocks, 2), one thread per query row and one per key row.
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

// The sort key of a tile: length and first row of its longest sequence (the first of equal ones), and its span. The
// span is the number of rows of the other side from the first visible one to the last.
struct TileCost { int length, begin, span; };

// Tiles of one side. made: its two orders, one after the other, and behind them the costs of its tiles.
struct Tiles {
  int* made;
  int count;

  __device__ __forceinline__ TileCost* cost() const { return (TileCost*)(made + 2 * count); }
};
static_assert(sizeof(TileCost) == 12, "engines/cuda/plan.py allocates two orders and three ints of each tile");

__device__ __forceinline__ int tiles_of(int num_rows, int tile) { return (num_rows + tile - 1) / tile; }

// Computes the costs of query tiles and key tiles from their ranges. Launch: grid (blocks, 2), one warp per query tile
// and one per key tile.
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

// Adds one number of every lane of a warp.
__device__ __forceinline__ u64 warp_sum(u64 x) {
  for (int i = kWarp / 2; i; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// Sorts the tiles of queries and of keys in two ways. The first order is by decreasing length of the sequence, and
// within a sequence by decreasing span. The second order is by decreasing span alone. Both are the same if there are
// few sequences: if the average span is at least an eighth of the other side, as with four causal sequences. One warp
// counts the tiles that come before its tile. A pack has a few thousand tiles at most, so one launch is enough. Launch:
// as thd_plan_tile_cost.
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

// Counts the pairs of a query and a key that see each other. Launch: one block of 1024.
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

// Divides the tiles of one side into two parts that are computed one after the other, and keeps their orders. One warp
// counts the tiles that come before its tile.
//
// tiles (2, count): both orders. second (count): whether a tile belongs to the second part.
// parts: both orders of the num_first tiles of the first part, then both of the second part.
// Launch: grid (blocks, 2), one warp per tile of an order.
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
