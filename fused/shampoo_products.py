"""Shampoo's kernels on matrices: their products, the preconditioned direction and the move (see shampoo.py).

A block takes eight rows of a matrix, a warp one of them, and its lanes the row's columns.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from ..parameter_sizes import ParameterSizes
from ..specs import ShampooSpec
from .fragments import Target
from .layer_optimizers import THREADS, WARPS, make_add_square, make_decayed, make_zero
from .matrix_roots import scratch_elements
from .memory_access import make_is_below, make_load, make_load_word, make_store, make_store_copy, make_to_tuple
from .mlp import make_block_sum
from .stage_io import KernelBody
from .tiles import make_indices

FIRST_SHARES, SECOND_SHARES, PRODUCT_SHARES, MOMENTUM_SHARES = range(4)
"""Places of the averages' (old, new) shares in `shares`."""

DOT_STEPS = 8  # factors of a dot product that a thread has on their way at a time


def groups_of(sizes: ParameterSizes) -> list[int]:
    """The number of each matrix's group: a run of neighbours of equal shape."""
    runs = [len(list(run)) for _, run in itertools.groupby(sizes.layer_sizes)]
    return [group for group, length in enumerate(runs) for _ in range(length)]


def row_blocks(sizes: ParameterSizes) -> int:
    """Blocks that share a matrix, a row a warp."""
    return max((-(-rows // WARPS) for rows, _ in sizes.layer_sizes), default=1)


class Tables:
    """Numbers of each matrix, as functions that read constant memory: its shape, and where its parts begin."""

    def __init__(self, target: Target, sizes: ParameterSizes):
        rows, columns = np.array(sizes.layer_sizes, np.int64).T

        def starts(lengths):
            return np.concatenate([[0], np.cumsum(lengths)[:-1]])

        def constant(values):
            return target.constant(np.ascontiguousarray(values, dtype=np.uint32))

        self.rows, self.columns, self.start = constant(rows), constant(columns), constant(starts(rows * columns))
        self.left, self.right = constant(starts(rows**2)), constant(starts(columns**2))
        ends = np.cumsum([scratch_elements(n) for shape in sizes.layer_sizes for n in shape])
        self.scratch = constant(np.concatenate([[0], ends[:-1]]))  # of L and R of the first matrix, of the second ...
        self.group = constant(groups_of(sizes))


@functools.cache
def _make_dot(target: Target):
    """dot(a, a_index, a_stride, b, b_index, b_stride, n, active) -> sum of a[a_index + k a_stride] b[...], k < n."""
    u32 = target.u32

    @target.intrinsic(["f32", "u64", "u32", "u32", "u64", "u32", "u32", "u32", "u32", "u32"], "f32")
    def add_products(e, total, a, a_index, a_stride, b, b_index, b_stride, k, n, active):
        is_active, pairs = e.less(0, active), []
        for i in range(DOT_STEPS):
            step = e.add(k, i)
            inside = e.both(is_active, e.less(step, n))
            left = e.address(a, e.add(a_index, e.mul(step, a_stride)), 4)
            right = e.address(b, e.add(b_index, e.mul(step, b_stride)), 4)
            pairs.append([e.load_global_where(inside, place, "f32")[0] for place in (left, right)])
        for left, right in pairs:
            total = e.fma(left, right, total)
        return total

    @target.intrinsic([], "f32")
    def zero(e):
        return e.f32(0.0)

    def dot(a, a_index, a_stride, b, b_index, b_stride, n, active):
        total, k = zero(), u32(0)
        while k < n:
            total = add_products(total, a, a_index, a_stride, b, b_index, b_stride, k, n, active)
            k = u32(k + u32(DOT_STEPS))
        return total

    return target.device(dot)


@functools.cache
def make_blend(target: Target):
    """Scalar (old, new, old_share, new_share) -> the exponential average."""

    def blend(old, new, old_share, new_share):
        return old_share * old + new_share * new

    return target.scalar(blend)


@functools.cache
def _make_is_moving(target: Target):
    """Scalar (is_ready, t) -> 1 where matrices move: from the second update on."""

    def is_moving(is_ready, t):
        return np.uint32(1) if is_ready != np.uint32(0) and t > np.uint32(1) else np.uint32(0)

    return target.scalar(is_moving)


def make_products_kernel(target: Target, spec: ShampooSpec, sizes: ParameterSizes) -> KernelBody:
    """L <- avg(G G^T) in even rows of blocks, R <- avg(G^T G) in odd ones; G is u or the gradient without l2."""
    _, lane_index, warp_index, block_index, block_row, _ = make_indices(target)
    u32, map_values, tables, dot = target.u32, target.map_fragment, Tables(target, sizes), _make_dot(target)
    rows_of, columns_of, start_of, left_of, right_of = (
        tables.rows, tables.columns, tables.start, tables.left, tables.right,
    )  # fmt: skip
    is_below, word, load_2 = make_is_below(target), make_load_word(target), make_load(target, "f32", 2)
    load, store, to_tuple = make_load(target, "f32"), make_store(target, "f32"), make_to_tuple(target)
    blend, on_momentum = make_blend(target), spec.cg_on_momentum

    def fill(matrix_of, first, n, n_inner, outer_stride, inner_stride, products, place, shares, ready):
        """The rows of this block's warps of an n x n matrix of products of the vectors at `first`."""
        row, column_start = u32(u32(block_index() * u32(WARPS)) + warp_index()), u32(0)
        row_inside, share = u32(ready * is_below(row, n)), load_2(shares, u32(2 * PRODUCT_SHARES), u32(1))
        while column_start < n:
            column = u32(column_start + lane_index())
            active = u32(row_inside * is_below(column, n))
            a, b = u32(first + u32(row * outer_stride)), u32(first + u32(column * outer_stride))
            new = to_tuple(dot(matrix_of, a, inner_stride, matrix_of, b, inner_stride, n_inner, active))
            index = u32(place + u32(u32(row * n) + column))
            old = load(products, index, active)
            store(products, index, map_values(blend, old, new, share[0], share[1]), active)
            column_start = u32(column_start + u32(32))

    fill = target.device(fill)

    def body(is_ready, shares, handed, direction, left_products, right_products):
        matrix = u32(u32(block_row()) // u32(2))
        rows, columns, first = u32(rows_of(matrix)), u32(columns_of(matrix)), u32(start_of(matrix))
        source, ready = handed, word(is_ready)
        if on_momentum:
            source = direction
        if u32(block_row()) % u32(2) == u32(0):
            fill(source, first, rows, columns, columns, u32(1), left_products, u32(left_of(matrix)), shares, ready)
        else:
            fill(source, first, columns, rows, u32(1), columns, right_products, u32(right_of(matrix)), shares, ready)

    pointers = ("is_ready", "shares", "handed", "direction", "left_products", "right_products")
    return KernelBody("shampoo_products", body, tuple((name, "u64") for name in pointers))


def make_precondition_kernel(target: Target, sizes: ParameterSizes) -> KernelBody:
    """L^(-1/4) u of every matrix."""
    _, lane_index, warp_index, block_index, block_row, _ = make_indices(target)
    u32, tables, dot = target.u32, Tables(target, sizes), _make_dot(target)
    rows_of, columns_of, start_of, left_of = tables.rows, tables.columns, tables.start, tables.left
    is_below, word, is_moving = make_is_below(target), make_load_word(target), _make_is_moving(target)
    store, to_tuple = make_store(target, "f32"), make_to_tuple(target)

    def body(is_ready, n_updates, left_roots, direction, preconditioned):
        matrix = u32(block_row())
        rows, columns, first = u32(rows_of(matrix)), u32(columns_of(matrix)), u32(start_of(matrix))
        row, column_start = u32(u32(block_index() * u32(WARPS)) + warp_index()), u32(0)
        row_inside = u32(is_below(row, rows) * is_moving(word(is_ready), word(n_updates)))
        left_row = u32(u32(left_of(matrix)) + u32(row * rows))
        while column_start < columns:
            column = u32(column_start + lane_index())
            active = u32(row_inside * is_below(column, columns))
            value = dot(left_roots, left_row, u32(1), direction, u32(first + column), columns, rows, active)
            store(preconditioned, u32(first + u32(u32(row * columns) + column)), to_tuple(value), active)
            column_start = u32(column_start + u32(32))

    pointers = ("is_ready", "n_updates", "left_roots", "direction", "preconditioned")
    return KernelBody("shampoo_precondition", body, tuple((name, "u64") for name in pointers))


def make_momentum_kernel(target: Target, sizes: ParameterSizes) -> KernelBody:
    """s <- avg(L^(-1/4) u R^(-1/4)); squares[matrix, block] = the block's part of (sum of u^2, sum of s^2), float64."""
    thread_index, lane_index, warp_index, block_index, block_row, _ = make_indices(target)
    u32, map_values, tables, dot = target.u32, target.map_fragment, Tables(target, sizes), _make_dot(target)
    rows_of, columns_of, start_of, right_of = tables.rows, tables.columns, tables.start, tables.right
    is_below, word, is_moving = make_is_below(target), make_load_word(target), _make_is_moving(target)
    load, store, to_tuple = make_load(target, "f32"), make_store(target, "f32"), make_to_tuple(target)
    load_2, store_wide, wide_to_tuple = (
        make_load(target, "f32", 2),
        make_store(target, "f64"),
        make_to_tuple(target, "f64"),
    )
    zero, add_square, block_sum = make_zero(target), make_add_square(target), make_block_sum(target, THREADS, "f64")
    blend, shared_base, n_blocks = make_blend(target), target.dynamic_shared_base(), row_blocks(sizes)

    @target.intrinsic(["f64", "f64"], ("f64", 2))
    def pair(e, a, b):
        return [a, b]

    def body(is_ready, n_updates, shares, right_roots, direction, preconditioned, matrix_momentum, squares):
        matrix = u32(block_row())
        rows, columns, first = u32(rows_of(matrix)), u32(columns_of(matrix)), u32(start_of(matrix))
        row, column_start = u32(u32(block_index() * u32(WARPS)) + warp_index()), u32(0)
        row_inside = u32(is_below(row, rows) * is_moving(word(is_ready), word(n_updates)))
        row_start, share = u32(first + u32(row * columns)), load_2(shares, u32(2 * MOMENTUM_SHARES), u32(1))
        u_squares, s_squares = zero(), zero()
        while column_start < columns:
            column = u32(column_start + lane_index())
            active, index = u32(row_inside * is_below(column, columns)), u32(row_start + column)
            right = u32(u32(right_of(matrix)) + column)
            new = dot(preconditioned, row_start, u32(1), right_roots, right, columns, columns, active)
            old = load(matrix_momentum, index, active)
            s = map_values(blend, old, to_tuple(new), share[0], share[1])
            store(matrix_momentum, index, s, active)
            u_squares = add_square(u_squares, load(direction, index, active))
            s_squares = add_square(s_squares, s)
            column_start = u32(column_start + u32(32))
        u_squares, s_squares = block_sum(shared_base(), u_squares), block_sum(shared_base(), s_squares)
        place, is_first = (
            u32(u32(2) * u32(u32(matrix * u32(n_blocks)) + block_index())),
            is_below(thread_index(), u32(1)),
        )
        store_wide(squares, place, wide_to_tuple(u_squares), is_first)
        store_wide(squares, u32(place + u32(1)), wide_to_tuple(s_squares), is_first)

    pointers = ("is_ready", "n_updates", "shares", "right_roots", "direction", "preconditioned", "matrix_momentum",
                "squares")  # fmt: skip
    return KernelBody("shampoo_momentum", body, tuple((name, "u64") for name in pointers))


def make_move_kernel(target: Target, spec: ShampooSpec, sizes: ParameterSizes) -> KernelBody:
    """w of the matrices, with eta = learning_rate |u| / |s| where `frobenius_normalization` asks for it."""
    thread_index, lane_index, warp_index, block_index, block_row, _ = make_indices(target)
    u32, map_values, tables, n_blocks = target.u32, target.map_fragment, Tables(target, sizes), row_blocks(sizes)
    rows_of, columns_of, start_of = tables.rows, tables.columns, tables.start
    is_below, word, is_moving = make_is_below(target), make_load_word(target), _make_is_moving(target)
    load, store, store_copy = make_load(target, "f32"), make_store(target, "f32"), make_store_copy(target)
    load_wide, zero, block_sum = make_load(target, "f64"), make_zero(target), make_block_sum(target, THREADS, "f64")
    shared_base, decayed, normalises = target.dynamic_shared_base(), make_decayed(target), spec.frobenius_normalization
    relative_decay, absolute_decay = np.float32(spec.relative_decay), np.float32(spec.absolute_decay)

    @target.intrinsic(["f64", ("f64", 1)], "f64")
    def add(e, total, a):
        return e.fadd(total, a[0])

    @target.intrinsic(["f32", "f64", "f64"], "f32")
    def step_length(e, learning_rate, u_squares, s_squares):
        """learning_rate |u| / |s|, or 0 where s is."""
        length, is_positive = e.square_root(s_squares), e.less_than(e.f64(0.0), s_squares)
        ratio = e.fdiv(e.square_root(u_squares), e.select(is_positive, length, e.f64(1.0)))
        return e.select(is_positive, e.narrow(e.fmul(e.widen(learning_rate), ratio)), e.f32(0.0))

    def move(w, s, eta):
        return decayed(w, relative_decay * eta, absolute_decay * eta) - eta * s

    move = target.scalar(move)

    def body(is_ready, n_updates, matrix_momentum, squares, weights, copy, learning_rate):
        matrix, eta = u32(block_row()), learning_rate
        if normalises:
            u_squares, s_squares, block = zero(), zero(), u32(0)
            while block < u32(n_blocks):
                part = u32(block + thread_index())
                inside, place = is_below(part, u32(n_blocks)), u32(u32(2) * u32(u32(matrix * u32(n_blocks)) + part))
                u_squares = add(u_squares, load_wide(squares, place, inside))
                s_squares = add(s_squares, load_wide(squares, u32(place + u32(1)), inside))
                block = u32(block + u32(THREADS))
            u_squares, s_squares = block_sum(shared_base(), u_squares), block_sum(shared_base(), s_squares)
            eta = step_length(learning_rate, u_squares, s_squares)
        rows, columns, first = u32(rows_of(matrix)), u32(columns_of(matrix)), u32(start_of(matrix))
        row, column_start = u32(u32(block_index() * u32(WARPS)) + warp_index()), u32(0)
        row_inside = u32(is_below(row, rows) * is_moving(word(is_ready), word(n_updates)))
        while column_start < columns:
            column = u32(column_start + lane_index())
            active = u32(row_inside * is_below(column, columns))
            index = u32(first + u32(u32(row * columns) + column))
            s, w = load(matrix_momentum, index, active), load(weights, index, active)
            w = map_values(move, w, s, eta)
            store(weights, index, w, active)
            store_copy(copy, index, w, active)
            column_start = u32(column_start + u32(32))

    pointers = ("is_ready", "n_updates", "matrix_momentum", "squares", "weights", "copy")
    parameters = (*((name, "u64") for name in pointers), ("learning_rate", "f32"))
    return KernelBody("shampoo_move", body, parameters)
