"""Output and picture of packed_documents.py; nothing here is needed to use thdattn."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import thdattn
from thdattn.oracle import Verdict

BAR_WIDTH = 24

# The colours of the picture stay apart for colour-blind readers: Paul Tol's "bright" and "light" schemes.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99")
PADDING = "#bbbbbb"
MOST_PIXELS = 1200
FEW_ROWS = 90  # of the enlarged part, at least


@dataclass
class Verdicts:
    """Verdicts on all results.

    errors: of each result, on rank 0 alone. not_zero: how many numbers of the padding are not 0.
    """

    documents: int
    tokens: int
    errors: dict[str, Verdict]
    not_zero: int

    @property
    def passed(self) -> bool:
        return self.not_zero == 0 and all(error.good for error in self.errors.values())


def print_step(comm: thdattn.comm.Comm, step: str) -> None:
    """Say on stderr of rank 0 what follows, because it may take seconds."""
    if comm.rank == 0:
        print(f"{step} ...", file=sys.stderr, flush=True)


def print_pack(batch: thdattn.PackedBatch) -> None:
    lengths = batch.lengths
    padding = batch.total_rows - batch.total_tokens
    print("The pack")
    print(f"  {batch.num_seqs} source files of Python {sys.version.split()[0]}, {batch.total_tokens:,} tokens (bytes)")
    print(f"  length   P50 {np.median(lengths):,.0f}   P90 {np.percentile(lengths, 90):,.0f}   max {lengths.max():,}")
    print(f"  padding  {padding} of {batch.total_rows:,} rows ({100 * padding / batch.total_rows:.1f} %), "
          f"filled with NaN on purpose: no result may notice")


def print_work(comm: thdattn.comm.Comm, sharding: thdattn.Sharding, work: np.ndarray) -> None:
    """Print the rows and visible pairs of every rank, work (cp_size, 2)."""
    where = "simulated in this process" if comm.name == "local" else f"processes, backend {comm.name!r}"
    print(f"\nThe work of {comm.size} ranks ({where}), sharding {sharding.strategy!r}")
    print("  rank      rows   query-key pairs    share")
    pairs = work[:, 1]
    for rank, (rows, seen) in enumerate(work.tolist()):
        bar = "█" * round(BAR_WIDTH * seen / max(1, pairs.max()))
        print(f"  {rank:>4} {rows:>9,} {seen:>17,} {100 * seen / max(1, pairs.sum()):>6.1f} %  {bar}")


def print_engine(attn: thdattn.CPAttention, why: str) -> None:
    print("\nThe attention")
    print(f"  {attn.num_heads} query heads on {attn.num_kv_heads} kv heads, head dim {attn.head_dim}, {attn.dtype}, "
          f"{_mask(attn)}")
    print(textwrap.fill(f"engine {attn.engine}: {why}", 88, initial_indent="  ", subsequent_indent="    "))


def print_times(
    attn: thdattn.CPAttention, flops: thdattn.Flops, forward: tuple[float, float], backward: tuple[float, float]
) -> None:
    print("\nTime of all ranks together      first call     later calls (median)")
    for name, work, (first, later) in (("forward", flops.forward, forward), ("backward", flops.backward, backward)):
        speed = ""
        if attn.engine == "cuda":
            gpus = attn.comm.size if attn.comm.name == "nccl" else 1
            speed = f"   {work / later / gpus / 1e12:.0f} TFLOP/s per GPU"
        print(f"  {name:<24} {_seconds(first):>15} {_seconds(later):>15}{speed}")


def print_verdicts(verdicts: Verdicts) -> None:
    print(f"\nAgainst float64, {verdicts.documents} random documents with {verdicts.tokens:,} tokens")
    print("             RMS error      budget   largest error      budget")
    for name, error in verdicts.errors.items():
        print(f"  {name:<9} {error.rms:>11.2e} {error.rms_budget:>11.2e} {error.largest:>15.2e} "
              f"{error.largest_budget:>11.2e}   {_word(error.good)}")
    padding = "all 0" if verdicts.not_zero == 0 else f"{verdicts.not_zero:,} not 0"
    print(f"  {'padding':<9} {'':>11} {'':>11} {padding:>15} {'all 0':>11}   {_word(verdicts.not_zero == 0)}")
    print("  (budgets: the RMS error of attention that rounds each product's operands and each result once,")
    print("   and twice the largest error of plain attention in the same dtype; see thdattn/oracle.py)")


def draw(path: Path, sharding: thdattn.Sharding, attn: thdattn.CPAttention) -> None:
    """Draw the mask, whole and enlarged, with the query rows in the colours of the ranks that own them."""
    from matplotlib.figure import Figure

    batch = sharding.batch
    owner = np.full(batch.total_rows, -1)
    for rank in range(sharding.cp_size):
        rows = sharding.rows(rank)
        owner[rows[rows >= 0]] = rank
    alone = thdattn.CPAttention(
        thdattn.comm.init("single"), attn.num_heads, attn.head_dim, causal=attn.causal, window=attn.window,
        engine="reference",
    )
    plan = alone.plan(batch, "contiguous")  # of one rank: all rows, in sequence order

    figure = Figure(figsize=(11, 5.9), layout="constrained")
    whole, part = figure.subplots(1, 2)
    _draw_mask(whole, owner, plan, 0, batch.total_rows)
    whole.set_title(f"Who sees what: all {batch.total_rows:,} rows", fontsize=11)
    begin, end = _few_rows(batch)
    _draw_mask(part, owner, plan, begin, end)
    part.set_title(f"Enlarged: rows {begin:,} to {end:,}", fontsize=11)
    title = f"{batch.num_seqs} documents on {sharding.cp_size} ranks, sharding {sharding.strategy!r}, {_mask(attn)}"
    figure.suptitle(title, fontsize=14)
    handles = [_patch(_colour(rank), f"rank {rank}") for rank in range(sharding.cp_size)]
    figure.legend(handles=[*handles, _patch(PADDING, "padding")], loc="outside lower center", ncols=10, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_mask(axes: Any, owner: np.ndarray, plan: thdattn.Plan, begin: int, end: int) -> None:
    """Draw query rows down and key rows across. A pixel is coloured if the row at its middle sees the key there."""
    pixels = min(MOST_PIXELS, end - begin)
    rows = begin + ((np.arange(pixels) + 0.5) * (end - begin) / pixels).astype(int)
    seen = (plan.key_ranges[rows, :1] <= rows) & (rows < plan.key_ranges[rows, 1:])
    colours = np.array([_rgb(_colour(rank)) for rank in owner[rows]])
    image = np.where(seen[:, :, None], colours[:, None, :], 1.0)
    if pixels == end - begin:  # else a row of padding would be drawn here and there, by chance
        padding = ~plan.valid[rows]
        image[padding] = image[:, padding] = _rgb(PADDING)
    axes.imshow(image, extent=(begin, end, end, begin), interpolation="nearest")
    axes.set_anchor("N")
    axes.set_xlabel("key row of the pack")
    axes.set_ylabel("query row of the pack")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _few_rows(batch: thdattn.PackedBatch) -> tuple[int, int]:
    """Return the bounds of the shortest stretch of whole documents with FEW_ROWS or more: single rows can be seen."""
    starts = batch.cu_seqlens_padded.tolist()
    stretches = [(end - start, start, end) for start in starts for end in starts if end - start >= FEW_ROWS]
    _, begin, end = min(stretches, default=(0, 0, batch.total_rows))
    return begin, end


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _mask(attn: thdattn.CPAttention) -> str:
    left, right = attn.window
    sides = [f"{left:,} back"] * (left >= 0) + [f"{right:,} ahead"] * (right > 0)
    return ("causal mask" if attn.causal else "full mask") + (f", window {' and '.join(sides)}" if sides else "")


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _word(ok: bool) -> str:
    return "PASS" if ok else "FAIL"
