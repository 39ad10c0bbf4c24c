"""Samples: every text is drawn from what the model says about that text alone."""

from __future__ import annotations

import checkpoint
import numpy as np
import pytest
import sample
from data import Position
from model import EOD, SIZES, VOCAB, Model
from programs import SAMPLE, options, start

import thdattn


@pytest.fixture(scope="module")
def model():
    """A model that prefers some bytes, by what stands before them: logits of about 1, either side of 0."""
    model = Model(SIZES["tiny"], thdattn.comm.init("single"), "reference")
    rng = np.random.default_rng(3)
    for x in model.params.values():
        if x.ndim == 2:
            x[...] = rng.standard_normal(x.shape) * x.shape[1] ** -0.5
    model.refresh()
    return model


def logits_alone(model, text):
    """Of the byte after one text, without any other in the pack."""
    plan = model.plan(thdattn.PackedBatch.from_lengths([len(text) + 1]), "contiguous")
    return model.logits(np.array([EOD, *text], np.int32), plan)[-1]


def test_packed_texts_do_not_see_each_other(model):
    texts = [bytearray(b"import os"), bytearray(), bytearray(b"x"), bytearray(b"class Error(Exception):\n")]
    together = sample.next_logits(model, texts)
    assert together.shape == (4, VOCAB)
    for text, logits in zip(texts, together, strict=True):
        np.testing.assert_allclose(logits, logits_alone(model, text), rtol=1e-4, atol=1e-4)


def test_temperature_0_takes_the_likeliest_byte_every_time(model):
    expected = bytearray(b"de")
    for _ in range(20):
        byte = int(logits_alone(model, expected).argmax())
        if byte == EOD:
            break
        expected.append(byte)
    assert sample.generate(model, b"de", 20, 2, 0, VOCAB, np.random.default_rng(0)) == [bytes(expected)] * 2


def test_the_same_seed_draws_the_same_texts_and_another_seed_others(model):
    def drawn(seed):
        return sample.generate(model, b"a", 10, 3, 1.0, VOCAB, np.random.default_rng(seed))

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 3, "each sample has its own draws"


def test_draws_follow_the_softmax():
    logits = np.log(np.array([0.1, 0.2, 0.7], np.float32))
    rng = np.random.default_rng(0)
    counts = np.bincount([sample.draw(logits, 1.0, 3, rng) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.7], atol=0.04)  # 5 standard deviations
    counts = np.bincount([sample.draw(logits, 0.5, 3, rng) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(counts, np.array([1, 4, 49]) / 54, atol=0.04)


def test_top_k_draws_from_the_k_likeliest_alone():
    logits = np.array([0, 3, 1, 2.9], np.float32)
    rng = np.random.default_rng(0)
    assert {sample.draw(logits, 1.0, 2, rng) for _ in range(200)} == {1, 3}
    assert {sample.draw(logits, 1.0, 1, rng) for _ in range(20)} == {1}


def test_a_text_ends_with_eod_and_the_others_go_on(model, monkeypatch):
    def scripted(model, texts):
        logits = np.zeros((len(texts), VOCAB), np.float32)
        for row, text in zip(logits, texts, strict=True):
            row[EOD if len(text) == 3 and text is not texts[0] else ord("x")] = 100
        return logits

    monkeypatch.setattr(sample, "next_logits", scripted)
    texts = sample.generate(model, b"a", 5, 3, 1.0, VOCAB, np.random.default_rng(0))
    assert texts == [b"axxxxx", b"axx", b"axx"]


def test_program_prints_text_whatever_the_bytes(model, tmp_path):
    saved = checkpoint.Checkpoint(model.config, 5, Position(0, 0), {}, model.weights, {})
    checkpoint.save(tmp_path, saved)
    run = start(1, SAMPLE, *options(checkpoint=tmp_path, prompt="é", bytes=30, samples=2, temperature=2))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("--- after step 5\n") == 2
    assert "é" in run.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--checkpoint nowhere", "nowhere/checkpoint.npz does not exist, wanted a checkpoint; train with --checkpoint"),
        ("--bytes 3", "the following arguments are required: --checkpoint; --help lists the options"),
        ("--checkpoint nowhere --samples 0", "wanted --samples and --top-k of at least 1"),
    ],
)
def test_errors_are_one_line(words, message):
    run = start(1, SAMPLE, *words.split())
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"sample.py: error: {message}")

