"""Sharding: the rows of the packed batch that each rank owns, and their local order.

Only this module depends on the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thdattn.arguments import INT32_MAX, as_choice, as_count, as_int, check_arrays, check_rows, found
from thdattn.balance import balanced_runs
from thdattn.capacity import BalancedCapacity, LayoutTables
from thdattn.packing import PackedBatch, as_batch, rows_of_runs

MAX_RANKS = INT32_MAX // 2  # 2*cp_size chunks are counted in int32


def dual_chunk(batch: PackedBatch, cp_size: int, cp_rank: int, local_rows: int) -> NDArray[np.int32]:
    """Return chunks cp_rank and 2*cp_size-1-cp_rank of every sequence, which is cut into 2*cp_size equal chunks.

    Under a causal mask an early chunk has little work and a late one much, so work is equal on every rank. Rows after
    the last sequence (a fixed capacity) are divided into equal slices. One rank owns all rows, of any lengths.

    Args:
        batch: a batch on the host whose padded lengths are multiples of 2*cp_size (one rank: any).
        cp_rank: the owner rank, 0 <= cp_rank < cp_size.
        local_rows: rows that every rank stores: total_rows / cp_size rounded up, or a little more.

    Returns:
        At most local_rows sequence-order rows, int32, ascending.

    Source: Llama 3, arXiv:2407.21783, 3.3.2; row for row Transformer Engine's thd_get_partitioned_indices.
    """
    if cp_size == 1:
        return contiguous(batch, cp_size, cp_rank, local_rows)
    starts: NDArray[np.int32] = batch.cu_seqlens_padded
    chunk = np.diff(starts) // (2 * cp_size)
    begins = starts[:-1, None] + chunk[:, None] * np.array([cp_rank, 2 * cp_size - 1 - cp_rank], np.int32)
    owned = rows_of_runs(begins.ravel(), np.repeat(chunk, 2))
    spare = local_rows - owned.size
    behind = int(starts[-1]) + spare * cp_rank + np.arange(spare)
    return np.concatenate([owned, behind[behind < batch.total_rows].astype(np.int32)])


def contiguous(batch: PackedBatch, cp_size: int, cp_rank: int, local_rows: int) -> NDArray[np.int32]:
    """Return slice cp_rank of cp_size equal slices of the packed buffer, whatever its sequences; see dual_chunk.

    The last ranks may own fewer rows, or none.
    """
    begin, end = (min(rank * local_rows, batch.total_rows) for rank in (cp_rank, cp_rank + 1))
    return np.arange(begin, end, dtype=np.int32)


def balanced(batch: PackedBatch, cp_size: int, cp_rank: int, local_rows: int) -> NDArray[np.int32]:
    """Return a rank's rows such that all ranks have equal rows and causal work, for sequences of any lengths.

    A long sequence belongs to one rank, or as two chunks to each of a few neighbours. Short sequences fill the ranks
    up, and padding comes last. Ranks then need few of each other's keys, and exchange only these. See balance.py, and
    dual_chunk for the arguments.
    """
    if cp_size == 1:
        return contiguous(batch, cp_size, cp_rank, local_rows)
    runs = balanced_runs(batch, cp_size)
    mine = runs.rank == cp_rank
    return rows_of_runs(runs.begin[mine], (runs.end - runs.begin)[mine])


STRATEGIES: dict[str, Callable[[PackedBatch, int, int, int], NDArray[np.int32]]] = {
    "dual_chunk": dual_chunk,
    "contiguous": contiguous,
    "balanced": balanced,
}


class Sharding:
    """Rows of a packed batch, spread over cp_size ranks.

    Every rank stores local_rows rows. A rank that owns fewer stores fillers, row -1, after its own rows.

    Args:
        batch: the packed batch. Offsets on a GPU are never read; then only local_rows is known on the host.
        cp_size: number of context-parallel ranks, >= 1.
        strategy: "dual_chunk", "contiguous" or "balanced", see the functions of those names.
        inner: size of a group of neighbours, for two levels. The strategy spreads rows over cp_size / inner groups;
            each group divides its rows into equal slices, which an all-to-all of heads joins again.
        capacity: for "balanced", fixed sizes of what ranks, or groups, exchange; None: as much as is needed.
        tables: for offsets on a GPU, the layout's tables there, within a capacity; see plan/layout_tables.py.

    Attributes:
        batch, cp_size, strategy, inner: as passed.
        capacity, tables: as passed, of a sharding that is by_runs; else None.
        outer: the Sharding over cp_size / inner groups, whose rows are divided into slices; None if inner is 1.
        local_rows: rows that every rank stores, total_rows / cp_size rounded up.
        multiple: number that divides every padded length: 2*cp_size for dual_chunk over several ranks,
            2*cp_size / inner over several groups of neighbours, else 1.
        by_runs: True for "balanced" over several ranks with inner 1: rows follow the lengths, and a rank's key buffer
            has only the rows that its queries see.

    Raises:
        TypeError: batch is no PackedBatch, cp_size no int, or strategy no str.
        ValueError: cp_size < 1 or > MAX_RANKS, or an unknown strategy. Balanced over several ranks, with offsets on a
            GPU and no tables. With offsets on the host, a padded length that is not a multiple of `multiple`; see
            Plan.check for offsets on a GPU.
    """

    def __init__(
        self, batch: PackedBatch, cp_size: int, strategy: str = "dual_chunk", inner: int = 1,
        capacity: BalancedCapacity | None = None, tables: LayoutTables | None = None,
    ) -> None:
        self.batch = as_batch(batch)
        self.cp_size = as_count("cp_size", cp_size, "pass the number of ranks", MAX_RANKS)
        self.strategy = as_choice("strategy", strategy, STRATEGIES)
        self.inner = as_count("inner", inner, "pass the ranks of a group", MAX_RANKS)
        shares, rest = divmod(self.cp_size, self.inner)
        if rest:
            raise ValueError(f"inner is {inner}, wanted a divisor of cp_size = {cp_size}; pass the ranks of a group")
        self.multiple = 2 * shares if self.strategy == "dual_chunk" and shares > 1 else 1
        self.by_runs = self.strategy == "balanced" and self.cp_size > 1 and self.inner == 1
        self.capacity, self.tables = (capacity, tables) if self.by_runs else (None, None)
        if self.by_runs and tables is None:
            batch.require_host("sharding 'balanced'")
        if not batch.on_device:
            _check_multiple(batch, self.multiple, "2*cp_size" if self.inner == 1 else "2*cp_size/inner")
        self.local_rows = -(-batch.total_rows // self.cp_size)
        self.outer: Sharding | None = None
        if self.inner > 1:
            self.outer = Sharding(batch, shares, strategy, capacity=capacity, tables=tables)
            self.outer.local_rows = self.inner * self.local_rows  # so that slices are equal
        self._rows: dict[int, NDArray[np.int32]] = {}

    @classmethod
    def with_rows(cls, batch: PackedBatch, cp_size: int, cp_rank: int, rows: ArrayLike) -> Sharding:
        """Return the sharding that gives a rank the rows that it has already, such as those of Transformer Engine.

        Transformer Engine and Megatron-Core cut sequences as "dual_chunk" does for every cp_comm_type, also for "a2a",
        whose default is "contiguous" here. Pass the result to CPAttention.plan, so that the two agree.

        Args:
            batch, cp_size: as for Sharding, with offsets on the host.
            cp_rank: 0 <= cp_rank < cp_size.
            rows: (number of rows,) integers on the host, the sequence-order row of every local row in local order, for
                instance of thd_get_partitioned_indices. Fillers, -1, may be left out.

        Raises:
            TypeError: rows are no integers, or an argument of the wrong type.
            ValueError: no sharding gives the rank these rows; or as Sharding and rows.
        """
        found = np.asarray(rows)
        if found.dtype.kind not in "iu" or found.ndim != 1:
            raise TypeError(f"rows is an array of {found.dtype} with shape {found.shape}, wanted integers in one "
                            f"dimension; pass the sequence-order row of every local row")
        for strategy, multiple in (("dual_chunk", 2 * cp_size), ("contiguous", 1), ("balanced", 1)):
            if strategy == "dual_chunk" and cp_size > 1 and (np.diff(batch.cu_seqlens_padded) % multiple).any():
                continue
            sharding = cls(batch, cp_size, strategy)
            wanted = sharding.rows(cp_rank)
            if np.array_equal(found[found >= 0], wanted[wanted >= 0]):
                return sharding
        raise ValueError(
            f"rows of rank {cp_rank} are those of no sharding of this batch over {cp_size} ranks, wanted the rows of "
            f"'dual_chunk', 'contiguous' or 'balanced'; pass them in local order, or shard with plan.shard"
        )

    def rows(self, cp_rank: int) -> NDArray[np.int32]:
        """Return the sequence-order row of every local row of a rank, in local order.

        Args:
            cp_rank: 0 <= cp_rank < cp_size.

        Returns:
            (local_rows,) int32, read-only and cached: the owned rows, ascending, then -1 for every filler.

        Raises:
            TypeError: cp_rank is no int.
            ValueError: cp_rank out of range, or the batch has its offsets on a GPU.
        """
        self.batch.require_host("Sharding.rows")
        cp_rank = as_int("cp_rank", cp_rank)
        if not 0 <= cp_rank < self.cp_size:
            raise ValueError(
                f"cp_rank is {cp_rank}, wanted 0 <= cp_rank < cp_size = {self.cp_size}; "
                "pass this rank's number, or make the Sharding with the right cp_size"
            )
        if self.outer is not None:
            share, part = divmod(cp_rank, self.inner)
            return self.outer.rows(share)[part * self.local_rows :][: self.local_rows]
        if cp_rank not in self._rows:
            owned = STRATEGIES[self.strategy](self.batch, self.cp_size, cp_rank, self.local_rows)
            rows = np.full(self.local_rows, -1, np.int32)
            rows[: owned.size] = owned
            rows.setflags(write=False)
            self._rows[cp_rank] = rows
        return self._rows[cp_rank]

    def leading_tokens(self, cp_rank: int) -> int | None:
        """Count the local rows of a rank that hold tokens, if they precede all others, without making the rows.

        Args:
            cp_rank: 0 <= cp_rank < cp_size.

        Returns:
            The number; None if padding precedes some token, offsets are on a GPU, or inner is not 1.
        """
        batch = self.batch
        if batch.on_device or self.outer is not None:
            return None
        if self.by_runs:
            runs = balanced_runs(batch, self.cp_size)
            mine = runs.rank == cp_rank
            tokens, sizes = runs.sequence[mine] >= 0, (runs.end - runs.begin)[mine]
            return int(sizes[tokens].sum()) if tokens[: np.count_nonzero(tokens)].all() else None
        if batch.total_tokens < batch.cu_seqlens_padded[-1]:
            return None
        if self.multiple > 1:
            return batch.total_tokens // self.cp_size
        return min(max(batch.total_tokens - cp_rank * self.local_rows, 0), self.local_rows)

    def shard(self, x: ArrayLike, cp_rank: int) -> NDArray[Any]:
        """Return the rows of a host array that a rank owns.

        Args:
            x: (total_rows, ...) in sequence order, any dtype.
            cp_rank: 0 <= cp_rank < cp_size.

        Returns:
            (local_rows, ...), a new array of the same dtype; filler rows are 0.

        Raises:
            TypeError: x is no array on the host, or cp_rank no int.
            ValueError: a wrong number of rows, cp_rank out of range, or the batch has its offsets on a GPU.
        """
        remedy = "pass the whole packed array, as batch.pack makes it"
        packed = check_rows("x", x, self.batch.total_rows, remedy)
        owned = self._owned(cp_rank)
        local = np.zeros((self.local_rows, *packed.shape[1:]), packed.dtype)
        local[: owned.size] = packed[owned]
        return local

    def unshard(self, local_arrays: Iterable[ArrayLike]) -> NDArray[Any]:
        """Assemble the packed array from every rank's local host array.

        Args:
            local_arrays: cp_size arrays (local_rows, ...), rank 0's first, of one trailing shape and dtype.

        Returns:
            (total_rows, ...) in sequence order, a new array of the same dtype; rows that no rank owns are 0.

        Raises:
            TypeError: local_arrays is no list of host arrays, or their dtypes differ.
            ValueError: a wrong number of arrays, of rows in one, different trailing shapes, or the batch has
                its offsets on a GPU.
        """
        num_rows = np.full(self.cp_size, self.local_rows)
        remedy = "pass the local array of every rank, in rank order"
        shards = check_arrays("local_arrays", local_arrays, num_rows, remedy)
        packed = np.zeros((self.batch.total_rows, *shards[0].shape[1:]), shards[0].dtype)
        for cp_rank, shard in enumerate(shards):
            owned = self._owned(cp_rank)
            packed[owned] = shard[: owned.size]
        return packed

    def __repr__(self) -> str:
        inner = f"inner={self.inner}, " if self.inner > 1 else ""
        return f"<Sharding {self.strategy!r}, cp_size={self.cp_size}, {inner}local_rows={self.local_rows}>"

    def _owned(self, cp_rank: int) -> NDArray[np.int32]:
        rows = self.rows(cp_rank)
        return rows[rows >= 0]


def as_sharding(sharding: str | Sharding, batch: PackedBatch, cp_size: int, inner: int = 1) -> Sharding:
    """Return a Sharding of this batch over cp_size ranks, from a strategy (and inner) or as passed.

    Raises:
        TypeError: neither a str nor a Sharding, or batch is no PackedBatch.
        ValueError: a Sharding of another batch or number of ranks; or as Sharding.
    """
    if isinstance(sharding, str):
        return Sharding(batch, cp_size, as_choice("sharding", sharding, STRATEGIES), inner)
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding is {found(sharding)}; wanted 'dual_chunk', 'contiguous', 'balanced' or a Sharding; "
            "pass one of these"
        )
    if sharding.batch is not as_batch(batch):
        raise ValueError(
            "sharding was made for another PackedBatch, wanted the one passed as batch; make it with "
            "Sharding(batch, comm.size)"
        )
    if sharding.cp_size != cp_size:
        raise ValueError(
            f"sharding has cp_size {sharding.cp_size}, wanted {cp_size}, the ranks of comm; "
            f"make it with Sharding(batch, {cp_size})"
        )
    return sharding


def _check_multiple(batch: PackedBatch, multiple: int, of: str) -> None:
    padded = np.diff(batch.cu_seqlens_padded)
    uneven = padded % multiple != 0
    if uneven.any():
        seq = int(uneven.argmax())
        raise ValueError(
            f"sequence {seq} has padded length {padded[seq]}, wanted a multiple of {of} = {multiple} "
            f"for dual_chunk; pad it to {-(-int(padded[seq]) // multiple) * multiple} "
            f"(PackedBatch.from_lengths(lengths, multiple={multiple}) does this)"
        )
