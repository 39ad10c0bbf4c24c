"""Exchange of needed rows, for shardings by runs: the keys that each rank's queries see, owner ranks, and transfers.

Every rank computes the key buffers of all ranks from the lengths, and its own transfers. It works on runs of
consecutive rows, which are few, and expands their pieces to arrays of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.balance import Ints, balanced_runs, within_rank
from thdattn.capacity import BalancedCapacity, Flags, Mask, Window
from thdattn.packing import PackedBatch, once, rows_of_runs
from thdattn.plan.mask import in_sight, transposed
from thdattn.sharding import Sharding


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
        edges = np.full(2 * len(begin) + 2, size)
        edges[0], edges[1:-1:2], edges[2:-1:2] = 0, begin, begin + sizes
        values = np.full(2 * len(begin) + 1, -1)
        values[1::2] = value
        some = edges[1:] > edges[:-1]
        return cls(size, edges[:-1][some], values[some])

    @classmethod
    def joined(cls, parts: Sequence[tuple[int, Ints, Ints, Ints]]) -> Pieces:
        """Make an array of several, one after another, each from the arguments of `of`."""
        sizes = [part[0] for part in parts]
        begins = [part[1] + end - part[0] for part, end in zip(parts, accumulate(sizes), strict=True)]
        others = (np.concatenate([part[i] for part in parts]) for i in (2, 3))
        return cls.of(sum(sizes), np.concatenate(begins), *others)

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
        (_, receiver, _, _, given, _), (sender, _, _, _, taken, _) = needed.sends(cp_rank), needed.receives(cp_rank)
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

    @cached_property
    def num_sent(self) -> int:
        return int(self.sent.sum())

    @cached_property
    def num_received(self) -> int:
        return int(self.received.sum())

    @property
    def table(self) -> Ints:
        """(cp_size, cp_size), rows that rank i sends to rank j; 0 on the diagonal. Only peer memory needs all."""
        return self.tabulate()


FEW_RANKS = 16  # up to which the moves of all ranks are found at once
KEY_SIDE = "rows_of_keys", "rank_order", "sends", "returns", "places", "own_keys"  # fields of PlanArrays


class KeySide(NamedTuple):
    """Arrays of a rank's key buffer of needed rows, KEY_SIDE, as one array.

    pieces: the array.
    sizes: (6,), of each part.
    """

    pieces: Pieces
    sizes: tuple[int, ...]

    def filled(self) -> dict[str, NDArray[np.int32]]:
        """Return each array by name."""
        return split_key_side(self.pieces.filled(), self.sizes)


def split_key_side(array: Any, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the parts of KEY_SIDE by name, of an array that has one after another."""
    return {name: array[end - size : end]
            for name, size, end in zip(KEY_SIDE, sizes, accumulate(sizes), strict=True)}


@dataclass(frozen=True, eq=False)
class NeededRows:
    """Key buffers of all ranks under a mask, and the owners of their rows.

    A buffer has the rows that some query of the rank sees, ascending, and no padding, unless a capacity fixes its size.

    Attributes:
        local_rows: rows that every rank stores.
        sizes: (cp_size,), rows of each buffer.
        runs: (4, num_runs): rank, begin and end of consecutive rows of the pack in the rank's buffer, and their first
            buffer row; rank after rank, ascending.
        owned: (4, num_owned): rank, begin and end of consecutive tokens of the pack that the rank owns, and their first
            local row; rank after rank, ascending.
    """

    local_rows: int
    sizes: Ints
    runs: Ints
    owned: Ints

    def excess(self, capacity: BalancedCapacity) -> str:
        """Describe by how much the layout exceeds a capacity; return "" if it fits."""
        if (found := self.table.max()) > capacity.message_rows:
            return f"{found} rows from one rank to another, wanted at most message_rows = {capacity.message_rows}"
        if (found := self.sizes.max()) > capacity.key_rows:
            return f"{found} rows that one rank's queries see, wanted at most key_rows = {capacity.key_rows}"
        return ""

    @cached_property
    def moves(self) -> Ints:
        """The moves from all ranks to all ranks; see _moves."""
        return _moves(self.owned, self.runs)

    def sends(self, cp_rank: int) -> Ints:
        """Return the moves from a rank to all ranks, itself included, by receiver and row; see _moves."""
        if len(self.sizes) > FEW_RANKS:
            return _moves(_of_rank(self.owned, cp_rank), self.runs)
        return self.moves[:, self.moves[0] == cp_rank]

    def receives(self, cp_rank: int) -> Ints:
        """Return the moves from all ranks, itself included, to a rank, by sender and row; see _moves."""
        if len(self.sizes) > FEW_RANKS:
            return _moves(self.owned, _of_rank(self.runs, cp_rank))
        return self.moves[:, self.moves[1] == cp_rank]

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
        sender, receiver, _, _, sizes, _ = self.moves
        table = np.bincount(sender * cp_size + receiver, sizes, cp_size**2).astype(np.int64)
        table[:: cp_size + 1] = 0
        return table.reshape(cp_size, cp_size)

    def rows_of_keys(self, cp_rank: int, capacity: BalancedCapacity | None) -> tuple[int, Ints, Ints, Ints]:
        """Return the arguments of Pieces.of for the sequence-order rows of one rank's buffer; see key_side."""
        _, begin, end, key_row = _of_rank(self.runs, cp_rank)
        size = int(self.sizes[cp_rank]) if capacity is None else capacity.key_rows
        return size, key_row, end - begin, begin

    def key_side(self, cp_rank: int, capacity: BalancedCapacity | None = None) -> KeySide:
        """Return the arrays of one rank's buffer.

        Args:
            capacity: sizes to which buffers and messages are filled up, which they must fit; None: as large as needed.
        """
        given, taken = self.sends(cp_rank), self.receives(cp_rank)
        rows_of_keys = self.rows_of_keys(cp_rank, capacity)
        key_rows, message_rows = rows_of_keys[0], None if capacity is None else capacity.message_rows
        _, receiver, row, key_row, sizes, _ = given
        own = receiver == cp_rank
        places = _unread(given[2:5, own], given[2:5, ~own])
        own_keys = key_row[own], sizes[own], row[own]
        place, num_sent = self._messages(receiver, sizes, cp_rank, message_rows)
        returns = receiver * self.local_rows + row, sizes, np.where(own, key_row, place)
        sends = place[~own], sizes[~own], row[~own]

        own = taken[0] == cp_rank
        place, num_received = self._messages(taken[0], taken[4], cp_rank, message_rows)
        _, _, _, key_row, sizes, _ = np.concatenate([taken[:, ~own], taken[:, own]], axis=1)
        rank_order = np.concatenate([place[~own], num_received + taken[2, own]]), sizes, key_row
        parts = [rows_of_keys, (num_received + self.local_rows, *rank_order), (num_sent, *sends),
                 (len(self.sizes) * self.local_rows, *returns), (key_rows, *places), (key_rows, *own_keys)]
        return KeySide(Pieces.joined(parts), tuple([part[0] for part in parts]))

    def _messages(self, peer: Ints, sizes: Ints, cp_rank: int, message_rows: int | None) -> tuple[Ints, int]:
        """Return each move's first row among the messages of all other ranks, and the number of their rows.

        Args:
            peer, sizes: the other rank of each move, ascending, and its rows. Places of moves within the rank are
                arbitrary.
            message_rows: rows of every message; None: as many as the receiver needs.
        """
        sizes = np.where(peer == cp_rank, 0, sizes)
        if message_rows is None:
            return np.cumsum(sizes) - sizes, int(sizes.sum())
        first = (peer - (peer > cp_rank)) * message_rows
        return first + within_rank(peer, sizes), (len(self.sizes) - 1) * message_rows


def _unread(own: Ints, sent: Ints) -> tuple[Ints, Ints, Ints]:
    """Return first buffer rows, sizes and first local rows of pieces of own rows that no other rank receives.

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
    return key_row[move] + begin - row[move], size, begin


def needed_rows(sharding: Sharding, window: Window) -> NeededRows:
    """Return the key buffers of all ranks of a sharding by runs; cached per batch and window."""
    key = sharding.cp_size, window, sharding.local_rows
    return once(sharding.batch, key, lambda: _needed_rows(sharding, window))


def _needed_rows(sharding: Sharding, window: Window) -> NeededRows:
    batch, cp_size, runs = sharding.batch, sharding.cp_size, balanced_runs(sharding.batch, sharding.cp_size)
    local = runs.local_rows()
    tokens = runs.sequence >= 0
    rank, begin, end, sequence, local = (x[tokens] for x in (*runs, local))
    key_rank, key_begin, key_end = _runs_in_sight(batch, rank, begin, end, sequence, window)
    key_row = within_rank(key_rank, key_end - key_begin)

    sizes = np.bincount(key_rank, key_end - key_begin, minlength=cp_size).astype(np.int64)
    return NeededRows(sharding.local_rows, sizes, np.stack([key_rank, key_begin, key_end, key_row]),
                      np.stack([rank, begin, end, local]))


def _of_rank(runs: Ints, cp_rank: int) -> Ints:
    """Return the runs of one rank; the first row of runs is the rank, ascending."""
    first, last = np.searchsorted(runs[0], [cp_rank, cp_rank + 1])
    return runs[:, first:last]


def _moves(owned: Ints, keys: Ints) -> Ints:
    """Return the moves from runs of owners to runs of key buffers, in time linear in their number and in all runs.

    Args:
        owned, keys: some of owned and of runs of NeededRows.

    Returns:
        (6, num_moves): sender, receiver, first local row of the sender, first row in the receiver's buffer, number of
        rows, and first row of the pack; sorted by sender, receiver and row.
    """
    owned = owned[:, np.argsort(owned[1])]  # in the order of the pack
    (rank, begin, end, local), (key_rank, key_begin, key_end, key_row) = owned, keys
    first = np.searchsorted(end, key_begin, side="right")
    counts = np.maximum(np.searchsorted(begin, key_end) - first, 0)
    run, key = rows_of_runs(first, counts), np.repeat(np.arange(len(counts)), counts)
    low, high = np.maximum(begin[run], key_begin[key]), np.minimum(end[run], key_end[key])
    moves = np.stack([rank[run], key_rank[key], local[run] + low - begin[run], key_row[key] + low - key_begin[key],
                      high - low, low])
    return moves[:, np.lexsort((moves[2], moves[1], moves[0]))]


def _rows_below(begins: Ints, row: Ints) -> Ints:
    """Return the sum of max(0, row - begin) over all begins, for every row."""
    ordered = np.sort(begins)
    number = np.searchsorted(ordered, row)
    sums: Ints = number * row - np.append(0, np.cumsum(ordered))[number]
    return sums


def foreign_tiles(
    sharding: Sharding, mask: Mask, cp_rank: int | None, capacity: BalancedCapacity | None = None
) -> Flags:
    """Return the tiles that need key rows of other ranks; the compute of all other tiles overlaps their exchange.

    Args:
        cp_rank: of which rank; None: of all, as (cp_size, tiles) each, in time linear in all moves.
        capacity: sizes that key buffers are filled up to; see key_side.

    Returns:
        (query tiles,) bool, True if a query of the tile sees a row of another rank; and
        (key tiles,) bool, True if a row of the tile belongs to another rank.
    """
    needed, (window, tiles) = needed_rows(sharding, mask.window), mask
    moves = needed.moves if cp_rank is None else needed.receives(cp_rank)
    moves = moves[:, moves[0] != moves[1]]
    _, receiver, _, key_row, sizes, row = moves[:, np.lexsort((moves[3], moves[1]))]
    first, key_rows = cp_rank or 0, int(needed.sizes.max() if cp_rank is None else needed.sizes[cp_rank])
    key_rows = key_rows if capacity is None else capacity.key_rows
    rank, *seen = _queries_of_runs(sharding.batch, receiver, row, row + sizes, window)
    begin, end = (_local_rows_before(sharding, rank, x) for x in seen)
    num_ranks = sharding.cp_size if cp_rank is None else 1
    flags = (_tiles_with(rank - first, begin, end, (num_ranks, sharding.local_rows), tiles[0]),
             _tiles_with(receiver - first, key_row, key_row + sizes, (num_ranks, key_rows), tiles[1]))
    return flags if cp_rank is None else (flags[0][0], flags[1][0])


def _local_rows_before(sharding: Sharding, rank: Ints, row: Ints) -> Ints:
    """Return how many local rows of ranks come before rows of the pack."""
    runs = balanced_runs(sharding.batch, sharding.cp_size)
    apart = sharding.batch.total_rows + 1  # puts ranks one after another
    run = np.searchsorted(runs.begin + runs.rank * apart, row + rank * apart, side="right") - 1
    before = runs.local_rows()[run] + np.minimum(row, runs.end[run]) - runs.begin[run]
    return np.where((run >= 0) & (runs.rank[run] == rank), before, 0)


def _queries_of_runs(
    batch: PackedBatch, rank: Ints, begin: Ints, end: Ints, window: Window
) -> tuple[Ints, Ints, Ints]:
    """Return (rank, begin, end) of the rows of the pack that see keys of runs, which ascend in a rank: what the
    transposed window shows of them.
    """
    if batch.trees is not None:
        first, last, stop = batch.trees.rows(batch.cu_seqlens_padded)
        begins = np.searchsorted(last, begin, side="right")
        counts = np.searchsorted(first, end, side="left") - begins
        run, node = np.repeat(np.arange(len(begin)), counts), rows_of_runs(begins, counts)
        low = np.maximum(begin[run], first[node])
        some = low < last[node]
        return rank[run][some], low[some], stop[node][some]
    sequence = np.searchsorted(batch.cu_seqlens_padded[1:], begin, side="right")
    return _runs_in_sight(batch, rank, begin, end, sequence, transposed(window))


def _tiles_with(rank: Ints, begin: Ints, end: Ints, shape: tuple[int, int], tile: int) -> NDArray[np.bool_]:
    """Return whether each tile of the rows of ranks has a row of some [begin, end) of the rank.

    Args:
        shape: number of ranks and of the rows of each.
    """
    (num_ranks, num_rows), some = shape, begin < end
    columns = -(-num_rows // tile) + 1
    first, stop = (np.bincount((rank * columns + edge)[some], minlength=num_ranks * columns)
                   for edge in (begin // tile, -(-end // tile)))
    covered: NDArray[np.bool_] = np.cumsum(first - stop).reshape(num_ranks, columns)[:, :-1] > 0
    return covered


def _runs_in_sight(
    batch: PackedBatch, rank: Ints, begin: Ints, end: Ints, sequence: Ints, window: Window
) -> tuple[Ints, Ints, Ints]:
    """Return (rank, begin, end) of the rows of the pack that queries of runs see; adjacent results are merged.

    mask.py says why the queries of a run see one run of rows, whose ends ascend over a rank's runs.
    """
    if batch.trees is not None:
        rank, low, high = _nodes_in_sight(batch.trees.rows(batch.cu_seqlens_padded), rank, begin, end)
        return _merged(rank, low, high)
    first, length = batch.cu_seqlens_padded[sequence].astype(np.int64), batch.lengths[sequence].astype(np.int64)
    low = first + in_sight(begin - first, length, length, window)[0]
    high = first + in_sight(end - 1 - first, length, length, window)[1]
    return _merged(rank, low, high)


def _nodes_in_sight(nodes: Ints, rank: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (rank, begin, end) of the rows of every node that queries of runs see, by rank and row.

    A rank sees a node up to the last of its own rows in the node's subtree: whole, if that row is in a descendant.

    Args:
        nodes: as Trees.rows returns them.
    """
    first, last, stop = nodes
    ranks = np.arange(rank.max(initial=-1) + 1)
    apart = max(end.max(initial=0), stop.max(initial=0)) + 1  # puts ranks one after another
    run = np.searchsorted(begin + rank * apart, stop + ranks[:, None] * apart, side="left") - 1
    seen = np.where((run >= 0) & (rank[run] == ranks[:, None]), end[run], 0) if len(rank) else run
    high = np.minimum(np.minimum(seen, stop), last)
    owner, node = np.nonzero(high > first)
    return owner, first[node], high[owner, node]


def _merged(rank: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """Merge adjacent runs of a rank, which ascend."""
    new = np.ones(len(rank), bool)
    new[1:] = (rank[1:] != rank[:-1]) | (low[1:] > high[:-1])
    return rank[new], low[new], high[np.append(new[1:], True)[: len(rank)]]


def all_rows(sharding: Sharding) -> Pieces:
    """Return the rows of the pack that the ranks of a sharding by runs own, rank after rank; -1 for fillers."""
    runs, local_rows = balanced_runs(sharding.batch, sharding.cp_size), sharding.local_rows
    begin = runs.rank * local_rows + runs.local_rows()
    return Pieces.of(sharding.cp_size * local_rows, begin, runs.end - runs.begin, runs.begin)
