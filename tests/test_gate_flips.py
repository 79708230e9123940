"""The proof of flipped gates, tried on a second right implementation and on wrong ones; and the draws it is used on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from model_draws import LOSSES, covering

from benchmarks.agreement.comparison import Agreement, Comparison, relative_error
from benchmarks.agreement.deck import Deck
from benchmarks.agreement.draws import Draw
from benchmarks.agreement.gate_flips import GatedPass, explain_rows, flip_arrays
from benchmarks.agreement.random_draws import random_draw
from benchmarks.agreement.second_reference import SOME_ROUNDINGS, SecondReference
from numba_tcnn.reference.activations import ACTIVATIONS
from numba_tcnn.reference.model import Model

RELU = Draw(
    3,
    4,
    {"otype": "HashGrid", "n_levels": 8, "log2_hashmap_size": 9, "base_resolution": 4, "per_level_scale": 1.4},
    {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 4, "activation": "ReLU"},
    "RelativeL2",
)


def agreement(draw: Draw, n_samples: int, *batches: int, noise: float = SOME_ROUNDINGS) -> list[Agreement]:
    """Of the second right implementation."""
    x = draw.inputs(n_samples)
    params = draw.params(x)
    comparison, second = Comparison(draw, params, x), SecondReference(draw, params, noise=noise)
    return [comparison.on(second, batch) for batch in batches]


def test_two_right_implementations_differ_only_in_gates_that_are_in_doubt():
    (found,) = agreement(RELU, 4000, 4000, noise=2.0**-18)
    print(found)
    assert found.n_flipped > 0, "this case is meant to have flipped gates"
    assert found.holds
    # once the flips are accounted for, what is left is single float16 roundings of 2^-11
    assert found.errors["dL/dx"] < 1e-3 and found.errors["dL/dparams"] < 1e-3


@pytest.fixture(scope="module")
def samples() -> tuple[Model, np.ndarray, np.ndarray, GatedPass]:
    x = RELU.inputs(2000)
    model = RELU.model(RELU.params(x), "float16", len(x))
    return model, x, np.ones((len(x), RELU.n_output_dims), np.float32), GatedPass(model, x)


def observe_with_flip(samples, row: int, place: tuple[int, int]) -> np.ndarray:
    """dL/dx of an implementation that finds one gate of one sample different."""
    model, x, dL_dy, gated = samples
    return gated.backward(dL_dy, flip_arrays(model, [(place,) if i == row else () for i in range(len(x))])).input


def test_a_flipped_gate_in_doubt_is_found(samples):
    model, x, dL_dy, gated = samples
    layer, expected = 2, gated.backward(dL_dy, gated.no_flips()).input

    def effect(place: tuple[int, int]) -> float:
        row, unit = place
        return relative_error(observe_with_flip(samples, row, (layer, unit))[row], expected[row])

    in_doubt = [tuple(int(i) for i in place) for place in np.argwhere(gated.ambiguous()[layer])[:20]]
    row, unit = max(in_doubt, key=effect)
    assert effect((row, unit)) > 0.01, "this case is meant to have a flip that matters"
    found = explain_rows(model, x, dL_dy, observe_with_flip(samples, row, (layer, unit)))
    assert found.rows.tolist() == [row] and not len(found.unexplained)
    assert [np.argwhere(flips).tolist() for flips in found.flips] == [[], [], [[0, unit]], [], []]
    expected = model.backward(x, dL_dy)
    scale = model.precision.gradient_scale(dL_dy)
    params, dx = found.apply(expected, model, x, dL_dy * np.float32(scale), 1 / scale)
    # the twin of the whole batch: the same sums, but for the order of the samples
    assert relative_error(dx, observe_with_flip(samples, row, (layer, unit))) < 1e-3
    assert 0 < relative_error(params, expected.params) < 0.1


def test_a_flipped_gate_that_is_not_in_doubt_stays_unexplained(samples):
    model, x, dL_dy, gated = samples
    z = gated.trace.inputs[0] @ model.network.matrices(model.network_params)[0].T
    for unit in (3, 40):
        row = int(np.argmax(z[:, unit]))  # wide open
        found = explain_rows(model, x, dL_dy, observe_with_flip(samples, row, (0, unit)))
        assert found.unexplained.tolist() == [row]


@pytest.mark.parametrize("wrong", [1.02, -1.0, np.nan])
def test_a_wrong_gradient_stays_unexplained(samples, wrong):
    model, x, dL_dy, gated = samples
    observed = gated.backward(dL_dy, gated.no_flips()).input
    row = int(np.argmax(np.abs(observed[:, 0])))
    observed[row] *= wrong
    assert explain_rows(model, x, dL_dy, observed).unexplained.tolist() == [row]


def test_samples_alone_are_those_of_the_batch():
    """Also where a grid chooses corners by a sample's row, and each sample has levels of its own."""
    grid = RELU.encoding | {"stochastic_interpolation": True}
    draw = replace(RELU, encoding={"otype": "Composite", "nested": [grid]}, max_level="rows")
    x = draw.inputs(40)
    model, dL_dy = draw.model(draw.params(x), "float16", len(x)), np.ones((len(x), 4), np.float32)
    whole = GatedPass(model, x)
    expected, total = whole.backward(dL_dy, whole.no_flips(), params=True), np.zeros(len(model.params))
    for row in range(len(x)):
        alone = GatedPass(model, x, np.array([row]))
        found = alone.backward(dL_dy[[row]], alone.no_flips(), params=True)
        np.testing.assert_array_equal(found.input[0], expected.input[row])
        total += found.params
    assert relative_error(total, expected.params) < 1e-5


# ------------------------------------------------------------------------------------------------ the draws


def test_the_covering_models_cover_the_family():
    models = covering()
    grids = [model.encoding for model in models if model.encoding["otype"] != "Identity"]
    assert {g["otype"] for g in grids} == {"HashGrid", "DenseGrid", "TiledGrid"}
    assert {g["interpolation"] for g in grids} == {"Linear", "Smoothstep", "Nearest"}
    assert {g["n_features_per_level"] for g in grids} == {1, 2, 4, 8}
    assert {m.n_input_dims for m in models if m.encoding in grids} == {2, 3, 4}
    assert {m.network["activation"] for m in models} == set(ACTIVATIONS)
    assert {m.network["output_activation"] for m in models} == set(ACTIVATIONS)
    assert {m.loss for m in models} == set(LOSSES)
    assert {m.network["n_hidden_layers"] for m in models} == {0, 1, 2, 3, 4}
    widths = {(m.network["otype"], m.network["n_neurons"]) for m in models}
    assert {("FullyFusedMLP", width) for width in (16, 32, 64, 128)} <= widths
    assert {m.input_dtype for m in models} == {m.output_dtype for m in models} == {"float16", "float32"}


@pytest.mark.parametrize("model", covering(), ids=str)
def test_the_models_are_well_conditioned(model):
    """Two right implementations agree on every draw far within the tolerance that fused kernels are held to."""
    for found in agreement(model, 1000, 1, 257):
        assert not found.beyond and not found.unexplained, str(found)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_almost_all_random_models_are_well_conditioned():
    """All gates are explained. Of the few whose errors are beyond the tolerance, `Agreement.spread` says so."""
    n_beyond = 0
    for number in range(60):
        for found in agreement(random_draw(Deck(20, number)), 1000, 1, 31, 1000):
            assert not found.unexplained, f"draw {number}: {found}"
            n_beyond += bool(found.beyond)
            assert not found.beyond or found.spread
    assert n_beyond <= 6


def test_an_error_beyond_the_spread_of_right_implementations_is_wrong():
    """Whatever the spread: here a second implementation's that is beyond a tolerance which nothing could keep."""
    x = RELU.inputs(300)
    params = RELU.params(x)
    comparison, second = Comparison(RELU, params, x), SecondReference(RELU, params, seed=9)
    comparison.tolerance = 1e-9
    found = comparison.on(second, 300)
    assert found.beyond and found.holds

    class Wrong(SecondReference):
        def backward(self, x, dL_dy):
            params, dx = super().backward(x, dL_dy)
            params[-100:] *= 1.01
            return params, dx

    found = comparison.on(Wrong(RELU, params), 300)
    assert set(found.wrong) == {"dL/dparams", "dL/dparams of grid.level7"}
