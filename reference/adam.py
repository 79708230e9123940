"""Adam, AdaBound included: the optimizer that every other one is compared with, and the nested one by default."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.specs import AdamSpec

from .optimizer_contract import Leaf, decayed, unscaled

BLOCK = 1 << 15
"""Parameters are updated in blocks of this many: gradient, moments and counters of a block stay in the L2 cache."""


class Adam(Leaf):
    """Adam (Kingma and Ba 2015) with tiny-cuda-nn's rules. For every parameter w with gradient γ (loss scale removed):

        skipped if its kind is not optimized, or if non-matrix and γ = 0 and `skip_zero_grad_non_matrix_params`
        γ ← γ + l2·w,  then clipped to ±gradient_clipping_magnitude unless that is 0
        m ← β₁ m + (1 - β₁) γ,      v ← β₂ v + (1 - β₂) γ²
        k ← k + 1,                  η = learning rate · factor · √(1 - β₂^k) / (1 - β₁^k)
        η_eff = η / (√v + ε), at most the largest float; adabound: within the bounds below
        w ← (1 - relative_decay·η) w - copysign(absolute_decay·η, w) - η_eff m
        w ← clipped to ±clipping_magnitude unless that is 0

    l2 and factor are `l2_reg` and 1 for matrices, `non_matrix_l2_reg` and `non_matrix_learning_rate_factor` otherwise.
    k counts the updates of that one parameter, so sparsely touched table entries are debiased by their own age; ε is
    added to the biased √v. AdaBound (Luo et al. 2019) bounds η_eff by 0.1 - 0.1/((1 - β₂) t + 1) and
    0.1 + 0.1/((1 - β₂) t), t being the step. A skipped parameter keeps m, v and k.
    """

    state_arrays = ("first_moments", "second_moments", "param_steps")

    def __init__(self, spec: AdamSpec, sizes: ParameterSizes):
        super().__init__(spec, sizes)
        self.largest_count = 0  # no parameter has been updated more often
        self.first_moments = np.zeros(sizes.n_params, np.float32)
        self.second_moments = np.zeros(sizes.n_params, np.float32)
        self.param_steps = np.zeros(sizes.n_params, np.uint32)
        self.debias = np.ones(1, np.float32)

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        self.current_step += 1
        if gradients is None:
            return
        self.largest_count += 1
        self._extend_debias()
        spec, n_matrix, n = self.spec, self.sizes.n_matrix_params, self.sizes.n_params
        with np.errstate(all="ignore"):
            if spec.optimize_matrix_params:
                for block in blocks(0, n_matrix):
                    self._update(params, block, gradients[block], spec.l2_reg, 1.0, loss_scale)
            if spec.optimize_non_matrix_params:
                factor = spec.non_matrix_learning_rate_factor
                for block in blocks(n_matrix, n):
                    touched: slice | np.ndarray = block
                    if spec.skip_zero_grad_non_matrix_params:
                        indices = np.flatnonzero(gradients[block] != 0)
                        if len(indices) < block.stop - block.start:
                            touched = indices + block.start
                    self._update(params, touched, gradients[touched], spec.non_matrix_l2_reg, factor, loss_scale)

    def _update(
        self,
        params: np.ndarray,
        where: slice | np.ndarray,
        gradients: np.ndarray,
        l2: float,
        learning_rate_factor: float,
        loss_scale: float,
    ) -> None:
        spec = self.spec
        w = params[where]
        gamma = unscaled(gradients, loss_scale)
        if l2 != 0:
            gamma = gamma + np.float32(l2) * w
        if spec.gradient_clipping_magnitude != 0:
            bound = np.float32(spec.gradient_clipping_magnitude)
            gamma = np.clip(gamma, -bound, bound)
        m = np.float32(spec.beta1) * self.first_moments[where]
        m += np.float32(1 - spec.beta1) * gamma
        v = np.float32(spec.beta2) * self.second_moments[where]
        v += np.float32(1 - spec.beta2) * gamma * gamma
        k = self.param_steps[where] + np.uint32(1)
        self.first_moments[where] = m
        self.second_moments[where] = v
        self.param_steps[where] = k

        eta = self.debias.take(k, mode="clip")
        eta *= np.float32(self.learning_rate) * np.float32(learning_rate_factor)
        rate = np.sqrt(v)
        rate += np.float32(spec.epsilon)
        np.divide(eta, rate, out=rate)
        np.clip(rate, *self._rate_bounds(), out=rate)
        if spec.relative_decay != 0 or spec.absolute_decay != 0:
            w = decayed(w, np.float32(spec.relative_decay) * eta, np.float32(spec.absolute_decay) * eta)
        rate *= m
        w = w - rate
        if spec.clipping_magnitude != 0:
            bound = np.float32(spec.clipping_magnitude)
            w = np.clip(w, -bound, bound)
        params[where] = w

    def _rate_bounds(self) -> tuple[np.float32, np.float32]:
        if not self.spec.adabound:
            return np.float32(0), np.finfo(np.float32).max
        t = (1 - self.spec.beta2) * self.current_step
        return np.float32(0.1 - 0.1 / (t + 1)), np.float32(0.1 + 0.1 / t)

    def _extend_debias(self) -> None:
        """`debias[k]` = √(1 - β₂^k)/(1 - β₁^k) for every k that a parameter can have reached.

        From some k on β^k is below 1e-9 and the entry 1 in float32; the table ends there, and later counts read its
        last entry.
        """
        n, slowest = len(self.debias), max(self.spec.beta1, self.spec.beta2)
        last = math.ceil(math.log(1e-9) / math.log(slowest)) if slowest > 0 else 1
        if n > min(self.largest_count, last):
            return
        k = np.arange(1, min(2 * max(n, self.largest_count), last) + 1, dtype=np.float64)
        correction = np.sqrt(1 - self.spec.beta2**k) / (1 - self.spec.beta1**k)
        self.debias = np.concatenate([[1.0], correction]).astype(np.float32)

    def load_state(self, state: Mapping[str, Any], path: str = "optimizer state") -> None:
        super().load_state(state, path)
        self.largest_count = int(self.param_steps.max(initial=0))


def blocks(start: int, stop: int) -> Iterator[slice]:
    return (slice(first, min(first + BLOCK, stop)) for first in range(start, stop, BLOCK))
