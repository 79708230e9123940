"""Second derivatives: whole kernels in the emulator against the reference of the same precision.

The reference rounds values but neither tangents nor second derivatives; the kernels round both to float16 wherever they
are stored. Each rounding is off by up to 2^-11 = 5e-4 of the number, 2.8e-4 in the root mean square, so a result that
has passed three of them is 5e-4 off in norm, and one that is a difference of such sums a few times more. Measured are
3e-4 to 8e-4 for 45 samples (`SECOND`). Anything that is really wrong is off by 1 / 45 or more. In a single sample a sum
may cancel, and its error be larger than itself suggests (`FEW`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from encoding_draws import encodings, inputs_off_kinks
from golden_case import relative_error
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from second_order_emulation import SecondOrderModel
from test_fused_emulator import BarrierMutation
from test_fused_encodings import CONCATENATIONS, REDUCTIONS, composite
from test_fused_kernels import HOPPER, TOLERANCES, data, make_params, make_spec

from numba_tcnn.config import parse_model
from numba_tcnn.fused.activations import ACTIVATIONS
from numba_tcnn.fused.emulated_memory import RaceError
from numba_tcnn.fused.second_order_plan import SHAPES, SecondOrderPlan, second_order_plans
from numba_tcnn.fused.target import NjitTarget
from numba_tcnn.layout import parameter_blocks
from numba_tcnn.reference import Model
from numba_tcnn.reference.activations import ACTIVATIONS as REFERENCE_ACTIVATIONS
from numba_tcnn.reference.model import SecondOrderGradients
from numba_tcnn.specs import EncodingSpec, ModelSpec

pytestmark = pytest.mark.slow

SECOND = 1.5e-3
FEW = 5e-3
OTHERS = {"bfloat16": 8 * SECOND, "float32": 1e-5}
"""In other number formats: bfloat16 rounds 8 times as coarsely, float32 is compared with exact arithmetic."""
GRID = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 4}


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, name: str) -> None:
    assert np.isfinite(actual).all(), f"{name} is not finite"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{name} differs by {error:.1e}"


def check_results(
    spec: ModelSpec, actual: SecondOrderGradients, expected: SecondOrderGradients, tolerance: float
) -> None:
    assert_close(actual.dL_doutput, expected.dL_doutput, tolerance, "dS/d(dL/dy)")
    assert_close(actual.input, expected.input, tolerance, "dS/dx")
    for block in parameter_blocks(spec):
        part = slice(block.offset, block.offset + block.size)
        assert_close(actual.params[part], expected.params[part], tolerance, f"dS/d({block.name})")


def check(
    spec: ModelSpec,
    *,
    batch: int = 45,
    plan: SecondOrderPlan | None = None,
    scale: float = 1.0,
    magnitudes: tuple[float, float] = (1.0, 1.0),
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32"),
    x: np.ndarray | None = None,
    params: np.ndarray | None = None,
    tolerance: float = SECOND,
    dtype: str = "float16",
    seed: int = 5,
    **options: Any,
) -> None:
    """magnitudes, of v and dL/dy; dtypes, of x, v and dL/dy; dtype, that the model computes in."""
    rng = np.random.default_rng(seed)
    params = make_params(spec, rng, scale) if params is None else params
    x = data(spec, batch, rng, dtypes[0])[0] if x is None else x
    v = (magnitudes[0] * rng.normal(size=x.shape)).astype(dtypes[1])
    dL_dy = (magnitudes[1] * rng.normal(size=(len(x), spec.n_output_dims))).astype(dtypes[2])
    model = SecondOrderModel(spec, params, dtype=dtype, **options)
    actual = model.second_order(x, v, dL_dy, plan or second_order_plans(spec, HOPPER, dtype)[0])
    expected = Model(spec, params, TOLERANCES[dtype].reference).backward_backward_input(x, v, dL_dy)
    assert model.bad[0] == 0 and not model.table_gradient.any()  # collecting leaves zeros for the next batch
    check_results(spec, actual, expected, tolerance)


# ------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_second_derivatives_of_activations(name: str) -> None:
    """Compiled for the CPU, from far outside to 0; both sides in float32, differences of numbers near 1 included."""
    fused, reference, target = ACTIVATIONS[name], REFERENCE_ACTIVATIONS[name], NjitTarget()
    value, first, second = (target.scalar(f) for f in (fused.value, fused.derivative, fused.second_derivative))
    for z in np.linspace(-8, 8, 161, dtype=np.float32):
        argument = value(z) if fused.derivative_of_output else z
        expected = reference.second_derivative(np.array([z], np.float64))[0]
        assert second(argument, first(argument)) == pytest.approx(expected, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_hidden_activations(name: str) -> None:
    check(make_spec(activation=name), scale=0.5 if name == "Exponential" else 1.0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_output_activations(name: str) -> None:
    check(make_spec(activation="Tanh", output_activation=name))


@pytest.mark.parametrize("batch", [1, 31, 257])
def test_ragged_batches(batch: int) -> None:
    check(make_spec(n_in=3, activation="Softplus"), batch=batch, tolerance=FEW if batch == 1 else SECOND)


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("activation", ["Softplus", "SiLU", "ReLU"])
def test_number_formats(activation: str, dtype: str) -> None:
    check(make_spec(n_in=3, activation=activation), batch=75, dtype=dtype, tolerance=OTHERS[dtype])


@pytest.mark.parametrize("dtype", OTHERS)
def test_number_formats_of_encodings_alone(dtype: str) -> None:
    n_in, encoding = CONCATENATIONS["gaps and overlaps"]
    check(parse_model(n_in, None, encoding, None, alignment=1), dtype=dtype, tolerance=OTHERS[dtype])


@pytest.mark.parametrize("shape", SHAPES)
def test_plans(shape: tuple[int, int]) -> None:
    spec = make_spec(activation="SiLU")
    plan = next(p for p in second_order_plans(spec, HOPPER) if (p.warps, p.rows) == shape)
    check(spec, plan=plan, batch=75)


@pytest.mark.parametrize(
    "network",
    [
        {"n_hidden_layers": 1, "n_neurons": 64},
        {"n_hidden_layers": 3, "n_neurons": 16},
        {"otype": "CutlassMLP", "n_hidden_layers": 2, "n_neurons": 20},
        {"otype": "CutlassMLP", "n_hidden_layers": 0},
        {"otype": "CutlassMLP", "hidden": [48, 24, 16]},
    ],
    ids=str,
)
def test_networks(network: dict) -> None:
    """Padded widths with an activation that is not 0 at 0 among them."""
    check(make_spec(3, 5, activation="Softplus", **network))


@pytest.mark.parametrize("magnitudes", [(1e-12, 1.0), (1e12, 1e-12), (1e6, 1e9), (1e-20, 1e-10)], ids=str)
def test_any_magnitude(magnitudes: tuple[float, float]) -> None:
    """Powers of two bring both into float16's range and are undone in float32."""
    check(make_spec(activation="Squareplus", output_activation="Sine"), magnitudes=magnitudes)


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize(
    "dtypes", [("float16", "float32", "float32"), ("float32", "float16", "float32"), ("float16", "float16", "float16")]
)
def test_dtypes_and_alignment(dtypes: tuple[str, str, str], misaligned: bool) -> None:
    check(make_spec(16, encoding={"otype": "Identity"}, activation="Sine"), dtypes=dtypes, misaligned=misaligned)


@pytest.mark.parametrize("cc", [75, 80])
def test_older_chips(cc: int) -> None:
    check(make_spec(activation="Softplus"), cc=cc)


# ------------------------------------------------------------------------------------------ encodings

ALONE = {
    "identity": (3, {"otype": "Identity", "scale": 2.5, "offset": -1.0}),
    "octaves": (2, {"otype": "Frequency", "n_frequencies": 10}),
    "one octave": (1, {"otype": "Frequency", "n_frequencies": 1}),
    "triangles": (3, {"otype": "TriangleWave", "n_frequencies": 5}),
    "16 bins": (2, {"otype": "OneBlob", "n_bins": 16}),
    "2 bins": (1, {"otype": "OneBlob", "n_bins": 2}),
    "harmonics": (3, {"otype": "SphericalHarmonics", "degree": 4}),
    "harmonics of degree 8": (3, {"otype": "SphericalHarmonics", "degree": 8}),
    "empty": (2, composite({"otype": "Empty", "n_dims_to_encode": 1}, {"otype": "Identity"})),
    "rng": (3, GRID | {"hash": "Rng", "interpolation": "Smoothstep"}),
}


def bare(n_in: int, encoding: dict) -> ModelSpec:
    return parse_model(n_in, None, encoding, None, alignment=1)


@pytest.mark.parametrize("name", ALONE)
def test_encodings_alone(name: str) -> None:
    check(bare(*ALONE[name]))


@pytest.mark.parametrize("interpolation", ["Linear", "Smoothstep", "Nearest"])
@pytest.mark.parametrize(("n_dims", "n_features"), [(1, 2), (2, 1), (3, 2), (4, 4), (5, 8)])
def test_grids_alone(n_dims: int, n_features: int, interpolation: str) -> None:
    check(bare(n_dims, GRID | {"n_features_per_level": n_features, "interpolation": interpolation}))


@pytest.mark.parametrize("name", CONCATENATIONS)
def test_children_side_by_side(name: str) -> None:
    check(bare(*CONCATENATIONS[name]))


@pytest.mark.parametrize("reduction", ["Sum", "Product"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_children_combined(name: str, reduction: str) -> None:
    n_in, nested = REDUCTIONS[name]
    check(bare(n_in, composite(*nested, reduction=reduction)))


NETWORKS_OF = {
    "smooth grid": (3, GRID | {"interpolation": "Smoothstep"}),
    "nearest": (2, GRID | {"interpolation": "Nearest"}),
    "octaves": (2, {"otype": "Frequency", "n_frequencies": 6}),
    "bins": (2, {"otype": "OneBlob", "n_bins": 16}),
    "harmonics": (3, {"otype": "SphericalHarmonics", "degree": 3}),
    "gaps and overlaps": CONCATENATIONS["gaps and overlaps"],
    "product": (3, composite(*REDUCTIONS["grid, waves and blob"][1], reduction="Product")),
}


@pytest.mark.parametrize("name", NETWORKS_OF)
def test_networks_of_encodings(name: str) -> None:
    n_in, encoding = NETWORKS_OF[name]
    check(make_spec(n_in, encoding=encoding, activation="Softplus", n_hidden_layers=1, n_neurons=16), tolerance=FEW)


def test_steep_octaves_do_not_overflow() -> None:
    """Octave 39 moves by 2^39 pi v: the factor of v is that of the largest tangent, not of v."""
    spec = make_spec(2, encoding={"otype": "Frequency", "n_frequencies": 40}, activation="Tanh")
    check(spec, tolerance=FEW)


def test_fine_trained_grids_do_not_overflow(rng: np.random.Generator) -> None:
    """Cells of 2^-19 with features of order 10 between them."""
    encoding = GRID | {"n_levels": 4, "log2_hashmap_size": 8, "per_level_scale": 64.0}
    spec = make_spec(3, encoding=encoding, activation="Softplus", n_hidden_layers=1)
    params = make_params(spec, rng)
    params[sum(b.size for b in parameter_blocks(spec) if b.name.startswith("layer")) :] *= 10
    check(spec, params=params, tolerance=FEW)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(encodings())
def test_any_encoding(encoding: EncodingSpec) -> None:
    spec = ModelSpec(encoding.n_input_dims, encoding.n_output_dims, encoding, None, encoding.n_output_dims)
    assume(encoding.n_output_dims <= 256)  # wider ones have no first derivatives either
    x = inputs_off_kinks(encoding, np.random.default_rng(0), 33).astype(np.float32)
    assume(len(x) > 0)
    check(spec, x=x, tolerance=FEW)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    encodings(), st.sampled_from(list(ACTIVATIONS)), st.sampled_from(list(ACTIVATIONS)),
    st.integers(0, 2), st.integers(1, 40), st.integers(1, 19),
)  # fmt: skip
def test_any_network(encoding: EncodingSpec, hidden: str, output: str, depth: int, width: int, n_out: int) -> None:
    """Weights so small that no activation saturates; ReLU and its like have kinks, of which few samples are near."""
    config = {"otype": "CutlassMLP", "activation": hidden, "output_activation": output}
    template = parse_model(2, n_out, {"otype": "Identity"}, config | {"n_hidden_layers": depth, "n_neurons": width})
    padded = -(-encoding.n_output_dims // 16) * 16
    assume(padded <= 128)
    spec = ModelSpec(encoding.n_input_dims, n_out, encoding, template.network, padded)
    x = inputs_off_kinks(encoding, np.random.default_rng(0), 33).astype(np.float32)
    assume(len(x) > 16)
    check(spec, x=x, scale=0.4, tolerance=2 * FEW)


# ------------------------------------------------------------------------------------------- barriers


@pytest.mark.slow
def test_every_barrier_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_every_barrier_of_the_real_kernels_matters`, on several tiles of one block. In a wide network each
    warp's part of dW is over the samples of several warps; in a narrow one it may be over its own."""
    mutation, seen, needed = BarrierMutation(monkeypatch), set(), set()
    for n_neurons in (16, 64):
        run = _several_tiles(n_neurons)
        mutation.dropped = set()
        expected = run()
        for place in [place for place in mutation.seen if place[1] in ("second_order", "features_backward")]:
            seen.add(place)
            mutation.dropped = {place}
            try:
                same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(run(), expected, strict=True))
            except RaceError:
                same = False
            if not same:
                needed.add(place)
    assert len(seen) == 5 and needed == seen


def _several_tiles(n_neurons: int) -> Callable[[], tuple[np.ndarray, ...]]:
    spec = make_spec(activation="Softplus", n_neurons=n_neurons)
    plan = next(p for p in second_order_plans(spec, HOPPER) if (p.warps, p.rows) == (4, 16))
    rng = np.random.default_rng(3)
    params, (x, _) = make_params(spec, rng), data(spec, 150, rng)
    v, dL_dy = rng.normal(size=x.shape).astype(np.float32), rng.normal(size=(150, 3)).astype(np.float32)

    def run() -> tuple[np.ndarray, ...]:
        return tuple(vars(SecondOrderModel(spec, params).second_order(x, v, dL_dy, plan, n_blocks=1)).values())

    return run
