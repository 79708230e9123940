"""Losses as scalar device functions (mirror of reference/losses.py).

`loss(p, t, w) -> (value, gradient)` for a prediction p, a target t and the element's weight w, 1 over the probability
density with which it was sampled (1 where none is given), with d = p - t and without the factor 1 / (n_out * batch)
that turns the sum into a mean. Denominators count as constants, as in tiny-cuda-nn: the gradient is not differentiated
through them.

    L2            d^2 w                        2 d w
    L1            |d| w                        sign(d) w
    RelativeL2    d^2 s, s = w / (p^2 + 0.01)  2 d s
    RelativeL1    |d| s, s = w / (|p| + 0.01)  sign(d) s
    Mape          |d| s, s = w / (|t| + 0.01)  sign(d) s
    Smape         |d| s, s = w / ((|t| + |p|) / 2 + 0.01)  sign(d) s
    CrossEntropy  -t w ln(p)                   -t w / p
    Variance      t^2 w / p - t^2 w^2          -t^2 w / p^2

A weight, not a density to divide by: what a kernel multiplies by 1 costs nothing, but NVVM keeps a division by 1.

RelativeL2Luminance is RelativeL2 with the luminance of the prediction's row in place of p in the denominator:
`loss(p, t, w, luminance)`. ConstantGradient is no function here: the engine gives its gradient as that of the outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from .fragments import FragmentShape, Target, lane_row_and_column

f32 = np.float32


def _l2(p, t, w):
    d = p - t
    return d * d * w, f32(2) * d * w


def _l1(p, t, w):
    d = p - t
    return abs(d) * w, w if d >= f32(0) else -w


def _relative_l2(p, t, w):
    d = p - t
    s = w / (p * p + f32(0.01))
    return d * d * s, f32(2) * d * s


def _relative_l2_luminance(p, t, w, luminance):
    d = p - t
    s = w / (luminance * luminance + f32(0.01))
    return d * d * s, f32(2) * d * s


def _relative_l1(p, t, w):
    d = p - t
    s = w / (abs(p) + f32(0.01))
    return abs(d) * s, s if d >= f32(0) else -s


def _mape(p, t, w):
    d = p - t
    s = w / (abs(t) + f32(0.01))
    return abs(d) * s, s if d >= f32(0) else -s


def _smape(p, t, w):
    d = p - t
    s = w / (f32(0.5) * (abs(t) + abs(p)) + f32(0.01))
    return abs(d) * s, s if d >= f32(0) else -s


def _cross_entropy(p, t, w):
    f = -t * w
    return f * math.log(p), f / p


def _variance(p, t, w):
    f = t * t * w
    return f / p - f * w, -f / (p * p)


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
    """Scalar (prediction, target, weight) -> (value, gradient); see `needs_luminance`."""
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
