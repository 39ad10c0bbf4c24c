"""Offsets of arrays in a window, one behind another; cached, as calls ask again and again."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 256


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return where each of some arrays begins when they follow each other, and where the last one ends."""
    return list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def total(sizes: Sequence[int]) -> int:
    """Return where the last of some arrays ends when they follow each other."""
    return sum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes])


@functools.lru_cache(maxsize=64)
def partials(shapes: tuple[tuple[int, ...], ...], num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Lay out float32 partial sums of arrays, one owner's rows behind another's.

    Args:
        shapes: of one owner's rows of each array.

    Returns:
        The bytes of one owner's rows of each array, where each array begins, and where the last one ends.
    """
    sizes = tuple(4 * math.prod(shape) for shape in shapes)
    *begins, end = offsets([num_ranks * size for size in sizes])
    return sizes, tuple(begins), end


def rounded_up(num_bytes: int) -> int:
    """Round up by at most a quarter, or to 1 MiB, so that growing sizes do not need new memory each time."""
    step = max(1 << 20, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step


def slots_of(sizes: Any) -> list[list[int]]:
    """Return, for each rank, where its window holds what it sends to each other rank, and where the last slot ends."""
    sizes = np.asarray(sizes)
    return _slots(sizes.shape, sizes.dtype, sizes.tobytes())


@functools.lru_cache(maxsize=256)
def _slots(shape: tuple[int, ...], dtype: np.dtype[Any], sizes: bytes) -> list[list[int]]:
    return [offsets(row) for row in np.frombuffer(sizes, dtype).reshape(shape).tolist()]
