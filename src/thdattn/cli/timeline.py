"""Record a step of attention on all ranks and draw it: python -m thdattn timeline."""

from __future__ import annotations

import argparse
import importlib
import sys
from functools import partial
from pathlib import Path

import numpy as np

import thdattn
from thdattn.arguments import as_count
from thdattn.cli.options import add_documents, add_engine, check_picture, document_lengths
from thdattn.comm import Comm
from thdattn.engines.select import choose_engine
from thdattn.methods.select import SHARDINGS

LENGTHS = "2048,1024,8x256"
WARMUP = 2  # steps before the recorded one: they compile kernels, connect ranks and make windows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_documents(parser, default=LENGTHS)
    add("--method", choices=tuple(SHARDINGS), default="all_gather", help="cp_comm_type (default: all_gather)")
    add("--sharding", choices=("dual_chunk", "contiguous", "balanced"), help="default: the method's own")
    add("--heads", type=int, default=8, help="query heads (default: 8)")
    add("--kv-heads", type=int, help="key and value heads (default: as --heads)")
    add("--head-dim", type=int, default=64, help="default: 64")
    add("--gpus-per-node", type=int, default=2, metavar="N", help="ranks of the inner level of a2a+... (default: 2)")
    add_engine(parser)
    add("--ranks", type=int, default=4, help="simulated ranks, where no launcher started several (default: 4)")
    add("--output", type=Path, default=Path("timeline.svg"), metavar="FILE",
        help="the picture, .svg, .png or .pdf (default: timeline.svg)")


def timeline(arguments: argparse.Namespace) -> int:
    """Record one forward and backward, draw it, and print a line about it.

    Returns:
        The exit status: 0, or 2 for arguments that cannot be used, after one line of rank 0 that says why.
    """
    with thdattn.comm.init() as comm:
        program = partial(_recorded, arguments=arguments)
        try:
            said = program(comm) if comm.size > 1 else thdattn.comm.run_local(
                as_count("--ranks", arguments.ranks), program)[0]
        except (TypeError, ValueError) as error:
            if comm.rank == 0:
                print(f"python -m thdattn timeline: error: {error}", file=sys.stderr)
            return 2
        if comm.rank == 0:
            print(f"{said}\nwrote {arguments.output}")
    return 0


def _recorded(comm: Comm, arguments: argparse.Namespace) -> str:
    """Record a step on this rank; return the line of the timeline."""
    lengths, refusal = np.zeros(0, np.int64), ""
    try:
        if comm.rank == 0:
            check_picture(arguments.output, "--output")
        lengths = document_lengths(arguments)
    except (OSError, ValueError) as error:
        refusal = str(error)
    comm.agree("the lengths", {"lengths": lengths}, refusal)
    engine = choose_engine(arguments.engine, comm)[0]
    attn = thdattn.CPAttention(
        _levels(comm, arguments), arguments.heads, arguments.head_dim, arguments.kv_heads, engine=engine.name,
        dtype="bfloat16" if engine.name == "cuda" else "float32", cp_comm_type=arguments.method)
    plan = attn.plan(thdattn.PackedBatch.from_lengths(lengths, multiple=2 * comm.size), arguments.sharding)
    noise = np.random.default_rng(comm.rank).standard_normal(2**20, np.float32).astype(attn.dtype)
    xp = importlib.import_module("cupy" if engine.name == "cuda" else "numpy")
    q, k, v = (xp.asarray(np.resize(noise, (plan.local_rows, heads, attn.head_dim)))
               for heads in (attn.num_heads, attn.num_kv_heads, attn.num_kv_heads))

    def step() -> None:
        out, saved = attn.forward(q, k, v, plan)
        attn.backward(out, saved)

    for _ in range(WARMUP):
        step()
    with thdattn.timeline.record(comm) as recorded:
        step()
    recorded.save(arguments.output)
    return str(recorded)


def _levels(comm: Comm, arguments: argparse.Namespace) -> Comm | tuple[Comm, Comm]:
    """Return what CPAttention takes: for two levels (inner, outer)."""
    if "+" not in arguments.method:
        return comm
    inner = as_count("--gpus-per-node", arguments.gpus_per_node)
    if comm.size % inner:
        raise ValueError(f"--gpus-per-node is {inner}, wanted a divisor of the {comm.size} ranks; pass the ranks of "
                         f"one machine")
    return comm.split(comm.rank // inner), comm.split(comm.rank % inner)
