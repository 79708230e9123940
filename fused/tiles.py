"""Tiles: float16 matrices in shared memory, read and written as fragments by warps or as rows by threads.

A tile is row-major with 16 bytes of padding a row. Its stride is then an odd multiple of 16 bytes whatever the width
(a multiple of 16 columns), so the 8 rows that ldmatrix or stmatrix touches at a time lie in 8 different groups of
4 banks, and every address is a lane's constant plus an immediate.

Four ways to take 16x16 blocks out of a tile cover all products of a network (w: weights [fan_out, fan_in], x, h, d:
[samples, features]); "rows n" are the tile's rows:

    operand                        instruction          lanes' rows and 8-column chunks
    A of x W^T, d W                ldmatrix             `straight`
    B of x W^T (columns of W^T)    ldmatrix             `crossed`
    B of d W, of d^T x             ldmatrix.trans       `straight`
    A of d^T x                     ldmatrix.trans       `crossed`
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .fragments import FragmentShape, Target

HALF = 2
ROW_PADDING = 16


@dataclass(frozen=True)
class Tile:
    """`rows` x `columns` float16 from byte `offset` of the block's shared memory on."""

    name: str
    rows: int
    columns: int
    offset: int

    def __post_init__(self):
        if self.columns % 16 or self.offset % 16 or self.rows <= 0:
            raise ValueError(f"{self} is not made of aligned 16-column blocks")
        if self.stride // 16 % 2 == 0:
            raise ValueError(f"{self}: rows would meet in the same banks")

    @property
    def stride(self) -> int:
        return self.columns * HALF + ROW_PADDING

    @property
    def n_bytes(self) -> int:
        return self.rows * self.stride

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes

    def straight(self, e, base):
        """Address of lane's row for blocks in the order (top, left), (bottom, left), (top, right), (bottom, right)."""
        lane = e.lane()
        return e.add(base, e.add(e.mul(e.and_(lane, 15), self.stride), e.shl(e.shr(lane, 4), 4)))

    def crossed(self, e, base):
        """... in the order (top, left), (top, right), (bottom, left), (bottom, right)."""
        lane = e.lane()
        row = e.add(e.and_(lane, 7), e.shl(e.shr(lane, 4), 3))
        return e.add(base, e.add(e.mul(row, self.stride), e.shl(e.and_(e.shr(lane, 3), 1), 4)))

    def block(self, row_block: int, column_block: int) -> int:
        """Byte offset of a 16x16 block, to add to a lane's address."""
        return self.offset + row_block * 16 * self.stride + column_block * 16 * HALF


@functools.cache
def make_load_fragment(target: Target, tile: Tile, shape: FragmentShape):
    """load(base) -> packed fragment of this warp's own rows (warp w: rows w * shape.rows on)."""

    @target.intrinsic(["u32"], ("u32", shape.n_packed))
    def load_fragment(e, base):
        address = tile.straight(e, e.add(base, e.mul(e.warp(), shape.rows * tile.stride)))
        registers = []
        for m in range(shape.rows // 16):
            for n in range(shape.columns // 16):
                registers += e.ldmatrix(address, tile.block(m, n))
        return registers

    return load_fragment


@functools.cache
def make_store_fragment(target: Target, tile: Tile, shape: FragmentShape):
    """store(base, packed): a packed fragment to this warp's own rows."""

    @target.intrinsic(["u32", ("u32", shape.n_packed)], "void")
    def store_fragment(e, base, packed):
        address = tile.straight(e, e.add(base, e.mul(e.warp(), shape.rows * tile.stride)))
        n_blocks = shape.columns // 16
        for m in range(shape.rows // 16):
            for n in range(n_blocks):
                first = 4 * (m * n_blocks + n)
                e.stmatrix(address, packed[first : first + 4], tile.block(m, n))

    return store_fragment


@functools.cache
def make_row_address(target: Target, tile: Tile):
    """row_address(base, row): where a thread finds a row of the tile."""

    @target.intrinsic(["u32", "u32"], "u32")
    def row_address(e, base, row):
        return e.add(base, e.add(e.mul(row, tile.stride), tile.offset))

    return row_address


def _accesses(n_values: int, alignment: int) -> list[tuple[int, int]]:
    """(first, count): n values from a multiple of `alignment` on, in aligned accesses of 8, 4, 2 or 1 values."""
    accesses, first = [], 0
    while first < n_values:
        fits = (c for c in (8, 4, 2, 1) if c <= n_values - first and first % c == 0 and alignment % c == 0)
        accesses.append((first, next(fits)))
        first += accesses[-1][1]
    return accesses


@functools.cache
def make_put(target: Target, n_values: int, alignment: int | None = None):
    """put(row_address, column, values): n float32 values to float16 columns of a row; column a multiple of `alignment`,
    by default n."""
    accesses = _accesses(n_values, alignment or n_values)

    @target.intrinsic(["u32", "u32", ("f32", n_values)], "void")
    def put(e, row, column, values):
        address = e.add(row, e.shl(column, 1))
        for first, count in accesses:
            if count == 1:
                e.store_shared(address, "u16", [e.float_to_half(values[first])], HALF * first)
            else:
                words = [e.pack_half2(values[i], values[i + 1]) for i in range(first, first + count, 2)]
                e.store_shared(address, "u32", words, HALF * first)

    return put


@functools.cache
def make_get(target: Target, n_values: int, alignment: int | None = None):
    """get(row_address, column) -> n float32 values of a row; column a multiple of `alignment`, by default n."""
    accesses = _accesses(n_values, alignment or n_values)

    @target.intrinsic(["u32", "u32"], ("f32", n_values))
    def get(e, row, column):
        address, values = e.add(row, e.shl(column, 1)), []
        for first, count in accesses:
            if count == 1:
                values.append(e.half_to_float(e.load_shared(address, "u16", 1, HALF * first)[0]))
            else:
                words = e.load_shared(address, "u32", count // 2, HALF * first)
                values += [value for word in words for value in e.unpack_half2(word)]
        return values

    return get


@functools.cache
def make_load_tile(target: Target, tile: Tile, n_threads: int, parameter_offset: int):
    """load(base, parameters): a weight matrix from the row-major float16 vector (from `parameter_offset` on) into its
    tile, by all threads of the block; followed by `copy_wait` and a barrier."""
    chunks_per_row = tile.columns // 8
    n_chunks = tile.rows * chunks_per_row

    @target.intrinsic(["u32", "u64"], "void")
    def load_tile(e, base, parameters):
        thread = e.thread()
        for first in range(0, n_chunks, n_threads):
            chunk = e.add(thread, first)
            row, column = e.div(chunk, chunks_per_row), e.mod(chunk, chunks_per_row)
            place = e.add(base, e.add(e.mul(row, tile.stride), e.shl(column, 4)))
            source = e.address(parameters, chunk, 16, HALF * parameter_offset)
            if first + n_threads <= n_chunks:
                e.copy_async(place, source, tile.offset)
            else:
                with e.when(e.less(chunk, n_chunks)):
                    e.copy_async(place, source, tile.offset)

    return load_tile


@functools.cache
def make_barriers(target: Target):
    """(barrier, warp_barrier, copy_wait): of all threads of the block, of a warp, for this thread's copies."""

    @target.intrinsic([], "void")
    def barrier(e):
        e.barrier()

    @target.intrinsic([], "void")
    def warp_barrier(e):
        e.warp_barrier()

    @target.intrinsic([], "void")
    def copy_wait(e):
        e.copy_wait()

    return barrier, warp_barrier, copy_wait


@functools.cache
def make_indices(target: Target):
    """(thread, lane, warp, block, block_row, n_blocks) as functions."""

    def make(name):
        @target.intrinsic([], "u32")
        def index(e):
            return getattr(e, name)()

        return index

    return tuple(make(n) for n in ("thread", "lane", "warp", "block", "block_row", "n_blocks"))
