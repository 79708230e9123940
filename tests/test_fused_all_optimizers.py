"""Every optimizer's kernels on the emulated driver, against the reference: every key, every nesting, every phase.

Both sides do the same float32 operations, but for sums over layers, powers of decays and quotients, so they part by
some units in the last place a step: 2e-5 of the way that the farthest parameter went, Shampoo's by 2e-4, since roots
of sums of 1e-7 apart differ by more. Gradients are small multiples of 1/64, half of those of the table 0, and some
steps have none that is finite.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from device_optimizer import DeviceOptimizer
from emulated_driver import EmulatedDriver, installed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optimizer_draws import LAYERS, LEAF, LEAVES, N_MATRIX, N_PARAMS, NESTED, WRAPPERS, composites

from numba_tcnn.config import parse_optimizer
from numba_tcnn.reference import make_optimizer
from numba_tcnn.specs import OptimizerSpec

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[EmulatedDriver]:
    """One for all examples of a test: what was compiled stays."""
    with pytest.MonkeyPatch.context() as patch, installed(EmulatedDriver(), patch) as emulated:
        yield emulated


def gradients(rng: np.random.Generator) -> np.ndarray:
    g = (rng.integers(-64, 65, N_PARAMS) / 64).astype(np.float32)
    g[N_MATRIX:] *= rng.random(N_PARAMS - N_MATRIX) < 0.5
    return g


def parse(config: dict[str, Any]) -> OptimizerSpec:
    return parse_optimizer(config, n_params=N_PARAMS)


def tolerance(config: dict[str, Any]) -> float:
    return 2e-4 if "Shampoo" in str(config) else 2e-5


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any], rtol: float, path: str = "") -> None:
    """Numbers and counts exactly, arrays to `rtol` of their largest element; rtol 0: bit for bit, dtypes included."""
    assert set(actual) == set(expected), path
    for name, value in expected.items():
        where = f"{path}.{name}"
        if isinstance(value, dict):
            assert_same_state(actual[name], value, rtol, where)
        elif not isinstance(value, np.ndarray):
            assert actual[name] == value and type(actual[name]) is type(value), where
        else:
            own = actual[name]
            assert own.dtype == value.dtype and own.shape == value.shape, where
            if rtol == 0 or value.dtype.kind == "u":
                np.testing.assert_array_equal(own, value, err_msg=where)
            else:
                atol = rtol * np.abs(value).max(initial=0)
                np.testing.assert_allclose(own, value, rtol=0, atol=atol, err_msg=where)


class Pair:
    """An optimizer on the device and in the reference, side by side."""

    def __init__(self, config: dict[str, Any], rng: np.random.Generator, dtype: str = "float16"):
        self.config, self.rng, spec = config, rng, parse(config)
        self.w = rng.normal(size=N_PARAMS).astype(np.float32)
        self.start = self.w.copy()
        self.device, self.reference = (
            DeviceOptimizer(spec, self.w, LAYERS, dtype=dtype),
            make_optimizer(spec, N_PARAMS, LAYERS),
        )
        self.n_skipped = 0

    def step(self, finite: bool = True, **options: Any) -> None:
        g = gradients(self.rng)
        self.device.step(g, finite=finite, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of matrices without roots
            self.reference.step(self.w, g if finite else None)
        self.n_skipped += not finite

    def set_params(self) -> None:
        self.w[:] = self.rng.normal(size=N_PARAMS)
        self.start = self.w.copy()
        self.device.set_params(self.w)
        self.reference.forget_params()

    def set_learning_rate(self, value: float) -> None:
        self.device.optimizer.learning_rate = self.reference.learning_rate = value

    def check(self) -> None:
        rtol = tolerance(self.config)
        atol = rtol * np.abs(self.w - self.start).max() + 1e-6
        np.testing.assert_allclose(self.device.params, self.w, rtol=1e-6, atol=atol)
        assert_same_state(self.device.state(), self.reference.state(), 5 * rtol)
        kept, expected = self.device.inference_params, self.reference.inference_params
        assert (kept is None) == (expected is None)
        if kept is not None:
            np.testing.assert_allclose(kept, expected, rtol=1e-6, atol=atol)
        assert self.device.optimizer.current_step == self.reference.current_step
        assert self.device.optimizer.learning_rate == self.reference.learning_rate
        assert self.device.skipped == self.n_skipped


def assert_carried_over(pair: Pair) -> None:
    """Device, reference, another device: the same to the bit, also a step later."""
    state, spec = pair.device.state(), pair.device.optimizer.spec
    between, there = (
        make_optimizer(spec, N_PARAMS, LAYERS),
        DeviceOptimizer(spec, pair.device.params, LAYERS, dtype=pair.device.format.dtype),
    )
    between.load_state(state)
    assert_same_state(between.state(), state, 0)
    there.optimizer.load_state(between.state(), 0)
    assert_same_state(there.state(), state, 0)
    assert there.optimizer.learning_rate == pair.device.optimizer.learning_rate
    g = gradients(pair.rng)
    for one in (pair.device, there):
        one.step(g)
    np.testing.assert_array_equal(there.params, pair.device.params)
    assert_same_state(there.state(), pair.device.state(), 0)


def train(config: dict[str, Any], seed: int, n_steps: int, dtype: str = "float16") -> None:
    """With steps left out, the parameters set from outside once, and the learning rate changed once."""
    rng = np.random.default_rng(seed)
    pair = Pair(config, rng, dtype)
    changes = rng.integers(1, n_steps, 2)
    for i in range(n_steps):
        if i == changes[0]:
            pair.set_params()
        if i == changes[1]:
            pair.set_learning_rate(0.7 * pair.device.optimizer.learning_rate)
        pair.step(finite=rng.random() < 0.85, n_rows=int(rng.integers(1, 4)), scale=0.25, given_scale=0.5)
        if i in (0, 1, changes[0], n_steps - 1) or rng.random() < 0.2:
            pair.check()
    assert_carried_over(pair)


few = settings(deadline=None, max_examples=3, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name == "Shampoo" else []) for name in LEAVES]
)
@few
@given(data=st.data(), seed=SEEDS)
def test_optimizers_that_move_parameters(name: str, data: st.DataObject, seed: int) -> None:
    train(data.draw(LEAVES[name]), seed, 24)


@pytest.mark.parametrize("name", WRAPPERS)
@few
@given(data=st.data(), seed=SEEDS)
def test_optimizers_around_others(name: str, data: st.DataObject, seed: int) -> None:
    train(data.draw(WRAPPERS[name]), seed, 24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("leaf", ["Adam", "Novograd", "Shampoo", "SGD"])
def test_parameters_of_every_number_format(leaf: str, dtype: str) -> None:
    """What kernels read is a bfloat16 copy, or the float32 master; what inference uses is kept in the same format."""
    config = {"otype": "EMA", "decay": 0.8, "nested": {"otype": leaf, "learning_rate": 1e-2}}
    train(config, 3, 6, dtype)
    lookahead = {"otype": "Lookahead", "n_steps": 2, "nested": {"otype": leaf}}
    halves = [{**lookahead, "n_params_to_optimize": 30}, {"otype": "Adam", "n_params_to_optimize": N_PARAMS - 30}]
    train({"otype": "Average", "n_samples": 3, "nested": {"otype": "Composite", "nested": halves}}, 4, 6, dtype)


@few
@given(NESTED, SEEDS)
def test_optimizers_around_optimizers_around_others(config: dict[str, Any], seed: int) -> None:
    train(config, seed, 24)


COMPOSITES = composites(st.one_of(LEAF, *WRAPPERS.values()))


@few
@given(COMPOSITES, SEEDS)
def test_an_optimizer_for_each_slice(config: dict[str, Any], seed: int) -> None:
    """Slices that end anywhere, some empty: kernels that start in the middle of a vector, and pieces of matrices."""
    train(config, seed, 20)


@pytest.mark.exhaustive
@few
@given(COMPOSITES, st.sampled_from(["EMA", "Average", "Lookahead", "Batched", "ExponentialDecay"]), SEEDS)
def test_optimizers_around_a_composite(config: dict[str, Any], otype: str, seed: int) -> None:
    keys = {"Lookahead": {"n_steps": 4}, "Batched": {"batch_size_multiplier": 3}}.get(otype, {})
    train({"otype": otype, "nested": config, **keys}, seed, 20)


@pytest.mark.parametrize("cuts", [(N_PARAMS,), (10, 55, 2, 13)], ids=str)
def test_biases_are_no_matrices(cuts: tuple[int, ...], rng: np.random.Generator) -> None:
    """They come with the network's sums, between its matrices (48 parameters) and the table: 4 + 8 of them."""
    adam = {"otype": "EMA", "nested": {"otype": "Adam", "l2_reg": 0.1, "non_matrix_learning_rate_factor": 3.0}}
    spec = parse({"otype": "Composite", "nested": [{**adam, "n_params_to_optimize": n} for n in cuts]})
    w, layers = rng.normal(size=N_PARAMS).astype(np.float32), [(4, 6), (8, 3)]
    device, reference = DeviceOptimizer(spec, w, layers, biases=True), make_optimizer(spec, N_PARAMS, layers)
    assert device.n_network == 60
    for _ in range(4):
        g = gradients(rng)
        device.step(g)
        reference.step(w, g)
    np.testing.assert_allclose(device.params, w, rtol=1e-6, atol=1e-7)
    assert_same_state(device.state(), reference.state(), 1e-5)
    assert device.inference_params is not None


def test_losses_and_skipped_steps_are_counted_once(rng: np.random.Generator) -> None:
    """Whatever the number of slices."""
    slices = [{"otype": "SGD", "n_params_to_optimize": 30}, {"otype": "Adam", "n_params_to_optimize": 50}]
    device = DeviceOptimizer(parse({"otype": "Composite", "nested": slices}), np.zeros(N_PARAMS, np.float32), LAYERS)
    assert device.step(gradients(rng), losses=[0.25, 0.5], scale=0.5) == 0.375
    device.step(gradients(rng), finite=False)
    device.step(gradients(rng), finite=False)
    assert device.skipped == 2 and device.optimizer.current_step == 3


def test_a_state_that_does_not_fit_changes_nothing(rng: np.random.Generator) -> None:
    config = {
        "otype": "EMA",
        "nested": {"otype": "Batched", "nested": {"otype": "Novograd"}, "batch_size_multiplier": 2},
    }
    device = DeviceOptimizer(parse(config), rng.normal(size=N_PARAMS).astype(np.float32), LAYERS)
    for _ in range(3):
        device.step(gradients(rng))
    before, other = device.state(), device.state()
    other["average"] += 1
    other["nested"]["nested"]["second_moments"] = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=r"optimizer state.nested.nested: second_moments has shape \(2,\), .*\(4,\)"):
        device.optimizer.load_state(other, 0)
    del other["nested"]["nested"]["second_moments"]
    with pytest.raises(ValueError, match=r"optimizer state.nested.nested holds .*; Novograd needs first_moments, "):
        device.optimizer.load_state(other, 0)
    assert_same_state(device.state(), before, 0)


def test_a_singular_matrix_keeps_its_last_root(rng: np.random.Generator) -> None:
    """A row without gradients, and no `identity`: L has no inverse root, and the one at hand, the identity, stays."""
    spec = parse({"otype": "Shampoo", "identity": 0.0, "l2_reg": 0.0, "cg_on_momentum": False})
    device = DeviceOptimizer(spec, rng.normal(size=12).astype(np.float32), [(3, 4)])
    g = gradients(rng)[:12]
    g[:4] = 0
    device.step(g)
    state = device.state()
    np.testing.assert_array_equal(state["left_roots"], np.eye(3, dtype=np.float32).reshape(-1))
    assert state["left_products"].any() and np.isfinite(device.params).all()
