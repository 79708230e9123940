"""The runs of `benchmarks.agreement` that take several steps, between implementations that are both right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.agreement.draws import Draw
from benchmarks.agreement.fused_model import FusedModel
from benchmarks.agreement.training import SAME_GRADIENTS, OptimizerRun, optimizer_run, training_data
from numba_tcnn.reference.averaging import Lookahead

NETWORK = {"otype": "CutlassMLP", "n_neurons": 16, "n_hidden_layers": 2, "output_activation": "None"}
SMOOTH = Draw(2, 3, {"otype": "Identity"}, NETWORK | {"activation": "Tanh"}, "L2", seed=1)
EXPONENTIAL = Draw(2, 3, {"otype": "Identity"}, NETWORK | {"activation": "Exponential"}, "L2", seed=1)
N_SAMPLES, N_STEPS = 35, 7


def run(draw: Draw, optimizer: dict) -> tuple[OptimizerRun, np.ndarray, FusedModel]:
    """What was found, the parameters at the beginning, and the model behind it."""
    params = draw.params(draw.inputs(N_SAMPLES))
    fused = FusedModel(draw, params)
    return optimizer_run(fused, training_data(draw, params, N_SAMPLES), optimizer, N_STEPS), params, fused


def step_with_one_rounding(self: Lookahead, params: np.ndarray, gradients: np.ndarray | None, *more: float) -> None:
    """As a GPU does it: alpha (w - slow) is not rounded before slow is added."""
    if self.n_averaged == 0:
        self.slow_params[...] = params
        self.n_averaged = 1
    if self.nested.current_step % self.spec.n_steps == 0:
        moved = np.float64(np.float32(self.spec.alpha)) * (params - self.slow_params) + self.slow_params
        self.slow_params[...] = moved
        params[...] = self.slow_params
        self.n_averaged += 1
    self.nested.step(params, gradients, *more)


def test_steps_are_long_against_the_last_place_of_a_parameter(gpu, no_reference, monkeypatch) -> None:
    """Two sides that round differently in each step are apart by some last places; the way is 1e4 times as far."""
    monkeypatch.setattr(Lookahead, "step", step_with_one_rounding)
    optimizer = {"otype": "Lookahead", "alpha": 0.3, "n_steps": 1, "nested": {"otype": "SGD"}}
    found, start, fused = run(SMOOTH, optimizer)
    assert 0 < found.params.error < SAME_GRADIENTS / 4
    way = np.linalg.norm(fused.network.params - start) / np.linalg.norm(start)
    assert way > 1e-3


def test_an_optimizer_that_would_leave_the_range_of_numbers_is_compared_at_a_lower_rate(gpu, no_reference) -> None:
    found, start, fused = run(EXPONENTIAL, {"otype": "Adam", "learning_rate": 1.0})
    assert found.n_steps == N_STEPS
    assert found.params.holds and found.outputs.holds and np.isfinite(found.outputs.error)
    assert np.abs(fused.network.params - start).max() > 1e-2, "it goes as far as it can"


def test_an_optimizer_whose_steps_do_not_shrink_with_its_rate_makes_fewer(gpu, no_reference) -> None:
    """AdaBound's have a least size, and a ConstantGradient's gradients are sums over all samples."""
    draw = replace(EXPONENTIAL, loss="ConstantGradient")
    found, _, _ = run(draw, {"otype": "Adam", "adabound": True})
    assert 1 <= found.n_steps < N_STEPS
    assert found.params.holds and found.outputs.holds and np.isfinite(found.outputs.error)
