"""Per-layer widths, and hidden widths that are no multiple of 16, in whole fused kernels on the emulator.

Compared as in `test_fused_kernels.py`. Parameters are random in the padding too, and most activations here have
φ(0) ≠ 0: a padded neuron that took part would be off by far more than the tolerances.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_fused_kernels import GRID, HOPPER, check

from numba_tcnn.config import parse_model
from numba_tcnn.fused.network_plans import gradient_plans, staged_plans
from numba_tcnn.fused.plan import StagedPlan
from numba_tcnn.specs import ModelSpec


def spec_of(hidden: tuple[int, ...], activation: str = "Sigmoid") -> ModelSpec:
    return parse_model(2, 3, GRID, {"otype": "CutlassMLP", "hidden": hidden, "activation": activation})


@pytest.mark.parametrize("hidden", [(64, 32, 16), (16, 48), (20, 20), (5,), (24, 64, 7)], ids=str)
def test_hidden_widths(hidden: tuple[int, ...]) -> None:
    check(spec_of(hidden))


@pytest.mark.parametrize("activation", ["ReLU", "SiLU", "Exponential", "Squareplus"])
def test_padding_of_activations(activation: str) -> None:
    """SiLU keeps its derivative beside its output; the others take theirs from it."""
    check(spec_of((20, 40), activation), scale=0.5 if activation == "Exponential" else 1.0)


def test_given_gradients() -> None:
    check(spec_of((20, 40), "Tanh"), loss=None)


def test_staged_plans() -> None:
    """Widths whose dW does not fit the registers, saved and summed layer by layer."""
    spec = spec_of((128, 20, 64))
    plan = staged_plans(spec, HOPPER, encoding_gradient=True)[0]
    assert isinstance(plan, StagedPlan)
    assert len(plan.weight_gradients) == 4, "four different shapes"
    check(spec, plan=plan, chunk_rows=128, batch=200)


def test_a_padded_width_has_the_plans_of_its_padded_shape() -> None:
    padded, full = spec_of((20, 40)), spec_of((32, 48))
    assert np.array_equal(padded.layer_shapes, full.layer_shapes)
    assert gradient_plans(padded, HOPPER, encoding_gradient=True) == gradient_plans(
        full, HOPPER, encoding_gradient=True
    )
