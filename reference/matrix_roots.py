"""The inverse fourth root of symmetric positive definite matrices, by products alone."""

from __future__ import annotations

import numpy as np

MAX_ITERATIONS = 200
ITERATIONS_BETWEEN_TESTS = 5
SQUARED_TOLERANCE = 1e-20
"""Of ΣΔX² relative to ΣX²: far below float32, in which roots are stored, and far above float64's roundings."""


def inverse_fourth_roots(matrices: np.ndarray) -> np.ndarray:
    """A^(-1/4) of each of a stack of matrices [n_matrices, n, n], float64; NaN for one that has no such root.

    Coupled Newton iteration (Iannazzo 2006; Anil et al. 2020 for its use here). M goes to the identity while
    X = A^(-1/4) M^(1/4) holds throughout:

        ρ = (Σ_ij (A⁴)_ij²)^(1/8)                    at least the largest eigenvalue
        M₀ = (√2/ρ) A,      X₀ = (√2/ρ)^(1/4) I
        T = (5 I - M) / 4,  X ← X T,  M ← T⁴ M

    Small eigenvalues of M first grow by (5/4)⁴ an iteration, then all converge quadratically. A singular A never gets
    there: its X grows until the iteration gives up.
    """
    identity = np.eye(matrices.shape[-1])
    with np.errstate(all="ignore"):
        square = matrices @ matrices
        largest = np.sum(np.square(square @ square), axis=(1, 2), keepdims=True) ** 0.125
        scale = np.sqrt(2.0) / largest
        M = scale * matrices
        X = scale**0.25 * identity
        for iteration in range(1, MAX_ITERATIONS + 1):
            T = (5 * identity - M) / 4
            previous, X = X, X @ T
            T_squared = T @ T
            M = T_squared @ (T_squared @ M)
            if iteration % ITERATIONS_BETWEEN_TESTS == 0:
                change = np.sum(np.square(X - previous), axis=(1, 2))
                converged = change < SQUARED_TOLERANCE * np.sum(np.square(X), axis=(1, 2))
                if np.all(converged | ~np.isfinite(change)):
                    break
    return np.where(converged[:, None, None], X, np.nan)
