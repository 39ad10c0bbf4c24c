"""Workspace of a plan or cache, made on first use and kept as long as its owner: buffers, and values that calls share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

T = TypeVar("T")


class Kept:
    """Cache, by key, of values that calls share.

    A value made in the capture of a CUDA graph serves that graph alone: its replays may come after other calls and
    graphs, or never.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def memoize(self, key: Any, make: Callable[[], T], capture: Callable[[], int | None]) -> T:
        """Return the value cached for `key`, outside of captures or in the present one; call `make` on a miss.

        Args:
            key: identifies the value; hashable.
            make: makes the value.
            capture: returns the number of the present graph capture; None: there is none.
        """
        if key not in self._made:
            number = capture()
            key = key if number is None else (number, key)
            if key not in self._made:
                self._made[key] = make()
        made: T = self._made[key]
        return made

    def values(self) -> list[Any]:
        """Return all cached values."""
        return [*self._made.values()]


class Buffers:
    """Arrays by name, shape and dtype. They are never freed, enlarged or moved: CUDA graphs keep their addresses."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._views: dict[Any, Any] = {}  # cached, because a new view takes time

    def get(
        self, empty: Callable[[tuple[int, ...], DTypeLike], Any], name: str, shape: tuple[int, ...], dtype: DTypeLike,
        room: tuple[int, ...] | None = None,
    ) -> Any:
        """Return the buffer, see Plan.buffer. empty: allocates an array of a shape and dtype."""
        key = name, shape, np.dtype(dtype)
        if room is None or room == shape:
            if key not in self._made:
                self._made[key] = empty(shape, dtype)
            return self._made[key]
        if (key, room) not in self._views:
            whole = self.get(empty, name, room, dtype).reshape(-1)
            self._views[key, room] = whole[: math.prod(shape)].reshape(shape)
        return self._views[key, room]

    def arrays(self) -> list[Any]:
        """Return every allocated array once."""
        return [*self._made.values()]
