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
import math
from collections.abc import Callable

import numpy as np

f32 = np.float32


def _l2(p, t, density):
    d = p - t
    return d * d / density, f32(2) * d / density


def _l1(p, t, density):
    d = p - t
    s = f32(1) / density
    return abs(d) * s, s if d >= f32(0) else -s


def _relative_l2(p, t, density):
    d = p - t
    s = f32(1) / ((p * p + f32(0.01)) * density)
    return d * d * s, f32(2) * d * s


def _relative_l1(p, t, density):
    d = p - t
    s = f32(1) / ((abs(p) + f32(0.01)) * density)
    return abs(d) * s, s if d >= f32(0) else -s


def _mape(p, t, density):
    d = p - t
    s = f32(1) / ((abs(t) + f32(0.01)) * density)
    return abs(d) * s, s if d >= f32(0) else -s


def _smape(p, t, density):
    d = p - t
    s = f32(1) / ((f32(0.5) * (abs(t) + abs(p)) + f32(0.01)) * density)
    return abs(d) * s, s if d >= f32(0) else -s


def _cross_entropy(p, t, density):
    f = -t / density
    return f * math.log(p), f / p


def _variance(p, t, density):
    f = t * t / density
    return f / p - f / density, -f / (p * p)


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
    return target.scalar(LOSSES[name])
