"""How a plan comes about: from its outline, which says all sizes, over what ranks agree on, to its arrays."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from thdattn.buffers import Buffers, Kept
from thdattn.plan import Plan
from thdattn.sharding import Sharding


def with_core(plan: Plan, inner: int) -> Plan:
    """The outline of a plan where heads are exchanged among so many ranks: with that of all rows of the group."""
    if inner == 1:
        return plan
    rows = plan.sharding.outer or Sharding(plan.batch, 1, "contiguous")
    core = replace(plan, sharding=rows, cp_rank=plan.cp_rank // inner, _kept=Kept(), _buffers=Buffers())
    return replace(plan, core=core)


def fingerprint(plan: Plan, *asked: Any) -> int:
    """A number that differs where outlines of plans do, or what was asked of the attention; contents on a GPU aside."""
    sharding, batch, key_batch = plan.sharding, plan.batch, plan.key_batch
    state = sharding.strategy, sharding.inner, batch.num_seqs, batch.total_rows, key_batch.total_rows, *asked
    digest = hashlib.sha256(repr(state).encode())
    if not batch.on_device:
        for lengths in dict.fromkeys((batch, key_batch)):
            digest.update(lengths.cu_seqlens.tobytes() + lengths.cu_seqlens_padded.tobytes())
    return int.from_bytes(digest.digest()[:7], "little")


def found_wrong(lengths: Any) -> str:
    """Why lengths on a GPU are wrong, as far as the host knows, which a rank may before others; "": they are not.

    Args:
        lengths: see PlanArrays; None: there are none.
    """
    try:
        if lengths is not None:
            lengths.check(wait=False)
    except ValueError as error:
        return str(error)
    return ""


def with_arrays(plan: Plan, lengths: Any = None) -> Plan:
    """The plan of an outline.

    Args:
        lengths: on a GPU, of the plan that it is the core of.
    """
    if plan.core is None or plan.sharding.outer is None:
        key_batch = None if plan.key_batch is plan.batch else plan.key_batch
        arrays = plan.engine.plan_arrays(
            plan.sharding, plan.cp_rank, plan.window, plan.tiles, key_batch, lengths=lengths)
        return replace(plan, arrays=arrays, core=plan.core and with_arrays(plan.core, arrays.lengths))
    core = with_arrays(plan.core)
    first = plan.cp_rank % plan.sharding.inner * plan.local_rows
    mine = {name: getattr(core.arrays, name)[first : first + plan.local_rows]
            for name in ("rows", "positions", "valid", "key_ranges")}  # fmt: skip
    return replace(plan, arrays=replace(core.arrays, **mine), core=core)
