"""Every optimizer on a real device, against the reference: kernels alone on given gradients, and whole models."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from device_optimizer import DeviceOptimizer
from test_fused_training_gpu import CONFIG, data, make

import numba_tcnn as tcnn
from numba_tcnn.arrays import host_view
from numba_tcnn.config import parse_loss, parse_optimizer
from numba_tcnn.fused import to_device
from numba_tcnn.layout import n_network_params
from numba_tcnn.reference import make_optimizer
from numba_tcnn.reference.engine import ReferenceRuntime

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ADAM = {"otype": "Adam", "learning_rate": 1e-2, "l2_reg": 0.0}
NOVOGRAD = {"otype": "Novograd", "learning_rate": 1e-2, "relative_decay": 0.1}
SHAMPOO = {"otype": "Shampoo", "learning_rate": 1e-2}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"otype": "SGD", "learning_rate": 0.1},
    "AdaBound": {**ADAM, "adabound": True, "absolute_decay": 0.01, "clipping_magnitude": 1.0},
    "Novograd": NOVOGRAD,
    "Shampoo": SHAMPOO,
    "Shampoo on gradients": {**SHAMPOO, "cg_on_momentum": False, "frobenius_normalization": False},
    "EMA": {"otype": "EMA", "decay": 0.9, "nested": {"otype": "ExponentialDecay", "decay_start": 5, "nested": ADAM}},
    "Average": {"otype": "Average", "n_samples": 7, "nested": ADAM},
    "Lookahead": {"otype": "Lookahead", "n_steps": 4, "nested": ADAM},
    "Batched": {"otype": "Batched", "batch_size_multiplier": 3, "nested": ADAM},
    "Lookahead of Shampoo": {"otype": "Lookahead", "n_steps": 4, "nested": SHAMPOO},
    "EMA of Average of Batched Novograd": {
        "otype": "EMA",
        "nested": {"otype": "Average", "nested": {"otype": "Batched", "batch_size_multiplier": 2, "nested": NOVOGRAD}},
    },
}
LAYERS = [(64, 32), (64, 64), (64, 64), (16, 64)]
N_MATRIX = sum(rows * columns for rows, columns in LAYERS)
N_PARAMS = N_MATRIX + 100_003


def slices(*cuts: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """A Composite of (number of parameters, optimizer)."""
    return {"otype": "Composite", "nested": [{**own, "n_params_to_optimize": n} for n, own in cuts]}


OPTIMIZERS["slices"] = slices(
    (5000, ADAM), (N_MATRIX - 5000 + 21, OPTIMIZERS["EMA"]), (50_000, NOVOGRAD), (N_PARAMS - N_MATRIX - 50_021, SHAMPOO)
)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_thirty_steps_on_given_gradients(name: str, rng: np.random.Generator) -> None:
    """One of them without finite gradients. Sums over layers in another order, fast quotients and square roots: some
    units in the last place a step, 1e-4 of the longest way. Shampoo's products of 64 x 64 matrices part by more."""
    spec = parse_optimizer(OPTIMIZERS[name], n_params=N_PARAMS)
    w = rng.normal(size=N_PARAMS).astype(np.float32)
    start = w.copy()
    device, reference = DeviceOptimizer(spec, w, LAYERS), make_optimizer(spec, N_PARAMS, LAYERS)
    for i in range(30):
        g = (rng.integers(-64, 65, N_PARAMS) / 64).astype(np.float32)
        g[N_MATRIX:] *= rng.random(N_PARAMS - N_MATRIX) < 0.5
        device.step(g, n_rows=1 + i % 5, finite=i != 11, scale=0.25, given_scale=0.5)
        reference.step(w, g if i != 11 else None)
    tolerance = (2e-3 if "Shampoo" in str(OPTIMIZERS[name]) else 1e-4) * np.abs(w - start).max()
    np.testing.assert_allclose(device.params, w, rtol=1e-6, atol=tolerance)
    kept, expected = device.inference_params, reference.inference_params
    assert (kept is None) == (expected is None)
    if kept is not None:
        np.testing.assert_allclose(kept, expected, rtol=1e-6, atol=tolerance)
    assert device.optimizer.current_step == reference.current_step and device.skipped == 1
    state = device.state()
    there = DeviceOptimizer(spec, device.params, LAYERS)
    reference.load_state(state)
    there.optimizer.load_state(reference.state(), 0)
    for one in (device, there):
        one.step(g)
    np.testing.assert_array_equal(there.params, device.params)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("width", [64, 128])
def test_shampoo_with_matrices_of_usual_widths(width: int, rng: np.random.Generator) -> None:
    """Late enough for roots to have had several turns."""
    spec, n = parse_optimizer(SHAMPOO), 2 * width * width
    w = rng.normal(size=n).astype(np.float32)
    start, layers = w.copy(), [(width, width)] * 2
    device, reference = DeviceOptimizer(spec, w, layers), make_optimizer(spec, n, layers)
    for _ in range(22):
        g = (rng.integers(-64, 65, n) / 64).astype(np.float32)
        device.step(g)
        reference.step(w, g)
    np.testing.assert_allclose(device.params, w, atol=2e-3 * np.abs(w - start).max())
    for side in ("left_roots", "right_roots"):
        expected = reference.state()[side]
        np.testing.assert_allclose(device.state()[side], expected, atol=1e-4 * np.abs(expected).max())


def optimizer_for(model: tcnn.Model, name: str) -> dict[str, Any]:
    if name != "slices":
        return OPTIMIZERS[name]
    n_network = n_network_params(model.network.spec)
    return slices((n_network, OPTIMIZERS["EMA"]), (model.n_params - n_network, NOVOGRAD))


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_models_train_as_in_the_reference(name: str, rng: np.random.Generator) -> None:
    config = {**CONFIG, "optimizer": optimizer_for(make(), name)}
    model = make(optimizer=config["optimizer"])
    reference = ReferenceRuntime(model.network.spec, model.params, "float16")
    reference.configure_training(
        parse_optimizer(config["optimizer"], n_params=model.n_params), parse_loss({"otype": "L2"})
    )
    start = model.params
    for _ in range(12):
        x, y = data(rng, 2000)
        loss = float(model.trainer.training_step(to_device(x), to_device(y)))
        # 2 %: as in the 50 steps of test_fused_training_gpu.py
        assert loss == pytest.approx(float(reference.training_step(host_view(x), host_view(y))), rel=0.02)
    way = np.linalg.norm(reference.params - start)
    assert way > 0 and np.linalg.norm(model.params - reference.params) <= 0.05 * way
    kept = reference.inference_params
    assert (kept is None) == (model.optimizer.inference_params is None)
    x, _ = data(rng, 1000)
    expected = np.empty((len(x), 3), np.float32)
    reference.inference(host_view(x), host_view(expected))
    np.testing.assert_allclose(model.network.inference(x), expected, atol=0.02)
    if kept is not None:
        assert np.linalg.norm(model.optimizer.inference_params - kept) <= 0.05 * way
        plain = make()
        plain.params = model.optimizer.inference_params
        np.testing.assert_allclose(model.network.inference(x), plain.network.inference(x), atol=1e-5)


@pytest.mark.parametrize("name", ["Novograd", "Shampoo", "EMA", "Average"])
def test_copies_and_the_other_engine_carry_the_state_on(name: str, rng: np.random.Generator) -> None:
    """Uses the reference on purpose."""
    model = make(optimizer=OPTIMIZERS[name])
    for _ in range(3):
        model.trainer.training_step(*data(rng, 500))
    twin, state = copy.deepcopy(model), model.optimizer.state_dict()
    for engine_is_fused in (False, True):
        twin.jit_fusion = engine_is_fused
        assert_equal(twin.optimizer.state_dict(), state)
    x, y = data(rng, 500)
    losses = [float(one.trainer.training_step(x, y)) for one in (model, twin)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for name, value in expected.items():
            assert_equal(actual[name], value)
    else:
        np.testing.assert_array_equal(actual, expected)
