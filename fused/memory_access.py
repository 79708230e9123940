"""Loads and stores of a thread's consecutive elements in global memory, by element index, where a flag says so."""

from __future__ import annotations

import functools

from .fragments import Target

BYTES = {"u32": 4, "f32": 4, "f64": 8}
WIDEST = 16  # bytes of one access


@functools.cache
def make_load(target: Target, kind: str, count: int = 1):
    """load(address, index, active) -> `count` values from element `index` on, a multiple of count; 0 where inactive."""
    size = BYTES[kind]
    at_once = min(count, WIDEST // size)

    @target.intrinsic(["u64", "u32", "u32"], (kind, count))
    def load(e, address, index, active):
        is_active, place, values = e.less(0, active), e.address(address, index, size), []
        for first in range(0, count, at_once):
            values += e.load_global_where(is_active, place, kind, at_once, size * first)
        return values

    return load


@functools.cache
def make_store(target: Target, kind: str, count: int = 1):
    """store(address, index, values, active): the inverse."""
    size = BYTES[kind]
    at_once = min(count, WIDEST // size)

    @target.intrinsic(["u64", "u32", (kind, count), "u32"], "void")
    def store(e, address, index, values, active):
        with e.when(e.less(0, active)):
            place = e.address(address, index, size)
            for first in range(0, count, at_once):
                e.store_global(place, kind, values[first : first + at_once], size * first)

    return store


@functools.cache
def make_store_parameters(target: Target, count: int = 1):
    """store(address, index, values, active): float32 values as parameters that kernels read, in the target's format."""
    number_format = target.format

    @target.intrinsic(["u64", "u32", ("f32", count), "u32"], "void")
    def store(e, address, index, values, active):
        with e.when(e.less(0, active)):
            number_format.store_parameters(e, e.address(address, index, number_format.parameter_bytes), values)

    return store


@functools.cache
def make_store_copy(target: Target, count: int = 1):
    """store(address, index, values, active): the copy of the master; nothing where kernels read the master itself."""
    if not target.format.reads_master:
        return make_store_parameters(target, count)

    @target.intrinsic(["u64", "u32", ("f32", count), "u32"], "void")
    def store(e, address, index, values, active):
        return

    return store


@functools.cache
def make_user_access(target: Target, count: int):
    """(load, store) like the above for a float32 vector that ends at `end` and need not be aligned or padded."""

    @target.intrinsic(["u64", "u32", "u32", "u32"], ("f32", count))
    def load(e, address, index, end, active):
        place = e.address(address, index, 4)
        values = []
        for i in range(count):
            inside = e.both(e.less(0, active), e.less(e.add(index, i), end))
            values += e.load_global_where(inside, place, "f32", offset=4 * i)
        return values

    @target.intrinsic(["u64", "u32", "u32", ("f32", count), "u32"], "void")
    def store(e, address, index, end, values, active):
        place = e.address(address, index, 4)
        for i, value in enumerate(values):
            with e.when(e.both(e.less(0, active), e.less(e.add(index, i), end))):
                e.store_global(place, "f32", [value], offset=4 * i)

    return load, store


@functools.cache
def make_load_word(target: Target):
    """word(address) -> the u32 there."""

    @target.intrinsic(["u64"], "u32")
    def word(e, address):
        return e.load_global(address, "u32", constant=False)[0]

    return word


@functools.cache
def make_store_word(target: Target):
    """store(address, value, active)."""

    @target.intrinsic(["u64", "u32", "u32"], "void")
    def store(e, address, value, active):
        with e.when(e.less(0, active)):
            e.store_global(address, "u32", [value])

    return store


@functools.cache
def make_to_tuple(target: Target, kind: str = "f32"):
    """A number as a fragment of one register."""

    @target.intrinsic([kind], (kind, 1))
    def to_tuple(e, value):
        return [value]

    return to_tuple


@functools.cache
def make_is_below(target: Target):
    """is_below(a, b) -> 1 where a < b, else 0."""

    @target.intrinsic(["u32", "u32"], "u32")
    def is_below(e, a, b):
        return e.select(e.less(a, b), e.u32(1), e.u32(0))

    return is_below


@functools.cache
def make_choose(target: Target):
    """Scalar (a, b, first) -> a where `first` is not 0, else b."""

    def choose(a, b, first):
        return a if first else b

    return target.scalar(choose)
