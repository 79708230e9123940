"""Products of a network whose weights stay in global memory: row-major matrices, read through L1 by wide loads.

In z = h W^T an element of a fragment stands for a column of h, and it does not matter for which, as long as h and W
agree: a sum over columns may be taken in any order. So the columns are divided such that what a lane of mma.m16n8k16
needs of a row of W is one run of it: 16 bytes for each 32 columns. A warp's load then reads whole 64-byte pieces of 8
rows, as from a copy in fragment order, but from the row-major vector that the optimizer writes. The result's columns
are rows of W; which of them a lane reads decides their order, so that the next layer finds its own (`ColumnOrder`).

The loads are volatile, and not of the read-only path: inside a loop of the caller's the compiler would otherwise keep
all weights in registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .fragments import FragmentShape, Target
from .tiles import HALF


@dataclass(frozen=True)
class ColumnOrder:
    """Which column the elements of a fragment stand for.

    Of 16x16 block b (columns), half h and lane (g, t), element e of a pair stands for column

        first + step * t + e,      (first, step) = place(b, h)

    `group` columns, 16 or 32, are divided among the four t in runs; what is left of 32 is a group of 16.
    """

    columns: int
    group: int = 32

    def __post_init__(self):
        if self.columns % 16 or self.group not in (16, 32):
            raise ValueError(f"{self} does not consist of groups of 16x16 blocks")

    @property
    def n_blocks(self) -> int:
        return self.columns // 16

    def _is_wide(self, block: int) -> bool:
        return self.group == 32 and 32 * (block // 2) + 32 <= self.columns

    def place(self, block: int, half: int) -> tuple[int, int]:
        if self._is_wide(block):
            return 32 * (block // 2) + 4 * (block % 2) + 2 * half, 8
        return 16 * block + 2 * half, 4

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(first, step) of the runs of `step` columns that a lane owns, in order: words (b, h) = (0, 0), (0, 1), ..."""
        firsts = [b for b in range(self.n_blocks) if not (self._is_wide(b) and b % 2)]
        return [self.place(b, 0) for b in firsts]

    @property
    def steps(self) -> set[int]:
        return {step for _, step in self.runs}

    def load_words(self, load, address_by_step: dict, offset: int = 0) -> list:
        """A lane's words of a float16 row, word 2 b + h for block b and half h.

        load              load(address, kind, count, offset) -> registers
        address_by_step   where the row starts for a lane: its address + 2 * step * t bytes
        """
        return [
            word
            for first, step in self.runs
            for word in load(address_by_step[step], "u32", step // 2, offset + HALF * first)
        ]


def _lane_g_and_t(e):
    lane = e.lane()
    return e.shr(lane, 2), e.and_(lane, 3)


@functools.cache
def make_load_rows(target: Target, order: ColumnOrder, rows: int, stride: int):
    """load(address) -> packed fragment [rows, columns] of a float16 matrix in shared memory, `stride` bytes a row."""

    @target.intrinsic(["u32"], ("u32", FragmentShape(rows, order.columns).n_packed))
    def load_rows(e, address):
        g, t = _lane_g_and_t(e)
        row = e.add(address, e.mul(g, stride))
        starts = {step: e.add(row, e.mul(t, HALF * step)) for step in order.steps}
        packed = []
        for m in range(rows // 16):
            upper = order.load_words(e.load_shared, starts, 16 * m * stride)
            lower = order.load_words(e.load_shared, starts, (16 * m + 8) * stride)
            for i in range(0, 2 * order.n_blocks, 2):
                packed += [upper[i], lower[i], upper[i + 1], lower[i + 1]]
        return packed

    return load_rows


@functools.cache
def make_row_product(
    target: Target,
    inputs: ColumnOrder,
    outputs: ColumnOrder,
    rows: int,
    parameter_offset: int,
    bias_offset: int | None = None,
):
    """product(parameters, h) -> z = h W^T (+ b) [rows, fan_out] in accumulator form.

    inputs, outputs    orders of the columns of h and z
    parameters         address of the float16 vector; W [fan_out, fan_in] stands from `parameter_offset` on
    bias_offset        where b [fan_out] starts; None: there is none
    """
    n_row_blocks, fan_in = rows // 16, inputs.columns
    operand, result = FragmentShape(rows, fan_in), FragmentShape(rows, outputs.columns)

    number_format = target.format

    @target.intrinsic(["u64", ("u32", operand.n_packed)], ("f32", result.n_elements))
    def row_product(e, parameters, packed):
        def load(address, kind, count, offset):
            return e.load_global(address, kind, count, offset, constant=False)

        g, t = _lane_g_and_t(e)
        starts = {}  # by the outputs' step: where a lane's row of W starts
        for row_step in outputs.steps:
            row = e.add(e.mul(e.shr(g, 1), row_step), e.and_(g, 1))
            line = e.address(parameters, row, HALF * fan_in, HALF * parameter_offset)
            starts[row_step] = {step: e.address(line, t, HALF * step) for step in inputs.steps}
        biases = None
        if bias_offset is not None:
            bias = {step: e.address(parameters, t, HALF * step, HALF * bias_offset) for step in outputs.steps}
            biases = outputs.load_words(load, bias)
        halves = {}
        for block in range(outputs.n_blocks):
            for half in range(2):
                first_row, row_step = outputs.place(block, half)
                b = inputs.load_words(load, starts[row_step], HALF * fan_in * first_row)
                first_sums = [e.f32(0.0)] * 4 if biases is None else [*e.unpack_half2(biases[2 * block + half])] * 2
                for m in range(n_row_blocks):
                    sums = first_sums
                    for k in range(inputs.n_blocks):
                        first = 4 * (m * inputs.n_blocks + k)
                        sums = number_format.multiply_add(e, [packed[first : first + 4]], [b[2 * k : 2 * k + 2]], sums)
                    halves[m, block, half] = sums
        return [value for key in sorted(halves) for value in halves[key]]

    return row_product


@functools.cache
def make_clear_columns(target: Target, order: ColumnOrder, rows: int, n_columns: int):
    """clear(fragment): 0 in the columns from `n_columns` on, whatever stood there."""
    shape = FragmentShape(rows, order.columns)

    @target.intrinsic([("f32", shape.n_elements)], ("f32", shape.n_elements))
    def clear_columns(e, fragment):
        _, t = _lane_g_and_t(e)
        zero, values = e.zero_at_run_time(), []
        for i, value in enumerate(fragment):
            first, step = order.place(i // 8 % order.n_blocks, i // 4 % 2)
            if first + 4 * step > n_columns:
                inside = e.less(e.add(e.mul(t, step), first + i % 2), n_columns)
                value = e.select(inside, value, zero)
            values.append(value)
        return values

    return clear_columns


@functools.cache
def make_rows_to_lanes(target: Target, order: ColumnOrder, stride: int, n_columns: int):
    """rows_to_lanes(address, y) -> the first `n_columns` of row i of a fragment of 32 rows, in lane i.

    They pass through 32 rows of shared memory, `stride` bytes each, as many blocks at a time as fit. It waits for the
    lanes before it writes, not behind its last reads.
    """
    shape = FragmentShape(32, order.columns)
    blocks_at_a_time = (stride - 16) // (4 * 16)

    @target.intrinsic(["u32", ("f32", shape.n_elements)], ("f32", n_columns))
    def rows_to_lanes(e, address, y):
        g, t = _lane_g_and_t(e)
        row, own_row, results = e.add(address, e.mul(g, stride)), e.add(address, e.mul(e.lane(), stride)), []
        for first_block in range(0, order.n_blocks, blocks_at_a_time):
            blocks = range(first_block, min(first_block + blocks_at_a_time, order.n_blocks))
            e.warp_barrier()
            for m in range(2):
                for block in blocks:
                    for i in range(0, 8, 2):
                        first, step = order.place(block, i // 4)
                        offset = (16 * m + 8 * (i // 2 % 2)) * stride + 4 * (first - 16 * first_block)
                        at = 8 * (m * order.n_blocks + block) + i
                        e.store_shared(e.add(row, e.mul(t, 4 * step)), "f32", y[at : at + 2], offset)
            e.warp_barrier()
            n_here = min(16 * len(blocks), n_columns - 16 * first_block)
            for column in range(0, n_here, 4):
                results += e.load_shared(own_row, "f32", 4, 4 * column)
        return results[:n_columns]

    return rows_to_lanes
