"""Launchers of the attention backward."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from thdattn import jit
from thdattn.ops import launch, scheduler
from thdattn.ops.launch import Array, Gpu, Launch, layout
from thdattn.ops.plan import poison, reorder
from thdattn.plan import Plan
from thdattn.tensor_map import tensor_map
from thdattn.tiles import STATS_ROWS, TILES, BackwardSm90, BackwardWideSm90, Tiles

# Of kernels/hopper/backward_common.cuh.
BACKWARD_SIZE = np.dtype([(field, np.int32) for field in (
    "q_rows", "k_rows", "stats_rows", "num_tiles", "parts", "together", "last_parts", "heads", "group",
    "num_kv_heads", "grad_turns")])
GRADIENTS = np.dtype([(field, np.uint64) for field in ("dk", "dv", "dk_sum", "dv_sum", "turns")])
MAX_SHARES = 2**15 - 1  # of a sum that the thread blocks of the Hopper backward add up in any order


def attn_bwd(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan, softmax_scale: float,
    kv_grad_dtype: DTypeLike, deterministic: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of attn_fwd; dk and dv are this rank's share. See reference.attn_bwd.

    Where dq comes from several tiles of keys, it is summed in float32, and rounded once. `deterministic`: on Hopper
    up to head dims 192/128, thread blocks wait for each other to add from the last tile of keys to the first; elsewhere
    dq has a kernel of its own, for 1.4 times the matrix products.
    """
    dkv_dtype = np.dtype(kv_grad_dtype)
    if len(q) and len(k):
        gpu, chosen = launch.this_gpu(), TILES[q.shape[2], v.shape[2]]
        sm90 = gpu.sm90 and (chosen.backward_sm90.has_order or not deterministic)
        backward = _BackwardSm90 if sm90 else _BackwardPortable
        key = ("backward", *layout(q, k, v), dkv_dtype, deterministic)
        run = plan.once(key, lambda: backward(gpu, chosen, q, k, v, plan, dkv_dtype, deterministic))
        dq, dk, dv = run(dout, q, k, v, out, lse, plan, np.float32(softmax_scale))
    else:  # no tiles to launch a kernel for
        dq, dk, dv = (cupy.zeros(x.shape, dtype) for x, dtype in ((q, q.dtype), (k, dkv_dtype), (v, dkv_dtype)))
    poison(plan, dq, dk, dv)
    return dq, dk, dv


class _BackwardSm90:
    """The launches of the backward on Hopper; sums of dq are float32, in a layout of their own, and rounded once."""

    def __init__(self, gpu: Gpu, chosen: Tiles, q: Array, k: Array, v: Array, plan: Plan, dkv_dtype: np.dtype[Any],
                 deterministic: bool) -> None:
        sm90, dtype, num_tiles = chosen.backward_sm90, q.dtype.name, plan.arrays.key_tiles.shape[1]
        (num_rows, num_heads, head_dim), (num_keys, num_kv_heads, _) = q.shape, k.shape
        group, stats_rows = num_heads // num_kv_heads, _stats_rows(num_rows)
        deterministic = deterministic or (sm90.has_order and num_tiles > MAX_SHARES)
        split = 1 if deterministic else scheduler.split_heads(gpu, plan, num_tiles, num_kv_heads, group, head_dim)
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
        together = 1 if deterministic else sm90.together
        order, how = scheduler.work_order(gpu, plan, plan.arrays.key_tiles, parts, together)
        if deterministic:  # a block that waits for its turn finds those it waits for at work
            order = plan.once("falling", lambda: cupy.arange(num_tiles - 1, -1, -1, dtype=np.int32))
        size = np.array((num_rows, num_keys, stats_rows, num_tiles, parts, *how, group // split, group, num_kv_heads,
                         grad_turns), BACKWARD_SIZE)[()]
        shares = shares_of(sm90, plan)
        kernel = chosen.backward_sm90_kernel(dtype, dkv_dtype.name, deterministic)
        self.main = Launch(
            jit.kernel(*kernel), (min(gpu.multiprocessors, num_tiles * parts),), 512,
            (self.dq_sum, *((turns, stats, plan.key_ranges) if sm90.has_order else (stats,)), plan.query_ranges, shares,
             order, cupy.zeros(1, np.int32), size))
        self.boxes = sm90.tile_m, sm90.tile_n, sm90.tile_n, sm90.tile_m
        self.round_dq = None if sm90.has_order else Launch(
            jit.kernel(*chosen.round_wide_kernel(dtype)), (stats_rows // 64, num_heads), 128, (shares, size))

    def __call__(self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan,
                 softmax_scale: Any) -> tuple[Array, Array, Array]:
        dq = launch.empty(q.shape, q.dtype)
        dkv = self.dkv_sum if self.dkv_dtype == np.float32 else launch.empty((k.size + v.size,), self.dkv_dtype)
        self.delta(out, dout, lse, softmax_scale)
        if plan.has_blind_queries:
            q, dout = _without_padding(q, dout, plan)
        inputs = map(tensor_map, (q, k, v, dout), self.boxes)
        grads = (*_dk_dv(dkv, k, v), *_dk_dv(self.dkv_sum if self.dkv_sum.size else dkv, k, v), self.grad_turns)
        self.main(*inputs, dq, np.array(tuple(x.data.ptr for x in grads), GRADIENTS)[()], softmax_scale)
        if self.round_dq is not None:
            self.round_dq(dq, self.dq_sum, softmax_scale)
        return dq, *_dk_dv(dkv, k, v)


def shares_of(tiles: BackwardSm90 | BackwardWideSm90, plan: Plan) -> Array:
    """(tiles of tile_m query rows,) int32: how many tiles of keys have a share of dq; see thd_attn_shares_sm90."""

    def make() -> Array:
        shares = cupy.zeros(_stats_rows(plan.local_rows) // tiles.tile_m, np.int32)
        grid = (plan.arrays.key_tiles.shape[1],)
        jit.kernel(tiles.shares_kernel)(grid, 32, (shares, plan.query_ranges, np.int32(plan.key_rows)))
        return shares

    return plan.once(("shares", tiles.tile_m, tiles.tile_n), make)


class _BackwardPortable:
    """The launches of the backward for every GPU: dq is summed in float32 and rounded, or has a kernel of its own."""

    def __init__(self, gpu: Gpu, chosen: Tiles, q: Array, k: Array, v: Array, plan: Plan, dkv_dtype: np.dtype[Any],
                 deterministic: bool) -> None:
        (num_rows, num_heads, _), (num_keys, num_kv_heads, _), dtype = q.shape, k.shape, q.dtype.name
        self.dkv_dtype = dkv_dtype
        self.dq_sum = plan.buffer("dq_sum", (0,) if deterministic else q.shape, np.float32)
        stats, self.delta = _delta(chosen, q, v, plan, self.dq_sum)
        sizes = tuple(map(np.int32, (num_rows, num_keys, _stats_rows(num_rows), num_heads // num_kv_heads)))
        tiles = chosen.backward_for(gpu.shared_bytes)
        order = plan.arrays.key_tiles[1]
        self.main = Launch(
            jit.kernel(*chosen.backward_kernel(dtype, dkv_dtype.name, not deterministic, tiles)),
            (len(order), num_kv_heads), 2 * tiles.tile_n * tiles.split,
            (stats, self.dq_sum, plan.key_ranges, plan.query_ranges, order, *sizes))
        self.dq = None if not deterministic else Launch(
            jit.kernel(*chosen.dq_kernel(dtype)), (-(-num_rows // (16 * chosen.dq_warps)), num_heads),
            32 * chosen.dq_warps, (stats, plan.key_ranges, plan.query_ranges, *sizes))
        self.round_dq = Launch(jit.kernel(*chosen.round_kernel(dtype)), (-(-q.size // 2048),), 256,
                                (np.uint64(q.size // 8),))

    def __call__(self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan,
                 softmax_scale: Any) -> tuple[Array, Array, Array]:
        dq, dkv = launch.empty(q.shape, q.dtype), launch.empty((k.size + v.size,), self.dkv_dtype)
        self.delta(out, dout, lse, softmax_scale)
        self.main(q, k, v, dout, *_dk_dv(dkv, k, v), softmax_scale)
        if self.dq is None:
            self.round_dq(dq, self.dq_sum, softmax_scale)
        else:
            self.dq(q, k, v, dout, dq, softmax_scale)
        return dq, *_dk_dv(dkv, k, v)


def _stats_rows(num_rows: int) -> int:
    return -(-num_rows // STATS_ROWS) * STATS_ROWS


def _delta(chosen: Tiles, q: Array, v: Array, plan: Plan, sums: Array) -> tuple[Array, Launch]:
    """(stats, the launch that fills it and sets sums to zero); see thd_attn_delta."""
    (num_rows, num_heads, _), stats_rows = q.shape, _stats_rows(len(q))
    stats = plan.buffer("stats", (2, num_heads, stats_rows), np.float32)
    lanes = 8 if v.shape[2] <= 64 else 16 if v.shape[2] <= 128 else 32
    return stats, Launch(
        jit.kernel(*chosen.delta_kernel(q.dtype.name)), (-(-stats_rows * num_heads * lanes // 256),), 256,
        (plan.key_ranges, stats, sums, np.uint64(-(-sums.size // 4)),
         *map(np.int32, (num_rows, stats_rows, num_heads))))


def _dk_dv(dkv: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """dk and dv, which lie one behind the other."""
    return dkv[: k.size].reshape(k.shape), dkv[k.size :].reshape(v.shape)


def _without_padding(q: Array, dout: Array, plan: Plan) -> tuple[Array, Array]:
    """Copies whose padding rows are 0, as 0 * NaN would spread through a product."""
    copies = [plan.buffer(name, x.shape, x.dtype) for name, x in (("q", q), ("dout", dout))]
    order = plan.once("local_order", lambda: cupy.arange(len(q), dtype=np.int32))
    reorder(False, (copies[0], q), (copies[1], dout), order, plan.key_ranges)
    return copies[0], copies[1]
