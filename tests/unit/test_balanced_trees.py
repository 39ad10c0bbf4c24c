"""The "balanced" sharding of prefix trees: equal rows, equal visible pairs, and no key that nobody sees."""

from __future__ import annotations

import numpy as np
import pytest
from cases import token_rows
from tree_cases import TREES, random_case, sees

import thdattn
from thdattn.balance import balanced_runs
from thdattn.plan.key_transfers import foreign_tiles, needed_rows

CAUSAL = (-1, 0)
SMALL = [*TREES, *map(random_case, range(8))]


def rollouts(seed, prompt, fan, depth, mean, num_rows):
    """Trees of prompts with turns of lognormal lengths, `fan` of them at each of `depth` levels."""
    rng = np.random.default_rng(seed)
    lengths, parents = [], []

    def grow(parent, level, length):
        node = len(lengths)
        lengths.append(length)
        parents.append(parent)
        for _ in range(fan if level else 0):
            grow(node, level - 1, max(1, int(mean * np.exp(rng.normal(0, 0.6)))))

    while sum(lengths) < num_rows:
        grow(-1, depth, prompt)
    return thdattn.PackedBatch.from_trees(lengths, parents)


LARGE = {
    "answers": (1024, 8, 1, 1024), "many answers": (4096, 16, 1, 512), "turns": (512, 3, 4, 256),
    "long prompt": (16384, 8, 1, 2048), "documents": (1024, 1, 1, 1024),
}  # fmt: skip


@pytest.mark.parametrize("num_rows", [40_000, 200_000])
@pytest.mark.parametrize("name", LARGE)
def test_ranks_have_equal_rows_and_equal_visible_pairs(name, num_rows):
    batch = rollouts(0, *LARGE[name], num_rows)
    depth = np.concatenate([[0], np.cumsum(np.concatenate([
        first + np.arange(1, length + 1)
        for first, length in zip(batch.trees.depths.tolist(), np.diff(batch.nodes).tolist(), strict=True)]))])
    for cp_size in (2, 3, 4, 8, 16):
        runs = balanced_runs(batch, cp_size)
        assert np.bincount(runs.rank, runs.end - runs.begin).max() <= -(-batch.total_rows // cp_size)
        work = np.bincount(runs.rank, depth[runs.end] - depth[runs.begin], cp_size)
        assert work.max() <= 1.06 * work.mean()


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_row_has_one_owner_and_runs_keep_to_their_tree(case, cp_size):
    batch = case.batch(cp_size)
    rows = np.concatenate([thdattn.Sharding(batch, cp_size, "balanced").rows(rank) for rank in range(cp_size)])
    assert np.sort(rows[rows >= 0]).tolist() == list(range(batch.total_rows))
    runs = balanced_runs(batch, cp_size)
    for begin, end, tree in zip(runs.begin, runs.end, runs.sequence, strict=True):
        if tree >= 0:
            first = batch.cu_seqlens_padded[tree]
            assert first <= begin < end <= first + batch.lengths[tree]


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_rank_gets_exactly_the_keys_that_its_queries_see(case, cp_size):
    batch = case.batch(cp_size)
    sharding = thdattn.Sharding(batch, cp_size, "balanced")
    full = np.zeros((batch.total_rows + 1,) * 2, bool)
    tokens = token_rows(batch)
    full[np.ix_(tokens, tokens)] = sees(case.lengths, case.parents)
    needed = needed_rows(batch, cp_size, CAUSAL, sharding.local_rows)
    for rank in range(cp_size):
        mine = sharding.rows(rank)
        seen = np.flatnonzero(full[mine].any(axis=0))
        assert needed.key_side(rank).rows_of_keys.filled().tolist() == seen.tolist()
        others = np.setdiff1d(seen, mine)
        queries, keys = foreign_tiles(batch, cp_size, CAUSAL, sharding.local_rows, rank, (16, 8))
        foreign = full[mine][:, others].any(axis=1)
        assert queries.tolist() == [bool(foreign[i : i + 16].any()) for i in range(0, len(mine), 16)]
        assert keys.tolist() == [bool(np.isin(seen[i : i + 8], others).any()) for i in range(0, len(seen), 8)]


def test_whole_trees_stay_on_one_rank_where_they_fit():
    batch = thdattn.PackedBatch.from_trees([300, 200, 200] * 8, [parent for i in range(8)
                                                                 for parent in (-1, 3 * i, 3 * i)])  # fmt: skip
    assert not needed_rows(batch, 4, CAUSAL, 1400).key_side(0).sends.size
    for tree in range(8):
        assert len(set(balanced_runs(batch, 4).rank[balanced_runs(batch, 4).sequence == tree])) == 1
