"""How much each rank computes of a batch: visible pairs and tiles of scores, counted on the host from key ranges."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdattn.balanced import Ints, once
from thdattn.host_plan import key_ranges
from thdattn.sharding import Sharding

TILE = 128  # rows of queries and of keys


def pairs_and_tiles(sharding: Sharding, window: tuple[int, int]) -> tuple[Ints, Ints]:
    """Of every rank, over all keys that it sees.

    Args:
        sharding: of a batch on the host.
        window: (left, right), -1 = unlimited; causal is right = 0.

    Returns:
        pairs, tiles: (cp_size,), pairs of a query and a key that the mask leaves, and tiles that have one of them, of
        one head. Counted once per batch.
    """
    def counted() -> tuple[Ints, Ints]:
        ranges = [key_ranges(sharding, rank, window) for rank in range(sharding.cp_size)]
        pairs = [int((end - begin).sum(dtype=np.int64)) for begin, end in (x.T for x in ranges)]
        return np.array(pairs), np.array([touched(x) for x in ranges])

    return once(sharding.batch, ("tiles", *_traits(sharding), window), counted)


def tiles_of_slices(sharding: Sharding, window: tuple[int, int]) -> Ints:
    """(cp_size, cp_size), tiles of each rank (row) over the rows of every one (column), as a ring computes them."""
    ranks = range(sharding.cp_size)
    return once(sharding.batch, ("tiles of slices", *_traits(sharding), window), lambda: np.array(
        [[touched(key_ranges(sharding, rank, window, keys_of=other)) for other in ranks] for rank in ranks]))


def touched(ranges: NDArray[np.int32]) -> int:
    """Tiles in which some query sees some key.

    Args:
        ranges: (rows, 2), [begin, end) keys that every query sees; both ascend but for rows that see none.
    """
    row = np.flatnonzero(ranges[:, 0] < ranges[:, 1])
    begin, end = ranges[row].astype(np.int64).T
    first, last, tile = begin // TILE, -(-end // TILE), row // TILE
    done = np.where(np.append(-1, tile[:-1]) == tile, np.append(0, last[:-1]), 0)[: len(row)]
    return int(np.maximum(0, last - np.maximum(first, done)).sum())


def _traits(sharding: Sharding) -> tuple[str, int, int]:
    return sharding.strategy, sharding.cp_size, sharding.local_rows
