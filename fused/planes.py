"""Planes: how the kernels of a level-split plan hand features over.

The features of a grid's level, [batch, F] float16, are one *plane*; the planes of all levels lie one behind the other.
So a warp that works on one level, a sample a lane, reads and writes consecutive memory. The gradients of the features
come back in planes of the same layout.

To the network's kernel the planes are an encoding without arithmetic (`make_planes`): its inputs are the feature planes
(`x`, `x_stride` the bytes of a plane), its table gradient the gradient planes; it has no table.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from ..specs import GridSpec, ModelSpec
from .encoding_parts import BackwardPart, EncodingParts, ItemGroup, power_of_two_in
from .fragments import Target
from .sinks import ROW, X_STRIDE, X


@dataclass(frozen=True)
class PlanesSpec:
    """The encoding of a level-split plan's network: the planes of `n_levels` levels of `n_features` each."""

    n_levels: int
    n_features: int

    @property
    def n_input_dims(self) -> int:
        return self.n_output_dims

    @property
    def n_output_dims(self) -> int:
        return self.n_levels * self.n_features


def network_behind_planes(spec: ModelSpec) -> ModelSpec:
    """The model that a level-split plan's network kernel computes, for a model with a grid."""
    grid: GridSpec = spec.encoding
    planes = PlanesSpec(grid.n_levels, grid.n_features_per_level)
    return dataclasses.replace(spec, encoding=planes, n_input_dims=planes.n_input_dims)


def make_planes(target: Target, spec: PlanesSpec, memory, *, table_gradient: bool, input_gradient: bool):
    """The parts: an item is a chunk of up to 8 features, of one or several levels.

    `at` is a `RowMemory`'s, with the meanings above. Inputs are numbers that were computed, not the user's: there is
    no gradient of inputs.
    """
    if input_gradient:
        raise ValueError("planes have no input gradient; their gradient is the table gradient")
    chunk, u32 = power_of_two_in(spec.n_output_dims), target.u32
    read, write = make_read_planes(target, spec.n_features, chunk), _make_write(target, spec.n_features, chunk)
    put, get = memory.make_put(chunk), memory.make_get(chunk)

    def encode(item, at):
        put(at, u32(item * u32(chunk)), read(at[X], at[X_STRIDE], at[ROW], item))

    def backward(item, at, gradient, live, dx):
        write(gradient, at[X_STRIDE], at[ROW], item, get(at, u32(item * u32(chunk))), live)

    def make_features(n_values: int):
        raise NotImplementedError("planes are an encoding of their own, not part of a Sum or Product")

    count = spec.n_output_dims // chunk
    backward_part = BackwardPart((ItemGroup(0, count, target.device(backward), by_sample=True),), 0, 1)
    return EncodingParts(
        (ItemGroup(0, count, target.device(encode), by_sample=True),),
        (backward_part,) if table_gradient else (),
        chunk,
        make_features,
        padding_value=0.0,
    )


def place_in_plane(e, planes, plane_bytes, row, level, n_features: int):
    """Where the first feature of a sample stands."""
    return e.address(e.address_by(planes, level, plane_bytes), row, 2 * n_features)


@functools.cache
def make_read_planes(target: Target, n_features: int, chunk: int):
    """read(planes, plane_bytes, row, item) -> the features of chunk number `item`."""
    levels = chunk // n_features

    @target.intrinsic(["u64", "u32", "u32", "u32"], ("f32", chunk))
    def read(e, planes, plane_bytes, row, item):
        first, values = e.mul(item, levels), []
        for i in range(levels):
            values += _load(e, place_in_plane(e, planes, plane_bytes, row, e.add(first, i), n_features), n_features)
        return values

    return read


@functools.cache
def make_read_feature(target: Target, n_features: int):
    """read(planes, plane_bytes, row, level) -> the first of the level's features; `planes` may begin at another."""

    @target.intrinsic(["u64", "u32", "u32", "u32"], ("f32", 1))
    def read_feature(e, planes, plane_bytes, row, level):
        place = place_in_plane(e, planes, plane_bytes, row, level, n_features)
        return [e.half_to_float(e.load_global(place, "u16")[0])]

    return read_feature


@functools.cache
def make_write_plane(target: Target, n_features: int):
    """write(planes, plane_bytes, row, level, values): the inverse."""

    @target.intrinsic(["u64", "u32", "u32", "u32", ("f32", n_features)], "void")
    def write(e, planes, plane_bytes, row, level, values):
        _store(e, place_in_plane(e, planes, plane_bytes, row, level, n_features), values)

    return write


def _load(e, address, n_features: int):
    if n_features == 1:
        return [e.half_to_float(e.load_global(address, "u16", 1)[0])]
    return [value for word in e.load_global(address, "u32", n_features // 2) for value in e.unpack_half2(word)]


def _store(e, address, values):
    if len(values) == 1:
        e.store_global(address, "u16", [e.float_to_half(values[0])])
    else:
        e.store_global(address, "u32", [e.pack_half2(*values[i : i + 2]) for i in range(0, len(values), 2)])


def _make_write(target: Target, n_features: int, chunk: int):
    """write(planes, plane_bytes, row, item, values, live): where live."""
    levels = chunk // n_features

    @target.intrinsic(["u64", "u32", "u32", "u32", ("f32", chunk), "f32"], "void")
    def write(e, planes, plane_bytes, row, item, values, live):
        first = e.mul(item, levels)
        with e.when(e.less(0, e.float_to_bits(live))):
            for i in range(levels):
                place = place_in_plane(e, planes, plane_bytes, row, e.add(first, i), n_features)
                _store(e, place, values[n_features * i : n_features * (i + 1)])

    return write
