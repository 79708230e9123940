"""`backward_backward_input` as a user calls it: losses that contain a gradient, contexts, engines, array kinds."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from fake_arrays import FAKES, install
from fake_engine import FakeFusedEngine

import numba_tcnn as tcnn
import numba_tcnn.fused
from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.layout import n_network_params

SMOOTH_GRID = {
    "otype": "HashGrid",
    "n_levels": 3,
    "log2_hashmap_size": 8,
    "base_resolution": 3,
    "per_level_scale": 1.5,
    "interpolation": "Smoothstep",
}
SOFT = {"otype": "CutlassMLP", "n_neurons": 20, "n_hidden_layers": 2, "activation": "Softplus", "bias": True}


def make_network(n_out: int = 1, encoding: dict | None = None, network: dict = SOFT, **options):
    options = {"dtype": "float64", "engine": "reference"} | options
    module = tcnn.NetworkWithInputEncoding(3, n_out, encoding or SMOOTH_GRID, network, **options)
    params = module.params.copy()
    params[n_network_params(module.spec) :] *= 2000  # features of order 0.1, not 1e-4
    module.params = params
    return module


@pytest.fixture
def network():
    return make_network()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> FakeFusedEngine:
    engine = FakeFusedEngine()
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", engine.create_runtime)
    return engine


def eikonal_loss(network, x: np.ndarray) -> float:
    """mean (|df/dx| - 1)²."""
    _, context = network.forward(x)
    slope = network.backward(context, np.ones((len(x), 1)), parameters="ignore").input
    return float(np.mean((np.linalg.norm(slope, axis=1) - 1) ** 2))


def eikonal_gradients(network, x: np.ndarray):
    """The loss's gradients: its derivative with respect to df/dx goes through the second backward pass."""
    _, context = network.forward(x)
    ones = np.ones((len(x), 1))
    slope = network.backward(context, ones, parameters="ignore").input
    norm = np.linalg.norm(slope, axis=1, keepdims=True)
    dL_dslope = 2 * (norm - 1) * slope / norm / len(x)
    return network.backward_backward_input(context, dL_dslope, ones)


def test_gradient_of_the_eikonal_loss(network, rng):
    """Against differences along random directions. Parameters are kept in float32, so the direction is what a step
    really changed; steps of norm 5e-4 leave a relative error of about 3e-7."""
    x = rng.uniform(0.05, 0.95, (40, 3))
    gradient = eikonal_gradients(network, x).params
    params = network.params
    for _ in range(5):
        direction = rng.standard_normal(len(params))
        direction *= 5e-4 / np.linalg.norm(direction)
        steps = [(params + sign * direction).astype(np.float32) for sign in (1, -1)]
        losses = []
        for step in steps:
            network.params = step
            losses.append(eikonal_loss(network, x))
        change = steps[0].astype(np.float64) - steps[1]
        assert losses[0] - losses[1] == pytest.approx(gradient @ change, rel=1e-6)


def test_training_on_the_eikonal_loss_alone(network, rng):
    """Plain gradient descent brings |df/dx| from about 0.15 towards 1: the loss falls to a fifth (measured: 0.16)."""
    x = rng.uniform(0.05, 0.95, (200, 3))
    start = eikonal_loss(network, x)
    for _ in range(60):
        network.params = (network.params - 0.02 * eikonal_gradients(network, x).params).astype(np.float32)
    assert eikonal_loss(network, x) < start / 5


def test_results_have_the_shapes_of_what_they_belong_to(rng):
    network = make_network(n_out=2, dtype="float32")
    _, context = network.forward(rng.random((7, 3)))
    second = network.backward_backward_input(context, rng.random((7, 3)), rng.random((7, 2)))
    assert second.dL_doutput.shape == (7, 2)
    assert second.params.shape == (network.n_params,)
    assert second.input.shape == (7, 3)
    assert {a.dtype for a in (second.dL_doutput, second.params, second.input)} == {np.dtype(np.float32)}


def test_contexts_and_shapes_are_checked(network, rng):
    _, context = network.forward(rng.random((4, 3)))
    v, u = np.ones((4, 3)), np.ones((4, 1))
    with pytest.raises(ValueError, match="dL_ddLdinput has 2 rows, the context's x has 4"):
        network.backward_backward_input(context, v[:2], u)
    with pytest.raises(ValueError, match="dL_doutput must have 1 column, not 3"):
        network.backward_backward_input(context, v, v)
    with pytest.raises(ValueError, match="another module"):
        make_network().backward_backward_input(context, v, u)
    network.params = network.params
    with pytest.raises(RuntimeError, match="have changed"):
        network.backward_backward_input(context, v, u)


def test_an_empty_batch(network):
    _, context = network.forward(np.zeros((0, 3)))
    second = network.backward_backward_input(context, np.zeros((0, 3)), np.zeros((0, 1)))
    assert second.dL_doutput.shape == (0, 1) and second.input.shape == (0, 3)
    np.testing.assert_array_equal(second.params, np.zeros(network.n_params))


@pytest.mark.parametrize("kind", sorted(FAKES))
def test_results_are_of_the_kind_of_the_input(kind, rng, monkeypatch):
    install(monkeypatch)
    network = make_network(dtype="float32")
    x, v, u = (rng.random((5, n), np.float32) for n in (3, 3, 1))
    expected = network.backward_backward_input(network.forward(x)[1], v, u)
    given = [FAKES[kind](a) for a in (x, v, u)]
    second = network.backward_backward_input(network.forward(given[0])[1], *given[1:])
    for name in ("dL_doutput", "params", "input"):
        if kind != "cuda":  # objects of no known library get Numba's arrays
            assert isinstance(getattr(second, name), FAKES[kind])
        np.testing.assert_array_equal(getattr(second, name).memory, getattr(expected, name))


def test_encodings_and_bare_networks_have_it_too(rng):
    x, v = rng.random((5, 3)), rng.standard_normal((5, 3))
    for module in (
        tcnn.Encoding(3, {"otype": "SphericalHarmonics"}, dtype="float64", engine="reference"),
        tcnn.Network(3, 2, SOFT | {"activation": "Tanh"}, dtype="float64", engine="reference"),
    ):
        u = rng.standard_normal((5, module.n_output_dims))
        second = module.backward_backward_input(module.forward(x)[1], v, u)
        h = 1e-6
        moved = [module.backward(module.forward(x + sign * h * v)[1], u).input for sign in (1, -1)]
        # ⟨v, g⟩ changes along v by ⟨v, dg/dv⟩, which is what second.input gives along v; differences: about 1e-9
        slope = np.sum(v * (moved[0] - moved[1]), axis=1) / (2 * h)
        np.testing.assert_allclose(np.sum(second.input * v, axis=1), slope, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------------------------------- engines


def fused_network(**options):
    return tcnn.NetworkWithInputEncoding(3, 1, SMOOTH_GRID, SOFT, **options)


def test_without_fused_kernels_the_reference_does_this_call_alone(fused, rng):
    fused.fails_at = "backward_backward_input"
    network, expected = fused_network(), fused_network(engine="reference")
    x, v, u = rng.random((6, 3)), rng.random((6, 3)), rng.random((6, 1))
    assert "backward_backward_input" not in str(network.explain())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = network.backward_backward_input(network.forward(x)[1], v, u)
    assert network.jit_fusion and network.explain().engine == "fused"
    assert str(network.explain()).endswith("backward_backward_input is computed by the reference (ptxas said no)")
    same = expected.backward_backward_input(expected.forward(x)[1], v, u)
    for name in ("dL_doutput", "params", "input"):
        np.testing.assert_array_equal(getattr(second, name), getattr(same, name))


def test_it_uses_the_parameters_of_now(fused, rng):
    fused.fails_at = "backward_backward_input"
    network = fused_network()
    x, v, u = rng.random((6, 3)), rng.random((6, 3)), rng.random((6, 1))
    before = network.backward_backward_input(network.forward(x)[1], v, u)
    network.params = network.params * np.float32(2)
    after = network.backward_backward_input(network.forward(x)[1], v, u)
    assert not np.array_equal(before.params, after.params)


def test_strict_raises(fused, rng):
    fused.fails_at = "backward_backward_input"
    network = fused_network(engine="fused")
    _, context = network.forward(rng.random((6, 3)))
    with pytest.raises(EngineUnavailable, match="ptxas said no"):
        network.backward_backward_input(context, np.ones((6, 3)), np.ones((6, 1)))
