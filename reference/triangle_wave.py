"""Triangle waves of n octaves of every input dimension (Müller et al. 2021, "Neural Radiance Caching").

    y_{i·n + k} = 4 |v - ⌊v⌋ - 1/2| - 1,     v = 2^(k-1) x_i + k/4,  k < n

with the range [-1, 1], the period 2^(1-k) and a phase that moves on by a quarter period per octave. The slope is
2^(k+1), negative in the first half of each period and positive in the second; there is no curvature.
"""

from __future__ import annotations

import numpy as np

from .frequency import octaves, phases
from .per_dimension import PerDimension


class TriangleWave(PerDimension):
    def derivative(self, x: np.ndarray, order: int) -> np.ndarray:
        n_frequencies = self.spec.n_frequencies
        if order == 2:
            return np.zeros((1, 1, 1), x.dtype)
        v = phases(x, n_frequencies) + np.arange(n_frequencies, dtype=x.dtype)[:, None] / 4
        fraction = v - np.floor(v)
        if order == 0:
            return 4 * np.abs(fraction - 0.5) - 1
        return 2 * octaves(n_frequencies, x.dtype) * np.where(fraction < 0.5, -1, 1).astype(x.dtype)
