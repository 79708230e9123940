"""Identity encoding: y_j = scale·x_j + offset, one rounding; dL/dx_j = scale·dL/dy_j."""

from __future__ import annotations

import numpy as np

from numba_tcnn.specs import IdentitySpec

from .precision import Precision


class Identity:
    padding_value = 1.0

    def __init__(self, spec: IdentitySpec, precision: Precision):
        self.spec = spec
        self.precision = precision

    def forward(self, x: np.ndarray, params: np.ndarray, out: np.ndarray) -> None:
        out[:] = self.precision.multiply_add(self.spec.scale, x, self.spec.offset)

    def backward(
        self,
        context: None,
        params: np.ndarray,
        dL_dout: np.ndarray,
        dL_dparams: np.ndarray | None,
        dL_dx: np.ndarray | None,
    ) -> None:
        if dL_dx is not None:
            dL_dx += dL_dout * self.precision.compute.type(self.spec.scale)
