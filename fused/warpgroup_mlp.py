"""Matrix products of a network by warpgroups: the same three as in `mlp.py`, on wgmma.

A warpgroup's 64 samples are the rows of A in the forward and backward products, 16 a warp, and stay in registers; B is
the layer's weight tile. In the weight gradient samples are summed over, so both operands come from shared tiles:

    forward          z [64, fan_out] = h W^T          A: h in registers    B: W, k along its columns
    backward         d' [64, fan_in] = d W            A: d in registers    B: W, transposed
    weight gradient  dW [64, fan_in] += d^T h         A: d, transposed     B: h, transposed      fan_out = 64
                     dW^T [64, fan_out] += h^T d      A: h, transposed     B: d, transposed      fan_in = 64

Where dW (or dW^T) has 128 rows, each of two warpgroups sums half of them, over the samples of both.
"""

from __future__ import annotations

from .fragments import FragmentShape, Target
from .swizzled_tile import SwizzledTile
from .wgmma import WARPGROUP, Chain, SharedOperand

WARPGROUP_ROWS = 64


def _operand(tile: SwizzledTile, address, row: int, column: int, *, transposed: bool) -> SharedOperand:
    """The part of a tile that begins at a row (a multiple of 8) and column (a multiple of 16)."""
    panel, column = divmod(column, tile.panel_columns)
    offset = tile.offset + panel * tile.panel_bytes + row * tile.stride + 2 * column
    return SharedOperand(address, offset, tile.stride, tile.panel_bytes, transposed)


def make_warpgroup_product(
    target: Target, weights: SwizzledTile, operand: FragmentShape, result: FragmentShape, *, transposed: bool
):
    """product(base, packed): the forward product, or with `transposed` the backward one."""

    @target.intrinsic(["u32", ("u32", operand.n_packed)], ("f32", result.n_elements))
    def product(e, base, packed):
        a = tuple(packed[i : i + 4] for i in range(0, operand.n_packed, 4))
        (sums,) = e.wgmma([Chain(result.columns, a, _steps_of(weights, base, transposed=transposed))])
        return sums

    return product


def _steps_of(weights: SwizzledTile, base, *, transposed: bool) -> tuple:
    """B of the forward product, or with `transposed` of the backward one, step by step along k."""
    places = [(k, 0) if transposed else (0, k) for k in range(0, weights.rows if transposed else weights.columns, 16)]
    return tuple(_operand(weights, base, *place, transposed=transposed) for place in places)


def tile_product_chain(e, weights: SwizzledTile, base, tile: SwizzledTile, base_of_tile, *, transposed: bool) -> Chain:
    """One of the two products of the warpgroup's rows of a tile, which counts from `base_of_tile`."""
    own = e.add(base_of_tile, e.mul(e.warpgroup(), WARPGROUP_ROWS * tile.stride))
    a = tuple(_operand(tile, own, 0, column, transposed=False) for column in range(0, tile.columns, 16))
    n = weights.columns if transposed else weights.rows
    return Chain(n, a, _steps_of(weights, base, transposed=transposed))


def add_products(e, base, layers: list[tuple]) -> list[list]:
    """Sums + d^T h for (`WeightGradient`, sums, base that h's tile counts from) of some layers as one batch."""
    return e.wgmma(weight_gradient_chains(e, base, layers))


def weight_gradient_chains(e, base, layers: list[tuple]) -> list[Chain]:
    """Of the same: over each warpgroup's own samples, or over all of a tile's where warpgroups share the rows of dW. d
    counts from `base`."""
    group, own = e.warpgroup(), {}

    def address_of(start, step: int):
        """`step` bytes further for each warpgroup."""
        if (id(start), step) not in own:
            own[id(start), step] = e.add(start, e.mul(group, step))
        return own[id(start), step]

    chains = []
    for layer, sums, base_of_h in layers:
        rows, columns = (layer.h, layer.d) if layer.transposed else (layer.d, layer.h)
        starts = (base_of_h, base) if layer.transposed else (base, base_of_h)
        if layer.warp_rows > WARPGROUP:
            n_samples = rows.rows
            places = address_of(starts[0], rows.panel_bytes), starts[1]  # a panel is 64 rows of dW
        else:
            n_samples = WARPGROUP_ROWS
            places = tuple(
                address_of(start, WARPGROUP_ROWS * tile.stride)
                for start, tile in zip(starts, (rows, columns), strict=True)
            )
        a, b = (
            tuple(_operand(tile, place, s, 0, transposed=True) for s in range(0, n_samples, 16))
            for tile, place in zip((rows, columns), places, strict=True)
        )
        chains.append(Chain(columns.columns, a, b, tuple(sums)))
    return chains
