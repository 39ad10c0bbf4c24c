"""Context parallelism that sends each rank the keys and values that its queries see, and no others.

It serves the sharding "balanced", where most documents are whole on one rank. Each rank sends the rows that others need
in one exchange, and puts what it receives among its own. Partial gradients of received rows go back the same way, and
the owner adds them in float32. Gradients of rows that nobody else needs are rounded at once.

Large exchanges overlap computation. The forward starts with tiles of queries that see no row of another rank. The
backward starts with tiles of keys that have such rows, so that their gradients are sent while it computes the others.

The method stays apart from all_gather, as an exchange splits the tiles of all heads here, and the heads there.

Source: MagiAttention, arXiv:2505.13211, group collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thdattn.arguments import Array
from thdattn.comm import no_wait
from thdattn.comm.slices import AllToAllSpec, SliceSpec
from thdattn.engines import BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs, Pair
from thdattn.methods.base import MethodOptions, Results, kept_keys, key_buffers, lse_dtype
from thdattn.plan.memory import Layer, Memory, largest_windows
from thdattn.plan.workspace import Buffer, pair_of

if TYPE_CHECKING:
    from thdattn.balance import Ints
    from thdattn.comm import Comm
    from thdattn.plan.key_transfers import Routes
    from thdattn.plan.plan import Plan

Wait = Callable[[], None]
KeysValues = tuple[Array, Array]

WORTH_OVERLAPPING = 4 * 2**20  # bytes of a rank's messages; fewer arrive sooner than the tail of one more launch costs


def forward(
    comm: Comm, inputs: ForwardInputs, options: MethodOptions, max_logit: bool, keys: None = None
) -> Results:
    """Compute attention of this rank's query rows over the keys that they see; see Method."""
    q, k, v, plan, sinks = inputs
    assert plan.routes is not None
    overlaps = plan.has_parts[0] and is_worth_overlapping(comm, plan.routes.num_received, (k, v), k.dtype)
    needed, arrive = _send(comm, plan, k, v, options.keep_keys)
    # Where nothing comes there is nothing to wait for, unless what goes needs this rank's help on its way. What one
    # kernel brings, where it is little for all ranks, is complete when that ends.
    at_once = not overlaps and (plan.routes.num_received > 0 or not comm.overlaps)
    if at_once:
        arrive()
    out, lse, logits = plan.engine.attn_fwd(
        ForwardInputs(q, *needed, plan, sinks), options.attention, ForwardOutputs(max_logit=max_logit),
        arrive if overlaps else None)
    if not (at_once or overlaps):
        arrive()
    if max_logit:
        comm.all_reduce(logits, "max")
    return Results(out, lse, logits, needed if options.keep_keys else None)


def backward(
    comm: Comm, inputs: BackwardInputs, options: MethodOptions, kept: KeysValues | None, at_once: bool,
    keys: None = None,
) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
    """Compute the gradients of `forward`; see Method. dk and dv are under way with dq."""
    dout, q, k, v, out, lse, plan = inputs
    engine, routes = plan.engine, plan.routes
    assert routes is not None
    needed = kept or _send(comm, plan, k, v, keep=False)[1]()
    alone = plan.is_apart
    sum_dtype = options.grad_dtype or k.dtype if alone else lse_dtype(q.dtype)
    # Rows whose gradients this rank sends or receives; where no rank has many, one kernel brings all, without overlap.
    most = min(max(routes.num_received, routes.num_sent), routes.most_sent)
    overlaps, coming = plan.has_parts[1] and is_worth_overlapping(comm, most, (k, v), sum_dtype), []
    grads = [] if alone else [engine.empty(x.shape, x.dtype) for x in (k, v)]

    def send_back(dk: Array, dv: Array) -> None:
        back, wait = _send_back(comm, plan, (dk, dv))

        def complete() -> KeysValues:
            wait()
            if alone:
                return dk, dv
            engine.add_partials((dk, dv), back, plan, grads)  # of rows that other ranks had
            return grads[0], grads[1]

        coming.append(complete)

    # The engine's own stay until the next call, which may be another layer's before these are asked for.
    lasting = None if at_once else [engine.empty(x.shape, sum_dtype) for x in needed]
    outputs = BackwardOutputs(sum_dtype, engine.empty(q.shape, q.dtype), lasting, own_rows=grads)
    dq, dk, dv = engine.attn_bwd(
        BackwardInputs(dout, q, *needed, out, lse, plan), options.attention, outputs, send_back if overlaps else None)
    if not overlaps:
        send_back(dk, dv)
    return dq, coming[0]


def memory(comm: Comm, plan: Plan, layer: Layer) -> Memory:
    """Return the bytes of all buffers; see Method."""
    assert plan.routes is not None
    routes, heads, sum_dtype = plan.routes, layer.num_kv_heads, lse_dtype(layer.dtype)

    engine, layer, alone = plan.engine, layer._replace(groups=(heads,)), plan.is_apart
    windows = [{} if sizes is None else comm.exchange_bytes(sizes, 0) for sizes in (
        _sizes(comm, routes, heads * sum(plan.head_dims) * dtype.itemsize, back=back)
        for dtype, back in ((layer.dtype, False), (sum_dtype, True)))]
    needed = [] if plan.needs_own_rows else key_buffers(plan, heads, layer.dtype)
    kept = kept_keys(needed) if layer.keeps_keys else []
    forward = [*engine.plan_buffers(plan).values(), *([] if kept else needed),
               *chain(*_messages("rows under way", plan, heads, layer.dtype)), *engine.forward_buffers(plan, layer)]
    sums = engine.backward_buffers(
        plan, layer, layer.dtype if alone else sum_dtype, "given" if alone else "made")
    backward = [*chain(*_messages("partial sums under way", plan, heads, sum_dtype)), *sums]
    return layer.memory(plan, forward, backward, kept, (largest_windows(windows), {}))


def is_worth_overlapping(comm: Comm, num_rows: int, like: Pair, dtype: DTypeLike) -> bool:
    """Return whether an exchange of so many rows overlaps kernels on this rank; other ranks may choose otherwise."""
    return comm.overlaps and num_rows * _row_bytes(like, dtype) >= WORTH_OVERLAPPING


def _send(
    comm: Comm, plan: Plan, k: Array, v: Array, keep: bool
) -> tuple[KeysValues, Callable[[], KeysValues]]:
    """Start the exchange of keys; return this rank's key buffers, and what waits for received rows and returns both.

    The buffers are k and v themselves, new ones if they are kept, or those of the plan. Rows that arrive while kernels
    run are zeros until then: products meet all rows of a tile, and 0 * NaN would spread.
    """
    assert plan.routes is not None
    engine, routes = plan.engine, plan.routes
    sends, recvs = ([*map(plan.workspace.array, buffers)]
                    for buffers in _messages("rows under way", plan, k.shape[1], k.dtype))
    if routes.num_sent:
        engine.pack_rows((k, v), plan.arrays.sends, sends)
    wait = _exchange(comm, plan, sends, recvs, k.dtype)
    if plan.needs_own_rows:
        def sent() -> KeysValues:
            wait()
            return k, v

        return (k, v), sent
    declared = key_buffers(plan, k.shape[1], k.dtype)
    keys, values = [engine.empty(x.shape, x.dtype) for x in declared] if keep else map(plan.workspace.array, declared)
    into = keys, values
    engine.pack_rows((k, v), plan.arrays.own_keys, into)  # while rows arrive; all others become 0

    def placed() -> KeysValues:
        wait()
        engine.place_rows(recvs, _received_places(plan), plan, into)
        return into

    return into, placed


def _received_places(plan: Plan) -> Array:
    """Return the rows of the key buffer that come from other ranks."""
    return plan.memoize("received places", lambda: plan.rank_order[: plan.first_own])


def _send_back(comm: Comm, plan: Plan, partials: Pair) -> tuple[list[Array], Wait]:
    """Start to send back partial sums; return those of other ranks for this rank's rows, and what waits for them."""
    assert plan.routes is not None
    engine, routes = plan.engine, plan.routes
    sum_dtype = lse_dtype(partials[0].dtype)  # also where this rank has nothing to add
    _, received = _messages("partial sums under way", plan, partials[0].shape[1], sum_dtype)
    sends = [*map(plan.workspace.array, received)]
    recvs = [engine.empty((routes.num_sent, *x.shape[1:]), sum_dtype) for x in partials]
    if routes.num_received:
        engine.pack_rows(partials, _received_places(plan), sends)
    wait = _exchange(comm, plan, sends, recvs, sum_dtype, back=True)
    return recvs, wait


def _messages(name: str, plan: Plan, heads: int, dtype: np.dtype[Any]) -> tuple[list[Buffer], list[Buffer]]:
    """Declare keys and values, or their gradients: rows that other ranks need of this one, and the other way round."""
    assert plan.routes is not None
    sent, received = ((number, heads) for number in (plan.routes.num_sent, plan.routes.num_received))
    return (pair_of(name, sent, plan.head_dims, dtype, "sent"),
            pair_of(name, received, plan.head_dims, dtype, "received"))


def _exchange(
    comm: Comm, plan: Plan, sends: Pair, recvs: Pair, dtype: DTypeLike, back: bool = False
) -> Wait:
    """Start to send rows, which are in rank order, and to receive others.

    Args:
        back: rows return from the ranks that received them.
    """
    routes, row_bytes = plan.routes, _row_bytes(sends, dtype)
    assert routes is not None
    if routes.is_empty:
        return no_wait
    spec = plan.memoize(("all to all", row_bytes, back), lambda: _spec(comm, routes, row_bytes, back))
    return comm.all_to_all(spec, sends, recvs)


def _spec(comm: Comm, routes: Routes, row_bytes: int, back: bool) -> AllToAllSpec:
    """Return what all ranks exchange, of two arrays whose rows have so many bytes together."""
    out, into = ((_cut(number),) * 2 for number in (routes.sent, routes.received))
    sizes = _sizes(comm, routes, row_bytes, back)
    return AllToAllSpec(into, out, sizes) if back else AllToAllSpec(out, into, sizes)


def _sizes(comm: Comm, routes: Routes, row_bytes: int, back: bool) -> NDArray[np.int64] | None:
    """Return the bytes that each rank sends to each other one, if exchanges of the comm overlap kernels."""
    if not comm.overlaps:
        return None
    return (routes.table.T if back else routes.table) * row_bytes


def _cut(num_rows: Ints) -> SliceSpec:
    """Return slices of so many rows for each rank, in rank order."""
    ends = np.cumsum(num_rows)
    return SliceSpec(0, tuple((ends - num_rows).tolist()), tuple(ends.tolist()))


def _row_bytes(like: Pair, dtype: DTypeLike) -> int:
    """Return the bytes of a row of keys and one of values."""
    return int(sum(math.prod(x.shape[1:]) for x in like) * np.dtype(dtype).itemsize)
