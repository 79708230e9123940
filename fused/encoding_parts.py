"""What an encoding is to the fuser: items that can be computed independently, for every sample of a tile.

An encoding's factory is `make_x(target, spec, memory, *, table_gradient, input_gradient)`. It is given a `memory`
(`sinks.py`) that it reads inputs and entries from and puts features into, all counted from its own first input dim,
column and parameter; so the same factory serves whole models, children of a composite, single-sample use and tests. It
returns `EncodingParts`; the fuser divides the items among threads.

Functions of an encoding find their sample through `at`, a tuple that only the memory looks into.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ItemGroup:
    """Items `first` ... `first + count - 1`, which share their code, `work`; forward `work(item, at)`, which puts the
    item's features; backward `work(item, at, table_gradient, live, dx)`, which takes the gradient of the item's
    features times `live` (0 for rows past the batch, else 1), and adds to the gradient of the table and to `dx`, an
    array of float32 of this thread.

    by_sample   consecutive threads take consecutive samples and the same item (items cost arithmetic and gathers, e.g.
                grids); otherwise consecutive items of one sample, so that their memory accesses are consecutive.
    """

    first: int
    count: int
    work: Callable
    by_sample: bool


@dataclass(frozen=True)
class BackwardPart:
    """Item groups that are alike `by_sample` and share input dims, `first_dim` (of the whole model) and following.

    dims_per_item   0 for groups by sample: `dx` holds all n_dims. Else an item owns that many dims, from
                    first_dim + item * dims_per_item on, and `dx` holds those.
    """

    groups: tuple[ItemGroup, ...]
    first_dim: int
    n_dims: int
    dims_per_item: int = 0

    @property
    def dims(self) -> range:
        return range(self.first_dim, self.first_dim + self.n_dims)


@dataclass(frozen=True)
class EncodingParts:
    """The item groups of an encoding.

    encode          put every feature once
    backward        only what has a gradient to compute: together they write dL/dx of the dims that count
    granularity     a power of two up to 8, see `make_features`
    make_features   make_features(n) -> features(at, column) -> n features from `column` on as float32, for any of the
                    encoding's columns that is a multiple of n, a power of two up to `granularity`. What Sum and Product
                    combine; the same values as `encode` puts
    padding_value   what columns behind the encoding's own hold
    """

    encode: tuple[ItemGroup, ...]
    backward: tuple[BackwardPart, ...]
    granularity: int
    make_features: Callable[[int], Callable]
    padding_value: float = 1.0


def power_of_two_in(*counts: int) -> int:
    """The largest power of two up to 8 that divides all counts."""
    bits = functools.reduce(int.__or__, counts, 8)
    return bits & -bits


@functools.cache
def make_divide(target, divisor: int):
    """divide(i) -> (i // divisor, i % divisor)."""

    @target.intrinsic(["u32"], ("u32", 2))
    def divide(e, i):
        return [e.div(i, divisor), e.mod(i, divisor)]

    return divide


@functools.cache
def make_select(target, n_values: int, n_chosen: int, start: int = 0):
    """select(values, i) -> `n_chosen` of the values, from start + i on; i a multiple of n_chosen."""

    @target.intrinsic([("f32", n_values), "u32"], ("f32", n_chosen))
    def select(e, values, i):
        chosen = list(values[start : start + n_chosen])
        for first in range(n_chosen, n_values - start - n_chosen + 1, n_chosen):
            here = e.equal(i, first)
            chosen = [e.select(here, values[start + first + j], chosen[j]) for j in range(n_chosen)]
        return chosen

    return select


def concatenate_features(target, functions: list[tuple[Callable, int]]) -> Callable:
    """features(at, column): the features of several such functions, each from its own offset to `column` on."""
    u32 = target.u32
    if len(functions) == 1:
        ((function, offset),) = functions

        def shifted(at, column):
            return function(at, u32(column + u32(offset)))

        return target.device(shifted)
    middle = len(functions) // 2  # halves, since Numba limits how deep functions nest
    first = concatenate_features(target, functions[:middle])
    second = concatenate_features(target, functions[middle:])

    def both(at, column):
        return first(at, column) + second(at, column)

    return target.device(both)


def make_wide_features(target, parts: EncodingParts, n_values: int, multiple: int) -> Callable:
    """features(at, column) -> any number of features, from a column that is a multiple of `multiple`."""
    width = power_of_two_in(parts.granularity, n_values, multiple)
    narrow = parts.make_features(width)
    return concatenate_features(target, [(narrow, offset) for offset in range(0, n_values, width)])


def make_padding(target, memory, first_column: int, count: int, value: float) -> tuple[ItemGroup, ...]:
    """Fill `count` columns with a value."""
    if count == 0:
        return ()
    width, u32 = power_of_two_in(first_column, count), target.u32
    put, constants = memory.make_put(width), memory.make_constants(width, value)

    def pad(item, at):
        put(at, u32(u32(item * u32(width)) + u32(first_column)), constants())

    return (ItemGroup(0, count // width, target.device(pad), by_sample=False),)
