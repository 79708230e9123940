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

RelativeL2Luminance is RelativeL2 with the luminance of the prediction's row in place of p in the denominator:
`loss(p, t, density, luminance)`. ConstantGradient is no function here: the engine gives its gradient as that of the
outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from .fragments import FragmentShape, Target, lane_row_and_column

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


def _relative_l2_luminance(p, t, density, luminance):
    d = p - t
    s = f32(1) / ((luminance * luminance + f32(0.01)) * density)
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
    "RelativeL2Luminance": _relative_l2_luminance,
}
CONSTANT_GRADIENT = "ConstantGradient"
LUMINANCE_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green, blue


@functools.cache
def make_loss(target, name: str):
    """Scalar (prediction, target, density) -> (value, gradient); see `needs_luminance`."""
    return target.scalar(LOSSES[name])


def needs_luminance(name: str) -> bool:
    """Whether the loss takes the row's luminance as a fourth argument."""
    return name == "RelativeL2Luminance"


@functools.cache
def make_luminance(target: Target, shape: FragmentShape, n_outputs: int):
    """luminance(fragment) -> a fragment of the same shape: 0.299 r + 0.587 g + 0.114 b of each element's row.

    Columns 0, 1, 2 are r, g, b; where there are six outputs, columns 3, 4, 5 are added to them. They lie in the four
    lanes of a row, two in a lane.
    """
    weights = LUMINANCE_WEIGHTS * (2 if n_outputs >= 2 * len(LUMINANCE_WEIGHTS) else 1)

    @target.intrinsic([("f32", shape.n_elements)], ("f32", shape.n_elements))
    def luminance(e, fragment):
        _, t2 = lane_row_and_column(e)
        of_row = {}
        for i, value in enumerate(fragment):
            row, column = shape.element(i)
            if column >= 2:  # lane t has columns 2 t and 2 t + 1 of the first eight in elements of column 0 and 1
                continue
            share = e.f32(0.0)  # what is no colour counts for nothing, NaN too
            for colour in range(column, len(weights), 2):
                share = e.select(e.equal(t2, colour - column), e.fmul(value, e.f32(weights[colour])), share)
            of_row[row] = e.fadd(of_row[row], share) if row in of_row else share
        for row, total in of_row.items():
            total = e.fadd(total, e.shuffle_xor(total, 1))
            of_row[row] = e.fadd(total, e.shuffle_xor(total, 2))
        return [of_row[shape.element(i)[0]] for i in range(shape.n_elements)]

    return luminance
