"""Segments of rows, each with one state in front of it. In prefix trees every node has segments of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdattn.plan.plan import Plan


def segment_rows(plan: Plan, most: int) -> int:
    """Return the rows of a segment: the most that an engine takes, or, of trees, the largest divisor of it and of the
    rows of every node.
    """
    trees = plan.batch.trees
    return most if trees is None else int(np.gcd.reduce(trees.lengths, initial=most))


def segments_before(plan: Plan, rows: int) -> NDArray[np.int64]:
    """Return for every segment of trees the one before it on its path; -1: there is none.

    Args:
        rows: rows of a segment, which divide those of every node.
    """
    trees = plan.batch.trees
    assert trees is not None
    first = np.arange(0, plan.local_rows, rows)
    node = trees.node_of(first)
    before: NDArray[np.int64] = np.where(trees.nodes[node] == first, trees.before[node], first - 1) // rows
    return before
