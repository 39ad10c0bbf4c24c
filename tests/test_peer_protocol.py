"""The flags of peer memory, and the lives of buffers: whatever streams and ranks are late, everybody reads the right rows.

Random programs of forward and backward passes run on the real pipeline and the real peer memory, over fake streams
that are delayed at random. Inputs are random integers, so a row of another call, rank or layer gives another sum.
"""

from __future__ import annotations

import contextlib
import random
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("cupy")

from fake_streams import Machine, Stream

from thdattn import pipeline
from thdattn.comm import peer

HEADS, WIDTH = 4, 2
SEEDS = 150
WEIGHTS = np.arange(1, 1000, dtype=np.float32)[:, None, None]


def mix(x):
    """A sum that tells rows from each other."""
    return (WEIGHTS[: len(x)] * x).sum(0)


# --- an engine and a plan ----------------------------------------------------------------------------------------


class Engine:
    """What the pipeline asks of an engine, as kernels on the current stream that compute simpler things."""

    def __init__(self, machine):
        self.machine, self.empty = machine, machine.empty

    def to_sequence_order(self, k_parts, v_parts, plan, into, own):
        def move(outs, sources, own):
            for out, parts, mine in zip(outs, sources, own, strict=True):
                rows = np.concatenate(parts)
                rows[first : first + len(mine)] = mine
                out[plan.rank_order] = rows

        first = plan.cp_rank * plan.local_key_rows
        outs = into or [plan.buffer(name, (plan.key_rows, *parts[0].shape[1:]), parts[0].dtype)
                        for name, parts in (("k", k_parts), ("v", v_parts))]  # fmt: skip
        self.machine.stream.launch(move, outs, (k_parts, v_parts), own)
        return outs

    def to_rank_order(self, dk, dv, plan, into):
        def move(outs, sources):
            for out, x in zip(outs, sources, strict=True):
                out[...] = x[plan.rank_order]

        self.machine.stream.launch(move, into, (dk, dv))

    def attn_fwd(self, q, k, v, plan, softmax_scale, return_max_logit, into):
        def attend(out, q, k, v):
            out[...] = q + mix(k) - mix(v)

        self.machine.stream.launch(attend, into[0], q, k, v)
        return *into, None

    def attn_bwd(self, dout, q, k, v, out, lse, plan, softmax_scale, dtype, deterministic, into):
        def attend(dq, dk, dv, dout, k, v, out):
            dq[...], dk[...], dv[...] = out + dout, k + mix(dout), v * mix(dout)

        dq, shares = into
        dk, dv = shares or [plan.buffer(name, x.shape, dtype) for name, x in (("dk", k), ("dv", v))]
        self.machine.stream.launch(attend, dq, dk, dv, dout, k, v, out)
        return dq, dk, dv

    def poison(self, plan, *results):
        """Lengths are right."""


class Plan:
    def __init__(self, engine, rank, size, local_rows):
        self._engine, self._kept = engine, {}
        self.cp_rank, self.cp_size, self.local_key_rows, self.key_rows = rank, size, local_rows, size * local_rows
        self.rank_order = np.random.default_rng(local_rows).permutation(self.key_rows)
        self.rows = engine.empty((local_rows,), np.int64)
        engine.machine.stream.launch(np.copyto, self.rows, self.rank_order[rank * local_rows :][:local_rows])

    def once(self, key, make):
        return self._kept[key] if key in self._kept else self._kept.setdefault(key, make())

    def buffer(self, name, shape, dtype):
        return self.once((name, shape, dtype), lambda: self._engine.empty(shape, dtype))


# --- a rank's program --------------------------------------------------------------------------------------------


class Layer:
    """One attention of a pack: inputs of all ranks, by number, and what must come out on this one."""

    def __init__(self, program, number):
        self.program, self.plan, self.inputs = program, program.plan, [
            program.engine.empty((program.plan.local_key_rows, HEADS, WIDTH), np.float32) for _ in range(4)]  # fmt: skip
        self.write(number)

    def write(self, number):
        """Other inputs, in the same arrays."""
        shape = self.plan.cp_size, 4, self.plan.local_key_rows, HEADS, WIDTH
        made = np.random.default_rng(number).integers(-4, 5, shape).astype(np.float32)
        for x, values in zip(self.inputs, made[self.plan.cp_rank], strict=True):
            self.program.stream.launch(np.copyto, x, values)
        ks, vs = (np.empty((self.plan.key_rows, HEADS, WIDTH), np.float32) for _ in range(2))
        ks[self.plan.rank_order], vs[self.plan.rank_order] = (made[:, i].reshape(ks.shape) for i in (1, 2))
        q, k, v, dout = made[self.plan.cp_rank]
        douts = sum(mix(x) for x in made[:, 3])
        out = q + mix(ks) - mix(vs)
        self.wanted = out, out + dout, k * self.plan.cp_size + douts, v * douts

    def gather(self, groups, at_once=False):
        program, (_, k, v, _) = self.program, self.inputs
        return pipeline.gather(program.engine, program.comm, self.plan, k, v, groups, at_once)

    def forward(self, keys, keeps):
        self.kept = [] if keeps else None
        self.out, self.lse, _ = pipeline.forward(
            self.program.engine, self.program.comm, keys, self.inputs[0], 1.0, False, self.kept)
        return self.out

    def backward(self, keys, at_once):
        q, k, v, dout = self.inputs
        if self.kept:
            keys = pipeline.kept(self.kept, k, v, self.plan)
        return pipeline.backward(
            self.program.engine, self.program.comm, keys, dout, q, self.out, self.lse, 1.0, True, at_once)

    def check(self, found, first):
        for x, wanted in zip(found, self.wanted[first:], strict=False):
            self.program.stream.launch(self._compare, x, wanted)

    def _compare(self, found, wanted):
        self.program.num_checked += 1
        self.program.num_wrong += not np.array_equal(found, wanted)


class Program:
    """Calls of one rank, drawn at random, the same on all ranks."""

    def __init__(self, machine, rank):
        machine.rank, machine.stream = rank, Stream(machine)
        self.machine, self.rank, self.engine, self.numbers = machine, rank, Engine(machine), iter(range(1000))
        self.memory = peer.PeerMemory(machine.world(rank))
        self.comm = SimpleNamespace(
            size=machine.size, rank=rank, overlaps=True, gather_heads=self.memory.gather_heads,
            partials=lambda shapes, dtype, empty: self.memory.partials(shapes, dtype), sum_rows=self.memory.sum_rows,
            sum_in_place=self.memory.sum_in_place)  # fmt: skip
        self.num_checked = self.num_wrong = 0
        self.graphs, self.streams = [], [machine.stream, Stream(machine)]

    @property
    def stream(self):
        return self.machine.stream

    def enqueue(self, draw, num_packs=3, num_steps=8):
        for _ in range(num_packs):
            self.machine.stream = draw.choice(self.streams)
            self.plan = Plan(self.engine, self.rank, self.machine.size, draw.randint(1, 6))
            self.early, self.saved, self.sums = [], [], []
            for _ in range(num_steps):
                draw.choice([self.gather, self.forward, self.forward, self.backward, self.backward, self.dk_dv,
                             self.drop, self.capture, self.replay])(draw)  # fmt: skip

    def gather(self, draw):
        if len(self.early) < pipeline.IN_FLIGHT:
            layer = Layer(self, next(self.numbers))
            self.early.append((layer, layer.gather(draw.choice([1, 2, 4]))))

    def forward(self, draw):
        groups, keeps = draw.choice([1, 2, 4]), draw.random() < 0.3
        if self.early and (len(self.early) == pipeline.IN_FLIGHT or draw.random() < 0.5):
            layer, keys = self.early.pop(0)
        else:
            layer = Layer(self, next(self.numbers))
            keys = layer.gather(groups, at_once=True)
        layer.check([layer.forward(keys, keeps)], 0)
        self.saved.append(layer)

    def backward(self, draw):
        groups, at_once, early = draw.choice([1, 2, 4]), draw.random() < 0.5, draw.random() < 0.5
        if self.saved and not (self.early and len(self.early) == pipeline.IN_FLIGHT):
            layer = self.saved.pop()
            keys = None if layer.kept else layer.gather(groups, at_once=not early)
            dq, dk_dv = layer.backward(keys, at_once)
            layer.check([dq], 1)
            self.sums.append((layer, dk_dv))
            if at_once:
                self.dk_dv(draw)

    def dk_dv(self, draw):
        if self.sums:
            layer, dk_dv = self.sums.pop()
            layer.check(dk_dv(), 2)

    def drop(self, draw):
        """Forgets what is on its way; other arrays get its memory."""
        for under_way in (self.early, self.sums):
            if under_way and draw.random() < 0.5:
                under_way.pop(0)

    def capture(self, draw):
        """Two layers, forward and backward, the second one's keys asked for early."""
        layers, groups, at_once = [Layer(self, next(self.numbers)) for _ in range(2)], draw.choice([2, 4]), draw.random()
        if self.early:
            return
        self.machine.graph = graph = {}
        results = []
        ahead = layers[1].gather(groups)
        for layer, keys in zip(layers, (layers[0].gather(groups, at_once=True), ahead), strict=True):
            results.append([layer.forward(keys, False)])
        for layer, found in zip(layers[::-1], results[::-1], strict=True):
            dq, dk_dv = layer.backward(layer.gather(groups, at_once=True), at_once < 0.5)
            found += [dq, *dk_dv()]
        self.machine.graph = None
        self.graphs.append((graph, self.stream, layers, results))

    def replay(self, draw):
        mine = [made for made in self.graphs
                if made[1] is self.stream and not (self.early and made[2][0].plan is self.plan)]
        if mine:
            graph, stream, layers, results = draw.choice(mine)
            self.memory.enter()  # as comm.watched does
            for layer in layers:
                layer.write(next(self.numbers))
            stream.replay(graph, stream)
            for layer, found in zip(layers, results, strict=True):
                layer.check(found, 0)


@contextlib.contextmanager
def machine_of(size, seed):
    machine = Machine(size, seed)
    with (mock.patch.dict(sys.modules, cupy=machine.cupy()), mock.patch.object(peer.jit, "kernel", machine.kernel),
          mock.patch.object(peer, "_batch_mem_op", lambda: machine.mem_ops),
          mock.patch.dict(peer.SUM_KERNELS, float32="thd_sum"),
          mock.patch.object(peer, "_roomy", lambda num_bytes: num_bytes),  # so that windows often grow
          mock.patch.object(peer.PeerMemory, "_probe", lambda memory: None)):  # fmt: skip
        yield machine


def results(size, seed):
    """(checked, wrong) of one random program on one random order of steps."""
    with machine_of(size, seed) as machine:
        programs = []
        for rank in range(size):
            programs.append(Program(machine, rank))
            programs[-1].enqueue(random.Random(seed))
        machine.run()
        for program in programs:
            windows = [x for turns in program.memory._windows.values() for turn in turns for x in turn]
            for window in windows:
                flags = window.array(-window._header, (2, size, peer._FLAG_BYTES), np.uint8)[:, :, 0]
                assert flags.tolist() == [[0] * size, [1] * size]
    return sum(x.num_checked for x in programs), sum(x.num_wrong for x in programs)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_call_reads_the_rows_of_its_own(size):
    found = [results(size, seed) for seed in range(SEEDS)]
    assert sum(checked for checked, _ in found) > 10 * size * SEEDS
    assert [seed for seed, (_, wrong) in enumerate(found) if wrong] == []
