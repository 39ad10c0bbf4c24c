"""Workloads of Mamba-2 mixers: packs, sizes, inputs as a model makes them, and the bytes that must be moved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike
from peers import normal
from workloads import CASES as PACKS
from workloads import Pack, filled_lognormal_pack

import thdattn
from thdattn.mamba.shape import GatedNorm, Mamba2Weights, MixerShape

BYTES_PER_S = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}  # of the GPU's memory, by its specification
NORM_EPS = 1e-5  # of mamba_ssm's layers and Megatron-Core's
SMALL_ROWS, DRAWS = 2048, 8  # for errors: rows, and draws of inputs


@dataclass(frozen=True)
class MixerCase(Pack):
    """Pack and mixer, with a convolution of four rows.

    norm: norm of Mamba2Mixer, in as many groups as B and C have.
    """

    heads: int = 64
    head_dim: int = 64
    state_dim: int = 128
    groups: int = 1
    conv_width: int = 4
    dtype: DTypeLike = ml_dtypes.bfloat16
    norm: str | None = None

    @property
    def shape(self) -> MixerShape:
        norm = GatedNorm(self.norm, self.groups, NORM_EPS) if self.norm else None
        return MixerShape(
            self.heads, self.head_dim, self.state_dim, self.groups, self.conv_width, np.dtype(self.dtype), norm
        )

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns of a record that describe the case."""
        return {
            "case": self.name, "heads": str(self.heads), "head_dim": str(self.head_dim),
            "state_dim": str(self.state_dim), "groups": str(self.groups), "dtype": np.dtype(self.dtype).name,
            "total_tokens": str(self.total_tokens), "num_seqs": str(len(self.lengths)),
        }

    def mixer(self, comm: thdattn.comm.Comm, engine: str) -> thdattn.Mamba2Mixer:
        return thdattn.Mamba2Mixer(
            comm, self.heads, self.head_dim, self.state_dim, self.groups, self.conv_width, self.dtype, engine,
            norm=self.norm, norm_eps=NORM_EPS,
        )

    def least_bytes(self, direction: str) -> int:
        """Count the bytes of inputs and outputs, with or without the convolution.

        Forward: read zxbcdt, write out. Backward: read zxbcdt, dout and the activations before the gate, write dzxbcdt.
        """
        numbers = self.shape.columns + self.shape.d_inner
        return self.total_tokens * np.dtype(self.dtype).itemsize * numbers * {"forward": 1, "backward": 2}[direction]

    def small(self) -> MixerCase:
        """Return the first rows of the case, of which float64 computes all pairs in milliseconds."""
        begins = np.cumsum([0, *self.lengths])
        lengths = tuple(min(length, SMALL_ROWS - int(begin))
                        for begin, length in zip(begins, self.lengths, strict=False) if begin < SMALL_ROWS)
        return replace(self, lengths=lengths)


class MixerInputs(NamedTuple):
    """Inputs of a mixer, and of its scan alone, which takes x, B and C from `channels` instead of a convolution.

    zxbcdt: (rows, columns), standard normal. dout: (rows, d_inner), standard normal.
    weights: weights of Mamba2Mixer.
    channels: (rows, channels), silu of standard normal numbers.
    """

    zxbcdt: Any
    weights: Mamba2Weights
    dout: Any
    channels: Any


def draw(case: MixerCase, xp: Any, num_rows: int | None = None, seed: int = 0) -> MixerInputs:
    """Draw the inputs of a case, or of `num_rows` rows of it, the same in every run with a seed.

    Rates and steps are those that Mamba-2 starts with: A in 1..16, dt around 0.001..0.1.
    """
    rows = case.total_tokens if num_rows is None else num_rows
    shape = case.shape
    rng = np.random.default_rng((3, seed))
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), case.heads))
    weights = Mamba2Weights(
        conv_weight=rng.uniform(-1, 1, (shape.channels, case.conv_width)) / case.conv_width**0.5,
        conv_bias=rng.uniform(-1, 1, shape.channels) / case.conv_width**0.5,
        A_log=np.log(rng.uniform(1, 16, case.heads)),
        D=rng.uniform(0.5, 1.5, case.heads),
        dt_bias=dt + np.log(-np.expm1(-dt)),
    )
    if case.norm:
        weights = weights._replace(norm_weight=rng.uniform(0.5, 1.5, shape.d_inner))
    on_device = Mamba2Weights(*(xp.asarray(x.astype(shape.sum_dtype)) for x in weights))
    zxbcdt, dout = (normal((rows, width), 3 * seed + i, shape.dtype, xp)
                    for i, width in enumerate((shape.columns, shape.d_inner)))
    channels = normal((rows, shape.channels), 3 * seed + 2, np.float32, xp)
    return MixerInputs(zxbcdt, on_device, dout, (channels / (1 + xp.exp(-channels))).astype(shape.dtype))


def _cases() -> tuple[MixerCase, ...]:
    short = MixerCase("1x16384", (16_384,))
    long = MixerCase("1x131072", (131_072,))
    return (
        short,
        replace(short, name="1x16384-g8", groups=8),
        replace(short, name="1x16384-norm", norm="after_gate"),
        replace(short, name="1x16384-g8-norm", groups=8, norm="after_gate"),
        MixerCase("lognormal16k", filled_lognormal_pack(16_384)),
        MixerCase("64x256", PACKS["64x256"].lengths),
        MixerCase("lognormal64k", filled_lognormal_pack(65_536)),
        long,
        MixerCase("lognormal128k", filled_lognormal_pack(131_072)),
        MixerCase("512x256", (256,) * 512),
    )


CASES = {case.name: case for case in _cases()}
