"""Print what ptxas says of the attention kernels of a head dim: `python tools/spills.py --head-dim 96 --arch sm_90a`.

A row of tiles.TILES that is being tried is in the table, as any other. It needs NVRTC, and no GPU.
"""

from __future__ import annotations

import argparse
import re

from thdattn.jit import compiler
from thdattn.kernels.configs import TILES
from thdattn.kernels.instances import Instance

SHARED_BYTES = {"sm_80": 166912, "sm_90a": 232448, "sm_120": 101376}  # that a thread block may ask for


def needs(kernel: Instance, arch: str) -> str:
    """Return registers, bytes spilled and bytes of shared memory of a kernel, or why it does not compile."""
    try:
        _, lowered, log = compiler.compile_kernel(kernel.name, arch)
    except RuntimeError as error:
        return "\n".join(line for line in str(error).splitlines() if "error" in line)
    (entry,) = [part for part in log.split("Compiling entry function")[1:] if part.lstrip().startswith(f"'{lowered}'")]
    registers, static = (re.search(rf"(\d+) {what}", entry) for what in ("registers", "bytes smem"))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", entry)))
    return (f"{registers[1] if registers else '?'} registers, {spilled} bytes spilled, "
            f"{static[1] if static else 0} static and {kernel.shared_bytes} dynamic bytes of shared memory")


def main() -> None:
    """Compile the kernels one after another, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--v-head-dim", type=int, help="that of v, if it differs")
    parser.add_argument("--arch", choices=SHARED_BYTES, default="sm_90a")
    parser.add_argument("--only", default="", help="kernels whose name has this")
    asked = parser.parse_args()
    dims = asked.head_dim, asked.v_head_dim or asked.head_dim
    if dims not in TILES:
        parser.error(f"head dims {dims} are not in tiles.TILES, which has {[*TILES]}; add a row for them")
    row = TILES[dims]
    kernels = row.hopper_kernels() if asked.arch == "sm_90a" else row.portable_kernels(SHARED_BYTES[asked.arch])
    for kernel in kernels:
        if asked.only in kernel.name:
            print(f"{kernel.name}: {needs(kernel, asked.arch)}", flush=True)


if __name__ == "__main__":
    main()
