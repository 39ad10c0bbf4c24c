"""Fake of thd_peer_exchange: it exchanges keys or slices chunk by chunk on a fake_gpus stream."""

from __future__ import annotations

import ctypes

import numpy as np
from fake_gpus import at

from thdattn.jit.structs import RANK_FLAGS
from thdattn.kernels.instances import EXCHANGE_KERNELS

LINE = 128  # bytes; kLine of peer/exchange.cu


def meet(stream, cargo, flags):
    """Run the kernel up to its end, see `take`: waits and chunks are a step each."""
    rank, size = int(flags["rank"]), int(flags["num_ranks"])
    mine = at(int(flags["mine"]), (size,), RANK_FLAGS)
    theirs = [at(int(place), (1,), RANK_FLAGS) for place in flags["theirs"][:size]]
    others = [(rank + i) % size for i in range(1, size)]

    def offer(chunk):
        cargo.offer(rank, others, chunk)
        if chunk == cargo.count - 1:
            mine["taken"][:, 0] = 0
        for other in others:
            assert not theirs[other]["offered"][0, chunk], "offered anew before it was collected"
            theirs[other]["offered"][0, chunk] = 1

    def collect(other, chunk):
        mine["offered"][other, chunk] = 0
        cargo.place(rank, other, chunk)

    for other in range(size):
        await_flag(stream, mine, "taken", rank, other, 0)
    for chunk in range(cargo.count):
        stream.launch(offer, chunk)
    for chunk in range(cargo.count):
        stream.launch(cargo.place, rank, rank, chunk)
    for chunk in range(cargo.count):
        for other in others:
            await_flag(stream, mine, "offered", rank, other, chunk)
            stream.launch(collect, other, chunk)


def take(stream, flags):
    """End the kernel: tell all ranks that this one has taken its parts."""
    def tell():
        for place in flags["theirs"][: flags["num_ranks"]]:
            at(int(place), (1,), RANK_FLAGS)["taken"][0, 0] = 1

    if flags["takes"]:
        stream.launch(tell)


def await_flag(stream, mine, name, rank, other, number):
    stream.put(lambda reached: None, lambda reached: mine[name][other, number] == 1)


class Gathered:
    """Rows of all ranks, of which each chunk is one.

    order: their places; sources: of each array, those of all ranks; own: this rank's whole rows; to: where they are put
        for others. All hold nothing.
    """

    def __init__(self, order, rows, outs, sources, own, to):
        self._order, self.count, self._outs, self._sources, self._own = order, rows, outs, sources, own
        self._to = to

    def offer(self, rank, others, chunk):
        for places, x in zip(self._to, self._own, strict=True):
            for place in filter(None, places):
                at(place, x.shape, x.dtype)[chunk] = x[chunk]

    def place(self, rank, other, chunk):
        for out, parts, x in zip(self._outs, self._sources, self._own, strict=True):
            row = (x if other == rank else parts[other])[chunk]
            out[self._order[other * self.count + chunk]] = row[: out.shape[1]]


class Exchanged:
    """Slices of an ALL_TO_ALL, in words of so many bytes."""

    def __init__(self, cargo, word):
        self._cargo, self._word, self.count = cargo, word, int(cargo["num_chunks"])

    def offer(self, rank, others, chunk):
        for other in others:
            to = int(self._cargo["to"][other])
            self._each("out", other, chunk, lambda byte, there, to=to: (to + byte, there))

    def place(self, rank, other, chunk):
        if other == rank:
            whole = self._pieces("out", rank)
            self._each("in", rank, chunk, lambda byte, here: (here, _within(whole, byte)))
        else:
            self._each("in", other, chunk, lambda byte, here: (here, int(self._cargo["from"][other]) + byte))

    def _each(self, side, rank, chunk, places):
        """Copy every word of a chunk to one place from another; a function names both."""
        pieces = self._pieces(side, rank)
        lines = -(-sum(size for _, size in pieces) // LINE)
        each = -(-lines // self.count) * LINE
        begin = 0
        for address, size in pieces:
            for byte in range(begin, begin + size, self._word):
                if chunk * each <= byte < (chunk + 1) * each:
                    target, source = places(byte, address + byte - begin)
                    assert target % self._word == source % self._word == 0, "a word lies at a multiple of its size"
                    ctypes.memmove(target, source, self._word)
            begin += size

    def _pieces(self, side, rank):
        """Return (address, bytes) of all parts of a message to or from a rank, in their order."""
        cuts = self._cargo[side][: int(self._cargo["num_slices"])]
        return [(int(cut["of"][rank]) + row * int(cut["pitch"]) * self._word, int(cut["words"][rank]) * self._word)
                for cut in cuts for row in range(int(cut["rows"]))]


def _within(pieces, byte):
    """Return the address of a byte of a message in pieces."""
    for address, size in pieces:
        if byte < size:
            return address + byte
        byte -= size
    raise AssertionError("what comes is longer than what goes")


class Kernel:
    """Kernel of an exchange, as jit.kernel returns it, on the current stream of a machine."""

    def __init__(self, machine, name):
        self._machine, self._word = machine, {name: size for size, name in EXCHANGE_KERNELS.items()}[name]

    def launch(self, grid, block, arguments):
        assert grid[0] % 2 == 0 and block % 32 == 0
        cargo, flags, *_ = (np.array(x)[()] for x in arguments._values)
        meet(self._machine.stream, Exchanged(cargo, self._word), flags)
        take(self._machine.stream, flags)
