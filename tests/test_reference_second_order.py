"""Second derivatives of the reference: central differences of the analytic first derivative, in float64.

S = Σ ⟨v, dL/dx⟩ is computed with `Model.backward`, which `test_reference_gradients.py` checks; its gradients with
respect to dL/dy, the parameters and x are `Model.backward_backward_input`. For tolerances see `gradient_checks.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
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

import numba_tcnn.reference.model as reference_model
from numba_tcnn.reference import Model
from numba_tcnn.specs import ACTIVATIONS, GridSpec, IdentitySpec, ModelSpec, NetworkSpec

SMOOTH_GRID = GridSpec(3, n_levels=3, base_resolution=3, log2_hashmap_size=6, interpolation="Smoothstep")
PIECEWISE_LINEAR = ("None", "ReLU", "LeakyReLU")


def draw(spec: ModelSpec, seed: int) -> tuple[Model, np.ndarray, np.ndarray, np.ndarray]:
    """The model in float64; x, v and dL/dy for it."""
    random = np.random.default_rng(seed)
    x = inputs_off_kinks(spec.encoding, random, BATCH)
    model = Model(spec, draw_params(spec, random), "float64")
    return model, x, random.standard_normal(x.shape), random.standard_normal((len(x), spec.n_output_dims))


def projections(model: Model, x: np.ndarray, v: np.ndarray, dL_dy: np.ndarray) -> np.ndarray:
    """⟨v, dL/dx⟩ of each sample."""
    return np.sum(v * model.backward(x, dL_dy, params=False).input, axis=1)


@settings(deadline=None, max_examples=200)
@given(models(), st.integers(0, 2**32 - 1))
@example(ModelSpec(3, 2, SMOOTH_GRID, NetworkSpec("CutlassMLP", hidden=(16, 24), activation="SiLU"), 16), 0)
@example(ModelSpec(3, 6, SMOOTH_GRID, None, 6), 1)
def test_whole_models(spec: ModelSpec, seed: int) -> None:
    model, x, v, dL_dy = draw(spec, seed)
    assume(well_conditioned(model, x))
    second = model.backward_backward_input(x, v, dL_dy)

    check_input_gradient(lambda u: projections(model, x, v, u), dL_dy, second.dL_doutput)
    check_input_gradient(lambda x: projections(model, x, v, dL_dy), x, second.input)
    if len(model.params):
        check_parameter_gradient(
            lambda p: float(projections(Model(spec, p, "float64"), x, v, dL_dy).sum()),
            model.params,
            second.params,
            np.random.default_rng(seed),
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("output_activation", ["None", "Sine"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_activation(activation: str, output_activation: str, bias: bool) -> None:
    """Each of the ten in two hidden layers, also below a curved output. Seeds are those off the kinks."""
    network = NetworkSpec("CutlassMLP", 16, 2, activation, output_activation, bias=bias)
    spec = ModelSpec(3, 4, IdentitySpec(3, 0.7, 0.1), network, 16)
    model, x, v, dL_dy = next(drawn for seed in range(50) if well_conditioned(*(drawn := draw(spec, seed))[:2]))
    second = model.backward_backward_input(x, v, dL_dy)
    check_input_gradient(lambda u: projections(model, x, v, u), dL_dy, second.dL_doutput)
    check_input_gradient(lambda x: projections(model, x, v, dL_dy), x, second.input)
    check_parameter_gradient(
        lambda p: float(projections(Model(spec, p, "float64"), x, v, dL_dy).sum()),
        model.params,
        second.params,
        np.random.default_rng(0),
    )
    curved = activation not in PIECEWISE_LINEAR or output_activation == "Sine"
    assert second.input.any() == curved, "a piecewise linear function has no curvature"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 8e-2)])
def test_other_formats_come_close(dtype: str, tolerance: float) -> None:
    """float32 is the same computation; half formats round parameters and values: some roundings of 2^-11 or 2^-8."""
    spec = ModelSpec(3, 4, SMOOTH_GRID, NetworkSpec("CutlassMLP", 32, 2, "Softplus", "Tanh"), 16)
    exact, x, v, dL_dy = draw(spec, 3)
    expected = exact.backward_backward_input(x, v, dL_dy)
    model = Model(spec, exact.params.astype(np.float32), dtype)
    actual = model.backward_backward_input(*(a.astype(np.float32) for a in (x, v, dL_dy)))
    for name in ("dL_doutput", "params", "input"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert a.dtype == np.float32
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), name


def test_pieces_of_a_batch_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameter gradients are summed over pieces, rows are those of their own piece: float64 roundings only."""
    spec = ModelSpec(3, 4, SMOOTH_GRID, NetworkSpec("CutlassMLP", 16, 1, "Tanh", bias=True), 16)
    model, x, v, dL_dy = draw(spec, 4)
    whole = model.backward_backward_input(x, v, dL_dy)
    monkeypatch.setattr(reference_model, "GRADIENT_ROWS", 4)
    parts = model.backward_backward_input(x, v, dL_dy)
    for name in ("dL_doutput", "params", "input"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-10, atol=1e-12)
