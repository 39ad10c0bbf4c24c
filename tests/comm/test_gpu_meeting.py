"""The kernel that brings slices, as one rank of many: what it offers, collects and says, against NumPy."""

from __future__ import annotations

import random

import numpy as np
import pytest

from thdattn.comm.slices import AllToAllSpec, SliceSpec
from thdattn.jit.structs import MAX_RANKS, MAX_SLICES, PEER_EXCHANGE, RANK_FLAGS

pytestmark = pytest.mark.gpu

RANK, SLOT = 1, 1 << 23  # bytes of a message at most
READY, TAKEN, OFFERED = (RANK_FLAGS.fields[name][1] // 4 for name in ("ready", "taken", "offered"))


def cut_of(cupy, draw, size, unit):
    """Some bytes of each rank, none of this one itself; ranks may have nothing."""
    axis, others = draw.choice([0, 1]), draw.choice([1, 2, 17])
    counts = [draw.choice([0, 1, 3, 40]) for _ in range(size)]
    counts[RANK] = 0
    ends = np.cumsum(counts)
    shape = (int(ends[-1]) + 1, others, unit) if axis == 0 else (others, int(ends[-1]) + 1, unit)
    array = cupy.asarray(np.frombuffer(draw.randbytes(int(np.prod(shape))), np.uint8).reshape(shape))
    return SliceSpec(axis, tuple(map(int, ends - counts)), tuple(map(int, ends))), array


def message(pairs, rank):
    return b"".join(np.ascontiguousarray(cut.of(array, rank).get()).tobytes() for cut, array in pairs)


@pytest.mark.parametrize("word", [16, 4, 1])
@pytest.mark.parametrize("size", [2, 3, 8, MAX_RANKS])
def test_slices_are_offered_and_collected(cupy, size, word):
    """With what all others offer there already."""
    from thdattn.comm.peer import exchange

    for seed in range(12):
        draw = random.Random(seed)
        outs, ins = ([cut_of(cupy, draw, size, word * draw.choice([1, 3, 70])) for _ in range(num)]
                     for num in [draw.randint(1, MAX_SLICES)] * 2)
        sent = [message(outs, rank) for rank in range(size)]
        came, wanted = [], [array.get() for _, array in ins]
        for rank in range(size):
            came.append(draw.randbytes(len(message(ins, rank))))
            begin = 0
            for (cut, _), whole in zip(ins, wanted, strict=True):
                part = cut.of(whole, rank)
                part[...] = np.frombuffer(came[-1][begin : begin + part.size], np.uint8).reshape(part.shape)
                begin += part.size
        most = max(1, *map(len, sent + came))
        assert most <= SLOT
        there, here = (cupy.zeros((size, SLOT), np.uint8) for _ in range(2))
        for slot, x in zip(here, came, strict=True):
            slot[: len(x)] = cupy.asarray(np.frombuffer(x, np.uint8))
        mine, theirs = (cupy.zeros((size, RANK_FLAGS.itemsize // 4), np.uint32) for _ in range(2))
        chunks = slice(OFFERED, OFFERED + exchange.chunks_of(most))
        mine[:, TAKEN], mine[:RANK, chunks], mine[RANK + 1 :, chunks] = 1, 1, 1
        counts, marks = cupy.zeros(2, np.uint32), cupy.zeros(2, np.uint32)
        places = [*(x.data.ptr for x in theirs), *[0] * (MAX_RANKS - size)]
        flags = np.array((places, mine.data.ptr, counts.data.ptr, RANK, size, 1), PEER_EXCHANGE)[()]
        slots = [[x.data.ptr for x in slots] for slots in (there, here)]
        (gives, sends), (takes, recvs) = (zip(*pairs, strict=True) for pairs in (outs, ins))
        spec = AllToAllSpec(gives, takes, np.array([[most]]))
        exchange.Exchange(spec, sends, recvs, *slots, flags).launch(marks.data.ptr, 7)
        for found, whole in zip(recvs, wanted, strict=True):
            assert found.get().tobytes() == whole.tobytes()
        for slot, x in zip(there, sent, strict=True):
            assert slot[: len(x)].get().tobytes() == x
        assert int(there.sum(dtype=np.int64)) == sum(map(sum, sent)), "and nothing else is written"
        told = theirs.get()
        assert not mine.get().any() and not counts.get().any() and (marks.get() == 7).all()
        assert (told[:, TAKEN] == 1).all() and told[:, READY].sum() == 0
        assert told.sum() == size + (size - 1) * (chunks.stop - chunks.start)
