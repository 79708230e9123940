"""Tables and pictures from the lines of `benchmarks.ledger_rows`, beside the floors of `benchmarks.floors`.

    python -m benchmarks.report RESULTS.jsonl [--tcnn FILE] [--stages FILE] [--batch 18] [--plots FOLDER] [--docs FILE]

RESULTS  rows of one card
--tcnn   rows of tiny-cuda-nn on the same card, for ratios: one JSON object a line, `config`, `batch`, `mode` and the
         milliseconds of its variants; the fastest counts
--stages lines of `benchmarks.stages --out`, for the picture of them
--batch  binary logarithm of the batch size in the table of floors
--docs   a Markdown file in which to replace the tables, each between `<!-- report: NAME -->` and `<!-- end -->`;
         without it they are printed

Floors are those of an H200, so rows of another card have none. What was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import plots
from .cases import load_cases
from .floors import CEILINGS, DEVICE, FLOORS, PARTS, Floor, told
from .plots import Row

PEER_FIELDS = {
    "train_ms": ("train_ms", "train_rm_ms", "train_cm_ms"),
    "infer_ms": ("infer_ms", "infer_guard_ms", "infer_rm_ms", "infer_cm_ms"),
    "infer_half_ms": ("infer_mp_ms", "infer_mp_guard_ms", "infer_mp_cm_cm_ms"),
}
"""Variants of tiny-cuda-nn's call: bounds checks or none, and either order of parameters."""

Key = tuple[str, int]
"""A configuration's name and a batch size."""


def read_lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def read_results(path: Path) -> tuple[Row, list[Row]]:
    """(what the `info` line says, the rows that were measured). Of rows measured twice the last one counts."""
    info, rows = {}, {}
    for line in read_lines(path):
        info |= line.get("info", {})
        if {"train_ms", "infer_ms"} <= line.keys() and "failed" not in line:
            rows[line["config"], line["batch"]] = line
    return info, list(rows.values())


def read_peers(path: Path) -> dict[Key, Row]:
    """The fastest of tiny-cuda-nn's modes and variants, by configuration and batch size."""
    peers: dict[Key, Row] = {}
    for line in read_lines(path):
        if "config" not in line:
            continue
        best = peers.setdefault((line["config"], line["batch"]), {})
        for field, variants in PEER_FIELDS.items():
            times = [line[variant] for variant in variants if line.get(variant)]
            if times:
                best[field] = min([best[field], *times] if field in best else times)
    return peers


# --------------------------------------------------------------------------------------------------- tables


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def power(batch: int) -> str:
    return f"2^{batch.bit_length() - 1}" if batch & (batch - 1) == 0 else str(batch)


def gap(floor: Floor, milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{1e3 * milliseconds / floor.microseconds:.1f}"


def microseconds(row: Row, field: str) -> str:
    return f"{1e3 * row[field]:.1f}" if field in row else ""


def rows_table(rows: Sequence[Row], peers: Mapping[Key, Row] | None, *, floors: bool) -> str:
    """All rows: measured, ratio to the peer, floor, gap = measured / floor, and what the floor is made of."""
    behind = [*(["ratio"] if peers is not None else []), *(["floor", "gap", "bound by"] if floors else [])]
    headings = ["configuration", "batch", "train, us", *behind, "infer, us", *behind]
    headings += ["half, us", "host, us", "first step, s"]
    cases = {case.name: case for case in load_cases()}
    lines = []
    for row in rows:
        key = row["config"], row["batch"]
        cells = [row["config"], power(row["batch"])]
        for kind, floor_of in FLOORS.items():
            field = f"{kind}_ms"
            cells.append(microseconds(row, field))
            if peers is not None:
                peer = peers.get(key, {}).get(field)
                cells.append(f"{peer / row[field]:.2f}" if peer else "")
            if floors and row["config"] in cases:
                floor = floor_of(cases[row["config"]], row["batch"])
                cells += [told(floor.microseconds), gap(floor, row[field]), floor.bound_by]
            elif floors:
                cells += ["", "", ""]
        cells += [microseconds(row, "infer_half_ms"), f"{row['host_us']:.0f}" if "host_us" in row else ""]
        cells.append(f"{row['first_train_s']:.1f}" if "first_train_s" in row else "")
        lines.append(cells)
    return table(headings, lines)


def floors_table(kind: str, rows: Sequence[Row], batch: int) -> str:
    """Every configuration's floor by its parts, and what was measured at this batch size."""
    measured = {row["config"]: row[f"{kind}_ms"] for row in rows if row["batch"] == batch}
    floors = {case.name: FLOORS[kind](case, batch) for case in load_cases()}
    parts = [part for part in PARTS if any(part in floor.batch for floor in floors.values())]
    if kind == "train":
        parts.append("optimizer")
    lines = []
    for name, floor in floors.items():
        figures = [told(floor.parts.get(part, 0.0)) for part in parts]
        time = measured.get(name)
        end = [told(floor.microseconds), "" if time is None else told(1e3 * time), gap(floor, time), floor.bound_by]
        lines.append([name, *figures, *end])
    headings = ["configuration", *(f"{part}, us" for part in parts), "floor, us", "measured, us", "gap", "bound by"]
    return table(headings, lines)


def ceilings_table() -> str:
    lines = [[name, f"{scaled(c.a_second)} {c.unit} a second", c.source] for name, c in CEILINGS.items()]
    return table(["resource", "ceiling", "reached by"], lines)


def scaled(number: float) -> str:
    """Three digits and a prefix."""
    factor, prefix = next((f, p) for f, p in ((1e12, "T"), (1e9, "G"), (1e3, "k")) if number >= f)
    return f"{number / factor:.3g} {prefix}"


def tables(info: Row, rows: Sequence[Row], peers: Mapping[Key, Row] | None, batch: int) -> dict[str, str]:
    """Markdown by the names that `--docs` looks for."""
    on_h200 = info.get("device") == DEVICE
    made = {"rows": rows_table(rows, peers, floors=on_h200)}
    if on_h200:
        floors = (f"{plots.KINDS[kind].capitalize()}:\n\n{floors_table(kind, rows, batch)}" for kind in FLOORS)
        made |= {"ceilings": ceilings_table(), "floors": "\n\n".join(floors)}
    return made


def replace_tables(text: str, made: Mapping[str, str]) -> str:
    """A document with its tables made anew. Raises ValueError for a table that it has no place for."""
    for name, content in made.items():
        place = re.compile(rf"(<!-- report: {name} -->\n).*?(<!-- end -->)", re.S)
        if not place.search(text):
            raise ValueError(f"no <!-- report: {name} --> with an <!-- end --> behind it")
        text = place.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text, count=1)
    return text


# -------------------------------------------------------------------------------------------------- command


def draw(folder: Path, rows: Sequence[Row], peers: Mapping[Key, Row] | None, stages: Sequence[Row]) -> list[Path]:
    """Every picture that there are lines for, as PNG."""
    figures = {"throughput_batch": plots.by_batch(rows)}
    cases = load_cases()
    if {row["config"] for row in rows} & {case.name for case in cases if case.bare}:
        figures["throughput_width"] = plots.by_width(rows, cases)
    if peers is not None:
        figures["ratios"] = plots.ratios(rows, peers)
    if stages:
        figures["stages"] = plots.by_stage(stages)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="lines of benchmarks.ledger_rows")
    parser.add_argument("--tcnn", type=Path, help="lines of tiny-cuda-nn on the same card")
    parser.add_argument("--stages", type=Path, help="lines of benchmarks.stages")
    parser.add_argument("--batch", type=int, default=18, help="binary logarithm, for the table of floors (18)")
    parser.add_argument("--plots", type=Path, help="a folder for pictures")
    parser.add_argument("--docs", type=Path, help="a Markdown file in which to replace the tables")
    options = parser.parse_args(arguments)
    try:
        info, rows = read_results(options.results)
        peers = read_peers(options.tcnn) if options.tcnn else None
        stages = [line for line in read_lines(options.stages) if "stages" in line] if options.stages else []
        if not rows:
            raise ValueError(f"{options.results} has no row that was measured")
        made = tables(info, rows, peers, 1 << options.batch)
        if options.docs:
            options.docs.write_text(replace_tables(options.docs.read_text(), made))
        else:
            print("\n\n".join(made.values()))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in draw(options.plots, rows, peers, stages) if options.plots else []:
        print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
