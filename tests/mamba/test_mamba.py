"""The Mamba-2 mixer over simulated ranks on the NumPy engine, against the recurrence row by row in float64."""

from __future__ import annotations

import numpy as np
import pytest
from mixer_cases import (
    BFLOAT16,
    CASES,
    FIELDS,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    MANY,
    Case,
    assert_equal,
    assert_same_bits,
    random_inputs,
    run,
    truth,
)

import thdattn
from thdattn import oracle
from thdattn.mamba import oracle as mamba_oracle
from thdattn.mamba.oracle import Sizes

EXACT = 1e-12  # of float64
CP_SIZES = [1, 3, 4, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 8))]


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_float64_is_the_recurrence(case, cp_size):
    assert_equal(run(case, cp_size, FLOAT64), truth(case, FLOAT64), EXACT)


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_a_thousand_short_documents(cp_size):
    assert_equal(run(MANY, cp_size, FLOAT64), truth(MANY, FLOAT64), EXACT)


@pytest.mark.parametrize("name", ["ranks-of-padding", "fewer-rows-than-ranks", "no-sequences-slack", "capacity"])
def test_ranks_without_rows_give_nothing_and_keep_the_others_right(name):
    case = CASES[name]
    made = run(case, 8, FLOAT64)
    assert_equal(made, truth(case, FLOAT64), EXACT)
    tokens = [case.valid[part].any() for part in np.array_split(np.arange(len(case.valid)), 8)]
    if len(case.valid) % 8 == 0:
        for rank in np.flatnonzero(~np.array(tokens)):
            assert not any(made[field][rank].any() for field in FIELDS[2:]), "gradients of weights"


def test_resets_inside_chunks_keep_sums_apart():
    """A huge dt in one document leaves no rounding in the sums of the next, in the same chunk."""
    case = CASES["resets-inside-chunks"]
    inputs = random_inputs(case, FLOAT32)
    calm = run(case, 1, FLOAT32, inputs)
    zxbcdt = inputs[0].copy()
    zxbcdt[10:60, -case.sizes.num_heads :] = 1e6
    wild = run(case, 1, FLOAT32, (zxbcdt, *inputs[1:]))
    others = np.r_[0:10, 60 : len(zxbcdt)]
    for field in ("out", "zxbcdt"):
        assert calm[field][others].tobytes() == wild[field][others].tobytes()


# --- errors ----------------------------------------------------------------------------------------------------------

LONGER = [CASES[name] for name in ("resets-inside-chunks", "chunk-edges", "padding-ends-a-chunk", "over-all-ranks",
                                   "ends-with-a-rank", "one-group", "a-group-per-head", "convolution-of-nine")]
WIDE = Case("wide", (200, 57, 130), sizes=Sizes(2, 64, 128, 1))


@pytest.mark.parametrize("cp_size", [1, 3, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_errs_no_more_than_plain_maths(dtype, cp_size):
    """Rows by the accuracy rule; gradients of weights are few numbers, so those of all cases are judged together."""
    errors = {field: [] for field in FIELDS[2:]}
    for case in (*LONGER, WIDE):
        made, exact, plain = run(case, cp_size, dtype), truth(case, dtype), truth(case, dtype, dtype)
        for field in ("out", "zxbcdt"):
            verdict = oracle.judge(made[field], getattr(exact, field), getattr(plain, field))
            assert made[field].dtype == dtype and verdict.rms <= verdict.rms_budget, f"{field} of {case}: {verdict}"
        for field, pairs in errors.items():
            assert made[field].dtype == FLOAT32
            wanted = getattr(exact, field)
            found = made[field].astype(np.float64).sum(axis=0)
            size = np.sqrt(np.mean(wanted**2))
            pairs.append([np.mean((x - wanted) ** 2) / size**2 for x in (found, getattr(plain, field))])
    for field, pairs in errors.items():
        ours, plains = np.sqrt(np.mean(pairs, axis=0))
        assert ours <= 2 * plains + np.finfo(np.float32).eps, f"{field}: {ours:.1e}, plain {plains:.1e}"


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_rows_of_a_wide_mixer_are_rounded_as_often_as_in_plain_maths(dtype):
    """The rule is that of attention: the largest error hides a second rounding, RMS does not."""
    exact, plain = truth(WIDE, dtype), truth(WIDE, dtype, dtype)
    columns = {"out": {"out": slice(None)},
               "zxbcdt": {"z": slice(128), "x": slice(128, 256), "B": slice(256, 384), "C": slice(384, 512)}}
    for cp_size in (1, 4):
        made = run(WIDE, cp_size, dtype)
        for field, parts in columns.items():
            for name, part in parts.items():
                wanted, baseline = (getattr(x, field)[:, part] for x in (exact, plain))
                verdict = oracle.judge(made[field][:, part], wanted, baseline, fused=baseline)
                assert verdict.good, f"{name} of {field} at cp {cp_size}: {verdict}"


def test_extreme_steps_and_rates():
    """Sums of a reach 1e5 in a chunk, and what they have lost by then, differences of theirs have lost too."""
    case = Case("extreme", (90, 3, 70), sizes=Sizes(4, 3, 5, 1))
    zxbcdt, weights, dout = random_inputs(case, FLOAT64)
    rng = np.random.default_rng(0)
    zxbcdt[:, -4:] = rng.choice([-200, -20, -7, 0, 3, 30, 100], (len(zxbcdt), 4))
    weights = weights._replace(A_log=np.array([-5.0, 0, 3, 5]), dt_bias=np.zeros(4))
    wanted = mamba_oracle.packed_mixer(case.batch, zxbcdt, weights, dout, case.sizes)
    for cp_size in (1, 3):
        assert_equal(run(case, cp_size, FLOAT64, (zxbcdt, weights, dout)), wanted, 1e-10)
    single = zxbcdt.astype(FLOAT32), thdattn.Mamba2Weights(*(x.astype(FLOAT32) for x in weights)), dout.astype(FLOAT32)
    wanted, plain = (mamba_oracle.packed_mixer(case.batch, *single, case.sizes, kind) for kind in (None, FLOAT32))
    made = run(case, 3, FLOAT32, single)
    for field in ("out", "zxbcdt"):
        verdict = oracle.judge(made[field], getattr(wanted, field), getattr(plain, field))
        assert verdict.good, f"{field}: {verdict}"


def test_small_steps_are_not_lost():
    """softplus(x) is exp(x) far below 0, where log(1 + exp(x)) in float32 is 0."""
    case = Case("one", (1,), sizes=Sizes(1, 1, 1, 1), conv_width=1)
    ones = np.ones(1, FLOAT32)
    weights = thdattn.Mamba2Weights(np.ones((3, 1), FLOAT32), np.zeros(3, FLOAT32), ones * 0, ones * 0, ones * 0)
    for raw in (-5, -9, -12, -18, -40):
        inputs = np.array([[1, 1, 1, 1, raw]], FLOAT32), weights, np.ones((1, 1), FLOAT32)
        made = run(case, 1, FLOAT32, inputs)
        share = 1 / (1 + np.exp(-1.0))  # out = dt * silu(1)^4
        np.testing.assert_allclose(made["out"], np.log1p(np.exp(float(raw))) * share**4, rtol=1e-6)


@pytest.mark.parametrize("rows", [16_384, pytest.param(131_072, marks=pytest.mark.exhaustive)])
def test_a_sum_over_many_rows_without_decay_and_the_gradients_of_the_weights(rows):
    """A is 0 for the first head, so that its state is a cumulative sum of positive numbers; ranks add up in float32."""
    case = Case("long", (rows,), sizes=Sizes(2, 1, 1, 1))
    zxbcdt, weights, dout = random_inputs(case, FLOAT32)
    weights = weights._replace(A_log=np.float32([-np.inf, 0.5]), D=np.zeros(2, np.float32))
    zxbcdt[:, 2:6] = np.abs(zxbcdt[:, 2:6])
    weights.conv_weight[...], weights.conv_bias[...] = np.abs(weights.conv_weight), 0
    double = zxbcdt.astype(FLOAT64), thdattn.Mamba2Weights(*(x.astype(FLOAT64) for x in weights)), dout.astype(FLOAT64)
    exact, made = run(case, 1, FLOAT64, double), run(case, 4, FLOAT32, (zxbcdt, weights, dout))

    def silu(x):
        return x / (1 + np.exp(-x))

    columns = np.concatenate([np.zeros((3, 4)), double[0][:, 2:6]])
    x, _, b, c = silu(sum(columns[i : i + rows] * double[1].conv_weight[:, i] for i in range(4))).T
    dt = np.log1p(np.exp(double[0][:, 6] + double[1].dt_bias[0]))
    np.testing.assert_allclose(exact["out"][:, 0], np.cumsum(dt * x * b) * c * silu(double[0][:, 0]), rtol=1e-9)

    np.testing.assert_allclose(made["out"], exact["out"], rtol=1e-4, atol=1e-6)
    for field in FIELDS[2:]:
        ours, wanted = made[field].astype(np.float64).sum(axis=0), exact[field].sum(axis=0)
        assert np.abs(ours - wanted).max() <= 1e-5 * np.abs(wanted).max(), field


def test_float16_states_may_leave_its_range():
    case = Case("large-states", (1500,), sizes=Sizes(1, 2, 2, 1), conv_width=1)
    zxbcdt, weights, dout = random_inputs(case, FLOAT16)
    zxbcdt[:, 2:6], zxbcdt[:, 6:8] = 60, 1e-3  # x and B make a state beyond 65504, which C leaves little of
    weights = weights._replace(A_log=np.float32([-20]), dt_bias=np.float32([1]))
    weights.conv_weight[...], weights.conv_bias[...] = 1, 0
    exact = mamba_oracle.packed_mixer(case.batch, zxbcdt, weights, dout, case.sizes)
    mixer = case.mixer(thdattn.comm.init("single"), FLOAT16)
    out, saved = mixer.forward(zxbcdt, weights, mixer.plan(case.batch))
    assert saved.kept.states.max() > 65504
    np.testing.assert_allclose(out, exact.out, rtol=4e-3, atol=1e-2)


# --- what must not be seen -------------------------------------------------------------------------------------------

PADDED = ["all-empty-padded", "ranks-of-padding", "empty-between", "padding-ends-a-chunk", "capacity", "no-convolution"]


@pytest.mark.parametrize("dtype", [FLOAT64, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", PADDED)
def test_poison_in_rows_without_a_token_changes_no_bit(name, fill, dtype):
    case = CASES[name]
    for cp_size in (1, 3):
        clean, poisoned = (run(case, cp_size, dtype, fill=value) for value in (0, fill))
        assert_same_bits(clean, poisoned)
        assert all(np.isfinite(x.astype(np.float64)).all() for x in poisoned.values())


@pytest.mark.parametrize("name", ["capacity", "empty-between", "over-all-ranks", "fewer-rows-than-ranks"])
def test_uninitialised_work_buffers_change_no_bit(name, request):
    case = CASES[name]
    clean = run(case, 4, BFLOAT16)
    request.getfixturevalue("poisoned_host")
    assert_same_bits(clean, run(case, 4, BFLOAT16))


@pytest.mark.parametrize(("dtype", "cp_size"), [
    (FLOAT32, 1), (BFLOAT16, 4), pytest.param(FLOAT32, 8, marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("name", ["resets-inside-chunks", "chunk-edges", "empty-between",
                                  "shorter-than-the-convolution", "ends-with-a-rank"])  # fmt: skip
def test_a_document_changes_no_bit_of_another(name, dtype, cp_size):
    case = CASES[name]
    zxbcdt, weights, dout = random_inputs(case, dtype)
    before = run(case, cp_size, dtype)
    rng = np.random.default_rng(1)
    batch = case.batch
    for begin, length in zip(batch.cu_seqlens_padded, batch.lengths, strict=False):
        mine = slice(begin, begin + length)
        changed = zxbcdt.copy(), weights, dout.copy()
        for x in changed[::2]:
            x[mine] = 100 * rng.standard_normal((length, x.shape[1]))
        after = run(case, cp_size, dtype, changed)
        for field in ("out", "zxbcdt"):
            assert length == 0 or before[field][mine].tobytes() != after[field][mine].tobytes()
            others = np.delete(before[field], mine, axis=0), np.delete(after[field], mine, axis=0)
            assert others[0].tobytes() == others[1].tobytes(), f"{field}, document of row {begin}"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("cp_size", [1, 3])
def test_products_of_two_documents_may_be_infinite(cp_size):
    """Products of B of one document and C of the other are unused, but 0 * inf is NaN."""
    case = Case("large", (40, 100, 60))
    zxbcdt, weights, dout = random_inputs(case, FLOAT32)
    _, _, b, c, _ = np.split(zxbcdt, [12, 24, 34, 44], axis=1)
    weights.conv_weight[12:], weights.conv_bias[12:] = 1e-10, 0
    weights = weights._replace(dt_bias=weights.dt_bias - 8)
    b[:40], c[40:] = 1e33, 1e33
    made = run(case, cp_size, FLOAT32, (zxbcdt, weights, dout))
    assert all(np.isfinite(x).all() for x in made.values())


def test_documents_that_fill_chunks_are_bit_by_bit_what_they_are_alone():
    case = Case("aligned", (64, 128, 192))
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    packed = run(case, 1, BFLOAT16)
    for begin, length in ((0, 64), (64, 128), (192, 192)):
        rows = slice(begin, begin + length)
        alone = run(Case("alone", (length,)), 1, BFLOAT16, (zxbcdt[rows], weights, dout[rows]))
        for field in ("out", "zxbcdt"):
            assert packed[field][rows].tobytes() == alone[field].tobytes()
