"""What the page on measurements says of CUDA graphs, in Markdown: layers in training, and bytes that a model writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import record
from prose import linked, prose, table
from record import Row, slashed

LAYER = {"eager_static": "kernel by kernel", "local": "a graph per direction", "full_iteration": "one graph"}
WRITING = {"recomputed": "all rows anew", "eager": "kernel by kernel", "layer": "a graph per layer",
           "block": "one graph"}  # fmt: skip


def layers(path: Path, rows: Sequence[Row]) -> str:
    """Compare layers, forward and backward, with and without graphs; then what slots for documents cost."""
    found = {(*_layer(row), row["way"]): row for row in rows}
    lines = []
    for layer in dict.fromkeys(_layer(row) for row in rows if row["way"] in LAYER):
        ms = [float(found[(*layer, way)]["ms"]) for way in LAYER]
        ranks, case, heads = layer
        lines.append([case, heads, ranks, *(slashed([x], 3) for x in ms), f"{ms[0] / min(ms[1:]):.2f}"])
    head = ["pack", "heads", "GPUs", *LAYER.values(), "times as fast"]
    return "\n\n".join([table(head, lines), *slots(rows), measured(path, rows)])


def slots(rows: Sequence[Row]) -> list[str]:
    """Say for every number of GPUs what slots that no document uses cost; nothing where they were not measured."""
    said = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        ms = {row["way"]: float(row["ms"]) for row in rows if (row["ranks"], row["case"]) == (ranks, "16x1024")}
        over = [f"{way.removesuffix('_slots')} slots {ms[way] / ms['exact']:.2f}" for way in ms if "_slots" in way]
        if over:
            gpus = f"{ranks} GPU{'s' * (ranks != '1')}"
            said.append(prose(f"16 documents in one graph on {gpus}, over the time of a plan of the exact size: "
                              f"{', '.join(over)}."))  # fmt: skip
    return said


def _layer(row: Row) -> tuple[str, str, str]:
    heads = f"{row['heads']} of a mixer" if row["kv_heads"] == "mixer" else f"{row['heads']}/{row['kv_heads']}"
    return row["ranks"], row["case"], heads


def writing(path: Path, rows: Sequence[Row]) -> str:
    """Bytes that the language model writes per second, and how fast kernels for a byte read what they keep."""
    speeds = {(row["what"], row["texts"], row["way"]): float(row["bytes_per_s"]) for row in rows if row["bytes_per_s"]}
    models = [
        [size, texts, *(f"{speeds[size, texts, way]:,.0f}" for way in WRITING)]
        for size, texts in dict.fromkeys((size, texts) for size, texts, _ in speeds)
    ]  # fmt: skip
    kernels = [[row["what"], row["texts"], row["bytes"], f"{1e3 * float(row['ms']):.1f}", row["gb_per_s"],
                row["copy_gb_per_s"]] for row in rows if row["gb_per_s"]]  # fmt: skip
    return "\n\n".join([
        table(["model", "texts", *WRITING.values()], models),
        "One kernel for a byte, and a plain copy of as many bytes as it reads:",
        table(["kernel", "texts", "bytes of each", "µs", "GB/s", "GB/s of a copy"], kernels),
        measured(path, rows),
    ])  # fmt: skip


def measured(path: Path, rows: Sequence[Row]) -> str:
    """Where and how."""
    return prose(f"{rows[0]['gpu']}; {record.runs(rows)}. All spreads are in the [CSV file]({linked(path)}).")
