"""The next tile's inputs and targets, brought closer while a tile is worked on.

A block that is alone on its multiprocessor has few warps to hide the latency of memory; from the L2 cache it is a
third, from L1 a twentieth. But to L1 a prefetch brings a sector of 32 bytes, to L2 a line of 128: rows of many numbers
(the targets of wide outputs) cost more instructions than they save, and go to L2 alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..specs import ModelSpec
from .fragments import Target
from .plan import KernelPlan
from .planes import PlanesSpec, place_in_plane
from .stage_io import BATCH, X_STRIDE, Y_STRIDE, GradientOptions, X, Y
from .tiles import tile_is_within

SECTOR, LINE = 32, 128  # bytes that one prefetch brings, to L1 and to L2
MOST_TARGET_BYTES = 64
"""Of a row of targets that is brought to L1."""

SIZES = {"float32": 4, "float16": 2}


def make_prefetch(target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions) -> Callable:
    """prefetch(base, io, first_row): this warp's rows of y, and of x unless that is copied ahead, from `first_row` of
    the batch on; past the batch, its last row, but nothing of tiles that are past it altogether."""
    is_planes = isinstance(spec.encoding, PlanesSpec)
    x_bytes = spec.n_input_dims * SIZES[options.input_dtype]
    y_bytes = spec.n_output_dims * SIZES[options.target_dtype]
    rows = plan.rows

    def bring_rows(e, bring, piece, matrix, stride, first_row, batch, row_bytes):
        """Lanes share the pieces of all rows, one more than a row fills where rows don't all begin with one."""
        lane = e.lane()
        row = e.minimum(e.add(first_row, e.mod(lane, rows)), e.sub(batch, 1))
        start, share, shares = e.address_by(matrix, row, stride), e.div(lane, rows), 32 // rows
        for number in range(0, -(-row_bytes // piece) + (row_bytes % piece > 0), shares):
            offset = e.minimum(e.mul(e.add(share, number), piece), row_bytes - 1)
            bring(e.address(start, offset, 1))

    def bring_planes(e, bring, planes, plane_bytes, first_row, batch):
        row = e.minimum(first_row, e.sub(batch, 1))
        for first in range(0, spec.encoding.n_levels, 32):
            level = e.minimum(e.add(e.lane(), first), spec.encoding.n_levels - 1)
            bring(place_in_plane(e, planes, plane_bytes, row, level, spec.encoding.n_features))

    @target.intrinsic(["u32", "u64", "u32", "u64", "u32", "u32", "u32"], "void")
    def prefetch_tile(e, base, x, x_stride, y, y_stride, batch, first_row):
        scratch = e.add(e.add(base, e.shl(e.thread(), 2)), plan.scratch)
        closer = functools.partial(e.prefetch_closer, scratch)
        with e.when(tile_is_within(e, first_row, rows, batch)):
            if not plan.copied_ahead:
                if is_planes:
                    bring_planes(e, closer, x, x_stride, first_row, batch)
                else:
                    bring_rows(e, closer, SECTOR, x, x_stride, first_row, batch, x_bytes)
            bring_y, piece = (closer, SECTOR) if y_bytes <= MOST_TARGET_BYTES else (e.prefetch, LINE)
            bring_rows(e, bring_y, piece, y, y_stride, first_row, batch, y_bytes)

    def prefetch(base, io, first_row):
        prefetch_tile(base, io[X], io[X_STRIDE], io[Y], io[Y_STRIDE], io[BATCH], first_row)

    return target.device(prefetch)
