"""Chaos rounds: jobs in which a rank raises, dies, stops, is late or gets no memory at a random point.

Each round is a job of its own under mpiexec. It must end in time, with an error exactly where one is due. Every result
before that must be right. No process, shared memory or GPU memory may be left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thdattn.cli.record import save
from thdattn.comm import launcher
from thdattn.fuzz.chaos_ranks import Round

KINDS = {"reference": ("raise", "kill", "stop", "late", "absent", "memory"),
         "cuda": ("raise", "kill", "stop", "late", "absent", "memory", "window", "window")}
TOKEN = "THDATTN_CHAOS"
PROGRAM = "import sys; from thdattn.fuzz import chaos_ranks; chaos_ranks.main(*sys.argv[1:])"
AT_ONCE = ("raise", "kill", "memory")  # the job ends at once; after other faults at the deadline
ENDS_WELL = ("late", "nothing")
MAY_GO_ON = (*ENDS_WELL, "window")
SECONDS_TO_BEGIN, SECONDS_TO_FAIL, SECONDS_TO_END = 120.0, 240.0, 30.0  # on a busy machine
SECONDS_TO_VANISH = 30.0
SECONDS_TO_COMPILE = 400.0
SECONDS_TO_TELL = 1.0  # in which a rank prints its stacks
LATEST_ALLOCATION, LATEST_WINDOW = 400, 8
OF_LIBRARIES = ("mpich", "vader_segment", "sm_segment", "psm", "nccl", "cuda.shm", "sem.")  # prefixes in /dev/shm
CUDA = "/dev/nvidia-uvm"  # a file that processes have open which use CUDA
LINGERING_MIB = 64  # memory that a GPU may have in use more than before

_stopping = threading.Event()  # SIGTERM has come


class Stopped(Exception):
    """SIGTERM has come before a round has ended."""


class Outcome(NamedTuple):
    """Outcome of a round.

    status: of the launcher.
    seconds: from the fault to the end.
    right: number of results that were right.
    wrong: what went wrong.
    """

    chaos: Round
    status: int
    seconds: float
    right: int
    wrong: list[str]

    def __str__(self) -> str:
        ended = f"status {self.status} {self.seconds:.1f} s after the fault, {self.right} results right"
        if not self.wrong:
            return f"{self.chaos.words()}: {ended}"
        return f'FAILED --chaos --case "{self.chaos.words()}": {"; ".join(self.wrong)} ({ended})'


@dataclass
class Job:
    """Launcher with its ranks, and their output on stderr.

    token: value of a variable in the environment of all its processes.
    """

    process: subprocess.Popen[str]
    token: str
    lines: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, chaos: Round, engine: str, timeout: float) -> Job:
        """Start the ranks of a round."""
        command = [*(launcher.mpiexec() or ()), "-n", str(chaos.ranks), sys.executable, "-c", PROGRAM, chaos.words(),
                   engine, f"{timeout:g}"]
        token = f"{os.getpid()}-{time.monotonic_ns()}"
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True, env={**os.environ, TOKEN: token})
        job = cls(process, token)
        threading.Thread(target=job._read, daemon=True).start()
        return job

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def said(self, what: str) -> list[str]:
        """Return the lines with these words."""
        return [line for line in list(self.lines) if what in line]

    def ended(self) -> bool:
        """Return whether the launcher has ended."""
        return self.process.poll() is not None

    def running(self) -> list[int]:
        """Return the job's processes that exist, including stopped ones and those that ranks have started."""
        mine = f"{TOKEN}={self.token}".encode()
        return processes(lambda folder: mine in (folder / "environ").read_bytes().split(b"\0"))

    def stacks(self) -> str:
        """Return the stacks of the ranks that still run, which say where a job hangs."""
        told: list[str] = []
        for number in {int(line.split()[1]) for line in self.said(" begins")} & {*self.running()}:
            before = len(self.lines)
            os.kill(number, signal.SIGUSR1)
            time.sleep(SECONDS_TO_TELL)
            told += [f"process {number}:\n", *self.lines[before:]]
        return "".join(told)

    def clean_up(self) -> None:
        """End all that is left of the job."""
        if not self.ended():
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        for number in self.running():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if not self.ended():
            os.killpg(self.process.pid, signal.SIGKILL)


def processes(are_meant: Callable[[Path], bool]) -> list[int]:
    """Return the processes of this user that are meant, by their folders in /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or ended
            if are_meant(folder):
                found.append(int(folder.name))
    return found


def chaos(arguments: argparse.Namespace) -> int:
    """Run rounds until the time is over.

    Returns:
        The exit status: 0; 1 if something was wrong; 2 without mpiexec or for a line that is no round.
    """
    used = gpu_memory()
    engine = arguments.engine if arguments.engine != "auto" else "cuda" if len(used) >= arguments.ranks else "reference"
    try:
        if launcher.mpiexec() is None:
            raise ValueError("there is no mpiexec, wanted one that starts ranks; pip install 'thdattn[mpich]'")
        drawn = draw(arguments, engine) if arguments.case is None else iter([Round.from_words(arguments.case)])
    except ValueError as error:
        print(f"python -m thdattn fuzz: error: {error}", file=sys.stderr)
        return 2
    begin, shared = time.monotonic(), shared_memory()
    outcomes = []
    with _sigterm_ends_rounds():
        if engine == "cuda":  # compile first, which may take one rank longer than another waits
            quiet = [Round(ranks=arguments.ranks, seed=seed) for seed in range(2)]
            outcomes = _played(iter(quiet), len(quiet), engine, SECONDS_TO_COMPILE)
        outcomes += _played(drawn, arguments.jobs, engine, arguments.timeout)
    lost, of_libraries = left_behind(used if engine == "cuda" else [], shared, arguments.settle)
    for text in lost:
        print(f"FAILED: {text}")
    wrong, right = [str(each) for each in outcomes if each.wrong] + lost, sum(each.right for each in outcomes)
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(Counter(x.chaos.kind for x in outcomes).items()))
    seconds, beside = time.monotonic() - begin, " beside other programs" * gpus_are_shared()
    print(f"chaos: {len(outcomes)} rounds in {seconds:.0f} s ({kinds}), seed {arguments.seed}, engine {engine}, "
          f"{arguments.ranks} ranks, {right} results right, {len(wrong)} failed; GPU memory in use {used} MiB before, "
          f"{gpu_memory()} after{beside}; {of_libraries} files of libraries left in /dev/shm")
    if arguments.record is not None:
        made = {"kind": "chaos rounds", "ranks": f"{arguments.ranks} ranks", "rounds": len(outcomes), "failures": wrong,
                "packs": right, "seconds": seconds, "seeds": [arguments.seed]}
        save(arguments.record, engine, made)
    return int(bool(wrong))


@contextmanager
def _sigterm_ends_rounds() -> Iterator[None]:
    """Let SIGTERM end the rounds within a block. Those that have ended count, the others are cleaned up."""
    _stopping.clear()
    before = signal.signal(signal.SIGTERM, lambda *_: _stopping.set())
    try:
        yield
    finally:
        _stopping.clear()
        signal.signal(signal.SIGTERM, before)


def _played(drawn: Iterator[Round], jobs: int, engine: str, timeout: float) -> list[Outcome]:
    """Play rounds, so many at a time, each drawn when a job has ended; print the outcome of each."""
    taking, outcomes = threading.Lock(), list[Outcome]()

    def take() -> Round | None:
        with taking:
            return next(drawn, None)

    def work() -> None:
        while not _stopping.is_set() and (each := take()) is not None:
            with suppress(Stopped):
                outcomes.append(play(each, engine, timeout))
                print(outcomes[-1], flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work) for _ in range(jobs)]:
            future.result()
    return outcomes


def draw(arguments: argparse.Namespace, engine: str) -> Iterator[Round]:
    """Yield rounds until the time is over, or until there were as many as asked for; kinds take turns."""
    begin, rng = time.monotonic(), np.random.default_rng([arguments.seed, 7])
    kinds, number = KINDS[engine], 0
    while arguments.rounds is None or number < arguments.rounds:
        if arguments.rounds is None and time.monotonic() - begin >= arguments.seconds:
            return
        kind = kinds[number % len(kinds)]
        # Most faults come early: more packs before one find little more.
        latest = LATEST_WINDOW if kind == "window" else int(rng.choice([20, 100, LATEST_ALLOCATION]))
        yield Round(kind, arguments.ranks, int(rng.integers(arguments.ranks)), int(rng.integers(1, latest + 1)),
                    int(rng.integers(2**31)))
        number += 1


def play(chaos: Round, engine: str, timeout: float) -> Outcome:
    """Run a round to its end.

    Args:
        timeout: seconds that ranks wait for each other in a collective.

    Raises:
        Stopped: SIGTERM has come; nothing is left of the job.
    """
    job, wrong, fault = Job.start(chaos, engine, timeout), list[str](), time.monotonic()
    try:
        if not _wait(lambda: len(job.said(" begins")) == chaos.ranks or job.ended(), SECONDS_TO_BEGIN):
            wrong.append("ranks did not begin")
        waits = max(SECONDS_TO_FAIL, timeout)
        if not _wait(lambda: bool(job.said(" fails")) or job.ended(), waits):
            wrong.append("the rank did not fail")
        fault = time.monotonic()
        # A start has a longer deadline, and a rank whose error is caught goes on.
        limit = SECONDS_TO_END + (0 if chaos.kind in AT_ONCE else timeout) + (waits if chaos.kind in MAY_GO_ON else 0)
        if not _wait(job.ended, limit):
            wrong.append(f"it still runs {limit:.0f} s after the fault")
            print(f"{chaos.words()} still runs, its stacks are\n{job.stacks()}", flush=True)
        seconds = time.monotonic() - fault
        if not _wait(lambda: not job.running(), SECONDS_TO_VANISH):
            wrong.append(f"processes {job.running()} outlive the launcher")
    finally:
        job.clean_up()
    status = job.process.wait()
    return Outcome(chaos, status, seconds, len(job.said("finds a pack right")), wrong + _mistakes(chaos, job, status))


def _mistakes(chaos: Round, job: Job, status: int) -> list[str]:
    """Return what is wrong with the output and the status of a job that has ended."""
    wrong = [line.strip() for line in job.said("FAILED --case")]
    well, reached = len(job.said(" ends well")), bool(job.said(" fails"))
    if (status == 0) != (well == chaos.ranks):
        wrong.append(f"{well} of {chaos.ranks} ranks end well and the status is {status}")
    if chaos.kind in ENDS_WELL or not reached:  # or the packs were over before the fault
        wrong += [f"it ends with status {status}: {_last_words(job)}"] * (status != 0)
    elif chaos.kind == "window":  # all ranks caught it and went on, or the job ended
        caught = len(job.said(" caught "))
        wrong += [f"{caught} of {chaos.ranks} ranks caught the error and it ends well"] * (
            status == 0 and caught != chaos.ranks)
    else:
        wrong += [f"it ends well after {chaos.kind}"] * (status == 0)
    return wrong


def _last_words(job: Job) -> str:
    told = [line for line in job.lines if "thdattn: " in line or "Error: " in line]
    return " | ".join(line.strip() for line in told[-6:] or job.lines[-6:])


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if _stopping.is_set():
            raise Stopped
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


# ------------------------------------------------------------------------------------------------ what stays behind


def left_behind(used: list[int], shared: set[str], settle: float) -> tuple[list[str], int]:
    """Return what rounds have left in GPUs and in shared memory.

    Args:
        used: MiB in use on each GPU before; what is in use afterwards is not judged while other programs use GPUs.
        settle: seconds in which the memory must be free again.

    Returns:
        (what is wrong, number of files left by libraries whose processes were killed, as MPICH does).
    """
    def more() -> list[str]:
        return [f"GPU {number} has {now} MiB in use, and had {before} before the first round"
                for number, (before, now) in enumerate(zip(used, gpu_memory(), strict=False))
                if now > before + LINGERING_MIB]

    _wait(lambda: not more(), settle)
    orphans = sorted(name for name in shared_memory() - shared if not _is_mapped(name))
    ours = [name for name in orphans if not name.startswith(OF_LIBRARIES)]
    wrong = [] if gpus_are_shared() else more()
    wrong += [f"/dev/shm has {', '.join(ours)} more than before"] * bool(ours)
    return wrong, len(orphans) - len(ours)


def gpu_memory() -> list[int]:
    """Return the MiB in use on each GPU; [] without any."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in said.split() if line.isdecimal()]


def gpus_are_shared() -> bool:
    """Return whether another process uses CUDA."""
    def has_opened(folder: Path) -> bool:
        return CUDA in map(os.path.realpath, (folder / "fd").iterdir())

    return processes(has_opened) not in ([], [os.getpid()])


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _is_mapped(name: str) -> bool:
    """Return whether a process has this shared memory mapped."""
    return bool(processes(lambda folder: f" /dev/shm/{name}\n" in (folder / "maps").read_text()))
