"""Shapes of a Mamba-2 mixer: its rows, its weights, and its activations between convolution and recurrence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thdattn.arguments import Array, is_array, shown

if TYPE_CHECKING:
    from thdattn.packing import PackedBatch
    from thdattn.plan.plan import Plan

CHUNK = 64  # rows that the recurrence takes at once; kChunk of kernels/mamba/common.cuh


def segment_rows(batch: PackedBatch, most: int) -> int:
    """Return the rows of a segment, which has one state in front of it; in trees every node has whole segments.

    Args:
        most: rows of a segment that an engine takes. Segments of trees have the largest number that divides this and
            the rows of every node.
    """
    trees = batch.trees
    return most if trees is None else int(np.gcd.reduce(trees.lengths, initial=most))


class _Weights(NamedTuple):
    """Five weights that every mixer has."""

    conv_weight: Array
    conv_bias: Array
    A_log: Array
    D: Array
    dt_bias: Array


class Mamba2Weights(_Weights):
    """Weights of a Mamba-2 mixer, or their gradients: float32 (float64 for a mixer of that dtype).

    It is a tuple, so that optimizers and all-reduces can loop over weights and gradients together. It has five arrays,
    and norm_weight as a sixth if the mixer has a norm.

    Attributes:
        conv_weight: (channels, conv_width), of the causal convolution of x, B and C, in this order; the last column
            multiplies the row itself.
        conv_bias: (channels,).
        A_log: (num_heads,), A = -exp(A_log) is the decay rate of a head's state.
        D: (num_heads,), factor of x in y.
        dt_bias: (num_heads,), dt = log(1 + exp(dt of the row + dt_bias)).
        norm_weight: (d_inner,), the factor of each column after the norm; None for a mixer without one.
    """

    norm_weight: Array = None

    def __new__(
        cls, conv_weight: Array, conv_bias: Array, A_log: Array, D: Array, dt_bias: Array, norm_weight: Array = None
    ) -> Mamba2Weights:
        """Make a tuple of five arrays, or of six."""
        if norm_weight is None:
            return super().__new__(cls, conv_weight, conv_bias, A_log, D, dt_bias)
        made = tuple.__new__(cls, (conv_weight, conv_bias, A_log, D, dt_bias, norm_weight))
        vars(made).update(norm_weight=norm_weight, _fields=(*cls._fields, "norm_weight"))
        return made

    def _replace(self, **changes: Any) -> Mamba2Weights:
        """Return the weights with some of them replaced; norm_weight may be added."""
        return Mamba2Weights(**{**self._asdict(), **changes})

    def __repr__(self) -> str:  # to print arrays would wait for the GPU
        kinds = (f"{name} {tuple(x.shape)}" if is_array(x) else f"{name} {shown(x)}"
                 for name, x in zip(self._fields, self, strict=True))
        return f"<Mamba2Weights: {', '.join(kinds)}>"


class GatedNorm(NamedTuple):
    """RMSNorm of a mixer; see Mamba2Mixer.

    place: "after_gate" or "before_gate".
    groups: groups of columns, each of which is divided by the root of its own mean square.
    eps: added to the mean square.
    """

    place: str
    groups: int
    eps: float

    @property
    def after_gate(self) -> bool:
        return self.place == "after_gate"


class MixerShape(NamedTuple):
    """Sizes of a mixer, and its norm; see Mamba2Mixer."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    dtype: np.dtype[Any]
    norm: GatedNorm | None = None

    @property
    def sum_dtype(self) -> np.dtype[Any]:
        """Dtype of sums and states."""
        return np.promote_types(self.dtype, np.float32)

    @property
    def d_inner(self) -> int:
        """Columns of z, of x and of out."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns of x, B and C, which go through the convolution."""
        return self.d_inner + 2 * self.num_groups * self.state_dim

    @property
    def columns(self) -> int:
        """Columns of a row of zxbcdt: z, x, B, C, dt."""
        return self.d_inner + self.channels + self.num_heads

    @property
    def reach(self) -> int:
        """Earlier rows that the convolution of a row reads."""
        return self.conv_width - 1

    @property
    def summary(self) -> int:
        """Numbers that a rank sends to the others: the state after its rows, and the decay of the state in front of
        them.
        """
        return math.prod(self.state) + self.num_heads

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of the states of all heads: (num_heads, head_dim, state_dim)."""
        return self.num_heads, self.head_dim, self.state_dim

    @property
    def weights(self) -> Mamba2Weights:
        """Shape of each of the weights."""
        heads, of_norm = (self.num_heads,), (self.d_inner,) if self.norm else None
        return Mamba2Weights((self.channels, self.conv_width), (self.channels,), heads, heads, heads, of_norm)

    def parts(self, zxbcdt: Array) -> tuple[Any, Any, Any]:
        """Return views of the columns z, of x, B and C together, and dt."""
        inner, behind = self.d_inner, self.d_inner + self.channels
        return zxbcdt[:, :inner], zxbcdt[:, inner:behind], zxbcdt[:, behind:]

    def split(self, channels: Array) -> tuple[Any, Any, Any]:
        """Return views of the columns x, B and C, each (rows, heads or groups, width)."""
        inner, width, rows = self.d_inner, self.num_groups * self.state_dim, len(channels)
        x, b, c = channels[:, :inner], channels[:, inner : inner + width], channels[:, inner + width :]
        groups = rows, self.num_groups, self.state_dim
        return x.reshape(rows, self.num_heads, self.head_dim), b.reshape(groups), c.reshape(groups)


class Inputs(NamedTuple):
    """Arguments of a layer's call on this rank, as its engine takes them.

    zxbcdt: (local_rows, columns).
    halo: (reach, channels), the rows of x, B and C in front of this rank's; on one rank anything.
    """

    zxbcdt: Array
    weights: Mamba2Weights
    plan: Plan
    shape: MixerShape
    halo: Array = None


class Activations(NamedTuple):
    """Rows of this rank as the recurrence takes them, all 0 on padding.

    Arrays by head are (local_rows, num_heads) in NumPy, and (num_heads, chunks * CHUNK) on GPUs, where rows behind the
    last one are 0. They are float32 (float64 for a mixer of that dtype).

    channels: (local_rows, channels), x, B and C behind the convolution and silu, in the dtype of the mixer.
    dt: by head.
    sums: by head, sums of a = dt * A over the rows of the same chunk and sequence up to this one; on GPUs times
        log2(e).
    leave: by head, dt times the decay from a row to the end of its chunk; None in NumPy.
    """

    channels: Array
    dt: Array
    sums: Array
    leave: Array = None


class Copies(NamedTuple):
    """Rows that have copies at other places, as int32 arrays of an engine.

    rows: (num_rows,), each once.
    begins: (num_rows + 1,), the copies of rows[i] are places[begins[i] : begins[i + 1]].
    places: (number of copies,).
    """

    rows: Array
    begins: Array
    places: Array
