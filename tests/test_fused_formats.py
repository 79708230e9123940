"""Number formats: what is stored, what comes back, what a product of stored values is worth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from emulation import emulator_target
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused.emulated_memory import GlobalMemory, MemoryFault
from numba_tcnn.fused.emulator import Block, Emitter
from numba_tcnn.fused.formats import FORMATS, bfloat16_bits, number_format
from numba_tcnn.fused.fragments import FragmentShape, make_note_not_finite, make_pack, make_unpack, packed_registers
from numba_tcnn.fused.network_plans import inference_plans
from numba_tcnn.fused.plan import PlanError, architecture, format_for
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
from numba_tcnn.reference.precision import Precision, round_to_bfloat16
from numba_tcnn.specs import IdentitySpec, ModelSpec, NetworkSpec

U32, U64 = np.uint32, np.uint64
SHAPE = FragmentShape(16, 48)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """What the reference's store makes of values; float32 is exact."""
    return Precision(dtype).store(values)


def start_block(dtype: str, memory: GlobalMemory | None = None, cc: int = 90):
    target = emulator_target(cc).storing(dtype)
    target.block = Block(memory or GlobalMemory(), 32, 64 * 1024)
    return target


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_stored_comes_back_as_the_reference_rounds_it(dtype: str, rng: np.random.Generator) -> None:
    """Over the whole range of magnitudes that the dtype promises; float32 to the bit."""
    exponents = rng.integers(-13 if dtype == "float16" else -100, 15 if dtype == "float16" else 127, 4096)
    values = (rng.uniform(1, 2, 4096) * 2.0**exponents * rng.choice([-1, 1], 4096)).astype(np.float32)
    e, number = Emitter(Block(GlobalMemory(), 4096, 16)), number_format(dtype)
    other = values[::-1].copy()
    for got, given_ in zip(number.join_pair(e, number.split_pair(e, values, other)), (values, other), strict=True):
        np.testing.assert_array_equal(got, stored(given_, dtype))
    np.testing.assert_array_equal(number.join(e, number.split(e, values)), stored(values, dtype))


@settings(deadline=None)
@given(finite)
def test_any_float32_is_the_sum_of_its_planes(value: float) -> None:
    if 0 < abs(value) < 2.0**-100:
        return  # planes would be smaller than any normal number
    e, number = Emitter(Block(GlobalMemory(), 32, 16)), number_format("float32")
    values = np.full(32, value, np.float32)
    words = number.split_pair(e, values, values)
    planes = [(word & U32(0xFFFF0000)).view(np.float32) for word in words]
    assert all((np.abs(planes[i]) <= 2.0 ** (1 - 8 * i) * np.abs(values)).all() for i in range(3))
    np.testing.assert_array_equal(number.join_pair(e, words)[0], values)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bfloat16_parameters_round_as_the_reference(values: list[float]) -> None:
    values = np.array(values, np.float32)
    copy = (bfloat16_bits(values).astype(U32) << U32(16)).view(np.float32)
    np.testing.assert_array_equal(copy, round_to_bfloat16(values))


def test_float32_has_no_copy_of_its_parameters() -> None:
    values = np.array([1 / 3, 7e4, -1e-8], np.float32)
    assert number_format("float32").reads_master
    assert number_format("float32").parameters(values).dtype == np.float32
    assert number_format("float16").parameters(values).dtype == np.float16
    assert number_format("bfloat16").parameters(values).dtype == np.uint16


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38, 6e4, 1e-45, 0.0])
def test_only_what_is_not_finite_is_noted(dtype: str, value: float) -> None:
    memory = GlobalMemory()
    bad = np.zeros(1, U32)
    address = U64(memory.place(bad))
    target = start_block(dtype, memory)
    fragment = [np.zeros(32, np.float32) for _ in range(SHAPE.n_elements)]
    fragment[11][17] = value
    make_note_not_finite(target, SHAPE)(make_pack(target, SHAPE)(tuple(fragment)), address, U32(5))
    with np.errstate(over="ignore"):
        kept = np.float16(value) if dtype == "float16" else value
    assert bad[0] == (0 if np.isfinite(kept) else 5)


# -------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("cc", [75, 90])
@pytest.mark.parametrize("dtype", FORMATS)
def test_products_of_blocks(dtype: str, cc: int, rng: np.random.Generator) -> None:
    """a b + c of 16x16 and 16x8 blocks, by the register maps of the PTX manual; on sm_75 in two steps of depth 8."""
    if cc < FORMATS[dtype].min_cc:
        pytest.skip(f"{dtype} needs sm_{FORMATS[dtype].min_cc}")
    number, e = number_format(dtype), Emitter(Block(GlobalMemory(), 32, 16), cc)
    a, b, c = (rng.normal(size=s).astype(np.float32) for s in ((16, 16), (16, 8), (16, 8)))
    g, t = np.arange(32) // 4, np.arange(32) % 4
    a_pairs = [
        (a[g + 8 * (i & 1), 2 * t + 8 * (i >> 1)], a[g + 8 * (i & 1), 2 * t + 1 + 8 * (i >> 1)]) for i in range(4)
    ]
    b_pairs = [(b[2 * t + 8 * i, g], b[2 * t + 1 + 8 * i, g]) for i in range(2)]
    a_planes = list(zip(*(number.split_pair(e, *pair) for pair in a_pairs), strict=True))
    b_planes = list(zip(*(number.split_pair(e, *pair) for pair in b_pairs), strict=True))
    sums = number.multiply_add(e, a_planes, b_planes, [c[g + 8 * (i >> 1), 2 * t + (i & 1)] for i in range(4)])
    got = np.empty((16, 8), np.float32)
    for i, value in enumerate(sums):
        got[g + 8 * (i >> 1), 2 * t + (i & 1)] = value
    exact_a, exact_b = (stored(m, dtype).astype(np.float64) for m in (a, b))
    # 16 products and c, each rounded to float32 as it is added; in float32 2^-21 of each product is left out
    bound = 2.0**-20 * (np.abs(exact_a) @ np.abs(exact_b) + np.abs(c))
    assert (np.abs(got - (exact_a @ exact_b + c)) <= bound).all()


def test_sm_75_has_no_deeper_product() -> None:
    e = Emitter(Block(GlobalMemory(), 32, 16), 75)
    with pytest.raises(NotImplementedError, match="sm_80"):
        e.mma([U32(0)] * 4, [U32(0)] * 2, [np.float32(0)] * 4)


# ----------------------------------------------------------------------------------- fragments, tiles


@pytest.mark.parametrize("dtype", FORMATS)
def test_packed_fragments_in_tiles(dtype: str, rng: np.random.Generator) -> None:
    target = start_block(dtype)
    n_planes = target.format.n_planes
    tile = Tile("t", SHAPE.rows, SHAPE.columns, 320, n_planes)
    fragment = tuple(rng.normal(size=32).astype(np.float32) for _ in range(SHAPE.n_elements))
    packed = make_pack(target, SHAPE)(fragment)
    assert len(packed) == packed_registers(target, SHAPE)
    make_store_fragment(target, tile, SHAPE)(U32(0), packed)
    make_barriers(target)[1]()
    for register, loaded in zip(packed, make_load_fragment(target, tile, SHAPE)(U32(0)), strict=True):
        np.testing.assert_array_equal(loaded, register)
    for value, got in zip(fragment, make_unpack(target, SHAPE)(packed), strict=True):
        np.testing.assert_array_equal(got, stored(value, dtype))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("n_values", "alignment"), [(1, 1), (2, 2), (4, 4), (8, 8), (4, 1), (8, 2), (9, 8), (12, 4), (25, 1)]
)
def test_rows_written_by_threads_are_read_as_fragments(dtype, n_values, alignment, rng: np.random.Generator) -> None:
    """Threads put values at every column they may start at; ldmatrix finds them, and so does `get`."""
    for first in range(0, SHAPE.columns - n_values + 1, alignment):
        target = start_block(dtype)
        tile = Tile("t", SHAPE.rows, SHAPE.columns, 64, target.format.n_planes)
        matrix = rng.normal(size=(SHAPE.rows, SHAPE.columns)).astype(np.float32)
        row = make_row_address(target, tile)(U32(0), (np.arange(32) % 16).astype(U32))
        rows = matrix[np.arange(32) % 16]
        for column in range(SHAPE.columns):
            make_put(target, 1)(row, U32(column), (rows[:, column],))
        rows = rows.copy()
        rows[:, first : first + n_values] = rng.normal(size=(16, n_values)).astype(np.float32)[np.arange(32) % 16]
        put, get = make_put(target, n_values, alignment), make_get(target, n_values, alignment)
        make_barriers(target)[1]()
        put(row, U32(first), tuple(rows[:, first : first + n_values].T))
        make_barriers(target)[1]()
        np.testing.assert_array_equal(
            np.stack(get(row, U32(first))), stored(np.ascontiguousarray(rows[:, first : first + n_values].T), dtype)
        )
        fragment = make_unpack(target, SHAPE)(make_load_fragment(target, tile, SHAPE)(U32(0)))
        g, t2 = np.arange(32) // 4, 2 * (np.arange(32) % 4)
        for i, value in enumerate(fragment):
            r, c = SHAPE.element(i)
            np.testing.assert_array_equal(value, stored(np.ascontiguousarray(rows[:16][g + r, t2 + c]), dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n_values", [2, 4, 8])
def test_values_need_an_aligned_column(dtype: str, n_values: int) -> None:
    target = start_block(dtype)
    tile = Tile("t", 32, 32, 64, target.format.n_planes)
    row = make_row_address(target, tile)(U32(0), np.arange(32, dtype=U32))
    with pytest.raises(MemoryFault):
        make_put(target, n_values)(row, U32(n_values // 2), tuple(np.zeros((n_values, 32), np.float32)))


@settings(deadline=None)
@given(st.integers(1, 32), st.integers(1, 16))
def test_rows_of_three_planes_lie_in_eight_bank_groups(column_blocks: int, row_blocks: int) -> None:
    tile = Tile("t", 16 * row_blocks, 16 * column_blocks, 0, 3)
    for first in range(0, tile.rows, 8):
        assert len({(first + i) * tile.stride // 16 % 8 for i in range(8)}) == 8
    assert tile.stride >= 6 * tile.columns and tile.stride % 16 == 0
    blocks = itertools.product(range(row_blocks), range(column_blocks), range(3))
    places = {tile.place(None, 0, m, n, p) for m, n, p in blocks}
    assert len(places) == 3 * row_blocks * column_blocks and max(places)[1] + 16 <= tile.end


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (48, 32)])
def test_weights_arrive_in_their_tile(dtype: str, rows: int, columns: int, rng: np.random.Generator) -> None:
    offset, number = 48, number_format(dtype)
    master = rng.normal(size=offset + rows * columns + 8).astype(np.float32)
    memory = GlobalMemory()
    address = U64(memory.place(number.parameters(master)))
    target = start_block(dtype, memory)
    tile = Tile("W", rows, columns, 32, number.n_planes)
    make_load_tile(target, tile, 32, offset)(U32(0), address)
    make_barriers(target)[2]()
    make_barriers(target)[0]()
    matrix = stored(master, dtype)[offset : offset + rows * columns].reshape(rows, columns)
    for first in range(0, rows, 16):
        row = make_row_address(target, tile)(U32(0), (first + np.arange(32) % 16).astype(U32))
        got = np.stack(make_get(target, columns, 8)(row, U32(0)))
        np.testing.assert_array_equal(got[:, :16].T, matrix[first : first + 16])


# ------------------------------------------------------------------------------------------ what there is


def test_other_dtypes_have_no_format() -> None:
    with pytest.raises(EngineUnavailable, match="compute in float16, bfloat16, float32; float64 has none yet"):
        number_format("float64")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chips_without_bfloat16_are_refused_by_name(dtype: str) -> None:
    spec = ModelSpec(16, 3, IdentitySpec(16), NetworkSpec("FullyFusedMLP", 16, 1), 16)
    with pytest.raises(PlanError, match=rf"{dtype} kernels need compute capability 8\.0.*7\.5 has float16 only"):
        inference_plans(spec, architecture((7, 5)), dtype)
    assert format_for(dtype, architecture((8, 0))) is FORMATS[dtype]
    assert inference_plans(spec, architecture((7, 5)), "float16")
