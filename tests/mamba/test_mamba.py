"""The Mamba-2 mixer over simulated ranks, on the NumPy engine against the recurrence row by row in float64.

What must not be seen of documents and padding holds bit by bit on both engines, with and without a norm.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import to_host
from mixer_cases import (
    BFLOAT16,
    CASES,
    FIELDS,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    GPU_SIZES,
    NORMS,
    Case,
    adding_up,
    assert_equal,
    assert_same_bits,
    check_gradients,
    columns_of,
    on_engine,
    on_rank,
    on_the_host,
    random_inputs,
    relative_error,
    run,
    truth,
    with_norm,
)

import thdattn
from thdattn import oracle
from thdattn.mamba import oracle as mamba_oracle
from thdattn.mamba.oracle import Norm, Sizes

MANY = Case("many-short", tuple(np.random.default_rng(0).integers(1, 21, 1000).tolist()), sizes=Sizes(2, 2, 2, 1))
EXACT = 1e-12  # of float64
ENGINES_ON_GPU = [pytest.param(engine, marks=pytest.mark.gpu) for engine in ("cuda", "portable")]
ON_GPU = [pytest.param(*engine.values, BFLOAT16, marks=engine.marks) for engine in ENGINES_ON_GPU]
CP_SIZES = [1, 3, 4, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 8))]


def on(engine, case, norm=None):
    """Return a case with the sizes that the engine has kernels for."""
    return with_norm(case if engine.name == "reference" else replace(case, sizes=GPU_SIZES), norm)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("case", [*CASES.values(), MANY, Case("eps", (20, 7), norm=Norm(True, 2, 3.0)), *(
    with_norm(CASES[name], norm) for norm in NORMS for name in (
        "no-sequences-slack", "all-empty-padded", "fewer-rows-than-ranks", "resets-inside-chunks", "ranks-of-padding",
        "empty-between", "padding-ends-a-chunk", "over-all-ranks", "one-group", "a-group-per-head"))], ids=str)
def test_float64_is_the_recurrence(case, cp_size):
    assert_equal(run(case, cp_size, FLOAT64), truth(case, FLOAT64), EXACT)


@pytest.mark.parametrize("name", ["ranks-of-padding", "fewer-rows-than-ranks", "no-sequences-slack", "capacity"])
def test_ranks_without_rows_give_nothing_and_keep_the_others_right(name):
    case, made = CASES[name], run(CASES[name], 8, FLOAT64)
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
WIDE_GROUPS = replace(WIDE, sizes=Sizes(4, 64, 32, 2))


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


@pytest.mark.parametrize("case", [WIDE, *(with_norm(WIDE_GROUPS, norm) for norm in NORMS)], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_rows_of_a_wide_mixer_are_rounded_as_often_as_in_plain_maths(dtype, case):
    """The rule is that of attention: the largest error hides a second rounding, RMS does not."""
    exact, plain = truth(case, dtype), truth(case, dtype, dtype)
    columns = columns_of(case.sizes)
    names = ("z", "x") if case.norm else ("z", "x", "B", "C")
    parts = [("out", slice(None)), *(("zxbcdt", columns[name]) for name in names)]
    for cp_size in (1, 4) if case.norm is None else (3,):
        made = run(case, cp_size, dtype)
        for field, part in parts:
            wanted, baseline = (getattr(x, field)[:, part] for x in (exact, plain))
            fused = baseline if dtype.itemsize == 2 else None
            verdict = oracle.judge(made[field][:, part], wanted, baseline, fused=fused)
            assert verdict.good, f"{part} of {field} at cp {cp_size}: {verdict}"
        if case.norm:
            ours, theirs = (np.sqrt(np.mean((x - exact.norm_weight) ** 2))
                            for x in (made["norm_weight"].astype(np.float64).sum(axis=0), plain.norm_weight))
            assert ours <= 2 * theirs + 1e-6 * np.abs(exact.norm_weight).max()
            assert made["norm_weight"].dtype == FLOAT32


@pytest.mark.parametrize("norm", NORMS[:2], ids="-".join)
def test_a_row_of_zeros_has_finite_gradients(norm):
    """The first tokens of a new layer may have such rows, with D and dt of 0."""
    case = with_norm(WIDE_GROUPS, norm)
    zxbcdt, weights, dout = random_inputs(case, FLOAT32)
    zxbcdt[3], weights.conv_bias[:] = 0, 0
    zxbcdt[:3, 256:-4] = 0  # x, B and C that its convolution sees
    made = run(case, 1, FLOAT32, (zxbcdt, weights, dout))
    assert not made["out"][3].any() and all(np.isfinite(x).all() for x in made.values())


@pytest.mark.parametrize(("engine", "dtype"), [
    ("reference", FLOAT64), ("reference", FLOAT32), *ON_GPU], indirect=["engine"], ids=str)
def test_extreme_steps_and_rates(engine, dtype):
    """Sums of a reach 1e5 in a chunk, and what they have lost by then, differences of theirs have lost too."""
    case = on(engine, Case("extreme", (90, 3, 1070), sizes=Sizes(4, 3, 5, 1)))
    zxbcdt, weights, dout = random_inputs(case, dtype)
    heads = case.sizes.num_heads  # some forget nothing, and some all
    zxbcdt[:, -heads:] = np.random.default_rng(0).choice([-200, -20, -7, 0, 3, 30, 100], (len(zxbcdt), heads))
    rates = np.resize([-5, 0, 3, 5], heads).astype(weights.A_log.dtype)
    inputs = zxbcdt, weights._replace(A_log=rates, dt_bias=0 * rates), dout
    exact, plain = (mamba_oracle.packed_mixer(case.batch, *inputs, case.sizes, kind) for kind in (None, dtype))
    baselines = {"out": plain.out, "zxbcdt": plain.zxbcdt} if engine.name == "reference" else {
        "out": on_the_host(case, inputs, dtype)[0].astype(np.float64)}
    for cp_size in (1, 3):
        made = run(case, cp_size, dtype, inputs, xp=engine.xp)
        if dtype == FLOAT64:
            assert_equal(made, exact, 1e-10)
            continue
        check_gradients(case, dtype, made, exact, plain)
        for field, baseline in baselines.items():
            verdict = oracle.judge(made[field], getattr(exact, field), baseline)
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # gradients overflow
@pytest.mark.parametrize("engine", ["reference", *ENGINES_ON_GPU], indirect=True)
def test_states_beyond_float16_are_read_without_loss(engine):
    """States grow far beyond 65,504 in 2,000 steps of 50 that hardly decay; small rows of C keep y in range."""
    case = Case("large-states", (2000,), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, FLOAT16)
    for name, column in columns_of(GPU_SIZES).items():
        if name in ("x", "B"):
            zxbcdt[:, column] = abs(zxbcdt[:, column]) + 1
        elif name != "z":
            zxbcdt[:, column] = {"C": -10.5, "dt": 50}[name]  # silu of C is -3e-4
    inputs = zxbcdt, adding_up(weights), dout
    exact, saved = on_the_host(case, inputs, FLOAT64)
    assert abs(saved.kept.states).max() > 1e5 and abs(exact).max() < 60_000
    assert relative_error(run(case, 1, FLOAT16, inputs, xp=engine.xp)["out"], exact) < 2e-3


# --- what must not be seen -------------------------------------------------------------------------------------------

LAST = Case("starts-with-a-segment", (2040, 90), padded=(2048, 100))


@pytest.mark.parametrize(("engine", "dtype", "norm"), [
    *(("reference", dtype, None) for dtype in (FLOAT64, BFLOAT16, FLOAT16)),
    *(("reference", BFLOAT16, norm) for norm in NORMS),
    *(pytest.param(*gpu.values, norm, marks=gpu.marks) for gpu in ON_GPU for norm in (None, *NORMS)),
], indirect=["engine"], ids=str)
@pytest.mark.parametrize("name", ["all-empty-padded", "ranks-of-padding", "empty-between", "padding-ends-a-chunk",
                                  "capacity", "no-convolution", "starts-with-a-segment"])
def test_what_padding_holds_changes_no_bit(engine, dtype, norm, name):
    case = on(engine, CASES.get(name, LAST), norm)
    for cp_size in (1, 3):
        clean, *others = (run(case, cp_size, dtype, fill=x, xp=engine.xp) for x in (0, np.nan, np.inf, -np.inf, -6e4))
        assert all(np.isfinite(x.astype(np.float64)).all() for x in clean.values())
        for other in others:
            assert_same_bits(clean, other)


@pytest.mark.parametrize("name", ["capacity", "empty-between", "over-all-ranks", "fewer-rows-than-ranks"])
def test_uninitialised_work_buffers_change_no_bit(name, request):
    case = CASES[name]
    clean = run(case, 4, BFLOAT16)
    request.getfixturevalue("poisoned_host")
    assert_same_bits(clean, run(case, 4, BFLOAT16))


RESTARTING = ("resets-inside-chunks", "chunk-edges", "empty-between", "segment-edges", "shorter-than-the-convolution",
              "ends-with-a-rank")


@pytest.mark.parametrize(("engine", "name", "dtype", "cp_size", "norm"), [
    *(("reference", name, *how) for name in RESTARTING for how in (
        (FLOAT32, 1, None), (BFLOAT16, 4, None), (BFLOAT16, 1, Norm(True, 4)))),
    *(pytest.param("reference", name, FLOAT32, 8, None, marks=pytest.mark.exhaustive) for name in RESTARTING),
    *(pytest.param(engine, name, dtype, cp_size, None, marks=pytest.mark.gpu) for engine in ("cuda", "portable")
      for cp_size in (1, 3) for name, dtype in (
          *((name, BFLOAT16) for name in RESTARTING), ("resets-inside-chunks", FLOAT16))),
    pytest.param("cuda", "resets-inside-chunks", BFLOAT16, 1, Norm(True, 4), marks=pytest.mark.gpu),
], indirect=["engine"], ids=str)
def test_a_document_changes_no_bit_of_another(engine, name, dtype, cp_size, norm):
    """Gradients of the other documents are 4 million times smaller; large steps make sums of decays rough."""
    case = on(engine, CASES.get(name, Case("segment-edges", (2047, 130, 1900))), norm)
    zxbcdt, weights, dout = random_inputs(case, dtype)
    quiet, heads = (2.0**-12 * dout).astype(dtype), case.sizes.num_heads
    calm = run(case, cp_size, dtype, (zxbcdt, weights, quiet), xp=engine.xp)
    batch = case.batch
    documents = [*zip(batch.cu_seqlens_padded.tolist(), batch.lengths.tolist(), strict=False)]
    for begin, length in documents if engine.name == "reference" else documents[1::2]:
        mine = slice(begin, begin + length)
        changed, of_out = zxbcdt.copy(), quiet.copy()
        changed[mine], of_out[mine] = 3 * changed[mine][::-1], 1024 * dout[mine]
        changed[mine, -heads:] = 50
        wild = run(case, cp_size, dtype, (changed, weights, of_out), xp=engine.xp)
        for field in ("out", "zxbcdt"):
            assert length == 0 or calm[field][mine].tobytes() != wild[field][mine].tobytes()
            others = (np.delete(made[field], mine, axis=0).tobytes() for made in (calm, wild))
            assert len({*others}) == 1, f"{field}, document of row {begin}"


def two_layers(case, comm, xp, keep):
    """Return gradients of two layers of a plan, whose forwards follow each other, of one rank."""
    mixer = case.mixer(comm, BFLOAT16, engine="reference" if xp is np else "cuda", keep_activations=keep)
    plan = mixer.plan(case.batch)
    layers = []
    for seed in range(2):
        zxbcdt, weights, dout = on_engine(on_rank(plan, random_inputs(case, BFLOAT16, seed)), xp)
        layers.append((dout, mixer.forward(zxbcdt, weights, plan)[1]))
    made = [mixer.backward(*layer) for layer in layers]
    return [to_host(x).tobytes() for dzxbcdt, dweights in made for x in (dzxbcdt, *dweights)]


@pytest.mark.parametrize("cp_size", [1, 3])
def test_what_a_layer_keeps_of_its_convolution_changes_no_bit(engine, cp_size):
    case = on(engine, Case("mixer", (2047, 130, 1900) if engine.name == "cuda" else (100, 3, 150), slack=3))
    kept, anew = (thdattn.comm.run_local(
        cp_size, lambda comm, keep=keep: two_layers(case, comm, engine.xp, keep)) for keep in (True, False))
    assert kept == anew


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("cp_size", [1, 3])
def test_products_of_two_documents_may_be_infinite(cp_size):
    """Products of B of one document and C of the other are unused, but 0 * inf is NaN."""
    case = Case("large", (40, 100, 60))
    zxbcdt, weights, dout = random_inputs(case, FLOAT32)
    columns = columns_of(case.sizes)
    weights.conv_weight[12:], weights.conv_bias[12:] = 1e-10, 0
    weights = weights._replace(dt_bias=weights.dt_bias - 8)
    zxbcdt[:40, columns["B"]], zxbcdt[40:, columns["C"]] = 1e33, 1e33
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
