"""GPUs of several ranks on the host, for tests of what streams do in which order; peer memory finds them as CuPy.

A stream is a queue of steps. A step waits until flags are 1 or an event is reached, or else is ready at once; then it
does all it does in one go: copies, writes flags, computes. The host's program only enqueues, first that of rank 0, then
that of rank 1, and so on: a rank whose host is late is one whose streams are. At last `run` picks, over and over, one
of all streams that are ready, some far more often than others, and has it do a step or a few. So whatever is not
ordered by streams, events and flags happens in one order or the other, for some seed.

Memory of windows is of fixed places. That of arrays is given to the next array of the same size and stream as soon as
nobody holds it any more, as CuPy's pool does: steps know addresses and hold nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import weakref
from collections import defaultdict, deque
from types import ModuleType, SimpleNamespace

import numpy as np

from thdattn.comm.peer import windows


class Array(np.ndarray):
    """An array on a GPU."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def at(address, shape, dtype, strides=None):
    """The array at an address, which it does not keep."""
    pitch = strides[0] if strides else math.prod(shape[1:]) * np.dtype(dtype).itemsize
    memory = (ctypes.c_char * (shape[0] * pitch)).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=strides).view(Array)


def addresses(x):
    """The same arrays, and lists of arrays, without a hold on them; other values as they are."""
    if isinstance(x, (list, tuple)):
        return [addresses(each) for each in x]
    return at(x.data.ptr, x.shape, x.dtype, x.strides) if isinstance(x, Array) else x


class Event:
    def __init__(self, disable_timing=True):
        self.mark = object()

    def record(self, stream):
        mark = self.mark
        stream.put(lambda reached: reached.add(mark))
        return self


class Stream:
    def __init__(self, machine):
        self.machine, self.queue, self.ptr = machine, deque(), len(machine.streams)
        machine.streams.append(self)

    def put(self, act, ready=lambda reached: True):
        """Enqueues a step, or has the graph do so that is being captured. Both get the events that are reached."""
        graph = self.machine.graph
        if graph is None:
            self.queue.append((act, ready, self.machine.reached))
        else:
            graph.setdefault(self, []).append((act, ready))

    def launch(self, function, *args):
        """Enqueues a kernel: function(*args)."""
        args = addresses(args)
        self.put(lambda reached: function(*args))

    def record(self):
        return Event().record(self)

    def wait_event(self, event):
        self.put(lambda reached: None, lambda reached: event.mark in reached)

    def is_capturing(self):
        graph = self.machine.graph
        return graph is not None and (self is self.machine.stream or self in graph)

    def __enter__(self):
        self._before, self.machine.stream = self.machine.stream, self

    def __exit__(self, *_):
        self.machine.stream = self._before

    def put_launched(self, make):
        """Enqueues the steps that make() returns, in a graph anew at each replay."""
        if self.machine.graph is None:
            self.queue.extend((*step, self.machine.reached) for step in make())
        else:
            self.machine.graph.setdefault(self, []).append(make)

    def synchronize(self):
        """Nothing is done before run()."""

    def replay(self, graph, origin):
        """Enqueues a graph that was captured with `origin` current; what it had other streams do, new ones do."""
        reached = set()
        for stream, steps in graph.items():
            target = self if stream is origin else Stream(self.machine)
            made = [one for step in steps for one in (step() if callable(step) else [step])]
            target.queue.extend((*step, reached) for step in made)


class Full(RuntimeError):
    """The error of CUDA where there is no memory left."""

    status = 2


class Device(contextlib.nullcontext):
    """Memory that is freed stays what it was, as nothing is done before run()."""

    def synchronize(self):
        pass


class Machine:
    """As much of CuPy, CUDA's runtime and MPI as peer memory needs, for `size` ranks.

    rank: the one whose program is running; stream: its current one. full: no GPU has memory for windows.
    """

    def __init__(self, size, seed):
        self.size, self.rank, self.random = size, 0, random.Random(seed)
        self.streams, self.reached, self.graph = [], set(), None
        self.memories, self.made, self.free = {}, defaultdict(int), defaultdict(list)
        self.stream, self.full = None, False

    def run(self):
        """Has all streams do all there is to do."""
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

    def empty(self, shape, dtype):
        """An array from the pool, full of NaN or of what its last holder left."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        pool = self.free[self.stream, num_bytes]
        memory = pool.pop() if pool else np.full(num_bytes, 0xFF, np.uint8)
        holder = (ctypes.c_char * num_bytes).from_address(memory.ctypes.data)
        weakref.finalize(holder, pool.append, memory).atexit = False
        return np.ndarray(shape, dtype, holder).view(Array)

    def world(self, rank):
        """All ranks ask for memory in the same order, so that handles are known before their rank has made them."""
        def of(other, result):
            return [(other, *handle[1:]) for handle in result] if isinstance(result, list) else result

        def allgather(outcome):
            ok, result = outcome
            return [(ok, of(other, result)) for other in range(self.size)]

        return SimpleNamespace(rank=rank, size=self.size, allgather=allgather)

    def _memory(self, size):
        if self.full:
            raise Full
        handle = self.rank, self.made[self.rank], size
        self.made[self.rank] += 1
        return SimpleNamespace(ptr=self._open(handle), size=size, handle=handle)

    def _open(self, handle):
        return self.memories.setdefault(handle, np.full(handle[2] + 1, 0xFF, np.uint8)).ctypes.data

    def _handle(self, pointer):
        return next(handle for handle, memory in self.memories.items() if memory.ctypes.data == pointer)

    def _copy(self, target, source, num_bytes, kind, stream):
        self.streams[stream].put(lambda reached: ctypes.memmove(target, source, num_bytes))

    def _copy_rows(self, target, target_pitch, source, source_pitch, width, rows, kind, stream):
        for row in range(rows):
            self._copy(target + row * target_pitch, source + row * source_pitch, width, kind, stream)

    def mem_ops(self, stream, count, operations, flags):
        """cuStreamBatchMemOp: some waits and then some writes, each a step."""
        memory = (ctypes.c_char * (count * windows.MEM_OP.itemsize)).from_address(operations)
        for operation, address, value, _, _ in np.frombuffer(memory, windows.MEM_OP).tolist():
            flag = ctypes.c_uint32.from_address(address)
            if operation == windows.WAIT_32:
                self.streams[stream].put(lambda reached: None, lambda reached, flag=flag: flag.value == 1)
            else:
                self.streams[stream].put(lambda reached, flag=flag, value=value: setattr(flag, "value", value))
        return 0

    def kernel(self, name):
        """thd_peer_reduce: `of` has the addresses of what each rank has, `rows` those that are this rank's."""

        def add(outs, of, rows, num_ranks):
            for out, places in zip(outs, of, strict=False):
                taken = np.arange(len(out)) if rows is None else rows
                parts = [at(int(place), (int(taken.max()) + 1, *out.shape[1:]), np.float32)
                         for place in places[:num_ranks]]
                out[...] = np.where((taken < 0)[:, None, None], 0, sum(part[taken] for part in parts))

        def enqueue(grid, block, args, stream):
            out0, _, _, out1, _, _, shares, rows, *_, num_ranks, num_rows = args
            assert num_rows == len(out0) == len(out1)
            stream.launch(add, [out0, out1], shares["of"].copy(), rows if isinstance(rows, Array) else None,
                          int(num_ranks))

        return enqueue

    def cupy(self):
        """What `import cupy` finds."""
        made = ModuleType("cupy")
        runtime = SimpleNamespace(
            memcpy=lambda target, source, num_bytes, kind: ctypes.memmove(target, source, num_bytes),
            memcpyAsync=self._copy, memcpy2DAsync=self._copy_rows, memcpyDefault=4, memcpyHostToDevice=1,
            streamSynchronize=lambda stream: None, ipcGetMemHandle=self._handle, ipcOpenMemHandle=self._open,
            ipcCloseMemHandle=lambda pointer: None, CUDARuntimeError=Full, memGetInfo=lambda: (0, 0),
        )  # fmt: skip
        made.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
        made.ndarray = lambda shape, dtype, place, strides=None: at(place, shape, dtype, strides)
        made.cuda = SimpleNamespace(
            runtime=runtime, Event=Event, Memory=self._memory, get_current_stream=lambda: self.stream,
            Stream=lambda **options: Stream(self), Device=Device,
            UnownedMemory=lambda pointer, size, owner: SimpleNamespace(ptr=pointer),
            MemoryPointer=lambda memory, offset: memory.ptr + offset)  # fmt: skip
        return made
