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
// Files. Nothing is included: jit.py lists the files that make up a kernel's source, and tiles.py has the constants of
// its template. ops/ launches the kernels.
//
//   kernels/common.cuh                    element types, ranges of rows, reductions: comes before every other file
//   kernels/sum.cu                        shares of the same rows, of several ranks, added up
//   kernels/cache.cu                      rows of keys and values into a cache; behind this file
//   kernels/portable/common.cuh           mma.sync, ldmatrix, cp.async, tiles in shared memory (sm_80 and later)
//   kernels/portable/forward.cu           the attention forward
//   kernels/portable/backward.cu          delta, which Hopper needs too; dk and dv with dq or without; dq; rounding
//   kernels/portable/decode.cu            attention of few queries over long caches
//   kernels/hopper/common.cuh             wgmma, TMA, mbarriers, tiles in shared memory, the scheduler (sm_90a)
//   kernels/hopper/forward.cu             the attention forward
//   kernels/hopper/backward_common.cuh    what both backwards share: the scheduler's steps, shares of accumulators
//   kernels/hopper/query_side.cuh         dq in the backward up to head dims 192/128
//   kernels/hopper/backward.cu            the backward up to head dims 192/128
//   kernels/hopper/wide.cu                the backward of wider heads
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
//   piece          64 query rows by some columns of a share of dq: what is sent at once
//   stats          -lse / softmax_scale and -delta of every query row
//   stage, ring    one of several equal buffers that are filled ahead; all of them
//   fragment       the part of a matrix operand that a warp holds: 16 rows by 16 columns
//   block          8 columns of accumulators (thread blocks are called so)

// ------------------------------------------------------------------------------------------------ reorder

// Moves whole rows of two buffers (k and v, or dk and dv) between rank order and sequence order in one launch. One warp
// moves a row, 16 bytes a lane, so that reads and writes are contiguous in either direction; the index is read once a
// row, not once an element. Bound by memory.
//
//   kToRankOrder = false   out[rank_order[t]] = in[t]   after all-gather of k, v; rows that no local query sees,
//                                                       padding among them, become 0, as 0 * NaN would spread
//                                                       through a product
//   kToRankOrder = true    out[t] = in[rank_order[t]]   before reduce-scatter of dk, dv; fillers become 0
//
// rank_order (num_rows): sequence-order row of row t in rank order, -1 for fillers; words: of 16 bytes in a row, between
// whose beginnings lie `pitch` words in `in`. The num_own rows from first_own on are read from `own` instead, where a
// rank has them already. Launch: grid (ceil(num_rows / 8), 2), block 256.
struct Rows { const uint4 *in, *own; uint4* out; int words, pitch, own_pitch; };
CHECK_Rows;

template <bool kToRankOrder>
__global__ void __launch_bounds__(256) thd_reorder(
    const Rows first, const Rows second, const int* __restrict__ rank_order, const int2* __restrict__ query_ranges,
    int num_rows, int first_own, int num_own) {
  const int row = blockIdx.x * 8 + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (row >= num_rows) return;
  const int other = rank_order[row];
  if (!kToRankOrder && other < 0) return;
  const bool zero = kToRankOrder ? other < 0 : is_empty(query_ranges[other]);
  const Rows rows = blockIdx.y ? second : first;
  const bool owned = (u32)(row - first_own) < (u32)num_own;
  const uint4* const in = owned ? rows.own + (size_t)(row - first_own) * rows.own_pitch
                                : rows.in + (size_t)(kToRankOrder ? max(other, 0) : row) * rows.pitch;
  uint4* const out = rows.out + (size_t)(kToRankOrder ? row : other) * rows.words;
  #pragma unroll 4
  for (int i = lane; i < rows.words; i += kWarp) out[i] = zero ? make_uint4(0, 0, 0, 0) : in[i];
}

// ------------------------------------------------------------------------------------------------ plan

// The arrays of a plan from lengths that are already on the GPU, without a copy to the host, so that a captured graph
// can plan anew. Each kernel computes what plan.py computes with NumPy; the tests compare them element by element. A
// thread computes one element from the lengths alone, by binary search. They run once per plan, and are bound by the
// latency of their loads.

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
// If some are wrong it is all 0, as sequences without rows send no kernel out of bounds, *wrong is 1, and *notice,
// which lies in memory of the host, becomes `serial`, so that the host can learn of it without a wait. Launch: one
// block.
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
  if (threadIdx.x == 0 && some_are_wrong) *notice = serial;
}

// Results become NaN where the lengths were wrong, as zeros would pass for an answer: three arrays of 32-bit words, all
// of whose bits are set, which is NaN in every type. Launch: any grid; it returns at once where all is well.
__global__ void __launch_bounds__(256) thd_plan_poison(
    u32* __restrict__ a, u64 a_words, u32* __restrict__ b, u64 b_words, u32* __restrict__ c, u64 c_words,
    const int* __restrict__ wrong) {
  if (!*wrong) return;
  const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
  for (u64 i = first; i < a_words; i += step) a[i] = ~0u;
  for (u64 i = first; i < b_words; i += step) b[i] = ~0u;
  for (u64 i = first; i < c_words; i += step) c[i] = ~0u;
}

// The last index i with offsets[i] <= x: the sequence that holds row x (empty sequences hold none).
__device__ __forceinline__ int sequence_of(const int* offsets, int num_seqs, int x) {
  int low = 0, high = num_seqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= x) low = middle; else high = middle;
  }
  return low;
}

// First index in ascending rows[0, n) whose value is at least x; fillers (-1) come last and count as infinite.
__device__ __forceinline__ int lower_bound(const int* rows, int n, int x) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    if ((u32)rows[middle] < (u32)x) low = middle + 1; else high = middle;
  }
  return low;
}

// rank_order (cp_size * local_rows) of the dual_chunk sharding, which row of the pack each row in rank order is. Rows
// after the last sequence are shared out in equal slices. Launch: one thread an element.
__global__ void thd_plan_dual_chunk(int* __restrict__ rank_order, const int* __restrict__ cu_seqlens_padded,
                                    int num_seqs, int cp_size, int local_rows, int total_rows) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= cp_size * local_rows) return;
  const int rank = t / local_rows, i = t % local_rows, end = cu_seqlens_padded[num_seqs], owned = end / cp_size;
  int row = end + rank * (local_rows - owned) + i - owned;
  if (row >= total_rows) row = -1;
  if (i < owned) {
    const int seq = sequence_of(cu_seqlens_padded, num_seqs, i * cp_size), begin = cu_seqlens_padded[seq];
    const int chunk = (cu_seqlens_padded[seq + 1] - begin) / (2 * cp_size), p = i - begin / cp_size;
    row = begin + (p < chunk ? rank * chunk + p : (2 * cp_size - 1 - rank) * chunk + p - chunk);
  }
  rank_order[t] = row;
}

// Where a row of one side, queries or keys, stands, and what it sees of the other side.
struct RowSight { int position, is_token; int2 range; };

// here, there: lengths of the row's side and of the other, as thd_plan_check leaves them. left, right: window, in
// positions of the other side; -1 = unlimited. The last positions of both sides are the same place. All 0 outside all
// sequences.
__device__ __forceinline__ RowSight sight_of(int row, const int* here, const int* there, int num_seqs, int left,
                                          int right) {
  const int* const starts = here + num_seqs + 1;
  RowSight sight = {0, 0, make_int2(0, 0)};
  if (row < 0 || row >= starts[num_seqs]) return sight;
  const int seq = sequence_of(starts, num_seqs, row), length = here[seq + 1] - here[seq];
  sight.position = row - starts[seq], sight.is_token = sight.position < length;
  const int begin = there[num_seqs + 1 + seq], other_length = there[seq + 1] - there[seq];
  const int place = sight.position + other_length - length;
  const int first = left < 0 ? 0 : max(0, place - left);
  const int last = right < 0 ? other_length : min(other_length, place + right + 1);
  if (sight.is_token && first < last) sight.range = make_int2(begin + first, begin + last);
  return sight;
}

// positions, valid, key_ranges (local_rows) of the query rows `rows`; causal is right = 0. Where the lengths are wrong
// every row is valid, so that a loss over valid rows sees the NaN. Launch: one thread a row.
__global__ void thd_plan_queries(int* __restrict__ positions, bool* __restrict__ valid, int2* __restrict__ key_ranges,
                                 const int* __restrict__ rows, const int* __restrict__ wrong,
                                 const int* __restrict__ queries, const int* __restrict__ keys, int num_seqs,
                                 int local_rows, int left, int right) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= local_rows) return;
  const RowSight sight = sight_of(rows[t], queries, keys, num_seqs, left, right);
  positions[t] = sight.position;
  valid[t] = sight.is_token || *wrong;
  key_ranges[t] = sight.range;
}

// query_ranges (key_rows): the rows of `rows` that see each key row. They are neighbours, because `rows` ascend. For
// keys, the sides of the window swap. Launch: one thread a key row.
__global__ void thd_plan_keys(int2* __restrict__ query_ranges, const int* __restrict__ rows,
                              const int* __restrict__ queries, const int* __restrict__ keys, int num_seqs,
                              int local_rows, int key_rows, int left, int right) {
  const int key = blockIdx.x * blockDim.x + threadIdx.x;
  if (key >= key_rows) return;
  const int2 seen_by = sight_of(key, keys, queries, num_seqs, right, left).range;
  const int2 range = make_int2(lower_bound(rows, local_rows, seen_by.x), lower_bound(rows, local_rows, seen_by.y));
  query_ranges[key] = is_empty(range) ? make_int2(0, 0) : range;
}

// What a tile of rows is ordered by: length and first row of its longest sequence (of equal ones, the first), and its
// span: how many rows of the other side lie between the first and the last in sight.
struct TileCost { int length, begin, span; };
static_assert(sizeof(TileCost) == 12, "ops/plan.py keeps three ints of each tile");

// cost (tiles) of the tiles of the rows `rows` (null: all in sequence order), whose ranges are given. Launch: one warp
// a tile.
__global__ void thd_plan_tile_cost(TileCost* __restrict__ cost, const int2* __restrict__ ranges,
                                   const int* __restrict__ rows, const int* __restrict__ lengths, int num_seqs,
                                   int num_rows, int tile, int num_tiles) {
  const int* const starts = lengths + num_seqs + 1;
  const int t = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  if (t >= num_tiles) return;
  TileCost mine = {0, 0, 0};
  int first = kNone, last = 0;
  for (int i = t * tile + threadIdx.x % kWarp; i < min((t + 1) * tile, num_rows); i += kWarp) {
    const int2 range = ranges[i];
    if (!is_empty(range)) first = min(first, range.x), last = max(last, range.y);
    const int row = rows ? rows[i] : i;
    if (row < 0 || row >= starts[num_seqs]) continue;
    const int seq = sequence_of(starts, num_seqs, row), length = lengths[seq + 1] - lengths[seq];
    if (length > mine.length) mine.length = length, mine.begin = starts[seq];
  }
  const int longest = __reduce_max_sync(0xffffffffu, mine.length);
  mine.begin = __reduce_min_sync(0xffffffffu, mine.length == longest ? mine.begin : kNone);
  mine.span = max(0, __reduce_max_sync(0xffffffffu, last) - __reduce_min_sync(0xffffffffu, first));
  if (threadIdx.x % kWarp == 0) cost[t] = {longest, mine.begin, mine.span};
}

// order (2, tiles): first by falling length of the sequence and, in a sequence, by falling span; then by falling span
// alone. A tile's place is the number of tiles that come before it, which one warp counts, in one launch: a pack has a
// few thousand tiles at most. Launch: one warp a tile.
__global__ void thd_plan_tile_order(int* __restrict__ order, const TileCost* __restrict__ cost, int num_tiles) {
  const int t = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  if (t >= num_tiles) return;
  const TileCost mine = cost[t];
  int before[2] = {0, 0};
  for (int i = threadIdx.x % kWarp; i < num_tiles; i += kWarp) {
    const TileCost other = cost[i];
    const bool longer = other.span > mine.span || (other.span == mine.span && i < t);
    const bool same = other.length == mine.length && other.begin == mine.begin;
    before[0] += same ? longer
                      : other.length > mine.length || (other.length == mine.length && other.begin < mine.begin);
    before[1] += longer;
  }
  #pragma unroll
  for (int k = 0; k < 2; ++k) {
    before[k] = __reduce_add_sync(0xffffffffu, before[k]);
    if (threadIdx.x % kWarp == 0) order[k * num_tiles + before[k]] = t;
  }
}
