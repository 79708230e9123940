"""The encodings that run fused: one line each."""

from __future__ import annotations

from collections.abc import Callable

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


def padding_value(spec: EncodingSpec) -> float:
    return PADDING_VALUE.get(type(spec), 1.0)
