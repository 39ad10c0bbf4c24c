"""Launcher of kernels/peer/reduce.cu: adds the partial sums of several ranks in rank order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from thdattn.arguments import Array
from thdattn.jit import compiler
from thdattn.kernels.instances import REDUCE_KERNELS

_NONE = np.uint64(0)  # the address of no array
_BLOCKS = 528  # of 256 threads: enough to fill memory and links of the largest GPUs


def add_up(
    partials: Any, num_ranks: int, rows: Array, results: Sequence[Array], stream: Any = None, own: int = -1
) -> None:
    """Add all ranks' partial sums into two arrays, rounded once.

    Args:
        partials: a scalar PARTIALS of jit/structs.py: where every rank's partial sums begin, float32 rows as wide as
            the results'.
        rows: which row of a rank's partial sums belongs to each row of the results, int32, -1: none. (num_rows,) for
            all ranks alike, or (num_ranks, num_rows); None: they are in the order of the results.
        results: (num_rows, heads, width), float16 or bfloat16, which may be some of the heads of larger arrays.
        own: a rank whose partial sums begin at the second address, and all others' at the first. Rows of which it alone
            has a partial sum stay as they are. -1: every rank has an address.
    """
    args = [arg for x in results for arg in (x, *_int32(x.shape[1] * x.shape[2] // 8, x.strides[0] // 16))]
    num_rows = len(results[0])
    counts = _int32(num_rows if rows is not None and rows.ndim == 2 else 0, own, num_ranks, num_rows)
    kernel = compiler.kernel(REDUCE_KERNELS[results[0].dtype.name])
    kernel((_BLOCKS, 2), 256, (*args, partials, _NONE if rows is None else rows, *counts), stream)


@functools.lru_cache(maxsize=1024)
def _int32(*numbers: int) -> tuple[np.int32, ...]:
    return tuple(map(np.int32, numbers))
