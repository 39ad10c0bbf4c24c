"""The MPI backend on real ranks, each test one mpiexec."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import launch
import pytest
from launch import RANKS, all_done, mpiexec, run_ranks

PROGRAM = RANKS / "comm_contract.py"
GROUPS = PROGRAM.with_name("comm_groups.py")
FAULTS = PROGRAM.with_name("fault_ranks.py")


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2))])
def test_mpi_ranks_keep_the_contract(n):
    all_done(run_ranks(n, PROGRAM, "contract", "mpi", str(n)), n, "contract on mpi")


def test_agree_raises_on_every_rank_and_four_ranks_keep_the_contract():
    run = run_ranks(4, PROGRAM, "agree,contract", "mpi", "4")
    all_done(run, 4, "contract on mpi")
    assert run.stdout.count("rank 0 has 0, but rank 2 has 1, rank 3 has 1") == 4


def test_groups_of_mpi_ranks_keep_the_contract():
    all_done(run_ranks(4, GROUPS, "mpi", "4"), 4, "groups on mpi")


@pytest.fixture
def open_mpi():
    return launch.launcher.is_open_mpi(mpiexec(1)[0])


@pytest.fixture
def job():
    """job(kind, *interpreter's options, place): fault_ranks.py on two ranks, ended with the test."""
    jobs = []

    def start(kind, *options, place="forward"):
        words = [str(FAULTS), kind, place, "mpi", "60"]
        jobs.append(launch.start([*mpiexec(2), sys.executable, *options, *words]))
        return jobs[-1]

    yield start
    for process in jobs:
        launch.end(process)
        process.communicate()


def ends(process, seconds=45):
    """(exit status, errors) of a job, which must end by itself."""
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors


def waits(process, seconds=2):
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)
    return True


def failed(process):
    """Wait until rank 1 fails, and then some for the other one to come to where it waits."""
    while " and fails" not in (line := process.stderr.readline()):
        assert line, "the job ended early"
    time.sleep(3)
    return process


WITH_AND_WITHOUT = pytest.mark.parametrize("options", [
    pytest.param((), id="python", marks=pytest.mark.exhaustive), pytest.param(("-m", "mpi4py"), id="-m mpi4py")])


@WITH_AND_WITHOUT
def test_exception_after_init_ends_the_job_with_its_message(job, options):
    status, errors = ends(job("exception", *options))
    assert status != 0 and "ValueError: rank 1 had bad luck" in errors and "ends well" not in errors


@WITH_AND_WITHOUT
def test_exception_before_init_leaves_the_others_waiting_for_the_deadline_under_mpich(job, open_mpi, options):
    if open_mpi:
        pytest.skip("Open MPI's launcher ends the job; that of version 5.0 not always")
    process = job("exception", *options, place="start")
    while "ValueError: rank 1 had bad luck" not in (line := process.stderr.readline()):
        assert line, "the job ended without the message"
    assert waits(process)


def test_exit_with_an_error_ends_the_job_under_m_mpi4py_only(job):
    status, errors = ends(job("exit", "-m", "mpi4py"))
    assert status == 3 and "ends well" not in errors
    assert waits(failed(job("exit")))


@WITH_AND_WITHOUT
def test_exception_in_a_thread_ends_nothing(job, options):
    status, errors = ends(job("thread", *options))
    assert status == 0 and "ValueError: rank 1 had bad luck" in errors and errors.count("ends well") == 2


@WITH_AND_WITHOUT
def test_ctrl_c_ends_a_job_whose_ranks_compute(job, options):
    process = failed(job("loop", *options))
    process.send_signal(signal.SIGINT)  # the terminal's reaches only the launcher; ranks are no part of its group
    status, errors = ends(process)
    assert status != 0 and "ends well" not in errors


def test_ctrl_c_ends_a_job_that_waits_in_vain_at_the_second_time_at_the_latest(job, open_mpi):
    process = failed(job("receive"))
    process.send_signal(signal.SIGINT)
    if not open_mpi:
        assert waits(process)
        process.send_signal(signal.SIGINT)
    assert "ends well" not in ends(process, seconds=20)[1]


def test_auto_under_the_launcher_is_one_job_of_all_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    all_done(run_ranks(2, PROGRAM, "contract", "auto", "2"), 2, "contract on mpi")
