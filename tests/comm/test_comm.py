"""thdattn.comm without MPI and without a GPU: the contract on simulated ranks, hangs, errors, and the choice."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from launch import SOURCE
from ranks.comm_contract import check_contract
from ranks.comm_groups import check_groups

import thdattn.comm
from thdattn.comm import bootstrap, launcher, mpi
from thdattn.comm.failures.watchdog import Watch
from thdattn.comm.nccl import gpus


def test_single_rank_keeps_the_contract():
    check_contract(thdattn.comm.init("single"), np)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_simulated_ranks_keep_the_contract(cp_size):
    thdattn.comm.run_local(cp_size, lambda comm: check_contract(comm, np), timeout=30)


def test_simulated_sums_are_made_in_rank_order():
    # In float32, (2**25 + 1) - 2**25 is 0 and (2**25 - 2**25) + 1 is 1.
    def program(comm):
        array = np.array([2.0**25, 1, -(2.0**25)][comm.rank : comm.rank + 1], np.float32)
        comm.all_reduce(array, "sum")
        return float(array[0])

    assert thdattn.comm.run_local(3, program) == [0.0, 0.0, 0.0]


# --- what keeps a wrong program from hanging -------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 2])
def test_failing_rank_ends_all_and_its_error_is_the_one_raised(failing):
    given_up = []

    def program(comm):
        if comm.rank == failing:
            time.sleep(0.05)
            raise KeyError("the real one")
        try:
            comm.barrier()
        except RuntimeError as error:
            given_up.append(str(error))
            raise

    began = time.perf_counter()
    with pytest.raises(KeyError, match="the real one") as caught:
        thdattn.comm.run_local(4, program, timeout=30)
    assert time.perf_counter() - began < 5
    assert len(given_up) == 3
    assert all(f"rank {failing} failed with KeyError" in message for message in given_up)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [f"raised on simulated rank {failing} of 4"]


def test_rank_that_hangs_is_named_with_those_that_arrived():
    release = threading.Event()

    def program(comm):
        if comm.rank == 1:
            release.wait(20)
        comm.all_gather(np.zeros(2), np.zeros(6))

    began = time.perf_counter()
    try:
        with pytest.raises(TimeoutError) as caught:
            thdattn.comm.run_local(3, program, timeout=1.0)
    finally:
        release.set()
    assert time.perf_counter() - began < 15
    message = str(caught.value)
    assert "rank 0 waits in all_gather of (2,) float64; rank 2 waits in" in message
    assert "rank 1 did not come within 1 s" in message
    if sys.version_info >= (3, 11):
        assert "rank 1 still running" in caught.value.__notes__[-1]


def test_late_rank_cannot_join_a_round_that_timed_out():
    late = []
    over = threading.Event()

    def program(comm):
        if comm.rank == 1:
            over.wait(20)
            try:
                comm.barrier()
            except RuntimeError as error:
                late.append(str(error))
                raise
        comm.barrier()

    with pytest.raises(TimeoutError, match="rank 1 did not come"):
        thdattn.comm.run_local(2, program, timeout=0.2)
    over.set()
    for _ in range(1000):
        if late:
            break
        time.sleep(0.02)
    assert "rank 0 failed with TimeoutError" in late[0]


def test_rank_that_returns_early_is_named_at_once():
    def program(comm):
        if comm.rank != 1:
            comm.barrier()

    began = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"rank 0 waits in barrier.*rank 1 returned already"):
        thdattn.comm.run_local(2, program, timeout=30)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(("program", "message"), [
    (lambda comm: comm.all_reduce(np.zeros(3), "sum") if comm.rank else comm.barrier(),
     r"rank 0: barrier; rank 1: all_reduce sum of \(3,\) float64"),
    (lambda comm: comm.all_reduce(np.zeros(3 + comm.rank), "sum"),
     r"rank 0: all_reduce sum of \(3,\).*rank 1: all_reduce sum of \(4,\)"),
    (lambda comm: comm.exchange([], []) if comm.rank else comm.barrier(),
     r"different collectives.*: rank 0: barrier; rank 1: exchange"),
], ids=["collectives", "shapes", "exchange"])
def test_what_differs_between_ranks_is_named(program, message):
    with pytest.raises(RuntimeError, match=message):
        thdattn.comm.run_local(2, program)


@pytest.mark.parametrize(("sent", "received"), [([3], [2]), ([3], []), ([], [2]), ([3, 2], [2, 3]), ([3, 2], [5])])
def test_slices_that_the_other_rank_does_not_receive_are_named(sent, received):
    def program(comm):
        mine = sent if comm.rank == 0 else received
        slices = [(np.zeros((rows, 4), np.float32), 1 - comm.rank) for rows in mine]
        comm.exchange(*((slices, []) if comm.rank == 0 else ([], slices)))

    there, wanted = [16 * rows for rows in sent], [16 * rows for rows in received]
    with pytest.raises(ValueError) as caught:
        thdattn.comm.run_local(2, program)
    assert str(caught.value) == (f"rank 0 sends slices of {there} bytes to rank 1, which receives slices of {wanted} "
                                 f"bytes from it; make both from one plan")


def test_agree_raises_on_every_rank_and_names_those_that_differ():
    messages = []

    def program(comm):
        comm.agree("same", 5)
        try:
            comm.agree("plan hash", 7 if comm.rank in (1, 3) else 6)
        except ValueError as error:
            messages.append(str(error))

    thdattn.comm.run_local(4, program)
    assert len(messages) == 4
    assert set(messages) == {
        (
            "plan hash is not the same on all ranks: rank 0 has 6, but rank 1 has 7, rank 3 has 7; "
            "give every rank the same global input"
        )
    }


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"cp_size": 0}, ValueError, "cp_size is 0, wanted >= 1"),
        ({"cp_size": "2"}, TypeError, "cp_size is '2', a str; wanted an int"),
        ({"cp_size": 2.0}, TypeError, "cp_size is 2.0, a float; wanted an int"),
        ({"fn": None}, TypeError, "fn is None, a NoneType; wanted a function of one comm"),
    ],
)
def test_run_local_names_bad_arguments(arguments, kind, message):
    with pytest.raises(kind, match=message):
        thdattn.comm.run_local(**{"cp_size": 2, "fn": lambda comm: comm.barrier(), **arguments})


def test_run_local_takes_numbers_of_numpy():
    assert thdattn.comm.run_local(np.int64(2), lambda comm: comm.rank, np.float32(5)) == [0, 1]


@pytest.mark.parametrize("value", [1.5, "7", None])
def test_agree_takes_integers_only(value):
    with pytest.raises(TypeError, match=f"value is {value!r}, .*wanted an int"):
        thdattn.comm.init("single").agree("plan hash", value)


def test_comm_is_closed_at_the_end_of_a_with_block_but_not_on_an_error():
    with thdattn.comm.init("single") as comm:
        comm.barrier()
    with pytest.raises(RuntimeError, match=r"single comm is closed; call thdattn.comm.init"):
        comm.barrier()

    still_open = thdattn.comm.init("single")
    with pytest.raises(KeyError), still_open:
        raise KeyError
    still_open.barrier()


# --- groups ----------------------------------------------------------------------------------------------------


def test_groups_of_simulated_ranks_keep_the_contract():
    thdattn.comm.run_local(4, lambda comm: check_groups(comm, np), timeout=30)


def test_group_of_one_rank_is_one_rank():
    check_contract(thdattn.comm.init("single").split(3, -1), np)


def test_failing_rank_ends_those_that_wait_in_other_groups():
    given_up = []

    def program(comm):
        group = comm.split(comm.rank // 2)
        if comm.rank == 0:
            raise KeyError("the real one")
        try:
            for _ in range(10**9):  # ranks 2 and 3 never meet rank 0
                group.barrier()
        except RuntimeError as error:
            given_up.append(str(error))
            raise

    with pytest.raises(KeyError, match="the real one"):
        thdattn.comm.run_local(4, program, timeout=30)
    assert len(given_up) == 3 and all("rank 0 failed with KeyError" in message for message in given_up)


def test_rank_that_returns_early_is_missed_in_its_own_group_only():
    arrived = []

    def program(comm):
        group = comm.split(comm.rank // 2)
        if comm.rank == 3:
            return
        if comm.rank < 2:
            time.sleep(0.1)
        group.barrier()
        arrived.append(comm.rank)

    with pytest.raises(RuntimeError, match=r"rank 2 waits in barrier; rank 3 cannot all come, as rank 3 returned"):
        thdattn.comm.run_local(4, program, timeout=30)
    assert not {2, 3} & set(arrived)


def test_messages_of_a_group_number_ranks_as_the_job_does():
    def program(comm):
        group = comm.split(comm.rank % 2, key=-comm.rank)
        group.all_reduce(np.zeros(3 + (comm.rank == 3)), "sum")

    with pytest.raises(RuntimeError, match=r"rank 3: all_reduce sum of \(4,\) .*; rank 1: all_reduce sum of \(3,\)"):
        thdattn.comm.run_local(4, program)


def test_closing_does_first_what_was_asked_for_then_closes_groups_from_the_last(monkeypatch):
    done = []
    monkeypatch.setattr(thdattn.comm.SingleComm, "_close", lambda self: done.append(names[self]))
    comm = thdattn.comm.init("single")
    first, second = comm.split(0), comm.split(1)
    inner = first.split(0)
    names = {comm: "comm", first: "first", second: "second", inner: "inner"}
    for each in (comm, inner, second):
        each.before_close(lambda each=each: done.append(f"graph of {names[each]}"))
    second.forget(second._before_close[0])
    comm.close()
    assert sorted(done[:2]) == ["graph of comm", "graph of inner"]
    assert done[2:] == ["second", "inner", "first", "comm"]


def test_group_that_was_closed_is_closed_once(monkeypatch):
    closed = []
    monkeypatch.setattr(thdattn.comm.SingleComm, "_close", lambda self: closed.append(self))
    comm = thdattn.comm.init("single")
    with comm.split(0) as group:
        group.barrier()
    assert closed == [group]
    comm.barrier()
    other = comm.split(0)
    comm.close()
    assert closed == [group, other, comm]


# --- init ------------------------------------------------------------------------------------------------------


def test_import_needs_neither_mpi_nor_cupy_nor_torch():
    program = (
        "import sys; sys.modules['cupy'] = sys.modules['mpi4py'] = sys.modules['torch'] = None\n"
        "import thdattn.comm, thdattn.comm.local, thdattn.comm.mpi, thdattn.comm.nccl.comm, thdattn.comm.torch\n"
        "assert thdattn.comm.run_local(2, lambda comm: comm.rank) == [0, 1]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={"PYTHONPATH": str(SOURCE)})


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend is 'gloo', wanted 'auto', 'single', 'mpi' or 'nccl'"):
        thdattn.comm.init("gloo")
    with pytest.raises(TypeError, match="backend is None, a NoneType; wanted 'auto'"):
        thdattn.comm.init(None)


@pytest.mark.parametrize(
    ("timeout", "kind", "message"),
    [
        (0, ValueError, "timeout is 0, wanted seconds > 0"),
        (-1.0, ValueError, "timeout is -1.0, wanted seconds > 0"),
        (math.nan, ValueError, "timeout is nan, wanted seconds > 0"),
        (math.inf, ValueError, r"timeout is inf, wanted seconds > 0 and <= 9\.2"),
        ("60", TypeError, "timeout is '60', a str; wanted a number of seconds; convert it with float"),
        (None, TypeError, "timeout is None, a NoneType; wanted a number"),
        (True, TypeError, "timeout is True, a bool; wanted a number"),
    ],
)
def test_a_bad_timeout_is_named(timeout, kind, message):
    for backend in ("single", "mpi"):
        with pytest.raises(kind, match=message):
            thdattn.comm.init(backend, timeout=timeout)
    with pytest.raises(kind, match=message):
        thdattn.comm.run_local(2, lambda comm: comm.barrier(), timeout)


@pytest.mark.parametrize("backend", ["auto", "single", "mpi", "nccl"])
@pytest.mark.parametrize("world", [4, "world", [0, 1]])
def test_world_that_is_no_communicator_is_refused(backend, world):
    with pytest.raises(TypeError, match=r"world is .*wanted a communicator of mpi4py; pass mpi4py.MPI.COMM_WORLD"):
        thdattn.comm.init(backend, world)


class World:
    """As much of a communicator as init looks at."""

    def __init__(self, size, rank):
        self.size, self.rank = size, rank

    def Dup(self):
        return self

    def allgather(self, value):
        return [value] * self.size


@pytest.fixture
def chosen(monkeypatch):
    """init under a launcher of 2 ranks, with MPI and the GPUs that the test gives."""

    def init(backend, answers, rank=0):
        monkeypatch.setattr(launcher, "find", lambda: launcher.Launcher("mpiexec", 2))
        monkeypatch.setattr(mpi, "connect", lambda started_by, timeout: World(started_by.size, rank))
        monkeypatch.setattr(mpi, "watch", lambda world, timeout: Watch("rank 0 of 2", timeout, None))
        monkeypatch.setattr(mpi, "MpiComm", lambda world, timeout, no_gpus="": ("mpi", world.size))
        monkeypatch.setattr(gpus, "survey", lambda world, timeout: answers)
        monkeypatch.setattr(bootstrap, "NcclComm", lambda world, gpus, timeout, transport: ("nccl", gpus))
        return thdattn.comm.init(backend)

    return init


GPUS = [gpus.Gpu(0, "node", "0000:01:00.0", "aa"), gpus.Gpu(1, "node", "0000:02:00.0", "bb")]


def test_auto_takes_nccl_where_every_rank_has_a_gpu(chosen):
    assert chosen("auto", [(True, gpu) for gpu in GPUS]) == ("nccl", GPUS)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_logs_what_was_made_of_gpus(chosen, caplog, rank):
    with caplog.at_level(logging.INFO, "thdattn"):
        chosen("nccl", [(True, gpu) for gpu in GPUS], rank)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert said == [f"thdattn.comm.init made {('nccl', GPUS)}"] * (rank == 0)


def test_auto_takes_mpi_where_a_rank_has_no_gpu_and_warns(chosen, caplog):
    assert chosen("auto", [(True, GPUS[0]), (False, "no driver")]) == ("mpi", 2)
    assert "uses MPI and host arrays (NumPy), not NCCL: no usable GPU on rank 1: no driver" in caplog.text


def test_auto_without_any_gpu_warns_of_nothing(chosen, caplog, monkeypatch):
    monkeypatch.setattr(bootstrap, "expects_gpu", lambda: False)
    assert chosen("auto", [(False, "no driver")] * 2) == ("mpi", 2)
    assert caplog.text == ""


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_auto_without_any_gpu_says_so_once_where_one_is_expected(chosen, caplog, monkeypatch, rank, lines):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert chosen("auto", [(False, "no driver")] * 3, rank) == ("mpi", 2)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["thdattn.comm.init uses MPI and host arrays (NumPy), not NCCL: no usable GPU on rank 0 and "
                    "2 more: no driver"] * lines


def test_nccl_without_gpus_names_every_rank(chosen):
    with pytest.raises(RuntimeError, match="no usable GPU on rank 0: no driver; rank 1: no driver"):
        chosen("nccl", [(False, "no driver")] * 2)
