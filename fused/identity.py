"""Identity encoding, per sample and chunk of dims (mirror of reference/identity.py): y_j = scale x_j + offset.

An item is a chunk of up to 8 consecutive dims, so that a bare network's inputs arrive by 16-byte loads that coalesce.
"""

from __future__ import annotations

import numpy as np

from ..specs import IdentitySpec
from .encoding_parts import (
    BackwardPart,
    EncodingParts,
    ItemGroup,
    float_features,
    make_parts_by_chunks,
    power_of_two_in,
)


def make_identity(target, spec: IdentitySpec, memory, *, table_gradient: bool, input_gradient: bool) -> EncodingParts:
    """The parts of an identity encoding; it has no table."""
    map_values, n_dims = target.map_fragment, spec.n_input_dims
    chunk = power_of_two_in(n_dims)
    scale, offset = np.float32(spec.scale), np.float32(spec.offset)

    def transform(x):
        return x * scale + offset

    transform = target.scalar(transform)

    def make_features(n_values: int):
        read_inputs = memory.make_read_inputs(n_values)

        def features(at, column):
            return map_values(transform, read_inputs(at, column))

        return target.device(features)

    backward = (_make_backward(target, memory, n_dims, chunk, scale),) if input_gradient else ()
    kind = float_features(target)
    return make_parts_by_chunks(target, kind, memory, make_features, width=n_dims, granularity=chunk, backward=backward)


def _make_backward(target, memory, n_dims: int, chunk: int, scale: np.float32) -> BackwardPart:
    u32, map_values, unroll, get = target.u32, target.map_fragment, target.unroll_full, memory.make_get(chunk)

    def transform_back(g, live):
        return g * scale * live

    transform_back = target.scalar(transform_back)

    def backward(item, at, gradient, live, dx):
        values = map_values(transform_back, get(at, u32(item * u32(chunk))), live)
        for i in range(chunk):
            unroll()
            dx[i] = dx[i] + values[i]

    group = ItemGroup(0, n_dims // chunk, target.device(backward), by_sample=False)
    return BackwardPart((group,), memory.first_dim, n_dims, dims_per_item=chunk)
