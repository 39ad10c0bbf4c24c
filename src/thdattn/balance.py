"""The "balanced" sharding: equal rows and equal causal work on every rank, in few pieces, for packs of any lengths.

A long document belongs to one rank, or as two chunks to each of a few neighbours. Short documents are folded: sorted by
length, they form a line with cheap rows at one end and expensive rows at the other. A rank takes some rows from both
ends and so meets its number of rows and its work. The lengths alone determine everything, in the same integers on every
rank.
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

BUDGETS = (1.05, 1.0, 0.95, 0.9, 0.75, 0.5, 0.0)  # shares of the mean work that long documents may fill on a rank
PAIRS_OF_A_ROW = 200  # pairs computed in the time that ranks exchange one key row and its gradient
MOST = 1.08  # limit of the busiest rank's work over the mean, if some attempt meets it
ENOUGH = 1.08  # cost over the mean work, exchanged rows included, at which no further attempt is made
BETTER = 0.985  # factor by which a smaller budget must lower the cost, because it splits more, which costs tiles
LINE = 16  # documents shorter than 1 / LINE of a rank's rows are folded: the line needs short ones
SHORTEST_CHUNK = 256  # rows; shorter chunks would waste tiles


class Runs(NamedTuple):
    """Runs of consecutive rows of the pack and their owner ranks, rank after rank, ascending in a rank; int64 each.

    Attributes:
        rank: (num_runs,), owner rank of the run.
        begin, end: (num_runs,), sequence-order rows [begin, end) of the run.
        sequence: (num_runs,), the one sequence that contains the run; -1: padding.
    """

    rank: Ints
    begin: Ints
    end: Ints
    sequence: Ints

    def local_rows(self) -> Ints:
        """Return the local row at which each run begins, (num_runs,)."""
        return within_rank(self.rank, self.end - self.begin)


def within_rank(rank: Ints, sizes: Ints) -> Ints:
    """Return the first row of every run among the rows of its rank, from sizes of runs that are sorted by rank."""
    first = np.cumsum(sizes) - sizes
    begins: Ints = first - first[np.searchsorted(rank, rank)]
    return begins


def balanced_runs(batch: PackedBatch, cp_size: int) -> Runs:
    """Return the runs of all ranks, cached per batch.

    place_fold places tokens. Padding then fills every rank up to ceil(total_rows / cp_size) rows, in ascending order,
    rank after rank, so that it never takes the place of tokens.
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
    """Assign the positions of all sequences to ranks.

    Several attempts are compared. Among those that keep the busiest rank within MOST of the mean work, the result is
    the one with the lowest cost of work and exchanged keys.

    Args:
        lengths: (num_seqs,) tokens of every sequence.
        cp_size: number of ranks.

    Returns:
        (num_runs, 4): rank, sequence, and positions [begin, end) in the sequence, in no order. Every position occurs
        once, and no rank has more than ceil(tokens / cp_size) positions. If that is more than 512, the busiest rank
        has at most 1.08 times the mean work.
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
    """Move runs between ranks until no rank has more than `most` work, or as near to that as possible.

    The busiest rank gives the least busy one the shortest whole sequence that helps. In return it takes as many rows:
    the first rows of the other's longest sequences. They have the least work, and the other rank needs them as keys.
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
        number = int(((parts <= len(heads)) & (work[idle] + less <= most)).sum())  # both sides grow with the sequence
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
    """Return the causal pairs of every rank, (cp_size,); doubles hold them exactly."""
    rank, _, begin, end = runs.T
    work: NDArray[Any] = np.bincount(rank, _triangle(end) - _triangle(begin), minlength=cp_size)
    return work


def _travelling(runs: Ints, cp_size: int) -> int:
    """Return the most key rows that a rank receives under a causal mask, plus the most that a rank sends."""
    rank, sequence, begin, end = runs.T
    _, item = np.unique(sequence, return_inverse=True)
    needed = np.zeros((item.max(initial=-1) + 1, cp_size), np.int64)  # the keys before this position
    np.maximum.at(needed, (item, rank), end)
    rows = np.maximum(np.minimum(end[:, None], needed[item]) - begin[:, None], 0)
    rows[np.arange(len(rank)), rank] = 0
    sent = np.bincount(rank, rows.sum(axis=1), minlength=cp_size)
    return int(rows.sum(axis=0).max() + sent.max())


class _Attempt:
    """Attempt to assign sequences to ranks, with the rows and work that every rank has so far.

    Work is counted in (query, key) pairs under a causal mask, whatever the mask is: one layout serves all layers.

    Attributes:
        capacity: rows that each rank may have.
        share: mean work of a rank.
        rows, work: present rows and work of every rank.
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
        """Assign long sequences, longest first, to the fewest ranks within the budget; return the other sequences."""
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
        """Return the first rank of the least busy group of neighbours with enough free rows; None without one."""
        rows, work = self.capacity - -(-length // size), _triangle(length) / size
        found, least = None, float("inf")
        for first in range(0, self._cp_size, size):
            busiest = max(self.work[first : first + size]) + work
            fits = max(self.rows[first : first + size]) <= rows and (size == self._cp_size or busiest <= most_work)
            if fits and busiest < least:
                found, least = first, busiest
        return found

    def _deal(self, sequence: int, length: int, first: int, size: int) -> None:
        """Assign a sequence to `size` ranks: whole to one rank, else two chunks each, an early and a late one."""
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
        """Sort sequences on a line, shortest first; each rank takes rows from both ends to complete rows and work."""
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
        """Return the runs, as place_fold does."""
        first, _, owner = np.array(sorted(self._cuts), np.int64).reshape(-1, 3).T
        item, begin, end, part = _cut(self._lengths[self._line], first)
        folded = np.stack([owner[part], self._line[item], begin, end], axis=1)
        return np.concatenate([np.array(self._dealt, np.int64).reshape(-1, 4), folded])


class _Line:
    """Line of consecutive sequences, as Python ints, with which bisection is fastest.

    starts: first row of each sequence on the line, and the end of the last one.
    """

    def __init__(self, lengths: Ints) -> None:
        self.starts = [0, *np.cumsum(lengths).tolist()]
        self._done = [0, *np.cumsum(_triangle(lengths)).tolist()]

    def work_of_ends(self, low: int, high: int, count: int, dear: int) -> int:
        """Return the work of `count` of the rows [low, high): the last `dear` rows, and the first ones."""
        last = self._work_before(high) - self._work_before(high - dear)
        return last + self._work_before(low + count - dear) - self._work_before(low)

    def _work_before(self, row: int) -> int:
        index = bisect_right(self.starts, row) - 1
        return int(self._done[index] + _triangle(row - self.starts[index]))


def _triangle(length: Any) -> Any:
    """Return the causal (query, key) pairs at positions [0, length) of a sequence; length is an int or an array."""
    return length * (length + 1) // 2


def _cut(sizes: Ints, cuts: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut a line of consecutive items into parts, and return the pieces that result.

    Args:
        sizes: (num_items,), size of every item.
        cuts: first position of each part, ascending, from 0.

    Returns:
        (item, begin, end, part) of every piece, in the order of the line; begin and end are positions in the item.
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
    """Return the value cached for this batch and key; call `make` on a miss."""
    kept = _kept.setdefault(batch, {})
    if key not in kept:
        kept[key] = make()
    made: T = kept[key]
    return made
