"""Build a plan: outline with all sizes, fields that ranks must agree on, arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from thdattn.packing import PackedBatch
from thdattn.plan.key_transfers import needed_rows
from thdattn.plan.plan import Plan
from thdattn.sharding import Sharding

CAUSAL = (-1, 0)


def with_core(plan: Plan, inner: int) -> Plan:
    """Return the outline of a plan whose heads `inner` ranks exchange: it has a core, the outline of a group's rows."""
    if inner == 1:
        return plan
    rows = plan.sharding.outer or Sharding(plan.batch, 1, "contiguous")
    core = replace(plan, sharding=rows, key_batch=rows.batch, cp_rank=plan.cp_rank // inner)
    return replace(plan, core=core)


def check_key_batch(key_batch: PackedBatch, batch: PackedBatch, cp_size: int) -> None:
    """Raise for a key_batch that does not fit the batch of queries; see CPAttention.plan."""
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


def refused_trees(plan: Plan) -> str:
    """Return why a plan's attention cannot have the prefix trees of its batch, and the remedy; "" if it can."""
    if not (plan.batch.has_trees or plan.key_batch.has_trees):
        return ""
    if plan.key_batch is not plan.batch:
        return ("key_batch was passed and one of the batches has trees, wanted PackedBatch.from_trees for "
                "self-attention alone; make both batches with PackedBatch.from_lengths")
    if plan.window != CAUSAL:
        return (f"window is {plan.window} and batch has trees, wanted a causal attention without a window, as a window "
                f"is a distance along a path; make CPAttention(causal=True, window=(-1, -1)), or a batch of the paths "
                f"(PackedBatch.paths)")
    return ""


def exceeded_capacity(plan: Plan) -> str:
    """Return by how much a layout with lengths on the host exceeds its sharding's capacity; "" if it fits."""
    plan = plan.core or plan
    sharding = plan.sharding
    if sharding.capacity is None or plan.batch.on_device:
        return ""
    over = needed_rows(sharding, plan.window).excess(sharding.capacity)
    over = over or sharding.capacity.excess_tiles(plan.foreign_tiles, plan.tiles)
    return over and f"the layout has {over}, the sharding's capacity; make one of a larger capacity"


def description(plan: Plan, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an outline in which ranks must agree; for lengths on a GPU only their number and `like`.

    Args:
        asked: arguments of the attention or mixer, by name.
    """
    sharding, rows = plan.sharding, (plan.core or plan).sharding
    fields = {"sharding": sharding.strategy, "inner": sharding.inner, "capacity": rows.capacity or (), **asked}
    others = {"key_batch": plan.key_batch if plan.is_cross else None,
              "like": plan.like if plan.batch.on_device else None}
    return {**fields, **plan.batch.described(),
            **{f"{which}.{name}": field for which, batch in others.items() if batch is not None
               for name, field in batch.described().items()}}


def found_wrong(lengths: Any) -> str:
    """Return why lengths on a GPU are wrong, "" if the host knows of no error; one rank may know before others.

    Args:
        lengths: see PlanArrays; None for lengths on the host.
    """
    try:
        if lengths is not None:
            lengths.check(wait=False)
    except ValueError as error:
        return str(error)
    return ""


def with_arrays(plan: Plan, lengths: Any = None) -> Plan:
    """Return the plan of an outline, with arrays.

    Args:
        lengths: for the core of a plan with lengths on a GPU, that plan's DeviceLengths.
    """
    if plan.core is None or plan.sharding.outer is None:
        arrays = plan.engine.plan_arrays(plan, lengths)
        return replace(plan, arrays=arrays, core=plan.core and with_arrays(plan.core, arrays.lengths))
    core = with_arrays(plan.core)
    first = plan.cp_rank % plan.sharding.inner * plan.local_rows
    mine = {name: getattr(core.arrays, name)[first : first + plan.local_rows]
            for name in ("rows", "positions", "valid", "key_ranges")}
    return replace(plan, arrays=replace(core.arrays, **mine), core=core)
