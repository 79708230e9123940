"""NovoGrad: moments of gradients that are normalised layer by layer."""

from __future__ import annotations

import math

import numpy as np

from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.specs import NovogradSpec

from .optimizer_contract import Leaf, decayed, unscaled


class Novograd(Leaf):
    """NovoGrad (Ginsburg et al. 2019). For every layer L with gradient γ_L:

        v_L ← β₂ v_L + (1 - β₂) ‖γ_L‖²                    one number a layer
        m ← β₁ m + (1 - β₁) γ / (√v_L + ε)
        w ← (1 - relative_decay·η) w - copysign(absolute_decay·η, w) - η m,      η = learning rate

    β₁ = β₂ = 0 in the first update. A layer is a weight matrix; what is not a matrix, the whole encoding, is one more
    layer. tiny-cuda-nn differs in both: it never clears the sum ‖γ_L‖², which so grows over layers and steps, and
    leaves encodings untrained.
    """

    state_numbers = {**Leaf.state_numbers, "n_updates": "n_updates"}
    state_arrays = ("first_moments", "second_moments")

    def __init__(self, spec: NovogradSpec, sizes: ParameterSizes):
        super().__init__(spec, sizes)
        self.layers = [*sizes.layers(), slice(sizes.n_matrix_params, sizes.n_params)]
        self.n_updates = 0
        self.first_moments = np.zeros(sizes.n_params, np.float32)
        self.second_moments = np.zeros(len(self.layers), np.float32)

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        self.current_step += 1
        if gradients is None:
            return
        self.n_updates += 1
        spec, eta = self.spec, self.learning_rate
        beta1, beta2 = (0.0, 0.0) if self.n_updates == 1 else (spec.beta1, spec.beta2)
        for i, layer in enumerate(self.layers):
            gamma = unscaled(gradients[layer], loss_scale)
            squared_norm = float(np.sum(np.square(gamma, dtype=np.float64)))
            v = beta2 * float(self.second_moments[i]) + (1 - beta2) * squared_norm
            self.second_moments[i] = v
            m = self.first_moments[layer]
            m *= np.float32(beta1)
            m += gamma * np.float32((1 - beta1) / (math.sqrt(v) + spec.epsilon))
            w = decayed(params[layer], spec.relative_decay * eta, spec.absolute_decay * eta)
            params[layer] = w - np.float32(eta) * m
