"""Attention forward and backward over key ranges, in NumPy.

Work is proportional to visible pairs, up to the corners of the blocks that blocks.py makes.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, for the backward with `lse` and `delta`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thdattn.engines.reference import arrays
from thdattn.engines.reference.blocks import attend, gradients, row_blocks
from thdattn.plan.memory import Bytes, Layer
from thdattn.plan.owners import shares_bytes
from thdattn.plan.plan import Plan

Array = NDArray[Any]


def forward_bytes(plan: Plan, layer: Layer) -> Bytes:
    """Bytes of the work buffers of attn_fwd by name: none."""
    return {}


def backward_bytes(plan: Plan, layer: Layer, sum_dtype: DTypeLike, where: str) -> Bytes:
    """Bytes of the work buffers of attn_bwd by name.

    Args:
        layer: of which attn_bwd gets a group of heads at a time.
        sum_dtype: of dk and dv.
        where: dk and dv are "made" by attn_bwd, in arrays that are "given", or at "home", on the ranks that own them.
    """
    return shares_bytes(plan, layer, sum_dtype, where)


def plan_backward(plan: Plan) -> None:
    """What the backward asks of a plan before its first call: nothing."""


def attn_fwd(
    q: Array, k: Array, v: Array, plan: Plan, softmax_scale: float, return_max_logit: bool,
    into: tuple[Array, Array] | None = None, merge: bool = False, halfway: Callable[[], Any] | None = None,
    softcap: float = 0.0, sinks: Array | None = None, groups: Sequence[int] = (),
) -> tuple[Array, Array, Array | None]:
    """Attention of this rank's query rows over the whole key buffer.

    Args:
        q: (local_rows, num_heads, head_dim), rows as in `plan.key_ranges`.
        k: (key_rows, num_kv_heads, head_dim), sequence order.
        v: (key_rows, num_kv_heads, v_head_dim), sequence order.
        plan: gives `key_ranges`, (local_rows, 2) int32; empty for padding and for a query that sees no key.
        softmax_scale: factor on q.k.
        return_max_logit: also return the largest scaled logit of every head.
        into: arrays for out and lse, as q those of some of the heads of larger ones; None: new ones.
        merge: `into`, both in the dtype of lse, has attention over other keys, 0 and -inf if there was none; it becomes
            that over these keys too. Rows that see none of these stay as they are.
        halfway: called once, between the tiles that need no key of another rank and plan.foreign_tiles; until then rows
            of other ranks may be any finite numbers. Not with merge.
        softcap: logits are softcap * tanh(softmax_scale * q.k / softcap); 0: softmax_scale * q.k.
        sinks: (num_heads,), dtype of lse, one more logit of every row, without a value; None: none. Not with merge,
            where `into` may begin with it: 0 and the sinks, in rows that see a key.
        groups: kv heads of every group of heads that such calls are made for one after another, this one too, so that
            they share work buffers; none: of this one alone.

    Returns:
        out: (local_rows, num_heads, v_head_dim), dtype of q; exactly 0 where the range is empty.
        lse: (num_heads, local_rows), float32 (float64 for float64 input), natural log, with the sink; -inf there.
        max_logit: (num_heads,) float32, of keys alone, -inf if every range is empty; None if not asked for.
    """
    if halfway is not None:
        return _in_two(q, k, v, plan, softmax_scale, return_max_logit, into, halfway, softcap, sinks)
    local_rows, num_heads, _ = q.shape
    num_kv_heads, v_head_dim = v.shape[1:]
    dtype = _compute_dtype(q.dtype)
    rows, blocks = row_blocks(plan.key_ranges, num_heads)
    ranges = plan.key_ranges[rows]
    scaled_q = _group_heads(q[rows], num_kv_heads, dtype) * dtype.type(softmax_scale)
    keys, values = _heads_first(k, dtype), _heads_first(v, dtype)
    o, row_lse, row_max = attend(scaled_q, keys, values, ranges, blocks, softcap)
    shapes = ((local_rows, num_heads, v_head_dim), q.dtype), ((num_heads, local_rows), dtype)
    out, lse = into or [arrays.empty(*shape) for shape in shapes]
    if not merge:
        out[...], lse[...] = 0, -np.inf
    o, row_lse = _ungroup_heads(o), row_lse.swapaxes(1, 2).reshape(num_heads, -1)
    if sinks is not None:
        o, row_lse = _merged(o, row_lse, None, sinks[:, None])
    if merge:
        o, row_lse = _merged(o, row_lse, out[rows], lse[:, rows])
    out[rows], lse[:, rows] = o.astype(out.dtype), row_lse
    if not return_max_logit:
        return out, lse, None
    return out, lse, row_max.max(axis=1, initial=-np.inf).reshape(num_heads).astype(np.float32)


def _merged(o: Array, lse: Array, other_o: Array | None, other_lse: Array) -> tuple[Array, Array]:
    """out and lse of rows over two sets of keys, from those over each; None: what has no values, as sinks."""
    both = np.logaddexp(other_lse, lse)
    o = o * np.exp(lse - both).T[..., None]
    return o if other_o is None else other_o * np.exp(other_lse - both).T[..., None] + o, both


def _in_two(
    q: Array, k: Array, v: Array, plan: Plan, softmax_scale: float, return_max_logit: bool,
    into: tuple[Array, Array] | None, halfway: Callable[[], Any], softcap: float, sinks: Array | None,
) -> tuple[Array, Array, Array | None]:
    """attn_fwd of the tiles that see no key of another rank, then of the others."""
    num_rows, num_heads, _ = q.shape
    out, lse = into or (arrays.empty((num_rows, num_heads, v.shape[2]), q.dtype),
                        arrays.empty((num_heads, num_rows), _compute_dtype(q.dtype)))
    foreign = np.repeat(plan.foreign_tiles[0], plan.tiles[0])[:num_rows]

    def some(rows: NDArray[np.bool_]) -> Array:
        part = replace(plan, arrays=replace(plan.arrays, key_ranges=plan.key_ranges[rows]))
        out[rows], lse[:, rows], logits = attn_fwd(
            q[rows], k, v, part, softmax_scale, return_max_logit=True, softcap=softcap, sinks=sinks)
        assert logits is not None
        return logits

    first = some(~foreign)
    halfway()
    max_logit = np.maximum(first, some(foreign))
    return out, lse, max_logit if return_max_logit else None


def attn_bwd(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan, softmax_scale: float,
    kv_grad_dtype: DTypeLike, deterministic: bool, into: tuple[Array, Sequence[Array] | None] | None = None,
    merge: bool = False, halfway: Callable[[Array, Array], None] | None = None, rounded: Sequence[Array] | None = None,
    softcap: float = 0.0, homes: tuple[Any, Array] | None = None, groups: Sequence[int] = (),
) -> tuple[Array, Any, Any]:
    """Gradients of `attn_fwd`; dk and dv are this rank's share, a sum over its own query rows.

    P = exp(scale*S - lse), dS = P*(dout v^T - delta), dq = scale*dS k, dk = scale*dS^T q, dv = P^T dout. With a
    softcap, P = exp(L - lse), L = softcap*tanh(scale*S/softcap), and dS has one more factor, 1 - (L/softcap)^2. Sinks
    change nothing beyond lse, which has them, and out.

    Args:
        dout: (local_rows, num_heads, v_head_dim), gradient of out.
        q, k, v, plan, softmax_scale: as given to `attn_fwd`.
        out, lse: as returned by `attn_fwd`.
        kv_grad_dtype: dtype of dk and dv; they are summed in float32 (float64) and cast once.
        deterministic: part of the engine contract; blocks are always summed in row order here.
        into: an array for dq, as q that of some of the heads of a larger one; and two for dk and dv, or None; where
            there is none, results are new.
        merge: dq of `into`, in float32 (float64), is that of other keys, and added to; out and lse are of all keys.
        halfway: called once with dk and dv, when the plan.foreign_tiles have theirs, and others perhaps not yet.
        rounded: of needed rows, arrays as k and v of this rank: rows of dk and dv that have plan.arrays.places, not -1,
            go there and are rounded, and are then not in dk and dv, which are of float32 (float64).
        softcap, groups: as given to `attn_fwd`.
        homes: (of, places), and dk and dv are not returned: every row of them goes to the rank that owns it, in float32
            (float64). of: of dk and of dv, for every rank where this rank's share of its rows begins; here arrays,
            elsewhere a PARTIALS. places: (key_rows, 2) int32, the owner of every row, -1: nobody, and its row there.

    Returns:
        dq: (local_rows, num_heads, head_dim), dtype of q; exactly 0 where the range is empty.
        dk: (key_rows, num_kv_heads, head_dim), kv_grad_dtype; exactly 0 on rows that no local query sees.
        dv: (key_rows, num_kv_heads, v_head_dim), the same.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    dtype = _compute_dtype(q.dtype)
    scale = dtype.type(softmax_scale)
    rows, blocks = row_blocks(plan.key_ranges, num_heads)
    ranges = plan.key_ranges[rows]
    scaled_q = _group_heads(q[rows], num_kv_heads, dtype) * scale
    do = _group_heads(dout[rows], num_kv_heads, dtype)
    delta = (do * _group_heads(out[rows], num_kv_heads, dtype)).sum(axis=-1)
    row_lse = _group_heads(lse[:, rows].T[..., None], num_kv_heads, dtype)
    keys, values = _heads_first(k, dtype), _heads_first(v, dtype)
    grad_q, grad_k, grad_v = gradients(do, scaled_q, keys, values, row_lse, delta, ranges, blocks, softcap)

    dq, shares = into or (arrays.empty(q.shape, q.dtype), None)
    if not merge:
        dq[...] = 0
    dq[rows] = (dq[rows] + _ungroup_heads(grad_q * scale)).astype(dq.dtype)
    dk, dv = shares or [arrays.empty(x.shape, kv_grad_dtype) for x in (k, v)]
    dk[...], dv[...] = (x.swapaxes(0, 1) for x in (grad_k, grad_v))
    if rounded:
        _round_own(dk, dv, rounded, plan.arrays.places)
    if homes is not None:
        _send_home(dk, dv, *homes)
        return dq, None, None
    if halfway is not None:
        halfway(dk, dv)
    return dq, dk, dv


def _round_own(dk: Array, dv: Array, rounded: Sequence[Array], places: Array) -> None:
    """Moves rows that have places to `rounded`; see attn_bwd."""
    mine = places >= 0
    for x, result in zip((dk, dv), rounded, strict=True):
        result[places[mine]] = x[mine]
        x[mine] = np.nan


def _send_home(dk: Array, dv: Array, of: Any, places: Array) -> None:
    """Copies every row to the rank that owns it; see attn_bwd."""
    for x, ranks in zip((dk, dv), of, strict=True):
        for rank, home in enumerate(ranks):
            mine = places[:, 0] == rank
            home[places[mine, 1]] = x[mine]


def sinks_grad(dout: Array, out: Array, lse: Array, sinks: Array) -> Array:
    """The gradient of sinks: what this rank's query rows give to it, (num_heads,), dtype of sinks.

    The share of a sink in the softmax of a row is exp(sink - lse), and its dS is that * (0 - delta).

    Args:
        dout, out: (local_rows, num_heads, v_head_dim).
        lse: (num_heads, local_rows), with the sinks; rows where it is -inf give nothing, whatever they hold.
        sinks: (num_heads,).
    """
    rows = np.flatnonzero(lse[0] != -np.inf)
    delta = (dout[rows].astype(sinks.dtype) * out[rows].astype(sinks.dtype)).sum(axis=2)
    grad: Array = -(np.exp(sinks[:, None] - lse[:, rows]) * delta.T).sum(axis=1)
    return grad


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """A new array of the numbers in a dtype."""
    return x.astype(dtype)


def nan_if_invalid(plan: Plan, *results: Array) -> None:
    """What is done to results of wrong lengths on a GPU: nothing, as lengths on the host were checked."""


def _compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _heads_first(x: Array, dtype: np.dtype[Any]) -> Array:
    """(rows, heads, width) -> (heads, rows, width), contiguous."""
    return np.ascontiguousarray(x.swapaxes(0, 1), dtype)


def _group_heads(x: Array, num_kv_heads: int, dtype: np.dtype[Any]) -> Array:
    """(rows, num_heads, width) -> (num_kv_heads, rows, group, width), contiguous."""
    rows, num_heads, width = x.shape
    grouped = x.reshape(rows, num_kv_heads, num_heads // num_kv_heads, width)
    return np.ascontiguousarray(grouped.swapaxes(0, 1), dtype)


def _ungroup_heads(x: Array) -> Array:
    """(num_kv_heads, rows, group, width) -> (rows, num_heads, width)."""
    num_kv_heads, rows, group, width = x.shape
    return x.swapaxes(0, 1).reshape(rows, num_kv_heads * group, width)
