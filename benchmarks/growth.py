"""How the cost of a training step and of inference grows with batch size, width, grid levels and table size.

    python -m benchmarks.growth [--axes batch,width,levels,table] [--out FILE] [--plots FOLDER]
    python -m benchmarks.growth --compile [--arch sm_90] [--processes N]
    python -m benchmarks.growth --read FILE --plots FOLDER

The first measures a point a line, as `benchmarks.ledger_rows` does: kernels are proved right, then timed. The second
compiles all kernels that the first needs into the disk cache, in several processes; it needs no GPU. The third draws
what was measured before. Exit status 1 if a point failed, 2 if nothing could be done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from numba_tcnn.fused import device_status
from numba_tcnn.fused.compile_processes import usable_cores
from numba_tcnn.fused.compiler import toolchain_problem
from numba_tcnn.fused.jobs import Job
from numba_tcnn.fused.offline import CAPABILITIES, compile_jobs

from .cases import Case, load_cases
from .floors import DEVICE, FLOORS
from .ledger_rows import case_rows, info
from .plots import KINDS, Row, Series, as_number, as_power, line_figure
from .timed_jobs import timed_jobs

BATCH = 18
"""Binary logarithm of the batch size along the other axes."""

WIDTHS = (16, 32, 48, 64, 96, 128)
LEVELS = (4, 8, 12, 16, 20, 24)
TABLES = (14, 16, 18, 20, 22, 24)
LARGEST = 22


@dataclass(frozen=True)
class Point:
    """A case at one place of an axis, in a series of points that differ in nothing else."""

    axis: str
    series: str
    value: int
    case: Case
    log2_batch: int = BATCH


def changed(case: Case, part: str, name: str, **keys: int | str) -> Case:
    """The case under another name, with other values of a part of its configuration."""
    return replace(case, name=name, config=case.config | {part: case.config[part] | keys})


def batch_points() -> Iterator[Point]:
    for case in load_cases(["image_hash", "mlp_only_w64_h2"]):
        for log2_batch in range(12, LARGEST + 1):
            yield Point("batch", case.name, 1 << log2_batch, case, log2_batch)


def width_points() -> Iterator[Point]:
    """Bare networks with as many inputs as neurons in a layer; the FullyFusedMLP has powers of two only."""
    for case in load_cases(["mlp_only_w64_h2", "mlp_only_w64_h4"]):
        depth = case.config["network"]["n_hidden_layers"]
        for width in WIDTHS:
            name = f"mlp_only_w{width}_h{depth}"
            otype = "FullyFusedMLP" if width.bit_count() == 1 else "CutlassMLP"
            wide = changed(case, "network", name, otype=otype, n_neurons=width)
            yield Point("width", f"{depth} hidden layers", width, replace(wide, n_input_dims=width))


def level_points() -> Iterator[Point]:
    for case in load_cases(["image_hash", "nerf_density"]):
        for n in LEVELS:
            yield Point("levels", case.name, n, changed(case, "encoding", f"{case.name} of {n} levels", n_levels=n))


def table_points() -> Iterator[Point]:
    for case in load_cases(["nerf_density"]):
        for size in TABLES:
            name = f"{case.name} of 2^{size} entries"
            yield Point("table", case.name, 1 << size, changed(case, "encoding", name, log2_hashmap_size=size))


@dataclass(frozen=True)
class Axis:
    """Its points, and how a picture shows it."""

    points: Callable[[], Iterator[Point]]
    label: str
    text: Callable[[float], str] = as_number
    scale: str = "log"


AXES = {
    "batch": Axis(batch_points, "samples a call", as_power),
    "width": Axis(width_points, "neurons a layer"),
    "levels": Axis(level_points, "grid levels", scale="linear"),
    "table": Axis(table_points, "entries a level at most", as_power),
}


def points(axes: Iterable[str]) -> list[Point]:
    """Raises ValueError for an axis that there is not."""
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ValueError(f"no axis {', '.join(unknown)}; there are {', '.join(AXES)}")
    return [point for axis in axes for point in AXES[axis].points()]


# ------------------------------------------------------------------------------------------------ measuring


def lines(some: Sequence[Point]) -> Iterator[Row]:
    """A line a point; those of one case are measured with one trainer."""
    yield {"info": info()}
    runs: dict[tuple[str, str], list[Point]] = {}
    for point in some:
        runs.setdefault((point.axis, point.case.name), []).append(point)
    for run in runs.values():
        rows = case_rows(run[0].case, [point.log2_batch for point in run])
        for point, row in zip(run, rows, strict=False):  # a case without kernels is one line
            yield {"axis": point.axis, "series": point.series, "value": point.value} | row


def compile_all(some: Sequence[Point], arch: str, processes: int) -> Iterator[str]:
    """A sentence a job; "failed" is in that of one that has no kernels."""
    cases = {point.case.name: point.case for point in some}
    jobs: dict[Job, Case] = {}
    for case in cases.values():
        for job in timed_jobs(case, arch).values():
            jobs.setdefault(job, case)
    records = compile_jobs(list(jobs), [arch], processes=processes)
    for i, (case, record) in enumerate(zip(jobs.values(), records, strict=True), 1):
        outcome = f"failed: {record.problem}" if record.problem else f"{record.seconds:.1f} s"
        yield f"[{i}/{len(jobs)}] {case.name}, {record.call}: {outcome}"


# ------------------------------------------------------------------------------------------------- pictures


def figure(axis: str, rows: Sequence[Row], *, floors: bool) -> Figure:
    """Microseconds a call along an axis, and with `floors` those of an H200 as dotted lines."""
    cases = {(point.series, point.value): point.case for point in points([axis])}
    panels = {}
    for kind, name in KINDS.items():
        panels[name] = []
        for number, series in enumerate(dict.fromkeys(row["series"] for row in rows)):
            own = sorted((row for row in rows if row["series"] == series), key=lambda row: row["value"])
            x, look = [row["value"] for row in own], {"color": f"C{number}"}
            panels[name].append(Series(series, x, [1e3 * row[f"{kind}_ms"] for row in own], look))
            if floors:
                y = [FLOORS[kind](cases[series, row["value"]], row["batch"]).microseconds for row in own]
                panels[name].append(Series(f"{series}, floor", x, y, look | {"linestyle": ":", "marker": ""}))
    batch = "" if axis == "batch" else f", {as_power(1 << BATCH)} samples"
    shown = AXES[axis]
    return line_figure(
        f"Cost by {shown.label}{batch}", panels, x_label=shown.label, y_label="us a call", x_text=shown.text,
        x_scale=shown.scale,
    )  # fmt: skip


def draw(folder: Path, some: Sequence[Row]) -> list[Path]:
    """A picture an axis, growth_AXIS.png, of those points that were measured."""
    on_h200 = any(line.get("info", {}).get("device") == DEVICE for line in some)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for axis in AXES:
        rows = [line for line in some if line.get("axis") == axis and "train_ms" in line and "failed" not in line]
        if rows:
            paths.append(folder / f"growth_{axis}.png")
            figure(axis, rows, floors=on_h200).savefig(paths[-1], dpi=110)
    return paths


# -------------------------------------------------------------------------------------------------- command


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--axes", type=lambda text: text.split(","), default=list(AXES), help="of batch, width, levels, table (all)"
    )
    parser.add_argument("--out", type=Path, help="write the lines here too, each as soon as it is measured")
    parser.add_argument("--plots", type=Path, help="a folder for pictures")
    parser.add_argument("--read", type=Path, help="draw the lines of this file instead of measuring")
    parser.add_argument("--compile", action="store_true", help="compile the kernels instead of measuring")
    parser.add_argument("--arch", choices=list(CAPABILITIES), help="to compile for (this device's, else sm_90)")
    parser.add_argument("--processes", type=int, default=usable_cores(), help="that compile at a time (the cores)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    status = device_status(0)
    try:
        some = points(options.axes)
        if options.compile:
            return compile_first(some, options.arch or own_arch(status.compute_capability), options.processes)
        if options.read:
            made = [json.loads(line) for line in options.read.read_text().splitlines()]
        elif not status.usable:
            raise ValueError(f"no point can be measured: {status.reason}")
        else:
            made = measure(some, options.out)
        if options.plots:
            for path in draw(options.plots, made):
                print(path, file=sys.stderr)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return int(any("failed" in line for line in made))


def own_arch(capability: tuple[int, int] | None) -> str:
    return "sm_90" if capability is None else f"sm_{capability[0]}{capability[1]}"


def compile_first(some: Sequence[Point], arch: str, processes: int) -> int:
    problem = toolchain_problem([CAPABILITIES[arch]])
    if problem:
        raise ValueError(problem)
    failed = False
    for told in compile_all(some, arch, processes):
        failed = failed or ": failed" in told
        print(told, flush=True)
    return int(failed)


def measure(some: Sequence[Point], out: Path | None) -> list[Row]:
    """Print the lines, and write them to a file if given."""
    made = []
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(out, "w")) if out else None
        for line in lines(some):
            made.append(line)
            print(json.dumps(line), flush=True)
            if file:
                print(json.dumps(line), file=file, flush=True)
    return made


if __name__ == "__main__":
    sys.exit(main())
