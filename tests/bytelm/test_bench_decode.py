"""The benchmark of decode without a GPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from launch import SOURCE

sys.path.append(str(SOURCE.parent / "benchmarks"))

import bench_decode
from model import Model
from sizes import EOD, SIZES, VOCAB

import thdattn


@pytest.mark.parametrize("size", ["tiny", "tiny-hybrid"])
@pytest.mark.parametrize("way", bench_decode.WAYS)
def test_every_way_makes_a_row(way, size):
    row = bench_decode.sampling(size, 2, 20, way, "reference", steps=2)
    assert (row["what"], row["texts"], row["bytes"], row["way"]) == (size, "2", "20", way)
    assert float(row["bytes_per_s"]) == pytest.approx(2e3 / float(row["ms"]), rel=0.01)
    assert int(row["samples"]) == bench_decode.ROUNDS


def test_the_old_way_draws_from_what_the_forward_says(monkeypatch):
    model = Model(SIZES["tiny"], thdattn.comm.init("single"), "reference")
    seen = []

    def logits(tokens, plan):
        seen.append(tokens.tolist())
        made = np.zeros((len(tokens), VOCAB), np.float32)
        made[2, 7] = made[6, 9] = 1000
        return made

    monkeypatch.setattr(model, "logits", logits)
    step = bench_decode.recomputed_step(model, [b"ab", b"cde"], np.random.default_rng(0))
    assert step() == [7, 9]
    assert seen == [[EOD, *b"ab", EOD, *b"cde"]]
