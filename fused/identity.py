"""Identity encoding, per sample and chunk of dims (mirror of reference/identity.py): y_j = scale x_j + offset.

An item is a chunk of up to 8 consecutive dims, so that a bare network's inputs arrive by 16-byte loads that coalesce.
"""

from __future__ import annotations

import numpy as np

from ..specs import IdentitySpec
from .encoding_parts import BackwardPart, EncodingParts, ItemGroup, power_of_two_in


def make_identity(target, spec: IdentitySpec, memory, *, table_gradient: bool, input_gradient: bool) -> EncodingParts:
    """The parts of an identity encoding; it has no table."""
    u32, map_values, unroll, n_dims = target.u32, target.map_fragment, target.unroll_full, spec.n_input_dims
    chunk = power_of_two_in(n_dims)
    put, get = memory.make_put(chunk), memory.make_get(chunk)
    scale, offset = np.float32(spec.scale), np.float32(spec.offset)

    def transform(x):
        return x * scale + offset

    def transform_back(g, live):
        return g * scale * live

    transform, transform_back = target.scalar(transform), target.scalar(transform_back)

    def make_features(n_values: int):
        read_inputs = memory.make_read_inputs(n_values)

        def features(at, column):
            return map_values(transform, read_inputs(at, column))

        return target.device(features)

    chunk_features = make_features(chunk)

    def encode(item, at):
        dim = u32(item * u32(chunk))
        put(at, dim, chunk_features(at, dim))

    encode = ItemGroup(0, n_dims // chunk, target.device(encode), by_sample=False)
    if not input_gradient:
        return EncodingParts((encode,), (), chunk, make_features)

    def backward(item, at, gradient, live, dx):
        values = map_values(transform_back, get(at, u32(item * u32(chunk))), live)
        for i in range(chunk):
            unroll()
            dx[i] = dx[i] + values[i]

    backward = ItemGroup(0, n_dims // chunk, target.device(backward), by_sample=False)
    part = BackwardPart((backward,), memory.first_dim, n_dims, dims_per_item=chunk)
    return EncodingParts((encode,), (part,), chunk, make_features)
