"""Times the row moves between rank order and sequence order against a plain device-to-device copy of as many bytes.

    python benchmarks/bench_reorder.py

Buffers as around the collectives: bfloat16 k and v to sequence order, float32 dk and dv to rank order. GB/s counts
bytes read plus bytes written; the index is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import record
import timing
from numpy.typing import DTypeLike
from peers import normal

import thdattn
from thdattn import ops

ROWS, HEADS, WIDTH = 2**18, 8, 128  # k and v in bfloat16: 1 GiB together, far more than an L2 cache holds
PACKS = {"1 sequence": (ROWS,), "4096 sequences of 64": (64,) * (ROWS // 64)}
ROUNDS = 5


def main() -> int:
    args = parse_arguments()
    about = record.provenance()
    path = args.out or record.results_file("reorder", about["gpu"])
    print(f"{'pack':22}{'cp_size':>8}{'direction':>20}{'reorder GB/s':>14}{'copy GB/s':>11}{'ratio':>7}")
    rows = []
    with cupy.cuda.Stream(non_blocking=True):
        for pack in PACKS:
            for cp_size in (2, 4, 8):
                for row in bench(pack, cp_size):
                    print(f"{pack:22}{cp_size:8}{row['direction']:>20}{row['gb_per_s']:>14}{row['copy_gb_per_s']:>11}"
                          f"{row['ratio']:>7}")  # fmt: skip
                    rows.append(about | row)
    record.save(path, rows, ("gpu", "case", "cp_size", "direction"))
    print(f"wrote {path}")
    return 0


def bench(pack: str, cp_size: int) -> Iterator[record.Row]:
    """Both directions of one pack; the copies and the moves take turns."""
    plan = rank_zero_plan(thdattn.Sharding(thdattn.PackedBatch.from_lengths(PACKS[pack]), cp_size))
    moves: dict[str, tuple[Callable[..., Any], DTypeLike]] = {
        "to_sequence_order": (lambda k, v, plan: ops.to_sequence_order([k], [v], plan), ml_dtypes.bfloat16),
        "to_rank_order": (ops.to_rank_order, np.float32),
    }
    for direction, (move, dtype) in moves.items():
        sources = [normal((ROWS, HEADS, WIDTH), seed, dtype) for seed in (0, 1)]
        moved = move(*sources, plan)
        check(direction, sources, moved, plan)
        copies = [cupy.empty_like(x) for x in sources]
        times = timing.interleaved(
            {name: partial(timing.called, call, 20)
             for name, call in (("move", partial(move, *sources, plan)), ("copy", partial(copy, sources, copies)))},
            ROUNDS, lambda _: nullcontext(),
        )  # fmt: skip
        num_bytes = 2 * sum(x.nbytes for x in sources)
        ms, copy_ms = (median(times[name]) for name in ("move", "copy"))
        spreads = {f"{column}_p{percent}": f"{value:.4f}"
                   for column, name in (("ms", "move"), ("copy_ms", "copy"))
                   for percent, value in zip((10, 90), record.spread(times[name]), strict=True)}  # fmt: skip
        yield {
            "case": pack,
            "cp_size": str(cp_size),
            "direction": direction,
            "dtype": np.dtype(dtype).name,
            "bytes": str(num_bytes),
            "ms": f"{ms:.4f}",
            "gb_per_s": f"{num_bytes / ms / 1e6:.0f}",
            "copy_ms": f"{copy_ms:.4f}",
            "copy_gb_per_s": f"{num_bytes / copy_ms / 1e6:.0f}",
            "ratio": f"{copy_ms / ms:.3f}",
            "samples": str(len(times["move"])),
            **spreads,
        }


def rank_zero_plan(sharding: thdattn.Sharding) -> thdattn.Plan:
    """The plan of rank 0, without the other ranks: the moves of all ranks are the same."""
    window, tiles = (-1, 0), (64, 64)
    arrays = ops.plan_arrays(sharding, 0, window, tiles)
    return thdattn.Plan(sharding, 0, window, (WIDTH, WIDTH), tiles, arrays, ops)


def check(direction: str, sources: list[Any], moved: tuple[Any, Any], plan: thdattn.Plan) -> None:
    """Raises RuntimeError unless every row was moved; a wrong kernel must not be timed."""
    for source, result in zip(sources, moved, strict=True):
        here, there = (source, result) if direction == "to_rank_order" else (result, source)
        if not bool((here.view(np.int16)[plan.rank_order] == there.view(np.int16)).all()):
            raise RuntimeError("thd_reorder moved rows elsewhere than plan.rank_order says: not timed")


def copy(sources: list[Any], targets: list[Any]) -> None:
    stream = cupy.cuda.get_current_stream()
    for source, target in zip(sources, targets, strict=True):
        target.data.copy_from_device_async(source.data, source.nbytes, stream)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="CSV file to add to; benchmarks/results/reorder_GPU.csv by default")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
