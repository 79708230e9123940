"""Defects of tiny-cuda-nn 2.0 in encodings that are fixed here, a test each, numbered through all such tests.

Where tiny-cuda-nn's recorded results are affected, `test_reference_encodings_golden.py` leaves them out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import numba_tcnn as tcnn
import numba_tcnn.fused
from numba_tcnn.layout import grid_levels
from numba_tcnn.reference.grid_rows import MAX_UINT32_RESOLUTION, dense_indices, rows_of_vertices
from numba_tcnn.specs import GridSpec

H = 1e-6


def encoding(n_dims: int, config: dict, rng: np.random.Generator, **options) -> tcnn.Encoding:
    """In float64, with tables uniform in ±1."""
    made = tcnn.Encoding(n_dims, config, dtype="float64", engine="reference", **options)
    made.params = rng.uniform(-1, 1, made.n_params).astype(np.float32)
    return made


def test_defect_04_spherical_harmonics_are_padded_last(rng):
    """Upstream pads in front without JIT and behind with it; here behind, whatever computes."""
    config = {"otype": "SphericalHarmonics", "degree": 3}
    x = rng.random((5, 3))
    y = encoding(3, config, rng, alignment=16).inference(x, dtype="float64")
    assert np.all(y[:, 9:] == 1)
    np.testing.assert_array_equal(y[:, :9], encoding(3, config, rng).inference(x, dtype="float64"))
    np.testing.assert_allclose(y[:, 0], np.sqrt(1 / (4 * np.pi)), rtol=1e-15)


@pytest.mark.parametrize("grid_type", ["Tiled", "Dense"])
def test_defect_05_dense_levels_above_the_guard(grid_type, rng):
    """Upstream reads entry 0 everywhere where N^D needs more than 32 bits; here the row is Σ p_d N^d in 64 bits.

    1626^3 > 2^32 in three dimensions; a Dense level of that size has too many parameters for a model, so its index is
    taken in seven, where 24^7 > 2^32 and the table holds 2^31 entries.
    """
    if grid_type == "Tiled":
        config = {"otype": "TiledGrid", "n_levels": 9, "n_features_per_level": 1, "base_resolution": 16}
        grid = encoding(3, config, rng)
        assert grid_levels(grid.spec.encoding)[-1].resolution == 4096
        assert grid.inference(rng.random((500, 3)))[:, -1].std() > 0.1
    n_dims, resolution = (3, 1626) if grid_type == "Tiled" else (7, 24)
    spec = GridSpec(n_dims, type=grid_type, n_levels=1, base_resolution=resolution)
    level = replace(grid_levels(spec)[0], n_entries=2**31 - 1)
    vertices = rng.integers(0, resolution, (n_dims, 1, 50), np.uint32)
    expected = [sum(p * resolution**d for d, p in enumerate(v)) % level.n_entries for v in vertices[:, 0].T.tolist()]
    assert rows_of_vertices(vertices, level, spec).tolist() == [expected]


@pytest.mark.parametrize("n_dims", [1, 2, 3, 4, 5, 6, 7])
def test_defect_05_the_guard_is_where_32_bits_end(n_dims):
    """Up to the guard an index is taken modulo 2^32, as upstream, which vertices left of 0 show; beyond it, it needs
    64 bits."""
    guard = MAX_UINT32_RESOLUTION[n_dims - 1]
    assert guard**n_dims < 2**32 <= (guard + 1) ** n_dims
    left_of_0 = np.full((n_dims, 1, 1), 2**32 - 1, np.uint32)
    for resolution, bits in ((guard, 32), (guard + 1, 64)):
        index = (2**32 - 1) * sum(resolution**d for d in range(n_dims))
        assert dense_indices(left_of_0, resolution).tolist() == [[index % 2**bits]]


@pytest.mark.parametrize("n_bins", [64, 128, 1024])
def test_defect_06_oneblob_with_more_than_32_bins(n_bins, rng):
    """Upstream's bins come from the neighbouring lanes of a warp, modulo 32: two of 64 are wrong. The truth is the
    kernel's integral, bin by bin."""
    blob = encoding(1, {"otype": "OneBlob", "n_bins": n_bins}, rng)
    x = rng.random((20, 1))
    y = blob.inference(x, dtype="float64")
    kernel = np.polynomial.Polynomial([15 / 16, 0, -15 / 8, 0, 15 / 16]).integ()  # of (15/16) (1 - u²)²
    for k in range(n_bins):
        borders = [np.clip(n_bins * (k / n_bins - x[:, 0] + m) + np.array([[0], [1]]), -1, 1) for m in (-1, 0, 1)]
        expected = sum(kernel(upper) - kernel(lower) for lower, upper in borders)
        np.testing.assert_allclose(y[:, k], expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(y.sum(axis=1), 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_dims", [1, 2, 3, 4])
def test_defect_11_smoothstep_second_order(n_dims, rng):
    """Upstream's JIT adds the diagonal term of the Hessian D - 1 times: none in one dimension, twice in three.

    Central differences of the input gradient with h = 1e-6: about 1e-9 of values up to 1e3.
    """
    config = {"otype": "Grid", "n_levels": 2, "base_resolution": 4, "interpolation": "Smoothstep"}
    grid = encoding(n_dims, {**config, "per_level_scale": 1.5}, rng)
    x, v = rng.random((20, n_dims)), rng.standard_normal((20, n_dims))
    for level in grid_levels(grid.spec.encoding):
        keep = np.all(np.abs((level.scale * x) % 1 - 0.5) > 1e-4, axis=1)  # cell borders lie at s x + 1/2 = 0, 1, ...
        x, v = x[keep], v[keep]
    u = rng.standard_normal((len(x), grid.n_output_dims))

    def projection(x: np.ndarray) -> np.ndarray:
        return np.sum(v * grid.backward(grid.forward(x)[1], u).input, axis=1)

    second = grid.backward_backward_input(grid.forward(x)[1], v, u)
    for d in range(n_dims):
        step = np.zeros_like(x)
        step[:, d] = H
        numeric = (projection(x + step) - projection(x - step)) / (2 * H)
        np.testing.assert_allclose(second.input[:, d], numeric, rtol=1e-6, atol=1e-5)


def test_defect_11_second_order_of_a_padded_output(rng):
    """Upstream's JIT zeroes the padded rows of dS/d(dL/dy) through the wrong pointer; here they are 0, as they are
    derivatives of constants, and the rest is that of the grid without padding."""
    config = {"otype": "Grid", "n_levels": 3, "base_resolution": 4, "interpolation": "Smoothstep"}
    x, v, u = rng.random((10, 2)), rng.standard_normal((10, 2)), rng.standard_normal((10, 16))
    padded = encoding(2, config, rng, alignment=16)
    natural = encoding(2, config, rng)
    natural.params = padded.params
    second = padded.backward_backward_input(padded.forward(x)[1], v, u)
    expected = natural.backward_backward_input(natural.forward(x)[1], v, u[:, :6])
    assert not second.dL_doutput[:, 6:].any()
    np.testing.assert_array_equal(second.dL_doutput[:, :6], expected.dL_doutput)
    np.testing.assert_array_equal(second.input, expected.input)
    np.testing.assert_array_equal(second.params, expected.params)


@pytest.mark.parametrize("reduction", ["Sum", "Product"])
def test_defect_12_composite_reductions(reduction, rng):
    """Upstream's JIT starts from an uninitialised vector and its backward code does not compile. The gradient of a
    product is checked against the product rule, with children that share one dimension and leave another alone."""
    nested = [
        {"otype": "Frequency", "n_frequencies": 1, "n_dims_to_encode": 2, "dims_to_encode_begin": 0},
        {"otype": "TriangleWave", "n_frequencies": 2, "n_dims_to_encode": 2, "dims_to_encode_begin": 1},
    ]
    composite = encoding(4, {"otype": "Composite", "reduction": reduction, "nested": nested}, rng)
    alone = [encoding(2, {k: v for k, v in child.items() if "dims" not in k}, rng) for child in nested]
    x, u = rng.random((6, 4)), rng.standard_normal((6, 4))
    parts = [x[:, 0:2], x[:, 1:3]]
    y = [child.inference(part, dtype="float64") for child, part in zip(alone, parts, strict=True)]
    combined = y[0] + y[1] if reduction == "Sum" else y[0] * y[1]
    np.testing.assert_allclose(composite.inference(x, dtype="float64"), combined, rtol=1e-15, atol=1e-16)
    expected = np.zeros_like(x)
    for i, (child, part) in enumerate(zip(alone, parts, strict=True)):
        upstream = u if reduction == "Sum" else u * y[1 - i]
        expected[:, i : i + 2] += child.backward(child.forward(part)[1], upstream).input
    gradient = composite.backward(composite.forward(x)[1], u).input
    np.testing.assert_allclose(gradient, expected, rtol=1e-14, atol=1e-14)
    assert not gradient[:, 3].any()


@pytest.mark.parametrize("option", ["stochastic_interpolation", "fixed_point_pos"])
def test_defect_13_options_of_grids_count_in_fused_kernels(option: str, gpu, no_reference, rng):
    """Upstream's JIT silently ignores stochastic interpolation and max_level."""
    config = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 3}
    fused = tcnn.Encoding(2, config | {option: True}, strict=True)
    plain = tcnn.Encoding(2, config, strict=True)
    fused.params = plain.params = rng.uniform(-0.5, 0.5, fused.n_params)
    x, dL_dy = rng.random((40, 2), np.float32), rng.standard_normal((40, 6)).astype(np.float32)
    gradient = fused.backward(fused.forward(x)[1], dL_dy).params
    expected = tcnn.reference.Model(fused.spec, fused.params, "float16").backward(x, dL_dy).params
    np.testing.assert_allclose(gradient, expected, atol=1e-4)
    if option == "stochastic_interpolation":
        assert np.abs(gradient - plain.backward(plain.forward(x)[1], dL_dy).params).max() > 0.1


def test_defect_13_max_level_counts_in_fused_kernels(gpu, no_reference, rng):
    grid = tcnn.Encoding(2, {"otype": "HashGrid", "n_levels": 4, "base_resolution": 4}, strict=True)
    grid.params = rng.uniform(-0.5, 0.5, grid.n_params)
    x = rng.random((5, 2), np.float32)
    everything = grid.inference(x)
    grid.max_level = 0.5
    some = grid.inference(x)
    assert grid.jit_fusion and not some[:, 6:].any() and everything[:, 6:].any()
    np.testing.assert_array_equal(some[:, :4], everything[:, :4])
    grid.max_level = 1
    np.testing.assert_array_equal(grid.inference(x), everything)
