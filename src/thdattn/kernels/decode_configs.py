"""Tile sizes of the decode kernel per head dim, and the names of the KV cache's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from thdattn.kernels.configs import PAD
from thdattn.kernels.instances import PLAIN, Instance, Kind, instance

CACHE_KERNELS = ("thd_cache_append", "thd_cache_fill")


@dataclass(frozen=True)
class Decode:
    """Tile sizes of thd_attn_decode: each of `warps` loads 16 keys and values at a time, `stages` deep.

    per_multiprocessor: thread blocks per multiprocessor into which a long cache is split.
    """

    head_dim: int
    v_head_dim: int
    warps: int
    stages: int
    per_multiprocessor: int

    max_splits = 128  # kMaxSplits of kernels/portable/decode.cu: KV splits of a range, which one thread block merges
    heads = 16  # query heads of a thread block

    @property
    def step(self) -> int:
        """Keys that a thread block processes at a time."""
        return 16 * self.warps

    def thd_attn_decode(self, dtype: str, kind: Kind = PLAIN) -> Instance:
        """Return the decode kernel for "float16" or "bfloat16"."""
        tiles = 2 * 16 * (self.head_dim + PAD + self.warps * self.stages * (self.head_dim + self.v_head_dim + 2 * PAD))
        partials = 4 * 16 * self.warps * (self.v_head_dim + PAD) + 8 * self.heads * self.max_splits
        return instance("thd_attn_decode", dtype, *kind, self.head_dim, self.v_head_dim, self.warps, self.stages,
                        shared_bytes=max(tiles, partials))

    def splits(self, multiprocessors: int, blocks: int, longest_range: int) -> int:
        """Return the number of KV splits with which `blocks` thread blocks per split occupy the GPU."""
        wanted = self.per_multiprocessor * multiprocessors // blocks
        return max(1, min(wanted, -(-longest_range // self.step), self.max_splits))


DECODE = {
    (d.head_dim, d.v_head_dim): d
    for d in (
        Decode(64, 64, warps=4, stages=3, per_multiprocessor=4),
        Decode(96, 96, warps=4, stages=2, per_multiprocessor=4),
        Decode(128, 128, warps=4, stages=2, per_multiprocessor=3),
        Decode(192, 128, warps=4, stages=2, per_multiprocessor=2),
        Decode(192, 192, warps=2, stages=3, per_multiprocessor=2),
        Decode(256, 256, warps=2, stages=2, per_multiprocessor=3),
    )
}
