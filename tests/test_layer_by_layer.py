"""Plans that go layer by layer: the engine itself on an emulated driver, against the float16 reference.

Networks of the whole space that a config can name, drawn by hypothesis, compared tensor by tensor as on a device
(`benchmarks/agreement`). Small ones are forced to go layer by layer, in chunks of one tile; device memory starts as
NaN.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_driver import EmulatedDriver, installed
from emulated_models import assert_same_training, batch, make, predict, reference_of, step
from hypothesis import HealthCheck, given, settings
from model_draws import draws
from test_fused_emulator import BarrierMutation

import numba_tcnn as tcnn
from benchmarks.agreement.comparison import Agreement, Comparison
from benchmarks.agreement.draws import Draw
from numba_tcnn.config import parse_model
from numba_tcnn.fused import jobs, layer_programs, plan
from numba_tcnn.fused.emulated_memory import RaceError
from numba_tcnn.fused.layer_plan import (
    LAYER_BY_LAYER,
    ChunkLayout,
    LayeredPlan,
    layered_gradient_plans,
    layered_inference_plans,
)
from numba_tcnn.fused.plan import PlanError, architecture
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.layout import bias_blocks, weight_blocks
from numba_tcnn.reference.model import Model
from numba_tcnn.specs import ModelSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_reference")]
HOPPER = architecture((9, 0))
GRID = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 3}


def no_plan(*arguments: Any, **options: Any) -> None:
    raise PlanError("not in this test")


@pytest.fixture
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for networks that fit one kernel, and with a chunk for each tile of samples."""
    monkeypatch.setattr(jobs, "gradient_plans", no_plan)
    monkeypatch.setattr(jobs, "inference_plans", no_plan)
    monkeypatch.setattr(layer_programs, "CHUNK_BYTES", 1)


class EmulatedImplementation:
    """A draw on the emulated driver, as `comparison.Implementation`."""

    def __init__(self, draw: Draw, params: np.ndarray):
        self.model = tcnn.create_from_config(
            draw.n_input_dims, draw.n_output_dims, draw.config, engine="fused", dtype=draw.dtype
        )
        self.model.params = self.params = params
        self.fresh_optimizer = self.model.optimizer.state_dict()

    def inference(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return self.model.network.inference(x, dtype=dtype)

    def backward(self, x: np.ndarray, dL_dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, context = self.model.network.forward(x)
        gradients = self.model.network.backward(context, dL_dy, parameters="overwrite", input=True)
        return gradients.params, gradients.input

    def training_step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        self.model.optimizer.load_state_dict(self.fresh_optimizer)
        loss = float(self.model.trainer.training_step(x, y))
        gradients = self.model.optimizer.state_dict()["first_moments"]
        assert self.model.trainer.skipped_steps == 0
        self.model.params = self.params
        return loss, gradients


def assert_padding_has_no_gradient(draw: Draw, gradients: np.ndarray) -> None:
    for block in (*weight_blocks(draw.spec), *bias_blocks(draw.spec)):
        stored = block.stored(gradients).copy()
        stored[tuple(slice(length) for length in block.logical_shape)] = 0
        assert not stored.any(), f"the padding of {block.name} has a gradient"


def check(draw: Draw, *batches: int, plans: str = LAYER_BY_LAYER) -> list[Agreement]:
    """`plans`: what the kernels' plans begin with."""
    x = draw.inputs(max(batches))
    params = draw.params(x)
    implementation, comparison = EmulatedImplementation(draw, params), Comparison(draw, params, x)
    found = [comparison.on(implementation, batch) for batch in batches]
    for agreement in found:
        assert agreement.holds, f"{draw!r}: {agreement}"
    assert_padding_has_no_gradient(draw, implementation.backward(x[:7], draw.output_gradients(7))[0])
    explained = {k.plan for k in implementation.model.explain().kernels if k.plan != "element-wise"}
    assert all(text.startswith(plans) for text in explained), explained
    return found


def draw_of(n_in: int, n_out: int, encoding: dict, loss: str = "L2", *, dtype: str = "float16", **network: Any) -> Draw:
    return Draw(n_in, n_out, encoding, {"otype": "CutlassMLP"} | network, loss, dtype=dtype)


# ------------------------------------------------------------------------------------ forced, and small


@pytest.mark.exhaustive
@pytest.mark.slow
@settings(deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))
@given(draw=draws())
def test_random_networks(gpu, layer_by_layer, draw: Draw) -> None:
    """Widths are cut to 96 and depths to 6, where the emulator takes a second."""
    network = dict(draw.network)
    if "hidden" in network:
        network["hidden"] = [min(width, 96) for width in network["hidden"]]
    else:
        network["n_neurons"] = min(network["n_neurons"], 64 if network["otype"] == "FullyFusedMLP" else 96)
        network["n_hidden_layers"] = min(network["n_hidden_layers"], 6)
    check(dataclasses.replace(draw, network=network, n_output_dims=min(draw.n_output_dims, 100)), 150)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["ReLU", "SiLU", "Exponential"])  # phi' from h, kept, and with phi(0) = 1
def test_activations(gpu, layer_by_layer, activation: str, bias: bool) -> None:
    """Three chunks of one tile, the last one ragged; padded widths; a tile of outputs that is not full."""
    check(draw_of(2, 3, GRID, hidden=[20, 40], activation=activation, bias=bias), 1, 257)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", ["Softplus", "SiLU"])
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16(gpu, layer_by_layer, activation: str, bias: bool) -> None:
    network = {"hidden": [20, 40], "activation": activation, "bias": bias}
    check(draw_of(2, 3, GRID, dtype="bfloat16", **network), 31, 257)


def test_float32_is_refused_by_name() -> None:
    """Matrices between kernels have one plane; a network that needs them runs in the reference."""
    spec = parse_model(16, 3, {"otype": "Identity"}, {"otype": "CutlassMLP", "n_neurons": 512, "n_hidden_layers": 2})
    job = jobs.InferenceJob(spec, InferenceOptions(), "float32")
    with pytest.raises(PlanError, match="512x512.* in float32; kernels that go layer by layer compute in float16 and"):
        job.plans(HOPPER)
    with pytest.raises(PlanError, match="bfloat16 kernels need compute capability 8.0"):
        dataclasses.replace(job, dtype="bfloat16").plans(architecture((7, 5)))
    assert isinstance(dataclasses.replace(job, dtype="bfloat16").plans(HOPPER)[0], LayeredPlan)


@pytest.mark.parametrize("n_out", [1, 17, 70])
def test_no_hidden_layer(gpu, layer_by_layer, n_out: int) -> None:
    check(draw_of(2, n_out, GRID, hidden=[], output_activation="Tanh", bias=True), 31)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cc", [(7, 5), (8, 6), (12, 0)])
def test_older_and_smaller_chips(monkeypatch, layer_by_layer, cc: tuple[int, int]) -> None:
    with installed(EmulatedDriver(cc), monkeypatch):
        check(draw_of(2, 3, GRID, hidden=[70, 20], activation="Tanh", bias=True), 150)


def test_encodings_without_parameters_need_no_features_gradient(gpu, layer_by_layer) -> None:
    draw = draw_of(5, 3, {"otype": "Identity"}, hidden=[20], activation="Tanh")
    check(draw, 45)
    x = draw.inputs(45)
    gpu.launches.clear()
    EmulatedImplementation(draw, draw.params(x)).training_step(x, np.zeros((45, 3), np.float32))
    names = [name for name, _, _ in gpu.launches]
    assert "layer_gradient" in names and not {"features_gradient", "encode_backward"} & set(names)


def test_gradients_that_are_not_finite_are_marked(gpu, layer_by_layer) -> None:
    """In the loss, and in dL/d(features) alone, which leaves float16's range although d does not."""
    draw = draw_of(2, 3, GRID, hidden=[20], activation="None")
    x = draw.inputs(200)
    model = EmulatedImplementation(draw, draw.params(x)).model
    targets = np.zeros((200, 3), np.float32)
    targets[199, 1] = np.inf
    model.trainer.training_step(x, targets)
    assert model.trainer.skipped_steps == 1
    params = model.params.copy()
    params[weight_blocks(draw.spec)[0].offset :][: 32 * 16] = 6e4
    model.params = params
    model.trainer.training_step(x, None, external_gradient=np.ones_like(targets))
    assert model.trainer.skipped_steps == 2 and np.isfinite(model.params).all()


def test_training(gpu, layer_by_layer) -> None:
    """Five steps with Adam of batches of all sizes, growing and shrinking, and inference behind them."""
    network = {"otype": "CutlassMLP", "hidden": [20, 40], "bias": True, "activation": "Tanh"}
    optimizer = {"otype": "Adam", "learning_rate": 1e-2, "l2_reg": 0.1, "non_matrix_learning_rate_factor": 2.0}
    config = {"encoding": GRID, "network": network, "loss": {"otype": "L2"}, "optimizer": optimizer}
    model = make(config)
    twin, start = reference_of(model, config), model.params
    for seed, size in enumerate((40, 300, 1, 129, 257)):
        x, y = batch(size, seed)
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert_same_training(model, twin, start)
    x, _ = batch(200)
    np.testing.assert_allclose(model.predict(x), predict(twin, x), atol=2e-3)  # of the parameters' distance


OPTIONS: dict[str, dict[str, Any]] = {
    "luminance": {"loss": {"otype": "RelativeL2Luminance"}},
    "constant": {"loss": {"otype": "ConstantGradient", "gradient": [1.0, -2.0, 0.5]}},
    "stochastic": {"encoding": GRID | {"stochastic_interpolation": True, "fixed_point_pos": True}},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("has_levels", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_options_of_grids(gpu, layer_by_layer, name: str, has_levels: bool, deterministic: bool) -> None:
    """Of samples in chunks, each with its own levels and row of the whole batch."""
    network = {"otype": "CutlassMLP", "hidden": [20], "bias": True, "activation": "Tanh"}
    adam = {"otype": "Adam", "learning_rate": 1e-2}
    config = {"encoding": GRID, "network": network, "loss": {"otype": "L2"}, "optimizer": adam} | OPTIONS[name]
    gpu.shuffle = np.random.default_rng(7)
    model = make(config, deterministic=deterministic)
    twin, start, rng = reference_of(model, config), model.params, np.random.default_rng(3)
    for seed, size in enumerate((300, 31, 1)):
        x, y = batch(size, seed)
        density = (0.5 + rng.random(y.shape)).astype(np.float32)
        if has_levels:
            model.network.max_level = levels = rng.random(size, np.float32)
            twin.set_max_level(levels)
        np.testing.assert_allclose(model.predict(x), predict(twin, x), atol=2e-3)
        loss, expected = model.trainer.training_step(x, y, data_pdf=density), step(twin, x, y, data_pdf=density)
        assert float(loss) == (0.0 if name == "constant" else pytest.approx(expected, rel=1e-4))
    assert_same_training(model, twin, start)
    assert all(k.plan.startswith((LAYER_BY_LAYER, "element-wise")) for k in model.explain().kernels)


def test_luminance_of_more_columns_than_a_block_has_is_refused() -> None:
    spec = parse_model(2, 200, {"otype": "Identity"}, {"otype": "CutlassMLP", "n_neurons": 256})
    job = jobs.GradientJob(spec, GradientOptions(loss="RelativeL2Luminance"))
    with pytest.raises(PlanError, match="the loss RelativeL2Luminance of 200 outputs, layer by layer"):
        job.plans(HOPPER)
    narrow = parse_model(2, 20, {"otype": "Identity"}, {"otype": "CutlassMLP", "n_neurons": 256})
    assert all(p.output.columns >= 32 for p in jobs.GradientJob(narrow, job.options).plans(HOPPER))
    assert jobs.GradientJob(spec, GradientOptions(loss="RelativeL2")).plans(HOPPER)


def test_inference_with_averaged_parameters(gpu, layer_by_layer) -> None:
    """Matrices, biases and tables are those that the optimizer keeps beside the trained ones."""
    network = {"otype": "CutlassMLP", "hidden": [20], "bias": True, "activation": "Tanh"}
    ema = {"otype": "EMA", "decay": 0.9, "nested": {"otype": "Adam", "learning_rate": 1e-1}}
    config = {"encoding": GRID, "network": network, "loss": {"otype": "L2"}, "optimizer": ema}
    model = make(config)
    twin = reference_of(model, config)
    x, y = batch(40)
    predict(twin, x), model.predict(x)
    for _ in range(3):
        model.trainer.training_step(x, y)
        step(twin, x, y)
    trained = Model(model.network.spec, model.params, "float16").forward(x)
    got, expected = model.predict(x), predict(twin, x)
    np.testing.assert_allclose(got, expected, atol=5e-3)
    assert np.abs(got - trained).max() > 0.05


def test_samples_are_divided_among_blocks(gpu, layer_by_layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four multiprocessors: four rows of partial sums, which later chunks are added to."""
    gpu.n_multiprocessors = 4
    monkeypatch.setattr(layer_programs, "CHUNK_BYTES", 1 << 17)
    check(draw_of(2, 3, GRID, hidden=[20, 20], activation="Tanh", bias=True), 600)
    assert max(blocks for name, blocks, _ in gpu.launches if name == "layer_gradient") == 4


# ---------------------------------------------------------------------------------- what fits no kernel


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("draw", [
    draw_of(2, 3, GRID, n_neurons=512, n_hidden_layers=1, activation="Tanh", bias=True),
    draw_of(3, 300, {"otype": "Identity"}, hidden=[300, 20], activation="Sigmoid"),
    draw_of(1, 3, {"otype": "OneBlob", "n_bins": 512}, hidden=[330], activation="Sine"),
    draw_of(2, 3, GRID, n_neurons=20, n_hidden_layers=32, activation="Softplus", bias=True),
], ids=["wide", "many outputs", "wide encoding", "deep"])  # fmt: skip
def test_what_fits_no_kernel(gpu, draw: Draw) -> None:
    check(draw, 45)


def test_fused_plans_come_first() -> None:
    """Layer by layer only where nothing else can be used."""
    for hidden, fits in (([64, 64], True), ([128] * 5, True), ([512] * 2, False), ([16] * 32, False)):
        spec = draw_of(2, 3, GRID, hidden=hidden).spec
        for job in (
            jobs.training_job(spec, "float32", False, "float32", loss="L2"),
            jobs.InferenceJob(spec, jobs.InferenceOptions()),
        ):
            layered = [isinstance(candidate, LayeredPlan) for candidate in job.plans(HOPPER)]
            assert layered == sorted(layered) and layered[0] != fits and layered[-1]


def configurations_of_the_benchmark() -> dict[str, ModelSpec]:
    specs = {}
    for entry in json.loads((Path(__file__).parents[1] / "benchmarks" / "configs.json").read_text()):
        encoding = entry["config"].get("encoding", {"otype": "Identity"})
        network = entry["config"]["network"]
        specs[entry["name"]] = parse_model(entry["n_input_dims"], entry["n_output_dims"], encoding, network)
    return specs


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 0)])
def test_configurations_of_the_benchmark_have_fused_plans(capability: tuple[int, int]) -> None:
    chip = architecture(capability)
    for spec in configurations_of_the_benchmark().values():
        training = jobs.training_job(spec, "float32", False, "float32", loss="L2")
        for job in (training, jobs.InferenceJob(spec, jobs.InferenceOptions())):
            assert not isinstance(job.plans(chip)[0], LayeredPlan)


CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("width", [16, 20, 64, 129, 512, 1024, 4096])
@pytest.mark.parametrize("bias", [False, True])
def test_plans_fit(capability: tuple[int, int], width: int, bias: bool) -> None:
    chip = architecture(capability)
    spec = draw_of(2, 3, GRID, n_neurons=width, n_hidden_layers=2, bias=bias).spec
    for candidate in (*layered_gradient_plans(spec, chip), *layered_inference_plans(spec, chip)):
        kernels = [k for k in dataclasses.asdict(candidate) if getattr(candidate, k) is not None]
        for kernel in (getattr(candidate, name) for name in kernels):
            assert 0 < kernel.shared_bytes <= chip.shared_per_block and kernel.threads <= 1024
        assert candidate.tile_rows % candidate.encode.tile_rows == 0
        for product in (candidate.forward, candidate.output, candidate.backward, candidate.features):
            if product is not None:
                assert product.tile_rows == candidate.tile_rows
                assert product.operand.end <= product.weights.offset and product.weights.end <= product.piece_bytes


@pytest.mark.parametrize("activation", ["ReLU", "SiLU"])
def test_matrices_of_a_chunk_stand_apart(activation: str) -> None:
    """But for phi' where it is taken from the outputs, and inference, where two places take turns."""
    spec = draw_of(2, 3, GRID, hidden=[20, 300, 64], activation=activation).spec
    layout = ChunkLayout.of_training(spec)
    widths = [16, 32, 304, 64]
    parts = list(zip(layout.inputs, widths, strict=True))
    parts += [(place, 304) for place in layout.gradients] + [(layout.features, 16)]
    if activation == "SiLU":
        parts += zip(layout.gates, widths[1:], strict=True)
    else:
        assert layout.gates == layout.inputs[1:]
    parts.sort()
    ends = [start + 2 * width for start, width in parts]
    assert [start for start, _ in parts] == [0, *ends[:-1]] and ends[-1] == layout.total
    inference = ChunkLayout.of_inference(spec)
    assert inference.inputs == (0, 608, 0, 608) and inference.total == 1216


def test_an_encoding_that_fits_nowhere_is_refused_with_its_width() -> None:
    spec = draw_of(20000, 3, {"otype": "Identity"}, hidden=[16]).spec
    with pytest.raises(PlanError, match="16 rows of an encoding of width 20000 are more than 227 KiB"):
        jobs.InferenceJob(spec, jobs.InferenceOptions()).plans(HOPPER)
    assert plan.MAX_NESTED_LAYERS < 43


BARRIERS_OF = {"product", "store", "backward", "encode_rows", "encode_backward_rows", "layer_gradient"}
"""Functions of layer_kernels.py and layer_gradients.py that have one."""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_barrier_matters(gpu, layer_by_layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out one at a time: a race is found, or something else computed. 150 samples are two pieces of the weight
    gradient's and more; 80 columns two pieces of a product."""
    draw = draw_of(2, 3, GRID, hidden=[80, 80], activation="SiLU")
    x = draw.inputs(150)
    params, dL_dy = draw.params(x), draw.output_gradients(150)
    mutation = BarrierMutation(monkeypatch)

    def run() -> tuple[np.ndarray, ...]:
        gpu.launches.clear()
        implementation = EmulatedImplementation(draw, params)
        return implementation.inference(x, "float32"), *implementation.backward(x, dL_dy)

    expected = run()
    places = [place for place in mutation.seen if place[1] in BARRIERS_OF]
    assert {place[1] for place in places} == BARRIERS_OF
    for place in places:
        mutation.dropped = {place}
        try:
            noticed = not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(run(), expected, strict=True))
        except RaceError:
            gpu._queues.clear()  # before the arrays go that the rest of the work would write to
            noticed = True
        assert noticed, f"kernels do as well without {place}"
