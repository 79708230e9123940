"""What an encoding is to the second-order kernels: its items in dual numbers.

The second derivatives of L are the first ones, computed in dual numbers a + eps a' (eps^2 = 0): with x + eps v for x,
the features are y + eps J v; and for a gradient A + eps B of the features, the encoding's own backward pass gives

    dL/dx + eps (J^T B + (H v) A),      H v the derivative of J^T along v, at constant A
    dL/d(entry) + eps (W B + W' A),     W the entry's weight, W' its derivative along v

The eps parts are the derivatives of S = sum <v, dL/dx>. A factory is `make_x(target, spec, memory, *, table_gradient)`
and returns `SecondOrderParts`; the memory is a `DualMemory`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from .arithmetic import make_multiply
from .encoding_parts import BackwardPart, ItemGroup, power_of_two_in


@dataclass(frozen=True)
class SecondOrderParts:
    """The item groups of an encoding in dual numbers; otherwise as in `EncodingParts`.

    encode       put every feature and its tangent once
    backward     as `EncodingParts.backward`, of duals: only the eps parts go to the table's gradient and to `dx`
    make_dual    make_dual(n) -> dual(at, column) -> (n features, n tangents)
    """

    encode: tuple[ItemGroup, ...]
    backward: tuple[BackwardPart, ...]
    granularity: int
    make_dual: Callable[[int], Callable]
    padding_value: float = 1.0


@functools.cache
def make_product_of_duals(target) -> Callable:
    """product((a, a'), (b, b')) = (a b, a' b + a b'), of tuples element by element."""
    map_values, multiply = target.map_fragment, make_multiply(target)

    def tangent(a, a_tangent, b, b_tangent):
        return a_tangent * b + a * b_tangent

    tangent = target.scalar(tangent)

    def product(first, second):
        return map_values(multiply, first[0], second[0]), map_values(tangent, first[0], first[1], second[0], second[1])

    return target.device(product)


def make_wide_dual(target, parts: SecondOrderParts, n_values: int, multiple: int) -> Callable:
    """dual(at, column) of any number of features, from a column that is a multiple of `multiple`."""
    u32 = target.u32
    width = power_of_two_in(parts.granularity, n_values, multiple)
    narrow = parts.make_dual(width)

    def concatenate(offsets: list[int]) -> Callable:
        if len(offsets) == 1:
            offset = offsets[0]

            def shifted(at, column):
                return narrow(at, u32(column + u32(offset)))

            return target.device(shifted)
        middle = len(offsets) // 2  # halves, since Numba limits how deep functions nest
        first, second = concatenate(offsets[:middle]), concatenate(offsets[middle:])

        def both(at, column):
            a, b = first(at, column), second(at, column)
            return a[0] + b[0], a[1] + b[1]

        return target.device(both)

    return concatenate(list(range(0, n_values, width)))


def make_constant_dual(target, memory, n_values: int, value: float) -> Callable:
    """dual(at, column): n times the value, which nothing moves."""
    constants, zeros = memory.make_constants(n_values, value), memory.make_zeros(n_values)

    def dual(at, column):
        return constants(), zeros()

    return target.device(dual)


def make_chunks(target, memory, parts: SecondOrderParts, first_column: int, width: int) -> tuple[ItemGroup, ...]:
    """Put all features of a function of columns, from `first_column` on, chunk by chunk."""
    if width == 0:
        return ()
    chunk, u32 = power_of_two_in(parts.granularity, first_column, width), target.u32
    dual, put = parts.make_dual(chunk), memory.make_put_dual(chunk)

    def encode(item, at):
        column = u32(u32(item * u32(chunk)) + u32(first_column))
        put(at, column, dual(at, column))

    return (ItemGroup(0, width // chunk, target.device(encode), by_sample=False),)


def make_padding_parts(target, memory, n_own: int, width: int, value: float) -> SecondOrderParts:
    """`width` columns of a value behind an encoding's own."""
    parts = SecondOrderParts((), (), 8, lambda n: make_constant_dual(target, memory, n, value))
    return SecondOrderParts(make_chunks(target, memory, parts, n_own, width), (), 8, parts.make_dual)
