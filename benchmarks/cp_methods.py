"""The ways of CPAttention to spread a pack over ranks that bench_cp.py times, and what travels with each; needs no GPU.

Every rank can say from lengths and heads alone how many bytes it gets. Here that is worked out anew, so that what a
comm has counted can be held against it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from workloads import Case

import thdattn
from thdattn.costs import model
from thdattn.methods.a2a import obstacle
from thdattn.methods.select import SHARDINGS

OURS, ALONE, ONE = "ours", "alone", "one GPU"  # names in records: the usual method, attention kernels alone, one GPU
INNER = 2  # ranks of the inner groups, where there are two levels
CAPTURED = ("all_gather", "a2a", "a2a+all_gather")  # what CUDA graphs over many batches are made of
BFLOAT16, FLOAT32 = 2, 4  # bytes


class Method(NamedTuple):
    """What travels and how rows are spread, as CPAttention takes them."""

    cp_comm_type: str
    sharding: str

    @classmethod
    def named(cls, name: str) -> Method:
        """That of "cp_comm_type:sharding"; without a sharding the one that CPAttention chooses."""
        kind, _, sharding = name.partition(":")
        return cls(kind, sharding or SHARDINGS[kind])

    def __str__(self) -> str:
        usual = self.sharding == SHARDINGS[self.cp_comm_type]
        return self.cp_comm_type if usual else f"{self.cp_comm_type}:{self.sharding}"

    @property
    def way(self) -> str:
        """Its name in a record."""
        return OURS if self == USUAL else f"{OURS}, {self}"

    @property
    def two_levels(self) -> bool:
        """Whether it takes (inner, outer)."""
        return "+" in self.cp_comm_type

    @property
    def captured(self) -> bool:
        """Whether it is measured in a CUDA graph."""
        return self.cp_comm_type in CAPTURED and self.sharding != "balanced"

    def head_ranks(self, cp_size: int) -> int:
        """Ranks that exchange heads with each other."""
        return INNER if self.two_levels else cp_size if self.cp_comm_type == "a2a" else 1

    def padded(self, case: Case, cp_size: int) -> thdattn.PackedBatch:
        """The pack with no more padding than the sharding needs."""
        how = model.Way(self.cp_comm_type, self.sharding, INNER if self.two_levels else 1)
        return thdattn.PackedBatch.from_lengths(case.lengths, how.multiple(cp_size))

    def refusal(self, case: Case, cp_size: int) -> str:
        """Why a case cannot be spread so; "" if it can."""
        if self.two_levels and (cp_size < 2 * INNER or cp_size % INNER):
            return f"{cp_size} ranks are no two levels with {INNER} in each inner group"
        if self.two_levels and case.kv_heads % INNER:
            return f"{case.kv_heads} kv heads cannot be shared by the {INNER} ranks of an inner group"
        return obstacle(case.heads, case.kv_heads, self.head_ranks(cp_size))


USUAL = Method("all_gather", "dual_chunk")
METHODS = {name: Method.named(name) for name in (
    "all_gather", "all_gather:balanced", "a2a", "a2a:dual_chunk", "p2p", "a2a+all_gather", "a2a+all_gather:balanced",
    "a2a+p2p",
)}  # fmt: skip


class Traffic(NamedTuple):
    """Bytes that a rank gets from others in one call of forward, and of backward."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        """Of forward and backward."""
        return self.forward + self.backward


def traffic(method: Method, case: Case, plan: thdattn.Plan, keeps: bool) -> Traffic:
    """What a rank has to get in bfloat16, with float32 for lse and for sums of dk and dv.

    Args:
        plan: of the rank.
        keeps: whether forward keeps what has travelled for the backward.
    """
    size = method.head_ranks(plan.cp_size)
    heads = _of_heads(case, size, plan.local_rows, keeps)
    rows = _of_rows(method, case, size, plan.core or plan, keeps)
    return Traffic(heads.forward + rows.forward, heads.backward + rows.backward)


def _of_heads(case: Case, size: int, num_rows: int, keeps: bool) -> Traffic:
    """Of ranks that exchange heads: from each other one its rows of these heads, and its heads of these rows."""
    heads, kv_heads = case.heads // size, max(1, case.kv_heads // size)
    q, out = (BFLOAT16 * heads * width for width in (case.head_dim, case.v_head_dim))
    k_v, lse = kv_heads * (case.head_dim + case.v_head_dim), FLOAT32 * heads
    grads = k_v * (BFLOAT16 if size <= case.kv_heads else FLOAT32)  # shares of heads that several ranks have
    there, back = q + BFLOAT16 * k_v, out + lse
    again = 0 if keeps else there + back
    foreign = (size - 1) * num_rows
    return Traffic(foreign * (there + back), foreign * (again + out + q + grads))


def _of_rows(method: Method, case: Case, head_ranks: int, plan: thdattn.Plan, keeps: bool) -> Traffic:
    """Of keys and values of other rows, and shares of gradients: all, or those that the plan has routes for."""
    gotten = returned = (plan.cp_size - 1) * plan.local_rows
    if plan.routes is not None:
        gotten, returned = plan.routes.num_received, plan.routes.num_sent
    row = max(1, case.kv_heads // head_ranks) * (case.head_dim + case.v_head_dim)
    again = gotten if "p2p" in method.cp_comm_type or not keeps else 0
    return Traffic(BFLOAT16 * row * gotten, row * (BFLOAT16 * again + FLOAT32 * returned))


def predicted_ms(method: Method, case: Case, cp_size: int) -> dict[str, float]:
    """Milliseconds of each direction by the package's own model of costs, with its usual rates."""
    seconds = model.predicted(
        method.padded(case, cp_size), cp_size, case.heads, case.head_dim, case.kv_heads, method.cp_comm_type,
        method.sharding, inner=INNER if method.two_levels else 1, causal=case.causal, window=case.window,
    )  # fmt: skip
    found = {"forward": seconds.forward, "backward": seconds.backward, "both": seconds.total}
    return {direction: 1e3 * number for direction, number in found.items()}


def work(sharding: thdattn.Sharding) -> list[int]:
    """Pairs (query, key) of every rank under a causal mask."""
    batch = sharding.batch
    position = np.zeros(batch.total_rows + 1, np.int64)  # the last one for fillers
    for begin, length in zip(batch.cu_seqlens_padded[:-1].tolist(), batch.lengths.tolist(), strict=True):
        position[begin : begin + length] = np.arange(1, length + 1)
    return [int(position[sharding.rows(rank)].sum()) for rank in range(sharding.cp_size)]
