"""Composite encodings in dual numbers (composite.py).

Side by side or in a Sum, children are given the gradient as it is. In a Product child i's is (A + eps B) times the dual
product r + eps r' of the others: A r + eps (B r + A r').
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..layout import n_encoding_params
from ..specs import CompositeSpec
from .arithmetic import make_add
from .encoding_parts import power_of_two_in
from .second_order_parts import (
    SecondOrderParts,
    make_chunks,
    make_padding_parts,
    make_product_of_duals,
    make_wide_dual,
)


def make_second_order_composite(
    target, spec: CompositeSpec, memory, make_parts: Callable[..., SecondOrderParts], *, table_gradient: bool
) -> SecondOrderParts:
    """The parts of a composite in dual numbers; `make_parts` makes those of any encoding."""
    memories, first_parameter = [], 0
    for child in spec.nested:
        memories.append(memory.part(child.first_input_dim, child.first_output_dim, first_parameter))
        first_parameter += n_encoding_params(child.encoding)

    def make(i: int, memory) -> SecondOrderParts:
        return make_parts(target, spec.nested[i].encoding, memory, table_gradient=table_gradient)

    children = [make(i, memory) for i, memory in enumerate(memories)]
    padded = [
        _with_padding(target, memory, parts, child.encoding.n_output_dims, child.n_padded_output_dims)
        for child, parts, memory in zip(spec.nested, children, memories, strict=True)
    ]
    if spec.reduction == "Concatenation":
        starts = [child.first_output_dim for child in spec.nested]
        widths = [child.n_padded_output_dims for child in spec.nested]
        granularity, make_dual = _side_by_side(target, padded, starts, widths)
        encode = tuple(group for parts in padded for group in parts.encode)
    else:
        whole = _combined(target, spec.reduction, padded)
        granularity, make_dual = whole.granularity, whole.make_dual
        encode = make_chunks(target, memory, whole, 0, spec.n_output_dims)
    if spec.reduction == "Product" and len(children) > 1:
        others = [_combined(target, "Product", padded[:i] + padded[i + 1 :]) for i in range(len(padded))]
        factors = [functools.partial(make_wide_dual, target, parts) for parts in others]
        children = [make(i, memories[i].times(factor)) for i, factor in enumerate(factors)]
    backward = tuple(part for parts in children for part in parts.backward)
    return SecondOrderParts(encode, backward, granularity, make_dual)


def _with_padding(target, memory, parts: SecondOrderParts, n_own: int, width: int) -> SecondOrderParts:
    """A child with its padding: features of all `width` columns."""
    if n_own == width:
        return parts
    padding = make_padding_parts(target, memory, n_own, width - n_own, parts.padding_value)
    granularity, make_dual = _side_by_side(target, [parts, padding], [0, n_own], [n_own, width - n_own])
    return SecondOrderParts((*parts.encode, *padding.encode), parts.backward, granularity, make_dual)


def _side_by_side(
    target, children: list[SecondOrderParts], starts: list[int], widths: list[int]
) -> tuple[int, Callable]:
    """(granularity, make_dual) of children at columns `starts`: each is asked, and one answer is taken."""
    u32, map_values, np_u32 = target.u32, target.map_fragment, np.uint32
    used = [entry for entry in zip(children, starts, widths, strict=True) if entry[2] > 0]

    def to_own(column, start, width):
        own = np_u32(column - start)
        return own if own < width else np_u32(0)

    def choose(mine, others, column, start, width):
        return mine if np_u32(column - start) < width else others

    to_own, choose = target.scalar(to_own), target.scalar(choose)

    def make_dual(n_values: int) -> Callable:
        def chain(number: int) -> Callable:
            parts, start, width = used[number]
            own = parts.make_dual(n_values)

            def at_its_place(at, column):
                return own(at, to_own(column, u32(start), u32(width)))

            at_its_place = target.device(at_its_place)
            if number + 1 == len(used):
                return at_its_place
            others = chain(number + 1)

            def either(at, column):
                a, b = at_its_place(at, column), others(at, column)
                values = map_values(choose, a[0], b[0], column, u32(start), u32(width))
                return values, map_values(choose, a[1], b[1], column, u32(start), u32(width))

            return target.device(either)

        return chain(0)

    numbers = [n for parts, start, width in used for n in (parts.granularity, start, width)]
    return power_of_two_in(*numbers), make_dual


def _combined(target, reduction: str, children: list[SecondOrderParts]) -> SecondOrderParts:
    """Sum or product of the children's features."""
    map_values, add = target.map_fragment, make_add(target)
    if reduction == "Product":
        combine = make_product_of_duals(target)
    else:

        def combine(first, second):
            return map_values(add, first[0], second[0]), map_values(add, first[1], second[1])

        combine = target.device(combine)

    def both(first: Callable, second: Callable) -> Callable:
        def dual(at, column):
            return combine(first(at, column), second(at, column))

        return target.device(dual)

    def make_dual(n_values: int) -> Callable:
        dual = children[0].make_dual(n_values)
        for parts in children[1:]:
            dual = both(dual, parts.make_dual(n_values))
        return dual

    return SecondOrderParts((), (), power_of_two_in(*(parts.granularity for parts in children)), make_dual)
