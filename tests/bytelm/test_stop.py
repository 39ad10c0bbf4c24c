"""Runs that are asked to end: all ranks leave the same micro-batch, keep the last whole step, and resume from there."""

from __future__ import annotations

import json
from types import SimpleNamespace

import checkpoint
import numpy as np
import pytest
import runs
from interrupt import Stop, Stopped
from model import Model
from programs import MISBEHAVE, NOBODY_INTERRUPTS, lines_of, small, start, trained

import thdattn

CURVE = "loss", "gradient_norm", "validation_bits_per_byte"


def curve(metrics):
    """Return the step and the results of every line."""
    return [(line["step"], [line[name] for name in CURVE if name in line]) for line in lines_of(metrics)]


def same_run(one, other):
    """Compare two checkpoints bit for bit."""
    assert (one.step, one.position, one.validated) == (other.step, other.position, other.validated)
    assert one.weights.tobytes() == other.weights.tobytes()
    assert {name: x.tobytes() for name, x in one.optimizer.items()} == {
        name: x.tobytes() for name, x in other.optimizer.items()}


def begun(output, what):
    """Return how many each rank has begun, as misbehave.py prints it."""
    return [json.loads(line.removeprefix("began "))[what] for line in output.splitlines() if line.startswith("began ")]


# --- the check ---------------------------------------------------------------------------------------------------


def test_the_host_waits_for_the_micro_batch_before_the_last_alone():
    events = []
    clock = SimpleNamespace(mark=lambda: events.append("mark") or len(events), wait=lambda mark: events.append(mark))
    stop = Stop(thdattn.comm.init("single"), NOBODY_INTERRUPTS, clock)
    for _ in range(3):
        stop()
    assert events == ["mark", "mark", 1, "mark", 2, "mark", 4]


@pytest.mark.parametrize(("way", "cp_size"), [
    ({}, 1), ({}, 2), ({"impl": "local"}, 1), ({"impl": "local"}, 2), ({"impl": "full_iteration"}, 2)])
def test_all_ranks_leave_the_same_micro_batch_and_weights_stay(documents, monkeypatch, way, cp_size):
    """One rank is asked to amid the third of eight micro-batches of the second step."""
    batches, counts = runs.batches(documents, 16, cp_size=cp_size), {}
    loss_and_gradient = Model.loss_and_gradient

    def counted(self, *args):
        counts[self] = counts.get(self, 0) + 1
        return loss_and_gradient(self, *args)

    monkeypatch.setattr(Model, "loss_and_gradient", counted)

    def program(comm):
        made = runs.trainer(comm, "reference", cp_size=cp_size, config=runs.MODEL, **way)
        rounds = 8 * cp_size // comm.size
        asked = SimpleNamespace(requested=False)
        stop = Stop(comm, asked, made.clock)

        def check():
            asked.requested = comm.rank == 1 and counts.get(made.model, 0) == rounds + 3
            stop()

        made.step(batches[:8], runs.LR, check)
        before = made.model.weights.copy(), {name: x.copy() for name, x in made.optimizer.state.items()}
        with pytest.raises(Stopped):
            made.step(batches[8:], runs.LR, check)
        np.testing.assert_array_equal(made.model.weights, before[0])
        for name, x in before[1].items():
            np.testing.assert_array_equal(made.optimizer.state[name], x)
        return counts[made.model] - rounds

    assert thdattn.comm.run_local(2, program, timeout=60) == [3, 3]


# --- the program -------------------------------------------------------------------------------------------------


GRIDS = {"1": {}, "2": {"cp": 2}, "2 in groups of 1": {"cp": 1, "accumulate": 2}}


def options_of(documents, folder, grid, **changed):
    """Return options of 6 steps of 4 micro-batches; a validation is due after steps 0, 2, 4 and 6."""
    values = {"steps": 6, "val_every": 2, "save_every": 100, "accumulate": 4, "val_bytes": 400, **GRIDS[grid]}
    return small(documents, checkpoint=folder, metrics=folder / "run.jsonl", engine="reference", **values | changed)


@pytest.mark.parametrize(("grid", "accident", "number", "step", "validated", "micro_batches"), [
    ("1", "amid", 3, 2, True, 2), ("2", "validating", 3, 4, False, 1),
    *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in (
        ("2", "amid", 3, 2, True, 2), ("2", "early", 0, 0, False, 0), ("2 in groups of 1", "amid", 3, 3, True, 0))),
])
def test_a_signal_to_one_process_ends_all_and_the_resumed_run_is_the_uninterrupted_one(
    documents, tmp_path, monkeypatch, capsys, grid, accident, number, step, validated, micro_batches
):
    """The signal comes to the last rank alone; simulated ranks make the other runs."""
    words, whole, ranks = options_of(documents, tmp_path, grid), tmp_path / "whole", int(grid[0])
    run = start(ranks, MISBEHAVE, accident, ranks - 1, number, *words)
    assert run.returncode == 0, run.stderr
    assert f"stopped after step {step}, --resume goes on" in run.stdout
    saved = checkpoint.load(tmp_path)
    assert (saved.step, saved.validated) == (step, validated)
    assert begun(run.stdout, "in validation" if accident == "validating" else "in step") == [micro_batches] * ranks
    metrics = tmp_path / "run.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 4, "loss": 5.1, "bits_pe')  # a killed run leaves such a line
    trained(monkeypatch, ranks, *words, "--resume")
    assert ("going on after step" in capsys.readouterr().out) == (step > 0)
    trained(monkeypatch, ranks, *options_of(documents, whole, grid))
    same_run(checkpoint.load(tmp_path), checkpoint.load(whole))
    assert curve(metrics) == curve(whole / "run.jsonl")
