"""The torch example as a program: it compares with torch's own attention, and finds what is wrong."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest
from launch import SOURCE, run_ranks, run_torchrun

import thdattn

torch = pytest.importorskip("torch")
sys.path.append(str(SOURCE.parent / "examples"))
torch_autograd = importlib.import_module("torch_autograd")  # not before torch is known to be there

EXAMPLE = SOURCE.parent / "examples" / "torch_autograd.py"
FIELDS = ("out", "dq", "dk", "dv")


def judged(run):
    """The names of the results that the program printed."""
    assert run.returncode == 0, run.stdout + run.stderr
    return re.findall(r"^ +(\w+) +[\d.]+ +[\d.]+e[-+]\d+$", run.stdout, re.MULTILINE)


def test_the_program_alone_finds_no_difference():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, str(EXAMPLE)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert judged(run) == list(FIELDS)


def test_two_processes_find_no_difference():
    run = run_ranks(2, EXAMPLE, timeout=240)
    assert judged(run) == list(FIELDS)
    assert "ranks: 2" in run.stdout


def test_two_processes_of_torch_distributed_find_no_difference():
    run = run_torchrun(2, EXAMPLE, timeout=240)
    assert judged(run) == list(FIELDS)
    assert "ranks: 2" in run.stdout


@pytest.mark.parametrize("culprit", ["dq", "dk", "dv"])
def test_a_wrong_result_is_named(monkeypatch, culprit):
    right = thdattn.CPAttention.backward

    def wrong(self, dout, saved):
        gradients = dict(zip(FIELDS[1:], right(self, dout, saved), strict=True))
        gradients[culprit] = gradients[culprit] * 2
        return tuple(gradients.values())

    monkeypatch.setattr(thdattn.CPAttention, "backward", wrong)
    with pytest.raises(ValueError, match=f"{culprit} of rank 0 differs from torch's attention by"):
        torch_autograd.compare(thdattn.comm.init("single"))


@pytest.mark.gpu
def test_two_gpus_find_no_difference(cupy):
    if not torch.cuda.is_available() or cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs torch with CUDA, and 2 GPUs")
    for start in (run_ranks, run_torchrun):
        run = start(2, EXAMPLE, timeout=240)
        assert judged(run) == list(FIELDS)
        assert "ranks: 2, cuda:0" in run.stdout
