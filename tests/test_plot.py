"""The error between the engines: the numbers, the figure, and what stands in for fused without a device."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
from fake_engine import FakeFusedEngine

import numba_tcnn as tcnn
import numba_tcnn.fused
from numba_tcnn import cli, plot
from numba_tcnn.engine_selection import EngineOptions, SelectedEngine

CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 8, "base_resolution": 4},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 2},
}
NAMES = [
    "outputs",
    "input gradient",
    "layer0.weight",
    "layer1.weight",
    "layer2.weight",
    "grid.level0",
    "grid.level1",
    "grid.level2",
]


@pytest.fixture
def no_device(monkeypatch):
    status = types.SimpleNamespace(usable=False, reason="no NVIDIA device was found", no_device=True)
    monkeypatch.setattr(numba_tcnn.fused, "device_status", lambda device: status)


@pytest.fixture
def fake_fused(monkeypatch):
    """A fused engine that computes in float64 whatever it is asked for: known to differ from the reference."""
    engine = FakeFusedEngine()

    def create_runtime(spec, params, *, dtype, **options):
        return engine.create_runtime(spec, params, dtype="float64", **options)

    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", create_runtime)
    monkeypatch.setattr(
        numba_tcnn.fused, "device_status", lambda device: types.SimpleNamespace(usable=True), raising=False
    )


@pytest.fixture
def model(rng):
    model = tcnn.create_from_config(2, 3, CONFIG, engine="reference")
    model.params = model.params + 0.3 * rng.standard_normal(model.n_params)
    return model


def test_relative_error():
    a, b = np.array([3.0, 4.0]), np.array([0.0, 0.0])
    assert plot.relative_error(b, a) == 1
    assert plot.relative_error(a * 1.01, a) == pytest.approx(0.01)
    assert plot.relative_error(b, b) == 0
    assert plot.relative_error(a, b) == float("inf")


def test_without_a_device_float16_rounding_is_measured(no_device, model, rng):
    x = rng.random((400, 2))
    errors = tcnn.plot.engine_errors(model, x)
    assert list(errors) == NAMES
    # float16 has 11 bits, so a rounded value is off by up to 2^-12; sums of them by some multiple of that. In gradients
    # about one ReLU unit in a thousand is near zero and switches, which changes a norm by √(1/1000).
    assert all(1e-5 < error < 0.1 for error in errors.values())
    assert errors["outputs"] < 2e-3
    figure = tcnn.plot.engine_error(model, x)
    assert not figure.legends  # no tolerance: nothing is judged
    title = figure.axes[0].get_title(loc="left")
    assert title == "No fused engine here: the reference in float16 against the reference in float32"


def test_errors_are_those_of_the_two_runs(no_device, model, rng):
    """The figure in `engine_errors` recomputed from gradients of two models made through the public API."""
    x, y = rng.random((100, 2)), rng.random((100, 3))
    grads = {}
    prediction = model.network.inference(x)
    _, dL_dy = model.loss.evaluate(prediction, y)
    for dtype in ("float16", "float32"):
        twin = tcnn.create_from_config(2, 3, CONFIG, engine="reference", dtype=dtype)
        twin.params = model.params
        output, context = twin.network.forward(x)
        grads[dtype] = (output, twin.network.backward(context, dL_dy))
    errors = plot.engine_errors(model, x, y)
    (rounded_y, rounded), (exact_y, exact) = grads["float16"], grads["float32"]
    assert errors["outputs"] == pytest.approx(plot.relative_error(rounded_y, exact_y), rel=1e-6)
    assert errors["input gradient"] == pytest.approx(plot.relative_error(rounded.input, exact.input), rel=1e-6)
    first = slice(0, 32 * 16)  # layer0.weight: 32 neurons, 6 features padded to 16
    assert errors["layer0.weight"] == pytest.approx(
        plot.relative_error(rounded.params[first], exact.params[first]), rel=1e-6
    )


def test_with_a_device_fused_is_compared_with_the_reference_of_its_dtype(fake_fused, model, rng):
    comparison = plot.compare_engines(model, rng.random((200, 2)))
    assert comparison.title == "Fused against reference, both in float16, 200 samples"
    assert list(comparison.errors) == list(comparison.to_float32) == NAMES
    # the fake computes in float64: a float16 rounding away from the reference, a float32 rounding from the exact one
    assert all(error > 1e-5 for error in comparison.errors.values())
    assert all(error < 1e-5 for error in comparison.to_float32.values())
    labels = [text.get_text() for text in plot.draw(comparison).legends[0].get_texts()]
    assert "distance to the float32 reference" in labels


def test_the_figure_has_a_bar_for_every_tensor():
    errors = {"outputs": 1e-3, "input gradient": 0.02, "layer0.weight": 0.0, "grid.level0": float("inf")}
    figure = plot.draw(plot.Comparison("title", errors, 5e-3, None))
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(errors)
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    np.testing.assert_allclose(ends, [1e-3, 0.02])
    assert [bar.get_facecolor() == axes.patches[0].get_facecolor() for bar in axes.patches] == [True, False]
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts == ["equal to the bit", "inf: the reference is zero or not finite"]


def test_the_comparison_leaves_the_model_alone(no_device, model, rng):
    x, y = rng.random((50, 2)), rng.random((50, 3))
    before = model.params
    plot.engine_errors(model, x, y)
    np.testing.assert_array_equal(model.params, before)
    assert model.trainer.step == 0


def test_modules_without_a_loss_and_encodings_alone(no_device, rng):
    encoding = tcnn.Encoding(2, CONFIG["encoding"], engine="reference")
    x = rng.random((50, 2))
    assert list(plot.engine_errors(encoding, x)) == ["outputs", "input gradient", *NAMES[5:]]
    with pytest.raises(TypeError, match="y needs a model with a loss"):
        plot.engine_errors(encoding, x, np.zeros((50, 6)))
    with pytest.raises(ValueError, match="no rows"):
        plot.engine_errors(encoding, x[:0])


def test_the_image_command_writes_the_comparison(no_device, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    photo = tmp_path / "photo.npy"
    np.save(photo, np.random.default_rng(0).random((12, 10, 3)))
    arguments = ["image", str(photo), "--config", str(config), "--engine", "reference", "--steps", "3", "--batch", "32"]
    assert cli.main([*arguments, "--compare", "--out", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert "engine_error.png" in record["files"] and (tmp_path / "out" / "engine_error.png").stat().st_size > 5000
    assert set(NAMES) < set(record["engine_errors"])


@pytest.mark.gpu
def test_fused_kernels_agree_with_the_reference(rng):
    model = tcnn.create_from_config(2, 3, CONFIG, strict=True)
    assert model.explain().engine == "fused"
    model.params = model.params + 0.3 * rng.standard_normal(model.n_params)
    errors = plot.engine_errors(model, rng.random((1000, 2)))
    assert max(errors.values()) <= plot.TOLERANCE, errors


def test_a_comparison_never_falls_back(fake_fused, model, rng, monkeypatch):
    """strict: errors of a fused engine that gave up would be errors of the reference against itself."""
    options = EngineOptions(engine="fused", strict=True)
    engine = FakeFusedEngine("inference")
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", engine.create_runtime)
    assert SelectedEngine(model.network.spec, model.params, options).options.strictly_fused
    with pytest.raises(tcnn.EngineUnavailable):
        plot.engine_errors(model, rng.random((10, 2)))
