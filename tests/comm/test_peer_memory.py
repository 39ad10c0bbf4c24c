"""Memory of peer memory, by ranks that are threads: what fails on one is raised by all, and what is there counts."""

from __future__ import annotations

import contextlib
import gc
import re

import numpy as np
import pytest

pytest.importorskip("cupy")

from fake_exchange import Gathered, meet
from fake_gpus import CUDARuntimeError, Machine, installed
from fake_mpi import World

import thdattn
from thdattn.comm.failures.outcomes import agreed
from thdattn.comm.nccl.comm import _peer_transport
from thdattn.comm.nccl.gpus import Gpu
from thdattn.comm.peer import transport as peer

SIZE = 3


@pytest.fixture
def machine():
    with installed(Machine(SIZE)) as machine:
        yield machine


@pytest.fixture
def ranks(machine):
    """ranks(program): what program(memory, gpu) returns on each rank."""
    def run(program):
        def one(comm):
            machine.become(comm.rank)
            memory = peer.PeerTransport(World(comm))
            result = program(memory, machine.gpu)
            memory.close()
            assert not machine.gpu.allocated and not machine.gpu.opened
            return result

        return thdattn.comm.run_local(SIZE, one, timeout=20)

    return run


def rows(rank, number, num_rows):
    return np.random.default_rng([rank, number]).standard_normal((num_rows, 2, 4), np.float32)


def on_gpu(memory, values):
    return memory._cupy.asarray(values)


def empty(memory, num_rows):
    return on_gpu(memory, np.full((num_rows, 2, 4), np.nan, np.float32))


def gather(memory, number, num_rows):
    recv = empty(memory, SIZE * num_rows)
    (arrival,) = memory.gather_heads([on_gpu(memory, rows(memory.rank, number, num_rows))], [[recv]], False)
    arrival.wait()
    for other in memory._others:
        assert recv[other * num_rows :][:num_rows].tobytes() == rows(other, number, num_rows).tobytes()


def exchange(memory, number, num_rows):
    sizes = num_rows * 32 * (1 - np.eye(SIZE, dtype=int))
    recvs = [(empty(memory, num_rows), other) for other in memory._others]
    send = on_gpu(memory, rows(memory.rank, number, num_rows))
    memory.exchange([(send, other) for other in memory._others], recvs, sizes)()
    for recv, other in recvs:
        assert recv.tobytes() == rows(other, number, num_rows).tobytes()


def add(memory, number, num_rows, at_once=False):
    results, shape = [empty(memory, num_rows) for _ in range(2)], (num_rows, 2, 4)
    for homes in memory.owner_partials([shape] * 2, [shape] * 2, at_once)["of"]:
        for home in homes[:SIZE]:
            memory._cupy.machine.array(shape, np.float32, int(home))[...] = memory.rank + number
    memory.reduce_partials(None, results, at_once)()
    assert all((x == sum(range(SIZE)) + SIZE * number).all() for x in results)


def add_at_once(memory, number, num_rows):
    add(memory, number, num_rows, at_once=True)


CALLS = gather, exchange, add, add_at_once
calls = pytest.mark.parametrize("call", CALLS)


def told(memory):
    """Bytes that it says to hold are those that were allocated."""
    held = memory.held_bytes()
    assert sum(held.values()) == memory._cupy.machine.gpu.allocated
    return held


def state(memory):
    return told(memory), sorted(memory._cupy.machine.gpu.opened)


# --- growing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [(1,), (0, 2)])
@calls
def test_where_one_rank_lacks_memory_all_raise_and_a_smaller_batch_works(ranks, call, short):
    def program(memory, gpu):
        for number in range(3):
            call(memory, number, 8)
        before = state(memory)
        if memory.rank in short:
            gpu.left = 100_000
        with pytest.raises(MemoryError) as refused:
            call(memory, 3, 5000)
        assert state(memory) == before
        for number, num_rows in enumerate((8, 5, 8, 7)):
            call(memory, number, num_rows)
        gpu.left = 1 << 30
        for number in range(3):
            call(memory, number, 5000)
        assert state(memory)[0] != before[0]
        return str(refused.value)

    (message,) = set(ranks(program))
    assert re.match(r"making .*(windows|pulled).* failed on rank \d: found 0.10 MiB of GPU memory free, want", message)
    assert [rank for rank in range(SIZE) if f"rank {rank}" in message] == list(short)
    assert "pass fewer tokens" in message


@calls
def test_what_the_pool_holds_free_is_given_back(ranks, call):
    def program(memory, gpu):
        call(memory, 0, 8)
        if memory.rank:
            gpu.left, gpu.cached = 100_000, 1 << 30
        call(memory, 1, 5000)
        assert not gpu.cached

    ranks(program)


@pytest.mark.parametrize("at_once", [False, True])
def test_all_ranks_have_windows_before_one_asks_for_its_arrays(ranks, at_once):
    """Arrays may come from the block of CuPy's pool that windows need, and fail on one rank alone."""
    def program(memory, gpu):
        asked = []

        class Places(list):
            def __getitem__(self, group):
                asked.append(group)
                return super().__getitem__(group)

        places = Places([[on_gpu(memory, np.zeros((SIZE * 5000, 1, 4), np.float32))] for _ in range(2)])
        send = on_gpu(memory, rows(memory.rank, 0, 5000))
        if memory.rank == 1:
            gpu.left = 100_000
        with pytest.raises(MemoryError, match=r"making 2 windows of keys of .* failed on rank 1"):
            memory.gather_heads([send], places, at_once)
        assert not asked
        gpu.left = 1 << 30
        memory.gather_heads([send], places, at_once)
        assert asked

    ranks(program)


@pytest.mark.parametrize("step", ["handle", "open"])
def test_windows_that_cannot_be_shared_are_given_back_by_all(ranks, step):
    def program(memory, gpu):
        gather(memory, 0, 8)
        before, count = state(memory), iter(range(99))

        def refuses(which, about):
            if which == step and next(count) == 1:
                raise CUDARuntimeError(201)

        if memory.rank == 1:
            gpu.refuses = refuses
        with pytest.raises(RuntimeError, match=r"2 windows of keys .* failed on rank 1: CUDARuntimeError: error 201$"):
            gather(memory, 1, 5000)
        assert state(memory) == before
        for number, num_rows in enumerate((8, 5000, 8, 5000)):
            gather(memory, number, num_rows)

    ranks(program)


def test_ranks_wait_for_each_other_within_the_deadline(ranks):
    def program(memory, gpu):
        within = []

        @contextlib.contextmanager
        def waiting(step):
            within.append(step)
            yield
            within.append("")

        world = memory._world
        allgather = world.allgather

        def asked(value):
            assert within and within[-1], "nobody would end what waits here"
            return allgather(value)

        world.allgather = asked
        memory.wait_within(waiting, contextlib.nullcontext)
        gather(memory, 0, 5000)
        assert next(filter(None, within)).startswith("making 2 windows of keys of 0.")
        add(memory, 0, 5000)
        memory.close()

    ranks(program)


# --- the start ---------------------------------------------------------------------------------------------------


def fails_at(step, number=0):
    """Has a step of the start fail on rank 1, or a write be lost, the first time or later."""
    count = iter(range(99))

    def refuses(which, about):
        if which == step and next(count) >= number:
            raise CUDARuntimeError(801)
        return which == "write" and step == "lost"

    return refuses


@pytest.mark.parametrize("transport", ["auto", "peer"])
@pytest.mark.parametrize(("step", "message"), [
    (("stream",), "the start of peer memory failed on rank 1: CUDARuntimeError: error 801"),
    (("allocate",), "making 2 windows of keys of .* each failed on rank 1: CUDARuntimeError"),
    (("handle", 1), "making 2 windows of keys of .* each failed on rank 1: CUDARuntimeError"),
    (("open", 3), "opening 2 windows of keys of .* each failed on rank 1: CUDARuntimeError"),
    (("write", 4), "writing into the memory of other GPUs failed on rank 1: CUDARuntimeError"),
    (("lost",), r"reading the memory of other GPUs .* rank 0: RuntimeError: flags of ranks \[1\] have not arrived"),
    (("wait", 4), "waiting for flags failed on rank 1: CUDARuntimeError"),
])
def test_a_start_that_fails_on_one_rank_says_why_on_all(machine, step, message, transport):
    def program(comm):
        machine.become(comm.rank)
        gpu, gpus = machine.gpu, [Gpu(0, "node7", str(rank), "") for rank in range(SIZE)]
        if comm.rank == 1:
            gpu.refuses = fails_at(*step)
        if transport == "auto":
            made, why = _peer_transport(World(comm), gpus, transport)
            assert made is None
        else:
            with pytest.raises(RuntimeError, match=r"^transport is 'peer', but .*; use transport='auto'") as refused:
                _peer_transport(World(comm), gpus, transport)
            why = str(refused.value)
        assert not gpu.allocated and not gpu.opened
        return why

    (why,) = set(thdattn.comm.run_local(SIZE, program, timeout=20))
    assert re.search(message, why)


# --- what is kept ------------------------------------------------------------------------------------------------


@calls
def test_sizes_that_rise_by_little_leave_two_windows(ranks, call):
    def program(memory, gpu):
        for number in range(22):
            num_rows = int(2000 * 1.02**number)
            call(memory, number, num_rows)
            held = told(memory)
        for number in range(4):
            call(memory, number, 100)
        assert told(memory) == held
        memory.close()
        fresh = peer.PeerTransport(memory._world)
        call(fresh, 0, num_rows)
        assert told(fresh) == held
        fresh.close()

    ranks(program)


@pytest.mark.parametrize("captures", [(0, 1, 2), (1,)])
@calls
def test_what_graphs_use_stays_and_counts(ranks, call, captures):
    def program(memory, gpu):
        call(memory, 0, 8)
        call(memory, 1, 8)
        if call is add:  # they have room of their own for what is pulled
            gpu.capturing = True
            call(memory, 2, 8)
        else:
            gpu.capturing = memory.rank in captures
            call(memory, 2, 8)
        gpu.capturing = False
        before = told(memory)
        call(memory, 3, 5000)
        of_graphs = told(memory)["windows of graphs"]
        assert of_graphs == sum(size for name, size in before.items() if name == NAMES[call])
        for number, num_rows in enumerate((6000, 8, 7000)):
            call(memory, number, num_rows)
            assert told(memory)["windows of graphs"] == of_graphs
        assert ("pulled sums of graphs" in told(memory)) == (call is add)
        memory.close()
        assert not gpu.allocated and not gpu.opened

    ranks(program)


NAMES = {gather: "windows of keys", exchange: "windows of slices", add: "windows of sums",
         add_at_once: "windows of sums"}


@pytest.mark.parametrize("captures", [(0, 1, 2), (1,)])
@pytest.mark.parametrize("call", [gather, exchange, add_at_once])
def test_a_capture_that_needs_more_is_refused_on_all_ranks(ranks, call, captures):
    def program(memory, gpu):
        call(memory, 0, 8)
        before, synchronized = state(memory), gpu.num_synchronized
        gpu.capturing = memory.rank in captures
        with pytest.raises(RuntimeError, match=r"failed on rank .*a captured call needs .* use warmup_steps of"):
            call(memory, 1, 5000)
        assert not gpu.capturing or gpu.num_synchronized == synchronized, "which a capture forbids"
        gpu.capturing = False
        assert state(memory) == before
        for number, num_rows in enumerate((8, 5000, 8)):
            call(memory, number, num_rows)

    ranks(program)


def test_close_frees_all_at_once(ranks):
    def program(memory, gpu):
        sends = [on_gpu(memory, rows(memory.rank, 0, 8))]
        for number in range(3):
            for call in CALLS:
                call(memory, number, 8)
        groups = [[on_gpu(memory, np.zeros((SIZE * 8, 1, 4), np.float32))] for _ in range(2)]
        first, last = memory.gather_heads(sends, groups, True)
        cargo = Gathered(np.arange(SIZE * 8), 8, groups[0], first.parts, sends, first.peer_exchange.to)
        meet(memory._last, cargo, first.peer_exchange.flags)
        first.done()
        last.wait()
        synchronized = gpu.num_synchronized
        memory.close()
        assert gpu.num_synchronized > synchronized
        assert not gpu.allocated and not gpu.opened and not memory.held_bytes()
        last.done()  # somebody has held it for long, and it writes nowhere

    gc.collect()
    gc.disable()
    try:
        ranks(program)
    finally:
        gc.enable()


# --- agreement ---------------------------------------------------------------------------------------------------


def test_an_agreement_names_every_rank_that_failed_and_prefers_memory():
    def program(comm):
        def action():
            if comm.rank == 1:
                raise MemoryError("all is full")
            if comm.rank == 2:
                raise KeyError("key")
            return comm.rank

        with pytest.raises(MemoryError) as refused:
            agreed(World(comm), "a step", action, "do less")
        assert agreed(World(comm), "a step", lambda: comm.rank) == [0, 1, 2]
        return str(refused.value)

    wanted = "a step failed on rank 1: all is full; rank 2: KeyError: 'key'; do less"
    assert thdattn.comm.run_local(SIZE, program) == [wanted] * SIZE
