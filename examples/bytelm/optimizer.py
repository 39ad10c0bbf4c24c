"""AdamW on the flat weights of a model, with decoupled weight decay and clipping by the norm of the whole gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from layers import AdamWStep
from model import Model

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


class AdamW:
    """Optimizer of one model. Every rank has the whole gradient, so every rank takes the same step.

    Args:
        model: the model with the weights.
        weight_decay: of the matrices; gains of the norms do not decay.
        max_norm: the gradient is scaled down to this norm if it is longer.

    Attributes:
        state: for checkpoints: "mean" and "square", flat like the weights and on the same device, and "step", a 0-d
            int64 on the host. Load by writing into these arrays.
    """

    def __init__(self, model: Model, weight_decay: float = 0.1, max_norm: float = 1.0) -> None:
        self.model = model
        self.weight_decay = weight_decay
        self.max_norm = max_norm
        zeros = model.layers.xp.zeros_like
        self.state: dict[str, Any] = {
            "mean": zeros(model.weights), "square": zeros(model.weights), "step": np.zeros((), np.int64),
        }

    def step(self, gradient: Any, lr: float) -> Any:
        """Update the weights, and the copy that the layers read. The host does not wait for the GPU.

        Args:
            gradient: flat, of the mean loss, summed over all ranks; unchanged.
            lr: learning rate of this step.

        Returns:
            0-d array, the norm of the gradient before clipping.
        """
        layers, model = self.model.layers, self.model
        self.state["step"] += 1
        number = int(self.state["step"])
        norm = layers.l2_norm(gradient)
        matrices, gains = slice(None, model.num_matrix_weights), slice(model.num_matrix_weights, None)
        for part, decay in ((matrices, self.weight_decay), (gains, 0.0)):
            flat = (x[part] for x in (model.weights, model.copy, gradient, self.state["mean"], self.state["square"]))
            layers.adamw_update(*flat, norm, AdamWStep(
                beta1=BETA1, beta2=BETA2, size=lr / (1 - BETA1**number), square_scale=1 / (1 - BETA2**number),
                epsilon=EPSILON, keep=1 - lr * decay, max_norm=self.max_norm,
            ))
        return norm
