"""Matrix products of a multi-layer perceptron on the tensor cores (mirror of reference/mlp.py).

For samples s (rows), W [fan_out, fan_in], activations h [s, fan_in] and gradients d [s, fan_out]:

    forward          z  = h W^T          h, z in registers, W in its shared tile
    backward         d' = d W            d, d' in registers, W in the same tile, read transposed
    weight gradient  dW = sum_s d^T h    d, h in shared tiles, dW in registers for as long as the kernel lives

Each is one intrinsic that writes a whole batch of mma.m16n8k16 with float16 operands and float32 accumulation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .fragments import FragmentShape, Target
from .tiles import Tile


@functools.cache
def make_forward_product(target: Target, weights: Tile, rows: int):
    """product(base, h) -> z [rows, fan_out] in accumulator form, from h [rows, fan_in] packed."""
    operand, result = FragmentShape(rows, weights.columns), FragmentShape(rows, weights.rows)
    return _make_product(target, weights, operand, result, transposed=False)


@functools.cache
def make_backward_product(target: Target, weights: Tile, rows: int):
    """product(base, d) -> d W [rows, fan_in] in accumulator form, from d [rows, fan_out] packed."""
    operand, result = FragmentShape(rows, weights.rows), FragmentShape(rows, weights.columns)
    return _make_product(target, weights, operand, result, transposed=True)


def _make_product(target: Target, weights: Tile, operand: FragmentShape, result: FragmentShape, *, transposed: bool):
    n_row_blocks, n_k, n_columns = operand.rows // 16, operand.columns // 16, result.columns // 16

    @target.intrinsic(["u32", ("u32", operand.n_packed)], ("f32", result.n_elements))
    def product(e, base, packed):
        address = weights.straight(e, base) if transposed else weights.crossed(e, base)
        blocks = [[None] * n_columns for _ in range(n_row_blocks)]
        for n in range(n_columns):
            sums = [[[e.f32(0.0)] * 4 for _ in range(2)] for _ in range(n_row_blocks)]
            for k in range(n_k):
                offset = weights.block(k, n) if transposed else weights.block(n, k)
                b = e.ldmatrix(address, offset, transposed=transposed)
                for m in range(n_row_blocks):
                    first = 4 * (m * n_k + k)
                    a = packed[first : first + 4]
                    for half in range(2):
                        sums[m][half] = e.mma(a, b[2 * half : 2 * half + 2], sums[m][half])
            for m in range(n_row_blocks):
                blocks[m][n] = [*sums[m][0], *sums[m][1]]
        return [value for row in blocks for block in row for value in block]

    return product


@dataclass(frozen=True)
class WeightGradient:
    """Who sums which part of one layer's dW: a grid of `warp_rows` x `warp_columns` x `sample_parts` warps.

    Each warp keeps `row_blocks` x `column_blocks` blocks of 16x16, over 1 / sample_parts of the tile's samples. Where
    the blocks don't divide evenly, the last warps' parts are moved back to fit and overlap the part before; a block is
    *owned*, and written out, by the warp whose unmoved part it lies in.
    """

    d: Tile  # [samples, fan_out]
    h: Tile  # [samples, fan_in]
    parameter_offset: int  # of this layer in the flat vector
    warp_rows: int
    warp_columns: int
    sample_parts: int

    def __post_init__(self):
        if self.warp_rows > self.n_row_blocks or self.warp_columns > self.n_column_blocks:
            raise ValueError(f"{self} has more warps than blocks")
        if self.d.rows // 16 % self.sample_parts:
            raise ValueError(f"the samples of {self} do not divide among the warps")

    @property
    def n_warps(self) -> int:
        return self.warp_rows * self.warp_columns * self.sample_parts

    @property
    def n_row_blocks(self) -> int:
        return self.d.columns // 16

    @property
    def n_column_blocks(self) -> int:
        return self.h.columns // 16

    @property
    def row_blocks(self) -> int:
        return -(-self.n_row_blocks // self.warp_rows)

    @property
    def column_blocks(self) -> int:
        return -(-self.n_column_blocks // self.warp_columns)

    @property
    def n_accumulators(self) -> int:
        return self.row_blocks * self.column_blocks * 8

    def place(self, e):
        """(first row block, first owned row block, first column block, first owned one, sample part) of this warp."""
        warp = e.warp()
        own_row = e.mul(e.mod(warp, self.warp_rows), self.row_blocks)
        own_column = e.mul(e.mod(e.div(warp, self.warp_rows), self.warp_columns), self.column_blocks)
        return (
            e.minimum(own_row, self.n_row_blocks - self.row_blocks),
            own_row,
            e.minimum(own_column, self.n_column_blocks - self.column_blocks),
            own_column,
            e.div(warp, self.warp_rows * self.warp_columns),
        )


def n_accumulators(layers: tuple[WeightGradient, ...]) -> int:
    return sum(layer.n_accumulators for layer in layers)


@functools.cache
def make_weight_gradients(target: Target, layers: tuple[WeightGradient, ...]):
    """add(base, accumulators) -> accumulators + d^T h of every layer, over the samples now in the tiles."""
    count = n_accumulators(layers)

    @target.intrinsic(["u32", ("f32", count)], ("f32", count))
    def add_weight_gradients(e, base, accumulators):
        results, first = list(accumulators), 0
        for layer in layers:
            first_row, _, first_column, _, part = layer.place(e)
            samples = layer.d.rows // layer.sample_parts
            d_address = e.add(layer.d.crossed(e, base), e.shl(first_row, 5))  # a block is 32 bytes wide
            h_address = e.add(layer.h.straight(e, base), e.shl(first_column, 5))
            d_address = e.add(d_address, e.mul(part, samples * layer.d.stride))
            h_address = e.add(h_address, e.mul(part, samples * layer.h.stride))
            for s in range(samples // 16):
                a = [e.ldmatrix(d_address, layer.d.block(s, m), transposed=True) for m in range(layer.row_blocks)]
                for n in range(layer.column_blocks):
                    b = e.ldmatrix(h_address, layer.h.block(s, n), transposed=True)
                    for m in range(layer.row_blocks):
                        for half in range(2):
                            i = first + ((m * layer.column_blocks + n) * 2 + half) * 4
                            results[i : i + 4] = e.mma(a[m], b[2 * half : 2 * half + 2], results[i : i + 4])
            first += layer.n_accumulators
        return results

    return add_weight_gradients


@functools.cache
def make_write_partial_sums(target: Target, layers: tuple[WeightGradient, ...]):
    """write(base, accumulators, partial_sums, row_bytes, row, accumulate, bad, mark): this block's dW to its row.

    partial_sums  [n_rows, row_bytes / 4] float32, columns as in the flat parameter vector
    accumulate    0 to overwrite the row, 1 to add to it
    bad, mark     a word in global memory that becomes at least `mark` if any sum is not finite
    Where samples were divided among warps, the warps add up in shared memory, one after the other in a fixed order,
    from byte 0 on: the tiles are lost.
    """
    count = n_accumulators(layers)

    @target.intrinsic(["u32", ("f32", count), "u64", "u32", "u32", "u32", "u64", "u32"], "void")
    def write_partial_sums(e, base, accumulators, partial_sums, row_bytes, row, accumulate, bad, mark):
        adds = e.equal(accumulate, 1)
        finite = e.is_finite(accumulators[0])
        for value in accumulators[1:]:
            finite = e.both(finite, e.is_finite(value))
        with e.when(e.equal(e.select(finite, e.u32(1), e.u32(0)), 0)):
            e.maximum_global(bad, mark)
        line = e.address_by(partial_sums, row, row_bytes)
        lane = e.lane()
        g, t2 = e.shr(lane, 2), e.shl(e.and_(lane, 3), 1)
        first = 0
        for layer in layers:
            values = accumulators[first : first + layer.n_accumulators]
            first += layer.n_accumulators
            first_row, own_row, first_column, own_column, part = layer.place(e)
            fan_in = layer.h.columns
            top, left = e.add(g, e.shl(first_row, 4)), e.add(t2, e.shl(first_column, 4))
            place = e.address(line, e.add(e.mul(top, fan_in), left), 4, 4 * layer.parameter_offset)

            def write_block(m, n, values, place=place, fan_in=fan_in):
                for i in range(0, 8, 2):
                    half, r = i // 4, i % 4
                    offset = 4 * ((16 * m + 8 * (r // 2)) * fan_in + 16 * n + 8 * half)
                    old = e.load_global(place, "f32", 2, offset, constant=False)
                    pair = values[i : i + 2]
                    pair = [e.fadd(e.select(adds, o, e.f32(0.0)), v) for o, v in zip(old, pair, strict=True)]
                    e.store_global(place, "f32", pair, offset)

            def write(values, layer=layer, first_row=first_row, own_row=own_row, first_column=first_column,
                      own_column=own_column, write_block=write_block):  # fmt: skip
                uneven_rows = layer.n_row_blocks % layer.warp_rows
                uneven_columns = layer.n_column_blocks % layer.warp_columns
                for block in range(layer.row_blocks * layer.column_blocks):
                    m, n = divmod(block, layer.column_blocks)
                    numbers = values[8 * block : 8 * block + 8]
                    if not (uneven_rows or uneven_columns):
                        write_block(m, n, numbers)
                        continue
                    # block >= own, said without a comparison that could underflow
                    owns_row = e.less(own_row, e.add(first_row, m + 1))
                    owns_column = e.less(own_column, e.add(first_column, n + 1))
                    with e.when(e.both(owns_row, owns_column)):
                        write_block(m, n, numbers)

            if layer.sample_parts == 1:
                write(values)
                continue
            n_slots = layer.warp_rows * layer.warp_columns * 32
            slot = e.add(e.mul(e.mod(e.warp(), layer.warp_rows * layer.warp_columns), 32), lane)
            scratch = e.add(base, e.shl(slot, 2))
            for turn in range(layer.sample_parts):
                e.barrier()
                with e.when(e.equal(part, turn)):
                    sums = values
                    if turn:
                        loaded = [e.load_shared(scratch, "f32", 1, 4 * n_slots * i)[0] for i in range(len(values))]
                        sums = [e.fadd(a, b) for a, b in zip(loaded, values, strict=True)]
                    if turn == layer.sample_parts - 1:
                        write(sums)
                    else:
                        for i, value in enumerate(sums):
                            e.store_shared(scratch, "f32", [value], 4 * n_slots * i)

    return write_partial_sums


@functools.cache
def make_block_sum(target: Target, n_threads: int):
    """total(base, value) -> the sum of `value` over the block, in every thread; uses shared memory from byte 0 on."""
    n_warps = n_threads // 32

    @target.intrinsic(["u32", "f32"], "f32")
    def total(e, base, value):
        for distance in (16, 8, 4, 2, 1):
            value = e.fadd(value, e.shuffle_xor(value, distance))
        e.barrier()
        with e.when(e.equal(e.lane(), 0)):
            e.store_shared(e.add(base, e.shl(e.warp(), 2)), "f32", [value])
        e.barrier()
        result = e.f32(0.0)
        for warp in range(n_warps):
            result = e.fadd(result, e.load_shared(base, "f32", 1, 4 * warp)[0])
        return result

    return total
