"""Tiles of scores that ranks compute, counted from ranges of rows, against masks of rows and columns."""

from __future__ import annotations

import numpy as np
import pytest
from pairs import visible

import thdattn
from thdattn.costs import tile_counts
from thdattn.plan.ranges import host_arrays, key_ranges

LENGTHS = (90, 7, 0, 61, 33, 1, 25, 130)
MASKS = {"causal": (-1, 0), "full": (-1, -1), "window": (20, 0), "two-sided": (11, 5)}


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tile_counts, "TILE", 8)


def sharded(cp_size, strategy):
    multiple = 2 * cp_size if strategy == "dual_chunk" else 1
    return thdattn.Sharding(thdattn.PackedBatch.from_lengths(LENGTHS, multiple), cp_size, strategy)


def tiles_of(mask, tile):
    return sum(mask[i : i + tile, j : j + tile].any()
               for i in range(0, mask.shape[0], tile) for j in range(0, mask.shape[1], tile))


def masks_of_ranks(sharding, window, keys_of=None):
    """Yield, for every rank, which of its rows see which rows of its key buffer."""
    keys = np.arange(sharding.batch.total_rows) if keys_of is None else sharding.rows(keys_of)
    for rank in range(sharding.cp_size):
        mask = visible(sharding.batch, sharding.rows(rank), keys, window)
        yield mask[:, mask.any(axis=0)] if keys_of is None and sharding.by_runs else mask


@pytest.mark.parametrize("window", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("strategy", ["dual_chunk", "contiguous", "balanced"])
def test_pairs_and_tiles_are_those_of_the_mask(strategy, window, small_tiles):
    sharding = sharded(4, strategy)
    pairs, tiles = tile_counts.pairs_and_tiles(sharding, window)
    masks = list(masks_of_ranks(sharding, window))
    assert pairs.tolist() == [mask.sum() for mask in masks]
    assert tiles.tolist() == [tiles_of(mask, 8) for mask in masks]


@pytest.mark.parametrize("window", MASKS.values(), ids=MASKS)
def test_tiles_of_slices_are_those_of_the_mask(window, small_tiles):
    sharding = sharded(3, "dual_chunk")
    tiles = tile_counts.tiles_of_slices(sharding, window)
    for other in range(3):
        masks = masks_of_ranks(sharding, window, keys_of=other)
        assert tiles[:, other].tolist() == [tiles_of(mask, 8) for mask in masks]


@pytest.mark.parametrize("window", MASKS.values(), ids=MASKS)
def test_own_tiles_are_those_that_need_no_row_of_another_rank(window, small_tiles):
    sharding = sharded(4, "balanced")
    found = tile_counts.own_tiles(sharding, window)
    for rank, mask in enumerate(masks_of_ranks(sharding, window)):
        rows = sharding.rows(rank)
        everything = visible(sharding.batch, rows, np.arange(sharding.batch.total_rows), window)
        foreign = ~np.isin(np.flatnonzero(everything.any(axis=0)), rows)
        tiles = [(i, j) for i in range(0, mask.shape[0], 8) for j in range(0, mask.shape[1], 8)
                 if mask[i : i + 8, j : j + 8].any()]
        of_queries = sum(not mask[i : i + 8, foreign].any() for i, _ in tiles)
        of_keys = sum(not foreign[j : j + 8].any() for _, j in tiles)
        assert found[:, rank].tolist() == [of_queries, of_keys]
    assert (found < tile_counts.pairs_and_tiles(sharding, window)[1]).any(axis=1).all()


@pytest.mark.parametrize("keys_of", [None, 2])
@pytest.mark.parametrize("strategy", ["dual_chunk", "contiguous", "balanced"])
def test_key_ranges_alone_are_those_of_the_plan(strategy, keys_of):
    sharding = sharded(4, strategy)
    for rank in range(4):
        arrays = host_arrays(sharding, rank, (20, 0), (8, 8), keys_of=keys_of)
        assert np.array_equal(key_ranges(sharding, rank, (20, 0), keys_of), arrays.key_ranges)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3000, 0)], ids=["causal", "full", "window"])
def test_steps_of_a_long_ring_are_close_to_all_counted_ones(window, monkeypatch):
    size, rng = 40, np.random.default_rng(0)
    lengths = [60_000, 20_000, *rng.integers(100, 6000, 30).tolist()]
    sharding = thdattn.Sharding(thdattn.PackedBatch.from_lengths(lengths, 2 * size), size)
    tiles, ranks = tile_counts.tiles_of_slices(sharding, window), np.arange(size)
    exact = np.array([tiles[ranks, (ranks - step) % size].max() for step in range(size)])
    found = tile_counts.tiles_of_steps(sharding, window)
    assert found.shape == (size,) and found.sum() == pytest.approx(exact.sum(), rel=0.1)
    monkeypatch.setattr(tile_counts, "RING", size)
    sharding = thdattn.Sharding(thdattn.PackedBatch.from_lengths(lengths, 2 * size), size)
    assert tile_counts.tiles_of_steps(sharding, window).tolist() == exact.tolist()


def test_counted_ranks_are_all_or_evenly_spaced():
    assert tile_counts.counted_ranks(5).tolist() == [0, 1, 2, 3, 4]
    ranks = tile_counts.counted_ranks(1024)
    assert len(ranks) == tile_counts.COUNTED and ranks[0] == 0 and ranks[-1] == 1023
    assert np.ptp(np.diff(ranks)) <= 1
