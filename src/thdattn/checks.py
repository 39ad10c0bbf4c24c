"""Checks of the arguments of an attention, a mixer and their caches: arrays, plans, and what was made with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from thdattn.arguments import check_kind, shown
from thdattn.engines import Engine
from thdattn.plan.plan import Plan


def as_array(
    engine: Engine, name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any], shape_remedy: str,
    dtype_remedy: str,
) -> Any:
    """Return the engine's array of what a user passed: C-contiguous, and of this shape and dtype.

    Args:
        shape_remedy, dtype_remedy: the ends of the messages, behind the shape and the dtype wanted.

    Raises:
        TypeError: an array of another dtype, on the wrong device, or none.
        ValueError: an array of another shape.
    """
    x = engine.from_user(name, x)
    if x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}, wanted {dtype}{dtype_remedy}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}, wanted {shape}{shape_remedy}")
    return x


def as_rows(engine: Engine, name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the engine's array of rows of an attention; see as_array."""
    return as_array(
        engine, name, x, shape, dtype,
        " = (local_rows, heads, width); pass this rank's rows (Sharding.shard cuts them out) with the heads that "
        "CPAttention was made for", "; cast it, or make CPAttention(dtype=...) match",
    )  # fmt: skip


def as_sinks(engine: Engine, sinks: Any, num_heads: int, dtype: np.dtype[Any], wanted: bool) -> Any:
    """The engine's array of the sinks that a user passed, or None for an attention without.

    Args:
        dtype: of q.
        wanted: whether the attention has sinks.

    Raises:
        TypeError: an array of another dtype, on the wrong device, or none.
        ValueError: an array of another shape, none for an attention with sinks, or one for an attention without.
    """
    if (sinks is not None) != wanted:
        raise ValueError(
            f"sinks is {'None' if sinks is None else shown(sinks)}, but the attention was made with sinks={wanted}, "
            f"wanted one with the other; pass (num_heads,) logits to CPAttention(sinks=True), and to no other"
        )
    if sinks is None:
        return None
    sinks, kept = engine.from_user("sinks", sinks), np.promote_types(dtype, np.float32)
    if sinks.dtype != kept:
        raise TypeError(f"sinks is {sinks.dtype}, wanted {kept}, as lse; cast it")
    if sinks.shape != (num_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}, wanted {(num_heads,)}; pass a logit for every query head")
    return sinks


def check_plan(plan: Plan, wanted: dict[str, Any]) -> None:
    """Raise for a plan of another attention, or on one rank from lengths that the GPU has found wrong; enter it.

    Args:
        wanted: what plan.made_for has to be.
    """
    check_kind("plan", plan, Plan, "make it with attn.plan(batch)")
    check_same("plan was made for", plan.made_for, wanted, "make it with this attention's plan(batch)")
    raise_if_told(plan)
    plan.enter()


def raise_if_told(plan: Plan) -> None:
    """Raise for lengths that the GPU has found wrong, as far as the host of one rank knows.

    Of several ranks one may be told before the others, who would wait for it: their next plan raises on all.
    """
    if plan.cp_size == 1:
        plan.check(wait=False)


def check_same(what: str, made: dict[str, Any], wanted: dict[str, Any], remedy: str) -> None:
    """Raises a ValueError that names the first of the traits in which what was made before is not what is wanted."""
    if made != wanted:
        name = next(name for name in wanted if made[name] != wanted[name])
        raise ValueError(f"{what} {name} {made[name]}, wanted {wanted[name]}; {remedy}")
