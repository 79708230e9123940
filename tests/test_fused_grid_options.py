"""What grids do if asked to (fixed-point positions, levels switched off, one corner for all gradients), fused.

Whole kernels in the emulator against the reference of the same precision, the grid alone, in composites, and in front
of a network; and through the engine on the emulated driver.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation import EmulatedModel
from encoding_draws import encodings, inputs_off_kinks
from golden_case import relative_error
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_fused_encodings import BARE, FLIPPED, ROUNDING, composite, on
from test_fused_kernels import GRADIENT, HOPPER, assert_outputs_agree, data, make_params, make_spec

from numba_tcnn.config import parse_model
from numba_tcnn.fused.network_plans import encoding_gradient_plan, gradient_plans, inference_plans, staged_plans
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.layout import n_params
from numba_tcnn.reference import Model
from numba_tcnn.specs import CompositeSpec, EncodingSpec, GridSpec, LossSpec, ModelSpec

GRID = {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 5, "base_resolution": 3, "per_level_scale": 1.7}
OPTIONS = {
    "stochastic": {"stochastic_interpolation": True},
    "fixed point": {"fixed_point_pos": True},
    "both": {"stochastic_interpolation": True, "fixed_point_pos": True},
}
LEVELS = {"none": None, "half": 0.5, "off": 0.0, "each its own": "array"}


def levels_of(name: str, batch: int, rng: np.random.Generator) -> float | np.ndarray | None:
    return rng.random(batch, np.float32) if LEVELS[name] == "array" else LEVELS[name]


def check(
    spec: ModelSpec, rng: np.random.Generator, *, batch: int = 45, max_level: Any = None, dtype: str = "float32",
    fixed_point: bool = False, n_blocks: int = 2, x: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Features and both gradients of an encoding alone."""
    params = make_params(spec, rng)
    x = data(spec, batch, rng, dtype)[0] if x is None else x
    model, reference = EmulatedModel(spec, params, max_level=max_level), Model(spec, params, "float16")
    reference.max_level = max_level
    has_level = max_level is not None
    options = InferenceOptions(dtype, aligned_input=False, max_level=has_level)
    out, expected = model.inference(x, inference_plans(spec, HOPPER)[0], options), reference.forward(x)
    errors, largest = np.abs(out - expected), max(np.abs(expected).max(), 1)
    assert np.quantile(errors, 0.8) <= ROUNDING * largest
    assert (errors <= FLIPPED * np.abs(expected) + ROUNDING * largest).all()
    dL_dy = rng.normal(size=out.shape).astype(np.float32)
    for input_gradient in (True, False):
        options = GradientOptions(
            dtype, aligned_input=False, loss=None, input_gradient=input_gradient, max_level=has_level,
            table_gradient=bool(n_params(spec)), fixed_point=fixed_point and bool(n_params(spec)),
        )  # fmt: skip
        if not options.encoding_gradient:
            continue
        scales = tuple(model.gradient_scales(dL_dy))
        plan = encoding_gradient_plan(spec, HOPPER)
        _, gradients, dx = model.gradient(x, dL_dy, plan, options, scales=scales, n_blocks=n_blocks)
        expected = reference.backward(x, dL_dy)
        norm = np.linalg.norm(expected.params.astype(np.float64))
        assert np.linalg.norm(gradients - expected.params) <= BARE * norm  # both 0 where all levels are off
        if input_gradient:
            slopes = expected.input.astype(np.float64)
            assert np.linalg.norm(dx - slopes) <= BARE * max(np.linalg.norm(slopes), np.linalg.norm(dL_dy))
    assert model.bad[0] == 0


@pytest.mark.parametrize("interpolation", ["Linear", "Smoothstep", "Nearest"])
@pytest.mark.parametrize("n_dims", [1, 2, 3, 5])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, n_dims: int, interpolation: str, rng: np.random.Generator) -> None:
    config = GRID | OPTIONS[name] | {"interpolation": interpolation, "n_levels": 3}
    dtype = "float16" if n_dims == 2 else "float32"
    check(parse_model(n_dims, None, config, None, alignment=1), rng, dtype=dtype)


@pytest.mark.parametrize("batch", [1, 31, 257])
@pytest.mark.parametrize("levels", list(LEVELS)[1:])
def test_levels_in_use(levels: str, batch: int, rng: np.random.Generator) -> None:
    spec = parse_model(2, None, GRID | {"n_features_per_level": 4}, None, alignment=1)
    check(spec, rng, batch=batch, max_level=levels_of(levels, batch, rng))


@pytest.mark.parametrize("fraction", [0.2499, 0.25, 0.2501, 0.74975, 1.0, 2.0, -1.0])
def test_where_a_level_begins(fraction: float, rng: np.random.Generator) -> None:
    """Level l of L is in use below m L + 0.001: at m = l / L it just isn't off."""
    check(parse_model(2, None, GRID, None, alignment=1), rng, max_level=fraction)


@pytest.mark.parametrize("fixed_point", [False, True])
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("reduction", ["Concatenation", "Sum", "Product"])
def test_composites(reduction: str, levels: str, fixed_point: bool, rng: np.random.Generator) -> None:
    """Children of unlike options; each counts its own levels."""
    children = (
        on(0, 2, GRID | OPTIONS["stochastic"]),
        on(1, 2, GRID | OPTIONS["fixed point"] | {"n_levels": 2, "n_features_per_level": 4}),
        on(1, 2, {"otype": "OneBlob", "n_bins": 4}),
    )
    spec = parse_model(3, None, composite(*children, reduction=reduction), None, alignment=1)
    check(spec, rng, max_level=levels_of(levels, 45, rng), fixed_point=fixed_point)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("staged", [False, True])
def test_networks(staged: bool, levels: str, rng: np.random.Generator) -> None:
    """In chunks too, whose samples still are those of the whole batch."""
    spec = make_spec(2, encoding=GRID | OPTIONS["both"], n_hidden_layers=1, n_neurons=16)
    params, (x, y) = make_params(spec, rng), data(spec, 600, rng)
    max_level = levels_of(levels, len(x), rng)
    model, reference = EmulatedModel(spec, params, max_level=max_level), Model(spec, params, "float16")
    reference.max_level = max_level
    plan = (staged_plans if staged else gradient_plans)(spec, HOPPER, encoding_gradient=True)[0]
    rows = plan.propagate.tile_rows if staged else None
    out = model.inference(x, inference_plans(spec, HOPPER)[0], InferenceOptions(aligned_input=False, max_level=True))
    assert_outputs_agree(out, reference.forward(x))
    options = GradientOptions(aligned_input=False, loss="L2", input_gradient=True, max_level=True)
    dL_dy = rng.normal(size=y.shape).astype(np.float32)
    _, gradients, dx = model.gradient(x, y, plan, options, chunk_rows=rows)
    _, expected = reference.loss_and_gradients(x, y, LossSpec("L2"))
    assert relative_error(gradients, expected.params) <= GRADIENT
    norm = max(np.linalg.norm(expected.input), 1e-3 * np.linalg.norm(dL_dy) / y.size)
    assert np.linalg.norm(dx - expected.input) <= GRADIENT * norm


def with_options(encoding: EncodingSpec, rng: np.random.Generator) -> EncodingSpec:
    """The encoding, each of its grids with some of the options."""
    if isinstance(encoding, GridSpec):
        stochastic, fixed = (bool(flag) for flag in rng.integers(0, 2, 2))
        return replace(encoding, stochastic_interpolation=stochastic, fixed_point_pos=fixed)
    if isinstance(encoding, CompositeSpec):
        nested = tuple(replace(child, encoding=with_options(child.encoding, rng)) for child in encoding.nested)
        return replace(encoding, nested=nested)
    return encoding


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(encodings(), st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_any_encoding(encoding: EncodingSpec, seed: int, has_levels: bool, fixed_point: bool) -> None:
    rng = np.random.default_rng(seed)
    x = inputs_off_kinks(encoding, rng, 33).astype(np.float32)
    assume(len(x) > 0)
    encoding = with_options(encoding, rng)
    spec = ModelSpec(encoding.n_input_dims, encoding.n_output_dims, encoding, None, encoding.n_output_dims)
    check(spec, rng, x=x, fixed_point=fixed_point, max_level=rng.random(len(x), np.float32) if has_levels else None)
