"""Identity encoding, per sample and chunk of dims (mirror of reference/identity.py): y_j = scale x_j + offset.

An item is a chunk of up to 8 consecutive dims, so that a bare network's inputs arrive by 16-byte loads that coalesce.
"""

from __future__ import annotations

import numpy as np

from ..specs import IdentitySpec
from .encoding_parts import EncodingParts, ItemGroup


def chunk_size(n_dims: int) -> int:
    """Dims an item: the largest of 8, 4, 2, 1 that divides n_dims."""
    return next(size for size in (8, 4, 2, 1) if n_dims % size == 0)


def make_identity(target, spec: IdentitySpec, memory, *, first_column: int, table_gradient: bool, input_gradient: bool):
    """The parts of an identity encoding; it has no table."""
    u32, map_values, unroll = target.u32, target.map_fragment, target.unroll_full
    size = chunk_size(spec.n_input_dims)
    chunk = size if first_column % size == 0 else 1
    read_inputs, put, get = memory.make_read_inputs(chunk), memory.make_put(chunk), memory.make_get(chunk)
    scale, offset = np.float32(spec.scale), np.float32(spec.offset)

    def transform(x):
        return x * scale + offset

    def transform_back(g, live):
        return g * scale * live

    transform, transform_back = target.scalar(transform), target.scalar(transform_back)

    def encode(item, x, x_stride, row, table, place):
        dim = u32(item * chunk)
        put(place, u32(first_column + dim), map_values(transform, read_inputs(x, x_stride, row, dim)))

    def backward(item, x, x_stride, row, table, gradient, place, live, dx):
        if input_gradient:
            values = map_values(transform_back, get(place, u32(first_column + item * chunk)), live)
            for i in range(chunk):
                unroll()
                dx[i] = dx[i] + values[i]

    group = ItemGroup(0, spec.n_input_dims // chunk, target.device(encode), target.device(backward))
    return EncodingParts(spec.n_input_dims, by_sample=False, groups=(group,), input_dims_per_item=chunk)
