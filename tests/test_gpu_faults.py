"""No hang on GPUs: what test_faults.py shows of host arrays, for ranks that wait inside NCCL, or inside a graph."""

from __future__ import annotations

import re

import pytest
from faults import PROGRAM, Job, said
from launch import run_ranks

pytestmark = pytest.mark.gpu

TIMEOUT = 10.0
AT_START = 2.0  # of which a start has five times as much
PLACES = pytest.mark.parametrize("place", ["forward", "backward", "heads", "exchange", "replay"])


@pytest.fixture(scope="module", autouse=True)
def _two_gpus_and_their_kernels(cupy):
    """Compiles what the programs call, which may take one rank longer than the other waits."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs 2 GPUs")
    for place in ("nowhere", "heads", "replay"):
        run = run_ranks(2, PROGRAM, "nothing", place, "nccl", "200", timeout=240)
        assert run.returncode == 0 and run.stdout == "" and run.stderr.count("ends well") == 2, run.stderr


@pytest.fixture(params=[2, 4])
def ranks(request, cupy):
    """How many there are, each with a GPU."""
    if (found := cupy.cuda.runtime.getDeviceCount()) < request.param:
        pytest.skip(f"needs {request.param} GPUs, found {found}")
    return request.param


def operation(place):
    return ("replay of step" if place == "replay" else r"\w[^\n]*") + r", number \d+ of this comm,"


@PLACES
def test_rank_that_stops_ends_all_at_the_deadline(place, ranks):
    errors = Job(ranks, "stop", place, "nccl", TIMEOUT).end(TIMEOUT)
    others = [said(rank, ranks, operation(place), TIMEOUT) for rank in range(ranks) if rank != 1]
    assert any(other.search(errors) for other in others), errors
    assert f"rank 1 of {ranks}" not in errors


@PLACES
def test_rank_that_leaves_out_a_call_ends_all_at_the_deadline(place, ranks):
    """It goes on with its next call, which takes the place of the one left out, until it is one short."""
    errors = Job(ranks, "skip", place, "nccl", TIMEOUT).end(TIMEOUT)
    waits = [said(rank, ranks, operation(place), TIMEOUT) for rank in range(ranks) if rank != 1]
    waits += [said(1, ranks, "barrier, number .* of this comm,", TIMEOUT)]
    assert any(wait.search(errors) for wait in waits), errors


@PLACES
@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_rank_that_dies_or_raises_ends_all_at_once(kind, place, ranks):
    errors = Job(ranks, kind, place, "nccl", 1000.0).end(0)
    assert ("ValueError: rank 1 had bad luck" in errors) == (kind == "exception")
    assert not re.search("^thdattn: ", errors, re.MULTILINE)


@pytest.mark.parametrize("kind", ["stop", "absent"])
@pytest.mark.parametrize(("place", "waits_in"), [
    ("start", "the start of MPI"), ("init", r"init, number 1 of this comm,"),
    ("nccl", r"the start of NCCL, number 1 of this comm,"),
])  # fmt: skip
def test_rank_that_does_not_come_at_the_start_ends_all_at_its_deadline(kind, place, waits_in):
    errors = Job(2, kind, place, "nccl", AT_START).end(5 * AT_START)
    assert said(0, 0 if place == "start" else 2, waits_in, 5 * AT_START).search(errors), errors


@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_rank_that_dies_or_raises_in_the_start_of_nccl_ends_all_at_once(kind):
    errors = Job(2, kind, "nccl", "nccl", 1000.0).end(0)
    assert ("ValueError: rank 1 had bad luck" in errors) == (kind == "exception")


def test_long_work_before_a_collective_is_no_fault():
    """Each rank's GPU computes for three times the timeout before it comes to what it has enqueued at once."""
    run = run_ranks(2, PROGRAM, "work", "forward", "nccl", "3", timeout=120)
    assert run.returncode == 0 and run.stdout == "" and run.stderr.count("ends well") == 2, run.stderr
