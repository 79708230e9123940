"""OneBlob encoding (Müller et al. 2019, "Neural Importance Sampling"): a bump around x_i, integrated over n bins.

The bump is the quartic kernel of radius 1/n. With u = n (z - x) clamped to [-1, 1], its integral up to z and the
derivatives of that with respect to x are

    Q      = (15/16) u (1 - (2/3) u² + (1/5) u⁴) + 1/2
    dQ/dx  = -(15/16) n (1 - u²)²
    d²Q/dx² = -(15/4) n² u (1 - u²)

What leaves [0, 1] on one side enters on the other: images of the bump at x - 1 and x + 1 count too, so bin k holds

    y_{i·n + k} = Σ_{m = -1, 0, 1} Q((k + 1)/n + m) - Q(k/n + m)

and mass of x outside [-1, 2] is lost.
"""

from __future__ import annotations

import numpy as np

from .per_dimension import PerDimension


class OneBlob(PerDimension):
    def derivative(self, x: np.ndarray, order: int) -> np.ndarray:
        n = self.spec.n_bins
        border = np.arange(-n, 2 * n + 1, dtype=x.dtype)[:, None]  # of the bins of [-1, 2], in bins
        u = np.clip(border - n * x[:, None], -1, 1)
        if order == 0:
            integral = (15 / 16) * u * (1 - u * u * (2 / 3 - u * u / 5)) + 0.5
        elif order == 1:
            integral = (-15 / 16 * n) * np.square(1 - u * u)
        else:
            integral = (-15 / 4 * n**2) * u * (1 - u * u)
        left, middle, right = np.diff(integral, axis=1).reshape(len(x), 3, n, -1).transpose(1, 0, 2, 3)
        return left + middle + right
