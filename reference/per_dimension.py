"""Encodings without parameters that treat the input dimensions alike and apart: y_{iK+k} = f_k(x_i), k < K.

Given the derivatives f_k, f'_k and f''_k, with u = dL/dy and v = dL/d(dL/dx):

    dL/dx_i           = Σ_k u_{iK+k} f'_k(x_i)
    S                 = Σ_i v_i dL/dx_i
    dS/du_{iK+k}      = v_i f'_k(x_i)
    dS/dx_i           = v_i Σ_k u_{iK+k} f''_k(x_i)
"""

from __future__ import annotations

import numpy as np

from numba_tcnn.specs import EncodingSpec

from .encoding_contract import WHOLE_BATCH, Samples
from .precision import Precision


class PerDimension:
    """A subclass gives `derivative`. Arrays inside are [D, K, B]: features are stored feature by feature."""

    padding_value = 1.0

    def __init__(self, spec: EncodingSpec, precision: Precision):
        self.spec = spec
        self.precision = precision

    def derivative(self, x: np.ndarray, order: int) -> np.ndarray:
        """d^order f_k / dx^order at x [D, B] for all k, as [D, K, B] or what broadcasts to it; order is 0, 1 or 2."""
        raise NotImplementedError

    def forward(self, x: np.ndarray, params: np.ndarray, out: np.ndarray, samples: Samples = WHOLE_BATCH) -> np.ndarray:
        by_dimension(out, x.shape[1])[:] = self.derivative(x.T, 0)
        return x

    def backward(
        self,
        context: np.ndarray,
        params: np.ndarray,
        dL_dout: np.ndarray,
        dL_dparams: np.ndarray | None,
        dL_dx: np.ndarray | None,
    ) -> None:
        if dL_dx is not None:
            x = context
            dL_dx += (by_dimension(dL_dout, x.shape[1]) * self.derivative(x.T, 1)).sum(axis=1).T

    def backward_backward_input(
        self,
        x: np.ndarray,
        dL_dy: np.ndarray,
        dL_ddx: np.ndarray,
        params: np.ndarray,
        samples: Samples = WHOLE_BATCH,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        u, v = by_dimension(dL_dy, x.shape[1]), dL_ddx.T
        dL_ddLdy = np.empty_like(dL_dy)
        by_dimension(dL_ddLdy, x.shape[1])[:] = v[:, None] * self.derivative(x.T, 1)
        dL_dx = (v * (u * self.derivative(x.T, 2)).sum(axis=1)).T
        return dL_ddLdy, np.zeros_like(params), dL_dx


def by_dimension(features: np.ndarray, n_dims: int) -> np.ndarray:
    """Features [B, D·K] as a view [D, K, B]: splitting an axis never copies."""
    batch, width = features.shape
    return features.T.reshape(n_dims, width // n_dims, batch)
