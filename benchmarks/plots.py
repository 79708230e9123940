"""Pictures of measurements, from the JSON lines that the benchmarks write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .cases import Case

Row = dict[str, Any]

KINDS = {"train": "training step", "infer": "inference"}
"""Fields `train_ms` and `infer_ms`, and what they are of."""

MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Series:
    """One line of a plot: y over x, both [n]; `look` takes the place of what it would look like by its number."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    look: Mapping[str, Any] = field(default_factory=dict)


def as_power(value: float) -> str:
    return f"$2^{{{np.log2(value):.0f}}}$"


def as_number(value: float) -> str:
    return f"{value:g}"


def set_ticks(axis: Any, values: Iterable[float], text: Callable[[float], str]) -> None:
    """Exactly these ticks, whatever the axis's scale."""
    axis.set_major_locator(FixedLocator(sorted(set(values))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def line_figure(
    title: str,
    panels: Mapping[str, Sequence[Series]],
    *,
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str] = as_power,
    x_scale: str = "log",
) -> Figure:
    """A panel a name, side by side and with one legend; y is logarithmic and shared."""
    figure = Figure(figsize=(5 * len(panels) + 2, 4.8), layout="constrained")
    for axes, (name, series) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        axes.set(title=name, xlabel=x_label, xscale=x_scale, yscale="log")
        _draw(axes, series)
        set_ticks(axes.xaxis, (x for one in series for x in one.x), x_text)
    figure.axes[0].set_ylabel(y_label)
    figure.suptitle(title)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _draw(axes: Axes, series: Sequence[Series]) -> None:
    colors = colormaps["tab20" if len(series) > 10 else "tab10"].colors
    for i, one in enumerate(series):
        style = {"color": colors[i % len(colors)], "marker": MARKERS[i % len(MARKERS)]}
        axes.plot(one.x, one.y, label=one.label, **{"markersize": 4, "linewidth": 1.2} | style | one.look)
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


# ------------------------------------------------------------------------------------------ ledger rows


def throughput(row: Row, kind: str) -> float:
    """Samples a second."""
    return 1e3 * row["batch"] / row[f"{kind}_ms"]


def batch_colors(batches: Sequence[int]) -> dict[int, tuple[float, ...]]:
    return dict(zip(batches, colormaps["viridis"](np.linspace(0, 0.9, len(batches))), strict=True))


def by_batch(rows: Sequence[Row]) -> Figure:
    """Throughput of every configuration by batch size."""
    panels = {}
    for kind, name in KINDS.items():
        configs = dict.fromkeys(row["config"] for row in rows)
        own = {config: [row for row in rows if row["config"] == config] for config in configs}
        panels[name] = [
            Series(config, [row["batch"] for row in some], [throughput(row, kind) for row in some])
            for config, some in own.items()
        ]
    return line_figure("Throughput by batch size", panels, x_label="samples a call", y_label="samples / s")


def by_width(rows: Sequence[Row], cases: Iterable[Case]) -> Figure:
    """Throughput of bare networks by width, of every depth and batch size."""
    networks = {case.name: case.config["network"] for case in cases if case.bare}
    bare = [(networks[row["config"]], row) for row in rows if row["config"] in networks]
    lines = sorted({(network["n_hidden_layers"], row["batch"]) for network, row in bare})
    depths, batches = (sorted(set(values)) for values in zip(*lines, strict=True))
    colors = batch_colors(batches)
    panels = {}
    for kind, name in KINDS.items():
        panels[name] = []
        for depth, batch in lines:
            some = sorted(
                (network["n_neurons"], throughput(row, kind))
                for network, row in bare
                if (network["n_hidden_layers"], row["batch"]) == (depth, batch)
            )
            label = f"{depth} hidden layers, {as_power(batch)} samples"
            number = depths.index(depth)
            look = {"color": colors[batch], "marker": MARKERS[number], "linestyle": ("-", "--", "-.", ":")[number % 4]}
            panels[name].append(Series(label, *zip(*some, strict=True), look))
    return line_figure(
        "Throughput of bare networks by width", panels, x_label="neurons a layer", y_label="samples / s",
        x_text=as_number,
    )  # fmt: skip


def ratios(rows: Sequence[Row], peers: Mapping[tuple[str, int], Row]) -> Figure:
    """How many times faster than a peer each row is, a configuration a line and a batch size a colour."""
    configs = list(dict.fromkeys(row["config"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(11, 0.34 * len(configs) + 1.6), layout="constrained")
    for axes, (kind, name) in zip(figure.subplots(1, 2, sharey=True), KINDS.items(), strict=True):
        axes.axvline(1, color="0.4", linewidth=1)
        for batch, color in batch_colors(batches).items():
            points = [
                (peers[key][f"{kind}_ms"] / row[f"{kind}_ms"], configs.index(row["config"]))
                for row in rows
                if row["batch"] == batch and f"{kind}_ms" in peers.get(key := (row["config"], batch), {})
            ]
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.scatter(x, y, s=26, color=color, label=f"{as_power(batch)} samples", zorder=3)
        axes.set(title=name, xlabel="times as fast as tiny-cuda-nn", xscale="log")
        set_ticks(axes.xaxis, (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8), as_number)
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.axes[0].set_yticks(range(len(configs)), configs)
    figure.axes[0].invert_yaxis()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


# ------------------------------------------------------------------------------------------------ stages


def by_stage(rows: Sequence[Row]) -> Figure:
    """Device time of the kernels of each call, one behind the other, from the lines of `benchmarks.stages`."""
    kernels = list(dict.fromkeys(stage["kernel"] for row in rows for stage in row["stages"]))
    colors = dict(zip(kernels, np.resize(colormaps["tab10"].colors, (len(kernels), 3)), strict=True))
    figure = Figure(figsize=(12, 0.4 * len(rows) / 2 + 1.8), layout="constrained")
    for axes, (kind, name) in zip(figure.subplots(1, 2), KINDS.items(), strict=True):
        some = [row for row in rows if row["call"] == kind]
        for line, row in enumerate(some):
            start = 0.0
            for stage in row["stages"]:
                axes.barh(line, stage["us"], left=start, color=colors[stage["kernel"]], edgecolor="white", height=0.7)
                start += stage["us"]
        axes.set_yticks(range(len(some)), [f"{row['config']} {as_power(row['batch'])}" for row in some])
        axes.invert_yaxis()
        axes.set(title=name, xlabel="us")
    patches = [Patch(color=color, label=kernel) for kernel, color in colors.items()]
    figure.legend(handles=patches, loc="outside right center", frameon=False)
    figure.suptitle("Device time by kernel")
    return figure
