"""Plans that go layer by layer, for networks too wide or too deep for one kernel (`network_plans.py` has the others).

A chunk of the batch after the other, every matrix of a chunk stands in global memory, row-major in the model's dtype,
float16 or bfloat16:

    features X, hidden outputs h_l (and phi' where it can't be told from them), gradients d of two layers in turn, dX

Each product is a kernel of its own, in which a block computes a tile of the result from pieces of its operands in
shared memory, the next piece on its way while one is multiplied:

    forward          h_{l+1} = phi(h_l W^T + b)       activation, loss and derivative are taken of the accumulators
    backward         d_{l-1} = (d_l W) phi'           phi' from h_l, or as it was stored
    weight gradient  dW = d^T h, db = d^T 1           a part of the chunk's samples a block, summed from chunk to chunk

Sizes of layers are arguments, so that one kernel serves all of them: what compiles does not grow with the depth.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from ..specs import TENSOR_CORE_WIDTH, ModelSpec, round_up
from .mlp import WeightGradient
from .plan import Architecture, KernelPlan, PlanError, describe_shapes, format_for, keeps_gate
from .tiles import HALF, Tile

LAYER_BY_LAYER = "layer by layer"


@dataclass(frozen=True)
class ProductPlan:
    """One tiled product: operand [., K] times weights, of which `transposed` are read as they stand (d W), else W^T.

    A block's tile of the result has `warps * rows` samples and `columns` columns; `depth` of K are multiplied at a
    time, and two such pieces have room. The finished tile passes through the same memory. Matrices are stored in
    `dtype`.
    """

    kind: str
    warps: int
    rows: int
    columns: int
    depth: int
    transposed: bool
    min_blocks: int = 1
    dtype: str = "float16"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_rows(self) -> int:
        return self.warps * self.rows

    @property
    def operand(self) -> Tile:
        return Tile("operand", self.tile_rows, self.depth, 0)

    @property
    def weights(self) -> Tile:
        rows, columns = (self.depth, self.columns) if self.transposed else (self.columns, self.depth)
        return Tile("weights", rows, columns, self.operand.end)

    @property
    def piece_bytes(self) -> int:
        return self.weights.end

    @property
    def result(self) -> Tile:
        return Tile("result", self.tile_rows, self.columns, 0)

    @property
    def shared_bytes(self) -> int:
        return max(2 * self.piece_bytes, self.result.end)

    def describe(self) -> str:
        return f"{self.kind}, {self.warps} warps x {self.rows} samples x {self.columns} columns"


@dataclass(frozen=True)
class LayerGradientPlan:
    """dW in tiles of `side` x `side`, from `samples` rows of d and h at a time; two such pieces have room."""

    side: int
    samples: int
    biases: bool
    min_blocks: int = 1
    dtype: str = "float16"

    @property
    def d(self) -> Tile:
        return Tile("d", self.samples, self.side, 0)

    @property
    def h(self) -> Tile:
        return Tile("h", self.samples, self.side, self.d.end)

    @property
    def piece_bytes(self) -> int:
        return self.h.end

    @property
    def shared_bytes(self) -> int:
        return 2 * self.piece_bytes

    @property
    def layer(self) -> WeightGradient:
        """Who of the block's warps sums which part of a tile: 8 warps, or 4 where it has but 4 blocks of 16 x 16."""
        warp_rows, warp_columns = (2, 4) if self.side >= 64 else (2, 2)
        return WeightGradient(self.d, self.h, 0, warp_rows, warp_columns, 1, 0 if self.biases else None)

    @property
    def threads(self) -> int:
        return 32 * self.layer.n_warps

    def describe(self) -> str:
        return f"{LAYER_BY_LAYER}, weight gradient, {self.layer.n_warps} warps, tiles of {self.side} x {self.side}"


@dataclass(frozen=True)
class LayeredPlan:
    """encode    the tile where features stand, or their gradients, on their way to or from global memory
    forward     hidden layers; `output`, the last one, is as wide as it must be
    backward    and what follows is None for inference; features: dL/d(features)
    """

    encode: KernelPlan
    forward: ProductPlan
    output: ProductPlan
    backward: ProductPlan | None = None
    features: ProductPlan | None = None
    weight_gradient: LayerGradientPlan | None = None

    @property
    def tile_rows(self) -> int:
        """Samples of a tile of every product."""
        return self.forward.tile_rows


WARPS = 4
SIDES = (16, 32, 64, 128)


def _side(width: int, most: int) -> int:
    """Columns of a block's tile: no more than a matrix can fill."""
    return next((side for side in SIDES if width <= side), most)


def _widest(spec: ModelSpec) -> int:
    return max(max(shape) for shape in spec.layer_shapes)


def _sizes(spec: ModelSpec, chip: Architecture) -> list[tuple[int, int, int]]:
    """(rows, columns, depth) of hidden layers' products, the largest first: they read each operand fewer times, but
    two blocks of them must fit a multiprocessor, so that one computes while another waits. With biases or gates more
    registers are needed than there are for 128 columns."""
    most = 64 if spec.network.bias or keeps_gate(spec) else 128
    widest = max(spec.network.hidden_widths, default=16)
    sizes = []
    for rows, columns, depth in itertools.product((32, 16), (128, 64, 32, 16), (64, 32)):
        plan = ProductPlan("", WARPS, rows, columns, depth, transposed=False)
        if columns <= min(most, _side(widest, most)) and plan.shared_bytes <= chip.shared_per_block:
            sizes.append((rows, columns, depth))
    return sorted(sizes, key=lambda size: not chip.fits_twice(ProductPlan("", WARPS, *size, False).shared_bytes))


def _encode_plan(spec: ModelSpec, chip: Architecture, tile_rows: int, dtype: str) -> KernelPlan:
    """The widest block whose tile lets two of it on a multiprocessor, or else that fits at all."""
    width = round_up(spec.encoding_width, TENSOR_CORE_WIDTH)
    plans = []
    for warps, rows in ((4, 32), (4, 16), (2, 16), (1, 16)):
        x = Tile("x", warps * rows, width, 0)
        plan = KernelPlan(f"{LAYER_BY_LAYER}, encoding", warps, rows, 1, x=x, dx=x, dtype=dtype)
        if tile_rows % plan.tile_rows == 0 and plan.shared_bytes <= chip.shared_per_block:
            plans.append(plan)
    if not plans:
        raise PlanError(
            f"no fused kernel fits {describe_shapes(spec)}: 16 rows of an encoding of width {spec.encoding_width} "
            f"are more than {chip.shared_per_block // 1024} KiB of shared memory"
        )
    return next((plan for plan in plans if chip.fits_twice(plan.shared_bytes)), plans[0])


def _product(
    name: str, size: tuple[int, int, int], width: int, dtype: str, *, transposed: bool, most: int = 128
) -> ProductPlan:
    """For results of a width, if not as wide as those of hidden layers."""
    rows, columns, depth = size
    kind = f"{LAYER_BY_LAYER}, {name}"
    return ProductPlan(kind, WARPS, rows, min(columns, _side(width, most), most), depth, transposed, dtype=dtype)


def layered_gradient_plans(spec: ModelSpec, chip: Architecture, dtype: str = "float16") -> list[LayeredPlan]:
    """Candidates, best first; later ones have smaller tiles, whose registers spill less."""
    side = max(32, _side(_widest(spec), 128))
    gradients = [LayerGradientPlan(side, samples, spec.network.bias, dtype=dtype) for samples in (64, 32)]
    gradient = next((p for p in gradients if chip.fits_twice(p.shared_bytes)), gradients[-1])
    plans = []
    for inference in layered_inference_plans(spec, chip, dtype):
        size = (inference.forward.rows, inference.forward.columns, inference.forward.depth)
        backward = _product("backward", size, _widest(spec), dtype, transposed=True)
        features = _product("backward", size, spec.encoding_width, dtype, transposed=True)
        if backward.shared_bytes <= chip.shared_per_block:
            plans.append(dataclasses.replace(inference, backward=backward, features=features, weight_gradient=gradient))
    return plans


def layered_inference_plans(spec: ModelSpec, chip: Architecture, dtype: str = "float16") -> list[LayeredPlan]:
    if format_for(dtype, chip).n_planes > 1:
        raise PlanError(
            f"no fused kernel fits {describe_shapes(spec)} in {dtype}; kernels that go layer by layer compute in "
            "float16 and bfloat16"
        )
    plans = []
    for size in _sizes(spec, chip):
        forward = _product("forward", size, _widest(spec), dtype, transposed=False)
        # activation, loss and densities take registers beside the sums
        output = _product("output", size, spec.padded_output_width, dtype, transposed=False, most=64)
        plans.append(LayeredPlan(_encode_plan(spec, chip, forward.tile_rows, dtype), forward, output))
    return plans


@dataclass(frozen=True)
class ChunkLayout:
    """Where the matrices of a chunk stand, in bytes a row of the chunk before them; multiply by the chunk's rows.

    inputs     of each layer: X, h_1, ... (for inference two of them take turns)
    gates      phi' of each hidden layer where it is kept, else its output, which phi' is taken from
    gradients  the two places of d
    features   dL/d(features)
    """

    inputs: tuple[int, ...]
    gates: tuple[int, ...]
    gradients: tuple[int, int]
    features: int
    total: int

    @classmethod
    def of_training(cls, spec: ModelSpec) -> ChunkLayout:
        widths, end = [fan_in for _, fan_in in spec.layer_shapes], 0

        def place(width: int) -> int:
            nonlocal end
            start, end = end, end + HALF * width
            return start

        inputs = tuple(place(width) for width in widths)
        gates = tuple(place(width) for width in widths[1:]) if keeps_gate(spec) else inputs[1:]
        widest = max(fan_out for fan_out, _ in spec.layer_shapes)
        gradients = (place(widest), place(widest))
        features = place(widths[0])
        return cls(inputs, gates, gradients, features, end)

    @classmethod
    def of_inference(cls, spec: ModelSpec) -> ChunkLayout:
        widest = max(fan_in for _, fan_in in spec.layer_shapes)
        places = (0, HALF * widest)
        return cls(tuple(places[i % 2] for i in range(len(spec.layer_shapes))), (), (0, 0), 0, 2 * HALF * widest)
