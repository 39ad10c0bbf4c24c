"""No hang on GPUs: what test_faults.py shows of host arrays, for ranks that wait inside NCCL, or inside a graph."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress

import launch
import pytest
from faults import HOST, PROGRAM, Job, missed, said, until
from launch import need_gpus, run_ranks

pytestmark = pytest.mark.gpu

TIMEOUT = 10.0  # a missing rank is noticed after about 3 s
AT_START = 2.0  # of which a start has five times as much
PLACES = pytest.mark.parametrize("place", ["forward", "backward", "heads", "exchange", "replay"])


@pytest.fixture(scope="module", autouse=True)
def _two_gpus_and_their_kernels(cupy):
    """Compiles what the programs call, which may take one rank longer than the other waits."""
    need_gpus(cupy, 2)
    for place in ("nowhere", "heads", "replay"):
        run = run_ranks(2, PROGRAM, "nothing", place, "nccl", "200", timeout=240)
        assert run.returncode == 0 and run.stdout == "" and run.stderr.count("ends well") == 2, run.stderr


@pytest.fixture(params=[2, 4])
def ranks(request, cupy):
    """How many there are, each with a GPU."""
    need_gpus(cupy, request.param)
    return request.param


def operation(place):
    return ("replay of step" if place == "replay" else r"\w[^\n]*") + r", number \d+ of this comm,"


@PLACES
def test_rank_that_is_stopped_is_named_before_the_deadline(place, ranks):
    errors = Job(ranks, "stop", place, "nccl", TIMEOUT).end(TIMEOUT)
    found = missed(ranks, operation(place), r"has been stopped \(SIGSTOP\) for \d s").search(errors)
    assert found and float(found[1]) < TIMEOUT - 1, errors


@pytest.mark.parametrize(("kind", "thread"), [("loop", "runs"), ("hold", "sleeps")])
@pytest.mark.parametrize("place", ["forward", "backward", "replay"])
def test_rank_that_is_late_is_named_at_the_deadline_with_where_its_gpu_is(kind, thread, place):
    errors = Job(2, kind, place, "nccl", TIMEOUT).end(TIMEOUT)
    where = rf"is late: (?:its GPU|it) has left \w.*, number \d+ of this comm, \d+ s ago, and its main thread {thread}"
    found = said(0, 2, operation(place), TIMEOUT, f"rank 1 of 2 on {HOST} {where}").search(errors)
    assert found and TIMEOUT <= float(found[1]) < TIMEOUT + 2, errors


@pytest.mark.parametrize("place", ["forward", "replay"])
def test_rank_that_computes_for_long_with_the_lock_of_python_is_not_missing(place):
    run = run_ranks(2, PROGRAM, "pause", place, "nccl", f"{TIMEOUT:g}", timeout=120)
    assert run.returncode == 0 and run.stderr.count("ends well") == 2 and "thdattn: " not in run.stderr, run.stderr


def test_rank_of_torchrun_that_is_stopped_is_named():
    job = launch.start([*launch.torchrun(2), str(PROGRAM.with_name("torch_faults.py")), "stop", "nccl", "30"])
    said = ""
    try:
        said = "".join(until(job.stderr, "thdattn: rank 0 of 2 .* waits in vain"))
    finally:
        launch.end(job)
        for process in re.findall(r"rank 1 is process (\d+)", said):
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    assert re.search(r"rank 1 of 2 on \S+ has been stopped \(SIGSTOP\) for \d+ s; its last operation was", said), said


@PLACES
def test_rank_that_leaves_out_a_call_ends_all_at_the_deadline(place, ranks):
    """It goes on with its next call, which takes the place of the one left out, until it is one short."""
    errors = Job(ranks, "skip", place, "nccl", TIMEOUT).end(TIMEOUT)
    waits = [said(rank, ranks, operation(place), TIMEOUT, ".*") for rank in range(ranks) if rank != 1]
    waits += [said(1, ranks, "barrier, number .* of this comm,", TIMEOUT, ".*")]
    assert any(wait.search(errors) for wait in waits), errors


@PLACES
@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_rank_that_dies_or_raises_ends_all_at_once(kind, place, ranks):
    errors = Job(ranks, kind, place, "nccl", 1000.0).end(0)
    assert ("ValueError: rank 1 had bad luck" in errors) == (kind == "exception")
    assert not re.search("^thdattn: ", errors, re.MULTILINE)


@pytest.mark.parametrize(("kind", "place", "waits_in"), [
    ("stop", "start", "the start of MPI"), ("absent", "start", "the start of MPI"),
    ("stop", "init", r"init, number 1 of this comm,"), ("absent", "init", r"init, number 1 of this comm,"),
    ("absent", "nccl", r"the start of NCCL, number 2 of this comm,"),
])
def test_rank_that_does_not_come_at_the_start_ends_all_at_its_deadline(kind, place, waits_in):
    errors = Job(2, kind, place, "nccl", AT_START).end(5 * AT_START)
    assert said(0, 0 if place == "start" else 2, waits_in, 5 * AT_START, ".*").search(errors), errors


def test_rank_that_is_stopped_in_the_start_of_nccl_is_named():
    errors = Job(2, "stop", "nccl", "nccl", AT_START).end(5 * AT_START)
    assert missed(2, "the start of NCCL, number 2 of this comm,", "has been stopped .*").search(errors), errors


@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_rank_that_dies_or_raises_in_the_start_of_nccl_ends_all_at_once(kind):
    errors = Job(2, kind, "nccl", "nccl", 1000.0).end(0)
    assert ("ValueError: rank 1 had bad luck" in errors) == (kind == "exception")


def test_long_work_before_a_collective_is_no_fault():
    """Each rank's GPU computes for three times the timeout before it comes to what it has enqueued at once."""
    run = run_ranks(2, PROGRAM, "work", "forward", "nccl", "3", timeout=120)
    assert run.returncode == 0 and run.stdout == "" and run.stderr.count("ends well") == 2, run.stderr


@pytest.fixture
def two_machines(monkeypatch):
    """Each rank is a machine; NCCL carries keys beside kernels, by sockets."""
    monkeypatch.setenv("RANKS_PER_MACHINE", "1")
    run = run_ranks(2, PROGRAM, "nothing", "ahead", "nccl", "200", timeout=240)
    assert run.returncode == 0 and run.stderr.count("ends well") == 2, run.stderr
    return r"host\d"


BETWEEN = pytest.mark.parametrize("place", ["ahead", "forward", "backward", "replay"])


@BETWEEN
def test_rank_of_another_machine_that_is_stopped_is_named(two_machines, place):
    errors = Job(2, "stop", place, "nccl", TIMEOUT).end(TIMEOUT)
    found = missed(2, operation(place), r"has been stopped \(SIGSTOP\) for \d s", two_machines).search(errors)
    assert found and float(found[1]) < TIMEOUT - 1, errors


@BETWEEN
def test_rank_of_another_machine_that_is_late_ends_all_at_the_deadline(two_machines, place):
    errors = Job(2, "loop", place, "nccl", TIMEOUT).end(TIMEOUT)
    assert re.search(rf"thdattn: rank 0 of 2 on {two_machines}: .* has not completed within {TIMEOUT:g} s "
                     rf"\(waited .* s\), ending all ranks: rank 1 of 2 on {two_machines} is late: ", errors), errors


@BETWEEN
@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_rank_of_another_machine_that_dies_or_raises_ends_all_at_once(two_machines, kind, place):
    errors = Job(2, kind, place, "nccl", 1000.0).end(0)
    assert ("ValueError: rank 1 had bad luck" in errors) == (kind == "exception")
