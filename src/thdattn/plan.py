"""The plan of one rank: which keys every query row sees, as ranges of rows, and the maps between the two row orders.

Made once per batch and used by every layer, forward and backward. Everything that differs between masks, shardings,
chunks, windows and padding ends here: the engines only see ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thdattn.packing import PackedBatch
from thdattn.sharding import Sharding

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class PlanArrays:
    """The arrays of a plan, int32, in the engine's own array type.

    rows, positions: (local_rows,), sequence-order row (-1: filler) and position in its sequence of every local row.
    key_ranges: (local_rows, 2), [begin, end) rows of the key buffer, in sequence order, that a query row sees;
        (0, 0) for padding.
    query_ranges: (key_rows, 2), its transpose: [begin, end) local query rows that see a key row; (0, 0) for none.
    rank_order: (cp_size * local_rows,), sequence-order row of every row of a gathered buffer; -1 for fillers.
    query_tiles, key_tiles: (2, ceil(rows / tile)), tiles of query rows and of key rows in two orders: the longest
        sequence first, so that tiles that share keys or queries are near each other; the longest tile first.
    """

    rows: Any
    positions: Any
    key_ranges: Any
    query_ranges: Any
    rank_order: Any
    query_tiles: Any
    key_tiles: Any


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What one rank needs to know of a batch; made by CPAttention.plan.

    The work buffers of a plan are reused by every call: calls with one plan belong on one stream.

    Attributes:
        sharding, cp_rank: whose plan it is.
        window: (left, right), -1 = unlimited; a causal mask is right = 0.
        head_dims: (head_dim, v_head_dim) of the attentions that can use it; their numbers of heads may differ.
        tiles: (rows per query tile, rows per key tile) that query_tiles and key_tiles are made for.
        arrays: the PlanArrays.
    """

    sharding: Sharding
    cp_rank: int
    window: tuple[int, int]
    head_dims: tuple[int, int]
    tiles: tuple[int, int]
    arrays: PlanArrays
    engine_name: str
    _empty: Callable[[tuple[int, ...], DTypeLike], Any]
    _kept: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (f"<Plan cp_rank={self.cp_rank}, {self.sharding!r}, {self.batch!r}, window={self.window}, "
                f"head_dims={self.head_dims}, engine={self.engine_name!r}>")

    @cached_property
    def made_for(self) -> dict[str, Any]:
        """What must agree with the attention that uses the plan."""
        return {
            "cp_size": self.cp_size, "cp_rank": self.cp_rank, "window": self.window, "engine": self.engine_name,
            "head_dims": self.head_dims, "tiles": self.tiles,
        }

    @property
    def batch(self) -> PackedBatch:
        """The batch the plan is about."""
        return self.sharding.batch

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return self.sharding.cp_size

    @property
    def local_rows(self) -> int:
        """Rows that every rank stores, fillers included."""
        return self.sharding.local_rows

    @property
    def key_rows(self) -> int:
        """Rows of the key buffer: all rows of the packed batch, in sequence order."""
        return self.batch.total_rows

    @property
    def has_padding(self) -> bool:
        """Whether some row of the packed batch is padding; True where only the GPU knows."""
        return self.batch.on_device or self.batch.total_tokens < self.batch.total_rows

    @property
    def has_local_padding(self) -> bool:
        """Whether some local row of some rank holds no token: padding or a filler; True where only the GPU knows."""
        return self.has_padding or self.cp_size * self.local_rows > self.key_rows

    @property
    def rows(self) -> Any:
        """(local_rows,) int32, sequence-order row of every local row; -1 for fillers."""
        return self.arrays.rows

    @property
    def positions(self) -> Any:
        """(local_rows,) int32, position of every local row in its sequence (counting on over padding), for RoPE."""
        return self.arrays.positions

    @property
    def key_ranges(self) -> Any:
        """(local_rows, 2) int32, the keys that every local query row sees."""
        return self.arrays.key_ranges

    @property
    def valid(self) -> Any:
        """(local_rows,) bool, on the plan's device: whether a local row holds a token, for a loss; else it is padding.

        Computed at every call, as a captured CUDA graph may have planned anew since the last one.
        """
        begin, end = self.arrays.key_ranges.T
        return begin < end  # a token sees at least itself

    @property
    def visible_pairs(self) -> int:
        """Pairs (query, key) that the mask leaves, of all ranks together. ValueError if the offsets lie on a GPU.

        Each side of the window hides a triangle of the length x length square.
        """
        self.batch.require_host("counting visible pairs")
        lengths = self.batch.lengths.astype(np.int64)
        hidden = [np.maximum(lengths - 1 - side, 0) for side in self.window if side >= 0]
        return int((lengths**2).sum() - sum((n * (n + 1) // 2).sum() for n in hidden))

    @property
    def query_ranges(self) -> Any:
        """(key_rows, 2) int32, the local query rows that see every key row."""
        return self.arrays.query_ranges

    @property
    def rank_order(self) -> Any:
        """(cp_size * local_rows,) int32, sequence-order row of every gathered row; -1 for fillers."""
        return self.arrays.rank_order

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returned when it was first called for this key: what a plan's calls have in common."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept

    def buffer(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A work buffer, made on first use and kept: a captured CUDA graph must find it where it was."""
        return self.once((name, shape, dtype), lambda: self._empty(shape, dtype))


def host_arrays(sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int]) -> PlanArrays:
    """The arrays of a plan from lengths on the host, in NumPy.

    Args:
        sharding: of a batch on the host.
        cp_rank: the rank to plan for.
        window: (left, right), -1 = unlimited; causal is right = 0.
        tiles: rows per query tile and per key tile.

    Returns:
        PlanArrays of NumPy arrays. No Python loop over sequences; the loop over ranks is the only one.
    """
    batch = sharding.batch
    rows = sharding.rows(cp_rank)
    queries, keys = _locate(batch, rows), _locate(batch, np.arange(batch.total_rows, dtype=np.int32))
    positions, key_ranges = _query_side(queries, window)
    query_ranges = _key_side(keys, rows[rows >= 0], window)
    return PlanArrays(
        rows=rows,
        positions=positions,
        key_ranges=key_ranges,
        query_ranges=query_ranges,
        rank_order=np.concatenate([sharding.rows(rank) for rank in range(sharding.cp_size)]),
        query_tiles=_tile_orders(queries, key_ranges, tiles[0]),
        key_tiles=_tile_orders(keys, query_ranges, tiles[1]),
    )


Located = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _locate(batch: PackedBatch, rows: NDArray[np.int32]) -> Located:
    """Per row of the packed buffer: first row and length of its sequence, and position; length 0 outside all."""
    if batch.num_seqs == 0:
        return np.zeros_like(rows), np.zeros_like(rows), np.zeros_like(rows)
    starts = batch.cu_seqlens_padded
    inside = (rows >= 0) & (rows < starts[-1])
    seq = np.searchsorted(starts[1:], np.where(inside, rows, 0), side="right")
    seq = np.minimum(seq, batch.num_seqs - 1)
    begin = np.where(inside, starts[seq], 0)
    return begin, np.where(inside, batch.lengths[seq], 0), np.where(inside, rows - begin, 0)


def _query_side(queries: Located, window: tuple[int, int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(positions, key_ranges) of query rows: the rule of the mask on absolute positions, written as a range."""
    left, right = window
    begin, length, position = queries
    first = np.maximum(0, position - left) if left >= 0 else np.zeros_like(position)
    last = np.minimum(length, position + right + 1) if right >= 0 else length
    ranges = np.stack([begin + first, begin + last], axis=1)
    ranges[position >= length] = 0
    return position.astype(np.int32), ranges.astype(np.int32)


def _key_side(keys: Located, owned: NDArray[np.int32], window: tuple[int, int]) -> NDArray[np.int32]:
    """query_ranges: owned rows ascend, so those between two positions of a sequence are neighbours."""
    left, right = window
    begin, length, position = keys
    first = np.maximum(0, position - right) if right >= 0 else np.zeros_like(position)
    last = np.minimum(length, position + left + 1) if left >= 0 else length
    ranges = np.stack([np.searchsorted(owned, begin + first), np.searchsorted(owned, begin + last)], axis=1)
    ranges[(position >= length) | (ranges[:, 0] >= ranges[:, 1])] = 0
    return ranges.astype(np.int32)


def _tile_orders(located: Located, ranges: NDArray[np.int32], tile: int) -> NDArray[np.int32]:
    """(2, tiles): by falling length of a tile's longest sequence and, in a sequence, falling span; by span alone.

    The span of a tile is that of the other side's rows between the first and the last in sight. Ties: sequences and
    tiles in their own order.
    """
    if not len(ranges):
        return np.zeros((2, 0), np.int32)
    begin, length, _ = located
    starts = np.arange(0, len(ranges), tile)
    empty = ranges[:, 0] >= ranges[:, 1]
    first = np.minimum.reduceat(np.where(empty, np.iinfo(np.int32).max, ranges[:, 0]), starts)
    last = np.maximum.reduceat(np.where(empty, 0, ranges[:, 1]), starts)
    span = np.maximum(0, last.astype(np.int64) - first)
    sequence = np.maximum.reduceat(np.where(length > 0, (length.astype(np.int64) << 32) - begin, 0), starts)
    return np.stack([np.lexsort((-span, -sequence)), np.argsort(-span, kind="stable")]).astype(np.int32)
