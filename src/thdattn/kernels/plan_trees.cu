// The arrays of a plan of prefix trees: what differs from those of a plan of sequences, after kernels.cu has made them.
//
// In the plan of sequences a key is seen until the end of its tree; here, until the end of its node's subtree. See
// kernels/trees.cuh for the rule.

#pragma once

#include "kernels.cu"
#include "kernels/trees.cuh"

// The nodes with tokens of a pack, in the order of their rows. The last ones begin behind the last tree and stand for
// all rows there. table (5, count), as plan/node_table.py makes it:
//
// first      first row of each node
// behind     row behind its last token
// end        row behind its subtree
// skipped    what to add to a place in the tree for the position on the path from the root
// above      nearest ancestor with tokens, -1 for none
struct Nodes {
  const int* table;
  int count;

  __device__ __forceinline__ int of(int row) const { return sequence_of(table, count, row); }
  __device__ __forceinline__ int first(int node) const { return table[node]; }
  __device__ __forceinline__ int behind(int node) const { return table[count + node]; }
  __device__ __forceinline__ int end(int node) const { return table[2 * count + node]; }
  __device__ __forceinline__ int skipped(int node) const { return table[3 * count + node]; }
  __device__ __forceinline__ int above(int node) const { return table[4 * count + node]; }
};

// Counts the positions of rows from the root of their tree. positions (local_rows): places in the trees at first.
// Launch: one thread per row.
__global__ void thd_plan_tree_positions(int* __restrict__ positions, const int* __restrict__ rows,
                                        const int* __restrict__ table, int num_nodes, int local_rows) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const Nodes nodes = {table, num_nodes};
  if (i < local_rows) positions[i] += nodes.skipped(nodes.of(rows[i]));
}

// Returns whether the token at a row of the pack sees one of the keys, in its own node or in an ancestor.
__device__ __forceinline__ bool sees_one_of(Side keys, int row, Nodes nodes) {
  for (int node = nodes.of(row), behind = row + 1;;) {
    if (keys.rows_before(nodes.first(node)) < keys.rows_before(behind)) return true;
    node = nodes.above(node);
    if (node < 0) return false;
    behind = nodes.behind(node);
  }
}

// Limits the ranges of thd_plan_ranges, whose arguments these are, to what trees show: a key is seen until the end of
// its node's subtree, and the key range of a row that sees none of the keys is empty. It writes query_ends of struct
// Trees.
// Launch: grid (blocks, 2), one thread per query row and one per element of query_ends.
__global__ void thd_plan_tree_ranges(int* __restrict__ query_ends, int2* __restrict__ key_ranges,
                                     int2* __restrict__ query_ranges, const int* __restrict__ rows,
                                     const int* __restrict__ rows_of_keys, const int* __restrict__ table,
                                     int num_nodes, int local_rows, int key_rows, int num_ends) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const Side queries = {rows, local_rows}, keys = {rows_of_keys, key_rows};
  const Nodes nodes = {table, num_nodes};
  if (blockIdx.y == 0) {
    if (i < local_rows && !is_empty(key_ranges[i]) && !sees_one_of(keys, queries[i], nodes))
      key_ranges[i] = make_int2(0, 0);
  } else if (i < num_ends) {
    int end = 0;
    if (i < key_rows && !is_empty(query_ranges[i])) {
      const int2 in_tree = query_ranges[i], seen = {in_tree.x, queries.rows_before(nodes.end(nodes.of(keys[i])))};
      query_ranges[i] = is_empty(seen) ? make_int2(0, 0) : seen;
      if (!is_empty(seen)) end = seen.y < in_tree.y ? seen.y : kNone;
    }
    query_ends[i] = end;
  }
}

// Writes the other arrays of struct Trees. Launch: one warp per group of keys.
__global__ void thd_plan_tree_ends(const int* __restrict__ query_ends, int2* __restrict__ group_ends,
                                   int* __restrict__ group_begins, const int2* __restrict__ query_ranges, int key_rows,
                                   int num_groups) {
  const int group = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  if (group >= num_groups) return;
  int least = kNone, most = 0, begin = kNone;
  #pragma unroll
  for (int i = lane; i < Trees::kTreeGroup; i += kWarp) {
    const int key = group * Trees::kTreeGroup + i;
    const int2 seen = range_of(query_ranges, key, key_rows);
    least = min(least, query_ends[key]);
    if (!is_empty(seen)) most = max(most, seen.y), begin = min(begin, seen.x);
  }
  least = __reduce_min_sync(0xffffffffu, least), most = __reduce_max_sync(0xffffffffu, most);
  begin = __reduce_min_sync(0xffffffffu, begin);
  if (lane == 0) group_ends[group] = make_int2(least, most), group_begins[group] = begin;
}

// Replaces the first of the two orders that thd_plan_tile_order makes. Trees still come by decreasing length, and one
// after the other even if they are few. Within a tree, tiles of keys come from the root on, and tiles of queries from
// the end on. So what is computed at the same time belongs to one branch, whose rows the L2 cache holds. By span, tiles
// of one depth would come together, which share no rows. Launch: as thd_plan_tile_cost.
__global__ void thd_plan_tree_order(int* __restrict__ query_tiles, int* __restrict__ key_tiles, int num_query_tiles,
                                    int num_key_tiles) {
  const bool of_keys = blockIdx.y;
  const Tiles tiles = {of_keys ? key_tiles : query_tiles, of_keys ? num_key_tiles : num_query_tiles};
  const TileCost* const cost = tiles.cost();
  const int t = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  if (t >= tiles.count) return;
  const TileCost mine = cost[t];
  int before = 0;
  for (int i = threadIdx.x % kWarp; i < tiles.count; i += kWarp) {
    const TileCost other = cost[i];
    if (other.length != mine.length) before += other.length > mine.length;
    else if (other.begin != mine.begin) before += other.begin < mine.begin;
    else before += of_keys ? i < t : i > t;
  }
  before = __reduce_add_sync(0xffffffffu, before);
  if (threadIdx.x % kWarp == 0) tiles.made[before] = t;
}
