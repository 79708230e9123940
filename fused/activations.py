"""Activations as scalar device functions (mirror of reference/activations.py).

    name         phi(x)                                   phi'(x)                 phi''(x)
    None         x                                        1                       0
    ReLU         max(x, 0)                                [y > 0]                 0
    LeakyReLU    x for x > 0, else 0.01 x                 [y > 0] or 0.01         0
    SiLU         x s(x), s the logistic function          s + x s (1 - s)         s (1 - s) (2 + x (1 - 2 s))
    Exponential  e^x                                      y                       y
    Sine         sin x                                    cos x                   -sin x
    Sigmoid      s(x)                                     y (1 - y)               phi' (1 - 2 y)
    Squareplus   (X + sqrt(X^2 + 4)) / 20, X = 10 x       Y^2 / (Y^2 + 1)         20 Y^3 / (Y^2 + 1)^3,  Y = 10 y
    Softplus     ln(1 + e^{10 x}) / 10                    1 - e^{-10 y}           10 phi' (1 - phi')
    Tanh         tanh x                                   1 - y^2                 -2 y phi'

Derivatives are taken from the stored output y, where there is such a formula, or else from the input x.

Hidden layers keep their output in a tile anyway (the weight gradient needs it), so a derivative that can be had from
the output costs no memory; SiLU and Sine keep the derivative itself, a *gate*, beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

f32 = np.float32


@dataclass(frozen=True)
class Activation:
    """phi, phi' and phi'' as plain scalar functions; the derivatives' argument is the activation's output where
    `derivative_of_output`, else its input. phi'' is also given phi'."""

    value: Callable
    derivative: Callable
    second_derivative: Callable
    derivative_of_output: bool


def _identity(x):
    return x


def _one(y):
    return f32(1)


def _zero(y, slope):
    return f32(0)


def _relu(x):
    return x if x > f32(0) else f32(0)


def _relu_derivative(y):
    return f32(1) if y > f32(0) else f32(0)


def _leaky_relu(x):
    return x if x > f32(0) else f32(0.01) * x


def _leaky_relu_derivative(y):
    return f32(1) if y > f32(0) else f32(0.01)


def _silu(x):
    return x / (f32(1) + math.exp(-x))


def _silu_derivative(x):
    s = f32(1) / (f32(1) + math.exp(-x))
    return s * (f32(1) + x * (f32(1) - s))


def _silu_second_derivative(x, slope):
    s = f32(1) / (f32(1) + math.exp(-x))
    return s * (f32(1) - s) * (f32(2) + x * (f32(1) - f32(2) * s))


def _exponential(x):
    return math.exp(x)


def _exponential_second_derivative(y, slope):
    return slope


def _sine(x):
    return math.sin(x)


def _sine_derivative(x):
    return math.cos(x)


def _sine_second_derivative(x, slope):
    return -math.sin(x)


def _sigmoid(x):
    return f32(1) / (f32(1) + math.exp(-x))


def _sigmoid_derivative(y):
    return y * (f32(1) - y)


def _sigmoid_second_derivative(y, slope):
    return slope * (f32(1) - f32(2) * y)


def _squareplus(x):
    scaled = f32(10) * x
    root = math.sqrt(scaled * scaled + f32(4))
    if scaled > f32(0):
        return f32(0.05) * (scaled + root)
    return f32(0.2) / (root - scaled)  # the same number, without cancellation


def _squareplus_derivative(y):
    square = f32(100) * y * y
    return square / (square + f32(1))


def _squareplus_second_derivative(y, slope):
    scaled = f32(10) * y
    ratio = scaled / (scaled * scaled + f32(1))  # its cube would overflow earlier
    return f32(20) * ratio * ratio * ratio


def _softplus(x):
    scaled = f32(10) * x
    return f32(0.1) * (max(scaled, f32(0)) + math.log1p(math.exp(-abs(scaled))))


def _softplus_derivative(y):
    return -math.expm1(f32(-10) * y)  # 1 - exp loses all digits of a small derivative


def _softplus_second_derivative(y, slope):
    return f32(10) * slope * (f32(1) - slope)


def _tanh(x):
    # fast mathematics' own tanh is wrong from the fourth digit on, which 1 - y^2 makes a tenth where y is near 1
    t = math.expm1(f32(-2) * abs(x))
    y = -t / (t + f32(2))
    return y if x > f32(0) else -y


def _tanh_derivative(y):
    return f32(1) - y * y


def _tanh_second_derivative(y, slope):
    return f32(-2) * y * slope


ACTIVATIONS: dict[str, Activation] = {
    "None": Activation(_identity, _one, _zero, True),
    "ReLU": Activation(_relu, _relu_derivative, _zero, True),
    "LeakyReLU": Activation(_leaky_relu, _leaky_relu_derivative, _zero, True),
    "SiLU": Activation(_silu, _silu_derivative, _silu_second_derivative, False),
    "Exponential": Activation(_exponential, _identity, _exponential_second_derivative, True),
    "Sine": Activation(_sine, _sine_derivative, _sine_second_derivative, False),
    "Sigmoid": Activation(_sigmoid, _sigmoid_derivative, _sigmoid_second_derivative, True),
    "Squareplus": Activation(_squareplus, _squareplus_derivative, _squareplus_second_derivative, True),
    "Softplus": Activation(_softplus, _softplus_derivative, _softplus_second_derivative, True),
    "Tanh": Activation(_tanh, _tanh_derivative, _tanh_second_derivative, True),
}

STRAIGHT = tuple(name for name, activation in ACTIVATIONS.items() if activation.second_derivative is _zero)
"""Activations with phi'' = 0."""


@functools.cache
def make_activation(target, name: str):
    """Scalar x -> phi(x)."""
    return target.scalar(ACTIVATIONS[name].value)


@functools.cache
def make_gate(target, name: str):
    """Scalar x or y -> phi', as `derivative_of_output` says."""
    return target.scalar(ACTIVATIONS[name].derivative)


@functools.cache
def make_apply_derivative(target, name: str):
    """Scalar (g, x or y) -> g phi'."""
    derivative = target.scalar_part(ACTIVATIONS[name].derivative)

    def apply(g, y):
        return g * derivative(y)

    return target.scalar(apply)


@functools.cache
def make_dual_activation(target, name: str):
    """Scalar (z, its tangent) -> (phi(z), the tangent of phi(z), phi'(z), the tangent of phi'(z))."""
    activation = ACTIVATIONS[name]
    value, derivative = target.scalar_part(activation.value), target.scalar_part(activation.derivative)
    second_derivative = target.scalar_part(activation.second_derivative)
    of_output = activation.derivative_of_output

    def dual_activation(z, tangent):
        y = value(z)
        argument = y if of_output else z
        slope = derivative(argument)
        return y, slope * tangent, slope, second_derivative(argument, slope) * tangent

    return target.scalar(dual_activation)
