"""Random encodings of every kind, nested composites among them, and points where they can be differentiated."""

from __future__ import annotations

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from benchmarks.agreement.deck import Chance
from benchmarks.agreement.random_encodings import SMALL, random_composite, random_leaf
from numba_tcnn.config_encodings import parse_encoding
from numba_tcnn.layout import grid_levels, n_encoding_params
from numba_tcnn.specs import CompositeSpec, EncodingSpec, GridSpec, OneBlobSpec, TriangleWaveSpec

MARGIN = 1e-3
"""Distance from kinks, as a part of the distance between them."""


@st.composite
def encodings(draw: st.DrawFn) -> EncodingSpec:
    n_dims = draw(st.sampled_from([1, 2, 3, 3, 4, 5, 6, 7]))
    chance = Chance(draw(st.randoms(use_true_random=False)))
    make = draw(st.sampled_from([random_leaf, random_composite]))
    spec = parse_encoding(make(chance, n_dims, SMALL), n_dims)
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
