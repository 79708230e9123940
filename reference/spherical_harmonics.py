"""Spherical harmonics encoding of a direction: the real harmonics of the first `degree` bands, as polynomials.

The input is mapped to d = (X, Y, Z) = 2x - 1 and not normalised; off the unit sphere the polynomials hold as written.
Band l < degree and order m, |m| ≤ l, stand in column l(l + 1) + m:

    y_l^m = √2 K_l^m Re((X + iY)^m) P_l^m(Z)        m > 0       K_l^m = √((2l + 1) / 4π · (l - |m|)! / (l + |m|)!)
    y_l^0 = K_l^0 P_l^0(Z)
    y_l^m = √2 K_l^m Im((X + iY)^|m|) P_l^|m|(Z)    m < 0

with the Condon-Shortley sign in P_l^m = (-1)^m d^m/dZ^m of the Legendre polynomial P_l, which the usual recurrence
gives upward in l from P_m^m = (1 - 2m) P_{m-1}^{m-1}:

    (l - m) P_l^m = (2l - 1) Z P_{l-1}^m - (l + m - 1) P_{l-2}^m

Derivatives are shifts: d/dZ P_l^m = -P_l^{m+1}, and ∂_X^a ∂_Y^b (X + iY)^m = m!/(m-a-b)! i^b (X + iY)^{m-a-b}.
Each derivative by x carries a factor 2.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from numba_tcnn.specs import SphericalHarmonicsSpec

from .encoding_contract import WHOLE_BATCH, Samples
from .precision import Precision


class SphericalHarmonics:
    padding_value = 1.0

    def __init__(self, spec: SphericalHarmonicsSpec, precision: Precision):
        self.spec = spec
        self.precision = precision

    def forward(self, x: np.ndarray, params: np.ndarray, out: np.ndarray, samples: Samples = WHOLE_BATCH) -> np.ndarray:
        out[:] = Harmonics(self.direction(x), self.spec.degree).derivative(0, 0, 0).T
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
            harmonics = Harmonics(self.direction(context), self.spec.degree)
            for g in range(3):
                dL_dx[:, g] += 2 * np.add.reduce(dL_dout.T * harmonics.derivative_along(g))

    def backward_backward_input(
        self,
        x: np.ndarray,
        dL_dy: np.ndarray,
        dL_ddx: np.ndarray,
        params: np.ndarray,
        samples: Samples = WHOLE_BATCH,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """With the gradient ∇y and the second derivatives ∂_g ∂_o y: dS/du = Σ_g v_g ∂_g y, and
        dS/dx_g = Σ_o v_o Σ_j u_j ∂_g ∂_o y_j."""
        harmonics = Harmonics(self.direction(x), self.spec.degree)
        dL_ddLdy, dL_dx = np.zeros_like(dL_dy), np.zeros_like(x)
        for g in range(3):
            dL_ddLdy += (2 * dL_ddx[:, g] * harmonics.derivative_along(g)).T
        for g, o in itertools.combinations_with_replacement(range(3), 2):
            second = 4 * np.add.reduce(dL_dy.T * harmonics.derivative_along(g, o))
            dL_dx[:, g] += dL_ddx[:, o] * second
            if g != o:
                dL_dx[:, o] += dL_ddx[:, g] * second
        return dL_ddLdy, np.zeros_like(params), dL_dx

    def direction(self, x: np.ndarray) -> np.ndarray:
        """d [3, B] of x [B, 3]."""
        return self.precision.multiply_add(2, x.T, -1)


class Harmonics:
    """All derivatives of the harmonics at directions d [3, B]."""

    def __init__(self, d: np.ndarray, degree: int):
        self.degree = degree
        self.dtype = d.dtype
        x_plus_iy = d[0] + 1j * d[1]
        self.powers = [np.ones_like(x_plus_iy)]  # of X + iY
        for _ in range(degree - 1):
            self.powers.append(self.powers[-1] * x_plus_iy)
        self.legendre = associated_legendre(d[2], degree)

    def derivative_along(self, *dims: int) -> np.ndarray:
        """The derivative once by each of the given dimensions (0 is X, 1 is Y, 2 is Z), [degree², B]."""
        return self.derivative(dims.count(0), dims.count(1), dims.count(2))

    def derivative(self, a: int, b: int, c: int) -> np.ndarray:
        """∂_X^a ∂_Y^b ∂_Z^c of all columns, [degree², B]."""
        result = np.zeros((self.degree**2, len(self.powers[0])), self.dtype)
        for l in range(self.degree):
            for m in range(a + b, l - c + 1):
                polynomial = (-1) ** c * normalisation(l, m) * self.legendre[l, m + c]
                circular = math.perm(m, a + b) * 1j**b * self.powers[m - a - b]
                result[l * (l + 1) + m] = circular.real * polynomial
                if m > 0:
                    result[l * (l + 1) - m] = circular.imag * polynomial
        return result


def normalisation(l: int, m: int) -> float:
    """K_l^m, and the factor √2 where there is a harmonic each for m and -m."""
    factor = (2 * l + 1) / (4 * math.pi) * math.factorial(l - m) / math.factorial(l + m)
    return math.sqrt(factor if m == 0 else 2 * factor)


def associated_legendre(z: np.ndarray, degree: int) -> dict[tuple[int, int], np.ndarray]:
    """P_l^m(z) by (l, m) for 0 ≤ m ≤ l < degree, without the factor (1 - z²)^{m/2} of the functions on the sphere."""
    p = {(0, 0): np.ones_like(z)}
    for m in range(1, degree):
        p[m, m] = (1 - 2 * m) * p[m - 1, m - 1]
    for m in range(degree - 1):
        p[m + 1, m] = (2 * m + 1) * z * p[m, m]
        for l in range(m + 2, degree):
            p[l, m] = ((2 * l - 1) * z * p[l - 1, m] - (l + m - 1) * p[l - 2, m]) / (l - m)
    return p
