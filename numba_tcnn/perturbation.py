"""Noise on a model's outputs during training: the `perturbation_sigma` of a Trainer."""

from __future__ import annotations

import numpy as np

from .initial_values import draw_params, generator, uniform_of_threads
from .specs import ModelSpec

LOGISTIC_SCALE = 0.551328895
"""√3/π: a logistic distribution of this scale has variance 1."""
SMALLEST_PROBABILITY = 1e-9


class LogisticNoise:
    """ε = logit(r) · σ · √3/π with r uniform: logistic noise of mean 0 and standard deviation σ.

    r comes from the generator that tiny-cuda-nn's Trainer draws the initial parameters from, continued after them, and
    in the order of its GPU threads: a number for each element of the outputs [batch, padded_output_width], padding
    included. `random.state` is all that changes.
    """

    def __init__(self, spec: ModelSpec, seed: int, sigma: float):
        self.sigma = sigma
        self.shape = (spec.n_output_dims, spec.padded_output_width)
        self.random = generator(seed, "trainer")
        draw_params(spec, self.random)

    def draw(self, batch: int) -> np.ndarray:
        """ε for the next batch, float64 [batch, n_output_dims]."""
        n_output_dims, padded_width = self.shape
        r = uniform_of_threads(self.random, batch * padded_width).reshape(batch, padded_width)[:, :n_output_dims]
        r = np.clip(r.astype(np.float64), SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
        return np.log(r / (1 - r)) * (self.sigma * LOGISTIC_SCALE)
