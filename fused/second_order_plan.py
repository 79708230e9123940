"""Plans of the second-order kernel: that of the gradient kernel, each tile of activations with a twin for tangents.

One persistent kernel, weights resident, dW in registers. Twice the tiles leave room for fewer samples, so the gradient
of the features takes the place of the features, which dW has read before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..engines import EngineUnavailable
from ..specs import TENSOR_CORE_WIDTH, CompositeSpec, EncodingSpec, GridSpec, ModelSpec, round_up
from .mlp import WeightGradient, n_accumulators
from .plan import (
    MAX_REGISTERS,
    Allocator,
    Architecture,
    KernelPlan,
    NetworkTiles,
    PlanError,
    describe_shapes,
    divide_weight_gradients,
    format_for,
    layer_offsets,
    ranked,
)
from .tiles import Tile

SHAPES = ((8, 32), (4, 32), (2, 32), (8, 16), (4, 16), (2, 16))
"""Warps of a block and samples a warp."""

STAGE_REGISTERS = 60
"""For addresses and the encoding's duals, beside a product and dW; with less, kernels were seen to spill."""


@dataclass(frozen=True)
class SecondOrderPlan(KernelPlan):
    """A kernel plan of kind "second order". Twins hold tangents, and `dx` is where `x` was.

    x_twin, dx_twin, h_twins, d_twins   of the tiles of those names
    """

    x_twin: Tile | None = None
    dx_twin: Tile | None = None
    h_twins: tuple[Tile, ...] = ()
    d_twins: tuple[Tile, ...] = ()

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return (*super().tiles, *(t for t in (self.x_twin, self.dx_twin) if t), *self.h_twins, *self.d_twins)

    @property
    def tangent_products(self) -> tuple[tuple[WeightGradient, ...], tuple[WeightGradient, ...]]:
        """The tangent of dW = d^T h, which is d'^T h + d^T h', as two sums into the accumulators of `layers`."""
        twin = dict(zip((self.x, *self.h, *self.d), (self.x_twin, *self.h_twins, *self.d_twins), strict=True))
        return (
            tuple(replace(layer, d=twin[layer.d]) for layer in self.layers),
            tuple(replace(layer, h=twin[layer.h]) for layer in self.layers),
        )


def second_order_plans(spec: ModelSpec, chip: Architecture, dtype: str = "float16") -> list[SecondOrderPlan]:
    """Candidates, best first. Raises PlanError where there are none."""
    n_planes = format_for(dtype, chip).n_planes
    refuse_second_order(spec)
    make = _encoding_plan if spec.network is None else _network_plan
    candidates = [made for warps, rows in SHAPES if (made := make(spec, warps, rows, n_planes)) is not None]
    plans = [replace(plan, dtype=dtype) for plan in ranked(candidates, chip)]
    if not plans:
        raise PlanError(
            f"no fused kernel of second derivatives in {dtype} fits {describe_shapes(spec)} into "
            f"{chip.shared_per_block // 1024} KiB of shared memory and {MAX_REGISTERS} registers a thread"
        )
    return plans


def refuse_second_order(spec: ModelSpec) -> None:
    """Raises EngineUnavailable, naming what has no fused second derivatives, before anything is compiled."""
    if spec.network is not None and spec.network.bias:
        raise EngineUnavailable("second derivatives of networks with biases have no fused kernel yet")
    if has_options_of_first_order(spec.encoding):
        raise EngineUnavailable(
            "second derivatives of grids with stochastic_interpolation or fixed_point_pos have no fused kernel yet"
        )


def has_options_of_first_order(encoding: EncodingSpec) -> bool:
    """Whether a grid has options that second derivatives don't know."""
    if isinstance(encoding, CompositeSpec):
        return any(has_options_of_first_order(child.encoding) for child in encoding.nested)
    return isinstance(encoding, GridSpec) and (encoding.stochastic_interpolation or encoding.fixed_point_pos)


def _encoding_plan(spec: ModelSpec, warps: int, rows: int, n_planes: int) -> tuple[SecondOrderPlan, int] | None:
    width = round_up(spec.encoding_width, TENSOR_CORE_WIDTH)
    registers = rows * width // 32 + _packed(rows * width, n_planes) + 40
    if registers > MAX_REGISTERS:
        return None
    x, twin = _pair(Allocator(n_planes), "x", warps * rows, width)
    tiles = {"x": x, "x_twin": twin, "dx": replace(x, name="dx"), "dx_twin": replace(twin, name="dx'")}
    return SecondOrderPlan("second order", warps, rows, 1, **tiles), registers


def _network_plan(spec: ModelSpec, warps: int, rows: int, n_planes: int) -> tuple[SecondOrderPlan, int] | None:
    shapes, allocate, tile_rows = spec.layer_shapes, Allocator(n_planes), warps * rows
    weights = tuple(allocate.tile(f"W{i}", *shape) for i, shape in enumerate(shapes))
    x, x_twin = _pair(allocate, "x", tile_rows, spec.encoding_width)
    h = [_pair(allocate, f"h{i + 1}", tile_rows, fan_out) for i, (fan_out, _) in enumerate(shapes[:-1])]
    d = [_pair(allocate, f"d{i + 1}", tile_rows, fan_out) for i, (fan_out, _) in enumerate(shapes)]
    registers = _fragment_registers(spec, rows, n_planes)
    pairs = list(zip((tile for tile, _ in d), (x, *(tile for tile, _ in h)), strict=True))
    layers = divide_weight_gradients(pairs, layer_offsets(spec), warps, MAX_REGISTERS - 15 - registers)
    if layers is None:
        return None
    plan = SecondOrderPlan(
        "second order", warps, rows, 1, NetworkTiles(weights, True), x, replace(x, name="dx"),
        tuple(tile for tile, _ in h), tuple(tile for tile, _ in d), layers,
        x_twin=x_twin, dx_twin=replace(x_twin, name="dx'"), h_twins=tuple(twin for _, twin in h),
        d_twins=tuple(twin for _, twin in d),
    )  # fmt: skip
    return plan, registers + n_accumulators(layers) + STAGE_REGISTERS


def _pair(allocate: Allocator, name: str, rows: int, columns: int) -> tuple[Tile, Tile]:
    return allocate.tile(name, rows, columns), allocate.tile(f"{name}'", rows, columns)


def _packed(n_values: int, n_planes: int) -> int:
    """Registers of a packed fragment."""
    return n_values // (32 if n_planes > 1 else 64)


def _fragment_registers(spec: ModelSpec, rows: int, n_planes: int) -> int:
    """Of two packed operands and two float32 results of the widest product of duals, and addresses. The features'
    gradient and its tangent are computed one after the other."""
    (first, features), *others = spec.layer_shapes
    products = [(features, first), (first, features // 2), *((i, o) for o, i in others), *others]
    widest = max(2 * _packed(rows * operand, n_planes) + rows * result // 16 for operand, result in products)
    return widest + 24 + 40 * (n_planes - 1)
