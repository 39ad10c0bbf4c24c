"""Simulated ranks whose threads have streams of their own: collectives order them, on streams that run in any order."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpus import Machine

import thdattn
from thdattn.comm.local import LocalComm

SEEDS = 30


class Array:
    """Array on a GPU: what changes it is a step of the thread's current stream."""

    __module__ = "cupy"

    def __init__(self, machine, host):
        self.machine, self.host, self.data = machine, host, SimpleNamespace(ptr=host.ctypes.data)

    def __getattr__(self, name):
        return getattr(self.host, name)

    def __len__(self):
        return len(self.host)

    def __getitem__(self, where):
        return Array(self.machine, self.host[where])

    def __setitem__(self, where, value):
        target, source = self.host[where], getattr(value, "host", value)
        self.machine.stream.put(lambda reached: np.copyto(target, source))

    def __iadd__(self, other):
        return np.add(self, other, out=self)

    def __array_ufunc__(self, ufunc, method, *inputs, out):
        x, y = (each.host for each in inputs)
        self.machine.stream.put(lambda reached: ufunc(x, y, out=out[0].host))
        return out[0]

    def reshape(self, *shape):
        return Array(self.machine, self.host.reshape(*shape))

    def view(self, dtype):
        return Array(self.machine, self.host.view(dtype))

    def copy(self):
        made = Array(self.machine, np.full_like(self.host, np.nan))
        made[...] = self
        return made


def wrong_results(monkeypatch, seed):
    """Collectives of 3 ranks, a stream each, whose inputs are overwritten right after; return how many are wrong."""
    machine = Machine(3, seed)
    monkeypatch.setitem(sys.modules, "cupy", machine.cupy())

    def full(num_rows, value):
        made = Array(machine, np.full((num_rows, 2), np.nan))
        made[...] = value
        return made

    def program(comm):
        machine.become(comm.rank)
        results, rank = [], comm.rank
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
    machine.run()
    return sum(not (x.host == np.reshape(wanted, (-1, 1))).all() for x, wanted in results)


def test_collectives_order_the_streams_of_simulated_ranks(monkeypatch):
    assert [wrong_results(monkeypatch, seed) for seed in range(SEEDS)] == [0] * SEEDS


@pytest.mark.parametrize("step", ["_point", "_release"])
def test_streams_that_are_not_ordered_are_found(monkeypatch, step):
    """Without events, or without the wait until nobody reads what was sent."""
    monkeypatch.setattr(LocalComm, step, lambda *_: None)
    assert any(wrong_results(monkeypatch, seed) for seed in range(SEEDS))
