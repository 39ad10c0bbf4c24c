"""Check that the buffers of a batch fit in free GPU memory, or in the memory of earlier batches."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

from thdattn.comm import Comm
from thdattn.engines import Engine
from thdattn.plan.memory import Memory, in_units
from thdattn.plan.plan import Plan

# Plans that are still referenced.
_plans: WeakKeyDictionary[Comm, WeakSet[Plan]] = WeakKeyDictionary()


def note(comm: Comm, plan: Plan) -> None:
    """Count the buffers of a plan as free when the next plans of this comm are checked."""
    _plans.setdefault(comm, WeakSet()).add(plan)


def shortage(engine: Engine, comm: Comm, memory: Memory, forward_only: bool) -> str:
    """Return why a plan's work buffers and one layer do not fit in free memory; "" if they do, or if it is unknown.

    Memory that this plan takes over counts as free: existing peer windows, and buffers of earlier plans, because a
    training loop still holds its last plan while it makes the next. Other arrays of the caller count as in use.

    Args:
        memory: bytes of the buffers of the plan and the layer.
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
