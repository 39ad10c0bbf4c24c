"""Training with CUDA graphs wanted where there is no GPU: the same code, the same numbers, and what does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import checkpoint
import command_line
import numpy as np
import pytest
import runs
import train
from programs import lines_of, small
from test_train import NOBODY_INTERRUPTS, arguments

import thdattn
from thdattn.graphs import Captured, CudaGraphConfig, Graphs, Upload

EVERY_WAY = [
    {"impl": "local"}, {"impl": "local", "modules": ("attn",)}, {"impl": "local", "modules": ("mlp",)},
    {"impl": "full_iteration"},
]  # fmt: skip


def ways_of(config):
    """Every way to compute a step of a model with graphs."""
    return [*EVERY_WAY, {"impl": "local", "modules": ("mamba",)}] if config.num_mixers else EVERY_WAY


def way_id(way):
    return "-".join([way["impl"], *way.get("modules", ())])


@pytest.fixture(scope="module")
def batches(documents):
    return runs.batches(documents, 16)


def crowded(batches):
    """Room for the documents of most batches, and by step of two: (whether the first is too large, the second)."""
    documents = [batch.batch.num_seqs for batch in batches]
    room = sorted(documents)[len(documents) // 2]
    return room, [(one > room, other > room) for one, other in zip(documents[::2], documents[1::2], strict=True)]


def outcome(cp_size, batches, accumulate=2, **graphs):
    """The run of every rank."""

    def program(comm):
        return runs.run(runs.trainer(comm, "reference", **graphs), batches, batches[:3], accumulate, validate_every=5)

    return thdattn.comm.run_local(cp_size, program)


@pytest.fixture(scope="module")
def eager(batches):
    """By number of ranks."""
    return {cp_size: outcome(cp_size, batches) for cp_size in (1, 2)}


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_every_way_makes_the_same_bits(batches, eager, way, cp_size):
    """With two micro-batches per step, and validations between steps."""
    assert outcome(cp_size, batches, **way) == eager[cp_size]


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_batches_of_too_many_documents_run_eagerly_and_are_counted(batches, eager, way):
    """By round, so that one large micro-batch leaves the others of its step to graphs; a step that is one by step."""
    room, large = crowded(batches)
    assert any(one != other for one, other in large), "no step is partly eager"
    (one,) = outcome(1, batches, max_packed_seqs=room, **way)
    count = any if way["impl"] == "full_iteration" else sum
    assert one.overflows == np.cumsum([count(step) for step in large]).tolist()
    assert (one.numbers, one.weights, one.validations) == (
        eager[1][0].numbers, eager[1][0].weights, eager[1][0].validations)


@pytest.mark.parametrize(("impl", "replays"), [("local", 9), ("full_iteration", 0)])
def test_graphs_run_the_rounds_that_fit(batches, monkeypatch, impl, replays):
    """Of a step of 10 micro-batches, of which one is too large."""
    room, _ = crowded(batches)
    fitting, large = ([batch for batch in batches if (batch.batch.num_seqs > room) == wanted] for wanted in (0, 1))
    made = runs.trainer(thdattn.comm.init("single"), "reference", impl=impl, max_packed_seqs=room)
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


def test_batches_of_more_rows_than_the_first_run_eagerly(documents):
    small, large = runs.batches(documents, 1, tokens=128), runs.batches(documents, 1, tokens=256)
    made = runs.trainer(thdattn.comm.init("single"), "reference", impl="full_iteration")
    counts = [made.step(batches, runs.LR).num_overflows for batches in (small, large, small)]
    assert counts == [0, 1, 1]


def test_batches_of_fewer_rows_than_the_first_are_padded(documents):
    small, large = runs.batches(documents, 2, tokens=128), runs.batches(documents, 1, tokens=256)
    numbers = {}
    for impl in ("none", "local", "full_iteration"):
        made = runs.trainer(thdattn.comm.init("single"), "reference", impl=impl)
        results = [made.step([batch], runs.LR) for batch in (*large, *small)]
        assert results[-1].num_overflows == 0
        numbers[impl] = [result.numbers() for result in results]
    np.testing.assert_allclose(numbers["local"], numbers["none"], rtol=1e-5)  # matrix products of more rows
    np.testing.assert_array_equal(numbers["local"], numbers["full_iteration"])


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_what_does_not_fit_can_be_an_error(batches, way):
    room = min(batch.batch.num_seqs for batch in batches)
    made = runs.trainer(thdattn.comm.init("single"), "reference", max_packed_seqs=room, on_overflow="error", **way)
    with pytest.raises(ValueError, match=rf"batch 0 has \d+ sequences, wanted at most {room}, the room of the static"):
        for batch in batches:
            made.step([batch], runs.LR)


def test_a_step_of_another_number_of_micro_batches_is_refused_by_name(batches):
    made = runs.trainer(thdattn.comm.init("single"), "reference", impl="full_iteration")
    made.step(batches[:2], runs.LR)
    with pytest.raises(ValueError, match="batches holds 3 micro-batches, wanted 2 as in the captured step; keep"):
        made.step(batches[:3], runs.LR)
    local = runs.trainer(thdattn.comm.init("single"), "reference", impl="local")
    assert [local.step(batches[:n], runs.LR).num_overflows for n in (2, 3, 1)] == [0, 0, 0]


def test_a_part_that_layers_do_not_have_is_refused_by_name():
    with pytest.raises(ValueError, match="modules has 'mamba', wanted some of 'attn', 'mlp', the parts of a layer"):
        runs.trainer(thdattn.comm.init("single"), "reference", impl="local", modules=("attn", "mamba"))


@pytest.mark.parametrize("modules", [(), ("attn",), ("mlp",), ("attn", "mlp")], ids=["all", "attn", "mlp", "both"])
def test_wanted_parts_and_only_they_become_graphs(modules):
    made = runs.trainer(thdattn.comm.init("single"), "reference", impl="local", modules=modules)
    layers = made.model.config.layers
    wanted = modules or ("layer",)
    assert [captured.name for captured in made.graphs._captured if captured.name.startswith("layer")] == [
        f"layer {layer}, {part}, {way}" for layer in range(layers) for part in wanted
        for way in ("forward", "backward")
    ]  # fmt: skip


def test_graphs_are_inactive_without_a_gpu_and_on_ranks_that_meet_on_the_host():
    config = CudaGraphConfig("local")
    assert not Graphs(thdattn.comm.init("single"), config, "reference").active
    assert thdattn.comm.run_local(2, lambda comm: Graphs(comm, config).active) == [False, False]


# --- the program -----------------------------------------------------------------------------------------------


def flags(**values):
    return [str(word) for name, value in values.items() for word in (f"--cuda-graph-{name.replace('_', '-')}", value)]


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_a_run_goes_on_with_other_graphs_bitwise(documents, tmp_path, monkeypatch, impl):
    """And its metrics and its last words say how many steps ran eagerly."""
    single, whole, parts = thdattn.comm.init("single"), tmp_path / "whole", tmp_path / "parts"
    options = small(documents, sharding="dual_chunk")  # which graphs and eager runs have in common
    train.train(single, arguments(monkeypatch, "--checkpoint", whole, *options), NOBODY_INTERRUPTS)
    words = ["--checkpoint", parts, *options, "--metrics", tmp_path / "run.jsonl"]
    interrupted = SimpleNamespace(requested=False)
    step = train.Trainer.step

    def stops(self, batches, lr, check):
        interrupted.requested = self.optimizer.state["step"] >= 5
        return step(self, batches, lr, check)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", stops)
        train.train(single, arguments(monkeypatch, *words, *flags(impl=impl, max_packed_seqs=1)), interrupted)
    assert checkpoint.load(parts).step == 5
    train.train(single, arguments(monkeypatch, *words, "--resume"), NOBODY_INTERRUPTS)
    one, other = checkpoint.load(whole), checkpoint.load(parts)
    assert one.step == other.step == 12 and one.weights.tobytes() == other.weights.tobytes()
    counts = [line["num_overflows"] for line in lines_of(tmp_path / "run.jsonl") if "loss" in line]
    assert counts == [1] * 5 + [0] * 7, 'steps after --resume are no longer of the run with graphs'


def test_eager_steps_are_reported(documents, monkeypatch, capsys):
    words = [*small(documents), *flags(impl="full_iteration", max_packed_seqs=1, warmup_steps=1)]
    train.train(thdattn.comm.init("single"), arguments(monkeypatch, *words), NOBODY_INTERRUPTS)
    said = capsys.readouterr()
    assert "CUDA graphs: full_iteration, which these ranks cannot capture: all runs eagerly" in said.out
    assert "steps without graphs, as a batch did not fit: 2; raise --cuda-graph-max-packed-seqs" in said.out
    assert "steps without graphs: 2" in said.err and "attention" not in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cuda-graph-impl", "whole"], "--cuda-graph-impl is 'whole', wanted 'none', 'local', .*--help lists the"),
        (["--cuda-graph-impl", "full_iteration", "--cuda-graph-modules", "mlp"], "--cuda-graph-impl.*full_iteration"),
    ],
)
def test_wrong_flags_are_named(monkeypatch, words, message):
    with pytest.raises(ValueError, match=message):
        arguments(monkeypatch, *words)


def test_flags_of_a_part_that_layers_do_not_have_are_one_line(documents, monkeypatch):
    args = arguments(monkeypatch, *small(documents), *flags(impl="local", modules="mamba"))
    with pytest.raises(command_line.Failure, match="modules has 'mamba', wanted some of 'attn'"):
        train.train(thdattn.comm.init("single"), args, NOBODY_INTERRUPTS)


def test_upload_writes_its_parts_one_after_another():
    upload = Upload(5, on_gpu=False)
    words = upload.words
    for first in (0, 10):
        upload.send([np.arange(first, first + 3, dtype=np.int32), np.array([7, 8], np.int32)])
        assert upload.words is words and words.tolist() == [first, first + 1, first + 2, 7, 8]
