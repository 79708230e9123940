"""Activation functions φ and their derivatives, element-wise on arrays of pre-activations z.

Each has its derivative as a function of z, which the output layer uses. Most also have it as a function of the
output h = φ(z): a hidden layer then needs to keep nothing but h. SiLU and Sine have no such formula (several z give
the same h), so a hidden layer keeps φ'(z) instead.

With K = 10 as in tiny-cuda-nn, σ(x) = 1/(1 + e^-x), X = K z, and for Squareplus Y = (X + √(X² + 4))/2 = K h:

    name         φ(z)                 φ' from z              φ' from h
    None         z                    1                      1
    ReLU         max(z, 0)            [z > 0]                [h > 0]
    LeakyReLU    z > 0 ? z : z/100    z > 0 ? 1 : 1/100      h > 0 ? 1 : 1/100
    SiLU         z σ(z)               σ + z σ (1 - σ)
    Exponential  e^z                  e^z                    h
    Sine         sin z                cos z
    Sigmoid      σ(z)                 σ (1 - σ)              h (1 - h)
    Squareplus   Y/K                  Y²/(Y² + 1)            the same
    Softplus     ln(1 + e^X)/K        σ(X)                   1 - e^(-K h)
    Tanh         tanh z               1 - tanh² z            1 - h²

Second derivatives, as functions of z, are for gradients of gradients. With σ' = σ (1 - σ) and τ = tanh(z/2) = 2σ - 1:

    None, ReLU, LeakyReLU   0              Exponential  e^z                  Softplus    K σ'(X)
    SiLU                    σ' (2 - z τ)   Sine         -sin z               Squareplus  2K/√(X² + 4)³
    Sigmoid                 -σ' τ          Tanh         -2 h (1 - h²)

Softplus and Squareplus are evaluated in forms that neither overflow nor cancel for any z.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Function = Callable[[np.ndarray], np.ndarray]

K = 10.0
LEAKY_SLOPE = 0.01


@dataclass(frozen=True)
class Activation:
    """φ; φ' as a function of z; φ' as a function of h = φ(z), None where there is no such function; φ'' of z."""

    value: Function
    derivative_from_input: Function
    derivative_from_output: Function | None
    second_derivative: Function


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def step(z: np.ndarray) -> np.ndarray:
    """1 where z > 0, else 0 (also at 0)."""
    return (z > 0).astype(z.dtype)


def relu(z: np.ndarray) -> np.ndarray:
    return np.fmax(z, 0)  # NaN becomes 0, as on the GPU


def leaky_relu(z: np.ndarray) -> np.ndarray:
    return np.maximum(z, LEAKY_SLOPE * z)


def leaky_step(z: np.ndarray) -> np.ndarray:
    return np.where(z > 0, z.dtype.type(1), z.dtype.type(LEAKY_SLOPE))


def silu(z: np.ndarray) -> np.ndarray:
    return z * sigmoid(z)


def silu_derivative(z: np.ndarray) -> np.ndarray:
    s = sigmoid(z)
    return s + z * s * (1 - s)


def silu_second_derivative(z: np.ndarray) -> np.ndarray:
    return sigmoid_derivative(z) * (2 - z * np.tanh(z / 2))


def sigmoid_derivative_from_output(h: np.ndarray) -> np.ndarray:
    return h * (1 - h)


def sigmoid_derivative(z: np.ndarray) -> np.ndarray:
    return sigmoid(z) * sigmoid(-z)


def sigmoid_second_derivative(z: np.ndarray) -> np.ndarray:
    return -sigmoid_derivative(z) * np.tanh(z / 2)


def squareplus(z: np.ndarray) -> np.ndarray:
    X = K * z
    root = np.hypot(X, 2) + np.abs(X)  # (√(X² + 4) + |X|); for X < 0, Y = 2/root avoids the difference of near equals
    return np.where(X > 0, root / 2, 2 / root) / K


def squareplus_derivative_from_output(h: np.ndarray) -> np.ndarray:
    Y2 = np.square(K * h)
    return Y2 / (Y2 + 1)


def squareplus_derivative(z: np.ndarray) -> np.ndarray:
    # Y - 1/Y = X gives Y²/(Y² + 1) = (1 + X/√(X² + 4))/2; written with h it is accurate on both sides of 0
    return squareplus_derivative_from_output(squareplus(z))


def squareplus_second_derivative(z: np.ndarray) -> np.ndarray:
    return 2 * K / np.hypot(K * z, 2) ** 3


def softplus(z: np.ndarray) -> np.ndarray:
    X = K * z
    return (np.maximum(X, 0) + np.log1p(np.exp(-np.abs(X)))) / K


def softplus_derivative(z: np.ndarray) -> np.ndarray:
    return sigmoid(K * z)


def softplus_second_derivative(z: np.ndarray) -> np.ndarray:
    return K * sigmoid_derivative(K * z)


def softplus_derivative_from_output(h: np.ndarray) -> np.ndarray:
    return -np.expm1(-K * h)


def tanh_derivative_from_output(h: np.ndarray) -> np.ndarray:
    return 1 - np.square(h)


def tanh_derivative(z: np.ndarray) -> np.ndarray:
    return 1 - np.square(np.tanh(z))


def tanh_second_derivative(z: np.ndarray) -> np.ndarray:
    return -2 * np.tanh(z) * tanh_derivative(z)


def minus_sine(z: np.ndarray) -> np.ndarray:
    return -np.sin(z)


def identity(z: np.ndarray) -> np.ndarray:
    return z


ACTIVATIONS = {
    "None": Activation(identity, np.ones_like, np.ones_like, np.zeros_like),
    "ReLU": Activation(relu, step, step, np.zeros_like),
    "LeakyReLU": Activation(leaky_relu, leaky_step, leaky_step, np.zeros_like),
    "SiLU": Activation(silu, silu_derivative, None, silu_second_derivative),
    "Exponential": Activation(np.exp, np.exp, identity, np.exp),
    "Sine": Activation(np.sin, np.cos, None, minus_sine),
    "Sigmoid": Activation(sigmoid, sigmoid_derivative, sigmoid_derivative_from_output, sigmoid_second_derivative),
    "Squareplus": Activation(
        squareplus, squareplus_derivative, squareplus_derivative_from_output, squareplus_second_derivative
    ),
    "Softplus": Activation(softplus, softplus_derivative, softplus_derivative_from_output, softplus_second_derivative),
    "Tanh": Activation(np.tanh, tanh_derivative, tanh_derivative_from_output, tanh_second_derivative),
}
