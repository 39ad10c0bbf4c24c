"""The static pack: lengths of changing batches at one place, and plans that follow them there.

A captured graph reads the same arrays at every replay. So the number of sequences is padded by empty ones, which cost
nothing, the rows to a capacity, and a batch is loaded by one copy of its lengths and planned by the plan kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdattn.arguments import as_count
from thdattn.attention import CPAttention
from thdattn.graphs.capture import Graphs
from thdattn.packing import PackedBatch
from thdattn.plan import Plan
from thdattn.sharding import Sharding

MOST_SEQUENCES = 2048  # unless the configuration says more


class StaticPack:
    """Batches of up to so many sequences and rows, and one plan per mask for all of them.

    Without active graphs the batches are planned as usual, one by one, so that a program is the same everywhere.

    Args:
        graphs: config.max_packed_seqs sequences are room for; None: as many as rows, at most 2,048.
        attentions: one per mask, all on one comm.
        num_rows: rows of every batch, of all ranks together.
        sharding: "dual_chunk" or "contiguous".
        num_batches: micro-batches that are loaded at once, for a graph of all of them.
        like: a batch as they usually are, which the kernels' order of work is chosen by; results do not depend on it.

    Attributes:
        max_seqs, num_rows: the capacity.

    Raises:
        ValueError: num_rows that the sharding cannot split, or that is more than config.max_tokens_per_rank allows.
    """

    def __init__(
        self, graphs: Graphs, attentions: Sequence[CPAttention], num_rows: int, sharding: str = "dual_chunk",
        num_batches: int = 1, like: PackedBatch | None = None,
    ) -> None:  # fmt: skip
        config = graphs.config
        self.num_rows = as_count("num_rows", num_rows)
        self.max_seqs = config.max_packed_seqs or min(MOST_SEQUENCES, num_rows)
        cp_size = attentions[0].comm.size
        if config.max_tokens_per_rank is not None and -(-num_rows // cp_size) > config.max_tokens_per_rank:
            raise ValueError(
                f"num_rows is {num_rows}, {-(-num_rows // cp_size)} per rank, wanted at most max_tokens_per_rank = "
                f"{config.max_tokens_per_rank}; pass fewer rows, or a larger maximum"
            )
        self._graphs, self._attentions, self._sharding = graphs, tuple(attentions), sharding
        self._batches: list[PackedBatch] = []
        if graphs.active:
            import cupy

            dummy = _padded(PackedBatch([0, num_rows]), self.max_seqs)
            self._loaded = cupy.asarray(np.stack([dummy] * as_count("num_batches", num_batches)))
            self._lengths = self._loaded[0] if num_batches == 1 else self._loaded[0].copy()
            batch = PackedBatch(*self._lengths, total_rows=num_rows)
            self._plans = tuple(attention.plan(batch, sharding, like=like) for attention in attentions)

    def fits(self, batches: Sequence[PackedBatch]) -> bool:
        """Whether the batches can be loaded: to be asked once per step, on the host, alike on all ranks.

        Counts one that cannot in graphs.num_overflows.

        Raises:
            ValueError: one does not fit, and config.on_overflow is "error".
        """
        for number, batch in enumerate(batches):
            for what, found, room in (("sequences", batch.num_seqs, self.max_seqs),
                                      ("rows", batch.total_rows, self.num_rows)):  # fmt: skip
                if found <= room:
                    continue
                if self._graphs.config.on_overflow == "error":
                    raise ValueError(
                        f"batch {number} has {found} {what}, wanted at most {room}, the room of the static pack; pack "
                        f"fewer, raise the maximum, or use on_overflow='eager'"
                    )
                self._graphs.num_overflows += 1
                return False
        return True

    def load(self, batches: Sequence[PackedBatch]) -> None:
        """Copies the lengths of batches that fit, on the current stream; the host does not wait.

        Args:
            batches: num_batches batches with their lengths on the host.
        """
        self._batches = [self.padded(batch) for batch in batches]
        if self._graphs.active:
            import cupy

            lengths = np.stack([_padded(batch, self.max_seqs) for batch in batches])
            if lengths.shape != self._loaded.shape:
                raise ValueError(f"batches holds {len(lengths)} batches, wanted {len(self._loaded)}, as the static pack "
                                 f"was made for; make another one for another number of micro-batches")
            self._loaded.set(lengths, cupy.cuda.get_current_stream())

    def plans(self, number: int = 0) -> tuple[Plan, ...]:
        """The plans of a loaded batch, one per attention; those of the batch asked for before become these.

        A graph may capture this: each replay then plans the batch that is loaded.
        """
        if not self._graphs.active:
            sharding = self.sharding(self._batches[number])
            return tuple(attention.plan(sharding.batch, sharding) for attention in self._attentions)
        if len(self._loaded) > 1:
            self._lengths[...] = self._loaded[number]
        for plan in self._plans:
            plan.refresh()
        return self._plans

    def padded(self, batch: PackedBatch) -> PackedBatch:
        """The batch with the capacity's rows, which is how a rank's rows are cut out of it."""
        return PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=self.num_rows)

    def sharding(self, batch: PackedBatch) -> Sharding:
        """The sharding of a batch on the host, padded to the capacity."""
        return Sharding(self.padded(batch), self._attentions[0].comm.size, self._sharding)


def _padded(batch: PackedBatch, num_seqs: int) -> NDArray[np.int32]:
    """(2, num_seqs + 1): cu_seqlens and cu_seqlens_padded, with empty sequences at the end."""
    missing = (0, num_seqs - batch.num_seqs)
    return np.stack([np.pad(x, missing, mode="edge") for x in (batch.cu_seqlens, batch.cu_seqlens_padded)])
