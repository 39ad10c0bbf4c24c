"""Prompts and answers: the model sees both, and loss and gradient are of the answers alone, over any ranks."""

from __future__ import annotations

import itertools
import json
import math

import data
import numpy as np
import pytest
import runs
from data import EOD, NOT_COUNTED, Packing, Position
from grid import Grid
from model import Model
from passes import WAYS
from programs import (
    TRAIN,
    arguments,
    gpus,
    lines_of,
    losses,
    options,
    refused,
    small,
    start,
    trained,
    validations,
)
from runs import EVERY_WAY, way_id
from texts import SMALL, busy_weights, to_host

import thdattn
from thdattn.graphs import CudaGraphConfig, Graphs

TEXTS = [("2+2=", "4"), ("", "no prompt"), ("no answer", ""), ("ä €:", "żółw"), ("long prompt " * 4, "short"),
         ("short", " long answer" * 4), ("q" * 20, "a" * 20), ("one\n", "two\n")]  # fmt: skip


def written(folder, texts, name="a.jsonl"):
    """Write the texts as a file of lines, and return its folder."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) for prompt, answer in texts]
    (folder / name).write_text("\n".join(lines) + "\n\n")
    return folder


@pytest.fixture
def dialogues(tmp_path):
    return data.find_dialogues(written(tmp_path / "texts", TEXTS))


def packed(documents, packing):
    """Pack all documents into micro-batches, in order."""
    pieces = list(data.pack(data.pieces_of(documents, packing.longest), packing))
    return [data.MicroBatch.of(chosen, packing, Position(0, 0)) for chosen in pieces]


# --- documents ---------------------------------------------------------------------------------------------------


def test_a_dialogue_is_the_bytes_of_both_texts_and_counts_those_of_the_answer(dialogues):
    assert [document.name for document in dialogues] == [f"a.jsonl:{number}" for number in range(1, 9)]
    for document, (prompt, answer) in zip(dialogues, TEXTS, strict=True):
        whole = [EOD, *(prompt + answer).encode(), EOD]
        assert document.tokens(0, len(whole)).tolist() == whole
        assert (document.num_targets, document.first_counted) == (len(whole) - 1, len(prompt.encode()))


def test_targets_worked_by_hand(tmp_path):
    """A document comes in one piece, and in pieces of three targets; EOD is the last target."""
    document, _ = data.find_dialogues(written(tmp_path / "texts", [("abc", "de"), ("", "")]))
    a, b, c, d, e = b"abcde"
    (batch,) = packed([document], Packing(8, 8, 8))
    none = NOT_COUNTED
    assert batch.tokens[:6].tolist() == [EOD, a, b, c, d, e]
    assert batch.targets.tolist() == [none, none, none, d, e, EOD, none, none]
    assert (batch.num_targets, batch.num_bytes, batch.batch.total_tokens) == (3, 2, 6)
    first, second = packed([document], Packing(4, 1, 3))
    assert (first.tokens[:3].tolist(), first.targets.tolist()) == ([EOD, a, b], [none] * 4)
    assert (second.tokens[:3].tolist(), second.targets.tolist()) == ([c, d, e], [d, e, EOD, none])
    assert [(batch.num_targets, batch.num_bytes) for batch in (first, second)] == [(0, 0), (3, 2)]


@pytest.mark.parametrize("longest", [1, 5, 64])
def test_every_target_of_an_answer_counts_exactly_once(dialogues, longest):
    batches = packed(dialogues, Packing(64, 1, longest))
    found = np.concatenate([batch.targets for batch in batches])
    wanted = sorted([*"".join(answer for _, answer in TEXTS).encode(), *[EOD] * len(TEXTS)])
    assert sorted(found[found != NOT_COUNTED].tolist()) == wanted
    assert sum(batch.num_targets for batch in batches) == len(wanted)
    assert sum(batch.num_bytes for batch in batches) == len(wanted) - len(TEXTS)


@pytest.mark.parametrize(("line", "why"), [
    ('["a", "b"]', "it is no object"), ('{"prompt": "a"}', "its keys are 'prompt'"), ("{}", "its keys are none"),
    ('{"prompt": "a", "answer": 3}', "its texts are no strings"), ("prompt", "Expecting value"),
    ('{"prompt": "a", "answer": "\\ud800"}', "surrogates not allowed"), (b"\xff\xff\xff", "can't decode"),
])  # fmt: skip
def test_a_line_that_is_no_dialogue_is_named(tmp_path, line, why):
    folder = written(tmp_path / "texts", TEXTS)
    with (folder / "b.jsonl").open("wb") as file:
        file.write(b"\n" + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=rf'b\.jsonl, line 2, is .*, wanted \{{"prompt": .*{why}.*; mend it, or leave'):
        data.find_dialogues(folder)


def test_a_folder_of_other_files_and_one_that_changes_are_named(tmp_path, dialogues):
    (tmp_path / "a.txt").write_text("text")
    for text in ("changed", "?"):  # cut where a line ended, and a whole line
        folder = written(tmp_path / "texts", [(text, "since")] * 20)
        with pytest.raises(ValueError, match=r"a\.jsonl:1 is .*, wanted a prompt of 4 bytes and an answer of 1 as"):
            dialogues[0].tokens(0, 5)
    (folder / "a.jsonl").unlink()
    with pytest.raises(ValueError, match=r"whose \.jsonl files hold 0 lines, wanted two or more with --mask-prompt"):
        data.find_dialogues(tmp_path)


def test_fingerprint_tells_where_a_prompt_ends(tmp_path):
    prints = {data.fingerprint(data.find_dialogues(written(tmp_path / "texts", [(text[:cut], text[cut:]), ("", "a")])))
              for text in ["same bytes"] for cut in range(4)}  # fmt: skip
    assert len(prints) == 4


# --- loss and gradient -------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def weights():
    return busy_weights(SMALL)


def computed(folder, weights, *, ranks=1, cp_size=None, sharding="dual_chunk"):
    """Return (loss, gradient) of every rank for one step of all texts; and the texts, of which some come twice."""
    documents = data.find_dialogues(folder)
    batches = packed(documents, Packing.of(64, 4, sharding))
    batches += [batches[0]] * (-len(batches) % 4)

    def program(comm):
        grid = Grid.of(comm, cp_size)
        model = Model(SMALL, grid.cp, "reference", dtype="float64", deterministic=True)
        model.weights[...] = weights
        model.refresh()
        passes = WAYS["none"](model, grid, Graphs(comm, CudaGraphConfig()), sharding)
        return float(passes.gradient(batches)[0]), model.gradient.copy()

    found = thdattn.comm.run_local(ranks, program)
    counted = [piece.document for batch in batches for piece in batch.pieces]
    return found, [TEXTS[int(document.name.partition(":")[2]) - 1] for document in counted]


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "texts", TEXTS)


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize(("ranks", "cp_size", "sharding"), [
    (1, 1, "contiguous"), (2, 2, "contiguous"), (2, 1, "dual_chunk"), (4, 2, "dual_chunk")])
def test_loss_and_gradient_are_those_of_answers_alone(folder, weights, ranks, cp_size, sharding):
    """The oracle has logits of each text alone, and differences of that loss along random directions."""
    found, texts = computed(folder, weights, ranks=ranks, cp_size=cp_size, sharding=sharding)
    count = sum(len(answer.encode()) + 1 for _, answer in texts)
    rng, step = np.random.default_rng(0), 1e-5
    directions = rng.standard_normal((3, len(weights)))
    differences = [(oracle_nats(weights + step * d, texts) - oracle_nats(weights - step * d, texts)) / (2 * step)
                   for d in directions] if (ranks, sharding) == (1, "contiguous") else None
    for loss, gradient in found:
        assert loss == pytest.approx(oracle_nats(weights, texts) / count, rel=1e-6)
        if differences:
            np.testing.assert_allclose(directions @ gradient, np.divide(differences, count), rtol=1e-5)
    if ranks > 1:
        ((loss, gradient),), _ = computed(folder, weights, sharding=sharding)
        np.testing.assert_allclose(found[0][1], gradient, rtol=0, atol=1e-9 * np.abs(gradient).max())


# --- graphs and GPUs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_dialogues(tmp_path_factory):
    """Write prompts and answers of many lengths, some longer than a micro-batch."""
    rng = np.random.default_rng(0)
    texts = [("p" * prompt, "a" * answer) for prompt, answer in rng.integers(1, 120, (200, 2))]
    return written(tmp_path_factory.mktemp("texts"), [*texts, ("q" * 2000, "b" * 40)])


@pytest.fixture(scope="module")
def batches(long_dialogues):
    documents, packing = data.find_dialogues(long_dialogues), Packing.of(512, 1, "dual_chunk")
    return list(itertools.islice(data.micro_batches(documents, packing, 0, Position(0, 0)), 40))


@pytest.mark.gpu
@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_every_way_with_graphs_makes_the_bits_without(batches, way):
    found = []
    for graphs in ({}, way):
        made = runs.trainer(thdattn.comm.init("single"), "cuda", **graphs)
        found.append(runs.run(made, batches, batches[:3], 2, 10))
        assert (runs.num_captured(made) > 0) == bool(graphs)
        made.graphs.close()
    assert found[0].results == found[1].results


@pytest.mark.parametrize("way", [{}, *EVERY_WAY], ids=way_id)
@pytest.mark.parametrize(("engine", "ranks", "cp_size"), [
    ("reference", 1, 1), ("reference", 2, 1), pytest.param("cuda", 1, 1, marks=pytest.mark.gpu),
])  # fmt: skip
def test_a_step_of_prompts_alone_has_no_gradient(long_dialogues, engine, ranks, cp_size, way):
    """Pieces of a prompt that is longer than a micro-batch: loss and gradient are exactly 0, and finite."""
    prompts = packed([data.find_dialogues(long_dialogues)[-1]], Packing(512, 16, 512))[:2]
    assert [batch.num_targets for batch in prompts] == [0, 0]

    def program(comm):
        made = runs.trainer(comm, engine, cp_size=cp_size, **way)
        made.model.gradient.fill(np.nan)
        for _ in range(6 if engine == "cuda" else 1):
            assert made.step(prompts, runs.LR).numbers().tolist() == [0, 0]
        assert not to_host(made.model.gradient).any()
        made.graphs.close()

    runs.on_ranks(ranks, program)


@pytest.mark.gpu
def test_loss_and_gradient_on_a_gpu_are_the_cpus(cupy, batches):
    found = {}
    for engine in ("cuda", "reference"):
        made = runs.trainer(thdattn.comm.init("single"), engine)
        loss, norm = made.step(batches[:4], 0.0).numbers()
        found[engine] = loss, norm, to_host(made.model.gradient)
    (loss, norm, gradient), (wanted_loss, wanted_norm, wanted) = found["cuda"], found["reference"]
    assert loss == pytest.approx(wanted_loss, rel=2**-7) and norm == pytest.approx(wanted_norm, rel=2**-6)
    assert gradient @ wanted > (1 - 2**-8) * np.linalg.norm(gradient) * np.linalg.norm(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("cp_size", [1, 2])
def test_two_gpus_train_the_model_of_one(cupy, long_dialogues, tmp_path, cp_size):
    gpus(cupy, 2)
    words = {"data": long_dialogues, "mask_prompt": True, "steps": 40, "val_bytes": 500, "sharding": "dual_chunk"}
    for ranks, more in ((1, {"accumulate": 2}), (2, {"cp": cp_size, "accumulate": cp_size})):
        process = start(ranks, TRAIN, *options(metrics=tmp_path / f"{ranks}", **words, **more), timeout=200)
        assert process.returncode == 0, process.stdout + process.stderr
    two, one = losses(tmp_path / "2"), losses(tmp_path / "1")
    np.testing.assert_allclose(two[:10], one[:10], rtol=2**-6)
    assert np.mean(two[-10:]) == pytest.approx(np.mean(one[-10:]), rel=0.05)


# --- the program -------------------------------------------------------------------------------------------------


def test_one_rank_and_two_train_the_same_model_on_answers(tmp_path, monkeypatch):
    """The model learns answers that follow from prompts, and validates on answers of other prompts."""
    rng = np.random.default_rng(0)
    texts = [(f"{rng.integers(10**6)} ", "yes" if number % 2 else "sey") for number in range(60)]
    folder = written(tmp_path / "texts", texts)
    for ranks in (1, 2):
        metrics = tmp_path / f"{ranks}"
        trained(monkeypatch, ranks, *small(folder, mask_prompt=True, metrics=metrics, sharding="dual_chunk",
                                           engine="reference", steps=20))  # fmt: skip
        assert all(line["padding"] < 0.6 for line in lines_of(metrics) if "loss" in line), "prompts are no padding"
        found = validations(metrics)
        assert found[-1] < 0.5 * found[0] and len(losses(metrics)) == 20
    np.testing.assert_allclose(losses(tmp_path / "1"), losses(tmp_path / "2"), rtol=1e-4)


def test_mask_prompt_wants_a_folder_of_dialogues(documents, monkeypatch):
    with pytest.raises(ValueError, match=r"--mask-prompt needs --data DIR, a folder with \.jsonl files of prompts"):
        arguments(monkeypatch, "--mask-prompt")
    (failure,) = refused(monkeypatch, 1, *small(documents, mask_prompt=True))
    assert "whose .jsonl files hold 0 lines, wanted two" in str(failure)
