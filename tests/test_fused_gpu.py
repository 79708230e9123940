"""Fused kernels on a real device against the float16 reference: random models, ragged batches, every block.

The random models are those of `benchmarks/agreement`: NUMBA_TCNN_TEST_SEED chooses the draws (default: a new seed each
time, printed), NUMBA_TCNN_TEST_DRAWS how many there are. Run with -s to see the figures of every other model: the
errors, how many samples had flipped gates, and the distance to float32.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace

import numpy as np
import pytest
from model_draws import covering, plain_draw

import numba_tcnn as tcnn
from benchmarks.agreement.comparison import TOLERANCE, Agreement, Comparison, relative_error
from benchmarks.agreement.device_views import DeviceView, poisoned
from benchmarks.agreement.draws import Draw
from benchmarks.agreement.examine import FAILS, FULL, examine_number
from benchmarks.agreement.fused_model import FusedModel
from numba_tcnn.arrays import view
from numba_tcnn.fused import device_status, dtypes_of, layer_programs
from numba_tcnn.reference.model import Model

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("no_reference")]

SEED = int(os.environ.get("NUMBA_TCNN_TEST_SEED") or secrets.randbelow(2**32))
N_PARTS = 12
"""Of the draws, so that processes can share them."""
N_DRAWS = int(os.environ.get("NUMBA_TCNN_TEST_DRAWS") or 24)
BATCHES = (1, 31, 257, 1000)
LARGE = 1 << 18


def compare(draw: Draw, batches: tuple[int, ...]) -> list[Agreement]:
    x = draw.inputs(max(batches))
    params = draw.params(x[:4096])
    fused, comparison = FusedModel(draw, params), Comparison(draw, params, x)
    found = [comparison.on(fused, batch) for batch in batches]
    assert fused.network.explain().engine == "fused"
    print(f"\n{draw}")
    for agreement in found:
        print(f"  {'' if agreement.holds else 'WRONG '}{agreement}")
    return found


@pytest.mark.parametrize("part", range(N_PARTS))
def test_random_models_agree_with_the_reference(part):
    """Calls, second derivatives and training. All draws run, also behind one that fails: what they have in common says
    more than the first."""
    print(f"\nNUMBA_TCNN_TEST_SEED={SEED}, part {part}")
    records = [examine_number(k, seed=SEED, scale=FULL, compare=True) for k in range(part, N_DRAWS, N_PARTS)]
    wrong = [f"draw {record['number']}: {record['failures']}" for record in records if record["status"] == FAILS]
    assert not wrong, f"python -m benchmarks.agreement --seed {SEED} --draw ...\n" + "\n".join(wrong)


@pytest.mark.parametrize("number", range(20))
def test_random_plain_models_agree_with_the_reference_at_every_batch_size(number):
    draw = plain_draw(SEED, number)
    print(f"\nNUMBA_TCNN_TEST_SEED={SEED}, number {number}")
    for agreement in compare(draw, (*BATCHES, LARGE)):
        assert agreement.holds, f"{draw}: {agreement}"


@pytest.mark.parametrize("draw", covering(), ids=str)
def test_every_choice_of_the_family_agrees_with_the_reference(draw):
    """On aligned arrays or unaligned ones, for which kernels load differently; Identity on both."""
    layouts = ("aligned", "unaligned")
    for layout in layouts if draw.encoding["otype"] == "Identity" else layouts[draw.seed % 2 :][:1]:
        for agreement in compare(replace(draw, layout=layout), (31, 1000)):
            assert agreement.holds, str(agreement)


@pytest.mark.parametrize("draw", [*covering("bfloat16")[1::2], *covering("float32")[::2]], ids=str)
def test_other_dtypes_agree_with_the_reference(draw):
    """Half of the family each, all widths and interpolations among them: float32 as exactly as it promises."""
    if draw.dtype not in dtypes_of(device_status(0).compute_capability):
        pytest.skip(f"this device has no {draw.dtype}")
    for agreement in compare(draw, (1, 257, 1000)):
        assert agreement.holds, str(agreement)


LARGE_MODELS = {
    "image": Draw(
        2,
        3,
        {"otype": "HashGrid", "n_levels": 16, "log2_hashmap_size": 15, "base_resolution": 16, "per_level_scale": 1.5},
        {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2},
        "RelativeL2",
    ),
    "volume": Draw(
        3,
        16,
        {"otype": "HashGrid", "n_levels": 8, "log2_hashmap_size": 15, "base_resolution": 16, "per_level_scale": 1.5},
        {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 1},
        "RelativeL2",
        output_dtype="float16",
    ),
    "narrow": Draw(
        16,
        16,
        {"otype": "Identity"},
        {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 2},
        "L2",
        "float16",
        "float16",
    ),
    "wide": Draw(
        64,
        16,
        {"otype": "Identity"},
        {"otype": "FullyFusedMLP", "n_neurons": 128, "n_hidden_layers": 4, "activation": "ReLU"},
        "L2",
        "float16",
    ),
}


@pytest.mark.parametrize("name", LARGE_MODELS)
def test_large_batches_agree_with_the_reference(name):
    """2^18 samples: persistent blocks take many tiles each, and staged plans go through the batch in chunks."""
    (agreement,) = compare(LARGE_MODELS[name], (LARGE - 77,))
    assert agreement.holds, str(agreement)


GRID = {"otype": "HashGrid", "n_levels": 8, "log2_hashmap_size": 12, "base_resolution": 8, "per_level_scale": 1.4}
LARGE_NETWORKS = {
    "wide": Draw(
        2, 3, GRID, {"otype": "CutlassMLP", "n_neurons": 512, "n_hidden_layers": 2, "activation": "SiLU"}, "RelativeL2"
    ),
    "deep": Draw(
        2,
        3,
        GRID,
        {"otype": "CutlassMLP", "n_neurons": 48, "n_hidden_layers": 32, "activation": "Softplus", "bias": True},
        "L2",
    ),
    "many outputs": Draw(
        16,
        300,
        {"otype": "Identity"},
        {"otype": "CutlassMLP", "hidden": [200, 64, 330], "activation": "Tanh", "bias": True},
        "L2",
        "float16",
        "float16",
    ),
    "biases": Draw(
        2, 3, GRID, {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2, "bias": True}, "RelativeL2"
    ),
    "128 wide, in phases": Draw(
        2,
        3,
        {"otype": "OneBlob", "n_bins": 64},
        {"otype": "FullyFusedMLP", "n_neurons": 128, "n_hidden_layers": 5},
        "RelativeL2",
    ),
    "128 wide, in phases, by outputs": Draw(
        3,
        20,
        {"otype": "Frequency", "n_frequencies": 10},
        {"otype": "CutlassMLP", "hidden": [128, 120], "activation": "Sigmoid"},
        "L2",
        "float16",
    ),
    "biases, staged": Draw(
        2, 3, GRID, {"otype": "CutlassMLP", "hidden": [128, 100, 128], "activation": "Tanh", "bias": True}, "L2"
    ),
}


@pytest.mark.parametrize("name", LARGE_NETWORKS)
def test_large_batches_of_unusual_networks_agree_with_the_reference(name, monkeypatch):
    """Layer by layer in several chunks, the last one ragged; biases in kernels of every plan."""
    batch = LARGE - 77
    if name == "deep":  # 32 layers take the reference minutes
        monkeypatch.setattr(layer_programs, "CHUNK_BYTES", layer_programs.CHUNK_BYTES >> 4)
        batch = (LARGE >> 4) - 77
    (agreement,) = compare(LARGE_NETWORKS[name], (batch,))
    assert agreement.holds, str(agreement)


ENCODINGS = [
    (2, {"otype": "HashGrid", "n_levels": 5, "n_features_per_level": 4, "log2_hashmap_size": 8, "base_resolution": 4}),
    (3, {"otype": "DenseGrid", "n_levels": 3, "n_features_per_level": 1, "base_resolution": 4, "per_level_scale": 1.5}),
    (4, {"otype": "TiledGrid", "n_levels": 2, "n_features_per_level": 8, "base_resolution": 3}),
    (7, {"otype": "Identity", "scale": 2.0, "offset": -0.5}),
]


@pytest.mark.parametrize("alignment", [0, 16])
@pytest.mark.parametrize("n_input_dims, config", ENCODINGS, ids=lambda value: str(value))
def test_bare_encodings_agree_with_the_reference(n_input_dims, config, alignment, rng):
    encoding = tcnn.Encoding(n_input_dims, config, alignment=alignment, strict=True)
    assert encoding.explain().engine == "fused"
    encoding.params = rng.uniform(-0.5, 0.5, encoding.n_params)
    model = Model(encoding.spec, encoding.params, "float16")
    for batch in BATCHES:
        x = rng.random((batch, n_input_dims), np.float32)
        dL_dy = rng.standard_normal((batch, encoding.n_output_dims)).astype(np.float32)
        out = poisoned((batch, encoding.n_output_dims), "float32")
        encoding.inference(DeviceView(x), out=out)
        dx, params = poisoned(x.shape, "float32"), poisoned((encoding.n_params,), "float32")
        encoding.engine.backward(
            view(DeviceView(x)), view(DeviceView(dL_dy)), params=view(params), accumulate=False, input=view(dx)
        )
        expected = model.backward(x, dL_dy)
        errors = {
            "outputs": relative_error(out.numpy(), model.forward(x)),
            "dL/dx": relative_error(dx.numpy(), expected.input),
            "dL/dparams": relative_error(params.numpy(), expected.params),
        }
        assert all(error <= TOLERANCE for error in errors.values()), (batch, errors)


# ------------------------------------------------------------------------------------------------ edges


@pytest.fixture
def image() -> FusedModel:
    draw = LARGE_MODELS["image"]
    return FusedModel(draw, draw.params(draw.inputs(1000)))


def test_padded_parameters_get_no_gradient(image):
    """Rows of the last matrix past the 3 outputs: nothing depends on them, and the optimizer must not move them."""
    x = image.draw.inputs(1000)
    params, _ = image.backward(x, image.draw.output_gradients(1000))
    _, training = image.training_step(x, np.ones((1000, 3), np.float32))
    n_network = sum(fan_out * fan_in for fan_out, fan_in in image.network.layer_sizes)
    padding = slice(n_network - 13 * 64, n_network)
    assert not params[padding].any() and not training[padding].any()
    assert params[padding.start - 64 : padding.start].any()


def test_rows_do_not_depend_on_their_neighbours(image):
    """The same sample gives the same bits wherever it stands, whatever stands behind it."""
    x = image.draw.inputs(1000)
    whole = image.inference(x, "float32")
    for first, last in ((0, 1), (17, 48), (999, 1000), (500, 757)):
        np.testing.assert_array_equal(image.inference(x[first:last], "float32"), whole[first:last])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 3e9])
def test_extreme_inputs_stay_in_their_row(image, value):
    """No access out of bounds, and neighbours are untouched; finite inputs give finite outputs."""
    x = image.draw.inputs(257)
    expected = image.inference(x, "float32")
    x[100, 0] = value
    got = image.inference(x, "float32")
    others = np.arange(257) != 100
    np.testing.assert_array_equal(got[others], expected[others])
    if np.isfinite(value):
        assert np.isfinite(got[100]).all()


def test_output_gradients_of_any_size(image):
    """They are scaled by a power of two before they are rounded: tiny and huge ones lose nothing."""
    x, dL_dy = image.draw.inputs(257), image.draw.output_gradients(257)
    params, dx = image.backward(x, dL_dy)
    for exponent in (-60, 40):
        factor = np.float32(2.0**exponent)
        scaled_params, scaled_dx = image.backward(x, dL_dy * factor)
        np.testing.assert_array_equal(scaled_dx, dx * factor)
        # tables and partial sums are added in any order: float32 rounding of sums of up to 257 terms
        assert relative_error(scaled_params / factor, params) < 1e-5
    nothing, no_dx = image.backward(x, 0 * dL_dy)
    assert not nothing.any() and not no_dx.any()


WARPGROUP_SHAPES = [
    (64, 16, [64, 64]),  # inputs, outputs, hidden widths; all tiles of 128-byte rows
    (32, 16, [64, 64]),  # 64-byte rows
    (16, 3, [64]),
    (48, 3, [64]),
    (128, 20, [64]),  # two panels
    (80, 48, [64, 32]),
    (64, 64, [32, 16]),
    (32, 16, [32, 32]),
    (16, 16, [16, 16]),
    (64, 16, [64, 64, 64, 64]),
]


@pytest.mark.parametrize("input_dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", WARPGROUP_SHAPES, ids=str)
def test_every_layout_of_warpgroups_agrees_with_the_reference(shape, input_dtype):
    """Each swizzle as each operand, inputs in float16 being copied ahead. On other chips than compute capability 9.0,
    the same shapes without wgmma."""
    n_in, n_out, hidden = shape
    network = {"otype": "CutlassMLP", "hidden": hidden}
    draw = Draw(n_in, n_out, {"otype": "Identity"}, network, "L2", input_dtype=input_dtype)
    for agreement in compare(draw, BATCHES):
        assert agreement.holds, str(agreement)
