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

import functools
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

MAX_SUMS = 136
"""Registers of dW beside those that a tile on its way needs; `BESIDE_PACKED` where products of layers that are saved
have an operand in registers, or d goes on to an encoding as one."""

BESIDE_PACKED = 80
DEEPEST = 5
"""Layers of the deepest network for whose `MAX_SUMS` registers suffice; each further one keeps two for its way back."""

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

    def transit(self, columns: int) -> SwizzledTile:
        """The tile in which the first layers hand on h and d of their own rows, where h of the last layer stands in
        between."""
        return SwizzledTile("transit", DW_ROWS, columns, self.summed[-1].h.offset)

    @property
    def hands_on_packed(self) -> bool:
        """... if they do: with fewer layers summed, registers are left for that, and barriers saved."""
        return n_accumulators(self.summed) <= BESIDE_PACKED

    def input_tile(self, layer: int) -> SwizzledTile:
        """Where products of the first phase find a layer's h_in, if any dW is summed then."""
        if layer == 0:
            return self.x
        n_saved = len(self.layers)
        return self.summed[layer - n_saved].h if layer >= n_saved else self.transit(self.h[layer].columns)

    def gradient_tile(self, layer: int) -> SwizzledTile:
        """... and d of its z."""
        n_saved = len(self.layers)
        return self.summed[layer - n_saved].d if layer >= n_saved else self.transit(self.d[layer].columns)

    @property
    def lends(self) -> bool:
        """Whether h of the first summed layer takes the place of W_0, which is read again for every tile."""
        return bool(self.summed) and self.summed[0].h.offset == self.weights.weights[0].offset

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
    """Candidates: with as many layers summed at once as fit, x and h standing apart if they can, then with fewer, in
    the end with none; no plan where weights don't fit."""
    if not fits_phases(spec, chip, dtype):
        return []
    plans = []
    for n_summed in range(len(spec.layer_shapes) if can_sum_at_once(spec) else 0, 0, -1):
        candidates = summing_plans(spec, n_summed, encoding_gradient=encoding_gradient)
        plans += [plan for plan in candidates if plan.shared_bytes <= chip.shared_per_block][:1]
    saving = _phased_plan(spec, 0, encoding_gradient=encoding_gradient)
    return [*plans, *([saving] if saving.shared_bytes <= chip.shared_per_block else [])]


def summing_plans(spec: ModelSpec, n_summed: int, *, encoding_gradient: bool) -> list[PhasedPlan]:
    """With the last layers summed at once, the more shared memory the earlier; none where registers don't suffice."""
    plan = functools.partial(_phased_plan, spec, n_summed, encoding_gradient=encoding_gradient)
    n_layers, n_sums = len(spec.layer_shapes), n_accumulators(plan().summed)
    if n_summed == n_layers:
        return [plan()] if n_sums <= MAX_SUMS else []
    if n_sums > BESIDE_PACKED:
        if n_sums + 2 * n_layers > MAX_SUMS + 2 * DEEPEST or encoding_gradient or not can_hand_on(spec):
            return []
    lending = (False, True) if can_lend(spec, n_summed, encoding_gradient=encoding_gradient) else (False,)
    sharing = (False, True) if spec.encoding_width > PANEL // 2 else (False,)
    return [plan(lends=lends, shares_x=shares_x) for lends in lending for shares_x in sharing]


def can_hand_on(spec: ModelSpec) -> bool:
    """Whether hidden h and d may stand where others did without a barrier of the block: tiles are as large and rows as
    long, so a warp's are in the same place."""
    return all(fan_in > PANEL for _, fan_in in spec.layer_shapes[1:])


def can_lend(spec: ModelSpec, n_summed: int, *, encoding_gradient: bool) -> bool:
    """Whether h of the first summed layer fits the place of W_0, and that is of no use behind the first product."""
    (fan_out, first_fan_in), (_, fan_in) = spec.layer_shapes[0], spec.layer_shapes[-n_summed]
    return n_summed > 1 and not encoding_gradient and fan_in <= first_fan_in and fan_out == DW_ROWS


def can_sum_at_once(spec: ModelSpec) -> bool:
    """Whether the stages of `summed_layers.py` are made for the network."""
    narrow = spec.layer_shapes[-1][0] <= WARPGROUP_ROWS
    return narrow and not keeps_gate(spec) and list(spec.logical_layer_shapes[:-1]) == list(spec.layer_shapes[:-1])


def _phased_plan(
    spec: ModelSpec, n_summed: int, *, shares_x: bool = False, lends: bool = False, encoding_gradient: bool
) -> PhasedPlan:
    allocate, n_layers = SwizzledAllocator(), len(spec.layer_shapes)
    weights = swizzled_weight_tiles(spec, allocate)
    offsets, n_saved = layer_offsets(spec), n_layers - n_summed
    fan_ins = [fan_in for _, fan_in in spec.layer_shapes]
    x = None if shares_x else allocate.tile("x", DW_ROWS, spec.encoding_width)
    h = []
    for i in range(max(n_saved, 1), n_layers if n_summed else 0):
        if lends and i == n_saved:
            h.append(SwizzledTile(f"h{i}", DW_ROWS, fan_ins[i], weights.weights[0].offset))
        else:
            h.append(allocate.tile(f"h{i}", DW_ROWS, fan_ins[i]))
    if x is None:
        x = SwizzledTile("x", DW_ROWS, spec.encoding_width, h[-1].offset)
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
