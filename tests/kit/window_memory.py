"""Stand-in for cupy.cuda.Memory, of which windows are made: it counts bytes, and finds the GPU full when told.

What a GPU has free says little where other processes use it too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

ALONE = "PYTEST_XDIST_WORKER" not in os.environ  # no other worker of pytest uses the GPU


def counted(cupy: Any, is_full: Callable[[int], bool] = lambda size: False) -> tuple[Any, dict[int, int]]:
    """Return a class to take the place of cupy.cuda.Memory, and the sizes of what it has allocated, by address.

    Args:
        is_full: given a size, returns whether the driver is asked for more than the GPU has, which it refuses.
    """
    sizes: dict[int, int] = {}

    class Counted(cupy.cuda.Memory):  # type: ignore[misc]
        def __init__(self, size: int) -> None:
            super().__init__(2 * cupy.cuda.runtime.memGetInfo()[1] if is_full(size) else size)
            sizes[self.ptr] = size
            weakref.finalize(self, sizes.pop, self.ptr).atexit = False

    return Counted, sizes
