"""Empty encoding: reads input dimensions and has no features of its own (mirror of reference/empty.py)."""

from __future__ import annotations

from ..specs import EmptySpec
from .encoding_parts import EncodingParts, float_features, make_constant_parts


def make_empty(target, spec: EmptySpec, memory, *, table_gradient: bool, input_gradient: bool) -> EncodingParts:
    """No items at all. Of its features, none are asked for that count."""
    return make_constant_parts(target, float_features(target), memory, 0.0)
