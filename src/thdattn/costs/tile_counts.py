"""Count the work of each rank on the host, from key ranges: visible pairs and tiles of scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdattn.balance import Ints
from thdattn.capacity import Mask
from thdattn.packing import once
from thdattn.plan.key_transfers import foreign_tiles
from thdattn.plan.ranges import key_ranges
from thdattn.sharding import Sharding

TILE = 128  # rows of queries and of keys
COUNTED = 32  # ranks whose work is counted, evenly spaced, where there are more; shardings make all ranks' work even
RING = 16  # ranks up to which every step of a ring is counted
RING_RANKS = 4  # ranks that are counted in a longer one


def counted_ranks(cp_size: int, most: int = COUNTED) -> Ints:
    """Return the ranks that stand for all, ascending: all of them, or `most` evenly spaced ones."""
    return np.unique(np.linspace(0, cp_size - 1, min(cp_size, most)).round().astype(np.int64))


def pairs_and_tiles(sharding: Sharding, window: tuple[int, int]) -> tuple[Ints, Ints]:
    """Count pairs and tiles of counted_ranks, over all keys that they see.

    Args:
        window: (left, right), -1 = unlimited; causal is right = 0.

    Returns:
        pairs: (number of ranks,), (query, key) pairs that the mask leaves.
        tiles: (number of ranks,), tiles of one head that have such a pair. Both are cached per batch.
    """
    def counted() -> tuple[Ints, Ints]:
        ranges = [key_ranges(sharding, rank, window) for rank in counted_ranks(sharding.cp_size).tolist()]
        pairs = [int((end - begin).sum(dtype=np.int64)) for begin, end in (x.T for x in ranges)]
        return np.array(pairs), np.array([touched(x) for x in ranges])

    return once(sharding.batch, ("tiles", *_traits(sharding), window), counted)


def tiles_of_slices(sharding: Sharding, window: tuple[int, int]) -> Ints:
    """Count (cp_size, cp_size) tiles of each rank (row) over the rows of each one (column), as in a ring."""
    ranks = range(sharding.cp_size)
    return once(sharding.batch, ("tiles of slices", *_traits(sharding), window), lambda: np.array(
        [[touched(key_ranges(sharding, rank, window, keys_of=other)) for other in ranks] for rank in ranks]))


def tiles_of_steps(sharding: Sharding, window: tuple[int, int]) -> NDArray[np.float64]:
    """Count the tiles of the busiest rank in every step of a ring, (cp_size,); step 0 is its own slice.

    On more than RING ranks, a few ranks are counted at some steps, which are close to each other near the own slice.
    Other steps are interpolated.
    """
    size = sharding.cp_size
    if size <= RING:
        tiles, ranks = tiles_of_slices(sharding, window), np.arange(size)
        return np.array([tiles[ranks, (ranks - step) % size].max() for step in range(size)], np.float64)

    def counted() -> NDArray[np.float64]:
        near = np.unique(np.geomspace(1, size // 2, RING).round().astype(np.int64))
        steps = np.unique(np.concatenate([[0], near, size - near]))
        found = [max(touched(key_ranges(sharding, rank, window, keys_of=(rank - step) % size))
                     for rank in counted_ranks(size, RING_RANKS).tolist()) for step in steps.tolist()]
        return np.interp(np.arange(size), steps, found)

    return once(sharding.batch, ("tiles of steps", *_traits(sharding), window), counted)


def own_tiles(sharding: Sharding, window: tuple[int, int]) -> Ints:
    """Count the tiles of counted_ranks whose compute overlaps the exchange of needed rows, (2, number of ranks).

    Row 0, for the forward: tiles whose queries see no row of another rank. Row 1, for the backward: tiles whose keys
    include no row of another rank.
    """
    def counted() -> Ints:
        found = []
        for rank in counted_ranks(sharding.cp_size).tolist():
            foreign = foreign_tiles(sharding, Mask(window, (TILE, TILE)), rank)
            query, first, last = _runs(key_ranges(sharding, rank, window))
            keys = np.append(0, np.cumsum(~foreign[1]))
            found.append((int((last - first)[~foreign[0][query]].sum()), int((keys[last] - keys[first]).sum())))
        return np.array(found).T

    return once(sharding.batch, ("own tiles", *_traits(sharding), window), counted)


def touched(ranges: NDArray[np.int32]) -> int:
    """Count the tiles in which some query sees some key; ranges as for _runs."""
    _, first, last = _runs(ranges)
    return int((last - first).sum())


def _runs(ranges: NDArray[np.int32]) -> tuple[Ints, Ints, Ints]:
    """Find the tiles in which some query sees some key, each once: tiles of queries, with [first, last) tiles of keys.

    Args:
        ranges: (rows, 2), [begin, end) keys that every query sees; both ascend but for rows that see none.
    """
    row = np.flatnonzero(ranges[:, 0] < ranges[:, 1])
    begin, end = ranges[row].astype(np.int64).T
    first, last, tile = begin // TILE, -(-end // TILE), row // TILE
    done = np.where(np.append(-1, tile[:-1]) == tile, np.append(0, last[:-1]), 0)[: len(row)]
    first = np.minimum(np.maximum(first, done), last)
    return tile, first, last


def _traits(sharding: Sharding) -> tuple[str, int, int]:
    return sharding.strategy, sharding.cp_size, sharding.local_rows
