"""Capture and replay: turn functions of arrays into CUDA graphs after a few calls.

A captured function is called like the function. Its first calls run eagerly, which compiles kernels and connects
communicators. The next call is captured. Every later call copies arguments that are not in place into the arrays that
the graph reads, and replays the graph. It returns the arrays that the graph writes, always the same ones. Where nothing
can be captured, the function itself runs, so that one program serves every machine.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from thdattn.arguments import as_choice, check_kind, found, is_array, shown
from thdattn.comm import Comm
from thdattn.engines.select import choose_engine
from thdattn.graphs.config import PARTS, CudaGraphConfig
from thdattn.plan.generations import Generation, recorded

P = ParamSpec("P")
R = TypeVar("R")


class Graphs:
    """CUDA graphs of one program: their stream, their memory pools, and their end.

    Graphs that share a pool reuse memory that an earlier graph has freed. Replay them in the order of their capture,
    one pass through a model after the other, and read results before the next pass. Two graphs must not use one comm at
    the same time. So a replay on another stream waits for all work on the stream of the last one.

    Args:
        comm: the ranks. Graphs end before it: comm.close() closes them first, also at the interpreter's exit.
        config: what to capture; impl="none" captures nothing.
        engine: of the attentions, as CPAttention takes it.

    Attributes:
        config: as passed.
        active: True if anything is captured. config.impl is then not "none", the engine is on a GPU, the comm's
            collectives can be captured, and the graphs were not closed.
        num_overflows: steps that ran eagerly as a batch did not fit; see StaticPack.

    Raises:
        TypeError: comm is no Comm, or config no CudaGraphConfig.
    """

    def __init__(self, comm: Comm, config: CudaGraphConfig, engine: str = "auto") -> None:
        check_kind("comm", comm, Comm, "make one with thdattn.comm.init()")
        check_kind("config", config, CudaGraphConfig, "make CudaGraphConfig(impl=...), or normalize(...)")
        self.config = config
        self.num_overflows = 0
        self._comm = comm
        self._captured: list[Captured[..., Any]] = []
        self._pools: list[Any] = []
        self._cupy: Any = None
        self._stream: Any = None
        self.active = config.impl != "none" and comm.capturable and choose_engine(engine, comm)[0].device == "cuda"
        if self.active:
            import cupy

            self._cupy, self._stream = cupy, cupy.cuda.Stream(non_blocking=True)
        comm.before_close(self.close)
        atexit.register(self.close)

    def captures(self, part: str) -> bool:
        """Return whether the configuration captures this part of a layer. The answer does not depend on `active`.

        impl "local" captures the parts that config.modules names; with no modules it captures every part, and "layer".
        A program that captures whole layers asks for "layer" first, and for their parts only if the answer is False.
        The other impls capture no part: "full_iteration" captures the function that calls them all.

        Args:
            part: "attn", "mlp", "mamba" or "layer", or a member of CudaGraphModule.

        Raises:
            TypeError: part is no str.
            ValueError: part is another str.
        """
        modules = self.config.modules
        part = as_choice("part", part, PARTS)
        return self.config.impl == "local" and (not modules or part in modules)

    def captured(self, function: Callable[P, R], name: str, part: str | None = None) -> Captured[P, R]:
        """Return the function as one that is captured after config.warmup_steps calls.

        Args:
            function: of CuPy arrays on the current GPU and of other values, in tuples, lists, dictionaries and
                dataclasses. It must neither wait for the GPU nor copy from the host. Every replay repeats what it does
                to arrays that are no arguments, such as adding to a gradient. Pass no array that keeps its place, such
                as weights, as arguments are copied.
            name: for messages.
            part: the part of a layer that the function computes; where graphs.captures(part) is False, every call runs
                eagerly. None: no part, but a step or a plan for instance, which every impl but "none" captures.

        Raises:
            TypeError, ValueError: as captures.
        """
        made = Captured(self, function, name, part)
        self._captured.append(made)
        return made

    def pair(self, forward: Callable[..., tuple[Any, Any]], backward: Callable[..., Any], name: str,
             part: str | None = None) -> Pair:
        """Return a Pair of a forward and its backward, each a graph; name and part as for captured."""
        return Pair(self, forward, backward, name, part)

    @property
    def num_bytes(self) -> int:
        """GPU memory that the graphs hold, in bytes."""
        return sum(pool.total_bytes() for pool in self._pools)

    def close(self) -> None:
        """Destroy the graphs and free their memory, except for results that somebody still holds.

        Captured functions run eagerly from now on.
        """
        atexit.unregister(self.close)
        self._comm.forget(self.close)
        self.active = False
        for captured in self._captured:
            captured.drop()
        for pool in self._pools:
            pool.free_all_blocks()
        _outlived[:] = [pool for pool in (*_outlived, *self._pools) if pool.used_bytes()]
        self._captured, self._pools = [], []

    def __enter__(self) -> Graphs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured: captured functions that run now become part of that
        graph.
        """
        if not self.active:
            return False
        return bool(self._cupy.cuda.get_current_stream().is_capturing())

    @contextmanager
    def _recording(self) -> Iterator[Any]:
        """Make the stream of captures current, ordered after the caller's stream, and allocate from a pool of the
        graphs.
        """
        if not self._pools or not self.config.single_pool:
            self._pools.append(self._cupy.cuda.MemoryPool(_allocate))
        before = self._turn()
        self._stream.wait_event(before.record())
        with self._cupy.cuda.using_allocator(self._pools[-1].malloc):
            self._stream.use()  # `with` would restore the stream of the outer `with`, not one selected since
            try:
                yield self._stream
            finally:
                before.use()

    def _turn(self) -> Any:
        """Return the current stream, ordered after the stream of the last replay on this comm."""
        stream, last = self._cupy.cuda.get_current_stream(), _last_streams.get(self._comm)
        if last is not None and last != stream:
            stream.wait_event(last.record())
        _last_streams[self._comm] = stream
        return stream


class Captured(Generic[P, R]):
    """Function that becomes a CUDA graph, made by Graphs.captured.

    The graph reads an argument that another graph returned where it is. An argument elsewhere is copied to the place of
    the captured one. Arguments that are one array at the capture must stay one array.

    Attributes:
        name: for messages.

    Raises, when it is called after the capture:
        ValueError: an argument of another shape, dtype or device than at the capture, another value where the graph has
            one built in, or two arrays where it has one place; the message names it.
        TypeError: another structure of arguments; at the capture, an array that is no CuPy array.
    """

    def __init__(self, graphs: Graphs, function: Callable[P, R], name: str, part: str | None) -> None:
        self.name = name
        self._is_wanted = part is None or graphs.captures(part)
        self._graphs, self._function = graphs, function
        self._num_calls = 0
        self._graph: Any = None
        self._placed: Any = None  # arguments at the addresses that the graph reads, by name
        self._together: list[tuple[str, str]] = []  # paths of arguments that share memory
        self._results: Any = None
        self._actions: list[Callable[[], None]] = []  # work of the host before a replay

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        graphs = self._graphs
        if not self._is_wanted or not graphs.active or graphs.is_capturing():
            return self._function(*args, **kwargs)
        if self._graph is None and self._num_calls < graphs.config.warmup_steps:
            self._num_calls += 1
            return self._function(*args, **kwargs)
        moved: list[tuple[Any, Any]] = []
        if self._graph is None:
            self._capture(args, kwargs)
        else:
            moved = self._moved(args, kwargs)
        for act in self._actions:
            act()
        stream = graphs._turn()
        _copy(moved)
        with graphs._comm.watched(f"replay of {self.name}"):
            self._graph.launch(stream)
        results: R = self._results
        return results

    def eager(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, for arguments that do not fit the graph."""
        return self._function(*args, **kwargs)

    def drop(self) -> None:
        """Destroy the graph; the next call captures another one. Arrays that it returned stay valid."""
        self._graph = self._placed = self._results = None
        self._together, self._actions = [], []

    def arrays(self) -> Iterator[Any]:
        """Yield the arrays that the graph reads as arguments and those that it returns."""
        return (x for _, x in _leaves("", (self._placed, self._results)) if _is_cupy_array(x))

    def _capture(self, args: Any, kwargs: Any) -> None:
        """Copy arguments that no graph owns, and capture on all ranks together, as one may wait for the others."""
        graphs = self._graphs
        # Addresses that the graphs read and write.
        static = {x.data.ptr for captured in graphs._captured for x in captured.arrays()}

        def place(path: str, x: Any) -> Any:
            if is_array(x) and not _is_cupy_array(x):
                raise TypeError(f"{self.name}: {path} is {found(x)}, wanted a CuPy array, as a graph reads no other; "
                                f"pass cupy.asarray or cupy.from_dlpack of it")
            return x.copy() if _is_cupy_array(x) and x.data.ptr not in static else x

        graphs._comm.barrier()
        with graphs._recording() as stream:
            args, kwargs = (_mapped("", x, place) for x in (args, kwargs))
            stream.synchronize()
            stream.begin_capture()
            try:
                with recorded() as actions:
                    results = self._function(*args, **kwargs)
            except BaseException:
                with suppress(Exception):  # an error of its own would hide the one that matters
                    stream.end_capture()
                raise
            self._graph = stream.end_capture()
        self._placed, self._results, self._actions = _named(args, kwargs), results, actions
        read = [(path, _footprint(x)) for path, x in _leaves("", self._placed) if _is_cupy_array(x)]
        self._together = [(one, other) for (one, x), (other, y) in itertools.combinations(read, 2)
                          if np.shares_memory(x, y)]
        graphs._comm.barrier()

    def _moved(self, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
        """Check all arguments against the capture's, and return (argument, place) of those that are elsewhere."""
        moved = {}
        for path, x, placed in self._side_by_side("", _named(args, kwargs), self._placed):
            self._check(path, x, placed)
            if _is_cupy_array(placed) and _lies_at(x) != _lies_at(placed):
                moved[path] = x, placed
        for pair in self._together:
            arrays = [moved[path] for path in pair if path in moved]
            if arrays and not (len(arrays) == 2 and len({(_lies_at(x), _lies_at(to)) for x, to in arrays}) == 1):
                raise ValueError(f"{self.name}: {' and '.join(pair)} have one place in the captured graph, wanted one "
                                 f"array, as at the capture; pass copies there, or capture another function")
        return list(moved.values())

    def _side_by_side(self, path: str, x: Any, placed: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield (path, value, value at the capture) of all leaves, except in frozen dataclasses that are the same."""
        if x is placed and _is_frozen(x):
            return
        parts, wanted = _parts(path, x), _parts(path, placed)
        if parts is None or wanted is None:
            yield path, x, placed
            return
        here, there = dict(parts), dict(wanted)
        if here.keys() != there.keys():
            sides = (("the call", here.keys() - there.keys()), ("the captured graph", there.keys() - here.keys()))
            only = " and ".join(f"{', '.join(sorted(names))} only in {side}" for side, names in sides if names)
            raise TypeError(f"{self.name}: found {only}, wanted the arguments of the capture; pass these, or capture "
                            f"another function for other ones")
        for name, part in parts:
            yield from self._side_by_side(name, part, there[name])

    def _check(self, path: str, x: Any, placed: Any) -> None:
        if isinstance(x, Generation) and isinstance(placed, Generation):
            x.check(f"{self.name}: {path.removesuffix('.generation')}")
            return
        if x is placed:
            return
        if not _is_cupy_array(placed):
            if type(x) is not type(placed) or x != placed:
                same = shown(x) == shown(placed)
                raise ValueError(
                    f"{self.name}: {path} is {'another ' if same else ''}{shown(x)}, wanted {shown(placed)} as in the "
                    f"captured graph, which has it built in; capture another function for this one"
                )
            return
        if not _is_cupy_array(x):
            raise TypeError(f"{self.name}: {path} is {found(x)}, wanted a CuPy array as in the captured graph; "
                            f"pass one")
        for what, of in _TRAITS.items():
            if of(x) != of(placed):
                raise ValueError(f"{self.name}: {path} has {what} {of(x)}, wanted {of(placed)} as in the captured "
                                 f"graph; pass such an array, or call .eager()")


class Pair:
    """Forward and its backward as two graphs, made by Graphs.pair.

    forward(*args) returns (results, kept), backward(*gradients, kept) the gradients. Pass kept from one to the other
    unchanged, and run one backward after each forward, as both have one place for everything.
    """

    def __init__(self, graphs: Graphs, forward: Callable[..., tuple[Any, Any]], backward: Callable[..., Any],
                 name: str, part: str | None) -> None:
        self.forward = graphs.captured(forward, f"{name}, forward", part)
        self.backward = graphs.captured(backward, f"{name}, backward", part)


_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_last_streams: WeakKeyDictionary[Comm, Any] = WeakKeyDictionary()  # of the last replay on a comm
_outlived: list[Any] = []  # pools of closed graphs with results in use, as a pool's memory ends with it


def _allocate(size: int) -> Any:
    """Allocate memory for a pool of graphs.

    NOTE: a pool without memory frees what it holds and tries again, but graphs write there. So the error is not the one
    that a pool expects, and CuPy's own pool, which eager runs have filled, gives memory back instead.
    """
    import cupy

    sources = [cupy.get_default_memory_pool().free_all_blocks]
    while True:
        try:
            return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            if not sources:
                raise MemoryError(f"a CUDA graph needs {size} bytes more than the GPU has; make batches smaller, "
                                  f"capture less, or use impl='none'") from error
            sources.pop()()


def _copy(moved: list[tuple[Any, Any]]) -> None:
    """Copy arrays to their places; if one overlaps the place of another, copy all of them out first."""
    places = [_footprint(place) for _, place in moved]
    if len(moved) > 1 and any(np.shares_memory(_footprint(x), place) for x, _ in moved for place in places):
        moved = [(x.copy(), place) for x, place in moved]
    for x, place in moved:
        place[...] = x


def _lies_at(x: Any) -> tuple[Any, ...]:
    return x.data.ptr, x.shape, x.strides


def _footprint(x: Any) -> NDArray[Any]:
    """Return a NumPy array with the addresses of a CuPy array, for questions about them; do not read it."""
    there = {"data": (x.data.ptr, True), "shape": x.shape, "strides": x.strides, "typestr": f"|V{x.itemsize}",
             "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=there))


def _named(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {f"argument {i}": x for i, x in enumerate(args)} | kwargs


def _parts(path: str, x: Any) -> list[tuple[str, Any]] | None:
    """Return (path, part) of a container, or None. Plans are leaves: their arrays are no arguments."""
    if isinstance(x, (tuple, list)):
        return [(f"{path}[{i}]" if path else f"argument {i}", part) for i, part in enumerate(x)]
    if isinstance(x, dict):
        return [(f"{path}[{key!r}]" if path else str(key), part) for key, part in x.items()]
    if dataclasses.is_dataclass(x) and not isinstance(x, type) and not hasattr(x, "made_for"):
        return [(f"{path}.{field.name}", getattr(x, field.name)) for field in dataclasses.fields(x)]
    return None


def _leaves(path: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of everything in a value that is no container."""
    parts = _parts(path, x)
    if parts is None:
        yield path, x
    else:
        for name, part in parts:
            yield from _leaves(name, part)


def _mapped(path: str, x: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return the containers with every leaf changed; frozen dataclasses without a changed leaf stay the same objects.
    """
    parts = _parts(path, x)
    if parts is None:
        return change(path, x)
    changed = [_mapped(name, part, change) for name, part in parts]
    if isinstance(x, dict):
        return dict(zip(x, changed, strict=True))
    if isinstance(x, (tuple, list)):
        return type(x)(*changed) if hasattr(x, "_fields") else type(x)(changed)
    values = list(zip(dataclasses.fields(x), changed, strict=True))
    made = dataclasses.replace(x, **{field.name: y for field, y in values if field.init})
    for field, y in values:
        if not field.init:
            object.__setattr__(made, field.name, y)  # works on frozen ones too
    same = all(y is z for (_, y), (_, z) in zip(_leaves("", x), _leaves("", made), strict=True))
    return x if same and _is_frozen(x) else made


def _is_frozen(x: Any) -> bool:
    return bool(getattr(getattr(x, "__dataclass_params__", None), "frozen", False))


def _is_cupy_array(x: Any) -> bool:
    return type(x).__module__.startswith("cupy") and hasattr(x, "data")


_TRAITS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: x.shape, "dtype": lambda x: np.dtype(x.dtype), "device": lambda x: x.device.id,
}
