"""Launchers of a Mamba-2 mixer's RMSNorm. Grids depend on numbers of rows alone."""

from __future__ import annotations

import numpy as np

from thdattn.engines.cuda.launch import Array, Launch
from thdattn.jit import compiler
from thdattn.mamba.configs import NormTile
from thdattn.mamba.cuda.forward import chunks_of, memoized, mixer_size, size_of
from thdattn.mamba.shape import Inputs, MixerShape
from thdattn.plan.plan import Plan


def mixer_norm(inputs: Inputs, y: Array, out: Array) -> None:
    """Write out from y and z. See reference.mixer_norm."""
    _norm(inputs.plan, inputs.shape)(y, inputs.zxbcdt, inputs.weights.norm_weight, out)


@memoized
def _norm(plan: Plan, shape: MixerShape) -> Launch:
    tile, (groups, eps) = _tile(shape)
    kernel = compiler.kernel(*tile.thd_mixer_norm(shape.dtype.name))
    fixed = plan.key_ranges, groups, eps, size_of(plan, shape)
    return Launch(kernel, (-(-plan.local_rows // tile.rows), int(groups)), tile.threads, fixed)


def decode_norm(convolved: Array, zxbcdt: Array, weight: Array, active: Array, shape: MixerShape, out: Array) -> None:
    """Write out of active sequences from y, the first columns of `convolved`, and z; write 0 for the others."""
    tile, (groups, eps) = _tile(shape)
    compiler.kernel(*tile.thd_mixer_decode_norm(shape.dtype.name))(
        (-(-len(zxbcdt) // tile.rows), int(groups)), tile.threads,
        (convolved, zxbcdt, weight, out, active, groups, eps, mixer_size(len(zxbcdt), shape)),
    )


def norm_bwd(plan: Plan, shape: MixerShape) -> Launch:
    """Return the launch of the norm's gradients."""
    tile, (groups, eps) = _tile(shape)
    kernel = compiler.kernel(*tile.thd_mixer_norm_bwd(shape.dtype.name))
    return Launch(kernel, (chunks_of(plan), int(groups)), tile.threads,
                  (plan.key_ranges, groups, eps, size_of(plan, shape)))


def _tile(shape: MixerShape) -> tuple[NormTile, tuple[np.int32, np.float32]]:
    """Return the tile, and groups and eps as kernels take them."""
    norm = shape.norm
    assert norm is not None
    return NormTile(shape.d_inner // norm.groups, norm.after_gate), (np.int32(norm.groups), np.float32(norm.eps))
