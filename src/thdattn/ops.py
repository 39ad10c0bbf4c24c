"""The CUDA engine: one launcher per kernel, with the functions of the NumPy engine and the same arguments.

Everything runs on CuPy's current stream; nothing waits for the GPU or copies from it, so a call can be captured in a
CUDA graph. Results are new arrays (a layer's output must outlive the next layer's call); work buffers are the plan's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from thdattn import jit
from thdattn.packing import DLPACK_CPU
from thdattn.plan import Plan, PlanArrays, host_arrays
from thdattn.sharding import Sharding
from thdattn.tensor_map import tensor_map
from thdattn.tiles import (
    PLAN_KERNELS,
    REORDER_KERNELS,
    STATS_ROWS,
    TILES,
    BackwardSm90,
    BackwardWideSm90,
    ForwardSm90,
    Tiles,
)

name = "cuda"
device = "cuda"
dtypes = ("float16", "bfloat16")
head_dims = tuple(TILES)

# Of kernels_sm90_fwd.cu and kernels_sm90_bwd.cuh.
FORWARD_SIZE = np.dtype([(field, np.int32) for field in (
    "q_rows", "num_tiles", "num_heads", "group", "together", "last_heads")])
BACKWARD_SIZE = np.dtype([(field, np.int32) for field in (
    "q_rows", "k_rows", "stats_rows", "num_tiles", "parts", "together", "last_parts", "heads", "group",
    "num_kv_heads", "grad_turns")])
GRADIENTS = np.dtype([(field, np.uint64) for field in ("dk", "dv", "dk_sum", "dv_sum", "turns")])
# How the Hopper kernels work through tiles and heads; measured on an H100.
PART_COLUMNS, LONG_FROM = 128, 1100  # of the query heads of a part; local queries that see an average key
SHORT_UP_TO, SHORT_TOGETHER = 2048, 16  # such queries; heads
FEW_SEQUENCES = 4  # of equal length, causal: what leaves as many pairs is few as well
MAX_SHARES = 2**15 - 1  # of a sum that the thread blocks of the Hopper backward add up in any order
_DUAL_CHUNK, _QUERIES, _KEYS, _TILE_COST, _TILE_ORDER = PLAN_KERNELS

Array = Any  # cupy.ndarray, whose hints are partial


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """A new uninitialised array; every allocation of the engine comes from here."""
    return cupy.empty(shape, dtype)


def from_user(name: str, x: Any) -> Array:
    """A user's array as a C-contiguous CuPy array, without a copy where it is one.

    Raises:
        TypeError: the array is not on a GPU, or cannot be exchanged through DLPack.
        ValueError: it lies on another GPU than the current one.
    """
    if type(x) is not cupy.ndarray:
        if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__") or x.__dlpack_device__()[0] == DLPACK_CPU:
            raise TypeError(f"{name} is a {type(x).__name__} on the host, wanted an array on the GPU; "
                            f"copy it with cupy.asarray({name}), or use engine='reference'")
        x = cupy.from_dlpack(x)
    current = cupy.cuda.runtime.getDevice()
    if x.device.id != current:
        raise ValueError(f"{name} is on GPU {x.device.id}, wanted the current GPU {current}; copy it there, or "
                         f"make GPU {x.device.id} current with cupy.cuda.Device({x.device.id}).use()")
    if x.flags.c_contiguous and x.data.ptr % 16 == 0:  # the kernels move 16 bytes at a time
        return x
    return x.copy(order="C")


def tiles(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Rows per query tile and per key tile of the kernels for these head dims."""
    gpu, chosen = _gpu(cupy.cuda.runtime.getDevice()), TILES[head_dim, v_head_dim]
    if gpu.sm90:
        return chosen.forward_sm90.tile_m, chosen.backward_sm90.tile_n
    return chosen.forward.tile_m, chosen.backward_for(gpu.shared_bytes).tile_n


@dataclass(frozen=True)
class _Gpu:
    """What the choice of kernels and grids depends on."""

    sm90: bool
    multiprocessors: int
    shared_bytes: int


@functools.cache
def _gpu(device: int) -> _Gpu:
    attributes = cupy.cuda.Device(device).attributes
    return _Gpu(
        sm90=jit.device_arch() == "sm_90a",
        multiprocessors=attributes["MultiProcessorCount"],
        shared_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
    )


# ------------------------------------------------------------------------------------------------ plan


def plan_arrays(sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int]) -> PlanArrays:
    """The arrays of a plan on the GPU.

    Lengths on the host are planned there and uploaded; lengths on the GPU are planned by kernels, with the same result
    and no copy to the host, so that a captured CUDA graph plans anew for the lengths it finds at each replay.
    """
    if sharding.batch.on_device:
        return _device_arrays(sharding, cp_rank, window, tiles)
    made = host_arrays(sharding, cp_rank, window, tiles)
    return PlanArrays(**{field: cupy.asarray(array) for field, array in vars(made).items()})


def _device_arrays(sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int]) -> PlanArrays:
    batch, cp_size, local_rows = sharding.batch, sharding.cp_size, sharding.local_rows
    cu_seqlens, cu_seqlens_padded = (
        from_user(name, x)
        for name, x in (("cu_seqlens", batch.cu_seqlens), ("cu_seqlens_padded", batch.cu_seqlens_padded))
    )
    seqs, left, right = np.int32(batch.num_seqs), np.int32(window[0]), np.int32(window[1])

    if sharding.strategy == "dual_chunk":
        rank_order = empty((cp_size * local_rows,), np.int32)
        _launch_rows(_DUAL_CHUNK, rank_order.size, (rank_order, cu_seqlens_padded, seqs, np.int32(cp_size),
                                                    np.int32(local_rows), np.int32(batch.total_rows)))
    else:  # contiguous rows do not depend on the lengths
        rank_order = cupy.arange(cp_size * local_rows, dtype=np.int32)
        rank_order[batch.total_rows :] = -1
    rows = rank_order[cp_rank * local_rows : (cp_rank + 1) * local_rows]

    positions, key_ranges = empty((local_rows,), np.int32), empty((local_rows, 2), np.int32)
    _launch_rows(_QUERIES, local_rows, (positions, key_ranges, rows, cu_seqlens, cu_seqlens_padded, seqs,
                                        np.int32(local_rows), left, right))
    query_ranges = empty((batch.total_rows, 2), np.int32)
    _launch_rows(_KEYS, batch.total_rows, (query_ranges, rows, cu_seqlens, cu_seqlens_padded, seqs,
                                           np.int32(local_rows), np.int32(batch.total_rows), left, right))
    lengths = cu_seqlens, cu_seqlens_padded, seqs
    return PlanArrays(rows, positions, key_ranges, query_ranges, rank_order,
                      _tile_orders(lengths, key_ranges, rows, tiles[0]),
                      _tile_orders(lengths, query_ranges, None, tiles[1]))


def _tile_orders(lengths: tuple[Any, ...], ranges: Array, rows: Array | None, tile: int) -> Array:
    """Both orders of the tiles of `rows`; None: of all rows, in sequence order."""
    num_rows, num_tiles = len(ranges), -(-len(ranges) // tile)
    # One array, as a replayed graph writes to all of it as long as the orders live: orders, costs, rows.
    made = empty((5 * num_tiles + num_rows,), np.int32)
    cost = made[2 * num_tiles :]
    if rows is None:
        rows, (_, padded, seqs) = made[5 * num_tiles :], lengths
        _launch_rows(_DUAL_CHUNK, num_rows, (rows, padded, seqs, np.int32(1), np.int32(num_rows), np.int32(num_rows)))
    _launch_rows(_TILE_COST, 32 * num_tiles, (cost, ranges, rows, *lengths, np.int32(num_rows), np.int32(tile),
                                              np.int32(num_tiles)))
    _launch_rows(_TILE_ORDER, 32 * num_tiles, (made, cost, np.int32(num_tiles)))
    return made[: 2 * num_tiles].reshape(2, num_tiles)


def _launch_rows(kernel: str, threads: int, args: tuple[Any, ...]) -> None:
    jit.kernel(kernel)((-(-threads // 256),), 256, args)


# ------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class _Launch:
    """A kernel with all that does not change between the calls of a plan; the arguments of a call come first."""

    kernel: jit.Kernel
    grid: tuple[int, ...]
    block: int
    fixed: tuple[Any, ...]

    def __call__(self, *args: Any) -> None:
        self.kernel(self.grid, self.block, args + self.fixed)


def attn_fwd(
    q: Array, k: Array, v: Array, plan: Plan, softmax_scale: float, return_max_logit: bool
) -> tuple[Array, Array, Array | None]:
    """Attention of this rank's query rows over the whole key buffer; see reference.attn_fwd."""
    num_rows, num_heads, _ = q.shape
    out, lse = empty((num_rows, num_heads, v.shape[2]), q.dtype), empty((num_heads, num_rows), np.float32)
    if not num_rows:
        return out, lse, cupy.full(num_heads, -np.inf, np.float32) if return_max_logit else None
    launch, boxes, max_logits = plan.once(("forward", *_layout(q, k, v)), lambda: _forward(q, k, v, plan))
    inputs = map(tensor_map, (q, k, v), boxes) if boxes else (q, k, v)
    launch(*inputs, out, lse, np.float32(softmax_scale))
    return out, lse, max_logits.max(axis=1) if return_max_logit else None


def _forward(q: Array, k: Array, v: Array, plan: Plan) -> tuple[_Launch, tuple[int, ...], Array]:
    """The launch of the forward, the rows of the boxes that it loads by tensor map (none: by pointer), max_logits."""
    gpu, chosen, dtype = _gpu(cupy.cuda.runtime.getDevice()), TILES[q.shape[2], v.shape[2]], q.dtype.name
    (num_rows, num_heads, _), num_tiles = q.shape, plan.arrays.query_tiles.shape[1]
    tiles = chosen.forward_sm90 if gpu.sm90 else chosen.forward
    max_logits = empty((num_heads, num_tiles * tiles.warps), np.float32)
    group = num_heads // k.shape[1]
    if isinstance(tiles, ForwardSm90):
        order, how = _work_order(gpu, plan, plan.arrays.query_tiles, num_heads, max(group, tiles.together))
        size = np.array((num_rows, num_tiles, num_heads, group, *how), FORWARD_SIZE)[()]
        fixed = (max_logits, plan.key_ranges, order, cupy.zeros(1, np.int32), size)
        grid, block = (min(gpu.multiprocessors, num_tiles * num_heads),), 128 * (1 + tiles.consumers)
        kernel = jit.kernel(*chosen.forward_sm90_kernel(dtype))
        return _Launch(kernel, grid, block, fixed), (tiles.tile_m, tiles.tile_n, tiles.tile_n), max_logits
    fixed = (max_logits, plan.key_ranges, plan.query_ranges, plan.arrays.query_tiles[1],
             *map(np.int32, (num_rows, len(k), group)))
    kernel = jit.kernel(*chosen.forward_kernel(dtype))
    return _Launch(kernel, (num_tiles, num_heads), 32 * tiles.warps, fixed), (), max_logits


def attn_bwd(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan, softmax_scale: float,
    kv_grad_dtype: DTypeLike, deterministic: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of attn_fwd; dk and dv are this rank's share. See reference.attn_bwd.

    Where dq comes from several tiles of keys, it is summed in float32, and rounded once. `deterministic`: on Hopper
    up to head dims 192/128, thread blocks wait for each other to add from the last tile of keys to the first; elsewhere
    dq has a kernel of its own, for 1.4 times the matrix products.
    """
    if not len(q):
        return empty(q.shape, q.dtype), cupy.zeros(k.shape, kv_grad_dtype), cupy.zeros(v.shape, kv_grad_dtype)
    gpu, chosen = _gpu(cupy.cuda.runtime.getDevice()), TILES[q.shape[2], v.shape[2]]
    sm90 = gpu.sm90 and (chosen.backward_sm90.has_order or not deterministic)
    backward = _BackwardSm90 if sm90 else _BackwardPortable
    dkv_dtype = np.dtype(kv_grad_dtype)
    key = ("backward", *_layout(q, k, v), dkv_dtype, deterministic)
    return plan.once(key, lambda: backward(gpu, chosen, q, k, v, plan, dkv_dtype, deterministic))(
        dout, q, k, v, out, lse, plan, np.float32(softmax_scale)
    )


class _BackwardSm90:
    """The launches of the backward on Hopper; sums of dq are float32, in a layout of their own, and rounded once."""

    def __init__(self, gpu: _Gpu, chosen: Tiles, q: Array, k: Array, v: Array, plan: Plan, dkv_dtype: np.dtype[Any],
                 deterministic: bool) -> None:
        sm90, dtype, num_tiles = chosen.backward_sm90, q.dtype.name, plan.arrays.key_tiles.shape[1]
        (num_rows, num_heads, head_dim), (num_keys, num_kv_heads, _) = q.shape, k.shape
        group, stats_rows = num_heads // num_kv_heads, _stats_rows(num_rows)
        deterministic = deterministic or (sm90.has_order and num_tiles > MAX_SHARES)
        split = 1 if deterministic else _split(gpu, plan, num_tiles, num_kv_heads, group, head_dim)
        # Of dk and dv of which several thread blocks have a share there are float32 sums, which may be what is wanted.
        self.dkv_dtype = dkv_dtype
        dkv_size = k.size + v.size if split > 1 or dkv_dtype == np.float32 else 0
        dq_size, dq_turns = stats_rows * num_heads * head_dim, stats_rows // 64 * num_heads
        grad_turns = num_tiles * sm90.tile_n // 16
        num_turns = dq_turns + 2 * grad_turns * num_kv_heads
        sums = plan.buffer("sums", (dkv_size + dq_size + -(-num_turns // 4) * 4,), np.float32)
        self.dkv_sum, self.dq_sum, turns = sums[:dkv_size], sums[dkv_size:][:dq_size], sums[dkv_size + dq_size :]
        self.grad_turns = turns[dq_turns:]
        # Whose shares are claimed need no zeros, but turns do.
        stats, self.delta = _delta(chosen, q, v, plan, turns if sm90.has_order else sums[dkv_size:])

        parts = num_kv_heads * split
        order, how = _work_order(gpu, plan, plan.arrays.key_tiles, parts, 1 if deterministic else sm90.together)
        if deterministic:  # a block that waits for its turn finds those it waits for at work
            order = plan.once("falling", lambda: cupy.arange(num_tiles - 1, -1, -1, dtype=np.int32))
        size = np.array((num_rows, num_keys, stats_rows, num_tiles, parts, *how, group // split, group, num_kv_heads,
                         grad_turns), BACKWARD_SIZE)[()]
        shares = _shares(sm90, plan)
        kernel = chosen.backward_sm90_kernel(dtype, dkv_dtype.name, deterministic)
        self.main = _Launch(
            jit.kernel(*kernel), (min(gpu.multiprocessors, num_tiles * parts),), 512,
            (self.dq_sum, *((turns, stats, plan.key_ranges) if sm90.has_order else (stats,)), plan.query_ranges, shares,
             order, cupy.zeros(1, np.int32), size))
        self.boxes = sm90.tile_m, sm90.tile_n, sm90.tile_n, sm90.tile_m
        self.round_dq = None if sm90.has_order else _Launch(
            jit.kernel(*chosen.round_wide_kernel(dtype)), (stats_rows // 64, num_heads), 128, (shares, size))

    def __call__(self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan,
                 softmax_scale: Any) -> tuple[Array, Array, Array]:
        dq = empty(q.shape, q.dtype)
        dkv = self.dkv_sum if self.dkv_dtype == np.float32 else empty((k.size + v.size,), self.dkv_dtype)
        self.delta(out, dout, lse, softmax_scale)
        if plan.has_local_padding:
            q, dout = _without_padding(q, dout, plan)
        inputs = map(tensor_map, (q, k, v, dout), self.boxes)
        grads = (*_dk_dv(dkv, k, v), *_dk_dv(self.dkv_sum if self.dkv_sum.size else dkv, k, v), self.grad_turns)
        self.main(*inputs, dq, np.array(tuple(x.data.ptr for x in grads), GRADIENTS)[()], softmax_scale)
        if self.round_dq is not None:
            self.round_dq(dq, self.dq_sum, softmax_scale)
        return dq, *_dk_dv(dkv, k, v)


def _shares(tiles: BackwardSm90 | BackwardWideSm90, plan: Plan) -> Array:
    """(tiles of tile_m query rows,) int32: how many tiles of keys have a share of dq; see thd_attn_shares_sm90."""

    def make() -> Array:
        shares = cupy.zeros(_stats_rows(plan.local_rows) // tiles.tile_m, np.int32)
        grid = (plan.arrays.key_tiles.shape[1],)
        jit.kernel(tiles.shares_kernel)(grid, 32, (shares, plan.query_ranges, np.int32(plan.key_rows)))
        return shares

    return plan.once(("shares", tiles.tile_m, tiles.tile_n), make)


class _BackwardPortable:
    """The launches of the backward for every GPU: dq is summed in float32 and rounded, or has a kernel of its own."""

    def __init__(self, gpu: _Gpu, chosen: Tiles, q: Array, k: Array, v: Array, plan: Plan, dkv_dtype: np.dtype[Any],
                 deterministic: bool) -> None:
        (num_rows, num_heads, _), (num_keys, num_kv_heads, _), dtype = q.shape, k.shape, q.dtype.name
        self.dkv_dtype = dkv_dtype
        self.dq_sum = plan.buffer("dq_sum", (0,) if deterministic else q.shape, np.float32)
        stats, self.delta = _delta(chosen, q, v, plan, self.dq_sum)
        sizes = tuple(map(np.int32, (num_rows, num_keys, _stats_rows(num_rows), num_heads // num_kv_heads)))
        tiles = chosen.backward_for(gpu.shared_bytes)
        order = plan.arrays.key_tiles[1]
        self.main = _Launch(
            jit.kernel(*chosen.backward_kernel(dtype, dkv_dtype.name, not deterministic, tiles)),
            (len(order), num_kv_heads), 2 * tiles.tile_n * tiles.split,
            (stats, self.dq_sum, plan.key_ranges, plan.query_ranges, order, *sizes))
        self.dq = None if not deterministic else _Launch(
            jit.kernel(*chosen.dq_kernel(dtype)), (-(-num_rows // (16 * chosen.dq_warps)), num_heads),
            32 * chosen.dq_warps, (stats, plan.key_ranges, plan.query_ranges, *sizes))
        self.round_dq = _Launch(jit.kernel(*chosen.round_kernel(dtype)), (-(-q.size // 2048),), 256,
                                (np.uint64(q.size // 8),))

    def __call__(self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan,
                 softmax_scale: Any) -> tuple[Array, Array, Array]:
        dq, dkv = empty(q.shape, q.dtype), empty((k.size + v.size,), self.dkv_dtype)
        self.delta(out, dout, lse, softmax_scale)
        self.main(q, k, v, dout, *_dk_dv(dkv, k, v), softmax_scale)
        if self.dq is None:
            self.round_dq(dq, self.dq_sum, softmax_scale)
        else:
            self.dq(q, k, v, dout, dq, softmax_scale)
        return dq, *_dk_dv(dkv, k, v)


def _stats_rows(num_rows: int) -> int:
    return -(-num_rows // STATS_ROWS) * STATS_ROWS


def _delta(chosen: Tiles, q: Array, v: Array, plan: Plan, sums: Array) -> tuple[Array, _Launch]:
    """(stats, the launch that fills it and sets sums to zero); see thd_attn_delta."""
    (num_rows, num_heads, _), stats_rows = q.shape, _stats_rows(len(q))
    stats = plan.buffer("stats", (2, num_heads, stats_rows), np.float32)
    lanes = 8 if v.shape[2] <= 64 else 16 if v.shape[2] <= 128 else 32
    return stats, _Launch(
        jit.kernel(*chosen.delta_kernel(q.dtype.name)), (-(-stats_rows * num_heads * lanes // 256),), 256,
        (plan.key_ranges, stats, sums, np.uint64(-(-sums.size // 4)),
         *map(np.int32, (num_rows, stats_rows, num_heads))))


def _dk_dv(dkv: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """dk and dv, which lie one behind the other."""
    return dkv[: k.size].reshape(k.shape), dkv[k.size :].reshape(v.shape)


def _split(gpu: _Gpu, plan: Plan, num_tiles: int, num_kv_heads: int, group: int, head_dim: int) -> int:
    """Into how many parts the query heads of a kv head are split, which then add their shares of dk and dv.

    One part needs no sums. But few tiles leave multiprocessors idle, and the heads of a part are at work at different
    rows: beyond short sequences, only so many columns of them fit the L2 cache beside what other blocks work at.
    """
    if num_tiles * num_kv_heads < 3 * gpu.multiprocessors:
        return group
    columns = PART_COLUMNS * max(1, LONG_FROM / (_queries_in_sight(plan) or LONG_FROM))
    heads = [n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * head_dim <= columns)]
    return group // heads[-1]


def _queries_in_sight(plan: Plan) -> float:
    """Local queries that see an average key; 0 where only the GPU knows."""
    return 0 if plan.batch.on_device else plan.visible_pairs / (plan.cp_size * plan.key_rows)


def _without_padding(q: Array, dout: Array, plan: Plan) -> tuple[Array, Array]:
    """Copies whose padding rows are 0, as 0 * NaN would spread through a product."""
    copies = [plan.buffer(name, x.shape, x.dtype) for name, x in (("q", q), ("dout", dout))]
    order = plan.once("local_order", lambda: cupy.arange(len(q), dtype=np.int32))
    _reorder(False, (copies[0], q), (copies[1], dout), order, plan.key_ranges)
    return copies[0], copies[1]


def _work_order(gpu: _Gpu, plan: Plan, orders: Array, num_heads: int, together: int) -> tuple[Array, tuple[int, ...]]:
    """(tiles in the order of work, (together, last_heads)) for work_item; orders as those of PlanArrays.

    Few sequences, the longest tile first: blocks at work then read the same keys in step, and the multiprocessors end
    at the same time. Many, one after another, for the L2 cache; the heads of a row lie side by side in memory, so short
    sequences take many together.
    """
    last, in_sight = min(num_heads, -(-3 * gpu.multiprocessors // orders.shape[1])), _queries_in_sight(plan)
    if in_sight and plan.key_rows**2 <= 2 * FEW_SEQUENCES * plan.visible_pairs:
        return orders[1], (together, last)
    if 0 < in_sight <= SHORT_UP_TO:
        together, last = SHORT_TOGETHER, 0
    return orders[0], (together, last)


def _layout(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
    """What the launches of a plan depend on beside the plan."""
    return q.dtype, q.shape[1], k.shape[1], q.shape[2], v.shape[2]


# ------------------------------------------------------------------------------------------------ reorder


def to_sequence_order(k_ranks: Array, v_ranks: Array, plan: Plan) -> tuple[Array, Array]:
    """Gathered rows moved to sequence order, into buffers of the plan; rows that no local query sees become 0."""
    k, v = (plan.buffer(name, (plan.key_rows, *x.shape[1:]), x.dtype) for name, x in (("k", k_ranks), ("v", v_ranks)))
    _reorder(False, (k, k_ranks), (v, v_ranks), plan.rank_order, plan.query_ranges)
    return k, v


def to_rank_order(dk: Array, dv: Array, plan: Plan) -> tuple[Array, Array]:
    """Inverse of to_sequence_order, for the gradients; filler rows become 0."""
    rows = len(plan.rank_order)
    dk_ranks, dv_ranks = (plan.buffer(name, (rows, *x.shape[1:]), x.dtype)
                          for name, x in (("dk_ranks", dk), ("dv_ranks", dv)))
    _reorder(True, (dk_ranks, dk), (dv_ranks, dv), plan.rank_order, plan.query_ranges)
    return dk_ranks, dv_ranks


def _reorder(
    to_rank_order: bool, first: tuple[Array, Array], second: tuple[Array, Array], order: Array, ranges: Array
) -> None:
    """Each pair is (out, in); one launch moves both. Rows whose range is empty hold nothing."""
    args = [arg for out, source in (first, second)
            for arg in (out, source, np.int32(out.shape[1] * out.shape[2] * out.itemsize // 16))]
    rows = len(order)
    jit.kernel(REORDER_KERNELS[to_rank_order])((-(-rows // 8), 2), 256, (*args, order, ranges, np.int32(rows)))
