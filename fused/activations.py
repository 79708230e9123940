"""Activations as scalar device functions (mirror of reference/activations.py).

    name         phi(x)                                   phi'(x), from the stored output y or the input x
    None         x                                        1
    ReLU         max(x, 0)                                [y > 0]
    LeakyReLU    x for x > 0, else 0.01 x                 [y > 0] or 0.01
    SiLU         x s(x), s the logistic function          s + x s (1 - s)
    Exponential  e^x                                      y
    Sine         sin x                                    cos x
    Sigmoid      s(x)                                     y (1 - y)
    Squareplus   (X + sqrt(X^2 + 4)) / 20, X = 10 x       Y^2 / (Y^2 + 1), Y = 10 y
    Softplus     ln(1 + e^{10 x}) / 10                    1 - e^{-10 y}
    Tanh         tanh x                                   1 - y^2

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
    """phi and phi' as plain scalar functions; the derivative's argument is the activation's output where
    `derivative_of_output`, else its input."""

    value: Callable
    derivative: Callable
    derivative_of_output: bool


def _identity(x):
    return x


def _one(y):
    return f32(1)


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


def _exponential(x):
    return math.exp(x)


def _sine(x):
    return math.sin(x)


def _sine_derivative(x):
    return math.cos(x)


def _sigmoid(x):
    return f32(1) / (f32(1) + math.exp(-x))


def _sigmoid_derivative(y):
    return y * (f32(1) - y)


def _squareplus(x):
    scaled = f32(10) * x
    root = math.sqrt(scaled * scaled + f32(4))
    if scaled > f32(0):
        return f32(0.05) * (scaled + root)
    return f32(0.2) / (root - scaled)  # the same number, without cancellation


def _squareplus_derivative(y):
    square = f32(100) * y * y
    return square / (square + f32(1))


def _softplus(x):
    scaled = f32(10) * x
    if scaled > f32(0):
        return f32(0.1) * (scaled + math.log1p(math.exp(-scaled)))
    return f32(0.1) * math.log1p(math.exp(scaled))


def _softplus_derivative(y):
    return -math.expm1(f32(-10) * y)  # 1 - exp loses all digits of a small derivative


def _tanh(x):
    # fast mathematics' own tanh is wrong from the fourth digit on, which 1 - y^2 makes a tenth where y is near 1
    t = math.expm1(f32(-2) * abs(x))
    y = -t / (t + f32(2))
    return y if x > f32(0) else -y


def _tanh_derivative(y):
    return f32(1) - y * y


ACTIVATIONS: dict[str, Activation] = {
    "None": Activation(_identity, _one, True),
    "ReLU": Activation(_relu, _relu_derivative, True),
    "LeakyReLU": Activation(_leaky_relu, _leaky_relu_derivative, True),
    "SiLU": Activation(_silu, _silu_derivative, False),
    "Exponential": Activation(_exponential, _identity, True),
    "Sine": Activation(_sine, _sine_derivative, False),
    "Sigmoid": Activation(_sigmoid, _sigmoid_derivative, True),
    "Squareplus": Activation(_squareplus, _squareplus_derivative, True),
    "Softplus": Activation(_softplus, _softplus_derivative, True),
    "Tanh": Activation(_tanh, _tanh_derivative, True),
}


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
