"""Layers and model on a GPU, in bfloat16, against the NumPy ones in float64 on the same rounded inputs.

All memory that CuPy allocates is NaN at first.
"""

from __future__ import annotations

import sys

import layers
import ml_dtypes
import numpy as np
import pytest
from held import held
from model import Model
from optimizer import AdamW
from parts import Mixer
from sizes import Config
from texts import LENGTHS, Text, busy_weights, run, to_host

import thdattn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# A bfloat16 result is rounded once, by at most half of 2**-8; sums in float32 lose some bits of their largest terms.
RESOLUTION = {"bfloat16": 2.0**-8, "float32": 2.0**-18}
OF_THE_LARGEST = 2.0**-14
ROWS = (0, 1, 37, 3000)  # 3000: blocks that stride come round again

HEADS_OF_64 = Config(layers=3, width=128, heads=4, kv_heads=2, head_dim=64, hidden=192, window=6)
HEADS_OF_128 = Config(layers=2, width=256, heads=2, kv_heads=2, head_dim=128, hidden=320, tied=True)
HYBRID = Config(layers=3, width=128, heads=4, kv_heads=2, head_dim=64, hidden=192, pattern="M*M", mixer_heads=8,
                mixer_groups=2, state_dim=64)
TEXT = Text.random((300, 0, 1, 129, 0, 77, 640))

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def numbers_of_its_own(monkeypatch):
    """Draw the same numbers in a test, whichever tests ran before it in this process."""
    monkeypatch.setattr(sys.modules[__name__], "rng", np.random.default_rng(0))


@pytest.fixture
def poisoned_memory(cupy):
    pool = cupy.get_default_memory_pool()

    def malloc(size):
        memory = pool.malloc(size)
        if size:
            memory.memset_async(0xFF, size)
        return memory

    cupy.cuda.set_allocator(malloc)
    yield
    cupy.cuda.set_allocator(pool.malloc)


@pytest.fixture
def cuda(cupy):
    """Import the layers on the GPU."""
    import layers_cuda

    return layers_cuda


def normal(*shape):
    """Draw numbers: (rounded to bfloat16 for the GPU, the same in float64 for NumPy)."""
    x = rng.standard_normal(shape).astype(BFLOAT16)
    return np.copy(x), x.astype(np.float64)


def assert_close(actual, expected, dtype="bfloat16"):
    assert actual.dtype == dtype and actual.shape == np.shape(expected)
    actual = to_host(actual).astype(np.float64)
    assert np.isfinite(actual).all()
    largest = np.abs(expected).max(initial=0)
    excess = np.abs(actual - expected) - RESOLUTION[dtype] * np.abs(expected) - OF_THE_LARGEST * largest
    assert (excess <= 0).all(), f"{(excess > 0).sum()} of {excess.size} are wrong, the worst by {excess.max()}"


# ---------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "out"), [(8, 264), (128, 40), (2048, 3072)])
def test_linear(cupy, cuda, rows, width, out):
    (x, x64), (weight, weight64), (dy, dy64) = normal(rows, width), normal(out, width), normal(rows, out)
    x, weight, dy = map(cupy.asarray, (x, weight, dy))
    assert_close(cuda.linear_forward(x, weight), layers.linear_forward(x64, weight64))
    assert_close(cuda.linear_forward(x, weight, np.float32), layers.linear_forward(x64, weight64), "float32")
    dweight, dweight64 = cupy.ones((out, width), np.float32), np.ones((out, width))
    dx = cuda.linear_backward(dy, x, weight, dweight)
    assert_close(dx, layers.linear_backward(dy64, x64, weight64, dweight64))
    assert_close(dweight, dweight64, "float32")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [8, 128, 264, 2048, 4096])
@pytest.mark.parametrize("residual", [False, True])
def test_residual_norm(cupy, cuda, rows, width, residual):
    (x, x64), (branch, branch64), (weight, weight64) = normal(rows, width), normal(rows, width), normal(width)
    (dy, dy64), (dsum, dsum64) = normal(rows, width), normal(rows, width)
    x, branch, weight, dy, dsum = map(cupy.asarray, (x, branch, weight, dy, dsum))

    total, y = cuda.residual_norm_forward(x, branch if residual else None, weight)
    assert_close(total, x64 + branch64 if residual else x64)
    total64 = to_host(total).astype(np.float64)  # what is normalised, and kept for the backward, is the rounded sum
    assert_close(y, layers.residual_norm_forward(total64, None, weight64)[1])

    dweight, dweight64 = cupy.ones(width, np.float32), np.ones(width)
    dx = cuda.residual_norm_backward(dy, dsum if residual else None, total, weight, dweight)
    expected = layers.residual_norm_backward(dy64, dsum64 if residual else None, total64, weight64, dweight64)
    assert_close(dx, expected)
    assert_close(dweight, dweight64, "float32")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 64), (16, 4, 128), (2, 2, 96)])
def test_rope(cupy, cuda, rows, heads, kv_heads, head_dim):
    angles = rng.integers(0, 100_000, rows)[:, None] * 1e4 ** -(np.arange(head_dim // 2) / (head_dim // 2))
    rotation64 = np.stack([np.cos(angles), np.sin(angles)])
    rotation = cupy.asarray(rotation64, np.float32)
    qkv, qkv64 = normal(rows, (heads + 2 * kv_heads) * head_dim)
    parts = cuda.rope_forward(cupy.asarray(qkv), rotation, heads, kv_heads)
    for actual, expected in zip(parts, layers.rope_forward(qkv64, rotation64, heads, kv_heads), strict=True):
        assert_close(actual, expected)
    q, k, v = parts
    whole, columns = cupy.asarray(qkv), heads * head_dim
    alone = (*cuda.rope_forward(whole[:, :columns], rotation, heads, 0),
             *cuda.rope_forward(whole[:, columns:], rotation, 0, kv_heads))
    nothing = cupy.empty((rows, 0, head_dim), q.dtype)
    for actual, expected in zip(alone, (q, nothing, nothing, nothing, k, v), strict=True):
        assert actual.shape == expected.shape and to_host(actual).tobytes() == to_host(expected).tobytes()
    grads, grads64 = zip(*(normal(rows, n, head_dim) for n in (heads, kv_heads, kv_heads)), strict=True)
    dqkv = cuda.rope_backward(*map(cupy.asarray, grads), rotation)
    assert_close(dqkv, layers.rope_backward(*grads64, rotation64))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", [8, 384, 5632])
def test_swiglu(cupy, cuda, rows, hidden):
    (gate_up, gate_up64), (dy, dy64) = normal(rows, 2 * hidden), normal(rows, hidden)
    gate_up[: rows // 2] *= BFLOAT16.type(128)  # gates whose exponential overflows
    gate_up64[: rows // 2] *= 128
    gate_up, dy = cupy.asarray(gate_up), cupy.asarray(dy)
    assert_close(cuda.swiglu_forward(gate_up), layers.swiglu_forward(gate_up64))
    assert_close(cuda.swiglu_backward(dy, gate_up), layers.swiglu_backward(dy64, gate_up64))


@pytest.mark.parametrize("rows", ROWS)
def test_embedding(cupy, cuda, rows):
    tokens = rng.integers(0, 257, rows, np.int32)
    (table, table64), (dx, dx64) = normal(264, 192), normal(rows, 192)
    x = cuda.embedding_forward(cupy.asarray(tokens), cupy.asarray(table))
    assert x.dtype == BFLOAT16 and to_host(x).astype(np.float64).tolist() == table64[tokens].tolist()
    dtable, dtable64 = cupy.ones((264, 192), np.float32), np.ones((264, 192))
    cuda.embedding_backward(cupy.asarray(dx), cupy.asarray(tokens), dtable)
    layers.embedding_backward(dx64, tokens, dtable64)
    assert_close(dtable, dtable64, "float32")


@pytest.mark.parametrize("rows", ROWS)
def test_cross_entropy(cupy, cuda, rows):
    logits = (8 * rng.standard_normal((rows, 264))).astype(np.float32)
    targets = rng.integers(-1, 257, rows, np.int32)
    logits[:, 257:] = np.nan
    logits[targets < 0] = np.nan
    num_targets = cupy.asarray(1234, np.float32)
    loss, dlogits = cuda.cross_entropy(cupy.asarray(logits), cupy.asarray(targets), 257, num_targets)
    expected, dlogits64 = layers.cross_entropy(logits.astype(np.float64), targets, 257, 1234)
    assert loss.shape == ()
    assert_close(loss, expected, "float32")
    assert_close(dlogits, dlogits64)
    dlogits = to_host(dlogits)
    assert not dlogits[targets < 0].any() and not dlogits[:, 257:].any()


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 37])
@pytest.mark.parametrize("width", [8, 96, 264, 2048, 5632])
def test_layers_of_decode(cupy, cuda, rows, width):
    heads, kv_heads, half, capacity = 3, 2, 32, 50
    (x, x64), (gain, gain64), (residual, residual64) = normal(rows, width), normal(width), normal(rows, 40)
    x, gain, residual = map(cupy.asarray, (x, gain, residual))
    weights = [normal(out, width) for out in ((heads + 2 * kv_heads) * 2 * half, 40, 2 * 40, 264)]
    (qkv, linear, gate_up, head), (qkv64, linear64, gate_up64, head64) = zip(*weights, strict=True)
    rotation = rng.standard_normal((2, capacity, half)).astype(np.float32)
    positions = rng.integers(0, capacity + 2, rows, np.int32)
    turn = cupy.asarray(rotation), cupy.asarray(positions), heads, kv_heads
    expected = layers.decode_qkv(x64, gain64, qkv64, rotation.astype(np.float64), positions, heads, kv_heads)
    for actual, wanted in zip(cuda.decode_qkv(x, gain, cupy.asarray(qkv), *turn), expected, strict=True):
        assert_close(actual, wanted)
    assert_close(cuda.decode_product(x, gain, cupy.asarray(linear)), layers.decode_product(x64, gain64, linear64))
    for normal_by, normal_by64 in ((None, None), (gain, gain64)):
        assert_close(cuda.decode_linear(x, cupy.asarray(linear), residual, normal_by),
                     layers.decode_linear(x64, linear64, residual64, normal_by64))
    assert_close(cuda.decode_swiglu(x, gain, cupy.asarray(gate_up)), layers.decode_swiglu(x64, gain64, gate_up64))
    assert_close(cuda.decode_logits(x, gain, cupy.asarray(head)), layers.decode_logits(x64, gain64, head64), "float32")


@pytest.mark.parametrize(("top_k", "temperature"), [(257, 0.7), (257, 2.0), (5, 1.0), (1, 1.0)])
@pytest.mark.parametrize("num_texts", [1, 40])
def test_draw(cupy, cuda, num_texts, top_k, temperature):
    capacity, end = 50, 256
    logits = (4 * rng.standard_normal((num_texts, 264))).astype(np.float32)
    logits[:, 257:] = np.nan
    logits[:, 7] = logits[:, 3] = logits[:, :257].max(axis=1)  # of equal ones the first
    logits[:, 256] = 2  # texts end now and then
    uniforms = rng.integers(2**32, size=(num_texts, capacity), dtype=np.uint32)
    uniforms[:, 0], uniforms[:, -1] = 0, 2**32 - 1
    there, here = (
        [xp.zeros(num_texts, np.int32), xp.full((num_texts, capacity), -1, np.int32), xp.zeros(num_texts, np.int32)]
        for xp in (cupy, np)
    )
    for _ in range(capacity):
        cuda.draw(*there, cupy.asarray(logits), cupy.asarray(uniforms), 257, end, top_k, temperature)
        layers.draw(*here, logits, uniforms, 257, end, top_k, temperature)
    cuda.draw(*there, cupy.asarray(logits), cupy.asarray(uniforms), 257, end, top_k, temperature)  # beyond the capacity
    assert to_host(there[2]).tolist() == here[2].tolist() == [capacity] * num_texts
    actual, expected = to_host(there[1]), here[1]
    # The two exponentials may differ in the last place, and so a draw that is as near to the border of a token.
    same = (actual == expected).all(axis=1).mean()
    assert same == 1 if num_texts == 1 else same >= 0.9
    assert (actual[:, 1:][actual[:, :-1] == end] == end).all()
    assert (to_host(there[0]) == actual[:, -1]).all()


@pytest.mark.parametrize("size", [1, 1000, 3_000_001])
def test_l2_norm(cupy, cuda, size):
    x = rng.standard_normal(size, np.float32)
    assert_close(cuda.l2_norm(cupy.asarray(x)), np.linalg.norm(x.astype(np.float64)), "float32")


@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["clipped", "whole"])
def test_adamw_update(cupy, cuda, max_norm):
    size = 5001
    flat = [rng.standard_normal(size, np.float32) for _ in range(3)] + [rng.random(size, np.float32)]
    weights64, gradient64, mean64, square64 = (x.astype(np.float64) for x in flat)
    weights, gradient, mean, square = map(cupy.asarray, flat)
    norm = np.linalg.norm(gradient64)
    step = layers.AdamWStep(0.9, 0.95, 0.01, 1.7, 1e-8, 0.99, max_norm)
    copy = cupy.empty(size, BFLOAT16)
    cuda.adamw_update(weights, copy, gradient, mean, square, cupy.asarray(norm, np.float32), step)
    layers.adamw_update(weights64, np.empty(size), gradient64, mean64, square64, norm, step)
    for actual, expected in ((weights, weights64), (mean, mean64), (square, square64)):
        assert_close(actual, expected, "float32")
    assert to_host(copy).tobytes() == to_host(weights).astype(BFLOAT16).tobytes()


# ---------------------------------------------------------------------------------------------------- model


class RoundingLayers:
    """The NumPy layers with every activation rounded to bfloat16: what plain bfloat16 maths loses."""

    xp = np

    def __getattr__(self, name):
        function = getattr(layers, name)

        def rounding(*args):
            result = function(*args)
            logits = name == "linear_forward" and len(args) == 3  # these stay float32
            return result if logits else rounded(result)

        return rounding


def rounded(x):
    if isinstance(x, tuple):
        return tuple(map(rounded, x))
    return x.astype(BFLOAT16).astype(x.dtype) if x is not None and x.ndim else x


class RoundingMixer:
    """A mixer of the NumPy engine in bfloat16, between layers in float32 of rounded numbers."""

    def __init__(self, model):
        c = model.config
        sizes = c.mixer_heads, c.mixer_head_dim, c.state_dim, c.mixer_groups
        self._mixer = thdattn.Mamba2Mixer(model.comm, *sizes, dtype=BFLOAT16, engine="reference")

    def forward(self, zxbcdt, weights, plan):
        out, saved = self._mixer.forward(zxbcdt.astype(BFLOAT16), weights, plan)
        return out.astype(np.float32), saved

    def backward(self, dout, saved):
        dzxbcdt, dweights = self._mixer.backward(dout.astype(BFLOAT16), saved)
        return dzxbcdt.astype(np.float32), dweights


def round_everything(model):
    model.layers = RoundingLayers()
    model.copy[...] = rounded(model.copy)
    for part, _ in model._stack:
        if isinstance(part, Mixer):
            part._mixer = RoundingMixer(model)


def distance(x, y):
    return float(np.linalg.norm(np.asarray(x, np.float64) - y))


def errors_to_judge(names, gradients, logits):
    """Yield (name, ours, plain, truth) of what is judged by its RMS error; gradients and logits: of ours, plain and
    truth.

    Gradients come by parameter. Those of few numbers are judged together, each divided by its size, as errors of 8
    numbers differ by more than a factor of two now and then.
    """
    few = []
    for name, *parts in zip(names, *gradients, strict=True):
        if parts[0].size < 100:
            few.append([x / np.linalg.norm(parts[-1]) for x in parts])
        else:
            yield name, *parts
    if few:
        yield "parameters of few numbers", *map(np.concatenate, zip(*few, strict=True))
    yield "logits", *logits


WAYS_OF_RANKS = [(1, "dual_chunk"), (2, "dual_chunk"), (4, "dual_chunk"), (4, "contiguous")]


@pytest.mark.parametrize(("config", "ways"), [
    (HEADS_OF_64, WAYS_OF_RANKS), (HEADS_OF_128, WAYS_OF_RANKS), (HYBRID, [(n, "contiguous") for n in (1, 2, 4)]),
], ids=["64", "128", "hybrid"])
def test_model_errs_no_more_than_twice_as_much_as_plain_bfloat16(config, ways):
    weights = busy_weights(config)
    truth = run(TEXT, config, weights=weights, engine="reference", dtype="float64")
    plain = run(TEXT, config, weights=weights, engine="reference", prepare=round_everything)
    shapes = Model(config, thdattn.comm.init("single"), engine="reference").params
    ends = np.cumsum([x.size for x in shapes.values()])[:-1]
    for cp_size, sharding in ways:
        actual = run(TEXT, config, cp_size, sharding, weights=weights, engine="cuda", padding=99, slack=5)
        where = f"{cp_size} ranks, {sharding}"
        assert actual.loss == pytest.approx(truth.loss, rel=2.0**-9), where
        assert all(gradient.tobytes() == actual.gradient.tobytes() for gradient in actual.gradients), where
        results = actual, plain, truth
        gradients, logits = [np.split(x.gradient, ends) for x in results], [np.concatenate(x.logits) for x in results]
        for name, a, p, t in errors_to_judge(shapes, gradients, logits):
            assert np.isfinite(a).all(), f"{name}, {where}"
            floor = 2.0**-9 * np.linalg.norm(t)  # the rounding of a result, which cannot be avoided
            assert distance(a, t) <= 2 * distance(p, t) + floor, f"{name}, {where}"
            assert np.linalg.norm(t) > 0 and distance(p, t) < 0.2 * np.linalg.norm(t), f"{name} could not fail"


def test_a_step_waits_for_nothing(cupy):
    batch, text = thdattn.PackedBatch.from_lengths(LENGTHS, 2), Text.random(LENGTHS)
    model = Model(HEADS_OF_64, thdattn.comm.init("single"), engine="cuda")
    optimizer = AdamW(model)
    data = [cupy.asarray(batch.pack(x)) for x in (text.inputs, text.targets)]
    plan = model.plan(batch)

    def step():
        model.gradient.fill(0)
        model.loss_and_gradient(*data, plan, text.num_targets)
        model.comm.all_reduce(model.gradient, "sum")
        optimizer.step(model.gradient, lr=3e-3)

    with cupy.cuda.Stream(non_blocking=True):
        step()  # kernels are compiled and memory is found
        step()
        assert held(cupy, step), "the step came back only when the GPU was let go"
