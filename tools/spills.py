"""Print registers, spills and shared memory of the attention kernels of a head dim: `python tools/spills.py 96`.

A head dim that is not in the table of kernels/configs.py gets the tile sizes of the nearest one that is. Every kernel
either compiles, or the line says why it must not be used: the row is refused, a static assertion fails, registers
spill, shared memory is too small, or wgmma waits. `--all` tries all multiples of 16 from 32 to 256. The tool needs
NVRTC, and no GPU.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from thdattn.jit import compiler
from thdattn.kernels import configs
from thdattn.kernels.configs import TILES, Tiles
from thdattn.kernels.instances import Instance

SHARED_BYTES = {"sm_80": 166912, "sm_90a": 232448, "sm_100": 232448, "sm_120": 101376}  # of a thread block


class Verdict(NamedTuple):
    """Whether a kernel may be used, and its resources or the reason why not."""

    usable: bool
    text: str


def candidate(head_dim: int, v_head_dim: int, arch: str) -> Tiles:
    """Return the row of the table for these head dims, or a copy of the nearest one, without what `arch` does not use.

    Raises:
        ValueError: the copy's tile sizes do not divide these head dims.
    """
    nearest = min(TILES, key=lambda dims: (abs(dims[0] - head_dim) + abs(dims[1] - v_head_dim), -dims[0], -dims[1]))
    row = TILES[nearest].on(arch)
    portable = () if arch == "sm_90a" else row.backward
    row = replace(row, head_dim=head_dim, v_head_dim=v_head_dim, backward=portable)
    missing = row.wgmma_columns.difference(configs.WGMMA_COLUMNS)
    if missing:
        configs.WGMMA_COLUMNS = sorted(missing.union(configs.WGMMA_COLUMNS))
        compiler.forget_files()
    return row


def judge(kernel: Instance, arch: str) -> Verdict:
    """Compile a kernel, and return its registers and shared memory, or why it must not be used."""
    try:
        _, lowered, log = compiler.compile_kernel(kernel.name, arch)
    except RuntimeError as error:
        return Verdict(False, next(line for line in str(error).splitlines() if "error" in line.partition(": ")[2]))
    (entry,) = [part for part in log.split("Compiling entry function")[1:] if part.lstrip().startswith(f"'{lowered}'")]
    found = {what: int(number) for number, what in re.findall(r"(\d+) (registers|bytes smem)", entry)}
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", entry)))
    shared = found.get("bytes smem", 0) + kernel.shared_bytes
    text = f"{found['registers']} registers, {spilled} bytes spilled, {shared} bytes of shared memory"
    if shared > SHARED_BYTES[arch]:
        return Verdict(False, f"{text}, of which {arch} has {SHARED_BYTES[arch]}")
    if "wgmma.mma_async instructions are serialized" in log:
        return Verdict(False, f"{text}, and waits after every wgmma")
    return Verdict(not spilled, text)


def judge_all(head_dim: int, v_head_dim: int, arch: str, only: str = "") -> Iterator[tuple[str, Verdict]]:
    """Yield (name, verdict) of the kernels of a head dim whose name contains `only`."""
    try:
        row = candidate(head_dim, v_head_dim, arch)
        kernels = row.hopper_kernels() if arch == "sm_90a" else row.portable_kernels(SHARED_BYTES[arch])
        kernels += [row.thd_attn_decode(dtype) for dtype in ("float16", "bfloat16")]
    except ValueError as error:
        yield f"head dims {head_dim}/{v_head_dim}", Verdict(False, str(error))
        return
    for kernel in kernels:
        if only in kernel.name:
            yield kernel.name, judge(kernel, arch)


def main() -> None:
    """Compile the kernels one after another, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head_dim", type=int, nargs="?")
    parser.add_argument("v_head_dim", type=int, nargs="?", help="head dim of v, if it differs")
    parser.add_argument("--all", action="store_true", help="all multiples of 16 from 32 to 256")
    parser.add_argument("--arch", choices=SHARED_BYTES, default="sm_90a")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    asked = parser.parse_args()
    if asked.all == bool(asked.head_dim):
        parser.error("give a head dim, or --all")
    for head_dim in range(32, 257, 16) if asked.all else [asked.head_dim]:
        for name, verdict in judge_all(head_dim, asked.v_head_dim or head_dim, asked.arch, asked.only):
            print(f"{'ok  ' if verdict.usable else 'NOT '} {name}: {verdict.text}", flush=True)


if __name__ == "__main__":
    main()
