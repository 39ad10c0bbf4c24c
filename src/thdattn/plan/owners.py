"""Map each key row to its owner rank, for reducing dk and dv."""

from __future__ import annotations

from typing import Any

import numpy as np

from thdattn.plan.memory import Layer
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import INT32, Buffer, pair_of


def places_of_keys(plan: Plan, by_rank: bool = True) -> tuple[Any, Any]:
    """Return the owner ranks of all key rows in sequence order; cached, and recomputed whenever the plan is.

    Args:
        by_rank: each rank's rows have a place of their own; else rows of all ranks have one, in rank order, and count
            as rows of rank 0.

    Returns:
        owners: (key_rows, 2) int32, the owner rank of every key buffer row (-1: none) and the local row there.
        rows: (local_key_rows,) int32, the local row number of every row of this rank; -1 for a filler.
    """
    def make() -> tuple[Any, Any]:
        order, num_rows = plan.rank_order, plan.local_key_rows
        mine = order[plan.cp_rank * num_rows :][:num_rows]
        each = num_rows if by_rank else len(order)
        owners, places, rows = (plan.engine.empty(x.shape, x.dtype) for x in owner_buffers(plan))
        numbers = np.arange(len(order), dtype=order.dtype, like=order)  # of CuPy arrays this is cupy.arange
        np.floor_divide(numbers, each, out=owners[:, 0])  # in place too, where the plan is made in a graph
        np.remainder(numbers, each, out=owners[:, 1])

        def follow() -> None:  # in place, as a captured graph may have the memory of nothing else
            places[...] = -1
            places[order] = owners  # of fillers, -1, to the last place
            np.right_shift(mine, 31, out=rows)  # -1 of fillers, else 0
            np.bitwise_or(rows, numbers[:num_rows], out=rows)

        plan.make(follow)
        return places[:-1], rows

    found: tuple[Any, Any] = plan.memoize(("places of keys", by_rank), make)
    return found


def owner_buffers(plan: Plan) -> list[Buffer]:
    """Declare the arrays of places_of_keys: owners of rows in rank order, and the two that it returns."""
    shapes = (plan.cp_size * plan.local_key_rows, 2), (plan.key_rows + 1, 2), (plan.local_key_rows,)
    return [Buffer("owners of keys", shape, INT32, part) for part, shape in enumerate(shapes)]


def partials_of_keys(plan: Plan, layer: Layer, sum_dtype: np.dtype[Any], where: str) -> list[Buffer]:
    """Declare a rank's partial sums of dk and dv, for one group of heads at a time.

    On one rank the partial sums are the results. where: see reference.backward_buffers.
    """
    if plan.cp_size == 1 or where != "made":
        return []
    return pair_of("partial sums of dk and dv", (plan.key_rows, max(layer.groups)), plan.head_dims, sum_dtype)
