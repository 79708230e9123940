"""The engine in bfloat16 and float32 on the emulated driver: training, gradients, state, and chips that can't."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_driver import EmulatedDriver, installed
from emulated_models import CONFIG, batch, predict, step
from golden_case import relative_error

import numba_tcnn as tcnn
from numba_tcnn.arrays import view
from numba_tcnn.config import parse_loss, parse_optimizer
from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused import to_device
from numba_tcnn.reference.engine import ReferenceRuntime

REFERENCE = {"bfloat16": "bfloat16", "float32": "float64"}
TRAINED = {"bfloat16": 3e-3, "float32": 1e-4}
"""Distance to the reference over the way that training went: Adam divides each gradient by its own size, so that the
smallest gradients count as much as the others, at their own precision; see also emulated_models.py."""
GRADIENT = {"bfloat16": 6e-4, "float32": 1e-5}


def make(dtype: str, config: dict = CONFIG) -> tcnn.Model:
    model = tcnn.create_from_config(2, 3, config, engine="fused", dtype=dtype)
    assert model.explain().engine == "fused" and model.explain().dtype.startswith(dtype)
    return model


def reference_of(model: tcnn.Model, config: dict = CONFIG) -> ReferenceRuntime:
    twin = ReferenceRuntime(model.network.spec, model.params, REFERENCE[model.network.dtype])
    twin.configure_training(parse_optimizer(config["optimizer"]), parse_loss(config["loss"]))
    return twin


@pytest.fixture(params=list(REFERENCE))
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def test_training_inference_and_gradients(dtype: str, gpu: EmulatedDriver, no_reference: None) -> None:
    """Steps of growing and shrinking batches; the copy that kernels read follows the master, or is the master."""
    model = make(dtype)
    twin, start = reference_of(model), model.params
    for i, size in enumerate((40, 300, 1, 129)):
        x, y = batch(size, seed=i)
        given = (x, y) if i % 2 else (to_device(x), to_device(y))
        assert float(model.trainer.training_step(*given)) == pytest.approx(step(twin, x, y), rel=1e-4)
    way, distance = (np.linalg.norm(twin.params - other) for other in (start, model.params))
    assert way > 0 and distance <= TRAINED[dtype] * way, f"{distance / way:.1e} of the way from the reference"
    model.params = twin.params.astype(np.float32)
    twin.set_params(model.params)
    x, y = batch(70)
    expected = predict(twin, x)
    outputs = model.predict(x)
    assert relative_error(outputs, expected) <= GRADIENT[dtype]
    np.testing.assert_array_equal(model.network.inference(x, dtype="float16"), outputs.astype(np.float16))
    _, context = model.network.forward(x)
    for magnitude in (1.0, 1e-9, 1e9):
        given = model.network.backward(context, np.float32(magnitude) * (y - 0.5), parameters="overwrite", input=True)
        wanted = twin.model.backward(x, np.float32(magnitude) * (y - 0.5))
        assert relative_error(given.params, wanted.params) <= GRADIENT[dtype]
        assert relative_error(given.input, wanted.input) <= GRADIENT[dtype]
    assert not any("scales" in kernel.name for kernel in model.explain().kernels)


def test_steps_that_are_not_finite_are_skipped(dtype: str, gpu: EmulatedDriver, no_reference: None) -> None:
    model = make(dtype)
    x, y = batch(70)
    before = model.params
    y[3, 1] = np.nan
    model.trainer.training_step(x, y)
    np.testing.assert_array_equal(model.params, before)
    gradient = np.ones_like(y)
    gradient[5, 0] = np.inf
    model.trainer.training_step(x, None, external_gradient=gradient)
    np.testing.assert_array_equal(model.params, before)
    gradient[5, 0] = 1e20
    model.trainer.training_step(x, None, external_gradient=gradient)
    assert model.trainer.skipped_steps == 2 and np.isfinite(model.params).all()
    assert not np.array_equal(model.params, before)


def test_models_inside_kernels_are_refused_by_name(dtype: str, gpu: EmulatedDriver, no_reference: None) -> None:
    with pytest.raises(EngineUnavailable, match=f"device functions compute in float16; {dtype} has none yet"):
        make(dtype).network.device_function()


def test_memory_is_given_back(dtype: str, monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    with installed(EmulatedDriver(), monkeypatch) as gpu:
        model = make(dtype)
        model.trainer.training_step(*batch(40))
        assert gpu.memory.n_allocations > 0
        model.network.engine.runtime.close()
        assert gpu.memory.n_allocations == 0
        del model  # while its driver is there


def test_chips_that_multiply_no_bfloat16_say_so(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(EmulatedDriver((7, 5)), monkeypatch):
        with pytest.raises(EngineUnavailable, match=rf"{dtype} kernels need compute capability 8\.0"):
            make(dtype)
        with pytest.warns(tcnn.JitFusionWarning, match=rf"{dtype} kernels need compute capability 8\.0"):
            model = tcnn.create_from_config(2, 3, CONFIG, dtype=dtype)
        assert model.explain().engine == "reference"


def test_turing_trains_in_float16(monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """By products 8 deep, the only ones it has: the emulator refuses others."""
    with installed(EmulatedDriver((7, 5)), monkeypatch):
        model = tcnn.create_from_config(2, 3, CONFIG, engine="fused")
        twin = ReferenceRuntime(model.network.spec, model.params, "float16")
        x, y = batch(150)
        out = np.empty((150, 3), np.float32)
        twin.inference(view(x), view(out))
        assert relative_error(model.predict(x), out) <= 1e-3
        expected_loss, _ = twin.model.loss_and_gradients(x, y, parse_loss(CONFIG["loss"]))
        assert float(model.trainer.training_step(x, y, run_optimizer=False)) == pytest.approx(expected_loss, rel=1e-4)
        _, context = model.network.forward(x)
        given = model.network.backward(context, y, parameters="overwrite", input=True)
        expected = twin.model.backward(x, y)
        assert relative_error(given.params, expected.params) <= 1e-3
        assert relative_error(given.input, expected.input) <= 1e-3
        del model, context


def test_kernels_of_dtypes_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(EmulatedDriver(), monkeypatch) as gpu:
        descriptions = {}
        for dtype in ("float16", "bfloat16", "float32"):
            gpu.compiler.descriptions.clear()
            model = make(dtype)
            model.trainer.training_step(*batch(40))
            model.predict(batch(40)[0])
            descriptions[dtype] = set(gpu.compiler.descriptions)
            del model
        assert all(len(texts) == 3 for texts in descriptions.values())
        assert len(set.union(*descriptions.values())) == 9
