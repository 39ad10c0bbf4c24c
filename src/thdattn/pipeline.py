"""All-gather context parallelism, forward and backward, written once for every engine and every comm.

Keys and values are gathered from all ranks and moved to sequence order; each rank then computes its own query rows in
one launch, so every output row is made once and nothing has to be merged. The backward gathers again (cheaper than
keeping the buffer through a model's layers), and sums dk and dv over ranks in float32.

Source: Llama 3, arXiv:2407.21783, 3.3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.plan import Plan


def forward(
    engine: Any, comm: Comm, plan: Plan, q: Any, k: Any, v: Any, softmax_scale: float, return_max_logit: bool
) -> tuple[Any, Any, Any]:
    """Attention of this rank's query rows over the keys of all ranks.

    Args:
        engine: the module `reference` or `ops`.
        q, k, v: this rank's rows, (local_rows, heads, width), of k and v local_key_rows; the engine's arrays.
        return_max_logit: also the largest scaled logit per head over all ranks.

    Returns:
        (out, lse, max_logit or None), see CPAttention.forward.
    """
    keys, values = _gather(engine, comm, plan, k, v)
    out, lse, max_logit = engine.attn_fwd(q, keys, values, plan, softmax_scale, return_max_logit)
    if return_max_logit:
        comm.all_reduce(max_logit, "max")
    return out, lse, max_logit


def backward(
    engine: Any, comm: Comm, plan: Plan, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, softmax_scale: float,
    deterministic: bool,
) -> tuple[Any, Any, Any]:
    """Gradients of `forward` for this rank's rows of q, k, v.

    Returns:
        (dq, dk, dv): the shapes and dtypes of q, k, v; dk and dv summed over all ranks.
    """
    keys, values = _gather(engine, comm, plan, k, v)
    sum_dtype = k.dtype if comm.size == 1 else np.promote_types(k.dtype, np.float32)
    dq, dk, dv = engine.attn_bwd(
        dout, q, keys, values, out, lse, plan, softmax_scale, sum_dtype, deterministic
    )
    if comm.size > 1:
        dk_ranks, dv_ranks = engine.to_rank_order(dk, dv, plan)
        dk, dv = (_reduce(engine, comm, plan, *item) for item in (("dk", dk_ranks, k), ("dv", dv_ranks, v)))
    return dq, dk, dv


def _gather(engine: Any, comm: Comm, plan: Plan, k: Any, v: Any) -> tuple[Any, Any]:
    """Keys and values of all ranks in sequence order, without what padding held."""
    if comm.size > 1:
        k_ranks, v_ranks = (
            plan.buffer(name, (comm.size * plan.local_key_rows, *x.shape[1:]), x.dtype)
            for name, x in (("k_ranks", k), ("v_ranks", v))
        )
        comm.all_gather(k, k_ranks)
        comm.all_gather(v, v_ranks)
        k, v = k_ranks, v_ranks
    elif not plan.has_unseen_keys:
        return k, v  # one rank's rows are in sequence order already
    keys, values = engine.to_sequence_order(k, v, plan)
    return keys, values


def _reduce(engine: Any, comm: Comm, plan: Plan, name: str, ranks: Any, like: Any) -> Any:
    """This rank's rows of the sum over ranks, rounded once, at the end."""
    total = plan.buffer(f"{name}_sum", like.shape, ranks.dtype)
    comm.reduce_scatter(ranks, total)
    result = engine.empty(like.shape, like.dtype)
    result[...] = total
    return result
