"""Groups of ranks that share micro-batches: whatever the grid, the same model comes out of the same documents."""

from __future__ import annotations

import itertools
from functools import cache

import checkpoint
import command_line
import data
import measure
import numpy as np
import passes
import pytest
import runs
import train
from data import Packing, Position
from grid import Grid
from model import Model
from programs import MISBEHAVE, TRAIN, lines_of, small, start, validations
from sizes import SIZES
from test_train import NOBODY_INTERRUPTS, arguments
from test_train_graphs import EVERY_WAY, way_id

import thdattn
from thdattn.graphs import Captured

GRIDS = [(4, 4), (4, 2), (4, 1), (2, 1)]  # ranks, and those of them that share a micro-batch
STEPS, BATCHES = 6, 4  # micro-batches per step, of all groups
CLOSE = 1e-4  # sums in float32 in another order, over a few steps of AdamW


@pytest.fixture(scope="module")
def batches(documents):
    return runs.batches(documents, STEPS * BATCHES)


def outcome(ranks, cp_size, batches, accumulate=BATCHES, **graphs):
    """The run of every rank."""

    def program(comm):
        made = runs.trainer(comm, "reference", cp_size=cp_size, **graphs)
        return runs.run(made, batches, batches[:3], accumulate, validate_every=2)

    return thdattn.comm.run_local(ranks, program)


@pytest.fixture(scope="module")
def eager(batches):
    """Runs without graphs, by ranks, those that share a micro-batch, and micro-batches per step; each made once."""
    return cache(lambda ranks, cp_size, accumulate=BATCHES: outcome(ranks, cp_size, batches, accumulate))


@pytest.fixture(scope="module")
def alone(eager):
    """The run of a single rank."""
    (run,) = eager(1, 1)
    return run


def differs(run, other, config=SIZES["tiny"]):
    """Relative distances of losses, norms, validations, the last gradient, and what the weights have learnt.

    Not of single weights: AdamW moves one by as much whose gradient is rounding alone.
    """
    start = runs.to_host(runs.trainer(thdattn.comm.init("single"), "reference", config=config).model.weights)

    def parts(x):
        loss, norm = np.transpose(x.numbers)
        weights = np.frombuffer(x.weights, np.float32) - start
        return loss, norm, np.array(x.validations), np.frombuffer(x.gradient, np.float32), weights

    pairs = zip(parts(run), parts(other), strict=True)
    return [float(np.linalg.norm(one - two) / np.linalg.norm(two)) for one, two in pairs]


# --- one model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "cp_size"), GRIDS)
def test_every_grid_trains_the_model_of_one_rank(eager, alone, ranks, cp_size):
    """On all ranks alike, bit for bit."""
    first, *others = eager(ranks, cp_size)
    assert all((run.numbers, run.weights) == (first.numbers, first.weights) for run in others)
    assert max(differs(first, alone)) < CLOSE, differs(first, alone)


def test_the_first_step_is_on_the_mean_over_all_targets_of_all_groups(batches):
    """Put together from the means of each micro-batch alone, which are of different numbers of targets."""
    model = Model(SIZES["tiny"], thdattn.comm.init("single"), "reference", deterministic=True)
    losses, counts = [], [batch.num_targets for batch in batches[:BATCHES]]
    gradient = np.zeros_like(model.gradient, np.float64)
    for batch, count in zip(batches, counts, strict=False):
        plan = model.plan(batch.batch)
        model.gradient.fill(0)
        losses.append(float(model.loss_and_gradient(*batch.local(plan.sharding.rows(0)), plan, count)))
        gradient += model.gradient * (count / sum(counts))
    assert len(set(counts)) > 1

    def program(comm):
        trainer = runs.trainer(comm, "reference", cp_size=2)
        return trainer.step(batches[:BATCHES], 0.0).numbers()[0], trainer.model.gradient

    for loss, found in thdattn.comm.run_local(4, program):
        assert loss == pytest.approx(np.average(losses, weights=counts), rel=1e-6)
        np.testing.assert_allclose(found, gradient, atol=1e-5 * np.abs(gradient).max())


class MeanOfMeans(passes.Eager):
    """The mistake that is easily made: every group divides by its own targets."""

    def gradient(self, batches, check=passes.go_on):
        count = self.grid.num_groups * sum(batch.num_targets for batch in self.grid.dealt(batches))
        return self._gradient(self._inputs(dealt, count) for dealt in self.grid.rounds(batches))


def test_the_mean_of_the_means_of_groups_would_be_seen(batches, alone, monkeypatch):
    monkeypatch.setitem(passes.WAYS, "none", MeanOfMeans)
    found = differs(outcome(4, 2, batches)[0], alone)
    loss, norm, _, gradient, learnt = found
    assert loss > CLOSE and min(norm, gradient, learnt) > 10 * CLOSE, found


def test_a_step_that_groups_share_is_that_of_ranks_that_accumulate(documents, tmp_path, monkeypatch):
    """Of the program: 2 x 2 as 4 x 1 with twice the micro-batches per rank."""
    lines = {}
    for cp_size, accumulate in ((2, 1), (4, 2), (1, 1)):
        metrics = tmp_path / f"{cp_size}"
        args = arguments(monkeypatch, *small(documents, metrics=metrics, accumulate=accumulate, cp=cp_size,
                                             engine="reference"))
        thdattn.comm.run_local(4, lambda comm, args=args: train.train(comm, args, NOBODY_INTERRUPTS))
        lines[cp_size] = lines_of(metrics)
    for name in ("loss", "bits_per_byte", "gradient_norm", "padding", "lr", "validation_bits_per_byte"):
        grouped, together, more = ([line[name] for line in lines[cp_size] if name in line] for cp_size in (2, 4, 1))
        np.testing.assert_allclose(grouped, together, rtol=CLOSE, err_msg=name)
        if name == "loss":
            assert more != pytest.approx(together, rel=CLOSE), "4 groups make steps of twice as much"


# --- graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_every_way_makes_the_same_bits_in_groups(batches, eager, way):
    assert outcome(4, 2, batches, **way) == eager(4, 2)


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_a_batch_of_one_group_that_does_not_fit_has_all_groups_run_eagerly(batches, eager, way):
    documents = [batch.batch.num_seqs for batch in batches]
    room = sorted(documents)[-3]
    first, second = (np.array(documents[group::2]) > room for group in (0, 1))
    assert (first != second).any(), "nothing could go wrong"
    several = outcome(2, 1, batches, accumulate=2, max_packed_seqs=room, **way)  # a step is one round
    for run in several:
        assert run.overflows == np.cumsum(first | second).tolist()
    assert several[0].weights == several[1].weights == eager(2, 1, 2)[0].weights


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_all_ranks_come_to_captures_together(batches, monkeypatch, way):
    """As each capture is a meeting of all ranks: with batches that fit one group alone, in steps and validations."""
    room = sorted(batch.batch.num_seqs for batch in batches)[-3]
    large, few = next((i, j) for i, j in itertools.permutations(range(len(batches)), 2)
                      if batches[i].batch.num_seqs > room >= batches[j].batch.num_seqs)
    held_back = [batches[few], batches[large], batches[few]]
    call, meetings = Captured.__call__, []

    def meets(self, *args, **kwargs):
        self._graphs._comm.barrier()  # which fails where another rank is in another collective, or in none
        meetings.append(self.name)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Captured, "__call__", meets)

    def program(comm):
        made = runs.trainer(comm, "reference", cp_size=1, max_packed_seqs=room, **way)
        return runs.run(made, batches, held_back, accumulate=2)

    thdattn.comm.run_local(2, program, timeout=10)
    assert len(meetings) > 2 * STEPS


@pytest.mark.parametrize("num_batches", [1, 3, 4, 7])
def test_groups_validate_equally_often_and_count_every_batch_once(batches, monkeypatch, num_batches):
    """Or the ranks of one group would wait at a capture for those of another."""
    calls = {}

    def program(comm):
        trainer = runs.trainer(comm, "reference", cp_size=1)
        loss = trainer.passes.loss

        def counted(batches, num_targets):
            calls[comm.rank] = calls.get(comm.rank, 0) + 1
            return loss(batches, num_targets)

        monkeypatch.setattr(trainer.passes, "loss", counted)
        return trainer.bits_per_byte(batches[:num_batches])

    wanted = runs.trainer(thdattn.comm.init("single"), "reference").bits_per_byte(batches[:num_batches])
    assert thdattn.comm.run_local(3, program) == pytest.approx([wanted] * 3, rel=1e-6)
    assert set(calls.values()) == {-(-num_batches // 3)}


# --- data ------------------------------------------------------------------------------------------------------


def test_groups_are_of_neighbours_and_micro_batches_are_dealt_like_cards():
    def program(comm):
        grid = Grid.of(comm, 2)
        return grid.group, grid.num_groups, grid.cp.rank, grid.cp.size, grid.dealt("abcdef"), str(grid)

    assert thdattn.comm.run_local(6, program) == [
        (rank // 2, 3, rank % 2, 2, ("ad", "be", "cf")[rank // 2], "6 in 3 groups") for rank in range(6)]


def test_all_ranks_are_one_group_unless_told_otherwise():
    for cp_size in (None, 3):
        for grid in thdattn.comm.run_local(3, lambda comm, cp_size=cp_size: Grid.of(comm, cp_size)):
            assert grid.cp is grid.world and grid.dealt("abc") == "abc" and str(grid) == "3"


def test_a_rank_reads_the_documents_of_its_group_alone(tmp_path):
    for name in "abcd":
        (tmp_path / name).write_text(8 * name)
    found = data.find_documents(tmp_path)
    batches = list(itertools.islice(data.micro_batches(found, Packing(16, 16, 16), 0, Position(0, 0)), 4))
    others = [batch.pieces[0].document for batch in batches[::2]]
    for document in others:
        document.path.unlink()
    (step,) = data.steps(iter(batches), 4, slice(1, None, 2))
    assert [batch.num_targets for batch in step] == [9] * 4
    assert {chr(batch.targets[0]) for batch in step[1::2]} == set("abcd") - {document.name for document in others}
    with pytest.raises(FileNotFoundError):
        list(data.steps(iter(batches), 4, slice(0, None, 2)))


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cp_size", "message"),
    [
        (lambda rank: 3, "--cp is 3, wanted a number that divides the 4 ranks; pass one of 1, 2, 4, or start another"),
        (lambda rank: 8, "--cp is 8, wanted a number that divides the 4 ranks"),
        (lambda rank: 0, "--cp is 0, wanted a number that divides the 4 ranks"),
        (lambda rank: -2, "--cp is -2, wanted a number that divides the 4 ranks"),
        (lambda rank: 2 if rank else 1, "--cp is not the same on all ranks: rank 0 has 1, but rank 1 has 2"),
    ],
)
def test_groups_that_cannot_be_are_an_error_of_all_ranks(cp_size, message):
    def program(comm):
        with pytest.raises(ValueError, match=message):
            Grid.of(comm, cp_size(comm.rank))

    thdattn.comm.run_local(4, program)


def test_micro_batches_that_cannot_be_dealt_evenly_are_refused(batches):
    def program(comm):
        trainer = runs.trainer(comm, "reference", cp_size=1)
        with pytest.raises(ValueError, match="batches holds 3 micro-batches, wanted a multiple of the 2 groups"):
            trainer.step(batches[:3], runs.LR)

    thdattn.comm.run_local(2, program)


def test_wrong_groups_are_one_line_before_anything_is_done(tmp_path, monkeypatch):
    run = start(2, TRAIN, "--cp", "3", "--data", tmp_path / "missing", timeout=60)
    assert run.returncode == 2 and not run.stdout
    (line,) = [line for line in run.stderr.splitlines() if "train.py" in line]
    assert line.startswith("train.py: error: --cp is 3, wanted")


# --- the program -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpus(monkeypatch):
    """For processes: those of a machine with GPUs would compute in bfloat16, with sums in any order."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_four_processes_in_two_groups_train_the_model_of_one(documents, tmp_path, no_gpus):
    """Under MPI, whose collectives of two groups run at the same time."""
    for ranks, words in ((4, {"cp": 2, "accumulate": 1}), (1, {"accumulate": 2})):
        run = start(ranks, TRAIN, *small(documents, metrics=tmp_path / f"{ranks}", **words))
        assert run.returncode == 0, run.stderr
        assert f"ranks: {'4 in 2 groups' if ranks > 1 else '1'}, backend" in run.stdout
        assert "steps of 2 x 96 tokens" in run.stdout
    grouped, alone = (lines_of(tmp_path / f"{ranks}") for ranks in (4, 1))
    assert len(grouped) == len(alone)
    losses = ([line["loss"] for line in lines if "loss" in line] for lines in (grouped, alone))
    np.testing.assert_allclose(*losses, rtol=CLOSE)
    np.testing.assert_allclose(validations(tmp_path / "4"), validations(tmp_path / "1"), rtol=CLOSE)


def test_interrupted_and_resumed_in_groups_is_bitwise_as_uninterrupted(documents, tmp_path, no_gpus):
    """The interrupt comes to one rank of the last group; all groups stop before the same step."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = {"cp": 2, "accumulate": 1}
    run = start(4, TRAIN, *small(documents, checkpoint=whole, **words))
    assert run.returncode == 0, run.stderr
    run = start(4, MISBEHAVE, "ctrl-c", 3, 3, *small(documents, checkpoint=parts, val_every=7, **words))
    assert run.returncode == 0, run.stderr
    assert "stopped after step 2, --resume goes on" in run.stdout
    run = start(4, TRAIN, *small(documents, checkpoint=parts, val_every=7, **words), "--resume")
    assert run.returncode == 0, run.stderr
    one, other = checkpoint.load(whole), checkpoint.load(parts)
    assert one.step == other.step == 12 and one.position == other.position
    assert one.weights.tobytes() == other.weights.tobytes()


def test_a_run_goes_on_in_another_grid_if_its_steps_stay_the_same(documents, tmp_path, monkeypatch):
    def trained(folder, ranks, *words):
        options = small(documents, checkpoint=folder, engine="reference", sharding="dual_chunk")
        args = arguments(monkeypatch, *options, *words)
        thdattn.comm.run_local(ranks, lambda comm: train.train(comm, args, NOBODY_INTERRUPTS))
        return checkpoint.load(folder)

    monkeypatch.setattr(train, "learning_rate", lambda step, args: 3e-3)  # which else depends on --steps
    whole, parts = trained(tmp_path / "whole", 1, "--accumulate", 4), tmp_path / "parts"
    trained(parts, 4, "--cp", 2, "--accumulate", 2, "--steps", 4)
    trained(parts, 2, "--cp", 1, "--accumulate", 2, "--steps", 8, "--resume")
    other = trained(parts, 4, "--accumulate", 4, "--resume")
    assert whole.position == other.position and other.step == 12
    difference = np.linalg.norm(other.weights - whole.weights)
    assert difference < CLOSE * np.linalg.norm(whole.weights)
    with pytest.raises(command_line.Failure, match=r"--accumulate \(times groups of --cp ranks\) 2 instead of 4; pass"):
        trained(parts, 2, "--cp", 1, "--accumulate", 1, "--resume")
    with pytest.raises(command_line.Failure, match=r"--sharding and --cp\) to multiples of 48 instead of to multiples"):
        trained(parts, 3, "--accumulate", 4, "--resume")


# --- measuring -------------------------------------------------------------------------------------------------


def test_speeds_are_of_a_ranks_own_share(batches, tmp_path, monkeypatch):
    """Tokens and MFU count the work of all groups, the attention that of the rank's own, as its time does."""
    metrics, peak = tmp_path / "run.jsonl", 1e12
    args = arguments(monkeypatch, "--metrics", metrics)
    monkeypatch.setattr(measure, "peak_flops", lambda model: peak)

    def program(comm):
        trainer = runs.trainer(comm, "reference", cp_size=2)
        reporter = train.Reporter(trainer, args, None)
        result = trainer.step(batches[:BATCHES], runs.LR)
        reporter.step(1, result)
        reporter.finish(1, stopped=False)
        own = sum(trainer.model.attention_flops(batch.batch) for batch in batches[:BATCHES][comm.rank // 2 :: 2])
        seconds = sum(trainer.clock.seconds(*span) for span in result.attention_spans)
        calls = "gather", "forward", "dq", "dk, dv"
        assert len(result.attention_spans) == len(calls) * SIZES["tiny"].layers * BATCHES // 2
        assert trainer.attention_tflops(result) == pytest.approx(own / 2 / seconds / 1e12)
        return trainer.clock.seconds(*result.span), sum(map(trainer.model.flops, result.lengths))

    (seconds, flops), *_ = thdattn.comm.run_local(4, program)
    (line,) = lines_of(metrics)
    num_targets = sum(batch.num_targets for batch in batches[:BATCHES])
    assert line["tokens_per_s"] == pytest.approx(num_targets / seconds, rel=1e-5)
    assert line["mfu"] == pytest.approx(flops / 4 / seconds / peak, rel=1e-5)
    assert line["padding"] == pytest.approx(1 - num_targets / (256 * BATCHES), rel=1e-5)
