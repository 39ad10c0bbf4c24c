"""The launcher of meeting.cu: what ranks have for each other, offered, awaited and put to its places by one kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from thdattn import jit
from thdattn.comm.slices import Cut
from thdattn.instances import EXCHANGE_KERNELS
from thdattn.structs import CHUNKS, EXCHANGED, MAX_RANKS

BLOCKS, THREADS = 256, 512  # half of the blocks offer while the others collect: two for each multiprocessor
NOBODY = np.uint64(0), np.uint32(0)  # is told that the kernel begins and ends
_CHUNK_BYTES = 2048  # of the largest message, at least: what a warp reads at a time


class Exchange(NamedTuple):
    """A launch for slices of arrays at some addresses."""

    kernel: str
    arguments: jit.Arguments

    def __call__(self, marks: int, number: int) -> None:
        """Launches it on the current stream; see Meeting."""
        self.arguments.change(-2, marks)
        self.arguments.change(-1, number)
        jit.kernel(self.kernel).launch((BLOCKS,), THREADS, self.arguments)


def exchange(
    outs: Sequence[Cut], ins: Sequence[Cut], to: Sequence[int], came: Sequence[int], most: int, meeting: Any
) -> Exchange:
    """All slices of an exchange, at most MAX_CUTS arrays on either side.

    Args:
        to: where what this rank has for each rank is put; came: where that of each rank for this one lies then.
        most: bytes of the largest message of all ranks, less than 2^31.
        meeting: a MEETING of structs.py.
    """
    sides = {"out": [_side(cut) for cut in outs], "in": [_side(cut) for cut in ins]}
    numbers = [number for side in sides.values() for of_array in side for number in of_array.numbers()]
    word = next(size for size in EXCHANGE_KERNELS if math.gcd(*numbers) % size == 0)
    cargo = np.zeros((), EXCHANGED)
    for name, side in sides.items():
        cargo[name][: len(side)] = [of_array.struct(word) for of_array in side]
    cargo["to"], cargo["from"] = _for_ranks(to), _for_ranks(came)
    cargo["num_cuts"], cargo["num_chunks"] = len(outs), min(CHUNKS, -(-most // _CHUNK_BYTES))
    return Exchange(EXCHANGE_KERNELS[word], jit.Arguments((cargo[()], meeting, *NOBODY)))


class _Side(NamedTuple):
    """The bytes of a cut: `rows` times those of each rank, `widths`, from `places` on, one every `pitch`."""

    places: list[int]
    widths: list[int]
    rows: int
    pitch: int

    def numbers(self) -> list[int]:
        """That a word has to divide."""
        there = [place for place, width in zip(self.places, self.widths, strict=True) if width]
        return [*there, *self.widths, self.pitch]

    def struct(self, word: int) -> tuple[Any, ...]:
        """A CUT, in such words."""
        return (_for_ranks(self.places), _for_ranks([width // word for width in self.widths]), self.rows,
                self.pitch // word)


def _side(cut: Cut) -> _Side:
    """Rows that follow each other are one."""
    array, at = cut.array, cut.array.data.ptr
    if not array.flags.c_contiguous:
        raise TypeError(f"an array to exchange has shape {array.shape} and strides {array.strides}, wanted a "
                        f"C-contiguous one; copy it first")
    column = array.nbytes // max(1, array.shape[0] * array.shape[1])
    each = column if cut.axis else column * array.shape[1]
    widths = [(end - begin) * each for begin, end in zip(cut.begins, cut.ends, strict=True)]
    rows, pitch = (len(array), column * array.shape[1]) if cut.axis else (1, 0)
    return _Side([at + begin * each for begin in cut.begins], widths, rows, pitch)


def _for_ranks(numbers: Sequence[int]) -> tuple[int, ...]:
    return (*numbers, *[0] * (MAX_RANKS - len(numbers)))
