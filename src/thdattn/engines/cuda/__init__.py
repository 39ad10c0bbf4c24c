"""The CUDA engine: launchers of the kernels, with the functions of the NumPy engine and the same arguments.

Everything runs on CuPy's current stream. No call waits for the GPU or copies from it, so a CUDA graph can capture it.
Results are new arrays, because a layer's output must outlive the next layer's call. Work buffers belong to the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thdattn.engines.cuda import launch, scheduler
from thdattn.engines.cuda.backward import attn_bwd, plan_backward, rounded, without_padding
from thdattn.engines.cuda.decode import attn_decode, cache_append, cache_fill
from thdattn.engines.cuda.forward import attn_fwd
from thdattn.engines.cuda.launch import capture, empty, free_bytes, from_user, in_place
from thdattn.engines.cuda.plan import enter, nan_if_invalid, plan_arrays, plan_buffers
from thdattn.engines.cuda.rows import add_partials, pack_rows, place_rows, to_rank_order, to_sequence_order
from thdattn.engines.cuda.softcap import sinks_grad
from thdattn.engines.cuda.workspace import backward_buffers, forward_buffers
from thdattn.kernels.configs import TILES

if TYPE_CHECKING:
    from thdattn.engines import Engine, cuda

    _engine: Engine = cuda  # a type checker compares this module with the protocol

name = "cuda"
device = "cuda"
dtypes = ("float16", "bfloat16")
head_dims = tuple(TILES)


def tiles(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Return the rows per query tile and per key tile of the kernels for these head dims."""
    gpu, dims = launch.this_gpu(), (head_dim, v_head_dim)
    backward = TILES[dims].backward_sm90 if gpu.sm90 else scheduler.portable_backward(gpu, dims)
    return scheduler.forward_tiles(gpu, dims).tile_m, backward.tile_n
