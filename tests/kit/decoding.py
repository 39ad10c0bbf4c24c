"""Decode on either engine, for CPU and GPU tests: texts that grow in a cache, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from cases import to_host

import thdattn
from thdattn import oracle
from thdattn.fuzz import runs


def poison(array: Any) -> None:
    """Set all bits: NaN, or -1."""
    array.view(np.uint8)[...] = 0xFF


def attention(heads: tuple[int, int], dims: tuple[int, int], dtype: Any, **options: Any) -> thdattn.CPAttention:
    """Make an attention on one rank."""
    (num_heads, num_kv_heads), (head_dim, v_head_dim) = heads, dims
    comm = thdattn.comm.init("single")
    return thdattn.CPAttention(comm, num_heads, head_dim, num_kv_heads, v_head_dim, dtype=dtype, **options)


def normal(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(dtype)


@dataclass(frozen=True)
class Texts:
    """Texts as a whole: q, k, v [(length, heads, width)] each."""

    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]

    @classmethod
    def random(cls, lengths: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], dtype: Any) -> Texts:
        rng, (num_heads, num_kv_heads), (head_dim, v_head_dim) = np.random.default_rng(sum(lengths)), heads, dims
        shapes = (num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, v_head_dim)
        return cls(*([normal(rng, dtype, length, *shape) for length in lengths] for shape in shapes))

    @property
    def lengths(self) -> list[int]:
        return [len(x) for x in self.q]

    def truth(self, **mask: Any) -> oracle.Truth:
        """Return the oracle of all texts, packed."""
        batch = thdattn.PackedBatch.from_lengths(self.lengths)
        return oracle.truth(batch, *(np.concatenate(x) for x in (self.q, self.k, self.v)), **mask)


def decode_all(layer: thdattn.CPAttention, texts: Texts, prompts: tuple[int, ...], count: int, xp: Any) -> np.ndarray:
    """Return out (all rows, num_heads, v_head_dim), `count` rows at a time; the cache is NaN at first."""
    cache = layer.cache(len(prompts), max(texts.lengths) + count)
    poison(cache.k)
    poison(cache.v)
    return runs.decode_all(layer, cache, (texts.q, texts.k, texts.v), prompts, count, xp)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray, **how: Any) -> SimpleNamespace:
    """Return out (rows, num_heads, v_head_dim) and lse (num_heads, rows) of every query row over its range of keys.

    how: rounding and fused, as in oracle.attention. Rows that see nothing are 0 and -inf.
    """
    made = [oracle.attention(q[row : row + 1], k[begin:end], v[begin:end], causal=False, **how)
            for row, (begin, end) in enumerate(ranges.tolist())]
    return SimpleNamespace(out=np.concatenate([x.out for x in made]), lse=np.concatenate([x.lse for x in made], axis=1))


def check_rows(actual: tuple[Any, Any], q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray) -> None:
    """Assert that (out, lse) are what `attend` returns, by the accuracy rule; 0 and -inf where nothing is seen."""
    out, lse = map(to_host, actual)
    exact, plain, fused = (attend(q, k, v, ranges, **how) for how in (
        {}, {"rounding": q.dtype}, {"rounding": q.dtype, "fused": True}))
    blind = ranges[:, 0] >= ranges[:, 1]
    assert not out[blind].any() and (lse[:, blind] == -np.inf).all()
    verdict = oracle.judge(out, exact.out, plain.out, fused.out if q.dtype.itemsize == 2 else None)
    assert verdict.good, str(verdict)
    np.testing.assert_allclose(lse, exact.lse, rtol=1e-4, atol=1e-4)
