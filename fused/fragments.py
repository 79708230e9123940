"""Fragments: matrices spread over the registers of a warp.

A warp holds `rows` samples (a multiple of 16) by `columns` features (a multiple of 16). With g = lane / 4 and
t = lane % 4, register i of the *accumulator* form (one float32 an element, `rows * columns / 32` registers a lane) is

    i = ((m * columns / 16 + n) * 2 + h) * 4 + r     holds row 16 m + g + 8 (r / 2), column 16 n + 8 h + 2 t + r % 2

which is the layout in which mma.m16n8k16 (and each warp's part of wgmma.m64nNk16) leaves its result. The *packed*
form rounds pairs of neighbours to float16 or bfloat16, two a register: element pairs (2 j, 2 j + 1) become register j.
That is exactly the layout of the A operand of the next product, so activations pass from layer to layer in registers.
float32 stays as it is, a pair in registers 2 j and 2 j + 1, and is taken apart where a product needs it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .formats import FORMATS, NumberFormat
from .target import CudaTarget, EmulatorTarget

Target = CudaTarget | EmulatorTarget


@dataclass(frozen=True)
class FragmentShape:
    """Rows and columns of a fragment, both multiples of 16."""

    rows: int
    columns: int

    def __post_init__(self):
        if self.rows % 16 or self.columns % 16 or self.rows <= 0 or self.columns <= 0:
            raise ValueError(f"a fragment is made of 16x16 blocks, not {self.rows}x{self.columns}")

    @property
    def n_elements(self) -> int:
        """Registers of the accumulator form."""
        return self.rows * self.columns // 32

    @property
    def n_packed(self) -> int:
        """Registers of the packed form where a register holds two values; see `packed_registers`."""
        return self.n_elements // 2

    def element(self, index: int) -> tuple[int, int]:
        """(row, column) of accumulator register `index` in lane 0; lane (g, t) adds (g, 2 t)."""
        block, h, r = index // 8, index // 4 % 2, index % 4
        m, n = divmod(block, self.columns // 16)
        return 16 * m + 8 * (r // 2), 16 * n + 8 * h + r % 2


def packed_registers(target: Target, shape: FragmentShape) -> int:
    """Registers of the packed form in the target's number format."""
    return target.format.packed_words * shape.n_packed


def packed_block(e, number_format: NumberFormat, packed, block: int) -> list[list]:
    """A 16x16 block of a packed fragment as an operand: four words a plane."""
    words = number_format.packed_words
    pairs = (packed[words * j : words * (j + 1)] for j in range(4 * block, 4 * block + 4))
    return [list(plane) for plane in zip(*(number_format.packed_to_planes(e, pair) for pair in pairs), strict=True)]


def lane_row_and_column(e):
    """(g, 2 t) of every lane."""
    lane = e.lane()
    return e.shr(lane, 2), e.shl(e.and_(lane, 3), 1)


@functools.cache
def make_pack(target: Target, shape: FragmentShape):
    """Accumulator form to packed form."""
    number_format = target.format

    @target.intrinsic([("f32", shape.n_elements)], ("u32", packed_registers(target, shape)))
    def pack(e, fragment):
        pairs = (number_format.pack_pair(e, *fragment[2 * j : 2 * j + 2]) for j in range(shape.n_packed))
        return [register for pair in pairs for register in pair]

    return pack


@functools.cache
def make_unpack(target: Target, shape: FragmentShape):
    """Packed form to accumulator form."""

    number_format = target.format

    @target.intrinsic([("u32", packed_registers(target, shape))], ("f32", shape.n_elements))
    def unpack(e, packed):
        words = number_format.packed_words
        pairs = (packed[words * j : words * (j + 1)] for j in range(shape.n_packed))
        return [value for pair in pairs for value in number_format.unpack_pair(e, pair)]

    return unpack


@functools.cache
def make_pick(target: Target, kind: str, count: int):
    """pick(values, i) -> values[i]. Where i is known to the compiler, nothing is left of it."""

    @target.intrinsic([(kind, count), "u32"], kind)
    def pick(e, values, i):
        picked = values[0]
        for number, value in enumerate(values[1:], 1):
            picked = e.select(e.equal(i, number), value, picked)
        return picked

    return pick


@functools.cache
def make_zeros(target: Target, n_registers: int):
    """A function that gives `n_registers` float32 zeros."""

    @target.intrinsic([], ("f32", n_registers))
    def zeros(e):
        return [e.f32(0.0)] * n_registers

    return zeros


@functools.cache
def make_sum(target: Target, n_registers: int):
    """Sum of all registers of this thread."""

    @target.intrinsic([("f32", n_registers)], "f32")
    def total(e, fragment):
        result = fragment[0]
        for value in fragment[1:]:
            result = e.fadd(result, value)
        return result

    return total


@functools.cache
def make_load_matrix(target: Target, shape: FragmentShape, dtype: str, *, clear: bool = True):
    """load(matrix, stride, first_row, n_rows, n_columns) -> accumulator form.

    A row-major float32, float16 or bfloat16 matrix in global memory, `stride` bytes a row, from `first_row` (this
    warp's) on. Elements beyond n_rows or n_columns are 0, or where they need not be `clear` others of the matrix; what
    lies beyond is never read.
    """
    kind, size = ("f32", 4) if dtype == "float32" else ("u16", 2)
    number_format = FORMATS[dtype]

    @target.intrinsic(["u64", "u32", "u32", "u32", "u32"], ("f32", shape.n_elements))
    def load_matrix(e, matrix, stride, first_row, n_rows, n_columns):
        g, t2 = lane_row_and_column(e)
        last_row, last_column = e.sub(n_rows, 1), e.sub(n_columns, 1)
        values = []
        for i in range(shape.n_elements):
            row, column = shape.element(i)
            row, column = e.add(first_row, e.add(g, row)), e.add(t2, column)
            line = e.address_by(matrix, e.minimum(row, last_row), stride)
            value = e.load_global(e.address(line, e.minimum(column, last_column), size), kind)[0]
            value = number_format.join(e, [value]) if kind == "u16" else value
            if clear:
                inside = e.both(e.less(row, n_rows), e.less(column, n_columns))
                value = e.select(inside, value, e.f32(0.0))
            values.append(value)
        return values

    return load_matrix


def make_load_columns(target: Target, shape: FragmentShape, dtype: str, *, clear: bool = True):
    """load(matrix, stride, first_row, n_rows, first_column, n_columns): `make_load_matrix` from `first_column` on."""
    load, shift, u32 = make_load_matrix(target, shape, dtype, clear=clear), make_shift(target, dtype), target.u32

    def load_columns(matrix, stride, first_row, n_rows, first_column, n_columns):
        n_left = u32(n_columns - first_column)
        return load(shift(matrix, first_column), stride, first_row, n_rows, n_left)

    return target.device(load_columns)


@functools.cache
def make_shift(target: Target, dtype: str):
    """shift(matrix, column): the address of a row-major matrix without its first columns."""
    size = 4 if dtype == "float32" else 2

    @target.intrinsic(["u64", "u32"], "u64")
    def shift(e, matrix, column):
        return e.address(matrix, column, size)

    return shift


def transpose_among_four(e, words: list) -> list:
    """From four words a lane, word t of each of its four neighbours, in their order, t being its own number of them."""
    lane = e.lane()
    odd, upper = e.equal(e.and_(lane, 1), 1), e.equal(e.and_(lane, 2), 2)

    def exchange(mask: int, mine_is_second, first, second) -> tuple:
        """(first of the lower lane's, of the upper one's), or where `mine_is_second` the second ones."""
        other = e.shuffle_xor(e.select(mine_is_second, first, second), mask)
        return e.select(mine_is_second, other, first), e.select(mine_is_second, second, other)

    first, second = exchange(1, odd, words[0], words[1]), exchange(1, odd, words[2], words[3])
    columns = [exchange(2, upper, *pair) for pair in zip(first, second, strict=True)]
    return [columns[0][0], columns[1][0], columns[0][1], columns[1][1]]


@functools.cache
def make_store_matrix(target: Target, shape: FragmentShape, dtype: str):
    """store(matrix, stride, first_row, n_rows, n_columns, fragment): the inverse; what lies beyond stays untouched.

    Sectors of 32 bytes are written whole where they can be: two float32 go in one store where all pairs are aligned, a
    row's eight float16 where all runs of eight are, from the four lanes that have them, or else two.
    """
    kind, size = {"float32": ("f32", 4), "float16": ("u16", 2)}[dtype]

    @target.intrinsic(["u64", "u32", "u32", "u32", "u32", ("f32", shape.n_elements)], "void")
    def store_matrix(e, matrix, stride, first_row, n_rows, n_columns, fragment):
        g, t2 = lane_row_and_column(e)
        places = e.or_(e.low_word(matrix), e.or_(stride, e.mul(n_columns, size)))
        beside = e.and_(places, 2 * size - 1)

        def store(index, values):
            row, column = shape.element(index)
            row, column = e.add(first_row, e.add(g, row)), e.add(t2, column)
            with e.when(e.both(e.less(row, n_rows), e.less(column, n_columns))):
                e.store_global(e.address(e.address_by(matrix, row, stride), column, size), *values)

        def store_run(index, words):
            """Of a 16x16 block's pairs, packed, those of a row and half that are this lane's number of its four."""
            t, (row, column) = e.and_(e.lane(), 3), shape.element(index)
            row = e.add(e.add(first_row, row), e.add(g, e.shl(e.shr(t, 1), 3)))
            column = e.add(e.shl(e.and_(t, 1), 3), column)
            values = transpose_among_four(e, [words[i] for i in (0, 2, 1, 3)])
            with e.when(e.both(e.less(row, n_rows), e.less(column, n_columns))):
                e.store_global(e.address(e.address_by(matrix, row, stride), column, size), "u32", values)

        if kind == "u16":
            words = [e.pack_half2(*fragment[i : i + 2]) for i in range(0, shape.n_elements, 2)]
            beside_run = e.and_(places, 8 * size - 1)
            with e.when(e.equal(beside_run, 0)):
                for i in range(0, len(words), 4):
                    store_run(2 * i, words[i : i + 4])
            with e.when(e.both(e.less(0, beside_run), e.equal(beside, 0))):
                for i, word in enumerate(words):
                    store(2 * i, ("u32", [word]))
        else:
            with e.when(e.equal(beside, 0)):
                for i in range(0, shape.n_elements, 2):
                    store(i, (kind, fragment[i : i + 2]))
        with e.when(e.less(0, beside)):
            for i, value in enumerate(fragment):
                store(i, (kind, [e.float_to_half(value) if kind == "u16" else value]))

    return store_matrix


@functools.cache
def make_mask(target: Target, shape: FragmentShape):
    """mask(fragment, first_row, n_rows, n_columns): 0 outside the matrix, whatever stood there (NaN too)."""

    @target.intrinsic([("f32", shape.n_elements), "u32", "u32", "u32"], ("f32", shape.n_elements))
    def mask(e, fragment, first_row, n_rows, n_columns):
        g, t2 = lane_row_and_column(e)
        zero, values = e.zero_at_run_time(), []
        for i, value in enumerate(fragment):
            row, column = shape.element(i)
            inside = e.less(e.add(first_row, e.add(g, row)), n_rows)
            inside = e.both(inside, e.less(e.add(t2, column), n_columns))
            values.append(e.select(inside, value, zero))
        return values

    return mask


@functools.cache
def make_note_not_finite(target: Target, shape: FragmentShape):
    """note(packed, bad, mark): raise the word `bad` to `mark` if any element of a packed fragment is not finite."""
    exponents = target.format.exponents
    lowest_bits = exponents & ~(exponents << 1)

    @target.intrinsic([("u32", packed_registers(target, shape)), "u64", "u32"], "void")
    def note_not_finite(e, packed, bad, mark):
        # an exponent of all ones, plus one, carries into the sign bit
        found = e.u32(0)
        for register in packed:
            found = e.or_(found, e.add(e.and_(register, exponents), lowest_bits))
        with e.when(e.less(0, e.and_(found, exponents + lowest_bits))):
            e.maximum_global(bad, mark)

    return note_not_finite


@functools.cache
def make_save(target: Target, n_packed: int):
    """save(buffer, slot, packed): a packed fragment to global memory in register order, 16 bytes a lane at a time.

    `slot` counts fragments of this warp's rows; a slot takes n_packed * 128 bytes. The inverse is `make_restore`.
    """

    @target.intrinsic(["u64", "u32", ("u32", n_packed)], "void")
    def save(e, buffer, slot, packed):
        address = _slot_address(e, buffer, slot, n_packed)
        for j in range(0, n_packed, 4):
            e.store_global(address, "u32", packed[j : j + 4], offset=128 * j)

    return save


@functools.cache
def make_restore(target: Target, n_packed: int, *, constant: bool):
    """restore(buffer, slot) -> packed. `constant`: another kernel wrote the buffer."""

    @target.intrinsic(["u64", "u32"], ("u32", n_packed))
    def restore(e, buffer, slot):
        address = _slot_address(e, buffer, slot, n_packed)
        registers = []
        for j in range(0, n_packed, 4):
            registers += e.load_global(address, "u32", 4, offset=128 * j, constant=constant)
        return registers

    return restore


def _slot_address(e, buffer, slot, n_packed):
    return e.address(e.address(buffer, slot, 128 * n_packed), e.lane(), 16)
