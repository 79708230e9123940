"""Losses as a user meets them: `create_loss(...).evaluate`, and in a Trainer."""

from __future__ import annotations

import numpy as np
import pytest

import numba_tcnn as tcnn
from numba_tcnn.specs import LOSSES

NETWORK = {"otype": "CutlassMLP", "n_neurons": 16, "n_hidden_layers": 1}
SGD_LIKE = {"otype": "Adam", "beta1": 0.0, "l2_reg": 0.0}
"""After one step Adam's first moments are the gradient itself."""


def gradient_of_a_step(config: dict, loss: dict | str, x, y, n_out: int = 3, **arrays) -> np.ndarray:
    module = tcnn.Network(2, n_out, config, dtype="float32", engine="reference")
    trainer = tcnn.Trainer(module, SGD_LIKE, loss)
    trainer.training_step(x, y, **arrays)
    return trainer.optimizer.state_dict()["first_moments"]


@pytest.fixture
def data(rng):
    return rng.random((50, 2)), rng.uniform(0.1, 1, (50, 3)), rng.uniform(0.5, 2, (50, 3))


@pytest.mark.parametrize("otype", LOSSES)
def test_values_sum_to_the_loss_of_a_step(otype, data):
    """With a density; float32 sums of 150 terms in another order: 1e-5."""
    x, y, density = data
    network = NETWORK | {"output_activation": "Sigmoid"}  # positive predictions, as some losses need
    module = tcnn.Network(2, 3, network, dtype="float32", engine="reference")
    trainer = tcnn.Trainer(module, SGD_LIKE, otype)
    prediction = module.inference(x)
    values, gradients = trainer.loss.evaluate(prediction, y, data_pdf=density)
    assert float(trainer.training_step(x, y, data_pdf=density)) == pytest.approx(values.sum(), rel=1e-5, abs=1e-6)
    given = gradient_of_a_step(network, "L2", x, None, external_gradient=gradients)
    moments = trainer.optimizer.state_dict()["first_moments"]
    assert np.linalg.norm(moments) > 0
    assert np.linalg.norm(given - moments) <= 1e-5 * np.linalg.norm(moments)


@pytest.mark.parametrize("otype", LOSSES)
def test_the_loss_scale_multiplies_gradients_only(otype, data):
    _, y, density = data
    loss = tcnn.create_loss(otype)
    values, gradients = loss.evaluate(y[::-1], y, data_pdf=density)
    scaled_values, scaled = loss.evaluate(y[::-1], y, data_pdf=density, loss_scale=128.0)
    np.testing.assert_array_equal(scaled_values, values)
    np.testing.assert_array_equal(scaled, 128 * gradients)  # a power of two is exact


def test_constant_gradient_is_an_external_gradient(data):
    """c_j for every sample, whatever its target; the loss is 0. float32 rounding of one product: 1e-6."""
    x, y, _ = data
    constants = [0.5, -1.0, 0.25]
    config = {"otype": "ConstantGradient", "gradient": constants}
    moments = gradient_of_a_step(NETWORK, config, x, y)
    expected = gradient_of_a_step(NETWORK, "L2", x, None, external_gradient=np.tile(constants, (50, 1)))
    assert np.linalg.norm(moments) > 0
    assert np.linalg.norm(moments - expected) <= 1e-6 * np.linalg.norm(expected)
    trainer = tcnn.Trainer(tcnn.Network(2, 3, NETWORK, engine="reference"), SGD_LIKE, config)
    assert float(trainer.training_step(x, y)) == 0


@pytest.mark.parametrize(
    ("loss", "n_out", "message"),
    [
        ("RelativeL2Luminance", 2, "loss: RelativeL2Luminance needs at least 3 outputs"),
        ({"otype": "ConstantGradient", "gradient": [1.0]}, 3, "loss.gradient: 1 numbers for 3 outputs"),
    ],
)
def test_losses_that_do_not_fit_are_config_errors(loss, n_out, message, monkeypatch):
    network = tcnn.Network(2, n_out, NETWORK, engine="reference")
    before = network.params
    with pytest.raises(tcnn.ConfigError, match=message):
        tcnn.Trainer(network, SGD_LIKE, loss)
    np.testing.assert_array_equal(network.params, before)
    with pytest.raises(tcnn.ConfigError, match=message):
        tcnn.create_loss(loss).evaluate(np.ones((4, n_out)), np.ones((4, n_out)))

    def fail(*args, **kwargs):
        raise AssertionError("a model was made before its loss was checked")

    monkeypatch.setattr(tcnn.model.NetworkWithInputEncoding, "_of", fail)
    config = {"loss": {"otype": loss} if isinstance(loss, str) else loss, "network": NETWORK}
    with pytest.raises(tcnn.ConfigError, match=message):
        tcnn.create_from_config(2, n_out, config)


def test_luminance_of_six_outputs_adds_the_second_colour(rng):
    """Outputs 3 to 5 are added to red, green and blue; further ones have no part in Λ. float64: 1e-12."""
    p, t = rng.random((2, 6, 8))
    values, _ = tcnn.create_loss("RelativeL2Luminance").evaluate(p, t)
    luminance = (p[:, :3] + p[:, 3:6]) @ [0.299, 0.587, 0.114]
    np.testing.assert_allclose(values, (p - t) ** 2 / (luminance[:, None] ** 2 + 0.01) / p.size, rtol=1e-12)


@pytest.mark.parametrize("otype", sorted(set(LOSSES) - {"CrossEntropy", "Variance"}))
def test_regression_losses_learn(otype, rng):
    """A smooth function with values from 0.2 to 0.7: in 150 steps the prediction comes within 0.05 of it."""
    x = rng.random((256, 2))
    y = np.stack([0.3 + 0.4 * x[:, 0], 0.2 + 0.5 * x[:, 1], 0.2 + 0.3 * x[:, 0] * x[:, 1]], axis=1)
    module = tcnn.Network(2, 3, NETWORK | {"output_activation": "Sigmoid"}, dtype="float32", engine="reference")
    trainer = tcnn.Trainer(module, {"otype": "Adam", "learning_rate": 2e-2}, otype)
    for _ in range(150):
        trainer.training_step(x, y)
    assert np.abs(module.inference(x) - y).mean() < 0.05
