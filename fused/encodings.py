"""The encodings that run fused: one line each."""

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
from .empty import make_empty
from .encoding_parts import EncodingParts, float_features
from .frequency import make_frequency
from .grid import make_grid
from .identity import make_identity
from .oneblob import make_oneblob
from .planes import PlanesSpec, make_planes
from .spherical_harmonics import make_spherical_harmonics
from .triangle_wave import make_triangle_wave


def make_encoding(target, spec: EncodingSpec, memory, **gradients: bool) -> EncodingParts:
    """The parts of any encoding; `gradients`: table_gradient and input_gradient."""
    return ENCODINGS[type(spec)](target, spec, memory, **gradients)


def _make_composite(target, spec: CompositeSpec, memory, **gradients: bool) -> EncodingParts:
    return make_composite(target, float_features(target), spec, memory, make_encoding, **gradients)


ENCODINGS: dict[type, Callable[..., EncodingParts]] = {
    CompositeSpec: _make_composite,
    EmptySpec: make_empty,
    FrequencySpec: make_frequency,
    GridSpec: make_grid,
    IdentitySpec: make_identity,
    OneBlobSpec: make_oneblob,
    PlanesSpec: make_planes,
    SphericalHarmonicsSpec: make_spherical_harmonics,
    TriangleWaveSpec: make_triangle_wave,
}


def refuse_what_is_missing(spec: EncodingSpec) -> None:
    """Raises EngineUnavailable, naming the encoding, if there is no fused kernel for it."""
    if type(spec) not in ENCODINGS:
        raise EngineUnavailable(f"the encoding {type(spec).__name__.removesuffix('Spec')} has no fused kernel yet")
    if isinstance(spec, CompositeSpec):
        for child in spec.nested:
            refuse_what_is_missing(child.encoding)
