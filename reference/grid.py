"""Multiresolution grid encoding (Müller et al. 2022): each level is a lattice whose vertices carry feature vectors.

Level ℓ has cells of size 1/s (s = `GridLevel.scale`). In each dimension d

    q_d = s x_d + 1/2,   g_d = ⌊q_d⌋,   t_d = q_d - g_d,   ω_d = t_d (Linear) or t_d² (3 - 2 t_d) (Smoothstep)

and the features are the interpolation over the 2^D corners c of the cell, whose bit d chooses g_d or g_d + 1:

    y_f = Σ_c W_c θ[row(c)]_f,      W_c = Π_d (bit d of c ? ω_d : 1 - ω_d)

Nearest takes the single vertex g. A vertex's row in the level's table is its dense index Σ_d g_d N^d or, where the
lattice is larger than a Hash level's table, the exclusive or of g_d·prime_d; either way modulo the table's size.
Vertices are uint32 and wrap, so every input has a row: cells left of 0 wrap around the table, as in tiny-cuda-nn.

Backward, with u = dL/dy:

    dL/dθ[row(c)]_f += W_c u_f
    dL/dx_g = s ω'_g Σ_c ± Π_{d≠g} (ω_d or 1 - ω_d) Σ_f u_f θ[row(c)]_f      (+ where bit g of c is set)

Columns are level-major: column ℓF + f. The code loops over levels, whose tables stay in the cache, and works on all
samples at once; B is the batch, C = 2^D (1 for Nearest) the number of corners.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.layout import GridLevel, grid_levels
from numba_tcnn.specs import GridSpec

from .precision import Precision

PRIMES = {
    "CoherentPrime": (1, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737),
    "Prime": (1958374283, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737),
    "ReversedPrime": (2165219737, 1434869437, 2097192037, 3674653429, 805459861, 2654435761, 1958374283),
}

MAX_UINT32_RESOLUTION = (2**32 - 1, 65535, 1625, 255, 84, 40, 23, 15, 11, 9)
"""For D = 1, 2, ...: the largest N with N^D < 2^32. Finer dense lattices are indexed in uint64."""

INT32_LIMIT = 2.0**31


@dataclass(frozen=True)
class Corners:
    """Where each sample lies in one level.

    row     [C, B]  rows of the level's table
    weight  [C, B]  W_c
    omega   [D, B]  ω_d
    slope   [D, B]  dω_d/dt_d
    """

    row: np.ndarray
    weight: np.ndarray
    omega: np.ndarray
    slope: np.ndarray


class Grid:
    """The encoding of a `GridSpec`. x is [B, D]; parameters are the flat table of all levels."""

    padding_value = 0.0

    def __init__(self, spec: GridSpec, precision: Precision):
        if spec.stochastic_interpolation or spec.fixed_point_pos:
            raise EngineUnavailable("Grid: stochastic_interpolation and fixed_point_pos are not implemented")
        if spec.hash not in PRIMES:
            raise EngineUnavailable(f"Grid: the hash {spec.hash} is not implemented")
        if spec.type == "Hash" and spec.n_input_dims > len(PRIMES[spec.hash]):
            raise EngineUnavailable(f"Grid: hashing is defined for up to {len(PRIMES[spec.hash])} input dims")
        self.spec = spec
        self.precision = precision
        self.levels = grid_levels(spec)

    def forward(self, x: np.ndarray, params: np.ndarray, out: np.ndarray) -> list[Corners]:
        """Writes the features of x into `out` [B, L·F]; returns what `backward` needs."""
        coordinates = np.ascontiguousarray(x.T)
        n_features = self.spec.n_features_per_level
        table = params.reshape(-1, n_features)
        context = []
        for i, level in enumerate(self.levels):
            corners = self.corners(coordinates, level)
            values = rows_of(table, level).take(corners.row, axis=0)
            for f in range(n_features):
                out[:, i * n_features + f] = np.add.reduce(values[:, :, f] * corners.weight, axis=0)
            context.append(corners)
        return context

    def backward(
        self,
        context: list[Corners],
        params: np.ndarray,
        dL_dout: np.ndarray,
        dL_dparams: np.ndarray | None,
        dL_dx: np.ndarray | None,
    ) -> None:
        """Adds to dL/dparams (as `params`) and dL/dx [B, D] where they are given; dL_dout is [B, L·F]."""
        n_features = self.spec.n_features_per_level
        table = params.reshape(-1, n_features)
        gradient = None if dL_dparams is None else dL_dparams.reshape(-1, n_features)
        for i, (level, corners) in enumerate(zip(self.levels, context, strict=True)):
            u = np.ascontiguousarray(dL_dout[:, i * n_features : (i + 1) * n_features].T)  # [F, B]
            if gradient is not None:
                scatter(corners, u, rows_of(gradient, level))
            if dL_dx is not None and self.spec.interpolation != "Nearest":
                values = rows_of(table, level).take(corners.row, axis=0)
                projected = np.zeros_like(corners.weight)
                for f in range(n_features):
                    projected += values[:, :, f] * u[f]
                dL_dx += (level.scale * corners.slope * directional_differences(projected, corners.omega)).T

    def corners(self, coordinates: np.ndarray, level: GridLevel) -> Corners:
        """The vertices around every sample of `coordinates` [D, B]."""
        cell, t = cell_and_fraction(self.precision.multiply_add(level.scale, coordinates, 0.5))
        if self.spec.interpolation == "Nearest":
            vertices = cell[:, None, :]
            weight = np.ones_like(t[:1])
            omega = slope = t
        else:
            vertices = np.stack([cell, cell + np.uint32(1)], axis=1)  # [D, 2, B]
            smooth = self.spec.interpolation == "Smoothstep"
            omega = t * t * (3 - 2 * t) if smooth else t
            slope = 6 * t * (1 - t) if smooth else np.ones_like(t)
            weight = outer(np.multiply, [np.stack([1 - w, w]) for w in omega])
        return Corners(self.rows(vertices, level), weight, omega, slope)

    def rows(self, vertices: np.ndarray, level: GridLevel) -> np.ndarray:
        """Table rows [C, B] of the vertices whose coordinates in dimension d are vertices[d], uint32 [1 or 2, B]."""
        n_dims = len(vertices)
        if level.hashed:
            primes = np.array(PRIMES[self.spec.hash][:n_dims], np.uint32)
            row = outer(np.bitwise_xor, [v * prime for v, prime in zip(vertices, primes, strict=True)])
        else:
            fits = n_dims <= len(MAX_UINT32_RESOLUTION) and level.resolution <= MAX_UINT32_RESOLUTION[n_dims - 1]
            index_type = np.dtype(np.uint32 if fits else np.uint64)
            modulus = 1 << (8 * index_type.itemsize)
            strides = [index_type.type(level.resolution**d % modulus) for d in range(n_dims)]
            row = outer(np.add, [v * stride for v, stride in zip(vertices.astype(index_type), strides, strict=True)])
        size = row.dtype.type(level.n_entries)
        if level.n_entries & (level.n_entries - 1) == 0:
            row &= size - row.dtype.type(1)
        else:
            row %= size
        return row.astype(np.intp)


def rows_of(table: np.ndarray, level: GridLevel) -> np.ndarray:
    """The level's part [n_entries, F] of the table of all levels, as a view."""
    return table[level.offset : level.offset + level.n_entries]


def cell_and_fraction(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """⌊q⌋ as uint32 (negative cells wrap) and q - ⌊q⌋.

    Conversion is that of the GPU's cvt.rmi.s32.f32: values beyond int32 saturate, NaN becomes 0. The fraction of an
    infinite q, which a finite x reaches where s·x overflows, is 0; that of NaN is NaN.
    """
    floor = np.floor(q)
    if floor.min(initial=0) >= -INT32_LIMIT and floor.max(initial=0) < INT32_LIMIT:  # false where there is a NaN
        return floor.astype(np.int32).view(np.uint32), q - floor
    saturated = np.clip(np.nan_to_num(floor.astype(np.float64), nan=0.0), -INT32_LIMIT, INT32_LIMIT - 1)
    fraction = np.where(np.isinf(q), 0, q - floor).astype(q.dtype, copy=False)
    return saturated.astype(np.int32).view(np.uint32), fraction


def outer(combine: np.ufunc, factors: list[np.ndarray]) -> np.ndarray:
    """combine(factors[0][c_0], factors[1][c_1], ...) for all combinations: [n_0·n_1·..., B], c_0 running fastest."""
    result = factors[0]
    for factor in factors[1:]:
        result = combine(result[None], factor[:, None]).reshape(-1, result.shape[-1])
    return result


def scatter(corners: Corners, u: np.ndarray, gradient: np.ndarray) -> None:
    """gradient[row(c)]_f += W_c u_f, summed in float64. `gradient` is [n_entries, F], u is [F, B]."""
    row = corners.row.ravel()
    for f in range(len(u)):
        gradient[:, f] += np.bincount(row, (corners.weight * u[f]).ravel(), minlength=len(gradient))


def directional_differences(projected: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """Derivatives [D, B] of the interpolation of corner values [2^D, B] with respect to each ω_g.

    The leading bit of the corner is removed dimension by dimension: by interpolation, or by a difference along g.
    """
    n_dims = len(omega)
    result = np.empty_like(omega)
    for g in range(n_dims):
        remaining = projected
        for d in reversed(range(n_dims)):
            lower, upper = remaining.reshape(2, -1, remaining.shape[-1])
            remaining = upper - lower if d == g else lower + omega[d] * (upper - lower)
        result[g] = remaining[0]
    return result
