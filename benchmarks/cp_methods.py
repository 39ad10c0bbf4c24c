"""Methods of CPAttention to spread a pack over ranks, as bench_cp.py times them; needs no GPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from workloads import Case

import thdattn
from thdattn.costs import model
from thdattn.methods.a2a import obstacle
from thdattn.methods.select import SHARDINGS

OURS, ALONE, ONE = "ours", "alone", "one GPU"  # peers of records
EXCHANGE, BESIDE = "exchange", "alone, beside the exchange"  # with --exchange
PARTS = (ONE, ALONE, EXCHANGE, BESIDE)  # what is measured beside implementations
INNER = 2  # ranks of an inner group of two levels


class Method(NamedTuple):
    """Method as CPAttention takes it: cp_comm_type, and the sharding of rows."""

    cp_comm_type: str
    sharding: str

    @classmethod
    def named(cls, name: str) -> Method:
        """Parse "cp_comm_type:sharding"; without a sharding it is the one that CPAttention chooses."""
        kind, _, sharding = name.partition(":")
        return cls(kind, sharding or SHARDINGS[kind])

    def __str__(self) -> str:
        usual = self.sharding == SHARDINGS[self.cp_comm_type]
        return self.cp_comm_type if usual else f"{self.cp_comm_type}:{self.sharding}"

    @property
    def way(self) -> str:
        """Return its name in a record."""
        return OURS if self == USUAL else f"{OURS}, {self}"

    @property
    def two_levels(self) -> bool:
        """True if it takes comms (inner, outer)."""
        return "+" in self.cp_comm_type

    def padded(self, case: Case, cp_size: int) -> thdattn.PackedBatch:
        """Return the pack with no more padding than the sharding needs."""
        how = model.Way(self.cp_comm_type, self.sharding, INNER if self.two_levels else 1)
        return case.batch(how.multiple(cp_size))

    def refusal(self, case: Case, cp_size: int) -> str:
        """Return why a case cannot be spread in this way; "" if it can."""
        if self.two_levels and (cp_size < 2 * INNER or cp_size % INNER):
            return f"{cp_size} ranks are no two levels with {INNER} in each inner group"
        if self.two_levels and case.kv_heads % INNER:
            return f"{case.kv_heads} kv heads cannot be shared by the {INNER} ranks of an inner group"
        head_ranks = INNER if self.two_levels else cp_size if self.cp_comm_type == "a2a" else 1
        return obstacle(case.heads, case.kv_heads, head_ranks)


USUAL = Method("all_gather", "dual_chunk")
METHODS = {name: Method.named(name) for name in (
    "all_gather", "all_gather:balanced", "a2a", "a2a:dual_chunk", "p2p", "a2a+all_gather", "a2a+all_gather:balanced",
    "a2a+p2p",
)}


def work(sharding: thdattn.Sharding) -> list[int]:
    """Count the pairs (query, key) of every rank under a causal mask."""
    batch = sharding.batch
    position = np.zeros(batch.total_rows + 1, np.int64)  # the last one for padding rows
    for begin, length in zip(batch.cu_seqlens_padded[:-1].tolist(), batch.lengths.tolist(), strict=True):
        position[begin : begin + length] = np.arange(1, length + 1)
    return [int(position[sharding.rows(rank)].sum()) for rank in range(sharding.cp_size)]
