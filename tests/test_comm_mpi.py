"""The MPI backend on real ranks, each test one mpiexec."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import SOURCE, mpiexec, run_ranks

PROGRAM = Path(__file__).parent / "ranks" / "comm_contract.py"


@pytest.mark.parametrize("n", [1, 2, 4])
def test_mpi_ranks_keep_the_contract(n):
    run = run_ranks(n, PROGRAM, "contract", "mpi", str(n))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("contract on mpi done") == n


def test_agree_raises_on_every_rank():
    run = run_ranks(4, PROGRAM, "agree", "mpi", "4")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("rank 0 has 0, but rank 2 has 1, rank 3 has 1") == 4


@pytest.mark.parametrize(
    ("scenario", "message"),
    [("failing-rank", "ValueError: rank 1 had bad luck"), ("failing-rank-leaves-by-exit", "")],
)
def test_failing_rank_ends_the_job_soon(scenario, message):
    began = time.perf_counter()
    run = run_ranks(4, PROGRAM, scenario, "mpi", "4", timeout=30)
    assert run.returncode != 0
    assert time.perf_counter() - began < 15
    assert message in run.stderr
    assert "done" not in run.stdout


def test_failing_rank_ends_the_job_even_without_m_mpi4py():
    command = [*mpiexec(2), sys.executable, str(PROGRAM), "failing-rank", "mpi", "2"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
    assert run.returncode != 0
    assert "ValueError: rank 1 had bad luck" in run.stderr


def test_auto_under_the_launcher_is_one_job_of_all_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = run_ranks(2, PROGRAM, "contract", "auto", "2")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("contract on mpi done") == 2


@pytest.mark.parametrize(("variable", "value"), [("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "3")])
def test_launcher_of_another_make_than_the_library_is_refused(variable, value):
    mpiexec(1)  # skips without MPI
    # MPI starts as one rank; then the environment claims a launcher that this MPI did not understand.
    program = (
        f"import os, mpi4py.MPI, thdattn.comm\nos.environ[{variable!r}] = {value!r}\nthdattn.comm.init()"
    )
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("PMI", "OMPI", "MV2"))}
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**clean, "PYTHONPATH": str(SOURCE)},
    )
    assert run.returncode != 0
    assert "ranks but MPI sees 1: launcher and MPI library" in run.stderr
