"""Decode on the NumPy engine: texts that grow in a cache are what the forward makes of the whole texts."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BFLOAT16, to_host
from decoding import Texts, attend, attention, check_rows, decode_all, normal, poison

import thdattn
from thdattn import oracle
from thdattn.engines import AttentionOptions, reference
from thdattn.kernels.configs import TILES
from thdattn.mamba.shape import Inputs

pytestmark = pytest.mark.usefixtures("poisoned_host")

LENGTHS, PROMPTS = (37, 1, 20, 0, 9), (30, 0, 20, 0, 2)
MASKS = ({}, {"window": (5, 0)}, {"window": (0, 0)}, {"causal": False, "window": (7, 0)})


def small(dtype=np.float64, **options):
    return attention((4, 2), (8, 12), dtype, engine="reference", **options)


def test_one_text_worked_by_hand():
    # Scores are 0, so a row is the mean of the values it sees: of 1, then of 1 and 3.
    layer = attention((1, 1), (1, 1), np.float64, engine="reference")
    cache = layer.cache(1, 2)
    zero, one, three = (np.full((1, 1, 1), x) for x in (0.0, 1.0, 3.0))
    assert layer.decode(zero, zero, one, cache).item() == 1
    assert layer.decode(zero, zero, three, cache).item() == 2
    assert cache.lengths.tolist() == [2] and cache.v.ravel().tolist() == [1, 3]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_step_after_step_is_the_forward_over_whole_texts(mask, count):
    if not mask.get("causal", True) and count > 1:
        pytest.skip("rows of one step would see each other")
    texts = Texts.random(LENGTHS, (4, 2), (8, 12), np.float64)
    out = decode_all(small(**mask), texts, PROMPTS, count, np)
    exact = texts.truth(**{"causal": True, **mask}).exact
    np.testing.assert_allclose(out, exact.out, rtol=1e-10, atol=1e-12)


def test_rows_of_one_step_see_each_other_without_a_causal_mask():
    layer, rng = small(causal=False), np.random.default_rng(0)
    cache = layer.cache(1, 4)
    q, k, v = (normal(rng, np.float64, 3, heads, width) for heads, width in ((4, 8), (2, 8), (2, 12)))
    batch = thdattn.PackedBatch.from_lengths([3])
    expected = oracle.packed_attention(batch, q, k, v, causal=False)
    np.testing.assert_allclose(layer.decode(q, k, v, cache), expected.out, rtol=1e-10)


def test_what_a_captured_call_first_makes_is_of_its_graph_alone():
    numbers, captures = itertools.count(), [7, 7, 8, None, None, 7, 9]
    cache = replace(small().cache(1, 4), _engine=SimpleNamespace(capture=lambda: captures[0]))
    made = []
    while captures:
        made.append(cache.memoize("counters", lambda: next(numbers)))
        captures.pop(0)
    assert made == [0, 0, 1, 2, 2, 2, 2], "what was made outside of captures serves all"


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16, np.float32], ids=str)
def test_16_bit_texts_keep_the_accuracy_rule(dtype):
    texts = Texts.random((300, 41), (4, 2), (64, 64), np.dtype(dtype))
    layer = attention((4, 2), (64, 64), dtype, engine="reference")
    out = decode_all(layer, texts, (290, 0), 1, np)
    verdict = texts.truth(causal=True).judge("out", out)
    assert verdict.good, str(verdict)


def test_ranges_of_every_length_and_unread_rows_of_nan():
    layer, rng = small(np.float32), np.random.default_rng(0)
    cache = layer.cache(3, 50)
    k, v = normal(rng, np.float32, 150, 2, 8), normal(rng, np.float32, 150, 2, 12)
    ranges = np.array([[0, 0], [7, 8], [60, 100], [90, 60], [101, 150]], np.int32)
    for there, here in ((cache.k, k), (cache.v, v)):
        poison(there)
        for begin, end in ranges:
            there.reshape(-1, *there.shape[2:])[begin:end] = here[begin:end]
    q = normal(rng, np.float32, 5, 4, 8)
    check_rows(reference.attn_decode(q, ranges, cache, AttentionOptions(8**-0.5)), q, k, v, ranges)


def test_check_rows_can_fail():
    rng, ranges = np.random.default_rng(0), np.array([[0, 40], [3, 3]], np.int32)
    q, k, v = (normal(rng, np.float32, n, 2, 8) for n in (2, 40, 40))
    good = attend(q, k, v, ranges, np.float32)
    check_rows((good.out.astype(np.float32), good.lse), q, k, v, ranges)
    wrong = attend(q, k, v, ranges - [[0, 1], [0, 0]], np.float32)
    with pytest.raises(AssertionError):
        check_rows((wrong.out.astype(np.float32), good.lse), q, k, v, ranges)


def test_a_text_that_does_not_fit_is_marked_and_never_cut(engine):
    layer, rng = attention((8, 2), (64, 64), BFLOAT16, engine=engine.name), np.random.default_rng(0)
    cache, half = layer.cache(2, 3), np.full((2, 3, 2, 64), 0.5, BFLOAT16)
    cache.lengths[...] = engine.xp.asarray([3, 1], np.int32)
    for array in (cache.k, cache.v):
        array[...] = engine.xp.asarray(half)
    q, k, v = (engine.xp.asarray(normal(rng, BFLOAT16, 2, heads, 64)) for heads in (8, 2, 2))
    for other in (2, 3):
        out = to_host(layer.decode(q, k, v, cache))
        assert not out[0].any() and out[1].all()
        assert cache.lengths.tolist() == [4, other]
        with pytest.raises(RuntimeError, match=r"sequences \[0\] had more than 3 rows.*make it larger"):
            cache.check()
    assert (to_host(cache.k)[0] == half[0]).all() and (to_host(cache.v)[0] == half[0]).all()
    assert (to_host(cache.k)[1, 1:] == to_host(k)[1]).all()
    cache.reset()
    cache.check()
    assert to_host(layer.decode(q, k, v, cache)).all() and cache.lengths.tolist() == [1, 1]


def test_fill_replaces_what_texts_had():
    layer, rng = small(np.float32), np.random.default_rng(0)
    cache = layer.cache(3, 6)
    cache.lengths[...] = [7, 2, 4]
    batch = thdattn.PackedBatch.from_lengths([6, 0, 3], 4)
    k, v = (batch.pack([normal(rng, np.float32, n, 2, width) for n in batch.lengths], np.nan) for width in (8, 12))
    cache.fill(k, v, layer.plan(batch))
    assert cache.lengths.tolist() == [6, 0, 3]
    assert (cache.k[0] == k[:6]).all() and (cache.v[2, :3] == v[8:11]).all()


def decoded(layer, cache, rows=2, heads=4, dtype=np.float32):
    zeros = (np.zeros((rows, n, width), dtype) for n, width in ((heads, 8), (2, 8), (2, 12)))
    return layer.decode(*zeros, cache)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, c: a.cache(0, 5), ValueError, "num_texts is 0, wanted >= 1"),
        (lambda a, c: a.cache(2, 2.5), TypeError, "capacity is 2.5, a float; wanted an int"),
        (lambda a, c: a.cache(2**15, 2**16), ValueError, r"num_texts \* capacity is 32768 \* 65536, wanted at most"),
        (lambda a, c: decoded(a, 7), TypeError, "cache is 7, a int; wanted a KVCache; make it with attn.cache"),
        (lambda a, c: decoded(a, c, rows=3), ValueError, r"q has shape \(3, 4, 8\), wanted .* each of the 2 sequences"),
        (lambda a, c: decoded(a, c, rows=0), ValueError, r"q has shape \(0, 4, 8\), wanted .* one or more"),
        (lambda a, c: decoded(a, c, heads=6), ValueError, r"q has shape \(2, 6, 8\), wanted \(2, 4, 8\)"),
        (lambda a, c: decoded(a, c, dtype=np.float64), TypeError, "q is float64, wanted float32"),
        (lambda a, c: decoded(small(np.float64), c, dtype=np.float64), ValueError, "cache was made for dtype float32"),
        (lambda a, c: decoded(small(np.float32, window=(3, 0)), c), ValueError, r"cache was made for window \(-1, 0\)"),
        (lambda a, c: c.fill(*[np.zeros((4, 2, 8), np.float32)] * 2, 3), TypeError, "plan is 3, a int; wanted a Plan"),
        (lambda a, c: filled(a, c, [4]), ValueError, "plan is of 1 sequences on 1 ranks, wanted 2 on one"),
        (lambda a, c: filled(a, c, [4, 6]), ValueError, "sequence 1 has 6 tokens, wanted at most 5, the capacity"),
        (lambda a, c: filled(a, c, [4, 1], width=9), ValueError, r"k has shape \(5, 2, 9\), wanted \(5, 2, 8\)"),
        (lambda a, c: filled(a, c, [4, 1], dtype=np.float16), TypeError, "k is float16, wanted float32"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(call, error, message):
    layer = small(np.float32)
    with pytest.raises(error, match=message):
        call(layer, layer.cache(2, 5))


def filled(layer, cache, lengths, width=8, dtype=np.float32):
    plan = layer.plan(thdattn.PackedBatch.from_lengths(lengths), "contiguous")
    cache.fill(np.zeros((plan.local_rows, 2, width), dtype), np.zeros((plan.local_rows, 2, 12), dtype), plan)


def test_several_ranks_are_refused():
    def program(comm):
        layer = thdattn.CPAttention(comm, 4, 8, engine="reference")
        with pytest.raises(ValueError, match="comm has 2 ranks, wanted 1"):
            layer.cache(1, 1)

    thdattn.comm.run_local(2, program)


def test_a_cache_says_its_sizes_and_reads_no_array():
    assert repr(small(window=(5, 0)).cache(2, 7)) == (
        "<KVCache num_texts=2, capacity=7, num_kv_heads=2, head_dim=8, v_head_dim=12, dtype=float64, window=(5, 0), "
        "engine=reference>"
    )


def test_one_long_text_fills_the_gpu_and_many_or_short_ones_are_not_split_for_nothing():
    tiles = TILES[128, 128].decode
    assert 2 * 132 <= 8 * tiles.splits(132, 8, 2**15) <= tiles.per_multiprocessor * 132, "8 kv heads, one text"
    assert tiles.splits(132, 1000, 2**15) == 1
    assert tiles.splits(132, 1, 2**20) == tiles.max_splits
    assert tiles.splits(132, 1, 256) == 256 // tiles.step, "a window"


def test_caches_on_a_gpu_are_filled_by_lengths_as_they_were_planned(monkeypatch):
    """And not by the caller's arrays, which may have strides, be wrong, or be those of the next pack by now."""
    pytest.importorskip("cupy")
    decode, mixer = (importlib.import_module(f"thdattn.{folder}.cuda.decode") for folder in ("engines", "mamba"))
    launched = []
    fake = SimpleNamespace(kernel=lambda *name: lambda grid, block, args: launched.append(args))
    for module in (decode, mixer):
        monkeypatch.setattr(module, "compiler", fake)
    queries, keys, wrong = np.array([[0, 3, 8], [0, 4, 9]]), np.array([[0, 2, 7], [0, 3, 8]]), np.zeros(1)
    callers = SimpleNamespace(num_seqs=2, cu_seqlens=None, cu_seqlens_padded=None)
    arrays = SimpleNamespace(offsets=np.stack([queries, keys]), lengths=SimpleNamespace(wrong=wrong))
    plan, x = SimpleNamespace(batch=callers, key_batch=callers, arrays=arrays), np.zeros((9, 2, 64), np.float16)
    decode.cache_fill(x, x, plan, SimpleNamespace(k=x, v=x, lengths=None, capacity=4))
    shape = thdattn.Mamba2Mixer(thdattn.comm.init("single"), 8, 64, 64, 1, engine="reference")._shape
    act = SimpleNamespace(channels=None, dt=None, sums=None)
    mixer.mixer_fill(Inputs(x, None, plan, shape), act, None, SimpleNamespace(rows=np.zeros(2), states=np.zeros(2)))
    for args, wanted in zip(launched, (keys, queries, queries), strict=True):
        found = [arg for arg in args if isinstance(arg, np.ndarray) and arg.shape == (3,)]
        assert np.array_equal(found, wanted)
    assert any(arg is wrong for arg in launched[0])
