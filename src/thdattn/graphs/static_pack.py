"""StaticPack: batches of changing lengths at fixed addresses, and the plans that follow them; Upload: such data.

A captured graph reads the same arrays at every replay. So empty sequences, which cost nothing, pad the number of
sequences, and padding rows fill the capacity. One copy of its lengths loads a batch, and plan kernels plan it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdattn.arguments import INT32_MAX, as_count, check_kind
from thdattn.attention import CPAttention
from thdattn.capacity import BalancedCapacity, LayoutSizes, LayoutTables, Mask, Window
from thdattn.graphs.capture import Graphs
from thdattn.mamba.mixer import Mamba2Mixer
from thdattn.packing import PackedBatch, once
from thdattn.plan import layout_tables
from thdattn.plan.generations import renew
from thdattn.plan.node_table import NODE_WORDS, node_table
from thdattn.plan.plan import Plan
from thdattn.sharding import Sharding

MOST_SEQUENCES = 2048  # default capacity
RUNS_OF_A_SEQUENCE, RUNS_OF_A_RANK = 4, 32  # runs of rows of owners and of key buffers for which tables have room

Planner = CPAttention | Mamba2Mixer


class StaticPack:
    """Fixed capacity of sequences and rows for batches of changing lengths, with one plan per mask for all of them.

    Without active graphs every batch is planned as usual, so that one program serves every machine.

    Args:
        graphs: config.max_packed_seqs is the capacity in sequences; None: as many as rows, at most 2,048.
            config.max_packed_nodes is that in nodes of prefix trees, for causal attentions without a window; a
            sequence is a node. None: captured plans take no trees.
        attentions: one per mask, all on one comm, of engine "cuda" if graphs are active. A Mamba2Mixer may be one of
            them; beside a causal attention without a window it needs no plan of its own.
        num_rows: rows of every batch, of all ranks together.
        sharding: as CPAttention.plan takes it; by default that of the first attention. A BalancedCapacity, or one for
            the window of each attention, is "balanced" within that capacity. "balanced" alone has room for all layouts
            but rare ones. With two levels, capacities are those of groups of neighbours.
        num_batches: micro-batches that are loaded at once, for a graph of all of them.
        like: a typical batch, from which the kernels choose their order of work; results do not depend on it.
        finite_padding: as CPAttention.plan; without it, every pack is assumed to have padding.

    Attributes:
        max_seqs, max_nodes, num_rows, num_batches: the capacity; max_nodes may be None.
        balanced: for the window of each attention, what ranks may exchange under the sharding "balanced"; empty for
            another sharding.

    Raises:
        TypeError: a count that is no int, graphs of another type, or attentions that are in no list.
        ValueError: a count below 1, no attention, one of another engine, an unknown sharding, more rows than
            config.max_tokens_per_rank allows, or a sharding that an attention cannot have. Active graphs with
            max_packed_nodes also refuse windows, masks that are not causal, and mixers.
    """

    def __init__(
        self, graphs: Graphs, attentions: Sequence[Planner], num_rows: int,
        sharding: str | BalancedCapacity | Mapping[Window, BalancedCapacity] | None = None,
        num_batches: int = 1, like: PackedBatch | None = None, finite_padding: bool = False,
    ) -> None:
        check_kind("graphs", graphs, Graphs, "make Graphs(comm, config)")
        config = graphs.config
        self.num_rows, self.num_batches = as_count("num_rows", num_rows), as_count("num_batches", num_batches)
        self.max_seqs = config.max_packed_seqs or min(MOST_SEQUENCES, num_rows)
        self.max_nodes = config.max_packed_nodes
        check_kind("attentions", attentions, Sequence, "pass a list, of one attention too")
        self._graphs, self._attentions = graphs, tuple(attentions)
        self._strategy = "balanced" if isinstance(sharding, BalancedCapacity | Mapping) else sharding
        self._finite_padding, self._num_loads = finite_padding, 0
        if not self._attentions:
            raise ValueError("attentions is empty, wanted at least one attention; pass one per mask")
        self._slots = _aligned(self.max_seqs + 1)
        self._node_slots = 0 if self.max_nodes is None else _aligned(self.max_nodes + 1)
        self._shardings = [self.sharding(PackedBatch([0]))] * self.num_batches  # all rows are padding at first
        for attention in self._attentions:
            attention.sharding(PackedBatch([0]), self._strategy)
        rows, between = self._shardings[0].local_rows, _between(self._shardings[0])
        masks = {Mask(x.window, x._tiles): None for x in attentions if isinstance(x, CPAttention)}  # each once
        self.balanced = _capacities(sharding, between, masks)
        if self.balanced:
            most = max(self.max_seqs, self.max_nodes or 0)
            max_runs = RUNS_OF_A_SEQUENCE * most + RUNS_OF_A_RANK * between.cp_size
            capacities = {mask: self.balanced[mask.window] for mask in masks}
            self._sizes = LayoutSizes(between.local_rows, max_runs, capacities)
        if config.max_tokens_per_rank is not None and rows > config.max_tokens_per_rank:
            raise ValueError(
                f"num_rows is {num_rows}, {rows} per rank, wanted at most max_tokens_per_rank = "
                f"{config.max_tokens_per_rank}; pass fewer rows, or a larger maximum"
            )
        if graphs.active:
            self._make_plans(like)

    def _make_plans(self, like: PackedBatch | None) -> None:
        """Make plans of lengths on the GPU."""
        for attention in self._attentions:
            if attention.engine != "cuda":
                raise ValueError(f"attentions holds one of engine {attention.engine!r}, wanted 'cuda' as graphs are "
                                 f"active; make Graphs with the engine of the attentions")
        num_words = 2 * self._slots + NODE_WORDS * self._node_slots + (self._sizes.num_words if self.balanced else 0)
        self._upload = Upload(self.num_batches * num_words, on_gpu=True)
        self._loaded = self._upload.words.reshape(self.num_batches, num_words)
        self._planned = self._loaded[0] if self.num_batches == 1 else self._loaded[0].copy()
        offsets, nodes, tables = self._parts(self._planned)
        batch = PackedBatch(*offsets, total_rows=self.num_rows)
        if nodes is not None:
            batch.node_table = nodes
        if tables is None:
            shardings = [self._attentions[0].sharding(batch, self._strategy)] * len(self._attentions)
        else:
            size, inner = self._shardings[0].cp_size, self._shardings[0].inner
            shardings = [Sharding(batch, size, "balanced", inner, self.balanced[attention.window], tables)
                         for attention in self._attentions if isinstance(attention, CPAttention)]
        self._plans = tuple(
            attention.plan(batch, sharding, like=like, finite_padding=self._finite_padding)
            for attention, sharding in zip(self._attentions, shardings, strict=True)
        )

    def fits(self, batches: Sequence[PackedBatch]) -> bool:
        """Return whether the batches can be loaded. Ask once per step, on the host, with the same batches on all ranks.

        A step that does not fit is counted in graphs.num_overflows.

        Raises:
            TypeError: batches are in no list.
            ValueError: a batch does not fit, and config.on_overflow is "error".
        """
        check_kind("batches", batches, Sequence, "pass a list, of one batch too")
        excess = self._excess(batches)
        if excess and self._graphs.config.on_overflow == "error":
            raise ValueError(f"{excess}; pack fewer, raise the maximum, or use on_overflow='eager'")
        self._graphs.num_overflows += bool(excess)
        return not excess

    def _excess(self, batches: Sequence[PackedBatch]) -> str:
        """Describe by how much the first batch that does not fit exceeds the capacity; return "" if all fit."""
        for number, batch in enumerate(batches):
            if batch.trees is not None and self._graphs.active and self.max_nodes is None:
                return f"batch {number} has trees, wanted sequences, as config.max_packed_nodes is None"
            nodes = batch.num_seqs if batch.trees is None else batch.trees.num_nodes
            for what, found, room in (("sequences", batch.num_seqs, self.max_seqs), ("nodes", nodes, self.max_nodes),
                                      ("rows", batch.total_rows, self.num_rows)):
                if room is not None and found > room:
                    return f"batch {number} has {found} {what}, wanted at most {room}, the room of the static pack"
            if self.balanced and (over := layout_tables.excess(_between(self.sharding(batch)), self._sizes)):
                return f"batch {number} has {over}, the room of the static pack"
        return ""

    def load(self, batches: Sequence[PackedBatch]) -> None:
        """Copy the lengths of batches that fit, on the current stream; the host does not wait.

        Args:
            batches: num_batches batches with their lengths on the host.

        Raises:
            TypeError: batches are in no list.
            ValueError: another number of batches, one that does not fit, or lengths that the sharding cannot split.
        """
        with self._attentions[0].comm.checked("load of a static pack", _lengths, batches):
            check_kind("batches", batches, Sequence, "pass a list, of one batch too")
            if len(batches) != self.num_batches:
                raise ValueError(
                    f"batches holds {len(batches)} batches, wanted num_batches = {self.num_batches} as the static pack "
                    f"was made for; make another one for another number of micro-batches"
                )
            if excess := self._excess(batches):
                raise ValueError(f"{excess}; ask fits() first")
            self._shardings = [self.sharding(batch) for batch in batches]
        self._num_loads += 1
        if self._graphs.active:
            with self._upload.writing() as words:
                for part, batch, sharding in zip(
                        words.reshape(self.num_batches, -1), batches, self._shardings, strict=True):
                    self._write(part, batch, _between(sharding))

    def _write(self, words: NDArray[np.int32], batch: PackedBatch, between: Sharding) -> None:
        """Write what is uploaded of a batch: its lengths, nodes, and the layout, which lengths on a GPU do not tell."""
        offsets, nodes, tables = self._parts(words)
        offsets[:] = batch.offsets(self._slots)
        if nodes is not None:
            nodes[:] = node_table(batch, self._node_slots)
        if tables is not None:
            rank = self._attentions[0].comm.rank // self._shardings[0].inner
            layout_tables.write(between, rank, tables)

    def _parts(self, words: Any) -> tuple[Any, Any, LayoutTables | None]:
        """Return views of a batch's words: offsets, the node table (None without), and the tables of balanced rows."""
        ends = [*accumulate((2 * self._slots, NODE_WORDS * self._node_slots))]
        offsets, nodes, tables = words[: ends[0]], words[ends[0] : ends[1]], words[ends[1] :]
        return (offsets.reshape(2, -1), nodes.reshape(NODE_WORDS, -1) if self._node_slots else None,
                LayoutTables(tables, self._sizes) if self.balanced else None)

    def plans(self, number: int = 0) -> tuple[Plan, ...]:
        """Return the plans of the loaded batch of this number, one per attention. They replace those of the batch
        before.

        Backward then refuses what forward made with the batch before. A graph may capture this call: each replay then
        plans the loaded batch.

        Raises:
            TypeError: number is no int.
            ValueError: there is no batch of this number.
        """
        number = as_count("number", number, "batches are numbered from 0", at_least=0, at_most=self.num_batches - 1)
        if not self._graphs.active:
            sharding = self._shardings[number]
            return tuple(attention.plan(sharding.batch, sharding, finite_padding=self._finite_padding)
                         for attention in self._attentions)
        if self.num_batches > 1:
            self._planned[...] = self._loaded[number]
        for plan in self._plans:
            plan.refresh()
            renew(plan.arrays.lengths, lambda: (self._num_loads, number))  # asked again, it stays the same
        return self._plans

    def padded(self, batch: PackedBatch) -> PackedBatch:
        """Return the batch with the capacity's rows, from which a rank's rows are cut out; the same for one batch."""
        if batch.total_rows == self.num_rows:
            return batch
        return once(batch, ("padded", self.num_rows), lambda: batch.padded_to(self.num_rows))

    def sharding(self, batch: PackedBatch) -> Sharding:
        """Return the sharding of a batch on the host, padded to the capacity."""
        return self._attentions[0].sharding(self.padded(batch), self._strategy)


def _between(sharding: Sharding) -> Sharding:
    """Return the sharding between those that exchange rows: groups of neighbours, or ranks."""
    return sharding.outer or sharding


def _aligned(slots: int) -> int:
    """Return slots for at least so many int32, of whole 16 bytes, to which arrays of a plan are aligned."""
    return -(-slots // 4) * 4


def _lengths(batches: Sequence[PackedBatch]) -> dict[str, Any]:
    """Return the fields in which ranks must agree when they load batches."""
    return {f"batches[{number}].{name}": field for number, batch in enumerate(batches)
            for name, field in batch.described().items()}


def _capacities(
    sharding: str | BalancedCapacity | Mapping[Window, BalancedCapacity] | None, empty: Sharding, masks: Iterable[Mask]
) -> dict[Window, BalancedCapacity]:
    """Return the capacities of a balanced sharding: those asked for, or those of any layout."""
    if not empty.by_runs:
        return {}
    made = {}
    for window, _ in masks:
        if isinstance(sharding, Mapping) and window not in sharding:
            raise ValueError(f"sharding has capacities for the windows {', '.join(map(str, sharding))}, wanted one for "
                             f"{window} too, that of an attention; pass one for each")
        asked = sharding[window] if isinstance(sharding, Mapping) else sharding
        made[window] = (_checked(asked, empty.local_rows) if isinstance(asked, BalancedCapacity) else
                        BalancedCapacity.of_any_layout(empty.batch.total_rows, empty.cp_size, window))
    return made


def _checked(capacity: BalancedCapacity, local_rows: int) -> BalancedCapacity:
    """Return the capacity with Python's integers; raise where they are none, or no sizes of a layout."""
    most = {"early_queries": local_rows}
    return BalancedCapacity(**{
        name: as_count(name, size, "pass rows of a layout", most.get(name, INT32_MAX), int(name == "key_rows"))
        for name, size in capacity._asdict().items() if size is not None})


class Upload:
    """Array at a fixed address on the GPU, for data of the host that a graph reads.

    It copies from pinned memory, as from other memory the host may wait for earlier work. Two pinned arrays take turns,
    so the host waits only if it is two uploads ahead.

    Args:
        size: int32 words, 0 at first.
        on_gpu: False makes a NumPy array instead, for programs that run without a GPU as well.

    Attributes:
        words: (size,) int32, always the same array.
    """

    def __init__(self, size: int, on_gpu: bool) -> None:
        self._pinned: list[tuple[NDArray[np.int32], Any]] = []
        if not on_gpu:
            self.words: Any = np.zeros(size, np.int32)
            return
        import cupy
        import cupyx

        self.words = cupy.zeros(size, np.int32)
        self._pinned = [(cupyx.zeros_pinned(size, np.int32), cupy.cuda.Event(disable_timing=True)) for _ in range(2)]

    def send(self, parts: Sequence[NDArray[np.int32]]) -> None:
        """Write the parts, one after another, for work that is enqueued later on the current stream.

        Args:
            parts: 1-D int32 arrays on the host, `size` words together.
        """
        with self.writing() as words:
            np.concatenate(parts, out=words)

    @contextmanager
    def writing(self) -> Iterator[NDArray[np.int32]]:
        """Yield (size,) int32 on the host, to write the words to, for work that is enqueued behind the block.

        That work is on the current stream. Words that the block does not write are those of an earlier block, or 0.
        """
        if not self._pinned:
            yield self.words
            return
        import cupy

        host, copied = self._pinned[0]
        self._pinned.reverse()
        copied.synchronize()
        yield host
        stream = cupy.cuda.get_current_stream()
        self.words.set(host, stream)
        copied.record(stream)
