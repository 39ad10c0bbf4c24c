"""AdamW against a restatement in float64, and its state."""

from __future__ import annotations

import numpy as np
import pytest
from model import Model
from optimizer import AdamW
from texts import HYBRID, SMALL

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
