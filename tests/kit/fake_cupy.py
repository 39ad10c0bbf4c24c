"""CuPy on the host, as far as thdattn.graphs uses it: arrays are NumPy's, and a graph is a list of what to do.

Functions of arrays that are to be captured do their work through `launch`. What streams, events, pools and graphs are
asked for is written to `log`, so that a test can see what came before what.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

from thdattn.graphs import CudaGraphConfig, Graphs, capture

LOCAL = {"impl": "local", "warmup_steps": 1}
log: list[tuple] = []


class ndarray(np.ndarray):
    """Array "on a GPU"; device_id is 0 unless set."""

    __module__ = "cupy"
    device_id = 0

    def __setitem__(self, where, values):
        log.append(("copy", current[0]))
        super().__setitem__(where, values)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0] if self.size else 0)

    @property
    def device(self):
        return SimpleNamespace(id=self.device_id)


def array(values, dtype=np.float32):
    return np.array(values, dtype).view(ndarray)


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status


class Graph:
    def __init__(self, actions):
        self.actions = actions

    def launch(self, stream):
        log.append(("replay", stream))
        for action in self.actions:
            action()

    def __del__(self):
        log.append(("graph destroyed",))


class Stream:
    """capture: the number of the capture that it is in, or None."""

    numbers = itertools.count()

    def __init__(self, non_blocking=False):
        self.number, self.actions, self.capture = next(self.numbers), None, None

    def __repr__(self):
        return f"stream {self.number}"

    def use(self):
        current[0] = self

    def is_capturing(self):
        return self.actions is not None

    def begin_capture(self):
        assert self.actions is None
        self.actions, self.capture = [], next(self.numbers)

    def end_capture(self):
        actions, self.actions, self.capture = self.actions, None, None
        if refused in actions:
            raise CUDARuntimeError(901)
        return Graph(actions)

    def record(self):
        return self

    def wait_event(self, event):
        log.append(("wait", self, event))

    def synchronize(self):
        if self.is_capturing():
            self.actions.append(refused)
            raise CUDARuntimeError(900)


class MemoryPool:
    """Pool whose used bytes a test sets."""

    def __init__(self, allocate=None):
        self.allocate, self.used = allocate, 0

    def malloc(self, size):
        raise AssertionError("arrays are NumPy's")

    def used_bytes(self):
        return self.used

    def free_all_blocks(self):
        log.append(("free", self))


class Memory:
    """Memory of the device, of which there is `left`."""

    left = 0

    def __init__(self, size):
        if size > self.left:
            raise CUDARuntimeError(2)
        self.size = size


@contextlib.contextmanager
def using_allocator(malloc):
    before, allocator[0] = allocator[0], malloc
    try:
        yield
    finally:
        allocator[0] = before


def refused():
    raise AssertionError("replayed")


current = [Stream()]
allocator = [None]
default_pool = MemoryPool()


def launch(action):
    """Do something now, or, where the current stream is captured, at every replay."""
    stream = current[0]
    if stream.is_capturing():
        stream.actions.append(action)
    else:
        action()


def add(x, y):
    """Compute x + y as a captured function does: memory now, the sum when it is launched."""
    out = array(np.full(np.shape(x), np.nan))
    launch(lambda: np.add(x, y, out=out))
    return out


def graphs(monkeypatch, comm):
    """Return a function that makes active graphs of a configuration, with this CuPy and an empty log."""
    monkeypatch.setitem(sys.modules, "cupy", module())
    monkeypatch.setattr(capture, "choose_engine", lambda engine, comm: (SimpleNamespace(device="cuda"), "a fake"))
    monkeypatch.setattr(sys.modules[__name__], "current", [Stream()])
    log.clear()
    return lambda **config: Graphs(comm, CudaGraphConfig(**LOCAL | config))


def module():
    """Return the module that `import cupy` finds."""
    made = ModuleType("cupy")
    made.get_default_memory_pool = lambda: default_pool
    made.cuda = SimpleNamespace(
        Stream=Stream, MemoryPool=MemoryPool, using_allocator=using_allocator, Memory=Memory,
        MemoryPointer=lambda memory, offset: memory, get_current_stream=lambda: current[0],
        runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
    )
    return made
