"""Every way for ranks to share a micro-batch trains the model of one rank, and what cannot be is said by name."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace

import checkpoint
import command_line
import data
import numpy as np
import pytest
import runs
import train
from grid import Grid, most_neighbours
from programs import TRAIN, lines_of, small, start, validations
from runs import Method
from sizes import SIZES, Config
from test_grid import CLOSE, differs
from test_train import NOBODY_INTERRUPTS, arguments

import thdattn
from thdattn import balance
from thdattn.methods.select import SHARDINGS
from thdattn.plan import key_transfers

MODEL = replace(SIZES["tiny"], heads=4, kv_heads=2, head_dim=16, width=32, hidden=64)
METHODS = [
    (2, Method("all_gather", "balanced")), (3, Method("all_gather", "balanced")), (4, Method("all_gather", "balanced")),
    (2, Method("a2a", "contiguous")), (4, Method("a2a", "contiguous")), (2, Method("a2a", "dual_chunk")),
    (2, Method("p2p", "dual_chunk")), (4, Method("p2p", "contiguous")),
    (4, Method("a2a+all_gather", "dual_chunk", 2)), (4, Method("a2a+all_gather", "balanced", 2)),
    (2, Method("a2a+all_gather", "dual_chunk", 2)), (2, Method("a2a+all_gather", "balanced", 1)),
    (4, Method("a2a+p2p", "dual_chunk", 2)),
]  # fmt: skip


@pytest.fixture(scope="module")
def batches(documents):
    """By sharding: those that it needs; of what has no rule for lengths, lengths of every kind."""
    return {sharding: runs.batches(documents, 8, sharding=sharding) for sharding in ("dual_chunk", "contiguous")}


def outcome(ranks, method, batches, cp_size=None, **graphs):
    """The run of every rank."""

    def program(comm):
        made = runs.trainer(comm, "reference", cp_size=cp_size, method=method, config=MODEL, **graphs)
        return runs.run(made, batches, batches[:2], accumulate=2, validate_every=2)

    return thdattn.comm.run_local(ranks, program)


@pytest.fixture(scope="module")
def alone(batches):
    """By sharding: the run of a single rank."""
    return {sharding: outcome(1, Method("all_gather", sharding), some)[0] for sharding, some in batches.items()}


def rule_of(method):
    """The sharding that has the rule for lengths of a method's."""
    return "dual_chunk" if method.sharding == "dual_chunk" else "contiguous"


# --- one model -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize(("ranks", "method"), METHODS, ids=str)
def test_every_method_trains_the_model_of_one_rank(batches, alone, ranks, method):
    """On all ranks alike, bit for bit: losses, norms, validations, gradient, and what the weights have learnt."""
    rule = rule_of(method)
    first, *others = outcome(ranks, method, batches[rule])
    assert all((run.numbers, run.weights) == (first.numbers, first.weights) for run in others)
    found = differs(first, alone[rule], MODEL)
    assert max(found) < CLOSE, found


@pytest.mark.parametrize("method", [Method("all_gather", "balanced"), Method("a2a+all_gather", "balanced", 2)], ids=str)
def test_groups_have_methods_too(batches, alone, method):
    first, *_ = outcome(4, method, batches["contiguous"], cp_size=2)
    assert max(differs(first, alone["contiguous"], MODEL)) < CLOSE


@pytest.mark.parametrize("way", [{"impl": "local"}, {"impl": "full_iteration"}], ids=lambda way: way["impl"])
@pytest.mark.parametrize(
    ("ranks", "method"), [(2, Method("a2a", "contiguous")), (2, Method("a2a", "dual_chunk")),
                          (4, Method("a2a+all_gather", "dual_chunk", 2))], ids=str)  # fmt: skip
def test_ways_with_graphs_make_the_same_bits(batches, ranks, method, way):
    some = batches[rule_of(method)]
    assert outcome(ranks, method, some, **way) == outcome(ranks, method, some)


def test_what_a_step_needs_is_found_by_the_thread_that_prepares_batches(documents, monkeypatch):
    """Of balanced rows, the runs and the needed rows, which depend on the lengths."""
    threads = []

    def noted(module, name):
        function = getattr(module, name)

        def call(*args):
            threads.append((name, threading.current_thread().name))
            return function(*args)

        monkeypatch.setattr(module, name, call)

    noted(balance, "_runs")
    noted(key_transfers, "_needed_rows")
    config = replace(MODEL, window=5)

    def program(comm):
        made = runs.trainer(comm, "reference", method=Method("all_gather", "balanced"), config=config)
        coming = data.micro_batches(data.find_documents(documents), data.Packing(96, 1, 64), 0, data.Position(0, 0))
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
def more_heads(monkeypatch):
    """A tiny model whose heads can be exchanged among 4 ranks."""
    monkeypatch.setitem(SIZES, "tiny", MODEL)


def trained(monkeypatch, ranks, *words):
    args = arguments(monkeypatch, *words)
    thdattn.comm.run_local(ranks, lambda comm: train.train(comm, args, NOBODY_INTERRUPTS))


def test_a_run_goes_on_with_another_method(documents, tmp_path, monkeypatch, more_heads, capsys):
    """As all of them train one model, if documents are padded alike."""
    monkeypatch.setattr(train, "learning_rate", lambda step, args: 3e-3)  # which else depends on --steps
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
    start = runs.to_host(runs.trainer(thdattn.comm.init("single"), "reference", config=MODEL).model.weights)
    assert np.linalg.norm(other.weights - one.weights) < CLOSE * np.linalg.norm(one.weights - start)
    assert "by a2a+all_gather of 2 neighbours, rows are balanced" in capsys.readouterr().out
    with pytest.raises(command_line.Failure, match=r"padding \(by --sharding and --cp\) to multiples of 16 instead of"):
        trained(monkeypatch, 2, *resumed, "--resume", "--cp-comm-type", "p2p")


@pytest.mark.parametrize(("ranks", "words"), [
    (4, {"cp": 2, "accumulate": 1, "cp_comm_type": "a2a+all_gather", "sharding": "balanced"}),
    (2, {"sharding": "balanced"}), (2, {"size": "tiny-hybrid"}),
])  # fmt: skip
def test_processes_train_the_model_of_one(documents, tmp_path, monkeypatch, ranks, words):
    """Under MPI, as a user starts them; a hybrid's exchange heads and pass on states."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for number, each in ((ranks, words), (1, {"sharding": "contiguous", "size": words.get("size", "tiny")})):
        run = start(number, TRAIN, *small(documents, metrics=tmp_path / f"{number}", **each))
        assert run.returncode == 0, run.stderr
    together, alone = (lines_of(tmp_path / f"{number}") for number in (ranks, 1))
    losses = ([line["loss"] for line in lines if "loss" in line] for lines in (together, alone))
    np.testing.assert_allclose(*losses, rtol=CLOSE)
    np.testing.assert_allclose(validations(tmp_path / f"{ranks}"), validations(tmp_path / "1"), rtol=CLOSE)


def test_rows_are_spread_as_the_method_takes_them_unless_something_else_is_asked_for(monkeypatch):
    for cp_comm_type, sharding in SHARDINGS.items():
        expected = train.ALL_GATHER_SHARDING if cp_comm_type == "all_gather" else sharding
        assert arguments(monkeypatch, "--cp-comm-type", cp_comm_type).sharding == expected
        graphs = arguments(monkeypatch, "--cp-comm-type", cp_comm_type, "--cuda-graph-impl", "local")
        assert graphs.sharding == sharding != "balanced"
    asked = arguments(monkeypatch, "--cp-comm-type", "p2p", "--sharding", "contiguous")
    assert asked.sharding == "contiguous"


@pytest.mark.parametrize(
    ("heads", "cp_size", "most"),
    [((2, 1), 2, 2), ((2, 1), 4, 1), ((8, 4), 4, 4), ((8, 4), 8, 8), ((8, 4), 16, 4), ((28, 4), 6, 2), ((3, 3), 4, 1)],
)
def test_as_many_neighbours_exchange_heads_as_these_allow(heads, cp_size, most):
    """All ranks, if each head is whole on some; or groups, if each rank has kv heads of its own."""
    assert most_neighbours(cp_size, Config(1, 8, *heads, 8, 8)) == most


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (2, "--cp-inner 2", "--cp-inner is 2 and --cp-comm-type all_gather, wanted one of two levels with that"),
        (2, "--cp-inner 2 --cp-comm-type a2a", "--cp-inner is 2 and --cp-comm-type a2a, wanted one of two levels"),
        (4, "--cp-inner 3 --cp-comm-type a2a+p2p", "--cp-inner is 3, wanted a number that divides the 4 ranks of a g"),
        (4, "--cp-inner 2 --cp-comm-type a2a+p2p", "num_kv_heads is 1 and comm has 2 ranks in its inner groups"),
        (4, "--cp-comm-type a2a", "num_heads is 2 and num_kv_heads 1, wanted heads that can be spread over the 4 rank"),
        (2, "--cp-comm-type a2a --sharding balanced", "sharding is 'balanced' and cp_comm_type 'a2a', wanted"),
        (2, "--sharding balanced --cuda-graph-impl local",
         "sharding is 'balanced' and the impl of the CUDA graphs 'local', wanted 'dual_chunk' or 'contiguous'"),
        (4, "--cp-comm-type a2a+all_gather --sharding balanced --cuda-graph-impl full_iteration",
         "sharding is 'balanced' and the impl of the CUDA graphs 'full_iteration', wanted"),
        (2, "--cp-comm-type p2p --cuda-graph-impl local",
         "cp_comm_type is 'p2p' and the impl of the CUDA graphs 'local', wanted 'all_gather', 'a2a' or"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks_before_the_first_step(
    documents, monkeypatch, ranks, words, message
):
    args = arguments(monkeypatch, *small(documents), *words.split())
    failures = []

    def program(comm):
        with pytest.raises(command_line.Failure) as failure:
            train.train(comm, args, NOBODY_INTERRUPTS)
        failures.append(str(failure.value))

    monkeypatch.setattr(train.Trainer, "step", None)
    thdattn.comm.run_local(ranks, program, timeout=10)
    assert len(failures) == ranks and all(message in failure for failure in failures), failures


def test_ranks_that_differ_in_neighbours_learn_of_it():
    def program(comm):
        with pytest.raises(ValueError, match="--cp-inner is not the same on all ranks: rank 0 has 1, but rank 1 has 2"):
            Grid.of(comm, inner=1 + comm.rank)

    thdattn.comm.run_local(2, program)
