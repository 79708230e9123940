"""Row-major matrices of 16-bit numbers in global memory, a piece at a time to and from tiles in shared memory.

Widths are multiples of 16, and so are the columns where a piece begins; rows are given as their stride in bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from .fragments import Target
from .tiles import HALF, Tile

CHUNK = 8  # columns in 16 bytes
MAX_PIECE = 256  # columns that are copied by one run of instructions


@functools.cache
def make_fetch_piece(target: Target, tile: Tile, n_threads: int):
    """fetch(base, matrix, stride, first_row, n_rows, first_column, n_columns): by all threads of the block, a piece of
    a matrix [n_rows, n_columns] into a tile, 0 where it sticks out; there after `copy_wait` and a barrier."""
    chunks_per_row = tile.columns // CHUNK
    rows_a_turn = n_threads // chunks_per_row

    @target.intrinsic(["u32", "u64", "u32", "u32", "u32", "u32", "u32"], "void")
    def fetch_piece(e, base, matrix, stride, first_row, n_rows, first_column, n_columns):
        # every thread keeps its column, and goes down `rows_a_turn` rows a turn
        local_row, local_column = e.div(e.thread(), chunks_per_row), e.mul(e.mod(e.thread(), chunks_per_row), CHUNK)
        top, column = e.add(first_row, local_row), e.add(first_column, local_column)
        place = e.add(base, e.add(e.mul(local_row, tile.stride), e.mul(local_column, HALF)))
        source = e.address(e.address_by(matrix, top, stride), column, HALF)
        column_inside, turn_bytes = e.less(column, n_columns), e.mul(stride, rows_a_turn)
        for first in range(0, tile.rows, rows_a_turn):
            inside = e.both(column_inside, e.less(e.add(top, first), n_rows))
            if first + rows_a_turn <= tile.rows:
                e.copy_async(place, source, tile.offset + first * tile.stride, where=inside)
            else:
                with e.when(e.less(e.add(local_row, first), tile.rows)):
                    e.copy_async(place, source, tile.offset + first * tile.stride, where=inside)
            source = e.address_by(source, e.u32(1), turn_bytes)

    return fetch_piece


@functools.cache
def _make_copy_rows(target: Target, tile: Tile, rows: int, width: int, *, to_tile: bool):
    """copy(base, matrix, stride, first_row, column, n_columns): this warp's `rows` rows of the tile, `width` columns
    from `column` on, to or from the rows from `first_row` on of a matrix [., n_columns]. Columns past the matrix are
    left alone; or 0 in the tile."""
    chunks_per_row = width // CHUNK

    @target.intrinsic(["u32", "u64", "u32", "u32", "u32", "u32"], "void")
    def copy_rows(e, base, matrix, stride, first_row, column, n_columns):
        lane, tile_row = e.lane(), e.mul(e.warp(), rows)
        for first in range(0, rows * chunks_per_row, 32):
            index = e.add(lane, first)
            row, column_here = e.div(index, chunks_per_row), e.mul(e.mod(index, chunks_per_row), CHUNK)
            column_here = e.add(column, column_here)
            place = e.add(base, e.add(e.mul(e.add(tile_row, row), tile.stride), e.mul(column_here, HALF)))
            address = e.address(e.address_by(matrix, e.add(first_row, row), stride), column_here, HALF)
            inside = e.less(column_here, n_columns)
            if to_tile:
                e.store_shared(place, "u32", e.load_global_where(inside, address, "u32", 4), tile.offset)
            else:
                words = e.load_shared(place, "u32", 4, tile.offset)
                with e.when(inside):
                    e.store_global(address, "u32", words)

    return copy_rows


def make_copy_rows(target: Target, tile: Tile, rows: int, *, to_tile: bool) -> Callable:
    """copy(base, matrix, stride, first_row, n_columns): this warp's rows of a tile, all columns; see above."""
    width = tile.columns if tile.columns <= MAX_PIECE else math.gcd(tile.columns, MAX_PIECE)
    copy, u32, n_pieces = _make_copy_rows(target, tile, rows, width, to_tile=to_tile), target.u32, tile.columns // width

    def copy_rows(base, matrix, stride, first_row, n_columns):
        for piece in range(n_pieces):
            copy(base, matrix, stride, first_row, u32(piece * width), n_columns)

    return target.device(copy_rows)
