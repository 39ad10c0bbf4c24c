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
from thdattn.tiles import PLAN_KERNELS, REORDER_KERNELS, TILES, Tiles

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
    if not isinstance(x, cupy.ndarray):
        if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__") or x.__dlpack_device__()[0] == DLPACK_CPU:
            raise TypeError(f"{name} is a {type(x).__name__} on the host, wanted an array on the GPU; "
                            f"copy it with cupy.asarray({name}), or use engine='reference'")
        x = cupy.from_dlpack(x)
    current = cupy.cuda.runtime.getDevice()
    if x.device.id != current:
        raise ValueError(f"{name} is on GPU {x.device.id}, wanted the current GPU {current}; copy it there, or "
                         f"make GPU {x.device.id} current with cupy.cuda.Device({x.device.id}).use()")
    x = cupy.ascontiguousarray(x)
    return x if x.data.ptr % 16 == 0 else x.copy()  # the kernels move 16 bytes at a time


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
        _launch_rows(dual_chunk, rank_order.size,
                     (rank_order, cu_seqlens_padded, seqs, np.int32(cp_size), np.int32(local_rows)))
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
    cost, order = empty((num_tiles,), np.int32), empty((num_tiles,), np.int32)
    _launch_rows(cost_kernel, 32 * num_tiles,
                 (cost, ranges, np.int32(len(ranges)), np.int32(tile), np.int32(num_tiles)))
    _launch_rows(order_kernel, 32 * num_tiles, (order, cost, np.int32(num_tiles)))
    return order


def _launch_rows(kernel: str, threads: int, args: tuple[Any, ...]) -> None:
    jit.kernel(kernel)((-(-threads // 256),), 256, args)


# ------------------------------------------------------------------------------------------------ attention


def attn_fwd(
    q: Array, k: Array, v: Array, plan: Plan, softmax_scale: float, return_max_logit: bool
) -> tuple[Array, Array, Array | None]:
    """Attention of this rank's query rows over the whole key buffer; see reference.attn_fwd."""
    gpu, chosen = _gpu(cupy.cuda.runtime.getDevice()), TILES[q.shape[2], v.shape[2]]
    out = empty((*q.shape[:2], v.shape[2]), q.dtype)
    lse = empty((q.shape[1], len(q)), np.float32)
    launch = _forward_sm90 if gpu.sm90 else _forward
    max_logits = launch(gpu, chosen, q, k, v, out, lse, plan, softmax_scale)
    if not return_max_logit:
        return out, lse, None
    if not len(q):
        return out, lse, cupy.full(q.shape[1], -np.inf, np.float32)
    return out, lse, max_logits.max(axis=1)


def _forward(
    gpu: _Gpu, chosen: Tiles, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan, softmax_scale: float
) -> Array:
    tiles, num_tiles, num_heads = chosen.forward, len(plan.arrays.query_tiles), q.shape[1]
    max_logits = plan.buffer("max_logits", (num_heads, num_tiles * tiles.warps), np.float32)
    jit.kernel(*chosen.forward_kernel(q.dtype.name))(
        (num_tiles, num_heads), 32 * tiles.warps,
        (q, k, v, out, lse, max_logits, plan.key_ranges, plan.query_ranges, plan.arrays.query_tiles,
         np.int32(len(q)), np.int32(len(k)), np.int32(num_heads // k.shape[1]), np.float32(softmax_scale)),
    )
    return max_logits


def _forward_sm90(
    gpu: _Gpu, chosen: Tiles, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan, softmax_scale: float
) -> Array:
    tiles, num_tiles, num_heads = chosen.forward_sm90, len(plan.arrays.query_tiles), q.shape[1]
    max_logits = plan.buffer("max_logits", (num_heads, num_tiles * tiles.warps), np.float32)
    if num_tiles:
        jit.kernel(*chosen.forward_sm90_kernel(q.dtype.name))(
            (min(gpu.multiprocessors, num_tiles * num_heads),), 128 * (1 + tiles.consumers),
            (tensor_map(q, tiles.tile_m), tensor_map(k, tiles.tile_n), tensor_map(v, tiles.tile_n),
             out, lse, max_logits, plan.key_ranges, plan.arrays.query_tiles,
             plan.buffer("work_counter", (1,), np.int32, zeroed=True), np.int32(len(q)), np.int32(num_tiles), np.int32(num_heads), np.int32(num_heads // k.shape[1]), np.float32(softmax_scale)),
        )
    return max_logits


def attn_bwd(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, plan: Plan, softmax_scale: float,
    kv_grad_dtype: DTypeLike, deterministic: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of attn_fwd; dk and dv are this rank's share. See reference.attn_bwd.

    dq is summed by atomics in float32 and rounded once; `deterministic` computes it in a kernel of its own, in key
    order, for about 1.4 times the matrix products.
    """
    gpu, chosen = _gpu(cupy.cuda.runtime.getDevice()), TILES[q.shape[2], v.shape[2]]
    backward, dtype, num_heads = chosen.backward_for(gpu.shared_bytes), q.dtype.name, q.shape[1]
    sizes = (np.int32(len(q)), np.int32(len(k)), np.int32(num_heads // k.shape[1]), np.float32(softmax_scale))

    stats = plan.buffer("stats", (2, num_heads, len(q)), np.float32)
    lanes = 8 if v.shape[2] <= 64 else 16 if v.shape[2] <= 128 else 32
    _launch_rows(chosen.delta_kernel(dtype)[0], len(q) * num_heads * lanes,
                  (out, dout, lse, plan.key_ranges, stats, np.int32(len(q)), np.int32(num_heads)))

    dq = empty(q.shape, q.dtype)
    dk, dv = empty(k.shape, kv_grad_dtype), empty(v.shape, kv_grad_dtype)
    dq_sum = dq if deterministic else plan.buffer("dq_sum", q.shape, np.float32)
    if not deterministic:
        dq_sum.fill(0)
    jit.kernel(*chosen.backward_kernel(dtype, dk.dtype.name, not deterministic, backward))(
        (len(plan.arrays.key_tiles), k.shape[1]), 2 * backward.tile_n * backward.split,
        (q, k, v, dout, stats, dq_sum, dk, dv, plan.key_ranges, plan.query_ranges, plan.arrays.key_tiles, *sizes),
    )
    if deterministic:
        jit.kernel(*chosen.dq_kernel(dtype))(
            (-(-len(q) // (16 * chosen.dq_warps)), num_heads), 32 * chosen.dq_warps,
            (q, k, v, dout, stats, dq, plan.key_ranges, plan.query_ranges, *sizes),
        )
    else:
        dq[...] = dq_sum
    return dq, dk, dv


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
