"""The gradient of the encoding's parameters, to which the gradient kernels of a call add."""

from __future__ import annotations

from .driver import Device, DeviceBuffer
from .stream_order import StreamOrder


class TableGradient:
    """Zero between calls, as every kernel that collects it leaves it. Allocated when it is first needed.

    is_used   whether gradient kernels have added to it and none has collected. What comes between them may raise: the
              next call then clears it
    """

    def __init__(self, owner: Device, n_bytes: int, order: StreamOrder):
        self._device, self._n_bytes, self._order = owner, n_bytes, order
        self._buffer: DeviceBuffer | None = None
        self.is_used = False

    @property
    def address(self) -> int:
        """0 where the encoding has no parameters."""
        if self._n_bytes == 0:
            return 0
        if self._buffer is None:
            self._buffer = DeviceBuffer(self._device, self._n_bytes)
            self._buffer.fill_zero(self._order.stream)
        return self._buffer.address

    def take(self, stream: int) -> None:
        """For gradient kernels that come next."""
        if self.is_used:
            self.clear(stream)
        self.is_used = True

    def clear(self, stream: int) -> None:
        if self._buffer is not None:
            self._device.use()
            self._buffer.fill_zero(stream)
        self.is_used = False

    def collected(self) -> None:
        """The kernel that leaves zeros has been launched."""
        self.is_used = False

    def free(self) -> None:
        if self._buffer is not None:
            self._buffer.free()
