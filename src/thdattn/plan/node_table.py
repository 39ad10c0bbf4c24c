"""Table of the nodes of a pack's trees, as plans on a GPU read it, and steps towards the root by it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdattn.packing import PackedBatch
from thdattn.trees import Trees

NODE_WORDS = 5  # of a node in the table


def node_table(batch: PackedBatch, num_columns: int | None = None) -> NDArray[np.int32]:
    """Return the nodes with tokens of a batch on the host, a column each, in the order of their rows.

    Sequences without trees are trees of one node.

    Args:
        num_columns: columns of the table, more than nodes with tokens; None: one more.

    Returns:
        (5, num_columns) int32. For each node, the first three rows of the table are those of Trees.rows. The fourth is
        what to add to a place in the tree for the position on the path from the root. The fifth is the column of the
        nearest ancestor with tokens, -1 for none. Further columns begin behind the last tree and stand for all rows
        there.
    """
    trees = batch.trees
    if trees is None:
        trees = Trees.of(batch.lengths.astype(np.int64), np.full(batch.num_seqs, -1))
    some = trees.lengths > 0
    column = np.append(np.cumsum(some) - 1, -1)  # the last one for -1
    above = np.where(trees.before < 0, -1, trees.node_of(trees.before))
    skipped = trees.depths - (trees.nodes[:-1] - batch.cu_seqlens[trees.tree])
    columns = *trees.rows(batch.cu_seqlens_padded), skipped, column[above]
    table = np.zeros((NODE_WORDS, some.sum() + 1 if num_columns is None else num_columns), np.int32)
    table[0], table[4] = batch.cu_seqlens_padded[-1], -1
    table[:, : some.sum()] = np.stack(columns)[:, some]
    return table


def rows_before(table: Any, rows: Any, distance: int, none: int) -> Any:
    """Return the row that comes `distance` tokens before each row on its path; `none` where there is none.

    Args:
        table: as node_table returns it, as an array of NumPy or CuPy like `rows`.
        rows: rows of the pack, of any shape, or `none`, which must not be one of them.
    """
    first, behind, _, _, above = table
    left = np.full_like(rows, distance)
    left[rows == none] = 0
    for _ in range(min(distance, len(first))):  # each time to the begin of a node, and one token on
        node = np.searchsorted(first, rows, side="right") - 1
        steps = np.minimum(left, rows - first[node])
        before = np.where(above[node] < 0, none, behind[above[node]] - 1)
        rows = np.where(steps < left, before, rows - steps)
        left = np.maximum(left - steps - 1, 0)
        left[rows == none] = 0
    return rows
