"""Kernels whose features are copied to shared memory a tile ahead, in the emulator against the reference."""

from __future__ import annotations

from typing import Any

import pytest
from emulated_driver import EmulatedDriver, installed
from test_fused_kernels import HOPPER, check
from test_fused_level_split import HASH, MLP
from test_fused_level_split import check as check_level_split
from test_fused_warpgroups import SHAPES, mlp

from numba_tcnn.config import parse_model
from numba_tcnn.fused import level_plan
from numba_tcnn.fused.copied_features import can_copy, with_features_copied
from numba_tcnn.fused.emulator import Emitter, RaceError
from numba_tcnn.fused.jobs import GradientJob, InferenceJob
from numba_tcnn.fused.network_plans import inference_plans, single_plans
from numba_tcnn.fused.plan import KernelPlan, architecture
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.specs import ModelSpec

HALF = GradientOptions("float16")


def copied(plans: list[KernelPlan], spec: ModelSpec) -> list[KernelPlan]:
    return [plan for plan in with_features_copied(plans, spec, HOPPER, HALF) if plan.copied_ahead]


def check_copied(spec: ModelSpec, *, warps: int | None = None, **options: Any) -> None:
    plans = copied(single_plans(spec, HOPPER, encoding_gradient=True), spec)
    plan = next(plan for plan in plans if warps is None or plan.warps == warps)
    inference, *_ = copied(inference_plans(spec, HOPPER), spec)
    check(spec, plan=plan, inference_plan=inference, input_dtype="float16", **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_inputs(shape: tuple[int, ...]) -> None:
    check_copied(mlp(*shape), batch=70)


@pytest.mark.parametrize("warps", [4, 8, 12])
def test_two_tiles_take_turns(warps: int) -> None:
    """An odd and an even number of tiles a block, the last one ragged."""
    check_copied(mlp(32, 3, 64, 32), warps=warps, batch=16 * warps * 5 + 31)


@pytest.mark.parametrize("batch", [1, 31, 257])
def test_ragged_batches(batch: int) -> None:
    check_copied(mlp(64, 16, 64), batch=batch)


def test_more_blocks_than_tiles() -> None:
    check_copied(mlp(16, 3, 32), batch=40, n_blocks=4)


@pytest.mark.parametrize("left_out", ["fence_async", "warpgroup_barrier", "warp_barrier"])
def test_races_without(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitter, left_out, lambda e: None)
    with pytest.raises(RaceError):
        check_copied(mlp(16, 3, 64), batch=300)


def test_copies_have_to_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitter, "copy_wait", lambda e: None)
    with pytest.raises((RaceError, AssertionError)):  # nothing arrives at all
        check_copied(mlp(16, 3, 64), batch=300)


# ---------------------------------------------------------------------------------------------- planes


@pytest.mark.parametrize(("n_features", "n_levels"), [(2, 8), (2, 24), (4, 4), (8, 4), (8, 10), (4, 12)])
def test_planes(n_features: int, n_levels: int, monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """Of 16 to 80 columns: parts of a panel, one, and two of them; an odd number of turns too."""
    monkeypatch.setattr(level_plan, "LEVEL_SPLIT_BATCH", 1)
    monkeypatch.setattr(level_plan, "THREADS", (64,))
    encoding = HASH | {"n_features_per_level": n_features, "n_levels": n_levels, "per_level_scale": 1.1}
    with installed(EmulatedDriver(), monkeypatch):
        model = check_level_split(encoding, 2, 300, network=MLP | {"n_neurons": 32})
        plans = [kernel.plan for kernel in model.explain().kernels if kernel.name in ("gradient", "inference")]
    assert len(plans) == 2 and all(plan.endswith("features copied ahead") for plan in plans)


# ----------------------------------------------------------------------------------------- which can be


def grid_behind_planes(n_levels: int, n_features: int) -> ModelSpec:
    encoding = HASH | {"n_features_per_level": n_features, "n_levels": n_levels}
    return level_plan.network_behind_planes(parse_model(2, 3, encoding, MLP))


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        (mlp(64, 16, 64), HALF, True),
        (mlp(64, 16, 64), GradientOptions("float32"), False),
        (mlp(64, 16, 64), GradientOptions("float16", aligned_input=False), False),
        (mlp(60, 16, 64), HALF, False),  # padded with ones
        (parse_model(64, 3, {"otype": "Identity", "scale": 2.0}, MLP), HALF, False),
        (parse_model(64, 3, {"otype": "Identity", "offset": 1.0}, MLP), HALF, False),
        (parse_model(2, 3, HASH, MLP), HALF, False),
        (grid_behind_planes(8, 2), HALF, True),
        (grid_behind_planes(16, 1), HALF, False),  # nothing copies two bytes
        (grid_behind_planes(7, 2), HALF, False),  # padded with zeros
    ],
)
def test_what_is_copied(spec: ModelSpec, options: GradientOptions, expected: bool) -> None:
    assert can_copy(spec, options) is expected


def test_such_plans_come_first_and_the_others_stay() -> None:
    spec = mlp(64, 16, 64, 64)
    for job in (GradientJob(spec, HALF), InferenceJob(spec, InferenceOptions("float16"))):
        first, second, *_ = job.plans(HOPPER)
        assert first.copied_ahead and not second.copied_ahead
        assert first.describe() == second.describe() + ", features copied ahead"
        assert not any(plan.copied_ahead for plan in job.plans(architecture((8, 0))) if isinstance(plan, KernelPlan))


def test_tiles_do_not_overlap() -> None:
    for plan in copied(single_plans(mlp(128, 20, 64, 32), HOPPER, encoding_gradient=True), mlp(128, 20, 64, 32)):
        tiles = sorted(plan.tiles, key=lambda tile: tile.offset)
        assert all(a.end <= b.offset for a, b in zip(tiles, tiles[1:], strict=False))
        assert plan.next_x.rows == plan.x.rows and plan.next_x.columns == plan.x.columns
        assert plan.shared_bytes >= plan.next_x.end
