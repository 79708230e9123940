"""Calls follow one another, whatever streams they are on, and although a stream may be gone when the next one comes."""

from __future__ import annotations

import functools
from collections.abc import Callable

from .driver import Device, Event


class StreamOrder:
    """Where the last call's work is. Its stream is the user's, who may destroy it: only an event is kept of it.

    The default stream, 0, is always there; calls on it record nothing.
    """

    def __init__(self, device: Device):
        self.device = device
        self.stream = 0  # of the call in progress
        self._in_call = False
        self._event: Event | None = None  # behind the last call that was on a stream of the user's
        self.event_is_last = False  # whether no call on the default stream has come since

    def enter(self, stream: int) -> None:
        """Let `stream` wait for the work of all calls before, and become the stream of this one."""
        if self.event_is_last:
            self._event.wait(stream)  # also where the last call's had this handle: it may be that of another stream now
        elif stream != 0:
            self.device.wait_for(0, stream)
        self.stream, self._in_call = stream, True

    def leave(self) -> None:
        """All work of a call is on its stream. Nothing happens where the call didn't get as far as to have one."""
        if not self._in_call:
            return
        self._in_call = False
        if self.stream != 0:
            if self._event is None:
                self._event = Event(self.device)
            self._event.record(self.stream)
        self.event_is_last = self.stream != 0

    def join(self) -> int:
        """The default stream, behind all work so far, as the stream of this call."""
        self.enter(0)
        self.leave()
        return 0

    def come_back(self) -> None:
        """Let the default stream wait for the call on a stream of the user's that came last. Until the next such call
        its work follows by itself."""
        self.device.use()
        self.join()

    def reading(self) -> int:
        """The default stream, behind all calls that have ended, for a copy that is waited for at once; it may come
        while another thread is in a call."""
        if self._event is not None:
            self._event.wait(0)
        return 0


def leaves_in_order(method: Callable) -> Callable:
    """A method of an object with a StreamOrder `_order`, which leaves it in the end."""

    @functools.wraps(method)
    def call(self, *arguments, **options):
        try:
            return method(self, *arguments, **options)
        finally:
            self._order.leave()

    return call
