"""Runs everything that there is to measure on several GPUs of one machine, in less than ten minutes, one after another;
on two GPUs in five.

    python benchmarks/measure_all.py 4 out/

The GPU tests of so many ranks, every context-parallel method on every pack, and bytelm on one GPU, over all of them,
and over groups of them. Results go where each program keeps them, and what was written so far is copied to the folder
after every step, with the output of each: a step that hangs is ended at its own time limit and costs no other.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import bench_bytelm
import cp_record
import record

from thdattn.comm import launcher

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/comm/test_comm_nccl_gpu.py", "tests/comm/test_gpu_nccl.py", "tests/comm/test_gpu_delays.py",
    "tests/graphs/test_gpu_graphs.py", "tests/comm/test_gpu_faults.py", "tests/bytelm/test_gpu_train.py",
    "tests/bytelm/test_gpu_train_graphs.py", "tests/mamba/test_gpu_mamba_ranks.py",
    "tests/mamba/test_gpu_mamba_graphs.py",
)  # fmt: skip
TOKENS = 131_072  # of a training step
PACKS_OF_ONE = 2  # micro-batches that one GPU makes of them, as all at once have no room
WORKERS = 8  # of the tests, most of whose time is that of ranks that start
SECONDS = {2: 295.0, 4: 570.0, 8: 570.0}  # for everything, by the number of GPUs
GRACE = 5.0  # seconds in which a launcher that was asked to end can end its ranks
WELL = "well"
RESULTS = ("cp_*.csv", "cp_*.png", "bytelm_*.csv", "gpu_tests.json")


class Step(NamedTuple):
    """A command, run in the repository's root, and the seconds that it may take."""

    name: str
    command: Sequence[str]
    seconds: float


def main() -> int:
    args = parse_arguments()
    mpiexec = launcher.mpiexec()
    if mpiexec is None:
        raise RuntimeError("no mpiexec was found, which starts the ranks; pip install 'thdattn[mpich]'")
    args.out.mkdir(parents=True, exist_ok=True)
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    end = time.monotonic() + (args.seconds or SECONDS[args.gpus])
    lines = [["step", "ended", "seconds", "last line"]]
    for step in steps(args.gpus, mpiexec):
        if args.only and step.name not in args.only:
            continue
        output, start = args.out / f"{step.name}.txt", time.monotonic()
        ended = run(step, output, min(step.seconds, end - start))
        lines.append([step.name, ended, f"{time.monotonic() - start:.0f}", last_line(output)])
        print(*lines[-1], flush=True)
        keep(record.RESULTS, args.out)
    print(f"\n{record.aligned(lines)}\n\n{summary(args.gpus, began)}")
    return 0 if all(ended == WELL for _, ended, *_ in lines[1:]) else 1


def steps(gpus: int, mpiexec: Sequence[str]) -> Iterator[Step]:
    """What is run on so many GPUs: what matters most comes first, and has time enough."""
    python = [sys.executable]
    ranks = [*mpiexec, "-n", str(gpus), *python, "-m", "mpi4py"]
    peer = ["--peer"] if any(map(importlib.util.find_spec, ("flash_attn", "torch"))) else []
    methods = ["--methods", "all", "--cases", "all", "--repeats", "2"]
    yield Step("cp", [*ranks, "benchmarks/bench_cp.py", *methods, *peer], 130 if gpus == 2 else 260)
    bytelm = ["benchmarks/bench_bytelm.py", "--size", "1b", "--warm-up", "3", "--steps", "5", "--tokens"]
    yield Step("bytelm-all", [*ranks, *bytelm, str(TOKENS)], 60)
    yield Step("bytelm-one", [*python, *bytelm, str(TOKENS // PACKS_OF_ONE), "--accumulate", str(PACKS_OF_ONE)], 80)
    workers = ["-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    yield Step("tests", [*python, "-m", "pytest", "-q", "-m", "gpu", *workers, *TESTS, "-k", of_ranks(gpus)], 240)
    for cp in (n for n in (1, 2, 4) if n < gpus):
        grid = [*ranks, *bytelm, str(TOKENS * cp // gpus), "--cp", str(cp)]
        yield Step(f"bytelm-{gpus // cp}x{cp}", grid, 60)


def of_ranks(gpus: int) -> str:
    """What pytest's -k takes to choose the tests with that number among their parameters; on two GPUs faults too."""
    numbered = " or ".join(mark.format(gpus) for mark in ("[{}]", "[{}-", "-{}]", "-{}-"))
    return f"{numbered} or test_gpu_faults" if gpus == 2 else numbered


def run(step: Step, output: Path, seconds: float) -> str:
    """How a step ended; one that takes too long is ended with all its ranks."""
    if seconds < GRACE:
        output.write_text("")
        return "no time left"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    with output.open("w") as file, subprocess.Popen(
        step.command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=file, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher then ends its ranks, which may be in sessions of their own
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            return f"not within {seconds:.0f} s"
    return WELL if code == 0 else f"with {code}"


def last_line(output: Path) -> str:
    """The last words of a step."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:100] if lines else ""


def keep(results: Path, out: Path) -> None:
    """Copies what the programs have written so far."""
    for pattern in RESULTS:
        for path in results.glob(pattern):
            shutil.copy2(path, out)


def summary(gpus: int, began: str) -> str:
    """The rows since a date: the table of the methods, and tokens per second beside those of one GPU."""
    rows = [row for path in sorted(record.RESULTS.glob("cp_*.csv")) for row in record.load(path)
            if row["date"] >= began]  # fmt: skip
    parts = [cp_record.table(rows), cp_record.recommendations(rows), cp_record.errors(rows)]
    trained = [row for row in bench_bytelm.load_all() if row["date"] >= began]
    alone = [float(row["tokens_per_s"]) for row in trained if row["ranks"] == "1"]
    for row in trained:
        share = f", {float(row['tokens_per_s']) / gpus / alone[0]:.2f} of {gpus} times one GPU" if alone else ""
        parts.append(f"bytelm {row['size']} on {bench_bytelm.gpus(row)}: {row['tokens_per_s']} tokens/s"
                     f"{share if row['ranks'] != '1' else ''}")  # fmt: skip
    return "\n\n".join(filter(None, parts))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int, choices=(2, 4, 8), help="how many GPUs")
    parser.add_argument("out", type=Path, help="folder for results and the output of every step")
    parser.add_argument("--seconds", type=float, help="for everything (default: 295 on two GPUs, else 570)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="steps by their names, such as cp or bytelm-one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
