"""Attention over NCCL ranks, one GPU each; every test is one mpiexec and every rank ends by itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launch import run_ranks

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parent / "ranks" / "attention_ranks.py"


def need_gpus(cupy, n):
    found = cupy.cuda.runtime.getDeviceCount()
    if found < n:
        pytest.skip(f"needs {n} GPUs, found {found}")


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ranks_together_are_the_oracle(cupy, n):
    need_gpus(cupy, n)
    run = run_ranks(n, PROGRAM, "cases", "nccl", str(n), timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("cases on nccl done") == n


@pytest.mark.parametrize("n", [2, 4])
def test_bad_input_on_one_rank_ends_all_ranks_with_its_message(cupy, n):
    need_gpus(cupy, n)
    began = time.perf_counter()
    run = run_ranks(n, PROGRAM, "bad-input", "nccl", str(n), timeout=180)
    assert run.returncode != 0
    assert "ValueError: q has shape" in run.stderr
    assert "done" not in run.stdout
    assert time.perf_counter() - began < 150


def test_batch_that_differs_on_one_rank_raises_on_every_rank(cupy):
    need_gpus(cupy, 2)
    run = run_ranks(2, PROGRAM, "disagree", "nccl", "2", timeout=180)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("the plan's batch, sharding and attention is not the same on all ranks") == 2
