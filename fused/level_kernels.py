"""Kernels that work level by level: a grid's features to planes, and planes of gradients to the table gradient.

A block works on one level (the grid's y index), so that the level's table, or the sums of its gradient, can stand in
shared memory: gathers from there and additions to it are several times as fast as to global memory, where every lane
costs a look-up in the L1 or a reduction in the L2. Levels that don't fit are done by the same closures on global
memory, one level after the other, which keeps one table at a time in the caches.

Sums of gradients are int32 fixed point, for which shared memory has an addition (for float32 it has none). They can't
overflow: before it adds up some of its samples (2^16 at most, then it *drains* its sums to the float32 table gradient),
a block finds S, the sum of their |dL/dfeature|, 2^e <= S < 2^(e+1), and takes 2^(29 - e) steps a unit. The corners of a
sample have weights that are not negative and add up to 1, so all samples together add at most S to an entry, less than
2^30 steps, and half a step of rounding a corner. The scale is a block's own, for one feature of one level: gradients of
average size are at least 2^13 steps, however much larger those of other levels or of single samples are, and rounding
to nearest averages out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from ..layout import GridLevel, grid_levels
from ..specs import GridSpec, ModelSpec
from .arithmetic import make_index_arithmetic, make_multiply
from .encoding_parts import ItemGroup
from .fragments import Target, make_zeros
from .grid import make_grid
from .level_memory import LevelMemory, SharedGradientMemory, SharedTableMemory
from .level_plan import COPY_BYTES, TURNS_AT_ONCE, LevelPlan
from .mlp import make_block_sum
from .planes import make_read_feature, make_read_planes, place_in_plane
from .sinks import RowMemory
from .stage_io import BATCH, IO_PARAMETERS, TABLE, TABLE_GRADIENT, X_STRIDE, KernelBody, X
from .tiles import make_barriers, make_indices

LOG2_SAMPLES_A_DRAIN = 16
LOG2_SUM = 29
TILES_AT_ONCE = 4  # whose gradients a thread has on their way at a time, looking for S

PARAMETERS = (("n_tiles", "u32"), ("planes", "u64"), ("plane_bytes", "u32"))


def make_encode_levels_kernel(target: Target, spec: ModelSpec, plan: LevelPlan, options) -> KernelBody:
    """The features of some levels to their planes."""
    grid: GridSpec = spec.encoding
    memory_kind = SharedTableMemory if plan.shared else LevelMemory
    memory = memory_kind(target, options.input_dtype, options.aligned_input, n_input_dims=grid.n_input_dims)
    groups = make_grid(target, grid, memory, table_gradient=False, input_gradient=False).encode
    u32, zero = target.u32, make_zeros(target, 1)

    def no_gradient(level, row, place, scale):
        return zero()

    def make_take(group: ItemGroup) -> Callable:
        encode = group.work

        def take(level, at, sums, live):
            encode(level, at)

        return target.device(take)

    all_tiles = _make_all_tiles(target, grid, plan, options, groups, target.device(no_gradient), make_take)
    find_table = _make_load_table(target, grid, plan) if plan.shared else _make_global_table(target)
    level_of, f32 = _make_level_of(target, plan), target.f32
    shared_base = target.dynamic_shared_base()
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks

    def encode_levels(n_tiles, planes, plane_bytes, io):
        level = u32(level_of())
        table, place = find_table(shared_base(), io[TABLE], level), (planes, plane_bytes)
        all_tiles(block_index(), n_blocks(), n_tiles, io, level, table, place, u32(0), f32(1))

    return KernelBody("encode_levels", encode_levels, PARAMETERS, IO_PARAMETERS)


def make_level_gradients_kernel(target: Target, spec: ModelSpec, plan: LevelPlan, options) -> KernelBody:
    """The gradients of some levels' entries, from planes of dL/dfeatures, added to the table gradient."""
    make = _make_shared_gradients_kernel if plan.shared else _make_global_gradients_kernel
    return make(target, spec.encoding, plan, options)


def _make_global_gradients_kernel(target: Target, grid: GridSpec, plan: LevelPlan, options) -> KernelBody:
    n_features, u32, f32 = grid.n_features_per_level, target.u32, target.f32
    read = make_read_planes(target, n_features, n_features)

    def read_gradient(level, row, place, scale):
        return read(place[0], place[1], row, level)

    read_gradient = target.device(read_gradient)
    all_tiles = _make_backward_tiles(target, grid, LevelMemory, plan, options, read_gradient)
    level_of = _make_level_of(target, plan)
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks

    def level_gradients(n_tiles, planes, plane_bytes, io):
        level, place = u32(level_of()), (planes, plane_bytes)
        all_tiles(block_index(), n_blocks(), n_tiles, io, level, io[TABLE], place, io[TABLE_GRADIENT], f32(1))

    return KernelBody("level_gradients", level_gradients, PARAMETERS, IO_PARAMETERS)


def _make_shared_gradients_kernel(target: Target, grid: GridSpec, plan: LevelPlan, options) -> KernelBody:
    n_features, levels, u32 = grid.n_features_per_level, grid_levels(grid), target.u32
    one_feature = dataclasses.replace(grid, n_features_per_level=1)
    read, multiply, map_values = make_read_feature(target, n_features), make_multiply(target), target.map_fragment

    def read_gradient(level, row, place, scale):
        return map_values(multiply, read(place[0], place[1], row, level), scale)

    read_gradient = target.device(read_gradient)
    all_tiles = _make_backward_tiles(target, one_feature, SharedGradientMemory, plan, options, read_gradient)
    level_of, feature_of = _make_level_of(target, plan), _make_feature_of(target, plan)
    clear, drain = _make_clear_sums(target, levels, plan), _make_drain(target, levels, plan, n_features)
    sum_of_sizes, scales_of = _make_sum_of_sizes(target, plan, n_features), _make_scales_of(target)
    from_feature = _make_from_feature(target)
    before, offset_of = _make_before(target, 4), _make_offset_of(target, levels)
    barrier, _, _ = make_barriers(target)
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks
    shared_base, smaller = target.dynamic_shared_base(), make_index_arithmetic(target)[0]
    tiles_a_drain = (1 << LOG2_SAMPLES_A_DRAIN) // plan.tile_rows

    def level_gradients(n_tiles, planes, plane_bytes, io):
        base, level, feature = shared_base(), u32(level_of()), u32(feature_of())
        sums = before(base, offset_of(level))
        place = (from_feature(planes, feature), plane_bytes)
        tile, step = u32(block_index()), u32(u32(n_blocks()) * u32(tiles_a_drain))
        while tile < n_tiles:
            end = smaller(u32(tile + step), n_tiles)
            scale, inverse = scales_of(sum_of_sizes(base, tile, n_blocks(), end, io, level, place))
            barrier()
            clear(base, level)
            barrier()
            all_tiles(tile, n_blocks(), end, io, level, io[TABLE], place, sums, scale)
            barrier()
            drain(base, io[TABLE_GRADIENT], level, feature, inverse)
            barrier()
            tile = u32(tile + step)

    return KernelBody("level_gradients", level_gradients, PARAMETERS, IO_PARAMETERS)


# ------------------------------------------------------------------------------------------ levels and samples


def _make_backward_tiles(target: Target, grid: GridSpec, memory_kind: type, plan: LevelPlan, options, read_gradient):
    memory = memory_kind(target, options.input_dtype, options.aligned_input, n_input_dims=grid.n_input_dims)
    (part,) = make_grid(target, grid, memory, table_gradient=True, input_gradient=False).backward
    spaces, np_f32 = target.memory_spaces, np.float32

    def make_take(group: ItemGroup) -> Callable:
        backward = group.work

        def take(level, at, sums, live):
            backward(level, at, sums, live, spaces.local.array(1, np_f32))  # no dL/dx is asked for

        return target.device(take)

    return _make_all_tiles(target, grid, plan, options, part.groups, read_gradient, make_take)


def _make_all_tiles(
    target: Target,
    grid: GridSpec,
    plan: LevelPlan,
    options,
    groups: tuple[ItemGroup, ...],
    read_gradient: Callable,
    make_take: Callable,
) -> Callable:
    """all_tiles(first, step, end, io, level, table, place, sums, scale): take(level, at, sums, live) for the samples of
    tiles first, first + step, ... before `end`, `take` being that of the level's group. Past the batch it repeats the
    last sample, `live` being 0.

    read_gradient(level, row, place, scale) -> dL/dfeatures of a sample
    """
    u32, last = target.u32, plan.first + plan.count
    used = [g for g in groups if g.first < last and g.first + g.count > plan.first]

    def chain(number: int) -> Callable:
        own, end_of_own = make_tiles(make_take(used[number])), used[number].first + used[number].count
        if number + 1 == len(used):
            return own
        others = chain(number + 1)

        def either(first, step, end, io, level, table, place, sums, scale):
            if level < u32(end_of_own):  # the whole block's level
                own(first, step, end, io, level, table, place, sums, scale)
            else:
                others(first, step, end, io, level, table, place, sums, scale)

        return target.device(either)

    def make_tiles(take: Callable) -> Callable:
        return _make_tiles_of_group(target, grid, plan, options, read_gradient, take)

    return chain(0)


def _make_tiles_of_group(
    target: Target, grid: GridSpec, plan: LevelPlan, options, read_gradient: Callable, take: Callable
) -> Callable:
    """As `all_tiles`, for the levels of one group. What the next tile's samples need is read ahead."""
    u32, threads, thread_index = target.u32, plan.threads, make_indices(target).thread
    memory = RowMemory(target, options.input_dtype, options.aligned_input)
    read_inputs = memory.make_read_inputs(grid.n_input_dims)
    smaller, inside, *_ = make_index_arithmetic(target)

    def row_of(tile, turn, batch):
        row = u32(u32(tile * u32(TURNS_AT_ONCE * threads)) + u32(thread_index() + u32(turn * threads)))
        return row, smaller(row, u32(batch - u32(1)))

    row_of = target.device(row_of)

    def read(tile, turn, io, level, place, scale):
        _, row = row_of(tile, turn, io[BATCH])
        x = read_inputs((io[X], io[X_STRIDE], row), u32(0))
        return x, read_gradient(level, row, place, scale)

    read = target.device(read)

    def work(tile, turn, ahead, io, level, table, place, sums):
        row, existing = row_of(tile, turn, io[BATCH])
        x, gradient = ahead
        take(level, (x, gradient, existing, table, place), sums, inside(row, io[BATCH]))

    work = target.device(work)

    def all_tiles(first, step, end, io, level, table, place, sums, scale):
        tile = u32(first)
        a, b = read(tile, 0, io, level, place, scale), read(tile, 1, io, level, place, scale)
        while tile < end:
            behind = u32(tile + step)
            next_a, next_b = read(behind, 0, io, level, place, scale), read(behind, 1, io, level, place, scale)
            work(tile, 0, a, io, level, table, place, sums)
            work(tile, 1, b, io, level, table, place, sums)
            a, b, tile = next_a, next_b, behind

    return target.device(all_tiles)


def _make_level_of(target: Target, plan: LevelPlan) -> Callable:
    @target.intrinsic([], "u32")
    def level_of(e):
        return e.add(e.div(e.block_row(), plan.rows_a_level), plan.first)

    return level_of


def _make_feature_of(target: Target, plan: LevelPlan) -> Callable:
    @target.intrinsic([], "u32")
    def feature_of(e):
        return e.mod(e.block_row(), plan.rows_a_level)

    return feature_of


def _make_offset_of(target: Target, levels: tuple[GridLevel, ...]) -> Callable:
    return target.constant(np.array([level.offset for level in levels], np.uint32))


# ------------------------------------------------------------------------------------------------ shared tables


@functools.cache
def _make_before(target: Target, entry_bytes: int) -> Callable:
    """before(base, offset): where entry 0 would stand if entry `offset` stands at `base` (modulo 2^32)."""

    @target.intrinsic(["u32", "u32"], "u32")
    def before(e, base, offset):
        return e.sub(base, e.mul(offset, entry_bytes))

    return before


@functools.cache
def _make_global_table(target: Target) -> Callable:
    def global_table(base, table, level):
        return table

    return target.device(global_table)


def _make_load_table(target: Target, grid: GridSpec, plan: LevelPlan) -> Callable:
    """load(base, table, level): the level's table to shared memory; where the encoding's first entry would stand."""
    entry_bytes, u32, levels = 2 * grid.n_features_per_level, target.u32, grid_levels(grid)
    pieces_of = target.constant(np.array([level.n_entries * entry_bytes // COPY_BYTES for level in levels], np.uint32))
    offset_of, before = _make_offset_of(target, levels), _make_before(target, entry_bytes)
    barrier, _, copy_wait = make_barriers(target)

    @target.intrinsic(["u32", "u64", "u32", "u32", "u32"], "void")
    def copy_piece(e, base, table, offset, first, n_pieces):
        piece = e.add(first, e.thread())
        with e.when(e.less(piece, n_pieces)):
            source = e.address(e.address(table, offset, entry_bytes), piece, COPY_BYTES)
            e.copy_async(e.add(base, e.mul(piece, COPY_BYTES)), source)

    threads = plan.threads

    def load_table(base, table, level):
        n_pieces, offset = pieces_of(level), offset_of(level)
        first = u32(0)
        while first < n_pieces:
            copy_piece(base, table, offset, first, n_pieces)
            first = u32(first + u32(threads))
        copy_wait()
        barrier()
        return before(base, offset)

    return target.device(load_table)


# ------------------------------------------------------------------------------------------------ sums in fixed point


def _make_sum_of_sizes(target: Target, plan: LevelPlan, n_features: int) -> Callable:
    """sum_of_sizes(base, first, step, end, io, level, place) -> of the samples of tiles first, first + step, ... before
    `end`, |dL/dfeature|, in every thread of the block. Uses shared memory from byte 0 on."""
    u32, f32, threads, tile_rows = target.u32, target.f32, plan.threads, plan.tile_rows
    block_sum = make_block_sum(target, threads)

    @target.intrinsic(["u64", "u32", "u32", "u32", "u32", "u32", "u32"], "f32")
    def own_sizes(e, planes, plane_bytes, level, first, step, end, batch):
        total, tile = e.f32(0.0), first
        for _ in range(TILES_AT_ONCE):
            first_row = e.add(e.mul(tile, tile_rows), e.thread())
            for turn in range(TURNS_AT_ONCE):
                row = e.add(first_row, threads * turn)
                exists = e.both(e.less(tile, end), e.less(row, batch))
                place = place_in_plane(e, planes, plane_bytes, row, level, n_features)
                gradient = e.half_to_float(e.load_global_where(exists, place, "u16")[0])
                total = e.fadd(total, e.bits_to_float(e.and_(e.float_to_bits(gradient), 0x7FFFFFFF)))
            tile = e.add(tile, step)
        return total

    def sum_of_sizes(base, first, step, end, io, level, place):
        total, tile = f32(0), u32(first)
        while tile < end:
            total = total + own_sizes(place[0], place[1], level, tile, step, end, io[BATCH])
            tile = u32(tile + u32(step * u32(TILES_AT_ONCE)))
        return block_sum(base, total)

    return target.device(sum_of_sizes)


@functools.cache
def _make_scales_of(target: Target) -> Callable:
    """scales_of(S) -> (steps a unit, its inverse), powers of two."""

    @target.intrinsic(["f32"], ("f32", 2))
    def scales_of(e, size):
        exponent = e.shr(e.float_to_bits(size), 23)  # 127 + e
        steps = e.minimum(e.sub(LOG2_SUM + 2 * 127, exponent), 253)  # so that the inverse is a float32, too
        return [e.bits_to_float(e.shl(steps, 23)), e.bits_to_float(e.shl(e.sub(254, steps), 23))]

    return scales_of


@functools.cache
def _make_from_feature(target: Target) -> Callable:
    @target.intrinsic(["u64", "u32"], "u64")
    def from_feature(e, planes, feature):
        return e.address(planes, feature, 2)

    return from_feature


def _make_clear_sums(target: Target, levels: tuple[GridLevel, ...], plan: LevelPlan) -> Callable:
    @target.intrinsic(["u32", "u32", "u32"], "void")
    def clear_sum(e, base, first, n_entries):
        entry = e.add(first, e.thread())
        with e.when(e.less(entry, n_entries)):
            e.store_shared(e.add(base, e.shl(entry, 2)), "u32", [e.u32(0)])

    n_entries_of = target.constant(np.array([level.n_entries for level in levels], np.uint32))
    u32, threads = target.u32, plan.threads

    def clear(base, level):
        n_entries, first = n_entries_of(level), u32(0)
        while first < n_entries:
            clear_sum(base, first, n_entries)
            first = u32(first + u32(threads))

    return target.device(clear)


def _make_drain(target: Target, levels: tuple[GridLevel, ...], plan: LevelPlan, n_features: int) -> Callable:
    """drain(base, table_gradient, level, feature, inverse): add the sums to the table gradient."""

    @target.intrinsic(["u32", "u64", "u32", "u32", "u32", "u32", "f32"], "void")
    def drain_entry(e, base, table_gradient, offset, feature, first, n_entries, inverse):
        entry = e.add(first, e.thread())
        with e.when(e.less(entry, n_entries)):
            steps = e.load_shared(e.add(base, e.shl(entry, 2)), "u32")[0]
            with e.when(e.less(0, steps)):  # any but 0
                row = e.address(table_gradient, e.add(offset, entry), 4 * n_features)
                e.add_global(e.address(row, feature, 4), [e.fmul(e.int_to_float(steps), inverse)])

    n_entries_of = target.constant(np.array([level.n_entries for level in levels], np.uint32))
    offset_of, u32, threads = _make_offset_of(target, levels), target.u32, plan.threads

    def drain(base, table_gradient, level, feature, inverse):
        n_entries, offset, first = n_entries_of(level), offset_of(level), u32(0)
        while first < n_entries:
            drain_entry(base, table_gradient, offset, feature, first, n_entries, inverse)
            first = u32(first + u32(threads))

    return target.device(drain)
