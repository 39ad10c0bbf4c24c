"""The attention forward: thd_attn_fwd_sm90 on Hopper, thd_attn_fwd elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from thdattn.engines.cuda import launch, scheduler
from thdattn.engines.cuda.launch import Array, Gpu, Launch, layout
from thdattn.engines.cuda.plan import nan_if_invalid, parts_of
from thdattn.engines.cuda.softcap import kind_of, logits_of
from thdattn.jit import compiler
from thdattn.jit.structs import FORWARD_SIZE, KV_PARTIALS
from thdattn.kernels.configs import TILES, Tiles
from thdattn.kernels.hopper_configs import ForwardSm90
from thdattn.kernels.instances import Kind
from thdattn.plan.memory import Bytes, Layer, num_bytes
from thdattn.plan.plan import Plan


def attn_fwd(
    q: Array, k: Array, v: Array, plan: Plan, softmax_scale: float, return_max_logit: bool,
    into: tuple[Array, Array] | None = None, merge: bool = False, halfway: Callable[[], Any] | None = None,
    softcap: float = 0.0, sinks: Array | None = None, groups: Sequence[int] = (),
) -> tuple[Array, Array, Array | None]:
    """Attention of this rank's query rows over the whole key buffer; see reference.attn_fwd."""
    num_rows, num_heads, _ = q.shape
    out, lse = into or (launch.empty((num_rows, num_heads, v.shape[2]), q.dtype),
                        launch.empty((num_heads, num_rows), np.float32))
    if not (num_rows and len(k)):  # no tiles to launch a kernel for
        if halfway is not None:
            halfway()
        if not merge:
            out[...], lse[...] = 0, -np.inf
            nan_if_invalid(plan, out, lse)
        return out, lse, cupy.full(num_heads, -np.inf, np.float32) if return_max_logit else None
    if not launch.this_gpu().sm90 and not q.flags.c_contiguous:  # the portable kernel takes whole rows
        whole = (cupy.ascontiguousarray(out), lse) if merge else None
        *results, max_logit = attn_fwd(
            cupy.ascontiguousarray(q), k, v, plan, softmax_scale, return_max_logit, whole, merge, halfway, softcap,
            sinks, groups)
        for x, result in zip((out, lse), results, strict=True):
            x[...] = result
        return out, lse, max_logit
    kind = kind_of(softcap, sinks)
    (*first, last), boxes, max_logits = plan.once(
        ("forward", *layout(q, k, v), merge, halfway is None, kind, groups),
        lambda: _forward(q, k, v, plan, "float32" if merge else q.dtype.name, kind, halfway is not None,
                         max(groups, default=k.shape[1]) * (num_heads // k.shape[1])))

    def arguments() -> tuple[Any, ...]:
        rows = num_rows, len(k), len(v)
        inputs = launch.tensor_maps((q, k, v), rows, boxes, l2_bytes=128) if boxes else (q, k, v)
        return *inputs, out, lse, logits_of(softmax_scale, softcap), launch.NONE if sinks is None else sinks

    key = (softmax_scale, softcap, k.shape, k.strides, v.strides,
           *[x.data.ptr for x in (q, k, v, out, lse)], None if sinks is None else sinks.data.ptr)
    for run in first:
        run.launch_as(key, arguments)
    if halfway is not None:
        halfway()
    last.launch_as(key, arguments)
    return out, lse, max_logits.max(axis=(0, 2)) if return_max_logit else None


def forward_bytes(plan: Plan, layer: Layer) -> Bytes:
    """Bytes of the work buffers of attn_fwd by name; see reference.forward_bytes."""
    shares, (width, v_width) = [heads for heads, _ in layer.shares], plan.head_dims
    row, gpu = TILES[plan.head_dims], launch.this_gpu()
    made = {"logits of tiles": num_bytes(_max_logits(row, plan, max(shares)), np.float32)}
    merges = plan.keys_of is not None  # a slice of a ring
    if gpu.sm90 and not merges and scheduler.divides_keys(gpu, row.forward_sm90, plan, layer.num_heads):
        most = scheduler.most_pieces(gpu, plan.num_tiles[0], layer.num_heads)
        made["shares of tiles"] = num_bytes(_shares(row, most, max(shares)), np.float32)
        made["pieces of tiles"] = sum(
            num_bytes(_pieces(gpu, most, plan.num_tiles[0], heads), np.int32) for heads in shares)
    if len(layer.groups) > 1 and not gpu.sm90:
        made["a group's q, out and lse"] = (
            plan.local_rows * max(shares) * ((width + v_width) * layer.dtype.itemsize + 4))
    return made


def _max_logits(row: Tiles, plan: Plan, num_heads: int) -> tuple[int, int, int]:
    """A logit of every tile, head and warp."""
    tiles = row.forward_sm90 if launch.this_gpu().sm90 else row.forward
    return plan.num_tiles[0], num_heads, tiles.warps


def _shares(row: Tiles, most_pieces: int, num_heads: int) -> tuple[int, int]:
    """Of every head of the pieces of tiles whose keys are divided."""
    return most_pieces * num_heads, row.partial_floats


def _pieces(gpu: Gpu, most_pieces: int, num_tiles: int, num_heads: int) -> tuple[int]:
    """How many there are, those of tiles that are divided and of the others, and what is read beyond them."""
    return (1 + most_pieces + num_tiles + -(-gpu.multiprocessors // num_heads),)


def _forward(
    q: Array, k: Array, v: Array, plan: Plan, out_dtype: str, kind: Kind, in_two: bool, most_heads: int
) -> tuple[list[Launch], tuple[int, ...], Array]:
    """The launches of the forward, the rows of the boxes that they load by tensor map (none: by pointer), max_logits.

    in_two: of the tiles that see no key of other ranks, and of the others.
    most_heads: query heads of the largest of the groups that share work buffers.
    """
    gpu, row, dtype = launch.this_gpu(), TILES[q.shape[2], v.shape[2]], q.dtype.name
    num_rows, num_heads, _ = q.shape
    group, tiles = num_heads // k.shape[1], row.forward_sm90 if gpu.sm90 else row.forward
    shape, most = (_max_logits(row, plan, n) for n in (num_heads, most_heads))
    max_logits = plan.buffer("logits of tiles", shape, np.float32, most)
    parts = parts_of(plan.arrays.query_tiles, plan.foreign_tiles[0]) if in_two else [plan.arrays.query_tiles]

    if isinstance(tiles, ForwardSm90):
        boxes = tiles.tile_m, tiles.keys(kind), tiles.keys(kind)
        block, together = 128 * (1 + tiles.consumers), max(group, tiles.together)
        divides = (out_dtype == dtype and not kind.caps  # which spill beside it
                   and scheduler.divides_keys(gpu, tiles, plan, launch.row_heads(q)))
        kernel = compiler.kernel(*row.thd_attn_fwd_sm90(dtype, out_dtype, kind, divides))

        def hopper(orders: Array) -> Launch:
            num_tiles, how = orders.shape[1], (1, num_heads)
            if divides:
                order, divided = _divided(gpu, row, plan, orders[1], num_heads, launch.row_heads(q), most_heads)
                blocks = gpu.multiprocessors if num_tiles else 0
            else:
                (order, how), divided = scheduler.schedule(gpu, plan, orders, num_heads, together), _WHOLE
                blocks = min(gpu.multiprocessors, num_tiles * num_heads)
            size = np.array((num_rows, num_tiles, num_heads, group, *how, launch.row_heads(q)), FORWARD_SIZE)[()]
            return Launch(kernel, (blocks,), block,
                          (max_logits, plan.key_ranges, order, cupy.zeros(1, np.int32), divided, size))

        return [hopper(orders) for orders in parts], boxes, max_logits
    kernel = compiler.kernel(*row.thd_attn_fwd(dtype, out_dtype, kind))
    sizes = tuple(map(np.int32, (num_rows, len(k), group)))
    runs = [Launch(kernel, (orders.shape[1], num_heads), 32 * tiles.warps,
                   (max_logits, plan.key_ranges, plan.query_ranges, orders[1], *sizes)) for orders in parts]
    return runs, (), max_logits


_WHOLE = np.zeros((), KV_PARTIALS)[()]


def _divided(
    gpu: Gpu, row: Tiles, plan: Plan, order: Array, num_heads: int, of_heads: int, most_heads: int
) -> tuple[Array, Any]:
    """Pieces of some tiles, longest first, in the order of work, and where their shares are added.

    of_heads: of the layer, of which the launch does num_heads, as the order may have some of the plan's tiles. All of
    both say how tiles are divided. most_heads: of a launch that shares memory with this one.
    """
    every = plan.arrays.query_tiles[1]
    most = scheduler.most_pieces(gpu, len(every), of_heads)
    shares = plan.buffer("shares of tiles", _shares(row, most, num_heads), np.float32, _shares(row, most, most_heads))
    arrived = plan.once(("arrived", shares.shape), lambda: cupy.zeros(len(shares) * row.forward_sm90.warps, np.uint32))
    pieces = launch.empty(_pieces(gpu, most, len(order), num_heads), np.int32)
    args = pieces, plan.key_ranges, order, every, *map(np.int32, (
        plan.local_rows, len(order), len(every), of_heads, gpu.multiprocessors, most))
    plan.make(lambda: compiler.kernel(*row.thd_attn_split_kv_sm90())((1,), 1024, args))
    return pieces, np.array((shares.data.ptr, arrived.data.ptr), KV_PARTIALS)[()]
