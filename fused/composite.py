"""Composite encoding: several encodings, each of its own input dims (mirror of reference/composite.py).

    Concatenation   the children's items, at their columns
    Sum, Product    an item is a chunk of columns, for which all children's features are computed and combined in
                    float32; so features are rounded once, as in the reference

Backward, the items are those of the children. In a Sum all read the same gradient u; in a Product child i reads u times
the product r of the other children's features, formed again for each. Children that share input dims add to dL/dx one
after the other (encoding_stage.py).

All this is the same in dual numbers (second_order_parts.py): there child i of a Product reads the gradient A + eps B
times the dual product r + eps r' of the others, which is A r + eps (B r + A r').
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from ..layout import n_encoding_params
from ..specs import CompositeSpec
from .encoding_parts import (
    EncodingParts,
    FeatureKind,
    make_chunks,
    make_padding,
    make_wide_features,
    power_of_two_in,
)


def make_composite(
    target,
    kind: FeatureKind,
    spec: CompositeSpec,
    memory,
    make_encoding: Callable[..., EncodingParts],
    **gradients: bool,
) -> EncodingParts:
    """The parts of a composite, with features of any kind.

    make_encoding   make_encoding(target, spec, memory, **gradients) makes those of any encoding
    """
    memories, first_parameter = [], 0
    for child in spec.nested:
        memories.append(memory.part(child.first_input_dim, child.first_output_dim, first_parameter))
        first_parameter += n_encoding_params(child.encoding)

    def make(i: int, memory) -> EncodingParts:
        return make_encoding(target, spec.nested[i].encoding, memory, **gradients)

    children = [make(i, memory) for i, memory in enumerate(memories)]
    padded = [
        _with_padding(target, kind, memory, parts, child.encoding.n_output_dims, child.n_padded_output_dims)
        for child, parts, memory in zip(spec.nested, children, memories, strict=True)
    ]
    if spec.reduction == "Concatenation":
        starts = [child.first_output_dim for child in spec.nested]
        widths = [child.n_padded_output_dims for child in spec.nested]
        whole = _side_by_side(target, kind, padded, starts, widths)
        encode = tuple(group for parts in padded for group in parts.encode)
    else:
        whole = _combined(target, kind, spec.reduction, padded)
        encode = make_chunks(target, kind, memory, whole, 0, spec.n_output_dims)
    if spec.reduction == "Product" and len(children) > 1:
        others = [_combined(target, kind, "Product", padded[:i] + padded[i + 1 :]) for i in range(len(padded))]
        factors = [functools.partial(make_wide_features, target, kind, parts) for parts in others]
        children = [make(i, memories[i].times(factor)) for i, factor in enumerate(factors)]
    backward = tuple(part for parts in children for part in parts.backward)
    return dataclasses.replace(whole, encode=encode, backward=backward)


def _with_padding(target, kind: FeatureKind, memory, parts: EncodingParts, n_own: int, width: int) -> EncodingParts:
    """A child with its padding: features of all `width` columns."""
    if n_own == width:
        return parts
    padding = make_padding(target, kind, memory, n_own, width - n_own, parts.padding_value)
    both = _side_by_side(target, kind, [parts, padding], [0, n_own], [n_own, width - n_own])
    return dataclasses.replace(both, encode=(*parts.encode, *padding.encode), backward=parts.backward)


def _side_by_side(
    target, kind: FeatureKind, children: list[EncodingParts], starts: list[int], widths: list[int]
) -> EncodingParts:
    """Features of children at columns `starts`: each is asked for the features, and one answer is taken."""
    u32, np_u32, choose = target.u32, np.uint32, kind.choose
    used = [entry for entry in zip(children, starts, widths, strict=True) if entry[2] > 0]

    def to_own(column, start, width):
        own = np_u32(column - start)
        return own if own < width else np_u32(0)

    to_own = target.scalar(to_own)

    def make_features(n_values: int) -> Callable:
        def chain(number: int) -> Callable:
            parts, start, width = used[number]
            own = parts.make_features(n_values)

            def at_its_place(at, column):
                return own(at, to_own(column, u32(start), u32(width)))

            at_its_place = target.device(at_its_place)
            if number + 1 == len(used):
                return at_its_place
            others = chain(number + 1)

            def either(at, column):
                return choose(at_its_place(at, column), others(at, column), column, u32(start), u32(width))

            return target.device(either)

        return chain(0)

    numbers = [n for parts, start, width in used for n in (parts.granularity, start, width)]
    return EncodingParts((), (), power_of_two_in(*numbers), make_features)


def _combined(target, kind: FeatureKind, reduction: str, children: list[EncodingParts]) -> EncodingParts:
    """Sum or product of the children's features."""
    combine = {"Sum": kind.add, "Product": kind.multiply}[reduction]

    def make_features(n_values: int) -> Callable:
        features = children[0].make_features(n_values)
        for parts in children[1:]:
            features = both(features, parts.make_features(n_values))
        return features

    def both(first: Callable, second: Callable) -> Callable:
        def features(at, column):
            return combine(first(at, column), second(at, column))

        return target.device(features)

    return EncodingParts((), (), power_of_two_in(*(parts.granularity for parts in children)), make_features)
