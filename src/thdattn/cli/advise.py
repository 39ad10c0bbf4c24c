"""python -m thdattn advise: which of the ways to spread a pack over ranks to take, and what each would cost."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import thdattn
from thdattn.arguments import as_count, as_window, shown
from thdattn.cli.pack_stats import lengths_below
from thdattn.costs.measure import measured
from thdattn.costs.model import H200, Cost, Rates, Shape, Way, compared, recommended
from thdattn.install import remedy
from thdattn.packing import PackedBatch, first_fit
from thdattn.plan.memory import in_units
from thdattn.sharding import Sharding

MOST_DOCUMENTS = 40  # that the picture shows
MOST_RANKS = 256  # all pairs of which are looked at
UNITS = {"forward": 1e12, "backward": 1e12, "link": 1e9, "between": 1e9, "memory": 1e12, "latency": 1e-6}
EXPLANATION = """
received: by the rank that gets most. work: of the busiest rank over the mean. tiles: of 128 x 128 scores, of the
busiest rank. memory: free for one layer, beside q, k and v, without windows of peer memory, and on a machine without a
GPU without what kernels take. attention: of both, the kernels alone. Times follow from rates: they are not measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command; `advise` reads them."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", metavar="L,NxL,...", help="tokens of the documents: 24576,28672 or 64x1024")
    source.add_argument("--data", type=Path, metavar="DIR", help="or documents: the files below it; a byte is a token")
    add = parser.add_argument
    add("--tokens", type=int, metavar="N", help="with --data: rows of a pack, of all ranks together")
    add("--seed", type=int, default=0, metavar="S", help="with --data: of the order of the documents (default: 0)")
    add("--ranks", type=int, default=8, metavar="N", help="(default: 8)")
    add("--gpus-per-node", type=int, metavar="N", help="ranks of one machine (default: all)")
    add("--heads", type=int, default=32, metavar="N", help="query heads (default: 32)")
    add("--kv-heads", type=int, metavar="N", help="heads of keys and values (default: as many)")
    add("--head-dim", type=int, default=128, metavar="D", help="(default: 128)")
    add("--window", type=int, default=-1, metavar="N", help="positions that a query sees before its own (default: all)")
    add("--full", action="store_true", help="a query sees later positions, too")
    add("--measure", action="store_true", help="rates of this machine; under mpiexec also between the ranks")
    add("--compute", metavar="F,B", help="TFLOP/s of attention kernels, forward and backward")
    add("--link", type=float, metavar="GB/S", help="that a GPU gets from others of its machine")
    add("--between", type=float, metavar="GB/S", help="that a GPU gets from other machines")
    add("--latency", type=float, metavar="US", help="of a kernel or collective")
    add("--plot", type=Path, metavar="FILE", help="draw who owns what into this PNG, PDF or SVG file")


def advise(arguments: argparse.Namespace) -> int:
    """Compare all ways, and print what they cost and which to take.

    Returns:
        The exit status: 0, or 2 for arguments or files that cannot be used, after one line that says why.
    """
    try:
        if arguments.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f"--plot needs Matplotlib; install it with: {remedy('examples')}")
        lengths, (cp_size, shape) = _lengths(arguments), _layer(arguments)
        rates, sources = passed_rates(arguments), dict.fromkeys(Rates._fields, "H200")
        known = H200
        if arguments.measure:
            with thdattn.comm.init("auto") as comm:
                known = measured(comm, lengths, shape)
                if comm.rank:
                    return 0
            sources |= {name: "measured" for name in Rates._fields if getattr(known, name) != getattr(H200, name)}
        sources |= dict.fromkeys(rates, "passed")
        known = known._replace(**rates)
        costs, refusals = compared(lengths, cp_size, shape, known)
        _print_question(lengths, cp_size, shape, known, sources)
        _print_costs(costs, refusals, shape)
        if arguments.plot:
            _draw(arguments.plot, lengths, cp_size, recommended(costs).way)
            print(f"wrote {arguments.plot}")
    except (ValueError, OSError) as error:
        print(f"python -m thdattn advise: error: {error}", file=sys.stderr)
        return 2
    return 0


# ------------------------------------------------------------------------------------------------ arguments


def as_lengths(text: str) -> list[int]:
    """Lengths as they stand on a command line: with commas between, NxL for N times L."""
    lengths: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:(\d{1,7})x)?(\d{1,9})", part.strip())
        if not found:
            raise ValueError(f"--lengths has {shown(part)}, wanted lengths with commas between, NxL for N times L; "
                             f"pass them as in 24576,8x1024")
        lengths += int(found[1] or 1) * [int(found[2])]
    if not any(lengths):
        raise ValueError(f"--lengths is {shown(text)}, wanted at least one token; pass the tokens of every document")
    return lengths


def _lengths(arguments: argparse.Namespace) -> list[int]:
    """Of the documents of a pack: those passed, or of the first pack of a folder's documents in a random order."""
    if arguments.lengths is not None:
        return as_lengths(arguments.lengths)
    if arguments.tokens is None:
        raise ValueError("--tokens is missing, wanted the rows of a pack of --data; pass --tokens 65536, say")
    room = as_count("--tokens", arguments.tokens)
    seed = as_count("--seed", arguments.seed, "leave it out for 0", at_least=0)
    sizes = lengths_below(arguments.data)
    pieces = [piece for size in np.random.default_rng(seed).permutation(sizes).tolist()
              for piece in (*[room] * (size // room), size % room) if piece]
    return next(first_fit(pieces, int, room))


def _layer(arguments: argparse.Namespace) -> tuple[int, Shape]:
    """The number of ranks, and what the attention is."""
    cp_size = as_count("--ranks", arguments.ranks, "pass the ranks to spread a pack over", MOST_RANKS, at_least=2)
    per_node = cp_size if arguments.gpus_per_node is None else as_count("--gpus-per-node", arguments.gpus_per_node)
    if cp_size % per_node and per_node < cp_size:
        raise ValueError(f"--gpus-per-node is {per_node}, wanted a divisor of --ranks, {cp_size}; pass the ranks of "
                         f"one machine")
    heads = as_count("--heads", arguments.heads)
    kv_heads = heads if arguments.kv_heads is None else as_count("--kv-heads", arguments.kv_heads)
    window = as_window((arguments.window, arguments.window if arguments.full else -1), not arguments.full)
    return cp_size, Shape(heads, kv_heads, as_count("--head-dim", arguments.head_dim), not arguments.full, window,
                          min(per_node, cp_size))  # fmt: skip


def passed_rates(arguments: argparse.Namespace) -> dict[str, float]:
    """Those of Rates that were passed, by name."""
    values: dict[str, float] = {name: getattr(arguments, name) for name in ("link", "between", "latency")
                                if getattr(arguments, name) is not None}  # fmt: skip
    if arguments.compute is not None:
        try:
            values["forward"], values["backward"] = map(float, arguments.compute.split(","))
        except ValueError:
            raise ValueError(f"--compute is {shown(arguments.compute)}, wanted two numbers with a comma between; pass "
                             f"TFLOP/s of forward and backward, as in 730,650") from None
    for name, value in values.items():
        if not 0 < value < float("inf"):
            option = "--compute" if name in ("forward", "backward") else f"--{name}"
            raise ValueError(f"{option} has {value}, wanted a finite number above 0; pass one")
    return {name: value * UNITS[name] for name, value in values.items()}


# ------------------------------------------------------------------------------------------------ text


def _print_question(
    lengths: Sequence[int], cp_size: int, shape: Shape, rates: Rates, sources: dict[str, str]
) -> None:
    per_node = shape.per_node or cp_size
    mask = ("causal" if shape.causal else "full") + (f", window {shape.window}" if shape.window[0] >= 0 else "")
    documents = f"{len(lengths):,} document{'s' * (len(lengths) > 1)}"
    print(f"pack    {documents}, {sum(lengths):,} tokens, the longest {max(lengths):,}")
    print(f"layer   {shape.num_heads} heads, {shape.num_kv_heads} of keys and values, of {shape.head_dim}; {mask}")
    print(f"ranks   {cp_size}, {'on one machine' if per_node == cp_size else f'{per_node} on each machine'}")
    names = {"forward": "TFLOP/s forward", "backward": "TFLOP/s backward", "link": "GB/s between GPUs",
             "between": "GB/s between machines", "memory": "TB/s of memory", "latency": "us of latency"}  # fmt: skip
    said = [f"{getattr(rates, name) / UNITS[name]:.4g} {text} ({sources[name]})" for name, text in names.items()]
    print(f"rates   {', '.join(said[:3])},\n        {', '.join(said[3:])}")


def _print_costs(costs: Sequence[Cost], refusals: dict[Way, str], shape: Shape) -> None:
    print(f"\n{'':<42}{'received, MiB':^17}{'':>29}{'milliseconds':^33}")
    print(f"{'cp_comm_type, sharding':<42}{'fwd':>8}{'bwd':>9}{'work':>7}{'tiles':>11}{'memory':>11}"
          f"{'fwd':>10}{'bwd':>9}{'both':>9}{'attention':>11}")
    for cost in costs:
        forward, backward = (x / 2**20 for x in cost.received)
        print(f"{cost.way!s:<42}{forward:>8,.1f}{backward:>9,.1f}{cost.work:>7.2f}{cost.tiles:>11,}"
              f"{in_units(cost.memory):>11}{1e3 * cost.seconds.forward:>10,.2f}{1e3 * cost.seconds.backward:>9,.2f}"
              f"{1e3 * cost.seconds.total:>9,.2f}{1e3 * cost.compute.total:>11,.2f}")
    print(EXPLANATION)
    if refusals:
        print("\ncannot work:")
    for why in dict.fromkeys(refusals.values()):
        print(f"  {'; '.join(str(way) for way, reason in refusals.items() if reason == why)}\n"
              f"{textwrap.fill(why, 118, initial_indent=6 * ' ', subsequent_indent=6 * ' ')}")
    best = recommended(costs).way
    print(f"\nrecommended: {best}\n\n{advice(best, shape)}")


def advice(way: Way, shape: Shape) -> str:
    """The code that takes a way."""
    comm = "comm"
    if way.inner > 1:
        comm = f"(comm.split(comm.rank // {way.inner}), comm.split(comm.rank % {way.inner}))"
    mask = "" if shape.causal else ", causal=False"
    if shape.window[0] >= 0:
        mask += f", window={(shape.window[0], -1 if shape.causal else shape.window[1])}"
    return (f"    attn = thdattn.CPAttention({comm}, {shape.num_heads}, {shape.head_dim}, {shape.num_kv_heads}{mask}, "
            f"cp_comm_type={way.cp_comm_type!r})\n    plan = attn.plan(batch, sharding={way.sharding!r})")


# ------------------------------------------------------------------------------------------------ picture


def owners(batch: PackedBatch, cp_size: int, way: Way) -> NDArray[np.int64]:
    """(total_rows,), the rank that has each row; -1: none."""
    sharding = Sharding(batch, cp_size, way.sharding, way.inner)
    found = np.full(batch.total_rows + 1, -1)
    for rank in range(cp_size):
        found[sharding.rows(rank)] = rank
    return found[:-1]


def _draw(path: Path, lengths: Sequence[int], cp_size: int, best: Way) -> None:
    """Save a picture: the longest documents as bars, coloured by the ranks that have their rows."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    usual = Way("all_gather", "dual_chunk")
    chosen = list(dict.fromkeys([best, usual]))
    longest = np.argsort(-np.array(lengths), kind="stable")[:MOST_DOCUMENTS]
    colours = [colormaps["tab20"](rank % 20) for rank in range(cp_size)]
    figure = Figure(figsize=(6 * len(chosen), 2 + 0.16 * len(longest)), layout="constrained")
    for axes, way in zip(figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0], chosen, strict=True):
        batch = PackedBatch.from_lengths(lengths, way.multiple(cp_size))
        owner, starts = owners(batch, cp_size, way), batch.cu_seqlens_padded
        for place, document in enumerate(longest.tolist()):
            ranks = owner[starts[document] : starts[document] + lengths[document]]
            begins = np.flatnonzero(np.diff(ranks, prepend=-2))
            sizes = np.diff(begins, append=len(ranks))
            axes.broken_barh(list(zip(begins.tolist(), sizes.tolist(), strict=True)), (place - 0.4, 0.8),
                             facecolors=[colours[rank] for rank in ranks[begins]])  # fmt: skip
        axes.set(title=f"{way}{' (recommended)' if way == best else ''}", xlabel="position in the document")
        axes.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    first.invert_yaxis()
    first.set_yticks([])
    first.set_ylabel("documents" if len(longest) == len(lengths) else f"the {len(longest)} longest documents")
    figure.legend(handles=[Patch(color=colour, label=f"rank {rank}") for rank, colour in enumerate(colours[:20])],
                  loc="outside right center", fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=150)
