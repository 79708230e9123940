"""Features that are numbers in memory already: copied to the x tile as they stand, a tile ahead.

Inputs of a bare float16 network, and planes, need no arithmetic. So while a warp works on its samples of one tile,
those of its next are on their way, past the registers (cp.async). Where dW is summed from the x tile until the tile's
end, there are two that take turns; inference, and phased plans that save x, read a tile once and need no second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ..specs import IdentitySpec, ModelSpec, round_up
from .fragments import FragmentShape, Target
from .phased_plan import PhasedPlan
from .plan import RESERVED_SHARED_BYTES, Architecture, KernelPlan
from .planes import PlanesSpec
from .stage_io import BATCH, X_STRIDE, GradientOptions, InferenceOptions, X
from .swizzled_tile import SWIZZLE_ALIGNMENT, SwizzledTile
from .tiles import make_barriers, make_load_fragment, tile_is_within

CHUNK = 16  # bytes of a row that one copy brings
COPIED_AT_ONCE = (4, 8, CHUNK)


def can_copy(spec: ModelSpec, options: GradientOptions | InferenceOptions) -> bool:
    """Whether a row of features is pieces of memory, as wide as one copy, and nothing else."""
    encoding, fills_tile = spec.encoding, spec.encoding.n_output_dims == spec.encoding_width
    if options.input_dtype != "float16" or not options.aligned_input or not fills_tile:
        return False
    if isinstance(encoding, PlanesSpec):
        return 2 * encoding.n_features in COPIED_AT_ONCE
    return isinstance(encoding, IdentitySpec) and (encoding.scale, encoding.offset) == (1, 0)


def with_features_copied(
    plans: list, spec: ModelSpec, chip: Architecture, options: GradientOptions | InferenceOptions
) -> list:
    """The plans, and before each that can have its features copied ahead the same plan with that."""
    if not can_copy(spec, options):
        return plans
    return [candidate for plan in plans for candidate in (*_copied(plan, chip), plan)]


def _copied(plan, chip: Architecture) -> list[KernelPlan]:
    if not isinstance(plan, KernelPlan) or not plan.swizzled:
        return []
    if isinstance(plan, PhasedPlan) and (plan.dx is not None or plan.x_is_shared):
        return []
    if plan.kind == "inference" or (isinstance(plan, PhasedPlan) and plan.layers and plan.hands_on_packed):
        return [replace(plan, copied_ahead=True)]
    if plan.kind not in ("single", "phased"):
        return []
    offset = round_up(plan.shared_end, SWIZZLE_ALIGNMENT)
    twin = SwizzledTile("next x", plan.x.rows, plan.x.columns, offset)
    copied = replace(plan, copied_ahead=True, next_x=twin)
    room = chip.shared_per_multiprocessor // plan.min_blocks - RESERVED_SHARED_BYTES
    return [copied] if copied.shared_bytes <= min(room, chip.shared_per_block) else []


def make_copied_features(
    target: Target, spec: ModelSpec, plan: KernelPlan, *, loads: bool = True
) -> tuple[Callable, Callable, Callable]:
    """(begin, take, end): features of this warp's samples, tile after tile.

    begin(base, io, first_row)              start to copy those of the first tile
    take(base, shift, io, following) -> x   those of this tile, as a packed fragment; start to copy those from row
                                            `following` of the batch on. `shift` is how far behind the x tile they
                                            stand: 0 in the first tile, then in turn `distance_of_tiles(plan)` and 0.
                                            Without `loads`, x is of no use: the tile keeps them
    end(base)                               nothing is on its way any more
    """
    u32, distance = target.u32, distance_of_tiles(plan)
    copy, barriers = _make_copy(target, spec, plan), make_barriers(target)
    warp_barrier, copy_wait = barriers.warp_barrier, barriers.copy_wait
    load = make_load_fragment(target, plan.x, FragmentShape(plan.rows, plan.x.columns))
    if not loads:
        load = target.device(lambda base: base)

    def begin(base, io, first_row):
        copy(base, io[X], io[X_STRIDE], io[BATCH], first_row)

    if distance:

        def take(base, shift, io, following):
            copy_wait()
            warp_barrier()
            x = load(u32(base + shift))
            copy(u32(base + u32(u32(distance) - shift)), io[X], io[X_STRIDE], io[BATCH], following)
            return x

    else:

        def take(base, shift, io, following):
            copy_wait()
            warp_barrier()
            x = load(base)
            warp_barrier()  # all lanes have read
            copy(base, io[X], io[X_STRIDE], io[BATCH], following)
            return x

    def end(base):
        copy_wait()
        warp_barrier()

    return target.device(begin), target.device(take), target.device(end)


def distance_of_tiles(plan: KernelPlan) -> int:
    """Bytes from the x tile to its twin; 0 where it has none."""
    return plan.next_x.offset - plan.x.offset if plan.next_x else 0


def _make_copy(target: Target, spec: ModelSpec, plan: KernelPlan) -> Callable:
    """copy(base, x, x_stride, batch, first_row): to this warp's rows of the x tile; past the batch, its last row, but
    nothing of tiles that are past it altogether: all warps would read that row, one line of the L2, in the end."""
    if isinstance(spec.encoding, PlanesSpec):
        copy_rows = _make_copy_of_planes(spec.encoding, plan.x, plan.rows)
    else:
        copy_rows = _make_copy_of_rows(plan.x, plan.rows)

    @target.intrinsic(["u32", "u64", "u32", "u32", "u32"], "void")
    def copy(e, base, x, x_stride, batch, first_row):
        with e.when(tile_is_within(e, first_row, plan.rows, batch)):
            copy_rows(e, base, x, x_stride, batch, first_row)

    return copy


def _make_copy_of_rows(tile: SwizzledTile, rows: int) -> Callable:
    """Lanes side by side copy chunks side by side, of a few rows a turn."""
    chunks = tile.stride // CHUNK  # of a panel's row, some of them maybe beyond the matrix
    rows_a_turn = 32 // chunks

    def copy(e, base, x, x_stride, batch, first_row):
        lane, last = e.lane(), e.sub(batch, 1)
        local_row, chunk = e.div(lane, chunks), e.mod(lane, chunks)
        first_place = tile.within_panel(e, e.add(e.mul(local_row, tile.stride), e.mul(chunk, CHUNK)), 0)
        first_place = e.add(e.add(base, e.mul(e.warp(), rows * tile.stride)), first_place)
        own_row, own_chunk = e.add(first_row, local_row), e.address(x, chunk, CHUNK)
        for turn in range(rows // rows_a_turn):
            row = e.minimum(e.add(own_row, rows_a_turn * turn), last)
            aligned, place = divmod(rows_a_turn * turn * tile.stride, SWIZZLE_ALIGNMENT)
            flip, further = tile.flip(place), aligned * SWIZZLE_ALIGNMENT  # bits from 1024 on may be set in `base`
            for panel in range(tile.n_panels):
                n_chunks = min(chunks, (tile.columns - panel * tile.panel_columns) // 8)
                source = e.address(own_chunk, panel * chunks, CHUNK)
                offset = tile.offset + panel * tile.panel_bytes + further
                copy_chunk = functools.partial(
                    e.copy_async_of, first_place, source, offset, flip=flip, item=row, further=0, stride=x_stride,
                    n_bytes=CHUNK,
                )  # fmt: skip
                if n_chunks == chunks:
                    copy_chunk()
                else:
                    with e.when(e.less(chunk, n_chunks)):
                        copy_chunk()

    return copy


def _make_copy_of_planes(planes: PlanesSpec, tile: SwizzledTile, rows: int) -> Callable:
    """Lanes side by side copy a level's features of samples side by side, one or two levels a turn."""
    n_bytes, levels_a_turn = 2 * planes.n_features, 32 // rows
    levels_a_panel = tile.panel_columns // planes.n_features

    def copy(e, base, x, x_stride, batch, first_row):
        lane = e.lane()
        local_row, first_level = e.mod(lane, rows), e.div(lane, rows)
        first_place = tile.within_panel(e, e.add(e.mul(local_row, tile.stride), e.mul(first_level, n_bytes)), 0)
        first_place = e.add(e.add(base, e.mul(e.warp(), rows * tile.stride)), first_place)
        row = e.minimum(e.add(first_row, local_row), e.sub(batch, 1))
        source = e.address(x, row, n_bytes)
        for level in range(0, planes.n_levels, levels_a_turn):
            panel, within = divmod(level, levels_a_panel)
            flip, offset = tile.flip(within * n_bytes), tile.offset + panel * tile.panel_bytes
            copy_level = functools.partial(
                e.copy_async_of, first_place, source, offset, flip=flip, item=first_level, further=level,
                stride=x_stride, n_bytes=n_bytes,
            )  # fmt: skip
            if level + levels_a_turn <= planes.n_levels:
                copy_level()
            else:
                with e.when(e.less(first_level, planes.n_levels - level)):
                    copy_level()

    return copy
