"""GPU times from CUDA events, in milliseconds: of calls as a user makes them, and of the GPU's work alone.

Everything runs on CuPy's current stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from statistics import median

import cupy

Call = Callable[[], object]
GROUP_MS = 40.0  # GPU time of a group of calls, aimed at
REST = 0.1  # seconds before a group: a GPU at its power limit runs slower for a while, whoever brought it there
MAX_CALLS = 50
HOST_CALLS = 20


def calls_per_group(ms: float) -> int:
    """How many calls of so many milliseconds make a group."""
    return max(1, min(MAX_CALLS, round(GROUP_MS / max(ms, 1e-3))))


def calls_per_graph(calls: int) -> int:
    """How many calls a captured graph holds; `replayed` runs it twice, for as long as a group of so many `calls`."""
    return -(-calls // 2)


def called(call: Call, calls: int) -> list[float]:
    """Times of calls made back to back on an idle GPU; where the host is slower than the GPU, its time shows."""
    stream = cupy.cuda.get_current_stream()
    events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(calls)]
    stream.synchronize()
    for start, stop in events:
        start.record(stream)
        call()
        stop.record(stream)
    stream.synchronize()
    return [cupy.cuda.get_elapsed_time(start, stop) for start, stop in events]


def replayed(replay: Call, calls: int) -> list[float]:
    """The time of one of the `calls` calls in a captured graph; the replay before it hides the graph's own launch."""
    stream = cupy.cuda.get_current_stream()
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    stream.synchronize()
    replay()
    start.record(stream)
    replay()
    stop.record(stream)
    stream.synchronize()
    return [cupy.cuda.get_elapsed_time(start, stop) / calls]


def interleaved(
    groups: Mapping[str, Callable[[], list[float]]], rounds: int, guard: Callable[[str], AbstractContextManager[object]]
) -> dict[str, float]:
    """Medians of groups that take turns, each on a rested GPU, so that none pays for what ran before it.

    Args:
        groups: name -> what times one group of calls.
        rounds: turns of every group.
        guard: name -> a context that may swallow the error of a group; a group that never succeeded has no median.
    """
    samples: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(rounds):
        for name, group in groups.items():
            time.sleep(REST)
            with guard(name):
                samples[name] += group()
    return {name: median(times) for name, times in samples.items() if times}


def host(call: Call, rounds: int) -> float:
    """Median host milliseconds of a call that nobody waits for, over rounds of HOST_CALLS in a row.

    A mean counts Python's garbage collections, one round whatever else the machine did just then.
    """
    stream = cupy.cuda.get_current_stream()
    times: list[float] = []
    for _ in range(rounds):
        time.sleep(REST)
        stream.synchronize()
        moments = [time.perf_counter()]
        for _ in range(HOST_CALLS):
            call()
            moments.append(time.perf_counter())
        times += [after - before for before, after in pairwise(moments)]
    stream.synchronize()
    return median(times) * 1e3


def finished(call: Call, calls: int) -> float:
    """Median host milliseconds from a call to the end of its GPU work."""
    stream = cupy.cuda.get_current_stream()
    times = []
    for _ in range(calls):
        stream.synchronize()
        start = time.perf_counter()
        call()
        stream.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)
