"""What is made on the first use of a plan or cache and kept as long as it: work buffers, and what calls have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

T = TypeVar("T")


class Kept:
    """What calls have in common, by key.

    What a capture of a CUDA graph makes is there where that graph is replayed, which may be never, or after other calls
    and graphs: it serves that graph alone.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def memoize(self, key: Any, make: Callable[[], T], capture: Callable[[], int | None]) -> T:
        """What `make` returned when it was first called for this key, outside of captures or in the present one.

        Args:
            capture: the number of the present one; None: there is none.
        """
        if key not in self._made:
            number = capture()
            key = key if number is None else (number, key)
            if key not in self._made:
                self._made[key] = make()
        made: T = self._made[key]
        return made

    def values(self) -> list[Any]:
        """All that was made."""
        return [*self._made.values()]


class Buffers:
    """Arrays by name, shape and dtype. None is ever freed, made larger or moved: CUDA graphs have their addresses."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._views: dict[Any, Any] = {}  # of those, as to make one takes time

    def get(
        self, empty: Callable[[tuple[int, ...], DTypeLike], Any], name: str, shape: tuple[int, ...], dtype: DTypeLike,
        room: tuple[int, ...] | None = None,
    ) -> Any:
        """See Plan.buffer; empty: makes an array of a shape and dtype."""
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
        """All that were made, each once."""
        return [*self._made.values()]
