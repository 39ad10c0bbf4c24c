"""Slices of arrays as bytes: the elements of a row are contiguous, but rows need not follow each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from thdattn.arguments import Array

Slices = Sequence[tuple[Array, int]]  # (slice, rank that it is sent to or received from)


class SliceSpec(NamedTuple):
    """Slice of an array that belongs to each rank: some of its rows, or some of its columns, such as heads.

    axis: 0 for rows, 1 for columns of all rows.
    begins, ends: (size,) each, the rank's first index along the axis and the one behind its last.
    """

    axis: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    def of(self, array: Array, rank: int) -> Array:
        """Return the slice of one rank."""
        part = slice(self.begins[rank], self.ends[rank])
        return array[:, part] if self.axis else array[part]


@dataclass(frozen=True, eq=False)
class AllToAllSpec:
    """Slices that all ranks send each other, of arrays of fixed shapes and dtypes; made once, and compared by identity.

    outs: for each array that is sent, the slice that each rank gets, this one included.
    ins: for each array that is written, the slice that each rank's data go to; as many arrays.
    sizes: (size, size) bytes that each rank (row) sends to each other one (column); 0 from a rank to itself. The same
        on all ranks. None, as for Comm.exchange: no kernel overlaps the exchange.
    """

    outs: tuple[SliceSpec, ...]
    ins: tuple[SliceSpec, ...]
    sizes: Any

    @functools.cached_property
    def received(self) -> list[int]:
        """Bytes that each rank gets from the others."""
        received: list[int] = self.sizes.sum(0).tolist()
        return received

    @functools.cached_property
    def most(self) -> int:
        """Bytes of the rank that gets most."""
        return max(self.received)


class Rows(NamedTuple):
    """Bytes of a slice in memory: `rows` rows of `width` bytes each, `pitch` bytes apart, from `address` on."""

    address: int
    rows: int
    width: int
    pitch: int


def address(array: Array) -> int:
    """Return the address of the first byte of a NumPy or CuPy array."""
    interface = getattr(array, "__array_interface__", None)
    return int(interface["data"][0] if interface else array.data.ptr)


def rows_of(array: Array) -> Rows:
    """Return where the bytes of a slice are, which must not be empty."""
    width = array.nbytes // len(array)
    return Rows(address(array), len(array), width, width if array.flags.c_contiguous else array.strides[0])


def packed(array: Array) -> Array:
    """Return the rows of a slice as (bytes,) uint8, without gaps: a view where there are none, else a copy."""
    words = _words(array)
    return (words if words.flags.c_contiguous else words.copy()).reshape(-1).view("u1")


def buffer_for(array: Array) -> Array:
    """Return (bytes,) uint8 memory for the rows of a slice without gaps: its own where it has none."""
    words = _words(array)
    # For CuPy arrays NumPy calls cupy.empty_like.
    return (words if words.flags.c_contiguous else np.empty_like(words, order="C")).reshape(-1).view("u1")


def unpack(array: Array, made: Array) -> None:
    """Write the received bytes of a buffer_for into its slice, unless they are in its own memory already."""
    words = _words(array)
    if not words.flags.c_contiguous:
        words[...] = made.view(words.dtype).reshape(words.shape)


def copy(place: Array, source: Array) -> None:
    """Copy a slice to another one of as many rows and bytes; CuPy arrays by a kernel on the current stream."""
    size = min(_word(place), _word(source))
    _words(place, size)[...] = _words(source, size)


def slices_to_exchange(
    rank: int, size: int, spec: AllToAllSpec, sends: Sequence[Array], recvs: Sequence[Array]
) -> tuple[Slices, Slices]:
    """Copy a rank's slices for itself; return those that it sends and those that it receives, see all_to_all."""
    for out, send, place, recv in zip(spec.outs, sends, spec.ins, recvs, strict=True):
        source = out.of(send, rank)
        if source.size:
            copy(place.of(recv, rank), source)
    others = [other for other in range(size) if other != rank]
    going, coming = ([(cut.of(x, other), other) for other in others for cut, x in zip(cuts, arrays, strict=True)
                      if cut.begins[other] < cut.ends[other]]
                     for cuts, arrays in ((spec.outs, sends), (spec.ins, recvs)))
    return going, coming


def _words(array: Array, size: int = 0) -> Array:
    """Return a slice as (rows, words) of the widest unsigned integers that fit: fewer words are copied faster."""
    return array.reshape(len(array), -1).view(f"u{size or _word(array)}")


def _word(array: Array) -> int:
    at = rows_of(array)
    return math.gcd(at.address, at.width, at.pitch, 8)
