"""How the Hopper kernels work through tiles and heads. No GPU: a plan's orders are NumPy arrays here."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import numpy as np
import pytest

import thdattn
from thdattn.plan.ranges import host_arrays

pytest.importorskip("cupy")
from thdattn.engines.cuda import scheduler
from thdattn.engines.cuda.launch import Gpu
from thdattn.kernels.configs import TILES

H100 = Gpu(sm90=True, multiprocessors=132, shared_bytes=232448)
PACKS = {
    "one": (16_384,), "four": (4_096,) * 4, "sixteen": (1_024,) * 16, "short": (34,) * 481, "empty": (0, 0, 7),
    "mixed": (9_000, 40, 3_000, 700, 0, 5_000, 129, 64, 20, 900, 12_000, 1_500, 33, 2_500),
}


def orders_of(lengths, window=(-1, 0)):
    batch = thdattn.PackedBatch(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 4, 64, causal=True, window=(window[0], -1),
                                    engine="reference")
    tiles = host_arrays(thdattn.Sharding(batch, 1, "contiguous"), 0, window, (128, 128)).query_tiles
    return attention.plan(batch, "contiguous"), tiles


def work(order, num_heads, together, last_heads):
    """(tile, head) of every number of work, as kernels/hopper/common.cuh says: group by group."""
    first = num_heads - last_heads
    groups = [range(head, min(head + together, first)) for head in range(0, first, together)]
    return [(tile, head) for heads in (*groups, range(first, num_heads)) for tile in order for head in heads]


@pytest.mark.parametrize("together", [1, 2, 3, 4])
@pytest.mark.parametrize("num_heads", [1, 3, 8, 40])
@pytest.mark.parametrize("pack", PACKS)
def test_every_tile_of_every_head_is_done_once(pack, num_heads, together):
    plan, orders = orders_of(PACKS[pack])
    order, how = scheduler.schedule(H100, plan, orders, num_heads, together)
    done = work(order, num_heads, *how)
    assert sorted(done) == [(tile, head) for tile in range(orders.shape[1]) for head in range(num_heads)]


@pytest.mark.parametrize("pack", ["one", "four"])
def test_few_sequences_have_their_longest_tiles_first(pack):
    plan, orders = orders_of(PACKS[pack])
    order, how = scheduler.schedule(H100, plan, orders, 16, 1)
    assert order.tolist() == orders[0].tolist() == orders[1].tolist()
    assert how == (1, 4), "as many last heads as fill an H100 three times"
    assert scheduler.schedule(H100, plan, orders, 2, 1)[1] == (1, 2), "not more than there are"


@pytest.mark.parametrize("pack", ["sixteen", "short"])
def test_many_short_sequences_come_one_after_another_with_many_heads(pack):
    plan, orders = orders_of(PACKS[pack])
    order, how = scheduler.schedule(H100, plan, orders, 32, 4)
    assert order.tolist() == orders[0].tolist() != orders[1].tolist() and how == (16, 0)


@pytest.mark.parametrize(("local_rows", "wanted"), [(256, (16, 0)), (257, (4, 4))])
@pytest.mark.parametrize("pairs", [None, 10**9])
def test_few_queries_have_many_heads_whatever_the_lengths_are(local_rows, wanted, pairs):
    _, orders = orders_of(PACKS["one"])
    batch = SimpleNamespace(total_rows=local_rows)
    plan = SimpleNamespace(expected_pairs=pairs, cp_size=1, key_rows=2**14, local_rows=local_rows, batch=batch)
    order, how = scheduler.schedule(H100, plan, orders, 16, 4)
    assert order.tolist() == orders[0].tolist() and how == wanted


@pytest.mark.parametrize(("pack", "head_dim", "splits"), [
    ("short", 256, 1),   # 9 queries see a key: all heads of a group in one split
    ("sixteen", 64, 1), ("sixteen", 128, 2), ("sixteen", 192, 4),  # 512: 256 columns a split
    ("four", 64, 2), ("four", 128, 4),  # 2,048: 128 columns
    ("one", 64, 2), ("one", 256, 4),
])
def test_a_split_has_fewer_heads_the_longer_the_sequences_are(pack, head_dim, splits):
    plan, _ = orders_of(PACKS[pack])
    assert scheduler.splits_per_kv_head(H100, plan, 128, 8, 4, head_dim) == [(splits, inf)]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_lengths_that_only_the_gpu_knows_have_every_choice_for_the_packs_that_it_is_for(group, head_dim):
    unknown = SimpleNamespace(expected_pairs=None, cp_size=1, key_rows=1)
    choices = scheduler.splits_per_kv_head(H100, unknown, 128, 8, group, head_dim)
    limits = [most for _, most in choices]
    assert limits == sorted(set(limits)) and limits[-1] == inf
    for in_sight in (1, 16, 100, 128.5, 256, 300, 512, 600, 1024, 1100, 2048, 8192, 1e6):
        known = SimpleNamespace(expected_pairs=in_sight * 1e9, cp_size=1, key_rows=1e9)
        (expected, _), = scheduler.splits_per_kv_head(H100, known, 128, 8, group, head_dim)
        assert next(splits for splits, most in choices if in_sight <= most) == expected


def test_splits_of_longer_sequences_take_few_heads_together():
    batch = thdattn.PackedBatch.from_lengths(PACKS["mixed"])
    rows = batch.total_rows
    plan = SimpleNamespace(batch=batch, expected_pairs=1500 * rows, cp_size=1, key_rows=rows, local_rows=rows)
    _, orders = orders_of(PACKS["mixed"])
    assert scheduler.schedule(H100, plan, orders, 16, 2)[1] == (16, 0)
    assert scheduler.schedule(H100, plan, orders, 16, 2, scheduler.LONG_FROM)[1] == (2, 2)


@pytest.mark.parametrize(("tiles", "heads", "divides"), [
    (1, 1, True), (16, 8, True), (16, 17, False), (0, 4, False),
])
def test_keys_are_divided_where_tiles_are_few(tiles, heads, divides):
    plan = SimpleNamespace(num_tiles=(tiles, 1), has_trees=False)
    assert scheduler.splits_keys(H100, TILES[128, 128].forward_sm90, plan, heads) == divides
    plan.has_trees = True  # the splits of a tile could see nothing
    assert not scheduler.splits_keys(H100, TILES[128, 128].forward_sm90, plan, heads)
