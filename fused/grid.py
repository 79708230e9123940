"""Multiresolution grid, per sample and level (mirror of reference/grid.py; Mueller et al. 2022).

On level l with scale s, resolution N and n entries, for x in D dimensions:

    q_d = s x_d + 1/2,  cell g_d = floor(q_d),  t_d = q_d - g_d,  w_d = t_d or t_d^2 (3 - 2 t_d)
    y = sum over corners c in {0,1}^D of W_c theta[index(g + c)],   W_c = prod_d (w_d or 1 - w_d)

q has the relative precision of float32, so that t loses digits on fine levels, as in tiny-cuda-nn: fewer than float16
and bfloat16 lose anyway. In float32 t is rounded by itself (`exact_place`).

Nearest takes theta[index(g)]. A vertex's entry is its dense number sum_d p_d N^d modulo n, or where that would not fit
its hash modulo n (`grid_rows.py`). All integer arithmetic wraps modulo 2^32, so any finite x finds an entry.

An *item* is a level. Items with the same kind of index form a group: the fuser runs each group's levels in a loop,
the level's numbers coming from constant memory. Encoding a level puts F features; its backward pass adds W_c dL/dy to
the entries and through `dx`

    dL/dx_d = s w'_d sum over corners of (+1 or -1) prod_{e != d} (w_e or 1 - w_e) <dL/dy, theta[corner]>,

edge by edge along axis 0. `grid_options.py` has what stochastic_interpolation, fixed_point_pos and max_level change.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..layout import GridLevel, grid_levels
from ..specs import GridSpec
from .arithmetic import make_multiply
from .corner_rows import make_rows
from .encoding_parts import BackwardPart, EncodingParts, ItemGroup, make_divide
from .grid_options import (
    make_active,
    make_chosen_corner,
    make_fixed_point_position,
    make_of_active,
    make_work_of_active,
)
from .grid_rows import consecutive_groups, index_kind, make_any_index


def make_interpolation(target, name: str):
    """(weight, slope): w(t) and w'(t) as scalar functions; None for Nearest."""
    f32 = np.float32
    if name == "Nearest":
        return None
    if name == "Linear":

        def weight(t):
            return t

        def slope(t):
            return f32(1)

    else:

        def weight(t):
            return t * t * (f32(3) - f32(2) * t)

        def slope(t):
            return f32(6) * t * (f32(1) - t)

    return target.scalar(weight), target.scalar(slope)


MAX_UNROLLED_DIMS = 4


def unrolls_corners(spec: GridSpec) -> bool:
    """Whether the code of a level is that of all its corners, one after the other."""
    return spec.n_input_dims <= MAX_UNROLLED_DIMS and spec.hash != "Rng"


def make_level_constants(target, levels: list[GridLevel]):
    """(scale, resolution, n_entries, offset) as functions of the level."""
    return (
        target.constant(np.array([level.scale for level in levels], np.float32)),
        target.constant(np.array([level.resolution & 0xFFFFFFFF for level in levels], np.uint32)),
        target.constant(np.array([level.n_entries for level in levels], np.uint32)),
        target.constant(np.array([level.offset for level in levels], np.uint32)),
    )


def make_locate(target, memory, n_dims: int, scale_of: Callable) -> Callable:
    """locate(at, level, cells, fractions) fills g_d and t_d into two arrays of n_dims."""
    np_f32, np_u32, u32, unroll = np.float32, np.uint32, target.u32, target.unroll_full
    read_input, floor_to_int = memory.read_input, memory.floor_to_int

    def to_scaled(x, scale):
        return x * scale + np_f32(0.5)

    def fraction(q, cell):
        # q - floor(q), and 0 where the cell was saturated or q is not finite: every weight stays in [0, 1]
        t = q - np_f32(np.int32(cell))
        return t if t > np_f32(0) and t <= np_f32(1) else np_f32(0)

    def from_cell(cell):
        return np_f32(0.5) - np_f32(np.int32(cell))

    def exact_place(t, cell):
        # where q was rounded up to a whole number, that shows as t < 0
        if t < np_f32(0) and t > np_f32(-1):
            return np_u32(cell - np_u32(1)), t + np_f32(1)
        return np_u32(cell), t if t > np_f32(0) and t <= np_f32(1) else np_f32(0)

    to_scaled, fraction = target.scalar(to_scaled), target.scalar(fraction)
    from_cell, exact_place = target.scalar(from_cell), target.scalar(exact_place)

    if target.format.has_exact_positions:
        round_once = memory.multiply_add

        def locate(at, level, cells, fractions):
            scale = scale_of(level)
            for d in range(n_dims):
                unroll()
                x = read_input(at, u32(d))
                cell = floor_to_int(to_scaled(x, scale))
                place = exact_place(round_once(x, scale, from_cell(cell)), cell)
                cells[d] = place[0]
                fractions[d] = place[1]

    else:

        def locate(at, level, cells, fractions):
            scale = scale_of(level)
            for d in range(n_dims):
                unroll()
                q = to_scaled(read_input(at, u32(d)), scale)
                cells[d] = floor_to_int(q)
                fractions[d] = fraction(q, cells[d])

    return target.device(locate)


def _make_fixed_point_locate(target, memory, n_dims: int, levels: tuple[GridLevel, ...]) -> Callable:
    """As `make_locate`, of positions in fixed point."""
    u32, unroll, read_input, float_to_bits = target.u32, target.unroll_full, memory.read_input, memory.float_to_bits
    position = make_fixed_point_position(target, levels)

    def locate(at, level, cells, fractions):
        for d in range(n_dims):
            unroll()
            place = position(float_to_bits(read_input(at, u32(d))), level)
            cells[d], fractions[d] = place[0], place[1]

    return target.device(locate)


def make_grid(target, spec: GridSpec, memory, *, table_gradient: bool, input_gradient: bool) -> EncodingParts:
    """The parts of a grid; an item is a level. Its code is that of all 2^D corners, a loop in more than 4
    dimensions and for the long hash Rng.

    memory           where its numbers come from and go to (`sinks.RowMemory`)
    table_gradient, input_gradient   what backward shall compute
    """
    n_dims, n_features, n_corners = spec.n_input_dims, spec.n_features_per_level, 1 << spec.n_input_dims
    u32, f32, unroll, map_values = target.u32, target.f32, target.unroll_full, target.map_fragment
    unroll_corners = unroll if unrolls_corners(spec) else target.unroll_by_2
    spaces = target.memory_spaces
    np_u32, np_f32 = np.uint32, np.float32
    levels = grid_levels(spec)
    scale_of, resolution_of, n_entries_of, offset_of = make_level_constants(target, levels)
    if spec.fixed_point_pos:
        locate = _make_fixed_point_locate(target, memory, n_dims, levels)
    else:
        locate = make_locate(target, memory, n_dims, scale_of)
    read_entry = memory.make_read_entry(n_features)
    add_entry, add_entries = memory.make_add_entry(n_features), memory.make_add_entries(n_features)
    put, get = memory.make_put(n_features), memory.make_get(n_features)
    sum_of_features = memory.make_sum(n_features)
    interpolation = make_interpolation(target, spec.interpolation)

    def multiply_add(a, b, c):
        return a + b * c

    multiply, multiply_add = make_multiply(target), target.scalar(multiply_add)
    if memory.max_level:
        active, of_active = make_active(target, memory, spec.n_levels), make_of_active(target)
    is_stochastic = spec.stochastic_interpolation and interpolation is not None
    if is_stochastic:
        choose_corner = make_chosen_corner(target, spec, memory)

    def make_values(index: Callable, n_values: int, kind: str | None = None) -> Callable:
        """values(at, level, part): features part * n_values and following of a level, with an index as
        `make_any_index` gives it; 0 where the level is off. `kind`: that of all these levels, if they have one."""
        values = make_values_of_any(index, n_values, kind)
        if not memory.max_level:
            return values

        def values_of_active(at, level, part):
            return map_values(of_active, values(at, level, part), active(at, level))

        return target.device(values_of_active)

    def make_values_of_any(index: Callable, n_values: int, kind: str | None) -> Callable:
        parts_of_entry = n_features // n_values
        read, zeros = memory.make_read_entry(n_values), memory.make_zeros(n_values)

        if interpolation is None:

            def nearest_values(at, level, part):
                cells = spaces.local.array(n_dims, np_u32)
                fractions = spaces.local.array(n_dims, np_f32)
                locate(at, level, cells, fractions)
                row = u32(index(cells, 0, resolution_of(level), n_entries_of(level), level) + offset_of(level))
                return read(at, u32(u32(row * u32(parts_of_entry)) + part))

            return target.device(nearest_values)
        weight, _ = interpolation
        prepare, row_of = make_rows(target, spec, kind, index)

        def values(at, level, part):
            cells = spaces.local.array(n_dims, np_u32)
            fractions = spaces.local.array(n_dims, np_f32)
            locate(at, level, cells, fractions)
            resolution, n_entries, offset = resolution_of(level), n_entries_of(level), offset_of(level)
            weights = spaces.local.array(n_dims, np_f32)
            for d in range(n_dims):
                unroll()
                weights[d] = weight(fractions[d])
            features, rows = zeros(), prepare(cells, resolution, n_entries)
            for corner in range(n_corners):
                unroll_corners()
                w = f32(1)
                for d in range(n_dims):
                    unroll()
                    w = w * (weights[d] if (corner >> d) & 1 else f32(1) - weights[d])
                row = u32(row_of(rows, cells, corner, resolution, n_entries, level) + offset)
                entry = read(at, u32(u32(row * u32(parts_of_entry)) + part))
                features = map_values(multiply_add, features, entry, w)
            return features

        return target.device(values)

    def make_features(n_values: int) -> Callable:
        values = make_values(make_any_index(target, spec, levels), n_values)
        divide = make_divide(target, n_features)

        def features(at, column):
            place = divide(column)
            return values(at, place[0], u32(place[1] // u32(n_values)))

        return target.device(features)

    def kind_at_once(kind: str) -> str | None:
        return kind if memory.rows_at_once else None

    def make_encode(kind: str, first: int, count: int) -> ItemGroup:
        index = make_any_index(target, spec, levels[first : first + 1])
        values = make_values(index, n_features, kind_at_once(kind))

        def encode(item, at):
            put(at, u32(item * u32(n_features)), values(at, item, u32(0)))

        return ItemGroup(first, count, target.device(encode), by_sample=True)

    def make_backward(kind: str, first: int, count: int) -> ItemGroup:
        index = make_any_index(target, spec, levels[first : first + 1])
        work = target.device(make_backward_of_all(index, kind_at_once(kind)))
        if memory.max_level:
            work = make_work_of_active(target, active, work)
        return ItemGroup(first, count, work, by_sample=True)

    def make_backward_of_all(index: Callable, kind: str | None) -> Callable:
        if interpolation is None:

            def backward(item, at, gradient, live, dx):
                if table_gradient:
                    features = map_values(multiply, get(at, u32(item * u32(n_features))), live)
                    cells = spaces.local.array(n_dims, np_u32)
                    fractions = spaces.local.array(n_dims, np_f32)
                    locate(at, item, cells, fractions)
                    row = u32(index(cells, 0, resolution_of(item), n_entries_of(item), item) + offset_of(item))
                    add_entry(gradient, row, features)

            return backward
        weight, slope = interpolation
        adds_to_all_corners = table_gradient and not is_stochastic
        n_edges = n_corners // 2 if adds_to_all_corners or input_gradient else 0
        prepare, row_of = make_rows(target, spec, kind, index)

        def backward(item, at, gradient, live, dx):
            cells = spaces.local.array(n_dims, np_u32)
            fractions = spaces.local.array(n_dims, np_f32)
            locate(at, item, cells, fractions)
            resolution, n_entries, offset = resolution_of(item), n_entries_of(item), offset_of(item)
            weights = spaces.local.array(n_dims, np_f32)
            slopes = spaces.local.array(n_dims, np_f32)
            scale = scale_of(item)
            for d in range(n_dims):
                unroll()
                weights[d] = weight(fractions[d])
                slopes[d] = slope(fractions[d]) * scale
            dy = map_values(multiply, get(at, u32(item * u32(n_features))), live)
            if table_gradient and is_stochastic:
                chosen = spaces.local.array(n_dims, np_u32)
                choose_corner(at, item, cells, weights, chosen)
                add_entry(gradient, u32(index(chosen, 0, resolution, n_entries, item) + offset), dy)
            rows = prepare(cells, resolution, n_entries)
            for edge in range(n_edges):  # the two corners along axis 0, often neighbours in the table
                unroll_corners()
                corner = 2 * edge
                lower = u32(row_of(rows, cells, corner, resolution, n_entries, item) + offset)
                upper = u32(row_of(rows, cells, corner + 1, resolution, n_entries, item) + offset)
                across = f32(1)
                for d in range(1, n_dims):
                    unroll()
                    across = across * (weights[d] if (corner >> d) & 1 else f32(1) - weights[d])
                if adds_to_all_corners:
                    w = across * weights[0]
                    add_entries(
                        gradient, lower, upper, map_values(multiply, dy, across - w), map_values(multiply, dy, w)
                    )
                if input_gradient:
                    below = sum_of_features(map_values(multiply, dy, read_entry(at, lower)))
                    above = sum_of_features(map_values(multiply, dy, read_entry(at, upper)))
                    dx[0] = dx[0] + slopes[0] * across * (above - below)
                    along = below + weights[0] * (above - below)
                    for d in range(1, n_dims):
                        unroll()
                        w = slopes[d] if (corner >> d) & 1 else -slopes[d]
                        for other in range(1, n_dims):
                            unroll()
                            if other != d:
                                w = w * (weights[other] if (corner >> other) & 1 else f32(1) - weights[other])
                        dx[d] = dx[d] + w * along

        return backward

    runs = consecutive_groups([index_kind(spec, level) for level in levels])
    encode = tuple(make_encode(*run) for run in runs)
    backward = ()
    if table_gradient or input_gradient:
        groups = tuple(make_backward(*run) for run in runs)
        backward = (BackwardPart(groups, memory.first_dim, n_dims),)
    return EncodingParts(encode, backward, n_features, make_features, padding_value=0.0)
