"""Comm.exchange and Comm.all_to_all, checked by every rank of any backend."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np

import thdattn.comm
from thdattn.comm.slices import AllToAllSpec, SliceSpec
from thdattn.fuzz.runs import to_host

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [BFLOAT16, *map(np.dtype, ("float16", "float32", "float64", "int8", "uint64", "complex128"))]
SENDER, RECEIVER = 0, 1


class Slice:
    """Some heads of an array of the sender, which become heads of one of the receiver, of other shape or dtype."""

    def __init__(self, draw: random.Random, sender: int, receiver: int) -> None:
        self.ranks = sender, receiver
        self.dtype = draw.choice(DTYPES)
        self.shape = draw.choice([0, 1, 2, 3, 9]), draw.choice([0, 1, 2, 5]), draw.choice([1, 2, 8])
        self.others = [(draw.choice([0, 1, 3]), draw.choice([0, 2])) for _ in self.ranks]  # heads around it
        self.as_bytes = draw.random() < 0.3
        self.num_bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.values = np.frombuffer(draw.randbytes(self.num_bytes), self.dtype).reshape(self.shape)

    def whole(self, side: int, values: np.ndarray | None) -> np.ndarray:
        """Return the array that the slice is of, with bytes all ones around the values."""
        (rows, heads, width), (before, after) = self.shape, self.others[side]
        size = rows * (before + heads + after) * width * self.dtype.itemsize
        made = np.full(size, 0xFF, np.uint8).view(self.dtype).reshape(rows, before + heads + after, width)
        if values is not None:
            self.part(side, made)[...] = values
        return made

    def part(self, side: int, whole: Any) -> Any:
        before, heads = self.others[side][0], self.shape[1]
        return whole[:, before : before + heads]

    def sent(self, whole: Any) -> Any:
        """Return the slice as the sender passes it: without a width where that is 1."""
        part = self.part(SENDER, whole)
        return part.reshape(part.shape[:2]) if self.shape[2] == 1 else part

    def received(self, whole: Any) -> Any:
        """Return the slice as the receiver passes it, maybe as bytes."""
        return self.part(RECEIVER, whole.view(np.uint8) if self.as_bytes and whole.size else whole)


def check_exchange(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Send random slices from every rank to every other one, several exchanges at a time; xp is numpy or cupy."""
    check_all_arrive(comm, xp, start_exchange, [0, 1, 3])
    check_bad_slices_are_named(comm, xp)


def check_swap(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Swap random arrays of some rows of all heads for those of all rows of some, and back; several at a time."""
    check_all_arrive(comm, xp, start_swap, [0, 0, 1])


def check_all_arrive(comm: thdattn.comm.Comm, xp: Any, start: Any, most: list[int]) -> None:
    """Start exchanges, of which one of these numbers at most are under way."""
    under_way: list[tuple[Any, list[tuple[Any, np.ndarray]]]] = []
    for seed in range(40):
        draw = random.Random(seed)  # the same on all ranks
        under_way.append(start(comm, xp, draw))
        while len(under_way) > draw.choice(most):
            check_arrived(*under_way.pop(0))
    while under_way:
        check_arrived(*under_way.pop(0))


def start_swap(comm: thdattn.comm.Comm, xp: Any, draw: random.Random) -> tuple[Any, list[tuple[Any, np.ndarray]]]:
    """Start a swap; return its wait, and (array, what it must hold then) of all that is received into."""
    rows, back, width = draw.choice([0, 1, 3, 50, 400]), draw.random() < 0.5, draw.choice([1, 3, 8, 64])
    cuts, sends, arrived, num_bytes = [], [], [], 0
    for number in range(draw.choice([1, 2, 3])):
        dtype, share, axis = draw.choice(DTYPES), draw.choice([1, 2, 5]), int(number < 2)  # which one counts the heads
        num_bytes += rows * share * width * dtype.itemsize
        some_rows, some_heads = ((rows, comm.size * share, width), (comm.size * rows, share, width))
        if not axis:
            some_rows, some_heads = ((x[1], x[0], x[2]) for x in (some_rows, some_heads))
        shape, into = (some_heads, some_rows) if back else (some_rows, some_heads)
        size = comm.size * int(np.prod(shape)) * dtype.itemsize
        made = np.frombuffer(draw.randbytes(size), dtype).reshape(comm.size, *shape)
        place, ends = xp.asarray(np.zeros(into, dtype)), {axis: of_ranks(comm, share), 1 - axis: of_ranks(comm, rows)}
        cut, laid = (1 - axis, axis) if back else (axis, 1 - axis)  # along which axis slices are taken, and put
        cuts.append((SliceSpec(cut, *ends[cut]), SliceSpec(laid, *ends[laid])))
        sends.append(xp.array(made[comm.rank]))
        mine = slice(ends[cut][0][comm.rank], ends[cut][1][comm.rank])
        parts = [x[:, mine] if cut else x[mine] for x in made]
        arrived.append((place, np.concatenate(parts, axis=laid)))
    sizes = num_bytes * (1 - np.eye(comm.size, dtype=np.int64))
    before = comm.received_bytes
    outs, ins = zip(*cuts, strict=True)
    spec, recvs = AllToAllSpec(outs, ins, sizes), [place for place, _ in arrived]
    wait = comm.all_to_all(spec, sends, recvs, at_once=draw.random() < 0.5)
    assert comm.received_bytes - before == sizes[:, comm.rank].sum()
    for send in sends:
        send.view(np.uint8)[...] = 0  # it is free
    return wait, arrived


def of_ranks(comm: thdattn.comm.Comm, each: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the begins and the ends of the ranks' shares."""
    return tuple(rank * each for rank in range(comm.size)), tuple((rank + 1) * each for rank in range(comm.size))


def start_exchange(comm: thdattn.comm.Comm, xp: Any, draw: random.Random) -> tuple[Any, list[tuple[Any, np.ndarray]]]:
    """Start an exchange; return its wait, and (array, what it must hold then) of all that is received into."""
    numbers = draw.choice([[0], [1], [0, 0, 0, 1, 2], [3]])
    slices = [Slice(draw, sender, receiver) for sender in range(comm.size) for receiver in range(comm.size)
              if sender != receiver for _ in range(draw.choice(numbers))]
    sizes = np.zeros((comm.size, comm.size), np.int64)
    for each in slices:
        sizes[each.ranks] += each.num_bytes
    ours = [each for each in slices if each.ranks[SENDER] == comm.rank]
    theirs = [each for each in slices if each.ranks[RECEIVER] == comm.rank]
    sources = [xp.asarray(each.whole(SENDER, each.values)) for each in ours]
    places = [xp.asarray(each.whole(RECEIVER, None)) for each in theirs]
    sends = [(each.sent(whole), each.ranks[RECEIVER]) for each, whole in zip(ours, sources, strict=True)]
    recvs = [(each.received(whole), each.ranks[SENDER]) for each, whole in zip(theirs, places, strict=True)]
    before = comm.received_bytes
    wait = comm.exchange(sends, recvs, sizes if draw.random() < 0.7 else None)
    assert comm.received_bytes - before == sizes[:, comm.rank].sum()
    for source in sources:
        source.view(np.uint8)[...] = 0  # it is free
    return wait, [(place, each.whole(RECEIVER, each.values)) for place, each in zip(places, theirs, strict=True)]


def check_arrived(wait: Any, arrays: list[tuple[Any, np.ndarray]]) -> None:
    wait()
    for found, wanted in arrays:
        assert to_host(found).tobytes() == wanted.tobytes()


def check_bad_slices_are_named(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Make the same mistake on all ranks, so that all raise before anything is sent."""
    x, peer, exchange = xp.zeros((4, 3, 2), np.float32), (comm.rank + 1) % comm.size, comm.exchange
    none = np.zeros((comm.size, comm.size), np.int64)
    assert f"the rank of sends[0] is {comm.rank}; wanted" in raises(ValueError, exchange, [(x, comm.rank)], [])
    assert f"the rank of recvs[0] is {comm.size}; wanted" in raises(ValueError, exchange, [], [(x, comm.size)])
    assert "the rank of sends[0] is -1; wanted" in raises(ValueError, exchange, [(x, -1)], [])
    assert "the rank of recvs[0] is 0.0, a float; wanted an int" in raises(TypeError, exchange, [], [(x, 0.0)])
    assert "sends[0] has rows that are not contiguous" in raises(TypeError, exchange, [(x[:, ::2], peer)], [])
    assert "recvs[0] has rows that are not contiguous" in raises(TypeError, exchange, [], [(x[:, :, :1], peer)])
    assert "sends[0] has rows that are not" in raises(TypeError, exchange, [(x[::-1], peer)], [])
    assert "sends[0] has rows that are not" in raises(TypeError, exchange, [(x.transpose(1, 0, 2)[:, :2], peer)], [])
    assert "sends[0] has no dimensions" in raises(ValueError, exchange, [(xp.zeros(()), peer)], [])
    assert "sends[0] is a builtins.list" in raises(TypeError, exchange, [([1.0], peer)], [])
    assert "sizes has shape (1,)" in raises(ValueError, exchange, [], [], np.zeros(1, np.int64))
    assert "and dtype float64; wanted" in raises(ValueError, exchange, [], [], none.astype(float))
    if comm.size > 1:
        assert "but sizes says [0" in raises(ValueError, exchange, [(x, peer)], [], none)
        assert "recvs has [" in raises(ValueError, exchange, [], [(x, peer)], none)
    if comm.size > 1 and xp is np:
        fixed = np.broadcast_to(np.float32(1), (4, 3, 2)).copy()
        fixed.flags.writeable = False
        assert "recvs[0] is read-only" in raises(ValueError, exchange, [], [(fixed, peer)])


def raises(kind: type[Exception], function: Any, *arguments: Any) -> str:
    """Return the message of the error that the call raises, "" if it raises none."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    return ""
