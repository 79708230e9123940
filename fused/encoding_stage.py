"""The encoding's stages: x to rows of a tile, and rows of gradients back to the table and to dL/dx.

The items of an encoding (`encoding_parts.py`) are divided among the lanes of each warp, for the warp's own samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..specs import ModelSpec
from .encodings import ENCODINGS, padding_value
from .fragments import Target
from .plan import KernelPlan
from .sinks import RowMemory
from .stage_io import BATCH, DX, DX_STRIDE, SCALES, TABLE, TABLE_GRADIENT, X_STRIDE, GradientOptions, X
from .tiles import make_indices, make_row_address


@functools.cache
def _make_lane_arithmetic(target: Target):
    """Scalar functions for who does what: (smaller, inside, quotient, remainder)."""
    u32, f32 = np.uint32, np.float32

    def smaller(a, b):
        return min(a, b)

    def inside(index, count):
        return f32(1) if index < count else f32(0)

    def quotient(a, b):
        return u32(a // b)

    def remainder(a, b):
        return u32(a % b)

    return tuple(target.scalar(f) for f in (smaller, inside, quotient, remainder))


def _encoding_parts(target: Target, spec: ModelSpec, memory: RowMemory, *, table_gradient=False, input_gradient=False):
    factory = ENCODINGS[type(spec.encoding)]
    return factory(
        target, spec.encoding, memory, first_column=0, table_gradient=table_gradient, input_gradient=input_gradient
    )


def make_encode(target: Target, spec: ModelSpec, plan: KernelPlan, options) -> Callable:
    """encode(base, io, first_row): features of this warp's samples, from `first_row` of the batch on, into the x tile.

    Rows past the batch repeat its last row; their gradients will be 0.
    """
    memory = RowMemory(target, options.input_dtype, options.aligned_input)
    parts = _encoding_parts(target, spec, memory)
    stages = [_make_encode_group(target, plan, parts.by_sample, group) for group in parts.groups]
    padding = _make_padding(target, spec, plan)
    return _chain(target, [*stages, *([padding] if padding else [])])


def _chain(target: Target, stages: list[Callable]) -> Callable:
    """One function that calls all stages with the same three arguments."""
    first, rest = stages[0], stages[1:]
    if not rest:
        return first
    second = _chain(target, rest)

    def both(base, io, first_row):
        first(base, io, first_row)
        second(base, io, first_row)

    return target.device(both)


def _make_encode_group(target: Target, plan: KernelPlan, by_sample: bool, group) -> Callable:
    encode_item, first_item, count = group.encode, group.first, group.count
    turns, locate = _make_division(target, plan, by_sample, first_item, count)
    row_address = make_row_address(target, plan.x)
    u32, unroll = target.u32, target.unroll_by_2

    def encode_group(base, io, first_row):
        for turn in range(turns):
            unroll()
            item, row, place_row, live, lead = locate(u32(turn), first_row, io[BATCH])
            encode_item(item, io[X], io[X_STRIDE], row, io[TABLE], row_address(base, place_row))

    return target.device(encode_group)


def _make_division(target: Target, plan: KernelPlan, by_sample: bool, first_item: int, count: int):
    """How a warp divides `count` items of its samples among its lanes.

    Returns the number of turns and locate(turn, first_row, batch) -> (item, row of the batch, row of the tile, live,
    lead): live is 1.0 for work that counts (0.0 past the batch or past the items, where a lane repeats something),
    lead the index of the lane's share of its sample.
    """
    rows = plan.rows
    shares = 32 // rows
    u32 = target.u32
    _, lane_index, warp_index, *_ = make_indices(target)
    smaller, inside, quotient, remainder = _make_lane_arithmetic(target)

    def multiply(a, b):
        return a * b

    multiply = target.scalar(multiply)
    if by_sample:
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


def _make_padding(target: Target, spec: ModelSpec, plan: KernelPlan) -> Callable | None:
    """Fill the columns behind the encoding's own with its padding value."""
    first_column = spec.encoding.n_output_dims
    count = plan.x.columns - first_column  # a bare encoding's tile is wider than the encoding
    if count == 0:
        return None
    turns, locate = _make_division(target, plan, False, first_column, count)
    row_address = make_row_address(target, plan.x)
    u32, value = target.u32, padding_value(spec.encoding)

    @target.intrinsic(["u32", "u32"], "void")
    def put_padding(e, row, column):
        e.store_shared(e.add(row, e.shl(column, 1)), "u16", [e.float_to_half(e.f32(value))])

    def pad(base, io, first_row):
        for turn in range(turns):
            column, _, place_row, _, _ = locate(u32(turn), first_row, io[BATCH])
            put_padding(row_address(base, place_row), column)

    return target.device(pad)


def make_encode_backward(target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions) -> Callable:
    """encode_backward(base, io, first_row): from this warp's rows of the dx tile to dL/d(table) and dL/dx."""
    memory = RowMemory(target, options.input_dtype, options.aligned_input)
    parts = _encoding_parts(
        target, spec, memory, table_gradient=options.table_gradient, input_gradient=options.input_gradient
    )
    make = _make_backward_by_sample if parts.by_sample else _make_backward_by_item
    return make(target, plan, parts, options)


@functools.cache
def _make_store_input_gradient(target: Target):
    """store(dx, dx_stride, row, batch, dim, share, value): one element of dL/dx, by the sample's first lane."""

    @target.intrinsic(["u64", "u32", "u32", "u32", "u32", "u32", "f32"], "void")
    def store_input_gradient(e, dx, dx_stride, row, batch, dim, share, value):
        with e.when(e.both(e.less(row, batch), e.equal(share, 0))):
            e.store_global(e.address(e.address_by(dx, row, dx_stride), dim, 4), "f32", [value])

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


def _make_backward_by_sample(target: Target, plan: KernelPlan, parts, options: GradientOptions) -> Callable:
    u32, f32, unroll, unroll_2 = target.u32, target.f32, target.unroll_full, target.unroll_by_2
    spaces, np_f32, n_dims, rows = target.memory_spaces, np.float32, parts.n_input_dims, plan.rows
    row_address = make_row_address(target, plan.dx)
    store, result_scale = _make_store_input_gradient(target), make_read_scale(target, 1)
    add_shares = _make_add_shares(target, rows)
    _, lane_index, *_ = make_indices(target)
    _, _, quotient, remainder = _make_lane_arithmetic(target)
    input_gradient = options.input_gradient

    def make_group(group):
        backward_item = group.backward
        turns, locate = _make_division(target, plan, True, group.first, group.count)

        def backward_group(base, io, first_row, dx):
            for turn in range(turns):
                unroll_2()
                item, row, place_row, live, lead = locate(u32(turn), first_row, io[BATCH])
                place = row_address(base, place_row)
                backward_item(item, io[X], io[X_STRIDE], row, io[TABLE], io[TABLE_GRADIENT], place, live, dx)

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

    all_groups = chain(parts.groups)

    def encode_backward(base, io, first_row):
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
                store(io[DX], io[DX_STRIDE], row, io[BATCH], u32(d), share, add_shares(dx[d]) * scale)

    return target.device(encode_backward)


def _make_backward_by_item(target: Target, plan: KernelPlan, parts, options: GradientOptions) -> Callable:
    u32, f32, unroll = target.u32, target.f32, target.unroll_full
    spaces, np_f32, size = target.memory_spaces, np.float32, parts.input_dims_per_item
    row_address = make_row_address(target, plan.dx)
    store, result_scale = _make_store_input_gradient(target), make_read_scale(target, 1)
    (group,) = parts.groups
    backward_item = group.backward
    turns, locate = _make_division(target, plan, False, group.first, group.count)

    def encode_backward(base, io, first_row):
        scale = result_scale(io[SCALES])
        for turn in range(turns):
            item, row, place_row, live, share = locate(u32(turn), first_row, io[BATCH])
            dx = spaces.local.array(size, np_f32)
            for i in range(size):
                unroll()
                dx[i] = f32(0)
            place = row_address(base, place_row)
            backward_item(item, io[X], io[X_STRIDE], row, io[TABLE], io[TABLE_GRADIENT], place, live, dx)
            row = u32(first_row + u32(place_row - u32(warp_first_row())))
            for i in range(size):
                unroll()
                store(io[DX], io[DX_STRIDE], row, io[BATCH], u32(u32(item * u32(size)) + u32(i)), share, dx[i] * scale)

    _, _, warp_index, *_ = make_indices(target)
    rows = plan.rows

    def warp_first_row():
        return u32(warp_index() * u32(rows))

    warp_first_row = target.device(warp_first_row)
    return target.device(encode_backward)
