"""A plain array in device memory, for callers who have no array library of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from .driver import DeviceBuffer
from .driver import device as open_device


class DeviceArray:
    """C-contiguous device memory with the CUDA array interface, freed with the object."""

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
