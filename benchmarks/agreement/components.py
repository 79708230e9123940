"""What a draw is made of, by kind of component: for counting how often each occurs, and for asking where errors are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from numba_tcnn.specs import GridSpec, NetworkSpec

from .draws import Config, Draw
from .random_encodings import GRIDS, leaves_of
from .random_optimizers import names_of

Component = tuple[str, str]
"""(kind, value), such as ("activation", "ReLU")."""

WIDTHS = (16, 32, 64, 128, 512)


def components_of(draw: Draw) -> set[Component]:
    return set(
        [
            *_of_arrays(draw),
            *_of_encoding(draw),
            *_of_network(draw.network),
            ("loss", draw.loss),
            *(("optimizer", name) for name in names_of(draw.optimizer)),
        ]
    )


def _of_arrays(draw: Draw) -> Iterator[Component]:
    yield "dtype", draw.dtype
    yield "inputs", draw.input_dtype
    yield "outputs", draw.output_dtype
    yield "layout", draw.layout
    yield "densities", draw.density_dtype or "none"
    yield "sums", "fixed point" if draw.deterministic else "any order"
    yield "output dims", _up_to(draw.n_output_dims, (1, 3, 16, 64, 300))


def _of_encoding(draw: Draw) -> Iterator[Component]:
    inside = draw.encoding["otype"] == "Composite"
    if inside:
        for composite in composites_of(draw.encoding):
            yield "encoding", composite["reduction"]
        if any(child["otype"] == "Composite" for child in draw.encoding["nested"]):
            yield "encoding", "composite in a composite"
    grids = [leaf for leaf in leaves_of(draw.encoding) if leaf["otype"] in GRIDS]
    for leaf in leaves_of(draw.encoding):
        yield "encoding", leaf["otype"]
        yield "encoding dims", _up_to(leaf.get("n_dims_to_encode", draw.n_input_dims), (1, 2, 3, 4, 5, 6, 7, 16, 128))
    for grid in grids:
        yield from _of_grid(grid)
    if grids:
        levels = draw.max_level
        yield (
            "levels in use",
            "all" if levels is None else "one fraction a sample" if levels == "rows" else "a fraction",
        )


def _of_grid(grid: Config) -> Iterator[Component]:
    yield "features a level", str(grid.get("n_features_per_level", GridSpec.n_features_per_level))
    yield "interpolation", grid.get("interpolation", GridSpec.interpolation)
    if grid["otype"] == "HashGrid":
        yield "hash", grid.get("hash", GridSpec.hash)
    for option in ("stochastic_interpolation", "fixed_point_pos"):
        if grid.get(option):
            yield "grid option", option


def composites_of(config: Config) -> Iterator[Config]:
    if config["otype"] == "Composite":
        yield config
        for child in config["nested"]:
            yield from composites_of(child)


def _of_network(network: Config | None) -> Iterator[Component]:
    if network is None:
        yield "network", "none"
        return
    yield "network", network["otype"]
    yield "bias", str(network.get("bias", NetworkSpec.bias))
    widths = network.get("hidden", [network.get("n_neurons", 0)] * network.get("n_hidden_layers", 0))
    if "hidden" in network:
        yield "network", "hidden"
    for width in widths:
        yield "width", str(width) if width in WIDTHS[:-1] else _up_to(width, WIDTHS)
    yield "hidden layers", _up_to(len(widths), (0, 1, 2, 3, 4, 8, 20))
    if widths:
        yield "activation", network.get("activation", NetworkSpec.activation)
    yield "output activation", network.get("output_activation", NetworkSpec.output_activation)


def _up_to(value: int, ends: tuple[int, ...]) -> str:
    """The interval of `ends` that holds a value."""
    before = 0
    for end in ends:
        if value <= end:
            return str(end) if end - before <= 1 else f"{before + 1} to {end}"
        before = end
    return f"more than {ends[-1]}"


def coverage(draws: Iterable[Draw]) -> Counter[Component]:
    """In how many draws each component occurs."""
    return Counter(component for draw in draws for component in components_of(draw))


def draw_of(values: dict[str, Any]) -> Draw:
    """A draw as its record holds it."""
    return Draw(**values)
