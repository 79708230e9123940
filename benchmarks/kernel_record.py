"""Records what the compiler makes of every kernel that the benchmark times, for sm_90 and without a GPU.

    python -m benchmarks.kernel_record [--accept-worse] [--processes N]

compiles them, prints what changed since `kernels_sm_90.txt` was written, and in which direction, and writes it anew. It
does not where a kernel spills more or needs over 8 registers more, unless that is accepted; the exit status is then 1.
`tests/test_kernel_record.py` compares the file with what it compiles itself.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

from numba_tcnn.fused.cache import toolchain_versions
from numba_tcnn.fused.compile_processes import usable_cores
from numba_tcnn.fused.compiler import toolchain_problem
from numba_tcnn.fused.offline import CAPABILITIES, JobRecord, compile_jobs

from .cases import Case, load_cases
from .timed_jobs import timed_jobs

ARCH = "sm_90"
RECORD = Path(__file__).with_name(f"kernels_{ARCH}.txt")
COMMAND = "python -m benchmarks.kernel_record"

TOLERATED = {"registers": 8, "spill": 0, "local": 0}
"""How much more of a figure is written without `--accept-worse`; registers are handed out by the eight."""

HEAD = f"""\
# What the compiler makes of the benchmark's kernels on {ARCH}, a kernel a line: registers a thread; bytes of spills and
# of local memory a thread; bytes of shared memory a block; tensor-core products, vector loads and reductions that
# stand in the PTX; kernels of candidates that were passed over for the call; the plan.
# Written by `{COMMAND}`.
# toolchain: """

WIDTHS = (16, 11, 19, 9, 5, 5, 7, 4, 12, 10, 6)
"""Of all columns but the last. They are fixed, so that a change of one line is a change of one line."""


@dataclass(frozen=True)
class Line:
    """One kernel. The first three say which; a second kernel of one name has `.2` behind it."""

    config: str
    call: str
    kernel: str
    registers: int
    spill: int
    local: int
    shared: int
    mma: int
    vector_loads: int
    reductions: int
    passed: int
    plan: str

    @property
    def which(self) -> tuple[str, str, str]:
        return self.config, self.call, self.kernel


FIGURES = [field.name for field in fields(Line)][3:]
LESS_IS_BETTER = {"registers", "spill", "local", "reductions", "passed"}


@dataclass(frozen=True)
class Change:
    """A figure of a kernel that differs; None where there is no such kernel before or after."""

    which: tuple[str, str, str]
    figure: str
    old: int | str | None
    new: int | str | None

    @property
    def direction(self) -> str:
        if None in (self.old, self.new):
            return "gone" if self.new is None else "new"
        if self.figure not in LESS_IS_BETTER:
            return "different"
        return "better" if self.new < self.old else "worse"

    @property
    def needs_consent(self) -> bool:
        return self.direction == "worse" and self.figure in TOLERATED and self.new - self.old > TOLERATED[self.figure]

    def __str__(self) -> str:
        values = f": {self.old} -> {self.new}" if self.direction not in ("gone", "new") else ""
        return f"{' '.join(self.which)}: {self.figure}{values} ({self.direction})"


# ---------------------------------------------------------------------------------------------- the file


def render(lines: Iterable[Line], toolchain: Iterable[str]) -> str:
    headings = [field.name.replace("_", "-") for field in fields(Line)]
    rows = [headings, *(astuple(line) for line in sorted(lines, key=lambda line: line.which))]
    return "\n".join([HEAD + ", ".join(toolchain), *(_row(values) for values in rows)]) + "\n"


def _row(values: Iterable[object]) -> str:
    *texts, plan = map(str, values)
    left = (text.ljust(width) for text, width in zip(texts[:3], WIDTHS[:3], strict=True))
    right = (text.rjust(width) for text, width in zip(texts[3:], WIDTHS[3:], strict=True))
    return " ".join([*left, *right, plan])


def parse(text: str) -> tuple[list[Line], tuple[str, ...]]:
    """The lines of a record, and the toolchain that made them."""
    comments = [line for line in text.splitlines() if line.startswith("#")]
    _, *rows = (line for line in text.splitlines() if line and not line.startswith("#"))
    lines = []
    for row in rows:
        *words, plan = row.split(maxsplit=len(WIDTHS))
        lines.append(Line(*words[:3], *map(int, words[3:]), plan))
    return lines, tuple(comments[-1].removeprefix("# toolchain: ").split(", "))


# ------------------------------------------------------------------------------------------ what is made


def lines_of(config: str, call: str, record: JobRecord) -> list[Line]:
    """The kernels of one call. Raises RuntimeError where it has none."""
    if record.problem:
        raise RuntimeError(f"{config} {call}: {record.problem}")
    seen, lines = Counter(), []
    for made in record.taken:
        seen[made.kernel] += 1
        name = f"{made.kernel}.{seen[made.kernel]}" if seen[made.kernel] > 1 else made.kernel
        figures = (
            made.registers, made.spill_bytes, made.local_bytes, made.shared_bytes, made.mma_instructions,
            made.vector_loads, made.reductions, len(record.kernels) - len(record.taken),
        )  # fmt: skip
        lines.append(Line(config, call, name, *figures, made.plan))
    return lines


def compile_cases(cases: Iterable[Case], processes: int) -> list[Line]:
    """The lines of all calls of some cases; calls that are the same job are compiled once."""
    jobs = {(case.name, call): job for case in cases for call, job in timed_jobs(case, ARCH).items()}
    distinct = list(dict.fromkeys(jobs.values()))
    records = dict(zip(distinct, compile_jobs(distinct, [ARCH], processes=processes), strict=True))
    return [line for (config, call), job in jobs.items() for line in lines_of(config, call, records[job])]


def compare(old: Iterable[Line], new: Iterable[Line]) -> list[Change]:
    """What differs, kernel after kernel."""
    before, after = ({line.which: line for line in lines} for lines in (old, new))
    changes = []
    for which in sorted(before.keys() | after.keys()):
        if which in before and which in after:
            one, other = asdict(before[which]), asdict(after[which])
            changes += [Change(which, name, one[name], other[name]) for name in FIGURES if one[name] != other[name]]
        else:
            plans = [lines[which].plan if which in lines else None for lines in (before, after)]
            changes.append(Change(which, "the kernel", *plans))
    return changes


def summary(changes: list[Change], n_kernels: int) -> str:
    directions = Counter(change.direction for change in changes)
    told = ", ".join(f"{count} {direction}" for direction, count in sorted(directions.items())) or "nothing changed"
    return f"{n_kernels} kernels: {told}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--accept-worse", action="store_true", help="write the record whatever spills or grew")
    parser.add_argument("--processes", type=int, default=usable_cores(), help="that compile at a time (the cores)")
    options = parser.parse_args(arguments)
    problem = toolchain_problem([CAPABILITIES[ARCH]])
    if problem:
        print(problem, file=sys.stderr)
        return 2
    old, toolchain = parse(RECORD.read_text()) if RECORD.exists() else ([], toolchain_versions())
    if toolchain != toolchain_versions():
        print(f"recorded with {', '.join(toolchain)}; this is {', '.join(toolchain_versions())}")
    new = compile_cases(load_cases(), options.processes)
    changes = compare(old, new)
    print("\n".join([*map(str, changes), summary(changes, len(new))]))
    if any(change.needs_consent for change in changes) and not options.accept_worse:
        print(f"{RECORD.name} is left as it was: --accept-worse writes it all the same", file=sys.stderr)
        return 1
    RECORD.write_text(render(new, toolchain_versions()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
