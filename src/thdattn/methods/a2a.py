"""All-to-all over heads: every rank computes some of the heads, for the rows of all ranks of its group.

Ranks exchange q, k and v, so that a rank has all rows of few heads where it had few rows of all heads. Attention
follows, and ranks exchange out and lse back. Every mask and pack is balanced, and all sizes are constants.

The group may be the inner of two levels. Between groups another method exchanges the rows of a rank's heads, by the
plan plan.core. Groups of heads are exchanged one after another, each while another is computed. An exchange that
overlaps nothing, such as that of a single group, is asked for at once, which some comms perform in another way. Between
groups, all-gather takes all heads of a group at once and overlaps nothing; the ring overlaps its hops.

Source: DeepSpeed Ulysses, arXiv:2309.14509; two levels: LoongTrain, arXiv:2406.18485.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thdattn.arguments import Array
from thdattn.comm import no_wait
from thdattn.comm.slices import AllToAllSpec, SliceSpec
from thdattn.engines import BackwardInputs, ForwardInputs
from thdattn.methods.base import Method, MethodOptions, Results, joined, lse_dtype
from thdattn.plan.memory import Layer, Memory
from thdattn.plan.workspace import INT32, Buffer, bytes_by_name, pair_of, total_bytes

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.plan.plan import Plan

Wait = Callable[[], None]


class Ranks(NamedTuple):
    """Ranks of both levels.

    inner: ranks that exchange heads; outer: ranks that have the rows of this rank's heads.
    """

    inner: Comm
    outer: Comm


def obstacle(num_heads: int, num_kv_heads: int, size: int) -> str:
    """Return why heads cannot be spread over so many ranks, and over how many they can; "" if there is no reason."""
    able = [n for n in range(1, num_heads + 1)
            if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)]
    if size in able:
        return ""
    return (f"num_heads is {num_heads} and num_kv_heads {num_kv_heads}, wanted heads that can be spread over the "
            f"{size} ranks of the all-to-all, which works for {', '.join(map(str, able))} ranks; use so many, or "
            f"another cp_comm_type")


def forward(
    comm: Ranks, inputs: ForwardInputs, options: MethodOptions, max_logit: bool, keys: None = None
) -> Results:
    """Compute attention of this rank's query rows; see Method.

    It may keep q, k, v, out and lse of each group's heads with all rows, and what the method between groups keeps.
    """
    q, k, v, plan, sinks = inputs
    method, engine = options.outer, plan.engine
    assert method is not None and plan.core is not None
    swap = _Swap(comm.inner, plan, len(options.head_groups))
    out = engine.empty((len(q), q.shape[1], v.shape[2]), q.dtype)
    lse = engine.empty((q.shape[1], len(q)), lse_dtype(q.dtype))
    kept, logits, between = [], [], _between_groups(options, comm.outer)
    with ExitStack() as waits:
        for group, (q_heads, k_heads, v_heads) in swap.to_heads((q, k, v)):
            its_sinks = None if sinks is None else sinks[swap.deal(q.shape[1]).of(comm.inner.rank, group)]
            made = method.forward(
                comm.outer, ForwardInputs(q_heads, k_heads, v_heads, plan.core, its_sinks), between, max_logit)
            waits.callback(swap.to_rows(group, (made.out, made.lse), (out, lse)))
            if options.keep_keys:
                kept.append(((q_heads, k_heads, v_heads, made.out, made.lse), made.kept))
            logits.append(made.max_logit)
            del q_heads, k_heads, v_heads, made  # the group after the next one comes now
    largest = engine.empty((q.shape[1],), np.float32) if max_logit else None
    if max_logit:
        comm.inner.all_gather(joined(logits), largest)
    return Results(out, lse, largest, tuple(kept) if options.keep_keys else None)


def backward(
    comm: Ranks, inputs: BackwardInputs, options: MethodOptions, kept: tuple[Any, ...] | None, at_once: bool,
    keys: None = None,
) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
    """Compute the gradients of `forward`; see Method. dk and dv are complete with dq."""
    dout, q, k, v, out, lse, plan = inputs
    method = options.outer
    assert method is not None and plan.core is not None
    swap = _Swap(comm.inner, plan, len(kept or options.head_groups))
    dq, dk, dv = (plan.engine.empty(x.shape, x.dtype) for x in (q, k, v))
    between = _between_groups(options, comm.outer)
    if swap.deal(k.shape[1]).sharers > 1:
        between = between._replace(grad_dtype=np.promote_types(k.dtype, np.float32))
    exchanged = swap.to_heads((dout,) if kept else (dout, q, k, v, out, lse))
    with ExitStack() as waits:
        for group, (dout_heads, *others) in exchanged:
            arrays, its_kept = kept[group] if kept else (others, None)
            tensors = BackwardInputs._make((dout_heads, *arrays, plan.core))
            dq_heads, sums = method.backward(comm.outer, tensors, between, its_kept, True)
            waits.callback(swap.to_rows(group, (dq_heads, *sums()), (dq, dk, dv)))
            del dout_heads, others, arrays, its_kept, tensors, dq_heads, sums
    return dq, lambda: (dk, dv)


def memory(comm: Ranks, plan: Plan, layer: Layer, outer: Method | None = None) -> Memory:
    """Return the bytes of all buffers; see Method."""
    assert plan.core is not None and outer is not None
    size, groups, rows, alone = comm.inner.size, len(layer.groups), plan.local_rows, comm.outer.size == 1
    here, there = (_deal(n, size, groups if n >= size else 1) for n in (layer.num_heads, layer.num_kv_heads))
    inside = outer.memory(comm.outer, plan.core, layer._replace(
        num_heads=here.share, num_kv_heads=there.share, groups=(there.share,),
        keeps_keys=layer.keeps_keys and not alone))

    lse_type, ahead = lse_dtype(layer.dtype), min(groups, 2)  # while one group is computed, the next is on its way
    # Arrays of a group's heads and all rows, which come and go: numbers of bytes are those that exist at one time.
    q, out = pair_of("q", (size * rows, here.share), plan.head_dims, layer.dtype)
    keys = pair_of("keys", (size * rows, there.share), plan.head_dims, layer.dtype)
    lse = Buffer("lse", (here.share, size * rows), lse_type)
    sums = total_bytes(x._replace(dtype=lse_type if there.sharers > 1 else x.dtype) for x in keys)
    qkv, results, grads = total_bytes([q, *keys]), total_bytes([out, lse]), q.nbytes + sums
    asked = out.nbytes + (0 if layer.keeps_keys else qkv + results)
    most, heads = max(qkv, results, asked, grads), 0 if layer.keeps_keys else ahead * qkv + results

    sizes = most // size * (1 - np.eye(size, dtype=np.int64))
    exchange = comm.inner.exchange_bytes(sizes, most // size * (size - 1))
    forward = {**inside.forward, **{name: x + inside.forward.get(name, 0) for name, x in exchange.items()}}
    backward = inside.backward | {"gradients of all rows": ahead * asked + grads - heads}
    if heads:
        forward["heads of all rows"] = heads
    if plan.sharding.outer is None:
        forward["plan"] += total_bytes([*plan.engine.plan_buffers(plan).values(), _inverse_buffer(plan)])
        forward["heads in another order"] = max(most, ahead * qkv * layer.keeps_keys)
    elif alone and plan.core.key_rows < size * rows:
        backward["gradients behind which zeros are put"] = sums
    if there.sharers > 1:
        partials = pair_of("partial sums of dk and dv of ranks", (rows, size), plan.head_dims, lse_type)
        backward |= bytes_by_name(partials)
    kept = {}
    if layer.keeps_keys:
        kept["kept heads"] = groups * (qkv + results)
        kept |= {name: groups * x for name, x in inside.saved.items() if name == "kept keys"}
    its = layer.memory(plan, [], [])
    return Memory(forward, backward, its.saved | kept, its.grads)


def _between_groups(options: MethodOptions, outer: Comm) -> MethodOptions:
    """Return the options of the method between groups of ranks, for one group of heads."""
    return options._replace(head_groups=(), outer=None, keep_keys=options.keep_keys and outer.size > 1)


@dataclass(frozen=True, eq=False)
class _Deal:
    """Assignment of heads to `size` ranks, and of a rank's heads to `groups`; see _deal.

    If there are more ranks than heads, several ranks have the same head.
    """

    num_heads: int
    size: int
    groups: int

    @functools.cached_property
    def sharers(self) -> int:
        """Number of ranks that have the same heads."""
        return max(1, self.size // self.num_heads)

    @functools.cached_property
    def share(self) -> int:
        """Number of heads that a rank has in a group."""
        return max(1, self.num_heads // self.size) // self.groups

    def of(self, rank: int, group: int) -> slice:
        """Return the heads of a rank in a group."""
        first = (rank // self.sharers * self.groups + group) * self.share
        return slice(first, first + self.share)


_deal = functools.lru_cache(maxsize=256)(_Deal)  # one for the same numbers, as every layer asks for the same few


class _Pair(NamedTuple):
    """An array of some rows of all heads, and one of all rows of some heads; `axis` is that of heads."""

    some_rows: Any
    some_heads: Any
    deal: _Deal
    axis: int


class _Swap:
    """Exchanges of a layer, group by group: from some rows of all heads to all rows of some heads, and back.

    Arrays are (rows, heads, width), or (heads, rows) as the log-sum-exp is.
    """

    def __init__(self, comm: Comm, plan: Plan, num_groups: int) -> None:
        self._engine, self._comm, self._plan, self._num_groups = plan.engine, comm, plan, num_groups

    def deal(self, num_heads: int) -> _Deal:
        """Return the assignment of so many heads."""
        size = self._comm.size
        return _deal(num_heads, size, self._num_groups if num_heads >= size else 1)

    def to_heads(self, xs: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
        """Yield each group's number and heads of xs, and receive the next group while the caller computes."""
        coming = self._to_heads(0, xs)
        for group in range(self._num_groups):
            pairs, wait = coming
            coming = [], no_wait
            if group + 1 < self._num_groups:
                coming = self._to_heads(group + 1, xs)
            wait()
            pairs = self._reordered(pairs, to_rank_order=False)
            yield group, [pair.some_heads for pair in pairs]

    def _to_heads(self, group: int, xs: Sequence[Any]) -> tuple[list[_Pair], Wait]:
        size, pairs = self._comm.size, []
        for x in xs:
            axis = x.ndim - 2
            deal = self.deal(x.shape[axis])
            shape = (size * len(x), deal.share, x.shape[2]) if axis else (deal.share, size * x.shape[1])
            pairs.append(_Pair(x, self._engine.empty(shape, x.dtype), deal, axis))
        return pairs, self._exchange(pairs, group, back=False, at_once=self._num_groups == 1)

    def to_rows(self, group: int, heads: Sequence[Any], rows: Sequence[Any]) -> Wait:
        """Start to send arrays of all rows, in sequence order, back to their places in arrays of some rows.

        Args:
            heads: of all rows and this group's heads; rows: of this rank's rows and all heads.

        Returns:
            A function that waits for them, and adds gradients of heads that several ranks have, in rank order.
        """
        pairs, shared = [], []
        for x, y in zip(rows, heads, strict=True):
            axis = x.ndim - 2
            deal, place = self.deal(x.shape[axis]), x
            if deal.sharers > 1:
                deal = _deal(self._comm.size, self._comm.size, 1)
                place = self._engine.empty((len(x), self._comm.size, x.shape[2]), y.dtype)
                shared.append((x, place))
            pairs.append(_Pair(place, self._padded(y, self._comm.size * len(x)) if axis else y, deal, axis))
        is_last = group == self._num_groups - 1
        wait = self._exchange(self._reordered(pairs, to_rank_order=True), group, back=True, at_once=is_last)

        def finish() -> None:
            wait()
            for x, partials in shared:
                _add_partials(x, partials)

        return finish

    def _exchange(self, pairs: Sequence[_Pair], group: int, back: bool, at_once: bool) -> Wait:
        """Start the exchange from some rows to some heads, or back."""
        rows, heads, *_ = zip(*pairs, strict=True)
        swap = _swap_of(tuple([(deal, axis, x.shape, x.itemsize) for _, x, deal, axis in pairs]), group, back)
        return self._comm.all_to_all(swap, *((heads, rows) if back else (rows, heads)), at_once)

    def _reordered(self, pairs: list[_Pair], to_rank_order: bool) -> list[_Pair]:
        """Return pairs with all rows in the other order, of which slices of two levels have both.

        Fillers become 0, and -inf in lse, as padding has it. The kernel that moves rows takes none as narrow as lse's.
        """
        plan = self._plan
        if plan.sharding.outer is not None:
            return pairs
        order = plan.rank_order if to_rank_order else plan.memoize("inverse of rank_order", lambda: _inverse(plan))
        moved = [self._engine.empty((len(order), *x.shape[1:]), x.dtype) if axis
                 else np.where(order < 0, x.dtype.type(-np.inf), np.take(x, order, 1)) for _, x, _, axis in pairs]
        rows = [(pair.some_heads, x) for pair, x in zip(pairs, moved, strict=True) if pair.axis]
        self._engine.pack_rows([x for x, _ in rows], order, [x for _, x in rows])
        return [pair._replace(some_heads=x) for pair, x in zip(pairs, moved, strict=True)]

    def _padded(self, y: Any, num_rows: int) -> Any:
        """Append rows of zeros to an array, where all ranks together have more rows than there are keys."""
        if len(y) == num_rows or self._plan.sharding.outer is None:
            return y
        whole = self._engine.empty((num_rows, *y.shape[1:]), y.dtype)
        whole[: len(y)], whole[len(y) :] = y, 0
        return whole


@functools.lru_cache(maxsize=256)
def _swap_of(pairs: tuple[tuple[_Deal, int, tuple[int, ...], int], ...], group: int, back: bool) -> AllToAllSpec:
    """Return the slices that ranks exchange to turn arrays of some rows into arrays of some heads, or back.

    Args:
        pairs: deal and axis of each _Pair, and shape and itemsize of its some_heads.
    """
    size = pairs[0][0].size
    ranks = range(size)
    some_rows, some_heads, num_bytes = [], [], 0
    for deal, axis, shape, itemsize in pairs:
        heads, num_rows = [deal.of(rank, group) for rank in ranks], shape[1 - axis] // size
        some_rows.append(SliceSpec(axis, tuple(x.start for x in heads), tuple(x.stop for x in heads)))
        begins = [rank * num_rows for rank in range(size + 1)]
        some_heads.append(SliceSpec(1 - axis, tuple(begins[:-1]), tuple(begins[1:])))
        num_bytes += math.prod(shape) * itemsize // size
    sizes = num_bytes * (1 - np.eye(size, dtype=np.int64))
    outs, ins = (some_heads, some_rows) if back else (some_rows, some_heads)
    return AllToAllSpec(tuple(outs), tuple(ins), sizes)


def _inverse(plan: Plan) -> Array:
    """Return the number in rank order of every row in sequence order; it follows the plan."""
    order = plan.rank_order
    declared = _inverse_buffer(plan)
    inverse = plan.engine.empty(declared.shape, declared.dtype)
    places = np.arange(len(order), dtype=order.dtype, like=order)

    def make() -> None:
        inverse[order] = places  # of fillers, -1, to the last place

    plan.make(make)
    return inverse[:-1]


def _inverse_buffer(plan: Plan) -> Buffer:
    return Buffer("plan", (plan.batch.total_rows + 1,), INT32, "inverse")


def _add_partials(x: Array, partials: Array) -> None:
    """Add the partial sums of all ranks that have the same head, in rank order, and round once."""
    sharers = partials.shape[1] // x.shape[1]
    for head in range(x.shape[1]):
        total = partials[:, head * sharers].copy()
        for sharer in range(1, sharers):
            total += partials[:, head * sharers + sharer]
        x[:, head] = total
