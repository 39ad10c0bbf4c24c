"""Windows: memory of every rank that all ranks of a machine see, with flags that streams write and wait for.

For each of its users p a window has two flags:

    ready[p]    p's part is written. p sets it; the reader awaits and resets it.
    taken[p]    p has read all that it reads, in every rank's part. p sets it in the memory of all ranks. Each rank
                awaits and resets it before it writes again, in its own part or in another rank's.

A flag is reset right after the wait for it, before anybody can set it again. So a replayed graph finds the flags as the
capture did. Streams write and await these flags, and each rank writes into its own part, which others read. Or one
kernel exchanges all, see kernels/peer/exchange.cu. It has a flag `offered` for each chunk of a part instead of ready,
and may write into the parts of others. Both ways may take turns in a window.

Source: CUDA driver API, stream memory operations and interprocess communication.
"""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thdattn.arguments import Array
from thdattn.comm.overlap.layout import ALIGNMENT
from thdattn.jit.structs import MAX_RANKS, PARTIALS, PEER_EXCHANGE, RANK_FLAGS

Ops = Callable[[Any], None]

_MOST_KEPT = 1024
_COUNTS = 64  # bytes of counters behind the flags
WAIT_32, WRITE_32, _WAIT_EQUAL, _WRITE_DEFAULT = 1, 2, 1, 0  # CUstreamBatchMemOpType and flags
MEM_OP = np.dtype({
    "names": ["operation", "address", "value", "flags", "alias"], "offsets": [0, 8, 16, 24, 32],
    "formats": [np.uint32, np.uint64, np.uint64, np.uint32, np.uint64], "itemsize": 48,
})


class Window:
    """Memory of one size on every rank, with its flags. Each rank makes its own, and then opens those of the others.

    Attributes are steps that a stream enqueues; once the window is unmapped, they do nothing.

    free: wait until the window may be written.
    publish: tell that this rank has written it.
    arrive: wait until the other ranks have written it.
    take: tell that this rank has read it.
    meet: publish and arrive by one call.
    unfree: instead of publish, undo free without anything to show.

    Raises:
        CUDARuntimeError: no memory is left, or none that other processes can open.
    """

    free: Ops
    publish: Ops
    arrive: Ops
    take: Ops
    meet: Ops
    unfree: Ops

    def __init__(self, rank: int, size: int, num_bytes: int) -> None:
        import cupy

        self._cupy, self._rank, self._size, self.num_bytes = cupy, rank, size, num_bytes
        flags = np.zeros(header_bytes(size), np.uint8)
        flags[: size * RANK_FLAGS.itemsize].view(RANK_FLAGS)["taken"][:, 0] = 1  # nothing to read yet
        self._header = len(flags)
        self._memory: Any = cupy.cuda.Memory(self._header + num_bytes)  # memory of a pool has no handles
        runtime = cupy.cuda.runtime
        runtime.memcpy(self._memory.ptr, flags.ctypes.data, flags.nbytes, runtime.memcpyHostToDevice)
        runtime.streamSynchronize(0)  # a copy of pageable memory may return before its end
        self.handle = runtime.ipcGetMemHandle(self._memory.ptr)
        self._at: list[int] = []
        self._kept: OrderedDict[Any, Any] = OrderedDict()

    def open(self, handles: Sequence[Any]) -> None:
        """Map the memory of the other ranks, given all ranks' handles; unmap() undoes that, also after an error."""
        for rank, handle in enumerate(handles):
            mine = rank == self._rank
            self._at.append(self._memory.ptr if mine else self._cupy.cuda.runtime.ipcOpenMemHandle(handle))
        ready, taken = ([self._memory.ptr + flags_of(rank) + _place(name) for rank in range(self._size)]
                        for name in ("ready", "taken"))
        there = self.flags_there()
        publish = MemOps(write=[(at + _place("ready"), 1) for at in there])
        arrive = MemOps(wait=ready, write=[(flag, 0) for flag in ready])
        self.publish, self.arrive, self.meet = publish, arrive, MemOps(before=(publish, arrive))
        self.free = MemOps(wait=taken, write=[(flag, 0) for flag in taken])
        self.unfree = MemOps(write=[(flag, 1) for flag in taken])
        self.take = MemOps(write=[(at + _place("taken"), 1) for at in there])

    def check_published(self, stream: Any) -> None:
        """Copy the flags of every rank here, as rows are copied, and check that all ranks have published.

        Raises:
            RuntimeError: a rank's flag has not arrived.
        """
        runtime, here = self._cupy.cuda.runtime, self.address(self._rank, 0)
        flags = np.zeros(self._size, RANK_FLAGS)
        for rank, at in enumerate(self._at):
            runtime.memcpyAsync(here, at, flags.nbytes, runtime.memcpyDefault, stream.ptr)
            stream.synchronize()
            runtime.memcpy(flags.ctypes.data, here, flags.nbytes, runtime.memcpyDeviceToHost)
            missing = np.flatnonzero(flags["ready"][:, 0] != 1).tolist()
            if missing:
                raise RuntimeError(f"flags of ranks {missing} have not arrived in the memory of rank {rank}")

    @property
    def total_bytes(self) -> int:
        """Bytes of its memory on this rank, with the flags."""
        return int(self._memory.size)

    def flags_there(self) -> list[int]:
        """Return the address of this rank's flags in the memory of each rank."""
        return [at + flags_of(self._rank) for at in self._at]

    @functools.cached_property
    def exchange_flags(self) -> tuple[Any, Any]:
        """Two PEER_EXCHANGEs for a kernel: the first leaves `take` to the stream, the second includes it."""
        counts = self._memory.ptr + flags_of(len(self._at))
        theirs = [*self.flags_there(), *[0] * (MAX_RANKS - len(self._at))]
        flags = theirs, self._memory.ptr, counts, self._rank, len(self._at)
        first, second = (np.array((*flags, takes), PEER_EXCHANGE)[()] for takes in (0, 1))
        return first, second

    def address(self, rank: int, offset: int) -> int:
        """Return the address of a byte of a rank's part."""
        return int(self._at[rank] + self._header + offset)

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array in this rank's part."""
        def made() -> Any:
            place = self._cupy.cuda.MemoryPointer(self._memory, self._header + offset)
            return self._cupy.ndarray(shape, dtype, place)

        return self.memoize((offset, shape, dtype), made)

    def owner_partials(self, offsets: tuple[int, ...], sizes: tuple[int, ...], there: bool) -> tuple[Any, Any]:
        """Return two PARTIALS: addresses of this rank's partial sums for each owner, and of all ranks' for this owner.

        Args:
            offsets: where the partial sums of each array begin in a part.
            sizes: bytes of one owner's partial sums of each array; those of all owners follow each other.
            there: partial sums are in the parts of their owners; else in the parts of the ranks that computed them.
        """

        def made() -> tuple[Any, Any]:
            theirs, mine = np.zeros((2,), PARTIALS)
            for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                for rank in range(len(self._at)):
                    theirs["of"][i, rank] = self.partial_address(rank, self._rank, offset, size)
                    mine["of"][i, rank] = self.partial_address(self._rank, rank, offset, size)
            return (theirs, mine) if there else (mine, theirs)

        found: tuple[Any, Any] = self.memoize(("partials", offsets, sizes, there), made)
        return found

    def partial_address(self, of: int, number: int, offset: int, size: int) -> int:
        """Return the address of one owner's, or one rank's, partial sums in a rank's part."""
        return self.address(of, offset + number * size)

    def memoize(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for a key; the least recently used values are dropped and made again."""
        kept = self._kept
        found = kept.get(key)
        if found is not None:
            kept.move_to_end(key)
            return found
        if len(kept) >= _MOST_KEPT:
            kept.popitem(last=False)
        found = kept[key] = make()
        return found

    def heads(self, rank: int, first: int, pitch: int, width: int, like: Array) -> Any:
        """Return some heads of a rank's array in a window, whose dtype and head dim are those of another array.

        Args:
            rank: whose part holds the array; first: byte of the part at which the heads begin.
            pitch: bytes from row to row; width: bytes of the heads in a row.
        """
        rows, _, head_dim = like.shape
        memory = self._cupy.cuda.UnownedMemory(self.address(rank, first), pitch * rows, None)  # a window outlives them
        shape, strides = (rows, width // head_dim // like.itemsize, head_dim), (pitch, *like.strides[1:])
        return self._cupy.ndarray(shape, like.dtype, self._cupy.cuda.MemoryPointer(memory, 0), strides)

    def unmap(self) -> None:
        """Unmap the other ranks' memory. No stream may use it any more; later steps do nothing."""
        for rank, at in enumerate(self._at):
            if rank != self._rank:
                self._cupy.cuda.runtime.ipcCloseMemHandle(at)
        self._at = []
        self.free = self.publish = self.arrive = self.take = self.meet = self.unfree = lambda stream: None

    def release(self) -> None:
        """Free this rank's memory, when all ranks have unmapped it."""
        self._kept.clear()
        self._memory = None


class MemOps:
    """Steps of a stream in one call: it waits until all of some flags are 1, and then writes others.

    Args:
        wait: addresses of flags to await.
        write: pairs (address of a flag, value) to write.
        before: steps that come first.
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
    """Return the bytes of a window before its data: the flags of each rank, and counters."""
    return -(-(flags_of(size) + _COUNTS) // ALIGNMENT) * ALIGNMENT


def flags_of(rank: int) -> int:
    """Return where the flags of a rank begin in a window, in bytes."""
    return rank * RANK_FLAGS.itemsize


def _place(name: str) -> int:
    """Return where a flag is among those of a rank, in bytes."""
    assert RANK_FLAGS.fields is not None
    return RANK_FLAGS.fields[name][1]


@functools.cache
def batch_mem_op() -> Any:
    """Load the driver's call of several stream memory operations."""
    function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    function.argtypes = ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
    return function
