"""Table gradients in fixed point: integer sums are associative, so blocks may add in any order and get the same bits.

Each parameter has two int64 sums side by side, `fine` and `coarse`; what is added goes to one of them by its size:

    |v| < 4            round(v 2^a) to fine, a = 60 - s - D
    4 <= |v| < 2^16    round(v 2^c) to coarse, c = min(22, 46 - s)
    larger, or NaN     nowhere; the word `bad` says that the gradient is not finite
    gradient           fine 2^-a + coarse 2^-c

for a batch of up to 2^s samples and grids of up to D dimensions.

Neither sum can overflow. A sample adds to an entry at most once a corner, 2^D times, so fine stays within
2^s 2^D 2^2 2^a = 2^62. What it adds to coarse are shares of one gradient u, of weights that are positive and sum up to
1, so at most |u| (1 + 2^-20) in all; u is a float16, |u| <= 65504, and coarse stays within 2^s 2^16 2^c <= 2^62. In a
Product u is multiplied by other children's features and has no bound, nor have second derivatives; then each of the 2^D
shares is below 2^16, and c = min(22, 46 - s - D).

Nothing is lost that float32 sums would keep. A float32 of 4 or more is a multiple of 2^-21: with c = 22 (up to 2^24
samples; of a Product, up to 2^(24 - D)) coarse is exact. Fine rounds to 2^-a, 2^-39 for 2^18 samples in 3 dimensions:
u itself was rounded to a multiple of 2^-24 at best, so weights would have to be below 2^-14 before 2^-39 shows. And a
float32 sum of magnitude S loses 2^-25 S with every addition, this one nothing.

It costs four times the memory of float32 (16 bytes a parameter), and a 64-bit reduction for each feature of each corner
where float32 has one of 16 bytes for up to four numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..specs import CompositeSpec, EncodingSpec, GridSpec
from .fragments import Target

BYTES = 16  # a parameter
LIMIT = 2.0**16
BITS_OF_FOUR, BITS_OF_LIMIT = 0x40800000, 0x47800000  # of float32 numbers
MAX_COARSE_EXPONENT = 22


@dataclass(frozen=True)
class FixedPoint:
    """The exponents a and c."""

    fine: int
    coarse: int

    @property
    def scales(self) -> dict[str, float]:
        """What gradient kernels are told."""
        return {"fine_scale": 2.0**self.fine, "coarse_scale": 2.0**self.coarse}

    @property
    def units(self) -> dict[str, float]:
        """What those kernels are told that read the sums."""
        return {"fine_unit": 2.0**-self.fine, "coarse_unit": 2.0**-self.coarse}


def fixed_point_of(encoding: EncodingSpec, batch: int, *, second_order: bool = False) -> FixedPoint:
    """The exponents for a batch; `second_order`: of second derivatives."""
    n_dims, is_multiplied = _grids(encoding)
    bits = max(batch - 1, 0).bit_length()
    has_no_bound = is_multiplied or second_order
    return FixedPoint(
        fine=60 - bits - n_dims, coarse=min(MAX_COARSE_EXPONENT, 46 - bits - (n_dims if has_no_bound else 0))
    )


def _grids(encoding: EncodingSpec) -> tuple[int, bool]:
    """(largest number of dimensions of a grid, whether one is inside of a Product)."""
    if isinstance(encoding, GridSpec):
        return encoding.n_input_dims, False
    if not isinstance(encoding, CompositeSpec):
        return 0, False
    children = [_grids(child.encoding) for child in encoding.nested]
    n_dims = max((n for n, _ in children), default=0)
    return n_dims, n_dims > 0 and (encoding.reduction == "Product" or any(inside for _, inside in children))


@functools.cache
def make_add_entry(target: Target, n_features: int, first: int):
    """add(table_gradient, index, values): an entry's features. `first`: parameters before the table.

    table_gradient   (address, 2^a, 2^c, address of `bad`, mark)
    """

    @target.intrinsic(["u64", "f32", "f32", "u64", "u32", "u32", ("f32", n_features)], "void")
    def add_fixed(e, table_gradient, fine_scale, coarse_scale, bad, mark, index, values):
        entry = e.address(table_gradient, index, BYTES * n_features, BYTES * first)
        too_large = e.u32(0)
        for i, value in enumerate(values):
            magnitude = e.and_(e.float_to_bits(value), 0x7FFFFFFF)  # of positive floats, larger bits mean larger ones
            is_fine, is_small = e.less(magnitude, BITS_OF_FOUR), e.less(magnitude, BITS_OF_LIMIT)
            number = e.round_to_int64(e.fmul(value, e.select(is_fine, fine_scale, coarse_scale)))
            place = e.address(entry, e.select(is_fine, e.u32(0), e.u32(1)), 8, BYTES * i)
            with e.when(e.both(e.less(0, magnitude), is_small)):
                e.add_global_u64(place, number)
            too_large = e.or_(too_large, e.select(is_small, e.u32(0), e.u32(1)))
        with e.when(e.less(0, too_large)):
            e.maximum_global(bad, mark)

    def add_entry(table_gradient, index, values):
        address, fine_scale, coarse_scale, bad, mark = table_gradient
        add_fixed(address, fine_scale, coarse_scale, bad, mark, index, values)

    return target.device(add_entry)


@functools.cache
def make_load(target: Target, count: int):
    """load(table_gradient, index, active, units) -> the gradients of `count` parameters from `index` on, as float32; 0
    where inactive. `units` are 2^-a and 2^-c."""

    @target.intrinsic(["u64", "u32", "u32", "f32", "f32"], ("f32", count))
    def load_fixed(e, table_gradient, index, active, fine_unit, coarse_unit):
        place, values = e.address(table_gradient, index, BYTES), []
        for i in range(count):
            fine, coarse = e.load_global_where(e.less(0, active), place, "u64", 2, BYTES * i)
            fine, coarse = e.fmul(e.int64_to_float(fine), fine_unit), e.fmul(e.int64_to_float(coarse), coarse_unit)
            values.append(e.fadd(fine, coarse))
        return values

    def load(table_gradient, index, active, units):
        return load_fixed(table_gradient, index, active, units[0], units[1])

    return target.device(load)


@functools.cache
def make_clear(target: Target, count: int):
    """clear(table_gradient, index, active): `count` parameters' gradients become 0."""

    @target.intrinsic(["u64", "u32", "u32"], "void")
    def clear_fixed(e, table_gradient, index, active):
        place = e.address(table_gradient, index, BYTES)
        with e.when(e.less(0, active)):
            for i in range(count):
                e.store_global(place, "u32", [e.u32(0)] * 4, BYTES * i)

    return clear_fixed
