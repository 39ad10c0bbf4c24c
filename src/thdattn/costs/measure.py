"""Measure the rates that the cost model needs: attention kernels, and exchanges between ranks."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thdattn.attention import CPAttention
from thdattn.comm import Comm, SingleComm
from thdattn.costs.model import H200, Rates, Shape, attention_flops
from thdattn.costs.tile_counts import pairs_and_tiles
from thdattn.engines import Engine
from thdattn.engines.select import choose_engine
from thdattn.packing import PackedBatch

MOST_ROWS = {"cuda": 32_768, "reference": 256}  # rows of the pack that attention is timed with
MESSAGE = {"cuda": 2**26, "reference": 2**20}  # bytes that every rank receives from all others together
SMALL = 2**10
CALLS = 5


def measured(comm: Comm, lengths: Sequence[int], shape: Shape) -> Rates:
    """Measure the rates of all ranks and return the slowest; others are those of H200. Collective.

    Args:
        comm: one rank measures its kernels alone, and `between` is never measured.
        lengths: of the documents, of which the first are taken.
    """
    engine, _ = choose_engine("auto", comm)
    rates = H200
    if comm.size > 1:
        latency, link = _link(comm, engine)
        rates = rates._replace(latency=latency, link=link)
    forward, backward = _kernels(comm, engine, lengths, shape, rates.latency)
    return rates._replace(forward=forward, backward=backward)


def _kernels(
    comm: Comm, engine: Engine, lengths: Sequence[int], shape: Shape, latency: float
) -> tuple[float, float]:
    """Measure floating-point operations per second, in whole tiles, of forward and backward."""
    attention = CPAttention(SingleComm(), shape.num_heads, shape.head_dim, shape.num_kv_heads, causal=shape.causal,
                            window=shape.window, engine=engine.name)
    most = MOST_ROWS[engine.name]
    ends = np.minimum(np.cumsum(np.minimum(lengths, most)), most)
    batch = PackedBatch.from_lengths(np.diff(ends, prepend=0).tolist())
    plan = attention.plan(batch, "contiguous")
    numbers = np.random.default_rng(0).standard_normal(2**16).astype(attention.dtype)
    q, k, v, dout = (_arrays(engine).asarray(np.resize(numbers, (batch.total_rows, heads, shape.head_dim)))
                     for heads in (shape.num_heads, *2 * [shape.num_kv_heads], shape.num_heads))
    saved = attention.forward(q, k, v, plan)[1]
    calls = (lambda: attention.forward(q, k, v, plan)), (lambda: attention.backward(dout, saved))
    _, tiles = pairs_and_tiles(plan.sharding, plan.window)
    flops = (attention_flops(plan, int(tiles.max()), shape.num_heads, direction) for direction in (0, 1))
    seconds = [max(_seconds(comm, engine, call) - latency, 1e-9) for call in calls]
    forward, backward = (number / each for number, each in zip(flops, seconds, strict=True))
    return forward, backward


def _link(comm: Comm, engine: Engine) -> tuple[float, float]:
    """Measure the seconds of a small exchange, and the bytes per second that a rank gets in a large one."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    seconds = []
    for size in (SMALL, MESSAGE[engine.name]):
        rows = -(-size // (SMALL * (comm.size - 1)))
        sends, recvs = _arrays(engine).zeros((2, comm.size, rows, SMALL), np.uint8)
        sizes = rows * SMALL * (1 - np.eye(comm.size, dtype=np.int64))

        def exchange(sends: Any = sends, recvs: Any = recvs, sizes: Any = sizes) -> None:
            comm.exchange([(sends[rank], rank) for rank in others], [(recvs[rank], rank) for rank in others], sizes)()

        seconds.append(_seconds(comm, engine, exchange))
    latency, large = seconds
    return latency, rows * SMALL * len(others) / max(large - latency, 1e-9)


def _seconds(comm: Comm, engine: Engine, call: Callable[[], object]) -> float:
    """Return the seconds of one of several consecutive warm calls, on the slowest rank."""
    return float(max(comm._gather_values(_seconds_here(engine, call))))


def _seconds_here(engine: Engine, call: Callable[[], object]) -> float:
    call()
    if engine.name != "cuda":
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - begin) / CALLS
    cupy = _arrays(engine)
    call()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / CALLS


def _arrays(engine: Engine) -> Any:
    """Return the library of the engine's arrays."""
    return importlib.import_module("cupy" if engine.name == "cuda" else "numpy")
