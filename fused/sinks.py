"""Where an encoding's numbers come from and go to inside a kernel: inputs and tables in global memory, rows of tiles.

An encoding never addresses memory itself; it asks a memory object for the functions it needs, by width. `RowMemory` is
that of kernels that take rows of a tile, `LaneMemory` of models inside a user's kernel; kernels by level and second
derivatives have theirs in `level_memory.py` and `second_order_memory.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from . import fixed_point
from .arithmetic import make_multiply
from .encoding_parts import make_select, power_of_two_in
from .fragments import Target, make_sum, make_zeros
from .tiles import AnyTile, make_barriers, make_get, make_put

X, X_STRIDE, ROW, TABLE, PLACE, FIRST_ROW, BATCH_SIZE, MAX_LEVELS, MAX_LEVEL_STRIDE = range(9)
"""`at`: address and row stride (bytes) of the inputs, row of the batch, addresses of the table and the tile's row; and
for grids that need it, the row in the whole batch that row 0 is, the rows of that, and the fractions of levels in use,
with the bytes between those of two samples."""


KINDS = {"float32": ("f32", 4), "float16": ("u16", 2)}
"""Kind of an emitter's access to a dtype, and bytes."""


@dataclass(frozen=True)
class RowMemory:
    """Inputs x [batch, n_input_dims] in global memory as `input_dtype`, tables in the target's number format, features
    in rows of a tile.

    aligned           whether x and its rows start at multiples of 16 bytes, so that chunks of 8 can be loaded at once
    first_dim, first_column, first_parameter   where the inputs, features and parameters of the encoding begin
    max_level         whether each sample uses a fraction of a grid's levels
    fixed_point       whether parameter gradients are summed in fixed point: `table_gradient` then is a tuple, as
                      `fixed_point.make_add_entry` takes it
    factors           (make_factor, first_column): what gradients are multiplied by as they are read.
                      make_factor(n, multiple) -> factor(at, column) -> n float32, those of the columns from
                      first_column + column on, column a multiple of `multiple`
    tile              whose rows features go to and gradients come from; None: any whose columns lie one after the other
    """

    target: Target
    input_dtype: str
    aligned: bool
    first_dim: int = 0
    first_column: int = 0
    first_parameter: int = 0
    max_level: bool = False
    fixed_point: bool = False
    factors: tuple[tuple[Callable, int], ...] = ()
    rows_at_once = False  # whether a grid shall compute the rows of all corners of a cell before it uses them
    tile: AnyTile | None = None

    def part(self, first_dim: int, first_column: int, first_parameter: int) -> RowMemory:
        """The memory of a child that begins there."""
        return dataclasses.replace(
            self, first_dim=self.first_dim + first_dim, first_column=self.first_column + first_column,
            first_parameter=self.first_parameter + first_parameter,
        )  # fmt: skip

    def times(self, make_factor: Callable) -> RowMemory:
        """This memory, the gradients read from it multiplied."""
        return dataclasses.replace(self, factors=(*self.factors, (make_factor, self.first_column)))

    @property
    def read_input(self):
        """read_input(at, dim) -> float32."""
        read = self.make_read_inputs(1)

        def read_input(at, dim):
            return read(at, dim)[0]

        return self.target.device(read_input)

    @property
    def floor_to_int(self):
        """floor_to_int(value) -> int32 in a u32: saturates, NaN gives 0."""
        return _make_operation(self.target, "floor_to_int", "u32")

    @property
    def multiply_add(self):
        """multiply_add(a, b, c) -> a b + c with one rounding."""
        return _make_operation(self.target, "multiply_add", "f32", 3)

    def make_floors(self, count: int):
        """floors(values) -> each one's `floor_to_int`, a tuple."""
        return _make_floors(self.target, count)

    @property
    def low_bits_of_floor(self):
        """low_bits_of_floor(value) -> the last 32 bits of floor(value), a u32; NaN gives 0."""
        return _make_operation(self.target, "low_bits_of_floor", "u32")

    @property
    def float_to_bits(self):
        """float_to_bits(value) -> u32."""
        return _make_operation(self.target, "float_to_bits", "u32")

    @property
    def read_max_level(self):
        """read_max_level(at) -> float32, the fraction of a grid's levels that the sample uses."""
        read = _make_read_max_level(self.target)

        def read_max_level(at):
            return read(at[MAX_LEVELS], at[MAX_LEVEL_STRIDE], at[ROW])

        return self.target.device(read_max_level)

    @property
    def stream_position(self):
        """stream_position(at, turn) -> u64: the sample's place in a stream of one number a sample, turn after turn."""
        u64 = self.target.u64

        def stream_position(at, turn):
            return u64(u64(u64(at[FIRST_ROW]) + u64(at[ROW])) + u64(turn) * u64(at[BATCH_SIZE]))

        return self.target.device(stream_position)

    def make_read_inputs(self, count: int):
        """read(at, dim) -> `count` float32 of a row, from `dim`, a multiple of `count`, on."""
        aligned = self.aligned and self.first_dim % count == 0
        read = make_read_inputs(self.target, *KINDS[self.input_dtype], count, aligned)
        first, u32 = self.first_dim, self.target.u32

        def read_inputs(at, dim):
            return read(at[X], at[X_STRIDE], at[ROW], u32(dim + u32(first)))

        return self.target.device(read_inputs)

    def make_read_entry(self, n_features: int):
        """read(at, index) -> the entry's features as float32."""
        read = _make_read_entry(self.target, n_features, self.first_parameter)

        def read_entry(at, index):
            return read(at[TABLE], index)

        return self.target.device(read_entry)

    def make_add_entry(self, n_features: int):
        """add(table_gradient, index, values): float32 reduction, or one in fixed point."""
        if self.fixed_point:
            return fixed_point.make_add_entry(self.target, n_features, self.first_parameter)
        return _make_add_entry(self.target, n_features, self.first_parameter)

    def make_add_entries(self, n_features: int):
        """add(table_gradient, index, other, values, other_values): two entries, in one reduction where they are
        neighbours."""
        if self.fixed_point:
            add = self.make_add_entry(n_features)

            def add_both(table_gradient, index, other, values, other_values):
                add(table_gradient, index, values)
                add(table_gradient, other, other_values)

            return self.target.device(add_both)
        return _make_add_entries(self.target, n_features, self.first_parameter)

    def make_put(self, n_values: int, multiple: int | None = None):
        """put(at, column, values): features to columns of a row; column a multiple of `multiple`, by default n."""
        alignment, first = power_of_two_in(multiple or n_values, self.first_column), self.first_column
        put, u32 = make_put(self.target, n_values, alignment, self.tile), self.target.u32

        def put_features(at, column, values):
            put(at[PLACE], u32(column + u32(first)), values)

        return self.target.device(put_features)

    def make_get(self, n_values: int, multiple: int | None = None):
        """get(at, column) -> gradients of n features, times the factors."""
        multiple = multiple or n_values
        alignment, first = power_of_two_in(multiple, self.first_column), self.first_column
        get, u32 = make_get(self.target, n_values, alignment, self.tile), self.target.u32

        def get_gradient(at, column):
            return get(at[PLACE], u32(column + u32(first)))

        get_gradient = self.target.device(get_gradient)
        for make_factor, first_of_factor in self.factors:
            get_gradient = self._times_factor(get_gradient, make_factor, n_values, multiple, first - first_of_factor)
        return get_gradient

    def _times_factor(self, get: Callable, make_factor: Callable, n_values: int, multiple: int, shift: int):
        factor = make_factor(n_values, power_of_two_in(multiple, shift))
        map_values, u32 = self.target.map_fragment, self.target.u32

        multiply = make_multiply(self.target)

        def get_product(at, column):
            return map_values(multiply, get(at, column), factor(at, u32(column + u32(shift))))

        return self.target.device(get_product)

    def make_constants(self, n_values: int, value: float):
        """constants() -> n times the value."""
        return _make_constants(self.target, n_values, value)

    @property
    def warp_barrier(self):
        """warp_barrier(): what lanes have put is in order with what any lane puts from now on."""
        return make_barriers(self.target)[1]

    def make_zeros(self, n_values: int):
        return make_zeros(self.target, n_values)

    def make_sum(self, n_values: int):
        return make_sum(self.target, n_values)


@dataclass(frozen=True)
class LaneMemory(RowMemory):
    """As RowMemory, but each lane has its own sample: at[X] is its tuple of `n_inputs` float32, in registers."""

    n_inputs: int = 0

    def make_read_inputs(self, count: int):
        select = make_select(self.target, self.n_inputs, count, self.first_dim)

        def read_inputs(at, dim):
            return select(at[X], dim)

        return self.target.device(read_inputs)


@functools.cache
def _make_constants(target: Target, n_values: int, value: float):
    @target.intrinsic([], ("f32", n_values))
    def constants(e):
        return [e.f32(value)] * n_values

    return constants


@functools.cache
def make_read_inputs(target: Target, kind: str, size: int, count: int, aligned: bool):
    @target.intrinsic(["u64", "u32", "u32", "u32"], ("f32", count))
    def read_inputs(e, x, x_stride, row, first_dim):
        address = e.address(e.address_by(x, row, x_stride), first_dim, size)
        if aligned and count % 4 == 0:
            if kind == "u16":
                words = e.load_global(address, "u32", count // 2)
                return [value for word in words for value in e.unpack_half2(word)]
            return [v for i in range(0, count, 4) for v in e.load_global(address, "f32", 4, 4 * i)]
        values = [e.load_global(address, kind, 1, size * i)[0] for i in range(count)]
        return [e.half_to_float(v) for v in values] if kind == "u16" else values

    return read_inputs


@functools.cache
def _make_floors(target: Target, count: int):
    @target.intrinsic([("f32", count)], ("u32", count))
    def floors(e, values):
        return [e.floor_to_int(value) for value in values]

    return floors


@functools.cache
def _make_operation(target: Target, name: str, result: str, n_operands: int = 1):
    """The emitter's operation of this name, on float32 numbers."""

    @target.intrinsic(["f32"] * n_operands, result)
    def operation(e, *operands):
        return getattr(e, name)(*operands)

    return operation


@functools.cache
def _make_read_max_level(target: Target):
    @target.intrinsic(["u64", "u32", "u32"], "f32")
    def read_max_level(e, max_levels, stride, row):
        return e.load_global(e.address_by(max_levels, row, stride), "f32")[0]

    return read_max_level


@functools.cache
def _make_read_entry(target: Target, n_features: int, first: int):
    """`first`: elements before the table. Where it is no multiple of n_features, loads are narrower."""
    number_format, size = target.format, target.format.parameter_bytes
    width = min(power_of_two_in(n_features, first), 16 // size)

    @target.intrinsic(["u64", "u32"], ("f32", n_features))
    def read_entry(e, table, index):
        address, values = e.address(table, index, size * n_features, size * first), []
        for i in range(0, n_features, width):
            values += number_format.load_parameters(e, address, width, size * i)
        return values

    return read_entry


@functools.cache
def _make_add_entry(target: Target, n_features: int, first: int):
    width = min(4, power_of_two_in(n_features, first))

    @target.intrinsic(["u64", "u32", ("f32", n_features)], "void")
    def add_entry(e, table_gradient, index, values):
        address = e.address(table_gradient, index, 4 * n_features, 4 * first)
        for i in range(0, n_features, width):
            e.add_global(address, values[i : i + width], 4 * i)

    return add_entry


@functools.cache
def _make_add_entries(target: Target, n_features: int, first: int):
    """Entries 2 i and 2 i + 1 of up to two features lie in 16 aligned bytes: one reduction instead of two."""
    width = min(4, power_of_two_in(2 * n_features, first))

    @target.intrinsic(["u64", "u32", "u32", ("f32", n_features), ("f32", n_features)], "void")
    def add_entries(e, table_gradient, index, other, values, other_values):
        def add(place, numbers):
            step = min(width, len(numbers))
            for i in range(0, len(numbers), step):
                e.add_global(place, numbers[i : i + step], 4 * i)

        def address(i):
            return e.address(table_gradient, i, 4 * n_features, 4 * first)

        if 2 * n_features > width or e.cc < 90:
            add(address(index), values)
            add(address(other), other_values)
            return
        neighbours = e.equal(e.xor(index, other), 1)
        index_is_first = e.less(index, other)
        pairs = list(zip(values, other_values, strict=True))
        ordered = [e.select(index_is_first, a, b) for a, b in pairs] + [
            e.select(index_is_first, b, a) for a, b in pairs
        ]
        with e.when(neighbours):
            add(address(e.minimum(index, other)), ordered)
        with e.when(e.equal(e.select(neighbours, e.u32(1), e.u32(0)), 0)):
            add(address(index), values)
            add(address(other), other_values)

    return add_entries
