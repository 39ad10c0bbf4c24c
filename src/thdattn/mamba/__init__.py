"""The Mamba-2 mixer over packed sequences, spread over ranks as the attention is.

Its functions for an engine are a module that satisfies the protocol `MixerEngine`: `reference` or `cuda`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from thdattn.arguments import Array
from thdattn.engines import Engine

if TYPE_CHECKING:
    from thdattn.mamba import cuda, reference
    from thdattn.mamba.cache import Mamba2Cache
    from thdattn.mamba.shape import Activations, Copies, Inputs, Mamba2Weights, MixerShape
    from thdattn.plan.plan import Plan
    from thdattn.plan.workspace import Buffer

Gradients = Any  # an engine's own arrays of gradients, from its mixer_gradients


class MixerEngine(Protocol):
    """Functions of the mixer on one engine; thdattn.mamba.reference describes them."""

    @property
    def MIXER_SIZES(self) -> Mapping[str, Sequence[int]]: ...

    @property
    def mixer_segment_rows(self) -> int: ...

    # Buffers.
    def mixer_activations(self, plan: Plan, shape: MixerShape) -> list[Buffer]: ...

    def mixer_forward_buffers(self, plan: Plan, shape: MixerShape) -> list[Buffer]: ...

    def mixer_backward_buffers(self, plan: Plan, shape: MixerShape) -> list[Buffer]: ...

    # Forward.
    def mixer_conv(self, inputs: Inputs, keep: bool = False) -> Activations: ...

    def mixer_conv_states(self, inputs: Inputs, keep: bool) -> tuple[Activations, Array, Array]: ...

    def mixer_fold(self, states: Array, decays: Array, plan: Plan, shape: MixerShape, reverse: bool) -> Array: ...

    def mixer_start(self, summaries: Array, plan: Plan, shape: MixerShape, reverse: bool) -> Array: ...

    def mixer_enter(self, states: Array, decays: Array, start: Array, segments: slice, reverse: bool) -> None: ...

    def mixer_scan(
        self, inputs: Inputs, act: Activations, states: Array, segments: slice, y: Array, out: Array
    ) -> None: ...

    def mixer_norm(self, inputs: Inputs, y: Array, out: Array) -> None: ...

    # Backward.
    def mixer_gradients(self, plan: Plan, shape: MixerShape) -> Gradients: ...

    def mixer_gate_states(
        self, inputs: Inputs, act: Activations, y: Array, dout: Array, dzxbcdt: Array, gradients: Gradients
    ) -> tuple[Array, Array, Array]: ...

    def mixer_bwd(
        self, inputs: Inputs, act: Activations, dy: Array, states: Array, dstates: Array, segments: slice,
        gradients: Gradients,
    ) -> None: ...

    def mixer_conv_bwd(
        self, inputs: Inputs, gradients: Gradients, dzxbcdt: Array
    ) -> tuple[Mamba2Weights, Array]: ...

    def mixer_add_halos(self, halos: Array, tail: Array, plan: Plan, shape: MixerShape, dzxbcdt: Array) -> None: ...

    # Prefix trees.
    def mixer_fold_trees(self, states: Array, decays: Array, starts: Array, reverse: bool = False) -> None: ...

    def mixer_clear_dt(self, zxbcdt: Array, rows: Array, shape: MixerShape) -> None: ...

    def mixer_add_copies(self, gradients: Array, copies: Copies, shape: MixerShape, dzxbcdt: Array) -> None: ...

    # Decoding.
    def mixer_decode(
        self, zxbcdt: Array, weights: Mamba2Weights, shape: MixerShape, cache: Mamba2Cache
    ) -> Array: ...

    def mixer_fill(self, inputs: Inputs, act: Activations, segment_states: Array, cache: Mamba2Cache) -> None: ...


def mixer_engine(engine: Engine) -> MixerEngine:
    """Return the mixer's functions for an engine: the package thdattn.mamba.cuda or thdattn.mamba.reference."""
    functions: MixerEngine = importlib.import_module(f"thdattn.mamba.{engine.name}")
    return functions


if TYPE_CHECKING:
    _engines: tuple[MixerEngine, ...] = (cuda, reference)  # a type checker compares both with the protocol
