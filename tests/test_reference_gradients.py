"""Every analytic gradient of the reference against central differences in float64; see `gradient_checks.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from encoding_draws import inputs_off_kinks
from gradient_checks import (
    BATCH,
    check_input_gradient,
    check_parameter_gradient,
    draw_params,
    models,
    well_conditioned,
)
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from numba_tcnn.reference import Model
from numba_tcnn.specs import GridSpec, LossSpec, ModelSpec, NetworkSpec, SphericalHarmonicsSpec


@settings(deadline=None, max_examples=400)
@given(models(), st.integers(0, 2**32 - 1))
def test_external_gradients(spec: ModelSpec, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, params = inputs_off_kinks(spec.encoding, random, BATCH), draw_params(spec, random)
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


PREDICTIONS_OF_THOUSANDS = ModelSpec(
    3, 2, SphericalHarmonicsSpec(3, degree=5), NetworkSpec("CutlassMLP", hidden=(), output_activation="Exponential"), 32
)


@settings(deadline=None, max_examples=40)
@given(models(), st.sampled_from(DIFFERENTIABLE_LOSSES), st.booleans(), st.integers(0, 2**32 - 1))
@example(PREDICTIONS_OF_THOUSANDS, "L2", False, 0)
def test_losses_through_the_model(spec: ModelSpec, otype: str, with_density: bool, seed: int) -> None:
    assume(spec.network is not None)
    if otype in ("CrossEntropy", "Variance"):  # they need positive predictions
        spec = replace(spec, network=replace(spec.network, output_activation="Softplus"))
    random = np.random.default_rng(seed)
    x, params = inputs_off_kinks(spec.encoding, random, BATCH), draw_params(spec, random)
    model, loss = Model(spec, params, "float64"), LossSpec(otype)
    assume(well_conditioned(model, x))
    prediction = model.forward(x)
    # as far from the prediction as that is large: L2's third derivative grows as p², its gradient as p times the error
    distance = random.uniform(0.1, 1, prediction.shape) * np.maximum(np.abs(prediction), 1)
    target = prediction + random.choice([-1, 1], prediction.shape) * distance
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
    x = inputs_off_kinks(spec.encoding, random, BATCH).astype(np.float32)
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
