"""Prefix trees that tests share, and the same trees as the sequences that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from cases import Case

import thdattn
from thdattn.fuzz.cases import draw_parents

# A prompt with empty and full children, a plain document, and a tree whose root is empty and whose leaves are deep.
MIXED = Case("trees-mixed", (20, 7, 0, 9, 3, 40, 12, 0, 130, 5, 0, 6, 11),
             parents=(-1, 0, 0, 2, 2, 0, -1, -1, 7, 8, 7, 10, 10), slack=5)
TREES = (
    MIXED,
    Case("trees-answers", (90, 31, 0, 17, 64, 1), parents=(-1, 0, 0, 0, 0, 0)),
    Case("trees-chain", (5, 0, 20, 0, 0, 33, 1, 70), parents=(-1, 0, 1, 2, 3, 4, 5, 6)),
    Case("trees-deep", (40, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9), parents=(-1, 0, 1, 1, 1, 0, 5, 5, 0, 8, 8, 10)),
    Case("trees-long", (300, 129, 1, 200, 63), parents=(-1, 0, 1, 1, 0), slack=64),
    Case("trees-documents", (70, 3, 33, 0, 50), parents=(-1,) * 5),
    Case("trees-empty", (0, 0, 0), parents=(-1, 0, -1)),
    Case("trees-none", (), parents=()),
)

# With mixers on GPUs: nodes of several segments, and segments of several chunks.
LONG = replace(MIXED, name="trees-of-segments", lengths=(700, 300, 0, 650, 64, 500), parents=(-1, 0, 1, 1, 0, -1))


def draw_trees(rng: np.random.Generator, most_nodes: int, most_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw lengths and parents of nodes: any depth and fan, empty nodes, several trees."""
    number = int(rng.integers(1, most_nodes + 1))
    parents = draw_parents(rng, number)
    lengths = rng.integers(0, max(2, most_tokens // number), number) * (rng.random(number) < 0.8)
    return tuple(map(int, lengths)), parents


def random_case(seed: int, sharding: str = "dual_chunk") -> Case:
    """Return a case of random trees."""
    rng = np.random.default_rng([seed, 44])
    lengths, parents = draw_trees(rng, 24, 400)
    return replace(MIXED, name=f"trees-random-{seed}", lengths=lengths, parents=parents, sharding=sharding,
                   slack=int(rng.integers(0, 20)))


def sees(lengths: Sequence[int], parents: Sequence[int]) -> np.ndarray:
    """Return (tokens, tokens) bool, True where a query sees a key, of all trees together, pair of nodes by pair."""
    node_of = np.repeat(np.arange(len(lengths)), lengths)
    seen = np.zeros((len(node_of), len(node_of)), bool)
    for node, parent in enumerate(parents):
        rows = np.flatnonzero(node_of == node)
        seen[np.ix_(rows, rows)] = np.tri(len(rows), dtype=bool)
        while parent >= 0:
            seen[np.ix_(rows, np.flatnonzero(node_of == parent))] = True
            parent = parents[parent]
    return seen


def unrolled(batch: thdattn.PackedBatch) -> tuple[thdattn.PackedBatch, np.ndarray]:
    """Return the batch of the paths, without padding, and the row of the trees for each of its rows."""
    paths = batch.paths()
    rows = np.concatenate([np.zeros(0, int), *paths])
    return thdattn.PackedBatch.from_lengths([len(path) for path in paths]), rows
