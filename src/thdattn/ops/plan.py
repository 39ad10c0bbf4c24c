"""Launchers of kernels.cu: the arrays of a plan, and rows moved between rank order and sequence order."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupy
import cupyx
import numpy as np

from thdattn import jit
from thdattn.ops import launch
from thdattn.ops.launch import Array
from thdattn.packing import PackedBatch
from thdattn.plan import Plan, PlanArrays
from thdattn.sharding import Sharding
from thdattn.structs import MAX_RANKS, ROWS
from thdattn.tiles import PLAN_KERNELS, REORDER_KERNELS

POISON_BLOCKS = 64  # of 256 threads, which soon end where all is well
_ORDER_INTS = 5  # of a tile: its places in two orders, and three of its cost
_CHECK, _ROWS, _RANGES, _TILE_COST, _TILE_ORDER, _POISON = PLAN_KERNELS


def plan_arrays(
    sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int],
    key_batch: PackedBatch | None = None,
) -> PlanArrays:
    """The arrays of a plan, made by kernels: nothing is copied to the host, and the host does not wait.

    With lengths on the GPU, a captured CUDA graph plans anew for those it finds at each replay. Of wrong ones, which
    only the GPU sees, DeviceLengths tells. Lengths on the host are right; plans of one batch share what they can.

    Raises:
        RuntimeError: lengths on the host, on a stream that captures a CUDA graph.
    """
    if sharding.batch.on_device:
        lengths = DeviceLengths(sharding, key_batch)
        rows = _rows(sharding, cp_rank, key_batch, lengths.checked, lengths)
        return _arrays(rows, sharding, cp_rank, window, tiles, key_batch, lengths)
    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            "a batch with its lengths on the host was planned on a stream that captures a CUDA graph, wanted lengths "
            "on the GPU there; make the plan before the capture, or use thdattn.graphs.StaticPack"
        )
    if key_batch is not None:
        rows = _rows(sharding, cp_rank, key_batch, _uploaded(sharding.batch, key_batch))
        return _arrays(rows, sharding, cp_rank, window, tiles, key_batch)
    return _shared(sharding, cp_rank, window, tiles)


# The last plans of a batch by rank, and by rank and mask; those that nobody holds are gone. None is ever written again.
_planned: weakref.WeakKeyDictionary[PackedBatch, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _shared(sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int]) -> PlanArrays:
    """Arrays of other plans of this batch and rank, as far as they are the same.

    Of one stream: what is shared was made before it is read, and its memory is given to later work of that stream.
    """
    planned = _planned.setdefault(sharding.batch, {})
    stream = cupy.cuda.get_current_stream()
    rank = cupy.cuda.runtime.getDevice(), stream.ptr, sharding.strategy, sharding.cp_size, cp_rank
    mask = rank, window, tiles
    same: PlanArrays | None = planned.get(mask, _gone)()
    if same is None:
        other = planned.get(rank, _gone)()
        rows = _Rows.of(other) if other else _rows(sharding, cp_rank, None, _uploaded(sharding.batch))
        same = _arrays(rows, sharding, cp_rank, window, tiles)
        planned[rank] = planned[mask] = weakref.ref(same)
    return same


def _gone() -> None:
    """A reference to nothing."""


def _uploaded(*sides: PackedBatch) -> Array:
    """(sides, 2, num_seqs + 1) int32: cu_seqlens and cu_seqlens_padded of the queries, and of other keys.

    CuPy copies them from pinned memory, which it keeps until the copy is done, so that the host does not wait.
    """
    return cupy.asarray([[batch.cu_seqlens, batch.cu_seqlens_padded] for batch in sides])


def enter(plan: Plan) -> None:
    """Has work on the current stream come after the making of the plan, if that was on another stream.

    And memory of the plan that CuPy's pool gives to later work of that stream, when nobody holds the plan any more,
    then comes after the work on this one. In a capture nothing is done, as graphs outlive what they were captured with.
    """
    stream, made_on = cupy.cuda.get_current_stream(), plan.arrays.stream
    if stream.ptr != made_on.ptr and not stream.is_capturing():
        plan.once(("entered", stream.ptr), lambda: _enter(plan, stream, made_on))


def _enter(plan: Plan, stream: Any, made_on: Any) -> None:
    stream.wait_event(made_on.record())
    weakref.finalize(plan, _leave, stream, made_on).atexit = False


def _leave(stream: Any, made_on: Any) -> None:
    if not made_on.is_capturing() and not stream.is_capturing():
        made_on.wait_event(stream.record())


class DeviceLengths:
    """Lengths on the GPU, found right or wrong there: what thd_plan_check makes of them.

    Wrong ones are planned as sequences without rows, and poison makes all results NaN. The host learns of it at once
    if it waits, or, from memory that the kernel writes, whenever it next asks.

    Attributes:
        sharding, key_batch: as passed to plan_arrays.
        checked: (2, 2, num_seqs + 1) int32, cu_seqlens and cu_seqlens_padded of queries and keys, all 0 if wrong.
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
        self.checked = made[:-1].reshape(2, 2, -1)
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


class _Rows(NamedTuple):
    """What plans of a rank have in common, whatever their masks: fields of PlanArrays."""

    offsets: Array
    rows: Array
    positions: Array
    valid: Array
    rank_order: Array

    @classmethod
    def of(cls, plan: PlanArrays) -> _Rows:
        return cls(*(getattr(plan, field) for field in cls._fields))


def _rows(
    sharding: Sharding, cp_rank: int, key_batch: PackedBatch | None, offsets: Array,
    lengths: DeviceLengths | None = None,
) -> _Rows:
    local_rows, num_rows = sharding.local_rows, sharding.batch.total_rows
    num_keys = sharding.cp_size * local_rows
    if key_batch is not None:  # one rank: both sides are in their own order, and one is the beginning of the other
        num_keys = key_batch.total_rows
        num_rows = max(num_rows, num_keys)
    order = launch.empty((_num_ordered(sharding, key_batch),), np.int32)
    positions, valid = launch.empty((local_rows,), np.int32), launch.empty((local_rows,), bool)
    wrong = _NONE if lengths is None else lengths.wrong
    sizes = map(np.int32, (num_rows, order.size))
    _make(lengths, _ROWS, (_blocks(order.size),), (
        order, positions, valid, offsets[0], wrong, *_sharded(sharding, cp_rank), *sizes))
    return _Rows(offsets, order[cp_rank * local_rows :][:local_rows], positions, valid, order[:num_keys])


def _num_ordered(sharding: Sharding, key_batch: PackedBatch | None) -> int:
    """Rows of all ranks, or, if they are more, of other keys."""
    num_keys = 0 if key_batch is None else key_batch.total_rows
    return max(sharding.cp_size * sharding.local_rows, num_keys)


def plan_bytes(plan: Plan) -> int:
    """Bytes of the arrays of a plan that shares none with another one."""
    batch, cross = plan.batch, None if plan.key_batch is plan.batch else plan.key_batch
    offsets = batch.num_seqs + 1
    checks = 4 * offsets + 1 if batch.on_device else 2 * offsets * (1 if cross is None else 2)
    ints = (checks + _num_ordered(plan.sharding, cross) + plan.local_rows + 2 * (plan.local_rows + plan.key_rows)
            + _ORDER_INTS * sum(plan.num_tiles))  # fmt: skip
    return 4 * ints + plan.local_rows


def _arrays(
    rows: _Rows, sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int],
    key_batch: PackedBatch | None = None, lengths: DeviceLengths | None = None,
) -> PlanArrays:
    """What a mask adds to the rows."""
    sides = sharding.local_rows, (key_batch or sharding.batch).total_rows
    queries, keys = rows.offsets[0], rows.offsets[-1]
    key_ranges, query_ranges = ranges = [launch.empty((num_rows, 2), np.int32) for num_rows in sides]
    _make(lengths, _RANGES, (_blocks(max(sides)), 2), (
        *ranges, rows.rows, queries, keys, *_sharded(sharding, cp_rank), *map(np.int32, (sides[1], *window))))

    num_tiles = [-(-num_rows // tile) for num_rows, tile in zip(sides, tiles, strict=True)]
    # One array of a side, as a replayed graph writes to all of it as long as the orders live: orders, then costs.
    made = [launch.empty((_ORDER_INTS * num,), np.int32) for num in num_tiles]
    grid = _blocks(32 * max(num_tiles)), 2
    _make(lengths, _TILE_COST, grid, (
        *made, *ranges, rows.rows, queries, keys, *map(np.int32, (sharding.batch.num_seqs, *sides, *tiles))))
    _make(lengths, _TILE_ORDER, grid, (*made, *map(np.int32, num_tiles)))
    query_tiles, key_tiles = (x[: 2 * num].reshape(2, num) for x, num in zip(made, num_tiles, strict=True))
    return PlanArrays(rows.rows, rows.positions, rows.valid, key_ranges, query_ranges, rows.rank_order, query_tiles,
                      key_tiles, lengths, rows.offsets, cupy.cuda.get_current_stream())


_NONE = np.uint64(0)  # instead of an array


def _sharded(sharding: Sharding, cp_rank: int) -> tuple[Any, ...]:
    """num_seqs and what Sharded of kernels.cu is made of."""
    dual_chunk = sharding.multiple > 1
    return tuple(map(np.int32, (sharding.batch.num_seqs, sharding.cp_size, cp_rank, sharding.local_rows, dual_chunk)))


def _blocks(threads: int) -> int:
    return -(-threads // 256)


def _make(lengths: DeviceLengths | None, kernel: str, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Launches a kernel; where lengths lie on the GPU, again whenever the plan is made again."""
    run = functools.partial(jit.kernel(kernel), grid, 256, args)
    run() if lengths is None else lengths.make(run)


def poison(plan: Plan, *results: Array) -> None:
    """Up to three results become NaN if the lengths that the plan was made from, on the GPU, are wrong."""
    if plan.arrays.lengths is not None:
        words = [arg for x in results for arg in (x, np.uint64(x.nbytes // 4))]
        words += [np.uint64(0)] * (6 - len(words))
        jit.kernel(_POISON)((POISON_BLOCKS,), 256, (*words, plan.arrays.lengths.wrong))


# ------------------------------------------------------------------------------------------------ reorder


def to_sequence_order(
    k_parts: Sequence[Array], v_parts: Sequence[Array], plan: Plan, into: Sequence[Array] | None = None,
    own: Sequence[Array] | None = None,
) -> tuple[Array, Array]:
    """Rows of all ranks moved to sequence order, into buffers of the plan; rows that no local query sees become 0."""
    k, v = into or [plan.buffer(name, (plan.key_rows, *parts[0].shape[1:]), parts[0].dtype)
                    for name, parts in (("k", k_parts), ("v", v_parts))]
    reorder(False, (k, v), (k_parts, v_parts), plan.rank_order, plan.query_ranges, own,
            plan.cp_rank * plan.local_key_rows)
    return k, v


def to_rank_order(dk: Array, dv: Array, plan: Plan, into: Sequence[Array] | None = None) -> tuple[Array, Array]:
    """Inverse of to_sequence_order, for the gradients; filler rows become 0."""
    dk_ranks, dv_ranks = into or [plan.buffer(name, (len(plan.rank_order), *x.shape[1:]), x.dtype)
                                  for name, x in (("dk_ranks", dk), ("dv_ranks", dv))]
    reorder(True, (dk_ranks, dv_ranks), ([dk], [dv]), plan.rank_order, plan.query_ranges)
    return dk_ranks, dv_ranks


def reorder(
    to_rank_order: bool, outs: Sequence[Array], sources: Sequence[Sequence[Array]], order: Array, ranges: Array,
    own: Sequence[Array] | None = None, first_own: int = 0,
) -> None:
    """Moves the rows of two arrays in one launch. Rows whose range is empty hold nothing.

    Args:
        sources: of each, the parts that make up its rows, equally many of as many heads as the array of outs; between
            two rows there may lie more heads.
        own: such a part, instead of the rows from first_own on.
    """
    rows = [_moved(launch.row_bytes(parts[0]), *map(_place, (out, mine)), *(part.data.ptr for part in parts))
            for out, parts, mine in zip(outs, sources, own or outs, strict=True)]
    sizes = map(np.int32, (len(order), max(1, len(sources[0][0])), first_own, len(own[0]) if own else 0))
    jit.kernel(REORDER_KERNELS[to_rank_order])((-(-len(order) // 8), 2), 256, (*rows, order, ranges, *sizes))


def _place(x: Array) -> tuple[int, int]:
    return x.data.ptr, launch.row_bytes(x)


@functools.lru_cache(maxsize=4096)
def _moved(pitch: int, out: tuple[int, int], own: tuple[int, int], *parts: int) -> Any:
    """A Rows; kept, as tensor maps are."""
    places = (*parts, *[0] * (MAX_RANKS - len(parts)))
    return np.array((places, own[0], out[0], out[1] // 16, pitch // 16, own[1] // 16), ROWS)[()]
