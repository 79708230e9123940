"""Losses of training steps, which stay on the device until someone reads them.

Their places on the device are two pages, written one after the other, round and round. Before a page is written again,
the losses of both that somebody still waits for are fetched together: who keeps every loss of a long training waits for
the device once in so many steps, not in each, and who keeps the last one only never does. Whether somebody waits is
asked of a page as a whole, which its losses hold: all that a step makes is one small object.
"""

from __future__ import annotations

import weakref

import numpy as np

from ..loss_values import LossValue
from .driver import Device, DeviceBuffer
from .stream_order import StreamOrder

PAGE_SLOTS = 2048
"""Losses of a page."""

N_PAGES = 2


class Page:
    """Where the losses of some steps are on the device, and their values once these have been fetched."""

    __slots__ = ("__weakref__", "_buffer", "_order", "address", "values")

    def __init__(self, buffer: DeviceBuffer, order: StreamOrder, address: int):
        self._buffer, self._order, self.address = buffer, order, address
        self.values: np.ndarray | None = None

    def read(self, address: int) -> float:
        """One loss, behind all calls so far. It may be fetched meanwhile, and another one come to its place."""
        if self.values is None:
            host = np.empty(1, np.float32)
            self._buffer.device.use()
            self._buffer.download_into(host, self._order.reading(), offset=address - self._buffer.address)
            if self.values is None:
                return float(host[0])
        return float(self.values[(address - self.address) // 4])


class Loss(LossValue):
    """A training step's loss, still on the device until it is read or its place is needed.

    address   where kernels write it
    """

    __slots__ = ("_page", "address")

    _page: Page | None  # None: it has been read
    address: int

    def __float__(self) -> float:
        page = self._page
        if page is not None:
            self._value = page.read(self.address)
            self._page = None
        return self._value


class PendingLosses:
    """Places for losses. One thread at a time asks for new ones; others may read losses meanwhile."""

    def __init__(self, owner: Device, order: StreamOrder):
        self._buffer, self._order = DeviceBuffer(owner, 4 * N_PAGES * PAGE_SLOTS), order
        self._pages: list[weakref.ref[Page] | None] = [None] * N_PAGES
        self._next_page = 0
        self._page: Page | None = None  # that is written now
        self._address = self._end = 0  # of its next loss, and behind its last

    def new(self, stream: int) -> Loss:
        """The next loss. Whoever still waits for the one that stood there gets it first."""
        if self._address == self._end:
            self._turn(stream)
        address = self._address
        self._address = address + 4
        loss = Loss.__new__(Loss)  # an `__init__` in Python would take half of the time that a loss costs
        loss._page, loss.address = self._page, address
        return loss

    def _turn(self, stream: int) -> None:
        """Begin the next page."""
        number, self._page = self._next_page, None
        if self._held(number) is not None:
            self.fetch(stream)
        address = self._buffer.address + 4 * PAGE_SLOTS * number
        self._page = Page(self._buffer, self._order, address)
        self._pages[number] = weakref.ref(self._page)
        self._next_page = (number + 1) % N_PAGES
        self._address, self._end = address, address + 4 * PAGE_SLOTS

    def _held(self, number: int) -> Page | None:
        """The page of this number if somebody waits for one of its losses."""
        reference = self._pages[number]
        page = reference() if reference is not None else None
        return page if page is not None and page.values is None else None

    def fetch(self, stream: int) -> None:
        """Read all losses that somebody still waits for; `stream` is behind the steps that they are of."""
        self._buffer.device.use()
        values = self._buffer.download((N_PAGES, PAGE_SLOTS), np.float32, stream)
        for number, row in enumerate(values):
            page = self._held(number)
            if page is not None:
                page.values = row

    def free(self) -> None:
        self._buffer.free()
