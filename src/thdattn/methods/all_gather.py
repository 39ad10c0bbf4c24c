"""All-gather context parallelism, forward and backward, written once for every engine and every comm.

Keys and values are gathered from all ranks and moved to sequence order; each rank then computes its own query rows, so
every output row is made once and nothing has to be merged. The backward gathers again, unless they were kept, and sums
dk and dv over ranks in float32.

Both work at one group of kv heads after another: while a kernel is busy with a group, the keys and values of the next
are on their way. Where ranks see each other's memory, what a kernel makes of dk and dv leaves it for the ranks that own
the keys; they add it up when it is there.

Source: Llama 3, arXiv:2407.21783, 3.3.2.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import DTypeLike

from thdattn.comm import Arrival
from thdattn.methods.base import Call, Results, Tensors, joined, lse_dtype
from thdattn.plan.memory import Layer, Memory, num_bytes
from thdattn.plan.owners import places_of_keys

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.plan.plan import Plan

IN_FLIGHT = 2  # gathers of a plan that may be on their way at a time, each into buffers of its own
_turns: weakref.WeakKeyDictionary[Plan, _Turns] = weakref.WeakKeyDictionary()


@dataclass(eq=False, repr=False)
class Keys:
    """Keys and values of all ranks for one forward or backward, made by CPAttention.gather; they may still arrive.

    They come in groups of kv heads.

    Attributes:
        k, v, plan: what they were gathered from; given: k and v as a user passed them to gather.
        groups: for each group of heads, where its keys and values arrive, (rows, heads of the group, width).
        ordered: True for sequence order, False for rank order.
        used: True once a forward or backward has asked for them; num_read: number of groups it has read.
        generation: that of the plan when they were gathered; see Saved.
    """

    k: Any
    v: Any
    plan: Plan
    groups: Sequence[Arrival]
    ordered: bool
    given: tuple[Any, Any] = (None, None)
    used: bool = False
    num_read: int = 0
    generation: Any = None

    def __del__(self) -> None:
        """Buffers into which something is on its way are not given to others before it is there, after errors too."""
        if not self.num_read and self.groups[0].peer_exchange is not None:  # nothing is: no rank has come so far
            return
        for group in self.groups[self.num_read :]:
            group.wait()
            group.done()

    def in_order(self, engine: Any, kept: list[tuple[Any, Any]] | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield each group's keys and values in sequence order, without what padding held, once they have arrived.

        Args:
            engine: the engine of the plan.
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
                into = self._rooms(k, v) if kept is None else [
                    engine.empty((self.plan.key_rows, *x.shape[1:]), x.dtype) for x in (k, v)]
                k, v = engine.to_sequence_order(*parts, self.plan, into, own, peer_exchange)
            done()
            self.num_read += 1
            if kept is not None:
                kept.append((k, v))
            yield k, v

    @functools.cached_property
    def heads(self) -> tuple[int, ...]:
        """Kv heads of each group."""
        return tuple([group.parts[0][0].shape[1] for group in self.groups])

    def _rooms(self, k: Any, v: Any) -> list[Any]:
        """Where a group's keys and values are put in order: in the memory of those of the group with most heads."""
        rows, most = self.plan.key_rows, max(self.heads)
        return [self.plan.buffer(name, (rows, *x.shape[1:]), x.dtype, (rows, most, x.shape[2]))
                for name, x in (("k", k), ("v", v))]


def gather(
    engine: Any, comm: Comm, plan: Plan, k: Any, v: Any, groups: tuple[int, ...], at_once: bool = False,
    given: tuple[Any, Any] = (None, None),
) -> Keys:
    """Starts to gather the keys and values of all ranks, a share of the kv heads at a time.

    Args:
        engine: engines.reference or engines.cuda.
        k, v: this rank's rows, (local_key_rows, heads, width); the engine's arrays.
        groups: kv heads of each group; none: all at once.
        at_once: the forward or backward follows, with nothing between.
        given: see Keys.

    Raises:
        ValueError: IN_FLIGHT gathers of this plan wait for their forward or backward.
    """
    if comm.size == 1:
        return Keys(k, v, plan, [Arrival([[k], [v]])], True, given)
    turns = _turns.setdefault(plan, _Turns())
    turn = turns.next(engine.capture() is not None, at_once)
    places: Sequence[Any] = _Places(plan, turn, k, v, groups or (k.shape[1],))
    if not at_once:
        places = [*places]  # all are asked for: before other ranks count on this one
    keys = Keys(k, v, plan, comm.gather_heads((k, v), places, at_once), False, given)
    turns.last[turn] = weakref.ref(keys)
    return keys


def memory(engine: Any, comm: Comm, plan: Plan, layer: Layer) -> Memory:
    """Bytes of all that gather, forward and backward have made, for a layer with this plan, which needs no arrays."""
    groups, dims, sum_dtype = layer.groups, plan.head_dims, lse_dtype(layer.dtype)
    in_place = int(comm.overlaps)  # the first group of keys
    num_gathered = comm.size * plan.local_key_rows

    def rows_of(num_rows: int, heads: int, dtype: DTypeLike) -> list[int]:
        return [num_bytes((num_rows, heads, width), dtype) for width in dims]

    queries, outs = rows_of(plan.local_rows, layer.num_heads, layer.dtype)
    keys, values = sends = rows_of(plan.local_key_rows, layer.num_kv_heads, layer.dtype)
    forward = {"plan": engine.plan_bytes(plan)}
    forward["keys in rank order"] = sum(rows_of(num_gathered, sum(groups[in_place:]), layer.dtype))
    forward |= comm.gather_bytes(sends, len(groups))
    backward = comm.sum_bytes([rows_of(num_gathered, heads, sum_dtype) for heads in groups])
    if in_place:
        backward["places of keys"] = 4 * (2 * (plan.key_rows + 1 + num_gathered) + plan.local_key_rows)
    if not layer.keeps_keys:
        forward["keys in sequence order"] = sum(rows_of(plan.key_rows, max(groups), layer.dtype))
    forward |= engine.forward_bytes(plan, layer)
    backward |= engine.backward_bytes(plan, layer, sum_dtype, "home" if in_place else "made")
    saved = {"q": queries, "k": keys, "v": values, "out": outs,
             "lse": num_bytes((layer.num_heads, plan.local_rows), lse_dtype(layer.dtype))}  # fmt: skip
    if layer.keeps_keys:
        saved["kept keys"] = sum(rows_of(plan.key_rows, layer.num_kv_heads, layer.dtype))
    return Memory(forward, backward, saved, {"dq": queries, "dk": keys, "dv": values})


class _Turns:
    """Which buffers of a plan are free for another gather.

    A captured graph writes to its own at every replay, so that no eager gather that waits for its call has them.

    Attributes:
        last: what returns the keys of the last gather into each of the buffers, in captures too.
    """

    def __init__(self) -> None:
        self.last: list[Callable[[], Keys | None]] = []
        self._of_graphs: set[int] = set()

    def next(self, captured: bool, at_once: bool) -> int:
        """Return the number of the buffers of a gather: the first free ones, as few are made.

        Raises:
            ValueError: IN_FLIGHT gathers wait for their forward or backward.
        """
        free = [turn for turn, last in enumerate(self.last) if _is_free(last())]
        if len(self.last) - len(free) >= IN_FLIGHT:
            raise ValueError(
                f"gather was called with {IN_FLIGHT} gathers of this plan under way, wanted fewer, as each has buffers "
                f"of its own; call forward or backward with one of them first"
            )
        turn = next((turn for turn in free if captured or at_once or turn not in self._of_graphs), len(self.last))
        if turn == len(self.last):
            self.last.append(_nobody)
        if captured:
            self._of_graphs.add(turn)
        return turn


class _Places(Sequence[list[Any]]):
    """Where gathered keys and values of each group go, made when they are asked for."""

    def __init__(self, plan: Plan, turn: int, k: Any, v: Any, groups: tuple[int, ...]) -> None:
        self._plan, self._turn, self._arrays, self._groups = plan, turn, (k, v), groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, group: Any) -> list[Any]:
        if not 0 <= group < len(self):
            raise IndexError(group)
        rows, heads = self._plan.cp_size * self._plan.local_key_rows, self._groups[group]
        return [self._plan.buffer(f"{name} of ranks {self._turn} {group}", (rows, heads, x.shape[2]), x.dtype)
                for name, x in zip("kv", self._arrays, strict=True)]


def forward(
    engine: Any, comm: Comm, plan: Plan, q: Any, k: Any, v: Any, call: Call, return_max_logit: bool,
    keys: Keys | None = None,
) -> Results:
    """Attention of this rank's query rows over the keys of all ranks; see Call.

    Args:
        keys: from gather, if that has been called before.
    """
    keys = keys or gather(engine, comm, plan, k, v, call.groups, at_once=True)
    kept: list[tuple[Any, Any]] | None = [] if call.keeps_keys else None
    rows, num_heads, _ = q.shape
    out = engine.empty((rows, num_heads, keys.v.shape[2]), q.dtype)
    lse = engine.empty((num_heads, rows), lse_dtype(q.dtype))
    logits = []
    for heads, (k, v) in zip(_shares(num_heads, keys), keys.in_order(engine, kept), strict=True):
        its_q, its_out = _some_heads(heads, q, out)
        into, sinks = (its_out, _some_rows(heads, lse)), None if call.sinks is None else call.sinks[heads]
        logits.append(engine.attn_fwd(
            its_q, k, v, plan, call.softmax_scale, return_max_logit, into, softcap=call.softcap, sinks=sinks,
            groups=keys.heads)[2])
    kept_keys = None if kept is None else tuple(kept)
    if not return_max_logit:
        return Results(out, lse, None, kept_keys)
    max_logit = joined(logits)
    engine.nan_if_invalid(plan, max_logit)
    comm.all_reduce(max_logit, "max")
    return Results(out, lse, max_logit, kept_keys)


def backward(
    engine: Any, comm: Comm, plan: Plan, dout: Any, saved: Tensors, call: Call, at_once: bool,
    keys: Keys | None = None,
) -> tuple[Any, Sums]:
    """Gradients of `forward` for this rank's rows of q, k, v; see Call.

    Args:
        at_once: the sums are asked for next, so that the last ones hide behind nothing.
        keys: from gather, if that has been called before; those that forward kept are used first.

    Returns:
        (dq, sums): the shape and dtype of q; dk and dv, which are on their way.
    """
    q, k, v, out, lse, kept = saved
    if kept is not None:
        keys = Keys(k, v, plan, [Arrival([[x] for x in parts]) for parts in kept], ordered=True)
    keys = keys or gather(engine, comm, plan, k, v, call.groups, at_once=True)
    go_home, sum_dtype = comm.overlaps, lse_dtype(q.dtype)
    dq = engine.empty(q.shape, q.dtype)
    # From now on, so that after an error too nobody gets the memory of dk and dv before their sums are there.
    sums = Sums(engine, plan, [engine.empty(x.shape, x.dtype) for x in (keys.k, keys.v)], [])
    groups = zip(_shares(q.shape[1], keys), _shares(keys.k.shape[1], keys), keys.in_order(engine), strict=True)
    largest = [(len(x), max(keys.heads), x.shape[2]) for x in sums.grads]
    places, rows = places_of_keys(plan) if go_home else (None, None)  # made before other ranks count on this one
    for heads, kv_heads, (k, v) in groups:
        results = _some_heads(kv_heads, *sums.grads)
        is_last = at_once and heads.stop == q.shape[1]
        homes = None
        if go_home:
            homes = comm.owner_partials([x.shape for x in results], largest, is_last), places
        its_dout, its_q, its_out, its_dq = _some_heads(heads, dout, q, out, dq)
        try:
            _, *shares = engine.attn_bwd(
                its_dout, its_q, k, v, its_out, _some_rows(heads, lse), plan, call.softmax_scale, sum_dtype,
                call.deterministic, (its_dq, None), softcap=call.softcap, homes=homes, groups=keys.heads)
        except BaseException:
            if go_home:
                comm.drop_partials()
            raise
        if go_home:
            sums.waits.append(comm.reduce_partials(rows, results, is_last))
        else:
            _sum_rows(engine, comm, plan, shares, results)
    engine.nan_if_invalid(plan, dq)
    return dq, sums


@dataclass(eq=False, repr=False)
class Sums:
    """dk and dv, summed over all ranks and rounded once, on their way or there; calling it waits and returns them."""

    engine: Any
    plan: Plan
    grads: Sequence[Any]
    waits: list[Callable[[], None]]

    def __call__(self) -> tuple[Any, Any]:
        self._wait()
        dk, dv = self.grads
        self.engine.nan_if_invalid(self.plan, dk, dv)
        return dk, dv

    def __del__(self) -> None:
        self._wait()

    def _wait(self) -> None:
        while self.waits:
            self.waits.pop(0)()


def _sum_rows(engine: Any, comm: Comm, plan: Plan, shares: Sequence[Any], results: Sequence[Any]) -> None:
    """Gradients of this rank's rows, of all ranks' shares in sequence order."""
    partials = [engine.empty((len(plan.rank_order), *x.shape[1:]), x.dtype) for x in shares]
    comm.sum_rows(engine.to_rank_order(*shares, plan, partials), results)


def _shares(num_heads: int, keys: Keys) -> list[slice]:
    """Which of so many heads belong to each group."""
    each = num_heads // keys.k.shape[1]
    ends = [*itertools.accumulate(each * size for size in keys.heads)]
    return [slice(first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def _some_heads(heads: slice, *arrays: Any) -> Sequence[Any]:
    """Some of the heads of arrays (rows, heads, width): the arrays themselves if these are all: views take time."""
    every = heads.stop - heads.start == arrays[0].shape[1]
    return arrays if every else [x[:, heads] for x in arrays]


def _some_rows(rows: slice, x: Any) -> Any:
    """The same of rows."""
    return x if rows.stop - rows.start == len(x) else x[rows]


def _nobody() -> None:
    """A reference to nothing."""


def _is_free(keys: Keys | None) -> bool:
    """Whether the buffers of a gather may be written again, after what has been enqueued so far."""
    return keys is None or keys.used
