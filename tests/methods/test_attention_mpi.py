"""Attention over real MPI ranks with host arrays, each test one mpiexec."""

from __future__ import annotations

import pytest
from launch import RANKS, all_done, run_ranks

PROGRAM = RANKS / "attention_ranks.py"


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_together_are_the_oracle(n):
    all_done(run_ranks(n, PROGRAM, "cases", "mpi", str(n), timeout=120), n, "cases on mpi")


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_every_method_is_the_oracle(n):
    run = run_ranks(n, PROGRAM, "disagree,methods", "mpi", str(n), timeout=120)
    all_done(run, n, "methods on mpi")
    assert run.stdout.count("the plan is not the same on all ranks") == n, "a batch that differs raises on every rank"
    assert n == 2 or run.stdout.count("cu_seqlens[2] is 96 (ranks 0, 1, 2), 128 (rank 3)") == 4


def test_bad_input_on_one_rank_ends_all_ranks_with_its_message():
    run = run_ranks(4, PROGRAM, "bad-input", "mpi", "4", timeout=60)
    assert run.returncode != 0
    assert "ValueError: q has shape" in run.stderr and "this rank's rows" in run.stderr
    assert "done" not in run.stdout
    assert "has not completed within" not in run.stderr
