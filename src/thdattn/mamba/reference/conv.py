"""Convolution and dt of a Mamba-2 mixer in NumPy, forward and backward: everything in front of the recurrence.

Row i is convolved with the rows i-d of its own sequence, those with first[i] <= i-d. The rows in front of a rank's own
are its halo. Padding is cleared by selection, so that its contents, NaN included, reach no result. Arithmetic is
float32 (float64 for float64), and results are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdattn.mamba.reference import ssd
from thdattn.mamba.shape import Activations, Inputs, Mamba2Weights, MixerShape
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import Buffer
from thdattn.spans import on_host

Array = NDArray[Any]

SUM_ROWS = 64  # rows that are summed one after another


@on_host
def mixer_conv(inputs: Inputs, keep: bool = False) -> Activations:
    """Convolve x, B and C and apply silu; compute dt = softplus(dt + dt_bias).

    Args:
        keep: True asks for results that the next call does not overwrite; NumPy's are always new.
    """
    zxbcdt, weights, plan, shape, _ = inputs
    raw, valid = shape.parts(zxbcdt)[2], ssd.valid_rows(plan)
    act = ssd.silu(_convolved(inputs))
    sharp = ssd.cleared(raw, valid, shape) + weights.dt_bias
    dt = np.where(valid, ssd.softplus(sharp), 0)
    return Activations(act.astype(shape.dtype), dt, ssd.chunk_sums(dt * -np.exp(weights.A_log), plan))


def mixer_activations(plan: Plan, shape: MixerShape) -> list[Buffer]:
    """Declare the results of mixer_conv."""
    of_heads = plan.local_rows, shape.num_heads
    return [Buffer("activations", (plan.local_rows, shape.channels), shape.dtype),
            Buffer("activations", of_heads, shape.sum_dtype, "dt"), Buffer("activations", of_heads, shape.sum_dtype)]


def mixer_forward_buffers(plan: Plan, shape: MixerShape) -> list[Buffer]:
    """Declare the buffers of a plan that the forwards of all mixers share; NumPy has none."""
    return []


@on_host
def mixer_conv_states(inputs: Inputs, keep: bool) -> tuple[Activations, Array, Array]:
    """Run mixer_conv, then mixer_states on its results; a GPU may fuse the two.

    Returns:
        act; then states and decays, see mixer_states.
    """
    act = mixer_conv(inputs, keep)
    return act, *ssd.mixer_states(act, inputs.plan, inputs.shape)


@on_host
def mixer_conv_bwd(inputs: Inputs, gradients: ssd.Gradients, dzxbcdt: Array) -> tuple[Mamba2Weights, Array]:
    """Compute the gradients of mixer_conv, into the columns of dzxbcdt after z, and of all weights.

    Returns:
        dweights: float32 (float64), partial sums over this rank's rows.
        ends: (2, reach, channels) in the same dtype: gradients of the first and of the last rows of x, B and C, the
            halo included. Those from other ranks' rows are missing.
    """
    (zxbcdt, weights, plan, shape, _), (dchannels, ddt, partials, of_norm) = inputs, gradients
    _, dxbc, draw = shape.parts(dzxbcdt)
    valid, reach, num_rows = ssd.valid_rows(plan), shape.reach, len(zxbcdt)
    slopes = ssd.slope(_convolved(inputs))
    dpre = np.where(valid, dchannels.astype(slopes.dtype) * slopes, 0)
    extended = np.zeros((reach + num_rows, shape.channels), slopes.dtype)
    conv_weight = np.empty(weights.conv_weight.shape, slopes.dtype)
    for tap, there, place, rows in _taps(inputs):
        extended[place] += np.where(there, dpre * weights.conv_weight[:, tap], 0)
        conv_weight[:, tap] = _sum_of_rows(dpre * rows)
    dxbc[...] = extended[reach:].astype(dxbc.dtype)

    sharp = ssd.cleared(shape.parts(zxbcdt)[2], valid, shape) + weights.dt_bias
    dsharp = np.where(valid, ddt * ssd.sigmoid(sharp), 0)
    draw[...] = dsharp.astype(draw.dtype)
    of_rates, of_d = _sum_of_rows(partials)
    dweights = Mamba2Weights(
        conv_weight, _sum_of_rows(dpre), -np.exp(weights.A_log) * of_rates, of_d, _sum_of_rows(dsharp),
        None if of_norm is None else _sum_of_rows(of_norm))
    return dweights, np.stack([extended[:reach], extended[num_rows:]])


@on_host
def mixer_add_halos(halos: Array, tail: Array, plan: Plan, shape: MixerShape, dzxbcdt: Array) -> None:
    """Add the gradients from other ranks to those of the last rows of x, B and C, rounded once.

    Args:
        halos: (cp_size * reach, channels), gradients of the halos of all ranks: the first of mixer_conv_bwd's ends.
        tail: (reach, channels), the second one of this rank.
    """
    reach, num_rows = shape.reach, plan.local_rows
    total = tail.copy()
    for rank in range(plan.cp_rank + 1, plan.cp_size):
        between = (rank - plan.cp_rank - 1) * num_rows  # rows between this rank's last one and the halo's rank
        if between < reach:
            total[between:] += halos[rank * reach : (rank + 1) * reach - between]
    count = min(reach, num_rows)
    shape.parts(dzxbcdt)[1][num_rows - count :] = total[reach - count :].astype(dzxbcdt.dtype)


def _taps(inputs: Inputs) -> Iterator[tuple[int, Array, slice, Array]]:
    """Yield every column of conv_weight and, for all rows, the row of the sequence that it multiplies.

    Yields:
        tap: the column.
        there: (local_rows, 1) bool, False where the sequence has no such row.
        place: its places behind the halo.
        rows: (local_rows, channels), its numbers; 0 where there is none.
    """
    zxbcdt, _, plan, shape, halo = inputs
    first, rows = ssd.first_rows(plan)[:, None], np.arange(plan.local_rows)[:, None]
    extended = np.concatenate([halo, shape.parts(zxbcdt)[1]]).astype(shape.sum_dtype)
    for tap in range(shape.conv_width):
        place = slice(tap, tap + len(rows))
        there = first <= rows - shape.reach + tap
        yield tap, there, place, np.where(there, extended[place], 0)


def _convolved(inputs: Inputs) -> Array:
    """Return the convolution of x, B and C; 0 on padding."""
    weights = inputs.weights
    total = np.where(ssd.valid_rows(inputs.plan), weights.conv_bias, 0)
    for tap, _, _, rows in _taps(inputs):
        total += weights.conv_weight[:, tap] * rows
    return total


def _sum_of_rows(x: Array) -> Array:
    """Sum SUM_ROWS rows at a time, then the sums likewise, as rounding errors grow with the length of a sum."""
    while len(x) > 1:
        x = np.add.reduceat(x, np.arange(0, len(x), SUM_ROWS), axis=0)
    return x[0] if len(x) else np.zeros(x.shape[1:], x.dtype)
