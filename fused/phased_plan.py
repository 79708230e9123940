"""Phased plans: gradients of networks too wide for all of dW to fit the registers, by one kernel on wgmma (sm_90a).

A block has two phases. It *propagates* its tiles of a chunk of the batch, forward and back, and saves activations and
gradients to a piece of global memory of its own (`saved_images.py`); then it sums dW of one layer after the other from
them, the layer's dW in registers, and adds it to the block's row of partial sums. No other block reads what it saves,
so nothing waits for anything but the block's own barriers, and a chunk is one launch. To go from chunk to chunk inside
of a kernel would keep addresses of both phases in registers all the time, too many.

What is saved and read again is what bounds them. So dW of as many of the last layers as registers and shared memory
hold is summed in the first phase already, tile by tile (`summed_layers.py`), and nothing of them is saved; of two
hidden layers that is all.

Shared memory holds weights, features and what the summed layers need in the first phase, pairs of images on their way
to wgmma in the second. Two warpgroups share the 128 rows of dW, or of dW^T.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs import ModelSpec, round_up
from .mlp import WeightGradient, n_accumulators
from .plan import Architecture, KernelPlan, keeps_gate, layer_offsets, nests
from .swizzled_tile import SWIZZLE_ALIGNMENT, SwizzledTile
from .warpgroup_mlp import WARPGROUP_ROWS
from .warpgroup_plan import ROWS, SwizzledAllocator, swizzled_weight_tiles
from .wgmma import WARPGROUP

GROUPS = 2
"""Warpgroups of a block."""

DW_ROWS = GROUPS * WARPGROUP_ROWS
STAGES = 4
"""Pairs of images that shared memory holds: one is multiplied, the others are on their way."""

MAX_SUMS, MAX_SUMS_BESIDE_SAVED_LAYERS = 136, 80
"""Registers of dW beside those that a tile on its way needs: more where layers are saved, with operands in registers
and addresses of images."""

PANEL = 64  # columns; narrower tiles than half of it have shorter rows


@dataclass(frozen=True)
class PhasedPlan(KernelPlan):
    """As a single plan; but `layers` are those whose dW is summed in the second phase, the first ones, and tiles `h`
    and `d` are those of the first stage's images, a pair a layer, in memory that the first phase uses otherwise.

    stages   pairs of images; stage s of a layer begins s times the pair's bytes further
    summed   the other layers, whose dW is summed in the first phase; d of all but the last stands where h of the next
             one did
    """

    stages: int = 2
    summed: tuple[WeightGradient, ...] = ()

    def pair_bytes(self, layer: int) -> int:
        return self.d[layer].n_bytes + self.h[layer].n_bytes

    @property
    def keeps_x(self) -> bool:
        """Whether the x tile is read until the tile's end."""
        return not self.layers

    @property
    def x_is_shared(self) -> bool:
        """Whether the x tile is one of h's tiles too."""
        return any(layer.h.offset == self.x.offset for layer in self.summed) and not self.keeps_x

    @property
    def tiles(self) -> tuple[SwizzledTile, ...]:
        own = dict.fromkeys(tile for layer in self.summed for tile in (layer.h, layer.d))
        return (*super().tiles, *(tile for tile in own if tile != self.x))

    @property
    def shared_end(self) -> int:
        pairs = self.stages * max((self.pair_bytes(layer) for layer in range(len(self.layers))), default=0)
        return max(super().shared_end, pairs)

    def describe(self) -> str:
        text = super().describe()
        return f"{text}, dW of {len(self.summed)} layers at once" if self.summed else text


def fits_phases(spec: ModelSpec, chip: Architecture, dtype: str) -> bool:
    """Whether each layer has a side of 128, and none is wider."""
    if chip.cc != 90 or dtype != "float16" or spec.network is None or spec.network.bias:
        return False
    return nests(spec, ROWS, ways=2) and all(max(shape) == DW_ROWS for shape in spec.layer_shapes)


def phased_plans(
    spec: ModelSpec, chip: Architecture, *, encoding_gradient: bool, dtype: str = "float16"
) -> list[PhasedPlan]:
    """Candidates: with as many layers summed at once as fit, x standing apart if it can, then with none; no plan where
    weights don't fit."""
    if not fits_phases(spec, chip, dtype):
        return []
    n_layers, sharing = len(spec.layer_shapes), (False, True)
    for n_summed in range(n_layers if can_sum_at_once(spec) else 0, 0, -1):
        for shares_x in sharing if n_summed < n_layers and can_share_x(spec, n_layers - n_summed) else sharing[:1]:
            plan = _phased_plan(spec, n_summed, shares_x=shares_x, encoding_gradient=encoding_gradient)
            room = MAX_SUMS_BESIDE_SAVED_LAYERS if plan.layers else MAX_SUMS
            if plan.shared_bytes <= chip.shared_per_block and n_accumulators(plan.summed) <= room:
                return [plan, *_saving_plans(spec, chip, encoding_gradient=encoding_gradient)]
    return _saving_plans(spec, chip, encoding_gradient=encoding_gradient)


def _saving_plans(spec: ModelSpec, chip: Architecture, *, encoding_gradient: bool) -> list[PhasedPlan]:
    plan = _phased_plan(spec, 0, shares_x=False, encoding_gradient=encoding_gradient)
    return [plan] if plan.shared_bytes <= chip.shared_per_block else []


def can_share_x(spec: ModelSpec, layer: int) -> bool:
    """Whether the input of a layer may stand where x did: rows are as long, so a warp's are in the same place."""
    return min(spec.encoding_width, spec.layer_shapes[layer][1]) > PANEL // 2


def can_sum_at_once(spec: ModelSpec) -> bool:
    """Whether the stages of `summed_layers.py` are made for the network."""
    narrow = spec.layer_shapes[-1][0] <= WARPGROUP_ROWS
    return narrow and not keeps_gate(spec) and list(spec.logical_layer_shapes[:-1]) == list(spec.layer_shapes[:-1])


def _phased_plan(spec: ModelSpec, n_summed: int, *, shares_x: bool, encoding_gradient: bool) -> PhasedPlan:
    allocate, n_layers = SwizzledAllocator(), len(spec.layer_shapes)
    weights = swizzled_weight_tiles(spec, allocate)
    offsets, n_saved = layer_offsets(spec), n_layers - n_summed
    fan_ins = [fan_in for _, fan_in in spec.layer_shapes]
    x = None if shares_x else allocate.tile("x", DW_ROWS, spec.encoding_width)
    h = [allocate.tile(f"h{i}", DW_ROWS, fan_ins[i]) for i in range(max(n_saved, 1), n_layers)] if n_summed else []
    if x is None:
        x = SwizzledTile("x", DW_ROWS, spec.encoding_width, h[0].offset)
        allocate.end = max(allocate.end, round_up(x.end, SWIZZLE_ALIGNMENT))
    h = h if n_saved else [x, *h]
    d = [*h[1:], allocate.tile("d", DW_ROWS, spec.layer_shapes[-1][0])] if n_summed else []
    summed = tuple(_shared_rows(*pair, offset) for *pair, offset in zip(d, h, offsets[n_saved:], strict=True))
    pairs = [_pair_of_images(*shape) for shape in spec.layer_shapes[:n_saved]]
    layers = tuple(_shared_rows(*pair, offset) for pair, offset in zip(pairs, offsets, strict=False))
    return PhasedPlan(
        "phased", GROUPS * WARPGROUP, ROWS, 1, weights, x, x if encoding_gradient else None,
        tuple(h for _, h in pairs), tuple(d for d, _ in pairs), layers, stages=STAGES, summed=summed,
    )  # fmt: skip


def _pair_of_images(fan_out: int, fan_in: int) -> tuple[SwizzledTile, SwizzledTile]:
    pair = SwizzledAllocator()
    return pair.tile("d", WARPGROUP_ROWS, fan_out), pair.tile("h", WARPGROUP_ROWS, fan_in)


def _shared_rows(d: SwizzledTile, h: SwizzledTile, offset: int) -> WeightGradient:
    return WeightGradient(d, h, offset, GROUPS * WARPGROUP, 1, 1, transposed=d.columns != DW_ROWS)
