"""Layers on the CPU, each forward next to its backward; layers_cuda.py has the same functions for a GPU.

Arrays have one row per token. A backward takes the gradient of the forward's result and returns the gradient of its
input. It adds the gradient of a weight to the array passed for it. All functions work in float32, and in float64 for
tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

xp = np
DTYPE = np.dtype("float32")  # of activations, and of the weights as the layers read them
EPSILON = 1e-6  # added to RMSNorm's mean of squares

Array = Any


class AdamWStep(NamedTuple):
    """Numbers of one step, as 32-bit floats for a kernel.

    mean <- beta1 * mean + (1 - beta1) * gradient; square likewise with the gradient's square; then
    weights <- keep * weights - size * mean / (sqrt(square * square_scale) + epsilon).
    """

    beta1: float
    beta2: float
    size: float
    square_scale: float
    epsilon: float
    keep: float
    max_norm: float


def load() -> None:
    """Load the library of matrix products, so that a missing one is noticed at once; NumPy needs none."""


def linear_forward(x: Array, weight: Array, dtype: DTypeLike | None = None) -> Array:
    """Return x weight^T: x (rows, in), weight (out, in) -> (rows, out), in the dtype of x unless another is given."""
    return (x @ weight.T).astype(dtype or x.dtype, copy=False)


def linear_backward(dy: Array, x: Array, weight: Array, dweight: Array) -> Array:
    """Return dx (rows, in) from dy (rows, out), and add dy^T x to dweight (out, in)."""
    linear_backward_weight(dy, x, dweight)
    return linear_backward_input(dy, weight)


def linear_backward_input(dy: Array, weight: Array) -> Array:
    """Return dx (rows, in) from dy (rows, out), which the layers before need at once."""
    return dy @ weight


def linear_backward_weight(dy: Array, x: Array, dweight: Array) -> None:
    """Add dy^T x to dweight (out, in), which only the optimizer needs."""
    dweight += dy.T @ x


def residual_norm_forward(x: Array, branch: Array | None, weight: Array) -> tuple[Array, Array]:
    """Add the branch to the residual stream x, and normalise the sum (RMSNorm).

    Args:
        x: (rows, width); branch: the same, or None for nothing to add; weight: (width,).

    Returns:
        (sum, normalised): both (rows, width).
    """
    if branch is not None:
        x = x + branch
    return x, x * _inverse_rms(x) * weight


def residual_norm_backward(dy: Array, dsum: Array | None, x: Array, weight: Array, dweight: Array) -> Array:
    """Return the gradient of the sum, which is that of x and that of the branch.

    Args:
        dy: (rows, width), gradient of the normalised sum; dsum: gradient of the sum from elsewhere, or None.
        x: (rows, width), the sum that the forward returned.
    """
    scale = _inverse_rms(x)
    normal = x * scale
    dweight += (dy * normal).sum(axis=0)
    dnormal = dy * weight
    dx = scale * (dnormal - normal * (dnormal * normal).mean(axis=1, keepdims=True))
    return dx if dsum is None else dx + dsum


def _inverse_rms(x: Array) -> Array:
    return 1 / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + EPSILON)


def rope_forward(qkv: Array, rotation: Array, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
    """Split q, k, v out of one product, and rotate q and k by their positions (RoPE).

    Args:
        qkv: (rows, (heads + 2 * kv_heads) * head_dim), which may be columns of a wider array; column i of a head forms
            a plane with i + head_dim / 2. For q alone kv_heads is 0, for k and v alone heads is 0.
        rotation: (2, rows, head_dim / 2), cosines and sines.

    Returns:
        q (rows, heads, head_dim), k and v (rows, kv_heads, head_dim), contiguous.
    """
    head_dim = 2 * rotation.shape[2]
    q, k, v = np.split(qkv.reshape(len(qkv), heads + 2 * kv_heads, head_dim), [heads, heads + kv_heads], axis=1)
    cos, sin = rotation[:, :, None]
    return _turn(q, cos, sin), _turn(k, cos, sin), np.ascontiguousarray(v)


def rope_backward(dq: Array, dk: Array, dv: Array, rotation: Array) -> Array:
    """Return the gradient of qkv: rotate dq and dk back, and concatenate them with dv."""
    cos, sin = rotation[:, :, None]
    dqkv = np.concatenate([_turn(dq, cos, -sin), _turn(dk, cos, -sin), dv], axis=1)
    return dqkv.reshape(len(dqkv), dqkv.shape[1] * dqkv.shape[2])


def _turn(x: Array, cos: Array, sin: Array) -> Array:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def swiglu_forward(gate_up: Array) -> Array:
    """Return silu(gate) * up: (rows, 2 * hidden) -> (rows, hidden)."""
    gate, up = np.split(gate_up, 2, axis=1)
    return gate * _sigmoid(gate) * up


def swiglu_backward(dy: Array, gate_up: Array) -> Array:
    """Return the gradient of gate_up: dy (rows, hidden) -> (rows, 2 * hidden)."""
    gate, up = np.split(gate_up, 2, axis=1)
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    return np.concatenate([dy * up * (sigmoid + silu * (1 - sigmoid)), dy * silu], axis=1)


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # does not overflow, unlike exp


def embedding_forward(tokens: Array, table: Array) -> Array:
    """Return rows of the table: tokens (rows,) int32, table (vocabulary, width) -> (rows, width)."""
    return table[tokens]


def embedding_backward(dx: Array, tokens: Array, dtable: Array) -> None:
    """Add onehot(tokens)^T dx to dtable: a matrix product sums in a fixed order, and is fast for a small vocabulary."""
    dtable += (np.arange(len(dtable))[:, None] == tokens).astype(dx.dtype) @ dx


def cross_entropy(logits: Array, targets: Array, vocabulary: int, num_targets: Array) -> tuple[Array, Array]:
    """Compute the loss and the gradient of the logits, which both need the softmax.

    Args:
        logits: (rows, columns), of which the first `vocabulary` count.
        targets: (rows,) int32; rows with -1 do not count.
        num_targets: 0-d, the dtype of logits: targets of all ranks, the divisor of the sums. An array, so that a
            captured graph reads another number at every replay.

    Returns:
        (loss, dlogits): 0-d, nats; (rows, columns), exactly 0 where nothing counts.
    """
    counted = np.flatnonzero(targets >= 0)
    target = np.arange(len(counted)), targets[counted]
    x = logits[counted, :vocabulary]
    x = x - x.max(axis=1, keepdims=True)
    p = np.exp(x)
    total = p.sum(axis=1, keepdims=True)
    loss = (np.log(total[:, 0]) - x[target]).sum() / num_targets
    p /= total
    p[target] -= 1
    dlogits = np.zeros_like(logits)
    dlogits[counted, :vocabulary] = p / num_targets
    return np.asarray(loss, logits.dtype), dlogits


def l2_norm(x: Array) -> Array:
    """Return the root of the sum of squares of x (n,), 0-d."""
    return np.asarray(np.linalg.norm(x), x.dtype)


def adamw_update(
    weights: Array, copy: Array, gradient: Array, mean: Array, square: Array, norm: Array, step: AdamWStep
) -> None:
    """Update flat arrays (n,) in place by one step of AdamW; `copy` gets the new weights in its own dtype.

    norm: 0-d, of the whole gradient, which is scaled down to step.max_norm if it is longer.
    """
    gradient = gradient * min(1.0, step.max_norm / max(float(norm), step.epsilon))
    mean += (1 - step.beta1) * (gradient - mean)
    square += (1 - step.beta2) * (gradient * gradient - square)
    weights *= step.keep
    weights -= step.size * mean / (np.sqrt(square * step.square_scale) + step.epsilon)
    copy[...] = weights


# ------------------------------------------------------------------------------------------------ decode
# Forward of a layer for the next row of a few texts. Each function fuses a norm, a product and what follows it, as
# launches of kernels and loads of weights take most of the time.


def decode_qkv(
    x: Array, gain: Array, weight: Array, rotation: Array, positions: Array, heads: int, kv_heads: int
) -> tuple[Array, Array, Array]:
    """Return q, k, v of rope_forward for the normalised rows.

    Args:
        x: (rows, width), the residual stream; gain: (width,), of its norm; weight: as in linear_forward.
        rotation: (2, capacity, head_dim / 2), cosines and sines of all positions.
        positions: (rows,) int32; those beyond the last one count as the last.
    """
    here = rotation[:, np.minimum(positions, rotation.shape[1] - 1)]
    return rope_forward(decode_product(x, gain, weight), here, heads, kv_heads)


def decode_product(x: Array, gain: Array, weight: Array) -> Array:
    """Return the product of the normalised rows with weight (out, in)."""
    return linear_forward(residual_norm_forward(x, None, gain)[1], weight)


def decode_linear(x: Array, weight: Array, residual: Array, gain: Array | None = None) -> Array:
    """Return residual (rows, out) + x weight^T, of the normalised rows if there is a gain."""
    return residual + (linear_forward(x, weight) if gain is None else decode_product(x, gain, weight))


def decode_swiglu(x: Array, gain: Array, weight: Array) -> Array:
    """Return swiglu_forward of the product of the normalised rows with weight (2 * hidden, width)."""
    return swiglu_forward(decode_product(x, gain, weight))


def decode_logits(x: Array, gain: Array, weight: Array) -> Array:
    """Return decode_product, in float32 on a GPU."""
    return decode_product(x, gain, weight)


def draw(
    tokens: Array, written: Array, counts: Array, logits: Array, uniforms: Array, vocabulary: int, end: int,
    top_k: int, temperature: float,
) -> None:
    """Draw the next token of every text by the softmax of its logits, and append it.

    Probabilities are rounded to whole numbers, so that their sums do not depend on the order; those below 2**-23 of the
    largest count as 0.

    Args:
        tokens: (num_texts,) int32, the last tokens, which become the next ones; a text that has written `end` keeps
            writing it.
        written: (num_texts, capacity) int32, the tokens drawn so far; counts: (num_texts,) int32, how many.
        logits: (num_texts, columns), of which the first `vocabulary` count.
        uniforms: (num_texts, capacity) uint32, random bits of the draws.
        top_k: draw from the k likeliest tokens only; of equal ones the first.
        temperature: > 0, divides the logits.
    """
    texts, x = np.arange(len(tokens)), logits[:, :vocabulary]
    weights = np.rint(2.0**22 * np.exp((x - x.max(axis=1, keepdims=True)) / temperature)).astype(np.uint64)
    np.put_along_axis(weights, np.argsort(-x, axis=1, kind="stable")[:, top_k:], np.uint64(0), axis=1)
    sums = weights.cumsum(axis=1)
    target = uniforms[texts, counts].astype(np.uint64) * sums[:, -1] >> np.uint64(32)
    over = (counts > 0) & (tokens == end)
    tokens[...] = np.where(over, end, (sums <= target[:, None]).sum(axis=1))
    written[texts, counts] = tokens
    counts += 1
