"""Balanced sharding hides its exchanges: which tiles need no row of another rank, and that they alone come first."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from cases import Case, check
from late_rows import come_late, hide_all
from test_balanced import CP_SIZES, PACKS, WINDOWS, batch_of, plan_of, random_pack, visible
from test_methods import BY_NAME
from ways import Way, run_way

import thdattn
from thdattn import Sharding
from thdattn.comm.local import LocalComm
from thdattn.engines import NEW_ARRAYS, reference
from thdattn.methods import group_cast

FLOAT64 = np.dtype("float64")
ONE = Way("all_gather", "balanced", 2)
WAYS = [*(replace(ONE, cp_size=size) for size in CP_SIZES[1:]), Way("a2a+all_gather", "balanced", 4, inner=2)]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of few rows, so that small packs have some of either kind."""
    monkeypatch.setattr(reference, "tiles", lambda head_dim, v_head_dim: (8, 4))


def assert_foreign_tiles(batch, cp_size, window, tiles):
    """Against the rule of the mask on every pair. Returns how many tiles of queries are not foreign, and are."""
    sharding, counted = Sharding(batch, cp_size, "balanced"), np.zeros(2, int)
    for rank in range(cp_size):
        plan = plan_of(sharding, rank, window, tiles)
        rows, keys = sharding.rows(rank), plan.arrays.rows_of_keys
        theirs = ~np.isin(keys, rows)
        sees = visible(batch, rows, keys[theirs], window).any(axis=1)
        for found, foreign, tile in zip(plan.foreign_tiles, (sees, theirs), tiles, strict=True):
            assert found.tolist() == [bool(foreign[i : i + tile].any()) for i in range(0, len(foreign), tile)]
        counted += np.bincount(plan.foreign_tiles[0], minlength=2)
    return counted


@pytest.mark.parametrize("cp_size", CP_SIZES[1:])
@pytest.mark.parametrize("name", PACKS)
def test_foreign_tiles_are_those_with_a_pair_of_two_ranks(name, cp_size):
    for window in WINDOWS:
        assert_foreign_tiles(PACKS[name], cp_size, window, (16, 8))


def test_foreign_tiles_of_any_pack():
    counted = np.zeros(2, int)
    for seed in range(150):
        rng = np.random.default_rng(seed)
        window = WINDOWS[seed % 2] if seed % 3 else tuple(rng.integers(-1, 40, 2).tolist())
        tiles = tuple(rng.integers(1, 20, 2).tolist())
        counted += assert_foreign_tiles(random_pack(rng), int(rng.choice(CP_SIZES[1:])), window, tiles)
    assert counted.min() > 500, "both kinds are there"


def test_a_document_on_two_ranks_makes_its_own_tiles_foreign_alone():
    # 1,024 tokens on ranks 0 and 1, in chunks of 256 rows, 0 and 3 on the first rank: its second chunk sees others.
    batch = batch_of([1024])
    near = [~plan_of(Sharding(batch, 2, "balanced"), rank, (-1, 0), (64, 64)).foreign_tiles[0] for rank in (0, 1)]
    assert near[0].tolist() == [True] * 4 + [False] * 4 and not near[1].any()
    # Through a window of 64 the first 64 rows of a chunk see the chunk before.
    near = [~plan_of(Sharding(batch, 2, "balanced"), rank, (64, 0), (64, 64)).foreign_tiles[0] for rank in (0, 1)]
    assert near[0].tolist() == [True] * 4 + [False] + [True] * 3
    assert near[1].tolist() == [False] + [True] * 7


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_rows_that_come_late_are_in_the_results(monkeypatch, small_tiles, name, way, keep):
    come_late(monkeypatch)
    hide_all(monkeypatch)
    case = replace(BY_NAME[name], heads=way.heads, dims=(12, 8))
    check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference", keep_keys=keep))


def attended(monkeypatch, case):
    """Of each of two ranks, how many rows it attends to, and None where it begins to place what came."""
    events, attn_fwd, place_rows = defaultdict(list), reference.attn_fwd, reference.place_rows

    def rows(inputs, options, outputs=NEW_ARRAYS, on_first_part=None):
        if on_first_part is None:
            events[threading.get_ident()].append(len(inputs.q))
        return attn_fwd(inputs, options, outputs, on_first_part)

    def placed(xs, order, plan, into):
        if xs[0].strides[0] and len(order) == plan.routes.num_received:
            events[threading.get_ident()].append(None)
        place_rows(xs, order, plan, into)

    for module in (reference, reference.attention):  # of which one calls the other for each half
        monkeypatch.setattr(module, "attn_fwd", rows)
    monkeypatch.setattr(reference, "place_rows", placed)

    def program(comm):
        layer = case.attention(comm, FLOAT64, engine="reference")
        plan = layer.plan(case.batch(2), "balanced")
        q, k, v = (np.ones((plan.local_rows, 1, 8)) for _ in range(3))
        layer.forward(q, k, v, plan)
        return events[threading.get_ident()], plan

    return thdattn.comm.run_local(2, program)


def test_tiles_that_need_no_other_rank_come_first(monkeypatch, small_tiles):
    hide_all(monkeypatch)
    case = Case("documents", (700, 90, 3, 60, 60, 33), heads=(1, 1), dims=(8, 8))
    some = 0
    for events, plan in attended(monkeypatch, case):
        foreign = np.repeat(plan.foreign_tiles[0], 8)[: plan.local_rows].sum()
        assert events == [plan.local_rows - foreign, None, foreign]
        some += 0 < foreign < plan.local_rows
    assert some, "a rank has both"


@pytest.mark.parametrize(("overlaps", "more"), [(True, 0), (True, 1), (False, 0)])
def test_much_is_hidden_where_it_travels_beside_kernels(monkeypatch, small_tiles, overlaps, more):
    case = Case("documents", (700, 90, 3, 60, 60, 33), heads=(1, 1), dims=(8, 8))
    sharding = Sharding(case.batch(2), 2, "balanced")
    received = [plan_of(sharding, rank, (-1, 0)).routes.num_received * 2 * 8 * FLOAT64.itemsize for rank in (0, 1)]
    monkeypatch.setattr(group_cast, "WORTH_OVERLAPPING", received[0] + more)
    monkeypatch.setattr(LocalComm, "overlaps", overlaps)
    events, plan = attended(monkeypatch, case)[0]
    assert received[0] and (events == [None, plan.local_rows]) == (not overlaps or more > 0)


@pytest.mark.parametrize("more", [0, 1])
def test_gradients_hide_where_some_rank_gets_many_of_its_rows(monkeypatch, more):
    halves, attn_bwd = [], reference.attn_bwd

    def noted(inputs, options, outputs, on_first_part=None):
        halves.append(on_first_part is not None)
        return attn_bwd(inputs, options, outputs, on_first_part)

    monkeypatch.setattr(reference, "attn_bwd", noted)
    monkeypatch.setattr(LocalComm, "overlaps", True)
    case = Case("documents", (754, 225, 387, 846, 461, 156, 284, 3031), heads=(1, 1), dims=(8, 8), window=(2133, 0))
    table = plan_of(Sharding(case.batch(3), 3, "balanced"), 0, case.window).routes.table
    assert table[:, 0].sum() > table.sum(axis=1).max(), "rank 0 sends back more than any rank gets"
    monkeypatch.setattr(group_cast, "WORTH_OVERLAPPING", int(table.sum(axis=1).max()) * 2 * 8 * FLOAT64.itemsize + more)

    def program(comm):
        layer = case.attention(comm, FLOAT64, engine="reference")
        plan = layer.plan(case.batch(3), "balanced")
        q, k, v = (np.ones((plan.local_rows, 1, 8)) for _ in range(3))
        layer.backward(*layer.forward(q, k, v, plan))

    thdattn.comm.run_local(3, program)
    assert len(halves) == 3 and any(halves) == (not more)


def test_a_rank_that_gets_nothing_waits_for_nobody_before_it_computes(monkeypatch):
    events, attn_fwd, exchange = defaultdict(list), reference.attn_fwd, LocalComm.exchange

    def attended(*args, **options):
        events[threading.get_ident()].append("attends")
        return attn_fwd(*args, **options)

    def waited(self, sends, recvs, sizes=None):
        wait = exchange(self, sends, recvs, sizes)
        return lambda: (events[threading.get_ident()].append("waits"), wait())

    monkeypatch.setattr(reference, "attn_fwd", attended)
    monkeypatch.setattr(LocalComm, "exchange", waited)
    monkeypatch.setattr(LocalComm, "overlaps", True)
    case = Case("two", (50, 39), heads=(1, 1), dims=(8, 8))

    def program(comm):
        layer = case.attention(comm, FLOAT64, engine="reference")
        plan = layer.plan(case.batch(1), "balanced")
        layer.forward(*(np.ones((plan.local_rows, 1, 8)) for _ in range(3)), plan)
        return plan.routes.num_received, events[threading.get_ident()]

    assert thdattn.comm.run_local(2, program) == [(44, ["waits", "attends"]), (0, ["attends", "waits"])]
