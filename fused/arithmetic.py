"""Arithmetic of one operation as scalar device functions, for `map_fragment` and for stages' own index sums."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np


@functools.cache
def make_multiply(target) -> Callable:
    """Scalar (a, b) -> a b."""

    def multiply(a, b):
        return a * b

    return target.scalar(multiply)


@functools.cache
def make_add(target) -> Callable:
    """Scalar (a, b) -> a + b."""

    def add(a, b):
        return a + b

    return target.scalar(add)


@functools.cache
def make_divide(target) -> Callable:
    """Scalar (a, b) -> a / b."""

    def divide(a, b):
        return a / b

    return target.scalar(divide)


@functools.cache
def make_index_arithmetic(target) -> tuple[Callable, ...]:
    """Scalar (smaller, inside, quotient, remainder) of indices; inside(i, n) is 1.0 where i < n, else 0.0."""
    u32, f32 = np.uint32, np.float32

    def smaller(a, b):
        return min(a, b)

    def inside(index, count):
        return f32(1) if index < count else f32(0)

    def quotient(a, b):
        return u32(a // b)

    def remainder(a, b):
        return u32(a % b)

    return tuple(target.scalar(f) for f in (smaller, inside, quotient, remainder))
