"""Attention without an exchange: on one rank, and where every document has all its rows on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from thdattn.engines import Array, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs
from thdattn.methods.base import MethodOptions, Results, lse_dtype
from thdattn.plan.memory import Layer, Memory, num_bytes

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.methods.all_gather import GatheredKV
    from thdattn.plan.plan import Plan

_Inputs = TypeVar("_Inputs", ForwardInputs, BackwardInputs)


def forward(
    comm: Comm, inputs: ForwardInputs, options: MethodOptions, max_logit: bool, keys: GatheredKV | None = None
) -> Results:
    """Compute attention of this rank's query rows over its own keys; see Method."""
    inputs = _in_sequence_order(inputs, keys)
    plan = inputs.plan
    out, lse, logits = plan.engine.attn_fwd(inputs, options.attention, ForwardOutputs(max_logit=max_logit))
    if max_logit:
        plan.engine.nan_if_invalid(plan, logits)
        comm.all_reduce(logits, "max")
    return Results(out, lse, logits, None)


def backward(
    comm: Comm, inputs: BackwardInputs, options: MethodOptions, kept: None, at_once: bool,
    keys: GatheredKV | None = None,
) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
    """Compute the gradients of `forward`; see Method. dk and dv are complete with dq."""
    inputs = _in_sequence_order(inputs, keys)
    plan = inputs.plan
    outputs = BackwardOutputs(options.grad_dtype or inputs.k.dtype)
    dq, dk, dv = plan.engine.attn_bwd(inputs, options.attention, outputs)
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


def _in_sequence_order(inputs: _Inputs, keys: GatheredKV | None) -> _Inputs:
    """Return inputs whose keys and values have neither fillers at the end nor what padding held."""
    if keys is not None:
        keys.used = True
    k, v, plan = inputs.k, inputs.v, inputs.plan
    if plan.has_unseen_keys:
        k, v = plan.engine.to_sequence_order([[k], [v]], plan)
    elif len(k) == plan.key_rows:
        return inputs
    else:
        k, v = k[: plan.key_rows], v[: plan.key_rows]
    return inputs._replace(k=k, v=v)
