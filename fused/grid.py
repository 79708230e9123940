"""Multiresolution grid, per sample and level (mirror of reference/grid.py; Mueller et al. 2022).

On level l with scale s, resolution N and n entries, for x in D dimensions:

    q_d = s x_d + 1/2,  cell g_d = floor(q_d),  t_d = q_d - g_d,  w_d = t_d or t_d^2 (3 - 2 t_d)
    y = sum over corners c in {0,1}^D of W_c theta[index(g + c)],   W_c = prod_d (w_d or 1 - w_d)

Nearest takes theta[index(g)]. A vertex's entry is its dense number sum_d p_d N^d modulo n, or where that would not fit
its hash xor_d (p_d c_d) modulo n. All integer arithmetic wraps modulo 2^32, so any finite x finds an entry.

An *item* is a level. Items with the same kind of index form a group: the fuser runs each group's levels in a loop,
the level's numbers coming from constant memory. Encoding a level puts F features; its backward pass adds W_c dL/dy to
the entries and through `dx`

    dL/dx_d = s w'_d sum over corners of (+1 or -1) prod_{e != d} (w_e or 1 - w_e) <dL/dy, theta[corner]>,

edge by edge along axis 0.
"""

from __future__ import annotations

import numpy as np

from ..layout import GridLevel, grid_levels
from ..specs import GridSpec
from .encoding_parts import EncodingParts, ItemGroup

HASH_FACTORS = (1, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737)
MAX_DENSE_RESOLUTION = {1: 2**32 - 1, 2: 65535, 3: 1625, 4: 255, 5: 84, 6: 40, 7: 23}
"""Largest N whose N^D fits 32 bits; above it dense numbers are taken in 64 bits."""

DENSE, WIDE_DENSE, HASHED = "dense", "wide dense", "hashed"


def index_kind(spec: GridSpec, level: GridLevel) -> str:
    if level.hashed:
        return HASHED
    return DENSE if level.resolution <= MAX_DENSE_RESOLUTION[spec.n_input_dims] else WIDE_DENSE


def consecutive_groups(kinds: list) -> list[tuple]:
    """(kind, first, count) of runs of equal kinds."""
    runs = []
    for i, kind in enumerate(kinds):
        if runs and runs[-1][0] == kind:
            runs[-1][2] += 1
        else:
            runs.append([kind, i, 1])
    return [tuple(run) for run in runs]


def make_index(target, spec: GridSpec, kind: str):
    """index(cells, corner, resolution, n_entries) -> row of the level's table; bit d of `corner` adds 1 to cells[d]."""
    n_dims, u32, u64, unroll = spec.n_input_dims, target.u32, target.u64, target.unroll_full
    np_u32 = np.uint32

    def wrap(i, n):
        return np_u32(i % n) if i >= n else np_u32(i)

    if kind == WIDE_DENSE:
        np_u64 = np.uint64

        def wrap_wide(i, n):
            return np_u32(i % np_u64(n))

        wrap_wide = target.scalar(wrap_wide)

        def index(cells, corner, resolution, n_entries):
            total, stride = u64(0), u64(1)
            for d in range(n_dims):
                unroll()
                total = total + u64(u32(cells[d] + u32((corner >> d) & 1))) * stride
                stride = stride * u64(resolution)
            return wrap_wide(total, n_entries)

        return target.device(index)
    if kind == DENSE:
        wrap = target.scalar(wrap)

        def index(cells, corner, resolution, n_entries):
            total, stride = u32(0), u32(1)
            for d in range(n_dims):
                unroll()
                total = u32(total + u32(u32(cells[d] + u32((corner >> d) & 1)) * stride))
                stride = u32(stride * resolution)
            return wrap(total, n_entries)

        return target.device(index)

    factors = tuple(np.uint32(f) for f in HASH_FACTORS[:n_dims])

    def index(cells, corner, resolution, n_entries):
        total = u32(0)
        for d in range(n_dims):
            unroll()
            total = u32(total ^ u32(u32(cells[d] + u32((corner >> d) & 1)) * factors[d]))
        return u32(total & u32(n_entries - u32(1)))  # a hashed level has a power of two of entries

    return target.device(index)


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


def make_grid(target, spec: GridSpec, memory, *, first_column: int, table_gradient: bool, input_gradient: bool):
    """The parts of a grid; an item is a level.

    memory           where its numbers come from and go to (`sinks.RowMemory`)
    first_column     of its features in the row
    table_gradient, input_gradient   what backward shall compute
    """
    n_dims, n_features, n_corners = spec.n_input_dims, spec.n_features_per_level, 1 << spec.n_input_dims
    u32, f32, unroll, map_values = target.u32, target.f32, target.unroll_full, target.map_fragment
    spaces = target.memory_spaces
    np_u32, np_f32 = np.uint32, np.float32
    levels = grid_levels(spec)
    scale_of = target.constant(np.array([level.scale for level in levels], np.float32))
    resolution_of = target.constant(np.array([level.resolution & 0xFFFFFFFF for level in levels], np.uint32))
    n_entries_of = target.constant(np.array([level.n_entries for level in levels], np.uint32))
    offset_of = target.constant(np.array([level.offset for level in levels], np.uint32))
    read_input, floor_to_int = memory.read_input, memory.floor_to_int
    read_entry = memory.make_read_entry(n_features)
    add_entry, add_entries = memory.make_add_entry(n_features), memory.make_add_entries(n_features)
    put, get = memory.make_put(n_features), memory.make_get(n_features)
    zero_features, sum_of_features = memory.make_zeros(n_features), memory.make_sum(n_features)
    interpolation = make_interpolation(target, spec.interpolation)

    def to_scaled(x, scale):
        return x * scale + np_f32(0.5)

    def fraction(q, cell):
        # q - floor(q), and 0 where the cell was saturated or q is not finite: every weight stays in [0, 1]
        t = q - np_f32(np.int32(cell))
        return t if t > np_f32(0) and t <= np_f32(1) else np_f32(0)

    def multiply(a, b):
        return a * b

    def multiply_add(a, b, c):
        return a + b * c

    to_scaled, fraction = target.scalar(to_scaled), target.scalar(fraction)
    multiply, multiply_add = target.scalar(multiply), target.scalar(multiply_add)

    def locate(x, x_stride, row, level, cells, fractions):
        scale = scale_of(level)
        for d in range(n_dims):
            unroll()
            q = to_scaled(read_input(x, x_stride, row, u32(d)), scale)
            cells[d] = floor_to_int(q)
            fractions[d] = fraction(q, cells[d])

    locate = target.device(locate)

    def make_group(kind: str, first: int, count: int) -> ItemGroup:
        index = make_index(target, spec, kind)

        if interpolation is None:

            def nearest(item, x, x_stride, row):
                cells = spaces.local.array(n_dims, np_u32)
                fractions = spaces.local.array(n_dims, np_f32)
                locate(x, x_stride, row, item, cells, fractions)
                return u32(index(cells, 0, resolution_of(item), n_entries_of(item)) + offset_of(item))

            nearest = target.device(nearest)

            def encode(item, x, x_stride, row, table, place):
                features = read_entry(table, nearest(item, x, x_stride, row))
                put(place, u32(first_column + item * n_features), features)

            def backward(item, x, x_stride, row, table, gradient, place, live, dx):
                if table_gradient:
                    features = map_values(multiply, get(place, u32(first_column + item * n_features)), live)
                    add_entry(gradient, nearest(item, x, x_stride, row), features)

            return ItemGroup(first, count, target.device(encode), target.device(backward))

        weight, slope = interpolation

        def encode(item, x, x_stride, row, table, place):
            cells = spaces.local.array(n_dims, np_u32)
            fractions = spaces.local.array(n_dims, np_f32)
            locate(x, x_stride, row, item, cells, fractions)
            resolution, n_entries, offset = resolution_of(item), n_entries_of(item), offset_of(item)
            weights = spaces.local.array(n_dims, np_f32)
            for d in range(n_dims):
                unroll()
                weights[d] = weight(fractions[d])
            features = zero_features()
            for corner in range(n_corners):
                unroll()
                w = f32(1)
                for d in range(n_dims):
                    unroll()
                    w = w * (weights[d] if (corner >> d) & 1 else f32(1) - weights[d])
                entry = read_entry(table, u32(index(cells, corner, resolution, n_entries) + offset))
                features = map_values(multiply_add, features, entry, w)
            put(place, u32(first_column + item * n_features), features)

        def backward(item, x, x_stride, row, table, gradient, place, live, dx):
            cells = spaces.local.array(n_dims, np_u32)
            fractions = spaces.local.array(n_dims, np_f32)
            locate(x, x_stride, row, item, cells, fractions)
            resolution, n_entries, offset = resolution_of(item), n_entries_of(item), offset_of(item)
            weights = spaces.local.array(n_dims, np_f32)
            slopes = spaces.local.array(n_dims, np_f32)
            scale = scale_of(item)
            for d in range(n_dims):
                unroll()
                weights[d] = weight(fractions[d])
                slopes[d] = slope(fractions[d]) * scale
            dy = map_values(multiply, get(place, u32(first_column + item * n_features)), live)
            for edge in range(n_corners // 2):  # the two corners along axis 0, often neighbours in the table
                unroll()
                corner = 2 * edge
                lower = u32(index(cells, corner, resolution, n_entries) + offset)
                upper = u32(index(cells, corner + 1, resolution, n_entries) + offset)
                across = f32(1)
                for d in range(1, n_dims):
                    unroll()
                    across = across * (weights[d] if (corner >> d) & 1 else f32(1) - weights[d])
                if table_gradient:
                    w = across * weights[0]
                    add_entries(
                        gradient, lower, upper, map_values(multiply, dy, across - w), map_values(multiply, dy, w)
                    )
                if input_gradient:
                    below = sum_of_features(map_values(multiply, dy, read_entry(table, lower)))
                    above = sum_of_features(map_values(multiply, dy, read_entry(table, upper)))
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

        return ItemGroup(first, count, target.device(encode), target.device(backward))

    runs = consecutive_groups([index_kind(spec, level) for level in levels])
    return EncodingParts(n_dims, by_sample=True, groups=tuple(make_group(*run) for run in runs))
