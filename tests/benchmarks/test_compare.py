"""Comparison of source trees without a GPU, by processes that fake their times."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("cupy")

import compare

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
