"""Shape of a model: its sizes, the kinds of its layers, and the names and shapes of its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCAB = 257
EOD = 256  # end of document; also the input before the first byte
TABLE_ROWS = 264  # rows of embedding and head: VOCAB, and unused ones that align matrices to 16 bytes
CONV_WIDTH = 4  # rows that the convolution of a mixer reads

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Config:
    """Shape of a model.

    width and hidden are multiples of 8, head_dim is one that the engine has a kernel for. `window`: bytes that layers
    0, 2, 4, ... see, the newest included; 0 = all, as the other layers do. `tied`: the head is the embedding.

    pattern: the kinds of the layers, repeated: "*" has attention, "M" a Mamba-2 mixer in its place, which sees all
    bytes and takes neither window nor RoPE (the letters are Megatron-LM's).
    mixer_heads, mixer_head_dim, mixer_groups, state_dim: of the mixers, see thdattn.Mamba2Mixer.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    window: int = 0
    rope_base: float = 10_000.0
    tied: bool = False
    pattern: str = "*"
    mixer_heads: int = 0
    mixer_head_dim: int = 64
    mixer_groups: int = 1
    state_dim: int = 64

    def is_mixer(self, layer: int) -> bool:
        """Return whether a layer has a mixer in place of attention."""
        return self.pattern[layer % len(self.pattern)] == "M"

    @property
    def num_mixers(self) -> int:
        """Layers with a mixer."""
        return sum(map(self.is_mixer, range(self.layers)))

    @property
    def d_inner(self) -> int:
        """Columns of a mixer's output."""
        return self.mixer_heads * self.mixer_head_dim

    @property
    def channels(self) -> int:
        """Columns x, B and C of a mixer's input."""
        return self.d_inner + 2 * self.mixer_groups * self.state_dim


SIZES = {
    "tiny": Config(layers=3, width=96, heads=2, kv_heads=1, head_dim=64, hidden=256, window=5, rope_base=100.0),
    "tiny-hybrid": Config(layers=2, width=96, heads=4, kv_heads=2, head_dim=64, hidden=160, rope_base=100.0,
                          pattern="M*", mixer_heads=8, state_dim=64),
    "small": Config(layers=8, width=512, heads=8, kv_heads=4, head_dim=64, hidden=1408, window=256),
    "base": Config(layers=12, width=1024, heads=8, kv_heads=4, head_dim=128, hidden=2816, window=512),
    "1b": Config(layers=22, width=2048, heads=16, kv_heads=4, head_dim=128, hidden=5632, window=1024),
    "1b-hybrid": Config(layers=24, width=2048, heads=16, kv_heads=4, head_dim=128, hidden=2944, pattern="MMM*MM",
                        mixer_heads=64, state_dim=128),
}


def weight_shapes(c: Config) -> Shapes:
    """Return names and shapes of all weights, in the order of the flat array: matrices first, then vectors."""
    return _matrices(c) | _vectors(c)


def _matrices(c: Config) -> Shapes:
    """Return the shapes (out, in), and (channels, rows) of convolutions."""
    shapes: Shapes = {"embedding": (TABLE_ROWS, c.width)}
    if not c.tied:
        shapes["head"] = (TABLE_ROWS, c.width)
    for layer in range(c.layers):
        if c.is_mixer(layer):
            shapes[f"{layer}.zxbcdt"] = (c.d_inner + c.channels + c.mixer_heads, c.width)
            shapes[f"{layer}.conv_weight"] = (c.channels, CONV_WIDTH)
            shapes[f"{layer}.out"] = (c.width, c.d_inner)
        else:
            shapes[f"{layer}.qkv"] = ((c.heads + 2 * c.kv_heads) * c.head_dim, c.width)
            shapes[f"{layer}.out"] = (c.width, c.heads * c.head_dim)
        shapes[f"{layer}.gate_up"] = (2 * c.hidden, c.width)
        shapes[f"{layer}.down"] = (c.width, c.hidden)
    return shapes


def _vectors(c: Config) -> Shapes:
    """Return the shapes of the gains; a mixer's few numbers per head come last, as they leave later weights unaligned.
    """
    shapes: Shapes = {"norm": (c.width,)}
    for layer in range(c.layers):
        if c.is_mixer(layer):
            shapes[f"{layer}.mixer_norm"] = (c.width,)
            shapes[f"{layer}.out_norm"] = (c.d_inner,)
        else:
            shapes[f"{layer}.attention_norm"] = (c.width,)
        shapes[f"{layer}.mlp_norm"] = (c.width,)
    for layer in filter(c.is_mixer, range(c.layers)):
        shapes[f"{layer}.conv_bias"] = (c.channels,)
        shapes |= {f"{layer}.{name}": (c.mixer_heads,) for name in ("A_log", "D", "dt_bias")}
    return shapes


def forward_flops(c: Config, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the operations of a forward over documents of these lengths: matrices, and attention's visible pairs."""
    rows = lengths.astype(np.float64)
    total = 2 * rows * sum(math.prod(shape) for name, shape in _matrices(c).items() if name != "embedding")
    for layer in (layer for layer in range(c.layers) if not c.is_mixer(layer)):
        unseen = np.maximum(rows - c.window, 0) if c.window and layer % 2 == 0 else np.zeros_like(rows)
        pairs = (rows * (rows + 1) - unseen * (unseen + 1)) / 2
        total += 4 * c.heads * c.head_dim * pairs
    return total
