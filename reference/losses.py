"""Losses: value and gradient of every element of a prediction p against its target t, both [batch, n].

With d = p - t and the density π of the sample (1 where there is none; Monte-Carlo estimates divide by it):

    L1            |d|/π                             sign(d)/π
    L2            d²/π                              2d/π
    RelativeL1    |d|/(|p| + ε)/π                   sign(d)/(|p| + ε)/π
    RelativeL2    d²/(p² + ε)/π                     2d/(p² + ε)/π
    RelativeL2Luminance   as RelativeL2 with the luminance Λ of the row in place of p in the denominator
    Mape          |d|/(|t| + ε)/π                   sign(d)/(|t| + ε)/π
    Smape         |d|/((|t| + |p|)/2 + ε)/π         sign(d)/((|t| + |p|)/2 + ε)/π
    CrossEntropy  -t ln(p)/π                        -t/p/π
    Variance      t²/π (1/p - 1/π)                  -t²/π/p²
    ConstantGradient      0                         c_j/π for output j, not divided by n·batch

ε = 0.01. As in tiny-cuda-nn, relative losses do not differentiate their denominator (it is a weight, held fixed), and
sign(0) is the sign of the zero, so the gradients of the L1 family never vanish. The functions carry no 1/(n·batch):
`evaluate_loss` applies it, and the training step does at its very end (`mean_factor`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from numba_tcnn.config_losses import check_loss
from numba_tcnn.specs import N_COLOURS, LossSpec

EPSILON = 0.01
LUMINANCE_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green, blue

Density = np.ndarray | float
LossFunction = Callable[[np.ndarray, np.ndarray, Density], tuple[np.ndarray, np.ndarray]]


def weighted_absolute(d: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.abs(d) * weight, np.copysign(weight, d)


def weighted_square(d: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.square(d) * weight, 2 * d * weight


def l1(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
    return weighted_absolute(p - t, np.ones_like(p) / pdf)


def l2(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
    return weighted_square(p - t, np.ones_like(p) / pdf)


def relative_l1(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
    return weighted_absolute(p - t, 1 / (np.abs(p) + EPSILON) / pdf)


def relative_l2(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
    return weighted_square(p - t, 1 / (np.square(p) + EPSILON) / pdf)


def luminance(p: np.ndarray) -> np.ndarray:
    """Λ [batch, 1] of the rows of p: columns 0, 1, 2 are red, green, blue; 3, 4, 5, if there, are added to them."""
    colour = p[:, :N_COLOURS]
    if p.shape[1] >= 2 * N_COLOURS:
        colour = colour + p[:, N_COLOURS : 2 * N_COLOURS]
    return colour @ np.asarray(LUMINANCE_WEIGHTS, p.dtype)[:, None]


def relative_l2_luminance(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
    weight = np.broadcast_to(1 / (np.square(luminance(p)) + EPSILON), p.shape)
    return weighted_square(p - t, weight / pdf)


def mape(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
    return weighted_absolute(p - t, 1 / (np.abs(t) + EPSILON) / pdf)


def smape(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
    return weighted_absolute(p - t, 1 / ((np.abs(t) + np.abs(p)) / 2 + EPSILON) / pdf)


def cross_entropy(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
    factor = -t / pdf
    return factor * np.log(p), factor / p


def variance(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
    factor = np.square(t) / pdf
    return factor / p - factor / pdf, -factor / np.square(p)


def constant_gradient(gradient: tuple[float, ...]) -> LossFunction:
    def evaluate(p: np.ndarray, t: np.ndarray, pdf: Density) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros_like(p), np.broadcast_to(np.asarray(gradient, p.dtype), p.shape) / pdf

    return evaluate


LOSSES: dict[str, LossFunction] = {
    "L1": l1,
    "L2": l2,
    "RelativeL1": relative_l1,
    "RelativeL2": relative_l2,
    "RelativeL2Luminance": relative_l2_luminance,
    "Mape": mape,
    "Smape": smape,
    "CrossEntropy": cross_entropy,
    "Variance": variance,
}


def loss_function(spec: LossSpec, n_output_dims: int) -> LossFunction:
    """The function that the spec means. Raises ConfigError where it can't be evaluated on rows of `n_output_dims`."""
    check_loss(spec, n_output_dims)
    return constant_gradient(spec.gradient) if spec.otype == "ConstantGradient" else LOSSES[spec.otype]


def mean_factor(spec: LossSpec, n: int) -> float:
    """What values and gradients of n = n_output_dims·batch elements are multiplied with."""
    return 1.0 if spec.otype == "ConstantGradient" else 1.0 / max(n, 1)


def evaluate_loss(
    spec: LossSpec,
    prediction: np.ndarray,
    target: np.ndarray,
    data_pdf: np.ndarray | None = None,
    loss_scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(values, gradients), both [batch, n_output_dims], in the prediction's dtype.

    Values are divided by n_output_dims·batch, so that their sum is the mean loss; gradients also, and multiplied by
    `loss_scale`.
    """
    loss = loss_function(spec, prediction.shape[1])
    factor = mean_factor(spec, prediction.size)
    with np.errstate(all="ignore"):
        values, gradients = loss(prediction, target, 1.0 if data_pdf is None else data_pdf)
        return values * factor, gradients * (loss_scale * factor)
