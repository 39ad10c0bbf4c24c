"""Ranks, groups and methods: however ranks share micro-batches, the same model comes out of the same documents."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing
from dataclasses import replace

import checkpoint
import command_line
import data
import measure
import numpy as np
import pytest
import runs
import train
from data import Packing, Position
from grid import Grid, most_neighbours
from model import Model
from programs import TRAIN, arguments, lines_of, refused, small, start, trained
from runs import CLOSE, MODEL, Layout, Method, differs
from sizes import SIZES, Config
from texts import HYBRID

import thdattn
from thdattn import balance
from thdattn.methods.select import SHARDINGS
from thdattn.plan import key_transfers

A2A, GATHER, RING = (Method(kind, "contiguous") for kind in ("a2a", "all_gather", "p2p"))
LAYOUTS = [
    Layout(2), Layout(4, cp_size=2), Layout(2, cp_size=1), Layout(3, Method("all_gather", "balanced")),
    Layout(4, A2A), Layout(2, Method("p2p", "dual_chunk")), Layout(4, Method("a2a+all_gather", "dual_chunk", 2)),
    Layout(4, Method("a2a+p2p", "dual_chunk", 2)), Layout(4, Method("a2a+all_gather", "balanced", 2), 2),
    *(Layout(*layout, config=HYBRID) for layout in [(2, GATHER), (4, RING), (4, A2A, 2)]),
]  # fmt: skip


# --- one model -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_the_model_of_one_rank(batches, eager, layout):
    """All ranks hold the same bits: losses, norms, validations, gradient, and weights."""
    first, *others = runs.outcome(layout, batches[layout.rule])
    assert all(run.results == first.results for run in others)
    (alone,) = eager(layout.alone)
    found = differs(first, alone, layout.config)
    assert max(found) < CLOSE, found


def test_the_first_step_is_on_the_mean_over_all_targets_of_all_groups(batches):
    """The oracle combines the means of single micro-batches, which have different numbers of targets."""
    some = batches["dual_chunk"][:4]
    model = Model(MODEL, thdattn.comm.init("single"), "reference", deterministic=True)
    means, counts = [], [batch.num_targets for batch in some]
    gradient = np.zeros_like(model.gradient, np.float64)
    for batch, count in zip(some, counts, strict=True):
        plan = model.plan(batch.batch)
        model.gradient.fill(0)
        means.append(float(model.loss_and_gradient(*batch.local(plan.sharding.rows(0)), plan, count)))
        gradient += model.gradient * (count / sum(counts))
    assert len(set(counts)) > 1

    def program(comm):
        trainer = runs.trainer(comm, "reference", cp_size=2, config=MODEL)
        return trainer.step(some, 0.0).numbers()[0], trainer.model.gradient

    for loss, found in thdattn.comm.run_local(4, program):
        assert loss == pytest.approx(np.average(means, weights=counts), rel=1e-6)
        np.testing.assert_allclose(found, gradient, atol=1e-5 * np.abs(gradient).max())


@pytest.mark.parametrize("num_batches", [1, 3, 4, 7])
def test_groups_validate_equally_often_and_count_every_batch_once(batches, monkeypatch, num_batches):
    """Else the ranks of one group would wait at a capture for those of another."""
    calls, some = {}, batches["dual_chunk"][:num_batches]

    def program(comm):
        trainer = runs.trainer(comm, "reference", cp_size=1)
        loss = trainer.passes.loss

        def counted(batches, num_targets):
            calls[comm.rank] = calls.get(comm.rank, 0) + 1
            return loss(batches, num_targets)

        monkeypatch.setattr(trainer.passes, "loss", counted)
        return trainer.bits_per_byte(some)

    wanted = runs.trainer(thdattn.comm.init("single"), "reference").bits_per_byte(some)
    assert thdattn.comm.run_local(3, program) == pytest.approx([wanted] * 3, rel=1e-6)
    assert set(calls.values()) == {-(-num_batches // 3)}


# --- data ------------------------------------------------------------------------------------------------------


def test_groups_are_of_neighbours_and_micro_batches_are_dealt_like_cards():
    def program(comm):
        grid = Grid.of(comm, 2)
        return grid.group, grid.num_groups, grid.cp.rank, grid.cp.size, grid.dealt("abcdef"), str(grid)

    assert thdattn.comm.run_local(6, program) == [
        (rank // 2, 3, rank % 2, 2, ("ad", "be", "cf")[rank // 2], "6 in 3 groups") for rank in range(6)]
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


def test_a_thread_prepares_the_runs_and_needed_rows_of_balanced_batches(documents, monkeypatch):
    threads = []

    def noted(module, name):
        function = getattr(module, name)

        def call(*args):
            threads.append((name, threading.current_thread().name))
            return function(*args)

        monkeypatch.setattr(module, name, call)

    noted(balance, "_runs")
    noted(key_transfers, "_needed_rows")

    def program(comm):
        method, config = Method("all_gather", "balanced"), replace(MODEL, window=5)
        made = runs.trainer(comm, "reference", method=method, config=config)
        coming = data.micro_batches(data.find_documents(documents), Packing(96, 1, 64), 0, Position(0, 0))
        with closing(data.prepared(data.steps(coming, 2, slice(None), made.passes.prepare))) as steps:
            for _ in range(3):
                made.step(next(steps), runs.LR)

    thdattn.comm.run_local(2, program)
    counts = {name: sum(done == name for done, _ in threads) for name in ("_runs", "_needed_rows")}
    masks = 2
    assert counts["_runs"] >= 2 * 3 * 2 and counts["_needed_rows"] == masks * counts["_runs"]
    assert all(thread.startswith("data") for _, thread in threads), threads


# --- the program -----------------------------------------------------------------------------------------------


@pytest.fixture
def same_rate(monkeypatch):
    """Keep the learning rate, which else depends on --steps."""
    monkeypatch.setattr(train, "learning_rate", lambda step, args: 3e-3)


@pytest.mark.usefixtures("same_rate")
def test_a_run_resumes_with_another_method(documents, tmp_path, monkeypatch, capsys):
    """All methods train one model, if documents are padded alike."""
    monkeypatch.setitem(SIZES, "tiny", MODEL)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shared = small(documents, engine="reference", val_bytes=200)
    trained(monkeypatch, 1, *shared, "--checkpoint", whole, "--sharding", "contiguous")
    resumed = [*shared, "--checkpoint", parts]
    trained(monkeypatch, 2, *resumed, "--sharding", "balanced", "--steps", 3)
    for ranks, steps, words in (
        (4, 6, "--cp-comm-type a2a"), (2, 9, "--cp-comm-type p2p --sharding contiguous"),
        (4, 12, "--cp-comm-type a2a+all_gather --cp-inner 2 --sharding balanced"),
    ):  # fmt: skip
        trained(monkeypatch, ranks, *resumed, "--resume", "--steps", steps, *words.split())
    one, other = checkpoint.load(whole), checkpoint.load(parts)
    assert one.position == other.position and one.step == other.step == 12
    begin = runs.to_host(runs.trainer(thdattn.comm.init("single"), "reference", config=MODEL).model.weights)
    assert np.linalg.norm(other.weights - one.weights) < CLOSE * np.linalg.norm(one.weights - begin)
    assert "by a2a+all_gather of 2 neighbours, rows are balanced" in capsys.readouterr().out
    with pytest.raises(command_line.Failure, match=r"padding \(by --sharding and --cp\) to multiples of 16 instead of"):
        trained(monkeypatch, 2, *resumed, "--resume", "--cp-comm-type", "p2p")


@pytest.mark.usefixtures("same_rate")
def test_a_run_resumes_in_another_grid_if_its_steps_stay_the_same(documents, tmp_path, monkeypatch):
    def after(folder, ranks, *words):
        options = small(documents, checkpoint=folder, engine="reference", sharding="dual_chunk", steps=6)
        trained(monkeypatch, ranks, *options, *words)
        return checkpoint.load(folder)

    whole, parts = after(tmp_path / "whole", 1, "--accumulate", 4), tmp_path / "parts"
    after(parts, 4, "--cp", 2, "--accumulate", 2, "--steps", 2)
    after(parts, 2, "--cp", 1, "--accumulate", 2, "--steps", 4, "--resume")
    other = after(parts, 4, "--accumulate", 4, "--resume")
    assert whole.position == other.position and other.step == 6
    assert np.linalg.norm(other.weights - whole.weights) < CLOSE * np.linalg.norm(whole.weights)
    with pytest.raises(command_line.Failure, match=r"--accumulate \(times groups of --cp ranks\) 2 instead of 4; pass"):
        after(parts, 2, "--cp", 1, "--accumulate", 1, "--resume")
    with pytest.raises(command_line.Failure, match=r"--sharding and --cp\) to multiples of 48 instead of to multiples"):
        after(parts, 3, "--accumulate", 4, "--resume")


@pytest.fixture(scope="module")
def alone(documents, tmp_path_factory):
    """Record a run of one process by model size."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        for size in ("tiny", "tiny-hybrid"):
            trained(patch, 1, *small(documents, metrics=folder / size, sharding="contiguous", size=size,
                                     engine="reference", steps=6))  # fmt: skip
    return folder


@pytest.mark.parametrize(("ranks", "words", "said"), [
    (4, {"cp": 2, "accumulate": 1, "cp_comm_type": "a2a+all_gather", "sharding": "balanced"}, "ranks: 4 in 2 groups"),
    *(pytest.param(2, words, said, marks=pytest.mark.exhaustive) for words, said in (
        ({"sharding": "balanced"}, "ranks: 2, backend 'mpi'"), ({"size": "tiny-hybrid"}, "layers, 1 of them mixers"))),
])  # fmt: skip
def test_processes_train_the_model_of_one(documents, alone, tmp_path, monkeypatch, ranks, words, said):
    """Users start them under MPI, whose collectives of two groups run at the same time."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    process = start(ranks, TRAIN, *small(documents, metrics=tmp_path / "run", steps=6, **words))
    assert process.returncode == 0, process.stderr
    assert said in process.stdout and "steps of 2 x 96 tokens" in process.stdout
    one, several = lines_of(alone / words.get("size", "tiny")), lines_of(tmp_path / "run")
    for name in ("loss", "bits_per_byte", "gradient_norm", "padding", "lr", "validation_bits_per_byte"):
        found, wanted = ([line[name] for line in lines if name in line] for lines in (several, one))
        np.testing.assert_allclose(found, wanted, rtol=CLOSE, err_msg=name)


def test_speeds_are_of_a_ranks_own_share(batches, tmp_path, monkeypatch):
    """Tokens and MFU count the work of all groups, the attention that of the rank's own, as its time does."""
    metrics, peak, some = tmp_path / "run.jsonl", 1e12, batches["dual_chunk"][:4]
    args = arguments(monkeypatch, "--metrics", metrics)
    monkeypatch.setattr(measure, "peak_flops", lambda model: peak)

    def program(comm):
        trainer = runs.trainer(comm, "reference", cp_size=2)
        reporter = train.Reporter(trainer, args, None)
        result = trainer.step(some, runs.LR)
        reporter.step(1, result)
        reporter.finish(1, stopped=False)
        own = sum(trainer.model.attention_flops(batch.batch) for batch in some[comm.rank // 2 :: 2])
        seconds = sum(trainer.clock.seconds(*span) for span in result.attention_spans)
        assert 0 < seconds < trainer.clock.seconds(*result.span)
        calls = "gather", "forward", "dq", "dk, dv"
        assert len(result.attention_spans) == len(calls) * SIZES["tiny"].layers * len(some) // 2
        assert trainer.attention_tflops(result) == pytest.approx(own / 2 / seconds / 1e12)
        return trainer.clock.seconds(*result.span), sum(map(trainer.model.flops, result.lengths))

    (seconds, flops), *_ = thdattn.comm.run_local(4, program)
    (line,) = lines_of(metrics)
    num_targets = sum(batch.num_targets for batch in some)
    assert line["tokens_per_s"] == pytest.approx(num_targets / seconds, rel=1e-5)
    assert line["mfu"] == pytest.approx(flops / 4 / seconds / peak, rel=1e-5)
    assert line["padding"] == pytest.approx(1 - num_targets / (256 * len(some)), rel=1e-5)


# --- options ---------------------------------------------------------------------------------------------------


def test_rows_are_spread_as_the_method_takes_them_unless_something_else_is_asked_for(monkeypatch):
    for cp_comm_type, sharding in SHARDINGS.items():
        expected = train.ALL_GATHER_SHARDING if cp_comm_type == "all_gather" else sharding
        assert arguments(monkeypatch, "--cp-comm-type", cp_comm_type).sharding == expected
        graphs = arguments(monkeypatch, "--cp-comm-type", cp_comm_type, "--cuda-graph-impl", "local")
        assert graphs.sharding == sharding != "balanced"
    asked = arguments(monkeypatch, "--cp-comm-type", "p2p", "--sharding", "contiguous")
    assert asked.sharding == "contiguous"
    for words, method in ("", "a2a"), ("--cp-comm-type p2p", "p2p"), ("--cuda-graph-impl local", "a2a"):
        hybrid = arguments(monkeypatch, "--size", "tiny-hybrid", *words.split())
        assert (hybrid.cp_comm_type, hybrid.sharding) == (method, "contiguous"), "mixers need slices of the pack"


@pytest.mark.parametrize(
    ("heads", "cp_size", "most"),
    [((2, 1), 2, 2), ((2, 1), 4, 1), ((8, 4), 4, 4), ((8, 4), 8, 8), ((8, 4), 16, 4), ((28, 4), 6, 2), ((3, 3), 4, 1)],
)
def test_as_many_neighbours_exchange_heads_as_these_allow(heads, cp_size, most):
    """All ranks do, if each head is whole on some; or groups do, if each rank has kv heads of its own."""
    assert most_neighbours(cp_size, Config(1, 8, *heads, 8, 8)) == most


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (2, "--cp-inner 2", "--cp-inner is 2 and --cp-comm-type all_gather, wanted one of two levels with that"),
        (4, "--cp-inner 3 --cp-comm-type a2a+p2p", "--cp-inner is 3, wanted a number that divides the 4 ranks of a g"),
        (4, "--cp-inner 2 --cp-comm-type a2a+p2p", "num_kv_heads is 1 and comm has 2 ranks in its inner groups"),
        (2, "--sharding balanced --cuda-graph-impl local",
         "sharding is 'balanced' and the impl of the CUDA graphs 'local', wanted 'dual_chunk' or 'contiguous'"),
        (1, "--cuda-graph-impl local --cuda-graph-modules mamba", "modules has 'mamba', wanted some of 'attn'"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks_before_the_first_step(documents, monkeypatch, ranks, words, message):
    failures = refused(monkeypatch, ranks, *small(documents), *words.split())
    assert len(failures) == ranks and all(message in str(failure) for failure in failures), failures


@pytest.mark.parametrize("words", [
    "--sharding dual_chunk", "--sharding balanced", "--sharding balanced --cp-comm-type all_gather",
    *(f"--cp-comm-type {method}" for method in SHARDINGS if "+" in method),
])  # fmt: skip
def test_what_does_not_go_with_mixers_is_refused_by_both_names(monkeypatch, words):
    option, found, *_ = words.split()
    with pytest.raises(ValueError, match=rf"{option} is {found.replace('+', '.')} and --size 1b-hybrid, wanted .*leave "
                                         rf"{option} out, or use another --size"):  # fmt: skip
        arguments(monkeypatch, "--size", "1b-hybrid", *words.split())


@pytest.mark.parametrize(
    ("of_rank", "message"),
    [
        (lambda rank: {"cp_size": 3}, "--cp is 3, wanted a number that divides the 4 ranks; pass one of 1, 2, 4"),
        (lambda rank: {"cp_size": 0}, "--cp is 0, wanted a number that divides the 4 ranks"),
        (lambda rank: {"cp_size": 1 + (rank > 0)}, "--cp is not the same on all ranks: rank 0 has 1, but rank 1 has 2"),
        (lambda rank: {"inner": 1 + (rank > 0)}, "--cp-inner is not the same on all ranks: rank 0 has 1, but"),
    ],
)
def test_groups_that_cannot_be_are_an_error_of_all_ranks(of_rank, message):
    def program(comm):
        with pytest.raises(ValueError, match=message):
            Grid.of(comm, **of_rank(comm.rank))

    thdattn.comm.run_local(4, program)


def test_micro_batches_that_cannot_be_dealt_evenly_are_refused(batches):
    def program(comm):
        trainer = runs.trainer(comm, "reference", cp_size=1)
        with pytest.raises(ValueError, match="batches holds 3 micro-batches, wanted a multiple of the 2 groups"):
            trainer.step(batches["dual_chunk"][:3], runs.LR)

    thdattn.comm.run_local(2, program)
