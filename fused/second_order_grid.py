"""Multiresolution grid in dual numbers, per sample and level (grid.py; reference/grid.py has the formulas).

Where x moves by v, the weight w_d of the upper vertex moves by a_d = s w'_d v_d, and W_c, a product over dimensions, by
the product rule. With P_c = <A, theta_c> and Q_c = <B, theta_c> for a gradient A + eps B of the features,

    y' = sum_c W'_c theta_c,    dS/d theta_c = W_c B + W'_c A,
    dS/dx_d = s w'_d sum_c (+1 or -1) (R_cd Q_c + R'_cd P_c) + s^2 w''_d v_d sum_c (+1 or -1) R_cd P_c,

R_cd being W_c without its factor of dimension d; edge by edge along axis 0, as the first derivatives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..layout import grid_levels
from ..specs import GridSpec
from .arithmetic import make_multiply
from .encoding_parts import BackwardPart, EncodingParts, ItemGroup, make_divide
from .grid import make_interpolation, make_level_constants, make_locate, unrolls_corners
from .grid_options import make_active, make_of_active, make_work_of_active
from .grid_rows import consecutive_groups, index_kind, make_any_index, make_index


def _make_curvature(target, name: str) -> Callable:
    """w''(t) as a scalar function."""
    f32 = np.float32
    if name == "Linear":

        def curvature(t):
            return f32(0)

    else:

        def curvature(t):
            return f32(6) - f32(12) * t

    return target.scalar(curvature)


def make_second_order_grid(target, spec: GridSpec, memory, *, table_gradient: bool) -> EncodingParts:
    """The parts of a grid in dual numbers; an item is a level."""
    if spec.interpolation == "Nearest":
        return _make_nearest(target, spec, memory, table_gradient=table_gradient)
    n_dims, n_features, n_corners = spec.n_input_dims, spec.n_features_per_level, 1 << spec.n_input_dims
    u32, f32, unroll, map_values = target.u32, target.f32, target.unroll_full, target.map_fragment
    unroll_corners = unroll if unrolls_corners(spec) else target.unroll_by_2
    spaces, np_u32, np_f32, levels = target.memory_spaces, np.uint32, np.float32, grid_levels(spec)
    scale_of, resolution_of, n_entries_of, offset_of = make_level_constants(target, levels)
    locate = make_locate(target, memory, n_dims, scale_of)
    weight, slope = make_interpolation(target, spec.interpolation)
    curvature, multiply = _make_curvature(target, spec.interpolation), make_multiply(target)
    read_direction = memory.read_direction

    def multiply_add(a, b, c):
        return a + b * c

    def two_products(a, b, c, d):
        return a * b + c * d

    multiply_add, two_products = target.scalar(multiply_add), target.scalar(two_products)

    def weigh(at, level, cells, weights, tangents, slopes, bends):
        """Fills the cell, w_d, a_d, s w'_d and s^2 w''_d v_d."""
        fractions = spaces.local.array(n_dims, np_f32)
        locate(at, level, cells, fractions)
        scale = scale_of(level)
        for d in range(n_dims):
            unroll()
            v = read_direction(at, u32(d))
            weights[d] = weight(fractions[d])
            slopes[d] = slope(fractions[d]) * scale
            tangents[d] = slopes[d] * v
            bends[d] = curvature(fractions[d]) * scale * scale * v

    weigh = target.device(weigh)

    def make_dual_values(index: Callable, n_values: int) -> Callable:
        """dual(at, level, part): as `make_values` of grid.py, with tangents."""
        parts_of_entry = n_features // n_values
        read, zeros = memory.make_read_entry(n_values), memory.make_zeros(n_values)

        def dual_values(at, level, part):
            cells = spaces.local.array(n_dims, np_u32)
            weights, tangents = spaces.local.array(n_dims, np_f32), spaces.local.array(n_dims, np_f32)
            slopes, bends = spaces.local.array(n_dims, np_f32), spaces.local.array(n_dims, np_f32)
            weigh(at, level, cells, weights, tangents, slopes, bends)
            resolution, n_entries, offset = resolution_of(level), n_entries_of(level), offset_of(level)
            features, moves = zeros(), zeros()
            for corner in range(n_corners):
                unroll_corners()
                w, w_tangent = f32(1), f32(0)
                for d in range(n_dims):
                    unroll()
                    upper = (corner >> d) & 1
                    factor = weights[d] if upper else f32(1) - weights[d]
                    w_tangent = w_tangent * factor + w * (tangents[d] if upper else -tangents[d])
                    w = w * factor
                row = u32(index(cells, corner, resolution, n_entries, level) + offset)
                entry = read(at, u32(u32(row * u32(parts_of_entry)) + part))
                features = map_values(multiply_add, features, entry, w)
                moves = map_values(multiply_add, moves, entry, w_tangent)
            return features, moves

        return target.device(dual_values)

    read_entry, add_entries = memory.make_read_entry(n_features), memory.make_add_entries(n_features)
    get, add = memory.make_get_dual(n_features), memory.make_sum(n_features)

    def make_backward(kind: str, first: int, count: int) -> ItemGroup:
        index = make_index(target, spec, kind)

        def backward(item, at, gradient, live, dx):
            cells = spaces.local.array(n_dims, np_u32)
            weights, tangents = spaces.local.array(n_dims, np_f32), spaces.local.array(n_dims, np_f32)
            slopes, bends = spaces.local.array(n_dims, np_f32), spaces.local.array(n_dims, np_f32)
            weigh(at, item, cells, weights, tangents, slopes, bends)
            resolution, n_entries, offset = resolution_of(item), n_entries_of(item), offset_of(item)
            u, u_tangent = get(at, u32(item * u32(n_features)))
            u, u_tangent = map_values(multiply, u, live), map_values(multiply, u_tangent, live)
            for edge in range(n_corners // 2):  # the two corners along axis 0, often neighbours in the table
                unroll_corners()
                corner = 2 * edge
                lower = u32(index(cells, corner, resolution, n_entries) + offset)
                upper = u32(index(cells, corner + 1, resolution, n_entries) + offset)
                across, across_tangent = f32(1), f32(0)
                for d in range(1, n_dims):
                    unroll()
                    is_upper = (corner >> d) & 1
                    factor = weights[d] if is_upper else f32(1) - weights[d]
                    across_tangent = across_tangent * factor + across * (tangents[d] if is_upper else -tangents[d])
                    across = across * factor
                if table_gradient:
                    w, w_tangent = across * weights[0], across_tangent * weights[0] + across * tangents[0]
                    add_entries(
                        gradient, lower, upper,
                        map_values(two_products, u_tangent, across - w, u, across_tangent - w_tangent),
                        map_values(two_products, u_tangent, w, u, w_tangent),
                    )  # fmt: skip
                low, high = read_entry(at, lower), read_entry(at, upper)
                p, q = add(map_values(multiply, u, low)), add(map_values(multiply, u_tangent, low))
                p_step = add(map_values(multiply, u, high)) - p
                q_step = add(map_values(multiply, u_tangent, high)) - q
                dx[0] = dx[0] + slopes[0] * (across * q_step + across_tangent * p_step) + bends[0] * across * p_step
                along = p + weights[0] * p_step
                along_tangent = q + weights[0] * q_step + tangents[0] * p_step
                for d in range(1, n_dims):
                    unroll()
                    rest, rest_tangent = f32(1), f32(0)
                    for other in range(1, n_dims):
                        unroll()
                        if other != d:
                            is_upper = (corner >> other) & 1
                            factor = weights[other] if is_upper else f32(1) - weights[other]
                            step = tangents[other] if is_upper else -tangents[other]
                            rest_tangent = rest_tangent * factor + rest * step
                            rest = rest * factor
                    step = slopes[d] * (rest * along_tangent + rest_tangent * along) + bends[d] * rest * along
                    dx[d] = dx[d] + (step if (corner >> d) & 1 else -step)

        return ItemGroup(first, count, target.device(backward), by_sample=True)

    return _make_parts(target, spec, memory, make_dual_values, make_backward)


def _make_nearest(target, spec: GridSpec, memory, *, table_gradient: bool) -> EncodingParts:
    """Features that nothing moves: y' = 0, and the entry's gradient is B."""
    n_dims, n_features, levels = spec.n_input_dims, spec.n_features_per_level, grid_levels(spec)
    u32, map_values, spaces = target.u32, target.map_fragment, target.memory_spaces
    np_u32, np_f32 = np.uint32, np.float32
    scale_of, resolution_of, n_entries_of, offset_of = make_level_constants(target, levels)
    locate, multiply = make_locate(target, memory, n_dims, scale_of), make_multiply(target)
    get, add_entry = memory.make_get_dual(n_features), memory.make_add_entry(n_features)

    def make_dual_values(index: Callable, n_values: int) -> Callable:
        parts_of_entry = n_features // n_values
        read, zeros = memory.make_read_entry(n_values), memory.make_zeros(n_values)

        def dual_values(at, level, part):
            cells = spaces.local.array(n_dims, np_u32)
            fractions = spaces.local.array(n_dims, np_f32)
            locate(at, level, cells, fractions)
            row = u32(index(cells, 0, resolution_of(level), n_entries_of(level), level) + offset_of(level))
            return read(at, u32(u32(row * u32(parts_of_entry)) + part)), zeros()

        return target.device(dual_values)

    def make_backward(kind: str, first: int, count: int) -> ItemGroup:
        index = make_index(target, spec, kind)

        def backward(item, at, gradient, live, dx):
            if table_gradient:
                cells = spaces.local.array(n_dims, np_u32)
                fractions = spaces.local.array(n_dims, np_f32)
                locate(at, item, cells, fractions)
                row = u32(index(cells, 0, resolution_of(item), n_entries_of(item)) + offset_of(item))
                add_entry(gradient, row, map_values(multiply, get(at, u32(item * u32(n_features)))[1], live))

        return ItemGroup(first, count, target.device(backward), by_sample=True)

    return _make_parts(target, spec, memory, make_dual_values, make_backward)


def _of_active_levels(
    target, spec: GridSpec, memory, make_dual_values: Callable, make_backward: Callable
) -> tuple[Callable, Callable]:
    """Both, with the levels that a sample does not use as 0."""
    active, of_active = make_active(target, memory, spec.n_levels), make_of_active(target)
    map_values = target.map_fragment

    def make_dual_values_of_active(index: Callable, n_values: int) -> Callable:
        dual_values = make_dual_values(index, n_values)

        def values_of_active(at, level, part):
            features, moves = dual_values(at, level, part)
            is_active = active(at, level)
            return map_values(of_active, features, is_active), map_values(of_active, moves, is_active)

        return target.device(values_of_active)

    def make_backward_of_active(kind: str, first: int, count: int) -> ItemGroup:
        group = make_backward(kind, first, count)
        return ItemGroup(first, count, make_work_of_active(target, active, group.work), by_sample=True)

    return make_dual_values_of_active, make_backward_of_active


def _make_parts(target, spec: GridSpec, memory, make_dual_values: Callable, make_backward: Callable) -> EncodingParts:
    if memory.max_level:
        make_dual_values, make_backward = _of_active_levels(target, spec, memory, make_dual_values, make_backward)
    n_features, levels, u32 = spec.n_features_per_level, grid_levels(spec), target.u32
    put, divide = memory.make_put_dual(n_features), make_divide(target, n_features)

    def make_dual(n_values: int) -> Callable:
        values = make_dual_values(make_any_index(target, spec, levels), n_values)

        def dual(at, column):
            place = divide(column)
            return values(at, place[0], u32(place[1] // u32(n_values)))

        return target.device(dual)

    def make_encode(first: int, count: int) -> ItemGroup:
        values = make_dual_values(make_any_index(target, spec, levels[first : first + 1]), n_features)

        def encode(item, at):
            put(at, u32(item * u32(n_features)), values(at, item, u32(0)))

        return ItemGroup(first, count, target.device(encode), by_sample=True)

    runs = consecutive_groups([index_kind(spec, level) for level in levels])
    encode = tuple(make_encode(first, count) for _, first, count in runs)
    groups = tuple(make_backward(*run) for run in runs)
    part = BackwardPart(groups, memory.first_dim, spec.n_input_dims)
    return EncodingParts(encode, (part,), n_features, make_dual, padding_value=0.0)
