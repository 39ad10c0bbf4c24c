"""Launchers for decoding: attention of few query rows over a KV cache, and rows written to the cache."""

from __future__ import annotations

import cupy
import numpy as np

from thdattn.engines import AttentionOptions
from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array, Gpu, Launch
from thdattn.engines.cuda.softcap import kind_of, logits_of
from thdattn.jit import compiler
from thdattn.kernels.configs import TILES
from thdattn.kernels.instances import Kind
from thdattn.kv_cache import KVCache
from thdattn.plan.plan import Plan


def cache_append(k: Array, v: Array, cache: KVCache) -> Array:
    """Append new rows to their sequences and return their key_ranges; see reference.cache_append."""
    new_rows = len(k) // cache.num_texts
    key_ranges, run = cache.memoize(("append", new_rows), lambda: _append(new_rows, cache))
    run(cache.k, k, _words(k), cache.v, v, _words(v))
    return key_ranges


def _append(new_rows: int, cache: KVCache) -> tuple[Array, Launch]:
    key_ranges = launch.empty((cache.num_texts * new_rows, 2), np.int32)
    fixed = cache.lengths, key_ranges, *map(np.int32, (new_rows, cache.capacity, *cache.window))
    return key_ranges, Launch(compiler.kernel("thd_cache_append"), (cache.num_texts,), 256, fixed, early=True)


def cache_fill(k: Array, v: Array, plan: Plan, cache: KVCache) -> None:
    """Copy sequence i of a pack to sequence i of the cache; see reference.cache_fill."""
    num_seqs, lengths = plan.key_batch.num_seqs, plan.arrays.lengths
    compiler.kernel("thd_cache_fill")(
        (-(-max(len(k), num_seqs) // 8),), 256,
        (cache.k, k, _words(k), cache.v, v, _words(v), cache.lengths, *plan.arrays.offsets[-1],
         launch.NONE if lengths is None else lengths.wrong, *map(np.int32, (num_seqs, len(k), cache.capacity))),
    )


def _words(x: Array) -> np.int32:
    """Return the number of 16-byte words of a row."""
    return np.int32(x.shape[1] * x.shape[2] * x.itemsize // 16)


def attn_decode(
    q: Array, key_ranges: Array, cache: KVCache, options: AttentionOptions, sinks: Array | None = None
) -> tuple[Array, Array]:
    """Compute attention of query rows over ranges of the cache's rows; lse stays until the next call.

    The number of key splits depends on the sizes of the cache and on the GPU alone, never on lengths. See
    reference.attn_decode.
    """
    (num_rows, num_heads, _), v_head_dim = q.shape, cache.v.shape[3]
    out, kind = launch.empty((num_rows, num_heads, v_head_dim), q.dtype), kind_of(options.softcap, sinks)
    lse, run = cache.memoize(
        ("decode", num_rows, num_heads, kind), lambda: _decode(launch.this_gpu(), num_rows, num_heads, cache, kind))
    run(q, cache.k, cache.v, out, lse, key_ranges, logits_of(options.softmax_scale, options.softcap),
        launch.NONE if sinks is None else sinks)
    return out, lse


def _decode(gpu: Gpu, num_rows: int, num_heads: int, cache: KVCache, kind: Kind) -> tuple[Array, Launch]:
    """Return lse, which a replayed graph writes although no caller of decode holds it, and the launch."""
    *_, num_kv_heads, head_dim = cache.k.shape
    dims, group = (head_dim, cache.v.shape[3]), num_heads // num_kv_heads
    chosen = TILES[dims].decode
    blocks = num_kv_heads * -(-group // chosen.heads)  # of a row and part
    splits = chosen.splits(gpu.multiprocessors, num_rows * blocks, cache.longest_range)
    num_partials = num_rows * blocks * splits * min(group, chosen.heads) if splits > 1 else 0
    fixed = (launch.empty((num_partials, dims[1]), np.float32), launch.empty((num_partials, 2), np.float32),
             cupy.zeros(num_rows * blocks, np.uint32), np.int32(group))
    kernel = compiler.kernel(*chosen.kernel(dims, cache.k.dtype.name, kind))
    lse = launch.empty((num_heads, num_rows), np.float32)
    return lse, Launch(kernel, (num_rows, blocks, splits), 32 * chosen.warps, fixed, early=True)
