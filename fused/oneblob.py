"""OneBlob encoding, per sample and input dimension (mirror of reference/oneblob.py; Mueller et al. 2019).

With the integral of the quartic kernel of radius 1/n around x_i up to z, for u = n (z - x_i) clamped to [-1, 1],

    Q = (15/16) u (1 - (2/3) u^2 + (1/5) u^4) + 1/2,      dQ/dx = -(15/16) n (1 - u^2)^2,
    d^2 Q/dx^2 = -(15/4) n^2 u (1 - u^2)

bin k holds the differences of Q between its borders, and of those of the kernel's images at x_i - 1 and x_i + 1:

    y_{i n + k} = sum over m = -1, 0, 1 of Q((k + 1)/n + m) - Q(k/n + m)

The kernel is two bins wide, so of four and more bins, up to half of them (a chunk) see only the nearest of the images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..specs import OneBlobSpec
from .encoding_parts import EncodingParts, power_of_two_in
from .per_dimension import PerDimension, make_per_dimension

np_f32 = np.float32


def _integral(u):
    s = u * u
    return np_f32(15 / 16) * u * (np_f32(1) - s * (np_f32(2 / 3) - s * np_f32(1 / 5)))


def _density(u):
    s = np_f32(1) - u * u
    return np_f32(15 / 16) * s * s


@functools.cache
def _make_borders(target, n_values: int):
    """borders(k) -> (k, ..., k + n_values)."""

    @target.intrinsic(["u32"], ("u32", n_values + 1))
    def borders(e, k):
        return [e.add(k, i) for i in range(n_values + 1)]

    return borders


@functools.cache
def _make_differences(target, n_values: int):
    """differences(values) of neighbours: `n_values` of one more."""

    @target.intrinsic([("f32", n_values + 1)], ("f32", n_values))
    def differences(e, values):
        return [e.fadd(values[i + 1], e.fmul(values[i], e.f32(-1.0))) for i in range(n_values)]

    return differences


def make_oneblob(target, spec: OneBlobSpec, memory, *, table_gradient: bool, input_gradient: bool) -> EncodingParts:
    """The parts of a OneBlob encoding; it has no table."""
    return make_per_dimension(target, memory, oneblob_functions(target, spec), input_gradient=input_gradient)


def oneblob_functions(target, spec: OneBlobSpec) -> PerDimension:
    """Bins, and their derivatives."""
    n_bins, map_values = np_f32(spec.n_bins), target.map_fragment
    chunk = power_of_two_in(spec.n_bins // 2) if spec.n_bins >= 4 else 1

    def distance(border, center):
        return min(max(np_f32(border) - center, np_f32(-1)), np_f32(1))

    distance = target.scalar_part(distance)

    def make_bins(function: Callable, n_values: int) -> Callable:
        """bins(x, k): differences of an odd function of u between neighbouring borders."""
        borders, differences = _make_borders(target, n_values), _make_differences(target, n_values)
        function = target.scalar_part(function)
        half, middle = np_f32(spec.n_bins / 2), np_f32(n_values / 2)

        if spec.n_bins >= 4:

            def center(x, k):
                # of the image that is nearest to the middle of the bins; in bins
                to_middle = x * n_bins - (np_f32(k) + middle)
                image = np_f32(1) if to_middle > half else np_f32(0)
                image = np_f32(-1) if to_middle < -half else image
                return x * n_bins - image * n_bins

            def at_border(border, center):
                return function(distance(border, center))

        else:

            def center(x, k):
                return x * n_bins

            def at_border(border, center):
                left, right = distance(border, center - n_bins), distance(border, center + n_bins)
                return function(left) + function(distance(border, center)) + function(right)

        center, at_border = target.scalar(center), target.scalar(at_border)

        def bins(x, k):
            return differences(map_values(at_border, borders(k), center(x, k)))

        return target.device(bins)

    density = target.scalar_part(_density)

    def slope(u):
        return -n_bins * density(u)

    def curvature(u):
        return np_f32(-15 / 4) * n_bins * n_bins * u * (np_f32(1) - u * u)

    return PerDimension(
        spec.n_input_dims, spec.n_bins, chunk,
        make_values=functools.partial(make_bins, _integral),
        make_slopes=functools.partial(make_bins, slope),
        make_curvatures=functools.partial(make_bins, curvature),
    )  # fmt: skip
