"""Compares fused kernels with the reference on random draws from the whole space of configs; README.md says how.

    python -m benchmarks.agreement [--draws 300] [--seed N] [--out FILE] [--resume] [--seconds S] [--processes N]
    python -m benchmarks.agreement --seed N --draw K         # one draw again, with details
    python -m benchmarks.agreement --only-run --draws 20 --processes 1            # below a sanitizer
    python -m benchmarks.agreement --compile sm_90           # without a device: the kernels, into the cache

Exit status: 0 if all agree, 1 if a draw fails, 2 where nothing can be run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from numba_tcnn.fused import device_status
from numba_tcnn.fused.compile_processes import usable_cores
from numba_tcnn.fused.compiler import toolchain_problem
from numba_tcnn.fused.jobs import Job
from numba_tcnn.fused.offline import CAPABILITIES, compile_jobs

from . import tables
from .components import coverage
from .deck import Deck
from .examine import FAILS, FULL, ONLY_RUN, Record, Scale, examine_number
from .jobs import jobs_of
from .processes import Outcome, outcomes
from .random_draws import random_draw

SECONDS_EACH = 240.0
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Of NumPy's in each process: there is a process for each core."""

TELL_EACH = 25


def main(
    arguments: Sequence[str] | None = None, *, first: Callable[[], None] | None = None, scale: Scale = FULL
) -> int:
    """`first`: what each process does before anything else, such as to stand in for a device."""
    options = parse(arguments)
    problem = cannot_compile(options.compile) if options.compile else cannot_run(options, first)
    if problem:
        say(problem)
        return 2
    if options.compile:
        return compile_draws(options)
    wanted = range(options.draws) if options.draw is None else [options.draw]
    records = [record for record in records_in(options.out) if record.number in wanted] if options.resume else []
    numbers = [number for number in wanted if number not in {record.number for record in records}]
    say(f"seed {options.seed}: {len(records)} draws done before, {len(numbers)} to do")
    for record in examined(numbers, options, scale, first):
        records.append(record)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(record.to_json()) + "\n")
        if record.status == FAILS or len(records) % TELL_EACH == 0:
            say(f"{len(records)} of {len(wanted)}: draw {record.number} {record.status}", *record.failures)
    return conclude(records, wanted, options)


def examined(
    numbers: Sequence[int], options: argparse.Namespace, scale: Scale, first: Callable[[], None] | None
) -> Iterator[Record]:
    """A record for each draw as it ends, until the time is over or someone presses Ctrl-C."""
    scale = ONLY_RUN if options.only_run else scale
    work = functools.partial(examine_number, seed=options.seed, scale=scale, compare=not options.only_run)
    processes = 1 if options.draw is not None else options.processes
    until = time.monotonic() + options.seconds
    os.environ.update(ONE_THREAD)  # of the processes to come
    limits = {"processes": processes, "seconds_each": options.seconds_each, "until": until}
    with (
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(outcomes(numbers, work, **limits, first=first)) as found,
    ):
        for outcome in found:
            yield record_of(outcome, options.seed)


def record_of(outcome: Outcome, seed: int) -> Record:
    if not outcome.problem:
        return Record.from_json(outcome.result)
    record = Record(seed, outcome.number, asdict(random_draw(Deck(seed, outcome.number))))
    record.fail(outcome.problem)
    return record


def conclude(records: Sequence[Record], wanted: Sequence[int], options: argparse.Namespace) -> int:
    """Tables to stdout, and to a file if one was named; the exit status."""
    text = tables.report(sorted(records, key=lambda record: record.number))
    if options.draw is not None and records:
        text = json.dumps(records[0].to_json(), indent=1) + "\n\n" + text
    else:
        counts = coverage(random_draw(Deck(options.seed, record.number)) for record in records)
        text += f"\n\n### What the draws are made of\n\n{tables.covered(counts)}"
    print(text)
    if options.table:
        options.table.write_text(text + "\n")
    if len(records) < len(wanted):
        say(f"{len(wanted) - len(records)} draws are not done: --seed {options.seed} --resume goes on with them")
    return int(any(record.status == FAILS for record in records))


# ---------------------------------------------------------------------------------------- options


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=description)
    parser.add_argument("--draws", type=int, default=300, help="how many (300)")
    parser.add_argument("--seed", type=int, help="of the draws; printed; random if not given")
    parser.add_argument("--out", type=Path, help="append a line of JSON for each draw as it ends")
    parser.add_argument("--table", type=Path, help="write the tables here too")
    parser.add_argument("--resume", action="store_true", help="leave out what --out holds already, and take its seed")
    parser.add_argument("--draw", type=int, help="only this one, in this process, with all that was found")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which draws not done are left out")
    parser.add_argument("--seconds-each", type=float, default=SECONDS_EACH, help="after which a draw fails (240)")
    parser.add_argument("--processes", type=int, default=usable_cores(), help="(the cores); 1: in this process")
    parser.add_argument("--only-run", action="store_true", help="small batches, without comparing anything")
    parser.add_argument("--compile", metavar="ARCH", help="only compile the draws' kernels for e.g. sm_90")
    options = parser.parse_args(arguments)
    if options.resume:
        seeds = {record.seed for record in records_in(options.out)}
        options.seed = seeds.pop() if len(seeds) == 1 and options.seed in (None, *seeds) else options.seed
        if seeds - {options.seed}:
            parser.error(f"{options.out} holds draws of another seed")
    if options.seed is None:
        options.seed = secrets.randbelow(2**32)
    return options


def records_in(path: Path | None) -> list[Record]:
    """Of a file that a run may have been cut in the middle of writing to."""
    records = []
    for line in path.read_text().splitlines() if path and path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(Record.from_json(json.loads(line)))
    return records


def cannot_run(options: argparse.Namespace, first: Callable[[], None] | None) -> str:
    """Why nothing can be compared; "" where it can, with the device or with what `first` puts in its place."""
    if options.draws < 1 or options.processes < 1:
        return "--draws and --processes are at least 1"
    status = device_status(0) if first is None else None
    return "" if status is None or status.usable else f"nothing can be compared: {status.reason}"


def cannot_compile(arch: str) -> str:
    if arch not in CAPABILITIES:
        return f"--compile: {arch!r} is none of {', '.join(CAPABILITIES)}"
    return toolchain_problem([CAPABILITIES[arch]]) or ""


def say(*lines: str) -> None:
    print("\n  ".join(lines), file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------- without a device


def compile_draws(options: argparse.Namespace) -> int:
    """All kernels of the draws, into the cache that a run with the same versions looks into."""
    jobs: dict[Job, list[int]] = {}
    for number in range(options.draws):
        draw = random_draw(Deck(options.seed, number))
        for job in jobs_of(draw, CAPABILITIES[options.compile], max(FULL.sizes(draw))):
            jobs.setdefault(job, []).append(number)
    say(f"seed {options.seed}: {len(jobs)} calls of {options.draws} draws")
    started, failed, seconds = time.monotonic(), 0, 0.0
    made = compile_jobs(list(jobs), [options.compile], processes=options.processes)
    for i, (numbers, job) in enumerate(zip(jobs.values(), made, strict=True), 1):
        seconds += sum(kernel.seconds for kernel in job.kernels)
        failed += bool(job.problem)
        if job.problem or i % (4 * TELL_EACH) == 0:
            told = f" draws {numbers}, {job.call}: {job.problem}" if job.problem else ""
            say(f"{i} of {len(jobs)}, {time.monotonic() - started:.0f} s{told}")
    print(f"{len(jobs)} calls, {seconds:.0f} s of compiling, {failed} without kernels")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
