"""The encoding's stages: x to rows of a tile, and rows of gradients back to the table and to dL/dx.

The items of an encoding (`encoding_parts.py`) are divided among the lanes of each warp, for the warp's own samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..specs import ModelSpec
from .arithmetic import make_index_arithmetic, make_multiply
from .encoding_parts import BackwardPart, ItemGroup, float_features, make_padding
from .encodings import make_encoding
from .fragments import Target
from .plan import KernelPlan
from .sinks import RowMemory
from .stage_io import (
    BAD,
    BATCH,
    BATCH_SIZE,
    COARSE_SCALE,
    DX,
    DX_STRIDE,
    FINE_SCALE,
    FIRST_ROW,
    MARK,
    MAX_LEVEL_STRIDE,
    MAX_LEVELS,
    SCALES,
    TABLE,
    TABLE_GRADIENT,
    X_STRIDE,
    GradientOptions,
    X,
)
from .tiles import AnyTile, make_barriers, make_indices, make_row_address


def make_encode(target: Target, spec: ModelSpec, plan: KernelPlan, options) -> Callable:
    """encode(base, io, first_row): features of this warp's samples, from `first_row` of the batch on, into the x tile.

    Rows past the batch repeat its last row; their gradients will be 0.
    """
    memory = RowMemory(
        target, options.input_dtype, options.aligned_input, max_level=options.max_level, tile=plan.x
    )  # fmt: skip
    parts = make_encoding(target, spec.encoding, memory, table_gradient=False, input_gradient=False)
    n_own = spec.encoding.n_output_dims  # a bare encoding's tile is wider than the encoding
    n_padding = plan.x.columns - n_own
    padding = make_padding(target, float_features(target), memory, n_own, n_padding, parts.padding_value)
    return make_encode_groups(target, plan, (*parts.encode, *padding.encode), make_place(target, plan.x))


def make_place(target: Target, tile: AnyTile) -> Callable:
    """place(base, io, row, tile_row) -> `at` of a sample: what its memory finds everything by (`sinks.py`)."""
    row_address = make_row_address(target, tile)

    def place(base, io, row, tile_row):
        tile_place = row_address(base, tile_row)
        whole = io[FIRST_ROW], io[BATCH_SIZE], io[MAX_LEVELS], io[MAX_LEVEL_STRIDE]
        return io[X], io[X_STRIDE], row, io[TABLE], tile_place, whole[0], whole[1], whole[2], whole[3]

    return target.device(place)


def make_encode_groups(target: Target, plan: KernelPlan, groups: tuple[ItemGroup, ...], place: Callable) -> Callable:
    """encode(base, io, first_row): the work of all items of this warp's samples; `place` as of `make_place`."""
    return chain_stages(target, [_make_encode_group(target, plan, group, place) for group in groups])


def chain_stages(target: Target, stages: list[Callable]) -> Callable:
    """One function that calls all stages with the same three arguments."""
    if not stages:

        def nothing(base, io, first_row):
            return

        return target.device(nothing)
    if len(stages) == 1:
        return stages[0]
    middle = len(stages) // 2  # halves, since Numba limits how deep functions nest
    first, second = chain_stages(target, stages[:middle]), chain_stages(target, stages[middle:])

    def both(base, io, first_row):
        first(base, io, first_row)
        second(base, io, first_row)

    return target.device(both)


def _make_table_gradient(target: Target, options: GradientOptions) -> Callable:
    """table_gradient(io): where parameter gradients go, as `RowMemory` takes it."""
    if not options.fixed_point:

        def table_gradient(io):
            return io[TABLE_GRADIENT]

    else:

        def table_gradient(io):
            return io[TABLE_GRADIENT], io[FINE_SCALE], io[COARSE_SCALE], io[BAD], io[MARK]

    return target.device(table_gradient)


def _make_encode_group(target: Target, plan: KernelPlan, group: ItemGroup, place: Callable) -> Callable:
    work = group.work
    turns, locate = _make_division(target, plan, group)
    # a block alone on its multiprocessor has too few warps to wait for memory more than once
    u32, unroll = target.u32, target.unroll_full if plan.swizzled and turns <= 4 else target.unroll_by_2

    def take_turn(base, io, first_row, turn):
        item, row, place_row, live, lead = locate(turn, first_row, io[BATCH])
        work(item, place(base, io, row, place_row))

    take_turn = target.device(take_turn)

    if group.by_sample:
        return two_turns_at_a_time(target, turns, take_turn)

    def encode_group(base, io, first_row):
        for turn in range(turns):
            unroll()
            take_turn(base, io, first_row, u32(turn))

    return target.device(encode_group)


def two_turns_at_a_time(target: Target, turns: int, take_turn: Callable) -> Callable:
    """all_turns(a, b, c) calls take_turn(a, b, c, turn), in pairs so that the gathers of one hide those of the other.

    Written out, as LLVM forgets the hint of a loop where it unrolls loops inside of it.
    """
    u32 = target.u32

    def all_turns(a, b, c):
        for pair in range(turns // 2):
            take_turn(a, b, c, u32(2 * pair))
            take_turn(a, b, c, u32(2 * pair + 1))
        if turns % 2:
            take_turn(a, b, c, u32(turns - 1))

    return target.device(all_turns)


def _make_division(target: Target, plan: KernelPlan, group: ItemGroup):
    """How a warp divides a group's items of its samples among its lanes.

    Returns the number of turns and locate(turn, first_row, batch) -> (item, row of the batch, row of the tile, live,
    lead): live is 1.0 for work that counts (0.0 past the batch or past the items, where a lane repeats something),
    lead the index of the lane's share of its sample.
    """
    rows, first_item, count = plan.rows, group.first, group.count
    shares = 32 // rows
    u32 = target.u32
    indices = make_indices(target)
    lane_index, warp_index = indices.lane, indices.warp
    smaller, inside, quotient, remainder = make_index_arithmetic(target)

    multiply = make_multiply(target)
    if group.by_sample:
        turns = -(-count // shares)

        def locate(turn, first_row, batch):
            lane = lane_index()
            local_row, share = remainder(lane, u32(rows)), quotient(lane, u32(rows))
            item = u32(u32(turn * u32(shares)) + share)
            row = u32(first_row + local_row)
            live = multiply(inside(row, batch), inside(item, u32(count)))
            item = u32(smaller(item, u32(count - 1)) + u32(first_item))
            place_row = u32(u32(warp_index() * u32(rows)) + local_row)
            return item, smaller(row, u32(batch - u32(1))), place_row, live, share

    else:
        total = rows * count
        turns = -(-total // 32)

        def locate(turn, first_row, batch):
            index = smaller(u32(u32(turn * u32(32)) + lane_index()), u32(total - 1))
            local_row, item = quotient(index, u32(count)), u32(remainder(index, u32(count)) + u32(first_item))
            row = u32(first_row + local_row)
            live = inside(row, batch)
            place_row = u32(u32(warp_index() * u32(rows)) + local_row)
            return item, smaller(row, u32(batch - u32(1))), place_row, live, u32(0)

    return turns, target.device(locate)


def make_encode_backward(target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions) -> Callable:
    """encode_backward(base, io, first_row): from this warp's rows of the dx tile to dL/d(table) and dL/dx."""
    memory = RowMemory(
        target, options.input_dtype, options.aligned_input,
        max_level=options.max_level, fixed_point=options.fixed_point, tile=plan.dx,
    )  # fmt: skip
    parts = make_encoding(
        target, spec.encoding, memory, table_gradient=options.table_gradient, input_gradient=options.input_gradient
    )
    return make_backward_parts(target, spec, plan, parts.backward, options, make_place(target, plan.dx))


def make_backward_parts(
    target: Target,
    spec: ModelSpec,
    plan: KernelPlan,
    parts: tuple[BackwardPart, ...],
    options: GradientOptions,
    place: Callable,
) -> Callable:
    """backward(base, io, first_row): the work of all parts on this warp's samples; `place` as of `make_place`.

    A part of the encoding whose input dims no other part reads stores its dL/dx; parts that share dims add to them, one
    after the other. What is added to, and dims that count for nothing, are cleared first.
    """
    if not options.input_gradient:
        return chain_stages(target, [_make_backward_part(target, plan, part, options, False, place) for part in parts])
    n_readers = [0] * spec.n_input_dims
    for part in parts:
        for dim in part.dims:
            n_readers[dim] += 1
    adding = [part for part in parts if max(n_readers[dim] for dim in part.dims) > 1]
    added_to = {dim for part in adding for dim in part.dims}
    cleared = [dim for dim in range(spec.n_input_dims) if n_readers[dim] == 0 or dim in added_to]
    stages = [_make_clear(target, plan, first, count) for first, count in _runs(cleared)]
    if adding:
        stages.append(_make_wait(target))
    for part in parts:
        stages.append(_make_backward_part(target, plan, part, options, part in adding, place))
        if part in adding:
            stages.append(_make_wait(target))
    return chain_stages(target, stages)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """(first, count) of runs of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def _make_wait(target: Target) -> Callable:
    """A stage: what the warp's lanes have written is there for its other lanes."""
    _, warp_barrier, _ = make_barriers(target)

    def wait(base, io, first_row):
        warp_barrier()

    return target.device(wait)


def _make_clear(target: Target, plan: KernelPlan, first_dim: int, n_dims: int) -> Callable:
    """A stage: dL/dx of some dims becomes 0."""
    store, rows, u32, f32 = _make_store_input_gradient(target, False), plan.rows, target.u32, target.f32
    turns, locate = _make_division(target, plan, ItemGroup(first_dim, n_dims, None, by_sample=False))
    warp_index = make_indices(target).warp

    def clear(base, io, first_row):
        for turn in range(turns):
            dim, _, place_row, _, _ = locate(u32(turn), first_row, io[BATCH])
            row = u32(first_row + u32(place_row - u32(warp_index() * u32(rows))))
            store(io[DX], io[DX_STRIDE], row, io[BATCH], dim, u32(0), f32(0))

    return target.device(clear)


@functools.cache
def _make_store_input_gradient(target: Target, adds: bool):
    """store(dx, dx_stride, row, batch, dim, share, value): one element of dL/dx, by the sample's first lane; or add."""

    @target.intrinsic(["u64", "u32", "u32", "u32", "u32", "u32", "f32"], "void")
    def store_input_gradient(e, dx, dx_stride, row, batch, dim, share, value):
        with e.when(e.both(e.less(row, batch), e.equal(share, 0))):
            place = e.address(e.address_by(dx, row, dx_stride), dim, 4)
            if adds:
                value = e.fadd(e.load_global(place, "f32", constant=False)[0], value)
            e.store_global(place, "f32", [value])

    return store_input_gradient


@functools.cache
def make_read_scale(target: Target, index: int):
    """read(scales) -> scales[index]."""

    @target.intrinsic(["u64"], "f32")
    def read_scale(e, scales):
        return e.load_global(scales, "f32", 1, 4 * index)[0]

    return read_scale


@functools.cache
def _make_add_shares(target: Target, rows: int):
    """Sum of a value over the lanes that share a sample."""

    @target.intrinsic(["f32"], "f32")
    def add_shares(e, value):
        return e.fadd(value, e.shuffle_xor(value, 16)) if rows == 16 else value

    return add_shares


def _make_backward_part(
    target: Target, plan: KernelPlan, part: BackwardPart, options: GradientOptions, adds: bool, place: Callable
) -> Callable:
    make = _make_backward_by_item if part.dims_per_item else _make_backward_by_sample
    return make(target, plan, part, options, adds, place)


def _make_backward_by_sample(
    target: Target, plan: KernelPlan, part: BackwardPart, options: GradientOptions, adds: bool, place: Callable
) -> Callable:
    u32, f32, unroll = target.u32, target.f32, target.unroll_full
    spaces, np_f32, n_dims, first_dim, rows = target.memory_spaces, np.float32, part.n_dims, part.first_dim, plan.rows
    table_gradient = _make_table_gradient(target, options)
    store, result_scale = _make_store_input_gradient(target, adds), make_read_scale(target, 1)
    add_shares = _make_add_shares(target, rows)
    lane_index = make_indices(target).lane
    _, _, quotient, remainder = make_index_arithmetic(target)
    input_gradient = options.input_gradient

    def make_group(group):
        work = group.work
        turns, locate = _make_division(target, plan, group)

        def take_turn(io, start, dx, turn):
            base, first_row = start
            item, row, place_row, live, lead = locate(turn, first_row, io[BATCH])
            work(item, place(base, io, row, place_row), table_gradient(io), live, dx)

        all_turns = two_turns_at_a_time(target, turns, target.device(take_turn))

        def backward_group(base, io, first_row, dx):
            all_turns(io, (base, first_row), dx)

        return target.device(backward_group)

    def chain(groups):
        first = make_group(groups[0])
        if len(groups) == 1:
            return first
        second = chain(groups[1:])

        def both(base, io, first_row, dx):
            first(base, io, first_row, dx)
            second(base, io, first_row, dx)

        return target.device(both)

    all_groups = chain(part.groups)

    def backward_part(base, io, first_row):
        dx = spaces.local.array(n_dims, np_f32)
        for d in range(n_dims):
            unroll()
            dx[d] = f32(0)
        all_groups(base, io, first_row, dx)
        if input_gradient:
            lane = lane_index()
            row, share = u32(first_row + remainder(lane, u32(rows))), quotient(lane, u32(rows))
            scale = result_scale(io[SCALES])
            for d in range(n_dims):
                unroll()
                value = add_shares(dx[d]) * scale
                store(io[DX], io[DX_STRIDE], row, io[BATCH], u32(first_dim + d), share, value)

    return target.device(backward_part)


def _make_backward_by_item(
    target: Target, plan: KernelPlan, part: BackwardPart, options: GradientOptions, adds: bool, place: Callable
) -> Callable:
    u32, f32, unroll, rows = target.u32, target.f32, target.unroll_full, plan.rows
    spaces, np_f32, size, first_dim = target.memory_spaces, np.float32, part.dims_per_item, part.first_dim
    table_gradient = _make_table_gradient(target, options)
    store, result_scale = _make_store_input_gradient(target, adds), make_read_scale(target, 1)
    (group,) = part.groups
    work = group.work
    turns, locate = _make_division(target, plan, group)
    warp_index = make_indices(target).warp

    def backward_part(base, io, first_row):
        scale = result_scale(io[SCALES])
        for turn in range(turns):
            item, row, place_row, live, share = locate(u32(turn), first_row, io[BATCH])
            dx = spaces.local.array(size, np_f32)
            for i in range(size):
                unroll()
                dx[i] = f32(0)
            work(item, place(base, io, row, place_row), table_gradient(io), live, dx)
            row = u32(first_row + u32(place_row - u32(warp_index() * u32(rows))))
            for i in range(size):
                unroll()
                dim = u32(u32(item * u32(size)) + u32(first_dim + i))
                store(io[DX], io[DX_STRIDE], row, io[BATCH], dim, share, dx[i] * scale)

    return target.device(backward_part)
