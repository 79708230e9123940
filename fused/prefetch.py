"""The next tile's inputs and targets, brought to the L2 cache while a tile is worked on.

A block that is alone on its multiprocessor has few warps to hide the latency of memory; from L2 it is a third.
"""

from __future__ import annotations

from collections.abc import Callable

from ..specs import ModelSpec
from .fragments import Target
from .plan import KernelPlan
from .planes import PlanesSpec, place_in_plane
from .stage_io import BATCH, X_STRIDE, Y_STRIDE, GradientOptions, X, Y
from .tiles import tile_is_within

LINE = 128  # bytes that one prefetch brings
SIZES = {"float32": 4, "float16": 2}


def make_prefetch(target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions) -> Callable:
    """prefetch(io, first_row): this warp's rows of y, and of x unless that is copied ahead, from `first_row` of the
    batch on; past the batch, its last row, but nothing of tiles that are past it altogether."""
    is_planes = isinstance(spec.encoding, PlanesSpec)
    x_bytes = spec.n_input_dims * SIZES[options.input_dtype]
    y_bytes = spec.n_output_dims * SIZES[options.target_dtype]
    rows = plan.rows

    def prefetch_rows(e, matrix, stride, first_row, batch, row_bytes):
        """Lanes share the lines of all rows; the last byte of a row is prefetched too, wherever its line begins."""
        lane = e.lane()
        row = e.minimum(e.add(first_row, e.mod(lane, rows)), e.sub(batch, 1))
        start, share, shares = e.address_by(matrix, row, stride), e.div(lane, rows), 32 // rows
        for line in range(0, -(-row_bytes // LINE), shares):
            offset = e.minimum(e.shl(e.add(share, line), 7), row_bytes - 1)
            e.prefetch(e.address(start, offset, 1))

    def prefetch_planes(e, planes, plane_bytes, first_row, batch):
        row = e.minimum(first_row, e.sub(batch, 1))
        for first in range(0, spec.encoding.n_levels, 32):
            level = e.minimum(e.add(e.lane(), first), spec.encoding.n_levels - 1)
            e.prefetch(place_in_plane(e, planes, plane_bytes, row, level, spec.encoding.n_features))

    @target.intrinsic(["u64", "u32", "u64", "u32", "u32", "u32"], "void")
    def prefetch_tile(e, x, x_stride, y, y_stride, batch, first_row):
        with e.when(tile_is_within(e, first_row, rows, batch)):
            if not plan.copied_ahead:
                if is_planes:
                    prefetch_planes(e, x, x_stride, first_row, batch)
                else:
                    prefetch_rows(e, x, x_stride, first_row, batch, x_bytes)
            prefetch_rows(e, y, y_stride, first_row, batch, y_bytes)

    def prefetch(io, first_row):
        prefetch_tile(io[X], io[X_STRIDE], io[Y], io[Y_STRIDE], io[BATCH], first_row)

    return target.device(prefetch)
