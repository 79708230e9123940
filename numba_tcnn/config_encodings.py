"""Encodings: the `encoding` part of a config as a spec, its keys, ranges and widths.

To add an encoding: a spec class in `specs.py` and one `Component` in `ENCODINGS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .config_keys import (
    FLOAT32_MAX,
    Choice,
    Component,
    ConfigError,
    Family,
    Flag,
    Integer,
    IntegerOf,
    Number,
    Objects,
)
from .layout import grid_levels, n_encoding_params
from .specs import (
    CompositeSpec,
    EmptySpec,
    EncodingSpec,
    FrequencySpec,
    GridSpec,
    IdentitySpec,
    NestedEncoding,
    OneBlobSpec,
    SphericalHarmonicsSpec,
    TriangleWaveSpec,
    round_up,
)

MAX_WIDTH = 2**16
"""Most input dims, output dims, and columns of an encoding."""
MAX_PARAMS = 2**31
MAX_GRID_DIMS = 7
"""As many as hashes have prime factors for."""
LOG2_FINEST_LEVEL = 31
"""Cells are counted in int32: the finest level of a grid has fewer than 2^31 vertices along an axis."""

N_INPUT_DIMS = Integer("n_input_dims", 1, MAX_WIDTH)
ALIGNMENT = Integer("alignment", 0, 1024)
N_DIMS_TO_ENCODE = Integer("n_dims_to_encode", 0, MAX_WIDTH)
DIMS_TO_ENCODE_BEGIN = Integer("dims_to_encode_begin", 0, MAX_WIDTH)


def parse_encoding(config: Mapping, n_input_dims: int, *, alignment: int = 0, path: str = "encoding") -> EncodingSpec:
    """The spec of an encoding of x [batch, n_input_dims].

    `alignment` pads the output to a multiple of it, as a network needs (16); 0 leaves the natural width. A leaf's
    padding shows in `padded_width` only; that of a composite is in its children's `n_padded_output_dims`.
    """
    n_input_dims = N_INPUT_DIMS.read(n_input_dims, "n_input_dims")
    alignment = ALIGNMENT.read(alignment, "alignment")
    component, values = ENCODINGS.select(config, path)
    n_dims = values.get("n_dims_to_encode", n_input_dims)
    if n_dims != n_input_dims:
        raise ConfigError(
            f"{path}.n_dims_to_encode: {n_dims} disagrees with the {n_input_dims} input dims of the model"
        )
    if values.get("dims_to_encode_begin", 0) != 0:
        raise ConfigError(
            f"{path}.dims_to_encode_begin: {values['dims_to_encode_begin']} is not 0, the only value here"
        )
    spec = _build(component, values, n_input_dims, path)
    check_n_params(n_encoding_params(spec), path)
    return padded_to(spec, padded_width(spec, alignment))


def _build(component: Component, values: dict[str, Any], n_input_dims: int, path: str) -> EncodingSpec:
    own = {name: value for name, value in values.items() if name not in ("n_dims_to_encode", "dims_to_encode_begin")}
    spec = component.build(n_input_dims, path, **own) if component.build else component.spec(n_input_dims, **own)
    if spec.n_output_dims > MAX_WIDTH:
        raise ConfigError(f"{path}: {spec.n_output_dims:,} output columns, more than {MAX_WIDTH:,}")
    return spec


# ----------------------------------------------------------------------------------------------- padding


def required_alignment(spec: EncodingSpec) -> int:
    """The multiple that an encoding's width and first column keep: a grid's features per level, 1 for most."""
    if isinstance(spec, GridSpec):
        return spec.n_features_per_level
    if isinstance(spec, CompositeSpec):
        return math.lcm(*(required_alignment(child.encoding) for child in spec.nested))
    return 1


def padded_width(spec: EncodingSpec, alignment: int) -> int:
    """Output columns after padding to lcm(alignment, required_alignment); the natural width if alignment is 0."""
    return (
        round_up(spec.n_output_dims, math.lcm(alignment, required_alignment(spec))) if alignment else spec.n_output_dims
    )


def padded_to(spec: EncodingSpec, width: int) -> EncodingSpec:
    """The encoding with `width` columns. A concatenation pads its last child, Sum and Product pad every child."""
    if not isinstance(spec, CompositeSpec) or spec.n_output_dims == width:
        return spec
    if spec.reduction == "Concatenation":
        *others, last = spec.nested
        return replace(spec, nested=(*others, _widened(last, last.n_padded_output_dims + width - spec.n_output_dims)))
    return replace(spec, nested=tuple(_widened(child, width) for child in spec.nested))


def _widened(child: NestedEncoding, width: int) -> NestedEncoding:
    return replace(child, encoding=padded_to(child.encoding, width), n_padded_output_dims=width)


# -------------------------------------------------------------------------------------------------- grid


def _grid(n_input_dims: int, path: str, **values: Any) -> GridSpec:
    if n_input_dims > MAX_GRID_DIMS:
        raise ConfigError(f"{path}: a grid has 1 to {MAX_GRID_DIMS} input dims, not {n_input_dims}")
    n_features_per_level = values.get("n_features_per_level", GridSpec.n_features_per_level)
    totals = {name: values.pop(name) for name in ("n_features", "n_grid_features") if name in values}
    if totals:
        name, n_features = next(iter(totals.items()))
        if len(set(totals.values())) > 1:
            raise ConfigError(
                f"{path}.n_grid_features: {totals['n_grid_features']} disagrees with n_features, its other name"
            )
        if "n_levels" in values:
            raise ConfigError(f"{path}.{name}: stands beside n_levels, only one of them may be given")
        if n_features % n_features_per_level:
            raise ConfigError(
                f"{path}.{name}: {n_features} is not a multiple of n_features_per_level, {n_features_per_level}"
            )
        values["n_levels"] = GRID_LEVELS.read(
            n_features // n_features_per_level, f"{path}.{name} / n_features_per_level"
        )
    if values["type"] == "Dense" and "per_level_scale" not in values:
        values["per_level_scale"] = dense_per_level_scale(
            values.get("base_resolution", GridSpec.base_resolution), values.get("n_levels", GridSpec.n_levels)
        )
    if values["type"] != "Hash":
        values.pop("log2_hashmap_size", None)  # no table: equal models have equal specs
    spec = GridSpec(n_input_dims, **values)
    _check_levels(spec, path)
    return spec


def dense_per_level_scale(base_resolution: int, n_levels: int) -> float:
    """Growth from base_resolution to 256 in n_levels: exp(ln(256 / N_min) / (L - 1)) in float32; 1 for one level."""
    if n_levels == 1:
        return 1.0
    log_ratio = np.float32(math.log(np.float32(256) / np.float32(base_resolution)))
    return float(np.float32(math.exp(log_ratio / np.float32(n_levels - 1))))


def _check_levels(spec: GridSpec, path: str) -> None:
    """Every level has a vertex and fewer than 2^31 along an axis; all together at most 2^31 parameters."""
    log2_finest = math.log2(spec.base_resolution) + max(0.0, (spec.n_levels - 1) * math.log2(spec.per_level_scale))
    if log2_finest >= LOG2_FINEST_LEVEL:
        raise ConfigError(
            f"{path}.per_level_scale: {spec.per_level_scale:g} over {spec.n_levels} levels from base_resolution "
            f"{spec.base_resolution} makes 2^{log2_finest:.1f} vertices an axis, not fewer than 2^{LOG2_FINEST_LEVEL}"
        )
    if any(level.resolution < 1 for level in grid_levels(spec)):
        raise ConfigError(
            f"{path}.per_level_scale: {spec.per_level_scale:g} over {spec.n_levels} levels leaves the last no vertex"
        )
    check_n_params(n_encoding_params(spec), path)


def check_n_params(n_params: int, path: str) -> None:
    if n_params > MAX_PARAMS:
        raise ConfigError(f"{path}: {n_params:,} parameters, more than 2^31 = {MAX_PARAMS:,}")


# --------------------------------------------------------------------------------------------- composite


def _composite(n_input_dims: int, path: str, nested: list[Mapping], reduction: str = "Concatenation") -> CompositeSpec:
    """Children in order, each on its own input dims; those left without a dim are dropped."""
    spec_of = []
    for i, (config, first, n_dims) in enumerate(_input_ranges(nested, n_input_dims, path)):
        child_path = f"{path}.nested[{i}]"
        component, values = ENCODINGS.select(config, child_path)
        if n_dims > 0:
            spec_of.append((first, _build(component, values, n_dims, child_path)))
    if not spec_of:
        raise ConfigError(f"{path}.nested: no child has an input dim to encode")
    if reduction == "Concatenation":
        return CompositeSpec(n_input_dims, _side_by_side(spec_of), reduction)
    alignment = math.lcm(*(required_alignment(spec) for _, spec in spec_of))
    widths = [padded_width(spec, alignment) for _, spec in spec_of]
    if len(set(widths)) > 1:
        raise ConfigError(f"{path}.nested: {reduction} needs children of one width, not {', '.join(map(str, widths))}")
    children = (
        NestedEncoding(padded_to(spec, w), first, 0, w) for (first, spec), w in zip(spec_of, widths, strict=True)
    )
    return CompositeSpec(n_input_dims, tuple(children), reduction)


def _side_by_side(spec_of: list[tuple[int, EncodingSpec]]) -> tuple[NestedEncoding, ...]:
    """Each child but the last is padded until its neighbour's first column is a multiple of what that requires."""
    children, column = [], 0
    for i, (first, spec) in enumerate(spec_of):
        end = column + spec.n_output_dims
        if i + 1 < len(spec_of):
            end = round_up(end, required_alignment(spec_of[i + 1][1]))
        children.append(NestedEncoding(padded_to(spec, end - column), first, column, end - column))
        column = end
    return tuple(children)


def _input_ranges(nested: list[Mapping], n_input_dims: int, path: str) -> list[tuple[Mapping, int, int]]:
    """(config, first input dim, number of dims) of each child.

    Dims are dealt out in order; one child may leave out n_dims_to_encode and gets what remains. If any child says
    dims_to_encode_begin, all must say n_dims_to_encode; children may then overlap and leave gaps.
    """
    counts, begins = [], []
    for i, config in enumerate(nested):
        read = {
            key.name: key.read(config[key.name], f"{path}.nested[{i}].{key.name}")
            for key in (N_DIMS_TO_ENCODE, DIMS_TO_ENCODE_BEGIN)
            if key.name in config
        }
        counts.append(read.get("n_dims_to_encode"))
        begins.append(read.get("dims_to_encode_begin"))
    without = [i for i, count in enumerate(counts) if count is None]
    if without and any(begin is not None for begin in begins):
        raise ConfigError(
            f"{path}.nested[{without[0]}]: n_dims_to_encode is missing, needed by all if one has dims_to_encode_begin"
        )
    if len(without) > 1:
        raise ConfigError(
            f"{path}.nested[{without[1]}]: n_dims_to_encode is missing, which only one child may leave out"
        )
    if without:
        remaining = n_input_dims - sum(count for count in counts if count is not None)
        counts[without[0]] = max(remaining, 0)
    ranges, first = [], 0
    for i, (config, begin, count) in enumerate(zip(nested, begins, counts, strict=True)):
        first = first if begin is None else begin
        if count > 0 and first + count > n_input_dims:
            raise ConfigError(f"{path}.nested[{i}]: reads input dims {first} to {first + count - 1} of {n_input_dims}")
        ranges.append((config, first, count))
        first += count
    return ranges


# -------------------------------------------------------------------------------------- other components


def _spherical_harmonics(n_input_dims: int, path: str, **values: Any) -> SphericalHarmonicsSpec:
    if n_input_dims != 3:
        raise ConfigError(f"{path}: SphericalHarmonics has 3 input dims, not {n_input_dims}")
    return SphericalHarmonicsSpec(n_input_dims, **values)


def _radiance_caching(n_input_dims: int, path: str, n_frequencies: int = 12, n_bins: int = 4) -> CompositeSpec:
    """Neural radiance caching (Müller et al. 2021): waves of the position, blobs of 5 angles, the rest as it is."""
    if n_input_dims < 8:
        raise ConfigError(f"{path}: OneBlobFrequency has at least 8 input dims, not {n_input_dims}")
    nested = [
        {"otype": "TriangleWave", "n_dims_to_encode": 3, "n_frequencies": n_frequencies},
        {"otype": "OneBlob", "n_dims_to_encode": 5, "n_bins": n_bins},
        {"otype": "Identity"},
    ]
    return _composite(n_input_dims, path, nested)


GRID_LEVELS = Integer("n_levels", 1, 128)
FREQUENCIES = Integer("n_frequencies", 1, 64)
BINS = IntegerOf("n_bins", tuple(2**i for i in range(11)))
GRID_KEYS = (
    Choice("type", ("Hash", "Dense", "Tiled"), aliases={"tile": "Tiled"}),
    Choice("hash", ("Prime", "CoherentPrime", "ReversedPrime", "Rng", "BaseConvert")),
    GRID_LEVELS,
    Integer("n_features", 1, 1024),
    Integer("n_grid_features", 1, 1024),
    IntegerOf("n_features_per_level", (1, 2, 4, 8)),
    Integer("log2_hashmap_size", 0, 31),
    Integer("base_resolution", 1, 2**31 - 1),
    Number("per_level_scale", 2.0**-10, 2.0**31),
    Choice("interpolation", ("Nearest", "Linear", "Smoothstep")),
    Flag("stochastic_interpolation"),
    Flag("fixed_point_pos"),
)


def _grid_component(name: str, grid_type: str) -> Component:
    """A grid under one of its names; the name's type holds unless the config has a `type`."""

    def build(n_input_dims: int, path: str, **values: Any) -> GridSpec:
        return _grid(n_input_dims, path, **{"type": grid_type, **values})

    return Component(name, GridSpec, GRID_KEYS, build=build)


ENCODINGS = Family(
    "an encoding",
    default="OneBlob",
    components=(
        _grid_component("Grid", "Hash"),
        _grid_component("HashGrid", "Hash"),
        _grid_component("DenseGrid", "Dense"),
        _grid_component("TiledGrid", "Tiled"),
        Component(
            "Composite",
            CompositeSpec,
            (Objects("nested"), Choice("reduction", ("Concatenation", "Sum", "Product"))),
            build=_composite,
            required=("nested",),
        ),
        Component("Empty", EmptySpec),
        Component("Frequency", FrequencySpec, (FREQUENCIES,)),
        Component(
            "Identity",
            IdentitySpec,
            (Number("scale", -FLOAT32_MAX, FLOAT32_MAX), Number("offset", -FLOAT32_MAX, FLOAT32_MAX)),
        ),
        Component("OneBlob", OneBlobSpec, (BINS,)),
        Component("OneBlobFrequency", CompositeSpec, (FREQUENCIES, BINS), aliases=("NRC",), build=_radiance_caching),
        Component("SphericalHarmonics", SphericalHarmonicsSpec, (Integer("degree", 1, 8),), build=_spherical_harmonics),
        Component("TriangleWave", TriangleWaveSpec, (FREQUENCIES,)),
    ),
    common=(N_DIMS_TO_ENCODE, DIMS_TO_ENCODE_BEGIN),
)
