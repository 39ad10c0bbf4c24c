"""Count the documents per pack, to size the packs of a CUDA graph: python -m thdattn pack-stats."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdattn.arguments import as_count, shown
from thdattn.cli import pack_capacities
from thdattn.cli.options import add_documents, check_picture, document_lengths
from thdattn.cli.pack_capacities import PERCENTILES
from thdattn.packing import first_fit

Counts = NDArray[np.int64]

ENOUGH_PACKS = 1_000  # documents are packed in new orders until there are so many packs,
ENOUGH_PIECES = 1_000_000  # or so many pieces are in them
MOST_BARS = 64
BLUE, GREY, RED = "#4c78a8", "#b0b0b0", "#d1495b"
SEARCHES = 6  # for the document of a row, in the kernels that make a plan (kernels.cu)
LAYER_BYTES = 4 * 16 * 128 * 2  # per row: q, k, v and out of an attention layer of 16 heads of 128, in 16 bits
EXPLANATION = """
maximum  document slots of a graph; a pack with more documents runs eagerly, and the others replay the graph
empty    slots without a document, on average over the packs that replay
lengths  bytes of cu_seqlens and cu_seqlens_padded on the GPU, copied there for every pack
search   steps of the binary search in which a plan finds the document of a row; attention does not search
cost     bytes that a plan's searches read, as a share of what the forward of one attention layer moves (16 heads of
         128, 16 bits). It is computed, not measured. One plan serves all layers, forward and backward."""


@dataclass(frozen=True)
class Candidate:
    """One maximum of documents per pack, and what it would mean.

    why: the percentiles that equal it, if any.
    empty: mean number of slots without a document in the packs that fit.
    rounds, steps: numbers of rounds and of steps with a pack that does not fit.
    """

    slots: int
    why: str
    replay: int
    empty: float
    rounds: int
    steps: int

    @property
    def is_power(self) -> bool:
        """Tell if `slots` is a power of two."""
        return self.slots & (self.slots - 1) == 0

    @property
    def lengths_bytes(self) -> int:
        """Bytes of both arrays of offsets, int32."""
        return 2 * 4 * (self.slots + 1)

    @property
    def search(self) -> int:
        """Steps of the binary search for a row's document."""
        return (self.slots - 1).bit_length()

    @property
    def cost(self) -> float:
        """Bytes that all searches of a row read, per byte that a layer of attention moves for it."""
        return 4 * SEARCHES * self.search / LAYER_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; `pack_stats` reads them."""
    add_documents(parser)
    add = parser.add_argument
    add("--tokens", type=int, required=True, metavar="N", help="rows of a pack, over all ranks of a group")
    add("--multiple", type=int, default=16, metavar="M", help="pad documents to a multiple of this (default: 16)")
    add("--longest", type=int, metavar="N", help="split longer documents (default: those longer than a pack)")
    add("--accumulate", type=int, default=1, metavar="N", help="packs per group and training step (default: 1)")
    add("--groups", type=int, default=1, metavar="N", help="groups of ranks, each with its own packs (default: 1)")
    add("--steps", default="all", metavar="N", help="number of training steps (default: all steps of 1,000 packs)")
    add("--ranks", type=int, metavar="N", help="also size the exchanges of balanced rows over N ranks of a group")
    add("--plot", type=Path, metavar="FILE", help="draw the documents per pack into this PNG, PDF or SVG file")
    add("--seed", type=int, default=0, metavar="S", help="seed of the order of the documents (default: 0)")


def pack_stats(arguments: argparse.Namespace) -> None:
    """Pack the documents as training does, and print what each maximum of documents per pack would mean.

    Raises:
        ValueError, OSError: arguments or files that cannot be used.
    """
    tokens, multiple = as_count("--tokens", arguments.tokens), as_count("--multiple", arguments.multiple)
    room = tokens // multiple * multiple
    if not room:
        raise ValueError(f"--tokens is {tokens}, wanted at least --multiple, {multiple}; pass --tokens {multiple}")
    longest = room if arguments.longest is None else min(room, as_count("--longest", arguments.longest))
    seed = as_count("--seed", arguments.seed, "leave it out for 0", at_least=0)
    check_picture(arguments.plot)
    groups, accumulate = as_count("--groups", arguments.groups), as_count("--accumulate", arguments.accumulate)
    num_packs = None if arguments.steps == "all" else groups * accumulate * _steps(arguments.steps)
    lengths = document_lengths(arguments)
    counts, passes = documents_per_pack(lengths, room, multiple, longest, seed, num_packs)
    chosen = candidates(counts, groups, accumulate)
    _print(lengths, longest, counts, passes, tokens, chosen)
    _print_fallbacks(chosen, len(counts) // (groups * accumulate), groups, accumulate)
    print(f"\nrecommended: --cuda-graph-max-packed-seqs {chosen[-1].slots}, the smallest power of two that every "
          f"pack above fits")
    if arguments.ranks is not None:
        ranks = as_count("--ranks", arguments.ranks, "pass the ranks that share a pack", at_least=2)
        order = np.random.default_rng([seed, 0]).permutation(rows_of_pieces(lengths, multiple, longest))
        packs = islice(first_fit(order.tolist(), int, room), pack_capacities.MOST_PACKS)
        needed = pack_capacities.needed_capacities(packs, room, ranks)
        pack_capacities.show(pack_capacities.candidates(needed), len(needed), ranks)
    if arguments.plot:
        _draw(arguments.plot, counts, chosen, tokens)
        print(f"wrote {arguments.plot}")


def documents_per_pack(
    lengths: NDArray[np.int64], room: int, multiple: int, longest: int, seed: int, num_packs: int | None = None
) -> tuple[Counts, int]:
    """Count the documents of every pack; each piece of a split document counts.

    Args:
        lengths: (num_documents,) int64 >= 1, tokens.
        room: rows of a pack, a multiple of `multiple`.
        multiple: every piece is padded to a multiple of this.
        longest: tokens of the longest piece, at most room; longer documents are split.
        seed: seed of the documents' order, which differs from pass to pass.
        num_packs: number of packs; None: whole passes until there are ENOUGH_PACKS packs or ENOUGH_PIECES pieces.

    Returns:
        (num_packs,) int64, and the passes over the documents.
    """
    rows = rows_of_pieces(lengths, multiple, longest)
    counts: list[int] = []
    for epoch in count():
        order = np.random.default_rng([seed, epoch]).permutation(rows)
        counts += map(len, first_fit(order.tolist(), int, room))
        enough = len(counts) >= ENOUGH_PACKS or (epoch + 1) * len(rows) >= ENOUGH_PIECES
        if enough if num_packs is None else len(counts) >= num_packs:
            break
    return np.array(counts[:num_packs], np.int64), epoch + 1


def rows_of_pieces(lengths: NDArray[np.int64], multiple: int, longest: int) -> Counts:
    """Return the rows of every document, or of its pieces if it is split; see documents_per_pack."""
    rests = lengths % longest
    pieces = np.concatenate([np.full((lengths // longest).sum(), longest), rests[rests > 0]])
    rows: Counts = -(-pieces // multiple) * multiple
    return rows


def candidates(counts: Counts, groups: int = 1, accumulate: int = 1) -> list[Candidate]:
    """Return maxima to choose from: percentiles of the documents per pack, and powers of two, in ascending order.

    The last is the smallest power of two that every pack fits. It is the one to take: a slot costs next to nothing,
    and an eager pack costs a replay.

    Args:
        counts: (num_packs,) documents of every pack, in the order of training.
        groups: groups of ranks; each has one pack per round, and all fall back together.
        accumulate: rounds of a training step.

    Raises:
        ValueError: there are too few packs for a step.
    """
    size = groups * accumulate
    if len(counts) < size:
        raise ValueError(f"--groups times --accumulate is {size}, wanted at most {len(counts)}, the packs made; pass "
                         f"--steps 1, or more")
    largest = counts[: len(counts) // size * size].reshape(-1, accumulate, groups).max(axis=2)
    percentiles = _percentiles(counts)
    powers = [2**i for i in range((percentiles["max"] - 1).bit_length() + 1)]
    made = []
    for slots in sorted({*powers, *percentiles.values()}):
        fitting = counts[counts <= slots]
        if len(fitting):
            why = " ".join(name for name, documents in percentiles.items() if documents == slots)
            rounds, steps = int((largest > slots).sum()), int((largest.max(axis=1) > slots).sum())
            made.append(Candidate(slots, why, len(fitting), float((slots - fitting).mean()), rounds, steps))
    return made


def _steps(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--steps is {shown(text)}, wanted a number of at least 1, or all; leave it out for all")
    return int(text)


def _percentiles(numbers: NDArray[np.int64]) -> dict[str, int]:
    """Return P50, ..., max by name: the smallest number that so many percent do not exceed."""
    values = np.percentile(numbers, [*PERCENTILES.values()], method="inverted_cdf")
    return dict(zip(PERCENTILES, map(int, values), strict=True))


# ------------------------------------------------------------------------------------------------ text and picture


def _print(
    lengths: NDArray[np.int64], longest: int, counts: Counts, passes: int, tokens: int, chosen: list[Candidate]
) -> None:
    split = int((lengths > longest).sum())
    print(f"{len(lengths):,} documents, {lengths.sum():,} tokens"
          + (f"; {split:,} longer than {longest:,} are split, and each piece counts" if split else ""))
    passed = f"{passes:,} passes, each in another order" if passes > 1 else "one pass"
    print(f"{len(counts):,} packs of {tokens:,} rows, from {passed}")
    rows = {"tokens per document": lengths, "documents per pack": counts}
    names = list(_percentiles(counts))
    print(f"\n{'':<20}" + "".join(f"{name:>11}" for name in names))
    for label, numbers in rows.items():
        print(f"{label:<20}" + "".join(f"{number:>11,}" for number in _percentiles(numbers).values()))
    print(f"\n{'maximum':>9}  {'':<16}{'replay':>8}{'eager packs':>13}{'empty':>9}{'lengths':>12}{'search':>9}"
          f"{'cost':>9}")
    for candidate in chosen:
        print(f"{candidate.slots:>9,}  {candidate.why:<16}{_percent(candidate.replay, len(counts)):>8}"
              f"{len(counts) - candidate.replay:>13,}{candidate.empty:>9,.1f}{candidate.lengths_bytes:>10,} B"
              f"{candidate.search:>9}{100 * candidate.cost:>7.2f} %")
    print(EXPLANATION)


def _print_fallbacks(chosen: list[Candidate], num_steps: int, groups: int, accumulate: int) -> None:
    """Print how many rounds and steps of training run eagerly for every maximum."""
    num_rounds = num_steps * accumulate
    print(f"\n{num_steps:,} training steps of {accumulate:,} rounds; a round has a pack for each of {groups:,} groups."
          f"\nRounds (impl local) and steps (impl full_iteration) that run eagerly because a pack does not fit:\n")
    print(f"{'maximum':>9}{'rounds':>24}{'steps':>26}")
    for candidate in chosen:
        print(f"{candidate.slots:>9,}{candidate.rounds:>13,}{_percent(candidate.rounds, num_rounds):>11}"
              f"{candidate.steps:>15,}{_percent(candidate.steps, num_steps):>11}")


def _percent(part: int, whole: int) -> str:
    """Format a share in percent, rounded down, so that 100 % means all."""
    return f"{np.floor(1000 * part / whole) / 10:.1f} %"


def _draw(path: Path, counts: Counts, chosen: list[Candidate], tokens: int) -> None:
    """Save a histogram of documents per pack, and below it the share of packs that replay for every maximum."""
    from matplotlib.figure import Figure

    last = chosen[-1].slots
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1.2, 1))
    figure.suptitle(f"Documents per pack of {tokens:,} rows: {len(counts):,} packs", fontsize=13)
    width = -(-int(counts.max()) // MOST_BARS)
    top.hist(counts, np.arange(0, counts.max() + width, width) + 0.5, color=BLUE)
    top.set_ylabel("packs" if width == 1 else f"packs (bars {width} wide)")
    values, packs = np.unique(counts, return_counts=True)
    share = 100 * np.cumsum(packs) / len(counts)
    bottom.step([0, *values, last], [0, *share, 100], where="post", color=BLUE, linewidth=2)
    bottom.set(ylim=(0, 105), xlim=(0, last + max(0.6, 0.02 * last)), ylabel="packs that replay (%)",
               xlabel="documents per pack; slots of a CUDA graph (--cuda-graph-max-packed-seqs)")
    powers = [candidate.slots for candidate in chosen if candidate.is_power and 16 * candidate.slots >= last]
    percentiles = {candidate.slots: candidate.why for candidate in chosen if candidate.why}
    bottom.set_xticks(powers)
    for axes in (top, bottom):
        for slots in {*powers, *percentiles}:
            colour, style = RED if slots == last else GREY, "--" if slots in percentiles else "-"
            axes.axvline(slots, color=colour, linestyle=style, linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
    for slots, why in percentiles.items():
        where = top.get_xaxis_transform()
        top.text(slots, 1.02, f"{why} {slots}", rotation=90, ha="center", va="bottom", fontsize=8, transform=where)
    bottom.legend(handles=[
        bottom.axvline(np.nan, color=GREY, linestyle="--", linewidth=1, label="percentiles"),
        bottom.axvline(np.nan, color=GREY, linewidth=1, label="powers of two"),
        bottom.axvline(np.nan, color=RED, linewidth=1, label=f"recommended: {last}"),
    ], loc="lower right", bbox_to_anchor=(0.97, 0.02), framealpha=1, fontsize=9)
    figure.savefig(path, dpi=150)
