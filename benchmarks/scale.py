"""Write two tables of docs/several_gpus.md between their markers: simulated scaling, and work of groups.

    python benchmarks/scale.py

Nothing is measured: thdattn.costs.scale.simulated predicts the times from the rates of an H200, and work is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pages import with_block, write
from tables import table
from workloads import PACK_TOKENS, document_pack

from thdattn.costs.model import Shape
from thdattn.costs.scale import Scale, kinds, simulated
from thdattn.packing import first_fit, schedule

PAGE = Path(__file__).parents[1] / "docs/several_gpus.md"
TOKENS = 2**20
PACKS = {
    f"One document of {TOKENS:,} tokens": (TOKENS,),
    f"Documents of real lengths, {TOKENS:,} tokens": document_pack(0, TOKENS),
}
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
SEEDS = 5  # global batches
SHAPE = Shape(num_heads=32, num_kv_heads=8, per_node=8)


def main() -> int:
    tables = [scaling(title, simulated(lengths, RANKS, SHAPE)) for title, lengths in PACKS.items()]
    write(PAGE, with_block(with_block(PAGE.read_text(), "scale", "\n\n".join(tables)), "schedule", groups_of_ranks()))
    return 0


def scaling(title: str, scales: Sequence[Scale]) -> str:
    """Return a table of each method's share of the speed of attention alone, in per cent, the fastest in bold."""
    head = ["ranks", *(f"`{cp_comm_type}`, {sharding}" for cp_comm_type, sharding in kinds()), "fastest, overlapped"]
    return f"{title}:\n\n{table(head, [row(scale) for scale in scales])}"


def row(scale: Scale) -> list[str]:
    def share(kind: tuple[str, str]) -> str:
        text = f"{100 * scale.share(kind):.0f}" if kind in scale.costs else "-"
        return f"**{text}**" if kind == scale.best else text

    return [f"{scale.ranks:,}", *map(share, kinds()), f"{100 * scale.overlapped:.0f}"]


Dealt = list[list[list[int]]]  # documents of the micro-batches of each group


def global_batch(groups: int, micro_batches: int, seed: int) -> tuple[NDArray[np.int64], Dealt, Dealt]:
    """Draw documents for so many micro-batches of PACK_TOKENS rows, and deal them to groups in two ways.

    Returns:
        (num_docs,) tokens; how first fit deals them, in the order of the documents; how `schedule` does.
    """
    total = groups * micro_batches
    drawn = document_pack(seed, 2 * total * PACK_TOKENS)
    pieces = [piece for length in drawn for piece in (*[PACK_TOKENS] * (length // PACK_TOKENS), length % PACK_TOKENS)
              if piece]
    packs = [*islice(first_fit(enumerate(pieces), lambda piece: piece[1], PACK_TOKENS), total)]
    ends = np.cumsum([len(pack) for pack in packs]).tolist()
    numbers = [list(range(end - len(pack), end)) for pack, end in zip(packs, ends, strict=True)]
    lengths = np.array([length for pack in packs for _, length in pack])
    dealt = [numbers[group::groups] for group in range(groups)]
    return lengths, dealt, schedule(lengths, groups, PACK_TOKENS, micro_batches)


def busiest(lengths: NDArray[np.int64], dealt: Dealt) -> float:
    """Return the causal pairs of the group that has most, over the mean."""
    pairs = lengths * (lengths + 1) / 2
    work = np.array([pairs[[*chain(*group)]].sum() for group in dealt])
    return float(work.max() / work.mean())


def groups_of_ranks() -> str:
    """Return a table of the busiest group's work over the mean, the mean of some global batches and the largest."""
    lines = []
    for groups in (2, 4, 8, 16):
        for micro_batches in (4, 16):
            found = [global_batch(groups, micro_batches, seed) for seed in range(SEEDS)]
            shares = [[busiest(lengths, ways[way]) for lengths, *ways in found] for way in (0, 1)]
            lines.append([str(groups), str(micro_batches), *(f"{np.mean(x):.2f} (to {max(x):.2f})" for x in shares)])
    return table(["groups", "micro-batches of each", "first fit", "`schedule`"], lines)


if __name__ == "__main__":
    raise SystemExit(main())
