"""Floating-point operations of attention, by the convention that makes speeds comparable."""

from __future__ import annotations

from typing import NamedTuple


class Flops(NamedTuple):
    """Floating-point operations of one attention layer, summed over all ranks; exact ints.

    Attributes:
        forward: operations of one forward.
        backward: operations of one backward.
    """

    forward: int
    backward: int


def attention_flops(pairs: int, num_heads: int, head_dims: tuple[int, int]) -> Flops:
    """Return the operations of attention over `pairs` visible pairs; see CPAttention.flops."""
    multiply_adds = pairs * num_heads * sum(head_dims)
    return Flops(forward=2 * multiply_adds, backward=5 * multiply_adds)
