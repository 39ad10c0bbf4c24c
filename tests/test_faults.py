"""No hang: a rank that dies, stops, raises, leaves out a call or never comes ends all ranks, wherever they are."""

from __future__ import annotations

import pytest
from faults import PROGRAM, Job, ends, said
from launch import run_ranks

TIMEOUT = 6.0
COLLECTIVE = (r"(all_gather|reduce_scatter|all_reduce|exchange \([^)]*\)|barrier)( of \([\d, ]+\) \w+)?, "
              r"number \d+ of this comm,")


@pytest.mark.parametrize(("kind", "places"), [
    ("stop", ("forward", "backward", "heads")), ("skip", ("forward", "backward")), ("leave", ("forward",)),
])  # fmt: skip
def test_rank_that_stops_or_leaves_or_leaves_out_a_call_ends_all_at_the_deadline(kind, places):
    jobs = {place: Job(2, kind, place, "mpi", TIMEOUT) for place in places}
    for errors in ends(jobs, TIMEOUT).values():
        found = said(0, 2, COLLECTIVE, TIMEOUT).search(errors)
        assert found, errors
        assert TIMEOUT <= float(found[3]) < TIMEOUT + 2
        assert kind == "skip" or "rank 1 of 2" not in errors


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_rank_that_dies_or_raises_ends_all_at_once(kind, place):
    errors = Job(2, kind, place, "mpi", 1000.0).end(0)
    assert ("ValueError: rank 1 had bad luck" in errors) == (kind == "exception")
    assert "thdattn: " not in errors


def test_rank_that_dies_in_an_exchange_ends_all_at_once():
    assert "thdattn: " not in Job(2, "kill", "exchange", "mpi", 1000.0).end(0)


@pytest.fixture(scope="module")
def stopped():
    """What was said where rank 1 stops: of 2 before an exchange; of 3 before a gather, and in a group of two."""
    of = {"exchange": 2, "forward": 3, "group": 3}
    return ends({place: Job(ranks, "stop", place, "mpi", TIMEOUT) for place, ranks in of.items()}, TIMEOUT)


def test_rank_that_stops_before_an_exchange_ends_all_at_the_deadline(stopped):
    what = r"exchange \(1 slices out, 1 in\) of \(\d+, 2, 64\) float32, number \d+ of this comm,"
    assert said(0, 2, what, TIMEOUT).search(stopped["exchange"]), stopped["exchange"]


def test_both_of_the_others_say_what_they_wait_for(stopped):
    what = r"all_gather of \(\d+, 2, 64\) float32, number (\d+) of this comm,"
    waits = [said(rank, 3, what, TIMEOUT).search(stopped["forward"]) for rank in (0, 2)]
    assert any(waits), stopped["forward"]
    assert len({found[1] for found in waits if found}) == 1, "the same call has the same number on all ranks"


def test_rank_of_a_group_says_which_one_of_the_job_it_is(stopped):
    errors, group = stopped["group"], "rank 1 of 2 of a group, 2 of 3 in the job, on "
    assert group in errors or said(0, 3, "barrier, number 2 of this comm,", TIMEOUT).search(errors), errors


def test_rank_that_does_not_come_within_init_ends_all_at_its_deadline():
    for errors in ends({kind: Job(2, kind, "init", "mpi", 1.0) for kind in ("stop", "absent")}, 5).values():
        assert said(0, 2, "init, number 1 of this comm,", 5).search(errors), errors


@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_rank_that_dies_or_raises_within_init_ends_all_at_once(kind):
    errors = Job(2, kind, "init", "mpi", 1000.0).end(0)
    assert ("ValueError: rank 1 had bad luck" in errors) == (kind == "exception")


def test_rank_that_never_calls_init_ends_all_at_the_deadline_of_the_start():
    errors = ends({kind: Job(2, kind, "start", "mpi", 1.0) for kind in ("stop", "absent", "exception", "kill")}, 5)
    for kind in ("stop", "absent"):
        assert said(0, 0, "the start of MPI", 5).search(errors[kind]), errors[kind]
    assert "ValueError: rank 1 had bad luck" in errors["exception"]  # MPICH's launcher does not notice


def test_program_in_which_nothing_fails_ends_well():
    run = run_ranks(2, PROGRAM, "nothing", "nowhere", "mpi", "60")
    assert run.returncode == 0 and run.stdout == "" and run.stderr.count("ends well") == 2, run.stderr
