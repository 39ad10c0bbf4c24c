"""Memory of peer memory: windows by use, and room for what is pulled, made and given back by all ranks together.

An allocation may fail on one rank alone. So every step of growing is tried by all ranks, and what comes of it is agreed
on before anything changes: all ranks go on, or all raise the same error and have what they had before.

Source: CUDA driver API, interprocess communication: all mappings of a piece of memory end before it is freed.
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

    Both are replaced by larger ones where a call needs more. Those before are given back then, unless a graph that was
    captured may use them: these stay until close().

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
        # By whether a graph may use it; of what graphs use the last one is the largest.
        self._pulled: dict[bool, list[Any]] = {False: [], True: []}

    def window(self, use: str, num_bytes: int, capturing: bool) -> Window:
        """Return the window of a use whose turn it is, with room for so many bytes.

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
        """Return where there is memory for what is pulled, which one sum after another uses.

        Graphs have their own: a replay comes after the stream it is launched on, not after the one that pulls.

        Raises:
            MemoryError: as for window.
        """
        there = self._pulled[capturing]
        if not there or there[-1].size < num_bytes:
            self._pull_more(layout.rounded_up(num_bytes), capturing)
        return int(there[-1].ptr)

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of all that was allocated and not given back, by use, and by whether only graphs use it."""
        held = {use: pair.total_bytes for use, pair in self._pairs.items()}
        held |= {PULLED: sum(memory.size for memory in self._pulled[False]),
                 "windows of graphs": sum(pair.total_bytes for pair in self._outgrown),
                 "pulled sums of graphs": sum(memory.size for memory in self._pulled[True])}  # fmt: skip
        return {use: size for use, size in held.items() if size}

    def close(self) -> None:
        """Free all, on all ranks, once this rank's GPU has done what it was given."""
        pairs = [*self._pairs.values(), *self._outgrown]
        self._give_back([window for pair in pairs for window in pair.windows])
        self._pairs.clear()
        self._outgrown.clear()
        for memory in self._pulled.values():
            memory.clear()

    def _grown(self, use: str, num_bytes: int, capturing: bool) -> _Pair:
        """Make both windows anew, as a capture after this call finds the other one."""
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
            self._give_back(windows)
            raise
        pair = self._pairs[use] = _Pair(windows)
        if outgrown is not None and captured:
            self._outgrown.append(outgrown)
        elif outgrown is not None:
            self._give_back(outgrown.windows)
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
            self._device.synchronize()  # nothing is pulled there any more
            there.clear()
        there += made

    def _give_back(self, windows: list[Window]) -> None:
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
        num_bytes: how much that is, for the message.
        retry: where there is too little, CuPy's pool gives back what it holds free, and `make` tries again.

    Raises:
        MemoryError: there is too little all the same.
    """
    import cupy

    made = _if_there_is_room(make)
    if made is None and retry:
        cupy.get_default_memory_pool().free_all_blocks()
        made = _if_there_is_room(make)
    if made is None:
        free = int(cupy.cuda.runtime.memGetInfo()[0])
        raise MemoryError(f"found {in_units(free)} of GPU memory free, wanted {in_units(num_bytes)}")
    return made


def _if_there_is_room(make: Callable[[], T]) -> T | None:
    import cupy

    try:
        return make()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status != _OUT_OF_MEMORY:
            raise
        return None
