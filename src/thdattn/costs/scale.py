"""Simulate one pack on more and more ranks: which share of the speed of attention each method reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from thdattn.costs.model import H200, Cost, Rates, Shape, compared, ways
from thdattn.packing import PackedBatch
from thdattn.plan.mask import visible_pairs
from thdattn.plan.memory import attention_flops


class Scale(NamedTuple):
    """Predicted times of one layer on some number of ranks.

    Attributes:
        ranks: number of ranks.
        alone: seconds of the visible pairs alone, at the kernels' rates and evenly spread: what no method can beat.
        costs: the cost of each cp_comm_type and sharding that works. Of several numbers of neighbours, the fastest.
    """

    ranks: int
    alone: float
    costs: dict[tuple[str, str], Cost]

    def share(self, kind: tuple[str, str]) -> float:
        """Return the time of the visible pairs alone over that of a method; 0 where the method cannot work."""
        return self.alone / self.costs[kind].seconds.total if kind in self.costs else 0.0

    @property
    def best(self) -> tuple[str, str]:
        """cp_comm_type and sharding of the fastest method."""
        return min(self.costs, key=lambda kind: self.costs[kind].seconds.total)

    @property
    def overlapped(self) -> float:
        """Share of the fastest method if its exchanges, those between machines too, overlapped its kernels."""
        found = self.costs[self.best]
        work, exposed = found.compute.total, found.seconds.total - found.compute.total
        return self.alone / max(work, exposed)


def simulated(
    lengths: Sequence[int], ranks: Sequence[int], shape: Shape, rates: Rates = H200
) -> list[Scale]:
    """Predict the times of every method on several numbers of ranks.

    Ranks that exchange heads are on one machine.

    Args:
        lengths: tokens of every document of the pack.
        ranks: numbers of ranks, each a divisor or a multiple of shape.per_node.
        shape: the layer, and the ranks of a machine.
        rates: how fast a machine is, and what goes between machines.

    Raises:
        TypeError, ValueError: lengths, or a shape, that no method can work with.
    """
    return [_simulated(lengths, number, shape, rates) for number in ranks]


def _simulated(lengths: Sequence[int], ranks: int, shape: Shape, rates: Rates) -> Scale:
    per_node = min(shape.per_node or ranks, ranks)
    on_a_machine = [way for way in ways(ranks) if per_node % way.inner == 0]
    costs: dict[tuple[str, str], Cost] = {}
    for found in compared(lengths, ranks, replace(shape, per_node=per_node), rates, on_a_machine)[0]:
        costs.setdefault((found.way.cp_comm_type, found.way.sharding), found)  # the fastest comes first
    batch = PackedBatch.from_lengths(lengths)
    window = (shape.window[0], 0) if shape.causal else shape.window
    flops = attention_flops(visible_pairs(batch, batch, window), shape.num_heads, (shape.head_dim, shape.head_dim))
    return Scale(ranks, (flops.forward / rates.forward + flops.backward / rates.backward) / ranks, costs)


def kinds() -> list[tuple[str, str]]:
    """List the methods of a simulation, in the order of model.ways."""
    return list(dict.fromkeys((way.cp_comm_type, way.sharding) for way in ways(4)))
