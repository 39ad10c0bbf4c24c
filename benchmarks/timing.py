"""GPU times from CUDA events, in milliseconds: of calls as a user makes them, and of the GPU's work alone.

All calls run on CuPy's current stream. Of several ranks, times are those of the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import cupy
import numpy as np

import thdattn

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample")
GROUP_MS = 40.0  # wanted GPU time of a group of calls
REST = 0.1  # seconds before a group: after work at its power limit, a GPU runs slower for a while
REPLAYS = 2  # timed replays of a graph in a row
SUSTAINED = 2.0  # seconds without rest
AHEAD = 2  # replays that are queued meanwhile
MAX_CALLS = 50


def calls_per_group(ms: float) -> int:
    """Return how many calls of so many milliseconds make a group."""
    return max(1, min(MAX_CALLS, round(GROUP_MS / max(ms, 1e-3))))


def calls_per_graph(calls: int) -> int:
    """Return how many calls a graph holds, so that all its replays last as long as a group of `calls`.

    So both timings look at the same time after a rest, in which a GPU may come to its power limit.
    """
    return -(-calls // (1 + REPLAYS))


def called(call: Call, calls: int) -> list[float]:
    """Time calls made back to back on an idle GPU; where the host is slower than the GPU, its time shows."""
    return [ms for (ms,) in stepped([call], calls)]


def stepped(steps: Sequence[Call], calls: int) -> list[list[float]]:
    """Time steps that follow each other; return the times of all steps, for each call."""
    stream = cupy.cuda.get_current_stream()
    events = [[cupy.cuda.Event() for _ in range(len(steps) + 1)] for _ in range(calls)]
    stream.synchronize()
    for first, *others in events:
        first.record(stream)
        for step, mark in zip(steps, others, strict=True):
            step()
            mark.record(stream)
    stream.synchronize()
    return [[cupy.cuda.get_elapsed_time(start, stop) for start, stop in pairwise(marks)] for marks in events]


def replayed(replay: Call, calls: int) -> list[float]:
    """Time one of the `calls` calls in a captured graph; a replay before hides the launch of the graph."""
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    replay()
    marks = [_mark()]
    for _ in range(REPLAYS):
        replay()
        marks.append(_mark())
    stream.synchronize()
    return _between(marks, calls)


def sustained(replay: Call, calls: int) -> list[float]:
    """Time one of the `calls` calls in a graph that is replayed for SUSTAINED seconds without rest.

    The first quarter, in which the GPU comes to its power limit, does not count.
    """
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    start, marks = time.perf_counter(), [_mark()]
    while time.perf_counter() - start < SUSTAINED:
        replay()
        marks.append(_mark())
        if len(marks) > AHEAD:
            marks[-1 - AHEAD].synchronize()
    stream.synchronize()
    times = _between(marks, calls)
    return times[len(times) // 4 :]


def _mark() -> Any:
    event = cupy.cuda.Event()
    event.record(cupy.cuda.get_current_stream())
    return event


def _between(marks: Sequence[Any], calls: int) -> list[float]:
    return [cupy.cuda.get_elapsed_time(start, stop) / calls for start, stop in pairwise(marks)]


def interleaved(
    groups: Mapping[Name, Callable[[], list[Sample]]], rounds: int,
    guard: Callable[[Name], AbstractContextManager[object]],
) -> dict[Name, list[Sample]]:
    """Run groups in turns, each on a rested GPU, and return their samples.

    Args:
        groups: name -> function that times one group of calls.
        rounds: turns of every group.
        guard: name -> context that may swallow the error of a group; a group that never succeeded has no samples.
    """
    samples: dict[Name, list[Sample]] = {name: [] for name in groups}
    for _ in range(rounds):
        for name, group in groups.items():
            time.sleep(REST)
            with guard(name):
                samples[name] += group()
    return {name: times for name, times in samples.items() if times}


def race(
    comm: thdattn.comm.Comm, ways: Mapping[Name, Mapping[str, Call]], rounds: int
) -> dict[tuple[Name, str], list[float]]:
    """Time ways of one or more named steps in turns: (way, step) -> times; the step "both" is all of them together."""
    groups = {}
    for name, steps in ways.items():
        calls = [*steps.values()]
        for _ in range(2):  # the second one may be captured
            for call in calls:
                call()
        (ms,) = slowest(comm, map(sum, stepped(calls, 1)))
        groups[name] = partial(_together, comm, calls, calls_per_group(ms))
    times = {}
    for name, samples in interleaved(groups, rounds, lambda _: nullcontext()).items():
        columns = zip(*([*each, sum(each)] for each in samples), strict=True)
        for step, column in zip([*ways[name], "both"], columns, strict=True):
            times[name, step] = slowest(comm, column)
    return times


def _together(comm: thdattn.comm.Comm, steps: Sequence[Call], calls: int) -> list[list[float]]:
    comm.barrier()
    return stepped(steps, calls)


def slowest(comm: thdattn.comm.Comm, samples: Iterable[float]) -> list[float]:
    """Return each sample of the rank that took longest."""
    longest = cupy.asarray(np.array([*samples], np.float64))
    comm.all_reduce(longest, "max")
    return [float(x) for x in longest.get()]


def returned(call: Call, calls: int) -> list[float]:
    """Time the host from a call to its return, each on an idle GPU."""
    stream = cupy.cuda.get_current_stream()
    times = []
    for _ in range(calls):
        stream.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    stream.synchronize()
    return times

