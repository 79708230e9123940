"""Calls that come again and again between the same arrays: recorded once, then only launched.

Most of a small call's time is what Python does to find programs and to pack arguments, and all of that comes out the
same when a call is repeated between arrays that neither move nor change their shape. While a `driver.Recorder` watches
a call, it keeps the launches with their arguments. A repetition changes the few arguments that differ from step to step
(where the loss goes, the mark for gradients that are not finite, what the optimizer counts) and launches the kernels,
all of them by one native function (`native_launches.py`).

A recording holds as long as nothing moves that its arguments point to (`validity.py`). A call that did more than launch
kernels (copied an array, cleared a buffer) is not repeated this way.

`repeat` is most of what a small model costs the host, so whatever it needs is at hand in the object, and what is seldom
needed (waiting for a stream of the user's, clearing what an exception left) is asked for by one flag each. The device's
context is made current by the launches themselves; before that nothing else talks to the driver, unless such a flag
says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .driver import Arguments, RecordedLaunch, Recorder
from .native_launches import LaunchList

if TYPE_CHECKING:
    from .engine import FusedRuntime
    from .pending_losses import Loss


class RecordedCall:
    """Launches on the default stream."""

    __slots__ = ("_launch", "_order", "_validity", "_version", "launches")

    def __init__(self, runtime: FusedRuntime, launches: list[RecordedLaunch]):
        model = runtime.model
        self._order, self._validity, self._version = model.order, model.validity, model.validity.version
        self.launches = LaunchList(runtime.device, launches)
        self._launch = self.launches.run


class RecordedInference(RecordedCall):
    """Outputs from one array to another."""

    __slots__ = ("_parameters", "_parameters_now")

    def __init__(self, runtime: FusedRuntime, launches: list[RecordedLaunch]):
        super().__init__(runtime, launches)
        self._parameters = runtime.inference_parameters()
        self._parameters_now = runtime.inference_parameters if runtime.may_keep_parameters else None

    def repeat(self) -> bool:
        """`inference` once more; False, and nothing done, where the recording holds no longer."""
        if self._validity.version != self._version:
            return False
        if self._parameters_now is not None and self._parameters_now() != self._parameters:
            return False
        if self._order.event_is_last:
            self._order.come_back()
        result = self._launch()
        if result != 0:
            self.launches.fail(result)
        return True


class RecordedStep(RecordedCall):
    """A training step on one batch."""

    __slots__ = (
        "_counters", "_gradients", "_losses", "_numbers", "_optimizer", "_table_gradient", "_words",
    )  # fmt: skip

    def __init__(self, runtime: FusedRuntime, launches: list[RecordedLaunch], loss_address: int):
        super().__init__(runtime, launches)
        self._losses, self._gradients = runtime.losses, runtime.gradients
        self._optimizer, self._table_gradient = runtime.training.optimizer, runtime.model.table_gradient
        self._counters = self._optimizer.all_counters()
        links = list(runtime.training.optimizer_program().numbers())
        shared = SharedArguments(2 + sum(len(names) for _, names, _ in links))
        shared.add([(launch, "mark") for launch in launches if launch.has("mark")])
        shared.add([(launch, "loss") for launch in launches if launch.get("loss") == loss_address])
        self._words = shared.words  # 0: the mark, 1: where the loss goes
        self._numbers = []
        for numbers, names, kernels in links:
            own = [launch for launch in launches if launch.kernel in kernels]
            users = {name: [(launch, theirs) for launch in own if launch.has(theirs)] for name, theirs in names.items()}
            self._numbers.append((numbers, [(name, *shared.add(those)) for name, those in users.items() if those]))

    def repeat(self) -> Loss | None:
        """`training_step` once more; None, and nothing done, where the recording holds no longer."""
        if self._validity.version != self._version:
            return None
        if self._order.event_is_last:
            self._order.come_back()
        if self._table_gradient.is_used:
            self._table_gradient.clear(0)
        loss = self._losses.new(0)
        self._optimizer.step()
        words = self._words
        words[0] = self._gradients.next_mark()
        words[1] = loss.address
        for numbers, places in self._numbers:
            given = numbers()
            for name, view, i in places:
                view[i] = given[name]
        result = self._launch()
        if result != 0:
            self._table_gradient.is_used = True
            self.launches.fail(result)
        for counter in self._counters:
            counter.turn()
        return loss


class SharedArguments:
    """Up to `n` arguments that several launches find at one place each, so that one write changes them for all.

    words   those that are integers, by the order in which they were added
    """

    def __init__(self, n: int):
        self._arguments, self._free = Arguments(np.zeros(n, np.uint64)), iter(range(n))
        self.words = self._arguments.values

    def add(self, users: list[tuple[RecordedLaunch, str]]) -> tuple[memoryview, int]:
        """One for these launches, by their kernels' names for it. Where it is set: view[number] = value."""
        i = next(self._free)
        (kind,) = {launch.kind(name) for launch, name in users}
        for launch, name in users:
            launch.find_at(int(self._arguments.addresses[i]), name)
        return self._arguments.place(i, kind)


def record_inference(runtime: FusedRuntime, x, out) -> RecordedInference | None:
    """Do it, and keep it if it can be repeated."""
    with Recorder() as recorder:
        runtime.inference(x, out)
    return RecordedInference(runtime, recorder.launches) if recorder.is_complete else None


def record_step(runtime: FusedRuntime, x, y) -> tuple[Loss, RecordedStep | None]:
    """Do it, and keep it if it can be repeated."""
    with Recorder() as recorder:
        loss = runtime.training_step(x, y)
    return loss, RecordedStep(runtime, recorder.launches, loss.address) if recorder.is_complete else None
