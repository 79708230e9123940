"""What a grid does otherwise if asked to: positions in fixed point, levels switched off, one corner for all gradients.

Kernels of grids without these options hold nothing of this (formulas: reference/grid.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..layout import GridLevel
from ..specs import GridSpec
from .grid_rows import make_random_output

LARGEST_CELL_SCALE = 2.0**-30
STOCHASTIC_SEED = 1337


def make_fixed_point_position(target, levels: tuple[GridLevel, ...]) -> Callable:
    """position(bits, level) -> (cell, fraction) of x = bits / 2^32, the 32 bits of a float32 x.

    With cells of c = floor(2^32 / s): cell and fraction of (bits + floor(c / 2)) / c, in 64 bits.
    """
    cells = [int(np.float32(2**32) / np.float32(max(level.scale, LARGEST_CELL_SCALE))) for level in levels]
    length_of = target.constant(np.array(cells, np.uint64))
    np_u32, np_u64, np_f32 = np.uint32, np.uint64, np.float32

    def divide(bits, length):
        moved = np_u64(bits) + np_u64(length >> np_u64(1))
        cell = np_u64(moved // length)
        return np_u32(cell), np_f32(np_u64(moved - np_u64(cell * length))) / np_f32(length)

    divide = target.scalar(divide)

    def position(bits, level):
        return divide(bits, length_of(level))

    return target.device(position)


def make_active(target, memory, n_levels: int) -> Callable:
    """active(at, level) -> 1.0 where the sample uses the level, else 0.0."""
    read_max_level, np_f32, total, margin = memory.read_max_level, np.float32, np.float32(n_levels), np.float32(1e-3)

    def is_below(level, max_level):
        return np_f32(1) if np_f32(level) < max_level * total + margin else np_f32(0)

    is_below = target.scalar(is_below)

    def active(at, level):
        return is_below(level, read_max_level(at))

    return target.device(active)


def make_of_active(target) -> Callable:
    """Scalar (value, active) -> the value where the level is on, else 0."""
    np_f32 = np.float32

    def of_active(value, is_active):
        return value if is_active > np_f32(0) else np_f32(0)

    return target.scalar(of_active)


def make_work_of_active(target, active: Callable, work: Callable) -> Callable:
    """A backward item's `work`, counting only where the level is on."""

    def work_of_active(item, at, gradient, live, dx):
        work(item, at, gradient, live * active(at, item), dx)

    return target.device(work_of_active)


def make_chosen_corner(target, spec: GridSpec, memory) -> Callable:
    """choose(at, level, cells, weights, chosen): the vertex that gets a sample's whole gradient in a level.

    In each dimension it is the upper one where rho < w_d, with one random number rho in [0, 1) for all dimensions.
    """
    n_dims, unroll = spec.n_input_dims, target.unroll_full
    random, stream_position = make_random_output(target, STOCHASTIC_SEED), memory.stream_position
    np_u32, np_f32 = np.uint32, np.float32
    unit = np_f32(2.0**-23)

    def uniform(bits):
        return np_f32(np_u32(bits >> np_u32(9))) * unit

    def upper_where_below(cell, rho, weight):
        return np_u32(cell + np_u32(1)) if rho < weight else np_u32(cell)

    uniform, upper_where_below = target.scalar(uniform), target.scalar(upper_where_below)

    def choose(at, level, cells, weights, chosen):
        rho = uniform(random(stream_position(at, level)))
        for d in range(n_dims):
            unroll()
            chosen[d] = upper_where_below(cells[d], rho, weights[d])

    return target.device(choose)
