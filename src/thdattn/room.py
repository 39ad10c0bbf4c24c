"""Whether there is room for a batch on the GPU: what it takes against what is free, or lingers from batches before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from thdattn.comm import Comm
from thdattn.memory import Memory, in_units
from thdattn.plan import Plan

# Those that somebody holds, for their buffers.
_plans: WeakKeyDictionary[Comm, WeakSet[Plan]] = WeakKeyDictionary()


class Estimate:
    """Memory of a plan as that of the last one, where it has as many rows: it differs by some bytes per sequence."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], Memory] | None = None  # which rows, and what they take

    def __call__(self, plan: Plan, measure: Callable[[Plan], Memory]) -> Memory:
        """What measure(plan) returns, or has returned for a plan of as many rows."""
        core = plan.core or plan
        rows = (plan.sharding.strategy, plan.sharding.inner, plan.local_rows, core.key_rows, plan.batch.on_device,
                plan.has_blind_queries, core.has_unseen_keys, core.leading_tokens is None,
                core.routes and core.routes.table.tobytes())
        if self._last is None or self._last[0] != rows:
            self._last = rows, measure(plan)
        return self._last[1]


def note(comm: Comm, plan: Plan) -> None:
    """Has the buffers of a plan count as free where the next plans of this comm look for room."""
    _plans.setdefault(comm, WeakSet()).add(plan)


def shortage(engine: Any, comm: Comm, memory: Memory, forward_only: bool) -> str:
    """Why a plan's work buffers and one layer cannot be there; "" if they can, or nobody knows.

    What only lingers counts as free: windows that are there, and the buffers of plans made before, as a loop still
    holds the last one while it makes the next. Other arrays that it drops later are in use.

    Args:
        engine: the module `reference` or `ops`.
        memory: what the plan and the layer take.
        forward_only: the layer has no backward.
    """
    held = comm.held_bytes()
    there = sum(memory[name] for name, size in held.items() if name in memory and memory[name] <= size)
    there += sum(before.held_bytes() for before in _plans.get(comm, ()))
    wanted = memory.wanted(forward_only)
    free = engine.free_bytes(wanted - there)
    if free is None:
        return ""
    return (f"the batch needs {in_units(wanted)} of GPU memory for its work buffers and one layer, wanted at most "
            f"the {in_units(free + there)} that are free; pass fewer tokens, spread them over more ranks, or make "
            f"CPAttention with keep_keys=False or more head_groups (CPAttention.memory says what takes how much)")
