"""Random models in float64, and the comparison of an analytic gradient with central differences.

With h = 1e-6 and values of order one, a central difference is good to about 1e-9: truncation is h² times third
derivatives (at most 20³ here), rounding 2e-16/h. The bound of 1e-6 leaves room for cancellation. Draws in which a
difference would straddle a kink (a cell border, a ReLU unit near zero) are redrawn: there is no derivative. So are
networks whose nested exponentials explode.
"""

from __future__ import annotations

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
