"""Memory of overlapped collectives: blocks for each use, which outlive the collectives and graphs that use them.

An allocation may fail on one rank alone, so all ranks agree on its outcome: all go on, or all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from thdattn.arguments import in_units
from thdattn.comm.failures.outcomes import Waiting, agreed
from thdattn.comm.overlap import layout

T = TypeVar("T")

SENT, SLICES = "slices to send", "copies of slices"
SUMS, RECEIVED, PULLED = "partial sums by rank", "received partial sums", "pulled sums"
_TURNS = {SENT: 2, SUMS: 2, SLICES: 1, RECEIVED: 1, PULLED: 1}  # collectives alone write the latter, one after another
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_REMEDY = "pass fewer tokens, spread them over more ranks, or make CPAttention with more head_groups"


class Block:
    """Memory of one use.

    Attributes:
        address: of its first byte; num_bytes: how many it has.
        last: event after the last collective that used it; None: none did, or its graph is another one.
    """

    def __init__(self, num_bytes: int) -> None:
        import cupy

        self.memory = cupy.cuda.Memory(num_bytes)
        self.address, self.num_bytes = int(self.memory.ptr), num_bytes
        self.last: Any = None


class Blocks:
    """Blocks of a rank. The blocks of a use take turns: one is written while a collective still reads the other.

    Captured graphs have blocks of their own, as a replay may come at any time. These stay until close().

    Attributes:
        waiting: makes a context for the time in which this rank waits for the others on the host, see agreed.
    """

    def __init__(self, world: Any) -> None:
        import cupy

        self.waiting: Waiting = nullcontext
        self._world, self._device = world, cupy.cuda.Device()
        self._blocks: dict[tuple[str, bool], list[Block | None]] = {}
        self._outgrown: list[tuple[str, Block]] = []

    def next(self, use: str, num_bytes: int, capturing: bool) -> Block:
        """Return the block of a use whose turn it is, with at least so many bytes.

        All ranks ask for the same sizes, so that they need a larger block in the same call. But for SLICES, each has
        its own.

        Raises:
            MemoryError: a larger block is needed and memory is short, on this rank alone or on one, when all raise.
        """
        turns = self._blocks.setdefault((use, capturing), [None] * _TURNS[use])
        if turns[0] is None or turns[0].num_bytes < num_bytes:  # in no variable, which a traceback would hold
            made = self._made(use, layout.rounded_up(num_bytes), capturing)
            if turns[0] is not None and capturing:
                self._outgrown.append((use, turns[0]))
            elif turns[0] is not None:
                self._device.synchronize()  # until no collective uses it
            turns[0] = made
        block = turns.pop(0)
        assert block is not None
        turns.append(block)
        return block

    def forget_events(self) -> None:
        """Forget the events of an earlier capture: its graph and the next one never run at the same time."""
        for (_, captured), turns in self._blocks.items():
            for block in turns if captured else ():
                if block is not None:
                    block.last = None

    def bytes_of(self, sizes: dict[str, int]) -> dict[str, int]:
        """Return the bytes of all blocks of each use, given those of one; uses without bytes have no blocks."""
        return {use: _TURNS[use] * layout.rounded_up(size) for use, size in sizes.items() if size}

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that are allocated, by use, and apart those that only graphs use."""
        blocks = [(f"{use} of graphs" if captured else use, block)
                  for (use, captured), turns in self._blocks.items() for block in turns if block is not None]
        held: dict[str, int] = {}
        for name, block in [*blocks, *((f"{use} of graphs", block) for use, block in self._outgrown)]:
            held[name] = held.get(name, 0) + block.num_bytes
        return held

    def close(self) -> None:
        """Free all memory, once this rank's GPU has done its work."""
        self._device.synchronize()
        for turns in self._blocks.values():
            turns.clear()  # as an error's traceback may hold the list
        self._blocks.clear()
        self._outgrown.clear()

    def _made(self, use: str, num_bytes: int, capturing: bool) -> Block:
        made: list[Block] = []

        def make() -> None:
            with self._device:
                made.append(allocated(lambda: Block(num_bytes), num_bytes, not capturing))

        if use == SLICES:
            make()
            return made[0]
        try:
            agreed(self._world, f"making {in_units(num_bytes)} for {use}", make, _REMEDY, self.waiting)
        except Exception:
            made.clear()  # which the error's traceback holds
            raise
        return made[0]


def allocated(make: Callable[[], T], num_bytes: int, retry: bool = True) -> T:
    """Return what `make` allocates on the GPU.

    Args:
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
