"""Random models in float64, and the comparison of an analytic gradient with central differences.

With h = 1e-6 and values of order one, a central difference is good to about 1e-9: truncation is h² times third
derivatives (at most 20³ here), rounding 2e-16/h. The bound of 1e-6 leaves room for cancellation. Draws in which a
difference would straddle a kink (a cell border, a ReLU unit near zero) are redrawn: there is no derivative. So are
networks whose nested exponentials explode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from encoding_draws import encodings
from hypothesis import strategies as st

from numba_tcnn.config_encodings import padded_to, padded_width
from numba_tcnn.layout import n_params
from numba_tcnn.reference import Model
from numba_tcnn.specs import ACTIVATIONS, ModelSpec, NetworkSpec

H = 1e-6
TOLERANCE = 1e-6
BATCH = 6


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    encoding = draw(encodings())
    has_network = draw(st.integers(0, 4)) > 0
    width = padded_width(encoding, 16 if has_network else draw(st.sampled_from([1, 8, 16])))
    encoding = padded_to(encoding, width)
    if not has_network:
        return ModelSpec(encoding.n_input_dims, width, encoding, None, width)
    network = NetworkSpec(
        "CutlassMLP",
        activation=draw(st.sampled_from(ACTIVATIONS)),
        output_activation=draw(st.sampled_from(ACTIVATIONS)),
        hidden=tuple(draw(st.lists(st.sampled_from([5, 16, 24, 32]), max_size=3))),
        bias=draw(st.booleans()),
    )
    return ModelSpec(encoding.n_input_dims, draw(st.integers(1, 18)), encoding, network, width)


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


class Figure(NamedTuple):
    """One comparison: ‖actual - numeric‖, ‖numeric‖ and the size of the values whose differences were taken."""

    test: str
    error: float
    norm: float
    scale: float


FIGURES: list[Figure] = []
"""All comparisons of this session."""


def assert_close(actual: np.ndarray, numeric: np.ndarray, scale: float) -> None:
    """‖actual - numeric‖ ≤ 1e-6·‖numeric‖, and rounding noise of differences of values of size `scale` (or 1)."""
    test = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0].split("[")[0]
    figure = Figure(test, float(np.linalg.norm(actual - numeric)), float(np.linalg.norm(numeric)), max(scale, 1))
    FIGURES.append(figure)
    assert figure.error <= TOLERANCE * figure.norm + 1e-9 * figure.scale, figure


def table() -> Iterator[str]:
    """The worst relative error of each test. Of a gradient that is tiny beside the values, a difference keeps few
    digits: the last column leaves out those below a thousandth."""
    yield f"{'test':32} {'comparisons':>11} {'worst error':>11} {'gradient / values > 1e-3':>25}"
    for test in dict.fromkeys(figure.test for figure in FIGURES):
        own = [figure for figure in FIGURES if figure.test == test and figure.norm > 0]
        worst = max((figure.error / figure.norm for figure in own), default=0.0)
        large = max((f.error / f.norm for f in own if f.norm > 1e-3 * f.scale), default=0.0)
        yield f"{test:32} {len(own):11} {worst:11.1e} {large:25.1e}"


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
