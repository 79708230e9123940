"""Calls that come again and again between the same arrays: recorded once, then only launched.

Most of a small call's time is what Python does to find programs and to pack arguments, and all of that comes out the
same when a call is repeated between arrays that neither move nor change their shape. While a `driver.Recorder` watches
a call, it keeps the launches with their arguments. A repetition changes the few arguments that differ from step to step
(where the loss goes, the mark for gradients that are not finite, what the optimizer counts) and launches the kernels.

A recording holds as long as nothing moves that its arguments point to: the runtime's `configuration` and the
workspace's `version` change when something does. A call that did more than launch kernels (copied an array, cleared a
buffer) is not repeated this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .driver import RecordedLaunch, Recorder

if TYPE_CHECKING:
    from .engine import FusedRuntime
    from .pending_losses import Loss


class RecordedCall:
    """Launches on the default stream."""

    def __init__(self, runtime: FusedRuntime, launches: list[RecordedLaunch]):
        self._runtime, self.launches = runtime, launches
        self._made_for = self._state()

    def _state(self) -> tuple[int, int]:
        return self._runtime.configuration, self._runtime.model.workspace.version

    def holds_for(self, runtime: object) -> bool:
        return runtime is self._runtime and self._state() == self._made_for

    def launch(self) -> None:
        for launch in self.launches:
            launch()


class RecordedInference(RecordedCall):
    """Outputs from one array to another."""

    def __init__(self, runtime: FusedRuntime, launches: list[RecordedLaunch]):
        super().__init__(runtime, launches)
        self._parameters = runtime.inference_parameters()

    def holds_for(self, runtime: object) -> bool:
        return super().holds_for(runtime) and runtime.inference_parameters() == self._parameters

    def __call__(self) -> None:
        self._runtime.repeat_inference(self)


class RecordedStep(RecordedCall):
    """A training step on one batch."""

    def __init__(self, runtime: FusedRuntime, launches: list[RecordedLaunch], loss_address: int):
        super().__init__(runtime, launches)
        self._marks = [launch.place("mark") for launch in launches if launch.has("mark")]
        with_loss = [launch for launch in launches if launch.has("loss") and launch.get("loss") == loss_address]
        self._losses = [launch.place("loss") for launch in with_loss]
        self._numbers = []
        for numbers, kernel, names in runtime.training.optimizer_program().numbers():
            places = {
                name: [launch.place(theirs) for launch in launches if launch.kernel is kernel and launch.has(theirs)]
                for name, theirs in names.items()
            }
            self._numbers.append((numbers, places))
        self._counters = runtime.training.optimizer.all_counters()

    def set(self, mark: int, loss_address: int) -> None:
        """What is different this time. The optimizer has come forward to this step."""
        for values, i in self._marks:
            values[i] = mark
        for values, i in self._losses:
            values[i] = loss_address
        for numbers, places in self._numbers:
            for name, value in numbers().items():
                for values, i in places[name]:
                    values[i] = value

    def turn(self) -> None:
        """`Optimizer.turn`: all kernels are launched."""
        for counter in self._counters:
            counter.turn()

    def __call__(self) -> Loss:
        return self._runtime.repeat_step(self)


def record_inference(runtime: FusedRuntime, x, out) -> RecordedInference | None:
    """Do it, and keep it if it can be repeated."""
    with Recorder() as recorder:
        runtime.inference(x, out)
    return RecordedInference(runtime, recorder.launches) if recorder.is_complete else None


def record_step(runtime: FusedRuntime, x, y) -> tuple[Loss, RecordedStep | None]:
    """Do it, and keep it if it can be repeated."""
    with Recorder() as recorder:
        loss = runtime.training_step(x, y)
    if not recorder.is_complete or loss.address is None:
        return loss, None
    return loss, RecordedStep(runtime, recorder.launches, loss.address)
