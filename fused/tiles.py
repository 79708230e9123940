"""Tiles: matrices of 16-bit numbers in shared memory, read and written as fragments by warps or as rows by threads.

A `Tile` is row-major with 16 bytes of padding a row. Its stride is then an odd multiple of 16 bytes whatever the width
(a multiple of 16 columns), so the 8 rows that ldmatrix or stmatrix touches at a time lie in 8 different groups of
4 banks, and every address is a lane's constant plus an immediate. Where a value has several planes (`formats.py`),
each chunk of 8 columns stands there once a plane, 16 bytes after 16 bytes; a column's place in its row is then known
without the tile's width.

Four ways to take 16x16 blocks out of a tile cover all products of a network (w: weights [fan_out, fan_in], x, h, d:
[samples, features]); "rows n" are the tile's rows:

    operand                        instruction          lanes' rows and 8-column chunks
    A of x W^T, d W                ldmatrix             `straight`
    B of x W^T (columns of W^T)    ldmatrix             `crossed`
    B of d W, of d^T x             ldmatrix.trans       `straight`
    A of d^T x                     ldmatrix.trans       `crossed`

`swizzled_tile.py` has the other layout, which wgmma reads too; all functions here work on both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .formats import NumberFormat
from .fragments import FragmentShape, Target, packed_block, packed_registers
from .swizzled_tile import SwizzledTile

HALF = 2
ROW_PADDING = 16
CHUNK = 16
SHARED_ALIGNMENT = 16  # of any block's shared memory


@dataclass(frozen=True)
class Tile:
    """`rows` x `columns` values of `n_planes` 16-bit numbers from byte `offset` of the block's shared memory on."""

    name: str
    rows: int
    columns: int
    offset: int
    n_planes: int = 1

    def __post_init__(self):
        if self.columns % 16 or self.offset % 16 or self.rows <= 0:
            raise ValueError(f"{self} is not made of aligned 16-column blocks")
        if self.stride // 16 % 2 == 0:
            raise ValueError(f"{self}: rows would meet in the same banks")

    @property
    def stride(self) -> int:
        return self.columns * HALF * self.n_planes + ROW_PADDING

    @property
    def chunk_bytes(self) -> int:
        """Of 8 columns of a row."""
        return CHUNK * self.n_planes

    @property
    def n_bytes(self) -> int:
        return self.rows * self.stride

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes

    def straight(self, e, base):
        """Address of lane's row for blocks in the order (top, left), (bottom, left), (top, right), (bottom, right)."""
        lane = e.lane()
        return e.add(base, e.add(e.mul(e.and_(lane, 15), self.stride), self.chunks(e, e.shr(lane, 4))))

    def crossed(self, e, base):
        """... in the order (top, left), (top, right), (bottom, left), (bottom, right)."""
        lane = e.lane()
        row = e.add(e.and_(lane, 7), e.shl(e.shr(lane, 4), 3))
        return e.add(base, e.add(e.mul(row, self.stride), self.chunks(e, e.and_(e.shr(lane, 3), 1))))

    def chunks(self, e, count):
        """Bytes of so many chunks of 8 columns."""
        return e.shl(count, 4) if self.n_planes == 1 else e.mul(count, self.chunk_bytes)

    @staticmethod
    def divides(ways: int) -> bool:
        """Whether warps can take one of so many runs of columns each, and find it by `at_column_block`."""
        return ways > 0

    def at_column_block(self, e, address, block):
        """A lane's address so many blocks of 16 columns further on."""
        return e.add(address, e.shl(block, 5) if self.n_planes == 1 else e.mul(block, 2 * self.chunk_bytes))

    def place(self, e, address, row_block: int, column_block: int, plane: int = 0):
        """(address, immediate) at which a lane, from its `straight` or `crossed` address, finds a 16x16 block of a
        plane."""
        return address, self.offset + row_block * 16 * self.stride + column_block * 2 * self.chunk_bytes + plane * CHUNK

    @staticmethod
    def element(e, row, column, further: int = 0):
        """(address, immediate) of column `column + further` of a row, from the row's address (`make_row_address`), in a
        tile of one plane; `_Columns` finds them in others."""
        return e.add(row, e.shl(column, 1)), HALF * further


AnyTile = Tile | SwizzledTile


@functools.cache
def make_load_fragment(target: Target, tile: AnyTile, shape: FragmentShape):
    """load(base) -> packed fragment of this warp's own rows (warp w: rows w * shape.rows on)."""
    number_format = target.format

    @target.intrinsic(["u32"], ("u32", packed_registers(target, shape)))
    def load_fragment(e, base):
        address = tile.straight(e, e.add(base, e.mul(e.warp(), shape.rows * tile.stride)))
        registers = []
        for m in range(shape.rows // 16):
            for n in range(shape.columns // 16):
                planes = [e.ldmatrix(*tile.place(e, address, m, n, p)) for p in range(tile.n_planes)]
                for words in zip(*planes, strict=True):
                    registers += number_format.planes_to_packed(e, words)
        return registers

    return load_fragment


@functools.cache
def make_store_fragment(target: Target, tile: AnyTile, shape: FragmentShape):
    """store(base, packed): a packed fragment to this warp's own rows."""
    number_format = target.format

    @target.intrinsic(["u32", ("u32", packed_registers(target, shape))], "void")
    def store_fragment(e, base, packed):
        address = tile.straight(e, e.add(base, e.mul(e.warp(), shape.rows * tile.stride)))
        n_blocks = shape.columns // 16
        for m in range(shape.rows // 16):
            for n in range(n_blocks):
                planes = packed_block(e, number_format, packed, m * n_blocks + n)
                for p, words in enumerate(planes):
                    block, immediate = tile.place(e, address, m, n, p)
                    e.stmatrix(block, words, immediate)

    return store_fragment


@functools.cache
def make_row_address(target: Target, tile: AnyTile):
    """row_address(base, row): where a thread finds a row of the tile."""

    @target.intrinsic(["u32", "u32"], "u32")
    def row_address(e, base, row):
        return e.add(base, e.add(e.mul(row, tile.stride), tile.offset))

    return row_address


class _Columns:
    """Where the columns from `column` on, a multiple of `alignment`, stand in a row of several planes: the first plane
    of each."""

    def __init__(self, e, number_format: NumberFormat, row, column, alignment: int):
        self._e, self._row, self._column = e, row, column
        self._chunk_bytes = CHUNK * number_format.n_planes
        self._run = math.gcd(alignment, 8)  # columns that never straddle a chunk
        self._starts = {0: self._address(0)}

    def _address(self, index: int):
        e, column = self._e, self._e.add(self._column, index) if index else self._column
        chunk, within = e.shr(column, 3), e.shl(e.and_(column, 7), 1)
        return e.add(self._row, e.add(e.mul(chunk, self._chunk_bytes), within))

    def find(self, index: int):
        """(address, immediate) of column number `index` from the first."""
        if self._run == 8:
            return self._starts[0], self._chunk_bytes * (index // 8) + HALF * (index % 8)
        start = index // self._run * self._run
        if start not in self._starts:
            self._starts[start] = self._address(start)
        return self._starts[start], HALF * (index - start)


def _make_places(number_format: NumberFormat, alignment: int, tile: AnyTile | None) -> Callable:
    """places_in(e, row, column) -> find, which gives (address, immediate) of the column `index` columns further on."""

    def places_in(e, row, column):
        if number_format.n_planes > 1:
            return _Columns(e, number_format, row, column, alignment).find
        return functools.partial((tile or Tile).element, e, row, column)

    return places_in


def _accesses(n_values: int, alignment: int) -> list[tuple[int, int]]:
    """(first, count): n values from a multiple of `alignment` on, in aligned accesses of 8, 4, 2 or 1 values."""
    accesses, first = [], 0
    while first < n_values:
        fits = (c for c in (8, 4, 2, 1) if c <= n_values - first and first % c == 0 and alignment % c == 0)
        accesses.append((first, next(fits)))
        first += accesses[-1][1]
    return accesses


@functools.cache
def make_put(target: Target, n_values: int, alignment: int | None = None, tile: AnyTile | None = None):
    """put(row_address, column, values): n float32 values to columns of a row; column a multiple of `alignment`, by
    default n. `tile`: whose row it is, where the columns of a row may not lie one after the other."""
    accesses, number_format = _accesses(n_values, alignment or n_values), target.format
    places_in = _make_places(number_format, alignment or n_values, tile)

    @target.intrinsic(["u32", "u32", ("f32", n_values)], "void")
    def put(e, row, column, values):
        find = places_in(e, row, column)
        for first, count in accesses:
            address, immediate = find(first)
            if count == 1:
                planes = [[half] for half in number_format.split(e, values[first])]
            else:
                pairs = [number_format.split_pair(e, *values[i : i + 2]) for i in range(first, first + count, 2)]
                planes = zip(*pairs, strict=True)
            for plane, words in enumerate(planes):
                e.store_shared(address, "u16" if count == 1 else "u32", list(words), immediate + CHUNK * plane)

    return put


@functools.cache
def make_get(target: Target, n_values: int, alignment: int | None = None, tile: AnyTile | None = None):
    """get(row_address, column) -> n float32 values of a row; column a multiple of `alignment`, by default n."""
    accesses, number_format = _accesses(n_values, alignment or n_values), target.format
    places_in = _make_places(number_format, alignment or n_values, tile)

    @target.intrinsic(["u32", "u32"], ("f32", n_values))
    def get(e, row, column):
        find, values = places_in(e, row, column), []
        for first, count in accesses:
            address, immediate = find(first)
            kind, n_words = ("u16", 1) if count == 1 else ("u32", count // 2)
            planes = range(number_format.n_planes)
            words = zip(*(e.load_shared(address, kind, n_words, immediate + CHUNK * p) for p in planes), strict=True)
            for stored in words:
                values += [number_format.join(e, stored)] if count == 1 else number_format.join_pair(e, stored)
        return values

    return get


@functools.cache
def make_load_tile(target: Target, tile: AnyTile, n_threads: int, parameter_offset: int):
    """load(base, parameters): a weight matrix from the row-major parameter vector (from `parameter_offset` on) into its
    tile, by all threads of the block; followed by `copy_wait` and a barrier."""
    if tile.n_planes > 1:
        return _make_load_and_split(target, tile, n_threads, parameter_offset)
    chunks_per_row = tile.columns // 8
    n_chunks = tile.rows * chunks_per_row

    @target.intrinsic(["u32", "u64"], "void")
    def load_tile(e, base, parameters):
        thread = e.thread()
        for first in range(0, n_chunks, n_threads):
            chunk = e.add(thread, first)
            row, column = e.div(chunk, chunks_per_row), e.mod(chunk, chunks_per_row)
            row_address = e.add(base, e.mul(row, tile.stride))
            place, immediate = tile.element(e, row_address, e.shl(column, 3))
            source = e.address(parameters, chunk, CHUNK, HALF * parameter_offset)
            if first + n_threads <= n_chunks:
                e.copy_async(place, source, tile.offset + immediate)
            else:
                with e.when(e.less(chunk, n_chunks)):
                    e.copy_async(place, source, tile.offset + immediate)

    return load_tile


def _make_load_and_split(target: Target, tile: Tile, n_threads: int, parameter_offset: int):
    """For values of several planes. A thread takes every so many rows of the same 8 columns: its addresses are two,
    and immediates, since LLVM keeps those of streamed weights in registers as long as the kernel lives."""
    number_format, size = target.format, target.format.parameter_bytes
    chunks_per_row = tile.columns // 8
    at_once = min(chunks_per_row, n_threads)  # chunks of a row
    rows_at_once = n_threads // at_once

    def split_chunk(e, place, source, first_row, first_chunk):
        start = size * (first_row * tile.columns + 8 * first_chunk)
        offset = tile.offset + first_row * tile.stride + first_chunk * tile.chunk_bytes
        values = []
        for i in (0, 4):  # not constant, or LLVM would keep streamed weights in registers too
            values += number_format.load_parameters(e, source, 4, start + size * i, constant=False)
        pairs = [number_format.split_pair(e, *values[i : i + 2]) for i in range(0, 8, 2)]
        for plane, words in enumerate(zip(*pairs, strict=True)):
            e.store_shared(place, "u32", list(words), offset + CHUNK * plane)

    @target.intrinsic(["u32", "u64"], "void")
    def load_tile(e, base, parameters):
        row, chunk = e.div(e.thread(), at_once), e.mod(e.thread(), at_once)
        place = e.add(base, e.add(e.mul(row, tile.stride), tile.chunks(e, chunk)))
        source = e.address(parameters, e.add(e.mul(row, chunks_per_row), chunk), 8 * size, size * parameter_offset)
        for first_chunk in range(0, chunks_per_row, at_once):
            for first_row in range(0, tile.rows, rows_at_once):
                inside = e.both(
                    e.less(row, min(rows_at_once, tile.rows - first_row)), e.less(chunk, chunks_per_row - first_chunk)
                )
                with e.when(inside):
                    split_chunk(e, place, source, first_row, first_chunk)

    return load_tile


class Barriers(NamedTuple):
    """Functions without arguments.

    barrier        of all threads of the block
    warp_barrier   of a warp
    copy_wait      for this thread's asynchronous copies
    """

    barrier: Callable
    warp_barrier: Callable
    copy_wait: Callable


@functools.cache
def make_barriers(target: Target) -> Barriers:

    @target.intrinsic([], "void")
    def barrier(e):
        e.barrier()

    @target.intrinsic([], "void")
    def warp_barrier(e):
        e.warp_barrier()

    @target.intrinsic([], "void")
    def copy_wait(e):
        e.copy_wait()

    return Barriers(barrier, warp_barrier, copy_wait)


@functools.cache
def make_exchange(target: Target, within: str, *, by_wgmma: bool):
    """(before, after) a piece of code in which the warps of a "block" or "warpgroup", or the lanes of a "warp", read
    tiles that they wrote for one another, by wgmma too or not."""

    @target.intrinsic([], "void")
    def before(e):
        if by_wgmma:
            e.fence_async()
        _BARRIERS[within](e)

    @target.intrinsic([], "void")
    def after(e):
        _BARRIERS[within](e)

    return before, after


_BARRIERS = {
    "block": lambda e: e.barrier(),
    "warpgroup": lambda e: e.warpgroup_barrier(),
    "warp": lambda e: e.warp_barrier(),
}


@functools.cache
def make_publish_weights(target: Target, swizzled: bool):
    """publish(): behind a thread's part of loading weights; then every thread may use them, by wgmma where swizzled."""

    @target.intrinsic([], "void")
    def publish(e):
        e.copy_wait()
        if swizzled:
            e.fence_async()
        e.barrier()

    return publish


@functools.cache
def make_aligned_base(target: Target, alignment: int):
    """aligned_base(): the first address of the block's dynamic shared memory that is such a multiple."""
    shared_base = target.dynamic_shared_base()
    if alignment <= SHARED_ALIGNMENT:
        return shared_base

    @target.intrinsic(["u32"], "u32")
    def round_up(e, address):
        return e.and_(e.add(address, alignment - 1), -alignment)

    def aligned_base():
        return round_up(shared_base())

    return target.device(aligned_base)


class Indices(NamedTuple):
    """Functions without arguments, each of which gives a uint32.

    thread      of the block
    lane        of the warp
    warp        of the block
    block       along the grid's x axis, which has n_blocks
    block_row   along its y axis
    """

    thread: Callable
    lane: Callable
    warp: Callable
    block: Callable
    block_row: Callable
    n_blocks: Callable


@functools.cache
def make_indices(target: Target) -> Indices:
    def make(name):
        @target.intrinsic([], "u32")
        def index(e):
            return getattr(e, name)()

        return index

    return Indices(*(make(name) for name in Indices._fields))


def tile_is_within(e, first_row, rows: int, batch):
    """Whether the tile has any sample of the batch, by a warp's first row of it; `rows` are those of a warp."""
    return e.less(e.sub(first_row, e.mul(e.warp(), rows)), batch)


def make_first_row_of(target: Target, plan) -> Callable:
    """first_row_of(tile): the first row of the batch that is this warp's in a tile of `plan.tile_rows` samples, each
    warp having `plan.rows`."""
    warp_index = make_indices(target).warp
    u32, rows, tile_rows = target.u32, plan.rows, plan.tile_rows

    def first_row_of(tile):
        return u32(u32(tile * u32(tile_rows)) + u32(warp_index() * u32(rows)))

    return target.device(first_row_of)


@functools.cache
def make_divide_by(target: Target):
    """divide_by(a, b) -> (a // b, a % b) of numbers known only at run time, b > 0."""
    u32 = np.uint32

    def divide_by(a, b):
        return u32(a // b), u32(a % b)

    return target.scalar(divide_by)
