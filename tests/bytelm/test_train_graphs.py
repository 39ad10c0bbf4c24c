"""Training with CUDA graphs makes the same bits as without, and batches that do not fit run eagerly.

Without a GPU each wanted graph calls its function, which shows what would be captured, and when.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import median_high, mode
from types import SimpleNamespace
from typing import Any, NamedTuple

import checkpoint
import numpy as np
import pytest
import runs
import train
from programs import NOBODY_INTERRUPTS, arguments, lines_of, small, trained
from runs import EVERY_WAY, MODEL, TINY, Layout, Method, overflows, way_id
from sizes import SIZES
from texts import HYBRID

import thdattn
from thdattn.arguments import INT32_MAX
from thdattn.graphs import Captured, Upload

A2A = Method("a2a", "contiguous")
WHOLE = [{"impl": "local"}, {"impl": "full_iteration"}]
TINY_HYBRID = Layout(1, A2A, config=SIZES["tiny-hybrid"])


def almost_all(documents):
    return max(documents) - 1


class Case(NamedTuple):
    """Run of some micro-batches, `accumulate` per step.

    room: the most documents of a micro-batch that fits, from those of all; None: all fit.
    batches: name; None: by the layout's rule for lengths.
    """

    layout: Layout
    way: dict[str, Any]
    num_batches: int = 12
    accumulate: int = 4
    room: Callable[[list[int]], int] | None = median_high
    batches: str | None = None
    single_pool: bool = True
    engine: str = "reference"


LEVELS, RING = Layout(4, Method("a2a+all_gather", "balanced", 2)), Layout(2, Method("p2p", "balanced"))
ON_HOST = [
    *((Layout(1), way) for way in EVERY_WAY), (Layout(1, A2A, config=HYBRID), {"impl": "local", "modules": ("mamba",)}),
    *((Layout(4, cp_size=2), way) for way in WHOLE),
    *((Layout(2, Method("all_gather", "balanced")), way) for way in WHOLE),
]
MORE_ON_HOST = itertools.product([Layout(2, cp_size=1), Layout(1, A2A, config=HYBRID), LEVELS, RING], WHOLE)
ON_GPU = {
    "one": Case(TINY, {}, 200, 1, None), "two": Case(TINY, {}, 40, 2, None), "some-one": Case(TINY, {}, 200, 1, mode),
    "some-one-pools": Case(TINY, {}, 200, 1, mode, single_pool=False),
    "some-eight": Case(TINY, {}, 200, 8, almost_all), "prompts": Case(TINY, {}, 40, 2, None, "prompts"),
    "hybrid": Case(TINY_HYBRID, {}, 60, 2, almost_all),
}
CASES = [
    *(pytest.param(Case(*case), id=f"{case[0]}-{way_id(case[1])}", marks=marks)
      for cases, marks in ((ON_HOST, ()), (MORE_ON_HOST, pytest.mark.exhaustive)) for case in cases),
    *(pytest.param(case._replace(way=way, engine="cuda"), id=f"{name}-{way_id(way)}", marks=pytest.mark.gpu)
      for name, case in ON_GPU.items() for way in runs.ways_of(case.layout.config)),
]


def single(**options):
    return runs.trainer(thdattn.comm.init("single"), "reference", **options)


@pytest.fixture
def dual(batches):
    return batches("dual_chunk")


# --- the same bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_way_makes_the_same_bits_and_counts_what_runs_eagerly(batches, eager, case):
    """A batch that does not fit makes its round eager in all groups, and a step that is one graph whole.

    Losses, norms, validations in between, weights and the last gradient are the same.
    """
    layout, way, num_batches, accumulate, room, name, single_pool, engine = case
    some = batches(name or layout.rule, engine)[:num_batches]
    documents = [batch.batch.num_seqs for batch in some]
    most, groups = room(documents) if room else INT32_MAX, layout.ranks // (layout.cp_size or layout.ranks)
    steps = overflows(some, most, accumulate, groups, "full_iteration")
    few = 10 if engine == "cuda" else 0
    assert len(set(documents)) > 1
    assert not room or 0 < steps[-1] < len(steps) - few, "no step is eager, or too few are replayed"
    graphs = {"single_pool": single_pool, **way} | ({"max_packed_seqs": most} if room else {})
    found = runs.outcome(layout, some, accumulate, engine, **graphs)
    assert [run.overflows for run in found] == [overflows(some, most, accumulate, groups, way["impl"])] * layout.ranks
    assert {run.num_captured for run in found} == {runs.num_wanted(way, layout.config) if engine == "cuda" else 0}
    without = eager(layout, accumulate, name, num_batches, engine)
    assert [run.results for run in found] == [run.results for run in without]


@pytest.mark.parametrize(("impl", "replays"), [("local", 9), ("full_iteration", 0)])
def test_graphs_run_the_rounds_that_fit(dual, monkeypatch, impl, replays):
    """One of a step's 10 micro-batches is too large."""
    room = sorted(batch.batch.num_seqs for batch in dual)[len(dual) // 2]
    fitting, large = ([batch for batch in dual if (batch.batch.num_seqs > room) == wanted] for wanted in (0, 1))
    made = single(impl=impl, max_packed_seqs=room)
    made.step((fitting * 2)[:10], runs.LR)
    call, names = Captured.__call__, []

    def named(self, *args, **kwargs):
        names.append(self.name)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Captured, "__call__", named)
    made.step([*(fitting * 2)[:4], large[0], *(fitting * 2)[4:9]], runs.LR)
    assert names.count("plan" if impl == "local" else "step") == replays
    assert names.count("layer 0, layer, forward") == names.count("layer 0, layer, backward") == replays
    assert made.passes.num_overflows == 1


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_all_ranks_come_to_captures_together(dual, monkeypatch, way):
    """Each capture is a meeting of all ranks, also where a batch fits one group alone, in steps and validations."""
    room = sorted(batch.batch.num_seqs for batch in dual)[len(dual) // 2]
    large, few = next((i, j) for i, j in itertools.permutations(range(len(dual)), 2)
                      if dual[i].batch.num_seqs > room >= dual[j].batch.num_seqs)
    held_back = [dual[few], dual[large], dual[few]]
    call, meetings = Captured.__call__, []

    def meets(self, *args, **kwargs):
        self._graphs._comm.barrier()  # which fails where another rank is in another collective, or in none
        meetings.append(self.name)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Captured, "__call__", meets)

    def program(comm):
        made = runs.trainer(comm, "reference", cp_size=1, max_packed_seqs=room, config=MODEL, **way)
        return runs.run(made, dual, held_back, accumulate=2)

    thdattn.comm.run_local(2, program, timeout=60)
    eager = runs.overflows(dual, room, 2, 2, way["impl"])
    assert 0 < eager[-1] < len(eager), "no step is eager, or none is captured"
    validations = 2  # of which one round fits both ranks
    assert len(meetings) >= 2 * (len(eager) - eager[-1] + validations)


def test_batches_of_other_rows_than_the_first_are_padded_or_run_eagerly(documents):
    few, many = runs.batches(documents, 2, tokens=128), runs.batches(documents, 1, tokens=256)
    made = single(impl="full_iteration")
    assert [made.step(batches, runs.LR).num_overflows for batches in (few[:1], many, few[:1])] == [0, 1, 1]
    numbers = {}
    for impl in ("none", "local", "full_iteration"):
        made = single(impl=impl)
        results = [made.step([batch], runs.LR) for batch in (*many, *few)]
        assert results[-1].num_overflows == 0
        numbers[impl] = [result.numbers() for result in results]
    np.testing.assert_allclose(numbers["local"], numbers["none"], rtol=1e-5)  # matrix products of more rows
    np.testing.assert_array_equal(numbers["local"], numbers["full_iteration"])


@pytest.mark.parametrize("engine", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_captured_step_of_another_number_of_micro_batches_is_refused(dual, engine):
    made = runs.trainer(thdattn.comm.init("single"), engine, impl="full_iteration")
    for begin in range(0, 10, 2):
        made.step(dual[begin : begin + 2], runs.LR)
    with pytest.raises(ValueError, match="batches holds 3 micro-batches, wanted 2 as in the captured step; keep"):
        made.step(dual[:3], runs.LR)
    assert np.isfinite(made.step(dual[:2], runs.LR).numbers()).all()
    made.graphs.close()
    local = runs.trainer(thdattn.comm.init("single"), engine, impl="local")
    assert [local.step(dual[:n], runs.LR).num_overflows for n in (2, 3, 1)] == [0, 0, 0]
    local.graphs.close()


# --- what is captured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "modules", "wanted"), [
    (MODEL, (), ["layer"] * 3), (MODEL, ("attn",), ["attn"] * 3), (MODEL, ("mlp",), ["mlp"] * 3),
    (HYBRID, (), ["layer"] * 3), (HYBRID, ("mamba",), ["mamba", "", "mamba"]),
    (HYBRID, ("attn", "mlp"), ["mlp", "attn mlp", "mlp"]),
    (HYBRID, ("attn", "mlp", "mamba"), ["mamba mlp", "attn mlp", "mamba mlp"]),
])
def test_wanted_parts_and_only_they_become_graphs(config, modules, wanted):
    made = single(config=config, impl="local", modules=modules)
    names = [captured.name for captured in made.graphs._captured if captured.name.startswith("layer")]
    assert names == [f"layer {layer}, {part}, {way}" for layer, parts in enumerate(wanted) for part in parts.split()
                     for way in ("forward", "backward")]


def test_upload_writes_its_parts_one_after_another():
    upload = Upload(5, on_gpu=False)
    words = upload.words
    for first in (0, 10):
        upload.send([np.arange(first, first + 3, dtype=np.int32), np.array([7, 8], np.int32)])
        assert upload.words is words and words.tolist() == [first, first + 1, first + 2, 7, 8]


# --- the program -----------------------------------------------------------------------------------------------


def test_a_hybrid_resumes_with_other_graphs_bitwise(documents, tmp_path, monkeypatch, capsys):
    """Its metrics and its last words tell the eager steps."""
    monkeypatch.setitem(SIZES, "tiny-hybrid", HYBRID)
    single, whole, parts = thdattn.comm.init("single"), tmp_path / "whole", tmp_path / "parts"
    shared = small(documents, size="tiny-hybrid")
    trained(monkeypatch, 1, "--checkpoint", whole, *shared)
    assert "graphs" not in capsys.readouterr().out
    words = ["--checkpoint", parts, *shared, "--metrics", tmp_path / "run.jsonl"]
    interrupted, step = SimpleNamespace(requested=False), train.Trainer.step

    def stops(self, batches, lr, check):
        interrupted.requested = self.optimizer.state["step"] >= 5
        return step(self, batches, lr, check)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", stops)
        graphs = "--cuda-graph-impl", "full_iteration", "--cuda-graph-max-packed-seqs", 1
        train.train(single, arguments(monkeypatch, *words, *graphs), interrupted)
    said = capsys.readouterr()
    assert "CUDA graphs: full_iteration, which these ranks cannot capture: all runs eagerly" in said.out
    assert "steps without graphs, as a batch did not fit: 1; raise --cuda-graph-max-packed-seqs" in said.out
    assert "steps without graphs: 1" in said.err and "attention" not in said.err
    assert checkpoint.load(parts).step == 5
    resumed = arguments(monkeypatch, *words, "--cuda-graph-impl", "local", "--resume")
    train.train(single, resumed, NOBODY_INTERRUPTS)
    one, other = checkpoint.load(whole), checkpoint.load(parts)
    assert one.config == other.config == HYBRID
    assert one.step == other.step == 12 and one.weights.tobytes() == other.weights.tobytes()
    counts = [line["num_overflows"] for line in lines_of(tmp_path / "run.jsonl") if "loss" in line]
    assert counts == [1] * 5 + [0] * 7, "steps after --resume belong to the run with other graphs"
