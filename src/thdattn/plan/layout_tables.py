"""Contents of LayoutTables: the layout of one batch, in pieces, if it fits the capacity."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from thdattn.balance import balanced_runs
from thdattn.capacity import BalancedCapacity, Flags, LayoutSizes, LayoutTables, Mask
from thdattn.packing import once
from thdattn.plan.key_transfers import Pieces, all_rows, foreign_tiles, needed_rows
from thdattn.sharding import Sharding

_BEHIND_ALL = np.iinfo(np.int32).max  # begin of the pieces that a layout does not use


def excess(sharding: Sharding, sizes: LayoutSizes) -> str:
    """Describe by how much a layout exceeds the sizes; return "" if it fits. All ranks return the same."""
    for mask, capacity in sizes.capacities.items():
        needed = needed_rows(sharding, mask.window)
        if over := needed.excess(capacity):
            return over
        runs = len(balanced_runs(sharding.batch, sharding.cp_size).rank) + needed.runs.shape[1]
        if runs > sizes.max_runs:
            return f"{runs} runs of rows, wanted at most {sizes.max_runs}"
        if over := capacity.excess_tiles(_foreign(sharding, mask, capacity), mask.tiles):
            return over
    return ""


def needed_capacity(sharding: Sharding, masks: Iterable[Mask]) -> BalancedCapacity:
    """Return the least capacity that a layout fits."""
    found = []
    for mask in masks:
        needed = needed_rows(sharding, mask.window)
        queries, keys = _foreign(sharding, mask)
        early_queries = min(sharding.local_rows, mask.tiles[0] * (~queries).sum(1).min())
        found.append((needed.table.max(), needed.sizes.max(), -early_queries, mask.tiles[1] * keys.sum(1).max()))
    message_rows, key_rows, later, early = np.max(found, axis=0).tolist()
    return BalancedCapacity(message_rows, key_rows, -later, early)


def write(sharding: Sharding, cp_rank: int, tables: LayoutTables) -> None:
    """Write the layout, which fits, to a rank's tables; they are in host memory here."""
    _fill(tables.rows, all_rows(sharding))
    for mask, capacity in tables.sizes.capacities.items():
        _fill(tables.key_side(mask), needed_rows(sharding, mask.window).key_side(cp_rank, capacity).pieces)
        queries, keys = _foreign(sharding, mask, capacity)
        first_tiles = capacity.first_of((queries[cp_rank], keys[cp_rank]), mask.tiles)
        for second, first in zip(tables.second_tiles(mask), first_tiles, strict=True):
            second[:] = ~first


def _foreign(sharding: Sharding, mask: Mask, capacity: BalancedCapacity | None = None) -> Flags:
    """Return foreign_tiles of all ranks of a layout; cached per batch."""
    key = "foreign tiles", sharding.cp_size, mask, sharding.local_rows, capacity
    return once(sharding.batch, key, lambda: foreign_tiles(sharding, mask, None, capacity))


def _fill(table: tuple[NDArray[np.int32], np.int32], pieces: Pieces) -> None:
    """Write pieces to a table, and behind them pieces that no row is in."""
    begin, value = table[0].reshape(2, -1)
    count = len(pieces.begin)
    begin[:count], value[:count] = pieces.begin, pieces.value
    begin[count:] = _BEHIND_ALL
