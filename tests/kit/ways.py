"""Every way to spread attention over ranks, how a case of cases.py is run in it, and the small cases of its tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cases import Case, Outcome, run

import thdattn
from thdattn.comm import Comm


@dataclass(frozen=True)
class Way:
    """A method with how rows are spread.

    cp_size: number of ranks; inner: of two levels, how many neighbours form a group; None: one level.
    """

    cp_comm_type: str
    sharding: str
    cp_size: int
    inner: int | None = None

    def __str__(self) -> str:
        ranks = f"{self.inner}x{self.cp_size // self.inner}" if self.inner else str(self.cp_size)
        return f"{self.cp_comm_type}-{self.sharding}-{ranks}"

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and kv heads that the method can spread; fewer kv heads than ranks where that is allowed."""
        return (6, 3) if self.cp_size % 3 == 0 and self.inner is None else (8, 4 if self.inner == 4 else 2)

    def comm(self, comm: Comm) -> Any:
        """Make what CPAttention takes for these ranks."""
        if self.inner is None:
            return comm
        return comm.split(comm.rank // self.inner), comm.split(comm.rank % self.inner)

    def batch(self, case: Case) -> thdattn.PackedBatch:
        """Return the case's batch, padded no more than the rows' own rule asks for."""
        return replace(case, sharding=self.sharding).batch(self.cp_size // (self.inner or 1))


def attention(case: Case, way: Way, comm: Comm, dtype: Any, **options: Any) -> thdattn.CPAttention:
    return case.attention(way.comm(comm), dtype, cp_comm_type=way.cp_comm_type, **options)


def run_way(case: Case, way: Way, dtype: Any, **options: Any) -> Outcome:
    """Run forward and backward of a case over simulated ranks; options: of cases.run."""
    return run(replace(case, sharding=way.sharding, cp_comm_type=way.cp_comm_type), way.cp_size, dtype,
               comm_of=way.comm, batch=way.batch(case), **options)


def ways(*grids: tuple[int, int], sizes: tuple[int, ...] = (), heads: tuple[int, ...] = ()) -> list[Way]:
    """Return every method with every sharding.

    Args:
        grids: of two levels, ranks of a group and groups.
        sizes: numbers of ranks of methods for rows; heads: of the exchange of heads.
    """
    rows = ("all_gather", "balanced"), ("p2p", "dual_chunk"), ("p2p", "contiguous"), ("p2p", "balanced")
    levels = (("a2a+all_gather", "dual_chunk"), ("a2a+all_gather", "contiguous"), ("a2a+all_gather", "balanced"),
              ("a2a+p2p", "dual_chunk"), ("a2a+p2p", "balanced"))
    return [
        *(Way(*how, size) for how in rows for size in sizes),
        *(Way("a2a", sharding, size) for sharding in ("contiguous", "dual_chunk") for size in heads),
        *(Way(*how, inner * outer, inner) for how in levels for inner, outer in grids),
    ]


# Every method on few ranks, and on more.
WAYS = ways((2, 2), (1, 3), sizes=(1, 3), heads=(2, 4))
MORE_WAYS = ways((4, 1), (2, 3), (4, 2), (2, 4), (1, 4), sizes=(2, 4, 6, 8), heads=(1, 3, 6, 8))


MIXED = (70, 3, 33, 0, 50, 17, 91)
PACKS = (
    Case("causal", MIXED),
    Case("full", MIXED, causal=False),
    Case("window-left", MIXED, window=(20, 0)),
    Case("window-right", MIXED, causal=False, window=(-1, 9)),
    Case("window-two-sided", MIXED, causal=False, window=(5, 30)),
    Case("slack", (40, 0, 9, 65), slack=27),
    Case("one-document", (203,)),
    Case("equal", (16,) * 64, window=(7, 0)),
    Case("fewer-tokens-than-ranks", (1, 0, 2)),
    Case("one-rank-receives", (38, 31, 16, 19, 3, 5)),  # of two, where it is balanced
    Case("empty", (0, 0, 0)),
    Case("empty-padded", (0, 0), padded=(48, 96), slack=5),
    Case("padded-between", (40, 0, 9, 0, 1), padded=(48, 96, 48, 0, 48), slack=3),
    Case("nothing", ()),
    Case("nothing-slack", (), slack=19),
)
BY_NAME = {case.name: case for case in PACKS}

# One of each kind.
TELLING = [*ways((2, 2), sizes=(3,), heads=(4,)), Way("a2a", "contiguous", 2)]


def of(way: Way, name: str) -> Case:
    """Return the case of a name with narrow heads, as many as the way can spread."""
    return replace(BY_NAME[name], heads=way.heads, dims=(12, 8))
