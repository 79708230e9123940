"""Rows of all corners of a sample's cell at once, for grids whose corners are unrolled.

The same rows as `grid_rows.make_index` gives corner by corner, in fewer instructions: a dense number of a corner is
that of the cell plus strides, a hash takes p_d c_d or that plus c_d along each axis, and the 2^D dense numbers share
one decision whether any of them needs a division.
"""

from __future__ import annotations

from collections.abc import Callable

from ..specs import GridSpec
from .fragments import make_pick
from .grid_rows import BASE, DENSE, HASH_FACTORS, HASHED

MAX_DIMS = 4


def has_corner_rows(spec: GridSpec, kind: str) -> bool:
    """Whether rows of this kind of level come all at once."""
    return spec.n_input_dims <= MAX_DIMS and (kind == DENSE or (kind == HASHED and spec.hash != "Rng"))


def make_corner_rows(target, spec: GridSpec, kind: str) -> Callable:
    """rows(cells, resolution, n_entries) -> 2^D rows of the level's table, bit d of a corner's number adding 1 to
    cells[d]; `cells` is a local array."""
    n_dims = spec.n_input_dims
    rows_of, as_tuple = _make_rows_of(target, spec, kind), target.device(AS_TUPLE[n_dims])

    def rows(cells, resolution, n_entries):
        return rows_of(as_tuple(cells), resolution, n_entries)

    return target.device(rows)


AS_TUPLE: dict[int, Callable] = {
    1: lambda cells: (cells[0],),
    2: lambda cells: (cells[0], cells[1]),
    3: lambda cells: (cells[0], cells[1], cells[2]),
    4: lambda cells: (cells[0], cells[1], cells[2], cells[3]),
}


def make_rows(target, spec: GridSpec, kind: str | None, index: Callable) -> tuple[Callable, Callable]:
    """(prepare, row_of): prepare(cells, resolution, n_entries) before a loop over corners, and in it row_of(prepared,
    cells, corner, resolution, n_entries, level).

    kind    all levels' kind of index where rows shall come all at once; None: each corner's when it is asked for
    index   the rows corner by corner, as `grid_rows.make_any_index` gives them
    """
    u32 = target.u32
    if kind is not None and has_corner_rows(spec, kind):
        pick = make_pick(target, "u32", 1 << spec.n_input_dims)

        def row_of(rows, cells, corner, resolution, n_entries, level):
            return pick(rows, u32(corner))

        return make_corner_rows(target, spec, kind), target.device(row_of)

    def prepare(cells, resolution, n_entries):
        return u32(0)

    def row_of(prepared, cells, corner, resolution, n_entries, level):
        return index(cells, corner, resolution, n_entries, level)

    return target.device(prepare), target.device(row_of)


def _make_rows_of(target, spec: GridSpec, kind: str) -> Callable:
    n_dims = spec.n_input_dims

    @target.intrinsic([("u32", n_dims), "u32", "u32"], ("u32", 1 << n_dims))
    def rows_of(e, cells, resolution, n_entries):
        if kind == DENSE:
            strides = [e.u32(1)]
            for _ in range(n_dims - 1):
                strides.append(e.mul(strides[-1], resolution))
            return e.remainders(_combinations(e.add, _along_axes(e, cells, strides)), n_entries)
        if spec.hash == "BaseConvert":
            factors = [BASE ** (n_dims - d) & 0xFFFFFFFF for d in range(n_dims)]
            hashes = _combinations(e.add, _along_axes(e, cells, factors))
        else:
            hashes = _combinations(e.xor, _along_axes(e, cells, HASH_FACTORS[spec.hash][:n_dims]))
        last = e.sub(n_entries, 1)  # a hashed level has a power of two of entries
        return [e.and_(value, last) for value in hashes]

    return rows_of


def _along_axes(e, cells, factors) -> list[tuple]:
    """(p_d c_d, (p_d + 1) c_d) for each axis."""
    lower = [e.mul(cell, factor) for cell, factor in zip(cells, factors, strict=True)]
    return [(value, e.add(value, factor)) for value, factor in zip(lower, factors, strict=True)]


def _combinations(combine: Callable, axes: list[tuple]) -> list:
    """The values of all corners, axis 0 being the lowest bit of a corner's number."""
    values = list(axes[0])
    for lower, upper in axes[1:]:
        values = [combine(value, lower) for value in values] + [combine(value, upper) for value in values]
    return values
