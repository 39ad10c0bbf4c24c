"""Balanced sharding hides its exchanges: which tiles need no row of another rank, and that they alone come first."""

from __future__ import annotations

import importlib
import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, Case, check, gpu_only, plan_with
from late_rows import come_late, hide_all
from pairs import WINDOWS, plan_of, visible
from test_balanced import CP_SIZES, PACKS, random_pack
from test_methods import BY_NAME
from ways import Way, run_way

import thdattn
from thdattn import PackedBatch, Sharding
from thdattn.capacity import Mask
from thdattn.comm.local import LocalComm
from thdattn.engines import (
    NEW_ARRAYS,
    AttentionOptions,
    BackwardInputs,
    BackwardOutputs,
    ForwardInputs,
    ForwardOutputs,
    reference,
)
from thdattn.kernels.configs import TILES
from thdattn.methods import group_cast
from thdattn.plan.layout_tables import needed_capacity

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


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_rows_that_come_late_are_in_the_results(monkeypatch, small_tiles, name, way, keep):
    come_late(monkeypatch)
    hide_all(monkeypatch)
    case = replace(BY_NAME[name], heads=way.heads, dims=(12, 8))
    check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference", keep_keys=keep))


def attended(monkeypatch, case, capacity=None):
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
        layer, batch = case.attention(comm, FLOAT64, engine="reference"), case.batch(2)
        plan = layer.plan(batch, Sharding(batch, 2, "balanced", capacity=capacity))
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


@pytest.mark.parametrize("less", [0, 8, 10**6])
def test_within_a_capacity_a_fixed_number_of_them_comes_first(monkeypatch, small_tiles, less):
    hide_all(monkeypatch)
    case = Case("documents", (300, 92, 4, 60, 60, 28), heads=(1, 1), dims=(8, 8))
    batch = case.batch(2)
    least = needed_capacity(Sharding(batch, 2, "balanced"), [Mask((-1, 0), (8, 4))])
    assert least.early_queries > 8
    capacity = least._replace(early_queries=max(0, least.early_queries - less))
    for events, plan in attended(monkeypatch, case, capacity):
        first, rest = capacity.early_queries, plan.local_rows - capacity.early_queries
        assert events == ([first, None, rest] if first else [None, plan.local_rows])


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


# --- on a GPU alone --------------------------------------------------------------------------------------------

LENGTHS = (1500, 300, 300, 900, 40, 128, 700)  # on 2 and on 4 ranks, all have tiles of either kind
ON_GPU = (
    Case("causal", LENGTHS, heads=(8, 2)),
    Case("full", LENGTHS, heads=(8, 2), causal=False, slack=70),
    Case("window", LENGTHS, heads=(8, 2), window=(200, 0)),
    Case("one-document", (1200,), heads=(8, 2)),
    Case("whole-documents", (128,) * 10, heads=(8, 2)),
    Case("one-rank-receives", (380, 310, 160, 190, 30, 50), heads=(8, 2)),
)


@gpu_only
@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000, 5000])
def test_two_parts_of_tiles_keep_their_orders(cupy, count):
    from thdattn.engines.cuda.plan import split_tiles

    rng = np.random.default_rng(count)
    orders = np.stack([rng.permutation(count) for _ in range(2)]).astype(np.int32)
    for second in (rng.random(count) < 0.4, np.zeros(count, bool), np.ones(count, bool)):
        parts = split_tiles(cupy.asarray(orders), cupy.asarray(second.astype(np.int32)), int((~second).sum()))
        for part, flag in zip(parts, (False, True), strict=True):
            wanted = [order[second[order] == flag].tolist() for order in orders]
            assert part.get().tolist() == wanted


@gpu_only
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("case", "way"), [
    *((case, way) for case in ON_GPU for way in (*WAYS[:3:2], WAYS[-1])),
    *((replace(ON_GPU[0], dims=dims), ONE) for dims in TILES),
], ids=str)
def test_rows_that_come_late_to_a_gpu_are_in_the_results(cupy, monkeypatch, kernels, case, way, deterministic):
    come_late(monkeypatch)
    hide_all(monkeypatch)
    for keep in (True, False):
        check(case, BFLOAT16, run_way(case, way, BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic,
                                      keep_keys=keep))


@gpu_only
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_hiding_changes_no_bit(cupy, monkeypatch, kernels, case, deterministic):
    def results():
        return run_way(case, ONE, BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic).tokens

    shown = results()
    hide_all(monkeypatch)
    for hidden in (results(), results()):
        for field in shown if deterministic else ("out", "lse", "max_logit"):
            assert hidden[field].tobytes() == shown[field].tobytes(), field


def plan_and_inputs(cupy, dims):
    """A plan with tiles of either kind, q, keys, values and dout; and which rows of queries and keys are foreign."""
    cuda = importlib.import_module("thdattn.engines.cuda")
    sharding, tiles = Sharding(PackedBatch.from_lengths(LENGTHS), 2, "balanced"), cuda.tiles(*dims)
    plan = plan_with(cuda, sharding, 0, (-1, 0), tiles, dims=dims)
    rng = np.random.default_rng(0)
    shapes = [(rows, heads, width) for rows, heads, width in (
        (plan.local_rows, 8, dims[0]), (plan.key_rows, 2, dims[0]), (plan.key_rows, 2, dims[1]),
        (plan.local_rows, 8, dims[1]))]
    arrays = [cupy.asarray(rng.standard_normal(shape).astype(BFLOAT16)) for shape in shapes]
    foreign = [np.repeat(flags, tile)[:rows] for flags, tile, rows in zip(
        plan.foreign_tiles, tiles, (plan.local_rows, plan.key_rows), strict=True)]
    assert all(0 < rows.sum() < len(rows) for rows in foreign)
    return plan, arrays, foreign


OPTIONS, FLOAT32 = AttentionOptions(0.1), np.dtype(np.float32)


def nan_rows(x):
    return np.isnan(x.reshape(len(x), -1)).all(axis=1)


@gpu_only
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_halfway_all_tiles_of_queries_that_need_no_other_rank_are_done(cupy, kernels, dims):
    cuda = importlib.import_module("thdattn.engines.cuda")
    plan, (q, k, v, _), (foreign, _) = plan_and_inputs(cupy, dims)
    out, lse = cuda.empty((len(q), 8, dims[1]), q.dtype), cuda.empty((8, len(q)), np.float32)
    before = []
    cuda.attn_fwd(ForwardInputs(q, k, v, plan), OPTIONS, ForwardOutputs((out, lse), max_logit=True),
                  lambda: before.append((out.get().astype(np.float32), lse.get().T)))
    for half, whole in zip(before[0], (out.get().astype(np.float32), lse.get().T), strict=True):
        np.testing.assert_array_equal(nan_rows(half), foreign)
        np.testing.assert_array_equal(half[~foreign], whole[~foreign])
        assert not np.isnan(whole).any()


@gpu_only
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_halfway_all_tiles_of_keys_of_other_ranks_have_their_gradients(cupy, kernels, dims):
    cuda = importlib.import_module("thdattn.engines.cuda")
    plan, (q, k, v, dout), (_, foreign) = plan_and_inputs(cupy, dims)
    out, lse, _ = cuda.attn_fwd(ForwardInputs(q, k, v, plan), OPTIONS)
    before = []
    dq, *grads = cuda.attn_bwd(BackwardInputs(dout, q, k, v, out, lse, plan), OPTIONS, BackwardOutputs(FLOAT32),
                               lambda *grads: before.append([x.get() for x in grads]))
    assert not np.isnan(dq.get().astype(np.float32)).any()
    for half, whole in zip(before[0], (x.get() for x in grads), strict=True):
        np.testing.assert_array_equal(nan_rows(half), ~foreign)
        np.testing.assert_array_equal(half[foreign], whole[foreign])
        assert not np.isnan(whole).any()


@gpu_only
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_rows_that_no_other_rank_has_are_rounded_by_the_kernel(cupy, kernels, dims, deterministic):
    cuda = importlib.import_module("thdattn.engines.cuda")
    plan, (q, k, v, dout), _ = plan_and_inputs(cupy, dims)
    out, lse, _ = cuda.attn_fwd(ForwardInputs(q, k, v, plan), OPTIONS)

    def grads(**outputs):
        options = OPTIONS._replace(deterministic=deterministic)
        return cuda.attn_bwd(
            BackwardInputs(dout, q, k, v, out, lse, plan), options, BackwardOutputs(FLOAT32, **outputs))[1:]

    rounded = [cuda.empty((plan.local_rows, 2, width), BFLOAT16) for width in dims]
    into = [cuda.empty((plan.key_rows, 2, width), np.float32) for width in dims]
    whole, others = [x.get() for x in grads()], [x.get() for x in grads(dk_dv=into, own_rows=rounded)]
    places = plan.arrays.places.get()
    mine = places >= 0
    assert 0 < mine.sum() < len(mine)
    tolerance = 0 if deterministic else 2**-7  # elsewhere shares are added in any order
    for x, wanted, result in zip(others, whole, rounded, strict=True):
        result = result.get()
        np.testing.assert_allclose(x[~mine], wanted[~mine], rtol=1e-4 * (not deterministic), atol=1e-4)
        np.testing.assert_allclose(result[places[mine]].astype(np.float32),
                                   wanted[mine].astype(BFLOAT16).astype(np.float32), rtol=tolerance, atol=1e-4)
        if deterministic or kernels == "portable":  # else there may be shares of several heads
            assert nan_rows(x)[mine].all(), "they are written once"
        np.testing.assert_array_equal(nan_rows(result.astype(np.float32)), ~np.isin(np.arange(len(result)), places))
