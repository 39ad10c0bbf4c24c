"""Decode on the CUDA engine: every head dim, mask and range against float64, and the same bits when captured."""

from __future__ import annotations

import numpy as np
import pytest
from cases import BFLOAT16, to_host
from decoding import Texts, attention, check_rows, decode_all, normal, poison

import thdattn
from thdattn.engines import AttentionOptions
from thdattn.kernels.configs import TILES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

DTYPES = [BFLOAT16, np.dtype(np.float16)]
HEADS = [(4, 4), (8, 2), (12, 1), (20, 1), (32, 1)]  # a thread block takes up to 16 of a group
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 300, 1000, 1999)


def ranges_of(lengths, capacity):
    """A range of every length, one in each text, that ends where the text's capacity does or begins where it begins."""
    begins = [text * capacity + (capacity - length if text % 2 else 0) for text, length in enumerate(lengths)]
    return np.array([(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)], np.int32)


def run_ranges(cupy, layer, capacity, ranges, seed=0):
    """(out, lse), q, k, v of rows over the ranges, NaN in every row of the cache that no range has."""
    from thdattn.engines import cuda

    rng, cache = np.random.default_rng(seed), layer.cache(len(ranges), capacity)
    k, v = (normal(rng, layer.dtype, len(ranges) * capacity, *x.shape[2:]) for x in (cache.k, cache.v))
    q = normal(rng, layer.dtype, len(ranges), layer.num_heads, layer.head_dim)
    read = np.zeros(len(k), bool)
    for begin, end in ranges:
        read[begin:end] = True
    for there, here in ((cache.k, k), (cache.v, v)):
        here = np.where(read[:, None, None], here, layer.dtype.type(np.nan))
        there.set(here.reshape(there.shape))
    options = AttentionOptions(layer.softmax_scale)
    return cuda.attn_decode(cupy.asarray(q), cupy.asarray(ranges), cache, options), q, k, v


@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_dim_over_ranges_of_every_length(cupy, dims, dtype):
    ranges = ranges_of(LENGTHS, 2000)
    check_rows(*run_ranges(cupy, attention((8, 2), dims, dtype), 2000, ranges), ranges)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_layout_of_heads(cupy, heads):
    ranges = ranges_of(LENGTHS, 2000)
    check_rows(*run_ranges(cupy, attention(heads, (64, 64), BFLOAT16), 2000, ranges), ranges)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("length", [1, 65, 4000])
def test_few_texts_are_split_and_put_together(cupy, heads, length):
    """A cache of one text: as many parts as the GPU takes, most of them empty for short texts."""
    ranges = ranges_of((length,), 4000)
    check_rows(*run_ranges(cupy, attention(heads, (128, 128), BFLOAT16), 4000, ranges), ranges)


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_one_text_of_32k(cupy, dims):
    ranges = np.array([[0, 32768]], np.int32)
    check_rows(*run_ranges(cupy, attention((2, 1), dims, BFLOAT16), 32768, ranges), ranges)


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


@pytest.mark.parametrize("mask", [{}, {"window": (200, 0)}, {"window": (0, 0)}], ids=str)
@pytest.mark.parametrize("count", [1, 4])
def test_step_after_step_is_attention_over_whole_texts(cupy, mask, count):
    texts = Texts.random((600, 1, 257, 0, 64), (8, 2), (64, 64), BFLOAT16)
    layer = attention((8, 2), (64, 64), BFLOAT16, **mask)
    out = decode_all(layer, texts, (520, 0, 257, 0, 3), count, cupy)
    verdict = texts.truth(causal=True, **mask).judge("out", out)
    assert verdict.good, str(verdict)


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


def test_the_same_bits_beside_other_work(cupy):
    """Parts are put together in their order, whichever of them is done last."""
    ranges = np.array([[0, 32768]], np.int32)
    layer = attention((8, 2), (128, 128), BFLOAT16)
    (alone, _), *_ = run_ranges(cupy, layer, 32768, ranges)
    other, results = cupy.cuda.Stream(non_blocking=True), []
    matrix = cupy.ones((2048, 2048), np.float32)
    for _ in range(5):
        with other:
            for _ in range(20):
                matrix = cupy.sin(matrix)
        (out, _), *_ = run_ranges(cupy, layer, 32768, ranges)
        results.append(to_host(out).tobytes())
    assert set(results) == {to_host(alone).tobytes()}


@pytest.mark.parametrize("on_device", [False, True, "strided"])
def test_fill_is_that_of_the_numpy_engine(cupy, on_device):
    lengths, rng = [6, 0, 300, 7], np.random.default_rng(0)
    batch = thdattn.PackedBatch.from_lengths(lengths, 8)
    k, v = (batch.pack([normal(rng, BFLOAT16, n, 2, width) for n in lengths], np.nan) for width in (192, 128))
    caches = []
    for engine, xp in (("cuda", cupy), ("reference", np)):
        layer = attention((4, 2), (192, 128), BFLOAT16, engine=engine)
        cache = layer.cache(4, 300)
        for x in (cache.k, cache.v):
            x[...] = xp.asarray(np.full(x.shape, 7, BFLOAT16))
        offsets = [batch.cu_seqlens, batch.cu_seqlens_padded]
        there = on_device and engine == "cuda"
        offsets = xp.asarray(np.stack(offsets, axis=1)).T if on_device == "strided" else map(xp.asarray, offsets)
        plan = layer.plan(thdattn.PackedBatch(*offsets, total_rows=batch.total_rows) if there else batch)
        if there and on_device != "strided":
            plan.batch.cu_seqlens.fill(0)  # of the next pack, which is not planned yet
        cache.fill(xp.asarray(k), xp.asarray(v), plan)
        caches.append([to_host(x) for x in (cache.k, cache.v, cache.lengths)])
    for actual, expected in zip(*caches, strict=True):
        assert actual.tobytes() == expected.tobytes()


def test_lengths_on_the_gpu_that_do_not_fit_are_marked(cupy):
    layer = attention((4, 2), (64, 64), BFLOAT16)
    cache = layer.cache(2, 10)
    offsets = cupy.asarray([0, 12, 20], np.int32)
    x = cupy.asarray(np.ones((20, 2, 64), BFLOAT16))
    cache.fill(x, x, layer.plan(thdattn.PackedBatch(offsets, offsets, total_rows=20), "contiguous"))
    assert cache.lengths.tolist() == [11, 8]
    with pytest.raises(RuntimeError, match=r"sequences \[0\]"):
        cache.check()


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
