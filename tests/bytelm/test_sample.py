"""Samples: every text is drawn from the model's logits of that text alone."""

from __future__ import annotations

import os
import sys

import checkpoint
import layers
import numpy as np
import pytest
import sample
from data import Position
from model import Model
from programs import SAMPLE, arguments, options, start
from sizes import EOD, SIZES, VOCAB
from texts import HYBRID

import thdattn


@pytest.fixture(scope="module")
def model():
    """Make a model with attention in every layer."""
    return decided(SIZES["tiny"])


def decided(config):
    """Make a model that prefers some bytes by those before them: logits of about 1, either side of 0."""
    model = Model(config, thdattn.comm.init("single"), "reference")
    rng = np.random.default_rng(3)
    for x in model.params.values():
        if x.ndim == 2:
            x[...] = rng.standard_normal(x.shape) * x.shape[1] ** -0.5
    model.refresh()
    return model


def logits_alone(model, text):
    """Return the logits of the byte after one text, without any other text in the pack."""
    plan = model.plan(thdattn.PackedBatch.from_lengths([len(text) + 1]), "contiguous")
    return model.logits(np.array([EOD, *text], np.int32), plan)[-1]


def draw(logits, uniforms, end=-1, top_k=VOCAB, temperature=1.0):
    """Draw tokens from one row of logits, one by each number."""
    token, written, count = np.zeros(1, np.int32), np.zeros((1, len(uniforms)), np.int32), np.zeros(1, np.int32)
    for _ in uniforms:
        layers.draw(token, written, count, logits[None], uniforms[None], len(logits), end, top_k, temperature)
    return written[0].tolist()


def recomputed(model, prompt, uniforms, top_k, temperature):
    """Write a text without caches: compute everything anew for every byte."""
    text = bytearray(prompt)
    for number in uniforms:
        (token,) = draw(logits_alone(model, text), np.array([number]), EOD, top_k, temperature)
        if token == EOD:
            break
        text.append(token)
    return bytes(text)


PROMPTS = [b"import os", b"", b"x", b"class Error(Exception):\n"]


@pytest.mark.parametrize(("config", "temperature", "top_k"), [
    (SIZES["tiny"], 1.0, VOCAB), (SIZES["tiny"], 0, VOCAB), (HYBRID, 1.5, 40)], ids=["tiny", "likeliest", "hybrid"])
def test_texts_that_grow_together_are_those_that_are_computed_anew_for_every_byte(config, temperature, top_k):
    model = decided(config)
    sampler = sample.Sampler(model, len(PROMPTS), 60, temperature, top_k)
    for seed in (0, 1):  # the second time where the first one's texts were
        uniforms = np.random.default_rng(seed).integers(2**32, size=(len(PROMPTS), 35), dtype=np.uint32)
        texts = sampler.generate(PROMPTS, 35, np.random.default_rng(seed))
        how = (top_k, temperature) if temperature else (1, 1.0)
        assert texts == [recomputed(model, *each, *how) for each in zip(PROMPTS, uniforms, strict=True)]
        assert any(len(text) == len(prompt) + 35 for text, prompt in zip(texts, PROMPTS, strict=True))


def test_a_text_ends_with_eod_and_the_others_go_on(model, monkeypatch):
    steps = []

    def scripted(tokens, caches, layers):
        steps.append(tokens.tolist())
        logits = np.zeros((3, VOCAB), np.float32)
        logits[0, EOD if len(steps) == 2 else ord("x")] = logits[1, ord("y")] = logits[2, ord("z")] = 100
        return logits

    monkeypatch.setattr(model, "decode", scripted)
    sampler = sample.Sampler(model, 3, 6)
    texts = sampler.generate([b"a"] * 3, 5, np.random.default_rng(0))
    assert [text[2:] for text in texts] == [b"x", b"yyyy", b"zzzz"]
    assert [step[0] for step in steps[1:]] == [ord("x"), EOD, EOD]


def test_nobody_goes_on_when_all_texts_have_ended(model, monkeypatch):
    steps = []

    def ending(tokens, caches, layers):
        steps.append(1)
        return np.eye(VOCAB, dtype=np.float32)[[EOD, EOD]] * 100

    monkeypatch.setattr(model, "decode", ending)
    texts = sample.Sampler(model, 2, 1000).generate([b"", b"a"], 900, np.random.default_rng(0))
    assert max(map(len, texts)) <= 2 and len(steps) < sample.LOOK_EVERY


def test_the_last_byte_fits_exactly_and_one_more_is_refused_before_the_start(model):
    sampler, rng = sample.Sampler(model, 2, 8, top_k=1), np.random.default_rng(0)
    assert all(len(text) <= 8 for text in sampler.generate([b"abc", b""], 5, rng))
    with pytest.raises(ValueError, match="a prompt of 3 bytes and num_bytes = 6 are 9, wanted at most 8, the capacity"):
        sampler.generate([b"", b"abc"], 6, rng)
    with pytest.raises(ValueError, match="prompts are 1, wanted 2"):
        sampler.generate([b""], 6, rng)


def uniforms(count):
    return np.random.default_rng(0).integers(2**32, size=count, dtype=np.uint32)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, [0.1, 0.2, 0.7]), (0.5, np.array([1, 4, 49]) / 54)])
def test_draws_follow_the_softmax(temperature, expected):
    drawn = draw(np.log(np.array([0.1, 0.2, 0.7], np.float32)), uniforms(4000), top_k=3, temperature=temperature)
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 4000, expected, atol=0.04)  # 5 standard deviations


def test_top_k_draws_from_the_k_likeliest_alone():
    logits = np.array([0, 3, 1, 2.9, 3], np.float32)
    assert set(draw(logits, uniforms(200), top_k=3)) == {1, 3, 4}
    assert set(draw(logits, uniforms(20), top_k=1)) == {1}, "of equal ones the first"


def test_the_least_and_the_largest_draw_take_the_first_and_the_last_token_that_can_be():
    logits = np.array([-np.inf, 0, 1, -np.inf], np.float32)
    assert draw(logits, np.array([0, 2**32 - 1], np.uint32), top_k=4) == [1, 2]


def test_options_of_graphs_are_those_of_training_which_refuses_a_scope_of_inference(monkeypatch):
    layer, block = "--cuda-graph-impl local", "--cuda-graph-impl local --inference-cuda-graph-scope block"
    for words, scope in (layer, "layer"), (block, "block"), ("--cuda-graph-impl full_iteration", "none"):
        monkeypatch.setattr(sys, "argv", ["sample.py", "--checkpoint", "runs", *words.split()])
        graphs = sample.parse_arguments().graphs
        assert graphs.inference_scope == scope
    assert arguments(monkeypatch, *words.split()).graphs == graphs
    refused = "--inference-cuda-graph-scope is 'block'.*, wanted no graph for inference, as training writes no text"
    with pytest.raises(ValueError, match=refused):
        arguments(monkeypatch, *block.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """Save a checkpoint of a model that has learnt nothing."""
    folder = tmp_path_factory.mktemp("checkpoint") / "saved"
    checkpoint.save(folder, checkpoint.Checkpoint(model.config, 3, Position(0, 0), {}, model.weights, {}))
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--checkpoint nowhere", "nowhere/checkpoint.npz does not exist, wanted a checkpoint; train with --checkpoint"),
        ("--bytes 3", "the following arguments are required: --checkpoint; --help lists the options"),
        ("--checkpoint nowhere --samples 0", "argument --samples: 0 is no whole number of at least 1"),
        ("--checkpoint nowhere --bytes -1", "argument --bytes: -1 is no whole number of at least 0"),
        ("--checkpoint nowhere --inference-cuda-graph-scope block",
         "--inference-cuda-graph-scope is 'block' with --cuda-graph-impl='none', wanted 'none'; change one of the two"),
        ("--checkpoint nowhere --cuda-graph-impl whole", "--cuda-graph-impl is 'whole', wanted 'none', 'local'"),
        ("--checkpoint saved --samples 2000000 --bytes 2000",
         "num_texts * capacity is 2000000 * 2000, wanted at most 1,073,741,824"),
        ("--checkpoint nowhere --temperature nan", "--temperature is nan, wanted a finite number of at least 0"),
    ],
)
def test_errors_are_one_line(monkeypatch, capsys, folder, words, message):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(sys, "argv", ["sample.py", *words.split()])
    assert sample.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sample.py: error: {message}")


def test_the_program_prints_text_whatever_the_bytes(folder):
    """Prompts may have bytes of any encoding; graphs mean nothing on a CPU."""
    graphs = options(cuda_graph_impl="local", inference_cuda_graph_scope="block")
    prompt = os.fsdecode(b"caf\xe9 \xc3\xa9")
    run = start(1, SAMPLE, *options(checkpoint=folder, prompt=prompt, bytes=30, samples=2, temperature=2), *graphs)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("--- after step 3\ncaf\ufffd \u00e9") == 2
