"""What an encoding is to the second-order kernels: its items in dual numbers.

The second derivatives of L are the first ones, computed in dual numbers a + eps a' (eps^2 = 0): with x + eps v for x,
the features are y + eps J v; and for a gradient A + eps B of the features, the encoding's own backward pass gives

    dL/dx + eps (J^T B + (H v) A),      H v the derivative of J^T along v, at constant A
    dL/d(entry) + eps (W B + W' A),     W the entry's weight, W' its derivative along v

The eps parts are the derivatives of S = sum <v, dL/dx>. A factory is `make_x(target, spec, memory, *, table_gradient)`,
the memory being a `DualMemory`. It returns `EncodingParts` whose features and gradients are duals: `encode` puts every
feature and its tangent, and in `backward` only the eps parts go to the table's gradient and to `dx`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from .arithmetic import make_add, make_multiply
from .encoding_parts import FeatureKind, make_choose_by_column


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


@functools.cache
def dual_features(target) -> FeatureKind:
    """Features as pairs of tuples of float32: values, and their tangents."""
    map_values, add_one, choose_one = target.map_fragment, make_add(target), make_choose_by_column(target)

    def add(first, second):
        return map_values(add_one, first[0], second[0]), map_values(add_one, first[1], second[1])

    def choose(mine, others, column, start, width):
        values = map_values(choose_one, mine[0], others[0], column, start, width)
        return values, map_values(choose_one, mine[1], others[1], column, start, width)

    def join(first, second):
        return first[0] + second[0], first[1] + second[1]

    def make_constants(memory, n_values: int, value: float) -> Callable:
        values, tangents = memory.make_constants(n_values, value), memory.make_zeros(n_values)

        def constants():
            return values(), tangents()

        return target.device(constants)

    add, choose, join = (target.device(f) for f in (add, choose, join))
    return FeatureKind(
        add, make_product_of_duals(target), choose, join, make_constants, lambda memory, n: memory.make_put_dual(n)
    )
