"""Random models in float64, and the comparison of an analytic gradient with central differences.

With h = 1e-6 and values of order one, a central difference is good to about 1e-9: truncation is h² times third
derivatives (at most 20³ here), rounding 2e-16/h. The bound of 1e-6 leaves room for cancellation. Draws in which a
difference would straddle a kink (a cell border, a ReLU unit near zero) are redrawn: there is no derivative. So are
networks whose nested exponentials explode.
"""

from __future__ import annotations

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from numba_tcnn.layout import grid_levels, n_encoding_params, n_params
from numba_tcnn.reference import Model
from numba_tcnn.specs import (
    ACTIVATIONS,
    EncodingSpec,
    FrequencySpec,
    GridSpec,
    IdentitySpec,
    ModelSpec,
    NetworkSpec,
    OneBlobSpec,
    SphericalHarmonicsSpec,
    round_up,
)

H = 1e-6
TOLERANCE = 1e-6
BATCH = 6
MARGIN = 1e-3  # distance from kinks


@st.composite
def grids(draw: st.DrawFn, n_input_dims: int) -> GridSpec:
    return GridSpec(
        n_input_dims,
        type=draw(st.sampled_from(["Hash", "Dense", "Tiled"])),
        n_levels=draw(st.integers(1, 4)),
        n_features_per_level=draw(st.sampled_from([1, 2, 4, 8])),
        log2_hashmap_size=draw(st.integers(3, 7)),
        base_resolution=draw(st.integers(2, 5)),
        per_level_scale=draw(st.sampled_from([1.0, 1.3, 1.5, 2.0])),
        interpolation=draw(st.sampled_from(["Linear", "Smoothstep", "Nearest"])),
    )


@st.composite
def encodings(draw: st.DrawFn) -> EncodingSpec:
    n_input_dims = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["Grid", "Grid", "Identity", "Frequency", "OneBlob", "SphericalHarmonics"]))
    if kind == "Grid":
        return draw(grids(n_input_dims))
    if kind == "Identity":
        return IdentitySpec(
            n_input_dims, draw(st.sampled_from([-1.0, 1.0])) * draw(st.floats(0.1, 3)), draw(st.floats(-1, 1))
        )
    if kind == "Frequency":
        return FrequencySpec(n_input_dims, draw(st.integers(1, 3)))
    if kind == "OneBlob":
        return OneBlobSpec(n_input_dims, draw(st.sampled_from([1, 2, 4, 8])))
    return SphericalHarmonicsSpec(3, draw(st.integers(1, 4)))


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    encoding = draw(encodings())
    assume(n_encoding_params(encoding) <= 100_000)  # dense lattices of five dimensions grow large
    if draw(st.integers(0, 4)) == 0:
        width = round_up(encoding.n_output_dims, draw(st.sampled_from([1, 8, 16])))
        return ModelSpec(encoding.n_input_dims, width, encoding, None, width)
    network = NetworkSpec(
        "CutlassMLP",
        activation=draw(st.sampled_from(ACTIVATIONS)),
        output_activation=draw(st.sampled_from(ACTIVATIONS)),
        hidden=tuple(draw(st.lists(st.sampled_from([5, 16, 24, 32]), max_size=3))),
        bias=draw(st.booleans()),
    )
    width = round_up(encoding.n_output_dims, 16)
    return ModelSpec(encoding.n_input_dims, draw(st.integers(1, 18)), encoding, network, width)


def inputs_off_borders(spec: EncodingSpec, random: np.random.Generator) -> np.ndarray:
    """Points of [-0.5, 1.5)^D that keep a distance from the cell borders of every level."""
    candidates = random.uniform(-0.5, 1.5, (4000, spec.n_input_dims))
    if isinstance(spec, GridSpec):
        for level in grid_levels(spec):
            fraction = (level.scale * candidates + 0.5) % 1
            candidates = candidates[np.all((fraction > MARGIN) & (fraction < 1 - MARGIN), axis=1)]
    return candidates[:BATCH]


def draw_params(spec: ModelSpec, random: np.random.Generator) -> np.ndarray:
    """Weights of the size of initial ones, tables of order one."""
    params = random.uniform(-1, 1, n_params(spec))
    offset = 0
    for fan_out, fan_in in spec.layer_shapes:
        params[offset : offset + fan_out * fan_in] *= np.sqrt(6 / (fan_out + fan_in))
        offset += fan_out * fan_in
    return params


def well_conditioned(model: Model, x: np.ndarray) -> bool:
    """No hidden unit or output is near the kink of ReLU, or so large that nested exponentials explode."""
    if len(x) == 0:
        return False
    if model.network is None:
        return True
    with np.errstate(all="ignore"):
        _, trace, _ = model._forward(x)
        weights, biases = model.network.matrices(model.network_params), model.network.biases(model.network_params)
        z = [np.abs(model.network.pre_activation(l, h, weights, biases)) for l, h in enumerate(trace.inputs)]
    return min(float(layer.min()) for layer in z) > 1e-4 and max(float(layer.max()) for layer in z) < 10


def assert_close(actual: np.ndarray, numeric: np.ndarray, scale: float) -> None:
    """‖actual - numeric‖ ≤ 1e-6·‖numeric‖, and rounding noise of differences of values of size `scale` (or 1)."""
    error = np.linalg.norm(actual - numeric)
    assert error <= TOLERANCE * np.linalg.norm(numeric) + 1e-9 * max(scale, 1), (error, np.linalg.norm(numeric))


def check_input_gradient(per_sample_loss, x: np.ndarray, gradient: np.ndarray) -> None:
    """Samples are independent: one column of all samples is moved at a time."""
    numeric = np.empty_like(x)
    for d in range(x.shape[1]):
        step = np.zeros_like(x)
        step[:, d] = H
        numeric[:, d] = (per_sample_loss(x + step) - per_sample_loss(x - step)) / (2 * H)
    assert_close(gradient, numeric, np.abs(per_sample_loss(x)).max())


def check_parameter_gradient(loss, params: np.ndarray, gradient: np.ndarray, random: np.random.Generator) -> None:
    """Single parameters, those with and without gradient, and a random direction through all of them."""
    touched, untouched = np.flatnonzero(gradient), np.flatnonzero(gradient == 0)
    chosen = [random.permutation(touched)[:12], random.permutation(untouched)[:3]]
    directions = []
    for i in np.concatenate(chosen):
        direction = np.zeros_like(params)
        direction[i] = 1
        directions.append(direction)
    directions.append(random.standard_normal(len(params)) / np.sqrt(len(params)))
    numeric = np.array([(loss(params + H * d) - loss(params - H * d)) / (2 * H) for d in directions])
    assert_close(np.array([gradient @ d for d in directions]), numeric, abs(loss(params)))
