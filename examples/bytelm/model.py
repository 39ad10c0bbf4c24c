"""A byte-level transformer, forward and backward by hand, whose rows are spread over the ranks of a comm.

RMSNorm, RoPE by position, attention over packed documents (thdattn) with grouped queries and, on every second layer, an
optional sliding window, SwiGLU. The model walks its layers and keeps what matrix products and attention made; norms and
SwiGLU are computed again in the backward, which is cheap and halves the memory of a row. Every rank has all weights and
its own rows; ranks meet inside the attention alone. Losses and gradients are shares, to be summed over the ranks.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

import thdattn

VOCAB = 257
EOD = 256  # end of document, and the input before the first byte
TABLE_ROWS = 264  # of the embedding and the head: VOCAB, and unused rows that keep matrices aligned to 16 bytes
LAYERS = {"reference": "layers", "cuda": "layers_cuda"}

Array = Any


@dataclass(frozen=True)
class Config:
    """The shape of a model.

    width and hidden are multiples of 8, head_dim is one that the engine has a kernel for. `window`: how many bytes
    layers 0, 2, 4, ... see, the newest included; 0 = all, as the other layers do. `tied`: the head is the embedding.
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


SIZES = {
    "tiny": Config(layers=3, width=96, heads=2, kv_heads=1, head_dim=64, hidden=256, window=5, rope_base=100.0),
    "small": Config(layers=8, width=512, heads=8, kv_heads=4, head_dim=64, hidden=1408, window=256),
    "base": Config(layers=12, width=1024, heads=8, kv_heads=4, head_dim=128, hidden=2816, window=512),
    "1b": Config(layers=22, width=2048, heads=16, kv_heads=4, head_dim=128, hidden=5632, window=1024),
}


@dataclass(frozen=True)
class ModelPlan:
    """One batch on this rank, for all layers: plans[layer % 2] is that of a layer.

    rotation: (2, local_rows, head_dim / 2), cosines and sines of RoPE.
    """

    plans: tuple[thdattn.Plan, thdattn.Plan]
    rotation: Array

    @property
    def sharding(self) -> thdattn.Sharding:
        """Which rows of the pack this rank has."""
        return self.plans[0].sharding

    @property
    def local_rows(self) -> int:
        """Rows of this rank."""
        return self.plans[0].local_rows

    @property
    def positions(self) -> Array:
        """(local_rows,) int32, position of every row in its document."""
        return self.plans[0].positions

    @property
    def valid(self) -> Array:
        """(local_rows,) bool, True where a row holds a token."""
        return self.plans[0].valid


@dataclass(frozen=True)
class Caches:
    """Keys and values of texts that grow: layers[i] of layer i; rotation as in Model._rotation, of all positions."""

    layers: list[thdattn.KVCache]
    rotation: Array


Sums = tuple[Array, Array]  # the residual stream, and the branch that is still to be added to it: (rows, width) each


def _nothing_to_fetch(kept: Any) -> Any:
    return kept


class Part(NamedTuple):
    """A stretch of the network, or the CUDA graphs of it.

    forward: (x, branch, plan) -> ((x, branch), kept). The residual stream and what is to be added to it (None at
        first), before and after; and what the backward needs.
    backward: (dx, plan, kept) -> dx. Gradients of the residual stream, and so of its branch, after and before.
    fetch: kept -> kept. Starts what the backward has to wait for; to be called before the backward of the part behind.
        Graphs have none, as what is started in one has to end in it.
    """

    forward: Callable[[Array, Array | None, ModelPlan], tuple[Sums, Any]]
    backward: Callable[[Array, ModelPlan, Any], Array]
    fetch: Callable[[Any], Any] = _nothing_to_fetch


class Model:
    """The weights, and what is computed with them.

    Args:
        config: the shape.
        comm: the ranks that share the rows.
        engine: of thdattn: "auto", "cuda" or "reference".
        seed: of the weights, which are the same on every rank and engine.
        dtype: that layers compute in; by default bfloat16 on a GPU and float32 elsewhere. The reference engine also
            takes "float64".
        deterministic: the same bits on every run, for a slower backward of the attention on a GPU.
        cp_comm_type: what travels between the ranks, see CPAttention; those with a "+" take a comm of two levels.

    Attributes:
        parts: of all layers, in the order of the forward.
        weights: flat, float32 (float64 for dtype "float64"): the matrices, then the gains of the norms.
        gradient: flat, the same dtype; loss_and_gradient adds to it.
        params, grads: name -> view into weights and gradient.
        num_matrix_weights: how many of the weights belong to matrices.
        copy: flat, in `dtype`: the weights as layers read them.
    """

    def __init__(
        self, config: Config, comm: thdattn.comm.Comm, engine: str = "auto", seed: int = 0,
        dtype: DTypeLike | None = None, deterministic: bool = False, cp_comm_type: str = "all_gather",
    ) -> None:
        self.config = config
        self.comm = comm
        engine_module, _ = thdattn.engines.choose_engine(engine, comm)
        self.layers = importlib.import_module(LAYERS[engine_module.name])
        self.layers.load()
        self.dtype = np.dtype(dtype or self.layers.DTYPE)
        windows = ((config.window - 1, 0) if config.window else (-1, -1), (-1, -1))
        self.attentions = [
            thdattn.CPAttention(comm, config.heads, config.head_dim, config.kv_heads, window=window, dtype=self.dtype,
                                deterministic=deterministic, engine=engine_module.name, cp_comm_type=cp_comm_type)
            for window in windows
        ]
        shapes = _shapes(config)
        self.num_matrix_weights = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
        size, xp = sum(map(math.prod, shapes.values())), self.layers.xp
        self.weights, self.gradient = xp.zeros((2, size), np.promote_types(self.dtype, np.float32))
        self.copy = xp.zeros(size, self.dtype)
        self.params, self.grads, self._read = (_views(x, shapes) for x in (self.weights, self.gradient, self.copy))
        self._by_layer = [(_of_layer(self._read, i), _of_layer(self.grads, i)) for i in range(config.layers)]
        self.parts = [part for layer in range(config.layers) for part in self.layer_parts(layer).values()]
        half = config.head_dim // 2
        self._frequencies = xp.asarray(config.rope_base ** -(np.arange(half) / half))  # float64
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        """Normal with deviation in_features**-0.5; what adds to the residual stream smaller, as 2 per layer add up.

        A head of its own starts at 0 and may then read large embeddings: both make the first steps count.
        """
        rng, xp = np.random.default_rng(seed), self.layers.xp
        tables = {} if self.config.tied else {"embedding": 1.0, "head": 0.0}
        for name, x in self.params.items():
            if x.ndim == 1:
                x.fill(1)
                continue
            scale = tables.get(name, x.shape[1] ** -0.5)
            if name.endswith((".out", ".down")):
                scale /= math.sqrt(2 * self.config.layers)
            x[...] = xp.asarray(rng.standard_normal(x.shape, np.float32) * np.float32(scale))
            if name in ("embedding", "head"):
                x[VOCAB:] = 0
        self.refresh()

    def refresh(self) -> None:
        """Makes the layers see `weights`: to be called when these were written to other than by AdamW.step."""
        self.copy[...] = self.weights

    def prepare(self, batch: thdattn.PackedBatch, sharding: str | None = None) -> None:
        """Does ahead what plan asks of the host, in any thread; see CPAttention.prepare."""
        for attention in self.masks:
            attention.prepare(batch, sharding)

    def plan(self, batch: thdattn.PackedBatch, sharding: str | None = None) -> ModelPlan:
        """Plans a batch for this rank. Collective; see CPAttention.plan."""
        shared = self.masks[0].sharding(batch, sharding)
        return self.planned([attention.plan(batch, shared, finite_padding=True) for attention in self.masks])

    @property
    def masks(self) -> list[thdattn.CPAttention]:
        """One attention per mask, for which a batch has to be planned: with a window, without one."""
        return self.attentions if self.config.window else self.attentions[1:]

    def planned(self, plans: Sequence[thdattn.Plan]) -> ModelPlan:
        """The plan for the layers, of one per mask. Nothing comes from the host: a CUDA graph may capture it."""
        return ModelPlan((plans[0], plans[-1]), self._rotation(plans[-1].positions))

    def _rotation(self, positions: Array) -> Array:
        """(2, len(positions), head_dim / 2), cosines and sines of RoPE."""
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
        """This rank's share of the mean loss. Collective.

        Args:
            tokens: (local_rows,) int32 on the engine's device, bytes and EOD; any of these on padding.
            targets: (local_rows,) int32, the byte that follows, or EOD; -1 does not count, nor does padding.
            plan: of the batch.
            num_targets: targets that count, of all ranks (and of all micro-batches that make one step); a 0-d array on
                the engine's device where a CUDA graph has to find it.
            parts: instead of the model's own, such as graphs of them.

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
        """The same; adds this rank's share of the gradient to `gradient`."""
        hidden, saved = self._forward(tokens, plan, parts or self.parts)
        loss, dlogits = self._cross_entropy(hidden, targets, plan, num_targets)
        dhidden = self.layers.linear_backward(dlogits, hidden, self._read[self._head], self.grads[self._head])
        self._backward(dhidden, tokens, plan, saved, parts or self.parts)
        return loss

    def logits(self, tokens: Array, plan: ModelPlan) -> Array:
        """(local_rows, VOCAB) float32, of the byte that follows. Collective."""
        hidden, _ = self._forward(tokens, plan, self.parts)
        return self._logits(hidden)[:, :VOCAB]

    # ------------------------------------------------------------------------------------------------ decode

    def caches(self, num_texts: int, capacity: int) -> Caches:
        """Room for texts that grow: on one rank."""
        kept = [self.attentions[layer % 2].cache(num_texts, capacity) for layer in range(self.config.layers)]
        return Caches(kept, self._rotation(self.layers.xp.arange(capacity)))

    def prefill(self, tokens: Array, plan: ModelPlan, caches: Caches) -> Array:
        """The logits of a pack whose sequences are the beginnings of the caches' texts, one each; see `logits`."""
        hidden, saved = self._forward(tokens, plan, self.parts)
        for layer, cache in enumerate(caches.layers):
            _, attention = saved[2 * layer]  # of its first part
            cache.fill(attention.k, attention.v, plan.plans[layer % 2])
        return self._logits(hidden)[:, :VOCAB]

    def decode(self, tokens: Array, caches: Caches, layers: Sequence[Callable[[Array], Array]] | None = None) -> Array:
        """The logits behind the next token of every text, which the caches take in.

        Args:
            tokens: (num_texts,) int32 on the engine's device.
            layers: what to call for the layers instead of decode_layer, captured graphs of it for instance.

        Returns:
            (num_texts, TABLE_ROWS) float32, of which VOCAB columns count.
        """
        x = self.layers.embedding_forward(tokens, self._read["embedding"])
        for layer in range(self.config.layers):
            x = layers[layer](x) if layers else self.decode_layer(layer, caches, x)
        return self.layers.decode_logits(x, self._read["norm"], self._read[self._head])

    def decode_layer(self, layer: int, caches: Caches, x: Array) -> Array:
        """One layer for the next row of every text: the residual stream x (num_texts, width), anew."""
        ops, c, (w, _), cache = self.layers, self.config, self._by_layer[layer], caches.layers[layer]
        q, k, v = ops.decode_qkv(x, w["attention_norm"], w["qkv"], caches.rotation, cache.lengths, c.heads, c.kv_heads)
        out = self.attentions[layer % 2].decode(q, k, v, cache)
        x = ops.decode_linear(_flat(out), w["out"], x)
        return ops.decode_linear(ops.decode_swiglu(x, w["mlp_norm"], w["gate_up"]), w["down"], x)

    def attention_flops(self, batch: thdattn.PackedBatch) -> int:
        """Forward and backward of the attention of all layers and ranks."""
        counts = [sum(attention.flops(batch)) for attention in self.attentions]
        return sum(counts[layer % 2] for layer in range(self.config.layers))

    def flops(self, batch: thdattn.PackedBatch) -> int:
        """Forward and backward of all ranks: 6 per weight that multiplies and token, and the attention's."""
        c = self.config
        multiplying = self.num_matrix_weights - TABLE_ROWS * c.width * (1 if c.tied else 2) + VOCAB * c.width
        return 6 * multiplying * batch.total_tokens + self.attention_flops(batch)

    # ------------------------------------------------------------------------------------------------ layers

    def _forward(self, tokens: Array, plan: ModelPlan, parts: Sequence[Part]) -> tuple[Array, list[Any]]:
        """Normalised rows for the head, and what the backward needs: what each part keeps, then the last sum."""
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
            if i:  # on its way while this part computes
                saved[-1] = parts[i - 1].fetch(saved[-1])
            dx = parts[i].backward(dx, plan, kept)
        self.layers.embedding_backward(dx, tokens, self.grads["embedding"])

    def layer_parts(self, layer: int) -> dict[str, Part]:
        """The parts of a layer by name."""
        attn = self._attn_forward, self._attn_backward, self._attn_fetch
        mlp = self._mlp_forward, self._mlp_backward
        return {"attn": Part(*(partial(step, layer) for step in attn)),
                "mlp": Part(*(partial(step, layer) for step in mlp))}

    def _attn_forward(self, layer: int, x: Array, branch: Array | None, plan: ModelPlan) -> tuple[Sums, Any]:
        ops, c, (w, _) = self.layers, self.config, self._by_layer[layer]
        attention, here, keys = self.attentions[layer % 2], plan.plans[layer % 2], None
        x, h = ops.residual_norm_forward(x, branch, w["attention_norm"])
        qkv = ops.linear_forward(h, w["qkv"])
        if not self._travels_early(attention, here):
            q, k, v = ops.rope_forward(qkv, plan.rotation, c.heads, c.kv_heads)
        else:  # k and v are on their way to all ranks while q is made
            first = c.heads * c.head_dim
            _, k, v = ops.rope_forward(qkv[:, first:], plan.rotation, 0, c.kv_heads)
            keys = attention.gather(k, v, here)
            q, _, _ = ops.rope_forward(qkv[:, :first], plan.rotation, c.heads, 0)
        out, saved = attention.forward(q, k, v, here, keys=keys)
        return (x, ops.linear_forward(_flat(out), w["out"])), (x, saved)

    def _attn_fetch(self, layer: int, kept: Any) -> Any:
        """Asks for the keys of all ranks, unless the forward has kept them."""
        (x, saved), attention = kept, self.attentions[layer % 2]
        if saved.keys is not None or not self._travels_early(attention, saved.plan):
            return kept
        return x, saved, attention.gather(saved.k, saved.v, saved.plan)

    def _travels_early(self, attention: thdattn.CPAttention, plan: thdattn.Plan) -> bool:
        """Whether keys and values may be on their way while something else is computed."""
        return self.comm.size > 1 and attention.can_gather(plan)

    def _attn_backward(self, layer: int, dx: Array, plan: ModelPlan, kept: Any) -> Array:
        ops, (w, dw), (x, saved, *keys) = self.layers, self._by_layer[layer], kept
        dout = ops.linear_backward_input(dx, w["out"]).reshape(saved.out.shape)
        dq, dk_dv = self.attentions[layer % 2].start_backward(dout, saved, *keys)
        ops.linear_backward_weight(dx, _flat(saved.out), dw["out"])  # while dk and dv of all ranks are summed
        _, h = ops.residual_norm_forward(x, None, w["attention_norm"])
        dqkv = ops.rope_backward(dq, *dk_dv(), plan.rotation)
        dh = ops.linear_backward(dqkv, h, w["qkv"], dw["qkv"])
        return ops.residual_norm_backward(dh, dx, x, w["attention_norm"], dw["attention_norm"])

    def _mlp_forward(self, layer: int, x: Array, branch: Array | None, plan: ModelPlan) -> tuple[Sums, Any]:
        ops, (w, _) = self.layers, self._by_layer[layer]
        x, h = ops.residual_norm_forward(x, branch, w["mlp_norm"])
        gate_up = ops.linear_forward(h, w["gate_up"])
        return (x, ops.linear_forward(ops.swiglu_forward(gate_up), w["down"])), (x, gate_up)

    def _mlp_backward(self, layer: int, dx: Array, plan: ModelPlan, kept: Any) -> Array:
        ops, (w, dw), (x, gate_up) = self.layers, self._by_layer[layer], kept
        dswiglu = ops.linear_backward(dx, ops.swiglu_forward(gate_up), w["down"], dw["down"])
        dgate_up = ops.swiglu_backward(dswiglu, gate_up)
        _, h = ops.residual_norm_forward(x, None, w["mlp_norm"])
        dh = ops.linear_backward(dgate_up, h, w["gate_up"], dw["gate_up"])
        return ops.residual_norm_backward(dh, dx, x, w["mlp_norm"], dw["mlp_norm"])

    def _cross_entropy(
        self, hidden: Array, targets: Array, plan: ModelPlan, num_targets: Array | int
    ) -> tuple[Array, Array]:
        xp, dtype = self.layers.xp, self.weights.dtype
        counted = self._counted(targets, plan)
        result: tuple[Array, Array] = self.layers.cross_entropy(
            self._logits(hidden), counted, VOCAB, xp.asarray(num_targets, dtype)
        )
        return result

    def _logits(self, hidden: Array) -> Array:
        """(rows, TABLE_ROWS), in the dtype of the weights: too few columns to save by rounding them."""
        return self.layers.linear_forward(hidden, self._read[self._head], self.weights.dtype)

    def _counted(self, targets: Array, plan: ModelPlan) -> Array:
        """The targets, without those of padding and of fillers, whatever these hold."""
        self._check_rows("targets", targets, plan)
        return self.layers.xp.where(plan.valid, targets, np.int32(-1))

    @property
    def _head(self) -> str:
        return "embedding" if self.config.tied else "head"

    def _check_rows(self, name: str, x: Array, plan: ModelPlan) -> None:
        if x.shape != (plan.local_rows,) or x.dtype != np.int32:
            raise ValueError(
                f"{name} is {x.dtype} {x.shape}, wanted int32 {(plan.local_rows,)}, the rows of this rank; "
                f"cut them out with plan.sharding.shard(x, comm.rank)"
            )


def _shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the order of the flat array: matrices (out, in) first, then the gains of the norms."""
    matrices: dict[str, tuple[int, ...]] = {"embedding": (TABLE_ROWS, c.width)}
    if not c.tied:
        matrices["head"] = (TABLE_ROWS, c.width)
    gains: dict[str, tuple[int, ...]] = {"norm": (c.width,)}
    for layer in range(c.layers):
        matrices[f"{layer}.qkv"] = ((c.heads + 2 * c.kv_heads) * c.head_dim, c.width)
        matrices[f"{layer}.out"] = (c.width, c.heads * c.head_dim)
        matrices[f"{layer}.gate_up"] = (2 * c.hidden, c.width)
        matrices[f"{layer}.down"] = (c.width, c.hidden)
        gains[f"{layer}.attention_norm"] = (c.width,)
        gains[f"{layer}.mlp_norm"] = (c.width,)
    return matrices | gains


def _views(flat: Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()
    return {name: flat[end - math.prod(shape) : end].reshape(shape)
            for (name, shape), end in zip(shapes.items(), ends, strict=True)}


def _flat(x: Array) -> Array:
    """(rows, heads, width) -> (rows, heads * width); a rank may have no rows."""
    return x.reshape(len(x), x.shape[1] * x.shape[2])


def _of_layer(views: dict[str, Array], layer: int) -> dict[str, Array]:
    return {name.partition(".")[2]: x for name, x in views.items() if name.startswith(f"{layer}.")}
