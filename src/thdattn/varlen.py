"""Attention of packed sequences in one call on one rank, with the arguments of flash_attn_varlen_func.

A call plans its lengths, or finds the plan of an earlier call with the same lengths, and runs CPAttention. Use
CPAttention itself for several ranks, for plans that layers share, and for captured CUDA graphs.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from thdattn.arguments import as_bool, as_int, as_softcap, as_softmax_scale, lies_on_device, shown
from thdattn.attention import CPAttention, Saved
from thdattn.comm import SingleComm
from thdattn.engines.select import choose_engine
from thdattn.packing import PackedBatch
from thdattn.plan.plan import Plan

MAX_PLANS = 8  # kept with their work buffers, of which the backward's take 4 bytes per element of q


@dataclass(frozen=True, eq=False)
class VarlenSaved:
    """State that varlen_attention saves for varlen_attention_backward.

    Attributes:
        attn: the CPAttention that ran.
        saved: the Saved that its forward returned; saved.lse, for instance, is flash-attn's softmax_lse.
    """

    attn: CPAttention
    saved: Saved


def varlen_attention(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: None = None, *, return_saved: bool = False, sinks: Any = None,
) -> Any:
    """Compute attention of every sequence of a pack to its own keys, on this rank alone.

    Arguments have the names and the order of flash_attn_varlen_func, so that a call of it needs no change. With as many
    keys as queries, causal means what it always does. Else the last query of a sequence stands at its last key, and the
    others before it. A query that sees no key has output 0.

    Lengths on the host are planned once: the last MAX_PLANS plans are kept, by their content, for each thread and
    stream. Lengths on a GPU are planned anew at each call, as reading them would make the host wait. Wrong ones make
    the results NaN, and a later call raise.

    Args:
        q: (total_q, num_heads, head_dim), float16 or bfloat16 on a GPU; on the host also float32 or float64. NumPy,
            CuPy, or an array that speaks DLPack.
        k: (total_k, num_kv_heads, head_dim), dtype and device as q; query head h reads kv head
            h // (num_heads // num_kv_heads).
        v: (total_k, num_kv_heads, v_head_dim), the same.
        cu_seqlens_q: (num_seqs + 1,) int32, offsets of the sequences in q, from 0. Rows beyond the last have output 0.
        cu_seqlens_k: (num_seqs + 1,) int32, offsets of their keys in k and v; on the same side (host or GPU).
        max_seqlen_q, max_seqlen_k: not needed. Checked, if the lengths are on the host: none may be longer.
        softmax_scale: factor on q.k, > 0; head_dim**-0.5 by default.
        causal: a query sees no key after its own position, whatever the right side of the window.
        window_size: (left, right), how many keys before and after its own position a query sees; -1 = unlimited.
        softcap: > 0: logits are softcap * tanh(softmax_scale * q.k / softcap); 0: as they are.
        deterministic: bitwise the same gradients on every run.
        return_saved: also return what varlen_attention_backward needs.
        sinks: (num_heads,) float32 (float64 for float64 q), a logit of every query head that takes part in the softmax
            of its rows and has no value; None: none. varlen_attention_backward then returns its gradient too.
        dropout_p, alibi_slopes, return_attn_probs, block_table: not supported; the defaults alone are taken.

    Returns:
        out (total_q, num_heads, v_head_dim), a new array of NumPy or CuPy; with return_saved (out, saved). It goes on
        as jax.numpy.asarray(out), on a GPU jax.numpy.from_dlpack(out), and as thdattn.torch.as_tensor(out).

    Raises:
        TypeError: an argument of the wrong type, or arrays of different dtypes or devices.
        ValueError: an option that is not supported, shapes or lengths that do not fit together, or head dims that
            have no kernel.
        RuntimeError: arrays on a GPU that cannot be used, or a call on a stream that captures a CUDA graph.

    Source: flash_attn_varlen_func of FlashAttention-2, for the arguments and the mask.
    """
    refuse_unsupported(dropout_p, alibi_slopes, return_attn_probs, block_table)
    options = Options(max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, deterministic, softcap,
                      sinks is not None)
    attn, plan = planned(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    out, saved = attn.forward(q, k, v, plan, sinks=sinks)
    return (out, VarlenSaved(attn, saved)) if return_saved else out


def varlen_attention_backward(dout: Any, saved: VarlenSaved) -> tuple[Any, ...]:
    """Compute the gradients of varlen_attention.

    Args:
        dout: (total_q, num_heads, v_head_dim), gradient of out.
        saved: from varlen_attention(..., return_saved=True).

    Returns:
        (dq, dk, dv): new arrays, shapes and dtype of q, k, v; with sinks (dq, dk, dv, dsinks).

    Raises:
        TypeError: saved is none, or dout has the wrong dtype or device.
        ValueError: dout has the wrong shape.
    """
    if not isinstance(saved, VarlenSaved):
        raise TypeError(
            f"saved is a {type(saved).__name__}, wanted the second result of varlen_attention(..., return_saved=True)"
        )
    return saved.attn.backward(dout, saved.saved)


def refuse_unsupported(dropout_p: float, alibi_slopes: Any, return_attn_probs: bool, block_table: Any) -> None:
    """Raise ValueError for the options of flash_attn_varlen_func that have no kernels."""
    if not dropout_p and alibi_slopes is None and not return_attn_probs and block_table is None:
        return
    for name, found, default, remedy in (
        ("dropout_p", dropout_p, 0.0, "drop elsewhere"),
        ("alibi_slopes", alibi_slopes, None, "a window bounds the distance"),
        ("return_attn_probs", return_attn_probs, False, "return_saved=True has flash-attn's softmax_lse: saved.lse"),
        ("block_table", block_table, None, "the keys of a sequence lie in consecutive rows"),
    ):
        if found is not default and (default is None or found):
            raise ValueError(f"{name} is {shown(found)}, which is not supported, wanted {default}; {remedy}")


class Options(NamedTuple):
    """Options of varlen_attention that a plan and its attention are made for. sinks: there are some."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    causal: bool
    window: tuple[int, int]
    deterministic: bool
    softcap: float
    sinks: bool


class _Call(NamedTuple):
    """Properties of a call that its plan and attention depend on, beside the lengths; a key of the cache."""

    engine: str
    device: int
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: Any
    options: Options


def planned(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, options: Options
) -> tuple[CPAttention, Plan]:
    """Return the attention and the plan of a call of varlen_attention, whose arrays may be of any library.

    Arguments are checked when a plan is made; a call that finds its plan pays for a lookup only.
    """
    try:
        shapes = q.shape, k.shape, v.shape
        (rows, _, _), (key_rows, _, _), (_, _, _) = shapes
        left, right = options.window
    except (AttributeError, TypeError, ValueError):
        _refuse_kinds(q, k, v, options.window)
        raise
    on_gpu = not isinstance(q, np.ndarray) and lies_on_device("q", q)
    device, stream = _gpu_place() if on_gpu else (0, 0)
    # As plain Python values, which can be hashed and compared; checked here where they are none.
    max_q, max_k, scale, causal, _, deterministic, softcap, sinks = options
    causal = causal if type(causal) is bool else as_bool("causal", causal)
    options = Options(
        _int("max_seqlen_q", max_q), _int("max_seqlen_k", max_k),
        scale if scale is None or type(scale) is float else as_softmax_scale(scale), causal,
        (_int("window_size[0]", left), 0 if causal else _int("window_size[1]", right)),
        deterministic if type(deterministic) is bool else as_bool("deterministic", deterministic),
        softcap if type(softcap) is float else as_softcap(softcap), sinks,
    )
    call = _Call("cuda" if on_gpu else "reference", device, *shapes, q.dtype, options)
    offsets_q = _content("q", cu_seqlens_q, rows)
    offsets_k = offsets_q if cu_seqlens_k is cu_seqlens_q else _content("k", cu_seqlens_k, key_rows)
    if offsets_q is None or offsets_k is None:
        return _make(call, cu_seqlens_q, cu_seqlens_k)
    # Work buffers of a plan belong to one stream, and to one thread: two would launch between each other's kernels.
    return _kept(call, offsets_q, offsets_k, stream, threading.get_ident())


@functools.lru_cache(maxsize=MAX_PLANS)
def _kept(call: _Call, offsets_q: bytes, offsets_k: bytes, stream: int, thread: int) -> tuple[CPAttention, Plan]:
    cu_seqlens_q = np.frombuffer(offsets_q, np.int32)
    return _make(call, cu_seqlens_q, cu_seqlens_q if offsets_q == offsets_k else np.frombuffer(offsets_k, np.int32))


def _make(call: _Call, cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[CPAttention, Plan]:
    """Make the attention and the plan of a call; check what they do not check."""
    (rows, num_heads, head_dim), (key_rows, num_kv_heads, _), v_head_dim = call.q_shape, call.k_shape, call.v_shape[2]
    for name, shape, width in (("k", call.k_shape, head_dim), ("v", call.v_shape, v_head_dim)):
        if tuple(shape) != (key_rows, num_kv_heads, width):
            raise ValueError(
                f"{name} has shape {tuple(shape)}, wanted {(key_rows, num_kv_heads, width)}: the width of q in k, the "
                f"rows and heads of k in v; pass the keys and values of the same tokens"
            )
    options = call.options
    attn = _attention(call.engine, call.device, (num_heads, head_dim, num_kv_heads, v_head_dim),
                      str(call.dtype).removeprefix("torch."), options._replace(max_seqlen_q=None, max_seqlen_k=None))
    batch = _batch("q", cu_seqlens_q, rows, options.max_seqlen_q)
    key_batch = _batch("k", cu_seqlens_k, key_rows, options.max_seqlen_k)
    if cu_seqlens_k is cu_seqlens_q and key_rows == rows:
        return attn, attn.plan(batch, "contiguous")
    if (batch.num_seqs, batch.on_device) != (key_batch.num_seqs, key_batch.on_device):
        found = (f"{x.num_seqs} sequences on {'a GPU' if x.on_device else 'the host'}" for x in (batch, key_batch))
        raise ValueError(
            f"cu_seqlens_q, cu_seqlens_k have {' and '.join(found)}, wanted as many on one side; pass the lengths of "
            f"each sequence's queries and of its keys, 0 for none"
        )
    return attn, attn.plan(batch, "contiguous", key_batch=key_batch)


@functools.lru_cache(maxsize=64)
def _attention(
    engine: str, device: int, heads: tuple[int, int, int, int], dtype: str, options: Options
) -> CPAttention:
    *_, softmax_scale, causal, window, deterministic, softcap, sinks = options
    return CPAttention(SingleComm(), *heads, causal, window, softmax_scale, dtype, deterministic, engine,
                       softcap=softcap, sinks=sinks)


def _content(side: str, offsets: Any, rows: int) -> bytes | None:
    """Return the bytes of offsets on the host; None on a GPU, where comparing them would make the host wait."""
    if type(offsets) is np.ndarray and offsets.dtype == np.int32 and offsets.ndim == 1:
        return offsets.tobytes()
    batch = _batch(side, offsets, rows, None)
    return None if batch.on_device else batch.cu_seqlens.tobytes()


def _batch(side: str, offsets: Any, rows: int, max_seqlen: int | None) -> PackedBatch:
    """Return the batch of the queries or keys; errors say which."""
    name = f"cu_seqlens_{side}"
    try:
        batch = PackedBatch(offsets, total_rows=rows if lies_on_device(name, offsets) else None)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} of {rows} rows is refused: {error}") from error
    if batch.total_rows > rows:
        raise ValueError(
            f"{name} ends at {batch.total_rows}, but {side} has {rows} rows, wanted at most as many; pass the offsets "
            f"of the sequences in {side}"
        )
    batch = batch.padded_to(rows)
    if max_seqlen is not None and not batch.on_device and max_seqlen < batch.lengths.max(initial=0):
        raise ValueError(
            f"max_seqlen_{side} is {max_seqlen}, but {name} has a sequence of {batch.lengths.max()}; wanted "
            f"at least that; leave it out, as it is not needed"
        )
    return batch


def _int(name: str, value: Any) -> Any:
    """Return the value as an int, or None."""
    if value is None or type(value) is int:
        return value
    return as_int(name, value, "pass an int, and other options by name")


def _refuse_kinds(q: Any, k: Any, v: Any, window_size: Any) -> None:
    """Raise the error for an argument that is no packed array, or no window."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "shape"):
            raise TypeError(
                f"{name} is a {type(x).__name__}, wanted an array of NumPy, CuPy, or another library that speaks DLPack"
            ) from None
        if len(x.shape) != 3:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, wanted (tokens, heads, width); pass the sequences packed, one "
                f"after the other, without a batch dimension"
            ) from None
    raise TypeError(f"window_size is {shown(window_size)}, wanted (left, right); pass (-1, -1) for no window") from None


@functools.cache
def usable_cupy() -> Any:
    """Return CuPy if it has a usable GPU; else raise RuntimeError, which says what is missing."""
    choose_engine("cuda", SingleComm())
    import cupy

    return cupy


def _gpu_place() -> tuple[int, int]:
    """Return the current GPU and stream; raise RuntimeError in the capture of a CUDA graph.

    A graph would outlive the work buffers that the cache keeps.
    """
    cupy = usable_cupy()
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        raise RuntimeError(
            "varlen_attention was called on a stream that captures a CUDA graph, which would replay on work buffers "
            "that nobody keeps; capture CPAttention.forward with a plan that lives as long as the graph"
        )
    return cupy.cuda.runtime.getDevice(), stream.ptr
