"""Gate of a Mamba-2 mixer, backward, and its RMSNorm after or before the gate, forward and backward, in NumPy.

Mamba2Mixer has the formulas. The scan wrote y in the dtype of the mixer. All later arithmetic is float32 (float64 for
float64), and results are rounded once.

Source: Mamba-2, arXiv:2405.21060, section 7; as RMSNormGated of mamba_ssm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdattn.mamba.reference.ssd import Gradients, cleared, in_chunks, mixer_dstates, silu, slope, valid_rows
from thdattn.mamba.shape import Activations, GatedNorm, Inputs
from thdattn.spans import on_host

Array = NDArray[Any]


def gated_norm(y: Array, z: Array, weight: Array, norm: GatedNorm) -> Array:
    """Normalise and gate rows of y, (rows, d_inner), by z of the same shape and dtype."""
    gate = silu(z)
    x = y * gate if norm.after_gate else y
    normal: Array = x * _inverse_root(x, norm) * weight
    return normal if norm.after_gate else normal * gate


@on_host
def mixer_norm(inputs: Inputs, y: Array, out: Array) -> None:
    """Write out, (local_rows, d_inner), of y from mixer_scan and z; 0 on padding."""
    zxbcdt, weights, plan, shape, _ = inputs
    assert shape.norm is not None
    valid = valid_rows(plan)
    y, z = (cleared(x, valid, shape) for x in (y, shape.parts(zxbcdt)[0]))
    out[...] = np.where(valid, gated_norm(y, z, weights.norm_weight, shape.norm), 0).astype(out.dtype)


@on_host
def mixer_gate_states(
    inputs: Inputs, act: Activations, y: Array, dout: Array, dzxbcdt: Array, gradients: Gradients
) -> tuple[Array, Array, Array]:
    """Compute the gradients of gate and norm, then mixer_dstates of the gradient of y; a GPU may fuse the two.

    Args:
        act: from mixer_conv.
        y: from mixer_scan.
        dout: (local_rows, d_inner), gradient of out.
        dzxbcdt: its first columns get the gradient of z.
        gradients: from mixer_gradients; they get the partial sums of dnorm_weight, and of dD from dy before rounding.

    Returns:
        dy: (local_rows, d_inner) in the dtype of the mixer, 0 on padding; then dstates and decays, see mixer_dstates.
    """
    zxbcdt, weights, plan, shape, _ = inputs
    valid = valid_rows(plan)
    y, z, dout = (cleared(x, valid, shape) for x in (y, shape.parts(zxbcdt)[0], dout))
    dy, dgate = dout * silu(z), dout * y
    if shape.norm:
        dy, dgate, gradients.of_norm[...] = _norm_gradients(y, silu(z), dout, weights.norm_weight, shape.norm)
    shape.parts(dzxbcdt)[0][...] = (dgate * slope(z)).astype(dzxbcdt.dtype)
    x = shape.split(act.channels)[0].astype(dy.dtype)
    gradients.partials[:, 1] = in_chunks((dy.reshape(x.shape) * x).sum(axis=2)).sum(axis=1)
    dy = dy.astype(shape.dtype)
    return dy, *mixer_dstates(act, dy, plan, shape)


def _norm_gradients(
    y: Array, gate: Array, dout: Array, weight: Array, norm: GatedNorm
) -> tuple[Array, Array, Array]:
    """Return the gradients of y and of the gate, and the partial sums of dnorm_weight by segment."""
    x, passed = (y * gate, dout) if norm.after_gate else (y, dout * gate)
    root = _inverse_root(x, norm)
    normal, dnormal = x * root, passed * weight
    dx = root * (dnormal - normal * _group_mean(dnormal * normal, norm))
    dy, dgate = (dx * gate, dx * y) if norm.after_gate else (dx, dout * normal * weight)
    return dy, dgate, in_chunks(passed * normal).sum(axis=1)


def _inverse_root(x: Array, norm: GatedNorm) -> Array:
    """Return 1 / sqrt(mean square + eps) of each number's group."""
    root: Array = 1 / np.sqrt(_group_mean(x * x, norm) + x.dtype.type(norm.eps))
    return root


def _group_mean(x: Array, norm: GatedNorm) -> Array:
    """Return the mean over each number's group of columns, in the shape of x."""
    groups = x.reshape(len(x), norm.groups, x.shape[1] // norm.groups)
    return np.repeat(groups.mean(axis=2), groups.shape[2], axis=1)
