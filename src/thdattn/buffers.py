"""Work buffers of a plan: made on first use, kept as long as it, and shared by what is done one after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


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
