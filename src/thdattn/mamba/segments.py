"""Segments of rows, each with one state in front of it. In prefix trees every node has segments of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdattn.packing import PackedBatch


def segment_rows(batch: PackedBatch, most: int) -> int:
    """Return the rows of a segment: the most that an engine takes, or, of trees, the largest divisor of it and of the
    rows of every node.
    """
    trees = batch.trees
    return most if trees is None else int(np.gcd.reduce(trees.lengths, initial=most))


def segments_before(batch: PackedBatch, most: int) -> NDArray[np.int64]:
    """Return for every segment of trees the one before it on its path; -1: there is none."""
    trees, rows = batch.trees, segment_rows(batch, most)
    assert trees is not None
    first = np.arange(0, batch.total_rows, rows)
    node = trees.node_of(first)
    before: NDArray[np.int64] = np.where(trees.nodes[node] == first, trees.before[node], first - 1) // rows
    return before
