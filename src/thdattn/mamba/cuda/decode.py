"""Launchers of a Mamba-2 mixer's decode: the next row of every sequence, and the states after the sequences of a pack.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array
from thdattn.jit import compiler
from thdattn.kernels.instances import instance
from thdattn.mamba.configs import (
    DECODE_CHANNELS,
    DECODE_ROWS,
    DECODE_THREADS,
    FILL_COLUMNS,
    thd_mixer_decode,
    thd_mixer_fill,
)
from thdattn.mamba.cuda.forward import mixer_size
from thdattn.mamba.cuda.norm import mixer_decode_norm
from thdattn.mamba.shape import Mamba2Weights, MixerShape
from thdattn.plan.plan import Plan


def mixer_decode(
    zxbcdt: Array, weights: Mamba2Weights, shape: MixerShape, rows: Array, states: Array, active: Array, work: Array
) -> Array:
    """Decode one row of every active sequence. See reference.mixer_decode."""
    num_texts, dtype, size = len(zxbcdt), shape.dtype.name, mixer_size(len(zxbcdt), shape)
    out = launch.empty((num_texts, shape.d_inner), zxbcdt.dtype)
    compiler.kernel(*instance("thd_mixer_decode_conv", dtype, shape.conv_width))(
        (-(-shape.channels // DECODE_CHANNELS), num_texts), 256,
        (zxbcdt, rows, weights.conv_weight, weights.conv_bias, active, work, size),
    )  # fmt: skip
    compiler.kernel(*thd_mixer_decode(dtype, shape.state_dim, gates=shape.norm is None))(
        (shape.d_inner // DECODE_ROWS, num_texts), DECODE_THREADS,
        (zxbcdt, work, states, weights.A_log, weights.D, weights.dt_bias, active, *([] if shape.norm else [out]), size),
    )  # fmt: skip
    if shape.norm:
        mixer_decode_norm(work, zxbcdt, weights.norm_weight, active, shape, out)
    return out


def mixer_fill(
    act: Any, zxbcdt: Array, segment_states: Array, weights: Mamba2Weights, plan: Plan, shape: MixerShape,
    into: tuple[Array, Array],
) -> None:
    """Write the last rows and the final state of every sequence of a pack. See reference.mixer_fill."""
    rows, states = into
    size, dtype = mixer_size(len(zxbcdt), shape), shape.dtype.name
    lengths = plan.arrays.offsets[0]
    compiler.kernel(*instance("thd_mixer_fill_rows", dtype))(
        (-(-shape.reach * shape.channels // DECODE_CHANNELS), len(rows)), 256,
        (zxbcdt, rows, *lengths, np.int32(shape.reach), size),
    )  # fmt: skip
    compiler.kernel(*thd_mixer_fill(dtype, shape.state_dim))(
        (shape.d_inner // FILL_COLUMNS, len(states)), DECODE_THREADS,
        (act.channels, act.dt, act.sums, segment_states, states, *lengths, size),
    )  # fmt: skip
