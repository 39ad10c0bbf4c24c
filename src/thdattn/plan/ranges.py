"""The arrays of a plan from lengths on the host, in NumPy: the rows that each position sees, as ranges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdattn.packing import PackedBatch
from thdattn.plan.key_transfers import Pieces, needed_rows
from thdattn.plan.mask import ends_in_sight, in_sight, positions_in_paths, transposed
from thdattn.plan.plan import PlanArrays
from thdattn.sharding import Sharding

FEW_SEQUENCES = 4  # equal causal ones; lengths that leave as large a share of all pairs count as few, too


def host_arrays(
    sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int],
    key_batch: PackedBatch | None = None, keys_of: int | None = None,
) -> PlanArrays:
    """Compute the arrays of a plan from lengths on the host, in NumPy, without a Python loop over sequences.

    Args:
        sharding: the sharding of a batch on the host.
        window: (left, right), -1 = unlimited; causal is right = 0.
        tiles: rows per query tile and per key tile.
        key_batch: for one rank, lengths of the keys of as many sequences; None: those of the queries.
        keys_of: the rank whose rows are the key buffer; None: see Plan.keys_of.

    Returns:
        PlanArrays of NumPy arrays.
    """
    batch, rows = sharding.batch, sharding.rows(cp_rank)
    all_rows = rows if sharding.cp_size == 1 else np.concatenate([sharding.rows(r) for r in range(sharding.cp_size)])
    keys_there = key_batch or batch
    side = _key_side(sharding, cp_rank, window, all_rows, key_batch, keys_of)
    key_rows = side["rows_of_keys"]
    if key_rows is None:
        key_rows = np.arange(keys_there.total_rows, dtype=np.int32)
    queries, keys = _locate(rows, batch, keys_there), _locate(key_rows, keys_there, batch)
    key_ranges = _ranges_in(key_rows, _rows_in_sight(queries, window))
    query_ranges = _ranges_in(rows, _rows_in_sight(keys, transposed(window)))
    has_trees = batch.trees is not None
    if has_trees:
        key_ranges[~_covered(query_ranges, len(rows))] = 0
    return PlanArrays(
        rows=rows,
        positions=queries.path_position,
        valid=queries.position < queries.length,
        key_ranges=key_ranges,
        query_ranges=query_ranges,
        query_tiles=_tile_orders(queries, key_ranges, tiles[0], len(query_ranges), -1 if has_trees else 0),
        key_tiles=_tile_orders(keys, query_ranges, tiles[1], len(key_ranges), 1 if has_trees else 0),
        all_rows=all_rows,
        **side,
    )


def key_ranges(
    sharding: Sharding, cp_rank: int, window: tuple[int, int], keys_of: int | None = None
) -> NDArray[np.int32]:
    """Compute key_ranges of host_arrays alone, for self-attention, in time linear in one rank's rows."""
    batch, rows_of_keys = sharding.batch, None if keys_of is None else sharding.rows(keys_of)
    if keys_of is None and sharding.by_runs:
        needed = needed_rows(sharding, window)
        rows_of_keys = Pieces.of(*needed.rows_of_keys(cp_rank, sharding.capacity)).filled()
    ranges = _rows_in_sight(_locate(sharding.rows(cp_rank), batch, batch), window)
    return ranges if rows_of_keys is None else _ranges_in(rows_of_keys, ranges)


def _key_side(
    sharding: Sharding, cp_rank: int, window: tuple[int, int], all_rows: NDArray[np.int32],
    key_batch: PackedBatch | None, keys_of: int | None,
) -> dict[str, NDArray[np.int32] | None]:
    """Return rank_order and rows_of_keys, and with needed rows sends, returns and places."""
    if key_batch is not None:
        return {"rank_order": np.arange(key_batch.total_rows, dtype=np.int32), "rows_of_keys": None}
    if keys_of is not None:
        return {"rank_order": None, "rows_of_keys": sharding.rows(keys_of)}
    if not sharding.by_runs:
        return {"rank_order": all_rows, "rows_of_keys": None}
    side = needed_rows(sharding, window).key_side(cp_rank, sharding.capacity).filled()
    return {**side, "returns": side["returns"].reshape(sharding.cp_size, sharding.local_rows)}


def _ranges_in(rows: NDArray[np.int32], ranges: NDArray[np.int32]) -> NDArray[np.int32]:
    """Convert ranges of rows of the pack to ranges of indices into `rows`, which ascend, fillers at the end."""
    found = np.searchsorted(rows[rows >= 0], ranges).astype(np.int32)
    found[found[:, 0] >= found[:, 1]] = 0
    return found


def _covered(ranges: NDArray[np.int32], num_rows: int) -> NDArray[np.bool_]:
    """Return whether each of num_rows rows is in one of the ranges."""
    begun = np.zeros((2, num_rows + 1), np.int64)
    np.add.at(begun[0], ranges[:, 0], 1)
    np.add.at(begun[1], ranges[:, 1], 1)
    return np.cumsum(begun[0] - begun[1])[:-1] > 0


@dataclass(frozen=True)
class _Located:
    """Rows of one side, queries or keys, with their places; int32 each, 0 outside all sequences.

    begin, length: first row and length of a row's sequence.
    position: place of a row in its sequence.
    end: length of the sequence as the row sees it: in trees it ends with the row's subtree.
    other_begin, other_end: first row and end of that sequence on the other side.
    path_position: position of a row in its sequence, in trees from the root.
    """

    begin: NDArray[np.int32]
    length: NDArray[np.int32]
    position: NDArray[np.int32]
    end: NDArray[np.int32]
    other_begin: NDArray[np.int32]
    other_end: NDArray[np.int32]
    path_position: NDArray[np.int32]


def _locate(rows: NDArray[np.int32], batch: PackedBatch, other: PackedBatch) -> _Located:
    if batch.num_seqs == 0:
        return _Located(*np.zeros((7, len(rows)), np.int32))
    starts = batch.cu_seqlens_padded
    inside = (rows >= 0) & (rows < starts[-1])
    seq = np.searchsorted(starts[1:], np.where(inside, rows, 0), side="right")
    seq = np.minimum(seq, batch.num_seqs - 1)
    place = np.where(inside, rows - starts[seq], 0)
    end = ends_in_sight(batch, seq, place)
    other_end = end if other is batch else other.lengths[seq]
    found = (starts[seq], batch.lengths[seq], place, end, other.cu_seqlens_padded[seq], other_end,
             positions_in_paths(batch, seq, place))
    return _Located(*(np.where(inside, x, np.int32(0)) for x in found))


def _rows_in_sight(rows: _Located, window: tuple[int, int]) -> NDArray[np.int32]:
    """Return [begin, end), the rows of the other side that each row sees; (0, 0) for none and for padding."""
    first, last = in_sight(rows.position, rows.end, rows.other_end, window)
    ranges: NDArray[np.int32] = np.stack([rows.other_begin + first, rows.other_begin + last], axis=1)
    ranges[(rows.position >= rows.end) | (first >= last)] = 0
    return ranges


def _tile_orders(
    rows: _Located, ranges: NDArray[np.int32], tile: int, num_others: int, in_trees: int
) -> NDArray[np.int32]:
    """Return two orders of tiles, (2, tiles).

    The first order is by descending length of a tile's longest sequence, and inside a sequence by descending span. The
    second is by descending span alone; few sequences use it for both. The span of a tile is the number of rows of the
    other side between the first and the last that it sees. Ties keep the order of sequences and tiles.

    Args:
        in_trees: 0 if sequences are no prefix trees. In trees, the first order has the tiles of a tree as they are (1)
            or backwards (-1), and few trees use it too; see thd_plan_tree_order.
    """
    if not len(ranges):
        return np.zeros((2, 0), np.int32)
    starts = np.arange(0, len(ranges), tile)
    empty = ranges[:, 0] >= ranges[:, 1]
    first = np.minimum.reduceat(np.where(empty, np.iinfo(np.int32).max, ranges[:, 0]), starts)
    last = np.maximum.reduceat(np.where(empty, 0, ranges[:, 1]), starts)
    span = np.maximum(0, last.astype(np.int64) - first)
    longest = np.where(rows.length > 0, (rows.length.astype(np.int64) << 32) - rows.begin, 0)
    sequence = np.maximum.reduceat(longest, starts)
    by_span = np.argsort(-span, kind="stable")
    few = not in_trees and len(span) * num_others <= 2 * FEW_SEQUENCES * int(span.sum())
    inside = in_trees * np.arange(len(span)) if in_trees else -span
    return np.stack([by_span if few else np.lexsort((inside, -sequence)), by_span]).astype(np.int32)
