"""Slices of arrays as bytes: rows whose own elements are contiguous, but which need not follow each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Slices = Sequence[tuple[Any, int]]  # and for each the rank that it goes to, or comes from


class SliceSpec(NamedTuple):
    """Which slice of an array belongs to each rank: some of its rows, or of its columns, such as heads.

    axis: 0, rows, or 1, columns of all rows, which are the first two dimensions.
    begins, ends: of each rank's.
    """

    axis: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    def of(self, array: Any, rank: int) -> Any:
        """That of one rank."""
        part = slice(self.begins[rank], self.ends[rank])
        return array[:, part] if self.axis else array[part]


@dataclass(frozen=True, eq=False)
class AllToAllSpec:
    """What all ranks give each other of arrays of some shapes and dtypes; made once, and known by itself.

    outs: of each array what each rank gets of it, this one's own too.
    ins: of as many arrays where what comes from each rank belongs.
    sizes: (size, size) bytes that each rank (row) has for each other one (column), the same on all ranks; of a rank
        for itself 0.
    """

    outs: tuple[SliceSpec, ...]
    ins: tuple[SliceSpec, ...]
    sizes: NDArray[np.int64]

    @functools.cached_property
    def received(self) -> list[int]:
        """Bytes that each rank gets from others."""
        received: list[int] = self.sizes.sum(0).tolist()
        return received

    @functools.cached_property
    def most(self) -> int:
        """Those of the rank that gets most."""
        return max(self.received)


class Rows(NamedTuple):
    """Where the bytes of a slice are: `rows` times `width` bytes, one every `pitch`."""

    address: int
    rows: int
    width: int
    pitch: int


def address(array: Any) -> int:
    """Of the first byte of a NumPy or CuPy array."""
    interface = getattr(array, "__array_interface__", None)
    return int(interface["data"][0] if interface else array.data.ptr)


def rows_of(array: Any) -> Rows:
    """Where the bytes of a slice are that is not empty."""
    width = array.nbytes // len(array)
    return Rows(address(array), len(array), width, width if array.flags.c_contiguous else array.strides[0])


def packed(array: Any) -> Any:
    """(bytes,) uint8: what a slice holds, its rows behind each other; a view where they lie so, else a copy."""
    words = _words(array)
    return (words if words.flags.c_contiguous else words.copy()).reshape(-1).view("u1")


def buffer_for(array: Any) -> Any:
    """(bytes,) uint8: memory for the rows of a slice behind each other; its own where they lie so."""
    words = _words(array)
    # Of CuPy arrays this is cupy.empty_like.
    return (words if words.flags.c_contiguous else np.empty_like(words, order="C")).reshape(-1).view("u1")


def unpack(array: Any, made: Any) -> None:
    """Writes what came in the room made for a slice, unless that was its own memory."""
    words = _words(array)
    if not words.flags.c_contiguous:
        words[...] = made.view(words.dtype).reshape(words.shape)


def copy(place: Any, source: Any) -> None:
    """Copies a slice to another one of as many rows and bytes; of CuPy arrays by a kernel on the current stream."""
    size = min(_word(place), _word(source))
    _words(place, size)[...] = _words(source, size)


def _words(array: Any, size: int = 0) -> Any:
    """A view of a slice as (rows, words) of unsigned integers, the widest that fit: the fewer, the faster a copy."""
    return array.reshape(len(array), -1).view(f"u{size or _word(array)}")


def _word(array: Any) -> int:
    at = rows_of(array)
    return math.gcd(at.address, at.width, at.pitch, 8)
