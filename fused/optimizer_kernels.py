"""The kernels behind the gradient kernels: sum the blocks' partial dW, then update parameters (Adam) or hand out gradients.

Both are one body with another last act. A block of 512 threads takes 32 network parameters, 16 slices of the rows of
partial sums each, or 512 parameters of the encoding, whose gradient it reads from the float32 table gradient and sets
back to zero on the way, so that no kernel of its own has to. Block 0 also adds up the blocks' losses. Sums become
gradients by two factors: `gradient_scale`, and `scales[1]` in device memory, which undoes the power of two of given
output gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..specs import AdamSpec
from .fragments import Target
from .kernels import KernelBody
from .mlp import make_block_sum
from .optimizers import make_adam
from .tiles import make_barriers, make_indices

THREADS = 512
PARAMETERS_PER_NETWORK_BLOCK = 32
SLICES = THREADS // PARAMETERS_PER_NETWORK_BLOCK


def n_blocks(n_network_params: int, n_params: int) -> int:
    """Blocks of an optimizer kernel."""
    network = -(-n_network_params // PARAMETERS_PER_NETWORK_BLOCK)
    return max(1, network + -(-(n_params - n_network_params) // THREADS))


@functools.cache
def _make_memory_access(target: Target):
    """(load_f32, load_u32, store_f32, store_u32, store_half, add_u32): element `index`, where `active` is not 0."""

    @target.intrinsic(["u64", "u32", "u32"], "f32")
    def load_f32(e, address, index, active):
        return e.bits_to_float(_load_where(e, address, index, active))

    @target.intrinsic(["u64", "u32", "u32"], "u32")
    def load_u32(e, address, index, active):
        return _load_where(e, address, index, active)

    @target.intrinsic(["u64", "u32", "f32", "u32"], "void")
    def store_f32(e, address, index, value, active):
        with e.when(e.less(0, active)):
            e.store_global(e.address(address, index, 4), "f32", [value])

    @target.intrinsic(["u64", "u32", "u32", "u32"], "void")
    def store_u32(e, address, index, value, active):
        with e.when(e.less(0, active)):
            e.store_global(e.address(address, index, 4), "u32", [value])

    @target.intrinsic(["u64", "u32", "f32", "u32"], "void")
    def store_half(e, address, index, value, active):
        with e.when(e.less(0, active)):
            e.store_global(e.address(address, index, 2), "u16", [e.float_to_half(value)])

    @target.intrinsic(["u64", "u32", "u32"], "void")
    def add_u32(e, address, value, active):
        with e.when(e.less(0, active)):
            e.add_global_u32(address, value)

    return load_f32, load_u32, store_f32, store_u32, store_half, add_u32


def _load_where(e, address, index, active):
    """An element, or 0: inactive threads read element 0, which is always there."""
    is_active = e.less(0, active)
    value = e.load_global(e.address(address, e.select(is_active, index, e.u32(0)), 4), "u32", constant=False)[0]
    return e.select(is_active, value, e.u32(0))


@functools.cache
def _make_sum_of_slices(target: Target):
    """sum(base, value) -> the sum over the 16 slices of each of the block's 32 parameters, in every thread."""

    @target.intrinsic(["u32", "f32"], "f32")
    def sum_of_slices(e, base, value):
        lane, warp = e.lane(), e.warp()
        e.barrier()
        e.store_shared(e.add(base, e.shl(e.add(e.shl(warp, 5), lane), 2)), "f32", [value])
        e.barrier()
        total = e.f32(0.0)
        for i in range(SLICES):
            total = e.fadd(total, e.load_shared(e.add(base, e.shl(lane, 2)), "f32", 1, 128 * i)[0])
        return total

    return sum_of_slices


def _make_body(target: Target, name: str, act: tuple[Callable, Callable, Callable], parameters: tuple) -> KernelBody:
    """act: two functions (index, g, active, extra) for what becomes of a network's or an encoding's parameter with
    unscaled gradient g, and finish(first, extra), called once. `parameters` are the fields of `extra`."""
    shared_base = target.dynamic_shared_base()
    thread_index, lane_index, warp_index, block_index, _, _ = make_indices(target)
    load_f32, _, store_f32, *_ = _make_memory_access(target)
    sum_of_slices, block_sum = _make_sum_of_slices(target), make_block_sum(target, THREADS)
    u32, f32, np_u32 = target.u32, target.f32, np.uint32
    act_network, act_encoding, finish = act

    def below(a, b):
        return np_u32(1) if a < b else np_u32(0)

    def first_below(a, b, c):
        return np_u32(1) if a < b and c == np_u32(0) else np_u32(0)

    below, first_below = target.scalar(below), target.scalar(first_below)

    @target.intrinsic(["u64", "u32", "u32"], "u64")
    def line_address(e, partial_sums, row, row_bytes):
        return e.address_by(partial_sums, row, row_bytes)

    def body(
        n_network, n_params, n_partials, partial_sums, row_bytes, table_gradient, losses, n_losses, loss, loss_scale, extra
    ):
        base = shared_base()
        block = u32(block_index())
        network_blocks = u32(u32(n_network + u32(31)) // u32(32))
        if block < network_blocks:
            lane, slice_index = lane_index(), warp_index()
            index = u32(u32(block * u32(32)) + lane)
            inside = below(index, n_network)
            total = f32(0)
            turns = u32(u32(n_partials + u32(15)) // u32(16))
            turn = u32(0)
            while turn < turns:
                row = u32(u32(turn * u32(16)) + slice_index)
                active = u32(below(row, n_partials) * inside)
                total = total + load_f32(line_address(partial_sums, u32(row * active), row_bytes), index, active)
                turn = u32(turn + u32(1))
            g = sum_of_slices(base, total)
            act_network(index, g, first_below(index, n_network, slice_index), extra)
        else:
            offset = u32(u32(u32(block - network_blocks) * u32(512)) + thread_index())
            index = u32(n_network + offset)
            active = below(index, n_params)
            g = load_f32(table_gradient, offset, active)
            store_f32(table_gradient, offset, f32(0), active)
            act_encoding(index, g, active, extra)
        if block == u32(0):
            total = f32(0)
            turns = u32(u32(n_losses + u32(511)) // u32(512))
            turn = u32(0)
            while turn < turns:
                row = u32(u32(turn * u32(512)) + thread_index())
                total = total + load_f32(losses, row, below(row, n_losses))
                turn = u32(turn + u32(1))
            total = block_sum(base, total)
            store_f32(loss, u32(0), total * loss_scale, below(thread_index(), u32(1)))
            finish(below(thread_index(), u32(1)), extra)

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
    """Adam on all parameters; writes the float32 master and its float16 copy. Skips the step where `bad` == `mark`."""
    load_f32, load_u32, store_f32, store_u32, store_half, add_u32 = _make_memory_access(target)
    u32, np_u32, np_f32 = target.u32, np.uint32, np.float32
    skip_zero = spec.skip_zero_grad_non_matrix_params

    def multiply(a, b):
        return a * b

    def differ(a, b):
        return np_u32(1) if a != b else np_u32(0)

    def same(a, b):
        return np_u32(1) if a == b else np_u32(0)

    def touched(g):
        return np_u32(1) if g != np_f32(0) else np_u32(0)

    multiply, differ, same, touched = (target.scalar(f) for f in (multiply, differ, same, touched))

    def make_act(is_matrix):
        update = make_adam(target, spec, is_matrix)
        skips = skip_zero and not is_matrix

        def act(index, g, active, extra):
            weights, half_weights, m, v, steps, learning_rate, step, gradient_scale, scales, bad, mark, skipped = extra
            active = u32(active * differ(load_u32(bad, u32(0), u32(1)), mark))
            if skips:
                active = u32(active * touched(g))
            w_old, m_old = load_f32(weights, index, active), load_f32(m, index, active)
            v_old, k_old = load_f32(v, index, active), load_u32(steps, index, active)
            g = multiply(multiply(g, gradient_scale), load_f32(scales, u32(1), u32(1)))
            w_new, m_new, v_new, k_new, changed = update(g, w_old, m_old, v_old, k_old, learning_rate, step)
            active = u32(active * changed)
            store_f32(weights, index, w_new, active)
            store_half(half_weights, index, w_new, active)
            store_f32(m, index, m_new, active)
            store_f32(v, index, v_new, active)
            store_u32(steps, index, k_new, active)

        return target.device(act)

    def finish(first, extra):
        weights, half_weights, m, v, steps, learning_rate, step, gradient_scale, scales, bad, mark, skipped = extra
        add_u32(skipped, u32(1), u32(first * same(load_u32(bad, u32(0), u32(1)), mark)))

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
    return _make_body(target, "adam", (make_act(True), make_act(False), target.device(finish)), parameters)


def make_collect_kernel(target: Target) -> KernelBody:
    """The gradient of all parameters as one float32 vector, plus what was there if asked."""
    load_f32, _, store_f32, *_ = _make_memory_access(target)
    u32 = target.u32

    def multiply_add(g, scale, given_scale, old):
        return g * scale * given_scale + old

    multiply_add = target.scalar(multiply_add)

    def act(index, g, active, extra):
        gradients, accumulate, gradient_scale, scales = extra
        old = load_f32(gradients, index, u32(active * accumulate))
        store_f32(gradients, index, multiply_add(g, gradient_scale, load_f32(scales, u32(1), u32(1)), old), active)

    def finish(first, extra):
        return

    act = target.device(act)
    parameters = (("gradients", "u64"), ("accumulate", "u32"), ("gradient_scale", "f32"), ("scales", "u64"))
    return _make_body(target, "collect", (act, act, target.device(finish)), parameters)


def make_largest_gradient_kernel(target: Target, dtype: str) -> KernelBody:
    """The bits of max |dL/dy| into `maximum`, which must hold 0 before: for float32 numbers of one sign, larger bits
    mean larger numbers."""
    size, kind = {"float32": (4, "f32"), "float16": (2, "u16")}[dtype]
    thread_index, _, _, block_index, _, n_blocks_of = make_indices(target)
    u32 = target.u32

    @target.intrinsic(["u64", "u32", "u32", "u32", "u32"], "u32")
    def magnitude_bits(e, y, y_stride, row, column, inside):
        value = e.load_global(e.address(e.address_by(y, row, y_stride), column, size), kind)[0]
        value = e.half_to_float(value) if kind == "u16" else value
        bits = e.and_(e.float_to_bits(value), 0x7FFFFFFF)
        return e.select(e.equal(inside, 1), bits, e.u32(0))

    @target.intrinsic(["u64", "u32"], "void")
    def raise_maximum(e, maximum, bits):
        e.maximum_global(maximum, bits)

    def larger(a, b):
        return max(a, b)

    def below(a, b):
        return np.uint32(1) if a < b else np.uint32(0)

    def smaller(a, b):
        return min(a, b)

    larger, below, smaller = target.scalar(larger), target.scalar(below), target.scalar(smaller)

    def body(y, y_stride, batch, n_columns, maximum):
        n_elements = u32(batch * n_columns)
        bits = u32(0)
        index = u32(u32(block_index() * u32(256)) + thread_index())
        step = u32(n_blocks_of() * u32(256))
        turns = u32(u32(n_elements + u32(step - u32(1))) // step)
        turn = u32(0)
        while turn < turns:
            inside = below(index, n_elements)
            clamped = smaller(index, u32(n_elements - u32(1)))
            row, column = u32(clamped // n_columns), u32(clamped % n_columns)
            bits = larger(bits, magnitude_bits(y, y_stride, row, column, inside))
            index = u32(index + step)
            turn = u32(turn + u32(1))
        raise_maximum(maximum, bits)

    parameters = (("y", "u64"), ("y_stride", "u32"), ("batch", "u32"), ("n_columns", "u32"), ("maximum", "u64"))
    return KernelBody("largest_gradient", body, parameters)


def make_write_scales_kernel(target: Target) -> KernelBody:
    """scales[0] = 2^k with 8 <= m 2^k < 16, scales[1] = 2^-k, for the float m whose bits `maximum` holds.

    k = 0 where m is 0 or not finite; limited so that both stay normal float32 numbers.
    """

    @target.intrinsic(["u64", "u64"], "void")
    def write(e, maximum, scales):
        bits = e.load_global(maximum, "u32", constant=False)[0]
        exponent = e.shr(bits, 23)
        usable = e.both(e.less(3, exponent), e.less(exponent, 255))
        # 2^k has the biased exponent 127 + 3 - (exponent - 127)
        up = e.select(usable, e.sub(257, exponent), e.u32(127))
        up = e.minimum(up, 253)
        with e.when(e.equal(e.thread(), 0)):
            e.store_global(scales, "u32", [e.shl(up, 23)])
            e.store_global(scales, "u32", [e.shl(e.sub(254, up), 23)], offset=4)

    def body(maximum, scales):
        write(maximum, scales)

    return KernelBody("write_scales", body, (("maximum", "u64"), ("scales", "u64")))
