"""Every encoding that runs fused, in whole kernels in the emulator, against the reference of the same precision.

Alone, where the gradient of the features is given, both sides do the same arithmetic: features agree to float32's
precision but where they round to different neighbours in float16, parameters' and input gradients to a few roundings of
float32 (`BARE`). Behind an encoding a network adds its own flips (test_fused_kernels.py), and the input gradient of
octave k multiplies one by 2^k: hence `STEEP` where there are octaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import EmulatedModel
from encoding_draws import encodings, inputs_off_kinks
from golden_case import relative_error
from hypothesis import HealthCheck, assume, given, settings
from test_fused_kernels import GRADIENT, HOPPER, check, data, make_params, make_spec

from numba_tcnn.config import parse_model
from numba_tcnn.fused.network_plans import encoding_gradient_plan, inference_plans
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.layout import n_params
from numba_tcnn.reference import Model
from numba_tcnn.specs import EncodingSpec, ModelSpec

ROUNDING = 2e-6  # of four in five features, over the largest
FLIPPED = 2.0**-10  # of any feature: the next float16
BARE = 5e-6  # in norm: sums of float32
STEEP = 1e-3  # one flip of 2^-11 in one of 45 samples, times a slope above the average


def check_bare(n_in: int, encoding: dict, x: np.ndarray | None = None) -> None:
    check_spec(parse_model(n_in, None, encoding, None, alignment=1), x)


def check_spec(spec: ModelSpec, x: np.ndarray | None = None, batch: int = 45, seed: int = 3) -> None:
    """Features of an encoding without a network, and both gradients for a given gradient of the features."""
    rng = np.random.default_rng(seed)
    params = make_params(spec, rng)
    x = data(spec, batch, rng)[0] if x is None else x
    model, reference = EmulatedModel(spec, params), Model(spec, params, "float16")
    out = model.inference(x, inference_plans(spec, HOPPER)[0], InferenceOptions(aligned_input=False))
    expected = reference.forward(x)
    errors, largest = np.abs(out - expected), np.abs(expected).max()
    assert np.isfinite(out).all() and np.quantile(errors, 0.8) <= ROUNDING * largest
    assert (errors <= FLIPPED * np.abs(expected) + ROUNDING * max(largest, 1)).all()
    dL_dy = rng.normal(size=out.shape).astype(np.float32)
    options = GradientOptions(aligned_input=False, loss=None, table_gradient=bool(n_params(spec)), input_gradient=True)
    scales = tuple(model.gradient_scales(dL_dy))
    _, gradients, dx = model.gradient(x, dL_dy, encoding_gradient_plan(spec, HOPPER), options, scales=scales)
    expected = reference.backward(x, dL_dy)
    assert relative_error(gradients, expected.params) <= BARE
    assert np.isfinite(dx).all()  # a sum of slopes may cancel, but not below the rounding of its terms
    slopes = expected.input.astype(np.float64)
    assert np.linalg.norm(dx - slopes) <= BARE * max(np.linalg.norm(slopes), np.linalg.norm(dL_dy))


def check_encoding(n_in: int, encoding: dict, *, gradient_tolerance: float = GRADIENT, **how: Any) -> None:
    """The encoding alone and in front of a small network."""
    check_bare(n_in, encoding)
    spec = make_spec(n_in, encoding=encoding, n_hidden_layers=1, n_neurons=16)
    check(spec, gradient_tolerance=gradient_tolerance, **how)


@pytest.mark.parametrize(("n_in", "n_frequencies"), [(1, 1), (3, 10), (2, 12), (5, 8)])
def test_frequency(n_in: int, n_frequencies: int) -> None:
    check_encoding(n_in, {"otype": "Frequency", "n_frequencies": n_frequencies}, gradient_tolerance=STEEP)


@pytest.mark.parametrize(("n_in", "n_frequencies"), [(1, 1), (3, 12), (2, 16), (4, 7)])
def test_triangle_wave(n_in: int, n_frequencies: int) -> None:
    check_encoding(n_in, {"otype": "TriangleWave", "n_frequencies": n_frequencies}, gradient_tolerance=STEEP)


@pytest.mark.parametrize("otype", ["Frequency", "TriangleWave"])
def test_octaves_of_large_inputs_and_numbers(otype: str) -> None:
    """2^62 times any finite x neither loses digits nor overflows."""
    x = np.array([-0.75, 1.5, -1e4, 123456.789, 3e9, -3e38, 0.0, 1.0, 0.3, -1e-3], np.float32)[:, None]
    check_bare(1, {"otype": otype, "n_frequencies": 64}, x=x)


@pytest.mark.parametrize("n_frequencies", range(1, 21))
def test_triangle_waves_at_odd_columns(n_frequencies: int) -> None:
    """Behind a column of something else, where nothing is aligned."""
    waves = {"otype": "TriangleWave", "n_frequencies": n_frequencies}
    check_bare(3, composite({"otype": "Identity", "n_dims_to_encode": 1}, waves))


@pytest.mark.parametrize("n_frequencies", [4, 5, 8, 24])
def test_triangle_waves_near_kinks(n_frequencies: int) -> None:
    """Rounding carries no phase over the end of a period, nor to the other side of a kink, where float32 would."""
    kinks = np.arange(-8, 9, dtype=np.float32) / 4
    x = np.concatenate([kinks, kinks + np.float32(1e-6), kinks - np.float32(1e-6), [1e-12, -1e-12]])
    x = x.astype(np.float32)[:, None]
    spec = parse_model(1, None, {"otype": "TriangleWave", "n_frequencies": n_frequencies}, None, alignment=1)
    model, reference = EmulatedModel(spec, np.zeros(0)), Model(spec, np.zeros(0), "float64")
    out = model.inference(x, inference_plans(spec, HOPPER)[0], InferenceOptions(aligned_input=False))
    np.testing.assert_allclose(out, reference.forward(x.astype(np.float64)), rtol=0, atol=2.0**-11)
    dL_dy = np.ones(out.shape, np.float32)
    options = GradientOptions(aligned_input=False, loss=None, table_gradient=False, input_gradient=True)
    scales = tuple(model.gradient_scales(dL_dy))
    _, _, dx = model.gradient(x, dL_dy, encoding_gradient_plan(spec, HOPPER), options, scales=scales)
    np.testing.assert_array_equal(dx, reference.backward(x.astype(np.float64), dL_dy.astype(np.float64)).input)


def test_triangle_wave_of_what_is_no_number() -> None:
    spec = parse_model(1, None, {"otype": "TriangleWave", "n_frequencies": 8}, None, alignment=1)
    x = np.array([[np.nan], [np.inf], [-np.inf], [0.25]], np.float32)
    model = EmulatedModel(spec, np.zeros(0, np.float32))
    out = model.inference(x, inference_plans(spec, HOPPER)[0], InferenceOptions(aligned_input=False))
    assert np.isnan(out[:3]).all() and np.isfinite(out[3]).all()


@pytest.mark.parametrize("n_bins", [1, 2, 4, 8, 16, 32])
def test_oneblob_at_odd_columns(n_bins: int) -> None:
    blobs = {"otype": "OneBlob", "n_bins": n_bins}
    check_bare(3, composite({"otype": "Identity", "n_dims_to_encode": 1}, blobs))


@pytest.mark.parametrize("n_bins", [2, 4, 16, 64])
def test_oneblob(n_bins: int) -> None:
    check_encoding(2, {"otype": "OneBlob", "n_bins": n_bins}, gradient_tolerance=STEEP)


@pytest.mark.parametrize("n_bins", [1, 2, 4, 8, 16, 128])
def test_oneblob_outside_the_unit_interval(n_bins: int) -> None:
    """The images' mass comes in from both sides, and what lies beyond [-1, 2] is lost. One bin is constant inside."""
    at_ends = np.add.outer([-1, 0, 1, 2], np.linspace(-1.5, 1.5, 13) / n_bins).reshape(-1)  # borders of bins too
    x = np.concatenate([np.linspace(-1.6, 2.6, 85), at_ends, [3e38, -3e38]]).astype(np.float32)[:, None]
    check_bare(1, {"otype": "OneBlob", "n_bins": n_bins}, x=x)


@pytest.mark.parametrize("n_bins", [4, 16])
def test_oneblob_of_what_is_no_number(n_bins: int) -> None:
    """Infinity is outside like any other number; NaN doesn't hide, and stays in its own dimension."""
    spec = parse_model(2, None, {"otype": "OneBlob", "n_bins": n_bins}, None, alignment=1)
    x = np.array([[0.3, np.inf], [np.nan, 0.3], [-np.inf, 0.3]], np.float32)
    model = EmulatedModel(spec, np.zeros(0, np.float32))
    out = model.inference(x, inference_plans(spec, HOPPER)[0], InferenceOptions(aligned_input=False))
    first, second = out[:, :n_bins], out[:, n_bins:]
    assert not first[2].any() and not second[0].any() and np.isnan(first[1]).any()
    np.testing.assert_array_equal(second[1:], first[[0, 0]])


@pytest.mark.parametrize("degree", range(1, 9))
def test_spherical_harmonics(degree: int) -> None:
    check_bare(3, {"otype": "SphericalHarmonics", "degree": degree})


@pytest.mark.parametrize("degree", [3, 4])
def test_networks_of_spherical_harmonics(degree: int) -> None:
    check_encoding(3, {"otype": "SphericalHarmonics", "degree": degree})


# ----------------------------------------------------------------------------------------------- composites

SMALL_GRID = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 4}
ODD_TILES = {"otype": "TiledGrid", "n_levels": 1, "n_features_per_level": 1, "base_resolution": 5}  # 25 parameters


def composite(*nested: dict, reduction: str = "Concatenation") -> dict:
    return {"otype": "Composite", "reduction": reduction, "nested": list(nested)}


def on(first: int, count: int, encoding: dict) -> dict:
    """A child on some of the input dims."""
    return encoding | {"dims_to_encode_begin": first, "n_dims_to_encode": count}


CONCATENATIONS = {
    "nrc": (14, {"otype": "OneBlobFrequency"}),
    "nerf_rgb": (19, composite({"otype": "SphericalHarmonics", "n_dims_to_encode": 3}, {"otype": "Identity"})),
    "two grids, the second off its alignment": (
        5, composite(on(0, 2, ODD_TILES), on(2, 3, SMALL_GRID | {"n_features_per_level": 8})),
    ),
    "grid and waves": (
        4, composite(on(0, 3, SMALL_GRID), on(3, 1, {"otype": "Frequency", "n_frequencies": 3}))
    ),
    "gaps and overlaps": (
        7,
        composite(
            on(1, 3, SMALL_GRID), on(2, 3, {"otype": "SphericalHarmonics", "degree": 3}),
            on(3, 2, {"otype": "Identity"}), on(2, 2, SMALL_GRID | {"interpolation": "Smoothstep"}),
        ),
    ),
    "padding between": (
        4,
        composite(
            on(0, 1, {"otype": "Identity"}), on(1, 3, SMALL_GRID | {"n_features_per_level": 4}),
            on(0, 1, {"otype": "OneBlob", "n_bins": 1}), on(0, 2, SMALL_GRID),
        ),
    ),
    "an empty child": (3, composite(on(0, 2, {"otype": "Empty"}), on(2, 1, {"otype": "OneBlob", "n_bins": 8}))),
    "nested": (
        5,
        composite(
            on(0, 3, composite(on(0, 2, SMALL_GRID), on(1, 2, {"otype": "TriangleWave", "n_frequencies": 4}))),
            on(2, 3, composite(on(1, 1, {"otype": "Identity"}), on(1, 2, SMALL_GRID))),
        ),
    ),
}  # fmt: skip
WIDE_GRID = {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 5, "base_resolution": 3}  # 8 columns, two kinds
REDUCTIONS = {
    "grid, waves and blob": (
        3, (on(0, 2, WIDE_GRID), on(0, 2, {"otype": "TriangleWave", "n_frequencies": 4}),
            on(1, 2, {"otype": "OneBlob", "n_bins": 4})),
    ),
    "grids of unlike entries": (
        4, (on(0, 2, WIDE_GRID), on(2, 2, WIDE_GRID | {"n_levels": 2, "n_features_per_level": 4}),
            on(1, 3, WIDE_GRID | {"n_levels": 8, "n_features_per_level": 1, "interpolation": "Nearest"})),
    ),
    "harmonics and identity": (
        5, (on(0, 3, {"otype": "SphericalHarmonics", "degree": 2}), on(1, 4, {"otype": "Identity", "scale": 2.0})),
    ),
    "a sum inside": (
        3,
        (
            on(0, 2, composite(on(0, 1, {"otype": "OneBlob", "n_bins": 8}),
                               on(1, 1, {"otype": "TriangleWave", "n_frequencies": 8}), reduction="Sum")),
            on(1, 2, composite(on(0, 2, SMALL_GRID), on(1, 1, {"otype": "Frequency", "n_frequencies": 1}))),
        ),
    ),
    "one child": (2, (WIDE_GRID,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONCATENATIONS)
def test_children_side_by_side(name: str) -> None:
    check_bare(*CONCATENATIONS[name])


@pytest.mark.parametrize("reduction", ["Sum", "Product"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_children_combined(name: str, reduction: str) -> None:
    n_in, nested = REDUCTIONS[name]
    check_bare(n_in, composite(*nested, reduction=reduction))


@pytest.mark.parametrize("name", ["nrc", "nerf_rgb", "grid and waves", "gaps and overlaps"])
def test_networks_of_composites(name: str) -> None:
    n_in, encoding = CONCATENATIONS[name]
    check(make_spec(n_in, encoding=encoding), gradient_tolerance=STEEP)


# ---------------------------------------------------------------------------------------------------- grids


@pytest.mark.parametrize("interpolation", ["Linear", "Nearest"])
@pytest.mark.parametrize("n_dims", [1, 5, 6, 7])
def test_grids_of_any_dimension(n_dims: int, interpolation: str) -> None:
    config = {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 8, "base_resolution": 3 if n_dims < 6 else 2}
    check_bare(n_dims, config | {"interpolation": interpolation, "per_level_scale": 4.0})


@pytest.mark.parametrize("name", ["Prime", "CoherentPrime", "ReversedPrime", "Rng", "BaseConvert"])
@pytest.mark.parametrize("n_dims", [1, 3, 5])
def test_hashes(n_dims: int, name: str) -> None:
    config = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 5, "base_resolution": 40, "hash": name}
    check_bare(n_dims, config)


# ------------------------------------------------------------------------------------------------- anything


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(encodings())
def test_any_encoding(encoding: EncodingSpec) -> None:
    spec = ModelSpec(encoding.n_input_dims, encoding.n_output_dims, encoding, None, encoding.n_output_dims)
    x = inputs_off_kinks(encoding, np.random.default_rng(0), 33).astype(np.float32)
    assume(len(x) > 0)
    check_spec(spec, x)
