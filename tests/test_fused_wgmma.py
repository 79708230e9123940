"""wgmma on swizzled tiles in the emulator: descriptors against products in NumPy, and what its races look like.

Tiles are written by the tile's own arithmetic and read by the descriptor's, which know nothing of one another.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from emulation import emulator_target

from numba_tcnn.fused.emulated_memory import GlobalMemory, MemoryFault, RaceError
from numba_tcnn.fused.emulator import Block, Emitter
from numba_tcnn.fused.fragments import FragmentShape, make_pack
from numba_tcnn.fused.mlp import WeightGradient, make_backward_product, make_forward_product, make_weight_gradients
from numba_tcnn.fused.swizzled_tile import SWIZZLE_ALIGNMENT, SwizzledTile
from numba_tcnn.fused.warpgroup_mlp import add_products
from numba_tcnn.fused.wgmma import Chain, SharedOperand, batch_text

WIDTHS = (16, 32, 48, 64, 80, 128)


def write(block: Block, tile: SwizzledTile, matrix: np.ndarray) -> None:
    """A matrix of halves into a tile, element by element, past the race finder."""
    e, lanes = Emitter(block), block.n_threads
    for row, values in enumerate(matrix):
        start = np.full(lanes, tile.offset + row * tile.stride, np.uint32)
        for column, value in enumerate(values):
            address, immediate = tile.element(e, start, np.full(lanes, column, np.uint32))
            block.shared.cells[(int(address[0]) + immediate) // 2] = np.float16(value).view(np.uint16)


def fragment(matrix: np.ndarray, rows: int = 16) -> tuple[np.ndarray, ...]:
    """[n_warps * rows, columns] in accumulator form over the threads of a block."""
    shape, lane = FragmentShape(rows, matrix.shape[1]), np.arange(32)
    warps = matrix.reshape(-1, rows, matrix.shape[1])
    registers = []
    for i in range(shape.n_elements):
        row, column = shape.element(i)
        registers.append(np.concatenate([w[row + lane // 4, column + lane % 4 * 2] for w in warps]).astype(np.float32))
    return tuple(registers)


def start(n_threads: int = 256):
    target = emulator_target()
    target.block = Block(GlobalMemory(), n_threads, 160 * 1024)
    return target, target.block


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fan_in", WIDTHS)
@pytest.mark.parametrize("fan_out", (16, 32, 64))
def test_products_with_weights(fan_out: int, fan_in: int, transposed: bool, rng: np.random.Generator) -> None:
    """Small integers, so that sums are exact in any order."""
    target, block = start()
    tile = SwizzledTile("W", fan_out, fan_in, SWIZZLE_ALIGNMENT)
    weights = rng.integers(-4, 5, (fan_out, fan_in))
    write(block, tile, weights)
    operand = rng.integers(-4, 5, (128, fan_out if transposed else fan_in))
    packed = make_pack(target, FragmentShape(16, operand.shape[1]))(fragment(operand))
    product = (make_backward_product if transposed else make_forward_product)(target, tile, 16)
    result = product(np.zeros(256, np.uint32), packed)
    expected = operand @ (weights if transposed else weights.T)
    for register, wanted in zip(result, fragment(expected), strict=True):
        np.testing.assert_array_equal(register, wanted)


@pytest.mark.parametrize(("fan_out", "fan_in"), [(64, n) for n in WIDTHS] + [(n, 64) for n in (16, 32, 48)])
def test_weight_gradients(fan_out: int, fan_in: int, rng: np.random.Generator) -> None:
    """Each warpgroup adds the products of its own 64 samples; with 64 inputs, and outputs fewer, transposed."""
    _, block = start()
    d = SwizzledTile("d", 128, fan_out, 0)
    h = SwizzledTile("h", 128, fan_in, d.end)
    gradients, inputs = rng.integers(-4, 5, (128, fan_out)), rng.integers(-4, 5, (128, fan_in))
    write(block, d, gradients)
    write(block, h, inputs)
    layer = WeightGradient(d, h, 0, 4, 1, 2, transposed=fan_out != 64)
    rows, columns = (fan_in, fan_out) if layer.transposed else (fan_out, fan_in)
    old = rng.integers(-9, 9, (2, rows, columns))
    e = Emitter(block)
    base = np.zeros(256, np.uint32)
    (sums,) = add_products(e, base, [(layer, list(fragment(old.reshape(128, columns))), base)])
    for group in range(2):
        own = slice(64 * group, 64 * group + 64)
        expected = gradients[own].T @ inputs[own]
        old[group] += expected.T if layer.transposed else expected
    assert len(sums) == layer.n_accumulators
    for register, wanted in zip(sums, fragment(old.reshape(128, columns)), strict=True):
        np.testing.assert_array_equal(register, wanted)


def test_descriptors_are_those_that_ran_on_a_device() -> None:
    """Start address / 16, 128-byte swizzle, groups 1024 bytes apart, panels 8192; as measured right on an H200."""
    text, constraints, inputs = batch_text([
        Chain(64, (("a0", "a1", "a2", "a3"),), (SharedOperand("base", 2048, 128, 8192, True),))
    ])  # fmt: skip
    low, high = 2048 // 16 + (8192 // 16 << 16), 1 << 30 | 1024 // 16
    assert f"add.u32 lo, lo, {low};" in text and f"mov.b32 hi, {high};" in text
    assert inputs == ["a0", "a1", "a2", "a3", "base"] and constraints == ["r"] * 5
    assert "m64n64k16.f32.f16.f16" in text and ", {$32,$33,$34,$35}, d1, no, 1, 1, 1;" in text
    assert SharedOperand("base", 0, 32, 16, True).words == (1 << 16, 3 << 30 | 256 // 16)


def test_wrong_descriptors_are_noticed(rng: np.random.Generator) -> None:
    """Another swizzle, another distance of panels or another start gives another product."""
    _, block = start(128)
    tile, e = SwizzledTile("W", 64, 128, 0), Emitter(block)
    weights = rng.integers(-4, 5, (64, 128))
    write(block, tile, weights)
    d = rng.integers(-4, 5, (64, 16))
    a = tuple(e.pack_half2(*fragment(d)[2 * j : 2 * j + 2]) for j in range(4))
    address = np.zeros(128, np.uint32)

    def product(*fields) -> np.ndarray:
        return np.stack(e.wgmma([Chain(128, (a,), (SharedOperand(address, *fields, True),))])[0])

    expected = np.stack(fragment(d @ weights[:16]))
    np.testing.assert_array_equal(product(0, 128, tile.panel_bytes), expected)
    for fields in ((0, 64, tile.panel_bytes), (0, 128, tile.panel_bytes // 2), (2048, 128, tile.panel_bytes)):
        assert not np.array_equal(product(*fields), expected)


def test_descriptors_are_the_same_in_a_warpgroup() -> None:
    _, block = start(128)
    e = Emitter(block)
    b = (SharedOperand(np.arange(128, dtype=np.uint32) * 16, 0, 32, 16, False),)
    with pytest.raises(MemoryFault, match="not the same"):
        e.wgmma([Chain(16, ((np.zeros(128, np.uint32),) * 4,), b)])


# --------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("other_group", [False, True])
@pytest.mark.parametrize(("steps", "barrier", "message"), [
    ((), "", "no fence"),
    (("barrier",), "warpgroup", "no fence"),
    (("fence",), "", "no barrier"),
    (("barrier", "fence"), "warpgroup", "no barrier behind the fence"),
    (("barrier", "fence"), "block", "no barrier behind the fence"),
    (("fence", "barrier"), "warpgroup", None),
    (("fence", "barrier"), "block", None),
])  # fmt: skip
def test_written_fenced_and_met_before_it_is_read(steps, barrier: str, message: str | None, other_group: bool) -> None:
    """Each thread of two warpgroups writes 16 bytes; then each warpgroup reads its own 2 KB, or the other's."""
    _, block = start(256)
    e = Emitter(block)
    e.store_shared(e.mul(e.thread(), 16), "u32", [e.thread()] * 4)
    for step in steps:
        if step == "fence":
            e.fence_async()
        else:
            {"warpgroup": e.warpgroup_barrier, "block": e.barrier}[barrier]()
    group = e.xor(e.warpgroup(), 1) if other_group else e.warpgroup()
    b = (SharedOperand(e.mul(group, 2048), 0, 128, 1024, True),)
    if message is None and other_group and barrier == "warpgroup":
        message = "with no barrier between"
    with nullcontext() if message is None else pytest.raises(RaceError):
        e.wgmma([Chain(64, ((np.zeros(256, np.uint32),) * 4,), b)])


@pytest.mark.parametrize(("barrier", "safe"), [("none", False), ("warp", False), ("warpgroup", True), ("block", True)])
def test_what_a_warpgroup_reads_is_not_rewritten_before_its_barrier(barrier: str, safe: bool) -> None:
    _, block = start(256)
    e = Emitter(block)
    b = (SharedOperand(e.mul(e.warpgroup(), 2048), 0, 128, 1024, True),)
    e.wgmma([Chain(64, ((np.zeros(256, np.uint32),) * 4,), b)])
    {"none": lambda: None, "warp": e.warp_barrier, "warpgroup": e.warpgroup_barrier, "block": e.barrier}[barrier]()
    with nullcontext() if safe else pytest.raises(RaceError):
        e.store_shared(e.mul(e.thread(), 16), "u32", [e.thread()] * 4)


def test_a_warpgroup_barrier_does_not_order_other_warpgroups() -> None:
    _, block = start(256)
    e = Emitter(block)
    e.store_shared(e.mul(e.thread(), 4), "u32", [e.thread()])
    e.warpgroup_barrier()
    e.load_shared(e.mul(e.xor(e.thread(), 64), 4), "u32")
    with pytest.raises(RaceError):
        e.load_shared(e.mul(e.xor(e.thread(), 128), 4), "u32")


@pytest.mark.parametrize("bad", [(16, 24, 0), (24, 16, 0), (16, 16, 512), (16, 16, 16)])
def test_swizzled_tiles_are_aligned(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="aligned"):
        SwizzledTile("t", *bad)


@pytest.mark.parametrize("ways", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("fan_in", (16, 32, 64, 80, 96, 128))
@pytest.mark.parametrize("fan_out", (16, 32))
def test_warps_divide_the_columns_of_swizzled_tiles(
    fan_out: int, fan_in: int, ways: tuple[int, int], rng: np.random.Generator
) -> None:
    """Each warp sums its blocks of dW over its samples, by mma; or the division is refused before anything compiles."""
    target, block = start()
    d = SwizzledTile("d", 128, fan_out, SWIZZLE_ALIGNMENT)
    h = SwizzledTile("h", 128, fan_in, SWIZZLE_ALIGNMENT + d.n_bytes)
    per_warp = [divmod(columns // 16, n) for columns, n in zip((fan_out, fan_in), ways, strict=True)]
    if any(rest or (n > 1 and blocks not in (1, 2, 4, 8)) for (blocks, rest), n in zip(per_warp, ways, strict=True)):
        with pytest.raises(ValueError, match="blocks|divide"):
            WeightGradient(d, h, 0, *ways, 8 // (ways[0] * ways[1]))
        return
    layer = WeightGradient(d, h, 0, *ways, 8 // (ways[0] * ways[1]))
    gradients, inputs = rng.integers(-4, 5, (128, fan_out)), rng.integers(-4, 5, (128, fan_in))
    write(block, d, gradients)
    write(block, h, inputs)
    rows, columns = 16 * layer.row_blocks, 16 * layer.column_blocks
    sums = rng.integers(-9, 9, (8, rows, columns))
    before = fragment(sums.reshape(8 * rows, columns), rows)
    result = make_weight_gradients(target, (layer,))(np.zeros(256, np.uint32), before)
    samples = 128 // layer.sample_parts
    for warp in range(8):
        row, column = rows * (warp % ways[0]), columns * (warp // ways[0] % ways[1])
        part = slice(samples * (warp // (ways[0] * ways[1])), None)
        d_part, h_part = gradients[part][:samples], inputs[part][:samples]
        sums[warp] += d_part[:, row : row + rows].T @ h_part[:, column : column + columns]
    for register, wanted in zip(result, fragment(sums.reshape(8 * rows, columns), rows), strict=True):
        np.testing.assert_array_equal(register, wanted)
