"""CPAttention over simulated ranks, on each engine: the whole pipeline against the oracle.

Every allocation starts as NaN, and every row that holds no token is NaN. Simulated ranks share one GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cases import (
    BFLOAT16,
    BIG,
    CASES,
    CROSS,
    DIMS,
    FIELDS,
    LONG,
    SMALL,
    Case,
    Exported,
    assemble,
    assert_same_bits,
    check,
    check_long,
    gpu_only,
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
from thdattn.kernels.configs import TILES
from thdattn.packing import PackedBatch

FLOAT64, FLOAT32, FLOAT16 = map(np.dtype, ("float64", "float32", "float16"))


@on_engines([*SMALL, *CROSS], seldom=(8,), reference=[FLOAT64, BFLOAT16], cuda=[FLOAT16, BFLOAT16],
            portable=[BFLOAT16])
def test_every_pack_and_mask_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines(SMALL, reference=[FLOAT32, FLOAT16], cp_sizes=(2,))
def test_other_dtypes_err_no_more_than_plain_attention(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines(BIG, reference=[FLOAT32], cuda=[BFLOAT16], cp_sizes=(1, 8), seldom=(1, 8))
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


def strided(xp, x):
    wide = xp.zeros((*x.shape[:2], 2 * x.shape[2]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def shifted(xp, x):
    """A view one element into a buffer is contiguous, but no kernel can read it 16 bytes at a time."""
    view = xp.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape)
    view[...] = x
    assert view.flags.c_contiguous and (xp is np or view.data.ptr % 16)
    return view


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("layout", [strided, shifted])
def test_arrays_that_are_not_contiguous_or_not_aligned_are_accepted(engine, layout, dtype):
    engine.check(CASES["causal"], 2, dtype, wrap=partial(layout, engine.xp))


# --- on a GPU alone --------------------------------------------------------------------------------------------

RINGS = [replace(case, name=f"{case}-ring", cp_comm_type="p2p", cp_sizes=(2, 4)) for case in DIMS]


@on_engines([*DIMS, *RINGS], cuda=[FLOAT16, BFLOAT16], portable=[BFLOAT16])
def test_every_head_dim_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines([*DIMS, *RINGS, *CROSS], cuda=[FLOAT16, BFLOAT16], portable=[BFLOAT16])
def test_deterministic_is_the_oracle_and_bitwise_the_same_three_times(engine, case, dtype, cp_size):
    assert_same_bits(*(engine.check(case, cp_size, dtype, deterministic=True) for _ in range(3)))


@on_engines([case for case in DIMS if case.heads[0] > case.heads[1]], cuda=[FLOAT16, BFLOAT16])
def test_query_heads_of_a_group_may_be_split(engine, monkeypatch, case, dtype, cp_size):
    from thdattn.engines.cuda import scheduler

    group = case.heads[0] // case.heads[1]
    for splits in (splits for splits in range(1, group + 1) if group % splits == 0):
        monkeypatch.setattr(scheduler, "splits_per_kv_head", lambda *_, splits=splits: [(splits, np.inf)])
        engine.check(case, cp_size, dtype)


@on_engines([
    Case(f"apart-{dim}-{mask}", (1300, 0, 90, 500), slack=70, heads=(4, 2), dims=(dim, dim), causal=causal,
         window=window, cp_sizes=(1, 2))
    for dim in (64, 128) for mask, causal, window in (("causal", True, (-1, -1)), ("window", False, (900, 200)))
], cuda=[BFLOAT16])
def test_tiles_of_keys_that_begin_their_queries_apart_are_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@gpu_only
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(18, 18), (6, 3)], ids=["mha", "gqa"])
def test_heads_done_in_several_groups_are_the_oracle(cupy, heads, deterministic):
    # So many tiles that the last group of heads is a small one, and others come before it.
    case = Case(f"{heads[0]}-heads-of-many-tiles", (34,) * 1000, heads=heads)
    check(case, BFLOAT16, run(case, 1, BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic))


@gpu_only
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_blocks_go_from_tile_to_tile(cupy, dims, deterministic):
    # What thread blocks and roles tell each other too early is wrong in one of some thousand calls.
    case = Case("many-tiles", (1100, 0, 64, 130, 600, 1), slack=150, heads=(12, 6), dims=dims, causal=False)
    options = {"deterministic": deterministic}
    check(case, BFLOAT16, run(case, 1, BFLOAT16, xp=cupy, engine="cuda", **options))
    attn, batch = case.attention(thdattn.comm.init("single"), BFLOAT16, **options), case.batch(1)
    q, k, v, dout = (cupy.asarray(local_rows(batch, np.arange(batch.total_rows), x, np.nan))
                     for x in random_inputs(case, BFLOAT16))
    _, saved = attn.forward(q, k, v, attn.plan(batch, case.sharding))

    def gradients():
        return [(x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in attn.backward(dout, saved)]

    first, farthest = gradients(), cupy.zeros(3, np.float32)
    for _ in range(1500):
        pairs = zip(gradients(), first, strict=True)
        farthest = cupy.maximum(farthest, cupy.stack([abs(x - y).max() for x, y in pairs]))
    within = [0 if deterministic else 0.02 * float(abs(x).max()) for x in first]
    assert (farthest.get() <= within).all(), (farthest, within)


@gpu_only
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cp_size", [1, 8])
def test_one_document_of_65536_among_a_thousand_of_16(cupy, cp_size, deterministic):
    outcome = run(LONG, cp_size, BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic)
    check_long(LONG, BFLOAT16, outcome)


@gpu_only
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_torch_tensors_go_in_and_results_become_torch_tensors(cupy, torch_cuda, dtype):
    torch = pytest.importorskip("torch")
    check(CASES["causal"], dtype, run(CASES["causal"], 2, dtype, xp=cupy, engine="cuda", wrap=torch.from_dlpack))
    x = torch.zeros(4, 2, 64, dtype=getattr(torch, str(dtype)), device=torch_cuda)
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 2, 64, dtype=dtype, engine="cuda")
    out, _ = attention.forward(x, x, x, attention.plan(PackedBatch([0, 4])))
    assert torch.from_dlpack(out).dtype == x.dtype


@gpu_only
def test_auto_takes_the_gpu_and_what_has_no_kernel_is_refused(cupy):
    make = partial(thdattn.CPAttention, thdattn.comm.init("single"), 2)
    attention = make(64)
    assert attention.engine == "cuda"
    x = np.zeros((4, 2, 64), BFLOAT16)
    for call, kind, message in (
        (lambda: attention.forward(x, cupy.asarray(x), cupy.asarray(x), attention.plan(PackedBatch([0, 4]))), TypeError,
         "q is a ndarray on the host, wanted an array on the GPU"),
        (lambda: make(72, engine="cuda"), ValueError, "head_dim/v_head_dim is 72/72, wanted one of 64, 96"),
        (lambda: make(64, dtype="float32", engine="cuda"), TypeError, "dtype is float32, wanted one of float16, bfl"),
        (lambda: make(64, dtype="float64", engine="cuda"), TypeError, "dtype is float64, wanted one of float16, bfl"),
    ):
        with pytest.raises(kind, match=message):
            call()
