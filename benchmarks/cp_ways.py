"""Attention layers that bench_cp.py times: over real ranks, over ranks that two GPUs play, and on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from functools import partial
from typing import NamedTuple, Protocol

import cp_methods
import cupy
import numpy as np
import peers
import record
from cp_methods import BESIDE, EXCHANGE, INNER, USUAL, Method
from peers import Ours
from rank_of import Exchanging, as_rank_of
from workloads import Case

import thdattn
from thdattn.capacity import BalancedCapacity
from thdattn.comm import Comm, SingleComm, no_wait
from thdattn.engines import AttentionOptions, BackwardInputs, BackwardOutputs, ForwardInputs, cuda
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack
from thdattn.plan.layout_tables import needed_capacity
from thdattn.plan.owners import places_of_keys


class Timed(Protocol):
    """Attention layer that is timed; backward follows the last forward."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...


class Ranks(NamedTuple):
    """Real ranks, and the ranks that they behave as.

    real: comm of the real ranks. size: number of the ranks that they behave as.
    gathering: comm for collectives of all ranks; the real one, unless others are played.
    levels: (inner, outer) of the real ranks; None: there are too few, or others are played.
    """

    real: Comm
    size: int
    gathering: Comm
    levels: tuple[Comm, Comm] | None

    @classmethod
    def of(cls, real: Comm, size: int) -> Ranks:
        if size != real.size:
            return cls(real, size, as_rank_of(real, size), None)
        groups = real.size >= 2 * INNER and real.size % INNER == 0
        levels = (real.split(real.rank // INNER), real.split(real.rank % INNER)) if groups else None
        return cls(real, size, real, levels)

    def refusal(self, method: Method, case: Case) -> str:
        """Return why a case cannot be spread over these ranks; "" if it can."""
        if method.two_levels and self.size != self.real.size:
            return "two ranks cannot play two levels"
        return method.refusal(case, self.size)

    def comm(self, method: Method, case: Case) -> Comm | tuple[Comm, Comm]:
        """Return the comm that CPAttention gets for a method; ranks with most work are played where work is uneven."""
        if method.two_levels:
            assert self.levels is not None
            return self.levels
        if self.size == self.real.size or method == USUAL:
            return self.gathering
        return Exchanging(self.real, self.size, self._busiest(method, case))

    def _busiest(self, method: Method, case: Case) -> tuple[int, int]:
        """Return the two ranks with most work, in ascending order."""
        pairs = cp_methods.work(thdattn.Sharding(method.padded(case, self.size), self.size, method.sharding))
        first, second = sorted(np.argsort(np.array(pairs), kind="stable")[-2:].tolist())
        return first, second


class Layer(Ours):
    """Layer over ranks, with a given number of head groups, or as many as CPAttention chooses.

    Attributes:
        attn, plan: of this rank, for the pack with the padding that the sharding needs.
        inputs: this rank's rows.
    """

    def __init__(
        self, comm: Comm | tuple[Comm, Comm], case: Case, method: Method = USUAL, head_groups: int | None = None,
        batch: thdattn.PackedBatch | None = None,
    ) -> None:
        self.case, self.method, self.head_groups = case, method, head_groups
        self.attn = case.attention("cuda", comm, head_groups=head_groups, cp_comm_type=method.cp_comm_type)
        self._comms = comm if isinstance(comm, tuple) else (comm,)
        self.batch = batch or method.padded(case, self.attn.comm.size)
        self.plan = self.attn.plan(self.batch, method.sharding)
        self.inputs = peers.draw_inputs(case, self.plan.local_rows)

    def new_plan(self) -> thdattn.Plan:
        """Make the plan of a new batch, of which nothing is cached."""
        return self.attn.plan(self.method.padded(self.case, self.plan.cp_size), self.method.sharding)

    def choices(self) -> record.Row:
        """Return the columns with method, sharding and head groups."""
        return {"method": self.method.cp_comm_type, "sharding": self.method.sharding,
                "head_groups": str(len(self.attn._groups(self.plan)))}

    @property
    def captured(self) -> bool:
        """True if it is timed in a CUDA graph; balanced rows of played ranks are not."""
        return self.method.sharding != "balanced" or not isinstance(self.attn.comm, Exchanging)

    def received(self) -> int:
        """Count the bytes from other ranks in one forward and one backward."""
        before = sum(comm.received_bytes for comm in self._comms)
        both(self)
        return sum(comm.received_bytes for comm in self._comms) - before


class Alone:
    """Attention kernels of a layer, on keys and values of all ranks that are already in sequence order."""

    def __init__(self, layer: Layer) -> None:
        _, k, v, _ = layer.inputs
        self.layer, self._options = layer, AttentionOptions(layer.attn.softmax_scale)
        shapes = ((layer.plan.key_rows, *x.shape[1:]) for x in (k, v))
        self._keys, self._values = (peers.normal(shape, seed) for seed, shape in enumerate(shapes, 1))
        self._sum_dtype = np.dtype(np.float32) if layer.plan.cp_size > 1 else k.dtype

    def forward(self) -> None:
        layer = self.layer
        inputs = ForwardInputs(layer.inputs.q, self._keys, self._values, layer.plan)
        self._out, self._lse, _ = cuda.attn_fwd(inputs, self._options)

    def backward(self) -> None:
        layer = self.layer
        inputs = BackwardInputs(
            layer.inputs.dout, layer.inputs.q, self._keys, self._values, self._out, self._lse, layer.plan)
        self._grads = cuda.attn_bwd(inputs, self._options, BackwardOutputs(self._sum_dtype))


class Exchange:
    """Gathers and sums of an all_gather layer without its kernels: all heads at once, beside the current stream."""

    def __init__(self, layer: Layer) -> None:
        self._plan, self._comm, self._kept = layer.plan, layer.attn.comm, layer.attn._keeps(layer.plan)
        _, *self._keys, _ = layer.inputs
        empty = self._plan.engine.empty
        self._gathered = [empty((self._plan.cp_size * len(x), *x.shape[1:]), x.dtype) for x in self._keys]
        self._grads = [empty(x.shape, x.dtype) for x in self._keys]

    def forward(self) -> None:
        self.start_forward()()

    def backward(self) -> None:
        self.start_backward()()

    def start_forward(self) -> Callable[[], None]:
        """Start to gather keys; return a function that waits for them."""
        (arrival,) = self._comm.gather_heads(self._keys, [self._gathered])

        def wait() -> None:
            arrival.wait()
            arrival.done()

        return wait

    def start_backward(self) -> Callable[[], None]:
        """Start to sum gradients, and to gather keys that are not kept; return a function that waits for both."""
        gathered = no_wait if self._kept else self.start_forward()
        shapes = [x.shape for x in self._grads]
        self._comm.owner_partials(shapes, shapes, False)
        _, rows = places_of_keys(self._plan, self._comm.reads_peers)
        summed = self._comm.reduce_partials(rows, self._grads, False, False)

        def wait() -> None:
            gathered()
            summed()

        return wait


class Beside:
    """Attention alone, timed while an exchange that takes less time goes on beside it."""

    def __init__(self, alone: Alone, exchange: Exchange) -> None:
        self._alone, self._exchange, self._wait = alone, exchange, no_wait

    def forward(self) -> None:
        self._wait()
        self._wait = self._exchange.start_forward()
        self._alone.forward()

    def backward(self) -> None:
        self._wait()
        self._wait = self._exchange.start_backward()
        self._alone.backward()


def exchanged(alone: Alone) -> dict[str, Timed]:
    """Return the ways of --exchange; between machines an exchange may outlast the attention, which is then not timed.
    """
    exchange = Exchange(alone.layer)
    return {EXCHANGE: exchange} | ({} if alone.layer.attn.comm.spans_machines else {BESIDE: Beside(alone, exchange)})


def both(layer: Timed) -> None:
    layer.forward()
    layer.backward()


def steps(layer: Timed) -> dict[str, Callable[[], None]]:
    return {"forward": layer.forward, "backward": layer.backward}


def free_memory() -> int:
    """Return the free bytes of the GPU, after the pools have given back unused memory."""
    peers.release_memory()
    free, _ = cupy.cuda.runtime.memGetInfo()
    return int(free)


def captured(stack: ExitStack, name: str, layer: Layer) -> Callable[[], object]:
    """Capture forward and backward as one graph that lives as long as the stack.

    The graph is of a copy of the layer, so that nobody else holds its results. Of balanced rows it serves other layouts
    too.
    """
    graphs = stack.enter_context(Graphs(layer.attn.comm, CudaGraphConfig(impl="local", warmup_steps=1)))
    balanced = layer.method.sharding == "balanced"
    replay = graphs.captured(partial(both, within_capacity(layer, graphs) if balanced else copy(layer)), name)
    for _ in range(2):
        replay()
    return replay


def within_capacity(layer: Layer, graphs: Graphs) -> Layer:
    """Return a copy of a layer whose plan serves all layouts that need an eighth more than its own, at most."""
    sharding = layer.plan.sharding
    messages, keys, early_queries, early_keys = needed_capacity(sharding.outer or sharding, [layer.plan.mask])
    assert early_keys is not None
    capacity = BalancedCapacity(messages + messages // 8, keys + keys // 8, early_queries - early_queries // 8,
                                early_keys + early_keys // 8)
    pack = StaticPack(graphs, [layer.attn], layer.batch.total_rows, capacity, like=layer.batch, finite_padding=True)
    pack.load([layer.batch])
    made = copy(layer)
    (made.plan,) = pack.plans()
    return made


def started(make: Callable[[], Layer]) -> tuple[Layer, int]:
    """Make a layer and run it once; return it with the free memory before the run."""
    layer = make()
    free = free_memory()
    both(layer)
    return layer, free


def whole_pack(case: Case) -> Layer:
    """Make the layer of the whole pack on this GPU alone."""
    comm = SingleComm()
    memory = case.attention("cuda", comm=comm).memory(case.batch())
    wanted = memory.wanted() + 2 * sum(memory.saved[name] for name in ("q", "k", "v"))  # dout is no larger
    if wanted > 0.9 * free_memory():
        raise MemoryError(f"one GPU would need {wanted / 2**30:.0f} GiB beside the rest, and is left out")
    return Layer(comm, case)
