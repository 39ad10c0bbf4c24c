"""Prefix trees on a GPU: the arrays of their plans, and the last argument of kernels that find the keys of queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from thdattn.jit.structs import TREES
from thdattn.kernels.configs import BEHIND_KEYS, TREE_GROUP
from thdattn.plan.plan import Plan, PlanArrays
from thdattn.plan.ranges import host_arrays

NONE = np.iinfo(np.int32).max  # kNone of kernels/common.cuh


def plan_arrays(plan: Plan) -> PlanArrays:
    """Compute the arrays of a plan of prefix trees on the host, which knows their nodes, and upload them."""
    host = host_arrays(plan.sharding, plan.cp_rank, plan.window, plan.tiles, keys_of=plan.keys_of)
    made = vars(host) | ends_of_queries(host.query_ranges)
    arrays = {field: cupy.asarray(x) for field, x in made.items() if x is not None}
    return replace(host, **arrays, stream=cupy.cuda.get_current_stream())


def ends_of_queries(query_ranges: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
    """Return the arrays of struct Trees in kernels/trees.cuh by name, from the query_ranges of all keys."""
    shape = -(-len(query_ranges) // TREE_GROUP) + BEHIND_KEYS // TREE_GROUP, TREE_GROUP
    begins, ends = np.full(shape, NONE, np.int32), np.zeros(shape, np.int32)
    seen = query_ranges[:, 0] < query_ranges[:, 1]
    begins.reshape(-1)[: len(seen)][seen] = query_ranges[seen, 0]
    ends.reshape(-1)[: len(seen)][seen] = query_ranges[seen, 1]
    return {
        "query_ends": ends.reshape(-1),
        "group_ends": np.stack([ends.min(axis=1), ends.max(axis=1)], axis=1),
        "group_begins": begins.min(axis=1),
    }


def trees_of(plan: Plan) -> tuple[Any, ...]:
    """Return the struct Trees of a plan, the last argument of kernel instances with trees; () without trees."""
    arrays = plan.arrays
    if not plan.has_trees:
        return ()
    pointers = [x.data.ptr for x in (arrays.query_ends, arrays.group_ends, arrays.group_begins)]
    return (np.array((*pointers, len(arrays.group_ends)), TREES)[()],)
