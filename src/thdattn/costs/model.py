"""Costs of an attention layer for every way to spread it over ranks: bytes, work, memory and predicted time.

The model runs no attention and no communication: all numbers follow from the lengths and the plans of CPAttention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.attention import CPAttention
from thdattn.balance import Ints
from thdattn.comm import SingleComm
from thdattn.costs.tile_counts import TILE, counted_ranks, own_tiles, pairs_and_tiles, tiles_of_steps
from thdattn.methods import all_gather, group_cast, p2p
from thdattn.methods.base import Method, lse_dtype
from thdattn.packing import PackedBatch
from thdattn.plan.plan import Plan

START_OF_QUERIES = 3  # overhead of a tile of query rows in the backward, in tiles of compute
CLOSE = 1.03  # ratio of times up to which predictions count as equal
BESIDE = 1.03  # slowdown of kernels while copies overlap them
PRODUCTS = 1.0, 2.5  # matrix products of forward and backward, over those of the forward
PIECES = (3, 2), (1, 3)  # copies per rank of an overlapped exchange of heads, before and after forward and backward


class Rates(NamedTuple):
    """Rates of a machine; by default those measured on H200 with NVLink, with 400 Gbit/s per GPU between machines.

    Attributes:
        forward, backward: FLOP/s of the attention kernels in whole tiles.
        link: bytes per second that a GPU receives from GPUs of its own machine.
        between: bytes per second that a GPU receives from other machines.
        memory: bytes per second that a GPU reads and writes in its own memory.
        latency: least seconds of a kernel, a collective, or one part of an exchange of heads.
    """

    forward: float = 730e12
    backward: float = 650e12
    link: float = 300e9
    between: float = 45e9
    memory: float = 3e12
    latency: float = 20e-6


H200 = Rates()


@dataclass(frozen=True)
class Shape:
    """An attention layer: arguments of CPAttention. The engine determines the memory.

    per_node: ranks of one machine; None: all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    per_node: int | None = None
    engine: str = "auto"


class Way(NamedTuple):
    """Arguments of CPAttention and its plan that spread a batch. inner: neighbours that a2a+... exchanges among."""

    cp_comm_type: str
    sharding: str
    inner: int = 1

    def multiple(self, cp_size: int) -> int:
        """Return the number that must divide every padded length."""
        shares = cp_size // self.inner
        return 2 * shares if self.sharding == "dual_chunk" and shares > 1 else 1

    def __str__(self) -> str:
        inner = f" ({self.inner} neighbours)" if self.inner > 1 else ""
        return f"{self.cp_comm_type}{inner}, {self.sharding}"


class Both(NamedTuple):
    """Numbers of the forward and of the backward, such as seconds or bytes."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Cost:
    """Costs of one layer in one way.

    received: most bytes that a rank receives.
    work: visible pairs of the busiest rank, over the mean.
    tiles: tiles of scores of the busiest rank, over all its heads.
    memory: bytes that must be free besides q, k and v, on the rank that needs most.
    compute: seconds of the attention kernels.
    seconds: seconds of the whole layer.
    """

    way: Way
    received: Both
    work: float
    tiles: int
    memory: int
    compute: Both
    seconds: Both


class OnPaper(SingleComm):
    """A rank of a layout that exists on paper only; it cannot communicate.

    reads_peers: True if all ranks are on one machine; else NCCL carries what is exchanged, beside kernels too.
    """

    name, overlaps = "paper", True

    def __init__(self, rank: int, size: int, per_node: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.reads_peers = size <= per_node
        self.spans_machines = not self.reads_peers

    def _gather_values(self, value: Any) -> list[Any]:
        return [value] * self.size


def ways(cp_size: int) -> Iterator[Way]:
    """List all methods for so many ranks, by default and balanced, whether or not the heads allow them."""
    yield from (Way("all_gather", "dual_chunk"), Way("all_gather", "balanced"), Way("a2a", "contiguous"),
                Way("p2p", "dual_chunk"))
    for inner in (n for n in range(2, cp_size) if cp_size % n == 0):
        yield from (Way("a2a+all_gather", "dual_chunk", inner), Way("a2a+all_gather", "balanced", inner),
                    Way("a2a+p2p", "dual_chunk", inner))


def predicted(
    batch: PackedBatch, cp_size: int, *, cp_comm_type: str, sharding: str, inner: int = 1, rates: Rates = H200,
    **layer: Any,
) -> Both:
    """Predict the seconds of forward and backward of one layer on the busiest rank.

    Args:
        batch: lengths on the host, padded as the sharding needs.
        cp_size: number of ranks.
        cp_comm_type: as for thdattn.CPAttention.
        sharding: "dual_chunk", "contiguous" or "balanced".
        inner: ranks among which a cp_comm_type with a "+" exchanges heads.
        rates: how fast the machine is.
        layer: num_heads, num_kv_heads, and if wanted head_dim, causal and window, as for thdattn.CPAttention; and
            per_node, the ranks of one machine (default: all).

    Returns:
        Seconds of the forward and of the backward.

    Raises:
        TypeError, ValueError: as CPAttention and its plan, if the method cannot work.
    """
    return cost(batch, cp_size, Shape(**layer), Way(cp_comm_type, sharding, inner), rates).seconds


def cost(batch: PackedBatch, cp_size: int, shape: Shape, way: Way, rates: Rates = H200) -> Cost:
    """Predict the costs of one layer in one way.

    Raises:
        TypeError, ValueError: as CPAttention and its plan, where the way cannot work; also a ValueError for trees.
    """
    if batch.trees is not None:
        raise ValueError("batch has trees, wanted sequences, as the model knows the kernels' times for these alone; "
                         "pass a batch of the paths (PackedBatch.paths)")
    layer = _Layer.of(batch, cp_size, shape, way)
    clocks = [_Clock(layer, rates, direction) for direction in (0, 1)]
    pairs, tiles = layer.pairs_and_tiles
    return Cost(
        way=way,
        received=Both(*(heads.received() + rows.received()
                        for heads, rows in zip(layer.heads_moves, layer.rows_moves, strict=True))),
        work=float(pairs.max() / pairs.mean()) if pairs.any() else 1.0,
        tiles=int(tiles.max()) * layer.heads,
        memory=_memory(batch, cp_size, shape, way),
        compute=Both(*(clock.compute(int(tiles.max()), 1.0) for clock in clocks)),
        seconds=Both(*(clock.seconds() for clock in clocks)),
    )


def compared(
    lengths: Sequence[int], cp_size: int, shape: Shape, rates: Rates = H200, chosen: Sequence[Way] = ()
) -> tuple[list[Cost], dict[Way, str]]:
    """Predict the costs of ways to spread sequences of these lengths, all by default, each padded as its way needs.

    Returns:
        costs, refusals: those that work, the fastest first (of equals the one that needs least memory), and why others
        do not.

    Raises:
        TypeError, ValueError: lengths, or a shape, that no way can work with.
    """
    _attention(0, 1, shape, Way("all_gather", "dual_chunk"))
    batches: dict[int, PackedBatch] = {}
    costs: list[Cost] = []
    refusals: dict[Way, str] = {}
    for way in chosen or ways(cp_size):
        multiple = way.multiple(cp_size)
        if multiple not in batches:
            batches[multiple] = PackedBatch.from_lengths(lengths, multiple)
        try:
            costs.append(cost(batches[multiple], cp_size, shape, way, rates))
        except ValueError as error:
            refusals[way] = str(error)
    return sorted(costs, key=lambda found: (found.seconds.total, found.memory)), refusals


def attention_flops(plan: Plan, tiles: int, num_heads: int, direction: int) -> float:
    """Floating-point operations that kernels do, or could do, in their time, for so many tiles of each head.

    Args:
        direction: 0 forward, 1 backward.
    """
    starts = -(-plan.local_rows // TILE) * START_OF_QUERIES * direction
    return 2 * TILE * TILE * sum(plan.head_dims) * PRODUCTS[direction] * (tiles + starts) * num_heads


def recommended(costs: Sequence[Cost]) -> Cost:
    """Choose the fastest way on one level of ranks, unless one on two levels is faster by more than CLOSE."""
    close = [found for found in costs if found.seconds.total <= CLOSE * costs[0].seconds.total]
    return min(close, key=lambda found: found.way.inner > 1)  # the first of equals


class Moves(NamedTuple):
    """Bytes sent in one direction, on one level: (size, size), from rank i to rank j, 0 to itself.

    before, after: bytes sent before and after the attention of the rows.
    """

    before: Ints
    after: Ints

    def received(self) -> int:
        """Return the most bytes that a rank receives."""
        return int((self.before + self.after).sum(axis=0).max())


@dataclass(frozen=True)
class _Layer:
    """Layer as rank 0 sees it: its plan without arrays, and what its method does.

    core: the plan between the ranks that have the rows of the same heads; the plan itself if no heads are exchanged.
    method: the method between these ranks.
    groups: shares of the heads that are computed one after another.
    inner: number of ranks that exchange heads with each other.
    heads, kv_heads: heads of which a rank computes rows.
    """

    plan: Plan
    core: Plan
    method: Method
    groups: Sequence[float]
    keeps_keys: bool
    inner: int
    per_node: int
    heads: int
    kv_heads: int
    has_shared_heads: bool
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, batch: PackedBatch, cp_size: int, shape: Shape, way: Way) -> _Layer:
        attention = _attention(0, cp_size, shape, way)
        plan = attention._outline(batch, way.sharding, None, None, False)
        options, inner = attention._method_options(plan), cp_size if way.cp_comm_type == "a2a" else way.inner
        return cls(
            plan, plan.core or plan, attention._selection.between(plan),
            [size / shape.num_kv_heads for size in options.head_groups], options.keep_keys, inner,
            shape.per_node or cp_size, shape.num_heads // inner, max(1, shape.num_kv_heads // inner),
            shape.num_kv_heads < inner, attention.dtype)

    @cached_property
    def pairs_and_tiles(self) -> tuple[Ints, Ints]:
        """Return visible pairs, and tiles of one head, of counted_ranks."""
        return pairs_and_tiles(self.core.sharding, self.core.window)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Return bytes a row: keys and values of the heads that a rank has, and sums of their gradients."""
        width = self.kv_heads * sum(self.plan.head_dims)
        return width * self.dtype.itemsize, width * lse_dtype(self.dtype).itemsize

    @cached_property
    def heads_moves(self) -> tuple[Moves, Moves]:
        """Return the bytes moved to exchange heads, of the forward and of the backward."""
        query, out = (self.heads * width * self.dtype.itemsize for width in self.plan.head_dims)
        keys, float_sums = self.row_bytes
        result = out + self.heads * lse_dtype(self.dtype).itemsize  # with lse
        again = 0 if self.keeps_keys else query + keys + result
        sizes = (query + keys, result), (out + again, query + (float_sums if self.has_shared_heads else keys))
        forward, backward = (Moves(*(_to_each(self.inner, self.plan.local_rows * size) for size in both))
                             for both in sizes)
        return forward, backward

    @cached_property
    def rows_moves(self) -> tuple[Moves, Moves]:
        """Return the bytes moved for the rows of other ranks, of the forward and of the backward."""
        core, is_ring = self.core, self.method is p2p
        table = _to_each(core.cp_size, core.local_key_rows)
        if core.routes is not None and not is_ring:
            table = core.routes.table
        keys, sums = self.row_bytes
        again = 0 if self.keeps_keys and not is_ring else keys
        return Moves(table * keys, 0 * table), Moves(table * again, table.T * sums)


@dataclass(frozen=True)
class _Clock:
    """Predicts how long a layer takes. direction: 0 forward, 1 backward.

    A part is a share of the heads: all are computed at once, or one part after another.
    """

    layer: _Layer
    rates: Rates
    direction: int

    def seconds(self) -> float:
        """Return the seconds of the whole layer."""
        layer, number = self.layer, len(self.layer.groups)
        if layer.plan.core is None:
            return self._rows(layer.groups if layer.method is all_gather else [1.0])
        between = self._rows([1 / number])
        pieces = [(layer.inner - 1) * each * self.rates.latency for each in PIECES[self.direction]]
        before, after = ([self._travel(x / number, layer.per_node) + each] * number
                         for x, each in zip(layer.heads_moves[self.direction], pieces, strict=True))
        if layer.inner <= layer.per_node:  # an exchange that overlaps nothing is one kernel
            before[0] -= pieces[0] * (number == 1)
            after[-1] -= pieces[1]
        return _in_turns([between] * number, before, after)

    def compute(self, tiles: int, part: float) -> float:
        """Return the seconds of attention over so many tiles."""
        flops = attention_flops(self.layer.core, tiles, self.layer.heads, self.direction)
        return self.rates.latency + part * flops / self.rates[self.direction]

    def _rows(self, parts: Sequence[float]) -> float:
        """Return the seconds of the method for rows, of one part after another."""
        layer, rows = self.layer, self.layer.rows_moves[self.direction]
        if layer.method is p2p:
            return self._ring(rows, *parts)
        if layer.method is group_cast:
            return self._needed(rows, *parts)
        _, tiles = layer.pairs_and_tiles
        work = [self.compute(int(tiles.max()), part) + self._put_in_order(rows, part) for part in parts]
        before, after = ([self._travel(x * part, self._neighbours, relayed=True) for part in parts] for x in rows)
        if self._is_near and after[-1]:  # the exchange overlaps its own kernel
            after[-1], work[-1] = min(after[-1], self.rates.latency), work[-1] * BESIDE
        return _in_turns(work, before, after)

    def _needed(self, rows: Moves, part: float) -> float:
        """Overlap tiles of a rank's own rows with receiving keys (forward) or sending sums (backward)."""
        core, (_, tiles) = self.layer.core, self.layer.pairs_and_tiles
        work = np.array([self.compute(int(number), part) for number in tiles])
        before, after = (self._travel(x * part, self._neighbours) for x in rows)
        hides = rows.received() >= group_cast.WORTH_OVERLAPPING
        own = hides * work * own_tiles(core.sharding, core.window)[self.direction] / np.maximum(1, tiles)
        travel, rest = (after, before) if self.direction else (before, after)
        return float((work - own + np.maximum(own, travel)).max()) + rest + self._put_in_order(rows, part)

    def _put_in_order(self, rows: Moves, part: float) -> float:
        """Return the seconds in which a rank moves all keys to their places in the key buffer, and back.

        Gradients of keys of all ranks are in the order of ranks as kernels store them; they are read to be added up.
        """
        stored = self.layer.method is all_gather
        moved = sum(passes * (int(x.sum(axis=0).max()) + size * self.layer.core.local_key_rows)
                    for passes, size, x in zip((2, 1 if stored else 2), self.layer.row_bytes, rows, strict=True)
                    if x.any())
        return part * moved / self.rates.memory

    def _ring(self, rows: Moves, part: float) -> float:
        """Add the steps of a ring, each as long as that of the busiest rank."""
        core, size = self.layer.core, self.layer.core.cp_size
        merged = core.local_rows * self.layer.heads * core.head_dims[1 - self.direction] * 4  # out or dq, in float32
        merging = 2 * part * merged / self.rates.memory
        work = [self.compute(int(tiles), part) + merging for tiles in tiles_of_steps(core.sharding, core.window)]
        rate = self.rates.link if self._is_near else self.rates.between
        keys, sums = (self.rates.latency + part * float(x.max()) / rate for x in rows)
        if self.direction == 0:  # every step except the last overlaps the exchange of the next slice
            return sum(max(now, keys) for now in work[:-1]) + work[-1]
        # The own slice is the last one; sums follow a hop behind the keys.
        steps = [max(now, keys * (step < size - 2) + sums * (step > 0))
                 for step, now in enumerate([*work[1:], work[0]])]
        return keys + sum(steps)

    @property
    def _neighbours(self) -> int:
        """Return how many of the ranks that exchange rows are on one machine."""
        return max(1, self.layer.per_node // self.layer.inner)

    @property
    def _is_near(self) -> bool:
        """Tell if all ranks that exchange rows are on one machine."""
        return self._neighbours >= self.layer.core.cp_size

    def _travel(self, table: NDArray[Any], neighbours: int, relayed: bool = False) -> float:
        """Return the seconds until all ranks have received. relayed: another machine sends bytes once, to any rank."""
        if not table.any():
            return 0.0
        machine = np.arange(len(table)) // neighbours
        apart = machine[:, None] != machine
        near, far = (max(part.sum(axis=0).max(), part.sum(axis=1).max()) for part in (table * ~apart, table * apart))
        if relayed:
            far /= neighbours
        return float(self.rates.latency + max(near / self.rates.link, far / self.rates.between))


def _in_turns(work: Sequence[float], before: Sequence[float], after: Sequence[float]) -> float:
    """Return the seconds of consecutive parts that overlap with the next input and the last output on the wire."""
    copies = [coming + going for coming, going in zip([*before[1:], 0], [0, *after[:-1]], strict=True)]
    return before[0] + sum(max(now * BESIDE if x else now, x) for now, x in zip(work, copies, strict=True)) + after[-1]


def _to_each(size: int, number: int) -> Ints:
    """Return (size, size): a number that every rank sends to every other one."""
    return number * (1 - np.eye(size, dtype=np.int64))


def _memory(batch: PackedBatch, cp_size: int, shape: Shape, way: Way) -> int:
    """Return the bytes of the rank that needs most, of counted_ranks; only needed rows differ."""
    ranks = way.inner * counted_ranks(cp_size // way.inner) if way.sharding == "balanced" else np.zeros(1, int)
    return max(_attention(rank, cp_size, shape, way).memory(batch, way.sharding).wanted() for rank in ranks.tolist())


def _attention(rank: int, cp_size: int, shape: Shape, way: Way) -> CPAttention:
    per_node = shape.per_node or cp_size
    comm: Any = OnPaper(rank, cp_size, per_node)
    if "+" in way.cp_comm_type:
        outer, inner = divmod(rank, way.inner)
        neighbours = max(1, per_node // way.inner)
        comm = OnPaper(inner, way.inner, per_node), OnPaper(outer, cp_size // way.inner, neighbours)
    return CPAttention(comm, shape.num_heads, shape.head_dim, shape.num_kv_heads, causal=shape.causal,
                       window=shape.window, engine=shape.engine, cp_comm_type=way.cp_comm_type)
