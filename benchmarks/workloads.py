"""Workloads of attention: packs of sequences with masks and head layouts, and their operations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import thdattn

PACK_TOKENS = 65_536  # of packs with drawn lengths
TREE_TOKENS = 40_000  # least number in a pack of trees
TILE = 128
DOCUMENTS = Path(__file__).with_name("doc_lengths.csv")


@dataclass(frozen=True)
class Pack:
    """Pack of sequences without padding. lengths: tokens of every sequence."""

    name: str
    lengths: tuple[int, ...]

    @property
    def total_tokens(self) -> int:
        """Return the tokens of all sequences, which are also all rows."""
        return sum(self.lengths)

    def batch(self, multiple: int = 1) -> thdattn.PackedBatch:
        """Return the pack, with its lengths on the host, each padded to a multiple."""
        return thdattn.PackedBatch.from_lengths(self.lengths, multiple)


@dataclass(frozen=True)
class Case(Pack):
    """Pack in one head layout, bfloat16.

    window: (left, right) as CPAttention takes it, -1 is unlimited. keys: number of keys of every sequence; None: as
    many as queries.
    """

    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    v_head_dim: int = 128
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    keys: tuple[int, ...] | None = None

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns of a record that describe the case."""
        return {
            "case": self.name, "heads": str(self.heads), "kv_heads": str(self.kv_heads),
            "head_dim": str(self.head_dim), "v_head_dim": str(self.v_head_dim), "dtype": "bfloat16",
            "causal": str(self.causal), "window": "{}:{}".format(*self.window),
            "total_tokens": str(self.total_tokens), "num_seqs": str(len(self.lengths)),
        }

    @property
    def total_keys(self) -> int:
        """Return the keys of all sequences: the rows of k and v."""
        return sum(self.keys or self.lengths)

    @property
    def sides(self) -> tuple[int, int]:
        """Return how far a query sees to the left and to the right, with the causal mask; -1 is unlimited."""
        return self.window[0], 0 if self.causal else self.window[1]

    def key_batch(self) -> thdattn.PackedBatch | None:
        """Return the pack of the keys, with its lengths on the host; None where it is that of the queries."""
        return None if self.keys is None else thdattn.PackedBatch.from_lengths(self.keys)

    def attention(
        self, engine: str, comm: thdattn.comm.Comm | tuple[thdattn.comm.Comm, thdattn.comm.Comm] | None = None,
        **options: Any,
    ) -> thdattn.CPAttention:
        """Make the attention of the case with further options of CPAttention, on one rank by default."""
        return thdattn.CPAttention(
            comm or thdattn.comm.init("single"), self.heads, self.head_dim, self.kv_heads, self.v_head_dim,
            causal=self.causal, window=self.window, engine=engine, **options,
        )

    @cached_property
    def flops(self) -> thdattn.Flops:
        """Count the operations of all heads; they are the same for every engine and peer."""
        return self.attention("reference").flops(self.plan)

    @property
    def work(self) -> dict[str, float]:
        """Return the operations of forward, backward and both."""
        return {**self.flops._asdict(), "both": sum(self.flops)}

    @cached_property
    def plan(self) -> thdattn.Plan:
        """Make the plan of one rank on the host."""
        return self.attention("reference").plan(self.batch(), "contiguous", key_batch=self.key_batch())

    @cached_property
    def tiles(self) -> int:
        """Count the tiles of 128 queries and 128 keys of a causal mask that have a visible pair.

        A tile is left out if its keys lie outside the ranges of its queries, or their subtrees end before the queries.
        """
        begin = np.arange(0, self.total_tokens, TILE)
        first, end = (extreme.reduceat(self.plan.key_ranges[:, side], begin)
                      for side, extreme in enumerate((np.minimum, np.maximum)))
        last = np.maximum.reduceat(self.plan.query_ranges[:, 1], begin)
        return int(((first[:, None] < begin + TILE) & (begin < end[:, None]) & (begin[:, None] < last)).sum())


@dataclass(frozen=True)
class TreeCase(Case):
    """Pack of prefix trees, as PackedBatch.from_trees takes them.

    lengths: tokens of every node. parents: index of every node's parent, -1 for the root of a tree.
    """

    parents: tuple[int, ...] = ()

    def batch(self, multiple: int = 1) -> thdattn.PackedBatch:
        return thdattn.PackedBatch.from_trees(self.lengths, self.parents, multiple)

    @property
    def columns(self) -> dict[str, str]:
        return super().columns | {"num_seqs": str(self.parents.count(-1))}

    def documents(self, lengths: Iterable[int]) -> Case:
        """Return a causal pack of other lengths with the same heads."""
        return Case(self.name, tuple(lengths), self.heads, self.kv_heads, self.head_dim, self.v_head_dim)

    @cached_property
    def unrolled(self) -> Case:
        """Return the pack of all paths from a root to a leaf, each a sequence."""
        return self.documents(map(len, self.batch().paths()))

    @cached_property
    def alike(self) -> Case:
        """Return a causal pack of as many rows, cut into sequences of one length so that it has as many tiles."""

        def cut(length: int) -> Case:
            number, rest = divmod(self.total_tokens, length)
            return self.documents([length] * number + [rest] * (rest > 0))

        lengths = range(1, self.total_tokens + 1)
        return cut(lengths[bisect_left(lengths, self.tiles, key=lambda length: cut(length).tiles)])


def lognormal_pack(seed: int = 0, tokens: int = PACK_TOKENS) -> tuple[int, ...]:
    """Draw lengths exp(N(6.2, 1.2)), clipped to 16..8192, until the pack would be too long."""
    rng = np.random.default_rng(seed)
    return _until_full(lambda: _lognormal(rng, 6.2, 1.2, 8192), tokens)


def filled_lognormal_pack(tokens: int) -> tuple[int, ...]:
    """Draw lengths as lognormal_pack, and add one more sequence of the tokens that are left."""
    lengths = lognormal_pack(tokens=tokens)
    rest = tokens - sum(lengths)
    return (*lengths, rest) if rest else lengths


def long_lognormal_pack() -> tuple[int, ...]:
    """Draw lengths exp(N(6.5, 1.4)), clipped to 16..32768, until the pack has twice PACK_TOKENS."""
    rng = np.random.default_rng(7)
    lengths: list[int] = []
    while sum(lengths) < 2 * PACK_TOKENS:
        lengths.append(_lognormal(rng, 6.5, 1.4, 32_768))
    return tuple(lengths)


def _lognormal(rng: np.random.Generator, mean: float, deviation: float, longest: int) -> int:
    return int(np.clip(np.exp(rng.normal(mean, deviation)), 16, longest))


def document_pack(seed: int = 0, tokens: int = PACK_TOKENS) -> tuple[int, ...]:
    """Draw lengths of real documents, at most a quarter of the pack, until the pack would be too long.

    It draws a bin of doc_lengths.csv by its share, then a length uniformly inside the bin.
    """
    bins: NDArray[np.float64] = np.loadtxt(DOCUMENTS, delimiter=",", skiprows=2)
    share = bins[:, 2] / bins[:, 2].sum()
    rng = np.random.default_rng(seed)

    def draw() -> int:
        low, high, _ = bins[rng.choice(len(bins), p=share)]
        length = int(rng.integers(low, high, endpoint=True))
        return length if length <= tokens // 4 else draw()

    return _until_full(draw, tokens)


def _until_full(draw: Callable[[], int], tokens: int) -> tuple[int, ...]:
    lengths: list[int] = []
    while (tokens := tokens - (length := draw())) >= 0:
        lengths.append(length)
    return tuple(lengths)


def _cases() -> tuple[Case, ...]:
    long = Case("1x16384", (16_384,))
    lognormal = Case("lognormal64k", lognormal_pack())
    skewed = tuple(int(length) for length in np.geomspace(33, 15_000, 10).round())
    return (
        long,
        Case("bucket32k", (24_576, 28_672, 30_720, 32_768)),
        replace(long, name="1x16384-full", causal=False),
        replace(long, name="1x16384-gqa", heads=32, kv_heads=8),
        replace(long, name="1x16384-d64", heads=32, kv_heads=32, head_dim=64, v_head_dim=64),
        replace(long, name="1x16384-d96", head_dim=96, v_head_dim=96),
        replace(long, name="1x16384-d96-gqa", heads=20, kv_heads=5, head_dim=96, v_head_dim=96),
        replace(long, name="1x16384-d192v128", head_dim=192),
        replace(long, name="1x16384-d192", kv_heads=4, head_dim=192, v_head_dim=192),
        replace(long, name="1x16384-d256", heads=8, kv_heads=8, head_dim=256, v_head_dim=256),
        Case("4x4096", (4_096,) * 4),
        Case("16x1024", (1_024,) * 16),
        Case("64x256", (256,) * 64),
        Case("481x34", (34,) * 481),
        Case("64x256-gqa", (256,) * 64, 32, 8),
        Case("1x2048", (2_048,)),
        Case("4x1024", (1_024,) * 4),
        Case("8x16-of-8192", (16,) * 8, keys=(8_192,) * 8),
        Case("1x64-of-32768", (64,), keys=(32_768,)),
        Case("1x1024-of-8192", (1_024,), 8, 8, keys=(8_192,)),
        lognormal,
        replace(lognormal, name="lognormal64k-gqa", heads=32, kv_heads=8),
        Case("1x65536-w1024", (65_536,), window=(1_024, 0)),
        Case("skewed10-w512", skewed, window=(512, 0)),
        Case("doc64k", document_pack()),
        Case("doc128k", document_pack(tokens=2 * PACK_TOKENS)),
        Case("doc128k-gqa", document_pack(tokens=2 * PACK_TOKENS), 32, 8),
        Case("1x131072-mqa", (2 * PACK_TOKENS,), 8, 1),
        Case("lognormal192k", lognormal_pack(tokens=3 * PACK_TOKENS)),
        Case("8192x34", (34,) * 8_192),
        Case("65536+1000x16", (65_536, *(16,) * 1_000)),
        *(Case(name, lengths, 32, 8) for name, lengths in EQUAL.items()),
    )


EQUAL = {f"{number}x{tokens // number}-gqa": (tokens // number,) * number
         for tokens in (8_192, 32_768) for number in (1, 4, 8)}
CASES = {case.name: case for case in _cases()}


def cp_cases(cp_size: int) -> dict[str, Case]:
    """Return the packs that are spread over so many ranks; packs of real documents grow with the ranks."""
    documents = {rows: document_pack(tokens=1_024 * rows * cp_size) for rows in (8, 16, 32)}
    cases = (
        replace(CASES["bucket32k"], heads=32, kv_heads=8),
        Case("1x65536", (65_536,), 32, 8),
        Case("1x8192", (8_192,), 32, 8),
        Case("4x2048", (2_048,) * 4, 32, 8),
        Case("8x1024", (1_024,) * 8, 32, 8),
        Case("lognormal128k", long_lognormal_pack(), 32, 8),
        *(Case(f"documents{rows}k", lengths, 64, 8) for rows, lengths in documents.items()),
        replace(CASES["bucket32k"], name="bucket32k-mha16"),
        # Computed about as long as sent by sockets of one machine, 0.4 GB/s.
        Case("1x16384-full-h512", (16_384,), 512, 8, causal=False),
    )
    return {case.name: case for case in cases}


def drawn_trees(name: str, prompt: int, fan: int, depth: int, mean: int) -> TreeCase:
    """Draw trees until they have TREE_TOKENS; the last node fills the last tile of rows.

    Args:
        prompt: tokens of every root.
        fan, depth: children of a node, on so many levels.
        mean: tokens of a child are mean * exp(N(0, 0.6)).
    """
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    parents: list[int] = []

    def grow(parent: int, length: int, levels: int) -> None:
        node = len(lengths)
        lengths.append(length)
        parents.append(parent)
        for _ in range(fan if levels else 0):
            grow(node, max(1, int(mean * np.exp(rng.normal(0, 0.6)))), levels - 1)

    while sum(lengths) < TREE_TOKENS:
        grow(-1, prompt, depth)
    lengths[-1] += -sum(lengths) % TILE
    return TreeCase(name, tuple(lengths), parents=tuple(parents))


TREES = {name: drawn_trees(name, *shape) for name, shape in {
    "prompt1k-8x1k": (1_024, 8, 1, 1_024), "prompt4k-16x512": (4_096, 16, 1, 512),
    "prompt512-4x3x256": (512, 3, 4, 256), "prompt16k-8x2k": (16_384, 8, 1, 2_048),
    "prompt1k-1x1k": (1_024, 1, 1, 1_024),
}.items()}
