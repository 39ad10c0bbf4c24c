"""Oracle: the exact answer, and how far a 16-bit implementation may be from it.

It works from the rule on positions, one document at a time, and shares no code with the plan or the engines.
A key at position j is visible to a query at position p of the same document iff

    (left < 0 or j >= p - left)  and  (j <= p if causal else (right < 0 or j <= p + right))

Where a document has another number of keys than of queries, its last query stands at its last key, as in flash-attn.
Query i of n is then at position p = i + number of keys - n. A query that sees no key gives out 0 and lse -inf.

In a prefix tree a key is visible to a query iff its node is an ancestor of the query's node, or the same node and not
later. This follows from the parents of nodes alone, not from ranges of rows.

A logit is scale * q.k or, with a softcap, cap * tanh(scale * q.k / cap). A sink is one more logit of every row of a
head, without a value: it takes part in the sum, and so in lse, where the row sees a key.

`attention` in float64 is the truth. Two baselines say how far from it an implementation may be. Plain attention rounds
every matrix to 16 bits; fused attention rounds only what a tensor core has to read. `truth` makes all three, and its
`judge` holds a result against them.

Source: the rule on the largest error is that of the tests of FlashAttention, github.com/Dao-AILab/flash-attention:
at most twice that of plain attention in the same dtype. Where one value is rounded twice hides in it, so the RMS error
has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from thdattn.packing import PackedBatch

__all__ = ["Result", "Truth", "Verdict", "attention", "judge", "packed_attention", "truth"]

Array = NDArray[Any]

MAX_BLOCK_ROWS = 256
MAX_BLOCK_SCORES = 2**23  # num_heads * rows * keys held at once: 64 MiB of float64


@dataclass(frozen=True)
class Result:
    """Attention of one document or of a packed batch; all arrays are float64.

    Attributes:
        out: (rows, num_heads, v_head_dim).
        lse: (num_heads, rows), natural log of the softmax sum of the scaled logits.
        max_logit: (num_heads,), largest scaled logit; -inf without rows.
        dq, dk, dv: shapes of q, k, v; None without dout.
        dsinks: (num_heads,), gradient of the sinks; None without dout or sinks.
    """

    out: Array
    lse: Array
    max_logit: Array
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dsinks: Array | None = None


def attention(
    q: Array, k: Array, v: Array, dout: Array | None = None, *,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    rounding: DTypeLike | None = None,
    fused: bool = False,
    softcap: float = 0.0,
    sinks: Array | None = None,
    visible: Array | None = None,
) -> Result:
    """Compute attention of one document with itself or with other keys, and its gradients if dout is given.

    Args:
        q: (length, num_heads, head_dim), any float dtype.
        k: (keys, num_kv_heads, head_dim); query head h reads kv head h // (num_heads // num_kv_heads).
        v: (keys, num_kv_heads, v_head_dim).
        dout: (length, num_heads, v_head_dim), gradient of out.
        causal: no key after the query; the right side of the window is then not looked at.
        window: (left, right), positions before and after the query that it sees; -1 = unlimited.
        softmax_scale: factor on q.k; head_dim**-0.5 by default.
        rounding: None for float64 throughout. A 16-bit dtype for a baseline: float32 arithmetic, with the
            scores, P, out, dP, dS, dq, dk, dv each rounded to that dtype, as plain attention stores them.
        fused: round only out, dq, dk, dv and, once, the operands of matrix products: P = exp(score - lse) for dv, dS
            for dq and dk, and for out exp(score - largest score), which is divided by its sum afterwards.
            Scores, P, dP and dS stay in float32. dS needs rowsum(dout * out), and that out is the rounded one.
        softcap: the cap of logits, > 0; 0: none.
        sinks: (num_heads,), a logit for every head that has no value; None: none.
        visible: (length, keys) bool, the pairs that count, instead of those of causal and window.

    Returns:
        `Result`, float64 (for a baseline: the rounded values).

    Raises:
        ValueError: shapes that do not belong together.
    """
    _check_shapes(q, k, v, dout)
    heads, kv_heads = q.shape[1], k.shape[1]
    scale = q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
    arithmetic = _Arithmetic.of(rounding, fused)
    qh, kh, vh = (_by_head(arithmetic.stored(x), heads) for x in (q, k, v))
    doh = None if dout is None else _by_head(arithmetic.stored(dout), heads)
    blocks = _row_blocks(len(q), len(k), heads, causal, window, visible)
    lse, max_logit, dsinks, *made = _by_blocks((qh, kh, vh, doh, sinks), blocks, scale, softcap, arithmetic)
    out, dq, dk, dv = (
        arithmetic.stored(_by_row(x, num)).astype(np.float64)
        for x, num in zip(made, (heads, heads, kv_heads, kv_heads), strict=True)
    )
    if dout is None:
        return Result(out, lse, max_logit)
    return Result(out, lse, max_logit, dq, dk, dv, None if sinks is None else dsinks)


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
    fused: bool = False,
    key_batch: PackedBatch | None = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> Result:
    """Compute `attention` of every document of a packed batch, in sequence order.

    Args:
        batch: lengths and row offsets, and nodes of trees, whose mask replaces causal and window; on the host.
        q, k, v, dout: (total_rows, heads, width), otherwise as in `attention`; padding rows are never read.
        causal, window, softmax_scale, rounding, fused, softcap, sinks: as in `attention`.
        key_batch: lengths and row offsets of k and v, as many documents; None: those of the queries.

    Returns:
        `Result` over all rows: padding rows are exactly 0 (lse: -inf); max_logit is over all documents.

    Raises:
        ValueError: shapes that do not belong together, or to the batch.
    """
    key_batch = batch if key_batch is None else key_batch
    for name, x, lengths in (("q", q, batch), ("k", k, key_batch)):
        if len(x) != lengths.total_rows:
            raise ValueError(
                f"{name} has {len(x)} rows, the batch total_rows = {lengths.total_rows}; pass all packed rows"
            )
    _check_shapes(q, k, v, dout)
    num_heads = q.shape[1]
    out = np.zeros((len(q), num_heads, v.shape[2]))
    lse = np.full((num_heads, len(q)), -np.inf)
    max_logit = np.full(num_heads, -np.inf)
    dq, dk, dv, dsinks = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros(num_heads)
    documents = _documents(batch)
    masks = [None] * len(documents) if batch.parents is None else _tree_masks(batch)
    for rows, keys, visible in zip(documents, _documents(key_batch), masks, strict=True):
        document = attention(
            q[rows], k[keys], v[keys], None if dout is None else dout[rows],
            causal=causal, window=window, softmax_scale=softmax_scale, rounding=rounding, fused=fused, softcap=softcap,
            sinks=sinks, visible=visible,
        )
        out[rows], lse[:, rows] = document.out, document.lse
        max_logit = np.maximum(max_logit, document.max_logit)
        if document.dq is not None:
            dq[rows], dk[keys], dv[keys] = document.dq, document.dk, document.dv
        if document.dsinks is not None:
            dsinks += document.dsinks
    if dout is None:
        return Result(out, lse, max_logit)
    return Result(out, lse, max_logit, dq, dk, dv, None if sinks is None else dsinks)


class Verdict(NamedTuple):
    """Errors of a result against the oracle, and their budgets; `judge` makes it.

    Attributes:
        rms, rms_budget: RMS error, and the largest one that is allowed.
        largest, largest_budget: largest error, and the largest one that is allowed.
    """

    rms: float
    rms_budget: float
    largest: float
    largest_budget: float

    @property
    def good(self) -> bool:
        """Tell if both errors are within their budgets; an error that is NaN is not."""
        return self.rms <= self.rms_budget and self.largest <= self.largest_budget

    def __str__(self) -> str:
        return (f"RMS error {self.rms:.3e}, budget {self.rms_budget:.3e}; "
                f"largest {self.largest:.3e}, budget {self.largest_budget:.3e}")


@dataclass(frozen=True)
class Truth:
    """Oracle's answer, and the baselines that a result is compared with; `truth` makes it.

    Attributes:
        exact: attention in float64.
        plain: attention that rounds every matrix to the dtype; for float64 it is exact.
        fused: attention that rounds only what a tensor core reads; None for float32 and float64.
    """

    exact: Result
    plain: Result
    fused: Result | None

    def judge(self, name: str, actual: Array) -> Verdict:
        """Judge one field of a result; lse and max_logit are compared with plain attention alone.

        Args:
            name: a field of `Result`, but not dsinks: its few sums may be right by luck in a baseline.
            actual: the field of the result, in the shape of `exact`.
        """
        fused = self.fused if name in ("out", "dq", "dk", "dv") else None
        exact, plain = getattr(self.exact, name), getattr(self.plain, name)
        return judge(actual, exact, plain, None if fused is None else getattr(fused, name))


def truth(
    batch: PackedBatch, q: Array, k: Array, v: Array, dout: Array | None = None, *, dtype: DTypeLike | None = None,
    **how: Any,
) -> Truth:
    """Compute the oracle over a packed batch, and its baselines in dtype (by default that of q).

    Args:
        batch, q, k, v, dout: as in `packed_attention`.
        how: causal, window, softmax_scale, key_batch, softcap, sinks, as there.
    """
    dtype = np.dtype(q.dtype if dtype is None else dtype)
    exact = packed_attention(batch, q, k, v, dout, **how)
    plain = packed_attention(batch, q, k, v, dout, **how, rounding=dtype) if dtype != np.float64 else exact
    fused = packed_attention(batch, q, k, v, dout, **how, rounding=dtype, fused=True) if dtype.itemsize == 2 else None
    return Truth(exact, plain, fused)


def judge(actual: Array, exact: Array, plain: Array, fused: Array | None = None) -> Verdict:
    """Hold a result against the oracle and the baselines.

    The largest error may be 2 max|plain - exact|, plus what nobody can avoid, even where plain attention happens to be
    exact. The result has to be stored, which costs half a unit in the last place of the largest value. And 4 width eps
    of the accumulator are added, for rows that see one key. There dP - delta is 0 in exact arithmetic: two sums of
    width terms of order one cancel, and leave their rounding.

    The RMS error may be (1.05 + s) rms(fused - exact), added in quadrature to sqrt(width) eps of the accumulator, the
    RMS of that same cancellation. An implementation that rounds what fused attention rounds differs from it where a sum
    in another order rounds to the neighbour. Suppose that the two shared no rounding at all, and that rows were
    independent. The quotient of their RMS errors would be 1 with the standard deviation s = sqrt(sum E^2 / 2) / sum E.
    E is the sum of the squares of fused - exact in one row of one head. s falls with the square root of the number of
    rows that matter. Without fused, for arithmetic that rounds nothing but its sums, the RMS error may be twice that of
    plain attention.

    Args:
        actual: the result in the dtype in which it was stored; infinities must stand where the oracle's do.
        exact, plain, fused: the same shape, float64: of `attention` without and with `rounding`, and with `fused`.

    Returns:
        The errors and their budgets; an error is NaN if actual has one.
    """
    accumulator = np.float64 if actual.dtype == np.float64 else np.float32
    width = actual.shape[-1] if actual.ndim == 3 else 1
    noise = float(np.finfo(accumulator).eps)
    error = _error(actual.astype(np.float64), exact)
    plain_error = _error(plain, exact)
    largest_value = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
    eps = float(ml_dtypes.finfo(actual.dtype).eps)  # type: ignore[no-untyped-call]
    half_unit = eps / 4 * 2.0 ** np.frexp(largest_value)[1] if largest_value else 0.0
    if fused is None:
        share = 2 * _rms(plain_error)
    else:
        fused_error = _error(fused, exact)
        squares = (fused_error**2).sum(axis=-1)
        spread = np.sqrt((squares**2).sum() / 2) / squares.sum() if squares.any() else 0.0
        share = (1.05 + spread) * _rms(fused_error)
    return Verdict(
        rms=_rms(error),
        rms_budget=float(np.hypot(share, width**0.5 * noise)),
        largest=float(error.max(initial=0.0)),
        largest_budget=float(2 * plain_error.max(initial=0.0) + half_unit + 4 * width * noise),
    )


class _Arithmetic(NamedTuple):
    """Rounding of stored arrays, and of arrays that only fused attention need not store.

    Both results are in the dtype of the arithmetic.
    """

    stored: Callable[[Array], Array]
    kept: Callable[[Array], Array]
    fused: bool

    @classmethod
    def of(cls, rounding: DTypeLike | None, fused: bool) -> _Arithmetic:
        """Return the arithmetic that `attention` is asked for."""

        def stored(x: Array) -> Array:
            return x.astype(np.float64) if rounding is None else x.astype(rounding).astype(np.float32)

        return cls(stored, (lambda x: x) if fused else stored, fused)


def _by_blocks(
    arrays: tuple[Array, Array, Array, Array | None, Array | None], blocks: Iterator[tuple[slice, slice, Array]],
    scale: float, softcap: float, arithmetic: _Arithmetic,
) -> tuple[Array, ...]:
    """Return lse, max_logit, dsinks, out, dq, dk, dv over the blocks of `_row_blocks`, by head, as arguments are.

    The last four are not yet rounded as they are stored; gradients are 0 without dout.
    """
    q, k, v, dout, sinks = arrays
    stored, kept, fused = arithmetic
    out, lse = np.zeros((*q.shape[:2], v.shape[2]), q.dtype), np.full(q.shape[:2], -np.inf)
    dq, dk, dv, dsinks = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(len(q))
    max_logit = np.full(len(q), -np.inf)
    sink = np.full(len(q), -np.inf, q.dtype) if sinks is None else sinks.astype(q.dtype)
    for rows, keys, visible in blocks:
        logits, slope = _capped(scale * kept(q[:, rows] @ k[:, keys].swapaxes(1, 2)), softcap)
        weights, total, lse[:, rows], top = _softmax(np.where(visible, logits, -np.inf), sink)
        max_logit = np.maximum(max_logit, top)
        p = kept(weights / total)
        out[:, rows] = stored(stored(weights) @ v[:, keys] / total if fused else p @ v[:, keys])
        if dout is None:
            continue
        dp = kept(dout[:, rows] @ v[:, keys].swapaxes(1, 2))
        delta = (dout[:, rows] * out[:, rows] if fused else p * dp).sum(axis=-1, keepdims=True)
        ds = stored(p * (dp - delta) * slope)
        share = np.exp(sink[:, None] - np.where(lse[:, rows] == -np.inf, np.inf, lse[:, rows]))  # of the sink
        dsinks -= (share * delta[..., 0]).sum(axis=1)
        dq[:, rows] = scale * (ds @ k[:, keys])
        dk[:, keys] += scale * (ds.swapaxes(1, 2) @ q[:, rows])
        dv[:, keys] += stored(p).swapaxes(1, 2) @ dout[:, rows]
    return lse, max_logit, dsinks, out, dq, dk, dv


def _capped(logits: Array, softcap: float) -> tuple[Array, Array | float]:
    """Return the capped logits, and the slope of the cap there."""
    if not softcap:
        return logits, 1.0
    share = np.tanh(logits / softcap)
    return softcap * share, 1 - share**2


def _by_head(x: Array, num_heads: int) -> Array:
    """Turn (length, heads, width) into (num_heads, length, width): a kv head is repeated for each of its heads."""
    return np.repeat(x, num_heads // x.shape[1], axis=1).swapaxes(0, 1)


def _by_row(x: Array, num_heads: int) -> Array:
    """Turn (heads, length, width) into (length, num_heads, width): transpose of `_by_head`, so copies are summed."""
    heads, length, width = x.shape
    summed: Array = x.reshape(num_heads, heads // num_heads, length, width).sum(axis=1)
    return summed.swapaxes(0, 1)


def _documents(batch: PackedBatch) -> list[slice]:
    """Return the rows of every document's tokens."""
    begins, lengths = batch.cu_seqlens_padded[:-1].tolist(), batch.lengths.tolist()
    return [slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]


def _tree_masks(batch: PackedBatch) -> list[Array]:
    """Return which key each query of every tree sees, (length, length) bool, from the parents of nodes alone."""
    parents = np.asarray(batch.parents).tolist()
    trees: list[list[int]] = []
    for node, parent in enumerate(parents):
        if parent < 0:
            trees.append([])
        trees[-1].append(node)
    lengths, masks = np.diff(np.asarray(batch.nodes)), []
    for nodes in trees:
        sees = np.zeros((len(nodes), len(nodes)), bool)
        for node in nodes:
            above = parents[node]
            while above >= 0:
                sees[node - nodes[0], above - nodes[0]] = True
                above = parents[above]
        node_of = np.repeat(np.arange(len(nodes)), lengths[nodes])
        earlier = np.tri(len(node_of), dtype=bool) & (node_of[:, None] == node_of)
        masks.append(sees[node_of[:, None], node_of] | earlier)
    return masks


def _row_blocks(
    length: int, num_keys: int, num_heads: int, causal: bool, window: tuple[int, int], pairs: Array | None
) -> Iterator[tuple[slice, slice, Array]]:
    """Yield blocks of query rows, the keys in reach of any of them, and which pairs are visible; none if no pair is."""
    left, right = (-1, -1) if pairs is not None else window
    causal = causal and pairs is None
    step = max(1, min(MAX_BLOCK_ROWS, MAX_BLOCK_SCORES // (num_heads * max(1, num_keys))))
    for first in range(0, length, step):
        p = np.arange(first, min(first + step, length))[:, None] + num_keys - length
        begin = max(0, int(p[0, 0]) - left) if left >= 0 else 0
        reach = 0 if causal else right
        end = min(num_keys, int(p[-1, 0]) + reach + 1) if reach >= 0 else num_keys
        if begin >= end:
            continue
        j = np.arange(begin, end)
        visible = ((left < 0) | (j >= p - left)) & ((j <= p) if causal else ((right < 0) | (j <= p + right)))
        visible = visible if pairs is None else pairs[first : first + len(p)]
        yield slice(first, first + len(p)), slice(begin, end), visible


def _softmax(logits: Array, sinks: Array) -> tuple[Array, Array, Array, Array]:
    """Return exp(logits - the row's largest), its sum with the sink's, lse per row, and the largest logit per head.

    A row without a finite logit has weights 0, which any sum divides; its lse is -inf.
    """
    top = logits.max(axis=-1, keepdims=True)
    sees = top != -np.inf
    base, sink = np.where(sees, top, 0), np.where(sees, sinks[:, None, None], -np.inf)
    weights = np.exp(logits - base)
    total = np.where(sees, weights.sum(axis=-1, keepdims=True), 1)
    lse = np.logaddexp(top + np.log(total), sink)
    with np.errstate(over="ignore"):  # a sink far above all logits leaves them nothing
        total = total + np.exp(sink - base)
    return weights, total, lse[..., 0], top.max(axis=(1, 2))


def _error(actual: Array, exact: Array) -> Array:
    """Return |actual - exact|, where equal infinities differ by 0."""
    with np.errstate(invalid="ignore"):
        return np.where(actual == exact, 0.0, np.abs(actual - exact))


def _rms(error: Array) -> float:
    return float(np.sqrt(np.mean(error**2))) if error.size else 0.0


def _check_shapes(q: Array, k: Array, v: Array, dout: Array | None) -> None:
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 3:
            raise ValueError(f"{name} has shape {x.shape}, wanted (rows, heads, width)")
    if len(v) != len(k):
        raise ValueError(f"v has shape {v.shape}, wanted ({len(k)}, heads, width): as many rows as k")
    if k.shape[1:] != (v.shape[1], q.shape[2]) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q, k, v have (heads, width) {q.shape[1:]}, {k.shape[1:]}, {v.shape[1:]}; wanted the same "
            "heads in k and v, a divisor of those of q, and the same width in q and k"
        )
    if dout is not None and dout.shape != (*q.shape[:2], v.shape[2]):
        raise ValueError(f"dout has shape {dout.shape}, wanted {(*q.shape[:2], v.shape[2])}: that of out")
