"""Which row of a grid level's table a vertex has, as device functions (mirror of reference/grid_rows.py)."""

from __future__ import annotations

import numpy as np

from ..initial_values import MULTIPLIER, Pcg32
from ..layout import GridLevel
from ..specs import GridSpec

HASH_FACTORS = {
    "CoherentPrime": (1, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737),
    "Prime": (1958374283, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737),
    "ReversedPrime": (2165219737, 1434869437, 2097192037, 3674653429, 805459861, 2654435761, 1958374283),
}
BASE = 2531011
RNG_SEED = 1337
MAX_DENSE_RESOLUTION = {1: 2**32 - 1, 2: 65535, 3: 1625, 4: 255, 5: 84, 6: 40, 7: 23}
"""Largest N whose N^D fits 32 bits; above it dense numbers are taken in 64 bits."""

DENSE, WIDE_DENSE, HASHED = "dense", "wide dense", "hashed"


def index_kind(spec: GridSpec, level: GridLevel) -> str:
    if level.hashed:
        return HASHED
    return DENSE if level.resolution <= MAX_DENSE_RESOLUTION[spec.n_input_dims] else WIDE_DENSE


def consecutive_groups(kinds: list) -> list[tuple]:
    """(kind, first, count) of runs of equal kinds."""
    runs = []
    for i, kind in enumerate(kinds):
        if runs and runs[-1][0] == kind:
            runs[-1][2] += 1
        else:
            runs.append([kind, i, 1])
    return [tuple(run) for run in runs]


def make_index(target, spec: GridSpec, kind: str):
    """index(cells, corner, resolution, n_entries) -> row of the level's table; bit d of `corner` adds 1 to cells[d]."""
    n_dims, u32, u64, unroll = spec.n_input_dims, target.u32, target.u64, target.unroll_full
    np_u32 = np.uint32

    def wrap(i, n):
        return np_u32(i % n) if i >= n else np_u32(i)

    if kind == WIDE_DENSE:
        np_u64 = np.uint64

        def wrap_wide(i, n):
            return np_u32(i % np_u64(n))

        wrap_wide = target.scalar(wrap_wide)

        def index(cells, corner, resolution, n_entries):
            total, stride = u64(0), u64(1)
            for d in range(n_dims):
                unroll()
                total = total + u64(u32(cells[d] + u32((corner >> d) & 1))) * stride
                stride = stride * u64(resolution)
            return wrap_wide(total, n_entries)

        return target.device(index)
    if kind == DENSE:
        wrap = target.scalar(wrap)

        def index(cells, corner, resolution, n_entries):
            total, stride = u32(0), u32(1)
            for d in range(n_dims):
                unroll()
                total = u32(total + u32(u32(cells[d] + u32((corner >> d) & 1)) * stride))
                stride = u32(stride * resolution)
            return wrap(total, n_entries)

        return target.device(index)

    hash_of = make_hash(target, spec)

    def index(cells, corner, resolution, n_entries):
        # a hashed level has a power of two of entries
        return u32(u32(hash_of(cells, corner)) & u32(n_entries - u32(1)))

    return target.device(index)


def make_hash(target, spec: GridSpec):
    """hash(cells, corner) -> uint32 of the vertex p, cells plus the bits of the corner, in D dimensions:

    Prime, CoherentPrime, ReversedPrime    xor_d p_d c_d, with the constants c of `HASH_FACTORS`
    BaseConvert                            sum_d p_d b^(D-d), b = 2531011
    Rng                                    output number xor_d p_d 2^(d floor(64/D)) (modulo 2^64) of a pcg32
    """
    n_dims, u32, u64, unroll = spec.n_input_dims, target.u32, target.u64, target.unroll_full
    if spec.hash == "Rng":
        output, bits = make_random_output(target, RNG_SEED), 64 // n_dims

        def hash_of(cells, corner):
            step = u64(0)
            for d in range(n_dims):
                unroll()
                step = u64(step ^ u64(u64(u32(cells[d] + u32((corner >> d) & 1))) << u64(d * bits)))
            return output(step)

        return target.device(hash_of)
    if spec.hash == "BaseConvert":
        powers = tuple(np.uint32(BASE ** (n_dims - d) & 0xFFFFFFFF) for d in range(n_dims))

        def hash_of(cells, corner):
            total = u32(0)
            for d in range(n_dims):
                unroll()
                total = u32(total + u32(u32(cells[d] + u32((corner >> d) & 1)) * powers[d]))
            return total

        return target.device(hash_of)
    factors = tuple(np.uint32(f) for f in HASH_FACTORS[spec.hash][:n_dims])

    def hash_of(cells, corner):
        total = u32(0)
        for d in range(n_dims):
            unroll()
            total = u32(total ^ u32(u32(cells[d] + u32((corner >> d) & 1)) * factors[d]))
        return total

    return target.device(hash_of)


def make_random_output(target, seed: int):
    """output(step) -> the pcg32's output after `step` steps from the seed (uint64). A step is s -> a s + c modulo 2^64;
    2^i steps have the same form, and those of the bits of `step` are taken."""
    generator = Pcg32(seed)
    np_u32, np_u64 = np.uint32, np.uint64
    start, multiplier, increment = np_u64(generator.state), np_u64(MULTIPLIER), np_u64(generator.increment)
    zero, one = np_u64(0), np_u64(1)

    def output(step):
        state, factor, addend = start, multiplier, increment
        while step != zero:
            if step & one != zero:
                state = np_u64(state * factor + addend)
            addend = np_u64((factor + one) * addend)
            factor = np_u64(factor * factor)
            step = np_u64(step >> one)
        mixed = np_u32(((state >> np_u64(18)) ^ state) >> np_u64(27))
        turn = np_u32(state >> np_u64(59))
        return np_u32(np_u32(mixed >> turn) | np_u32(mixed << np_u32(np_u32(32) - turn & np_u32(31))))

    return target.scalar(output)


def make_any_index(target, spec: GridSpec, levels: tuple[GridLevel, ...]):
    """index(cells, corner, resolution, n_entries, level): as `make_index`, for any level, given by its number."""
    kinds = [index_kind(spec, level) for level in levels]
    distinct = list(dict.fromkeys(kinds))
    kind_of = target.constant(np.array([distinct.index(kind) for kind in kinds], np.uint32))
    np_u32 = np.uint32

    def choose(kind, wanted, a, b):
        return np_u32(a) if kind == wanted else np_u32(b)

    choose = target.scalar(choose)

    def chain(number: int):
        index, u32 = make_index(target, spec, distinct[number]), target.u32
        if number + 1 == len(distinct):

            def last(cells, corner, resolution, n_entries, level):
                return index(cells, corner, resolution, n_entries)

            return target.device(last)
        others = chain(number + 1)

        def either(cells, corner, resolution, n_entries, level):
            own = index(cells, corner, resolution, n_entries)
            return choose(kind_of(level), u32(number), own, others(cells, corner, resolution, n_entries, level))

        return target.device(either)

    return chain(0)
