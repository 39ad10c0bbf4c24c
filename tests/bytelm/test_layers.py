"""NumPy layers by hand. Backwards are compared with finite differences of the whole model, in test_model.py."""

from __future__ import annotations

import layers
import numpy as np
import pytest

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape)


def test_residual_norm_by_hand():
    total, y = layers.residual_norm_forward(np.array([[1.0, 5.0]]), np.array([[2.0, -1.0]]), np.array([1.0, 10.0]))
    assert total.tolist() == [[3, 4]]
    np.testing.assert_allclose(y, [[3 / 12.5**0.5, 40 / 12.5**0.5]], rtol=1e-6)  # root of (9 + 16) / 2


def rotation_of(positions, half):
    angles = np.asarray(positions)[:, None] * 100.0 ** -(np.arange(half) / half)
    return np.stack([np.cos(angles), np.sin(angles)])


def test_rope_turns_planes_of_q_and_k_and_leaves_v():
    heads, kv_heads, half = 2, 1, 3
    qkv, positions = normal(4, 4 * 2 * half), np.array([0, 1, 2, 9])
    parts = layers.rope_forward(qkv, rotation_of(positions, half), heads, kv_heads)
    turned = np.exp(1j * positions[:, None] * 100.0 ** -(np.arange(half) / half))[:, None]
    befores = np.split(qkv.reshape(4, 4, -1), [2, 3], axis=1)
    for x, before, turn in zip(parts, befores, (turned, turned, 1), strict=True):
        assert x.flags.c_contiguous
        np.testing.assert_allclose(
            x[..., :half] + 1j * x[..., half:], (before[..., :half] + 1j * before[..., half:]) * turn, atol=1e-12
        )


def test_swiglu_of_large_gates_does_not_overflow():
    gate_up = np.array([[1e4, -1e4, 2.0, 2.0]], np.float32)
    with np.errstate(all="raise"):
        assert layers.swiglu_forward(gate_up).tolist() == [[2e4, 0]]
        assert layers.swiglu_backward(np.ones((1, 2), np.float32), gate_up).tolist() == [[2, 0, 1e4, 0]]


def test_cross_entropy_by_hand():
    logits = np.log([[1.0, 2.0, 5.0, 1e30], [3.0, 1.0, 4.0, 1e30]])
    loss, dlogits = layers.cross_entropy(logits, np.array([2, -1], np.int32), vocabulary=3, num_targets=2)
    assert loss == pytest.approx(np.log(8 / 5) / 2)
    np.testing.assert_allclose(dlogits[0, :3], np.array([1 / 8, 2 / 8, 5 / 8 - 1]) / 2)
    assert not dlogits[0, 3] and not dlogits[1].any(), "columns beyond the vocabulary and rows without a target"


def test_cross_entropy_of_large_logits_does_not_overflow():
    with np.errstate(all="raise", under="ignore"):
        loss, dlogits = layers.cross_entropy(np.array([[1e4, 0.0]], np.float32), np.array([1], np.int32), 2, 1)
    assert loss == 1e4 and dlogits.tolist() == [[1, -1]]
