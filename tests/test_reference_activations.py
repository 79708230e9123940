"""Activations: values, derivatives in both forms against central differences, and extreme arguments."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tcnn.reference.activations import ACTIVATIONS
from numba_tcnn.specs import ACTIVATIONS as NAMES

Z = np.concatenate([np.linspace(-3, 3, 200), [-8.5, -1e-3, 1e-3, 8.5]])  # 0 is left out: kinks


def test_registry_is_complete() -> None:
    assert set(ACTIVATIONS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name: str) -> None:
    """h = 1e-6 leaves 1e-9 of truncation and rounding."""
    activation = ACTIVATIONS[name]
    h = 1e-6
    numeric = (activation.value(Z + h) - activation.value(Z - h)) / (2 * h)
    np.testing.assert_allclose(activation.derivative_from_input(Z), numeric, rtol=1e-7, atol=1e-9)
    if activation.derivative_from_output is not None:
        from_output = activation.derivative_from_output(activation.value(Z))
        np.testing.assert_allclose(from_output, numeric, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives(name: str) -> None:
    """Central differences of the first derivative; h = 1e-6 leaves about 1e-8: third derivatives reach K² = 100."""
    activation = ACTIVATIONS[name]
    h = 1e-6
    numeric = (activation.derivative_from_input(Z + h) - activation.derivative_from_input(Z - h)) / (2 * h)
    np.testing.assert_allclose(activation.second_derivative(Z), numeric, rtol=1e-7, atol=2e-8)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Squareplus", [0.0099020, 0.1280776, 0.5192582]),
        ("Softplus", [4.5399e-6, 0.0974077, 0.5006715]),
        ("SiLU", [-0.2689414, 0.0256249, 0.3112297]),
    ],
)
def test_published_values(name: str, values: list[float]) -> None:
    """The rounding of the published digits is the tolerance."""
    np.testing.assert_allclose(ACTIVATIONS[name].value(np.array([-1, 0.05, 0.5])), values, rtol=1e-5, atol=5e-8)


@pytest.mark.parametrize("name", ["Softplus", "Squareplus", "Sigmoid", "SiLU", "Tanh", "ReLU", "LeakyReLU", "None"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_arguments_stay_finite(name: str, dtype: type) -> None:
    """tiny-cuda-nn's Softplus overflows past 8.87, and its derivative is NaN there."""
    activation = ACTIVATIONS[name]
    z = np.array([-1e4, -100, -9, 9, 100, 1e4], dtype)
    with np.errstate(over="ignore"):
        value = activation.value(z)
        derivatives = [activation.derivative_from_input(z)]
        curvature = activation.second_derivative(z)
        if activation.derivative_from_output is not None:
            derivatives.append(activation.derivative_from_output(value))
    assert value.dtype == dtype and np.all(np.isfinite(value))
    assert curvature.dtype == dtype
    np.testing.assert_allclose(curvature[[0, -1]], 0, atol=1e-6)
    for derivative in derivatives:
        assert derivative.dtype == dtype
        limits = {"LeakyReLU": [0.01, 1], "None": [1, 1], "Sigmoid": [0, 0], "Tanh": [0, 0]}.get(name, [0, 1])
        np.testing.assert_allclose(derivative[[0, -1]], limits, atol=1e-6)


def test_soft_functions_keep_precision_in_float32() -> None:
    """Small values of Softplus and Squareplus are no differences of near equals: 1e-6 is a few float32 roundings."""
    z = np.array([-1.5, -1, -0.1, 0.1, 2], np.float32)
    for name in ("Softplus", "Squareplus"):
        exact = ACTIVATIONS[name].value(z.astype(np.float64))
        np.testing.assert_allclose(ACTIVATIONS[name].value(z), exact, rtol=2e-6)


def test_kinks_and_nan() -> None:
    z = np.array([0.0, -0.0, np.nan], np.float32)
    assert ACTIVATIONS["ReLU"].value(z).tolist() == [0, 0, 0]
    assert ACTIVATIONS["ReLU"].derivative_from_input(z).tolist() == [0, 0, 0]
    np.testing.assert_array_equal(ACTIVATIONS["LeakyReLU"].derivative_from_input(z[:2]), np.float32([0.01, 0.01]))
