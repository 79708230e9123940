"""Spherical harmonics of a direction, per sample (mirror of reference/spherical_harmonics.py).

With d = (X, Y, Z) = 2x - 1, C_m + i S_m = (X + iY)^m, and the Legendre polynomials P_l^m of Z with their sign,

    y_l^m = K_l^m C_m P_l^m,   y_l^{-m} = K_l^m S_m P_l^m      in columns l(l + 1) + m and l(l + 1) - m,  m >= 0
    P_m^m = (1 - 2m) P_{m-1}^{m-1},   (l - m) P_l^m = (2l - 1) Z P_{l-1}^m - (l + m - 1) P_{l-2}^m

The whole of it is straight code in registers, one item a sample. Backward, with u = dL/dy,

    A_m = sum_l u_l^m K_l^m P_l^m,   B_m the same of u_l^{-m},   A'_m, B'_m these by Z, where P_l^m becomes -P_l^{m+1}

    dL/dX = sum_m m (A_m C_{m-1} + B_m S_{m-1}),   dL/dY = sum_m m (B_m C_{m-1} - A_m S_{m-1}),
    dL/dZ = sum_m A'_m C_m + B'_m S_m,             and dL/dx is twice that.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ..specs import SphericalHarmonicsSpec
from .encoding_parts import BackwardPart, EncodingParts, ItemGroup, make_select, power_of_two_in


def normalisation(l: int, m: int) -> float:
    """K_l^m, with the factor sqrt 2 where m and -m have a harmonic each."""
    factor = (2 * l + 1) / (4 * math.pi) * math.factorial(l - m) / math.factorial(l + m)
    return math.sqrt(factor if m == 0 else 2 * factor)


class Arithmetic:
    """Sums and products with an emitter; a number is a register or a Python float, and None is 0."""

    def __init__(self, emitter):
        self.e = emitter

    def product(self, a, b):
        if a is None or b is None:
            return None
        if isinstance(a, float) and isinstance(b, float):
            return a * b
        if isinstance(b, float):
            a, b = b, a
        if isinstance(a, float):
            return b if a == 1.0 else self.e.fmul(b, self.e.f32(a))
        return self.e.fmul(a, b)

    def sum(self, *terms):
        terms = [term for term in terms if term is not None]
        result = terms[0] if terms else None
        for term in terms[1:]:
            result = self.e.fadd(self._register(result), self._register(term))
        return result

    def _register(self, a):
        return self.e.f32(a) if isinstance(a, float) else a

    def registers(self, values: list) -> list:
        return [self._register(0.0 if value is None else value) for value in values]

    def powers(self, x, y, degree: int) -> list[tuple]:
        """(C_m, S_m) for m < degree."""
        powers = [(1.0, None)]
        for _ in range(degree - 1):
            c, s = powers[-1]
            real = self.sum(self.product(c, x), self.product(self.product(s, y), -1.0))
            powers.append((real, self.sum(self.product(c, y), self.product(s, x))))
        return powers

    def legendre(self, z, degree: int) -> dict[tuple[int, int], object]:
        """P_l^m by (l, m), 0 <= m <= l < degree; P_m^m are numbers."""
        p = {}
        for m in range(degree):
            p[m, m] = (1 - 2 * m) * p[m - 1, m - 1] if m else 1.0
            for l in range(m + 1, degree):
                one_back = self.product(self.product(z, p[l - 1, m]), (2 * l - 1) / (l - m))
                two_back = self.product(p.get((l - 2, m)), -(l + m - 1) / (l - m))
                p[l, m] = self.sum(one_back, two_back)
        return p


def all_harmonics(arithmetic, x, y, z, degree: int) -> list:
    """All degree^2 harmonics at numbers (X, Y, Z) of an arithmetic, in column order; None for 0."""
    columns = [None] * degree**2
    powers, legendre = arithmetic.powers(x, y, degree), arithmetic.legendre(z, degree)
    for (l, m), p in legendre.items():
        scaled = arithmetic.product(p, normalisation(l, m))
        for column, power in zip((l * (l + 1) - m, l * (l + 1) + m), reversed(powers[m]), strict=True):
            if power is not None:
                columns[column] = arithmetic.product(scaled, power)
    return columns


def gradient_of_direction(arithmetic, x, y, z, u, degree: int) -> list:
    """dL/d(X, Y, Z) of u = dL/dy, numbers of an arithmetic."""
    powers, legendre = arithmetic.powers(x, y, degree), arithmetic.legendre(z, degree)
    dx = dy = dz = None

    def projected(sign: int, m: int, order: int):
        """A_m (sign 1) or B_m (sign -1), or with order 1 their derivatives by Z."""
        terms = []
        for l in range(m + order, degree):
            p = arithmetic.product(legendre[l, m + order], (-1) ** order * normalisation(l, m))
            terms.append(arithmetic.product(u[l * (l + 1) + sign * m], p))
        return arithmetic.sum(*terms)

    for m in range(degree):
        c, s = powers[m]
        dz = arithmetic.sum(dz, arithmetic.product(projected(1, m, 1), c))
        if m == 0:
            continue
        dz = arithmetic.sum(dz, arithmetic.product(projected(-1, m, 1), s))
        a, b = (arithmetic.product(projected(sign, m, 0), float(m)) for sign in (1, -1))
        c, s = powers[m - 1]
        dx = arithmetic.sum(dx, arithmetic.product(a, c), arithmetic.product(b, s))
        dy = arithmetic.sum(dy, arithmetic.product(b, c), arithmetic.product(arithmetic.product(a, s), -1.0))
    return [dx, dy, dz]


@functools.cache
def _make_harmonics(target, degree: int):
    """harmonics(X, Y, Z) -> all degree^2 of them, in column order."""

    @target.intrinsic(["f32", "f32", "f32"], ("f32", degree * degree))
    def harmonics(e, x, y, z):
        arithmetic = Arithmetic(e)
        return arithmetic.registers(all_harmonics(arithmetic, x, y, z, degree))

    return harmonics


@functools.cache
def _make_gradient(target, degree: int):
    """gradient(X, Y, Z, u) -> dL/d(X, Y, Z) of u = dL/dy."""

    @target.intrinsic(["f32", "f32", "f32", ("f32", degree * degree)], ("f32", 3))
    def gradient(e, x, y, z, u):
        arithmetic = Arithmetic(e)
        return arithmetic.registers(gradient_of_direction(arithmetic, x, y, z, u, degree))

    return gradient


def make_spherical_harmonics(
    target, spec: SphericalHarmonicsSpec, memory, *, table_gradient: bool, input_gradient: bool
) -> EncodingParts:
    """The parts of spherical harmonics; they have no table."""
    degree, u32, unroll, map_values = spec.degree, target.u32, target.unroll_full, target.map_fragment
    n_values, np_f32 = degree * degree, np.float32
    read_input, harmonics = memory.read_input, _make_harmonics(target, degree)
    granularity = power_of_two_in(n_values)

    def to_direction(x):
        return np_f32(2) * x - np_f32(1)

    to_direction = target.scalar(to_direction)

    def all_features(at):
        x, y, z = read_input(at, u32(0)), read_input(at, u32(1)), read_input(at, u32(2))
        return harmonics(to_direction(x), to_direction(y), to_direction(z))

    all_features = target.device(all_features)

    def make_features(n_chosen: int):
        select = make_select(target, n_values, n_chosen)

        def features(at, column):
            return select(all_features(at), column)

        return target.device(features)

    put = memory.make_put(n_values, 8)

    def encode(item, at):
        put(at, u32(0), all_features(at))

    encode = ItemGroup(0, 1, target.device(encode), by_sample=True)
    if not input_gradient:
        return EncodingParts((encode,), (), granularity, make_features)
    gradient_of, get = _make_gradient(target, degree), memory.make_get(n_values, 8)

    def twice(g, live):
        return np_f32(2) * g * live

    twice = target.scalar(twice)

    def backward(item, at, gradient, live, dx):
        x, y, z = read_input(at, u32(0)), read_input(at, u32(1)), read_input(at, u32(2))
        slopes = gradient_of(to_direction(x), to_direction(y), to_direction(z), get(at, u32(0)))
        slopes = map_values(twice, slopes, live)
        for d in range(3):
            unroll()
            dx[d] = dx[d] + slopes[d]

    backward = ItemGroup(0, 1, target.device(backward), by_sample=True)
    part = BackwardPart((backward,), memory.first_dim, 3)
    return EncodingParts((encode,), (part,), granularity, make_features)
