"""Device time of each kernel of a training step and of an inference call, for any configuration and batch size."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numba_tcnn as tcnn
from numba_tcnn.fused import device_status, driver, level_plan, native_launches

from .cases import CONFIGS, N_INPUT_SETS, Case, DeviceData, load_cases
from .device_timing import Event, time_groups
from .ledger_rows import info

WARM_UP = 10
REPEATS = 30
CALLS = 50


@contextmanager
def every_launch(record: Callable[[str], None]) -> Iterator[None]:
    """Call record(kernel name) before each launch, of calls and of those recorded while launches are `one_by_one`."""
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


@contextmanager
def one_by_one(trainer: tcnn.Trainer) -> Iterator[None]:
    """Calls are recorded anew, to be launched kernel by kernel through cuda.bindings; natively again afterwards."""
    validity = trainer.network.engine.runtime.model.validity
    with mock.patch.object(native_launches, "entry_points", lambda bindings: None):
        validity.memory_moved()
        yield
    validity.memory_moved()


def stage_times(trainer: tcnn.Trainer, call: Callable[[int], object]) -> list[tuple[str, float]]:
    """(kernel, median microseconds from its launch to the next one's) of one call, in launch order.

    An event stands before every launch and behind the last, so a stage holds some microseconds for the event.
    """
    runs: list[list[tuple[str, Event]]] = []

    def record(name: str) -> None:
        event = Event()
        event.record()
        runs[-1].append((name, event))

    with one_by_one(trainer):
        for i in range(WARM_UP):
            call(i)
        driver.device(0).synchronize()
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


def measure(case: Case, log2_batch: int) -> Iterator[dict[str, Any]]:
    """A line a call: microseconds of the whole, of its stages in launch order, and what its kernels are like."""
    trainer = case.make_trainer()
    data = DeviceData.of(case, 1 << log2_batch)
    calls = {
        "train": lambda i: trainer.training_step(data.x[i % N_INPUT_SETS], data.y[i % N_INPUT_SETS]),
        "infer": lambda i: trainer.network.inference(data.x[i % N_INPUT_SETS], out=data.out),
    }
    for name, call in calls.items():
        stages = [{"kernel": kernel, "us": round(time, 2)} for kernel, time in stage_times(trainer, call)]
        whole = 1e3 * time_groups(call, groups=5, calls=CALLS).median
        launched = {stage["kernel"] for stage in stages}
        yield {
            "config": case.name,
            "batch": 1 << log2_batch,
            "call": name,
            "us": round(whole, 2),
            "stages": stages,
            "kernels": [
                {
                    "kernel": kernel.name,
                    "plan": kernel.plan,
                    "registers": kernel.registers,
                    "shared_bytes": kernel.shared_bytes,
                    "blocks": kernel.blocks,
                }
                for kernel in trainer.explain().kernels
                if kernel.name in launched
            ],
        }


def in_words(line: dict[str, Any]) -> str:
    stages = ", ".join(f"{stage['kernel']} {stage['us']:.1f}" for stage in line["stages"])
    kernels = [
        f"    {kernel['kernel']}: {kernel['plan']}, {kernel['registers']} registers, {kernel['shared_bytes']} bytes "
        f"shared, {kernel['blocks']} blocks"
        for kernel in line["kernels"]
    ]
    return "\n".join(
        [f"{line['config']} 2^{line['batch'].bit_length() - 1} {line['call']}: {line['us']:.1f} us; {stages}", *kernels]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("configs", help=f"names of {CONFIGS.name}, separated by commas", type=lambda t: t.split(","))
    parser.add_argument("--batches", type=lambda t: [int(p) for p in t.split(",")], default=[18])
    parser.add_argument("--split-from", type=int, help="batch size from which grids work level by level")
    parser.add_argument("--out", type=Path, help="write a JSON object a call here, for benchmarks.report")
    options = parser.parse_args(arguments)
    if not device_status(0).usable:
        print(f"nothing can be measured: {device_status(0).reason}", file=sys.stderr)
        return 2
    if options.split_from is not None:
        level_plan.LEVEL_SPLIT_BATCH, level_plan.WITH_GLOBAL_SUMS = options.split_from, 1
    try:
        cases = load_cases(options.configs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    lines = [{"info": info()}]
    for case in cases:
        for log2_batch in options.batches:
            for line in measure(case, log2_batch):
                print(in_words(line), flush=True)
                lines.append(line)
    if options.out:
        options.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
