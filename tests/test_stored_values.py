"""What an implementation stored for a sample, read off its gradient: of right ones, of fused kernels, of wrong ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from model_draws import CANCELLING

from benchmarks.agreement.comparison import Comparison
from benchmarks.agreement.draws import Draw
from benchmarks.agreement.fused_model import FusedModel
from benchmarks.agreement.gate_flips import NO_FLIPS, Explanation, GatedPass, flip_arrays, ulps
from benchmarks.agreement.second_reference import SecondReference
from benchmarks.agreement.stored_values import MAX_READ, NotRight, Reader, factors, has_bits, settle
from numba_tcnn.reference.model import Model

GRID = {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 8, "base_resolution": 4, "per_level_scale": 1.5}
NETWORK = {"otype": "CutlassMLP", "n_neurons": 24, "n_hidden_layers": 3, "bias": False}
RELU = Draw(2, 5, GRID, NETWORK | {"activation": "ReLU", "output_activation": "None"}, "L2", seed=3)
DRAWS = {
    "cancelling": CANCELLING,
    "hash grid": RELU,
    "biases": replace(RELU, network=RELU.network | {"bias": True}),
    "bfloat16": replace(RELU, dtype="bfloat16", network=RELU.network | {"bias": True}),
    "output ReLU": replace(RELU, network=RELU.network | {"activation": "LeakyReLU", "output_activation": "ReLU"}),
    "smooth": replace(RELU, network=RELU.network | {"activation": "Tanh", "output_activation": "LeakyReLU"}),
    "stored slopes": replace(RELU, network=RELU.network | {"activation": "SiLU", "output_activation": "ReLU"}),
    "no hidden layer": replace(RELU, network=RELU.network | {"n_hidden_layers": 0, "output_activation": "ReLU"}),
    "one dimension": replace(
        RELU, n_input_dims=1, encoding={"otype": "Frequency", "n_frequencies": 3},
        network=RELU.network | {"output_activation": "Squareplus"},
    ),
    "too wide for one kernel": replace(
        RELU, dtype="bfloat16", network=RELU.network | {"n_neurons": 99, "n_hidden_layers": 2, "bias": True}
    ),
    "widths of their own, chosen rows": replace(
        RELU, encoding=GRID | {"stochastic_interpolation": True}, max_level="rows",
        network={"otype": "CutlassMLP", "hidden": [17, 40], "activation": "ReLU", "output_activation": "Sigmoid"},
    ),
}  # fmt: skip
BATCH = 40


def given(draw: Draw) -> tuple[np.ndarray, np.ndarray, np.ndarray, Model]:
    """(x, parameters, dL/dy, the reference)."""
    x = draw.inputs(BATCH)
    params = draw.params(x)
    return x, params, draw.output_gradients(BATCH), draw.model(params, draw.reference_dtype, BATCH)


def alone(implementation, x: np.ndarray, dL_dy: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    """(dL/dparams, dL/dx) of one sample of the batch."""
    only = np.zeros_like(dL_dy)
    only[row] = dL_dy[row]
    params, dx = implementation.backward(x, only)
    return params, dx[row]


@pytest.mark.parametrize("name", DRAWS)
def test_a_second_right_implementation_passes(name: str) -> None:
    """With more noise than any has: some values round to a neighbour, and each is told to be right by itself."""
    x, params, dL_dy, model = given(DRAWS[name])
    second = SecondReference(DRAWS[name], params)
    for row in range(BATCH):
        Reader(model, x.astype(np.float32), row, dL_dy[row]).flips(*alone(second, x, dL_dy, row), 0.0)


SHORT = ("one dimension", "hash grid", "bfloat16", "biases")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.exhaustive]) for name in DRAWS]
)
def test_fused_kernels_pass(name: str, gpu, no_reference) -> None:
    x, params, dL_dy, model = given(DRAWS[name])
    fused = FusedModel(DRAWS[name], params)
    for row in range(0, BATCH, 13):
        flips = Reader(model, x.astype(np.float32), row, dL_dy[row]).flips(*alone(fused, x, dL_dy, row), 0.0)
        assert [flip.shape for flip in flips] == [(len(w),) for w in model.network.matrices(model.network_params)]


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("what", ["dL/dz", "h"])
def test_a_wrong_value_does_not_pass(layer: int, what: str) -> None:
    """One dL/dz, or one output of a unit, off by two last places in all that it is multiplied with."""
    x, params, dL_dy, model = given(RELU)
    gradient, dx = alone(SecondReference(RELU, params), x, dL_dy, 7)
    reader = Reader(model, x, 7, dL_dy[7])
    reader.flips(gradient, dx, 0.0)
    part = model.network.weight_blocks[layer].logical(gradient)
    D, h = factors(part.astype(np.float64), reader.expected.trace.inputs[layer][0].astype(np.float64), 11)
    values = D if what == "dL/dz" else h
    values[np.argmax(np.abs(values))] += 2 * ulps(np.abs(values).max(), reader.precision)
    part[...] = np.outer(D, h)
    with pytest.raises(NotRight):
        reader.flips(gradient, dx, 0.0)


def test_a_wrong_element_does_not_pass() -> None:
    x, params, dL_dy, model = given(RELU)
    gradient, dx = alone(SecondReference(RELU, params), x, dL_dy, 7)
    part = model.network.weight_blocks[1].logical(gradient)
    part[np.unravel_index(np.argmax(np.abs(part)), part.shape)] *= 1 + 2.0**-12
    with pytest.raises(NotRight):
        Reader(model, x, 7, dL_dy[7]).flips(gradient, dx, 0.0)


def test_a_wrong_input_or_table_gradient_does_not_pass() -> None:
    x, params, dL_dy, model = given(RELU)
    gradient, dx = alone(SecondReference(RELU, params), x, dL_dy, 7)
    with pytest.raises(NotRight):
        Reader(model, x, 7, dL_dy[7]).flips(gradient, 1.02 * dx, 0.0)
    gradient[model.n_network_params :] *= 1.02
    with pytest.raises(NotRight):
        Reader(model, x, 7, dL_dy[7]).flips(gradient, dx, 0.0)


class Flipping(SecondReference):
    """Finds one gate of one sample different, in doubt or not, and all that follows from it."""

    def __init__(self, draw: Draw, params: np.ndarray, row: int, place: tuple[int, int]):
        super().__init__(draw, params)
        self.row, self.place = row, place

    def backward(self, x: np.ndarray, dL_dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        model = self.draw.model(self.params, self.draw.reference_dtype, len(x))
        scale = np.float32(model.precision.gradient_scale(dL_dy))
        flips = flip_arrays(model, [(self.place,) if row == self.row else () for row in range(len(x))])
        found = GatedPass(model, x.astype(np.float32)).backward(dL_dy * scale, flips, params=True)
        return found.params / scale, found.input / scale


def settled(draw: Draw, implementation, guess: Explanation, row: int) -> Explanation:
    x, _, dL_dy, model = given(draw)
    _, dx = implementation.backward(x, dL_dy)
    return settle(guess, model, x, dL_dy, dx, lambda some: implementation.backward(x, some), 0.0)


def guess_of(model: Model, row: int, *places: tuple[int, int]) -> Explanation:
    return Explanation(np.array([row]), flip_arrays(model, [places]), 1, np.zeros(0, np.intp))


def test_a_guessed_gate_gives_way_to_what_was_read_off() -> None:
    """A sample whose gates are the reference's, though dL/dx alone had looked as if one were not."""
    _, params, _, model = given(RELU)
    found = settled(RELU, SecondReference(RELU, params), guess_of(model, 7, (1, 3)), 7)
    assert not len(found.rows) and not len(found.unexplained) and [f.shape for f in found.flips] == [
        (0, 24), (0, 24), (0, 24), (0, 5)
    ]  # fmt: skip


def test_a_gate_that_is_not_in_doubt_is_not_excused() -> None:
    _, params, _, model = given(RELU)
    gates = GatedPass(model, given(RELU)[0]).trace.inputs[2][7]
    place = (1, int(np.argmax(gates)))
    found = settled(RELU, Flipping(RELU, params, 7, place), guess_of(model, 7, place), 7)
    assert found.unexplained.tolist() == [7] and not len(found.rows)


def test_too_many_or_no_samples_are_not_read() -> None:
    _, _, dL_dy, model = given(RELU)
    many = replace(NO_FLIPS, unexplained=np.arange(MAX_READ + 1))
    for explanation in (NO_FLIPS, many):
        assert settle(explanation, model, dL_dy, dL_dy, dL_dy, None, 0.0) is explanation


def test_factors_are_found_from_one_that_is_right() -> None:
    rng = np.random.default_rng(0)
    D, h = (rng.standard_normal(n).astype(np.float16).astype(np.float64) for n in (5, 7))
    h[2], D[1] = 0, 0
    guess = h * np.where(np.arange(7) == 4, 1, 1 + 2.0**-10)
    found_D, found_h = factors(np.outer(D, h), guess, 11)
    np.testing.assert_array_equal(found_D, D)
    np.testing.assert_array_equal(found_h, h)
    assert factors(np.zeros((5, 7)), h, 11) == (None, None)
    for product in (np.outer(D, h) + 1e-3, np.full((5, 7), np.nan), np.outer(D, h) * (1 + 2.0**-13)):
        with pytest.raises(NotRight):
            factors(product, h, 11)
    assert has_bits(np.array([0.0, 1.5, -255.0]), 8) and not has_bits(np.array([257.0]), 8)


class Opaque:
    """A second right implementation that is asked as a device is, and of which nothing else is known."""

    def __init__(self, draw: Draw, params: np.ndarray):
        self._second, self.n_backward = SecondReference(draw, params), 0
        self.inference, self.training_step = self._second.inference, self._second.training_step

    def backward(self, x: np.ndarray, dL_dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.n_backward += 1
        return self._second.backward(x, dL_dy)


def test_a_sample_beyond_explaining_by_its_gates_is_read_off() -> None:
    """dL/dx is one number, what is left of a large sum: a rounding of a dL/dz on the way changes it by per cents."""
    draw = CANCELLING
    x = draw.inputs(20000)
    params = draw.params(x)
    comparison, opaque = Comparison(draw, params, x, with_distance=False), Opaque(draw, params)
    found = comparison.on(opaque, len(x))
    assert opaque.n_backward > 1, "this case is meant to have samples that no gates explain"
    assert found.holds, str(found)
