"""Attention sinks and soft-capped logits: what the oracle makes of them, and each engine by the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cases import (
    BFLOAT16,
    CASES,
    DIMS,
    Case,
    assert_same_bits,
    check,
    check_dsinks,
    gpu_only,
    on_all_kernels,
    on_engines,
    random_inputs,
    random_sinks,
    run,
    to_host,
)
from ways import BY_NAME, Way, run_way, ways

import thdattn
from thdattn import PackedBatch, oracle
from thdattn.kernels.configs import TILES

FLOAT64, FLOAT32, FLOAT16 = map(np.dtype, ("float64", "float32", "float16"))
# A cap of 30 is far above most logits, 1.5 is among them.
KINDS = {"sinks": {"sinks": True}, "softcap": {"softcap": 30.0}, "low": {"softcap": 1.5},
         "both": {"softcap": 30.0, "sinks": True}}
LENGTHS = (257, 3, 64, 0, 100, 17, 190)
WAYS = [*ways((2, 2), sizes=(3, 4), heads=(4,)), Way("all_gather", "dual_chunk", 2)]


def with_kinds(cases, kinds=KINDS):
    return [replace(case, name=f"{case}-{kind}", **KINDS[kind]) for case in cases for kind in kinds]


def tiny(num_heads=4):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((7, heads, 5)) for heads in (num_heads, 2, 2, num_heads))
    return q, k, v, dout, rng.standard_normal(num_heads)


# --- the oracle ------------------------------------------------------------------------------------------------


def test_a_sink_is_one_more_key_whose_value_is_zero():
    """Of queries and keys with one more column: 1 in queries, and in a key before the others the sink, else 0."""
    q, k, v, dout, sinks = tiny(num_heads=2)
    wide_q = np.concatenate([q, np.ones((7, 2, 1))], axis=2)
    wide_k = np.concatenate([k, np.zeros((7, 2, 1))], axis=2)
    sink = np.concatenate([np.zeros((1, 2, 5)), sinks[None, :, None]], axis=2)
    keys, values = np.concatenate([sink, wide_k]), np.concatenate([np.zeros((1, 2, 5)), v])
    more = oracle.attention(wide_q, keys, values, dout, softmax_scale=1.0)
    found = oracle.attention(q, k, v, dout, softmax_scale=1.0, sinks=sinks)
    for one, other in ((found.out, more.out), (found.lse, more.lse), (found.dq, more.dq[..., :5]),
                       (found.dk, more.dk[1:, :, :5]), (found.dv, more.dv[1:]), (found.dsinks, more.dk[0, :, 5])):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def test_a_cap_far_above_all_logits_is_none_and_a_low_one_bounds_them():
    q, k, v, dout, _ = tiny()
    plain, high, low = (oracle.attention(q, k, v, dout, softcap=cap) for cap in (0.0, 1e7, 0.01))
    for field in ("out", "lse", "max_logit", "dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(high, field), getattr(plain, field), rtol=1e-12, atol=1e-12)
    assert low.max_logit.max() <= 0.01 < plain.max_logit.min()


# --- each engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=str)
@on_all_kernels
def test_every_method_is_the_oracle(engine, way, kind):
    cases, dtype = [Case("methods", LENGTHS, dims=(128, 128))], BFLOAT16
    if engine.name == "reference":
        cases, dtype = [BY_NAME[name].slim() for name in ("causal", "window-two-sided", "padded-between")], FLOAT64
    for case in cases:
        case = replace(case, heads=way.heads, **KINDS[kind])
        check(case, dtype, run_way(case, way, dtype, xp=engine.xp, engine=engine.name))


@on_engines(with_kinds([BY_NAME["causal"]]), reference=[BFLOAT16, FLOAT32], cp_sizes=(1, 2, 4))
def test_errs_no_more_than_fused_attention(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype, head_groups=2)


@on_engines(with_kinds([CASES[name] for name in ("cross-causal", "cross-window-lopsided", "cross-sees-nothing",
                                                 "capacity-of-a-tile")], ["both"]),
            reference=[FLOAT64], cuda=[BFLOAT16], portable=[BFLOAT16], cp_sizes=(1,))
def test_rows_that_see_no_key_leave_the_sink_alone(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("engine", "dims"), [
    ("reference", (12, 8)), *(pytest.param("cuda", dims, marks=pytest.mark.gpu) for dims in TILES),
], indirect=["engine"], ids=str)
def test_decode_is_the_oracle(engine, dims, kind):
    case = Case("decode", (700,), heads=(8, 2), dims=dims, **KINDS[kind])
    q, k, v, _ = random_inputs(case, BFLOAT16)
    sinks = random_sinks(case, BFLOAT16)
    layer = case.attention(thdattn.comm.init("single"), BFLOAT16, engine=engine.name)
    cache = layer.cache(1, 700)
    given = None if sinks is None else engine.xp.asarray(sinks)
    parts = [layer.decode(*(engine.xp.asarray(x[rows]) for x in (q, k, v)), cache, sinks=given)
             for rows in (slice(0, 650), slice(650, 699), slice(699, 700))]
    truth = oracle.truth(PackedBatch([0, 700]), q, k, v, softcap=case.softcap, sinks=sinks)
    verdict = truth.judge("out", np.concatenate([to_host(x) for x in parts]))
    assert verdict.good, verdict


def results(engine, sinks, softcap=0.0):
    """out, lse, dq, dk, dv and, with sinks, dsinks of one rank."""
    case = Case("sinks", LENGTHS, dims=(128, 128), softcap=softcap, sinks=sinks is not None)
    q, k, v, dout = map(engine.xp.asarray, random_inputs(case, BFLOAT16))
    layer = case.attention(thdattn.comm.init("single"), BFLOAT16, engine=engine.name, deterministic=True)
    plan = layer.plan(PackedBatch.from_lengths(case.lengths))
    out, saved = layer.forward(q, k, v, plan, sinks=None if sinks is None else engine.xp.asarray(sinks))
    return [to_host(x) for x in (out, saved.lse, *layer.backward(dout, saved))]


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@on_all_kernels
def test_a_sink_of_minus_infinity_is_none_bit_by_bit(engine, softcap):
    *found, dsinks = results(engine, np.full(4, -np.inf, np.float32), softcap)
    assert [x.tobytes() for x in found] == [x.tobytes() for x in results(engine, None, softcap)]
    assert not dsinks.any()


@pytest.mark.parametrize("sink", [1e4, 3e38])
@on_all_kernels
def test_a_sink_far_above_all_logits_takes_everything(engine, sink):
    out, lse, *grads = results(engine, np.full(4, sink, np.float32))
    assert not out.any() and (lse == np.float32(sink)).all()
    for grad in grads:
        assert not grad.any()


def test_gradients_of_sinks_are_shares_of_ranks():
    case = replace(BY_NAME["causal"], dims=(12, 8), sinks=True)
    batch, sinks = case.batch(2), random_sinks(case, FLOAT64)

    def program(comm):
        layer = case.attention(comm, FLOAT64, engine="reference")
        plan = layer.plan(batch)
        q, k, v, dout = (plan.shard(batch.pack(np.split(x, batch.cu_seqlens[1:-1])))
                         for x in random_inputs(case, FLOAT64))
        _, saved = layer.forward(q, k, v, plan, sinks=sinks)
        _, rest = layer.start_backward(dout, saved)
        *_, dsinks = rest()
        assert dsinks.tobytes() == layer.backward(dout, saved)[3].tobytes()
        return dsinks

    shares = thdattn.comm.run_local(2, program)
    assert (shares[0] != shares[1]).all()
    np.testing.assert_allclose(sum(shares), run(case, 1, FLOAT64, engine="reference").tokens["dsinks"], rtol=1e-12)


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "sinks", "error", "says"), [
    ({"sinks": True}, None, ValueError, "sinks is None, but the attention was made with sinks=True"),
    ({}, np.zeros(4, np.float32), ValueError, "made with sinks=False, wanted one with the other"),
    ({"sinks": True}, np.zeros(4), TypeError, "sinks is float64, wanted float32, as lse; cast it"),
    ({"sinks": True}, np.zeros(2, np.float32), ValueError, r"sinks has shape \(2,\), wanted \(4,\)"),
    ({"sinks": True}, 0.5, TypeError, "sinks is a builtins.float"),
    ({"sinks": 1}, None, TypeError, "sinks is 1, a int; wanted True or False"),
    ({"softcap": -1.0}, None, ValueError, "softcap is -1.0, wanted a finite number > 0; 0 is no cap"),
    ({"softcap": "30"}, None, TypeError, "softcap is '30', wanted a number; 0 is no cap"),
    ({"softcap": True}, None, TypeError, "softcap is True, wanted a number"),
    ({"softcap": np.inf}, None, ValueError, "softcap is inf, wanted a finite number > 0"),
])
def test_wrong_arguments_say_what_is_wanted(options, sinks, error, says):
    with pytest.raises(error, match=says):
        layer = thdattn.CPAttention(thdattn.comm.init("single"), 4, 8, dtype="float32", engine="reference", **options)
        x = np.zeros((3, 4, 8), np.float32)
        layer.forward(x, x, x, layer.plan(PackedBatch([0, 3])), sinks=sinks)


def test_saved_of_another_cap_or_with_changed_sinks_is_refused():
    x = np.zeros((3, 4, 8), np.float32)
    comm, batch = thdattn.comm.init("single"), PackedBatch([0, 3])
    layers = [thdattn.CPAttention(comm, 4, 8, dtype="float32", engine="reference", sinks=True, softcap=cap)
              for cap in (1.0, 2.0)]
    _, saved = layers[0].forward(x, x, x, layers[0].plan(batch), sinks=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"softcap 1\.0, wanted 2\.0"):
        layers[1].backward(x, saved)
    with pytest.raises(ValueError, match=r"saved\.sinks is"):
        layers[0].backward(x, replace(saved, sinks=np.zeros(3, np.float32)))


# --- on a GPU alone --------------------------------------------------------------------------------------------


@on_engines(with_kinds(DIMS), cuda=[BFLOAT16], portable=[BFLOAT16], cp_sizes=(1,))
def test_every_head_dim_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines(with_kinds([case for case in DIMS if case.dims[0] in (64, 128)]), cuda=[FLOAT16], cp_sizes=(4,))
def test_float16_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines(with_kinds(DIMS, ["both"]), cuda=[BFLOAT16], portable=[BFLOAT16], cp_sizes=(2,))
def test_deterministic_is_the_oracle_and_bitwise_the_same(engine, case, dtype, cp_size):
    assert_same_bits(*(engine.check(case, cp_size, dtype, deterministic=True) for _ in range(2)))


def assert_exact(cupy, case, dtype, scale, shift=0.0, far=1.0, apart=97):
    """Judge out, dq, dk, dv and dsinks of logits that are `scale` times as large as usual.

    shift: of one column of q and, the other way, of k, so that logits are below 0. far: a factor of a few keys, so many
    rows `apart`.
    """
    q, k, v, dout = random_inputs(case, dtype)
    k[7::apart] *= np.asarray(far, dtype)
    q[..., 0] += np.asarray(shift, dtype)
    k[..., 0] -= np.asarray(shift, dtype)
    sinks = random_sinks(case, dtype)
    batch = PackedBatch(np.cumsum([0, *case.lengths]).astype(np.int32))
    scale *= case.dims[0] ** -0.5
    layer = case.attention(thdattn.comm.init("single"), dtype, engine="cuda", softmax_scale=scale)
    out, saved = layer.forward(*map(cupy.asarray, (q, k, v)), layer.plan(batch), sinks=cupy.asarray(sinks))
    *grads, dsinks = layer.backward(cupy.asarray(dout), saved)
    truth = oracle.truth(batch, q, k, v, dout, softmax_scale=scale, softcap=case.softcap, sinks=sinks)
    check_dsinks(truth, dout, sinks, to_host(dsinks))
    for field, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        verdict = truth.judge(field, to_host(x))
        assert verdict.good, f"{field}: {verdict}"


@gpu_only
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("softcap", "scale"), [*itertools.product((5.0, 50.0, 1e4), (1.0, 4.0)), (0.0, 4.0)])
@pytest.mark.parametrize("dims", [(128, 128), (192, 192)], ids=str)
def test_caps_are_exact_where_tanh_is_flat_and_where_it_bends(cupy, kernels, dims, softcap, scale, dtype):
    case = Case("bends", (500, 40), heads=(4, 2), dims=dims, softcap=softcap, sinks=True)
    assert_exact(cupy, case, dtype, scale)


@gpu_only
@pytest.mark.parametrize(("softcap", "scale", "length", "apart"), [
    (5.0, 0.5, 500, 97), (15.0, 0.5, 500, 97), (50.0, 0.5, 500, 97), (50.0, 0.5, 2400, 1009), (30.0, 4.0, 2400, 1009)])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_caps_are_exact_where_few_logits_are_far_from_0(cupy, kernels, dims, softcap, scale, length, apart):
    """Those of a few keys, far above and far below the others, and the cap too: there no polynomial is right."""
    case = Case("far", (length, 40), heads=(4, 2), dims=dims, softcap=softcap, sinks=True)
    assert_exact(cupy, case, BFLOAT16, scale, far=2 * softcap, apart=apart)


@gpu_only
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_logits_that_are_all_below_0_are_exact(cupy, kernels, dims, softcap, dtype):
    case = Case("below", (500, 40), heads=(4, 2), dims=dims, softcap=softcap, sinks=True)
    assert_exact(cupy, case, dtype, 1.0, shift=12.0)


@gpu_only
def test_a_captured_graph_reads_the_sinks_that_are_there_and_writes_to_nothing_made_since(cupy):
    case = Case("graph", LENGTHS, dims=(128, 128), sinks=True)
    batch = PackedBatch(np.cumsum([0, *case.lengths]).astype(np.int32))
    q, k, v, dout = map(cupy.asarray, random_inputs(case, BFLOAT16))
    sinks = cupy.zeros(4, np.float32)
    layer = case.attention(thdattn.comm.init("single"), BFLOAT16, engine="cuda", deterministic=True)

    def step(plan):
        out, saved = layer.forward(q, k, v, plan, sinks=sinks)
        return saved, (out, *layer.backward(dout, saved))

    with cupy.cuda.Stream(non_blocking=True) as stream:
        plan = layer.plan(batch)
        step(plan)
        stream.begin_capture()
        _saved, made = step(plan)  # kept, as replays write that again too
        graph = stream.end_capture()
        others = [cupy.full(size, 0xAB, np.uint8) for size in (16, 512, 1024, 2048, 4096, 2**14) for _ in range(16)]
        sinks[...] = cupy.asarray(random_sinks(case, BFLOAT16))
        graph.launch()
        found = [to_host(x) for x in made]
        assert [x.tobytes() for x in found] == [to_host(x).tobytes() for x in step(plan)[1]]
        assert all((to_host(x) == 0xAB).all() for x in others)
