"""What follows from lengths on a GPU is up to date wherever it is read, whichever graphs make it and which read it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import fake_cupy
import numpy as np
import pytest

from thdattn.plan.plan import NO_ARRAYS, Plan

LAYERS = 2, 3  # each by what it multiplies lengths with
CALLS = "eager", "eager other", "capture", "capture other", "capture for later", "replay"
PLANS = "refresh", "capture refresh", "replay refresh"


@pytest.fixture
def gpu(monkeypatch):
    """The module of a plan's arrays on a GPU whose only kernel is thd_plan_check."""
    pytest.importorskip("cupy")
    from thdattn.engines.cuda import launch, lengths

    cupy = fake_cupy.module()
    cupy.copyto = lambda to, x: fake_cupy.launch(lambda: np.copyto(to, x))
    monkeypatch.setattr(fake_cupy, "current", [fake_cupy.Stream()])
    monkeypatch.setattr(lengths, "cupy", cupy)
    monkeypatch.setattr(lengths, "compiler", SimpleNamespace(kernel=lambda name: _check))
    monkeypatch.setattr(lengths, "_pinned", lambda: np.zeros(512, np.uint64))
    monkeypatch.setattr(launch, "empty", lambda shape, dtype: fake_cupy.array(np.full(shape, -1), dtype))
    monkeypatch.setattr(launch, "in_place", lambda name, x: x)
    monkeypatch.setattr(launch, "capture", lambda: fake_cupy.current[0].capture)
    fake_cupy.log.clear()
    return lengths


def _check(grid, block, args):
    made, wrong, _, *offsets = args[:7]

    def run():
        made[:-1], wrong[:] = np.concatenate(offsets), 0

    fake_cupy.launch(run)


class Program:
    """A plan of lengths that change, made in a captured graph or not, with layers that read what they make of it.

    Attributes:
        plan: its DeviceLengths; kept: as calls see the plan.
        planned: the length that the plan was last made from.
    """

    def __init__(self, gpu, how):
        self.lengths, self.planned = np.zeros((2, 2), np.int32), 0
        offsets = {"rows": self.lengths, "columns": self.lengths.T}["columns" if "strided" in how else "rows"]
        pack = SimpleNamespace(cu_seqlens=offsets[0], cu_seqlens_padded=offsets[1], num_seqs=1, total_rows=9)
        self.readers, self.refreshes = [], []

        def plan():
            self.plan = gpu.DeviceLengths(SimpleNamespace(batch=pack, multiple=1), pack)
            self.kept = plan_of(self.plan)
            return [self.call(LAYERS[0])] if "called" in how else []

        self.planner = captured(plan) if "captured" in how else plan()
        if self.planner:
            self.replay_plan()

    def call(self, layer):
        """What a layer reads, when it is launched."""
        self.plan.follow()

        def make():
            made, lengths = fake_cupy.array([-1], np.int32), self.plan.checked
            self.kept.make(lambda: fake_cupy.launch(lambda: made.fill(layer * lengths.max())))
            return made

        made, read = self.kept.memoize(layer, make), fake_cupy.array([-1], np.int32)
        fake_cupy.launch(lambda: np.copyto(read, made))
        return layer, read

    def check(self, reads):
        for layer, read in reads:
            assert read == layer * self.planned

    def come(self):
        """Other lengths, which the plan is about to be made from."""
        self.planned += 1
        self.lengths[:, 1] = self.planned

    def replay_plan(self):
        self.come()
        graph, reads = self.planner
        graph.launch(None)
        self.check(reads)

    def do(self, step):
        other = step.endswith("other")
        if step.startswith("eager"):
            self.check([self.call(LAYERS[other])])
        elif step == "refresh":
            self.come()
            self.plan.make_again()
        elif step == "capture refresh":
            self.refreshes.append(captured(lambda: [self.plan.make_again(), self.call(LAYERS[0])][1:]))
            self.do("replay refresh")
        elif step.startswith("capture"):
            self.readers.append(captured(lambda: [self.call(LAYERS[other]) for _ in range(2)]))
            if step != "capture for later":
                self.do("replay")
        elif step == "replay refresh":
            for graph, reads in self.refreshes:
                self.come()
                graph.launch(None)
                self.check(reads)
        elif step == "replay plan":
            self.replay_plan()
        else:
            for graph, reads in reversed(self.readers):  # none finds what one before it made
                graph.launch(None)
                self.check(reads)


def plan_of(lengths):
    """A plan that has nothing but lengths on a GPU, or None."""
    engine = SimpleNamespace(capture=lambda: fake_cupy.current[0].capture, plan_backward=lambda plan: None)
    return Plan(None, 0, (-1, -1), (8, 8), (1, 1), replace(NO_ARRAYS, lengths=lengths), engine, None)


def captured(function):
    """The graph, and what the function returned."""
    stream = fake_cupy.current[0]
    stream.begin_capture()
    made = function()
    return stream.end_capture(), made


@pytest.mark.parametrize("how", ["captured", "captured, strided", "captured, called", "eager", "eager, strided"])
def test_every_call_finds_what_follows_from_the_last_lengths(gpu, how):
    """After any three steps, and then at all of them once more."""
    steps = [*CALLS, *PLANS, *["replay plan"] * ("captured" in how)]
    for sequence in itertools.product(steps, repeat=3):
        program, done = Program(gpu, how), []
        try:
            for step in (*sequence, *steps):
                done.append(step)
                program.do(step)
        except AssertionError:
            pytest.fail(f"stale at the end of {done}")


def recorded(function):
    """How many launches a capture of the function records."""
    return len(captured(function)[0].actions)


def test_a_graph_makes_what_another_one_made_once_and_nothing_that_is_always_made_with_the_plan(gpu):
    def calls(program):
        return recorded(lambda: [program.call(layer) for layer in LAYERS for _ in range(3)])

    def call_of(program):
        return recorded(lambda: program.call(LAYERS[0]))

    programs = [Program(gpu, how) for how in ("eager", "captured", "captured, called")]
    assert [call_of(program) for program in programs] == [1 + 1, 1 + 1, 1], "each for itself"
    assert [calls(program) for program in programs] == [6 + 2, 6 + 2, 6 + 1]
    for program, layer in itertools.product(programs, LAYERS):
        program.call(layer)
    assert [calls(program) for program in programs] == [6, 6 + 2, 6 + 1]
    assert [calls(program) for program in programs] == [6, 6 + 2, 6 + 1]
    assert [call_of(program) for program in programs] == [1, 1 + 2, 1 + 1]
    assert [recorded(program.plan.make_again) for program in programs] == [1 + 2] * 3
    assert recorded(lambda: [x := Program(gpu, "eager"), x.call(2), x.call(2)]) == 1 + 1 + 2
    program = Program(gpu, "eager")
    assert call_of(program) == 1 + 1 and recorded(program.plan.make_again) == 1
    assert recorded(lambda: [program.call(2), program.plan.make_again(), program.call(2)]) == 1 + 1 + 2 + 1
    refreshed = Program(gpu, "eager")
    assert recorded(lambda: [refreshed.plan.make_again(), *(refreshed.call(2) for _ in range(3))]) == 1 + 1 + 3


def test_what_a_graph_makes_of_lengths_on_the_host_is_not_taken_for_made_elsewhere(gpu):
    """A graph that is never replayed leaves nothing behind that an eager call or another graph would find unmade."""
    plan, made = plan_of(None), {}

    def call(*key):
        """What a kernel finds of something that a plan makes once, such as counters that are 0 between calls."""
        def make():
            zeros = fake_cupy.array([7], np.int32)
            plan.make(lambda: fake_cupy.launch(lambda: zeros.fill(0)))
            return zeros

        read, zeros = fake_cupy.array([-1], np.int32), plan.memoize(key, make)
        fake_cupy.launch(lambda: np.copyto(read, zeros))
        made.setdefault(key, []).append(zeros)
        return read

    first, _ = captured(lambda: call("x"))
    second, read = captured(lambda: [call("x"), call("x")])
    assert len(second.actions) == 1 + 2
    second.launch(None)
    assert read == [0, 0]
    assert call("x") == call("x") == 0
    third, late = captured(lambda: call("x"))
    assert len(third.actions) == 1, "what is there serves graphs too"
    third.launch(None)
    first.launch(None)
    assert late == 0 and len({id(x) for x in made["x",]}) == 3
