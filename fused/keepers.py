"""Where a tile's activations and gradients wait until they are needed again: in shared tiles, or in global memory.

The plan chooses; the network's stages only call `keep` and `recall`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..specs import ModelSpec
from .fragments import FragmentShape, Target, make_restore, make_save
from .stage_io import N_SLOTS, SAVED
from .tiles import make_load_fragment, make_store_fragment


@dataclass(frozen=True)
class Keeper:
    """keep(base, io, slot, packed) -> what stays in registers, and recall(base, io, slot, that) -> packed, of one
    matrix of a tile's samples. What `recall` does not use, registers need not hold."""

    keep: Callable
    recall: Callable


def make_tile_keeper(target: Target, tile, shape: FragmentShape, *, in_registers: bool = False) -> Keeper:
    """In a shared tile, where the weight gradient will read it; on the way back it is read there too, or is still in
    registers."""
    store, load = make_store_fragment(target, tile, shape), make_load_fragment(target, tile, shape)

    def keep(base, io, slot, packed):
        store(base, packed)
        return packed

    if in_registers:

        def recall(base, io, slot, packed):
            return packed

    else:

        def recall(base, io, slot, packed):
            return load(base)

    return Keeper(target.device(keep), target.device(recall))


@functools.cache
def make_region(target: Target):
    """region(saved, n_slots, units): start of the fragments that come after `units` registers a lane of others."""

    @target.intrinsic(["u64", "u32", "u32"], "u64")
    def region(e, saved, n_slots, units):
        return e.address_by(saved, n_slots, e.mul(units, 128))

    return region


def make_saved_keeper(target: Target, units: int, n_packed: int) -> Keeper:
    """In global memory, in register order; `units` registers a lane of other fragments come before."""
    save, restore = make_save(target, n_packed), make_restore(target, n_packed, constant=False)
    region, u32 = make_region(target), target.u32

    def keep(base, io, slot, packed):
        save(region(io[SAVED], io[N_SLOTS], u32(units)), slot, packed)
        return packed

    def recall(base, io, slot, packed):
        return restore(region(io[SAVED], io[N_SLOTS], u32(units)), slot)

    return Keeper(target.device(keep), target.device(recall))


def saved_units(spec: ModelSpec, rows: int, packed_words: int = 1) -> tuple[list[int], list[int], int]:
    """Where staged plans save the inputs of each layer and the gradients of its outputs, and how much in all.

    In registers a lane before it: ([x, h_1 ...], [d_1 ... d_out], total).
    """
    widths = [fan_in for _, fan_in in spec.layer_shapes] + [fan_out for fan_out, _ in spec.layer_shapes]
    starts, total = [], 0
    for width in widths:
        starts.append(total)
        total += packed_words * FragmentShape(rows, width).n_packed
    n_layers = len(spec.layer_shapes)
    return starts[:n_layers], starts[n_layers:], total
