"""Timelines: what all ranks compute and exchange in a step, on one axis, and how much of the exchange is hidden.

```python
with thdattn.timeline.record(comm) as timeline:
    out, saved = attn.forward(q, k, v, plan)
    attn.backward(dout, saved)
if comm.rank == 0:
    print(timeline)
timeline.save("step.svg")
```

Record a later step than the first one, which compiles kernels and connects ranks. On a GPU, a bar lies between two CUDA
events on the stream that did the work: a kernel, the copies of a group of heads, or a collective of NCCL. On the host,
its clock times collectives and the functions of the NumPy engine.

* A collective's bar includes its wait for other ranks. A stream that waits for another one shows a gap.
* Work of others, CuPy's own kernels included, has no bar and does not count as computing. Put it into a block of
  `computing`.
* A captured CUDA graph has one bar for each replay, which counts as computing. To see what is in it, record the step
  without graphs.
* The recording costs two events for each bar. Kernels that may start early wait for the end of the one before them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import NamedTuple

from thdattn import spans
from thdattn.arguments import check_kind, shown
from thdattn.comm import Comm
from thdattn.comm.failures.outcomes import attempt, results
from thdattn.engines.select import choose_engine
from thdattn.install import remedy
from thdattn.spans import COMPUTE, EXCHANGE, SUM, computing

__all__ = ["Row", "Timeline", "computing", "record"]

Interval = tuple[float, float]  # begin and end of a time

_MEETINGS = 20  # barriers at the start, of which the shortest aligns the clocks


class Row(NamedTuple):
    """Bar of a timeline.

    rank: number in the comm that was recorded.
    lane: "compute"; "exchange", of keys, values, heads or partial sums; or "sum", of gradients or other results.
    name: kernel, collective, replayed graph, or function of the NumPy engine.
    begin, end: milliseconds since the begin of the first bar of all ranks.
    """

    rank: int
    lane: str
    name: str
    begin: float
    end: float


class Timeline:
    """Bars of all ranks, made by record. As text it is one line about the step.

    Attributes:
        rows: the bars, rank by rank, each in the order of their ends on the host; empty until the block has ended.
        error: milliseconds by which the times of two ranks may differ, as measured at the start.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rows: list[Row] = []
        self.error = 0.0

    @property
    def hidden(self) -> float | None:
        """Share of the communication that is hidden, from 0 to 1; None if ranks exchanged nothing.

        It is the time in which a rank exchanges or sums while it computes, over the time in which it exchanges or sums.
        Each is summed over ranks.
        """
        computes, communicates = self.busy(COMPUTE), self.busy(EXCHANGE, SUM)
        whole = sum(map(length, communicates))
        both = sum(map(length, map(common, computes, communicates)))
        return both / whole if whole else None

    def busy(self, *lanes: str) -> list[list[Interval]]:
        """Return for each rank when some lanes have a bar: (begin, end) in milliseconds, ascending and disjoint."""
        return [merged((row.begin, row.end) for row in self.rows if row.rank == rank and row.lane in lanes)
                for rank in range(self._comm.size)]

    def __str__(self) -> str:
        length = max((row.end for row in self.rows), default=0.0)
        share = "no communication" if self.hidden is None else f"{100 * self.hidden:.0f} % of communication is hidden"
        ranks = f"{self._comm.size} rank{'s' * (self._comm.size > 1)}"
        return f"{ranks}, {length:,.2f} ms: {share}; clocks agree within {self.error:.2g} ms"

    def save(self, path: str | PathLike[str]) -> None:
        """Draw the bars with Matplotlib. Collective; rank 0 writes the file.

        Every rank has a line for each lane. Communication is pale where it is hidden. The first 16 ranks are drawn.

        Args:
            path: a file whose name ends in .svg, .png or .pdf.

        Raises:
            ValueError: on every rank: the file cannot be written, or Matplotlib is missing on rank 0.
        """
        refusal = ""
        if self._comm.rank == 0:
            try:
                from thdattn.timeline import picture

                picture.draw(self, path)
            except ImportError as error:
                refusal = f"a picture needs Matplotlib ({error}); install it with: {remedy('examples')}"
            except (OSError, TypeError, ValueError) as error:
                refusal = f"path is {shown(path)}, which cannot be written ({error}); pass one such as step.svg"
        self._comm.agree("the picture of a timeline", {}, refusal)


@contextmanager
def record(comm: Comm) -> Iterator[Timeline]:
    """Record what all ranks of a comm do in a block. Collective.

    The timeline is complete when the block has ended on all ranks, on each of them. After an error in the block it
    stays empty, as other ranks may be elsewhere. A process that is one rank records all of its threads.

    Barriers at the start align the clocks of ranks, as exactly as `Timeline.error` says. That is about the time of a
    barrier, and on GPUs that of waiting for an event.

    Args:
        comm: the ranks. Work for other comms counts too, so for groups of ranks pass the comm that they are split from.

    Raises:
        TypeError: comm is no Comm.
        ValueError: on every rank: a rank records already, or captures a CUDA graph. Record the replay, or the step
            without graphs.
        RuntimeError: on every rank: the GPU of one has failed in the block.
    """
    check_kind("comm", comm, Comm, "make one with thdattn.comm.init(); an attention's is attn.comm")
    engine, thread = choose_engine("auto", comm)[0], threading.get_ident()
    comm.agree("the start of a timeline", {}, _refusal(thread in spans.active, engine.capture() is not None))
    meetings = [_meet(comm) for _ in range(_MEETINGS)]
    recorder = spans.Recorder(engine.device == "cuda")
    spans.active[thread] = recorder
    timeline = Timeline(comm)
    try:
        yield timeline
    finally:
        del spans.active[thread]
    comm.agree("the end of a timeline", {})
    outcomes = comm._gather_values(attempt(lambda: _Recording(meetings, recorder.error, recorder.spans())))
    _fill(timeline, results("the recording of a timeline failed", outcomes))


class _Recording(NamedTuple):
    """Recording of one rank, in seconds: of barriers when it came and left, of its clocks the error, and its spans."""

    meetings: list[Interval]
    error: float
    spans: list[tuple[str, str, float, float]]


def _refusal(records: bool, captures: bool) -> str:
    """Say why a rank cannot begin; "": it can."""
    if captures:
        return "it captures a CUDA graph, which does nothing yet; record a replay, or the step without graphs"
    return "it records already, wanted one recording at a time; end the first one" if records else ""


def _meet(comm: Comm) -> Interval:
    """Return when this rank came to a barrier and left it, in seconds."""
    begin = time.perf_counter()
    comm.barrier()
    return begin, time.perf_counter()


def _fill(timeline: Timeline, ranks: Sequence[_Recording]) -> None:
    """Put the spans of all ranks on one axis, by the time at which each left the barrier of the shortest wait.

    No rank leaves a barrier before all have come. So the times at which they leave differ by the longest wait.
    """
    waits = [max(left - came for came, left in each) for each in zip(*(rank.meetings for rank in ranks), strict=True)]
    shortest = waits.index(min(waits))
    timeline.error = 1000 * (waits[shortest] + 2 * max(rank.error for rank in ranks))
    rows = []
    for number, rank in enumerate(ranks):
        _, zero = rank.meetings[shortest]
        rows += [Row(number, lane, name, 1000 * (begin - zero), 1000 * (end - zero))
                 for lane, name, begin, end in rank.spans]
    first = min((row.begin for row in rows), default=0.0)
    timeline.rows = [row._replace(begin=row.begin - first, end=row.end - first) for row in rows]


# --- sets of times, as ascending lists of intervals that do not touch ------------------------------------------


def merged(some: Iterable[Interval]) -> list[Interval]:
    """Return the set of all times in some intervals, which may overlap."""
    whole: list[Interval] = []
    for begin, end in sorted(some):
        if whole and begin <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((begin, end))
    return whole


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times in both sets."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(times: Iterable[Interval]) -> float:
    """Return the length of a set."""
    return sum(end - begin for begin, end in times)
