"""Compiles every configuration that has fused kernels for six architectures, without a GPU, and prints a table.

    python -m benchmarks.compile_sweep [--configs a,b] [--archs sm_80,sm_90] [--processes N] [--out FILE]

The kernels are those of `numba-tcnn compile`, kept in the same cache. A row is a configuration on an architecture:

kernels      taken, and in brackets those that were compiled in vain, since they or others of their plan spill
seconds      of compiling them all, summed, whenever that was; other processes on the same cores count
registers    of the training step's largest kernel on float32 or float16 inputs, and of the largest of all
spill, local bytes a thread of the worst kernel that is taken

A configuration without fused kernels is a line with the reason; the exit status is 1 if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused.compiler import toolchain_problem
from numba_tcnn.fused.jobs import Job
from numba_tcnn.fused.offline import CAPABILITIES, JobRecord, compile_jobs, first_calls, usable_cores
from numba_tcnn.fused.refusals import refuse_model, refuse_training

from .cases import Case, load_cases

ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
HEADINGS = ("configuration", "arch", "kernels", "seconds", "registers", "spill B", "local B")


def jobs_of(case: Case) -> list[Job]:
    """What the case's first calls compile. Raises EngineUnavailable where a component has no fused kernel."""
    spec, loss, optimizer = case.specs()
    refuse_model(spec, dtype="float16")
    refuse_training(loss)
    return first_calls(spec, optimizer, loss)


def row(name: str, arch: str, records: list[JobRecord]) -> tuple[str, ...]:
    problems = [f"{record.call}: {record.problem}" for record in records if record.problem]
    if problems:
        return (name, arch, "; ".join(problems), "", "", "", "")
    kernels = list({kernel.key: kernel for record in records for kernel in record.kernels}.values())
    taken = [kernel for kernel in kernels if kernel.taken]
    in_vain = f" ({len(kernels) - len(taken)})" if len(taken) < len(kernels) else ""
    training = max(kernel.registers for record in records[:2] for kernel in record.taken)
    return (
        name,
        arch,
        f"{len(taken)}{in_vain}",
        f"{sum(kernel.seconds for kernel in kernels):.1f}",
        f"{training}, {max(kernel.registers for kernel in taken)}",
        str(max(kernel.spill_bytes for kernel in taken)),
        str(max(kernel.local_bytes for kernel in taken)),
    )


def rows(case: Case, archs: list[str], processes: int) -> Iterator[tuple[str, ...]]:
    """One row an architecture, or one with the reason why there are no kernels."""
    try:
        jobs = jobs_of(case)
    except EngineUnavailable as reason:
        yield (case.name, "all", f"none: {reason}", "", "", "", "")
        return
    records = list(compile_jobs(jobs, archs, processes=processes))
    for i, arch in enumerate(archs):
        yield row(case.name, arch, records[i * len(jobs) : (i + 1) * len(jobs)])


def markdown(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=lambda text: text.split(","), help="names, separated by commas (all)")
    parser.add_argument("--archs", type=lambda text: text.split(","), default=list(ARCHS), help=",".join(ARCHS))
    parser.add_argument("--processes", type=int, default=usable_cores(), help="that compile at a time (the cores)")
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args(arguments)
    unknown = [arch for arch in options.archs if arch not in CAPABILITIES]
    try:
        cases = load_cases(options.configs)
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
    for case in cases:
        for cells in rows(case, options.archs, options.processes):
            failed = failed or (cells[1] != "all" and not cells[3])
            lines.append(markdown(cells))
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
