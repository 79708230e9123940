"""Wrappers that change when the nested optimizer steps, or how far."""

from __future__ import annotations

import numpy as np

from numba_tcnn.learning_rates import DecayingRate
from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.specs import BatchedSpec, ExponentialDecaySpec

from .optimizer_contract import Optimizer, Wrapper, unscaled


class ExponentialDecay(DecayingRate, Wrapper):
    """Multiplies the nested learning rate by `decay_base` every `decay_interval` steps. Before each step, with t the
    steps that the nested optimizer has counted until then:

        φ ← 1                  if t = 0
        φ ← φ · decay_base     if decay_start ≤ t ≤ decay_end and (t - decay_start) mod decay_interval = 0
        nested learning rate ← base · φ

    so the first decay takes effect in step number decay_start + 1. `base` is the nested rate at the beginning. Setting
    the learning rate means the rate as it is now: base becomes value / φ (if φ is 0, it starts again from 1).
    """

    def __init__(self, spec: ExponentialDecaySpec, nested: Optimizer, sizes: ParameterSizes):
        super().__init__(spec, nested, sizes)
        self.start_rate()

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        self.decay()
        self.nested.step(params, gradients, loss_scale)


class Batched(Wrapper):
    """One nested step on the mean gradient of every N = `batch_size_multiplier` steps, as if of a batch N times larger:

        γ̄ = (γ_1 + ... + γ_N) / N

    Parameters stand still in between. `current_step` counts the calls, not the nested steps. Gradients that were not
    finite are left out of the mean; without any left, the nested optimizer has a step without gradients.
    """

    state_numbers = {"step": "current_step", "n_pooled": "n_pooled"}
    state_arrays = ("pool",)
    current_step = 0

    def __init__(self, spec: BatchedSpec, nested: Optimizer, sizes: ParameterSizes):
        super().__init__(spec, nested, sizes)
        self.current_step = 0
        self.n_pooled = 0
        self.pool = np.zeros(sizes.n_params, np.float32)

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        self.current_step += 1
        if gradients is not None:
            self.pool += unscaled(gradients, loss_scale)
            self.n_pooled += 1
        if self.current_step % self.spec.batch_size_multiplier == 0:
            self.nested.step(params, self.pool if self.n_pooled else None, loss_scale=max(1, self.n_pooled))
            self.pool[...] = 0
            self.n_pooled = 0
