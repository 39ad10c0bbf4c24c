"""What packed_documents.py prints and draws; nothing here is needed to use thdattn."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import thdattn

BAR_WIDTH = 24


@dataclass
class Verdicts:
    """errors: per result (ok, largest error, budget), on rank 0 only; not_zero: elements of padding that are not 0."""

    documents: int
    tokens: int
    errors: dict[str, tuple[bool, float, float]]
    not_zero: int

    @property
    def passed(self) -> bool:
        return self.not_zero == 0 and all(ok for ok, _, _ in self.errors.values())


class Progress:
    """A line on stderr that says what the program is doing, once it has been doing so for two seconds."""

    def __init__(self, shown: bool) -> None:
        self.step = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True) if shown else None

    def __enter__(self) -> Progress:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()

    def _show(self) -> None:
        began, shown, in_place = time.perf_counter(), "", sys.stderr.isatty()
        while not self._over.wait(0.2):
            seconds = time.perf_counter() - began
            if seconds > 2 and (in_place or self.step != shown):
                shown = self.step
                line = f"{seconds:4.0f} s  {shown} ..."
                print(f"\r\033[K{line}" if in_place else line, end="" if in_place else "\n", file=sys.stderr, flush=True)
        if in_place and shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_pack(batch: thdattn.PackedBatch) -> None:
    lengths = batch.lengths
    padding = batch.total_rows - batch.total_tokens
    print("The pack")
    print(f"  {batch.num_seqs} source files of Python {sys.version.split()[0]}, {batch.total_tokens:,} tokens (bytes)")
    print(f"  length   P50 {np.median(lengths):,.0f}   P90 {np.percentile(lengths, 90):,.0f}   max {lengths.max():,}")
    print(f"  padding  {padding} of {batch.total_rows:,} rows ({100 * padding / batch.total_rows:.1f} %), "
          f"filled with NaN on purpose: no result may notice")


def print_work(comm: thdattn.comm.Comm, sharding: thdattn.Sharding, work: np.ndarray) -> None:
    """work: (cp_size, 2), rows and visible pairs of every rank."""
    where = "simulated in this process" if comm.name == "local" else f"processes, backend {comm.name!r}"
    print(f"\nThe work of {comm.size} ranks ({where}), sharding {sharding.strategy!r}")
    print("  rank      rows   query-key pairs    share")
    pairs = work[:, 1]
    for rank, (rows, seen) in enumerate(work.tolist()):
        bar = "█" * round(BAR_WIDTH * seen / max(1, pairs.max()))
        print(f"  {rank:>4} {rows:>9,} {seen:>17,} {100 * seen / max(1, pairs.sum()):>6.1f} %  {bar}")


def print_engine(attn: thdattn.CPAttention, why: str) -> None:
    mask = "causal" if attn.causal else "full"
    window = "" if max(attn.window) < 1 else f", window {attn.window}"
    print("\nThe attention")
    print(f"  {attn.num_heads} query heads on {attn.num_kv_heads} kv heads, head dim {attn.head_dim}, {attn.dtype}, "
          f"{mask} mask{window}")
    print(textwrap.fill(f"engine {attn.engine}: {why}", 88, initial_indent="  ", subsequent_indent="    "))


def print_times(
    attn: thdattn.CPAttention, pairs: int, forward: tuple[float, float], backward: tuple[float, float]
) -> None:
    print("\nTime of all ranks together      first call     later calls (median)")
    for name, products, (first, later) in (("forward", 2, forward), ("backward", 5, backward)):
        speed = ""
        if attn.engine == "cuda":
            gpus = attn.comm.size if attn.comm.name == "nccl" else 1
            flops = 2 * products * pairs * attn.num_heads * attn.head_dim
            speed = f"   {flops / later / gpus / 1e12:.0f} TFLOP/s per GPU"
        print(f"  {name:<24} {_seconds(first):>15} {_seconds(later):>15}{speed}")


def print_verdicts(verdicts: Verdicts) -> None:
    print(f"\nAgainst float64, {verdicts.documents} random documents with {verdicts.tokens:,} tokens")
    print("             largest error          budget")
    for name, (ok, error, budget) in verdicts.errors.items():
        print(f"  {name:<10} {error:>13.1e} {budget:>15.1e}   {_word(ok)}")
    padding = "exactly 0" if verdicts.not_zero == 0 else f"{verdicts.not_zero} not 0"
    print(f"  {'padding':<10} {padding:>13} {'exactly 0':>15}   {_word(verdicts.not_zero == 0)}")
    print("  (budget: twice the error of plain attention in the same dtype)")


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _word(ok: bool) -> str:
    return "PASS" if ok else "FAIL"
