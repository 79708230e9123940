"""Triangle waves, per sample and input dimension (mirror of reference/triangle_wave.py; Mueller et al. 2021):

    y_{i n + k} = 4 |v - floor(v) - 1/2| - 1,     v = 2^(k-1) x_i + k/4,  k < n

with the slope -2^(k+1) in the first half of each period and 2^(k+1) in the second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..specs import TriangleWaveSpec
from .encoding_parts import EncodingParts, power_of_two_in
from .frequency import make_count, make_octave, make_phases
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
    map_values, octave = target.map_fragment, make_octave(target, spec.n_frequencies)

    def fraction(phase, k):
        # the phase lies in [-1/2, 1/2], and quarters matter modulo 4
        v = phase + np_f32(0.25) * np_f32(np_u32(k % np_u32(4)))
        v = v + np_f32(1) if v < np_f32(0) else v
        return v - np_f32(1) if v >= np_f32(1) else v

    fraction = target.scalar_part(fraction)

    def value(phase, k):
        return np_f32(4) * abs(fraction(phase, k) - np_f32(0.5)) - np_f32(1)

    def slope(phase, k):
        steepness = np_f32(2) * octave(k)
        return -steepness if fraction(phase, k) < np_f32(0.5) else steepness

    def make_waves(function: Callable, n_values: int) -> Callable:
        count, phases = make_count(target, n_values, 0), make_phases(target, memory, n_values, octave)

        def waves(x, k):
            octaves = count(k)
            return map_values(function, phases(x, octaves), octaves)

        return target.device(waves)

    return PerDimension(
        spec.n_input_dims, spec.n_frequencies, power_of_two_in(spec.n_frequencies),
        make_values=functools.partial(make_waves, target.scalar(value)),
        make_slopes=functools.partial(make_waves, target.scalar(slope)),
        make_curvatures=None,
    )  # fmt: skip
