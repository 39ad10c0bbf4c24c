"""The "balanced" sharding: equal rows and equal causal work on every rank, in few pieces, for packs of any lengths.

A long document belongs to one rank, or as two chunks to each of a few neighbours. Short documents are folded: sorted by
length, they form a line with cheap rows at one end and expensive rows at the other. A rank takes some rows from both
ends and so meets its number of rows and its work. On many ranks few documents fit one rank, so they are stretched over
neighbours, in shares of a rank. The lengths alone determine everything, in the same numbers on every rank.

Prefix trees are placed whole while ranks have rows and work for them. The others are cut into subtrees and pieces of
nodes, which are folded too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.packing import PackedBatch, once, rows_of_runs
from thdattn.trees import Trees

Ints = NDArray[np.int64]

BUDGETS = (1.05, 1.0, 0.95, 0.9, 0.75, 0.5, 0.0)  # shares of the mean work that long documents may fill on a rank
PAIRS_OF_A_ROW = 200  # pairs computed in the time that ranks exchange one key row and its gradient
MOST = 1.08  # limit of the busiest rank's work over the mean, if some attempt meets it
ENOUGH = 1.08  # cost over the mean work, exchanged rows included, at which no further attempt is made
BETTER = 0.985  # factor by which a smaller budget must lower the cost, because it splits more, which costs tiles
LINE = 16  # documents shorter than 1 / LINE of a rank's rows are folded: the line needs short ones
SHORTEST_CHUNK = 256  # rows; shorter chunks would waste tiles
MANY = 16  # ranks above which documents are stretched: groups of equal ranks then leave work uneven
LAYERS = 16  # attempts to stretch another layer
FOLDED = 0.1  # share of all rows that are left for the fold, which makes rows equal

# Of prefix trees.
TREE_BUDGETS = (1.05, 1.0, 0.9, 0.75, 0.5, 0.0)  # shares of the mean work that whole trees may fill on a rank
TREE_MOST = 1.05  # limit of the busiest rank's work over the mean; the first budget that meets it is taken
PIECES = 16  # least number of pieces of a rank's rows
CLASSES = 8  # classes of work per row on the line; inside a class, pieces keep their order and share ancestors


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

    place_fold places tokens, and place_trees those of prefix trees. Padding then fills every rank up to ceil(total_rows
    / cp_size) rows, in ascending order, rank after rank. So it never takes the place of tokens.
    """
    return once(batch, cp_size, lambda: _runs(batch, cp_size))


def _runs(batch: PackedBatch, cp_size: int) -> Runs:
    starts, lengths = batch.cu_seqlens_padded.astype(np.int64), batch.lengths.astype(np.int64)
    placed = place_fold(lengths, cp_size) if batch.trees is None else place_trees(batch.trees, cp_size)
    rank, sequence, begin, end = placed.T
    size = -(-batch.total_rows // cp_size)
    free = size - np.bincount(rank, end - begin, minlength=cp_size).astype(np.int64)
    gaps, stops = np.append(starts[:-1] + lengths, starts[-1]), np.append(starts[1:], batch.total_rows)
    gap, first, last, owner = _cut(stops - gaps, np.cumsum(free) - free)
    runs = np.concatenate([
        np.stack([rank, starts[sequence] + begin, starts[sequence] + end, sequence]),
        np.stack([owner, gaps[gap] + first, gaps[gap] + last, np.full(len(gap), -1)]),
    ], axis=1)
    return Runs(*runs[:, np.lexsort((runs[1], runs[0]))])


def place_fold(lengths: Ints, cp_size: int) -> Ints:
    """Assign the positions of all sequences to ranks.

    Several attempts are compared. Some keep the busiest rank within MOST of the mean work. The one of these with the
    lowest cost of work and exchanged keys is the result. More than MANY ranks take the layers of stretch alone.

    Args:
        lengths: (num_seqs,) tokens of every sequence.

    Returns:
        (num_runs, 4): rank, sequence, and positions [begin, end) in the sequence, in no order. Every position occurs
        once, and no rank has more than ceil(tokens / cp_size) positions. If that is more than 512, the busiest of at
        most MANY ranks has at most 1.08 times the mean work.
    """
    if cp_size > MANY:
        attempt = _Attempt(lengths, cp_size)
        attempt.fold(attempt.stretch(), wherever=True)
        return attempt.runs()
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
    needed = np.zeros((sequence.max(initial=-1) + 1, cp_size), np.int64)  # the keys before this position
    np.maximum.at(needed, (sequence, rank), end)
    rows = np.maximum(np.minimum(end[:, None], needed[sequence]) - begin[:, None], 0)
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
        self._stretched: list[Ints] = []
        self._line, self._parts = np.zeros(0, np.int64), np.zeros((0, 3), np.int64)

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
        if size == 1:
            self._give(first, sequence, 0, length)
            return
        ranks = range(first, first + size)
        emptiest = sorted(ranks, key=lambda rank: self.rows[rank])[: length % size]
        counts = {rank: length // size + (rank in emptiest) for rank in ranks}
        cheap = [(rank, counts[rank] // 2) for rank in ranks]
        dear = [(rank, counts[rank] - count) for rank, count in reversed(cheap)]
        begin = 0
        for rank, count in cheap + dear:
            if count:
                self._give(rank, sequence, begin, begin + count)
            begin += count

    def _give(self, rank: int, sequence: int, begin: int, end: int) -> None:
        """Assign positions of a sequence to a rank."""
        self._dealt.append((rank, sequence, begin, end))
        self.rows[rank] += end - begin
        self.work[rank] += _triangle(end) - _triangle(begin)

    def stretch(self) -> Ints:
        """Stretch sequences over ranks, layer by layer, longest first; return the other sequences.

        A layer has the sequences whose rows have more work than ranks still lack per row. Each rank takes as much of
        their work as makes what ranks lack per row equal. So the rows that are left can meet every rank's work.
        """
        rows, work = np.zeros((2, self._cp_size), np.int64)
        left = np.flatnonzero(self._lengths > 0)
        left = left[np.argsort(-self._lengths[left], kind="stable")]
        most = len(left)
        for _ in range(LAYERS):
            lengths, free = self._lengths[left], self.capacity - rows
            num_rows, pairs = int(lengths.sum()), int(_triangle(lengths).sum())
            behind = num_rows - np.cumsum(lengths)
            layered = (lengths * num_rows >= 2 * pairs) & (behind >= FOLDED * self._lengths.sum())
            count = min(most, int(layered.sum()))
            if not count:
                break
            lack = np.where(free > 0, np.maximum(self.share - work, 0), 0)
            order = np.argsort(-lack / np.maximum(free, 1), kind="stable")
            taken, layer = int(lengths[:count].sum()), int(_triangle(lengths[:count]).sum())
            rest = 1 - (pairs - layer) / (num_rows - taken) * taken / layer  # the layer's rows fill ranks, too
            runs = _stretched(left[:count], lengths[:count], _levelled(lack[order], free[order], layer * rest))
            runs[:, 0] = order[runs[:, 0]]
            rank, _, begin, end = runs.T
            used = rows + np.bincount(rank, end - begin, minlength=self._cp_size).astype(np.int64)
            if used.max() > self.capacity:
                most = count // 2
                continue
            self._stretched.append(runs)
            rows, work = used, work + _work(runs, self._cp_size).astype(np.int64)
            left, most = left[count:], len(left)
        self.rows, self.work = rows.tolist(), work.tolist()
        return np.sort(left)

    def fold(self, sequences: Ints, wherever: bool = False) -> None:
        """Sort sequences on a line, shortest first; each rank takes rows from both ends to complete rows and work.

        Args:
            sequences: their numbers, ascending.
            wherever: see _folded.
        """
        self._line = sequences[np.argsort(self._lengths[sequences], kind="stable")]
        lengths = self._lengths[self._line]
        free = [self.capacity - rows for rows in self.rows]
        lack = [self.share - work for work in self.work]
        self._parts = _folded(_work_before(lengths), int(lengths.sum()), free, lack, wherever)

    def runs(self) -> Ints:
        """Return the runs, as place_fold does."""
        first, _, owner = self._parts.T
        item, begin, end, part = _cut(self._lengths[self._line], first)
        folded = np.stack([owner[part], self._line[item], begin, end], axis=1)
        return np.concatenate([np.array(self._dealt, np.int64).reshape(-1, 4), *self._stretched, folded])


def _levelled(lack: NDArray[Any], free: Ints, total: float) -> NDArray[Any]:
    """Return the work that each rank takes, such that what it then lacks per free row has one upper limit.

    Args:
        lack: (cp_size,) work that each rank lacks, >= 0, by descending lack per free row.
        free: (cp_size,) rows that each rank can still take.
        total: work that all ranks take together, less than they lack.
    """
    per_row = lack / np.maximum(free, 1)
    limits = (np.cumsum(lack) - total) / np.maximum(np.cumsum(free), 1)  # if the first ranks alone take work
    number = int(np.argmax(limits >= np.append(per_row[1:], -np.inf)))
    limit = limits[number]
    taken: NDArray[Any] = np.where(np.arange(len(lack)) <= number, np.maximum(lack - limit * free, 0), 0)
    return taken


def _stretched(sequences: Ints, lengths: Ints, shares: NDArray[Any]) -> Ints:
    """Stretch sequences over ranks: a part of a sequence's work is an early and a late chunk, as in dual_chunk.

    Args:
        sequences: (num_seqs,) their numbers.
        lengths: (num_seqs,) their tokens, > 0.
        shares: (cp_size,) work of each rank, in any unit.

    Returns:
        (num_runs, 4) as place_fold, with the index of a share as rank.
    """
    work = _triangle(lengths)
    ends = np.append(0, np.cumsum(work))
    parts = np.append(0.0, np.cumsum(shares))
    cuts = np.minimum((parts * (ends[-1] / parts[-1])).astype(np.int64), ends[-1])
    cuts[-1] = ends[-1]
    edges = np.unique(np.concatenate([ends, cuts]))
    low, high = edges[:-1], edges[1:]
    item, rank = (np.searchsorted(x, low, side="right") - 1 for x in (ends, cuts))
    length, is_last = lengths[item], high == ends[item + 1]
    early, late = ([((x - ends[item]) / work[item] * half).astype(np.int64) for x in (low, high)]
                   for half in (length // 2, length - length // 2))
    first = np.stack([rank, sequences[item], early[0], np.where(is_last, length - late[0], early[1])], axis=1)
    second = np.stack([rank, sequences[item], length - late[1], length - late[0]], axis=1)[~is_last]
    runs = np.concatenate([first, second])
    return runs[runs[:, 2] < runs[:, 3]]


def _folded(
    work_before: Callable[[int], int], num_rows: int, free: Sequence[int], lack: Sequence[float],
    wherever: bool = False,
) -> Ints:
    """Give the rows of a line to ranks, each some from both ends, so that rows and work of all ranks are complete.

    Args:
        work_before: returns the work of all rows of the line before a row.
        num_rows: rows of the line.
        free, lack: (cp_size,) rows that each rank can still take, and work that it lacks.
        wherever: also expect the cheaper rows at the upper end, as where that is at the first rows of a sequence.

    Returns:
        (num_parts, 3): begin, end and rank of consecutive rows of the line, ascending.
    """
    low, high, parts = 0, num_rows, []
    for rank in sorted((rank for rank, rows in enumerate(free) if rows > 0), key=lambda rank: lack[rank] / free[rank]):
        count = min(free[rank], high - low)
        dear = _dear_rows(work_before, low, high, count, lack[rank], wherever)
        parts += [(low, low + count - dear, rank), (high - dear, high, rank)]
        low, high = low + count - dear, high - dear
    return np.array(sorted(parts), np.int64).reshape(-1, 3)


def _dear_rows(
    work_before: Callable[[int], int], low: int, high: int, count: int, work: float, wherever: bool
) -> int:
    """Return how many of `count` of the rows [low, high) are the last ones, such that they have so much work."""
    rest = work_before(high) - work_before(low) - work

    def between(dear: int) -> int:
        return work_before(high - dear) - work_before(low + count - dear)

    if wherever and between(count) > between(0):
        return bisect_left(range(count), rest, key=between)
    return bisect_left(range(count), -rest, key=lambda dear: -between(dear))


def _work_before(lengths: Ints) -> Callable[[int], int]:
    """Return the function that _folded takes, for a line of consecutive sequences. Bisection is fastest on lists."""
    starts, done = ([0, *np.cumsum(x).tolist()] for x in (lengths, _triangle(lengths)))

    def work_before(row: int) -> int:
        index = bisect_right(starts, row) - 1
        return int(done[index] + _triangle(row - starts[index]))

    return work_before


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


def place_trees(trees: Trees, cp_size: int) -> Ints:
    """Assign the tokens of all trees to ranks.

    Returns:
        (num_runs, 4): rank, tree, and places [begin, end) in the tree, in the order of tokens. No rank has more than
        ceil(tokens / cp_size) tokens.
    """
    lengths = trees.lengths
    pairs = np.repeat(trees.depths - trees.nodes[:-1], lengths) + np.arange(1, lengths.sum() + 1)
    owner, least = np.zeros(0, np.int64), float("inf")
    for budget in TREE_BUDGETS:
        attempt = _owners(trees, pairs, cp_size, budget)
        busiest = np.bincount(attempt, pairs, cp_size).max()
        if busiest < least:
            owner, least = attempt, busiest
        if least <= TREE_MOST * pairs.sum() / cp_size:
            break
    ends = np.cumsum(trees.tree_lengths())
    tree = np.searchsorted(ends, np.arange(len(owner)), side="right")
    begin = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(tree, prepend=-1))
    end = np.append(begin[1:], len(owner))[: len(begin)]
    first = (ends - trees.tree_lengths())[tree[begin]]
    return np.stack([owner[begin], tree[begin], begin - first, end - first], axis=1)


def _owners(trees: Trees, pairs: Ints, cp_size: int, budget: float) -> Ints:
    """Return the rank of every token: whole trees fill up to `budget` of a rank's work, pieces of others the rest."""
    capacity, share = -(-len(pairs) // cp_size), pairs.sum() / cp_size
    before = np.append(0, np.cumsum(pairs))
    owner, rows, work = np.full(len(pairs), -1), np.zeros(cp_size, np.int64), np.zeros(cp_size)
    roots = np.flatnonzero(trees.parents < 0)
    sizes = before[trees.ends[roots]] - before[trees.nodes[roots]]
    for root, size in sorted(zip(roots.tolist(), sizes.tolist(), strict=True), key=lambda tree: -tree[1]):
        begin, end = int(trees.nodes[root]), int(trees.ends[root])
        fits = (rows + end - begin <= capacity) & (work + size <= budget * share)
        if fits.any():
            rank = int(np.where(fits, work, np.inf).argmin())
            owner[begin:end], rows[rank], work[rank] = rank, rows[rank] + end - begin, work[rank] + size
    pieces = _pieces(trees, before, max(SHORTEST_CHUNK, capacity // PIECES), owner)
    done = np.append(0, np.cumsum(pairs[pieces])).tolist()
    for begin, end, rank in _folded(done.__getitem__, len(pieces), (capacity - rows).tolist(), (share - work).tolist()):
        owner[pieces[begin:end]] = rank
    return owner


def _pieces(trees: Trees, before: Ints, most: int, owner: Ints) -> NDArray[np.int32]:
    """Return the free tokens, cheap pieces first: subtrees of at most `most` tokens, and pieces of larger nodes.

    Args:
        before: (num_tokens + 1,), pairs of all tokens before each one.
        owner: (num_tokens,), the rank of each token; -1: it is free.
    """
    begins: list[int] = []
    sizes: list[int] = []
    behind = 0
    for first, last, end in zip(trees.nodes[:-1].tolist(), trees.nodes[1:].tolist(), trees.ends.tolist(), strict=True):
        if first < behind or first == end or owner[first] >= 0:
            continue
        behind = end if end - first <= most else last
        pieces = -(-(behind - first) // most)
        cuts = [first + (behind - first) * piece // max(1, pieces) for piece in range(pieces + 1)]
        begins += cuts[:-1]
        sizes += np.diff(cuts).tolist()
    begin, size = np.array(begins, np.int64), np.array(sizes, np.int64)
    cost = (before[begin + size] - before[begin]) / np.maximum(size, 1)
    order = np.argsort(np.round(CLASSES * cost / cost.max(initial=1)), kind="stable")
    return rows_of_runs(begin[order], size[order])
