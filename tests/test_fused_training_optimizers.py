"""Models with every optimizer, trained by the real engine on an emulated driver, against the reference.

As in emulated_models.py both round at the same points, and what is left is a small part of the way that the
parameters went.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from emulated_driver import EmulatedDriver
from emulated_models import CONFIG, TRAINED, batch, predict, reference_of, step

import numba_tcnn as tcnn
from numba_tcnn.layout import n_network_params

ADAM = {"otype": "Adam", "learning_rate": 1e-2}
SGD = {"otype": "SGD", "learning_rate": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": SGD,
    "Novograd": {"otype": "Novograd", "learning_rate": 1e-2, "relative_decay": 0.1},
    "Shampoo": {"otype": "Shampoo", "learning_rate": 1e-2},
    "EMA of ExponentialDecay": {
        "otype": "EMA",
        "decay": 0.8,
        "nested": {
            "otype": "ExponentialDecay",
            "decay_base": 0.5,
            "decay_start": 2,
            "decay_interval": 2,
            "nested": ADAM,
        },
    },
    "Average": {"otype": "Average", "n_samples": 3, "nested": ADAM},
    "Lookahead of SGD": {"otype": "Lookahead", "n_steps": 2, "nested": SGD},
    "Batched": {"otype": "Batched", "batch_size_multiplier": 2, "nested": ADAM},
    "EMA of Batched Novograd": {
        "otype": "EMA",
        "decay": 0.5,
        "nested": {
            "otype": "Batched",
            "batch_size_multiplier": 2,
            "nested": {"otype": "Novograd", "learning_rate": 1e-2},
        },
    },
}


def with_optimizer(optimizer: dict[str, Any]) -> dict[str, Any]:
    return CONFIG | {"optimizer": optimizer}


def slices(model: tcnn.Model, first: dict[str, Any], second: dict[str, Any], shift: int = 0) -> dict[str, Any]:
    """A Composite of the network and the table of a model; `shift` moves the cut."""
    n_network = n_network_params(model.network.spec) + shift
    return {
        "otype": "Composite",
        "nested": [
            {**first, "n_params_to_optimize": n_network},
            {**second, "n_params_to_optimize": model.n_params - n_network},
        ],
    }


def make(config: dict[str, Any], engine: str = "fused", **options: Any) -> tcnn.Model:
    return tcnn.create_from_config(2, 3, config, engine=engine, **options)


def assert_equal(actual: Any, expected: Any) -> None:
    """States, bit for bit."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected)
        for name, value in expected.items():
            assert_equal(actual[name], value)
    else:
        np.testing.assert_array_equal(actual, expected)


def train(config: dict[str, Any], n_steps: int = 5, size: int = 40, **options: bool) -> None:
    model = make(config, **options)
    twin, start = reference_of(model, config), model.params
    for i in range(n_steps):
        x, y = batch(size, seed=i)
        if i == 2:
            y = np.full_like(y, np.nan)
        loss, expected = float(model.trainer.training_step(x, y)), step(twin, x, y)
        assert i == 2 or loss == pytest.approx(expected, rel=1e-4)
        if i == 1:
            model.trainer.learning_rate = twin.learning_rate = 0.5 * twin.learning_rate
    way = np.linalg.norm(twin.params - start)
    assert 0 < np.linalg.norm(model.params - twin.params) <= TRAINED * way or way == 0
    assert model.trainer.step == twin.step and model.trainer.skipped_steps == twin.skipped_steps == 1
    assert model.trainer.learning_rate == twin.learning_rate
    kept, expected = model.optimizer.inference_params, twin.inference_params
    assert (kept is None) == (expected is None)
    x, _ = batch(50, seed=9)
    np.testing.assert_allclose(model.predict(x), predict(twin, x), atol=2e-3)
    if kept is not None:
        assert np.linalg.norm(kept - expected) <= TRAINED * way
        trained, _ = model.network.forward(x)
        assert not np.array_equal(trained, model.predict(x)), "forward uses the parameters that are trained"
        np.testing.assert_allclose(trained, twin.model.forward(x), atol=2e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training(name: str, gpu: EmulatedDriver, no_reference: None) -> None:
    """Host arrays, a step that is left out, a learning rate that changes."""
    train(with_optimizer(OPTIMIZERS[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kept_parameters_are_used_in_the_models_format(dtype: str, gpu: EmulatedDriver, no_reference: None) -> None:
    """Inference with what EMA keeps, as it was written by kernels and as it was loaded; training with the others."""
    config = with_optimizer({"otype": "EMA", "decay": 0.8, "nested": ADAM})
    model, other = make(config, dtype=dtype), make(config, dtype=dtype)
    for i in range(3):
        model.trainer.training_step(*batch(40, seed=i))
    x, _ = batch(50, seed=9)
    outputs, (trained, _) = model.predict(x), model.network.forward(x)
    assert np.abs(outputs - trained).max() > 0
    twin = make(CONFIG, dtype=dtype)
    twin.params = model.optimizer.inference_params
    np.testing.assert_array_equal(outputs, twin.predict(x))
    other.params = model.params
    other.optimizer.load_state_dict(model.optimizer.state_dict())
    np.testing.assert_array_equal(other.predict(x), outputs)
    np.testing.assert_array_equal(other.network.forward(x)[0], trained)


@pytest.mark.parametrize("shift", [0, -40, 7])
def test_training_slices(shift: int, gpu: EmulatedDriver, no_reference: None) -> None:
    """Cut between the network and its encoding, in a matrix, and in the middle of a vector of the table."""
    ema = {"otype": "EMA", "decay": 0.8, "nested": ADAM}
    train(with_optimizer(slices(make(CONFIG), ema, OPTIMIZERS["Novograd"], shift)))


SHORT = ("SGD", "EMA of Batched Novograd")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.exhaustive]) for name in OPTIMIZERS]
)
def test_deterministic_training(name: str, gpu: EmulatedDriver, no_reference: None) -> None:
    """As good as any; and the same bits with blocks in another order, in a table in which most entries collide."""
    train(with_optimizer(OPTIMIZERS[name]), deterministic=True)
    config = with_optimizer(OPTIMIZERS[name]) | {"encoding": CONFIG["encoding"] | {"log2_hashmap_size": 3}}
    found = []
    for seed in (1, 2):
        gpu.shuffle = np.random.default_rng(seed)
        model = make(config, deterministic=True)
        losses = [float(model.trainer.training_step(*batch(500, seed=i))) for i in range(4)]
        found.append((losses, model.params, model.optimizer.state_dict()))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert_equal(found[0][2], found[1][2])


@pytest.mark.parametrize("shift", [0, -40, 7])
def test_deterministic_training_of_slices(shift: int, gpu: EmulatedDriver, no_reference: None) -> None:
    train(with_optimizer(slices(make(CONFIG), ADAM, SGD, shift)), deterministic=True)


@pytest.mark.parametrize("name", ["Novograd", "Shampoo", "Average", "Lookahead of SGD", "EMA of Batched Novograd"])
def test_moving_between_engines_loses_nothing(name: str, gpu: EmulatedDriver) -> None:
    """Fused, reference, fused again, and a copy: each goes on from the very state of the one before."""
    model = make(with_optimizer(OPTIMIZERS[name]), engine="auto")
    twin = copy.deepcopy(model)
    for i in range(6):
        if i in (2, 4):
            state, params, kept = model.optimizer.state_dict(), model.params, model.optimizer.inference_params
            model.jit_fusion = i == 4
            assert model.explain().engine == ("fused" if i == 4 else "reference")
            assert_equal(model.optimizer.state_dict(), state)
            np.testing.assert_array_equal(model.params, params)
            if kept is not None:
                np.testing.assert_array_equal(model.optimizer.inference_params, kept)
                x, _ = batch(30)
                np.testing.assert_allclose(model.predict(x), make_kept(model).predict(x), atol=1e-6)
        x, y = batch(40, seed=i)
        model.trainer.training_step(x, y)
        twin.trainer.training_step(x, y)
    assert model.trainer.step == twin.trainer.step == 6
    np.testing.assert_allclose(model.params, twin.params, atol=1e-4)


def make_kept(model: tcnn.Model) -> tcnn.Model:
    """A model that is trained to what another one keeps for inference, on the same engine."""
    other = make(CONFIG, engine="auto" if model.jit_fusion else "reference")
    other.params = model.optimizer.inference_params
    return other


def test_parameters_from_outside_start_averages_again(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make(with_optimizer(OPTIMIZERS["Average"]))
    x, y = batch(40)
    for _ in range(2):
        model.trainer.training_step(x, y)
    params = np.random.default_rng(3).normal(0, 0.1, model.n_params).astype(np.float32)
    model.params = params
    assert model.optimizer.inference_params is None
    plain = make(CONFIG)
    plain.params = params
    np.testing.assert_array_equal(model.predict(x), plain.predict(x))
    model.trainer.training_step(x, y)
    np.testing.assert_array_equal(model.optimizer.inference_params, model.params)


def test_kernels_of_the_user_see_the_parameters_of_inference(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make(with_optimizer(OPTIMIZERS["Average"]))
    for expected_of in (lambda: model.params, lambda: model.optimizer.inference_params):
        address = model.network.engine.runtime.device_params_address(0)
        gpu.run_everything()
        half = gpu.memory.bytes_at(address, 2 * model.n_params).view(np.float16)
        np.testing.assert_array_equal(half, expected_of().astype(np.float16))
        for seed in range(2):
            model.trainer.training_step(*batch(40, seed))


@pytest.mark.parametrize("name", ["EMA of ExponentialDecay", "Shampoo"])
def test_a_missing_kernel_carries_everything_over(name: str, gpu: EmulatedDriver) -> None:
    """Steps on the device, then a kernel that does not compile: the same step goes on in the reference."""
    config = with_optimizer(OPTIMIZERS[name])
    model = make(config, engine="auto")
    twin = reference_of(model, config)
    x, y = batch(40)
    for _ in range(2):
        model.trainer.training_step(x, y)
        step(twin, x, y)
    gpu.compiler.fails = ("optimizer EmaSpec", "layer optimizer ShampooSpec")
    model.network.engine.runtime.model.programs.clear()
    with pytest.warns(tcnn.JitFusionWarning, match="NvvmError: not today"):
        model.trainer.training_step(x, y)
    step(twin, x, y)
    assert model.explain().engine == "reference" and model.trainer.step == twin.step == 3
    np.testing.assert_allclose(model.params, twin.params, atol=1e-4)


def test_device_memory_of_an_optimizer_is_given_back(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make(CONFIG)
    x, y = batch(20)
    model.trainer.training_step(x, y)
    allocated = gpu.memory.allocated
    for name in ("Average", "Shampoo"):
        tcnn.Trainer(model.network, OPTIMIZERS[name], "L2").training_step(x, y)
        assert gpu.memory.allocated > allocated
    tcnn.Trainer(model.network, ADAM, "L2").training_step(x, y)
    assert gpu.memory.allocated == allocated
