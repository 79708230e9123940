"""The job behind `numba-tcnn compile`: a configuration's kernels, compiled without a GPU into the disk cache.

Everything that can be wrong with the arguments, the config and the machine is found before the first kernel.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

from .command_line import CommandError, read_config
from .config import config_parts, parse_loss, parse_model, parse_optimizer
from .config_losses import check_loss
from .engines import EngineUnavailable
from .fused import cache, compile_processes, compiler, offline, refusals
from .layout import n_params

COLUMNS = (
    ("arch", "arch"),
    ("kernel", "kernel"),
    ("seconds", "seconds"),
    ("registers", "registers"),
    ("spill B", "spill_bytes"),
    ("local B", "local_bytes"),
    ("shared B", "shared_bytes"),
    ("mma", "mma_instructions"),
    ("vector loads", "vector_loads"),
    ("reductions", "reductions"),
    ("plan", "plan"),
    ("for", "call"),
)
"""Heading and field of `KernelRecord` of each column."""

TEXT_COLUMNS = ("arch", "kernel", "plan", "call")

LIBRARY_NOT_FOUND = re.compile(r'Failure finding "([^"]*)":.*', re.DOTALL)
"""What cuda-pathfinder says of a missing library: its name again for every place where it looked."""


@dataclass(frozen=True)
class CompileJob:
    """What to compile, as given on the command line."""

    config: Path
    inputs: int
    outputs: int
    arch: tuple[str, ...] = ("sm_90",)
    dtype: str = "float16"
    json: bool = False
    processes: int | None = None


def run(job: CompileJob) -> None:
    """Do the job: a table on stdout at the end, or JSON line by line; progress on stderr.

    Raises CommandError or ConfigError, before anything is compiled unless it is a kernel that does not compile.
    """
    jobs = kernels_of_config(job)
    archs = tuple(dict.fromkeys(job.arch))
    check_machine(archs)
    start = time.perf_counter()
    done = []
    for record in with_progress(offline.compile_jobs(jobs, archs, processes=n_processes(job)), len(jobs) * len(archs)):
        done.append(record)
        if job.json:
            for kernel in record.kernels:
                print(json.dumps(asdict(kernel)), flush=True)
    if not job.json:
        print(table(kernel for record in done for kernel in record.taken))
        print(summary(done, archs, time.perf_counter() - start))
    problems = list(
        dict.fromkeys(f"{record.arch}, {record.call}: {record.problem}" for record in done if record.problem)
    )
    if problems:
        raise CommandError("; ".join(problems))


def kernels_of_config(job: CompileJob) -> list[offline.Job]:
    """The jobs of a configuration. Raises CommandError for what has no fused kernels, and names it."""
    parts = config_parts(read_config(job.config))
    spec = parse_model(job.inputs, job.outputs, parts.encoding, parts.network)
    loss = parse_loss(parts.loss)
    check_loss(loss, spec.n_output_dims)
    optimizer = parse_optimizer(parts.optimizer, n_params=n_params(spec))
    try:
        refusals.refuse_model(spec, dtype=job.dtype)
        refusals.refuse_training(loss)
        jobs = offline.first_calls(spec, optimizer, loss, job.dtype)
        offline.check_plans(jobs, job.arch)
    except EngineUnavailable as error:
        raise CommandError(f"{job.config}: {error}") from error
    return jobs


def check_machine(archs: tuple[str, ...]) -> None:
    """Raises CommandError with advice where the compilers are missing or the cache can't be written."""
    problem = compiler.toolchain_problem([offline.CAPABILITIES[arch] for arch in archs])
    if problem:
        problem = LIBRARY_NOT_FOUND.sub(r"\1 was not found", problem)
        raise CommandError(
            f"{problem}; pip install 'numba-tcnn[cuda13]', or 'numba-tcnn[cuda12]' for a driver older than 580, "
            "brings the compilers, which need no GPU"
        )
    try:
        cache.check_writable()
    except OSError as error:
        raise CommandError(
            f"the kernel cache {cache.cache_directory()} can't be written: {error.strerror}; "
            "name another folder in NUMBA_TCNN_CACHE_DIR"
        ) from error


def n_processes(job: CompileJob) -> int:
    return job.processes or min(compile_processes.usable_cores(), offline.MAX_PROCESSES)


def with_progress(records: Iterator[offline.JobRecord], total: int) -> Iterator[offline.JobRecord]:
    """The records, and a line on stderr for each as soon as it is there."""
    try:
        for i, record in enumerate(records, 1):
            made = (
                "cached" if record.kernels and all(k.from_cache for k in record.kernels) else f"{record.seconds:.1f} s"
            )
            outcome = f"failed: {record.problem}" if record.problem else made
            print(f"[{i}/{total}] {record.arch}, {record.call}: {outcome}", file=sys.stderr, flush=True)
            yield record
    except BrokenProcessPool as error:
        raise CommandError(f"a compiling process was ended from outside ({error}); try --processes 1") from error


def table(kernels: Iterator[offline.KernelRecord]) -> str:
    """One line a kernel under headings, numbers to the right."""
    rows = [[heading for heading, _ in COLUMNS]]
    for kernel in kernels:
        values = asdict(kernel)
        rows.append([f"{values[f]:.2f}" if f == "seconds" else str(values[f]) for _, f in COLUMNS])
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    left = [field in TEXT_COLUMNS for _, field in COLUMNS]
    lines = (
        "  ".join(t.ljust(w) if is_left else t.rjust(w) for t, w, is_left in zip(row, widths, left, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def summary(done: list[offline.JobRecord], archs: tuple[str, ...], seconds: float) -> str:
    kernels = [kernel for record in done for kernel in record.kernels]
    taken = len({kernel.key for kernel in kernels if kernel.taken})
    in_vain = len({kernel.key for kernel in kernels}) - taken
    made = len({kernel.key for kernel in kernels if not kernel.from_cache})
    spilled = f", {in_vain} more passed over since their plans spill" if in_vain else ""
    folder = cache.cache_directory()
    kept = "kept nowhere, NUMBA_TCNN_CACHE_DIR turns the cache off" if folder is None else f"in {folder}"
    return f"{taken} kernels for {', '.join(archs)} in {seconds:.1f} s ({made} compiled now{spilled}), {kept}"
