"""Second derivatives on a real device: against the float16 reference, and against differences of the fused dL/dx.

Gates of ReLU and its like are settled by the sign of a sum, which the two sides round differently: a flipped one
changes a sample's derivatives by per cents. So the models here are smooth but for one, whose samples are many.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from model_draws import covering
from test_fused_encodings import CONCATENATIONS, REDUCTIONS, composite

import numba_tcnn as tcnn
from benchmarks.agreement.comparison import relative_error
from benchmarks.agreement.device_views import DeviceView, poisoned
from benchmarks.agreement.draws import Draw
from numba_tcnn.arrays import view
from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.reference.model import Model, SecondOrderGradients

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("no_reference")]

TOLERANCE = 5e-3
"""As first derivatives (`agreement.py`); tangents are rounded to float16 here and not in the reference, which costs
3e-4 to 8e-4 (test_fused_second_order.py), and approximate exponentials more where they are steep."""

PIECEWISE = ("ReLU", "LeakyReLU")
SDF_GRID = {"otype": "HashGrid", "log2_hashmap_size": 19, "per_level_scale": 1.38, "interpolation": "Smoothstep"}
SDF_MLP = {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2, "activation": "Softplus"}
SDF = Draw(3, 1, SDF_GRID, SDF_MLP, "L2")


def directions(draw: Draw, batch: int) -> np.ndarray:
    return np.random.default_rng([draw.seed, 5]).standard_normal((batch, draw.n_input_dims)).astype(np.float32)


def second_order(module, x, v, dL_dy, offset: int = 0) -> SecondOrderGradients:
    """Through the engine, into NaN between guards."""
    shapes = {"dL_doutput": dL_dy.shape, "params": (module.n_params,), "input": x.shape}
    results = {name: poisoned(shape, "float32", offset) for name, shape in shapes.items()}
    arrays = (view(DeviceView(a, offset)) for a in (x, v, dL_dy))
    module.engine.backward_backward_input(*arrays, **{name: view(result) for name, result in results.items()})
    return SecondOrderGradients(**{name: result.numpy() for name, result in results.items()})


def errors_of(actual: SecondOrderGradients, expected: SecondOrderGradients) -> dict[str, float]:
    return {name: relative_error(getattr(actual, name), getattr(expected, name)) for name in vars(expected)}


def assert_agrees(module, x, v, dL_dy, offset: int = 0) -> None:
    actual = second_order(module, x, v, dL_dy, offset)
    expected = Model(module.spec, module.params, "float16").backward_backward_input(x, v, dL_dy)
    errors = errors_of(actual, expected)
    print("  ", len(x), {name: f"{error:.1e}" for name, error in errors.items()})
    assert all(error <= TOLERANCE for error in errors.values()), errors


def fused(draw: Draw, batch: int):
    """The draw's network, with parameters of order 1."""
    model = tcnn.create_from_config(draw.n_input_dims, draw.n_output_dims, draw.config, strict=True)
    model.params = draw.params(draw.inputs(batch))
    return model.network


@pytest.mark.parametrize("draw", covering(), ids=str)
def test_every_choice_of_the_family_agrees_with_the_reference(draw):
    if draw.network["activation"] in PIECEWISE or draw.network["output_activation"] in PIECEWISE:
        pytest.skip("gates flip")
    network = fused(draw, 1000)
    for batch in (31, 1000):
        x, v = draw.inputs(batch), directions(draw, batch)
        try:
            assert_agrees(network, x, v, draw.output_gradients(batch), draw.seed % 2)
        except EngineUnavailable as error:  # wide ones have no single kernel
            assert draw.network["n_neurons"] >= 100, str(error)
            pytest.skip(str(error))


@pytest.mark.parametrize("activation", ["Softplus", "Sine", "ReLU"])
@pytest.mark.parametrize("n_hidden_layers", [2, 3])
def test_distance_functions(activation, n_hidden_layers):
    draw = Draw(3, 1, SDF_GRID, SDF_MLP | {"activation": activation, "n_hidden_layers": n_hidden_layers}, "L2")
    network = fused(draw, 4096)
    for batch in (1, 257, 40000) if activation != "ReLU" else (40000,):
        x, v = draw.inputs(batch), directions(draw, batch)
        assert_agrees(network, x, v, np.ones((batch, 1), np.float32))


ENCODINGS = {
    "harmonics": (3, {"otype": "SphericalHarmonics", "degree": 4}),
    "octaves": (2, {"otype": "Frequency", "n_frequencies": 10}),
    "nrc": CONCATENATIONS["nrc"],
    "gaps and overlaps": CONCATENATIONS["gaps and overlaps"],
    "product": (3, composite(*REDUCTIONS["grid, waves and blob"][1], reduction="Product")),
    "sum": (3, composite(*REDUCTIONS["a sum inside"][1], reduction="Sum")),
    "grid of 4 dims": (4, {"otype": "TiledGrid", "n_levels": 2, "n_features_per_level": 8, "base_resolution": 3}),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_bare_encodings(name, rng):
    n_in, config = ENCODINGS[name]
    encoding = tcnn.Encoding(n_in, config, strict=True)
    encoding.params = rng.uniform(-0.5, 0.5, encoding.n_params)
    for batch in (1, 31, 1000):
        x, v = rng.random((batch, n_in), np.float32), rng.standard_normal((batch, n_in)).astype(np.float32)
        assert_agrees(encoding, x, v, rng.standard_normal((batch, encoding.n_output_dims)).astype(np.float32))


def test_against_differences_of_the_fused_first_derivative(rng):
    """dL/dx has a noise of about 5e-4 of itself, of which a difference over 2 h = 0.2 makes 1e-2 of the second
    derivatives (measured with the float16 reference: 1.6e-2, with the difference's own error); a sum of 4096 samples
    has less. There, a step of 2 % of the parameters along the gradient has an error of 2e-3."""
    config = {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2, "activation": "Tanh"}
    network = tcnn.Network(3, 2, config, strict=True)
    x, v, w = rng.random((4096, 3), np.float32), *rng.standard_normal((2, 4096, 3)).astype(np.float32)
    dL_dy, h = rng.standard_normal((4096, 2)).astype(np.float32), np.float32(0.1)
    w /= np.linalg.norm(w, axis=1, keepdims=True)

    def slope(x: np.ndarray, dL_dy: np.ndarray = dL_dy) -> np.ndarray:
        """<v, dL/dx> of each sample."""
        return np.sum(v * network.backward(network.forward(x)[1], dL_dy, parameters="ignore").input, axis=1)

    second = second_order(network, x, v, dL_dy)
    along_w = (slope(x + h * w) - slope(x - h * w)) / (2 * h)
    assert relative_error(np.sum(w * second.input, axis=1), along_w) < 3e-2
    change = rng.standard_normal(dL_dy.shape).astype(np.float32)
    along_change = slope(x, dL_dy + change) - slope(x, dL_dy)
    assert relative_error(np.sum(change * second.dL_doutput, axis=1), along_change) < 1e-2
    params = network.params
    step = 0.02 * np.linalg.norm(params) / np.linalg.norm(second.params) * second.params
    sums, stored = [], []
    for sign in (1, -1):
        network.params = params + sign * step
        stored.append(network.params.astype(np.float16).astype(np.float64))  # what the kernels see
        sums.append(slope(x).sum(dtype=np.float64))
    assert sums[0] - sums[1] == pytest.approx(second.params @ (stored[0] - stored[1]), rel=1e-2)


def test_magnitudes_are_undone(rng):
    network = fused(SDF, 1000)
    x, v, dL_dy = SDF.inputs(257), directions(SDF, 257), rng.standard_normal((257, 1)).astype(np.float32)
    expected = second_order(network, x, v, dL_dy)
    for a, b in ((2.0**-50, 2.0**20), (2.0**60, 2.0**-10)):
        scaled = second_order(network, x, np.float32(a) * v, np.float32(b) * dL_dy)
        np.testing.assert_array_equal(scaled.input, np.float32(a * b) * expected.input)
        np.testing.assert_array_equal(scaled.dL_doutput, np.float32(a) * expected.dL_doutput)
        # tables and partial sums are added in any order
        assert relative_error(scaled.params / np.float32(a * b), expected.params) < 1e-5


def test_nothing_is_left_between_calls(rng):
    """Twice the same, a first backward pass and a training step between."""
    model = tcnn.create_from_config(3, 1, SDF.config, strict=True)
    model.params = SDF.params(SDF.inputs(1000))
    x, v, dL_dy = SDF.inputs(1000), directions(SDF, 1000), np.ones((1000, 1), np.float32)
    first = second_order(model.network, x, v, dL_dy)
    model.network.backward(model.network.forward(x)[1], dL_dy)
    again = second_order(model.network, x, v, dL_dy)
    assert all(error < 1e-5 for error in errors_of(again, first).values())
    model.trainer.training_step(x, np.zeros((1000, 1), np.float32))
    assert_agrees(model.network, x, v, dL_dy)


def test_time_of_a_large_batch(capsys):
    """Prints milliseconds a call for 2^18 samples, between device arrays; that it runs at all is what is tested."""
    network, n = fused(SDF, 4096), 1 << 18
    arrays = [view(DeviceView(a)) for a in (SDF.inputs(n), directions(SDF, n), np.ones((n, 1), np.float32))]
    shapes = {"dL_doutput": (n, 1), "params": (network.n_params,), "input": (n, 3)}
    results = {name: poisoned(shape, "float32") for name, shape in shapes.items()}
    outputs = {name: view(result) for name, result in results.items()}
    for repeats in (1, 20):
        start = time.perf_counter()
        for _ in range(repeats):
            network.engine.backward_backward_input(*arrays, **outputs)
        assert all(np.isfinite(result.numpy()).all() for result in results.values())
        milliseconds = 1e3 * (time.perf_counter() - start) / repeats
    with capsys.disabled():
        print(f"\nsecond derivatives of 2^18 samples: {milliseconds:.2f} ms a call, results fetched once in 20")
        print(network.explain())
