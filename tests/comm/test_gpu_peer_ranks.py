"""Peer memory of real GPUs where a step fails on one rank, and what windows hold; every test is one mpiexec."""

from __future__ import annotations

import pytest
from launch import RANKS, run_ranks

pytestmark = pytest.mark.gpu

PROGRAM = RANKS / "peer_ranks.py"


def run(cupy, n, scenario, timeout=180):
    if cupy.cuda.runtime.getDeviceCount() < n:
        pytest.skip(f"needs {n} GPUs")
    return run_ranks(n, PROGRAM, scenario, str(n), timeout=timeout)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("scenario", ["short", "pool", "sizes", "close", "start-auto", "start-peer"])
def test_ranks_go_on_together(cupy, scenario, n):
    finished = run(cupy, n, scenario)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count(f"{scenario} done") == n


def test_a_rank_that_does_not_come_to_grow_a_window_ends_the_job(cupy):
    finished = run(cupy, 2, "absent")
    assert finished.returncode != 0 and "done" not in finished.stdout
    assert "making 2 windows of keys of " in finished.stderr
