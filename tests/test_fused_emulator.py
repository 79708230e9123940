"""The emulator that other tests trust: instructions against their definitions, faults, and the race finder."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import numpy as np
import pytest
from emulation import EmulatedModel

from numba_tcnn.config import parse_model
from numba_tcnn.fused.emulated_memory import GlobalMemory, MemoryFault, RaceError
from numba_tcnn.fused.emulator import Block, Emitter
from numba_tcnn.fused.network_plans import inference_plans, single_plans, staged_plans
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.layout import n_params

LANES = np.arange(32, dtype=np.uint32)


def emitter(n_threads: int = 32, shared_bytes: int = 4096, memory: GlobalMemory | None = None) -> Emitter:
    return Emitter(Block(memory or GlobalMemory(), n_threads, shared_bytes))


def packed(e: Emitter, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return e.pack_half2(low.astype(np.float32), high.astype(np.float32))


# ----------------------------------------------------------------------------------------- tensor cores


def test_mma_is_a_matrix_product(rng: np.random.Generator) -> None:
    """Operands laid out by the PTX ISA's tables for m16n8k16, element by element; small integers, so no rounding."""
    e = emitter(64)
    a = rng.integers(-8, 8, (2, 16, 16))
    b = rng.integers(-8, 8, (2, 16, 8))
    c = rng.integers(-8, 8, (2, 16, 8))
    lanes = [(w, lane // 4, lane % 4) for w in range(2) for lane in range(32)]

    def a_element(i: int) -> np.ndarray:  # a0..a7 of every lane
        rows = 0 if i in (0, 1, 4, 5) else 8
        columns = (0 if i < 4 else 8) + (i & 1)
        return np.array([a[w, g + rows, 2 * t + columns] for w, g, t in lanes])

    def b_element(i: int) -> np.ndarray:
        return np.array([b[w, 2 * t + (i & 1) + (8 if i >= 2 else 0), g] for w, g, t in lanes])

    def c_element(matrix: np.ndarray, i: int) -> np.ndarray:
        return np.array([matrix[w, g + (0 if i < 2 else 8), 2 * t + (i & 1)] for w, g, t in lanes], np.float32)

    a_registers = [packed(e, a_element(i), a_element(i + 1)) for i in (0, 2, 4, 6)]
    b_registers = [packed(e, b_element(i), b_element(i + 1)) for i in (0, 2)]
    d = e.mma(a_registers, b_registers, [c_element(c, i) for i in range(4)])
    product = a @ b + c
    for i in range(4):
        np.testing.assert_array_equal(d[i], c_element(product, i))


def rows_of_four_matrices(e: Emitter, stride: int = 144) -> np.ndarray:
    """Row addresses for ldmatrix.x4: lane l gives row l % 8 of matrix l / 8; here one 32x8 matrix, top to bottom."""
    return e.lane() * np.uint32(stride)


def test_ldmatrix_is_the_definition(rng: np.random.Generator) -> None:
    e = emitter(shared_bytes=32 * 144)
    matrix = rng.integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    e.block_state.shared.cells.reshape(32, 72)[:, :8] = matrix
    address = rows_of_four_matrices(e)
    plain, transposed = e.ldmatrix(address), e.ldmatrix(address, transposed=True)
    for i in range(4):
        part = matrix[8 * i : 8 * i + 8].astype(np.uint32)
        g, t = LANES // 4, LANES % 4
        np.testing.assert_array_equal(plain[i], part[g, 2 * t] | part[g, 2 * t + 1] << np.uint32(16))
        np.testing.assert_array_equal(transposed[i], part[2 * t, g] | part[2 * t + 1, g] << np.uint32(16))


def test_stmatrix_is_the_inverse_of_ldmatrix(rng: np.random.Generator) -> None:
    e = emitter(64, shared_bytes=64 * 144 + 16)
    registers = [rng.integers(0, 1 << 32, 64).astype(np.uint32) for _ in range(4)]
    address = e.thread() * np.uint32(144)
    e.stmatrix(address, registers, offset=16)
    e.warp_barrier()
    for stored, loaded in zip(registers, e.ldmatrix(address, offset=16), strict=True):
        np.testing.assert_array_equal(loaded, stored)


def test_shuffle_exchanges_within_warps() -> None:
    e = emitter(64)
    for mask in (1, 2, 4, 8, 16):
        expected = (np.arange(64) // 32 * 32) + (np.arange(64) % 32 ^ mask)
        np.testing.assert_array_equal(e.shuffle_xor(e.thread(), mask), expected)


# -------------------------------------------------------------------------------------- single values


def test_integers_wrap_modulo_2_32() -> None:
    e = emitter()
    top = np.full(32, 0xFFFFFFFF, np.uint32)
    assert (e.add(top, 1) == 0).all() and (e.sub(0, LANES + np.uint32(1)) == 0xFFFFFFFF - LANES).all()
    assert (e.mul(top, top) == 1).all() and (e.shl(top, 4) == 0xFFFFFFF0).all()
    assert (e.address(np.uint64(1 << 40), top, 16, 8) == (1 << 40) + 16 * 0xFFFFFFFF + 8).all()  # 64 bits wide


def test_halves_round_to_nearest_even_and_saturate_to_infinity() -> None:
    e = emitter()
    values = np.resize(
        np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 2**-25, 1.5 * 2**-24, np.nan], np.float32), 32
    )
    expected = np.resize(np.array([1, 1 + 2**-9, 65504, np.inf, 0, 2**-23, np.nan], np.float32), 32)
    low, high = e.unpack_half2(e.pack_half2(values, -values))
    np.testing.assert_array_equal(low, expected)
    np.testing.assert_array_equal(high, -expected)
    np.testing.assert_array_equal(e.half_to_float(e.float_to_half(values)), expected)


def test_floor_to_int_saturates_and_gives_0_for_nan() -> None:
    e = emitter()
    values = np.array([-0.5, 2.9, -1e30, 3e9, np.inf, -np.inf, np.nan, -3.0], np.float32)
    expected = np.array([-1, 2, -(2**31), 2**31 - 1, 2**31 - 1, -(2**31), 0, -3], np.int64)
    np.testing.assert_array_equal(e.floor_to_int(values).astype(np.int32), expected)


def test_low_bits_of_floor_of_anything() -> None:
    e = emitter()
    values = np.array([-0.5, 2.9, 2.0**33 + 2**12, -(2.0**40), 2.0**62, -3e38, np.inf, np.nan], np.float32)
    expected = np.array([2**32 - 1, 2, 2**12, 0, 0, 0, 0, 0], np.uint32)
    np.testing.assert_array_equal(e.low_bits_of_floor(values), expected)


# ---------------------------------------------------------------------------------------------- faults


def test_global_accesses_outside_or_misaligned_are_faults() -> None:
    memory = GlobalMemory()
    array = np.arange(64, dtype=np.float32)
    base = np.uint64(memory.place(array))
    e = emitter(memory=memory)
    np.testing.assert_array_equal(e.load_global(e.address(base, LANES, 4), "f32")[0], array[:32])
    for address, count in ((e.address(base, LANES, 4, 132), 1), (e.address(base, LANES, 8, 4), 2), (LANES, 1)):
        with pytest.raises(MemoryFault):
            e.load_global(address, "f32", count)
        with pytest.raises(MemoryFault):
            e.store_global(address, "f32", [np.zeros(32)] * count)
    with pytest.raises(MemoryFault):
        e.add_global(e.address(base, LANES, 4, 132), [np.zeros(32)])
    with e.when(e.less(LANES, 16)):  # lanes that do nothing may hold any address
        (loaded,) = e.load_global(e.address(base, LANES, 4, 192), "f32")
    assert (loaded[:16] == array[48:]).all() and (loaded[16:] == 0).all()
    (loaded,) = e.load_global_where(e.less(LANES, 16), e.address(base, LANES, 4, 192), "f32")
    assert (loaded[:16] == array[48:]).all() and (loaded[16:] == 0).all()


def test_reading_written_memory_as_constant_is_a_fault() -> None:
    memory = GlobalMemory()
    base = np.uint64(memory.place(np.zeros(64, np.float32)))
    e = emitter(memory=memory)
    low, high = e.address(base, LANES, 4), e.address(base, LANES, 4, 128)
    e.load_global(low, "f32")
    e.store_global(high, "f32", [np.ones(32)])
    e.load_global(high, "f32", constant=False)
    with pytest.raises(MemoryFault, match="reads it as constant"):
        e.add_global(low, [np.ones(32)])
    with pytest.raises(MemoryFault, match="reads it as constant"):
        e.load_global(high, "f32")
    memory.begin_launch()
    assert (e.load_global(high, "f32")[0] == 1).all()


def test_shared_accesses_outside_or_misaligned_are_faults() -> None:
    e = emitter(shared_bytes=256)
    for address, kind, count in ((LANES * 4 + 132, "u32", 1), (LANES * 2, "u32", 1), (LANES * 4, "u32", 2)):
        with pytest.raises(MemoryFault):
            e.load_shared(address.astype(np.uint32), kind, count)
        with pytest.raises(MemoryFault):
            e.store_shared(address.astype(np.uint32), kind, [LANES] * count)
    with pytest.raises(MemoryFault):
        e.ldmatrix(LANES * np.uint32(8))


def test_shared_memory_starts_as_nan() -> None:
    e = emitter()
    assert np.isnan(e.load_shared(LANES * 4, "f32")[0]).all()
    assert np.isnan(e.unpack_half2(e.ldmatrix(LANES * 16)[0])).all()


def test_asynchronous_copies_arrive_as_late_as_their_wait() -> None:
    memory = GlobalMemory()
    array = np.arange(128, dtype=np.float32)
    base = np.uint64(memory.place(array))
    e = emitter(memory=memory)
    e.copy_async(LANES * 16, e.address(base, LANES, 16), offset=0)
    assert np.isnan(e.load_shared(LANES * 16, "f32")[0]).all()  # by the thread that asked for it: no race, but early
    e.copy_wait()
    np.testing.assert_array_equal(np.stack(e.load_shared(LANES * 16, "f32", 4), 1).ravel(), array)


def test_asynchronous_copies_count_as_writes_from_their_issue_on() -> None:
    memory = GlobalMemory()
    base = np.uint64(memory.place(np.zeros(128, np.float32)))
    e = emitter(memory=memory)
    e.load_shared(np.uint32(496) - LANES * 16, "f32")
    with pytest.raises(RaceError, match="writes shared byte .* read"):
        e.copy_async(LANES * 16, e.address(base, LANES, 16))


# ----------------------------------------------------------------------------------------- race finder

BARRIERS = ("none", "warp", "block")


def exchange(e: Emitter, distance: int, first: str, second: str, barrier: str) -> None:
    """Every thread touches its own 4 bytes, then those of the thread `distance` further, by "read" or "write"."""
    n = e.block_state.n_threads
    own = e.thread() * np.uint32(4)
    other = (e.thread() + np.uint32(distance)) % np.uint32(n) * np.uint32(4)
    for address, use in ((own, first), (other, second)):
        if use == "read":
            e.load_shared(address, "u32")
        else:
            e.store_shared(address, "u32", [e.thread()])
        {"none": lambda: None, "warp": e.warp_barrier, "block": e.barrier}[barrier]()


@pytest.mark.parametrize("barrier", BARRIERS)
@pytest.mark.parametrize(("first", "second"), [("write", "read"), ("read", "write"), ("write", "write")])
@pytest.mark.parametrize("distance", [0, 1, 32])
def test_planted_races_are_found(barrier: str, first: str, second: str, distance: int) -> None:
    """Neighbours need a warp barrier (the last lane's neighbour is in the next warp: a block barrier); other warps a
    block barrier; nobody has to wait for himself."""
    wanted = {0: "none", 1: "block", 32: "block"}[distance]
    safe = BARRIERS.index(barrier) >= BARRIERS.index(wanted)
    with nullcontext() if safe else pytest.raises(RaceError):
        exchange(emitter(64), distance, first, second, barrier)


@pytest.mark.parametrize(("first", "second"), [("write", "read"), ("read", "write"), ("write", "write")])
def test_a_warp_barrier_orders_the_lanes_of_a_warp(first: str, second: str) -> None:
    exchange(emitter(32), 1, first, second, "warp")
    with pytest.raises(RaceError):
        exchange(emitter(32), 1, first, second, "none")


def test_reads_do_not_race_with_reads() -> None:
    exchange(emitter(64), 32, "read", "read", "none")


@pytest.mark.parametrize("n_threads", [32, 64])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_write_waits_for_every_reader(n_threads: int, at_once: bool) -> None:
    """All threads read one word, at once or one after the other; the last of them then writes it."""
    e = emitter(n_threads)
    last = e.equal(e.thread(), n_threads - 1)
    if at_once:
        e.load_shared(np.uint32(0), "u32")
    else:
        for thread in range(n_threads):
            with e.when(e.equal(e.thread(), thread)):
                e.load_shared(np.uint32(0), "u32")
    with e.when(last), pytest.raises(RaceError):
        e.store_shared(np.uint32(0), "u32", [e.thread()])
    if n_threads == 32:
        e.warp_barrier()
    else:
        e.barrier()
    with e.when(last):
        e.store_shared(np.uint32(0), "u32", [e.thread()])


def test_one_instruction_may_not_write_two_values_to_a_cell() -> None:
    with pytest.raises(RaceError, match="different values"):
        emitter().store_shared(np.uint32(0), "u32", [LANES])
    emitter().store_shared(np.uint32(0), "u32", [np.uint32(7)])


def test_stmatrix_races_as_ordinary_writes_do() -> None:
    e = emitter(64, shared_bytes=64 * 16)
    e.stmatrix(e.thread() * np.uint32(16), [LANES.repeat(2)] * 4)
    with pytest.raises(RaceError):
        e.ldmatrix((e.thread() ^ np.uint32(32)) * np.uint32(16))
    e.barrier()
    e.ldmatrix((e.thread() ^ np.uint32(32)) * np.uint32(16))


# --------------------------------------------------------------------- mutations of the real kernels

GRID = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 3}
NETWORK = {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 2}

REDUNDANT = {
    ("barrier", "propagate"): "the loss's sum starts with a barrier of its own",
    ("barrier", "sum_of_warps"): "the first of its two: nothing before it in this kernel touches shared memory",
    ("warp_barrier", "propagate"): "two stand around the encoding's backward pass, which has one; without any: a race",
}
"""Barriers that a kernel can spare one at a time, and why."""

SYNCHRONISING = ("barrier", "warp_barrier", "warpgroup_barrier", "fence_async", "copy_wait")


class BarrierMutation:
    """Replaces the emulator's synchronising instructions: records where they are used from, or leaves one use out.

    A place is (instruction, function, line) of the first frame outside of the emulator and of `make_barriers`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: dict[tuple[str, str, int], None] = {}
        self.dropped: set[tuple[str, str, int]] = set()
        for name in SYNCHRONISING:
            monkeypatch.setattr(Emitter, name, self.replacement(name, getattr(Emitter, name)))

    def replacement(self, name: str, original):
        def instruction(e: Emitter) -> None:
            frame = sys._getframe(1)
            while frame.f_code.co_filename.endswith(("tiles.py", "target.py", "emulator.py")):
                frame = frame.f_back
            place = (name, frame.f_code.co_name, frame.f_lineno)
            self.seen.setdefault(place)
            if place not in self.dropped:
                original(e)

        return instruction


def job(name: str, *, encoding_gradient: bool = True):
    """(run() -> arrays of results) for one of the kernels, 300 samples in tiles of 128 or fewer: several a block."""
    spec = parse_model(2, 3, GRID, NETWORK | {"n_neurons": 64 if "wide" in name else 32})
    rng = np.random.default_rng(3)
    params = rng.normal(0, 0.3, n_params(spec)).astype(np.float32)
    x, y = rng.random((300, 2), np.float32), rng.random((300, 3), np.float32)
    chip = architecture((9, 0))

    def run() -> tuple[np.ndarray, ...]:
        model = EmulatedModel(spec, params)
        if name.startswith("inference"):
            plans = inference_plans(spec, chip)
            if not name.endswith("by warpgroups"):
                plans = [p for p in plans if p.weights.resident == (name == "inference") and not p.swizzled]
            return (model.inference(x, plans[0], InferenceOptions(), n_blocks=1),)
        if name.startswith("single"):
            plans = single_plans(spec, chip, encoding_gradient=encoding_gradient)
            divided = "wide" in name  # each warp's part of dW is over the samples of several warps
            plans = [p for p in plans if divided == any(l.sample_parts < p.warps for l in p.layers)]
            plan = next(p for p in plans if p.swizzled == name.endswith("by warpgroups"))
        else:
            resident = name == "staged"
            plans = staged_plans(spec, chip, encoding_gradient=encoding_gradient)
            plan = next(p for p in plans if p.propagate.weights.resident == resident)
        options = GradientOptions(table_gradient=encoding_gradient, input_gradient=encoding_gradient)
        loss, *gradients = model.gradient(x, y, plan, options, n_blocks=1)
        return (np.array(loss), *gradients)

    return run


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_barrier_of_the_real_kernels_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out one barrier at a time: in a kernel that has it, a race is found or something else computed.

    A line of code serves several kernels, e.g. a barrier that streamed weights need where resident ones do not.
    """
    mutation = BarrierMutation(monkeypatch)

    def is_noticed(run, expected, dropped: set) -> bool:
        mutation.dropped = dropped
        try:
            return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(run(), expected, strict=True))
        except RaceError:
            return True

    needed, everywhere = set(), {}
    kernels = (
        "inference", "inference streamed", "single", "single wide", "staged", "staged streamed",
        "inference by warpgroups", "single by warpgroups", "single wide by warpgroups",
    )  # fmt: skip
    # without the encoding's gradient, whose barrier is between the last store and the sums of dW
    for name, encoding_gradient in (*((name, True) for name in kernels), ("single by warpgroups", False)):
        run = job(name, encoding_gradient=encoding_gradient)
        mutation.dropped = set()
        mutation.seen.clear()
        expected = run()
        everywhere |= mutation.seen
        needed |= {place for place in list(mutation.seen) if is_noticed(run, expected, {place})}
    assert {instruction for instruction, _, _ in everywhere} == set(SYNCHRONISING)
    spared = [place for place in everywhere if place not in needed]
    unexplained = [place for place in spared if place[:2] not in REDUNDANT]
    assert not unexplained, f"kernels do as well without {unexplained}"
    pair = {place for place in spared if place[:2] == ("warp_barrier", "propagate")}
    run = job("staged", encoding_gradient=False)
    mutation.dropped = set()
    assert is_noticed(run, run(), pair)
