"""Comparison of source trees without a GPU, by processes that fake their times."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

pytest.importorskip("cupy")

import accuracy
import compare
from workloads import CASES, Case

import thdattn
from thdattn import oracle

FAKE = """
import json, sys, time
scale = float(sys.argv[1])
calls = 0
for line in sys.stdin:
    question = json.loads(line)
    do, answer = question.pop("do"), {}
    if do == "prepare" and question["direction"] == sys.argv[2]:
        sys.exit(7)
    if do == "prepare" and question["case"] == "481x34":
        answer = {"error": "ValueError: no"}
    elif do == "prepare":
        answer = {"ms": scale, "tflop": 0.5}
    elif do == "capture":
        answer = {"ms": question["ms"]}
    elif do == "time":
        calls += 1
        answer = {"ms": [scale, scale, 9 * scale] if calls % 2 else [scale]}
    elif do == "hang":
        time.sleep(60)
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def make_tree():
    made = []

    def make(name, scale, dies_at="never", patience=30.0):
        made.append(compare.Tree(name, [sys.executable, "-c", FAKE, str(scale), dies_at], os.environ, patience))
        return made[-1]

    yield make
    for tree in made:
        tree.close()


def test_times_and_ratios_are_those_of_the_trees(make_tree):
    trees = [make_tree("base", 2.0), make_tree("new", 2.5)]
    tflop, samples = compare.race(trees, 3, "1x16384", "ours", "backward")
    assert (tflop, samples) == (0.5, {"base": [2.0] * 3, "new": [2.5] * 3})
    assert compare.row(["base", "new"], tflop, samples) == ["250.0", "200.0", "0.800 (0.800..0.800)"]
    cells = compare.row(["base", "new"], 1.0, {"base": [1.0, 2.0, 4.0], "new": [2.0, 2.0, 2.0]})
    assert cells == ["500.0", "500.0", "1.000 (0.500..2.000)"], "ratios are of rounds"


def test_a_tree_that_dies_or_refuses_is_left_out_and_comes_back(make_tree, capfd):
    trees = [make_tree("base", 2.0, dies_at="backward"), make_tree("new", 2.5)]
    assert set(compare.race(trees, 2, "1x16384", "ours", "backward")[1]) == {"new"}
    assert "tree 'base' ended without an answer" in capfd.readouterr().err
    assert set(compare.race(trees, 2, "1x16384", "ours", "forward")[1]) == {"base", "new"}
    assert compare.race(trees, 2, "481x34", "ours", "forward") == (0.0, {})
    assert "tree 'new': ValueError: no" in capfd.readouterr().err


def test_table_ends_with_the_lowest_ratio():
    measured = {
        ("1x16384", "ours", "forward"): (1.0, {"base": [1.0], "new": [0.5]}),
        ("4x4096", "deterministic", "backward"): (1.0, {"base": [1.0], "new": [1.25]}),
        ("64x256", "ours", "backward"): (0.0, {}),
    }
    lines = [line.replace("|", " ") for line in compare.table(["base", "new"], measured).splitlines()[1:]]
    assert lines[2].split() == ["4x4096", "deterministic", "backward", "1000.0", "800.0", "0.800", "(0.800..0.800)"]
    assert lines[3].split()[2:] == ["-", "-", "-"]
    assert lines[4].split() == ["lowest", "ratio", "0.800"]


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 50, 10**6])
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", (7, 1, 30), heads=4, kv_heads=2, head_dim=8, v_head_dim=4),
        Case("full", (9, 5), heads=2, kv_heads=2, head_dim=8, v_head_dim=8, causal=False),
        Case("window", (40, 3), heads=2, kv_heads=1, head_dim=4, v_head_dim=4, window=(6, 0)),
        Case("both sides", (40, 3), heads=2, kv_heads=1, head_dim=4, v_head_dim=4, causal=False, window=(6, 2)),
        Case("other keys", (4, 1, 6), heads=2, kv_heads=1, head_dim=4, v_head_dim=4, keys=(9, 5, 6)),
    ],
    ids=lambda case: case.name,
)
def test_float64_answer_is_the_oracles(case, at_once, monkeypatch):
    """Whatever number of rows of scores it has at a time."""
    monkeypatch.setattr(accuracy, "SCORES", at_once)
    rng = np.random.default_rng(0)
    widths = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim),
              (case.heads, case.v_head_dim))
    rows = case.total_tokens, case.total_keys, case.total_keys, case.total_tokens
    inputs = [rng.standard_normal((num_rows, *width)) for num_rows, width in zip(rows, widths, strict=True)]
    wanted = oracle.packed_attention(case.batch(), *inputs, causal=case.causal, window=case.window,
                                     key_batch=case.key_batch())
    for found, name in zip(accuracy.exact(case, inputs, np), accuracy.RESULTS, strict=True):
        np.testing.assert_allclose(found, getattr(wanted, name), rtol=1e-12, atol=1e-12)


def test_errors_worked_by_hand():
    zeros = np.zeros(2)
    found = [np.array([3.0, 4.5]), np.array([np.nan, 1.0]), zeros, zeros]
    errors = accuracy.errors(found, [np.array([3.0, 4.0]), np.ones(2), zeros + 1, zeros + 2])
    assert errors["out"] == pytest.approx((0.1, 0.5))
    assert np.isnan(errors["dq"]).all()
    assert errors["dv"] == pytest.approx((1.0, 2.0))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_small_versions_keep_widths_mask_and_group(case):
    small = accuracy.small(case)
    assert 1 <= small.total_tokens <= small.total_keys <= accuracy.ROWS and small.heads <= accuracy.HEADS
    assert small.heads * case.kv_heads == case.heads * small.kv_heads
    kept = "head_dim", "v_head_dim", "causal", "window"
    assert all(getattr(small, name) == getattr(case, name) for name in kept)
    assert small.total_keys > accuracy.ROWS // 2 or len(small.lengths) > 8
    assert isinstance(small.batch(), thdattn.PackedBatch)
