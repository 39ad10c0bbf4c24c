"""Count the work of each rank on the host, from key ranges: visible pairs and tiles of scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdattn.balance import Ints, once
from thdattn.plan.key_transfers import foreign_tiles
from thdattn.plan.ranges import key_ranges
from thdattn.sharding import Sharding

TILE = 128  # rows of queries and of keys


def pairs_and_tiles(sharding: Sharding, window: tuple[int, int]) -> tuple[Ints, Ints]:
    """Count pairs and tiles of every rank, over all keys that it sees.

    Args:
        sharding: of a batch on the host.
        window: (left, right), -1 = unlimited; causal is right = 0.

    Returns:
        pairs: (cp_size,), (query, key) pairs that the mask leaves.
        tiles: (cp_size,), tiles of one head that have such a pair. Both are cached per batch.
    """
    def counted() -> tuple[Ints, Ints]:
        ranges = [key_ranges(sharding, rank, window) for rank in range(sharding.cp_size)]
        pairs = [int((end - begin).sum(dtype=np.int64)) for begin, end in (x.T for x in ranges)]
        return np.array(pairs), np.array([touched(x) for x in ranges])

    return once(sharding.batch, ("tiles", *_traits(sharding), window), counted)


def tiles_of_slices(sharding: Sharding, window: tuple[int, int]) -> Ints:
    """Count (cp_size, cp_size) tiles of each rank (row) over the rows of each one (column), as in a ring."""
    ranks = range(sharding.cp_size)
    return once(sharding.batch, ("tiles of slices", *_traits(sharding), window), lambda: np.array(
        [[touched(key_ranges(sharding, rank, window, keys_of=other)) for other in ranks] for rank in ranks]))


def own_tiles(sharding: Sharding, window: tuple[int, int]) -> Ints:
    """Count the tiles of every rank whose compute overlaps the exchange of needed rows, (2, cp_size).

    Row 0, for the forward: tiles whose queries see no row of another rank. Row 1, for the backward: tiles whose keys
    include no row of another rank.
    """
    def counted() -> Ints:
        found = []
        for rank in range(sharding.cp_size):
            foreign = foreign_tiles(sharding.batch, sharding.cp_size, window, sharding.local_rows, rank, (TILE, TILE))
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
