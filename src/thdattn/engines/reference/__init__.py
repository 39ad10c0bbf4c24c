"""The NumPy engine: the CUDA engine's functions with the same arguments, so that every layer above runs on any laptop.

Like the kernels it obeys one rule: score (i, j) counts if and only if `key_begin[i] <= j < key_end[i]`. It knows
neither sequences nor ranks. No product reads a row outside all ranges, so padding, NaN included, reaches no result.

It computes float16, bfloat16 and float32 in float32, and float64 in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thdattn.engines.reference import arrays as arrays
from thdattn.engines.reference.arrays import (
    capture,
    empty,
    enter,
    free_bytes,
    from_user,
    in_place,
    plan_arrays,
    plan_buffers,
    tiles,
)
from thdattn.engines.reference.attention import (
    attn_bwd,
    attn_fwd,
    backward_buffers,
    forward_buffers,
    nan_if_invalid,
    plan_backward,
    rounded,
    sinks_grad,
)
from thdattn.engines.reference.decode import attn_decode, cache_append, cache_fill
from thdattn.engines.reference.rows import (
    add_partials,
    pack_rows,
    place_rows,
    to_rank_order,
    to_sequence_order,
    without_padding,
)

if TYPE_CHECKING:
    from thdattn.engines import Engine, reference

    _engine: Engine = reference  # a type checker compares this module with the protocol

name = "reference"
device = "cpu"
dtypes = ("float16", "bfloat16", "float32", "float64")
head_dims = None  # any
