"""Decoding in NumPy: attention of few query rows over a KV cache, and rows appended to the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdattn.engines import AttentionOptions
from thdattn.kv_cache import KVCache
from thdattn.plan.mask import in_sight
from thdattn.plan.plan import Plan
from thdattn.spans import on_host

Array = NDArray[Any]


@on_host
def attn_decode(
    q: Array, key_ranges: Array, cache: KVCache, options: AttentionOptions, sinks: Array | None = None
) -> tuple[Array, Array]:
    """Compute attention of few query rows over ranges of a cache's rows.

    Args:
        q: (num_rows, num_heads, head_dim).
        key_ranges: (num_rows, 2) int32, [begin, end) of sequence * capacity + row; may be empty.
        options: softmax_scale and softcap are used.
        sinks: as ForwardInputs has them.

    Returns:
        out: (num_rows, num_heads, v_head_dim), dtype of q; exactly 0 where the range is empty.
        lse: (num_heads, num_rows), float32 (float64 for float64 input), natural log; -inf there.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = cache.v.shape[2:]
    dtype = np.promote_types(q.dtype, np.float32)
    scaled_q = q.reshape(num_rows, num_kv_heads, -1, head_dim).astype(dtype) * dtype.type(options.softmax_scale)
    keys, values = (x.reshape(-1, *x.shape[2:]) for x in (cache.k, cache.v))
    out = np.zeros((num_rows, num_heads, v_head_dim), q.dtype)
    lse = np.full((num_heads, num_rows), -np.inf, dtype)
    for row in np.flatnonzero(key_ranges[:, 0] < key_ranges[:, 1]):
        seen = slice(*key_ranges[row])
        scores = scaled_q[row] @ keys[seen].astype(dtype).transpose(1, 2, 0)
        if options.softcap:
            softcap = dtype.type(options.softcap)
            scores = np.tanh(scores / softcap) * softcap
        row_max = scores.max(axis=-1, keepdims=True)
        p = np.exp(scores - row_max)
        row_sum = p.sum(axis=-1, keepdims=True)
        o = (p @ values[seen].astype(dtype).swapaxes(0, 1) / row_sum).reshape(num_heads, v_head_dim)
        lse[:, row] = row_lse = (row_max + np.log(row_sum)).reshape(num_heads)
        if sinks is not None:
            lse[:, row] = np.logaddexp(row_lse, sinks)
            o *= np.exp(row_lse - lse[:, row])[:, None]
        out[row] = o
    return out, lse


@on_host
def cache_append(k: Array, v: Array, cache: KVCache) -> Array:
    """Append new rows to their sequences and update lengths; only mark a sequence that does not fit.

    Args:
        k, v: (num_texts * new_rows, num_kv_heads, width), the new rows of sequence 0, then of sequence 1, ...
        cache: its k, v and lengths change.

    Returns:
        key_ranges: (num_texts * new_rows, 2) int32, keys that the new rows see, as rows sequence * capacity + row;
            (0, 0) for a sequence that does not fit.
    """
    new_rows = len(k) // cache.num_texts
    before = cache.lengths.copy()
    fits = before <= cache.capacity - new_rows
    cache.lengths[...] = np.where(fits, before + new_rows, cache.capacity + 1)
    for sequence in np.flatnonzero(fits):
        there = slice(before[sequence], cache.lengths[sequence])
        here = slice(sequence * new_rows, (sequence + 1) * new_rows)
        cache.k[sequence, there], cache.v[sequence, there] = k[here], v[here]
    position, length = before[:, None] + np.arange(new_rows), cache.lengths[:, None]
    seen = np.stack(in_sight(position, length, length, cache.window), axis=2)
    ranges = seen + cache.capacity * np.arange(cache.num_texts)[:, None, None]
    ranges[~fits] = 0
    return ranges.reshape(-1, 2).astype(np.int32)


@on_host
def cache_fill(k: Array, v: Array, plan: Plan, cache: KVCache) -> None:
    """Copy sequence i of a pack to sequence i of the cache, and replace the rows there.

    Args:
        k, v: (total_rows, num_kv_heads, width), sequence order.
        plan: gives the lengths, all at most the capacity.
        cache: its k, v and lengths change.
    """
    batch = plan.key_batch
    for sequence, (begin, length) in enumerate(zip(batch.cu_seqlens_padded[:-1], batch.lengths, strict=True)):
        cache.k[sequence, :length], cache.v[sequence, :length] = k[begin : begin + length], v[begin : begin + length]
    cache.lengths[...] = batch.lengths
