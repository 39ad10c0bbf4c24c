"""Mamba2Saved: what forward of a Mamba2Mixer keeps for backward, and for texts that go on from its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thdattn.mamba.context_parallel import Kept
from thdattn.mamba.shape import Mamba2Weights, MixerShape
from thdattn.plan.plan import Plan


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class Mamba2Saved:
    """What forward of a Mamba2Mixer keeps for backward.

    zxbcdt, weights, plan: as passed, without a copy: nobody may write to them before backward.
    kept: what the mixer made: y before the gate, the state in front of every segment of rows, and the rows in front of
        this rank's that the convolution saw; and what that made, if the mixer has keep_activations.
    made_with: the sizes of the mixer, which must be those of the one whose backward takes it.
    generation: the Generation of the plan's lengths where these lie on a GPU, else None.
    """

    zxbcdt: Any
    weights: Mamba2Weights
    plan: Plan
    kept: Kept
    made_with: MixerShape
    generation: Any = None

    def __repr__(self) -> str:
        return f"<Mamba2Saved: zxbcdt {self.zxbcdt.dtype} {tuple(self.zxbcdt.shape)}, {self.plan!r}>"
