"""Programs in which a rank fails, and their end, for CPU and GPU tests."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import launch

PROGRAM = Path(__file__).parent / "ranks" / "fault_ranks.py"
SECONDS_TO_END = 12  # of a machine with other things to do, from the deadline on
SECONDS_TO_BEGIN = 60
HOST = re.escape(socket.gethostname())
PROCESS = re.compile(r"rank \d+ is process (\d+) and begins")


class Job:
    """fault_ranks.py on some ranks; rank 1 fails in a way, at a place."""

    def __init__(self, ranks: int, kind: str, place: str, backend: str, timeout: float) -> None:
        words = [kind, place, backend, f"{timeout:g}"]
        self._process = launch.start([*launch.mpiexec(ranks), sys.executable, str(PROGRAM), *words])
        self._said: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._said]
        for reader in self._readers:
            reader.start()

    @property
    def errors(self) -> str:
        """Output of all ranks and the launcher on stderr."""
        return "".join(self._said["stderr"])

    def end(self, deadline: float) -> str:
        """Return the errors in the end; fail unless every process ends in time and no rank prints to stdout."""
        try:
            self._wait(lambda: " and fails" in self.errors, SECONDS_TO_BEGIN, "rank 1 did not fail")
            self._wait(lambda: self._process.poll() is not None, deadline + SECONDS_TO_END, "the launcher still runs")
            self._wait(lambda: not self._running(), 5, "a rank outlives the launcher")
            reading = self._readers
            self._wait(lambda: not any(map(threading.Thread.is_alive, reading)), 5, "something outlives the ranks")
        finally:
            self.clean_up()
        assert self._process.returncode != 0, self.errors
        assert "ends well" not in self.errors, self.errors
        assert not re.search("rank|thdattn|Traceback", "".join(self._said["stdout"])), "MPICH's launcher may say more"
        return self.errors

    def _read(self, name: str) -> None:
        for line in getattr(self._process, name):
            self._said[name].append(line)

    def _wait(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, f"{otherwise} after {seconds:g} s: {self.errors}"
            time.sleep(0.05)

    def _running(self) -> list[int]:
        return [process for process in self._started() if is_running(process)]

    def _started(self) -> list[int]:
        return [int(number) for number in PROCESS.findall(self.errors)]

    def clean_up(self) -> None:
        """End what still runs."""
        if self._process.poll() is None:
            launch.end(self._process)
        for process in self._running():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def ends(jobs: dict[str, Job], deadline: float) -> dict[str, str]:
    """Return the errors of jobs that run at the same time, see `end`."""
    try:
        return {name: job.end(deadline) for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.clean_up()


def said(
    rank: int, size: int, operation: str, limit: float, late: str = "one has died, has stopped, never came or .*"
) -> re.Pattern[str]:
    """Return the pattern of a rank's last words at its deadline; it knows the size unless that is 0."""
    who = f"rank {rank}{f' of {size}' if size else ''} on {HOST}"
    return re.compile(
        rf"^thdattn: {who}: {operation} has not completed within {limit:g} s \(waited (\d+\.\d) s\), ending all ranks: "
        rf"{late}; if one is only late", re.MULTILINE)


def missed(size: int, operation: str, missing: str, host: str = HOST) -> re.Pattern[str]:
    """Return the pattern of a rank's words on a missing rank 1, before its deadline."""
    return re.compile(
        rf"^thdattn: rank [02-9] of {size} on {host}: {operation} waits in vain \(waited (\d+\.\d) s\), ending all "
        rf"ranks: rank 1 of {size} on {host} {missing}; "
        r"(?:its|the) last operation (?:heard of )?was \w",
        re.MULTILINE)


def is_running(process: int) -> bool:
    """Return whether such a process runs; one that has ended may wait for ever for its parent to ask for its status."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def until(lines: Iterable[str], pattern: str) -> Iterator[str]:
    """Yield the lines up to the first one of a pattern."""
    for line in lines:
        yield line
        if re.search(pattern, line):
            return


def side_processes(rank: str) -> list[str]:
    """Return the side processes that a process has or had."""
    ending = f"/heartbeat.py\0\\d+\0{rank}\0$"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if re.search(ending, (process / "cmdline").read_text()):
                found.append(process.name)
    return found
