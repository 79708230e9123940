"""Time on the device between two points of a stream, by CUDA events; time on the host for calls that don't wait."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from numba_tcnn.fused.driver import Device, bindings, check, device

Call = Callable[[int], object]
"""What is measured; called with a count 0, 1, 2 ..., by which it may rotate its arrays."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: one number for every group of calls."""

    groups: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.groups)


class Event:
    def __init__(self):
        driver = bindings()
        self.handle = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DEFAULT.value), "making an event")

    def record(self, stream: int = 0) -> None:
        check(bindings().cuEventRecord(self.handle, stream), "recording an event")

    def milliseconds_since(self, earlier: Event) -> float:
        """Waits for this event."""
        driver = bindings()
        check(driver.cuEventSynchronize(self.handle), "waiting for an event")
        return check(driver.cuEventElapsedTime(earlier.handle, self.handle), "reading an event")

    def __del__(self):
        if hasattr(self, "handle"):
            bindings().cuEventDestroy(self.handle)


def time_groups(call: Call, *, groups: int, calls: int, owner: Device | None = None) -> Timing:
    """Device time a call in each of `groups` groups of `calls` calls, issued one behind the other as a user does.

    A group's time counts from an event before its first call to one behind its last: where the host is slower than
    the device, the gaps count too.
    """
    owner = owner or device(0)
    owner.use()
    owner.synchronize()
    events = [Event() for _ in range(groups + 1)]
    count = 0
    events[0].record()
    for event in events[1:]:
        for _ in range(calls):
            call(count)
            count += 1
        event.record()
    return Timing(tuple(b.milliseconds_since(a) / calls for a, b in zip(events[:-1], events[1:], strict=True)))


def host_microseconds(call: Call, *, calls: int = 20, repeats: int = 20, owner: Device | None = None) -> float:
    """Host time a call takes to return, without waiting for the device: the least of `repeats` averages.

    `calls` must be few enough for the driver's queue of pending launches (about 1000), or the host waits for it.
    """
    owner = owner or device(0)
    best = float("inf")
    for _ in range(repeats):
        owner.use()
        owner.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            call(i)
        best = min(best, time.perf_counter() - start)
    owner.synchronize()
    return 1e6 * best / calls
