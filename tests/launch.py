"""Starts rank programs under mpiexec, for every test that needs real ranks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"


def mpiexec(n: int) -> list[str]:
    """The command that starts n ranks; skips the test if this machine has no mpiexec or no mpi4py.

    The launcher beside this Python comes first: one of another make than the MPI library starts n programs of one
    rank each. Open MPI refuses root and more ranks than cores unless told otherwise.
    """
    launcher = _launcher()
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py and mpiexec: pip install 'thdattn[mpich]'")
    flags = []
    if _is_open_mpi(launcher):
        flags.append("--oversubscribe")
        if os.geteuid() == 0:
            flags.append("--allow-run-as-root")
    return [launcher, *flags, "-n", str(n)]


def run_ranks(
    n: int, program: Path, *arguments: str, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on n ranks and return its output; a run that hangs is killed and fails the test."""
    command = [*mpiexec(n), sys.executable, "-m", "mpi4py", str(program), *arguments]
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"{' '.join(command)} still ran after {timeout:g} s\n{output}\n{errors}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@cache
def _launcher() -> str | None:
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@cache
def _is_open_mpi(launcher: str) -> bool:
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return any(name in version.stdout + version.stderr for name in ("Open MPI", "OpenRTE", "PRRTE", "prte"))
