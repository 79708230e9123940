"""Phased plans: gradients of networks too wide for all of dW to fit the registers, by one kernel on wgmma (sm_90a).

A block has two phases. It *propagates* its tiles of a chunk of the batch, forward and back, and saves activations and
gradients to a piece of global memory of its own (`saved_images.py`); then it sums dW of one layer after the other from
them, the layer's dW in registers, and adds it to the block's row of partial sums. No other block reads what it saves,
so nothing waits for anything but the block's own barriers, and a chunk is one launch. To go from chunk to chunk inside
of a kernel would keep addresses of both phases in registers all the time, too many.

Shared memory holds weights and features in the first phase, pairs of images on their way to wgmma in the second. Two
warpgroups share the 128 rows of dW, or of dW^T.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs import ModelSpec
from .mlp import WeightGradient
from .plan import MAX_NESTED_LAYERS, Architecture, KernelPlan, layer_offsets
from .warpgroup_mlp import WARPGROUP_ROWS
from .warpgroup_plan import ROWS, SwizzledAllocator, swizzled_weight_tiles
from .wgmma import WARPGROUP

GROUPS = 2
"""Warpgroups of a block."""

DW_ROWS = GROUPS * WARPGROUP_ROWS
STAGES = 4
"""Pairs of images that shared memory holds: one is multiplied, the others are on their way."""


@dataclass(frozen=True)
class PhasedPlan(KernelPlan):
    """As a single plan; but tiles `h` and `d` are those of the first stage's images, a pair a layer, in memory that
    the first phase uses otherwise.

    stages   pairs of images; stage s of a layer begins s times the pair's bytes further
    """

    stages: int = 2

    def pair_bytes(self, layer: int) -> int:
        return self.d[layer].n_bytes + self.h[layer].n_bytes

    @property
    def shared_bytes(self) -> int:
        pairs = self.stages * max(self.pair_bytes(layer) for layer in range(len(self.layers)))
        return max(super().shared_bytes, pairs + self.shared_alignment)


def fits_phases(spec: ModelSpec, chip: Architecture, dtype: str) -> bool:
    """Whether each layer has a side of 128, and none is wider."""
    if chip.cc != 90 or dtype != "float16" or spec.network is None or spec.network.bias:
        return False
    if len(spec.layer_shapes) > MAX_NESTED_LAYERS:
        return False
    return all(max(shape) == DW_ROWS for shape in spec.layer_shapes)


def phased_plans(
    spec: ModelSpec, chip: Architecture, *, encoding_gradient: bool, dtype: str = "float16"
) -> list[PhasedPlan]:
    """The one candidate; none where the weights don't fit shared memory."""
    if not fits_phases(spec, chip, dtype):
        return []
    allocate = SwizzledAllocator()
    weights = swizzled_weight_tiles(spec, allocate)
    x = allocate.tile("x", DW_ROWS, spec.encoding_width)
    h, d, layers = [], [], []
    for (fan_out, fan_in), offset in zip(spec.layer_shapes, layer_offsets(spec), strict=True):
        pair = SwizzledAllocator()
        d.append(pair.tile("d", WARPGROUP_ROWS, fan_out))
        h.append(pair.tile("h", WARPGROUP_ROWS, fan_in))
        transposed = fan_out != DW_ROWS
        layers.append(WeightGradient(d[-1], h[-1], offset, GROUPS * WARPGROUP, 1, 1, transposed=transposed))
    plan = PhasedPlan(
        "phased", GROUPS * WARPGROUP, ROWS, 1, weights, x, x if encoding_gradient else None,
        tuple(h), tuple(d), tuple(layers), stages=STAGES,
    )  # fmt: skip
    return [plan] if plan.shared_bytes <= chip.shared_per_block else []
