"""What was made for lengths on a GPU is refused when the plan has others: Saved, Keys, eager calls and replays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import fake_cupy
import numpy as np
import pytest

import thdattn
from thdattn import PackedBatch
from thdattn.graphs import StaticPack, Upload
from thdattn.plan.generations import Generation, renew

REFUSED = "was made for lengths that the plan no longer has, wanted those of its last refresh; use it before"
BATCH = PackedBatch([0, 8])


class Lengths:
    """Stands for lengths on a GPU."""

    made_in = None

    def __init__(self):
        renew(self)

    def follow(self):
        """Nothing is late."""

    def make_again(self):
        """Nothing follows from them."""

    def check(self, wait):
        """They are right."""


def planned(layer, batch=BATCH):
    """A plan of lengths that may change, or rather is said so."""
    plan = layer.plan(batch)
    return replace(plan, arrays=replace(plan.arrays, lengths=Lengths()))


def attention(comm):
    layer = thdattn.CPAttention(comm, 1, 8, dtype="float32", engine="reference")
    return layer, lambda plan: layer.forward(*[np.ones((plan.local_rows, 1, 8), np.float32)] * 3, plan)


def mixer(comm):
    layer = thdattn.Mamba2Mixer(comm, 2, 3, 4, dtype="float32", engine="reference")
    weights = thdattn.Mamba2Weights(*(np.ones(shape, np.float32) for shape in ((14, 4), (14,), (2,), (2,), (2,))))
    return layer, lambda plan: layer.forward(np.ones((plan.local_rows, 22), np.float32), weights, plan)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("kind", [attention, mixer])
def test_a_saved_of_before_a_refresh_is_refused(kind, cp_size):
    def program(comm):
        layer, forward = kind(comm)
        plan = planned(layer)
        out, early = forward(plan)
        layer.backward(out, early)
        plan.refresh()
        with pytest.raises(ValueError, match=f"saved {REFUSED} Plan.refresh and StaticPack.plans of another batch"):
            layer.backward(out, early)
        out, late = forward(plan)
        for saved in (early, replace(early, plan=plan)):
            with pytest.raises(ValueError, match=REFUSED):
                layer.backward(out, saved)
        layer.backward(out, late)

    thdattn.comm.run_local(cp_size, program)


def test_a_cache_is_not_filled_from_a_saved_of_before_a_refresh():
    layer, forward = mixer(thdattn.comm.init("single"))
    plan, cache = planned(layer), layer.cache(1)
    _, saved = forward(plan)
    cache.fill(saved)
    plan.refresh()
    with pytest.raises(ValueError, match=REFUSED):
        cache.fill(saved)


def test_keys_of_before_a_refresh_are_refused():
    def program(comm):
        layer, _ = attention(comm)
        plan, x = planned(layer), np.ones((4, 1, 8), np.float32)
        _, saved = layer.forward(x, x, x, plan, keys=layer.gather(x, x, plan))
        layer.backward(x, replace(saved, keys=None), keys=layer.gather(x, x, plan))
        keys = layer.gather(x, x, plan)
        plan.refresh()
        with pytest.raises(ValueError, match=f"keys {REFUSED}"):
            layer.forward(x, x, x, plan, keys=keys)

    thdattn.comm.run_local(2, program)


# --- static packs ------------------------------------------------------------------------------------------------


def test_a_static_pack_refuses_what_another_micro_batch_left_and_nothing_else(monkeypatch):
    def make_plans(pack, like):
        layer = pack._attentions[0]
        pack._plans, pack._loaded, pack._planned = (planned(layer, pack.padded(BATCH)),), np.zeros(2), np.zeros(1)
        pack._upload = Upload(2 * 2 * pack._slots, on_gpu=False)

    comm = thdattn.comm.init("single")
    monkeypatch.setattr(StaticPack, "_make_plans", make_plans)
    graphs, (layer, forward) = fake_cupy.graphs(monkeypatch, comm)(), attention(comm)
    pack = StaticPack(graphs, [layer], 16, num_batches=2)
    pack.load([BATCH, BATCH])
    out, saved = forward(*pack.plans(0))
    pack.plans(0)  # which every layer may ask for
    layer.backward(out, saved)
    pack.plans(1)
    with pytest.raises(ValueError, match=REFUSED):
        layer.backward(out, saved)
    pack.plans(0)
    layer.backward(out, saved)
    pack.load([BATCH, BATCH])
    layer.backward(out, saved)  # the plan is still that of before
    pack.plans(0)
    with pytest.raises(ValueError, match=REFUSED):
        layer.backward(out, saved)


# --- graphs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """What a forward hands on, as Saved."""

    x: Any
    generation: Generation


class Steps:
    """A loop of which each part is captured: the plan for a batch, a forward and a backward."""

    def __init__(self, graphs):
        self.lengths, self.batch = Lengths(), 0
        self.plan = graphs.captured(lambda: renew(self.lengths, lambda: self.batch), "plan")
        self.pair = graphs.pair(self._forward, self._backward, "layer")

    def refresh(self, batch):
        self.batch = batch
        self.plan()

    def forward(self):
        return self.pair.forward(self.x)[1]

    def backward(self, kept):
        self.pair.backward(self.x, kept)

    x = fake_cupy.array([1.0])

    def _forward(self, x):
        y = fake_cupy.add(x, x)
        return y, Kept(y, Generation(self.lengths, lambda: fake_cupy.current[0].capture))

    def _backward(self, dy, kept):
        kept.generation.check("saved")
        return fake_cupy.add(dy, kept.x)


@pytest.fixture
def steps(monkeypatch):
    with thdattn.comm.init("single") as comm:
        yield Steps(fake_cupy.graphs(monkeypatch, comm)(warmup_steps=1))


@pytest.mark.parametrize("done", range(4))
def test_replays_of_another_micro_batch_between_forward_and_backward_are_refused(steps, done):
    """However many steps were right: eager ones, that of the capture, and replays."""
    for batch in range(done):
        steps.refresh(batch)
        steps.backward(steps.forward())
    steps.refresh(10)
    kept = steps.forward()
    steps.refresh(11)
    with pytest.raises(ValueError, match=f"saved {REFUSED}"):
        steps.backward(kept)
    steps.refresh(12)
    steps.backward(steps.forward())


def test_what_an_eager_forward_left_is_refused_by_a_captured_backward_of_another_batch(steps):
    for batch in range(4):
        steps.refresh(batch)
        steps.backward(steps.pair.forward.eager(steps.x)[1])
    steps.refresh(4)
    kept = steps.pair.forward.eager(steps.x)[1]
    steps.refresh(5)
    with pytest.raises(ValueError, match=rf"layer, backward: argument 1 {REFUSED}"):
        steps.backward(kept)


def test_graphs_of_others_are_checked_while_they_are_captured_alone(steps):
    """Nobody says when they are replayed."""
    stream = fake_cupy.current[0]
    steps.refresh(0)
    stream.begin_capture()
    kept = steps._forward(steps.x)[1]
    steps._backward(steps.x, kept)
    renew(steps.lengths)
    with pytest.raises(ValueError, match=REFUSED):
        steps._backward(steps.x, kept)
    stream.end_capture()
    steps._backward(steps.x, kept)
    kept = steps._forward(steps.x)[1]  # eagerly
    renew(steps.lengths)
    stream.begin_capture()
    with pytest.raises(ValueError, match=REFUSED):
        steps._backward(steps.x, kept)
    stream.end_capture()
