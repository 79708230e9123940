"""All optimizers: 50 steps against independent float64 formulas, saved and restored states, fixed defects of tcnn.

Draws are the same in every run (derandomized): `absolute_decay` follows the sign of a weight, and a weight that crosses
0 within float32's rounding of a step would decay the other way.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_draws import LAYERS, LEAF, LEAVES, N_MATRIX, N_PARAMS, NESTED, WRAPPERS, composites
from optimizer_formulas import formulas

from numba_tcnn.config import parse_optimizer
from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.reference import make_optimizer
from numba_tcnn.reference.matrix_roots import inverse_fourth_roots
from numba_tcnn.reference.optimizer_contract import Optimizer

SEEDS = st.integers(0, 2**32 - 1)
SIMPLE = st.one_of(LEAVES["Adam"], LEAVES["SGD"])
AVERAGED = WRAPPERS["EMA"].filter(lambda c: c["nested"]["otype"] in ("Adam", "SGD"))
LOSS_SCALE = 64.0


def optimizer_of(config: dict[str, Any], n_params: int = N_PARAMS, layers: Any = LAYERS) -> Optimizer:
    return make_optimizer(parse_optimizer(config, n_params=n_params), n_params, layers)


def random_gradient(random: np.random.Generator, n: int = N_PARAMS) -> np.ndarray:
    """float32, of one of four magnitudes, about 30 % zeros."""
    magnitude = 10.0 ** random.integers(-3, 1)
    return (random.standard_normal(n) * (random.random(n) < 0.7) * magnitude).astype(np.float32)


# ------------------------------------------------------------------------------------------- formulas


def check_against_formulas(config: dict[str, Any], seed: int, n_steps: int = 50) -> None:
    """Trained and inference parameters within 2e-5 of float64's, relative to the largest movement where that exceeds 1:
    50 steps of float32 roundings (2^-24 each of weights up to 1, of moments and of the root of a product)."""
    random = np.random.default_rng(seed)
    params = random.uniform(-1, 1, N_PARAMS).astype(np.float32)
    start = exact = params.astype(np.float64)
    optimizer, expected = optimizer_of(config), formulas(config, N_PARAMS, LAYERS)
    for i in range(n_steps):
        gradient = random_gradient(random)
        optimizer.step(params, gradient * np.float32(LOSS_SCALE), LOSS_SCALE)
        exact = expected.step(exact, gradient.astype(np.float64))
        tolerance = 2e-5 * max(1.0, np.abs(exact - start).max())
        np.testing.assert_allclose(params, exact, rtol=0, atol=tolerance, err_msg=f"step {i + 1} of {config}")
        kept = optimizer.inference_params
        inference = params if kept is None else kept
        np.testing.assert_allclose(inference, expected.inference(exact), rtol=0, atol=tolerance, err_msg=str(config))
        assert optimizer.learning_rate == pytest.approx(expected.rate, rel=1e-12)
        assert optimizer.current_step == expected.count
        assert params.dtype == inference.dtype == np.float32


@pytest.mark.parametrize("otype", [*LEAVES, *WRAPPERS])
def test_formulas(otype: str) -> None:
    @settings(deadline=None, max_examples=60, derandomize=True)
    @given((LEAVES | WRAPPERS)[otype], SEEDS)
    def check(config: dict[str, Any], seed: int) -> None:
        check_against_formulas(config, seed)

    check()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(NESTED, SEEDS)
def test_formulas_of_nested_wrappers(config: dict[str, Any], seed: int) -> None:
    check_against_formulas(config, seed)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(composites(st.one_of(SIMPLE, AVERAGED)), SEEDS)
def test_formulas_of_composites(config: dict[str, Any], seed: int) -> None:
    check_against_formulas(config, seed)


@pytest.mark.parametrize("otype", [*LEAVES, *WRAPPERS])
def test_formulas_with_default_keys(otype: str) -> None:
    config = {"otype": otype} | ({"nested": {"otype": "SGD"}} if otype in WRAPPERS else {})
    check_against_formulas(config, seed=1)


def test_nested_is_adam_by_default() -> None:
    for otype in WRAPPERS:
        given, default = optimizer_of({"otype": otype, "nested": {"otype": "Adam"}}), optimizer_of({"otype": otype})
        assert given.spec == default.spec


def test_ema_of_published_numbers() -> None:
    """d = 0.99 on 1, 2, 4: 1, 1.5025126, 2.3433891. 1e-6: float32."""
    optimizer = optimizer_of({"otype": "EMA", "nested": {"otype": "SGD", "learning_rate": 1, "l2_reg": 0}}, 1, [])
    params = np.zeros(1, np.float32)
    for gradient, expected in ((-1, 1.0), (-1, 1.5025126), (-2, 2.3433891)):
        optimizer.step(params, np.array([gradient], np.float32))
        assert optimizer.inference_params[0] == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------- state


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return set(a) == set(b) and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and isinstance(a, int | float) and a == b


def steps(optimizer: Optimizer, params: np.ndarray, gradients: list[np.ndarray | None]) -> None:
    for gradient in gradients:
        optimizer.step(params, gradient)


def check_resumed(config: dict[str, Any], seed: int, first: int = 9, then: int = 15) -> None:
    """A step now and then has no gradients (they were not finite)."""
    random = np.random.default_rng(seed)
    gradients = [random_gradient(random) if random.random() < 0.9 else None for _ in range(first + then)]
    params = random.uniform(-1, 1, N_PARAMS).astype(np.float32)
    optimizer, resumed = optimizer_of(config), optimizer_of(config)
    steps(optimizer, params, gradients[:first])
    optimizer.learning_rate *= 0.75
    state, copied = optimizer.state(), params.copy()
    resumed.load_state(state)
    assert same_state(resumed.state(), state)
    before = resumed.inference_params
    assert (before is None) == (optimizer.inference_params is None)
    assert before is None or np.array_equal(before, optimizer.inference_params)
    steps(optimizer, params, gradients[first:])
    steps(resumed, copied, gradients[first:])
    assert np.array_equal(params, copied)
    assert same_state(resumed.state(), optimizer.state())
    assert not same_state(state, optimizer.state()), "the state is not a copy"


@pytest.mark.parametrize("otype", [*LEAVES, *WRAPPERS])
def test_state_continues_bit_for_bit(otype: str) -> None:
    @settings(deadline=None, max_examples=25, derandomize=True)
    @given((LEAVES | WRAPPERS)[otype], SEEDS)
    def check(config: dict[str, Any], seed: int) -> None:
        check_resumed(config, seed)

    check()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.one_of(NESTED, composites(st.one_of(LEAF, NESTED))), SEEDS)
def test_state_of_nested_optimizers_continues_bit_for_bit(config: dict[str, Any], seed: int) -> None:
    check_resumed(config, seed)


@pytest.mark.parametrize(
    ("config", "state_of", "message"),
    [
        ({"otype": "SGD"}, {"otype": "Adam"}, "optimizer state holds .*first_moments.*; Sgd needs learning_rate, step"),
        ({"otype": "EMA"}, {"otype": "EMA", "nested": {"otype": "SGD"}}, "optimizer state.nested holds step, learn"),
        ({"otype": "Average", "n_samples": 3}, {"otype": "Average", "n_samples": 4}, "samples has shape"),
    ],
)
def test_states_of_other_optimizers_are_refused(config: dict, state_of: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_of(config).load_state(optimizer_of(state_of).state())


# --------------------------------------------------------------------------- steps without gradients


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.one_of(LEAF, NESTED), SEEDS)
def test_a_step_without_gradients_counts_and_moves_nothing(config: dict[str, Any], seed: int) -> None:
    """Lookahead alone sets parameters to those it keeps, on schedule."""
    random = np.random.default_rng(seed)
    params = random.uniform(-1, 1, N_PARAMS).astype(np.float32)
    optimizer = optimizer_of(config)
    for _ in range(3):
        optimizer.step(params, random_gradient(random))
        before, n = params.copy(), optimizer.current_step
        optimizer.step(params, None)
        if "Lookahead" not in str(config) and "Batched" not in str(config):
            assert np.array_equal(params, before) and optimizer.current_step == n + 1
        assert np.isfinite(params).all()


@pytest.mark.parametrize("config", [{"otype": "Adam", "l2_reg": 0}, {"otype": "Novograd"}, {"otype": "Shampoo"}])
def test_absolute_decay_of_weights_that_are_0(config: dict[str, Any]) -> None:
    """They go as their sign says, which 0 has too: with gradients of 0, by rate times decay, away from their side."""
    is_adam = config["otype"] == "Adam"
    layers = [(1, 2)] if is_adam else []  # Adam passes over an encoding's parameters that have no gradient
    optimizer = optimizer_of({**config, "learning_rate": 1.0, "absolute_decay": 0.25}, 2, layers)
    params = np.array([0.0, -0.0], np.float32)
    optimizer.step(params, np.zeros(2, np.float32))
    rate = np.sqrt(1 - 0.999) / (1 - 0.9) if is_adam else 1.0  # of the first step
    np.testing.assert_allclose(params, [-0.25 * rate, 0.25 * rate], rtol=1e-6)  # float32


def test_bounds_of_adabound_close_in_with_every_step() -> None:
    """Also with those that had no gradients, and for parameters that have seen few: t is the step. With β₂ = 0.9 and a
    learning rate far above the bounds, the second update, in step 5, goes 0.1 + 0.1/(0.1·5) times the first moment."""
    optimizer = optimizer_of(
        {"otype": "Adam", "adabound": True, "beta2": 0.9, "learning_rate": 100, "l2_reg": 0}, 1, []
    )
    params, gradient = np.zeros(1, np.float32), np.ones(1, np.float32)
    optimizer.step(params, gradient)
    for without in (None, np.zeros(1, np.float32), None):
        optimizer.step(params, without)
    before = params.copy()
    optimizer.step(params, gradient)
    first_moment = 0.9 * 0.1 + 0.1
    np.testing.assert_allclose(before - params, [(0.1 + 0.1 / 0.5) * first_moment], rtol=1e-5)  # float32 of order 1


@pytest.mark.parametrize("otype", [*LEAVES, "Average", "EMA"])
def test_a_first_step_without_gradients_leaves_no_trace(otype: str) -> None:
    """The next one moves parameters as a first step does: what is special about it waits for gradients."""
    random = np.random.default_rng(3)
    late, fresh = optimizer_of({"otype": otype}), optimizer_of({"otype": otype})
    params = random.uniform(-1, 1, N_PARAMS).astype(np.float32)
    copied = params.copy()
    late.step(params, None)
    for _ in range(4):
        gradient = random_gradient(random)
        late.step(params, gradient)
        fresh.step(copied, gradient)
        np.testing.assert_array_equal(params, copied)


def test_batched_leaves_gradients_out_that_were_not_finite() -> None:
    config = {
        "otype": "Batched",
        "batch_size_multiplier": 3,
        "nested": {"otype": "SGD", "learning_rate": 1, "l2_reg": 0},
    }
    optimizer, params = optimizer_of(config, 1, []), np.zeros(1, np.float32)
    one, two = (np.array([value], np.float32) for value in (1, 2))
    for gradient in (one, None, two):
        optimizer.step(params, gradient)
    assert params[0] == -1.5  # the mean of two
    for _ in range(3):
        optimizer.step(params, None)
    assert params[0] == -1.5 and optimizer.nested.current_step == 2 and optimizer.current_step == 6


def test_batched_takes_gradients_of_different_loss_scales() -> None:
    optimizer = optimizer_of({"otype": "Batched", "batch_size_multiplier": 2, "nested": {"otype": "SGD", "l2_reg": 0}})
    params = np.zeros(N_PARAMS, np.float32)
    optimizer.step(params, np.full(N_PARAMS, 128, np.float32), 128.0)
    optimizer.step(params, np.full(N_PARAMS, 3, np.float32), 1.0)
    np.testing.assert_allclose(params, -2e-3, rtol=1e-6)


# ------------------------------------------------------------------- parameters set from outside


@pytest.mark.parametrize("otype", ["Average", "EMA", "Lookahead"])
def test_averages_start_again_when_parameters_are_set(otype: str) -> None:
    """The average goes on as a fresh one would; what remembers gradients stays."""
    random = np.random.default_rng(5)
    nested = {"otype": "SGD", "learning_rate": 0.1}
    config = {"otype": otype, "nested": nested} | ({"n_steps": 4} if otype == "Lookahead" else {})
    used, fresh = optimizer_of(config), optimizer_of(config)
    params = random.uniform(-1, 1, N_PARAMS).astype(np.float32)
    for _ in range(8):
        used.step(params, random_gradient(random))
    used.forget_params()
    assert used.inference_params is None
    params = random.uniform(-1, 1, N_PARAMS).astype(np.float32)
    copied = params.copy()
    for _ in range(6):
        gradient = random_gradient(random)
        used.step(params, gradient)
        fresh.step(copied, gradient)
        np.testing.assert_array_equal(used.inference_params, fresh.inference_params)
    adam = optimizer_of({"otype": otype})
    adam.step(params, random_gradient(random))
    moments = adam.nested.first_moments.copy()
    adam.forget_params()
    np.testing.assert_array_equal(adam.nested.first_moments, moments)


def test_the_outermost_average_counts() -> None:
    inner = {"otype": "Average", "n_samples": 2, "nested": {"otype": "SGD", "learning_rate": 1, "l2_reg": 0}}
    optimizer = optimizer_of({"otype": "EMA", "decay": 0.5, "nested": inner}, 1, [])
    params = np.zeros(1, np.float32)
    for _ in range(2):
        optimizer.step(params, np.array([-1], np.float32))
    # params 1, 2; averages 1, 1.5; their exponential average (0.25·1 + 0.5·1.5)/0.75
    assert optimizer.nested.inference_params[0] == 1.5
    assert optimizer.inference_params[0] == pytest.approx((0.25 + 0.75) / 0.75, rel=1e-6)
    around = optimizer_of({"otype": "ExponentialDecay", "nested": inner}, 1, [])
    around.step(np.zeros(1, np.float32), np.array([-1], np.float32))
    assert around.inference_params[0] == 1


# -------------------------------------------------------------------------------------- learning rate


def test_learning_rate_through_nesting() -> None:
    schedule = {"otype": "ExponentialDecay", "decay_base": 0.5, "decay_start": 2, "decay_interval": 2}
    inner = {"otype": "Batched", "batch_size_multiplier": 1, "nested": {"otype": "SGD", "learning_rate": 0.5}}
    optimizer = optimizer_of({"otype": "EMA", "nested": {**schedule, "nested": inner}})
    sgd, rates = optimizer.nested.nested.nested, []
    params, gradient = np.ones(N_PARAMS, np.float32), np.zeros(N_PARAMS, np.float32)
    for step in range(6):
        if step == 3:
            optimizer.learning_rate = 1.0  # as it is now, behind one decay
            assert optimizer.learning_rate == sgd.learning_rate == 1.0
        optimizer.step(params, gradient)
        rates.append(optimizer.learning_rate)
        assert sgd.learning_rate == rates[-1]
    assert rates == [0.5, 0.5, 0.25, 1.0, 0.5, 0.5]


def test_a_rate_that_decayed_to_nothing_can_be_set_again() -> None:
    config = {"otype": "ExponentialDecay", "decay_base": 0.0, "decay_start": 0, "decay_end": 0}
    optimizer = optimizer_of({**config, "nested": {"otype": "SGD", "learning_rate": 0.5}})
    params = np.ones(N_PARAMS, np.float32)
    optimizer.step(params, params)
    assert optimizer.learning_rate == 0 and params[0] == 1
    optimizer.learning_rate = 0.25
    optimizer.step(params, np.ones(N_PARAMS, np.float32))
    assert optimizer.learning_rate == 0.25 and params[0] == pytest.approx(0.75)


def test_learning_rate_of_a_composite_is_a_factor() -> None:
    nested = [{"otype": "SGD", "learning_rate": 0.5}, {"otype": "EMA", "nested": {"learning_rate": 0.01}}]
    sizes = (N_MATRIX, N_PARAMS - N_MATRIX)
    slices = [{**own, "n_params_to_optimize": n} for own, n in zip(nested, sizes, strict=True)]
    composite = {"otype": "Composite", "nested": slices}
    optimizer = optimizer_of({"otype": "ExponentialDecay", "decay_start": 1, "decay_interval": 1, "nested": composite})
    params = np.ones(N_PARAMS, np.float32)
    assert optimizer.learning_rate == 1
    steps(optimizer, params, [params.copy()] * 2)
    assert optimizer.learning_rate == 0.1
    assert [own.learning_rate for own in optimizer.nested.nested] == pytest.approx([0.05, 0.001])
    optimizer.learning_rate = 2  # of the rates at the beginning, whatever they are now
    assert [own.learning_rate for own in optimizer.nested.nested] == pytest.approx([1.0, 0.02])


# ------------------------------------------------------------------------- tiny-cuda-nn's defects, fixed


def test_defect_07_average_keeps_no_initial_weights() -> None:
    """tiny-cuda-nn's average holds the initial weights as an offset for good, and counts missing samples as 0."""
    random = np.random.default_rng(2)
    optimizer = optimizer_of({"otype": "Average", "n_samples": 4, "nested": {"otype": "SGD", "learning_rate": 0.1}})
    params, history = np.full(N_PARAMS, 100, np.float32), []
    for _ in range(11):
        optimizer.step(params, random_gradient(random))
        history.append(params.copy())
        mean = np.mean(history[-4:], axis=0, dtype=np.float64)
        np.testing.assert_allclose(optimizer.inference_params, mean, rtol=1e-7)  # one rounding to float32


def test_defect_08_novograd_norms_are_of_one_layer_and_one_step() -> None:
    """tiny-cuda-nn's norm adds up over layers and steps. Without momentum the first step is g/‖g‖ of each layer; later
    ones with a constant gradient too, since v then stays ‖g‖²."""
    config = {"otype": "Novograd", "learning_rate": 1.0, "beta1": 0.0, "epsilon": 1e-30}
    optimizer = optimizer_of(config)
    params, gradient = np.zeros(N_PARAMS, np.float32), np.zeros(N_PARAMS, np.float32)
    layers = [slice(0, 24), slice(24, 48), slice(48, 60), slice(60, 80)]
    for layer, magnitude in zip(layers, (1e-3, 1.0, 50.0, 4.0), strict=True):
        gradient[layer] = magnitude * np.arange(1, layer.stop - layer.start + 1)
    for n_steps in range(1, 4):
        optimizer.step(params, gradient)
        for layer in layers:
            assert np.linalg.norm(params[layer]) == pytest.approx(n_steps, rel=1e-5)  # float32


def test_defect_08_novograd_trains_encodings() -> None:
    optimizer = optimizer_of({"otype": "Novograd"}, 20, [])
    params = np.zeros(20, np.float32)
    optimizer.step(params, np.ones(20, np.float32))
    np.testing.assert_allclose(params, -1e-3 / np.sqrt(20), rtol=1e-6)


def test_defect_09_composite_slices_layers() -> None:
    """A slice knows its matrices wherever it is cut; tiny-cuda-nn counts the layers wrongly from the second on."""
    sizes = ParameterSizes(N_PARAMS, tuple(LAYERS))
    assert sizes.part(0, 24).layer_sizes == ((4, 6),)
    assert sizes.part(24, 80) == ParameterSizes(56, ((4, 6), (3, 4)))
    assert sizes.part(12, 54).layer_sizes == ((2, 6), (4, 6), (1, 4), (1, 2))  # whole rows, then half a row more
    assert sizes.part(3, 5).layer_sizes == ((1, 2),)  # inside a row
    assert sizes.part(3, 26).layer_sizes == ((1, 3), (3, 6), (1, 2))
    assert sizes.part(60, 80) == ParameterSizes(20)
    assert sizes.part(59, 61) == ParameterSizes(2, ((1, 1),))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.integers(0, N_PARAMS), max_size=4))
def test_defect_09_composite_slices_anywhere(cuts: list[int]) -> None:
    """All slices together hold every matrix element once, and no slice has other columns than its matrix or fewer."""
    sizes = ParameterSizes(N_PARAMS, tuple(LAYERS))
    bounds = [0, *sorted(cuts), N_PARAMS]
    parts = [sizes.part(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert sum(part.n_params for part in parts) == N_PARAMS
    assert sum(part.n_matrix_params for part in parts) == N_MATRIX
    assert all(columns <= 6 and rows > 0 and columns > 0 for part in parts for rows, columns in part.layer_sizes)


@pytest.mark.parametrize("otype", ["Adam", "Novograd", "Shampoo"])
def test_defect_09_composite_on_layer_borders_is_each_layer_alone(otype: str) -> None:
    """Three slices with one matrix, one matrix, and a matrix and the encoding, against optimizers of their own."""
    bounds, layers = [0, 24, 48, 80], [[(4, 6)], [(4, 6)], [(3, 4)]]
    own = {"otype": otype, "learning_rate": 1e-2}
    sizes = np.diff(bounds).tolist()
    composite = optimizer_of({"otype": "Composite", "nested": [{**own, "n_params_to_optimize": n} for n in sizes]})
    alone = [optimizer_of(own, n, shapes) for n, shapes in zip(sizes, layers, strict=True)]
    random = np.random.default_rng(4)
    params = random.uniform(-1, 1, N_PARAMS).astype(np.float32)
    expected = params.copy()
    for _ in range(25):
        gradient = random_gradient(random)
        composite.step(params, gradient)
        for optimizer, a, b in zip(alone, bounds[:-1], bounds[1:], strict=True):
            optimizer.step(expected[a:b], gradient[a:b])
    np.testing.assert_array_equal(params, expected)


def test_composite_must_hold_all_parameters() -> None:
    spec = parse_optimizer({"otype": "Composite", "nested": [{"n_params_to_optimize": 5}]})
    with pytest.raises(ValueError, match="n_params_to_optimize sum to 5, the parameters are 6"):
        make_optimizer(spec, 6)


def test_more_matrices_than_parameters() -> None:
    with pytest.raises(ValueError, match="layer_sizes hold 6 parameters, more than n_params = 5"):
        make_optimizer(parse_optimizer({}), 5, [(2, 3)])


@pytest.mark.parametrize("full_precision", [False, True])
def test_ema_is_float32_with_and_without_full_precision(full_precision: bool) -> None:
    """tiny-cuda-nn keeps half precision without the flag, and reads memory it doesn't own where it is set later."""
    random = np.random.default_rng(8)
    optimizer = optimizer_of({"otype": "EMA", "full_precision": full_precision, "nested": {"otype": "SGD"}})
    params = random.uniform(0.5, 1, N_PARAMS).astype(np.float32)
    for _ in range(20):
        optimizer.step(params, np.ones(N_PARAMS, np.float32))
    assert optimizer.inference_params.dtype == np.float32
    assert np.mean(optimizer.inference_params != optimizer.inference_params.astype(np.float16)) > 0.9


# --------------------------------------------------------------------------------------------- Shampoo


@pytest.mark.parametrize("n", [1, 3, 16, 64])
def test_inverse_fourth_roots(n: int) -> None:
    """Eigenvalues over seven orders of magnitude: 1e-6 relative, float64 roundings times the condition number."""
    random = np.random.default_rng(n)
    matrices = []
    for largest in (1e-5, 1.0, 1e6):
        q, _ = np.linalg.qr(random.standard_normal((n, n)))
        values = largest * 10 ** random.uniform(-7, 0, n)
        matrices.append((q * values) @ q.T)
    roots = inverse_fourth_roots(np.array(matrices))
    for matrix, root in zip(matrices, roots, strict=True):
        values, vectors = np.linalg.eigh(matrix)
        expected = (vectors * values**-0.25) @ vectors.T
        assert np.linalg.norm(root - expected) <= 1e-6 * np.linalg.norm(expected)


def test_singular_matrices_have_no_root_and_spoil_no_other() -> None:
    roots = inverse_fourth_roots(np.array([np.zeros((2, 2)), np.diag([1.0, 0.0]), 16 * np.eye(2)]))
    assert np.isnan(roots[:2]).all()
    np.testing.assert_allclose(roots[2], np.eye(2) / 2, atol=1e-12)


def test_shampoo_goes_on_where_a_root_is_missing() -> None:
    """Without `identity` a matrix that never had a gradient has no inverse root: a warning, the identity in use."""
    config = {"otype": "Shampoo", "identity": 0.0, "l2_reg": 0.0}
    optimizer, params = optimizer_of(config, 4, [(2, 2)]), np.ones(4, np.float32)
    with pytest.warns(RuntimeWarning, match="no inverse root"):
        optimizer.step(params, np.zeros(4, np.float32))
    for _ in range(5):
        optimizer.step(params, np.array([1, 2, 3, 4], np.float32))
    assert np.isfinite(params).all() and (params < 1).all()


def test_shampoo_refreshes_roots_on_schedule() -> None:
    """Two runs of equal shapes: every 5 steps one of them, from step 100 on every 100."""
    optimizer, params = optimizer_of({"otype": "Shampoo"}), np.zeros(N_PARAMS, np.float32)
    random = np.random.default_rng(3)
    parts = {"first": slice(0, 32), "second": slice(32, 41)}  # of left_roots: 4², 4² and 3²
    seen = []
    for step in range(1, 311):
        before = optimizer.left_roots.copy()
        optimizer.step(params, random_gradient(random))
        changed = [name for name, part in parts.items() if (optimizer.left_roots[part] != before[part]).any()]
        if changed:
            seen.append((step, *changed))
    early = [(step, ["first", "second"][step // 5 % 2]) for step in range(5, 100, 5)]
    late = [(step, ["first", "second"][step // 100 % 2]) for step in (100, 200, 300)]
    assert seen == [(1, "first", "second"), *early, *late]


def test_shampoo_late_steps_keep_to_the_formulas() -> None:
    check_against_formulas({"otype": "Shampoo", "learning_rate": 3e-3}, seed=6, n_steps=130)


def test_shampoo_of_many_shapes() -> None:
    """More than ten groups: tiny-cuda-nn divides by an interval of 0; here one group has its turn in every step."""
    layers = [(2, 2 + i % 2) for i in range(13)]
    n = sum(rows * columns for rows, columns in layers)
    optimizer, params = optimizer_of({"otype": "Shampoo"}, n, layers), np.ones(n, np.float32)
    random = np.random.default_rng(3)
    for _ in range(15):
        optimizer.step(params, random_gradient(random, n))
    assert np.isfinite(params).all() and (params != 1).all()


def test_shampoo_without_layers_is_adam_without_its_epsilon_rule() -> None:
    """A bare encoding has no matrices; tiny-cuda-nn crashes. The step is the debiased Adam direction."""
    optimizer, params = optimizer_of({"otype": "Shampoo", "l2_reg": 0.0}, 3, []), np.zeros(3, np.float32)
    gradient = np.array([1e-3, -2.0, 30.0], np.float32)
    for step in range(1, 4):
        optimizer.step(params, gradient)
        np.testing.assert_allclose(params, -1e-3 * step * np.sign(gradient), rtol=1e-4)  # ε against 1e-3


def test_no_optimizer_warns_in_ordinary_training() -> None:
    random = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for otype in (*LEAVES, *WRAPPERS):
            optimizer, params = optimizer_of({"otype": otype}), np.zeros(N_PARAMS, np.float32)
            for _ in range(20):
                optimizer.step(params, random_gradient(random))
            assert np.isfinite(params).all()
