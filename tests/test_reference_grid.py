"""The grid encoding: published vectors, inputs outside the unit cube, and an independent scalar implementation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from numba_tcnn.layout import GridLevel, grid_levels, n_encoding_params
from numba_tcnn.reference import Model
from numba_tcnn.reference.grid import cell_and_fraction
from numba_tcnn.reference.grid_rows import rows_of_vertices
from numba_tcnn.reference.precision import Precision
from numba_tcnn.specs import GridSpec, ModelSpec


def bare(spec: GridSpec) -> ModelSpec:
    return ModelSpec(spec.n_input_dims, spec.n_output_dims, spec, None, spec.n_output_dims)


@pytest.mark.parametrize(
    ("vertex", "hash"),
    [
        ((1, 2), 1013904227),
        ((3, 5, 7), 1191511397),
        ((10, 20, 30, 40), 3307058400),
        ((2**32 - 1, 0, 1), 3489507434),
    ],
)
@pytest.mark.parametrize("log2_size", [19, 31])
def test_hash_vectors(vertex: tuple[int, ...], hash: int, log2_size: int) -> None:
    level = GridLevel(1.0, 1 << 20, 1 << log2_size, 0, hashed=True)
    vertices = np.array(vertex, np.uint32)[:, None, None]
    assert rows_of_vertices(vertices, level, GridSpec(len(vertex))).tolist() == [[hash % (1 << log2_size)]]


HALF_TABLE = np.float16((np.arange(512) % 17 - 8) / 16).astype(np.float32)


@pytest.mark.parametrize(
    ("log2_size", "x", "expected"),
    [
        (19, (0.37, 0.62), (0.09368896, 0.15625)),
        (19, (0.905, 0.11), (-0.0718994, -0.00938416)),
        (6, (0.37, 0.62), (-0.258789, -0.196167)),
        (6, (0.905, 0.11), (-0.268555, -0.205933)),
    ],
)
def test_lookup_in_half_precision(log2_size: int, x: tuple[float, float], expected: tuple[float, float]) -> None:
    """tiny-cuda-nn rounds weights and every partial sum to half, we round once: 4 roundings of 2^-12 of terms < 1/2."""
    spec = GridSpec(2, n_levels=1, base_resolution=16, log2_hashmap_size=log2_size)
    params = HALF_TABLE[: n_encoding_params(spec)]
    y = Model(bare(spec), params, "float16").forward(np.array([x], np.float32))
    np.testing.assert_allclose(y, [expected], rtol=0, atol=4 * 2.0**-13)
    assert np.array_equal(y, y.astype(np.float16))


@pytest.mark.parametrize(
    ("x", "cell", "fraction"),
    [
        ((0.37, 0.62), (6, 9), (0.05000019, 0.80000019)),
        ((0.905, 0.11), (14, 2), (0.07499981, 0.15000010)),
        ((0, 0), (0, 0), (0.5, 0.5)),
        ((1, 1), (15, 15), (0.5, 0.5)),
    ],
)
def test_position(x: tuple[float, float], cell: tuple[int, int], fraction: tuple[float, float]) -> None:
    """One rounding, as a fused multiply-add: a separate product would give 0.05000067 in the first case."""
    q = Precision("float32").multiply_add(15.0, np.array(x, np.float32), 0.5)
    g, t = cell_and_fraction(q)
    assert g.tolist() == list(cell)
    np.testing.assert_allclose(t, fraction, rtol=0, atol=1e-8)  # digits given


def test_conversion_saturates() -> None:
    """As the GPU's cvt.rmi.s32.f32: beyond int32 the nearest end, NaN 0. The fraction of a finite x is never NaN."""
    q = np.array([-0.25, -1.0, 2.0**31, 3e9, -3e9, np.inf, -np.inf, np.nan, 7.75], np.float32)
    with np.errstate(invalid="ignore"):
        g, t = cell_and_fraction(q)
    lowest, highest = 2**31, 2**31 - 1  # as uint32
    assert g.tolist() == [2**32 - 1, 2**32 - 1, highest, highest, lowest, highest, lowest, 0, 7]
    np.testing.assert_array_equal(t, np.float32([0.75, 0, 0, 0, 0, 0, 0, np.nan, 0.75]))
    in_range = np.array([-0.25, 7.75], np.float32)
    assert cell_and_fraction(in_range)[0].tolist() == [2**32 - 1, 7]


@pytest.mark.parametrize("type", ["Hash", "Dense", "Tiled"])
@pytest.mark.parametrize("interpolation", ["Linear", "Smoothstep", "Nearest"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_any_input_has_a_row(type: str, interpolation: str, dtype: str) -> None:
    """Inputs far outside [0, 1], infinite or NaN neither fail nor touch other memory; finite ones give numbers."""
    spec = GridSpec(3, type=type, n_levels=3, base_resolution=6, log2_hashmap_size=6, interpolation=interpolation)
    params = np.random.default_rng(0).uniform(-1, 1, n_encoding_params(spec)).astype(np.float32)
    model = Model(bare(spec), params, dtype)
    finite = np.array([-0.1, 1.7, -1e6, 1e9, -3e38, 3e38, 1e-45], np.float32)
    x = np.array(list(itertools.product(finite, repeat=3)), np.float32)
    y, gradients = model.forward(x), model.backward(x, np.ones((len(x), spec.n_output_dims), np.float32))
    assert np.all(np.isfinite(y)) and np.all(np.isfinite(gradients.params)) and np.all(np.isfinite(gradients.input))
    assert np.abs(y).max() <= 1

    x = np.array([[np.nan, 0.5, 0.5], [np.inf, 0.5, 0.5], [-np.inf, np.nan, 0.1]], np.float32)
    model.forward(x)
    assert model.backward(x, np.ones((3, spec.n_output_dims), np.float32)).params.shape == params.shape


def interpolated_by_hand(spec: GridSpec, table: np.ndarray, x: list[float]) -> list[float]:
    """The definition with Python integers and floats, one sample, one corner at a time."""
    primes = (1, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737)
    features = []
    for level in grid_levels(spec):
        q = [level.scale * value + 0.5 for value in x]
        cell = [math.floor(value) for value in q]
        t = [value - whole for value, whole in zip(q, cell, strict=True)]
        if spec.interpolation == "Smoothstep":
            t = [value * value * (3 - 2 * value) for value in t]
        total = np.zeros(spec.n_features_per_level)
        offsets = [(0,) * len(x)] if spec.interpolation == "Nearest" else itertools.product((0, 1), repeat=len(x))
        for offset in offsets:
            weight, row = 1.0, 0
            for d, step in enumerate(offset):
                vertex = (cell[d] + step) % 2**32
                if spec.interpolation != "Nearest":
                    weight *= t[d] if step else 1 - t[d]
                row = row ^ vertex * primes[d] % 2**32 if level.hashed else row + vertex * level.resolution**d
            if not level.hashed:
                row %= 2**32 if level.resolution ** len(x) < 2**32 else 2**64
            total += weight * table[level.offset + row % level.n_entries]
        features.extend(total)
    return features


@pytest.mark.parametrize("n_dims", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("type", ["Hash", "Dense", "Tiled"])
@pytest.mark.parametrize("interpolation", ["Linear", "Smoothstep", "Nearest"])
def test_against_the_definition(n_dims: int, type: str, interpolation: str) -> None:
    """float64 to rounding. Tiled levels grow past the size where tiny-cuda-nn collapses them to one entry."""
    scale = {"Hash": 2.0, "Dense": 1.2, "Tiled": 20.0}[type]
    spec = GridSpec(
        n_dims,
        type=type,
        n_levels=3,
        n_features_per_level=4,
        log2_hashmap_size=8,
        base_resolution=3,
        per_level_scale=scale,
        interpolation=interpolation,
    )
    random = np.random.default_rng(n_dims)
    params = random.uniform(-1, 1, n_encoding_params(spec))
    x = random.uniform(-0.2, 1.2, (9, n_dims))
    y = Model(bare(spec), params, "float64").forward(x)
    table = params.reshape(-1, 4)
    expected = [interpolated_by_hand(spec, table, sample) for sample in x.tolist()]
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-13)


def test_features_do_not_depend_on_their_number() -> None:
    """F = 1, 2, 4, 8: the columns of a wide table are those of narrow ones."""
    random = np.random.default_rng(0)
    wide = GridSpec(2, n_levels=2, n_features_per_level=8, base_resolution=5)
    narrow = GridSpec(2, n_levels=2, n_features_per_level=1, base_resolution=5)
    params = random.uniform(-1, 1, n_encoding_params(wide)).astype(np.float32)
    x = random.random((50, 2), dtype=np.float32)
    y = Model(bare(wide), params, "float32").forward(x).reshape(50, 2, 8)
    for f in range(8):
        column = np.ascontiguousarray(params.reshape(-1, 8)[:, f])
        assert np.array_equal(Model(bare(narrow), column, "float32").forward(x), y[:, :, f])


def test_padding() -> None:
    """Extra columns hold 0 and have no influence on gradients."""
    spec = GridSpec(2, n_levels=3, base_resolution=4)
    model_spec = ModelSpec(2, 16, spec, None, 16)
    random = np.random.default_rng(0)
    params = random.uniform(-1, 1, n_encoding_params(spec)).astype(np.float32)
    x = random.random((10, 2), dtype=np.float32)
    model = Model(model_spec, params, "float32")
    y = model.forward(x)
    assert np.all(y[:, 6:] == 0) and np.all(y[:, :6] != 0)
    dL_dy = np.zeros((10, 16), np.float32)
    dL_dy[:, 6:] = 1
    gradients = model.backward(x, dL_dy)
    assert not gradients.params.any() and not gradients.input.any()
