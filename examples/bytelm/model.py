"""Byte-level language model, forward and backward by hand, whose rows are spread over the ranks of a comm.

It has RMSNorm, RoPE by position, SwiGLU, and attention over packed documents (thdattn) with grouped queries and, on
every second layer, an optional sliding window. In a hybrid most layers have a Mamba-2 mixer (thdattn) in place of
attention. The model runs its layers, whose parts are in parts.py. Every rank has all weights and its own rows; ranks
communicate in attention and mixers alone. Losses and gradients are partial sums over the ranks.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from parts import Attention, Mixer, Mlp, ModelPlan, Part
from sizes import TABLE_ROWS, VOCAB, Config, Shapes, weight_shapes

import thdattn
from thdattn.engines.select import choose_engine

LAYERS = {"reference": "layers", "cuda": "layers_cuda"}

Array = Any


@dataclass(frozen=True)
class Caches:
    """Decode caches: layers[i] of layer i; rotation as in Model._rotation, of all positions."""

    layers: list[thdattn.KVCache | thdattn.Mamba2Cache]
    rotation: Array


class Model:
    """Weights of the model, and its computations.

    Args:
        config: the shape.
        comm: the ranks that share the rows.
        engine: of thdattn: "auto", "cuda" or "reference".
        seed: of the weights, which are the same on every rank and engine.
        dtype: of activations; by default bfloat16 on a GPU and float32 elsewhere. The reference engine also takes
            "float64".
        deterministic: True gives the same bits on every run, with a slower backward of the attention on a GPU.
        cp_comm_type: context-parallel method, see CPAttention; those with a "+" take a comm of two levels.

    Attributes:
        parts: of all layers, in the order of the forward.
        weights: flat, float32 (float64 for dtype "float64"): the matrices, then the vectors.
        gradient: flat, the same dtype; loss_and_gradient adds to it.
        params, grads: name -> view into weights and gradient.
        num_matrix_weights: number of weights in matrices.
        copy: flat, in `dtype`: the weights as layers read them; a mixer reads its own in float32.
    """

    def __init__(
        self, config: Config, comm: thdattn.comm.Comm, engine: str = "auto", seed: int = 0,
        dtype: DTypeLike | None = None, deterministic: bool = False, cp_comm_type: str = "all_gather",
    ) -> None:
        self.config = config
        self.comm = comm
        engine_module, _ = choose_engine(engine, comm)
        self.layers = importlib.import_module(LAYERS[engine_module.name])
        self.layers.load()
        self.dtype = np.dtype(dtype or self.layers.DTYPE)
        windows = ((config.window - 1, 0) if config.window else (-1, -1), (-1, -1))
        self.attentions = [
            thdattn.CPAttention(comm, config.heads, config.head_dim, config.kv_heads, window=window, dtype=self.dtype,
                                deterministic=deterministic, engine=engine_module.name, cp_comm_type=cp_comm_type)
            for window in windows
        ]
        shapes = weight_shapes(config)
        self.num_matrix_weights = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
        size, xp = sum(map(math.prod, shapes.values())), self.layers.xp
        self.weights, self.gradient = xp.zeros((2, size), np.promote_types(self.dtype, np.float32))
        self.copy = xp.zeros(size, self.dtype)
        self.params, self.grads, self._read = (_views(x, shapes) for x in (self.weights, self.gradient, self.copy))
        self._stack = [self._layer(number) for number in range(config.layers)]
        self.parts = [part for layer in range(config.layers) for part in self.layer_parts(layer).values()]
        half = config.head_dim // 2
        self._frequencies = xp.asarray(config.rope_base ** -(np.arange(half) / half))  # float64
        self._initialise(seed)

    def _layer(self, number: int) -> tuple[Any, Mlp]:
        """Return the Attention or Mixer of a layer, and its Mlp."""
        of_layer = self, number, _of_layer(self._read, number), _of_layer(self.grads, number)
        return (Mixer if self.config.is_mixer(number) else Attention)(*of_layer), Mlp(*of_layer)

    def _initialise(self, seed: int) -> None:
        """Draw weights with deviation in_features**-0.5; smaller ones for the 2 branches per layer that add to the
        residual stream.

        A separate head starts at 0 and may then read large embeddings: both make the first steps effective. Gains are
        1; see _start for the other vectors.
        """
        rng, xp = np.random.default_rng(seed), self.layers.xp
        tables = {} if self.config.tied else {"embedding": 1.0, "head": 0.0}
        for name, x in self.params.items():
            if x.ndim == 1:
                x[...] = xp.asarray(_start(name.rpartition(".")[2], x.shape, rng))
                continue
            scale = tables.get(name, x.shape[1] ** -0.5)
            if name.endswith((".out", ".down")):
                scale /= math.sqrt(2 * self.config.layers)
            x[...] = xp.asarray(rng.standard_normal(x.shape, np.float32) * np.float32(scale))
            if name in ("embedding", "head"):
                x[VOCAB:] = 0
        self.refresh()

    def refresh(self) -> None:
        """Copy `weights` to the layers, after a write other than AdamW.step."""
        self.copy[...] = self.weights

    def prepare(self, batch: thdattn.PackedBatch, sharding: str | None = None) -> None:
        """Do ahead, in any thread, the host's work of `plan`; see CPAttention.prepare."""
        for attention in self.masks:
            attention.prepare(batch, sharding)

    def plan(self, batch: thdattn.PackedBatch, sharding: str | None = None) -> ModelPlan:
        """Plan a batch for this rank. Collective; see CPAttention.plan."""
        shared = self.masks[0].sharding(batch, sharding)
        return self.planned([attention.plan(batch, shared, finite_padding=True) for attention in self.masks])

    @property
    def masks(self) -> list[thdattn.CPAttention]:
        """Attentions for which a batch is planned, one per mask: with a window, without one."""
        return self.attentions if self.config.window else self.attentions[1:]

    def planned(self, plans: Sequence[thdattn.Plan]) -> ModelPlan:
        """Return the plan for the layers from one plan per mask. It reads nothing from the host: a CUDA graph may
        capture it.
        """
        return ModelPlan((plans[0], plans[-1]), self._rotation(plans[-1].positions))

    def _rotation(self, positions: Array) -> Array:
        """Return cosines and sines of RoPE, (2, len(positions), head_dim / 2)."""
        xp, angles = self.layers.xp, positions[:, None] * self._frequencies
        rotation = xp.empty((2, *angles.shape), self.weights.dtype)
        xp.cos(angles, out=rotation[0])
        xp.sin(angles, out=rotation[1])
        return rotation

    # ------------------------------------------------------------------------------------------------ loss, gradient

    def loss(
        self, tokens: Array, targets: Array, plan: ModelPlan, num_targets: Array | int,
        parts: Sequence[Part] | None = None,
    ) -> Array:
        """Compute this rank's share of the mean loss. Collective.

        Args:
            tokens: (local_rows,) int32 on the engine's device, bytes and EOD; any of these on padding.
            targets: (local_rows,) int32, the next byte, or EOD; -1 does not count, nor does padding.
            plan: of the batch.
            num_targets: targets that count, of all ranks (and of all micro-batches of a step); a 0-d array on the
                engine's device if a CUDA graph reads it.
            parts: replacements for the model's own, such as graphs of them.

        Returns:
            0-d array: the sum of nats over this rank's targets, divided by num_targets.

        Raises:
            ValueError: tokens or targets of another shape or dtype.
        """
        hidden, _ = self._forward(tokens, plan, parts or self.parts)
        return self._cross_entropy(hidden, targets, plan, num_targets)[0]

    def loss_and_gradient(
        self, tokens: Array, targets: Array, plan: ModelPlan, num_targets: Array | int,
        parts: Sequence[Part] | None = None,
    ) -> Array:
        """Compute `loss`, and add this rank's share of the gradient to `gradient`."""
        hidden, saved = self._forward(tokens, plan, parts or self.parts)
        loss, dlogits = self._cross_entropy(hidden, targets, plan, num_targets)
        dhidden = self.layers.linear_backward(dlogits, hidden, self._read[self._head], self.grads[self._head])
        self._backward(dhidden, tokens, plan, saved, parts or self.parts)
        return loss

    def logits(self, tokens: Array, plan: ModelPlan) -> Array:
        """Return the logits of the next byte, (local_rows, VOCAB) float32. Collective."""
        hidden, _ = self._forward(tokens, plan, self.parts)
        return self._logits(hidden)[:, :VOCAB]

    # ------------------------------------------------------------------------------------------------ decode

    def caches(self, num_texts: int, capacity: int) -> Caches:
        """Return decode caches for num_texts texts of up to `capacity` tokens, on one rank."""
        kept = [mixing.cache(num_texts, capacity) for mixing, _ in self._stack]
        return Caches(kept, self._rotation(self.layers.xp.arange(capacity)))

    def prefill(self, tokens: Array, plan: ModelPlan, caches: Caches) -> Array:
        """Fill the caches from a pack with one sequence per text, and return its logits; see `logits`."""
        hidden, saved = self._forward(tokens, plan, self.parts)
        for (mixing, _), cache, kept in zip(self._stack, caches.layers, saved[::2], strict=False):
            mixing.fill(cache, kept, plan)
        return self._logits(hidden)[:, :VOCAB]

    def decode(self, tokens: Array, caches: Caches, layers: Sequence[Callable[[Array], Array]] | None = None) -> Array:
        """Append a token to every text in the caches, and return the logits of the next one.

        Args:
            tokens: (num_texts,) int32 on the engine's device.
            layers: replacements for decode_layer, such as captured graphs of it.

        Returns:
            (num_texts, TABLE_ROWS) float32, of which VOCAB columns count.
        """
        x = self.layers.embedding_forward(tokens, self._read["embedding"])
        for layer in range(self.config.layers):
            x = layers[layer](x) if layers else self.decode_layer(layer, caches, x)
        return self.layers.decode_logits(x, self._read["norm"], self._read[self._head])

    def decode_layer(self, layer: int, caches: Caches, x: Array) -> Array:
        """Compute one layer for the next row of every text: return the residual stream (num_texts, width)."""
        mixing, mlp = self._stack[layer]
        return mlp.decode(mixing.decode(x, caches.layers[layer], caches.rotation))

    def attention_flops(self, batch: thdattn.PackedBatch) -> int:
        """Return the operations of the attention of all layers and ranks, forward and backward."""
        counts, c = [sum(attention.flops(batch)) for attention in self.attentions], self.config
        return sum(counts[layer % 2] for layer in range(c.layers) if not c.is_mixer(layer))

    def flops(self, batch: thdattn.PackedBatch) -> int:
        """Return the operations of all ranks, forward and backward: 6 per multiplying weight and token, and the
        attention's.

        The recurrence of a mixer counts as two products with the state of a head.
        """
        c = self.config
        multiplying = self.num_matrix_weights - TABLE_ROWS * c.width * (1 if c.tied else 2) + VOCAB * c.width
        multiplying += c.num_mixers * 2 * c.d_inner * c.state_dim
        return 6 * multiplying * batch.total_tokens + self.attention_flops(batch)

    # ------------------------------------------------------------------------------------------------ layers

    def _forward(self, tokens: Array, plan: ModelPlan, parts: Sequence[Part]) -> tuple[Array, list[Any]]:
        """Return normalised rows for the head, and what the backward needs: each part's kept values, then the last sum.
        """
        self._check_rows("tokens", tokens, plan)
        x, branch = self.layers.embedding_forward(tokens, self._read["embedding"]), None
        saved: list[Any] = []
        for part in parts:
            (x, branch), kept = part.forward(x, branch, plan)
            saved.append(kept)
        x, hidden = self.layers.residual_norm_forward(x, branch, self._read["norm"])
        return hidden, [*saved, x]

    def _backward(
        self, dhidden: Array, tokens: Array, plan: ModelPlan, saved: list[Any], parts: Sequence[Part]
    ) -> None:
        x = saved.pop()
        dx = self.layers.residual_norm_backward(dhidden, None, x, self._read["norm"], self.grads["norm"])
        for i in reversed(range(len(parts))):
            kept = saved.pop()
            if i:  # communication of the part before overlaps this one
                saved[-1] = parts[i - 1].fetch(saved[-1])
            dx = parts[i].backward(dx, plan, kept)
        self.layers.embedding_backward(dx, tokens, self.grads["embedding"])

    def layer_parts(self, layer: int) -> dict[str, Part]:
        """Return the parts of a layer by name."""
        return {part.name: part.part for part in self._stack[layer]}

    def _cross_entropy(
        self, hidden: Array, targets: Array, plan: ModelPlan, num_targets: Array | int
    ) -> tuple[Array, Array]:
        self._check_rows("targets", targets, plan)
        xp, dtype = self.layers.xp, self.weights.dtype
        counted = xp.where(plan.valid, targets, np.int32(-1))  # padding and fillers may hold anything
        result: tuple[Array, Array] = self.layers.cross_entropy(
            self._logits(hidden), counted, VOCAB, xp.asarray(num_targets, dtype)
        )
        return result

    def _logits(self, hidden: Array) -> Array:
        """Return (rows, TABLE_ROWS) in the dtype of the weights: too few columns to save memory by rounding."""
        return self.layers.linear_forward(hidden, self._read[self._head], self.weights.dtype)

    @property
    def _head(self) -> str:
        return "embedding" if self.config.tied else "head"

    def _check_rows(self, name: str, x: Array, plan: ModelPlan) -> None:
        if x.shape != (plan.local_rows,) or x.dtype != np.int32:
            raise ValueError(
                f"{name} is {x.dtype} {x.shape}, wanted int32 {(plan.local_rows,)}, the rows of this rank; "
                f"cut them out with plan.sharding.shard(x, comm.rank)"
            )


def _start(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Return the initial values of a vector: as in Mamba-2 (arXiv:2405.21060), decay rates 1 to 16, steps 0.001 to 0.1.
    """
    if name == "conv_bias":
        return np.zeros(shape)
    if name == "A_log":
        return np.log(rng.uniform(1, 16, shape))
    if name == "dt_bias":  # softplus(dt_bias) is a step
        steps = np.exp(rng.uniform(np.log(0.001), np.log(0.1), shape))
        return np.log(np.expm1(steps))
    return np.ones(shape)


def _views(flat: Array, shapes: Shapes) -> dict[str, Array]:
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()
    return {name: flat[end - math.prod(shape) : end].reshape(shape)
            for (name, shape), end in zip(shapes.items(), ends, strict=True)}


def _of_layer(views: dict[str, Array], layer: int) -> dict[str, Array]:
    return {name.partition(".")[2]: x for name, x in views.items() if name.startswith(f"{layer}.")}
