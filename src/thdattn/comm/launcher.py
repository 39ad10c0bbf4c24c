"""Launchers of ranks: find which one started this process, and this machine's mpiexec."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

# MPI's launchers, and srun with --mpi, set these variables in the processes that they start.
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")
_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")

ALONE = 'call thdattn.comm.init("single") where each process is to work alone'


class Launcher(NamedTuple):
    """Program that started this process: "mpiexec" (or another launcher of MPI), "srun" or "torchrun".

    Attributes:
        size: number of processes that it started; 0 if it does not say.
    """

    name: str
    size: int


def find() -> Launcher | None:
    """Find from the environment what started this process as one of several; None: nothing did.

    torchrun comes first: its processes inherit the variables of an mpiexec or srun that started torchrun itself. It
    does not if both name the same size, which is one process of torchrun below each rank.
    """
    mpi, torch = _mpi(), _torchrun()
    if torch and "TORCHELASTIC_RUN_ID" in os.environ and (mpi is None or 1 < torch.size != mpi.size):
        return torch
    return mpi or _srun() or torch


def rank() -> int | None:
    """Return this process's number among all of the launcher's, before MPI says it; None: the launcher does not say."""
    said = [os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name, "").isdecimal()]
    return int(said[0]) if said else None


def local_rank() -> int | None:
    """Return this process's number among the launcher's on this machine; None: the launcher does not say."""
    names = (*_LOCAL_RANK_VARIABLES, *["SLURM_LOCALID"] * (_srun() is not None))
    said = [os.environ[name] for name in names if os.environ.get(name, "").isdecimal()]
    return int(said[0]) if said else None


def hostname() -> str:
    """Return the machine's name; THDATTN_HOST replaces it, so that tests can play several machines on one."""
    return os.environ.get("THDATTN_HOST") or socket.gethostname()


def mpiexec() -> list[str] | None:
    """Return the command that starts ranks of this Python, with the flags that it needs here; None: there is none.

    The launcher beside this Python comes first: one that does not fit the MPI library starts programs of one rank each.
    Open MPI refuses root and more ranks than cores unless told otherwise. It also binds each of two ranks to one core.
    A rank's threads would share it: those that prepare batches, keep deadlines or belong to NCCL.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        return None
    if not is_open_mpi(path):
        return [path]
    return [path, "--oversubscribe", "--bind-to", "none", *["--allow-run-as-root"] * (os.geteuid() == 0)]


@cache
def is_open_mpi(path: str) -> bool:
    """Return whether this mpiexec is Open MPI's, judged by its --version."""
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return any(name in version.stdout + version.stderr for name in ("Open MPI", "OpenRTE", "PRRTE", "prte"))


def _mpi() -> Launcher | None:
    for variable in _SIZE_VARIABLES:
        if size := _number(variable):
            return Launcher("mpiexec", size)
    if not any(variable in os.environ for variable in (*_RANK_VARIABLES, "MPI_LOCALRANKID")):
        return None
    # PMIx tells a process only its rank; if Slurm speaks PMIx, its step knows the size.
    slurm = _srun() if os.environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix.") else None
    return slurm or Launcher("mpiexec", 0)


def _srun() -> Launcher | None:
    # NOTE: not SLURM_NTASKS, nor SLURM_PROCID: batch scripts and shells of salloc have them too. Only srun says
    # SLURM_STEP_NUM_TASKS, and the shell of salloc, where that is a step, is a step of one task.
    size = _number("SLURM_STEP_NUM_TASKS")
    return Launcher("srun", size) if size > 1 else None


def _torchrun() -> Launcher | None:
    size = _number("WORLD_SIZE") if "RANK" in os.environ else 0
    return Launcher("torchrun", size) if size else None


def _number(variable: str) -> int:
    """Return the value of an environment variable; 0 if it is not set or no number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0
