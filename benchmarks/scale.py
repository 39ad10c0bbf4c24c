"""Write the simulated scaling of docs/several_gpus.md, between <!-- scale --> and <!-- /scale -->.

    python benchmarks/scale.py

Nothing is measured: thdattn.costs.scale.simulated predicts the times from the rates of an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pages import with_block, write
from tables import table
from workloads import document_pack

from thdattn.costs.model import Shape
from thdattn.costs.scale import Scale, kinds, simulated

PAGE = Path(__file__).parents[1] / "docs/several_gpus.md"
TOKENS = 2**20
PACKS = {
    f"One document of {TOKENS:,} tokens": (TOKENS,),
    f"Documents of real lengths, {TOKENS:,} tokens": document_pack(0, TOKENS),
}
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
SHAPE = Shape(num_heads=32, num_kv_heads=8, per_node=8)


def main() -> int:
    tables = [scaling(title, simulated(lengths, RANKS, SHAPE)) for title, lengths in PACKS.items()]
    write(PAGE, with_block(PAGE.read_text(), "scale", "\n\n".join(tables)))
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


if __name__ == "__main__":
    raise SystemExit(main())
