"""Training runs as a user starts them, on one rank and on two: curves, records, checkpoints and errors."""

from __future__ import annotations

import itertools
import math
import re
from types import SimpleNamespace

import checkpoint
import command_line
import data
import measure
import numpy as np
import pytest
import train
from grid import Grid
from optimizer import AdamW
from programs import (
    NOBODY_INTERRUPTS,
    TRAIN,
    arguments,
    lines_of,
    losses,
    options,
    refused,
    small,
    start,
    trained,
)
from runs import CLOSE
from sizes import SIZES

import thdattn

KEYS = {"step", "loss", "bits_per_byte", "lr", "gradient_norm", "tokens_per_s", "padding", "attention_tflops", "mfu",
        "num_overflows"}


# --- learning --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(documents, tmp_path_factory):
    """Record a run of one process by model size."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        for size in ("tiny", "tiny-hybrid"):
            trained(patch, 1, *small(documents, metrics=folder / size, sharding="contiguous", size=size,
                                     engine="reference", steps=6))
    return folder


@pytest.mark.parametrize(("ranks", "words", "said"), [
    (4, {"cp": 2, "accumulate": 1, "cp_comm_type": "a2a+all_gather", "sharding": "balanced"}, "ranks: 4 in 2 groups"),
    *(pytest.param(2, words, said, marks=pytest.mark.exhaustive) for words, said in (
        ({"sharding": "balanced"}, "ranks: 2, backend 'mpi'"), ({"size": "tiny-hybrid"}, "layers, 1 of them mixers"))),
])
def test_processes_train_the_model_of_one_and_rank_0_alone_reports(
    documents, alone, tmp_path, monkeypatch, ranks, words, said
):
    """Users start them under MPI, whose collectives of two groups run at the same time."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    files = {"metrics": tmp_path / "run.jsonl", "plot": tmp_path / "run.png"}
    process = start(ranks, TRAIN, *small(documents, steps=6, **files, **words))
    assert process.returncode == 0, process.stderr
    assert process.stdout.count(said) == process.stdout.count("steps of 2 x 96 tokens") == 1
    assert "tokens/s, attention" in process.stderr
    picture = (tmp_path / "run.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 15_000
    one, several = lines_of(alone / words.get("size", "tiny")), lines_of(tmp_path / "run.jsonl")
    for name in ("step", "loss", "bits_per_byte", "gradient_norm", "padding", "lr", "validation_bits_per_byte"):
        found, wanted = ([line[name] for line in lines if name in line] for lines in (several, one))
        np.testing.assert_allclose(found, wanted, rtol=CLOSE, err_msg=name)
    for line in (line for line in several if "loss" in line):
        assert line.keys() == KEYS and line.pop("mfu") is None and np.isfinite([*line.values()]).all()
        assert 0 <= line["padding"] < 0.5 and line["tokens_per_s"] > 0 and line["attention_tflops"] > 0
        assert line["bits_per_byte"] > 0.9999 * line["loss"] / math.log(2), "ends cost bits and are no bytes"


def test_window_seed_and_accumulation_reach_the_model(documents, tmp_path, monkeypatch):
    found = []
    for number, option in enumerate([{}, {"window": 3}, {"seed": 1}, {"accumulate": 1}]):
        shared = {"steps": 3, "metrics": tmp_path / f"{number}", "engine": "reference"}
        trained(monkeypatch, 1, *small(documents, **shared | option))
        found.append(losses(tmp_path / f"{number}"))
    for other in found[1:]:
        assert other[1:] != pytest.approx(found[0][1:], rel=1e-4)


def test_learning_rate_rises_and_falls(monkeypatch):
    args = arguments(monkeypatch, "--steps", "100", "--warmup", "10", "--lr", "0.5")
    rates = [train.learning_rate(step, args) for step in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) * 0.05)
    assert max(rates) == rates[9] == rates[10] == 0.5
    assert all(later < rate for rate, later in itertools.pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.5 * 0.55, rel=1e-3)
    assert rates[-1] == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize(
    ("what", "number", "kept"),
    [("the loss", 8, 6), ("the norm of the gradient", 9, 6), ("the validation", 9, 6)],
)
def test_what_is_no_number_ends_the_run_and_keeps_the_checkpoint(documents, tmp_path, monkeypatch, what, number, kept):
    """The next checkpoint would be that of step 9."""
    args = arguments(monkeypatch, "--checkpoint", tmp_path, *small(documents, save_every=3, val_every=3))
    step, optimize = train.Trainer.step, AdamW.step

    def spoiled_step(self, batches, lr, check):
        if what == "the loss" and self.optimizer.state["step"] == number - 1:
            self.model.copy[:] = np.nan
        return step(self, batches, lr, check)

    def spoiled_optimizer(self, gradient, lr):
        here = self.state["step"] == number - 1
        if what == "the norm of the gradient" and here:
            gradient[0] = np.inf
        return optimize(self, gradient, np.inf if what == "the validation" and here else lr)

    monkeypatch.setattr(train.Trainer, "step", spoiled_step)
    monkeypatch.setattr(AdamW, "step", spoiled_optimizer)
    of = f"{what} {'after' if what == 'the validation' else 'of'} step {number} is (nan|inf); lower --lr"
    with pytest.raises(command_line.Failure, match=of):
        train.train(thdattn.comm.init("single"), args, NOBODY_INTERRUPTS)
    saved = checkpoint.load(tmp_path)
    assert saved.step == kept and np.isfinite(saved.weights).all()


# --- going on --------------------------------------------------------------------------------------------------


def test_resuming_with_other_options_is_refused_by_name(documents, tmp_path, monkeypatch):
    folder, other = tmp_path / "run", tmp_path / "other"
    words = ["--checkpoint", folder, *small(documents, steps=2)]
    trained(monkeypatch, 1, *words)
    other.mkdir()
    (other / "1.py").write_text("one = 1\n" * 20)
    changes = [(f"{name} {value}", rf"{name} .*{value} instead of") for name, value in (
        ("--lr", 1.5), ("--seed", 7), ("--tokens", 128), ("--accumulate", 3), ("--window", 9), ("--size", "small"))]
    changes += [("--lr 2 --seed 7", "--lr 2.0 instead of 0.003, --seed 7 instead of 0; pass those"),
                (f"--data {other}", r"--data 2 files, 160 bytes, fingerprint \w+ instead of 30 files")]
    for changed, message in changes:
        (failure,) = refused(monkeypatch, 1, *words, *changed.split(), "--resume")
        assert re.search(rf"in {folder} began with: .*{message}", str(failure)), failure
    with monkeypatch.context() as patch:
        patch.setattr(train, "choose_engine", lambda *_: (SimpleNamespace(name="cuda"), ""))
        (failure,) = refused(monkeypatch, 1, *words, "--resume")
        assert "--engine cuda instead of reference" in str(failure)
    (failure,) = refused(monkeypatch, 1, *words, "--checkpoint", other, "--resume")
    assert f"{other}/checkpoint.npz does not exist, wanted a checkpoint" in str(failure)
    (failure,) = refused(monkeypatch, 1, *words)
    assert re.search(r"holds the checkpoint of another run, .*; pass --resume", str(failure))
    trained(monkeypatch, 1, *words, "--steps", "5", "--resume")
    assert checkpoint.load(folder).step == 5, "more steps are always possible"
    (failure,) = refused(monkeypatch, 1, *words, "--steps", "4", "--resume")
    assert re.search(r"--steps is 4, wanted at least the 5 that the run in .* has", str(failure))
    trained(monkeypatch, 1, *words, "--steps", "5", "--resume")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--steps", "0"], "argument --steps: 0 is no whole number of at least 1; --help lists"),
        (["--lr", "0"], "--lr is 0.0, wanted a finite number above 0; leave it out for 0.003"),
        (["--seed", "-1"], "argument --seed: -1 is no whole number of at least 0; --help lists"),
        (["--tokens", "3000000000"], "argument --tokens: 3000000000 is no whole number of at most 2147483647"),
        (["--size", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_wrong_options_are_named(monkeypatch, words, message):
    with pytest.raises(ValueError, match=message):
        arguments(monkeypatch, *words)


# --- before the first step -------------------------------------------------------------------------------------


def test_errors_are_one_line_of_one_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = start(2, TRAIN, "--data", "missing", timeout=60)
    assert run.returncode == 2
    (line,) = [line for line in run.stderr.splitlines() if "train.py" in line]
    assert line.startswith("train.py: error: --data is missing")
    assert "Traceback" not in run.stderr and "ABORT" not in run.stderr.upper()
    assert not run.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--checkpoint file", r"--checkpoint needs to write file/checkpoint.npz.unfinished, which fails \(File exists"),
        ("--checkpoint file/run", "--checkpoint needs to write file/run/checkpoint.npz.unfinished, which fails"),
        ("--metrics file/run.jsonl", "--metrics needs to write file/run.jsonl, which fails"),
        ("--metrics folder", r"--metrics needs to write folder, which fails \(Is a directory"),
        ("--plot file/run.png", "--plot needs to write file/run.png, which fails"),
        ("--plot run.gif", "--plot is run.gif, wanted a name that ends in one of .png, .pdf, .svg"),
        ("--plot run", "--plot is run, wanted a name that ends in"),
        ("--beside missing", r"--beside is missing, which cannot be read \(No such file or directory\), wanted a file"),
        ("--beside folder", r"--beside is folder, which cannot be read \(Is a directory\), wanted a file"),
        ("--plot run.svg", r'--plot needs Matplotlib; install it with: pip install -e ".*\[examples\]"'),
    ],
)
def test_files_that_cannot_be_written_fail_before_the_first_step(documents, tmp_path, monkeypatch, words, message):
    """Both ranks fail, although only one of them writes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    if words == "--plot run.svg":
        monkeypatch.setattr(command_line.options.importlib.util, "find_spec", lambda name: None)
    failures = refused(monkeypatch, 2, *small(documents), *words.split())
    assert len(failures) == 2
    (said,) = [failure for failure in failures if failure.alone]
    assert re.match(message, str(said))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "precious"


# --- measuring -------------------------------------------------------------------------------------------------


def test_record_of_a_run_that_goes_on_drops_what_will_be_done_again(tmp_path):
    path = tmp_path / "folder" / "run.jsonl"
    record = measure.Record(path, None)
    for step in range(1, 6):
        record.add(step=step, loss=1.0)
    record.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # all that a run has written of it before it was killed
    record = measure.Record(path, 3)
    record.add(step=4, loss=2.0000001)
    record.close()
    assert [(line["step"], line["loss"]) for line in lines_of(path)] == [(1, 1), (2, 1), (3, 1), (4, 2)]
    assert record.lines == lines_of(path)
    assert [file.name for file in path.parent.iterdir()] == ["run.jsonl"]


def test_record_of_another_run_is_refused_and_stays_as_it_was(tmp_path):
    path = tmp_path / "run.jsonl"
    path.touch()
    record = measure.Record(path, None)
    record.add(step=1, loss=1.0)
    record.close()
    with pytest.raises(ValueError, match=r"--metrics is .*run.jsonl, which holds what another run wrote.*--resume"):
        measure.Record(path, None)
    assert [line["step"] for line in lines_of(path)] == [1]
    path.write_text('{"step": 1}\nmilk, eggs\n')
    with pytest.raises(ValueError, match=r"--metrics is .*run.jsonl, whose line 2 is 'milk, eggs', wanted lines that"):
        measure.Record(path, 1)
    assert path.read_text() == '{"step": 1}\nmilk, eggs\n'


def test_other_runs_are_drawn_beside(documents, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(train.measure, "plot", lambda path, lines, title, beside: drawn.append((lines, beside)))
    for number, beside in enumerate(([], ["--beside", tmp_path / "0.jsonl"])):
        files = options(metrics=tmp_path / f"{number}.jsonl", plot=tmp_path / "run.png")
        trained(monkeypatch, 1, *small(documents, steps=2, bar=True), *files, *beside)
    assert "2/2 |" in capsys.readouterr().err, "a bar is drawn, too"
    first, second = (lines_of(tmp_path / f"{number}.jsonl") for number in (0, 1))
    assert drawn == [(first, {}), (second, {"0": first})]
    (failure,) = refused(monkeypatch, 1, *small(documents), "--beside", documents / "1.py")
    assert re.search(r"--beside is .*1\.py, whose line 1 is .*, wanted lines", str(failure))


def test_validation_is_the_oracles_bits_per_byte(documents):
    """The oracle has logits of whole documents and a softmax in float64."""
    trainer = train.Trainer(Grid.of(thdattn.comm.init("single")), SIZES["tiny"], "reference", "contiguous", 0)
    packing = data.Packing.of(2048, 1, "contiguous")
    batches = data.validation_batches(data.find_documents(documents)[:3], packing, 10_000)
    bits = 0.0
    for batch in batches:
        plan = trainer.model.plan(batch.batch, "contiguous")
        tokens, targets = batch.local(plan.sharding.rows(0))
        logits = trainer.model.logits(tokens, plan).astype(np.float64)
        log_sums = np.log(np.exp(logits).sum(axis=1))
        valid = targets >= 0
        bits += (log_sums - logits[np.arange(len(targets)), targets])[valid].sum() / np.log(2)
    assert trainer.bits_per_byte(batches) == pytest.approx(bits / sum(batch.num_bytes for batch in batches), rel=1e-5)
