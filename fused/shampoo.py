"""Shampoo (mirror of reference/shampoo.py): gradients of a matrix, preconditioned from the left and from the right.

Seven kernels, which follow the reference's formulas in their order. The number of updates, t, is known to the device
alone, so all are launched in every step, and what has no turn (the first move of a matrix, roots that are not due)
ends at once:

    begin          t, and the shares (old, new) of the four averages
    direction      m, v and u of every parameter; moves those that are no matrices
    products       L and R of every matrix
    precondition   L^(-1/4) u
    momentum       s, and partial sums of u^2 and s^2
    move           the matrices
    roots          a block for each L and R

Where a matrix has no root the last one stays in use, as in the reference; nobody is warned, which would take waiting.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

from ..parameter_sizes import ParameterSizes
from ..specs import ShampooSpec
from . import matrix_roots
from .fragments import Target
from .layer_optimizers import (
    THREADS,
    WARPS,
    LayerKernel,
    LayerLeaf,
    make_decayed,
)
from .matrix_roots import make_inverse_fourth_root, scratch_elements
from .memory_access import (
    make_is_below,
    make_load,
    make_load_word,
    make_store,
    make_store_copy,
    make_store_word,
    make_to_tuple,
)
from .optimizer_contract import Slice
from .optimizer_state import StateBlock, StateVector
from .shampoo_products import (
    FIRST_SHARES,
    SECOND_SHARES,
    Tables,
    groups_of,
    make_blend,
    make_momentum_kernel,
    make_move_kernel,
    make_precondition_kernel,
    make_products_kernel,
    row_blocks,
)
from .stage_io import KernelBody
from .tiles import make_indices

STEPS_BETWEEN_ROOTS = 10
STEPS_BETWEEN_LATE_ROOTS = 200
FIRST_LATE_STEP = 100


class Shampoo(LayerLeaf):
    state_arrays = {"first_moments": np.float32, "second_moments": np.float32}

    def __init__(self, spec: ShampooSpec, where: Slice):
        super().__init__(spec, where)
        layers, n = where.sizes.layer_sizes, where.sizes.n_params
        for side, lengths in (("left", [rows for rows, _ in layers]), ("right", [columns for _, columns in layers])):
            identities = [np.eye(length, dtype=np.float32).reshape(-1) for length in lengths]
            roots = np.concatenate([np.zeros(0, np.float32), *identities])
            self.arrays[f"{side}_products"] = StateBlock(np.zeros_like(roots))
            self.arrays[f"{side}_roots"] = StateBlock(roots)
        self.arrays["matrix_momentum"] = StateBlock(np.zeros(where.sizes.n_matrix_params, np.float32))
        n_scratch = sum(scratch_elements(n) for n in itertools.chain.from_iterable(layers))
        self.scratch |= {
            "shares": StateBlock(np.zeros(8, np.float32)),
            "direction": StateVector(np.float32, where.start, n),
            "preconditioned": StateBlock(np.zeros(where.sizes.n_matrix_params, np.float32)),
            "squares": StateBlock(np.zeros(2 * len(layers) * row_blocks(where.sizes), np.float64)),
            "root_scratch": StateBlock(np.zeros(n_scratch, np.float64)),
        }

    @staticmethod
    def layer_kernels(spec: ShampooSpec, sizes: ParameterSizes) -> list[LayerKernel]:
        kernels = [
            LayerKernel(lambda target: make_begin_kernel(target, spec), 1, threads=32),
            LayerKernel(
                lambda target: make_direction_kernel(target, spec, sizes), max(1, -(-sizes.n_params // THREADS))
            ),
        ]
        if not sizes.layer_sizes:
            return kernels
        n_matrices = len(sizes.layer_sizes)
        longest = max(itertools.chain.from_iterable(sizes.layer_sizes))
        return [
            *kernels,
            LayerKernel(lambda target: make_products_kernel(target, spec, sizes), -(-longest // WARPS), 2 * n_matrices),
            LayerKernel(lambda target: make_precondition_kernel(target, sizes), row_blocks(sizes), n_matrices),
            LayerKernel(lambda target: make_momentum_kernel(target, sizes), row_blocks(sizes), n_matrices),
            LayerKernel(lambda target: make_move_kernel(target, spec, sizes), row_blocks(sizes), n_matrices),
            LayerKernel(
                lambda target: make_roots_kernel(target, spec, sizes), 2 * n_matrices, threads=matrix_roots.THREADS
            ),
        ]


def make_begin_kernel(target: Target, spec: ShampooSpec) -> KernelBody:
    """t <- t + 1; the shares (d - d^t) / (1 - d^t) and (1 - d) / (1 - d^t) of each of the four averages."""
    thread_index, u32 = make_indices(target).thread, target.u32
    word, store_word, is_below = make_load_word(target), make_store_word(target), make_is_below(target)
    store, to_tuple = make_store(target, "f32"), make_to_tuple(target)

    def make_shares(decay: float):
        d, rest = np.float32(decay), np.float32(1 - decay)
        log_d = np.float32(math.log(decay) if decay > 0 else -100.0)

        def old_share(t):
            exponent = np.float32(t)
            return d * math.expm1((exponent - np.float32(1)) * log_d) / math.expm1(exponent * log_d)

        def new_share(t):
            return rest / -math.expm1(np.float32(t) * log_d)

        return target.scalar(old_share), target.scalar(new_share)

    (old_1, new_1), (old_2, new_2), (old_3, new_3), (old_4, new_4) = (
        make_shares(d) for d in (spec.beta1, spec.beta2, spec.beta3, spec.beta_shampoo)
    )

    def body(is_ready, n_updates, shares):
        active = u32(word(is_ready) * is_below(thread_index(), u32(1)))
        t = u32(word(n_updates) + u32(1))
        store(shares, u32(0), to_tuple(old_1(t)), active)
        store(shares, u32(1), to_tuple(new_1(t)), active)
        store(shares, u32(2), to_tuple(old_2(t)), active)
        store(shares, u32(3), to_tuple(new_2(t)), active)
        store(shares, u32(4), to_tuple(old_3(t)), active)
        store(shares, u32(5), to_tuple(new_3(t)), active)
        store(shares, u32(6), to_tuple(old_4(t)), active)
        store(shares, u32(7), to_tuple(new_4(t)), active)
        store_word(n_updates, t, active)

    return KernelBody("shampoo_begin", body, (("is_ready", "u64"), ("n_updates", "u64"), ("shares", "u64")))


def make_direction_kernel(target: Target, spec: ShampooSpec, sizes: ParameterSizes) -> KernelBody:
    """m, v and u = m / (sqrt(v) + epsilon); w of what is no matrix."""
    indices = make_indices(target)
    thread_index, block_index = indices.thread, indices.block
    u32, map_values, n_params, n_matrix = target.u32, target.map_fragment, sizes.n_params, sizes.n_matrix_params
    is_below, word, load = make_is_below(target), make_load_word(target), make_load(target, "f32")
    store, store_copy, load_2 = make_store(target, "f32"), make_store_copy(target), make_load(target, "f32", 2)
    l2_reg, epsilon = np.float32(spec.l2_reg), np.float32(spec.epsilon)
    relative_decay, absolute_decay = np.float32(spec.relative_decay), np.float32(spec.absolute_decay)
    decayed, blend = make_decayed(target), make_blend(target)

    def regularise(g, w):
        return g + l2_reg * w

    def square(a):
        return a * a

    def quotient(m, v):
        return m / (math.sqrt(v) + epsilon)

    def move(w, u, learning_rate):
        return decayed(w, relative_decay * learning_rate, absolute_decay * learning_rate) - learning_rate * u

    regularise, square, quotient, move = (target.scalar(f) for f in (regularise, square, quotient, move))

    def body(
        is_ready, shares, handed, first_moments, second_moments, direction, weights, copy, learning_rate
    ):  # fmt: skip
        index = u32(u32(block_index() * u32(THREADS)) + thread_index())
        active = u32(is_below(index, u32(n_params)) * word(is_ready))
        first, second = (
            load_2(shares, u32(2 * FIRST_SHARES), u32(1)), load_2(shares, u32(2 * SECOND_SHARES), u32(1)),
        )  # fmt: skip
        w = load(weights, index, active)
        gamma = map_values(regularise, load(handed, index, active), w)
        m = map_values(blend, load(first_moments, index, active), gamma, first[0], first[1])
        v = map_values(blend, load(second_moments, index, active), map_values(square, gamma), second[0], second[1])
        u = map_values(quotient, m, v)
        store(first_moments, index, m, active)
        store(second_moments, index, v, active)
        store(direction, index, u, active)
        w = map_values(move, w, u, learning_rate)
        moved = u32(active * is_below(u32(n_matrix), u32(index + u32(1))))
        store(weights, index, w, moved)
        store_copy(copy, index, w, moved)

    pointers = ("is_ready", "shares", "handed", "first_moments", "second_moments", "direction", "weights",
                "copy")  # fmt: skip
    parameters = (*((name, "u64") for name in pointers), ("learning_rate", "f32"))
    return KernelBody("shampoo_direction", body, parameters)


@functools.cache
def _make_address(target: Target, size: int = 4):
    """address(base, index): of an element."""

    @target.intrinsic(["u64", "u32"], "u64")
    def address(e, base, index):
        return e.address(base, index, size)

    return address


def make_roots_kernel(target: Target, spec: ShampooSpec, sizes: ParameterSizes) -> KernelBody:
    """L^(-1/4) in even blocks, R^(-1/4) in odd ones, of the matrices that have their turn after this update."""
    block_index = make_indices(target).block
    u32, uniform, tables = target.u32, target.uniform, Tables(target, sizes)
    rows_of, columns_of, left_of, right_of = tables.rows, tables.columns, tables.left, tables.right
    group_of, scratch_of, word = tables.group, tables.scratch, make_load_word(target)
    shared_base, root = target.dynamic_shared_base(), make_inverse_fourth_root(target, spec.identity)
    address, wide_address = _make_address(target), _make_address(target, 8)
    n_groups = max(groups_of(sizes)) + 1
    early, late = (max(1, steps // n_groups) for steps in (STEPS_BETWEEN_ROOTS, STEPS_BETWEEN_LATE_ROOTS))
    np_u32 = np.uint32

    def is_due(is_ready, t, group):
        q = np_u32(early) if t < np_u32(FIRST_LATE_STEP) else np_u32(late)
        has_turn = t % q == np_u32(0) and (t // q) % np_u32(n_groups) == group
        return np_u32(1) if is_ready != np_u32(0) and (t == np_u32(1) or has_turn) else np_u32(0)

    is_due = target.scalar(is_due)

    def body(is_ready, n_updates, left_products, right_products, left_roots, right_roots, root_scratch):
        side = u32(block_index())
        matrix = u32(side // u32(2))
        if uniform(is_due(word(is_ready), word(n_updates), u32(group_of(matrix)))) > u32(0):
            n, start, products, roots = u32(rows_of(matrix)), u32(left_of(matrix)), left_products, left_roots
            if side % u32(2) == u32(1):
                n, start, products, roots = u32(columns_of(matrix)), u32(right_of(matrix)), right_products, right_roots
            scratch = wide_address(root_scratch, u32(scratch_of(side)))
            root(shared_base(), n, address(products, start), address(roots, start), scratch)

    pointers = ("is_ready", "n_updates", "left_products", "right_products", "left_roots", "right_roots",
                "root_scratch")  # fmt: skip
    return KernelBody("shampoo_roots", body, tuple((name, "u64") for name in pointers))
