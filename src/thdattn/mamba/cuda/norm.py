"""Launchers of a Mamba-2 mixer's RMSNorm: forward, backward and decode.

Arguments are those of thdattn.mamba.reference.gate. Grids depend on numbers of rows alone.
"""

from __future__ import annotations

import numpy as np

from thdattn.engines.cuda.launch import Array, Launch
from thdattn.jit import compiler
from thdattn.mamba.configs import NormTile
from thdattn.mamba.cuda.backward import Gradients, dstates_launch, made_of_gate, partials_of
from thdattn.mamba.cuda.forward import mixer_size, size_of
from thdattn.mamba.shape import CHUNK, Activations, Mamba2Weights, MixerShape
from thdattn.plan.plan import Plan


def mixer_norm(y: Array, zxbcdt: Array, weight: Array, plan: Plan, shape: MixerShape, out: Array) -> None:
    """Write out from y and z. See reference.mixer_norm."""
    run = plan.memoize(("norm", shape), lambda: _norm(plan, shape))
    run(y, zxbcdt, weight, out)


def _norm(plan: Plan, shape: MixerShape) -> Launch:
    tile, (groups, eps) = _tile(shape)
    fixed = plan.key_ranges, groups, eps, size_of(plan, shape)
    kernel = compiler.kernel(*tile.thd_mixer_norm(shape.dtype.name))
    return Launch(kernel, (-(-plan.local_rows // tile.rows), int(groups)), tile.threads, fixed)


def mixer_decode_norm(
    convolved: Array, zxbcdt: Array, weight: Array, active: Array, shape: MixerShape, out: Array
) -> None:
    """Write out of active sequences from y, the first columns of `convolved`, and z; write 0 for the others."""
    tile, (groups, eps) = _tile(shape)
    compiler.kernel(*tile.thd_mixer_decode_norm(shape.dtype.name))(
        (-(-len(zxbcdt) // tile.rows), int(groups)), tile.threads,
        (convolved, zxbcdt, weight, out, active, groups, eps, mixer_size(len(zxbcdt), shape)),
    )  # fmt: skip


def mixer_norm_states(
    dout: Array, zxbcdt: Array, made: tuple[Array, Activations], weights: Mamba2Weights, plan: Plan, shape: MixerShape,
    into: tuple[Array, Gradients],
) -> tuple[Array, Array, Array]:
    """Return dy, dstates and decays; write dz and the partial sums of dD and dnorm_weight.

    See reference.mixer_norm_states.
    """
    (y, act), (dzxbcdt, gradients) = made, into
    buffers = dy, *of_states = made_of_gate(plan, shape)
    norm, states = plan.memoize(("norm backward", shape), lambda: (_norm_bwd(plan, shape), dstates_launch(plan, shape)))
    norm(dout, zxbcdt, y, act.channels, weights.norm_weight, dy, dzxbcdt, gradients.of_norm,
         *partials_of(gradients, "D", shape))
    states(act.channels, dy, act.sums, plan.key_ranges, *of_states)
    return buffers


def _norm_bwd(plan: Plan, shape: MixerShape) -> Launch:
    tile, (groups, eps) = _tile(shape)
    kernel = compiler.kernel(*tile.thd_mixer_norm_bwd(shape.dtype.name))
    fixed = plan.key_ranges, groups, eps, size_of(plan, shape)
    return Launch(kernel, (-(-plan.local_rows // CHUNK), int(groups)), tile.threads, fixed)


def _tile(shape: MixerShape) -> tuple[NormTile, tuple[np.int32, np.float32]]:
    """Return the tile, and groups and eps as kernels take them."""
    norm = shape.norm
    assert norm is not None
    return NormTile(shape.d_inner // norm.groups, norm.after_gate), (np.int32(norm.groups), np.float32(norm.eps))
