"""Select the context-parallel method, and reject ranks, heads and shardings that it does not support."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from thdattn.arguments import as_choice
from thdattn.comm import Comm, SingleComm
from thdattn.comm.levels import Levels
from thdattn.methods import a2a, all_gather, group_cast, local, p2p
from thdattn.methods.base import Method
from thdattn.packing import PackedBatch
from thdattn.plan.mask import most_in_sight
from thdattn.plan.memory import Layer, Memory, attention_flops
from thdattn.plan.plan import Plan
from thdattn.sharding import Sharding, as_sharding

# Bytes of keys and values that a rank receives from which the overlap of groups of heads gains more than it costs; and
# the number of groups in which heads are exchanged, by these bytes.
WORTH_GROUPS = 2**26
HEAD_GROUPS = {2: WORTH_GROUPS, 4: 2**28}

# Where NCCL gathers, all measured on two H200. Groups save time where the exchange takes at least about 6 % of the
# attention, so where the forward has at most so many operations for each byte that a rank receives. Each group must
# bring so many bytes, as it costs launches and idle multiprocessors at its end.
MOST_OPERATIONS = 40_000
LEAST_BYTES = 2**26
NETWORK = 16  # times as long as within a machine takes what goes from machine to machine, about

# The default sharding of each cp_comm_type.
SHARDINGS = {"all_gather": "dual_chunk", "p2p": "dual_chunk", "a2a": "contiguous", "a2a+all_gather": "dual_chunk",
             "a2a+p2p": "dual_chunk"}


@dataclass(frozen=True, eq=False)
class MethodSelection:
    """Select the method of an attention for each of its plans.

    cp_comm_type: as CPAttention has it.
    levels: ranks that exchange heads, and ranks that have the rows of this rank's heads; None: heads are not exchanged.
    """

    cp_comm_type: str
    comm: Comm
    levels: a2a.Ranks | None

    @classmethod
    def of(cls, comm: Comm | tuple[Comm, Comm], cp_comm_type: str) -> MethodSelection:
        """Select by the arguments of CPAttention.

        Raises:
            TypeError: comm is neither a comm nor two, or cp_comm_type no str.
            ValueError: an unknown cp_comm_type, or one of two levels for one comm, or the other way round.
        """
        as_choice("cp_comm_type", cp_comm_type, SHARDINGS)
        two_levels = isinstance(comm, Levels) or (
            isinstance(comm, tuple) and len(comm) == 2 and all(isinstance(part, Comm) for part in comm))
        if not two_levels and not isinstance(comm, Comm):
            raise TypeError(f"comm is a {type(comm).__name__}, wanted a Comm, or two in a tuple; make one with "
                            f"thdattn.comm.init()")
        _check_levels(two_levels, cp_comm_type)
        comm = Levels(*comm) if isinstance(comm, tuple) else comm
        if isinstance(comm, Levels):
            return cls(cp_comm_type, comm, a2a.Ranks(comm.inner, comm.outer))
        return cls(cp_comm_type, comm, a2a.Ranks(comm, SingleComm()) if cp_comm_type == "a2a" else None)

    @property
    def inner(self) -> int:
        """Number of ranks that exchange heads: 1 where none do."""
        return self.levels.inner.size if self.levels else 1

    @property
    def ranks(self) -> Any:
        """Ranks that the method takes: those of both levels where heads are exchanged."""
        if self.levels is None:
            return self.comm
        return self.levels if self.inner > 1 else self.levels.outer

    def method(self, plan: Plan) -> Method:
        """Return the method for a plan."""
        return self.between(plan) if plan.core is None else a2a

    def between(self, plan: Plan) -> Method:
        """Return the method for rows: between all ranks, or between the groups that exchange heads."""
        rows = plan.core or plan
        if rows.cp_size == 1:
            return local
        if "p2p" in self.cp_comm_type:  # also where this rank needs nothing: it passes on what others need
            return p2p
        if rows.routes is None:
            return all_gather
        return local if rows.routes.is_empty and rows.needs_own_rows else group_cast

    def memory(self, plan: Plan, layer: Layer) -> Memory:
        """Return the bytes of the method's buffers, for a layer with this plan, which needs no arrays."""
        if plan.core is not None:
            return a2a.memory(self.ranks, plan, layer, self.between(plan))
        return self.between(plan).memory(self.ranks, plan, layer)

    def head_groups(
        self, plan: Plan, num_heads: int, num_kv_heads: int, dtype: np.dtype[Any], asked: int | None
    ) -> tuple[int, ...]:
        """Return the kv heads of each group; groups are gathered, computed and summed one after another.

        Args:
            asked: number of equal groups, for a2a at most as many as a rank has heads for; None: a number that follows
                from the bytes that a rank receives, where groups overlap something. Over NCCL it also follows from the
                operations of its attention.
        """
        method, carrier = self.method(plan), self.levels.inner if self.levels and self.inner > 1 else self.ranks
        foreign = (plan.cp_size - 1) * plan.local_key_rows * num_kv_heads * sum(plan.head_dims) * dtype.itemsize
        if asked is None and method is all_gather and carrier.reads_peers and foreign >= WORTH_GROUPS:
            return _growing(num_kv_heads)
        if asked is None:
            as_long = foreign * (NETWORK if carrier.spans_machines else 1)  # bytes that take as long in one machine
            worth: dict[int, float] = {**HEAD_GROUPS} if method is a2a else {}
            if method is all_gather and not carrier.reads_peers:
                operations = attention_flops(_most_pairs(plan), num_heads, plan.head_dims).forward / plan.cp_size
                worth = {n: max(n * LEAST_BYTES, operations / MOST_OPERATIONS) for n in (2, 4, 8)}
            asked = max((n for n, size in worth.items() if carrier.overlaps and as_long >= size), default=1)
        number = math.gcd(max(1, num_kv_heads // self.inner), asked)
        return (num_kv_heads // number,) * number

    def sharding(self, batch: PackedBatch, sharding: str | Sharding | None) -> Sharding:
        """Return the sharding of a batch, which the method must be able to gather; see CPAttention.sharding."""
        asked = SHARDINGS[self.cp_comm_type] if sharding is None else sharding
        # Rows that are no slices of a group's are brought into sequence order where heads are exchanged on one level.
        inner = 1 if self.cp_comm_type == "a2a" and asked != "contiguous" else self.inner
        made = as_sharding(asked, batch, self.comm.size, inner)
        self._check_sharding(made)
        return made

    def check_heads(self, num_heads: int, num_kv_heads: int, head_groups: int | None) -> None:
        """Raise a ValueError for numbers of heads that do not divide each other, their groups, or the ranks."""
        if head_groups is not None and num_kv_heads % head_groups:
            raise ValueError(
                f"head_groups is {head_groups}, not a divisor of num_kv_heads = {num_kv_heads}; wanted as many kv "
                f"heads in every group, or None"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads is {num_heads}, not a multiple of num_kv_heads = {num_kv_heads}; "
                f"wanted as many query heads for every kv head"
            )
        if refusal := a2a.obstacle(num_heads, num_kv_heads, self.inner):
            raise ValueError(refusal)
        if self.levels and self.levels.outer.size > 1 and num_kv_heads % self.inner:
            raise ValueError(
                f"num_kv_heads is {num_kv_heads} and comm has {self.inner} ranks in its inner groups, wanted a "
                f"divisor of the kv heads with two levels, as ranks would send keys of shared heads twice; use "
                f"cp_comm_type 'a2a', or smaller inner groups"
            )

    def can_gather(self, plan: Plan) -> bool:
        """See CPAttention.can_gather."""
        return plan.routes is None and self.method(plan) in (all_gather, local)

    def check_gathers(self, what: str, plan: Plan) -> None:
        """Raise a ValueError where ranks exchange more than keys and values, or not all of them."""
        if not self.can_gather(plan):
            raise ValueError(
                f"{what} with cp_comm_type {self.cp_comm_type!r} and sharding {plan.sharding.strategy!r}, wanted "
                f"'all_gather' without 'balanced', as other methods send nothing before they have q; leave it out"
            )

    def _check_sharding(self, sharding: Sharding) -> None:
        """Raise a ValueError where the method cannot gather these rows."""
        if sharding.inner not in (1, self.inner) or (sharding.inner == 1 < self.inner and "+" in self.cp_comm_type):
            raise ValueError(
                f"sharding has inner {sharding.inner}, wanted {self.inner}, the ranks among which cp_comm_type "
                f"{self.cp_comm_type!r} exchanges heads; make it with Sharding(batch, {self.comm.size}, "
                f"{sharding.strategy!r}, inner={self.inner})"
            )
        if sharding.strategy == "balanced" and self.cp_comm_type == "a2a" and self.comm.size > 1:
            raise ValueError(
                "sharding is 'balanced' and cp_comm_type 'a2a', wanted 'contiguous' or 'dual_chunk' with that, as each "
                "rank has all rows of its heads; use one of these, or cp_comm_type 'all_gather'"
            )


def _most_pairs(plan: Plan) -> int:
    """Return the visible pairs that are expected of a plan; without lengths those of one long sequence."""
    if plan.expected_pairs is not None:
        return plan.expected_pairs
    return plan.cp_size * plan.local_rows * most_in_sight(plan.window, plan.key_rows)


def _growing(num_kv_heads: int) -> tuple[int, ...]:
    """Return growing groups: the first group's gather overlaps no computation, so it is the smallest.

    There are few groups, as multiprocessors idle at the end of each.
    """
    first, last = max(1, num_kv_heads // 8), num_kv_heads // 2
    return tuple(size for size in (first, num_kv_heads - first - last, last) if size)


def keeps_keys(plan: Plan, num_heads: int, num_kv_heads: int, asked: bool | None) -> bool:
    """Return whether forward keeps the keys of all ranks: by default, if Saved grows by no more than its own size."""
    if plan.cp_size == 1:
        return False
    if plan.core is not None or plan.sharding.by_runs:
        return asked is not False
    heads = plan.local_rows * num_heads + plan.local_key_rows * num_kv_heads
    return plan.key_rows * num_kv_heads <= heads if asked is None else asked


def _check_levels(two_levels: bool, cp_comm_type: str) -> None:
    """Raise a ValueError where comm has two levels and cp_comm_type one, or the other way round."""
    if two_levels and "+" not in cp_comm_type:
        raise ValueError(
            f"comm has two levels and cp_comm_type is {cp_comm_type!r}, wanted one of two levels, such as "
            f"'a2a+all_gather'; use that, or pass one comm"
        )
    if "+" in cp_comm_type and not two_levels:
        raise ValueError(
            f"cp_comm_type is {cp_comm_type!r} and comm has one level, wanted (inner, outer); pass "
            f"(comm.split(comm.rank // n), comm.split(comm.rank % n)) for groups of n neighbours"
        )
