"""Arrays of calls: ordered among streams, and where kernels find them; those of the host are copied there and back."""

from __future__ import annotations

from collections.abc import Callable

from ..arrays import ArrayView
from .driver import Device
from .programs import Workspace
from .stream_order import StreamOrder

MAX_BATCH = (1 << 31) - 1
"""Rows are numbered in 32 bits, the last tile's and a step of the grid beyond the batch included."""


def _nothing_to_do() -> None:
    """An array in device memory is complete as soon as the kernels are."""


class CallArrays:
    """Arrays of one model's calls on its device."""

    def __init__(self, owner: Device, workspace: Workspace, order: StreamOrder):
        self._device, self._workspace, self._order = owner, workspace, order

    def begin(self, stream: int | None, *views: ArrayView | None) -> int:
        """Make the device current and order the work of `stream` behind earlier work and the arrays' own streams.

        Raises ValueError for an array of too many rows or on another device.
        """
        self._device.use()
        stream = 0 if stream is None else int(stream)
        for v in views:
            if v is not None and v.shape[0] > MAX_BATCH:
                raise ValueError(f"{v.shape[0]} rows are too many for one call: at most {MAX_BATCH}")
            if v is None or not v.on_device:
                continue
            if v.device is None and self._device.n_devices > 1 and v.pointer and not self._device.holds(v.pointer):
                raise ValueError(
                    f"an array is not on CUDA device {self._device.index}, where the model is; move it there"
                )
            if v.stream and v.stream != stream:
                self._device.wait_for(v.stream, stream)
        self._order.enter(stream)
        return stream

    def read(self, name: str, v: ArrayView | None, stream: int) -> tuple[int, int]:
        """(device address, bytes a row) of an array that is read; host arrays are copied to the device."""
        if v is None:
            return 0, 0
        if v.on_device:
            return v.pointer, v.row_stride
        host, stride = v.numpy(), v.row_stride
        address = self._workspace.get(f"input {name}", host.nbytes)
        self._workspace.buffer(f"input {name}").upload(host, stream)
        return address, stride

    def write(self, name: str, v: ArrayView, stream: int, *, keep: bool = False) -> tuple[int, Callable[[], None]]:
        """(device address to write to, what to call when all is launched) for an array that is written.

        keep   what the array holds is there before
        """
        if v.on_device:
            return v.pointer, _nothing_to_do
        host = v.numpy()
        address = self._workspace.get(f"output {name}", host.nbytes)
        buffer = self._workspace.buffer(f"output {name}")
        if keep:
            buffer.upload(host, stream)
        return address, lambda: buffer.download_into(host, stream)
