"""Hybrids, whose layers have attention or a Mamba-2 mixer: gradients, however rows are laid out, and training."""

from __future__ import annotations

import math
from dataclasses import replace

import checkpoint
import command_line
import numpy as np
import pytest
import runs
import train
from model import Model
from optimizer import AdamW
from programs import lines_of, options, small
from runs import Method
from sizes import SIZES, Config, weight_shapes
from test_grid import CLOSE, differs
from test_model import FLOAT32
from test_train import NOBODY_INTERRUPTS, arguments
from test_train_graphs import way_id, ways_of
from texts import HYBRID, LENGTHS, Text, busy_weights, run

import thdattn
from thdattn.methods.select import SHARDINGS

TEXT = Text.random(LENGTHS)


def outcome(text=TEXT, cp_size=1, **options):
    """Loss, gradient and logits, of slices of the pack."""
    options = {"weights": busy_weights(HYBRID), "sharding": "contiguous", **options}
    return run(text, HYBRID, cp_size, engine="reference", **options)


def parts_of(gradient):
    """name -> the part of a flat gradient."""
    params = single().params
    ends = np.cumsum([x.size for x in params.values()])[:-1]
    return dict(zip(params, np.split(gradient, ends), strict=True))


def single(**options):
    return Model(HYBRID, thdattn.comm.init("single"), "reference", **options)


def assert_same(found, wanted):
    """Loss, logits and the gradient of every weight."""
    assert found.loss == pytest.approx(wanted.loss, rel=FLOAT32)
    pairs = {name: (x, parts_of(wanted.gradient)[name]) for name, x in parts_of(found.gradient).items()}
    pairs |= {f"logits of {i}": pair for i, pair in enumerate(zip(found.logits, wanted.logits, strict=True))}
    for name, (x, y) in pairs.items():
        assert np.abs(x - y).max(initial=0) <= FLOAT32 * np.abs(y).max(initial=0), name
        assert y.any() or not y.size, f"{name} could not fail"


# --- the model -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize(("cp_size", "cp_comm_type"), [(2, "a2a"), (4, "a2a"), (3, "all_gather"), (4, "all_gather"),
                                                       (2, "p2p"), (4, "p2p")])  # fmt: skip
def test_ranks_give_the_loss_and_gradient_of_one(cp_size, cp_comm_type):
    several = outcome(cp_size=cp_size, cp_comm_type=cp_comm_type, slack=5)
    assert_same(several, outcome())
    assert all(gradient.tobytes() == several.gradient.tobytes() for gradient in several.gradients)


def test_packed_documents_give_what_they_give_one_by_one():
    alone = [outcome(text, num_targets=TEXT.num_targets) for text in TEXT.one_by_one()]
    assert_same(outcome(), replace(
        alone[0], loss=sum(x.loss for x in alone), gradients=[np.sum([x.gradient for x in alone], axis=0)],
        logits=[x.logits[0] for x in alone],
    ))  # fmt: skip


def test_what_padding_holds_changes_no_bit():
    zeros, others = (outcome(cp_size=2, cp_comm_type="a2a", padding=padding, slack=7) for padding in (0, 99))
    assert others.loss == zeros.loss and others.gradient.tobytes() == zeros.gradient.tobytes()


def test_logits_depend_on_earlier_bytes_of_the_document_alone():
    changed = Text([x.copy() for x in TEXT.inputs], TEXT.targets)
    changed.inputs[3][20] ^= 1
    for i, (x, y) in enumerate(zip(outcome().logits, outcome(changed).logits, strict=True)):
        differ = (x != y).any(axis=1)
        assert not differ[: 20 if i == 3 else None].any()
        assert i != 3 or differ[20:].all()


def test_mixers_begin_with_rates_and_steps_of_many_scales():
    params = Model(replace(HYBRID, mixer_heads=64), thdattn.comm.init("single"), "reference").params
    rates, bias = np.exp(params["0.A_log"]), params["0.dt_bias"]
    assert 1 <= rates.min() < 2 and 14 < rates.max() <= 16
    steps = np.log1p(np.exp(bias))
    assert 0.001 <= steps.min() < 0.002 and 0.05 < steps.max() <= 0.1
    assert (params["2.D"] == 1).all() and not params["2.conv_bias"].any() and params["2.conv_weight"].all()
    assert (params["2.A_log"] != params["0.A_log"]).all()


def test_only_matrices_decay():
    model = single()
    model.weights[...] = 2
    AdamW(model, weight_decay=0.5).step(np.zeros_like(model.gradient), lr=0.1)
    decayed = {name.rpartition(".")[2] for name, x in model.params.items() if np.allclose(x, 2 * 0.95)}
    assert decayed == {"embedding", "head", "zxbcdt", "conv_weight", "qkv", "out", "gate_up", "down"}


def test_flops_by_hand():
    config = Config(layers=3, width=16, heads=2, kv_heads=1, head_dim=8, hidden=24, pattern="MM*", mixer_heads=3,
                    mixer_head_dim=8, mixer_groups=3, state_dim=4)  # fmt: skip
    model, batch = Model(config, thdattn.comm.init("single"), "reference"), thdattn.PackedBatch.from_lengths([3, 1], 4)
    mlp, attention, channels = 3 * 16 * 24, 16 * (2 + 2) * 8 + 2 * 8 * 16, 3 * (8 + 4 + 4)
    mixer = 16 * (3 * 8 + channels + 3) + 4 * channels + 3 * 8 * 16 + 2 * 3 * 8 * 4
    pairs = (1 + 2 + 3 + 1) * 2 * 8 * 2 * 7
    assert model.attention_flops(batch) == pairs
    assert model.flops(batch) == 6 * (3 * mlp + attention + 2 * mixer + 257 * 16) * 4 + pairs


@pytest.mark.parametrize(("hybrid", "transformer"), [("tiny-hybrid", "tiny"), ("1b-hybrid", "1b")])
def test_sizes_have_the_weights_of_transformers_and_fit_the_kernels(hybrid, transformer):
    found, wanted = (sum(map(math.prod, weight_shapes(SIZES[name]).values())) for name in (hybrid, transformer))
    assert found == pytest.approx(wanted, rel=0.01)
    config = SIZES[hybrid]
    assert 0 < config.num_mixers < config.layers and not config.mixer_heads % config.mixer_groups
    assert config.mixer_head_dim in (64, 128) and config.state_dim in (64, 128, 256) and config.d_inner <= 4096


# --- training --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batches(documents):
    return runs.batches(documents, 6, sharding="contiguous")


def trained(batches, ranks, cp_comm_type="a2a", cp_size=None, **graphs):
    """The run of every rank."""

    def program(comm):
        method = Method(cp_comm_type, "contiguous")
        made = runs.trainer(comm, "reference", cp_size=cp_size, method=method, config=HYBRID, **graphs)
        return runs.run(made, batches, batches[:2], accumulate=2, validate_every=2)

    return thdattn.comm.run_local(ranks, program)


@pytest.fixture(scope="module")
def alone(batches):
    (run,) = trained(batches, 1)
    return run


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, {}), (2, {"cp_comm_type": "all_gather"}),
                                                (4, {"cp_comm_type": "p2p"}), (4, {"cp_size": 2})])  # fmt: skip
def test_every_number_of_ranks_trains_the_model_of_one(batches, alone, ranks, options):
    first, *others = trained(batches, ranks, **options)
    assert all((run.numbers, run.weights) == (first.numbers, first.weights) for run in others)
    found = differs(first, alone, HYBRID)
    assert max(found) < CLOSE, found


@pytest.mark.parametrize("way", ways_of(HYBRID), ids=way_id)
def test_every_way_with_graphs_makes_the_same_bits(batches, alone, way):
    assert trained(batches, 1, **way) == [alone]


def test_batches_of_too_many_documents_run_eagerly_and_are_counted(batches, alone):
    documents = [batch.batch.num_seqs for batch in batches]
    room = sorted(documents)[3]
    too_many = [max(documents[i : i + 2]) > room for i in range(0, len(documents), 2)]
    assert 0 < sum(too_many) < len(too_many), "nothing could go wrong"
    (run,) = trained(batches, 1, impl="full_iteration", max_packed_seqs=room)
    assert run.overflows == np.cumsum(too_many).tolist() and run.weights == alone.weights


@pytest.mark.parametrize(("modules", "wanted"), [
    ((), ["layer"] * 3), (("mamba",), ["mamba", "", "mamba"]), (("attn", "mlp"), ["mlp", "attn mlp", "mlp"]),
    (("attn", "mlp", "mamba"), ["mamba mlp", "attn mlp", "mamba mlp"]),
])  # fmt: skip
def test_wanted_parts_and_only_they_become_graphs(modules, wanted):
    made = runs.trainer(thdattn.comm.init("single"), "reference", config=HYBRID, impl="local", modules=modules)
    names = [captured.name for captured in made.graphs._captured if captured.name.startswith("layer")]
    assert names == [f"layer {layer}, {part}, {way}" for layer, parts in enumerate(wanted) for part in parts.split()
                     for way in ("forward", "backward")]  # fmt: skip


def test_a_run_goes_on_bitwise(documents, tmp_path, monkeypatch):
    """Of two ranks, from a checkpoint that says which layers are mixers."""
    monkeypatch.setitem(SIZES, "tiny-hybrid", HYBRID)
    monkeypatch.setattr(train, "learning_rate", lambda step, args: 3e-3)  # which else depends on --steps
    for folder, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        words = ["--checkpoint", tmp_path / folder, *small(documents, steps=steps, size="tiny-hybrid")]
        resume = ["--resume"] if (tmp_path / folder).exists() else []
        args = arguments(monkeypatch, *words, *resume)
        thdattn.comm.run_local(2, lambda comm, args=args: train.train(comm, args, NOBODY_INTERRUPTS))
    one, other = (checkpoint.load(tmp_path / folder) for folder in ("whole", "parts"))
    assert one.config == other.config == HYBRID and one.step == other.step == 4
    assert one.weights.tobytes() == other.weights.tobytes()
    with pytest.raises(command_line.Failure, match="--size tiny instead of tiny-hybrid"):
        args = arguments(monkeypatch, *map(str, words), "--resume", "--size", "tiny", "--sharding", "contiguous")
        train.train(thdattn.comm.init("single"), args, NOBODY_INTERRUPTS)


def test_other_runs_are_drawn_beside_and_other_files_are_refused_before_the_first_step(
    documents, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    drawn, single = [], thdattn.comm.init("single")
    monkeypatch.setattr(train.measure, "plot", lambda path, lines, title, beside: drawn.append((lines, beside)))
    for number, beside in enumerate(([], [tmp_path / "0.jsonl"])):
        files = options(metrics=tmp_path / f"{number}.jsonl", plot=tmp_path / "run.png")
        words = [*small(documents, steps=2), *files, *(["--beside", *beside] if beside else [])]
        train.train(single, arguments(monkeypatch, *words), NOBODY_INTERRUPTS)
    first, second = (lines_of(tmp_path / f"{number}.jsonl") for number in (0, 1))
    assert drawn == [(first, {}), (second, {"0": first})]
    monkeypatch.setattr(train.Trainer, "step", None)
    with pytest.raises(command_line.Failure, match=r"--beside is .*1\.py, whose line 1 is .*, wanted lines"):
        args = arguments(monkeypatch, *small(documents), "--beside", documents / "1.py")
        train.train(single, args, NOBODY_INTERRUPTS)


# --- how rows are spread ---------------------------------------------------------------------------------------


def test_a_hybrid_has_slices_of_the_pack_whatever_travels_between_its_attentions(monkeypatch):
    for words, method in (([], "a2a"), (["--cp-comm-type", "p2p"], "p2p"), (["--cuda-graph-impl", "local"], "a2a"),
                          (["--sharding", "contiguous", "--cp-comm-type", "all_gather"], "all_gather")):  # fmt: skip
        args = arguments(monkeypatch, "--size", "tiny-hybrid", *words)
        assert (args.cp_comm_type, args.sharding) == (method, "contiguous")


@pytest.mark.parametrize("words", [
    "--sharding dual_chunk", "--sharding balanced", "--sharding balanced --cp-comm-type all_gather",
    *(f"--cp-comm-type {method}" for method in SHARDINGS if "+" in method),
])  # fmt: skip
def test_what_does_not_go_with_mixers_is_refused_by_both_names(monkeypatch, words):
    option, found, *_ = words.split()
    with pytest.raises(ValueError, match=rf"{option} is {found.replace('+', '.')} and --size 1b-hybrid, wanted .*leave "
                                         rf"{option} out, or use another --size"):  # fmt: skip
        arguments(monkeypatch, "--size", "1b-hybrid", *words.split())


def test_a_part_that_no_layer_has_is_refused_by_name():
    single, config = thdattn.comm.init("single"), replace(HYBRID, pattern="M")
    with pytest.raises(ValueError, match="modules has 'attn', wanted some of 'mamba', 'mlp', the parts of a layer"):
        runs.trainer(single, "reference", config=config, impl="local", modules=("attn",))
