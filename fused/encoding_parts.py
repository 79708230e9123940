"""What an encoding is to the fuser: items that can be computed independently, for every sample of a tile.

An encoding's factory is `make_x(target, spec, memory, *, first_column, table_gradient, input_gradient)`. It is given a
`memory` (`sinks.py`) that it reads inputs and entries from and puts features into, so the same factory serves whole
kernels, single-sample use and tests. It returns `EncodingParts`; the fuser divides the items among threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ItemGroup:
    """Items `first` ... `first + count - 1`, which share their code.

    encode(item, x, x_stride, row, table, place)
        puts the item's features of sample `row` into the row of the tile at `place`.
    backward(item, x, x_stride, row, table, table_gradient, place, live, dx)
        takes the gradient of the item's features from the row at `place`, times `live` (0 for rows past the batch, else
        1), and adds to the gradient of the table and to `dx`, an array of n_input_dims float32 of this thread.
    """

    first: int
    count: int
    encode: Callable
    backward: Callable


@dataclass(frozen=True)
class EncodingParts:
    """The item groups of an encoding, and how threads should take them.

    by_sample   consecutive threads take consecutive samples (items cost arithmetic and gathers, e.g. grids); otherwise
                consecutive items of one sample, so that their memory accesses coalesce (e.g. copies). An item of
                the latter kind owns its input dims: `input_dims_per_item`, from `item * input_dims_per_item` on.
    """

    n_input_dims: int
    by_sample: bool
    groups: tuple[ItemGroup, ...]
    input_dims_per_item: int = 0
