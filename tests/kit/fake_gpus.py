"""GPUs of several ranks on the host: as much of CuPy, CUDA's runtime and MPI as the transports of thdattn.comm ask for.

A stream is a queue of steps. A step waits until flags are 1 or an event is reached, or else is ready at once; then it
does all it does in one go: copies, writes flags, computes. A machine runs the steps in one of two ways:

With a seed, for tests of what streams do in which order. One thread enqueues the programs of all ranks, one rank after
another: a rank whose host is late is one whose streams are. At last `run` picks, over and over, one of all streams that
are ready, some far more often than others, and has it do a step or a few. So whatever is not ordered by streams, events
and flags happens in one order or the other, for some seed. Memory that is freed stays what it was, as nothing is done
before `run`.

Without, for tests of memory and of failures on one rank alone. Ranks are threads, and a stream does at once what it is
told: a step that waits for another rank makes its thread wait.

Copies, flags and arrays must lie in memory that exists, and that the rank has opened if it is another one's. Memory of
arrays is given to the next array of the same size and stream as soon as nobody holds it any more, as CuPy's pool does:
steps know addresses and hold nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import math
import random
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np

from thdattn.comm.overlap import layout
from thdattn.comm.peer import windows

SECONDS = 10  # that a thread waits for a flag


class CUDARuntimeError(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class Array(np.ndarray):
    """An array on a GPU."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def at(address, shape, dtype, strides=None):
    """Return the array at an address, which it does not keep."""
    memory = (ctypes.c_char * _num_bytes(shape, np.dtype(dtype), strides)).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=strides).view(Array)


def _num_bytes(shape, dtype, strides):
    if strides is None:
        return math.prod(shape) * dtype.itemsize
    return dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def addresses(x):
    """Return the same arrays, and lists of arrays, without a hold on them; other values as they are."""
    if isinstance(x, (list, tuple)):
        return [addresses(each) for each in x]
    return at(x.data.ptr, x.shape, x.dtype, x.strides) if isinstance(x, Array) else x


class Event:
    """stream: where it was recorded; time: how many events were reached before it."""

    def __init__(self, disable_timing=True):
        self.mark, self.stream, self.time = object(), None, None

    def record(self, stream):
        def reach(reached):
            reached.add(self.mark)
            self.time = next(stream.machine.clock)

        self.stream = stream
        stream.put(reach)
        return self

    def synchronize(self):
        """Do nothing: all is done, or nothing before run()."""


class Stream:
    def __init__(self, machine):
        with machine.lock:
            self.machine, self.queue, self.ptr = machine, deque(), len(machine.streams)
            machine.streams.append(self)

    def put(self, act, ready=lambda reached: True):
        """Do a step or enqueue it, or add it to the graph that is captured. Both functions get the reached events."""
        machine = self.machine
        if machine.graph is not None:
            machine.graph.setdefault(self, []).append((act, ready))
        elif machine.seed is None:
            machine.wait(ready)
            act(machine.reached)
        else:
            self.queue.append((act, ready, machine.reached))

    def launch(self, function, *args):
        """Enqueue a kernel: function(*args)."""
        args = addresses(args)
        self.put(lambda reached: function(*args))

    def record(self):
        return Event().record(self)

    def wait_event(self, event):
        self.put(lambda reached: None, lambda reached: event.mark in reached)

    def is_capturing(self):
        graph = self.machine.graph
        return self.machine.gpu.capturing or (graph is not None and (self is self.machine.stream or self in graph))

    def use(self):
        self.machine.stream = self

    def __enter__(self):
        self.machine.gpu.entered.append(self)
        self.use()

    def __exit__(self, *_):
        """Select the stream of the outer block again, as CuPy does, whichever was selected since."""
        self.machine.gpu.entered.pop()
        self.machine.gpu.entered[-1].use()

    def put_launched(self, make):
        """Enqueue the steps that make() returns, in a graph anew at each replay."""
        if self.machine.graph is None:
            self.queue.extend((*step, self.machine.reached) for step in make())
        else:
            self.machine.graph.setdefault(self, []).append(make)

    def synchronize(self):
        """Do nothing: all is done, or nothing before run()."""

    def replay(self, graph, origin):
        """Enqueue a graph that was captured with `origin` current; new streams do what it had other streams do."""
        reached = set()
        for stream, steps in graph.items():
            target = self if stream is origin else Stream(self.machine)
            made = [one for step in steps for one in (step() if callable(step) else [step])]
            target.queue.extend((*step, reached) for step in made)


class Gpu:
    """The GPU of one rank, and what its process has mapped of others.

    stream: the current one. entered: the default stream, and those of `with` blocks.
    capturing: what it is given is captured, as far as anybody asks.
    left: bytes that are free, and cached: that CuPy's pool holds and nobody uses; arrays do not count.
    refuses: called with the name of a step and its address or size, may raise; a write of which it says so is lost.
    """

    def __init__(self, rank):
        self.rank, self.stream, self.entered, self.capturing = rank, None, [], False
        self.left, self.cached, self.allocated = 1 << 40, 0, 0
        self.opened, self.num_synchronized, self.num_made = [], 0, 0

    def refuses(self, step, about):
        return False

    def take(self, num_bytes):
        self.left, self.allocated = self.left - num_bytes, self.allocated + num_bytes

    def free_all_blocks(self):
        self.left, self.cached = self.left + self.cached, 0


class Memory:
    """cupy.cuda.Memory, full of NaN whatever the dtype; its handle says whose it is, and its number and size."""

    def __init__(self, machine, size):
        gpu = machine.gpu
        gpu.refuses("allocate", size)
        if size > gpu.left:
            raise CUDARuntimeError(2)
        gpu.take(size)
        self.size, handle = size, (gpu.rank, gpu.num_made, size)
        gpu.num_made += 1
        self.ptr = machine.begin_of(handle)
        weakref.finalize(self, self._free, machine, gpu, handle).atexit = False

    @staticmethod
    def _free(machine, gpu, handle):
        gpu.take(-handle[2])
        if machine.seed is None:
            machine.forget(handle)


class Machine:
    """Some ranks with a GPU each. Each thread is one rank at a time: it calls `become` first.

    gpu, stream: the GPU of the present rank, and its current stream.
    """

    def __init__(self, size, seed=None):
        self.size, self.seed, self.random = size, seed, random.Random(seed)
        self.gpus, self.lock, self._present = [Gpu(rank) for rank in range(size)], threading.RLock(), threading.local()
        self.streams, self.reached, self.graph = [], set(), None
        self.clock = itertools.count()
        self._memories, self._places, self._pools = {}, [], defaultdict(list)

    def become(self, rank):
        self._present.gpu = self.gpus[rank]
        self.stream = Stream(self)
        self.gpu.entered = [self.stream]

    @property
    def gpu(self):
        return self._present.gpu

    @property
    def stream(self):
        return self.gpu.stream

    @stream.setter
    def stream(self, stream):
        self.gpu.stream = stream

    # --- steps ---------------------------------------------------------------------------------------------------

    def wait(self, ready):
        """Let a thread wait for what another one does."""
        deadline = time.monotonic() + SECONDS
        while not ready(self.reached):
            assert time.monotonic() < deadline, "nobody sets a flag that a rank waits for"
            time.sleep(1e-4)

    def run(self):
        """Let all streams do all there is to do."""
        weights = [10 ** self.random.uniform(-3, 0) for _ in self.streams]
        busy = [stream for stream in self.streams if stream.queue]
        while busy:
            ready = [stream for stream in busy if stream.queue[0][1](stream.queue[0][2])]
            assert ready, f"{len(busy)} streams wait for ever"
            stream, = self.random.choices(ready, [weights[stream.ptr] for stream in ready])
            for _ in range(self.random.choice([1, 1, 4])):
                if stream.queue and stream.queue[0][1](stream.queue[0][2]):
                    act, _, reached = stream.queue.popleft()
                    act(reached)
            if not stream.queue:
                busy.remove(stream)

    # --- memory --------------------------------------------------------------------------------------------------

    def empty(self, shape, dtype):
        """Return an array from the pool, full of NaN or of what its last holder left."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        pool = self._pools[self.stream, num_bytes]
        memory = pool.pop() if pool else self._placed(self.gpu.rank, num_bytes)
        holder = (ctypes.c_char * num_bytes).from_address(memory.ctypes.data)
        weakref.finalize(holder, pool.append, memory).atexit = False
        return np.ndarray(shape, dtype, holder).view(Array)

    def asarray(self, values):
        """Return a copy of values."""
        made = self.empty(values.shape, values.dtype)
        made[...] = values
        return made

    def array(self, shape, dtype, address, strides=None):
        """Return an array at an address, as cupy.ndarray does."""
        return at(self.inside(address, _num_bytes(shape, np.dtype(dtype), strides)), shape, dtype, strides)

    def inside(self, address, num_bytes):
        """Return the address, if as much lies there in one piece of memory that the rank sees."""
        with self.lock:
            number = bisect.bisect(self._places, (address, math.inf)) - 1
            begin, size, rank = self._places[max(0, number)]
        assert begin <= address and address + num_bytes <= begin + size, "no memory is there"
        assert rank == self.gpu.rank or begin in self.gpu.opened, "memory of another rank that is not mapped"
        return address

    def begin_of(self, handle):
        """Return the address of memory. With a seed, others may open it before its rank has made it."""
        with self.lock:
            if handle not in self._memories:
                self._memories[handle] = self._placed(handle[0], handle[2])
            return self._memories[handle].ctypes.data

    def forget(self, handle):
        with self.lock:
            memory = self._memories.pop(handle)
            self._places.remove((memory.ctypes.data, handle[2], handle[0]))

    def _placed(self, rank, num_bytes):
        memory = np.full(num_bytes + 1, 0xFF, np.uint8)
        with self.lock:
            bisect.insort(self._places, (memory.ctypes.data, num_bytes, rank))
        return memory

    def world(self, rank):
        """Return a communicator of ranks that ask for memory in one order: handles are known before they are made."""
        def of(other, result):
            return [(other, *handle[1:]) for handle in result] if isinstance(result, list) else result

        def allgather(outcome):
            ok, result = outcome
            return [(ok, of(other, result)) for other in range(self.size)]

        return SimpleNamespace(rank=rank, size=self.size, allgather=allgather)

    # --- what CuPy, the runtime and the driver do ----------------------------------------------------------------

    def mem_ops(self, stream, count, operations, flags):
        """cuStreamBatchMemOp: some waits and then some writes, each a step."""
        memory = (ctypes.c_char * (count * windows.MEM_OP.itemsize)).from_address(operations)
        for operation, address, value, _, _ in np.frombuffer(memory, windows.MEM_OP).tolist():
            waits = operation == windows.WAIT_32
            if self.gpu.refuses("wait" if waits else "write", address):
                continue
            flag = ctypes.c_uint32.from_address(self.inside(address, 4))
            if waits:
                self.streams[stream].put(lambda reached: None, lambda reached, flag=flag: flag.value == 1)
            else:
                self.streams[stream].put(lambda reached, flag=flag, value=value: setattr(flag, "value", value))
        return 0

    def kernel(self, name):
        """thd_peer_reduce: `of` has the addresses of what each rank has, `rows` those that are this rank's."""
        if name != "thd_peer_reduce":
            from fake_exchange import Kernel

            return Kernel(self, name)

        def add(outs, of, rows, num_ranks):
            for out, places in zip(outs, of, strict=False):
                taken = np.arange(len(out)) if rows is None else rows
                parts = [at(int(place), (int(taken.max()) + 1, *out.shape[1:]), np.float32)
                         for place in places[:num_ranks]]
                assert len({part.ctypes.data for part in parts}) == num_ranks, "a cache would have what is read twice"
                out[...] = np.where((taken < 0)[:, None, None], 0, sum(part[taken] for part in parts))

        def enqueue(grid, block, args, stream):
            out0, _, _, out1, _, _, shares, rows, *_, num_ranks, num_rows = args
            assert num_rows == len(out0) == len(out1)
            stream.launch(add, [out0, out1], shares["of"].copy(), rows if isinstance(rows, np.ndarray) else None,
                          int(num_ranks))

        return enqueue

    def cupy(self):
        """Return the module that `import cupy` finds."""
        made = ModuleType("cupy")
        runtime = SimpleNamespace(
            memcpy=self._copy_at_once, memcpyAsync=self._copy, memcpy2DAsync=self._copy_rows, memcpyHostToDevice=1,
            memcpyDeviceToHost=2, memcpyDefault=4, streamSynchronize=lambda stream: None, ipcGetMemHandle=self._handle,
            ipcOpenMemHandle=self._open, ipcCloseMemHandle=self._close, CUDARuntimeError=CUDARuntimeError,
            memGetInfo=lambda: (self.gpu.left, 1 << 40),
        )
        made.machine, made.asarray, made.get_default_memory_pool = self, self.asarray, lambda: self.gpu
        made.ndarray = lambda shape, dtype, place, strides=None: self.array(shape, dtype, place, strides)
        made.cuda = SimpleNamespace(
            runtime=runtime, Event=Event, get_elapsed_time=lambda begin, end: end.time - begin.time,
            get_current_stream=lambda: self.stream, Stream=self._stream,
            Device=lambda: Device(self), Memory=lambda size: Memory(self, size),
            UnownedMemory=lambda pointer, size, owner: SimpleNamespace(ptr=pointer),
            MemoryPointer=lambda memory, offset: memory.ptr + offset)
        return made

    def _stream(self, non_blocking, priority):
        self.gpu.refuses("stream", priority)
        return Stream(self)

    def _copy_at_once(self, target, source, num_bytes, kind):
        self.inside(source if kind == 2 else target, num_bytes)
        ctypes.memmove(target, source, num_bytes)

    def _copy(self, target, source, num_bytes, kind, stream):
        self.inside(target, num_bytes)
        self.inside(source, num_bytes)
        self.streams[stream].put(lambda reached: ctypes.memmove(target, source, num_bytes))

    def _copy_rows(self, target, target_pitch, source, source_pitch, width, rows, kind, stream):
        for row in range(rows):
            self._copy(target + row * target_pitch, source + row * source_pitch, width, kind, stream)

    def _handle(self, pointer):
        self.gpu.refuses("handle", pointer)
        with self.lock:
            return next(handle for handle, memory in self._memories.items() if memory.ctypes.data == pointer)

    def _open(self, handle):
        self.gpu.refuses("open", handle)
        assert self.seed is not None or handle in self._memories, "memory was freed that is to be mapped"
        self.gpu.opened.append(self.begin_of(handle))
        return self.gpu.opened[-1]

    def _close(self, pointer):
        assert self.gpu.num_synchronized, "streams may be at work there"
        self.inside(pointer, 1)
        self.gpu.opened.remove(pointer)


class Device(contextlib.nullcontext):
    """cupy.cuda.Device of the present rank."""

    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def synchronize(self):
        self.machine.gpu.num_synchronized += 1


@contextlib.contextmanager
def installed(machine):
    """Let the transports find a machine, and windows grow often."""
    from thdattn.comm.overlap import reduce  # loads CuPy

    with (mock.patch.dict(sys.modules, cupy=machine.cupy()),
          mock.patch.object(windows, "batch_mem_op", lambda: machine.mem_ops),
          mock.patch.object(layout, "rounded_up", lambda num_bytes: num_bytes),
          mock.patch.object(reduce.compiler, "kernel", machine.kernel),
          mock.patch.dict(reduce.REDUCE_KERNELS, float32="thd_peer_reduce")):
        yield machine
