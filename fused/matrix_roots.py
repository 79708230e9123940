"""The inverse fourth root of symmetric positive definite matrices, one a block (mirror of reference/matrix_roots.py).

The reference's coupled Newton iteration, in float64, with the same test for its end. A block of 512 threads multiplies
n x n matrices in global memory, which the L1 cache holds in part: each warp takes four rows, each lane a column.
Matrices are padded with zeros to a multiple of four rows and columns; so is the identity that the iteration adds, and
the padding stays zero throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from .fragments import Target
from .layer_optimizers import make_zero
from .memory_access import make_is_below, make_load, make_store, make_to_tuple
from .mlp import make_block_sum
from .tiles import make_indices

THREADS = 512
WARPS = THREADS // 32
ROWS = 4  # of a product, a thread
MAX_ITERATIONS = 200
ITERATIONS_BETWEEN_TESTS = 5
SQUARED_TOLERANCE = 1e-20
N_SCRATCH = 6  # padded matrices


def scratch_elements(n: int) -> int:
    """Float64 numbers of scratch memory for the root of an n x n matrix."""
    return N_SCRATCH * padded(n) ** 2


def padded(n: int) -> int:
    return -(-n // ROWS) * ROWS


@functools.cache
def _make_places(target: Target) -> tuple[Callable, Callable, Callable]:
    """Scalar (row, column, on_diagonal) of an element: (index, width), and with n 1 on the diagonal of n rows."""

    def row(index, width):
        return np.uint32(index // width)

    def column(index, width):
        return np.uint32(index % width)

    def on_diagonal(index, width, n):
        return np.uint32(1) if index // width == index % width and index // width < n else np.uint32(0)

    return target.scalar(row), target.scalar(column), target.scalar(on_diagonal)


@functools.cache
def _make_product(target: Target):
    """product(n, a, b, c): C <- A B of padded matrices at addresses a, b and c, n x n; then a barrier."""
    indices = make_indices(target)
    lane_index, warp_index = indices.lane, indices.warp
    u32, is_below = target.u32, make_is_below(target)

    @target.intrinsic([], ("f64", ROWS))
    def zeros(e):
        return [e.f64(0.0)] * ROWS

    @target.intrinsic([("f64", ROWS), "u64", "u64", "u32", "u32", "u32", "u32", "u32"], ("f64", ROWS))
    def add_products(e, total, a, b, n, row, column, k, active):
        """Of columns k ... k + 3 of A and rows k ... k + 3 of B."""
        is_active, total, left, right = e.less(0, active), list(total), [], []
        for i in range(ROWS):
            place = e.address(a, e.add(e.mul(e.add(row, i), n), k), 8)
            pairs = [e.load_global_where(is_active, place, "f64", 2, offset) for offset in (0, 16)]
            left.append([*pairs[0], *pairs[1]])
        for j in range(4):
            place = e.address(b, e.add(e.mul(e.add(k, j), n), column), 8)
            right += e.load_global_where(is_active, place, "f64")
        for j in range(4):
            for i in range(ROWS):
                total[i] = e.fma(left[i][j], right[j], total[i])
        return total

    @target.intrinsic([("f64", ROWS), "u64", "u32", "u32", "u32", "u32"], "void")
    def store_rows(e, total, c, n, row, column, active):
        with e.when(e.less(0, active)):
            for i, value in enumerate(total):
                e.store_global(e.address(c, e.add(e.mul(e.add(row, i), n), column), 8), "f64", [value])

    @target.intrinsic([], "void")
    def barrier(e):
        e.barrier()

    def product(n, a, b, c):
        first_row = u32(0)
        while first_row < n:
            row, first_column = u32(first_row + u32(u32(ROWS) * warp_index())), u32(0)
            while first_column < n:
                column = u32(first_column + lane_index())
                active = u32(is_below(row, n) * is_below(column, n))
                total, k = zeros(), u32(0)
                while k < n:
                    total = add_products(total, a, b, n, row, column, k, active)
                    k = u32(k + u32(4))
                store_rows(total, c, n, row, column, active)
                first_column = u32(first_column + u32(32))
            first_row = u32(first_row + u32(ROWS * WARPS))
        barrier()

    return target.device(product), barrier


def make_inverse_fourth_root(target: Target, kappa: float):
    """root(base, n, products, roots, scratch): (1 - kappa) A + kappa I to the power -1/4, for A = `products` [n, n],
    float32, into `roots`, by all threads of a block. A matrix that has no root leaves `roots` as it is."""
    thread_index = make_indices(target).thread
    u32, uniform, is_below = target.u32, target.uniform, make_is_below(target)
    load, store = make_load(target, "f64"), make_store(target, "f64")
    load_product, store_root = make_load(target, "f32"), make_store(target, "f32")
    to_tuple, zero = make_to_tuple(target, "f64"), make_zero(target)
    block_sum = make_block_sum(target, THREADS, "f64")
    product, barrier = _make_product(target)
    row_of, column_of, on_diagonal = _make_places(target)

    @target.intrinsic([("f32", 1), ("f32", 1), "u32"], "f64")
    def regularised(e, a, transposed, is_diagonal):
        mean = e.fmul(e.fadd(e.widen(a[0]), e.widen(transposed[0])), e.f64((1 - kappa) / 2))
        return e.fadd(mean, e.select(e.less(0, is_diagonal), e.f64(kappa), e.f64(0.0)))

    @target.intrinsic(["f64", ("f64", 1)], "f64")
    def add_square(e, total, a):
        return e.fma(a[0], a[0], total)

    @target.intrinsic(["f64", ("f64", 1), ("f64", 1)], "f64")
    def add_squared_difference(e, total, a, b):
        difference = e.fadd(a[0], e.fmul(b[0], e.f64(-1.0)))
        return e.fma(difference, difference, total)

    @target.intrinsic(["f64"], "f64")
    def scale_of(e, total):
        """sqrt(2) / total^(1/8)."""
        return e.fdiv(e.f64(2**0.5), e.square_root(e.square_root(e.square_root(total))))

    @target.intrinsic([("f64", 1), "f64"], ("f64", 1))
    def scaled(e, a, scale):
        return [e.fmul(a[0], scale)]

    @target.intrinsic(["f64", "u32"], ("f64", 1))
    def first_root(e, scale, is_diagonal):
        return [e.select(e.less(0, is_diagonal), e.square_root(e.square_root(scale)), e.f64(0.0))]

    @target.intrinsic([("f64", 1), "u32"], ("f64", 1))
    def newton_factor(e, m, is_diagonal):
        """(5 I - M) / 4."""
        return [e.fma(m[0], e.f64(-0.25), e.select(e.less(0, is_diagonal), e.f64(1.25), e.f64(0.0)))]

    @target.intrinsic([("f64", 1)], ("f32", 1))
    def narrow(e, a):
        return [e.narrow(a[0])]

    @target.intrinsic(["f64", "f64"], "u32")
    def has_converged(e, change, total):
        return e.select(e.less_than(change, e.fmul(total, e.f64(SQUARED_TOLERANCE))), e.u32(1), e.u32(0))

    @target.intrinsic(["f64"], "u32")
    def is_lost(e, change):
        """1 where it is infinite or NaN."""
        return e.select(e.less_than(change, e.f64(np.finfo(np.float64).max)), e.u32(0), e.u32(1))

    @target.intrinsic(["u64", "u32", "u32"], "u64")
    def matrix(e, scratch, number, size):
        return e.address(scratch, e.mul(number, size), 8)

    def root(base, n, products, roots, scratch):
        width = u32(u32(u32(n + u32(ROWS - 1)) // u32(ROWS)) * u32(ROWS))
        size, thread = u32(width * width), thread_index()
        a, x, x_new = matrix(scratch, u32(0), size), matrix(scratch, u32(1), size), matrix(scratch, u32(2), size)
        t, t_squared, m = matrix(scratch, u32(3), size), matrix(scratch, u32(4), size), matrix(scratch, u32(5), size)

        first = u32(0)
        while first < size:
            index = u32(first + thread)
            row, column = row_of(index, width), column_of(index, width)
            inside = u32(is_below(row, n) * is_below(column, n))
            value = load_product(products, u32(u32(row * n) + column), inside)
            transposed = load_product(products, u32(u32(column * n) + row), inside)
            mean = regularised(value, transposed, on_diagonal(index, width, n))
            store(a, index, to_tuple(mean), is_below(index, size))
            first = u32(first + u32(THREADS))
        barrier()
        product(width, a, a, t)
        product(width, t, t, t_squared)
        total, first = zero(), u32(0)
        while first < size:
            index = u32(first + thread)
            total = add_square(total, load(t_squared, index, is_below(index, size)))
            first = u32(first + u32(THREADS))
        scale = scale_of(block_sum(base, total))
        first = u32(0)
        while first < size:
            index = u32(first + thread)
            inside = is_below(index, size)
            store(m, index, scaled(load(a, index, inside), scale), inside)
            store(x, index, first_root(scale, on_diagonal(index, width, n)), inside)
            first = u32(first + u32(THREADS))
        barrier()

        iteration, converged, stop = u32(0), u32(0), u32(0)
        while iteration < u32(MAX_ITERATIONS) and stop == u32(0):
            iteration = u32(iteration + u32(1))
            first = u32(0)
            while first < size:
                index = u32(first + thread)
                inside = is_below(index, size)
                factor = newton_factor(load(m, index, inside), on_diagonal(index, width, n))
                store(t, index, factor, inside)
                first = u32(first + u32(THREADS))
            barrier()
            product(width, x, t, x_new)
            product(width, t, t, t_squared)
            product(width, t_squared, m, t)
            product(width, t_squared, t, m)
            if iteration % u32(ITERATIONS_BETWEEN_TESTS) == u32(0):
                change, total, first = zero(), zero(), u32(0)
                while first < size:
                    index = u32(first + thread)
                    inside = is_below(index, size)
                    new = load(x_new, index, inside)
                    change = add_squared_difference(change, new, load(x, index, inside))
                    total = add_square(total, new)
                    first = u32(first + u32(THREADS))
                change, total = block_sum(base, change), block_sum(base, total)
                converged = uniform(has_converged(change, total))
                stop = u32(converged | uniform(is_lost(change)))
            x, x_new = x_new, x
        if converged > u32(0):
            first = u32(0)
            while first < size:
                index = u32(first + thread)
                row, column = row_of(index, width), column_of(index, width)
                inside = u32(is_below(row, n) * is_below(column, n))
                store_root(roots, u32(u32(row * n) + column), narrow(load(x, index, inside)), inside)
                first = u32(first + u32(THREADS))

    return target.device(root)
