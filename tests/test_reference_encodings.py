"""Encodings without tables, and composites: published vectors, padding, and inputs far away.

Vectors are given to six or seven digits, which is the tolerance; everything else is exact or float64 rounding.
"""

from __future__ import annotations

import numpy as np
import pytest

import numba_tcnn as tcnn
from numba_tcnn.config import parse_model
from numba_tcnn.layout import n_params
from numba_tcnn.reference import Model

DIGITS = 6e-8


def model(n_dims: int, config: dict, dtype: str = "float64", alignment: int = 0, seed: int = 0) -> Model:
    """The bare encoding; tables are uniform in ±1."""
    spec = parse_model(n_dims, None, config, None, alignment=alignment)
    return Model(spec, np.random.default_rng(seed).uniform(-1, 1, n_params(spec)), dtype)


def jacobian(encoding: Model, x: list[float]) -> np.ndarray:
    """dy_j/dx_i [n_out, n_in] at one x: the input gradients of the unit vectors."""
    units = np.eye(encoding.spec.n_output_dims)
    return encoding.backward(np.tile(x, (len(units), 1)), units).input


# ----------------------------------------------------------------------------------------------- vectors


@pytest.mark.parametrize(
    ("x", "values"),
    [
        (0.3, [0.31744, 0.674, 0.00856, 0]),
        (0.05, [0.674, 0.00856, 0, 0.31744]),
        (1.0, [0.5, 0, 0, 0.5]),
    ],
)
def test_oneblob_vectors(x: float, values: list[float]) -> None:
    oneblob = model(1, {"otype": "OneBlob", "n_bins": 4})
    np.testing.assert_allclose(oneblob.forward(np.array([[x]]))[0], values, rtol=0, atol=1e-14)
    if x == 0.3:
        np.testing.assert_allclose(jacobian(oneblob, [x])[:, 0], [-3.456, 2.97, 0.486, 0], rtol=0, atol=1e-13)


def test_frequency_vectors() -> None:
    y = model(1, {"otype": "Frequency", "n_frequencies": 3}).forward(np.array([[0.3]]))
    expected = [0.809017, 0.587785, 0.951057, -0.309017, -0.587785, -0.809017]
    np.testing.assert_allclose(y[0], expected, rtol=0, atol=5e-7)


def test_triangle_wave_vectors() -> None:
    waves = model(1, {"otype": "TriangleWave", "n_frequencies": 4})
    np.testing.assert_allclose(waves.forward(np.array([[0.3]]))[0], [0.4, -0.8, 0.6, 0.8], rtol=0, atol=1e-14)
    np.testing.assert_array_equal(jacobian(waves, [0.3])[:, 0], [-2, 4, -8, 16])


def test_spherical_harmonics_vectors() -> None:
    direction = np.array([[2 / 3, -1 / 3, 2 / 3]])
    y = model(3, {"otype": "SphericalHarmonics", "degree": 4}).forward((direction + 1) / 2)
    expected = [0.2820948, 0.1628675, 0.325735, -0.325735, -0.2427885, 0.2427885, 0.1051305, -0.4855771]
    expected += [0.1820914, 0.2403881, -0.4282387, 0.1862038, -0.1934988, -0.3724077, 0.321179, -0.0437069]
    np.testing.assert_allclose(y[0], expected, rtol=0, atol=DIGITS)


def test_spherical_harmonics_are_orthonormal() -> None:
    """∫ y_j y_k over the sphere is δ_jk, by a rule that is exact for degree 15: Gauss in Z, equidistant around it."""
    z, weight = np.polynomial.legendre.leggauss(16)
    angle = np.arange(32) * (2 * np.pi / 32)
    radius = np.sqrt(1 - z * z)
    points = np.stack([np.outer(radius, np.cos(angle)), np.outer(radius, np.sin(angle)), np.outer(z, np.ones(32))], -1)
    y = model(3, {"otype": "SphericalHarmonics", "degree": 8}).forward((points.reshape(-1, 3) + 1) / 2)
    weights = np.outer(weight, np.full(32, 2 * np.pi / 32)).ravel()
    np.testing.assert_allclose(y.T @ (weights[:, None] * y), np.eye(64), rtol=0, atol=1e-13)


def test_identity_rounds_once() -> None:
    x = np.array([[1 / 3, 0.7]], np.float32)
    y = model(2, {"otype": "Identity", "scale": 3, "offset": -1}, "float32").forward(x)
    np.testing.assert_array_equal(y, (x.astype(np.float64) * 3 - 1).astype(np.float32))


def test_columns_run_dimension_by_dimension() -> None:
    x = np.array([[0.3, 0.8]])
    for config in ({"otype": "Frequency"}, {"otype": "TriangleWave"}, {"otype": "OneBlob", "n_bins": 8}):
        both, one = model(2, config).forward(x), model(1, config)
        np.testing.assert_array_equal(both[0], np.concatenate([one.forward(x[:, :1])[0], one.forward(x[:, 1:])[0]]))


# ------------------------------------------------------------------------------------ inputs and numbers


@pytest.mark.parametrize("n_bins", [1, 2, 8, 32, 64, 1024])
def test_oneblob_keeps_all_mass(n_bins: int) -> None:
    """Bins of x in [-1 + 1/n, 2 - 1/n] add up to 1; far outside nothing is left."""
    x = np.random.default_rng(0).uniform(-1 + 1 / n_bins, 2 - 1 / n_bins, (50, 1))
    oneblob = model(1, {"otype": "OneBlob", "n_bins": n_bins})
    np.testing.assert_allclose(oneblob.forward(x).sum(axis=1), 1, rtol=0, atol=1e-12)
    assert not oneblob.forward(np.array([[3.5], [-2.5], [1e30]])).any()


@pytest.mark.parametrize("otype", ["Frequency", "TriangleWave"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_waves_repeat(otype: str, dtype: str) -> None:
    """One input unit is a period, or half of one, of the octaves from 1 on; x + 1024 has lost no digits: equal bits."""
    waves = model(1, {"otype": otype, "n_frequencies": 30}, dtype)
    x = np.arange(64).reshape(64, 1) / 64
    np.testing.assert_array_equal(waves.forward(x), waves.forward(x + 1024))


@pytest.mark.parametrize("otype", ["Frequency", "TriangleWave", "OneBlob"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_finite_inputs_give_finite_features(otype: str, dtype: str) -> None:
    """Also where 2^63 x overflows float32."""
    keys = {"n_bins": 64} if otype == "OneBlob" else {"n_frequencies": 64}
    encoding = model(1, {"otype": otype, **keys}, dtype)
    x = np.array([[3e38], [-3e38], [1e30], [-7e8], [1e-45]], np.float32)
    assert np.all(np.abs(encoding.forward(x)) <= 1)
    assert np.all(np.isfinite(encoding.backward(x, np.ones((5, encoding.spec.n_output_dims))).input))


EVERY_LEAF = [
    (2, {"otype": "Frequency", "n_frequencies": 6}),
    (2, {"otype": "TriangleWave", "n_frequencies": 6}),
    (2, {"otype": "OneBlob", "n_bins": 16}),
    (3, {"otype": "SphericalHarmonics", "degree": 8}),
    (3, {"otype": "Identity", "scale": 1.7, "offset": 0.1}),
    (3, {"otype": "Grid", "n_levels": 3, "base_resolution": 4}),
]


@pytest.mark.parametrize(("n_dims", "config"), EVERY_LEAF)
def test_float32_equals_float64(n_dims: int, config: dict) -> None:
    """The same computation in 24 bits: roundings of 6e-8, of terms up to ten times the size of the result."""
    x = np.random.default_rng(1).random((100, n_dims), np.float32)
    single, exact = model(n_dims, config, "float32"), model(n_dims, config, "float64")
    u = np.random.default_rng(2).standard_normal((100, single.spec.n_output_dims)).astype(np.float32)
    for ours, expected in (
        (single.forward(x), exact.forward(x)),
        (single.backward(x, u).input, exact.backward(x, u).input),
        (single.backward_backward_input(x, x, u).input, exact.backward_backward_input(x, x, u).input),
    ):
        assert ours.dtype == np.float32
        assert np.linalg.norm(ours - expected) <= 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(("n_dims", "config"), EVERY_LEAF)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_features_are_rounded_once(n_dims: int, config: dict, dtype: str) -> None:
    """The half-precision features are the float32 ones, rounded; grids read rounded tables too."""
    x = np.random.default_rng(1).random((100, n_dims), np.float32)
    rounded = model(n_dims, config, dtype)
    single = Model(rounded.spec, rounded.precision.store(rounded.params.astype(np.float32)), "float32")
    np.testing.assert_array_equal(rounded.forward(x), rounded.precision.store(single.forward(x)))


# ----------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize(
    ("n_dims", "config", "n_own", "value"),
    [
        (3, {"otype": "Frequency", "n_frequencies": 3}, 18, 1),
        (3, {"otype": "TriangleWave", "n_frequencies": 3}, 9, 1),
        (3, {"otype": "OneBlob", "n_bins": 2}, 6, 1),
        (3, {"otype": "Identity"}, 3, 1),
        (3, {"otype": "SphericalHarmonics", "degree": 3}, 9, 1),
        (3, {"otype": "Grid", "n_levels": 3, "base_resolution": 4}, 6, 0),
    ],
)
def test_padding_stands_last_and_takes_no_part(n_dims: int, config: dict, n_own: int, value: float) -> None:
    natural, padded = model(n_dims, config), model(n_dims, config, alignment=16)
    x = np.random.default_rng(1).random((10, n_dims))
    y = padded.forward(x)
    assert y.shape[1] % 16 == 0 and natural.spec.n_output_dims == n_own
    np.testing.assert_array_equal(y[:, :n_own], natural.forward(x))
    assert np.all(y[:, n_own:] == value)
    u = np.zeros(y.shape)
    u[:, n_own:] = 1
    gradients = padded.backward(x, u)
    second = padded.backward_backward_input(x, np.ones(x.shape), u)
    assert not gradients.input.any() and not gradients.params.any()
    assert not second.input.any() and not second.params.any() and not second.dL_doutput[:, n_own:].any()


def test_a_concatenation_pads_before_a_grid_and_at_the_end() -> None:
    """Identity's three columns are padded to 4, where the grid's features must start; the end is the grid's, zeros."""
    grid = {"otype": "HashGrid", "n_levels": 2, "n_features_per_level": 4, "base_resolution": 4, "n_dims_to_encode": 3}
    nested = [{"otype": "Identity", "n_dims_to_encode": 3}, grid]
    composite = model(6, {"otype": "Composite", "nested": nested}, alignment=16)
    x = np.random.default_rng(1).random((5, 6))
    y = composite.forward(x)
    assert y.shape == (5, 16)
    np.testing.assert_array_equal(y[:, :3], x[:, :3])
    assert np.all(y[:, 3] == 1) and np.all(y[:, 4:12] != 0) and np.all(y[:, 12:] == 0)


def test_empty_pads_with_ones() -> None:
    nested = [{"otype": "Identity", "n_dims_to_encode": 2}, {"otype": "Empty", "n_dims_to_encode": 2}]
    composite = model(4, {"otype": "Composite", "nested": nested}, alignment=8)
    x = np.random.default_rng(1).random((5, 4))
    np.testing.assert_array_equal(composite.forward(x), np.concatenate([x[:, :2], np.ones((5, 6))], axis=1))
    gradient = composite.backward(x, np.ones((5, 8))).input
    np.testing.assert_array_equal(gradient, np.concatenate([np.ones((5, 2)), np.zeros((5, 2))], axis=1))


@pytest.mark.parametrize(("reduction", "value"), [("Sum", 2), ("Product", 1)])
def test_padding_is_combined_too(reduction: str, value: float) -> None:
    nested = [{"otype": "Identity", "n_dims_to_encode": 3}, {"otype": "Identity", "n_dims_to_encode": 3}]
    composite = model(6, {"otype": "Composite", "reduction": reduction, "nested": nested}, alignment=8)
    y = composite.forward(np.zeros((2, 6)))
    assert y.shape == (2, 8) and np.all(y[:, 3:] == value)


# -------------------------------------------------------------------------------------------- composites


def two(first: dict, second: dict, reduction: str = "Concatenation") -> dict:
    return {"otype": "Composite", "reduction": reduction, "nested": [first, second]}


def test_shared_dimensions_add_up_and_others_get_nothing() -> None:
    """Dimension 1 is read by both children, dimension 3 by none. tiny-cuda-nn overwrites, and leaves garbage."""
    config = two(
        {"otype": "Identity", "scale": 2, "n_dims_to_encode": 2, "dims_to_encode_begin": 0},
        {"otype": "Identity", "scale": 5, "n_dims_to_encode": 2, "dims_to_encode_begin": 1},
    )
    composite = model(4, config)
    np.testing.assert_array_equal(composite.forward(np.array([[1.0, 2, 3, 4]])), [[2, 4, 10, 15]])
    np.testing.assert_array_equal(composite.backward(np.ones((1, 4)), np.ones((1, 4))).input, [[2, 7, 5, 0]])


def test_children_stand_side_by_side() -> None:
    """Outputs and parameters follow the order of the children, each of which is what it is alone."""
    grids = [
        {"otype": "DenseGrid", "n_levels": 2, "base_resolution": base, "per_level_scale": 1.5, "n_dims_to_encode": 2}
        for base in (3, 5)
    ]
    composite = model(4, two(*grids))
    x, u = np.random.default_rng(1).random((7, 4)), np.random.default_rng(2).standard_normal((7, 8))
    gradients, first_param = composite.backward(x, u), 0
    for i, grid in enumerate(grids):
        config = {key: value for key, value in grid.items() if key != "n_dims_to_encode"}
        spec = parse_model(2, None, config, None)
        params = slice(first_param, first_param := first_param + n_params(spec))
        alone = Model(spec, composite.params[params], "float64")
        dims, columns = slice(2 * i, 2 * i + 2), slice(4 * i, 4 * i + 4)
        np.testing.assert_array_equal(composite.forward(x)[:, columns], alone.forward(x[:, dims]))
        expected = alone.backward(x[:, dims], u[:, columns])
        np.testing.assert_array_equal(gradients.input[:, dims], expected.input)
        np.testing.assert_array_equal(gradients.params[params], expected.params)
    assert first_param == len(composite.params)


@pytest.mark.parametrize(("reduction", "combine"), [("Sum", np.add), ("Product", np.multiply)])
def test_reductions(reduction: str, combine: np.ufunc) -> None:
    frequency, blob = {"otype": "Frequency", "n_frequencies": 2}, {"otype": "OneBlob", "n_bins": 4}
    config = two({**frequency, "n_dims_to_encode": 2}, {**blob, "n_dims_to_encode": 2}, reduction)
    x = np.random.default_rng(1).random((7, 4))
    expected = combine(model(2, frequency).forward(x[:, :2]), model(2, blob).forward(x[:, 2:]))
    np.testing.assert_allclose(model(4, config).forward(x), expected, rtol=1e-15)


def test_a_product_with_zeros_has_gradients() -> None:
    """d(x y z)/dx = y z at x = 0, which no quotient of the product gives; second derivatives likewise."""
    nested = [{"otype": "Identity", "n_dims_to_encode": 1}] * 3
    product = model(3, {"otype": "Composite", "reduction": "Product", "nested": nested})
    x, one = np.array([[0.0, 2, 3], [0, 0, 5]]), np.ones((2, 1))
    np.testing.assert_array_equal(product.backward(x, one).input, [[6, 0, 0], [0, 0, 0]])
    second = product.backward_backward_input(x, np.array([[1.0, 10, 100]] * 2), one)
    np.testing.assert_array_equal(second.dL_doutput, [[6], [0]])
    np.testing.assert_array_equal(second.input, [[30 + 200, 3, 2], [50, 5, 0]])


def test_nested_composites() -> None:
    inner = two({"otype": "Identity", "n_dims_to_encode": 1}, {"otype": "Identity", "scale": 3, "n_dims_to_encode": 1})
    outer = two({**inner, "n_dims_to_encode": 2}, {"otype": "Identity", "scale": 7})
    composite = model(3, outer)
    np.testing.assert_array_equal(composite.forward(np.ones((1, 3))), [[1, 3, 7]])
    np.testing.assert_array_equal(composite.backward(np.ones((1, 3)), np.ones((1, 3))).input, [[1, 3, 7]])


@pytest.mark.parametrize("otype", ["NRC", "OneBlobFrequency"])
@pytest.mark.parametrize("n_dims", [8, 10])
def test_radiance_caching_alias(otype: str, n_dims: int) -> None:
    """Waves of 3 dimensions, blobs of 5, the rest as it is; with 8 dimensions there is no rest."""
    x = np.random.default_rng(1).random((6, n_dims))
    y = model(n_dims, {"otype": otype, "n_frequencies": 6, "n_bins": 8}).forward(x)
    parts = [
        model(3, {"otype": "TriangleWave", "n_frequencies": 6}).forward(x[:, :3]),
        model(5, {"otype": "OneBlob", "n_bins": 8}).forward(x[:, 3:8]),
        x[:, 8:],
    ]
    np.testing.assert_array_equal(y, np.concatenate(parts, axis=1))


def test_every_encoding_trains_through_the_public_api() -> None:
    """One composite of all of them, behind a network, learns; it has a batch that is no multiple of anything."""
    nested = [
        {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 8, "base_resolution": 4, "n_dims_to_encode": 3},
        {"otype": "SphericalHarmonics", "n_dims_to_encode": 3, "dims_to_encode_begin": 0},
        {"otype": "OneBlob", "n_bins": 8, "n_dims_to_encode": 2, "dims_to_encode_begin": 0},
        {"otype": "Frequency", "n_frequencies": 3, "n_dims_to_encode": 1, "dims_to_encode_begin": 2},
        {"otype": "TriangleWave", "n_frequencies": 3, "n_dims_to_encode": 1, "dims_to_encode_begin": 2},
        {"otype": "Identity", "n_dims_to_encode": 3, "dims_to_encode_begin": 0},
        {"otype": "Empty", "n_dims_to_encode": 1, "dims_to_encode_begin": 0},
    ]
    nested[0]["dims_to_encode_begin"] = 0
    config = {
        "encoding": {"otype": "Composite", "nested": nested},
        "network": {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 2},
        "loss": {"otype": "L2"},
        "optimizer": {"otype": "Adam", "learning_rate": 5e-3},
    }
    trained = tcnn.create_from_config(3, 1, config, engine="reference", dtype="float32")
    x = np.random.default_rng(0).random((333, 3), np.float32)
    y = np.sin(5 * x[:, :1]) * x[:, 1:2] + x[:, 2:]
    losses = [float(trained.trainer.training_step(x, y)) for _ in range(60)]
    assert losses[-1] < 0.02 * losses[0]
