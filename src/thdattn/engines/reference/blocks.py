"""Attention of blocks of query rows in NumPy, and the partition of rows into blocks.

Arrays have shape (num_kv_heads, rows, group, width): query heads are grouped by the kv head that they read. One batched
product then serves a group without repeating k or v. Rows are those of `row_blocks`, which all see some key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MAX_BLOCK_ROWS = 128
MAX_BLOCK_SCORES = 2**24  # num_heads * rows * keys of one block: 64 MiB of float32 scores


class Mask(NamedTuple):
    """Pairs of query rows and key rows that count.

    Attributes:
        rows: (num_rows,), query rows, which all see some key, ascending.
        ranges: (num_rows, 2), [begin, end) of the keys that each row may see.
        query_end: (key_rows,), the first query row that no longer sees each key; None: ranges alone decide.
    """

    rows: Array
    ranges: Array
    query_end: Array | None

    def keys(self, block: list[int]) -> Array | slice:
        """Return the keys that some row of a block may see, as an index of arrays of keys."""
        row_begin, _, key_begin, key_end = block
        if self.query_end is None:
            return slice(key_begin, key_end)
        return key_begin + np.flatnonzero(self.query_end[key_begin:key_end] > self.rows[row_begin])

    def hidden(self, here: slice, keys: Array | slice) -> Array:
        """Return (rows, keys) bool, True where a row does not see a key."""
        key = np.arange(keys.start, keys.stop) if isinstance(keys, slice) else keys
        ranges = self.ranges[here]
        hidden: Array = (key < ranges[:, :1]) | (key >= ranges[:, 1:])
        return hidden if self.query_end is None else hidden | (self.rows[here, None] >= self.query_end[key])


def row_blocks(key_ranges: Array, num_heads: int) -> tuple[Array, Array]:
    """Partition the non-empty query rows into blocks of consecutive rows, each with the span of keys that they see.

    A block ends where the key ranges of two neighbouring rows do not overlap: at the next document, or between disjoint
    windows. So some row of the block sees every key of its span, and no span has padding or another document.

    Args:
        key_ranges: (local_rows, 2) int32, [begin, end) per query row.
        num_heads: query heads; a block holds at most MAX_BLOCK_SCORES scores, or one row.

    Returns:
        rows: (num_rows,), the rows with a non-empty range, ascending.
        blocks: (num_blocks, 4), row_begin, row_end (indices into `rows`), key_begin, key_end.
    """
    rows = np.flatnonzero(key_ranges[:, 0] < key_ranges[:, 1])
    if not len(rows):
        return rows, np.zeros((0, 4), np.int64)
    begin, end = key_ranges[rows].T.astype(np.int64)
    apart = np.maximum(begin[1:], begin[:-1]) >= np.minimum(end[1:], end[:-1])
    starts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    starts = _cut(starts, len(rows), np.full(len(starts), MAX_BLOCK_ROWS))

    span = np.maximum.reduceat(end, starts) - np.minimum.reduceat(begin, starts)
    starts = _cut(starts, len(rows), np.maximum(1, MAX_BLOCK_SCORES // (num_heads * span)))
    key_begin, key_end = np.minimum.reduceat(begin, starts), np.maximum.reduceat(end, starts)
    return rows, np.stack([starts, np.append(starts[1:], len(rows)), key_begin, key_end], axis=1)


def _cut(starts: Array, stop: int, limits: Array) -> Array:
    """Cut run i, from starts[i] to the next start or stop, every limits[i]; return the starts of all pieces."""
    pieces = -(-np.diff(starts, append=stop) // limits)
    first_piece = np.cumsum(pieces) - pieces
    index_in_run = np.arange(pieces.sum()) - np.repeat(first_piece, pieces)
    cut: Array = np.repeat(starts, pieces) + index_in_run * np.repeat(limits, pieces)
    return cut


def attend(
    q: Array, keys: Array, values: Array, mask: Mask, blocks: Array, softcap: float
) -> tuple[Array, Array, Array]:
    """Compute attention of rows over their key ranges.

    Args:
        q: (num_kv_heads, rows, group, head_dim), scaled.
        keys, values: (num_kv_heads, key_rows, width).

    Returns:
        out: (num_kv_heads, rows, group, v_head_dim).
        lse, max_logit: (num_kv_heads, rows, group), log of the softmax sum, and the largest logit.
    """
    o = np.empty((*q.shape[:3], values.shape[2]), q.dtype)
    row_max = np.empty(q.shape[:3], q.dtype)
    row_sum = np.empty(q.shape[:3], q.dtype)
    for block in blocks.tolist():
        here, seen = slice(*block[:2]), mask.keys(block)
        scores, _ = _logits(q[:, here], keys[:, seen], mask.hidden(here, seen), softcap)
        row_max[:, here] = scores.max(axis=-1)
        p = np.exp(scores - row_max[:, here, :, None], out=scores)
        row_sum[:, here] = p.sum(axis=-1)
        o[:, here] = (_merge_group(p) @ values[:, seen]).reshape(o[:, here].shape)
    o /= row_sum[..., None]
    return o, row_max + np.log(row_sum), row_max


def gradients(
    dout: Array, q: Array, keys_values: tuple[Array, Array], lse_delta: tuple[Array, Array], mask: Mask,
    blocks: Array, softcap: float,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of attend with respect to the scaled q, to keys and to values.

    Args:
        dout: (num_kv_heads, rows, group, v_head_dim).
        q, keys_values, mask, blocks, softcap: as for attend.
        lse_delta: (num_kv_heads, rows, group, 1); (num_kv_heads, rows, group), the sum of dout * out over each row.
    """
    (keys, values), (lse, delta) = keys_values, lse_delta
    grad_q = np.empty_like(q)
    grad_k, grad_v = np.zeros_like(keys), np.zeros_like(values)
    for block in blocks.tolist():
        here, seen = slice(*block[:2]), mask.keys(block)
        scores, slope = _logits(q[:, here], keys[:, seen], mask.hidden(here, seen), softcap)
        p = _merge_group(np.exp(scores - lse[:, here], out=scores))
        block_dout = _merge_group(dout[:, here])
        grad_v[:, seen] += p.swapaxes(1, 2) @ block_dout
        ds = block_dout @ values[:, seen].swapaxes(1, 2)
        ds -= delta[:, here].reshape(len(keys), -1, 1)
        ds *= p
        if slope is not None:
            ds *= _merge_group(slope)
        grad_q[:, here] = (ds @ keys[:, seen]).reshape(grad_q[:, here].shape)
        grad_k[:, seen] += ds.swapaxes(1, 2) @ _merge_group(q[:, here])
    return grad_q, grad_k, grad_v


def _logits(q: Array, k: Array, hidden: Array, softcap: float) -> tuple[Array, Array | None]:
    """Return logits (num_kv_heads, rows, group, keys), -inf where `hidden`, (rows, keys).

    Also return the derivative of the capped logits with respect to the uncapped ones; None without a softcap: 1.
    """
    logits, slope = (_merge_group(q) @ k.swapaxes(1, 2)).reshape(*q.shape[:3], k.shape[1]), None
    if softcap:
        share = np.tanh(logits / logits.dtype.type(softcap))
        logits, slope = share * logits.dtype.type(softcap), 1 - share**2
    np.copyto(logits, -np.inf, where=hidden[:, None, :])
    return logits, slope


def _merge_group(x: Array) -> Array:
    """Reshape (num_kv_heads, rows, group, width) to (num_kv_heads, rows*group, width), without a copy."""
    return x.reshape(x.shape[0], -1, x.shape[3])
