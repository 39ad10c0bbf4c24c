"""Simulated ranks whose threads have streams of their own: collectives order them, on streams that run in any order."""

from __future__ import annotations

import random
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import thdattn
from thdattn.comm.local import LocalComm

SEEDS = 30
_of_thread = threading.local()


class Event:
    def __init__(self, disable_timing=True):
        self.reached = False

    def record(self, stream):
        stream.put(lambda: setattr(self, "reached", True))


class Stream:
    """Queue of steps, pairs (act, whether it may begin), which run when all ranks have returned."""

    def __init__(self, ptr):
        self.ptr, self.queue = ptr, []

    def put(self, act, ready=lambda: True):
        self.queue.append((act, ready))

    def wait_event(self, event):
        self.put(lambda: None, lambda: event.reached)


class Array:
    """Array on a GPU: what changes it is a step of the thread's current stream."""

    __module__ = "cupy"

    def __init__(self, host):
        self.host, self.data = host, SimpleNamespace(ptr=host.ctypes.data)

    def __getattr__(self, name):
        return getattr(self.host, name)

    def __len__(self):
        return len(self.host)

    def __getitem__(self, where):
        return Array(self.host[where])

    def __setitem__(self, where, value):
        target, source = self.host[where], getattr(value, "host", value)
        _of_thread.stream.put(lambda: np.copyto(target, source))

    def __iadd__(self, other):
        return np.add(self, other, out=self)

    def __array_ufunc__(self, ufunc, method, *inputs, out):
        x, y = (each.host for each in inputs)
        _of_thread.stream.put(lambda: ufunc(x, y, out=out[0].host))
        return out[0]

    def reshape(self, *shape):
        return Array(self.host.reshape(*shape))

    def view(self, dtype):
        return Array(self.host.view(dtype))

    def copy(self):
        made = Array(np.full_like(self.host, np.nan))
        made[...] = self
        return made


def full(num_rows, value):
    made = Array(np.full((num_rows, 2), np.nan))
    made[...] = value
    return made


def run(streams, seed):
    """Run all steps; some streams are much faster than others."""
    draw = random.Random(seed)
    weights = {stream: 10 ** draw.uniform(-2, 0) for stream in streams}
    while busy := [stream for stream in streams if stream.queue]:
        ready = [stream for stream in busy if stream.queue[0][1]()]
        assert ready, "streams wait for each other"
        (stream,) = draw.choices(ready, [weights[each] for each in ready])
        stream.queue.pop(0)[0]()


def wrong_results(monkeypatch, seed):
    """Collectives of 3 ranks, a stream each, whose inputs are overwritten right after; return how many are wrong."""
    streams = [Stream(number + 3) for number in range(3)]
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: _of_thread.stream, Event=Event)
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def program(comm):
        _of_thread.stream, results, rank = streams[comm.rank], [], comm.rank
        others = [other for other in range(3) if other != rank]
        for number in range(3):
            x, total, parts = full(3, rank + number), full(3, rank + number), full(9, rank + number)
            gathered, reduced, got = full(9, np.nan), full(3, np.nan), [full(3, np.nan) for _ in others]
            comm.all_gather(x, gathered)
            comm.all_reduce(total, "sum")
            comm.reduce_scatter(parts, reduced)
            recvs = list(zip(got, others, strict=True))
            comm.exchange([(x, other) for other in others], recvs)()
            for used in (x, parts):
                used[...] = np.nan
            whole = np.repeat([number, 1 + number, 2 + number], 3)
            results += [(gathered.copy(), whole), (total.copy(), 3 * number + 3), (reduced.copy(), 3 * number + 3)]
            results += [(y.copy(), other + number) for y, other in zip(got, others, strict=True)]
        return results

    results = [result for of_rank in thdattn.comm.run_local(3, program, timeout=20) for result in of_rank]
    run(streams, seed)
    return sum(not (x.host == np.reshape(wanted, (-1, 1))).all() for x, wanted in results)


def test_collectives_order_the_streams_of_simulated_ranks(monkeypatch):
    assert [wrong_results(monkeypatch, seed) for seed in range(SEEDS)] == [0] * SEEDS


@pytest.mark.parametrize("step", ["_point", "_release"])
def test_streams_that_are_not_ordered_are_found(monkeypatch, step):
    """Without events, or without the wait until nobody reads what was sent."""
    monkeypatch.setattr(LocalComm, step, lambda *_: None)
    assert any(wrong_results(monkeypatch, seed) for seed in range(SEEDS))
