"""The pictures of the documentation show what the package does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tree_cases import sees

import thdattn
from thdattn.costs.model import Shape, Way, cost

pytest.importorskip("matplotlib")
import context_parallel
import trees


@pytest.mark.parametrize("strategy", list(context_parallel.PANELS))
def test_rows_that_the_picture_calls_gathered_are_those_that_move(strategy):
    batch = thdattn.PackedBatch.from_lengths(context_parallel.LENGTHS)
    sharding = thdattn.Sharding(batch, context_parallel.RANKS, strategy)
    gathered = []
    for rank in range(context_parallel.RANKS):
        own, received = context_parallel.rows_of(batch, sharding, rank)
        assert own.sum() * context_parallel.RANKS == batch.total_rows
        for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            queries = np.flatnonzero(own[begin:end])
            keys = begin + max(queries, default=-1) + 1  # the mask is causal
            assert (own | received)[begin:keys].all()
        gathered.append(int(received.sum()))
    layer = Shape(num_heads=1, num_kv_heads=1, head_dim=64, causal=True)
    assert max(gathered) * 2 * 64 * 2 == cost(batch, 4, layer, Way("all_gather", strategy)).received.forward


def test_the_mask_of_the_trees_is_that_of_their_parents():
    np.testing.assert_array_equal(trees.mask(), sees(trees.LENGTHS, trees.PARENTS))


@pytest.mark.parametrize("picture", [context_parallel, trees])
def test_the_picture_is_drawn(picture, tmp_path):
    picture.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
