"""Frequency encoding (Mildenhall et al. 2020, "NeRF"): sines and cosines of n octaves of every input dimension.

    y_{i·2n + 2k + p} = sin(2^k π x_i + p π/2),     k < n, p = 0 (sine) or 1 (cosine)

With the phase φ_k = 2^(k-1) x, counted in periods, the m-th derivative is (2^k π)^m sin(2π φ_k + (p + m) π/2).
"""

from __future__ import annotations

import numpy as np

from .per_dimension import PerDimension


class Frequency(PerDimension):
    def derivative(self, x: np.ndarray, order: int) -> np.ndarray:
        n_dims, batch = x.shape
        n_frequencies = self.spec.n_frequencies
        angle = x.dtype.type(2 * np.pi) * phases(x, n_frequencies)
        sine, cosine = np.sin(angle), np.cos(angle)
        turned = (sine, cosine, -sine, -cosine)  # by quarter turns
        result = np.stack([turned[order], turned[order + 1]], axis=2)  # [D, n, 2, B]
        result *= (np.pi * octaves(n_frequencies, x.dtype)[:, None]) ** order
        return result.reshape(n_dims, 2 * n_frequencies, batch)


def octaves(n_frequencies: int, dtype: np.dtype) -> np.ndarray:
    """2^k as a column [n, 1]."""
    return np.exp2(np.arange(n_frequencies, dtype=dtype))[:, None]


def phases(x: np.ndarray, n_frequencies: int) -> np.ndarray:
    """The fractional part of 2^(k-1) x, with the sign of x, for k < n: [D, n, B] from [D, B].

    Taken as the remainder of x by the period 2^(1-k), which is exact: high octaves lose no digits, and none overflows.
    """
    frequencies = octaves(n_frequencies, x.dtype) / 2
    return np.fmod(x[:, None], 1 / frequencies) * frequencies
