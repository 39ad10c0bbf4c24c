"""Training runs of a small model in this process, for tests that compare ways to compute a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import data
import numpy as np
from data import MicroBatch, Packing, Position
from grid import Grid
from sizes import SIZES, Config
from texts import HYBRID, to_host
from trainer import StepResult, Trainer

import thdattn
from thdattn.graphs import CudaGraphConfig

LR = 3e-3
CLOSE = 1e-4  # sums in float32 in another order, over a few steps of AdamW
MODEL = replace(SIZES["tiny"], heads=4, kv_heads=2, head_dim=16, width=32, hidden=64)  # 4 ranks can exchange its heads
EVERY_WAY = [
    {"impl": "local"}, {"impl": "local", "modules": ("attn",)}, {"impl": "local", "modules": ("mlp",)},
    {"impl": "full_iteration"},
]


def ways_of(config: Config) -> list[dict[str, Any]]:
    """Return every way to compute a step of a model with graphs."""
    return [*EVERY_WAY, {"impl": "local", "modules": ("mamba",)}] if config.num_mixers else EVERY_WAY


def way_id(way: dict[str, Any]) -> str:
    return "-".join([way["impl"], *way.get("modules", ())]) if way else "eager"


class Method(NamedTuple):
    """Context-parallel method of a group; inner: neighbours that exchange heads, of two levels."""

    cp_comm_type: str
    sharding: str
    inner: int | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.cp_comm_type, self.sharding, self.inner and str(self.inner))))


ALL_GATHER = Method("all_gather", "dual_chunk")


class Layout(NamedTuple):
    """Ranks, how they share micro-batches, and their model."""

    ranks: int
    method: Method = ALL_GATHER
    cp_size: int | None = None
    config: Config = MODEL

    def __str__(self) -> str:
        groups = f" in groups of {self.cp_size}" if self.cp_size else ""
        return f"{'hybrid ' if self.config == HYBRID else ''}{self.ranks}{groups}-{self.method}"

    @property
    def alone(self) -> Layout:
        """One rank with the same model and the same rule for lengths."""
        return Layout(1, Method("all_gather", self.rule), config=self.config)

    @property
    def rule(self) -> str:
        """Sharding with the method's rule for lengths."""
        return "dual_chunk" if self.method.sharding == "dual_chunk" else "contiguous"


TINY = Layout(1, config=SIZES["tiny"])


@dataclass(frozen=True)
class Run:
    """Results of a run, on the host."""

    numbers: list[list[float]]  # of every step: loss, norm
    validations: list[float]
    weights: bytes
    gradient: bytes
    overflows: list[int]  # rounds (of full_iteration: steps) that ran without graphs, up to every step
    num_captured: int

    @property
    def results(self) -> tuple[Any, ...]:
        """Numbers, validations, weights and gradient, which do not depend on graphs."""
        return self.numbers, self.validations, self.weights, self.gradient


def trainer(
    comm: thdattn.comm.Comm, engine: str, *, cp_size: int | None = None, deterministic: bool = True,
    method: Method = ALL_GATHER, config: Config = SIZES["tiny"], **graphs: Any,
) -> Trainer:
    """Return a trainer of the tiny model; graphs: fields of CudaGraphConfig."""
    grid = Grid.of(comm, cp_size, method.inner)
    return Trainer(grid, config, engine, method.sharding, 0, CudaGraphConfig(**graphs), deterministic,
                   method.cp_comm_type)


def num_wanted(way: dict[str, Any], config: Config) -> int:
    """Count a forward and a backward graph per captured part or layer, and the plan; or a step and a validation."""
    mixers, layers = config.num_mixers, config.layers
    parts = {(): layers, ("attn",): layers - mixers, ("mlp",): layers, ("mamba",): mixers}[way.get("modules", ())]
    return 2 if way["impl"] == "full_iteration" else 1 + 2 * parts


def batches(
    folder: Any, num_batches: int, tokens: int = 256, cp_size: int = 1, sharding: str = "dual_chunk",
    find: Callable[[Any], Sequence[data.Document]] = data.find_documents,
) -> list[MicroBatch]:
    """Return the first micro-batches of a run, of short pieces, so that their numbers differ."""
    packing = Packing.of(tokens, cp_size, sharding, longest=96)
    coming = data.micro_batches(find(folder), packing, 0, Position(0, 0))
    return [next(coming) for _ in range(num_batches)]


def run(
    made: Trainer, training: list[MicroBatch], held_back: list[MicroBatch], accumulate: int = 1,
    validate_every: int = 50,
) -> Run:
    """Train on all batches; validate before the first step, every so many steps, and at the end."""
    results: list[StepResult] = []
    validations: list[float] = []
    for step, begin in enumerate(range(0, len(training), accumulate)):
        if step % validate_every == 0:
            validations.append(made.bits_per_byte(held_back))
        results.append(made.step(training[begin : begin + accumulate], LR))
    validations.append(made.bits_per_byte(held_back))
    numbers = [result.numbers().tolist() for result in results]
    assert np.isfinite(numbers).all()
    weights, gradient = (to_host(x).tobytes() for x in (made.model.weights, made.model.gradient))
    num_captured = sum(captured._graph is not None for captured in made.graphs._captured)
    return Run(numbers, validations, weights, gradient, [result.num_overflows for result in results], num_captured)


def on_ranks(ranks: int, program: Callable[[thdattn.comm.Comm], Any]) -> list[Any]:
    """Run a program on simulated ranks, or on a single one, whose graphs can be captured."""
    return [program(thdattn.comm.init("single"))] if ranks == 1 else thdattn.comm.run_local(ranks, program)


def outcome(
    layout: Layout, training: list[MicroBatch], accumulate: int = 4, engine: str = "reference", **graphs: Any
) -> list[Run]:
    """Return the run of every rank, with a validation every other step, or four in a long run."""

    def program(comm: thdattn.comm.Comm) -> Run:
        options = {"cp_size": layout.cp_size, "method": layout.method, "config": layout.config, **graphs}
        made = trainer(comm, engine, **options)
        result = run(made, training, training[:5], accumulate, max(2, len(training) // accumulate // 4))
        made.graphs.close()
        return result

    return on_ranks(layout.ranks, program)


def overflows(batches: list[MicroBatch], room: int, accumulate: int, num_groups: int, impl: str) -> list[int]:
    """Return the overflows that a run must count: rounds with a batch of too many documents, or such steps."""
    large = np.array([batch.batch.num_seqs > room for batch in batches])
    rounds = large.reshape(-1, accumulate // num_groups, num_groups).any(axis=2)
    steps = rounds.any(axis=1) if impl == "full_iteration" else rounds.sum(axis=1)
    return np.cumsum(steps).tolist()


def differs(run: Run, other: Run, config: Config = SIZES["tiny"]) -> list[float]:
    """Return relative distances of losses, norms, validations, the last gradient, and the change of the weights.

    Single weights are not compared: AdamW moves one as far whose gradient is rounding alone.
    """
    start = to_host(trainer(thdattn.comm.init("single"), "reference", config=config).model.weights)

    def parts(x: Run) -> tuple[Any, ...]:
        loss, norm = np.transpose(x.numbers)
        weights = np.frombuffer(x.weights, np.float32) - start
        return loss, norm, np.array(x.validations), np.frombuffer(x.gradient, np.float32), weights

    pairs = zip(parts(run), parts(other), strict=True)
    return [float(np.linalg.norm(one - two) / np.linalg.norm(two)) for one, two in pairs]
