"""OneBlob encoding, per sample and input dimension (mirror of reference/oneblob.py; Mueller et al. 2019).

With the integral of the quartic kernel of radius 1/n around x_i up to z, for u = n (z - x_i) clamped to [-1, 1],

    Q = (15/16) u (1 - (2/3) u^2 + (1/5) u^4) + 1/2,      dQ/dx = -(15/16) n (1 - u^2)^2,
    d^2 Q/dx^2 = -(15/4) n^2 u (1 - u^2)

bin k holds the differences of Q between its borders, and of those of the kernel's images at x_i - 1 and x_i + 1:

    y_{i n + k} = sum over m = -1, 0, 1 of Q((k + 1)/n + m) - Q(k/n + m)

The kernel is two bins wide, so three bins hold all of it: with the one that x_i lies in, b = floor(n x_i), and
u = b - n x_i at that bin's left border,

    bin b - 1: Q(u),      bin b: Q(u + 1) - Q(u),      bin b + 1: 1 - Q(u + 1)

or the derivatives of these. Counted so, bin k is bin k modulo n of the encoding, but those outside of [-1, 2], that is
-n <= k < 2 n, are lost. Eight bins or more are cleared, and then the three are stored where they belong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..specs import OneBlobSpec
from .encoding_parts import EncodingParts, power_of_two_in
from .per_dimension import PerDimension, make_per_dimension

np_f32, np_u32 = np.float32, np.uint32


def _integral(u):
    s = u * u
    return np_f32(15 / 16) * u * (np_f32(1) - s * (np_f32(2 / 3) - s * np_f32(1 / 5))) + np_f32(1 / 2)


def _density(u):
    s = np_f32(1) - u * u
    return np_f32(15 / 16) * s * s


@functools.cache
def _make_spread(target, n_bins: int, n_values: int):
    """spread(first, three) -> bins 0 ... n_values - 1, where `three` are what bins `first` and the two behind it hold,
    modulo n_bins, and the others are 0."""

    @target.intrinsic(["u32", ("f32", 3)], ("f32", n_values))
    def spread(e, first, three):
        bins = []
        for k in range(n_values):
            value = e.f32(0.0)
            for i, part in enumerate(three):
                here = e.equal(first, (k - i) % n_bins)
                value = e.select(here, e.fadd(value, part) if n_bins < 3 else part, value)
            bins.append(value)
        return bins

    return spread


def make_oneblob(target, spec: OneBlobSpec, memory, *, table_gradient: bool, input_gradient: bool) -> EncodingParts:
    """The parts of a OneBlob encoding; it has no table."""
    return make_per_dimension(target, memory, oneblob_functions(target, spec, memory), input_gradient=input_gradient)


def oneblob_functions(target, spec: OneBlobSpec, memory) -> PerDimension:
    """Bins, and their derivatives."""
    n_bins, u32, floor_to_int = spec.n_bins, target.u32, memory.floor_to_int
    f_bins, all_bins, n_behind = np_f32(n_bins), np_u32(3 * n_bins), np_u32(n_bins - 1)

    def to_bins(x):
        return x * f_bins

    def modulo(k):
        return np_u32(k % np_u32(n_bins))

    to_bins, modulo = target.scalar(to_bins), target.scalar(modulo)

    def make_three(function: Callable, total: float) -> Callable:
        """three(x) -> (b - 1) modulo n, and what bins b - 1, b and b + 1 hold of a function that ends at `total`."""
        function, total, zero = target.scalar_part(function), np_f32(total), np_f32(0)

        def parts(center, b):
            u = np_f32(np.int32(b)) - center
            left, right = function(u), function(u + np_f32(1))
            k = np_u32(b + n_behind)  # of bin b - 1, counted from -1
            first = left if k < all_bins else zero
            middle = right - left if np_u32(k + np_u32(1)) < all_bins else zero
            last = total - right if np_u32(k + np_u32(2)) < all_bins else zero
            return np_u32(k % np_u32(n_bins)), first, middle, last

        parts = target.scalar(parts)

        def three(x):
            center = to_bins(x)
            found = parts(center, floor_to_int(center))
            return found[0], (found[1], found[2], found[3])

        return target.device(three)

    def make_bins(function: Callable, total: float, n_values: int) -> Callable:
        three, spread = make_three(function, total), _make_spread(target, n_bins, n_values)

        def bins(x, k):
            found = three(x)
            return spread(modulo(u32(found[0] - k)), found[1])

        return target.device(bins)

    def make_put_all() -> Callable:
        three, chunk = make_three(_integral, 1.0), power_of_two_in(n_bins)
        put_chunk, zeros, put = memory.make_put(chunk), memory.make_zeros(chunk), memory.make_put(1)
        warp_barrier = memory.warp_barrier

        def put_all(at, column, x):
            for i in range(n_bins // chunk):
                put_chunk(at, u32(column + u32(i * chunk)), zeros())
            warp_barrier()  # lanes without an item of their own repeat that of another
            first, parts = three(x)
            put(at, u32(column + first), (parts[0],))
            put(at, u32(column + modulo(u32(first + u32(1)))), (parts[1],))
            put(at, u32(column + modulo(u32(first + u32(2)))), (parts[2],))

        return target.device(put_all)

    density = target.scalar_part(_density)

    def slope(u):
        return -f_bins * density(u)

    def curvature(u):
        return np_f32(-15 / 4) * f_bins * f_bins * u * (np_f32(1) - u * u)

    return PerDimension(
        spec.n_input_dims, n_bins, power_of_two_in(n_bins),
        make_values=functools.partial(make_bins, _integral, 1.0),
        make_slopes=functools.partial(make_bins, slope, 0.0),
        make_curvatures=functools.partial(make_bins, curvature, 0.0),
        make_put_all=make_put_all if n_bins >= 8 else None,
    )  # fmt: skip
