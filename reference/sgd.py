"""Gradient descent."""

from __future__ import annotations

import numpy as np

from .optimizer_contract import Leaf, unscaled


class Sgd(Leaf):
    """Stochastic gradient descent on all parameters, matrices or not:

    w ← w - learning rate · (γ + l2_reg · w)
    """

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        self.current_step += 1
        if gradients is None:
            return
        update = np.float32(self.spec.l2_reg) * params
        update += unscaled(gradients, loss_scale)
        update *= np.float32(self.learning_rate)
        params -= update
