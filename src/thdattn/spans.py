"""Spans of time: when each kernel, copy and collective of a rank begins and ends, while a thread has them recorded.

All launches and collectives of the package pass here, and record nothing while `active` is empty. thdattn.timeline
records a step and draws it.
"""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import numpy as np

COMPUTE, EXCHANGE, SUM = LANES = "compute", "exchange", "sum"
_LANE_OF = {"thd_peer_exchange": EXCHANGE, "thd_peer_reduce": SUM, "all_reduce": SUM, "reduce_scatter": SUM,
            "sum": SUM, "replay": COMPUTE}
_NOTHING = nullcontext()
_TIES = 5  # comparisons of the two clocks, of which the closest counts

Function = TypeVar("Function", bound=Callable[..., Any])
End = Callable[[], None]


class Recorder:
    """Spans of one rank, in seconds of the host's clock.

    Events of CUDA time what a stream does. A captured stream does nothing yet, so it has no spans.

    Args:
        has_gpu: the rank computes on CuPy's current GPU.

    Attributes:
        error: seconds by which the times of the GPU may be wrong; 0 without one.
    """

    def __init__(self, has_gpu: bool) -> None:
        self._cupy: Any = None
        self._open: set[Any] = set()  # streams in a span; None: the host
        self._spans: list[tuple[str, str, Any, Any]] = []
        self.error = 0.0
        if has_gpu:
            import cupy

            self._cupy = cupy
            ties = [self._tie() for _ in range(_TIES)]
            self.error, self._tied_at, self._tied = min(ties, key=operator.itemgetter(0))

    def _tie(self) -> tuple[float, float, Any]:
        """Return an event, the time at which it was reached, and the seconds by which that may be wrong."""
        begin = time.perf_counter()
        event = self._cupy.cuda.get_current_stream().record()
        event.synchronize()
        end = time.perf_counter()
        return (end - begin) / 2, (begin + end) / 2, event

    def current_stream(self) -> Any:
        """Return the current stream; None: there is no GPU, and the host computes."""
        return None if self._cupy is None else self._cupy.cuda.get_current_stream()

    def begin(self, lane: str, name: str, stream: Any) -> End | None:
        """Begin a span, of the host if stream is None; return what ends it.

        None is returned where nothing is to be recorded: inside another span of the stream, or in a capture.
        """
        if _key(stream) in self._open or (stream is not None and not self._times(stream)):
            return None
        begun = self._now(stream)
        return lambda: self._spans.append((lane, name, begun, self._now(stream)))

    @contextmanager
    def span(self, lane: str, name: str, stream: Any) -> Iterator[None]:
        """Record a block, of which other spans on the same stream are part."""
        end = self.begin(lane, name, stream)
        if end is None:
            yield
            return
        self._open.add(_key(stream))
        try:
            yield
            end()
        finally:
            self._open.discard(_key(stream))

    def _times(self, stream: Any) -> bool:
        return self._cupy is not None and not stream.is_capturing()

    def _now(self, stream: Any) -> Any:
        return time.perf_counter() if stream is None else stream.record()

    def spans(self) -> list[tuple[str, str, float, float]]:
        """Return (lane, name, begin, end) of all spans; wait for those of the GPU."""
        return [(lane, name, self._seconds(begin), self._seconds(end)) for lane, name, begin, end in self._spans]

    def _seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return float(self._tied_at + self._cupy.cuda.get_elapsed_time(self._tied, mark) / 1000)


active: dict[int, Recorder] = {}  # by the thread that has its rank's spans recorded


def begin(kernel: str, stream: Any) -> End | None:
    """Begin the span of a kernel on a stream; see Recorder.begin. Ask for it while `active` is not empty."""
    recorder, name = _recorder(), kernel.partition("<")[0]
    return None if recorder is None else recorder.begin(_LANE_OF.get(name, COMPUTE), name, stream)


def collective(what: str, stream: Any) -> AbstractContextManager[object]:
    """Return a block in which a stream, or the host for None, is given what it does with other ranks."""
    recorder = _recorder()
    if recorder is None:
        return _NOTHING
    return recorder.span(_LANE_OF.get(what.partition(" ")[0], EXCHANGE), what, stream)


@contextmanager
def watched(watch: AbstractContextManager[object], what: str, array: Any) -> Iterator[None]:
    """Record a block of Comm.watched: what the current stream does, or the host if the array is there."""
    recorder = _recorder()
    stream = None if recorder is None or type(array) is np.ndarray else recorder.current_stream()
    with collective(what, stream), watch:
        yield


def computing(name: str) -> AbstractContextManager[object]:
    """Return a block whose work appears on timelines as computing: of the current stream, or of a host without a GPU.

    Args:
        name: of the bar.
    """
    recorder = _recorder()
    return _NOTHING if recorder is None else recorder.span(COMPUTE, name, recorder.current_stream())


def on_host(function: Function) -> Function:
    """Record the calls of a function that computes on the host."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder()
        if recorder is None:
            return function(*args, **kwargs)
        with recorder.span(COMPUTE, function.__name__, None):
            return function(*args, **kwargs)

    return cast(Function, call)


def _recorder() -> Recorder | None:
    """Return the recorder of this thread's rank.

    A process that is one rank has one recorder, for all its threads, as autograd's. Simulated ranks have one each.
    """
    if not active:
        return None
    recorders = list(active.values())
    return recorders[0] if len(recorders) == 1 else active.get(threading.get_ident())


def _key(stream: Any) -> Any:
    return None if stream is None else stream.ptr
