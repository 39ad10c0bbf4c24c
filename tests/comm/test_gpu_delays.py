"""Ranks and streams that are late at random give the bits of the same calls one after another, on real GPUs."""

from __future__ import annotations

import pytest
from launch import RANKS, run_ranks
from test_gpu_nccl import need_gpus

pytestmark = pytest.mark.gpu

PROGRAM = RANKS / "delay_ranks.py"


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("transport", ["peer", "nccl", "machines"])
def test_whoever_is_late_the_bits_are_the_same(cupy, monkeypatch, transport, n):
    need_gpus(cupy, n)
    if transport == "machines":
        monkeypatch.setenv("RANKS_PER_MACHINE", str(n // 2))
        transport = "auto"
    run = run_ranks(n, PROGRAM, transport, str(n), timeout=400)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"delays on {transport} done") == n
