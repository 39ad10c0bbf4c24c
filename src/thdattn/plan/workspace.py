"""Workspace of a plan or cache, made on first use and kept as long as its owner: buffers, and values that calls share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from thdattn.engines import Engine

T = TypeVar("T")
Bytes = dict[str, int]  # by name of the buffer
FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)


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


class Buffer(NamedTuple):
    """Declaration of a buffer: calls allocate it, and Memory counts it.

    name: as Memory lists it.
    part: tells buffers of one name apart, such as those of keys and of values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    part: Hashable = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


def pair_of(
    name: str, rows_heads: tuple[int, int], widths: tuple[int, int], dtype: np.dtype[Any], *part: Hashable
) -> list[Buffer]:
    """Declare two buffers (rows, heads, width): keys and values, or q and out, or their gradients."""
    return [Buffer(name, (*rows_heads, width), dtype, (i, *part)) for i, width in enumerate(widths)]


def total_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the bytes of all buffers."""
    return sum(buffer.nbytes for buffer in buffers)


def bytes_by_name(buffers: Iterable[Buffer]) -> Bytes:
    """Return the bytes of all buffers of each name."""
    sizes: Bytes = {}
    for buffer in buffers:
        sizes[buffer.name] = sizes.get(buffer.name, 0) + buffer.nbytes
    return sizes


class Workspace:
    """Arrays by their declarations. They are never freed, enlarged or moved: CUDA graphs keep their addresses."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made: dict[Buffer, Any] = {}
        self._views: dict[Any, Any] = {}  # cached, because a new view takes time

    def array(self, buffer: Buffer, shape: tuple[int, ...] | None = None) -> Any:
        """Return the array of a buffer, which the first use allocates.

        Args:
            buffer: declares the array; equal declarations have one array.
            shape: of a smaller array at its beginning. The largest of several arrays that are in use one after another
                is declared, because memory can neither grow nor move later. None: the whole array.
        """
        if shape is None or shape == buffer.shape:
            if buffer not in self._made:
                self._made[buffer] = self._engine.empty(buffer.shape, buffer.dtype)
            return self._made[buffer]
        if (buffer, shape) not in self._views:
            self._views[buffer, shape] = self.array(buffer).reshape(-1)[: math.prod(shape)].reshape(shape)
        return self._views[buffer, shape]

    def arrays(self) -> list[Any]:
        """Return every allocated array once."""
        return [*self._made.values()]
