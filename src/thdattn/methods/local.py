"""Attention without an exchange: on one rank, and where every document has all its rows on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from thdattn.engines import Array, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs
from thdattn.methods.base import MethodOptions, Results, lse_dtype
from thdattn.plan.memory import Layer, Memory, num_bytes

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.methods.all_gather import GatheredKV
    from thdattn.plan.plan import Plan


def forward(
    comm: Comm, inputs: ForwardInputs, options: MethodOptions, max_logit: bool, keys: GatheredKV | None = None
) -> Results:
    """Compute attention of this rank's query rows over its own keys; see Method."""
    q, k, v, plan, sinks = inputs
    k, v = _in_sequence_order(plan, k, v, keys)
    out, lse, logits = plan.engine.attn_fwd(
        ForwardInputs(q, k, v, plan, sinks), options.attention, ForwardOutputs(max_logit=max_logit))
    if max_logit:
        plan.engine.nan_if_invalid(plan, logits)
        comm.all_reduce(logits, "max")
    return Results(out, lse, logits, None)


def backward(
    comm: Comm, inputs: BackwardInputs, options: MethodOptions, kept: None, at_once: bool,
    keys: GatheredKV | None = None,
) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
    """Compute the gradients of `forward`; see Method. dk and dv are complete with dq."""
    dout, q, k, v, out, lse, plan = inputs
    k, v = _in_sequence_order(plan, k, v, keys)
    dq, dk, dv = plan.engine.attn_bwd(
        BackwardInputs(dout, q, k, v, out, lse, plan), options.attention,
        BackwardOutputs(options.grad_dtype or k.dtype))
    plan.engine.nan_if_invalid(plan, dq, dk, dv)
    return dq, lambda: (dk, dv)


def memory(comm: Comm, plan: Plan, layer: Layer) -> Memory:
    """Return the bytes of all buffers; see Method."""
    def rows_of(num_rows: int, num_heads: int) -> list[int]:
        return [num_bytes((num_rows, num_heads, width), layer.dtype) for width in plan.head_dims]

    queries, outs = rows_of(plan.local_rows, layer.num_heads)
    keys, values = rows_of(plan.local_key_rows, layer.num_kv_heads)
    layer = layer._replace(groups=(layer.num_kv_heads,))
    forward = {"plan": plan.engine.plan_bytes(plan)}
    if plan.has_unseen_keys:
        forward["keys in sequence order"] = sum(rows_of(plan.key_rows, layer.num_kv_heads))
    forward |= plan.engine.forward_bytes(plan, layer)
    backward = plan.engine.backward_bytes(plan, layer, layer.dtype, "made")
    backward.pop("partial sums of dk and dv", None)  # which are dk and dv
    lse = num_bytes((layer.num_heads, plan.local_rows), lse_dtype(layer.dtype))
    saved = {"q": queries, "k": keys, "v": values, "out": outs, "lse": lse}
    return Memory(forward, backward, saved, {"dq": queries, "dk": keys, "dv": values})


def _in_sequence_order(plan: Plan, k: Array, v: Array, keys: GatheredKV | None) -> tuple[Array, Array]:
    """Return keys and values without fillers at the end, and without what padding held."""
    if keys is not None:
        keys.used = True
    if plan.has_unseen_keys:
        return plan.engine.to_sequence_order([[k], [v]], plan)
    return (k, v) if len(k) == plan.key_rows else (k[: plan.key_rows], v[: plan.key_rows])
