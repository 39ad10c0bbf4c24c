"""Memory of peer memory: windows for each use, which all ranks allocate and free together.

An allocation may fail on one rank alone. So all ranks try every step of growing, and agree on its outcome before
anything changes: all ranks go on, or all raise the same error and keep the memory that they had.

Source: CUDA driver API, interprocess communication: all mappings of memory end before it is freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from thdattn.arguments import in_units
from thdattn.comm.failures.outcomes import Waiting, agreed
from thdattn.comm.overlap import layout
from thdattn.comm.overlap.blocks import allocated
from thdattn.comm.peer.windows import Window, header_bytes

KEYS, SUMS, SLICES = "windows of keys", "windows of sums", "windows of slices"
_REMEDY = ("pass fewer tokens, spread them over more ranks, make CPAttention with more head_groups, or take "
           "comm.init(transport='nccl'), which has no windows")


class SharedMemory:
    """Windows of one rank, two for each use, which take turns: one is written while other ranks still read the other.

    A call that needs more replaces both by larger ones. The old windows are freed then, unless a captured graph may use
    them; those stay until close().

    Args:
        world: the MPI communicator of all ranks, all on this machine.

    Attributes:
        waiting: makes a context for the time in which this rank waits for the others on the host, see agreed.
    """

    def __init__(self, world: Any, made_of: type[Window]) -> None:
        import cupy

        self.waiting: Waiting = nullcontext
        self._world, self._made_of = world, made_of
        self._device = cupy.cuda.Device()
        self._pairs: dict[str, _Pair] = {}
        self._outgrown: list[_Pair] = []

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

    def bytes_of(self, use: str, num_bytes: int) -> dict[str, int]:
        """Return the bytes of both windows of a use, given those of one."""
        return {use: 2 * (header_bytes(self._world.size) + layout.rounded_up(num_bytes))}

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that are allocated, by use, and apart those that only graphs use."""
        held = {use: pair.total_bytes for use, pair in self._pairs.items()}
        if self._outgrown:
            held["windows of graphs"] = sum(pair.total_bytes for pair in self._outgrown)
        return held

    def close(self) -> None:
        """Free all memory, on all ranks, once this rank's GPU has done its work."""
        pairs = [*self._pairs.values(), *self._outgrown]
        self._free([window for pair in pairs for window in pair.windows])
        self._pairs.clear()
        self._outgrown.clear()

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
