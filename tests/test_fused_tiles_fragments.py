"""Fragments and tiles: register maps, packing, ragged matrices in global memory, rows and blocks of shared tiles."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import emulator_target
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_tcnn.fused.emulated_memory import GlobalMemory, MemoryFault
from numba_tcnn.fused.emulator import Block, Emitter
from numba_tcnn.fused.fragments import (
    FragmentShape,
    make_load_matrix,
    make_mask,
    make_pack,
    make_restore,
    make_save,
    make_store_matrix,
    make_sum,
    make_unpack,
)
from numba_tcnn.fused.swizzled_tile import SwizzledTile
from numba_tcnn.fused.tiles import (
    Tile,
    make_barriers,
    make_get,
    make_load_fragment,
    make_load_tile,
    make_put,
    make_row_address,
    make_store_fragment,
)

SHAPES = [FragmentShape(rows, columns) for rows in (16, 32) for columns in (16, 48, 64)]
U32, U64 = np.uint32, np.uint64


@pytest.fixture
def target():
    return emulator_target()


def start_block(target, memory: GlobalMemory | None = None, n_threads: int = 32, shared_bytes: int = 64 * 1024):
    target.block = Block(memory or GlobalMemory(), n_threads, shared_bytes)
    return target.block


def places(shape: FragmentShape) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every register of every lane, [n_elements, 32]."""
    lane = np.arange(32)
    first = np.array([shape.element(i) for i in range(shape.n_elements)])
    return first[:, :1] + lane // 4, first[:, 1:] + lane % 4 * 2


def fragment_of(shape: FragmentShape, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
    """A [n_warps * rows, columns] matrix as registers over the threads of a block."""
    rows, columns = places(shape)
    warps = matrix.reshape(-1, shape.rows, shape.columns)
    return tuple(np.concatenate([w[r, c] for w in warps]) for r, c in zip(rows, columns, strict=True))


def matrix_of(shape: FragmentShape, fragment) -> np.ndarray:
    rows, columns = places(shape)
    n_warps = len(fragment[0]) // 32
    matrix = np.full((n_warps, shape.rows, shape.columns), np.nan, np.float32)
    for value, r, c in zip(fragment, rows, columns, strict=True):
        matrix[:, r, c] = value.reshape(n_warps, 32)
    return matrix.reshape(-1, shape.columns)


# ------------------------------------------------------------------------------------------- fragments


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 16))
def test_every_element_has_one_register(row_blocks: int, column_blocks: int) -> None:
    shape = FragmentShape(16 * row_blocks, 16 * column_blocks)
    rows, columns = places(shape)
    indices = np.sort((rows * shape.columns + columns).ravel())
    np.testing.assert_array_equal(indices, np.arange(shape.rows * shape.columns))


@pytest.mark.parametrize("size", [(0, 16), (16, 0), (8, 16), (16, 24), (-16, 16)])
def test_fragments_are_made_of_whole_blocks(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="16x16 blocks"):
        FragmentShape(*size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_accumulator_is_the_next_products_operand(shape, target, rng: np.random.Generator) -> None:
    """The layout's whole point: what mma leaves, packed, is the A operand of mma. Integers: nothing rounds."""
    block = start_block(target)
    e = Emitter(block)
    h = rng.integers(-4, 5, (shape.rows, shape.columns)).astype(np.float32)
    packed = make_pack(target, shape)(fragment_of(shape, h))
    assert len(packed) == shape.n_packed
    n_k = shape.columns // 16
    product = np.zeros((shape.rows, 8), np.float32)
    w = rng.integers(-4, 5, (shape.columns, 8)).astype(np.float32)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    for m in range(shape.rows // 16):
        sums = [np.zeros(32, np.float32)] * 4
        for k in range(n_k):
            part = w[16 * k : 16 * k + 16]
            b = [e.pack_half2(part[2 * t + 8 * i, g], part[2 * t + 1 + 8 * i, g]) for i in range(2)]
            first = 4 * (m * n_k + k)
            sums = e.mma(packed[first : first + 4], b, sums)
        for i, value in enumerate(sums):
            product[16 * m + g + 8 * (i // 2), 2 * t + i % 2] = value
    np.testing.assert_array_equal(product, h @ w)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_rounds_to_float16(shape: FragmentShape, target, rng: np.random.Generator) -> None:
    start_block(target)
    matrix = rng.normal(size=(shape.rows, shape.columns)).astype(np.float32)
    fragment = make_unpack(target, shape)(make_pack(target, shape)(fragment_of(shape, matrix)))
    np.testing.assert_array_equal(matrix_of(shape, fragment), matrix.astype(np.float16).astype(np.float32))


def test_sum_of_a_thread(target, rng: np.random.Generator) -> None:
    start_block(target)
    values = rng.integers(-9, 9, (12, 32)).astype(np.float32)
    np.testing.assert_array_equal(make_sum(target, 12)(tuple(values)), values.sum(0))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("n_rows", "n_columns", "first_row"), [(100, 64, 0), (37, 3, 32), (33, 17, 32), (1, 1, 0)])
def test_ragged_matrices(shape, dtype, n_rows, n_columns, first_row, target, rng: np.random.Generator) -> None:
    """Loading gives 0 beyond the matrix and never reads there; storing leaves the neighbourhood alone."""
    n_columns = min(n_columns, shape.columns)
    memory = GlobalMemory()
    matrix = rng.normal(size=(n_rows, n_columns)).astype(dtype)
    address, stride = U64(memory.place(matrix)), U32(matrix.strides[0])
    start_block(target, memory)
    fragment = make_load_matrix(target, shape, dtype)(address, stride, U32(first_row), U32(n_rows), U32(n_columns))
    inside = min(max(n_rows - first_row, 0), shape.rows)
    expected = np.zeros((shape.rows, shape.columns), np.float32)
    expected[:inside, :n_columns] = matrix[first_row : first_row + inside]
    np.testing.assert_array_equal(matrix_of(shape, fragment), expected)

    stored = np.full_like(matrix, 7)
    memory.begin_launch()
    everywhere = fragment_of(shape, np.where(expected == 0, np.float32(3), expected))
    make_store_matrix(target, shape, dtype)(
        U64(memory.place(stored)), stride, U32(first_row), U32(n_rows), U32(n_columns), everywhere
    )
    np.testing.assert_array_equal(stored[first_row : first_row + inside], matrix[first_row : first_row + inside])
    assert (stored[:first_row] == 7).all() and (stored[first_row + inside :] == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("first_column", "spare", "n_columns"),
    [(0, 0, 16), (8, 8, 8), (4, 4, 8), (2, 2, 8), (0, 2, 6), (1, 1, 6), (0, 1, 6), (0, 0, 5)],
)
def test_outputs_are_stored_wherever_they_begin(
    first_column: int, spare: int, n_columns: int, dtype: str, target, rng: np.random.Generator
) -> None:
    """In eights or pairs where all of them are aligned, else one by one: rows may begin in the middle of one."""
    shape, n_rows = FragmentShape(16, 16), 11
    values = rng.normal(size=(16, 16)).astype(dtype).astype(np.float32)
    out = np.full((n_rows, first_column + n_columns + spare), 7, dtype)
    memory = GlobalMemory()
    start_block(target, memory)
    memory.begin_launch()
    address = memory.place(out) + first_column * out.itemsize
    make_store_matrix(target, shape, dtype)(
        U64(address), U32(out.strides[0]), U32(0), U32(n_rows), U32(n_columns), fragment_of(shape, values)
    )
    expected = np.full_like(out, 7)
    expected[:, first_column : first_column + n_columns] = values[:n_rows, :n_columns]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_hide_even_nan(shape: FragmentShape, target) -> None:
    start_block(target)
    fragment = [np.full(32, np.nan, np.float32)] * shape.n_elements
    masked = make_mask(target, shape)(fragment, U32(64), U32(64 + 5), U32(3))
    matrix = matrix_of(shape, masked)
    assert np.isnan(matrix[:5, :3]).all() and (matrix[5:] == 0).all() and (matrix[:, 3:] == 0).all()


@pytest.mark.parametrize("n_packed", [4, 16, 24])
def test_saved_fragments_come_back(n_packed: int, target, rng: np.random.Generator) -> None:
    """Slots side by side, each 128 bytes a register, no byte shared and none left over."""
    memory = GlobalMemory()
    buffer = np.zeros(3 * 32 * n_packed, U32)
    address = U64(memory.place(buffer))
    start_block(target, memory, n_threads=64)
    registers = tuple(rng.integers(1, 1 << 32, 64).astype(U32) for _ in range(n_packed))
    slots = np.repeat(np.array([2, 0], U32), 32)
    make_save(target, n_packed)(address, slots, registers)
    assert (buffer.reshape(3, -1)[1] == 0).all() and (buffer.reshape(3, -1)[[0, 2]] != 0).all()
    memory.begin_launch()
    for constant in (False, True):
        loaded = make_restore(target, n_packed, constant=constant)(address, slots)
        np.testing.assert_array_equal(np.stack(loaded), np.stack(registers))


# ----------------------------------------------------------------------------------------------- tiles


@settings(deadline=None)
@given(st.integers(1, 32), st.integers(1, 16))
def test_eight_rows_lie_in_eight_bank_groups(column_blocks: int, row_blocks: int) -> None:
    """ldmatrix and stmatrix touch 16 bytes of 8 rows at a time: no two in the same 4 of the 32 banks."""
    tile = Tile("t", 16 * row_blocks, 16 * column_blocks, 0)
    for first in range(0, tile.rows, 8):
        groups = {(first + i) * tile.stride // 16 % 8 for i in range(8)}
        assert len(groups) == 8
    assert tile.stride % 16 == 0 and tile.stride >= 2 * tile.columns


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 128])
def test_eight_rows_of_swizzled_tiles_lie_in_eight_bank_groups(columns: int) -> None:
    """Also where 64 or 32 bytes are all that a row has; and no two chunks share a place."""
    tile, e = SwizzledTile("t", 64, columns, 0), Emitter(Block(GlobalMemory(), 32, 16))
    rows, chunks = np.meshgrid(np.arange(64, dtype=U32), np.arange(columns // 8, dtype=U32), indexing="ij")
    address, immediate = tile.element(e, rows.ravel() * U32(tile.stride), chunks.ravel() * U32(8))
    places = (address + immediate).reshape(64, -1) // 16
    assert len(np.unique(places)) == places.size and places.max() < tile.n_bytes // 16
    for chunk in range(columns // 8):
        assert all(len(set(places[first : first + 8, chunk] % 8)) == 8 for first in range(0, 64, 8))


@pytest.mark.parametrize("bad", [(32, 24, 0), (32, 16, 8), (0, 16, 0)])
def test_tiles_are_aligned(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="aligned 16-column blocks"):
        Tile("t", *bad)


def test_places_of_a_tile() -> None:
    tile = Tile("t", 32, 48, 160)
    assert tile.n_bytes == 32 * (48 * 2 + 16) and tile.end == 160 + tile.n_bytes
    assert tile.place(None, U32(7), 1, 2) == (7, 160 + 16 * tile.stride + 2 * 32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fragments_in_tiles(shape: FragmentShape, target, rng: np.random.Generator) -> None:
    """What two warps store as fragments stands in the tile's rows, and loads again."""
    tile = Tile("t", 2 * shape.rows, shape.columns, 320)
    block = start_block(target, n_threads=64)
    matrix = rng.normal(size=(tile.rows, tile.columns)).astype(np.float16).astype(np.float32)
    packed = make_pack(target, shape)(fragment_of(shape, matrix))
    base = U32(0)
    make_store_fragment(target, tile, shape)(base, packed)
    _, warp_barrier, _ = make_barriers(target)
    warp_barrier()
    for registers, loaded in zip(packed, make_load_fragment(target, tile, shape)(base), strict=True):
        np.testing.assert_array_equal(loaded, registers)
    cells = block.shared.cells.view(np.float16)[tile.offset // 2 : tile.end // 2].reshape(tile.rows, -1)
    np.testing.assert_array_equal(cells[:, : tile.columns], matrix)
    assert np.isnan(cells[:, tile.columns :]).all()  # the padding is never written


@pytest.mark.parametrize("shape", [FragmentShape(16, n) for n in (16, 32, 48, 64, 80, 128)], ids=str)
def test_fragments_in_swizzled_tiles(shape: FragmentShape, target, rng: np.random.Generator) -> None:
    """Fragments of eight warps, read by rows of threads and as fragments again."""
    tile = SwizzledTile("t", 8 * shape.rows, shape.columns, 1024)
    start_block(target, n_threads=256)
    matrix = rng.normal(size=(tile.rows, tile.columns)).astype(np.float16).astype(np.float32)
    packed = make_pack(target, shape)(fragment_of(shape, matrix))
    base = U32(0)
    make_store_fragment(target, tile, shape)(base, packed)
    make_barriers(target)[0]()
    for registers, loaded in zip(packed, make_load_fragment(target, tile, shape)(base), strict=True):
        np.testing.assert_array_equal(loaded, registers)
    rows = np.arange(256, dtype=U32) % U32(tile.rows)
    for column in range(0, shape.columns, 16):
        values = make_get(target, 16, 8, tile)(make_row_address(target, tile)(base, rows), U32(column))
        np.testing.assert_array_equal(np.stack(values, 1), matrix[rows, column : column + 16])


@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize(("n_values", "alignment"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (3, 1), (9, 8)])
def test_rows_of_swizzled_tiles(n_values: int, alignment: int, columns: int, target, rng: np.random.Generator) -> None:
    tile = SwizzledTile("t", 32, columns, 1024)
    start_block(target)
    row = make_row_address(target, tile)(U32(0), np.arange(32, dtype=U32)[::-1].copy())
    values = rng.normal(size=(n_values, 32)).astype(np.float16).astype(np.float32)
    column = U32((columns - n_values) // alignment * alignment)
    make_put(target, n_values, alignment, tile)(row, column, tuple(values))
    np.testing.assert_array_equal(np.stack(make_get(target, n_values, alignment, tile)(row, column)), values)


@pytest.mark.parametrize("n_values", [1, 2, 4, 8])
def test_rows_of_tiles(n_values: int, target, rng: np.random.Generator) -> None:
    """Each thread puts n values at a column that is a multiple of n in its own row, and gets them again."""
    tile = Tile("t", 32, 32, 64)
    block = start_block(target)
    row = make_row_address(target, tile)(U32(0), np.arange(32, dtype=U32)[::-1].copy())
    values = rng.normal(size=(n_values, 32)).astype(np.float32)
    column = U32(3 * n_values)
    make_put(target, n_values)(row, column, tuple(values))
    got = np.stack(make_get(target, n_values)(row, column))
    rounded = values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, rounded)
    cells = block.shared.cells.view(np.float16)[tile.offset // 2 : tile.end // 2].reshape(tile.rows, -1)
    np.testing.assert_array_equal(cells[::-1, 3 * n_values : 4 * n_values].T, rounded)
    assert np.isnan(cells[:, : 3 * n_values]).all() and np.isnan(cells[:, 4 * n_values :]).all()


@pytest.mark.parametrize("n_values", [2, 4, 8])
def test_values_need_an_aligned_column(n_values: int, target) -> None:
    start_block(target)
    tile = Tile("t", 32, 32, 64)
    row = make_row_address(target, tile)(U32(0), np.arange(32, dtype=U32))
    with pytest.raises(MemoryFault):
        make_put(target, n_values)(row, U32(n_values // 2), tuple(np.zeros((n_values, 32), np.float32)))


@pytest.mark.parametrize("n_threads", [32, 128, 256])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (48, 32), (128, 64)])
def test_weights_arrive_in_their_tile(rows, columns, n_threads, target, rng: np.random.Generator) -> None:
    """By 16-byte copies of all threads, fewer or more than there are chunks, and only after the wait."""
    offset = 24
    parameters = rng.normal(size=offset + rows * columns + 8).astype(np.float16)
    memory = GlobalMemory()
    address = U64(memory.place(parameters))
    tile = Tile("W", rows, columns, 32)
    block = start_block(target, memory, n_threads)
    make_load_tile(target, tile, n_threads, offset)(U32(0), address)
    cells = block.shared.cells.view(np.float16)[tile.offset // 2 : tile.end // 2].reshape(rows, -1)[:, :columns]
    assert np.isnan(cells).all()
    make_barriers(target)[2]()
    np.testing.assert_array_equal(cells, parameters[offset : offset + rows * columns].reshape(rows, columns))
