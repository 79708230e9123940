"""What an encoding is to the fuser: items that can be computed independently, for every sample of a tile.

An encoding's factory is `make_x(target, spec, memory, *, table_gradient, input_gradient)`. It is given a `memory`
(`sinks.py`) that it reads inputs and entries from and puts features into, all counted from its own first input dim,
column and parameter; so the same factory serves whole models, children of a composite, single-sample use and tests. It
returns `EncodingParts`; the fuser divides the items among threads.

Functions of an encoding find their sample through `at`, a tuple that only the memory looks into.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arithmetic import make_add, make_multiply


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
    make_features   make_features(n) -> features(at, column) -> n features from `column` on, for any of the encoding's
                    columns that is a multiple of n, a power of two up to `granularity`. What Sum and Product combine;
                    the same values as `encode` puts
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


@dataclass(frozen=True)
class FeatureKind:
    """What features are, and how whoever doesn't look into them puts them together: tuples of float32
    (`float_features`), or such tuples with their tangents (`second_order_parts.dual_features`).

    add, multiply    of two chunks of features, element by element
    choose           choose(mine, others, column, start, width) -> mine where `column` is one of `width` columns from
                     `start` on, else the others
    join             join(first, second) -> the features of both, one behind the other
    make_constants   make_constants(memory, n, value) -> constants() -> n features
    make_put         make_put(memory, n) -> put(at, column, features)
    """

    add: Callable
    multiply: Callable
    choose: Callable
    join: Callable
    make_constants: Callable[[Any, int, float], Callable]
    make_put: Callable[[Any, int], Callable]


@functools.cache
def make_choose_by_column(target) -> Callable:
    """Scalar `FeatureKind.choose`."""
    u32 = np.uint32

    def choose(mine, others, column, start, width):
        return mine if u32(column - start) < width else others

    return target.scalar(choose)


@functools.cache
def float_features(target) -> FeatureKind:
    """Features as tuples of float32."""
    map_values, choose_one = target.map_fragment, make_choose_by_column(target)
    add_one, multiply_one = make_add(target), make_multiply(target)

    def add(first, second):
        return map_values(add_one, first, second)

    def multiply(first, second):
        return map_values(multiply_one, first, second)

    def choose(mine, others, column, start, width):
        return map_values(choose_one, mine, others, column, start, width)

    def join(first, second):
        return first + second

    return FeatureKind(
        *(target.device(f) for f in (add, multiply, choose, join)),
        make_constants=lambda memory, n, value: memory.make_constants(n, value),
        make_put=lambda memory, n: memory.make_put(n),
    )


def make_wide_features(target, kind: FeatureKind, parts: EncodingParts, n_values: int, multiple: int) -> Callable:
    """features(at, column) -> any number of features, from a column that is a multiple of `multiple`."""
    width = power_of_two_in(parts.granularity, n_values, multiple)
    narrow, join, u32 = parts.make_features(width), kind.join, target.u32

    def concatenate(offsets: list[int]) -> Callable:
        if len(offsets) == 1:
            offset = offsets[0]

            def shifted(at, column):
                return narrow(at, u32(column + u32(offset)))

            return target.device(shifted)
        middle = len(offsets) // 2  # halves, since Numba limits how deep functions nest
        first, second = concatenate(offsets[:middle]), concatenate(offsets[middle:])

        def both(at, column):
            return join(first(at, column), second(at, column))

        return target.device(both)

    return concatenate(list(range(0, n_values, width)))


def make_chunks(
    target, kind: FeatureKind, memory, parts: EncodingParts, first_column: int, width: int
) -> tuple[ItemGroup, ...]:
    """Put all `width` features of a function of columns, from `first_column` on, chunk by chunk."""
    if width == 0:
        return ()
    chunk, u32 = power_of_two_in(parts.granularity, first_column, width), target.u32
    features, put = parts.make_features(chunk), kind.make_put(memory, chunk)

    def encode(item, at):
        column = u32(u32(item * u32(chunk)) + u32(first_column))
        put(at, column, features(at, column))

    return (ItemGroup(0, width // chunk, target.device(encode), by_sample=False),)


def make_parts_by_chunks(
    target,
    kind: FeatureKind,
    memory,
    make_features: Callable[[int], Callable],
    *,
    width: int,
    granularity: int,
    backward: tuple[BackwardPart, ...],
) -> EncodingParts:
    """An encoding of `width` columns whose items are the chunks of a function of columns, as wide as they can be."""
    parts = EncodingParts((), backward, granularity, make_features)
    return dataclasses.replace(parts, encode=make_chunks(target, kind, memory, parts, 0, width))


def make_constant_parts(target, kind: FeatureKind, memory, value: float) -> EncodingParts:
    """No items, and a value as feature of any column."""

    def make_features(n_values: int) -> Callable:
        constants = kind.make_constants(memory, n_values, value)

        def features(at, column):
            return constants()

        return target.device(features)

    return EncodingParts((), (), 8, make_features)


def make_padding(target, kind: FeatureKind, memory, first_column: int, count: int, value: float) -> EncodingParts:
    """`count` columns of a value, from `first_column` on."""
    parts = make_constant_parts(target, kind, memory, value)
    return dataclasses.replace(parts, encode=make_chunks(target, kind, memory, parts, first_column, count))
