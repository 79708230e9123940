"""Encodings without parameters that treat the input dimensions alike and apart (mirror of reference/per_dimension.py):
y_{iK+k} = f_k(x_i), k < K, and dL/dx_i = sum over k of dL/dy_{iK+k} f'_k(x_i).

Forward, an item is a run of features of one dimension, chunk by chunk: the longer, the less is spent on finding its
place and reading x_i; the shorter, the more lanes have work (`_chunks_per_item`). Backward it is a dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .arithmetic import make_multiply
from .encoding_parts import BackwardPart, EncodingParts, ItemGroup, make_divide


@dataclass(frozen=True)
class PerDimension:
    """Such an encoding's functions f_k.

    per_dim           K
    chunk             features put at once, a power of two up to 8 that divides K
    make_values       make_values(n) -> values(x, k) -> f_k ... f_{k+n-1} at x; n a power of two up to `chunk`, k a
                      multiple of n
    make_slopes       as make_values, of f'
    make_curvatures   as make_values, of f''; None where it is 0
    make_put_all      make_put_all() -> put_all(at, column, x) puts all f_k at x from `column` on; None where that is
                      best done chunk by chunk
    """

    n_dims: int
    per_dim: int
    chunk: int
    make_values: Callable[[int], Callable]
    make_slopes: Callable[[int], Callable]
    make_curvatures: Callable[[int], Callable] | None
    make_put_all: Callable[[], Callable] | None = None


def make_per_dimension(target, memory, functions: PerDimension, *, input_gradient: bool) -> EncodingParts:
    """The parts of such an encoding."""
    read_input, divide = memory.read_input, make_divide(target, functions.per_dim)

    def make_features(n_values: int) -> Callable:
        values = functions.make_values(n_values)

        def features(at, column):
            place = divide(column)
            return values(read_input(at, place[0]), place[1])

        return target.device(features)

    make_encode = _make_encode_chunks if functions.make_put_all is None else _make_encode_dims
    encode = (make_encode(target, memory, functions),)
    backward = (_make_backward(target, memory, functions),) if input_gradient else ()
    return EncodingParts(encode, backward, functions.chunk, make_features)


def _chunks_per_item(functions: PerDimension) -> int:
    """What takes a warp the least time for 16 samples, where an item costs as much as some five features beside its own
    features: a divisor of the chunks of a dimension, of at most 24 features, which are unrolled."""
    per_dim, chunk = functions.per_dim, functions.chunk
    n_chunks = per_dim // chunk

    def cost(chunks: int) -> int:
        turns = -(-functions.n_dims * n_chunks // chunks // 2)
        return turns * (chunks * chunk + 5)

    return min((c for c in range(1, n_chunks + 1) if n_chunks % c == 0 and c * chunk <= 24), key=cost)


def _make_encode_chunks(target, memory, functions: PerDimension) -> ItemGroup:
    n_dims, per_dim, chunk = functions.n_dims, functions.per_dim, functions.chunk
    u32, unroll, n_chunks = target.u32, target.unroll_full, _chunks_per_item(functions)
    read_input, divide = memory.read_input, make_divide(target, per_dim)
    values, put = functions.make_values(chunk), memory.make_put(chunk)

    def encode_run(at, dim, x, k):
        for i in range(n_chunks):
            unroll()
            here = u32(k + u32(i * chunk))
            put(at, u32(u32(dim * u32(per_dim)) + here), values(x, here))

    encode_run = target.device(encode_run)
    if n_chunks * chunk == per_dim:

        def encode(item, at):
            encode_run(at, item, read_input(at, item), u32(0))

    else:

        def encode(item, at):
            place = divide(u32(item * u32(n_chunks * chunk)))
            encode_run(at, place[0], read_input(at, place[0]), place[1])

    return ItemGroup(0, n_dims * per_dim // (n_chunks * chunk), target.device(encode), by_sample=False)


def _make_encode_dims(target, memory, functions: PerDimension) -> ItemGroup:
    """Whole dimensions, the encoding's own way."""
    u32, per_dim, read_input, put_all = target.u32, functions.per_dim, memory.read_input, functions.make_put_all()

    def encode(item, at):
        put_all(at, u32(item * u32(per_dim)), read_input(at, item))

    return ItemGroup(0, functions.n_dims, target.device(encode), by_sample=False)


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
