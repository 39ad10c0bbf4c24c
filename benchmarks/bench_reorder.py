"""Time moves of rows between rank order and sequence order beside a copy and torch.index_select.

    python benchmarks/bench_reorder.py

Buffers are those around the collectives: bfloat16 k and v to sequence order, float32 dk and dv to rank order. GB/s
count bytes read and written, without the index. The ways:

ours      thd_reorder, both arrays in one launch
copy      a plain copy on the device, of as many bytes
select    torch.index_select of each array, with PyTorch
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import record
import tables
import timing
from numpy.typing import DTypeLike
from peers import normal

import thdattn
from thdattn.engines import cuda
from thdattn.plan.build import with_arrays
from thdattn.plan.plan import NO_ARRAYS

ROWS, HEADS, WIDTH = 2**18, 8, 128  # k and v in bfloat16: 1 GiB together, far more than an L2 cache holds
PACKS = {"1 sequence": (ROWS,), "4096 sequences of 64": (64,) * (ROWS // 64)}
ROUNDS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser, "reorder")
    args = parser.parse_args()
    records = record.Recorder("reorder", args.out, ("gpu", "case", "cp_size", "direction", "peer"))
    with cupy.cuda.Stream(non_blocking=True):
        for pack in PACKS:
            for cp_size in (2, 4, 8):
                records.add(bench(pack, cp_size))
    records.show(tables.reorder)
    return 0


def bench(pack: str, cp_size: int) -> Iterator[record.Row]:
    """Time both directions of one pack; all ways take turns."""
    plan = rank_zero_plan(thdattn.Sharding(thdattn.PackedBatch.from_lengths(PACKS[pack]), cp_size))
    order = plan.rank_order
    inverse = cupy.argsort(order).astype(order.dtype)  # these packs have no padding rows
    moves: dict[str, tuple[Callable[..., Any], Any, DTypeLike]] = {
        "to_sequence_order": (lambda k, v, plan: cuda.to_sequence_order([[k], [v]], plan), inverse, ml_dtypes.bfloat16),
        "to_rank_order": (cuda.to_rank_order, order, np.float32),
    }
    for direction, (move, index, dtype) in moves.items():
        sources = [normal((ROWS, HEADS, WIDTH), seed, dtype) for seed in (0, 1)]
        check(direction, sources, move(*sources, plan), plan)
        copies = [cupy.empty_like(x) for x in sources]
        ways: dict[str, Callable[[], object]] = {
            "ours": partial(move, *sources, plan), "copy": partial(copy, sources, copies),
        }
        if importlib.util.find_spec("torch"):
            ways["select"] = selecting(sources, index)
        num_bytes = 2 * sum(x.nbytes for x in sources)
        times = timing.race(thdattn.comm.SingleComm(), {name: {"move": call} for name, call in ways.items()}, ROUNDS)
        for peer in ways:
            samples = times[peer, "move"]
            yield {
                "case": pack, "cp_size": str(cp_size), "direction": direction, "dtype": np.dtype(dtype).name,
                "bytes": str(num_bytes), "peer": peer, **record.timed(samples),
                "gb_per_s": f"{num_bytes / median(samples) / 1e6:.0f}",
            }


def rank_zero_plan(sharding: thdattn.Sharding) -> thdattn.Plan:
    """Make the plan of rank 0 without the other ranks: the moves of all ranks are the same."""
    outline = thdattn.Plan(sharding, 0, (-1, 0), (WIDTH, WIDTH), (64, 64), NO_ARRAYS, cuda, sharding.batch)
    return with_arrays(outline)


def check(direction: str, sources: list[Any], moved: tuple[Any, Any], plan: thdattn.Plan) -> None:
    """Raise RuntimeError unless every row was moved: wrong results are not timed."""
    for source, result in zip(sources, moved, strict=True):
        here, there = (source, result) if direction == "to_rank_order" else (result, source)
        if not bool((here.view(np.int16)[plan.rank_order] == there.view(np.int16)).all()):
            raise RuntimeError("thd_reorder moved rows elsewhere than plan.rank_order says: not timed")


def selecting(sources: Sequence[Any], index: Any) -> Callable[[], object]:
    """Return a function that calls torch.index_select on each array, on the current stream."""
    import torch
    from peers import tensor

    torch.cuda.set_stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr))
    tensors, rows = [tensor(x) for x in sources], tensor(index)
    return lambda: [torch.index_select(x, 0, rows) for x in tensors]


def copy(sources: list[Any], targets: list[Any]) -> None:
    stream = cupy.cuda.get_current_stream()
    for source, target in zip(sources, targets, strict=True):
        target.data.copy_from_device_async(source.data, source.nbytes, stream)


if __name__ == "__main__":
    sys.exit(main())
