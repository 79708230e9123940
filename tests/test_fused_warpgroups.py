"""Whole kernels whose products are wgmma's, in the emulator against the reference; compared as in
`test_fused_kernels.py`, which runs the first of these plans for 32-wide networks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from emulation import EmulatedModel
from test_fused_kernels import GRADIENT, GRID, HOPPER, LOSS, assert_gradients_agree, check, make_params

from numba_tcnn.config import parse_model
from numba_tcnn.fused.emulated_memory import RaceError
from numba_tcnn.fused.emulator import Emitter
from numba_tcnn.fused.network_plans import gradient_plans, inference_plans, single_plans
from numba_tcnn.fused.plan import KernelPlan, architecture
from numba_tcnn.fused.stage_io import GradientOptions
from numba_tcnn.fused.warpgroup_plan import warpgroup_inference_plans, warpgroup_single_plans
from numba_tcnn.fused.wgmma import WARPGROUP
from numba_tcnn.reference import Model
from numba_tcnn.specs import LossSpec, ModelSpec


def mlp(n_in: int, n_out: int, *hidden: int, **network: Any) -> ModelSpec:
    return parse_model(n_in, n_out, {"otype": "Identity"}, {"otype": "CutlassMLP", "hidden": hidden} | network)


def plans_of(spec: ModelSpec, *, warpgroups: int | None = None, in_registers: bool | None = None) -> list[KernelPlan]:
    plans = warpgroup_single_plans(spec, HOPPER, encoding_gradient=True)
    return [
        p for p in plans
        if (warpgroups is None or p.warps == WARPGROUP * warpgroups)
        and (in_registers is None or p.remembers_in_registers == in_registers)
    ]  # fmt: skip


def check_first(spec: ModelSpec, plan: KernelPlan | None = None, **options: Any) -> None:
    inference, *_ = warpgroup_inference_plans(spec, HOPPER)
    check(spec, plan=plan or plans_of(spec)[0], inference_plan=inference, **options)


SHAPES = [
    (64, 16, 64, 64),  # dW by wgmma: 64 x 64 twice, and 64 x 16 transposed
    (32, 16, 64, 64),  # rows of 64 bytes in the weights' and inputs' tiles
    (16, 3, 64),
    (48, 3, 64),  # a panel that is not full
    (128, 20, 64),  # two panels
    (80, 48, 64, 32),  # hidden layers of both kinds, the second transposed
    (64, 64, 32, 16),
    (32, 16, 32, 32, 32),  # dW by mma.sync on swizzled tiles, each warp its own samples
    (16, 16, 16, 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    check_first(mlp(*shape), batch=70)


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_every_size_of_a_block(warpgroups: int, in_registers: bool) -> None:
    """Several tiles a block, the last one ragged; sums of dW over warpgroups."""
    spec = parse_model(2, 3, GRID, {"otype": "CutlassMLP", "hidden": [64, 32]})
    plan = plans_of(spec, warpgroups=warpgroups, in_registers=in_registers)[0]
    check_first(spec, plan, batch=64 * warpgroups * 2 + 31)


@pytest.mark.parametrize("batch", [1, 31, 257])
def test_ragged_batches(batch: int) -> None:
    check_first(mlp(64, 16, 64, 64), batch=batch)


@pytest.mark.parametrize("activation", ["SiLU", "Sigmoid"])
@pytest.mark.parametrize("in_registers", [False, True])
def test_what_the_way_back_needs(activation: str, in_registers: bool) -> None:
    """Of SiLU its derivative, of Sigmoid its output; each in registers or in a tile."""
    spec = mlp(16, 3, 64, 32, activation=activation)
    check_first(spec, plans_of(spec, in_registers=in_registers)[0])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_unaligned_inputs(dtype: str) -> None:
    check_first(mlp(64, 16, 64), input_dtype=dtype, misaligned=True)


def test_padded_hidden_widths() -> None:
    check_first(mlp(32, 3, 50, 20, activation="Sigmoid"))


def test_given_output_gradients() -> None:
    check_first(mlp(32, 3, 64), loss=None)


def test_without_a_gradient_of_the_encoding(rng: np.random.Generator) -> None:
    spec = mlp(64, 16, 64)
    params = make_params(spec, rng)
    x, y = rng.random((45, 64), np.float32), rng.random((45, 16), np.float32)
    plan = warpgroup_single_plans(spec, HOPPER, encoding_gradient=False)[0]
    options = GradientOptions(table_gradient=False)
    value, gradients, _ = EmulatedModel(spec, params).gradient(x, y, plan, options)
    expected_value, expected = Model(spec, params, "float16").loss_and_gradients(x, y, LossSpec("L2"), None)
    assert value == pytest.approx(expected_value, rel=LOSS)
    assert_gradients_agree(spec, gradients, expected.params, GRADIENT)


# --------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_come_first_on_hopper(shape: tuple[int, ...]) -> None:
    spec = mlp(*shape)
    assert (
        gradient_plans(spec, HOPPER, encoding_gradient=True)[0].swizzled and inference_plans(spec, HOPPER)[0].swizzled
    )
    assert "wgmma" in gradient_plans(spec, HOPPER, encoding_gradient=True)[0].describe()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_chips_have_none(capability: tuple[int, int]) -> None:
    spec, chip = mlp(64, 16, 64, 64), architecture(capability)
    plans = [*single_plans(spec, chip, encoding_gradient=True), *inference_plans(spec, chip)]
    assert plans and not any(plan.swizzled for plan in plans)


def test_wide_networks_only_infer() -> None:
    assert warpgroup_inference_plans(mlp(64, 16, 128), HOPPER)
    assert not warpgroup_single_plans(mlp(64, 16, 128), HOPPER, encoding_gradient=True)


@pytest.mark.parametrize("spec", [mlp(64, 16, 256), mlp(64, 16, 64, 48), mlp(144, 16, 64), mlp(64, 80, 64)], ids=str)
def test_other_shapes_have_none(spec: ModelSpec) -> None:
    assert not warpgroup_single_plans(spec, HOPPER, encoding_gradient=True)
    assert not warpgroup_inference_plans(spec, HOPPER)


def test_panels_stand_at_multiples_of_1024_bytes() -> None:
    for plan in plans_of(mlp(128, 20, 64, 32)):
        assert all(tile.offset % 1024 == 0 for tile in plan.tiles)
        assert plan.shared_bytes >= max(tile.end for tile in plan.tiles) + 1024 - 16  # room to find such a multiple


# -------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("left_out", ["fence_async", "warpgroup_barrier", "barrier", "warp_barrier"])
def test_races_without(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitter, left_out, lambda e: None)
    with pytest.raises(RaceError):
        check_first(mlp(16, 3, 64), batch=140)


def test_plans_tell_layouts_apart_in_the_cache_key() -> None:
    plan = plans_of(mlp(64, 16, 64))[0]
    assert "SwizzledTile" in repr(plan)
    assert repr(plan) != repr(dataclasses.replace(plan, remembers_in_registers=not plan.remembers_in_registers))
