"""Device memory at any address and of any row stride, with guards: what a fused kernel reads and writes here."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_tcnn.fused import DeviceArray, to_device

GUARD = 64
"""Elements of NaN before and behind an array. A kernel that writes there writes out of bounds."""


class DeviceView:
    """An array inside guarded device memory, `offset` elements past a multiple of 256 bytes; CUDA array interface.

    margin   columns of NaN on either side of a matrix, between rows
    every    a matrix's rows are every second or third row of the memory; between them is NaN
    """

    def __init__(self, values: np.ndarray, offset: int = 0, *, margin: int = 0, every: int = 1):
        self.shape, self.dtype = values.shape, values.dtype
        first = GUARD * 4 + offset  # 256 float32 or 512 bytes of float16
        if values.ndim == 2:
            inside = np.full((every * len(values), values.shape[1] + 2 * margin), np.nan, values.dtype)
        else:
            inside = np.full(values.shape, np.nan, values.dtype)
        storage = np.full(first + inside.size + GUARD, np.nan, values.dtype)
        inside = storage[first : first + inside.size].reshape(inside.shape)
        self._part = inside[::every, margin : margin + values.shape[1]] if values.ndim == 2 else inside
        self._part[...] = values
        self._begin = self._part.__array_interface__["data"][0] - storage.__array_interface__["data"][0]
        self._storage: DeviceArray = to_device(storage)
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._storage.__cuda_array_interface__["data"][0] + self._begin, False),
            "strides": None if self._part.flags.c_contiguous else self._part.strides,
            "stream": None,
            "version": 3,
        }

    def numpy(self) -> np.ndarray:
        """A host copy. Raises AssertionError if anything was written beside the array."""
        storage = self._storage.numpy()
        values = np.ndarray(self.shape, self.dtype, storage, self._begin, self._part.strides)
        found = values.copy()
        values[...] = np.nan
        assert np.isnan(storage).all(), "a kernel wrote outside of its output"
        return found


def poisoned(shape: tuple[int, ...], dtype: str, offset: int = 0) -> DeviceView:
    """An output that holds nothing but NaN yet."""
    return DeviceView(np.full(shape, np.nan, dtype), offset)
