"""Which launcher started this process, from the environment that each one makes, and what init does below it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launch import SOURCE, mpiexec

import thdattn.comm
from thdattn.comm import launcher

PREFIXES = ("PMI", "OMPI", "MV2", "MPI_", "SLURM", "TORCHELASTIC")
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

# What a process finds in its environment, as launched.
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "4"}
SALLOC_STEP = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
SRUN_PMIX = {**STEP, "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
ONE_OF_TORCHRUN = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host"}


@pytest.fixture
def launched(monkeypatch):
    """Make the environment that of a process which the given variables describe."""
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in TORCH:
            monkeypatch.delenv(name)

    def launched(environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return launched


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (MPICH, ("mpiexec", 2)),
        (OPEN_MPI, ("mpiexec", 4)),
        ({"MV2_COMM_WORLD_SIZE": "8"}, ("mpiexec", 8)),
        ({"PMIX_RANK": "3"}, ("mpiexec", 0)),
        # Slurm: a batch script and the shell of salloc are no ranks, also where that shell is a step of one task.
        (BATCH, None),
        (SALLOC_STEP, None),
        (STEP, ("srun", 4)),
        ({**STEP, "PMI_SIZE": "4", "PMI_RANK": "3"}, ("mpiexec", 4)),  # srun --mpi=pmi2
        (SRUN_PMIX, ("srun", 4)),
        ({**STEP, **MPICH}, ("mpiexec", 2)),  # mpiexec starts its helpers by srun
        ({**STEP, "PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-host-1@1"}, ("mpiexec", 0)),
        # torchrun, alone and below another launcher
        (TORCHRUN, ("torchrun", 2)),
        (ONE_OF_TORCHRUN, ("torchrun", 1)),
        ({**STEP, **TORCHRUN}, ("torchrun", 2)),
        ({**SRUN_PMIX, **TORCHRUN}, ("torchrun", 2)),
        ({**OPEN_MPI, **TORCHRUN}, ("torchrun", 2)),
        ({**MPICH, **TORCHRUN}, ("mpiexec", 2)),  # of the same size: one process of torchrun on each rank
        ({**OPEN_MPI, **ONE_OF_TORCHRUN}, ("mpiexec", 4)),
        # RANK and WORLD_SIZE set by hand, or by another launcher of torch.distributed
        (BY_HAND, ("torchrun", 4)),
        ({**STEP, **BY_HAND}, ("srun", 4)),
        ({**OPEN_MPI, **BY_HAND}, ("mpiexec", 4)),
        ({"WORLD_SIZE": "4"}, None),
    ],
)
def test_launchers_are_recognised_by_their_environment(launched, environment, found):
    launched(environment)
    assert launcher.find() == found


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, None),
        (MPICH, None),
        ({**MPICH, "MPI_LOCALRANKID": "1"}, 1),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "x"}, None),
        (BATCH, None),  # whose processes are mpiexec's
        ({**STEP, "SLURM_LOCALID": "2"}, 2),
        ({**STEP, **MPICH, "MPI_LOCALRANKID": "1"}, 1),
    ],
)
def test_launchers_say_which_process_of_the_machine_this_is(launched, environment, number):
    launched(environment)
    assert launcher.local_rank() == number


@pytest.mark.parametrize(
    ("environment", "number"), [({}, None), (MPICH, 1), (OPEN_MPI, 0), ({"PMIX_RANK": "3"}, 3), (STEP, None)]
)
def test_launchers_say_which_rank_this_is_before_mpi_does(launched, environment, number):
    launched(environment)
    assert launcher.rank() == number


@pytest.mark.parametrize("environment", [{}, BATCH, SALLOC_STEP, ONE_OF_TORCHRUN, {"PMI_SIZE": "1"}])
def test_auto_is_single_without_a_launcher_or_with_one_rank(launched, monkeypatch, environment):
    launched(environment)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert thdattn.comm.init("auto").name == "single"


@pytest.mark.parametrize("backend", ["auto", "mpi", "nccl"])
def test_processes_of_torchrun_are_refused_with_the_remedy(launched, backend):
    launched(TORCHRUN)
    with pytest.raises(RuntimeError, match=r"torchrun .* started 2 processes.*from_torch\(\) after.*with mpiexec"):
        thdattn.comm.init(backend)


@pytest.mark.parametrize("environment", [TORCHRUN, STEP, MPICH])
def test_single_is_a_choice_below_every_launcher(launched, environment):
    launched(environment)
    assert thdattn.comm.init("single").size == 1


@pytest.mark.parametrize("backend", ["auto", "mpi", "nccl"])
def test_launcher_without_mpi4py_is_an_error_with_a_remedy(launched, monkeypatch, backend):
    launched(STEP)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=r"MPI cannot be loaded on a process that srun started .*pip install"):
        thdattn.comm.init(backend)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (STEP, "srun started 4 processes but MPI sees 1: srun and the MPI library"),
        (SRUN_PMIX, "srun started 4 processes but MPI sees 1: srun and the MPI library"),
        (OPEN_MPI, "the launcher started 4 ranks but MPI sees 1: launcher and MPI library"),
        ({"PMIX_RANK": "3"}, "the launcher started several ranks but MPI sees 1: launcher and MPI library"),
    ],
)
def test_launcher_that_mpi_does_not_know_is_refused(launched, environment, message):
    mpiexec(1)  # skips without MPI
    # MPI starts as one rank; then the environment claims a launcher that this MPI did not understand.
    program = f"import os, mpi4py.MPI, thdattn.comm\nos.environ.update({environment})\nthdattn.comm.init()"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert run.returncode != 0
    assert message in run.stderr
    assert "srun" not in message or "srun --mpi=pmix" in run.stderr


# --- the search for mpiexec ------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(beside, on_path): what the launchers beside this Python and on PATH say of their version."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "path").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")

    def machine(beside="", on_path=""):
        for folder, version in (("venv", beside), ("path", on_path)):
            if version:
                (tmp_path / folder / "mpiexec").write_text(f"#!/bin/sh\necho '{version}'\n")
                (tmp_path / folder / "mpiexec").chmod(0o755)
        return tmp_path

    return machine


def test_mpiexec_beside_this_python_comes_first(machine):
    folder = machine(beside="HYDRA build details:", on_path="mpiexec (OpenRTE) 4.1.6")
    assert launcher.mpiexec() == [str(folder / "venv" / "mpiexec")]


UNBOUND = ["--oversubscribe", "--bind-to", "none"]


@pytest.mark.parametrize(("user", "flags"), [(0, [*UNBOUND, "--allow-run-as-root"]), (7, UNBOUND)])
def test_open_mpi_gets_the_flags_it_needs(machine, monkeypatch, user, flags):
    folder = machine(on_path="mpiexec (Open MPI) 5.0.11")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert launcher.mpiexec() == [str(folder / "path" / "mpiexec"), *flags]


def test_machine_without_mpiexec_has_none(machine, monkeypatch):
    monkeypatch.setenv("PATH", str(machine() / "path"))
    assert launcher.mpiexec() is None
