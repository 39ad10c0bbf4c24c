"""Launchers of kernels.cu: the arrays of a plan, and rows moved between rank order and sequence order."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import cupyx
import numpy as np

from thdattn import jit
from thdattn.ops import launch
from thdattn.ops.launch import Array
from thdattn.packing import PackedBatch
from thdattn.plan import Plan, PlanArrays, host_arrays
from thdattn.sharding import Sharding
from thdattn.structs import ROWS
from thdattn.tiles import PLAN_KERNELS, REORDER_KERNELS

POISON_BLOCKS = 64  # of 256 threads, which soon end where all is well
_CHECK, _DUAL_CHUNK, _QUERIES, _KEYS, _TILE_COST, _TILE_ORDER, _POISON = PLAN_KERNELS


def plan_arrays(
    sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int],
    key_batch: PackedBatch | None = None,
) -> PlanArrays:
    """The arrays of a plan on the GPU.

    Lengths on the host are planned there and uploaded; lengths on the GPU are planned by kernels, with the same result
    and no copy to the host, so that a captured CUDA graph plans anew for the lengths it finds at each replay. Of wrong
    ones, which only the GPU sees, DeviceLengths tells.
    """
    if sharding.batch.on_device:
        return _device_arrays(DeviceLengths(sharding, key_batch), cp_rank, window, tiles)
    made = vars(host_arrays(sharding, cp_rank, window, tiles, key_batch))
    return PlanArrays(**{field: cupy.asarray(array) for field, array in made.items() if array is not None})


class DeviceLengths:
    """Lengths on the GPU, found right or wrong there: what thd_plan_check makes of them.

    Wrong ones are planned as sequences without rows, and poison makes all results NaN. The host learns of it at once
    if it waits, or, from memory that the kernel writes, whenever it next asks.

    Attributes:
        sharding, key_batch: as passed to plan_arrays.
        queries, keys: (2, num_seqs + 1) int32, cu_seqlens and cu_seqlens_padded, all 0 if wrong.
        wrong: (1,) int32, 1 if wrong.
    """

    def __init__(self, sharding: Sharding, key_batch: PackedBatch | None) -> None:
        self.sharding, self.key_batch = sharding, key_batch
        batch, keys = sharding.batch, key_batch or sharding.batch
        self._made: list[Callable[[], None]] = []
        # Kept, with all that is written here, as a replayed graph reads and writes them.
        self._offsets = [self._followed(name, x) for lengths in (batch, keys) for name, x in (
            ("cu_seqlens", lengths.cu_seqlens), ("cu_seqlens_padded", lengths.cu_seqlens_padded))]
        made = launch.empty((4 * (batch.num_seqs + 1) + 1,), np.int32)
        self.wrong = made[-1:]
        self.queries, self.keys = made[:-1].reshape(2, 2, -1)
        self._serial = next(_serials)
        notices = _notices()
        self._notice = notices[self._serial % len(notices) :][:1]
        sizes = map(np.int32, (batch.num_seqs, batch.total_rows, keys.total_rows, sharding.multiple))
        args = (made, self.wrong, np.uint64(self._notice.ctypes.data), *self._offsets, *sizes, np.uint64(self._serial))
        self.make(lambda: jit.kernel(_CHECK)((1,), 1024, args))

    def _followed(self, name: str, x: Any) -> Array:
        """Offsets as the kernel reads them: a copy of strided ones, made anew whenever the plan is."""
        x = launch.in_place(name, x)
        if x.flags.c_contiguous:
            return x
        copied = launch.empty(x.shape, x.dtype)
        self.make(lambda: cupy.copyto(copied, x))
        return copied

    def make(self, launches: Callable[[], None]) -> None:
        """Makes something of the plan from the lengths, now and whenever make_again is called."""
        launches()
        self._made.append(launches)

    def make_again(self) -> None:
        """Makes all of the plan again, in the same arrays, from the lengths that lie on the GPU now."""
        for launches in self._made:
            launches()

    def check(self, wait: bool) -> None:
        """ValueError if the lengths are wrong: as the GPU knows when it comes here, or as far as the host knows."""
        if wait:
            wrong = bool(self.wrong.get()[0])
        else:
            wrong = self._notice[0] == self._serial and not cupy.cuda.get_current_stream().is_capturing()
        if not wrong:
            return
        remedy = "results of the plan are NaN; make a plan from right lengths"
        try:  # where the offsets are on the host, they are refused with the sequence, what was wanted and the remedy
            batch, keys = self.sharding.batch, self.key_batch or self.sharding.batch
            offsets = [x.get() for x in self._offsets]
            Sharding(PackedBatch(*offsets[:2], total_rows=batch.total_rows), self.sharding.cp_size,
                     self.sharding.strategy)
            PackedBatch(*offsets[2:], total_rows=keys.total_rows)
        except ValueError as error:
            raise ValueError(f"lengths on the GPU were planned that are wrong: {error}; {remedy}") from None
        raise ValueError(f"lengths on the GPU were wrong when they were planned, and have changed since; {remedy}")


_serials = itertools.count(1)
_allocating = threading.Lock()


def _notices() -> Any:
    """Memory of the host that GPUs write to: plan n finds its number in place n modulo 512 if its lengths are wrong.

    It is never freed, as a kernel may come to it when the plan is gone.
    """
    with _allocating:  # simulated ranks are threads
        return _pinned()


@functools.cache
def _pinned() -> Any:
    return cupyx.zeros_pinned((512,), np.uint64)


def _device_arrays(
    lengths: DeviceLengths, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int]
) -> PlanArrays:
    sharding, batch = lengths.sharding, lengths.sharding.batch
    cp_size, local_rows = sharding.cp_size, sharding.local_rows
    key_rows = (lengths.key_batch or batch).total_rows
    seqs, num_rows, left, right = map(np.int32, (batch.num_seqs, local_rows, *window))

    if sharding.strategy == "dual_chunk" and cp_size > 1:
        rank_order = launch.empty((cp_size * local_rows,), np.int32)
        _make_rows(lengths, _DUAL_CHUNK, rank_order.size, (
            rank_order, lengths.queries[1], seqs, np.int32(cp_size), num_rows, np.int32(batch.total_rows)))
    else:  # contiguous rows do not depend on the lengths
        rank_order = cupy.arange(cp_size * local_rows, dtype=np.int32)
        rank_order[batch.total_rows :] = -1
    rows = rank_order[cp_rank * local_rows : (cp_rank + 1) * local_rows]
    if lengths.key_batch is not None:
        rank_order = cupy.arange(key_rows, dtype=np.int32)

    positions, valid = launch.empty((local_rows,), np.int32), launch.empty((local_rows,), bool)
    key_ranges, query_ranges = launch.empty((local_rows, 2), np.int32), launch.empty((key_rows, 2), np.int32)
    both = lengths.queries, lengths.keys, seqs, num_rows
    _make_rows(lengths, _QUERIES, local_rows, (positions, valid, key_ranges, rows, lengths.wrong, *both, left, right))
    _make_rows(lengths, _KEYS, key_rows, (query_ranges, rows, *both, np.int32(key_rows), left, right))
    return PlanArrays(rows, positions, valid, key_ranges, query_ranges, rank_order,
                      _tile_orders(lengths, (rows, lengths.queries, seqs), key_ranges, tiles[0]),
                      _tile_orders(lengths, (_ALL, lengths.keys, seqs), query_ranges, tiles[1]), lengths)


_ALL = np.uint64(0)  # instead of an array of rows: all in sequence order


def _tile_orders(lengths: DeviceLengths, located: tuple[Any, ...], ranges: Array, tile: int) -> Array:
    """Both orders of the tiles of rows; located: the rows, and the lengths and number of sequences of their side."""
    num_tiles = -(-len(ranges) // tile)
    # One array, as a replayed graph writes to all of it as long as the orders live: orders, then costs.
    made = launch.empty((5 * num_tiles,), np.int32)
    cost = made[2 * num_tiles :]
    sizes = map(np.int32, (len(ranges), tile, num_tiles))
    _make_rows(lengths, _TILE_COST, 32 * num_tiles, (cost, ranges, *located, *sizes))
    _make_rows(lengths, _TILE_ORDER, 32 * num_tiles, (made, cost, np.int32(num_tiles)))
    return made[: 2 * num_tiles].reshape(2, num_tiles)


def _make_rows(lengths: DeviceLengths, kernel: str, threads: int, args: tuple[Any, ...]) -> None:
    lengths.make(lambda: jit.kernel(kernel)((-(-threads // 256),), 256, args))


def poison(plan: Plan, *results: Array) -> None:
    """Up to three results become NaN if the lengths that the plan was made from, on the GPU, are wrong."""
    if plan.arrays.lengths is not None:
        words = [arg for x in results for arg in (x, np.uint64(x.nbytes // 4))]
        words += [np.uint64(0)] * (6 - len(words))
        jit.kernel(_POISON)((POISON_BLOCKS,), 256, (*words, plan.arrays.lengths.wrong))


# ------------------------------------------------------------------------------------------------ reorder


def to_sequence_order(
    k_ranks: Array, v_ranks: Array, plan: Plan, into: Sequence[Array] | None = None,
    own: Sequence[Array] | None = None,
) -> tuple[Array, Array]:
    """Gathered rows moved to sequence order, into buffers of the plan; rows that no local query sees become 0."""
    k, v = into or [plan.buffer(name, (plan.key_rows, *x.shape[1:]), x.dtype)
                    for name, x in (("k", k_ranks), ("v", v_ranks))]
    reorder(False, (k, v), (k_ranks, v_ranks), plan.rank_order, plan.query_ranges, own,
            plan.cp_rank * plan.local_key_rows)
    return k, v


def to_rank_order(dk: Array, dv: Array, plan: Plan, into: Sequence[Array] | None = None) -> tuple[Array, Array]:
    """Inverse of to_sequence_order, for the gradients; filler rows become 0."""
    dk_ranks, dv_ranks = into or [plan.buffer(name, (len(plan.rank_order), *x.shape[1:]), x.dtype)
                                  for name, x in (("dk_ranks", dk), ("dv_ranks", dv))]
    reorder(True, (dk_ranks, dv_ranks), (dk, dv), plan.rank_order, plan.query_ranges)
    return dk_ranks, dv_ranks


def reorder(
    to_rank_order: bool, outs: Sequence[Array], sources: Sequence[Array], order: Array, ranges: Array,
    own: Sequence[Array] | None = None, first_own: int = 0,
) -> None:
    """Moves the rows of two arrays in one launch. Rows whose range is empty hold nothing.

    Args:
        sources: rows of so many heads as those of outs, or some of the heads of longer rows; so is own.
        own: instead of the rows of sources from first_own on.
    """
    rows = [_rows(*arrays) for arrays in zip(outs, sources, own or sources, strict=True)]
    sizes = map(np.int32, (len(order), first_own, len(own[0]) if own else 0))
    jit.kernel(REORDER_KERNELS[to_rank_order])((-(-len(order) // 8), 2), 256, (*rows, order, ranges, *sizes))


def _rows(out: Array, source: Array, own: Array) -> Any:
    words = (launch.row_bytes(x) // 16 for x in (out, source, own))
    return np.array((source.data.ptr, own.data.ptr, out.data.ptr, *words), ROWS)[()]
