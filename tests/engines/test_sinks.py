"""Attention sinks and soft-capped logits: the oracle by finite differences, the NumPy engine by the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, Case, check, on_all_kernels, random_inputs, random_sinks, run, to_host
from ways import BY_NAME, TELLING, of, run_way

import thdattn
from thdattn import PackedBatch, oracle

FLOAT64 = np.dtype("float64")
KINDS = {"sinks": {"sinks": True}, "softcap": {"softcap": 1.5}, "both": {"softcap": 1.5, "sinks": True}}


def tiny(seed=0, num_heads=4):
    rng = np.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal((7, heads, 5)) for heads in (num_heads, 2, 2, num_heads))
    return q, k, v, dout, rng.standard_normal(num_heads)


# --- the oracle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0])
@pytest.mark.parametrize("mask", [{"causal": True}, {"causal": False, "window": (2, 1)}], ids=["causal", "window"])
def test_gradients_of_the_oracle_are_those_of_finite_differences(mask, softcap):
    q, k, v, dout, sinks = tiny()
    right = oracle.attention(q, k, v, dout, softcap=softcap, sinks=sinks, **mask)

    def loss():
        return (oracle.attention(q, k, v, softcap=softcap, sinks=sinks, **mask).out * dout).sum()

    for x, grad in zip((q, k, v, sinks), (right.dq, right.dk, right.dv, right.dsinks), strict=True):
        for at in list(np.ndindex(x.shape))[:: max(1, x.size // 12)]:
            before, losses = x[at], []
            for step in (1e-5, -1e-5):
                x[at] = before + step
                losses.append(loss())
            x[at] = before
            np.testing.assert_allclose((losses[0] - losses[1]) / 2e-5, grad[at], rtol=1e-6, atol=1e-8)


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


# --- the NumPy engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", TELLING, ids=str)
@pytest.mark.parametrize("name", ["causal", "window-two-sided", "padded-between"])
def test_every_method_is_the_oracle_in_float64(name, way, kind, poisoned_host):
    case = replace(of(way, name), **KINDS[kind])
    check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_errs_no_more_than_fused_attention(cp_size, dtype, kind, poisoned_host):
    dtype = np.dtype(dtype)
    case = replace(BY_NAME["causal"], dims=(12, 8), **KINDS[kind])
    check(case, dtype, run(case, cp_size, dtype, engine="reference", head_groups=2))


@pytest.mark.parametrize("keys", [(0, 50, 9, 2), (7, 7, 9, 40)])
def test_queries_that_see_no_key_leave_the_sink_alone(keys):
    case = Case("cross", (7, 7, 9, 30), keys=keys, dims=(12, 8), window=(5, 0), cp_sizes=(1,), **KINDS["both"])
    outcome = run(case, 1, FLOAT64, engine="reference")
    check(case, FLOAT64, outcome)
    if 0 in keys:
        assert (outcome.tokens["lse"][:, :7] == -np.inf).all()


def results(engine, sinks, softcap=0.0):
    """out, lse, dq, dk, dv and, with sinks, dsinks of one rank."""
    case = Case("sinks", (257, 3, 64, 0, 100, 17, 190), dims=(128, 128), softcap=softcap, sinks=sinks is not None)
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


@pytest.mark.parametrize("kind", KINDS)
def test_decode_is_the_forward(kind):
    case = replace(BY_NAME["one-document"], dims=(12, 8), **KINDS[kind])
    q, k, v, _ = random_inputs(case, FLOAT64)
    sinks = random_sinks(case, FLOAT64)
    layer = case.attention(thdattn.comm.init("single"), FLOAT64, engine="reference")
    wanted, _ = layer.forward(q, k, v, layer.plan(PackedBatch([0, len(q)])), sinks=sinks)
    cache = layer.cache(1, len(q))
    found = [layer.decode(q[rows], k[rows], v[rows], cache, sinks=sinks) for rows in (slice(0, 150), slice(150, None))]
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-12, atol=1e-13)


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
])  # fmt: skip
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
