"""Device time of each kernel of a training step and of an inference call, for any configuration and batch size."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from numba_tcnn.fused import device_status, driver, level_plan, to_device

from .cases import CONFIGS, Case, load_cases
from .device_timing import Event, time_groups

WARM_UP = 10
REPEATS = 30
CALLS = 50


@contextmanager
def every_launch(record: Callable[[str], None]) -> Iterator[None]:
    """Call record(kernel name) before each launch, of calls and of their recordings."""
    launch, repeat = driver.LoadedKernel.launch, driver.RecordedLaunch.__call__

    def noted_launch(self, *arguments):
        record(self.name)
        return launch(self, *arguments)

    def noted_repeat(self):
        record(self.kernel.name)
        return repeat(self)

    driver.LoadedKernel.launch, driver.RecordedLaunch.__call__ = noted_launch, noted_repeat
    try:
        yield
    finally:
        driver.LoadedKernel.launch, driver.RecordedLaunch.__call__ = launch, repeat


def stage_times(call: Callable[[int], object]) -> list[tuple[str, float]]:
    """(kernel, median microseconds from its launch to the next one's) of one call, in launch order.

    An event stands before every launch and behind the last, so a stage holds some microseconds for the event.
    """
    for i in range(WARM_UP):
        call(i)
    driver.device(0).synchronize()
    runs: list[list[tuple[str, Event]]] = []

    def record(name: str) -> None:
        event = Event()
        event.record()
        runs[-1].append((name, event))

    with every_launch(record):
        for i in range(REPEATS):
            runs.append([])
            call(i)
            record("")
    names = [name for name, _ in runs[0]][:-1]
    times = [
        [1e3 * later.milliseconds_since(earlier) for (_, earlier), (_, later) in zip(run[:-1], run[1:], strict=True)]
        for run in runs
    ]
    return [(name, statistics.median(column)) for name, column in zip(names, zip(*times, strict=True), strict=True)]


def measure(case: Case, log2_batch: int) -> str:
    trainer = case.make_trainer()
    batch, rng = 1 << log2_batch, np.random.default_rng(0)
    x = [to_device(rng.random((batch, case.n_input_dims)).astype(case.input_dtype)) for _ in range(4)]
    y = [to_device(rng.random((batch, case.n_output_dims)).astype(np.float32)) for _ in range(4)]
    out = to_device(np.zeros((batch, case.n_output_dims), np.float32))
    calls = {
        "train": lambda i: trainer.training_step(x[i % 4], y[i % 4]),
        "infer": lambda i: trainer.network.inference(x[i % 4], out=out),
    }
    lines = []
    for name, call in calls.items():
        stages = ", ".join(f"{kernel} {time:.1f}" for kernel, time in stage_times(call))
        whole = 1e3 * time_groups(call, groups=5, calls=CALLS).median
        lines.append(f"{case.name} 2^{log2_batch} {name}: {whole:.1f} us; {stages}")
    lines += [
        f"    {kernel.name}: {kernel.plan}, {kernel.registers} registers, {kernel.shared_bytes} bytes shared, "
        f"{kernel.blocks} blocks"
        for kernel in trainer.explain().kernels
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("configs", help=f"names of {CONFIGS.name}, separated by commas", type=lambda t: t.split(","))
    parser.add_argument("--batches", type=lambda t: [int(p) for p in t.split(",")], default=[18])
    parser.add_argument("--split-from", type=int, help="batch size from which grids work level by level")
    options = parser.parse_args(arguments)
    if not device_status(0).usable:
        print(f"nothing can be measured: {device_status(0).reason}", file=sys.stderr)
        return 2
    if options.split_from is not None:
        level_plan.LEVEL_SPLIT_BATCH = options.split_from
    for case in load_cases(options.configs):
        for log2_batch in options.batches:
            print(measure(case, log2_batch), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
