"""CPAttention over simulated ranks, on each engine: the whole pipeline against the oracle.

Every allocation starts as NaN, and every row that holds no token is NaN. Simulated ranks share one GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import (
    BFLOAT16,
    BIG,
    CASES,
    CROSS,
    FIELDS,
    LONG,
    SMALL,
    Exported,
    assemble,
    assert_same_bits,
    check,
    check_long,
    local_rows,
    on_engines,
    random_inputs,
    run,
    to_host,
    truth,
)

import thdattn
from thdattn import oracle
from thdattn.engines import AttentionOptions, ForwardInputs, ForwardOutputs, reference
from thdattn.packing import PackedBatch

FLOAT64, FLOAT32, FLOAT16 = map(np.dtype, ("float64", "float32", "float16"))


@on_engines([*SMALL, *CROSS], seldom=(8,), reference=[FLOAT64, BFLOAT16], cuda=[FLOAT16, BFLOAT16],
            portable=[BFLOAT16])
def test_every_pack_and_mask_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines(SMALL, reference=[FLOAT32, FLOAT16], cp_sizes=(2,))
def test_other_dtypes_err_no_more_than_plain_attention(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@pytest.mark.exhaustive
@on_engines(BIG, reference=[FLOAT32], cp_sizes=(8,))
def test_big_packs_are_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@pytest.mark.parametrize("length", [4096, pytest.param(32_768, marks=pytest.mark.exhaustive)])
def test_one_long_document_among_many_of_16(length):
    case = replace(LONG.slim(), lengths=(length, *LONG.lengths[1:]), heads=(1, 1))
    check_long(case, FLOAT32, run(case, 4, FLOAT32, engine="reference"))


def test_softmax_scale_is_the_one_asked_for():
    case = CASES["worked-example"].slim()
    q, k, v, dout = random_inputs(case, FLOAT64)
    # Scaling q by c is scaling the softmax by c.
    doubled = oracle.packed_attention(PackedBatch([0, 7, 10]), 2 * q, k, v, dout, softmax_scale=0.5)
    outcome = run(case, 2, FLOAT64, engine="reference", softmax_scale=1.0)
    np.testing.assert_allclose(outcome.tokens["out"], doubled.out, rtol=1e-12)
    np.testing.assert_allclose(outcome.tokens["dq"], 2 * doubled.dq, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(outcome.tokens["dk"], doubled.dk, rtol=1e-11, atol=1e-13)


# --- padding and memory ----------------------------------------------------------------------------------------

PADDED = ["edge-lengths", "edge-lengths-contiguous", "capacity", "capacity-contiguous", "empty-but-padded-between",
          "te-2186", "window-two-sided", "ranks-of-padding", "ranks-of-padding-dual", "full"]


@pytest.mark.parametrize("fill", [np.inf, -np.inf])
@on_engines([CASES[name] for name in PADDED], reference=[FLOAT64, FLOAT16, BFLOAT16], cuda=[FLOAT16, BFLOAT16],
            cp_sizes=(2, 4), seldom=(2,))
def test_what_rows_without_a_token_hold_changes_no_bit(engine, case, dtype, cp_size, fill):
    finite, infinite, nan = (
        engine.check(case, cp_size, dtype, fill=value, deterministic=True) for value in (0, fill, np.nan))
    assert len(finite.padding["out"]), "the case has padding"
    assert_same_bits(finite, infinite, nan)


def test_rank_without_a_valid_row_has_no_logit_of_its_own_and_the_maximum_of_all():
    case = CASES["ranks-of-padding"].slim()
    batch = case.batch(4)

    def program(comm):
        attention = case.attention(comm, FLOAT64, engine="reference")
        plan = attention.plan(batch, case.sharding)
        q, k, v, _ = (local_rows(batch, plan.rows, x, np.nan) for x in random_inputs(case, FLOAT64))
        _, saved = attention.forward(q, k, v, plan, return_max_logit=True)
        keys, values = (np.zeros((64, *x.shape[1:])) for x in (k, v))
        _, _, alone = reference.attn_fwd(
            ForwardInputs(q, keys, values, plan), AttentionOptions(1.0), ForwardOutputs(max_logit=True))
        return saved.max_logit, alone, (saved.lse == -np.inf).all()

    ranks = thdattn.comm.run_local(4, program)
    exact = truth(case, FLOAT64).exact
    for cp_rank, (max_logit, alone, all_padding) in enumerate(ranks):
        np.testing.assert_allclose(max_logit, exact.max_logit, rtol=1e-6)
        assert (alone == -np.inf).all() == all_padding == (cp_rank > 0)


def test_max_logit_is_minus_infinity_without_a_token_anywhere():
    outcome = run(CASES["all-empty-padded"].slim(), 4, FLOAT32, engine="reference")
    assert all((max_logit == -np.inf).all() for max_logit in outcome.max_logits)


def test_max_logit_only_if_asked_for():
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 2, 8, dtype="float32", engine="reference")
    x = np.ones((4, 2, 8), np.float32)
    _, saved = attention.forward(x, x, x, attention.plan(PackedBatch([0, 4])))
    assert saved.max_logit is None


# --- plans, layers, ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_size", [1, 4])
def test_layers_share_a_plan_and_keep_their_own_results(engine, cp_size):
    """All forwards before all backwards, as in a model; layers differ in inputs, and in heads of the same dims."""
    layers = [replace(engine.suited(CASES["causal"]), name=f"layer-{i}", heads=heads) for i, heads in enumerate(
        [(4, 2), (4, 2), (2, 1), (4, 2)])]
    batch = layers[0].batch(cp_size)
    sharding = thdattn.Sharding(batch, cp_size)

    def program(comm):
        attentions = [case.attention(comm, BFLOAT16, engine=engine.name, deterministic=True) for case in layers]
        plan = attentions[0].plan(batch)
        forwards = []
        for case, attention in zip(layers, attentions, strict=True):
            q, k, v, dout = (engine.xp.asarray(local_rows(batch, sharding.rows(comm.rank), x, np.nan))
                             for x in random_inputs(case, BFLOAT16))
            forwards.append((dout, *attention.forward(q, k, v, plan, return_max_logit=True)))
        made = []
        for attention, (dout, out, saved) in zip(attentions, forwards, strict=True):
            arrays = out, saved.lse, saved.max_logit, *attention.backward(dout, saved)
            made.append(dict(zip(FIELDS, map(to_host, arrays), strict=True)))
        return made

    ranks = thdattn.comm.run_local(cp_size, program, timeout=240)
    for i, case in enumerate(layers):
        shared = assemble(sharding, [made[i] for made in ranks])
        assert_same_bits(shared, engine.check(case, cp_size, BFLOAT16, deterministic=True))


@pytest.mark.parametrize("strategy", ["dual_chunk", "contiguous"])
def test_sharding_object_is_taken_as_it_is(strategy):
    case = CASES["edge-lengths"].slim()
    batch = case.batch(4)
    sharding = thdattn.Sharding(batch, 4, strategy)

    def program(comm):
        attention = case.attention(comm, FLOAT64, engine="reference")
        plan = attention.plan(batch, sharding)
        assert plan.sharding is sharding
        q, k, v, dout = (sharding.shard(local_rows(batch, np.arange(batch.total_rows), x, np.nan), comm.rank)
                         for x in random_inputs(case, FLOAT64))
        out, saved = attention.forward(q, k, v, plan, return_max_logit=True)
        return dict(zip(FIELDS, (out, saved.lse, saved.max_logit, *attention.backward(dout, saved)), strict=True))

    check(case, FLOAT64, assemble(sharding, thdattn.comm.run_local(4, program)))


# --- arrays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, FLOAT16], ids=str)
def test_dlpack_arrays_of_the_host_are_read(dtype):
    case = CASES["edge-lengths"].slim()
    check(case, dtype, run(case, 2, dtype, engine="reference", wrap=Exported))


def test_dlpack_arrays_are_not_copied():
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 2, 8, dtype="float32", engine="reference")
    x = np.ones((4, 2, 8), np.float32)
    _, saved = attention.forward(Exported(x), x, x, attention.plan(PackedBatch([0, 4])))
    assert np.shares_memory(saved.q, x) and saved.k is x


def test_results_speak_dlpack():
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 2, 8, dtype="float32", engine="reference")
    x = np.ones((4, 2, 8), np.float32)
    out, saved = attention.forward(x, x, x, attention.plan(PackedBatch([0, 4])))
    for array in (out, saved.lse, *attention.backward(x, saved)):
        np.testing.assert_array_equal(np.from_dlpack(array), array)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_arrays_that_are_not_contiguous_are_accepted(engine, dtype):
    def strided(x):
        wide = engine.xp.zeros((*x.shape[:2], 2 * x.shape[2]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    engine.check(CASES["causal"], 2, dtype, wrap=strided)
