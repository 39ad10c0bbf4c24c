"""Exchange of needed rows, for shardings by runs: the keys that each rank's queries see, owner ranks, and transfers.

Every rank computes the key buffers of all ranks from the lengths, and its own transfers. It works on runs of
consecutive rows, which are few, and expands their pieces to arrays of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.balance import Ints, balanced_runs, once, within_rank
from thdattn.capacity import BalancedCapacity, Flags
from thdattn.packing import PackedBatch, rows_of_runs
from thdattn.plan.mask import in_sight, transposed
from thdattn.trees import Trees


class Pieces(NamedTuple):
    """Array in pieces: every piece has consecutive numbers, or -1 throughout.

    begin: (num_pieces,), first index of each piece, ascending from 0.
    value: (num_pieces,), first number of each piece; -1 for a piece of -1.
    """

    size: int
    begin: Ints
    value: Ints

    @classmethod
    def of(cls, size: int, begin: Ints, sizes: Ints, value: Ints) -> Pieces:
        """Make an array of `size` from pieces in ascending order, with -1 between them."""
        begins = np.append(0, np.stack([begin, begin + sizes], axis=1))
        values = np.append(-1, np.stack([value, np.full(len(value), -1)], axis=1))
        some = np.diff(begins, append=size) > 0
        return cls(size, begins[some], values[some])

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """Concatenate arrays."""
        ends = np.cumsum([part.size for part in parts])
        begins = [part.begin + end - part.size for part, end in zip(parts, ends, strict=True)]
        return cls(int(ends[-1]), np.concatenate(begins), np.concatenate([part.value for part in parts]))

    def filled(self) -> NDArray[np.int32]:
        """Return the array, int32."""
        sizes = np.diff(self.begin, append=self.size)
        none = np.repeat(self.value < 0, sizes)
        numbers = np.repeat(self.value - self.begin, sizes) + np.arange(self.size)
        array: NDArray[np.int32] = np.where(none, -1, numbers).astype(np.int32)
        return array

    def table(self) -> NDArray[np.int32]:
        """Return begin and value, (2 * num_pieces,) int32, as kernels read them."""
        return np.concatenate([self.begin, self.value]).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Routes:
    """Numbers of key rows that ranks send to each other.

    Attributes:
        sent: (cp_size,), rows that this rank sends to each rank.
        received: (cp_size,), rows that this rank receives from each rank.
        most_sent: rows of the rank that sends most.
    """

    sent: Ints
    received: Ints
    most_sent: int
    tabulate: Callable[[], Ints]

    @classmethod
    def of(cls, needed: NeededRows, cp_rank: int) -> Routes:
        """Return the numbers of rows that the key buffers of all ranks need."""
        cp_size = len(needed.sizes)
        (_, receiver, _, _, given), (sender, _, _, _, taken) = needed.sends(cp_rank), needed.receives(cp_rank)
        sent, received = (np.bincount(peer, sizes, minlength=cp_size).astype(np.int64)
                          for peer, sizes in ((receiver, given), (sender, taken)))
        sent[cp_rank] = received[cp_rank] = 0
        return cls(sent, received, int(needed.num_sent.max()), lambda: needed.table)

    @classmethod
    def fixed(cls, capacity: BalancedCapacity, cp_size: int, cp_rank: int) -> Routes:
        """Return those of a capacity: every rank sends message_rows rows to every other one."""
        table = capacity.message_rows * (1 - np.eye(cp_size, dtype=np.int64))
        return cls(table[cp_rank], table[cp_rank], int(table[cp_rank].sum()), lambda: table)

    @property
    def is_empty(self) -> bool:
        """True if no rank sends a row to another."""
        return not self.most_sent

    @property
    def num_sent(self) -> int:
        return int(self.sent.sum())

    @property
    def num_received(self) -> int:
        return int(self.received.sum())

    @property
    def table(self) -> Ints:
        """(cp_size, cp_size), rows that rank i sends to rank j; 0 on the diagonal. Only peer memory needs all."""
        return self.tabulate()


class KeySide(NamedTuple):
    """Arrays of a rank's key buffer of needed rows; see PlanArrays."""

    rows_of_keys: Pieces
    rank_order: Pieces
    sends: Pieces
    returns: Pieces
    places: Pieces
    own_keys: Pieces


@dataclass(frozen=True, eq=False)
class NeededRows:
    """Key buffers of all ranks under a mask, and the owners of their rows.

    A buffer has the rows that some query of the rank sees, ascending, and no padding, unless sizes are fixed.

    Attributes:
        local_rows: rows that every rank stores.
        sizes: (cp_size,), rows of each buffer.
        runs: (4, num_runs): rank, begin and end of consecutive rows of the pack in the rank's buffer, and their first
            buffer row; rank after rank, ascending.
        owned: (4, num_owned): rank, begin and end of consecutive tokens of the pack that the rank owns, and their first
            local row; rank after rank, ascending.
        message_rows: rows of every message, of which the last may be empty; None: as many as the receiver needs.
    """

    local_rows: int
    sizes: Ints
    runs: Ints
    owned: Ints
    message_rows: int | None = None

    def excess(self, capacity: BalancedCapacity) -> str:
        """Describe by how much the layout exceeds a capacity; return "" if it fits."""
        if (found := self.table.max()) > capacity.message_rows:
            return f"{found} rows from one rank to another, wanted at most message_rows = {capacity.message_rows}"
        if (found := self.sizes.max()) > capacity.key_rows:
            return f"{found} rows that one rank's queries see, wanted at most key_rows = {capacity.key_rows}"
        return ""

    def within(self, capacity: BalancedCapacity) -> NeededRows:
        """Return the same buffers and messages, filled up to the sizes of a capacity that they fit."""
        return replace(self, sizes=np.full_like(self.sizes, capacity.key_rows), message_rows=capacity.message_rows)

    def sends(self, cp_rank: int) -> Ints:
        """Return the moves from a rank to all ranks, itself included, by receiver and row; see _moves."""
        return _moves(_of_rank(self.owned, cp_rank), self.runs)

    def receives(self, cp_rank: int) -> Ints:
        """Return the moves from all ranks, itself included, to a rank, by sender and row; see _moves."""
        return _moves(self.owned, _of_rank(self.runs, cp_rank))

    @cached_property
    def num_sent(self) -> Ints:
        """(cp_size,), rows that each rank sends to all others together.

        A row goes to every rank that needs it except its owner, who needs it too.
        """
        _, first, last, _ = self.runs
        rank, begin, end, _ = self.owned
        needs = _rows_below(first, end) - _rows_below(first, begin) - _rows_below(last, end) + _rows_below(last, begin)
        return np.bincount(rank, needs - (end - begin), minlength=len(self.sizes)).astype(np.int64)

    @cached_property
    def table(self) -> Ints:
        """(cp_size, cp_size), rows that rank i sends to rank j; 0 on the diagonal."""
        cp_size = len(self.sizes)
        rank, begin, end, _ = self.owned[:, np.argsort(self.owned[1])]  # in the order of the pack
        key_rank, key_begin, key_end, _ = self.runs
        first, stop = np.searchsorted(end, key_begin, side="right"), np.searchsorted(begin, key_end)
        counts = np.maximum(stop - first, 0)
        run, key = rows_of_runs(first, counts), np.repeat(np.arange(len(counts)), counts)
        sizes = np.minimum(end[run], key_end[key]) - np.maximum(begin[run], key_begin[key])
        table = np.bincount(rank[run] * cp_size + key_rank[key], sizes, cp_size**2).astype(np.int64)
        table[:: cp_size + 1] = 0
        return table.reshape(cp_size, cp_size)

    def key_side(self, cp_rank: int) -> KeySide:
        """Return the arrays of one rank's buffer."""
        _, begin, end, key_row = _of_rank(self.runs, cp_rank)
        rows_of_keys = Pieces.of(int(self.sizes[cp_rank]), key_row, end - begin, begin)

        given, taken = self.sends(cp_rank), self.receives(cp_rank)
        _, receiver, row, key_row, sizes = given
        own = receiver == cp_rank
        places = _unread(given[2:, own], given[2:, ~own], int(self.sizes[cp_rank]))
        own_keys = Pieces.of(int(self.sizes[cp_rank]), key_row[own], sizes[own], row[own])
        place, num_sent = self._messages(receiver, sizes, cp_rank)
        num_returns = len(self.sizes) * self.local_rows
        returns = Pieces.of(num_returns, receiver * self.local_rows + row, sizes, np.where(own, key_row, place))
        sends = Pieces.of(num_sent, place[~own], sizes[~own], row[~own])

        own = taken[0] == cp_rank
        place, num_received = self._messages(taken[0], taken[4], cp_rank)
        _, _, row, key_row, sizes = np.concatenate([taken[:, ~own], taken[:, own]], axis=1)
        place = np.concatenate([place[~own], num_received + taken[2, own]])
        rank_order = Pieces.of(num_received + self.local_rows, place, sizes, key_row)
        return KeySide(rows_of_keys, rank_order, sends, returns, places, own_keys)

    def _messages(self, peer: Ints, sizes: Ints, cp_rank: int) -> tuple[Ints, int]:
        """Return each move's first row among the messages of all other ranks, and the number of their rows.

        Args:
            peer, sizes: the other rank of each move, ascending, and its rows. Places of moves within the rank are
                arbitrary.
        """
        sizes = np.where(peer == cp_rank, 0, sizes)
        if self.message_rows is None:
            return np.cumsum(sizes) - sizes, int(sizes.sum())
        first = (peer - (peer > cp_rank)) * self.message_rows
        return first + within_rank(peer, sizes), (len(self.sizes) - 1) * self.message_rows


def _unread(own: Ints, sent: Ints, key_rows: int) -> Pieces:
    """Return, for every key buffer row, the local row of an own row that no other rank receives; else -1.

    Args:
        own, sent: (3, any): first local rows and first buffer rows of moves, and their sizes, ascending.
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


def needed_rows(
    batch: PackedBatch, cp_size: int, window: tuple[int, int], local_rows: int, capacity: BalancedCapacity | None = None
) -> NeededRows:
    """Return the key buffers of all ranks, for a batch spread by balanced_runs; cached per batch and window.

    Args:
        capacity: sizes to fill them up to, which the batch must fit; None: no more than is needed.
    """
    needed = once(batch, (cp_size, window, local_rows), lambda: _needed_rows(batch, cp_size, window, local_rows))
    return needed if capacity is None else needed.within(capacity)


def _needed_rows(batch: PackedBatch, cp_size: int, window: tuple[int, int], local_rows: int) -> NeededRows:
    runs = balanced_runs(batch, cp_size)
    local = runs.local_rows()
    tokens = runs.sequence >= 0
    rank, begin, end, sequence, local = (x[tokens] for x in (*runs, local))
    key_rank, key_begin, key_end = _runs_in_sight(batch, rank, begin, end, sequence, window)
    key_row = within_rank(key_rank, key_end - key_begin)

    sizes = np.bincount(key_rank, key_end - key_begin, minlength=cp_size).astype(np.int64)
    return NeededRows(local_rows, sizes, np.stack([key_rank, key_begin, key_end, key_row]),
                      np.stack([rank, begin, end, local]))


def _of_rank(runs: Ints, cp_rank: int) -> Ints:
    """Return the runs of one rank; the first row of runs is the rank, ascending."""
    first, last = np.searchsorted(runs[0], [cp_rank, cp_rank + 1])
    return runs[:, first:last]


def _moves(owned: Ints, keys: Ints) -> Ints:
    """Return the moves from runs of owners to runs of key buffers, in time linear in their product.

    Args:
        owned, keys: some of owned and of runs of NeededRows.

    Returns:
        (5, num_moves): sender, receiver, first local row of the sender, first row in the receiver's buffer, and number
        of rows; sorted by sender, receiver and row.
    """
    (rank, begin, end, local), (key_rank, key_begin, key_end, key_row) = owned, keys
    run, key = np.nonzero((begin[:, None] < key_end) & (key_begin < end[:, None]))
    low, high = np.maximum(begin[run], key_begin[key]), np.minimum(end[run], key_end[key])
    moves = np.stack([rank[run], key_rank[key], local[run] + low - begin[run], key_row[key] + low - key_begin[key],
                      high - low])
    return moves[:, np.lexsort((moves[2], moves[1], moves[0]))]


def _rows_below(begins: Ints, row: Ints) -> Ints:
    """Return the sum of max(0, row - begin) over all begins, for every row."""
    ordered = np.sort(begins)
    number = np.searchsorted(ordered, row)
    sums: Ints = number * row - np.append(0, np.cumsum(ordered))[number]
    return sums


def foreign_tiles(
    batch: PackedBatch, cp_size: int, window: tuple[int, int], local_rows: int, cp_rank: int, tiles: tuple[int, int],
    capacity: BalancedCapacity | None = None,
) -> Flags:
    """Return the tiles that need key rows of other ranks; the compute of all other tiles overlaps their exchange.

    Args:
        tiles: rows per tile of queries and of keys.
        capacity: sizes that key buffers are filled up to; see needed_rows.

    Returns:
        (query tiles,) bool, True if a query of the tile sees a row of another rank; and
        (key tiles,) bool, True if a row of the tile belongs to another rank.
    """
    needed, owned = needed_rows(batch, cp_size, window, local_rows, capacity), balanced_runs(batch, cp_size)
    sender, _, _, key_row, sizes = needed.receives(cp_rank)
    foreign = np.flatnonzero(sender != cp_rank)
    foreign = foreign[np.argsort(key_row[foreign])]
    key_row, sizes = key_row[foreign], sizes[foreign]
    _, begin, _, first = _of_rank(needed.runs, cp_rank)
    run = np.searchsorted(first, key_row, side="right") - 1
    row = begin[run] + key_row - first[run]  # row of the pack

    low, high = _queries_of_runs(batch, row, row + sizes, window)
    mine = owned.rank == cp_rank
    begin, ends, local = owned.begin[mine], owned.end[mine], owned.local_rows()[mine]

    def local_rows_before(x: Ints) -> Ints:
        run = np.searchsorted(begin, x, side="right") - 1
        return np.where(run < 0, 0, local[run] + np.minimum(x, ends[run]) - begin[run])

    return (_tiles_with(local_rows_before(low), local_rows_before(high), local_rows, tiles[0]),
            _tiles_with(key_row, key_row + sizes, int(needed.sizes[cp_rank]), tiles[1]))


def _queries_of_runs(batch: PackedBatch, begin: Ints, end: Ints, window: tuple[int, int]) -> tuple[Ints, Ints]:
    """Return (begin, end) of the rows of the pack that see keys of runs: what the transposed window shows of them."""
    if batch.trees is not None:
        first, last, stop = _rows_of_nodes(batch, batch.trees)
        begins = np.searchsorted(last, begin, side="right")
        counts = np.searchsorted(first, end, side="left") - begins
        run, node = np.repeat(np.arange(len(begin)), counts), rows_of_runs(begins, counts)
        low = np.maximum(begin[run], first[node])
        some = low < last[node]
        return low[some], stop[node][some]
    sequence = np.searchsorted(batch.cu_seqlens_padded[1:], begin, side="right")
    return _runs_in_sight(batch, np.zeros_like(begin), begin, end, sequence, transposed(window))[1:]


def _tiles_with(begin: Ints, end: Ints, num_rows: int, tile: int) -> NDArray[np.bool_]:
    """Return whether each tile of num_rows rows has a row of some [begin, end)."""
    some = begin < end
    begun = np.zeros((2, -(-num_rows // tile) + 1), np.int64)
    np.add.at(begun[0], begin[some] // tile, 1)
    np.add.at(begun[1], -(-end[some] // tile), 1)
    return np.cumsum(begun[0] - begun[1])[:-1] > 0


def _runs_in_sight(
    batch: PackedBatch, rank: Ints, begin: Ints, end: Ints, sequence: Ints, window: tuple[int, int]
) -> tuple[Ints, Ints, Ints]:
    """Return (rank, begin, end) of the rows of the pack that queries of runs see; adjacent results are merged.

    mask.py says why the queries of a run see one run of rows, whose ends ascend over a rank's runs.
    """
    if batch.trees is not None:
        rank, low, high = _nodes_in_sight(batch, batch.trees, rank, begin, end)
        return _merged(rank, low, high)
    first, length = batch.cu_seqlens_padded[sequence].astype(np.int64), batch.lengths[sequence].astype(np.int64)
    low = first + in_sight(begin - first, length, length, window)[0]
    high = first + in_sight(end - 1 - first, length, length, window)[1]
    return _merged(rank, low, high)


def _nodes_in_sight(batch: PackedBatch, trees: Trees, rank: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (rank, begin, end) of the rows of every node that queries of runs see, by rank and row.

    A rank sees a node up to the last of its own rows in the node's subtree: whole, if that row is in a descendant.
    """
    first, last, stop = _rows_of_nodes(batch, trees)
    ranks = np.arange(rank.max(initial=-1) + 1)
    apart = batch.total_rows + 1  # puts ranks one after another
    run = np.searchsorted(begin + rank * apart, stop + ranks[:, None] * apart, side="left") - 1
    seen = np.where((run >= 0) & (rank[run] == ranks[:, None]), end[run], 0) if len(rank) else run
    high = np.minimum(np.minimum(seen, stop), last)
    owner, node = np.nonzero(high > first)
    return owner, first[node], high[owner, node]


def _rows_of_nodes(batch: PackedBatch, trees: Trees) -> tuple[Ints, Ints, Ints]:
    """Return the first row of every node, the row behind its last one, and the row behind its subtree."""
    padding = (batch.cu_seqlens_padded - batch.cu_seqlens).astype(np.int64)[trees.tree]
    return trees.nodes[:-1] + padding, trees.nodes[1:] + padding, trees.ends + padding


def _merged(rank: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """Merge adjacent runs of a rank, which ascend."""
    new = np.ones(len(rank), bool)
    new[1:] = (rank[1:] != rank[:-1]) | (low[1:] > high[:-1])
    return rank[new], low[new], high[np.append(new[1:], True)[: len(rank)]]


def all_rows(batch: PackedBatch, cp_size: int, local_rows: int) -> Pieces:
    """Return the rows of the pack that the ranks of balanced_runs own, rank after rank; -1 for fillers."""
    runs = balanced_runs(batch, cp_size)
    begin = runs.rank * local_rows + runs.local_rows()
    return Pieces.of(cp_size * local_rows, begin, runs.end - runs.begin, runs.begin)
