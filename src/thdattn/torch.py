"""Packed attention in PyTorch: tensors in and out without a copy, and gradients by torch's autograd.

    import thdattn.torch

    out = thdattn.torch.varlen_attention(q, k, v, cu_seqlens, cu_seqlens, causal=True)

Everything runs on torch's current stream. Only this module and thdattn.comm's ranks of torch.distributed import torch.

NOTE: results on a GPU lie in CuPy's memory, of which Tensor.record_stream knows nothing: whoever uses one on another
stream keeps it until that stream is done.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from thdattn import varlen
from thdattn.attention import CPAttention
from thdattn.comm import Comm, from_torch
from thdattn.packing import PackedBatch
from thdattn.plan import Plan
from thdattn.sharding import Sharding


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile breaks its graph here
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: CPAttention, plan: Plan, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of this rank's rows over the keys of all ranks, with gradients. Collective, in both directions.

    Autograd runs the backward on the stream of the forward. NOTE: it has one thread per GPU, where simulated ranks
    would wait for each other for ever; torch.autograd.set_multithreading_enabled(False) lets each rank run its own.

    Args:
        q, k, v: as CPAttention.forward describes, on the plan's device. What is not contiguous is copied.
        attn: thdattn.CPAttention of this dtype and device.
        plan: from attn.plan, made while the same stream was current: see on_torch_stream.
        sinks: (num_heads,), of any float dtype, for an attention with sinks. Its gradient is this rank's share, to be
            summed over ranks as those of weights are.

    Returns:
        (local_rows, num_heads, v_head_dim), a new tensor. It has first derivatives only.

    Raises:
        TypeError, ValueError: as CPAttention.forward.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(x).__name__}, wanted a torch.Tensor; use CPAttention.forward for other arrays"
            )
    if sinks is not None:
        sinks = sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return _Attention.apply(q, k, v, sinks, attn, plan)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """thdattn.varlen_attention with gradients: see there for the arguments, which are flash_attn_varlen_func's.

    Lengths on the host (a tensor on the CPU, or a NumPy array) are planned once and cost less than those on the GPU,
    which are planned anew at each call.

    Returns:
        (total_q, num_heads, v_head_dim), a new tensor. It has first derivatives only.

    Raises:
        TypeError, ValueError, RuntimeError: as thdattn.varlen_attention.
    """
    varlen.refuse_unsupported(dropout_p, alibi_slopes, return_attn_probs, block_table)
    cu_seqlens_q, cu_seqlens_k = (
        x.numpy() if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for x in (cu_seqlens_q, cu_seqlens_k)
    )
    with on_torch_stream(getattr(q, "device", torch.device("cpu"))):
        attn, plan = varlen.planned(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
            deterministic, softcap, sinks is not None,
        )
    return attention(q, k, v, attn, plan, sinks)


class ContextParallelAttention(torch.nn.Module):  # type: ignore[misc]
    """CPAttention over the ranks of a torch.distributed group, as a module without parameters.

        comm = thdattn.comm.from_torch(group)
        layers = [thdattn.torch.ContextParallelAttention(comm, num_heads=32, head_dim=128) for _ in range(24)]
        plan = layers[0].plan(batch)  # of every layer with this mask and these head dims
        out = layers[0](q, k, v, plan)

    Args:
        group: the ranks: a torch.distributed group, None for all ranks; or a Comm, which layers then share. For the
            two levels of a cp_comm_type with a "+", (inner, outer) of such, see thdattn.CPAttention.
        num_heads, head_dim, options: as of thdattn.CPAttention; dtype may be torch's.

    Attributes:
        attn: the CPAttention.

    Raises:
        TypeError, ValueError, RuntimeError: as thdattn.CPAttention and thdattn.comm.from_torch.
    """

    def __init__(self, group: Any, num_heads: int, head_dim: int, **options: Any) -> None:
        super().__init__()
        comm: Any = tuple(map(_as_comm, group)) if isinstance(group, tuple) else _as_comm(group)
        if isinstance(options.get("dtype"), torch.dtype):
            options["dtype"] = str(options["dtype"]).removeprefix("torch.")
        self.attn = CPAttention(comm, num_heads, head_dim, **options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def plan(self, batch: PackedBatch, sharding: str | Sharding | None = None) -> Plan:
        """Plans one batch for this rank on torch's current stream; collective. See CPAttention.plan."""
        on_gpu = self.attn.engine == "cuda"
        with on_torch_stream(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")):
            return self.attn.plan(batch, sharding)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of this rank's rows over the keys of all ranks, see attention; sinks as there. Collective."""
        return attention(q, k, v, self.attn, plan, sinks)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelAttention:
        """A copy, as of a model for averaged weights, that shares the attention and its ranks."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo | {id(self.attn): self.attn}))
        return twin

    def extra_repr(self) -> str:
        """What print shows of the module."""
        return f"num_heads={self.attn.num_heads}, head_dim={self.attn.head_dim}, comm={self.attn.comm!r}"


def _as_comm(group: Any) -> Comm:
    return group if isinstance(group, Comm) else from_torch(group)


_KEPT = ("q", "k", "v", "out", "lse", "sinks")  # of Saved, as tensors


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, attn: CPAttention, plan: Plan) -> torch.Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))  # here, so that a copy serves both directions
        with on_torch_stream(q.device):
            given = None if sinks is None else sinks.detach()
            result, saved = attn.forward(q.detach(), k.detach(), v.detach(), plan, sinks=given)
            out, lse = as_tensor(result), as_tensor(saved.lse)
        # Arrays are torch's to keep: it sees changes in place, frees them after the backward, may offload them.
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.attn, ctx.saved = attn, replace(saved, q=None, k=None, v=None, out=None, lse=None, sinks=None)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        kept = [(name, x) for name, x in zip(_KEPT, ctx.saved_tensors, strict=True) if x is not None]
        with on_torch_stream(dout.device):
            arrays = {name: ctx.attn._engine.from_user(name, x.detach()) for name, x in kept}
            dq, dk, dv, *dsinks = map(as_tensor, ctx.attn.backward(dout.detach(), replace(ctx.saved, **arrays)))
        return dq, dk, dv, *(dsinks or [None]), None, None


def as_tensor(array: Any) -> torch.Tensor:
    """A result of thdattn as a tensor that shares its memory; NumPy's bfloat16 too, which speaks no DLPack.

    Args:
        array: NumPy or CuPy array.
    """
    if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


@contextmanager
def on_torch_stream(device: torch.device) -> Iterator[None]:
    """Makes torch's current stream and device CuPy's too, which thdattn runs on; nothing to do for the CPU.

    Without it the libraries share a stream only as long as both stay on the default one, in one thread: autograd has
    threads of its own, and what is current is so per thread. On two streams each library could hand out memory again
    that the other still reads.
    """
    if device.type != "cuda":
        yield
        return
    cupy = varlen.usable_cupy()
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), stream:
        yield
