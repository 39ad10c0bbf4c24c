"""The Mamba-2 mixer over NCCL ranks, one GPU each; every test is one mpiexec and every rank ends by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from test_gpu_nccl import need_gpus

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parent / "ranks" / "mamba_ranks.py"


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_ranks_together_are_one_rank(cupy, transport, n):
    need_gpus(cupy, n)
    run = run_ranks(n, PROGRAM, "gpu-cases", str(n), transport, timeout=200)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("gpu-cases done") == n
