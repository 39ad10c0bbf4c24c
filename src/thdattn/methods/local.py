"""Attention without an exchange: on one rank, and where every document has all its rows on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from thdattn.arguments import Array
from thdattn.engines import NEW_ARRAYS, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs
from thdattn.methods.base import MethodOptions, Results, key_buffers
from thdattn.plan.memory import Layer, Memory

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
    outputs = ForwardOutputs(max_logit=True) if max_logit else NEW_ARRAYS
    out, lse, logits = plan.engine.attn_fwd(inputs, options.attention, outputs)
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
    engine, layer = plan.engine, layer._replace(groups=(layer.num_kv_heads,))
    work = key_buffers(plan, layer.num_kv_heads, layer.dtype) if plan.has_unseen_keys else []
    forward = [*engine.plan_buffers(plan).values(), *work, *engine.forward_buffers(plan, layer)]
    return layer.memory(plan, forward, engine.backward_buffers(plan, layer, layer.dtype, "given"))


def _in_sequence_order(inputs: _Inputs, keys: GatheredKV | None) -> _Inputs:
    """Return inputs whose keys and values have neither fillers at the end nor what padding held."""
    if keys is not None:
        keys.used = True
    k: Array = inputs.k
    v: Array = inputs.v
    plan: Plan = inputs.plan
    if plan.has_unseen_keys:
        into = [*map(plan.workspace.array, key_buffers(plan, k.shape[1], k.dtype))]
        k, v = plan.engine.to_sequence_order([[k], [v]], plan, into)
    elif len(k) == plan.key_rows:
        return inputs
    else:
        k, v = k[: plan.key_rows], v[: plan.key_rows]
    return inputs._replace(k=k, v=v)
