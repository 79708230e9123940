"""A plain array in device memory, for callers who have no array library of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from .driver import DeviceBuffer, copy_to_host
from .driver import device as open_device


class DeviceArray:
    """C-contiguous device memory with the CUDA array interface, freed with the object."""

    never_moves = True  # nor changes its shape: calls between such arrays can be recorded

    def __init__(self, values: np.ndarray, device: int = 0):
        self.shape, self.dtype = values.shape, values.dtype
        self._buffer = DeviceBuffer(open_device(device), values.nbytes)
        if values.nbytes:
            self._buffer.upload(values)
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._buffer.address if values.size else 0, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def synchronize(self, stream: int = 0) -> None:
        """Wait until the work on `stream`, which may write here, is done."""
        self._buffer.device.use()
        self._buffer.device.synchronize(stream)

    def numpy(self) -> np.ndarray:
        """A copy in host memory."""
        self._buffer.device.use()
        return self._buffer.download(self.shape, self.dtype)


def to_device(values: np.ndarray, device: int = 0) -> DeviceArray:
    """Copy a NumPy array to CUDA device number `device`."""
    return DeviceArray(np.ascontiguousarray(values), device)


def strided_to_host(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype, stream: int | None
) -> np.ndarray:
    """A host copy of device memory with any strides, negative ones too: the whole stretch that it lies in is copied."""
    if 0 in shape:
        return np.empty(shape, dtype)
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    before, behind = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + dtype.itemsize
    device = open_device(0)  # addresses are unique among devices
    device.use()
    device.synchronize(stream or 0)
    stretch = np.empty(behind - before, np.uint8)
    copy_to_host(stretch, pointer + before, 0)
    device.synchronize()
    return np.ndarray(shape, dtype, stretch, -before, strides).copy()
