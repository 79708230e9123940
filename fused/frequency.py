"""Frequency encoding, per sample and input dimension (mirror of reference/frequency.py; Mildenhall et al. 2020):

    y_{i 2n + 2k + p} = sin(2^k pi x_i + p pi/2),     k < n, p = 0 (sine) or 1 (cosine)

Fast sines lose digits of large arguments, so octave k's phase, 2^(k-1) x counted in periods, is reduced to [-1/2, 1/2]
first; both the product and the reduction are exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from ..specs import FrequencySpec
from .encoding_parts import EncodingParts, power_of_two_in
from .per_dimension import PerDimension, make_per_dimension

np_f32, np_u32, np_u64 = np.float32, np.uint32, np.uint64
TWO_PI, PI = np.float32(2 * math.pi), np.float32(math.pi)


def make_octave(target, n_frequencies: int) -> Callable:
    """octave(k) -> 2^k as float32, a scalar part, for k < n_frequencies <= 64."""
    if n_frequencies <= 32:

        def octave(k):
            return np_f32(np_u32(np_u32(1) << k))

    else:

        def octave(k):
            return np_f32(np_u64(np_u64(1) << np_u64(k)))

    return target.scalar_part(octave)


@functools.cache
def make_count(target, n_values: int, shift: int):
    """count(first) -> first / 2^shift + (0, ..., n_values - 1)."""

    @target.intrinsic(["u32"], ("u32", n_values))
    def count(e, first):
        return [e.add(e.shr(first, shift), i) for i in range(n_values)]

    return count


@functools.cache
def _make_interleave(target, n_values: int):
    """interleave((a, b, ...), (A, B, ...)) -> (a, A, b, B, ...)."""

    @target.intrinsic([("f32", n_values), ("f32", n_values)], ("f32", 2 * n_values))
    def interleave(e, first, second):
        return [value for pair in zip(first, second, strict=True) for value in pair]

    return interleave


def make_phases(target, memory, n_octaves: int, octave: Callable) -> Callable:
    """phases(x, octaves) -> 2^(k-1) x minus the nearest whole number, for each k of a tuple of `n_octaves`.

    0 where the product has no fraction, or overflows.
    """
    map_values, floors = target.map_fragment, memory.make_floors(n_octaves)

    def product(k, x):
        return x * (octave(k) * np_f32(0.5))

    def to_nearest(v):
        return v + np_f32(0.5)

    def fraction(v, whole):
        r = v - np_f32(np.int32(whole))
        return np_f32(0) if abs(r) > np_f32(1) else r  # `whole` was saturated

    product, to_nearest, fraction = target.scalar(product), target.scalar(to_nearest), target.scalar(fraction)

    def phases(x, octaves):
        v = map_values(product, octaves, x)
        return map_values(fraction, v, floors(map_values(to_nearest, v)))

    return target.device(phases)


def make_frequency(target, spec: FrequencySpec, memory, *, table_gradient: bool, input_gradient: bool) -> EncodingParts:
    """The parts of a frequency encoding; it has no table."""
    return make_per_dimension(target, memory, frequency_functions(target, spec, memory), input_gradient=input_gradient)


def frequency_functions(target, spec: FrequencySpec, memory) -> PerDimension:
    """Sines and cosines, and their derivatives."""
    map_values, octave = target.map_fragment, make_octave(target, spec.n_frequencies)

    def sine_and_cosine(phase, k):
        angle = TWO_PI * phase
        return math.sin(angle), math.cos(angle)

    def slopes_of_both(phase, k):
        angle, frequency = TWO_PI * phase, PI * octave(k)
        return frequency * math.cos(angle), -frequency * math.sin(angle)

    def curvatures_of_both(phase, k):
        angle, frequency = TWO_PI * phase, PI * octave(k)
        return -frequency * (frequency * math.sin(angle)), -frequency * (frequency * math.cos(angle))

    def pick(sine, cosine, column):
        return cosine if column % np_u32(2) == np_u32(1) else sine

    pick = target.scalar(pick)

    def make_waves(pair: Callable, n_values: int) -> Callable:
        n_octaves = max(n_values // 2, 1)
        count, phases = make_count(target, n_octaves, 1), make_phases(target, memory, n_octaves, octave)
        if n_values == 1:

            def waves(x, column):
                octaves = count(column)
                both = map_values(pair, phases(x, octaves), octaves)
                return map_values(pick, both[0], both[1], column)

        else:
            interleave = _make_interleave(target, n_octaves)

            def waves(x, column):
                octaves = count(column)
                both = map_values(pair, phases(x, octaves), octaves)
                return interleave(both[0], both[1])

        return target.device(waves)

    per_dim = 2 * spec.n_frequencies
    return PerDimension(
        spec.n_input_dims, per_dim, power_of_two_in(per_dim),
        make_values=functools.partial(make_waves, target.scalar(sine_and_cosine)),
        make_slopes=functools.partial(make_waves, target.scalar(slopes_of_both)),
        make_curvatures=functools.partial(make_waves, target.scalar(curvatures_of_both)),
    )  # fmt: skip
