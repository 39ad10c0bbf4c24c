"""AdamW against a restatement in float64, and its state."""

from __future__ import annotations

import numpy as np
import pytest
from model import Model
from optimizer import AdamW
from texts import HYBRID, LENGTHS, SMALL, Text

import thdattn


def new_model(config=SMALL):
    return Model(config, thdattn.comm.init("single"), engine="reference")


def gradients(model, steps, length):
    """Yield gradients of that length, some entries far larger than others."""
    rng = np.random.default_rng(3)
    for _ in range(steps):
        gradient = rng.standard_normal(model.weights.size) * 10.0 ** rng.integers(-6, 1, model.weights.size)
        yield (gradient * length / np.linalg.norm(gradient)).astype(np.float32)


def adamw(weights, gradients, decays, lr, max_norm):
    """Take steps with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), betas 0.9 and 0.95, in float64.
    """
    weights = weights.astype(np.float64)
    mean = square = np.zeros_like(weights)
    for t, gradient in enumerate(gradients, 1):
        gradient = gradient.astype(np.float64)
        gradient = gradient * min(1, max_norm / np.linalg.norm(gradient))
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        step = mean / (1 - 0.9**t) / (np.sqrt(square / (1 - 0.95**t)) + 1e-8)
        weights = weights - lr * step - lr * 0.1 * decays * weights
    return weights


@pytest.mark.parametrize("length", [0.5, 30.0], ids=["short", "clipped"])
def test_steps_are_those_of_adamw(length):
    model = new_model()
    optimizer = AdamW(model, weight_decay=0.1, max_norm=1.0)
    decays = np.arange(model.weights.size) < model.num_matrix_weights
    expected = adamw(model.weights, gradients(model, 5, length), decays, lr=0.01, max_norm=1.0)
    start = model.weights.copy()
    for gradient in gradients(model, 5, length):
        before = gradient.copy()
        assert float(optimizer.step(gradient, lr=0.01)) == pytest.approx(length, rel=1e-5)
        assert gradient.tobytes() == before.tobytes()
    np.testing.assert_allclose(model.weights - start, expected - start, rtol=1e-4, atol=1e-6)
    assert np.abs(expected - start).max() > 0.02
    assert model.copy.tobytes() == model.weights.tobytes(), "layers see the new weights"


@pytest.mark.parametrize(("config", "matrices"), [
    (SMALL, {"embedding", "head", "qkv", "out", "gate_up", "down"}),
    (HYBRID, {"embedding", "head", "zxbcdt", "conv_weight", "qkv", "out", "gate_up", "down"}),
], ids=["attention", "hybrid"])  # fmt: skip
def test_only_matrices_decay(config, matrices):
    model = new_model(config)
    model.weights[...] = 2
    AdamW(model, weight_decay=0.5).step(np.zeros_like(model.gradient), lr=0.1)
    for name, x in model.params.items():
        decays = name.rpartition(".")[2] in matrices
        np.testing.assert_allclose(x, 2 * (1 - 0.1 * 0.5) if decays else 2, rtol=1e-6, err_msg=name)


def test_state_continues_bitwise():
    model = new_model()
    optimizer, steps = AdamW(model), list(gradients(model, 4, 1.0))
    for gradient in steps[:2]:
        optimizer.step(gradient, lr=0.01)
    other = new_model()
    other.weights[...] = model.weights
    other.refresh()
    continued = AdamW(other)
    assert continued.state.keys() == optimizer.state.keys()
    for name, x in continued.state.items():
        x[...] = optimizer.state[name]
    for gradient in steps[2:]:
        assert optimizer.step(gradient, lr=0.01) == continued.step(gradient, lr=0.01)
    assert other.weights.tobytes() == model.weights.tobytes()


def test_weights_stay_the_same_on_every_rank_and_the_loss_falls():
    text = Text.random(LENGTHS)
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, 4)
    packed = [batch.pack(x) for x in (text.inputs, text.targets)]

    def program(comm):
        model = Model(SMALL, comm, engine="reference")
        optimizer, losses = AdamW(model), []
        plan = model.plan(batch)
        data = [plan.sharding.shard(x, comm.rank) for x in packed]
        for _ in range(30):
            model.gradient.fill(0)
            loss = model.loss_and_gradient(*data, plan, text.num_targets).reshape(1)
            comm.all_reduce(loss, "sum")
            losses.append(float(loss[0]))
            comm.all_reduce(model.gradient, "sum")
            optimizer.step(model.gradient, lr=0.01)
        return losses, model.weights.tobytes()

    (losses, weights), (_, others) = thdattn.comm.run_local(2, program)
    assert weights == others
    assert losses[-1] < 0.2 * losses[0]
