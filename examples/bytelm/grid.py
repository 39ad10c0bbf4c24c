"""Grid of ranks: context parallelism within groups, data parallelism between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data import MicroBatch
from sizes import Config

import thdattn
from thdattn.comm.levels import Levels
from thdattn.methods import a2a


@dataclass(frozen=True)
class Grid:
    """Ranks in groups of one size. Each group has micro-batches of its own, whose rows its ranks share.

    world: all ranks. They sum gradients and losses, capture graphs together, and agree on when to stop.
    cp: the ranks of this rank's group, which communicate in the attention; two levels if the method needs them.
    """

    world: thdattn.comm.Comm
    cp: thdattn.comm.Comm

    @classmethod
    def of(cls, world: thdattn.comm.Comm, cp_size: int | None = None, inner: int | None = None) -> Grid:
        """Form groups of neighbouring ranks, on one machine if a group fits. Collective.

        Args:
            world: all ranks; closing it closes the groups.
            cp_size: ranks of a group; None: all ranks are one group.
            inner: neighbours of a group that exchange heads, the inner of two levels; None: one level.

        Raises:
            ValueError: on every rank, if the ranks cannot be split so, or differ in cp_size or inner.
        """
        cp_size = world.size if cp_size is None else cp_size
        world.agree("--cp", cp_size)
        if cp_size < 1 or world.size % cp_size:
            sizes = ", ".join(str(size) for size in range(1, world.size + 1) if world.size % size == 0)
            raise ValueError(
                f"--cp is {cp_size}, wanted a number that divides the {world.size} ranks; pass one of {sizes}, or "
                f"start another number of ranks"
            )
        cp = world if cp_size == world.size else world.split(world.rank // cp_size)
        return cls(world, cp if inner is None else _two_levels(cp, inner))

    @property
    def num_groups(self) -> int:
        """Groups, which is how many micro-batches run at the same time."""
        return self.world.size // self.cp.size

    @property
    def group(self) -> int:
        """Number of this rank's group."""
        return self.world.rank // self.cp.size

    @property
    def mine(self) -> slice:
        """Slice of a step's micro-batches that this group computes."""
        return slice(self.group, None, self.num_groups)

    def __str__(self) -> str:
        groups = f" in {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{self.world.size}{groups}"

    def dealt(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return this group's micro-batches, as many as every other group has.

        Raises:
            ValueError: their number is no multiple of the groups.
        """
        if len(batches) % self.num_groups:
            raise ValueError(
                f"batches holds {len(batches)} micro-batches, wanted a multiple of the {self.num_groups} groups of "
                f"ranks; pass as many to each group"
            )
        return batches[self.mine]

    def rounds(self, batches: Sequence[MicroBatch]) -> list[Sequence[MicroBatch]]:
        """Split the micro-batches of a step into rounds of one per group, which the groups compute at the same time.

        Raises:
            ValueError: their number is no multiple of the groups.
        """
        num_rounds, size = len(self.dealt(batches)), self.num_groups
        return [batches[number * size : (number + 1) * size] for number in range(num_rounds)]


def _two_levels(cp: thdattn.comm.Comm, inner: int) -> Levels:
    cp.agree("--cp-inner", inner)
    if inner < 1 or cp.size % inner:
        raise ValueError(f"--cp-inner is {inner}, wanted a number that divides the {cp.size} ranks of a group; pass "
                         f"such a one, or leave it out")
    return Levels(cp.split(cp.rank // inner), cp.split(cp.rank % inner))


def most_neighbours(cp_size: int, config: Config) -> int:
    """Return the most of cp_size ranks that can exchange the heads of a model, as the inner of two levels."""
    return max(
        n for n in range(1, cp_size + 1)
        if cp_size % n == 0 and (n == cp_size or config.kv_heads % n == 0)
        and not a2a.obstacle(config.heads, config.kv_heads, n)
    )
