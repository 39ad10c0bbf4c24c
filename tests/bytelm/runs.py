"""Training runs of the tiny model in this process, for tests that compare ways to compute a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import data
import numpy as np
from data import MicroBatch, Packing, Position
from grid import Grid
from sizes import SIZES, Config
from texts import to_host
from trainer import StepResult, Trainer

import thdattn
from thdattn.graphs import CudaGraphConfig

LR = 3e-3


class Method(NamedTuple):
    """How ranks share a micro-batch; inner: neighbours that exchange heads, of two levels."""

    cp_comm_type: str
    sharding: str
    inner: int | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.cp_comm_type, self.sharding, self.inner and str(self.inner))))


ALL_GATHER = Method("all_gather", "dual_chunk")


@dataclass(frozen=True)
class Run:
    """What a run has left, on the host."""

    numbers: list[list[float]]  # of every step: loss, norm
    validations: list[float]
    weights: bytes
    gradient: bytes
    overflows: list[int]  # rounds (of full_iteration: steps) that ran without graphs, up to every step


def trainer(
    comm: thdattn.comm.Comm, engine: str, *, cp_size: int | None = None, deterministic: bool = True,
    method: Method = ALL_GATHER, config: Config = SIZES["tiny"], **graphs: Any,
) -> Trainer:
    """Of the tiny model; graphs: fields of CudaGraphConfig."""
    grid = Grid.of(comm, cp_size, method.inner)
    return Trainer(grid, config, engine, method.sharding, 0, CudaGraphConfig(**graphs), deterministic,
                   method.cp_comm_type)  # fmt: skip


def num_captured(made: Trainer) -> int:
    """Graphs that there are."""
    return sum(captured._graph is not None for captured in made.graphs._captured)


def batches(
    folder: Any, num_batches: int, tokens: int = 256, cp_size: int = 1, sharding: str = "dual_chunk"
) -> list[MicroBatch]:
    """The first ones of a run; short pieces, so that their numbers differ."""
    packing = Packing.of(tokens, cp_size, sharding, longest=96)
    coming = data.micro_batches(data.find_documents(folder), packing, 0, Position(0, 0))
    return [next(coming) for _ in range(num_batches)]


def run(
    made: Trainer, training: list[MicroBatch], held_back: list[MicroBatch], accumulate: int = 1,
    validate_every: int = 50,
) -> Run:
    """Steps of all batches, with a validation before the first one and every so many steps."""
    results: list[StepResult] = []
    validations: list[float] = []
    for step, begin in enumerate(range(0, len(training), accumulate)):
        if step % validate_every == 0:
            validations.append(made.bits_per_byte(held_back))
        results.append(made.step(training[begin : begin + accumulate], LR))
    validations.append(made.bits_per_byte(held_back))
    numbers = [result.numbers().tolist() for result in results]
    assert np.isfinite(numbers).all()
    return Run(numbers, validations, to_host(made.model.weights).tobytes(), to_host(made.model.gradient).tobytes(),
               [result.num_overflows for result in results])  # fmt: skip
