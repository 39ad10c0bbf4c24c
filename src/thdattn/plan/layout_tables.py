"""Contents of LayoutTables: the layout of one batch, in pieces, if it fits the capacity."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from thdattn.balance import balanced_runs, once
from thdattn.capacity import BalancedCapacity, Flags, LayoutSizes, Mask
from thdattn.plan.key_transfers import Pieces, all_rows, foreign_tiles, needed_rows
from thdattn.sharding import Sharding

_BEHIND_ALL = np.iinfo(np.int32).max  # begin of the pieces that a layout does not use


def excess(sharding: Sharding, sizes: LayoutSizes) -> str:
    """Describe by how much a layout exceeds the sizes; return "" if it fits. All ranks return the same."""
    of = sharding.batch, sharding.cp_size
    for (window, tiles), capacity in sizes.capacities.items():
        needed = needed_rows(*of, window, sharding.local_rows)
        if over := needed.excess(capacity):
            return over
        runs = len(balanced_runs(*of).rank) + needed.runs.shape[1]
        if runs > sizes.max_runs:
            return f"{runs} runs of rows, wanted at most {sizes.max_runs}"
        for rank in range(sharding.cp_size):
            if over := capacity.excess_tiles(_foreign(sharding, rank, Mask(window, tiles), capacity), tiles):
                return over
    return ""


def needed_capacity(sharding: Sharding, masks: Iterable[Mask]) -> BalancedCapacity:
    """Return the least capacity that a layout fits."""
    of, found = (sharding.batch, sharding.cp_size), []
    for window, tiles in masks:
        needed = needed_rows(*of, window, sharding.local_rows)
        foreign = [_foreign(sharding, rank, Mask(window, tiles)) for rank in range(sharding.cp_size)]
        early_queries = min(sharding.local_rows, tiles[0] * min((~queries).sum() for queries, _ in foreign))
        early_keys = tiles[1] * max(keys.sum() for _, keys in foreign)
        found.append((needed.table.max(), needed.sizes.max(), -early_queries, early_keys))
    message_rows, key_rows, later, early = np.max(found, axis=0).tolist()
    return BalancedCapacity(message_rows, key_rows, -later, early)


def pack(sharding: Sharding, cp_rank: int, sizes: LayoutSizes) -> list[NDArray[np.int32]]:
    """Return what the words of a rank's tables become for a layout that fits, one array after another."""
    of = sharding.batch, sharding.cp_size
    tables = [_filled_up(all_rows(*of, sharding.local_rows), sizes.num_pieces(1))]
    for mask, capacity in sizes.capacities.items():
        side = needed_rows(*of, mask.window, sharding.local_rows, capacity).key_side(cp_rank)
        tables.append(_filled_up(Pieces.joined(side), sizes.num_pieces()))
        first_tiles = capacity.first_of(_foreign(sharding, cp_rank, mask, capacity), mask.tiles)
        tables += [(~first).astype(np.int32) for first in first_tiles]
    return tables


def _foreign(sharding: Sharding, cp_rank: int, mask: Mask, capacity: BalancedCapacity | None = None) -> Flags:
    """Return foreign_tiles of a layout; cached per batch."""
    of = sharding.batch, sharding.cp_size, mask.window, sharding.local_rows, cp_rank, mask.tiles, capacity
    return once(sharding.batch, ("foreign tiles", *of[1:]), lambda: foreign_tiles(*of))


def _filled_up(pieces: Pieces, count: int) -> NDArray[np.int32]:
    """Return the table of pieces, with unused ones at the end."""
    table: NDArray[np.int32] = np.full((2, count), (([_BEHIND_ALL], [-1])), np.int32)
    table[:, : len(pieces.begin)] = pieces.begin, pieces.value
    return table.ravel()
