"""The encodings that run fused: one line each."""

from __future__ import annotations

from collections.abc import Callable

from ..engines import EngineUnavailable
from ..specs import EncodingSpec, GridSpec, IdentitySpec
from .encoding_parts import EncodingParts
from .grid import make_grid
from .identity import make_identity

ENCODINGS: dict[type, Callable[..., EncodingParts]] = {
    GridSpec: make_grid,
    IdentitySpec: make_identity,
}

PADDING_VALUE: dict[type, float] = {GridSpec: 0.0}
"""What the columns behind an encoding's own hold, where it isn't 1."""


def refuse_what_is_missing(spec: EncodingSpec) -> None:
    """Raises EngineUnavailable, naming the encoding or its option, if there is no fused kernel for it."""
    if type(spec) not in ENCODINGS:
        raise EngineUnavailable(f"the encoding {type(spec).__name__.removesuffix('Spec')} has no fused kernel yet")
    if isinstance(spec, GridSpec):
        missing = [name for name in ("stochastic_interpolation", "fixed_point_pos") if getattr(spec, name)]
        if spec.hash != "CoherentPrime":
            missing.append(f"hash={spec.hash}")
        if spec.n_input_dims not in (2, 3, 4):
            missing.append(f"n_input_dims={spec.n_input_dims}")
        if missing:
            raise EngineUnavailable(f"grids with {', '.join(missing)} have no fused kernel yet")


def padding_value(spec: EncodingSpec) -> float:
    return PADDING_VALUE.get(type(spec), 1.0)
