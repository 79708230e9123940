"""The loss of a training step, as engines give it and users get it."""

from __future__ import annotations

from functools import total_ordering
from numbers import Real
from typing import Any

import numpy as np


@total_ordering
class LossValue:
    """The loss of one training step, averaged over samples and outputs. Reading it waits for the device, once.

    Read it with `float(loss)`, in a format string, as an array, or by comparing it with a number or another loss. It
    keeps the value of its own step.
    """

    __slots__ = ("__weakref__", "_value")

    def __init__(self, value: float):
        self._value = float(value)

    def __float__(self) -> float:
        """An engine's own kind of loss reads the value here."""
        return self._value

    def __reduce__(self) -> tuple:
        """A copy is of the value: where it was read from is no part of it."""
        return LossValue, (float(self),)

    def __format__(self, format_spec: str) -> str:
        return format(float(self), format_spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(float(self), dtype or np.float64)

    def __round__(self, n_digits: int | None = None) -> float:
        return round(float(self), n_digits)

    def __eq__(self, other: object) -> bool:
        return float(self) == float(other) if isinstance(other, LossValue | Real) else NotImplemented

    def __lt__(self, other: object) -> bool:
        return float(self) < float(other) if isinstance(other, LossValue | Real) else NotImplemented

    __hash__ = None  # it compares by a value that hashing would have to wait for

    def __repr__(self) -> str:
        return f"LossValue({float(self)!r})"

    def __str__(self) -> str:
        return str(float(self))
