"""Noise on the outputs during training: its distribution, its stream, and what the trainer does with it."""

from __future__ import annotations

import numpy as np
import pytest

import numba_tcnn as tcnn
from numba_tcnn.config import parse_model
from numba_tcnn.initial_values import Pcg32, generator
from numba_tcnn.layout import n_params
from numba_tcnn.perturbation import LogisticNoise

NETWORK = {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1}
SPEC = parse_model(2, 3, {"otype": "Identity"}, NETWORK)


def make_trainer(
    sigma: float, optimizer: dict | str = "SGD", loss: dict | str = "L2", *, dtype: str = "float32", seed: int = 7
) -> tcnn.Trainer:
    network = tcnn.Network(2, 3, NETWORK, engine="reference", dtype=dtype)
    return tcnn.Trainer(network, optimizer, loss, seed=seed, perturbation_sigma=sigma)


@pytest.fixture
def x(rng):
    return rng.random((512, 2), np.float32)


def test_it_is_logistic_of_standard_deviation_sigma():
    """300,000 values: the mean within 4σ/√n, the deviation within 1 % (0.3 % is its standard error at the logistic
    distribution's kurtosis of 4.2), and the distribution function within 0.003 (1.6/√n, Kolmogorov, 99 %)."""
    sigma = 0.3
    noise = np.sort(LogisticNoise(SPEC, 1337, sigma).draw(100_000).reshape(-1))
    n = noise.size
    assert abs(noise.mean()) < 4 * sigma / np.sqrt(n)
    assert noise.std() == pytest.approx(sigma, rel=0.01)
    logistic = 1 / (1 + np.exp(-noise * np.pi / (np.sqrt(3) * sigma)))
    assert np.abs(logistic - (np.arange(n) + 0.5) / n).max() < 0.003


def test_its_numbers_follow_the_initial_parameters():
    """512 outputs of padded width 16 take 2048 threads of four numbers: element e gets number 4 (e mod 2048) + ⌊e/2048⌋
    of the stream behind the parameters. The next batch begins 8192 numbers further."""
    noise = LogisticNoise(SPEC, 7, 1.0)
    first, second = noise.draw(512), noise.draw(512)
    random = generator(7, "trainer")
    random.advance(n_params(SPEC))
    for drawn in (first, second):
        start = Pcg32(0)
        start.state = random.state
        numbers = start.uniform(4 * 2048)
        for sample, column in ((0, 0), (0, 2), (5, 1), (200, 0), (511, 2)):
            e = 16 * sample + column
            r = float(numbers[4 * (e % 2048) + e // 2048])
            # the constant is tiny-cuda-nn's √3/π in float32
            assert drawn[sample, column] == pytest.approx(np.log(r / (1 - r)) * 0.551328895, rel=1e-12)
        random.advance(512 * 16)


def test_extreme_numbers_stay_finite(monkeypatch):
    monkeypatch.setattr("numba_tcnn.perturbation.uniform_of_threads", lambda random, n: np.zeros(n, np.float32))
    drawn = LogisticNoise(SPEC, 7, 1.0).draw(2)
    assert np.all(drawn == drawn[0, 0]) and drawn[0, 0] == pytest.approx(-11.4253, rel=1e-4)  # log(1e-9) √3/π


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_step_is_that_of_the_loss_at_perturbed_outputs(x, dtype):
    """The same step by hand: forward, noise, loss, backward, optimizer. float32 arithmetic of the same order: 1e-6."""
    y = np.sin(x @ np.ones((2, 3), np.float32))
    trainer, by_hand = make_trainer(0.1, dtype=dtype), make_trainer(0.0, dtype=dtype)
    np.testing.assert_array_equal(trainer.network.params, by_hand.network.params)
    noise = LogisticNoise(SPEC, 7, 0.1)
    for _ in range(3):
        prediction, context = by_hand.network.forward(x)
        values, dL_dy = by_hand.loss.evaluate(prediction + noise.draw(len(x)).astype(prediction.dtype), y)
        params = by_hand.network.params - 1e-3 * by_hand.network.backward(context, dL_dy).params
        loss = trainer.training_step(x, y)
        assert float(loss) == pytest.approx(float(values.sum(dtype=np.float64)), rel=1e-6)
        by_hand.network.params = params
        np.testing.assert_allclose(trainer.network.params, params, rtol=0, atol=1e-6)


def test_noise_raises_the_loss_by_its_variance(x):
    """L2 at the right answer is the noise's mean square, 0.25 within 5 % (1536 values of kurtosis 4.2: 4.6 %)."""
    trainer = make_trainer(0.5)
    y = trainer.network.inference(x)
    losses = [float(trainer.training_step(x, y, run_optimizer=False)) for _ in range(20)]
    assert np.mean(losses) == pytest.approx(0.25, rel=0.05)
    assert len(set(losses)) == 20, "the same noise in every step"


def test_it_trains_and_uses_the_density(x):
    y = np.sin(2 * x @ np.ones((2, 3), np.float32))
    trainer = make_trainer(0.05, {"otype": "Adam", "learning_rate": 1e-2})
    losses = [float(trainer.training_step(x, y)) for _ in range(200)]
    assert losses[-1] < 0.3 * losses[0]
    plain, halved = make_trainer(0.05), make_trainer(0.05)
    twice = float(plain.training_step(x, y))
    assert float(halved.training_step(x, y, data_pdf=np.full(y.shape, 2.0))) == pytest.approx(twice / 2, rel=1e-6)


def test_without_it_and_with_external_gradients_nothing_is_drawn(x):
    y = np.zeros((512, 3), np.float32)
    assert make_trainer(0.0)._noise is None
    trainer = make_trainer(0.1)
    before = trainer._noise.random.state
    trainer.training_step(x, None, external_gradient=y)
    assert trainer._noise.random.state == before
    trainer.training_step(x, y)
    assert trainer._noise.random.state != before


def test_the_trained_parameters_are_perturbed_not_the_averages(x):
    """With an average for inference, the loss still is that of the parameters that train. float32: 1e-5."""
    y = np.zeros((512, 3), np.float32)
    trainer = make_trainer(1e-12, {"otype": "EMA", "nested": {"otype": "SGD", "learning_rate": 0.5}})
    for _ in range(5):
        prediction, _ = trainer.network.forward(x)
        expected = np.mean(prediction**2, dtype=np.float64)
        assert float(trainer.training_step(x, y)) == pytest.approx(expected, rel=1e-5)
    assert np.mean(trainer.network.inference(x) ** 2) > 1.5 * float(trainer.training_step(x, y, run_optimizer=False))


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf")])
def test_bad_sigmas_are_named(sigma):
    with pytest.raises(ValueError, match="perturbation_sigma: .* must be a finite number, 0 or larger"):
        make_trainer(sigma)
