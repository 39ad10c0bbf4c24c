"""The Mamba-2 mixer over real MPI ranks with host arrays, each test one mpiexec."""

from __future__ import annotations

import pytest
from launch import RANKS, all_done, run_ranks

PROGRAM = RANKS / "mamba_ranks.py"


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_ranks_together_are_the_recurrence(n):
    all_done(run_ranks(n, PROGRAM, "cases", str(n), timeout=120), n, "cases")


def test_bad_input_on_one_rank_ends_all_ranks_with_its_message():
    run = run_ranks(2, PROGRAM, "bad-input", "2", timeout=60)
    assert run.returncode != 0
    assert "ValueError: zxbcdt has shape (99, 48), wanted (100, 48)" in run.stderr
    assert "done" not in run.stdout
