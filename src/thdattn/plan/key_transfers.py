"""What travels where rows are spread by runs: the keys that a rank's queries see, which ranks have them, and who sends
what to whom. Every rank knows it of all ranks, from the lengths.

It is found from runs of neighbouring rows, of which there are few; arrays of rows are made of their pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.balance import Ints, balanced_runs, once, within_rank
from thdattn.packing import PackedBatch, rows_of_runs
from thdattn.plan.mask import in_sight, transposed


class Pieces(NamedTuple):
    """An array that is made of pieces: numbers that follow one another, or -1 all through.

    size: of the array.
    begin: (num_pieces,) where each begins, ascending, the first one at 0.
    value: (num_pieces,) its first number; -1: of a piece of -1.
    """

    size: int
    begin: Ints
    value: Ints

    @classmethod
    def of(cls, size: int, begin: Ints, sizes: Ints, value: Ints) -> Pieces:
        """Pieces in ascending order; what lies between them is -1."""
        begins = np.append(0, np.stack([begin, begin + sizes], axis=1))
        values = np.append(-1, np.stack([value, np.full(len(value), -1)], axis=1))
        some = np.diff(begins, append=size) > 0
        return cls(size, begins[some], values[some])

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """Of arrays that lie one behind another."""
        ends = np.cumsum([part.size for part in parts])
        begins = [part.begin + end - part.size for part, end in zip(parts, ends, strict=True)]
        return cls(int(ends[-1]), np.concatenate(begins), np.concatenate([part.value for part in parts]))

    def filled(self) -> NDArray[np.int32]:
        """The array."""
        sizes = np.diff(self.begin, append=self.size)
        none = np.repeat(self.value < 0, sizes)
        numbers = np.repeat(self.value - self.begin, sizes) + np.arange(self.size)
        array: NDArray[np.int32] = np.where(none, -1, numbers).astype(np.int32)
        return array

    def table(self) -> NDArray[np.int32]:
        """(2 * num_pieces,), begin and value, as kernels read them."""
        return np.concatenate([self.begin, self.value]).astype(np.int32)


class Routes:
    """How many rows of keys go from rank to rank.

    Args:
        table: (cp_size, cp_size), rows that rank i sends to rank j; 0 on the diagonal.
        cp_rank: this rank.

    Attributes:
        table: as passed.
        is_empty: whether nothing goes from any rank to any other one.
        sent, received: (cp_size,), rows that this rank sends to each, and gets from each.
        num_sent, num_received: of all ranks together.
    """

    def __init__(self, table: Ints, cp_rank: int) -> None:
        self.table, self.is_empty = table, not table.any()
        self.sent, self.received = table[cp_rank], table[:, cp_rank]
        self.num_sent, self.num_received = int(self.sent.sum()), int(self.received.sum())


class KeySide(NamedTuple):
    """The arrays of a rank's key buffer of needed rows; see PlanArrays."""

    rows_of_keys: Pieces
    rank_order: Pieces
    sends: Pieces
    returns: Pieces
    places: Pieces


@dataclass(frozen=True, eq=False)
class NeededRows:
    """The key buffers of all ranks under a mask, and how they are filled.

    A buffer has the rows that some query of the rank sees, ascending: no padding.

    Attributes:
        local_rows: rows that every rank stores.
        sizes: (cp_size,) rows of each buffer.
        runs: (4, num_runs), rank, begin and end of the rows of the pack that are neighbours in its buffer, and the
            row there where they begin; rank after rank, ascending.
        moves: (5, num_moves), who has rows, whose buffer they go to, the local row and the row of the buffer where they
            begin, and how many they are; by sender, receiver and row. Those of one rank to itself are among them.
    """

    local_rows: int
    sizes: Ints
    runs: Ints
    moves: Ints

    def table(self) -> Ints:
        """See Routes."""
        sender, receiver, _, _, sizes = self.moves
        table = np.zeros((len(self.sizes), len(self.sizes)), np.int64)
        np.add.at(table, (sender, receiver), sizes)
        np.fill_diagonal(table, 0)
        return table

    def key_side(self, cp_rank: int) -> KeySide:
        """The arrays of one rank's buffer."""
        here = self.runs[:, self.runs[0] == cp_rank]
        _, begin, end, key_row = here
        rows_of_keys = Pieces.of(int(self.sizes[cp_rank]), key_row, end - begin, begin)

        given, taken = (self.moves[:, self.moves[i] == cp_rank] for i in (0, 1))
        _, receiver, row, key_row, sizes = given
        own = receiver == cp_rank
        places = _unread(given[2:, own], given[2:, ~own], int(self.sizes[cp_rank]))
        place = np.cumsum(np.where(own, 0, sizes)) - sizes  # among the rows that are sent
        num_returns = len(self.sizes) * self.local_rows
        returns = Pieces.of(num_returns, receiver * self.local_rows + row, sizes, np.where(own, key_row, place))
        sends = Pieces.of(int(sizes[~own].sum()), place[~own], sizes[~own], row[~own])

        own = taken[0] == cp_rank
        _, _, row, key_row, sizes = np.concatenate([taken[:, ~own], taken[:, own]], axis=1)
        num_received = int(taken[4, ~own].sum())
        place = np.concatenate([np.cumsum(taken[4, ~own]) - taken[4, ~own], num_received + taken[2, own]])
        rank_order = Pieces.of(num_received + self.local_rows, place, sizes, key_row)
        return KeySide(rows_of_keys, rank_order, sends, returns, places)


def _unread(own: Ints, sent: Ints, key_rows: int) -> Pieces:
    """Where a rank's own rows are in its key buffer that no other rank gets: for every row there its local row, or -1.

    Args:
        own, sent: (3, any) local rows and rows of buffers at which moves begin, and their sizes, in ascending order.
    """
    (row, key_row, sizes), first, ends = own, np.sort(sent[0]), np.sort(sent[0] + sent[2])
    edges = np.unique(np.concatenate([row, row + sizes, first, ends]))
    begin, size = edges[:-1], np.diff(edges)
    move = np.searchsorted(row, begin, side="right") - 1
    is_sent = np.searchsorted(first, begin, side="right") > np.searchsorted(ends, begin, side="right")
    kept = ~is_sent & (move >= 0)
    begin, size, move = begin[kept], size[kept], move[kept]
    kept = begin < row[move] + sizes[move]
    begin, size, move = begin[kept], size[kept], move[kept]
    return Pieces.of(key_rows, key_row[move] + begin - row[move], size, begin)


def needed_rows(batch: PackedBatch, cp_size: int, window: tuple[int, int], local_rows: int) -> NeededRows:
    """The key buffers of all ranks over which a batch is spread by balanced_runs; made once per batch and window."""
    return once(batch, (cp_size, window, local_rows), lambda: _needed_rows(batch, cp_size, window, local_rows))


def _needed_rows(batch: PackedBatch, cp_size: int, window: tuple[int, int], local_rows: int) -> NeededRows:
    runs = balanced_runs(batch, cp_size)
    local = runs.local_rows()
    tokens = runs.sequence >= 0
    rank, begin, end, sequence, local = (x[tokens] for x in (*runs, local))
    key_rank, key_begin, key_end = _runs_in_sight(batch, rank, begin, end, sequence, window)
    key_row = within_rank(key_rank, key_end - key_begin)

    # Of every run, the runs of every rank's buffer that it overlaps: ranks lie one behind another on a line.
    apart = batch.total_rows + 1
    wanted = np.arange(cp_size) * apart
    first = np.searchsorted(key_end + key_rank * apart, begin[:, None] + wanted, side="right")
    stop = np.searchsorted(key_begin + key_rank * apart, end[:, None] + wanted, side="left")
    counts = np.maximum(stop - first, 0)
    key = rows_of_runs(first.ravel(), counts.ravel())
    run = np.repeat(np.arange(len(rank)), counts.sum(axis=1))
    low, high = np.maximum(begin[run], key_begin[key]), np.minimum(end[run], key_end[key])
    moves = np.stack([rank[run], key_rank[key], local[run] + low - begin[run], key_row[key] + low - key_begin[key],
                      high - low])  # fmt: skip
    sizes = np.bincount(key_rank, key_end - key_begin, minlength=cp_size).astype(np.int64)
    return NeededRows(local_rows, sizes, np.stack([key_rank, key_begin, key_end, key_row]),
                      moves[:, np.lexsort((moves[2], moves[1], moves[0]))])


def foreign_tiles(
    batch: PackedBatch, cp_size: int, window: tuple[int, int], local_rows: int, cp_rank: int, tiles: tuple[int, int]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tiles have to do with rows of keys of other ranks; the others can be done while such rows travel.

    Args:
        tiles: rows per tile of queries and of keys.

    Returns:
        (tiles of local query rows,), whether one of the tile's queries sees such a row; (tiles of the key buffer's
        rows,), whether one of the tile's rows is one.
    """
    needed, owned = needed_rows(batch, cp_size, window, local_rows), balanced_runs(batch, cp_size)
    sender, receiver, _, key_row, sizes = needed.moves
    foreign = np.flatnonzero((receiver == cp_rank) & (sender != cp_rank))
    foreign = foreign[np.argsort(key_row[foreign])]
    key_row, sizes = key_row[foreign], sizes[foreign]
    _, begin, _, first = needed.runs[:, needed.runs[0] == cp_rank]
    run = np.searchsorted(first, key_row, side="right") - 1
    row = begin[run] + key_row - first[run]  # of the pack

    # The queries that see them are within the same window, seen from the keys.
    sequence = np.searchsorted(batch.cu_seqlens_padded[1:], row, side="right")
    _, low, high = _runs_in_sight(
        batch, np.zeros_like(row), row, row + sizes, sequence, transposed(window))
    mine = owned.rank == cp_rank
    begin, ends, local = owned.begin[mine], owned.end[mine], owned.local_rows()[mine]

    def local_rows_before(x: Ints) -> Ints:
        run = np.searchsorted(begin, x, side="right") - 1
        return np.where(run < 0, 0, local[run] + np.minimum(x, ends[run]) - begin[run])

    return (_tiles_with(local_rows_before(low), local_rows_before(high), local_rows, tiles[0]),
            _tiles_with(key_row, key_row + sizes, int(needed.sizes[cp_rank]), tiles[1]))


def _tiles_with(begin: Ints, end: Ints, num_rows: int, tile: int) -> NDArray[np.bool_]:
    """Whether each tile of so many rows has a row of some [begin, end)."""
    some = begin < end
    begun = np.zeros((2, -(-num_rows // tile) + 1), np.int64)
    np.add.at(begun[0], begin[some] // tile, 1)
    np.add.at(begun[1], -(-end[some] // tile), 1)
    return np.cumsum(begun[0] - begun[1])[:-1] > 0


def _runs_in_sight(
    batch: PackedBatch, rank: Ints, begin: Ints, end: Ints, sequence: Ints, window: tuple[int, int]
) -> tuple[Ints, Ints, Ints]:
    """Return (rank, begin, end) of the rows of the pack that queries of runs see, those that touch being one.

    mask.py says why the queries of a run see one run of rows, whose ends ascend over a rank's runs.
    """
    first, length = batch.cu_seqlens_padded[sequence].astype(np.int64), batch.lengths[sequence].astype(np.int64)
    low = first + in_sight(begin - first, length, length, window)[0]
    high = first + in_sight(end - 1 - first, length, length, window)[1]
    new = np.ones(len(rank), bool)
    new[1:] = (rank[1:] != rank[:-1]) | (low[1:] > high[:-1])
    return rank[new], low[new], high[np.append(new[1:], True)[: len(rank)]]


def all_rows(batch: PackedBatch, cp_size: int, local_rows: int) -> Pieces:
    """The rows of the pack that the ranks of balanced_runs own, one rank after another; -1 for fillers."""
    runs = balanced_runs(batch, cp_size)
    begin = runs.rank * local_rows + runs.local_rows()
    return Pieces.of(cp_size * local_rows, begin, runs.end - runs.begin, runs.begin)
