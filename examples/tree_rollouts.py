"""Take a policy-gradient step on prefix trees, and compare it with the same step on the unrolled rollouts.

    python examples/tree_rollouts.py

A policy answers two prompts. One prompt has four answers; the other has turns that branch twice. Every rollout, which
is a path from a root to a leaf, has an advantage. The loss is the sum over all rollouts and their answers' tokens of
-advantage * log p(token | what precedes it). A tree computes every shared token once: its weight in the loss is the sum
of the advantages of all rollouts through it. The model is one attention layer with positions, in float64, so that loss
and gradients of both steps agree to rounding.
"""

from __future__ import annotations

import numpy as np

import thdattn

VOCABULARY, WIDTH, HEADS, HEAD_DIM, MOST_TOKENS = 50, 32, 4, 8, 1024
# Tokens and parent of every node, depth first: a prompt with four answers, and a prompt whose turns branch twice.
LENGTHS = (400, 60, 45, 80, 52, 300, 40, 30, 25, 50, 35, 20)
PARENTS = (-1, 0, 0, 0, 0, -1, 5, 6, 6, 5, 9, 9)

Weights = dict[str, np.ndarray]


def init(rng: np.random.Generator) -> Weights:
    """Return the weights of the model."""
    shapes = {"embedding": (VOCABULARY, WIDTH), "position": (MOST_TOKENS, WIDTH),
              "qkv": (WIDTH, 3 * HEADS * HEAD_DIM), "logits": (HEADS * HEAD_DIM, VOCABULARY)}
    return {name: rng.standard_normal(shape) / np.sqrt(WIDTH) for name, shape in shapes.items()}


def step(batch: thdattn.PackedBatch, tokens: np.ndarray, token_weights: np.ndarray, weights: Weights
         ) -> tuple[float, Weights]:
    """Return the loss, the sum of -token_weights * log p(token), and its gradients.

    Args:
        batch: trees or sequences, without padding.
        tokens, token_weights: (total_rows,), a token and its weight in the loss.
    """
    comm = thdattn.comm.init("single")
    attn = thdattn.CPAttention(comm, HEADS, HEAD_DIM, dtype="float64", engine="reference")
    plan = attn.plan(batch)
    x = weights["embedding"][tokens] + weights["position"][plan.positions]
    q, k, v = np.split((x @ weights["qkv"]).reshape(-1, 3 * HEADS, HEAD_DIM), 3, axis=1)
    out, saved = attn.forward(q, k, v, plan)

    # The token one earlier on the path predicts a token. A token at a fork predicts the first one of every child.
    before = plan.shift(plan.rows, -1)
    answers = np.flatnonzero((before >= 0) & (token_weights != 0))
    features = out.reshape(len(out), -1)[before[answers]]
    logits = features @ weights["logits"]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    chosen = np.arange(len(answers)), tokens[answers]
    loss = -(token_weights[answers] * np.log(p[chosen])).sum()

    p[chosen] -= 1
    dlogits = p * token_weights[answers, None]
    dout = np.zeros((len(out), HEADS * HEAD_DIM))
    np.add.at(dout, before[answers], dlogits @ weights["logits"].T)  # a fork sums what its children need
    dqkv = np.concatenate(attn.backward(dout.reshape(out.shape), saved), axis=1).reshape(len(out), -1)
    dx = dqkv @ weights["qkv"].T
    grads = {name: np.zeros_like(weight) for name, weight in weights.items()}
    np.add.at(grads["embedding"], tokens, dx)
    np.add.at(grads["position"], plan.positions, dx)
    grads["qkv"], grads["logits"] = x.T @ dqkv, features.T @ dlogits
    return float(loss), grads


def compare() -> dict[str, float]:
    """Take both steps and return their rows, their visible pairs, and how far their results differ."""
    rng = np.random.default_rng(0)
    weights, tokens = init(rng), rng.integers(0, VOCABULARY, sum(LENGTHS))
    trees = thdattn.PackedBatch.from_trees(LENGTHS, PARENTS)
    prompts = np.repeat(np.array(PARENTS) < 0, LENGTHS)
    rollouts = trees.paths()
    advantages = rng.standard_normal(len(rollouts))
    of_trees = np.zeros(len(tokens))
    for path, advantage in zip(rollouts, advantages, strict=True):
        of_trees[path] += advantage
    of_trees[prompts] = 0
    unrolled = thdattn.PackedBatch.from_lengths([len(path) for path in rollouts])
    rows = np.concatenate(rollouts)
    of_rollouts = np.where(prompts[rows], 0, np.repeat(advantages, unrolled.lengths))

    loss, grads = step(trees, tokens, of_trees, weights)
    wanted, wanted_grads = step(unrolled, tokens[rows], of_rollouts, weights)
    single = thdattn.CPAttention(thdattn.comm.init("single"), HEADS, HEAD_DIM, dtype="float64", engine="reference")
    return {
        "rows": trees.total_rows, "unrolled rows": unrolled.total_rows,
        "pairs": single.flops(unrolled).forward / single.flops(trees).forward, "loss": loss,
        "loss error": abs(loss - wanted) / abs(wanted),
        "gradient error": max(float(np.abs(grads[name] - grad).max() / np.abs(grad).max())
                              for name, grad in wanted_grads.items()),
    }


if __name__ == "__main__":
    found = compare()
    print(f"rows: {found['rows']} in trees, {found['unrolled rows']} unrolled, "
          f"{found['unrolled rows'] / found['rows']:.1f}x fewer; visible pairs {found['pairs']:.1f}x fewer")
    print(f"loss {found['loss']:.4f}; relative difference to the unrolled step: loss {found['loss error']:.0e}, "
          f"gradients at most {found['gradient error']:.0e}")
