"""The bodies of the second-order kernels.

second_order      encode, forward and backward in dual numbers; of the results, the tangents
largest_tangent   the largest tangent of a feature, before anything is rounded: v is then multiplied by a power of two
                  that brings it into [1/2, 1), and u = dL/dy by one that brings its largest element into [8, 16).
                  What is proportional to both has a headroom of 2^12 then, as gradients have in the first derivative.
write_scales      these two powers of two and those that undo them
"""

from __future__ import annotations

from collections.abc import Callable

from ..specs import ModelSpec
from .encoding_parts import make_padding
from .encoding_stage import make_backward_parts, make_encode_groups, make_place, make_read_scale
from .fragments import FragmentShape, Target, make_note_not_finite, make_pack, make_unpack, make_zeros
from .mlp import make_backward_product, make_weight_gradients, make_write_partial_sums, n_accumulators
from .network_stage import make_load_weights
from .plan import KernelPlan, layer_offsets
from .second_order_encodings import make_second_order_encoding
from .second_order_io import (
    DIRECTIONS,
    DIRECTIONS_SCALE,
    DIRECTIONS_STRIDE,
    SECOND_ORDER_IO_PARAMETERS,
    SecondOrderOptions,
)
from .second_order_memory import DualMemory, LargestTangentMemory
from .second_order_network import (
    make_dual_network,
    make_dual_tile,
    make_load_gradient,
    make_store_derivative,
    make_zeros_at_run_time,
)
from .second_order_parts import dual_features
from .second_order_plan import SecondOrderPlan
from .stage_io import (
    BAD,
    BATCH_SIZE,
    FIRST_ROW,
    MARK,
    MAX_LEVEL_STRIDE,
    MAX_LEVELS,
    SCALES,
    TABLE,
    X_STRIDE,
    KernelBody,
    X,
)
from .tiles import (
    Tile,
    make_barriers,
    make_first_row_of,
    make_indices,
    make_load_fragment,
    make_row_address,
    make_store_fragment,
)


def _memory_options(options: SecondOrderOptions) -> dict:
    return {
        "input_dtype": options.input_dtype, "aligned": options.aligned_input, "max_level": options.max_level,
        "fixed_point": options.fixed_point, "directions_dtype": options.directions_dtype,
    }  # fmt: skip


def _make_place(target: Target, tile: Tile, twin: Tile) -> Callable:
    """place(base, io, row, tile_row) -> `at` of a sample (`second_order_memory.py`)."""
    place_of_values, tangent_row = make_place(target, tile), make_row_address(target, twin)
    scale = make_read_scale(target, DIRECTIONS_SCALE)

    def place(base, io, row, tile_row):
        dual = io[DIRECTIONS], io[DIRECTIONS_STRIDE], scale(io[SCALES]), tangent_row(base, tile_row)
        return place_of_values(base, io, row, tile_row) + dual

    return target.device(place)


def _make_encode(target: Target, spec: ModelSpec, plan: SecondOrderPlan, options: SecondOrderOptions) -> Callable:
    """encode(base, io, first_row): features and tangents into the x tile and its twin."""
    memory = DualMemory(target, **_memory_options(options))
    parts = make_second_order_encoding(target, spec.encoding, memory, table_gradient=False)
    n_own = spec.encoding.n_output_dims  # a bare encoding's tile is wider than the encoding
    n_padding = plan.x.columns - n_own
    padding = make_padding(target, dual_features(target), memory, n_own, n_padding, parts.padding_value)
    return make_encode_groups(target, plan, (*parts.encode, *padding.encode), _make_place(target, plan.x, plan.x_twin))


def _make_encode_backward(
    target: Target, spec: ModelSpec, plan: SecondOrderPlan, options: SecondOrderOptions
) -> Callable:
    """backward(base, io, first_row): from rows of the dx tile and its twin to the table's gradient and to dS/dx."""
    memory = DualMemory(target, **_memory_options(options))
    parts = make_second_order_encoding(target, spec.encoding, memory, table_gradient=options.table_gradient)
    place = _make_place(target, plan.dx, plan.dx_twin)
    return make_backward_parts(target, spec, plan, parts.backward, options, place)


def make_second_order_kernel(
    target: Target, spec: ModelSpec, plan: SecondOrderPlan, options: SecondOrderOptions
) -> KernelBody:
    """dS/d(dL/dy), the table's gradient and dS/dx to global memory, dW to the block's row of partial sums."""
    target = target.storing(plan.dtype)
    if spec.network is None:
        return _make_encoding_kernel(target, spec, plan, options)
    shared_base = target.dynamic_shared_base()
    barrier, warp_barrier, _ = make_barriers(target)
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks
    load_all, _ = make_load_weights(target, plan, layer_offsets(spec))
    encode = _make_encode(target, spec, plan, options)
    _, load_x = make_dual_tile(target, plan.x, plan.x_twin, plan.rows)
    network = make_dual_network(target, spec, plan, options)
    zeros = make_zeros(target, n_accumulators(plan.layers))
    write = make_write_partial_sums(target, plan.layers, plan.scratch)
    first_products, second_products = (make_weight_gradients(target, layers) for layers in plan.tangent_products)
    features_backward = _make_features_backward(target, spec, plan, options)
    first_row_of, u32 = make_first_row_of(target, plan), target.u32

    def second_order(n_tiles, partial_sums, row_bytes, io):
        base = shared_base()
        load_all(base, io)
        accumulators = zeros()
        tile, step = u32(block_index()), u32(n_blocks())
        while tile < n_tiles:
            first_row = first_row_of(tile)
            encode(base, io, first_row)
            warp_barrier()
            network(base, io, first_row, load_x(base))
            barrier()
            accumulators = second_products(base, first_products(base, accumulators))
            barrier()
            features_backward(base, io, first_row)
            warp_barrier()
            tile = u32(tile + step)
        write(base, accumulators, partial_sums, partial_sums, row_bytes, block_index(), u32(0), io[BAD], io[MARK])

    parameters = (("n_tiles", "u32"), ("partial_sums", "u64"), ("row_bytes", "u32"))
    return KernelBody("second_order", second_order, parameters, SECOND_ORDER_IO_PARAMETERS)


def _make_features_backward(
    target: Target, spec: ModelSpec, plan: SecondOrderPlan, options: SecondOrderOptions
) -> Callable:
    """backward(base, io, first_row): the features' dual gradient from the first layer's d and d', and what becomes of
    it. Takes the place of the features."""
    shape = FragmentShape(plan.rows, plan.dx.columns)
    _, load_d = make_dual_tile(target, plan.d[0], plan.d_twins[0], plan.rows)
    store, _ = make_dual_tile(target, plan.dx, plan.dx_twin, plan.rows)
    product, pack = make_backward_product(target, plan.weights.weights[0], plan.rows), make_pack(target, shape)
    note_not_finite, (_, warp_barrier, _) = make_note_not_finite(target, shape), make_barriers(target)
    encode_backward = _make_encode_backward(target, spec, plan, options)

    def features_backward(base, io, first_row):
        d, d_tangent = load_d(base)
        tangent = pack(product(base, d_tangent))
        note_not_finite(tangent, io[BAD], io[MARK])
        store(base, (pack(product(base, d)), tangent))
        warp_barrier()
        encode_backward(base, io, first_row)

    return target.device(features_backward)


def _make_encoding_kernel(
    target: Target, spec: ModelSpec, plan: SecondOrderPlan, options: SecondOrderOptions
) -> KernelBody:
    """Of a bare encoding: y' are the features' tangents, and the gradient u + eps 0 is given."""
    shared_base = target.dynamic_shared_base()
    _, warp_barrier, _ = make_barriers(target)
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks
    shape = FragmentShape(plan.rows, plan.x.columns)
    encode, encode_backward = (
        _make_encode(target, spec, plan, options),
        _make_encode_backward(target, spec, plan, options),
    )
    load_tangents, store = make_load_fragment(target, plan.x_twin, shape), make_store_fragment(target, plan.dx, shape)
    store_tangents = make_store_fragment(target, plan.dx_twin, shape)
    pack, unpack = make_pack(target, shape), make_unpack(target, shape)
    zeros = make_zeros_at_run_time(target, shape.n_elements)
    load_gradient = make_load_gradient(target, spec, shape, options.target_dtype)
    store_derivative = make_store_derivative(target, spec, shape)
    first_row_of, u32 = make_first_row_of(target, plan), target.u32

    def second_order(n_tiles, io):
        base = shared_base()
        tile, step = u32(block_index()), u32(n_blocks())
        while tile < n_tiles:
            first_row = first_row_of(tile)
            encode(base, io, first_row)
            warp_barrier()
            store_derivative(io, first_row, unpack(load_tangents(base)))
            warp_barrier()
            store(base, pack(load_gradient(io, first_row)))
            store_tangents(base, pack(zeros()))
            warp_barrier()
            encode_backward(base, io, first_row)
            warp_barrier()
            tile = u32(tile + step)

    return KernelBody("second_order", second_order, (("n_tiles", "u32"),), SECOND_ORDER_IO_PARAMETERS)


LARGEST_TANGENT_PLAN = KernelPlan("largest tangent", 4, 32, 4)


def make_largest_tangent_kernel(
    target: Target, spec: ModelSpec, options: SecondOrderOptions, dtype: str = "float16"
) -> KernelBody:
    """The bits of the largest tangent of a feature into `maximum`, which must hold 0 before. `dtype`: the table's."""
    target = target.storing(dtype)
    plan = LARGEST_TANGENT_PLAN
    shared_base = target.dynamic_shared_base()
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks
    memory = LargestTangentMemory(target, **_memory_options(options))
    parts = make_second_order_encoding(target, spec.encoding, memory, table_gradient=False)
    u32, f32, first_row_of = target.u32, target.f32, make_first_row_of(target, plan)

    @target.intrinsic(["u32"], "u32")
    def word_of(e, base):
        return e.add(base, e.shl(e.thread(), 2))

    @target.intrinsic(["u32"], "void")
    def clear(e, word):
        e.store_shared(word, "u32", [e.u32(0)])

    @target.intrinsic(["u32", "u64"], "void")
    def raise_maximum(e, word, maximum):
        e.maximum_global(maximum, e.load_shared(word, "u32")[0])

    def place(base, io, row, tile_row):
        return (
            io[X], io[X_STRIDE], row, io[TABLE], u32(0),
            io[FIRST_ROW], io[BATCH_SIZE], io[MAX_LEVELS], io[MAX_LEVEL_STRIDE],
            io[DIRECTIONS], io[DIRECTIONS_STRIDE], f32(1), word_of(base),
        )  # fmt: skip

    encode = make_encode_groups(target, plan, parts.encode, target.device(place))

    def largest_tangent(n_tiles, maximum, io):
        base = shared_base()
        clear(word_of(base))
        tile, step = u32(block_index()), u32(n_blocks())
        while tile < n_tiles:
            encode(base, io, first_row_of(tile))
            tile = u32(tile + step)
        raise_maximum(word_of(base), maximum)

    parameters = (("n_tiles", "u32"), ("maximum", "u64"))
    return KernelBody("largest_tangent", largest_tangent, parameters, SECOND_ORDER_IO_PARAMETERS)


def make_write_second_order_scales_kernel(target: Target) -> KernelBody:
    """`scales` (float32 [4], see second_order_io.py) from the bits of max |u| and of the largest tangent, in `maxima`.

    All four are normal float32 numbers; the powers of two are 1 where a maximum is 0 or not finite.
    """

    @target.intrinsic(["u64", "u64"], "void")
    def write(e, maxima, scales):
        def power_of_two(word: int, exponent_of_largest: int):
            """The biased exponent of 2^k that gives the largest element the exponent `exponent_of_largest`."""
            exponent = e.shr(e.load_global(maxima, "u32", 1, 4 * word, constant=False)[0], 23)
            usable = e.both(e.less(0, exponent), e.less(exponent, 255))
            sought = 254 + exponent_of_largest
            wanted = e.select(e.less(exponent, sought), e.sub(sought, exponent), e.u32(1))
            return e.minimum(e.select(usable, wanted, e.u32(127)), 253)

        gradient, directions = power_of_two(0, 3), power_of_two(1, -1)
        both = e.add(gradient, directions)
        result = e.minimum(e.select(e.less(both, 381), e.sub(381, both), e.u32(1)), 254)
        with e.when(e.equal(e.thread(), 0)):
            for i, exponent in enumerate((gradient, result, directions, e.sub(254, directions))):
                e.store_global(scales, "u32", [e.shl(exponent, 23)], offset=4 * i)

    def body(maxima, scales):
        write(maxima, scales)

    return KernelBody("write_scales", body, (("maxima", "u64"), ("scales", "u64")))
