"""State that a forward saves for its backward, and checks of what calls are given: rows, sinks, plans, saved state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from thdattn.arguments import as_array, check_kind, check_same, found, is_array, shown
from thdattn.comm.slices import address
from thdattn.engines import Array, Engine
from thdattn.methods.all_gather import GatheredKV
from thdattn.methods.base import lse_dtype
from thdattn.plan.plan import Plan


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class Saved:
    """State that forward saves for backward.

    Attributes:
        q, k, v, plan: as passed, without a copy: do not write to them before backward.
        out: (local_rows, num_heads, v_head_dim), as returned.
        lse: (num_heads, local_rows) float32 (float64 for float64 input), natural log of the softmax sum, which includes
            the sink; -inf on padding, and for a query that sees no key.
        max_logit: (num_heads,) float32, the largest scaled and capped logit over the valid rows of all ranks, without
            sinks; -inf without valid rows, None if not asked for.
        made_with: heads, head dims, softmax_scale, dtype, deterministic, softcap and sinks, which must equal those of
            the attention whose backward takes it.
        keys: the received rows that the method keeps for its backward, such as the keys and values of all ranks by
            group of heads; None: backward receives them again.
        sinks: as passed, without a copy; None for an attention without sinks.
        generation: the Generation of the plan's lengths if these are on a GPU, else None.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    max_logit: Array
    plan: Plan
    made_with: dict[str, Any]
    keys: tuple[Any, ...] | None = None
    sinks: Array = None
    generation: Any = None

    def __repr__(self) -> str:
        arrays = (f"{name} {_kind(getattr(self, name))}" for name in ("q", "k", "v", "out", "lse", "max_logit"))
        return f"<Saved: {', '.join(arrays)}, {self.plan!r}>"


def check_saved(saved: Saved, kind: Any) -> None:
    """Raise a ValueError for arrays that forward did not save, and for a plan that was refreshed since.

    It compares attributes alone, as this is on the hot path. A kernel would read out of bounds.
    """
    if saved.generation is not None:
        saved.generation.check("saved")
    made_with, queries, keys = saved.made_with, saved.plan.local_rows, saved.plan.local_key_rows
    num_heads, num_kv_heads, input_dtype = made_with["num_heads"], made_with["num_kv_heads"], made_with["dtype"]
    head_dim, v_head_dim = saved.plan.head_dims
    sinks = [("sinks", (num_heads,), lse_dtype(input_dtype))] if made_with["sinks"] else []
    for name, shape, dtype in (
        *sinks,
        ("q", (queries, num_heads, head_dim), input_dtype), ("k", (keys, num_kv_heads, head_dim), input_dtype),
        ("v", (keys, num_kv_heads, v_head_dim), input_dtype), ("out", (queries, num_heads, v_head_dim), input_dtype),
        ("lse", (num_heads, queries), lse_dtype(input_dtype)),
    ):
        x = getattr(saved, name)
        if type(x) is not kind or x.shape != shape or x.dtype != dtype or not x.flags.c_contiguous:
            raise ValueError(
                f"saved.{name} is {_kind(x)}, a {type(x).__name__}; wanted {dtype} {shape} as forward saved it; "
                f"pass what forward returned, or the same arrays C-contiguous on the same device"
            )


def check_keys(engine: Engine, keys: GatheredKV, k: Array, v: Array, plan: Plan) -> None:
    """Raise for keys that were not gathered for a call with these k, v and plan, and for other objects.

    k and v are a user's arrays; `keys` also knows those that gather has copied, as they were not contiguous.
    """
    if not isinstance(keys, GatheredKV):
        raise TypeError(f"keys is {found(keys)}; wanted what gather returned; pass that, or leave it out")
    if keys.used:
        raise ValueError("keys were used by a forward or backward before, wanted those of this call; call gather "
                         "again, or leave it out")
    if keys.generation is not None:
        keys.generation.check("keys")
    arrays = [[engine.in_place(name, x) for x in xs]
              for name, xs in (("k", (k, keys.k, keys.given[0])), ("v", (v, keys.v, keys.given[1])))]
    places = [[(address(x), x.shape, x.strides) for x in xs] for xs in arrays]
    if keys.plan is not plan or any(now not in known for now, *known in places):
        raise ValueError("keys were gathered from other k and v or with another plan, wanted those of this call; "
                         "call gather with the same arrays, or leave it out")


def as_rows(engine: Engine, name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the engine's array of rows of an attention; see as_array."""
    return as_array(
        engine, name, x, shape, dtype,
        " = (local_rows, heads, width); pass this rank's rows (Sharding.shard cuts them out) with the heads that "
        "CPAttention was made for", "; cast it, or make CPAttention(dtype=...) match",
    )


def as_sinks(engine: Engine, sinks: Array, num_heads: int, dtype: np.dtype[Any], wanted: bool) -> Any:
    """Return the engine's array of the sinks that a user passed, or None for an attention without.

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
    return as_array(engine, "sinks", sinks, (num_heads,), np.promote_types(dtype, np.float32),
                    "; pass a logit for every query head", ", as lse; cast it")


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


def _kind(x: Any) -> str:
    """Describe an array by dtype and shape, without its contents."""
    return f"{x.dtype} {tuple(x.shape)}" if is_array(x) else shown(x)
