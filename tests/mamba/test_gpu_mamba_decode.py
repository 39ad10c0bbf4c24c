"""Decode of the Mamba-2 mixer on the CUDA engine: every size against float64, and the same bits when captured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import to_host
from decoding import poison
from mixer_cases import BFLOAT16, FLOAT16, random_inputs, truth
from mixer_decoding import PROMPTS, SINGLE, TEXTS, assert_rounded_once, decode_all, filled_cache, prompts_of

import thdattn
from thdattn import oracle
from thdattn.mamba.oracle import Sizes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

ALL_SIZES = [Sizes(8, 64, 64, 1), Sizes(8, 64, 128, 2), Sizes(8, 64, 256, 4), Sizes(8, 128, 64, 8),
             Sizes(8, 128, 128, 1), Sizes(8, 128, 256, 2), Sizes(24, 64, 128, 3)]  # fmt: skip
USUAL = replace(TEXTS, name="usual", sizes=ALL_SIZES[1])
LONG = replace(USUAL, name="long", lengths=(1023, 1024, 1025, 2100), padded=(1024, 1024, 1030, 2100))


def device(cupy, weights):
    return thdattn.Mamba2Weights(*map(cupy.asarray, weights))


def steps_of(case, dtype, count):
    """Draw rows for so many steps of every text."""
    rng = np.random.default_rng(5)
    columns = case.mixer(SINGLE, np.float32, engine="reference")._shape.columns
    return rng.standard_normal((count, len(case.lengths), columns), np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("sizes", ALL_SIZES, ids=str)
def test_step_after_step_is_the_forward_over_whole_texts(cupy, sizes, dtype):
    case = replace(TEXTS, name=str(sizes), sizes=sizes)
    out, plain = decode_all(case, PROMPTS, dtype, "cuda", cupy), truth(case, dtype, dtype).out
    verdict = oracle.judge(out, truth(case, dtype).out, plain, fused=plain)
    assert verdict.good, str(verdict)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_of_texts_without_a_prompt_the_result_alone_is_rounded(cupy, dtype):
    assert_rounded_once(decode_all(USUAL, (0,) * 8, dtype, "cuda", cupy), truth(USUAL, dtype).out)


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_every_width_of_the_convolution(cupy, width):
    case = replace(USUAL, name=f"convolution of {width}", conv_width=width)
    for prompts in (PROMPTS, (0,) * 8):
        out, plain = decode_all(case, prompts, BFLOAT16, "cuda", cupy), truth(case, BFLOAT16, BFLOAT16).out
        verdict = oracle.judge(out, truth(case, BFLOAT16).out, plain, fused=plain)
        assert verdict.good, str(verdict)


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


@pytest.mark.parametrize("offsets", [(0, 9, 5), (4, 8, 20), (-4, 8, 20), (0, 8, 21), (0, 8, 2**31 - 1)], ids=str)
def test_wrong_lengths_on_the_gpu_fill_a_cache_with_nan(cupy, unnoticed, offsets):
    zxbcdt, weights, _ = random_inputs(USUAL, BFLOAT16)
    mixer = USUAL.mixer(SINGLE, BFLOAT16, engine="cuda")
    plan = mixer.plan(thdattn.PackedBatch(cupy.asarray(offsets, np.int32), total_rows=20))
    _, saved = mixer.forward(cupy.asarray(zxbcdt[:20]), device(cupy, weights), plan)
    cache = mixer.cache(2)
    cache.fill(saved)
    for x in (cache.rows, cache.states):
        assert np.isnan(to_host(x).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_eager_steps_and_replays_of_one_captured_step_give_the_same_bits(cupy, dtype):
    zxbcdt, weights, _ = random_inputs(USUAL, dtype)
    texts, weights = USUAL.batch.unpack(zxbcdt), device(cupy, weights)
    mixer = USUAL.mixer(SINGLE, dtype, engine="cuda")
    steps, rng = steps_of(USUAL, dtype, 20), np.random.default_rng(0)
    active = [rng.random(8) < 0.8 for _ in steps]

    cache, _ = filled_cache(mixer, USUAL, PROMPTS, texts, weights, cupy)
    eager = []
    for step, which in zip(steps, active, strict=True):
        cache.active[...] = cupy.asarray(which)
        eager.append(to_host(mixer.decode(cupy.asarray(step), weights, cache)))

    again, _ = filled_cache(mixer, USUAL, PROMPTS, texts, weights, cupy)
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


def test_a_text_changes_no_bit_of_another(cupy):
    zxbcdt, weights, _ = random_inputs(USUAL, BFLOAT16)
    texts, weights = USUAL.batch.unpack(zxbcdt), device(cupy, weights)
    mixer = USUAL.mixer(SINGLE, BFLOAT16, engine="cuda")
    step = steps_of(USUAL, BFLOAT16, 1)[0]

    def stepped(change):
        changed = [100 * text if i == change else text for i, text in enumerate(texts)]
        cache, _ = filled_cache(mixer, USUAL, PROMPTS, changed, weights, cupy)
        rows = np.where(np.arange(8)[:, None] == change, BFLOAT16.type(np.nan), step)
        made = mixer.decode(cupy.asarray(rows), weights, cache), cache.rows, cache.states
        return [to_host(x) for x in made]

    before = stepped(None)
    for change in range(8):
        for x, y in zip(before, stepped(change), strict=True):
            assert np.delete(x, change, axis=0).tobytes() == np.delete(y, change, axis=0).tobytes()
            assert x[change].tobytes() != y[change].tobytes()


def test_texts_that_are_not_active_keep_what_they_have(cupy):
    zxbcdt, weights, _ = random_inputs(USUAL, BFLOAT16)
    weights, mixer = device(cupy, weights), USUAL.mixer(SINGLE, BFLOAT16, engine="cuda")
    cache, _ = filled_cache(mixer, USUAL, PROMPTS, USUAL.batch.unpack(zxbcdt), weights, cupy)
    before = [to_host(x) for x in (cache.rows, cache.states)]
    cache.active[...] = cupy.asarray([True, False] * 4)
    step = np.where(to_host(cache.active)[:, None], steps_of(USUAL, BFLOAT16, 1)[0], BFLOAT16.type(np.nan))
    out = to_host(mixer.decode(cupy.asarray(step), weights, cache))
    assert out[::2].any(axis=1).all() and np.isfinite(out.astype(np.float32)).all()
    assert not out[1::2].view(np.uint8).any()
    for now, then in zip((cache.rows, cache.states), before, strict=True):
        assert to_host(now)[1::2].tobytes() == then[1::2].tobytes()


@pytest.mark.usefixtures("much_memory")
def test_states_beyond_2_to_the_31_numbers(cupy):
    """The last text of 8.6 GB of states: offsets need 64 bits."""
    case = replace(TEXTS, name="many", lengths=(1,), padded=None, sizes=Sizes(64, 64, 128, 1))
    num_texts, (_, weights, _) = 2**31 // (64 * 64 * 128) + 1, random_inputs(case, BFLOAT16)
    weights, mixer = device(cupy, weights), case.mixer(SINGLE, BFLOAT16, engine="cuda")
    cache, alone = mixer.cache(num_texts), mixer.cache(1)
    for row in steps_of(case, BFLOAT16, 3):
        row = cupy.asarray(row)
        out = mixer.decode(cupy.concatenate([row] * num_texts), weights, cache)
        assert to_host(out[-1:]).tobytes() == to_host(mixer.decode(row, weights, alone)).tobytes()
    assert to_host(cache.states[-1:]).tobytes() == to_host(alone.states).tobytes()


def test_no_prompt_at_all_fills_with_zeros(cupy):
    _, weights, _ = random_inputs(USUAL, BFLOAT16)
    mixer, batch = USUAL.mixer(SINGLE, BFLOAT16, engine="cuda"), prompts_of(USUAL, (0,) * 8).batch
    zxbcdt = cupy.zeros((batch.total_rows, mixer._shape.columns), BFLOAT16)
    poison(zxbcdt)
    _, saved = mixer.forward(zxbcdt, device(cupy, weights), mixer.plan(batch))
    cache = mixer.cache(8)
    poison(cache.states)
    cache.fill(saved)
    assert not to_host(cache.states).any() and not to_host(cache.rows).view(np.uint8).any()
