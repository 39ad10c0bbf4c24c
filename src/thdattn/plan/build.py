"""How a plan comes about: from its outline, which says all sizes, over what ranks agree on, to its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from thdattn.packing import PackedBatch
from thdattn.plan.buffers import Buffers, Kept
from thdattn.plan.plan import Plan
from thdattn.sharding import Sharding


def with_core(plan: Plan, inner: int) -> Plan:
    """The outline of a plan where heads are exchanged among so many ranks: with that of all rows of the group."""
    if inner == 1:
        return plan
    rows = plan.sharding.outer or Sharding(plan.batch, 1, "contiguous")
    core = replace(plan, sharding=rows, cp_rank=plan.cp_rank // inner, _kept=Kept(), _buffers=Buffers())
    return replace(plan, core=core)


def check_key_batch(key_batch: PackedBatch, batch: PackedBatch, cp_size: int) -> None:
    """Raise for keys of their own that these queries cannot have; see CPAttention.plan."""
    if not isinstance(key_batch, PackedBatch):
        raise TypeError(
            f"key_batch is a {type(key_batch).__name__}, wanted a PackedBatch of the keys' lengths; make it with "
            f"PackedBatch(cu_seqlens), or leave it out for self-attention"
        )
    if cp_size > 1:
        raise ValueError(
            f"key_batch was passed for {cp_size} ranks, wanted one: keys of other lengths are not spread over ranks; "
            f"use thdattn.comm.init('single') on every rank, for sequences of its own"
        )
    if key_batch.num_seqs != batch.num_seqs:
        raise ValueError(
            f"key_batch has {key_batch.num_seqs} sequences, wanted {batch.num_seqs} as batch; pass one length of keys "
            f"per sequence of queries, 0 for none"
        )
    if key_batch.on_device != batch.on_device:
        here, there = ("a GPU", "the host") if batch.on_device else ("the host", "a GPU")
        raise ValueError(
            f"batch has its lengths on {here} but key_batch on {there}; wanted both on one side; "
            f"copy those of key_batch to {here}"
        )


def description(plan: Plan, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in which ranks must agree on an outline of a plan; of lengths on a GPU only how many they are.

    Args:
        asked: by name, what was asked of the attention or mixer.
    """
    sharding = plan.sharding
    fields = {"sharding": sharding.strategy, "inner": sharding.inner, **asked}
    keys = {} if plan.key_batch is plan.batch else plan.key_batch.described()
    return {**fields, **plan.batch.described(), **{f"key_batch.{name}": field for name, field in keys.items()}}


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
