"""Random encodings of every kind, nested composites among them, and points where they can be differentiated."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from numba_tcnn.config_encodings import parse_encoding
from numba_tcnn.layout import grid_levels, n_encoding_params
from numba_tcnn.specs import CompositeSpec, EncodingSpec, GridSpec, OneBlobSpec, TriangleWaveSpec

MARGIN = 1e-3
"""Distance from kinks, as a part of the distance between them."""

FINEST_RESOLUTION = (64, 40, 20, 9, 6, 4, 3)
"""Largest lattice of 1, 2, ... 7 dimensions."""


@st.composite
def grids(draw: st.DrawFn, n_dims: int, n_levels: int | None = None, n_features: int | None = None) -> dict[str, Any]:
    n_levels = n_levels or draw(st.integers(1, 4))
    base = draw(st.integers(2, min(5, FINEST_RESOLUTION[n_dims - 1])))
    largest_scale = (FINEST_RESOLUTION[n_dims - 1] / base) ** (1 / max(n_levels - 1, 1))
    config = {
        "otype": "Grid",
        "type": draw(st.sampled_from(["Hash", "Dense", "Tiled"])),
        "n_levels": n_levels,
        "n_features_per_level": n_features or draw(st.sampled_from([1, 2, 4, 8])),
        "base_resolution": base,
        "per_level_scale": min(draw(st.sampled_from([1.0, 1.3, 1.5, 2.0])), largest_scale),
        "interpolation": draw(st.sampled_from(["Linear", "Smoothstep", "Smoothstep", "Nearest"])),
    }
    if config["type"] == "Hash":
        config["log2_hashmap_size"] = draw(st.integers(2, 7))
        config["hash"] = draw(st.sampled_from(["Prime", "CoherentPrime", "ReversedPrime", "Rng", "BaseConvert"]))
    return config


@st.composite
def leaves(draw: st.DrawFn, n_dims: int) -> dict[str, Any]:
    """Any encoding of n_dims dimensions without children. Octaves end at 5: a difference can follow those."""
    kinds = ["Frequency", "TriangleWave", "OneBlob", "Identity", "Empty"]
    kinds += ["Grid"] * 3 if n_dims <= 7 else []
    kinds += ["SphericalHarmonics"] * 3 if n_dims == 3 else []
    otype = draw(st.sampled_from(kinds))
    if otype == "Grid":
        return draw(grids(n_dims))
    if otype in ("Frequency", "TriangleWave"):
        return {"otype": otype, "n_frequencies": draw(st.integers(1, 6))}
    if otype == "OneBlob":
        return {"otype": otype, "n_bins": draw(st.sampled_from([1, 2, 4, 16, 64]))}
    if otype == "Identity":
        return {"otype": otype, "scale": draw(st.floats(-3, 3)), "offset": draw(st.floats(-1, 1))}
    if otype == "SphericalHarmonics":
        return {"otype": otype, "degree": draw(st.integers(1, 8))}
    return {"otype": otype}


@st.composite
def factors(draw: st.DrawFn, n_dims: int, half_width: int) -> dict[str, Any]:
    """An encoding with 2 · n_dims · half_width features: what Sum and Product combine has one width."""
    width = 2 * half_width
    kinds = [{"otype": "Frequency", "n_frequencies": half_width}, {"otype": "TriangleWave", "n_frequencies": width}]
    kinds += [{"otype": "OneBlob", "n_bins": width}, draw(grids(n_dims, n_dims, width))]
    return draw(st.sampled_from(kinds))


@st.composite
def composites(draw: st.DrawFn, n_dims: int, depth: int = 2) -> dict[str, Any]:
    """One to three children on ranges of dimensions that may overlap and leave gaps."""
    reduction = draw(st.sampled_from(["Concatenation", "Concatenation", "Sum", "Product"]))
    n_children = draw(st.integers(1, 3))
    count, half_width = draw(st.integers(1, min(n_dims, 3))), draw(st.sampled_from([1, 2, 4]))
    nested = []
    for _ in range(n_children):
        if reduction == "Concatenation":
            count = draw(st.integers(1, min(n_dims, 7)))
            deeper = depth > 1 and draw(st.integers(0, 3)) == 0
            child = draw(composites(count, depth - 1) if deeper else leaves(count))
        else:
            child = draw(factors(count, half_width))
        begin = draw(st.integers(0, n_dims - count))
        nested.append({**child, "n_dims_to_encode": count, "dims_to_encode_begin": begin})
    return {"otype": "Composite", "reduction": reduction, "nested": nested}


@st.composite
def encodings(draw: st.DrawFn) -> EncodingSpec:
    n_dims = draw(st.sampled_from([1, 2, 3, 3, 4, 5, 6, 7]))
    spec = parse_encoding(draw(st.one_of(leaves(n_dims), composites(n_dims))), n_dims)
    assume(spec.n_output_dims > 0 and n_encoding_params(spec) <= 100_000)
    return spec


def inputs_off_kinks(spec: EncodingSpec, random: np.random.Generator, batch: int) -> np.ndarray:
    """Up to `batch` points of [-0.5, 1.5)^D that keep a distance from cell borders and other kinks."""
    candidates = random.uniform(-0.5, 1.5, (4000, spec.n_input_dims))
    return candidates[is_off_kinks(spec, candidates)][:batch]


def is_off_kinks(spec: EncodingSpec, x: np.ndarray) -> np.ndarray:
    """Whether each row of x does."""
    if isinstance(spec, CompositeSpec):
        off = np.ones(len(x), bool)
        for child in spec.nested:
            first = child.first_input_dim
            off &= is_off_kinks(child.encoding, x[:, first : first + child.encoding.n_input_dims])
        return off
    if isinstance(spec, GridSpec):
        positions = [level.scale * x + 0.5 for level in grid_levels(spec)]
    elif isinstance(spec, TriangleWaveSpec):
        positions = [2**k * x + k / 2 for k in range(spec.n_frequencies)]
    elif isinstance(spec, OneBlobSpec):
        positions = [spec.n_bins * x]
    else:
        return np.ones(len(x), bool)
    distances = [np.abs(position - np.round(position)).min(axis=1) for position in positions]
    return np.min(distances, axis=0) > MARGIN
