"""Kernel plans: how a model's work is laid out on a chip. Pure Python, a function of specs, architecture and options.

A block of `warps` warps takes tiles of `warps * rows` samples, each warp its own `rows` of them. Here is what plans are
made of: chips, tiles in shared memory, registers, and how dW is divided among warps. `network_plans.py` makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..engines import EngineUnavailable
from ..layout import bias_blocks
from ..specs import TENSOR_CORE_WIDTH, ModelSpec, round_up
from .activations import ACTIVATIONS, STRAIGHT
from .formats import FORMATS, NumberFormat, number_format
from .mlp import PIECE_BYTES, WeightGradient, n_accumulators, shares_within
from .swizzled_tile import SWIZZLE_ALIGNMENT, SwizzledTile
from .tiles import SHARED_ALIGNMENT, AnyTile, Tile

MAX_REGISTERS = 255
REGISTERS_PER_MULTIPROCESSOR = 65536
RESERVED_SHARED_BYTES = 1024  # the driver's own, a block
PREFETCHED_BYTES = 4
MAX_NESTED_LAYERS = 17
"""Layers that are closures around one another: Numba follows some 40 calls into one another, and what compiles grows
with each. Deeper networks go layer by layer (`layer_plan.py`)."""
MAX_CURVED_ACTIVATIONS = 1024
"""Values and derivatives of hidden activations with exponentials, roots or the like that a lane computes of a tile:
each stands in the code by itself. So many compile in 10 to 15 s, in float32 in 20 s."""


class PlanError(EngineUnavailable):
    """No plan fits: says what would be needed."""


@dataclass(frozen=True)
class Architecture:
    """What a plan must know of a chip. Sizes in bytes."""

    cc: int  # 75, 80, 86, 89, 90, 100, 120
    shared_per_block: int
    shared_per_multiprocessor: int
    max_warps: int

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.cc, 10)

    def fits_twice(self, shared_bytes: int) -> bool:
        """Whether a multiprocessor has room for two blocks of so much shared memory."""
        return 2 * (shared_bytes + RESERVED_SHARED_BYTES) <= self.shared_per_multiprocessor


_KIB = 1024
_ARCHITECTURES = (
    Architecture(75, 64 * _KIB, 64 * _KIB, 32),
    Architecture(80, 163 * _KIB, 164 * _KIB, 64),
    Architecture(86, 99 * _KIB, 100 * _KIB, 48),
    Architecture(89, 99 * _KIB, 100 * _KIB, 48),
    Architecture(90, 227 * _KIB, 228 * _KIB, 64),
    Architecture(100, 227 * _KIB, 228 * _KIB, 64),
    Architecture(120, 99 * _KIB, 100 * _KIB, 48),
)


def nests(spec: ModelSpec, rows: int, *, ways: int, n_planes: int = 1) -> bool:
    """Whether a kernel of all layers, for `rows` samples a warp, compiles in bearable time. In float32 the smallest
    tiles always do, as there are no kernels that go layer by layer.

    ways   1: forward only; 2: and back
    """
    widths = [fan_out for fan_out, _ in spec.layer_shapes[:-1]]
    is_curved = spec.network is not None and spec.network.activation not in STRAIGHT
    curved_activations = ways * rows * sum(widths) // 32 if is_curved else 0
    is_smallest = n_planes > 1 and rows == TENSOR_CORE_WIDTH
    return len(widths) < MAX_NESTED_LAYERS and (is_smallest or curved_activations <= MAX_CURVED_ACTIVATIONS)


def architecture(capability: tuple[int, int]) -> Architecture:
    """The newest known architecture that is not newer than the device's compute capability."""
    cc = 10 * capability[0] + capability[1]
    known = [a for a in _ARCHITECTURES if a.cc <= cc]
    if not known:
        raise PlanError(f"compute capability {capability[0]}.{capability[1]} has no usable tensor cores; 7.5 is needed")
    return known[-1]


@dataclass(frozen=True)
class NetworkTiles:
    """Weight tiles of all layers, in layer order. Resident: all at once; else they share one place in turn."""

    weights: tuple[AnyTile, ...]
    resident: bool

    @property
    def end(self) -> int:
        return max((tile.end for tile in self.weights), default=0)


@dataclass(frozen=True)
class KernelPlan:
    """One kernel's layout.

    kind               what the kernel is for: "inference", "single", "propagate", "weight gradient", ...
    warps, rows        of a block; samples a warp
    min_blocks         blocks a multiprocessor shall hold: caps the registers
    weights            weight tiles
    x, dx              tiles of the encoding's output and of its gradient ([tile_rows, encoding_width])
    h, d               tiles of hidden outputs h_1..h_n and of gradients of z_1..z_n, z_out (single plans), or one of
                       each (weight gradient)
    layers             who sums dW (single: all layers; weight gradient: one layer)
    copied_ahead       whether features are copied to the x tile as they stand, asynchronously and a tile ahead
                       (copied_features.py)
    next_x             x's twin (single plans, copied ahead): while dW is summed from one, the other fills
    remembers_in_registers   whether what the way back needs of hidden layers stays in registers (single plans), or is
                       read from its tile again
    dtype              whose number format values are stored in
    """

    kind: str
    warps: int
    rows: int
    min_blocks: int
    weights: NetworkTiles | None = None
    x: AnyTile | None = None
    dx: AnyTile | None = None
    h: tuple[AnyTile, ...] = ()
    d: tuple[AnyTile, ...] = ()
    layers: tuple[WeightGradient, ...] = ()
    remembers_in_registers: bool = False
    dtype: str = "float16"
    copied_ahead: bool = False
    next_x: AnyTile | None = None

    @property
    def swizzled(self) -> bool:
        """Whether tiles have wgmma's layout, and its instructions multiply."""
        return any(isinstance(tile, SwizzledTile) for tile in self.tiles)

    @property
    def shared_alignment(self) -> int:
        """Of the address that tiles' offsets count from."""
        return SWIZZLE_ALIGNMENT if self.swizzled else SHARED_ALIGNMENT

    @property
    def exchange(self) -> str:
        """Who must have written a tile's samples before dW can be summed: see `make_exchange`."""
        return shares_within(self.layers) if self.swizzled else "block"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_rows(self) -> int:
        return self.warps * self.rows

    @property
    def tiles(self) -> tuple[AnyTile, ...]:
        weights = self.weights.weights if self.weights else ()
        return (*weights, *(t for t in (self.x, self.next_x, self.dx) if t), *self.h, *self.d)

    @property
    def shared_end(self) -> int:
        """Where the last tile ends."""
        return max(tile.end for tile in self.tiles)

    @property
    def prefetches(self) -> bool:
        """Whether each tile's inputs and targets are brought closer while the one before is worked on."""
        return self.swizzled and self.kind in ("single", "phased")

    @property
    def scratch(self) -> int:
        """Where what a prefetch brings to shared memory lies, a word a thread; nobody reads it."""
        return max(self.shared_end, self._reduction_bytes)

    @property
    def shared_bytes(self) -> int:
        scratch_bytes = PREFETCHED_BYTES * self.threads if self.prefetches else 0
        return self.scratch + scratch_bytes + self.shared_alignment - SHARED_ALIGNMENT

    @property
    def _reduction_bytes(self) -> int:
        """What sums over warps at the end of a kernel need at least, from byte 0 on."""
        divided = any(layer.sample_parts > 1 for layer in self.layers)
        return PIECE_BYTES * self.threads if divided else 4 * self.warps

    def describe(self) -> str:
        text = f"{self.kind}, {self.warps} warps x {self.rows} samples"
        if self.dtype != "float16":
            text += f", {self.dtype}"
        if self.weights and not self.weights.resident:
            text += ", weights streamed"
        if self.swizzled:
            text += ", wgmma"
        if self.copied_ahead:
            text += ", features copied ahead"
        return text


@dataclass(frozen=True)
class StagedPlan:
    """A propagate kernel and one weight-gradient kernel a distinct layer shape."""

    propagate: KernelPlan
    weight_gradients: tuple[tuple[KernelPlan, tuple[int, ...]], ...]  # (plan, layers of that shape)


class Allocator:
    """Tiles one after the other, of `n_planes` numbers a value."""

    def __init__(self, n_planes: int):
        self.end, self.n_planes = 0, n_planes

    def tile(self, name: str, rows: int, columns: int) -> Tile:
        tile = Tile(name, rows, columns, self.end, self.n_planes)
        self.end = -(-tile.end // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        return tile


def _widest(spec: ModelSpec) -> int:
    return max((max(shape) for shape in spec.layer_shapes), default=round_up(spec.encoding_width, TENSOR_CORE_WIDTH))


def fragment_registers(spec: ModelSpec, rows: int, n_planes: int = 1) -> int:
    """Registers of a product: packed operand and float32 result of the widest layer, other operands and addresses."""
    result = rows * _widest(spec) // 32
    packed = result if n_planes > 1 else result // 2
    return packed + result + 40 + 40 * (n_planes - 1)


def format_for(dtype: str, chip: Architecture) -> NumberFormat:
    """The dtype's number format. Raises EngineUnavailable where there is none, or the chip can't multiply it."""
    found = number_format(dtype)
    if chip.cc < found.min_cc:
        needed, have = divmod(found.min_cc, 10), chip.capability
        raise PlanError(
            f"{dtype} kernels need compute capability {needed[0]}.{needed[1]}, whose tensor cores multiply bfloat16; "
            f"{have[0]}.{have[1]} has float16 only"
        )
    return found


def dtypes_of(capability: tuple[int, int]) -> tuple[str, ...]:
    """The dtypes that a device of this compute capability can run fused models in."""
    chip = architecture(capability)
    return tuple(dtype for dtype, known in FORMATS.items() if chip.cc >= known.min_cc)


def blocks_that_fit(plan: KernelPlan, registers: int, chip: Architecture) -> int:
    by_shared = chip.shared_per_multiprocessor // (plan.shared_bytes + RESERVED_SHARED_BYTES)
    by_registers = REGISTERS_PER_MULTIPROCESSOR // (plan.threads * min(MAX_REGISTERS + 1, -(-registers // 8) * 8))
    return min(by_shared, by_registers, chip.max_warps // plan.warps)


def ranked(candidates: list[tuple[KernelPlan, int]], chip: Architecture) -> list[KernelPlan]:
    """Plans that fit, by the warps they keep busy; a warp of 32 samples counts a quarter more than one of 16, since it
    reads each weight once for twice the work. Each appears with fewer blocks later, where its registers spill."""
    ranked = []
    for plan, registers in candidates:
        if plan.shared_bytes > chip.shared_per_block:
            continue
        blocks = max(1, blocks_that_fit(plan, registers, chip))
        for fewer in range(blocks, 0, -1):
            score = min(fewer * plan.warps, 16) * (1.25 if plan.rows == 32 else 1.0)
            ranked.append((score, plan.rows, with_blocks(plan, fewer)))
    ranked.sort(key=lambda entry: entry[:2], reverse=True)
    return [plan for _, _, plan in ranked]


def with_blocks(plan: KernelPlan, min_blocks: int) -> KernelPlan:
    return replace(plan, min_blocks=min_blocks)


def describe_shapes(spec: ModelSpec) -> str:
    if spec.network is None:
        return f"an encoding of width {spec.encoding_width}"
    return "layers of " + ", ".join(f"{fan_out}x{fan_in}" for fan_out, fan_in in spec.layer_shapes)


# ---------------------------------------------------------------------------------------------- weight gradients


def _splits(
    d: Tile, h: Tile, n_warps: int, parameter_offset: int, bias_offset: int | None = None
) -> list[WeightGradient]:
    """All ways to divide one layer's dW among the warps of a block."""
    options = []
    for warp_rows, warp_columns in itertools.product((1, 2, 4, 8), repeat=2):
        fits = warp_rows <= d.columns // 16 and warp_columns <= h.columns // 16
        if not fits or n_warps % (warp_rows * warp_columns):
            continue
        parts = n_warps // (warp_rows * warp_columns)
        if d.rows // 16 % parts == 0:
            options.append(WeightGradient(d, h, parameter_offset, warp_rows, warp_columns, parts, bias_offset))
    return options


def _traffic(layer: WeightGradient) -> float:
    """Shared-memory blocks that the warps read for one tile."""
    return (layer.row_blocks + layer.column_blocks) * layer.d.rows / 16 / layer.sample_parts * layer.n_warps


def divide_weight_gradients(
    pairs: list[tuple[Tile, Tile]],
    offsets: list[int],
    n_warps: int,
    budget: int,
    bias_offsets: Sequence[int] | None = None,
) -> tuple[WeightGradient, ...] | None:
    """The division with the least shared-memory traffic whose accumulators fit `budget` registers; None if none does.

    bias_offsets   of each layer's biases; None where there are none
    Starts from the fewest registers and spends what is left where a register saves most.
    """
    options = []
    for (d, h), offset, bias_offset in zip(pairs, offsets, bias_offsets or [None] * len(pairs), strict=True):
        choices = _splits(d, h, n_warps, offset, bias_offset)
        if not choices:
            return None
        options.append(sorted(choices, key=lambda c: (c.n_accumulators, _traffic(c))))
    chosen = [choices[0] for choices in options]
    if n_accumulators(tuple(chosen)) > budget:
        return None
    while True:
        spent = n_accumulators(tuple(chosen))
        best, best_gain = None, 0.0
        for i, choices in enumerate(options):
            for choice in choices:
                extra = choice.n_accumulators - chosen[i].n_accumulators
                saved = _traffic(chosen[i]) - _traffic(choice)
                if saved > 0 and spent + extra <= budget and saved / max(extra, 1) > best_gain:
                    best, best_gain = (i, choice), saved / max(extra, 1)
        if best is None:
            return tuple(chosen)
        chosen[best[0]] = best[1]


def fewest_accumulators(d: Tile, h: Tile, n_warps: int, *, has_bias: bool) -> int:
    """Of all divisions of one layer's dW among the warps of a block; 0 where there is none."""
    splits = _splits(d, h, n_warps, 0, 0 if has_bias else None)
    return min((split.n_accumulators for split in splits), default=0)


def layer_offsets(spec: ModelSpec) -> list[int]:
    offsets = [0]
    for fan_out, fan_in in spec.layer_shapes:
        offsets.append(offsets[-1] + fan_out * fan_in)
    return offsets[:-1]


def bias_offsets(spec: ModelSpec) -> list[int] | None:
    """Where each layer's biases stand in the parameter vector; None for a network that has none."""
    return [block.offset for block in bias_blocks(spec)] or None


def keeps_gate(spec: ModelSpec) -> bool:
    """Whether hidden layers keep phi' beside their output."""
    return not ACTIVATIONS[spec.network.activation].derivative_of_output
