"""Ranks, groups and methods: however ranks share micro-batches, the same model comes out of the same documents."""

from __future__ import annotations

import checkpoint
import command_line
import measure
import numpy as np
import pytest
import runs
import train
from grid import Grid, most_neighbours
from programs import arguments, lines_of, refused, small, trained
from runs import CLOSE, MODEL, Layout, Method, differs
from sizes import SIZES, Config
from texts import HYBRID

import thdattn
from thdattn.methods.select import SHARDINGS

A2A, GATHER, RING = (Method(kind, "contiguous") for kind in ("a2a", "all_gather", "p2p"))
LAYOUTS = [
    Layout(4, cp_size=2), Layout(3, Method("all_gather", "balanced")), Layout(4, A2A),
    Layout(4, Method("a2a+p2p", "dual_chunk", 2)), Layout(4, RING, config=HYBRID), Layout(4, A2A, 2, HYBRID),
]
MORE_LAYOUTS = [
    Layout(2), Layout(2, cp_size=1), Layout(2, Method("p2p", "dual_chunk")), Layout(2, GATHER, config=HYBRID),
    Layout(4, Method("a2a+all_gather", "dual_chunk", 2)), Layout(4, Method("a2a+all_gather", "balanced", 2), 2),
]


# --- one model -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize("layout", [
    *LAYOUTS, *(pytest.param(layout, marks=pytest.mark.exhaustive) for layout in MORE_LAYOUTS)], ids=str)
def test_every_layout_trains_the_model_of_one_rank(batches, eager, layout):
    """All ranks hold the same bits: losses, norms, validations, gradient, and weights."""
    first, *others = runs.outcome(layout, batches(layout.rule))
    assert all(run.results == first.results for run in others)
    (alone,) = eager(layout.alone)
    found = differs(first, alone, layout.config)
    assert max(found) < CLOSE, found


@pytest.mark.parametrize("num_batches", [1, 3, 4, 7])
def test_groups_validate_equally_often_and_count_every_batch_once(batches, monkeypatch, num_batches):
    """Else the ranks of one group would wait at a capture for those of another."""
    calls, some = {}, batches("dual_chunk")[:num_batches]

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
        with pytest.raises(ValueError, match="batches holds 4 micro-batches, wanted a multiple of the 3 groups"):
            grid.rounds("abcd")
        return grid.group, grid.num_groups, grid.cp.rank, grid.cp.size, grid.dealt("abcdef"), str(grid)

    assert thdattn.comm.run_local(6, program) == [
        (rank // 2, 3, rank % 2, 2, ("ad", "be", "cf")[rank // 2], "6 in 3 groups") for rank in range(6)]
    for cp_size in (None, 3):
        for grid in thdattn.comm.run_local(3, lambda comm, cp_size=cp_size: Grid.of(comm, cp_size)):
            assert grid.cp is grid.world and grid.dealt("abc") == "abc" and str(grid) == "3"


# --- the program -----------------------------------------------------------------------------------------------


def test_a_run_resumes_with_another_method_and_in_another_grid(documents, tmp_path, monkeypatch, capsys):
    """All train one model if a step has as many micro-batches, and documents are padded alike."""
    monkeypatch.setitem(SIZES, "tiny", MODEL)
    monkeypatch.setattr(train, "learning_rate", lambda step, args: 3e-3)  # which else depends on --steps
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def run(folder, ranks, steps, words):
        shared = small(documents, engine="reference", checkpoint=folder, steps=steps)
        trained(monkeypatch, ranks, *shared, *words.split(), *(["--resume"] if folder.exists() else []))
        return checkpoint.load(folder)

    one = run(whole, 1, 10, "--accumulate 4 --sharding contiguous")
    for ranks, steps, words in (
        (2, 2, "--accumulate 4 --sharding balanced"), (4, 4, "--cp 2 --accumulate 2 --cp-comm-type a2a"),
        (2, 6, "--cp 1 --accumulate 2 --sharding contiguous"),
        (2, 8, "--accumulate 4 --cp-comm-type p2p --sharding contiguous"),
        (4, 10, "--accumulate 4 --cp-comm-type a2a+all_gather --cp-inner 2 --sharding balanced"),
    ):
        other = run(parts, ranks, steps, words)
    assert one.position == other.position and one.step == other.step == 10
    begin = runs.to_host(runs.trainer(thdattn.comm.init("single"), "reference", config=MODEL).model.weights)
    assert np.linalg.norm(other.weights - one.weights) < CLOSE * np.linalg.norm(one.weights - begin)
    assert "by a2a+all_gather of 2 neighbours, rows are balanced" in capsys.readouterr().out
    with pytest.raises(command_line.Failure, match=r"padding \(by --sharding and --cp\) to multiples of 16 instead of"):
        run(parts, 2, 10, "--accumulate 4 --cp-comm-type p2p")
    with pytest.raises(command_line.Failure, match=r"--accumulate \(times groups of --cp ranks\) 2 instead of 4; pass"):
        run(parts, 2, 10, "--cp 1 --accumulate 1 --sharding contiguous")


def test_speeds_are_of_a_ranks_own_share(batches, tmp_path, monkeypatch):
    """Tokens and MFU count the work of all groups, the attention that of the rank's own, as its time does."""
    metrics, peak, some = tmp_path / "run.jsonl", 1e12, batches("dual_chunk")[:4]
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
        (2, "--cp-comm-type a2a --sharding balanced", "sharding is 'balanced' and cp_comm_type 'a2a', wanted 'cont"),
        (1, "--cuda-graph-impl local --cuda-graph-modules mamba", "modules has 'mamba', wanted some of 'attn'"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks_before_the_first_step(documents, monkeypatch, ranks, words, message):
    failures = refused(monkeypatch, ranks, *small(documents), *words.split())
    assert len(failures) == ranks and all(message in str(failure) for failure in failures), failures


@pytest.mark.parametrize("words", [
    "--sharding dual_chunk", "--sharding balanced", "--sharding balanced --cp-comm-type all_gather",
    *(f"--cp-comm-type {method}" for method in SHARDINGS if "+" in method),
])
def test_what_does_not_go_with_mixers_is_refused_by_both_names(monkeypatch, words):
    option, found, *_ = words.split()
    with pytest.raises(ValueError, match=rf"{option} is {found.replace('+', '.')} and --size 1b-hybrid, wanted .*leave "
                                         rf"{option} out, or use another --size"):
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
