"""Encodings without parameters that treat the input dimensions alike and apart (mirror of reference/per_dimension.py):
y_{iK+k} = f_k(x_i), k < K, and dL/dx_i = sum over k of dL/dy_{iK+k} f'_k(x_i).

Forward, an item is a chunk of up to 8 features of one dimension, so that lanes write consecutive words of a row;
backward it is a dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .arithmetic import make_multiply
from .encoding_parts import BackwardPart, EncodingParts, ItemGroup, float_features, make_divide, make_parts_by_chunks


@dataclass(frozen=True)
class PerDimension:
    """Such an encoding's functions f_k.

    per_dim           K
    chunk             features an item, a power of two that divides K
    make_values       make_values(n) -> values(x, k) -> f_k ... f_{k+n-1} at x; n a power of two up to `chunk`, k a
                      multiple of n
    make_slopes       as make_values, of f'
    make_curvatures   as make_values, of f''; None where it is 0
    """

    n_dims: int
    per_dim: int
    chunk: int
    make_values: Callable[[int], Callable]
    make_slopes: Callable[[int], Callable]
    make_curvatures: Callable[[int], Callable] | None


def make_per_dimension(target, memory, functions: PerDimension, *, input_gradient: bool) -> EncodingParts:
    """The parts of such an encoding."""
    read_input, divide = memory.read_input, make_divide(target, functions.per_dim)

    def make_features(n_values: int) -> Callable:
        values = functions.make_values(n_values)

        def features(at, column):
            place = divide(column)
            return values(read_input(at, place[0]), place[1])

        return target.device(features)

    width, backward = functions.n_dims * functions.per_dim, ()
    if input_gradient:
        backward = (_make_backward(target, memory, functions),)
    kind = float_features(target)
    return make_parts_by_chunks(
        target, kind, memory, make_features, width=width, granularity=functions.chunk, backward=backward
    )


def _make_backward(target, memory, functions: PerDimension) -> BackwardPart:
    n_dims, per_dim, chunk = functions.n_dims, functions.per_dim, functions.chunk
    u32, f32, map_values, n_chunks = target.u32, target.f32, target.map_fragment, per_dim // chunk
    read_input, slopes = memory.read_input, functions.make_slopes(chunk)
    get, add, multiply = memory.make_get(chunk), memory.make_sum(chunk), make_multiply(target)

    def backward(item, at, gradient, live, dx):
        x = read_input(at, item)
        total = f32(0)
        for i in range(n_chunks):
            k = u32(i * chunk)
            dy = get(at, u32(u32(item * u32(per_dim)) + k))
            total = total + add(map_values(multiply, dy, slopes(x, k)))
        dx[0] = dx[0] + total * live

    group = ItemGroup(0, n_dims, target.device(backward), by_sample=False)
    return BackwardPart((group,), memory.first_dim, n_dims, dims_per_item=1)
