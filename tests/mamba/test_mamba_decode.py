"""Decode of the Mamba-2 mixer on the NumPy engine: texts that grow row by row are what the forward makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mixer_cases import BFLOAT16, CASES, FLOAT16, FLOAT32, FLOAT64, Case, random_inputs, truth
from mixer_decoding import (
    A_GROUP_PER_HEAD,
    ONE_GROUP,
    PROMPTS,
    SINGLE,
    TEXTS,
    assert_rounded_once,
    decode_all,
    filled_cache,
)

import thdattn
from thdattn import oracle
from thdattn.mamba.oracle import Sizes

pytestmark = pytest.mark.usefixtures("poisoned_host")

ENDS = Case("ends-with-chunks", (64, 128, 5))  # and a row of padding behind the second
WIDE = replace(TEXTS, name="wide texts", sizes=Sizes(2, 64, 128, 1))


def weights_of(case, **changes):
    return random_inputs(case, FLOAT64)[1]._replace(**changes)


def test_two_rows_worked_by_hand():
    """dt = 1, A = -1 and silu(large) = itself, so that the state is x B, then x B / e + x' B'."""
    case = Case("one", (1,), sizes=Sizes(1, 1, 1, 1), conv_width=2)
    e = np.exp(1.0)
    weights = weights_of(case, conv_weight=np.array([[0, 1], [0, 1], [1.0, 1]]), conv_bias=np.zeros(3),
                         A_log=np.zeros(1), D=np.array([10.0]), dt_bias=np.log([e - 1]))  # fmt: skip
    mixer = case.mixer(SINGLE, FLOAT64)
    cache = mixer.cache(1)
    first = mixer.decode(np.array([[1e3, 200.0, 300, 400, 0]]), weights, cache)
    assert cache.rows.ravel().tolist() == [200, 300, 400]
    np.testing.assert_allclose(first, 1e3 * (200 * 300 * 400 + 10 * 200), rtol=1e-12)
    second = mixer.decode(np.array([[1e3, 500.0, 600, 700, 0]]), weights, cache)
    state = 200 * 300 / e + 500 * 600
    np.testing.assert_allclose(cache.states.item(), state, rtol=1e-12)
    np.testing.assert_allclose(second, 1e3 * (state * (400 + 700) + 10 * 500), rtol=1e-12)


@pytest.mark.parametrize("case", [TEXTS, ONE_GROUP, A_GROUP_PER_HEAD, *(
    replace(TEXTS, name=f"convolution of {width}", conv_width=width) for width in (1, 2, 9)
)], ids=str)  # fmt: skip
@pytest.mark.parametrize("prompts", [PROMPTS, (0,) * 8], ids=["prompts", "no prompts"])
def test_step_after_step_is_the_forward_over_whole_texts(case, prompts):
    out, exact = decode_all(case, prompts, FLOAT64, "reference", np), truth(case, FLOAT64).out
    assert np.abs(out - exact).max() <= 1e-12 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_texts_keep_the_accuracy_rule(dtype):
    out, exact, plain = decode_all(WIDE, PROMPTS, dtype, "reference", np), truth(WIDE, dtype), truth(WIDE, dtype, dtype)
    verdict = oracle.judge(out, exact.out, plain.out, fused=plain.out if dtype.itemsize == 2 else None)
    assert verdict.good, str(verdict)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_of_texts_without_a_prompt_the_result_alone_is_rounded(dtype):
    assert_rounded_once(decode_all(WIDE, (0,) * 8, dtype, "reference", np), truth(WIDE, dtype).out)


@pytest.mark.parametrize("name", ["shorter-than-the-convolution", "empty-between", "padding-ends-a-chunk",
                                  "chunk-edges", "resets-inside-chunks", "all-empty-padded",
                                  "ends-with-chunks"])  # fmt: skip
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


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_text_changes_no_bit_of_another(dtype):
    zxbcdt, weights, _ = random_inputs(TEXTS, dtype)
    texts, mixer = TEXTS.batch.unpack(zxbcdt), TEXTS.mixer(SINGLE, dtype)
    step = np.random.default_rng(0).standard_normal((8, zxbcdt.shape[1])).astype(dtype)

    def stepped(change):
        changed = [100 * text if i == change else text for i, text in enumerate(texts)]
        cache, _ = filled_cache(mixer, TEXTS, PROMPTS, changed, weights, np)
        rows = np.where(np.arange(8)[:, None] == change, dtype.type(np.nan), step)
        return mixer.decode(rows, weights, cache), cache.rows, cache.states

    before = stepped(None)
    for change in range(8):
        for x, y in zip(before, stepped(change), strict=True):
            assert np.delete(x, change, axis=0).tobytes() == np.delete(y, change, axis=0).tobytes()
            assert x[change].tobytes() != y[change].tobytes()


def test_texts_that_are_not_active_keep_what_they_have():
    zxbcdt, weights, _ = random_inputs(TEXTS, FLOAT32)
    mixer = TEXTS.mixer(SINGLE, FLOAT32)
    cache, _ = filled_cache(mixer, TEXTS, PROMPTS, TEXTS.batch.unpack(zxbcdt), weights, np)
    rows, states = cache.rows.copy(), cache.states.copy()
    cache.active[...] = [True, False] * 4
    step = np.where(cache.active[:, None], zxbcdt[:8], np.float32(np.nan))
    out = mixer.decode(step, weights, cache)
    assert out[::2].all() and np.isfinite(out).all() and not out[1::2].view(np.uint8).any()
    for now, before in ((cache.rows, rows), (cache.states, states)):
        assert now[1::2].tobytes() == before[1::2].tobytes()
        assert all(x.tobytes() != y.tobytes() for x, y in zip(now[::2], before[::2], strict=True))


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
    )))  # fmt: skip
    mixer = case.mixer(SINGLE, FLOAT16)
    cache = mixer.cache(1)
    for _ in range(40):
        out = mixer.decode(np.array([[1, 60, 60, 1e-3, 5]], FLOAT16), weights, cache)
    assert cache.states.item() > 65504 and np.isfinite(out).all()


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
)  # fmt: skip
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


def test_a_cache_says_its_sizes_and_reads_no_array():
    assert repr(TEXTS.mixer(SINGLE, FLOAT32).cache(2)) == (
        "<Mamba2Cache num_texts=2, num_heads=4, head_dim=3, state_dim=5, num_groups=2, conv_width=4, dtype=float32, "
        "norm=None, engine=reference>"
    )
