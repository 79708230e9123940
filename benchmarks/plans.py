"""Times every kernel plan that the planner considers for a configuration, to see how well its order is chosen.

    python -m benchmarks.plans CONFIG [--batch 18] [--kind train|inference] [--limit N] [--out FILE]

A candidate is timed inside ordinary training steps or inference of a model whose planner offers nothing else, after
its results were compared with the reference. One JSON object a line, in the planner's order; a candidate that spills
or is wrong is named with its reason. The last line compares the planner's choice, the first candidate that runs, with
the fastest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba_tcnn as tcnn
from numba_tcnn.fused import device_status, jobs, network_plans, plan

from .cases import N_INPUT_SETS, Case, DeviceData, load_cases
from .device_timing import time_groups
from .ledger_rows import WARM_UP, info
from .verify import check_kernels

GROUPS, CALLS = 5, 20


@dataclass(frozen=True)
class Kind:
    """What is timed, and where the engine looks its candidates up: `module.name(spec, chip, ...) -> list of plans`."""

    module: Any
    name: str
    field: str


KINDS = {
    "train": Kind(jobs, "gradient_plans", "train_ms"),
    "inference": Kind(jobs, "inference_plans", "infer_ms"),
}


def candidates(case: Case, kind: str) -> list:
    """All plans for the case on this device, best first by the planner's estimate."""
    chip = plan.architecture(device_status(0).compute_capability)
    network = case.make_trainer().network
    if kind == "inference":
        return network_plans.inference_plans(network.spec, chip)
    has_table = network.n_params > sum(fan_out * fan_in for fan_out, fan_in in network.layer_sizes)
    return network_plans.gradient_plans(network.spec, chip, encoding_gradient=has_table)


@contextmanager
def only(candidate: Any, kind: Kind) -> Iterator[None]:
    """Within this, models that compile their kernels find one candidate."""
    original = getattr(kind.module, kind.name)
    setattr(kind.module, kind.name, lambda *arguments, **options: [candidate])
    try:
        yield
    finally:
        setattr(kind.module, kind.name, original)


def describe(candidate: Any) -> dict[str, Any]:
    """The plan in words, without its tiles."""
    parts = getattr(candidate, "propagate", candidate)
    return {"plan": parts.describe(), "min_blocks": parts.min_blocks, "shared_bytes": parts.shared_bytes}


def time_candidate(case: Case, data: DeviceData, candidate: Any, kind: str) -> dict[str, Any]:
    """Milliseconds a call and the kernels' registers, or the reason why it does not run."""
    with only(candidate, KINDS[kind]):
        trainer = case.make_trainer()

        def train(i: int) -> None:
            trainer.training_step(data.x[i % N_INPUT_SETS], data.y[i % N_INPUT_SETS])

        def infer(i: int) -> None:
            trainer.network.inference(data.x[i % N_INPUT_SETS], out=data.out)

        call = train if kind == "train" else infer
        try:
            problem = check_kernels(case, trainer, data.x[0].shape[0]).problem
        except tcnn.EngineUnavailable as error:
            problem = str(error)
        if problem:
            return {"reason": problem}
        for i in range(WARM_UP):
            call(i)
        timing = time_groups(call, groups=GROUPS, calls=CALLS)
        kernels = [f"{k.name}: {k.registers} registers, {k.spill_bytes} B spilled" for k in trainer.explain().kernels]
    return {KINDS[kind].field: round(timing.median, 6), "kernels": kernels}


def lines(case: Case, batch: int, kind: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    yield {"info": info() | {"groups": GROUPS}}
    plans = candidates(case, kind)
    data = DeviceData.of(case, batch)
    timed: list[tuple[float, int]] = []
    for rank, candidate in enumerate(plans[:limit]):
        found = time_candidate(case, data, candidate, kind)
        yield {"config": case.name, "batch": batch, "rank": rank} | describe(candidate) | found
        if KINDS[kind].field in found:
            timed.append((found[KINDS[kind].field], rank))
    yield summary(case.name, batch, len(plans), timed)


def summary(name: str, batch: int, n_plans: int, timed: list[tuple[float, int]]) -> dict[str, Any]:
    """The planner's choice against the best; `timed` holds (milliseconds, rank) of the candidates that run."""
    result: dict[str, Any] = {"config": name, "batch": batch, "candidates": n_plans, "run": len(timed)}
    if timed:
        (best, best_rank), (chosen, chosen_rank) = min(timed), min(timed, key=lambda entry: entry[1])
        result |= {"chosen_rank": chosen_rank, "chosen_ms": chosen, "best_rank": best_rank, "best_ms": best}
        result["slower_by"] = round(chosen / best - 1, 4)
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="name of a configuration in configs.json")
    parser.add_argument("--batch", type=int, default=18, help="binary logarithm of the batch size (default: 18)")
    parser.add_argument("--kind", choices=list(KINDS), default="train")
    parser.add_argument("--limit", type=int, help="only so many candidates, best by the planner's estimate first")
    parser.add_argument("--out", type=Path, help="write the lines here too")
    options = parser.parse_args(arguments)
    status = device_status(0)
    if not status.usable:
        print(f"no plan can be timed: {status.reason}", file=sys.stderr)
        return 2
    try:
        (case,) = load_cases([options.config])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    texts = []
    try:
        for line in lines(case, 1 << options.batch, options.kind, options.limit):
            texts.append(json.dumps(line))
            print(texts[-1], flush=True)
    except tcnn.EngineUnavailable as reason:
        print(f"{case.name}: {reason}", file=sys.stderr)
        return 2
    if options.out:
        options.out.write_text("\n".join(texts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
