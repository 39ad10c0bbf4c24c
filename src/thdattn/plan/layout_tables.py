"""Contents of LayoutTables: the layout of one batch, in pieces, if it fits the capacity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from thdattn.balance import balanced_runs
from thdattn.capacity import BalancedCapacity, Window, most_pieces
from thdattn.plan.key_transfers import Pieces, all_rows, needed_rows
from thdattn.sharding import Sharding

_BEHIND_ALL = np.iinfo(np.int32).max  # begin of the pieces that a layout does not use


def excess(sharding: Sharding, windows: Sequence[Window], capacity: BalancedCapacity, max_runs: int) -> str:
    """Describe by how much a layout exceeds a capacity; return "" if it fits. All ranks return the same."""
    for window in windows:
        needed = needed_rows(sharding.batch, sharding.cp_size, window, sharding.local_rows)
        if over := needed.excess(capacity):
            return over
        runs = len(balanced_runs(sharding.batch, sharding.cp_size).rank) + needed.runs.shape[1]
        if runs > max_runs:
            return f"{runs} runs of rows, wanted at most {max_runs}"
    return ""


def pack(
    sharding: Sharding, cp_rank: int, windows: Sequence[Window], capacity: BalancedCapacity, max_runs: int
) -> list[NDArray[np.int32]]:
    """Return what the words of a rank's tables become for a layout that fits, one array after another."""
    of = sharding.batch, sharding.cp_size
    tables = [(1, all_rows(*of, sharding.local_rows))]
    for window in windows:
        side = needed_rows(*of, window, sharding.local_rows, capacity).key_side(cp_rank)
        tables.append((5, Pieces.joined(side)))
    return [_filled_up(pieces, most_pieces(num_arrays, max_runs)) for num_arrays, pieces in tables]


def _filled_up(pieces: Pieces, count: int) -> NDArray[np.int32]:
    """Return the table of pieces, with unused ones at the end."""
    table: NDArray[np.int32] = np.full((2, count), (([_BEHIND_ALL], [-1])), np.int32)
    table[:, : len(pieces.begin)] = pieces.begin, pieces.value
    return table.ravel()
