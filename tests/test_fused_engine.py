"""The real engine code, from `create_from_config` down to packed launch arguments, on an emulated CUDA driver.

Compared with the reference of the same precision. Both round to float16 at the same points (see test_fused_kernels.py
for what is left), and Adam moves a weight by at most the learning rate a step: after some steps the distance of the
two is below 1e-3 of the way that the parameters went. A wrong argument would leave it of order 1.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulated_driver import CUresult, EmulatedDriver, installed
from golden_case import relative_error

import numba_tcnn as tcnn
from numba_tcnn.arrays import view
from numba_tcnn.config import parse_loss, parse_optimizer
from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused import (
    DeviceArray,
    device_status,
    driver,
    gradient_programs,
    losses,
    pending_losses,
    plan,
    to_device,
)
from numba_tcnn.fused.driver import CudaError
from numba_tcnn.fused.layer_plan import LAYER_BY_LAYER
from numba_tcnn.reference.engine import ReferenceRuntime

CONFIG = {
    "encoding": {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 3},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
}
IDENTITY = CONFIG | {"encoding": {"otype": "Identity"}}
TRAINED = 1e-3  # distance to the reference over the way that training went
GRADIENT = 2e-4
OUTPUT = 2e-6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDriver]:
    with installed(EmulatedDriver(), monkeypatch) as emulated:
        yield emulated


def make(config: dict = CONFIG, n_in: int = 2, n_out: int = 3, **options: Any) -> tcnn.Model:
    model = tcnn.create_from_config(n_in, n_out, config, **({"engine": "fused"} | options))
    assert model.explain().engine == "fused"
    return model


def reference_of(model: tcnn.Model, config: dict = CONFIG) -> ReferenceRuntime:
    """The same model, parameters and training in the reference."""
    twin = ReferenceRuntime(model.network.spec, model.params, "float16")
    twin.configure_training(parse_optimizer(config["optimizer"]), parse_loss(config["loss"]))
    return twin


def batch(size: int, seed: int = 1, n_in: int = 2, n_out: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random((size, n_in), np.float32), 0.1 + rng.random((size, n_out), np.float32)


def step(twin: ReferenceRuntime, x: np.ndarray, y: np.ndarray | None, **arrays: Any) -> float:
    views = {name: view(a) if isinstance(a, np.ndarray) else a for name, a in arrays.items()}
    return twin.training_step(view(x), None if y is None else view(y), **views).value()


def predict(twin: ReferenceRuntime, x: np.ndarray) -> np.ndarray:
    out = np.empty((len(x), twin.spec.n_output_dims), np.float32)
    twin.inference(view(x), view(out))
    return out


def assert_same_training(model: tcnn.Model, twin: ReferenceRuntime, start: np.ndarray) -> None:
    way = np.linalg.norm(twin.params - start)
    distance = np.linalg.norm(model.params - twin.params)
    assert way > 0 and distance <= TRAINED * way, f"{distance / way:.1e} of the way from the reference"
    assert model.trainer.step == twin.step and model.trainer.skipped_steps == twin.skipped_steps


# --------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("config", [
    CONFIG,
    IDENTITY,
    CONFIG | {"network": {"otype": "CutlassMLP", "n_neurons": 32, "n_hidden_layers": 2, "activation": "SiLU",
                          "output_activation": "Sigmoid"}, "loss": {"otype": "RelativeL2"}},
    CONFIG | {"network": {"otype": "CutlassMLP", "n_neurons": 16, "n_hidden_layers": 0}, "loss": {"otype": "Smape"}},
    CONFIG | {"encoding": {"otype": "DenseGrid", "n_levels": 2, "n_features_per_level": 1, "base_resolution": 5}},
    CONFIG | {"network": CONFIG["network"] | {"bias": True},
              "optimizer": CONFIG["optimizer"] | {"l2_reg": 0.1, "non_matrix_learning_rate_factor": 2.0}},
], ids=["hash grid", "identity", "silu", "no hidden layer", "dense grid", "biases"])  # fmt: skip
def test_training(config: dict, gpu: EmulatedDriver, no_reference: None) -> None:
    """Five steps of batches of all sizes, growing and shrinking, on host and device arrays of both dtypes."""
    model = make(config)
    twin, start = reference_of(model, config), model.params
    for i, size in enumerate((40, 300, 1, 129, 301)):
        x, y = batch(size, seed=10 + i)  # draws after which no weight is on the border of two float16
        if i % 2:
            x, y = x.astype(np.float16), y.astype(np.float16)
        given = (x, y) if i < 3 else (to_device(x), to_device(y))
        assert float(model.trainer.training_step(*given)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert_same_training(model, twin, start)
    x, _ = batch(200)
    np.testing.assert_allclose(model.predict(x), predict(twin, x), atol=2e-3)  # of the parameters' distance
    names = {kernel.name for kernel in model.explain().kernels}
    assert names == {"gradient", "adam", "inference"}


def test_training_in_several_kernels(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """As for networks whose dW does not fit the registers, in chunks of one wave of blocks, the last one shorter.

    Two layers of one shape share a kernel's blocks, so they leave fewer rows of partial sums than the others.
    """
    monkeypatch.setattr(plan, "single_plans", lambda *arguments, **options: [])
    monkeypatch.setattr(gradient_programs, "SAVED_BYTES", 1)
    config = CONFIG | {"network": {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 3}}
    model = make(config)
    twin, start = reference_of(model, config), model.params
    for seed in range(2):
        x, y = batch(600, seed)
        pdf = 0.5 + np.random.default_rng(seed).random(y.shape, np.float32)
        loss = model.trainer.training_step(x, y, data_pdf=pdf)
        assert float(loss) == pytest.approx(step(twin, x, y, data_pdf=pdf), rel=1e-4)
    assert_same_training(model, twin, start)
    assert sum(name == "propagate" for name, _, _ in gpu.launches) >= 4
    _, context = model.network.forward(x)
    given = model.network.backward(context, y, parameters="overwrite", input=True)
    expected = twin.model.backward(x, y)
    assert relative_error(given.params, expected.params) <= GRADIENT
    assert relative_error(given.input, expected.input) <= GRADIENT


def test_training_in_phases(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """128 wide, in chunks of one wave of blocks, the last one shorter."""
    monkeypatch.setattr(gradient_programs, "IMAGE_BYTES", 1)
    config = CONFIG | {"network": {"otype": "FullyFusedMLP", "n_neurons": 128, "n_hidden_layers": 1}}
    model = make(config)
    twin, start = reference_of(model, config), model.params
    for seed, size in enumerate((600, 100)):
        x, y = batch(size, seed)
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert_same_training(model, twin, start)
    assert sum(name == "phased_gradient" for name, _, _ in gpu.launches) >= 3
    _, context = model.network.forward(x)
    given = model.network.backward(context, y, parameters="overwrite", input=True)
    expected = twin.model.backward(x, y)
    assert relative_error(given.params, expected.params) <= GRADIENT
    assert relative_error(given.input, expected.input) <= GRADIENT


def test_training_with_densities(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    twin, start = reference_of(model), model.params
    for i, dtype in enumerate(("float32", "float16", "float32")):
        x, y = batch(70, seed=i)
        pdf = (0.3 + np.random.default_rng(i).random(y.shape)).astype(dtype)
        given = model.trainer.training_step(x, y, data_pdf=pdf)
        assert float(given) == pytest.approx(step(twin, x, y, data_pdf=pdf), rel=1e-4)
    assert_same_training(model, twin, start)


@pytest.mark.parametrize("magnitude", [1e-9, 1.0, 1e9])
def test_training_with_external_gradients(magnitude: float, gpu: EmulatedDriver, no_reference: None) -> None:
    """Of any size: Adam divides by it again. Steps with and without one take turns."""
    model = make()
    twin, start = reference_of(model), model.params
    for i in range(2):
        x, y = batch(70, seed=i)
        gradient = (magnitude * np.random.default_rng(i).normal(size=y.shape)).astype(np.float32)
        assert float(model.trainer.training_step(x, None, external_gradient=gradient)) == 0.0
        step(twin, x, None, external_gradient=gradient)
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert_same_training(model, twin, start)


def test_a_loss_without_an_optimizer_step(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    loss = model.trainer.training_step(x, y, run_optimizer=False)
    assert float(loss) == pytest.approx(step(twin, x, y, run_optimizer=False), rel=1e-4)
    np.testing.assert_array_equal(model.params, start)
    assert model.trainer.step == 0
    model.trainer.training_step(x, y)
    step(twin, x, y)
    assert_same_training(model, twin, start)  # the table's gradient of the first call is gone


def test_losses_keep_the_value_of_their_step(gpu, monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """Three slots for eight losses, read in the end, backwards; two are never read."""
    monkeypatch.setattr(pending_losses, "LOSS_SLOTS", 3)
    model = make()
    twin = reference_of(model)
    x, y = batch(20)
    held, expected = [], []
    for i in range(10):
        loss, value = model.trainer.training_step(x, y), step(twin, x, y)
        if i not in (2, 7):
            held.append(loss)
            expected.append(value)
    assert len(set(expected)) == 8
    assert [float(loss) for loss in reversed(held)] == pytest.approx(expected[::-1], rel=1e-4)


def test_losses_are_fetched_together(gpu, monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """Who keeps every loss, as `fit` does, waits for the device once in as many steps as there are slots."""
    monkeypatch.setattr(pending_losses, "LOSS_SLOTS", 4)
    model = make()
    twin = reference_of(model)
    x, y = batch(20)
    given = to_device(x), to_device(y)
    copies = []
    copy_to_host = gpu.cuMemcpyDtoHAsync
    monkeypatch.setattr(gpu, "cuMemcpyDtoHAsync", lambda *call: copies.append(call) or copy_to_host(*call))
    losses = [model.trainer.training_step(*given) for _ in range(12)]
    assert len(copies) == 2
    expected = [step(twin, x, y) for _ in range(12)]
    assert len(set(expected)) == 12
    assert [float(loss) for loss in losses] == pytest.approx(expected, rel=1e-4)


def test_the_loss_is_not_read_before_it_is_asked_for(gpu: EmulatedDriver, no_reference: None) -> None:
    """On device arrays a step only queues work."""
    model = make()
    x, y = (to_device(a) for a in batch(20))
    model.trainer.training_step(x, y)
    gpu.run_everything()
    loss = model.trainer.training_step(x, y)
    assert gpu._queues[0], "a step waited for the device"
    assert float(loss) > 0 and not gpu._queues[0]


def test_steps_with_gradients_that_are_not_finite_are_skipped(gpu: EmulatedDriver, no_reference: None) -> None:
    """The first and the third step; the second and fourth are as if those had never been, but for the count."""
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    for bad in (True, False, True, False):
        targets = y.copy()
        targets[3, 1] = np.nan if bad else 0.5
        before = model.params
        model.trainer.training_step(x, targets)
        step(twin, x, targets)
        assert np.array_equal(model.params, before) == bad
    assert model.trainer.skipped_steps == 2 and model.trainer.step == 4
    assert_same_training(model, twin, start)
    assert np.isfinite(model.params).all()


def test_gradients_of_features_that_overflow_are_skipped_too(gpu: EmulatedDriver, no_reference: None) -> None:
    """dL/d(features) = d W leaves float16's range although d, and so dW, does not: the table must not become NaN."""
    config = CONFIG | {"network": {"otype": "CutlassMLP", "n_neurons": 16, "n_hidden_layers": 0}}
    model = make(config)
    weights = model.params.copy()
    weights[: 16 * 16] = 6e4
    model.params = weights
    twin = reference_of(model, config)
    x, y = batch(70)
    step(twin, x, None, external_gradient=np.ones_like(y))
    assert twin.skipped_steps == 1
    model.trainer.training_step(x, None, external_gradient=np.ones_like(y))
    assert np.isfinite(model.params).all() and model.trainer.skipped_steps == 1


def test_steps_of_an_encoding_alone_are_skipped_too(gpu: EmulatedDriver, no_reference: None) -> None:
    encoding = tcnn.Encoding(2, CONFIG["encoding"], engine="fused")
    trainer = tcnn.Trainer(encoding, CONFIG["optimizer"], CONFIG["loss"])
    x, _ = batch(70)
    gradient = np.ones((70, encoding.n_output_dims), np.float32)
    trainer.training_step(x, None, external_gradient=gradient)
    before = encoding.params
    gradient[3, 2] = np.inf
    trainer.training_step(x, None, external_gradient=gradient)
    np.testing.assert_array_equal(encoding.params, before)
    assert trainer.skipped_steps == 1 and trainer.step == 2


def test_inputs_that_are_nan_do_not_reach_the_parameters(gpu: EmulatedDriver, no_reference: None) -> None:
    """A grid's features are finite whatever x is, so training goes on."""
    model = make()
    x, y = batch(70)
    x[5] = np.nan
    model.trainer.training_step(x, y)
    assert model.trainer.skipped_steps == 0 and np.isfinite(model.params).all()


def test_the_learning_rate_can_be_set(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    for rate in (0.1, 0.001):
        model.trainer.learning_rate = twin.learning_rate = rate
        model.trainer.training_step(x, y)
        step(twin, x, y)
    assert_same_training(model, twin, start)


# -------------------------------------------------------------------------------- inference, gradients


def test_inference_on_host_and_device(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    twin = reference_of(model)
    for size in (1, 130, 30, 600):
        x, _ = batch(size, seed=size)
        for dtype in ("float32", "float16"):
            given = x.astype(dtype)
            expected = predict(twin, given)
            scale = np.abs(expected).max()
            on_host = model.network.inference(given)
            assert on_host.dtype == np.float32 and np.abs(on_host - expected).max() <= 1e-3 * scale
            half = model.network.inference(given, dtype="float16")
            np.testing.assert_array_equal(half, on_host.astype(np.float16))
            on_device = model.network.inference(to_device(given))
            assert isinstance(on_device, DeviceArray)
            np.testing.assert_array_equal(on_device.numpy(), on_host)
            out = np.full((size, 3), np.nan, np.float32)
            assert model.network.inference(given, out=out) is out
            np.testing.assert_array_equal(out, on_host)
    assert model.network.inference(np.empty((0, 2), np.float32)).shape == (0, 3)


@pytest.mark.parametrize("n_in", [8, 9])
@pytest.mark.parametrize("offset", [0, 1])
def test_inputs_that_are_not_aligned(n_in: int, offset: int, gpu: EmulatedDriver, no_reference: None) -> None:
    """A view that starts in the middle of device memory, or rows that are no multiple of 16 bytes: the emulator
    faults where a kernel loads 16 bytes at a time all the same."""
    model = make(IDENTITY, n_in)
    twin = reference_of(model, IDENTITY)
    x, _ = batch(50, n_in=n_in)
    storage = to_device(np.concatenate([np.zeros(offset, np.float32), x.ravel()]))

    class Part:
        __cuda_array_interface__ = storage.__cuda_array_interface__ | {
            "shape": x.shape,
            "data": (storage.__cuda_array_interface__["data"][0] + 4 * offset, False),
        }

    y = model.network.inference(Part())
    np.testing.assert_allclose(y.numpy(), predict(twin, x), atol=1e-3)


@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("config", [CONFIG, IDENTITY], ids=["grid", "identity"])
def test_gradients(config: dict, magnitude: float, gpu: EmulatedDriver, no_reference: None) -> None:
    model = make(config)
    twin = reference_of(model, config)
    x, y = batch(150)
    y = (magnitude * (y - 0.5)).astype(np.float32)
    expected = twin.model.backward(x, y)
    out, context = model.network.forward(x)
    assert np.abs(out - predict(twin, x)).max() <= 1e-3 * np.abs(out).max()
    given = model.network.backward(context, y)
    assert relative_error(given.params, expected.params) <= GRADIENT
    assert relative_error(given.input, expected.input) <= GRADIENT
    again = model.network.backward(context, to_device(y), input=False)
    assert again.input is None and relative_error(np.asarray(again.params), expected.params) <= GRADIENT
    only_input = model.network.backward(context, y, parameters="ignore")
    assert only_input.params is None
    np.testing.assert_array_equal(only_input.input, given.input)


def test_gradients_accumulate(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    contexts = [model.network.forward(batch(60, seed)[0])[1] for seed in range(3)]
    gradients = [batch(60, seed)[1] - 0.5 for seed in range(3)]
    parts = [model.network.backward(context, g).params.copy() for context, g in zip(contexts, gradients, strict=True)]
    model.network.backward(contexts[0], gradients[0], parameters="overwrite")
    for context, g in zip(contexts[1:], gradients[1:], strict=True):
        total = model.network.backward(context, g, parameters="accumulate").params
    np.testing.assert_allclose(total, sum(parts), rtol=1e-4, atol=1e-6)  # of float32 sums in another order


def test_gradients_accumulate_on_what_the_array_holds(gpu: EmulatedDriver, no_reference: None) -> None:
    """Clipped by its owner meanwhile, on the host."""
    model = make(IDENTITY)
    x, g = batch(20)
    _, context = model.network.forward(x)
    total = model.network.backward(context, g).params
    once = total.copy()
    total *= 0.5
    assert model.network.backward(context, g, parameters="accumulate").params is total
    np.testing.assert_allclose(total, 1.5 * once, rtol=1e-6)  # a rounding of the sum


def test_training_between_forward_and_backward_is_refused(gpu: EmulatedDriver) -> None:
    model = make()
    x, y = batch(20)
    _, context = model.network.forward(x)
    model.trainer.training_step(x, y)
    with pytest.raises((RuntimeError, ValueError), match="param"):
        model.network.backward(context, y)


@pytest.mark.parametrize(
    "encoding", [CONFIG["encoding"], {"otype": "Identity", "scale": 2.0}], ids=["grid", "identity"]
)
def test_bare_encodings(encoding: dict, gpu: EmulatedDriver, no_reference: None) -> None:
    module = tcnn.Encoding(2, encoding, engine="fused")
    twin = ReferenceRuntime(module.spec, module.params, "float16")
    x, _ = batch(77)
    out, context = module.forward(x)
    np.testing.assert_allclose(np.asarray(out, np.float32), predict(twin, x), atol=1e-3)
    gradient = np.random.default_rng(0).normal(size=out.shape).astype(np.float32)
    given, expected = module.backward(context, gradient), twin.model.backward(x, gradient)
    assert relative_error(given.input, expected.input) <= GRADIENT
    if len(module.params):
        assert relative_error(given.params, expected.params) <= GRADIENT


def test_a_bare_network(gpu: EmulatedDriver, no_reference: None) -> None:
    network = tcnn.Network(5, 3, CONFIG["network"], engine="fused")
    trainer = tcnn.Trainer(network, CONFIG["optimizer"], CONFIG["loss"])
    twin, start = ReferenceRuntime(network.spec, network.params, "float16"), network.params
    twin.configure_training(parse_optimizer(CONFIG["optimizer"]), parse_loss(CONFIG["loss"]))
    x, y = batch(90, n_in=5)
    for _ in range(3):
        assert float(trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert np.linalg.norm(network.params - twin.params) <= TRAINED * np.linalg.norm(twin.params - start)


# ---------------------------------------------------------------------------------------- state, memory


def test_parameters_can_be_set(gpu: EmulatedDriver, no_reference: None) -> None:
    """The float16 copy that kernels read follows the float32 master."""
    model = make()
    values = np.random.default_rng(0).normal(size=model.n_params).astype(np.float32)
    model.params = values
    np.testing.assert_array_equal(model.params, values)
    x, _ = batch(50)
    expected = predict(reference_of(model), x)
    assert np.abs(model.predict(x) - expected).max() <= 1e-3 * np.abs(expected).max()


def test_moving_to_the_reference_and_back(gpu: EmulatedDriver) -> None:
    """Parameters, moments, counts, step and learning rate go along, both ways, exactly."""
    model = make(engine="auto")
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    for fused in (True, False, True, False):
        before = model.params, model.network.engine.runtime.optimizer_state()
        model.jit_fusion = fused
        state = model.network.engine.runtime.optimizer_state()
        np.testing.assert_array_equal(model.params, before[0])
        assert state.keys() == before[1].keys()
        for name, value in before[1].items():
            np.testing.assert_array_equal(state[name], value)
        for _ in range(2):
            model.trainer.training_step(x, y)
            step(twin, x, y)
    assert_same_training(model, twin, start)


def test_optimizer_state_of_a_wrong_size_is_refused(gpu: EmulatedDriver) -> None:
    runtime = make().network.engine.runtime
    state = runtime.optimizer_state()
    with pytest.raises(ValueError, match=r"first_moments has shape \(3,\)"):
        runtime.load_optimizer_state(state | {"first_moments": np.zeros(3, np.float32)})


def test_deep_copies_go_their_own_way(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    x, y = batch(70)
    model.trainer.training_step(x, y)
    twin = copy.deepcopy(model)
    assert twin.explain().engine == "fused" and twin.trainer.step == 1
    before = model.params
    first = float(twin.trainer.training_step(x, y))
    np.testing.assert_array_equal(model.params, before)
    assert float(model.trainer.training_step(x, y)) == first
    np.testing.assert_array_equal(model.params, twin.params)


def test_everything_is_freed(gpu: EmulatedDriver) -> None:
    """close() gives all memory back, and a loss that somebody holds keeps its value."""
    model = make()
    x, y = batch(300)
    loss = model.trainer.training_step(x, y)
    model.trainer.training_step(x, y, external_gradient=y)
    _, context = model.network.forward(x)
    model.network.backward(context, y)
    assert gpu.memory.n_allocations > 8
    runtime = model.network.engine.runtime
    runtime.close()
    assert gpu.memory.n_allocations == 0
    assert float(loss) > 0


def test_a_state_that_does_not_fit_changes_nothing(gpu: EmulatedDriver, no_reference: None) -> None:
    """The first of its arrays would fit."""
    model = make(IDENTITY)
    model.trainer.training_step(*batch(20))
    state = model.optimizer.state_dict()
    other = {name: np.ones_like(value) for name, value in state.items()}
    for broken, message in (
        ({}, "optimizer state holds ; Adam needs first_moments, learning_rate, param_steps"),
        (other | {"averages": 1}, "holds .*, averages; Adam needs"),
        (other | {"param_steps": np.ones(3)}, r"param_steps has shape \(3,\), the model needs \(\d+,\)"),
        (other | {"step": "third"}, "invalid literal"),
    ):
        with pytest.raises(ValueError, match=message):
            model.optimizer.load_state_dict(broken)
        for name, value in model.optimizer.state_dict().items():
            np.testing.assert_array_equal(value, state[name])


def test_threads_share_a_model(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """A second thread calls between the moment when a kernel's arguments are set and its launch."""
    second, launch = threading.Thread(), gpu.cuLaunchKernel
    interrupting = False

    def interrupted_launch(*arguments: Any) -> tuple:
        if interrupting and second.ident is None:
            second.start()
            second.join(timeout=0.5)  # it waits its turn
        return launch(*arguments)

    monkeypatch.setattr(gpu, "cuLaunchKernel", interrupted_launch)
    model = make()
    inputs = [batch(size, seed=size)[0] for size in (20, 30)]
    expected, given = [model.network.inference(x) for x in inputs], {}
    second = threading.Thread(target=lambda: given.update({1: model.network.inference(inputs[1])}))
    interrupting = True
    given[0] = model.network.inference(inputs[0])
    second.join(timeout=60)
    for i in range(2):
        np.testing.assert_array_equal(given[i], expected[i])


def test_out_of_memory_leaves_the_model_usable(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    gpu.memory_limit = gpu.memory.allocated + (1 << 20)
    large = batch(400_000)
    for attempt in range(2):
        with pytest.raises(MemoryError, match=r"allocating \d+\.\d MiB on device 0: CUDA_ERROR_OUT_OF_MEMORY"):
            model.trainer.training_step(*large)
        with pytest.raises(MemoryError, match="MiB"):
            model.network.inference(large[0])
        assert model.explain().engine == "fused"
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
        assert model.trainer.step == attempt + 1
    assert_same_training(model, twin, start)
    with pytest.raises(MemoryError, match="MiB"):
        make(CONFIG | {"encoding": {"otype": "HashGrid", "log2_hashmap_size": 16}})


def test_a_gradient_that_could_not_be_collected_is_forgotten(gpu: EmulatedDriver, no_reference: None) -> None:
    """Memory for dL/dparams is missing when the gradient kernel has already added to the table's gradient."""
    model = make(CONFIG | {"encoding": {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 10}})
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    _, context = model.network.forward(x)
    model.network.backward(context, y, parameters="ignore")  # the other buffers are there
    model.network.backward(context, y, input=False)  # and the kernel with a table gradient
    workspace = model.network.engine.runtime.model.workspace
    workspace._buffers.pop("output gradients").free()
    gpu.memory_limit = gpu.memory.allocated
    n_launches = len(gpu.launches)
    with pytest.raises(MemoryError, match="MiB"):
        model.network.backward(context, y, input=False)
    assert [name for name, _, _ in gpu.launches[n_launches:]][-1] == "gradient"
    model.trainer.training_step(x, y)
    step(twin, x, y)
    assert_same_training(model, twin, start)


def test_a_kernel_of_which_no_block_fits_is_refused(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuOccupancyMaxActiveBlocksPerMultiprocessor", lambda *of: (CUresult.CUDA_SUCCESS, 0))
    with pytest.raises(EngineUnavailable, match="kernel inference does not fit a multiprocessor"):
        make().network.inference(batch(20)[0])


def test_a_failed_launch_names_the_kernel(gpu: EmulatedDriver) -> None:
    model = make()
    x, y = batch(20)
    gpu.failing["cuLaunchKernel"] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(CudaError, match="launching kernel gradient: CUDA_ERROR_LAUNCH_FAILED: launch failed"):
        model.trainer.training_step(x, y)


# ---------------------------------------------------------------------------------------------- streams


def test_streams(gpu: EmulatedDriver, no_reference: None) -> None:
    """Work on three streams in turn equals that on one: nothing is read before it is written, although here every
    stream stands still until somebody waits for it. (Whatever frees memory waits for all: nothing may be freed.)"""
    batches = [[to_device(a) for a in batch(70, seed)] for seed in range(6)]
    x = batches[0][0]
    results = []
    for streams in ((0,), (7, 9, 0)):
        model = make()
        outs = [to_device(np.empty((70, 3), np.float32)) for _ in batches]
        losses = []
        for i, given in enumerate(batches):
            losses.append(model.trainer.training_step(*given, stream=streams[i % len(streams)]))
            model.network.inference(x, out=outs[i], stream=streams[(i + 1) % len(streams)])
        assert gpu._queues[streams[0]], "somebody has waited"
        gpu.run_everything()
        results.append([*map(float, losses), *(out.numpy() for out in outs), model.params])
    assert {stream for _, _, stream in gpu.launches} == {0, 7, 9}
    for one, several in zip(*results, strict=True):
        np.testing.assert_array_equal(one, several)


def test_an_arrays_own_stream_is_waited_for(gpu: EmulatedDriver, no_reference: None) -> None:
    """The input is written on stream 5 by somebody else; the model works on stream 3."""
    model = make()
    x, _ = batch(70)
    expected = model.network.inference(x)
    memory = to_device(np.full_like(x, np.nan))
    gpu.cuMemcpyHtoDAsync(memory.__cuda_array_interface__["data"][0], x.ctypes.data, x.nbytes, 5)

    class OnStream:
        __cuda_array_interface__ = memory.__cuda_array_interface__ | {"stream": 5}

    out = np.empty_like(expected)
    model.network.inference(OnStream(), out=out, stream=3)
    np.testing.assert_array_equal(out, expected)


# ------------------------------------------------------------------------------------ plans and failures


def test_plans_that_spill_give_way(gpu: EmulatedDriver, no_reference: None) -> None:
    """The first candidate that spills 64 bytes or fewer is taken."""
    seen = []

    def spills(description: str) -> int:
        if description.startswith("single"):
            seen.append(description)
            return {1: 65, 2: 4000}.get(len(seen), 64)
        return 0

    gpu.compiler.spills = spills
    model = make()
    x, y = batch(20)
    model.trainer.training_step(x, y)
    (gradient,) = [kernel for kernel in model.explain().kernels if kernel.name == "gradient"]
    assert len(set(seen)) == 3 and gradient.spill_bytes == 64


def test_when_every_plan_spills_the_reason_is_told(gpu: EmulatedDriver) -> None:
    gpu.compiler.spills = lambda description: 128
    model = make()
    with pytest.raises(EngineUnavailable, match="no kernel plan can be used: .*128 bytes spilled"):
        model.network.inference(batch(20)[0])


def test_kernels_are_loaded_once(gpu: EmulatedDriver) -> None:
    model = make()
    x, y = batch(20)
    model.trainer.training_step(x, y)
    made = len(gpu.compiler.made)
    for size in (20, 30, 300):
        model.trainer.training_step(*batch(size))
    assert len(gpu.compiler.made) == made


FUSED = ("single", "propagate")
"""Parts of the descriptions of a gradient program's kernels, but for those that go `LAYER_BY_LAYER`."""


@pytest.mark.parametrize(("failing", "kernels"), [
    (("single",), {"propagate", "weight_gradient"}), (FUSED, {"layer_backward", "layer_gradient"}),
])  # fmt: skip
def test_plans_that_do_not_compile_give_way(
    failing: tuple, kernels: set, gpu: EmulatedDriver, no_reference: None
) -> None:
    gpu.compiler.fails = failing
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    model.trainer.training_step(x, y)
    step(twin, x, y)
    assert_same_training(model, twin, start)
    assert kernels <= {kernel.name for kernel in model.explain().kernels}


@pytest.mark.parametrize(
    "failing", [(*FUSED, LAYER_BY_LAYER), ("optimizer AdamSpec",), ("inference", LAYER_BY_LAYER)], ids=str
)
def test_a_kernel_that_does_not_compile_carries_everything_over(failing: tuple, gpu: EmulatedDriver) -> None:
    """Three fused steps, then a call for which a kernel is missing: one warning, and the same call goes on in the
    reference from the same parameters and moments."""
    model = make(engine="auto")
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    for _ in range(3):
        model.trainer.training_step(x, y)
        step(twin, x, y)
    gpu.compiler.fails = failing
    model.network.engine.runtime.model.programs.clear()
    before = model.params
    with pytest.warns(tcnn.JitFusionWarning, match="NvvmError: not today") as caught:
        if "inference" in failing:
            y_out = model.predict(x)
            np.testing.assert_array_equal(y_out, predict(ReferenceRuntime(twin.spec, before, "float16"), x))
        else:
            loss = model.trainer.training_step(x, y)
            assert float(loss) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert len(caught) == 1 and model.explain().engine == "reference"
    model.trainer.training_step(x, y)
    step(twin, x, y)
    assert_same_training(model, twin, start)


def test_strict_models_raise_instead(gpu: EmulatedDriver) -> None:
    gpu.compiler.fails = (*FUSED, LAYER_BY_LAYER)
    model = make()
    with pytest.raises(EngineUnavailable, match="did not compile"):
        model.trainer.training_step(*batch(20))


def test_what_has_no_fused_kernel_is_named(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loss has one; without it, its name would be told."""
    monkeypatch.delitem(losses.LOSSES, "RelativeL2")
    config = CONFIG | {"loss": {"otype": "RelativeL2"}}
    with pytest.raises(EngineUnavailable, match="the loss RelativeL2 has no fused kernel yet"):
        tcnn.create_from_config(3, 3, config, engine="fused")


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"dtype": "float32", "deterministic": True}])
def test_options_without_fused_kernels_are_refused(options: dict, gpu: EmulatedDriver) -> None:
    with pytest.raises(EngineUnavailable, match=f"{next(iter(options.values()))}.* has none yet"):
        tcnn.create_from_config(2, 3, CONFIG, engine="fused", **options)


# ----------------------------------------------------------------------------------------- device status


def test_a_usable_device(gpu: EmulatedDriver) -> None:
    status = device_status(0)
    assert status.usable and status.name == "Emulated GPU" and status.compute_capability == (9, 0)
    assert status.driver_version == (13, 0) and tcnn.supports_jit_fusion()


def test_a_device_that_is_not_there(gpu: EmulatedDriver) -> None:
    status = device_status(3)
    assert not status.usable and status.reason == "there is no CUDA device 3: this machine has 1"
    assert not status.no_device  # there are devices, so somebody should hear of it


@pytest.mark.parametrize(("options", "reason"), [
    ({"version": 11080}, r"the NVIDIA driver supports CUDA 11.8; 12.0 is needed"),
    ({"capability": (7, 0)}, r"compute capability 7.0 has no usable tensor cores; 7.5 is needed"),
], ids=["driver", "chip"])  # fmt: skip
def test_devices_that_cannot_be_used(options: dict, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(EmulatedDriver(**options), monkeypatch):
        status = device_status(0)
        assert (status.usable, status.no_device, status.reason) == (False, False, reason)
        assert status.name == "Emulated GPU"
        with pytest.warns(tcnn.JitFusionWarning, match=reason.replace(".", r"\.")):
            model = tcnn.create_from_config(2, 3, CONFIG)
        assert model.explain().engine == "reference"
        with pytest.raises(EngineUnavailable, match="is needed"):
            tcnn.create_from_config(2, 3, CONFIG, engine="fused")


def test_a_context_that_cannot_be_made(gpu: EmulatedDriver) -> None:
    gpu.failing["cuDevicePrimaryCtxRetain"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    status = device_status(0)
    assert not status.usable and not status.no_device
    assert status.reason.startswith("making a context on device 0: CUDA_ERROR_OUT_OF_MEMORY")


class TestBindings:
    """`driver.bindings` itself, with a module of the emulated driver in place of cuda.bindings."""

    @pytest.fixture
    def bound(self, monkeypatch: pytest.MonkeyPatch):
        emulated = EmulatedDriver()
        package = type(sys)("cuda.bindings")
        package.driver = emulated
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)
        return emulated

    def reason(self) -> EngineUnavailable:
        with pytest.raises(EngineUnavailable) as caught:
            driver.bindings.__wrapped__()
        return caught.value

    def test_they_are_initialised(self, bound: EmulatedDriver) -> None:
        assert driver.bindings.__wrapped__() is bound

    def test_packages_that_are_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        error = self.reason()
        assert "the CUDA packages are not installed" in str(error) and "pip install" in str(error) and error.no_device

    def test_no_driver(self, bound: EmulatedDriver) -> None:
        def raises(flags):
            raise RuntimeError("libcuda.so.1: cannot open shared object file")

        bound.cuInit = raises
        error = self.reason()
        assert "there is no NVIDIA driver on this machine" in str(error) and error.no_device

    def test_no_device(self, bound: EmulatedDriver) -> None:
        bound.failing["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
        error = self.reason()
        assert str(error) == "there is no NVIDIA device on this machine" and error.no_device

    def test_a_driver_that_does_not_work(self, bound: EmulatedDriver) -> None:
        bound.failing["cuInit"] = CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        error = self.reason()
        assert "could not be initialised: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in str(error) and not error.no_device
