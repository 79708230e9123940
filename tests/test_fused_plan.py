"""Kernel plans for random models and all architectures: nothing overlaps, all fits, every product is summed once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from numba_tcnn.config import parse_model
from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused import mlp, plan, tiles
from numba_tcnn.fused.emulated_memory import GlobalMemory
from numba_tcnn.fused.emulator import Block, Emitter
from numba_tcnn.fused.mlp import WeightGradient, n_accumulators
from numba_tcnn.fused.network_plans import (
    encoding_gradient_plan,
    gradient_plans,
    inference_plans,
    single_plans,
    staged_plans,
)
from numba_tcnn.fused.phased_plan import PhasedPlan, phased_plans
from numba_tcnn.fused.plan import (
    MAX_REGISTERS,
    RESERVED_SHARED_BYTES,
    Architecture,
    KernelPlan,
    NetworkTiles,
    PlanError,
    StagedPlan,
    architecture,
    divide_weight_gradients,
    layer_offsets,
)
from numba_tcnn.fused.tiles import Tile
from numba_tcnn.layout import n_network_params
from numba_tcnn.specs import IdentitySpec, ModelSpec, NetworkSpec

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def make_spec(encoding_width: int, width: int, n_hidden_layers: int, n_out: int) -> ModelSpec:
    network = NetworkSpec("CutlassMLP", width, n_hidden_layers)
    return ModelSpec(encoding_width, n_out, IdentitySpec(encoding_width), network, encoding_width)


specs = st.builds(
    make_spec,
    st.integers(1, 16).map(lambda n: 16 * n),
    st.sampled_from([16, 32, 64]) | st.integers(16, 128),
    st.integers(0, 5),
    st.integers(1, 48),
)
chips = st.sampled_from(CAPABILITIES).map(architecture)


def assert_disjoint(parts: list[Tile]) -> None:
    ordered = sorted(parts, key=lambda tile: tile.offset)
    for tile, following in zip(ordered, ordered[1:], strict=False):
        assert tile.end <= following.offset, f"{tile} and {following} overlap"


def assert_well_formed(kernel: KernelPlan, chip: Architecture) -> None:
    """Its tiles stand apart, and a block of it fits the chip as often as the plan says."""
    assert kernel.shared_bytes <= chip.shared_per_block
    assert all(tile.end <= kernel.shared_bytes for tile in kernel.tiles)
    assert kernel.warps * kernel.rows == kernel.tile_rows and kernel.threads == 32 * kernel.warps <= 1024
    assert kernel.min_blocks >= 1
    assert kernel.min_blocks == 1 or kernel.min_blocks * kernel.warps <= chip.max_warps
    needed = kernel.min_blocks * (kernel.shared_bytes + RESERVED_SHARED_BYTES)
    assert kernel.min_blocks == 1 or needed <= chip.shared_per_multiprocessor
    weights = kernel.weights.weights if kernel.weights else ()
    rest = [tile for tile in (kernel.x, kernel.dx, *kernel.h, *kernel.d) if tile is not None]
    if kernel.kind == "propagate" and kernel.dx is not None:
        # x is saved to global memory before dL/d(features) is stored, so the two share a place on purpose
        assert (kernel.dx.offset, kernel.dx.rows, kernel.dx.columns) == (
            kernel.x.offset,
            kernel.x.rows,
            kernel.x.columns,
        )
        rest.remove(kernel.dx)
    if weights and not kernel.weights.resident:
        assert len({tile.offset for tile in weights}) == 1
        weights = (max(weights, key=lambda tile: tile.end),)
    assert_disjoint([*weights, *rest])
    for tile in rest:
        assert tile.rows == kernel.tile_rows


def work_of(layer: WeightGradient, n_warps: int) -> np.ndarray:
    """How often each (16x16 block of dW, 16 samples) is summed by a warp that also owns the block, and writes it."""
    counts = np.zeros((layer.n_row_blocks, layer.n_column_blocks, layer.d.rows // 16), int)
    e = Emitter(Block(GlobalMemory(), 32 * n_warps, 16))
    places = (np.broadcast_to(p, 32 * n_warps)[::32].tolist() for p in layer.place(e))
    samples = counts.shape[2] // layer.sample_parts
    for first_row, own_row, first_column, own_column, part in zip(*places, strict=True):
        last_row, last_column = first_row + layer.row_blocks, first_column + layer.column_blocks
        assert last_row <= counts.shape[0] and last_column <= counts.shape[1], "a warp reads past the tile"
        assert first_row <= own_row and first_column <= own_column
        counts[own_row:last_row, own_column:last_column, part * samples : (part + 1) * samples] += 1
    return counts


def assert_every_product_is_summed_once(kernel: KernelPlan) -> None:
    for layer in kernel.layers:
        assert layer.n_warps == kernel.warps
        assert (work_of(layer, kernel.warps) == 1).all(), f"{layer} leaves out or repeats a block"


@settings(deadline=None, max_examples=80)
@given(specs, chips)
def test_inference_plans(spec: ModelSpec, chip: Architecture) -> None:
    try:
        plans = inference_plans(spec, chip)
    except PlanError as error:
        assert "KiB of shared memory" in str(error)
        return
    for kernel in plans:
        assert_well_formed(kernel, chip)
        assert [(t.rows, t.columns) for t in kernel.weights.weights] == list(spec.layer_shapes)
        assert kernel.x.columns == spec.encoding_width


@settings(deadline=None, max_examples=80)
@given(specs, chips, st.booleans())
def test_gradient_plans(spec: ModelSpec, chip: Architecture, encoding_gradient: bool) -> None:
    try:
        plans = gradient_plans(spec, chip, encoding_gradient=encoding_gradient)
    except PlanError as error:
        assert "KiB of shared memory" in str(error)
        return
    assert len(set(plans)) == len(plans)
    for candidate in plans:
        if isinstance(candidate, StagedPlan):
            check_staged(spec, candidate, chip, encoding_gradient)
        elif isinstance(candidate, PhasedPlan):
            check_phased(spec, candidate, chip, encoding_gradient)
        else:
            check_single(spec, candidate, chip, encoding_gradient)


def check_single(spec: ModelSpec, kernel: KernelPlan, chip: Architecture, encoding_gradient: bool) -> None:
    assert_well_formed(kernel, chip)
    assert kernel.weights.resident and (kernel.dx is not None) == encoding_gradient
    assert n_accumulators(kernel.layers) < MAX_REGISTERS
    assert [(layer.d.columns, layer.h.columns) for layer in kernel.layers] == list(spec.layer_shapes)
    assert [layer.d for layer in kernel.layers] == list(kernel.d)
    assert [layer.h for layer in kernel.layers] == [kernel.x, *kernel.h]
    ends = [layer.parameter_offset + layer.d.columns * layer.h.columns for layer in kernel.layers]
    assert [layer.parameter_offset for layer in kernel.layers] == [0, *ends[:-1]]
    assert ends[-1] == n_network_params(spec)
    assert_every_product_is_summed_once(kernel)


def check_phased(spec: ModelSpec, kernel: PhasedPlan, chip: Architecture, encoding_gradient: bool) -> None:
    assert chip.cc == 90 and kernel.shared_bytes <= chip.shared_per_block
    assert kernel.weights.resident and kernel.dx == (kernel.x if encoding_gradient else None)
    while_propagating = dict.fromkeys(tile for layer in kernel.summed for tile in (layer.h, layer.d))
    if kernel.lends:
        lent, first_weights = kernel.summed[0].h, kernel.weights.weights[0]
        assert not encoding_gradient and kernel.layers and len(kernel.summed) > 1
        assert lent.offset == first_weights.offset and lent.end <= first_weights.end
        del while_propagating[lent]
    if kernel.x_is_shared:
        assert_disjoint([*kernel.weights.weights, kernel.x, *list(while_propagating)[:-2]])  # without d, h of the last
    else:
        while_propagating[kernel.x] = None
    assert_disjoint([*kernel.weights.weights, *while_propagating])
    assert all(tile.end <= kernel.shared_end for tile in (kernel.x, *while_propagating))
    if kernel.summed and not kernel.hands_on_packed:
        place = kernel.summed[-1].h
        handed_on = [kernel.input_tile(i) for i in range(1, len(kernel.layers))]
        handed_on += [kernel.gradient_tile(i) for i in range(1, len(kernel.layers))]
        assert all((tile.offset, tile.end) == (place.offset, place.end) for tile in handed_on)
    layers = (*kernel.layers, *kernel.summed)
    assert [(layer.d.columns, layer.h.columns) for layer in layers] == list(spec.layer_shapes)
    assert [layer.parameter_offset for layer in layers] == layer_offsets(spec)
    assert n_accumulators(kernel.summed) < MAX_REGISTERS
    assert [(layer.d, layer.h) for layer in kernel.layers] == list(zip(kernel.d, kernel.h, strict=True))
    for i, layer in enumerate(kernel.layers):
        assert_disjoint([layer.d, layer.h])
        assert max(layer.d.end, layer.h.end) <= kernel.pair_bytes(i) <= kernel.shared_bytes // kernel.stages
    assert_every_product_is_summed_once(kernel)
    assert_every_product_is_summed_once(replace(kernel, layers=kernel.summed, summed=()))


@pytest.mark.parametrize("encoding_gradient", [False, True])
@pytest.mark.parametrize("n_outputs", [1, 16, 33, 64])
@pytest.mark.parametrize("n_hidden", [2, 3, 4, 5])
@pytest.mark.parametrize("encoding_width", [16, 32, 48, 64, 128])
def test_tiles_of_phased_plans(encoding_width: int, n_hidden: int, n_outputs: int, encoding_gradient: bool) -> None:
    chip, spec = architecture((9, 0)), make_spec(encoding_width, 128, n_hidden, n_outputs)
    plans = phased_plans(spec, chip, encoding_gradient=encoding_gradient)
    for kernel in plans:
        check_phased(spec, kernel, chip, encoding_gradient)
    for kernel in plans:  # 136 of five layers compile to 84 to 116 bytes of spills, of six to 184
        assert n_accumulators(kernel.summed) + 2 * len(spec.layer_shapes) <= 146 or not kernel.layers


def check_staged(spec: ModelSpec, staged: StagedPlan, chip: Architecture, encoding_gradient: bool) -> None:
    assert_well_formed(staged.propagate, chip)
    assert (staged.propagate.dx is not None) == encoding_gradient
    covered = []
    for kernel, layers in staged.weight_gradients:
        assert_well_formed(kernel, chip)
        assert_every_product_is_summed_once(kernel)
        # fragments are restored as they were saved: by warps of the same rows
        assert (kernel.warps, kernel.rows) == (staged.propagate.warps, staged.propagate.rows)
        (layer,) = kernel.layers
        assert layer.parameter_offset == 0  # the kernel adds that of the layer it works on
        assert {spec.layer_shapes[i] for i in layers} == {(layer.d.columns, layer.h.columns)}
        covered += layers
    assert sorted(covered) == list(range(len(spec.layer_shapes)))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 256), chips)
def test_plans_of_bare_encodings(width: int, chip: Architecture) -> None:
    spec = ModelSpec(width, width, IdentitySpec(width), None, width)
    for kernel in (*inference_plans(spec, chip), encoding_gradient_plan(spec, chip)):
        assert_well_formed(kernel, chip)
        assert all(tile.columns == -(-width // 16) * 16 for tile in kernel.tiles)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("encoding_width", [16, 32, 64, 128])
def test_networks_of_the_usual_sizes_have_plans_everywhere(capability, encoding_width: int) -> None:
    """Widths up to 128 and 5 hidden layers, tiny-cuda-nn's largest fully fused network, on the smallest chip too."""
    for width in (16, 32, 64, 128):
        for n_hidden_layers in range(6):
            spec = make_spec(encoding_width, width, n_hidden_layers, 16)
            assert inference_plans(spec, architecture(capability))
            assert gradient_plans(spec, architecture(capability), encoding_gradient=True)


def test_small_networks_take_one_kernel_and_large_ones_several() -> None:
    chip = architecture((9, 0))
    assert gradient_plans(make_spec(32, 64, 2, 16), chip, encoding_gradient=True)[0].kind == "single"
    assert single_plans(make_spec(32, 128, 5, 16), chip, encoding_gradient=True) == []
    assert isinstance(gradient_plans(make_spec(32, 128, 5, 16), chip, encoding_gradient=True)[0], PhasedPlan)
    ampere = architecture((8, 0))
    assert isinstance(gradient_plans(make_spec(32, 128, 5, 16), ampere, encoding_gradient=True)[0], StagedPlan)


@pytest.mark.parametrize("make_plans", [inference_plans, staged_plans, phased_plans, single_plans])
def test_deep_networks_of_curved_activations_keep_their_code_short(make_plans) -> None:
    """Fewer samples a warp, where an activation is a long expression; then no nested layers at all. Those of straight
    lines and shallow ones keep all of their candidates."""
    chip = architecture((9, 0))
    how = {} if make_plans is inference_plans else {"encoding_gradient": True}

    def rows(width: int, n_hidden_layers: int, activation: str, dtype: str = "float16") -> set[int]:
        spec = make_spec(32, width, n_hidden_layers, 16)
        spec = replace(spec, network=replace(spec.network, activation=activation))
        try:
            plans = make_plans(spec, chip, dtype=dtype, **how)
        except PlanError:
            return set()
        return {getattr(made, "propagate", made).rows for made in plans}

    for width, n_hidden_layers in ((64, 2), (64, 5), (128, 3)):
        assert rows(width, n_hidden_layers, "Softplus") == rows(width, n_hidden_layers, "ReLU")
    if make_plans in (inference_plans, staged_plans):
        assert rows(64, 16, "ReLU") == {16, 32}
        assert rows(64, 16, "Softplus") == ({16, 32} if make_plans is inference_plans else {16})
        assert rows(128, 16, "Tanh", "float32") == {16}
    assert rows(128, 16, "Softplus") == ({16} if make_plans is inference_plans else set())


def test_weight_gradients_in_float32_are_divided_more_where_registers_run_out() -> None:
    """Behind each candidate stands the one with the fewest sums a warp, unless it is that already; float16 has one."""
    network = {"otype": "CutlassMLP", "n_neurons": 128, "n_hidden_layers": 1, "bias": True}
    spec, chip = parse_model(48, 1, {"otype": "Identity"}, network), architecture((9, 0))
    half, single = (staged_plans(spec, chip, encoding_gradient=False, dtype=dtype) for dtype in ("float16", "float32"))
    propagates = [plan.propagate for plan in single]
    assert all(a.propagate != b.propagate for a, b in zip(half, half[1:], strict=False))
    first, second = single[:2]
    assert propagates[0] == propagates[1] and len(single) == 2 * len(set(propagates))
    for (wide, layers), (narrow, same) in zip(first.weight_gradients, second.weight_gradients, strict=True):
        assert layers == same and n_accumulators(narrow.layers) <= n_accumulators(wide.layers)
    assert sum(n_accumulators(plan.layers) for plan, _ in second.weight_gradients) < sum(
        n_accumulators(plan.layers) for plan, _ in first.weight_gradients
    )


def test_candidates_end_with_the_least_demanding() -> None:
    """A ladder: later candidates of the same layout ask for fewer blocks, so registers spill less."""
    chip = architecture((9, 0))
    for plans in (inference_plans(make_spec(32, 64, 2, 3), chip), single_plans(make_spec(32, 64, 2, 3), chip,
                  encoding_gradient=True)):  # fmt: skip
        by_layout: dict[tuple, list[int]] = {}
        for kernel in plans:
            layout = (
                kernel.swizzled,
                kernel.remembers_in_registers,
                kernel.warps,
                kernel.rows,
                kernel.weights.resident,
            )
            by_layout.setdefault(layout, []).append(kernel.min_blocks)
        for blocks in by_layout.values():
            assert blocks == sorted(blocks, reverse=True) and blocks[-1] == 1


# ------------------------------------------------------------------------------------- weight gradients


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 16)), min_size=1, max_size=4), st.sampled_from([4, 8]),
       st.sampled_from([16, 32]), st.integers(8, 400))  # fmt: skip
def test_divisions_keep_their_budget(shapes: list, n_warps: int, rows: int, budget: int) -> None:
    pairs = [(Tile("d", n_warps * rows, 16 * a, 0), Tile("h", n_warps * rows, 16 * b, 0)) for a, b in shapes]
    layers = divide_weight_gradients(pairs, list(range(len(pairs))), n_warps, budget)
    fewest = [
        min(c.n_accumulators for c in plan._splits(d, h, n_warps, 0)) for d, h in pairs
    ]  # fmt: skip
    assert (layers is None) == (sum(fewest) > budget)
    assume(layers is not None)
    assert n_accumulators(layers) <= budget
    for layer in layers:
        assert layer.n_warps == n_warps and (work_of(layer, n_warps) == 1).all()


@pytest.mark.parametrize(("warps", "reason"), [
    ((4, 1, 1), "more warps than blocks"), ((1, 2, 2), "more warps than blocks"), ((1, 1, 8), "samples"),
])  # fmt: skip
def test_divisions_that_make_no_sense_are_refused(warps: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        WeightGradient(Tile("d", 64, 48, 0), Tile("h", 64, 16, 8192), 0, *warps)


# ----------------------------------------------------------------------------------- hashes and texts


def examples() -> list:
    chip = architecture((9, 0))
    spec = make_spec(32, 64, 2, 3)
    return [
        inference_plans(spec, chip)[0],
        single_plans(spec, chip, encoding_gradient=True)[0],
        staged_plans(spec, chip, encoding_gradient=True)[0],
        phased_plans(make_spec(32, 128, 2, 3), chip, encoding_gradient=True)[0],
    ]


def test_plans_are_equal_by_value() -> None:
    for first, second in zip(examples(), examples(), strict=True):
        assert first is not second and first == second and hash(first) == hash(second)
        assert len({first, second}) == 1


def test_the_text_of_a_plan_says_everything() -> None:
    """Cache keys are made of it: a plan can be made again from its text alone."""
    names = {
        c.__name__: c
        for c in (KernelPlan, PhasedPlan, StagedPlan, NetworkTiles, tiles.Tile, tiles.SwizzledTile, mlp.WeightGradient)
    }
    for kernel in examples():
        assert eval(repr(kernel), names) == kernel


def test_the_text_of_a_plan_is_the_same_in_every_process() -> None:
    here = os.path.dirname(__file__)
    program = "import test_fused_plan as t, hashlib; print(hashlib.sha256(repr(t.examples()).encode()).hexdigest())"
    expected = hashlib.sha256(repr(examples()).encode()).hexdigest()
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == expected


def test_plans_describe_themselves() -> None:
    inference, single, staged, phased = examples()
    assert phased.describe() == f"phased, {phased.warps} warps x {phased.rows} samples, wgmma, dW of 3 layers at once"
    assert single.describe() == f"single, {single.warps} warps x {single.rows} samples, wgmma"
    streamed = next(p for p in inference_plans(make_spec(32, 64, 2, 3), architecture((9, 0))) if not p.weights.resident)
    assert streamed.describe().endswith(", weights streamed") and staged.propagate.describe().startswith("propagate")


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("make_plans", [
    inference_plans,
    lambda spec, chip: gradient_plans(spec, chip, encoding_gradient=True),
], ids=["inference", "gradient"])  # fmt: skip
def test_what_fits_nowhere_is_refused_with_its_sizes(make_plans) -> None:
    with pytest.raises(PlanError, match=r"layers of 1024x64, 16x1024 into 64 KiB of shared memory and 255 registers"):
        make_plans(make_spec(64, 1024, 1, 3), architecture((7, 5)))
    assert issubclass(PlanError, EngineUnavailable)


def test_bare_encodings_that_fit_nowhere_are_named() -> None:
    spec = ModelSpec(3, 8192, IdentitySpec(8192), None, 8192)
    with pytest.raises(PlanError, match="an encoding of width 8192"):
        encoding_gradient_plan(spec, architecture((7, 5)))


@pytest.mark.parametrize(("capability", "expected"), [
    ((7, 5), 75), ((8, 0), 80), ((8, 7), 86), ((8, 9), 89), ((9, 0), 90), ((10, 3), 100), ((12, 1), 120),
])  # fmt: skip
def test_unknown_chips_count_as_the_newest_older_one(capability: tuple[int, int], expected: int) -> None:
    assert architecture(capability).cc == expected


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 0), (7, 2)])
def test_chips_without_usable_tensor_cores_are_refused(capability: tuple[int, int]) -> None:
    name = ".".join(map(str, capability))
    with pytest.raises(PlanError, match=rf"compute capability {name} has no usable tensor cores; 7.5 is needed"):
        architecture(capability)


def test_layer_offsets_are_those_of_the_parameter_vector() -> None:
    assert layer_offsets(make_spec(32, 64, 2, 3)) == [0, 64 * 32, 64 * 32 + 64 * 64]
