"""CPAttention over simulated ranks on the NumPy engine: the whole pipeline against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import (
    BFLOAT16,
    BIG,
    CASES,
    CP_SIZES,
    FIELDS,
    LONG,
    SMALL,
    Case,
    Exported,
    assemble,
    check,
    check_long,
    local_rows,
    random_inputs,
    run,
    truth,
)

import thdattn
from thdattn import oracle
from thdattn.engines import reference
from thdattn.packing import PackedBatch

FLOAT64, FLOAT32, FLOAT16 = map(np.dtype, ("float64", "float32", "float16"))


def every(cases, cp_sizes=CP_SIZES):
    return [
        pytest.param(case.slim(), cp_size, id=f"{case}-cp{cp_size}")
        for case in cases for cp_size in case.cp_sizes if cp_size in cp_sizes
    ]  # fmt: skip


def assert_same_bits(one, other):
    for field in FIELDS:
        assert one.tokens[field].tobytes() == other.tokens[field].tobytes(), field


@pytest.mark.parametrize(("case", "cp_size"), every(SMALL))
def test_float64_is_the_oracle(case, cp_size):
    check(case, FLOAT64, run(case, cp_size, FLOAT64, engine="reference"))


@pytest.mark.parametrize(("case", "cp_size"), every(SMALL))
def test_errs_no_more_than_plain_attention_in_bfloat16(case, cp_size):
    check(case, BFLOAT16, run(case, cp_size, BFLOAT16, engine="reference"))


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize(("case", "cp_size"), every(SMALL, (2,)))
def test_errs_no_more_than_plain_attention(case, cp_size, dtype):
    check(case, dtype, run(case, cp_size, dtype, engine="reference"))


@pytest.mark.parametrize(("case", "cp_size"), every(BIG, (8,)))
def test_big_packs_are_the_oracle(case, cp_size):
    check(case, FLOAT32, run(case, cp_size, FLOAT32, engine="reference"))


def test_one_document_of_32768_among_a_thousand_of_16():
    case = replace(LONG.slim(), lengths=(32_768, *LONG.lengths[1:]), heads=(1, 1))
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
          "te-2186", "window-two-sided", "ranks-of-padding", "ranks-of-padding-dual"]


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", PADDED)
def test_poison_in_rows_without_a_token_changes_no_bit(name, fill, dtype):
    case = CASES[name].slim()
    clean, poisoned = (run(case, 2, dtype, engine="reference", fill=value) for value in (0, fill))
    assert len(clean.padding["out"]), "the case has padding"
    check(case, dtype, poisoned)
    assert_same_bits(clean, poisoned)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("name", [*PADDED[:5], "full", "all-empty-padded", "gqa-12-2"])
def test_uninitialised_work_buffers_change_no_bit(name, cp_size, monkeypatch, request):
    case = CASES[name].slim()
    clean = run(case, cp_size, BFLOAT16, engine="reference")
    request.getfixturevalue("poisoned_host")
    poisoned = run(case, cp_size, BFLOAT16, engine="reference")
    check(case, BFLOAT16, poisoned)
    assert_same_bits(clean, poisoned)


def test_rank_without_a_valid_row_has_no_logit_of_its_own_and_the_maximum_of_all():
    case = CASES["ranks-of-padding"].slim()
    batch = case.batch(4)

    def program(comm):
        attention = case.attention(comm, FLOAT64, engine="reference")
        plan = attention.plan(batch, case.sharding)
        q, k, v, _ = (local_rows(batch, plan.rows, x, np.nan) for x in random_inputs(case, FLOAT64))
        _, saved = attention.forward(q, k, v, plan, return_max_logit=True)
        keys, values = (np.zeros((64, *x.shape[1:])) for x in (k, v))
        alone = reference.attn_fwd(q, keys, values, plan, 1.0, True)[2]
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
def test_layers_share_a_plan_and_keep_their_own_results(cp_size):
    """All forwards before all backwards, as in a model; layers differ in inputs, and in heads of the same dims."""
    layers = [replace(CASES["causal"].slim(), name=f"layer-{i}", heads=heads) for i, heads in enumerate(
        [(4, 2), (4, 2), (2, 1), (4, 2)])]
    batch = layers[0].batch(cp_size)
    sharding = thdattn.Sharding(batch, cp_size)

    def program(comm):
        attentions = [case.attention(comm, BFLOAT16, engine="reference") for case in layers]
        plan = attentions[0].plan(batch)
        forwards = []
        for case, attention in zip(layers, attentions, strict=True):
            q, k, v, dout = (local_rows(batch, plan.rows, x, np.nan) for x in random_inputs(case, BFLOAT16))
            forwards.append((dout, *attention.forward(q, k, v, plan, return_max_logit=True)))
        made = []
        for attention, (dout, out, saved) in zip(attentions, forwards, strict=True):
            dq, dk, dv = attention.backward(dout, saved)
            made.append(dict(zip(FIELDS, (out, saved.lse, saved.max_logit, dq, dk, dv), strict=True)))
        return made

    ranks = thdattn.comm.run_local(cp_size, program)
    for i, case in enumerate(layers):
        check(case, BFLOAT16, assemble(sharding, [made[i] for made in ranks]))


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


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("name", ["causal", "full", "window-lopsided", "repeated-offsets", "te-3331"])
def test_both_shardings_give_the_same_results(name, cp_size):
    one, other = (
        run(replace(CASES[name].slim(), sharding=sharding), cp_size, FLOAT64, engine="reference")
        for sharding in ("dual_chunk", "contiguous")
    )
    for field in FIELDS:
        np.testing.assert_allclose(one.tokens[field], other.tokens[field], rtol=1e-11, atol=1e-13, err_msg=field)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["causal", "gqa-12-2", "window-two-sided"])
def test_same_inputs_give_the_same_bits(name, deterministic):
    case = CASES[name].slim()
    first, *others = (
        run(case, 4, BFLOAT16, engine="reference", deterministic=deterministic) for _ in range(3)
    )
    for other in others:
        assert_same_bits(first, other)


def test_gradients_of_keys_are_rounded_once_after_the_sum_over_ranks():
    """Every key gets 256.5 from rank 0, then 1, 1 and 0.75: 259.25, in bfloat16 260. Rounded before, it is less."""
    case = Case("uniform", (64,), heads=(1, 1), dims=(8, 8), causal=False)

    def program(comm):
        attention = case.attention(comm, BFLOAT16, engine="reference")
        plan = attention.plan(PackedBatch([0, 64]))
        x = np.ones((16, 1, 8), BFLOAT16)
        _, saved = attention.forward(x, x, x, plan)  # all scores are equal: P is 1/64 everywhere
        dout = x * BFLOAT16.type([1024, 4, 4, 3][comm.rank])
        if comm.rank == 0:
            dout[0] = 1056
        return attention.backward(dout, saved)[2]

    for dv in thdattn.comm.run_local(4, program):
        assert (dv.astype(np.float64) == 260).all()


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


def test_arrays_that_are_not_contiguous_are_accepted():
    case = CASES["causal"].slim()
    check(case, FLOAT64, run(case, 2, FLOAT64, engine="reference", wrap=np.asfortranarray))


def test_inputs_are_left_as_they_were():
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 2, 8, dtype="float32", engine="reference")
    inputs = [np.random.default_rng(i).standard_normal((6, 2, 8), np.float32) for i in range(4)]
    copies = [x.copy() for x in inputs]
    for x in inputs:
        x.setflags(write=False)
    _, saved = attention.forward(*inputs[:3], attention.plan(PackedBatch([0, 5], [0, 6])))
    attention.backward(inputs[3], saved)
    for x, copy in zip(inputs, copies, strict=True):
        assert x.tobytes() == copy.tobytes()


def test_outputs_share_no_memory_with_inputs_or_the_next_call():
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 2, 8, dtype="float32", engine="reference")
    plan = attention.plan(PackedBatch([0, 4]))
    x = np.ones((4, 2, 8), np.float32)
    calls = []
    for _ in range(2):
        out, saved = attention.forward(x, x, x, plan)
        calls += [out, saved.lse, *attention.backward(x, saved)]
    for i, array in enumerate(calls):
        assert not any(np.shares_memory(array, other) for other in [*calls[:i], x])
