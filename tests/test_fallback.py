"""What happens where the fused engine can't go on: who is told, what carries over, and what `strict` changes."""

from __future__ import annotations

import copy
import types
import warnings

import numpy as np
import pytest
from fake_arrays import FAKES, install
from fake_engine import FakeFusedEngine

import numba_tcnn as tcnn
import numba_tcnn.fused

CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 6, "base_resolution": 4},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> FakeFusedEngine:
    engine = FakeFusedEngine()
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", engine.create_runtime)
    return engine


@pytest.fixture
def data(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.random((50, 2), np.float32), rng.random((50, 3), np.float32)


def make(**options) -> tcnn.Model:
    return tcnn.create_from_config(2, 3, CONFIG, **options)


def trained_on_the_reference(data, steps: int) -> tcnn.Model:
    model = make(engine="reference")
    for _ in range(steps):
        model.trainer.training_step(*data)
    return model


@pytest.mark.parametrize("usable", [True, False])
def test_supports_jit_fusion_asks_the_device(monkeypatch, usable):
    status = {3: types.SimpleNamespace(usable=usable)}
    monkeypatch.setattr(numba_tcnn.fused, "device_status", status.__getitem__)
    assert tcnn.supports_jit_fusion(3) is usable


def test_a_usable_device_is_taken(fused):
    model = make()
    assert model.jit_fusion and model.explain().reason == "fused kernels run on this device"


def test_without_any_device_the_reference_runs_silently(fused):
    fused.fails_at, fused.error.no_device = "create_runtime", True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make()
    assert not model.jit_fusion
    assert str(model.explain()).startswith("engine: reference (ptxas said no)")


def test_an_unusable_device_is_told_of_once(fused, data):
    fused.fails_at = "create_runtime"
    with pytest.warns(tcnn.JitFusionWarning, match="NumPy reference computes this model: ptxas said no") as caught:
        model = make()
        model.trainer.training_step(*data)
        model.predict(data[0])
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the user's line, not one of ours
    assert not model.jit_fusion


@pytest.mark.parametrize("options", [{"strict": True}, {"engine": "fused"}, {"engine": "fused", "strict": True}])
@pytest.mark.parametrize("no_device", [False, True])
def test_strict_and_fused_raise_at_construction(fused, options, no_device):
    fused.fails_at, fused.error.no_device = "create_runtime", no_device
    with pytest.raises(tcnn.EngineUnavailable, match="ptxas said no"):
        make(**options)


def test_strict_does_not_touch_a_reference_that_was_asked_for(fused):
    fused.fails_at = "create_runtime"
    assert make(engine="reference", strict=True).explain().engine == "reference"


def test_float64_belongs_to_the_reference(fused):
    model = make(dtype="float64")
    assert not model.jit_fusion and model.explain().reason == "only the reference computes in float64"


@pytest.mark.parametrize("operation", ["training_step", "inference", "backward"])
def test_a_kernel_that_fails_at_first_use_carries_everything_over(fused, data, operation):
    """Ten fused steps, then a failing call: the run equals one that was the reference's from the start, to the bit."""
    x, y = data
    model = make()
    for _ in range(10):
        model.trainer.training_step(x, y)
    fused.made[0].__dict__["fails_at"] = operation
    expected = trained_on_the_reference(data, 10)
    with pytest.warns(tcnn.JitFusionWarning, match="ptxas said no") as caught:
        if operation == "training_step":
            loss, expected_loss = (m.trainer.training_step(x, y) for m in (model, expected))
            assert float(loss) == float(expected_loss)
        elif operation == "inference":
            np.testing.assert_array_equal(model.predict(x), expected.predict(x))
        else:
            fused.made[0].__dict__["fails_at"] = None
            contexts = [m.network.forward(x)[1] for m in (model, expected)]
            fused.made[0].__dict__["fails_at"] = "backward"
            given, wanted = (
                m.network.backward(context, y) for m, context in zip((model, expected), contexts, strict=True)
            )
            np.testing.assert_array_equal(given.params, wanted.params)
            np.testing.assert_array_equal(given.input, wanted.input)
    assert len(caught) == 1
    assert not model.jit_fusion and model.explain().reason == "ptxas said no"
    assert fused.made[0].closed
    assert (model.trainer.step, model.trainer.learning_rate) == (expected.trainer.step, 1e-2)
    model.trainer.training_step(x, y)
    expected.trainer.training_step(x, y)
    np.testing.assert_array_equal(model.params, expected.params)


def test_an_optimizer_that_fused_lacks_moves_the_model_at_construction(fused, data):
    fused.fails_at = "configure_training"
    with pytest.warns(tcnn.JitFusionWarning):
        model = make()
    assert not model.jit_fusion
    assert np.isfinite(float(model.trainer.training_step(*data)))


@pytest.mark.parametrize("options", [{"strict": True}, {"engine": "fused"}])
def test_strict_raises_at_first_use_and_leaves_the_model_as_it_was(fused, data, options):
    model = make(**options)
    before = model.params
    fused.made[0].__dict__["fails_at"] = "training_step"
    with pytest.raises(tcnn.EngineUnavailable, match="ptxas said no"):
        model.trainer.training_step(*data)
    assert model.jit_fusion
    np.testing.assert_array_equal(model.params, before)


def test_other_errors_are_not_a_reason_to_fall_back(fused, data):
    model = make()
    fused.made[0].__dict__.update(fails_at="training_step", error=MemoryError("3 GB asked for, 1 GB free"))
    with pytest.raises(MemoryError, match="3 GB"):
        model.trainer.training_step(*data)
    assert model.jit_fusion


def test_jit_fusion_can_be_switched_off_and_on_in_mid_training(fused, data):
    model = make()
    expected = trained_on_the_reference(data, 9)
    for wanted in (True, False, True):
        model.jit_fusion = wanted
        assert model.jit_fusion == wanted
        for _ in range(3):
            model.trainer.training_step(*data)
    np.testing.assert_array_equal(model.params, expected.params)
    assert len(fused.made) == 2 and fused.made[0].closed
    model.trainer.learning_rate = 0.5
    model.trainer.jit_fusion = False
    assert model.trainer.learning_rate == 0.5 and model.trainer.step == 9
    assert model.explain().reason == "jit_fusion was set to False"


def test_asking_a_strict_model_for_fusion_raises(fused):
    model = make(engine="reference", strict=True)
    fused.fails_at = "create_runtime"
    with pytest.raises(tcnn.EngineUnavailable, match="ptxas said no"):
        model.jit_fusion = True
    assert not model.jit_fusion


@pytest.mark.parametrize("no_device", [False, True])
def test_asking_for_fusion_warns_even_without_a_device(fused, no_device):
    model = make(engine="reference")
    fused.fails_at, fused.error.no_device = "create_runtime", no_device
    with pytest.warns(tcnn.JitFusionWarning, match="ptxas said no"):
        model.jit_fusion = True
    assert not model.jit_fusion
    fused.fails_at = None
    model.jit_fusion = True
    assert model.jit_fusion


def test_skipped_steps_are_counted_across_engines(fused, data):
    x, y = data
    model = make()
    with np.errstate(all="ignore"):
        model.trainer.training_step(x, np.full_like(y, np.inf))
        model.jit_fusion = False
        model.trainer.training_step(x, np.full_like(y, np.inf))
    assert model.trainer.skipped_steps == 2 and model.trainer.step == 2
    assert copy.deepcopy(model).trainer.skipped_steps == 2


def test_contexts_survive_a_fallback(fused, data):
    x, y = data
    model = make()
    _, context = model.network.forward(x)
    model.jit_fusion = False
    assert np.isfinite(model.network.backward(context, y).params).all()


@pytest.mark.parametrize("kind", sorted(FAKES))
def test_device_arrays_go_on_in_the_reference(fused, data, kind, monkeypatch):
    """Input on a device, output allocated there for the fused kernel, and then the kernel fails."""
    install(monkeypatch)
    x, y = data
    model = make()
    expected = model.predict(x)
    fused.made[0].__dict__["fails_at"] = "inference"
    with pytest.warns(tcnn.JitFusionWarning):
        result = model.network.inference(FAKES[kind](x))
    np.testing.assert_array_equal(result.memory, expected)
    loss = model.trainer.training_step(FAKES[kind](x), FAKES[kind](y))
    assert float(loss) == float(trained_on_the_reference(data, 0).trainer.training_step(x, y))


def test_an_array_on_another_device_is_named(fused, data, monkeypatch):
    install(monkeypatch)
    model = make()
    with pytest.raises(ValueError, match="an array is on CUDA device 1, the model on device 0"):
        model.network.inference(FAKES["cupy"](data[0], 1))


def test_the_stream_of_the_input_is_the_stream_of_the_launch(fused, data, monkeypatch):
    install(monkeypatch)
    seen = []
    model = make(strict=True)

    class Recorder:
        name = "fused"

        def inference(self, x, out, *, training_params, stream):
            seen.append(stream)

    model.network.engine.runtime = Recorder()
    model.network.inference(FAKES["torch"](data[0]))
    model.network.inference(FAKES["torch"](data[0]), stream=5)
    model.network.inference(data[0])
    assert seen == [77, 5, None]


def test_deep_copies_stay_on_their_engine(fused, data):
    model = make()
    model.trainer.training_step(*data)
    twin = copy.deepcopy(model)
    assert twin.jit_fusion and len(fused.made) == 2
    for m in (model, twin):
        m.trainer.training_step(*data)
    np.testing.assert_array_equal(twin.params, model.params)
