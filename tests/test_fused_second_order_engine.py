"""`backward_backward_input` of fused models: on the emulated driver (emulated_models.py), and what can't be had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated_driver import EmulatedDriver
from second_order_emulation import SecondOrderModel
from test_fused_encodings import composite
from test_fused_kernels import TOLERANCES
from test_fused_plan import assert_disjoint
from test_fused_second_order import FEW, OTHERS, SECOND, assert_close

import numba_tcnn as tcnn
from numba_tcnn.arrays import view
from numba_tcnn.config import parse_model
from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused import second_order_programs, to_device
from numba_tcnn.fused.plan import RESERVED_SHARED_BYTES, PlanError, architecture
from numba_tcnn.fused.second_order_kernels import make_write_second_order_scales_kernel
from numba_tcnn.fused.second_order_plan import second_order_plans
from numba_tcnn.reference import Model

GRID = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 3}
CONFIG = {
    "encoding": GRID,
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 2, "activation": "Softplus"},
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
}
NAMES = ("dL_doutput", "params", "input")


def make(config: dict = CONFIG, n_in: int = 3, n_out: int = 2, **options: Any) -> tcnn.Model:
    """With features and weights of order 1."""
    model = tcnn.create_from_config(n_in, n_out, config, engine="fused", **options)
    model.params = np.random.default_rng(0).normal(0, 0.3, model.n_params).astype(np.float32)
    return model


def batch(size: int, n_in: int = 3, n_out: int = 2, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, v, dL/dy."""
    rng = np.random.default_rng(seed)
    x = rng.random((size, n_in), np.float32)
    return x, rng.normal(size=x.shape).astype(np.float32), rng.normal(size=(size, n_out)).astype(np.float32)


def assert_as_reference(model: tcnn.Model, second, x, v, dL_dy, tolerance: float = SECOND) -> None:
    reference = TOLERANCES[model.network.dtype].reference
    expected = Model(model.network.spec, model.params, reference).backward_backward_input(x, v, dL_dy)
    for name in NAMES:
        assert_close(np.asarray(getattr(second, name)), getattr(expected, name), tolerance, name)


def test_batches_of_any_size(gpu: EmulatedDriver, no_reference: None) -> None:
    """One after the other, so that nothing is left over from one in another."""
    model = make()
    for size in (257, 1, 31):
        x, v, dL_dy = batch(size, seed=size)
        second = model.network.backward_backward_input(model.network.forward(x)[1], v, dL_dy)
        assert_as_reference(model, second, x, v, dL_dy, FEW if size == 1 else SECOND)
    assert "second_order: second order, " in str(model.explain())


@pytest.mark.parametrize("dtype", OTHERS)
def test_other_number_formats(gpu: EmulatedDriver, no_reference: None, dtype: str) -> None:
    """Tables and weights in the format, or the float32 master; the table's gradient is left clear for training."""
    model, (x, v, dL_dy) = make(dtype=dtype), batch(77)
    for _ in range(2):
        second = model.network.backward_backward_input(model.network.forward(x)[1], v, dL_dy)
        assert_as_reference(model, second, x, v, dL_dy, OTHERS[dtype])
        model.trainer.training_step(x, dL_dy)
    assert f"samples, {dtype}" in str(model.explain())


def test_between_training_steps(gpu: EmulatedDriver, no_reference: None) -> None:
    """Its table gradient is not added to that of the next step, and it uses the parameters of now."""
    model, twin = make(), make()
    x, v, dL_dy = batch(40)
    y = np.ones((40, 2), np.float32)
    for _ in range(2):
        second = model.network.backward_backward_input(model.network.forward(x)[1], v, dL_dy)
        assert_as_reference(model, second, x, v, dL_dy)
        for trained in (model, twin):
            trained.trainer.training_step(x, y)
    np.testing.assert_array_equal(model.params, twin.params)


def test_every_element_is_written(gpu: EmulatedDriver, no_reference: None) -> None:
    """Device arrays that hold NaN before."""
    model = make()
    arrays = batch(33)
    x, v, dL_dy = (view(to_device(a)) for a in arrays)
    shapes = {"dL_doutput": (33, 2), "params": (model.n_params,), "input": (33, 3)}
    results = {name: to_device(np.full(shape, np.nan, np.float32)) for name, shape in shapes.items()}
    model.network.engine.backward_backward_input(x, v, dL_dy, **{name: view(a) for name, a in results.items()})
    reference = TOLERANCES[model.network.dtype].reference
    expected = Model(model.network.spec, model.params, reference).backward_backward_input(*arrays)
    for name, result in results.items():
        assert_close(result.numpy(), getattr(expected, name), SECOND, name)


@pytest.mark.parametrize("encoding", [GRID, {"otype": "SphericalHarmonics", "degree": 3}], ids=lambda e: e["otype"])
def test_encodings_alone(encoding: dict, gpu: EmulatedDriver, no_reference: None) -> None:
    module = tcnn.Encoding(3, encoding, engine="fused")
    module.params = np.random.default_rng(0).normal(size=module.n_params).astype(np.float32)
    x, v, dL_dy = batch(31, n_out=module.n_output_dims)
    second = module.backward_backward_input(module.forward(x)[1], v, dL_dy)
    expected = Model(module.spec, module.params, "float16").backward_backward_input(x, v, dL_dy)
    for name in NAMES:
        assert_close(getattr(second, name), getattr(expected, name), SECOND, name)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "encoding",
    [
        GRID,
        GRID | {"interpolation": "Smoothstep"},
        GRID | {"interpolation": "Nearest"},
        composite(GRID | {"n_dims_to_encode": 2}, GRID),
    ],
    ids=["linear", "smoothstep", "nearest", "composite"],
)
@pytest.mark.parametrize("has_network", [False, True])
def test_levels_in_use(
    encoding: dict, has_network: bool, deterministic: bool, gpu: EmulatedDriver, no_reference: None
) -> None:
    """One fraction, one for each sample, and all levels again."""
    options = {"engine": "fused", "deterministic": deterministic}
    if has_network:
        network = tcnn.create_from_config(3, 2, CONFIG | {"encoding": encoding}, **options).network
    else:
        network = tcnn.Encoding(3, encoding, **options)
    network.params = np.random.default_rng(0).normal(0, 0.3, network.n_params).astype(np.float32)
    x, v, dL_dy = batch(90, n_out=network.n_output_dims)
    reference = Model(network.spec, network.params, "float16")
    for fractions in (0.4, np.random.default_rng(1).random(90, np.float32), None):
        network.max_level = 1.0 if fractions is None else fractions
        reference.max_level = fractions
        second = network.backward_backward_input(network.forward(x)[1], v, dL_dy)
        expected = reference.backward_backward_input(x, v, dL_dy)
        for name in NAMES:
            assert_close(np.asarray(getattr(second, name)), getattr(expected, name), SECOND, name)
    assert any("fixed_point=True" in text for text in gpu.compiler.descriptions) == deterministic


def test_sums_in_fixed_point_are_the_same_in_every_run(gpu: EmulatedDriver, no_reference: None) -> None:
    config = CONFIG | {"encoding": GRID | {"log2_hashmap_size": 3}}
    x, v, dL_dy = batch(700)
    found = []
    for seed in (1, 2):
        gpu.shuffle = np.random.default_rng(seed)
        model = make(config, deterministic=True)
        second = model.network.backward_backward_input(model.network.forward(x)[1], v, dL_dy)
        assert_as_reference(model, second, x, v, dL_dy)
        found.append(second.params.copy())
    np.testing.assert_array_equal(*found)


def test_gradients_that_vanish_everywhere(gpu: EmulatedDriver, no_reference: None) -> None:
    """Zeros have no largest element to be scaled by."""
    model = make()
    x, v, dL_dy = batch(31)
    for a, b in ((0 * v, dL_dy), (v, 0 * dL_dy)):
        second = model.network.backward_backward_input(model.network.forward(x)[1], a, b)
        assert not second.params.any() and not second.input.any()
        assert second.dL_doutput.any() == a.any()


# ------------------------------------------------------------------------------------- what can't be had

WIDE = CONFIG | {"network": CONFIG["network"] | {"n_neurons": 128, "n_hidden_layers": 4}}


def test_networks_that_do_not_fit_are_computed_by_the_reference(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model stays fused, says why, and does not look for a plan again."""
    searches = []
    find = second_order_programs.second_order_plans
    monkeypatch.setattr(second_order_programs, "second_order_plans", lambda *a: searches.append(a) or find(*a))
    model = tcnn.create_from_config(3, 2, WIDE)
    x, v, dL_dy = batch(5)
    for _ in range(2):
        second = model.network.backward_backward_input(model.network.forward(x)[1], v, dL_dy)
    assert_as_reference(model, second, x, v, dL_dy, 1e-6)
    assert model.explain().engine == "fused" and len(searches) == 1
    reason = "computed by the reference (no fused kernel of second derivatives in float16 fits layers of 128x"
    assert reason in str(model.explain())


def test_biases_and_options_of_grids_are_refused() -> None:
    """Before anything is compiled."""
    chip = architecture((9, 0))
    with pytest.raises(EngineUnavailable, match="biases"):
        network = {"otype": "CutlassMLP", "bias": True}
        second_order_plans(parse_model(3, 1, {"otype": "Identity"}, network), chip)
    for option in ("stochastic_interpolation", "fixed_point_pos"):
        spec = parse_model(3, None, composite(GRID | {option: True}), None)
        with pytest.raises(EngineUnavailable, match=option):
            second_order_plans(spec, chip)


# ------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("n_hidden_layers", [2, 3])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (12, 0)])
def test_a_width_of_64_fits_one_kernel(capability: tuple[int, int], n_hidden_layers: int) -> None:
    """Of three hidden layers where a block has more than 100 KiB."""
    chip = architecture(capability)
    network = {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": n_hidden_layers}
    spec = parse_model(3, 1, GRID | {"n_levels": 16}, network)
    if n_hidden_layers == 3 and chip.shared_per_block < 100 * 1024:
        with pytest.raises(PlanError, match="layers of 64x32, 64x64, 64x64, 16x64"):
            second_order_plans(spec, chip)
        return
    for plan in second_order_plans(spec, chip):
        assert plan.shared_bytes + RESERVED_SHARED_BYTES <= chip.shared_per_multiprocessor
        assert_disjoint([tile for tile in plan.tiles if tile not in (plan.dx, plan.dx_twin)])
        for place, tile in ((plan.dx, plan.x), (plan.dx_twin, plan.x_twin)):  # dW has read the features by then
            assert (place.offset, place.end) == (tile.offset, tile.end)
        values, tangents = plan.tangent_products
        for layer, first, second in zip(plan.layers, values, tangents, strict=True):
            assert (first.h, second.d) == (layer.h, layer.d) and layer.d != first.d and layer.h != second.h
            assert first.d in plan.d_twins and second.h in (plan.x_twin, *plan.h_twins)


# ------------------------------------------------------------------------------------------------ scales


@pytest.mark.parametrize("tangent", [3.7, 1e-30, 2.0**126, 3e38, 0.0, np.inf, np.nan])
@pytest.mark.parametrize("gradient", [0.02, 2.0**-126, 3e38, 0.0, np.inf])
def test_scales_are_powers_of_two_that_are_undone(gradient: float, tangent: float) -> None:
    model = SecondOrderModel(parse_model(2, None, {"otype": "Identity"}, None), np.zeros(0, np.float32))
    maxima, scales = np.array([gradient, tangent], np.float32).view(np.uint32), np.full(4, np.nan, np.float32)
    model.run(make_write_second_order_scales_kernel, None, 1, maxima=model.place(maxima), scales=model.place(scales))
    up, result, directions, down = scales.astype(np.float64)
    assert (np.frexp(scales)[0] == 0.5).all()  # powers of two
    assert directions * down == 1.0
    if 2.0**-120 < up * directions < 2.0**120:
        assert up * directions * result == 1.0
    for largest, factor, low in ((gradient, up, 8.0), (tangent, directions, 0.5)):
        if not np.isfinite(largest) or largest == 0:
            assert factor == 1.0
        elif 1e-30 <= largest <= 1e30:
            assert low <= largest * factor < 2 * low
        else:
            assert largest * factor <= 2 * low or factor == 2.0**-126
