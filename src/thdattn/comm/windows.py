"""Windows: memory of every rank that all ranks of a machine see, with flags that streams write and wait for.

For each of its users p a window has two flags:

    ready[p]    p's part is written: set by p, awaited and taken back by the reader
    taken[p]    p has read all that it reads, in every rank's part: set by p in the memory of all ranks, awaited and
                taken back by each before it writes again, in its own part or in another rank's

A flag is taken back right after the wait for it, before anybody can set it again, so that a replayed graph finds the
flags as the capture did. Streams write and await these flags, and each rank writes in its own part, which others read;
or one kernel brings all, see kernels/meeting.cu, which has a flag `offered` for each chunk of a part, instead of ready,
and may write in the parts of others. Both may take turns in a window.

Source: CUDA driver API, stream memory operations and interprocess communication.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thdattn.comm.layout import ALIGNMENT
from thdattn.structs import MAX_RANKS, MEETING, RANK_FLAGS, SHARES

_MOST_KEPT = 1024
_COUNTS = 64  # bytes of counters behind the flags
WAIT_32, WRITE_32, _WAIT_EQUAL, _WRITE_DEFAULT = 1, 2, 1, 0  # CUstreamBatchMemOpType and flags
MEM_OP = np.dtype({
    "names": ["operation", "address", "value", "flags", "alias"], "offsets": [0, 8, 16, 24, 32],
    "formats": [np.uint32, np.uint64, np.uint64, np.uint32, np.uint64], "itemsize": 48,
})  # fmt: skip


class Window:
    """Memory of one size on every rank, with its flags. Made by all ranks together.

    free, publish, arrive, take: what a stream does before it writes here, when it has written, before it reads what the
    other ranks wrote, and when it has read it. unfree: instead of publish, if it has nothing to show after all.
    """

    def __init__(self, world: Any, num_bytes: int) -> None:
        import cupy

        self._rank, self.num_bytes = world.rank, num_bytes
        flags = np.zeros(header_bytes(world.size), np.uint8)
        flags[: world.size * RANK_FLAGS.itemsize].view(RANK_FLAGS)["taken"][:, 0] = 1  # nobody has anything to read yet
        self._header = len(flags)
        self._memory = cupy.cuda.Memory(self._header + num_bytes)  # not of a pool, whose pieces have no handles
        runtime = cupy.cuda.runtime
        runtime.memcpy(self._memory.ptr, flags.ctypes.data, flags.nbytes, runtime.memcpyHostToDevice)
        runtime.streamSynchronize(0)  # a copy of pageable memory may return before it has come to its end
        handles = world.allgather(runtime.ipcGetMemHandle(self._memory.ptr))
        self._at = [self._memory.ptr if rank == world.rank else runtime.ipcOpenMemHandle(handle)
                    for rank, handle in enumerate(handles)]  # fmt: skip
        ready, taken = ([self._memory.ptr + flags_of(rank) + _place(name) for rank in range(world.size)]
                        for name in ("ready", "taken"))  # fmt: skip
        there = self.flags_there()
        self.free = MemOps(wait=taken, write=[(flag, 0) for flag in taken])
        self.unfree = MemOps(write=[(flag, 1) for flag in taken])
        self.publish = MemOps(write=[(at + _place("ready"), 1) for at in there])
        self.arrive = MemOps(wait=ready, write=[(flag, 0) for flag in ready])
        self.take = MemOps(write=[(at + _place("taken"), 1) for at in there])
        self._kept: dict[Any, Any] = {}

    @functools.cached_property
    def meet(self) -> MemOps:
        """publish and arrive by one call."""
        return MemOps(before=(self.publish, self.arrive))

    def flags_there(self) -> list[int]:
        """Where this rank's flags begin in the memory of each rank."""
        return [at + flags_of(self._rank) for at in self._at]

    @functools.cached_property
    def meetings(self) -> tuple[Any, Any]:
        """A MEETING for a kernel that says that it has taken all, or (the first one) leaves that to `take`."""
        counts = self._memory.ptr + flags_of(len(self._at))
        theirs = [*self.flags_there(), *[0] * (MAX_RANKS - len(self._at))]
        first, second = (np.array((theirs, self._memory.ptr, counts, self._rank, len(self._at), takes), MEETING)[()]
                         for takes in (0, 1))  # fmt: skip
        return first, second

    def address(self, rank: int, offset: int) -> int:
        """Of a byte of a rank's part."""
        return int(self._at[rank] + self._header + offset)

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array in this rank's part."""
        import cupy

        def made() -> Any:
            place = cupy.cuda.MemoryPointer(self._memory, self._header + offset)
            return cupy.ndarray(shape, dtype, place)

        return self.once((offset, shape, dtype), made)

    def homes(self, offsets: tuple[int, ...], sizes: tuple[int, ...], there: bool) -> tuple[Any, Any]:
        """Of shares of so many bytes, from these offsets on one behind another, those of one rank of what each rank
        owns, and those of all ranks of what one owns: a SHARES of this rank each.

        Args:
            there: they lie in the parts of ranks that own; else in those of ranks whose shares they are.
        """

        def made() -> tuple[Any, Any]:
            theirs, mine = np.zeros((2,), SHARES)
            for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                for rank in range(len(self._at)):
                    theirs["of"][i, rank] = self.share(rank, self._rank, offset, size)
                    mine["of"][i, rank] = self.share(self._rank, rank, offset, size)
            return (theirs, mine) if there else (mine, theirs)

        found: tuple[Any, Any] = self.once(("homes", offsets, sizes, there), made)
        return found

    def share(self, of: int, number: int, offset: int, size: int) -> int:
        """Where one of the shares in a rank's part begins."""
        return self.address(of, offset + number * size)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, kept for some time, as layers ask for the same few things again and again."""
        if key not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]

    def heads(self, rank: int, first: int, pitch: int, width: int, like: Any) -> Any:
        """Heads of `width` bytes, of every `pitch` from `first` on, of an array like another one in a rank's part."""
        import cupy

        rows, _, head_dim = like.shape
        memory = cupy.cuda.UnownedMemory(self.address(rank, first), pitch * rows, self)
        shape, strides = (rows, width // head_dim // like.itemsize, head_dim), (pitch, *like.strides[1:])
        return cupy.ndarray(shape, like.dtype, cupy.cuda.MemoryPointer(memory, 0), strides)

    def unmap(self) -> None:
        """Gives up the other ranks' memory; when all have done so, this rank's may go too."""
        import cupy

        for rank, at in enumerate(self._at):
            if rank != self._rank:
                cupy.cuda.runtime.ipcCloseMemHandle(at)
        self._at = []


class MemOps:
    """What a stream does by one call: it waits until all of some flags are 1, and then writes some.

    before: what it does before that.
    """

    def __init__(
        self, wait: Sequence[int] = (), write: Sequence[tuple[int, int]] = (), before: Sequence[MemOps] = ()
    ) -> None:
        waits = [(WAIT_32, flag, 1, _WAIT_EQUAL, 0) for flag in wait]
        writes = [(WRITE_32, flag, value, _WRITE_DEFAULT, 0) for flag, value in write]
        self.steps: list[tuple[int, ...]] = [*(step for each in before for step in each.steps), *waits, *writes]
        self._operations = np.array(self.steps, MEM_OP)
        self._args = len(self._operations), self._operations.ctypes.data, 0
        self._enqueue = batch_mem_op()

    def __call__(self, stream: Any) -> None:
        status = self._enqueue(stream.ptr, *self._args)
        if status:
            raise RuntimeError(f"cuStreamBatchMemOp returned {status}; use comm.init(transport='nccl')")


def header_bytes(size: int) -> int:
    """Bytes of a window before what it holds: the flags of each rank, and counters."""
    return -(-(flags_of(size) + _COUNTS) // ALIGNMENT) * ALIGNMENT


def flags_of(rank: int) -> int:
    """Where those of a rank begin in a window: how many bytes from its beginning."""
    return rank * RANK_FLAGS.itemsize


def _place(name: str) -> int:
    """Of a flag among those of a rank."""
    assert RANK_FLAGS.fields is not None
    return RANK_FLAGS.fields[name][1]


@functools.cache
def batch_mem_op() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    function.argtypes = ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
    return function
