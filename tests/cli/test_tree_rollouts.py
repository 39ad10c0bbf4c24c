"""The example on prefix trees takes the policy-gradient step that its rollouts define, one by one."""

from __future__ import annotations

import sys

import numpy as np
import tree_rollouts
from launch import run

import thdattn


def loss_of(rollouts, advantages, prompts, tokens, weights):
    """The loss of all rollouts with dense attention, without packs."""
    loss = 0.0
    for path, advantage in zip(rollouts, advantages, strict=True):
        x = weights["embedding"][tokens[path]] + weights["position"][: len(path)]
        q, k, v = np.split((x @ weights["qkv"]).reshape(len(path), -1, tree_rollouts.HEAD_DIM), 3, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * tree_rollouts.HEAD_DIM**-0.5
        scores = np.where(np.tri(len(path), dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=2, keepdims=True))
        out = np.einsum("hqk,khd->qhd", p / p.sum(axis=2, keepdims=True), v).reshape(len(path), -1)
        logits = out[:-1] @ weights["logits"]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        answered = ~prompts[path[1:]]
        loss -= advantage * log_p[np.arange(len(path) - 1), tokens[path[1:]]][answered].sum()
    return loss


def test_both_steps_agree_and_trees_have_fewer_rows_and_pairs():
    found = tree_rollouts.compare()
    assert found["loss error"] < 1e-12 and found["gradient error"] < 1e-12
    assert found["unrolled rows"] > 2 * found["rows"] and found["pairs"] > 2


def test_loss_and_gradients_of_trees_are_those_of_the_rollouts():
    rng = np.random.default_rng(3)
    lengths, parents = (9, 4, 0, 3, 5, 6, 2), (-1, 0, 0, 2, 2, -1, 5)
    trees = thdattn.PackedBatch.from_trees(lengths, parents)
    weights, tokens = tree_rollouts.init(rng), rng.integers(0, tree_rollouts.VOCABULARY, sum(lengths))
    rollouts, prompts = trees.paths(), np.repeat(np.array(parents) < 0, lengths)
    advantages, of_trees = rng.standard_normal(len(rollouts)), np.zeros(sum(lengths))
    for path, advantage in zip(rollouts, advantages, strict=True):
        of_trees[path] += np.where(prompts[path], 0, advantage)
    loss, grads = tree_rollouts.step(trees, tokens, of_trees, weights)
    np.testing.assert_allclose(loss, loss_of(rollouts, advantages, prompts, tokens, weights), rtol=1e-12)
    for name, grad in grads.items():
        direction = rng.standard_normal(grad.shape)
        near = [loss_of(rollouts, advantages, prompts, tokens, {**weights, name: weights[name] + step * direction})
                for step in (1e-5, -1e-5)]
        np.testing.assert_allclose((near[0] - near[1]) / 2e-5, (grad * direction).sum(), rtol=1e-6)


def test_the_program_says_what_it_saves():
    done = run([sys.executable, tree_rollouts.__file__], 120)
    assert done.returncode == 0, done.stderr
    assert "rows: 1137 in trees, 3327 unrolled, 2.9x fewer; visible pairs 2.4x fewer" in done.stdout
