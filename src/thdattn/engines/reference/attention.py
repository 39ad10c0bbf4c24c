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

from thdattn.engines import NEW_ARRAYS, AttentionOptions, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs
from thdattn.engines.reference import arrays
from thdattn.engines.reference.blocks import Mask, attend, gradients, row_blocks
from thdattn.plan.memory import Layer
from thdattn.plan.owners import partials_of_keys
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import Buffer
from thdattn.spans import on_host

Array = NDArray[Any]


def forward_buffers(plan: Plan, layer: Layer) -> list[Buffer]:
    """Declare the work buffers of attn_fwd: none."""
    return []


def backward_buffers(plan: Plan, layer: Layer, sum_dtype: np.dtype[Any], where: str) -> list[Buffer]:
    """Declare the work buffers of attn_bwd.

    Args:
        layer: the layer; attn_bwd computes one group of its heads at a time.
        sum_dtype: dtype of dk and dv.
        where: dk and dv are "made" by attn_bwd, written to "given" arrays, or sent to the ranks that "own" the keys.
    """
    return partials_of_keys(plan, layer, sum_dtype, where)


def plan_backward(plan: Plan) -> None:
    """Prepare a plan for its first backward, which needs nothing here."""


@on_host
def attn_fwd(
    inputs: ForwardInputs, options: AttentionOptions, outputs: ForwardOutputs = NEW_ARRAYS,
    on_first_part: Callable[[], Any] | None = None,
) -> tuple[Array, Array, Array | None]:
    """Compute attention of this rank's query rows over the whole key buffer.

    Args:
        on_first_part: called once, between the query tiles of plan.first_tiles and all others.
            Until then rows of other ranks may hold any finite numbers. Not with outputs.accumulate.

    Returns:
        out: (local_rows, num_heads, v_head_dim), dtype of q; exactly 0 where the range is empty.
        lse: (num_heads, local_rows), float32 (float64 for float64 input), natural log, the sink included; -inf there.
        max_logit: (num_heads,) float32, the largest logit of a key, -inf if every range is empty; None if not wanted.
    """
    q, k, v, plan, sinks = inputs
    local_rows, num_heads, _ = q.shape
    num_kv_heads, v_head_dim = v.shape[1:]
    dtype = _compute_dtype(q.dtype)
    out, lse = outputs.arrays or (arrays.empty((local_rows, num_heads, v_head_dim), q.dtype),
                                  arrays.empty((num_heads, local_rows), dtype))
    if on_first_part is not None:
        max_logit = _in_two_parts(inputs, options, out, lse, on_first_part)
        return out, lse, max_logit if outputs.max_logit else None
    rows, blocks = row_blocks(plan.key_ranges, num_heads)
    mask = _mask(plan, rows)
    scaled_q = _group_heads(q[rows], num_kv_heads, dtype) * dtype.type(options.softmax_scale)
    keys, values = _heads_first(k, dtype), _heads_first(v, dtype)
    o, row_lse, row_max = attend(scaled_q, keys, values, mask, blocks, options.softcap)
    if not outputs.accumulate:
        out[...], lse[...] = 0, -np.inf
    o, row_lse = _ungroup_heads(o), row_lse.swapaxes(1, 2).reshape(num_heads, -1)
    if sinks is not None:
        o, row_lse = _merged(o, row_lse, None, sinks[:, None])
    if outputs.accumulate:
        o, row_lse = _merged(o, row_lse, out[rows], lse[:, rows])
    out[rows], lse[:, rows] = o.astype(out.dtype), row_lse
    if not outputs.max_logit:
        return out, lse, None
    return out, lse, row_max.max(axis=1, initial=-np.inf).reshape(num_heads).astype(np.float32)


def _mask(plan: Plan, rows: Array) -> Mask:
    """Return the mask of rows that see some key."""
    return Mask(rows, plan.key_ranges[rows], plan.query_ranges[:, 1] if plan.has_trees else None)


def _merged(o: Array, lse: Array, other_o: Array | None, other_lse: Array) -> tuple[Array, Array]:
    """Merge out and lse of rows over two sets of keys. other_o: None for a set without values, such as sinks."""
    both = np.logaddexp(other_lse, lse)
    o = o * np.exp(lse - both).T[..., None]
    return o if other_o is None else other_o * np.exp(other_lse - both).T[..., None] + o, both


def _in_two_parts(
    inputs: ForwardInputs, options: AttentionOptions, out: Array, lse: Array, on_first_part: Callable[[], Any]
) -> Array:
    """Compute attn_fwd for the tiles that come first, then for all other tiles; return max_logit."""
    q, k, v, plan, sinks = inputs
    is_first = np.repeat(plan.first_tiles[0], plan.tiles[0])[: len(q)]

    def some(rows: NDArray[np.bool_]) -> Array:
        before = np.append(0, np.cumsum(rows))  # rows of the part before each row
        part = replace(plan, arrays=replace(
            plan.arrays, key_ranges=plan.key_ranges[rows], query_ranges=before[plan.query_ranges]))
        out[rows], lse[:, rows], logits = attn_fwd(
            ForwardInputs(q[rows], k, v, part, sinks), options, ForwardOutputs(max_logit=True))
        assert logits is not None
        return logits

    first = some(is_first)
    on_first_part()
    return np.maximum(first, some(~is_first))


@on_host
def attn_bwd(
    inputs: BackwardInputs, options: AttentionOptions, outputs: BackwardOutputs,
    on_first_part: Callable[[Array, Array], None] | None = None,
) -> tuple[Array, Any, Any]:
    """Compute the gradients of attn_fwd; dk and dv are partial sums over this rank's query rows.

    P = exp(scale*S - lse), dS = P*(dout v^T - delta), dq = scale*dS k, dk = scale*dS^T q, dv = P^T dout. With a
    softcap, P = exp(L - lse), L = softcap*tanh(scale*S/softcap), and dS has one more factor, 1 - (L/softcap)^2. Sinks
    change nothing beyond out and lse, which include them.

    Args:
        options: blocks are always summed in the order of rows here, so that `deterministic` changes nothing.
        on_first_part: called once with dk and dv, when the key tiles of plan.first_tiles are complete. Other tiles
            may not be yet.

    Returns:
        dq: (local_rows, num_heads, head_dim), dtype of q; exactly 0 where the range is empty.
        dk: (key_rows, num_kv_heads, head_dim), outputs.kv_dtype; exactly 0 on rows that no local query sees.
        dv: (key_rows, num_kv_heads, v_head_dim), the same. dk and dv are None with outputs.owners.
    """
    dout, q, k, v, out, lse, plan = inputs
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    dtype = _compute_dtype(q.dtype)
    scale = dtype.type(options.softmax_scale)
    rows, blocks = row_blocks(plan.key_ranges, num_heads)
    mask = _mask(plan, rows)
    scaled_q = _group_heads(q[rows], num_kv_heads, dtype) * scale
    do = _group_heads(dout[rows], num_kv_heads, dtype)
    delta = (do * _group_heads(out[rows], num_kv_heads, dtype)).sum(axis=-1)
    row_lse = _group_heads(lse[:, rows].T[..., None], num_kv_heads, dtype)
    keys_values = _heads_first(k, dtype), _heads_first(v, dtype)
    grad_q, grad_k, grad_v = gradients(do, scaled_q, keys_values, (row_lse, delta), mask, blocks, options.softcap)

    dq = arrays.empty(q.shape, q.dtype) if outputs.dq is None else outputs.dq
    if not outputs.accumulate:
        dq[...] = 0
    dq[rows] = (dq[rows] + _ungroup_heads(grad_q * scale)).astype(dq.dtype)
    dk, dv = outputs.dk_dv or [arrays.empty(x.shape, outputs.kv_dtype) for x in (k, v)]
    dk[...], dv[...] = (x.swapaxes(0, 1) for x in (grad_k, grad_v))
    if outputs.own_rows:
        _round_own(dk, dv, outputs.own_rows, plan.arrays.places)
    if outputs.owners is not None:
        _send_to_owners(dk, dv, *outputs.owners)
        return dq, None, None
    if on_first_part is not None:
        on_first_part(dk, dv)
    return dq, dk, dv


def _round_own(dk: Array, dv: Array, own_rows: Sequence[Array], places: Array) -> None:
    """Move rows that have places to `own_rows`; see BackwardOutputs."""
    mine = places >= 0
    for x, result in zip((dk, dv), own_rows, strict=True):
        result[places[mine]] = x[mine]
        x[mine] = np.nan


def _send_to_owners(dk: Array, dv: Array, partials: Any, places: Array) -> None:
    """Copy every row to the rank that owns it; see BackwardOutputs."""
    for x, ranks in zip((dk, dv), partials, strict=True):
        for rank, theirs in enumerate(ranks):
            mine = places[:, 0] == rank
            theirs[places[mine, 1]] = x[mine]


@on_host
def sinks_grad(dout: Array, out: Array, lse: Array, sinks: Array) -> Array:
    """Return this rank's partial sum of the gradient of sinks, (num_heads,), dtype of sinks.

    The probability of a sink in a row is exp(sink - lse), and its dS is that * (0 - delta).

    Args:
        dout, out: (local_rows, num_heads, v_head_dim).
        lse: (num_heads, local_rows), with the sinks; rows with lse -inf contribute nothing, NaN included.
        sinks: (num_heads,).
    """
    rows = np.flatnonzero(lse[0] != -np.inf)
    delta = (dout[rows].astype(sinks.dtype) * out[rows].astype(sinks.dtype)).sum(axis=2)
    grad: Array = -(np.exp(sinks[:, None] - lse[:, rows]) * delta.T).sum(axis=1)
    return grad


@on_host
def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Return a new array of the same numbers in a dtype."""
    return x.astype(dtype)


def nan_if_invalid(plan: Plan, *results: Array) -> None:
    """Make results NaN if the plan's lengths, on a GPU, are wrong; lengths on the host were checked."""


def _compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _heads_first(x: Array, dtype: np.dtype[Any]) -> Array:
    """Transpose (rows, heads, width) to (heads, rows, width), contiguous."""
    return np.ascontiguousarray(x.swapaxes(0, 1), dtype)


def _group_heads(x: Array, num_kv_heads: int, dtype: np.dtype[Any]) -> Array:
    """Transpose (rows, num_heads, width) to (num_kv_heads, rows, group, width), contiguous."""
    rows, num_heads, width = x.shape
    grouped = x.reshape(rows, num_kv_heads, num_heads // num_kv_heads, width)
    return np.ascontiguousarray(grouped.swapaxes(0, 1), dtype)


def _ungroup_heads(x: Array) -> Array:
    """Transpose (num_kv_heads, rows, group, width) to (rows, num_heads, width)."""
    num_kv_heads, rows, group, width = x.shape
    return x.swapaxes(0, 1).reshape(rows, num_kv_heads * group, width)
