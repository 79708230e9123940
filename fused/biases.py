"""Biases: z + b for a fragment of z, every row of which is the same packed row of b.

They are read from global memory at every use, through L1: a layer's are a hundred bytes that all blocks read, and to
hold them in registers or in shared memory would cost more than the load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..specs import ModelSpec
from .arithmetic import make_add
from .fragments import FragmentShape, Target, lane_row_and_column, make_unpack, packed_registers
from .plan import bias_offsets
from .stage_io import PARAMETERS


@functools.cache
def make_load_bias(target: Target, shape: FragmentShape, parameter_offset: int):
    """load(parameters) -> packed fragment, each row of it the biases from element `parameter_offset` on.

    A pair of parameters as kernels read them is a packed pair, in every format."""
    size, n_words = target.format.parameter_bytes, target.format.packed_words

    @target.intrinsic(["u64"], ("u32", packed_registers(target, shape)))
    def load_bias(e, parameters):
        _, t2 = lane_row_and_column(e)
        address, pairs = e.address(parameters, t2, size, size * parameter_offset), {}
        for column in range(0, shape.columns, 8):
            # not `constant`: such a load may move out of the loop over tiles, and keep registers there
            pairs[column] = e.load_global(address, "u32", n_words, size * column, constant=False)
        return [word for j in range(shape.n_packed) for word in pairs[shape.element(2 * j)[1]]]

    return load_bias


def make_add_bias(target: Target, spec: ModelSpec, layer: int, shape: FragmentShape) -> Callable:
    """add_bias(io, z) -> z + b of a layer, in accumulator form; z itself where there are no biases."""
    offsets = bias_offsets(spec)
    if offsets is None:

        def add_bias(io, z):
            return z

    else:
        load, unpack = make_load_bias(target, shape, offsets[layer]), make_unpack(target, shape)
        add, map_values = make_add(target), target.map_fragment

        def add_bias(io, z):
            return map_values(add, z, unpack(load(io[PARAMETERS])))

    return target.device(add_bias)
