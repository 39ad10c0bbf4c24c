"""The "balanced" sharding of prefix trees: equal rows and equal visible pairs on every rank, most trees on one rank.

Trees are placed whole while ranks have rows and work for them. The others are cut into subtrees and pieces of nodes.
These form a line with cheap rows at one end and expensive rows at the other, as in balance.py. A rank takes rows from
both ends and so meets its number of rows and its work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thdattn.trees.nodes import Trees

Ints = NDArray[np.int64]

BUDGETS = (1.05, 1.0, 0.9, 0.75, 0.5, 0.0)  # shares of the mean work that whole trees may fill on a rank
MOST = 1.05  # limit of the busiest rank's work over the mean; the first budget that meets it is taken
SHORTEST_PIECE = 256  # tokens; shorter pieces of a node would waste tiles
PIECES = 16  # least number of pieces of a rank's rows
CLASSES = 8  # classes of work per row on the line; inside a class, pieces keep their order and share ancestors


def place_trees(trees: Trees, cp_size: int) -> Ints:
    """Assign the tokens of all trees to ranks.

    Returns:
        (num_runs, 4): rank, tree, and places [begin, end) in the tree, in the order of tokens. No rank has more than
        ceil(tokens / cp_size) tokens.
    """
    lengths = trees.lengths
    pairs = np.repeat(trees.depths - trees.nodes[:-1], lengths) + np.arange(1, lengths.sum() + 1)
    owner, least = np.zeros(0, np.int64), float("inf")
    for budget in BUDGETS:
        attempt = _owners(trees, pairs, cp_size, budget)
        busiest = np.bincount(attempt, pairs, cp_size).max()
        if busiest < least:
            owner, least = attempt, busiest
        if least <= MOST * pairs.sum() / cp_size:
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
    line = _line(trees, before, max(SHORTEST_PIECE, capacity // PIECES), lambda token: bool(owner[token] < 0))
    done = np.append(0, np.cumsum(pairs[line])).tolist()
    low, high = 0, len(line)
    lack = {rank: (share - work[rank]) / (capacity - rows[rank]) for rank in range(cp_size) if rows[rank] < capacity}
    for rank in sorted(lack, key=lack.__getitem__):
        count = min(capacity - int(rows[rank]), high - low)

        def of_ends(dear: int, low: int = low, high: int = high, count: int = count) -> int:
            return int(done[high] - done[high - dear] + done[low + count - dear] - done[low])

        dear = bisect_left(range(count), share - work[rank], key=of_ends)
        owner[line[low : low + count - dear]] = owner[line[high - dear : high]] = rank
        low, high = low + count - dear, high - dear
    return owner


def _line(trees: Trees, before: Ints, most: int, is_free: Callable[[int], bool]) -> Ints:
    """Return the free tokens, cheap pieces first: subtrees of at most `most` tokens, and pieces of larger nodes.

    Args:
        before: (num_tokens + 1,), pairs of all tokens before each one.
    """
    begins: list[int] = []
    sizes: list[int] = []
    behind = 0
    for first, last, end in zip(trees.nodes[:-1].tolist(), trees.nodes[1:].tolist(), trees.ends.tolist(), strict=True):
        if first < behind or first == end or not is_free(first):
            continue
        behind = end if end - first <= most else last
        pieces = -(-(behind - first) // most)
        cuts = [first + (behind - first) * piece // max(1, pieces) for piece in range(pieces + 1)]
        begins += cuts[:-1]
        sizes += np.diff(cuts).tolist()
    begin, size = np.array(begins, np.int64), np.array(sizes, np.int64)
    cost = (before[begin + size] - before[begin]) / np.maximum(size, 1)
    order = np.argsort(np.round(CLASSES * cost / cost.max(initial=1)), kind="stable")
    tokens = [np.arange(begin[piece], begin[piece] + size[piece]) for piece in order.tolist()]
    return np.concatenate([np.zeros(0, np.int64), *tokens])
