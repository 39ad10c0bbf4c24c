"""Decode on each engine: texts that grow in a cache, or in forks of one, are what the forward makes of them."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BFLOAT16, gpu_only, to_host
from decoding import Texts, attend, attention, check_rows, decode_all, normal, poison
from mixer_cases import Case, random_inputs

import thdattn
from thdattn import oracle
from thdattn.engines import AttentionOptions
from thdattn.kernels.configs import TILES

LENGTHS, PROMPTS = (600, 41, 257, 1, 0, 9), (570, 0, 257, 0, 0, 2)
MASKS = ({}, {"window": (5, 0)}, {"window": (0, 0)}, {"window": (200, 0)}, {"causal": False, "window": (7, 0)})
FLOAT64, FLOAT32, FLOAT16 = map(np.dtype, ("float64", "float32", "float16"))


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
@pytest.mark.parametrize(("engine", "dtype"), [
    *(("reference", dtype) for dtype in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)),
    pytest.param("cuda", BFLOAT16, marks=pytest.mark.gpu),
], indirect=["engine"], ids=str)
def test_step_after_step_is_the_forward_over_whole_texts(engine, dtype, mask, count):
    if not mask.get("causal", True) and count > 1:
        pytest.skip("rows of one step would see each other")
    texts = Texts.random(LENGTHS, (8, 2), (64, 64), dtype)
    layer = attention((8, 2), (64, 64), dtype, engine=engine.name, **mask)
    out = decode_all(layer, texts, PROMPTS, count, engine.xp)
    truth = texts.truth(**{"causal": True, **mask})
    if dtype == FLOAT64:
        np.testing.assert_allclose(out, truth.exact.out, rtol=1e-10, atol=1e-12)
    else:
        verdict = truth.judge("out", out)
        assert verdict.good, str(verdict)


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


HEADS = [(4, 4), (8, 2), (12, 1), (20, 1), (32, 1)]  # a thread block takes up to 16 of a group
ROWS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 300, 1000, 1999)
# Heads, head dims, and lengths of ranges in texts of a capacity: one of many texts, and one text, which is split.
RANGES = [
    *(((8, 2), dims, ROWS, 2000) for dims in TILES), *((heads, (64, 64), ROWS, 2000) for heads in HEADS),
    *((heads, (128, 128), (length,), 4000) for heads in HEADS for length in (1, 65, 4000)),
    *(((2, 1), dims, (32768,), 32768) for dims in TILES),
]


def ranges_of(lengths, capacity):
    """A range of every length, one in each text, that ends where the text's capacity does or begins where it begins."""
    begins = [text * capacity + (capacity - length if text % 2 else 0) for text, length in enumerate(lengths)]
    return np.array([(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)], np.int32)


def run_ranges(engine, layer, capacity, ranges):
    """(out, lse), q, k, v of rows over the ranges, NaN in every row of the cache that no range has."""
    rng, cache = np.random.default_rng(0), layer.cache(len(ranges), capacity)
    k, v = (normal(rng, layer.dtype, len(ranges) * capacity, *x.shape[2:]) for x in (cache.k, cache.v))
    q = normal(rng, layer.dtype, len(ranges), layer.num_heads, layer.head_dim)
    read = np.zeros(len(k), bool)
    for begin, end in ranges:
        read[begin:end] = True
    for there, here in ((cache.k, k), (cache.v, v)):
        here = np.where(read[:, None, None], here, layer.dtype.type(np.nan))
        there[...] = engine.xp.asarray(here.reshape(there.shape))
    options = AttentionOptions(layer.softmax_scale)
    decode = importlib.import_module(f"thdattn.engines.{engine.name}").attn_decode
    return decode(engine.xp.asarray(q), engine.xp.asarray(ranges), cache, options), q, k, v


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("heads", "dims", "lengths", "capacity"), RANGES, ids=str)
def test_ranges_of_every_length_and_unread_rows_of_nan(engine, heads, dims, lengths, capacity, dtype):
    ranges = ranges_of(lengths, capacity)
    check_rows(*run_ranges(engine, attention(heads, dims, dtype, engine=engine.name), capacity, ranges), ranges)


def test_check_rows_can_fail():
    rng, ranges = np.random.default_rng(0), np.array([[0, 40], [3, 3]], np.int32)
    q, k, v = (normal(rng, np.float32, n, 2, 8) for n in (2, 40, 40))
    good = attend(q, k, v, ranges, rounding=np.float32)
    check_rows((good.out.astype(np.float32), good.lse), q, k, v, ranges)
    wrong = attend(q, k, v, ranges - [[0, 1], [0, 0]], rounding=np.float32)
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


@pytest.mark.parametrize(("engine", "lengths_on"), [
    ("reference", "host"),
    *(pytest.param("cuda", where, marks=pytest.mark.gpu) for where in ("host", "gpu", "gpu, strided")),
], indirect=["engine"])
def test_fill_replaces_what_texts_had(engine, lengths_on):
    lengths, rng, xp = [6, 0, 300, 7], np.random.default_rng(0), engine.xp
    batch = thdattn.PackedBatch.from_lengths(lengths, 8)
    texts = [[normal(rng, BFLOAT16, n, 2, width) for n in lengths] for width in (192, 128)]
    layer = attention((4, 2), (192, 128), BFLOAT16, engine=engine.name)
    cache = layer.cache(4, 300)
    cache.lengths[...] = xp.asarray([301, 2, 4, 0], np.int32)
    for x in (cache.k, cache.v):
        x[...] = xp.asarray(np.full(x.shape, 7, BFLOAT16))
    offsets = xp.asarray(np.stack([batch.cu_seqlens, batch.cu_seqlens_padded]))
    if "strided" in lengths_on:
        offsets = xp.asarray(np.stack([batch.cu_seqlens, batch.cu_seqlens_padded], axis=1)).T
    there = lengths_on != "host"
    plan = layer.plan(thdattn.PackedBatch(*offsets, total_rows=batch.total_rows) if there else batch)
    if lengths_on == "gpu":
        offsets[0].fill(0)  # of the next pack, which is not planned yet
    cache.fill(*(xp.asarray(batch.pack(side, np.nan)) for side in texts), plan)
    assert cache.lengths.tolist() == lengths
    for x, side in zip((cache.k, cache.v), texts, strict=True):
        for found, text in zip(to_host(x), side, strict=True):
            assert (found[: len(text)] == text).all() and (found[len(text) :] == 7).all()


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
)
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


def test_one_long_text_fills_the_gpu_and_many_or_short_ones_are_not_split_for_nothing():
    tiles = TILES[128, 128].decode
    assert 2 * 132 <= 8 * tiles.splits(132, 8, 2**15) <= tiles.per_multiprocessor * 132, "8 kv heads, one text"
    assert tiles.splits(132, 1000, 2**15) == 1
    assert tiles.splits(132, 1, 2**20) == tiles.max_splits
    assert tiles.splits(132, 1, 256) == 256 // tiles.step, "a window"


# --- on a GPU alone ----------------------------------------------------------------------------------------------


@gpu_only
def test_rows_beyond_2_to_the_31_elements(cupy):
    """The last text of a cache of 5 GB per side: offsets need 64 bits."""
    layer, texts, capacity = attention((8, 8), (128, 128), BFLOAT16), 40, 2**16
    cache = layer.cache(texts, capacity)
    poison(cache.k)
    poison(cache.v)
    rng = np.random.default_rng(0)
    cache.lengths[...] = cupy.asarray([0] * (texts - 1) + [capacity - 1], np.int32)
    cache.k[-1].view(np.uint16).fill(0)
    cache.v[-1].view(np.uint16).fill(0)
    k, v = (normal(rng, BFLOAT16, 1, 8, 128) for _ in range(2))
    rows = (cupy.asarray(np.repeat(x, texts, axis=0)) for x in (k, k, v))
    out = to_host(layer.decode(*rows, cache)).astype(np.float64)
    value = v[0].astype(np.float64)
    assert (out[:-1] == value).all(), "texts of one row"
    weight = np.exp((k[0].astype(np.float64) ** 2).sum(axis=-1) * 128**-0.5)  # about that of all other keys together
    np.testing.assert_allclose(out[-1], value * (weight / (weight + capacity - 1))[:, None], rtol=0.02, atol=1e-3)
    assert (to_host(cache.k[-1, -1]) == k[0]).all() and (to_host(cache.v[-1, -1]) == v[0]).all()


@gpu_only
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_eager_steps_and_replays_of_one_captured_step_give_the_same_bits(cupy, dims):
    layer, rng = attention((8, 2), dims, BFLOAT16), np.random.default_rng(0)
    steps, prompts = 70, [0, 1, 700]
    shapes = [(3, 8, dims[0]), (3, 2, dims[0]), (3, 2, dims[1])]
    rows = [[cupy.asarray(normal(rng, BFLOAT16, *shape)) for shape in shapes] for _ in range(steps)]
    packed = [cupy.asarray(normal(rng, BFLOAT16, sum(prompts), *shape[1:])) for shape in shapes]
    plan = layer.plan(thdattn.PackedBatch.from_lengths(prompts), "contiguous")

    def start():
        cache = layer.cache(len(prompts), 800)
        poison(cache.k)
        poison(cache.v)
        cache.fill(*packed[1:], plan)
        return cache

    cache = start()
    eager = [to_host(layer.decode(*step, cache)) for step in rows]
    again = start()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        inputs = [cupy.empty_like(x) for x in rows[0]]
        cupy.cuda.runtime.deviceSynchronize()
        layer.decode(*rows[0], again)  # kernels are compiled and work buffers made
        again.fill(*packed[1:], plan)
        stream.synchronize()
        stream.begin_capture()
        out = layer.decode(*inputs, again)
        graph = stream.end_capture()
        others = [cupy.full(size, 0xAB, np.uint8) for size in (16, 512, 1024, 2048, 4096, 2**14) for _ in range(16)]
        for step, expected in zip(rows, eager, strict=True):
            for there, here in zip(inputs, step, strict=True):
                there[...] = here
            graph.launch(stream)
            stream.synchronize()
            assert to_host(out).tobytes() == expected.tobytes()
        assert all((to_host(x) == 0xAB).all() for x in others), "a replay wrote to memory that others got since"
    assert to_host(again.lengths).tolist() == to_host(cache.lengths).tolist() == [steps + n for n in prompts]
    assert to_host(again.k).tobytes() == to_host(cache.k).tobytes()


@gpu_only
@pytest.mark.parametrize("engine", ["cuda"], indirect=True)
def test_the_same_bits_beside_other_work(engine, cupy):
    """Parts are put together in their order, whichever of them is done last."""
    ranges = np.array([[0, 32768]], np.int32)
    layer = attention((8, 2), (128, 128), BFLOAT16)
    (alone, _), *_ = run_ranges(engine, layer, 32768, ranges)
    other, results = cupy.cuda.Stream(non_blocking=True), []
    matrix = cupy.ones((2048, 2048), np.float32)
    for _ in range(5):
        with other:
            for _ in range(20):
                matrix = cupy.sin(matrix)
        (out, _), *_ = run_ranges(engine, layer, 32768, ranges)
        results.append(to_host(out).tobytes())
    assert set(results) == {to_host(alone).tobytes()}


@gpu_only
def test_lengths_on_the_gpu_that_do_not_fit_are_marked(cupy):
    layer = attention((4, 2), (64, 64), BFLOAT16)
    cache = layer.cache(2, 10)
    offsets = cupy.asarray([0, 12, 20], np.int32)
    x = cupy.asarray(np.ones((20, 2, 64), BFLOAT16))
    cache.fill(x, x, layer.plan(thdattn.PackedBatch(offsets, offsets, total_rows=20), "contiguous"))
    assert cache.lengths.tolist() == [11, 8]
    with pytest.raises(RuntimeError, match=r"sequences \[0\]"):
        cache.check()


@gpu_only
@pytest.mark.parametrize("offsets", [((0, 9, 5), (0, 9, 5)), ((0, 9, 12), (0, 5, 12)), ((0, 5, 9), (0, 5, 21))])
def test_wrong_lengths_on_the_gpu_fill_no_text(cupy, unnoticed, offsets):
    layer = attention((4, 2), (64, 64), BFLOAT16)
    cache = layer.cache(2, 10)
    x = cupy.asarray(np.ones((20, 2, 64), BFLOAT16))
    q = cupy.asarray(np.ones((2, 4, 64), BFLOAT16))
    plan = layer.plan(thdattn.PackedBatch(*(cupy.asarray(x, np.int32) for x in offsets), total_rows=20), "contiguous")
    cache.fill(x, x, plan)
    assert cache.lengths.tolist() == [11, 11]
    assert not to_host(layer.decode(q, x[:2], x[:2], cache)).astype(np.float32).any()


# --- forks -------------------------------------------------------------------------------------------------------


SOURCES = [0, 0, 1, 0, 2]
FORKED = (30, 7, 0)
FORK_HEADS, WIDTHS = (4, 2, 2), (64, 64, 64)  # of q, k, v


def forked(layer, prompts, xp):
    """A cache of prompts, each a triple of q, k and v."""
    batch = thdattn.PackedBatch.from_lengths([len(q) for q, _, _ in prompts])
    q, k, v = (xp.asarray(np.concatenate(side)) for side in zip(*prompts, strict=True))
    plan, cache = layer.plan(batch, "contiguous"), layer.cache(len(prompts), 40)
    layer.forward(q, k, v, plan)
    cache.fill(k, v, plan)
    return cache


def test_answers_continue_their_prompts(engine):
    rng, dtype = np.random.default_rng(0), np.dtype(np.float16)
    layer = attention((4, 2), (64, 64), dtype, engine=engine.name)
    prompts = [[normal(rng, dtype, n, *shape) for shape in zip(FORK_HEADS, WIDTHS, strict=True)] for n in FORKED]
    cache = forked(layer, prompts, engine.xp)
    fork, same = cache.fork(SOURCES), forked(layer, [prompts[source] for source in SOURCES], engine.xp)
    texts = [[side.copy() for side in prompts[source]] for source in SOURCES]
    for _ in range(4):
        rows = [normal(rng, dtype, len(SOURCES), *shape) for shape in zip(FORK_HEADS, WIDTHS, strict=True)]
        out, wanted = (to_host(layer.decode(*map(engine.xp.asarray, rows), each)) for each in (fork, same))
        assert out.tobytes() == wanted.tobytes()
        for i, text in enumerate(texts):
            text[:] = [np.concatenate([side, new[i : i + 1]]) for side, new in zip(text, rows, strict=True)]
    whole = thdattn.PackedBatch.from_lengths([len(q) for q, _, _ in texts])
    truth = oracle.truth(whole, *map(np.concatenate, zip(*texts, strict=True)))
    last = whole.cu_seqlens[1:] - 1
    verdict = oracle.judge(out, *(getattr(truth, kind).out[last] for kind in ("exact", "plain", "fused")))
    assert verdict.good, str(verdict)
    assert to_host(cache.lengths).tolist() == [*FORKED], "the cache of the prompts stays as it is"
    assert to_host(fork.lengths).tolist() == [FORKED[source] + 4 for source in SOURCES]


def test_a_mixer_s_texts_continue_their_prompts():
    comm, case = thdattn.comm.init("single"), Case("forks", FORKED)
    mixer = case.mixer(comm, FLOAT64)
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    nodes = np.split(zxbcdt, case.batch.cu_seqlens[1:-1])

    def cache_of(prompts):
        batch = thdattn.PackedBatch.from_lengths([len(prompt) for prompt in prompts])
        cache = mixer.cache(len(prompts))
        cache.fill(mixer.forward(np.concatenate(prompts), weights, mixer.plan(batch))[1])
        return cache

    cache = cache_of(nodes)
    cache.active[2] = False
    fork, same = cache.fork(SOURCES), cache_of([nodes[source] for source in SOURCES])
    same.active[4] = False
    for seed in range(3):
        rows = np.random.default_rng(seed).standard_normal((len(SOURCES), zxbcdt.shape[1]))
        out = mixer.decode(rows, weights, fork)
        np.testing.assert_allclose(out, mixer.decode(rows, weights, same), rtol=1e-12)
        assert out[:4].any(axis=1).all() and not out[4].any()


@pytest.mark.parametrize(("sources", "error", "words"), [
    ([], ValueError, r"sources has shape \(0,\), wanted \(number of sequences,\), one or more"),
    ([[0]], ValueError, r"sources has shape \(1, 1\)"),
    ([0, 3], ValueError, r"sources\[1\] is 3, wanted 0 <= sequence < 3, those of the cache"),
    ([-1], ValueError, r"sources\[0\] is -1, wanted 0 <= sequence < 3"),
    ([0.5], TypeError, "sources holds float64 values, wanted ints"),
])
def test_wrong_sources_are_refused_by_name(sources, error, words):
    layer = attention((4, 2), (8, 8), np.float64, engine="reference")
    mixer = Case("forks", FORKED).mixer(thdattn.comm.init("single"), FLOAT64)
    for cache in (layer.cache(3, 10), mixer.cache(3)):
        with pytest.raises(error, match=words):
            cache.fork(sources)


def test_a_fork_numbers_no_more_rows_than_a_cache():
    cache = attention((1, 1), (1, 1), np.float64, engine="reference").cache(1, 2**20)
    with pytest.raises(ValueError, match=r"num_texts \* capacity is 2000 \* 1048576, wanted at most"):
        cache.fork([0] * 2000)
