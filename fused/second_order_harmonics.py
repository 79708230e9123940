"""Spherical harmonics in dual numbers, by the code of their values and gradients (spherical_harmonics.py)."""

from __future__ import annotations

import functools

import numpy as np

from ..specs import SphericalHarmonicsSpec
from .encoding_parts import BackwardPart, EncodingParts, ItemGroup, make_select, power_of_two_in
from .spherical_harmonics import Arithmetic, all_harmonics, gradient_of_direction


class DualArithmetic(Arithmetic):
    """Sums and products of duals: pairs of what `Arithmetic` works on. What is no pair has no tangent."""

    def __init__(self, emitter):
        super().__init__(emitter)
        self.parts = Arithmetic(emitter)

    @staticmethod
    def pair(a):
        return a if isinstance(a, tuple) else (a, None)

    def product(self, a, b):
        (a, a_tangent), (b, b_tangent), parts = self.pair(a), self.pair(b), self.parts
        return parts.product(a, b), parts.sum(parts.product(a_tangent, b), parts.product(a, b_tangent))

    def sum(self, *terms):
        values, tangents = zip(*map(self.pair, terms), strict=True) if terms else ((), ())
        return self.parts.sum(*values), self.parts.sum(*tangents)

    def registers(self, values: list) -> list:
        """All values, then all tangents."""
        pairs = [self.pair(value) for value in values]
        return self.parts.registers([a for a, _ in pairs]) + self.parts.registers([tangent for _, tangent in pairs])


@functools.cache
def _make_dual_harmonics(target, degree: int):
    """harmonics(X, Y, Z, their tangents) -> all degree^2 harmonics, then their tangents."""

    @target.intrinsic(["f32"] * 6, ("f32", 2 * degree * degree))
    def harmonics(e, x, y, z, x_tangent, y_tangent, z_tangent):
        arithmetic, direction = DualArithmetic(e), ((x, x_tangent), (y, y_tangent), (z, z_tangent))
        return arithmetic.registers(all_harmonics(arithmetic, *direction, degree))

    return harmonics


@functools.cache
def _make_gradient_tangent(target, degree: int):
    """gradient(X, Y, Z, their tangents, u, its tangent) -> the tangent of dL/d(X, Y, Z)."""

    @target.intrinsic([*["f32"] * 6, ("f32", degree * degree), ("f32", degree * degree)], ("f32", 3))
    def gradient(e, x, y, z, x_tangent, y_tangent, z_tangent, u, u_tangent):
        arithmetic, direction = DualArithmetic(e), ((x, x_tangent), (y, y_tangent), (z, z_tangent))
        duals = list(zip(u, u_tangent, strict=True))
        return arithmetic.registers(gradient_of_direction(arithmetic, *direction, duals, degree))[3:]

    return gradient


def make_second_order_harmonics(target, spec: SphericalHarmonicsSpec, memory, *, table_gradient: bool) -> EncodingParts:
    """The parts of spherical harmonics in dual numbers; the direction moves by 2 v."""
    degree, u32, unroll, map_values = spec.degree, target.u32, target.unroll_full, target.map_fragment
    n_values, np_f32 = degree * degree, np.float32
    read_inputs, read_directions = memory.make_read_inputs(1), memory.make_read_directions(1)
    harmonics, gradient_of = _make_dual_harmonics(target, degree), _make_gradient_tangent(target, degree)

    def to_direction(x, v):
        return np_f32(2) * x - np_f32(1), np_f32(2) * v

    def twice(g, live):
        return np_f32(2) * g * live

    to_direction, twice = target.scalar(to_direction), target.scalar(twice)

    def direction(at):
        x = read_inputs(at, u32(0)) + read_inputs(at, u32(1)) + read_inputs(at, u32(2))
        v = read_directions(at, u32(0)) + read_directions(at, u32(1)) + read_directions(at, u32(2))
        return map_values(to_direction, x, v)

    direction = target.device(direction)

    def all_features(at):
        d, tangent = direction(at)
        columns = harmonics(d[0], d[1], d[2], tangent[0], tangent[1], tangent[2])
        return columns[:n_values], columns[n_values:]

    all_features = target.device(all_features)

    def make_dual(n_chosen: int):
        select = make_select(target, n_values, n_chosen)

        def dual(at, column):
            both = all_features(at)
            return select(both[0], column), select(both[1], column)

        return target.device(dual)

    put, get = memory.make_put_dual(n_values, 8), memory.make_get_dual(n_values, 8)

    def encode(item, at):
        put(at, u32(0), all_features(at))

    def backward(item, at, gradient, live, dx):
        d, tangent = direction(at)
        u, u_tangent = get(at, u32(0))
        slopes = gradient_of(d[0], d[1], d[2], tangent[0], tangent[1], tangent[2], u, u_tangent)
        slopes = map_values(twice, slopes, live)
        for i in range(3):
            unroll()
            dx[i] = dx[i] + slopes[i]

    encode = ItemGroup(0, 1, target.device(encode), by_sample=True)
    backward = ItemGroup(0, 1, target.device(backward), by_sample=True)
    part = BackwardPart((backward,), memory.first_dim, 3)
    return EncodingParts((encode,), (part,), power_of_two_in(n_values), make_dual)
