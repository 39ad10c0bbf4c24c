"""Starts examples/packed_documents.py on as many ranks as this machine can run: demo.py [options of the example].

Processes under mpiexec where MPI works, one GPU each on a machine with several GPUs; simulated ranks in one process on
a machine with one GPU, or without MPI. $RANKS asks for another number of ranks than 4.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = "examples/packed_documents.py"


def main() -> None:
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")]))
    ranks = int(os.environ.get("RANKS") or 4)
    gpus = count_gpus()
    processes = min(ranks, gpus) if gpus else ranks
    launcher = mpi_launcher() if processes > 1 else None
    if launcher:
        command = [*launcher, "-n", str(processes), sys.executable, "-m", "mpi4py", EXAMPLE]
    else:
        command = [sys.executable, EXAMPLE, "--ranks", str(ranks)]
    command += sys.argv[1:]
    print("+", *command, "\n", flush=True)
    os.execvp(command[0], command)


def count_gpus() -> int:
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # CuPy without a driver raises more than ImportError
        return 0


def mpi_launcher() -> list[str] | None:
    """mpiexec with the flags it needs here, if two ranks started by it find each other.

    The launcher beside this Python comes first: one of another make than the MPI library starts programs of one rank
    each. Open MPI refuses root and more ranks than cores unless told otherwise.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None:
        return None
    version = run([launcher, "--version"])
    flags = []
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE", "prte")):
        flags = ["--oversubscribe", *["--allow-run-as-root"] * (os.geteuid() == 0)]
    size = "from mpi4py import MPI; print(f'{MPI.COMM_WORLD.size} ranks')"
    answers = run([launcher, *flags, "-n", "2", sys.executable, "-m", "mpi4py", "-c", size])
    return [launcher, *flags] if answers.count("2 ranks") == 2 else None


def run(command: list[str]) -> str:
    """What a command prints; nothing if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
