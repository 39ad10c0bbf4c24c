"""Forward and backward over the micro-batches of a step: kernel by kernel, or as CUDA graphs.

All ways compute the same numbers, bit for bit where the attention is deterministic. A graph reads micro-batches at the
addresses of the first ones, so later ones are copied there before every replay. Plans and positions follow from them on
the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from data import MicroBatch
from grid import Grid
from model import Model
from parts import ModelPlan, Part, Sums

from thdattn import PackedBatch
from thdattn.graphs import Graphs, StaticPack, Upload

T = TypeVar("T")

Array = Any
Check = Callable[[], object]  # called between micro-batches, on all ranks alike; raises to end the step
# Arguments of Model.loss: tokens, targets, plan, number of targets, and parts that replace the model's own.
Inputs = tuple[Array, Array, ModelPlan, Any] | tuple[Array, Array, ModelPlan, Any, Sequence[Part]]


def no_check() -> None:
    """Check nothing: this check never ends a step."""


class Eager:
    """Eager way: every micro-batch has a plan of its own and runs kernel by kernel.

    All groups of ranks compute at the same time, each on its own micro-batch: together a round. A round that does not
    fit in one group runs eagerly in all of them, as all ranks capture together.

    Args:
        model: computes loss and gradient.
        grid: the ranks; model.comm is grid.cp.
        graphs: the graphs of the other ways.
        sharding: assignment of rows to ranks.

    Raises:
        ValueError: the method cannot spread rows like this.

    Attributes:
        num_overflows: rounds that ran eagerly although graphs were wanted, as a batch did not fit; for FullIteration,
            whose graph has all rounds of a step, such steps.
    """

    overflow_unit = "rounds"

    def __init__(self, model: Model, grid: Grid, graphs: Graphs, sharding: str) -> None:
        self.model, self.grid, self.graphs, self.sharding = model, grid, graphs, sharding
        self.num_overflows = 0
        model.masks[0].sharding(PackedBatch([0]), sharding)

    def prepare(self, batch: MicroBatch) -> None:
        """Do ahead, in any thread, the host's work for a micro-batch of this group: read it, and plan."""
        batch.read()
        self.model.prepare(batch.batch, self.sharding)

    def gradient(self, batches: Sequence[MicroBatch], check: Check = no_check) -> Array:
        """Set model.gradient to that of the mean loss over the micro-batches of all groups. Collective.

        Args:
            batches: of all groups.
            check: called before every round; an exception of it leaves the gradient unfinished.

        Returns:
            (2,) float32: the mean loss, and room for one more number.
        """
        rounds, num_targets = self.grid.rounds(batches), _num_targets(batches)
        check()
        return self._gradient(self._inputs(dealt, num_targets) for dealt in _checked(rounds, check))

    def loss(self, batches: Sequence[MicroBatch], num_targets: int) -> Array:
        """Return this rank's share of the mean loss of a round over so many targets, 0-d. Collective."""
        return self.model.loss(*self._inputs(batches, num_targets))

    def _inputs(self, batches: Sequence[MicroBatch], num_targets: int) -> Inputs:
        """Copy this group's micro-batch of a round to the device, and plan it."""
        (batch,) = self.grid.dealt(batches)
        plan, xp = self.model.plan(batch.batch, self.sharding), self.model.layers.xp
        tokens, targets = batch.local(plan.sharding.rows(self.model.comm.rank))
        return xp.asarray(tokens), xp.asarray(targets), plan, num_targets

    def _gradient(self, inputs: Iterable[Inputs]) -> Array:
        model = self.model
        model.gradient.fill(0)
        numbers = model.layers.xp.zeros(2, np.float32)
        for micro_batch in inputs:
            numbers[0] += model.loss_and_gradient(*micro_batch)
        self.grid.world.all_reduce(numbers, "sum")
        self.grid.world.all_reduce(model.gradient, "sum")
        return numbers


class Local(Eager):
    """Way with a forward and a backward graph per layer, or per part that the configuration names."""

    def __init__(self, model: Model, grid: Grid, graphs: Graphs, sharding: str) -> None:
        super().__init__(model, grid, graphs, sharding)
        self._parts = captured_parts(model, graphs)
        self._read = graphs.captured(Feed.inputs, "plan")
        self._feed: Feed | None = None

    def gradient(self, batches: Sequence[MicroBatch], check: Check = no_check) -> Array:
        before = self.graphs.num_overflows
        numbers = super().gradient(batches, check)
        self.num_overflows += self.graphs.num_overflows - before
        return numbers

    def _inputs(self, batches: Sequence[MicroBatch], num_targets: int) -> Inputs:
        """Load this group's micro-batch to the graphs' addresses, unless one of the round does not fit."""
        self._feed = self._feed or Feed(self.model, self.graphs, self.sharding, batches[:1])
        if not self._feed.fits(batches):
            return super()._inputs(batches, num_targets)
        self._feed.load(self.grid.dealt(batches), num_targets)
        return *self._read(self._feed), self._parts


def captured_parts(model: Model, graphs: Graphs) -> list[Part]:
    """Return the model's parts as graphs: those that the configuration names, or whole layers.

    Raises:
        ValueError: the configuration names a part that layers do not have.
    """
    parts, layers = [], [model.layer_parts(layer) for layer in range(model.config.layers)]
    known = {name: None for named in layers for name in named}
    for name in graphs.config.modules:
        if name not in known:
            raise ValueError(f"modules has {name!r}, wanted some of {', '.join(map(repr, known))}, the parts of a "
                             f"layer here; leave it out")
    for layer, named in enumerate(layers):
        whole = {"layer": _joined(*named.values())}
        for name, part in (whole if graphs.captures("layer") else named).items():
            if graphs.captures(name):
                pair = graphs.pair(part.forward, part.backward, f"layer {layer}, {name}", name)
                part = Part(pair.forward, pair.backward)
            parts.append(part)
    return parts


def _joined(first: Part, second: Part) -> Part:
    def forward(x: Array, branch: Array | None, plan: ModelPlan) -> tuple[Sums, Any]:
        sums, kept = first.forward(x, branch, plan)
        sums, kept_too = second.forward(*sums, plan)
        return sums, (kept, kept_too)

    def backward(dx: Array, plan: ModelPlan, kept: Any) -> Array:
        fetched = first.fetch(kept[0])
        return first.backward(second.backward(dx, plan, kept[1]), plan, fetched)

    return Part(forward, backward)


class FullIteration(Eager):
    """Way with one graph for a step, from micro-batches to the gradient of all ranks, and another for validations.

    The graph includes the sums over ranks: between its launch and the optimizer the host starts nothing. A replayed
    step cannot be ended early; an eager one can be ended before any round.
    """

    overflow_unit = "steps"

    def __init__(self, model: Model, grid: Grid, graphs: Graphs, sharding: str) -> None:
        super().__init__(model, grid, graphs, sharding)
        self._step = graphs.captured(self._gradient_of, "step")
        self._validation = graphs.captured(self._loss_of, "validation")
        self._fed: Feed | None = None
        self._fed_validation: Feed | None = None
        self._check: Check = no_check

    def gradient(self, batches: Sequence[MicroBatch], check: Check = no_check) -> Array:
        dealt = self.grid.dealt(batches)
        feed = self._fed = self._fed or Feed(self.model, self.graphs, self.sharding, dealt)
        if not feed.fits(batches):
            self.num_overflows += 1
            return super().gradient(batches, check)
        check()
        feed.load(dealt, _num_targets(batches))
        self._check = check
        return self._step(feed)

    def _gradient_of(self, feed: Feed) -> Array:
        check = no_check if self.graphs.is_capturing() else self._check
        return self._gradient(map(feed.inputs, _checked(range(feed.num_batches), check)))

    def loss(self, batches: Sequence[MicroBatch], num_targets: int) -> Array:
        dealt = self.grid.dealt(batches)
        feed = self._fed_validation or Feed(self.model, self.graphs, self.sharding, dealt)
        self._fed_validation = feed
        if not feed.fits(batches):
            return super().loss(batches, num_targets)
        feed.load(dealt, num_targets)
        return self._validation(feed)

    def _loss_of(self, feed: Feed) -> Array:
        return self.model.loss(*feed.inputs())


WAYS = {"none": Eager, "local": Local, "full_iteration": FullIteration}  # by CudaGraphConfig.impl


class Feed:
    """Addresses where graphs read micro-batches: buffers on the device, and the plans that follow.

    Args:
        model: computes with them.
        graphs: its configuration gives the capacity in documents.
        sharding: assignment of rows to ranks.
        batches: typical ones, which give the number, rows and lengths of micro-batches.

    Attributes:
        num_batches: micro-batches per load.
    """

    def __init__(self, model: Model, graphs: Graphs, sharding: str, batches: Sequence[MicroBatch]) -> None:
        self._model, self.num_batches, (usual, *_) = model, len(batches), (batch.batch for batch in batches)
        self._pack = StaticPack(
            graphs, model.masks, usual.total_rows, sharding, self.num_batches, usual, finite_padding=True
        )
        local_rows = self._pack.sharding(usual).local_rows
        self._upload = Upload(2 * self.num_batches * local_rows + 1, model.layers.xp is not np)
        words = self._upload.words
        self._tokens, self._targets = words[:-1].reshape(2, self.num_batches, local_rows)
        self._num_targets = words[-1:].view(np.float32).reshape(())

    def fits(self, batches: Sequence[MicroBatch]) -> bool:
        """Return whether all batches fit; ask with the same batches on all ranks. See StaticPack.fits."""
        return self._pack.fits([batch.batch for batch in batches])

    def load(self, batches: Sequence[MicroBatch], num_targets: int) -> None:
        """Copy batches that fit to the device; the host does not wait.

        Raises:
            ValueError: another number of batches than num_batches.
        """
        if len(batches) != self.num_batches:
            raise ValueError(f"batches holds {len(batches)} micro-batches, wanted {self.num_batches} as in the "
                             f"captured step; keep their number, or use --cuda-graph-impl local")
        self._pack.load([batch.batch for batch in batches])
        rank = self._model.comm.rank
        local = [batch.local(self._pack.sharding(batch.batch).rows(rank)) for batch in batches]
        tokens, targets = zip(*local, strict=True)
        self._upload.send([*tokens, *targets, np.array([num_targets], np.float32).view(np.int32)])

    def inputs(self, number: int = 0) -> tuple[Array, Array, ModelPlan, Any]:
        """Plan a loaded micro-batch and return it. It reads nothing from the host: a CUDA graph may capture it."""
        plan = self._model.planned(self._pack.plans(number))
        return self._tokens[number], self._targets[number], plan, self._num_targets


def _checked(items: Iterable[T], check: Check) -> Iterator[T]:
    """Yield the items, with a check between any two."""
    for number, item in enumerate(items):
        if number:
            check()
        yield item


def _num_targets(batches: Sequence[MicroBatch]) -> int:
    """Return the targets that the loss is the mean over; 1 if none counts, so that loss and gradient are 0."""
    return max(1, sum(batch.num_targets for batch in batches))
