"""Matrix products of a multi-layer perceptron on the tensor cores (mirror of reference/mlp.py).

For samples s (rows), W [fan_out, fan_in], activations h [s, fan_in] and gradients d [s, fan_out]:

    forward          z  = h W^T          h, z in registers, W in its shared tile
    backward         d' = d W            d, d' in registers, W in the same tile, read transposed
    weight gradient  dW = sum_s d^T h    d, h in shared tiles, dW in registers for as long as the kernel lives
    bias gradient    db = sum_s d^T 1    beside dW, with a matrix of ones in place of h

Each is one intrinsic that writes a whole batch of mma.m16n8k16 with operands in the target's number format and float32
accumulation; or of wgmma where the weights' tile is swizzled (`warpgroup_mlp.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .fragments import FragmentShape, Target, packed_block, packed_registers
from .swizzled_tile import SwizzledTile
from .tiles import AnyTile
from .warpgroup_mlp import add_products, make_warpgroup_product
from .wgmma import WARPGROUP


@functools.cache
def make_forward_product(target: Target, weights: AnyTile, rows: int):
    """product(base, h) -> z [rows, fan_out] in accumulator form, from h [rows, fan_in] packed."""
    return _make_product(target, weights, rows, transposed=False)


@functools.cache
def make_backward_product(target: Target, weights: AnyTile, rows: int):
    """product(base, d) -> d W [rows, fan_in] in accumulator form, from d [rows, fan_out] packed."""
    return _make_product(target, weights, rows, transposed=True)


def _make_product(target: Target, weights: AnyTile, rows: int, *, transposed: bool):
    multiply, operand, result = _product_body(target, weights, rows, transposed=transposed)
    if isinstance(weights, SwizzledTile):
        return make_warpgroup_product(target, weights, operand, result, transposed=transposed)

    @target.intrinsic(["u32", ("u32", packed_registers(target, operand))], ("f32", result.n_elements))
    def product(e, base, packed):
        return multiply(e, base, packed, [e.f32(0.0)] * result.n_elements)

    return product


@functools.cache
def make_add_product(target: Target, weights: AnyTile, rows: int, *, transposed: bool):
    """add(base, operand, sums) -> sums + operand W^T, or + operand W where `transposed`: of matrices in pieces."""
    multiply, operand, result = _product_body(target, weights, rows, transposed=transposed)

    kinds = ["u32", ("u32", packed_registers(target, operand)), ("f32", result.n_elements)]

    @target.intrinsic(kinds, ("f32", result.n_elements))
    def add_product(e, base, packed, sums):
        return multiply(e, base, packed, sums)

    return add_product


def _product_body(target: Target, weights: AnyTile, rows: int, *, transposed: bool):
    """(multiply(e, base, packed, sums), shape of the operand, shape of the result)."""
    if transposed:
        operand, result = FragmentShape(rows, weights.rows), FragmentShape(rows, weights.columns)
    else:
        operand, result = FragmentShape(rows, weights.columns), FragmentShape(rows, weights.rows)
    n_row_blocks, n_k, n_columns = operand.rows // 16, operand.columns // 16, result.columns // 16
    number_format, planes = target.format, range(target.format.n_planes)
    order = [(n, k) for n in range(n_columns) for k in range(n_k)]
    if number_format.n_planes > 1:  # an operand is taken apart once, for all columns
        order.sort(key=lambda place: place[1])

    def multiply(e, base, packed, before):
        address = weights.straight(e, base) if transposed else weights.crossed(e, base)
        blocks = [[before[i : i + 4], before[i + 4 : i + 8]] for i in range(0, result.n_elements, 8)]
        sums = [blocks[m * n_columns : (m + 1) * n_columns] for m in range(n_row_blocks)]
        operands = {}
        for n, k in order:
            row, column = (k, n) if transposed else (n, k)
            b = [e.ldmatrix(*weights.place(e, address, row, column, p), transposed=transposed) for p in planes]
            for m in range(n_row_blocks):
                if (m, k) not in operands:
                    operands[m, k] = packed_block(e, number_format, packed, m * n_k + k)
                for half in range(2):
                    part = [registers[2 * half : 2 * half + 2] for registers in b]
                    sums[m][n][half] = number_format.multiply_add(e, operands[m, k], part, sums[m][n][half])
        return [value for row in sums for block in row for half in block for value in half]

    return multiply, operand, result


@dataclass(frozen=True)
class WeightGradient:
    """Who sums which part of one layer's dW: a grid of `warp_rows` x `warp_columns` x `sample_parts` warps.

    Each warp keeps `row_blocks` x `column_blocks` blocks of 16x16, over 1 / sample_parts of the tile's samples. Where
    the blocks don't divide evenly, the last warps' parts are moved back to fit and overlap the part before; a block is
    *owned*, and written out, by the warp whose unmoved part it lies in.

    Where the layer has biases, each warp also keeps the sums of d of its row blocks, in four registers a block: the
    product of d^T and ones, whose columns are all alike. Warps of the first column write them.

    With `transposed` False, the warps of a part are warpgroups and wgmma sums dW, 16 rows a warp and 64 a warpgroup;
    with True, dW^T, whose rows are the columns of W. Tiles are then swizzled. With None, it is mma.m16n8k16.
    """

    d: AnyTile  # [samples, fan_out]
    h: AnyTile  # [samples, fan_in]
    parameter_offset: int  # of this layer in the flat vector
    warp_rows: int
    warp_columns: int
    sample_parts: int
    bias_offset: int | None = None  # of this layer's biases; None: it has none
    transposed: bool | None = None

    def __post_init__(self):
        if self.warp_rows > self.n_row_blocks or self.warp_columns > self.n_column_blocks:
            raise ValueError(f"{self} has more warps than blocks")
        if self.d.rows // 16 % self.sample_parts:
            raise ValueError(f"the samples of {self} do not divide among the warps")
        if not (self.by_warpgroups or (self.d.divides(self.warp_rows) and self.h.divides(self.warp_columns))):
            raise ValueError(f"the columns of {self} do not divide so among the warps")

    @property
    def by_warpgroups(self) -> bool:
        return self.transposed is not None

    @property
    def n_warps(self) -> int:
        return self.warp_rows * self.warp_columns * self.sample_parts

    @property
    def n_row_blocks(self) -> int:
        return (self.h if self.transposed else self.d).columns // 16

    @property
    def n_column_blocks(self) -> int:
        return (self.d if self.transposed else self.h).columns // 16

    @property
    def row_blocks(self) -> int:
        return -(-self.n_row_blocks // self.warp_rows)

    @property
    def column_blocks(self) -> int:
        return -(-self.n_column_blocks // self.warp_columns)

    @property
    def n_weight_accumulators(self) -> int:
        return self.row_blocks * self.column_blocks * 8

    @property
    def n_accumulators(self) -> int:
        return self.n_weight_accumulators + (0 if self.bias_offset is None else self.row_blocks * 4)

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


def shares_within(layers: tuple[WeightGradient, ...]) -> str:
    """Who reads a warp's samples when dW is summed: the "block", its "warpgroup", or the "warp" alone."""
    sharing = max(layer.warp_rows * layer.warp_columns for layer in layers)
    return "warp" if sharing == 1 else "warpgroup" if sharing <= WARPGROUP else "block"


def n_accumulators(layers: tuple[WeightGradient, ...]) -> int:
    return sum(layer.n_accumulators for layer in layers)


@functools.cache
def make_weight_gradients(target: Target, layers: tuple[WeightGradient, ...]):
    """add(base, accumulators) -> accumulators + d^T h (and d^T 1) of every layer, over the samples now in the tiles."""
    add_from = make_weight_gradients_from(target, layers)

    def add_weight_gradients(base, accumulators):
        return add_from(base, base, accumulators)

    return target.device(add_weight_gradients)


@functools.cache
def make_weight_gradients_from(target: Target, layers: tuple[WeightGradient, ...]):
    """add(base, base_of_first, accumulators): the same, where the first layer's h counts from `base_of_first`."""
    count = n_accumulators(layers)
    number_format, planes = target.format, range(target.format.n_planes)

    @target.intrinsic(["u32", "u32", ("f32", count)], ("f32", count))
    def add_weight_gradients(e, base, base_of_first, accumulators):
        spans, first = [], 0
        for layer in layers:
            spans.append(slice(first, first + layer.n_accumulators))
            first += layer.n_accumulators
        results = list(accumulators)
        by_warpgroups = [(layer, span) for layer, span in zip(layers, spans, strict=True) if layer.by_warpgroups]
        if by_warpgroups:
            chains = [
                (layer, results[span], base_of_first if layer is layers[0] else base) for layer, span in by_warpgroups
            ]
            sums = add_products(e, base, chains)
            for (_, span), values in zip(by_warpgroups, sums, strict=True):
                results[span] = values
        for layer, span in zip(layers, spans, strict=True):
            if layer.by_warpgroups:
                continue
            first_row, _, first_column, _, sample_part = layer.place(e)
            samples = layer.d.rows // layer.sample_parts
            d_address = layer.d.crossed(e, base)
            h_address = layer.h.straight(e, base_of_first if layer is layers[0] else base)
            if layer.warp_rows > 1:
                d_address = layer.d.at_column_block(e, d_address, first_row)
            if layer.warp_columns > 1:
                h_address = layer.h.at_column_block(e, h_address, first_column)
            d_address = e.add(d_address, e.mul(sample_part, samples * layer.d.stride))
            h_address = e.add(h_address, e.mul(sample_part, samples * layer.h.stride))
            for s in range(samples // 16):
                a = [
                    [e.ldmatrix(*layer.d.place(e, d_address, s, m, p), transposed=True) for p in planes]
                    for m in range(layer.row_blocks)
                ]
                if layer.bias_offset is not None:
                    ones = [[word] * 2 for word in number_format.split_pair(e, e.f32(1.0), e.f32(1.0))]
                    for m in range(layer.row_blocks):
                        i = span.start + layer.n_weight_accumulators + 4 * m
                        results[i : i + 4] = number_format.multiply_add(e, a[m], ones, results[i : i + 4])
                for n in range(layer.column_blocks):
                    b = [e.ldmatrix(*layer.h.place(e, h_address, s, n, p), transposed=True) for p in planes]
                    for m in range(layer.row_blocks):
                        for half in range(2):
                            i = span.start + ((m * layer.column_blocks + n) * 2 + half) * 4
                            part = [registers[2 * half : 2 * half + 2] for registers in b]
                            results[i : i + 4] = number_format.multiply_add(e, a[m], part, results[i : i + 4])
        return results

    return add_weight_gradients


@dataclass(frozen=True)
class _Piece:
    """Up to 8 accumulators of a layer that are summed over warps and written together: a block of dW, or some of db."""

    layer: WeightGradient
    first: int  # of all layers' accumulators
    count: int
    row_block: int
    column_block: int | None  # None: of db


def _pieces(layers: tuple[WeightGradient, ...]) -> list[_Piece]:
    pieces, first = [], 0
    for layer in layers:
        for block in range(layer.row_blocks * layer.column_blocks):
            pieces.append(_Piece(layer, first + 8 * block, 8, *divmod(block, layer.column_blocks)))
        if layer.bias_offset is not None:
            start = first + layer.n_weight_accumulators
            pieces += [_Piece(layer, start + 4 * m, 4, m, None) for m in range(layer.row_blocks)]
        first += layer.n_accumulators
    return pieces


PIECE_BYTES = 4 * 8
"""Of a thread's largest piece, the least that sums over warps need of shared memory at a time."""


@functools.cache
def make_write_partial_sums(target: Target, layers: tuple[WeightGradient, ...], room: int):
    """write(base, accumulators, partial_sums, bias_sums, row_bytes, row, accumulate, bad, mark): this block's dW and db
    to its row.

    partial_sums  [n_rows, row_bytes / 4] float32, columns as in the flat parameter vector
    bias_sums     the same for biases: `bias_offset` counts from there
    accumulate    0 to overwrite the row, 1 to add to it
    bad, mark     a word in global memory that becomes at least `mark` if any sum is not finite
    Where samples were divided among warps, all put as much as the block's `room` bytes of shared memory hold there,
    from byte 0 on: the tiles are lost. Then each sums some pieces over the warps, in the order of the warps.
    """
    divided = [piece for piece in _pieces(layers) if piece.layer.sample_parts > 1]
    a_turn = max(1, room // (PIECE_BYTES * 32 * layers[0].n_warps))
    turns = [divided[i : i + a_turn] for i in range(0, len(divided), a_turn)]
    count = n_accumulators(layers)

    @target.intrinsic(["u32", ("f32", count), "u64", "u64", "u32", "u32", "u32", "u64", "u32"], "void")
    def write_partial_sums(e, base, accumulators, partial_sums, bias_sums, row_bytes, row, accumulate, bad, mark):
        adds = e.equal(accumulate, 1)
        finite = e.is_finite(accumulators[0])
        for value in accumulators[1:]:
            finite = e.both(finite, e.is_finite(value))
        with e.when(e.equal(e.select(finite, e.u32(1), e.u32(0)), 0)):
            e.maximum_global(bad, mark)
        lines = e.address_by(partial_sums, row, row_bytes), e.address_by(bias_sums, row, row_bytes)
        writers = {layer: _PieceWriter(e, layer, *lines, adds) for layer in layers}
        for piece in _pieces(layers):
            if piece.layer.sample_parts == 1:
                writers[piece.layer].write(piece, accumulators[piece.first : piece.first + piece.count])
        own = e.add(base, e.shl(e.thread(), 4))
        for turn in turns:
            e.barrier()
            for i, piece in enumerate(turn):
                for j in range(0, piece.count, 4):
                    values = accumulators[piece.first + j : piece.first + j + 4]
                    e.store_shared(own, "f32", values, (2 * i + j // 4) * 16 * 32 * piece.layer.n_warps)
            e.barrier()
            for i, piece in enumerate(turn):
                writers[piece.layer].sum_and_write(base, piece, i)

    return write_partial_sums


class _PieceWriter:
    """Writes one layer's pieces to this block's row of partial sums."""

    def __init__(self, e, layer: WeightGradient, line, bias_line, adds):
        self._e, self._layer, self._adds = e, layer, adds
        self._first_row, self._own_row, self._first_column, self._own_column, self._part = layer.place(e)
        lane = e.lane()
        g, self._t2 = e.shr(lane, 2), e.shl(e.and_(lane, 3), 1)
        top, left = e.add(g, e.shl(self._first_row, 4)), e.add(self._t2, e.shl(self._first_column, 4))
        if layer.bias_offset is not None:
            self._bias_place = e.address(bias_line, top, 4, 4 * layer.bias_offset)
        if layer.transposed:
            top, left = left, top
        self._place = e.address(line, e.add(e.mul(top, layer.h.columns), left), 4, 4 * layer.parameter_offset)

    def sum_and_write(self, base, piece: _Piece, number: int) -> None:
        """Piece `number` of those that lie in shared memory, by the warps of one part of the samples."""
        e, layer = self._e, self._layer
        n_sharing = layer.warp_rows * layer.warp_columns
        slot = e.add(e.mul(e.mod(e.warp(), n_sharing), 32), e.lane())
        place, n_threads = e.add(base, e.shl(slot, 4)), 32 * layer.n_warps
        with e.when(e.equal(self._part, number % layer.sample_parts)):
            sums = None
            for part in range(layer.sample_parts):
                values = []
                for j in range(piece.count // 4):
                    offset = 16 * ((2 * number + j) * n_threads + part * 32 * n_sharing)
                    values += e.load_shared(place, "f32", 4, offset)
                sums = [e.fadd(a, b) for a, b in zip(sums, values, strict=True)] if sums else values
            self.write(piece, sums)

    def write(self, piece: _Piece, values: list) -> None:
        """By the warp that owns it, where parts overlap."""
        e, layer, m, n = self._e, self._layer, piece.row_block, piece.column_block
        if n is None:
            writes = e.both(e.equal(self._own_column, 0), e.equal(self._t2, 0))
            with e.when(e.both(writes, self._owns_row(m))):
                self._add_to(self._bias_place, [values[0]], 4 * 16 * m)
                self._add_to(self._bias_place, [values[2]], 4 * (16 * m + 8))
        elif layer.n_row_blocks % layer.warp_rows or layer.n_column_blocks % layer.warp_columns:
            owns_column = e.less(self._own_column, e.add(self._first_column, n + 1))
            with e.when(e.both(self._owns_row(m), owns_column)):
                self._write_block(m, n, values)
        else:
            self._write_block(m, n, values)

    def _owns_row(self, row_block: int):
        """block >= own, said without a comparison that could underflow."""
        return self._e.less(self._own_row, self._e.add(self._first_row, row_block + 1))

    def _write_block(self, m: int, n: int, values: list) -> None:
        fan_in = self._layer.h.columns
        if self._layer.transposed:
            for i, value in enumerate(values):
                offset = 4 * ((16 * n + 8 * (i // 4) + i % 2) * fan_in + 16 * m + 8 * (i // 2 % 2))
                self._add_to(self._place, [value], offset)
            return
        for i in range(0, 8, 2):
            half, r = i // 4, i % 4
            offset = 4 * ((16 * m + 8 * (r // 2)) * fan_in + 16 * n + 8 * half)
            self._add_to(self._place, values[i : i + 2], offset)

    def _add_to(self, place, values: list, offset: int) -> None:
        e = self._e
        old = e.load_global(place, "f32", len(values), offset, constant=False)
        sums = [e.fadd(e.select(self._adds, o, e.f32(0.0)), v) for o, v in zip(old, values, strict=True)]
        e.store_global(place, "f32", sums, offset)


@functools.cache
def make_block_sum(target: Target, n_threads: int, kind: str = "f32"):
    """total(base, value) -> the sum of `value` over the block, in every thread; uses shared memory from byte 0 on."""
    n_warps, size_log2 = n_threads // 32, {"f32": 2, "f64": 3}[kind]

    @target.intrinsic(["u32", kind], kind)
    def total(e, base, value):
        for distance in (16, 8, 4, 2, 1):
            value = e.fadd(value, e.shuffle_xor(value, distance))
        e.barrier()
        with e.when(e.equal(e.lane(), 0)):
            e.store_shared(e.add(base, e.shl(e.warp(), size_log2)), kind, [value])
        e.barrier()
        result = e.f32(0.0) if kind == "f32" else e.f64(0.0)
        for warp in range(n_warps):
            result = e.fadd(result, e.load_shared(base, kind, 1, warp << size_log2)[0])
        return result

    return total
