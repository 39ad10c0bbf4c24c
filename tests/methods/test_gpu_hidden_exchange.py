"""Balanced sharding hides its exchanges on the GPU: what is done before and after, and that results are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, Case, check
from late_rows import come_late, hide_all
from ways import Way, run_way

from thdattn import PackedBatch, Sharding
from thdattn.engines import AttentionOptions, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs
from thdattn.kernels.configs import TILES
from thdattn.plan.plan import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

LENGTHS = (1500, 300, 300, 900, 40, 128, 700)  # on 2 and on 4 ranks, all have tiles of either kind
PACKS = (
    Case("causal", LENGTHS, heads=(8, 2)),
    Case("full", LENGTHS, heads=(8, 2), causal=False, slack=70),
    Case("window", LENGTHS, heads=(8, 2), window=(200, 0)),
    Case("one-document", (1200,), heads=(8, 2)),
    Case("whole-documents", (128,) * 10, heads=(8, 2)),
    Case("one-rank-receives", (380, 310, 160, 190, 30, 50), heads=(8, 2)),
)
WAYS = [Way("all_gather", "balanced", 2), Way("all_gather", "balanced", 4)]
BY_TWO_LEVELS = Way("a2a+all_gather", "balanced", 4, inner=2)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000, 5000])
def test_two_parts_of_tiles_keep_their_orders(cupy, count):
    from thdattn.engines.cuda.plan import parts_of

    rng = np.random.default_rng(count)
    orders = np.stack([rng.permutation(count) for _ in range(2)]).astype(np.int32)
    for second in (rng.random(count) < 0.4, np.zeros(count, bool), np.ones(count, bool)):
        parts = parts_of(cupy.asarray(orders), second)
        for part, flag in zip(parts, (False, True), strict=True):
            wanted = [order[second[order] == flag].tolist() for order in orders]
            assert part.get().tolist() == wanted


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", [*WAYS, BY_TWO_LEVELS], ids=str)
@pytest.mark.parametrize("case", PACKS, ids=str)
def test_rows_that_come_late_are_in_the_results(cupy, monkeypatch, kernels, case, way, deterministic):
    come_late(monkeypatch)
    hide_all(monkeypatch)
    for keep in (True, False):
        check(case, BFLOAT16, run_way(case, way, BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic,
                                      keep_keys=keep))


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_every_head_dim_can_be_done_in_two(cupy, monkeypatch, kernels, dims):
    come_late(monkeypatch)
    hide_all(monkeypatch)
    for deterministic in (False, True):
        check(replace(PACKS[0], dims=dims), BFLOAT16, run_way(
            replace(PACKS[0], dims=dims), WAYS[0], BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", PACKS, ids=str)
def test_hiding_changes_no_bit(cupy, monkeypatch, kernels, case, deterministic):
    def results():
        return run_way(case, WAYS[0], BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic).tokens

    shown = results()
    hide_all(monkeypatch)
    for hidden in (results(), results()):
        for field in shown if deterministic else ("out", "lse", "max_logit"):
            assert hidden[field].tobytes() == shown[field].tobytes(), field


def plan_and_inputs(cupy, dims, cp_rank=0):
    """A plan with tiles of either kind, q, keys, values and dout; and which rows of queries and keys are foreign."""
    from thdattn.engines import cuda

    sharding, tiles = Sharding(PackedBatch.from_lengths(LENGTHS), 2, "balanced"), cuda.tiles(*dims)
    arrays = cuda.plan_arrays(sharding, cp_rank, (-1, 0), tiles)
    plan = Plan(sharding, cp_rank, (-1, 0), dims, tiles, arrays, cuda, sharding.batch)
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


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_halfway_all_tiles_of_queries_that_need_no_other_rank_are_done(cupy, kernels, dims):
    from thdattn.engines import cuda

    plan, (q, k, v, _), (foreign, _) = plan_and_inputs(cupy, dims)
    out, lse = cuda.empty((len(q), 8, dims[1]), q.dtype), cuda.empty((8, len(q)), np.float32)
    before = []
    cuda.attn_fwd(ForwardInputs(q, k, v, plan), OPTIONS, ForwardOutputs((out, lse), max_logit=True),
                  lambda: before.append((out.get().astype(np.float32), lse.get().T)))
    for half, whole in zip(before[0], (out.get().astype(np.float32), lse.get().T), strict=True):
        np.testing.assert_array_equal(nan_rows(half), foreign)
        np.testing.assert_array_equal(half[~foreign], whole[~foreign])
        assert not np.isnan(whole).any()


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_halfway_all_tiles_of_keys_of_other_ranks_have_their_gradients(cupy, kernels, dims):
    from thdattn.engines import cuda

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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_rows_that_no_other_rank_has_are_rounded_by_the_kernel(cupy, kernels, dims, deterministic):
    from thdattn.engines import cuda

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
