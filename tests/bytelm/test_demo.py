"""`make demo` as a newcomer starts it, and what it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import demo
import pytest
from launch import SOURCE

ROOT = SOURCE.parent
FEW = ("--steps", "5", "--tokens", "96", "--longest", "64", "--val-bytes", "200")


def run_demo(*words):
    command = [sys.executable, "tools/demo.py", *map(str, words)]
    environment = {**os.environ, "RANKS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_demo_keeps_its_model_draws_its_curve_and_prints_a_command_that_works(tmp_path):
    pytest.importorskip("matplotlib")
    run = run_demo(*FEW, "--checkpoint", tmp_path / "a model")
    assert run.returncode == 0, run.stderr
    assert f"The model is in {tmp_path}/a model, its curve is {tmp_path}/a model/curve.png." in run.stdout
    assert sorted(path.name for path in (tmp_path / "a model").iterdir()) == ["checkpoint.npz", "curve.png"]
    assert run.stdout.count("--- after step 5\ndef ") == 1
    pasted = re.findall(r"^    (PYTHONPATH=.*)$", run.stdout, re.MULTILINE)[0]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    again = subprocess.run(["sh", "-c", pasted], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
                           check=False)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("--- after step 5\ndef ") == 3


def test_a_second_demo_takes_another_folder_than_the_first(tmp_path):
    assert demo.free_folder(tmp_path) == tmp_path / "demo"
    for name in ("demo", "demo2"):
        (tmp_path / name).mkdir()
        assert demo.free_folder(tmp_path) == tmp_path / name, "a run that came to nothing is no model"
        (tmp_path / name / "checkpoint.npz").touch()
    assert demo.free_folder(tmp_path) == tmp_path / "demo3"
