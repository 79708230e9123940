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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

f32 = np.float32


@dataclass(frozen=True)
class Activation:
    """`make_value(math)` and `make_derivative(math)` write the scalar functions; the derivative's argument is the
    activation's output where `derivative_of_output`, else its input."""

    make_value: Callable
    make_derivative: Callable
    derivative_of_output: bool


def _none(math):
    def value(x):
        return x

    return value


def _none_derivative(math):
    def derivative(y):
        return f32(1)

    return derivative


def _relu(math):
    def value(x):
        return x if x > f32(0) else f32(0)

    return value


def _relu_derivative(math):
    def derivative(y):
        return f32(1) if y > f32(0) else f32(0)

    return derivative


def _leaky_relu(math):
    def value(x):
        return x if x > f32(0) else f32(0.01) * x

    return value


def _leaky_relu_derivative(math):
    def derivative(y):
        return f32(1) if y > f32(0) else f32(0.01)

    return derivative


def _silu(math):
    exp = math.exp

    def value(x):
        return x / (f32(1) + exp(-x))

    return value


def _silu_derivative(math):
    exp = math.exp

    def derivative(x):
        s = f32(1) / (f32(1) + exp(-x))
        return s * (f32(1) + x * (f32(1) - s))

    return derivative


def _exponential(math):
    exp = math.exp

    def value(x):
        return exp(x)

    return value


def _identity_of_output(math):
    def derivative(y):
        return y

    return derivative


def _sine(math):
    sin = math.sin

    def value(x):
        return sin(x)

    return value


def _sine_derivative(math):
    cos = math.cos

    def derivative(x):
        return cos(x)

    return derivative


def _sigmoid(math):
    exp = math.exp

    def value(x):
        return f32(1) / (f32(1) + exp(-x))

    return value


def _sigmoid_derivative(math):
    def derivative(y):
        return y * (f32(1) - y)

    return derivative


def _squareplus(math):
    sqrt = math.sqrt

    def value(x):
        scaled = f32(10) * x
        root = sqrt(scaled * scaled + f32(4))
        if scaled > f32(0):
            return f32(0.05) * (scaled + root)
        return f32(0.2) / (root - scaled)  # the same number, without cancellation

    return value


def _squareplus_derivative(math):
    def derivative(y):
        square = f32(100) * y * y
        return square / (square + f32(1))

    return derivative


def _softplus(math):
    exp, log1p = math.exp, math.log1p

    def value(x):
        scaled = f32(10) * x
        if scaled > f32(0):
            return f32(0.1) * (scaled + log1p(exp(-scaled)))
        return f32(0.1) * log1p(exp(scaled))

    return value


def _softplus_derivative(math):
    exp = math.exp

    def derivative(y):
        return f32(1) - exp(f32(-10) * y)

    return derivative


def _tanh(math):
    tanh = math.tanh

    def value(x):
        return tanh(x)

    return value


def _tanh_derivative(math):
    def derivative(y):
        return f32(1) - y * y

    return derivative


ACTIVATIONS: dict[str, Activation] = {
    "None": Activation(_none, _none_derivative, True),
    "ReLU": Activation(_relu, _relu_derivative, True),
    "LeakyReLU": Activation(_leaky_relu, _leaky_relu_derivative, True),
    "SiLU": Activation(_silu, _silu_derivative, False),
    "Exponential": Activation(_exponential, _identity_of_output, True),
    "Sine": Activation(_sine, _sine_derivative, False),
    "Sigmoid": Activation(_sigmoid, _sigmoid_derivative, True),
    "Squareplus": Activation(_squareplus, _squareplus_derivative, True),
    "Softplus": Activation(_softplus, _softplus_derivative, True),
    "Tanh": Activation(_tanh, _tanh_derivative, True),
}


@functools.cache
def make_activation(target, name: str):
    """Scalar x -> phi(x)."""
    return target.scalar(ACTIVATIONS[name].make_value(target.math))


@functools.cache
def make_gate(target, name: str):
    """Scalar x or y -> phi', as `derivative_of_output` says."""
    return target.scalar(ACTIVATIONS[name].make_derivative(target.math))


@functools.cache
def make_apply_derivative(target, name: str):
    """Scalar (g, x or y) -> g phi'."""
    derivative = target.scalar_part(ACTIVATIONS[name].make_derivative(target.math))

    def apply(g, y):
        return g * derivative(y)

    return target.scalar(apply)
