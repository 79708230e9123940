"""Candidates for the kernels of a model, best first by an estimate of the warps that a multiprocessor can hold. The
caller takes the first that compiles without spilling (`jobs.choose`).

Of gradients there are three layouts, made from the same closures:

single   one persistent kernel: encode, forward, loss, backward, scatter, and dW of all layers summed in registers
         from the first tile to the last. Activations and gradients stand in shared tiles, none in global memory.
staged   for networks whose dW does not fit the registers: a *propagate* kernel does the same but saves the fragments
         of activations and gradients to global memory, chunk of the batch after chunk, and a *weight gradient*
         kernel a layer shape sums dW from them.
phased   the same for networks 128 wide, in one kernel (`phased_plan.py`; compute capability 9.0).

On compute capability 9.0, plans of single kernels by warpgroups (`warpgroup_plan.py`) come before the others. Layer by
layer and level by level there are plans of other kinds: `layer_plan.py`, `level_plan.py`.
"""

from __future__ import annotations

import dataclasses
import itertools

from ..specs import TENSOR_CORE_WIDTH, ModelSpec, round_up
from .mlp import n_accumulators
from .phased_plan import phased_plans
from .plan import (
    MAX_REGISTERS,
    Allocator,
    Architecture,
    KernelPlan,
    NetworkTiles,
    PlanError,
    StagedPlan,
    bias_offsets,
    blocks_that_fit,
    describe_shapes,
    divide_weight_gradients,
    fewest_accumulators,
    format_for,
    fragment_registers,
    layer_offsets,
    nests,
    ranked,
    with_blocks,
)
from .tiles import SHARED_ALIGNMENT, Tile
from .warpgroup_plan import warpgroup_inference_plans, warpgroup_single_plans


def inference_plans(spec: ModelSpec, chip: Architecture, dtype: str = "float16") -> list[KernelPlan]:
    """Candidates for inference by one kernel. Raises PlanError where there are none."""
    n_planes, candidates = format_for(dtype, chip).n_planes, []
    for resident, warps, rows in itertools.product((True, False), (4, 8), (32, 16)):
        allocate = Allocator(n_planes)
        weights = _weight_tiles(spec, allocate, resident=resident)
        x = allocate.tile("x", warps * rows, round_up(spec.encoding_width, TENSOR_CORE_WIDTH))
        registers = fragment_registers(spec, rows, n_planes)
        if registers <= MAX_REGISTERS and nests(spec, rows, ways=1, n_planes=n_planes):
            candidates.append((KernelPlan("inference", warps, rows, 1, weights, x, dtype=dtype), registers))
    plans = _resident_first(ranked(candidates, chip))
    return [*warpgroup_inference_plans(spec, chip, dtype), *plans] or _no_plan(spec, chip)


def single_plans(
    spec: ModelSpec, chip: Architecture, *, encoding_gradient: bool, dtype: str = "float16"
) -> list[KernelPlan]:
    """Candidates for one persistent gradient kernel; empty where dW does not fit the registers.

    encoding_gradient   whether dL/d(features) is wanted: for a table's gradient, or for dL/dx
    """
    n_hidden, n_planes = len(spec.layer_shapes) - 1, format_for(dtype, chip).n_planes
    candidates = []
    for warps, rows in ((4, 32), (8, 16), (4, 16), (8, 32)):
        if not nests(spec, rows, ways=2, n_planes=n_planes):
            continue
        allocate = Allocator(n_planes)
        tile_rows = warps * rows
        weights = _weight_tiles(spec, allocate, resident=True)
        x = allocate.tile("x", tile_rows, spec.encoding_width)
        h = tuple(allocate.tile(f"h{i + 1}", tile_rows, spec.layer_shapes[i][0]) for i in range(n_hidden))
        d = tuple(allocate.tile(f"d{i + 1}", tile_rows, fan_out) for i, (fan_out, _) in enumerate(spec.layer_shapes))
        dx = allocate.tile("dx", tile_rows, spec.encoding_width) if encoding_gradient else None
        registers = fragment_registers(spec, rows, n_planes)
        pairs = list(zip(d, (x, *h), strict=True))
        layers = divide_weight_gradients(
            pairs, layer_offsets(spec), warps, MAX_REGISTERS - 15 - registers, bias_offsets(spec)
        )
        if layers is not None:
            plan = KernelPlan("single", warps, rows, 1, weights, x, dx, h, d, layers, dtype=dtype)
            candidates.append((plan, registers + n_accumulators(layers)))
    by_warpgroups = warpgroup_single_plans(spec, chip, encoding_gradient=encoding_gradient, dtype=dtype)
    return [*by_warpgroups, *ranked(candidates, chip)]


def staged_plans(
    spec: ModelSpec, chip: Architecture, *, encoding_gradient: bool, dtype: str = "float16"
) -> list[StagedPlan]:
    """Candidates for the propagate kernel, each with its weight-gradient kernels."""
    n_planes, candidates = format_for(dtype, chip).n_planes, []
    for resident, warps, rows in itertools.product((True, False), (8, 4), (32, 16)):
        allocate = Allocator(n_planes)
        weights = _weight_tiles(spec, allocate, resident=resident)
        x = allocate.tile("x", warps * rows, spec.encoding_width)
        dx = dataclasses.replace(x, name="dx") if encoding_gradient else None  # x is saved before dx is stored
        registers = fragment_registers(spec, rows, n_planes)
        if registers <= MAX_REGISTERS and nests(spec, rows, ways=2, n_planes=n_planes):
            candidates.append((KernelPlan("propagate", warps, rows, 1, weights, x, dx, dtype=dtype), registers))
    plans = []
    for propagate in _resident_first(ranked(candidates, chip)):
        # float32 operands take registers that depend on how dW is divided: where that spills, as few sums as can be
        for fewest in (False, True) if n_planes > 1 else (False,):
            gradients = _weight_gradient_plans(spec, chip, propagate, n_planes, fewest=fewest)
            plan = None if gradients is None else StagedPlan(propagate, gradients)
            if plan is not None and plan not in plans[-1:]:
                plans.append(plan)
    return plans


def _weight_gradient_plans(spec: ModelSpec, chip: Architecture, propagate: KernelPlan, n_planes: int, *, fewest: bool):
    """A kernel a distinct layer shape; None where one fits no block. `fewest`: with the fewest sums a warp."""
    others = 75 + 40 * (n_planes - 1)  # registers of operands and addresses
    by_shape: dict[tuple[int, int], list[int]] = {}
    for i, shape in enumerate(spec.layer_shapes):
        by_shape.setdefault(shape, []).append(i)
    biases = [0] if spec.network.bias else None  # the kernel adds where those of the layer it works on stand
    result = []
    for (fan_out, fan_in), indices in by_shape.items():
        allocate = Allocator(n_planes)
        d = allocate.tile("d", propagate.tile_rows, fan_out)
        h = allocate.tile("h", propagate.tile_rows, fan_in)
        budget = MAX_REGISTERS - others
        if fewest:
            budget = min(budget, fewest_accumulators(d, h, propagate.warps, has_bias=spec.network.bias))
        layers = divide_weight_gradients([(d, h)], [0], propagate.warps, budget, biases)
        if layers is None:
            return None
        plan = KernelPlan(
            "weight gradient", propagate.warps, propagate.rows, 1, h=(h,), d=(d,), layers=layers, dtype=propagate.dtype
        )
        if plan.shared_bytes > chip.shared_per_block:
            return None
        blocks = max(1, blocks_that_fit(plan, n_accumulators(layers) + others, chip))
        result.append((with_blocks(plan, blocks), tuple(indices)))
    return tuple(result)


def gradient_plans(
    spec: ModelSpec, chip: Architecture, *, encoding_gradient: bool, dtype: str = "float16"
) -> list[KernelPlan | StagedPlan]:
    """All candidates: phased ones, where there are any, then single kernels, then stages. Raises PlanError where there
    are none."""
    plans = [
        *phased_plans(spec, chip, encoding_gradient=encoding_gradient, dtype=dtype),
        *single_plans(spec, chip, encoding_gradient=encoding_gradient, dtype=dtype),
        *staged_plans(spec, chip, encoding_gradient=encoding_gradient, dtype=dtype),
    ]
    return plans or _no_plan(spec, chip)


def encoding_gradient_plan(spec: ModelSpec, chip: Architecture, dtype: str = "float16") -> KernelPlan:
    """For a bare encoding: only the tile of its gradient."""
    n_planes = format_for(dtype, chip).n_planes
    for warps, rows in ((4, 32), (4, 16), (1, 16)):
        dx = Allocator(n_planes).tile("dx", warps * rows, round_up(spec.encoding_width, TENSOR_CORE_WIDTH))
        plan = KernelPlan("encoding gradient", warps, rows, 1, dx=dx, dtype=dtype)
        registers = fragment_registers(spec, rows, n_planes)
        if plan.shared_bytes <= chip.shared_per_block and registers <= MAX_REGISTERS:
            return with_blocks(plan, 2 if blocks_that_fit(plan, registers, chip) >= 2 else 1)
    return _no_plan(spec, chip)


def _weight_tiles(spec: ModelSpec, allocate: Allocator, *, resident: bool) -> NetworkTiles:
    shapes = spec.layer_shapes
    if resident or not shapes:
        tiles = tuple(allocate.tile(f"W{i}", *shape) for i, shape in enumerate(shapes))
    else:
        start = allocate.end
        tiles = tuple(
            Tile(f"W{i}", rows, columns, start, allocate.n_planes) for i, (rows, columns) in enumerate(shapes)
        )
        allocate.end = max(-(-tile.end // SHARED_ALIGNMENT) * SHARED_ALIGNMENT for tile in tiles)
    return NetworkTiles(tiles, resident)


def _resident_first(plans: list[KernelPlan]) -> list[KernelPlan]:
    return sorted(plans, key=lambda plan: not plan.weights.resident)


def _no_plan(spec: ModelSpec, chip: Architecture):
    raise PlanError(
        f"no fused kernel fits {describe_shapes(spec)} into "
        f"{chip.shared_per_block // 1024} KiB of shared memory and {MAX_REGISTERS} registers a thread, or there are "
        f"too many of them to compile"
    )
