"""The kernels behind the gradient kernels: sum the blocks' partial dW, then run Adam or hand out the gradients.

Both are one body with another last act. A block of 256 threads takes either 32 network parameters, its 8 warps
summing a slice of the rows of partial sums each, or 1024 parameters of the encoding, 4 a thread, whose gradient it
reads from the float32 table gradient and sets back to zero on the way, so that no kernel of its own has to. Block 0
also adds up the blocks' losses.

Sums become gradients by two factors: `gradient_scale`, and `scales[1]` in device memory, which undoes the power of
two of given output gradients. Where the word `bad` equals `mark`, a gradient was not finite and Adam leaves everything
as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..specs import AdamSpec
from .adam import make_adam
from .fragments import Target
from .mlp import make_block_sum
from .stage_io import KernelBody
from .tiles import make_indices

THREADS = 256
WARPS = THREADS // 32
MIN_BLOCKS = 4
PARAMETERS_PER_NETWORK_BLOCK = 32
VECTOR = 4  # encoding parameters a thread
ROWS_AT_ONCE = 16  # partial sums that a thread has on their way at a time
SHARED_BYTES = 4 * THREADS


def n_blocks(n_network_params: int, n_params: int) -> int:
    """Blocks of an optimizer kernel."""
    network = -(-n_network_params // PARAMETERS_PER_NETWORK_BLOCK)
    return max(1, network + -(-(n_params - n_network_params) // (THREADS * VECTOR)))


# ---------------------------------------------------------------------------------------- memory access


@functools.cache
def _make_load(target: Target, kind: str, count: int):
    """load(address, index, active) -> `count` values from element `index` on, a multiple of count; 0 where inactive."""

    @target.intrinsic(["u64", "u32", "u32"], (kind, count))
    def load(e, address, index, active):
        return e.load_global_where(e.less(0, active), e.address(address, index, 4), kind, count)

    return load


@functools.cache
def _make_store(target: Target, kind: str, count: int):
    """store(address, index, values, active): the inverse. Kind "half" rounds to float16."""
    size, element = (2, "u16") if kind == "half" else (4, kind)

    @target.intrinsic(["u64", "u32", ("f32" if kind == "half" else kind, count), "u32"], "void")
    def store(e, address, index, values, active):
        with e.when(e.less(0, active)):
            place = e.address(address, index, size)
            if kind != "half":
                e.store_global(place, element, values)
            elif count == 1:
                e.store_global(place, element, [e.float_to_half(values[0])])
            else:
                words = [e.pack_half2(values[i], values[i + 1]) for i in range(0, count, 2)]
                e.store_global(place, "u32", words)

    return store


@functools.cache
def _make_user_access(target: Target, count: int):
    """(load, store) like the above for a float32 vector that ends at `end` and need not be aligned or padded."""

    @target.intrinsic(["u64", "u32", "u32", "u32"], ("f32", count))
    def load(e, address, index, end, active):
        place = e.address(address, index, 4)
        values = []
        for i in range(count):
            inside = e.both(e.less(0, active), e.less(e.add(index, i), end))
            values += e.load_global_where(inside, place, "f32", offset=4 * i)
        return values

    @target.intrinsic(["u64", "u32", "u32", ("f32", count), "u32"], "void")
    def store(e, address, index, end, values, active):
        place = e.address(address, index, 4)
        for i, value in enumerate(values):
            with e.when(e.both(e.less(0, active), e.less(e.add(index, i), end))):
                e.store_global(place, "f32", [value], offset=4 * i)

    return load, store


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
            values = [e.fadd(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
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
def _make_to_tuple(target: Target):
    """(to_tuple, is_below): a float32 as a fragment of one register; 1 where a < b, else 0."""

    @target.intrinsic(["f32"], ("f32", 1))
    def to_tuple(e, value):
        return [value]

    @target.intrinsic(["u32", "u32"], "u32")
    def is_below(e, a, b):
        return e.select(e.less(a, b), e.u32(1), e.u32(0))

    return to_tuple, is_below


# ------------------------------------------------------------------------------------------------ bodies


def _make_body(target: Target, name: str, act: tuple[Callable, Callable, Callable], parameters: tuple) -> KernelBody:
    """act: for network parameters act(index, end, g, active, extra) with one value, for the encoding's the same with
    four, and finish(first, extra), called once. `end` is the number of parameters; the model's own buffers are padded
    to whole vectors. `parameters` are the fields of `extra`."""
    shared_base = target.dynamic_shared_base()
    thread_index, lane_index, warp_index, block_index, _, _ = make_indices(target)
    sum_of_rows, sum_of_warps = _make_sum_of_rows(target), _make_sum_of_warps(target)
    to_tuple, is_below = _make_to_tuple(target)
    load_1, load_4 = _make_load(target, "f32", 1), _make_load(target, "f32", VECTOR)
    store_1, store_4 = _make_store(target, "f32", 1), _make_store(target, "f32", VECTOR)
    block_sum, map_values = make_block_sum(target, THREADS), target.map_fragment
    u32, f32, np_f32 = target.u32, target.f32, np.float32
    rows_a_turn = WARPS * ROWS_AT_ONCE
    act_network, act_encoding, finish = act

    def zero(g):
        return np_f32(0)

    zero = target.scalar(zero)

    def body(
        n_network, n_params, n_partials, partial_sums, row_bytes, table_gradient, losses, n_losses, loss, loss_scale,
        extra,
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
            act_network(index, n_params, g, u32(inside * is_below(warp_index(), u32(1))), extra)
        else:
            first = u32(u32(u32(block - network_blocks) * u32(THREADS)) + thread_index())
            offset = u32(first * u32(VECTOR))
            index = u32(n_network + offset)
            active = is_below(index, n_params)
            g = load_4(table_gradient, offset, active)
            act_encoding(index, n_params, g, active, extra)
            # last: a store that meets a load of the same line still on its way made the whole kernel three times slower
            store_4(table_gradient, offset, map_values(zero, g), active)
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

    own = (
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
    return KernelBody(name, body, own, parameters)


def make_adam_kernel(target: Target, spec: AdamSpec) -> KernelBody:
    """Adam on all parameters; writes the float32 master and its float16 copy."""
    u32, np_u32, map_values = target.u32, np.uint32, target.map_fragment
    load_word = _make_load(target, "u32", 1)

    def scaled(g, gradient_scale, given_scale):
        return g * gradient_scale * given_scale

    def differ(a, b):
        return np_u32(1) if a != b else np_u32(0)

    scaled, differ = target.scalar(scaled), target.scalar(differ)

    def make_act(is_matrix, count):
        update = make_adam(target, spec, is_matrix)
        load, load_count = _make_load(target, "f32", count), _make_load(target, "u32", count)
        load_scale = _make_load(target, "f32", 1)
        store, store_count = _make_store(target, "f32", count), _make_store(target, "u32", count)
        store_half = _make_store(target, "half", count)
        skips_zero = spec.skip_zero_grad_non_matrix_params and not is_matrix

        @target.intrinsic([("f32", count)], "u32")
        def any_nonzero(e, g):
            found = e.u32(0)
            for value in g:
                found = e.or_(found, e.and_(e.float_to_bits(value), 0x7FFFFFFF))
            return e.select(e.equal(found, 0), e.u32(0), e.u32(1))

        def act(index, end, g, active, extra):
            weights, half_weights, m, v, steps, learning_rate, step, gradient_scale, scales, bad, mark, skipped = extra
            active = u32(active * differ(load_word(bad, u32(0), u32(1))[0], mark))
            if skips_zero:
                active = u32(active * any_nonzero(g))
            g = map_values(scaled, g, gradient_scale, load_scale(scales, u32(1), u32(1))[0])
            w_old, m_old = load(weights, index, active), load(m, index, active)
            v_old, k_old = load(v, index, active), load_count(steps, index, active)
            w_new, m_new, v_new, k_new = map_values(update, g, w_old, m_old, v_old, k_old, learning_rate, step)
            store(weights, index, w_new, active)
            store_half(half_weights, index, w_new, active)
            store(m, index, m_new, active)
            store(v, index, v_new, active)
            store_count(steps, index, k_new, active)

        return target.device(act)

    @target.intrinsic(["u64", "u32"], "void")
    def count_skipped(e, skipped, active):
        with e.when(e.less(0, active)):
            e.add_global_u32(skipped, 1)

    def same(a, b):
        return np_u32(1) if a == b else np_u32(0)

    same = target.scalar(same)

    def finish(is_first, extra):
        weights, half_weights, m, v, steps, learning_rate, step, gradient_scale, scales, bad, mark, skipped = extra
        count_skipped(skipped, u32(is_first * same(load_word(bad, u32(0), u32(1))[0], mark)))

    parameters = (
        ("weights", "u64"),
        ("half_weights", "u64"),
        ("first_moments", "u64"),
        ("second_moments", "u64"),
        ("param_steps", "u64"),
        ("learning_rate", "f32"),
        ("step", "u32"),
        ("gradient_scale", "f32"),
        ("scales", "u64"),
        ("bad", "u64"),
        ("mark", "u32"),
        ("skipped", "u64"),
    )
    acts = (make_act(True, 1), make_act(False, VECTOR), target.device(finish))
    return _make_body(target, "adam", acts, parameters)


def make_collect_kernel(target: Target) -> KernelBody:
    """The gradient of all parameters as one float32 vector, plus what was there if asked."""
    u32, map_values = target.u32, target.map_fragment
    load_scale = _make_load(target, "f32", 1)

    def multiply_add(g, old, gradient_scale, given_scale):
        return g * gradient_scale * given_scale + old

    multiply_add = target.scalar(multiply_add)

    def make_act(count):
        load, store = _make_user_access(target, count)

        def act(index, end, g, active, extra):
            gradients, accumulate, gradient_scale, scales = extra
            old = load(gradients, index, end, u32(active * accumulate))
            given_scale = load_scale(scales, u32(1), u32(1))[0]
            store(gradients, index, end, map_values(multiply_add, g, old, gradient_scale, given_scale), active)

        return target.device(act)

    def finish(is_first, extra):
        return

    parameters = (("gradients", "u64"), ("accumulate", "u32"), ("gradient_scale", "f32"), ("scales", "u64"))
    return _make_body(target, "collect", (make_act(1), make_act(VECTOR), target.device(finish)), parameters)
