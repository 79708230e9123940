"""Where a grid finds its numbers when kernels work level by level: planes for features, tables in shared memory.

The grid's factory (`grid.py`) is the same as in a single kernel; it is given one of these memories. What a sample needs
from global memory is read ahead (`level_kernels.py`), so its `at` is

    x          the sample's inputs, a tuple
    gradient   dL/dfeatures of the level in hand, a tuple (backward)
    row        of the batch
    table      where the encoding's entries begin: in global memory, or in shared memory, a u32 from which the entries
               before the level in hand are already subtracted
    place      (planes, bytes of a plane)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .fragments import Target, make_pick
from .planes import make_write_plane
from .sinks import PLACE, ROW, TABLE, RowMemory, X

GRADIENT = 1  # in place of a row stride


@dataclass(frozen=True)
class LevelMemory(RowMemory):
    """Features go to planes; the table is in global memory."""

    n_input_dims: int = 0
    rows_at_once = True  # these kernels have the registers for it

    @property
    def read_input(self):
        pick = make_pick(self.target, "f32", self.n_input_dims)

        def read_input(at, dim):
            return pick(at[X], dim)

        return self.target.device(read_input)

    def make_put(self, n_values: int, multiple: int | None = None):
        write, u32 = make_write_plane(self.target, n_values), self.target.u32

        def put(at, column, values):
            planes, plane_bytes = at[PLACE]
            write(planes, plane_bytes, at[ROW], u32(column // u32(n_values)), values)

        return self.target.device(put)

    def make_get(self, n_values: int, multiple: int | None = None):
        def get(at, column):
            return at[GRADIENT]

        return self.target.device(get)


@dataclass(frozen=True)
class SharedTableMemory(LevelMemory):
    """As `LevelMemory`, the level's table being in shared memory."""

    def make_read_entry(self, n_features: int):
        read = _make_read_shared_entry(self.target, n_features)

        def read_entry(at, index):
            return read(at[TABLE], index)

        return self.target.device(read_entry)


@dataclass(frozen=True)
class SharedGradientMemory(LevelMemory):
    """Gradients of one feature of a level, given in steps of fixed point, are summed in shared memory as int32.

    The grid it is given to has one feature an entry; the table gradient that it passes to `add_entry` is where the sum
    of the encoding's first entry would stand.
    """

    def make_add_entry(self, n_features: int):
        return _make_add_shared(self.target)

    def make_add_entries(self, n_features: int):
        add = self.make_add_entry(n_features)

        def add_entries(sums, index, other, values, other_values):
            add(sums, index, values)
            add(sums, other, other_values)

        return self.target.device(add_entries)


@functools.cache
def _make_read_shared_entry(target: Target, n_features: int):
    @target.intrinsic(["u32", "u32"], ("f32", n_features))
    def read_entry(e, table, index):
        address = e.add(table, e.mul(index, 2 * n_features))
        if n_features == 1:
            return [e.half_to_float(e.load_shared(address, "u16")[0])]
        words = e.load_shared(address, "u32", n_features // 2)
        return [value for word in words for value in e.unpack_half2(word)]

    return read_entry


@functools.cache
def _make_add_shared(target: Target):
    @target.intrinsic(["u32", "u32", ("f32", 1)], "void")
    def add_shared(e, sums, index, values):
        e.add_shared_u32(e.add(sums, e.shl(index, 2)), e.round_to_int(values[0]))

    return add_shared
