"""Nothing travels: on one rank, and where every document has all its rows on one rank, whichever that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from thdattn.methods.base import Call, Results, Tensors, lse_dtype
from thdattn.plan.memory import Layer, Memory, num_bytes

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.methods.all_gather import Keys
    from thdattn.plan.plan import Plan


def forward(
    engine: Any, comm: Comm, plan: Plan, q: Any, k: Any, v: Any, call: Call, return_max_logit: bool,
    keys: Keys | None = None,
) -> Results:
    """Attention of this rank's query rows over its own keys; see base.py.

    Args:
        keys: from gather, if that has been called before, which has brought nothing.
    """
    k, v = _in_sequence_order(engine, plan, k, v, keys)
    out, lse, max_logit = engine.attn_fwd(
        q, k, v, plan, call.softmax_scale, return_max_logit, softcap=call.softcap, sinks=call.sinks)
    if return_max_logit:
        engine.nan_if_invalid(plan, max_logit)
        comm.all_reduce(max_logit, "max")
    return Results(out, lse, max_logit, None)


def backward(
    engine: Any, comm: Comm, plan: Plan, dout: Any, saved: Tensors, call: Call, at_once: bool,
    keys: Keys | None = None,
) -> tuple[Any, Callable[[], tuple[Any, Any]]]:
    """Gradients of `forward` for this rank's rows of q, k, v; see base.py. dk and dv are there with dq."""
    q, k, v, out, lse, _ = saved
    k, v = _in_sequence_order(engine, plan, k, v, keys)
    dq, dk, dv = engine.attn_bwd(
        dout, q, k, v, out, lse, plan, call.softmax_scale, call.grad_dtype or k.dtype, call.deterministic,
        softcap=call.softcap)
    engine.nan_if_invalid(plan, dq, dk, dv)
    return dq, lambda: (dk, dv)


def memory(engine: Any, comm: Comm, plan: Plan, layer: Layer) -> Memory:
    """Bytes of all that forward and backward make, for a layer with this plan, which needs no arrays."""
    def rows_of(num_rows: int, num_heads: int) -> list[int]:
        return [num_bytes((num_rows, num_heads, width), layer.dtype) for width in plan.head_dims]

    queries, outs = rows_of(plan.local_rows, layer.num_heads)
    keys, values = rows_of(plan.local_key_rows, layer.num_kv_heads)
    layer = layer._replace(groups=(layer.num_kv_heads,))
    forward = {"plan": engine.plan_bytes(plan)}
    if plan.has_unseen_keys:
        forward["keys in sequence order"] = sum(rows_of(plan.key_rows, layer.num_kv_heads))
    forward |= engine.forward_bytes(plan, layer)
    backward = engine.backward_bytes(plan, layer, layer.dtype, "made")
    backward.pop("shares of dk and dv", None)  # which are dk and dv
    lse = num_bytes((layer.num_heads, plan.local_rows), lse_dtype(layer.dtype))
    saved = {"q": queries, "k": keys, "v": values, "out": outs, "lse": lse}
    return Memory(forward, backward, saved, {"dq": queries, "dk": keys, "dv": values})


def _in_sequence_order(engine: Any, plan: Plan, k: Any, v: Any, keys: Keys | None) -> tuple[Any, Any]:
    """Keys and values, which are so but for fillers at the end, without what padding held."""
    if keys is not None:
        keys.used = True
    if plan.has_unseen_keys:
        return tuple(engine.to_sequence_order([k], [v], plan))
    return (k, v) if len(k) == plan.key_rows else (k[: plan.key_rows], v[: plan.key_rows])
