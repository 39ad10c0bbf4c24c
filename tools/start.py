"""Start a program of this repository on as many ranks as this machine can run: start.py PROGRAM [its options].

It starts processes under mpiexec if MPI works, each with its own GPU on a machine with GPUs; else one process. The
number of ranks is $RANKS, by default one per GPU or CPU core, at least 2 and at most 4.
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
    """Return the command that starts a program, named by its path in the repository; change to that folder."""
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
    """Return mpiexec with the flags it needs here, if two ranks that it starts find each other."""
    mpiexec = launcher.mpiexec()
    size = "from mpi4py import MPI; print(f'{MPI.COMM_WORLD.size} ranks')"
    found = mpiexec is not None and run([*mpiexec, "-n", "2", sys.executable, "-c", size]).count("2 ranks") == 2
    return mpiexec if found else None


def run(command: list[str]) -> str:
    """Return what a command prints; nothing if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
