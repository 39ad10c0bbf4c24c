"""Launcher of kernels/peer/exchange.cu: one kernel sends slices to peers, and writes theirs to their places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from thdattn.arguments import Array
from thdattn.comm.slices import AllToAllSpec, SliceSpec
from thdattn.jit import compiler
from thdattn.jit.structs import ALL_TO_ALL, CHUNKS, MAX_RANKS
from thdattn.kernels.instances import EXCHANGE_KERNELS

THREADS = 512  # per block; half of the blocks offer while the others collect
NO_MARKS = np.uint64(0), np.uint32(0)  # the watchdog does not follow the kernel
_BLOCKS = 128  # one for each multiprocessor: more do not fill the links more, and have more to collect at the end
_WARPS = _BLOCKS // 2 * THREADS // 32  # warps that offer
_CHUNK_BYTES = 8192  # about, of the largest message, if all warps have a chunk: flags cost time too
_LEAST_BYTES = 2048  # what a warp reads at a time


class Exchange:
    """Launch of an all-to-all between arrays at fixed addresses; it holds no array.

    Args:
        spec: of at most MAX_SLICES arrays, and of less than 2^31 bytes for each rank.
        sends, recvs: the arrays of spec.outs and spec.ins.
        to: for each rank, the address in its window that this rank's slices are written to.
        came: for each rank, the address in this rank's window that its slices are read from.
        flags: a PEER_EXCHANGE of jit/structs.py.
    """

    def __init__(
        self, spec: AllToAllSpec, sends: Sequence[Array], recvs: Sequence[Array], to: Sequence[int],
        came: Sequence[int], flags: Any,
    ) -> None:
        sides = {name: [_side(*pair) for pair in zip(cuts, arrays, strict=True)]
                 for name, cuts, arrays in (("out", spec.outs, sends), ("in", spec.ins, recvs))}
        numbers = [number for side in sides.values() for of_array in side for number in of_array.numbers()]
        word = next(size for size in EXCHANGE_KERNELS if math.gcd(*numbers) % size == 0)
        cargo = np.zeros((), ALL_TO_ALL)
        for name, side in sides.items():
            cargo[name][: len(side)] = [of_array.struct(word) for of_array in side]
        cargo["to"], cargo["from"] = _for_ranks(to), _for_ranks(came)
        cargo["num_slices"] = len(sends)
        cargo["num_chunks"] = chunks_of(int(spec.sizes.max()))
        self._kernel = compiler.kernel(EXCHANGE_KERNELS[word])
        self._arguments = compiler.Arguments((cargo[()], flags, *NO_MARKS))

    def launch(self, marks: int, number: int) -> None:
        """Launch the kernel on the current stream; see PeerExchange for its marks and number."""
        self._arguments.change(-2, marks)
        self._arguments.change(-1, number)
        self._kernel.launch((_BLOCKS,), THREADS, self._arguments)


def chunks_of(num_bytes: int) -> int:
    """Return the number of chunks of each message, given the bytes of the largest: equally many for each warp."""
    rounds = max(1, round(num_bytes / (_WARPS * _CHUNK_BYTES)))
    return min(rounds * _WARPS, CHUNKS, -(-num_bytes // _LEAST_BYTES))


class _Side(NamedTuple):
    """Bytes of a slice for each rank: `rows` times `widths` bytes, `pitch` bytes apart, from the `places` on."""

    places: list[int]
    widths: list[int]
    rows: int
    pitch: int

    def numbers(self) -> list[int]:
        """Return the numbers that the size of a word must divide."""
        there = [place for place, width in zip(self.places, self.widths, strict=True) if width]
        return [*there, *self.widths, self.pitch]

    def struct(self, word: int) -> tuple[Any, ...]:
        """Return the fields of a SLICE_SPEC, counted in words."""
        return (_for_ranks(self.places), _for_ranks([width // word for width in self.widths]), self.rows,
                self.pitch // word)


def _side(cut: SliceSpec, array: Array) -> _Side:
    """Describe a slice of an array; rows without gaps count as one."""
    if not array.flags.c_contiguous:
        raise TypeError(f"an array to exchange has shape {array.shape} and strides {array.strides}, wanted a "
                        f"C-contiguous one; copy it first")
    column = array.nbytes // max(1, array.shape[0] * array.shape[1])
    each = column if cut.axis else column * array.shape[1]
    widths = [(end - begin) * each for begin, end in zip(cut.begins, cut.ends, strict=True)]
    rows, pitch = (len(array), column * array.shape[1]) if cut.axis else (1, 0)
    return _Side([array.data.ptr + begin * each for begin in cut.begins], widths, rows, pitch)


def _for_ranks(numbers: Sequence[int]) -> tuple[int, ...]:
    return (*numbers, *[0] * (MAX_RANKS - len(numbers)))
