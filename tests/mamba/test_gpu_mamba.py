"""The CUDA engine's Mamba-2 mixer on GPUs: how exact it is, what is particular to it, and several ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cases import to_host
from launch import RANKS, all_done, run_gpu_ranks
from loopback import Loopback, Mirror
from mixer_cases import (
    BFLOAT16,
    FIELDS,
    FLOAT16,
    FLOAT64,
    GPU_NORMS,
    GPU_SIZES,
    NORM_SIZES,
    ON_GPUS,
    Case,
    adding_up,
    assert_same_bits,
    check_gradients,
    columns_of,
    on_engine,
    on_rank,
    on_the_host,
    random_inputs,
    relative_error,
    run,
    step,
    truth,
    with_norm,
)
from ranks import graph_ranks
from tree_cases import LONG

import thdattn
from thdattn import oracle
from thdattn.mamba import oracle as mamba_oracle
from thdattn.mamba.oracle import Norm, Sizes
from thdattn.packing import PackedBatch

pytestmark = pytest.mark.gpu

ENGINES = ("cuda", "portable")
EACH = pytest.mark.parametrize("engine", ENGINES, indirect=True)
CUDA = pytest.mark.parametrize("engine", ["cuda"], indirect=True)
DTYPES = (FLOAT16, BFLOAT16)


def named(cases):
    return {case.name: case for case in cases}


# Packs of the forward have more rows than row-by-row gradients allow.
FORWARD = named([
    *ON_GPUS,
    Case("chunk-edges", (63, 64, 65, 1, 127, 128, 129), sizes=GPU_SIZES),
    Case("segment-edges", (2047, 2048, 2049, 1), sizes=GPU_SIZES),
    Case("starts-with-a-segment", (2048, 2048, 30), padded=(2048, 2054, 41), sizes=GPU_SIZES),
    Case("over-all-ranks", (4500,), sizes=GPU_SIZES),
    Case("capacity", (700, 21), slack=1500, sizes=GPU_SIZES),
    Case("many-short", tuple(np.random.default_rng(0).integers(1, 21, 250).tolist()), sizes=GPU_SIZES),
])
BACKWARD = named([
    *ON_GPUS,
    Case("chunk-edges", (63, 64, 65, 1), sizes=GPU_SIZES),
    Case("segment-edges", (2047, 130, 1900), sizes=GPU_SIZES),
    Case("starts-with-a-segment", (2040, 90), padded=(2048, 100), sizes=GPU_SIZES),
    Case("many-short", tuple(np.random.default_rng(0).integers(1, 21, 100).tolist()), sizes=GPU_SIZES),
    Case("over-all-ranks", (1300,), sizes=GPU_SIZES),
    Case("capacity", (300, 21), slack=1500, sizes=GPU_SIZES),
])
ALL_SIZES = [
    Sizes(8, 64, 64, 8), Sizes(8, 64, 64, 1), Sizes(16, 64, 128, 2), Sizes(24, 64, 128, 8), Sizes(8, 64, 256, 1),
    Sizes(8, 128, 64, 4), Sizes(8, 128, 128, 1), Sizes(8, 128, 256, 8), Sizes(8, 64, 128, 8), Sizes(8, 128, 128, 8),
]


def kinds(all_sizes, lengths):
    """Return cases of the sizes and of every kind of width of the convolution."""
    return [
        *(Case(f"{sizes.num_groups}-groups-of-{sizes.head_dim}-{sizes.state_dim}", lengths, sizes=sizes)
          for sizes in all_sizes),
        *(Case(f"convolution-of-{width}", lengths, sizes=GPU_SIZES, conv_width=width) for width in (1, 2, 3, 8)),
    ]


SHORT = (130, 1, 2, 0, 70, 3, 20)
FORWARD_KINDS, BACKWARD_KINDS = kinds(ALL_SIZES, (300, 1, 2, 0, 900, 3, 170)), kinds(ALL_SIZES[:8], SHORT)
ALL_BACKWARD = [*BACKWARD.values(), *BACKWARD_KINDS]
NORM_PACKS = [*ON_GPUS, BACKWARD["segment-edges"], BACKWARD["capacity"]]
# Groups of up to 8192 columns, and another eps.
NORM_KINDS = [Case(f"{sizes} {norm}", SHORT, sizes=sizes, norm=norm) for sizes, norm in (
    *NORM_SIZES, (Sizes(64, 64, 128, 1), Norm(False)), (Sizes(80, 64, 64, 1), Norm(True)),
    (Sizes(128, 64, 64, 8), Norm(True, 1)), (Sizes(8, 64, 128, 1), Norm(True, 1, 0.5)),
)]


@cache
def host_out(case, dtype, computed_in):
    return on_the_host(case, random_inputs(case, dtype), computed_in)[0].astype(np.float64)


def check_out(case, dtype, made):
    """Check `out` by the accuracy rule; for bfloat16, which the NumPy engine rounds as kernels do, it allows no second
    rounding.
    """
    exact, plain = host_out(case, dtype, FLOAT64), host_out(case, dtype, dtype)
    verdict = oracle.judge(made["out"], exact, plain, fused=plain if dtype == BFLOAT16 else None)
    assert made["out"].dtype == dtype and verdict.good, f"{case}: {verdict}"


def check_all(case, dtype, made):
    """Check `out` and all gradients by the errors of plain maths."""
    exact, plain = truth(case, dtype).out, truth(case, dtype, dtype).out
    verdict = oracle.judge(made["out"], exact, plain, fused=plain)
    assert made["out"].dtype == dtype and verdict.good, f"out of {case}: {verdict}"
    check_gradients(case, dtype, made)


def every(check, engines, cases, cp_sizes, dtypes):
    return [pytest.param(engine, case, dtype, cp_size, check, id=f"{check.__name__}-{engine}-{case}-{dtype}-{cp_size}")
            for case in cases for engine in engines for dtype in dtypes for cp_size in cp_sizes]


def some(cases, *names):
    chosen = [case for case in cases if case.name in names]
    assert len(chosen) == len(names)
    return chosen


@pytest.mark.parametrize(("engine", "case", "dtype", "cp_size", "check"), [
    *every(check_out, ENGINES, FORWARD.values(), (1, 3), [BFLOAT16]),
    *every(check_out, ["cuda"], FORWARD_KINDS, [1], DTYPES),
    *every(check_out, ["portable"], FORWARD_KINDS[: len(ALL_SIZES)], [1], [BFLOAT16]),
    *every(check_out, ["portable"], some(FORWARD_KINDS, "2-groups-of-64-128"), [1], [FLOAT16]),
    *every(check_out, ["cuda"], some(
        FORWARD.values(), "one-token", "shorter-than-the-convolution", "ranks-of-padding", "segment-edges",
        "over-all-ranks", "ends-with-a-rank", "many-short"), (2, 4, 8), [BFLOAT16]),
    *every(check_gradients, ["cuda"], BACKWARD.values(), (1, 3), [BFLOAT16]),
    *every(check_gradients, ["cuda"], BACKWARD_KINDS, [1], [BFLOAT16]),
    *every(check_gradients, ["portable"], some(
        ALL_BACKWARD, "resets-inside-chunks", "segment-edges", "2-groups-of-64-128", "8-groups-of-64-64"), (1, 3),
        [BFLOAT16]),
    *every(check_gradients, ["cuda"], some(
        ALL_BACKWARD, "1-groups-of-64-256", "8-groups-of-64-64", "2-groups-of-64-128", "1-groups-of-128-128",
        "segment-edges"), (1, 3), [FLOAT16]),
    *every(check_gradients, ["portable"], some(
        ALL_BACKWARD, "resets-inside-chunks", "2-groups-of-64-128"), [1], [FLOAT16]),
    *every(check_gradients, ["cuda"], some(
        ALL_BACKWARD, "resets-inside-chunks", "over-all-ranks", "fewer-rows-than-ranks", "ends-with-a-rank"), (2, 4, 8),
        [BFLOAT16]),
    *every(check_all, ENGINES, [with_norm(case, norm) for norm in GPU_NORMS[:2] for case in NORM_PACKS], (1, 3),
           [BFLOAT16]),
    *every(check_all, ["cuda"], NORM_KINDS, [2], DTYPES),
], indirect=["engine"])
def test_results_are_as_exact_as_on_the_host(engine, case, dtype, cp_size, check):
    check(case, dtype, run(case, cp_size, dtype, xp=engine.xp))


@EACH
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("name", ["segment-edges", "over-all-ranks", "many-short"])
def test_segments_that_one_thread_block_walks_over_are_as_exact(engine, monkeypatch, name, cp_size):
    """A GPU of one multiprocessor has one thread block that walks over all segments."""
    from thdattn.engines.cuda import launch

    gpu = replace(launch.this_gpu(), multiprocessors=1)
    monkeypatch.setattr(launch, "this_gpu", lambda: gpu)
    check_out(FORWARD[name], BFLOAT16, run(FORWARD[name], cp_size, BFLOAT16, xp=engine.xp))


@EACH
@pytest.mark.parametrize("norm", [None, *GPU_NORMS], ids=str)
def test_two_runs_are_bitwise_the_same(engine, norm):
    for cp_size in (1, 2, 4):
        first, *others = (run(with_norm(BACKWARD["segment-edges"], norm), cp_size, BFLOAT16, xp=engine.xp)
                          for _ in range(3))
        for other in others:
            assert_same_bits(first, other)


def last_rows_without_decay(zxbcdt, weights, rounding):
    """Return out of the last 64 rows of one document where nothing decays: the state is a plain sum over all rows."""
    def stored(x):
        return x.astype(rounding).astype(FLOAT64)

    heads, head_dim, state_dim, _ = GPU_SIZES
    inner = heads * head_dim
    z, xbc, raw = np.split(zxbcdt.astype(FLOAT64), [inner, 2 * inner + 2 * state_dim], axis=1)
    taps = weights.conv_weight.astype(FLOAT64).T
    before = np.concatenate([np.zeros((3, xbc.shape[1])), xbc])
    total = weights.conv_bias + sum(taps[i] * before[i : i + len(xbc)] for i in range(4))
    x, b, c = np.split(stored(total / (1 + np.exp(-total))), [inner, inner + state_dim], axis=1)
    dt = np.logaddexp(0, raw + weights.dt_bias)
    products = np.tril(c[-64:] @ b.T, len(x) - 64)
    x = x.reshape(-1, heads, head_dim)
    made = [stored(products * dt[:, h]) @ x[:, h] + weights.D[h] * x[-64:, h] for h in range(heads)]
    return stored(np.concatenate(made, axis=1) * z[-64:] / (1 + np.exp(-z[-64:])))


@CUDA
def test_sums_over_131072_rows_without_decay_do_not_lose(engine):
    case = Case("no-decay", (131_072,), sizes=GPU_SIZES)
    zxbcdt, weights, _ = random_inputs(case, BFLOAT16)
    weights = weights._replace(A_log=np.full(8, -30, np.float32))
    mixer = case.mixer(thdattn.comm.init("single"), BFLOAT16, engine="cuda")
    of_gpu = thdattn.Mamba2Weights(*map(engine.xp.asarray, weights))
    out = to_host(mixer.forward(engine.xp.asarray(zxbcdt), of_gpu, mixer.plan(case.batch))[0])[-64:]
    exact, plain = (last_rows_without_decay(zxbcdt, weights, kind) for kind in (FLOAT64, BFLOAT16))
    verdict = oracle.judge(out, exact, plain)
    assert verdict.good, verdict


@CUDA
@pytest.mark.parametrize("norm", [None, Norm(True, 2)], ids=str)
def test_gradients_of_weights_are_long_sums_of_equal_shares(engine, norm):
    """A pack repeats the same documents of 64 rows 2,048 times: its gradients are as exact as theirs.

    Those of B and C to what their heads' sum is rounded to, as packs of other lengths may split heads otherwise.
    """
    one, times, cupy = with_norm(Case("one", (40, 24), sizes=GPU_SIZES), norm), 2048, engine.xp
    zxbcdt, weights, dout = random_inputs(one, BFLOAT16)
    many = replace(one, name="many", lengths=one.lengths * times)
    made = run(many, 1, BFLOAT16, (np.tile(zxbcdt, (times, 1)), weights, np.tile(dout, (times, 1))), xp=cupy)
    alone = run(one, 1, BFLOAT16, xp=cupy)
    of_x = slice(GPU_SIZES.num_heads * GPU_SIZES.head_dim)
    for field in FIELDS[2:] if norm is None else ["norm_weight"]:
        wanted, found = alone[field][0].astype(np.float64), made[field][0].astype(np.float64) / times
        size = np.abs(wanted).max()
        assert np.abs(found - wanted).max() <= 1e-2 * size, field
        assert np.abs(found - wanted)[of_x].max() <= 4e-6 * size, field
    rows = made["zxbcdt"].reshape(times, *alone["zxbcdt"].shape).view(np.uint16)
    assert norm or (rows == rows[0]).all()
    for name in ("z", "x", "dt") if norm is None else ():
        part = columns_of(GPU_SIZES)[name]
        assert (rows[0][:, part] == alone["zxbcdt"].view(np.uint16)[:, part]).all(), name


def first_rows_without_decay(zxbcdt, dout, rounding):
    """Return gradients of the first 64 rows of one document without decay and convolution, by their names."""
    def stored(x):
        return x.astype(rounding).astype(np.float64)

    columns, heads = columns_of(GPU_SIZES), GPU_SIZES.num_heads
    z, x, b, c, raw = (zxbcdt[:, part].astype(np.float64) for part in columns.values())
    slopes = {name: (1 + part * (1 - 1 / (1 + np.exp(-part)))) / (1 + np.exp(-part))
              for name, part in (("x", x[:64]), ("B", b[:64]))}
    x, b, c = (stored(part / (1 + np.exp(-part))) for part in (x[:64], b[:64], c))
    dy = stored(dout.astype(np.float64) * z / (1 + np.exp(-z)))
    steps = np.logaddexp(0, raw[:64])
    products, behind = stored(np.triu(b @ c.T)), np.triu(np.ones((64, len(c))))
    dx, db = [], 0
    for head in range(heads):
        part = slice(head * GPU_SIZES.head_dim, (head + 1) * GPU_SIZES.head_dim)
        dx.append(steps[:, head, None] * (products @ dy[:, part]))
        db = db + steps[:, head, None] * (behind * (x[:, part] @ dy[:, part].T))
    return {"x": stored(slopes["x"] * stored(np.concatenate(dx, axis=1))), "B": stored(slopes["B"] * (stored(db) @ c))}


@CUDA
def test_gradients_over_50000_rows_without_decay_do_not_lose(engine):
    """They go through more segments than have their states in memory at a time."""
    case = Case("no-decay", (50_000,), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    weights = adding_up(weights)._replace(A_log=np.full(8, -30, np.float32))
    made = run(case, 1, BFLOAT16, (zxbcdt, weights, dout), xp=engine.xp)["zxbcdt"][:64]
    exact, plain = (first_rows_without_decay(zxbcdt, dout, kind) for kind in (np.float64, BFLOAT16))
    for name, wanted in exact.items():
        verdict = oracle.judge(made[:, columns_of(GPU_SIZES)[name]], wanted, plain[name])
        assert verdict.rms <= verdict.rms_budget, f"d{name}: {verdict}"


@CUDA
def test_gradients_of_states_beyond_float16_are_read_without_loss(engine):
    """States of x and B that hardly decay, and gradients of states of dout and C, grow beyond 65,504."""
    case = Case("large-states", (600,), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, FLOAT16)
    for name, column in columns_of(GPU_SIZES).items():
        if name in ("x", "B"):
            zxbcdt[:, column] = abs(zxbcdt[:, column]) + 2
        elif name != "z":
            zxbcdt[:, column] = {"C": -9, "dt": 20}[name]  # silu of C is -1e-3
    dout[...] = abs(dout) / 16
    weights = adding_up(weights)
    exact = mamba_oracle.packed_mixer(case.batch, zxbcdt, weights, dout, case.sizes)
    made = run(case, 1, FLOAT16, (zxbcdt, weights, dout), xp=engine.xp)["zxbcdt"]
    for name, part in columns_of(case.sizes).items():
        if name != "dt" and abs(exact.zxbcdt[:, part]).max() < 60_000:
            wanted = exact.zxbcdt[:, part]
            assert relative_error(made[:, part], wanted) < 3e-3, name


@EACH
def test_large_gradients_from_behind_a_chunk_without_any_are_in_range(engine):
    """The last tokens of a text alone have a loss: elsewhere the gradient of B C^T is small."""
    case = Case("late-loss", (600,), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, FLOAT16)
    columns = columns_of(case.sizes)
    for name, value in {"z": 2, "x": 0, "C": 1.3, "dt": -2.3}.items():
        zxbcdt[:, columns[name]] = value
    zxbcdt[:, columns["x"]][:, :64] = 64
    zxbcdt[:, columns["B"]] /= 32
    dout[:-64], dout[-64:] = 0, 1
    inputs = zxbcdt, adding_up(weights), dout
    wanted = mamba_oracle.packed_mixer(case.batch, *inputs, case.sizes).zxbcdt[:, columns["B"]]
    assert 2**14 < abs(wanted).max() < 2**15
    made = run(case, 1, FLOAT16, inputs, xp=engine.xp)["zxbcdt"][:, columns["B"]]
    assert relative_error(made, wanted) < 3e-3


@CUDA
def test_gradients_of_a_state_may_be_0_in_half_of_its_columns(engine):
    """In float16 the scales of both halves are then as far apart as they can be."""
    case = Case("half", (200,), sizes=Sizes(8, 64, 256, 1))
    zxbcdt, weights, dout = random_inputs(case, FLOAT16)
    columns = columns_of(case.sizes)
    for name, value in {"z": 2, "C": 1.3, "dt": -2.3}.items():
        zxbcdt[:, columns[name]] = value
    zxbcdt[:, columns["C"]][:, 128:] = 0
    zxbcdt[:, columns["x"]] /= 16
    inputs = zxbcdt, adding_up(weights), np.full_like(dout, 32)
    exact = mamba_oracle.packed_mixer(case.batch, *inputs, case.sizes).zxbcdt
    made = run(case, 1, FLOAT16, inputs, xp=engine.xp)["zxbcdt"]
    for name, part in columns.items():
        wanted = exact[:, part]
        assert 0 < abs(wanted).max() < 60_000
        assert relative_error(made[:, part], wanted) < 3e-3, name


@EACH
def test_products_of_a_state_and_another_document_may_be_infinite(engine):
    """Products of the first one's states and the second one's rows are unused, but 0 * inf is NaN."""
    case = Case("large", (70, 58), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    columns = columns_of(case.sizes)
    for name, value in {"x": 1e10, "B": 1e10, "C": 1e-20}.items():
        zxbcdt[:70, columns[name]] = value
    zxbcdt[:, columns["z"]], dout[70:] = 2, 1e20
    made = run(case, 1, BFLOAT16, (zxbcdt, adding_up(weights), dout), xp=engine.xp)
    for name, part in columns.items():
        assert np.isfinite(made["zxbcdt"][70:, part].astype(np.float32)).all(), name


@pytest.mark.usefixtures("much_memory", "engine")
@EACH
def test_more_elements_than_32_bits_count(cupy):
    """Rows of 8,512 numbers, 2.2e9 of them: the last documents are those that are alone in another pack."""
    mixer = thdattn.Mamba2Mixer(thdattn.comm.init("single"), 64, 64, 128, dtype=BFLOAT16, engine="cuda")
    rows, alone = 262_144, 1024 * 3
    assert rows * 8512 > 2**31
    rng = np.random.default_rng(0)
    last, of_out = (cupy.random.standard_normal((alone, width), dtype=np.float32).astype(BFLOAT16).view(np.uint16)
                    for width in (8512, 4096))
    weights = thdattn.Mamba2Weights(*(cupy.asarray(x, np.float32) for x in (
        rng.standard_normal((4352, 4)), np.zeros(4352), np.log(rng.uniform(1, 16, 64)), np.ones(64), np.zeros(64))))
    zxbcdt, dout = cupy.zeros((rows, 8512), np.uint16), cupy.zeros((rows, 4096), np.uint16)
    zxbcdt[-alone:], dout[-alone:] = last, of_out

    def out_and_gradient(zxbcdt, dout, starts):
        out, saved = mixer.forward(zxbcdt.view(BFLOAT16), weights, mixer.plan(PackedBatch(starts)))
        return out.view(np.uint16), mixer.backward(dout.view(BFLOAT16), saved)[0].view(np.uint16)

    of_all, of_last = (out_and_gradient(*args) for args in (
        (zxbcdt, dout, [0, rows - alone, rows]), (last, of_out, [0, alone])))
    for x in of_all:
        assert not (x[:-alone] & 0x7FFF).any()
    assert cupy.array_equal(of_all[0][-alone:], of_last[0])
    tail, wanted = of_all[1][-alone:], of_last[1]
    for name, part in columns_of(Sizes(64, 64, 128, 1)).items():
        if name in ("B", "C"):  # whose heads the shorter pack splits, each part rounded
            found, exact = (x[:, part].view(BFLOAT16).astype(np.float32) for x in (tail, wanted))
            assert cupy.linalg.norm(found - exact) <= 1e-2 * cupy.linalg.norm(exact), name
        else:
            assert cupy.array_equal(tail[:, part], wanted[:, part]), name


@pytest.mark.usefixtures("much_memory", "engine")
@EACH
def test_more_chunks_than_a_grid_is_high(cupy):
    """Sequences that are alike, a segment each, get the same bits behind row 65,535 * 64 as before it."""
    case, times = Case("one", (2048,), sizes=Sizes(8, 64, 64, 1)), 65_535 * 64 // 2048 + 2
    mixer = case.mixer(thdattn.comm.init("single"), BFLOAT16, engine="cuda", keep_activations=False)
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    weights = thdattn.Mamba2Weights(*map(cupy.asarray, weights))

    def of_copies(times):
        rows, grads = (cupy.tile(cupy.asarray(x.view(np.uint16)), (times, 1)).view(BFLOAT16) for x in (zxbcdt, dout))
        out, saved = mixer.forward(rows, weights, mixer.plan(PackedBatch.from_lengths(case.lengths * times)))
        gradients, dweights = mixer.backward(grads, saved)
        return [x.view(np.uint16).reshape(times, 2048, -1) for x in (out, gradients)], dweights

    rows, dweights = of_copies(times)
    for x in rows:
        assert bool((x == x[:1]).all())
    alone, of_one = of_copies(1)
    assert cupy.array_equal(rows[0][0], alone[0][0])
    for field, found, wanted in zip(weights._fields, dweights, of_one, strict=True):
        assert float(cupy.abs(found / times - wanted).max()) <= 1e-2 * float(cupy.abs(wanted).max()), field


# --- lengths on the GPU, graphs --------------------------------------------------------------------------------------

ROWS = 2100
REPLAYED = [((300, 40, 1200), (304, 48, 1300)), ((1, 2000, 0), (2, 2098, 0)), ((0, 0, 0), (0, 0, 0)),
            ((2100, 0, 0), (2100, 0, 0)), ((1024, 0, 1000), (1024, 5, 1071))]


@pytest.mark.usefixtures("engine")
@EACH
def test_replays_plan_anew_for_other_lengths_without_a_sync(cupy):
    """Two graphs of one plan on one stream, lengths rewritten on the GPU between replays; wrong ones give NaN."""
    stream = cupy.cuda.Stream(non_blocking=True)
    case = Case("replayed", (ROWS,), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    mixer = case.mixer(thdattn.comm.init("single"), BFLOAT16, engine="cuda")
    with stream:
        lengths = [cupy.zeros(4, np.int32) for _ in range(2)]
        inputs = [cupy.zeros(x.shape, np.uint16) for x in (zxbcdt, dout)]
        on_gpu = thdattn.Mamba2Weights(*map(cupy.asarray, weights))
        plan = mixer.plan(PackedBatch(*lengths, total_rows=ROWS))

        def run_once():
            plan.refresh()
            return step(mixer, plan, (inputs[0].view(BFLOAT16), on_gpu, inputs[1].view(BFLOAT16)))[0]

        run_once()
        stream.synchronize()
        captured = []
        for _ in range(2):
            stream.begin_capture()
            made = run_once()
            captured.append((stream.end_capture(), made))
    for i, (tokens, padded) in enumerate([*REPLAYED, *REPLAYED[::-1]]):
        here = Case("here", tokens, padded, slack=ROWS - sum(padded), sizes=GPU_SIZES)
        for there, values in zip(lengths, (here.batch.cu_seqlens, here.batch.cu_seqlens_padded), strict=True):
            there.set(np.array(values), stream)
        for there, x in zip(inputs, (zxbcdt, dout), strict=True):
            there.set(np.where(here.valid[:, None], x, BFLOAT16.type(np.nan)).view(np.uint16), stream)
        graph, made = captured[i % 2]
        graph.launch(stream)
        stream.synchronize()
        wanted = run(here, 1, BFLOAT16, (zxbcdt, weights, dout), xp=cupy)
        for field, x in zip(FIELDS, made, strict=True):
            assert to_host(x).tobytes() == wanted[field].tobytes(), f"{field} of {tokens}"
    lengths[0].set(np.array([0, 300, 200, 400], np.int32), stream)
    for graph, made in captured:
        graph.launch(stream)
        stream.synchronize()
        for field, x in zip(FIELDS, made, strict=True):
            assert np.isnan(to_host(x).astype(np.float32)).all(), field


@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("norm", [None, "after_gate", "before_gate"])
def test_packs_through_one_graph_are_the_eager_results(cupy, norm):
    """Packs that do not fit run eagerly, and are counted."""
    with thdattn.comm.init("single") as comm, cupy.cuda.Stream(non_blocking=True):
        graph_ranks.replay_mixers(comm, cupy, norm=norm)


# --- sizes without kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "kind", "message"), [
    ({"head_dim": 96}, ValueError, "head_dim is 96, wanted one of 64, 128 for a Mamba-2 mixer on engine 'cuda'"),
    ({"dtype": "float32"}, TypeError, "dtype is float32, wanted one of float16, bfloat16 for engine 'cuda'"),
])
def test_sizes_without_kernels_are_refused(cupy, changes, kind, message):
    sizes = {"num_heads": 8, "head_dim": 64, "state_dim": 128}
    with pytest.raises(kind, match=message):
        thdattn.Mamba2Mixer(thdattn.comm.init("single"), **{**sizes, **changes}, engine="cuda")


def test_auto_is_the_gpu(cupy):
    assert thdattn.Mamba2Mixer(thdattn.comm.init("single"), 8, 64, 128).engine == "cuda"


# --- ranks -------------------------------------------------------------------------------------------------------


pytest.importorskip("cupy")  # which peer memory loads

PROGRAM = RANKS / "mamba_ranks.py"
PACKS = [
    *(Case(name, lengths, sizes=GPU_SIZES) for name, lengths in (
        ("over-all-ranks", (3000,)), ("own-and-crossing", (700, 1400, 3, 897)), ("own", (1500, 1500)))),
    Case(LONG.name, (), trees=LONG, sizes=GPU_SIZES),
]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_ranks_together_are_one_rank(cupy, transport, n):
    all_done(run_gpu_ranks(cupy, n, PROGRAM, "gpu-cases", str(n), transport, timeout=200), n, "gpu-cases")


@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("case", PACKS, ids=str)
def test_peer_memory_gives_the_bits_of_collectives(cupy, monkeypatch, case):
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    with cupy.cuda.Stream(non_blocking=True):
        comm = Loopback(monkeypatch)
        layers = [(mixer, mixer.plan(case.batch)) for mixer in (
            case.mixer(each, BFLOAT16, engine="cuda") for each in (comm, Mirror()))]
        for seed in range(4):
            results = []
            for mixer, plan in layers:
                inputs = on_rank(plan, ((seed + 1) * zxbcdt, weights, (seed + 1) * dout))
                made, _ = step(mixer, plan, on_engine(inputs, cupy))
                results.append([to_host(x).tobytes() for x in made])
            assert results[0] == results[1]
        comm.peer.close()
