"""KVCache: keys and values of sequences that are decoded, for one attention layer, in buffers of fixed capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from thdattn.arguments import Array, as_array, as_count, as_host_ints, check_kind
from thdattn.engines import Engine
from thdattn.packing import PackedBatch
from thdattn.plan.mask import most_in_sight
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import Kept

T = TypeVar("T")

CACHE_TRAITS = ("num_kv_heads", "head_dim", "v_head_dim", "dtype", "window", "engine")
MAX_ROWS = 2**30  # num_texts * capacity, as rows are numbered in 32 bits


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class KVCache:
    """KV cache of several sequences; made by CPAttention.cache, appended to by CPAttention.decode.

    Buffers never move, and lengths are on the engine's device, so that a captured CUDA graph serves sequences of any
    lengths. Every call reuses the cache's work buffers: all calls with one cache belong on one stream.

    Attributes:
        num_texts: number of sequences.
        capacity: rows of keys and values that each sequence can have.
        window: (left, right) of the attention, -1 = unlimited; a causal mask is right = 0.
        k: (num_texts, capacity, num_kv_heads, head_dim). Rows beyond a sequence's end are undefined.
        v: (num_texts, capacity, num_kv_heads, v_head_dim), as k.
        lengths: (num_texts,) int32, rows of each sequence. capacity + 1 marks a sequence that did not fit and lost
            rows, and every sequence after a fill with wrong lengths on a GPU. Attention over a marked sequence is 0
            until the cache is reset or filled; `check` raises.
    """

    num_texts: int
    capacity: int
    window: tuple[int, int]
    k: Array
    v: Array
    lengths: Array
    _engine: Engine
    _kept: Kept = field(default_factory=Kept)

    def __repr__(self) -> str:
        sizes = {"num_texts": self.num_texts, "capacity": self.capacity, **self.made_for}
        return f"<KVCache {', '.join(f'{name}={value}' for name, value in sizes.items())}>"

    @cached_property
    def made_for(self) -> dict[str, Any]:
        """Fields that must agree with the attention that uses the cache."""
        *_, num_kv_heads, head_dim = self.k.shape
        traits = num_kv_heads, head_dim, self.v.shape[3], self.k.dtype, self.window, self._engine.name
        return dict(zip(CACHE_TRAITS, traits, strict=True))

    def reset(self) -> None:
        """Empty all sequences."""
        self.lengths.fill(0)

    def fork(self, sources: ArrayLike) -> KVCache:
        """Return a new cache whose sequences continue sequences of this one, such as several answers to one prompt.

        The prompt is computed once, and its rows are copied. This cache stays as it is. Call it outside of captures.

        Args:
            sources: (number of sequences,) integers, at least one: the sequence that each new one continues.

        Raises:
            TypeError: sources that are not integers.
            ValueError: sources of another shape, a sequence that is not in the cache, or too many rows.
        """
        sequences = as_sequences(sources, self.num_texts)
        check_rows(len(sequences), self.capacity)
        k, v, lengths = (copy_sequences(self._engine, x, sequences) for x in (self.k, self.v, self.lengths))
        return KVCache(len(sequences), self.capacity, self.window, k, v, lengths, self._engine)

    def fill(self, k: Array, v: Array, plan: Plan) -> None:
        """Replace the cache's contents with the keys and values of a forward, sequence by sequence of the pack.

        Args:
            k, v: (plan.local_key_rows, num_kv_heads, width), as passed to CPAttention.forward.
            plan: as passed to CPAttention.forward; of one rank and num_texts sequences, which may be empty. Its lengths
                are those of when it was made or last refreshed.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or plan is no Plan.
            ValueError: an array of the wrong shape; a plan of several ranks, of trees, of another number of sequences,
                or whose lengths the GPU has found wrong; or a sequence longer than the capacity. With lengths on a GPU,
                `check` reports sequences that are too long.
        """
        check_kind("plan", plan, Plan, "make it with attn.plan(batch)")
        batch = plan.key_batch
        check_sequences("plan", batch, plan.cp_size, self.num_texts)
        if not batch.on_device and batch.lengths.max() > self.capacity:
            sequence = int(batch.lengths.argmax())
            raise ValueError(
                f"sequence {sequence} has {batch.lengths[sequence]} tokens, wanted at most {self.capacity}, the "
                f"capacity; make the cache larger"
            )
        k, v = (self._checked(name, x, like, plan) for name, x, like in (("k", k, self.k), ("v", v, self.v)))
        plan.check(wait=False)
        plan.enter()
        self._engine.cache_fill(k, v, plan, self)

    def check(self) -> None:
        """Wait for the device, and raise a RuntimeError that names the sequences that did not fit."""
        full = [sequence for sequence, length in enumerate(self.lengths.tolist()) if length > self.capacity]
        if full:
            raise RuntimeError(
                f"sequences {full} had more than {self.capacity} rows, the capacity of the cache, or were filled by "
                f"wrong lengths on a GPU, and lost some; make it larger, or stop in time, or ask plan.check()"
            )

    @property
    def longest_range(self) -> int:
        """Largest number of keys that a query sees."""
        return most_in_sight(self.window, self.capacity)

    def memoize(self, key: Any, make: Callable[[], T]) -> T:
        """Return the value that this cache's calls keep for `key`; call `make` on a miss. See Kept."""
        return self._kept.memoize(key, make, self._engine.capture)

    def _checked(self, name: str, x: Array, like: Array, plan: Plan) -> Any:
        x, shape = self._engine.from_user(name, x), (plan.local_key_rows, *like.shape[2:])
        return as_array(name, x, shape, like.dtype,
                        " = (local_key_rows, num_kv_heads, width); pass what forward got", " as in the cache; cast it")


def make_cache(
    engine: Engine, cp_size: int, num_texts: int, capacity: int, made_for: Mapping[str, Any]
) -> KVCache:
    """Return an empty cache, see CPAttention.cache; made_for: CACHE_TRAITS of the attention."""
    check_one_rank(cp_size)
    num_texts, capacity = as_count("num_texts", num_texts), as_count("capacity", capacity)
    check_rows(num_texts, capacity)
    heads = num_texts, capacity, made_for["num_kv_heads"]
    k, v = (engine.empty((*heads, made_for[width]), made_for["dtype"]) for width in ("head_dim", "v_head_dim"))
    lengths = engine.empty((num_texts,), np.int32)
    lengths.fill(0)
    return KVCache(num_texts, capacity, made_for["window"], k, v, lengths, engine)


def check_one_rank(cp_size: int) -> None:
    """Raise a ValueError for a cache over several ranks."""
    if cp_size > 1:
        raise ValueError(
            f"comm has {cp_size} ranks, wanted 1: sequences in a cache are not spread; give every rank sequences "
            f"of its own, with thdattn.comm.init('single')"
        )


def check_sequences(name: str, batch: PackedBatch, cp_size: int, num_texts: int) -> None:
    """Raise a ValueError for a batch that cannot fill a cache, sequence by sequence; name: argument that has it."""
    if cp_size != 1 or batch.num_seqs != num_texts:
        raise ValueError(
            f"{name} is of {batch.num_seqs} sequences on {cp_size} ranks, wanted {num_texts} on one, the sequences of "
            f"the cache; pack as many, empty ones where there is nothing"
        )
    if batch.has_trees:
        raise ValueError(f"{name} is of trees, wanted one path per sequence of the cache; fill it from the paths "
                         f"(PackedBatch.paths)")


def check_rows(num_texts: int, capacity: int) -> None:
    """Raise a ValueError for more rows than a cache numbers."""
    if num_texts * capacity > MAX_ROWS:
        raise ValueError(
            f"num_texts * capacity is {num_texts} * {capacity}, wanted at most {MAX_ROWS:,} rows; make several caches"
        )


def as_sequences(sources: ArrayLike, num_texts: int) -> list[int]:
    """Return the sequences of a cache that a fork continues; raise a TypeError or ValueError if they are none."""
    sequences = as_host_ints("sources", sources)
    if sequences.ndim != 1 or not sequences.size:
        raise ValueError(f"sources has shape {sequences.shape}, wanted (number of sequences,), one or more; pass the "
                         f"sequence that each new one continues")
    wrong = (sequences < 0) | (sequences >= num_texts)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(f"sources[{index}] is {sequences[index]}, wanted 0 <= sequence < {num_texts}, those of the "
                         f"cache; pass one of these")
    chosen: list[int] = sequences.tolist()
    return chosen


def copy_sequences(engine: Engine, x: Array, sequences: list[int]) -> Any:
    """Return a new array of some sequences of an array of a cache, (num_texts, ...)."""
    made = engine.empty((len(sequences), *x.shape[1:]), x.dtype)
    for sequence, source in enumerate(sequences):
        made[sequence] = x[source]
    return made


def rows_to_decode(q: Any, cache: KVCache) -> int:
    """Return the number of rows of q; raise if it is no multiple of the cache's num_texts."""
    check_kind("cache", cache, KVCache, "make it with attn.cache(num_texts, capacity)")
    shape = tuple(getattr(q, "shape", ()))
    if len(shape) != 3 or not shape[0] or shape[0] % cache.num_texts:
        raise ValueError(
            f"q has shape {shape}, wanted (rows, num_heads, head_dim) with as many rows, one or more, for each of the "
            f"{cache.num_texts} sequences of the cache; pass the next rows of every sequence"
        )
    return int(shape[0])
