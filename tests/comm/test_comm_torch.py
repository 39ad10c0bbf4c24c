"""thdattn.comm.from_torch: the ranks of a torch.distributed group, alone in this process and under torchrun."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from contextlib import suppress
from types import SimpleNamespace

import launch
import numpy as np
import pytest
from faults import until
from launch import RANKS, all_done, run_torchrun
from ranks.comm_contract import check_contract

import thdattn.comm
from thdattn.comm.nccl import gpus

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

BOTH = "cpu:gloo,cuda:nccl"


@pytest.fixture
def group():
    """A gloo group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_one_rank_keeps_the_contract_without_a_warning(group):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_contract(thdattn.comm.from_torch(), np)


@pytest.fixture(scope="module")
def three_ranks():
    """What three ranks of torchrun said of the contract, and the last two of a group of theirs."""
    run = run_torchrun(3, RANKS / "comm_contract.py", "contract,torch-subgroup", "torch-gloo", "3", timeout=120)
    assert run.returncode == 0, run.stderr
    return run


def test_three_ranks_of_torchrun_keep_the_contract(three_ranks):
    assert three_ranks.stdout.count("contract on torch done") == 3
    assert "Warning" not in three_ranks.stderr


def test_ranks_of_a_group_are_numbered_within_it_and_others_are_refused(three_ranks):
    said = three_ranks.stdout
    assert "process 0: this process is not in group; call thdattn.comm.from_torch only on the ranks" in said
    assert "process 1: rank 0 of 2 has [10.0, 11.0]" in said
    assert "process 2: rank 1 of 2 has [10.0, 11.0]" in said


@pytest.mark.exhaustive
def test_groups_of_torchrun_keep_the_contract():
    all_done(run_torchrun(4, RANKS / "comm_groups.py", "torch-gloo", "4", timeout=120), 4, "groups on torch")


@pytest.mark.exhaustive
def test_ranks_of_torchrun_together_are_the_oracle():
    run = run_torchrun(2, RANKS / "attention_ranks.py", "cases,methods", "torch-gloo", "2", timeout=180)
    for scenario in ("cases", "methods"):
        all_done(run, 2, f"{scenario} on torch-gloo")


@pytest.mark.exhaustive
def test_failing_rank_ends_the_others():
    run = run_torchrun(2, RANKS / "comm_contract.py", "failing-rank", "torch-gloo", "2", timeout=120)
    assert run.returncode != 0
    assert "ValueError: rank 1 had bad luck" in run.stderr and "done" not in run.stdout


@pytest.mark.exhaustive
def test_rank_that_stops_or_is_late_is_named():
    """By the thread that asks, long before torch's timeout; and with torch's own error, at that."""
    jobs = {kind: launch.start([*launch.torchrun(2), str(RANKS / "torch_faults.py"), kind, "gloo", "6"])
            for kind in ("stop", "late")}
    said = {}
    try:
        for kind, job in jobs.items():
            said[kind] = "".join(until(job.stderr, r"thdattn: rank 0 of 2 .* number 5 of this comm,? wait"))
    finally:
        for job in jobs.values():
            launch.end(job)
        for text in said.values():
            for process in re.findall(r"rank 1 is process (\d+)", text):
                with suppress(ProcessLookupError):  # torchrun, ended before, may have left it stopped
                    os.kill(int(process), signal.SIGKILL)
    stopped = r"waits in vain \(waited [1-4]\.\d s\), ending all ranks: rank 1 of 2 on \S+ has been stopped \(SIGSTOP\)"
    assert re.search(stopped + r" for \d s; its last operation was all_reduce, number 4 of this comm$", said["stop"])
    late = r"waited for \d+\.\d s: rank 1 of 2 on \S+ is late: it has left all_reduce, number 4 of this comm, \d s "
    assert re.search(late + "ago, and its main thread sleeps$", said["late"]), said["late"]


def test_torchrun_without_from_torch_is_refused(monkeypatch):
    """By the variables that torchrun sets."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    run = launch.run([sys.executable, str(RANKS / "comm_contract.py"), "contract", "auto", "2"], timeout=60)
    assert run.returncode != 0
    assert "torchrun (RANK and WORLD_SIZE are set) started 2 processes" in run.stderr and "done" not in run.stdout


def test_closing_leaves_the_group_to_the_program(group):
    with thdattn.comm.from_torch(group) as comm:
        comm.barrier()
    assert distributed.is_initialized()
    thdattn.comm.from_torch(group).barrier()


# --- errors ----------------------------------------------------------------------------------------------------


def test_missing_group_is_named_with_the_remedy():
    with pytest.raises(RuntimeError, match=r"not initialised; call torch.distributed.init_process_group\(\)"):
        thdattn.comm.from_torch()


def test_missing_torch_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match=r"PyTorch cannot be loaded \(ModuleNotFoundError.*; install it, or"):
        thdattn.comm.from_torch()


def test_group_of_another_type_is_named(group):
    with pytest.raises(TypeError, match=r"group is 'gloo', a str; wanted a process group of torch.distributed; pass"):
        thdattn.comm.from_torch("gloo")


@pytest.mark.parametrize("config", ["cpu:mpi,cuda:mpi", "cuda:gloo"])
def test_other_backends_are_named(group, monkeypatch, config):
    monkeypatch.setattr(distributed, "get_backend_config", lambda group: config)
    with pytest.raises(ValueError, match=f"group has the backends {config}; wanted gloo for host arrays or nccl"):
        thdattn.comm.from_torch()


def test_group_of_both_backends_takes_host_arrays_where_there_is_no_gpu(group, monkeypatch):
    monkeypatch.setattr(distributed, "get_backend_config", lambda group: BOTH)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert thdattn.comm.from_torch().devices == {"cpu"}


# --- GPUs, with stand-ins for CuPy and torch.cuda --------------------------------------------------------------


@pytest.fixture
def on_gpu_3(group, monkeypatch):
    """A comm of both backends, torch's current GPU being 3; `current` is the pointer of CuPy's current stream."""
    state = SimpleNamespace(current=0, used=None)
    monkeypatch.setattr(distributed, "get_backend_config", lambda group: BOTH)
    for name, stand_in in {
        "is_available": lambda: True,
        "current_device": lambda: 3,
        "default_stream": lambda device: ("default", device),
        "ExternalStream": lambda pointer, device: (pointer, device),
        "stream": lambda stream: stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = lambda number: SimpleNamespace(use=lambda: setattr(state, "used", number))  # noqa: E731
    stream = lambda: SimpleNamespace(ptr=state.current)  # noqa: E731
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=device, get_current_stream=stream))
    monkeypatch.setattr(gpus, "load_cupy", lambda: cupy)
    state.comm = thdattn.comm.from_torch()
    return state


def test_group_of_both_backends_takes_both_kinds_of_arrays(on_gpu_3):
    assert on_gpu_3.comm.devices == {"cpu", "cuda"}
    assert on_gpu_3.used == 3, "torch's current GPU becomes CuPy's"


def test_torch_works_in_the_current_stream_of_cupy(on_gpu_3):
    array = object()
    assert on_gpu_3.comm._stream_of(array) == ("default", 3)
    on_gpu_3.current = 77
    assert on_gpu_3.comm._stream_of(array) == (77, 3)
