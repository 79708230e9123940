"""The encodings that have second derivatives in fused kernels: one line each."""

from __future__ import annotations

from collections.abc import Callable

from ..engines import EngineUnavailable
from ..specs import (
    CompositeSpec,
    EmptySpec,
    EncodingSpec,
    FrequencySpec,
    GridSpec,
    IdentitySpec,
    OneBlobSpec,
    SphericalHarmonicsSpec,
    TriangleWaveSpec,
)
from .composite import make_composite
from .encoding_parts import EncodingParts, make_constant_parts
from .frequency import frequency_functions
from .oneblob import oneblob_functions
from .second_order_grid import make_second_order_grid
from .second_order_harmonics import make_second_order_harmonics
from .second_order_parts import dual_features
from .second_order_per_dimension import make_second_order_identity, make_second_order_per_dimension
from .triangle_wave import triangle_wave_functions


def make_second_order_encoding(target, spec: EncodingSpec, memory, *, table_gradient: bool) -> EncodingParts:
    """The parts of any encoding in dual numbers."""
    if type(spec) not in SECOND_ORDER:
        name = type(spec).__name__.removesuffix("Spec")
        raise EngineUnavailable(f"second derivatives of the encoding {name} have no fused kernel yet")
    return SECOND_ORDER[type(spec)](target, spec, memory, table_gradient=table_gradient)


def _composite(target, spec: CompositeSpec, memory, *, table_gradient: bool) -> EncodingParts:
    kind = dual_features(target)
    return make_composite(target, kind, spec, memory, make_second_order_encoding, table_gradient=table_gradient)


def _empty(target, spec: EmptySpec, memory, *, table_gradient: bool) -> EncodingParts:
    return make_constant_parts(target, dual_features(target), memory, 0.0)


def _frequency(target, spec: FrequencySpec, memory, *, table_gradient: bool) -> EncodingParts:
    return make_second_order_per_dimension(target, memory, frequency_functions(target, spec, memory))


def _oneblob(target, spec: OneBlobSpec, memory, *, table_gradient: bool) -> EncodingParts:
    return make_second_order_per_dimension(target, memory, oneblob_functions(target, spec, memory))


def _triangle_wave(target, spec: TriangleWaveSpec, memory, *, table_gradient: bool) -> EncodingParts:
    return make_second_order_per_dimension(target, memory, triangle_wave_functions(target, spec, memory))


SECOND_ORDER: dict[type, Callable[..., EncodingParts]] = {
    CompositeSpec: _composite,
    EmptySpec: _empty,
    FrequencySpec: _frequency,
    GridSpec: make_second_order_grid,
    IdentitySpec: make_second_order_identity,
    OneBlobSpec: _oneblob,
    SphericalHarmonicsSpec: make_second_order_harmonics,
    TriangleWaveSpec: _triangle_wave,
}
