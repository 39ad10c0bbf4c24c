"""Floating-point operations of attention, as speeds are compared by."""

from __future__ import annotations

from typing import NamedTuple


class Flops(NamedTuple):
    """Floating-point operations of one attention layer, summed over all ranks; exact ints.

    Attributes:
        forward, backward: of one call each.
    """

    forward: int
    backward: int


def attention_flops(pairs: int, num_heads: int, head_dims: tuple[int, int]) -> Flops:
    """Of so many visible pairs; see CPAttention.flops."""
    multiply_adds = pairs * num_heads * sum(head_dims)
    return Flops(forward=2 * multiply_adds, backward=5 * multiply_adds)
