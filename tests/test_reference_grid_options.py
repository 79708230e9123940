"""The less usual options of grids: hashes, max_level, stochastic interpolation, fixed-point positions."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

import numba_tcnn as tcnn
import numba_tcnn.reference.model as reference_model
from numba_tcnn.initial_values import Pcg32
from numba_tcnn.layout import GridLevel, grid_levels, n_encoding_params
from numba_tcnn.reference import Model
from numba_tcnn.reference.grid import fixed_point_cell_and_fraction
from numba_tcnn.reference.grid_rows import rows_of_vertices
from numba_tcnn.specs import GridSpec, ModelSpec

SPEC = GridSpec(2, n_levels=4, base_resolution=4, per_level_scale=1.6, log2_hashmap_size=7)


def model(spec: GridSpec, dtype: str = "float64") -> Model:
    params = np.random.default_rng(0).uniform(-1, 1, n_encoding_params(spec))
    return Model(ModelSpec(spec.n_input_dims, spec.n_output_dims, spec, None, spec.n_output_dims), params, dtype)


def inputs(n_rows: int, n_dims: int = 2) -> np.ndarray:
    return np.random.default_rng(1).random((n_rows, n_dims))


def output_gradients(n_rows: int, n_features: int = 8) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((n_rows, n_features))


# ------------------------------------------------------------------------------------------------ hashes


def hash_by_hand(name: str, vertex: tuple[int, ...]) -> int:
    """The definitions in Python integers; pcg32 one step at a time from the position it jumps to."""
    n_dims = len(vertex)
    if name == "BaseConvert":
        k = 0
        for p in vertex:
            k = (k + p) * 2531011 % 2**32
        return k
    if name == "Rng":
        step = 0
        for d, p in enumerate(vertex):
            step ^= p << d * (64 // n_dims)
        random = Pcg32(1337)
        random.advance(step % 2**64)
        return int(random.uint32(1)[0])
    factors = [1, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737]
    if name == "Prime":
        factors[0] = 1958374283
    if name == "ReversedPrime":
        factors = [1958374283, *factors[1:]][::-1]
    result = 0
    for p, factor in zip(vertex, factors, strict=False):
        result ^= p * factor % 2**32
    return result


@pytest.mark.parametrize("name", ["Prime", "CoherentPrime", "ReversedPrime", "Rng", "BaseConvert"])
@pytest.mark.parametrize("n_dims", [1, 2, 3, 4, 5, 6, 7])
def test_hashes(name: str, n_dims: int) -> None:
    random = np.random.default_rng(n_dims)
    level = GridLevel(1.0, 1 << 20, 1 << 31, 0, hashed=True)
    vertices = random.integers(0, 2**32, (n_dims, 1, 20), np.uint32)
    vertices[:, 0, 0] = 2**32 - 1  # one left of zero
    vertices[:, 0, 1] = np.arange(n_dims)
    rows = rows_of_vertices(vertices, level, GridSpec(n_dims, hash=name))
    expected = [hash_by_hand(name, tuple(map(int, vertex))) % 2**31 for vertex in vertices[:, 0].T]
    assert rows.tolist() == [expected]


@pytest.mark.parametrize("name", ["Prime", "CoherentPrime", "ReversedPrime", "Rng", "BaseConvert"])
def test_hashes_through_the_public_api(name: str) -> None:
    """Every name is accepted in any case, and spreads 10,000 vertices over most of 1024 rows (uniform: all of them)."""
    config = {"otype": "HashGrid", "hash": name.lower(), "n_levels": 1, "base_resolution": 1000}
    config |= {"log2_hashmap_size": 10, "interpolation": "Nearest", "n_features_per_level": 1}
    encoding = tcnn.Encoding(2, config, engine="reference", dtype="float32")
    encoding.params = np.arange(1024, dtype=np.float32)
    rows = encoding.inference(inputs(10_000))
    assert len(np.unique(rows)) > 1000


def test_pcg32_jumps_to_any_position() -> None:
    steps = np.array([0, 1, 5, 1000, 2**40 + 3, 2**64 - 1], np.uint64)
    expected = []
    for step in steps.tolist():
        random = Pcg32(1337)
        random.advance(step)
        expected.append(int(random.uint32(1)[0]))
    assert expected[0] == 0x25CFA0E2
    assert Pcg32(1337).uint32_after(steps).tolist() == expected
    assert Pcg32(1337).uint32_after(steps.reshape(2, 3)).shape == (2, 3)


# --------------------------------------------------------------------------------------------- max_level


@pytest.mark.parametrize(
    ("max_level", "n_levels", "active"),
    [(0.5, 16, 9), (0.0, 4, 1), (0.25, 4, 2), (0.26, 4, 2), (0.2, 4, 1), (0.75, 4, 4), (1.0, 4, 4), (-0.1, 4, 0)],
)
def test_levels_in_use(max_level: float, n_levels: int, active: int) -> None:
    """Level ℓ is off where ℓ ≥ m L + 0.001: a half of 16 levels are 9, numbers 0 to 8."""
    grid = model(replace(SPEC, n_levels=n_levels))
    x, u = inputs(20), output_gradients(20, 2 * n_levels)
    y, all_gradients = grid.forward(x), grid.backward(x, u)
    grid.max_level = max_level
    expected = y.copy()
    expected[:, 2 * active :] = 0
    np.testing.assert_array_equal(grid.forward(x), expected)
    gradients = grid.backward(x, u)
    n_active_params = sum(level.n_entries for level in grid_levels(grid.spec.encoding)[:active]) * 2
    np.testing.assert_array_equal(gradients.params[:n_active_params], all_gradients.params[:n_active_params])
    assert not gradients.params[n_active_params:].any()
    u[:, 2 * active :] = 0
    grid.max_level = None
    np.testing.assert_array_equal(gradients.input, grid.backward(x, u).input)


@pytest.mark.parametrize("interpolation", ["Linear", "Smoothstep", "Nearest"])
def test_a_fraction_for_each_sample(monkeypatch: pytest.MonkeyPatch, interpolation: str) -> None:
    """Each row of a batch as if alone, in all passes, also where the batch is computed in pieces of 7 rows."""
    monkeypatch.setattr(reference_model, "FORWARD_ROWS", 7)
    monkeypatch.setattr(reference_model, "GRADIENT_ROWS", 7)
    grid = model(replace(SPEC, interpolation=interpolation))
    x, u, v = inputs(20), output_gradients(20), output_gradients(20, 2)
    fractions = np.linspace(-0.1, 1.1, 20)
    grid.max_level = fractions
    y, gradients, second = grid.forward(x), grid.backward(x, u), grid.backward_backward_input(x, v, u)
    params, second_params = np.zeros(len(grid.params)), np.zeros(len(grid.params))
    for i, fraction in enumerate(fractions):
        row = slice(i, i + 1)
        grid.max_level = fraction
        np.testing.assert_array_equal(y[row], grid.forward(x[row]))
        alone, second_alone = grid.backward(x[row], u[row]), grid.backward_backward_input(x[row], v[row], u[row])
        np.testing.assert_allclose(gradients.input[row], alone.input, rtol=1e-14)
        np.testing.assert_allclose(second.dL_doutput[row], second_alone.dL_doutput, rtol=1e-14)
        np.testing.assert_allclose(second.input[row], second_alone.input, rtol=1e-14)
        params += alone.params
        second_params += second_alone.params
    np.testing.assert_allclose(gradients.params, params, rtol=0, atol=1e-12)
    np.testing.assert_allclose(second.params, second_params, rtol=0, atol=1e-11)


CONFIG = {"otype": "HashGrid", "n_levels": 4, "base_resolution": 4, "per_level_scale": 1.6, "log2_hashmap_size": 7}


def test_max_level_through_the_public_api() -> None:
    encoding = tcnn.Encoding(2, CONFIG, engine="reference", dtype="float32")
    x = inputs(6).astype(np.float32)
    everything, context = encoding.forward(x)
    assert encoding.max_level == 1
    encoding.max_level = 0.5
    assert encoding.max_level == 0.5
    with pytest.raises(RuntimeError, match="max_level"):
        encoding.backward(context, np.ones((6, 8), np.float32))
    y, context = encoding.forward(x)
    assert np.all(y[:, 6:] == 0) and np.array_equal(y[:, :6], everything[:, :6])
    assert np.array_equal(tcnn.Encoding(2, CONFIG, engine="reference", dtype="float32").inference(x), everything)

    fractions = np.linspace(0, 1, 6)
    encoding.max_level = fractions
    fractions[:] = 0  # a copy was taken
    per_sample = encoding.inference(x)
    assert np.array_equal(per_sample[5], everything[5]) and not per_sample[0, 2:].any()
    with pytest.raises(ValueError, match="max_level has 6 rows, the batch has 5"):
        encoding.inference(x[:5])
    encoding.max_level = 1000  # tiny-cuda-nn's default
    assert encoding.max_level == 1 and np.array_equal(encoding.inference(x), everything)


@pytest.mark.parametrize("value", [np.nan, [[0.5]], np.ones((2, 2)), np.array([0.5, np.nan])])
def test_max_level_of_the_wrong_kind(value: object) -> None:
    encoding = tcnn.Encoding(2, CONFIG, engine="reference", dtype="float32")
    with pytest.raises((ValueError, TypeError), match="max_level"):
        encoding.max_level = value
    with pytest.raises(ValueError, match="no levels"):
        tcnn.Encoding(2, {"otype": "Identity"}, engine="reference").max_level = 0.5


def test_max_level_reaches_all_grids_of_a_model() -> None:
    """Composites pass it on, a fraction of each grid's own levels; deep copies keep it, training respects it."""
    grids = [{**CONFIG, "n_dims_to_encode": 2}, {**CONFIG, "n_levels": 8, "n_dims_to_encode": 2}]
    config = {
        "encoding": {"otype": "Composite", "nested": grids},
        "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
        "optimizer": {"otype": "Adam", "learning_rate": 0.1},
    }
    whole = tcnn.create_from_config(4, 1, config, engine="reference", dtype="float32")
    whole.network.max_level = 0.25
    x = inputs(50, 4).astype(np.float32)
    before = whole.network.blocks()
    whole.trainer.training_step(x, x[:, :1])
    changed = {name for name, block in whole.network.blocks().items() if not np.array_equal(block, before[name])}
    assert {name for name in changed if "grid" in name} == {
        *(f"nested0.grid.level{i}" for i in range(2)),
        *(f"nested1.grid.level{i}" for i in range(3)),
    }
    assert copy.deepcopy(whole.network).max_level == 0.25
    assert np.array_equal(copy.deepcopy(whole.network).inference(x), whole.network.inference(x))


# ---------------------------------------------------------------------------- stochastic interpolation


STOCHASTIC = replace(SPEC, stochastic_interpolation=True)


@pytest.mark.parametrize("interpolation", ["Linear", "Smoothstep"])
@pytest.mark.parametrize("n_dims", [1, 2, 3])
def test_stochastic_gradient_goes_to_one_corner(interpolation: str, n_dims: int) -> None:
    """By the definition, a sample and a level at a time; features, dL/dx and second order are the plain grid's."""
    stochastic = replace(STOCHASTIC, n_input_dims=n_dims, interpolation=interpolation, type="Dense")
    grid, plain = model(stochastic), model(replace(stochastic, stochastic_interpolation=False))
    n_rows = 30
    x, u = inputs(n_rows, n_dims), output_gradients(n_rows)
    gradients = grid.backward(x, u)
    expected = np.zeros((len(grid.params) // 2, 2))
    for i, level in enumerate(grid_levels(stochastic)):
        random = Pcg32(1337)
        random.advance(i * n_rows)
        for b, uniform in enumerate(random.uniform(n_rows)):
            q = level.scale * x[b] + 0.5
            t = q - np.floor(q)
            omega = t * t * (3 - 2 * t) if interpolation == "Smoothstep" else t
            vertex = np.floor(q).astype(int) + (uniform < omega)
            row = int(vertex @ level.resolution ** np.arange(n_dims)) % level.n_entries
            expected[level.offset + row] += u[b, 2 * i : 2 * i + 2]
    np.testing.assert_allclose(gradients.params.reshape(-1, 2), expected, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(grid.forward(x), plain.forward(x))
    np.testing.assert_array_equal(gradients.input, plain.backward(x, u).input)
    v = output_gradients(n_rows, n_dims)
    second, plain_second = grid.backward_backward_input(x, v, u), plain.backward_backward_input(x, v, u)
    np.testing.assert_array_equal(second.params, plain_second.params)


def test_the_corner_is_chosen_in_float32_by_float64_models_too() -> None:
    """A t that is beyond the random number, and rounds to it."""
    spec = replace(STOCHASTIC, n_input_dims=1, n_levels=1, type="Dense", interpolation="Linear")
    (level,), uniform = grid_levels(spec), float(Pcg32(1337).uniform(1)[0])
    x = np.array([[(uniform * (1 + 2.0**-27) + 0.5) / level.scale]])
    q = level.scale * x[0, 0] + 0.5  # 1 + t
    assert uniform < q - 1 and np.float32(q - 1) == np.float32(uniform)
    gradients = model(spec).backward(x, np.ones((1, 2))).params.reshape(-1, 2)
    assert gradients[1].all() and np.count_nonzero(gradients) == 2


def test_stochastic_draws() -> None:
    """The published first numbers of the stream, for samples 0, 1 and 5."""
    np.testing.assert_allclose(
        Pcg32(1337).uniform(6)[[0, 1, 5]], [0.14769936, 0.47102940, 0.52830219], rtol=0, atol=1e-8
    )


def test_stochastic_gradients_do_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample's random number is that of its row in the whole batch. The batch itself matters: every level starts
    at a multiple of it."""
    grid, x, u = model(STOCHASTIC), inputs(40), output_gradients(40)
    whole = grid.backward(x, u).params
    monkeypatch.setattr(reference_model, "GRADIENT_ROWS", 7)
    np.testing.assert_allclose(grid.backward(x, u).params, whole, rtol=0, atol=1e-14)
    padded = grid.backward(np.pad(x, ((0, 8), (0, 0))), np.pad(u, ((0, 8), (0, 0)))).params
    assert np.abs(padded - whole).max() > 0.1


def test_stochastic_gradients_are_right_on_average() -> None:
    """In one dimension the upper vertex is chosen with probability ω: 4000 samples at one x come within 4 σ."""
    spec = replace(STOCHASTIC, n_input_dims=1, n_levels=1, type="Dense")
    x, u = np.full((4000, 1), 0.37), np.ones((4000, 2))
    mean = model(spec).backward(x, u).params / 4000
    exact = model(replace(spec, stochastic_interpolation=False)).backward(x, u).params / 4000
    np.testing.assert_allclose(mean, exact, rtol=0, atol=4 * np.sqrt(0.25 / 4000))
    assert np.count_nonzero(mean) == 4


def test_stochastic_interpolation_leaves_out_levels_that_are_off() -> None:
    grid = model(STOCHASTIC)
    grid.max_level = np.linspace(0, 1, 40)
    gradients = grid.backward(inputs(40), np.ones((40, 8))).params.reshape(-1, 2)
    sums = [gradients[level.offset : level.offset + level.n_entries].sum() for level in grid_levels(SPEC)]
    n_active = [np.sum(i < np.linspace(0, 1, 40) * 4 + 1e-3) for i in range(4)]
    np.testing.assert_allclose(sums, 2 * np.array(n_active), rtol=1e-14)


# ------------------------------------------------------------------------------------ fixed-point positions


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 15.0, 16.0, 23.0, 120.499985, 4669.86816, 524287.0])
def test_fixed_point_cells(scale: float) -> None:
    """The integer recipe in Python integers: q = s x + 1/2, also just below x = 1, where 32 bits would wrap.

    A cell's size c is rounded to 24 bits and to an integer below: off by 2^-24 + s/2^32 of itself, and cells add up.
    """
    random = np.random.default_rng(0)
    n = np.concatenate([random.integers(0, 2**32, 200, np.uint32), np.uint32([0, 1, 2**31, 2**32 - 1])])
    cell, t = fixed_point_cell_and_fraction(n.view(np.float32)[None], scale)
    for i, value in enumerate(n.tolist()):
        q = scale * value / 2**32 + 0.5
        assert abs(cell[0, i] + float(t[0, i]) - q) <= 2.0**-23 + q * (2.0**-24 + scale / 2**32)
    if scale > 0:
        c = int(np.float32(2**32) / np.float32(scale))
        assert cell[0].tolist() == [(value + c // 2) // c for value in n.tolist()]
    assert t.min() >= 0 and t.max() <= 1


@pytest.mark.parametrize("interpolation", ["Linear", "Smoothstep", "Nearest"])
@pytest.mark.parametrize("base_resolution", [4, 17])
def test_fixed_point_is_the_same_grid(interpolation: str, base_resolution: int) -> None:
    """Positions n / 2^32 as integers and as numbers. Cells differ in size by 2^-24, and up to 64 of them add up;
    inputs are kept off cell borders, which Nearest would see."""
    spec = replace(SPEC, base_resolution=base_resolution, interpolation=interpolation)
    x = inputs(300)
    for level in grid_levels(spec):
        fraction = (level.scale * x + 0.5) % 1
        x = x[np.all((fraction > 1e-3) & (fraction < 1 - 1e-3), axis=1)]
    assert len(x) > 200
    n = np.floor(x * 2**32).astype(np.uint32)
    u, v = output_gradients(len(x)), output_gradients(len(x), 2)
    fixed, ordinary = model(replace(spec, fixed_point_pos=True), "float32"), model(spec)
    bits = n.view(np.float32)
    second, expected_second = fixed.backward_backward_input(bits, v, u), ordinary.backward_backward_input(x, v, u)
    for ours, expected in (
        (fixed.forward(bits), ordinary.forward(x)),
        (fixed.backward(bits, u).params, ordinary.backward(x, u).params),
        (fixed.backward(bits, u).input, ordinary.backward(x, u).input),
        (second.dL_doutput, expected_second.dL_doutput),
        (second.params, expected_second.params),
        (second.input, expected_second.input),
    ):
        assert np.linalg.norm(ours - expected) <= 2e-5 * np.linalg.norm(expected)


def test_fixed_point_through_the_public_api() -> None:
    """All 32 bits count: NaN's and infinity's patterns are positions like others, and arrive unchanged."""
    encoding = tcnn.Encoding(2, {**CONFIG, "fixed_point_pos": True}, engine="reference", dtype="float32")
    ordinary = tcnn.Encoding(2, CONFIG, engine="reference", dtype="float32")
    encoding.params = ordinary.params = np.random.default_rng(0).uniform(-1, 1, encoding.n_params).astype(np.float32)
    n = np.uint32([[0x7F800001, 0xFF800000], [0xFFC12345, 0x80000000], [1, 0xFFFFFFFF]])
    x = (n / 2**32).astype(np.float32)
    np.testing.assert_allclose(encoding.inference(n.view(np.float32)), ordinary.inference(x), rtol=0, atol=1e-5)
