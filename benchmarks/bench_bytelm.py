"""Time training steps of examples/bytelm as train.py makes them: real documents, the next batch made meanwhile.

    python benchmarks/bench_bytelm.py --size 1b
    python benchmarks/bench_bytelm.py --size small --cuda-graph-impl full_iteration
    python benchmarks/bench_bytelm.py --size tiny small base --tokens 2048 --every-graph
    python benchmarks/bench_bytelm.py --size small --tokens 2048 --every-graph --maxima P90 P99 16 64 512
    mpiexec -n 4 python -m mpi4py benchmarks/bench_bytelm.py --size 1b --tokens 131072
    mpiexec -n 4 python -m mpi4py benchmarks/bench_bytelm.py --size 1b --tokens 65536 --cp 2
    mpiexec -n 4 python -m mpi4py benchmarks/bench_bytelm.py --size 1b --tokens 131072 --cp-comm-type a2a

A step is timed from the end of the step before to its own end on the GPU. Model FLOPs are 6 per token and weight of a
matrix product, and those of the attention's visible pairs; recomputation does not count. Rows go to
benchmarks/results/bytelm_GPU.csv.

--maxima measures graphs with several maxima of documents per pack: numbers, or percentiles of the packs' documents. A
pack with more documents runs eagerly, so that their table has the mean of all steps.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "bytelm"))

import data
import measure
import numpy as np
import record
import tables
from data import Document, Packing, Position
from grid import Grid
from passes import WAYS
from sizes import SIZES
from train import RECIPES, add_method_arguments, choose_method, make_grid
from trainer import StepResult, Trainer

import thdattn
from thdattn.comm.levels import Levels
from thdattn.graphs import CudaGraphConfig, add_arguments, from_arguments

EXAMPLE = Path(data.__file__).parent
KEY = ("gpu", "size", "ranks", "cp", "tokens", "accumulate", "sharding", "cuda_graph_impl", "cp_comm_type",
       "maximum")
WARM_UP = 8  # steps that are not timed, as they compile kernels and fill memory pools
PACKS = 1_000  # for percentiles of documents


def main() -> int:
    args = parse_arguments()
    with thdattn.comm.init("auto") as comm:
        records = record.Recorder("bytelm", args.out, KEY, comm.size, {"example_sources": example_hash()})
        for one in configurations(args):
            records.add([bench(comm, one)], comm.rank == 0)
            release_memory()
    if comm.rank == 0:
        records.show(tables.training)
    return 0


def release_memory() -> None:
    """Give back what earlier configurations left in the memory pools of this GPU."""
    import peers

    peers.release_memory()


def configurations(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield configurations: every size, with graphs as asked for or in every way, by maximum."""
    for size in args.size:
        ways = [replace(args.graphs, impl=impl, inference_scope=None) for impl in WAYS] if args.every_graph else ()
        for graphs in ways or [args.graphs]:
            for maximum in args.maxima if graphs.impl != "none" else [""]:
                chosen = {"size": size, "graphs": graphs, "maximum": maximum}
                one = argparse.Namespace(**vars(args) | chosen)
                choose_method(one)
                yield one


def bench(comm: thdattn.comm.Comm, args: argparse.Namespace) -> record.Row:
    """Measure one configuration."""
    grid = make_grid(comm, args, SIZES[args.size])
    packing = Packing.of(args.tokens or RECIPES[args.size].tokens, grid.cp.size, args.sharding)
    training, _ = data.split(data.find_documents())
    graphs = with_maximum(args.graphs, args.maximum, training, packing)
    trainer = Trainer(grid, SIZES[args.size], "cuda", args.sharding, seed=0, graphs=graphs,
                      cp_comm_type=args.cp_comm_type)
    batches = data.micro_batches(training, packing, 0, Position(0, 0))
    dealt = data.steps(batches, args.accumulate * grid.num_groups, grid.mine, trainer.passes.prepare)
    results: list[StepResult] = []

    def steps(number: int) -> None:
        for _ in range(number):
            results.append(trainer.step(next(coming), 1e-4))
            if len(results) > 1:
                results[-2].numbers()  # the host stays one step ahead, as in train.py
        results[-1].numbers()

    with closing(data.prefetch(dealt)) as coming, trainer.graphs:
        steps(args.warm_up + args.steps)
        timed = results[args.warm_up :]
        num_bytes = trainer.xp.get_default_memory_pool().total_bytes() + trainer.graphs.num_bytes
    fixed = {
        "size": args.size, "ranks": str(comm.size), "cp": str(grid.cp.size) if grid.num_groups > 1 else "",
        "tokens": str(packing.rows), "accumulate": str(args.accumulate), "sharding": args.sharding,
        "cuda_graph_impl": graphs.impl, "weights": str(trainer.model.weights.size),
        "steps": str(args.steps), "cp_comm_type": method_of(args.cp_comm_type, grid), "maximum": args.maximum,
        "slots": str(graphs.max_packed_seqs or ""), "eager_packs": eager_share(timed, graphs.max_packed_seqs),
    }
    peak = measure.peak_flops(trainer.model)
    return fixed | measured(trainer, timed, peak) | {"memory_gib": f"{num_bytes / 2**30:.1f}"}


def with_maximum(
    graphs: CudaGraphConfig, maximum: str, training: Sequence[Document], packing: Packing
) -> CudaGraphConfig:
    """Return the configuration with so many slots for documents; "P90": as many as nine of ten packs need."""
    if not maximum:
        return graphs
    if not maximum.startswith("P"):
        return replace(graphs, max_packed_seqs=int(maximum))
    batches = islice(data.micro_batches(training, packing, 0, Position(0, 0)), PACKS)
    documents = [batch.batch.num_seqs for batch in batches]
    return replace(graphs, max_packed_seqs=int(np.percentile(documents, float(maximum[1:]), method="inverted_cdf")))


def eager_share(results: Sequence[StepResult], slots: int | None) -> str:
    """Return the part of the micro-batches that have more documents than slots; "" without a maximum."""
    if slots is None:
        return ""
    documents = [batch.batch.num_seqs for result in results for batch in result.batches]
    return f"{sum(number > slots for number in documents) / len(documents):.4f}"


def method_of(cp_comm_type: str, grid: Grid) -> str:
    """Name the method, with the inner size of two levels; "" for all_gather, as in rows without the column."""
    if isinstance(grid.cp, Levels):
        return f"{cp_comm_type} of {grid.cp.inner.size}"
    return "" if cp_comm_type == "all_gather" else cp_comm_type


def measured(trainer: Trainer, results: list[StepResult], peak: float | None) -> record.Row:
    """Return the columns of timed steps: medians; MFU and attention_tflops are per rank."""
    clock, size = trainer.clock, trainer.grid.world.size
    seconds = [clock.seconds(*result.span) for result in results]
    low, high = record.spread(seconds)
    tokens = [sum(batch.num_targets for batch in result.batches) for result in results]
    rows = sum(batch.batch.total_rows for result in results for batch in result.batches)
    attention = [speed for result in results if (speed := trainer.attention_tflops(result)) is not None]
    flops = [sum(map(trainer.model.flops, result.lengths)) for result in results]
    mfu = [work / size / step / peak for work, step in zip(flops, seconds, strict=True)] if peak else []
    return {
        "ms_per_step": f"{1e3 * median(seconds):.2f}",
        "ms_p10": f"{1e3 * low:.2f}",
        "ms_p90": f"{1e3 * high:.2f}",
        "ms_mean": f"{1e3 * fmean(seconds):.2f}",
        "tokens_per_s": f"{median(n / step for n, step in zip(tokens, seconds, strict=True)):.0f}",
        "mfu": f"{median(mfu):.4f}" if mfu else "",
        "attention_tflops": f"{median(attention):.1f}" if attention else "",
        "padding": f"{1 - sum(tokens) / rows:.4f}",
        "last_loss": f"{float(results[-1].numbers()[0]):.3f}",
        "overflows": str(results[-1].num_overflows),
    }


def example_hash() -> str:
    """Hash the code of the example with its kernels."""
    digest = hashlib.sha256()
    for path in sorted([*EXAMPLE.glob("*.py"), *EXAMPLE.glob("*.cu")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=["1b"], help="of the model (default: 1b)")
    parser.add_argument("--tokens", type=int, metavar="N", help="rows per micro-batch (default: by size)")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches per step of a group (1)")
    parser.add_argument("--cp", type=int, metavar="N", help="ranks that share a micro-batch (default: all ranks)")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="timed steps (default: 30)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, metavar="N",
                        help=f"steps before, which compile and fill memory pools (default: {WARM_UP})")
    parser.add_argument("--every-graph", action="store_true", help="without graphs, per layer, and of a whole step")
    parser.add_argument("--maxima", nargs="+", default=[""], metavar="MAX", type=maximum,
                        help="slots for documents in graphs, one after another: 16, or P90")
    add_method_arguments(parser)
    add_arguments(parser)
    record.add_options(parser, "bytelm")
    args = parser.parse_args()
    args.graphs = from_arguments(parser, args)
    if args.maxima != [""] and args.graphs.impl == "none" and not args.every_graph:
        parser.error("--maxima are of CUDA graphs; add --every-graph or --cuda-graph-impl local")
    return args


def maximum(text: str) -> str:
    """Return a maximum as --maxima takes it: a number of documents, or P and a percentage.

    Raises:
        ValueError: it is neither.
    """
    if 0 < float(text.removeprefix("P")) <= 100 if text.startswith("P") else text.isdecimal() and int(text) > 0:
        return text
    raise ValueError(f"found {text}, wanted such as 16 or P90")


if __name__ == "__main__":
    sys.exit(main())
