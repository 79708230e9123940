"""What optimizers keep on the device: a number a parameter, whole blocks of numbers, counters."""

from __future__ import annotations

import numpy as np

from ..specs import round_up
from .driver import Device, DeviceBuffer

VECTOR = 4
"""Parameters that a thread updates together. Vectors of parameters are padded to whole ones of these."""


class StateVector:
    """`rows` numbers for each of the parameters `start` ... `start` + n - 1 of a model, zero at first.

    The elements of a parameter stand at the same place of a vector of `VECTOR` as the parameter does, so what loads
    whole vectors of parameters may load the state so too.
    """

    def __init__(self, dtype: type, start: int, n: int, rows: int | None = None):
        self.dtype = np.dtype(dtype)
        self.shape = (n,) if rows is None else (rows, n)
        self._start, self._rows, self._n = start, 1 if rows is None else rows, n
        self._lead = start % VECTOR
        self._stride = round_up(self._lead + n, VECTOR)
        self._buffer: DeviceBuffer | None = None

    def allocate(self, owner: Device, stream: int) -> None:
        self._buffer = DeviceBuffer(owner, self.dtype.itemsize * self._rows * self._stride)
        self._buffer.fill_zero(stream)

    def address(self, parameter: int, row: int = 0) -> int:
        """Of a parameter's number."""
        element = row * self._stride + self._lead + parameter - self._start
        return self._buffer.address + self.dtype.itemsize * element

    def download(self, stream: int) -> np.ndarray:
        rows = self._buffer.download((self._rows, self._stride), self.dtype, stream)
        return rows[:, self._lead : self._lead + self._n].reshape(self.shape).copy()

    def upload(self, values: np.ndarray, stream: int) -> None:
        rows = np.zeros((self._rows, self._stride), self.dtype)
        rows[:, self._lead : self._lead + self._n] = values
        self._buffer.upload(rows, stream)

    def free(self) -> None:
        if self._buffer is not None:
            self._buffer.free()


class StateBlock:
    """Numbers that are not one a parameter, [n]; `values` at first."""

    def __init__(self, values: np.ndarray):
        self.dtype, self.shape, self._values = values.dtype, values.shape, values
        self._buffer: DeviceBuffer | None = None

    def allocate(self, owner: Device, stream: int) -> None:
        self._buffer = DeviceBuffer(owner, self._values.nbytes)
        self.upload(self._values, stream)

    def address(self, parameter: int = 0, row: int = 0) -> int:
        """Of the first number, whatever the parameter."""
        return self._buffer.address

    def download(self, stream: int) -> np.ndarray:
        return self._buffer.download(self.shape, self.dtype, stream)

    def upload(self, values: np.ndarray, stream: int) -> None:
        if values.size:
            self._buffer.upload(values, stream)

    def free(self) -> None:
        if self._buffer is not None:
            self._buffer.free()


class Counter:
    """A count that only the device knows, since it leaves out steps whose gradients were not finite.

    All blocks of all kernels of a step read it in one word, `before`, and write what it becomes to the other, `after`;
    `turn` makes that the one which the next step reads.
    """

    def __init__(self):
        self._buffer: DeviceBuffer | None = None
        self._current = 0

    def allocate(self, owner: Device, stream: int) -> None:
        self._buffer = DeviceBuffer(owner, 16)
        self._buffer.fill_zero(stream)

    @property
    def before(self) -> int:
        return self._buffer.address + 4 * self._current

    @property
    def after(self) -> int:
        return self._buffer.address + 4 * (1 - self._current)

    def turn(self) -> None:
        self._current = 1 - self._current

    def download(self, stream: int) -> int:
        return int(self._buffer.download(2, np.uint32, stream)[self._current])

    def upload(self, value: int, stream: int) -> None:
        self._buffer.upload(np.array([value, value], np.uint32), stream)

    def free(self) -> None:
        if self._buffer is not None:
            self._buffer.free()
