"""Arrays in and out: NumPy, CuPy, PyTorch, JAX and Numba arrays as one small view, without importing any of them.

`view(x)` recognises an array by its type's module and describes it; `empty_like(v, shape, dtype)` makes a new one of
the same kind, on the same device. A framework that the user has not imported is never imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class ArrayView:
    """A described array. `array` is the user's object and keeps the memory alive.

    strides are in bytes, None for C order; `pointer` is a device address where `on_device`, else a host address;
    `stream` is the CUDA stream on which the data becomes ready, None if it is ready.
    """

    array: Any
    kind: str  # numpy | cupy | torch | jax | numba | cuda
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None
    pointer: int
    on_device: bool
    device: int = 0
    stream: int | None = None

    def numpy(self) -> np.ndarray:
        """The data as a NumPy array: the array itself on the host, a copy from the device."""
        if self.on_device:
            raise NotImplementedError
        return self.array

    def result(self) -> Any:
        """The object handed to the user."""
        return self.array
