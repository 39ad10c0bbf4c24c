"""Rows of prefix trees in a Mamba-2 mixer, in NumPy: those that hold no token, and copies; see mamba/trees.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdattn.mamba.shape import Copies, MixerShape
from thdattn.spans import on_host

Array = NDArray[Any]


@on_host
def mixer_clear_dt(zxbcdt: Array, rows: Array, shape: MixerShape) -> None:
    """Set dt of some rows to softplus(-inf) = 0, so that they change no state."""
    shape.parts(zxbcdt)[2][rows] = -np.inf


@on_host
def mixer_add_copies(gradients: Array, copies: Copies, shape: MixerShape, dzxbcdt: Array) -> None:
    """Add to the gradients of x, B and C of some rows those of their copies, in the order of the copies.

    Args:
        gradients: dzxbcdt of the rows among which the copies are.
        dzxbcdt: of the rows that have copies; it changes.
    """
    of_rows, of_copies = shape.parts(dzxbcdt)[1], shape.parts(gradients)[1]
    for row, begin, end in zip(copies.rows, copies.begins, copies.begins[1:], strict=False):
        total = of_rows[row].astype(shape.sum_dtype)
        for place in copies.places[begin:end]:
            total += of_copies[place]
        of_rows[row] = total.astype(shape.dtype)
