"""The kernels behind the gradient kernels: sum the blocks' partial dW, then update or hand out the gradients.

All are one body with another last act. A block of 256 threads takes either 32 network parameters, its 8 warps
summing a slice of the rows of partial sums each, or 1024 parameters of the encoding, 4 a thread (256, 1 a thread, where
a slice of a Composite ends in the middle of a vector), whose gradient it reads from the table gradient, in float32 or
in fixed point, and sets back to zero on the way, so that no kernel of its own has to. Block 0 also adds up the blocks'
losses.

Sums become gradients by two factors: `gradient_scale`, and `scales[1]` in device memory, which undoes the power of
two of given output gradients. Where the word `bad` equals `mark`, a gradient was not finite: the chain of optimizers
(`optimizer_chains.py`) is told so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from . import fixed_point as fixed_point_sums
from .fragments import Target, make_zeros
from .memory_access import make_is_below, make_load, make_load_word, make_store, make_to_tuple, make_user_access
from .mlp import make_block_sum
from .optimizer_state import VECTOR
from .stage_io import KernelBody
from .tiles import make_indices

THREADS = 256
WARPS = THREADS // 32
MIN_BLOCKS = 4
PARAMETERS_PER_NETWORK_BLOCK = 32
ROWS_AT_ONCE = 17
"""Partial sums that a thread has on their way at a time: with 8 warps, those of up to 136 blocks in one turn, one for
each multiprocessor of an H100 or H200."""
SHARED_BYTES = 4 * THREADS


def n_blocks(n_network_params: int, n_params: int, vector: int = VECTOR) -> int:
    """Blocks of an optimizer kernel."""
    network = -(-n_network_params // PARAMETERS_PER_NETWORK_BLOCK)
    return max(1, network + -(-(n_params - n_network_params) // (THREADS * vector)))


@functools.cache
def _make_sum_of_rows(target: Target):
    """sum(partial_sums, row_bytes, first_row, n_rows, index, inside) -> over rows first_row, + WARPS, ... of a turn."""

    @target.intrinsic(["u64", "u32", "u32", "u32", "u32", "u32"], "f32")
    def sum_of_rows(e, partial_sums, row_bytes, first_row, n_rows, index, inside):
        column, values = e.address(partial_sums, index, 4), []
        is_inside = e.less(0, inside)
        for i in range(ROWS_AT_ONCE):
            row = e.add(first_row, WARPS * i)
            active = e.both(is_inside, e.less(row, n_rows))
            values += e.load_global_where(active, e.address_by(column, row, row_bytes), "f32")
        while len(values) > 1:
            pairs = [e.fadd(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
            values = pairs + values[2 * len(pairs) :]
        return values[0]

    return sum_of_rows


@functools.cache
def _make_sum_of_warps(target: Target):
    """sum(base, value) -> the sum over the block's warps of each lane's value, in every thread."""

    @target.intrinsic(["u32", "f32"], "f32")
    def sum_of_warps(e, base, value):
        place = e.add(base, e.shl(e.lane(), 2))
        e.barrier()
        e.store_shared(e.add(place, e.shl(e.warp(), 7)), "f32", [value])
        e.barrier()
        total = e.f32(0.0)
        for warp in range(WARPS):
            total = e.fadd(total, e.load_shared(place, "f32", 1, 128 * warp)[0])
        return total

    return sum_of_warps


@functools.cache
def make_table_gradient_access(target: Target, count: int, *, fixed_point: bool):
    """(load, clear) of `count` parameters: load(table_gradient, index, active, units) -> float32, and
    clear(table_gradient, index, active). `units` are those of `fixed_point.py`; float32 sums have none, ()."""
    if fixed_point:
        return fixed_point_sums.make_load(target, count), fixed_point_sums.make_clear(target, count)
    load_float, store_float = make_load(target, "f32", count), make_store(target, "f32", count)

    def load(table_gradient, index, active, units):
        return load_float(table_gradient, index, active)

    zeros = make_zeros(target, count)

    def clear(table_gradient, index, active):
        store_float(table_gradient, index, zeros(), active)

    return target.device(load), target.device(clear)


# ------------------------------------------------------------------------------------------------ bodies


def make_gradient_body(
    target: Target,
    name: str,
    act: tuple[Callable, Callable, Callable],
    parameters: tuple,
    vector: int = VECTOR,
    act_on_biases: Callable | None = None,
    *,
    fixed_point: bool = False,
) -> KernelBody:
    """act: for network parameters act(index, end, g, active, extra) with one value, for the encoding's the same with
    `vector`, and finish(first, extra), called once. `end` is the number of parameters; the model's own buffers are
    padded to whole vectors. `parameters` are the fields of `extra`. `act_on_biases`: in place of the first for network
    parameters from `n_matrix` on, which are no matrices; None where there are none."""
    shared_base = target.dynamic_shared_base()
    indices = make_indices(target)
    thread_index, lane_index, warp_index, block_index = indices.thread, indices.lane, indices.warp, indices.block
    sum_of_rows, sum_of_warps = _make_sum_of_rows(target), _make_sum_of_warps(target)
    to_tuple, is_below = make_to_tuple(target), make_is_below(target)
    load_1, store_1 = make_load(target, "f32"), make_store(target, "f32")
    load_table_gradient, clear_table_gradient = make_table_gradient_access(target, vector, fixed_point=fixed_point)
    block_sum, u32, f32 = make_block_sum(target, THREADS), target.u32, target.f32
    rows_a_turn = WARPS * ROWS_AT_ONCE
    act_network, act_encoding, finish = act
    has_biases = act_on_biases is not None
    act_on_biases = act_on_biases or act_network

    def of_block(
        n_matrix, n_network, n_params, n_partials, partial_sums, row_bytes, table_gradient, losses, n_losses, loss,
        loss_scale, units, extra,
    ):  # fmt: skip
        base = shared_base()
        block = u32(block_index())
        network_blocks = u32(u32(n_network + u32(31)) // u32(32))
        if block < network_blocks:
            index = u32(u32(block * u32(32)) + lane_index())
            inside = is_below(index, n_network)
            total, row = f32(0), u32(0)
            while row < n_partials:
                first_row = u32(row + warp_index())
                total = total + sum_of_rows(partial_sums, row_bytes, first_row, n_partials, index, inside)
                row = u32(row + u32(rows_a_turn))
            g = to_tuple(sum_of_warps(base, total))
            inside = u32(inside * is_below(warp_index(), u32(1)))
            if has_biases:
                is_matrix = is_below(index, n_matrix)
                act_network(index, n_params, g, u32(inside * is_matrix), extra)
                act_on_biases(index, n_params, g, u32(inside * u32(u32(1) - is_matrix)), extra)
            else:
                act_network(index, n_params, g, inside, extra)
        else:
            first = u32(u32(u32(block - network_blocks) * u32(THREADS)) + thread_index())
            offset = u32(first * u32(vector))
            index = u32(n_network + offset)
            active = is_below(index, n_params)
            g = load_table_gradient(table_gradient, offset, active, units)
            act_encoding(index, n_params, g, active, extra)
            # last: a store that meets a load of the same line still on its way made the whole kernel three times slower
            clear_table_gradient(table_gradient, offset, active)
        if block == u32(0):
            total, row = f32(0), u32(0)
            while row < n_losses:
                index = u32(row + thread_index())
                total = total + load_1(losses, index, is_below(index, n_losses))[0]
                row = u32(row + u32(THREADS))
            total = block_sum(base, total)
            is_first = is_below(thread_index(), u32(1))
            store_1(loss, u32(0), to_tuple(total * loss_scale), is_first)
            finish(is_first, extra)

    of_block = target.device(of_block)
    if fixed_point:

        def body(
            n_matrix, n_network, n_params, n_partials, partial_sums, row_bytes, table_gradient, losses, n_losses, loss,
            loss_scale, fine_unit, coarse_unit, extra,
        ):  # fmt: skip
            of_block(
                n_matrix, n_network, n_params, n_partials, partial_sums, row_bytes, table_gradient, losses, n_losses,
                loss, loss_scale, (fine_unit, coarse_unit), extra,
            )  # fmt: skip

    else:

        def body(
            n_matrix, n_network, n_params, n_partials, partial_sums, row_bytes, table_gradient, losses, n_losses, loss,
            loss_scale, extra,
        ):  # fmt: skip
            of_block(
                n_matrix, n_network, n_params, n_partials, partial_sums, row_bytes, table_gradient, losses, n_losses,
                loss, loss_scale, (), extra,
            )  # fmt: skip

    own = (
        ("n_matrix", "u32"),
        ("n_network", "u32"),
        ("n_params", "u32"),
        ("n_partials", "u32"),
        ("partial_sums", "u64"),
        ("row_bytes", "u32"),
        ("table_gradient", "u64"),
        ("losses", "u64"),
        ("n_losses", "u32"),
        ("loss", "u64"),
        ("loss_scale", "f32"),
    )
    units = (("fine_unit", "f32"), ("coarse_unit", "f32")) if fixed_point else ()
    return KernelBody(name, body, (*own, *units), parameters)


def make_collect_kernel(target: Target, *, fixed_point: bool = False) -> KernelBody:
    """The gradient of all parameters as one float32 vector, plus what was there if asked.

    Fixed point can't hold what is not finite: where `bad` equals `mark`, all of the table's gradient becomes NaN.
    """
    u32, map_values = target.u32, target.map_fragment
    load_scale = make_load(target, "f32")

    def multiply_add(g, old, gradient_scale, given_scale):
        return g * gradient_scale * given_scale + old

    multiply_add = target.scalar(multiply_add)
    if fixed_point:
        word, np_f32 = make_load_word(target), np.float32

        def nan_if_equal(g, a, b):
            return np_f32(np.nan) if a == b else g

        nan_if_equal = target.scalar(nan_if_equal)

    def make_act(count):
        load, store = make_user_access(target, count)
        may_be_bad = fixed_point and count == VECTOR

        def act(index, end, g, active, extra):
            gradients, accumulate, gradient_scale, scales = extra[0], extra[1], extra[2], extra[3]
            if may_be_bad:
                g = map_values(nan_if_equal, g, word(extra[4]), extra[5])
            old = load(gradients, index, end, u32(active * accumulate))
            given_scale = load_scale(scales, u32(1), u32(1))[0]
            store(gradients, index, end, map_values(multiply_add, g, old, gradient_scale, given_scale), active)

        return target.device(act)

    def finish(is_first, extra):
        return

    parameters = (("gradients", "u64"), ("accumulate", "u32"), ("gradient_scale", "f32"), ("scales", "u64"))
    parameters += (("bad", "u64"), ("mark", "u32")) if fixed_point else ()
    acts = (make_act(1), make_act(VECTOR), target.device(finish))
    return make_gradient_body(target, "collect", acts, parameters, fixed_point=fixed_point)
