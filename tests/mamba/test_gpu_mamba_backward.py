"""The CUDA engine's Mamba-2 mixer, backward: every gradient by its name, on one GPU that simulated ranks share.

Every allocation starts as NaN and every row that holds no token is NaN. Kernels are held to the errors of plain maths
in the same dtype against the recurrence row by row in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from cases import to_host
from mixer_cases import (
    BFLOAT16,
    FIELDS,
    FLOAT16,
    GPU_SIZES,
    ON_GPUS,
    Case,
    adding_up,
    assert_same_bits,
    extreme_inputs,
    random_inputs,
    run,
    truth,
    two_layers,
)  # fmt: skip

import thdattn
from thdattn import oracle
from thdattn.mamba import oracle as mamba_oracle
from thdattn.mamba.oracle import Sizes
from thdattn.packing import PackedBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

PACKS = [
    *ON_GPUS,
    Case("chunk-edges", (63, 64, 65, 1), sizes=GPU_SIZES),
    Case("segment-edges", (2047, 130, 1900), sizes=GPU_SIZES),
    Case("starts-with-a-segment", (2040, 90), padded=(2048, 100), sizes=GPU_SIZES),
    Case("many-short", tuple(np.random.default_rng(0).integers(1, 21, 100).tolist()), sizes=GPU_SIZES),
    Case("over-all-ranks", (1300,), sizes=GPU_SIZES),
    Case("capacity", (300, 21), slack=1500, sizes=GPU_SIZES),
]
MIXED = (130, 1, 2, 0, 70, 3, 20)
KINDS = [
    *(Case(f"{sizes.num_groups}-groups-of-{sizes.head_dim}-{sizes.state_dim}", MIXED, sizes=sizes) for sizes in (
        Sizes(8, 64, 64, 8), Sizes(8, 64, 64, 1), Sizes(16, 64, 128, 2), Sizes(24, 64, 128, 8), Sizes(8, 64, 256, 1),
        Sizes(8, 128, 64, 4), Sizes(8, 128, 128, 1), Sizes(8, 128, 256, 8),
    )),
    *(Case(f"convolution-of-{width}", MIXED, sizes=GPU_SIZES, conv_width=width) for width in (1, 2, 3, 8)),
]  # fmt: skip
BY_NAME = {case.name: case for case in (*PACKS, *KINDS)}


def columns_of(sizes):
    inner, width = sizes.num_heads * sizes.head_dim, sizes.num_groups * sizes.state_dim
    ends = np.cumsum([inner, inner, width, width, sizes.num_heads])
    return dict(zip(("z", "x", "B", "C", "dt"), map(slice, [0, *ends[:-1]], ends), strict=True))


def check(case, dtype, made, exact=None, plain=None):
    """Check rows by the accuracy rule, columns by their names; few numbers of weights by the sum of their squares."""
    exact, plain = exact or truth(case, dtype), plain or truth(case, dtype, dtype)
    assert made["zxbcdt"].dtype == dtype
    for name, part in columns_of(case.sizes).items():
        rows = made["zxbcdt"][:, part]
        verdict = oracle.judge(rows, exact.zxbcdt[:, part], plain.zxbcdt[:, part])
        assert verdict.rms <= verdict.rms_budget, f"d{name} of {case}: {verdict}"
    for field in FIELDS[2:]:
        assert made[field].dtype == np.float32
        wanted, found = getattr(exact, field), made[field].astype(np.float64).sum(axis=0)
        ours, allowed = (np.sqrt(np.mean((x - wanted) ** 2)) for x in (found, getattr(plain, field)))
        size = np.sqrt(np.mean(wanted**2))
        assert ours <= 3 * allowed + 1e-3 * size, f"{field} of {case}: {ours:.1e}, plain {allowed:.1e}, of {size:.1e}"


@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize("case", PACKS, ids=str)
def test_every_pack_is_the_recurrence(cupy, case, cp_size):
    check(case, BFLOAT16, run(case, cp_size, BFLOAT16, xp=cupy))


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_every_size_is_the_recurrence(cupy, case):
    check(case, BFLOAT16, run(case, 1, BFLOAT16, xp=cupy))


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize("name", ["resets-inside-chunks", "segment-edges", "2-groups-of-64-128", "8-groups-of-64-64"])
def test_portable_kernels_are_the_recurrence(cupy, name, cp_size):
    check(BY_NAME[name], BFLOAT16, run(BY_NAME[name], cp_size, BFLOAT16, xp=cupy))


@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize(
    "name", ["1-groups-of-64-256", "8-groups-of-64-64", "2-groups-of-64-128", "1-groups-of-128-128", "segment-edges"]
)
def test_float16_is_the_recurrence(cupy, name, cp_size):
    check(BY_NAME[name], FLOAT16, run(BY_NAME[name], cp_size, FLOAT16, xp=cupy))


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("name", ["resets-inside-chunks", "2-groups-of-64-128"])
def test_float16_of_portable_kernels_is_the_recurrence(cupy, name):
    check(BY_NAME[name], FLOAT16, run(BY_NAME[name], 1, FLOAT16, xp=cupy))


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize(
    "name", ["resets-inside-chunks", "over-all-ranks", "fewer-rows-than-ranks", "ends-with-a-rank"]
)
def test_every_number_of_ranks_is_the_recurrence(cupy, name, cp_size):
    check(BY_NAME[name], BFLOAT16, run(BY_NAME[name], cp_size, BFLOAT16, xp=cupy))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["empty-between", "padding-ends-a-chunk", "capacity"])
def test_what_padding_holds_changes_no_bit(cupy, name):
    for cp_size in (1, 3):
        clean, *poisoned = (run(BY_NAME[name], cp_size, BFLOAT16, fill=fill, xp=cupy) for fill in (0, np.nan, np.inf))
        for other in poisoned:
            assert_same_bits(clean, other)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize(("name", "dtype"), [
    ("resets-inside-chunks", BFLOAT16), ("segment-edges", BFLOAT16), ("shorter-than-the-convolution", BFLOAT16),
    ("resets-inside-chunks", FLOAT16)], ids=str)  # fmt: skip
def test_a_document_changes_no_bit_of_another(cupy, name, dtype, cp_size):
    """The gradients of the other document are 4 million times smaller."""
    case = BY_NAME[name]
    zxbcdt, weights, dout = random_inputs(case, dtype)
    quiet = (2.0**-12 * dout).astype(dtype)
    calm = run(case, cp_size, dtype, (zxbcdt, weights, quiet), xp=cupy)["zxbcdt"]
    for document in range(1, len(case.lengths), 2):
        begin, end = (int(x) for x in case.batch.cu_seqlens_padded[document : document + 2])
        changed, of_out = zxbcdt.copy(), quiet.copy()
        changed[begin:end], of_out[begin:end] = 3 * changed[begin:end][::-1], 1024 * dout[begin:end]
        changed[begin:end, -case.sizes.num_heads :] = 50
        wild = run(case, cp_size, dtype, (changed, weights, of_out), xp=cupy)["zxbcdt"]
        others = np.r_[0:begin, end : len(zxbcdt)]
        assert calm[others].tobytes() == wild[others].tobytes()
        assert calm[begin:end].tobytes() != wild[begin:end].tobytes()


@pytest.mark.parametrize("cp_size", [1, 3])
def test_what_a_layer_keeps_of_its_convolution_changes_no_bit(cupy, cp_size):
    case = BY_NAME["segment-edges"]
    kept, anew = (thdattn.comm.run_local(cp_size, lambda comm, keep=keep: two_layers(case, comm, BFLOAT16, cupy, keep))
                  for keep in (True, False))
    for one, other in zip(kept, anew, strict=True):
        assert [x.tobytes() for x in one] == [x.tobytes() for x in other]


@pytest.mark.usefixtures("kernels")
def test_two_runs_are_bitwise_the_same(cupy):
    for cp_size in (1, 4):
        first, *others = (run(BY_NAME["segment-edges"], cp_size, BFLOAT16, xp=cupy) for _ in range(3))
        for other in others:
            assert_same_bits(first, other)


@pytest.mark.usefixtures("kernels")
def test_extreme_steps_and_rates(cupy):
    case, inputs = extreme_inputs()
    exact, plain = (mamba_oracle.packed_mixer(case.batch, *inputs, case.sizes, kind) for kind in (None, BFLOAT16))
    for cp_size in (1, 3):
        check(case, BFLOAT16, run(case, cp_size, BFLOAT16, inputs, xp=cupy), exact, plain)


def test_gradients_of_weights_are_long_sums_of_equal_shares(cupy):
    """A pack repeats the same documents of 64 rows 2,048 times: its gradients are as exact as theirs.

    Those of B and C to what their heads' sum is rounded to, as packs of other lengths may split heads otherwise.
    """
    one, times = Case("one", (40, 24), sizes=GPU_SIZES), 2048
    zxbcdt, weights, dout = random_inputs(one, BFLOAT16)
    many = Case("many", one.lengths * times, sizes=GPU_SIZES)
    made = run(many, 1, BFLOAT16, (np.tile(zxbcdt, (times, 1)), weights, np.tile(dout, (times, 1))), xp=cupy)
    alone = run(one, 1, BFLOAT16, xp=cupy)
    of_x = slice(GPU_SIZES.num_heads * GPU_SIZES.head_dim)
    for field in FIELDS[2:]:
        wanted, found = alone[field][0].astype(np.float64), made[field][0].astype(np.float64) / times
        size = np.abs(wanted).max()
        assert np.abs(found - wanted).max() <= 1e-2 * size, field
        assert np.abs(found - wanted)[of_x].max() <= 4e-6 * size, field
    rows = made["zxbcdt"].reshape(times, *alone["zxbcdt"].shape).view(np.uint16)
    assert (rows == rows[0]).all()
    for name in ("z", "x", "dt"):
        part = columns_of(GPU_SIZES)[name]
        assert (rows[0][:, part] == alone["zxbcdt"].view(np.uint16)[:, part]).all(), name


def first_rows_without_decay(zxbcdt, dout, rounding):
    """Return gradients of the first 64 rows of one document without decay and convolution, by their names."""
    def stored(x):
        return x.astype(rounding).astype(np.float64)

    columns, heads = columns_of(GPU_SIZES), GPU_SIZES.num_heads
    z, x, b, c, raw = (zxbcdt[:, part].astype(np.float64) for part in columns.values())
    slopes = {name: (1 + part * (1 - 1 / (1 + np.exp(-part)))) / (1 + np.exp(-part))
              for name, part in (("x", x[:64]), ("B", b[:64]))}  # fmt: skip
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


def test_gradients_over_50000_rows_without_decay_do_not_lose(cupy):
    """They go through more segments than have their states in memory at a time."""
    case = Case("no-decay", (50_000,), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    weights = adding_up(weights)._replace(A_log=np.full(8, -30, np.float32))
    made = run(case, 1, BFLOAT16, (zxbcdt, weights, dout), xp=cupy)["zxbcdt"][:64]
    exact, plain = (first_rows_without_decay(zxbcdt, dout, kind) for kind in (np.float64, BFLOAT16))
    for name, wanted in exact.items():
        verdict = oracle.judge(made[:, columns_of(GPU_SIZES)[name]], wanted, plain[name])
        assert verdict.rms <= verdict.rms_budget, f"d{name}: {verdict}"


def test_states_beyond_float16_are_read_without_loss(cupy):
    """States of x and B that hardly decay, and gradients of states of dout and C, grow beyond 65,504."""
    case = Case("large-states", (600,), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, FLOAT16)
    inner, state = 512, 128
    zxbcdt[:, inner : 2 * inner + state] = abs(zxbcdt[:, inner : 2 * inner + state]) + 2  # x and B
    zxbcdt[:, 2 * inner + state : 2 * inner + 2 * state] = -9  # C: its silu is -1e-3
    zxbcdt[:, -8:], dout[...] = 20, abs(dout) / 16
    weights = adding_up(weights)
    exact = mamba_oracle.packed_mixer(case.batch, zxbcdt, weights, dout, case.sizes)
    made = run(case, 1, FLOAT16, (zxbcdt, weights, dout), xp=cupy)["zxbcdt"].astype(np.float64)
    for name, part in columns_of(case.sizes).items():
        if name != "dt" and abs(exact.zxbcdt[:, part]).max() < 60_000:
            wanted = exact.zxbcdt[:, part]
            assert np.sqrt(np.mean((made[:, part] - wanted) ** 2) / np.mean(wanted**2)) < 3e-3, name


@pytest.mark.usefixtures("kernels")
def test_large_gradients_from_behind_a_chunk_without_any_are_in_range(cupy):
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
    made = run(case, 1, FLOAT16, inputs, xp=cupy)["zxbcdt"].astype(np.float64)[:, columns["B"]]
    assert np.sqrt(np.mean((made - wanted) ** 2) / np.mean(wanted**2)) < 3e-3


def test_gradients_of_a_state_may_be_0_in_half_of_its_columns(cupy):
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
    made = run(case, 1, FLOAT16, inputs, xp=cupy)["zxbcdt"].astype(np.float64)
    for name, part in columns.items():
        wanted = exact[:, part]
        assert 0 < abs(wanted).max() < 60_000
        assert np.sqrt(np.mean((made[:, part] - wanted) ** 2) / np.mean(wanted**2)) < 3e-3, name


@pytest.mark.usefixtures("kernels")
def test_products_of_a_state_and_another_document_may_be_infinite(cupy):
    """Products of the first one's states and the second one's rows are unused, but 0 * inf is NaN."""
    case = Case("large", (70, 58), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    columns = columns_of(case.sizes)
    for name, value in {"x": 1e10, "B": 1e10, "C": 1e-20}.items():
        zxbcdt[:70, columns[name]] = value
    zxbcdt[:, columns["z"]], dout[70:] = 2, 1e20
    made = run(case, 1, BFLOAT16, (zxbcdt, adding_up(weights), dout), xp=cupy)
    for name, part in columns.items():
        assert np.isfinite(made["zxbcdt"][70:, part].astype(np.float32)).all(), name


@pytest.mark.usefixtures("kernels", "much_memory")
def test_more_elements_than_32_bits_count(cupy):
    """Rows of 8,512 numbers, 2.2e9 of them: the last documents are those that are alone in another pack."""
    mixer = thdattn.Mamba2Mixer(thdattn.comm.init("single"), 64, 64, 128, dtype=BFLOAT16, engine="cuda")
    rows, alone = 262_144, 1024 * 3
    assert rows * 8512 > 2**31
    rng = np.random.default_rng(0)
    last, of_out = (cupy.random.standard_normal((alone, width), dtype=np.float32).astype(BFLOAT16).view(np.uint16)
                    for width in (8512, 4096))  # fmt: skip
    weights = thdattn.Mamba2Weights(*(cupy.asarray(x, np.float32) for x in (
        rng.standard_normal((4352, 4)), np.zeros(4352), np.log(rng.uniform(1, 16, 64)), np.ones(64), np.zeros(64))))
    zxbcdt, dout = cupy.zeros((rows, 8512), np.uint16), cupy.zeros((rows, 4096), np.uint16)
    zxbcdt[-alone:], dout[-alone:] = last, of_out

    def out_and_gradient(zxbcdt, dout, starts):
        out, saved = mixer.forward(zxbcdt.view(BFLOAT16), weights, mixer.plan(PackedBatch(starts)))
        return out.view(np.uint16), mixer.backward(dout.view(BFLOAT16), saved)[0].view(np.uint16)

    of_all, of_last = (out_and_gradient(*args) for args in (
        (zxbcdt, dout, [0, rows - alone, rows]), (last, of_out, [0, alone])))  # fmt: skip
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


@pytest.mark.usefixtures("kernels", "much_memory")
def test_more_chunks_than_a_grid_is_high(cupy):
    """Sequences that are alike, a segment each, get the same bits behind row 65,535 * 64 as before it."""
    case, times = Case("one", (2048,), sizes=Sizes(8, 64, 64, 1)), 65_535 * 64 // 2048 + 2
    mixer = case.mixer(thdattn.comm.init("single"), BFLOAT16, engine="cuda", keep_activations=False)
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    weights = thdattn.Mamba2Weights(*map(cupy.asarray, weights))

    def step(times):
        rows, grads = (cupy.tile(cupy.asarray(x.view(np.uint16)), (times, 1)).view(BFLOAT16) for x in (zxbcdt, dout))
        out, saved = mixer.forward(rows, weights, mixer.plan(PackedBatch.from_lengths(case.lengths * times)))
        gradients, dweights = mixer.backward(grads, saved)
        return [x.view(np.uint16).reshape(times, 2048, -1) for x in (out, gradients)], dweights

    rows, dweights = step(times)
    for x in rows:
        assert bool((x == x[:1]).all())
    alone, of_one = step(1)
    assert cupy.array_equal(rows[0][0], alone[0][0])
    for field, found, wanted in zip(weights._fields, dweights, of_one, strict=True):
        assert float(cupy.abs(found / times - wanted).max()) <= 1e-2 * float(cupy.abs(wanted).max()), field


# --- lengths on the GPU, graphs --------------------------------------------------------------------------------------

ROWS = 2100
REPLAYED = [((300, 40, 1200), (304, 48, 1300)), ((1, 2000, 0), (2, 2098, 0)), ((0, 0, 0), (0, 0, 0)),
            ((2100, 0, 0), (2100, 0, 0)), ((1024, 0, 1000), (1024, 5, 1071))]  # fmt: skip


@pytest.mark.usefixtures("kernels")
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

        def step():
            plan.refresh()
            out, saved = mixer.forward(inputs[0].view(BFLOAT16), on_gpu, plan)
            dzxbcdt, dweights = mixer.backward(inputs[1].view(BFLOAT16), saved)
            return out, dzxbcdt, *dweights

        step()
        stream.synchronize()
        captured = []
        for _ in range(2):
            stream.begin_capture()
            made = step()
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
