"""Mamba2Saved: the state that forward of a Mamba2Mixer saves for backward and for filling a decode cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thdattn.mamba.context_parallel import Kept
from thdattn.mamba.shape import Mamba2Weights, MixerShape
from thdattn.plan.plan import Plan


@dataclass(frozen=True, eq=False, repr=False)  # to compare or print arrays would wait for the GPU
class Mamba2Saved:
    """State that forward of a Mamba2Mixer saves for its backward.

    Attributes:
        zxbcdt, weights, plan: as passed, without a copy: do not write to them before backward.
        kept: y before the gate, the state in front of every segment of rows, and the halo rows that the convolution
            read; also the results of the convolution if the mixer has keep_activations.
        made_with: the sizes of the mixer, which the mixer of the backward must share.
        generation: the Generation of the plan's lengths where these are on a GPU, else None.
    """

    zxbcdt: Any
    weights: Mamba2Weights
    plan: Plan
    kept: Kept
    made_with: MixerShape
    generation: Any = None

    def __repr__(self) -> str:
        return f"<Mamba2Saved: zxbcdt {self.zxbcdt.dtype} {tuple(self.zxbcdt.shape)}, {self.plan!r}>"
