"""Phased plans and their images, in the emulator against the reference; compared as in `test_fused_kernels.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation import EmulatedModel, emulator_target
from test_fused_kernels import GRID, HOPPER, check, data, make_params
from test_fused_warpgroups import mlp

from numba_tcnn.config import parse_model
from numba_tcnn.fused.copied_features import with_features_copied
from numba_tcnn.fused.emulated_memory import GlobalMemory, MemoryFault, RaceError
from numba_tcnn.fused.emulator import Block, Emitter
from numba_tcnn.fused.fragments import Target
from numba_tcnn.fused.network_plans import gradient_plans
from numba_tcnn.fused.phased_plan import PhasedPlan, phased_plans, summing_plans
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.saved_images import image, make_restore_image, make_save_image, make_signs
from numba_tcnn.fused.stage_io import GradientOptions
from numba_tcnn.fused.summed_layers import Exchange, make_tile_exchange
from numba_tcnn.fused.warpgroup_plan import warpgroup_inference_plans
from numba_tcnn.specs import ModelSpec


def plan_of(spec: ModelSpec, *, at_once: bool = False, encoding_gradient: bool = True) -> PhasedPlan:
    plans = phased_plans(spec, HOPPER, encoding_gradient=encoding_gradient)
    return plans[0 if at_once else -1]


def check_phased(spec: ModelSpec, *, at_once: bool = False, **options: Any) -> PhasedPlan:
    plan, (inference, *_) = plan_of(spec, at_once=at_once), warpgroup_inference_plans(spec, HOPPER)
    assert bool(plan.summed) is at_once
    check(spec, plan=plan, inference_plan=inference, **options)
    return plan


SHAPES = [
    (128, 16, 128, 128),
    (64, 16, 128),  # one panel of inputs
    (16, 3, 128),  # rows of 32 bytes
    (48, 20, 128),  # a group of 32 columns and one of 16; 32 outputs
    (80, 48, 128),  # two panels, the second not full
    (128, 16, 64, 128),  # dW^T of a hidden layer
]


@pytest.mark.parametrize("shape", [pytest.param(SHAPES[0], marks=pytest.mark.exhaustive), *SHAPES[1:]], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    check_phased(mlp(*shape), batch=150)


@pytest.mark.exhaustive
@pytest.mark.parametrize("at_once", [True, False])
def test_five_layers_behind_an_encoding(at_once: bool) -> None:
    """As many images in turn as there are stages, and more."""
    spec = parse_model(2, 3, GRID, {"otype": "CutlassMLP", "hidden": [128] * 5})
    check_phased(spec, at_once=at_once, batch=129)


@pytest.mark.parametrize("batch", [1, 31, 257, 128 * 7])
def test_ragged_batches(batch: int) -> None:
    """Blocks without a tile, a tile without a whole warpgroup, more pairs of images than stages."""
    check_phased(mlp(16, 3, 128), batch=batch)


@pytest.mark.parametrize("chunk_rows", [128, 256, 384])
def test_chunks(chunk_rows: int) -> None:
    check_phased(mlp(32, 3, 128), batch=128 * 4 + 31, chunk_rows=chunk_rows)


@pytest.mark.parametrize("activation", ["SiLU", "Sigmoid", "LeakyReLU", "None"])
def test_what_the_way_back_needs(activation: str) -> None:
    """Of ReLU signs, elsewhere here; of SiLU its derivative, of the others their output, from the image."""
    check_phased(mlp(16, 3, 128, 128, activation=activation))


def test_padded_hidden_widths() -> None:
    check_phased(mlp(32, 3, 120, 115, activation="Sigmoid"))


def test_given_output_gradients_and_unaligned_inputs() -> None:
    check_phased(mlp(32, 3, 128), loss=None, misaligned=True)


def test_gradients_that_are_not_finite_are_marked(rng: np.random.Generator) -> None:
    spec = mlp(16, 3, 128)
    params = make_params(spec, rng)
    params[: 16 * 128] = 60000.0
    x, y = data(spec, 40, rng)
    model = EmulatedModel(spec, params)
    model.gradient(x, y, plan_of(spec), GradientOptions(table_gradient=False, input_gradient=True))
    assert model.bad[0] == 1


# ------------------------------------------------------------------------ layers whose dW is summed at once


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layers_summed_at_once(shape: tuple[int, ...]) -> None:
    """All of them: nothing is saved."""
    assert not check_phased(mlp(*shape), at_once=True, batch=150).layers


def check_behind_saved_layers(spec: ModelSpec, **options: Any) -> PhasedPlan:
    """With the last layers summed at once, where no gradient of the encoding is needed."""
    plan = plan_of(spec, at_once=True, encoding_gradient=False)
    inference = warpgroup_inference_plans(spec, HOPPER)[0]
    check(spec, plan=plan, inference_plan=inference, gradient_tolerance=4e-3, input_gradient=False, **options)
    assert plan.layers and plan.summed
    return plan


@pytest.mark.parametrize(("n_hidden", "n_summed", "lends"), [
    (4, 3, True), pytest.param(3, 3, False, marks=pytest.mark.exhaustive),
    pytest.param(5, 2, True, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_the_last_layers_summed_at_once(n_hidden: int, n_summed: int, lends: bool) -> None:
    """Behind others that are saved; h of the first of them where W_0 stood, or apart."""
    plan = check_behind_saved_layers(mlp(128, 16, *[128] * n_hidden), batch=140)
    assert (len(plan.summed), plan.lends) == (n_summed, lends) and plan.x_is_shared


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_hidden", [3, 4])
def test_the_last_layers_summed_before_an_encoding(n_hidden: int) -> None:
    """W_0 is needed on the way back too, and fewer registers are left."""
    plan = check_phased(mlp(128, 16, *[128] * n_hidden), at_once=True, batch=140, gradient_tolerance=4e-3)
    assert plan.layers and len(plan.summed) == 2 and not plan.lends


def test_narrow_inputs_do_not_share_their_tile() -> None:
    """Rows of 64 bytes: other warps' rows of h would stand where they do."""
    for width, shares in ((32, False), (48, True), (128, True)):
        plans = summing_plans(mlp(width, 64, *[128] * 5), 1, encoding_gradient=True)
        assert any(plan.x_is_shared for plan in plans) is shares


def test_narrow_layers_do_not_hand_on_in_a_tile_of_others() -> None:
    narrow, wide = (plan_of(mlp(128, 16, 128, n, 128, 128), at_once=True, encoding_gradient=False) for n in (64, 80))
    assert narrow.hands_on_packed and not wide.hands_on_packed and len(narrow.summed) < len(wide.summed)


@pytest.mark.parametrize("batch", [1, 31, 257, 128 * 7])
def test_ragged_batches_summed_at_once(batch: int) -> None:
    check_phased(mlp(16, 3, 128), at_once=True, batch=batch)


def test_chunks_of_which_some_layers_are_summed_at_once() -> None:
    check_phased(mlp(64, 3, *[128] * 3), at_once=True, batch=128 + 31, chunk_rows=128, gradient_tolerance=4e-3)


@pytest.mark.parametrize("activation", ["Sigmoid", "LeakyReLU", "None"])
def test_what_the_way_back_needs_of_tiles(activation: str) -> None:
    """Outputs are read from their tile before d takes their place."""
    check_phased(mlp(16, 3, 128, 128, activation=activation), at_once=True)


@pytest.mark.parametrize("spec", [mlp(16, 3, 128, activation="SiLU"), mlp(32, 3, 120), mlp(16, 80, 128)], ids=str)
def test_networks_that_save_all(spec: ModelSpec) -> None:
    """phi' of z stands where d will, hidden padding must be cleared, outputs are made in one piece."""
    assert not any(plan.summed for plan in phased_plans(spec, HOPPER, encoding_gradient=True))


@pytest.mark.parametrize("left_out", ["fence_async", "barrier", "warpgroup_barrier"])
@pytest.mark.parametrize("shape", [(16, 3, 128), (128, 16, 128, 128, 128)], ids=str)
def test_races_of_summed_layers_without(left_out: str, shape: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitter, left_out, lambda e: None)
    with pytest.raises(RaceError):
        check_phased(mlp(*shape), at_once=True, batch=300)


@pytest.mark.parametrize("left_out", ["before", "after", "own"])
def test_every_barrier_of_summed_layers_is_needed(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(target: Target) -> Exchange:
        return make_tile_exchange(target)._replace(**{left_out: lambda: None})

    monkeypatch.setattr("numba_tcnn.fused.summed_layers.make_tile_exchange", without)
    with pytest.raises(RaceError):
        check_phased(mlp(128, 16, 128, 128), at_once=True, batch=300)


# --------------------------------------------------------------------------------------------- plans


def test_they_come_first_on_hopper() -> None:
    spec = mlp(128, 16, 128, 128, 128, 128)
    assert isinstance(gradient_plans(spec, HOPPER, encoding_gradient=True)[0], PhasedPlan)
    for plan in phased_plans(spec, HOPPER, encoding_gradient=True):
        assert "phased" in plan.describe() and "wgmma" in plan.describe()
        assert plan.stages * plan.pair_bytes(0) < plan.shared_bytes <= HOPPER.shared_per_block
    assert plan_of(spec, at_once=True).describe() == plan_of(spec).describe() + ", dW of 2 layers at once"


def test_tiles_of_layers_summed_at_once() -> None:
    """Each is there once; d has the place of the next layer's h, and the twin of x is behind all."""
    spec = mlp(128, 16, 128, 128)
    first, second, *_ = with_features_copied(
        phased_plans(spec, HOPPER, encoding_gradient=False), spec, HOPPER, GradientOptions("float16")
    )
    assert (
        first.copied_ahead
        and first.next_x.offset >= second.shared_end
        and second == replace(first, copied_ahead=False, next_x=None)
    )
    tiles = sorted(first.tiles, key=lambda tile: tile.offset)
    assert all(a.end <= b.offset for a, b in zip(tiles, tiles[1:], strict=False))
    assert [layer.d for layer in first.summed[:-1]] == [layer.h for layer in first.summed[1:]]
    assert first.summed[0].h == first.x and first.keeps_x and not first.x_is_shared


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_chips_have_none(capability: tuple[int, int]) -> None:
    assert not phased_plans(mlp(128, 16, 128), architecture(capability), encoding_gradient=True)


@pytest.mark.parametrize(
    "spec",
    [mlp(64, 16, 64), mlp(64, 16, 128, 64, 64), mlp(144, 16, 128), mlp(128, 16, *[128] * 7), mlp(64, 144, 128)],
    ids=str,
)
def test_other_shapes_have_none(spec: ModelSpec) -> None:
    assert not phased_plans(spec, HOPPER, encoding_gradient=True)


# -------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 128])
def test_images_come_back(columns: int, rng: np.random.Generator) -> None:
    """And fill their columns, in some order, with what was saved."""
    target, memory, tile = emulator_target(), GlobalMemory(), image(columns)
    saved = np.full(3 * tile.n_bytes // 2, 0xFFFF, np.uint16)
    address = np.uint64(memory.place(saved))
    packed = tuple(rng.integers(0, 2**15, 128).astype(np.uint32) for _ in range(columns // 4))
    target.block = Block(memory, 128, 16)
    make_save_image(target, tile, tile.n_bytes)(address, np.uint32(1), packed)
    back = make_restore_image(target, tile, tile.n_bytes)(address, np.uint32(1))
    assert all((a == b).all() for a, b in zip(packed, back, strict=True))
    written = saved[tile.n_bytes // 2 : tile.n_bytes]
    expected = np.array(packed).view(np.uint16).ravel()
    assert sorted(written[written != 0xFFFF]) == sorted(expected)
    assert (saved[: tile.n_bytes // 2] == 0xFFFF).all() and (saved[tile.n_bytes :] == 0xFFFF).all()


@pytest.mark.parametrize("n_packed", [4, 8, 16, 24, 32])
def test_signs(n_packed: int) -> None:
    target = emulator_target()
    target.block = Block(GlobalMemory(), 32, 16)
    halves = np.array([0, 1, 0x3C00, 0x7BFF, 0x7C00, 0x7FFF], np.uint32)  # what ReLU gives, up to infinity and NaN
    packed = [np.resize(halves, 32) | np.resize(np.roll(halves, i), 32) << 16 for i in range(n_packed)]
    signs, ones = make_signs(target, n_packed)
    back = ones(signs(packed))
    assert len(back) == n_packed
    for register, one in zip(packed, back, strict=True):
        bits = np.ascontiguousarray(register).view(np.uint16)
        assert ((np.ascontiguousarray(one).view(np.float16) > 0) == (bits > 0)).all()


# --------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("left_out", ["fence_async", "barrier", "warp_barrier"])
def test_races_without(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitter, left_out, lambda e: None)
    with pytest.raises(RaceError):
        check_phased(mlp(16, 3, 128), batch=140)


def test_copies_that_are_not_waited_for_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Emitter.copy_wait
    monkeypatch.setattr(Emitter, "copy_wait", lambda e, left=None: wait(e, None if left is None else left + 1))
    with pytest.raises((RaceError, AssertionError)):
        check_phased(mlp(16, 3, 128), batch=128 * 4)


def test_images_are_not_read_as_constants() -> None:
    """The kernel that reads them has written them."""
    memory = GlobalMemory()
    place = np.full(32, memory.place(np.zeros(128, np.uint32)), np.uint64) + 16 * np.arange(32, dtype=np.uint64)
    e = Emitter(Block(memory, 32, 1024))
    e.store_global(place, "u32", [e.thread()] * 4)
    e.copy_async(16 * e.lane(), place, constant=False)
    with pytest.raises(MemoryFault, match="constant"):
        e.copy_async(16 * e.lane() + 512, place)
