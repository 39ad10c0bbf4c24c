"""A stream beside kernels that waits for another rank is late, though no stream of the program waits for it yet."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy")

import fake_nccl
from peer_programs import HEADS, WIDTH, Pack, Program, machine_of

from thdattn.comm import nccl
from thdattn.comm.failures import watchdog


def gather(program):
    Pack(program, program.machine.stream, 3).layer().gather((HEADS,))


def exchange(program):
    sent, received = (program.engine.empty((5, WIDTH), np.float32) for _ in range(2))
    other = 1 - program.comm.rank
    program.memory.exchange([(sent, other)], [(received, other)], sent.nbytes * (1 - np.eye(2, dtype=int)))


def add(program):
    results = [program.engine.empty((3, HEADS, WIDTH), np.float32) for _ in range(2)]
    program.memory.owner_partials([x.shape for x in results], [x.shape for x in results], False)
    program.memory.reduce_partials(None, results, False, True)


def waits(monkeypatch, ranks, cliques, call):
    """What the watchdog finds when these ranks of two have made a call, whose arrivals they have not asked for."""
    monkeypatch.setattr(watchdog, "_watchdog", watchdog._Watchdog())
    monkeypatch.setattr(nccl, "_lanes", {})
    with machine_of(2, 0) as machine:

        def write(stream, address, number, flags):
            place = ctypes.c_uint32.from_address(address)
            machine.streams[stream].put(lambda reached: setattr(place, "value", number))
            return 0

        monkeypatch.setattr(nccl, "_stream_writes", lambda: write)
        cupy = sys.modules["cupy"]
        cupy.cuda.alloc_pinned_memory = bytearray
        for rank in ranks:
            watch = watchdog.Watch(f"rank {rank}", 3.0, None)
            program = Program(machine, rank, cliques)
            comm = SimpleNamespace(_cupy=cupy, _gpu=0, _watch=watch)
            program.memory.wait_within(watch.waiting, partial(nccl.NcclComm._watched_stream, comm))
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
