"""As much of CuPy as peer memory asks of it, on the host: simulated ranks are threads that share their "GPUs'" memory.

Streams do at once what they are told. Every copy is checked: what it reads or writes lies in memory that there is, and
that the rank has opened if it is another one's. A GPU has as many bytes as a test says, and refuses what a test says.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
import weakref
from types import ModuleType, SimpleNamespace

import numpy as np

from thdattn.comm.peer import layout, transport, windows
from thdattn.jit.structs import RANK_FLAGS

SECONDS = 10  # that a stream waits for a flag


class CUDARuntimeError(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class Gpu:
    """The GPU of one rank, and what its process has mapped of others.

    left: bytes that are free, and cached: that CuPy's pool holds and nobody uses; arrays of tests do not count.
    refuses: called with the name of a step and its address or size, may raise; a write of which it says so is lost.
    """

    def __init__(self):
        self.left, self.cached, self.allocated = 1 << 40, 0, 0
        self.opened, self.num_synchronized, self.capturing = [], 0, False

    def refuses(self, step, about):
        return False

    def take(self, num_bytes):
        self.left, self.allocated = self.left - num_bytes, self.allocated + num_bytes

    def free_all_blocks(self):
        self.left, self.cached = self.left + self.cached, 0


gpus: dict[int, Gpu] = {}  # by thread
there: dict[int, tuple[int, Gpu]] = {}  # by address, bytes and the GPU that has them
arrays: list[Memory] = []  # memory of those of a test


def gpu():
    """That of the rank which is asking."""
    return gpus.setdefault(threading.get_ident(), Gpu())


class Memory:
    """Memory full of NaN, whatever the dtype."""

    def __init__(self, size, counts=True):
        self.size, taken = size, size if counts else 0
        if counts:
            gpu().refuses("allocate", size)
        if taken > gpu().left:
            raise CUDARuntimeError(2)
        self._bytes = np.full(size, 0xFF, np.uint8)
        self.ptr = self._bytes.ctypes.data
        gpu().take(taken)
        there[self.ptr] = size, gpu()
        weakref.finalize(self, self._free, self.ptr, gpu(), taken).atexit = False

    @staticmethod
    def _free(pointer, gpu, taken):
        gpu.take(-taken)
        del there[pointer]


class Array(np.ndarray):
    """An array in such memory."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def array(shape, dtype, pointer, strides=None):
    """As cupy.ndarray."""
    dtype = np.dtype(dtype)
    strides = strides or np.empty(shape, dtype).strides
    num_bytes = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * num_bytes).from_address(inside(pointer, num_bytes))
    return np.ndarray(shape, dtype, memory, strides=strides).view(Array)


def on_gpu(values):
    """A copy of values."""
    memory = Memory(values.nbytes, counts=False)
    arrays.append(memory)
    made = array(values.shape, values.dtype, memory.ptr)
    made[...] = values
    return made


def inside(address, num_bytes):
    """The address, if as much lies there in one piece of memory."""
    begin, owner = next(((begin, owner) for begin, (size, owner) in list(there.items())
                         if begin <= address and address + num_bytes <= begin + size), (None, None))
    assert owner is not None, "no memory is there"
    assert owner is gpu() or begin in gpu().opened, "memory of another rank that is not mapped"
    return address


class Runtime:
    """cupy.cuda.runtime."""

    memcpyHostToDevice, memcpyDeviceToHost, memcpyDefault = range(3)
    CUDARuntimeError = CUDARuntimeError

    def memcpy(self, target, source, num_bytes, kind):
        inside(source if kind == self.memcpyDeviceToHost else target, num_bytes)
        ctypes.memmove(target, source, num_bytes)

    def memGetInfo(self):
        return gpu().left, 1 << 40

    def streamSynchronize(self, stream):
        pass

    def memcpyAsync(self, target, source, num_bytes, kind, stream):
        ctypes.memmove(inside(target, num_bytes), inside(source, num_bytes), num_bytes)

    def memcpy2DAsync(self, target, target_pitch, source, source_pitch, width, rows, kind, stream):
        for row in range(rows):
            self.memcpyAsync(target + row * target_pitch, source + row * source_pitch, width, kind, stream)

    def ipcGetMemHandle(self, pointer):
        gpu().refuses("handle", pointer)
        return pointer

    def ipcOpenMemHandle(self, handle):
        gpu().refuses("open", handle)
        gpu().opened.append(handle)
        return handle

    def ipcCloseMemHandle(self, pointer):
        assert gpu().num_synchronized, "streams may be at work there"
        assert pointer in there, "memory was freed that is mapped"
        gpu().opened.remove(pointer)


class Device(contextlib.nullcontext):
    """cupy.cuda.Device."""

    def synchronize(self):
        gpu().num_synchronized += 1


class Stream:
    ptr = 0

    def __init__(self, non_blocking=False, priority=0):
        gpu().refuses("stream", priority)

    def synchronize(self):
        pass

    def wait_event(self, event):
        pass

    def is_capturing(self):
        return gpu().capturing


def enqueue(stream, count, operations, flags):
    """cuStreamBatchMemOp of a stream that does it now."""
    read = (ctypes.c_char * (count * windows.MEM_OP.itemsize)).from_address(operations)
    for step in np.frombuffer(read, windows.MEM_OP):
        if gpu().refuses("wait" if step["operation"] == windows.WAIT_32 else "write", int(step["address"])):
            continue
        flag = np.frombuffer((ctypes.c_char * 4).from_address(inside(int(step["address"]), 4)), np.uint32)
        if step["operation"] == windows.WAIT_32:
            wait_for(flag, step["value"])
        if step["operation"] == windows.WRITE_32:
            flag[0] = step["value"]
    return 0


def wait_for(flags, value=1):
    """Until all have the value."""
    deadline = time.monotonic() + SECONDS
    while (flags != value).any():
        assert time.monotonic() < deadline, "nobody sets a flag that a rank waits for"
        time.sleep(1e-4)


def meet(flags, to, own):
    """What the kernel thd_peer_exchange does before it puts rows to their places, of a PEER_EXCHANGE."""
    rank, size = int(flags["rank"]), int(flags["num_ranks"])
    others = [other for other in range(size) if other != rank]
    mine = array((size,), RANK_FLAGS, int(flags["mine"]))
    wait_for(mine["taken"][:, 0])
    for places, x in zip(to, own, strict=True):
        for place in filter(None, places):
            array(x.shape, x.dtype, place)[...] = x
    mine["taken"][:, 0] = 0
    for other in others:
        array((1,), RANK_FLAGS, int(flags["theirs"][other]))["offered"] = 1
    for other in others:
        wait_for(mine["offered"][other])
        mine["offered"][other] = 0


def part(flags):
    """What it does after that."""
    for there in flags["theirs"][: flags["num_ranks"]] if flags["takes"] else []:
        array((1,), RANK_FLAGS, int(there))["taken"][0, 0] = 1


def install(monkeypatch):
    """Has peer memory find all this."""
    made = ModuleType("cupy")
    made.ndarray = array
    made.cuda = SimpleNamespace(
        Memory=Memory, UnownedMemory=lambda pointer, size, owner: SimpleNamespace(ptr=inside(pointer, size)),
        MemoryPointer=lambda memory, offset: memory.ptr + offset, Stream=Stream, get_current_stream=Stream,
        Event=lambda disable_timing: SimpleNamespace(record=lambda stream: None), runtime=Runtime(), Device=Device,
    )  # fmt: skip
    made.get_default_memory_pool = gpu
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(windows, "batch_mem_op", lambda: enqueue)
    monkeypatch.setattr(layout, "rounded_up", lambda num_bytes: num_bytes)
    monkeypatch.setattr(transport.PeerMemory, "_add", add)
    arrays.clear()
    gpus.clear()


def add(memory, shares, results, rows, stream):
    """What the kernel thd_peer_reduce does."""
    for out, addresses in zip(results, shares["of"], strict=True):
        count = len(out) if rows is None else 1 + int(rows.max())
        read = [array((count, *out.shape[1:]), np.float32, int(at)) for at in addresses[: memory.size]]
        assert len({x.ctypes.data for x in read}) == memory.size, "a cache would have what is read twice"
        total = sum(x.astype(np.float64) for x in read)
        out[...] = total if rows is None else np.where(rows[:, None, None] < 0, 0, total[rows])
