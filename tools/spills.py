"""Print registers, spills and shared memory of the attention kernels of a head dim: `python tools/spills.py 96`.

A head dim that is not in the table of kernels/configs.py gets the tile sizes of the nearest one that is. Every kernel
either compiles, or the line says why it must not be used: the row is refused, a static assertion fails, registers
spill, shared memory is too small, or wgmma waits. `--all` tries all multiples of 16 from 32 to 256. The tool needs
NVRTC, and no GPU.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from thdattn.jit import compiler
from thdattn.kernels import configs
from thdattn.kernels.configs import TILES, Dims, Forward, ForwardSm90, Tiles
from thdattn.kernels.instances import Instance, Kind, instance

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


def kernels_of(
    row: Tiles, arch: str, caps: bool = False, dtypes: Sequence[str] = ("float16", "bfloat16")
) -> list[Instance]:
    """Return the kernels that a forward and backward launch on GPUs of an architecture, with capped logits or not."""
    forward = row.forward_sm90 if arch == "sm_90a" else row.on(arch).forward_for(SHARED_BYTES[arch])
    backwards = _hopper_backwards if arch == "sm_90a" else _portable_backwards
    return list(dict.fromkeys(
        kernel for dtype in dtypes
        for kernel in (*_forwards(forward, row.dims, dtype, caps), *backwards(row.on(arch), arch, dtype, caps),
                       instance("thd_attn_delta", dtype, row.v_head_dim),
                       instance("thd_attn_sinks_grad", dtype, row.v_head_dim))))


def _forwards(tiles: Forward | ForwardSm90, dims: Dims, dtype: str, caps: bool) -> Iterator[Instance]:
    for trees in (False, True):
        for sinks in (False, True):
            yield tiles.kernel(dims, dtype, dtype, Kind(caps, sinks), trees=trees)
        yield tiles.kernel(dims, dtype, "float32", Kind(caps, sinks=False), trees=trees)
    if tiles.split_kv and not caps:
        yield instance("thd_attn_split_kv", tiles.tile_m, tiles.tile_n)
        for sinks in (False, True):
            yield tiles.kernel(dims, dtype, dtype, Kind(caps, sinks), split_kv=True)


def _portable_backwards(row: Tiles, arch: str, dtype: str, caps: bool) -> Iterator[Instance]:
    tiles = row.backward_for(SHARED_BYTES[arch])
    for result in (dtype, "float32"):
        for flag in (False, True):
            yield tiles.kernel(row.dims, dtype, result, flag, caps)
            yield row.backward_dq.kernel(row.dims, dtype, result, caps, trees=flag)
        yield instance("thd_attn_round_dq", result)


def _hopper_backwards(row: Tiles, arch: str, dtype: str, caps: bool) -> Iterator[Instance]:
    tiles = row.backward_sm90
    yield instance("thd_attn_count_partials_sm90", tiles.tile_n // 64, tiles.tile_m)
    for grads in ((dtype, dtype), (dtype, "float32"), ("float32", "float32")):  # of dq, and of dk and dv
        for deterministic, trees in ((False, False), (True, False), (True, True)):
            yield tiles.kernel(row.dims, dtype, *grads, deterministic, caps, trees)
    if tiles.dq is not None:
        for result in (dtype, "float32"):
            for trees in (False, True):
                yield tiles.dq.kernel(row.dims, dtype, result, caps, trees)
            yield instance("thd_attn_round_dq_sm90", result, row.head_dim)


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
        kernels = kernels_of(row, arch)
        kernels += [row.decode.kernel(row.dims, dtype) for dtype in ("float16", "bfloat16")]
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
