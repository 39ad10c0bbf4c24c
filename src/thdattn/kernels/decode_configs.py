"""Tile sizes of the decode kernels, as kernels/configs.py has those of the others, and the names of their helpers."""

from __future__ import annotations

from dataclasses import dataclass

from thdattn.kernels.configs import PAD
from thdattn.kernels.instances import ELEMENT_TYPES, PLAIN, Instance, Kind, instance
from thdattn.mamba.shape import CHUNK

CACHE_KERNELS = ("thd_cache_append", "thd_cache_fill")
MIXER_THREADS = 128  # of a thread block that has states
MIXER_CHANNELS = 512  # of x, B and C, of a thread block that has rows


@dataclass(frozen=True)
class Decode:
    """thd_attn_decode: each of `warps` loads 16 keys and values at a time, `stages` deep.

    per_multiprocessor: thread blocks that a long cache is split into, for each multiprocessor.
    """

    head_dim: int
    v_head_dim: int
    warps: int
    stages: int
    per_multiprocessor: int

    max_splits = 128  # kMaxParts of kernels/portable/decode.cu: parts of a range, which one thread block adds up
    heads = 16  # query heads of a thread block

    @property
    def step(self) -> int:
        """Keys that a thread block takes at a time."""
        return 16 * self.warps

    def thd_attn_decode(self, dtype: str, kind: Kind = PLAIN) -> Instance:
        """The kernel, for "float16" or "bfloat16"."""
        tiles = 2 * 16 * (self.head_dim + PAD + self.warps * self.stages * (self.head_dim + self.v_head_dim + 2 * PAD))
        shares = 4 * 16 * self.warps * (self.v_head_dim + PAD) + 8 * self.heads * self.max_splits
        return instance("thd_attn_decode", dtype, *kind, self.head_dim, self.v_head_dim, self.warps, self.stages,
                        shared_bytes=max(tiles, shares))

    def splits(self, multiprocessors: int, blocks: int, longest_range: int) -> int:
        """Into how many parts a range of keys is split, so that so many blocks of one part each fill the GPU."""
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


@dataclass(frozen=True)
class MixerDecode:
    """The kernels of kernels/mamba/decode.cu for "float16" or "bfloat16" and a width of the states."""

    dtype: str
    state_dim: int

    rows = 16  # of a head's state, of a thread block of thd_mixer_decode
    fill_columns = 64  # kFillColumns: the same of thd_mixer_fill

    def thd_mixer_decode_conv(self, conv_width: int) -> Instance:
        """Before thd_mixer_decode."""
        return self._instance("thd_mixer_decode_conv", conv_width)

    @property
    def thd_mixer_decode(self) -> Instance:
        """One row more of every text."""
        return self._instance("thd_mixer_decode", self.state_dim, self.rows)

    @property
    def thd_mixer_decode_ungated(self) -> Instance:
        """The same for a norm, which gates."""
        return self._instance("thd_mixer_decode_ungated", self.state_dim, self.rows)

    @property
    def thd_mixer_fill_rows(self) -> Instance:
        """The last rows of sequences."""
        return self._instance("thd_mixer_fill_rows")

    @property
    def thd_mixer_fill(self) -> Instance:
        """The states behind sequences."""
        stage = 2 * CHUNK * (self.fill_columns + self.state_dim + 2 * PAD) + 4 * CHUNK
        return self._instance("thd_mixer_fill", self.state_dim, 2 * stage, shared_bytes=2 * stage)

    def _instance(self, name: str, *constants: int, shared_bytes: int = 0) -> Instance:
        return Instance(f"{name}<{', '.join(map(str, (ELEMENT_TYPES[self.dtype], *constants)))}>", shared_bytes)
