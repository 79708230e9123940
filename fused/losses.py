"""Losses as scalar device functions (mirror of reference/losses.py).

`loss(p, t, density) -> (value, gradient)` for a prediction p, a target t and the probability density with which the
element was sampled (1 where none is given), with d = p - t and without the factor 1 / (n_out * batch) that turns the
sum into a mean. Denominators count as constants, as in tiny-cuda-nn: the gradient is not differentiated through them.

    L2            d^2 / density                        2 d / density
    L1            |d| / density                        sign(d) / density
    RelativeL2    d^2 / (p^2 + 0.01) / density         2 d / (p^2 + 0.01) / density
    RelativeL1    |d| s, s = 1 / (|p| + 0.01) / density             sign(d) s
    Mape          |d| s, s = 1 / (|t| + 0.01) / density             sign(d) s
    Smape         |d| s, s = 1 / ((|t| + |p|) / 2 + 0.01) / density  sign(d) s
    CrossEntropy  -t ln(p) / density                   -t / p / density
    Variance      t^2 / p / density - t^2 / density^2  -t^2 / p^2 / density
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

f32 = np.float32


def _l2(math):
    def loss(p, t, density):
        d = p - t
        return d * d / density, f32(2) * d / density

    return loss


def _l1(math):
    def loss(p, t, density):
        d = p - t
        s = f32(1) / density
        return abs(d) * s, s if d >= f32(0) else -s

    return loss


def _relative_l2(math):
    def loss(p, t, density):
        d = p - t
        s = f32(1) / ((p * p + f32(0.01)) * density)
        return d * d * s, f32(2) * d * s

    return loss


def _relative_l1(math):
    def loss(p, t, density):
        d = p - t
        s = f32(1) / ((abs(p) + f32(0.01)) * density)
        return abs(d) * s, s if d >= f32(0) else -s

    return loss


def _mape(math):
    def loss(p, t, density):
        d = p - t
        s = f32(1) / ((abs(t) + f32(0.01)) * density)
        return abs(d) * s, s if d >= f32(0) else -s

    return loss


def _smape(math):
    def loss(p, t, density):
        d = p - t
        s = f32(1) / ((f32(0.5) * (abs(t) + abs(p)) + f32(0.01)) * density)
        return abs(d) * s, s if d >= f32(0) else -s

    return loss


def _cross_entropy(math):
    log = math.log

    def loss(p, t, density):
        f = -t / density
        return f * log(p), f / p

    return loss


def _variance(math):
    def loss(p, t, density):
        f = t * t / density
        return f / p - f / density, -f / (p * p)

    return loss


LOSSES: dict[str, Callable] = {
    "L2": _l2,
    "L1": _l1,
    "RelativeL2": _relative_l2,
    "RelativeL1": _relative_l1,
    "Mape": _mape,
    "Smape": _smape,
    "CrossEntropy": _cross_entropy,
    "Variance": _variance,
}


@functools.cache
def make_loss(target, name: str):
    """Scalar (prediction, target, density) -> (value, gradient)."""
    return target.scalar(LOSSES[name](target.math))
