"""Encodings of each input dimension apart, in dual numbers: y' = f'(x) v, and dS/dx = sum B f'(x) + A f''(x) v."""

from __future__ import annotations

import numpy as np

from ..specs import IdentitySpec
from .arithmetic import make_multiply
from .encoding_parts import BackwardPart, EncodingParts, ItemGroup, make_divide, make_parts_by_chunks, power_of_two_in
from .per_dimension import PerDimension
from .second_order_parts import dual_features


def make_second_order_per_dimension(target, memory, functions: PerDimension) -> EncodingParts:
    """The parts of such an encoding in dual numbers."""
    n_dims, per_dim, chunk = functions.n_dims, functions.per_dim, functions.chunk
    u32, f32, map_values, n_chunks = target.u32, target.f32, target.map_fragment, per_dim // chunk
    read_input, read_direction, divide = memory.read_input, memory.read_direction, make_divide(target, per_dim)
    get, add, multiply = memory.make_get_dual(chunk), memory.make_sum(chunk), make_multiply(target)

    def make_dual(n_values: int):
        values, slopes = functions.make_values(n_values), functions.make_slopes(n_values)

        def dual(at, column):
            place = divide(column)
            x, v = read_input(at, place[0]), read_direction(at, place[0])
            return values(x, place[1]), map_values(multiply, slopes(x, place[1]), v)

        return target.device(dual)

    slopes = functions.make_slopes(chunk)
    if functions.make_curvatures is None:

        def chunk_gradient(dual, x, v, k):
            return add(map_values(multiply, dual[1], slopes(x, k)))

    else:
        curvatures = functions.make_curvatures(chunk)

        def chunk_gradient(dual, x, v, k):
            straight = add(map_values(multiply, dual[1], slopes(x, k)))
            return straight + v * add(map_values(multiply, dual[0], curvatures(x, k)))

    chunk_gradient = target.device(chunk_gradient)

    def backward(item, at, gradient, live, dx):
        x, v = read_input(at, item), read_direction(at, item)
        total = f32(0)
        for i in range(n_chunks):
            k = u32(i * chunk)
            total = total + chunk_gradient(get(at, u32(u32(item * u32(per_dim)) + k)), x, v, k)
        dx[0] = dx[0] + total * live

    backward = ItemGroup(0, n_dims, target.device(backward), by_sample=False)
    part = BackwardPart((backward,), memory.first_dim, n_dims, dims_per_item=1)
    kind, width = dual_features(target), n_dims * per_dim
    return make_parts_by_chunks(target, kind, memory, make_dual, width=width, granularity=chunk, backward=(part,))


def make_second_order_identity(target, spec: IdentitySpec, memory, *, table_gradient: bool) -> EncodingParts:
    """y = scale x + offset: y' = scale v, dS/dx = scale B."""
    map_values, unroll, u32, n_dims = target.map_fragment, target.unroll_full, target.u32, spec.n_input_dims
    chunk = power_of_two_in(n_dims)
    scale, offset = np.float32(spec.scale), np.float32(spec.offset)

    def transform(x, v):
        return x * scale + offset, v * scale

    def transform_back(g, live):
        return g * scale * live

    transform, transform_back = target.scalar(transform), target.scalar(transform_back)

    def make_dual(n_values: int):
        read_inputs, read_directions = memory.make_read_inputs(n_values), memory.make_read_directions(n_values)

        def dual(at, column):
            return map_values(transform, read_inputs(at, column), read_directions(at, column))

        return target.device(dual)

    get = memory.make_get_dual(chunk)

    def backward(item, at, gradient, live, dx):
        values = map_values(transform_back, get(at, u32(item * u32(chunk)))[1], live)
        for i in range(chunk):
            unroll()
            dx[i] = dx[i] + values[i]

    backward = ItemGroup(0, n_dims // chunk, target.device(backward), by_sample=False)
    part = BackwardPart((backward,), memory.first_dim, n_dims, dims_per_item=chunk)
    kind = dual_features(target)
    return make_parts_by_chunks(target, kind, memory, make_dual, width=n_dims, granularity=chunk, backward=(part,))
