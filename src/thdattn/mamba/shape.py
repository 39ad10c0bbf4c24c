"""What a Mamba-2 mixer takes: the columns of its rows, and its weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from thdattn.arguments import is_array, shown


class _Weights(NamedTuple):
    """The weights that every mixer has."""

    conv_weight: Any
    conv_bias: Any
    A_log: Any
    D: Any
    dt_bias: Any


class Mamba2Weights(_Weights):
    """Weights of a Mamba-2 mixer, or their gradients: float32 (float64 for a mixer of that dtype).

    A tuple, so that an optimizer or an all-reduce goes through weights and gradients together. It has five arrays, and
    norm_weight as a sixth one where the mixer has a norm.

    Attributes:
        conv_weight: (channels, conv_width), of the causal convolution of x, B and C, in this order; the last column
            meets the row itself.
        conv_bias: (channels,).
        A_log: (num_heads,), A = -exp(A_log) is the rate at which a head forgets.
        D: (num_heads,), what goes from x straight to y.
        dt_bias: (num_heads,), dt = log(1 + exp(what the row has + dt_bias)).
        norm_weight: (d_inner,), the factor of each column behind the norm; None for a mixer without one.
    """

    norm_weight: Any = None

    def __new__(
        cls, conv_weight: Any, conv_bias: Any, A_log: Any, D: Any, dt_bias: Any, norm_weight: Any = None
    ) -> Mamba2Weights:
        """Make a tuple of five arrays, or of six."""
        if norm_weight is None:
            return super().__new__(cls, conv_weight, conv_bias, A_log, D, dt_bias)
        made = tuple.__new__(cls, (conv_weight, conv_bias, A_log, D, dt_bias, norm_weight))
        vars(made).update(norm_weight=norm_weight, _fields=(*cls._fields, "norm_weight"))
        return made

    def _replace(self, **changes: Any) -> Mamba2Weights:
        """Return the same weights but for some; norm_weight may be added."""
        return Mamba2Weights(**{**self._asdict(), **changes})

    def __repr__(self) -> str:  # printing arrays would make the host wait for a GPU
        kinds = (f"{name} {tuple(x.shape)}" if is_array(x) else f"{name} {shown(x)}"
                 for name, x in zip(self._fields, self, strict=True))  # fmt: skip
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
        """True if y is gated before it is normalised."""
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
        """In which it adds up, and keeps states."""
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
        """Rows before its own that the convolution of a row sees."""
        return self.conv_width - 1

    @property
    def summary(self) -> int:
        """Numbers that a rank tells the others: the state behind its rows, then what is left of the one in front."""
        return math.prod(self.state) + self.num_heads

    @property
    def state(self) -> tuple[int, int, int]:
        """Of all heads."""
        return self.num_heads, self.head_dim, self.state_dim

    @property
    def weights(self) -> Mamba2Weights:
        """The shape of each of the weights."""
        heads, of_norm = (self.num_heads,), (self.d_inner,) if self.norm else None
        return Mamba2Weights((self.channels, self.conv_width), (self.channels,), heads, heads, heads, of_norm)

    def parts(self, zxbcdt: Any) -> tuple[Any, Any, Any]:
        """The columns z, those of x, B and C together, and dt: views."""
        inner, behind = self.d_inner, self.d_inner + self.channels
        return zxbcdt[:, :inner], zxbcdt[:, inner:behind], zxbcdt[:, behind:]

    def split(self, channels: Any) -> tuple[Any, Any, Any]:
        """The columns x, B and C by head or group, (rows, heads or groups, width), of those together: views."""
        inner, width, rows = self.d_inner, self.num_groups * self.state_dim, len(channels)
        x, b, c = channels[:, :inner], channels[:, inner : inner + width], channels[:, inner + width :]
        groups = rows, self.num_groups, self.state_dim
        return x.reshape(rows, self.num_heads, self.head_dim), b.reshape(groups), c.reshape(groups)
