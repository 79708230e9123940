"""The model inside a user's kernel, in the emulator: every kind of model against the reference of the same precision.

Its arithmetic is that of the inference kernel, so the tolerances are those of test_fused_kernels.py. Shared memory
starts as NaN, and the emulator raises where lanes could overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated_driver import FIRST_CONTEXT, EmulatedDriver, installed
from emulation import emulator_target
from test_fused_emulator import BarrierMutation
from test_fused_kernels import assert_outputs_agree, make_params, make_spec

import numba_tcnn as tcnn
from numba_tcnn.config import parse_model
from numba_tcnn.fused import emulator
from numba_tcnn.fused.embedding import EmbeddedPlan, make_evaluate
from numba_tcnn.fused.emulated_memory import SHARED_START, GlobalMemory, RaceError
from numba_tcnn.fused.row_products import ColumnOrder
from numba_tcnn.layout import n_network_params
from numba_tcnn.reference import Model
from numba_tcnn.specs import ModelSpec

GRID = {"otype": "HashGrid", "n_levels": 5, "log2_hashmap_size": 7, "base_resolution": 4}
COMPOSITE = {
    "otype": "Composite",
    "nested": [
        {"otype": "HashGrid", "n_dims_to_encode": 3, "n_levels": 3, "n_features_per_level": 1, "log2_hashmap_size": 6},
        {"otype": "SphericalHarmonics", "degree": 3, "n_dims_to_encode": 3},
        {"otype": "Identity"},
    ],
}
PRODUCT = {
    "otype": "Composite",
    "reduction": "Product",
    "nested": [{"otype": "TriangleWave", "n_frequencies": 8, "n_dims_to_encode": 1}, {"otype": "OneBlob", "n_bins": 8}],
}


class Evaluation:
    """A model's device function, called by all lanes of some warps of a block in the emulator."""

    def __init__(self, spec: ModelSpec, memory: GlobalMemory, parameters: int, *, block_size: int = 64, cc: int = 90):
        self.spec, self.memory, self.parameters, self.target = spec, memory, parameters, emulator_target(cc)
        self.plan = EmbeddedPlan(spec, block_size)
        self.evaluate = make_evaluate(self.target, self.plan)

    def __call__(self, *batches: np.ndarray) -> list[np.ndarray]:
        """The outputs of batches of one size, whole warps, by one block: a loop in the user's kernel."""
        n_threads = len(batches[0])
        self.target.block = emulator.Block(self.memory, n_threads, self.plan.shared_bytes, shared_start=SHARED_START)
        self.memory.begin_launch()
        outputs = []
        with np.errstate(all="ignore"):
            for x in batches:
                lanes = tuple(np.ascontiguousarray(x[:, d]) for d in range(self.spec.n_input_dims))
                y = self.evaluate(lanes, np.uint64(self.parameters))
                outputs.append(np.stack([np.broadcast_to(value, (n_threads,)) for value in y], axis=1))
        return outputs


def params_of(spec: ModelSpec, rng: np.random.Generator) -> np.ndarray:
    """Everything of order 1, as in other tests; biases too, and what stands beside them."""
    if spec.network is None or not spec.network.bias:
        return make_params(spec, rng)
    without = replace(spec, network=replace(spec.network, bias=False))
    params, n_matrices = make_params(without, rng), n_network_params(without)
    biases = rng.normal(0, 0.5, n_network_params(spec) - n_matrices).astype(np.float32)
    return np.concatenate([params[:n_matrices], biases, params[n_matrices:]])


def check(spec: ModelSpec, *, n_warps: int = 2, seed: int = 5, **how: Any) -> None:
    rng = np.random.default_rng(seed)
    params, memory = params_of(spec, rng), GlobalMemory()
    half = np.zeros(max(len(params), 8), np.float16)
    half[: len(params)] = params
    evaluation = Evaluation(spec, memory, memory.place(half), **how)
    batches = rng.random((3, 32 * n_warps, spec.n_input_dims)).astype(np.float32)
    batches[2] = 3 * batches[2] - 1
    reference = Model(spec, params, "float16")
    for x, y in zip(batches, evaluation(*batches), strict=True):
        assert y.dtype == np.float32
        assert_outputs_agree(y, reference.forward(x))


CUTLASS = {"otype": "CutlassMLP"}
MODELS: dict[str, Callable[[], ModelSpec]] = {
    "grid": lambda: make_spec(encoding=GRID),
    "grid of wide entries": lambda: make_spec(3, encoding=GRID | {"n_features_per_level": 8}, n_neurons=16),
    "five dimensions": lambda: make_spec(5, encoding=GRID | {"n_levels": 2, "hash": "BaseConvert"}, n_neurons=16),
    "dense and nearest": lambda: make_spec(encoding=GRID | {"otype": "DenseGrid", "interpolation": "Nearest"}),
    "other positions": lambda: make_spec(encoding=GRID | {"fixed_point_pos": True, "stochastic_interpolation": True}),
    "frequency": lambda: make_spec(3, 1, {"otype": "Frequency", "n_frequencies": 5}, n_neurons=64),
    "triangle waves": lambda: make_spec(1, 2, {"otype": "TriangleWave", "n_frequencies": 7}),
    "oneblob": lambda: make_spec(2, 4, {"otype": "OneBlob", "n_bins": 16}, n_neurons=16),
    "composite": lambda: make_spec(7, encoding=COMPOSITE),
    "product": lambda: make_spec(2, encoding=PRODUCT),
    "128 wide": lambda: make_spec(2, 3, n_neurons=128),
    "64 outputs": lambda: make_spec(3, 64, n_neurons=64),
    "64 outputs, 128 wide": lambda: make_spec(3, 57, n_neurons=128, n_hidden_layers=1),
    "17 outputs": lambda: make_spec(2, 17, n_neurons=16, output_activation="Exponential"),
    "odd widths": lambda: make_spec(2, 5, **CUTLASS, hidden=[40, 25, 100], activation="Softplus"),
    "biases": lambda: make_spec(2, 5, GRID, **CUTLASS, hidden=[40, 64, 112], bias=True, activation="Tanh"),
    "wide inputs": lambda: make_spec(90, 1, {"otype": "Identity", "scale": 2.0}, n_neurons=32),
    "no hidden layer but one": lambda: make_spec(4, 4, {"otype": "Identity"}, n_neurons=16, n_hidden_layers=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_agree_with_the_reference(name: str) -> None:
    check(MODELS[name]())


ACTIVATIONS = ["None", "LeakyReLU", "SiLU", "Exponential", "Sine", "Sigmoid", "Squareplus", "Softplus", "Tanh"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_padded_layers(activation: str) -> None:
    """phi(0) of the padding isn't 0 for most, and must not reach the next layer."""
    check(make_spec(2, 3, **CUTLASS, hidden=[24, 20], activation=activation, output_activation=activation), n_warps=1)


@pytest.mark.parametrize("encoding", [GRID, COMPOSITE, {"otype": "Identity"}], ids=lambda e: e["otype"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_bare_encodings(encoding: dict, alignment: int) -> None:
    check(parse_model(7 if encoding is COMPOSITE else 3, None, encoding, None, alignment=alignment))


@pytest.mark.parametrize("cc", [75, 80, 120])
def test_other_architectures(cc: int) -> None:
    check(make_spec(encoding=GRID), cc=cc)


def test_every_warp_of_a_block_has_its_own_scratch() -> None:
    check(make_spec(encoding=GRID, n_neurons=16), n_warps=8, block_size=256)


def test_padding_of_the_parameters_counts_for_nothing(rng) -> None:
    """Rows and columns past a layer's own width may hold anything."""
    spec = make_spec(2, 3, **CUTLASS, hidden=[20, 20])
    params = make_params(spec, rng)
    assert abs(params[: 16 * 32].reshape(32, 16)[20:]).min() > 0  # drawn like all others
    check(spec, n_warps=1)


def test_barriers_that_order_the_lanes_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any of them a race is found, but for two that are there for the GPU and its compiler: the one that
    brings the lanes together, and the one between the halves of a wide network's samples."""
    mutation, spec, noticed = BarrierMutation(monkeypatch), MODELS["64 outputs, 128 wide"](), []
    check(spec, n_warps=1)
    places = list(mutation.seen)
    for place in places:
        mutation.dropped = {place}
        try:
            check(spec, n_warps=1)
        except RaceError:
            noticed.append(place)
    assert {name for _, name, _ in noticed} == {"evaluate", "rows_to_lanes"}
    assert sorted(name for _, name, _ in set(places) - set(noticed)) == ["evaluate", "network"]


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 128])
@pytest.mark.parametrize("group", [16, 32])
def test_an_order_meets_every_column_once(columns: int, group: int) -> None:
    order = ColumnOrder(columns, group)
    met = [
        first + step * t + e
        for b in range(columns // 16)
        for h in range(2)
        for first, step in [order.place(b, h)]
        for t in range(4)
        for e in range(2)
    ]
    assert sorted(met) == list(range(columns))
    runs = [first + step * t + i for first, step in order.runs for t in range(4) for i in range(step)]
    assert sorted(runs) == list(range(columns))


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("block_size", [0, 31, 100, 1056, -32, True, 256.0, "256", None])
def test_block_sizes_that_can_not_be(block_size: Any) -> None:
    with pytest.raises(ValueError, match=r"block_size: .* multiple of 32 from 32 to 1024"):
        EmbeddedPlan(make_spec(), block_size)


def test_a_block_whose_scratch_does_not_fit_names_one_that_does() -> None:
    spec = make_spec(128, 3, {"otype": "Identity"})
    with pytest.raises(ValueError, match=r"256 threads .* 69,632 bytes .* 49,152; take a block_size of at most 160"):
        EmbeddedPlan(spec, 256)
    assert EmbeddedPlan(spec, 160).shared_bytes <= 49152
    with pytest.raises(ValueError, match="too wide for a device function"):
        EmbeddedPlan(parse_model(1, None, {"otype": "OneBlob", "n_bins": 1024}, None), 32)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (CUTLASS | {"n_neurons": 144, "n_hidden_layers": 1}, "up to a width of 128; this model is 144 wide"),
        (CUTLASS | {"hidden": [64, 256, 32]}, "this model is 256 wide"),
    ],
)
def test_models_without_a_device_function(network: dict, message: str) -> None:
    with pytest.raises(tcnn.EngineUnavailable, match=message):
        EmbeddedPlan(make_spec(**network), 256)


CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": GRID,
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
}


def test_the_reference_engine_has_nothing_to_call() -> None:
    model = tcnn.create_from_config(2, 3, CONFIG, engine="reference")
    for call in (model.device_function, lambda: model.device_params, model.network.device_function):
        with pytest.raises(tcnn.EngineUnavailable, match=r"needs the fused engine.*engine='reference' was asked for"):
            call()


# ------------------------------------------------------------------------- parameters, on an emulated driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba.cuda.args")
    with installed(EmulatedDriver(), monkeypatch) as emulated:
        yield emulated


def launch(params: Any, stream: int = 0) -> int:
    """What numba-cuda does with the argument at a launch."""
    behind: list[Callable] = []
    address = params.to_device(behind, stream).ptr
    for call in behind:
        call()
    return address


def test_parameters_are_those_of_now(driver: EmulatedDriver, rng) -> None:
    """The same argument, after steps, after a new vector of parameters, and after the engine was changed and back."""
    model = tcnn.create_from_config(2, 3, CONFIG, strict=True)
    params, x = model.device_params, rng.random((64, 2)).astype(np.float32)

    def assert_current() -> None:
        evaluation = Evaluation(model.network.spec, driver.memory, launch(params))
        driver.run_everything()
        np.testing.assert_allclose(evaluation(x)[0], model.network.inference(x), atol=1e-3)

    assert_current()
    before = model.network.inference(x)
    for _ in range(3):
        model.trainer.training_step(x, np.ones((64, 3), np.float32))
    assert_current()
    assert np.abs(model.network.inference(x) - before).max() > 0.01
    model.params = rng.normal(0, 0.3, model.n_params).astype(np.float32)
    assert_current()
    model.jit_fusion = False
    with pytest.raises(tcnn.EngineUnavailable, match="jit_fusion was set to False"):
        launch(params)
    model.jit_fusion = True
    assert_current()


def test_kernels_and_steps_on_other_streams_wait_for_each_other(driver: EmulatedDriver, rng) -> None:
    model = tcnn.create_from_config(2, 3, CONFIG, strict=True)
    x, y = rng.random((32, 2)).astype(np.float32), np.ones((32, 3), np.float32)
    model.trainer.training_step(x, y, stream=1)
    behind: list[Callable] = []
    address, done = model.device_params.to_device(behind, 2).ptr, []
    before = driver.memory.bytes_at(address, 64).copy()
    driver._queue(2, lambda: done.append(driver.memory.bytes_at(address, 64).copy()))  # the user's kernel
    for call in behind:
        call()
    model.trainer.training_step(x, y, stream=1)
    driver._run(1)
    assert done, "the second step ran before the kernel"
    assert not np.array_equal(done[0], before), "the kernel ran before the first step"
    assert not np.array_equal(driver.memory.bytes_at(address, 64), done[0])


def test_levels_that_are_off_are_refused(driver: EmulatedDriver) -> None:
    model = tcnn.create_from_config(2, 3, CONFIG, strict=True)
    params = model.device_params
    model.network.max_level = 0.5
    for call in (model.device_function, lambda: model.device_params, lambda: launch(params)):
        with pytest.raises(tcnn.EngineUnavailable, match="uses all levels of its grids; set max_level to None"):
            call()
    model.network.max_level = 1.0
    assert launch(params) and model.device_function()


def test_a_kernel_on_another_device(driver: EmulatedDriver) -> None:
    params = tcnn.create_from_config(2, 3, CONFIG, strict=True).device_params
    driver.cuCtxSetCurrent(FIRST_CONTEXT + 1)
    with pytest.raises(ValueError, match="a kernel on CUDA device 1 was given the parameters of a model on device 0"):
        launch(params)


def test_launches_with_other_blocks(driver: EmulatedDriver) -> None:
    from numba_tcnn.fused.device_function import check_block, params_type

    config = CONFIG | {"network": CONFIG["network"] | {"n_hidden_layers": 3}}  # no other test's
    model = tcnn.create_from_config(2, 3, config, strict=True)
    kind = params_type(model.network.spec)
    check_block(kind, (1024, 1, 1))  # no device function yet
    function = model.device_function(block_size=128)
    assert function is model.device_function(128) and function is not model.device_function(64)
    for block in ((128, 1, 1), (16, 8, 1), (32, 1, 1), (4, 4, 4)):
        check_block(kind, block)
    for block in ((256, 1, 1), (16, 16, 1), (160, 1, 1)):
        with pytest.raises(ValueError, match=r"made for 128: .*block_size="):
            check_block(kind, block)
    with pytest.raises(ValueError, match="needs whole warps"):
        check_block(kind, (100, 1, 1))


def test_models_of_one_configuration_share_a_function(driver: EmulatedDriver) -> None:
    one, other = (tcnn.create_from_config(2, 3, CONFIG, strict=True, seed=seed) for seed in (1, 2))
    assert one.device_function() is other.device_function()
    assert launch(one.device_params) != launch(other.device_params)
