"""Shampoo: gradients of a matrix, preconditioned from the left and from the right."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass

import numpy as np

from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.specs import ShampooSpec

from .matrix_roots import inverse_fourth_roots
from .optimizer_contract import Leaf, blend, decayed, unscaled

STEPS_BETWEEN_ROOTS = 10
STEPS_BETWEEN_LATE_ROOTS = 200
FIRST_LATE_STEP = 100


@dataclass(frozen=True)
class Matrix:
    """Views of what the optimizer keeps for one weight matrix [rows, columns]."""

    where: slice  # in the flat parameters
    shape: tuple[int, int]
    left: np.ndarray  # L [rows, rows]
    right: np.ndarray  # R [columns, columns]
    left_root: np.ndarray  # of the shape of L
    right_root: np.ndarray  # of the shape of R
    momentum: np.ndarray  # s [rows, columns]


class Shampoo(Leaf):
    """Shampoo (Gupta et al. 2018) with Adam's step length, tiny-cuda-nn's variant. In update number t (from 1), where
    avg_d is the exponential average without bias (`blend`):

        γ ← γ + l2_reg·w,   m ← avg_β₁(γ),   v ← avg_β₂(γ²),   u = m / (√v + ε)        all parameters

    Every weight matrix, u and G as [rows, columns], G = u if `cg_on_momentum`, else the gradient without l2:

        L ← avg_β₃(G Gᵀ),   R ← avg_β₃(Gᵀ G)
        s ← avg_β_shampoo(L^(-1/4) u R^(-1/4)),   η = learning rate · ‖u‖/‖s‖         from t = 2 on
        w ← (1 - relative_decay·η) w - copysign(absolute_decay·η, w) - η s

    Without `frobenius_normalization` η is the learning rate. Everything else (the encoding) takes the step u itself,
    from t = 1 on. s averages from t = 2 with the weights that belong to t, as if it had been 0 at t = 1.

    Roots are those of (1 - κ) A + κ I, A being L or R, κ = `identity`. After the first update all are computed. Later
    a group of matrices, a run of neighbours of equal shape, has its turn whenever t is a multiple of
    q = ⌊10 / n_groups⌋ (⌊200 / n_groups⌋ from t = 100 on; at least 1): group number ⌊t/q⌋ mod n_groups. The root
    itself is computed in float64; a matrix that has none keeps the one before, at first the identity, with a warning.
    """

    state_numbers = {**Leaf.state_numbers, "n_updates": "n_updates"}
    state_arrays = (
        "first_moments",
        "second_moments",
        "left_products",
        "right_products",
        "left_roots",
        "right_roots",
        "matrix_momentum",
    )

    def __init__(self, spec: ShampooSpec, sizes: ParameterSizes):
        super().__init__(spec, sizes)
        n_left = sum(rows * rows for rows, _ in sizes.layer_sizes)
        n_right = sum(columns * columns for _, columns in sizes.layer_sizes)
        self.n_updates = 0
        self.first_moments = np.zeros(sizes.n_params, np.float32)
        self.second_moments = np.zeros(sizes.n_params, np.float32)
        self.left_products = np.zeros(n_left, np.float32)
        self.right_products = np.zeros(n_right, np.float32)
        self.left_roots = np.zeros(n_left, np.float32)
        self.right_roots = np.zeros(n_right, np.float32)
        self.matrix_momentum = np.zeros(sizes.n_matrix_params, np.float32)
        self.matrices = self._matrices()
        self.groups = [list(run) for _, run in itertools.groupby(self.matrices, key=lambda matrix: matrix.shape)]
        for matrix in self.matrices:
            np.fill_diagonal(matrix.left_root, 1)
            np.fill_diagonal(matrix.right_root, 1)

    def _matrices(self) -> list[Matrix]:
        matrices, left, right = [], 0, 0
        for where, (rows, columns) in zip(self.sizes.layers(), self.sizes.layer_sizes, strict=True):
            own_left, own_right = slice(left, left + rows * rows), slice(right, right + columns * columns)
            matrices.append(
                Matrix(
                    where,
                    (rows, columns),
                    self.left_products[own_left].reshape(rows, rows),
                    self.right_products[own_right].reshape(columns, columns),
                    self.left_roots[own_left].reshape(rows, rows),
                    self.right_roots[own_right].reshape(columns, columns),
                    self.matrix_momentum[where].reshape(rows, columns),
                )
            )
            left, right = own_left.stop, own_right.stop
        return matrices

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        self.current_step += 1
        if gradients is None:
            return
        self.n_updates += 1
        spec, t = self.spec, self.n_updates
        gradients = unscaled(gradients, loss_scale)
        gamma = gradients + np.float32(spec.l2_reg) * params
        blend(self.first_moments, gamma, spec.beta1, t)
        blend(self.second_moments, np.square(gamma), spec.beta2, t)
        u = self.first_moments / (np.sqrt(self.second_moments) + np.float32(spec.epsilon))

        for matrix in self.matrices:
            G = (u if spec.cg_on_momentum else gradients)[matrix.where].reshape(matrix.shape)
            blend(matrix.left, G @ G.T, spec.beta3, t)
            blend(matrix.right, G.T @ G, spec.beta3, t)
            if t > 1:
                self._move_matrix(matrix, params, u[matrix.where].reshape(matrix.shape))
        rest = slice(self.sizes.n_matrix_params, self.sizes.n_params)
        self._move(params, rest, u[rest], self.learning_rate)
        for group in self._due_groups():
            self._compute_roots([matrix.left for matrix in group], [matrix.left_root for matrix in group])
            self._compute_roots([matrix.right for matrix in group], [matrix.right_root for matrix in group])

    def _move_matrix(self, matrix: Matrix, params: np.ndarray, u: np.ndarray) -> None:
        s = matrix.momentum
        blend(s, matrix.left_root @ u @ matrix.right_root, self.spec.beta_shampoo, self.n_updates)
        eta = self.learning_rate
        if self.spec.frobenius_normalization:
            length = norm(s)
            eta = eta * norm(u) / length if length > 0 else 0.0
        self._move(params, matrix.where, s.reshape(-1), eta)

    def _move(self, params: np.ndarray, where: slice, direction: np.ndarray, eta: float) -> None:
        w = decayed(params[where], self.spec.relative_decay * eta, self.spec.absolute_decay * eta)
        params[where] = w - np.float32(eta) * direction

    def _due_groups(self) -> list[list[Matrix]]:
        """The groups whose roots are computed after this update."""
        t, n_groups = self.n_updates, len(self.groups)
        if t == 1 or n_groups == 0:
            return self.groups
        q = max(1, (STEPS_BETWEEN_ROOTS if t < FIRST_LATE_STEP else STEPS_BETWEEN_LATE_ROOTS) // n_groups)
        return [self.groups[t // q % n_groups]] if t % q == 0 else []

    def _compute_roots(self, products: list[np.ndarray], roots: list[np.ndarray]) -> None:
        """Replaces `roots` by those of `products`, matrices of one shape."""
        kappa = self.spec.identity
        stack = np.stack(products).astype(np.float64)
        regularised = (1 - kappa) * (stack + stack.transpose(0, 2, 1)) / 2 + kappa * np.eye(stack.shape[-1])
        for root, new in zip(roots, inverse_fourth_roots(regularised), strict=True):
            if np.isfinite(new).all():
                root[...] = new
            else:
                warnings.warn(
                    f"Shampoo: a {len(new)} x {len(new)} matrix has no inverse root, the last one stays in use; "
                    f"a larger `identity` (now {kappa:g}) makes it regular",
                    RuntimeWarning,
                    stacklevel=2,
                )


def norm(values: np.ndarray) -> float:
    """√(Σ values²), summed in float64."""
    return math.sqrt(float(np.sum(np.square(values, dtype=np.float64))))
