"""Device memory at any address, with guards: what a fused kernel reads and writes in a test."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_tcnn.fused import DeviceArray, to_device

GUARD = 64
"""Elements of NaN before and behind an array. A kernel that writes there writes out of bounds."""


class DeviceView:
    """An array inside guarded device memory, `offset` elements past a multiple of 256 bytes; CUDA array interface."""

    def __init__(self, values: np.ndarray, offset: int = 0):
        self.shape, self.dtype = values.shape, values.dtype
        self._first = GUARD * 4 + offset  # 256 float32 or 512 bytes of float16
        storage = np.full(self._first + values.size + GUARD, np.nan, values.dtype)
        storage[self._first : self._first + values.size] = values.ravel()
        self._storage: DeviceArray = to_device(storage)
        start = self._storage.__cuda_array_interface__["data"][0]
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (start + self._first * self.dtype.itemsize, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def numpy(self) -> np.ndarray:
        """A host copy. Raises AssertionError if anything was written beside the array."""
        storage = self._storage.numpy()
        end = self._first + int(np.prod(self.shape))
        guards = np.concatenate([storage[: self._first], storage[end:]])
        assert np.isnan(guards).all(), "a kernel wrote outside of its output"
        return storage[self._first : end].reshape(self.shape)


def poisoned(shape: tuple[int, ...], dtype: str, offset: int = 0) -> DeviceView:
    """An output that holds nothing but NaN yet."""
    return DeviceView(np.full(shape, np.nan, dtype), offset)
