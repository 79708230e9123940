"""Triangle waves, per sample and input dimension (mirror of reference/triangle_wave.py; Mueller et al. 2021):

    y_{i n + k} = 4 |v - floor(v) - 1/2| - 1,     v = 2^(k-1) x_i + k/4,  k < n

with the slope -2^(k+1) in the first half of each period and 2^(k+1) in the second.

Phases are computed in fixed point. For n consecutive octaves from k on let

    p_j = 2^j floor(2^32 2^(k-1) x_i) + 2^30 (k + j)     modulo 2^32, j < n

which is v in units of 2^-32 periods, without whole periods: from k on octaves are shifts, quarters are the upper two
bits, and no argument is too large. The first product is exact, so p_j is too small by less than 2^j units and on the
same side of every kink as v. Read as an int32 it is v minus the nearest whole number, hence

    y = 1 - 4 |p_j| / 2^32,     dy/dx < 0 where p_j >= 0
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..specs import TriangleWaveSpec
from .encoding_parts import EncodingParts, power_of_two_in
from .frequency import make_count, make_octave
from .per_dimension import PerDimension, make_per_dimension

np_f32, np_u32 = np.float32, np.uint32


def make_triangle_wave(
    target, spec: TriangleWaveSpec, memory, *, table_gradient: bool, input_gradient: bool
) -> EncodingParts:
    """The parts of triangle waves; they have no table."""
    functions = triangle_wave_functions(target, spec, memory)
    return make_per_dimension(target, memory, functions, input_gradient=input_gradient)


def triangle_wave_functions(target, spec: TriangleWaveSpec, memory) -> PerDimension:
    """Waves and their slopes; between the kinks they are straight."""
    f32, map_values, octave = target.f32, target.map_fragment, make_octave(target, spec.n_frequencies)
    low_bits_of_floor, multiply_add = memory.low_bits_of_floor, memory.multiply_add

    def in_fixed_point(x, k):
        return x * (octave(k) * np_f32(2.0**31))

    def value(phase, one):
        return one - np_f32(2.0**-30) * abs(np_f32(np.int32(phase)))

    def slope(phase, k):
        steepness = np_f32(2) * octave(k)
        return -steepness if phase < np_u32(1 << 31) else steepness

    in_fixed_point, value, slope = (target.scalar(f) for f in (in_fixed_point, value, slope))

    def make_waves(n_values: int) -> Callable:
        phases = _make_phases(target, n_values)

        def waves(x, k):
            one = multiply_add(x, f32(0), f32(1))  # NaN where x is not finite
            return map_values(value, phases(low_bits_of_floor(in_fixed_point(x, k)), k), one)

        return target.device(waves)

    def make_slopes(n_values: int) -> Callable:
        phases, count = _make_phases(target, n_values), make_count(target, n_values, 0)

        def slopes(x, k):
            return map_values(slope, phases(low_bits_of_floor(in_fixed_point(x, k)), k), count(k))

        return target.device(slopes)

    return PerDimension(
        spec.n_input_dims, spec.n_frequencies, power_of_two_in(spec.n_frequencies),
        make_values=make_waves, make_slopes=make_slopes, make_curvatures=None,
    )  # fmt: skip


@functools.cache
def _make_phases(target, n_values: int):
    """phases(fraction, k) -> p_0 ... p_{n-1}, from the first summand of p_0."""

    @target.intrinsic(["u32", "u32"], ("u32", n_values))
    def phases(e, fraction, k):
        quarters = e.shl(k, 30)
        return [e.add(e.shl(fraction, j), e.add(quarters, j << 30)) for j in range(n_values)]

    return phases
