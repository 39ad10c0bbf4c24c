"""Layers by hand, AdamW, and the model: its gradient, and the same results however documents are laid out."""

from __future__ import annotations

import math
from dataclasses import replace

import layers
import numpy as np
import pytest
from model import Model
from optimizer import AdamW
from sizes import EOD, SIZES, TABLE_ROWS, VOCAB, Config, weight_shapes
from texts import HYBRID, LENGTHS, SMALL, Text, busy_weights, run

import thdattn

TEXT = Text.random(LENGTHS)
FLOAT32 = 2e-5  # of the largest value: sums of a few thousand products in another order
REFERENCE = {"engine": "reference"}


def single(config=SMALL, **options):
    return Model(config, thdattn.comm.init("single"), **REFERENCE, **options)


def outcome(text=TEXT, config=SMALL, cp_size=1, **options):
    """Return loss, gradient and logits with weights of which none is special."""
    sharding = "contiguous" if config == HYBRID else "dual_chunk"
    options = {"weights": busy_weights(config), "sharding": sharding, **REFERENCE, **options}
    return run(text, config, cp_size, **options)


def assert_same(actual, expected, config=SMALL):
    """Compare loss, logits and gradients, whose error is measured by the largest number of the matrix."""
    assert actual.loss == pytest.approx(expected.loss, rel=FLOAT32)
    params = single(config).params
    ends = np.cumsum([x.size for x in params.values()])[:-1]
    pairs = dict(zip(params, zip(*(np.split(x.gradient, ends) for x in (actual, expected)), strict=True), strict=True))
    pairs |= {f"logits of {i}": pair for i, pair in enumerate(zip(actual.logits, expected.logits, strict=True))}
    for name, (x, y) in pairs.items():
        assert x.shape == y.shape
        assert np.abs(x - y).max(initial=0) <= FLOAT32 * np.abs(y).max(initial=0), name
        assert y.any() or not y.size, f"{name} could not fail"


@pytest.mark.parametrize("config", [
    HYBRID, *(replace(SMALL, tied=tied, window=window) for tied in (False, True) for window in (0, 6)),
], ids=["hybrid", "full", "window", "tied-full", "tied-window"])
def test_gradient_is_that_of_finite_differences(config):
    model = single(config, dtype="float64")
    rng = np.random.default_rng(2)
    start = model.weights + 0.2 * rng.standard_normal(model.weights.shape)
    model.weights[...] = start
    model.refresh()
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, 2)
    plan = model.plan(batch)
    data = batch.pack(TEXT.inputs), batch.pack(TEXT.targets), plan, TEXT.num_targets
    model.loss_and_gradient(*data)

    def difference(x, direction):
        losses = []
        for sign in (1, -1):
            x += sign * 1e-5 * direction
            model.refresh()
            losses.append(float(model.loss(*data)))
            model.weights[...] = start
        return (losses[0] - losses[1]) / 2e-5

    for name, x in model.params.items():
        direction = rng.standard_normal(x.shape)
        direction /= np.linalg.norm(direction)
        expected = difference(x, direction)
        assert np.vdot(model.grads[name], direction) == pytest.approx(expected, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("config", [SMALL, HYBRID], ids=["attention", "hybrid"])
def test_packed_documents_give_what_they_give_one_by_one(config):
    alone = [outcome(text, config, num_targets=TEXT.num_targets) for text in TEXT.one_by_one()]
    assert_same(outcome(config=config), replace(
        alone[0], loss=sum(x.loss for x in alone), gradients=[np.sum([x.gradient for x in alone], axis=0)],
        logits=[x.logits[0] for x in alone],
    ), config)


@pytest.mark.parametrize(("config", "options"), [
    (SMALL, {"sharding": "dual_chunk"}), (SMALL, {"sharding": "contiguous"}), (HYBRID, {"cp_comm_type": "a2a"}),
])
def test_what_padding_holds_changes_no_bit(config, options):
    zeros, others = (outcome(config=config, cp_size=2, padding=x, slack=7, **options) for x in (0, 99))
    assert others.loss == zeros.loss
    assert others.gradient.tobytes() == zeros.gradient.tobytes()


def test_loss_is_the_mean_of_minus_log_probabilities():
    found = outcome()
    logits, targets = np.concatenate(found.logits), np.concatenate(TEXT.targets)
    assert logits.shape == (sum(LENGTHS), VOCAB) and logits.dtype == np.float32
    nats = np.logaddexp.reduce(logits.astype(np.float64), axis=1) - logits[np.arange(len(targets)), targets]
    assert found.loss == pytest.approx(nats[targets >= 0].mean(), rel=1e-6)
    assert run(TEXT, **REFERENCE).loss == pytest.approx(math.log(VOCAB), rel=1e-6), "an untrained model knows nothing"


@pytest.mark.parametrize(("config", "last"), [
    (replace(SMALL, window=0), None), (SMALL, None), (HYBRID, None), (replace(SMALL, layers=1), 20 + SMALL.window),
], ids=["full", "window", "hybrid", "windowed layer"])
def test_logits_depend_on_earlier_bytes_of_the_document_alone(config, last):
    """Logits of a single layer with a window depend on the bytes in it."""
    changed = Text([x.copy() for x in TEXT.inputs], TEXT.targets)
    changed.inputs[3][20] ^= 1
    for i, (x, y) in enumerate(zip(outcome(config=config).logits, outcome(changed, config).logits, strict=True)):
        differ = (x != y).any(axis=1)
        assert not differ[: 20 if i == 3 else None].any()
        assert i != 3 or (differ[20:last].all() and (last is None or not differ[last:].any()))


def test_weights_are_the_same_on_every_rank_and_follow_the_seed():
    weights = thdattn.comm.run_local(3, lambda comm: Model(SMALL, comm, seed=5, **REFERENCE).weights.tobytes())
    assert len(set(weights)) == 1
    assert single(seed=5).weights.tobytes() == weights[0] != single(seed=6).weights.tobytes()


def test_rows_of_the_tables_without_a_meaning_stay_zero():
    model = single()
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, 2)
    model.loss_and_gradient(batch.pack(TEXT.inputs), batch.pack(TEXT.targets), model.plan(batch), TEXT.num_targets)
    for name in ("embedding", "head"):
        assert model.params[name].shape[0] == TABLE_ROWS
        assert not model.params[name][VOCAB:].any() and not model.grads[name][VOCAB:].any()


@pytest.mark.parametrize("tied", [False, True])
def test_flops_by_hand(tied):
    config = Config(layers=3, width=16, heads=2, kv_heads=1, head_dim=8, hidden=24, window=2, tied=tied)
    model = single(config)
    batch = thdattn.PackedBatch.from_lengths([3, 1], 4)
    mlp, attention = 3 * 16 * 24, 16 * (2 + 2) * 8 + 2 * 8 * 16
    pairs = {"windowed": 2 * ((1 + 2 + 2) + 1), "full": 1 * ((1 + 2 + 3) + 1)}  # over layers 0 and 2, and layer 1
    of_pairs = sum(pairs.values()) * 2 * 8 * 2 * 7
    assert model.attention_flops(batch) == of_pairs
    assert model.flops(batch) == 6 * (3 * (mlp + attention) + 257 * 16) * 4 + of_pairs

    mixers = {"pattern": "MM*", "mixer_heads": 3, "mixer_head_dim": 8, "mixer_groups": 3, "state_dim": 4}
    model, channels = single(replace(config, window=0, **mixers)), 3 * (8 + 4 + 4)
    mixer = 16 * (3 * 8 + channels + 3) + 4 * channels + 3 * 8 * 16 + 2 * 3 * 8 * 4
    of_pairs = (1 + 2 + 3 + 1) * 2 * 8 * 2 * 7
    assert model.attention_flops(batch) == of_pairs
    assert model.flops(batch) == 6 * (3 * mlp + attention + 2 * mixer + 257 * 16) * 4 + of_pairs


@pytest.mark.parametrize("name", ["tokens", "targets"])
@pytest.mark.parametrize("wrong", [np.zeros(7, np.int32), np.zeros(8, np.int64)], ids=["shape", "dtype"])
def test_wrong_rows_are_refused(name, wrong):
    model = single()
    plan = model.plan(thdattn.PackedBatch.from_lengths([8]))
    rows = {"tokens": np.full(8, EOD, np.int32), "targets": np.zeros(8, np.int32), name: wrong}
    with pytest.raises(ValueError, match=rf"{name} is .*, wanted int32 \(8,\), the rows of this rank; cut them out"):
        model.loss_and_gradient(rows["tokens"], rows["targets"], plan, 8)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_fits_the_kernels(size):
    c = SIZES[size]
    assert c.head_dim in (64, 128) and c.heads % c.kv_heads == 0
    assert c.width % 8 == 0 and c.hidden % 8 == 0 and c.width <= 4096
    if size.endswith("-hybrid"):
        assert 0 < c.num_mixers < c.layers and not c.mixer_heads % c.mixer_groups
        assert c.mixer_head_dim in (64, 128) and c.state_dim in (64, 128, 256) and c.d_inner <= 4096
        found, wanted = (sum(map(math.prod, weight_shapes(SIZES[name]).values()))
                         for name in (size, size.removesuffix("-hybrid")))
        assert found == pytest.approx(wanted, rel=0.01), "a hybrid has the weights of its transformer"


def test_mixers_begin_with_rates_and_steps_of_many_scales():
    params = single(replace(HYBRID, mixer_heads=64)).params
    rates, bias = np.exp(params["0.A_log"]), params["0.dt_bias"]
    assert 1 <= rates.min() < 2 and 14 < rates.max() <= 16
    steps = np.log1p(np.exp(bias))
    assert 0.001 <= steps.min() < 0.002 and 0.05 < steps.max() <= 0.1
    assert (params["2.D"] == 1).all() and not params["2.conv_bias"].any() and params["2.conv_weight"].all()
    assert (params["2.A_log"] != params["0.A_log"]).all()


# --- layers by hand ----------------------------------------------------------------------------------------------


rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape)


def test_residual_norm_by_hand():
    total, y = layers.residual_norm_forward(np.array([[1.0, 5.0]]), np.array([[2.0, -1.0]]), np.array([1.0, 10.0]))
    assert total.tolist() == [[3, 4]]
    np.testing.assert_allclose(y, [[3 / 12.5**0.5, 40 / 12.5**0.5]], rtol=1e-6)  # root of (9 + 16) / 2


def rotation_of(positions, half):
    angles = np.asarray(positions)[:, None] * 100.0 ** -(np.arange(half) / half)
    return np.stack([np.cos(angles), np.sin(angles)])


def test_rope_turns_planes_of_q_and_k_and_leaves_v():
    heads, kv_heads, half = 2, 1, 3
    qkv, positions = normal(4, 4 * 2 * half), np.array([0, 1, 2, 9])
    parts = layers.rope_forward(qkv, rotation_of(positions, half), heads, kv_heads)
    turned = np.exp(1j * positions[:, None] * 100.0 ** -(np.arange(half) / half))[:, None]
    befores = np.split(qkv.reshape(4, 4, -1), [2, 3], axis=1)
    for x, before, turn in zip(parts, befores, (turned, turned, 1), strict=True):
        assert x.flags.c_contiguous
        np.testing.assert_allclose(
            x[..., :half] + 1j * x[..., half:], (before[..., :half] + 1j * before[..., half:]) * turn, atol=1e-12
        )


def test_swiglu_of_large_gates_does_not_overflow():
    gate_up = np.array([[1e4, -1e4, 2.0, 2.0]], np.float32)
    with np.errstate(all="raise"):
        assert layers.swiglu_forward(gate_up).tolist() == [[2e4, 0]]
        assert layers.swiglu_backward(np.ones((1, 2), np.float32), gate_up).tolist() == [[2, 0, 1e4, 0]]


def test_cross_entropy_by_hand():
    logits = np.log([[1.0, 2.0, 5.0, 1e30], [3.0, 1.0, 4.0, 1e30]])
    loss, dlogits = layers.cross_entropy(logits, np.array([2, -1], np.int32), vocabulary=3, num_targets=2)
    assert loss == pytest.approx(np.log(8 / 5) / 2)
    np.testing.assert_allclose(dlogits[0, :3], np.array([1 / 8, 2 / 8, 5 / 8 - 1]) / 2)
    assert not dlogits[0, 3] and not dlogits[1].any(), "columns beyond the vocabulary and rows without a target"


def test_cross_entropy_of_large_logits_does_not_overflow():
    with np.errstate(all="raise", under="ignore"):
        loss, dlogits = layers.cross_entropy(np.array([[1e4, 0.0]], np.float32), np.array([1], np.int32), 2, 1)
    assert loss == 1e4 and dlogits.tolist() == [[1, -1]]


# --- AdamW -------------------------------------------------------------------------------------------------------


def new_model(config=SMALL):
    return Model(config, thdattn.comm.init("single"), engine="reference")


def gradients(model, steps, length):
    """Yield gradients of that length, some entries far larger than others."""
    rng = np.random.default_rng(3)
    for _ in range(steps):
        gradient = rng.standard_normal(model.weights.size) * 10.0 ** rng.integers(-6, 1, model.weights.size)
        yield (gradient * length / np.linalg.norm(gradient)).astype(np.float32)


def adamw(weights, gradients, decays, lr, max_norm):
    """Take steps with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), betas 0.9 and 0.95, in float64.
    """
    weights = weights.astype(np.float64)
    mean = square = np.zeros_like(weights)
    for t, gradient in enumerate(gradients, 1):
        gradient = gradient.astype(np.float64)
        gradient = gradient * min(1, max_norm / np.linalg.norm(gradient))
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        step = mean / (1 - 0.9**t) / (np.sqrt(square / (1 - 0.95**t)) + 1e-8)
        weights = weights - lr * step - lr * 0.1 * decays * weights
    return weights


@pytest.mark.parametrize("length", [0.5, 30.0], ids=["short", "clipped"])
def test_steps_are_those_of_adamw(length):
    model = new_model()
    optimizer = AdamW(model, weight_decay=0.1, max_norm=1.0)
    decays = np.arange(model.weights.size) < model.num_matrix_weights
    expected = adamw(model.weights, gradients(model, 5, length), decays, lr=0.01, max_norm=1.0)
    start = model.weights.copy()
    for gradient in gradients(model, 5, length):
        before = gradient.copy()
        assert float(optimizer.step(gradient, lr=0.01)) == pytest.approx(length, rel=1e-5)
        assert gradient.tobytes() == before.tobytes()
    np.testing.assert_allclose(model.weights - start, expected - start, rtol=1e-4, atol=1e-6)
    assert np.abs(expected - start).max() > 0.02
    assert model.copy.tobytes() == model.weights.tobytes(), "layers see the new weights"


@pytest.mark.parametrize(("config", "matrices"), [
    (SMALL, {"embedding", "head", "qkv", "out", "gate_up", "down"}),
    (HYBRID, {"embedding", "head", "zxbcdt", "conv_weight", "qkv", "out", "gate_up", "down"}),
], ids=["attention", "hybrid"])
def test_only_matrices_decay(config, matrices):
    model = new_model(config)
    model.weights[...] = 2
    AdamW(model, weight_decay=0.5).step(np.zeros_like(model.gradient), lr=0.1)
    for name, x in model.params.items():
        decays = name.rpartition(".")[2] in matrices
        np.testing.assert_allclose(x, 2 * (1 - 0.1 * 0.5) if decays else 2, rtol=1e-6, err_msg=name)
