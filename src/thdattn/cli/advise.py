"""Recommend how to spread a pack over ranks, with the predicted cost of each way: python -m thdattn advise."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import thdattn
from thdattn.arguments import as_count, as_window, in_units, shown
from thdattn.cli.options import add_documents, check_picture, document_lengths
from thdattn.costs.measure import measured
from thdattn.costs.model import H200, Cost, Rates, Shape, Way, compared, recommended
from thdattn.packing import PackedBatch, first_fit
from thdattn.sharding import Sharding

MOST_DOCUMENTS = 40  # in the picture
MOST_RANKS = 1024  # the costs have tables of all pairs of ranks
UNITS = {"forward": 1e12, "backward": 1e12, "link": 1e9, "between": 1e9, "memory": 1e12, "latency": 1e-6}
EXPLANATION = """
multiple   padded lengths must be multiples of this; PackedBatch.from_lengths(lengths, multiple=...) pads them
received   MiB that the rank that receives most gets from the others
work       visible query-key pairs of the busiest rank, over the mean of the ranks
memory     free memory that one layer needs beside q, k and v, on the rank that needs most; windows of peer memory come
           on top, and where this machine has no GPU also what the kernels take
attention  time of the attention kernels alone, forward and backward
On more than 32 ranks, work, memory and attention are those of 32 evenly spaced ranks.
Times are predicted from the rates above; they are not measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; `advise` reads them."""
    add_documents(parser)
    add = parser.add_argument
    add("--tokens", type=int, metavar="N",
        help="rows of a pack, over all ranks: take one pack of the documents in a random order (needed with --data; "
             "without it, --lengths is the pack)")
    add("--seed", type=int, default=0, metavar="S", help="seed of that order (default: 0)")
    add("--ranks", type=int, default=8, metavar="N", help="ranks that share the pack (default: 8)")
    add("--gpus-per-node", type=int, metavar="N", help="ranks on each machine (default: all on one)")
    add("--heads", type=int, default=32, metavar="N", help="query heads (default: 32)")
    add("--kv-heads", type=int, metavar="N", help="heads of keys and values (default: as many as query heads)")
    add("--head-dim", type=int, default=128, metavar="D", help="width of a head (default: 128)")
    add("--window", type=int, default=-1, metavar="N",
        help="keys that a query sees before its own position, and with --full after it too (default: all)")
    add("--full", action="store_true", help="full attention: a query also sees later positions")
    add("--measure", action="store_true",
        help="measure the rates of this machine; ranks that mpiexec starts also measure what goes between them")
    add("--compute", metavar="F,B", help="TFLOP/s of the attention kernels, forward and backward, as in 730,650")
    add("--link", type=float, metavar="GB/S", help="GB/s that a GPU receives from GPUs of its own machine")
    add("--between", type=float, metavar="GB/S", help="GB/s that a GPU receives from other machines")
    add("--latency", type=float, metavar="US", help="microseconds that a kernel or a collective takes at least")
    add("--plot", type=Path, metavar="FILE", help="draw which rank owns which rows into this PNG, PDF or SVG file")


def advise(arguments: argparse.Namespace) -> None:
    """Compare all ways to spread the pack, print what they cost, and recommend one.

    Raises:
        ValueError, OSError: arguments or files that cannot be used.
    """
    check_picture(arguments.plot)
    lengths, (cp_size, shape) = _lengths(arguments), _layer(arguments)
    rates, sources = passed_rates(arguments), dict.fromkeys(Rates._fields, "H200")
    known = H200
    if arguments.measure:
        with thdattn.comm.init("auto") as comm:
            known = measured(comm, lengths, shape)
            if comm.rank:
                return
        sources |= {name: "measured" for name in Rates._fields if getattr(known, name) != getattr(H200, name)}
    sources |= dict.fromkeys(rates, "passed")
    known = known._replace(**rates)
    costs, refusals = compared(lengths, cp_size, shape, known)
    _print_question(lengths, cp_size, shape, known, sources)
    _print_costs(costs, refusals, cp_size)
    best = recommended(costs).way
    print(f"\nrecommended: {best}\n\n{advice(best, cp_size, shape)}")
    if arguments.plot:
        _draw(arguments.plot, lengths, cp_size, best)
        print(f"\nwrote {arguments.plot}")


# ------------------------------------------------------------------------------------------------ arguments


def _lengths(arguments: argparse.Namespace) -> list[int]:
    """Return the lengths of a pack's documents: all that were passed, or with --tokens a first pack of them."""
    if arguments.tokens is None:
        if arguments.data is not None:
            raise ValueError("--tokens is missing, wanted the rows of a pack of --data; pass --tokens 65536, say")
        return [int(length) for length in document_lengths(arguments)]
    room = as_count("--tokens", arguments.tokens)
    seed = as_count("--seed", arguments.seed, "leave it out for 0", at_least=0)
    sizes = document_lengths(arguments)
    pieces = [piece for size in np.random.default_rng(seed).permutation(sizes).tolist()
              for piece in (*[room] * (size // room), size % room) if piece]
    return next(first_fit(pieces, int, room))


def _layer(arguments: argparse.Namespace) -> tuple[int, Shape]:
    """Return the number of ranks and the shape of the attention layer."""
    cp_size = as_count("--ranks", arguments.ranks, "pass the number of ranks that share a pack", MOST_RANKS, at_least=2)
    per_node = cp_size if arguments.gpus_per_node is None else as_count("--gpus-per-node", arguments.gpus_per_node)
    if cp_size % per_node and per_node < cp_size:
        raise ValueError(f"--gpus-per-node is {per_node}, wanted a divisor of --ranks, {cp_size}; pass the ranks of "
                         f"one machine")
    heads = as_count("--heads", arguments.heads)
    kv_heads = heads if arguments.kv_heads is None else as_count("--kv-heads", arguments.kv_heads)
    window = as_window((arguments.window, arguments.window if arguments.full else -1), not arguments.full)
    return cp_size, Shape(heads, kv_heads, as_count("--head-dim", arguments.head_dim), not arguments.full, window,
                          min(per_node, cp_size))


def passed_rates(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the fields of Rates that were passed, by name, in SI units."""
    values: dict[str, float] = {name: getattr(arguments, name) for name in ("link", "between", "latency")
                                if getattr(arguments, name) is not None}
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
    mask = ("causal" if shape.causal else "full") + (f", window={shape.window}" if shape.window[0] >= 0 else "")
    documents = f"{len(lengths):,} document{'s' * (len(lengths) > 1)}"
    print(f"pack    {documents}, {sum(lengths):,} tokens, the longest {max(lengths):,}")
    print(f"layer   {shape.num_heads} query heads, {shape.num_kv_heads} kv heads, head dim {shape.head_dim}; {mask}")
    print(f"ranks   {cp_size}, {'on one machine' if per_node == cp_size else f'{per_node} on each machine'}")
    names = {"forward": "TFLOP/s forward", "backward": "TFLOP/s backward", "link": "GB/s between GPUs",
             "between": "GB/s between machines", "memory": "TB/s of memory", "latency": "us of latency"}
    said = [f"{getattr(rates, name) / UNITS[name]:.4g} {text} ({sources[name]})" for name, text in names.items()]
    print(f"rates   {', '.join(said[:3])},\n        {', '.join(said[3:])}")


def _print_costs(costs: Sequence[Cost], refusals: dict[Way, str], cp_size: int) -> None:
    print(f"\n{'':<53}{'received, MiB':>15}{'':>17}{'milliseconds':>30}")
    print(f"{'cp_comm_type, sharding':<43}{'multiple':>8}{'fwd':>8}{'bwd':>9}{'work':>6}{'memory':>11}"
          f"{'fwd':>8}{'bwd':>8}{'both':>8}{'attention':>10}")
    for cost in costs:
        forward, backward = (x / 2**20 for x in cost.received)
        print(f"{cost.way!s:<43}{cost.way.multiple(cp_size):>8}{forward:>8,.1f}{backward:>9,.1f}{cost.work:>6.2f}"
              f"{in_units(cost.memory):>11}{1e3 * cost.seconds.forward:>8,.2f}{1e3 * cost.seconds.backward:>8,.2f}"
              f"{1e3 * cost.seconds.total:>8,.2f}{1e3 * cost.compute.total:>10,.2f}")
    print(EXPLANATION)
    if refusals:
        print("\nnot possible:")
    for why in dict.fromkeys(refusals.values()):
        print(f"  {'; '.join(str(way) for way, reason in refusals.items() if reason == why)}\n"
              f"{textwrap.fill(why, 118, initial_indent=6 * ' ', subsequent_indent=6 * ' ')}")


def advice(way: Way, cp_size: int, shape: Shape) -> str:
    """Return the lines of Python that take this way, for a `comm` of cp_size ranks and the `lengths` of a pack."""
    multiple = way.multiple(cp_size)
    padded = f", multiple={multiple}" if multiple > 1 else ""
    comm = "comm"
    if way.inner > 1:
        comm = f"(comm.split(comm.rank // {way.inner}), comm.split(comm.rank % {way.inner}))"
    mask = "" if shape.causal else ", causal=False"
    if shape.window[0] >= 0:
        mask += f", window={shape.window}"
    return (f"    batch = thdattn.PackedBatch.from_lengths(lengths{padded})\n"
            f"    attn = thdattn.CPAttention({comm}, {shape.num_heads}, {shape.head_dim}, {shape.num_kv_heads}{mask}, "
            f'cp_comm_type="{way.cp_comm_type}")\n    plan = attn.plan(batch, sharding="{way.sharding}")')


# ------------------------------------------------------------------------------------------------ picture


def owners(batch: PackedBatch, cp_size: int, way: Way) -> NDArray[np.int64]:
    """Return (total_rows,) int64, the rank that owns each row; -1: no rank."""
    sharding = Sharding(batch, cp_size, way.sharding, way.inner)
    found = np.full(batch.total_rows + 1, -1)
    for rank in range(cp_size):
        found[sharding.rows(rank)] = rank
    return found[:-1]


def _draw(path: Path, lengths: Sequence[int], cp_size: int, best: Way) -> None:
    """Save a picture of the longest documents as bars, coloured by the ranks that own their rows."""
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
                             facecolors=[colours[rank] for rank in ranks[begins]])
        axes.set(title=f"{way}{' (recommended)' if way == best else ''}", xlabel="position in the document")
        axes.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    first.invert_yaxis()
    first.set_yticks([])
    first.set_ylabel("documents" if len(longest) == len(lengths) else f"the {len(longest)} longest documents")
    figure.legend(handles=[Patch(color=colour, label=f"rank {rank}") for rank, colour in enumerate(colours[:20])],
                  loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=150)
