"""Times training steps and inference of the configurations in configs.json; one JSON object a line.

    python -m benchmarks.ledger_rows [--configs NAME,NAME] [--batches 14,16,18,20,21] [--out FILE]

Calls are those of a user: `trainer.training_step(x, y)` and `network.inference(x, out=out)` from Python on device
arrays, rotating through four input sets. README.md says what every field means. Exit status 1 if a row failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba_tcnn as tcnn
from numba_tcnn.fused import device_status

from .cases import BATCHES, N_INPUT_SETS, Case, DeviceData, load_cases
from .device_timing import Timing, host_microseconds, time_groups
from .verify import check_kernels

WARM_UP = 20
GROUPS = 9
PACKAGES = (
    "numba-tcnn",
    "numba",
    "numba-cuda",
    "cuda-core",
    "cuda-bindings",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "numpy",
)


def info() -> dict[str, Any]:
    """The first line: where and with what the rows were measured."""
    status = device_status(0)
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": status.name,
        "compute_capability": ".".join(map(str, status.compute_capability or ())),
        "driver": ".".join(map(str, status.driver_version or ())),
        "python": platform.python_version(),
        "versions": versions,
        "n_input_sets": N_INPUT_SETS,
        "warm_up": WARM_UP,
        "groups": GROUPS,
    }


def calls_a_group(log2_batch: int) -> int:
    """At least 50; more where a call is short."""
    return 100 if log2_batch < 16 else 50


def timing_fields(name: str, timing: Timing) -> dict[str, float]:
    return {
        f"{name}_ms": round(timing.median, 6),
        f"{name}_ms_min": round(min(timing.groups), 6),
        f"{name}_ms_max": round(max(timing.groups), 6),
    }


def case_rows(case: Case, log2_batches: list[int]) -> Iterator[dict[str, Any]]:
    """A row a batch size; a single line with the reason where the configuration has no fused kernels."""
    try:
        trainer = case.make_trainer()
    except tcnn.EngineUnavailable as reason:
        yield {"config": case.name, "skipped": str(reason)}
        return
    params, state = trainer.network.params, trainer.optimizer.state_dict()
    for log2_batch in log2_batches:
        row: dict[str, Any] = {"config": case.name, "batch": 1 << log2_batch}
        data = DeviceData.of(case, 1 << log2_batch)
        try:
            if log2_batch == log2_batches[0]:
                row |= first_step(trainer, data)
            trainer.network.params = params
            trainer.optimizer.load_state_dict(state)
            yield row | measure(case, trainer, data, 1 << log2_batch, calls_a_group(log2_batch))
        except tcnn.EngineUnavailable as error:  # a kernel that does not compile
            yield row | {"failed": str(error)}


def measure(case: Case, trainer: tcnn.Trainer, data: DeviceData, batch: int, calls: int) -> dict[str, Any]:
    """All figures of one row. Kernels that are wrong are not timed."""
    fields: dict[str, Any] = {"engine": trainer.explain().engine}
    checks = check_kernels(case, trainer, batch)
    fields["checks"] = vars(checks)
    if checks.problem:
        return fields | {"failed": checks.problem}

    losses = []

    def train(i: int) -> None:
        losses.append(trainer.training_step(data.x[i % N_INPUT_SETS], data.y[i % N_INPUT_SETS]))
        del losses[1:-1]

    def infer(i: int) -> None:
        trainer.network.inference(data.x[i % N_INPUT_SETS], out=data.out)

    def infer_half(i: int) -> None:
        trainer.network.inference(data.x[i % N_INPUT_SETS], out=data.out_half)

    measured = [("train", train), ("infer", infer), *([("infer_half", infer_half)] if case.bare else [])]
    for name, call in measured:
        for i in range(WARM_UP):
            call(i)
        fields |= timing_fields(name, time_groups(call, groups=GROUPS, calls=calls))
    fields["host_us"] = round(host_microseconds(train), 2)
    fields["infer_host_us"] = round(host_microseconds(infer), 2)
    fields |= {"loss_first": float(losses[0]), "loss_last": float(losses[-1]), "steps": trainer.step}
    fields["calls_a_group"] = calls
    if not fields["loss_last"] < fields["loss_first"]:
        fields["failed"] = "the loss does not fall"
    return fields


def first_step(trainer: tcnn.Trainer, data: DeviceData) -> dict[str, Any]:
    """Seconds of the first training step. The CUDA context exists by then; the data lies in it.

    Only a step that had to compile counts as `first_train_s`; one from the disk cache is `first_train_cached_s`.
    """
    start = time.perf_counter()
    float(trainer.training_step(data.x[0], data.y[0]))
    seconds = round(time.perf_counter() - start, 4)
    compiled = [kernel.name for kernel in trainer.explain().kernels if not kernel.from_cache]
    return {"first_train_s" if compiled else "first_train_cached_s": seconds, "first_train_compiled": compiled}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger_rows", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--configs", type=lambda text: text.split(","), help="names, separated by commas (default: all)"
    )
    parser.add_argument(
        "--batches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=list(BATCHES),
        help="binary logarithms of batch sizes (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="write the lines here too, each as soon as it is measured")
    return parser.parse_args(arguments)


def lines(cases: list[Case], log2_batches: list[int]) -> Iterator[dict[str, Any]]:
    yield {"info": info()}
    for case in cases:
        yield from case_rows(case, log2_batches)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    status = device_status(0)
    if not status.usable:
        print(f"no row can be measured: {status.reason}", file=sys.stderr)
        return 2
    try:
        cases = load_cases(options.configs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    failed = 0
    out = open(options.out, "w") if options.out else None
    try:
        for line in lines(cases, options.batches):
            text = json.dumps(line)
            print(text, flush=True)
            if out:
                print(text, file=out, flush=True)
            failed += "failed" in line
    finally:
        if out:
            out.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
