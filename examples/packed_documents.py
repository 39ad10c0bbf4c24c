"""Attention over packed documents on several ranks, forward and backward, checked against float64.

    python examples/packed_documents.py                            simulated ranks in this process
    mpiexec -n 4 python -m mpi4py examples/packed_documents.py      four processes, each with a GPU if it has one

The documents are source files of Python's standard library on this machine, one token a byte. To learn how a program
uses thdattn, read run() and the functions below it in order; report.py only prints and draws.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; NumPy reads this once, when it is imported

import command_line
import numpy as np
import report

import thdattn
from thdattn import oracle
from thdattn.engines.select import choose_engine
from thdattn.sharding import STRATEGIES

DEFAULTS = {
    "reference": {"tokens": 32_768, "heads": 4, "kv_heads": 2, "head_dim": 64, "repeats": 2},
    "cuda": {"tokens": 131_072, "heads": 16, "kv_heads": 4, "head_dim": 128, "repeats": 10},
}
FEATURES = 64  # width of the vectors that q, k, v are projected from
SAMPLE_SCORES = 2**27  # heads * rows * keys that are computed again in float64: a few seconds


@dataclass
class Run:
    """State that every function below needs: the ranks, the attention, the pack, and the options."""

    args: argparse.Namespace
    comm: thdattn.comm.Comm
    attn: thdattn.CPAttention
    plan: thdattn.Plan
    xp: Any  # NumPy or CuPy, whichever the engine computes with

    def total(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the numbers that every rank passed, (cp_size, len(numbers))."""
        send = self.xp.asarray([numbers], np.int64)
        recv = self.xp.empty((self.comm.size, len(numbers)), np.int64)
        self.comm.all_gather(send, recv)
        return to_host(recv)


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without block characters
    return command_line.run(program)


def program(comm: thdattn.comm.Comm) -> int:
    """Run the ranks: those that mpiexec has started, or simulated ones."""
    with command_line.together(comm):
        args = parse_arguments()
        engine, args.why = choose_engine("auto", comm)
        if args.plot and comm.rank == 0:
            command_line.check_picture("--plot", args.plot)
    for option, value in DEFAULTS[engine.name].items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    if comm.size > 1:
        passed = [run(comm, args)]
    else:
        passed = thdattn.comm.run_local(args.ranks, lambda simulated: run(simulated, args), timeout=600)
    return 0 if all(passed) else 1


def run(comm: thdattn.comm.Comm, args: argparse.Namespace) -> bool:
    """Run the whole program of one rank, and return whether the results are right. Every rank calls it."""
    with command_line.together(comm):  # options that do not fit are an error of the user, on all ranks alike
        tokens, batch = pack(args.tokens, args.seed, 2 * comm.size)
        attn = thdattn.CPAttention(
            comm, args.heads, args.head_dim, args.kv_heads, causal=not args.full,
            window=(args.window, args.window if args.full else 0),
        )
    plan = attn.plan(batch, sharding=args.sharding)
    this = Run(args, comm, attn, plan, importlib.import_module("cupy" if attn.engine == "cuda" else "numpy"))

    work = this.total([int((plan.rows >= 0).sum()), int(np.diff(to_host(plan.key_ranges)).sum(dtype=np.int64))])
    if comm.rank == 0:
        report.print_pack(batch)
        report.print_work(comm, plan.sharding, work)
        report.print_engine(attn, args.why)
        if args.plot:
            report.draw(args.plot, plan.sharding, attn)
            print(f"  wrote {args.plot}")

    report.print_step(comm, "making q, k, v from the bytes")
    q, k, v, dout = embed(this, tokens)
    report.print_step(comm, "computing forward and backward")
    (out, saved), forward = timed(this, lambda: attn.forward(q, k, v, plan))
    (dq, dk, dv), backward = timed(this, lambda: attn.backward(dout, saved))
    report.print_step(comm, "computing some documents again in float64")
    inputs, results = {"q": q, "k": k, "v": v, "dout": dout}, {"out": out, "dq": dq, "dk": dk, "dv": dv}
    verdicts = check(this, inputs, results)

    if comm.rank == 0:
        report.print_times(attn, attn.flops(plan), forward, backward)
        report.print_verdicts(verdicts)
    return verdicts.passed


def pack(budget: int, seed: int, multiple: int) -> tuple[np.ndarray, thdattn.PackedBatch]:
    """Choose documents, and return their bytes in packed order, and their lengths.

    Files come in random order. One is taken if it still fits, and is no more than a quarter of the budget.

    Raises:
        ValueError: none fits.
    """
    longest = budget // 4
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(seed).shuffle(files)
    documents: list[np.ndarray] = []
    for path in files:
        if 0 < path.stat().st_size <= min(budget, longest):
            documents.append(np.frombuffer(path.read_bytes(), np.uint8))
            budget -= len(documents[-1])
    if not documents:
        raise ValueError(f"--tokens is {budget}, wanted room for a document in a quarter of it; pass more, like 3000")
    batch = thdattn.PackedBatch.from_lengths([len(document) for document in documents], multiple)
    return batch.pack(documents), batch


def embed(this: Run, tokens: np.ndarray) -> list[Any]:
    """Return q, k, v, dout of this rank's rows: vectors of bytes and positions, each by a fixed random projection.

    A model would do the same with its weights. Padding gets NaN on purpose: nothing may ever notice it.
    """
    plan, args, rng = this.plan, this.args, np.random.default_rng(0)
    local_tokens = plan.sharding.shard(tokens, this.comm.rank)
    frequencies = 10_000.0 ** -np.linspace(0, 1, FEATURES // 2)
    angles = to_host(plan.positions)[:, None] * frequencies
    vectors = rng.standard_normal((256, FEATURES))[local_tokens] + np.hstack([np.sin(angles), np.cos(angles)])
    padding = ~to_host(plan.valid)
    arrays = []
    for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads):
        weights = rng.standard_normal((FEATURES, heads * args.head_dim), np.float32) * FEATURES**-0.5
        x = (vectors.astype(np.float32) @ weights).reshape(-1, heads, args.head_dim)
        x[padding] = np.nan
        arrays.append(this.xp.asarray(x.astype(this.attn.dtype)))
    return arrays


def timed(this: Run, call: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Return the result of a call, and seconds: of the first call, which compiles kernels, and the median of others."""
    seconds = []
    for _ in range(1 + this.args.repeats):
        synchronize(this)
        began = time.perf_counter()
        result = call()
        synchronize(this)
        seconds.append(time.perf_counter() - began)
    return result, (seconds[0], float(np.median(seconds[1:])))


def check(this: Run, inputs: dict[str, Any], results: dict[str, Any]) -> report.Verdicts:
    """Compare a random sample of the documents with float64, and look for anything but 0 in the padding."""
    batch, args = this.plan.batch, this.args
    sample = choose_sample(batch.lengths, SAMPLE_SCORES // args.heads, args.seed)
    starts = batch.cu_seqlens_padded[sample]
    sample_rows = np.concatenate([start + np.arange(batch.lengths[b]) for b, start in zip(sample, starts, strict=True)])
    q, k, v, dout = (rows_of_all_ranks(this, x, sample_rows) for x in inputs.values())
    actual = {name: rows_of_all_ranks(this, x, sample_rows) for name, x in results.items()}

    padding = ~to_host(this.plan.valid)
    not_zero = this.total([sum(int((to_host(x)[padding] != 0).sum()) for x in results.values())]).sum()

    errors = {}
    if this.comm.rank == 0:
        documents = thdattn.PackedBatch.from_lengths(batch.lengths[sample])
        truth = oracle.truth(documents, q, k, v, dout, causal=this.attn.causal, window=this.attn.window)
        errors = {name: truth.judge(name, x) for name, x in actual.items()}
    return report.Verdicts(len(sample), len(sample_rows), errors, int(not_zero))


def choose_sample(lengths: np.ndarray, scores: int, seed: int) -> np.ndarray:
    """Choose random documents with at most so many query-key pairs together, or the shortest one."""
    chosen = []
    for document in random.Random(seed).sample(range(len(lengths)), len(lengths)):
        if int(lengths[document]) ** 2 <= scores:
            chosen.append(document)
            scores -= int(lengths[document]) ** 2
    return np.array(chosen or [int(lengths.argmin())])


def rows_of_all_ranks(this: Run, x: Any, rows: np.ndarray) -> np.ndarray:
    """Return some rows of an array that is spread over the ranks, on the host of every rank, in the array's dtype.

    Every rank puts in the rows that it owns and leaves the others 0, so the sum over ranks is exact.
    """
    local_row = np.full(this.plan.batch.total_rows, -1)
    owned = this.plan.sharding.rows(this.comm.rank)
    local_row[owned[owned >= 0]] = np.flatnonzero(owned >= 0)
    mine = local_row[rows] >= 0
    part = np.zeros((len(rows), *x.shape[1:]), np.float32)
    part[mine] = to_host(x)[local_row[rows[mine]]]
    everything = this.xp.asarray(part)
    this.comm.all_reduce(everything, "sum")
    return np.asarray(to_host(everything), x.dtype)


def to_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else np.asarray(x.get())


def synchronize(this: Run) -> None:
    """Wait for this rank's GPU and for the other ranks."""
    if this.attn.engine == "cuda":
        this.xp.cuda.Device().synchronize()
    this.comm.barrier()


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cpu, gpu = DEFAULTS["reference"], DEFAULTS["cuda"]
    for option, meaning in {
        "tokens": "tokens to pack", "heads": "query heads", "kv-heads": "key and value heads",
        "head-dim": "width of a head", "repeats": "timed calls after the first",
    }.items():
        key = option.replace("-", "_")
        parser.add_argument(f"--{option}", type=command_line.positive, metavar="N",
                            help=f"{meaning} (default: {cpu[key]}, on a GPU {gpu[key]})")
    parser.add_argument("--ranks", type=command_line.positive, default=4, metavar="N",
                        help="simulated ranks, when not started by mpiexec (default: 4)")
    parser.add_argument("--window", type=int, default=-1, metavar="N",
                        help="see only the N tokens before, with --full also the N after (default: all)")
    parser.add_argument("--full", action="store_true", help="see later tokens too; otherwise the mask is causal")
    parser.add_argument("--sharding", choices=list(STRATEGIES), default="dual_chunk", help="which rank owns which rows")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="chooses the documents (default: 0)")
    parser.add_argument("--plot", type=Path, metavar="FILE",
                        help="draw the mask and the owners of its rows into this PNG, PDF or SVG file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
