"""Comparison of source trees without a GPU, by processes that fake their times."""

from __future__ import annotations

import shutil
from concurrent.futures import BrokenExecutor, Executor, Future

import pytest
from launch import SOURCE

pytest.importorskip("cupy")

import compare


class Tree(Executor):
    """Process whose calls take `ms`; it dies in the direction `dies_at`, and refuses one case."""

    def __init__(self, ms, dies_at="never"):
        self.ms, self.dies_at, self.dead, self.calls = ms, dies_at, False, 0

    def submit(self, call, case, way, do, *arguments):
        self.dead = self.dead or (do == "prepare" and arguments == (self.dies_at,))
        if self.dead and do != "prepare":
            raise BrokenExecutor("gone")
        made = Future()
        if self.dead or case == "481x34":
            made.set_exception(BrokenExecutor("dies") if self.dead else ValueError("no"))
        else:
            made.set_result({"prepare": (self.ms, 0.5), "capture": None, "time": self.ms}[do])
        return made


def test_times_and_ratios_are_those_of_the_trees():
    trees = {"base": Tree(2.0), "new": Tree(2.5)}
    tflop, samples = compare.race(trees, 3, "1x16384", "ours", "backward")
    assert (tflop, samples) == (0.5, {"base": [2.0] * 3, "new": [2.5] * 3})
    assert compare.row(["base", "new"], tflop, samples) == ["250.0", "200.0", "0.800 (0.800..0.800)"]
    cells = compare.row(["base", "new"], 1.0, {"base": [1.0, 2.0, 4.0], "new": [2.0, 2.0, 2.0]})
    assert cells == ["500.0", "500.0", "1.000 (0.500..2.000)"], "ratios are of rounds"


def test_a_tree_that_dies_or_refuses_is_left_out(capfd):
    trees = {"base": Tree(2.0, dies_at="backward"), "new": Tree(2.5)}
    assert set(compare.race(trees, 2, "1x16384", "ours", "backward")[1]) == {"new"}
    assert "tree 'base': BrokenExecutor: dies" in capfd.readouterr().err
    with pytest.raises(BrokenExecutor):
        trees["base"].submit(compare.ask, "1x16384", "ours", "time")
    assert compare.submitted(trees["base"], "1x16384", "ours", "time").exception()
    assert compare.race({"new": Tree(2.5)}, 2, "481x34", "ours", "forward") == (0.0, {})
    assert "tree 'new': ValueError: no" in capfd.readouterr().err


def test_a_process_imports_the_package_of_its_tree(tmp_path):
    shutil.copytree(SOURCE / "thdattn", tmp_path / "thdattn", ignore=shutil.ignore_patterns("__pycache__"))
    with compare.process(tmp_path) as tree:
        assert tree.submit(compare.about).result()[0] == str(tmp_path / "thdattn")
    with pytest.raises(RuntimeError, match=r"imports .*, wanted .*elsewhere/thdattn; uninstall"):
        compare.process(tmp_path / "elsewhere")


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
