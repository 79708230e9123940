"""Losses of training steps, which stay on the device until someone reads them."""

from __future__ import annotations

import weakref

import numpy as np

from .driver import Device, DeviceBuffer
from .stream_order import StreamOrder

LOSS_SLOTS = 4096
"""Losses that wait on the device for someone to read them. Before one is overwritten, all are fetched together: who
keeps every loss of a long training waits for the device once in so many steps, not in each."""


class Loss:
    """A training step's loss, still on the device until it is read or its place is needed."""

    def __init__(self, buffer: DeviceBuffer, slot: int, order: StreamOrder):
        self._place: tuple[DeviceBuffer, int, StreamOrder] | None = (buffer, slot, order)
        self._value = 0.0

    @property
    def address(self) -> int | None:
        """Where it is on the device; None once it has been read."""
        return None if self._place is None else self._place[0].address + 4 * self._place[1]

    def value(self) -> float:
        if self._place is not None:
            buffer, slot, order = self._place
            host = np.empty(1, np.float32)
            buffer.device.use()
            buffer.download_into(host, order.reading(), offset=4 * slot)
            self.settle(host[0])
        return self._value

    def settle(self, value: float) -> None:
        """The value, from whoever has read it; its place on the device is free."""
        self._value, self._place = float(value), None


class PendingLosses:
    """Places for losses, used one after the other, round and round."""

    def __init__(self, owner: Device, order: StreamOrder):
        self._buffer, self._order = DeviceBuffer(owner, 4 * LOSS_SLOTS), order
        self._waiting: list[weakref.ref[Loss] | None] = [None] * LOSS_SLOTS
        self._next_slot = 0

    def new(self, stream: int) -> tuple[Loss, int]:
        """The next loss, and its address. Whoever still waits for the one that stood there gets it first."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._waiting)
        waiting = self._waiting[slot]
        if waiting is not None and waiting() is not None:
            self.fetch(stream)
        loss = Loss(self._buffer, slot, self._order)
        self._waiting[slot] = weakref.ref(loss)
        return loss, self._buffer.address + 4 * slot

    def fetch(self, stream: int) -> None:
        """Read all losses that somebody still holds; `stream` is behind the steps that they are of."""
        values = self._buffer.download(len(self._waiting), np.float32, stream)
        for slot, waiting in enumerate(self._waiting):
            loss = waiting() if waiting is not None else None
            if loss is not None:
                loss.settle(values[slot])
        self._waiting = [None] * len(self._waiting)

    def free(self) -> None:
        self._buffer.free()
