"""Peer memory on one GPU: groups of heads, copies that arrive in time, and the kernel that brings slices."""

from __future__ import annotations

import random

import cases
import delays
import numpy as np
import pytest
from cases import BFLOAT16, CASES, FIELDS, check, run, to_host
from delays import attention, inputs_of, step
from loopback import SIZE, Loopback, Mirror

from thdattn import PackedBatch
from thdattn.comm.overlap import layout
from thdattn.comm.peer import transport
from thdattn.comm.slices import AllToAllSpec, SliceSpec
from thdattn.jit.structs import MAX_RANKS, MAX_SLICES, PEER_EXCHANGE, RANK_FLAGS
from thdattn.methods import select

pytest.importorskip("cupy")  # which peer memory loads


pytestmark = pytest.mark.gpu

PACKS = {"few-long": (700, 900), "many-short": (33, 1, 64, 0, 100) * 9, "one-row": (1,)}
DIMS = [(128, 128), (64, 64), (192, 128), (256, 256)]


@pytest.fixture
def comm(cupy, monkeypatch):
    monkeypatch.setattr(select, "WORTH_GROUPS", 0)  # by default, groups of 1, 1 and 2 kv heads
    with cupy.cuda.Stream(non_blocking=True):
        comm = Loopback(monkeypatch)
        yield comm
        comm.peer.close()


def assert_same_bits(found, wanted):
    for name, x, y in zip(("out", "lse", "max_logit", "dq", "dk", "dv"), found, wanted, strict=True):
        assert to_host(x).tobytes() == to_host(y).tobytes(), name


def check_with_collectives(cupy, comm, pack, dims=(128, 128), sharding=None, *, head_groups, **options):
    batch = PackedBatch.from_lengths(PACKS[pack], 4)
    layer = attention(comm, dims, head_groups=head_groups, **options)
    plain = attention(Mirror(), dims, head_groups=1, **options)
    plan, other = layer.plan(batch, sharding), plain.plan(batch, sharding)
    for seed in range(3):
        inputs = inputs_of(cupy, layer, plan, seed)
        assert_same_bits(step(layer, plan, *inputs), step(plain, other, *inputs))


@pytest.mark.parametrize(("engine", "head_groups"), [
    *(("cuda", number) for number in (1, 2, 4, None)), ("portable", 2)], indirect=["engine"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("pack", PACKS)
def test_peer_memory_gives_the_bits_of_collectives(engine, comm, pack, dims, head_groups):
    check_with_collectives(engine.xp, comm, pack, dims, head_groups=head_groups)


@pytest.mark.parametrize("keep_keys", [False, True])
def test_a_captured_exchange_replays(cupy, comm, keep_keys):
    layer = attention(comm, head_groups=2, keep_keys=keep_keys)
    plan = layer.plan(PackedBatch.from_lengths(PACKS["few-long"], 4))
    static = inputs_of(cupy, layer, plan)
    wanted = [[x.copy() for x in step(layer, plan, *inputs_of(cupy, layer, plan, seed))] for seed in range(4)]
    stream = cupy.cuda.get_current_stream()
    stream.begin_capture()
    found = [step(layer, plan, *static) for _ in range(2)]  # a window has its second turn
    graph = stream.end_capture()
    for seed in (0, 1, 2, 3, 1):
        for x, y in zip(static, inputs_of(cupy, layer, plan, seed), strict=True):
            x[...] = y
        graph.launch(stream)
        for results in found:
            assert_same_bits(results, wanted[seed])
    assert_same_bits(step(layer, plan, *static), wanted[1])  # eager again, with the flags as the graph left them
    stream.synchronize()
    del graph


def test_layers_in_flight_do_not_mix(cupy, comm):
    layer = attention(comm, head_groups=2, keep_keys=False)
    plan = layer.plan(PackedBatch.from_lengths(PACKS["few-long"], 4))
    layers = [inputs_of(cupy, layer, plan, seed) for seed in range(3)]
    wanted = [[x.copy() for x in step(layer, plan, *inputs)] for inputs in layers]
    for _ in range(3):
        saved, outs, grads = [], [], []
        keys = layer.gather(*layers[0][1:3], plan)
        for number, (q, k, v, _) in enumerate(layers):
            following = layer.gather(*layers[number + 1][1:3], plan) if number < 2 else None
            out, kept = layer.forward(q, k, v, plan, return_max_logit=True, keys=keys)
            outs.append((out, kept.lse, kept.max_logit))
            saved.append(kept)
            keys = following
        for number in (2, 1, 0):
            dq, dk_dv = layer.start_backward(layers[number][3], saved[number])
            grads.insert(0, (dq, *dk_dv()))
        for number in range(3):
            assert_same_bits((*outs[number], *grads[number]), wanted[number])


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("head_groups", [1, 2, 4, None])
def test_streams_that_are_late_give_the_same_bits(cupy, comm, head_groups, keep_keys):
    delays.check(cupy, comm, head_groups, keep_keys)


ALL_TO_ALL = [  # rows, heads of how many that travel, of how many there; and the dtype
    (300, 4, 32, 4, "bfloat16"), (300, 4, 32, 12, "bfloat16"), (17, 32, 32, 32, "bfloat16"), (300, 8, 8, 16, "float32"),
    (1, 3, 5, 7, "float32"), (5000, 1, 8, 1, "float16"), (3, 1, 1, 9, "int8"),
]


def slices_of(cupy, seed):
    """(what is sent, where it is received), strided and not, and the whole arrays that are received into."""
    rng, sends, recvs, places = np.random.default_rng(seed), [], [], []
    for rows, heads, out_of, into, name in ALL_TO_ALL:
        dtype = np.dtype(name)
        width = 256 // dtype.itemsize
        values = cupy.asarray(rng.integers(-99, 99, (rows, out_of, width)).astype(dtype))
        place = cupy.zeros((rows, into, width), dtype)
        sends.append((values[:, out_of - heads :], 1))
        recvs.append((place[:, :heads], 1))
        places.append(place)
    return sends, recvs, places


SWAPPED = [  # rows, heads that each of two ranks has, width, dtype; whether rows of all come back; of each an exchange
    [(4096, 8, 128, "bfloat16", False), (4096, 2, 128, "bfloat16", False), (4096, 2, 64, "bfloat16", False)],
    [(4096, 8, 128, "bfloat16", True), (8, 4096, 1, "float32", False)],
    [(9_000, 16, 128, "bfloat16", True)],  # of all chunks that there are
    [(1, 1, 8, "float16", False)], [(301, 3, 1, "float32", True)], [(77, 5, 3, "int8", False)],
    [(40, 1, 8, "bfloat16", False)] * 6,
]


def swap_of(cupy, arrays, seed):
    """What two ranks give each other of some arrays, those arrays, and others that it is put into."""
    rng, cuts, sends, recvs = np.random.default_rng(seed), [], [], []
    for rows, heads, width, name, back in arrays:
        dtype = np.dtype(name)
        shapes = (rows, SIZE * heads, width), (SIZE * rows, heads, width)
        sends.append(cupy.asarray(rng.integers(-99, 99, shapes[back]).astype(dtype)))
        recvs.append(cupy.zeros(shapes[not back], dtype))
        of_rows, of_heads = (SliceSpec(axis, (0, each), (each, 2 * each)) for axis, each in enumerate((rows, heads)))
        cuts.append((of_rows, of_heads) if back else (of_heads, of_rows))
    sizes = sum(x.nbytes for x in sends) // SIZE * (1 - np.eye(SIZE, dtype=np.int64))
    return AllToAllSpec(*zip(*cuts, strict=True), sizes), sends, recvs


def assert_arrived(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert to_host(x).tobytes() == to_host(y).tobytes()


def copied(cupy, seed):
    """An exchange through peer memory: (function of a comm that starts it, what it sends, what it writes to)."""
    sends, recvs, places = slices_of(cupy, seed)
    total = sum(x.nbytes for x, _ in sends)
    return [(lambda comm: comm.exchange(sends, recvs, [[0, total], [total, 0]]), [x for x, _ in sends], places)]


def by_kernel(cupy, seed):
    """The same of exchanges by one kernel each."""
    made = [swap_of(cupy, arrays, seed) for arrays in SWAPPED]
    return [(lambda comm, one=one: comm.all_to_all(*one, at_once=True), *one[1:]) for one in made]


def through_copies(cupy, exchanges, seed):
    """The same exchanges of other rows, when all have arrived by copies: what they sent, and what arrived."""
    made = exchanges(cupy, seed)
    for start, _, _ in made:
        start(Mirror())()
    return [x for _, sends, _ in made for x in sends], [x for _, _, found in made for x in found]


@pytest.mark.parametrize("exchanges", [copied, by_kernel])
def test_slices_arrive_as_by_copies(cupy, comm, exchanges):
    under_way = []
    for seed in range(5):
        made = exchanges(cupy, seed)
        waits = [start(comm) for start, _, _ in made]
        for x in (x for _, sends, _ in made for x in sends):
            x.view(np.uint8)[...] = 0  # they are free
        found = [x for _, _, found in made for x in found]
        under_way.append((waits, found, through_copies(cupy, exchanges, seed)[1]))
    for waits, found, wanted in under_way[::-1]:
        for wait in waits:
            wait()
        assert_arrived(found, wanted)
    assert comm.by_kernel == (5 * len(SWAPPED) if exchanges is by_kernel else 0)


def test_slices_by_copies_and_by_the_kernel_take_turns(cupy, comm, monkeypatch):
    monkeypatch.setattr(transport, "WORTH_COPYING", 0)
    under_way = []
    for number in range(12):
        swap, sends, found = swap_of(cupy, SWAPPED[number % len(SWAPPED)], number)
        _, _, wanted = swap_of(cupy, SWAPPED[number % len(SWAPPED)], number)
        Mirror().all_to_all(swap, sends, wanted)()
        under_way.append((comm.all_to_all(swap, sends, found, at_once=number % 3 == 0), found, wanted))
    for wait, found, wanted in under_way[::-1]:
        wait()
        assert_arrived(found, wanted)
    assert comm.by_kernel == 4


@pytest.mark.parametrize("exchanges", [copied, by_kernel])
def test_captured_slices_replay(cupy, comm, exchanges):
    made = exchanges(cupy, 0)
    for start, _, _ in made * 2:  # each at both turns of a window
        start(comm)()
    stream = cupy.cuda.get_current_stream()
    stream.begin_capture()
    waits = [start(comm) for start, _, _ in made * (3 if exchanges is copied else 1)]
    for wait in waits:
        wait()
    graph = stream.end_capture()
    sent, found = [x for _, sends, _ in made for x in sends], [x for _, _, found in made for x in found]
    for seed in (1, 2, 3):
        others, wanted = through_copies(cupy, exchanges, seed)
        for x, other in zip(sent, others, strict=True):
            x[...] = other
        for x in found:
            x.view(np.uint8)[...] = 0
        graph.launch(stream)
        assert_arrived(found, wanted)
    made[0][0](comm)()  # eager again, with the flags as the graph left them
    stream.synchronize()
    del graph


@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize("sharding", ["contiguous", "dual_chunk"])
@pytest.mark.parametrize("pack", PACKS)
def test_heads_exchanged_by_the_kernel_give_the_bits_of_collectives(cupy, comm, pack, sharding, head_groups, keep_keys):
    check_with_collectives(cupy, comm, pack, sharding=sharding, head_groups=head_groups, keep_keys=keep_keys,
                           cp_comm_type="a2a")
    assert comm.by_kernel == 3 * 4 * head_groups  # there and back, forward and backward: what is small is not hidden


def test_windows_grow_and_those_of_graphs_stay(cupy, comm):
    layer, stream = attention(comm, head_groups=2, keep_keys=False), cupy.cuda.get_current_stream()
    small, large, largest = (layer.plan(PackedBatch.from_lengths(lengths, 4))
                             for lengths in ((64,), (9_000, 5_000), (20_000,)))
    inputs = inputs_of(cupy, layer, small)
    wanted = [x.copy() for x in step(layer, small, *inputs)]
    before = comm.peer.held_bytes()
    stream.begin_capture()
    found = [step(layer, small, *inputs) for _ in range(2)]  # a window has its second turn
    graph = stream.end_capture()
    for plan in (large, largest):
        step(layer, plan, *inputs_of(cupy, layer, plan))
        held = comm.peer.held_bytes()
        assert held["windows of graphs"] == before["windows of keys"] + before["windows of sums"]
        for results in found:
            for x in results:
                x.view(np.uint8)[...] = 0xFF
        graph.launch(stream)
        for results in found:
            assert_same_bits(results, wanted)
    assert held["pulled sums of graphs"] == before["pulled sums"]
    assert_same_bits(step(layer, small, *inputs), wanted)
    stream.synchronize()
    del graph
    assert layout.rounded_up(3 << 20) == 3 << 20 and layout.rounded_up((9 << 20) + 1) == 10 << 20


@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("name", ["gqa-32-8", "mha", "window-two-sided", "capacity-contiguous", "tail-tiles",
                                  *(case.name for case in cases.DIMS if case.name.endswith("-causal"))])
def test_every_group_of_heads_is_the_oracle(cupy, name, keep_keys):
    case = {case.name: case for case in (*CASES.values(), *cases.DIMS)}[name]
    for head_groups in {1, case.heads[1]}:
        for deterministic in (False, True):  # where dq has a kernel of its own, on copies of the group's heads
            check(case, BFLOAT16, run(case, 2, BFLOAT16, xp=cupy, engine="cuda", head_groups=head_groups,
                                      keep_keys=keep_keys, deterministic=deterministic))


def test_groups_of_heads_give_the_same_bits(cupy):
    case = CASES["gqa-12-2"]
    wanted, found = (run(case, 2, BFLOAT16, xp=cupy, engine="cuda", head_groups=n, deterministic=True) for n in (1, 2))
    for field in FIELDS:
        assert found.tokens[field].tobytes() == wanted.tokens[field].tobytes(), field


# --- the kernel that brings slices, as one rank of many ----------------------------------------------------------


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
