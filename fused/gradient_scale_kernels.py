"""The power of two by which given output gradients are multiplied before they are rounded to float16.

scales[0] = 2^k with 8 <= max |dL/dy| 2^k < 16, scales[1] = 2^-k; k = 0 where all are 0 or one is not finite. A power of
two changes no digit, and the headroom of 2^12 above 16 is for the sums of the backward pass. (A fixed factor near
n_out * batch, fine for gradients of means, would overflow float16 for gradients of order 1.)
"""

from __future__ import annotations

from .arithmetic import make_index_arithmetic
from .fragments import Target
from .stage_io import KernelBody
from .tiles import make_indices

THREADS = 256
MAX_ELEMENTS = 1 << 31
"""Most elements of a launch: their numbers, and one step of the grid more, fit 32 bits."""


def make_largest_gradient_kernel(target: Target, dtype: str) -> KernelBody:
    """The bits of max |dL/dy| of up to `MAX_ELEMENTS` into `maximum`, which must hold 0 or those of others before: for
    float32 numbers of one sign, larger bits mean larger numbers."""
    size, kind = {"float32": (4, "f32"), "float16": (2, "u16")}[dtype]
    indices = make_indices(target)
    thread_index, block_index, n_blocks_of = indices.thread, indices.block, indices.n_blocks
    u32 = target.u32

    @target.intrinsic(["u64", "u32", "u32", "u32"], "u32")
    def magnitude_bits(e, y, y_stride, row, column):
        value = e.load_global(e.address(e.address_by(y, row, y_stride), column, size), kind)[0]
        value = e.half_to_float(value) if kind == "u16" else value
        return e.and_(e.float_to_bits(value), 0x7FFFFFFF)

    @target.intrinsic(["u64", "u32"], "void")
    def raise_maximum(e, maximum, bits):
        e.maximum_global(maximum, bits)

    def larger(a, b):
        return max(a, b)

    larger = target.scalar(larger)
    smaller, _, quotient, remainder = make_index_arithmetic(target)

    def body(y, y_stride, batch, n_columns, maximum):
        n_elements = u32(batch * n_columns)
        bits, start, step = u32(0), u32(block_index() * u32(THREADS)), u32(n_blocks_of() * u32(THREADS))
        while start < n_elements:
            index = smaller(u32(start + thread_index()), u32(n_elements - u32(1)))  # repeating one changes no maximum
            bits = larger(bits, magnitude_bits(y, y_stride, quotient(index, n_columns), remainder(index, n_columns)))
            start = u32(start + step)
        raise_maximum(maximum, bits)

    parameters = (("y", "u64"), ("y_stride", "u32"), ("batch", "u32"), ("n_columns", "u32"), ("maximum", "u64"))
    return KernelBody("largest_gradient", body, parameters)


def make_write_scales_kernel(target: Target) -> KernelBody:
    """`scales` from the bits in `maximum`; both factors stay normal float32 numbers."""

    @target.intrinsic(["u64", "u64"], "void")
    def write(e, maximum, scales):
        exponent = e.shr(e.load_global(maximum, "u32", constant=False)[0], 23)
        usable = e.both(e.less(0, exponent), e.less(exponent, 255))
        # 2^k has the biased exponent 127 + 3 - (exponent - 127)
        up = e.minimum(e.select(usable, e.sub(257, exponent), e.u32(127)), 253)
        with e.when(e.equal(e.thread(), 0)):
            e.store_global(scales, "u32", [e.shl(up, 23)])
            e.store_global(scales, "u32", [e.shl(e.sub(254, up), 23)], offset=4)

    def body(maximum, scales):
        write(maximum, scales)

    return KernelBody("write_scales", body, (("maximum", "u64"), ("scales", "u64")))
