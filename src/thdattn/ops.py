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
from thdattn.tiles import PLAN_KERNELS, REORDER_KERNELS, TILES, ForwardSm90

name = "cuda"
device = "cuda"
dtypes = ("float16", "bfloat16")
head_dims = tuple(TILES)

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
    forward = chosen.forward_sm90 if gpu.sm90 else chosen.forward
    return forward.tile_m, chosen.backward_for(gpu.shared_bytes).tile_n


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
    dual_chunk, queries, keys, _, _ = PLAN_KERNELS

    if sharding.strategy == "dual_chunk":
        rank_order = empty((cp_size * local_rows,), np.int32)
        _launch_rows(dual_chunk, rank_order.size, (rank_order, cu_seqlens_padded, seqs, np.int32(cp_size),
                                                   np.int32(local_rows), np.int32(batch.total_rows)))
    else:  # contiguous rows do not depend on the lengths
        rank_order = cupy.arange(cp_size * local_rows, dtype=np.int32)
        rank_order[batch.total_rows :] = -1
    rows = rank_order[cp_rank * local_rows : (cp_rank + 1) * local_rows]

    positions, key_ranges = empty((local_rows,), np.int32), empty((local_rows, 2), np.int32)
    _launch_rows(queries, local_rows, (positions, key_ranges, rows, cu_seqlens, cu_seqlens_padded, seqs,
                                       np.int32(local_rows), left, right))
    query_ranges = empty((batch.total_rows, 2), np.int32)
    _launch_rows(keys, batch.total_rows, (query_ranges, rows, cu_seqlens, cu_seqlens_padded, seqs,
                                          np.int32(local_rows), np.int32(batch.total_rows), left, right))
    return PlanArrays(rows, positions, key_ranges, query_ranges, rank_order,
                      _longest_first(key_ranges, tiles[0]), _longest_first(query_ranges, tiles[1]))


def _longest_first(ranges: Array, tile: int) -> Array:
    cost_kernel, order_kernel = PLAN_KERNELS[-2:]
    num_tiles = -(-len(ranges) // tile)
    order, cost = empty((2, num_tiles), np.int32)  # one array: a replayed graph writes cost as long as order lives
    _launch_rows(cost_kernel, 32 * num_tiles,
                 (cost, ranges, np.int32(len(ranges)), np.int32(tile), np.int32(num_tiles)))
    _launch_rows(order_kernel, 32 * num_tiles, (order, cost, np.int32(num_tiles)))
    return order


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
    (num_rows, num_heads, _), num_tiles = q.shape, len(plan.arrays.query_tiles)
    tiles = chosen.forward_sm90 if gpu.sm90 else chosen.forward
    max_logits = empty((num_heads, num_tiles * tiles.warps), np.float32)
    group = num_heads // k.shape[1]
    if isinstance(tiles, ForwardSm90):
        fixed = (max_logits, plan.key_ranges, plan.arrays.query_tiles, cupy.zeros(1, np.int32),
                 *map(np.int32, (num_rows, num_tiles, num_heads, group)))
        grid, block = (min(gpu.multiprocessors, num_tiles * num_heads),), 128 * (1 + tiles.consumers)
        kernel = jit.kernel(*chosen.forward_sm90_kernel(dtype))
        return _Launch(kernel, grid, block, fixed), (tiles.tile_m, tiles.tile_n, tiles.tile_n), max_logits
    fixed = (max_logits, plan.key_ranges, plan.query_ranges, plan.arrays.query_tiles,
             *map(np.int32, (num_rows, len(k), group)))
    kernel = jit.kernel(*chosen.forward_kernel(dtype))
    return _Launch(kernel, (num_tiles, num_heads), 32 * tiles.warps, fixed), (), max_logits


def attn_bwd(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan, softmax_scale: float,
    kv_grad_dtype: DTypeLike, deterministic: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of attn_fwd; dk and dv are this rank's share. See reference.attn_bwd.

    dq is summed by atomics in float32 and rounded once; `deterministic` computes it in a kernel of its own, in key
    order, for about 1.4 times the matrix products.
    """
    dq, dk, dv = empty(q.shape, q.dtype), empty(k.shape, kv_grad_dtype), empty(v.shape, kv_grad_dtype)
    key = ("backward", *_layout(q, k, v), dk.dtype, deterministic)
    launches = plan.once(key, lambda: _backward(q, k, v, plan, dk.dtype, deterministic))
    scale = np.float32(softmax_scale)
    launches.delta(out, dout, lse)
    if not deterministic:
        launches.dq_sum.fill(0)
    launches.main(q, k, v, dout, dk, dv, scale)
    if deterministic:
        launches.dq(q, k, v, dout, dq, scale)
    else:
        dq[...] = launches.dq_sum
    return dq, dk, dv


@dataclass(frozen=True)
class _Backward:
    """The launches of the backward; dq_sum, float32, is where `main` adds dq unless it is deterministic."""

    delta: _Launch
    main: _Launch
    dq: _Launch
    dq_sum: Array


def _backward(q: Array, k: Array, v: Array, plan: Plan, grad_dtype: np.dtype[Any], deterministic: bool) -> _Backward:
    gpu, chosen, dtype = _gpu(cupy.cuda.runtime.getDevice()), TILES[q.shape[2], v.shape[2]], q.dtype.name
    num_rows, num_heads, _ = q.shape
    tiles = chosen.backward_for(gpu.shared_bytes)
    stats = plan.buffer("stats", (2, num_heads, num_rows), np.float32)
    dq_sum = plan.buffer("dq_sum", (0,) if deterministic else q.shape, np.float32)
    sizes = tuple(map(np.int32, (num_rows, len(k), num_heads // k.shape[1])))
    lanes = 8 if v.shape[2] <= 64 else 16 if v.shape[2] <= 128 else 32
    return _Backward(
        delta=_Launch(jit.kernel(*chosen.delta_kernel(dtype)), (-(-num_rows * num_heads * lanes // 256),), 256,
                      (plan.key_ranges, stats, *map(np.int32, (num_rows, num_heads)))),
        main=_Launch(jit.kernel(*chosen.backward_kernel(dtype, grad_dtype.name, not deterministic, tiles)),
                     (len(plan.arrays.key_tiles), k.shape[1]), 2 * tiles.tile_n * tiles.split,
                     (stats, dq_sum, plan.key_ranges, plan.query_ranges, plan.arrays.key_tiles, *sizes)),
        dq=_Launch(jit.kernel(*chosen.dq_kernel(dtype)),
                   (-(-num_rows // (16 * chosen.dq_warps)), num_heads), 32 * chosen.dq_warps,
                   (stats, plan.key_ranges, plan.query_ranges, *sizes)),
        dq_sum=dq_sum,
    )


def _layout(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
    """What the launches of a plan depend on beside the plan."""
    return q.dtype, q.shape[1], k.shape[1], q.shape[2], v.shape[2]


# ------------------------------------------------------------------------------------------------ reorder


def to_sequence_order(k_ranks: Array, v_ranks: Array, plan: Plan) -> tuple[Array, Array]:
    """Gathered rows moved to sequence order, into buffers of the plan; rows that no local query sees become 0."""
    k, v = (plan.buffer(name, (plan.key_rows, *x.shape[1:]), x.dtype) for name, x in (("k", k_ranks), ("v", v_ranks)))
    _reorder(False, (k, k_ranks), (v, v_ranks), plan)
    return k, v


def to_rank_order(dk: Array, dv: Array, plan: Plan) -> tuple[Array, Array]:
    """Inverse of to_sequence_order, for the gradients; filler rows become 0."""
    rows = len(plan.rank_order)
    dk_ranks, dv_ranks = (plan.buffer(name, (rows, *x.shape[1:]), x.dtype)
                          for name, x in (("dk_ranks", dk), ("dv_ranks", dv)))
    _reorder(True, (dk_ranks, dk), (dv_ranks, dv), plan)
    return dk_ranks, dv_ranks


def _reorder(to_rank_order: bool, first: tuple[Array, Array], second: tuple[Array, Array], plan: Plan) -> None:
    """Each pair is (out, in); one launch moves both."""
    rows = len(plan.rank_order)
    args = [arg for out, source in (first, second)
            for arg in (out, source, np.int32(out.shape[1] * out.shape[2] * out.itemsize // 16))]
    jit.kernel(REORDER_KERNELS[to_rank_order])(
        (-(-rows // 8), 2), 256, (*args, plan.rank_order, plan.query_ranges, np.int32(rows))
    )
