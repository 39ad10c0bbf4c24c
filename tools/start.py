"""Starts a program of this repository on as many ranks as this machine can run: start.py PROGRAM [its options].

Processes under mpiexec where MPI works, one GPU each on a machine with GPUs; else one process. $RANKS asks for so many,
and not for one per GPU or core and four at most.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from thdattn.comm import launcher

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    line = command(*sys.argv[1:])
    print("+", shlex.join(line), "\n", flush=True)
    os.execvp(line[0], line)


def command(program: str, *options: str) -> list[str]:
    """What starts a program, which is named by its path below the repository; changes to that folder for good."""
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")]))
    gpus = count_gpus()
    wanted = int(os.environ.get("RANKS") or min(4, max(2, gpus or os.cpu_count() or 1)))
    processes = min(wanted, gpus) if gpus else wanted
    mpiexec = mpi_launcher() if processes > 1 else None
    if mpiexec is None:
        return [sys.executable, program, *options]
    return [*mpiexec, "-n", str(processes), sys.executable, "-m", "mpi4py", program, *options]


def count_gpus() -> int:
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # CuPy without a driver raises more than ImportError
        return 0


def mpi_launcher() -> list[str] | None:
    """mpiexec with the flags it needs here, if two ranks started by it find each other."""
    mpiexec = launcher.mpiexec()
    size = "from mpi4py import MPI; print(f'{MPI.COMM_WORLD.size} ranks')"
    found = mpiexec is not None and run([*mpiexec, "-n", "2", sys.executable, "-c", size]).count("2 ranks") == 2
    return mpiexec if found else None


def run(command: list[str]) -> str:
    """What a command prints; nothing if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
