"""Keys and values that a rank's queries see travel to it, and no others: for rows that are spread as the lengths are.

Most documents are whole on one rank then. Each rank sends the rows that the others need, in one exchange, and lays what
it gets among its own; what it makes of their gradients goes back the same way, and the owner adds it up in float32.
Gradients of rows that nobody else needs are rounded at once.

Where much travels, it is hidden: tiles of queries that see no row of another rank come first and are done meanwhile; in
the backward, tiles of keys that have such rows come first, so that their gradients travel while the others are done.

Source: MagiAttention, arXiv:2505.13211, group collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thdattn.comm import no_wait
from thdattn.comm.slices import AllToAllSpec, SliceSpec
from thdattn.methods.base import Call, Results, Tensors, lse_dtype
from thdattn.plan.memory import Layer, Memory, num_bytes

if TYPE_CHECKING:
    from thdattn.balance import Ints
    from thdattn.comm import Comm
    from thdattn.plan.key_transfers import Routes
    from thdattn.plan.plan import Plan

Wait = Callable[[], None]
Pair = tuple[Any, Any]  # of keys and values, or of their gradients

WORTH_HIDING = 4 * 2**20  # bytes of a rank's messages; fewer are there sooner than one more launch has paid for its end


def forward(
    engine: Any, comm: Comm, plan: Plan, q: Any, k: Any, v: Any, call: Call, return_max_logit: bool
) -> Results:
    """Attention of this rank's query rows over the keys that they see; see base.py."""
    assert plan.routes is not None
    hidden = is_worth_hiding(comm, plan.routes.num_received, (k, v), k.dtype)
    keys, arrive = _on_their_way(engine, comm, plan, k, v, call.keeps_keys, hidden)
    # Where nothing comes there is nothing to wait for, unless what goes needs this rank's help on its way. What one
    # kernel brings, where it is little for all ranks, is there when that ends.
    at_once = not hidden and (plan.routes.num_received > 0 or not comm.overlaps)
    if at_once:
        arrive()
    out, lse, max_logit = engine.attn_fwd(
        q, *keys, plan, call.softmax_scale, return_max_logit, halfway=arrive if hidden else None,
        softcap=call.softcap, sinks=call.sinks)
    if not (at_once or hidden):
        arrive()
    if return_max_logit:
        comm.all_reduce(max_logit, "max")
    return Results(out, lse, max_logit, keys if call.keeps_keys else None)


def backward(
    engine: Any, comm: Comm, plan: Plan, dout: Any, saved: Tensors, call: Call, at_once: bool
) -> tuple[Any, Callable[[], Pair]]:
    """Gradients of `forward` for this rank's rows of q, k, v; see base.py. dk and dv are on their way with dq."""
    q, k, v, out, lse, kept = saved
    keys = kept or _on_their_way(engine, comm, plan, k, v, keep=False, hidden=False)[1]()
    alone = plan.is_apart
    sum_dtype = call.grad_dtype or k.dtype if alone else lse_dtype(q.dtype)
    assert plan.routes is not None
    # Whose gradients this rank gives, or gets; but where no rank gets much, a kernel brings all, beside nothing.
    most = min(max(plan.routes.num_received, plan.routes.num_sent), int(plan.routes.table.sum(axis=1).max()))
    hidden, coming = is_worth_hiding(comm, most, (k, v), sum_dtype), []
    grads = [] if alone else [engine.empty(x.shape, x.dtype) for x in (k, v)]

    def send(*shares: Any) -> None:
        back, wait = _sent_back(engine, comm, plan, shares)

        def made() -> Pair:
            wait()
            if alone:
                return shares[0], shares[1]
            engine.add_shares(shares, back, plan, grads)  # of rows that other ranks had
            return grads[0], grads[1]

        coming.append(made)

    # The engine's own stay until the next call, which may be another layer's before these are asked for.
    lasting = None if at_once else [engine.empty(x.shape, sum_dtype) for x in keys]
    dq, *shares = engine.attn_bwd(
        dout, q, *keys, out, lse, plan, call.softmax_scale, sum_dtype, call.deterministic,
        (engine.empty(q.shape, q.dtype), lasting), halfway=send if hidden else None, rounded=grads,
        softcap=call.softcap)
    if not hidden:
        send(*shares)
    return dq, coming[0]


def memory(engine: Any, comm: Comm, plan: Plan, layer: Layer) -> Memory:
    """Bytes of all that forward and backward make, for a layer with this plan, which needs no arrays."""
    assert plan.routes is not None
    routes, heads, sum_dtype = plan.routes, layer.num_kv_heads, lse_dtype(layer.dtype)

    def rows_of(num_rows: int, num_heads: int, dtype: Any) -> list[int]:
        return [num_bytes((num_rows, num_heads, width), dtype) for width in plan.head_dims]

    queries, outs = rows_of(plan.local_rows, layer.num_heads, layer.dtype)
    keys, values = rows_of(plan.local_rows, heads, layer.dtype)
    alone = plan.is_apart
    there = 0 if plan.needs_own_rows else sum(rows_of(plan.key_rows, heads, layer.dtype))
    lse = num_bytes((layer.num_heads, plan.local_rows), sum_dtype)
    messages = routes.num_sent + routes.num_received
    row_bytes = sum(rows_of(1, heads, layer.dtype)), sum(rows_of(1, heads, sum_dtype))
    windows = [comm.exchange_bytes(table * size, 0) for table, size in zip((routes.table, routes.table.T), row_bytes,
                                                                            strict=True)]  # fmt: skip
    forward = {"plan": engine.plan_bytes(plan), "rows on their way": messages * row_bytes[0]}
    forward |= {name: max(each.get(name, 0) for each in windows) for name in windows[1]}  # one for both, as it grows
    if not layer.keeps_keys:
        forward["needed keys"] = there
    layer = layer._replace(groups=(heads,))
    forward |= engine.forward_bytes(plan, layer)
    backward = {"shares on their way": messages * row_bytes[1]}
    backward |= engine.backward_bytes(plan, layer, layer.dtype if alone else sum_dtype, "made")
    if alone:
        backward.pop("shares of dk and dv", None)  # which are dk and dv
    saved = {"q": queries, "k": keys, "v": values, "out": outs, "lse": lse}
    if layer.keeps_keys:
        saved["kept keys"] = there
    return Memory(forward, backward, saved, {"dq": queries, "dk": keys, "dv": values})


def is_worth_hiding(comm: Comm, num_rows: int, like: Sequence[Any], dtype: Any) -> bool:
    """Whether so many rows travel beside kernels, to this rank or from it; other ranks may choose otherwise."""
    return comm.overlaps and num_rows * _row_bytes(like, dtype) >= WORTH_HIDING


def _on_their_way(
    engine: Any, comm: Comm, plan: Plan, k: Any, v: Any, keep: bool, hidden: bool
) -> tuple[Pair, Callable[[], Pair]]:
    """This rank's key buffers, and what waits for their rows of other ranks and returns them too.

    They are k and v themselves, new ones if they are kept, or those of the plan. Rows that are `hidden`, because others
    are computed meanwhile, are zeros until then: products meet all rows of a tile, and 0 * NaN would spread.
    """
    assert plan.routes is not None
    routes = plan.routes
    sends, recvs = (_buffers(plan, name, number, (k, v), k.dtype)
                    for name, number in (("sent", routes.num_sent), ("received", routes.num_received)))
    if routes.num_sent:
        engine.pack_rows((k, v), plan.arrays.sends, sends)
    wait = _exchange(comm, plan, sends, recvs, k.dtype)
    if plan.needs_own_rows:
        def sent() -> Pair:
            wait()
            return k, v

        return (k, v), sent
    keys, values = [engine.empty((plan.key_rows, *x.shape[1:]), x.dtype) for x in (k, v)] if keep else _buffers(
        plan, "needed", plan.key_rows, (k, v), k.dtype)
    into = keys, values
    theirs, mine = _places(plan)
    engine.place_rows((k, v), mine, plan, into)  # meanwhile
    if hidden:
        engine.place_rows(_zeros(engine, plan, recvs), theirs, plan, into)

    def placed() -> Pair:
        wait()
        engine.place_rows(recvs, theirs, plan, into)
        return into

    return into, placed


def _places(plan: Plan) -> tuple[Any, Any]:
    """The rows of the key buffer that come from other ranks, and those of this one."""
    return plan.once("places", lambda: (plan.rank_order[: plan.first_own], plan.rank_order[plan.first_own :]))


def _zeros(engine: Any, plan: Plan, like: Sequence[Any]) -> list[Any]:
    """Arrays of the same shapes and dtypes, of whose rows memory has one each."""

    def made() -> list[Any]:
        rows = [engine.empty(x.shape[1:], x.dtype) for x in like]
        for row in rows:
            row[...] = 0
        return [np.broadcast_to(row, x.shape) for row, x in zip(rows, like, strict=True)]

    return plan.once(("zeros", *((x.shape[1:], x.dtype) for x in like)), made)


def _sent_back(engine: Any, comm: Comm, plan: Plan, shares: Sequence[Any]) -> tuple[list[Any], Wait]:
    """What other ranks made of dk and dv of this one's rows, and what waits for it."""
    assert plan.routes is not None
    routes = plan.routes
    sum_dtype = lse_dtype(shares[0].dtype)  # also where this rank has nothing to add up
    sends = _buffers(plan, "shares sent", routes.num_received, shares, sum_dtype)
    recvs = [engine.empty((routes.num_sent, *x.shape[1:]), sum_dtype) for x in shares]
    if routes.num_received:
        engine.pack_rows(shares, _places(plan)[0], sends)
    wait = _exchange(comm, plan, sends, recvs, sum_dtype, back=True)
    return recvs, wait


def _buffers(plan: Plan, name: str, num_rows: int, like: Sequence[Any], dtype: Any) -> list[Any]:
    """Work buffers of rows of keys and of values."""
    return [plan.buffer(f"{kind} {name}", (num_rows, *x.shape[1:]), dtype) for kind, x in zip("kv", like, strict=True)]


def _exchange(
    comm: Comm, plan: Plan, sends: Sequence[Any], recvs: Sequence[Any], dtype: np.dtype[Any], back: bool = False
) -> Wait:
    """Starts to send rows that lie rank after rank, and to receive others; `back`: from those that got them."""
    routes, row_bytes = plan.routes, _row_bytes(sends, dtype)
    assert routes is not None
    if routes.is_empty:
        return no_wait
    return comm.all_to_all(plan.once(("swap", row_bytes, back), lambda: _swap(routes, row_bytes, back)), sends, recvs)


def _swap(routes: Routes, row_bytes: int, back: bool) -> AllToAllSpec:
    """What all ranks exchange, of two arrays of rows of so many bytes together."""
    out, into = ((_cut(number),) * 2 for number in (routes.sent, routes.received))
    if back:
        return AllToAllSpec(into, out, routes.table.T * row_bytes)
    return AllToAllSpec(out, into, routes.table * row_bytes)


def _cut(num_rows: Ints) -> SliceSpec:
    """So many rows for each rank, one rank's behind another's."""
    ends = np.cumsum(num_rows)
    return SliceSpec(0, tuple((ends - num_rows).tolist()), tuple(ends.tolist()))


def _row_bytes(like: Sequence[Any], dtype: Any) -> int:
    """Of a row of keys and one of values."""
    return sum(num_bytes(x.shape[1:], dtype) for x in like)
