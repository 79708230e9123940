"""The real engine code, from `create_from_config` down to packed launch arguments, on an emulated CUDA driver.

Training, inference and gradients, compared with the reference of the same precision (emulated_models.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from emulated_driver import EmulatedDriver
from emulated_models import (
    CONFIG,
    GRADIENT,
    IDENTITY,
    TRAINED,
    assert_same_backward,
    assert_same_training,
    batch,
    make,
    predict,
    reference_of,
    step,
)
from golden_case import relative_error

import numba_tcnn as tcnn
from numba_tcnn.config import parse_loss, parse_optimizer
from numba_tcnn.fused import DeviceArray, gradient_programs, network_plans, pending_losses, to_device
from numba_tcnn.reference.engine import ReferenceRuntime

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
    monkeypatch.setattr(network_plans, "single_plans", lambda *arguments, **options: [])
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
    assert_same_backward(model, twin, x, y)


@pytest.mark.parametrize(("activation", "n_launches"), [("SiLU", 4), ("ReLU", 2)])
def test_training_in_phases(
    activation: str, n_launches: int, gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, no_reference: None
) -> None:
    """128 wide, in chunks of one wave of blocks, the last one shorter; where nothing is saved, in one."""
    monkeypatch.setattr(gradient_programs, "IMAGE_BYTES", 1)
    config = CONFIG | {"network": {"otype": "FullyFusedMLP", "n_neurons": 128, "n_hidden_layers": 1}}
    config["network"] |= {"activation": activation}
    model = make(config)
    twin, start = reference_of(model, config), model.params
    for seed, size in enumerate((600, 100)):
        x, y = batch(size, seed)
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert_same_training(model, twin, start)
    assert sum(name == "phased_gradient" for name, _, _ in gpu.launches) == n_launches
    assert_same_backward(model, twin, x, y)


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
    """Six places for eight losses, read in the end, backwards; two are never read."""
    monkeypatch.setattr(pending_losses, "PAGE_SLOTS", 3)
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
    monkeypatch.setattr(pending_losses, "PAGE_SLOTS", 2)
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


def test_who_keeps_the_last_loss_only_does_not_wait(gpu, monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    monkeypatch.setattr(pending_losses, "PAGE_SLOTS", 2)
    model = make()
    given = tuple(to_device(a) for a in batch(20))
    monkeypatch.delattr(EmulatedDriver, "cuMemcpyDtoHAsync")
    loss = None
    for _ in range(11):
        loss = model.trainer.training_step(*given)
    assert loss is not None


def test_the_loss_is_not_read_before_it_is_asked_for(gpu: EmulatedDriver, no_reference: None) -> None:
    """On device arrays a step only queues work."""
    model = make()
    x, y = (to_device(a) for a in batch(20))
    model.trainer.training_step(x, y)
    gpu.run_everything()
    loss = model.trainer.training_step(x, y)
    assert gpu._queues[0], "a step waited for the device"
    value = float(loss)
    assert value > 0 and not gpu._queues[0]
    model.trainer.training_step(x, y)
    assert float(loss) == value and gpu._queues[0], "a loss was read a second time"


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_with_gradients_that_are_not_finite_are_skipped(
    deterministic: bool, gpu: EmulatedDriver, no_reference: None
) -> None:
    """The first and the third step; the second and fourth are as if those had never been, but for the count."""
    model = make(deterministic=deterministic)
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
