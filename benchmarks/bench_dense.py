"""Times packed attention (THD) beside a dense layout of the same tokens: a batch of equal lengths without offsets.

    python benchmarks/bench_dense.py

The dense layout is what a model without packing has, by the best kernels that can be imported: PyTorch's
scaled_dot_product_attention on cuDNN and on FlashAttention-2, and flash-attn-4. It is timed as by bench_attention.py.
Rows go to benchmarks/results/dense_GPU.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cupy
import record
import tables
from bench_attention import Measured, asked, race, reported, rows_of
from peers import FlashAttention4, Ours, Peer, TorchCudnn, draw_inputs, release_memory
from workloads import Case

KEY = ("gpu", "case", "peer", "direction", "timing")
TOKENS, SEGMENTS = (8_192, 32_768), (1, 4, 8)
CASES = [Case(f"{number}x{tokens // number}", (tokens // number,) * number, 32, 8)
         for tokens in TOKENS for number in SEGMENTS]  # fmt: skip


class TorchFlash(TorchCudnn):
    """scaled_dot_product_attention on FlashAttention-2, called past the choice of a kernel, which is cuDNN's here."""

    @classmethod
    def version(cls) -> str:
        import torch

        return str(torch.__version__)

    def call(self, q: Any, k: Any, v: Any) -> Any:
        return self.torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.case.causal)[0]


class DenseFlash4(FlashAttention4):
    """flash-attn-4 on a batch of equal lengths, (batch, length, heads, width)."""

    def __init__(self, case: Case, inputs: Any) -> None:
        from flash_attn.cute.interface import flash_attn_func

        super().__init__(case, inputs)
        self.attention = flash_attn_func

    def laid_out(self, x: Any) -> Any:
        return x.view(len(self.case.lengths), self.case.lengths[0], *x.shape[1:])

    def packed(self, x: Any) -> Any:
        return x.flatten(0, 1)

    def call(self, q: Any, k: Any, v: Any) -> Any:
        out, *_ = self.attention(q, k, v, causal=self.case.causal)
        return out


PEERS: dict[str, type[Peer]] = {"ours": Ours, "cudnn": TorchCudnn, "flash": TorchFlash, "fa4": DenseFlash4}


def main() -> int:
    args = parse_arguments()
    versions = {}
    for name, peer in PEERS.items():
        with reported(f"{name} left out"):
            versions[name] = peer.version()
    about = record.provenance()
    path = args.out or record.results_file("dense", about["gpu"])
    rows: list[record.Row] = []
    with cupy.cuda.Stream(non_blocking=True):  # the default stream cannot be captured
        for case in CASES:
            rows += (about | row for row in bench(case, versions, args.repeats))
            release_memory()
            record.save(path, rows, KEY)
    print("\n\n".join([*tables.dense(rows), f"wrote {path}; benchmarks/pages.py writes the pages"]))
    return 0


def bench(case: Case, versions: Mapping[str, str], rounds: int) -> Sequence[record.Row]:
    """Both directions of one case; what could not be measured is blank."""
    inputs = draw_inputs(case)
    peers: dict[str, Peer] = {}
    for name in versions:
        with reported(f"{case.name} {name}"):
            peers[name] = PEERS[name](case, inputs)
    measured: Measured = {}
    for direction in record.DIRECTIONS:
        measured |= race(case.name, peers, direction, rounds, getattr(case.flops, direction))
    keys = [key for key in asked(list(versions), record.DIRECTIONS) if key[2] != record.ERRORS]
    return [*rows_of(case, versions, keys, measured)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="turns of everybody, 3 by default")
    parser.add_argument("--out", type=Path, help="CSV file to add to; benchmarks/results/dense_GPU.csv by default")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}, wanted >= 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
