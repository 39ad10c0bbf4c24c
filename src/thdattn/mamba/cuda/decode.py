"""Launchers of a Mamba-2 mixer's decode: the next row of every sequence, and the states after the sequences of a pack.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array
from thdattn.jit import compiler
from thdattn.mamba.configs import DECODE_CHANNELS, DECODE_THREADS, MixerDecode
from thdattn.mamba.cuda.forward import mixer_size
from thdattn.mamba.cuda.norm import mixer_decode_norm
from thdattn.mamba.shape import Mamba2Weights, MixerShape
from thdattn.plan.plan import Plan


def mixer_decode(
    zxbcdt: Array, weights: Mamba2Weights, shape: MixerShape, rows: Array, states: Array, active: Array, work: Array
) -> Array:
    """Decode one row of every active sequence. See reference.mixer_decode."""
    num_texts, kernels = len(zxbcdt), MixerDecode(shape.dtype.name, shape.state_dim)
    size = mixer_size(num_texts, shape)
    out = launch.empty((num_texts, shape.d_inner), zxbcdt.dtype)
    kernel, results = (kernels.thd_mixer_decode_ungated, ()) if shape.norm else (kernels.thd_mixer_decode, (out,))
    compiler.kernel(*kernels.thd_mixer_decode_conv(shape.conv_width))(
        (-(-shape.channels // DECODE_CHANNELS), num_texts), 256,
        (zxbcdt, rows, weights.conv_weight, weights.conv_bias, active, work, size),
    )  # fmt: skip
    compiler.kernel(*kernel)(
        (shape.d_inner // kernels.rows, num_texts), DECODE_THREADS,
        (zxbcdt, work, states, weights.A_log, weights.D, weights.dt_bias, active, *results, size),
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
    size, kernels = mixer_size(len(zxbcdt), shape), MixerDecode(shape.dtype.name, shape.state_dim)
    lengths = plan.arrays.offsets[0]
    compiler.kernel(*kernels.thd_mixer_fill_rows)(
        (-(-shape.reach * shape.channels // DECODE_CHANNELS), len(rows)), 256,
        (zxbcdt, rows, *lengths, np.int32(shape.reach), size),
    )  # fmt: skip
    compiler.kernel(*kernels.thd_mixer_fill)(
        (shape.d_inner // kernels.fill_columns, len(states)), DECODE_THREADS,
        (act.channels, act.dt, act.sums, segment_states, states, *lengths, size),
    )  # fmt: skip
