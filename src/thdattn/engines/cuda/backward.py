"""The attention backward: which kernels a call launches, and with what.

Every kernel starts from thd_attn_delta. On Hopper, thd_attn_bwd_sm90 follows, or for head dims 192/128
thd_attn_bwd_shared_dq_sm90, or beyond them thd_attn_bwd_by_gradient_sm90 and thd_attn_round_dq_sm90; deterministic, the
former without dq and thd_attn_bwd_dq_sm90. Elsewhere thd_attn_bwd and thd_attn_round; deterministic, thd_attn_bwd
without dq and thd_attn_bwd_dq.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from thdattn.engines.cuda import launch, scheduler
from thdattn.engines.cuda.backward_memory import (
    Groups,
    dq_accum_shape,
    largest_accum,
    most_heads,
    padded_rows,
    shares_shape,
    stats_shape,
)
from thdattn.engines.cuda.launch import Array, Gpu, Launch, layout
from thdattn.engines.cuda.plan import pairs_of, parts_of
from thdattn.engines.cuda.rows import reorder
from thdattn.engines.cuda.softcap import logits_of, lse_unit
from thdattn.jit import compiler
from thdattn.jit.structs import BACKWARD_SIZE, GRADIENTS, OWNERS, PACK_FILTER, PARTIALS
from thdattn.kernels.configs import DQ_ROWS, TILES, Tiles, lanes_of
from thdattn.kernels.hopper_configs import BackwardByGradientSm90, BackwardSharedDqSm90
from thdattn.kernels.instances import Instance
from thdattn.plan.memory import heads_of
from thdattn.plan.owners import places_of_keys
from thdattn.plan.plan import Plan

Halfway = Callable[[Array, Array], None]
GradDtypes = tuple[str, np.dtype[Any]]  # of dq, to which is added where it is float32, and of dk and dv
Homes = tuple[Any, Array]  # see reference.attn_bwd
_NO_HOMES = bytes(PARTIALS.itemsize), 0


def attn_bwd(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan, softmax_scale: float,
    kv_grad_dtype: DTypeLike, deterministic: bool,
    into: tuple[Array, Sequence[Array] | None] | None = None, merge: bool = False, halfway: Halfway | None = None,
    rounded: Sequence[Array] | None = None, softcap: float = 0.0, homes: Homes | None = None,
    groups: Sequence[int] = (),
) -> tuple[Array, Array, Array]:
    """Gradients of attn_fwd; dk and dv are this rank's share, which stay until the next call. See reference.attn_bwd.

    Where dq comes from several tiles of keys, it is accumulated in float32, and rounded once. `deterministic`: on
    Hopper up to head dims 192/128, thread blocks wait for each other to add from the last tile of keys to the first;
    otherwise dq has a kernel of its own, for 1.4 times the matrix products. Where blocks wait in the order of tiles of
    keys, all tiles are done before `halfway`. Groups share accumulators: the launches of one follow those of another.
    """
    dkv_dtype = np.dtype(kv_grad_dtype)
    dq, shares = into or (launch.empty(q.shape, q.dtype), None)
    if not (len(q) and len(k)):  # no tiles to launch a kernel for
        if not merge:
            dq[...] = 0
        if homes is not None:
            return dq, None, None
        dk, dv = shares or [launch.empty(x.shape, dkv_dtype) for x in (k, v)]
        dk[...], dv[...] = 0, 0
        if halfway is not None:
            halfway(dk, dv)
        return dq, dk, dv
    gpu, row = launch.this_gpu(), TILES[q.shape[2], v.shape[2]]
    if not gpu.sm90 and not q.flags.c_contiguous:  # the portable kernels take whole rows
        dout, q, out = map(cupy.ascontiguousarray, (dout, q, out))
    launches = plan.once(
        ("backward", *layout(q, k, v), dq.dtype, dkv_dtype, deterministic, shares is None, homes is None,
         halfway is None, softcap > 0, groups),
        lambda: (_Hopper if gpu.sm90 else _Portable)(
            gpu, row, q, k, v, plan, (dq.dtype.name, dkv_dtype), deterministic,
            "home" if homes is not None else "given" if shares is not None else "made", halfway is not None,
            softcap > 0, heads_of(groups or k.shape[1:2], q.shape[1] // k.shape[1])))
    whole = dq
    if launch.row_heads(dq) != launch.row_heads(q):
        whole = cupy.ascontiguousarray(dq) if merge else launch.empty(q.shape, q.dtype)
    if homes is None:
        shares = shares or launches.new_shares(k, v)
    call = _Call(dout, q, k, v, out, lse, whole, shares or (), rounded or (),
                 _NO_HOMES if homes is None else (homes[0].tobytes(), homes[1].data.ptr), softmax_scale, softcap)
    launches.delta.launch_as(call.key, lambda: (out, dout, lse, lse_unit(softmax_scale, softcap)))
    launches(call, plan, halfway)
    if whole is not dq:
        dq[...] = whole
    dk, dv = shares or (None, None)
    return dq, dk, dv


@dataclass(eq=False)
class _Call:
    """What differs between calls of the same launches: arguments of attn_bwd.

    shares: arrays for dk and dv; none: they go home. homes: the bytes of a PARTIALS, and the address of places.
    """

    dout: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    dq: Array
    shares: Sequence[Array]
    rounded: Sequence[Array]
    homes: tuple[bytes, int]
    softmax_scale: float
    softcap: float

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """By which the arguments of launches are known."""
        arrays = self.dout, self.q, self.k, self.v, self.out, self.lse, self.dq, *self.shares, *self.rounded
        return (self.softmax_scale, self.softcap, self.homes, self.dout.strides, self.k.strides, self.v.strides,
                *[x.data.ptr for x in arrays])

    @property
    def logits(self) -> Any:
        """What kernels are told of logits."""
        return logits_of(self.softmax_scale, self.softcap)

    def addresses(self, plan: Plan, accum: Sequence[Any] = ()) -> list[int]:
        """Where dk and dv go, accumulators of the backward on Hopper, and where rounded rows go and which; 0: nowhere.
        """
        places = (*self.rounded, plan.arrays.places) if self.rounded else [None] * 3
        return [0 if x is None else x.data.ptr for x in (*(self.shares or [None] * 2), *accum, *places)]


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """A new array of the float32 numbers of (rows, heads, head_dim) in 16 bits."""
    out = launch.empty(x.shape, dtype)
    kernel = compiler.kernel(*TILES[64, 64].thd_attn_round(out.dtype.name))  # the same for all head dims
    kernel((-(-x.size // 2048),), 256, (out, x, np.float32(1), np.uint64(x.size // 8)))
    return out


class _Hopper:
    """The launches on Hopper. Accumulators of dq have a layout of their own; it is rounded once."""

    dq: Launch | None  # by itself
    round_dq: Launch | None

    def __init__(self, gpu: Gpu, row: Tiles, q: Array, k: Array, v: Array, plan: Plan, grads: GradDtypes,
                 deterministic: bool, where: str, in_two: bool, caps: bool, groups: Groups) -> None:
        tiles, dtype, (dq_dtype, dkv_dtype) = row.backward_sm90, q.dtype.name, grads
        (num_rows, num_heads, _), (num_keys, num_kv_heads, _) = q.shape, k.shape
        group, stats_rows = num_heads // num_kv_heads, padded_rows(num_rows)
        wide = isinstance(tiles, BackwardByGradientSm90)
        how = dkv_dtype, deterministic, where
        room, largest = (largest_accum(gpu, row, plan, some, *how) for some in ([(num_heads, num_kv_heads)], groups))
        deterministic = room.deterministic

        self.dkv_dtype, self.most_heads = dkv_dtype, most_heads(groups)
        accum = plan.buffer("accum", room.shape, np.float32, largest.shape)
        self.dkv_accum, rest_of_accum = accum[: room.dkv_size], accum[room.dkv_size :]
        self.dq_accum, semaphores = rest_of_accum[: room.dq_size], rest_of_accum[room.dq_size :]
        self.grad_semaphores = semaphores[room.dq_semaphores :]
        # The first share of a claimed accumulator is stored; only semaphores have to be zero. Wide heads claim no dq.
        stats, self.delta = _delta(row, q, v, plan, rest_of_accum if wide else semaphores, groups)

        fixed: tuple[Any, ...] = self.dq_accum, semaphores, stats, plan.key_ranges
        if isinstance(tiles, BackwardByGradientSm90):
            kernel = row.thd_attn_bwd_by_gradient_sm90(
                dtype, dtype if deterministic else dq_dtype, dkv_dtype.name, not deterministic, caps)
            fixed = self.dq_accum, stats
        else:
            pair = isinstance(tiles, BackwardSharedDqSm90)
            kernel = (row.thd_attn_bwd_shared_dq_sm90 if pair else row.thd_attn_bwd_sm90)(
                dtype, dq_dtype, dkv_dtype.name, deterministic, caps)
        shares = shares_of(row, plan)

        def main_of(orders: Array, num_splits: int, packs: Any) -> Launch:
            blocks, splits = 1 if deterministic else tiles.blocks, num_kv_heads * num_splits
            num_tiles = orders.shape[1] * tiles.blocks // blocks
            # Splits that add to the same rows at the same time wait for each other.
            short = scheduler.SHORT_UP_TO if num_splits == 1 else scheduler.LONG_FROM
            in_order = deterministic and not wide
            # Shares of a tile of queries come in turn: if these tiles are few, those of other heads come meanwhile.
            together = max(1, gpu.multiprocessors * 64 // stats_rows) if in_order else tiles.together
            order, how = scheduler.schedule(gpu, plan, orders, splits, together, short)
            if in_order:  # a block that waits for others finds them at work
                order = plan.once("falling", lambda: cupy.arange(num_tiles - 1, -1, -1, dtype=np.int32))
            size = np.array((num_rows, num_keys, stats_rows, num_tiles, splits, *how, group // num_splits,
                             group, num_kv_heads, room.semaphore_rows, launch.row_heads(q)), BACKWARD_SIZE)[()]
            grid = (blocks * min(gpu.multiprocessors // blocks, num_tiles * splits),)
            return Launch(compiler.kernel(*kernel), grid, tiles.threads,
                          (*fixed, plan.query_ranges, shares, order, cupy.zeros(1, np.int32), packs, size))

        choices = _packs_of(room.splits, plan)
        self.mains = [[main_of(orders, *choice) for choice in choices]
                      for orders in _parts(plan, in_two and (wide or not deterministic))]
        keys = tiles.tile_n // tiles.blocks
        self.boxes, self.dq, self.round_dq = (tiles.tile_m, keys, keys, tiles.tile_m), None, None
        if isinstance(tiles, BackwardByGradientSm90) and deterministic:
            self.dq_boxes = DQ_ROWS, tiles.dq_keys, tiles.dq_keys, DQ_ROWS
            self.dq = _dq_by_itself(gpu, row, row.thd_attn_bwd_dq_sm90(dtype, dq_dtype, caps), q, group, plan, stats)
        elif wide:
            round_dq, size = compiler.kernel(*row.thd_attn_round_dq_sm90(dq_dtype)), self.mains[0][0].fixed[-1]
            self.round_dq = Launch(round_dq, (stats_rows // 64, num_heads), 128, (shares, size))

    def new_shares(self, k: Array, v: Array) -> Sequence[Array]:
        """Arrays for dk and dv. Where they are wanted in float32, they are the accumulators."""
        if self.dkv_dtype == np.float32:
            return _dk_dv(self.dkv_accum, k, v)
        return [launch.empty(x.shape, self.dkv_dtype) for x in (k, v)]

    def __call__(self, call: _Call, plan: Plan, halfway: Halfway | None) -> None:
        q, k, v, dout = call.q, call.k, call.v, call.dout
        num_rows, num_keys = len(q), len(k)
        if plan.has_masked_out_queries:
            if plan.leading_tokens is None:
                q, dout = without_padding((q, dout), ("q", "dout"), plan, self.most_heads)
            else:  # rows outside a map arrive as zeros
                num_rows = max(1, plan.leading_tokens)

        def inputs(boxes: Sequence[int]) -> Iterator[Any]:
            return launch.tensor_maps((q, k, v, dout), (num_rows, num_keys, num_keys, num_rows), boxes)

        def arguments() -> tuple[Any, ...]:
            accum = _dk_dv(self.dkv_accum, k, v) if self.dkv_accum.size else call.shares or (None, None)
            grads = np.array((*call.addresses(plan, (*accum, self.grad_semaphores)), _homes_of(*call.homes)), GRADIENTS)
            return *inputs(self.boxes), call.dq, grads[()], call.logits

        _in_turn(self.mains, call, arguments, halfway)
        if self.dq is not None:
            self.dq.launch_as(call.key, lambda: (*inputs(self.dq_boxes), call.dq, call.logits))
        if self.round_dq is not None:
            self.round_dq.launch_as(call.key, lambda: (call.dq, self.dq_accum, np.float32(call.softmax_scale)))


def _dq_by_itself(
    gpu: Gpu, row: Tiles, kernel: Instance, q: Array, group: int, plan: Plan, stats: Array
) -> Launch:
    """The launch of thd_attn_bwd_dq_sm90, whose tiles of queries and scheduler are those of the forward."""
    orders, (num_rows, num_heads, _) = plan.arrays.query_tiles, q.shape
    num_tiles = orders.shape[1]
    order, how = scheduler.schedule(gpu, plan, orders, num_heads, max(group, row.forward_sm90.together))
    size = np.array((num_rows, num_rows, padded_rows(num_rows), num_tiles, num_heads, *how, 1, 1, num_heads, 0,
                     launch.row_heads(q)), BACKWARD_SIZE)[()]
    return Launch(compiler.kernel(*kernel), (min(gpu.multiprocessors, num_tiles * num_heads),), 384,
                  (stats, plan.key_ranges, order, cupy.zeros(1, np.int32), np.int32(group), size))


def plan_backward(plan: Plan) -> None:
    """Makes now what the backward asks of a plan, and what a refresh of the plan has to make again."""
    row = TILES[plan.head_dims]
    if launch.this_gpu().sm90:
        shares_of(row, plan)
        pairs_of(plan)
    if plan.cp_size > 1 and plan.keys_of is None and not plan.sharding.by_runs:
        places_of_keys(plan)


def shares_of(row: Tiles, plan: Plan) -> Array:
    """(tiles of tile_m query rows,) int32: tiles of keys that have a share of dq; see thd_attn_count_partials_sm90."""
    tiles = row.backward_sm90

    def make() -> Array:
        shares = launch.empty(shares_shape(row, plan.local_rows), np.int32)
        # Not the plan, which keeps `count` for a refresh: it would keep itself.
        grid, args = (plan.arrays.key_tiles.shape[1],), (shares, plan.query_ranges, np.int32(plan.key_rows))

        def count() -> None:
            shares.fill(0)
            compiler.kernel(*row.thd_attn_count_partials_sm90())(grid, 32, args)

        plan.make(count)
        return shares

    return plan.once(("shares", tiles.tile_m, tiles.tile_n), make)


class _Portable:
    """The launches on every GPU: dq is accumulated in float32 and rounded, or has a kernel of its own."""

    def __init__(self, gpu: Gpu, row: Tiles, q: Array, k: Array, v: Array, plan: Plan, grads: GradDtypes,
                 deterministic: bool, where: str, in_two: bool, caps: bool, groups: Groups) -> None:
        (num_rows, num_heads, _), (num_keys, num_kv_heads, _), dtype = q.shape, k.shape, q.dtype.name
        dq_dtype, self.dkv_dtype = grads
        shape, most = (dq_accum_shape(num_rows, n, row, deterministic) for n in (num_heads, most_heads(groups)))
        self.dq_accum = plan.buffer("dq_accum", shape, np.float32, most)
        stats, self.delta = _delta(row, q, v, plan, self.dq_accum, groups)
        sizes = tuple(map(np.int32, (num_rows, num_keys, padded_rows(num_rows), num_heads // num_kv_heads)))
        tiles = row.backward_for(gpu.shared_bytes)
        main = compiler.kernel(*row.thd_attn_bwd(dtype, self.dkv_dtype.name, not deterministic, tiles, caps))
        self.mains = [[Launch(
            main, (orders.shape[1], num_kv_heads), 2 * tiles.tile_n * tiles.column_warps,
            (stats, self.dq_accum, plan.key_ranges, plan.query_ranges, orders[1], *sizes))]
            for orders in _parts(plan, in_two)]
        self.dq = None if not deterministic else Launch(
            compiler.kernel(*row.thd_attn_bwd_dq(dtype, dq_dtype, caps)),
            (-(-num_rows // row.backward_dq.tile_m), num_heads), 32 * row.backward_dq.warps,
            (stats, plan.key_ranges, plan.query_ranges, *sizes))
        self.round_dq = Launch(
            compiler.kernel(*row.thd_attn_round(dq_dtype)), (-(-q.size // 2048),), 256, (np.uint64(q.size // 8),))

    def new_shares(self, k: Array, v: Array) -> Sequence[Array]:
        """Arrays for dk and dv."""
        return [launch.empty(x.shape, self.dkv_dtype) for x in (k, v)]

    def __call__(self, call: _Call, plan: Plan, halfway: Halfway | None) -> None:
        inputs = call.q, call.k, call.v, call.dout

        def arguments() -> tuple[Any, ...]:
            return *inputs, *map(np.uint64, call.addresses(plan)), _homes_of(*call.homes), call.logits

        _in_turn(self.mains, call, arguments, halfway)
        if self.dq is None:
            self.round_dq.launch_as(call.key, lambda: (call.dq, self.dq_accum, np.float32(call.softmax_scale)))
        else:
            self.dq.launch_as(call.key, lambda: (*inputs, call.dq, call.logits))


def _parts(plan: Plan, in_two: bool) -> list[Array]:
    """The orders of all tiles of keys; or of those that have rows of other ranks, and of the others."""
    tiles = plan.arrays.key_tiles
    return parts_of(tiles, ~plan.foreign_tiles[1]) if in_two else [tiles]


def _in_turn(mains: Sequence[Sequence[Launch]], call: _Call, arguments: Callable[[], tuple[Any, ...]],
             halfway: Halfway | None) -> None:
    """What makes dk and dv, and after the first of it `halfway`."""
    for number, launches in enumerate(mains):
        for run in launches:
            run.launch_as(call.key, arguments)
        if number == 0 and halfway is not None:
            halfway(*call.shares)


def _homes_of(of: bytes, places: int) -> Any:
    """A OWNERS, from the bytes of a PARTIALS."""
    return np.array((np.frombuffer(of, PARTIALS)["of"][0], places), OWNERS)[()]


def _packs_of(splits: list[tuple[int, float]], plan: Plan) -> list[tuple[int, Any]]:
    """Splits, and the PACK_FILTER of the packs that they are for: of several choices the GPU takes one."""
    if len(splits) == 1:
        return [(splits[0][0], np.zeros((), PACK_FILTER)[()])]
    pairs, before, packs = pairs_of(plan).data.ptr, 0, []
    for num_splits, most in splits:
        to = 2**64 - 1 if most == math.inf else int(most * plan.key_rows) + 1
        packs.append((num_splits, np.array((pairs, before, to), PACK_FILTER)[()]))
        before = to
    return packs


def _delta(row: Tiles, q: Array, v: Array, plan: Plan, cleared: Array, groups: Groups) -> tuple[Array, Launch]:
    """(stats, the launch that fills it and sets `cleared` to zero); see thd_attn_delta."""
    (num_rows, num_heads, _), stats_rows = q.shape, padded_rows(len(q))
    stats = plan.buffer("stats", stats_shape(num_rows, num_heads), np.float32,
                        stats_shape(num_rows, most_heads(groups)))
    blocks = -(-stats_rows * num_heads * lanes_of(v.shape[2]) // 256)
    return stats, Launch(
        compiler.kernel(*row.thd_attn_delta(q.dtype.name)), (blocks,), 256,
        (plan.key_ranges, stats, cleared, np.uint64(-(-cleared.size // 4)),
         *map(np.int32, (num_rows, stats_rows, num_heads, launch.row_heads(q)))))


def _dk_dv(dkv: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """dk and dv, of which one follows the other in memory."""
    return dkv[: k.size].reshape(k.shape), dkv[k.size :].reshape(v.shape)


def without_padding(
    arrays: Sequence[Array], names: Sequence[str], plan: Plan, most_heads: int | None = None
) -> list[Array]:
    """Copies of two arrays whose padding rows are 0, as 0 * NaN would spread through a product.

    most_heads: of those whose copies lie in one memory, one after another.
    """
    rooms = [x.shape if most_heads is None else (len(x), most_heads, x.shape[2]) for x in arrays]
    copies = [plan.buffer(name, x.shape, x.dtype, room) for name, x, room in zip(names, arrays, rooms, strict=True)]
    order = plan.once("local_order", lambda: cupy.arange(plan.local_rows, dtype=np.int32))
    reorder(False, copies, [[x] for x in arrays], order, plan.key_ranges)
    return copies
