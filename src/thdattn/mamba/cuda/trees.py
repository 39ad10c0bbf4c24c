"""Launchers for rows of prefix trees in the Mamba-2 mixer: those that hold no token, and copies.

Arguments are those of thdattn.mamba.reference.
"""

from __future__ import annotations

import numpy as np

from thdattn.engines.cuda.launch import Array
from thdattn.jit import compiler
from thdattn.kernels.instances import instance
from thdattn.mamba.configs import CONV_BACK_COLUMNS
from thdattn.mamba.shape import Copies, MixerShape


def mixer_clear_dt(zxbcdt: Array, rows: Array, shape: MixerShape) -> None:
    """Set dt of some rows, before softplus, to -inf; see reference.mixer_clear_dt."""
    ints = np.int32(shape.columns), np.int32(shape.num_heads)
    compiler.kernel(*instance("thd_mixer_clear_dt", shape.dtype.name))((len(rows),), 128, (zxbcdt, rows, *ints))


def mixer_add_copies(gradients: Array, copies: Copies, shape: MixerShape, dzxbcdt: Array) -> None:
    """Add the gradients of copies of rows to those of the rows; see reference.mixer_add_copies."""
    grid = len(copies.rows), -(-shape.channels // CONV_BACK_COLUMNS)
    ints = map(np.int32, (shape.columns, shape.d_inner, shape.channels))
    compiler.kernel(*instance("thd_mixer_add_copies", shape.dtype.name))(
        grid, 128, (gradients, dzxbcdt, *copies, *ints))
