"""Compiles every configuration that has fused kernels for six architectures, without a GPU, and prints a table.

    python -m benchmarks.compile_sweep [--configs a,b] [--archs sm_80,sm_90] [--processes N] [--out FILE]
    python -m benchmarks.compile_sweep --components [--archs sm_80,sm_90] [--processes N] [--out FILE]

The kernels are those of `numba-tcnn compile`, kept in the same cache. A row is a configuration on an architecture; with
`--components` it is a small model of one component (`component_cases.py`), of which a training step and an inference on
float32 inputs, large batches too where they have kernels of their own, and the optimizer are compiled:

kernels      taken, and in brackets those that were compiled in vain, since they or others of their plan spill
seconds      of processor time, of compiling them all, summed, whenever that was
registers    of the training step's largest kernel, and of the largest of all
spill, local bytes a thread of the worst kernel that is taken

A configuration without fused kernels is a line with the reason; the exit status is 1 if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused.compile_processes import usable_cores
from numba_tcnn.fused.compiler import toolchain_problem
from numba_tcnn.fused.element_wise_jobs import CollectJob, GradientScaleJob
from numba_tcnn.fused.jobs import Job
from numba_tcnn.fused.offline import CAPABILITIES, JobRecord, called_jobs, compile_jobs, first_calls
from numba_tcnn.fused.refusals import refuse_model, refuse_training
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions

from .cases import Case, load_cases
from .component_cases import component_cases

ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
HEADINGS = ("configuration", "arch", "kernels", "seconds", "registers", "spill B", "local B")


def jobs_of(case: Case) -> list[Job]:
    """What the case's first calls compile. Raises EngineUnavailable where a component has no fused kernel."""
    spec, loss, optimizer = case.specs()
    refuse_model(spec, dtype="float16")
    refuse_training(loss)
    return first_calls(spec, optimizer, loss)


def component_jobs_of(case: Case) -> list[Job]:
    """A training step, inference and the optimizer, as far as the case's first calls compile them."""
    return [job for job in jobs_of(case) if not isinstance(job, CollectJob | GradientScaleJob) and _on_float32(job)]


def _on_float32(job: Job) -> bool:
    options = getattr(job, "options", None)
    if isinstance(options, InferenceOptions):
        return (options.input_dtype, options.output_dtype) == ("float32", "float32")
    return options is None or (options.input_dtype == "float32" and not options.input_gradient)


def row(name: str, arch: str, records: dict[Job, JobRecord]) -> tuple[str, ...]:
    problems = [f"{record.call}: {record.problem}" for record in records.values() if record.problem]
    if problems:
        return (name, arch, "; ".join(problems), "", "", "", "")
    kernels = list({kernel.key: kernel for record in records.values() for kernel in record.kernels}.values())
    taken = [kernel for kernel in kernels if kernel.taken]
    in_vain = f" ({len(kernels) - len(taken)})" if len(taken) < len(kernels) else ""
    steps = [record for job, record in records.items() if isinstance(getattr(job, "options", None), GradientOptions)]
    training = max(kernel.registers for record in steps for kernel in record.taken)
    return (
        name,
        arch,
        f"{len(taken)}{in_vain}",
        f"{sum(kernel.seconds for kernel in kernels):.1f}",
        f"{training}, {max(kernel.registers for kernel in taken)}",
        str(max(kernel.spill_bytes for kernel in taken)),
        str(max(kernel.local_bytes for kernel in taken)),
    )


def rows(
    cases: list[Case], archs: list[str], processes: int, jobs_of_case: Callable[[Case], list[Job]]
) -> Iterator[tuple[str, ...]]:
    """For each case one row an architecture, or one with the reason why there are no kernels."""
    jobs: dict[str, list[Job]] = {}
    for case in cases:
        try:
            jobs[case.name] = jobs_of_case(case)
        except EngineUnavailable as reason:
            yield (case.name, "all", f"none: {reason}", "", "", "", "")
    different = list(dict.fromkeys(job for of_case in jobs.values() for job in of_case))
    tasks = called_jobs(different, archs)
    records = dict(zip(tasks, compile_jobs(different, archs, processes=processes), strict=True)) if tasks else {}
    for name, of_case in jobs.items():
        for arch in archs:
            yield row(name, arch, {job: records[job, arch] for job in of_case if (job, arch) in records})


def markdown(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_sweep", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--configs", type=lambda text: text.split(","), help="names, separated by commas (all)")
    what.add_argument("--components", action="store_true", help="every component instead, in small models")
    parser.add_argument("--archs", type=lambda text: text.split(","), default=list(ARCHS), help=",".join(ARCHS))
    parser.add_argument("--processes", type=int, default=usable_cores(), help="that compile at a time (the cores)")
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args(arguments)
    unknown = [arch for arch in options.archs if arch not in CAPABILITIES]
    try:
        cases = component_cases() if options.components else load_cases(options.configs)
        problem = f"unknown architectures: {', '.join(unknown)}" if unknown else None
    except ValueError as error:
        cases, problem = [], str(error)
    problem = problem or toolchain_problem([CAPABILITIES[arch] for arch in options.archs])
    if problem:
        print(problem, file=sys.stderr)
        return 2
    lines = [markdown(HEADINGS), "|---|---|" + "---:|" * 5]
    print("\n".join(lines), flush=True)
    failed = False
    groups, jobs_of_case = ([cases], component_jobs_of) if options.components else ([[c] for c in cases], jobs_of)
    for group in groups:
        for cells in rows(group, options.archs, options.processes, jobs_of_case):
            failed = failed or (cells[1] != "all" and not cells[3])
            lines.append(markdown(cells))
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
