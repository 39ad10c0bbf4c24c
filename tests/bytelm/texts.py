"""Documents, and a model's loss and gradient over them on any number of simulated ranks; for CPU and GPU tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from model import Model
from sizes import VOCAB, Config

import thdattn

# Chunks shorter and longer than the window, empty documents, and none whose length is a multiple of 2 * ranks.
LENGTHS = (13, 0, 1, 37, 0, 5, 22)
SMALL = Config(layers=3, width=32, heads=4, kv_heads=2, head_dim=8, hidden=40, window=6)
HYBRID = Config(layers=3, width=32, heads=4, kv_heads=2, head_dim=8, hidden=40, pattern="M*M", mixer_heads=2,
                mixer_head_dim=16, state_dim=8)

# Prompts and answers: empty ones, characters of several bytes, and texts longer than a piece.
DIALOGUES = [("2+2=", "4"), ("", "no prompt"), ("no answer", ""), ("ä €:", "żółw"), ("long prompt " * 4, "short"),
             ("short", " long answer" * 4), ("q" * 20, "a" * 20), ("one\n", "two\n")]


def write_dialogues(folder: Path, texts: Sequence[tuple[str, str]]) -> Path:
    """Write prompts and answers as a file of lines, and return its folder."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) for prompt, answer in texts]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    return folder


@dataclass(frozen=True)
class Text:
    """Documents as inputs and targets, [(len,)] int32 each; targets -1 do not count."""

    inputs: list[np.ndarray]
    targets: list[np.ndarray]

    @classmethod
    def random(cls, lengths: tuple[int, ...], seed: int = 0, masked: float = 0.2) -> Text:
        rng = np.random.default_rng(seed)
        inputs, targets = ([rng.integers(0, VOCAB, n, np.int32) for n in lengths] for _ in range(2))
        for target in targets:
            target[rng.random(len(target)) < masked] = -1
        return cls(inputs, targets)

    def one_by_one(self) -> list[Text]:
        return [Text([x], [y]) for x, y in zip(self.inputs, self.targets, strict=True)]

    @property
    def num_targets(self) -> int:
        return sum(int((target >= 0).sum()) for target in self.targets)


def busy_weights(config: Config) -> np.ndarray:
    """Draw weights of which none is special: of the model's own, the head is 0 and the gains are 1."""
    model = Model(config, thdattn.comm.init("single"), engine="reference")
    rng = np.random.default_rng(1)
    return model.weights + np.float32(0.5 * config.width**-0.5) * rng.standard_normal(model.weights.shape, np.float32)


@dataclass(frozen=True)
class Outcome:
    """Results for a text: the mean loss, and on the host the gradient of every rank, and logits per document."""

    loss: float
    gradients: list[np.ndarray]
    logits: list[np.ndarray]

    @property
    def gradient(self) -> np.ndarray:
        return self.gradients[0]


def run(
    text: Text, config: Config = SMALL, cp_size: int = 1, sharding: str = "dual_chunk", num_targets: int | None = None,
    padding: int = 0, slack: int = 0, weights: np.ndarray | None = None, prepare: Callable[[Model], None] | None = None,
    **options: Any,
) -> Outcome:
    """Compute loss, gradient and logits of a model over a text.

    Args:
        num_targets: divisor of the loss; by default the targets of the text.
        padding: tokens and targets of rows without a token.
        slack: rows after the documents.
        weights: flat, on the host; replace those of the seed.
        prepare: called with the model before it is used.
        options: of Model.
    """
    fitted = thdattn.PackedBatch.from_lengths([len(x) for x in text.inputs], 2 * cp_size)
    rows = fitted.total_rows + slack
    batch = thdattn.PackedBatch(fitted.cu_seqlens, fitted.cu_seqlens_padded, total_rows=rows)
    packed = [batch.pack(x, padding) for x in (text.inputs, text.targets)]

    def program(comm: thdattn.comm.Comm) -> tuple[Any, ...]:
        model = Model(config, comm, **options)
        xp = model.layers.xp
        if weights is not None:
            model.weights[...] = xp.asarray(weights)
            model.refresh()
        if prepare:
            prepare(model)
        plan = model.plan(batch, sharding)
        tokens, targets = (xp.asarray(plan.sharding.shard(x, comm.rank)) for x in packed)
        loss = model.loss_and_gradient(tokens, targets, plan, text.num_targets if num_targets is None else num_targets)
        comm.all_reduce(model.gradient, "sum")
        return plan.sharding, *map(to_host, (loss, model.gradient, model.logits(tokens, plan)))

    shardings, losses, gradients, logits = zip(*thdattn.comm.run_local(cp_size, program), strict=True)
    return Outcome(float(sum(losses)), list(gradients), batch.unpack(shardings[0].unshard(logits)))


def to_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()
