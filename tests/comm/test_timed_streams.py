"""Streams of GPUs beside kernels: where the events of a timeline are, and which waits the watchdog finds."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from functools import partial
from types import SimpleNamespace
from unittest import mock

import fake_nccl
import numpy as np
import pytest
from fake_gpus import Machine, installed
from fake_mpi import World

pytest.importorskip("cupy")  # which peer_programs loads
from peer_programs import HEADS, WIDTH, Pack, Program, machine_of

import thdattn
from thdattn import spans, timeline
from thdattn.comm.failures import lanes, watchdog
from thdattn.comm.nccl.comm import NcclComm
from thdattn.comm.peer import transport as peer

GROUPS = 1, 1, 2


def gather(program):
    Pack(program, program.machine.stream, 3).layer().gather(GROUPS)


def gather_at_once(program):
    keys = Pack(program, program.machine.stream, 3).layer().gather(GROUPS, at_once=True)
    for _ in keys.in_order():
        pass


def exchange(program):
    sent, received = (program.engine.empty((5, WIDTH), np.float32) for _ in range(2))
    other = 1 - program.comm.rank
    program.memory.exchange([(sent, other)], [(received, other)], sent.nbytes * (1 - np.eye(2, dtype=int)))


def add(program, in_rank_order=True, at_once=False):
    results = [program.engine.empty((3, HEADS, WIDTH), np.float32) for _ in range(2)]
    program.memory.owner_partials([x.shape for x in results], [x.shape for x in results], at_once)
    program.memory.reduce_partials(None, results, at_once, in_rank_order)


def add_by_nccl(program):
    add(program, in_rank_order=False)


def add_at_once(program):
    add(program, at_once=True)


def recorded(call, by_nccl, seed=0):
    """Of each of two ranks (recorder, its stream for kernels, its stream for exchanges), after a kernel and a call."""
    ranks, cliques = [], [fake_nccl.Clique(2) for _ in range(2 * by_nccl)]
    with machine_of(2, seed) as machine:
        for rank in range(2):
            program = Program(machine, rank, cliques)
            recorder, stream = spans.Recorder(True), machine.stream
            with mock.patch.dict(spans.active, {threading.get_ident(): recorder}):
                with spans.computing("kernel"):
                    stream.launch(lambda: None)
                call(program)
            beside = program.memory._stream
            ranks.append((recorder, stream, beside))
        machine.run()
    return ranks


GATHER, EXCHANGE = ("exchange", "gather of keys"), ("exchange", "exchange")
PARTIALS, SUM = ("exchange", "exchange of partial sums"), ("sum", "sum of gradients")
BARS = {  # of peer memory, and of NCCL: on the current stream, and on the one beside it
    gather: (([], [GATHER] * 3), ([], [GATHER] * 3)),
    gather_at_once: (([], [GATHER] * 2), ([GATHER], [GATHER] * 2)),
    exchange: (([], [EXCHANGE]), ([], [EXCHANGE])),
    add: (([], [PARTIALS]), ([], [PARTIALS])),
    add_by_nccl: (([], [PARTIALS]), ([], [SUM])),
    add_at_once: (([], []), ([PARTIALS], [])),
}


@pytest.mark.parametrize("call", BARS)
@pytest.mark.parametrize("by_nccl", [False, True], ids=["peer", "nccl"])
def test_events_are_on_the_stream_that_does_the_work(by_nccl, call):
    for recorder, stream, beside in recorded(call, by_nccl):
        on = {stream: [], beside: []}
        for lane, name, begin, end in recorder._spans:
            assert begin.stream is end.stream
            on[begin.stream].append((lane, name))
        here, there = BARS[call][by_nccl]
        assert on == {stream: [("compute", "kernel"), *here], beside: there}


@pytest.mark.parametrize("call", [gather, exchange, add])
@pytest.mark.parametrize("seed", range(8))
def test_copies_between_gpus_begin_when_both_ranks_have_come(call, seed):
    ranks = [{name: (begin.time, end.time) for _, name, begin, end in recorder._spans}
             for recorder, *_ in recorded(call, False, seed)]
    assert all(begin < end for bars in ranks for begin, end in bars.values())
    came = max(bars.pop("kernel")[1] for bars in ranks)
    assert all(begin > came for bars in ranks for begin, _ in bars.values())


def test_ranks_with_gpus_put_their_bars_on_one_axis(monkeypatch):
    engine = SimpleNamespace(device="cuda", capture=lambda: None)
    monkeypatch.setattr(timeline, "choose_engine", lambda *_: (engine, "a fake"))
    with installed(Machine(2)) as machine:

        def program(comm):
            machine.become(comm.rank)
            memory = peer.PeerTransport(World(comm))
            with timeline.record(comm) as found:
                rows = machine.asarray(np.ones((3, HEADS, WIDTH), np.float32))
                recv = machine.asarray(np.ones((6, HEADS, WIDTH), np.float32))
                (arrival,) = memory.gather_heads([rows], [[recv]], False)
                arrival.wait()
            memory.close()
            return found

        found, other = thdattn.comm.run_local(2, program)
    assert [row[:3] for row in found.rows] == [(rank, *GATHER) for rank in range(2)]
    assert found.rows == other.rows and found.error > 0
    assert all(row.begin < row.end for row in found.rows)


def test_a_capture_on_one_rank_is_an_error_on_all_ranks(monkeypatch):
    captures = {rank: SimpleNamespace(device="cuda", capture=lambda rank=rank: rank or None) for rank in range(2)}
    monkeypatch.setattr(timeline, "choose_engine", lambda _, comm: (captures[comm.rank], "a fake"))

    def program(comm):
        refused = pytest.raises(ValueError, match="rank 1: it captures a CUDA graph, which does nothing yet; record a")
        with refused, timeline.record(comm):
            pytest.fail("it began")

    thdattn.comm.run_local(2, program)


# --- watched streams ---------------------------------------------------------------------------------------------


pytest.importorskip("cupy")




def waits(monkeypatch, ranks, cliques, call):
    """What the watchdog finds when these ranks of two have made a call, whose arrivals they have not asked for."""
    monkeypatch.setattr(watchdog, "_watchdog", watchdog._Watchdog())
    monkeypatch.setattr(lanes, "_lanes", {})
    with machine_of(2, 0) as machine:

        def write(stream, address, number, flags):
            place = ctypes.c_uint32.from_address(address)
            machine.streams[stream].put(lambda reached: setattr(place, "value", number))
            return 0

        monkeypatch.setattr(lanes, "_stream_writes", lambda: write)
        cupy = sys.modules["cupy"]
        cupy.cuda.alloc_pinned_memory = bytearray
        for rank in ranks:
            watch = watchdog.Watch(f"rank {rank}", 3.0, None)
            program = Program(machine, rank, cliques)
            comm = SimpleNamespace(_cupy=cupy, _gpu=0, _watch=watch)
            program.memory.wait_within(watch.waiting, partial(NcclComm._watched_stream, comm))
            call(program)
        with contextlib.suppress(AssertionError):  # streams wait for ever
            machine.run()
    return [operation.what for operation, _ in watchdog._watchdog.waits()]


@pytest.mark.parametrize("call", [gather, exchange, add])
@pytest.mark.parametrize("by_nccl", [False, True], ids=["peer", "nccl"])
def test_what_waits_beside_kernels_is_watched_before_a_kernel_needs_it(monkeypatch, by_nccl, call):
    cliques = [fake_nccl.Clique(2) for _ in range(2 * by_nccl)]
    assert waits(monkeypatch, [1], cliques, call) == ["exchange beside kernels"]
    assert waits(monkeypatch, [0, 1], [fake_nccl.Clique(2) for _ in cliques], call) == []
