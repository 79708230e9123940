"""Second derivatives, where they are fused, against the reference of the draw's dtype.

A gate that the two sides find different changes a sample's second derivatives by per cents, as it does the first ones.
So samples that have a gate in doubt (a pre-activation no farther from 0 than two right implementations can be apart,
`gate_flips.GatedPass.ambiguous`) take part with v = 0 and dL/dy = 0, by which all that they add is 0 on both sides. How
many these are is told.

Kernels round tangents to the dtype and the reference doesn't. That costs 3e-4 to 8e-4 in float16, 8 times as much in
bfloat16, where the bar leaves as much room above that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.reference.model import SecondOrderGradients

from .comparison import Figure, has_gates, relative_error
from .draws import Draw
from .fused_model import FusedModel
from .gate_flips import GatedPass
from .second_reference import SecondReference

BARS = {"float16": 5e-3, "bfloat16": 2e-2, "float32": 1e-5}


@dataclass(frozen=True)
class SecondOrder:
    """What was found; without a figure, the reason why these derivatives are not fused. `left_out`: the fraction of the
    samples that have a gate in doubt."""

    figure: Figure | None
    reason: str = ""
    left_out: float = 0.0


def compare_second_order(fused: FusedModel, batch: int) -> SecondOrder:
    draw, x = fused.draw, fused.draw.inputs(batch)
    v, dL_dy = draw.directions(batch), draw.output_gradients(batch)
    model = draw.model(fused.params, draw.reference_dtype, batch)
    doubtful = in_doubt(draw, fused.params, x)
    v[doubtful], dL_dy[doubtful] = 0, 0
    try:
        found = fused.backward_backward_input(x, v, dL_dy)
    except EngineUnavailable as error:
        return SecondOrder(None, str(error))
    expected = model.backward_backward_input(x.astype(np.float32), v, dL_dy)
    errors = errors_of(found, expected)
    where = max(errors, key=lambda name: (np.isnan(errors[name]), errors[name]))

    def second_error(seed: int) -> float:
        second = SecondReference(draw, fused.params, seed).backward_backward_input(x, v, dL_dy)
        return errors_of(second, expected)[where]

    figure = Figure.measured(errors[where], BARS[draw.dtype], second_error, where)
    return SecondOrder(figure, left_out=float(doubtful.mean()))


def in_doubt(draw: Draw, params: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Which samples have a gate that two right implementations may find different, [batch]."""
    if not has_gates(draw):
        return np.zeros(len(x), bool)
    gates = GatedPass(draw.model(params, draw.reference_dtype, len(x)), x.astype(np.float32)).ambiguous()
    return np.logical_or.reduce([layer.any(axis=1) for layer in gates])


def errors_of(found: SecondOrderGradients, expected: SecondOrderGradients) -> dict[str, float]:
    return {name: relative_error(getattr(found, name), getattr(expected, name)) for name in vars(expected)}
