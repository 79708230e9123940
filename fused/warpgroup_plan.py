"""Plans whose products are wgmma's: blocks of one to three warpgroups, each with 64 samples, a warp 16 of them.

A warpgroup works on its own samples alone, so that the warpgroups of a block wait for nothing but their own barriers;
they share the weights, and at the end their sums of dW. Only sm_90a has these instructions.

Candidates are ordered by the warps that a multiprocessor holds, since what bounds these kernels is shared memory's
bandwidth and the latency of barriers; among equals by larger blocks, whose rows of partial sums are fewer. A kernel
whose registers don't suffice spills or has its wgmma serialised, and gives way to the next.
"""

from __future__ import annotations

import itertools

from ..specs import TENSOR_CORE_WIDTH, ModelSpec, round_up
from .fragments import FragmentShape
from .mlp import WeightGradient, n_accumulators
from .plan import (
    MAX_REGISTERS,
    REGISTERS_PER_MULTIPROCESSOR,
    Architecture,
    KernelPlan,
    NetworkTiles,
    blocks_that_fit,
    fragment_registers,
    layer_offsets,
    nests,
    with_blocks,
)
from .swizzled_tile import SWIZZLE_ALIGNMENT, SwizzledTile
from .warpgroup_mlp import WARPGROUP_ROWS
from .wgmma import WARPGROUP

HIDDEN_WIDTHS = (16, 32, 64)
WIDE = (*HIDDEN_WIDTHS, 128)
"""Hidden widths of inference; of dW in registers, `HIDDEN_WIDTHS`."""

MAX_FAN_IN, MAX_FAN_OUT = 128, 64
ROWS = WARPGROUP_ROWS // WARPGROUP
ENOUGH_WARPS = 16  # of a gradient kernel on a multiprocessor: more are not counted


def fits_warpgroups(
    spec: ModelSpec, chip: Architecture, dtype: str = "float16", widths: tuple[int, ...] = HIDDEN_WIDTHS
) -> bool:
    """Whether a network's products can be wgmma's, as far as its shape goes; only those in float16 are made of it.
    widths: of hidden layers."""
    if chip.cc != 90 or dtype != "float16" or spec.network is None or spec.network.bias:
        return False
    hidden = [fan_out for fan_out, _ in spec.layer_shapes[:-1]]
    return (
        all(width in widths for width in hidden)
        and spec.layer_shapes[0][1] <= MAX_FAN_IN
        and spec.layer_shapes[-1][0] <= MAX_FAN_OUT
    )


class SwizzledAllocator:
    """Swizzled tiles one after the other."""

    def __init__(self):
        self.end = 0

    def tile(self, name: str, rows: int, columns: int) -> SwizzledTile:
        tile = SwizzledTile(name, rows, columns, self.end)
        self.end = round_up(tile.end, SWIZZLE_ALIGNMENT)
        return tile


def swizzled_weight_tiles(spec: ModelSpec, allocate: SwizzledAllocator) -> NetworkTiles:
    return NetworkTiles(tuple(allocate.tile(f"W{i}", *shape) for i, shape in enumerate(spec.layer_shapes)), True)


def _ranked(candidates: list[tuple[KernelPlan, int]], chip: Architecture, enough_warps: int) -> list[KernelPlan]:
    """Those that fit, best first. A plan of several blocks appears with fewer later, where its registers spill."""
    ranked = []
    for plan, registers in candidates:
        fits_registers = registers <= min(MAX_REGISTERS, REGISTERS_PER_MULTIPROCESSOR // plan.threads)
        if plan.shared_bytes > chip.shared_per_block or not fits_registers:
            continue
        for blocks in range(max(1, blocks_that_fit(plan, registers, chip)), 0, -1):
            busy = min(blocks * plan.warps, enough_warps)
            ranked.append(((busy, plan.remembers_in_registers, plan.warps), with_blocks(plan, blocks)))
    ranked.sort(key=lambda entry: entry[0], reverse=True)
    return [plan for _, plan in ranked]


def warpgroup_inference_plans(spec: ModelSpec, chip: Architecture, dtype: str = "float16") -> list[KernelPlan]:
    if not (fits_warpgroups(spec, chip, dtype, WIDE) and nests(spec, ROWS, ways=1)):
        return []
    candidates = []
    for groups in (1, 2) if fits_warpgroups(spec, chip) else (1, 2, 3):
        allocate, warps = SwizzledAllocator(), WARPGROUP * groups
        weights = swizzled_weight_tiles(spec, allocate)
        x = allocate.tile("x", warps * ROWS, round_up(spec.encoding_width, TENSOR_CORE_WIDTH))
        registers = fragment_registers(spec, ROWS) - 8  # no addresses of gradients
        candidates.append((KernelPlan("inference", warps, ROWS, 1, weights, x), registers))
    return _ranked(candidates, chip, chip.max_warps)


def _weight_gradient(d: SwizzledTile, h: SwizzledTile, offset: int, groups: int) -> WeightGradient:
    """By wgmma where one side of dW is as wide as a warpgroup's product; else its warps divide dW as far as it goes,
    and the warpgroup's samples beyond."""
    if WARPGROUP_ROWS in (d.columns, h.columns):
        return WeightGradient(d, h, offset, WARPGROUP, 1, groups, transposed=d.columns != WARPGROUP_ROWS)
    divisions = [
        WeightGradient(d, h, offset, warp_rows, warp_columns, groups * WARPGROUP // (warp_rows * warp_columns))
        for warp_rows, warp_columns in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1))
        if d.divides(warp_rows) and h.divides(warp_columns)
    ]
    return min(divisions, key=lambda division: division.n_accumulators)


def _kept_registers(spec: ModelSpec) -> int:
    """Of hidden outputs while a layer is on its way back: all but its own, which is one of the product's operands; less
    ten for addresses that spill first, outside of the loop."""
    outputs = [FragmentShape(ROWS, fan_out).n_packed for fan_out, _ in spec.layer_shapes[:-1]]
    return max(0, sum(outputs) - max(outputs) - 10)


def warpgroup_single_plans(
    spec: ModelSpec, chip: Architecture, *, encoding_gradient: bool, dtype: str = "float16"
) -> list[KernelPlan]:
    """Candidates for one persistent gradient kernel; empty where dW does not fit the registers."""
    if not (fits_warpgroups(spec, chip, dtype) and nests(spec, ROWS, ways=2)):
        return []
    n_hidden = len(spec.layer_shapes) - 1
    candidates = []
    for groups, in_registers in itertools.product((3, 2, 1), (True, False) if n_hidden else (False,)):
        allocate, tile_rows = SwizzledAllocator(), groups * WARPGROUP_ROWS
        weights = swizzled_weight_tiles(spec, allocate)
        x = allocate.tile("x", tile_rows, spec.encoding_width)
        h = tuple(allocate.tile(f"h{i + 1}", tile_rows, spec.layer_shapes[i][0]) for i in range(n_hidden))
        d = tuple(allocate.tile(f"d{i + 1}", tile_rows, fan_out) for i, (fan_out, _) in enumerate(spec.layer_shapes))
        dx = allocate.tile("dx", tile_rows, spec.encoding_width) if encoding_gradient else None
        layers = tuple(
            _weight_gradient(*pair, offset, groups)
            for *pair, offset in zip(d, (x, *h), layer_offsets(spec), strict=True)
        )
        plan = KernelPlan(
            "single", WARPGROUP * groups, ROWS, 1, weights, x, dx, h, d, layers, remembers_in_registers=in_registers
        )
        kept = _kept_registers(spec) if in_registers else 0
        candidates.append((plan, n_accumulators(layers) + fragment_registers(spec, ROWS) + kept))
    return _ranked(candidates, chip, ENOUGH_WARPS)
