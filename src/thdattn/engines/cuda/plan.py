"""Launchers of kernels.cu: the arrays of a plan."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import cupy
import numpy as np

from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array, Launch
from thdattn.engines.cuda.lengths import DeviceLengths
from thdattn.jit import compiler
from thdattn.jit.structs import TREES
from thdattn.kernels.configs import BEHIND_KEYS, TREE_GROUP
from thdattn.packing import PackedBatch
from thdattn.plan.key_transfers import Pieces, all_rows, needed_rows, split_key_side
from thdattn.plan.node_table import node_table
from thdattn.plan.plan import Plan, PlanArrays
from thdattn.plan.workspace import INT32, Buffer

NAN_BLOCKS = 64  # of 256 threads, which end at once if the lengths are right
_ORDER_INTS = 5  # ints of a tile: its places in two orders, and three for its cost


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
    _make(lengths, "thd_plan_rows", (_blocks(order.size),), (
        order, positions, valid, offsets[0], wrong, *by_runs, *sizes))
    rows, nodes = order[cp_rank * local_rows :][:local_rows], plan.batch.node_table
    if plan.batch.trees is not None:
        nodes = cupy.asarray(node_table(plan.batch))
    if nodes is not None:
        _make(lengths, "thd_plan_tree_positions", (_blocks(local_rows),), (
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
    _make(lengths, "thd_plan_runs", (_blocks(made.size),), (made, *table, np.int32(made.size)))
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
    _make(lengths, "thd_plan_ranges", (_blocks(max(sides)), 2), (
        *ranges, *there, wrong, *map(np.int32, (num_seqs, *sides, *plan.window))))
    of_trees = _tree_arrays(plan, rows.nodes, ranges, there[:2], lengths)

    made = [launch.new(declared[field]) for field in ("query_tiles", "key_tiles")]
    grid = _blocks(32 * max(num_tiles)), 2
    _make(lengths, "thd_plan_tile_cost", grid, (
        *made, *ranges, *there, *map(np.int32, (num_seqs, *sides, *tiles))))
    _make(lengths, "thd_plan_tile_order", grid, (*made, *map(np.int32, (*num_tiles, *sides))))
    if of_trees:
        _make(lengths, "thd_plan_tree_order", grid, (*made, *map(np.int32, num_tiles)))
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
    _make(lengths, "thd_plan_tree_ranges", (_blocks(max(plan.local_rows, num_ends)), 2), (
        made["query_ends"], *ranges, *rows, nodes, *map(np.int32, (nodes.shape[1], *sides, num_ends))))
    _make(lengths, "thd_plan_tree_ends", (_blocks(32 * num_groups),), (
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
    _make(lengths, "thd_plan_parts", (_blocks(32 * count), 2), (
        made, tiles, second, *map(np.int32, (count, num_first))))
    return [made[: 2 * num_first].reshape(2, num_first), made[2 * num_first :].reshape(2, count - num_first)]


def pairs_of(plan: Plan) -> Array:
    """Return the number of visible pairs of a local query and a key, (1,) uint64 on the GPU."""

    def make() -> Array:
        pairs, args = launch.empty((1,), np.uint64), (plan.key_ranges, np.int32(plan.local_rows))
        plan.make(lambda: compiler.kernel("thd_plan_pairs")((1,), 1024, (pairs, *args)))
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
    kernel, grid = compiler.kernel("thd_plan_nan_if_invalid"), (NAN_BLOCKS,)
    run = plan.memoize("nan_if_invalid", lambda: Launch(kernel, grid, 256, (lengths.wrong,), early=True))
    for i in range(0, len(results), 3):
        three = results[i : i + 3]
        run.launch_as(tuple([(x.data.ptr, x.nbytes) for x in three]), functools.partial(_words_of, three))


def _words_of(results: tuple[Array, ...]) -> tuple[Any, ...]:
    """Return the kernel's arguments: three arrays, some may be NONE, each with its number of 4-byte words."""
    made = [arg for x in results for arg in (x, np.uint64(x.nbytes // 4))]
    return *made, *[launch.NONE] * (6 - len(made))
