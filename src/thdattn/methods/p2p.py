"""Ring context parallelism, forward and backward, written once for every engine and every comm.

It saves memory: no rank ever holds the keys of all ranks. Ranks pass the keys of one rank, a slice, round the ring, a
hop a step. Each rank computes its own query rows over one slice while it receives the next. A slice is a key buffer
like any other, of which a query row sees one range: the plan has one plan per slice. Results of all slices are merged
in float32 and rounded once. Every slice comes to every rank, whatever the sharding is, so that a hop has one size for
all packs.

In the backward the final lse makes every slice exact by itself. dq adds up in float32, and the sums of dk and dv follow
their slice one hop behind it. A rank's own slice comes last, so that its sums arrive meanwhile.

The method stays apart from all_gather, as it accumulates out, lse and dq over slices.

It exchanges the bytes of an all-gather, in N - 1 hops. Beside its own slice a rank holds two of keys and values, and
three of float32 dk and dv.

Source: Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thdattn.arguments import Array
from thdattn.comm import no_wait
from thdattn.engines import BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs, Pair
from thdattn.methods.base import MethodOptions, Results, lse_dtype
from thdattn.plan.memory import Layer, Memory, largest_windows
from thdattn.plan.workspace import Buffer, pair_of, total_bytes

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.plan.plan import Plan


def forward(
    comm: Comm, inputs: ForwardInputs, options: MethodOptions, max_logit: bool, keys: None = None
) -> Results:
    """Compute attention of this rank's query rows over the keys of all ranks; see Method."""
    q, k, v, plan, sinks = inputs
    engine, (rows, num_heads, _), dtype = plan.engine, q.shape, lse_dtype(q.dtype)
    merged = plan.workspace.array(_accumulators(plan, num_heads, dtype)[0])
    lse = engine.empty((num_heads, rows), dtype)
    merged[...], lse[...] = 0, _lse_without_keys(plan, sinks)
    outputs, largest = ForwardOutputs((merged, lse), accumulate=True, max_logit=max_logit), None
    for part, (its_k, its_v) in _slices(comm, plan, k, v):
        *_, logits = engine.attn_fwd(ForwardInputs(q, its_k, its_v, part), options.attention, outputs)
        if logits is not None:
            largest = logits if largest is None else np.maximum(largest, logits)
    out = engine.rounded(merged, q.dtype)
    engine.nan_if_invalid(plan, out, lse, *([] if largest is None else [largest]))
    if largest is not None:
        comm.all_reduce(largest, "max")
    return Results(out, lse, largest, None)


def backward(
    comm: Comm, inputs: BackwardInputs, options: MethodOptions, kept: None, at_once: bool, keys: None = None
) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
    """Compute the gradients of `forward`; see Method. dk and dv are complete with dq.

    The sums of a slice are made rank after rank, so that they are the same bits on every run.
    """
    dout, q, k, v, out, lse, plan = inputs
    engine, dtype = plan.engine, lse_dtype(q.dtype)
    dq = plan.workspace.array(_accumulators(plan, q.shape[1], dtype)[1])
    dq[...] = 0
    slices = _slices(comm, plan, k, v)
    own = next(slices)
    buffers = partial(_buffers, "sums of dk and dv", plan, k.shape[1], dtype)
    sums: Pair = []
    for step, (part, (k, v)) in enumerate(chain(slices, [own])):
        received = buffers(2) if sums else []
        wait = _pass_on(comm, sums, received)
        outputs = BackwardOutputs(dtype, dq, buffers(step % 2), accumulate=True)
        _, *partials = engine.attn_bwd(BackwardInputs(dout, q, k, v, out, lse, part), options.attention, outputs)
        wait()
        if received:
            partials[0] += received[0]
            partials[1] += received[1]
        sums = partials
    dq, dk, dv = grads = [engine.rounded(x, q.dtype) for x in (dq, *sums)]
    engine.nan_if_invalid(plan, *grads)
    return dq, lambda: (dk, dv)


def memory(comm: Comm, plan: Plan, layer: Layer) -> Memory:
    """Return the bytes of all buffers, except for some integers per tile and slice; see Method."""
    engine, part, dtype = plan.engine, plan.slice_of(plan.cp_rank), lse_dtype(layer.dtype)
    out, dq = _accumulators(plan, layer.num_heads, dtype)
    keys = partial(_slice, "slices of keys", plan, layer.num_kv_heads, layer.dtype)
    sums = partial(_slice, "sums of dk and dv", plan, layer.num_kv_heads, dtype)
    forward = [*engine.plan_buffers(plan).values(), *(comm.size * [*engine.plan_buffers(part).values()]), out,
               *chain(*map(keys, range(min(comm.size - 1, 2)))), *engine.forward_buffers(part, layer)]
    if plan.has_masked_out_queries:
        forward += _slice("own keys without padding", plan, layer.num_kv_heads, layer.dtype)
    every_sum = chain(*map(sums, range(min(2 * comm.size - 1, 3))))
    backward = [dq, *every_sum, *engine.backward_buffers(part, layer, dtype, "given")]
    windows = [comm.exchange_bytes(_hop_sizes(comm.size, total_bytes(hop())), 0) for hop in (keys, sums)]
    return layer.memory(plan, forward, backward, comm=(largest_windows(windows), {}))


def _accumulators(plan: Plan, num_heads: int, dtype: np.dtype[Any]) -> tuple[Buffer, Buffer]:
    """Declare out and dq, to which slice after slice is added."""
    dq, out = pair_of("", (plan.local_rows, num_heads), plan.head_dims, dtype)
    return out._replace(name="out of all slices"), dq._replace(name="dq of all slices")


def _slice(name: str, plan: Plan, num_kv_heads: int, dtype: np.dtype[Any], number: int = 0) -> list[Buffer]:
    """Declare the keys and values of a rank, or their gradients."""
    return pair_of(name, (plan.local_rows, num_kv_heads), plan.head_dims, dtype, number)


def _buffers(name: str, plan: Plan, num_kv_heads: int, dtype: np.dtype[Any], number: int) -> list[Array]:
    """Return the arrays of a _slice."""
    return [plan.workspace.array(x) for x in _slice(name, plan, num_kv_heads, dtype, number)]


def _lse_without_keys(plan: Plan, sinks: Array | None) -> Any:
    """Return lse before the first slice, which counts a sink once: the sink, in rows that see a key, or -inf."""
    if sinks is None:
        return -np.inf
    begin, end = plan.key_ranges.T
    return np.where(begin < end, sinks[:, None], sinks.dtype.type(-np.inf))


def _slices(comm: Comm, plan: Plan, k: Array, v: Array) -> Iterator[tuple[Plan, Pair]]:
    """Yield slice after slice with its plan, this rank's first, and receive the next while the caller computes."""
    keys: Pair = k, v
    if plan.has_masked_out_queries:
        keys = plan.engine.without_padding(keys, _slice("own keys without padding", plan, k.shape[1], k.dtype), plan)
    for step in range(comm.size):
        coming: Pair = []
        if step + 1 < comm.size:
            coming = _buffers("slices of keys", plan, k.shape[1], k.dtype, step % 2)
        wait = _pass_on(comm, keys if coming else [], coming)
        part = plan.slices[(comm.rank - step) % comm.size]
        part.enter()
        yield part, keys
        wait()
        keys = coming


def _pass_on(comm: Comm, sends: Pair, recvs: Pair) -> Callable[[], None]:
    """Start to send to the next rank and to receive from the one before; return what waits for both."""
    if not sends:
        return no_wait
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sizes = _hop_sizes(comm.size, sum(x.nbytes for x in sends))
    return comm.exchange([(x, right) for x in sends], [(x, left) for x in recvs], sizes)


def _hop_sizes(cp_size: int, hop_bytes: int) -> NDArray[np.int64]:
    """Return (cp_size, cp_size) bytes that each rank sends to each other in a hop: to the next one alone."""
    return hop_bytes * np.roll(np.eye(cp_size, dtype=np.int64), 1, axis=1) * (cp_size > 1)
