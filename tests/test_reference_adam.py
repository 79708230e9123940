"""Adam: published numbers, an independent scalar implementation over random options, and its state."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_tcnn.reference import make_optimizer
from numba_tcnn.reference.adam import BLOCK
from numba_tcnn.specs import AdamSpec


def test_published_trajectory() -> None:
    """tiny-cuda-nn's defaults in double precision, one weight, gradients scaled by 128. 1e-7: float32 roundings."""
    optimizer = make_optimizer(AdamSpec(), 1, [(1, 1)])
    w = np.array([0.5], np.float32)
    expected = [
        (12.8, 0.4990000032, 0.0100000005, 1.0000001e-5),
        (-6.4, 0.4987336668, 0.0040000009, 1.24900005e-5),
        (3.2, 0.4983932385, 0.0061000014, 1.31025107e-5),
    ]
    for gradient, weight, first, second in expected:
        optimizer.step(w, np.array([gradient], np.float32), 128.0)
        assert w[0] == pytest.approx(weight, abs=1e-7)
        assert optimizer.first_moments[0] == pytest.approx(first, rel=1e-6)
        assert optimizer.second_moments[0] == pytest.approx(second, rel=1e-6)


class ScalarAdam:
    """The rules of the class's docstring for one parameter, in Python floats."""

    def __init__(self, spec: AdamSpec, matrix: bool):
        self.spec, self.matrix = spec, matrix
        self.m = self.v = 0.0
        self.k = self.t = 0

    def step(self, w: float, gradient: float) -> float:
        s = self.spec
        self.t += 1
        optimized = s.optimize_matrix_params if self.matrix else s.optimize_non_matrix_params
        if not optimized or (not self.matrix and gradient == 0 and s.skip_zero_grad_non_matrix_params):
            return w
        gradient += (s.l2_reg if self.matrix else s.non_matrix_l2_reg) * w
        if s.gradient_clipping_magnitude:
            gradient = math.copysign(min(abs(gradient), s.gradient_clipping_magnitude), gradient)
        self.m = s.beta1 * self.m + (1 - s.beta1) * gradient
        self.v = s.beta2 * self.v + (1 - s.beta2) * gradient * gradient
        self.k += 1
        eta = s.learning_rate * (1 if self.matrix else s.non_matrix_learning_rate_factor)
        eta *= math.sqrt(1 - s.beta2**self.k) / (1 - s.beta1**self.k)
        divisor = math.sqrt(self.v) + s.epsilon
        largest = float(np.finfo(np.float32).max)
        rate = min(eta / divisor, largest) if divisor > 0 else largest
        if s.adabound:
            t = (1 - s.beta2) * self.t
            rate = min(max(rate, 0.1 - 0.1 / (t + 1)), 0.1 + 0.1 / t)
        w = (1 - s.relative_decay * eta) * w - math.copysign(s.absolute_decay * eta, w)
        w -= rate * self.m
        if s.clipping_magnitude:
            w = max(-s.clipping_magnitude, min(w, s.clipping_magnitude))
        return w


specs = st.builds(
    AdamSpec,
    learning_rate=st.sampled_from([1e-3, 1e-2]),
    beta1=st.sampled_from([0.0, 0.9, 0.95]),
    beta2=st.sampled_from([0.9, 0.99, 0.999]),
    epsilon=st.sampled_from([1e-8, 1e-15]),
    l2_reg=st.sampled_from([0.0, 1e-6, 1e-2]),
    non_matrix_l2_reg=st.sampled_from([0.0, 1e-2]),
    non_matrix_learning_rate_factor=st.sampled_from([1.0, 0.1, 3.0]),
    relative_decay=st.sampled_from([0.0, 0.1]),
    absolute_decay=st.sampled_from([0.0, 0.01]),
    clipping_magnitude=st.sampled_from([0.0, 0.5]),
    gradient_clipping_magnitude=st.sampled_from([0.0, 0.3]),
    adabound=st.booleans(),
    optimize_matrix_params=st.booleans(),
    optimize_non_matrix_params=st.booleans(),
    skip_zero_grad_non_matrix_params=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(specs, st.integers(0, 2**32 - 1))
def test_every_option(spec: AdamSpec, seed: int) -> None:
    """Weights within 2e-5 of the scalar float64 rule: float32 roundings of nine steps of at most 0.1."""
    random = np.random.default_rng(seed)
    n, n_matrix = 30, 12
    params = random.uniform(-1, 1, n).astype(np.float32)
    optimizer = make_optimizer(spec, n, [(3, 4)])
    scalars = [ScalarAdam(spec, i < n_matrix) for i in range(n)]
    expected = params.astype(np.float64)
    for _ in range(9):
        gradients = (random.standard_normal(n) * (random.random(n) < 0.6)).astype(np.float32)
        optimizer.step(params, gradients * np.float32(64), 64.0)
        expected = [scalar.step(w, float(g)) for scalar, w, g in zip(scalars, expected, gradients, strict=True)]
        np.testing.assert_allclose(params, expected, rtol=2e-5, atol=2e-5)
    assert optimizer.param_steps.tolist() == [scalar.k for scalar in scalars]
    assert params.dtype == optimizer.first_moments.dtype == np.float32
    assert optimizer.current_step == 9


def test_zero_moments_without_epsilon_do_nothing() -> None:
    """0/0 is avoided by bounding the rate: a matrix weight without any gradient stays where it is."""
    optimizer = make_optimizer(AdamSpec(epsilon=0.0, l2_reg=0.0), 2, [(1, 2)])
    params = np.ones(2, np.float32)
    optimizer.step(params, np.zeros(2, np.float32))
    assert params.tolist() == [1, 1]


def test_blocks_do_not_show() -> None:
    """Vectors longer than a block, with blocks fully, partly and not touched, equal a step on each part alone."""
    random = np.random.default_rng(0)
    n, n_matrix = 4 * BLOCK + 17, BLOCK + 5
    gradients = random.standard_normal(n).astype(np.float32)
    gradients[n_matrix + BLOCK : n_matrix + 2 * BLOCK] = 0
    gradients[n_matrix + 2 * BLOCK :: 3] = 0
    params = random.standard_normal(n).astype(np.float32)
    whole, optimizer = params.copy(), make_optimizer(AdamSpec(), n, [(1, n_matrix)])
    for _ in range(3):
        optimizer.step(whole, gradients)
    for first in range(0, n, 10_007):
        part = slice(first, min(first + 10_007, n))
        alone = params[part].copy()
        own = make_optimizer(AdamSpec(), len(alone), [(1, max(0, min(n_matrix - first, len(alone))))])
        for _ in range(3):
            own.step(alone, gradients[part])
        assert np.array_equal(alone, whole[part])


def test_bias_correction_ends() -> None:
    """Long after the start the correction is 1; the table of corrections stays short."""
    optimizer = make_optimizer(AdamSpec(beta1=0.5, beta2=0.6, learning_rate=1e-3), 1, [(1, 1)])
    params, gradient = np.zeros(1, np.float32), np.ones(1, np.float32)
    for _ in range(500):
        optimizer.step(params, gradient)
    assert len(optimizer.debias) < 200
    before = params[0]
    optimizer.step(params, gradient)
    assert before - params[0] == pytest.approx(1e-3, rel=1e-3)  # a constant gradient moves by the learning rate


@pytest.mark.parametrize("count", [10**4, 10**6, 2**32 - 2])
def test_a_state_of_long_training_needs_no_long_table(count: int) -> None:
    """With Adam's defaults, β₂^k is below 1e-9 from k = 20,713 on, and a constant gradient moves by the rate."""
    optimizer, params = make_optimizer(AdamSpec(learning_rate=1e-3, l2_reg=0), 1, [(1, 1)]), np.zeros(1, np.float32)
    one = np.ones(1, np.float32)
    state = {"first_moments": one, "second_moments": one, "param_steps": np.array([count], np.uint32)}
    optimizer.load_state({**optimizer.state(), **state})
    optimizer.step(params, one)
    assert len(optimizer.debias) < 21_000
    expected = 1e-3 * np.sqrt(1 - 0.999 ** (count + 1.0))
    np.testing.assert_allclose(params, [-expected], rtol=1e-6)  # float32


def test_state_carries_over() -> None:
    random = np.random.default_rng(0)
    n = 100
    gradients = (random.standard_normal((20, n)) * (random.random((20, n)) < 0.5)).astype(np.float32)
    params = random.standard_normal(n).astype(np.float32)
    first = make_optimizer(AdamSpec(), n, [(4, 10)])
    for gradient in gradients[:10]:
        first.step(params, gradient)
    first.learning_rate = 5e-3
    state = first.state()
    assert {key: np.asarray(value).dtype for key, value in state.items() if np.ndim(value)} == {
        "first_moments": np.float32,
        "second_moments": np.float32,
        "param_steps": np.uint32,
    }
    second, copied = make_optimizer(AdamSpec(), n, [(4, 10)]), params.copy()
    second.load_state(state)
    for gradient in gradients[10:]:
        first.step(params, gradient)
        second.step(copied, gradient)
    assert np.array_equal(params, copied)
    assert second.current_step == 20 and second.learning_rate == 5e-3
    assert state["step"] == 10 and not np.array_equal(state["first_moments"], first.first_moments), "not a copy"


def test_state_of_another_size() -> None:
    state = make_optimizer(AdamSpec(), 3).state()
    with pytest.raises(ValueError, match="first_moments"):
        make_optimizer(AdamSpec(), 4).load_state(state)
