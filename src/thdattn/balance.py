"""Packs of any lengths, spread so that every rank has as many rows and as much causal work, in few pieces.

Long documents lie whole on one rank, or in two chunks on each of few neighbours; the short ones are folded: laid on a
line by length, whose ends hold cheap rows and dear ones, so that a rank hits rows and work at once by taking some of
either end. Everything is computed from the lengths alone, in the same integers on every rank.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from thdattn.packing import PackedBatch

T = TypeVar("T")
Ints = NDArray[np.int64]

BUDGETS = (1.05, 1.0, 0.95, 0.9, 0.75, 0.5, 0.0)  # of the mean work, up to which long documents are placed
PAIRS_OF_A_ROW = 200  # done in the time that a row of keys takes to another rank, and its gradient back
MOST = 1.08  # times the mean work on the busiest rank, if some attempt has no more
ENOUGH = 1.08  # times the mean work, what travels counted too: no further attempt
BETTER = 0.985  # times the cost of an attempt whose budget is larger, as smaller ones split more, which costs tiles
LINE = 16  # documents shorter than such a part of a rank's rows are folded: they keep the line fine enough
SHORTEST_CHUNK = 256  # rows: what a document is split into costs tiles


class Runs(NamedTuple):
    """Rows of the pack that ranks own: runs of neighbours, rank after rank, ascending in a rank; int64 each.

    rank, begin, end: (num_runs,), whose are the sequence-order rows [begin, end).
    sequence: (num_runs,), the one that holds them, which a run does not leave; -1: padding.
    """

    rank: Ints
    begin: Ints
    end: Ints
    sequence: Ints

    def local_rows(self) -> Ints:
        """(num_runs,), the local row at which each begins."""
        return within_rank(self.rank, self.end - self.begin)


def within_rank(rank: Ints, sizes: Ints) -> Ints:
    """Where runs of so many rows begin, among the rows of their rank; those of a rank are neighbours."""
    first = np.cumsum(sizes) - sizes
    begins: Ints = first - first[np.searchsorted(rank, rank)]
    return begins


def balanced_runs(batch: PackedBatch, cp_size: int) -> Runs:
    """The runs of all ranks, made once per batch.

    Tokens are placed by place_fold. Padding comes last: ascending, rank after rank, up to ceil(total_rows / cp_size)
    rows each, as it would take the place of tokens otherwise.
    """
    return once(batch, cp_size, lambda: _runs(batch, cp_size))


def _runs(batch: PackedBatch, cp_size: int) -> Runs:
    starts, lengths = batch.cu_seqlens_padded.astype(np.int64), batch.lengths.astype(np.int64)
    rank, sequence, begin, end = place_fold(lengths, cp_size).T
    size = -(-batch.total_rows // cp_size)
    free = size - np.bincount(rank, end - begin, minlength=cp_size).astype(np.int64)
    gaps, stops = np.append(starts[:-1] + lengths, starts[-1]), np.append(starts[1:], batch.total_rows)
    gap, first, last, owner = _cut(stops - gaps, np.cumsum(free) - free)
    runs = np.concatenate([
        np.stack([rank, starts[sequence] + begin, starts[sequence] + end, sequence]),
        np.stack([owner, gaps[gap] + first, gaps[gap] + last, np.full(len(gap), -1)]),
    ], axis=1)  # fmt: skip
    return Runs(*runs[:, np.lexsort((runs[1], runs[0]))])


def place_fold(lengths: Ints, cp_size: int) -> Ints:
    """Which positions of which sequences each rank owns.

    Args:
        lengths: (num_seqs,) tokens of every sequence.
        cp_size: number of ranks.

    Returns:
        (num_runs, 4): rank, sequence, and positions [begin, end) there, in no order. Every position once; no rank has
        more than ceil(tokens / cp_size). For more than 512 of these the busiest has at most 1.08 of the mean work; of
        attempts that have no more, it is the one with least of work and of keys that travel, added up.
    """
    best, least = np.zeros((0, 4), np.int64), (float("inf"), float("inf"))
    mean = int(_triangle(lengths).sum()) / cp_size
    for budget in BUDGETS:
        attempt = _Attempt(lengths, cp_size)
        attempt.fold(attempt.place(budget))
        runs = _relieved(attempt.runs(), lengths, cp_size, MOST * mean)
        work = _work(runs, cp_size).max()
        cost = max(0.0, work - MOST * mean), float(work + PAIRS_OF_A_ROW * _travelling(runs, cp_size))
        if cost < (least[0], BETTER * least[1]):
            best, least = runs, cost
        if least <= (0.0, ENOUGH * mean):
            break
    return best


def _relieved(runs: Ints, lengths: Ints, cp_size: int, most: float) -> Ints:
    """Runs of which no rank has more than `most` work, or some that come nearer to that.

    The busiest rank gives the least busy one a sequence that it has whole, the shortest that helps, and gets as many
    rows for it: the first ones of the other's longest sequences, as those have least work, and go back to it as keys.
    """
    for _ in range(2 * cp_size):
        work = _work(runs, cp_size)
        busy, idle = int(work.argmax()), int(work.argmin())
        if work[busy] <= most:
            break
        rank, sequence, begin, end = runs.T
        whole = np.flatnonzero((rank == busy) & (begin == 0) & (end == lengths[sequence]) & (end > SHORTEST_CHUNK))
        whole = whole[np.argsort(end[whole], kind="stable")]
        heads = np.flatnonzero((rank == idle) & (begin == 0) & (end >= 2 * SHORTEST_CHUNK))
        heads = heads[np.argsort(-end[heads], kind="stable")]
        parts = -(-end[whole] // SHORTEST_CHUNK)
        size, longer = np.divmod(end[whole], parts)
        less = _triangle(end[whole]) - (parts - longer) * _triangle(size) - longer * _triangle(size + 1)
        number = int(((parts <= len(heads)) & (work[idle] + less <= most)).sum())  # both grow with the sequence
        if not number:
            break
        given = min(int(np.searchsorted(less, work[busy] - most)), number - 1)
        heads = heads[: parts[given]]
        cuts = size[given] + (np.arange(parts[given]) < longer[given])
        taken = np.stack([np.full(len(cuts), busy), sequence[heads], np.zeros_like(cuts), cuts], axis=1)
        runs = np.concatenate([runs, taken])
        runs[heads, 2], runs[whole[given], 0] = cuts, idle
    return runs


def _work(runs: Ints, cp_size: int) -> NDArray[Any]:
    """(cp_size,), pairs of every rank; doubles hold them exactly."""
    rank, _, begin, end = runs.T
    work: NDArray[Any] = np.bincount(rank, _triangle(end) - _triangle(begin), minlength=cp_size)
    return work


def _travelling(runs: Ints, cp_size: int) -> int:
    """Rows of keys that a rank gets under a causal mask, and that a rank sends: the most of each."""
    rank, sequence, begin, end = runs.T
    _, item = np.unique(sequence, return_inverse=True)
    needed = np.zeros((item.max(initial=-1) + 1, cp_size), np.int64)  # the keys before this position
    np.maximum.at(needed, (item, rank), end)
    rows = np.maximum(np.minimum(end[:, None], needed[item]) - begin[:, None], 0)
    rows[np.arange(len(rank)), rank] = 0
    sent = np.bincount(rank, rows.sum(axis=1), minlength=cp_size)
    return int(rows.sum(axis=0).max() + sent.max())


class _Attempt:
    """What every rank has so far.

    capacity: rows that each may have; share: the mean work. Work is counted in pairs of a query and a key under a
    causal mask, whatever the mask is: one layout serves all layers.
    rows, work: of every rank.
    """

    def __init__(self, lengths: Ints, cp_size: int) -> None:
        self._lengths, self._cp_size = lengths, cp_size
        self.capacity = -(-int(lengths.sum()) // cp_size)
        self.share = int(_triangle(lengths).sum()) / cp_size
        self.rows, self.work = [0] * cp_size, [0] * cp_size
        self._dealt: list[tuple[int, int, int, int]] = []
        self._line = np.zeros(0, np.int64)
        self._cuts: list[tuple[int, int, int]] = []

    def place(self, budget: float) -> Ints:
        """Deals long sequences, the longest first, to the fewest ranks within the budget; returns the others."""
        groups = [group for group in range(1, self._cp_size + 1) if self._cp_size % group == 0]
        long = np.flatnonzero(LINE * self._lengths >= max(self.capacity, 1))
        left = [np.flatnonzero((LINE * self._lengths < self.capacity) & (self._lengths > 0))]
        for sequence in long[np.argsort(-self._lengths[long], kind="stable")].tolist():
            length = int(self._lengths[sequence])
            for group in groups:
                if group > 1 and budget and length < 2 * group * SHORTEST_CHUNK:
                    continue
                first = self._free_group(length, group, budget * self.share)
                if first is not None:
                    self._deal(sequence, length, first, group)
                    break
            else:
                left.append(np.array([sequence]))
        return np.sort(np.concatenate(left))

    def _free_group(self, length: int, size: int, most_work: float) -> int | None:
        """The first rank of the group of neighbours with room that is least busy; None: there is none."""
        rows, work = self.capacity - -(-length // size), _triangle(length) / size
        found, least = None, float("inf")
        for first in range(0, self._cp_size, size):
            busiest = max(self.work[first : first + size]) + work
            fits = max(self.rows[first : first + size]) <= rows and (size == self._cp_size or busiest <= most_work)
            if fits and busiest < least:
                found, least = first, busiest
        return found

    def _deal(self, sequence: int, length: int, first: int, size: int) -> None:
        """The sequence to `size` ranks: whole to one, else two chunks to each, a cheap one and a dear one."""
        ranks = range(first, first + size)
        emptiest = sorted(ranks, key=lambda rank: self.rows[rank])[: length % size]
        counts = {rank: length // size + (rank in emptiest) for rank in ranks}
        cheap = [(rank, counts[rank] // 2 if size > 1 else 0) for rank in ranks]
        dear = [(rank, counts[rank] - count) for rank, count in reversed(cheap)]
        begin = 0
        for rank, count in cheap + dear:
            if count:
                self._dealt.append((rank, sequence, begin, begin + count))
                self.rows[rank] += count
                self.work[rank] += _triangle(begin + count) - _triangle(begin)
            begin += count

    def fold(self, sequences: Ints) -> None:
        """Lays sequences on a line, the shortest first; each rank takes of both ends what completes rows and work."""
        self._line = sequences[np.argsort(self._lengths[sequences], kind="stable")]
        line = _Line(self._lengths[self._line])
        low, high = 0, line.starts[-1]
        lack = {rank: (self.share - self.work[rank]) / (self.capacity - rows)
                for rank, rows in enumerate(self.rows) if rows < self.capacity}
        for rank in sorted(lack, key=lack.__getitem__):
            count = min(self.capacity - self.rows[rank], high - low)
            work = partial(line.work_of_ends, low, high, count)
            dear = bisect_left(range(count), self.share - self.work[rank], key=work)
            self._cuts += [(low, low + count - dear, rank), (high - dear, high, rank)]
            self.rows[rank] += count
            self.work[rank] += work(dear)
            low, high = low + count - dear, high - dear

    def runs(self) -> Ints:
        """See place_fold."""
        first, _, owner = np.array(sorted(self._cuts), np.int64).reshape(-1, 3).T
        item, begin, end, part = _cut(self._lengths[self._line], first)
        folded = np.stack([owner[part], self._line[item], begin, end], axis=1)
        return np.concatenate([np.array(self._dealt, np.int64).reshape(-1, 4), folded])


class _Line:
    """Sequences one behind another, as Python's ints, which the bisections below are fastest with.

    starts: where each begins on the line, and where the last one ends.
    """

    def __init__(self, lengths: Ints) -> None:
        self.starts = [0, *np.cumsum(lengths).tolist()]
        self._done = [0, *np.cumsum(_triangle(lengths)).tolist()]

    def work_of_ends(self, low: int, high: int, count: int, dear: int) -> int:
        """Work of `count` of the rows [low, high): the last `dear` ones, and the first ones."""
        last = self._work_before(high) - self._work_before(high - dear)
        return last + self._work_before(low + count - dear) - self._work_before(low)

    def _work_before(self, row: int) -> int:
        index = bisect_right(self.starts, row) - 1
        return int(self._done[index] + _triangle(row - self.starts[index]))


def _triangle(length: Any) -> Any:
    """Pairs of a query and a key at positions [0, length) of a sequence: an int, or an array of them."""
    return length * (length + 1) // 2


def _cut(sizes: Ints, cuts: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """What becomes of items, one behind another on a line, that is cut into parts.

    Args:
        sizes: (num_items,) of every item.
        cuts: where each part begins, ascending, the first one at 0.

    Returns:
        Of every piece, in the order of the line: its item, its begin and end there, and its part.
    """
    ends = np.cumsum(sizes)
    edges = np.unique(np.concatenate([ends - sizes, cuts]))
    total = int(sizes.sum())
    edges = edges[edges < total]
    item = np.searchsorted(ends, edges, side="right")
    first = edges - (ends - sizes)[item]
    part = np.searchsorted(cuts, edges, side="right") - 1
    return item, first, first + np.diff(edges, append=total), part


_kept: weakref.WeakKeyDictionary[PackedBatch, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def once(batch: PackedBatch, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returned when it was first called for this batch and key."""
    kept = _kept.setdefault(batch, {})
    if key not in kept:
        kept[key] = make()
    made: T = kept[key]
    return made
