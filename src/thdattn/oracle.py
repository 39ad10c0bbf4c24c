"""The oracle: what the answer is, and how far a 16-bit implementation may be from it.

It works from the rule on positions, one document at a time, and shares no code with the plan or the engines.
A key at position j is visible to a query at position p of the same document iff

    (left < 0 or j >= p - left)  and  (j <= p if causal else (right < 0 or j <= p + right))

`attention` in float64 is the truth; with `rounding` it is the baseline, plain attention in a 16-bit dtype,
and `within_budget` compares an implementation with both.

Source: the accuracy rule is that of the tests of FlashAttention, github.com/Dao-AILab/flash-attention: an
error is acceptable if it is at most twice that of plain attention in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from thdattn.packing import PackedBatch

Array = NDArray[Any]

MAX_BLOCK_ROWS = 256
MAX_BLOCK_SCORES = 2**23  # num_heads * rows * keys held at once: 64 MiB of float64


@dataclass(frozen=True)
class Result:
    """Attention of one document or of a packed batch; all arrays float64.

    out: (rows, num_heads, v_head_dim)
    lse: (num_heads, rows), natural log of the softmax sum of the scaled logits
    max_logit: (num_heads,), largest scaled logit; -inf without rows
    dq, dk, dv: as q, k, v; None without dout
    """

    out: Array
    lse: Array
    max_logit: Array
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None


def attention(
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None = None,
    *,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    rounding: DTypeLike | None = None,
) -> Result:
    """Attention of one document with itself, and its gradients if dout is given.

    Args:
        q: (length, num_heads, head_dim), any float dtype.
        k: (length, num_kv_heads, head_dim); query head h reads kv head h // (num_heads // num_kv_heads).
        v: (length, num_kv_heads, v_head_dim).
        dout: (length, num_heads, v_head_dim), gradient of out.
        causal: no key after the query; the right side of the window is then not looked at.
        window: (left, right), positions before and after the query that it sees; -1 = unlimited.
        softmax_scale: factor on q.k; head_dim**-0.5 by default.
        rounding: None for float64 throughout. A 16-bit dtype for the baseline: float32 arithmetic, with the
            scores, P, out, dP, dS, dq, dk, dv each rounded to that dtype, as plain attention stores them.

    Returns:
        `Result`, float64 (for the baseline: the rounded values).

    Raises:
        ValueError: shapes that do not belong together.
    """
    _check_shapes(q, k, v, dout)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
    stored = _rounder(rounding)
    qh, kh, vh = (_by_head(stored(x), q.shape[1]) for x in (q, k, v))
    out = np.zeros((*qh.shape[:2], v.shape[2]), qh.dtype)
    lse = np.zeros(qh.shape[:2])
    max_logit = np.full(len(qh), -np.inf)
    doh = np.zeros_like(out) if dout is None else _by_head(stored(dout), q.shape[1])
    dq, dk, dv = np.zeros_like(qh), np.zeros_like(kh), np.zeros_like(vh)
    for rows, keys, visible in _row_blocks(len(q), q.shape[1], causal, window):
        logits = scale * stored(qh[:, rows] @ kh[:, keys].swapaxes(1, 2))
        p, lse[:, rows], top = _softmax(np.where(visible, logits, -np.inf))
        max_logit = np.maximum(max_logit, top)
        p = stored(p)
        out[:, rows] = p @ vh[:, keys]
        if dout is not None:
            dp = stored(doh[:, rows] @ vh[:, keys].swapaxes(1, 2))
            ds = stored(p * (dp - (p * dp).sum(axis=-1, keepdims=True)))
            dq[:, rows] = scale * (ds @ kh[:, keys])
            dk[:, keys] += scale * (ds.swapaxes(1, 2) @ qh[:, rows])
            dv[:, keys] += p.swapaxes(1, 2) @ doh[:, rows]

    out, dq, dk, dv = (
        stored(_by_row(x, heads)).astype(np.float64)
        for x, heads in ((out, q.shape[1]), (dq, q.shape[1]), (dk, k.shape[1]), (dv, k.shape[1]))
    )
    return Result(out, lse, max_logit) if dout is None else Result(out, lse, max_logit, dq, dk, dv)


def packed_attention(
    batch: PackedBatch,
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None = None,
    *,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    rounding: DTypeLike | None = None,
) -> Result:
    """`attention` of every document of a packed batch, in sequence order.

    Args:
        batch: lengths and row offsets; lengths on the host.
        q, k, v, dout: (total_rows, heads, width), otherwise as in `attention`; padding rows are never read.
        causal, window, softmax_scale, rounding: as in `attention`.

    Returns:
        `Result` over all rows: padding rows are exactly 0 (lse: -inf); max_logit is over all documents.

    Raises:
        ValueError: shapes that do not belong together, or to the batch.
    """
    if len(q) != batch.total_rows:
        raise ValueError(
            f"q has {len(q)} rows, the batch total_rows = {batch.total_rows}; pass all packed rows"
        )
    _check_shapes(q, k, v, dout)
    num_heads = q.shape[1]
    out = np.zeros((len(q), num_heads, v.shape[2]))
    lse = np.full((num_heads, len(q)), -np.inf)
    max_logit = np.full(num_heads, -np.inf)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for first, length in zip(batch.cu_seqlens_padded[:-1].tolist(), batch.lengths.tolist(), strict=True):
        rows = slice(first, first + length)
        document = attention(
            q[rows], k[rows], v[rows], None if dout is None else dout[rows],
            causal=causal, window=window, softmax_scale=softmax_scale, rounding=rounding,
        )  # fmt: skip
        out[rows], lse[:, rows] = document.out, document.lse
        max_logit = np.maximum(max_logit, document.max_logit)
        if document.dq is not None:
            dq[rows], dk[rows], dv[rows] = document.dq, document.dk, document.dv
    return Result(out, lse, max_logit) if dout is None else Result(out, lse, max_logit, dq, dk, dv)


def within_budget(
    actual: Array, oracle: Array, baseline: Array, factor: float = 2.0
) -> tuple[bool, float, float]:
    """Whether an implementation errs at most `factor` times as much as plain 16-bit attention.

    error = max|actual - oracle|, budget = factor * max|baseline - oracle| + floor. The floor is what nobody
    can avoid, even where the baseline happens to be exact. It is the sum of
    * eps of actual's dtype times the largest oracle value: the result has to be stored;
    * width times eps of the accumulator (float32; float64 for float64 results; width = 1 unless the array is
      (rows, heads, width)): where dP - delta is 0 in exact arithmetic, as for a row that sees one key, two
      sums of width terms of order one cancel, and leave their rounding.

    Args:
        actual: the result in the dtype in which it was stored; infinities must stand where the oracle's do.
        oracle, baseline: the same shape, float64, from `rounding=None` and from `rounding=` the 16-bit dtype.
        factor: 2 by FlashAttention's rule.

    Returns:
        ok, error, budget: error is nan, and ok False, if actual has a NaN.
    """
    accumulator = np.float64 if actual.dtype == np.float64 else np.float32
    width = actual.shape[-1] if actual.ndim == 3 else 1
    finite = np.abs(oracle[np.isfinite(oracle)])
    resolution = ml_dtypes.finfo(actual.dtype).eps  # type: ignore[no-untyped-call]
    floor = float(resolution) * finite.max(initial=0.0)
    floor += width * float(np.finfo(accumulator).eps)
    error = _max_error(actual.astype(np.float64), oracle)
    budget = float(factor * _max_error(baseline, oracle) + floor)
    return error <= budget, error, budget


def _rounder(rounding: DTypeLike | None) -> Callable[[Array], Array]:
    """What storing an array does to its values; the result is in the dtype of the arithmetic."""
    if rounding is None:
        return lambda x: x.astype(np.float64)
    return lambda x: x.astype(rounding).astype(np.float32)


def _by_head(x: Array, num_heads: int) -> Array:
    """(length, heads, width) -> (num_heads, length, width): a kv head is repeated for each of its heads."""
    return np.repeat(x, num_heads // x.shape[1], axis=1).swapaxes(0, 1)


def _by_row(x: Array, num_heads: int) -> Array:
    """(heads, length, width) -> (length, num_heads, width): transpose of `_by_head`, so copies are summed."""
    heads, length, width = x.shape
    summed: Array = x.reshape(num_heads, heads // num_heads, length, width).sum(axis=1)
    return summed.swapaxes(0, 1)


def _row_blocks(
    length: int, num_heads: int, causal: bool, window: tuple[int, int]
) -> Iterator[tuple[slice, slice, Array]]:
    """Blocks of query rows with the keys in reach of any of them, and which pairs are visible."""
    left, right = window
    step = max(1, min(MAX_BLOCK_ROWS, MAX_BLOCK_SCORES // (num_heads * max(1, length))))
    for first in range(0, length, step):
        p = np.arange(first, min(first + step, length))[:, None]
        begin = max(0, first - left) if left >= 0 else 0
        reach = 0 if causal else right
        end = min(length, p[-1, 0] + reach + 1) if reach >= 0 else length
        j = np.arange(begin, end)
        visible = ((left < 0) | (j >= p - left)) & ((j <= p) if causal else ((right < 0) | (j <= p + right)))
        yield slice(first, first + len(p)), slice(begin, end), visible


def _softmax(logits: Array) -> tuple[Array, Array, Array]:
    """P, lse per row and the largest logit per head; every row has a finite logit, its own position."""
    top = logits.max(axis=-1, keepdims=True)
    p = np.exp(logits - top)
    total = p.sum(axis=-1, keepdims=True)
    return p / total, (top + np.log(total))[..., 0], top.max(axis=(1, 2))


def _max_error(actual: Array, oracle: Array) -> float:
    """max|actual - oracle|, where equal infinities differ by 0."""
    with np.errstate(invalid="ignore"):
        difference = np.where(actual == oracle, 0.0, np.abs(actual - oracle))
    return float(difference.max(initial=0.0))


def _check_shapes(q: Array, k: Array, v: Array, dout: Array | None) -> None:
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 3 or len(x) != len(q):
            raise ValueError(
                f"{name} has shape {x.shape}, wanted ({len(q)}, heads, width): as many rows as q"
            )
    if k.shape[1:] != (v.shape[1], q.shape[2]) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q, k, v have (heads, width) {q.shape[1:]}, {k.shape[1:]}, {v.shape[1:]}; wanted the same "
            "heads in k and v, a divisor of those of q, and the same width in q and k"
        )
    if dout is not None and dout.shape != (*q.shape[:2], v.shape[2]):
        raise ValueError(f"dout has shape {dout.shape}, wanted {(*q.shape[:2], v.shape[2])}: that of out")
