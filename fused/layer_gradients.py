"""The weight gradient of plans that go layer by layer: dW = d^T h and db = d^T 1 of one layer over a chunk.

A block takes one tile of dW (the grid's y index) and, in turns, some of the chunk's samples (its x index); its sums are
the x index's row of partial sums, which the next chunk's are added to.
"""

from __future__ import annotations

import functools

from .fragments import Target, make_zeros
from .layer_plan import LayerGradientPlan
from .matrix_rows import make_fetch_piece
from .mlp import WeightGradient, make_weight_gradients
from .stage_io import KernelBody
from .tiles import HALF, make_barriers, make_divide_by, make_indices

PARAMETERS = (
    ("d", "u64"),  # [n_rows, fan_out]
    ("h", "u64"),  # [n_rows, fan_in]
    ("n_rows", "u32"),
    ("fan_out", "u32"),
    ("fan_in", "u32"),
    ("n_column_tiles", "u32"),  # of dW
    ("weight_sums", "u64"),  # where this layer's dW begins in the first row of partial sums, and its db
    ("bias_sums", "u64"),
    ("row_bytes", "u32"),
    ("accumulate", "u32"),
    ("bad", "u64"),
    ("mark", "u32"),
)


def make_layer_gradient_kernel(target: Target, plan: LayerGradientPlan) -> KernelBody:
    """For layers of any size: pieces past a matrix are 0, and their sums are not written."""
    target = target.storing(plan.dtype)
    d_tile, h_tile, layer = plan.d, plan.h, plan.layer
    fetch_d, fetch_h = make_fetch_piece(target, d_tile, plan.threads), make_fetch_piece(target, h_tile, plan.threads)
    add_products = make_weight_gradients(target, (layer,))
    zeros, add_tile = make_zeros(target, layer.n_accumulators), _make_add_tile(target, layer)
    shared_base, (barrier, _, copy_wait) = target.dynamic_shared_base(), make_barriers(target)
    indices = make_indices(target)
    block_index, block_row, n_blocks = indices.block, indices.block_row, indices.n_blocks
    divide_by, u32 = make_divide_by(target), target.u32
    samples, n_rows_of_tile, n_columns_of_tile = d_tile.rows, d_tile.columns, h_tile.columns
    piece_bytes = plan.piece_bytes

    def fetch(base, d, h, n_rows, fan_out, fan_in, sample, row, column):
        fetch_d(base, d, u32(fan_out * u32(HALF)), sample, n_rows, row, fan_out)
        fetch_h(base, h, u32(fan_in * u32(HALF)), sample, n_rows, column, fan_in)

    fetch = target.device(fetch)

    def layer_gradient(
        d, h, n_rows, fan_out, fan_in, n_column_tiles, weight_sums, bias_sums, row_bytes, accumulate, bad, mark
    ):
        base, part = shared_base(), block_index()
        tile_row, tile_column = divide_by(block_row(), n_column_tiles)
        row, column = u32(tile_row * u32(n_rows_of_tile)), u32(tile_column * u32(n_columns_of_tile))
        step, sample = u32(n_blocks() * u32(samples)), u32(part * u32(samples))
        here, there, sums = base, u32(base + u32(piece_bytes)), zeros()
        if sample < n_rows:
            fetch(here, d, h, n_rows, fan_out, fan_in, sample, row, column)
        while sample < n_rows:
            copy_wait()
            barrier()  # the piece is there, and everyone is done with the one before
            following = u32(sample + step)
            if following < n_rows:
                fetch(there, d, h, n_rows, fan_out, fan_in, following, row, column)
            sums = add_products(here, sums)
            sample, here, there = following, there, here
        add_tile(weight_sums, bias_sums, row_bytes, part, fan_out, fan_in, row, column, accumulate, bad, mark, sums)

    return KernelBody("layer_gradient", layer_gradient, PARAMETERS)


@functools.cache
def _make_add_tile(target: Target, layer: WeightGradient):
    """add(weight_sums, bias_sums, row_bytes, part, fan_out, fan_in, first_row, first_column, accumulate, bad, mark,
    sums): a tile of dW to its place in row `part` of the partial sums, blocks of 16x16 that stick out left away; db by
    the tiles and warps of the first column. Added to what is there where `accumulate` is 1. The word `bad` becomes at
    least `mark` where a sum is not finite."""

    @target.intrinsic(["u64", "u64", *["u32"] * 7, "u64", "u32", ("f32", layer.n_accumulators)], "void")
    def add_tile(e, weight_sums, bias_sums, row_bytes, part, fan_out, fan_in, first_row, first_column, accumulate,
                 bad, mark, sums):  # fmt: skip
        finite = e.is_finite(sums[0])
        for value in sums[1:]:
            finite = e.both(finite, e.is_finite(value))
        with e.when(e.equal(e.select(finite, e.u32(1), e.u32(0)), 0)):
            e.maximum_global(bad, mark)
        adds, lane = e.equal(accumulate, 1), e.lane()
        g, t2 = e.shr(lane, 2), e.shl(e.and_(lane, 3), 1)
        weights, biases = (e.address_by(start, part, row_bytes) for start in (weight_sums, bias_sums))
        row_block, _, column_block, own_column, _ = layer.place(e)
        own_row = e.add(first_row, e.shl(row_block, 4))
        column = e.add(first_column, e.shl(column_block, 4))

        def add_to(place, values):
            old = e.load_global(place, "f32", len(values), constant=False)
            e.store_global(
                place, "f32", [e.fadd(e.select(adds, o, e.f32(0.0)), v) for o, v in zip(old, values, strict=True)]
            )

        for block in range(layer.row_blocks * layer.column_blocks):
            m, n = divmod(block, layer.column_blocks)
            top, left = e.add(own_row, 16 * m), e.add(column, 16 * n)
            with e.when(e.both(e.less(top, fan_out), e.less(left, fan_in))):
                for i in range(0, 8, 2):
                    line = e.address_by(weights, e.add(top, e.add(g, 8 * (i % 4 // 2))), e.shl(fan_in, 2))
                    place = e.address(line, e.add(left, e.add(t2, 8 * (i // 4))), 4)
                    add_to(place, sums[8 * block + i : 8 * block + i + 2])
        if layer.bias_offset is None:
            return
        writes = e.both(e.both(e.equal(first_column, 0), e.equal(own_column, 0)), e.equal(t2, 0))
        for m in range(layer.row_blocks):
            top, first = e.add(own_row, 16 * m), layer.n_weight_accumulators + 4 * m
            with e.when(e.both(writes, e.less(top, fan_out))):
                add_to(e.address(biases, e.add(top, g), 4), [sums[first]])
                add_to(e.address(biases, e.add(top, e.add(g, 8)), 4), [sums[first + 2]])

    return add_tile
