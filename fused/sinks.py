"""Where an encoding's numbers come from and go to inside a kernel: inputs and tables in global memory, rows of tiles.

An encoding never addresses memory itself; it asks a memory object for the functions it needs, by width. `RowMemory` is
the kernels' one. Anything with the same methods will do: registers for embedding, NumPy rows for tests.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .fragments import Target, make_sum, make_zeros
from .tiles import make_get, make_put


@dataclass(frozen=True)
class RowMemory:
    """Inputs x [batch, n_input_dims] in global memory as `input_dtype`, float16 tables, features in rows of a tile.

    aligned   whether x and its rows start at multiples of 16 bytes, so that chunks of 8 can be loaded at once
    """

    target: Target
    input_dtype: str
    aligned: bool

    @property
    def _input(self) -> tuple[str, int]:
        return {"float32": ("f32", 4), "float16": ("u16", 2)}[self.input_dtype]

    @property
    def read_input(self):
        """read_input(x, x_stride, row, dim) -> float32."""
        return _make_read_input(self.target, *self._input)

    @property
    def floor_to_int(self):
        return _make_floor_to_int(self.target)

    def make_read_inputs(self, count: int):
        """read(x, x_stride, row, first_dim) -> `count` float32 of a row."""
        return _make_read_inputs(self.target, *self._input, count, self.aligned)

    def make_read_entry(self, n_features: int):
        """read(table, index) -> the entry's features as float32."""
        return _make_read_entry(self.target, n_features)

    def make_add_entry(self, n_features: int):
        """add(table_gradient, index, values): float32 reduction."""
        return _make_add_entry(self.target, n_features)

    def make_add_entries(self, n_features: int):
        """add(table_gradient, index, other, values, other_values): two entries, in one reduction where they are
        neighbours."""
        return _make_add_entries(self.target, n_features)

    def make_put(self, n_values: int):
        return make_put(self.target, n_values)

    def make_get(self, n_values: int):
        return make_get(self.target, n_values)

    def make_zeros(self, n_values: int):
        return make_zeros(self.target, n_values)

    def make_sum(self, n_values: int):
        return make_sum(self.target, n_values)


@functools.cache
def _make_read_input(target: Target, kind: str, size: int):
    @target.intrinsic(["u64", "u32", "u32", "u32"], "f32")
    def read_input(e, x, x_stride, row, dim):
        value = e.load_global(e.address(e.address_by(x, row, x_stride), dim, size), kind)[0]
        return e.half_to_float(value) if kind == "u16" else value

    return read_input


@functools.cache
def _make_read_inputs(target: Target, kind: str, size: int, count: int, aligned: bool):
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
def _make_floor_to_int(target: Target):
    @target.intrinsic(["f32"], "u32")
    def floor_to_int(e, value):
        return e.floor_to_int(value)

    return floor_to_int


@functools.cache
def _make_read_entry(target: Target, n_features: int):
    @target.intrinsic(["u64", "u32"], ("f32", n_features))
    def read_entry(e, table, index):
        address = e.address(table, index, 2 * n_features)
        if n_features == 1:
            return [e.half_to_float(e.load_global(address, "u16")[0])]
        words = e.load_global(address, "u32", n_features // 2)
        return [value for word in words for value in e.unpack_half2(word)]

    return read_entry


@functools.cache
def _make_add_entry(target: Target, n_features: int):
    @target.intrinsic(["u64", "u32", ("f32", n_features)], "void")
    def add_entry(e, table_gradient, index, values):
        address = e.address(table_gradient, index, 4 * n_features)
        for i in range(0, n_features, 4):
            e.add_global(address, values[i : i + 4], 4 * i)

    return add_entry


@functools.cache
def _make_add_entries(target: Target, n_features: int):
    """Entries 2 i and 2 i + 1 of up to two features lie in 16 aligned bytes: one reduction instead of two."""

    @target.intrinsic(["u64", "u32", "u32", ("f32", n_features), ("f32", n_features)], "void")
    def add_entries(e, table_gradient, index, other, values, other_values):
        def add(place, numbers):
            for i in range(0, len(numbers), 4):
                e.add_global(place, numbers[i : i + 4], 4 * i)

        def address(i):
            return e.address(table_gradient, i, 4 * n_features)

        if n_features > 2 or e.cc < 90:
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
