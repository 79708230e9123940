"""Every analytic gradient of the reference against central differences in float64.

With h = 1e-6 and values of order one, a central difference is good to about 1e-9: truncation is h² times third
derivatives (at most 20³ here), rounding 2e-16/h. The bound of 1e-6 leaves room for cancellation. Draws in which a
difference would straddle a kink (a cell border, a ReLU unit near zero) are redrawn: there is no derivative. So are
networks whose nested exponentials explode.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from numba_tcnn.layout import grid_levels, n_encoding_params, n_params
from numba_tcnn.reference import Model
from numba_tcnn.specs import (
    ACTIVATIONS,
    EncodingSpec,
    GridSpec,
    IdentitySpec,
    LossSpec,
    ModelSpec,
    NetworkSpec,
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
    if draw(st.booleans()):
        return IdentitySpec(
            n_input_dims, draw(st.sampled_from([-1.0, 1.0])) * draw(st.floats(0.1, 3)), draw(st.floats(-1, 1))
        )
    return draw(grids(n_input_dims))


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    encoding = draw(encodings())
    assume(n_encoding_params(encoding) <= 100_000)  # dense lattices of five dimensions grow large
    if draw(st.integers(0, 4)) == 0:
        width = round_up(encoding.n_output_dims, draw(st.sampled_from([1, 8, 16])))
        return ModelSpec(encoding.n_input_dims, width, encoding, None, width)
    network = NetworkSpec(
        "CutlassMLP",
        draw(st.sampled_from([16, 24, 32])),
        draw(st.integers(0, 3)),
        draw(st.sampled_from(ACTIVATIONS)),
        draw(st.sampled_from(ACTIVATIONS)),
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
        weights = model.network.matrices(model.network_params)
        z = [np.abs(h @ w.T) for h, w in zip(trace.inputs, weights, strict=True)]
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


@settings(deadline=None, max_examples=400)
@given(models(), st.integers(0, 2**32 - 1))
def test_external_gradients(spec: ModelSpec, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, params = inputs_off_borders(spec.encoding, random), draw_params(spec, random)
    model = Model(spec, params, "float64")
    assume(well_conditioned(model, x))
    dL_dy = random.standard_normal((len(x), spec.n_output_dims))
    gradients = model.backward(x, dL_dy)

    check_input_gradient(lambda x: np.sum(model.forward(x) * dL_dy, axis=1), x, gradients.input)
    if len(params):
        check_parameter_gradient(
            lambda p: float(np.sum(Model(spec, p, "float64").forward(x) * dL_dy)), params, gradients.params, random
        )


DIFFERENTIABLE_LOSSES = ("L1", "L2", "Mape", "CrossEntropy", "Variance")  # those whose weight does not depend on p


@settings(deadline=None, max_examples=40)
@given(models(), st.sampled_from(DIFFERENTIABLE_LOSSES), st.booleans(), st.integers(0, 2**32 - 1))
def test_losses_through_the_model(spec: ModelSpec, otype: str, with_density: bool, seed: int) -> None:
    assume(spec.network is not None)
    if otype in ("CrossEntropy", "Variance"):  # they need positive predictions
        spec = replace(spec, network=replace(spec.network, output_activation="Softplus"))
    random = np.random.default_rng(seed)
    x, params = inputs_off_borders(spec.encoding, random), draw_params(spec, random)
    model, loss = Model(spec, params, "float64"), LossSpec(otype)
    assume(well_conditioned(model, x))
    prediction = model.forward(x)
    target = prediction + random.choice([-1, 1], prediction.shape) * random.uniform(0.1, 1, prediction.shape)
    density = random.uniform(0.5, 2, target.shape) if with_density else None
    if otype in ("CrossEntropy", "Variance"):
        target = np.abs(target)
        assume(prediction.min() > 0.02)  # 1/p² amplifies the error of a difference

    value, gradients = model.loss_and_gradients(x, target, loss, density)
    assert np.isfinite(value)
    check_parameter_gradient(
        lambda p: Model(spec, p, "float64").loss_and_gradients(x, target, loss, density, input=False)[0],
        params,
        gradients.params,
        random,
    )

    def per_sample(x: np.ndarray) -> np.ndarray:
        """The terms of the mean loss by sample: each sample alone has a mean over 1/len(x) as many elements."""
        rows = [slice(i, i + 1) for i in range(len(x))]
        return np.array(
            [
                model.loss_and_gradients(x[r], target[r], loss, None if density is None else density[r])[0] / len(x)
                for r in rows
            ]
        )

    check_input_gradient(per_sample, x, gradients.input)


@settings(deadline=None, max_examples=40)
@given(models(), st.integers(0, 2**32 - 1))
@example(ModelSpec(2, 3, GridSpec(2, n_levels=4, base_resolution=3), NetworkSpec("FullyFusedMLP", 32, 2), 16), 0)
def test_float32_equals_float64(spec: ModelSpec, seed: int) -> None:
    """float32 is the same computation: 1e-4 covers roundings of 6e-8 through four layers and steep levels."""
    random = np.random.default_rng(seed)
    x = inputs_off_borders(spec.encoding, random).astype(np.float32)
    params = draw_params(spec, random).astype(np.float32)
    exact = Model(spec, params.astype(np.float64), "float64")
    assume(well_conditioned(exact, x.astype(np.float64)))
    single = Model(spec, params, "float32")
    dL_dy = random.standard_normal((len(x), spec.n_output_dims)).astype(np.float32)
    expected, actual = exact.backward(x, dL_dy), single.backward(x, dL_dy)
    assert actual.input.dtype == actual.params.dtype == np.float32
    for a, b in (
        (single.forward(x), exact.forward(x)),
        (actual.input, expected.input),
        (actual.params, expected.params),
    ):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-6


def test_blocks_are_views_of_the_gradient() -> None:
    spec = ModelSpec(2, 3, GridSpec(2, n_levels=4, base_resolution=3), NetworkSpec("FullyFusedMLP", 32, 2), 16)
    random = np.random.default_rng(0)
    model = Model(spec, draw_params(spec, random), "float64")
    gradients = model.backward(random.random((5, 2)), np.ones((5, 3)))
    blocks = gradients.blocks()
    assert np.array_equal(np.concatenate([block.ravel() for block in blocks.values()]), gradients.params)
    assert blocks["layer2.weight"].shape == (16, 32)
    assert np.all(blocks["layer2.weight"][3:] == 0), "padding rows have no gradient"
    assert np.all(blocks["layer0.weight"][:, 8:] == 0), "grids are padded with zeros"
    assert blocks["grid.level3"].any()
