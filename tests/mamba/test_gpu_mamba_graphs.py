"""The Mamba-2 mixer in CUDA graphs: replays are the eager results bit for bit, whatever the pack."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from ranks import graph_ranks

import thdattn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]


def test_packs_through_one_graph_are_the_eager_results(cupy):
    """Packs that do not fit run eagerly, and are counted."""
    with thdattn.comm.init("single") as comm, cupy.cuda.Stream(non_blocking=True):
        graph_ranks.replay_mixers(comm, cupy)


@pytest.mark.parametrize("n", [2, 4])
def test_the_same_with_states_that_travel_in_the_graph(cupy, n):
    found = cupy.cuda.runtime.getDeviceCount()
    if found < n:
        pytest.skip(f"needs {n} GPUs, found {found}")
    finished = run_ranks(n, Path(graph_ranks.__file__), "mixers", str(n), timeout=200)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("mixers done") == n
