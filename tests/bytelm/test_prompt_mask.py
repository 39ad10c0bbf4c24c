"""Prompts and answers: the model sees both, and loss and gradient are of the answers alone, over any ranks."""

from __future__ import annotations

import math

import data
import numpy as np
import pytest
import runs
from data import EOD, Packing, Position
from grid import Grid
from model import Model
from passes import WAYS
from programs import arguments, lines_of, losses, refused, small, trained, validations
from runs import EVERY_WAY, way_id
from texts import DIALOGUES, SMALL, busy_weights, to_host, write_dialogues

import thdattn
from thdattn.graphs import CudaGraphConfig, Graphs


def packed(documents, packing):
    """Pack all documents into micro-batches, in order."""
    pieces = data.pack(data.pieces_of(documents, packing.longest), packing)
    return [data.MicroBatch.of(chosen, packing, Position(0, 0)) for chosen in pieces]


def oracle_nats(weights, texts):
    """Sum the loss in nats over bytes and ends of answers; each text alone, its logits by the model in float64."""
    model = Model(SMALL, thdattn.comm.init("single"), "reference", dtype="float64")
    model.weights[...] = weights
    model.refresh()
    nats = 0.0
    for prompt, answer in texts:
        text = [EOD, *(prompt + answer).encode()]
        batch = thdattn.PackedBatch.from_lengths([len(text)])
        logits = model.logits(np.array(text, np.int32), model.plan(batch, "contiguous"))
        answers = [*answer.encode(), EOD]
        for row, target in zip(logits[len(prompt.encode()) :], answers, strict=True):
            nats += math.log(math.fsum(math.exp(x) for x in row)) - row[target]
    return nats


def computed(folder, weights, ranks, cp_size, sharding):
    """Return (loss, gradient) of every rank for one step of all texts; and the texts, of which some come twice."""
    batches = packed(data.find_dialogues(folder), Packing.of(64, 4, sharding))
    batches += [batches[0]] * (-len(batches) % 4)

    def program(comm):
        grid = Grid.of(comm, cp_size)
        model = Model(SMALL, grid.cp, "reference", dtype="float64", deterministic=True)
        model.weights[...] = weights
        model.refresh()
        passes = WAYS["none"](model, grid, Graphs(comm, CudaGraphConfig()), sharding)
        return float(passes.gradient(batches)[0]), model.gradient.copy()

    counted = [piece.document for batch in batches for piece in batch.pieces]
    texts = [DIALOGUES[int(document.name.partition(":")[2]) - 1] for document in counted]
    return thdattn.comm.run_local(ranks, program), texts


@pytest.mark.usefixtures("poisoned_host")
def test_loss_and_gradient_are_those_of_answers_alone_on_any_ranks(tmp_path):
    """The oracle has logits of each text alone, and differences of that loss along random directions."""
    folder, weights = write_dialogues(tmp_path / "texts", DIALOGUES), busy_weights(SMALL)
    ((loss, gradient),), texts = computed(folder, weights, 1, 1, "contiguous")
    count = sum(len(answer.encode()) + 1 for _, answer in texts)
    assert loss == pytest.approx(oracle_nats(weights, texts) / count, rel=1e-6)
    for direction in 1e-5 * np.random.default_rng(0).standard_normal((3, len(weights))):
        difference = oracle_nats(weights + direction, texts) - oracle_nats(weights - direction, texts)
        assert direction @ gradient == pytest.approx(difference / 2 / count, rel=1e-5)
    for ranks, cp_size, sharding in (2, 2, "contiguous"), (2, 1, "dual_chunk"), (4, 2, "dual_chunk"):
        one, texts = computed(folder, weights, 1, 1, sharding)
        found, others = computed(folder, weights, ranks, cp_size, sharding)
        assert texts == others
        for x, y in zip(found, one * ranks, strict=True):
            assert x[0] == pytest.approx(y[0], rel=1e-6)
            np.testing.assert_allclose(x[1], y[1], rtol=0, atol=1e-9 * np.abs(y[1]).max())


@pytest.mark.parametrize("way", [{}, *EVERY_WAY], ids=way_id)
@pytest.mark.parametrize(("engine", "ranks", "cp_size"), [
    ("reference", 1, 1), ("reference", 2, 1), pytest.param("cuda", 1, 1, marks=pytest.mark.gpu),
])
def test_a_step_of_prompts_alone_has_no_gradient(tmp_path, engine, ranks, cp_size, way):
    """Pieces of a prompt that is longer than a micro-batch: loss and gradient are exactly 0, and finite."""
    folder = write_dialogues(tmp_path / "texts", [("", "a"), ("q" * 2000, "b" * 40)])
    prompts = packed(data.find_dialogues(folder)[1:], Packing(512, 16, 512))[:2]
    assert [batch.num_targets for batch in prompts] == [0, 0]

    def program(comm):
        made = runs.trainer(comm, engine, cp_size=cp_size, **way)
        made.model.gradient.fill(np.nan)
        for _ in range(6 if engine == "cuda" else 1):
            assert made.step(prompts, runs.LR).numbers().tolist() == [0, 0]
        assert not to_host(made.model.gradient).any()
        made.graphs.close()

    runs.on_ranks(ranks, program)


# --- the program -------------------------------------------------------------------------------------------------


def test_one_rank_and_two_train_the_same_model_on_answers(tmp_path, monkeypatch):
    """The model learns answers that follow from prompts, and validates on answers of other prompts."""
    rng = np.random.default_rng(0)
    texts = [(f"{rng.integers(10**6)} ", "yes" if number % 2 else "sey") for number in range(60)]
    folder = write_dialogues(tmp_path / "texts", texts)
    for ranks in (1, 2):
        metrics = tmp_path / f"{ranks}"
        trained(monkeypatch, ranks, *small(folder, mask_prompt=True, metrics=metrics, sharding="dual_chunk",
                                           engine="reference", steps=20))
        assert all(line["padding"] < 0.6 for line in lines_of(metrics) if "loss" in line), "prompts are no padding"
        found = validations(metrics)
        assert found[-1] < 0.5 * found[0] and len(losses(metrics)) == 20
    np.testing.assert_allclose(losses(tmp_path / "1"), losses(tmp_path / "2"), rtol=1e-4)


def test_mask_prompt_wants_a_folder_of_dialogues(documents, monkeypatch):
    with pytest.raises(ValueError, match=r"--mask-prompt needs --data DIR, a folder with \.jsonl files of prompts"):
        arguments(monkeypatch, "--mask-prompt")
    (failure,) = refused(monkeypatch, 1, *small(documents, mask_prompt=True))
    assert "whose .jsonl files hold 0 lines, wanted two" in str(failure)
