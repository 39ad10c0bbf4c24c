"""Prefix trees on a GPU: the last argument of kernels that find the keys of queries."""

from __future__ import annotations

from typing import Any

import numpy as np

from thdattn.jit.structs import TREES
from thdattn.plan.plan import Plan


def trees_of(plan: Plan) -> tuple[Any, ...]:
    """Return the struct Trees of a plan, the last argument of kernel instances with trees; () without trees."""
    arrays = plan.arrays
    if not plan.has_trees:
        return ()
    pointers = [x.data.ptr for x in (arrays.query_ends, arrays.group_ends, arrays.group_begins)]
    return (np.array((*pointers, len(arrays.group_ends)), TREES)[()],)
