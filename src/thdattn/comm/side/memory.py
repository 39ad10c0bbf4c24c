"""Memory of side collectives: blocks for each use, which outlive the collectives and graphs that use them.

An allocation may fail on one rank alone, so all ranks agree on its outcome: all go on, or all raise the same error.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from thdattn.comm.failures.outcomes import Waiting, agreed
from thdattn.comm.peer import layout
from thdattn.comm.peer.shared_memory import allocated
from thdattn.plan.memory import in_units

SENT, SLICES = "slices to send", "copies of slices"
SUMS, RECEIVED = "partial sums by rank", "received partial sums"
_TURNS = {SENT: 2, SUMS: 2, SLICES: 1, RECEIVED: 1}  # collectives alone write what they receive, one after another
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

    Args:
        world: the MPI communicator of all ranks.

    Attributes:
        waiting: makes a context for the time in which this rank waits for the others on the host, see agreed.
    """

    def __init__(self, world: Any) -> None:
        import cupy

        self.waiting: Waiting = nullcontext
        self._world, self._device = world, cupy.cuda.Device()
        self._blocks: dict[tuple[str, bool], list[Block | None]] = {}
        self._outgrown: list[Block] = []

    def next(self, use: str, num_bytes: int, capturing: bool) -> Block:
        """Return the block of a use whose turn it is, with at least so many bytes.

        All ranks ask for the same sizes, so that they need a larger block in the same call. But for SLICES, each has
        its own.

        Raises:
            MemoryError: a larger block is needed and memory is short, on this rank alone or on one, when all raise.
        """
        turns = self._blocks.setdefault((use, capturing), [None] * _TURNS[use])
        block = turns[0]
        if block is None or block.num_bytes < num_bytes:
            made = self._made(use, layout.rounded_up(num_bytes), capturing)
            if block is not None and capturing:
                self._outgrown.append(block)
            elif block is not None:
                self._device.synchronize()  # until no collective uses it
            block = turns[0] = made
        turns.append(turns.pop(0))
        return block

    def forget_events(self) -> None:
        """Forget the events of an earlier capture: its graph and the next one never run at the same time."""
        for (_, captured), turns in self._blocks.items():
            for block in turns if captured else ():
                if block is not None:
                    block.last = None

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that are allocated, by use, and apart those that only graphs use."""
        held: dict[str, int] = {}
        for (use, captured), turns in self._blocks.items():
            name = f"{use}, of graphs" if captured else use
            held[name] = held.get(name, 0) + sum(block.num_bytes for block in turns if block is not None)
        if self._outgrown:
            held["blocks that graphs have outgrown"] = sum(block.num_bytes for block in self._outgrown)
        return held

    def close(self) -> None:
        """Free all memory, once this rank's GPU has done its work."""
        self._device.synchronize()
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
        agreed(self._world, f"making {in_units(num_bytes)} for {use}", make, _REMEDY, self.waiting)
        return made[0]
