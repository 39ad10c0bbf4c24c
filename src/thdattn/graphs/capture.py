"""Capture and replay: functions of arrays that become CUDA graphs when they have run a few times.

A captured function is called like the function. Its first calls run eagerly, which compiles kernels and connects
communicators; the next one is captured; from then on a call copies what is not in its place yet into the arrays that
the graph reads, replays the graph, and returns the arrays that it writes, the same at every call. Without a GPU the
function itself is called, after the same checks, so that a program is one and the same everywhere.
"""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from thdattn.comm import Comm
from thdattn.graphs.config import CudaGraphConfig

P = ParamSpec("P")
R = TypeVar("R")

Array = Any


class Graphs:
    """The CUDA graphs of one program: their stream, their memory, and their end.

    Graphs that share a pool use memory again that an earlier one has freed: they are replayed in the order of their
    capture, one pass through a model after the other, and results are read before the next pass. Replays on several
    streams wait for each other, as two graphs must not be at work on one communicator.

    Args:
        comm: the ranks. Graphs end before it: comm.close() closes them first, also at the interpreter's exit.
        config: what is captured; impl="none" captures nothing.

    Attributes:
        config: as passed.
        active: whether anything is captured: there is a GPU, and config.impl is not "none".
        num_overflows: batches that ran eagerly as they did not fit; see StaticPack.
    """

    def __init__(self, comm: Comm, config: CudaGraphConfig) -> None:
        self.config = config
        self.num_overflows = 0
        self._comm = comm
        self._captured: list[Captured[..., Any]] = []
        self._pool: Any = None
        self._static: set[int] = set()  # addresses of what graphs read and write, which stays where it is
        self._last: tuple[int, Any] | None = None  # stream and event of the last replay
        self._stream: Any = None
        self.active = config.impl != "none" and "cuda" in comm.devices and _gpu_is_usable()
        if self.active:
            import cupy

            self._stream = cupy.cuda.Stream(non_blocking=True)
        comm.before_close(self.close)
        atexit.register(self.close)

    def captured(self, function: Callable[P, R], name: str) -> Captured[P, R]:
        """The function, to be captured after config.warmup_steps calls.

        Args:
            function: of arrays on the current GPU and of other values, in tuples, lists, dictionaries and dataclasses.
                It must neither wait for the GPU nor copy from the host; what it does to arrays that are no arguments,
                such as adding to a gradient, every replay does again.
            name: for messages.
        """
        made = Captured(self, function, name)
        self._captured.append(made)
        return made

    def pair(self, forward: Callable[..., tuple[Any, Any]], backward: Callable[..., Any], name: str) -> Pair:
        """A forward and its backward, each a graph."""
        return Pair(self, forward, backward, name)

    def close(self) -> None:
        """Destroys the graphs and gives their memory back; what they returned must not be used any more."""
        atexit.unregister(self.close)
        self._comm.forget(self.close)
        for captured in self._captured:
            captured.drop()
        self._captured, self._last, self._static = [], None, set()
        if self._pool is not None:
            self._pool.free_all_blocks()

    def __enter__(self) -> Graphs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_capturing(self) -> bool:
        """Whether a capture is under way: captured functions that it calls become part of it."""
        return self.active and bool(self._stream.is_capturing())

    @contextmanager
    def _recording(self, pool: Any) -> Iterator[Any]:
        """The stream of captures as the current one, behind what the caller's stream has to do, with a pool's memory."""
        import cupy

        with ExitStack() as stack:
            self._stream.wait_event(cupy.cuda.get_current_stream().record())
            stack.enter_context(cupy.cuda.using_allocator(pool.malloc))
            stack.enter_context(self._stream)
            yield self._stream

    def _memory(self) -> Any:
        """The pool of the next graph."""
        import cupy

        if self._pool is None or not self.config.single_pool:
            self._pool = cupy.cuda.MemoryPool()
        return self._pool

    def _replay(self, graph: Any) -> None:
        import cupy

        stream = cupy.cuda.get_current_stream()
        if self._last is not None and self._last[0] != stream.ptr:
            stream.wait_event(self._last[1])
        graph.launch(stream)
        self._last = stream.ptr, stream.record()


class Captured(Generic[P, R]):
    """A function that becomes a CUDA graph; made by Graphs.captured.

    Raises, when it is called after the capture:
        ValueError: an argument of another shape, dtype or device than at the capture, or another value where the graph
            has one built in; the message names it. TypeError: another structure of arguments.
    """

    def __init__(self, graphs: Graphs, function: Callable[P, R], name: str) -> None:
        self.name = name
        self._graphs, self._function = graphs, function
        self._num_calls = 0
        self._inputs: dict[str, Any] | None = None  # path -> what the graph reads, or the value built in
        self._graph: Any = None
        self._results: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        graphs = self._graphs
        if not graphs.active or graphs.is_capturing():
            return self._function(*args, **kwargs)
        if self._graph is None and self._num_calls < graphs.config.warmup_steps:
            self._num_calls += 1
            return self._function(*args, **kwargs)
        if self._graph is None:
            self._capture(args, kwargs)
        else:
            self._take(dict(_leaves(args, kwargs)))
        graphs._replay(self._graph)
        results: R = self._results
        return results

    def eager(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function itself, for what does not fit the graph."""
        return self._function(*args, **kwargs)

    def drop(self) -> None:
        """Destroys the graph; the next call captures another one."""
        self._graph, self._results, self._inputs = None, None, None

    def _capture(self, args: Any, kwargs: Any) -> None:
        """Inputs that no graph owns get a place; all ranks capture together, as what one enqueues the others wait for."""
        graphs, pool = self._graphs, self._graphs._memory()
        graphs._comm.barrier()
        with graphs._recording(pool) as stream:
            args, kwargs = _mapped((args, kwargs), self._place)
            self._inputs = dict(_leaves(args, kwargs))
            stream.synchronize()
            stream.begin_capture()
            try:
                results = self._function(*args, **kwargs)
            finally:
                graph = stream.end_capture()
        self._graph, self._results = graph, results
        graphs._static |= {x.data.ptr for _, x in _leaves((results,), {}) if _is_array(x)}
        graphs._comm.barrier()

    def _place(self, x: Any) -> Any:
        """What the graph reads for an argument: itself if a graph wrote it, else a copy with a place of its own."""
        if not _is_array(x) or x.data.ptr in self._graphs._static:
            return x
        placed = x.copy()
        self._graphs._static.add(placed.data.ptr)
        return placed

    def _take(self, found: dict[str, Any]) -> None:
        """Checks the arguments against those of the capture, and copies what lies elsewhere."""
        assert self._inputs is not None
        if found.keys() != self._inputs.keys():
            other = sorted(found.keys() ^ self._inputs.keys())
            raise TypeError(
                f"{self.name}: {', '.join(other)} {'is' if len(other) == 1 else 'are'} only in the call or only in the "
                f"captured graph, wanted the arguments of the capture; capture another function for these"
            )
        for path, placed in self._inputs.items():
            self._check(path, found[path], placed)
        for path, placed in self._inputs.items():
            if _is_array(placed) and found[path].data.ptr != placed.data.ptr:
                placed[...] = found[path]

    def _check(self, path: str, x: Any, placed: Any) -> None:
        if not _is_array(placed):
            if x is not placed and (type(x) is not type(placed) or x != placed):
                raise ValueError(f"{self.name}: {path} is {x!r}, wanted {placed!r} as in the captured graph; "
                                 f"capture another function for this value")
            return
        for what, of in _TRAITS.items():
            found = of(x) if _is_array(x) else type(x).__name__
            if found != of(placed):
                raise ValueError(f"{self.name}: {path} has {what} {found}, wanted {of(placed)} as in the captured "
                                 f"graph; pass such an array, or call .eager()")


class Pair:
    """A forward and its backward as two graphs; made by Graphs.pair.

    forward(*args) returns (results, kept), backward(*gradients, kept) what the caller wants; kept goes from one to the
    other untouched, and one forward has one backward before the next, as both have one place for everything.
    """

    def __init__(self, graphs: Graphs, forward: Callable[..., tuple[Any, Any]], backward: Callable[..., Any],
                 name: str) -> None:  # fmt: skip
        self.forward = graphs.captured(forward, f"{name}, forward")
        self.backward = graphs.captured(backward, f"{name}, backward")


def _leaves(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything in the arguments that is no container."""
    for i, x in enumerate(args):
        yield from _walk(f"argument {i}", x)
    for name, x in kwargs.items():
        yield from _walk(name, x)


def _walk(path: str, x: Any) -> Iterator[tuple[str, Any]]:
    for name, part in _parts(x) or ():
        yield from _walk(f"{path}{name}", part)
    if _parts(x) is None:
        yield path, x


def _parts(x: Any) -> list[tuple[str, Any]] | None:
    """(name, part) of a container; None for what is none. Plans are whole: their arrays are not the call's."""
    if isinstance(x, (tuple, list)):
        return [(f"[{i}]", part) for i, part in enumerate(x)]
    if isinstance(x, dict):
        return [(f"[{key!r}]", part) for key, part in x.items()]
    if dataclasses.is_dataclass(x) and not isinstance(x, type) and not hasattr(x, "made_for"):
        return [(f".{field.name}", getattr(x, field.name)) for field in dataclasses.fields(x)]
    return None


def _mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """The same containers with every leaf changed."""
    parts = _parts(x)
    if parts is None:
        return change(x)
    changed = [_mapped(part, change) for _, part in parts]
    if isinstance(x, dict):
        return dict(zip(x, changed, strict=True))
    if isinstance(x, (tuple, list)):
        return type(x)(*changed) if hasattr(x, "_fields") else type(x)(changed)
    return dataclasses.replace(x, **{field.name: part for field, part in zip(dataclasses.fields(x), changed, strict=True)})


def _is_array(x: Any) -> bool:
    return type(x).__module__.startswith("cupy") and hasattr(x, "data")


def _gpu_is_usable() -> bool:
    from thdattn.attention import _no_gpu

    return _no_gpu() is None


_TRAITS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: x.shape, "dtype": lambda x: np.dtype(x.dtype), "device": lambda x: x.device.id,
}  # fmt: skip
