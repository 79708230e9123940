"""What a repeated call costs the host, in parts: the driver's launches, and our own Python around them.

On a device the launches are real. Without one, a driver stands in that does nothing (`null_driver.py`): launches are
then calls of an empty function, and all else is as with a device. Figures are microseconds a call, the least of many
averages.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from numba_tcnn.fused import device_status

from .cases import CONFIGS, N_INPUT_SETS, Case, DeviceData, load_cases
from .device_timing import Call, host_microseconds
from .null_driver import no_device

CALLS = 100
"""Calls between two waits for the device, which at a launch or two each stay far below what the driver queues."""

REPEATS = 300


@dataclass(frozen=True)
class HostTime:
    """Microseconds of one kind of call.

    native     its launches alone, by the native function that makes them
    bindings   the same launches through cuda.bindings; None without a device
    whole      the call
    """

    call: str
    n_launches: int
    native: float
    bindings: float | None
    whole: float

    @property
    def own_python(self) -> float:
        return self.whole - self.native

    def __str__(self) -> str:
        through = "" if self.bindings is None else f" (through cuda.bindings {self.bindings:.2f})"
        return (
            f"{self.call}: whole call {self.whole:.2f}, {self.n_launches} launches {self.native:.2f}{through}, "
            f"own Python {self.own_python:.2f}"
        )


def measure(case: Case, batch: int, *, on_device: bool) -> Iterator[HostTime]:
    """A training step and an inference, which rotate through `N_INPUT_SETS` arrays."""
    trainer, data = case.make_trainer(), DeviceData.of(case, batch)
    network, out = trainer.network, data.out
    x, y = ([arrays[i % N_INPUT_SETS] for i in range(CALLS)] for arrays in (data.x, data.y))
    calls: dict[str, Call] = {
        "training": lambda i: trainer.training_step(x[i], y[i]),
        "inference": lambda i: network.inference(x[i], out=out),
    }
    for call in calls.values():
        for i in range(3 * N_INPUT_SETS):  # the third time it is repeated
            call(i)
    recorded = {"training": trainer._repeated.find(x[0], y[0]), "inference": network._repeated.find(x[0], out)}
    loop = _microseconds(lambda i: None)
    for name, call in calls.items():
        launches = recorded[name].launches
        yield HostTime(
            name,
            len(launches.launches),
            native=_microseconds(_calling(launches.run)) - loop,
            bindings=_microseconds(_calling(launches.through_bindings)) - loop if on_device else None,
            whole=_microseconds(call) - loop,
        )


def _calling(function: Callable[[], object]) -> Call:
    return lambda i: function()


def _microseconds(call: Call) -> float:
    return host_microseconds(call, calls=CALLS, repeats=REPEATS)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--configs", help=f"names of {CONFIGS.name}, separated by commas", type=lambda t: t.split(","))
    parser.add_argument("--batch", type=int, default=10, help="binary logarithm of the batch size")
    options = parser.parse_args(arguments)
    try:
        cases = load_cases(options.configs or ["image_hash", "mlp_only_w64_h2"])
    except ValueError as error:
        print(f"benchmarks.host_time: {error}", file=sys.stderr)
        return 2
    status = device_status(0)
    print(f"microseconds a call; {status.name if status.usable else 'no device, launches do nothing'}")
    with contextlib.nullcontext() if status.usable else no_device():
        for case in cases:
            for line in measure(case, 1 << options.batch, on_device=status.usable):
                print(f"{case.name} {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
