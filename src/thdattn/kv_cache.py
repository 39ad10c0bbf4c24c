"""KVCache: the keys and values of texts that grow, in buffers of fixed capacity, for attention of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from thdattn.arguments import as_count, check_kind
from thdattn.engines import Engine
from thdattn.plan.buffers import Kept
from thdattn.plan.mask import most_in_sight
from thdattn.plan.plan import Plan

T = TypeVar("T")

CACHE_TRAITS = ("num_kv_heads", "head_dim", "v_head_dim", "dtype", "window", "engine")
MAX_ROWS = 2**30  # num_texts * capacity: rows are numbered in 32 bits


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class KVCache:
    """Keys and values of several texts; made by CPAttention.cache, grown by CPAttention.decode.

    Everything stays where it is, and lengths are on the engine's device, so that a captured CUDA graph serves texts of
    any lengths. The work buffers of a cache are reused by every call: calls with one cache belong on one stream.

    Attributes:
        num_texts, capacity: how many texts, and how many rows each can have.
        window: (left, right) of the attention, -1 = unlimited; a causal mask is right = 0.
        k: (num_texts, capacity, num_kv_heads, head_dim); v: (.., v_head_dim). Rows beyond a text's end hold anything.
        lengths: (num_texts,) int32, rows of each text; capacity + 1 for a text that did not fit, and for all that were
            filled by wrong lengths on a GPU: it lost rows, and attention over it gives 0 until the cache is reset or
            filled. `check` says so.
    """

    num_texts: int
    capacity: int
    window: tuple[int, int]
    k: Any
    v: Any
    lengths: Any
    _engine: Engine
    _kept: Kept = field(default_factory=Kept)

    def __repr__(self) -> str:
        sizes = {"num_texts": self.num_texts, "capacity": self.capacity, **self.made_for}
        return f"<KVCache {', '.join(f'{name}={value}' for name, value in sizes.items())}>"

    @cached_property
    def made_for(self) -> dict[str, Any]:
        """What must agree with the attention that uses the cache."""
        *_, num_kv_heads, head_dim = self.k.shape
        traits = num_kv_heads, head_dim, self.v.shape[3], self.k.dtype, self.window, self._engine.name
        return dict(zip(CACHE_TRAITS, traits, strict=True))

    def reset(self) -> None:
        """All texts become empty."""
        self.lengths.fill(0)

    def fill(self, k: Any, v: Any, plan: Plan) -> None:
        """Takes over what a forward had as keys and values: sequence i of the pack becomes text i.

        Args:
            k, v: (plan.local_key_rows, num_kv_heads, width), as passed to CPAttention.forward.
            plan: as there; of one rank, and of num_texts sequences, which may be empty. Lengths are those that it was
                made or last refreshed for.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or a plan that is none.
            ValueError: an array of the wrong shape, a plan of several ranks, of another number of sequences or one
                whose lengths the GPU has found wrong meanwhile, or a sequence longer than the capacity. If lengths lie
                on a GPU, `check` says that instead.
        """
        check_kind("plan", plan, Plan, "make it with attn.plan(batch)")
        batch = plan.key_batch
        if plan.cp_size != 1 or batch.num_seqs != self.num_texts:
            raise ValueError(
                f"plan is of {batch.num_seqs} sequences on {plan.cp_size} ranks, wanted {self.num_texts} on one, the "
                f"texts of the cache; pack one sequence per text, empty ones where there is nothing"
            )
        if not batch.on_device and batch.lengths.max() > self.capacity:
            text = int(batch.lengths.argmax())
            raise ValueError(
                f"sequence {text} has {batch.lengths[text]} tokens, wanted at most {self.capacity}, the capacity; make "
                f"the cache larger"
            )
        k, v = (self._checked(name, x, like, plan) for name, x, like in (("k", k, self.k), ("v", v, self.v)))
        plan.check(wait=False)
        plan.enter()
        self._engine.cache_fill(k, v, plan, self)

    def check(self) -> None:
        """Waits for the device, and raises a RuntimeError that names the texts that did not fit."""
        full = [text for text, length in enumerate(self.lengths.tolist()) if length > self.capacity]
        if full:
            raise RuntimeError(
                f"texts {full} had more than {self.capacity} rows, the capacity of the cache, or were filled by wrong "
                f"lengths on a GPU, and lost some; make it larger, or stop in time, or ask plan.check()"
            )

    @property
    def longest_range(self) -> int:
        """Most keys that a query sees."""
        return most_in_sight(self.window, self.capacity)

    def memoize(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returned when it was first called for this key: what a cache's calls have in common; see Kept."""
        return self._kept.memoize(key, make, self._engine.capture)

    def _checked(self, name: str, x: Any, like: Any, plan: Plan) -> Any:
        x, shape = self._engine.from_user(name, x), (plan.local_key_rows, *like.shape[2:])
        if x.dtype != like.dtype:
            raise TypeError(f"{name} is {x.dtype}, wanted {like.dtype} as in the cache; cast it")
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, wanted {shape} = (local_key_rows, num_kv_heads, width); "
                             f"pass what forward got")
        return x


def make_cache(
    engine: Engine, cp_size: int, num_texts: int, capacity: int, num_kv_heads: int, widths: tuple[int, int],
    dtype: np.dtype[Any], window: tuple[int, int],
) -> KVCache:
    """An empty cache, see CPAttention.cache; widths of k and of v."""
    if cp_size > 1:
        raise ValueError(
            f"comm has {cp_size} ranks, wanted 1: texts in a cache are not spread; give every rank texts of its own, "
            f"with thdattn.comm.init('single')"
        )
    num_texts, capacity = as_count("num_texts", num_texts), as_count("capacity", capacity)
    if num_texts * capacity > MAX_ROWS:
        raise ValueError(
            f"num_texts * capacity is {num_texts} * {capacity}, wanted at most {MAX_ROWS:,} rows; make several caches"
        )
    k, v = (engine.empty((num_texts, capacity, num_kv_heads, width), dtype) for width in widths)
    lengths = engine.empty((num_texts,), np.int32)
    lengths.fill(0)
    return KVCache(num_texts, capacity, window, k, v, lengths, engine)


def rows_to_decode(q: Any, cache: KVCache) -> int:
    """How many rows q has, which must be as many for every text of the cache."""
    check_kind("cache", cache, KVCache, "make it with attn.cache(num_texts, capacity)")
    shape = tuple(getattr(q, "shape", ()))
    if len(shape) != 3 or not shape[0] or shape[0] % cache.num_texts:
        raise ValueError(
            f"q has shape {shape}, wanted (rows, num_heads, head_dim) with as many rows, one or more, for each of the "
            f"{cache.num_texts} texts of the cache; pass the next rows of every text"
        )
    return int(shape[0])
