"""Launchers of a Mamba-2 mixer's texts: the next row of each, and what a forward left of the sequences of a pack."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from thdattn import jit
from thdattn.decode_tiles import MIXER_CHANNELS, MIXER_THREADS, MixerDecode
from thdattn.mixer_shape import Mamba2Weights, MixerShape
from thdattn.ops import launch
from thdattn.ops.launch import Array
from thdattn.plan import Plan


def mixer_decode(
    zxbcdt: Array, weights: Mamba2Weights, shape: MixerShape, rows: Array, states: Array, active: Array, work: Array
) -> Array:
    """One row more of every active text. See reference.mixer_decode."""
    num_texts, kernels = len(zxbcdt), MixerDecode(shape.dtype.name, shape.state_dim)
    out = launch.empty((num_texts, shape.d_inner), zxbcdt.dtype)
    jit.kernel(*kernels.thd_mixer_decode_conv(shape.conv_width))(
        (num_texts, -(-shape.channels // MIXER_CHANNELS)), 256,
        (zxbcdt, rows, weights.conv_weight, weights.conv_bias, active, work,
         *map(np.int32, (shape.columns, shape.d_inner, shape.channels))),
    )  # fmt: skip
    jit.kernel(*kernels.thd_mixer_decode)(
        (num_texts, shape.d_inner // kernels.rows), MIXER_THREADS,
        (zxbcdt, work, states, weights.A_log, weights.D, weights.dt_bias, active, out, *_heads(shape)),
    )  # fmt: skip
    return out


def mixer_fill(
    act: Any, zxbcdt: Array, segment_states: Array, weights: Mamba2Weights, plan: Plan, shape: MixerShape,
    into: tuple[Array, Array],
) -> None:
    """What is left of every sequence of a pack. See reference.mixer_fill."""
    rows, states = into
    num_rows, batch, kernels = len(zxbcdt), plan.batch, MixerDecode(shape.dtype.name, shape.state_dim)
    lengths = tuple(map(cupy.asarray, (batch.cu_seqlens, batch.cu_seqlens_padded)))
    jit.kernel(*kernels.thd_mixer_fill_rows)(
        (len(rows), -(-shape.reach * shape.channels // MIXER_CHANNELS)), 256,
        (zxbcdt, rows, *lengths, *map(np.int32, (num_rows, shape.columns, shape.d_inner, shape.channels, shape.reach))),
    )  # fmt: skip
    jit.kernel(*kernels.thd_mixer_fill)(
        (len(states), shape.d_inner // kernels.fill_rows), MIXER_THREADS,
        (zxbcdt, act.channels, segment_states, weights.A_log, weights.dt_bias, states, *lengths, np.int32(num_rows),
         np.int32(ssd_segment_rows), *_heads(shape)),
    )  # fmt: skip


ssd_segment_rows = 64


def _heads(shape: MixerShape) -> tuple[np.int32, np.int32, np.int32]:
    return np.int32(shape.num_heads), np.int32(shape.head_dim), np.int32(shape.num_groups)
