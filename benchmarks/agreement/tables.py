"""What many draws found, as markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from numba_tcnn.fused.layer_plan import LAYER_BY_LAYER

from .components import Component, components_of, draw_of
from .examine import AGREES, FAILS, FIGURES, NO_DTYPE, NO_PLAN, Record

DTYPES = ("float16", "bfloat16", "float32")
ALL = ("all", "")


def report(records: Sequence[Record]) -> str:
    """Everything, the failing draws last."""
    sections = [summary(records)]
    sections += [errors(records, dtype) for dtype in DTYPES]
    sections += [beyond_the_bar(records), others(records), failing(records)]
    return "\n\n".join(section for section in sections if section)


def summary(records: Sequence[Record]) -> str:
    by_status = Counter(record.status for record in records)
    total = sum(record.seconds.get("all", 0.0) for record in records)
    compiling = sum(record.seconds.get("compiling", 0.0) for record in records)
    lines = [
        f"## {len(records)} draws: {by_status[AGREES]} agree, {by_status[FAILS]} fail",
        f"{total:.0f} s in all processes together, {compiling:.0f} s of them compiling the kernels that were taken.",
    ]
    flips = [
        sum(record.notes.get(f"gates {what}", 0) for record in records) for what in ("looked at", "read off", "flipped")
    ]
    lines.append(
        f"{flips[0]} samples were looked at for flipped gates, of {flips[1]} it was read off what had been stored, "
        f"{flips[2]} had some; all others agree as they are."
    )
    left_out = max((record.notes.get("optimizer, elements left out", 0.0) for record in records), default=0.0)
    lines.append(f"Optimizers were compared on all but at most {left_out:.1%} of a draw's parameters.")
    return "\n".join(lines)


def errors(records: Sequence[Record], dtype: str) -> str:
    """The worst error of each comparison for each component of the draws in one dtype, and how many draws it is of."""
    worst: dict[tuple[Component, str], float] = {}
    count: Counter[tuple[Component, str]] = Counter()
    n_draws: Counter[Component] = Counter()
    for record in records:
        draw = draw_of(record.draw)
        if draw.dtype != dtype or not record.figures:
            continue
        for component in (ALL, *sorted(components_of(draw) | plans_of(record))):
            n_draws[component] += 1
            for name, figure in record.figures.items():
                place = component, name
                count[place] += 1
                if place not in worst or not figure.error <= worst[place]:
                    worst[place] = figure.error
    if not n_draws:
        return ""

    def cell(component: Component, name: str) -> str:
        n = count[component, name]
        error = f"{worst[component, name]:.0e}" if n else "-"
        return error if n in (0, n_draws[component]) else f"{error} ({n})"

    shown = [component for component in sorted(n_draws) if component[0] != "dtype"]
    rows = [[" ".join(c).strip(), str(n_draws[c]), *(cell(c, name) for name in FIGURES)] for c in shown]
    table = markdown(["", "draws", *FIGURES], rows)
    return f"### Worst errors in {dtype}\n\nIn brackets: of how many draws, where not of all.\n\n{table}"


def plans_of(record: Record) -> set[Component]:
    """The kinds of kernels that ran."""

    def kind(plan: str) -> str:
        if plan.startswith(LAYER_BY_LAYER):
            return LAYER_BY_LAYER
        name = plan.partition(",")[0]
        return f"{name}, wgmma" if "wgmma" in plan else name

    return {("plan", kind(plan)) for plan in record.plans}


def beyond_the_bar(records: Sequence[Record]) -> str:
    """Figures beyond their bar that two right implementations are beyond, too."""
    rows = [
        [
            str(record.number),
            name,
            f"{figure.error:.1e}",
            f"{figure.bar:.0e}",
            f"{figure.spread:.1e}",
            str(draw_of(record.draw)),
        ]
        for record in records
        for name, figure in record.figures.items()
        if figure.spread is not None and figure.holds
    ]
    if not rows:
        return ""
    table = markdown(["draw", "comparison", "error", "bar", "two right ones", ""], rows)
    return f"### Beyond the bar, as two right implementations are\n\n{table}"


def others(records: Sequence[Record]) -> str:
    """What was not compared, and why."""
    reasons: Counter[str] = Counter()
    for record in records:
        if record.status in (NO_PLAN, NO_DTYPE):
            reasons[f"{record.status}: {record.notes.get('no plan', draw_of(record.draw).dtype)}"] += 1
        if "no second order" in record.notes:
            reasons[f"no second derivatives: {in_general(record.notes['no second order'])}"] += 1
        if record.notes.get("Adam run says nothing"):
            reasons["the run of Adam says nothing, as two right implementations are half its way apart"] += 1
    rows = [[reason, str(n)] for reason, n in reasons.most_common()]
    return "### Not compared\n\n" + markdown(["", "draws"], rows) if rows else ""


def in_general(reason: str) -> str:
    """Without the shapes of one network."""
    head, fits, tail = reason.partition(" fits layers of ")
    return f"{head} fits{tail.partition(' into ')[2] and ' into' + tail.partition(' into')[2]}" if fits else reason


def failing(records: Iterable[Record]) -> str:
    rows = [
        f"- draw {record.number} of seed {record.seed}: {draw_of(record.draw)}\n"
        + "\n".join(f"  - {text}" for text in record.failures)
        for record in records
        if record.status == FAILS
    ]
    return "### Failing draws\n\n" + "\n".join(rows) if rows else ""


def covered(counts: Counter[Component]) -> str:
    """How often each component occurs, a row a kind."""
    kinds: dict[str, list[str]] = {}
    for (kind, value), n in sorted(counts.items()):
        kinds.setdefault(kind, []).append(f"{value} {n}")
    return markdown(["", "draws with"], [[kind, ", ".join(values)] for kind, values in kinds.items()])


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Iterable[str]) -> Iterator[str]:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(headings), "|---" * len(headings) + "|", *map(line, rows)])
