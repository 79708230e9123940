"""Number formats: how the values of matrices are stored in tiles, fragments, tables and the parameters kernels read.

    dtype      stored as                 multiplied as                          parameters read from
    float16    one float16               a b                                    their float16 copy
    bfloat16   one bfloat16              a b                                    their bfloat16 copy
    float32    three bfloat16 *planes*   the six largest products of planes     the float32 master itself

A float32 number has 24 significant bits, a bfloat16 number 8 and the same range. Cut off after 8 bits each time,
x = hi + mid + lo is exact: mid < 2^-7 |x|, lo < 2^-15 |x|, all of x's sign. In a product the terms mid lo, lo mid and
lo lo are left out, together less than 2^-21 of it. Every sum is a float32.

Two things a format decides beyond that. Tensor cores cut off what doesn't fit their sum instead of rounding it, so a
long sum drifts towards 0 by half a unit in the last place an addition: float32 lets them add the six products of one
16-deep block, smallest first, and adds blocks itself, rounding to nearest. And given output gradients are brought into
the range of float16 by a power of two; the others have float32's range and need none.

Only the functions that make, take apart or multiply stored values ask a format for its instructions: they run over
planes. `e` is an emitter, for the machine or the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..engines import EngineUnavailable


@dataclass(frozen=True)
class NumberFormat:
    """What kernels know of a dtype.

    n_planes        stored 16-bit numbers a value
    products        pairs of planes (of a, of b) whose products make up that of two values, in the order they are added
    parameter_kind  element kind of the parameters that kernels read, and their numpy dtype's size, `parameter_bytes`
    packed_words    registers of a fragment's packed form that hold two values; in float32 the values themselves, as
                    planes would take three
    exponents       exponent bits in such a register, all ones in what is not finite
    min_cc          oldest compute capability whose tensor cores multiply it
    """

    dtype: str
    n_planes: int
    products: tuple[tuple[int, int], ...]
    parameter_kind: str
    parameter_bytes: int
    packed_words: int
    exponents: int
    min_cc: int
    in_words: str

    @property
    def is_half(self) -> bool:
        """Stored as float16; else as bfloat16."""
        return self.dtype == "float16"

    @property
    def reads_master(self) -> bool:
        """Whether kernels read the float32 master of the parameters; else a copy of it."""
        return self.parameter_kind == "f32"

    @property
    def scales_given_gradients(self) -> bool:
        """Whether given output gradients need a power of two before they are stored."""
        return self.is_half

    @property
    def has_exact_positions(self) -> bool:
        """Whether a grid's positions within a cell shall be as precise as the values."""
        return self.n_planes > 1

    @property
    def sums_blocks_apart(self) -> bool:
        """Whether 16-deep blocks of a product are added outside the tensor cores."""
        return self.n_planes > 1

    # ------------------------------------------------------------------------------ values and planes
    def split_pair(self, e, low, high) -> list:
        """Two float32 as a word of two stored numbers a plane."""
        if self.is_half:
            return [e.pack_half2(low, high)]
        if self.n_planes == 1:
            return [e.pack_bfloat2(low, high)]
        words = []
        for plane in range(self.n_planes):
            words.append(e.upper_halves(e.float_to_bits(low), e.float_to_bits(high)))
            if plane + 1 < self.n_planes:
                low, high = self._rest(e, low), self._rest(e, high)
        return words

    @staticmethod
    def _rest(e, value):
        """What is left of a float32 behind its first 8 significant bits; not finite where the value isn't."""
        return e.fsub(value, e.bits_to_float(e.and_(e.float_to_bits(value), 0xFFFF0000)))

    def join_pair(self, e, words) -> tuple:
        """The inverse of `split_pair`."""
        if self.is_half:
            return e.unpack_half2(words[0])
        pairs = [(e.bits_to_float(e.shl(w, 16)), e.bits_to_float(e.and_(w, 0xFFFF0000))) for w in words]
        low, high = pairs[-1]
        for next_low, next_high in reversed(pairs[:-1]):  # smallest first: both sums are exact
            low, high = e.fadd(next_low, low), e.fadd(next_high, high)
        return low, high

    def pack_pair(self, e, low, high) -> list:
        """Two float32 as `packed_words` registers."""
        return (
            [e.float_to_bits(low), e.float_to_bits(high)] if self.packed_words == 2 else self.split_pair(e, low, high)
        )

    def unpack_pair(self, e, packed) -> tuple:
        """The inverse of `pack_pair`."""
        return tuple(map(e.bits_to_float, packed)) if self.packed_words == 2 else self.join_pair(e, packed)

    def packed_to_planes(self, e, packed) -> list:
        """A packed pair as a word a plane."""
        return self.split_pair(e, *map(e.bits_to_float, packed)) if self.packed_words == 2 else packed

    def planes_to_packed(self, e, words) -> list:
        """The inverse."""
        return list(map(e.float_to_bits, self.join_pair(e, words))) if self.packed_words == 2 else list(words)

    def split(self, e, value) -> list:
        """A float32 as a stored number a plane, in the low half of a u32."""
        return [e.float_to_half(value)] if self.is_half else self.split_pair(e, value, e.f32(0.0))

    def join(self, e, halves):
        """The inverse of `split`."""
        return e.half_to_float(halves[0]) if self.is_half else self.join_pair(e, halves)[0]

    def multiply_add(self, e, a, b, c) -> list:
        """a b + c for a 16x16 block a (planes of 4 registers), a 16x8 block b (planes of 2) and float32 c (4)."""
        if not self.sums_blocks_apart:
            if e.cc < 80:  # 8 deep at a time
                return e.mma_k8(a[0][2:], b[0][1], e.mma_k8(a[0][:2], b[0][0], c))
            return e.mma(a[0], b[0], c, bfloat=not self.is_half)
        block = [e.f32(0.0)] * 4
        for i, j in self.products:
            block = e.mma(a[i], b[j], block, bfloat=True)
        return [e.fadd(old, new) for old, new in zip(c, block, strict=True)]

    # ------------------------------------------------------------------------------------- parameters
    def load_parameters(self, e, address, count: int, offset: int = 0, *, constant: bool = True) -> list:
        """`count` consecutive parameters from global memory as float32; an even count from a multiple of its size."""
        if self.parameter_kind == "f32":
            return e.load_global(address, "f32", count, offset, constant=constant)
        if count == 1:
            return [self.join(e, e.load_global(address, "u16", 1, offset, constant=constant))]
        words = e.load_global(address, "u32", count // 2, offset, constant=constant)
        return [value for word in words for value in self.join_pair(e, [word])]

    def store_parameters(self, e, address, values) -> None:
        """Consecutive parameters to global memory, rounded: 4, 2 or 1, to a multiple of their size."""
        if self.parameter_kind == "f32":
            e.store_global(address, "f32", values)
        elif len(values) == 1:
            e.store_global(address, "u16", self.split(e, values[0]))
        else:
            pairs = [self.split_pair(e, *values[i : i + 2]) for i in range(0, len(values), 2)]
            e.store_global(address, "u32", [word for (word,) in pairs])

    def parameters(self, values: np.ndarray) -> np.ndarray:
        """float32 parameters as kernels read them, rounded as `store_parameters` does; bfloat16 as its bits."""
        if self.parameter_kind == "f32":
            return values
        with np.errstate(over="ignore"):
            return values.astype(np.float16) if self.is_half else bfloat16_bits(values)


FORMATS = {
    "float16": NumberFormat(
        "float16", 1, ((0, 0),), "u16", 2, 1, 0x7C007C00, 75, "float16, float32 accumulation"
    ),
    "bfloat16": NumberFormat(
        "bfloat16", 1, ((0, 0),), "u16", 2, 1, 0x7F807F80, 80, "bfloat16, float32 accumulation"
    ),
    "float32": NumberFormat(
        "float32", 3, ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)), "f32", 4, 2, 0x7F800000, 80,
        "float32 as three bfloat16 parts, float32 accumulation",
    ),
}  # fmt: skip


def number_format(dtype: str) -> NumberFormat:
    """The format of a dtype. Raises EngineUnavailable where fused kernels have none."""
    found = FORMATS.get(dtype)
    if found is None:
        raise EngineUnavailable(f"fused kernels compute in {', '.join(FORMATS)}; {dtype} has none yet")
    return found


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 values rounded to bfloat16, ties to even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)
