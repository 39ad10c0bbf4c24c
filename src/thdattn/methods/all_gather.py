"""All-gather context parallelism, forward and backward, written once for every engine and every comm.

Keys and values are gathered from all ranks and moved to sequence order. Each rank then computes its own query rows, so
every output row is made once and nothing has to be merged. The backward gathers again, unless the forward kept the
keys, and sums dk and dv over ranks in float32.

Both work at one group of kv heads after another. While a kernel computes with one group, the comm gathers the next and
reduces the gradients of the last one. So it is where ranks see each other's memory, and where NCCL works beside
kernels. There the backward kernel writes partial sums of dk and dv to the ranks that own the keys, or in their order.

Source: Llama 3, arXiv:2407.21783, 3.3.2.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thdattn.arguments import Array
from thdattn.comm import Arrival
from thdattn.comm.slices import address
from thdattn.engines import BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs, Pair
from thdattn.methods.base import MethodOptions, Results, joined, kept_keys, key_buffers, lse_dtype
from thdattn.plan.memory import Layer, Memory
from thdattn.plan.owners import owner_buffers, places_of_keys
from thdattn.plan.workspace import Buffer, pair_of

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.plan.generations import Generation
    from thdattn.plan.plan import Plan

IN_FLIGHT = 2  # gathers of a plan that may be under way at a time, each into buffers of its own
_turns: weakref.WeakKeyDictionary[Plan, _Turns] = weakref.WeakKeyDictionary()


@dataclass(eq=False, repr=False)
class GatheredKV:
    """Keys and values of all ranks, complete or under way, group of kv heads by group; for one forward or backward.

    k, v, plan: what they were made from; given: k and v as a user passed them to gather.
    groups: the keys and values of each group, (rows, heads of the group, width).
    ordered: they are in sequence order; else in rank order.
    used: a forward or backward has asked for them; num_read: number of groups that were read.
    generation: as that of a Saved.
    """

    k: Array
    v: Array
    plan: Plan
    groups: Sequence[Arrival]
    ordered: bool
    given: tuple[Any, Any] = (None, None)
    used: bool = False
    num_read: int = 0
    generation: Generation | None = None

    def __del__(self) -> None:
        """Wait for gathers under way, after errors too, before other arrays can get the memory of their buffers."""
        if not self.num_read and self.groups[0].peer_exchange is not None:  # nothing is: no rank has come so far
            return
        for group in self.groups[self.num_read :]:
            group.wait()
            group.done()

    def check(self, k: Any, v: Any, plan: Plan) -> None:
        """Raise a ValueError if they were not gathered for a call with a user's k and v and this plan.

        Both the arrays that the user gave to gather and the copies that it made of them count.
        """
        if self.used:
            raise ValueError("keys were used by a forward or backward before, wanted those of this call; call gather "
                             "again, or leave it out")
        if self.generation is not None:
            self.generation.check("keys")
        arrays = [[plan.engine.in_place(name, x) for x in xs]
                  for name, xs in (("k", (k, self.k, self.given[0])), ("v", (v, self.v, self.given[1])))]
        places = [[(address(x), x.shape, x.strides) for x in xs] for xs in arrays]
        if self.plan is not plan or any(now not in known for now, *known in places):
            raise ValueError("keys were gathered from other k and v or with another plan, wanted those of this call; "
                             "call gather with the same arrays, or leave it out")

    def in_order(self, kept: list[Pair] | None = None) -> Iterator[Pair]:
        """Yield each group's keys and values in sequence order, without what padding held, once they are complete.

        Args:
            kept: gets them too, and they stay as they are; None: those of a group go when the next one's come.
        """
        self.used = True
        first = 0
        for parts, wait, done, peer_exchange in self.groups:
            wait()
            (k, *_), (v, *_) = parts
            if not self.ordered:
                # Parts of all ranks have them, or will have them.
                lacks_own = len(parts[0]) == 1 or peer_exchange is not None
                heads = slice(first, first + k.shape[1])
                own = _some_heads(heads, self.k, self.v) if lacks_own else None
                first = heads.stop
                k, v = self.plan.engine.to_sequence_order(
                    parts, self.plan, self._places(k, v, kept is not None), own, peer_exchange)
            done()
            self.num_read += 1
            if kept is not None:
                kept.append((k, v))
            yield k, v

    @functools.cached_property
    def heads(self) -> tuple[int, ...]:
        """Kv heads of each group."""
        return tuple([group.parts[0][0].shape[1] for group in self.groups])

    def _places(self, k: Array, v: Array, keep: bool) -> list[Array]:
        """Return arrays for a group's keys and values: new ones, or those of the group with most heads."""
        plan = self.plan
        shapes = [(plan.key_rows, *x.shape[1:]) for x in (k, v)]
        if keep:
            return [plan.engine.empty(shape, k.dtype) for shape in shapes]
        return [*map(plan.workspace.array, key_buffers(plan, max(self.heads), k.dtype), shapes)]


def gather(
    comm: Comm, plan: Plan, k: Array, v: Array, head_groups: tuple[int, ...], at_once: bool = False,
    given: tuple[Any, Any] = (None, None),
) -> GatheredKV:
    """Start to gather the keys and values of all ranks, group of kv heads by group.

    Args:
        k, v: this rank's rows, (local_key_rows, heads, width); the engine's arrays.
        head_groups: kv heads of each group; empty: all at once.
        at_once: the forward or backward follows, with nothing between.
        given: see GatheredKV.

    Raises:
        ValueError: IN_FLIGHT gathers of this plan wait for their forward or backward.
    """
    if comm.size == 1:
        return GatheredKV(k, v, plan, [Arrival([[k], [v]])], True, given)
    turns = _turns.setdefault(plan, _Turns())
    turn = turns.next(plan.engine.capture() is not None, at_once)
    places: Sequence[Any] = _Places(plan, turn, head_groups or (k.shape[1],), k.dtype)
    if not at_once:
        places = [*places]  # all are asked for: before other ranks count on this one
    keys = GatheredKV(k, v, plan, comm.gather_heads((k, v), places, at_once), False, given)
    turns.last[turn] = weakref.ref(keys)
    return keys


def memory(comm: Comm, plan: Plan, layer: Layer) -> Memory:
    """Return the bytes of all buffers of gather, forward and backward; see Method."""
    engine, groups, sum_dtype = plan.engine, layer.groups, lse_dtype(layer.dtype)
    in_place = int(comm.reads_peers)  # the first group of keys
    work = [buffer for group, heads in [*enumerate(groups)][in_place:]
            for buffer in gathered_buffers(plan, 0, group, heads, layer.dtype)]
    ordered = key_buffers(plan, layer.num_kv_heads if layer.keeps_keys else max(groups), layer.dtype)
    kept = kept_keys(ordered) if layer.keeps_keys else []
    work += [] if kept else ordered
    own_rows = pair_of("own rows", (plan.local_key_rows, layer.num_kv_heads), plan.head_dims, layer.dtype)
    forward = [*engine.plan_buffers(plan).values(), *work, *engine.forward_buffers(plan, layer)]
    backward = engine.backward_buffers(plan, layer, sum_dtype, "own" if comm.overlaps else "made")
    if comm.overlaps:
        backward += owner_buffers(plan)
    sums = [[buffer.nbytes for buffer in gathered_buffers(plan, 0, 0, heads, sum_dtype)] for heads in groups]
    return layer.memory(plan, forward, backward, kept, (
        comm.gather_bytes([buffer.nbytes for buffer in own_rows], len(groups)),
        comm.sum_bytes(sums, layer.deterministic)))


def gathered_buffers(plan: Plan, turn: int, group: int, heads: int, dtype: np.dtype[Any]) -> list[Buffer]:
    """Declare the keys and values of all ranks, or their gradients, in rank order, of one group of heads."""
    rows = plan.cp_size * plan.local_key_rows
    return pair_of("keys in rank order", (rows, heads), plan.head_dims, dtype, turn, group)


class _Turns:
    """Buffers of a plan that are free for another gather.

    A captured graph writes to its own at every replay, so that no eager gather that waits for its call has them.

    Attributes:
        last: functions that return the keys of the last gather into each of the buffers, in captures too.
    """

    def __init__(self) -> None:
        self.last: list[Callable[[], GatheredKV | None]] = []
        self._of_graphs: set[int] = set()

    def next(self, captured: bool, at_once: bool) -> int:
        """Return the number of the buffers of a gather: the first free ones, as few are made.

        Raises:
            ValueError: IN_FLIGHT gathers wait for their forward or backward.
        """
        free = [turn for turn, last in enumerate(self.last) if (keys := last()) is None or keys.used]
        if len(self.last) - len(free) >= IN_FLIGHT:
            raise ValueError(
                f"gather was called with {IN_FLIGHT} gathers of this plan under way, wanted fewer, as each has buffers "
                f"of its own; call forward or backward with one of them first"
            )
        turn = next((turn for turn in free if captured or at_once or turn not in self._of_graphs), len(self.last))
        if turn == len(self.last):
            self.last.append(lambda: None)
        if captured:
            self._of_graphs.add(turn)
        return turn


class _Places(Sequence[list[Array]]):
    """Buffers for the gathered keys and values of each group, made when they are asked for."""

    def __init__(self, plan: Plan, turn: int, head_groups: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._plan, self._turn, self._groups, self._dtype = plan, turn, head_groups, dtype

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, group: Any) -> list[Array]:
        if not 0 <= group < len(self):
            raise IndexError(group)
        plan, heads = self._plan, self._groups[group]
        return [*map(plan.workspace.array, gathered_buffers(plan, self._turn, group, heads, self._dtype))]


def forward(
    comm: Comm, inputs: ForwardInputs, options: MethodOptions, max_logit: bool, keys: GatheredKV | None = None
) -> Results:
    """Compute attention of this rank's query rows over the keys of all ranks; see Method."""
    q, k, v, plan, sinks = inputs
    engine = plan.engine
    keys = keys or gather(comm, plan, k, v, options.head_groups, at_once=True)
    kept: list[Pair] | None = [] if options.keep_keys else None
    rows, num_heads, _ = q.shape
    out = engine.empty((rows, num_heads, keys.v.shape[2]), q.dtype)
    lse = engine.empty((num_heads, rows), lse_dtype(q.dtype))
    attention, logits = options.attention._replace(head_groups=keys.heads), []
    for heads, (k, v) in zip(_heads_by_group(num_heads, keys), keys.in_order(kept), strict=True):
        its_q, its_out = _some_heads(heads, q, out)
        group = ForwardInputs(its_q, k, v, plan, None if sinks is None else sinks[heads])
        results = ForwardOutputs((its_out, _some_rows(heads, lse)), max_logit=max_logit)
        logits.append(engine.attn_fwd(group, attention, results)[2])
    largest = joined(logits) if max_logit else None
    if max_logit:
        engine.nan_if_invalid(plan, largest)
        comm.all_reduce(largest, "max")
    return Results(out, lse, largest, None if kept is None else tuple(kept))


def backward(
    comm: Comm, inputs: BackwardInputs, options: MethodOptions, kept: tuple[Pair, ...] | None, at_once: bool,
    keys: GatheredKV | None = None,
) -> tuple[Array, PendingGrads]:
    """Compute the gradients of `forward`; see Method.

    Args:
        keys: from gather; those that forward kept are used first.

    Returns:
        (dq, sums): the shape and dtype of q; dk and dv, which are being summed over ranks.
    """
    dout, q, k, v, out, lse, plan = inputs
    if kept is not None:
        keys = GatheredKV(k, v, plan, [Arrival([[x] for x in parts]) for parts in kept], ordered=True)
    keys = keys or gather(comm, plan, k, v, options.head_groups, at_once=True)
    engine, attention = plan.engine, options.attention._replace(head_groups=keys.heads)
    dq = engine.empty(q.shape, q.dtype)
    # From now on, so that after an error too nobody gets the memory of dk and dv before their sums are complete.
    sums = PendingGrads(plan, [engine.empty(x.shape, x.dtype) for x in (keys.k, keys.v)], [])
    # Before other ranks count on this one.
    places, rows = places_of_keys(plan, comm.reads_peers) if comm.overlaps else (None, None)
    largest = [(len(x), max(keys.heads), x.shape[2]) for x in sums.grads]
    groups = zip(*(_heads_by_group(x.shape[1], keys) for x in (q, keys.k)), keys.in_order(), strict=True)
    for heads, kv_heads, (k, v) in groups:
        results = _some_heads(kv_heads, *sums.grads)
        is_last = at_once and heads.stop == q.shape[1]
        owners = None
        if comm.overlaps:
            owners = comm.owner_partials([x.shape for x in results], largest, is_last), places
        its_dout, its_q, its_out, its_dq = _some_heads(heads, dout, q, out, dq)
        group = BackwardInputs(its_dout, its_q, k, v, its_out, _some_rows(heads, lse), plan)
        try:
            _, dk, dv = engine.attn_bwd(
                group, attention, BackwardOutputs(lse_dtype(q.dtype), its_dq, owners=owners))
        except BaseException:
            if comm.overlaps:
                comm.drop_partials()
            raise
        if comm.overlaps:
            sums.waits.append(comm.reduce_partials(rows, results, is_last, attention.deterministic))
        else:
            comm.sum_rows(engine.to_rank_order(dk, dv, plan), results)
    engine.nan_if_invalid(plan, dq)
    return dq, sums


@dataclass(eq=False, repr=False)
class PendingGrads:
    """dk and dv while they are summed over all ranks; a call waits for them and returns them, rounded once."""

    plan: Plan
    grads: Pair
    waits: list[Callable[[], None]]

    def __call__(self) -> tuple[Array, Array]:
        self._wait()
        dk, dv = self.grads
        self.plan.engine.nan_if_invalid(self.plan, dk, dv)
        return dk, dv

    def __del__(self) -> None:
        self._wait()

    def _wait(self) -> None:
        while self.waits:
            self.waits.pop(0)()


def _heads_by_group(num_heads: int, keys: GatheredKV) -> list[slice]:
    """Return the heads of each group, of arrays with num_heads heads: query heads, or kv heads."""
    each = num_heads // keys.k.shape[1]
    ends = [*itertools.accumulate(each * size for size in keys.heads)]
    return [slice(first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def _some_heads(heads: slice, *arrays: Array) -> Sequence[Array]:
    """Return some heads of arrays (rows, heads, width): the arrays themselves if these are all, as views take time."""
    every = heads.stop - heads.start == arrays[0].shape[1]
    return arrays if every else [x[:, heads] for x in arrays]


def _some_rows(rows: slice, x: Array) -> Array:
    """Return some rows of an array, or the array itself if these are all."""
    return x if rows.stop - rows.start == len(x) else x[rows]
