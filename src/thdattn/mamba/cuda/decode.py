"""Launchers of a Mamba-2 mixer's decode: the next row of every sequence, and the states after the sequences of a pack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array
from thdattn.jit import compiler
from thdattn.kernels.instances import instance
from thdattn.mamba import configs
from thdattn.mamba.cuda.forward import mixer_size
from thdattn.mamba.cuda.norm import decode_norm
from thdattn.mamba.shape import Activations, Inputs, Mamba2Weights, MixerShape

if TYPE_CHECKING:
    from thdattn.mamba.cache import Mamba2Cache


def mixer_decode(zxbcdt: Array, weights: Mamba2Weights, shape: MixerShape, cache: Mamba2Cache) -> Array:
    """Decode one row of every active sequence. See reference.mixer_decode."""
    dtype, size = shape.dtype.name, mixer_size(len(zxbcdt), shape)
    out = launch.empty((len(zxbcdt), shape.d_inner), zxbcdt.dtype)
    compiler.kernel(*instance("thd_mixer_decode_conv", dtype, shape.conv_width))(
        (-(-shape.channels // configs.DECODE_CHANNELS), len(zxbcdt)), 256,
        (zxbcdt, cache.rows, weights.conv_weight, weights.conv_bias, cache.active, cache.work, size),
    )
    compiler.kernel(*configs.thd_mixer_decode(dtype, shape.state_dim, gates=shape.norm is None))(
        (shape.d_inner // configs.DECODE_ROWS, len(zxbcdt)), configs.DECODE_THREADS,
        (zxbcdt, cache.work, cache.states, weights.A_log, weights.D, weights.dt_bias, cache.active,
         *([] if shape.norm else [out]), size),
    )
    if shape.norm:
        decode_norm(cache.work, zxbcdt, weights.norm_weight, cache.active, shape, out)
    return out


def mixer_fill(inputs: Inputs, act: Activations, segment_states: Array, cache: Mamba2Cache) -> None:
    """Write the last rows and the final state of every sequence of a pack. See reference.mixer_fill."""
    zxbcdt, _, plan, shape, _ = inputs
    size, lengths = mixer_size(len(zxbcdt), shape), plan.arrays.offsets[0]
    compiler.kernel(*instance("thd_mixer_fill_rows", shape.dtype.name))(
        (-(-shape.reach * shape.channels // configs.DECODE_CHANNELS), len(cache.rows)), 256,
        (zxbcdt, cache.rows, *lengths, np.int32(shape.reach), size),
    )
    compiler.kernel(*configs.thd_mixer_fill(shape.dtype.name, shape.state_dim))(
        (shape.d_inner // configs.FILL_COLUMNS, len(cache.states)), configs.DECODE_THREADS,
        (act.channels, act.dt, act.sums, segment_states, cache.states, *lengths, size),
    )
