"""Ring context parallelism, forward and backward, written once for every engine and every comm: for memory's sake.

No rank ever holds the keys of all ranks. Those of one rank, a slice, travel round the ring, a hop a step, and each
rank computes its own query rows over the slice that it has while the next one is on its way. A slice is a key buffer
like any other, of which a query row sees one range: the plan has one plan per slice. What the slices give is merged in
float32 and rounded once.

In the backward the final lse makes every slice exact by itself: dq adds up in float32, and the sums of dk and dv follow
their slice one hop behind it. The own slice comes last, so that its sums come home meanwhile.

The bytes are those of an all-gather, in N - 1 hops; beside the own slice there are two of keys and values, and three of
float32 dk and dv.

Source: Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thdattn.comm import no_wait
from thdattn.methods.base import Call, Results, Tensors, lse_dtype
from thdattn.plan.memory import Bytes, Layer, Memory, num_bytes

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.plan.plan import Plan

Pair = Sequence[Any]  # keys and values of a slice, or their gradients


def forward(
    engine: Any, comm: Comm, plan: Plan, q: Any, k: Any, v: Any, call: Call, return_max_logit: bool
) -> Results:
    """Attention of this rank's query rows over the keys of all ranks; see base.py."""
    rows, num_heads, _ = q.shape
    dtype = lse_dtype(q.dtype)
    merged = plan.buffer("out in float32", (rows, num_heads, v.shape[2]), dtype)
    lse = engine.empty((num_heads, rows), dtype)
    merged[...], lse[...] = 0, _lse_without_keys(plan, call)
    max_logit = None
    for part, keys in _slices(engine, comm, plan, k, v):
        *_, logit = engine.attn_fwd(
            q, *keys, part, call.softmax_scale, return_max_logit, (merged, lse), merge=True, softcap=call.softcap)
        max_logit = logit if max_logit is None else np.maximum(max_logit, logit)
    out = engine.rounded(merged, q.dtype)
    if not return_max_logit:
        engine.nan_if_invalid(plan, out, lse)
        return Results(out, lse, None, None)
    engine.nan_if_invalid(plan, out, lse, max_logit)
    comm.all_reduce(max_logit, "max")
    return Results(out, lse, max_logit, None)


def backward(
    engine: Any, comm: Comm, plan: Plan, dout: Any, saved: Tensors, call: Call, at_once: bool
) -> tuple[Any, Callable[[], tuple[Any, Any]]]:
    """Gradients of `forward` for this rank's rows of q, k, v; see base.py. dk and dv are there with dq.

    The sums of a slice are made rank after rank, so that they are the same bits on every run.
    """
    q, k, v, out, lse, _ = saved
    dtype = lse_dtype(q.dtype)
    dq = plan.buffer("dq in float32", q.shape, dtype)
    dq[...] = 0
    slices = _slices(engine, comm, plan, k, v)
    own = next(slices)
    sums: Pair = []
    for step, (part, keys) in enumerate(chain(slices, [own])):
        received = _buffers(plan, "sums", keys, dtype) if sums else []
        wait = _pass_on(comm, sums, received)
        into = dq, _buffers(plan, f"shares {step % 2}", keys, dtype)
        _, *shares = engine.attn_bwd(
            dout, q, *keys, out, lse, part, call.softmax_scale, dtype, call.deterministic, into, merge=True,
            softcap=call.softcap)
        wait()
        if received:
            shares[0] += received[0]
            shares[1] += received[1]
        sums = shares
    dq, dk, dv = grads = [engine.rounded(x, q.dtype) for x in (dq, *sums)]
    engine.nan_if_invalid(plan, *grads)
    return dq, lambda: (dk, dv)


def memory(engine: Any, comm: Comm, plan: Plan, layer: Layer) -> Memory:
    """Bytes of all that forward and backward have made, for a layer with this plan, which needs no arrays.

    Without some integers per tile and slice.
    """
    part, dtype, hops = plan.slice_of(plan.cp_rank), lse_dtype(layer.dtype), comm.size - 1

    def rows_of(heads: int, dtype: DTypeLike) -> list[int]:
        return [num_bytes((plan.local_rows, heads, width), dtype) for width in plan.head_dims]

    queries, outs = rows_of(layer.num_heads, layer.dtype)
    keys, values = rows_of(layer.num_kv_heads, layer.dtype)
    float32_queries, float32_outs = rows_of(layer.num_heads, dtype)
    sums = sum(rows_of(layer.num_kv_heads, dtype))
    forward = {"plan": engine.plan_bytes(plan) + comm.size * engine.plan_bytes(part), "out in float32": float32_outs}
    forward["slices of keys"] = min(hops, 2) * (keys + values)
    if plan.has_masked_out_queries:
        forward["own keys without padding"] = keys + values
    backward = {"dq in float32": float32_queries, "sums of dk and dv": min(1 + 2 * hops, 3) * sums}
    forward |= engine.forward_bytes(part, layer)
    backward |= engine.backward_bytes(part, layer, dtype, "given")
    windows: list[Bytes] = [comm.exchange_bytes(_hop_sizes(comm.size, size), 0) for size in (keys + values, sums)]
    forward |= {name: max(each.get(name, 0) for each in windows) for name in windows[1]}  # one for both, as it grows
    saved = {"q": queries, "k": keys, "v": values, "out": outs,
             "lse": num_bytes((layer.num_heads, plan.local_rows), dtype)}  # fmt: skip
    return Memory(forward, backward, saved, {"dq": queries, "dk": keys, "dv": values})


def _lse_without_keys(plan: Plan, call: Call) -> Any:
    """Of attention before its first slice, which counts a sink once: that of the sink in rows that see a key."""
    if call.sinks is None:
        return -np.inf
    begin, end = plan.key_ranges.T
    return np.where(begin < end, call.sinks[:, None], call.sinks.dtype.type(-np.inf))


def _slices(engine: Any, comm: Comm, plan: Plan, k: Any, v: Any) -> Iterator[tuple[Plan, Pair]]:
    """Slice after slice and its plan, the own first; while the caller works at one, the next is on its way."""
    keys: Pair = k, v
    if plan.has_masked_out_queries:
        keys = engine.without_padding(keys, ("own k", "own v"), plan)
    for step in range(comm.size):
        coming = _buffers(plan, f"slice {step % 2}", keys, k.dtype) if step + 1 < comm.size else []
        wait = _pass_on(comm, keys if coming else [], coming)
        part = plan.slices[(comm.rank - step) % comm.size]
        part.enter()
        yield part, keys
        wait()
        keys = coming


def _pass_on(comm: Comm, sends: Pair, recvs: Pair) -> Callable[[], None]:
    """Starts to send to the next rank, and to receive from the one before; returns what waits for that."""
    if not sends:
        return no_wait
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sizes = _hop_sizes(comm.size, sum(x.nbytes for x in sends))
    return comm.exchange([(x, right) for x in sends], [(x, left) for x in recvs], sizes)


def _hop_sizes(cp_size: int, num_bytes: int) -> NDArray[np.int64]:
    """(cp_size, cp_size) bytes that each rank sends to each other one in a hop: to the next one alone."""
    return num_bytes * np.roll(np.eye(cp_size, dtype=np.int64), 1, axis=1) * (cp_size > 1)


def _buffers(plan: Plan, name: str, like: Pair, dtype: DTypeLike) -> list[Any]:
    """Work buffers of a name for keys and for values."""
    return [plan.buffer(f"{name} {which}", x.shape, dtype) for which, x in zip("kv", like, strict=True)]
