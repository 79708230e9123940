"""Multiresolution grid encoding (Müller et al. 2022): each level is a lattice whose vertices carry feature vectors.

Level ℓ has cells of size 1/s (s = `GridLevel.scale`). In each dimension d

    q_d = s x_d + 1/2,   g_d = ⌊q_d⌋,   t_d = q_d - g_d,   ω_d = t_d (Linear) or t_d² (3 - 2 t_d) (Smoothstep)

and the features are the interpolation over the 2^D corners c of the cell, whose bit d chooses g_d or g_d + 1:

    y_f = Σ_c W_c θ[row(c)]_f,      W_c = Π_d (bit d of c ? ω_d : 1 - ω_d)

Nearest takes the single vertex g. Which row of the table a vertex has is told in `grid_rows.py`.

Backward, with u = dL/dy and p_c = Σ_f u_f θ[row(c)]_f. ∂_g stands for the derivative of Σ_c W_c p_c by ω_g, an
interpolation over the other dimensions of the differences along g:

    dL/dθ[row(c)]_f += W_c u_f
    dL/dx_g = s ω'_g ∂_g p

Second order, with v = dL_ddx, a_g = s ω'_g v_g and S = Σ_g v_g dL/dx_g = Σ_c W'_c p_c, where W'_c = Σ_g a_g ∂W_c/∂ω_g:

    dS/du_f = Σ_c W'_c θ[row(c)]_f
    dS/dθ[row(c)]_f += W'_c u_f
    dS/dx_g = s ω'_g Σ_{o≠g} a_o ∂_g ∂_o p + s² ω''_g v_g ∂_g p

Columns are level-major: column ℓF + f. The code loops over levels, whose tables stay in the cache, and works on all
samples at once; B is the batch, C = 2^D (1 for Nearest) the number of corners.

Options
    max_level                 levels ℓ ≥ m L + 0.001 are off, m being the sample's fraction of the L levels: their
                              features and everything that comes back through them are 0
    stochastic_interpolation  dL/dθ goes to one corner, chosen with probability W_c in each dimension apart, whole; one
                              random number serves all dimensions of a sample and level, and every step draws the same.
                              It is compared with ω in float32, whatever the rest is computed in: which corner that is
                              belongs to the model, and is no rounding
    fixed_point_pos           the 32 bits of a float32 x are an integer, and the position x = integer / 2^32; t is a
                              quotient of float32 numbers, for the same reason
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from numba_tcnn.initial_values import Pcg32
from numba_tcnn.layout import GridLevel, grid_levels
from numba_tcnn.specs import GridSpec

from .encoding_contract import WHOLE_BATCH, Samples
from .grid_rows import outer, rows_of_vertices
from .precision import Precision

INT32_LIMIT = 2.0**31


LARGEST_CELL_SCALE = 2.0**-30
"""A level of one vertex has the scale 0, and cells without end; in integers they are 2^62 long, 2^30 units of x."""

STOCHASTIC_SEED = 1337


@dataclass(frozen=True)
class Corners:
    """Where each sample lies in one level. Weights and derivatives are 0 where the level is off.

    row        [C, B]  rows of the level's table
    weight     [C, B]  W_c
    fraction   [D, B]  t_d
    omega      [D, B]  ω_d
    slope      [D, B]  dω_d/dt_d
    curvature  [D, B]  d²ω_d/dt_d²
    """

    row: np.ndarray
    weight: np.ndarray
    fraction: np.ndarray
    omega: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray


class Grid:
    """The encoding of a `GridSpec`. x is [B, D]; parameters are the flat table of all levels, whose gradient `scatter`
    sums."""

    padding_value = 0.0

    def __init__(self, spec: GridSpec, precision: Precision):
        self.spec = spec
        self.precision = precision
        self.levels = grid_levels(spec)
        self.scatter = scatter

    def forward(
        self, x: np.ndarray, params: np.ndarray, out: np.ndarray, samples: Samples = WHOLE_BATCH
    ) -> tuple[Samples, list[Corners]]:
        coordinates = np.ascontiguousarray(x.T)
        table = self.by_entry(params)
        context = []
        for i, level in enumerate(self.levels):
            corners = self.corners(coordinates, i, samples)
            values = rows_of(table, level).take(corners.row, axis=0)
            weighted_sums(values, corners.weight, out[:, self.columns(i)])
            context.append(corners)
        return samples, context

    def backward(
        self,
        context: tuple[Samples, list[Corners]],
        params: np.ndarray,
        dL_dout: np.ndarray,
        dL_dparams: np.ndarray | None,
        dL_dx: np.ndarray | None,
    ) -> None:
        samples, corners_of_levels = context
        table = self.by_entry(params)
        gradient = None if dL_dparams is None else self.by_entry(dL_dparams)
        stochastic = self.spec.stochastic_interpolation and self.spec.interpolation != "Nearest"
        for i, (level, corners) in enumerate(zip(self.levels, corners_of_levels, strict=True)):
            u = np.ascontiguousarray(dL_dout[:, self.columns(i)].T)  # [F, B]
            if gradient is not None:
                row, weight = self.one_corner(corners, i, samples) if stochastic else (corners.row, corners.weight)
                self.scatter(row, weight, u, rows_of(gradient, level))
            if dL_dx is not None and self.spec.interpolation != "Nearest":
                p = projected(rows_of(table, level).take(corners.row, axis=0), u)
                dL_dx += (level.scale * corners.slope * first_differences(p, corners.omega)).T

    def backward_backward_input(
        self,
        x: np.ndarray,
        dL_dy: np.ndarray,
        dL_ddx: np.ndarray,
        params: np.ndarray,
        samples: Samples = WHOLE_BATCH,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dL_ddLdy, dL_dparams, dL_dx = np.zeros_like(dL_dy), np.zeros_like(params), np.zeros_like(x)
        if self.spec.interpolation == "Nearest":
            return dL_ddLdy, dL_dparams, dL_dx
        coordinates, v = np.ascontiguousarray(x.T), np.ascontiguousarray(dL_ddx.T)
        table, gradient = self.by_entry(params), self.by_entry(dL_dparams)
        for i, level in enumerate(self.levels):
            corners = self.corners(coordinates, i, samples)
            u = np.ascontiguousarray(dL_dy[:, self.columns(i)].T)
            values = rows_of(table, level).take(corners.row, axis=0)
            a = level.scale * corners.slope * v
            tangent = weight_tangents(corners.omega, a)
            weighted_sums(values, tangent, dL_ddLdy[:, self.columns(i)])
            self.scatter(corners.row, tangent, u, rows_of(gradient, level))
            p = projected(values, u)
            dL_dx += (level.scale * corners.slope * mixed_differences(p, corners.omega, a)).T
            dL_dx += (level.scale**2 * corners.curvature * v * first_differences(p, corners.omega)).T
        return dL_ddLdy, dL_dparams, dL_dx

    def by_entry(self, params: np.ndarray) -> np.ndarray:
        """Flat parameters as the table [entries of all levels, F]."""
        return params.reshape(-1, self.spec.n_features_per_level)

    def columns(self, level: int) -> slice:
        n_features = self.spec.n_features_per_level
        return slice(level * n_features, (level + 1) * n_features)

    def corners(self, coordinates: np.ndarray, i: int, samples: Samples) -> Corners:
        """The vertices of level i around every sample of `coordinates` [D, B]."""
        level = self.levels[i]
        cell, t = self.position(coordinates, level)
        if self.spec.interpolation == "Nearest":
            vertices = cell[:, None, :]
            weight = np.ones_like(t[:1])
            omega = slope = curvature = np.zeros_like(t)
        else:
            vertices = np.stack([cell, cell + np.uint32(1)], axis=1)  # [D, 2, B]
            omega = self.omega(t)
            if self.spec.interpolation == "Smoothstep":
                slope, curvature = 6 * t * (1 - t), 6 - 12 * t
            else:
                slope, curvature = np.ones_like(t), np.zeros_like(t)
            weight = outer(np.multiply, [np.stack([1 - w, w]) for w in omega])
        if samples.max_level is not None:
            active = self.active(i, samples.max_level)
            weight, slope, curvature = (np.where(active, array, 0) for array in (weight, slope, curvature))
        return Corners(rows_of_vertices(vertices, level, self.spec), weight, t, omega, slope, curvature)

    def omega(self, t: np.ndarray) -> np.ndarray:
        return t * t * (3 - 2 * t) if self.spec.interpolation == "Smoothstep" else t

    def position(self, coordinates: np.ndarray, level: GridLevel) -> tuple[np.ndarray, np.ndarray]:
        """g as uint32 and t, both [D, B]."""
        if self.spec.fixed_point_pos:
            return fixed_point_cell_and_fraction(coordinates, level.scale)
        return cell_and_fraction(self.precision.multiply_add(level.scale, coordinates, 0.5))

    def active(self, level: int, max_level: float | np.ndarray) -> np.ndarray:
        """Whether the level is in use, for all samples or for each; compared in float32."""
        n_levels = np.float32(self.spec.n_levels)
        return np.float32(level) < np.asarray(max_level, np.float32) * n_levels + np.float32(1e-3)

    def one_corner(self, corners: Corners, i: int, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        """Row and weight [1, B] of the corner that gets all of a sample's gradient in level i.

        With ρ uniform in [0, 1), from position (row in the batch) + i·(batch size) of the stream, it is the upper
        vertex in every dimension where ρ < ω_d.
        """
        n_samples = corners.row.shape[1]
        random = Pcg32(STOCHASTIC_SEED)
        random.advance(samples.first_row + i * (samples.batch_size or n_samples))
        upper = random.uniform(n_samples) < self.omega(corners.fraction.astype(np.float32, copy=False))
        corner = np.add.reduce([bit.astype(np.intp) << d for d, bit in enumerate(upper)])
        row = np.take_along_axis(corners.row, corner[None], axis=0)
        weight = np.ones_like(corners.weight[:1])
        if samples.max_level is not None:
            weight = np.where(self.active(i, samples.max_level), weight, 0)
        return row, weight


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


def fixed_point_cell_and_fraction(coordinates: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """g and t for x = n / 2^32, n the bits of x as a float32: with cells of c ≈ 2^32/s, both come from n + ⌊c/2⌋.

    c is rounded to float32 and then down, as in tiny-cuda-nn. The sum is taken in 64 bits: where it wraps in 32, just
    below x = 1, tiny-cuda-nn stays in cell ⌊s⌋, and t passes 1 if s has a fraction above 1/2. (A float64 model sees
    the bits unchanged unless they are those of a signalling NaN.)
    """
    n = coordinates.astype(np.float32, copy=False).view(np.uint32)
    c = np.uint64(np.float32(2**32) / np.float32(max(scale, LARGEST_CELL_SCALE)))
    cell, remainder = np.divmod(n.astype(np.uint64) + c // np.uint64(2), c)
    t = remainder.astype(np.float32) / np.float32(c)
    return cell.astype(np.uint32), t.astype(coordinates.dtype, copy=False)


def weighted_sums(values: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    """out[b, f] = Σ_c values[c, b, f] weight[c, b]."""
    for f in range(out.shape[1]):
        out[:, f] = np.add.reduce(values[:, :, f] * weight, axis=0)


def projected(values: np.ndarray, u: np.ndarray) -> np.ndarray:
    """p [C, B] = Σ_f values[c, b, f] u[f, b]."""
    p = np.zeros(values.shape[:2], values.dtype)
    for f in range(len(u)):
        p += values[:, :, f] * u[f]
    return p


def scatter(row: np.ndarray, weight: np.ndarray, u: np.ndarray, gradient: np.ndarray) -> None:
    """gradient[row(c)]_f += W_c u_f, summed in float64. `gradient` is [n_entries, F], u is [F, B]."""
    row = row.ravel()
    for f in range(len(u)):
        gradient[:, f] += np.bincount(row, (weight * u[f]).ravel(), minlength=len(gradient))


def interpolated(p: np.ndarray, omega: np.ndarray, along: tuple[int, ...]) -> np.ndarray:
    """Corner values p [2^D, B] interpolated to [B], but differences upper - lower in the dimensions `along`.

    The leading bit of the corner is removed dimension by dimension.
    """
    for d in reversed(range(len(omega))):
        lower, upper = p.reshape(2, -1, p.shape[-1])
        p = upper - lower if d in along else lower + omega[d] * (upper - lower)
    return p[0]


def first_differences(p: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """∂_g p for all g, [D, B]."""
    return np.stack([interpolated(p, omega, (g,)) for g in range(len(omega))])


def mixed_differences(p: np.ndarray, omega: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Σ_{o≠g} a_o ∂_g ∂_o p for all g, [D, B]."""
    result = np.zeros_like(omega)
    for g, o in itertools.combinations(range(len(omega)), 2):
        mixed = interpolated(p, omega, (g, o))
        result[g] += a[o] * mixed
        result[o] += a[g] * mixed
    return result


def weight_tangents(omega: np.ndarray, a: np.ndarray) -> np.ndarray:
    """W'_c = Σ_g a_g ∂W_c/∂ω_g, [C, B]."""
    factors = [np.stack([1 - w, w]) for w in omega]
    terms = []
    for g in range(len(omega)):
        terms.append(outer(np.multiply, [*factors[:g], np.stack([-a[g], a[g]]), *factors[g + 1 :]]))
    return np.add.reduce(terms)
