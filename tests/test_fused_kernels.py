"""Whole kernels in the emulator against the reference of the same precision.

Both round to float16 at the same points and add up in float32, in another order. So most values agree to a few units
in the last place of float32. But where a sum lies on the border between two float16 numbers, the two sides store
different neighbours, 2^-10 of the value apart (with 64 x 2 hidden values a sample, that happens in a few per cent of
the samples). Hence the tolerances: nearly all outputs to float32's precision and each to float16's; gradients in norm
over B samples, where one such flip in a sample moves one of B contributions by 2^-10 of itself. Anything that is really
wrong (a lost sample, a wrong column, a missing factor) is off by 1 / B or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from emulation import EmulatedModel
from golden_case import relative_error

from numba_tcnn.config import parse_model
from numba_tcnn.fused.activations import ACTIVATIONS
from numba_tcnn.fused.formats import number_format
from numba_tcnn.fused.losses import LOSSES
from numba_tcnn.fused.network_plans import (
    encoding_gradient_plan,
    gradient_plans,
    inference_plans,
    single_plans,
    staged_plans,
)
from numba_tcnn.fused.plan import KernelPlan, StagedPlan, architecture
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.layout import grid_levels, n_params, parameter_blocks
from numba_tcnn.reference import Model
from numba_tcnn.specs import LossSpec, ModelSpec

pytestmark = pytest.mark.slow

HOPPER = architecture((9, 0))


@dataclass(frozen=True)
class Tolerance:
    """What may differ from `reference`, the dtype of the reference.

    output          of four in five outputs, over the largest output: a few float32 roundings
    flipped_output  of each output: one stored hidden value more or less
    gradient        of a block of parameters' gradient, or of dL/dx, in norm: flips in some of 31 or more samples
    """

    reference: str
    output: float
    flipped_output: float
    gradient: float


TOLERANCES = {
    "float16": Tolerance("float16", 2e-6, 1e-3, 2e-4),
    # a flip weighs 8 times as much, and is 8 times as rare, which is sqrt(8) in norm
    "bfloat16": Tolerance("bfloat16", 2e-6, 8e-3, 6e-4),
    # against exact arithmetic: what this project promises; nothing flips
    "float32": Tolerance("float64", 1e-5, 1e-5, 1e-5),
}
GRADIENT = TOLERANCES["float16"].gradient
LOSS = 1e-5

GRID = {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 7, "base_resolution": 4, "per_level_scale": 1.6}
MLP = {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 2}


def make_spec(n_in: int = 2, n_out: int = 3, encoding: dict | None = None, **network: Any) -> ModelSpec:
    config = MLP | network
    if "hidden" in config:
        del config["n_neurons"], config["n_hidden_layers"]
    return parse_model(n_in, n_out, encoding or GRID, config)


def make_params(spec: ModelSpec, rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    """Weights that keep the size of activations, features of order 1; padding rows of the last layer stay random."""
    params = rng.normal(0, 0.7 * scale, n_params(spec)).astype(np.float32)
    for block in parameter_blocks(spec):
        if block.name.endswith(".weight"):
            fan_out, fan_in = block.shape
            params[block.offset : block.offset + block.size] *= 1.4 / np.sqrt(fan_in)
    return params


def data(spec: ModelSpec, batch: int, rng: np.random.Generator, dtype: str = "float32"):
    x = rng.random((batch, spec.n_input_dims)).astype(dtype)
    y = (0.1 + 0.9 * rng.random((batch, spec.n_output_dims))).astype(np.float32)
    return x, y


def assert_outputs_agree(actual: np.ndarray, expected: np.ndarray, dtype: str = "float16") -> None:
    tolerance = TOLERANCES[dtype]
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    errors = np.abs(actual - expected) / np.abs(expected).max()
    assert np.quantile(errors, 0.8) <= tolerance.output, (
        f"one in five outputs differs by {np.quantile(errors, 0.8):.1e}"
    )
    assert errors.max() <= tolerance.flipped_output, f"an output differs by {errors.max():.1e} of the largest"


def assert_gradients_agree(spec: ModelSpec, actual: np.ndarray, expected: np.ndarray, tolerance: float = GRADIENT):
    for block in parameter_blocks(spec):
        part = slice(block.offset, block.offset + block.size)
        error = relative_error(actual[part], expected[part])
        assert error <= tolerance, f"dL/d({block.name}) differs by {error:.1e}"
        if block.shape != block.logical_shape:
            stored = block.stored(actual).copy()
            stored[tuple(slice(length) for length in block.logical_shape)] = 0
            assert not stored.any(), f"the padding of {block.name} has a gradient"


def check(
    spec: ModelSpec,
    *,
    batch: int = 45,
    loss: str | None = "L2",
    plan: KernelPlan | StagedPlan | None = None,
    inference_plan: KernelPlan | None = None,
    input_dtype: str = "float32",
    misaligned: bool = False,
    cc: int = 90,
    density: bool = False,
    chunk_rows: int | None = None,
    n_blocks: int = 2,
    scale: float = 1.0,
    x: np.ndarray | None = None,
    dL_dy: np.ndarray | None = None,
    gradient_tolerance: float | None = None,
    seed: int = 5,
    dtype: str = "float16",
    input_gradient: bool = True,
) -> None:
    """Inference, loss, dL/dparams and dL/dx, if asked for, of one model in the emulator and in the reference."""
    tolerance = TOLERANCES[dtype]
    gradient_tolerance = gradient_tolerance or tolerance.gradient
    rng = np.random.default_rng(seed)
    params = make_params(spec, rng, scale)
    drawn, y = data(spec, batch, rng, input_dtype)
    x = drawn if x is None else x
    pdf = (0.2 + rng.random(y.shape)).astype(np.float32) if density else None
    model = EmulatedModel(spec, params, misaligned=misaligned, cc=cc, dtype=dtype)
    reference = Model(spec, params, tolerance.reference)
    aligned = not misaligned and x.strides[0] % 16 == 0

    inference_plan = inference_plan or inference_plans(spec, HOPPER, dtype)[0]
    out = model.inference(x, inference_plan, InferenceOptions(input_dtype, aligned), n_blocks)
    assert_outputs_agree(out, reference.forward(x), dtype)

    options = GradientOptions(
        input_dtype=input_dtype,
        aligned_input=aligned,
        loss=loss,
        density_dtype="float32" if density else None,
        table_gradient=n_params(spec) > model.n_network,
        input_gradient=input_gradient,
    )
    if plan is None:
        plan = gradient_plans(spec, HOPPER, encoding_gradient=True, dtype=dtype)[0]
    given = {"chunk_rows": chunk_rows, "n_blocks": n_blocks}
    if loss is None:
        dL_dy = rng.normal(size=y.shape).astype(np.float32) if dL_dy is None else dL_dy
        scales = tuple(model.gradient_scales(dL_dy)) if number_format(dtype).scales_given_gradients else (1.0, 1.0)
        _, gradients, dx = model.gradient(x, dL_dy, plan, options, scales=scales, **given)
        expected = reference.backward(x, dL_dy)
    else:
        value, gradients, dx = model.gradient(x, y, plan, options, density=pdf, **given)
        expected_value, expected = reference.loss_and_gradients(x, y, LossSpec(loss), pdf)
        assert value == pytest.approx(expected_value, rel=LOSS)
    assert model.bad[0] == 0 and not model.table_gradient.any()  # collecting leaves zeros for the next batch
    assert_gradients_agree(spec, gradients, expected.params, gradient_tolerance)
    if input_gradient:
        assert relative_error(dx, expected.input) <= gradient_tolerance
    else:
        assert np.isnan(dx).all()


# --------------------------------------------------------------------------------- activations, losses


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_hidden_activations(name: str) -> None:
    check(make_spec(activation=name), scale=0.5 if name == "Exponential" else 1.0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_output_activations(name: str) -> None:
    check(make_spec(output_activation=name))


@pytest.mark.parametrize("density", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, density: bool) -> None:
    """Positive predictions, which CrossEntropy and Variance need."""
    check(make_spec(output_activation="Sigmoid"), loss=loss, density=density)


@pytest.mark.parametrize("loss", ["L1", "RelativeL2", "Smape"])
def test_half_precision_targets_and_densities(loss: str, rng: np.random.Generator) -> None:
    spec = make_spec()
    params = make_params(spec, rng)
    x, y = data(spec, 45, rng)
    y, pdf = y.astype(np.float16), (0.25 + rng.random(y.shape)).astype(np.float16)
    model = EmulatedModel(spec, params)
    options = GradientOptions(target_dtype="float16", density_dtype="float16", loss=loss, input_gradient=True)
    plan = gradient_plans(spec, HOPPER, encoding_gradient=True)[0]
    value, gradients, dx = model.gradient(x, y, plan, options, density=pdf)
    expected_value, expected = Model(spec, params, "float16").loss_and_gradients(x, y, LossSpec(loss), pdf)
    assert value == pytest.approx(expected_value, rel=LOSS)
    assert_gradients_agree(spec, gradients, expected.params)
    assert relative_error(dx, expected.input) <= GRADIENT


@pytest.mark.parametrize("output_activation", ["None", "Sine"])
@pytest.mark.parametrize("magnitude", [1.0, 1e-12, 1e12])
def test_given_output_gradients(magnitude: float, output_activation: str, rng: np.random.Generator) -> None:
    dL_dy = (magnitude * rng.normal(size=(45, 3))).astype(np.float32)
    check(make_spec(output_activation=output_activation), loss=None, dL_dy=dL_dy)


# ------------------------------------------------------------------------------------------- encodings


@pytest.mark.parametrize("interpolation", ["Linear", "Smoothstep", "Nearest"])
@pytest.mark.parametrize("n_features", [1, 2, 4, 8])
@pytest.mark.parametrize("n_dims", [2, 3, 4])
def test_hash_grids(n_dims: int, n_features: int, interpolation: str) -> None:
    encoding = GRID | {
        "n_levels": 3,
        "log2_hashmap_size": 6,
        "n_features_per_level": n_features,
        "interpolation": interpolation,
    }
    spec = make_spec(n_dims, encoding=encoding, n_hidden_layers=1, n_neurons=16)
    levels = grid_levels(spec.encoding)
    assert not levels[0].hashed or n_dims == 4, "a dense level shall be part of it"
    assert levels[-1].hashed
    check(spec, batch=33)


@pytest.mark.parametrize("n_features", [1, 2, 4])
def test_grids_on_older_chips(n_features: int) -> None:
    """Before compute capability 9.0 neighbouring entries are not added to in one reduction."""
    check(make_spec(3, encoding=GRID | {"n_features_per_level": n_features}), cc=75)


@pytest.mark.parametrize("kind", ["DenseGrid", "TiledGrid"])
@pytest.mark.parametrize("n_dims", [2, 3])
def test_dense_and_tiled_grids(n_dims: int, kind: str) -> None:
    """Tiled levels wrap around 5^D entries, no power of two."""
    encoding = {"otype": kind, "n_levels": 3, "base_resolution": 5, "per_level_scale": 1.5}
    check(make_spec(n_dims, encoding=encoding), batch=33)


@pytest.mark.parametrize("n_dims", [2, 3])
def test_levels_whose_dense_index_needs_64_bits(n_dims: int) -> None:
    """Tiled levels finer than 65535 (2-D) or 1625 (3-D) vertices an axis."""
    encoding = {
        "otype": "TiledGrid",
        "n_levels": 2,
        "base_resolution": 5,
        "per_level_scale": {2: 16000.0, 3: 800.0}[n_dims],
    }
    spec = make_spec(n_dims, encoding=encoding)
    assert grid_levels(spec.encoding)[-1].resolution > {2: 65535, 3: 1625}[n_dims]
    check(spec, batch=33)


@pytest.mark.parametrize(
    ("n_in", "width"), [(1, 16), (2, 16), (3, 16), (8, 16), (16, 16), (19, 32), (20, 32), (24, 32)]
)
@pytest.mark.parametrize("input_dtype", ["float32", "float16"])
def test_identity(n_in: int, width: int, input_dtype: str) -> None:
    """Chunks of 1, 2, 4 and 8 dims, with scale, offset, and columns of padding."""
    encoding = {"otype": "Identity", "scale": 1.5, "offset": -0.25}
    spec = make_spec(n_in, encoding=encoding, n_hidden_layers=1)
    assert spec.encoding_width == width
    check(spec, input_dtype=input_dtype)


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize("input_dtype", ["float32", "float16"])
@pytest.mark.parametrize("encoding", [GRID, {"otype": "Identity"}], ids=["grid", "identity"])
def test_inputs_of_both_dtypes_aligned_or_not(encoding: dict, input_dtype: str, misaligned: bool) -> None:
    check(
        make_spec(8 if encoding is not GRID else 2, encoding=encoding), input_dtype=input_dtype, misaligned=misaligned
    )


@pytest.mark.parametrize("encoding", [
    GRID,
    GRID | {"n_features_per_level": 1, "n_levels": 5},
    GRID | {"interpolation": "Nearest"},
    {"otype": "Identity", "scale": 2.0},
], ids=["hash", "five columns", "nearest", "identity"])  # fmt: skip
@pytest.mark.parametrize("output_dtype", ["float32", "float16"])
def test_bare_encodings(encoding: dict, output_dtype: str, rng: np.random.Generator) -> None:
    spec = parse_model(3, None, encoding, None, alignment=1)
    params = make_params(spec, rng)
    x = rng.random((77, 3), np.float32)
    model, reference = EmulatedModel(spec, params), Model(spec, params, "float16")
    options = InferenceOptions(aligned_input=False, output_dtype=output_dtype)
    out = model.inference(x, inference_plans(spec, HOPPER)[0], options)
    assert out.dtype == output_dtype
    assert_outputs_agree(out.astype(np.float32), reference.forward(x))
    dL_dy = rng.normal(size=out.shape).astype(np.float32)
    options = GradientOptions(aligned_input=False, loss=None, table_gradient=bool(n_params(spec)), input_gradient=True)
    scales = tuple(model.gradient_scales(dL_dy))
    plan = encoding_gradient_plan(spec, HOPPER)
    _, gradients, dx = model.gradient(x, dL_dy, plan, options, scales=scales)
    expected = reference.backward(x, dL_dy)
    assert_gradients_agree(spec, gradients, expected.params)
    assert relative_error(dx, expected.input) <= GRADIENT


# ---------------------------------------------------------------------------------- shapes and plans


@pytest.mark.parametrize("n_hidden_layers", [0, 1, 5])
@pytest.mark.parametrize("n_out", [1, 16, 17])
def test_depths_and_output_widths(n_hidden_layers: int, n_out: int) -> None:
    check(make_spec(n_out=n_out, otype="CutlassMLP", n_hidden_layers=n_hidden_layers, n_neurons=16))


@pytest.mark.parametrize("activation", ["ReLU", "Sigmoid", "SiLU"])  # phi(0) = 0, not 0, and with a gate
@pytest.mark.parametrize("staged", [False, True])
def test_hidden_widths_that_are_padded(activation: str, staged: bool) -> None:
    """20 and 40 neurons in tiles of 32 and 48 columns, with stray weights in the padding, which take no part."""
    spec = make_spec(otype="CutlassMLP", hidden=[20, 40], activation=activation)
    assert spec.logical_layer_shapes[1] == (40, 20) and spec.layer_shapes[1] == (48, 32)
    check(spec, plan=(staged_plans if staged else single_plans)(spec, HOPPER, encoding_gradient=True)[0])


@pytest.mark.parametrize("batch", [1, 2, 31, 32, 127, 128, 129, 257])
@pytest.mark.parametrize("n_blocks", [1, 3])
def test_ragged_batches(batch: int, n_blocks: int) -> None:
    """Fewer tiles than blocks, several tiles a block, rows past the batch. One flip in one sample weighs 2^-11."""
    check(make_spec(n_neurons=16), batch=batch, n_blocks=n_blocks, gradient_tolerance=2e-3 if batch < 31 else GRADIENT)


def distinct(plans: list[KernelPlan]) -> list[KernelPlan]:
    """Without those that differ only in the blocks a multiprocessor shall hold."""
    seen = {(p.warps, p.rows, p.weights.resident): p for p in reversed(plans)}
    return list(seen.values())


WIDE = make_spec(n_neurons=64, n_hidden_layers=2)


@pytest.mark.parametrize("plan", distinct(inference_plans(WIDE, HOPPER)), ids=KernelPlan.describe)
def test_inference_plans(plan: KernelPlan, rng: np.random.Generator) -> None:
    params = make_params(WIDE, rng)
    x, _ = data(WIDE, 300, rng)
    out = EmulatedModel(WIDE, params).inference(x, plan, InferenceOptions(aligned_input=False))
    assert_outputs_agree(out, Model(WIDE, params, "float16").forward(x))


@pytest.mark.parametrize("plan", distinct(single_plans(WIDE, HOPPER, encoding_gradient=True)), ids=KernelPlan.describe)
def test_single_plans(plan: KernelPlan) -> None:
    check(WIDE, plan=plan, batch=300)


UNEVEN = make_spec(otype="CutlassMLP", n_neurons=80, n_hidden_layers=1, n_out=20)


@pytest.mark.parametrize(
    "plan", distinct(single_plans(UNEVEN, HOPPER, encoding_gradient=True)), ids=KernelPlan.describe
)
def test_weight_gradients_that_do_not_divide_evenly(plan: KernelPlan) -> None:
    """5 blocks of rows among 2 or 4 warps: parts overlap, and each block is written by its owner alone."""
    check(UNEVEN, plan=plan, batch=150)


STAGED = distinct([p.propagate for p in staged_plans(WIDE, HOPPER, encoding_gradient=True)])


@pytest.mark.parametrize("propagate", STAGED, ids=KernelPlan.describe)
@pytest.mark.parametrize("activation", ["ReLU", pytest.param("SiLU", marks=pytest.mark.exhaustive)])  # SiLU keeps phi'
def test_staged_plans(propagate: KernelPlan, activation: str) -> None:
    """Three chunks: the second adds to the first one's dW, the last is shorter."""
    plan = next(p for p in staged_plans(WIDE, HOPPER, encoding_gradient=True) if p.propagate == propagate)
    spec = make_spec(n_neurons=64, n_hidden_layers=2, activation=activation)
    check(spec, plan=plan, batch=2 * plan.propagate.tile_rows + 44, chunk_rows=plan.propagate.tile_rows, density=True)


def test_staged_plans_with_many_layers_of_one_shape() -> None:
    spec = make_spec(otype="CutlassMLP", n_neurons=48, n_hidden_layers=4, n_out=20)
    plan = staged_plans(spec, HOPPER, encoding_gradient=True)[0]
    assert [len(layers) for _, layers in plan.weight_gradients] == [1, 3, 1]
    check(spec, plan=plan, batch=200)


@pytest.mark.parametrize("staged", [False, True])
def test_without_encoding_gradients(staged: bool, rng: np.random.Generator) -> None:
    """An Identity encoding in training: no dL/d(features) at all."""
    spec = make_spec(12, encoding={"otype": "Identity"})
    params = make_params(spec, rng)
    x, y = data(spec, 300, rng)
    make_plans = staged_plans if staged else single_plans
    plan = make_plans(spec, HOPPER, encoding_gradient=False)[0]
    options = GradientOptions(table_gradient=False)
    value, gradients, _ = EmulatedModel(spec, params).gradient(x, y, plan, options)
    expected_value, expected = Model(spec, params, "float16").loss_and_gradients(x, y, LossSpec("L2"))
    assert value == pytest.approx(expected_value, rel=LOSS)
    assert_gradients_agree(spec, gradients, expected.params)


def test_gradients_are_added_to_what_is_there(rng: np.random.Generator) -> None:
    spec = make_spec(n_neurons=16)
    params = make_params(spec, rng)
    x, y = data(spec, 45, rng)
    plan = gradient_plans(spec, HOPPER, encoding_gradient=True)[0]
    earlier = rng.normal(size=n_params(spec)).astype(np.float32)
    _, expected, _ = EmulatedModel(spec, params).gradient(x, y, plan, GradientOptions())
    _, total, _ = EmulatedModel(spec, params).gradient(x, y, plan, GradientOptions(), into=earlier.copy())
    np.testing.assert_allclose(total, earlier + expected, rtol=1e-6, atol=1e-6)  # one more float32 rounding


# -------------------------------------------------------------------------------------- strange numbers

STRANGE = np.array([-0.75, 1.5, -1e4, 3e9, -3e38, 1e-45, 0.0, 1.0], np.float32)


@pytest.mark.parametrize("encoding", [
    GRID,
    GRID | {"interpolation": "Smoothstep"},
    GRID | {"interpolation": "Nearest"},
    {"otype": "TiledGrid", "n_levels": 2, "base_resolution": 5, "per_level_scale": 16000.0},
    {"otype": "DenseGrid", "n_levels": 2, "base_resolution": 5},
], ids=["linear", "smoothstep", "nearest", "wide tiled", "dense"])  # fmt: skip
def test_inputs_outside_the_unit_cube(encoding: dict, rng: np.random.Generator) -> None:
    """Finite inputs of any size: the same entries as in the reference, never NaN, nothing out of bounds."""
    x = np.stack(np.meshgrid(STRANGE, STRANGE), axis=-1).reshape(-1, 2)
    check(make_spec(encoding=encoding), x=x, batch=len(x))


@pytest.mark.parametrize("interpolation", ["Linear", "Smoothstep", "Nearest"])
def test_infinite_and_missing_inputs_are_no_faults(interpolation: str, rng: np.random.Generator) -> None:
    spec = make_spec(encoding=GRID | {"interpolation": interpolation})
    params = make_params(spec, rng)
    values = np.array([np.inf, -np.inf, np.nan, 0.3], np.float32)
    x = np.stack(np.meshgrid(values, values), axis=-1).reshape(-1, 2)
    model = EmulatedModel(spec, params)
    out = model.inference(x, inference_plans(spec, HOPPER)[0], InferenceOptions(aligned_input=False))
    usable = np.isfinite(x).all(1)
    assert_outputs_agree(out[usable], Model(spec, params, "float16").forward(x[usable]))
    plan = gradient_plans(spec, HOPPER, encoding_gradient=True)[0]
    y = np.zeros((len(x), 3), np.float32)
    model.gradient(x, y, plan, GradientOptions(aligned_input=False, input_gradient=True))


@pytest.mark.parametrize("staged", [False, True])
def test_gradients_that_are_not_finite_are_marked(staged: bool, rng: np.random.Generator) -> None:
    """A target of infinity in the last of 45 samples; `bad` then holds the launch's mark."""
    spec = make_spec()
    x, y = data(spec, 45, rng)
    plan = (staged_plans if staged else single_plans)(spec, HOPPER, encoding_gradient=True)[0]
    model = EmulatedModel(spec, make_params(spec, rng))
    model.gradient(x, y, plan, GradientOptions())
    assert model.bad[0] == 0
    y[44, 1] = np.inf
    model.gradient(x, y, plan, GradientOptions())
    assert model.bad[0] == model.constants["mark"]


# ------------------------------------------------------------------------ scale of given gradients


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("largest", [0.0, 2e-38, 1e-7, 0.9999, 8.0, 15.99, 16.0, 6e4, 3e38, np.inf, np.nan])
def test_scales_of_given_gradients(largest: float, dtype: str, rng: np.random.Generator) -> None:
    """Exactly the reference's power of two, and its inverse."""
    with np.errstate(over="ignore"):
        dL_dy = np.array(largest * (rng.random((700, 3)) - 0.5), np.float32).astype(dtype)
        dL_dy[699, 2] = -largest
    spec = make_spec(n_neurons=16)
    reference = Model(spec, np.zeros(n_params(spec), np.float32), "float16")
    expected = reference.precision.gradient_scale(dL_dy.astype(np.float32))
    scales = EmulatedModel(spec, np.zeros(n_params(spec))).gradient_scales(dL_dy)
    np.testing.assert_array_equal(scales, np.array([expected, 1 / expected], np.float32))
