"""Losses: element by element against their definition in plain Python, and the normalisation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from numba_tcnn.config import ConfigError
from numba_tcnn.reference import evaluate_loss
from numba_tcnn.specs import LOSSES, LossSpec


def expected_element(otype: str, p: float, t: float, pdf: float, luminance: float) -> tuple[float, float]:
    """Value and gradient of one element before normalisation; the weight w is not differentiated."""
    d, sign = p - t, math.copysign(1.0, p - t)
    if otype == "CrossEntropy":
        return -t * math.log(p) / pdf, -t / p / pdf
    if otype == "Variance":
        return t * t / pdf * (1 / p - 1 / pdf), -t * t / pdf / (p * p)
    w = {
        "L1": 1.0,
        "L2": 1.0,
        "RelativeL1": 1 / (abs(p) + 0.01),
        "RelativeL2": 1 / (p * p + 0.01),
        "RelativeL2Luminance": 1 / (luminance**2 + 0.01),
        "Mape": 1 / (abs(t) + 0.01),
        "Smape": 1 / ((abs(t) + abs(p)) / 2 + 0.01),
    }[otype]
    if otype in ("L1", "RelativeL1", "Mape", "Smape"):
        return abs(d) * w / pdf, sign * w / pdf
    return d * d * w / pdf, 2 * d * w / pdf


@pytest.mark.parametrize("otype", LOSSES)
@pytest.mark.parametrize("n_output_dims", [3, 5, 6, 7])
@pytest.mark.parametrize("with_density", [False, True])
def test_definition(otype: str, n_output_dims: int, with_density: bool) -> None:
    random = np.random.default_rng(1)
    shape = (5, n_output_dims)
    positive = otype in ("CrossEntropy", "Variance")
    p = random.uniform(0.1, 2, shape) if positive else random.uniform(-2, 2, shape)
    t = random.uniform(-2, 2, shape)
    t[0] = p[0]
    pdf = random.uniform(0.2, 2, shape) if with_density else None
    loss_scale = 128.0
    values, gradients = evaluate_loss(LossSpec(otype), p, t, pdf, loss_scale)
    for i in range(shape[0]):
        colour = p[i, :3] + (p[i, 3:6] if n_output_dims >= 6 else 0)
        luminance = float(colour @ [0.299, 0.587, 0.114])
        for j in range(shape[1]):
            density = 1.0 if pdf is None else pdf[i, j]
            value, gradient = expected_element(otype, p[i, j], t[i, j], density, luminance)
            assert values[i, j] == pytest.approx(value / p.size, rel=1e-12)  # float64 in both
            assert gradients[i, j] == pytest.approx(gradient * loss_scale / p.size, rel=1e-12)


def test_gradient_of_the_l1_family_never_vanishes() -> None:
    p = np.full((2, 2), 0.5, np.float32)
    _, gradients = evaluate_loss(LossSpec("L1"), p, p)
    assert gradients.dtype == np.float32
    assert np.all(gradients == 0.25)


@pytest.mark.parametrize("with_density", [False, True])
def test_constant_gradient(with_density: bool) -> None:
    """Values 0; gradients c_j λ/π, not divided by the number of elements."""
    random = np.random.default_rng(2)
    p, t = random.standard_normal((2, 5, 3))
    pdf = random.uniform(0.2, 2, p.shape) if with_density else None
    values, gradients = evaluate_loss(LossSpec("ConstantGradient", (1.0, -2.0, 0.5)), p, t, pdf, 128.0)
    assert not values.any()
    expected = 128 * np.array([1, -2, 0.5]) / (1.0 if pdf is None else pdf)
    np.testing.assert_allclose(gradients, np.broadcast_to(expected, p.shape), rtol=1e-15)  # one division


@pytest.mark.parametrize("otype", LOSSES)
def test_gradients_are_derivatives_with_the_weight_held_fixed(otype: str) -> None:
    """Central differences in float64, of the value divided by its weight at the point itself: h = 1e-6 leaves 1e-9."""
    random = np.random.default_rng(3)
    p, t, pdf = random.uniform(0.1, 2, (3, 40, 3))
    t[np.abs(p - t) < 1e-3] += 0.01  # off the kink of the L1 family
    d, luminance = np.abs(p - t), (p @ [0.299, 0.587, 0.114])[:, None]
    fixed_weight = {
        "RelativeL1": (np.abs, 1 / (p + 0.01)),
        "RelativeL2": (np.square, 1 / (p**2 + 0.01)),
        "RelativeL2Luminance": (np.square, 1 / (luminance**2 + 0.01)),
        "Smape": (np.abs, 1 / ((t + p) / 2 + 0.01)),
    }

    def value(q: np.ndarray) -> np.ndarray:
        if otype in fixed_weight:
            distance, weight = fixed_weight[otype]
            return distance(q - t) * weight / pdf / p.size
        return evaluate_loss(LossSpec(otype), q, t, pdf)[0]

    values, gradients = evaluate_loss(LossSpec(otype), p, t, pdf)
    np.testing.assert_allclose(value(p), values, rtol=1e-12)
    numeric = (value(p + 1e-6) - value(p - 1e-6)) / 2e-6
    assert np.all(d > 1e-5)
    np.testing.assert_allclose(gradients, numeric, rtol=1e-6, atol=1e-9)


def test_luminance_needs_a_colour() -> None:
    with pytest.raises(ConfigError, match="at least 3 outputs"):
        evaluate_loss(LossSpec("RelativeL2Luminance"), np.zeros((2, 2)), np.zeros((2, 2)))


def test_empty_batch() -> None:
    values, gradients = evaluate_loss(LossSpec("L2"), np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32))
    assert values.shape == gradients.shape == (0, 3)
