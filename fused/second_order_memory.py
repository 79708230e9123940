"""Where an encoding's dual numbers come from and go to (the dual counterpart of `sinks.py`).

A *dual* is a pair of tuples: n values, and their n tangents along the directions v, what changes where x moves by v.
Features are put as duals, gradients are got as duals, each half in a tile of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from .arithmetic import make_multiply
from .encoding_parts import power_of_two_in
from .fragments import Target
from .second_order_parts import make_product_of_duals
from .sinks import KINDS, MAX_LEVEL_STRIDE, PLACE, ROW, RowMemory, make_read_inputs
from .tiles import make_get, make_put

DIRECTIONS, DIRECTIONS_STRIDE, DIRECTIONS_SCALE, TANGENT_PLACE = range(MAX_LEVEL_STRIDE + 1, MAX_LEVEL_STRIDE + 5)
"""Further elements of `at`: address and row stride (bytes) of v, its factor, the row of the tangents' tile."""


@dataclass(frozen=True)
class DualMemory(RowMemory):
    """A `RowMemory` beside which directions v [batch, n_input_dims] stand in global memory as `directions_dtype`.

    factors   as those of a RowMemory, but of duals: factor(at, column) -> n values and n tangents
    """

    directions_dtype: str = "float32"

    def make_read_directions(self, count: int):
        """read(at, dim) -> `count` float32 of a row of v, times its factor, from `dim` on."""
        read = make_read_inputs(self.target, *KINDS[self.directions_dtype], count, False)
        map_values, multiply = self.target.map_fragment, make_multiply(self.target)
        first, u32 = self.first_dim, self.target.u32

        def read_directions(at, dim):
            values = read(at[DIRECTIONS], at[DIRECTIONS_STRIDE], at[ROW], u32(dim + u32(first)))
            return map_values(multiply, values, at[DIRECTIONS_SCALE])

        return self.target.device(read_directions)

    @property
    def read_direction(self):
        """read_direction(at, dim) -> float32."""
        read = self.make_read_directions(1)

        def read_direction(at, dim):
            return read(at, dim)[0]

        return self.target.device(read_direction)

    def make_put_dual(self, n_values: int, multiple: int | None = None):
        """put(at, column, dual): features and their tangents; column a multiple of `multiple`, by default n."""
        alignment, first = power_of_two_in(multiple or n_values, self.first_column), self.first_column
        put, u32 = make_put(self.target, n_values, alignment), self.target.u32

        def put_dual(at, column, dual):
            column = u32(column + u32(first))
            put(at[PLACE], column, dual[0])
            put(at[TANGENT_PLACE], column, dual[1])

        return self.target.device(put_dual)

    def make_get_dual(self, n_values: int, multiple: int | None = None):
        """get(at, column) -> the gradients of n features and their tangents, times the factors."""
        multiple = multiple or n_values
        alignment, first = power_of_two_in(multiple, self.first_column), self.first_column
        get, u32 = make_get(self.target, n_values, alignment), self.target.u32

        def get_dual(at, column):
            column = u32(column + u32(first))
            return get(at[PLACE], column), get(at[TANGENT_PLACE], column)

        get_dual = self.target.device(get_dual)
        for make_factor, first_of_factor in self.factors:
            get_dual = self._times_dual_factor(get_dual, make_factor, n_values, multiple, first - first_of_factor)
        return get_dual

    def _times_dual_factor(self, get_dual: Callable, make_factor: Callable, n_values: int, multiple: int, shift: int):
        factor, u32 = make_factor(n_values, power_of_two_in(multiple, shift)), self.target.u32
        product = make_product_of_duals(self.target)

        def get_product(at, column):
            return product(get_dual(at, column), factor(at, u32(column + u32(shift))))

        return self.target.device(get_product)


@dataclass(frozen=True)
class LargestTangentMemory(DualMemory):
    """Keeps nothing of the features but the magnitude of the largest tangent: a word of each thread in shared memory,
    to which `at` points as its TANGENT_PLACE, holds that float32's bits."""

    def make_put_dual(self, n_values: int, multiple: int | None = None):
        raise_largest = _make_raise_largest(self.target, n_values)

        def put_dual(at, column, dual):
            raise_largest(at[TANGENT_PLACE], dual[1])

        return self.target.device(put_dual)


@functools.cache
def _make_raise_largest(target: Target, n_values: int):
    @target.intrinsic(["u32", ("f32", n_values)], "void")
    def raise_largest(e, word, values):
        largest = e.load_shared(word, "u32")[0]
        for value in values:  # of float32 numbers without a sign, larger bits mean larger numbers
            bits = e.and_(e.float_to_bits(value), 0x7FFFFFFF)
            largest = e.select(e.less(largest, bits), bits, largest)
        e.store_shared(word, "u32", [largest])

    return raise_largest
