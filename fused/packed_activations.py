"""Activations between two products: from accumulators to the packed operand of the next one, and on the way back.

Any activation is its scalar function on every register. ReLU in float16 is done on pairs: rounding to float16 clamps on
its way (cvt.rn.relu), and a gradient is multiplied by [h > 0] as a pair of float16, a third of the instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from .activations import make_activation, make_apply_derivative
from .fragments import FragmentShape, Target, make_pack, make_unpack


def _in_pairs(target: Target, name: str) -> bool:
    return name == "ReLU" and target.format.is_half and target.cc >= 80


def make_pack_output(target: Target, name: str, shape: FragmentShape, clear: Callable) -> Callable:
    """pack_output(z) -> phi(z), packed; `clear` makes padding 0."""
    if _in_pairs(target, name):
        pack_positive = make_pack_positive(target, shape)

        def pack_output(z):
            return pack_positive(clear(z))

        return target.device(pack_output)
    pack, activation, map_values = make_pack(target, shape), make_activation(target, name), target.map_fragment

    def pack_output(z):
        return pack(clear(map_values(activation, z)))

    return target.device(pack_output)


def make_pack_gradient(target: Target, name: str, shape: FragmentShape, clear: Callable) -> Callable:
    """pack_gradient(g, h) -> g phi'(h), packed, of a packed output h whose padding is 0."""
    if _in_pairs(target, name):
        return make_pack_where_positive(target, shape)
    pack, unpack, map_values = make_pack(target, shape), make_unpack(target, shape), target.map_fragment
    apply_derivative = make_apply_derivative(target, name)

    def pack_gradient(g, h):
        return pack(clear(map_values(apply_derivative, g, unpack(h))))

    return target.device(pack_gradient)


@functools.cache
def make_pack_positive(target: Target, shape: FragmentShape):
    """max(z, 0), packed as float16; NaN stays NaN."""

    @target.intrinsic([("f32", shape.n_elements)], ("u32", shape.n_packed))
    def pack_positive(e, fragment):
        return [e.pack_positive_half2(*fragment[2 * j : 2 * j + 2]) for j in range(shape.n_packed)]

    return pack_positive


@functools.cache
def make_pack_where_positive(target: Target, shape: FragmentShape):
    """(g, h) -> g [h > 0], packed as float16, for h packed as float16."""

    @target.intrinsic([("f32", shape.n_elements), ("u32", shape.n_packed)], ("u32", shape.n_packed))
    def pack_where_positive(e, g, h):
        pairs = (e.pack_half2(*g[2 * j : 2 * j + 2]) for j in range(shape.n_packed))
        return [e.where_positive_half2(pair, word) for pair, word in zip(pairs, h, strict=True)]

    return pack_where_positive
