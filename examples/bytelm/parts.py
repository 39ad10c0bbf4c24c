"""Parts of a layer, forward next to backward: attention or a mixer, which combine rows, then the mlp.

A part adds the branch of the part before to the residual stream, normalises the sum, and computes a branch of its own.
It keeps the results of matrix products, attention and mixer. The backward recomputes norms and SwiGLU, which is cheap
and halves the memory of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sizes import CONV_WIDTH

import thdattn

if TYPE_CHECKING:
    from model import Model

Array = Any
Weights = dict[str, Array]
Sums = tuple[Array, Array]  # the residual stream, and the branch to add to it: (rows, width) each


@dataclass(frozen=True)
class ModelPlan:
    """Plan of one batch on this rank, for all layers: plans[layer % 2] is for an attention, plans[1] for the mixers.

    rotation: (2, local_rows, head_dim / 2), cosines and sines of RoPE.
    """

    plans: tuple[thdattn.Plan, thdattn.Plan]
    rotation: Array

    @property
    def sharding(self) -> thdattn.Sharding:
        """Assignment of the pack's rows to ranks."""
        return self.plans[0].sharding

    @property
    def local_rows(self) -> int:
        """Rows of this rank."""
        return self.plans[0].local_rows

    @property
    def positions(self) -> Array:
        """Position of every row in its document, (local_rows,) int32."""
        return self.plans[0].positions

    @property
    def valid(self) -> Array:
        """True where a row holds a token, (local_rows,) bool."""
        return self.plans[0].valid


def _nothing_to_fetch(kept: Any) -> Any:
    return kept


class Part(NamedTuple):
    """Stretch of the network, or CUDA graphs of it.

    forward: (x, branch, plan) -> ((x, branch), kept). x is the residual stream, branch is still to be added to it (None
    at first); kept is for the backward.
    backward: (dx, plan, kept) -> dx. dx is the gradient of the residual stream, and so of its branch.
    fetch: kept -> kept. Starts communication that the backward waits for; call it before the backward of the next part.
    Graphs have none, as communication that starts in a graph must end in it.
    """

    forward: Callable[[Array, Array | None, ModelPlan], tuple[Sums, Any]]
    backward: Callable[[Array, ModelPlan, Any], Array]
    fetch: Callable[[Any], Any] = _nothing_to_fetch


class Attention:
    """Grouped-query attention with RoPE; on even layers with the window of the model, if it has one.

    Args:
        model: the model with the layers' functions.
        layer: number of the layer.
        weights, gradients: of the layer, by name.
    """

    name = "attn"

    def __init__(self, model: Model, layer: int, weights: Weights, gradients: Weights) -> None:
        self._model, self._w, self._dw = model, weights, gradients
        self._mask = layer % 2
        self._attention = model.attentions[self._mask]

    @property
    def part(self) -> Part:
        """Part of this attention."""
        return Part(self.forward, self.backward, self.fetch)

    def forward(self, x: Array, branch: Array | None, plan: ModelPlan) -> tuple[Sums, Any]:
        """Compute the forward of a Part."""
        ops, c, w = self._model.layers, self._model.config, self._w
        here, keys = plan.plans[self._mask], None
        x, h = ops.residual_norm_forward(x, branch, w["attention_norm"])
        qkv = ops.linear_forward(h, w["qkv"])
        if not self._gathers_early(here):
            q, k, v = ops.rope_forward(qkv, plan.rotation, c.heads, c.kv_heads)
        else:  # the gather of k and v overlaps the computation of q
            first = c.heads * c.head_dim
            _, k, v = ops.rope_forward(qkv[:, first:], plan.rotation, 0, c.kv_heads)
            keys = self._attention.gather(k, v, here)
            q, _, _ = ops.rope_forward(qkv[:, :first], plan.rotation, c.heads, 0)
        out, saved = self._attention.forward(q, k, v, here, keys=keys)
        return (x, ops.linear_forward(_flat(out), w["out"])), (x, saved)

    def fetch(self, kept: Any) -> Any:
        """Start to gather the keys of all ranks, unless the forward has kept them."""
        x, saved = kept
        if saved.keys is not None or not self._gathers_early(saved.plan):
            return kept
        return x, saved, self._attention.gather(saved.k, saved.v, saved.plan)

    def _gathers_early(self, plan: thdattn.Plan) -> bool:
        """Return whether the gather of keys and values can overlap other work."""
        return self._model.comm.size > 1 and self._attention.can_gather(plan)

    def backward(self, dx: Array, plan: ModelPlan, kept: Any) -> Array:
        """Compute the backward of a Part."""
        ops, w, dw, (x, saved, *keys) = self._model.layers, self._w, self._dw, kept
        dout = ops.linear_backward_input(dx, w["out"]).reshape(saved.out.shape)
        dq, dk_dv = self._attention.start_backward(dout, saved, *keys)
        ops.linear_backward_weight(dx, _flat(saved.out), dw["out"])  # overlaps the sums of dk and dv over ranks
        _, h = ops.residual_norm_forward(x, None, w["attention_norm"])
        dqkv = ops.rope_backward(dq, *dk_dv(), plan.rotation)
        dh = ops.linear_backward(dqkv, h, w["qkv"], dw["qkv"])
        return ops.residual_norm_backward(dh, dx, x, w["attention_norm"], dw["attention_norm"])

    def cache(self, num_texts: int, capacity: int) -> thdattn.KVCache:
        """Return a cache for keys and values of num_texts texts."""
        return self._attention.cache(num_texts, capacity)

    def fill(self, cache: thdattn.KVCache, kept: Any, plan: ModelPlan) -> None:
        """Fill the cache with the keys and values that a forward kept of a pack."""
        _, saved = kept
        cache.fill(saved.k, saved.v, plan.plans[self._mask])

    def decode(self, x: Array, cache: thdattn.KVCache, rotation: Array) -> Array:
        """Return the residual stream after the attention for the next row of every text; rotation: of all positions."""
        ops, c, w = self._model.layers, self._model.config, self._w
        q, k, v = ops.decode_qkv(x, w["attention_norm"], w["qkv"], rotation, cache.lengths, c.heads, c.kv_heads)
        return ops.decode_linear(_flat(self._attention.decode(q, k, v, cache)), w["out"], x)


class Mixer:
    """Mamba-2 mixer between its two projections, with a norm of its output; arguments as of Attention."""

    name = "mamba"

    def __init__(self, model: Model, layer: int, weights: Weights, gradients: Weights) -> None:
        self._model, self._w, self._dw = model, weights, gradients
        c = model.config
        sizes = c.mixer_heads, c.mixer_head_dim, c.state_dim, c.mixer_groups, CONV_WIDTH
        self._mixer = thdattn.Mamba2Mixer(model.comm, *sizes, dtype=model.dtype, engine=model.attentions[0].engine)
        self._own = thdattn.Mamba2Weights(*(model.params[f"{layer}.{name}"] for name in thdattn.Mamba2Weights._fields))

    @property
    def part(self) -> Part:
        """Part of this mixer."""
        return Part(self.forward, self.backward)

    def forward(self, x: Array, branch: Array | None, plan: ModelPlan) -> tuple[Sums, Any]:
        """Compute the forward of a Part."""
        ops, w = self._model.layers, self._w
        x, h = ops.residual_norm_forward(x, branch, w["mixer_norm"])
        out, saved = self._mixer.forward(ops.linear_forward(h, w["zxbcdt"]), self._own, plan.plans[1])
        _, normal = ops.residual_norm_forward(out, None, w["out_norm"])
        return (x, ops.linear_forward(normal, w["out"])), (x, out, saved)

    def backward(self, dx: Array, plan: ModelPlan, kept: Any) -> Array:
        """Compute the backward of a Part."""
        ops, w, dw, (x, out, saved) = self._model.layers, self._w, self._dw, kept
        _, normal = ops.residual_norm_forward(out, None, w["out_norm"])
        dnormal = ops.linear_backward(dx, normal, w["out"], dw["out"])
        dout = ops.residual_norm_backward(dnormal, None, out, w["out_norm"], dw["out_norm"])
        dzxbcdt, dweights = self._mixer.backward(dout, saved)
        for name, gradient in dweights._asdict().items():
            dw[name] += gradient
        _, h = ops.residual_norm_forward(x, None, w["mixer_norm"])
        dh = ops.linear_backward(dzxbcdt, h, w["zxbcdt"], dw["zxbcdt"])
        return ops.residual_norm_backward(dh, dx, x, w["mixer_norm"], dw["mixer_norm"])

    def cache(self, num_texts: int, capacity: int) -> thdattn.Mamba2Cache:
        """Return a cache for the states of num_texts texts of any length."""
        return self._mixer.cache(num_texts)

    def fill(self, cache: thdattn.Mamba2Cache, kept: Any, plan: ModelPlan) -> None:
        """Fill the cache with the states that a forward kept of a pack."""
        *_, saved = kept
        cache.fill(saved)

    def decode(self, x: Array, cache: thdattn.Mamba2Cache, rotation: Array) -> Array:
        """Return the residual stream after the mixer for the next row of every text."""
        ops, w = self._model.layers, self._w
        out = self._mixer.decode(ops.decode_product(x, w["mixer_norm"], w["zxbcdt"]), self._own, cache)
        return ops.decode_linear(out, w["out"], x, w["out_norm"])


class Mlp:
    """SwiGLU; arguments as of Attention."""

    name = "mlp"

    def __init__(self, model: Model, layer: int, weights: Weights, gradients: Weights) -> None:
        self._model, self._w, self._dw = model, weights, gradients

    @property
    def part(self) -> Part:
        """Part of this mlp."""
        return Part(self.forward, self.backward)

    def forward(self, x: Array, branch: Array | None, plan: ModelPlan) -> tuple[Sums, Any]:
        """Compute the forward of a Part."""
        ops, w = self._model.layers, self._w
        x, h = ops.residual_norm_forward(x, branch, w["mlp_norm"])
        gate_up = ops.linear_forward(h, w["gate_up"])
        return (x, ops.linear_forward(ops.swiglu_forward(gate_up), w["down"])), (x, gate_up)

    def backward(self, dx: Array, plan: ModelPlan, kept: Any) -> Array:
        """Compute the backward of a Part."""
        ops, w, dw, (x, gate_up) = self._model.layers, self._w, self._dw, kept
        dswiglu = ops.linear_backward(dx, ops.swiglu_forward(gate_up), w["down"], dw["down"])
        dgate_up = ops.swiglu_backward(dswiglu, gate_up)
        _, h = ops.residual_norm_forward(x, None, w["mlp_norm"])
        dh = ops.linear_backward(dgate_up, h, w["gate_up"], dw["gate_up"])
        return ops.residual_norm_backward(dh, dx, x, w["mlp_norm"], dw["mlp_norm"])

    def decode(self, x: Array) -> Array:
        """Return the residual stream after the mlp for the next row of every text."""
        ops, w = self._model.layers, self._w
        return ops.decode_linear(ops.decode_swiglu(x, w["mlp_norm"], w["gate_up"]), w["down"], x)


def _flat(x: Array) -> Array:
    """Reshape (rows, heads, width) to (rows, heads * width); rows may be 0."""
    return x.reshape(len(x), x.shape[1] * x.shape[2])
