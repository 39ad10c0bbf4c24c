"""Keys of other lengths than the queries, on the NumPy engine: plans and results against brute force and the oracle."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, CASES, Case, check, run, to_host
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import ranges, visible
from wrong_values import DeviceOffsets

import thdattn
from thdattn.kernels.configs import TILES
from thdattn.packing import PackedBatch
from thdattn.plan.ranges import host_arrays

FLOAT64 = np.dtype("float64")
SINGLE = thdattn.comm.init("single")
PAIRS = st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24)), max_size=5)
SIDES = st.one_of(st.just(-1), st.integers(0, 26))


def attention(comm=SINGLE, **options):
    return thdattn.CPAttention(comm, 2, 8, engine="reference", dtype="float32", **options)


def visible_pairs(batch, key_batch, window):
    return visible(batch, range(batch.total_rows), range(key_batch.total_rows), window, key_batch)


@settings(deadline=None, max_examples=300)
@given(PAIRS, st.tuples(SIDES, SIDES), st.integers(0, 9), st.sampled_from(["dual_chunk", "contiguous"]),
       st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_ranges_are_the_visible_pairs(pairs, window, slack, sharding, tiles):
    case = Case("any", tuple(q for q, _ in pairs), keys=tuple(k for _, k in pairs), slack=slack)
    batch, key_batch = case.batch(1), case.key_batch()
    plan = host_arrays(thdattn.Sharding(batch, 1, sharding), 0, window, tiles, key_batch)
    seen = visible_pairs(batch, key_batch, window)
    assert plan.key_ranges.tolist() == ranges(seen) and plan.query_ranges.tolist() == ranges(seen.T)
    assert plan.rows.tolist() == list(range(batch.total_rows)) and plan.valid.sum() == batch.total_tokens
    assert plan.rank_order.tolist() == list(range(key_batch.total_rows))
    assert np.sort(plan.query_tiles).tolist() == [list(range(-(-batch.total_rows // tiles[0])))] * 2
    assert np.sort(plan.key_tiles).tolist() == [list(range(-(-key_batch.total_rows // tiles[1])))] * 2


@settings(deadline=None, max_examples=200)
@given(PAIRS, st.tuples(SIDES, SIDES), st.booleans(), st.integers(0, 5))
def test_visible_pairs_and_flops_are_counted(pairs, window, causal, slack):
    window = (window[0], min(window[1], 0)) if causal else window
    case = Case("any", tuple(q for q, _ in pairs), keys=tuple(k for _, k in pairs), slack=slack)
    attn = attention(causal=causal, window=window)
    plan = attn.plan(case.batch(1), key_batch=case.key_batch())
    seen = visible_pairs(plan.batch, plan.key_batch, attn.window)
    assert plan.has_masked_out_queries == (not seen.any(axis=1).all())
    assert plan.has_unseen_keys == (not seen.any(axis=0).all())
    counted = int(seen.sum())
    assert plan.visible_pairs == counted and attn.flops(plan).forward == counted * 2 * 2 * (8 + 8)


@settings(deadline=None, max_examples=100)
@given(PAIRS, st.tuples(SIDES, SIDES), st.booleans(), st.integers(0, 5), st.sampled_from([(1, 1), (4, 2), (3, 1)]))
def test_any_pack_is_the_oracle(pairs, window, causal, slack, heads):
    case = Case("any", tuple(q for q, _ in pairs), keys=tuple(k for _, k in pairs), slack=slack, heads=heads,
                dims=(12, 8), causal=causal, window=(window[0], min(window[1], 0)) if causal else window)
    check(case, FLOAT64, run(case, 1, FLOAT64, engine="reference"))


@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("name", ["cross-window-causal", "cross-window-lopsided", "cross-window-self"])
def test_rows_that_see_nothing_and_are_not_seen_may_hold_anything(engine, name, dims):
    case = replace(CASES[name], dims=dims)
    clean, *others = (results_with(engine, case, value) for value in (0, np.nan, np.inf))
    assert others == [clean, clean]


def results_with(engine, case, value):
    """Forward and backward of a case on one rank, with a value in every row that sees nothing or is not seen."""
    attn = case.attention(SINGLE, BFLOAT16, engine=engine.name, deterministic=True)
    batch, key_batch = case.batch(1), case.key_batch()
    plan = attn.plan(batch, case.sharding, key_batch)
    unused = {side: x[:, 0] >= x[:, 1] for side, x in (("q", plan.key_ranges), ("k", plan.query_ranges))}
    rng, arrays = np.random.default_rng(0), {}
    for name, shape in case.shapes().items():
        side = "k" if name in "kv" else "q"
        rows = batch.total_rows if side == "q" else key_batch.total_rows
        arrays[name] = engine.xp.asarray(rng.standard_normal((rows, *shape), np.float32).astype(BFLOAT16))
        arrays[name].view("u2")[unused[side]] = np.array(value, BFLOAT16).view("u2")
    assert all(x.any() for x in unused.values())
    out, saved = attn.forward(arrays["q"], arrays["k"], arrays["v"], plan)
    return [to_host(x).tobytes() for x in (out, saved.lse, *attn.backward(arrays["dout"], saved))]


def test_sizes_of_both_sides():
    plan = attention().plan(PackedBatch([0, 3], [0, 4]), key_batch=PackedBatch([0, 6]))
    assert (plan.local_rows, plan.key_rows, plan.local_key_rows) == (4, 6, 6)
    assert "keys=<PackedBatch num_seqs=1, total_tokens=6, total_rows=6>" in repr(plan)
    plan = attention().plan(PackedBatch([0, 4]))
    assert plan.key_batch is plan.batch and plan.local_key_rows == plan.local_rows == 4


def test_backward_names_a_saved_array_of_the_other_sides_length():
    attn, q = attention(), np.ones((4, 2, 8), np.float32)
    k = np.ones((6, 2, 8), np.float32)
    _, saved = attn.forward(q, k, k, attn.plan(PackedBatch([0, 4]), key_batch=PackedBatch([0, 6])))
    with pytest.raises(ValueError, match=r"saved\.v is float32 \(4, 2, 8\), .*wanted float32 \(6, 2, 8\)"):
        attn.backward(q, replace(saved, v=q))
    assert [x.shape[0] for x in attn.backward(q, saved)] == [4, 6, 6]


def test_a_token_is_valid_though_it_sees_no_key():
    plan = attention().plan(PackedBatch([0, 3, 5], [0, 4, 6]), key_batch=PackedBatch([0, 1, 1]))
    assert plan.valid.tolist() == [True] * 3 + [False] + [True] * 2
    assert (np.diff(plan.key_ranges).ravel() > 0).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(("key_batch", "kind", "message"), [
    (np.array([0, 4], np.int32), TypeError, "key_batch is a ndarray, wanted a PackedBatch of the keys' lengths; make"),
    (PackedBatch([0, 4, 5]), ValueError, "key_batch has 2 sequences, wanted 1 as batch; pass one length of keys per"),
    (PackedBatch(DeviceOffsets(2), total_rows=4), ValueError,
     "batch has its lengths on the host but key_batch on a GPU; wanted both on one side; copy those of key_batch to"),
])
def test_bad_key_batch_names_what_is_wrong(key_batch, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        attention().plan(PackedBatch([0, 4]), key_batch=key_batch)


def test_keys_of_other_lengths_are_for_one_rank():
    message = r"key_batch was passed for 2 ranks, wanted one: .*; use thdattn\.comm\.init\('single'\)"

    def program(comm):
        with pytest.raises(ValueError, match=message):
            attention(comm).plan(PackedBatch([0, 4]), key_batch=PackedBatch([0, 8]))

    thdattn.comm.run_local(2, program)
