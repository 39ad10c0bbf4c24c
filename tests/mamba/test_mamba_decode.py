"""Decode of the Mamba-2 mixer on each engine: texts that grow row by row are what the forward makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import to_host
from decoding import poison
from mixer_cases import (
    BFLOAT16,
    CASES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    GPU_NORMS,
    NORM_SIZES,
    NORMS,
    Case,
    random_inputs,
    truth,
    with_norm,
)

import thdattn
from thdattn import oracle
from thdattn.fuzz.runs import next_rows
from thdattn.mamba.oracle import Norm, Sizes

SINGLE = thdattn.comm.init("single")
# Lengths of texts, and how much of each is its prompt: none, all, fewer rows than the convolution sees, chunk borders.
TEXTS = Case("texts", (70, 5, 66, 9, 3, 0, 140, 64), padded=(70, 8, 70, 9, 3, 0, 150, 64), slack=5)
PROMPTS, NO_PROMPTS = (60, 0, 65, 2, 3, 0, 128, 63), (0,) * 8
ONE_GROUP = replace(TEXTS, name="one group", sizes=Sizes(3, 2, 4, 1))
A_GROUP_PER_HEAD = replace(TEXTS, name="a group per head", sizes=Sizes(3, 2, 4, 3))
ENDS = Case("ends-with-chunks", (64, 128, 5))  # and a row of padding behind the second
WIDE = replace(TEXTS, name="wide texts", sizes=Sizes(2, 64, 128, 1))
WIDE_GROUPS = replace(TEXTS, name="wide texts", sizes=Sizes(4, 64, 32, 2))
USUAL = replace(TEXTS, name="usual", sizes=Sizes(8, 64, 128, 2))
USUAL_TEXTS = replace(USUAL, name="usual texts")
LONG = replace(USUAL, name="long", lengths=(1023, 1024, 1025, 2100), padded=(1024, 1024, 1030, 2100))
ALL_SIZES = [Sizes(8, 64, 64, 1), USUAL.sizes, Sizes(8, 64, 256, 4), Sizes(8, 128, 64, 8), Sizes(8, 128, 128, 1),
             Sizes(8, 128, 256, 2), Sizes(24, 64, 128, 3)]
BOTH_DTYPES = (BFLOAT16, FLOAT16)


def on(*values, engine):
    """Return parameters of a test for an engine; those of the CUDA engine need a GPU."""
    return pytest.param(engine, *values, marks=[pytest.mark.gpu] * (engine != "reference"))


def each(*names):
    """Parametrise a test of the engine by values from `on`."""
    return lambda values: pytest.mark.parametrize(("engine", *names), values, indirect=["engine"], ids=str)


def weights_of(case, **changes):
    return random_inputs(case, FLOAT64)[1]._replace(**changes)


def layer_of(engine, case, dtype):
    """Return a mixer, texts on the host, and weights of the engine."""
    zxbcdt, weights, _ = random_inputs(case, dtype)
    weights = thdattn.Mamba2Weights(*map(engine.xp.asarray, weights))
    return case.mixer(SINGLE, dtype, engine=engine.name), case.batch.unpack(zxbcdt), weights


def prompts_of(case, prompts):
    """Return the pack of the prompts, with padding between."""
    return replace(case, name="prompts", lengths=prompts, padded=tuple(n + i % 3 for i, n in enumerate(prompts)))


def filled_cache(mixer, case, prompts, texts, weights, xp):
    """Return a cache after the prompts, NaN before it is filled, and the forward's rows of these."""
    batch = prompts_of(case, prompts).batch
    packed = batch.pack([text[:n] for text, n in zip(texts, prompts, strict=True)], fill=np.nan)
    out, saved = mixer.forward(xp.asarray(packed), weights, mixer.plan(batch))
    cache = mixer.cache(len(prompts))
    for x in (cache.rows, cache.states):
        poison(x)
    cache.fill(saved)
    return cache, batch.unpack(to_host(out))


def decode_all(engine, case, prompts, dtype):
    """Return out of all texts, packed as the case: the prompts by forward, the rest by decode.

    Texts that are done are not active, and have rows of NaN.
    """
    mixer, texts, weights = layer_of(engine, case, dtype)
    cache, made = filled_cache(mixer, case, prompts, texts, weights, engine.xp)
    rows = [[x] for x in made]
    for step in range(max(len(text) - n for text, n in zip(texts, prompts, strict=True))):
        starts = [n + step for n in prompts]
        active = np.array([start < len(text) for start, text in zip(starts, texts, strict=True)])
        cache.active[...] = engine.xp.asarray(active)
        out = to_host(mixer.decode(engine.xp.asarray(next_rows(texts, starts, 1)), weights, cache))
        assert not out[~active].view(np.uint8).any(), "exactly 0"
        for text in np.flatnonzero(active):
            rows[text].append(out[text : text + 1])
    return case.batch.pack([np.concatenate(x) for x in rows])


def steps_of(case, dtype, count):
    """Draw rows for so many steps of every text."""
    rng = np.random.default_rng(5)
    columns = random_inputs(case, dtype)[0].shape[1]
    return rng.standard_normal((count, len(case.lengths), columns), np.float32).astype(dtype)


@pytest.mark.usefixtures("poisoned_host")
def test_two_rows_worked_by_hand():
    """dt = 1, A = -1 and silu(large) = itself, so that the state is x B, then x B / e + x' B'."""
    case = Case("one", (1,), sizes=Sizes(1, 1, 1, 1), conv_width=2)
    e = np.exp(1.0)
    weights = weights_of(case, conv_weight=np.array([[0, 1], [0, 1], [1.0, 1]]), conv_bias=np.zeros(3),
                         A_log=np.zeros(1), D=np.array([10.0]), dt_bias=np.log([e - 1]))
    mixer = case.mixer(SINGLE, FLOAT64)
    cache = mixer.cache(1)
    first = mixer.decode(np.array([[1e3, 200.0, 300, 400, 0]]), weights, cache)
    assert cache.rows.ravel().tolist() == [200, 300, 400]
    np.testing.assert_allclose(first, 1e3 * (200 * 300 * 400 + 10 * 200), rtol=1e-12)
    second = mixer.decode(np.array([[1e3, 500.0, 600, 700, 0]]), weights, cache)
    state = 200 * 300 / e + 500 * 600
    np.testing.assert_allclose(cache.states.item(), state, rtol=1e-12)
    np.testing.assert_allclose(second, 1e3 * (state * (400 + 700) + 10 * 500), rtol=1e-12)


CASES_EXACT = [TEXTS, ONE_GROUP, A_GROUP_PER_HEAD, *(with_norm(TEXTS, norm) for norm in NORMS),
               *(replace(TEXTS, name=f"convolution of {width}", conv_width=width) for width in (1, 2, 9))]
CASES_GPU = [*(replace(TEXTS, name=str(sizes), sizes=sizes) for sizes in ALL_SIZES),
             *(replace(TEXTS, name=f"{sizes} {norm}", sizes=sizes, norm=norm) for sizes, norm in NORM_SIZES)]
WIDTHS_GPU = [replace(USUAL, name=f"convolution of {width}", conv_width=width) for width in (1, 2, 3, 8)]


@each("case", "dtype", "prompted")([
    *(on(case, FLOAT64, prompted, engine="reference") for case in CASES_EXACT for prompted in (True, False)),
    *(on(WIDE, dtype, True, engine="reference") for dtype in (FLOAT32, BFLOAT16, FLOAT16)),
    *(on(case, dtype, True, engine="cuda") for case in CASES_GPU for dtype in BOTH_DTYPES),
    *(on(case, BFLOAT16, prompted, engine="cuda") for case in WIDTHS_GPU for prompted in (True, False)),
])
def test_step_after_step_is_the_forward_over_whole_texts(engine, case, dtype, prompted):
    """By the accuracy rule, which for 16 bits has no room for a second rounding."""
    prompts, exact = PROMPTS if prompted else NO_PROMPTS, truth(case, dtype).out
    out = decode_all(engine, case, prompts, dtype)
    if dtype == FLOAT64:
        assert np.abs(out - exact).max() <= 1e-12 * np.abs(exact).max()
        return
    plain = truth(case, dtype, dtype).out
    verdict = oracle.judge(out, exact, plain, fused=plain if dtype.itemsize == 2 else None)
    assert verdict.good, str(verdict)


@each("case", "dtype")([
    *(on(WIDE, dtype, engine="reference") for dtype in BOTH_DTYPES),
    *(on(with_norm(WIDE_GROUPS, norm), BFLOAT16, engine="reference") for norm in NORMS),
    *(on(case, dtype, engine="cuda") for case in (USUAL, *(with_norm(USUAL_TEXTS, norm) for norm in GPU_NORMS))
      for dtype in BOTH_DTYPES),
])
def test_of_texts_without_a_prompt_the_result_alone_is_rounded(engine, case, dtype):
    out, exact = decode_all(engine, case, NO_PROMPTS, dtype), truth(case, dtype).out
    allowed, error = (np.sqrt(np.mean((x.astype(np.float64) - exact) ** 2)) for x in (exact.astype(dtype), out))
    assert out.dtype == dtype and error <= 1.05 * allowed, f"RMS error {error:.2e}, allowed 1.05 * {allowed:.2e}"


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize("name", ["shorter-than-the-convolution", "empty-between", "padding-ends-a-chunk",
                                  "chunk-edges", "resets-inside-chunks", "all-empty-padded",
                                  "ends-with-chunks"])
def test_a_filled_cache_is_one_that_took_every_row(name):
    case = CASES.get(name, ENDS)
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    texts, mixer = case.batch.unpack(zxbcdt), case.mixer(SINGLE, FLOAT64)
    cache, _ = filled_cache(mixer, case, tuple(map(len, texts)), texts, weights, np)
    for i, text in enumerate(texts):
        alone = mixer.cache(1)
        for row in text:
            mixer.decode(row[None], weights, alone)
        np.testing.assert_array_equal(cache.rows[i], alone.rows[0])
        np.testing.assert_allclose(cache.states[i], alone.states[0], rtol=1e-11, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("on_device", [False, True, "strided"])
@pytest.mark.parametrize("case", [USUAL, LONG], ids=str)
def test_a_filled_cache_is_that_of_the_numpy_engine(cupy, case, on_device):
    """Prompts of every length around the segments of rows, with NaN between."""
    zxbcdt, weights, _ = random_inputs(case, BFLOAT16)
    packed = np.where(case.valid[:, None], zxbcdt, BFLOAT16.type(np.nan))
    caches = []
    for engine, xp in (("cuda", cupy), ("reference", np)):
        mixer, batch = case.mixer(SINGLE, BFLOAT16, engine=engine), case.batch
        if on_device and engine == "cuda":
            offsets = xp.asarray(np.stack([batch.cu_seqlens, batch.cu_seqlens_padded], axis=1)).T
            offsets = offsets if on_device == "strided" else map(xp.ascontiguousarray, offsets)
            batch = thdattn.PackedBatch(*offsets, total_rows=batch.total_rows)
        _, saved = mixer.forward(xp.asarray(packed), thdattn.Mamba2Weights(*map(xp.asarray, weights)),
                                 mixer.plan(batch))
        cache = mixer.cache(len(case.lengths))
        for x in (cache.rows, cache.states):
            poison(x)
        cache.fill(saved)
        caches.append([to_host(x) for x in (cache.rows, cache.states)])
    (rows, states), (wanted_rows, wanted_states) = caches
    assert rows.tobytes() == wanted_rows.tobytes()
    # x and B were rounded to bfloat16, by either engine: where that went apart, an element is off by 2**-8 of a term.
    error = np.abs(states - wanted_states).max() / np.abs(wanted_states).max()
    assert error < 2e-3, error
    empty = np.array(case.lengths) == 0
    assert not states[empty].any() and not rows[empty].view(np.uint8).any()


@each("case", "dtype")([on(TEXTS, FLOAT32, engine="reference"), on(TEXTS, BFLOAT16, engine="reference"),
                        on(USUAL, BFLOAT16, engine="cuda")])
def test_a_text_changes_no_bit_of_another(engine, case, dtype):
    mixer, texts, weights = layer_of(engine, case, dtype)
    step = steps_of(case, dtype, 1)[0]

    def stepped(change):
        changed = [100 * text if i == change else text for i, text in enumerate(texts)]
        cache, _ = filled_cache(mixer, case, PROMPTS, changed, weights, engine.xp)
        rows = np.where(np.arange(8)[:, None] == change, dtype.type(np.nan), step)
        return [to_host(x) for x in (mixer.decode(engine.xp.asarray(rows), weights, cache), cache.rows, cache.states)]

    before = stepped(None)
    for change in range(8):
        for x, y in zip(before, stepped(change), strict=True):
            assert np.delete(x, change, axis=0).tobytes() == np.delete(y, change, axis=0).tobytes()
            assert x[change].tobytes() != y[change].tobytes()


@each("case", "dtype")([on(TEXTS, FLOAT32, engine="reference"), on(USUAL, BFLOAT16, engine="cuda")])
def test_texts_that_are_not_active_keep_what_they_have(engine, case, dtype):
    mixer, texts, weights = layer_of(engine, case, dtype)
    cache, _ = filled_cache(mixer, case, PROMPTS, texts, weights, engine.xp)
    before = [to_host(x) for x in (cache.rows, cache.states)]
    cache.active[...] = engine.xp.asarray([True, False] * 4)
    step = np.where(np.array([[True], [False]] * 4), steps_of(case, dtype, 1)[0], dtype.type(np.nan))
    out = to_host(mixer.decode(engine.xp.asarray(step), weights, cache))
    assert out[::2].any(axis=1).all() and np.isfinite(out.astype(np.float32)).all()
    assert not out[1::2].view(np.uint8).any()
    for now, then in zip(map(to_host, (cache.rows, cache.states)), before, strict=True):
        assert now[1::2].tobytes() == then[1::2].tobytes()
        assert all(x.tobytes() != y.tobytes() for x, y in zip(now[::2], then[::2], strict=True))


@pytest.mark.usefixtures("poisoned_host")
def test_a_reset_makes_all_texts_empty():
    zxbcdt, weights, _ = random_inputs(TEXTS, FLOAT32)
    mixer = TEXTS.mixer(SINGLE, FLOAT32)
    new = mixer.cache(8)
    assert new.active.all()
    cache, _ = filled_cache(mixer, TEXTS, PROMPTS, TEXTS.batch.unpack(zxbcdt), weights, np)
    cache.reset()
    assert mixer.decode(zxbcdt[:8], weights, cache).tobytes() == mixer.decode(zxbcdt[:8], weights, new).tobytes()


def test_float16_states_may_leave_its_range():
    case = Case("large", (1,), sizes=Sizes(1, 1, 1, 1), conv_width=1)
    weights = thdattn.Mamba2Weights(*(x.astype(FLOAT32) for x in weights_of(
        case, conv_weight=np.ones((3, 1)), conv_bias=np.zeros(3), A_log=np.array([-20.0]), dt_bias=np.zeros(1)
    )))
    mixer = case.mixer(SINGLE, FLOAT16)
    cache = mixer.cache(1)
    for _ in range(40):
        out = mixer.decode(np.array([[1, 60, 60, 1e-3, 5]], FLOAT16), weights, cache)
    assert cache.states.item() > 65504 and np.isfinite(out).all()


@pytest.mark.parametrize("engine", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_no_prompt_at_all_fills_with_zeros(engine):
    mixer, _, weights = layer_of(engine, USUAL, BFLOAT16)
    batch = prompts_of(USUAL, NO_PROMPTS).batch
    zxbcdt = engine.xp.zeros((batch.total_rows, mixer._shape.columns), BFLOAT16)
    poison(zxbcdt)
    _, saved = mixer.forward(zxbcdt, weights, mixer.plan(batch))
    cache = mixer.cache(8)
    poison(cache.states)
    cache.fill(saved)
    assert not to_host(cache.states).any() and not to_host(cache.rows).view(np.uint8).any()


# --- on a GPU alone --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("offsets", [(0, 9, 5), (4, 8, 20), (-4, 8, 20), (0, 8, 21), (0, 8, 2**31 - 1)], ids=str)
def test_wrong_lengths_on_the_gpu_fill_a_cache_with_nan(cupy, unnoticed, offsets):
    zxbcdt, weights, _ = random_inputs(USUAL, BFLOAT16)
    mixer = USUAL.mixer(SINGLE, BFLOAT16, engine="cuda")
    plan = mixer.plan(thdattn.PackedBatch(cupy.asarray(offsets, np.int32), total_rows=20))
    _, saved = mixer.forward(cupy.asarray(zxbcdt[:20]), thdattn.Mamba2Weights(*map(cupy.asarray, weights)), plan)
    cache = mixer.cache(2)
    cache.fill(saved)
    for x in (cache.rows, cache.states):
        assert np.isnan(to_host(x).astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize(("norm", "dtype"), [(None, BFLOAT16), (None, FLOAT16), (Norm(True, 2), BFLOAT16)], ids=str)
def test_eager_steps_and_replays_of_one_captured_step_give_the_same_bits(cupy, norm, dtype):
    case = with_norm(USUAL, norm)
    zxbcdt, weights, _ = random_inputs(case, dtype)
    texts, weights = case.batch.unpack(zxbcdt), thdattn.Mamba2Weights(*map(cupy.asarray, weights))
    mixer = case.mixer(SINGLE, dtype, engine="cuda")
    steps, rng = steps_of(case, dtype, 20), np.random.default_rng(0)
    active = [rng.random(8) < 0.8 for _ in steps]

    cache, _ = filled_cache(mixer, case, PROMPTS, texts, weights, cupy)
    eager = []
    for step, which in zip(steps, active, strict=True):
        cache.active[...] = cupy.asarray(which)
        eager.append(to_host(mixer.decode(cupy.asarray(step), weights, cache)))
        assert not eager[-1][~which].view(np.uint8).any(), "exactly 0"

    again, _ = filled_cache(mixer, case, PROMPTS, texts, weights, cupy)
    start = again.rows.copy(), again.states.copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        given = cupy.asarray(steps[0])
        cupy.cuda.runtime.deviceSynchronize()
        mixer.decode(given, weights, again)  # kernels are compiled
        for there, here in zip((again.rows, again.states), start, strict=True):
            there[...] = here
        stream.synchronize()
        stream.begin_capture()
        out = mixer.decode(given, weights, again)
        graph = stream.end_capture()
        for step, which, expected in zip(steps, active, eager, strict=True):
            given.set(step)
            again.active[...] = cupy.asarray(which)
            graph.launch(stream)
            stream.synchronize()
            assert to_host(out).tobytes() == expected.tobytes()
    for now, expected in ((again.rows, cache.rows), (again.states, cache.states)):
        assert to_host(now).tobytes() == to_host(expected).tobytes()


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory", "poisoned_gpu")
def test_states_beyond_2_to_the_31_numbers(cupy):
    """The last text of 8.6 GB of states: offsets need 64 bits."""
    case = replace(TEXTS, name="many", lengths=(1,), padded=None, sizes=Sizes(64, 64, 128, 1))
    num_texts, (_, weights, _) = 2**31 // (64 * 64 * 128) + 1, random_inputs(case, BFLOAT16)
    mixer, weights = case.mixer(SINGLE, BFLOAT16, engine="cuda"), thdattn.Mamba2Weights(*map(cupy.asarray, weights))
    cache, alone = mixer.cache(num_texts), mixer.cache(1)
    for row in steps_of(case, BFLOAT16, 3):
        row = cupy.asarray(row)
        out = mixer.decode(cupy.concatenate([row] * num_texts), weights, cache)
        assert to_host(out[-1:]).tobytes() == to_host(mixer.decode(row, weights, alone)).tobytes()
    assert to_host(cache.states[-1:]).tobytes() == to_host(alone.states).tobytes()


# --- errors ----------------------------------------------------------------------------------------------------------


def saved_of(lengths, comm=SINGLE, **changes):
    mixer = replace(TEXTS, **changes).mixer(comm, FLOAT32)
    zxbcdt = np.ones((mixer.plan(thdattn.PackedBatch.from_lengths(lengths)).local_rows, mixer._shape.columns), FLOAT32)
    weights = random_inputs(replace(TEXTS, **changes), FLOAT32)[1]
    return mixer.forward(zxbcdt, weights, mixer.plan(thdattn.PackedBatch.from_lengths(lengths)))[1]


def decoded(mixer, cache, rows=2, dtype=FLOAT32, **changes):
    weights = random_inputs(TEXTS, FLOAT32)[1]._replace(**changes)
    return mixer.decode(np.zeros((rows, mixer._shape.columns), dtype), weights, cache)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, c: m.cache(0), ValueError, "num_texts is 0, wanted >= 1"),
        (lambda m, c: m.cache(2**16), ValueError, "num_texts is 65536, wanted <= 65535; a cache has 1 to 65535"),
        (lambda m, c: m.cache(2.5), TypeError, "num_texts is 2.5, a float; wanted an int"),
        (lambda m, c: decoded(m, 7), TypeError, "cache is 7, a int; wanted a Mamba2Cache; make it with mixer.cache"),
        (lambda m, c: decoded(m, c, rows=3), ValueError, r"zxbcdt has shape \(3, 48\), wanted \(2, 48\); pass one row"),
        (lambda m, c: decoded(m, c, dtype=FLOAT64), TypeError, "zxbcdt is float64, wanted float32"),
        (lambda m, c: decoded(m, c, D=np.ones(3, FLOAT32)), ValueError, r"weights.D has shape \(3,\), wanted \(4,\)"),
        (lambda m, c: m.decode(np.zeros((2, 48), FLOAT32), None, c), TypeError, "weights is None, a NoneType; wanted"),
        (lambda m, c: decoded(replace(TEXTS, conv_width=3).mixer(SINGLE, FLOAT32), c), ValueError,
         "cache was made for conv_width 4, wanted 3; make it with this mixer's cache method"),
        (lambda m, c: decoded(TEXTS.mixer(SINGLE, FLOAT64), c), ValueError, "cache was made for dtype float32, wanted"),
        (lambda m, c: c.fill(3), TypeError, "saved is 3, a int; wanted a Mamba2Saved; pass the one that forward"),
        (lambda m, c: c.fill(saved_of([4])), ValueError, "saved is of 1 sequences on 1 ranks, wanted 2 on one"),
        (lambda m, c: c.fill(saved_of([4, 1], conv_width=3)), ValueError,
         "saved was made with conv_width 3, wanted 4; pass what a forward of this mixer returned"),
    ],
)
def test_wrong_values_are_named(call, error, message):
    mixer = TEXTS.mixer(SINGLE, FLOAT32)
    with pytest.raises(error, match=message):
        call(mixer, mixer.cache(2))


def test_several_ranks_are_refused():
    cache = TEXTS.mixer(SINGLE, FLOAT32).cache(2)

    def program(comm):
        with pytest.raises(ValueError, match=r"comm has 2 ranks, wanted 1.*with thdattn.comm.init\('single'\)"):
            TEXTS.mixer(comm, FLOAT32).cache(1)
        saved = saved_of([4, 2], comm)
        with pytest.raises(ValueError, match="saved is of 2 sequences on 2 ranks, wanted 2 on one"):
            cache.fill(saved)

    thdattn.comm.run_local(2, program)
