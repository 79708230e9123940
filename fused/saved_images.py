"""Images: activations and gradients of 64 samples in global memory, byte for byte as wgmma reads them in shared memory.

An image is a swizzled tile of 64 rows, a warpgroup's samples, whose columns stand in another order: that in which a
lane's registers of a packed fragment lie one behind the other (`ColumnOrder`). So a lane stores 16 bytes for each 32
columns, a warp whole 64-byte pieces of 8 rows, and the way to shared memory is a plain copy. dW = d^T h of two such
images has its rows and columns in that order too; whoever writes dW puts them back (`make_write_image_sums`).

The images of 64 samples stand behind one another, x, h_1 ..., d_1 ...: a *slot*.
"""

from __future__ import annotations

import functools

from ..specs import ModelSpec
from .fragments import Target
from .keepers import Keeper
from .mlp import WeightGradient
from .row_products import ColumnOrder
from .stage_io import SAVED
from .swizzled_tile import SwizzledTile
from .tiles import HALF
from .warpgroup_mlp import WARPGROUP_ROWS
from .wgmma import WARPGROUP

KNOWN_BY_SIGN = frozenset({"ReLU"})
"""Activations, never negative, whose derivative is 1 where the output is positive, else 0."""


def image(columns: int, offset: int = 0) -> SwizzledTile:
    """Of 64 samples; `offset` as in a slot."""
    return SwizzledTile("image", WARPGROUP_ROWS, columns, offset)


def slot_images(spec: ModelSpec, n_layers: int) -> tuple[list[SwizzledTile], list[SwizzledTile], int]:
    """(images of the first layers' inputs, of the gradients of their outputs, bytes of a slot)."""
    shapes = spec.layer_shapes[:n_layers]
    widths = [fan_in for _, fan_in in shapes] + [fan_out for fan_out, _ in shapes]
    images, end = [], 0
    for width in widths:
        images.append(image(width, end))
        end = images[-1].end
    return images[:n_layers], images[n_layers:], end


def _lane_places(e, slot_address, tile: SwizzledTile):
    """place(first, step) -> (address, immediate) of a lane's run of columns in its row of the warp's upper 8."""
    lane = e.lane()
    row, t = e.add(e.shr(lane, 2), e.shl(e.mod(e.warp(), WARPGROUP), 4)), e.and_(lane, 3)
    known = {}

    def place(first: int, step: int):
        panel, column = divmod(first, tile.panel_columns)
        if (column, step) not in known:
            within = tile.within_panel(e, e.add(e.mul(row, tile.stride), e.mul(t, HALF * step)), column)
            known[column, step] = e.address(slot_address, within, 1)
        return known[column, step], tile.offset + panel * tile.panel_bytes

    return place


@functools.cache
def make_save_image(target: Target, tile: SwizzledTile, slot_bytes: int):
    """save(saved, slot, packed): this warp's 16 rows of a fragment, to its part of the image."""
    order = ColumnOrder(tile.columns)

    @target.intrinsic(["u64", "u32", ("u32", tile.columns // 4)], "void")
    def save_image(e, saved, slot, packed):
        place = _lane_places(e, e.address(saved, slot, slot_bytes), tile)
        for half in range(2):
            words = packed[half::2]  # register 4 n + 2 h + half
            for first, step in order.runs:
                count, start = step // 2, first // 8
                address, immediate = place(first, step)
                e.store_global(address, "u32", words[start : start + count], immediate + 8 * half * tile.stride)
        e.warp_barrier()  # else the assembler puts stores off, past products that need the registers

    return save_image


@functools.cache
def make_restore_image(target: Target, tile: SwizzledTile, slot_bytes: int):
    """restore(saved, slot) -> what this warp has saved."""
    order = ColumnOrder(tile.columns)

    @target.intrinsic(["u64", "u32"], ("u32", tile.columns // 4))
    def restore_image(e, saved, slot):
        place = _lane_places(e, e.address(saved, slot, slot_bytes), tile)
        packed = [None] * (tile.columns // 4)
        for half in range(2):
            for first, step in order.runs:
                count, start = step // 2, first // 8
                address, immediate = place(first, step)
                loaded = e.load_global(address, "u32", count, immediate + 8 * half * tile.stride, constant=False)
                packed[2 * start + half : 2 * (start + count) + half : 2] = loaded
        return packed

    return restore_image


def make_image_keeper(target: Target, tile: SwizzledTile, slot_bytes: int) -> Keeper:
    """In the image, from which it is read again on the way back."""
    save, restore = make_save_image(target, tile, slot_bytes), make_restore_image(target, tile, slot_bytes)

    def keep(base, io, slot, packed):
        save(io[SAVED], slot, packed)
        return packed

    def recall(base, io, slot, packed):
        return restore(io[SAVED], slot)

    return Keeper(target.device(keep), target.device(recall))


def make_sign_keeper(target: Target, tile: SwizzledTile, slot_bytes: int) -> Keeper:
    """In the image; what the way back needs of it, where it is positive, stays in a register for 16 packed ones."""
    save, (signs, ones) = make_save_image(target, tile, slot_bytes), make_signs(target, tile.columns // 4)

    def keep(base, io, slot, packed):
        save(io[SAVED], slot, packed)
        return signs(packed)

    def recall(base, io, slot, kept):
        return ones(kept)

    return Keeper(target.device(keep), target.device(recall))


@functools.cache
def make_signs(target: Target, n_packed: int):
    """(signs, ones): signs(packed) -> a bit an element, whether it is more than 0, where none is less and none has a
    sign; ones(signs) -> packed, the smallest number above 0 where it is, else 0."""
    n_words = -(-n_packed // 16)

    @target.intrinsic([("u32", n_packed)], ("u32", n_words))
    def signs(e, packed):
        words = []
        for first in range(0, n_packed, 16):
            word = e.u32(0)
            for register in packed[first : first + 16]:
                carried = e.add(register, 0x7FFF7FFF)  # any number but 0 carries into the sign bit
                word = e.or_(e.and_(e.shr(word, 1), 0x7FFF7FFF), e.and_(carried, 0x80008000))
            word = e.shr(word, 16 - len(packed[first : first + 16]))
            words.append(e.settle(word))  # else each bit's register would be kept in place of the word
        return words

    @target.intrinsic([("u32", n_words)], ("u32", n_packed))
    def ones(e, words):
        return [e.and_(e.shr(words[i // 16], i % 16), 0x00010001) for i in range(n_packed)]

    return signs, ones


@functools.cache
def make_copy_image(target: Target, tile: SwizzledTile, source: SwizzledTile, slot_bytes: int, n_threads: int):
    """copy(base, saved, slot): an image to a tile of the same shape by all threads of a block, asynchronously."""
    n_chunks = tile.n_bytes // 16

    @target.intrinsic(["u32", "u64", "u32"], "void")
    def copy_image(e, base, saved, slot):
        thread = e.thread()
        place, address = e.add(base, e.shl(thread, 4)), e.address(e.address(saved, slot, slot_bytes), thread, 16)
        for first in range(0, n_chunks, n_threads):
            chunk = e.address(address, first, 16, source.offset)
            if first + n_threads <= n_chunks:
                e.copy_async(place, chunk, tile.offset + 16 * first, constant=False)
            else:
                with e.when(e.less(e.add(thread, first), n_chunks)):
                    e.copy_async(place, chunk, tile.offset + 16 * first, constant=False)

    return copy_image


@functools.cache
def make_write_image_sums(target: Target, layer: WeightGradient):
    """write(accumulators, partial_sums, row_bytes, row, accumulate, bad, mark): dW of two images to a block's row.

    Arguments as of `make_write_partial_sums`. A warp has 16 rows of the images' order and all columns; the layer has
    128 rows, so they lie in whole groups of 32.
    """
    rows, columns = (layer.h, layer.d) if layer.transposed else (layer.d, layer.h)
    order, fan_in = ColumnOrder(columns.columns), layer.h.columns
    if rows.columns != 16 * layer.warp_rows:
        raise ValueError(f"{layer} does not give each warp 16 rows")

    @target.intrinsic([("f32", layer.n_accumulators), "u64", "u32", "u32", "u32", "u64", "u32"], "void")
    def write_image_sums(e, accumulators, partial_sums, row_bytes, row, accumulate, bad, mark):
        adds, finite = e.equal(accumulate, 1), e.is_finite(accumulators[0])
        for value in accumulators[1:]:
            finite = e.both(finite, e.is_finite(value))
        with e.when(e.equal(e.select(finite, e.u32(1), e.u32(0)), 0)):
            e.maximum_global(bad, mark)
        line, lane, warp = e.address_by(partial_sums, row, row_bytes), e.lane(), e.warp()
        g, t = e.shr(lane, 2), e.and_(lane, 3)
        # place 16 w + 8 half + g of the order: chunk 2 (w % 2) + half of its group of 32, pair g / 2, element g % 2
        own = e.add(e.shl(e.shr(warp, 1), 5), e.shl(e.and_(warp, 1), 2))
        own = e.add(own, e.add(e.shl(e.shr(g, 1), 3), e.and_(g, 1)))

        def add_to(place, values, offset):
            old = e.load_global_where(adds, place, "f32", len(values), offset)
            e.store_global(place, "f32", [e.fadd(o, v) for o, v in zip(old, values, strict=True)], offset)

        for half in range(2):
            for first, step in order.runs:
                start = first // 8  # of halves of 16x16 blocks
                if step == 8:  # place 8 c + 2 t + e of a group of 32, c its half block: column 8 t + 2 c + e
                    left, apart = e.shl(t, 3), 2
                else:  # place 8 c + 2 t + e of a group of 16: chunk of 4 2 c + t / 2, pair t % 2
                    left, apart = e.add(e.shl(e.and_(t, 1), 3), e.shl(e.shr(t, 1), 1)), 4
                if layer.transposed:
                    index = e.add(e.mul(left, fan_in), own)
                else:
                    index = e.add(e.mul(own, fan_in), left)
                place = e.address(line, index, 4, 4 * layer.parameter_offset)
                pairs = [accumulators[4 * i + 2 * half :][:2] for i in range(start, start + step // 2)]
                if layer.transposed:
                    for i, pair in enumerate(pairs):
                        for element, value in enumerate(pair):
                            add_to(place, [value], 4 * ((first + apart * i + element) * fan_in + 2 * half))
                elif step == 8:
                    for i in range(0, 4, 2):
                        add_to(place, [*pairs[i], *pairs[i + 1]], 4 * (2 * half * fan_in + first + apart * i))
                else:
                    for i, pair in enumerate(pairs):
                        add_to(place, pair, 4 * (2 * half * fan_in + first + apart * i))

    return write_image_sums
