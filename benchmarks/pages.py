"""Write the pages of measurements from the records in results/, so that pages and records agree.

    python benchmarks/pages.py

For every GPU with records: results/GPU.md with all tables, and charts beside it. For the GPU that was measured last:
the table of speeds in README.md and in benchmarks/README.md, between <!-- speeds --> and <!-- /speeds -->.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import record
import tables
from cp_methods import OURS
from record import RESULTS, Row, Times
from tables import pair, table
from workloads import CASES, Case, cp_cases

PAGES = RESULTS.parents[1] / "README.md", RESULTS.parent / "README.md"


class Section(NamedTuple):
    """Heading of one kind of record, the program that measures it, and the function that makes its tables."""

    title: str
    program: str
    tables: Callable[[Sequence[Row]], list[str]]


SECTIONS = {
    "attention": Section("Attention on one GPU", "bench_attention.py", tables.attention),
    "dense": Section("Packs and dense batches", "bench_attention.py --dense", tables.dense),
    "logits": Section("Sinks and soft-capped logits", "bench_attention.py --logits", tables.logits),
    "trees": Section("Prefix trees", "bench_trees.py", tables.trees),
    "cp": Section("Attention over several GPUs", "bench_cp.py", tables.context_parallel),
    "reorder": Section("Moving rows between orders", "bench_reorder.py", tables.reorder),
    "graphs": Section("CUDA graphs of a layer", "bench_graphs.py", tables.graphs),
    "mamba": Section("Mamba-2 mixers", "bench_mamba.py", tables.mixers),
    "bytelm": Section("Training steps", "bench_bytelm.py", tables.training),
    "decode": Section("Decoding", "bench_decode.py", tables.decode),
}
Records = dict[str, list[Row]]  # of one GPU, by kind


def main() -> int:
    everything = records()
    for gpu, found in everything.items():
        write(RESULTS / f"{gpu}.md", page(gpu, found))
        for chart in charts(gpu, found):
            draw(chart)
            print(f"wrote {chart.path}")
    for path in PAGES:
        text = path.read_text()
        for name, made in blocks(path, everything).items():
            text = with_block(text, name, made)
        write(path, text)
    return 0


def write(path: Path, text: str) -> None:
    path.write_text(text)
    print(f"wrote {path}")


def records() -> dict[str, Records]:
    """Read all records: GPU -> kind -> rows. The GPU whose attention was measured last is the last one."""
    found: dict[str, Records] = {}
    for path in sorted(RESULTS.glob("*_*.csv")):
        kind, _, gpu = path.stem.partition("_")
        found.setdefault(gpu, {})[kind] = record.load(path)
    last = {gpu: max((row["date"] for row in kinds.get("attention", ())), default="") for gpu, kinds in found.items()}
    return {gpu: found[gpu] for gpu in sorted(found, key=last.__getitem__)}


def page(gpu: str, found: Records) -> str:
    """Return all tables of a GPU."""
    name = next(iter(found.values()))[0]["gpu"]
    parts = [f"# {name}", wrapped(
        "All measurements on this GPU, written by `benchmarks/pages.py` from the CSV files beside it, which have the "
        "command, date, spread and number of samples of each row. [How to measure, and what the names of packs "
        "mean](../README.md)."), pictures(gpu, found, "")]
    for kind in (kind for kind in SECTIONS if kind in found):
        section, file = SECTIONS[kind], f"{kind}_{gpu}.csv"
        parts.append(f"## {section.title}")
        parts += [text if text.startswith("|") else wrapped(text) for text in section.tables(found[kind])]
        parts.append(wrapped(f"<sub>[{section.program}](../{section.program.split()[0]}), [all rows]({file}): "
                             f"{tables.software(found[kind])}.</sub>"))
    return "\n\n".join(filter(None, parts)) + "\n"


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def with_block(page: str, name: str, text: str) -> str:
    """Return a page with other text between the markers of a name.

    Raises:
        ValueError: the page lacks a marker.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page lacks <!-- {name} --> or <!-- /{name} -->; put each on a line of its own")
    return f"{before}{begin}{text}\n{end}{after}"


def blocks(path: Path, everything: dict[str, Records]) -> dict[str, str]:
    """Return what pages.py writes into a page, by the names of its markers."""
    gpu, found = [*everything.items()][-1]
    folder = f"{RESULTS.relative_to(path.parent)}/"
    if path == PAGES[0]:
        return {"speeds": speeds(gpu, found, folder, picture="several")}
    return {"speeds": speeds(gpu, found, folder), "tested": tested()}


def tested() -> str:
    """Return which GPUs the GPU tests ran on."""
    entries = json.loads((RESULTS / "gpu_tests.json").read_text()).values()
    gpus, drivers = ({entry[name] for entry in entries} for name in ("gpu", "driver"))
    cuda = {str(int(entry["cuda_runtime"]) // 1000) for entry in entries}
    return wrapped(f"[GPU tests](results/gpu_tests.json) ran on {', '.join(sorted(gpus))} with CUDA "
                   f"{', '.join(sorted(cuda))} and driver {', '.join(sorted(drivers))}.")


# --- the table of speeds -----------------------------------------------------------------------------------------

LONG = ("bucket32k", "doc128k-gqa")
SHORT = ("16x1024", "64x256")
DIMS = ("1x16384-d64", "1x16384-d192v128")
SEVERAL = ("lognormal128k",)


def speeds(gpu: str, found: Records, folder: str, picture: str | None = None) -> str:
    """Return the table of speeds with one chart, or with all.

    Args:
        folder: of the page of the GPU, as seen from the page that shows the table.
        picture: name of the chart; None: all.
    """
    name = found["attention"][0]["gpu"]
    lines = [*one_gpu(found), *several_gpus(found), *others(found)]
    said = (f"{name}, bfloat16, forward / backward of one layer; TFLOP/s count visible pairs of tokens alone. "
            f"The third column names the fastest other implementation of each direction, or thdattn without graphs. "
            f"[All packs, errors and conditions]({folder}{gpu}.md).")
    head = ["workload", "thdattn", "compared with", "times as fast"]
    return "\n\n".join([table(head, lines), wrapped(said), pictures(gpu, found, folder, picture)])


def one_gpu(found: Records) -> Iterator[list[str]]:
    """Yield lines of attention on one GPU, of work on the GPU alone."""
    times = Times(found["attention"])
    for case in (*LONG, *SHORT, *DIMS):
        ratio, peer = tables.versus(times, case, "graph")
        yield [documents(CASES[case]), f"{pair(times.both('tflops', case, OURS, 'graph'))} TFLOP/s", peer, ratio]


def several_gpus(found: Records) -> Iterator[list[str]]:
    """Yield lines of attention over two GPUs, by the fastest method, called one after the other."""
    times = two_gpus(found)
    if times is None:
        return
    for case in SEVERAL:
        way, *peers = fastest_way(times, case), *tables.cp_peers(times)
        for peer in peers:
            ours, theirs = (times.both("tflops", case, name, "called") for name in (way, peer))
            yield [f"2 GPUs: {documents(cp_cases(2)[case])}", f"{pair(ours)} TFLOP/s per GPU", tables.named(peer),
                   pair(map(float.__truediv__, ours, theirs))]


def others(found: Records) -> Iterator[list[str]]:
    """Yield a line each of graphs, of training and of mixers, where they were measured."""
    layers = {row["way"]: float(row["ms"]) for row in found.get("graphs", ())
              if (row["ranks"], row["case"], row["heads"], row["kv_heads"]) == ("2", "64x128", "8", "8")}
    if layers:
        eager = min(layers["eager"], layers["eager_static"])
        yield ["2 GPUs, one CUDA graph: 64 documents of 128 tokens, 8 heads of 128",
               f"{tables.number(layers['full_iteration'])} ms, forward + backward", "thdattn without graphs",
               f"{eager / layers['full_iteration']:.2f}"]
    steps: dict[str, int] = {}  # the fastest of each kind of graph, whatever the sharding
    for row in found.get("bytelm", ()):
        if (row["size"], row["ranks"], row["tokens"]) == ("small", "1", "2048"):
            impl = row["cuda_graph_impl"]
            steps[impl] = max(steps.get(impl, 0), int(row["tokens_per_s"]))
    if steps:
        yield ["Training of 24 million weights, 2,048 tokens a step, one CUDA graph a step",
               f"{steps['full_iteration']:,} tokens/s", "thdattn without graphs",
               f"{steps['full_iteration'] / steps['none']:.2f}"]
    mixers = Times(row for row in found.get("mamba", ()) if (row["part"], row["ranks"]) == ("mixer", "1"))
    if "1x16384" in mixers.cases:
        ours, theirs = (mixers.both("ms", "1x16384", peer, "graph") for peer in (OURS, "mamba_ssm"))
        yield ["Mamba-2 mixer, 64 heads of 64: 16,384 tokens", f"{pair(ours)} ms", "mamba_ssm",
               pair(map(float.__truediv__, theirs, ours))]


def documents(case: Case) -> str:
    """Describe the lengths of a pack and its heads, query heads / kv heads."""
    number, least, most = len(case.lengths), min(case.lengths), max(case.lengths)
    lengths = f"{most:,} tokens" if least == most else f"{least:,} to {most:,} tokens"
    heads = f"{case.heads}/{case.kv_heads} heads" if case.heads != case.kv_heads else f"{case.heads} heads"
    dims = "/".join(str(width) for width in dict.fromkeys((case.head_dim, case.v_head_dim)))
    return f"{number} document{'s' * (number > 1)} of {lengths}, {heads} of {dims}"


def two_gpus(found: Records) -> Times | None:
    """Return the measurements on two GPUs with peer memory that do not stand for others."""
    return next((times for ranks, times in tables.runs(found.get("cp", ())).items() if ranks == (2, 2, "peer")), None)


def fastest_way(times: Times, case: str) -> str:
    return max(tables.methods(times), key=lambda way: max(0.0, tables.speed(times, case, way)))


# --- charts ------------------------------------------------------------------------------------------------------


class Chart(NamedTuple):
    """Bars of one question: for every pack the speed of two implementations, TFLOP/s of forward and backward."""

    path: Path
    title: str
    names: tuple[str, str]
    bars: dict[str, tuple[float, float]]

    @property
    def question(self) -> str:
        return self.path.stem.rpartition("_")[2]


def charts(gpu: str, found: Records) -> Iterator[Chart]:
    """Yield the charts of a GPU that its records suffice for."""
    attention, several = Times(found.get("attention", ())), two_gpus(found)
    name = next(iter(found.values()))[0]["gpu"].removeprefix("NVIDIA ")
    for question, said, cases in (
        ("long", "Packs of long documents", ("bucket32k", "doc128k-gqa", "1x16384-gqa", "1x16384-d64")),
        ("short", "Packs of short documents", ("16x1024", "64x256", "4x1024", "lognormal64k")),
    ):
        bars = {label(CASES[case]): (attention.together(case, OURS), attention.together(case, "fa4"))
                for case in cases if case in attention.cases}
        yield Chart(RESULTS / f"{gpu}_{question}.png", f"{said}, one {name}: TFLOP/s, forward and backward",
                    ("thdattn", tables.named("fa4")), bars)
    if several:
        (peer,) = tables.cp_peers(several)
        bars = {label(cp_cases(2)[case]): (tables.speed(several, case, fastest_way(several, case)),
                                           tables.speed(several, case, peer))
                for case in ("bucket32k", "lognormal128k", "documents16k", "8x1024")}
        yield Chart(RESULTS / f"{gpu}_several.png", f"One pack over two {name}: TFLOP/s per GPU, forward and backward",
                    ("thdattn", tables.named(peer)), bars)


def label(case: Case) -> str:
    """Describe a pack in three short lines."""
    return documents(case).replace(" of ", " of\n", 1).replace(", ", "\n")


def pictures(gpu: str, found: Records, folder: str, only: str | None = None) -> str:
    """Return the images of a GPU's charts, in Markdown."""
    shown = [chart for chart in charts(gpu, found) if only in (None, chart.question)]
    return "\n\n".join(f"![{chart.title}]({folder}{chart.path.name})" for chart in shown)


def numbers(chart: Chart) -> str:
    """Return what a picture says it shows, so that a test can compare it with the records."""
    return json.dumps({pack: [tables.number(x) for x in bars] for pack, bars in chart.bars.items()})


def draw(chart: Chart) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for i, (name, color) in enumerate(zip(chart.names, ("#2f6fb0", "#b9bec6"), strict=True)):
        places = [x + 0.36 * (i - 0.5) for x in range(len(chart.bars))]
        bars = axes.bar(places, [both[i] for both in chart.bars.values()], 0.34, label=name, color=color)
        axes.bar_label(bars, fmt="%.0f", fontsize=10, padding=2)
    axes.set_xticks(range(len(chart.bars)), chart.bars, fontsize=10)
    axes.set_title(chart.title, loc="left", fontsize=12)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.margins(y=0.15)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=10)
    figure.savefig(chart.path, dpi=120, metadata={"Description": numbers(chart)})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
