"""Decode of a Mamba-2 mixer in NumPy: the next row of every sequence, and the states after the sequences of a pack.

A decoded sequence has the state after its last row, and as many last rows as the next convolution reads. Zeros stand
for rows in front of its first one. Arithmetic is float32 (float64 for float64). Only out is rounded, and the operands
that tensor cores take from a pack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thdattn.mamba.reference.gate import gated_norm
from thdattn.mamba.reference.ssd import rounded, silu, softplus
from thdattn.mamba.shape import CHUNK, Activations, Inputs, Mamba2Weights, MixerShape
from thdattn.spans import on_host

if TYPE_CHECKING:
    from thdattn.mamba.cache import Mamba2Cache

Array = NDArray[Any]


@on_host
def mixer_decode(zxbcdt: Array, weights: Mamba2Weights, shape: MixerShape, cache: Mamba2Cache) -> Array:
    """Decode one row of every active sequence, (num_texts, columns), whose rows and states in the cache change.

    cache.work gets x, B and C behind the convolution and silu.

    Returns:
        out: (num_texts, d_inner); 0 for sequences that are not active.
    """
    rows, states, active, work = cache.rows, cache.states, cache.active, cache.work
    out = np.zeros((len(zxbcdt), shape.d_inner), zxbcdt.dtype)
    z, xbc, raw = (part[active] for part in shape.parts(zxbcdt))
    seen = np.concatenate([rows[active], xbc[:, None]], axis=1)
    rows[active] = seen[:, 1:]
    convolved = (seen.astype(shape.sum_dtype) * weights.conv_weight.T).sum(axis=1) + weights.conv_bias
    work[active] = silu(convolved)

    x, b, c = shape.split(work[active])
    b, c = (np.repeat(part, shape.num_heads // shape.num_groups, axis=1) for part in (b, c))
    dt = softplus(raw.astype(shape.sum_dtype) + weights.dt_bias)
    kept = np.exp(-np.exp(weights.A_log) * dt)[:, :, None, None] * states[active]
    states[active] = kept + (dt[:, :, None] * x)[..., None] * b[:, :, None]
    y = (states[active] @ c[..., None])[..., 0] + weights.D[:, None] * x
    y, z = y.reshape(z.shape), z.astype(shape.sum_dtype)
    made = gated_norm(y, z, weights.norm_weight, shape.norm) if shape.norm else y * silu(z)
    out[active] = made.astype(out.dtype)
    return out


@on_host
def mixer_fill(inputs: Inputs, act: Activations, segment_states: Array, cache: Mamba2Cache) -> None:
    """Write the last rows and the final state of every sequence of a pack, on one rank; zeros for empty sequences.

    Args:
        act: from mixer_conv.
        segment_states: the states in front of the segments of rows, as the forward kept them. That of a sequence's last
            segment, and the rows of the sequence in that segment, make the state behind.
    """
    zxbcdt, weights, plan, shape, _ = inputs
    rows, states, xbc, batch = cache.rows, cache.states, shape.parts(zxbcdt)[1], plan.batch
    rows[...], states[...] = 0, 0
    for sequence, (begin, length) in enumerate(zip(batch.cu_seqlens_padded[:-1], batch.lengths, strict=True)):
        if length:
            count, end = min(shape.reach, length), begin + length
            rows[sequence, shape.reach - count :] = xbc[end - count : end]
            states[sequence] = _state_behind(act, segment_states, weights, shape, begin, end)


def _state_behind(
    act: Activations, segment_states: Array, weights: Mamba2Weights, shape: MixerShape, begin: int, end: int
) -> Array:
    """Return the state after the sequence with the rows begin, ..., end - 1."""
    segment = (end - 1) // CHUNK
    own = slice(max(begin, segment * CHUNK), end)
    x, b, _ = (part.astype(shape.sum_dtype) for part in shape.split(act.channels[own]))
    a = -np.exp(weights.A_log) * act.dt[own]
    behind = np.zeros(a.shape, a.dtype)  # sums of a over later rows
    behind[:-1] = a[:0:-1].cumsum(axis=0)[::-1]
    leave = (np.exp(behind) * act.dt[own]).T[:, None]
    b = np.repeat(b, shape.num_heads // shape.num_groups, axis=1)
    state: Array = rounded(leave * x.transpose(1, 2, 0), shape) @ b.transpose(1, 0, 2)
    if begin < own.start:
        state += np.exp(a[0] + behind[0])[:, None, None] * segment_states[segment]
    return state
