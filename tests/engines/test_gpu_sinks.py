"""Attention sinks and soft-capped logits of the CUDA engine against the float64 oracle, on one GPU.

Every allocation starts as NaN and every row that holds no token is NaN.
"""

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
    on_engines,
    random_inputs,
    random_sinks,
    to_host,
)
from ways import Way, run_way, ways

import thdattn
from thdattn import PackedBatch, oracle
from thdattn.kernels.configs import TILES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

FLOAT16 = np.dtype("float16")
# A cap of 30 is far above these logits, 1.5 is among them.
KINDS = {"sinks": {"sinks": True}, "softcap": {"softcap": 30.0}, "low": {"softcap": 1.5},
         "both": {"softcap": 30.0, "sinks": True}}  # fmt: skip
MIXED = (257, 3, 64, 0, 100, 17, 190)
WAYS = [*ways((2, 2), sizes=(4,), heads=(4,)), Way("all_gather", "dual_chunk", 2)]


def with_kinds(cases, kinds=KINDS):
    return [replace(case, name=f"{case}-{kind}", **KINDS[kind]) for case in cases for kind in kinds]


@on_engines(with_kinds(DIMS), cuda=[BFLOAT16], portable=[BFLOAT16], cp_sizes=(1,))
def test_every_head_dim_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines(with_kinds([case for case in DIMS if case.dims[0] in (64, 128)]), cuda=[FLOAT16], cp_sizes=(4,))
def test_float16_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines(with_kinds(DIMS, ["both"]), cuda=[BFLOAT16], portable=[BFLOAT16], cp_sizes=(2,))
def test_deterministic_is_the_oracle_and_bitwise_the_same(engine, case, dtype, cp_size):
    assert_same_bits(*(engine.check(case, cp_size, dtype, deterministic=True) for _ in range(2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_method_is_the_oracle(cupy, kernels, way, kind):
    case = Case("methods", MIXED, heads=way.heads, dims=(128, 128), **KINDS[kind])
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, xp=cupy, engine="cuda"))


@on_engines(
    with_kinds([CASES[name] for name in ("cross-causal", "cross-window-lopsided", "cross-sees-nothing",
                                         "capacity-of-a-tile")], ["both"]),
    cuda=[BFLOAT16], portable=[BFLOAT16], cp_sizes=(1,))  # fmt: skip
def test_rows_that_see_no_key_leave_the_sink_alone(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


def judged(cupy, case, dtype, scale, shift=0.0, far=1.0, apart=97):
    """Verdicts on out, dq, dk and dv of logits that are `scale` times as large as usual; dsinks is checked.

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
    fields = zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)
    return {field: truth.judge(field, to_host(x)) for field, x in fields}


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("softcap", "scale"), [*itertools.product((5.0, 50.0, 1e4), (1.0, 4.0)), (0.0, 4.0)])
@pytest.mark.parametrize("dims", [(128, 128), (192, 192)], ids=str)
def test_caps_are_exact_where_tanh_is_flat_and_where_it_bends(cupy, kernels, dims, softcap, scale, dtype):
    case = Case("bends", (500, 40), heads=(4, 2), dims=dims, softcap=softcap, sinks=True)
    for field, verdict in judged(cupy, case, dtype, scale).items():
        assert verdict.good, f"{field}: {verdict}"


@pytest.mark.parametrize(("softcap", "scale", "length", "apart"), [
    (5.0, 0.5, 500, 97), (15.0, 0.5, 500, 97), (50.0, 0.5, 500, 97), (50.0, 0.5, 2400, 1009), (30.0, 4.0, 2400, 1009)])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_caps_are_exact_where_few_logits_are_far_from_0(cupy, kernels, dims, softcap, scale, length, apart):
    """Those of a few keys, far above and far below the others, and the cap too: there no polynomial is right."""
    case = Case("far", (length, 40), heads=(4, 2), dims=dims, softcap=softcap, sinks=True)
    for field, verdict in judged(cupy, case, BFLOAT16, scale, far=2 * softcap, apart=apart).items():
        assert verdict.good, f"{field}: {verdict}"


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_logits_that_are_all_below_0_are_exact(cupy, kernels, dims, softcap, dtype):
    case = Case("below", (500, 40), heads=(4, 2), dims=dims, softcap=softcap, sinks=True)
    for field, verdict in judged(cupy, case, dtype, 1.0, shift=12.0).items():
        assert verdict.good, f"{field}: {verdict}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_decode_is_the_oracle(cupy, dims, kind):
    case = Case("decode", (700,), heads=(8, 2), dims=dims, **KINDS[kind])
    q, k, v, _ = random_inputs(case, BFLOAT16)
    sinks = random_sinks(case, BFLOAT16)
    layer = case.attention(thdattn.comm.init("single"), BFLOAT16, engine="cuda")
    cache = layer.cache(1, 700)
    given = None if sinks is None else cupy.asarray(sinks)
    parts = [layer.decode(*(cupy.asarray(x[rows]) for x in (q, k, v)), cache, sinks=given)
             for rows in (slice(0, 650), slice(650, 699), slice(699, 700))]
    truth = oracle.truth(PackedBatch([0, 700]), q, k, v, softcap=case.softcap, sinks=sinks)
    verdict = truth.judge("out", np.concatenate([to_host(x) for x in parts]))
    assert verdict.good, verdict


def test_a_captured_graph_reads_the_sinks_that_are_there_and_writes_to_nothing_made_since(cupy):
    case = Case("graph", MIXED, dims=(128, 128), sinks=True)
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
