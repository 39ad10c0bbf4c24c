"""Launchers of rank programs under mpiexec or torchrun, for every test that needs real ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thdattn.comm import launcher
from thdattn.comm.nccl.gpus import SHARE

SOURCE = Path(__file__).resolve().parents[2] / "src"
RANKS = Path(__file__).resolve().parent / "ranks"


def mpiexec(n: int) -> list[str]:
    """Return the command that starts n ranks; skip the test if this machine has no mpiexec or no mpi4py."""
    command = launcher.mpiexec()
    if command is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py and mpiexec: pip install 'thdattn[mpich]'")
    return [*command, "-n", str(n)]


def run_ranks(
    n: int, program: Path, *arguments: str, timeout: float = 60.0, python: tuple[str, ...] = ("-m", "mpi4py")
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on n MPI ranks and return its output; `python` are the interpreter's own options."""
    return run([*mpiexec(n), sys.executable, *python, str(program), *arguments], timeout)


def run_gpu_ranks(
    cupy: Any, n: int, program: Path, *arguments: str, timeout: float = 180.0, by: Callable[..., Any] = run_ranks
) -> Any:
    """Run ranks with a GPU each; skip the test if there are fewer."""
    need_gpus(cupy, n)
    return by(n, program, *arguments, timeout=timeout)


def need_gpus(cupy: Any, n: int) -> None:
    """Skip the test where there are fewer GPUs than n, unless ranks share them."""
    if (found := cupy.cuda.runtime.getDeviceCount()) < n and os.environ.get(SHARE) != "1":
        pytest.skip(f"needs {n} GPUs, found {found}")


def all_done(run: subprocess.CompletedProcess[str], n: int, what: str) -> None:
    """Assert that all n ranks have ended well, and have said that something is done."""
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"{what} done") == n, run.stdout


def run_torchrun(n: int, program: Path, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a program as n processes of torchrun; skip the test if PyTorch is missing."""
    return run([*torchrun(n), str(program), *arguments], timeout)


def torchrun(n: int) -> list[str]:
    """Return the command that starts n processes of torchrun; skip the test if PyTorch is missing."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a launcher and return its output; a run that hangs is ended with all its ranks and fails the test."""
    with start(command) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end(process)
            output, errors = process.communicate()
            pytest.fail(f"{' '.join(command)} still ran after {timeout:g} s\n{output}\n{errors}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start a launcher in a session of its own; programs find thdattn and the test kit."""
    path = os.pathsep.join(filter(None, [str(SOURCE), str(RANKS.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a launcher: asked first, as it then ends its ranks, which may be in sessions of their own; then killed."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
