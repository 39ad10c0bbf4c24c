"""Launchers of kernels.cu: the arrays of a plan."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import cupyx
import numpy as np

from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array, Launch
from thdattn.jit import compiler
from thdattn.jit.structs import TREES
from thdattn.kernels.configs import BEHIND_KEYS, TREE_GROUP
from thdattn.kernels.instances import PLAN_KERNELS, TREE_PLAN_KERNELS
from thdattn.packing import PackedBatch
from thdattn.plan.generations import renew
from thdattn.plan.key_transfers import Pieces, all_rows, needed_rows, split_key_side
from thdattn.plan.node_table import node_table
from thdattn.plan.plan import Plan, PlanArrays
from thdattn.plan.workspace import INT32, Buffer
from thdattn.sharding import Sharding

NAN_BLOCKS = 64  # of 256 threads, which end at once if the lengths are right
_ORDER_INTS = 5  # ints of a tile: its places in two orders, and three for its cost
_CHECK, _ROWS, _RUNS, _RANGES, _TILE_COST, _TILE_ORDER, _PARTS, _PAIRS, _NAN_IF_INVALID = PLAN_KERNELS
_TREE_POSITIONS, _TREE_RANGES, _TREE_ENDS, _TREE_ORDER = TREE_PLAN_KERNELS


def plan_arrays(plan: Plan, lengths: DeviceLengths | None = None) -> PlanArrays:
    """Compute the arrays of a plan that has none with kernels, without a copy to the host and without waiting.

    With lengths on the GPU, a captured CUDA graph plans again at each replay. Only the GPU sees wrong lengths, which
    DeviceLengths reports: a new one, or the `lengths` of another plan, which is refreshed together with this one.
    Lengths on the host are already checked, and plans of one batch share arrays where they can. For shardings by runs
    the host finds the runs, and kernels expand them to arrays of rows.

    Raises:
        RuntimeError: lengths on the host, on a stream that captures a CUDA graph.
    """
    if plan.batch.on_device:
        lengths = lengths or DeviceLengths(plan.sharding, plan.key_batch)
        return _arrays(plan, _rows(plan, lengths.checked, lengths), lengths)
    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            "a batch with its lengths on the host was planned on a stream that captures a CUDA graph, wanted lengths "
            "on the GPU there; make the plan before the capture, or use thdattn.graphs.StaticPack"
        )
    if plan.is_cross:
        return _arrays(plan, _rows(plan, _uploaded(plan.batch, plan.key_batch)))
    return _cached(plan)


def plan_buffers(plan: Plan) -> dict[str, Buffer]:
    """Declare the arrays of a plan that shares none with another plan.

    One array holds the rows of all ranks, or of the keys if these are more. An array of tiles also holds their costs,
    which a replayed graph writes.
    """
    offsets, (query_tiles, key_tiles) = plan.batch.num_seqs + 1, plan.num_tiles
    order = max(plan.cp_size * plan.local_rows, plan.key_batch.total_rows if plan.is_cross else 0)
    shapes = {
        "offsets": (4 * offsets + 1,) if plan.batch.on_device else (1 + plan.is_cross, 2, offsets),
        "order": (order,), "positions": (plan.local_rows,),
        "key_side": (sum(plan.key_side_sizes),),
        "key_ranges": (plan.local_rows, 2), "query_ranges": (plan.key_rows, 2),
        "query_tiles": (_ORDER_INTS * query_tiles,), "key_tiles": (_ORDER_INTS * key_tiles,), **_tree_shapes(plan),
    }
    return {"valid": Buffer("plan", (plan.local_rows,), np.dtype(bool)),
            **{field: Buffer("plan", shape, INT32, field) for field, shape in shapes.items()}}


def _tree_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of prefix trees by name; see PlanArrays. None without trees."""
    if not plan.has_trees:
        return {}
    groups = -(-plan.key_rows // TREE_GROUP) + BEHIND_KEYS // TREE_GROUP
    nodes = {} if plan.batch.on_device else {"nodes": node_table(plan.batch).shape}
    return {**nodes, "query_ends": (groups * TREE_GROUP,), "group_ends": (groups, 2), "group_begins": (groups,)}


# The last plans of a batch by rank, and by rank and mask: weak references to arrays that are never written again.
_planned: weakref.WeakKeyDictionary[PackedBatch, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _cached(plan: Plan) -> PlanArrays:
    """Return arrays of a plan that shares equal ones with other plans of this batch and rank.

    Plans share only on one stream: it orders the writes of shared arrays before all reads, and before any reuse of
    their memory.
    """
    sharding, device = plan.sharding, cupy.cuda.runtime.getDevice()
    planned, stream = _planned.setdefault(plan.batch, {}), cupy.cuda.get_current_stream()
    rank = device, stream.ptr, sharding.strategy, plan.cp_size, plan.local_rows, plan.cp_rank
    mask = rank, plan.window, plan.tiles, plan.keys_of, sharding.capacity
    same: PlanArrays | None = planned.get(mask, _gone)()
    if same is None:
        other = planned.get(rank, _gone)()
        same = _arrays(plan, _Rows.of(other) if other else _rows(plan, _uploaded(plan.batch)))
        planned[rank] = planned[mask] = weakref.ref(same)
    return same


def _gone() -> None:
    """Return None, like a dead weak reference."""


def _uploaded(*sides: PackedBatch) -> Array:
    """Upload cu_seqlens and cu_seqlens_padded of queries, and of a key_batch: (sides, 2, num_seqs + 1) int32.

    CuPy copies from pinned memory, which it keeps until the copy is done, so that the host does not wait.
    """
    return cupy.asarray([[batch.cu_seqlens, batch.cu_seqlens_padded] for batch in sides])


def enter(plan: Plan) -> None:
    """Order the current stream after the stream that made the plan, if they differ.

    Once the plan is freed, CuPy's pool gives its memory to later work of the stream that made it. That work is then
    ordered after the work on the current stream. A capture does nothing, because graphs outlive their captured objects.
    """
    stream, made_on = cupy.cuda.get_current_stream(), plan.arrays.stream
    if stream.ptr != made_on.ptr and not stream.is_capturing():
        plan.memoize(("entered", stream.ptr), lambda: _enter(plan, stream, made_on))


def _enter(plan: Plan, stream: Any, made_on: Any) -> None:
    stream.wait_event(made_on.record())
    weakref.finalize(plan, _leave, stream, made_on).atexit = False


def _leave(stream: Any, made_on: Any) -> None:
    if not made_on.is_capturing() and not stream.is_capturing():
        made_on.wait_event(stream.record())


class DeviceLengths:
    """Lengths on the GPU, checked there by thd_plan_check.

    Wrong lengths are planned as sequences without rows, and nan_if_invalid makes all results NaN. The host learns of
    them at once if it waits. Otherwise it reads memory that the kernel writes, whenever it checks next.

    Attributes:
        sharding, key_batch: those of the plan.
        checked: (2, 2, num_seqs + 1) int32, cu_seqlens and cu_seqlens_padded of queries and keys, all 0 if wrong.
        wrong: (1,) int32, 1 if wrong.
        generation: changes with every refresh of the lengths; see thdattn.plan.generations.
        made_in: number of the capture of the CUDA graph that makes the plan; None: made outside of captures.
    """

    def __init__(self, sharding: Sharding, key_batch: PackedBatch) -> None:
        self.sharding, self.key_batch = sharding, key_batch
        batch, keys = sharding.batch, key_batch
        self._made: list[Callable[[], None]] = []  # launches of every graph that makes the plan
        self._late: dict[Callable[[], None], int | None] = {}  # other launches, with the capture that ran them last
        self._of_graphs: dict[int | None, list[Callable[[], None]]] = {}  # by capture, launches of that graph alone
        self.made_in, self._was_captured = launch.capture(), False
        # A replayed graph reads the offsets and writes the arrays below, so this object keeps them all.
        self._offsets = [self._followed(name, x) for lengths in (batch, keys) for name, x in (
            ("cu_seqlens", lengths.cu_seqlens), ("cu_seqlens_padded", lengths.cu_seqlens_padded))]
        made = launch.empty((4 * (batch.num_seqs + 1) + 1,), np.int32)
        self.wrong = made[-1:]
        self.generation: Any = None
        renew(self)
        self.checked = made[:-1].reshape(2, 2, -1)
        self._notice = notice = _Notice()
        sizes = map(np.int32, (batch.num_seqs, batch.total_rows, keys.total_rows, sharding.multiple))
        args = made, self.wrong, np.uint64(notice.place.ctypes.data), *self._offsets, *sizes
        self.make(lambda: compiler.kernel(_CHECK)((1,), 1024, (*args, notice.of_next_check())))

    def _followed(self, name: str, x: Any) -> Array:
        """Return offsets that the kernel can read: of strided ones a copy, which every refresh repeats."""
        x = launch.in_place(name, x)
        if x.flags.c_contiguous:
            return x
        copied = launch.empty(x.shape, x.dtype)
        self.make(lambda: cupy.copyto(copied, x))
        return copied

    def make(self, launches: Callable[[], None]) -> None:
        """Run `launches`, which derive a part of the plan from the lengths, now and at every make_again or replay.

        In the capture of another graph than the one that makes the plan, they serve that graph alone; see Plan.memoize.
        """
        launches()
        now = launch.capture()
        if now not in (None, self.made_in):
            self._of_graphs.setdefault(now, []).append(launches)
        elif not self._was_captured and now == self.made_in:
            self._made.append(launches)
        else:
            self._late[launches] = now

    def make_again(self) -> None:
        """Make the whole plan again, in the same arrays, from the lengths that the GPU has now."""
        now = launch.capture()
        self._was_captured |= now is not None
        for launches in [*self._made, *self._of_graphs.get(now, ())]:
            launches()
        self._late = dict.fromkeys(self._late)
        self.follow()

    def follow(self) -> None:
        """Repeat the launches that a graph lacks although it makes the plan, for the lengths of its last replay.

        A capture runs them once, because only make_again changes the plan in between.
        """
        if not self._late:
            return
        now = launch.capture()
        for launches, made_in in self._late.items():
            if now is None or made_in != now:
                launches()
                self._late[launches] = now

    def are_right(self) -> bool:
        """Return whether the host knows that the next launch finds right lengths; False while a graph is captured."""
        return self._notice.says_right() and not cupy.cuda.get_current_stream().is_capturing()

    def check(self, wait: bool) -> None:
        """Raise a ValueError if the lengths are wrong. wait: wait for the GPU, else use the host's last notice."""
        if wait:
            wrong = bool(self.wrong.get()[0])
        else:
            wrong = self._notice.says_wrong() and not cupy.cuda.get_current_stream().is_capturing()
        if not wrong:
            return
        remedy = "results of the plan are NaN; make a plan from right lengths"
        try:  # host checks of copied offsets name the sequence, the requirement and the remedy
            offsets, sharding = [x.get() for x in self._offsets], self.sharding
            batch = PackedBatch(*offsets[:2], total_rows=sharding.batch.total_rows)
            Sharding(batch, sharding.cp_size, sharding.strategy)
            PackedBatch(*offsets[2:], total_rows=self.key_batch.total_rows)
        except ValueError as error:
            raise ValueError(f"lengths on the GPU were planned that are wrong: {error}; {remedy}") from None
        raise ValueError(f"lengths on the GPU were wrong when they were planned, and have changed since; {remedy}")


class _Notice:
    """Result of the last check of lengths, which the GPU writes to host memory.

    place: (1,) uint64 of _notices. It becomes the check's number for wrong lengths, its complement for right ones.
    in_graph: a CUDA graph checks the lengths, and the host does not know of its replays.
    """

    def __init__(self) -> None:
        notices, self.serial, self.in_graph = _notices(), next(_serials), False
        self.place = notices[self.serial % len(notices) :][:1]

    def of_next_check(self) -> np.uint64:
        """Return the number of the next check; after a captured check it stays the same, as replays repeat it."""
        if not self.in_graph:
            self.serial = next(_serials)
        self.in_graph |= cupy.cuda.get_current_stream().is_capturing()
        return np.uint64(self.serial)

    def says_wrong(self) -> bool:
        return int(self.place[0]) == self.serial

    def says_right(self) -> bool:
        return not self.in_graph and int(self.place[0]) == 2**64 - 1 - self.serial


_serials = itertools.count(1)
_allocating = threading.Lock()


def _notices() -> Any:
    """Return host memory that GPUs write to, 512 places that plans use in turn.

    The memory is never freed, because a kernel may write to it after its plan is freed.
    """
    with _allocating:  # simulated ranks are threads
        return _pinned()


@functools.cache
def _pinned() -> Any:
    return cupyx.zeros_pinned((512,), np.uint64)


class _Rows(NamedTuple):
    """Arrays that plans of a rank share, whatever their masks: fields of PlanArrays."""

    offsets: Array
    rows: Array
    positions: Array
    valid: Array
    all_rows: Array
    nodes: Array | None

    @classmethod
    def of(cls, plan: PlanArrays) -> _Rows:
        return cls(*(getattr(plan, field) for field in cls._fields))


def _rows(plan: Plan, offsets: Array, lengths: DeviceLengths | None = None) -> _Rows:
    sharding, cp_rank, local_rows, declared = plan.sharding, plan.cp_rank, plan.local_rows, plan_buffers(plan)
    # Keys of their own are on one rank: both orders count from 0, so the longer one contains the other.
    num_rows = max(plan.batch.total_rows, plan.key_batch.total_rows)
    order, positions, valid = (launch.new(declared[field]) for field in ("order", "positions", "valid"))
    wrong = launch.NONE if lengths is None else lengths.wrong
    by_runs = launch.NONE, np.int32(0)
    if sharding.tables is not None:
        by_runs = sharding.tables.rows
    elif sharding.by_runs:
        by_runs = _table(all_rows(sharding))
    sizes = map(np.int32, (sharding.batch.num_seqs, sharding.cp_size, cp_rank, local_rows, sharding.multiple > 1,
                           num_rows, order.size))
    _make(lengths, _ROWS, (_blocks(order.size),), (order, positions, valid, offsets[0], wrong, *by_runs, *sizes))
    rows, nodes = order[cp_rank * local_rows :][:local_rows], plan.batch.node_table
    if plan.batch.trees is not None:
        nodes = cupy.asarray(node_table(plan.batch))
    if nodes is not None:
        _make(lengths, _TREE_POSITIONS, (_blocks(local_rows),), (
            positions, rows, nodes, *map(np.int32, (nodes.shape[1], local_rows))))
    return _Rows(offsets, rows, positions, valid, order, nodes)


def _table(pieces: Pieces) -> tuple[Array, np.int32]:
    """Upload pieces, and return the kernel's arguments for them; see _uploaded."""
    return cupy.asarray(pieces.table()), np.int32(len(pieces.begin))


def _key_side(plan: Plan, rows: _Rows, lengths: DeviceLengths | None) -> dict[str, Array]:
    """Return rank_order and rows_of_keys, or None for them, and with needed rows sends, returns and places."""
    if plan.keys_of is not None:
        first = plan.keys_of * plan.local_rows
        return {"rank_order": None, "rows_of_keys": rows.all_rows[first : first + plan.local_rows]}
    if not plan.sharding.by_runs:
        return {"rank_order": rows.all_rows[: plan.key_batch.total_rows] if plan.is_cross else rows.all_rows}
    if plan.sharding.tables is not None:
        table = plan.sharding.tables.key_side(plan.mask)
    else:
        needed = needed_rows(plan.sharding, plan.window)
        table = _table(needed.key_side(plan.cp_rank, plan.sharding.capacity).pieces)
    made = launch.new(plan_buffers(plan)["key_side"])
    _make(lengths, _RUNS, (_blocks(made.size),), (made, *table, np.int32(made.size)))
    arrays = split_key_side(made, plan.key_side_sizes)
    return {**arrays, "returns": arrays["returns"].reshape(plan.cp_size, plan.local_rows)}


def _arrays(plan: Plan, rows: _Rows, lengths: DeviceLengths | None = None) -> PlanArrays:
    """Compute the arrays that depend on the mask, and return them with the rows as PlanArrays."""
    tiles, num_tiles, side, declared = plan.tiles, plan.num_tiles, _key_side(plan, rows, lengths), plan_buffers(plan)
    rows_of_keys, num_seqs, sides = side.get("rows_of_keys"), plan.batch.num_seqs, (plan.local_rows, plan.key_rows)
    alone = plan.cp_size == 1  # the rank has all rows of the pack, in order
    there = (launch.NONE if alone else rows.rows, launch.NONE if alone or rows_of_keys is None else rows_of_keys,
             rows.offsets[0], rows.offsets[-1])
    key_ranges, query_ranges = ranges = [launch.new(declared[field]) for field in ("key_ranges", "query_ranges")]
    wrong = launch.NONE if lengths is None else lengths.wrong
    _make(lengths, _RANGES, (_blocks(max(sides)), 2), (
        *ranges, *there, wrong, *map(np.int32, (num_seqs, *sides, *plan.window))))
    of_trees = _tree_arrays(plan, rows.nodes, ranges, there[:2], lengths)

    made = [launch.new(declared[field]) for field in ("query_tiles", "key_tiles")]
    grid = _blocks(32 * max(num_tiles)), 2
    _make(lengths, _TILE_COST, grid, (
        *made, *ranges, *there, *map(np.int32, (num_seqs, *sides, *tiles))))
    _make(lengths, _TILE_ORDER, grid, (*made, *map(np.int32, (*num_tiles, *sides))))
    if of_trees:
        _make(lengths, _TREE_ORDER, grid, (*made, *map(np.int32, num_tiles)))
    query_tiles, key_tiles = (x[: 2 * num].reshape(2, num) for x, num in zip(made, num_tiles, strict=True))
    in_order = rows.all_rows[: plan.cp_size * plan.local_rows]  # without the rows that only keys have
    return PlanArrays(rows.rows, rows.positions, rows.valid, key_ranges, query_ranges, query_tiles=query_tiles,
                      key_tiles=key_tiles, all_rows=in_order, lengths=lengths, offsets=rows.offsets,
                      stream=cupy.cuda.get_current_stream(), nodes=rows.nodes, **of_trees, **side)


def _tree_arrays(
    plan: Plan, nodes: Array | None, ranges: list[Array], rows: tuple[Array, Array], lengths: DeviceLengths | None
) -> dict[str, Array]:
    """Limit key_ranges and query_ranges to what trees show, and return the arrays of struct Trees by name.

    Args:
        rows: of queries and of keys, as kernels take them.
    """
    if nodes is None:
        return {}
    declared, sides = plan_buffers(plan), (plan.local_rows, plan.key_rows)
    made = {field: launch.new(declared[field]) for field in ("query_ends", "group_ends", "group_begins")}
    num_groups, num_ends = len(made["group_begins"]), len(made["query_ends"])
    _make(lengths, _TREE_RANGES, (_blocks(max(plan.local_rows, num_ends)), 2), (
        made["query_ends"], *ranges, *rows, nodes, *map(np.int32, (nodes.shape[1], *sides, num_ends))))
    _make(lengths, _TREE_ENDS, (_blocks(32 * num_groups),), (
        *made.values(), ranges[1], *map(np.int32, (plan.key_rows, num_groups))))
    return made


def trees_of(plan: Plan) -> tuple[Any, ...]:
    """Return the struct Trees of a plan, the last argument of kernel instances with trees; () without trees."""
    arrays = plan.arrays
    if not plan.has_trees:
        return ()
    pointers = [x.data.ptr for x in (arrays.query_ends, arrays.group_ends, arrays.group_begins)]
    return (np.array((*pointers, len(arrays.group_ends)), TREES)[()],)


def parts_of(plan: Plan, side: int) -> list[Array]:
    """Return the tiles of queries (side 0) or of keys (1) in two parts: plan.first_tiles, and all others.

    Each part has its two orders, (2, tiles), and may be empty.
    """
    tiles, num_first = (plan.arrays.query_tiles, plan.arrays.key_tiles)[side], plan.num_first_tiles[side]

    def make() -> list[Array]:
        if plan.sharding.tables is not None:
            second = plan.sharding.tables.second_tiles(plan.mask)[side]
        else:
            second = cupy.asarray((~plan.first_tiles[side]).astype(np.int32))
        return split_tiles(tiles, second, num_first, plan.arrays.lengths)

    return plan.memoize(("parts", side), make)


def split_tiles(tiles: Array, second: Array, num_first: int, lengths: DeviceLengths | None = None) -> list[Array]:
    """Split tiles into two parts that keep their orders.

    Args:
        tiles: (2, tiles), as in PlanArrays.
        second: (tiles,) int32, 1 for the tiles of the second part, 0 for the num_first others.
        lengths: of the tiles' plan, if they are on the GPU.
    """
    count = tiles.shape[1]
    made = launch.empty((2 * count,), np.int32)
    _make(lengths, _PARTS, (_blocks(32 * count), 2), (made, tiles, second, *map(np.int32, (count, num_first))))
    return [made[: 2 * num_first].reshape(2, num_first), made[2 * num_first :].reshape(2, count - num_first)]


def pairs_of(plan: Plan) -> Array:
    """Return the number of visible pairs of a local query and a key, (1,) uint64 on the GPU."""

    def make() -> Array:
        pairs, args = launch.empty((1,), np.uint64), (plan.key_ranges, np.int32(plan.local_rows))
        plan.make(lambda: compiler.kernel(_PAIRS)((1,), 1024, (pairs, *args)))
        return pairs

    return plan.memoize("pairs", make)


def _blocks(threads: int) -> int:
    return -(-threads // 256)


def _make(lengths: DeviceLengths | None, kernel: str, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Launch a kernel; with lengths on the GPU, launch it again whenever the plan is made again."""
    run = functools.partial(compiler.kernel(kernel), grid, 256, args)
    run() if lengths is None else lengths.make(run)


def nan_if_invalid(plan: Plan, *results: Array) -> None:
    """Make results NaN if the lengths on the GPU that the plan was made from are wrong."""
    lengths = plan.arrays.lengths
    if lengths is None or lengths.are_right():
        return
    kernel, grid = compiler.kernel(_NAN_IF_INVALID), (NAN_BLOCKS,)
    run = plan.memoize("nan_if_invalid", lambda: Launch(kernel, grid, 256, (lengths.wrong,), early=True))
    for i in range(0, len(results), 3):
        three = results[i : i + 3]
        run.launch_as(tuple([(x.data.ptr, x.nbytes) for x in three]), functools.partial(_words_of, three))


def _words_of(results: tuple[Array, ...]) -> tuple[Any, ...]:
    """Return the kernel's arguments: three arrays, some may be NONE, each with its number of 4-byte words."""
    made = [arg for x in results for arg in (x, np.uint64(x.nbytes // 4))]
    return *made, *[launch.NONE] * (6 - len(made))
