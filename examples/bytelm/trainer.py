"""Trainer: a model, its optimizer, and one step of both, in which the host does not wait for the GPU."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import data
import measure
import numpy as np
from checkpoint import Checkpoint
from data import MicroBatch, Position
from grid import Grid
from model import Model
from numpy.typing import NDArray
from optimizer import AdamW
from passes import WAYS, Check, no_check
from sizes import Config

import thdattn
from thdattn.graphs import CudaGraphConfig, Graphs

NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class StepResult:
    """Result of a step, whose numbers may still be on their way from the GPU.

    numbers: waits for (mean loss in nats, norm of the gradient).
    span: marks before and after the step. attention_spans: of this rank; none where graphs are wanted.
    num_overflows: rounds (steps, for full_iteration) up to this one that ran eagerly although graphs were wanted.
    """

    batches: Sequence[MicroBatch]
    lr: float
    numbers: Callable[[], np.ndarray]
    span: tuple[Any, Any]
    attention_spans: list[tuple[Any, Any]]
    num_overflows: int

    @property
    def lengths(self) -> list[thdattn.PackedBatch]:
        """Packed batches of the micro-batches."""
        return [batch.batch for batch in self.batches]


class Trainer:
    """Model, optimizer, and the step of both. Every rank calls every method alike.

    Args:
        grid: the ranks.
        config, engine, seed, deterministic: of the model.
        sharding: assignment of rows to ranks.
        graphs: CUDA graphs to capture; by default none.
        cp_comm_type: context-parallel method of a group.
    """

    def __init__(
        self, grid: Grid, config: Config, engine: str, sharding: str, seed: int,
        graphs: CudaGraphConfig | None = None, deterministic: bool = False, cp_comm_type: str = "all_gather",
    ) -> None:
        self.grid = grid
        self.model = Model(config, grid.cp, engine, seed, deterministic=deterministic, cp_comm_type=cp_comm_type)
        self.optimizer = AdamW(self.model)
        self.xp = self.model.layers.xp
        self.clock = measure.Clock(self.model)
        self.graphs = Graphs(grid.world, graphs or CudaGraphConfig(), engine)  # they end before the comms
        impl = self.graphs.config.impl
        self.passes = WAYS[impl](self.model, grid, self.graphs, sharding)
        self._attention_meter = measure.AttentionMeter(self.model, self.clock) if impl == "none" else None
        self._last_mark = self.clock.mark()

    def step(self, batches: Sequence[MicroBatch], lr: float, check: Check = no_check) -> StepResult:
        """Make one step on the mean loss of some micro-batches. The host does not wait for the GPU, except in `check`.

        Args:
            batches: of all ranks together, as many for each group.
            lr: learning rate.
            check: called before every round of micro-batches. If it raises, weights and optimizer do not change.
        """
        numbers = self.passes.gradient(batches, check)
        numbers[1] = self.optimizer.step(self.model.gradient, lr)
        spans = self._attention_meter.take() if self._attention_meter else []
        before, self._last_mark = self._last_mark, self.clock.mark()
        return StepResult(batches, lr, measure.copy_to_host(numbers), (before, self._last_mark), spans,
                          self.passes.num_overflows)

    def bits_per_byte(self, batches: Sequence[MicroBatch], check: Check = no_check) -> float:
        """Return the model's bits per byte of these documents, ends included. Waits for the GPU.

        All ranks capture and replay graphs together. So a group without a micro-batch in the last round computes that
        of another group, and does not count it. check is called before every round.
        """
        total, grid = self.xp.zeros(1, np.float32), self.grid
        num_bytes = max(1, sum(batch.num_bytes for batch in batches))
        for dealt in data.chunks(iter(batches), grid.num_groups):
            check()
            missing = grid.num_groups - len(dealt)
            loss = self.passes.loss([*dealt, *dealt[:1] * missing], num_bytes)
            if grid.group < len(dealt):
                total += loss
        grid.world.all_reduce(total, "sum")
        return float(total[0]) / NATS_PER_BIT

    def attention_tflops(self, result: StepResult) -> float | None:
        """Return 10**12 operations per second and rank, with waits for other ranks; None where the attention was not
        timed.
        """
        seconds = sum(self.clock.seconds(*span) for span in result.attention_spans)
        flops = sum(map(self.model.attention_flops, result.lengths[self.grid.mine]))
        return flops / self.grid.cp.size / seconds / 1e12 if seconds else None

    def pause(self) -> None:
        """Exclude the time since the last step from the next one's."""
        if self._attention_meter:
            self._attention_meter.take()
        self._last_mark = self.clock.mark()

    def state(self, step: int, position: Position, settings: dict[str, Any], validated: bool) -> Checkpoint:
        """Return the checkpoint after a step."""
        weights, optimizer = _to_host(self.model.weights), {n: _to_host(x) for n, x in self.optimizer.state.items()}
        return Checkpoint(self.model.config, step, position, settings, weights, optimizer, validated)

    def restore(self, saved: Checkpoint) -> None:
        """Load weights and optimizer from a checkpoint, which has to be the same on all ranks."""
        self.grid.world.agree("the checkpoint", zlib.crc32(saved.weights.tobytes(), saved.step))
        self.model.weights[...] = self.xp.asarray(saved.weights)
        self.model.refresh()
        for name, x in self.optimizer.state.items():
            x[...] = saved.optimizer[name] if isinstance(x, np.ndarray) else self.xp.asarray(saved.optimizer[name])


def _to_host(x: Any) -> NDArray[Any]:
    return x if isinstance(x, np.ndarray) else np.asarray(x.get())
