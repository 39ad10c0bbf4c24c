"""What is in front of the recurrence of a Mamba-2 mixer in NumPy: convolution and dt, forward and backward.

Row i is convolved with the rows i-d of its own sequence, those with first[i] <= i-d; the ones in front of a rank's rows
are its halo. Padding is cleared by selection, so that whatever it holds, NaN included, reaches nothing. Arithmetic is
float32 (float64 for float64), and results are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdattn.mamba.reference.ssd import (
    CHUNK,
    Activations,
    Gradients,
    chunk_sums,
    cleared,
    first_rows,
    sigmoid,
    silu,
    slope,
    softplus,
    ssd_states,
    valid_rows,
)  # fmt: skip
from thdattn.mamba.shape import Mamba2Weights, MixerShape
from thdattn.plan.memory import Bytes, num_bytes
from thdattn.plan.plan import Plan

Array = NDArray[Any]

SUM_ROWS = 64  # added up one after another


def mixer_tail(zxbcdt: Array, plan: Plan, shape: MixerShape) -> Array:
    """(reach, channels), the last rows of x, B and C, which the convolution of others may see; 0 where there are none.

    Padding among them is as it was.
    """
    tail = np.zeros((shape.reach, shape.channels), zxbcdt.dtype)
    count = min(shape.reach, plan.local_rows)
    tail[shape.reach - count :] = shape.parts(zxbcdt)[1][plan.local_rows - count :]
    return tail


def mixer_halo(tails: Array, plan: Plan, shape: MixerShape) -> Array:
    """(reach, channels), the rows in front of this rank's; anything in front of the pack, where no sequence is.

    Args:
        tails: (cp_size * reach, channels), mixer_tail of all ranks. Ranks with fewer rows than reach share a halo.
    """
    return tails[halo_rows(plan, shape)]


def halo_rows(plan: Plan, shape: MixerShape) -> Array:
    """(reach,), where in mixer_tail of all ranks the rows in front of this rank's are."""
    num_rows = plan.local_rows
    rows = plan.cp_rank * num_rows + np.arange(-shape.reach, 0)
    owner, row = np.divmod(rows, max(1, num_rows))
    return np.where(rows >= 0, shape.reach * (owner + 1) + row - num_rows, 0)


def mixer_conv(
    zxbcdt: Array, halo: Array, weights: Mamba2Weights, plan: Plan, shape: MixerShape, keep: bool = False
) -> Activations:
    """The convolution and silu of x, B and C; and dt = softplus(dt + dt_bias).

    Args:
        zxbcdt: (local_rows, columns).
        halo: (reach, channels), from mixer_halo; on one rank anything.
        keep: whether the next call is not to write to what it returns; here none does.
    """
    _, xbc, raw = shape.parts(zxbcdt)
    valid = valid_rows(plan)
    act = silu(_convolved(xbc, halo, weights, plan, shape))
    sharp = cleared(raw, valid, shape) + weights.dt_bias
    dt = np.where(valid, softplus(sharp), 0)
    return Activations(act.astype(shape.dtype), dt, chunk_sums(dt * -np.exp(weights.A_log), plan))


def mixer_conv_bytes(plan: Plan, shape: MixerShape) -> int:
    """Bytes of what mixer_conv makes."""
    of_heads = num_bytes((plan.local_rows, shape.num_heads), shape.sum_dtype)
    return num_bytes((plan.local_rows, shape.channels), shape.dtype) + 2 * of_heads


def mixer_forward_bytes(plan: Plan, shape: MixerShape) -> Bytes:
    """Bytes of the buffers of a plan that forwards of all mixers write to, by name; here none."""
    return {}


def mixer_backward_bytes(plan: Plan, shape: MixerShape) -> Bytes:
    """Those that backwards write to besides."""
    rows, chunks = plan.local_rows, -(-plan.local_rows // CHUNK)
    made = {"dchannels": num_bytes((rows, shape.channels), shape.dtype),
            "ddt": num_bytes((rows, shape.num_heads), shape.sum_dtype),
            "shares of dA and dD": num_bytes((chunks, 2, shape.num_heads), shape.sum_dtype)}  # fmt: skip
    of_norm = {"shares of dnorm_weight": num_bytes((chunks, shape.d_inner), shape.sum_dtype)} if shape.norm else {}
    return made | of_norm


def mixer_conv_states(
    zxbcdt: Array, halo: Array, weights: Mamba2Weights, plan: Plan, shape: MixerShape, keep: bool
) -> tuple[Activations, Array, Array]:
    """mixer_conv, then ssd_states of what it makes; here one after the other.

    Returns:
        act; then states and decays, see ssd_states.
    """
    act = mixer_conv(zxbcdt, halo, weights, plan, shape, keep)
    return act, *ssd_states(act, plan, shape)


def mixer_conv_bwd(
    zxbcdt: Array, halo: Array, weights: Mamba2Weights, gradients: Gradients, plan: Plan, shape: MixerShape,
    dzxbcdt: Array,
) -> tuple[Mamba2Weights, Array]:
    """Gradients of mixer_conv, into the columns of dzxbcdt behind z, and of all weights.

    Args:
        gradients: from ssd_bwd.

    Returns:
        dweights: float32 (float64), of this rank's rows.
        ends: (2, reach, channels), the same: the gradients of the halo, and of the last rows of x, B and C, as far as
            they come from this rank's rows.
    """
    dchannels, ddt, shares, of_norm = gradients
    _, xbc, raw = shape.parts(zxbcdt)
    _, dxbc, draw = shape.parts(dzxbcdt)
    valid, reach, num_rows = valid_rows(plan), shape.reach, len(zxbcdt)
    slopes = slope(_convolved(xbc, halo, weights, plan, shape))
    dpre = np.where(valid, dchannels.astype(slopes.dtype) * slopes, 0)
    extended = np.zeros((reach + num_rows, shape.channels), slopes.dtype)
    conv_weight = np.empty(weights.conv_weight.shape, slopes.dtype)
    for tap, there, rows in _taps(xbc, halo, plan, shape):
        extended[tap : tap + num_rows] += np.where(there, dpre * weights.conv_weight[:, tap], 0)
        conv_weight[:, tap] = _sum_of_rows(dpre * rows)
    dxbc[...] = extended[reach:].astype(dxbc.dtype)

    sharp = cleared(raw, valid, shape) + weights.dt_bias
    dsharp = np.where(valid, ddt * sigmoid(sharp), 0)
    draw[...] = dsharp.astype(draw.dtype)
    of_rates, of_d = _sum_of_rows(shares)
    dweights = Mamba2Weights(
        conv_weight, _sum_of_rows(dpre), -np.exp(weights.A_log) * of_rates, of_d, _sum_of_rows(dsharp),
        None if of_norm is None else _sum_of_rows(of_norm))
    tail = np.zeros((reach, shape.channels), slopes.dtype)
    count = min(reach, num_rows)
    tail[reach - count :] = extended[reach + num_rows - count :]
    return dweights, np.stack([extended[:reach], tail])


def mixer_add_halos(halos: Array, tail: Array, plan: Plan, shape: MixerShape, dzxbcdt: Array) -> None:
    """Adds what the rows of other ranks give to the gradients of the last rows of x, B and C, rounded once.

    Args:
        halos: (cp_size * reach, channels), gradients of the halos of all ranks: the first of mixer_conv_bwd's ends.
        tail: (reach, channels), the second one of this rank.
    """
    reach, num_rows = shape.reach, plan.local_rows
    total = tail.copy()
    for rank in range(plan.cp_rank + 1, plan.cp_size):
        between = (rank - plan.cp_rank - 1) * num_rows  # rows that lie between this rank's and those of the halo's
        if between < reach:
            total[between:] += halos[rank * reach : (rank + 1) * reach - between]
    count = min(reach, num_rows)
    shape.parts(dzxbcdt)[1][num_rows - count :] = total[reach - count :].astype(dzxbcdt.dtype)


def _taps(xbc: Array, halo: Array, plan: Plan, shape: MixerShape) -> Iterator[tuple[int, Array, Array]]:
    """Every column of conv_weight, which rows it meets something with, and what; 0 else."""
    first, rows = first_rows(plan)[:, None], np.arange(plan.local_rows)[:, None]
    extended = np.concatenate([halo, xbc]).astype(shape.sum_dtype)
    for tap in range(shape.conv_width):
        there = first <= rows - (shape.reach - tap)
        yield tap, there, np.where(there, extended[tap : tap + len(rows)], 0)


def _convolved(xbc: Array, halo: Array, weights: Mamba2Weights, plan: Plan, shape: MixerShape) -> Array:
    """The convolution of x, B and C; 0 on padding."""
    total = np.where(valid_rows(plan), weights.conv_bias, 0)
    for tap, _, rows in _taps(xbc, halo, plan, shape):
        total += weights.conv_weight[:, tap] * rows
    return total


def _sum_of_rows(x: Array) -> Array:
    """Of SUM_ROWS rows at a time, then of as many of these sums: rounding grows with the numbers added in a row."""
    while len(x) > 1:
        x = np.add.reduceat(x, np.arange(0, len(x), SUM_ROWS), axis=0)
    return x[0] if len(x) else np.zeros(x.shape[1:], x.dtype)
