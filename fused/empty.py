"""Empty encoding: reads input dimensions and has no features of its own (mirror of reference/empty.py)."""

from __future__ import annotations

from ..specs import EmptySpec
from .encoding_parts import EncodingParts, power_of_two_in


def make_empty(target, spec: EmptySpec, memory, *, table_gradient: bool, input_gradient: bool) -> EncodingParts:
    """No items at all. Of its features, none are asked for that count."""

    def make_features(n_values: int):
        constants = memory.make_constants(n_values, 0.0)

        def features(at, column):
            return constants()

        return target.device(features)

    return EncodingParts((), (), power_of_two_in(8), make_features)
