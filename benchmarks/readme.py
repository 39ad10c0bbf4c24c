"""Writes what two pages say was measured: all that stands between <!-- NAME:begin --> and :end.

    python benchmarks/readme.py

The numbers are those of the files in results/, of the GPU that was measured last, so that pages and records agree.
README.md in the root has the most important ones, that beside this file all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import attention_page
import bench_bytelm
import cp_page
import dense_record
import graphs_page
import headlines
import mamba_record
import record
from prose import listed, prose

README, MEASURED = (record.RESULTS.parents[up] / "README.md" for up in (1, 0))


def main() -> int:
    for path, blocks in PAGES.items():
        page = path.read_text()
        for name, make in blocks.items():
            page = with_block(page, name, make())
        path.write_text(page)
        print(f"wrote {path}")
    return 0


def with_block(page: str, name: str, text: str) -> str:
    """The page with another text between the marks of that name."""
    begin, end = (f"<!-- {name}:{side} -->" for side in ("begin", "end"))
    before, found, rest = page.partition(f"{begin}\n")
    _, ended, after = rest.partition(f"\n{end}")
    if not (found and ended):
        raise ValueError(f"the page lacks {begin} or {end}, each wanted on a line of its own")
    return f"{before}{found}{text}{ended}{after}"


def tested(records: Mapping[str, Mapping[str, object]]) -> str:
    """On which GPUs, drivers and versions of CUDA anything was run, from the record of the GPU tests."""
    gpus = sorted({str(entry["gpu"]).removeprefix("NVIDIA ") for entry in records.values()})
    cuda = sorted({str(int(str(entry["cuda_runtime"])) // 1000) for entry in records.values()})
    drivers = sorted({str(entry["driver"]) for entry in records.values()})
    return prose(
        f"**On record** are {listed(gpus)} alone, with CUDA {listed(cuda)} and driver {listed(drivers)}: "
        f"[tests](benchmarks/results/gpu_tests.json) and measurements were run there, of the portable kernels as well. "
        f"For other GPUs, kernels are compiled by the tests, and were not run."
    )


def of_newest(kind: str, make: Callable[..., str]) -> Callable[[], str]:
    """What a function says of the GPU on which one kind of benchmark ran last."""
    return lambda: make(*record.newest(kind)) if any(record.RESULTS.glob(f"{kind}_*.csv")) else NOT_MEASURED


NOT_MEASURED = "No such run is on record yet."
Blocks = Mapping[str, Callable[[], str]]
PAGES: dict[Path, Blocks] = {
    README: {
        "tested": lambda: tested(json.loads((record.RESULTS / "gpu_tests.json").read_text())),
        "attention": lambda: headlines.attention(record.newest("attention")[1]),
        "context-parallel": lambda: headlines.context_parallel(record.newest("cp")[1]),
        "mamba": lambda: headlines.mamba(record.newest("mamba")[1]),
        "bytelm": lambda: headlines.bytelm(bench_bytelm.load_all()),
    },
    MEASURED: {
        "attention": lambda: attention_page.numbers(*record.newest("attention"), record.newest("reorder")),
        "dense": of_newest("dense", dense_record.summary),
        "logits": of_newest("logits", attention_page.logits),
        "context-parallel": of_newest("cp", cp_page.context_parallel),
        "mamba": of_newest("mamba", mamba_record.summary),
        "layers": of_newest("graphs", graphs_page.layers),
        "writing": of_newest("decode", graphs_page.writing),
        "bytelm": lambda: bench_bytelm.summary(bench_bytelm.load_all()),
        "maxima": lambda: bench_bytelm.maxima(bench_bytelm.load_all()) or NOT_MEASURED,
    },
}


if __name__ == "__main__":
    sys.exit(main())
