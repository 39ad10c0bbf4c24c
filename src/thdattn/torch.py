"""Packed attention in PyTorch: tensors in and out without a copy, and gradients by torch's autograd.

    import thdattn.torch

    out = thdattn.torch.varlen_attention(q, k, v, cu_seqlens, cu_seqlens, causal=True)

Everything runs on torch's current stream. Only this module and thdattn.comm's ranks of torch.distributed import torch.

torch.compile(fullgraph=True) takes `attention`, `varlen_attention` and the module, forward and backward, as custom
operators. A plan enters a compiled graph by its handle, an input. So another plan of as many rows compiles nothing
again. Another number of rows compiles once, for any number, as dynamic shapes do. Limits of compiled graphs:

* One host tensor owns what forward keeps, and autograd saves it. Saved-tensor hooks that copy host tensors, such as
  save_on_cpu(pin_memory=True), lose it, and the backward raises.
* A layer that torch.utils.checkpoint computes again inside a graph needs its plan: hold it until the backward is done.
* torch captures no launch of thdattn in a CUDA graph of its own, and no graph can be exported to another process.
* All ranks compile the same function, as collective calls come in the order of its graph.
* An error that is found while torch traces has torch's type, and the message in its text.

NOTE: results on a GPU lie in CuPy's memory, of which Tensor.record_stream knows nothing. Whoever uses one on another
stream keeps it until that stream is done.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import torch

from thdattn import varlen
from thdattn.arguments import check_kind, found
from thdattn.attention import CPAttention, Saved
from thdattn.comm import Comm, from_torch
from thdattn.packing import PackedBatch
from thdattn.plan.handles import give_handle, owner_of, wrap_handles
from thdattn.plan.plan import Plan
from thdattn.sharding import Sharding


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: CPAttention, plan: Plan, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention of this rank's rows over the keys of all ranks, with gradients. Collective in both directions.

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
        RuntimeError: derivatives other than first ones by torch.autograd are asked for, here or in the backward.
    """
    check_kind("attn", attn, CPAttention, "pass the one that the plan is from")
    q, k, v, sinks = _checked(q, k, v, sinks, "CPAttention.forward")
    if torch.compiler.is_compiling():
        check_kind("plan", plan, Plan, "make it with attn.plan(batch)")
        return _traced(q, k, v, sinks, attn._handle, plan._handle)
    return _Attention.apply(q, k, v, sinks, attn, plan)


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
    """Compute thdattn.varlen_attention with gradients: see there for the arguments, as of flash_attn_varlen_func.

    Lengths on the host (a tensor on the CPU, or a NumPy array) are planned once. They cost less than those on the GPU,
    which are planned anew at each call.

    Returns:
        (total_q, num_heads, v_head_dim), a new tensor. It has first derivatives only.

    Raises:
        TypeError, ValueError, RuntimeError: as thdattn.varlen_attention and, for other derivatives, as attention.
    """
    varlen.refuse_unsupported(dropout_p, alibi_slopes, return_attn_probs, block_table)
    q, k, v, sinks = _checked(q, k, v, sinks, "thdattn.varlen_attention")
    has_sinks = sinks is not None
    options = max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, deterministic, softcap, has_sinks
    if torch.compiler.is_compiling():
        offsets = _as_offsets(cu_seqlens_q), None if cu_seqlens_k is cu_seqlens_q else _as_offsets(cu_seqlens_k)
        return _traced(q, k, v, sinks, *_plan_op(q.detach(), k.detach(), v.detach(), *offsets, *options))
    attn, plan = _planned(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
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
        """Plan one batch for this rank on torch's current stream; collective. See CPAttention.plan."""
        on_gpu = self.attn.engine == "cuda"
        with on_torch_stream(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")):
            return self.attn.plan(batch, sharding)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute attention of this rank's rows over the keys of all ranks; see thdattn.torch.attention. Collective."""
        return attention(q, k, v, self.attn, plan, sinks)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallelAttention:
        """Return a copy that shares the attention and its ranks, for copies of models such as averaged weights."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo | {id(self.attn): self.attn}))
        return twin

    def extra_repr(self) -> str:
        """Return what print shows of the module."""
        return f"num_heads={self.attn.num_heads}, head_dim={self.attn.head_dim}, comm={self.attn.comm!r}"


def _as_comm(group: Any) -> Comm:
    if isinstance(group, Comm):
        return group
    if group is not None and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise TypeError(f"group is {found(group)}; wanted a Comm or a process group of torch.distributed; pass "
                        f"thdattn.comm.init(), or thdattn.comm.from_torch() after init_process_group()")
    return from_torch(group)


def _planned(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *options: Any
) -> tuple[CPAttention, Plan]:
    """Return the attention and the plan of a call of varlen_attention."""
    cu_seqlens_q, cu_seqlens_k = (
        x.resolve_neg().numpy()
        if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.dtype == torch.int32 else x
        for x in (cu_seqlens_q, cu_seqlens_k)
    )
    with on_torch_stream(q.device):
        return varlen.planned(q, k, v, cu_seqlens_q, cu_seqlens_k, varlen.Options(*options))


_KEPT = ("q", "k", "v", "out", "lse", "sinks")  # of Saved, as tensors


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, attn: CPAttention, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """Return out, lse and what else the backward needs, on torch's current stream."""
    with on_torch_stream(q.device):
        given = None if sinks is None else sinks.detach()
        result, saved = attn.forward(q.detach(), k.detach(), v.detach(), plan, sinks=given)
        out, lse = as_tensor(result), as_tensor(saved.lse)
    return out, lse, replace(saved, q=None, k=None, v=None, out=None, lse=None, sinks=None)


def _backward(attn: CPAttention, saved: Saved, dout: torch.Tensor, *tensors: Any) -> list[torch.Tensor]:
    """Return dq, dk, dv, and dsinks for an attention with sinks; tensors: in the order of _KEPT."""
    kept = [(name, x) for name, x in zip(_KEPT, tensors, strict=True) if x is not None]
    with on_torch_stream(dout.device):
        arrays = {name: attn._engine.from_user(name, x.detach()) for name, x in kept}
        return [as_tensor(x) for x in attn.backward(dout.detach().resolve_neg(), replace(saved, **arrays))]


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, attn: CPAttention, plan: Plan) -> torch.Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))  # here, so that a copy serves both directions
        out, lse, ctx.saved = _forward(q, k, v, sinks, attn, plan)
        # Arrays are torch's to keep: it sees changes in place, frees them after the backward, may offload them.
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.attn = attn
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        _refuse_transforms(dout)
        # With create_graph a function of its own, which costs 10 us; else nobody can differentiate what it returns.
        run = _Gradients.apply if torch.is_grad_enabled() else partial(_Gradients.forward, None)
        return *run(ctx.attn, ctx.saved, dout, *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        _refuse("of forward mode")


class _Gradients(torch.autograd.Function):  # type: ignore[misc]
    """The backward as a function of all that it depends on, so that who differentiates it again meets a refusal.

    torch's once_differentiable looks at dout alone: with one that is constant, gradients would count as constants too.
    """

    @staticmethod
    def forward(ctx: Any, attn: CPAttention, saved: Saved, dout: torch.Tensor, *tensors: Any) -> tuple[Any, ...]:
        dq, dk, dv, *dsinks = _backward(attn, saved, dout, *tensors)
        return dq, dk, dv, *(dsinks or [None])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        _refuse("of second order")


# --- the same as operators, which torch.compile takes for what they are -----------------------------------------


def _traced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, attn: torch.Tensor,
    plan: torch.Tensor,
) -> torch.Tensor:
    """Compute attention in code that torch.compile traces; attn and plan are handles."""
    out, _, _ = _attention_op(q.contiguous(), k.contiguous(), v.contiguous(), sinks, attn, plan)
    return cast("torch.Tensor", out)


def _as_offsets(x: Any) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.int32 if isinstance(x, (list, tuple)) else None)


class _Owning(np.ndarray[Any, Any]):
    """An array that keeps an object alive, as long as a tensor that shares its memory lives."""

    owner: Any


def _token(owner: Any) -> torch.Tensor:
    """Return the handle of an object as a tensor that keeps it alive."""
    array = owner._handle.numpy().copy().view(_Owning)
    array.owner = owner
    return torch.from_numpy(array)


def _as_handle(array: Any) -> torch.Tensor:
    with torch.inference_mode(False):  # so that graphs of either mode take it
        return torch.from_numpy(array)


wrap_handles(_as_handle)


@dataclass(frozen=True, eq=False, repr=False)
class _Kept:
    """Objects that the backward needs, beside tensors."""

    attn: CPAttention
    saved: Saved
    _handle: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        give_handle(self)


def _owner(name: str, token: torch.Tensor, remedy: str) -> Any:
    found = owner_of(int(token))
    if found is None:
        raise RuntimeError(f"{name} of a compiled attention lives no longer, wanted one until the backward; {remedy}")
    return found


_TAGS = (torch.Tag.cudagraph_unsafe,)  # a replay would run another plan's launches


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "thdattn::plan_varlen", mutates_args=(), tags=_TAGS,
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, "
           "SymInt? max_seqlen_k, float? softmax_scale, bool causal, int[] window_size, bool deterministic, "
           "float softcap, bool sinks) -> (Tensor, Tensor)",
)
def _plan_op(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    attn, plan = _planned(q, k, v, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, *options)
    return _token(attn), _token(plan)


@_plan_op.register_fake  # type: ignore[untyped-decorator]
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_token(q), _fake_token(q)


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "thdattn::attention", mutates_args=(), tags=_TAGS,
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor attn, Tensor plan) -> (Tensor, Tensor, Tensor)",
)
def _attention_op(
    q: Any, k: Any, v: Any, sinks: Any, attn: torch.Tensor, plan: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layer, remedy = _owner("the CPAttention", attn, "keep the module"), "hold the plan until the backward is done"
    out, lse, saved = _forward(q, k, v, sinks, layer, _owner("the plan", plan, remedy))
    return out, lse, _token(_Kept(layer, saved))


@_attention_op.register_fake  # type: ignore[untyped-decorator]
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=_exact(q))
    return q.new_empty((*q.shape[:2], v.shape[2])), lse, _fake_token(q)


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "thdattn::attention_backward", mutates_args=(), tags=_TAGS,
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, Tensor saved) -> "
           "Tensor[]",
)
def _backward_op(dout: torch.Tensor, *kept: Any) -> list[torch.Tensor]:
    *tensors, token = kept
    saved = _owner("what forward kept", token, "have saved_tensors_hooks leave tensors on the host as they are")
    return _backward(saved.attn, saved.saved, dout, *tensors)


@_backward_op.register_fake  # type: ignore[untyped-decorator]
def _(dout: torch.Tensor, *kept: Any) -> list[torch.Tensor]:
    q, k, v, _, _, sinks, _ = kept
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, sinks) if x is not None]


def _fake_token(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((1,), dtype=torch.int64, device="cpu")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    (q, k, v, sinks, _, _), (out, lse, saved) = inputs, output
    ctx.save_for_backward(q, k, v, out, lse, sinks, saved)
    ctx.mark_non_differentiable(lse, saved)


def _differentiate(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    dq, dk, dv, *dsinks = _backward_op(dout, *ctx.saved_tensors)
    return dq, dk, dv, *(dsinks or [None]), None, None


_attention_op.register_autograd(_differentiate, setup_context=_save)
_backward_op.register_autograd(lambda *_: _refuse("of second order"))
for _op in (_attention_op, _backward_op):
    _op.register_vmap(lambda *_: _refuse("by a transform of torch.func, or of several gradients at a time"))


def _refuse(which: str) -> NoReturn:
    raise RuntimeError(
        f"attention was asked for derivatives {which}, wanted first ones by torch.autograd alone; compute these with "
        f"torch.nn.functional.scaled_dot_product_attention, one sequence at a time"
    )


def _refuse_transforms(*tensors: torch.Tensor) -> None:
    """Raise for tensors of torch.func or is_grads_batched, which have no memory that kernels could read."""
    if torch._C._are_functorch_transforms_active() or (
        not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
    ):
        _refuse("by a transform of torch.func, or of several gradients at a time")


def _checked(q: Any, k: Any, v: Any, sinks: Any, otherwise: str) -> tuple[Any, ...]:
    """Return the tensors with lazily negated views resolved, as DLPack does not tell of them.

    Raise for arguments that autograd cannot follow; `otherwise` names the function that takes other arrays.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if not isinstance(x, torch.Tensor) and not (name == "sinks" and x is None):
            raise TypeError(f"{name} is {found(x)}; wanted a torch.Tensor; use {otherwise} for other arrays")
        if x is not None and x.layout != torch.strided:
            raise TypeError(f"{name} has layout {x.layout}, wanted torch.strided, rows one after the other; pass a "
                            f"nested one's values(), or to_dense() of a sparse one")
    if sinks is not None and not sinks.is_floating_point():
        raise TypeError(f"sinks is {sinks.dtype}, wanted a float dtype; cast it")
    _refuse_transforms(q, k, v)
    return *(x.resolve_neg() for x in (q, k, v)), None if sinks is None else sinks.resolve_neg().to(_exact(q))


def _exact(q: torch.Tensor) -> torch.dtype:
    """Return the dtype of logits and their sums."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def as_tensor(array: Any) -> torch.Tensor:
    """Return a result of thdattn as a tensor that shares its memory; also NumPy's bfloat16, which speaks no DLPack.

    Args:
        array: NumPy or CuPy array.
    """
    if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


@contextmanager
def on_torch_stream(device: torch.device) -> Iterator[None]:
    """Make torch's current stream and device CuPy's too, on which thdattn runs; do nothing for the CPU.

    Without it the libraries share a stream only as long as both stay on the default one, in one thread: autograd has
    threads of its own, and each has its own current stream. On two streams each library could hand out memory again
    that the other still reads.
    """
    if device.type != "cuda":
        yield
        return
    cupy = varlen.usable_cupy()
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), stream:
        yield
