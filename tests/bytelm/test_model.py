"""The model: its gradient against finite differences, and the same result however the documents are laid out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from model import Model
from sizes import EOD, SIZES, TABLE_ROWS, VOCAB, Config
from texts import HYBRID, LENGTHS, SMALL, Text, busy_weights, run

import thdattn

TEXT = Text.random(LENGTHS)
FLOAT32 = 2e-5  # of the largest value: sums of a few thousand products in another order
REFERENCE = {"engine": "reference"}


def single(config=SMALL, **options):
    return Model(config, thdattn.comm.init("single"), **REFERENCE, **options)


def assert_same(actual, expected):
    """Loss and gradient agree; the error of a gradient is measured by the largest one of its matrix."""
    assert actual.loss == pytest.approx(expected.loss, rel=FLOAT32)
    ends = np.cumsum([x.size for x in single().params.values()])
    pieces = (np.split(outcome.gradient, ends) for outcome in (actual, expected))
    for name, x, y in zip([*single().params, "nothing"], *pieces, strict=True):
        assert x.shape == y.shape
        assert np.abs(x - y).max(initial=0) <= FLOAT32 * np.abs(y).max(initial=0), name
        assert y.any() or name == "nothing"


@pytest.mark.parametrize("config", [
    HYBRID, *(replace(SMALL, tied=tied, window=window) for tied in (False, True) for window in (0, 6)),
], ids=["hybrid", "full", "window", "tied-full", "tied-window"])  # fmt: skip
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


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_ranks_give_the_loss_and_gradient_of_one(cp_size, sharding, window):
    config = replace(SMALL, window=window)
    weights = busy_weights(config)
    one = run(TEXT, config, weights=weights, **REFERENCE)
    several = run(TEXT, config, cp_size, sharding, weights=weights, slack=5, **REFERENCE)
    assert_same(several, one)
    for mine, alone in zip(several.logits, one.logits, strict=True):
        np.testing.assert_allclose(mine, alone, atol=FLOAT32 * np.abs(one.logits[0]).max())
    assert all(gradient.tobytes() == several.gradient.tobytes() for gradient in several.gradients)


def test_packed_documents_give_what_they_give_one_by_one():
    weights = busy_weights(SMALL)
    packed = run(TEXT, weights=weights, **REFERENCE)
    alone = [run(text, num_targets=TEXT.num_targets, weights=weights, **REFERENCE) for text in TEXT.one_by_one()]
    together = replace(
        alone[0], loss=sum(x.loss for x in alone), gradients=[np.sum([x.gradient for x in alone], axis=0)]
    )
    assert_same(packed, together)
    for x, y in zip(packed.logits, [x.logits[0] for x in alone], strict=True):
        np.testing.assert_allclose(x, y, atol=FLOAT32 * np.abs(alone[0].logits[0]).max())


@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
def test_what_padding_holds_changes_no_bit(sharding):
    zeros, others = (
        run(TEXT, cp_size=2, sharding=sharding, padding=padding, slack=7, weights=busy_weights(SMALL), **REFERENCE)
        for padding in (0, 99)
    )
    assert others.loss == zeros.loss
    assert others.gradient.tobytes() == zeros.gradient.tobytes()


def test_masked_targets_do_not_count():
    (document,) = Text.random((20,), masked=0).one_by_one()
    first_half = Text(document.inputs, [np.where(np.arange(20) < 10, document.targets[0], -1).astype(np.int32)])
    cut = Text([document.inputs[0][:10]], [document.targets[0][:10]])
    masked, shorter = (run(text, weights=busy_weights(SMALL), **REFERENCE) for text in (first_half, cut))
    assert first_half.num_targets == 10
    assert masked.loss == pytest.approx(shorter.loss, rel=1e-6)
    np.testing.assert_allclose(masked.gradient, shorter.gradient, atol=FLOAT32 * np.abs(shorter.gradient).max())


def test_text_without_targets_has_neither_loss_nor_gradient():
    text = Text(TEXT.inputs, [np.full_like(target, -1) for target in TEXT.targets])
    outcome = run(text, num_targets=1, weights=busy_weights(SMALL), **REFERENCE)
    assert outcome.loss == 0 and not outcome.gradient.any()


def test_no_tokens_at_all_are_legal():
    outcome = run(Text.random((0, 0)), num_targets=1, **REFERENCE)
    assert outcome.loss == 0 and not outcome.gradient.any()


def test_loss_is_the_mean_of_minus_log_probabilities():
    outcome = run(TEXT, weights=busy_weights(SMALL), **REFERENCE)
    logits, targets = np.concatenate(outcome.logits), np.concatenate(TEXT.targets)
    assert logits.shape == (sum(LENGTHS), VOCAB) and logits.dtype == np.float32
    nats = np.logaddexp.reduce(logits.astype(np.float64), axis=1) - logits[np.arange(len(targets)), targets]
    assert outcome.loss == pytest.approx(nats[targets >= 0].mean(), rel=1e-6)


def test_untrained_model_knows_nothing():
    assert run(TEXT, **REFERENCE).loss == pytest.approx(math.log(VOCAB), rel=1e-6)


@pytest.mark.parametrize("window", [0, 6])
def test_logits_depend_on_earlier_bytes_only(window):
    config = replace(SMALL, window=window)
    changed = Text([x.copy() for x in TEXT.inputs], TEXT.targets)
    changed.inputs[3][20] = (changed.inputs[3][20] + 1) % VOCAB
    before, after = (run(text, config, weights=busy_weights(config), **REFERENCE) for text in (TEXT, changed))
    for i, (x, y) in enumerate(zip(before.logits, after.logits, strict=True)):
        differs = (x != y).any(axis=1)
        assert not differs[: 20 if i == 3 else None].any()
        assert i != 3 or differs[20:].all()


def test_windowed_layers_see_no_further():
    config = replace(SMALL, layers=1)  # layer 0 has the window
    changed = Text([x.copy() for x in TEXT.inputs], TEXT.targets)
    changed.inputs[3][20] = (changed.inputs[3][20] + 1) % VOCAB
    before, after = (run(text, config, weights=busy_weights(config), **REFERENCE) for text in (TEXT, changed))
    (differs,) = np.nonzero((before.logits[3] != after.logits[3]).any(axis=1))
    assert differs.tolist() == list(range(20, 20 + config.window))


def test_gradients_of_micro_batches_add_up():
    model = single()
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, 2)
    data = batch.pack(TEXT.inputs), batch.pack(TEXT.targets), model.plan(batch), TEXT.num_targets
    loss = model.loss_and_gradient(*data)
    assert loss.shape == () and loss.dtype == np.float32
    assert model.loss(*data) == loss
    once = model.gradient.copy()
    model.loss_and_gradient(*data)
    np.testing.assert_allclose(model.gradient, 2 * once, rtol=1e-6)


def test_weights_are_the_same_on_every_rank_and_follow_the_seed():
    weights = thdattn.comm.run_local(3, lambda comm: Model(SMALL, comm, seed=5, **REFERENCE).weights.tobytes())
    assert len(set(weights)) == 1
    assert single(seed=5).weights.tobytes() == weights[0] != single(seed=6).weights.tobytes()


def test_params_and_grads_are_views_that_cover_the_flat_arrays():
    model = single()
    for flat, views in ((model.weights, model.params), (model.gradient, model.grads)):
        flat[...] = np.arange(flat.size)
        assert np.concatenate([x.ravel() for x in views.values()]).tobytes() == flat.tobytes()
    matrices = [x for x in model.params.values() if x.ndim == 2]
    assert model.num_matrix_weights == sum(x.size for x in matrices)
    assert matrices[-1].ravel()[-1] == model.num_matrix_weights - 1, "matrices come first"


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
    layer = 16 * (2 + 2) * 8 + 2 * 8 * 16 + 3 * 16 * 24
    pairs = {"windowed": 2 * ((1 + 2 + 2) + 1), "full": 1 * ((1 + 2 + 3) + 1)}  # over layers 0 and 2, and layer 1
    attention = sum(pairs.values()) * 2 * 8 * 2 * 7
    assert model.attention_flops(batch) == attention
    assert model.flops(batch) == 6 * (3 * layer + 257 * 16) * 4 + attention


def test_plan_shows_what_a_loop_needs():
    batch = thdattn.PackedBatch.from_lengths([3, 0, 5], 4)
    plan = single().plan(batch, "contiguous")
    assert plan.sharding.batch is batch and plan.sharding.strategy == "contiguous" and plan.local_rows == 12
    assert plan.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert plan.valid.tolist() == [True] * 3 + [False] + [True] * 5 + [False] * 3


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
    config = SIZES[size]
    assert config.head_dim in (64, 128) and config.heads % config.kv_heads == 0
    assert config.width % 8 == 0 and config.hidden % 8 == 0 and config.width <= 4096


def test_1b_has_a_billion_weights():
    c = SIZES["1b"]
    layer = c.width * (c.heads + 2 * c.kv_heads) * c.head_dim + c.heads * c.head_dim * c.width + 3 * c.width * c.hidden
    assert 0.9e9 < c.layers * layer < 1.1e9 and 4 <= c.kv_heads <= 8
