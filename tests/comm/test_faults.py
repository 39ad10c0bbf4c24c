"""No hang: a rank that dies, stops, raises, leaves out a call or never comes ends all ranks, wherever they are."""

from __future__ import annotations

import os
import time

import pytest
from faults import HOST, PROCESS, PROGRAM, Job, ends, missed, said, side_processes
from launch import run_ranks

TIMEOUT = 6.0  # a missing rank is noticed after 2 s, see docs/failures.md
COLLECTIVE = (r"(?:all_gather|reduce_scatter|all_reduce|exchange \([^)]*\)|barrier)(?: of \([\d, ]+\) \w+)?, "
              r"number \d+ of this comm,")
STOPPED = r"has been stopped \(SIGSTOP\) for [12] s"


@pytest.fixture(scope="module")
def missing():
    """What was said where rank 1 of 2 or 3 stops at a place, alone or (freeze) with its side process."""
    jobs = {place: Job(2, "stop", place, "mpi", TIMEOUT) for place in ("forward", "backward", "heads", "exchange")}
    jobs["group"], jobs["of three"] = Job(3, "stop", "group", "mpi", TIMEOUT), Job(3, "stop", "forward", "mpi", TIMEOUT)
    jobs["freeze"] = Job(2, "freeze", "forward", "mpi", TIMEOUT)
    return ends(jobs, TIMEOUT)


@pytest.mark.parametrize("place", ["forward", "backward", "heads", "exchange"])
def test_rank_that_is_stopped_is_named_long_before_the_deadline(missing, place):
    found = missed(2, COLLECTIVE, STOPPED).search(missing[place])
    assert found, missing[place]
    assert 1 < float(found[1]) < 5


def test_both_of_the_others_name_the_rank_that_is_stopped(missing):
    assert missed(3, COLLECTIVE, STOPPED).search(missing["of three"]), missing["of three"]


def test_rank_of_a_group_is_named_by_its_number_there_or_in_the_job(missing):
    """Rank 1 of 3 is rank 0 of a group, in which rank 2 waits; rank 0 waits for both in the job's comm."""
    errors = missing["group"]
    group = f"thdattn: rank 1 of 2 of a group, 2 of 3 in the job, on {HOST}: "
    assert f"rank 0 of 2 on {HOST} has been stopped" in errors if group in errors else missed(
        3, "barrier, number .* of this comm,", STOPPED).search(errors), errors


def test_rank_whose_side_process_is_silent_is_named_before_the_deadline(missing):
    found = missed(2, COLLECTIVE, "has not answered for [12] s").search(missing["freeze"])
    assert found and float(found[1]) < 5, missing["freeze"]


LATE = {
    ("leave", "forward"): "is late: it came to the end of its program [56] s ago",
    ("skip", "forward"): "is (?:late: it has left|elsewhere: it has waited in) .*",
    ("hold", "forward"): r"is late: it has left \w+, number \d+ of this comm, [56] s ago, and its main thread sleeps",
    ("loop", "backward"): r"is late: it has left \w+, number \d+ of this comm, [56] s ago, and its main thread runs",
    ("disk", "forward"): r"is late: it has left .* ago, and its main thread waits for a disk or for memory that is .*",
    ("skip", "elsewhere"): r"is elsewhere: it has waited in agree, number \d+ of this comm, for [56] s",
}


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """What was said at the deadline for a rank 1 that is alive."""
    pipe = tmp_path_factory.mktemp("late") / "pipe"
    os.mkfifo(pipe)
    os.environ["FAULT_PIPE"] = str(pipe)
    try:
        return ends({fault: Job(2, *fault, "mpi", TIMEOUT) for fault in LATE}, TIMEOUT)
    finally:
        os.close(os.open(pipe, os.O_RDWR))  # the child that opens it goes on
        del os.environ["FAULT_PIPE"]


@pytest.mark.parametrize("fault", LATE, ids="-".join)
def test_rank_that_is_late_is_named_at_the_deadline_with_where_it_is(late, fault):
    found = said(0, 2, COLLECTIVE, TIMEOUT, f"rank 1 of 2 on {HOST} {LATE[fault]}").search(late[fault])
    assert found, late[fault]
    assert TIMEOUT <= float(found[1]) < TIMEOUT + 2


def test_rank_that_computes_for_long_with_the_lock_of_python_is_not_missing():
    """As a compilation does: for longer than an answer may take, and less than the deadline."""
    run = run_ranks(2, PROGRAM, "pause", "forward", "mpi", f"{TIMEOUT:g}")
    assert run.returncode == 0 and run.stderr.count("ends well") == 2 and "thdattn: " not in run.stderr, run.stderr


def test_ranks_of_several_machines_reach_each_other(monkeypatch):
    monkeypatch.setenv("FAULT_HOSTS", "1")
    errors = Job(2, "stop", "forward", "mpi", TIMEOUT).end(TIMEOUT)
    assert missed(2, COLLECTIVE, STOPPED, r"node\d").search(errors), errors
    assert "rank 1 of 2 on node1 has been stopped" in errors


@pytest.mark.parametrize(("kind", "place"), [("kill", "forward"), ("exception", "backward")])
def test_rank_that_dies_or_raises_ends_all_at_once(kind, place):
    errors = Job(2, kind, place, "mpi", 1000.0).end(0)
    assert ("ValueError: rank 1 had bad luck" in errors) == (kind == "exception")
    assert "thdattn: " not in errors


def test_rank_that_dies_in_an_exchange_ends_all_at_once():
    assert "thdattn: " not in Job(2, "kill", "exchange", "mpi", 1000.0).end(0)


def test_rank_that_does_not_come_within_init_ends_all_at_its_deadline():
    for errors in ends({kind: Job(2, kind, "init", "mpi", 1.0) for kind in ("stop", "absent")}, 5).values():
        assert said(0, 2, "init, number 1 of this comm,", 5).search(errors), errors


@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_rank_that_dies_or_raises_within_init_ends_all_at_once(kind):
    errors = Job(2, kind, "init", "mpi", 1000.0).end(0)
    assert ("ValueError: rank 1 had bad luck" in errors) == (kind == "exception")


def test_rank_that_never_calls_init_ends_all_at_the_deadline_of_the_start():
    errors = ends({kind: Job(2, kind, "start", "mpi", 1.0) for kind in ("absent", "exception")}, 5)
    assert said(0, 0, "the start of MPI", 5).search(errors["absent"]), errors["absent"]
    assert "ValueError: rank 1 had bad luck" in errors["exception"]  # MPICH's launcher does not notice


def test_program_in_which_nothing_fails_ends_well_and_leaves_no_process():
    run = run_ranks(2, PROGRAM, "nothing", "nowhere", "mpi", "60")
    assert run.returncode == 0 and run.stdout == "" and run.stderr.count("ends well") == 2, run.stderr
    begun, left = time.monotonic(), [1]
    while left and time.monotonic() < begun + 3:
        left = [side for rank in PROCESS.findall(run.stderr) for side in side_processes(rank)]
    assert left == []
