"""Memory of peer memory: windows for each use, and memory for pulled sums; all ranks allocate and free it together.

An allocation may fail on one rank alone. So all ranks try every step of growing, and agree on its outcome before
anything changes: all ranks go on, or all raise the same error and keep the memory that they had.

Source: CUDA driver API, interprocess communication: all mappings of memory end before it is freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from thdattn.comm.failures.outcomes import Waiting, agreed
from thdattn.comm.peer import layout
from thdattn.comm.peer.windows import Window, header_bytes
from thdattn.plan.memory import in_units

T = TypeVar("T")

KEYS, SUMS, SLICES = "windows of keys", "windows of sums", "windows of slices"
PULLED = "pulled sums"

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_REMEDY = ("pass fewer tokens, spread them over more ranks, make CPAttention with more head_groups, or take "
           "comm.init(transport='nccl'), which has no windows")


class SharedMemory:
    """Windows of one rank, two for each use, which take turns: one is written while other ranks still read the other.

    A call that needs more replaces both by larger ones. The old windows are freed then, unless a captured graph may use
    them; those stay until close().

    Args:
        world: the MPI communicator of all ranks, all on this machine.
        made_of: the class of windows.

    Attributes:
        waiting: makes a context for the time in which this rank waits for the others on the host, see agreed.
    """

    def __init__(self, world: Any, made_of: type[Window] = Window) -> None:
        import cupy

        self.waiting: Waiting = nullcontext
        self._world, self._made_of = world, made_of
        self._device = cupy.cuda.Device()
        self._pairs: dict[str, _Pair] = {}
        self._outgrown: list[_Pair] = []
        # By whether a graph may use it; the last of each list is the largest.
        self._pulled: dict[bool, list[Any]] = {False: [], True: []}

    def window(self, use: str, num_bytes: int, capturing: bool) -> Window:
        """Return the window of a use whose turn it is, with at least so many bytes.

        Raises:
            MemoryError: on every rank, if a larger window is needed and a rank lacks memory; nothing has changed.
            RuntimeError: on every rank, if one needs a larger window while it captures a graph, or cannot open those of
                the others.
        """
        pair = self._pairs.get(use)
        if pair is None or pair.num_bytes < num_bytes:
            pair = self._grown(use, layout.rounded_up(num_bytes), capturing)
        return pair.next(capturing)

    def pulled(self, num_bytes: int, capturing: bool) -> int:
        """Return the address of memory for pulled partial sums, which one sum after another uses.

        Graphs have their own: a replay is ordered after the stream that it is launched on, not after the stream that
            pulls.

        Raises:
            MemoryError: as for window.
        """
        there = self._pulled[capturing]
        if not there or there[-1].size < num_bytes:
            self._pull_more(layout.rounded_up(num_bytes), capturing)
        return int(there[-1].ptr)

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that are allocated, by use, and apart those that only graphs use."""
        held = {use: pair.total_bytes for use, pair in self._pairs.items()}
        held |= {PULLED: sum(memory.size for memory in self._pulled[False]),
                 "windows of graphs": sum(pair.total_bytes for pair in self._outgrown),
                 "pulled sums of graphs": sum(memory.size for memory in self._pulled[True])}  # fmt: skip
        return {use: size for use, size in held.items() if size}

    def close(self) -> None:
        """Free all memory, on all ranks, once this rank's GPU has done its work."""
        pairs = [*self._pairs.values(), *self._outgrown]
        self._free([window for pair in pairs for window in pair.windows])
        self._pairs.clear()
        self._outgrown.clear()
        for memory in self._pulled.values():
            memory.clear()

    def _grown(self, use: str, num_bytes: int, capturing: bool) -> _Pair:
        """Make both windows anew, so that a capture after this call finds the other one."""
        rank, size = self._world.rank, self._world.size
        outgrown, each = self._pairs.get(use), header_bytes(size) + num_bytes
        windows: list[Window] = []

        def make() -> list[Any]:
            if capturing:
                raise RuntimeError(f"a captured call needs {num_bytes} bytes that all ranks see, which cannot be made "
                                   f"in a capture; call it once before, or use warmup_steps of 1 or more")
            with self._device:
                windows.extend(allocated(lambda: [self._made_of(rank, size, num_bytes) for _ in range(2)], 2 * each))
            return [window.handle for window in windows]

        def open_all() -> bool:
            with self._device:
                for window, handles in zip(windows, zip(*all_handles, strict=True), strict=True):
                    window.open(handles)
            return outgrown is not None and outgrown.captured

        both = f"2 {use} of {in_units(each)} each"
        try:
            all_handles = self._agreed(f"making {both}", make, _REMEDY)
            captured = any(self._agreed(f"opening {both}", open_all))
        except Exception:
            self._free(windows)
            raise
        pair = self._pairs[use] = _Pair(windows)
        if outgrown is not None and captured:
            self._outgrown.append(outgrown)
        elif outgrown is not None:
            self._free(outgrown.windows)
        return pair

    def _pull_more(self, num_bytes: int, capturing: bool) -> None:
        made: list[Any] = []

        def make() -> None:
            import cupy

            with self._device:
                made.append(allocated(lambda: cupy.cuda.Memory(num_bytes), num_bytes, not capturing))

        try:
            self._agreed(f"making {in_units(num_bytes)} for {PULLED}", make, _REMEDY)
        except Exception:
            made.clear()
            raise
        there = self._pulled[capturing]
        if there and not capturing:
            self._device.synchronize()  # until nothing is pulled into the old memory
            there.clear()
        there += made

    def _free(self, windows: list[Window]) -> None:
        """Unmap windows on every rank, when no GPU uses them any more, and then free them."""

        def unmap() -> None:
            if windows:  # else a capture may go on
                self._device.synchronize()
            with self._device:
                for window in windows:
                    window.unmap()

        self._agreed("unmapping windows", unmap)
        for window in windows:
            window.release()
        windows.clear()

    def _agreed(self, step: str, action: Callable[[], Any], remedy: str = "") -> list[Any]:
        return agreed(self._world, step, action, remedy, self.waiting)


class _Pair:
    """The two windows of a use.

    Attributes:
        captured: whether one of them was handed out in the capture of a graph.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows, self.num_bytes, self.captured = list(windows), windows[0].num_bytes, False
        self._turns = itertools.cycle(windows)

    def next(self, capturing: bool) -> Window:
        """Return the one whose turn it is."""
        if capturing:
            self.captured = True
        return next(self._turns)

    @property
    def total_bytes(self) -> int:
        return sum(window.total_bytes for window in self.windows)


def allocated(make: Callable[[], T], num_bytes: int, retry: bool = True) -> T:
    """Return what `make` allocates on the GPU.

    Args:
        make: allocates.
        num_bytes: how much that is, for the message.
        retry: where memory is short, CuPy's pool frees its unused blocks, and `make` tries again.

    Raises:
        MemoryError: memory is short all the same.
    """
    import cupy

    made = _or_none(make)
    if made is None and retry:
        cupy.get_default_memory_pool().free_all_blocks()
        made = _or_none(make)
    if made is None:
        free = int(cupy.cuda.runtime.memGetInfo()[0])
        raise MemoryError(f"found {in_units(free)} of GPU memory free, wanted {in_units(num_bytes)}")
    return made


def _or_none(make: Callable[[], T]) -> T | None:
    import cupy

    try:
        return make()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status != _OUT_OF_MEMORY:
            raise
        return None
